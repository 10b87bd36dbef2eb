//! Elementwise operators.

use super::util::{broadcast, broadcast_strides, check_float, for_each, larger, smaller};
use super::{ANY, Import, Inputs, Op, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Elementwise function of one tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Unary {
    Abs,
    Acos,
    Acosh,
    Affine { alpha: f64, beta: f64 },
    Asin,
    Asinh,
    Atan,
    Atanh,
    BitwiseNot,
    Ceil,
    Celu { alpha: f64 },
    Cos,
    Cosh,
    Elu { alpha: f64 },
    Erf,
    Exp,
    Floor,
    Gelu { by_tanh: bool },
    HardSigmoid { alpha: f64, beta: f64 },
    HardSwish,
    Identity,
    IsInf { negative: bool, positive: bool },
    IsNan,
    LeakyRelu { alpha: f64 },
    Log,
    Mish,
    Neg,
    Not,
    Reciprocal,
    Relu,
    Round,
    ScaledTanh { alpha: f64, beta: f64 },
    Selu { alpha: f64, gamma: f64 },
    Shrink { bias: f64, lambd: f64 },
    Sigmoid,
    Sign,
    Sin,
    Sinh,
    Softplus,
    Softsign,
    Sqrt,
    Swish { alpha: f64 },
    Tan,
    Tanh,
    ThresholdedRelu { alpha: f64 },
}

/// Elementwise function of two tensors, with broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    And,
    BitShift {
        to_left: bool,
    },
    BitwiseAnd,
    BitwiseOr,
    BitwiseXor,
    Div,
    Equal,
    Greater,
    GreaterOrEqual,
    Less,
    LessOrEqual,
    /// Whether the remainder has the sign of the dividend (`fmod`), rather than of the divisor.
    Mod {
        of_dividend: bool,
    },
    Mul,
    Or,
    Pow,
    /// `x` where positive, else `slope · x`. Broadcasting is one-way: the slope broadcasts to `x`.
    PRelu,
    Sub,
    Xor,
}

/// Elementwise function of any number of tensors, with broadcasting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Variadic {
    Max,
    Mean,
    Min,
    Sum,
}

/// `min(max(x, lower), upper)`. Bounds that are `None` here are inputs 1 and 2, each optional.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    /// Lower bound, if it is an attribute (before opset 11).
    pub min: Option<f64>,
    /// Upper bound, if it is an attribute (before opset 11).
    pub max: Option<f64>,
}

/// Elementwise choice: input 1 where the condition, input 0, is true, else input 2; all three broadcast.
#[derive(Debug, Clone, Copy)]
pub struct Where;

/// Dropout at inference: the input unchanged; the second output is a mask that is true everywhere.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// Whether the mask has the input's type, as before opset 10, rather than `bool`.
    pub mask_of_input_type: bool,
    /// Whether the ratio, input 1, must be 0, as the training mode is an input and may be true.
    pub may_train: bool,
}

type ImportFunction = fn(&Import) -> Result<Op, OpError>;

const fn unary(name: &'static str, since: &'static [i64], import: ImportFunction) -> Operator {
    row(name, since, 1..=1, import)
}

const fn binary(name: &'static str, since: &'static [i64], import: ImportFunction) -> Operator {
    row(name, since, 2..=2, import)
}

/// Imports an operator whose broadcasting rules have changed.
fn old(node: &Import, operation: Binary) -> Result<Op, OpError> {
    if node.version < 7 {
        let _ = node.int("broadcast")?;
        if let Some(axis) = node.int("axis")? {
            return Err(unsupported!("axis={axis} of old broadcasting is not supported (convert the model)"));
        }
    }
    Ok(operation.into())
}

pub(super) const ROWS: &[Operator] = &[
    unary("Abs", &[6, 13], |_| Ok(Unary::Abs.into())),
    unary("Acos", &[7, 22], |_| Ok(Unary::Acos.into())),
    unary("Acosh", &[9, 22], |_| Ok(Unary::Acosh.into())),
    unary("Asin", &[7, 22], |_| Ok(Unary::Asin.into())),
    unary("Asinh", &[9, 22], |_| Ok(Unary::Asinh.into())),
    unary("Atan", &[7, 22], |_| Ok(Unary::Atan.into())),
    unary("Atanh", &[9, 22], |_| Ok(Unary::Atanh.into())),
    unary("BitwiseNot", &[18], |_| Ok(Unary::BitwiseNot.into())),
    unary("Ceil", &[6, 13], |_| Ok(Unary::Ceil.into())),
    unary("Celu", &[12, 28], |node| Ok(Unary::Celu { alpha: node.float_or("alpha", 1.0)? }.into())),
    unary("Cos", &[7, 22], |_| Ok(Unary::Cos.into())),
    unary("Cosh", &[9, 22], |_| Ok(Unary::Cosh.into())),
    unary("Elu", &[6, 22], |node| Ok(Unary::Elu { alpha: node.float_or("alpha", 1.0)? }.into())),
    unary("Erf", &[9, 13], |_| Ok(Unary::Erf.into())),
    unary("Exp", &[6, 13], |_| Ok(Unary::Exp.into())),
    unary("Floor", &[6, 13], |_| Ok(Unary::Floor.into())),
    unary("Gelu", &[20], |node| {
        let by_tanh = node.one_of("approximate", "none", &[("none", false), ("tanh", true)])?;
        Ok(Unary::Gelu { by_tanh }.into())
    }),
    unary("HardSigmoid", &[6, 22], |node| {
        Ok(Unary::HardSigmoid { alpha: node.float_or("alpha", 0.2)?, beta: node.float_or("beta", 0.5)? }.into())
    }),
    unary("HardSwish", &[14, 22], |_| Ok(Unary::HardSwish.into())),
    unary("Identity", &[1, 13, 14, 16, 19, 21, 23, 24, 25], |_| Ok(Op::identity())),
    unary("IsInf", &[10, 20], |node| {
        let (negative, positive) = (node.flag("detect_negative", true)?, node.flag("detect_positive", true)?);
        Ok(Unary::IsInf { negative, positive }.into())
    }),
    unary("IsNaN", &[9, 13, 20], |_| Ok(Unary::IsNan.into())),
    unary("LeakyRelu", &[6, 16], |node| Ok(Unary::LeakyRelu { alpha: node.float_or("alpha", 0.01)? }.into())),
    unary("Log", &[6, 13], |_| Ok(Unary::Log.into())),
    unary("Mish", &[18, 22], |_| Ok(Unary::Mish.into())),
    unary("Neg", &[6, 13], |_| Ok(Unary::Neg.into())),
    unary("Not", &[1], |_| Ok(Unary::Not.into())),
    unary("Reciprocal", &[6, 13], |_| Ok(Unary::Reciprocal.into())),
    unary("Relu", &[6, 13, 14], |_| Ok(Unary::Relu.into())),
    unary("Round", &[11, 22], |_| Ok(Unary::Round.into())),
    unary("Selu", &[6, 22], |node| {
        let (alpha, gamma) = (node.float_or("alpha", 1.673_263_2)?, node.float_or("gamma", 1.050_701)?);
        Ok(Unary::Selu { alpha, gamma }.into())
    }),
    unary("Shrink", &[9], |node| {
        Ok(Unary::Shrink { bias: node.float_or("bias", 0.0)?, lambd: node.float_or("lambd", 0.5)? }.into())
    }),
    unary("Sigmoid", &[6, 13], |_| Ok(Unary::Sigmoid.into())),
    unary("Sign", &[9, 13], |_| Ok(Unary::Sign.into())),
    unary("Sin", &[7, 22], |_| Ok(Unary::Sin.into())),
    unary("Sinh", &[9, 22], |_| Ok(Unary::Sinh.into())),
    unary("Softplus", &[1, 22], |_| Ok(Unary::Softplus.into())),
    unary("Softsign", &[1, 22], |_| Ok(Unary::Softsign.into())),
    unary("Sqrt", &[6, 13], |_| Ok(Unary::Sqrt.into())),
    unary("Swish", &[24], |node| Ok(Unary::Swish { alpha: node.float_or("alpha", 1.0)? }.into())),
    unary("Tan", &[7, 22], |_| Ok(Unary::Tan.into())),
    unary("Tanh", &[6, 13], |_| Ok(Unary::Tanh.into())),
    unary("ThresholdedRelu", &[10, 22], |node| {
        Ok(Unary::ThresholdedRelu { alpha: node.float_or("alpha", 1.0)? }.into())
    }),
    binary("Add", &[6, 7, 13, 14], |node| old(node, Binary::Add)),
    binary("And", &[1, 7], |node| old(node, Binary::And)),
    binary("BitShift", &[11, 28], |node| {
        let direction = node.text("direction")?.ok_or_else(|| invalid!("it has no direction"))?;
        Ok(Binary::BitShift { to_left: direction == "LEFT" }.into())
    }),
    binary("BitwiseAnd", &[18], |_| Ok(Binary::BitwiseAnd.into())),
    binary("BitwiseOr", &[18], |_| Ok(Binary::BitwiseOr.into())),
    binary("BitwiseXor", &[18], |_| Ok(Binary::BitwiseXor.into())),
    binary("Div", &[6, 7, 13, 14], |node| old(node, Binary::Div)),
    binary("Equal", &[1, 7, 11, 13, 19], |node| old(node, Binary::Equal)),
    binary("Greater", &[1, 7, 9, 13], |node| old(node, Binary::Greater)),
    binary("GreaterOrEqual", &[12, 16], |_| Ok(Binary::GreaterOrEqual.into())),
    binary("Less", &[1, 7, 9, 13], |node| old(node, Binary::Less)),
    binary("LessOrEqual", &[12, 16], |_| Ok(Binary::LessOrEqual.into())),
    binary("Mod", &[10, 13, 28], |node| Ok(Binary::Mod { of_dividend: node.flag("fmod", false)? }.into())),
    binary("Mul", &[6, 7, 13, 14], |node| old(node, Binary::Mul)),
    binary("Or", &[1, 7], |node| old(node, Binary::Or)),
    binary("PRelu", &[6, 7, 9, 16], |node| old(node, Binary::PRelu)),
    binary("Pow", &[1, 7, 12, 13, 15], |node| old(node, Binary::Pow)),
    binary("Sub", &[6, 7, 13, 14], |node| old(node, Binary::Sub)),
    binary("Xor", &[1, 7], |node| old(node, Binary::Xor)),
    row("Max", &[6, 8, 12, 13], 1..=ANY, |_| Ok(Variadic::Max.into())),
    row("Mean", &[6, 8, 13], 1..=ANY, |_| Ok(Variadic::Mean.into())),
    row("Min", &[6, 8, 12, 13], 1..=ANY, |_| Ok(Variadic::Min.into())),
    row("Sum", &[6, 8, 13], 1..=ANY, |_| Ok(Variadic::Sum.into())),
    row("Clip", &[6, 11, 12, 13], 1..=3, |node| {
        let bound = |name| Ok(if node.version < 11 { node.float(name)?.map(f64::from) } else { None });
        Ok(Clip { min: bound("min")?, max: bound("max")? }.into())
    }),
    row("Where", &[9, 16], 3..=3, |_| Ok(Where.into())),
    row("Dropout", &[6, 7, 10, 12, 13, 22], 1..=3, |node| {
        // The seed and the old ratio matter in training only.
        let _ = (node.int("seed")?, node.float("ratio")?);
        let is_test = node.version >= 7 || node.flag("is_test", false)?;
        if !is_test {
            return Err(unsupported!("training is not supported"));
        }
        Ok(Dropout { mask_of_input_type: node.version < 10, may_train: node.version >= 12 }.into())
    }),
];

impl Unary {
    /// Result for a number, in f64.
    pub fn of_float(self, x: f64) -> f64 {
        use Unary as U;
        let truth = |is: bool| f64::from(u8::from(is));
        match self {
            U::Abs => x.abs(),
            U::Acos => x.acos(),
            U::Acosh => x.acosh(),
            U::Affine { alpha, beta } => alpha * x + beta,
            U::Asin => x.asin(),
            U::Asinh => x.asinh(),
            U::Atan => x.atan(),
            U::Atanh => x.atanh(),
            U::Ceil => x.ceil(),
            U::Celu { alpha } => larger(x, 0.0) + smaller(alpha * (x / alpha).exp_m1(), 0.0),
            U::Cos => x.cos(),
            U::Cosh => x.cosh(),
            U::Elu { alpha } => {
                if x < 0.0 {
                    alpha * x.exp_m1()
                } else {
                    x
                }
            }
            U::Erf => erf(x),
            U::Exp => x.exp(),
            U::Floor => x.floor(),
            U::Gelu { by_tanh: false } => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
            U::Gelu { by_tanh: true } => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
            U::HardSigmoid { alpha, beta } => (alpha * x + beta).clamp(0.0, 1.0),
            U::HardSwish => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
            U::Identity | U::BitwiseNot => x,
            U::IsInf { negative, positive } => truth(x.is_infinite() && if x > 0.0 { positive } else { negative }),
            U::IsNan => truth(x.is_nan()),
            U::LeakyRelu { alpha } => {
                if x < 0.0 {
                    alpha * x
                } else {
                    x
                }
            }
            U::Log => x.ln(),
            U::Mish => x * softplus(x).tanh(),
            U::Neg => -x,
            U::Not => truth(x == 0.0),
            U::Reciprocal => 1.0 / x,
            U::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            U::Round => x.round_ties_even(),
            U::ScaledTanh { alpha, beta } => alpha * (beta * x).tanh(),
            U::Selu { alpha, gamma } => gamma * if x > 0.0 { x } else { alpha * x.exp_m1() },
            U::Shrink { bias, lambd } => {
                if x < -lambd {
                    x + bias
                } else if x > lambd {
                    x - bias
                } else {
                    0.0
                }
            }
            U::Sigmoid => sigmoid(x),
            U::Sign => {
                if x == 0.0 || x.is_nan() {
                    x
                } else {
                    x.signum()
                }
            }
            U::Sin => x.sin(),
            U::Sinh => x.sinh(),
            U::Softplus => softplus(x),
            U::Softsign => x / (1.0 + x.abs()),
            U::Sqrt => x.sqrt(),
            U::Swish { alpha } => x * sigmoid(alpha * x),
            U::Tan => x.tan(),
            U::Tanh => x.tanh(),
            U::ThresholdedRelu { alpha } => {
                if x > alpha {
                    x
                } else {
                    0.0
                }
            }
        }
    }

    /// Result for an integer; `None` if it is not exact.
    fn of_integer(self, x: i128) -> Option<i128> {
        Some(match self {
            Unary::Abs => x.abs(),
            Unary::BitwiseNot => !x,
            Unary::Neg => -x,
            Unary::Not => i128::from(x == 0),
            Unary::Relu => x.max(0),
            Unary::Sign => x.signum(),
            Unary::Shrink { bias, lambd } if bias.fract() == 0.0 && !lambd.is_nan() => match x {
                x if x < (-lambd).ceil() as i128 => x + bias as i128,
                x if x > lambd.floor() as i128 => x - bias as i128,
                _ => 0,
            },
            _ => return None,
        })
    }

    fn output_type(self, dtype: DType) -> DType {
        match self {
            Unary::Not | Unary::IsNan | Unary::IsInf { .. } => DType::Bool,
            _ => dtype,
        }
    }
}

impl Operation for Unary {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        Ok(vec![TensorType::new(self.output_type(ty.dtype), ty.shape.clone())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        if *self == Unary::Identity {
            return Ok(vec![x.clone()]);
        }
        let dtype = self.output_type(x.dtype());
        if !x.dtype().is_float() {
            let numbers: Option<Vec<i128>> = x.integers().iter().map(|&x| self.of_integer(x)).collect();
            if let Some(numbers) = numbers {
                return Ok(vec![Tensor::from_integers(dtype, x.shape(), &numbers)]);
            }
        }
        let mut numbers = x.floats();
        numbers.iter_mut().for_each(|x| *x = self.of_float(*x));
        Ok(vec![Tensor::from_floats(dtype, x.shape(), &numbers)])
    }
}

/// Logistic function.
pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Error function, by a series of positive terms, exact to the last digits. Beyond 6 it is 1.
pub(super) fn erf(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > sum.abs() * 1e-17 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

impl Binary {
    fn output_type(self, dtype: DType) -> DType {
        use Binary as B;
        match self {
            B::And | B::Or | B::Xor | B::Equal | B::Greater | B::GreaterOrEqual | B::Less | B::LessOrEqual => {
                DType::Bool
            }
            _ => dtype,
        }
    }

    /// Result for two numbers, in f64.
    pub fn of_floats(self, a: f64, b: f64) -> f64 {
        use Binary as B;
        let truth = |is: bool| f64::from(u8::from(is));
        match self {
            B::Add => a + b,
            B::Sub => a - b,
            B::Mul => a * b,
            B::Div => a / b,
            B::Pow => a.powf(b),
            B::PRelu => {
                if a < 0.0 {
                    a * b
                } else {
                    a
                }
            }
            B::Mod { of_dividend: true } => a % b,
            B::Mod { of_dividend: false } => {
                let rest = a % b;
                if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
            }
            B::Equal => truth(a == b),
            B::Greater => truth(a > b),
            B::GreaterOrEqual => truth(a >= b),
            B::Less => truth(a < b),
            B::LessOrEqual => truth(a <= b),
            B::And | B::BitwiseAnd => truth(a != 0.0 && b != 0.0),
            B::Or | B::BitwiseOr => truth(a != 0.0 || b != 0.0),
            B::Xor | B::BitwiseXor => truth((a != 0.0) != (b != 0.0)),
            B::BitShift { .. } => f64::NAN,
        }
    }

    fn of_integers(self, a: i128, b: i128, dtype: DType) -> i128 {
        use Binary as B;
        match self {
            B::Add => a + b,
            B::Sub => a - b,
            B::Mul => a.wrapping_mul(b),
            // Same as in kernels, which cannot fail.
            B::Div | B::Mod { .. } if b == 0 => 0,
            B::Div => a / b,
            B::Mod { of_dividend: true } => a % b,
            B::Mod { of_dividend: false } => {
                let rest = a % b;
                if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
            }
            B::Pow if b < 0 => match a {
                1 => 1,
                -1 => {
                    if b % 2 == 0 {
                        1
                    } else {
                        -1
                    }
                }
                _ => 0,
            },
            B::Pow => power(a, b),
            B::PRelu => {
                if a < 0 {
                    a.wrapping_mul(b)
                } else {
                    a
                }
            }
            B::Equal => (a == b).into(),
            B::Greater => (a > b).into(),
            B::GreaterOrEqual => (a >= b).into(),
            B::Less => (a < b).into(),
            B::LessOrEqual => (a <= b).into(),
            B::And => (a != 0 && b != 0).into(),
            B::Or => (a != 0 || b != 0).into(),
            B::Xor => ((a != 0) != (b != 0)).into(),
            B::BitwiseAnd => a & b,
            B::BitwiseOr => a | b,
            B::BitwiseXor => a ^ b,
            // A right shift by the width or more leaves only the sign; a left shift leaves 0.
            B::BitShift { to_left: true } if !(0..8 * dtype.size() as i128).contains(&b) => 0,
            B::BitShift { to_left: true } => a << b,
            B::BitShift { to_left: false } if !(0..64).contains(&b) => {
                if a < 0 {
                    -1
                } else {
                    0
                }
            }
            B::BitShift { to_left: false } => a >> b,
        }
    }
}

/// Power modulo 2⁶⁴, for a non-negative exponent.
fn power(base: i128, mut exponent: i128) -> i128 {
    let (mut power, mut base) = (1_i64, base as i64);
    while exponent > 0 {
        if exponent & 1 == 1 {
            power = power.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        exponent >>= 1;
    }
    power.into()
}

impl Operation for Binary {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (a, b) = (inputs.ty(0)?, inputs.ty(1)?);
        let may_differ = matches!(self, Binary::Pow | Binary::BitShift { .. });
        if a.dtype != b.dtype && !may_differ {
            return Err(invalid!("its inputs are {} and {}, and should be of one type", a.dtype, b.dtype));
        }
        let shape = broadcast(&[&a.shape, &b.shape])?;
        if *self == Binary::PRelu && shape != a.shape {
            return Err(invalid!("its slope of shape {:?} does not broadcast to {:?}", b.shape, a.shape));
        }
        Ok(vec![TensorType::new(self.output_type(a.dtype), shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (a, b) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let by = [&broadcast_strides(a.shape(), &ty.shape)[..], &broadcast_strides(b.shape(), &ty.shape)];
        if a.dtype().is_float() || b.dtype().is_float() {
            let (x, y) = (a.floats(), b.floats());
            let mut numbers = vec![0.0; ty.n_elements()];
            for_each(&ty.shape, by, |at, [i, j]| numbers[at] = self.of_floats(x[i], y[j]));
            return Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)]);
        }
        let (x, y) = (a.integers(), b.integers());
        let mut numbers = vec![0; ty.n_elements()];
        for_each(&ty.shape, by, |at, [i, j]| numbers[at] = self.of_integers(x[i], y[j], a.dtype()));
        Ok(vec![Tensor::from_integers(ty.dtype, ty.shape, &numbers)])
    }
}

impl Operation for Variadic {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let first = inputs.ty(0)?;
        let mut shapes: Vec<&[usize]> = Vec::with_capacity(inputs.n_inputs());
        for at in 0..inputs.n_inputs() {
            let ty = inputs.ty(at)?;
            if ty.dtype != first.dtype {
                return Err(invalid!("its inputs are {} and {}, and should be of one type", first.dtype, ty.dtype));
            }
            shapes.push(&ty.shape);
        }
        Ok(vec![TensorType::new(first.dtype, broadcast(&shapes)?)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let n = ty.n_elements();
        if ty.dtype.is_float() {
            let mut sums = Vec::new();
            for at in 0..inputs.n_inputs() {
                let x = inputs.tensor(at)?;
                let numbers = x.floats();
                if at == 0 {
                    sums = vec![0.0; n];
                }
                for_each(&ty.shape, [&broadcast_strides(x.shape(), &ty.shape)], |to, [from]| {
                    let (sum, x) = (&mut sums[to], numbers[from]);
                    *sum = match self {
                        _ if at == 0 => x,
                        Variadic::Max => larger(x, *sum),
                        Variadic::Min => smaller(x, *sum),
                        Variadic::Mean | Variadic::Sum => *sum + x,
                    };
                });
            }
            if *self == Variadic::Mean {
                sums.iter_mut().for_each(|sum| *sum /= inputs.n_inputs() as f64);
            }
            return Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &sums)]);
        }
        let mut sums = vec![0; n];
        for at in 0..inputs.n_inputs() {
            let x = inputs.tensor(at)?;
            let numbers = x.integers();
            for_each(&ty.shape, [&broadcast_strides(x.shape(), &ty.shape)], |to, [from]| {
                let (sum, x) = (&mut sums[to], numbers[from]);
                *sum = match self {
                    _ if at == 0 => x,
                    Variadic::Max => x.max(*sum),
                    Variadic::Min => x.min(*sum),
                    Variadic::Mean | Variadic::Sum => *sum + x,
                };
            });
        }
        if *self == Variadic::Mean {
            sums.iter_mut().for_each(|sum| *sum /= inputs.n_inputs() as i128);
        }
        Ok(vec![Tensor::from_integers(ty.dtype, ty.shape, &sums)])
    }
}

impl Operation for Clip {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![inputs.ty(0)?.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let (min, max) = (inputs.optional_tensor(1)?, inputs.optional_tensor(2)?);
        if x.dtype().is_float() {
            let bound = |attribute: Option<f64>, tensor: Option<&Tensor>, default: f64| {
                attribute.or_else(|| tensor.and_then(|t| t.floats().first().copied())).unwrap_or(default)
            };
            let (low, high) = (bound(self.min, min, f64::NEG_INFINITY), bound(self.max, max, f64::INFINITY));
            let mut numbers = x.floats();
            // If the bounds cross, the upper one wins. NaN elements stay, and a NaN bound is ignored.
            numbers.iter_mut().filter(|x| !x.is_nan()).for_each(|x| *x = x.max(low).min(high));
            return Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)]);
        }
        let (least, most) = x.dtype().integer_range();
        let bound = |attribute: Option<f64>, tensor: Option<&Tensor>, default: i128| {
            let given = attribute.map(|x| x as i128);
            given.or_else(|| tensor.and_then(|t| t.integers().first().copied())).unwrap_or(default)
        };
        let (low, high) = (bound(self.min, min, least), bound(self.max, max, most));
        let numbers: Vec<i128> = x.integers().iter().map(|&x| x.max(low).min(high)).collect();
        Ok(vec![Tensor::from_integers(x.dtype(), x.shape(), &numbers)])
    }
}

impl Operation for Where {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (condition, a, b) = (inputs.ty(0)?, inputs.ty(1)?, inputs.ty(2)?);
        if condition.dtype != DType::Bool || a.dtype != b.dtype {
            let types = format!("{}, {} and {}", condition.dtype, a.dtype, b.dtype);
            return Err(invalid!("its inputs are {types}, and should be bool and two of one type"));
        }
        Ok(vec![TensorType::new(a.dtype, broadcast(&[&condition.shape, &a.shape, &b.shape])?)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (condition, a, b) = (inputs.tensor(0)?, inputs.tensor(1)?, inputs.tensor(2)?);
        let by = [condition, a, b].map(|x| broadcast_strides(x.shape(), &ty.shape));
        let size = ty.dtype.size();
        let mut bytes = Vec::with_capacity(ty.n_elements() * size);
        for_each(&ty.shape, [&by[0], &by[1], &by[2]], |_, [c, i, j]| {
            let (from, at) = if condition.bytes()[c] != 0 { (a, i) } else { (b, j) };
            bytes.extend_from_slice(&from.bytes()[at * size..(at + 1) * size]);
        });
        Ok(vec![Tensor::new(ty, bytes.into()).expect("an element for each place")])
    }
}

impl Dropout {
    fn check(self, inputs: Inputs<'_>) -> Result<(), OpError> {
        // The mode may be given as an input, and the ratio too.
        if self.may_train
            && let Some(mode) = inputs.optional(2)
        {
            let is_training = mode.value.is_none_or(|mode| mode.integers().first() == Some(&1));
            let ratio = inputs.optional(1).and_then(|ratio| ratio.value).map(|ratio| ratio.floats());
            if is_training && ratio.is_none_or(|ratio| ratio.first() != Some(&0.0)) {
                return Err(unsupported!("training is not supported"));
            }
        }
        Ok(())
    }
}

impl Operation for Dropout {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        self.check(inputs)?;
        let ty = inputs.ty(0)?;
        check_float(ty.dtype)?;
        let mask = if self.mask_of_input_type { ty.dtype } else { DType::Bool };
        Ok(vec![ty.clone(), TensorType::new(mask, ty.shape.clone())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(inputs)?;
        let x = inputs.tensor(0)?;
        let mask = Tensor::from_floats(types[1].dtype, x.shape(), &vec![1.0; x.n_elements()]);
        Ok(vec![x.clone(), mask])
    }
}
