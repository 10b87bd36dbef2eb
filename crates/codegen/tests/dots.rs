//! Dot products of bytes, to the last bit: kernels of every machine that runs here against arithmetic written
//! here.

mod common;

use common::{host, kernels, run_bytes, targets};
use tilewright_codegen::Runtime;
use tilewright_ir::schedule::{apply, parse_steps};
use tilewright_ir::{DType, Program, Target, lower, text, verify};

/// A product of `[m, k]` by `[k, n]` bytes in a register tile, with columns packed in fours, or rows of `n`.
fn product([m, n, k]: [i64; 3], factors: [DType; 2], lanes: i64, is_packed: bool) -> Program {
    let [a, b] = factors.map(DType::name);
    let of_floats = tilewright_ir::op::Workload::parse(&format!("matmul:m={m},n={n},k={k}")).unwrap().program();
    let source = of_floats.to_string();
    let source = source.replacen("A: f32", &format!("A: {a}"), 1).replacen("B: f32", &format!("B: {b}"), 1);
    let program = text::parse(&source.replacen("C: f32", "C: i32", 1)).unwrap();
    let packing = if is_packed { format!("stage B -> B.p 1/{lanes} 0/4 1%{lanes} 0%4") } else { String::new() };
    let steps = format!(
        "split j {lanes} -> jv jl shrink
         split k 8 -> ko kr shrink
         split kr 4 -> ki kk shrink
         reorder jv ko ki kk i jl
         {packing}
         accumulate C at jv -> C.r
         vectorize jl
         unroll i
         unroll ki
         tensorize kk dot4"
    );
    let lines = steps.lines().map(str::trim).filter(|line| !line.is_empty());
    let steps = parse_steps(&lines.collect::<Vec<_>>().join("\n")).unwrap();
    let scheduled = steps.iter().fold(program, |p, step| apply(&p, step).unwrap());
    verify::verify(&scheduled).unwrap();
    lower::lower(&scheduled)
}

fn value(byte: u8, dtype: DType) -> i64 {
    if dtype == DType::I8 { i64::from(byte as i8) } else { i64::from(byte) }
}

/// The machine's own target, if it multiplies bytes, and others.
fn all_targets() -> Vec<Target> {
    let host = host();
    let mut all = targets();
    if host.dot4_lanes([false, true]) == 16 {
        all.push(Target { vector_bits: 256, n_vector_registers: 16, ..host });
    }
    all
}

#[test]
fn products_of_bytes_are_exact_on_every_machine() {
    let types = [DType::U8, DType::I8];
    let ends = [0u8, 1, 127, 128, 129, 255];
    for (size, lanes) in [([2, 16, 8], 16), ([3, 37, 10], 16), ([1, 5, 3], 8), ([2, 9, 1], 4), ([2, 20, 31], 8)] {
        let [m, n, k] = size.map(|n| n as usize);
        for factors in types.iter().flat_map(|a| types.map(|b| [*a, b])) {
            let programs = [true, false].map(|is_packed| product(size, factors, lanes, is_packed));
            let all =
                programs.iter().flat_map(|program| all_targets().into_iter().map(move |target| (program, target)));
            for (program, target) in all {
                for kernel in kernels(program, &target) {
                    for round in 0..6u8 {
                        let mut state = u32::from(round) + 1;
                        let mut byte = || {
                            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                            let x = (state >> 24) as u8;
                            if round < 2 { x } else { ends[usize::from(x) % ends.len()] }
                        };
                        let mut a: Vec<u8> = (0..m * k).map(|_| byte()).collect();
                        let mut b: Vec<u8> = (0..k * n).map(|_| byte()).collect();
                        if round >= 4 {
                            a.fill([255, 128][usize::from(round) - 4]);
                            b.fill([127, 128][usize::from(round) - 4]);
                        }
                        let arguments = [a.clone(), b.clone(), vec![0xa5; 4 * m * n]];
                        let got = run_bytes(program, &kernel, &arguments, &Runtime::serial(), 1).pop().unwrap();
                        let (got, rest) = got.as_chunks::<4>();
                        assert!(rest.is_empty());
                        for (at, got) in got.iter().enumerate() {
                            let (i, j) = (at / n, at % n);
                            let products = (0..k)
                                .map(|k_at| value(a[i * k + k_at], factors[0]) * value(b[k_at * n + j], factors[1]));
                            let expected = products.sum::<i64>();
                            let got = i64::from(i32::from_le_bytes(*got));
                            assert_eq!(got, expected, "{size:?} {factors:?} on {target}, round {round}: [{i}, {j}]");
                        }
                    }
                }
            }
        }
    }
}
