//! Exact dot products of integers: kernels for every target that this machine can run, compared with
//! reference arithmetic.

mod common;

use common::{host, kernels, run_bytes, targets};
use tilewright_codegen::{Emit, Runtime, emit};
use tilewright_ir::schedule::{apply, parse_steps};
use tilewright_ir::{DType, Program, Target, lower, text, verify};

/// Product of `[m, k]` by `[k, n]` integers in a register tile, with columns packed in fours or pairs, or
/// with rows of `n`.
fn product(size: [i64; 3], factors: [DType; 2], lanes: i64, is_packed: bool) -> Program {
    product_of_panels(size, factors, lanes, is_packed.then_some(lanes))
}

/// Variant of [`product`] whose packed columns are in panels of `panel` columns.
fn product_of_panels([m, n, k]: [i64; 3], factors: [DType; 2], lanes: i64, panel: Option<i64>) -> Program {
    let [a, b] = factors.map(DType::name);
    let of_floats = tilewright_ir::op::Workload::parse(&format!("matmul:m={m},n={n},k={k}")).unwrap().program();
    let source = of_floats.to_string();
    let source = source.replacen("A: f32", &format!("A: {a}"), 1).replacen("B: f32", &format!("B: {b}"), 1);
    let program = text::parse(&source.replacen("C: f32", "C: i32", 1)).unwrap();
    let group = 4 / factors[0].bytes();
    let packing = panel.map_or(String::new(), |n| format!("stage B -> B.p 1/{n} 0/{group} 1%{n} 0%{group}"));
    let steps = format!(
        "split j {lanes} -> jv jl shrink
         split k 8 -> ko kr shrink
         split kr {group} -> ki kk shrink
         reorder jv ko ki kk i jl
         {packing}
         accumulate C at jv -> C.r
         vectorize jl
         unroll i
         unroll ki
         tensorize kk dot{group}"
    );
    let lines = steps.lines().map(str::trim).filter(|line| !line.is_empty());
    let steps = parse_steps(&lines.collect::<Vec<_>>().join("\n")).unwrap();
    let scheduled = steps.iter().fold(program, |p, step| apply(&p, step).unwrap());
    verify::verify(&scheduled).unwrap();
    lower::lower(&scheduled)
}

/// Decodes integers from bytes.
fn values(bytes: &[u8], dtype: DType) -> Vec<i64> {
    match dtype {
        DType::I8 => bytes.iter().map(|x| i64::from(*x as i8)).collect(),
        DType::I7 => bytes.iter().map(|x| i64::from((*x as i8).clamp(-64, 64))).collect(),
        DType::I16 => bytes.as_chunks().0.iter().map(|x| i64::from(i16::from_le_bytes(*x))).collect(),
        _ => bytes.iter().map(|x| i64::from(*x)).collect(),
    }
}

/// Target of this machine, if it has byte dot products, and others.
fn all_targets() -> Vec<Target> {
    let host = host();
    let mut all = targets();
    if host.dot4_lanes([false, true]) == 16 {
        all.push(Target { vector_bits: 256, n_vector_registers: 16, ..host });
    }
    all
}

/// Checks products of some types on each target, with random and with extreme numbers.
fn check(size: [i64; 3], lanes: i64, factors: [DType; 2]) {
    let [m, n, k] = size.map(|n| n as usize);
    let ends = [0u8, 1, 127, 128, 129, 255];
    let n_bytes = factors[0].bytes() as usize;
    let programs = [true, false].map(|is_packed| product(size, factors, lanes, is_packed));
    let all = programs.iter().flat_map(|program| all_targets().into_iter().map(move |target| (program, target)));
    for (program, target) in all {
        for kernel in kernels(program, &target) {
            for round in 0..6u8 {
                let mut state = u32::from(round) + 1;
                let mut byte = || {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let x = (state >> 24) as u8;
                    if round < 2 { x } else { ends[usize::from(x) % ends.len()] }
                };
                let mut a: Vec<u8> = (0..m * k * n_bytes).map(|_| byte()).collect();
                let mut b: Vec<u8> = (0..k * n * n_bytes).map(|_| byte()).collect();
                if round >= 4 {
                    a.fill([255, 128][usize::from(round) - 4]);
                    b.fill([127, 128][usize::from(round) - 4]);
                }
                let (of_a, of_b) = (values(&a, factors[0]), values(&b, factors[1]));
                // Buffers hold numbers of their types.
                for (bytes, (dtype, values)) in
                    [&mut a, &mut b].into_iter().zip(factors.into_iter().zip([&of_a, &of_b]))
                {
                    let numbers: Vec<f64> = values.iter().map(|x| *x as f64).collect();
                    dtype.write(&numbers, bytes);
                }
                let arguments = [a, b, vec![0xa5; 4 * m * n]];
                let got = run_bytes(program, &kernel, &arguments, &Runtime::serial(), 1).pop().unwrap();
                let (got, rest) = got.as_chunks::<4>();
                assert!(rest.is_empty());
                for (at, got) in got.iter().enumerate() {
                    let (i, j) = (at / n, at % n);
                    let expected = (0..k).map(|k_at| of_a[i * k + k_at] * of_b[k_at * n + j]).sum::<i64>() as i32;
                    let got = i32::from_le_bytes(*got);
                    assert_eq!(got, expected, "{size:?} {factors:?} on {target}, round {round}: [{i}, {j}]");
                }
            }
        }
    }
}

#[test]
fn products_of_integers_are_exact_on_every_machine() {
    let types = [DType::U8, DType::I8, DType::I7];
    for (size, lanes) in [([2, 16, 8], 16), ([3, 37, 10], 16), ([1, 5, 3], 8), ([2, 9, 1], 4), ([2, 20, 31], 8)] {
        for factors in types.iter().flat_map(|a| types.map(|b| [*a, b])) {
            check(size, lanes, factors);
        }
        check(size, lanes, [DType::I16; 2]);
    }
}

/// Checks that targets without byte dot products multiply 7-bit weights without widening.
#[test]
fn weights_of_7_bits_are_not_widened() {
    let count = |name: &str, of_weights: DType, word: &str| {
        let program = product([3, 16, 32], [DType::U8, of_weights], 16, true);
        let target = Target::named(name).unwrap();
        String::from_utf8(emit(&program, &target, Emit::Asm).unwrap()).unwrap().matches(word).count()
    };
    for name in ["x86-64-v3", "x86-64-v4"] {
        assert!(count(name, DType::I7, "vpmaddubsw") > 0 && count(name, DType::I8, "vpmaddubsw") == 0, "{name}");
        let [short, long] = [DType::I7, DType::I8].map(|of_weights| count(name, of_weights, "vpmaddwd"));
        assert!(2 * short <= long, "{name}: {short} of {long} products of 16-bit integers");
    }
    assert_eq!(count("x86-64", DType::I7, "pmaddubsw"), 0);
}

/// Checks that tiles that share a panel of columns read their parts as vectors.
#[test]
fn parts_of_panels_are_vectors() {
    let own = Target::named("x86-64-v4").unwrap();
    let target = Target { features: "+avx512vl,+avx512vnni".into(), ..own };
    for panel in [16, 64, 128] {
        let program = product_of_panels([3, 256, 32], [DType::U8, DType::I8], 16, Some(panel));
        let text = String::from_utf8(emit(&program, &target, Emit::Asm).unwrap()).unwrap();
        assert!(text.contains("vpdpbusd") && !text.contains("pinsrb"), "panels of {panel}: {text}");
    }
}

/// Checks that kernels with a run-time number of steps compute all of them with the dot product instruction.
#[test]
fn the_last_steps_are_dot_products_too() {
    let own = Target::named("x86-64-v4").unwrap();
    let target = Target { features: "+avx512vl,+avx512vnni".into(), ..own };
    let n_rows = 3;
    for (k, is_packed) in [(31, true), (31, false), (13, true), (13, false)] {
        let program = product([n_rows, 16, k], [DType::U8, DType::I8], 16, is_packed);
        let text = String::from_utf8(emit(&program, &target, Emit::Asm).unwrap()).unwrap();
        // LLVM merges some instructions for full products with those for fewer steps.
        let n = text.matches("vpdpbusd").count() as i64;
        assert!(n >= 2 * n_rows, "{n} dot products of {k} steps: {text}");
        assert!(!text.contains("vpmulld") && !text.contains("vpmaddwd"), "{text}");
    }
}

/// Checks that elements after the last step of pairs of bf16 numbers may have any value.
#[test]
fn nothing_comes_of_what_lies_behind_the_last_step() {
    let text = "program \"pairs\"\nbuffer a: bf16[2, 2] global input\nbuffer b: bf16[2, 16, 2] global input\n\
                buffer out: f32[16] global output\nloops i, t, k, l\nrun {\nvectorized i in 16 {\n out[i] = 0.0\n}\n\
                for t in 2 {\ndot2 k in min(2, 3 - 2*t) {\nvectorized l in 16 {\n\
                out[l] += a[t, k] * b[t, l, k] first never\n}\n}\n}\n}\n";
    let program = lower::lower(&text::parse(text).unwrap());
    let (one, infinite) = (0x3f80u16, 0x7f80u16);
    let bytes = |numbers: &[u16]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let a = bytes(&[one, one, one, infinite]);
    let b = bytes(&(0..64).map(|at| if at > 32 && at % 2 == 1 { infinite } else { one }).collect::<Vec<u16>>());
    for target in all_targets() {
        for kernel in kernels(&program, &target) {
            let arguments = [a.clone(), b.clone(), vec![0xa5; 64]];
            let got = run_bytes(&program, &kernel, &arguments, &Runtime::serial(), 1).pop().unwrap();
            assert_eq!(got, 3f32.to_le_bytes().repeat(16), "{target}");
        }
    }
}

/// Sums of `a` rounded to bf16, in a copy with one of two layouts, times `b`; with `others`, the copy is also
/// read outside of dot products.
fn rounded_sums(is_interleaved: bool, others: bool) -> Program {
    let fill = match is_interleaved {
        true => "vectorized i in 16 {\n c[2*i] = a[2*i]\n c[2*i + 1] = a[2*i + 1]\n}\n",
        false => "for h in 2 {\nvectorized i in 16 {\n c[16*h + i] = a[16*h + i]\n}\n}\n",
    };
    let rest = if others { "for j in 16 {\n out[j] += c[2*j] first never\n}\n" } else { "" };
    let text = format!(
        "program \"rounded\"\nbuffer a: f32[32] global input\nbuffer b: bf16[16, 2] global input\n\
         buffer out: f32[16] global output\nbuffer c: bf16[32] local temporary\nloops h, i, j, k, l\n\
         run {{\nalloc c\n{fill}vectorized j in 16 {{\n out[j] = 0.0\n}}\ndot2 k in 2 {{\nvectorized l in 16 {{\n\
         out[l] += c[2*l + k] * b[l, k] first never\n}}\n}}\n{rest}}}\n"
    );
    lower::lower(&text::parse(&text).unwrap())
}

/// Checks that copies read only by bf16 dot products are rounded by a single instruction, if available, which
/// flushes subnormal numbers to zero, as the products do.
#[test]
fn copies_for_pairs_are_rounded_by_an_instruction() {
    let own = Target::named("x86-64-v4").unwrap();
    let with_pairs = Target { features: "+avx512vl,+avx512bf16".into(), cpu: "znver5".into(), ..own };
    for (is_interleaved, others) in [(true, false), (false, false), (true, true), (false, true)] {
        let program = rounded_sums(is_interleaved, others);
        let assembly = String::from_utf8(emit(&program, &with_pairs, Emit::Asm).unwrap()).unwrap();
        assert_eq!(assembly.contains("vcvtneps2bf16"), !others, "{is_interleaved} {assembly}");
        // Numbers between two bf16 numbers, on either side of the midpoint and on it, and around the smallest
        // normal one.
        let tails = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x1_8000, 0x1_7fff];
        let heads = [0x3f80_0000u32, 0xc2fe_0000, 0x0080_0000, 0x007f_0000];
        let a: Vec<u32> = (0..32).map(|at| heads[at / 8] + tails[at % 8]).collect();
        let nearest = |x: u32| (x + 0x7fff + (x >> 16 & 1)) & 0xffff_0000;
        let is_normal = |x: u32| x & 0x7f80_0000 != 0;
        let arguments = [
            a.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>(),
            [0x3f80u16, 0].repeat(16).iter().flat_map(|x| x.to_le_bytes()).collect(),
            vec![0xa5; 64],
        ];
        for target in all_targets() {
            let flushes = target.dot2_lanes() > 0;
            for kernel in kernels(&program, &target) {
                let got = run_bytes(&program, &kernel, &arguments, &Runtime::serial(), 1).pop().unwrap();
                for (at, (got, x)) in got.as_chunks::<4>().0.iter().zip(a.iter().step_by(2)).enumerate() {
                    let (got, rounded) = (f32::from_le_bytes(*got), f32::from_bits(nearest(*x)));
                    let is_zero = flushes && (!is_normal(*x) && !others || !is_normal(nearest(*x)));
                    let product = if is_zero { 0.0 } else { rounded };
                    let expected = if others { product + rounded } else { product };
                    assert_eq!(got, expected, "{target} {is_interleaved} {others}: {at} of {x:x}");
                }
            }
        }
    }
}
