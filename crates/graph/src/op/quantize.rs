//! Numbers as multiples of a scale.

use super::conv::{ConvShape, add_bias, convolve};
use super::matmul::{batched_product, centred, product_shape};
use super::util::{axis, product, strides};
use super::{Conv, Inputs, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Multiples of a scale, input 1, as integers; the type is that of the zero point, input 2.
#[derive(Debug, Clone, Copy)]
pub struct QuantizeLinear {
    /// The dimension along which there are several scales.
    pub axis: i64,
    /// How many elements along it have one scale.
    pub block: usize,
    /// The type, where there is no zero point.
    pub dtype: Option<DType>,
}

/// Integers as multiples of a scale, input 1, less a zero point, input 2.
#[derive(Debug, Clone, Copy)]
pub struct DequantizeLinear {
    /// The dimension along which there are several scales.
    pub axis: i64,
    /// How many elements along it have one scale.
    pub block: usize,
    /// The type, if not the scale's.
    pub dtype: Option<DType>,
}

/// Numbers as `u8`, by a scale and a zero point of their range, which are outputs.
#[derive(Debug, Clone, Copy)]
pub struct DynamicQuantizeLinear;

/// Product of quantized matrices: each with scale and zero point, and those of the result.
#[derive(Debug, Clone, Copy)]
pub struct QLinearMatMul;

/// Convolution of quantized numbers: image and weights with scale and zero point, those of the result, and
/// what is added.
#[derive(Debug, Clone)]
pub struct QLinearConv(pub Conv);

fn dtype_of(number: Option<i64>) -> Result<Option<DType>, OpError> {
    let read = |n| DType::from_onnx(n).map_err(|name| unsupported!("elements of type {name} are not supported"));
    number.filter(|&n| n != 0).map(read).transpose()
}

pub(super) const ROWS: &[Operator] = &[
    row("QuantizeLinear", &[10, 13, 19, 21, 23, 24, 25, 28], 2..=3, |node| {
        let _ = (node.int("saturate")?, node.int("precision")?);
        let block = super::util::size(node.int_or("block_size", 0)?)?;
        Ok(QuantizeLinear { axis: node.int_or("axis", 1)?, block, dtype: dtype_of(node.int("output_dtype")?)? }.into())
    }),
    row("DequantizeLinear", &[10, 13, 19, 21, 23, 24, 25, 28], 2..=3, |node| {
        let block = super::util::size(node.int_or("block_size", 0)?)?;
        Ok(DequantizeLinear { axis: node.int_or("axis", 1)?, block, dtype: dtype_of(node.int("output_dtype")?)? }
            .into())
    }),
    row("DynamicQuantizeLinear", &[11], 1..=1, |_| Ok(DynamicQuantizeLinear.into())),
    row("QLinearMatMul", &[10, 21], 8..=8, |_| Ok(QLinearMatMul.into())),
    row("QLinearConv", &[10], 8..=9, |node| Ok(QLinearConv(Conv::import(node)?).into())),
];

/// For each element of a tensor: which of the scales it has.
fn scale_of(shape: &[usize], scale: &[usize], along: i64, block: usize) -> Result<impl Fn(usize) -> usize, OpError> {
    let n_scales = product(scale);
    let refuse = || invalid!("scales of shape {scale:?} do not fit {shape:?}");
    let (own, of_scale) = (strides(shape), strides(scale));
    let shape_owned = shape.to_vec();
    let mut at = None;
    if n_scales != 1 || block > 0 {
        let d = axis(along, shape.len())?;
        let fits = if block > 0 {
            scale.len() == shape.len()
                && (0..shape.len())
                    .all(|i| if i == d { scale[i] == shape[i].div_ceil(block) } else { scale[i] == shape[i] })
        } else {
            scale == [shape[d]]
        };
        if !fits {
            return Err(refuse());
        }
        at = Some(d);
    }
    Ok(move |place: usize| match at {
        None => 0,
        Some(d) if block == 0 => place / own[d] % shape_owned[d],
        Some(d) => {
            (0..own.len()).map(|i| place / own[i] % shape_owned[i] / if i == d { block } else { 1 } * of_scale[i]).sum()
        }
    })
}

/// The nearest integer of a type, ties to even.
fn saturated(x: f64, dtype: DType) -> f64 {
    let (least, most) = dtype.integer_range();
    x.round_ties_even().clamp(least as f64, most as f64)
}

fn check_quantized(dtype: DType) -> Result<(), OpError> {
    match dtype.is_integer() {
        true => Ok(()),
        false => Err(unsupported!("numbers quantized as {dtype} are not supported")),
    }
}

impl Operation for QuantizeLinear {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let dtype = inputs.optional(2).map(|zero| zero.dtype()).or(self.dtype).unwrap_or(DType::U8);
        check_quantized(dtype)?;
        let _ = scale_of(inputs.shape(0)?, inputs.shape(1)?, self.axis, self.block)?;
        Ok(vec![TensorType::new(dtype, inputs.shape(0)?)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (x, scale) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let of = scale_of(x.shape(), scale.shape(), self.axis, self.block)?;
        let (scales, zeros) = (scale.floats(), inputs.optional_tensor(2)?.map(Tensor::floats));
        let mut numbers = x.floats();
        for (at, x) in numbers.iter_mut().enumerate() {
            let zero = zeros.as_ref().map_or(0.0, |zeros| zeros[of(at)]);
            // Divided in single precision, as what rounds in practice does.
            let quotient = f64::from((*x / scales[of(at)]) as f32);
            *x = saturated(quotient.round_ties_even() + zero, ty.dtype);
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}

impl Operation for DequantizeLinear {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let scale = inputs.ty(1)?;
        check_quantized(inputs.fact(0)?.dtype())?;
        let _ = scale_of(inputs.shape(0)?, &scale.shape, self.axis, self.block)?;
        Ok(vec![TensorType::new(self.dtype.unwrap_or(scale.dtype), inputs.shape(0)?)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (x, scale) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let of = scale_of(x.shape(), scale.shape(), self.axis, self.block)?;
        let (scales, zeros) = (scale.floats(), inputs.optional_tensor(2)?.map(Tensor::floats));
        let mut numbers = x.floats();
        for (at, x) in numbers.iter_mut().enumerate() {
            let zero = zeros.as_ref().map_or(0.0, |zeros| zeros[of(at)]);
            *x = (*x - zero) * scales[of(at)];
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}

impl Operation for DynamicQuantizeLinear {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let shape = inputs.shape(0)?;
        Ok(vec![TensorType::new(DType::U8, shape), TensorType::new(DType::F32, []), TensorType::new(DType::U8, [])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let mut numbers = x.floats();
        let (low, high) = numbers.iter().fold((0.0_f64, 0.0_f64), |(low, high), &x| (low.min(x), high.max(x)));
        let scale = f64::from(((high - low) / 255.0) as f32);
        let scale = if scale == 0.0 { 1.0 } else { scale };
        let zero = saturated(f64::from((-low / scale) as f32), DType::U8);
        numbers
            .iter_mut()
            .for_each(|x| *x = saturated(f64::from((*x / scale) as f32).round_ties_even() + zero, DType::U8));
        Ok(vec![
            Tensor::from_floats(DType::U8, x.shape(), &numbers),
            Tensor::scalar(DType::F32, scale),
            Tensor::scalar(DType::U8, zero),
        ])
    }
}

/// One number, or one for each of `n`.
fn factors(x: &Tensor, n: usize) -> Result<Vec<f64>, OpError> {
    match x.floats() {
        one if one.len() == 1 => Ok(vec![one[0]; n]),
        each if each.len() == n => Ok(each),
        _ => Err(unsupported!("scales {x:?} are not supported here")),
    }
}

impl Operation for QLinearMatMul {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let dtype = inputs.fact(7)?.dtype();
        check_quantized(dtype)?;
        Ok(vec![TensorType::new(dtype, product_shape(inputs.shape(0)?, inputs.shape(3)?)?.out)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (a, b) = (inputs.tensor(0)?, inputs.tensor(3)?);
        let shape = product_shape(a.shape(), b.shape())?;
        let [m, n, _] = shape.sizes;
        let rows = a.shape().len().saturating_sub(2);
        let x = centred(a, Some(inputs.tensor(2)?), rows)?;
        let y = centred(b, Some(inputs.tensor(5)?), b.shape().len() - 1)?;
        let mut numbers = batched_product(&shape, &x, &y);
        let (by_row, by_column) = (factors(inputs.tensor(1)?, m)?, factors(inputs.tensor(4)?, n)?);
        let (scale, zero) = (factors(inputs.tensor(6)?, 1)?[0], factors(inputs.tensor(7)?, 1)?[0]);
        for (at, x) in numbers.iter_mut().enumerate() {
            let factor = by_row[at / n % m] * by_column[at % n] / scale;
            *x = saturated((*x * factor).round_ties_even() + zero, ty.dtype);
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}

impl QLinearConv {
    fn shape(&self, inputs: Inputs<'_>) -> Result<ConvShape, OpError> {
        self.0.shape(inputs.shape(0)?, inputs.shape(3)?)
    }
}

impl Operation for QLinearConv {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let dtype = inputs.fact(7)?.dtype();
        check_quantized(dtype)?;
        Ok(vec![TensorType::new(dtype, self.shape(inputs)?.out())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let shape = self.shape(inputs)?;
        let x = centred(inputs.tensor(0)?, Some(inputs.tensor(2)?), 1)?;
        let w = centred(inputs.tensor(3)?, Some(inputs.tensor(5)?), 0)?;
        let mut numbers = convolve(&shape, &x, &w);
        let places = product(&shape.geometry.out);
        add_bias(&mut numbers, inputs.optional_tensor(8)?, shape.m, places)?;
        let (of_image, of_weights) = (factors(inputs.tensor(1)?, 1)?[0], factors(inputs.tensor(4)?, shape.m)?);
        let (scale, zero) = (factors(inputs.tensor(6)?, 1)?[0], factors(inputs.tensor(7)?, 1)?[0]);
        for (at, x) in numbers.iter_mut().enumerate() {
            let factor = of_image * of_weights[at / places % shape.m] / scale;
            *x = saturated((*x * factor).round_ties_even() + zero, ty.dtype);
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}
