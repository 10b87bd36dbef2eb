//! Fused operators of ONNX Runtime (matrix products and convolutions with an activation), which its optimizer
//! writes into saved models.

use super::draft::{Draft, Port, Row, row};
use crate::error::{invalid, unsupported};
use crate::op::{
    AutoPad, Binary, Cast, Clip, Concat, Conv, Einsum, Gemm, Import, MatMul, Op, Shape, Slice, Transpose, Unary,
    WindowAttributes,
};
use crate::{DType, OpError, Tensor};

/// ONNX domain of these operators.
pub const DOMAIN: &str = "com.microsoft";

/// Supported fused operators.
pub const ROWS: &[Row] = &[
    row("FusedConv", &[1], 2..=4, |node, draft| {
        let mut inputs = vec![Port::Input(0), Port::Input(1)];
        inputs.extend(node.has_input(2).then_some(Port::Input(2)));
        let mut y = draft.op(Conv::import(node)?, &inputs);
        if node.has_input(3) {
            y = draft.op(Binary::Add, &[y, Port::Input(3)]);
        }
        let parameters = node.floats("activation_params")?.unwrap_or_default();
        activated(node, draft, y, &parameters)
    }),
    row("FusedGemm", &[1], 2..=3, |node, draft| {
        let gemm = Gemm {
            alpha: node.float_or("alpha", 1.0)?,
            beta: node.float_or("beta", 1.0)?,
            transposes_a: node.flag("transA", false)?,
            transposes_b: node.flag("transB", false)?,
        };
        let mut inputs = vec![Port::Input(0), Port::Input(1)];
        inputs.extend(node.has_input(2).then_some(Port::Input(2)));
        let y = draft.op(gemm, &inputs);
        let names = ["activation_alpha", "activation_beta", "activation_gamma"];
        let given: Vec<Option<f32>> = names.iter().map(|name| node.float(name)).collect::<Result<_, _>>()?;
        let parameters: Vec<f32> = given.into_iter().map_while(|parameter| parameter).collect();
        activated(node, draft, y, &parameters)
    }),
    row("FusedMatMul", &[1], 2..=2, product),
    row("CausalConvWithState", &[1], 4..=4, causal_convolution),
];

/// Applies the function of a node's attribute `activation`, with its parameters, to a value.
fn activated(node: &Import, draft: &mut Draft, x: Port, parameters: &[f32]) -> Result<Vec<Port>, OpError> {
    let Some(name) = node.text("activation")?.filter(|name| !name.is_empty()) else { return Ok(vec![x]) };
    let parameter = |at: usize, default: f32| f64::from(parameters.get(at).copied().unwrap_or(default));
    let unary = match name.as_str() {
        "Clip" => {
            let clip = Clip { min: Some(parameter(0, f32::MIN)), max: Some(parameter(1, f32::MAX)) };
            return Ok(vec![draft.op(clip, &[x])]);
        }
        "HardSigmoid" => Unary::HardSigmoid { alpha: parameter(0, 0.2), beta: parameter(1, 0.5) },
        "LeakyRelu" => Unary::LeakyRelu { alpha: parameter(0, 0.01) },
        "Relu" => Unary::Relu,
        "Sigmoid" => Unary::Sigmoid,
        "Tanh" => Unary::Tanh,
        _ => return Err(unsupported!("activation `{name}` is not supported")),
    };
    Ok(vec![draft.op(unary, &[x])])
}

/// Draws `alpha · A · B` over the last two dimensions or, with `transBatchA` or `transBatchB`, over the first
/// and the last one. Each operand may also be transposed.
fn product(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let mut is_plain = true;
    let mut term = |[rows, columns]: [char; 2], turned: &str, batch_inside: &str| {
        let [turned, batch_inside] = [node.flag(turned, false)?, node.flag(batch_inside, false)?];
        is_plain &= !turned && !batch_inside;
        let (first, last) = if turned { (columns, rows) } else { (rows, columns) };
        Ok(if batch_inside { format!("{first}...{last}") } else { format!("...{first}{last}") })
    };
    let a = term(['i', 'k'], "transA", "transBatchA")?;
    let b = term(['k', 'j'], "transB", "transBatchB")?;
    let factors = [Port::Input(0), Port::Input(1)];
    let y = match is_plain {
        true => draft.op(MatMul, &factors),
        false => draft.op(Einsum { equation: format!("{a},{b}->...ij") }, &factors),
    };
    let alpha = node.float_or("alpha", 1.0)?;
    if !alpha.is_finite() {
        return Err(invalid!("its alpha is {alpha} (give a finite number)"));
    }
    if alpha == 1.0 {
        return Ok(vec![y]);
    }
    let alpha = draft.constant(Tensor::scalar(DType::F32, alpha));
    let alpha = draft.op(Cast { to: None }, &[alpha, y]);
    Ok(vec![draft.op(Binary::Mul, &[y, alpha])])
}

/// Draws a convolution of each channel over the last positions, of which a state holds those of earlier runs:
/// the state and the new positions are joined, and the last of them are the next state.
fn causal_convolution(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let refuse = |what: &str| Err(unsupported!("{what} is not supported"));
    if node.int_or("ndim", 1)? != 1 || node.int_or("state_window", 0)? != 0 {
        return refuse("a convolution over several dimensions, or a window of states,");
    }
    if !node.has_input(3) {
        return refuse("a convolution without a state");
    }
    let activation = node.text_or("activation", "none")?;
    let dilation = usize::try_from(node.int_or("dilation", 1)?).ok().filter(|dilation| *dilation > 0);
    let dilation = dilation.ok_or_else(|| invalid!("its dilation is not 1 or more"))?;
    let turns = node.flag("channels_last", false)?;
    let turned = |draft: &mut Draft, x: Port| match turns {
        true => draft.op(Transpose { order: Some(vec![0, 2, 1]) }, &[x]),
        false => x,
    };
    let (x, state) = (turned(draft, Port::Input(0)), turned(draft, Port::Input(3)));
    let all = draft.op(Concat { axis: -1 }, &[state, x]);
    let window = WindowAttributes {
        kernel: None,
        strides: None,
        dilations: Some(vec![dilation]),
        pads: None,
        auto_pad: AutoPad::Given,
        ceil: false,
    };
    let mut inputs = vec![all, Port::Input(1)];
    inputs.extend(node.has_input(2).then_some(Port::Input(2)));
    let mut y = draft.op(Conv { window, groups: None }, &inputs);
    match activation.as_str() {
        "none" => {}
        "silu" | "swish" => y = draft.op(Op::Unary(Unary::Swish { alpha: 1.0 }), &[y]),
        _ => return refuse(&format!("activation `{activation}`")),
    }
    // The state is as long as before: it begins where the new positions end, counted from the start.
    let first = draft.op(Shape { start: 2, end: Some(3) }, &[x]);
    let [end, axis] = [i64::MAX, 2].map(|number| draft.constant(Tensor::vector(&[number])));
    let next = draft.op(Slice { attributes: None }, &[all, first, end, axis]);
    Ok(vec![turned(draft, y), turned(draft, next)])
}
