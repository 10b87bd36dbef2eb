//! Quantization before moves: transposed convolutions become convolutions whose results move, and what
//! quantizes moved or concatenated numbers does so before they move, so that only bytes do.

use std::borrow::Cow;

use tilewright_graph::op::{Concat, ConvTranspose, DequantizeLinear, Inputs, Reshape, Scaling, Slice, Transpose, axis};
use tilewright_graph::{DType, Graph, Node, Op, Place, Tensor, TensorType, Value, ValueId};
use tilewright_ir::Target;

use super::facts;
use super::phases::{OfPhases, OfRun, ToPlaces, is_dequantized_image, of_phases};

/// Maximum number of operators between a move and the quantization that sinks below it.
const MOST_BETWEEN: usize = 4;

/// Rewrites quantized transposed convolutions to convolutions and moves, and moves quantization before moves
/// and concatenations. Graphs with an open size stay as they are.
pub fn with_sunk_quantization<'a>(graph: &'a Graph, target: &'a Target) -> Cow<'a, Graph> {
    let mut job = Sinking {
        old: graph,
        new: Graph::default(),
        known: vec![None; graph.values().len()],
        values: Vec::new(),
        dequantized: Vec::new(),
        target,
    };
    let may_change = |node: &Node| match &node.op {
        Op::ConvTranspose(_) => node.inputs[0].is_some_and(|x| is_dequantized_image(graph, x)),
        Op::Concat(op) => job.is_sunk_below(node, *op),
        _ => false,
    };
    if graph.open_size.is_some() || !graph.nodes().any(|(_, node)| may_change(node)) {
        return Cow::Borrowed(graph);
    }
    job.new.name.clone_from(&graph.name);
    for &id in &graph.inputs {
        let new = job.made(id);
        job.new.inputs.push(new);
    }
    for (_, node) in graph.nodes() {
        job.node(node);
    }
    for &id in &graph.outputs {
        let new = job.made(id);
        job.new.outputs.push(new);
    }
    Cow::Owned(job.new)
}

/// Value of the new graph, possibly one that no node computes yet.
#[derive(Clone)]
enum Sunk {
    /// Value of the new graph.
    Made(ValueId),
    /// Result of a transposed convolution, as moves of those of convolutions.
    Moved { from: Vec<ValueId>, by: Box<ToPlaces>, place: Place },
    /// Concatenation of values.
    Joined { parts: Vec<usize>, op: Concat, place: Place },
}

struct Sinking<'a> {
    old: &'a Graph,
    new: Graph,
    /// Value for each old one, once known, as an index into `values`.
    known: Vec<Option<usize>>,
    values: Vec<Sunk>,
    /// Dequantizations of values that no node computes yet: the value, the node, and the result.
    dequantized: Vec<(usize, &'a Node, usize)>,
    target: &'a Target,
}

impl<'a> Sinking<'a> {
    fn push(&mut self, value: Sunk) -> usize {
        self.values.push(value);
        self.values.len() - 1
    }

    fn add_constant(&mut self, name: String, tensor: Tensor) -> ValueId {
        let (ty, constant) = (Some(tensor.ty().clone()), Some(tensor));
        self.new.add_value(Value { name, ty, constant, ..Value::default() })
    }

    /// New value for an old one, which nodes compute that are added if necessary.
    fn made(&mut self, id: ValueId) -> ValueId {
        let value = self.old.value(id);
        let like = Value { producer: None, users: Vec::new(), ..value.clone() };
        match self.known[id.0 as usize] {
            Some(at) => self.made_like(at, like),
            None => {
                let new = self.new.add_value(like);
                self.known[id.0 as usize] = Some(self.push(Sunk::Made(new)));
                new
            }
        }
    }

    /// Adds the nodes that compute a value, with the name and declaration of another one.
    fn made_like(&mut self, at: usize, like: Value) -> ValueId {
        let new = match self.values[at].clone() {
            Sunk::Made(id) => return id,
            Sunk::Moved { from, by, place } => self.moved(from, &by, &place, like),
            Sunk::Joined { parts, op, place } => {
                let part = || Value { name: format!("{}.part", like.name), ..Value::default() };
                let inputs = parts.into_iter().map(|at| Some(self.made_like(at, part()))).collect();
                self.step(op.into(), &place, inputs, like.clone())
            }
        };
        self.values[at] = Sunk::Made(new);
        new
    }

    /// Adds a node with one output, which is like a value but for its type.
    fn step(&mut self, op: Op, place: &Place, inputs: Vec<Option<ValueId>>, like: Value) -> ValueId {
        let types = op.operation().infer(Inputs(&facts(&self.new, &inputs)));
        let ty = types.expect("invariant: moves fit the shapes that they are made for").swap_remove(0);
        let id = self.new.add_value(Value { ty: Some(ty), ..like });
        self.new.add_node(Node { op, place: place.clone(), inputs, outputs: vec![Some(id)] });
        id
    }

    /// Adds the moves from phases to places.
    fn moved(&mut self, from: Vec<ValueId>, by: &ToPlaces, place: &Place, like: Value) -> ValueId {
        let name = like.name.clone();
        let mut x = from[0];
        if from.len() > 1 {
            let phases = Value { name: format!("{name}.phases"), ..Value::default() };
            x = self.step(Concat { axis: 1 }.into(), place, from.into_iter().map(Some).collect(), phases);
        }
        let vector = |list: &[usize]| Tensor::vector(&list.iter().map(|&n| n as i64).collect::<Vec<i64>>());
        let reshape = || Op::from(Reshape { shape: None, allow_zero: false });
        let mut moves: Vec<(Op, Vec<Tensor>)> = Vec::new();
        if !by.is_of_one_phase() {
            moves.push((reshape(), vec![vector(&by.divided)]));
            moves.push((Transpose { order: Some(by.order.clone()) }.into(), Vec::new()));
            moves.push((reshape(), vec![vector(&by.joined)]));
        }
        if by.cut.map(|[_, end]| end) != by.joined[2..] || by.cut.iter().any(|[first, _]| *first > 0) {
            let [starts, ends] = [0, 1].map(|at| vector(&by.cut.map(|range| range[at])));
            moves.push((Slice { attributes: None }.into(), vec![starts, ends, vector(&[2, 3])]));
        }
        if by.shape.len() != by.joined.len() || moves.is_empty() {
            moves.push((reshape(), vec![vector(&by.shape)]));
        }
        let n = moves.len();
        for (at, (op, constants)) in moves.into_iter().enumerate() {
            let known = constants.into_iter().map(|list| Some(self.add_constant(format!("{name}.sizes"), list)));
            let inputs = std::iter::once(Some(x)).chain(known.collect::<Vec<_>>()).collect();
            let value = match at + 1 == n {
                true => like.clone(),
                false => Value { name: format!("{name}.places"), ..Value::default() },
            };
            x = self.step(op, place, inputs, value);
        }
        x
    }

    fn node(&mut self, node: &'a Node) {
        let done = match &node.op {
            Op::ConvTranspose(op) => self.transposed(node, op),
            Op::Concat(op) if self.is_sunk_below(node, *op) => self.joined(node, *op),
            _ => self.pointwise(node),
        };
        if done.is_none() {
            let mut node = node.clone();
            node.inputs.iter_mut().flatten().for_each(|id| *id = self.made(*id));
            node.outputs.iter_mut().flatten().for_each(|id| *id = self.made(*id));
            self.new.add_node(node);
        }
    }

    /// Replaces a quantized transposed convolution by convolutions.
    fn transposed(&mut self, node: &Node, op: &ConvTranspose) -> Option<()> {
        let OfPhases { runs, image, to_places } = of_phases(self.old, node, op, self.target)?;
        let (place, to) = (&node.place, node.outputs[0]?);
        let name = self.old.value(to).name.clone();
        let mut x = self.made(node.inputs[0]?);
        if self.new.ty(x).shape != image {
            let sizes = Tensor::vector(&image.map(|n| n as i64));
            let sizes = self.add_constant(format!("{name}.sizes"), sizes);
            let reshape = Reshape { shape: None, allow_zero: false }.into();
            let like = Value { name: format!("{name}.image"), ..Value::default() };
            x = self.step(reshape, place, vec![Some(x), Some(sizes)], like);
        }
        let from = runs.into_iter().enumerate();
        let from = from.map(|(at, run)| self.run(run, x, place, &format!("{name}.run{at}"))).collect();
        let at = self.push(Sunk::Moved { from, by: Box::new(to_places), place: place.clone() });
        self.known[to.0 as usize] = Some(at);
        Some(())
    }

    /// Adds the convolution of a run of phases.
    fn run(&mut self, OfRun { conv, weights, bias }: OfRun, x: ValueId, place: &Place, name: &str) -> ValueId {
        let named = |what: &str| Value { name: format!("{name}.{what}"), ..Value::default() };
        let mut inputs = vec![Some(x)];
        for (what, list) in [("weights", weights), ("bias", bias)] {
            let is_number = list.len() == 1 && list[0].dtype().is_float();
            let known: Vec<_> =
                list.into_iter().map(|tensor| Some(self.add_constant(format!("{name}.{what}"), tensor))).collect();
            match known[..] {
                [] => {}
                [number] if is_number => inputs.push(number),
                _ => {
                    let scaling = DequantizeLinear(Scaling { axis: 0, block: 0, dtype: None });
                    inputs.push(Some(self.step(scaling.into(), place, known, named(what))));
                }
            }
        }
        self.step(conv.into(), place, inputs, named("phases"))
    }

    /// Whether a concatenation's parts are contiguous in its memory, and what reads it only quantizes it by a
    /// single scale.
    fn is_sunk_below(&self, node: &Node, op: Concat) -> bool {
        let (Some(Some(to)), true) = (node.outputs.first(), node.inputs.iter().all(Option::is_some)) else {
            return false;
        };
        let shape = &self.old.ty(*to).shape;
        let is_flat = axis(op.axis, shape.len()).is_ok_and(|axis| shape[..axis].iter().all(|n| *n == 1));
        let is_moving = |id: &ValueId| self.old.value(*id).constant.is_none() && self.old.ty(*id).n_elements() > 0;
        let has_parts = node.inputs.len() > 1 && node.inputs.iter().flatten().all(is_moving);
        is_flat && has_parts && matches!(self.only_reader(*to), Some(Node { op: Op::QuantizeLinear(_), .. }))
    }

    fn joined(&mut self, node: &Node, op: Concat) -> Option<()> {
        let mut parts = Vec::with_capacity(node.inputs.len());
        for id in node.inputs.iter().flatten() {
            let mut at = self.known[id.0 as usize];
            // Another concatenation is made, and is one part.
            if at.is_none_or(|at| matches!(self.values[at], Sunk::Joined { .. })) {
                self.made(*id);
                at = self.known[id.0 as usize];
            }
            parts.push(at?);
        }
        let at = self.push(Sunk::Joined { parts, op, place: node.place.clone() });
        self.known[node.outputs[0]?.0 as usize] = Some(at);
        Some(())
    }

    /// Only node that reads a value, if it computes each element of its result from one of this value.
    fn only_reader(&self, id: ValueId) -> Option<&'a Node> {
        let &[user] = &self.old.value(id).users[..] else { return None };
        let node = self.old.node(user);
        (!self.old.outputs.contains(&id) && self.is_pointwise(node) && node.inputs[0] == Some(id)).then_some(node)
    }

    /// Whether a node computes each element of its result from one element of its first input and constants.
    fn is_pointwise(&self, node: &Node) -> bool {
        let is_one = |id: &ValueId| self.old.value(*id).constant.as_ref().is_some_and(|list| list.n_elements() == 1);
        let has_one = node.outputs.len() == 1 && node.inputs.iter().skip(1).flatten().all(is_one);
        let shape = |id: &Option<ValueId>| id.map(|id| &self.old.ty(id).shape);
        let is_of_elements = match &node.op {
            Op::QuantizeLinear(op) => op.0.block == 0,
            Op::DequantizeLinear(op) => op.0.block == 0,
            Op::Unary(_) | Op::Clip(_) | Op::Binary(_) => true,
            _ => false,
        };
        is_of_elements && has_one && shape(&node.inputs[0]) == shape(&node.outputs[0])
    }

    /// Whether a value is read by one node after another up to a quantization.
    fn is_quantized(&self, mut id: ValueId) -> bool {
        for _ in 0..MOST_BETWEEN {
            let Some(node) = self.only_reader(id) else { return false };
            match (&node.op, node.outputs[0]) {
                (Op::QuantizeLinear(_), _) => return true,
                (_, Some(to)) => id = to,
                _ => return false,
            }
        }
        false
    }

    /// Applies a node to what its input is moved or joined from.
    fn pointwise(&mut self, node: &'a Node) -> Option<()> {
        let (x, to) = (node.inputs[0]?, node.outputs[0]?);
        let at = self.known[x.0 as usize]?;
        (!matches!(self.values[at], Sunk::Made(_)) && self.is_pointwise(node)).then_some(())?;
        let old = self.old;
        let is_output = |id: ValueId| old.outputs.contains(&id);
        match &node.op {
            Op::DequantizeLinear(op) => {
                // Equal dequantizations of a value are one.
                let constants = |node: &Node| -> Vec<Tensor> {
                    node.inputs.iter().skip(1).flatten().filter_map(|id| old.value(*id).constant.clone()).collect()
                };
                let own = constants(node);
                let is_equal = |other: &Node| {
                    let others = constants(other);
                    let is_same = |(a, b): (&Tensor, &Tensor)| a.dtype() == b.dtype() && a.bytes() == b.bytes();
                    matches!(&other.op, Op::DequantizeLinear(of) if of.0.dtype == op.0.dtype)
                        && own.len() == others.len()
                        && own.iter().zip(&others).all(is_same)
                };
                let mut known = self.dequantized.iter().filter(|(of, ..)| *of == at);
                let known = known.find(|(_, other, _)| is_equal(other)).map(|(_, _, result)| *result);
                if let Some(known) = known.filter(|_| !is_output(to)) {
                    self.known[to.0 as usize] = Some(known);
                    return Some(());
                }
                (!is_output(x)).then_some(())?;
            }
            _ => self.is_quantized(x).then_some(())?,
        }
        let result = self.applied(node, at, &old.value(to).name, old.ty(to).dtype);
        self.known[to.0 as usize] = Some(result);
        if matches!(node.op, Op::DequantizeLinear(_)) && !is_output(to) {
            self.dequantized.push((at, node, result));
        }
        Some(())
    }

    /// Adds a node for each value that a value is moved or joined from; returns the result, moved or joined.
    fn applied(&mut self, node: &Node, at: usize, name: &str, dtype: DType) -> usize {
        let value = match self.values[at].clone() {
            Sunk::Made(id) => Sunk::Made(self.element_by_element(node, id, name, dtype)),
            Sunk::Moved { from, by, place } => {
                let each = |id| self.element_by_element(node, id, &format!("{name}.phases"), dtype);
                let from = from.into_iter().map(each).collect();
                Sunk::Moved { from, by, place }
            }
            Sunk::Joined { parts, op, place } => {
                let part = |(n, at): (usize, usize)| self.applied(node, at, &format!("{name}.part{n}"), dtype);
                let parts = parts.into_iter().enumerate().map(part).collect();
                Sunk::Joined { parts, op, place }
            }
        };
        self.push(value)
    }

    fn element_by_element(&mut self, node: &Node, x: ValueId, name: &str, dtype: DType) -> ValueId {
        let mut inputs = node.inputs.clone();
        inputs.iter_mut().skip(1).flatten().for_each(|id| *id = self.made(*id));
        inputs[0] = Some(x);
        let ty = Some(TensorType::new(dtype, self.new.ty(x).shape.clone()));
        let id = self.new.add_value(Value { name: name.to_owned(), ty, ..Value::default() });
        self.new.add_node(Node { op: node.op.clone(), place: node.place.clone(), inputs, outputs: vec![Some(id)] });
        id
    }
}
