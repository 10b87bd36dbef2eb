//! Part of a model whose shapes depend on the data, such as the last nodes of a detector, whose shapes depend
//! on the boxes that it keeps.

use std::collections::HashMap;

use super::{Specialiser, pruned};
use crate::evaluate::{EvaluateError, NodeEvaluator, run_with};
use crate::op::Inputs;
use crate::{Graph, Node, NodeId, Op, OpError, Place, Problem, Reason, Tensor, TensorType, Value, ValueId};

/// Nodes whose shapes are known only when they run, and the preceding graph, whose shapes are known.
#[derive(Debug, Clone)]
pub struct DynamicPart {
    /// Specialised graph before the part. Its outputs are the model's outputs that it computes, then the
    /// values that the part reads.
    pub ahead: Graph,
    graph: Graph,
    /// Indices of the part's inputs among the outputs of the graph ahead.
    reads: Vec<usize>,
    /// Outputs of the model, by name.
    outputs: Vec<(String, Source)>,
}

/// Source of an output of the model.
#[derive(Debug, Clone, Copy)]
enum Source {
    /// Index among the outputs of the graph ahead.
    Ahead(usize),
    /// Index among the outputs of the part.
    Part(usize),
}

impl DynamicPart {
    /// Number of nodes of the part.
    pub fn n_nodes(&self) -> usize {
        self.graph.nodes().len()
    }

    /// First node of the part, whose output shape depends on the data.
    pub fn first(&self) -> Option<&Place> {
        self.graph.nodes().next().map(|(_, node)| &node.place)
    }

    /// Whether results differ between runs with the same inputs, as random numbers do.
    pub fn is_random(&self) -> bool {
        self.graph.is_random()
    }

    /// Names of the tensors that the part reads.
    pub fn inputs(&self) -> impl Iterator<Item = &str> {
        self.graph.inputs.iter().map(|&id| self.graph.value(id).name.as_str())
    }

    /// Evaluates the part for the outputs of the graph ahead, operator by operator, as
    /// [`evaluate`](crate::evaluate()) does; returns the model's outputs, by name.
    ///
    /// # Errors
    /// If an operator fails.
    pub fn evaluate(&self, ahead: &[Tensor]) -> Result<Vec<(String, Tensor)>, EvaluateError> {
        self.evaluate_with(ahead, &mut |_, _| None)
    }

    /// Evaluates the part as [`DynamicPart::evaluate`] does, except for the nodes that `other` evaluates.
    ///
    /// # Errors
    /// If an operator fails.
    pub fn evaluate_with(
        &self,
        ahead: &[Tensor],
        other: &mut NodeEvaluator<'_>,
    ) -> Result<Vec<(String, Tensor)>, EvaluateError> {
        let inputs = self.reads.iter().map(|&at| ahead[at].clone()).collect();
        let computed = run_with(&self.graph, inputs, other)?;
        let output = |(name, source): &(String, Source)| {
            let tensor = match *source {
                Source::Ahead(at) => &ahead[at],
                Source::Part(at) => &computed[at],
            };
            (name.clone(), tensor.clone())
        };
        Ok(self.outputs.iter().map(output).collect())
    }

    /// Whether kernels of a node with inputs of these types would be faster than the reference.
    pub fn is_heavy(&self, id: NodeId, inputs: Inputs<'_>) -> bool {
        let op = &self.graph.node(id).op;
        let Some(types) = is_arithmetic(op).then(|| op.operation().infer(inputs).ok()).flatten() else { return false };
        if types.iter().any(|ty| ty.n_elements() == 0) {
            return false;
        }
        let of_inputs = inputs.0.iter().flatten().map(|fact| fact.ty);
        of_inputs.chain(&types).map(TensorType::n_elements).sum::<usize>() >= HEAVY_ELEMENTS
    }

    /// Makes a specialised graph of a single node of the part, with the types that its inputs have in a run.
    /// Inputs are named by their indices; constants of the part are constants of the graph. `None` if the
    /// node does not support its inputs, or has unnamed outputs.
    pub fn node_alone(&self, id: NodeId, inputs: Inputs<'_>) -> Option<Graph> {
        let node = self.graph.node(id);
        let types = node.op.operation().infer(inputs).ok()?;
        let mut alone = Graph::default();
        let mut given = vec![None; node.inputs.len()];
        for (at, (input, fact)) in node.inputs.iter().zip(inputs.0).enumerate() {
            let (Some(input), Some(fact)) = (input, fact) else { continue };
            let constant = self.graph.value(*input).constant.clone();
            let is_constant = constant.is_some();
            let (name, ty) = (at.to_string(), Some(fact.ty.clone()));
            let new = alone.add_value(Value { name, ty, constant, ..Value::default() });
            if !is_constant {
                alone.inputs.push(new);
            }
            given[at] = Some(new);
        }
        let outputs = node.outputs.iter().zip(types).enumerate().map(|(at, (output, ty))| {
            output.map(|_| alone.add_value(Value { name: format!("to {at}"), ty: Some(ty), ..Value::default() }))
        });
        let outputs: Vec<Option<ValueId>> = outputs.collect();
        // The graph cannot have outputs that the node does not name.
        alone.outputs = outputs.iter().copied().collect::<Option<_>>()?;
        alone.add_node(Node { op: node.op.clone(), place: node.place.clone(), inputs: given, outputs });
        Some(alone)
    }
}

/// Number of elements of a node's tensors from which a kernel pays off after some runs: the reference takes a
/// millisecond for 64K elements.
const HEAVY_ELEMENTS: usize = 1 << 16;

/// Whether an operator does more arithmetic than data movement.
fn is_arithmetic(op: &Op) -> bool {
    use Op as O;
    matches!(
        op,
        O::Attention(_)
            | O::BatchNormalization(_)
            | O::Conv(_)
            | O::ConvTranspose(_)
            | O::Einsum(_)
            | O::Gemm(_)
            | O::GridSample(_)
            | O::GroupNormalization(_)
            | O::InstanceNormalization(_)
            | O::LayerNormalization(_)
            | O::MatMul(_)
            | O::Recurrent(_)
            | O::Resize(_)
            | O::RoiAlign(_)
            | O::Softmax(_)
            | O::Unary(_)
    )
}

/// Maximum number of elements of an input that a user may bind to a constant: those of a shape.
const MOST_BOUND: usize = 8;

impl Specialiser {
    /// Whether an operator fails because its output shape depends on the data: no input that the shape is
    /// computed from is as small as a size.
    fn is_of_data(&self, problem: &Problem) -> bool {
        let is_data = |name: &String| {
            let mut inputs = self.graph.inputs.iter().map(|&id| self.graph.value(id));
            let ty = inputs.find(|value| value.name == *name).and_then(|value| value.ty.as_ref());
            ty.is_some_and(|ty| ty.dtype.is_float() || ty.n_elements() > MOST_BOUND)
        };
        match &problem.reason {
            Reason::Op(error) => *error == OpError::ShapeOfData,
            Reason::NeedsInput { inputs, .. } => inputs.iter().any(is_data),
            _ => false,
        }
    }

    /// Divides a graph at the nodes whose shapes depend on the data, if it has no other problems; `map` maps
    /// its values to those of the specialised graph.
    pub(super) fn dynamic_part(&self, old: &Graph, map: &[Option<ValueId>]) -> Option<DynamicPart> {
        if self.problems.is_empty() || !self.problems.iter().all(|problem| self.is_of_data(problem)) {
            return None;
        }
        let (ahead, part) = (self.graph.clone(), Graph::default());
        let mut job = Divider { ahead, part, reads: Vec::new(), map, old, moved: HashMap::new() };
        let mut outputs = Vec::with_capacity(old.outputs.len());
        for &id in &old.outputs {
            let name = old.value(id).name.clone();
            outputs.push((name, map[id.0 as usize].map(|new| Source::Ahead(job.output(new)))));
        }
        for node in needed(old, map) {
            job.take(node)?;
        }
        let mut sources = Vec::with_capacity(outputs.len());
        for ((name, source), id) in outputs.into_iter().zip(&old.outputs) {
            let source = match source {
                Some(source) => source,
                None => {
                    let id = job.value(*id)?;
                    job.part.outputs.push(id);
                    Source::Part(job.part.outputs.len() - 1)
                }
            };
            sources.push((name, source));
        }
        Some(DynamicPart { ahead: pruned(&job.ahead), graph: job.part, reads: job.reads, outputs: sources })
    }
}

/// Nodes that compute what outputs need and `map` lacks, in order.
fn needed<'g>(old: &'g Graph, map: &[Option<ValueId>]) -> Vec<&'g Node> {
    let mut is_needed = vec![false; map.len()];
    old.outputs.iter().for_each(|id| is_needed[id.0 as usize] = map[id.0 as usize].is_none());
    let mut found = Vec::new();
    let nodes: Vec<&Node> = old.nodes().map(|(_, node)| node).collect();
    for node in nodes.into_iter().rev() {
        if node.outputs.iter().flatten().any(|id| is_needed[id.0 as usize]) {
            node.inputs.iter().flatten().for_each(|id| is_needed[id.0 as usize] |= map[id.0 as usize].is_none());
            found.push(node);
        }
    }
    found.reverse();
    found
}

/// Graph that is being divided.
struct Divider<'a> {
    ahead: Graph,
    part: Graph,
    reads: Vec<usize>,
    map: &'a [Option<ValueId>],
    old: &'a Graph,
    /// Values of the part, by those of the old graph.
    moved: HashMap<ValueId, ValueId>,
}

impl Divider<'_> {
    /// Makes a value an output of the graph ahead, and returns the output's index.
    fn output(&mut self, id: ValueId) -> usize {
        if let Some(at) = self.ahead.outputs.iter().position(|&output| output == id) {
            return at;
        }
        let Value { name, ty, producer, .. } = self.ahead.value(id).clone();
        let mut output = id;
        // An input or a constant is copied.
        if producer.is_none() {
            output = self.ahead.add_value(Value { name: name.clone(), ty, ..Value::default() });
            let place = Place { node: name, operator: "Identity".to_owned(), opset: 1 };
            let outputs = vec![Some(output)];
            self.ahead.add_node(Node { op: Op::identity(), place, inputs: vec![Some(id)], outputs });
        }
        self.ahead.outputs.push(output);
        self.ahead.outputs.len() - 1
    }

    /// Returns the value of the part for one of the old graph; `None` if it has strings or is a sequence.
    fn value(&mut self, id: ValueId) -> Option<ValueId> {
        if let Some(&new) = self.moved.get(&id) {
            return Some(new);
        }
        let (old, ahead) = (self.old.value(id), self.map[id.0 as usize]);
        let constant = ahead.map_or(&old.constant, |new| &self.ahead.value(new).constant).clone();
        let is_tensor = |value: &Value| value.texts.is_none() && value.parts.is_none();
        if !is_tensor(old) || !ahead.is_none_or(|new| is_tensor(self.ahead.value(new))) {
            return None;
        }
        let ty = constant.as_ref().map(|constant| constant.ty().clone());
        let is_read = constant.is_none() && ahead.is_some();
        let new = self.part.add_value(Value { name: old.name.clone(), ty, constant, ..Value::default() });
        if let (true, Some(ahead)) = (is_read, ahead) {
            let at = self.output(ahead);
            self.part.inputs.push(new);
            self.reads.push(at);
        }
        self.moved.insert(id, new);
        Some(new)
    }

    /// Moves a node to the part.
    fn take(&mut self, node: &Node) -> Option<()> {
        let inputs = node.inputs.iter().map(|id| id.map_or(Some(None), |id| self.value(id).map(Some)));
        let inputs: Vec<Option<ValueId>> = inputs.collect::<Option<_>>()?;
        let mut outputs = Vec::with_capacity(node.outputs.len());
        for &output in &node.outputs {
            // A known result of a node in the part belongs to the graph ahead.
            let new = output.map(|id| {
                let new = self.part.add_value(Value { name: self.old.value(id).name.clone(), ..Value::default() });
                if self.map[id.0 as usize].is_none() {
                    self.moved.insert(id, new);
                }
                new
            });
            outputs.push(new);
        }
        let (op, place) = (node.op.clone(), node.place.clone());
        self.part.add_node(Node { op, place, inputs, outputs });
        Some(())
    }
}
