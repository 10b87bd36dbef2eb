//! Elementary functions on vectors, as inline code.
//!
//! Scalars call the C library, so a lane and a scalar may differ in the last bits. `tests/math.rs` asserts
//! the largest errors, in units in the last place against the C library in f64: at most 2.5 for `f32`, 4 for
//! `f64`. Infinities, NaN, signed zeros and subnormal numbers are handled correctly.
//!
//! The coefficients are original minimax fits, by Remez's exchange algorithm in 60 digits, with weights for
//! the error relative to the result; the error of each fit is noted next to it.

use tilewright_ir::expr::UnaryOp;
use tilewright_ir::target::Arch;
use tilewright_ir::{DType, Target};

use super::Generator;
use crate::ssa::{Id, RoundingDirection, SsaOp, Type};

/// Constants of an element type.
struct FloatFormat {
    /// Number of fraction bits of the significand.
    fraction_bits: u32,
    exponent_bias: i64,
    /// Smallest argument whose exponential is infinite.
    exp_infinite: f64,
    /// Argument below which an exponential rounds to zero.
    exp_zero: f64,
    /// Argument below which both powers of two that make an exponential are zero, so that no product
    /// underflows: Intel's CPUs take some 150 cycles for each that does.
    powers_zero: f64,
    /// Arguments up to minus this have exponentials that are negligible compared with 1.
    expm1_one: f64,
    /// ln 2 in two parts; the first is so short that its product with an exponent is exact (Cody and Waite,
    /// "Software Manual for the Elementary Functions", 1980).
    ln_2: [f64; 2],
    /// Polynomial of (eˣ − 1 − x) / x² in x for |x| ≤ ½ ln 2.
    exp: &'static [f64],
    /// Polynomial of (atanh(s) / s − 1) / s² in s² for |s| ≤ (√2 − 1) / (√2 + 1).
    log: &'static [f64],
    /// Smallest argument whose hyperbolic tangent is 1.
    tanh_one: f64,
    /// Polynomial of erf(x) / x − 1 in x² for |x| ≤ `ERF_LOW`.
    erf_low: &'static [f64],
    /// Polynomial of the fourth root of 1 − erf(x) in x − `erf_center` for `ERF_LOW` ≤ x ≤ `erf_one`, where
    /// the error function becomes 1.
    erf_high: &'static [f64],
    erf_center: f64,
    erf_one: f64,
}

/// Limit up to which the error function is computed relative to its argument, and beyond which relative to 1.
const ERF_LOW: f64 = 1.1;

const SINGLE: FloatFormat = FloatFormat {
    fraction_bits: 23,
    exponent_bias: 127,
    exp_infinite: 89.0,
    exp_zero: -103.98,
    powers_zero: -176.06,
    expm1_one: 18.0,
    ln_2: [0.693145751953125, 1.4286068203094173e-06],
    // 1.3e-8 of eˣ − 1
    exp: &[0.500000006187795, 0.16666542978152632, 0.04166628226847864, 0.008366585340842942, 0.0013946433963926785],
    // 8.1e-10
    log: &[0.3333338820480005, 0.19988768789607694, 0.14935924385223762],
    tanh_one: 9.1,
    // 4.4e-9
    erf_low: &[
        0.12837916222613704,
        -0.3761260057229102,
        0.11283292092426875,
        -0.02684144972993315,
        0.005164870523140285,
        -0.000780581727320215,
        7.188003712383772e-05,
    ],
    // 1.2e-8 of the error function
    erf_high: &[
        0.26152226747130647,
        -0.2888630887491596,
        0.09913716259595362,
        0.0069156103296774095,
        -0.012221426414826559,
        0.0015123330676262746,
        0.0007214808605706193,
        -0.00017560896014534,
    ],
    erf_center: 2.0,
    erf_one: 4.0,
};

const DOUBLE: FloatFormat = FloatFormat {
    fraction_bits: 52,
    exponent_bias: 1023,
    exp_infinite: 710.0,
    exp_zero: -745.14,
    powers_zero: -1418.18,
    expm1_one: 38.0,
    ln_2: [0.6931471805598903, 5.497923018708371e-14],
    // 1.8e-17 of eˣ − 1
    exp: &[
        0.5000000000000006,
        0.16666666666666685,
        0.04166666666657362,
        0.008333333333314548,
        0.0013888888932380285,
        0.00019841269903113438,
        2.4801504443868243e-05,
        2.7557227889080416e-06,
        2.762632739803149e-07,
        2.5114491310876775e-08,
    ],
    // 1.2e-18
    log: &[
        0.3333333333333367,
        0.19999999999707171,
        0.14285714371235642,
        0.11111099281871642,
        0.09091782429266729,
        0.07657017958906222,
        0.07398052889547503,
    ],
    tanh_one: 19.1,
    // 1.5e-18
    erf_low: &[
        0.12837916709551256,
        -0.3761263890318371,
        0.11283791670953104,
        -0.026866170644768154,
        0.00522397762204471,
        -0.0008548326833725072,
        0.00012055326161165055,
        -1.4925485496997834e-05,
        1.6459374914284692e-06,
        -1.6334391258915444e-07,
        1.4560735725750295e-08,
        -1.1018358341702766e-09,
        5.4010910583915446e-11,
    ],
    // 2.9e-17 of the error function
    erf_high: &[
        0.1420318688298665,
        -0.19006281257809515,
        0.09365244705818451,
        -0.012260002683005356,
        -0.006484413808958246,
        0.002642869270636492,
        -9.542032539336715e-06,
        -0.0001832394184832101,
        2.952026526187435e-05,
        5.773291635041705e-06,
        -2.1658988178625215e-06,
        -6.803684823485002e-09,
        8.798962760815971e-08,
        -7.947541337918949e-09,
        -2.414875833315154e-09,
        4.559045719824133e-10,
        3.896623743443997e-11,
        -1.4467653767975469e-11,
        -8.492738155101984e-16,
        1.798634771482435e-13,
    ],
    erf_center: 2.5,
    erf_one: 6.0,
};

/// (sin(x) / x − 1) / x² and (cos(x) − 1) / x² in x²: Taylor's series, to 8e-20 up to π/4.
const SINE: [f64; 8] = [
    -0.16666666666666666,
    0.008333333333333333,
    -0.0001984126984126984,
    2.7557319223985893e-06,
    -2.505210838544172e-08,
    1.6059043836821613e-10,
    -7.647163731819816e-13,
    2.8114572543455206e-15,
];
const COSINE: [f64; 9] = [
    -0.5,
    0.041666666666666664,
    -0.001388888888888889,
    2.48015873015873e-05,
    -2.755731922398589e-07,
    2.08767569878681e-09,
    -1.1470745597729725e-11,
    4.779477332387385e-14,
    -1.5619206968586225e-16,
];
/// π/2 in parts of 53 bits.
const HALF_PI: [f64; 3] = [std::f64::consts::FRAC_PI_2, 6.123233995736766e-17, -1.4973849048591833e-33];

/// Vectors of one type, with the constants for their elements.
struct Math<'g, 'p> {
    g: &'g Generator<'p>,
    format: &'static FloatFormat,
    ty: Type,
    int: Type,
    n: usize,
}

impl Generator<'_> {
    /// Generates an elementary function of each lane of a vector; `None` for functions without inline code.
    pub(super) fn vector_math(&self, op: UnaryOp, x: Id, n: usize, dtype: DType) -> Option<Id> {
        let (format, int) = match dtype {
            DType::F32 => (&SINGLE, Type::I32),
            DType::F64 => (&DOUBLE, Type::I64),
            other => unreachable!("programs with {} are refused before", other.name()),
        };
        let math = Math { g: self, format, ty: self.arithmetic_type(dtype).vector(n), int: int.vector(n), n };
        match op {
            UnaryOp::Exp => Some(math.exp(x)),
            UnaryOp::Expm1 => Some(math.expm1(x)),
            UnaryOp::Log => Some(math.log(x, None)),
            UnaryOp::Log1p => Some(math.log1p(x)),
            UnaryOp::Tanh => Some(math.tanh(x)),
            UnaryOp::Erf => Some(math.erf(x)),
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sqrt | UnaryOp::Sin | UnaryOp::Cos => None,
            UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round => None,
        }
    }

    /// Sine or cosine of f64, or of each of `n` lanes, as code for GPUs, which have no C library.
    pub(super) fn circular(&self, op: UnaryOp, x: Id, n: usize) -> Id {
        let math = Math { g: self, format: &DOUBLE, ty: Type::F64.vector(n), int: Type::I64.vector(n), n };
        math.circular(op, x)
    }

    /// The integer that a value, or each lane of a vector of `n` lanes, is rounded to; `None` for other
    /// functions.
    pub(super) fn rounded(&self, op: UnaryOp, x: Id, n: usize, dtype: DType) -> Option<Id> {
        if !matches!(op, UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round) {
            return None;
        }
        if self.has_rounding() {
            let how = match op {
                UnaryOp::Floor => RoundingDirection::Down,
                UnaryOp::Ceil => RoundingDirection::Up,
                _ => RoundingDirection::Nearest,
            };
            return Some(self.m.unary(SsaOp::Round(how), x));
        }
        let n = n.max(1);
        let (format, int) = if dtype == DType::F32 { (&SINGLE, Type::I32) } else { (&DOUBLE, Type::I64) };
        let math = Math { g: self, format, ty: self.arithmetic_type(dtype).vector(n), int: int.vector(n), n };
        let nearest = math.nearest(x);
        let one = math.real(1.0);
        let moved = match op {
            UnaryOp::Floor => math.where_less(x, nearest, math.sub(nearest, one), nearest),
            UnaryOp::Ceil => math.where_less(nearest, x, math.add(nearest, one), nearest),
            _ => nearest,
        };
        // Results that are zero keep the sign of the argument.
        Some(math.with_sign_of(moved, x))
    }
}

impl Math<'_, '_> {
    fn real(&self, v: f64) -> Id {
        self.g.m.splat(self.g.m.real(self.ty.element(), v), self.n)
    }

    fn integer(&self, v: i64) -> Id {
        self.g.m.splat(self.g.m.integer(self.int.element(), v), self.n)
    }

    fn add(&self, a: Id, b: Id) -> Id {
        self.g.m.binary(SsaOp::FAdd, a, b)
    }

    fn sub(&self, a: Id, b: Id) -> Id {
        self.g.m.binary(SsaOp::FSub, a, b)
    }

    fn mul(&self, a: Id, b: Id) -> Id {
        self.g.m.binary(SsaOp::FMul, a, b)
    }

    fn div(&self, a: Id, b: Id) -> Id {
        self.g.m.binary(SsaOp::FDiv, a, b)
    }

    /// `a · b + c`, rounded once if the machine has fused multiply-adds.
    fn mul_add(&self, a: Id, b: Id, c: Id) -> Id {
        if self.g.target.has_fma { self.g.m.fma(a, b, c) } else { self.add(self.mul(a, b), c) }
    }

    fn polynomial(&self, coefficients: &[f64], x: Id) -> Id {
        let (last, lower) = coefficients.split_last().expect("a polynomial has coefficients");
        lower.iter().rev().fold(self.real(*last), |sum, c| self.mul_add(sum, x, self.real(*c)))
    }

    fn abs(&self, x: Id) -> Id {
        self.g.m.unary(SsaOp::FAbs, x)
    }

    fn with_sign_of(&self, x: Id, sign: Id) -> Id {
        self.g.m.binary(SsaOp::CopySign, x, sign)
    }

    /// Selects `first` if `a < b`, else `second`, also for NaN.
    fn where_less(&self, a: Id, b: Id, first: Id, second: Id) -> Id {
        self.g.m.select(self.g.m.fless(a, b), first, second)
    }

    /// Rounds to the nearest integer, ties to even: all numbers from the one whose last place is 1 are
    /// integers, so adding this number rounds.
    fn nearest(&self, x: Id) -> Id {
        let whole = self.real((self.format.fraction_bits as f64).exp2());
        let a = self.abs(x);
        let rounded = self.with_sign_of(self.sub(self.add(a, whole), whole), x);
        self.where_less(a, whole, rounded, x)
    }

    /// Rounds `a · b` to the nearest integer, as a real: adding 1.5 times the number whose last place is 1
    /// rounds.
    fn round_product(&self, a: Id, b: Id) -> Id {
        let magic = self.real(1.5 * (self.format.fraction_bits as f64).exp2());
        self.sub(self.mul_add(a, b, magic), magic)
    }

    /// 2ⁿ for an integer `n` whose power is neither infinite nor subnormal.
    fn power_of_two(&self, n: Id) -> Id {
        let magic = 1.5 * (self.format.fraction_bits as f64).exp2() + self.format.exponent_bias as f64;
        let biased = self.g.m.bitcast(self.add(n, self.real(magic)), self.int);
        let shift = self.integer(i64::from(self.format.fraction_bits));
        self.g.m.bitcast(self.g.m.binary(SsaOp::ShiftLeft, biased, shift), self.ty)
    }

    /// Computes an integer `n` and `r` with eˣ = 2ⁿ·eʳ and |r| ≤ ½ ln 2, for `x` with a finite exponential.
    fn reduced_exponent(&self, x: Id) -> (Id, Id) {
        let n = self.round_product(x, self.real(std::f64::consts::LOG2_E));
        let [high, low] = self.format.ln_2.map(|part| self.real(-part));
        (n, self.mul_add(n, low, self.mul_add(n, high, x)))
    }

    /// Computes an integer `n` and `p` with eˣ = 2ⁿ·(1 + p), for `x` with a finite exponential.
    fn reduced_exp(&self, x: Id) -> (Id, Id) {
        let (n, r) = self.reduced_exponent(x);
        (n, self.mul_add(self.mul(r, r), self.polynomial(self.format.exp, r), r))
    }

    /// Sine or cosine: x less the nearest multiple of π/2, whose number of quarter turns tells the series and
    /// the sign. Beyond 2⁵⁰ too few bits are left; the result is between −1 and 1 all the same.
    fn circular(&self, op: UnaryOp, x: Id) -> Id {
        let n = self.nearest(self.mul(x, self.real(std::f64::consts::FRAC_2_PI)));
        let r = HALF_PI.iter().fold(x, |r, part| self.mul_add(n, self.real(-part), r));
        let squared = self.mul(r, r);
        let sine = self.mul_add(self.mul(r, squared), self.polynomial(&SINE, squared), r);
        let cosine = self.mul_add(squared, self.polynomial(&COSINE, squared), self.real(1.0));
        // Quarter turns beside whole ones, −2 to 2.
        let quarters = self.mul_add(self.nearest(self.mul(n, self.real(0.25))), self.real(-4.0), n);
        let (distance, half, one, upper) = (self.abs(quarters), self.real(0.5), self.real(1.0), self.real(1.5));
        let negative = |x: Id| self.g.m.unary(SsaOp::FNeg, x);
        let (even, odd) = match op {
            UnaryOp::Sin => (sine, self.mul(quarters, cosine)),
            _ => (cosine, negative(self.mul(quarters, sine))),
        };
        let even = self.where_less(upper, distance, negative(even), even);
        let value = self.where_less(half, distance, self.where_less(distance, upper, odd, even), even);
        let value = self.where_less(one, value, one, value);
        let value = self.where_less(value, self.real(-1.0), self.real(-1.0), value);
        // Zeros keep their sign.
        if op == UnaryOp::Sin { self.where_less(self.real(0.0), self.abs(x), value, x) } else { value }
    }

    fn exp(&self, x: Id) -> Id {
        let high = self.real(self.format.exp_infinite);
        let least = if self.has_scale() { self.format.exp_zero } else { self.format.powers_zero };
        let least = self.real(least);
        let limited = self.where_less(high, x, high, x);
        let limited = if self.has_scale() { limited } else { self.where_less(limited, least, least, limited) };
        let (n, r) = self.reduced_exponent(limited);
        let one = self.real(1.0);
        let power = self.mul_add(self.mul_add(self.polynomial(self.format.exp, r), r, one), r, one);
        if self.has_scale() {
            // Zero times any power is zero, without an underflow.
            let power = self.where_less(x, least, self.real(0.0), power);
            return self.g.m.binary(SsaOp::Scale, power, n);
        }
        // Two factors, as the power itself may be infinite or subnormal; only the second rounds.
        let half = self.round_product(n, self.real(0.5));
        let first = self.mul(power, self.power_of_two(half));
        self.mul(first, self.power_of_two(self.sub(n, half)))
    }

    /// Whether the machine multiplies vectors of this type by powers of two.
    fn has_scale(&self) -> bool {
        let Target { arch, vector_bits, .. } = self.g.target;
        *arch == Arch::X86_64 && *vector_bits >= 512 && matches!(self.ty.bytes(), 16 | 32 | 64)
    }

    /// eˣ − 1 = 2ⁿ·p + (2ⁿ − 1), computed as twice its half, as 2ⁿ may be infinite although the value is
    /// finite.
    fn expm1(&self, x: Id) -> Id {
        let (low, high) = (self.real(-self.format.expm1_one), self.real(self.format.exp_infinite));
        let a = self.where_less(x, low, low, x);
        let a = self.where_less(high, a, high, a);
        let (n, p) = self.reduced_exp(a);
        let power = self.power_of_two(self.sub(n, self.real(1.0)));
        let half = self.mul_add(power, p, self.sub(power, self.real(0.5)));
        self.with_sign_of(self.add(half, half), x)
    }

    /// ln(1 + x), with a correction for the rounding error of 1 + x.
    fn log1p(&self, x: Id) -> Id {
        let one = self.real(1.0);
        let y = self.add(one, x);
        let lost = self.sub(x, self.sub(y, one));
        self.with_sign_of(self.log(y, Some(lost)), x)
    }

    /// ln x = e·ln 2 + ln(1 + f) with 1 + f in √½..√2, and s = f / (2 + f): ln(1 + f) = 2·atanh(s) = f − s·(f
    /// − 2s²·…), in which an error of `s` has little effect. For an argument that is a rounded sum, `lost` is
    /// its rounding error.
    fn log(&self, x: Id, lost: Option<Id>) -> Id {
        let m = &self.g.m;
        let fraction_bits = self.format.fraction_bits;
        let bias = self.format.exponent_bias;
        // Subnormal numbers are scaled up first.
        let least_normal = self.real(((1 - bias) as f64).exp2());
        let is_small = m.fless(x, least_normal);
        let scaled = m.select(is_small, self.mul(x, self.real((fraction_bits as f64).exp2())), x);
        let one_bits = bias << fraction_bits;
        let root_bits = match fraction_bits {
            23 => i64::from(std::f32::consts::FRAC_1_SQRT_2.to_bits()),
            _ => std::f64::consts::FRAC_1_SQRT_2.to_bits() as i64,
        };
        let bits = m.binary(SsaOp::AddWrapping, m.bitcast(scaled, self.int), self.integer(one_bits - root_bits));
        let biased = m.binary(SsaOp::ShiftUnsigned, bits, self.integer(i64::from(fraction_bits)));
        // The exponent as a real, by writing it into the last places of 2 to the number of fraction bits.
        let magic = (fraction_bits as f64).exp2();
        let magic_bits = (bias + i64::from(fraction_bits)) << fraction_bits;
        let biased = m.bitcast(m.binary(SsaOp::Or, biased, self.integer(magic_bits)), self.ty);
        let offset = m.select(
            is_small,
            self.real(magic + (bias + i64::from(fraction_bits)) as f64),
            self.real(magic + bias as f64),
        );
        let e = self.sub(biased, offset);
        let fraction = m.binary(SsaOp::And, bits, self.integer((1 << fraction_bits) - 1));
        let significand = m.bitcast(m.binary(SsaOp::AddWrapping, fraction, self.integer(root_bits)), self.ty);
        let mut f = self.sub(significand, self.real(1.0));
        if let Some(lost) = lost {
            // For larger arguments, the rounding error is negligible.
            let most = self.real(f64::from(2 * fraction_bits));
            let inverse = self.power_of_two(self.g.m.unary(SsaOp::FNeg, self.where_less(e, most, e, most)));
            f = self.mul_add(lost, inverse, f);
        }
        let s = self.div(f, self.add(f, self.real(2.0)));
        let z = self.mul(s, s);
        let tail = self.mul(self.add(z, z), self.polynomial(self.format.log, z));
        let [high, low] = self.format.ln_2.map(|part| self.real(part));
        let small = self.sub(self.mul(s, self.sub(f, tail)), self.mul(e, low));
        let finite = self.mul_add(e, high, self.sub(f, small));
        // Infinity and NaN are unchanged; zero gives −∞ and negative numbers NaN.
        let [infinity, zero] = [f64::INFINITY, 0.0].map(|v| self.real(v));
        let out = self.where_less(x, infinity, finite, x);
        let out = self.where_less(x, zero, self.real(f64::NAN), out);
        let least = self.real((f64::from(1 - bias as i32 - fraction_bits as i32)).exp2());
        self.where_less(self.abs(x), least, self.real(f64::NEG_INFINITY), out)
    }

    /// tanh |x| = E / (E + 2) with E = exp(2|x|) − 1, which is accurate near zero.
    fn tanh(&self, x: Id) -> Id {
        let a = self.abs(x);
        let last = self.real(self.format.tanh_one);
        let a = self.where_less(last, a, last, a);
        let (n, p) = self.reduced_exp(self.add(a, a));
        let power = self.power_of_two(n);
        let e = self.mul_add(power, p, self.sub(power, self.real(1.0)));
        self.with_sign_of(self.div(e, self.add(e, self.real(2.0))), x)
    }

    /// erf(x) as x + x·p(x²) near zero, else 1 − r(|x|)⁴: the root needs a polynomial of half the degree of
    /// that for the error function itself.
    fn erf(&self, x: Id) -> Id {
        let a = self.abs(x);
        let low = self.mul_add(x, self.polynomial(self.format.erf_low, self.mul(x, x)), x);
        let last = self.real(self.format.erf_one);
        let u = self.sub(self.g.m.binary(SsaOp::FMin, last, a), self.real(self.format.erf_center));
        let root = self.polynomial(self.format.erf_high, u);
        let square = self.mul(root, root);
        let high = self.mul_add(self.g.m.unary(SsaOp::FNeg, square), square, self.real(1.0));
        self.where_less(a, self.real(ERF_LOW), low, self.with_sign_of(high, x))
    }
}
