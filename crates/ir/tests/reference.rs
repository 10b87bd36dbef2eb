//! Trusted evaluator, compared with the interpreter, and tolerances.

mod common;

use common::{Conv, Random, arguments, conv2d, matmul, matmul_transposed, only, program, softmax};
use std::ops::ControlFlow;
use std::sync::Mutex;
use tilewright_ir::interp::{Fault, run};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::{Tolerance, evaluate, evaluate_watched, random_input, work};
use tilewright_ir::schedule::apply_all;
use tilewright_ir::{DType, Program, Step};

/// Compares with the interpreter on the same program in `f64`, where only the order of sums differs.
#[track_caller]
fn check(program: &Program, seed: u64) {
    let mut in_f64 = program.clone();
    in_f64.buffers.iter_mut().for_each(|b| b.dtype = DType::F64);
    let mut all = arguments(program, seed);
    let inputs = only(program, &all, false);
    let expected = run(&in_f64, &mut all).map(|()| only(program, &all, true));
    for n_threads in [1, 3] {
        match (evaluate(program, &inputs, n_threads), &expected) {
            (Ok(got), Ok(expected)) => {
                for (got, expected) in got.iter().zip(expected) {
                    let tolerance = Tolerance { abs: 1e-11, rel: 1e-11 };
                    tolerance.compare(got, expected).unwrap_or_else(|m| panic!("seed {seed}: {m}\n{program}"));
                }
            }
            (Err(got), Err(expected)) => {
                let kind = std::mem::discriminant::<Fault>;
                assert_eq!(kind(&got), kind(expected), "seed {seed}: {got} / {expected}\n{program}");
            }
            (got, expected) => {
                panic!("seed {seed}: {:?} / {:?}\n{program}", got.map(drop), expected.clone().map(drop))
            }
        }
    }
}

fn operator(text: &str) -> Program {
    Workload::parse(text).unwrap().program()
}

#[test]
fn operators_agree_with_the_interpreter() {
    for (m, n, k) in [(1, 1, 1), (1, 300, 7), (300, 1, 70), (17, 33, 129), (70, 5, 3), (2, 2, 200), (67, 259, 70)] {
        check(&matmul("f32", m, n, k), 1);
        check(&matmul_transposed(m, n, k), 2);
    }
    check(&conv2d(Conv { c: 3, h: 11, w: 9, k: 5, r: 3, stride: 1, pad: 1 }), 3);
    check(&conv2d(Conv { c: 2, h: 12, w: 13, k: 3, r: 5, stride: 2, pad: 2 }), 4);
    check(&conv2d(Conv { c: 70, h: 3, w: 3, k: 66, r: 1, stride: 1, pad: 0 }), 5);
    check(&softmax(9, 31), 6);
}

/// Random nest: an output with some axes, a reduction over others, and a random value of random loads.
fn random_nest(random: &mut Random) -> Program {
    let extents = (0..5).map(|_| random.pick(&[1, 2, 3, 5, 8, 13])).collect::<Vec<i64>>();
    let n_parallel = random.below(4);
    let n_reduction = random.below(3);
    let axes = ["a", "b", "c", "d", "e"];
    let (parallel, reduction) = (&axes[..n_parallel], &axes[3..3 + n_reduction]);
    let mut order = parallel.iter().chain(reduction).copied().collect::<Vec<_>>();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i + 1));
    }
    let extent = |axis: &str| extents[axes.iter().position(|a| *a == axis).unwrap()];
    let mut inputs = String::new();
    let subscript = |random: &mut Random| {
        let used = order.iter().copied().filter(|_| random.chance(60)).collect::<Vec<_>>();
        if used.is_empty() {
            return ("0".to_owned(), 1);
        }
        let (text, most) = used.iter().fold((String::new(), 0), |(text, most), axis| {
            let c = random.pick(&[1, 1, 1, 2, 3]);
            (format!("{text}{}{c}*{axis}", if text.is_empty() { "" } else { " + " }), most + c * (extent(axis) - 1))
        });
        match random.below(6) {
            0 => (format!("({text}) // 2"), most / 2 + 1),
            1 => (format!("({text}) % 3"), 3),
            2 => (format!("{most} - ({text})"), most + 1),
            3 => (format!("min({text}, 4)"), most.min(4) + 1),
            // Sometimes one element too few.
            4 if random.chance(20) => (text, most.max(1)),
            _ => (text, most + 1),
        }
    };
    let mut load = |random: &mut Random, name: &str| {
        let dims = (0..1 + random.below(3)).map(|_| subscript(random)).collect::<Vec<_>>();
        let join = |parts: Vec<String>| parts.join(", ");
        let shape = join(dims.iter().map(|(_, n)| n.to_string()).collect());
        inputs += &format!("buffer {name}: f32[{shape}] global input ");
        format!("{name}[{}]", join(dims.into_iter().map(|(s, _)| s).collect()))
    };
    let (x, y, z) = (load(random, "X"), load(random, "Y"), load(random, "Z"));
    let (i, j) = (subscript(random).0, subscript(random).0);
    let value = random.pick(&[
        format!("{x} * {y}"),
        x.clone(),
        format!("exp({x}) - {y} / {z}"),
        format!("select({i} < {j}, {x}, {y})"),
        format!("select({i} < 4 && not({j} == 2) && less({x}, {y}), {z}, tanh({x}))"),
        format!("max(min({x}, {y}), {z}) + index({i})"),
        format!("select(2 < {i}, X[{}], 1.5)", vec![format!("{i} - 3"); x.matches(',').count() + 1].join(", ")),
    ]);
    let zero = reduction.iter().map(|r| format!("{r} == 0")).collect::<Vec<_>>().join(" && ");
    let first = if zero.is_empty() { "true".to_owned() } else { zero };
    let mut out = parallel.iter().map(|a| ((*a).to_owned(), extent(a))).collect::<Vec<_>>();
    if random.chance(30) && out.len() > 1 {
        let ((a, na), (b, nb)) = (out.remove(0), out.remove(0));
        out.push((format!("{nb}*{a} + {b}"), na * nb));
    }
    if random.chance(30) {
        out.reverse();
    }
    let out_text = |with: &dyn Fn(&(String, i64)) -> String| out.iter().map(with).collect::<Vec<_>>().join(", ");
    let (index, shape) = (out_text(&|o| o.0.clone()), out_text(&|o| o.1.to_string()));
    let op = random.pick(&["+=", "max=", "min=", "+="]);
    let nest = |inner: &str| {
        let loops = order.iter().map(|a| format!("for {a} in {} {{ ", extent(a))).collect::<String>();
        format!("{loops}{inner}{}", " }".repeat(order.len()))
    };
    let mut body = if reduction.is_empty() && random.chance(50) {
        nest(&format!("O[{index}] = {value}"))
    } else {
        nest(&format!("O[{index}] {op} {value} first {first}"))
    };
    if random.chance(30) {
        body += &format!(" {}", nest(&format!("O[{index}] {op} {x} first never")));
    }
    program(&format!(
        "program \"random\" {inputs} buffer O: f32[{shape}] global output loops a, b, c, d, e run {{ {body} }}"
    ))
}

#[test]
fn random_nests_agree_with_the_interpreter() {
    for seed in 0..1500 {
        check(&random_nest(&mut Random::new(seed)), seed);
    }
}

/// Random sum of products over axes of one factor, of the other, of both and of neither, some of which are
/// added in subscripts as in convolutions.
fn random_contraction(random: &mut Random) -> Program {
    let extents: Vec<i64> = (0..7).map(|_| random.pick(&[1, 2, 3, 4, 7, 9, 30])).collect();
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    let extent = |axis: &str| extents[names.iter().position(|name| *name == axis).unwrap()];
    let shuffled = |random: &mut Random, axes: &[&'static str]| {
        let mut axes = axes.to_vec();
        (1..axes.len()).rev().for_each(|i| axes.swap(i, random.below(i + 1)));
        axes
    };
    let mut inputs = String::new();
    let mut factor = |random: &mut Random, name: &str, axes: &[&'static str]| {
        let axes = shuffled(random, axes);
        let (mut subscripts, mut shape) = (Vec::new(), Vec::new());
        let mut left = axes.as_slice();
        while let [first, rest @ ..] = left {
            let (mut text, mut most) = ((*first).to_owned(), extent(first) - 1);
            left = rest;
            if let ([second, rest @ ..], true) = (left, random.chance(30)) {
                let step = random.pick(&[1, 2, 3]);
                (text, most) = (format!("{text} + {step}*{second}"), most + step * (extent(second) - 1));
                left = rest;
            }
            subscripts.push(if random.chance(10) { format!("{most} - ({text})") } else { text });
            shape.push((most + 1).to_string());
        }
        inputs += &format!("buffer {name}: f32[{}] global input ", shape.join(", "));
        format!("{name}[{}]", subscripts.join(", "))
    };
    // Axes of X only, of Y only, of the reduction, and of both.
    let x = factor(random, "X", &["a", "b", "e", "f", "g"]);
    let y = factor(random, "Y", &["c", "d", "e", "f", "g"]);
    let to = shuffled(random, &["a", "b", "c", "d", "g"]);
    let shape = to.iter().map(|axis| extent(axis).to_string()).collect::<Vec<_>>().join(", ");
    let loops =
        shuffled(random, &names).iter().map(|axis| format!("for {axis} in {} {{ ", extent(axis))).collect::<String>();
    program(&format!(
        "program \"random\" {inputs} buffer O: f32[{shape}] global output loops a, b, c, d, e, f, g run {{
            {loops} O[{}] += {x} * {y} first e == 0 && f == 0 {} }}",
        to.join(", "),
        "}".repeat(names.len())
    ))
}

#[test]
fn random_contractions_agree_with_the_interpreter() {
    let mut n_checked = 0;
    for seed in 0..300 {
        let program = random_contraction(&mut Random::new(seed));
        if work(&program) < 2e6 {
            check(&program, seed);
            n_checked += 1;
        }
    }
    assert!(n_checked > 150, "{n_checked}");
}

/// Checks that the zeros inserted by a transposed convolution, and nothing else, are skipped.
#[test]
fn inserted_zeros_are_left_out_and_nothing_else() {
    for text in [
        "conv2d_transpose:c=5,h=4,w=5,k=6,r=3,s=4,stride=3",
        "conv2d_transpose:c=3,h=6,w=3,k=1,r=4,s=4,stride=2,pad=1,n=2",
        "conv2d_transpose:c=4,h=5,w=6,k=9,r=3,s=5,stride_h=1,stride_w=4,out_pad_w=3",
        "conv2d_transpose:c=4,h=1,w=7,k=1,r=1,s=64,stride_w=16",
        "conv2d_transpose:c=6,h=1,w=1,k=5,r=3,s=3,stride=2",
        "conv2d_transpose:c=2,h=4,w=4,k=30,r=2,s=2,stride=2,dilation=3",
    ] {
        check(&operator(text), 7);
    }
    // A hundredth of the iterations of the loops.
    let spread = operator("conv2d_transpose:c=100,h=4,w=90,k=8,r=1,s=30,stride_w=10,stride_h=10");
    let plain = operator("conv2d:c=100,h=31,w=950,k=8,r=1,s=30,pad_left=15,pad_right=15");
    assert!(work(&spread) < work(&plain) / 5.0, "{} {}", work(&spread), work(&plain));
    // Zeros matter if the other factor has values that are not finite.
    let program = operator("conv2d_transpose:c=2,h=3,w=3,k=4,r=3,s=3,stride=2");
    let mut inputs = only(&program, &arguments(&program, 1), false);
    inputs[1][5] = f64::INFINITY;
    let out = evaluate(&program, &inputs, 1).unwrap().remove(0);
    assert!(out.iter().any(|x| x.is_nan()));
}

#[test]
fn an_evaluation_tells_how_far_it_is_and_can_be_ended() {
    for program in [
        matmul("f32", 300, 300, 300),
        softmax(600, 600),
        conv2d(Conv { c: 1, h: 400, w: 400, k: 1, r: 5, stride: 1, pad: 2 }),
    ] {
        let inputs = only(&program, &arguments(&program, 1), false);
        let told = Mutex::new(Vec::new());
        let watch = |part: f64| {
            told.lock().unwrap().push(part);
            ControlFlow::Continue(())
        };
        let watched = evaluate_watched(&program, inputs.clone(), 1, &watch).unwrap();
        assert_eq!(watched, evaluate(&program, &inputs, 1).unwrap());
        let told = told.into_inner().unwrap();
        assert!(told.len() > 2 && told.is_sorted(), "{}: {told:?}", program.name);
        assert!((0.7..=1.0).contains(told.last().unwrap()), "{}: {told:?}", program.name);
        let given_up = evaluate_watched(&program, inputs, 2, &|_| ControlFlow::Break(()));
        assert_eq!(given_up, Err(Fault::GivenUp));
    }
}

#[test]
fn other_forms_take_the_slow_path() {
    let body = "
        for a in 3 { alloc T for b in 4 { T[b] = X[a, b] } for b in 4 { O[a, b] = T[3 - b] * 2.0 } }
        for a in 3 { if a == 1 { for b in a + 3 { O[a, b] += 1.0 first never } } }
        for b in 4 { for a in 3 { O[1, b] max= X[a, b] first never } }";
    check(
        &program(&format!(
            "program \"p\" buffer X: f32[3, 4] global input buffer O: f32[3, 4] global output
            buffer T: f32[4] local temporary loops a, b run {{ {body} }}"
        )),
        1,
    );
    // Kept copy of a constant.
    check(
        &program(
            "program \"p\" buffer X: f32[3, 4] global const buffer O: f32[3, 4] global output
            buffer W: f32[4, 3] global kept loops a, b
            prepare { for a in 3 { for b in 4 { W[b, a] = X[a, b] } } }
            run { for a in 3 { for b in 4 { O[a, b] = W[b, a] } } }",
        ),
        1,
    );
}

#[test]
fn faults_are_found() {
    let faults = [
        ("for a in 4 { O[a] = X[a + 1] }", "X[4] is outside X[4] at a=3"),
        ("for a in 4 { O[a] = select(a < 1, X[a], X[2*a - 3]) }", "X[-1] is outside X[4] at a=1"),
        ("for a in 4 { O[a] = X[a // 2 + 3] }", "X[4] is outside X[4] at a=2"),
        ("for a in 4 { O[a] = X[a // 0] }", "division by zero in a // 0 at a=0"),
        ("for a in 3 { O[a] = X[a] }", "O[3] is never written"),
        ("for a in 4 { O[a] += X[a] first never }", "O[0] is read before it is written at a=0"),
        ("for a in 4 { O[a] = O[a] }", "O[0] is read before it is written at a=0"),
        ("O[0] = X[b]", "loop variable b is used outside its loop"),
    ];
    for (body, expected) in faults {
        let program = program(&format!(
            "program \"p\" buffer X: f32[4] global input buffer O: f32[4] global output loops a, b run {{ {body} }}"
        ));
        let got = evaluate(&program, &[vec![1.0; 4]], 2).map_err(|f| f.to_string());
        assert_eq!(got, Err(expected.to_owned()), "{body}");
    }
    let program = matmul("f32", 2, 2, 2);
    assert_eq!(evaluate(&program, &[], 1), Err(Fault::ArgumentCount { expected: 2, got: 0 }));
    let short = [vec![0.0; 4], vec![0.0; 3]];
    let fault = Fault::ArgumentLength { buffer: "B".into(), expected: 4, got: 3 };
    assert_eq!(evaluate(&program, &short, 1), Err(fault));
}

#[test]
fn inputs_are_as_documented() {
    let values = random_input(5, 10_000).collect::<Vec<_>>();
    assert!(values.iter().all(|x| (0.5..1.5).contains(&x.abs()) && f64::from(*x as f32) == *x));
    let mean = values.iter().sum::<f64>() / 1e4;
    let square = values.iter().map(|x| x * x).sum::<f64>() / 1e4;
    assert!(mean.abs() < 0.05 && (square - 1.0833).abs() < 0.02, "{mean} {square}");
    assert!(values.iter().copied().eq(random_input(5, 10_000)) && !values.iter().copied().eq(random_input(6, 10_000)));
}

/// Checks dot products of length `k` in `f32`, by a plain sum and by sums in 16 lanes, against trusted ones.
#[test]
fn tolerance_lets_rounding_pass_and_finds_one_wrong_product() {
    for (k, n) in [(1usize, 2000usize), (7, 2000), (129, 2000), (1024, 1000), (4096, 500), (65536, 60)] {
        let tolerance = Tolerance::for_program(&matmul("f32", n as i64, 1, k as i64));
        let a = random_input(k as u64, n * k).collect::<Vec<_>>();
        let b = random_input(k as u64 + 1, k).collect::<Vec<_>>();
        let mut outs = [Vec::new(), Vec::new(), Vec::new()];
        let mut trusted = Vec::new();
        for row in a.chunks(k) {
            trusted.push(row.iter().zip(&b).map(|(x, y)| x * y).sum::<f64>());
            let (mut plain, mut fused, mut lanes) = (0f32, 0f32, [0f32; 16]);
            for (i, (x, y)) in row.iter().zip(&b).enumerate() {
                let (x, y) = (*x as f32, *y as f32);
                plain += x * y;
                fused = x.mul_add(y, fused);
                lanes[i % 16] += x * y;
            }
            outs[0].push(plain);
            outs[1].push(fused);
            outs[2].push(lanes.iter().sum());
        }
        for out in outs {
            tolerance.compare(&out, &trusted).unwrap_or_else(|m| panic!("k = {k}: {m} {tolerance:?}"));
            // Smallest error of omitting a product.
            let mut wrong = out.clone();
            wrong[n / 2] += 0.25 * out[n / 2].signum();
            let found = tolerance.compare(&wrong, &trusted).unwrap_err();
            assert_eq!((found.n_wrong, found.first), (1, n / 2), "k = {k}");
        }
    }
}

#[test]
fn comparisons_see_nan_and_infinity() {
    let tolerance = Tolerance { abs: 0.1, rel: 0.0 };
    assert_eq!(tolerance.compare(&[1.05f32, f32::INFINITY], &[1.0, f64::INFINITY]), Ok(()));
    for (got, expected) in [(f64::NAN, 1.0), (1.0, f64::INFINITY), (1.2, 1.0), (1.0, f64::NAN)] {
        let m = tolerance.compare(&[1.0, got, 1.0], &[1.0, expected, 1.0]).unwrap_err();
        assert_eq!((m.n_wrong, m.first), (1, 1));
    }
    let m = tolerance.compare(&[5.0, 1.0, 3.0], &[1.0, 1.0, 1.0]).unwrap_err();
    assert_eq!((m.n_wrong, m.first, m.got, m.expected, m.max_error), (2, 0, 5.0, 1.0, 4.0));
}

/// Checks that `f32` results of whole programs stay within a tolerance that is not far too large.
#[test]
fn tolerance_fits_programs_of_several_stages() {
    let programs = [
        matmul("f32", 30, 40, 50),
        matmul("f64", 30, 40, 50),
        conv2d(Conv { c: 16, h: 10, w: 10, k: 8, r: 3, stride: 1, pad: 1 }),
        softmax(40, 100),
        operator("conv2d:c=64,h=8,w=8,k=16,r=3,s=3,pad=1,layout=blocked,epilogue=bias+add+relu"),
        operator("conv2d:c=64,h=8,w=8,k=16,r=3,s=3,pad=1,epilogue=clip"),
        operator("conv2d_transpose:c=64,h=8,w=8,k=16,r=3,s=3,stride=2,epilogue=tanh"),
        operator("dense:m=20,n=30,k=500,epilogue=bias+sigmoid"),
        operator("batch_matmul:b=3,m=20,n=30,k=100,epilogue=gelu"),
        operator("dense:m=20,n=30,k=2048,epilogue=bias+gelu"),
    ];
    for program in programs {
        let mut all = arguments(&program, 9);
        let trusted = evaluate(&program, &only(&program, &all, false), 2).unwrap();
        run(&program, &mut all).unwrap();
        let tolerance = Tolerance::for_program(&program);
        for (got, trusted) in only(&program, &all, true).iter().zip(&trusted) {
            tolerance.compare(got, trusted).unwrap_or_else(|m| panic!("{}: {m} {tolerance:?}", program.name));
            let largest = trusted.iter().fold(0f64, |m, x| m.max(x.abs()));
            assert!(tolerance.abs + tolerance.rel * largest < largest / 100.0, "{}: {tolerance:?}", program.name);
        }
    }
}

/// Checks that Winograd convolutions stay within their specific tolerance, which differs from that of direct
/// ones and is not far too large.
#[test]
fn tolerance_fits_minimal_filtering() {
    for (c, k) in [(1, 64), (3, 64), (16, 32), (64, 16), (300, 4)] {
        for tile in [2, 4] {
            let program = operator(&format!("conv2d:c={c},h=18,w=18,k={k},r=3,s=3,pad=1"));
            let steps = [Step::Winograd { buffer: "acc".into(), tile }];
            let scheduled = apply_all(&program, &steps).unwrap();
            let tolerance = Tolerance::for_schedule(&program, &steps);
            assert!(tolerance.abs >= Tolerance::for_program(&program).abs);
            let mut largest: f64 = 0.0;
            for seed in 0..3 {
                let mut all = arguments(&program, seed);
                let trusted = evaluate(&program, &only(&program, &all, false), 2).unwrap();
                run(&scheduled, &mut all).unwrap();
                let outputs = only(&program, &all, true);
                tolerance.compare(&outputs[0], &trusted[0]).unwrap_or_else(|m| panic!("{c} {tile}: {m} {tolerance:?}"));
                let errors = outputs[0].iter().zip(&trusted[0]).map(|(got, trusted)| (got - trusted).abs());
                largest = errors.fold(largest, f64::max);
            }
            let part = largest / tolerance.abs;
            assert!(tile == 2 || (0.1..0.6).contains(&part), "c = {c}: {part} of the tolerance");
        }
    }
}

/// Checks that sums that skip inserted zeros equal those over all elements, for any stride and padding.
#[test]
fn inserted_zeros_change_nothing() {
    let sizes = [
        "c=3,h=4,w=5,k=2,r=4,s=4,stride=2,pad=1",
        "n=2,c=2,h=3,w=4,k=3,r=2,s=3,stride_h=5,stride_w=4,pad_top=1,out_pad_w=2",
        "c=2,h=1,w=9,k=1,r=1,s=8,stride_w=3",
        "c=2,h=3,w=2,k=2,r=3,s=2,stride_h=4,stride_w=3,dilation_h=6,dilation_w=2,pad_left=3,pad_bottom=2",
        "c=1,h=1,w=1,k=1,r=3,s=3,stride=7,out_pad=6,pad_top=2",
        "c=2,h=6,w=2,k=2,r=2,s=2,stride=3,pad_top=4,layout=blocked,epilogue=bias+relu",
        "c=2,h=5,w=4,k=3,r=3,s=2",
    ];
    for sizes in sizes {
        let program = operator(&format!("conv2d_transpose:{sizes},dtype=f64"));
        let mut all = arguments(&program, 5);
        let trusted = evaluate(&program, &only(&program, &all, false), 3).unwrap();
        run(&program, &mut all).unwrap();
        for (got, trusted) in only(&program, &all, true).iter().zip(&trusted) {
            let close = got.iter().zip(trusted).all(|(a, b)| (a - b).abs() <= 1e-12 * b.abs().max(1.0));
            assert!(close, "{sizes}\n{got:?}\n{trusted:?}");
        }
    }
}

/// Evaluates a sum that would take 256 times as long with the zeros.
#[test]
fn elements_far_apart_meet_their_taps() {
    let program = operator("conv2d_transpose:c=64,h=1,w=224,k=1,r=1,s=1024,stride_w=256");
    let inputs = only(&program, &arguments(&program, 5), false);
    let trusted = evaluate(&program, &inputs, 1).unwrap();
    // Only the first tap contributes to the first column.
    let expected: f64 = (0..64).map(|c| inputs[0][c * 224] * inputs[1][c * 1024]).sum();
    assert!((trusted[0][0] - expected).abs() < 1e-9, "{} {expected}", trusted[0][0]);
}

#[test]
fn what_is_written_as_f32_is_rounded_where_a_tie_hangs_on_it() {
    // 25 × 0.1 is a tie in f32 only: the exact product is slightly more than 2.5. The same holds for 15 × 0.3
    // and 3 × 0.1666…, whose exact products are slightly more than 4.5 and 0.5.
    let n = 4;
    let program = operator(&format!("matmul:m=1,n={n},k=1,dtype=u8i8,epilogue=dequant+quant_u8"));
    let weights = [25.0, 15.0, 3.0, 35.0];
    let factors: Vec<f64> = [0.1f32, 0.3, 1.0 / 6.0, 0.1].map(f64::from).to_vec();
    let exact: Vec<f64> = weights.iter().zip(&factors).map(|(w, factor)| (w * factor).round_ties_even()).collect();
    let inputs = [vec![1.0], weights.to_vec(), factors, vec![0.0]];
    let found = evaluate(&program, &inputs, 1).unwrap().remove(0);
    assert_eq!((found, exact), (vec![2.0, 4.0, 0.0, 4.0], vec![3.0, 5.0, 1.0, 4.0]));
}
