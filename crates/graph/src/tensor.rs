//! Host tensors: an element type, a shape, and bytes that several tensors may share.

use std::fmt;

use bytes::Bytes;
use half::{bf16, f16};

use crate::DType;

/// What is known of a tensor without its elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorType {
    /// The type of its elements.
    pub dtype: DType,
    /// Its dimensions, the last one contiguous; none of a scalar.
    pub shape: Vec<usize>,
}

impl TensorType {
    /// A type.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>) -> TensorType {
        TensorType { dtype, shape: shape.into() }
    }

    /// Elements, where their number fits a `usize`.
    pub fn checked_len(&self) -> Option<usize> {
        self.shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d))
    }

    /// Elements.
    ///
    /// # Panics
    /// Where their number does not fit a `usize`.
    pub fn n_elements(&self) -> usize {
        self.checked_len().expect("tensors are checked to fit memory")
    }

    /// Bytes, where their number fits a `usize`.
    pub fn checked_bytes(&self) -> Option<usize> {
        self.checked_len()?.checked_mul(self.dtype.size())
    }
}

impl fmt::Display for TensorType {
    /// As `f32[1,3,224,224]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, shape_text(&self.shape))
    }
}

/// A shape as `[1,3,224,224]`.
pub fn shape_text(shape: &[usize]) -> String {
    let dims: Vec<String> = shape.iter().map(usize::to_string).collect();
    format!("[{}]", dims.join(","))
}

/// A tensor in memory: little-endian elements, row-major. A clone shares the bytes.
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

impl Tensor {
    /// A tensor of bytes; none where there are more or fewer than its type takes. Bytes of `bool` that are
    /// neither 0 nor 1 count as 1.
    pub fn new(ty: TensorType, bytes: Bytes) -> Option<Tensor> {
        let fits = ty.checked_bytes() == Some(bytes.len());
        let is_bool_clean = ty.dtype != DType::Bool || bytes.iter().all(|&b| b <= 1);
        let bytes = if is_bool_clean { bytes } else { bytes.iter().map(|&b| u8::from(b != 0)).collect() };
        fits.then_some(Tensor { ty, bytes })
    }

    /// A tensor of numbers; they are rounded to nearest, and integers cut off towards zero and saturated.
    ///
    /// # Panics
    /// Where there are more or fewer numbers than its shape takes.
    pub fn from_floats(dtype: DType, shape: impl Into<Vec<usize>>, numbers: &[f64]) -> Tensor {
        let mut bytes = Vec::with_capacity(numbers.len() * dtype.size());
        macro_rules! push {
            ($convert:expr) => {
                numbers.iter().for_each(|&x| bytes.extend_from_slice(&($convert)(x).to_le_bytes()))
            };
        }
        match dtype {
            DType::F16 => push!(f16::from_f64),
            DType::Bf16 => push!(bf16_from_f64),
            DType::F32 => push!(|x: f64| x as f32),
            DType::F64 => push!(|x: f64| x),
            DType::I8 => push!(|x: f64| x as i8),
            DType::I16 => push!(|x: f64| x as i16),
            DType::I32 => push!(|x: f64| x as i32),
            DType::I64 => push!(|x: f64| x as i64),
            DType::U8 => push!(|x: f64| x as u8),
            DType::U16 => push!(|x: f64| x as u16),
            DType::U32 => push!(|x: f64| x as u32),
            DType::U64 => push!(|x: f64| x as u64),
            DType::Bool => push!(|x: f64| u8::from(x != 0.0)),
        }
        Tensor::new(TensorType::new(dtype, shape), bytes.into()).expect("as many numbers as the shape takes")
    }

    /// A tensor of integers; they wrap around where they do not fit, and all but zero are true.
    ///
    /// # Panics
    /// Where there are more or fewer numbers than its shape takes.
    pub fn from_integers(dtype: DType, shape: impl Into<Vec<usize>>, numbers: &[i128]) -> Tensor {
        let mut bytes = Vec::with_capacity(numbers.len() * dtype.size());
        macro_rules! push {
            ($convert:expr) => {
                numbers.iter().for_each(|&x| bytes.extend_from_slice(&($convert)(x).to_le_bytes()))
            };
        }
        match dtype {
            DType::F16 => push!(|x: i128| f16::from_f64(x as f64)),
            DType::Bf16 => push!(|x: i128| bf16_from_f64(x as f64)),
            DType::F32 => push!(|x: i128| x as f32),
            DType::F64 => push!(|x: i128| x as f64),
            DType::I8 => push!(|x: i128| x as i8),
            DType::I16 => push!(|x: i128| x as i16),
            DType::I32 => push!(|x: i128| x as i32),
            DType::I64 => push!(|x: i128| x as i64),
            DType::U8 => push!(|x: i128| x as u8),
            DType::U16 => push!(|x: i128| x as u16),
            DType::U32 => push!(|x: i128| x as u32),
            DType::U64 => push!(|x: i128| x as u64),
            DType::Bool => push!(|x: i128| u8::from(x != 0)),
        }
        Tensor::new(TensorType::new(dtype, shape), bytes.into()).expect("as many numbers as the shape takes")
    }

    /// An `i64` tensor of one dimension.
    pub fn vector(numbers: &[i64]) -> Tensor {
        let numbers: Vec<i128> = numbers.iter().map(|&x| x.into()).collect();
        Tensor::from_integers(DType::I64, [numbers.len()], &numbers)
    }

    /// A tensor without dimensions.
    pub fn scalar(dtype: DType, number: f64) -> Tensor {
        Tensor::from_floats(dtype, [], &[number])
    }

    /// Its type.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.ty.dtype
    }

    /// Its dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.ty.shape
    }

    /// Elements.
    pub fn n_elements(&self) -> usize {
        self.bytes.len() / self.ty.dtype.size()
    }

    /// Its elements as bytes. They need not be aligned.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Its elements in double precision.
    pub fn floats(&self) -> Vec<f64> {
        let bytes = &self.bytes;
        macro_rules! read {
            ($type:ty, $size:literal, $convert:expr) => {
                bytes.as_chunks::<$size>().0.iter().map(|&b| ($convert)(<$type>::from_le_bytes(b))).collect()
            };
        }
        match self.ty.dtype {
            DType::F16 => read!(f16, 2, f16::to_f64),
            DType::Bf16 => read!(bf16, 2, bf16::to_f64),
            DType::F32 => read!(f32, 4, f64::from),
            DType::F64 => read!(f64, 8, f64::from),
            DType::I8 => read!(i8, 1, f64::from),
            DType::I16 => read!(i16, 2, f64::from),
            DType::I32 => read!(i32, 4, f64::from),
            DType::I64 => read!(i64, 8, |x| x as f64),
            DType::U8 | DType::Bool => read!(u8, 1, f64::from),
            DType::U16 => read!(u16, 2, f64::from),
            DType::U32 => read!(u32, 4, f64::from),
            DType::U64 => read!(u64, 8, |x| x as f64),
        }
    }

    /// Its elements as integers; floating-point numbers are cut off towards zero, and not a number is 0.
    pub fn integers(&self) -> Vec<i128> {
        let bytes = &self.bytes;
        macro_rules! read {
            ($type:ty, $size:literal) => {
                bytes.as_chunks::<$size>().0.iter().map(|&b| <$type>::from_le_bytes(b).into()).collect()
            };
        }
        match self.ty.dtype {
            DType::I8 => read!(i8, 1),
            DType::I16 => read!(i16, 2),
            DType::I32 => read!(i32, 4),
            DType::I64 => read!(i64, 8),
            DType::U8 | DType::Bool => read!(u8, 1),
            DType::U16 => read!(u16, 2),
            DType::U32 => read!(u32, 4),
            DType::U64 => read!(u64, 8),
            DType::F16 | DType::Bf16 | DType::F32 | DType::F64 => self.floats().iter().map(|&x| x as i128).collect(),
        }
    }

    /// Its elements as `i64`; unsigned ones that are too large wrap around.
    pub fn i64s(&self) -> Vec<i64> {
        self.integers().iter().map(|&x| x as i64).collect()
    }

    /// The same elements in another shape of as many.
    ///
    /// # Panics
    /// Where the shape takes more or fewer.
    pub fn reshaped(&self, shape: impl Into<Vec<usize>>) -> Tensor {
        let ty = TensorType::new(self.ty.dtype, shape);
        assert_eq!(ty.checked_len(), Some(self.n_elements()), "a reshape keeps the elements");
        Tensor { ty, bytes: self.bytes.clone() }
    }
}

/// To the nearest, ties to even. `bf16::from_f64` rounds twice.
fn bf16_from_f64(x: f64) -> bf16 {
    let single = x as f32;
    if !single.is_finite() || f64::from(single) == x {
        return bf16::from_f32(single);
    }
    // Rounded to odd, so that the second rounding sees that something was cut off.
    let towards_zero = if f64::from(single).abs() > x.abs() { f32::from_bits(single.to_bits() - 1) } else { single };
    bf16::from_f32(f32::from_bits(towards_zero.to_bits() | 1))
}
