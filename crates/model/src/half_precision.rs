//! Computation of f16 and bf16 graphs in f32.
//!
//! Kernels of models compute in f32. So constants, inputs and results of 16 bits are widened to f32; outputs
//! of the model, and casts to 16 bits within it, are rounded.

use std::borrow::Cow;

use tilewright_graph::op::{Cast, Fact, Inputs};
use tilewright_graph::{DType, Graph, Node, Op, Place, TensorType, Value, ValueId};

pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::Bf16)
}

/// Number of nodes of a specialised graph with f16 or bf16 results, casts excluded.
pub fn count_halves(graph: &Graph) -> usize {
    let gives_half = |node: &Node| node.outputs.iter().flatten().any(|&id| is_half(graph.ty(id).dtype));
    graph.nodes().filter(|(_, node)| !matches!(node.op, Op::Cast(_)) && gives_half(node)).count()
}

/// Widens f16 and bf16 between the nodes of a graph to f32; with `rounds`, the result of each node is rounded
/// to its 16-bit type, as the model prescribes. A node whose result would differ in more than rounding is
/// kept as it is.
pub fn widened(graph: &Graph, rounds: bool) -> Cow<'_, Graph> {
    if !graph.values().any(|(_, value)| value.ty.as_ref().is_some_and(|ty| is_half(ty.dtype))) {
        return Cow::Borrowed(graph);
    }
    let n = graph.values().len();
    let mut job = Widening { old: graph, new: Graph::default(), plain: vec![None; n], wide: vec![None; n] };
    job.new.name.clone_from(&graph.name);
    (job.new.open_size, job.new.second_size) = (graph.open_size, graph.second_size);
    for &id in &graph.inputs {
        let new = job.add(id);
        job.new.inputs.push(new);
    }
    for (_, node) in graph.nodes() {
        job.node(node, rounds);
    }
    for &id in &graph.outputs {
        let new = job.plain(id);
        job.new.outputs.push(new);
    }
    Cow::Owned(job.new)
}

struct Widening<'a> {
    old: &'a Graph,
    new: Graph,
    /// New value of each old one, with the same type.
    plain: Vec<Option<ValueId>>,
    /// Counterparts in f32 of values of 16 bits.
    wide: Vec<Option<ValueId>>,
}

impl Widening<'_> {
    fn is_half(&self, id: ValueId) -> bool {
        is_half(self.old.ty(id).dtype)
    }

    /// Adds a copy of a value.
    fn add(&mut self, id: ValueId) -> ValueId {
        let value = Value { producer: None, users: Vec::new(), ..self.old.value(id).clone() };
        let new = self.new.add_value(value);
        self.plain[id.0 as usize] = Some(new);
        new
    }

    /// Adds a value in f32, without elements yet.
    fn add_wide(&mut self, id: ValueId) -> ValueId {
        let value = self.old.value(id);
        let ty = TensorType::new(DType::F32, self.old.ty(id).shape.clone());
        let name = format!("{}.f32", value.name);
        let constant = value.constant.as_ref().map(|tensor| tensor.widened());
        self.new.add_value(Value { name, ty: Some(ty), constant, varies: value.varies, ..Value::default() })
    }

    fn cast(&mut self, from: ValueId, to: ValueId) {
        let dtype = self.new.ty(to).dtype;
        let place = Place { node: self.new.value(to).name.clone(), operator: "Cast".to_owned(), opset: 13 };
        let op = Op::from(Cast { to: Some(dtype) });
        self.new.add_node(Node { op, place, inputs: vec![Some(from)], outputs: vec![Some(to)] });
    }

    /// Counterpart of an old value, in its own type.
    fn plain(&mut self, id: ValueId) -> ValueId {
        if let Some(known) = self.plain[id.0 as usize] {
            return known;
        }
        let wide = self.wide[id.0 as usize];
        let new = self.add(id);
        // A constant has its elements in both types.
        if let Some(wide) = wide.filter(|_| self.new.value(new).constant.is_none()) {
            self.cast(wide, new);
        }
        new
    }

    /// Counterpart of an old value, in f32 if it has 16 bits.
    fn wide(&mut self, id: ValueId) -> ValueId {
        if !self.is_half(id) {
            return self.plain(id);
        }
        if let Some(known) = self.wide[id.0 as usize] {
            return known;
        }
        let new = self.add_wide(id);
        self.wide[id.0 as usize] = Some(new);
        if self.new.value(new).constant.is_none() {
            let plain = self.plain(id);
            self.cast(plain, new);
        }
        new
    }

    fn node(&mut self, node: &Node, rounds: bool) {
        let has_half = node.inputs.iter().chain(&node.outputs).flatten().any(|&id| self.is_half(id));
        let mut node = node.clone();
        if let (Op::Cast(_), Some(&Some(to))) = (&node.op, node.outputs.first()) {
            // A cast to 16 bits is explicit in the model, so its rounding is kept.
            node.inputs.truncate(1);
            node.inputs.iter_mut().flatten().for_each(|id| *id = self.wide(*id));
            node.op = Cast { to: Some(self.old.ty(to).dtype) }.into();
            node.outputs = vec![Some(self.add(to))];
            self.new.add_node(node);
            return;
        }
        let inputs: Vec<Option<ValueId>> = node.inputs.iter().map(|id| id.map(|id| self.wide(id))).collect();
        // The graph of a loop is widened separately.
        let is_wide = has_half && !matches!(node.op, Op::Loop(_)) && self.computes(&node, &inputs);
        node.inputs = match is_wide {
            true => inputs,
            false => node.inputs.iter().map(|id| id.map(|id| self.plain(id))).collect(),
        };
        let outputs = node.outputs.clone();
        for output in node.outputs.iter_mut().flatten() {
            let id = *output;
            *output = if is_wide && self.is_half(id) { self.add_wide(id) } else { self.add(id) };
        }
        let computed = node.outputs.clone();
        self.new.add_node(node);
        for (old, new) in outputs.iter().zip(&computed) {
            let (Some(old), Some(new)) = (*old, *new) else { continue };
            if is_wide && self.is_half(old) {
                self.wide[old.0 as usize] = Some(new);
                if rounds {
                    self.plain(old);
                    self.wide[old.0 as usize] = None;
                }
            }
        }
    }

    /// Whether a node with widened inputs computes in f32 what it computed before.
    fn computes(&self, node: &Node, inputs: &[Option<ValueId>]) -> bool {
        let fact = |id: &Option<ValueId>| {
            let value = self.new.value((*id)?);
            Some(Fact { ty: value.ty.as_ref()?, value: value.constant.as_ref() })
        };
        let facts: Vec<Option<Fact<'_>>> = inputs.iter().map(fact).collect();
        let Ok(types) = node.op.operation().infer(Inputs(&facts)) else { return false };
        node.outputs.iter().zip(&types).all(|(id, ty)| {
            id.is_none_or(|id| ty.dtype == if self.is_half(id) { DType::F32 } else { self.old.ty(id).dtype })
        })
    }
}
