//! Element types of tensors in Rust.

pub use half::{bf16, f16};
use tilewright_ir::DType;

/// Element type of a tensor: `f32`, `f64`, [`struct@f16`], [`bf16`], integers of 8 to 64 bits, or `bool`. The
/// trait is sealed.
pub trait Element: private::Bytes {
    /// Element type in programs.
    const DTYPE: DType;
}

/// Buffer of elements that a kernel reads: a slice, array or vector.
pub trait Elements: private::Read {}

/// Buffer of elements that a kernel writes: a mutable slice, array or vector.
pub trait ElementsMut: private::Write {}

impl<T: private::Read + ?Sized> Elements for T {}
impl<T: private::Write + ?Sized> ElementsMut for T {}

pub(crate) mod private {
    use super::{DType, Element};

    /// Elements as bytes in the order of this machine.
    pub trait Bytes: Copy {
        fn to_bytes(values: &[Self], bytes: &mut [u8]);
        fn from_bytes(bytes: &[u8], values: &mut [Self]);
    }

    /// Elements to be read.
    pub trait Read {
        fn dtype(&self) -> DType;
        fn n_elements(&self) -> usize;
        fn read(&self, bytes: &mut [u8]);
    }

    /// Elements to be written.
    pub trait Write {
        fn dtype(&self) -> DType;
        fn n_elements(&self) -> usize;
        fn write(&mut self, bytes: &[u8]);
    }

    /// Implements both for a type with elements.
    macro_rules! elements {
        ($(($($const:tt)*) $type:ty;)*) => {$(
            impl<E: Element, $($const)*> Read for $type {
                fn dtype(&self) -> DType {
                    E::DTYPE
                }
                fn n_elements(&self) -> usize {
                    self.len()
                }
                fn read(&self, bytes: &mut [u8]) {
                    E::to_bytes(self, bytes);
                }
            }
        )*};
    }
    elements! {
        () Vec<E>;
        () [E];
        () &[E];
        (const N: usize) [E; N];
    }

    /// Implements [`Write`] for a type with elements.
    macro_rules! elements_mut {
        ($(($($const:tt)*) $type:ty;)*) => {$(
            impl<E: Element, $($const)*> Write for $type {
                fn dtype(&self) -> DType {
                    E::DTYPE
                }
                fn n_elements(&self) -> usize {
                    self.len()
                }
                fn write(&mut self, bytes: &[u8]) {
                    E::from_bytes(bytes, self);
                }
            }
        )*};
    }
    elements_mut! {
        () Vec<E>;
        () [E];
        () &mut [E];
        (const N: usize) [E; N];
    }
}

/// Implements [`Element`] for number types, whose bytes are in this machine's order.
macro_rules! plain {
    ($($type:ty: $dtype:ident,)*) => {$(
        impl private::Bytes for $type {
            fn to_bytes(values: &[$type], bytes: &mut [u8]) {
                let (chunks, _) = bytes.as_chunks_mut();
                chunks.iter_mut().zip(values).for_each(|(chunk, value)| *chunk = value.to_ne_bytes());
            }

            fn from_bytes(bytes: &[u8], values: &mut [$type]) {
                let (chunks, _) = bytes.as_chunks();
                chunks.iter().zip(values).for_each(|(chunk, value)| *value = <$type>::from_ne_bytes(*chunk));
            }
        }

        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

plain! {
    f32: F32, f64: F64, f16: F16, bf16: Bf16,
    i8: I8, u8: U8, i16: I16, u16: U16, i32: I32, u32: U32, i64: I64, u64: U64,
}

impl private::Bytes for bool {
    fn to_bytes(values: &[bool], bytes: &mut [u8]) {
        bytes.iter_mut().zip(values).for_each(|(byte, value)| *byte = u8::from(*value));
    }

    fn from_bytes(bytes: &[u8], values: &mut [bool]) {
        bytes.iter().zip(values).for_each(|(byte, value)| *value = *byte != 0);
    }
}

impl Element for bool {
    const DTYPE: DType = DType::Bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a type with its values, and back.
    fn check<E: Element + PartialEq + std::fmt::Debug>(values: &[E]) {
        let n_bytes = E::DTYPE.bytes() as usize;
        assert_eq!(n_bytes, size_of::<E>(), "{}", E::DTYPE.name());
        let (mut bytes, mut back) = (vec![0xAA; n_bytes * values.len()], values.to_vec());
        E::to_bytes(values, &mut bytes);
        back.reverse();
        E::from_bytes(&bytes, &mut back);
        assert_eq!(back, values);
        // A program's own reading of the bytes agrees.
        assert_eq!(E::DTYPE.read_held(&bytes).len(), values.len());
    }

    #[test]
    fn elements_go_to_bytes_and_back() {
        check(&[f32::MIN, -0.0, f32::INFINITY, 1e-45]);
        check(&[f64::MAX, 5e-324]);
        check(&[f16::MAX, f16::NEG_INFINITY, f16::from_f32(0.1)]);
        check(&[bf16::MAX, bf16::from_f32(-3.5)]);
        check(&[i8::MIN, 0, i8::MAX]);
        check(&[u8::MAX, 1]);
        check(&[i16::MIN, i16::MAX]);
        check(&[u16::MAX, 7]);
        check(&[i32::MIN, i32::MAX]);
        check(&[u32::MAX, 7]);
        check(&[i64::MIN, i64::MAX]);
        check(&[u64::MAX, 7]);
        check(&[true, false, true]);
        // NaN keeps its bits.
        let mut bytes = [0; 4];
        <f32 as private::Bytes>::to_bytes(&[f32::from_bits(0x7fc0_1234)], &mut bytes);
        assert_eq!(u32::from_ne_bytes(bytes), 0x7fc0_1234);
    }
}
