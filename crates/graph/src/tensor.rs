//! Host tensors: an element type, a shape, and reference-counted bytes.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use half::{bf16, f16};

use crate::DType;
use crate::float8::Float8;

/// Type of a tensor: element type and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorType {
    /// Type of its elements.
    pub dtype: DType,
    /// Dimensions in row-major order; empty for a scalar.
    pub shape: Vec<usize>,
}

impl TensorType {
    /// Makes a type.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>) -> TensorType {
        TensorType { dtype, shape: shape.into() }
    }

    /// Number of elements; `None` if it overflows `usize`.
    pub fn checked_len(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d))
    }

    /// Number of elements.
    ///
    /// # Panics
    /// If the number does not fit a `usize`.
    pub fn n_elements(&self) -> usize {
        self.checked_len().expect("tensors are checked to fit memory")
    }

    /// Size in bytes; `None` if it overflows `usize`.
    pub fn checked_bytes(&self) -> Option<usize> {
        self.checked_len()?.checked_mul(self.dtype.size())
    }
}

impl fmt::Display for TensorType {
    /// Formats as `f32[1,3,224,224]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, shape_text(&self.shape))
    }
}

/// Formats a shape as `[1,3,224,224]`.
pub fn shape_text(shape: &[usize]) -> String {
    let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("[{}]", dims.join(","))
}

/// Tensor in host memory: little-endian elements in row-major order; types of 2 and 4 bits take a byte per
/// element. Clones share the bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Tensor {
    ty: TensorType,
    bytes: Bytes,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ty)
    }
}

/// Encodes numbers as the bytes of elements of a type, converted by `as`.
macro_rules! encode {
    ($dtype:expr, $numbers:expr, $from:ty) => {
        match $dtype {
            DType::F16 => bytes_of($numbers, |x: $from| f16::from_f64(x as f64).to_le_bytes()),
            DType::Bf16 => bytes_of($numbers, |x: $from| bf16_from_f64(x as f64).to_le_bytes()),
            DType::F8e4m3fn | DType::F8e4m3fnuz | DType::F8e5m2 | DType::F8e5m2fnuz => {
                let format = Float8::of($dtype).expect("a type of 8 bits");
                bytes_of($numbers, |x: $from| [format.encode(x as f64)])
            }
            DType::F32 => bytes_of($numbers, |x: $from| (x as f32).to_le_bytes()),
            DType::F64 => bytes_of($numbers, |x: $from| (x as f64).to_le_bytes()),
            DType::I8 | DType::I4 | DType::I2 => bytes_of($numbers, |x: $from| (x as i8).to_le_bytes()),
            DType::I16 => bytes_of($numbers, |x: $from| (x as i16).to_le_bytes()),
            DType::I32 => bytes_of($numbers, |x: $from| (x as i32).to_le_bytes()),
            DType::I64 => bytes_of($numbers, |x: $from| (x as i64).to_le_bytes()),
            DType::U8 | DType::U4 | DType::U2 => bytes_of($numbers, |x: $from| (x as u8).to_le_bytes()),
            DType::U16 => bytes_of($numbers, |x: $from| (x as u16).to_le_bytes()),
            DType::U32 => bytes_of($numbers, |x: $from| (x as u32).to_le_bytes()),
            DType::U64 => bytes_of($numbers, |x: $from| (x as u64).to_le_bytes()),
            DType::Bool => bytes_of($numbers, |x: $from| [u8::from(x != 0 as $from)]),
        }
    };
}

/// Decodes the elements of a tensor as numbers, converted by `as`.
macro_rules! decode {
    ($tensor:expr, $to:ty) => {
        match $tensor.ty.dtype {
            DType::F16 => numbers_of(&$tensor.bytes, |b| f16::from_le_bytes(b).to_f64() as $to),
            DType::Bf16 => numbers_of(&$tensor.bytes, |b| bf16::from_le_bytes(b).to_f64() as $to),
            DType::F8e4m3fn | DType::F8e4m3fnuz | DType::F8e5m2 | DType::F8e5m2fnuz => {
                let format = Float8::of($tensor.ty.dtype).expect("a type of 8 bits");
                numbers_of(&$tensor.bytes, |[code]: [u8; 1]| format.decode(code) as $to)
            }
            DType::F32 => numbers_of(&$tensor.bytes, |b| f32::from_le_bytes(b) as $to),
            DType::F64 => numbers_of(&$tensor.bytes, |b| f64::from_le_bytes(b) as $to),
            DType::I8 | DType::I4 | DType::I2 => numbers_of(&$tensor.bytes, |b| i8::from_le_bytes(b) as $to),
            DType::I16 => numbers_of(&$tensor.bytes, |b| i16::from_le_bytes(b) as $to),
            DType::I32 => numbers_of(&$tensor.bytes, |b| i32::from_le_bytes(b) as $to),
            DType::I64 => numbers_of(&$tensor.bytes, |b| i64::from_le_bytes(b) as $to),
            DType::U8 | DType::U4 | DType::U2 | DType::Bool => {
                numbers_of(&$tensor.bytes, |b| u8::from_le_bytes(b) as $to)
            }
            DType::U16 => numbers_of(&$tensor.bytes, |b| u16::from_le_bytes(b) as $to),
            DType::U32 => numbers_of(&$tensor.bytes, |b| u32::from_le_bytes(b) as $to),
            DType::U64 => numbers_of(&$tensor.bytes, |b| u64::from_le_bytes(b) as $to),
        }
    };
}

impl Tensor {
    /// Makes a tensor from bytes; `None` if their number does not fit the type. Bytes of `bool` other than 0
    /// become 1.
    pub fn new(ty: TensorType, bytes: Bytes) -> Option<Tensor> {
        let fits = ty.checked_bytes() == Some(bytes.len());
        let is_bool_clean = ty.dtype != DType::Bool || bytes.iter().all(|&b| b <= 1);
        let bytes = if is_bool_clean { bytes } else { bytes.iter().map(|&b| u8::from(b != 0)).collect() };
        fits.then_some(Tensor { ty, bytes })
    }

    /// Makes a tensor from floating-point numbers: rounded to nearest for a float type; truncated and
    /// saturated for an integer type.
    ///
    /// # Panics
    /// If the number of numbers differs from the shape's number of elements.
    pub fn from_floats(dtype: DType, shape: impl Into<Vec<usize>>, numbers: &[f64]) -> Tensor {
        let clamped: Vec<f64>;
        let numbers = match dtype.bits() {
            2 | 4 => {
                let (least, most) = dtype.integer_range();
                clamped = numbers.iter().map(|x| x.max(least as f64).min(most as f64)).collect();
                &clamped
            }
            _ => numbers,
        };
        let bytes = encode!(dtype, numbers, f64);
        Tensor::new(TensorType::new(dtype, shape), bytes.into()).expect("as many numbers as the shape takes")
    }

    /// Makes a tensor from integers, which wrap around to the type; for `bool`, all numbers but 0 are true.
    ///
    /// # Panics
    /// If the number of numbers differs from the shape's number of elements.
    pub fn from_integers(dtype: DType, shape: impl Into<Vec<usize>>, numbers: &[i128]) -> Tensor {
        let wrapped: Vec<i128>;
        let numbers = match dtype.bits() {
            bits @ (2 | 4) => {
                let least = dtype.integer_range().0;
                wrapped = numbers.iter().map(|x| (x - least).rem_euclid(1 << bits) + least).collect();
                &wrapped
            }
            _ => numbers,
        };
        let bytes = encode!(dtype, numbers, i128);
        Tensor::new(TensorType::new(dtype, shape), bytes.into()).expect("as many numbers as the shape takes")
    }

    /// Makes a tensor from elements as packed in files, where types of 2 and 4 bits share bytes; `None` if
    /// the number of bytes is wrong.
    pub fn from_packed(ty: TensorType, bytes: Bytes) -> Option<Tensor> {
        let bits = ty.dtype.bits();
        if bits >= 8 {
            return Tensor::new(ty, bytes);
        }
        let n = ty.checked_len()?;
        let (each, shift) = (8 / bits, 8 - bits);
        let is_signed = ty.dtype.integer_range().0 < 0;
        let number = |at: usize| {
            let high = bytes[at / each] << (shift - bits * (at % each));
            if is_signed { (high as i8 >> shift) as u8 } else { high >> shift }
        };
        (bytes.len() == n.div_ceil(each))
            .then(|| (0..n).map(number).collect::<Vec<u8>>())
            .and_then(|bytes| Tensor::new(ty, bytes.into()))
    }

    /// Packs the elements as in files, the inverse of [`Tensor::from_packed`].
    pub fn packed(&self) -> Bytes {
        let bits = self.ty.dtype.bits();
        if bits >= 8 {
            return self.bytes.clone();
        }
        let byte = |chunk: &[u8]| {
            chunk.iter().enumerate().fold(0, |byte, (at, x)| byte | (x & ((1 << bits) - 1)) << (bits * at))
        };
        self.bytes.chunks(8 / bits).map(byte).collect()
    }

    /// Makes an `i64` vector.
    pub fn vector(numbers: &[i64]) -> Tensor {
        let numbers: Vec<i128> = numbers.iter().map(|&x| x.into()).collect();
        Tensor::from_integers(DType::I64, [numbers.len()], &numbers)
    }

    /// Makes a scalar.
    pub fn scalar(dtype: DType, number: f64) -> Tensor {
        Tensor::from_floats(dtype, [], &[number])
    }

    /// Type of the tensor.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Type of its elements.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    /// Dimensions of the tensor.
    pub fn shape(&self) -> &[usize] {
        &self.ty.shape
    }

    /// Number of elements.
    pub fn n_elements(&self) -> usize {
        self.bytes.len() / self.ty.dtype.size()
    }

    /// Bytes of the elements, which need not be aligned.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Range of the first dimension, which shares memory with the tensor; `None` if it is not all there.
    pub fn rows(&self, rows: Range<usize>) -> Option<Tensor> {
        let (&n, shape) = self.ty.shape.split_first()?;
        let n_bytes = self.bytes.len().checked_div(n)?;
        let is_there = rows.start <= rows.end && rows.end <= n;
        let bytes = is_there.then(|| self.bytes.slice(rows.start * n_bytes..rows.end * n_bytes))?;
        Some(Tensor { ty: TensorType::new(self.ty.dtype, [&[rows.len()], shape].concat()), bytes })
    }

    /// Elements converted to f64.
    pub fn floats(&self) -> Vec<f64> {
        decode!(self, f64)
    }

    /// Elements converted to integers; floating-point numbers are truncated, and NaN becomes 0.
    pub fn integers(&self) -> Vec<i128> {
        decode!(self, i128)
    }

    /// Elements converted to `i64`; larger unsigned ones wrap around, floating-point numbers saturate.
    pub fn i64s(&self) -> Vec<i64> {
        decode!(self, i64)
    }

    /// Converts floating-point numbers of 8 and 16 bits to f32; other types are returned as they are.
    pub fn widened(&self) -> Tensor {
        let bytes = match self.ty.dtype {
            DType::F16 => singles_of(&self.bytes, |b| f16::from_le_bytes(b).to_f32()),
            DType::Bf16 => singles_of(&self.bytes, |b| bf16::from_le_bytes(b).to_f32()),
            dtype if dtype.is_float8() => return self.rounded(DType::F32),
            _ => return self.clone(),
        };
        Tensor { ty: TensorType::new(DType::F32, self.ty.shape.clone()), bytes: bytes.into() }
    }

    /// Rounds the elements to another floating-point type; they are shared if they have it.
    pub fn rounded(&self, dtype: DType) -> Tensor {
        if dtype == self.dtype() { self.clone() } else { Tensor::from_floats(dtype, self.shape(), &self.floats()) }
    }

    /// Tensor of another shape with the same elements, shared.
    ///
    /// # Panics
    /// If the shape has another number of elements.
    pub fn reshaped(&self, shape: impl Into<Vec<usize>>) -> Tensor {
        let ty = TensorType::new(self.ty.dtype, shape);
        assert_eq!(ty.checked_len(), Some(self.n_elements()), "a reshape keeps the elements");
        Tensor { ty, bytes: self.bytes.clone() }
    }
}

/// Concatenates the bytes of numbers.
fn bytes_of<T: Copy, const N: usize>(numbers: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    numbers.iter().flat_map(|&x| bytes(x)).collect()
}

/// Converts 16-bit numbers to the bytes of f32. Must be fast, as weights are most of a model's data.
fn singles_of(bytes: &[u8], number: impl Fn([u8; 2]) -> f32) -> Vec<u8> {
    let from = bytes.as_chunks::<2>().0;
    let mut all = vec![0; 4 * from.len()];
    all.as_chunks_mut::<4>().0.iter_mut().zip(from).for_each(|(to, &from)| *to = number(from).to_le_bytes());
    all
}

/// Decodes consecutive numbers from bytes.
fn numbers_of<T, const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|&b| number(b)).collect()
}

/// Rounds to the nearest, ties to even. `bf16::from_f64` rounds twice.
fn bf16_from_f64(x: f64) -> bf16 {
    let single = x as f32;
    if !single.is_finite() || f64::from(single) == x {
        return bf16::from_f32(single);
    }
    // Rounded to odd, so that the second rounding takes the discarded bits into account.
    let towards_zero = if f64::from(single).abs() > x.abs() { f32::from_bits(single.to_bits() - 1) } else { single };
    bf16::from_f32(f32::from_bits(towards_zero.to_bits() | 1))
}
