//! Conversions of the element type.

use super::quantize::check_saturates;
use super::{Inputs, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Conversion to another element type (`Cast`, `CastLike`).
#[derive(Debug, Clone, Copy)]
pub struct Cast {
    /// Target type; `None` takes that of input 1 (`CastLike`).
    pub to: Option<DType>,
}

/// Reinterpretation of each element's bits as another type of equal size.
#[derive(Debug, Clone, Copy)]
pub struct BitCast {
    /// Target type.
    pub to: DType,
}

fn type_of(number: i64) -> Result<DType, OpError> {
    DType::from_onnx(number).map_err(|name| unsupported!("elements of type {name} are not supported"))
}

pub(super) const ROWS: &[Operator] = &[
    row("Cast", &[6, 9, 13, 19, 21, 23, 24, 25, 28], 1..=1, |node| {
        let _ = node.text("round_mode")?;
        check_saturates(node)?;
        let to = node.int("to")?.ok_or_else(|| invalid!("it has no type to cast to"))?;
        Ok(Cast { to: Some(type_of(to)?) }.into())
    }),
    row("CastLike", &[15, 19, 21, 23, 24, 25], 2..=2, |node| {
        let _ = node.text("round_mode")?;
        check_saturates(node)?;
        Ok(Cast { to: None }.into())
    }),
    row("BitCast", &[26], 1..=1, |node| {
        let to = node.int("to")?.ok_or_else(|| invalid!("it has no type to cast to"))?;
        Ok(BitCast { to: type_of(to)? }.into())
    }),
];

impl Operation for Cast {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let to = match self.to {
            Some(to) => to,
            None => inputs.fact(1)?.dtype(),
        };
        Ok(vec![TensorType::new(to, inputs.shape(0)?)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        Ok(vec![if x.dtype() == ty.dtype {
            x.clone()
        } else if x.dtype().is_float() {
            // A number out of range of a short integer keeps its low bits as a longer integer.
            match ty.dtype {
                DType::I8 | DType::U8 | DType::I16 | DType::U16 => low_bits(x, DType::I32, ty),
                DType::I4 | DType::U4 | DType::I2 | DType::U2 => low_bits(x, DType::I32, ty),
                DType::U32 => low_bits(x, DType::I64, ty),
                _ => Tensor::from_floats(ty.dtype, ty.shape, &x.floats()),
            }
        } else {
            Tensor::from_integers(ty.dtype, ty.shape, &x.integers())
        }])
    }
}

/// Converts floating-point numbers to integers, as the low bits of a longer integer type.
fn low_bits(x: &Tensor, longer: DType, ty: TensorType) -> Tensor {
    let integers = Tensor::from_floats(longer, x.shape(), &x.floats()).integers();
    Tensor::from_integers(ty.dtype, ty.shape, &integers)
}

impl Operation for BitCast {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        if ty.dtype.bits() != self.to.bits() || self.to == DType::Bool {
            return Err(unsupported!("a cast of the bits of {} to {} is not supported", ty.dtype, self.to));
        }
        Ok(vec![TensorType::new(self.to, ty.shape.clone())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let bytes = inputs.tensor(0)?.packed();
        Ok(vec![Tensor::from_packed(ty, bytes).expect("types of one size")])
    }
}
