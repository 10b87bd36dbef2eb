//! Vector code for the CPU of this machine, and functions that compile to it.

/// Runs work compiled to vector code, with the widest vectors of this CPU. Functions that it calls must be
/// inlined.
#[inline(always)]
pub(crate) fn wide<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

/// Precision in which powers of e are computed.
pub(crate) trait Real:
    Copy + std::ops::Add<Output = Self> + std::ops::Sub<Output = Self> + std::ops::Mul<Output = Self> + 'static
{
    const ZERO: Self;
    const LOG2_E: Self;
    /// Number whose addition rounds to an integer, which is then in the lowest bits.
    const ROUNDER: Self;
    /// ln 2 as the sum of two numbers, so that little precision is lost when a multiple of it is subtracted.
    const LN_2: [Self; 2];
    /// Coefficients of a polynomial for eʳ, for |r| up to ln 2 / 2, highest power first.
    const COEFFICIENTS: &[Self];

    /// Returns two to the power of the integer that `ROUNDER` was added to.
    fn power_of_two(rounded: Self) -> Self;
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const ROUNDER: f32 = 12_582_912.0;
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const COEFFICIENTS: &[f32] = &[1.398_2e-3, 8.333_452e-3, 0.041_665_796, 0.166_666_66, 0.5, 1.0, 1.0];

    #[inline(always)]
    fn power_of_two(rounded: f32) -> f32 {
        f32::from_bits(rounded.to_bits().wrapping_add(127) << 23)
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const LOG2_E: f64 = std::f64::consts::LOG2_E;
    const ROUNDER: f64 = 6_755_399_441_055_744.0;
    const LN_2: [f64; 2] = {
        use std::f64::consts::LN_2;
        // Multiples of the high part are exact.
        let high = f64::from_bits(LN_2.to_bits() & !0x7ff_ffff);
        [high, LN_2 - high + 2.319_046_813_846_3e-17]
    };
    /// Taylor coefficients, from 1 / 13! on.
    const COEFFICIENTS: &[f64] = &{
        let mut coefficients = [1.0; 14];
        let mut i = 13;
        while i > 0 {
            coefficients[i - 1] = coefficients[i] / (14 - i) as f64;
            i -= 1;
        }
        coefficients
    };

    #[inline(always)]
    fn power_of_two(rounded: f64) -> f64 {
        f64::from_bits(rounded.to_bits().wrapping_add(1023) << 52)
    }
}

/// Computes e to the power of `x`: with a relative error of at most 3·10⁻⁷ for f32 and `x` from -87 to 87, to
/// 14 digits for f64 and `x` from -700 to 700. Unlike the standard library's function, it compiles to vector
/// code.
#[inline(always)]
pub(crate) fn exp<R: Real>(x: R) -> R {
    let rounded = x * R::LOG2_E + R::ROUNDER;
    let n = rounded - R::ROUNDER;
    let r = x - n * R::LN_2[0] - n * R::LN_2[1];
    let sum = R::COEFFICIENTS.iter().fold(R::ZERO, |sum, &coefficient| coefficient + sum * r);
    sum * R::power_of_two(rounded)
}

/// Computes the logistic function, within 10⁻⁶.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp((-x).clamp(-87.0, 87.0)))
}

/// Computes the hyperbolic tangent, with an absolute but not a relative error of at most 10⁻⁶.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + exp((2.0 * x).clamp(-87.0, 87.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn vectors_are_wide_where_the_cpu_has_such() {
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        if !has_avx2 {
            eprintln!("skipped: this CPU has no AVX2");
            return;
        }
        assert!(!matches!(pulp::Arch::new(), pulp::Arch::Scalar), "a feature of pulp is missing");
    }

    #[test]
    fn approximations_are_close() {
        for i in -4000..=4000 {
            let x = i as f32 / 47.0;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) - exact).abs() <= 3e-7 * exact, "exp {x}");
            assert!((f64::from(tanh(x)) - f64::from(x).tanh()).abs() <= 1e-6, "tanh {x}");
            assert!((f64::from(sigmoid(x)) - 1.0 / (1.0 + (-f64::from(x)).exp())).abs() <= 1e-6, "sigmoid {x}");
        }
        for x in [f32::MIN, -1e9, 1e9, f32::MAX] {
            let (exact_sigmoid, exact_tanh) = if x > 0.0 { (1.0, 1.0) } else { (0.0, -1.0) };
            assert!((sigmoid(x) - exact_sigmoid).abs() <= 1e-6 && (tanh(x) - exact_tanh).abs() <= 1e-6, "{x}");
        }
        for i in -700_000..=700_000 {
            let x = f64::from(i) * 1e-3;
            assert!((exp(x) / x.exp() - 1.0).abs() < 1e-15, "{x}: {} is not {}", exp(x), x.exp());
        }
    }
}
