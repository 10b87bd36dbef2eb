//! Element types, in one table that defines their sizes, names, rounding, random inputs and tolerances.

/// Element type of a buffer, and type of the arithmetic of an expression.
///
/// Interpreters and the trusted reference hold every element in an `f64`: its numeric value, or its bit
/// pattern if an f64 cannot represent all values of the type, see [`DType::held`]. An element is aligned to
/// its size.
///
/// Integer arithmetic wraps around: sums, differences and products are modulo two to the number of bits.
/// Division truncates towards zero; division by zero yields zero. Conversions between integer types keep the
/// low bits; those from floating-point numbers [round](DType::round) to the arithmetic of the type and keep
/// its low bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32
    F32,
    /// IEEE binary64
    F64,
    /// IEEE binary16
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// Signed, 8 bits.
    I8,
    /// Signed byte from −64 to 64, for 7-bit weights: the sum of two products with unsigned bytes fits 16
    /// bits.
    I7,
    /// Unsigned, 8 bits.
    U8,
    /// Signed, 16 bits.
    I16,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 32 bits.
    I32,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
    /// A byte that is 0 or 1.
    Bool,
}

/// Description of an element type: a row of the table of types.
struct DTypeRow {
    dtype: DType,
    name: &'static str,
    bytes: u64,
    /// Element type in which expressions stored to buffers of this type are computed; the store rounds the
    /// result.
    arithmetic: DType,
    /// Half the distance from 1 to the next value; zero for integer types.
    unit: f64,
    /// See [`DType::round`].
    round: fn(f64) -> f64,
    /// Encodes a value as the bits of the type, in the lower bytes.
    encode: fn(f64) -> u64,
    /// Decodes such bits.
    decode: fn(u64) -> f64,
    /// See [`DType::random`].
    random: fn(u64) -> f64,
    /// Statistics of random inputs of the type.
    random_size: RandomSize,
}

/// Statistics of the random test inputs of a type.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomSize {
    /// Root mean square.
    pub rms: f64,
    /// Largest magnitude.
    pub most: f64,
    /// Whether the distribution is symmetric about zero.
    pub is_symmetric: bool,
}

/// The mean square of magnitudes uniform in `[0.5, 1.5)` is `(1.5³ − 0.5³) / 3`.
const FLOATS: RandomSize = RandomSize { rms: 1.0408, most: 1.5, is_symmetric: true };

const FLOAT: DTypeRow = DTypeRow {
    dtype: DType::F32,
    name: "f32",
    bytes: 4,
    arithmetic: DType::F32,
    unit: f64::EPSILON * (1u64 << 28) as f64,
    round: |x| f64::from(x as f32),
    encode: |x| u64::from((x as f32).to_bits()),
    decode: |bits| f64::from(f32::from_bits(bits as u32)),
    random: |bits| random_float(bits, 23),
    random_size: FLOATS,
};

const INTEGER: DTypeRow = DTypeRow {
    dtype: DType::I32,
    name: "i32",
    bytes: 4,
    arithmetic: DType::I32,
    unit: 0.0,
    round: |x| f64::from(x as i32),
    encode: |x| u64::from(x as i32 as u32),
    decode: |bits| f64::from(bits as i32),
    random: |bits| random_whole(bits, 16),
    random_size: RandomSize { rms: 9.670, most: 16.0, is_symmetric: true },
};

/// Row shared by unsigned types wider than a byte.
const NATURAL: DTypeRow = DTypeRow {
    random: |bits| random_whole(bits, 16).abs(),
    random_size: RandomSize { rms: 9.670, most: 16.0, is_symmetric: false },
    ..INTEGER
};

/// Largest magnitude of [`DType::I7`].
const MOST_OF_7_BITS: i8 = 64;

fn within_7_bits(x: i8) -> i8 {
    x.clamp(-MOST_OF_7_BITS, MOST_OF_7_BITS)
}

/// All element types. The root mean square of integers from 1 to `n` is `√((n + 1)·(2n + 1) / 6)`.
const ROWS: [DTypeRow; 14] = [
    FLOAT,
    DTypeRow {
        dtype: DType::F64,
        name: "f64",
        bytes: 8,
        arithmetic: DType::F64,
        unit: f64::EPSILON / 2.0,
        round: |x| x,
        encode: f64::to_bits,
        decode: f64::from_bits,
        ..FLOAT
    },
    DTypeRow {
        dtype: DType::F16,
        name: "f16",
        bytes: 2,
        unit: 1.0 / 2048.0,
        round: |x| round_float(x, 11, -14, 65504.0),
        encode: bits_of_f16,
        decode: value_of_f16,
        random: |bits| random_float(bits, 10),
        ..FLOAT
    },
    DTypeRow {
        dtype: DType::Bf16,
        name: "bf16",
        bytes: 2,
        unit: 1.0 / 256.0,
        round: |x| round_float(x, 8, -126, f64::from(f32::from_bits(0x7f7f_0000))),
        encode: |x| u64::from((x as f32).to_bits() >> 16),
        decode: |bits| f64::from(f32::from_bits((bits as u32) << 16)),
        random: |bits| random_float(bits, 7),
        ..FLOAT
    },
    DTypeRow {
        dtype: DType::I8,
        name: "i8",
        bytes: 1,
        round: |x| f64::from(x as i8),
        encode: |x| u64::from(x as i8 as u8),
        decode: |bits| f64::from(bits as i8),
        random: |bits| random_whole(bits, 127),
        random_size: RandomSize { rms: 73.76, most: 127.0, is_symmetric: true },
        ..INTEGER
    },
    DTypeRow {
        dtype: DType::I7,
        name: "i7",
        bytes: 1,
        round: |x| f64::from(within_7_bits(x as i8)),
        encode: |x| u64::from(within_7_bits(x as i8) as u8),
        decode: |bits| f64::from(within_7_bits(bits as i8)),
        random: |bits| random_whole(bits, MOST_OF_7_BITS as u64),
        random_size: RandomSize { rms: 37.38, most: 64.0, is_symmetric: true },
        ..INTEGER
    },
    DTypeRow {
        dtype: DType::U8,
        name: "u8",
        bytes: 1,
        round: |x| f64::from(x as u8),
        encode: |x| u64::from(x as u8),
        decode: |bits| f64::from(bits as u8),
        random: |bits| random_whole(bits, 255).abs(),
        random_size: RandomSize { rms: 147.8, most: 255.0, is_symmetric: false },
        ..INTEGER
    },
    DTypeRow {
        dtype: DType::I16,
        name: "i16",
        bytes: 2,
        round: |x| f64::from(x as i16),
        encode: |x| u64::from(x as i16 as u16),
        decode: |bits| f64::from(bits as i16),
        ..INTEGER
    },
    DTypeRow {
        dtype: DType::U16,
        name: "u16",
        bytes: 2,
        round: |x| f64::from(x as u16),
        encode: |x| u64::from(x as u16),
        decode: |bits| f64::from(bits as u16),
        ..NATURAL
    },
    INTEGER,
    DTypeRow {
        dtype: DType::U32,
        name: "u32",
        arithmetic: DType::I64,
        round: |x| f64::from(x as u32),
        encode: |x| u64::from(x as u32),
        decode: |bits| f64::from(bits as u32),
        ..NATURAL
    },
    DTypeRow {
        dtype: DType::I64,
        name: "i64",
        bytes: 8,
        arithmetic: DType::I64,
        round: |x| (x as i64) as f64,
        encode: |x| (x as i64).cast_unsigned(),
        decode: |bits| bits.cast_signed() as f64,
        ..INTEGER
    },
    DTypeRow {
        dtype: DType::U64,
        name: "u64",
        bytes: 8,
        arithmetic: DType::U64,
        round: |x| (x as u64) as f64,
        encode: |x| x as u64,
        decode: |bits| bits as f64,
        ..NATURAL
    },
    DTypeRow {
        dtype: DType::Bool,
        name: "bool",
        bytes: 1,
        round: |x| f64::from(u8::from(x != 0.0)),
        encode: |x| u64::from(x != 0.0),
        decode: |bits| f64::from(u8::from(bits as u8 != 0)),
        random: |bits| (bits & 1) as f64,
        random_size: RandomSize { rms: std::f64::consts::FRAC_1_SQRT_2, most: 1.0, is_symmetric: false },
        ..INTEGER
    },
];

/// Returns a number of random sign with a magnitude in `[0.5, 1.5)` of `n_bits` fractional bits, so that no
/// product vanishes and sums stay small.
fn random_float(bits: u64, n_bits: u32) -> f64 {
    let magnitude = 0.5 + (bits >> (64 - n_bits)) as f64 / (1u64 << n_bits) as f64;
    if bits & 1 == 0 { magnitude } else { -magnitude }
}

/// Returns an integer of random sign with a magnitude from 1 to `most`.
fn random_whole(bits: u64, most: u64) -> f64 {
    let magnitude = (1 + (bits >> 1) % most) as f64;
    if bits & 1 == 0 { magnitude } else { -magnitude }
}

/// Rounds to the nearest number of `n_bits` significant bits, ties to even; to infinity beyond `most`.
///
/// `least_exponent` is the exponent of the smallest normal number.
fn round_float(x: f64, n_bits: i32, least_exponent: i32, most: f64) -> f64 {
    if !x.is_finite() {
        return x;
    }
    let exponent = (x.to_bits() >> 52 & 0x7ff) as i32 - 1023;
    let step = 2f64.powi(exponent.max(least_exponent) - (n_bits - 1));
    let rounded = (x / step).round_ties_even() * step;
    if rounded.abs() > most { f64::INFINITY.copysign(x) } else { rounded }
}

/// Encodes a number as binary16.
fn bits_of_f16(x: f64) -> u64 {
    let sign = u64::from(x.is_sign_negative()) << 15;
    let (magnitude, raw) = (x.abs(), x.abs().to_bits());
    sign | match magnitude {
        x if x.is_nan() => 0x7e00,
        x if x == f64::INFINITY => 0x7c00,
        // Subnormal numbers are multiples of the smallest positive one.
        x if x < 2f64.powi(-14) => (x / 2f64.powi(-24)) as u64,
        _ => ((raw >> 52) - (1023 - 15)) << 10 | raw >> 42 & 0x3ff,
    }
}

/// Decodes such bits.
fn value_of_f16(bits: u64) -> f64 {
    let (exponent, fraction) = (bits >> 10 & 0x1f, (bits & 0x3ff) as f64);
    let magnitude = match exponent {
        0x1f if fraction == 0.0 => f64::INFINITY,
        0x1f => f64::NAN,
        0 => fraction * 2f64.powi(-24),
        exponent => (1024.0 + fraction) * 2f64.powi(exponent as i32 - 25),
    };
    if bits >> 15 & 1 == 1 { -magnitude } else { magnitude }
}

impl DType {
    /// Every type with its name.
    pub const ALL: [(DType, &'static str); ROWS.len()] = {
        let mut all = [(DType::F32, ""); ROWS.len()];
        let mut at = 0;
        while at < ROWS.len() {
            all[at] = (ROWS[at].dtype, ROWS[at].name);
            at += 1;
        }
        all
    };

    fn row(self) -> &'static DTypeRow {
        /// Place of each type's row, by the number of the type.
        const AT: [usize; ROWS.len()] = {
            let mut places = [ROWS.len(); ROWS.len()];
            let mut at = 0;
            while at < ROWS.len() {
                places[ROWS[at].dtype as usize] = at;
                at += 1;
            }
            places
        };
        let rows: &'static [DTypeRow] = const { &ROWS };
        &rows[AT[self as usize]]
    }

    /// The name used in workloads and in the text format.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Size and alignment of one element in bytes.
    pub fn bytes(self) -> u64 {
        self.row().bytes
    }

    /// Whether values are floating-point numbers rather than integers.
    pub fn is_float(self) -> bool {
        self.unit() > 0.0
    }

    /// Whether the type is f16 or bf16: stored in 16 bits, computed with in f32.
    pub fn is_half(self) -> bool {
        self.is_float() && self.arithmetic() != self
    }

    /// Type in which expressions for buffers of this type are computed: the type itself, or a wider one for a
    /// storage-only type such as f16 or i8. A store rounds to the type.
    pub fn arithmetic(self) -> DType {
        self.row().arithmetic
    }

    /// Unit roundoff: half the distance from 1 to the next value; zero for integers.
    pub fn unit(self) -> f64 {
        self.row().unit
    }

    /// Rounds a number to the type: to nearest for floats, towards zero with saturation and NaN to zero for
    /// integers; for `bool`, to 1 if it is nonzero.
    pub fn round(self, x: f64) -> f64 {
        (self.row().round)(x)
    }

    /// Whether the type is a 64-bit integer, not all of whose values an f64 represents.
    pub fn is_wide(self) -> bool {
        matches!(self, DType::I64 | DType::U64)
    }

    /// Whether integers of the type have no sign.
    pub fn is_unsigned(self) -> bool {
        matches!(self, DType::U8 | DType::U16 | DType::U32 | DType::U64 | DType::Bool)
    }

    /// Wraps an integer to the low bits of the type; for `bool`, returns 1 if it is nonzero; for `i7`, wraps
    /// to `i8` and clamps the result.
    pub fn wrap(self, x: i128) -> i128 {
        match self {
            DType::Bool => return i128::from(x != 0),
            DType::I7 => return within_7_bits(x as i8).into(),
            _ => {}
        }
        let beyond = 128 - 8 * self.bytes() as u32;
        if self.is_unsigned() { ((x << beyond).cast_unsigned() >> beyond).cast_signed() } else { x << beyond >> beyond }
    }

    /// Integer value of a literal in this arithmetic: truncated and wrapped; infinities saturate.
    pub fn literal(self, x: f64) -> i128 {
        if x.is_infinite() { self.whole(self.held(x)) } else { self.wrap(x as i128) }
    }

    /// Converts a number to the held form of an element: rounded to the type, or for a [wide](DType::is_wide)
    /// type its bit pattern.
    pub fn held(self, x: f64) -> f64 {
        let DTypeRow { round, encode, .. } = self.row();
        if self.is_wide() { f64::from_bits(encode(x)) } else { round(x) }
    }

    /// Converts an integer to the held form of an element.
    pub fn held_whole(self, x: i128) -> f64 {
        let x = self.wrap(x);
        if self.is_wide() { f64::from_bits(x as u64) } else { x as f64 }
    }

    /// Integer value of a held element of an integer type.
    pub fn whole(self, held: f64) -> i128 {
        match self {
            DType::I64 => held.to_bits().cast_signed().into(),
            DType::U64 => held.to_bits().into(),
            _ => held as i128,
        }
    }

    /// Numeric value of a held element, rounded to f64.
    pub fn number(self, held: f64) -> f64 {
        if self.is_wide() { self.whole(held) as f64 } else { held }
    }

    /// Encodes values in little-endian bytes, each rounded to the type.
    ///
    /// # Panics
    /// If `bytes` does not have exactly the size of the encoded values.
    pub fn write(self, values: &[f64], bytes: &mut [u8]) {
        let DTypeRow { bytes: n, encode, round, .. } = self.row();
        assert_eq!(bytes.len(), values.len() * *n as usize, "every value has its bytes");
        for (out, x) in bytes.chunks_exact_mut(*n as usize).zip(values) {
            out.copy_from_slice(&encode(round(*x)).to_le_bytes()[..*n as usize]);
        }
    }

    /// Decodes little-endian bytes as numbers.
    pub fn read(self, bytes: &[u8]) -> Vec<f64> {
        self.read_as(bytes, self.row().decode)
    }

    /// Decodes little-endian bytes as [held](DType::held) elements.
    pub fn read_held(self, bytes: &[u8]) -> Vec<f64> {
        self.read_as(bytes, if self.is_wide() { f64::from_bits } else { self.row().decode })
    }

    fn read_as(self, bytes: &[u8], decode: fn(u64) -> f64) -> Vec<f64> {
        let of = |bytes: &[u8]| {
            let mut all = [0; 8];
            all[..bytes.len()].copy_from_slice(bytes);
            decode(u64::from_le_bytes(all))
        };
        bytes.chunks_exact(self.bytes() as usize).map(of).collect()
    }

    /// Random value of this type, from 64 random bits, for filling inputs.
    pub fn random(self, bits: u64) -> f64 {
        (self.row().random)(bits)
    }

    /// Statistics of [`DType::random`] for this type.
    pub fn random_size(self) -> RandomSize {
        self.row().random_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_one_row() {
        for (at, row) in ROWS.iter().enumerate() {
            assert!(ROWS[..at].iter().all(|other| (other.dtype, other.name) != (row.dtype, row.name)));
            assert_eq!(row.dtype.arithmetic().arithmetic(), row.dtype.arithmetic(), "{}", row.name);
            assert_eq!(row.dtype.is_float(), row.dtype.arithmetic().is_float(), "{}", row.name);
        }
    }

    /// Random inputs are values of the type with the statistics of its row, and only `bool` has zeros.
    #[test]
    fn random_inputs_are_what_their_row_says() {
        for (dtype, name) in DType::ALL {
            let bits = (1..=4096u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let values: Vec<f64> = bits.map(|bits| dtype.random(bits)).collect();
            let RandomSize { rms, most, is_symmetric } = dtype.random_size();
            assert!(values.iter().all(|&x| dtype.round(x) == x && x.abs() <= most), "{name}");
            assert!(dtype == DType::Bool || values.iter().all(|&x| x != 0.0), "{name}");
            assert_eq!(values.iter().any(|&x| x < 0.0), is_symmetric, "{name}");
            let measured = (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt();
            assert!((measured / rms - 1.0).abs() < 0.03, "{name}: {measured} instead of {rms}");
        }
    }

    #[test]
    fn values_are_bytes_and_back() {
        for (dtype, name) in DType::ALL {
            let special = [0.0, -0.0, 1.0, -1.0, 3e-8, 1e-5, -6.1e-5, 65504.0, 1e9, f64::INFINITY, f64::NEG_INFINITY];
            let random = (1..=200u64).map(|i| dtype.random(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
            let values: Vec<f64> = special.into_iter().chain(random).map(|x| dtype.round(x)).collect();
            let mut bytes = vec![0; values.len() * dtype.bytes() as usize];
            dtype.write(&values, &mut bytes);
            assert_eq!(dtype.read(&bytes), values, "{name}");
        }
        let bits = |dtype: DType, x: f64| {
            let mut bytes = [0; 2];
            dtype.write(&[x], &mut bytes);
            u16::from_le_bytes(bytes)
        };
        assert_eq!(
            [1.0, -2.0, 65504.0, 6.0e-8, f64::NAN].map(|x| bits(DType::F16, x)),
            [0x3c00, 0xc000, 0x7bff, 1, 0x7e00]
        );
        assert_eq!([1.0, -2.0, 3.140625].map(|x| bits(DType::Bf16, x)), [0x3f80, 0xc000, 0x4049]);
        assert!(DType::F16.read(&[0xff, 0x7f])[0].is_nan());
    }

    #[test]
    fn integers_keep_their_low_bits() {
        #[track_caller]
        fn is(dtype: DType, x: i128, expected: i128) {
            assert_eq!(dtype.wrap(x), expected);
            assert_eq!(dtype.whole(dtype.held_whole(x)), expected);
        }
        is(DType::I8, 128, -128);
        is(DType::U8, -10, 246);
        is(DType::I16, 40_000, -25_536);
        is(DType::U16, -1, 65_535);
        is(DType::I32, 1 << 31, i32::MIN.into());
        is(DType::U32, -1, u32::MAX.into());
        is(DType::I64, i128::from(i64::MAX) + 1, i64::MIN.into());
        is(DType::U64, -1, u64::MAX.into());
        is(DType::I64, (1 << 62) + 1, (1 << 62) + 1);
        is(DType::Bool, 256, 1);
        is(DType::I7, 127, 64);
        is(DType::I7, 200, -56);
        is(DType::I7, 128, -64);
        assert_eq!(DType::I64.literal(f64::INFINITY), i64::MAX.into());
        assert_eq!(DType::U64.literal(f64::NEG_INFINITY), 0);
        assert_eq!(DType::U64.literal(-5.0), i128::from(u64::MAX) - 4);
        assert_eq!(DType::I64.literal(2f64.powi(63)), i64::MIN.into());
        assert_eq!(DType::U64.number(DType::U64.held(2f64.powi(63))), 2f64.powi(63));
    }

    #[test]
    fn numbers_round_to_the_nearest_value() {
        #[track_caller]
        fn is(dtype: DType, x: f64, expected: f64) {
            let rounded = dtype.round(x);
            assert!(rounded == expected || rounded.is_nan() && expected.is_nan(), "{x} becomes {rounded}");
            let again = dtype.round(rounded);
            assert!(again == rounded || again.is_nan() && rounded.is_nan());
        }
        is(DType::F32, 1.0 + f64::EPSILON, 1.0);
        is(DType::F16, 1.0 + 1.0 / 2048.0, 1.0);
        is(DType::F16, 1.0 + 3.0 / 2048.0, 1.0 + 2.0 / 1024.0);
        is(DType::F16, 65519.9, 65504.0);
        is(DType::F16, -65520.0, f64::NEG_INFINITY);
        is(DType::F16, 3e-8, 2f64.powi(-24) * 1.0);
        is(DType::F16, 2e-8, 0.0);
        is(DType::F16, f64::NAN, f64::NAN);
        is(DType::Bf16, 1.0 + 1.0 / 256.0, 1.0);
        is(DType::Bf16, 1.0 + 3.0 / 256.0, 1.0 + 2.0 / 128.0);
        is(DType::Bf16, f64::from(f32::MAX), f64::INFINITY);
        is(DType::Bf16, f64::from(f32::from_bits(0x7f7f_0000)), f64::from(f32::from_bits(0x7f7f_0000)));
        is(DType::I8, -3.9, -3.0);
        is(DType::I8, 300.0, 127.0);
        is(DType::U8, -3.0, 0.0);
        is(DType::I7, -100.0, -64.0);
        is(DType::I32, f64::NAN, 0.0);
        is(DType::I64, 2.5, 2.0);
        is(DType::Bool, -0.5, 1.0);
        is(DType::Bool, 0.0, 0.0);
    }
}
