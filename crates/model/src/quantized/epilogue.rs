//! Epilogues of products of integers: sums become f32 and, where nothing else reads them, 8-bit integers
//! again, before they are stored.

use tilewright_graph::DType;
use tilewright_ir::op::{Epilogue, Function, Workload};
use tilewright_ir::{DType as ElementType, Expr};

use crate::epilogue::{
    Operands, OperandsIn, Operations, Quantized, bounds_of, peel_quantized, quantized, without_identities,
};
use crate::net::{Kind, Net, Node, ValueId};

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
    let is_byte = |id: &ValueId| matches!(net.value(*id).dtype, DType::U8 | DType::I8);
    node.inputs.iter().flatten().skip(2).copied().find(|id| is_byte(id) && net.value(*id).n_elements() == 1)
}

/// Whether operations end with integers that numbers are quantized to.
fn is_closed(epilogue: &Operations) -> bool {
    let is_quantizing = |function| matches!(function, Function::QuantU8 | Function::QuantI8);
    epilogue.last().is_some_and(|(last, _)| is_quantizing(last.function()))
}

/// Whether what a product of integers gives may be quantized in its epilogue: numbers, or integers that they
/// were quantized to, as numbers again.
pub fn may_close(net: &Net, anchor: &Node, epilogue: &Operations) -> bool {
    types_of(net, anchor).is_some() && (is_closed(epilogue) || net.value(anchor.output()).dtype == DType::F32)
}

/// Operations that end with integers, as such that end with these integers as numbers.
fn reopened(net: &Net, before: &Operations) -> Option<Operations> {
    let Some(((last, zero), rest)) = before.split_last() else { return Some(Vec::new()) };
    let dtype = match last.function() {
        Function::QuantU8 => ElementType::U8,
        Function::QuantI8 => ElementType::I8,
        _ => return Some(before.clone()),
    };
    let zero = net.scalar(ValueId((*zero)?))?;
    let bounds = bounds_of(dtype).map(|bound| bound - zero);
    let numbers = [operation(Function::Round, &bounds, None)?, operation(Function::Linear, &[1.0, zero], None)?];
    Some([rest, &numbers].concat())
}

/// Operations in which known factors and terms take the division by a scale ahead of rounding and at the end.
fn with_early_scales(net: &mut Net, all: Operations) -> Operations {
    let mut done = Operations::new();
    for stretch in all.split_inclusive(|(operation, _)| operation.function() == Function::Round) {
        let n_rounded = usize::from(stretch.last().is_some_and(|(last, _)| last.function() == Function::Round));
        let (numbers, round) = stretch.split_at(stretch.len() - n_rounded);
        let scaled = numbers.split_last().and_then(|(last, rest)| {
            let (Function::Linear, &[factor, 0.0]) = (last.0.function(), last.0.numbers()) else { return None };
            if factor == 1.0 {
                return Some(rest.to_vec());
            }
            // What was rounded is divided by itself.
            let first = if done.is_empty() { None } else { Some(*last) };
            Some(first.into_iter().chain(divided(net, rest, 1.0 / factor)?).collect::<Operations>())
        });
        done.extend(scaled.unwrap_or_else(|| numbers.to_vec()));
        done.extend_from_slice(round);
    }
    with_joined_factors(net, without_identities(done))
}

/// Operations in which a factor beside known ones by channel is a part of these.
fn with_joined_factors(net: &mut Net, all: Operations) -> Operations {
    let mut joined = Operations::new();
    for (own, operand) in all {
        let last = joined.last().map(|(last, operand)| (last.function(), last.numbers().to_vec(), *operand));
        let pair = match (last, own.function(), own.numbers()) {
            (Some((Function::Linear, numbers, _)), Function::Scale, _) if numbers[1] == 0.0 => {
                Some((numbers[0], operand))
            }
            (Some((Function::Scale, _, scale)), Function::Linear, &[factor, 0.0]) => Some((factor, scale)),
            _ => None,
        };
        let scale = pair.and_then(|(factor, scale)| times(net, scale?, factor));
        if let Some(scale) = scale {
            joined.pop();
            joined.push((Epilogue::new(Function::Scale, &[]).expect("it has no numbers"), Some(scale.0)));
        } else {
            joined.push((own, operand));
        }
    }
    joined
}

/// Known numbers times a factor.
fn times(net: &mut Net, id: usize, factor: f64) -> Option<ValueId> {
    let id = ValueId(id);
    let numbers: Vec<f32> = net.numbers(id)?.into_iter().map(|x| x * factor as f32).collect();
    let (name, shape) = (format!("{}.scaled", net.value(id).name), net.shape(id).to_vec());
    Some(net.add_constant(&name, &shape, &numbers))
}

/// The operations of an anchor with those of a value that quantizes its output, input `slot` of a map, to a
/// type; `before` are its own. Numbers are divided by scales as early as they can be.
pub fn closing(
    net: &mut Net,
    node: &Node,
    (value, slot): (&Expr, usize),
    dtype: ElementType,
    operands: OperandsIn,
    before: &Operations,
) -> Option<Operations> {
    let bounds = bounds_of(dtype);
    let Quantized { of, scale, zero } = quantized(value, dtype)?;
    let of_slot: Operands = &|slot| operands(net, slot);
    let own = peel_quantized(of, slot, of_slot)?;
    let own = own
        .into_iter()
        .map(|(own, slot)| (own, slot.map(|slot| node.inputs[slot].expect("maps have all").0)))
        .chain([operation(Function::Linear, &[1.0 / scale, 0.0], None)?]);
    let all = reopened(net, before)?.into_iter().chain(own).collect();
    let mut all = with_early_scales(net, all);
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
    let zero = net.add_constant("closing.zero", &[1], &[zero as f32]);
    let function = if dtype == ElementType::U8 { Function::QuantU8 } else { Function::QuantI8 };
    all.push(operation(function, &[], Some(zero))?);
    Some(all)
}

/// Operations with their result divided by a scale, where their known factors and terms take it.
fn divided(net: &mut Net, all: &[(Epilogue, Option<usize>)], scale: f64) -> Option<Operations> {
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
            (Function::AddU8, &[factor, term]) => (Epilogue::new(function, &[factor / scale, term / scale])?, *operand),
            _ => return None,
        });
    }
    Some(new)
}
