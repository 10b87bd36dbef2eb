//! Conversions between floating-point numbers and integers: NaN, infinities, and the extremes of every type,
//! in vectors and their tails.

mod common;

use std::slice::from_ref;

use common::{bin, input, kernels, load, output, program, run_bytes, store, targets, un, vector};
use tilewright_codegen::Runtime;
use tilewright_ir::expr::{BinaryOp, Cond, Expr, UnaryOp};
use tilewright_ir::{DType, Index, Program};

const INTEGERS: [DType; 8] =
    [DType::I8, DType::U8, DType::I16, DType::U16, DType::I32, DType::U32, DType::I64, DType::U64];

/// Numbers around the extremes of all integer types, and NaN.
fn numbers(dtype: DType) -> Vec<f64> {
    let mut all = vec![0.0, f64::INFINITY, 1e30, 0.3, 0.5, 0.51, 1.0, 1.5, 2.5, 100.7];
    for bits in [7, 8, 15, 16, 23, 24, 31, 32, 52, 53, 63, 64] {
        let end = f64::from(bits).exp2();
        let around = match dtype {
            DType::F32 => [(end as f32).next_down(), (end as f32).next_up()].map(f64::from),
            _ => [end.next_down(), end.next_up()],
        };
        all.extend([end, end - 1.0, end - 0.5, around[0], around[1]]);
    }
    let negative: Vec<f64> = all.iter().map(|x| -x).collect();
    all.extend(negative);
    all.push(f64::NAN);
    all.iter().map(|x| dtype.round(*x)).collect()
}

/// Program that computes each element of an output from one of an input.
fn elementwise(from: DType, to: DType, n: usize, value: impl Fn(Expr) -> Expr) -> Program {
    let mut p = program(&format!("{from:?} {to:?}"));
    let (a, b) = (input(&mut p, "A", from, &[n as i64]), output(&mut p, "B", to, &[n as i64]));
    let i = p.add_loop("i");
    let at = Index::from(i);
    p.body = vec![vector(i, n as i64, vec![store(b, from_ref(&at), value(load(a, from_ref(&at))))])];
    p
}

/// Runs a program with every back end and returns the bytes of the output, with the back end's name.
fn results(p: &Program, given: &[u8], result_bytes: usize) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for target in targets() {
        for kernel in kernels(p, &target) {
            let arguments = [given.to_vec(), vec![0xa5; result_bytes]];
            let after = run_bytes(p, &kernel, &arguments, &Runtime::serial(), 1);
            all.push((format!("{} on {target}", p.name), after[1].clone()));
        }
    }
    all
}

fn in_memory(dtype: DType, x: &[f64]) -> Vec<u8> {
    let mut bytes = vec![0; x.len() * dtype.bytes() as usize];
    dtype.write(x, &mut bytes);
    bytes
}

/// Bytes of the integer converted from a number: towards zero in the arithmetic of the type, with saturation
/// and 0 for NaN, then the low bits.
fn converted(x: f64, to: DType) -> Vec<u8> {
    let arithmetic: i128 = match to {
        DType::U64 => (x as u64).into(),
        DType::I64 | DType::U32 => (x as i64).into(),
        _ => (x as i32).into(),
    };
    arithmetic.to_le_bytes()[..to.bytes() as usize].to_vec()
}

#[test]
fn every_number_becomes_an_integer_of_every_type() {
    for from in [DType::F32, DType::F64] {
        let x = numbers(from);
        for to in INTEGERS {
            let p = elementwise(from, to, x.len(), |x| Expr::cast(from, x));
            let expected: Vec<u8> = x.iter().flat_map(|x| converted(*x, to)).collect();
            for (name, got) in results(&p, &in_memory(from, &x), expected.len()) {
                let size = to.bytes() as usize;
                for ((x, got), expected) in x.iter().zip(got.chunks(size)).zip(expected.chunks(size)) {
                    assert_eq!(got, expected, "{name}: {x:e}");
                }
            }
        }
    }
}

/// Clips a value between bounds, with the lower one for NaN.
fn clip(x: Expr, [low, high]: [f64; 2]) -> Expr {
    let is_more = Cond::Less(Box::new(Expr::Const(low)), Box::new(x.clone()));
    let least = bin(BinaryOp::Min, x, Expr::Const(high));
    Expr::Select(Box::new(is_more), Box::new(least), Box::new(Expr::Const(low)))
}

#[test]
fn clipped_numbers_become_bytes_and_numbers_again() {
    let x = numbers(DType::F32);
    for (to, ends) in [(DType::U8, [0.0, 255.0]), (DType::I8, [-128.0, 127.0]), (DType::I16, [-32768.0, 32767.0])] {
        for rounds in [true, false] {
            let value = |x: Expr| {
                let scaled = bin(BinaryOp::Div, x, Expr::Const(0.75));
                let scaled = if rounds { un(UnaryOp::Round, scaled) } else { scaled };
                let moved = bin(BinaryOp::Add, scaled, Expr::Const(3.0));
                Expr::cast(to, Expr::cast(DType::F32, clip(moved, ends)))
            };
            let reference = |x: f64| {
                let scaled = x as f32 / 0.75;
                let moved = if rounds { scaled.round_ties_even() } else { scaled } + 3.0;
                let [low, high] = ends.map(|v| v as f32);
                if low < moved { moved.min(high) } else { low }.trunc()
            };
            let integers = elementwise(DType::F32, to, x.len(), value);
            let expected: Vec<u8> = x.iter().flat_map(|x| converted(reference(*x).into(), to)).collect();
            for (name, got) in results(&integers, &in_memory(DType::F32, &x), expected.len()) {
                assert_eq!(got, expected, "{name}, rounds: {rounds}");
            }
            let reals = elementwise(DType::F32, DType::F32, x.len(), |x| Expr::cast(DType::F32, value(x)));
            // Variant without the cast to the element type.
            let stored = elementwise(DType::F32, to, x.len(), |x| match value(x) {
                Expr::Cast(_, number) => *number,
                value => value,
            });
            for (name, got) in results(&stored, &in_memory(DType::F32, &x), expected.len()) {
                assert_eq!(got, expected, "{name}, as stored, rounds: {rounds}");
            }
            // Integers have no negative zero.
            let expected: Vec<u8> = x.iter().flat_map(|x| (reference(*x) + 0.0).to_le_bytes()).collect();
            for (name, got) in results(&reals, &in_memory(DType::F32, &x), expected.len()) {
                assert_eq!(got, expected, "{name}, as numbers, rounds: {rounds}");
            }
        }
    }
}

/// Checks that minimum and maximum keep NaN, which the cast converts to 0, for any bounds in any order.
#[test]
fn numbers_between_bounds_become_integers_and_nan_zero() {
    let x = numbers(DType::F32);
    let bounds = [(DType::U8, [0.0, 255.0]), (DType::I8, [0.0, 100.0]), (DType::I8, [-128.0, 127.0])];
    for (to, [low, high]) in bounds.into_iter().chain([(DType::U16, [0.0, 65535.0]), (DType::U8, [0.0, 99.5])]) {
        for (inner, outer, first, second) in
            [(BinaryOp::Max, BinaryOp::Min, low, high), (BinaryOp::Min, BinaryOp::Max, high, low)]
        {
            let value = |x: Expr| {
                let inside = bin(outer, bin(inner, x, Expr::Const(first)), Expr::Const(second));
                Expr::cast(to, Expr::cast(DType::F32, inside))
            };
            let expected: Vec<u8> =
                x.iter().flat_map(|x| converted(if x.is_nan() { 0.0 } else { x.clamp(low, high) }, to)).collect();
            let p = elementwise(DType::F32, to, x.len(), value);
            for (name, got) in results(&p, &in_memory(DType::F32, &x), expected.len()) {
                assert_eq!(got, expected, "{name}, {outer:?} {low} {high}");
            }
        }
    }
}

/// Checks that rounded numbers plus an integer are clipped to the range of a type, including saturation, NaN
/// and ties.
#[test]
fn quantized_numbers_saturate_and_round_to_even() {
    let halves = (-601..=601).map(|n| f64::from(n) / 2.0);
    let near = (-4..=4).flat_map(|n| [f64::from(n) + 65535.5, f64::from(n) - 65535.5]);
    let x: Vec<f64> = numbers(DType::F32).into_iter().chain(halves).chain(near).collect();
    for (to, ends) in [(DType::U8, [0.0, 255.0]), (DType::U16, [0.0, 65535.0]), (DType::I8, [-128.0, 127.0])] {
        // A zero point that is not an integer of the type is converted to one.
        for point in [0.0, 1.0, 100.0, 101.5, 127.0, ends[1], -1.0, f64::NAN] {
            let mut p = program(&format!("quantized to {to:?}, {point}"));
            let n = x.len() as i64;
            let (a, b) = (input(&mut p, "A", DType::F32, &[n]), output(&mut p, "B", to, &[n]));
            let z = input(&mut p, "Z", DType::F32, &[1]);
            let i = p.add_loop("i");
            let at = Index::from(i);
            let zero = Expr::cast(DType::F32, Expr::cast(to, load(z, &[Index::from(0)])));
            let moved = bin(BinaryOp::Add, un(UnaryOp::Round, load(a, from_ref(&at))), zero);
            let inside = bin(BinaryOp::Max, Expr::cast(DType::F32, moved), Expr::Const(ends[0]));
            let inside = bin(BinaryOp::Min, inside, Expr::Const(ends[1]));
            let value = Expr::cast(to, Expr::cast(DType::F32, inside));
            p.body = vec![vector(i, n, vec![store(b, from_ref(&at), value)])];
            let shift = to.wrap((point as i32).into()) as f32;
            let of = |x: f64| {
                let moved = f64::from((x as f32).round_ties_even() + shift);
                converted(if moved.is_nan() { 0.0 } else { moved.clamp(ends[0], ends[1]) }, to)
            };
            let expected: Vec<u8> = x.iter().flat_map(|x| of(*x)).collect();
            for target in targets() {
                for kernel in kernels(&p, &target) {
                    let mut given = [Vec::new(), vec![0xa5; expected.len()], Vec::new()];
                    (given[0], given[2]) = (in_memory(DType::F32, &x), in_memory(DType::F32, &[point]));
                    let after = run_bytes(&p, &kernel, &given, &Runtime::serial(), 1);
                    let at = after[1].iter().zip(&expected).position(|(got, expected)| got != expected);
                    let at = at.map(|at| x[at / to.bytes() as usize]);
                    assert_eq!(at, None, "{} on {target}", p.name);
                }
            }
        }
    }
}
