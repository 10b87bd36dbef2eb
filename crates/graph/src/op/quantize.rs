//! Linear quantization, and products and convolutions of quantized tensors.

use super::conv::{ConvShape, add_bias, convolve};
use super::matmul::{batched_product, centred, check_number, check_zero, product_shape};
use super::packed::check_block_scales;
use super::util::{axis, product, size, strides};
use super::{Conv, Import, Inputs, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Linear quantization `saturate(round(x / scale) + zero_point)`: the scale is input 1, the zero point input
/// 2. The result has the zero point's type, or without one the type given here.
#[derive(Debug, Clone, Copy)]
pub struct QuantizeLinear(pub Scaling);

/// Linear dequantization `(x − zero_point) · scale`: the scale is input 1, the zero point input 2. The result
/// has the type given here, or else the scale's.
#[derive(Debug, Clone, Copy)]
pub struct DequantizeLinear(pub Scaling);

/// Granularity of the scales (per tensor, per axis or blocked), and the result's type.
#[derive(Debug, Clone, Copy)]
pub struct Scaling {
    /// Dimension of per-axis and blocked scales.
    pub axis: i64,
    /// Block size along `axis` of blocked quantization; 0 for per-tensor and per-axis scales.
    pub block: usize,
    /// Type of the result; `None` takes it from the inputs.
    pub dtype: Option<DType>,
}

/// Dynamic quantization to `u8` with scale and zero point computed from the range of the input; outputs are
/// the integers, the scale and the zero point.
#[derive(Debug, Clone, Copy)]
pub struct DynamicQuantizeLinear;

/// Matrix product of quantized matrices. Inputs: A with its scale and zero point, B with its, and scale and
/// zero point of the result.
#[derive(Debug, Clone, Copy)]
pub struct QLinearMatMul;

/// Convolution of quantized tensors. Inputs: image with scale and zero point, weights with scale and zero
/// point, scale and zero point of the result, and an optional i32 bias.
#[derive(Debug, Clone)]
pub struct QLinearConv(pub Conv);

fn dtype_of(number: Option<i64>) -> Result<Option<DType>, OpError> {
    let read = |n| DType::from_onnx(n).map_err(|name| unsupported!("elements of type {name} are not supported"));
    number.filter(|&n| n != 0).map(read).transpose()
}

pub(super) const ROWS: &[Operator] = &[
    row("QuantizeLinear", &[10, 13, 19, 21, 23, 24, 25, 28], 2..=3, |node| {
        let _ = node.int("precision")?;
        check_saturates(node)?;
        Ok(QuantizeLinear(Scaling::import(node)?).into())
    }),
    row("DequantizeLinear", &[10, 13, 19, 21, 23, 24, 25, 28], 2..=3, |node| {
        Ok(DequantizeLinear(Scaling::import(node)?).into())
    }),
    row("DynamicQuantizeLinear", &[11], 1..=1, |_| Ok(DynamicQuantizeLinear.into())),
    row("QLinearMatMul", &[10, 21], 8..=8, |_| Ok(QLinearMatMul.into())),
    row("QLinearConv", &[10], 8..=9, |node| Ok(QLinearConv(Conv::import(node)?).into())),
];

/// Index of the scale for each element of a tensor.
fn scale_of(shape: &[usize], scale: &[usize], scaling: Scaling) -> Result<impl Fn(usize) -> usize, OpError> {
    let block = scaling.block;
    let n_scales = product(scale);
    let refuse = || invalid!("scales of shape {scale:?} do not fit {shape:?}");
    let (own, of_scale) = (strides(shape), strides(scale));
    let shape_owned = shape.to_vec();
    let mut at = None;
    if n_scales != 1 || block > 0 {
        let d = scaling.dimension(shape.len())?;
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

/// Rounds to the nearest integer of a type, ties to even; NaN becomes the least.
fn saturated(x: f64, dtype: DType) -> f64 {
    let (least, most) = dtype.integer_range();
    x.round_ties_even().max(least as f64).min(most as f64)
}

/// Checks that numbers out of range of floating-point numbers of 8 bits are to become the largest of them.
pub(super) fn check_saturates(node: &Import) -> Result<(), OpError> {
    match node.flag("saturate", true)? {
        true => Ok(()),
        false => Err(unsupported!("numbers out of range that become NaN (`saturate` of 0) are not supported")),
    }
}

fn check_quantized(dtype: DType) -> Result<(), OpError> {
    match dtype.is_integer() || dtype.is_float8() {
        true => Ok(()),
        false => Err(unsupported!("numbers quantized as {dtype} are not supported")),
    }
}

/// Signs of the scales of an operand. Quantizers give weights negative scales to use the least integer for
/// the largest magnitude.
#[derive(Clone, Copy, PartialEq)]
enum Signs {
    Positive,
    Any,
}

/// Checks that constant scales are finite numbers with these signs, and none is 0.
fn check_scales(inputs: Inputs<'_>, at: usize, signs: Signs) -> Result<(), OpError> {
    let Some(scale) = inputs.fact(at)?.value else { return Ok(()) };
    let holds = |scale: f64| scale.is_finite() && (scale > 0.0 || scale < 0.0 && signs == Signs::Any);
    let Some(scale) = scale.floats().into_iter().find(|scale| !holds(*scale)) else { return Ok(()) };
    let wanted = if signs == Signs::Any { "numbers other than 0" } else { "positive numbers" };
    let how = match scale.is_infinite() {
        true => "its range was infinite, as of masked scores: quantize products only",
        false => "quantize it again",
    };
    Err(invalid!("its input {} has a scale of {scale}, and scales are {wanted} ({how})", at + 1))
}

impl Scaling {
    /// Dimension of per-axis and blocked scales of a tensor of this rank. A vector has only one, whatever the
    /// attribute says: quantizers leave it at its default of 1.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn dimension(&self, rank: usize) -> Result<usize, OpError> {
        if rank == 1 { Ok(0) } else { axis(self.axis, rank) }
    }

    fn import(node: &Import) -> Result<Scaling, OpError> {
        let block = size(node.int_or("block_size", 0)?)?;
        Ok(Scaling { axis: node.int_or("axis", 1)?, block, dtype: dtype_of(node.int("output_dtype")?)? })
    }

    /// Checks the scales, and returns the type of the result.
    fn infer(&self, inputs: Inputs<'_>, dtype: DType, integers: DType) -> Result<Vec<TensorType>, OpError> {
        let _ = scale_of(inputs.shape(0)?, inputs.shape(1)?, *self)?;
        check_zero(inputs, 2, integers, None)?;
        if let Some(zero) = inputs.optional(2)
            && product(zero.shape()) != product(inputs.shape(1)?)
        {
            let [n_zeros, n_scales] = [product(zero.shape()), product(inputs.shape(1)?)];
            return Err(invalid!(
                "it has {n_scales} scales and {n_zeros} zero points, and should have one of each for all"
            ));
        }
        Ok(vec![TensorType::new(dtype, inputs.shape(0)?)])
    }

    /// Evaluates a function of each element, its scale and its zero point.
    fn evaluate(
        &self,
        inputs: Inputs<'_>,
        ty: TensorType,
        becomes: impl Fn(f64, f64, f64) -> f64,
    ) -> Result<Vec<Tensor>, OpError> {
        let (x, scale) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let of = scale_of(x.shape(), scale.shape(), *self)?;
        let (scales, zeros) = (scale.floats(), inputs.optional_tensor(2)?.map(Tensor::floats));
        let mut numbers = x.floats();
        for (at, x) in numbers.iter_mut().enumerate() {
            let zero = zeros.as_ref().map_or(0.0, |zeros| zeros[of(at)]);
            *x = becomes(*x, scales[of(at)], zero);
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}

impl Operation for QuantizeLinear {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let dtype = inputs.optional(2).map(|zero| zero.dtype()).or(self.0.dtype).unwrap_or(DType::U8);
        check_quantized(dtype)?;
        if dtype.size() > 2 {
            return Err(unsupported!("numbers quantized as {dtype} are not supported"));
        }
        check_scales(inputs, 1, Signs::Positive)?;
        self.0.infer(inputs, dtype, dtype)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let dtype = ty.dtype;
        // Divided in f32, as in practical quantizers.
        let quotient = |x: f64, scale: f64| f64::from((x / scale) as f32);
        if dtype.is_float8() {
            return self.0.evaluate(inputs, ty, |x, scale, _| quotient(x, scale));
        }
        self.0.evaluate(inputs, ty, |x, scale, zero| saturated(quotient(x, scale).round_ties_even() + zero, dtype))
    }
}

impl Operation for DequantizeLinear {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let integers = inputs.fact(0)?.dtype();
        check_quantized(integers)?;
        match self.0.block {
            0 => check_scales(inputs, 1, Signs::Any)?,
            _ => check_block_scales(inputs, 1)?,
        }
        self.0.infer(inputs, self.0.dtype.unwrap_or(inputs.ty(1)?.dtype), integers)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        self.0.evaluate(inputs, ty, |x, scale, zero| (x - zero) * scale)
    }
}

/// Quantizes numbers to 0 to 255, with a scale and zero point from their range; returns the integers, the
/// scale and the zero point. The scale is NaN if any number is.
pub(super) fn by_range(numbers: &[f64]) -> (Vec<f64>, f64, f64) {
    let (low, high) = numbers.iter().fold((0.0_f64, 0.0_f64), |(low, high), &x| (low.min(x), high.max(x)));
    let is_nan = numbers.iter().any(|x| x.is_nan());
    let scale = if is_nan { f64::NAN } else { f64::from(((high - low) / 255.0) as f32) };
    let scale = if scale == 0.0 { 1.0 } else { scale };
    let zero = saturated(f64::from((-low / scale) as f32), DType::U8);
    let level = |x: &f64| saturated(f64::from((*x / scale) as f32).round_ties_even() + zero, DType::U8);
    (numbers.iter().map(level).collect(), scale, zero)
}

impl Operation for DynamicQuantizeLinear {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let shape = inputs.shape(0)?;
        Ok(vec![TensorType::new(DType::U8, shape), TensorType::new(DType::F32, []), TensorType::new(DType::U8, [])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let (numbers, scale, zero) = by_range(&x.floats());
        Ok(vec![
            Tensor::from_floats(DType::U8, x.shape(), &numbers),
            Tensor::scalar(DType::F32, scale),
            Tensor::scalar(DType::U8, zero),
        ])
    }
}

/// Scales for `n` channels, from a single number or one for each.
fn factors(x: &Tensor, n: usize) -> Result<Vec<f64>, OpError> {
    match x.floats() {
        one if one.len() == 1 => Ok(vec![one[0]; n]),
        each if each.len() == n => Ok(each),
        _ => Err(unsupported!("scales {x:?} are not supported here")),
    }
}

/// Sum of products of two factors as a multiple of the result's scale, the last of the three. Each step is
/// rounded to f32, as in the kernels that models were quantized for.
fn multiple(sum: f64, [of_a, of_b, of_result]: [f64; 3]) -> f64 {
    let factor = (of_a as f32 * of_b as f32) / of_result as f32;
    f64::from(sum as f32 * factor)
}

/// Checks that operands and results of `QLinear` operators are integers with fitting scales and zero points:
/// for each operand one, or as many as `places` gives.
fn check_factors(inputs: Inputs<'_>, places: [usize; 2]) -> Result<(), OpError> {
    let result = inputs.fact(7)?.dtype();
    if !result.is_integer() {
        return Err(unsupported!("numbers quantized as {result} are not supported"));
    }
    for (at, n) in [0, 3].into_iter().zip(places) {
        check_scales(inputs, at + 1, Signs::Positive)?;
        check_number(inputs, at + 1, "scales", n)?;
        let n_scales = product(inputs.shape(at + 1)?);
        check_zero(inputs, at + 2, inputs.fact(at)?.dtype(), Some(n_scales))?;
    }
    check_scales(inputs, 6, Signs::Positive)?;
    check_number(inputs, 6, "scales", 1)?;
    check_zero(inputs, 7, result, Some(1))
}

impl Operation for QLinearMatMul {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let dtype = inputs.fact(7)?.dtype();
        let shape = product_shape(inputs.shape(0)?, inputs.shape(3)?)?;
        let [m, n, _] = shape.sizes;
        check_factors(inputs, [m, n])?;
        Ok(vec![TensorType::new(dtype, shape.out)])
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
            let scales = [by_row[at / n % m], by_column[at % n], scale];
            *x = saturated(multiple(*x, scales).round_ties_even() + zero, ty.dtype);
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
        let shape = self.shape(inputs)?;
        check_factors(inputs, [1, shape.m])?;
        Ok(vec![TensorType::new(dtype, shape.out())])
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
            let scales = [of_image, of_weights[at / places % shape.m], scale];
            *x = saturated(multiple(*x, scales).round_ties_even() + zero, ty.dtype);
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}
