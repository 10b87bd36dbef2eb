//! Epilogues of integer products: accumulators are converted to f32 and, if all users quantize them, back to
//! 8-bit integers before the store.

use tilewright_graph::DType;
use tilewright_ir::op::{Epilogue, EpilogueFunction, MATMUL, Operand, Workload};
use tilewright_ir::{DType as ElementType, Expr};

use crate::epilogue::{
    OperandReader, OperandsIn, Operations, Quantized, bounds_of, peel_quantized, quantized, without_identities,
};
use crate::net::{Kind, Net, Node, ValueId};

/// Element types of a node's operands, if they are integers.
pub fn types_of(net: &Net, node: &Node) -> Option<[ElementType; 2]> {
    matches!(node.kind, Kind::Product { .. } | Kind::Conv(_)).then_some(())?;
    match (net.value(node.input(0)).dtype, net.value(node.input(1)).dtype) {
        (DType::U8, DType::I8) => Some([ElementType::U8, ElementType::I8]),
        (DType::I8, DType::I8) => Some([ElementType::I8, ElementType::I8]),
        _ => None,
    }
}

/// Small workload with the types of a node, to test which epilogues it supports.
pub fn example(net: &Net, node: &Node) -> Workload {
    let sizes = [("m", 1), ("n", 1), ("k", 1)];
    Workload::of_factors(&MATMUL, types_of(net, node), &sizes).expect("there are products of these types")
}

fn operation(
    function: EpilogueFunction,
    numbers: &[f64],
    operand: Option<ValueId>,
) -> Option<(Epilogue, Option<usize>)> {
    Some((Epilogue::new(function, numbers)?, operand.map(|id| id.0)))
}

/// Initial operations of an integer product's epilogue, from its further inputs.
pub fn opening(net: &Net, node: &Node) -> Operations {
    if types_of(net, node).is_none() {
        return Vec::new();
    }
    let of = |id: &ValueId| {
        let function = match net.value(*id).dtype {
            DType::I32 => EpilogueFunction::Init,
            DType::F32 => EpilogueFunction::Dequant,
            _ => return None,
        };
        operation(function, &[], Some(*id))
    };
    node.inputs.iter().flatten().skip(2).filter_map(of).collect()
}

/// Zero point that a convolution of integers is padded with, if not 0.
pub fn padding(net: &Net, node: &Node) -> Option<ValueId> {
    types_of(net, node)?;
    let is_byte = |id: &ValueId| matches!(net.value(*id).dtype, DType::U8 | DType::I8);
    node.inputs.iter().flatten().skip(2).copied().find(|id| is_byte(id) && net.value(*id).n_elements() == 1)
}

/// Whether operations end with a quantization.
fn is_closed(epilogue: &Operations) -> bool {
    let is_quantizing = |function| matches!(function, EpilogueFunction::QuantU8 | EpilogueFunction::QuantI8);
    epilogue.last().is_some_and(|(last, _)| is_quantizing(last.function()))
}

/// Whether an integer product's epilogue may quantize its result.
pub fn may_close(net: &Net, anchor: &Node, epilogue: &Operations) -> bool {
    types_of(net, anchor).is_some() && (is_closed(epilogue) || net.value(anchor.output()).dtype == DType::F32)
}

/// Converts operations that end with a quantization to ones that yield the same integers as floating-point
/// numbers.
fn reopened(net: &Net, before: &Operations) -> Option<Operations> {
    let Some(((last, zero), rest)) = before.split_last() else { return Some(Vec::new()) };
    let dtype = match last.function() {
        EpilogueFunction::QuantU8 => ElementType::U8,
        EpilogueFunction::QuantI8 => ElementType::I8,
        _ => return Some(before.clone()),
    };
    let zero = net.scalar(ValueId((*zero)?))?;
    let bounds = bounds_of(dtype).map(|bound| bound - zero);
    let numbers =
        [operation(EpilogueFunction::Round, &bounds, None)?, operation(EpilogueFunction::Linear, &[1.0, zero], None)?];
    Some([rest, &numbers].concat())
}

/// Scales that a result is divided by.
enum Scales {
    /// Single scale of the whole tensor.
    One(f64),
    /// Constant scales, one for each channel.
    Channels(ValueId),
}

impl Scales {
    /// Scales by which the map `node` divides; `None` if they are not constant.
    fn of(scale: Option<&Expr>, net: &Net, node: &Node, operands: OperandReader) -> Option<Scales> {
        match scale {
            None => Some(Scales::One(1.0)),
            Some(Expr::Const(scale)) => Some(Scales::One(*scale)),
            Some(Expr::Load(slot, _)) => {
                let slot = slot.0 as usize;
                let id = node.inputs[slot].filter(|id| net.numbers(*id).is_some())?;
                (operands(slot)? == (Operand::Channel, ElementType::F32)).then_some(Scales::Channels(id))
            }
            Some(_) => None,
        }
    }

    /// Scales as numbers: a single one, or one for each channel.
    fn numbers(&self, net: &Net) -> Vec<f64> {
        match self {
            Scales::One(scale) => vec![*scale],
            Scales::Channels(id) => {
                let numbers = net.numbers(*id).expect("scales are known");
                numbers.into_iter().map(f64::from).collect()
            }
        }
    }

    /// Makes the division an operation of its own.
    fn division(&self, net: &mut Net) -> Option<(Epilogue, Option<usize>)> {
        match self {
            Scales::One(scale) => operation(EpilogueFunction::Linear, &[1.0 / scale, 0.0], None),
            Scales::Channels(id) => {
                let inverse = changed(net, *id, |_, scale| 1.0 / scale)?;
                operation(EpilogueFunction::Scale, &[], Some(inverse))
            }
        }
    }
}

/// Appends a division by scales to operations; it and divisions before rounding are folded into constant
/// factors and terms.
fn with_early_scales(net: &mut Net, all: &Operations, scales: &Scales) -> Option<Operations> {
    let mut done = Operations::new();
    let mut rest = &all[..];
    while let Some(at) = rest.iter().position(|(operation, _)| operation.function() == EpilogueFunction::Round) {
        let (numbers, round) = (&rest[..at], rest[at]);
        let of_line = numbers.split_last().and_then(|((last, _), before)| match (last.function(), last.numbers()) {
            (EpilogueFunction::Linear, &[factor, 0.0]) if factor > 0.0 => Some((before, Scales::One(1.0 / factor))),
            _ => None,
        });
        match of_line {
            Some((before, scales)) => extend_divided(net, &mut done, before, &scales)?,
            None => done.extend_from_slice(numbers),
        }
        done.push(round);
        rest = &rest[at + 1..];
    }
    extend_divided(net, &mut done, rest, scales)?;
    Some(with_joined_factors(net, without_identities(done)))
}

/// Appends operations with their result divided by scales.
fn extend_divided(
    net: &mut Net,
    done: &mut Operations,
    rest: &[(Epilogue, Option<usize>)],
    scales: &Scales,
) -> Option<()> {
    if let Scales::One(1.0) = scales {
        done.extend_from_slice(rest);
        return Some(());
    }
    let Some(divided) = divided(net, rest, scales) else {
        done.extend_from_slice(rest);
        done.push(scales.division(net)?);
        return Some(());
    };
    if !done.is_empty() {
        // A division cannot be moved before a rounding.
        done.push(scales.division(net)?);
    }
    done.extend(divided);
    Some(())
}

/// Folds scalar factors into adjacent constant per-channel factors.
fn with_joined_factors(net: &mut Net, all: Operations) -> Operations {
    let mut joined = Operations::new();
    for (own, operand) in all {
        let last = joined.last().map(|(last, operand)| (last.function(), last.numbers().to_vec(), *operand));
        let pair = match (last, own.function(), own.numbers()) {
            (Some((EpilogueFunction::Linear, numbers, _)), EpilogueFunction::Scale, _) if numbers[1] == 0.0 => {
                Some((numbers[0], operand))
            }
            (Some((EpilogueFunction::Scale, _, scale)), EpilogueFunction::Linear, &[factor, 0.0]) => {
                Some((factor, scale))
            }
            _ => None,
        };
        let scale = pair.and_then(|(factor, scale)| changed(net, ValueId(scale?), |_, x| x * factor as f32));
        if let Some(scale) = scale {
            joined.pop();
            joined.push((Epilogue::new(EpilogueFunction::Scale, &[]).expect("it has no numbers"), Some(scale.0)));
        } else {
            joined.push((own, operand));
        }
    }
    joined
}

/// Maps the elements of a constant by a function of index and element.
fn changed(net: &mut Net, id: ValueId, by: impl Fn(usize, f32) -> f32) -> Option<ValueId> {
    let numbers: Vec<f32> = net.numbers(id)?.into_iter().enumerate().map(|(at, x)| by(at, x)).collect();
    let (name, shape) = (format!("{}.scaled", net.value(id).name), net.shape(id).to_vec());
    Some(net.add_constant(&name, &shape, &numbers))
}

/// Map that quantizes the output of a node.
#[derive(Clone, Copy)]
pub struct QuantizedOutput<'a> {
    /// Value of the map.
    pub value: &'a Expr,
    /// Index of the map's input that is the node's output.
    pub slot: usize,
    /// Integer type of the result.
    pub dtype: ElementType,
}

/// Epilogue of a node followed by a quantization of its output; `before` is the node's current epilogue.
/// Divisions by scales are moved as early as possible.
pub fn closing(
    net: &mut Net,
    node: &Node,
    QuantizedOutput { value, slot, dtype }: QuantizedOutput,
    operands: OperandsIn,
    before: &Operations,
) -> Option<Operations> {
    let bounds = bounds_of(dtype);
    let Quantized { of, scale, zero } = quantized(value, dtype)?;
    let of_slot: OperandReader = &|slot| operands(net, slot);
    let scales = Scales::of(scale, net, node, of_slot)?;
    let own = peel_quantized(of, slot, of_slot)?;
    let own = own.into_iter().map(|(own, slot)| (own, slot.map(|slot| node.inputs[slot].expect("maps have all").0)));
    let mut all: Operations = reopened(net, before)?.into_iter().chain(own).collect();
    let numbers = scales.numbers(net);
    numbers.iter().all(|scale| *scale > 0.0 && scale.is_finite()).then_some(())?;
    while let Some((last, _)) = all.last() {
        // Saturation makes the clip redundant.
        let (low, high) = match (last.function(), last.numbers()) {
            (EpilogueFunction::Relu, _) => (0.0, f64::INFINITY),
            (EpilogueFunction::Clip, &[low, high]) => (low, high),
            _ => break,
        };
        let multiples = |x: f64| numbers.iter().map(move |scale| (x / scale).round_ties_even() + zero);
        let reaches = [multiples(low).all(|x| x <= bounds[0]), multiples(high).all(|x| x >= bounds[1])];
        match reaches {
            [true, true] => drop(all.pop()),
            [false, true] if low == 0.0 && high.is_finite() => {
                all.pop();
                all.push(operation(EpilogueFunction::Relu, &[], None)?);
                break;
            }
            _ => break,
        }
    }
    let mut all = with_early_scales(net, &all, &scales)?;
    let zero = net.add_constant("closing.zero", &[1], &[zero as f32]);
    let function = if dtype == ElementType::U8 { EpilogueFunction::QuantU8 } else { EpilogueFunction::QuantI8 };
    all.push(operation(function, &[], Some(zero))?);
    Some(all)
}

/// Divides the result of operations by scales, by folding the division into constant factors and terms.
fn divided(net: &mut Net, all: &[(Epilogue, Option<usize>)], scales: &Scales) -> Option<Operations> {
    let by = scales.numbers(net);
    let divided = |net: &mut Net, id: usize| {
        let n = net.numbers(ValueId(id))?.len();
        (by.len() == 1 || by.len() == n).then_some(())?;
        Some(changed(net, ValueId(id), |at, x| x / by[at % by.len()] as f32)?.0)
    };
    let scale = if let Scales::One(scale) = scales { Some(*scale) } else { None };
    let mut new = Operations::new();
    for (own, operand) in all {
        let function = own.function();
        new.push(match (function, own.numbers()) {
            (
                EpilogueFunction::Init
                | EpilogueFunction::Relu
                | EpilogueFunction::LeakyRelu
                | EpilogueFunction::Scale
                | EpilogueFunction::Mul,
                _,
            ) => (*own, *operand),
            (EpilogueFunction::Dequant | EpilogueFunction::Bias, _) => {
                operation(function, &[], Some(ValueId(divided(net, (*operand)?)?)))?
            }
            (EpilogueFunction::Linear, [_, 0.0]) => (*own, *operand),
            (EpilogueFunction::Clip, &[low, high]) => operation(function, &[low / scale?, high / scale?], None)?,
            (EpilogueFunction::Linear, &[factor, term]) => operation(function, &[factor, term / scale?], None)?,
            (EpilogueFunction::AddU8, &[factor, term]) => {
                (Epilogue::new(function, &[factor / scale?, term / scale?])?, *operand)
            }
            _ => return None,
        });
    }
    Some(new)
}
