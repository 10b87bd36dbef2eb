//! Gated layers: two products of one tensor, one of which gates the other, as one product with a gating
//! epilogue.

use std::collections::HashMap;

use tilewright_graph::Tensor;
use tilewright_ir::DType;
use tilewright_ir::op::{Epilogue, EpilogueFunction, Operand};

use crate::epilogue::{Operations, peel};
use crate::net::{Kind, Net, Node, ValueId};
use crate::rules::{joined, only_user};

/// Two products: the first, with its operations applied, gates the second.
struct Pair {
    /// Indices of their nodes.
    products: [usize; 2],
    operations: Operations,
}

/// Merges pairs of products of the same tensor, of which a map gates one by the other, into single products
/// with `columns` columns of each in turns. Returns the operations of each merged product, by its result.
pub(super) fn pair_products(net: &mut Net, columns: i64) -> HashMap<ValueId, Operations> {
    let (users, producers) = (net.users(), net.producers());
    let mut gated = HashMap::new();
    for at in 0..net.nodes.len() {
        let Some(Pair { products, mut operations }) = pair(net, &users, &producers, at, columns) else { continue };
        let gate =
            Epilogue::new(EpilogueFunction::Gated, &[columns as f64]).expect("vectors have such a number of lanes");
        operations.push((gate, None));
        gated.insert(net.nodes[at].output(), operations);
        net.nodes[at] = paired(net, at, products, columns);
    }
    if !gated.is_empty() {
        net.prune();
    }
    gated
}

/// Finds the pair of products that only this map reads.
fn pair(net: &Net, users: &[Vec<usize>], producers: &[Option<usize>], at: usize, columns: i64) -> Option<Pair> {
    let node = &net.nodes[at];
    let (Kind::Map(value), &[Some(a), Some(b)], out) = (&node.kind, &node.inputs[..], net.shape(node.output())) else {
        return None;
    };
    let is_whole = a != b && out.len() == 2 && out[1] % columns == 0;
    let fits = |id: ValueId| net.shape(id) == out && net.element_type(id) == Some(DType::F32);
    (is_whole && [a, b, node.output()].into_iter().all(fits)).then_some(())?;
    let is_product = |at: &usize| matches!(net.nodes[*at].kind, Kind::Product { heads: None, .. } | Kind::Packed(_));
    let is_read_here = |id: ValueId| only_user(net, users, id) == Some(at);
    let product = |id: ValueId| producers[id.0].filter(|product| is_product(product) && is_read_here(id));
    let products = [product(a)?, product(b)?];
    are_alike(net, producers, products.map(|product| &net.nodes[product])).then_some(())?;
    [[0, 1], [1, 0]].into_iter().find_map(|[x, y]| {
        let mut operations = peel(value, x, &|slot| (slot == y).then_some((Operand::Element, DType::F32)))?;
        let (last, operand) = operations.pop()?;
        let is_gate = last.function() == EpilogueFunction::Mul && operand == Some(y);
        let is_alone = operations.iter().all(|(operation, _)| operation.operand().is_none());
        (is_gate && is_alone).then_some(Pair { products: [products[x], products[y]], operations })
    })
}

/// Whether two products have the same first factor, and constant weights of the same type and layout.
fn are_alike(net: &Net, producers: &[Option<usize>], products: [&Node; 2]) -> bool {
    let is_one_kind = match products.map(|node| &node.kind) {
        [Kind::Product { turned, .. }, Kind::Product { turned: other, .. }] => turned == other,
        [Kind::Packed(packing), Kind::Packed(other)] => packing == other,
        _ => false,
    };
    let viewed = |id: ValueId| match producers[id.0].map(|at| &net.nodes[at]) {
        Some(node) if matches!(node.kind, Kind::View) => node.input(0),
        _ => id,
    };
    let [a, b] = products.map(|node| node.input(0));
    let is_known = |id: &Option<ValueId>| {
        id.is_some_and(|id| net.value(id).constant.as_ref().is_some_and(|known| known.n_elements() > 0))
    };
    let is_float = |id: ValueId| net.element_type(id) == Some(DType::F32);
    let are_numbers = |node: &Node| matches!(node.kind, Kind::Packed(_)) || is_float(node.input(1));
    is_one_kind
        && viewed(a) == viewed(b)
        && net.shape(a) == net.shape(b)
        && is_float(a)
        && products.iter().all(|node| node.inputs[1..].iter().all(is_known) && are_numbers(node))
}

/// Makes the merged product of a pair, which replaces the map that reads it.
fn paired(net: &mut Net, at: usize, products: [usize; 2], columns: i64) -> Node {
    let map = net.nodes[at].clone();
    let nodes = products.map(|product| net.nodes[product].clone());
    let axis = usize::from(!matches!(nodes[0].kind, Kind::Product { turned: true, .. }));
    let origin = joined(&joined(&nodes[0].origin, &nodes[1].origin), &map.origin);
    let mut inputs = vec![nodes[0].inputs[0]];
    for slot in 1..nodes[0].inputs.len() {
        let of = [nodes[0].input(slot), nodes[1].input(slot)];
        let weights = in_turns(net, of, axis, columns);
        let shape: Vec<i64> = weights.shape().iter().map(|&n| n as i64).collect();
        let id = net.add_value(&format!("{origin}.weights"), weights.dtype(), &shape);
        net.values[id.0].constant = Some(weights);
        inputs.push(Some(id));
    }
    Node { kind: nodes[0].kind.clone(), inputs, outputs: map.outputs, origin }
}

/// Interleaves the columns of two constant matrices, `columns` at a time, along the dimension `axis`.
fn in_turns(net: &Net, of: [ValueId; 2], axis: usize, columns: i64) -> Tensor {
    let known = of.map(|id| net.value(id).constant.as_ref().expect("weights are known"));
    let mut ty = known[0].ty().clone();
    let (outer, n) = (ty.shape[..axis].iter().product::<usize>(), ty.shape[axis]);
    let n_bytes = known[0].bytes().len();
    let part = n_bytes / (outer * n) * columns as usize;
    ty.shape[axis] = 2 * n;
    let mut bytes = Vec::with_capacity(2 * n_bytes);
    for from in (0..n_bytes).step_by(part) {
        known.iter().for_each(|tensor| bytes.extend_from_slice(&tensor.bytes()[from..][..part]));
    }
    Tensor::new(ty, bytes.into()).expect("there are as many bytes as the shape takes")
}
