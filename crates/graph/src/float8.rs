//! Floating-point numbers of 8 bits: decoding, and rounding to them.

use crate::DType;

/// Format of numbers of 8 bits: a sign, an exponent and a mantissa.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Float8 {
    /// Bits of the mantissa.
    pub mantissa: i32,
    /// Exponent of the numbers whose exponent field is 1: smaller numbers are multiples of the same step.
    pub least_exponent: i32,
    /// Largest finite number.
    pub most: f64,
    /// Code of NaN, without its sign.
    nan: u8,
    /// Code of infinity, if the format has it.
    infinity: Option<u8>,
    /// Whether the code of −0 is NaN instead.
    has_one_zero: bool,
}

impl Float8 {
    /// Format of a type; `None` if it is another type.
    pub fn of(dtype: DType) -> Option<Float8> {
        let of = |mantissa, least_exponent, most| Float8 {
            mantissa,
            least_exponent,
            most,
            nan: 0x7f,
            infinity: None,
            has_one_zero: false,
        };
        Some(match dtype {
            DType::F8e4m3fn => of(3, -6, 448.0),
            DType::F8e4m3fnuz => Float8 { has_one_zero: true, ..of(3, -7, 240.0) },
            DType::F8e5m2 => Float8 { infinity: Some(0x7c), ..of(2, -14, 57344.0) },
            DType::F8e5m2fnuz => Float8 { has_one_zero: true, ..of(2, -15, 57344.0) },
            _ => return None,
        })
    }

    /// Number of a code.
    pub fn decode(self, code: u8) -> f64 {
        let magnitude = code & 0x7f;
        let is_nan = match (self.has_one_zero, self.infinity) {
            (true, _) => code == 0x80,
            (false, Some(infinity)) => magnitude > infinity,
            (false, None) => magnitude == self.nan,
        };
        if is_nan {
            return f64::NAN;
        }
        let sign = if code >= 0x80 { -1.0 } else { 1.0 };
        if self.infinity == Some(magnitude) {
            return sign * f64::INFINITY;
        }
        let (exponent, mantissa) = (i32::from(magnitude) >> self.mantissa, i32::from(magnitude) % (1 << self.mantissa));
        let implicit = if exponent > 0 { 1 << self.mantissa } else { 0 };
        let step = self.least_exponent + exponent.max(1) - 1 - self.mantissa;
        sign * f64::from(implicit + mantissa) * 2_f64.powi(step)
    }

    /// Code of the nearest number, ties to even; numbers out of range become the largest of their sign.
    pub fn encode(self, x: f64) -> u8 {
        if x.is_nan() {
            return if self.has_one_zero { 0x80 } else { self.nan };
        }
        let magnitude = x.abs().min(self.most);
        let exponent = (magnitude.log2().floor() as i32).max(self.least_exponent);
        let multiple = (magnitude * 2_f64.powi(self.mantissa - exponent)).round_ties_even() as i32;
        // A multiple that reaches the next power of two carries into the exponent.
        let code = ((exponent - self.least_exponent) << self.mantissa) + multiple;
        let sign = if x.is_sign_negative() && !(self.has_one_zero && code == 0) { 0x80 } else { 0 };
        code as u8 | sign
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPES: [DType; 4] = [DType::F8e4m3fn, DType::F8e4m3fnuz, DType::F8e5m2, DType::F8e5m2fnuz];

    #[test]
    fn codes_are_those_of_their_numbers() {
        for dtype in TYPES {
            let format = Float8::of(dtype).unwrap();
            let numbers: Vec<f64> = (0..=255).map(|code| format.decode(code)).collect();
            let most = numbers.iter().copied().filter(|x| x.is_finite()).fold(0.0, f64::max);
            assert_eq!(most, format.most, "{dtype}");
            for (code, &x) in (0_u8..=255).zip(&numbers).filter(|(_, x)| x.is_finite()) {
                assert_eq!(format.encode(x), code, "{dtype} {x}");
            }
            assert!(format.decode(format.encode(f64::NAN)).is_nan());
            assert_eq!(format.decode(format.encode(f64::NEG_INFINITY)), -most);
        }
    }

    #[test]
    fn halves_are_rounded_to_even() {
        for dtype in TYPES {
            let format = Float8::of(dtype).unwrap();
            let mut numbers: Vec<f64> = (0..128).map(|code| format.decode(code)).filter(|x| x.is_finite()).collect();
            numbers.sort_by(f64::total_cmp);
            for (at, pair) in numbers.windows(2).enumerate() {
                let middle = f64::midpoint(pair[0], pair[1]);
                assert_eq!(format.decode(format.encode(middle)), pair[at % 2], "{dtype} {middle}");
                assert_eq!(format.decode(format.encode(middle.next_up())), pair[1], "{dtype} {middle}");
                assert_eq!(format.decode(format.encode(middle.next_down())), pair[0], "{dtype} {middle}");
            }
        }
    }
}
