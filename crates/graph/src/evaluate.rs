//! Evaluation of a graph, operator by operator.

use std::collections::HashMap;

use crate::error::invalid;
use crate::op::{Elements, Fact, Inputs, Item, Unary};
use crate::tensor::shape_text;
use crate::{Graph, Node, NodeId, Op, OpError, Problem, Reason, Tensor, TensorType, ValueId};

/// Maximum dimension of a tensor, and maximum number of its bytes; beyond them, sizes could overflow.
const LARGEST_DIM: usize = 1 << 31;
const MOST_BYTES: usize = 1 << 42;

/// Reason why a graph cannot be evaluated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EvaluateError {
    /// Error of a node.
    #[error("{0}")]
    Node(Box<Problem>),
    /// Input that is missing, unknown, or of another type than declared.
    #[error("input `{name}` {what}")]
    Input {
        /// The input.
        name: String,
        /// Reason.
        what: String,
    },
}

impl EvaluateError {
    /// Error of the operator; `None` if an input is wrong.
    pub fn reason(&self) -> Option<&OpError> {
        match self {
            EvaluateError::Node(problem) => match &problem.reason {
                Reason::Op(reason) => Some(reason),
                _ => None,
            },
            EvaluateError::Input { .. } => None,
        }
    }
}

/// Evaluates a graph with the given inputs, and returns its outputs in their order. The graph need not be
/// specialised.
///
/// Floating-point numbers are computed in f64 within an operator and rounded to their type after
/// it; integers are exact.
///
/// # Errors
/// If inputs are missing or do not fit, or an operator fails.
pub fn evaluate(graph: &Graph, inputs: &[(&str, Tensor)]) -> Result<Vec<Tensor>, EvaluateError> {
    let names: Vec<&str> = graph.inputs.iter().map(|&id| graph.value(id).name.as_str()).collect();
    let input = |name: &str, what: String| EvaluateError::Input { name: name.to_owned(), what };
    if let Some((name, _)) = inputs.iter().find(|(name, _)| !names.contains(name)) {
        return Err(input(name, format!("is not an input of the model, which has {}", names.join(", "))));
    }
    let mut given = Vec::with_capacity(names.len());
    for (&id, name) in graph.inputs.iter().zip(&names) {
        let found = inputs.iter().find(|(n, _)| n == name);
        let (_, tensor) = found.ok_or_else(|| input(name, "is missing (give it)".to_owned()))?;
        let wanted = &graph.value(id).ty;
        if wanted.as_ref().is_some_and(|wanted| wanted != tensor.ty()) {
            let wanted = wanted.as_ref().expect("it is some");
            return Err(input(name, format!("is {}, and should be {wanted}", tensor.ty())));
        }
        given.push(tensor.clone());
    }
    run(graph, given)
}

/// Evaluates a graph for its inputs in their order.
///
/// # Errors
/// If an operator fails.
pub(crate) fn run(graph: &Graph, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, EvaluateError> {
    run_with(graph, inputs, &mut |_, _| None)
}

/// Alternative evaluator of single nodes: returns the outputs for the given inputs, or `None` for a node that
/// is left to the reference.
pub type NodeEvaluator<'a> = dyn FnMut(NodeId, Inputs<'_>) -> Option<Vec<Tensor>> + 'a;

/// Evaluates a graph as [`run`] does, except for the nodes that `other` evaluates.
///
/// # Errors
/// If an operator fails.
pub(crate) fn run_with(
    graph: &Graph,
    inputs: Vec<Tensor>,
    other: &mut NodeEvaluator<'_>,
) -> Result<Vec<Tensor>, EvaluateError> {
    let mut tensors: Vec<Option<Tensor>> = graph.values().map(|(_, value)| value.constant.clone()).collect();
    let mut n_uses: Vec<usize> = graph.values().map(|(_, value)| value.users.len()).collect();
    graph.outputs.iter().for_each(|id| n_uses[id.0 as usize] += 1);
    for (id, tensor) in graph.inputs.iter().zip(inputs) {
        tensors[id.0 as usize] = Some(tensor);
    }
    let mut sequences: HashMap<ValueId, Vec<Tensor>> = HashMap::new();
    for (id, node) in graph.nodes() {
        let done = match run_sequence(node, &tensors, &mut sequences) {
            Some(done) => done,
            None => run_node(node, &tensors, &mut |inputs| other(id, inputs)),
        };
        let outputs = done
            .map_err(|reason| Problem { place: Some(node.place.clone()), reason: Reason::Op(reason) })
            .map_err(|problem| EvaluateError::Node(Box::new(problem)))?;
        for (output, tensor) in node.outputs.iter().zip(outputs) {
            if let Some(id) = output {
                tensors[id.0 as usize] = Some(tensor);
            }
        }
        for id in node.inputs.iter().flatten() {
            n_uses[id.0 as usize] -= 1;
            if n_uses[id.0 as usize] == 0 {
                tensors[id.0 as usize] = None;
            }
        }
    }
    let outputs = graph.outputs.iter().map(|id| tensors[id.0 as usize].clone().ok_or(id));
    outputs.collect::<Result<_, _>>().map_err(|id| EvaluateError::Input {
        name: graph.value(*id).name.clone(),
        what: "is an output that nothing computes".to_owned(),
    })
}

impl Graph {
    /// Elements of a value of a specialised graph that is computed from constants alone; `None` if it is not,
    /// or if a tensor on the way takes more than `most_bytes`.
    pub fn known(&self, id: ValueId, most_bytes: usize) -> Option<Tensor> {
        self.known_with(id, most_bytes, &mut HashMap::new())
    }

    fn known_with(
        &self,
        id: ValueId,
        most_bytes: usize,
        found: &mut HashMap<ValueId, Option<Tensor>>,
    ) -> Option<Tensor> {
        let value = self.value(id);
        if value.constant.is_some() {
            return value.constant.clone();
        }
        if let Some(known) = found.get(&id) {
            return known.clone();
        }
        found.insert(id, None);
        let (node, output) = value.producer?;
        value.ty.as_ref()?.checked_bytes().filter(|n| *n <= most_bytes)?;
        let node = Some(self.node(node)).filter(|node| !node.op.is_random())?;
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for input in &node.inputs {
            inputs.push(match input {
                Some(input) => Some(self.known_with(*input, most_bytes, found)?),
                None => None,
            });
        }
        let facts: Vec<_> = inputs.iter().map(|x| x.as_ref().map(|x| Fact { ty: x.ty(), value: Some(x) })).collect();
        let known = node.op.operation().evaluate(Inputs(&facts)).ok()?.into_iter().nth(output);
        found.insert(id, known.clone());
        known
    }
}

/// Runs a node that reads or makes a sequence; returns the tensors that it makes, if any.
fn run_sequence(
    node: &Node,
    tensors: &[Option<Tensor>],
    sequences: &mut HashMap<ValueId, Vec<Tensor>>,
) -> Option<Result<Vec<Tensor>, OpError>> {
    let item = |id: &ValueId| match sequences.get(id) {
        Some(many) => Some(Item::Many(many.clone())),
        None => tensors[id.0 as usize].clone().map(Item::One),
    };
    let inputs: Vec<Option<Item<Tensor>>> = node.inputs.iter().map(|id| id.as_ref().and_then(item)).collect();
    let done = match &node.op {
        Op::Sequence(op) => op.of(&inputs, &mut Known),
        Op::Unary(Unary::Identity) => match inputs.into_iter().next() {
            Some(Some(many @ Item::Many(_))) => Ok(many),
            _ => return None,
        },
        _ => return None,
    };
    Some(done.map(|item| match (item, node.outputs.first()) {
        (Item::One(tensor), _) => vec![tensor],
        (Item::Many(many), Some(Some(id))) => {
            sequences.insert(*id, many);
            Vec::new()
        }
        (Item::Many(_), _) => Vec::new(),
    }))
}

/// Inputs whose elements are all known.
struct Known;

impl Elements for Known {
    type Element = Tensor;

    fn ty(&self, of: &Tensor) -> Result<TensorType, OpError> {
        Ok(of.ty().clone())
    }

    fn known(&self, of: &Tensor) -> Option<Tensor> {
        Some(of.clone())
    }

    fn constant(&mut self, tensor: Tensor) -> Tensor {
        tensor
    }

    fn computed(&mut self, op: Op, inputs: &[Tensor]) -> Result<Tensor, OpError> {
        let facts: Vec<_> = inputs.iter().map(|x| Some(Fact { ty: x.ty(), value: Some(x) })).collect();
        check_types(&op.operation().infer(Inputs(&facts))?, 1)?;
        Ok(op.operation().evaluate(Inputs(&facts))?.remove(0))
    }
}

fn run_node(
    node: &Node,
    tensors: &[Option<Tensor>],
    other: &mut dyn FnMut(Inputs<'_>) -> Option<Vec<Tensor>>,
) -> Result<Vec<Tensor>, OpError> {
    let fact = |id: crate::ValueId| tensors[id.0 as usize].as_ref().map(|x| Fact { ty: x.ty(), value: Some(x) });
    let facts: Vec<Option<Fact<'_>>> = node.inputs.iter().map(|id| id.and_then(fact)).collect();
    if let Some(at) = (0..facts.len()).find(|&at| node.inputs[at].is_some() && facts[at].is_none()) {
        return Err(invalid!("its input {} is missing", at + 1));
    }
    let inputs = Inputs(&facts);
    let is_checked = match node.op {
        // Nodes of subgraphs are checked one by one.
        Op::If(_) | Op::Loop(_) | Op::Scan(_) => false,
        // If the shape depends on the data, inference evaluates, and the output is at most slightly larger
        // than the input.
        Op::NonZero(_) | Op::NonMaxSuppression(_) | Op::Unique(_) => false,
        _ => true,
    };
    if is_checked {
        check_types(&node.op.operation().infer(inputs)?, node.outputs.len())?;
    }
    other(inputs).map_or_else(|| node.op.operation().evaluate(inputs), Ok)
}

/// Checks that an operator has as many outputs as a node names, and that they fit memory.
///
/// # Errors
/// If there are too few outputs, or an output is too large.
pub(crate) fn check_types(types: &[TensorType], n_named: usize) -> Result<(), OpError> {
    if n_named > types.len() {
        return Err(crate::error::unsupported!("its output {n_named} is not supported"));
    }
    for ty in types {
        let is_small = ty.shape.iter().all(|&d| d <= LARGEST_DIM);
        let positive = ty.shape.iter().filter(|&&d| d > 0);
        let n_bytes = positive.copied().try_fold(ty.dtype.size(), usize::checked_mul);
        if !is_small || n_bytes.is_none_or(|n| n > MOST_BYTES) {
            return Err(OpError::TooLarge(shape_text(&ty.shape)));
        }
    }
    Ok(())
}
