//! Quantized operators of ONNX Runtime's domain, which its quantizer writes in the format `QOperator`.
//!
//! Each becomes a floating-point operator between `DequantizeLinear` and `QuantizeLinear`; [`QGemm`](gemm)
//! becomes an integer operator. Matrix products agree with ONNX Runtime's bit for bit. For other operators,
//! some kernels of ONNX Runtime round once more or once less, so that a result may differ by one quantization
//! step.

use super::draft::{Draft, Port, Row, row};
use crate::error::invalid;
use crate::op::{
    Binary, Cast, Concat, Conv, DequantizeLinear, GlobalPool, Import, MatMulInteger, Op, Pool, PoolKind, QLinearConv,
    QuantizeLinear, Reduce, ReduceKind, Scaling, Softmax, SoftmaxKind, Transpose, Unary, Where,
};
use crate::{DType, OpError, Tensor};

/// ONNX domain of these operators.
pub const DOMAIN: &str = "com.microsoft";

/// Supported quantized operators.
pub const ROWS: &[Row] = &[
    row("NhwcMaxPool", &[1], 1..=1, |node, draft| {
        let order = ImageOrder::last(node)?;
        let x = order.read(draft, Port::Input(0));
        let y = draft.op(Pool::import(node, PoolKind::Max { columns_first: false })?, &[x]);
        Ok(vec![order.written(draft, y)])
    }),
    row("QGemm", &[1], 6..=9, gemm),
    row("QLinearAdd", &[1], 7..=8, |node, draft| pair(node, draft, Binary::Add)),
    row("QLinearAveragePool", &[1], 4..=5, |node, draft| {
        let counts_borders = node.flag("count_include_pad", false)?;
        image(node, draft, Pool::import(node, PoolKind::Average { counts_borders })?)
    }),
    row("QLinearConcat", &[1], 5..=usize::MAX, concat),
    row("QLinearConv", &[1], 8..=9, |node, draft| {
        let order = ImageOrder::of(node)?;
        let conv = QLinearConv(Conv::import(node)?);
        let mut inputs: Vec<Port> = (0..8).map(|at| required(node, at)).collect::<Result<_, _>>()?;
        inputs.extend(node.has_input(8).then_some(Port::Input(8)));
        inputs[0] = order.read(draft, inputs[0]);
        let y = draft.op(conv, &inputs);
        Ok(vec![order.written(draft, y)])
    }),
    row("QLinearGlobalAveragePool", &[1], 4..=5, |node, draft| {
        image(node, draft, GlobalPool { kind: PoolKind::Average { counts_borders: false } })
    }),
    row("QLinearLeakyRelu", &[1], 4..=5, |node, draft| {
        one(node, draft, Unary::LeakyRelu { alpha: node.float_or("alpha", 0.01)? })
    }),
    row("QLinearMul", &[1], 7..=8, |node, draft| pair(node, draft, Binary::Mul)),
    row("QLinearReduceMean", &[1], 4..=5, |node, draft| {
        let axes = node.ints("axes")?.filter(|axes| !axes.is_empty());
        let keeps_dims = node.flag("keepdims", true)?;
        one(node, draft, Reduce { kind: ReduceKind::Mean, axes, keeps_dims, none_is_none: false })
    }),
    row("QLinearSigmoid", &[1], 4..=5, |node, draft| one(node, draft, Unary::Sigmoid)),
    row("QLinearSoftmax", &[1], 4..=5, |node, draft| {
        let is_flat = node.int_or("opset", 13)? < 13;
        let axis = node.int_or("axis", if is_flat { 1 } else { -1 })?;
        one(node, draft, Softmax { kind: SoftmaxKind::Soft, axis, is_flat })
    }),
    row("QLinearWhere", &[1], 8..=9, |node, draft| {
        let (x, y) = (dequantized(node, draft, 1)?, dequantized(node, draft, 4)?);
        let chosen = draft.op(Where, &[Port::Input(0), x, y]);
        quantized(node, draft, chosen, 7, 1)
    }),
];

/// Scale and zero point of a whole tensor, or of each column.
const SCALING: Scaling = Scaling { axis: 1, block: 0, dtype: None };

/// Order of an image's dimensions: with the channels before rows and columns, as in ONNX, or after them, as
/// ONNX Runtime's optimizer may choose.
enum ImageOrder {
    ChannelsFirst,
    /// Channels after rows and columns, in an image of this rank.
    ChannelsLast(i64),
}

impl ImageOrder {
    /// Returns the order given by the attribute `channels_last`.
    fn of(node: &Import) -> Result<ImageOrder, OpError> {
        match node.flag("channels_last", false)? {
            false => Ok(ImageOrder::ChannelsFirst),
            true => ImageOrder::last(node),
        }
    }

    /// Returns the order with channels last, for the rank of a node's `kernel_shape`, or else for
    /// two-dimensional images.
    fn last(node: &Import) -> Result<ImageOrder, OpError> {
        let n_axes = node.ints("kernel_shape")?.map_or(2, |kernel| kernel.len() as i64);
        Ok(ImageOrder::ChannelsLast(2 + n_axes))
    }

    /// Transposes the image to channels first.
    fn read(&self, draft: &mut Draft, image: Port) -> Port {
        match *self {
            ImageOrder::ChannelsFirst => image,
            ImageOrder::ChannelsLast(rank) => {
                let order = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
                draft.op(Transpose { order: Some(order) }, &[image])
            }
        }
    }

    /// Transposes the image from channels first to this order.
    fn written(&self, draft: &mut Draft, image: Port) -> Port {
        match *self {
            ImageOrder::ChannelsFirst => image,
            ImageOrder::ChannelsLast(rank) => {
                let order = [0].into_iter().chain(2..rank).chain([1]).collect();
                draft.op(Transpose { order: Some(order) }, &[image])
            }
        }
    }
}

fn required(node: &Import, at: usize) -> Result<Port, OpError> {
    match node.has_input(at) {
        true => Ok(Port::Input(at)),
        false => Err(invalid!("its input {} is missing", at + 1)),
    }
}

/// Dequantizes an input that is followed by its scale and zero point.
fn dequantized(node: &Import, draft: &mut Draft, at: usize) -> Result<Port, OpError> {
    let mut inputs = vec![required(node, at)?, required(node, at + 1)?];
    inputs.extend(node.has_input(at + 2).then_some(Port::Input(at + 2)));
    Ok(draft.op(DequantizeLinear(SCALING), &inputs))
}

/// Quantizes numbers by the scale, input `at`, and the zero point after it; without a zero point, the result
/// has the type of input `like`.
fn quantized(node: &Import, draft: &mut Draft, x: Port, at: usize, like: usize) -> Result<Vec<Port>, OpError> {
    let scale = required(node, at)?;
    let zero = match node.has_input(at + 1) {
        true => Port::Input(at + 1),
        false => {
            let zero = draft.constant(Tensor::scalar(DType::F32, 0.0));
            draft.op(Cast { to: None }, &[zero, Port::Input(like)])
        }
    };
    Ok(vec![draft.op(QuantizeLinear(SCALING), &[x, scale, zero])])
}

/// Draws an operator of one tensor.
fn one(node: &Import, draft: &mut Draft, op: impl Into<Op>) -> Result<Vec<Port>, OpError> {
    let x = dequantized(node, draft, 0)?;
    let y = draft.op(op, &[x]);
    quantized(node, draft, y, 3, 0)
}

/// Draws an operator of one image.
fn image(node: &Import, draft: &mut Draft, op: impl Into<Op>) -> Result<Vec<Port>, OpError> {
    let order = ImageOrder::of(node)?;
    let numbers = dequantized(node, draft, 0)?;
    let x = order.read(draft, numbers);
    let y = draft.op(op, &[x]);
    let y = order.written(draft, y);
    quantized(node, draft, y, 3, 0)
}

/// Draws an operator of two tensors.
fn pair(node: &Import, draft: &mut Draft, op: Binary) -> Result<Vec<Port>, OpError> {
    let (a, b) = (dequantized(node, draft, 0)?, dequantized(node, draft, 3)?);
    let y = draft.op(op, &[a, b]);
    quantized(node, draft, y, 6, 0)
}

/// Draws a concatenation, whose inputs are the scale and zero point of the result, and the tensors with
/// theirs.
fn concat(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let axis = node.int("axis")?.ok_or_else(|| invalid!("it has no axis"))?;
    let n = node.given.len();
    if n % 3 != 2 {
        return Err(invalid!("it has {n} inputs: scale, zero point and three for each tensor are needed"));
    }
    let parts: Vec<Port> = (2..n).step_by(3).map(|at| dequantized(node, draft, at)).collect::<Result<_, _>>()?;
    let joined = draft.op(Concat { axis }, &parts);
    quantized(node, draft, joined, 0, 2)
}

/// Draws `alpha · A · B + C` with integer sums and C; the result is floating-point if it has no scale.
fn gemm(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let alpha = node.float_or("alpha", 1.0)?;
    let mut factors = [required(node, 0)?, required(node, 3)?];
    for (factor, name) in factors.iter_mut().zip(["transA", "transB"]) {
        if node.flag(name, false)? {
            *factor = draft.op(Transpose { order: None }, &[*factor]);
        }
    }
    let zeros = [required(node, 2)?, required(node, 5)?];
    let mut sums = draft.op(MatMulInteger, &[factors[0], factors[1], zeros[0], zeros[1]]);
    if node.has_input(6) {
        sums = draft.op(Binary::Add, &[sums, Port::Input(6)]);
    }
    let sums = draft.op(Cast { to: Some(DType::F32) }, &[sums]);
    // The scales are multiplied in this order, in f32, as in ONNX Runtime.
    let alpha = draft.constant(Tensor::scalar(DType::F32, alpha));
    let scale = draft.op(Binary::Mul, &[alpha, required(node, 1)?]);
    let mut scale = draft.op(Binary::Mul, &[scale, required(node, 4)?]);
    if !node.has_input(7) {
        return Ok(vec![draft.op(Binary::Mul, &[sums, scale])]);
    }
    scale = draft.op(Binary::Div, &[scale, Port::Input(7)]);
    let multiples = draft.op(Binary::Mul, &[sums, scale]);
    let one = draft.constant(Tensor::scalar(DType::F32, 1.0));
    let zero = required(node, 8)?;
    Ok(vec![draft.op(QuantizeLinear(SCALING), &[multiples, one, zero])])
}
