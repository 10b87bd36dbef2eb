//! Epilogues of products of integers: sums become f32 and, where nothing else reads them, 8-bit integers
//! again, before they are stored.

use tilewright_graph::DType;
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond, UnaryOp};
use tilewright_ir::op::{Epilogue, Function, Workload};

use crate::epilogue::{Operands, Operations, peel};
use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::number;

/// Name of the types of a node's factors in a workload's text, where these are integers.
pub fn types_of(net: &Net, node: &Node) -> Option<&'static str> {
    matches!(node.kind, Kind::Product { .. } | Kind::Conv(_)).then_some(())?;
    match (net.value(node.input(0)).dtype, net.value(node.input(1)).dtype) {
        (DType::U8, DType::I8) => Some("u8i8"),
        (DType::I8, DType::I8) => Some("i8i8"),
        _ => None,
    }
}

/// A small workload of the types of an anchor, to ask what epilogues it may have.
pub fn example(net: &Net, node: &Node) -> Workload {
    let types = types_of(net, node).unwrap_or("f32");
    Workload::parse(&format!("matmul:m=1,n=1,k=1,dtype={types}")).expect("it is one")
}

fn operation(function: Function, numbers: &[f64], operand: Option<ValueId>) -> Option<(Epilogue, Option<usize>)> {
    Some((Epilogue::new(function, numbers)?, operand.map(|id| id.0)))
}

/// Operations that a product of integers begins with: its further inputs.
pub fn opening(net: &Net, node: &Node) -> Operations {
    if types_of(net, node).is_none() {
        return Vec::new();
    }
    let of = |id: &ValueId| {
        let function = match net.value(*id).dtype {
            DType::I32 => Function::Init,
            DType::F32 => Function::Dequant,
            _ => return None,
        };
        operation(function, &[], Some(*id))
    };
    node.inputs.iter().flatten().skip(2).filter_map(of).collect()
}

/// Zero point that a convolution of integers is padded with, where that is not 0.
pub fn padding(net: &Net, node: &Node) -> Option<ValueId> {
    types_of(net, node)?;
    node.inputs.iter().flatten().skip(2).copied().find(|id| matches!(net.value(*id).dtype, DType::U8 | DType::I8))
}

/// Whether a map of the numbers that a product of integers gives may close its epilogue with integers.
pub fn may_close(net: &Net, anchor: &Node, map: &Node) -> bool {
    let dtype = |node: &Node| net.value(node.output()).dtype;
    types_of(net, anchor).is_some() && dtype(anchor) == DType::F32 && matches!(dtype(map), DType::U8 | DType::I8)
}

/// The operations of an anchor with those of a map that quantizes, `before` being its own: numbers are
/// divided by the scale as early as they can be.
pub fn closing(
    net: &mut Net,
    node: &Node,
    slot: usize,
    operands: &dyn Fn(&Net, usize) -> Option<tilewright_ir::op::Operand>,
    before: &Operations,
) -> Option<Operations> {
    let Kind::Map(value) = &node.kind else { return None };
    let dtype = net.value(node.output()).dtype;
    let (least, most) = dtype.integer_range();
    let bounds = [least as f64, most as f64];
    let Quantized { of, scale, zero } = quantized(value, bounds)?;
    let of_slot: Operands = &|slot| operands(net, slot);
    let own = peel(of, slot, of_slot)?;
    let own = own.into_iter().map(|(own, slot)| (own, slot.map(|slot| node.inputs[slot].expect("maps have all").0)));
    let mut all: Operations = before.iter().cloned().chain(own).collect();
    if scale != 1.0 {
        all = match divided(net, &all, scale) {
            Some(divided) => divided,
            None => [all, vec![operation(Function::Linear, &[1.0 / scale, 0.0], None)?]].concat(),
        };
    }
    while let Some((last, _)) = all.last() {
        // Saturation does the same.
        let (low, high) = match (last.function(), last.numbers()) {
            (Function::Relu, _) => (0.0, f64::INFINITY),
            (Function::Clip, &[low, high]) => (low, high),
            _ => break,
        };
        let reaches = [low.round_ties_even() + zero <= bounds[0], high.round_ties_even() + zero >= bounds[1]];
        match reaches {
            [true, true] => drop(all.pop()),
            [false, true] if low == 0.0 && high.is_finite() => {
                all.pop();
                all.push(operation(Function::Relu, &[], None)?);
                break;
            }
            _ => break,
        }
    }
    let zero = net.add_constant(&format!("{}.zero", node.origin), &[1], &[zero as f32]);
    let function = if dtype == DType::U8 { Function::QuantU8 } else { Function::QuantI8 };
    all.push(operation(function, &[], Some(zero))?);
    Some(all)
}

/// Numbers that an expression quantizes.
struct Quantized<'a> {
    of: &'a Expr,
    scale: f64,
    zero: f64,
}

/// Matches what quantizes numbers to integers between bounds.
fn quantized(value: &Expr, [low, high]: [f64; 2]) -> Option<Quantized<'_>> {
    let Expr::Select(is, then, otherwise) = plain(value) else { return None };
    let Cond::Less(least, shifted) = &**is else { return None };
    let Expr::Binary(BinaryOp::Min, own, most) = &**then else { return None };
    let is_bounded = **least == number(low) && **most == number(high) && **otherwise == number(low);
    (is_bounded && own == shifted).then_some(())?;
    let (rounded, zero) = match plain(own) {
        Expr::Binary(BinaryOp::Add, rounded, zero) => match **zero {
            Expr::Const(zero) => (plain(rounded), zero),
            _ => return None,
        },
        rounded => (rounded, 0.0),
    };
    let Expr::Unary(UnaryOp::Round, multiple) = rounded else { return None };
    match plain(multiple) {
        Expr::Binary(BinaryOp::Div, of, scale) => match **scale {
            Expr::Const(scale) => Some(Quantized { of, scale, zero }),
            _ => None,
        },
        of => Some(Quantized { of, scale: 1.0, zero }),
    }
}

/// An expression of f32 without casts to it around.
fn plain(e: &Expr) -> &Expr {
    match e {
        Expr::Cast(tilewright_ir::DType::F32, inner) => plain(inner),
        _ => e,
    }
}

/// Operations with their result divided by a scale, where their known factors and terms take it.
fn divided(net: &mut Net, all: &Operations, scale: f64) -> Option<Operations> {
    let by = scale as f32;
    let divided = |net: &mut Net, id: usize| {
        let id = ValueId(id);
        let numbers: Vec<f32> = net.numbers(id)?.into_iter().map(|x| x / by).collect();
        let (name, shape) = (format!("{}.scaled", net.value(id).name), net.shape(id).to_vec());
        Some(net.add_constant(&name, &shape, &numbers))
    };
    let mut new = Operations::new();
    for (own, operand) in all {
        let function = own.function();
        new.push(match (function, own.numbers()) {
            (Function::Init | Function::Relu | Function::LeakyRelu | Function::Scale | Function::Mul, _) => {
                (*own, *operand)
            }
            (Function::Dequant | Function::Bias, _) => operation(function, &[], Some(divided(net, (*operand)?)?))?,
            (Function::Clip, &[low, high]) => operation(function, &[low / scale, high / scale], None)?,
            (Function::Linear, &[factor, term]) => operation(function, &[factor, term / scale], None)?,
            _ => return None,
        });
    }
    Some(new)
}
