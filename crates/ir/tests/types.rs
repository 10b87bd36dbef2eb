//! Element types other than `f32` and `f64`, and casts: the interpreter against expected values, the trusted
//! evaluator against the interpreter.

mod common;

use common::{only, program};
use tilewright_ir::interp::run;
use tilewright_ir::lower::lower;
use tilewright_ir::reference::{Tolerance, evaluate, random_elements};
use tilewright_ir::schedule::{Tail, apply_all};
use tilewright_ir::verify::check;
use tilewright_ir::{Program, Role, Step};

/// Matrix product of bytes with 32-bit sums, then requantized to bytes.
fn quantized(m: i64, n: i64, k: i64) -> Program {
    program(&format!(
        "program \"quantized\"
        buffer X: u8[{m}, {k}] global input
        buffer W: i8[{k}, {n}] global const
        buffer scale: f32[{n}] global input
        buffer Y: i8[{m}, {n}] global output
        buffer S: i32[{m}, {n}] global output
        loops i, j, k, oi, oj
        run {{
            for i in {m} {{ for j in {n} {{ for k in {k} {{ S[i, j] += X[i, k] * W[k, j] first k == 0 }} }} }}
            for oi in {m} {{ for oj in {n} {{
                Y[oi, oj] = i32(f32(S[oi, oj] * scale[oj] / 1000.0)) + 1.0
            }} }}
        }}"
    ))
}

fn arguments(program: &Program) -> Vec<Vec<f64>> {
    let fill = |(at, b): (u64, &tilewright_ir::Buffer)| match b.role {
        Role::Output => vec![0.0; b.n_elements().unwrap() as usize],
        _ => random_elements(b.dtype, at, b.n_elements().unwrap() as usize).collect(),
    };
    (0..).zip(program.arguments().map(|(_, b)| b)).map(fill).collect()
}

/// Runs a program on random inputs.
fn outputs(program: &Program) -> Vec<Vec<f64>> {
    let mut all = arguments(program);
    run(program, &mut all).unwrap_or_else(|fault| panic!("{fault}\n{program}"));
    only(program, &all, true)
}

#[test]
fn bytes_multiply_into_words_and_back() {
    let (m, n, k) = (5, 7, 33);
    let program = quantized(m, n, k);
    assert_eq!(check(&program).unwrap(), []);
    let inputs = only(&program, &arguments(&program), false);
    let (y, s) = (&outputs(&program)[0], &outputs(&program)[1]);
    for (at, (y, s)) in y.iter().zip(s).enumerate() {
        let (i, j) = (at / n as usize, at % n as usize);
        let product = |p: usize| inputs[0][i * k as usize + p] as i32 * inputs[1][p * n as usize + j] as i32;
        let sum: i32 = (0..k as usize).map(product).sum();
        assert_eq!(*s, f64::from(sum));
        let scaled = sum as f32 * inputs[2][j] as f32 / 1000.0;
        assert_eq!(*y, f64::from((scaled as i32 + 1) as i8), "{i}, {j}");
    }
}

#[test]
fn the_trusted_result_is_exact_for_whole_numbers() {
    let program = quantized(5, 7, 300);
    let reference = evaluate(&program, &only(&program, &arguments(&program), false), 2).unwrap();
    let sums = &outputs(&program)[1];
    assert_eq!(&reference[1], sums);
    // Values computed in floating point may differ in the last digit.
    let tolerance = Tolerance::for_program(&program);
    assert!((1.0..3.0).contains(&tolerance.abs), "{tolerance:?}");
    tolerance.compare(&outputs(&program)[0], &reference[0]).unwrap();
    let mut products_alone = program;
    products_alone.body.pop();
    products_alone.buffers[3].role = Role::Temporary;
    assert_eq!(Tolerance::for_program(&products_alone), Tolerance { abs: 0.0, rel: 0.0 });
}

#[test]
fn schedules_keep_what_whole_numbers_are() {
    let program = quantized(12, 32, 20);
    let split = |target: &str, factor, outer: &str, inner: &str| {
        let (target, outer, inner) = (target.into(), outer.into(), inner.into());
        Step::Split { target, factor, tail: Tail::Shrink, outer, inner }
    };
    let steps = [
        split("i", 4, "io", "ii"),
        split("j", 8, "jo", "ji"),
        Step::Reorder { loops: ["io", "jo", "k", "ii", "ji"].map(str::to_owned).to_vec() },
        Step::Accumulate { buffer: "S".into(), at: "jo".into(), name: "S.r".into() },
        Step::Unroll { target: "ii".into() },
        Step::Vectorize { target: "ji".into() },
        split("oj", 8, "ojo", "oji"),
        Step::Vectorize { target: "oji".into() },
        Step::Parallel { target: "io".into() },
    ];
    let scheduled = apply_all(&program, &steps).unwrap_or_else(|(at, e)| panic!("step {at}: {e}"));
    let lowered = lower(&scheduled);
    assert_eq!((outputs(&scheduled), outputs(&lowered)), (outputs(&program), outputs(&program)));
    assert_eq!(Tolerance::for_schedule(&program, &steps), Tolerance::for_program(&program));
}

#[test]
fn halves_are_stored_and_singles_computed() {
    for dtype in ["f16", "bf16"] {
        let program = program(&format!(
            "program \"halves\"
            buffer X: {dtype}[9, 65] global input
            buffer W: {dtype}[65, 11] global input
            buffer Y: {dtype}[9, 11] global output
            buffer S: f32[9, 11] global temporary
            loops i, j, k, oi, oj
            run {{
                alloc S
                for i in 9 {{ for j in 11 {{ for k in 65 {{ S[i, j] += X[i, k] * W[k, j] first k == 0 }} }} }}
                for oi in 9 {{ for oj in 11 {{ Y[oi, oj] = max(S[oi, oj], 0.0) }} }}
            }}"
        ));
        let got = &outputs(&program)[0];
        let output = program.buffers[2].dtype;
        assert!(got.iter().all(|x| output.round(*x) == *x), "{dtype}");
        let reference = evaluate(&program, &only(&program, &arguments(&program), false), 1).unwrap();
        let tolerance = Tolerance::for_program(&program);
        tolerance.compare(got, &reference[0]).unwrap();
        // An omitted product is detected.
        assert!(tolerance.abs < 0.25 && tolerance.rel < 0.05, "{dtype}: {tolerance:?}");
    }
}

#[test]
fn casts_round_to_their_type_and_compute_in_its_arithmetic() {
    #[track_caller]
    fn is(dtype: &str, value: &str, expected: f64) {
        let text = format!(
            "program \"cast\" buffer X: f64[1] global input buffer Y: {dtype}[1] global output loops i
            run {{ for i in 1 {{ Y[i] = {value} }} }}"
        );
        let program = program(&text);
        assert_eq!(tilewright_ir::text::parse(&program.to_string()).as_ref(), Ok(&program));
        let mut all = vec![vec![2.7], vec![0.0]];
        run(&program, &mut all).unwrap();
        assert_eq!(all[1][0], expected, "{value}");
    }
    is("f64", "i32(X[0])", 2.0);
    is("f64", "i32(neg(X[0]))", -2.0);
    is("f64", "f16(X[0])", 2.69921875);
    is("f64", "f32(X[0])", f64::from(2.7f32));
    is("f64", "bool(X[0]) + bool(0.0)", 1.0);
    is("f64", "i32(X[0]) / 2.0", 1.0);
    is("f64", "i32(i32(X[0]) + 1.0) / 2.0", 1.5);
    is("f64", "i32(7.0 / 2.0)", 3.0);
    // Values beyond a narrow integer type keep their low bits.
    is("f64", "u8(neg(X[0]))", 254.0);
    is("f64", "i8(X[0] * 100.0)", -56.0);
    is("f64", "u16(neg(X[0]))", 65534.0);
    is("f64", "u32(neg(X[0]))", 4294967294.0);
    is("i64", "9007199254740992.0 + 1.0 - 9007199254740992.0", 1.0);
    is("i64", "i64(7.0) / i64(0.0)", 0.0);
    is("i32", "X[0] * 10.0", 20.0);
    is("i32", "f64(X[0] * 10.0)", 27.0);
    is("f64", "select(less(i32(X[0]), 2.5), 1.0, 0.0)", 1.0);
}
