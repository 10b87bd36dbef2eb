//! Element types of tensors.

use std::fmt;

use crate::float8::Float8;

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    /// IEEE half precision.
    F16,
    /// bfloat16, the upper half of an f32.
    Bf16,
    /// 8 bits, 3 of them mantissa, without infinities.
    F8e4m3fn,
    /// 8 bits, 3 of them mantissa, without infinities and −0.
    F8e4m3fnuz,
    /// 8 bits, 2 of them mantissa.
    F8e5m2,
    /// 8 bits, 2 of them mantissa, without infinities and −0.
    F8e5m2fnuz,
    /// Single precision.
    F32,
    /// Double precision.
    F64,
    /// Signed, 8 bits.
    I8,
    /// Signed, 16 bits.
    I16,
    /// Signed, 32 bits.
    I32,
    /// Signed, 64 bits.
    I64,
    /// Unsigned, 8 bits.
    U8,
    /// Unsigned, 16 bits.
    U16,
    /// Unsigned, 32 bits.
    U32,
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 2 bits.
    I2,
    /// Signed, 4 bits.
    I4,
    /// Unsigned, 2 bits.
    U2,
    /// Unsigned, 4 bits.
    U4,
    /// Boolean: a byte that is 0 or 1.
    Bool,
}

/// Table of the types: name, number in ONNX, and size in bytes. In memory, numbers of fewer than 8 bits take
/// a byte each.
const ROWS: &[(DType, &str, i32, usize)] = &[
    (DType::F16, "f16", 10, 2),
    (DType::Bf16, "bf16", 16, 2),
    (DType::F8e4m3fn, "f8e4m3fn", 17, 1),
    (DType::F8e4m3fnuz, "f8e4m3fnuz", 18, 1),
    (DType::F8e5m2, "f8e5m2", 19, 1),
    (DType::F8e5m2fnuz, "f8e5m2fnuz", 20, 1),
    (DType::F32, "f32", 1, 4),
    (DType::F64, "f64", 11, 8),
    (DType::I8, "i8", 3, 1),
    (DType::I16, "i16", 5, 2),
    (DType::I32, "i32", 6, 4),
    (DType::I64, "i64", 7, 8),
    (DType::U8, "u8", 2, 1),
    (DType::U16, "u16", 4, 2),
    (DType::U32, "u32", 12, 4),
    (DType::U64, "u64", 13, 8),
    (DType::I2, "i2", 26, 1),
    (DType::I4, "i4", 22, 1),
    (DType::U2, "u2", 25, 1),
    (DType::U4, "u4", 21, 1),
    (DType::Bool, "bool", 9, 1),
];

/// ONNX's names of the unsupported types, by number.
const FOREIGN: &[(i32, &str)] =
    &[(8, "string"), (14, "complex64"), (15, "complex128"), (23, "float4e2m1"), (24, "float8e8m0")];

impl DType {
    fn row(self) -> &'static (DType, &'static str, i32, usize) {
        ROWS.iter().find(|row| row.0 == self).expect("every type has a row")
    }

    /// Bytes of an element.
    pub fn size(self) -> usize {
        self.row().3
    }

    /// Bits of an element as packed in a file. Types of 2 and 4 bits share bytes there, the first element in
    /// the lowest bits; in memory each takes a byte.
    pub fn bits(self) -> usize {
        match self {
            DType::I2 | DType::U2 => 2,
            DType::I4 | DType::U4 => 4,
            _ => 8 * self.size(),
        }
    }

    /// Name, such as `f32`.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Returns the type for a number of ONNX's `TensorProto.DataType`.
    ///
    /// # Errors
    /// The name of the type, if it is not supported.
    pub fn from_onnx(number: i64) -> Result<DType, String> {
        let row = ROWS.iter().find(|row| i64::from(row.2) == number);
        row.map(|row| row.0).ok_or_else(|| {
            let name = FOREIGN.iter().find(|(n, _)| i64::from(*n) == number).map(|(_, name)| *name);
            name.map_or_else(|| format!("number {number}"), str::to_owned)
        })
    }

    /// Number of the type in ONNX.
    pub fn to_onnx(self) -> i32 {
        self.row().2
    }

    /// Whether elements are floating-point numbers.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::Bf16 | DType::F32 | DType::F64) || self.is_float8()
    }

    /// Whether elements are floating-point numbers of 8 bits.
    pub fn is_float8(self) -> bool {
        Float8::of(self).is_some()
    }

    /// Whether elements are integers; `bool` does not count.
    pub fn is_integer(self) -> bool {
        !self.is_float() && self != DType::Bool
    }

    /// Smallest and largest integer of the type; 0 and 1 for `bool`.
    ///
    /// # Panics
    /// For a floating-point type.
    pub fn integer_range(self) -> (i128, i128) {
        match self {
            DType::I8 => (i8::MIN.into(), i8::MAX.into()),
            DType::I16 => (i16::MIN.into(), i16::MAX.into()),
            DType::I32 => (i32::MIN.into(), i32::MAX.into()),
            DType::I64 => (i64::MIN.into(), i64::MAX.into()),
            DType::U8 => (0, u8::MAX.into()),
            DType::U16 => (0, u16::MAX.into()),
            DType::U32 => (0, u32::MAX.into()),
            DType::U64 => (0, u64::MAX.into()),
            DType::I2 => (-2, 1),
            DType::I4 => (-8, 7),
            DType::U2 => (0, 3),
            DType::U4 => (0, 15),
            DType::Bool => (0, 1),
            _ => panic!("integers have a range, {self} has not"),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
