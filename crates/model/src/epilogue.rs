//! Conversion of elementwise maps to epilogues of products and convolutions.

use std::f64::consts::FRAC_1_SQRT_2;

use tilewright_ir::expr::{BinaryOp, Cond, UnaryOp};
use tilewright_ir::op::{Epilogue, EpilogueFunction, Operand};
use tilewright_ir::{DType, Expr};

use crate::net::Net;
use crate::scalar::{cost, number, sigmoid};

/// Operations of an epilogue, each with the index of the input that is its operand, if any.
pub type Operations = Vec<(Epilogue, Option<usize>)>;

/// Function from an input to the kind and type of operand it is relative to the result; `None` if it cannot
/// be one.
pub type OperandReader<'a> = &'a dyn Fn(usize) -> Option<(Operand, DType)>;

/// Function like [`OperandReader`], for a net that is being modified.
pub type OperandsIn<'a> = &'a dyn Fn(&Net, usize) -> Option<(Operand, DType)>;

/// Largest part of a map that can be an epilogue of its input `x`, as operations and as the part's
/// expression: the whole map, or the subexpression through which the rest reads `x`.
pub fn largest(value: &Expr, x: usize, operands: OperandReader) -> Option<(Operations, Expr)> {
    if let Some(found) = peel(value, x, operands) {
        return Some((found, value.clone()));
    }
    let mut parts: Vec<&Expr> = Vec::new();
    subexpressions(value, &mut parts);
    parts.sort_by_key(|part| std::cmp::Reverse(cost(part)));
    let is_whole = |part: &&&Expr| uses(part, x) && !uses_outside(value, part, x);
    let mut found = parts.iter().filter(is_whole).filter_map(|part| Some((peel(part, x, operands)?, (*part).clone())));
    found.find(|(operations, _)| !operations.is_empty())
}

fn subexpressions<'a>(e: &'a Expr, found: &mut Vec<&'a Expr>) {
    found.push(e);
    match e {
        Expr::Unary(_, x) => subexpressions(x, found),
        Expr::Binary(_, a, b) => {
            subexpressions(a, found);
            subexpressions(b, found);
        }
        Expr::Cast(_, x) => subexpressions(x, found),
        Expr::Select(_, a, b) => {
            subexpressions(a, found);
            subexpressions(b, found);
        }
        _ => {}
    }
}

fn uses(e: &Expr, x: usize) -> bool {
    let mut found = false;
    e.for_each_load(&mut |buffer, _| found |= buffer.0 as usize == x);
    found
}

/// Whether an expression reads `x` outside a part of it.
fn uses_outside(e: &Expr, part: &Expr, x: usize) -> bool {
    match e {
        _ if e == part => false,
        Expr::Unary(_, a) => uses_outside(a, part, x),
        Expr::Binary(_, a, b) => uses_outside(a, part, x) || uses_outside(b, part, x),
        Expr::Cast(_, a) => uses_outside(a, part, x),
        Expr::Select(cond, a, b) => {
            holds_outside(cond, part, x) || uses_outside(a, part, x) || uses_outside(b, part, x)
        }
        other => uses(other, x),
    }
}

/// Whether a condition reads `x` outside a part of it.
fn holds_outside(cond: &Cond, part: &Expr, x: usize) -> bool {
    match cond {
        Cond::Less(a, b) => uses_outside(a, part, x) || uses_outside(b, part, x),
        Cond::Not(inner) => holds_outside(inner, part, x),
        Cond::And(a, b) => holds_outside(a, part, x) || holds_outside(b, part, x),
        _ => false,
    }
}

/// Decomposes an expression of `x` into operations of an epilogue, in order; `None` if it has another form or
/// is of an integer type. Quantization on the way is a division by a scale and
/// [rounding](EpilogueFunction::Round).
pub fn peel(e: &Expr, x: usize, operands: OperandReader) -> Option<Operations> {
    let is_integer = matches!(e, Expr::Cast(dtype, _) if !dtype.is_float());
    let operations = peel_quantized(e, x, operands).filter(|_| !is_integer)?;
    Some(without_identities(operations))
}

/// Subexpressions of 8-bit integer type outside of which a map does not read `x`, largest first.
pub fn byte_parts(value: &Expr, x: usize) -> Vec<&Expr> {
    let mut parts: Vec<&Expr> = Vec::new();
    subexpressions(value, &mut parts);
    parts.retain(|part| matches!(part, Expr::Cast(DType::U8 | DType::I8, _)));
    parts.retain(|part| uses(part, x) && !uses_outside(value, part, x));
    parts.sort_by_key(|part| std::cmp::Reverse(cost(part)));
    parts
}

/// Quantization found in an expression.
pub struct Quantized<'a> {
    /// Expression that is quantized.
    pub of: &'a Expr,
    /// Scale that it is divided by, a number or an input; `None` without a division.
    pub scale: Option<&'a Expr>,
    /// Zero point added after rounding.
    pub zero: f64,
}

/// Range of an integer type of 8 or 16 bits.
pub fn bounds_of(dtype: DType) -> [f64; 2] {
    let steps = if dtype.bytes() == 1 { 256.0 } else { 65_536.0 };
    let low = if matches!(dtype, DType::U8 | DType::U16) { 0.0 } else { -steps / 2.0 };
    [low, low + steps - 1.0]
}

/// Matches the quantization of an expression to an integer type.
pub fn quantized(value: &Expr, dtype: DType) -> Option<Quantized<'_>> {
    let [low, high] = bounds_of(dtype);
    let Expr::Select(is, then, otherwise) = without_casts(value) else { return None };
    let Cond::Less(least, shifted) = &**is else { return None };
    let Expr::Binary(BinaryOp::Min, own, most) = &**then else { return None };
    let is_bounded = **least == number(low) && **most == number(high) && **otherwise == number(low);
    (is_bounded && own == shifted).then_some(())?;
    let (rounded, zero) = match without_casts(own) {
        Expr::Binary(BinaryOp::Add, rounded, zero) => match **zero {
            Expr::Const(zero) => (without_casts(rounded), zero),
            _ => return None,
        },
        rounded => (rounded, 0.0),
    };
    let Expr::Unary(UnaryOp::Round, multiple) = rounded else { return None };
    match without_casts(multiple) {
        Expr::Binary(BinaryOp::Div, of, scale) => match **scale {
            Expr::Const(_) | Expr::Load(..) => Some(Quantized { of, scale: Some(scale), zero }),
            _ => None,
        },
        of => Some(Quantized { of, scale: None, zero }),
    }
}

fn plain(function: EpilogueFunction, numbers: &[f64]) -> Option<(Epilogue, Option<usize>)> {
    Some((Epilogue::new(function, numbers)?, None))
}

fn linear(factor: f64, term: f64) -> Option<(Epilogue, Option<usize>)> {
    plain(EpilogueFunction::Linear, &[factor, term])
}

/// Decomposes an expression, which may be of an integer type, as [`peel`] does. Operations are not merged.
pub fn peel_quantized(e: &Expr, x: usize, operands: OperandReader) -> Option<Operations> {
    let then = |inner: &Expr, last: Option<(Epilogue, Option<usize>)>| {
        let mut list = peel_quantized(inner, x, operands)?;
        list.push(last?);
        Some(list)
    };
    let operand = |e: &Expr, by_channel: EpilogueFunction, by_element: EpilogueFunction| match e {
        Expr::Load(slot, _) => {
            let slot = slot.0 as usize;
            let function = match operands(slot)? {
                (Operand::Channel, DType::F32) => by_channel,
                (Operand::Element | Operand::One, DType::F32) => by_element,
                _ => return None,
            };
            Some((Epilogue::new(function, &[])?, Some(slot)))
        }
        _ => None,
    };
    let of_bytes = |e: &Expr| {
        let (bytes, factor, term) = line(e);
        let Expr::Load(slot, _) = without_casts(bytes) else { return None };
        let slot = slot.0 as usize;
        let is_residual = operands(slot)? == (Operand::Element, DType::U8);
        is_residual.then_some((Epilogue::new(EpilogueFunction::AddU8, &[factor, term])?, Some(slot)))
    };
    match e {
        Expr::Load(slot, _) => (slot.0 as usize == x).then(Vec::new),
        // The cast does not change the numbers, which are f32.
        Expr::Cast(DType::F32, t) => peel_quantized(t, x, operands),
        Expr::Cast(dtype @ (DType::U8 | DType::I8 | DType::U16 | DType::I16), t) => {
            let Quantized { of, scale, zero } = quantized(t, *dtype)?;
            let scale = match scale {
                None => 1.0,
                Some(Expr::Const(scale)) => *scale,
                Some(_) => return None,
            };
            let bounds = bounds_of(*dtype).map(|bound| bound - zero);
            let mut list = then(of, linear(1.0 / scale, 0.0))?;
            list.extend([plain(EpilogueFunction::Round, &bounds)?, linear(1.0, zero)?]);
            Some(list)
        }
        Expr::Unary(UnaryOp::Tanh, t) => then(t, plain(EpilogueFunction::Tanh, &[])),
        Expr::Unary(UnaryOp::Neg, t) => then(t, linear(-1.0, 0.0)),
        Expr::Binary(BinaryOp::Add, a, b) => {
            let (t, rest) = match (uses(a, x), uses(b, x)) {
                (true, false) => (a, b),
                (false, true) => (b, a),
                _ => {
                    let (t, slope) = leaky_relu(a, b).or_else(|| leaky_relu(b, a))?;
                    return then(t, plain(EpilogueFunction::LeakyRelu, &[slope]));
                }
            };
            match **rest {
                Expr::Const(term) => then(t, linear(1.0, term)),
                _ => then(t, operand(rest, EpilogueFunction::Bias, EpilogueFunction::Add).or_else(|| of_bytes(rest))),
            }
        }
        Expr::Binary(BinaryOp::Sub, a, b) => match **a {
            Expr::Const(term) => {
                let mut list = then(b, linear(-1.0, 0.0))?;
                list.push(linear(1.0, term)?);
                Some(list)
            }
            _ => None,
        },
        Expr::Binary(BinaryOp::Max, a, b) => match (&**a, &**b) {
            (t, Expr::Const(0.0)) | (Expr::Const(0.0), t) => then(t, plain(EpilogueFunction::Relu, &[])),
            _ => None,
        },
        Expr::Binary(BinaryOp::Min, a, b) => {
            let (t, low, high) = clipped(a, b)?;
            then(t, plain(EpilogueFunction::Clip, &[low, high]))
        }
        Expr::Binary(BinaryOp::Div, ..) if is_sigmoid(e).is_some() => {
            then(is_sigmoid(e)?, plain(EpilogueFunction::Sigmoid, &[]))
        }
        Expr::Binary(BinaryOp::Mul, ..) => {
            let (mut factor, mut own, mut others) = (1.0, Vec::new(), Vec::new());
            factors(e, x, &mut factor, &mut own, &mut others);
            let mut list = match own[..] {
                [t] => peel_quantized(t, x, operands)?,
                [a, b] => {
                    let (t, last, rest) = gate(a, b, factor).or_else(|| gate(b, a, factor))?;
                    factor = rest;
                    then(t, last)?
                }
                _ => return None,
            };
            for other in others {
                list.push(operand(other, EpilogueFunction::Scale, EpilogueFunction::Mul)?);
            }
            list.push(linear(factor, 0.0)?);
            Some(list)
        }
        _ => None,
    }
}

/// Splits a product into its constant factor, the factors that read `x`, and the others.
fn factors<'a>(e: &'a Expr, x: usize, factor: &mut f64, own: &mut Vec<&'a Expr>, others: &mut Vec<&'a Expr>) {
    match e {
        Expr::Binary(BinaryOp::Mul, a, b) => {
            factors(a, x, factor, own, others);
            factors(b, x, factor, own, others);
        }
        Expr::Const(c) => *factor *= c,
        _ if uses(e, x) => own.push(e),
        _ => others.push(e),
    }
}

fn is_near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * b.abs()
}

/// Matches a value times a function of it: the value, the operation, and the remaining factor.
#[expect(clippy::type_complexity, reason = "three things that have nothing else in common")]
fn gate<'a>(t: &'a Expr, g: &'a Expr, factor: f64) -> Option<(&'a Expr, Option<(Epilogue, Option<usize>)>, f64)> {
    if *g == sigmoid(t.clone()) {
        return Some((t, plain(EpilogueFunction::Silu, &[]), factor));
    }
    match g {
        Expr::Binary(BinaryOp::Min, a, b) => {
            let (inner, low, high) = clipped(a, b)?;
            let (u, a, b) = line(inner);
            let fits = low == 0.0 && u == t;
            fits.then(|| (t, plain(EpilogueFunction::HardSwish, &[a / high, b / high]), factor * high))
        }
        Expr::Binary(BinaryOp::Add, a, b) => {
            let erf = match (&**a, &**b) {
                (Expr::Const(1.0), Expr::Unary(UnaryOp::Erf, u)) | (Expr::Unary(UnaryOp::Erf, u), Expr::Const(1.0)) => {
                    u
                }
                _ => return None,
            };
            let (u, a, b) = line(erf);
            let fits = u == t && is_near(a, FRAC_1_SQRT_2) && b == 0.0;
            fits.then(|| (t, plain(EpilogueFunction::Gelu, &[]), factor * 2.0))
        }
        _ => None,
    }
}

/// Strips casts to f32 around an expression of f32.
pub fn without_casts(e: &Expr) -> &Expr {
    match e {
        Expr::Cast(DType::F32, inner) => without_casts(inner),
        _ => e,
    }
}

/// Decomposes an expression into `a·t + b`: `t`, `a`, `b`.
fn line(e: &Expr) -> (&Expr, f64, f64) {
    match without_casts(e) {
        Expr::Binary(BinaryOp::Add, a, b) => match (&**a, &**b) {
            (t, Expr::Const(c)) | (Expr::Const(c), t) => {
                let (t, a, b) = line(t);
                (t, a, b + c)
            }
            _ => (e, 1.0, 0.0),
        },
        Expr::Binary(BinaryOp::Mul, a, b) => match (&**a, &**b) {
            (t, Expr::Const(c)) | (Expr::Const(c), t) => {
                let (t, a, b) = line(t);
                (t, a * c, b * c)
            }
            _ => (e, 1.0, 0.0),
        },
        _ => (e, 1.0, 0.0),
    }
}

/// Matches a clip, the operands of a minimum: the inner expression and its two bounds.
fn clipped<'a>(a: &'a Expr, b: &'a Expr) -> Option<(&'a Expr, f64, f64)> {
    let (inner, high) = match (a, b) {
        (t, Expr::Const(high)) | (Expr::Const(high), t) => (t, *high),
        _ => return None,
    };
    let Expr::Binary(BinaryOp::Max, a, b) = inner else { return None };
    match (&**a, &**b) {
        (t, Expr::Const(low)) | (Expr::Const(low), t) => Some((t, *low, high)),
        _ => None,
    }
}

/// Matches a sigmoid, and returns its argument.
fn is_sigmoid(e: &Expr) -> Option<&Expr> {
    let Expr::Binary(BinaryOp::Div, _, below) = e else { return None };
    let Expr::Binary(BinaryOp::Add, _, power) = &**below else { return None };
    let Expr::Unary(UnaryOp::Exp, negative) = &**power else { return None };
    let Expr::Unary(UnaryOp::Neg, t) = &**negative else { return None };
    (*e == sigmoid((**t).clone())).then_some(t)
}

/// Matches `max(t, 0)` and `s·min(t, 0)`: `t` and `s`.
fn leaky_relu<'a>(above: &'a Expr, below: &'a Expr) -> Option<(&'a Expr, f64)> {
    let Expr::Binary(BinaryOp::Max, t, zero) = above else { return None };
    let Expr::Binary(BinaryOp::Mul, a, b) = below else { return None };
    let (slope, negative) = match (&**a, &**b) {
        (Expr::Const(s), e) | (e, Expr::Const(s)) => (*s, e),
        _ => return None,
    };
    let is_same = matches!(negative, Expr::Binary(BinaryOp::Min, u, z) if u == t && **z == Expr::Const(0.0));
    (**zero == Expr::Const(0.0) && is_same).then_some((t, slope))
}

/// Merges consecutive linear operations, and drops identities.
pub fn without_identities(list: Operations) -> Operations {
    let mut kept: Operations = Vec::new();
    for (operation, slot) in list {
        let last = kept.last().map(|(last, _)| (last.function(), last.numbers().to_vec()));
        if operation.function() != EpilogueFunction::Linear {
            kept.push((operation, slot));
            continue;
        }
        let (mut a, mut b) = (operation.numbers()[0], operation.numbers()[1]);
        if let Some((EpilogueFunction::Linear, before)) = last {
            (a, b) = (a * before[0], a * before[1] + b);
            kept.pop();
        }
        if (a, b) != (1.0, 0.0) {
            kept.push((Epilogue::new(EpilogueFunction::Linear, &[a, b]).expect("lines have any numbers"), None));
        }
    }
    kept
}
