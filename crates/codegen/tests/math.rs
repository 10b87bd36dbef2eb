//! Elementary functions in vectorized loops, over all magnitudes, compared with the C library in f64.
#![cfg(feature = "llvm")]

mod common;

use std::slice::from_ref;

use common::*;
use tilewright_codegen::Runtime;
use tilewright_ir::DType;
use tilewright_ir::expr::{BinaryOp, Expr, UnaryOp};

unsafe extern "C" {
    fn erf(x: f64) -> f64;
}

fn reference(op: UnaryOp, x: f64) -> f64 {
    match op {
        UnaryOp::Exp => x.exp(),
        UnaryOp::Expm1 => x.exp_m1(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Log1p => x.ln_1p(),
        UnaryOp::Tanh => x.tanh(),
        // SAFETY: `erf` is a pure function of the C library, to which every Rust program is linked.
        UnaryOp::Erf => unsafe { erf(x) },
        UnaryOp::Floor => x.floor(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::Round => x.round_ties_even(),
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sqrt => panic!("not an elementary function"),
    }
}

/// Numbers of both signs and all magnitudes, more densely around 1, and special values.
fn arguments(dtype: DType) -> Vec<f64> {
    let limits = [88.0, 87.3, 103.3, 104.0, 709.7, 708.4, 744.5, 745.2, 17.3, 37.4, 9.01, 19.0, 3.9, 5.9, 1.0, 0.3466];
    let mut all = vec![0.0, f64::INFINITY, f64::NAN, f64::MIN_POSITIVE, 5e-324, f64::MAX];
    all.extend(limits.iter().flat_map(|l| (-500..500).map(move |i| l * (1.0 + f64::from(i) * 1e-5))));
    let mut numbers = Numbers(11);
    all.extend((0..60_000).map(|_| (numbers.next() * 1100.0).exp2()));
    all.extend((0..60_000).map(|_| (numbers.next() * 160.0).exp2()));
    all.extend((0..60_000).map(|_| (numbers.next() * 7.0).exp2()));
    all.extend((0..60_000).map(|_| 1.0 + numbers.next() * 0.5));
    let mut all: Vec<f64> = all.iter().flat_map(|x| [*x, -x]).collect();
    if dtype == DType::F32 {
        all.iter_mut().for_each(|x| *x = f64::from(*x as f32));
    }
    all.truncate(all.len() / 16 * 16);
    all
}

/// Distance in units in the last place of the expected value.
fn ulps(dtype: DType, got: f64, expected: f64) -> f64 {
    let (fraction_bits, least_exponent) = if dtype == DType::F32 { (23.0, -126.0) } else { (52.0, -1022.0) };
    let rounded = if dtype == DType::F32 { f64::from(expected as f32) } else { expected };
    let same_sign = got != 0.0 || got.is_sign_negative() == rounded.is_sign_negative();
    if (got == rounded && same_sign) || (got.is_nan() && expected.is_nan()) {
        return 0.0;
    }
    let exponent = expected.abs().log2().floor().max(least_exponent);
    // In two steps, as the type may not represent the unit itself.
    let half = (-exponent / 2.0f64).exp2();
    let error = (got - expected).abs() * half * half * f64::exp2(fraction_bits);
    if error.is_nan() { f64::INFINITY } else { error }
}

#[test]
fn errors_are_a_few_units_in_the_last_place() {
    for (dtype, bound) in [(DType::F32, 2.5), (DType::F64, 4.0)] {
        let x = arguments(dtype);
        for op in [
            UnaryOp::Exp,
            UnaryOp::Expm1,
            UnaryOp::Log,
            UnaryOp::Log1p,
            UnaryOp::Tanh,
            UnaryOp::Erf,
            UnaryOp::Floor,
            UnaryOp::Ceil,
            UnaryOp::Round,
            UnaryOp::Sin,
            UnaryOp::Cos,
        ] {
            let mut p = program(&format!("{op:?} {dtype:?}"));
            let n = x.len() as i64;
            let a = input(&mut p, "A", dtype, &[n]);
            let b = output(&mut p, "B", dtype, &[n]);
            let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
            let at = times(16, i).add(&ix(l));
            let body = store(b, from_ref(&at), un(op, load(a, from_ref(&at))));
            p.body = vec![for_(i, n / 16, vec![vector(l, 16, vec![body])])];
            for target in targets() {
                for kernel in kernels(&p, &target) {
                    let got = run(&p, &kernel, &[x.clone(), vec![f64::NAN; x.len()]], &Runtime::serial(), 1);
                    let (worst, at) = got[1]
                        .iter()
                        .zip(&x)
                        .map(|(got, x)| (ulps(dtype, *got, reference(op, *x)), x))
                        .fold((0.0, &0.0), |worst, this| if this.0 > worst.0 { this } else { worst });
                    assert!(worst <= bound, "{} on {target}: {worst} units in the last place at {at:e}", p.name);
                }
            }
        }
    }
}

/// Checks the rounding of products in a softmax, which subtracts the largest of the rounded scaled logits:
/// the minuend must be rounded as well, or exponentials of large logits would be infinite.
#[test]
fn powers_of_scaled_numbers_less_their_largest_are_at_most_one() {
    const SCALE: f32 = 0.1;
    let mut numbers = Numbers(3);
    let x: Vec<f32> = (0..64).map(|_| (numbers.next() * 7e10) as f32).collect();
    let largest = x.iter().map(|x| x * SCALE).fold(f32::NEG_INFINITY, f32::max);
    let mut p = program("softmax");
    let a = input(&mut p, "A", DType::F32, &[64]);
    let most = input(&mut p, "M", DType::F32, &[1]);
    let b = output(&mut p, "B", DType::F32, &[64]);
    let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
    let at = times(16, i).add(&ix(l));
    let scaled = Expr::binary(BinaryOp::Mul, load(a, from_ref(&at)), Expr::Const(f64::from(SCALE)));
    let less = Expr::binary(BinaryOp::Sub, scaled, load(most, &[ix(0)]));
    let body = store(b, from_ref(&at), un(UnaryOp::Exp, less));
    p.body = vec![for_(i, 4, vec![vector(l, 16, vec![body])])];
    let arguments = [x.iter().map(|x| f64::from(*x)).collect(), vec![f64::from(largest)], vec![f64::NAN; 64]];
    for target in targets() {
        for kernel in kernels(&p, &target) {
            let got = run(&p, &kernel, &arguments, &Runtime::serial(), 1);
            let most = got[2].iter().copied().fold(0.0, f64::max);
            assert!(most == 1.0, "{target}: the largest of the powers is {most}");
        }
    }
}

/// Checks that exponentials of masked logits do not underflow: each product that does takes some 150 cycles
/// on Intel's CPUs.
#[cfg(target_arch = "x86_64")]
#[test]
fn exponentials_of_masked_numbers_do_not_underflow() {
    const UNDERFLOW: u32 = 1 << 4;
    for (dtype, least) in [(DType::F32, f64::from(f32::MIN)), (DType::F64, f64::MIN)] {
        let x: Vec<f64> = [least, f64::NEG_INFINITY, -1e4, -1e9, 0.0, -1.0, 1.0, -80.0].repeat(8);
        let mut p = program(&format!("masked {dtype:?}"));
        let (a, b) = (input(&mut p, "A", dtype, &[64]), output(&mut p, "B", dtype, &[64]));
        let [i, l] = ["i", "l"].map(|name| p.add_loop(name));
        let at = times(16, i).add(&ix(l));
        let body = store(b, from_ref(&at), un(UnaryOp::Exp, load(a, from_ref(&at))));
        p.body = vec![for_(i, 4, vec![vector(l, 16, vec![body])])];
        for target in targets() {
            for kernel in kernels(&p, &target) {
                let mut flags = 0u32;
                // SAFETY: the control register of SSE is written with its own value, but for the flags.
                unsafe {
                    std::arch::asm!("stmxcsr [{}]", in(reg) &mut flags);
                    flags &= !0x3f;
                    std::arch::asm!("ldmxcsr [{}]", in(reg) &flags);
                }
                let got = run(&p, &kernel, &[x.clone(), vec![f64::NAN; 64]], &Runtime::serial(), 1);
                // SAFETY: as above, but only read.
                unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut flags) };
                assert!(got[1][..4].iter().all(|power| *power == 0.0), "{target}: {:?}", &got[1][..4]);
                assert_eq!(flags & UNDERFLOW, 0, "{target}, {dtype:?}: a product underflows");
            }
        }
    }
}
