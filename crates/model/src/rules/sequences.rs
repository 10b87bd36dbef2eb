//! Rules for the attention heads of several sequences.

use super::strided::{Strided, strided};
use super::{Links, replace_each};
use crate::net::{Kind, Net, Node, ValueId};

/// Maximum number of sequences whose products are computed separately.
const MOST_SEQUENCES: i64 = 16;

/// Splits products of the heads of several sequences, which are contiguous and each have their heads side by
/// side, into products of one sequence each, which can read and write heads in place.
pub(super) fn split_sequences(net: &mut Net) -> usize {
    replace_each(net, split_product)
}

/// Makes the nodes that replace a product.
fn split_product(net: &mut Net, links: &Links, node: &Node) -> Option<Vec<Node>> {
    let (node, producers) = (node.clone(), &links.producers);
    let Kind::Product { heads: None, .. } = node.kind else { return None };
    let (to, origin) = (node.output(), node.origin.clone());
    let &[all, m, n] = net.shape(to) else { return None };
    let sequences = [0, 1].into_iter().find_map(|slot| n_sequences(net, producers, node.input(slot)))?;
    let heads = all / sequences;
    let mut new: Vec<Node> = Vec::new();
    let mut step = |net: &mut Net, kind: Kind, inputs: &[ValueId], shape: &[i64]| {
        let value = net.value(inputs[0]);
        let (name, dtype) = (value.name.clone(), value.dtype);
        let output = net.add_value(&name, dtype, shape);
        let inputs = inputs.iter().map(|&id| Some(id)).collect();
        new.push(Node { kind, inputs, outputs: vec![output], origin: origin.clone() });
        output
    };
    let factors = [0, 1].map(|slot| {
        let id = node.input(slot);
        let &[_, rows, columns] = net.shape(id) else { unreachable!("factors of a batch are batches") };
        let shape = [sequences, heads, rows, columns];
        let viewed = producers[id.0].map(|at| &net.nodes[at]).filter(|node| matches!(node.kind, Kind::View));
        match viewed.map(|node| node.input(0)).filter(|from| *net.shape(*from) == shape) {
            Some(from) => from,
            None => step(net, Kind::View, &[id], &shape),
        }
    });
    let mut parts = Vec::new();
    for sequence in 0..sequences {
        let of_one = factors.map(|factor| {
            let &[_, _, rows, columns] = net.shape(factor) else { unreachable!("it has heads") };
            let first = vec![(sequence, 1), (0, 1), (0, 1), (0, 1)];
            let part = step(net, Kind::Slice(first), &[factor], &[1, heads, rows, columns]);
            step(net, Kind::View, &[part], &[heads, rows, columns])
        });
        let product = step(net, node.kind.clone(), &of_one, &[heads, m, n]);
        parts.push(step(net, Kind::View, &[product], &[1, heads, m, n]));
    }
    let whole = step(net, Kind::Concat(0), &parts, &[sequences, heads, m, n]);
    new.push(Node { kind: Kind::View, inputs: vec![Some(whole)], outputs: vec![to], origin: node.origin });
    Some(new)
}

/// Number of sequences in a batch of operands whose heads are transposed from a tensor with the heads side by
/// side.
fn n_sequences(net: &Net, producers: &[Option<usize>], id: ValueId) -> Option<i64> {
    let view = producers[id.0].map(|at| &net.nodes[at]).filter(|node| matches!(node.kind, Kind::View))?;
    let from = view.input(0);
    let &[sequences, heads, _, _] = net.shape(from) else { return None };
    let Strided { source, dims, .. } = strided(net, producers, from, None);
    let is_apart = source != from && dims[0].1 != heads * dims[1].1;
    let fits = net.shape(id)[0] == sequences * heads && heads > 1 && (2..=MOST_SEQUENCES).contains(&sequences);
    // An open number of sequences cannot be split.
    (is_apart && fits && net.open_size != Some(sequences)).then_some(sequences)
}

/// Replaces the transposition of concatenated products, each of one sequence, by a transposition of each.
pub(super) fn turn_sequences(net: &mut Net) -> usize {
    replace_each(net, turn_parts)
}

fn turn_parts(net: &mut Net, links: &Links, node: &Node) -> Option<Vec<Node>> {
    let node = node.clone();
    let Kind::Transpose(order) = &node.kind else { return None };
    let producer = |id: ValueId| links.producers[id.0].map(|at| &net.nodes[at]);
    let whole = producer(node.input(0)).filter(|node| matches!(node.kind, Kind::Concat(0)))?;
    let is_of_sequences = whole.inputs.iter().flatten().all(|id| {
        let product = producer(*id).filter(|view| matches!(view.kind, Kind::View)).map(|view| view.input(0));
        product.and_then(producer).is_some_and(|node| matches!(node.kind, Kind::Product { .. }))
    });
    if order[0] != 0 || !is_of_sequences || links.n_uses[node.input(0).0] != 1 {
        return None;
    }
    let parts: Vec<ValueId> = whole.inputs.iter().flatten().copied().collect();
    let (mut new, mut turned) = (Vec::new(), Vec::new());
    for part in parts {
        let shape: Vec<i64> = order.iter().map(|&d| net.shape(part)[d]).collect();
        let (name, dtype) = (net.value(part).name.clone(), net.value(part).dtype);
        let to = net.add_value(&name, dtype, &shape);
        new.push(Node { inputs: vec![Some(part)], outputs: vec![to], ..node.clone() });
        turned.push(Some(to));
    }
    new.push(Node { kind: Kind::Concat(0), inputs: turned, ..node });
    Some(new)
}
