//! Rules for views: merged, and moved after maps.

use super::{Links, comes_from_anchor, drop_unread};
use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{self, input, substitute};

/// Merges views of views, removes views of the same shape, and turns views of constants into constants. Maps
/// that read a value several times, possibly through such views, read it through one input.
pub(super) fn drop_views(net: &mut Net) -> usize {
    let (producers, n_before) = (net.producers(), net.nodes.len());
    let mut n_redirected = 0;
    let mut is_output = vec![false; net.values.len()];
    net.outputs.iter().for_each(|id| is_output[id.0] = true);
    // Value that is read instead of each value; nodes come before their readers.
    let mut read: Vec<ValueId> = (0..net.values.len()).map(ValueId).collect();
    for at in 0..net.nodes.len() {
        for id in net.nodes[at].inputs.iter_mut().flatten() {
            n_redirected += usize::from(*id != read[id.0]);
            *id = read[id.0];
        }
        join_reads(&mut net.nodes[at]);
        if !matches!(net.nodes[at].kind, Kind::View) {
            continue;
        }
        let (mut from, to) = (net.nodes[at].input(0), net.nodes[at].output());
        let producer = producers[from.0].map(|before| &net.nodes[before]);
        if let Some(Node { kind: Kind::View, inputs, .. }) = producer {
            from = inputs[0].expect("a view has an input");
            net.nodes[at].inputs[0] = Some(from);
        }
        if is_output[to.0] {
            continue;
        }
        if net.shape(from) == net.shape(to) {
            read[to.0] = from;
        } else if let Some(tensor) = &net.value(from).constant {
            net.values[to.0].constant = Some(tensor.reshaped(net.value(to).ty().shape));
        }
    }
    let is_constant: Vec<bool> = net.values.iter().map(|value| value.constant.is_some()).collect();
    net.nodes.retain(|node| !matches!(node.kind, Kind::View) || !is_constant[node.output().0]);
    net.prune();
    n_redirected + n_before - net.nodes.len()
}

/// Shape of a map's operand after the map is reshaped from one shape to another; `None` if there is none.
fn reexpressed(operand: &[i64], from: &[i64], to: &[i64]) -> Option<Vec<i64>> {
    let count = |shape: &[i64]| shape.iter().product::<i64>();
    // If the operand has as many elements as the map, it gets the same shape, or each view would need another
    // one.
    if count(operand) == count(from) {
        return Some(to.to_vec());
    }
    if count(operand) == 1 {
        return Some(vec![1]);
    }
    let missing = from.len().checked_sub(operand.len())?;
    let dim = |d: usize| if d < missing { 1 } else { operand[d - missing] };
    let long = |shape: &[i64]| (0..shape.len()).filter(|&d| shape[d] != 1).collect::<Vec<_>>();
    let (of_from, of_to) = (long(from), long(to));
    if of_from.iter().map(|&d| from[d]).eq(of_to.iter().map(|&d| to[d])) {
        let mut shape = vec![1; to.len()];
        of_from.iter().zip(&of_to).for_each(|(&a, &b)| shape[b] = dim(a));
        return Some(shape);
    }
    let n_same = from.iter().rev().zip(to.iter().rev()).take_while(|(a, b)| a == b).count();
    let is_short = (0..from.len() - n_same).all(|d| dim(d) == 1);
    is_short.then(|| (from.len() - n_same..from.len()).map(dim).collect())
}

/// Swaps a map with the view before it, so that the map directly follows the node that computes the view's
/// input.
pub(super) fn sink_views(net: &mut Net) -> usize {
    let mut n_sunk = 0;
    let mut links = Links::of(net);
    let mut is_of_anchor = vec![false; net.values.len()];
    let nodes = std::mem::take(&mut net.nodes);
    for node in nodes {
        let is_map = matches!(node.kind, Kind::Map(_));
        let new = is_map.then(|| sunk(net, &links, &is_of_anchor, &node)).flatten();
        n_sunk += usize::from(new.is_some());
        for node in links.exchange(node, new) {
            links.place(&node, net.nodes.len());
            is_of_anchor.resize(net.values.len(), false);
            is_of_anchor[node.outputs[0].0] = comes_from_anchor(net, &is_of_anchor, &node);
            net.nodes.push(node);
        }
    }
    n_sunk
}

/// Nodes that replace a map of a view; the net contains the nodes before it.
fn sunk(net: &mut Net, links: &Links, is_of_anchor: &[bool], node: &Node) -> Option<Vec<Node>> {
    let Links { n_uses, producers } = links;
    let node = node.clone();
    let out = net.shape(node.output()).to_vec();
    let count = |shape: &[i64]| shape.iter().product::<i64>();
    let Kind::Map(value) = &node.kind else { return None };
    let mut read = scalar::inputs(value);
    read.sort_unstable();
    read.dedup();
    // A map of one tensor and constants is merged into the map after the view.
    let becomes_part = |id: ValueId| {
        let is_map = |at: usize| matches!(net.nodes[at].kind, Kind::Map(_));
        read.len() == 1 && n_uses[id.0] == 1 && producers[id.0].is_some_and(is_map)
    };
    let source = |id: &Option<ValueId>| {
        let id = (*id)?;
        let producer = &net.nodes[producers[id.0]?];
        let is_view = matches!(producer.kind, Kind::View) && n_uses[id.0] == 1;
        let from = is_view.then(|| producer.input(0))?;
        let is_whole = count(net.shape(from)) == count(&out);
        (is_whole && (is_of_anchor[from.0] || becomes_part(from))).then_some(from)
    };
    let from = node.inputs.iter().find_map(source)?;
    let shape = net.shape(from).to_vec();
    let shapes: Vec<Vec<i64>> = node
        .inputs
        .iter()
        .map(|id| reexpressed(net.shape(id.expect("a map has all inputs")), &out, &shape))
        .collect::<Option<_>>()?;
    // If a kernel computes another input, the view would only move from this input to that one.
    let stays = |(id, shape): (&Option<ValueId>, &Vec<i64>)| {
        let id = id.expect("a map has all inputs");
        let before = producers[id.0].map(|at| &net.nodes[at]).filter(|node| matches!(node.kind, Kind::View));
        let viewed = before.map_or(id, |view| view.input(0));
        net.shape(viewed) != shape && is_of_anchor[viewed.0]
    };
    if node.inputs.iter().zip(&shapes).any(stays) {
        return None;
    }
    let mut new = Vec::new();
    let mut inputs = Vec::with_capacity(node.inputs.len());
    for (id, shape) in node.inputs.iter().zip(shapes) {
        let id = id.expect("a map has all inputs");
        if net.shape(id) == shape {
            inputs.push(Some(id));
            continue;
        }
        let value = net.value(id);
        let (name, dtype) = (value.name.clone(), value.dtype);
        let constant = value.constant.clone();
        let view = net.add_value(&name, dtype, &shape);
        match constant {
            Some(tensor) => net.values[view.0].constant = Some(tensor.reshaped(net.value(view).ty().shape)),
            None => new.push(Node {
                kind: Kind::View,
                inputs: vec![Some(id)],
                outputs: vec![view],
                origin: node.origin.clone(),
            }),
        }
        inputs.push(Some(view));
    }
    let value = net.value(node.output());
    let (name, dtype) = (value.name.clone(), value.dtype);
    let mapped = net.add_value(&name, dtype, &shape);
    let origin = node.origin.clone();
    new.push(Node { kind: node.kind, inputs, outputs: vec![mapped], origin: node.origin });
    new.push(Node { kind: Kind::View, inputs: vec![Some(mapped)], outputs: node.outputs, origin });
    Some(new)
}

/// Makes a map read each value through a single input.
fn join_reads(node: &mut Node) {
    let Kind::Map(value) = &node.kind else { return };
    let first = |slot: usize| node.inputs.iter().position(|id| *id == node.inputs[slot]).expect("it is itself");
    if (0..node.inputs.len()).all(|slot| first(slot) == slot) {
        return;
    }
    node.kind = Kind::Map(substitute(value, &|at| input(first(at))));
    drop_unread(node);
}
