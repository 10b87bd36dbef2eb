//! Head sizes that follow from the weights of a model.

use std::borrow::Cow;

use super::Bindings;
use crate::{Dim, Graph, Op, ValueId};

/// Symbolic dimensions of inputs whose size follows from the weights, with that size: the head size of a
/// key-value cache that `GroupQueryAttention` reads, which onnxruntime-genai's builder leaves open.
pub fn derived_dims(graph: &Graph) -> Vec<(String, usize)> {
    let mut found: Vec<(String, usize)> = Vec::new();
    for (_, node) in graph.nodes() {
        let Op::GroupQueryAttention(op) = &node.op else { continue };
        let input = |at: usize| node.inputs.get(at).copied().flatten();
        let [n_q, n_kv] = op.n_heads();
        let of = |at: usize, n_heads: usize| Some(width(graph, input(at)?)? / n_heads);
        let (keys, values) = match input(1) {
            None => (of(0, n_q + 2 * n_kv), of(0, n_q + 2 * n_kv)),
            Some(_) => (of(1, n_kv).or_else(|| of(0, n_q)), of(2, n_kv)),
        };
        for (at, size) in [(3, keys.or(values)), (4, values.or(keys))] {
            let declared = input(at).and_then(|past| graph.value(past).declared.as_ref()?.dims.as_ref());
            let Some((Dim::Named(name), size)) = declared.and_then(|dims| dims.last()).zip(size) else { continue };
            if !found.iter().any(|(known, _)| known == name) {
                found.push((name.clone(), size));
            }
        }
    }
    found
}

/// Bindings with the dimensions of [`derived_dims`] that are not bound.
pub(super) fn with_derived<'b>(graph: &Graph, bindings: &'b Bindings) -> Cow<'b, Bindings> {
    let mut derived = derived_dims(graph);
    derived.retain(|(name, _)| !bindings.dims.iter().any(|(known, _)| known == name));
    match derived.is_empty() {
        true => Cow::Borrowed(bindings),
        false => Cow::Owned(Bindings { dims: [derived, bindings.dims.clone()].concat(), ..bindings.clone() }),
    }
}

/// Last dimension of a value, if it is that of weights whatever the sizes of inputs are.
fn width(graph: &Graph, id: ValueId) -> Option<usize> {
    let value = graph.value(id);
    let Some((producer, _)) = value.producer else { return value.ty.as_ref()?.shape.last().copied() };
    let node = graph.node(producer);
    let of = |at: usize| width(graph, node.inputs.get(at).copied().flatten()?);
    match &node.op {
        Op::MatMulNBits(op) => Some(op.n),
        Op::MatMul(_) => of(1),
        Op::Binary(_) => of(0).or_else(|| of(1)),
        Op::Cast(_) | Op::Unary(_) | Op::DequantizeLinear(_) | Op::RotaryEmbedding(_) => of(0),
        Op::Reshape(_) => {
            let shape = graph.value(node.inputs.get(1).copied().flatten()?).constant.as_ref()?.i64s();
            shape.last().filter(|size| **size > 0).map(|size| *size as usize)
        }
        _ => None,
    }
}
