//! Rules that swap maps with operators that only move elements.

use super::{Links, comes_from_anchor, drop_unread};
use crate::net::{Kind, Net, Node};
use crate::scalar;

fn is_move(kind: &Kind) -> bool {
    matches!(kind, Kind::View | Kind::Transpose(_))
}

/// Swaps a map with the move before it, so that the map directly follows the product before the move.
pub(super) fn sink_moves(net: &mut Net) -> usize {
    let mut n_sunk = 0;
    let n = net.values.len();
    let none = || vec![false; n];
    let mut moves = Moves { links: Links::of(net), is_of_anchor: none(), comes_moved: none(), is_turned: none() };
    let mut at = 0;
    while at < net.nodes.len() {
        let Some(before) = moves.moved_map(net, at) else {
            at += 1;
            continue;
        };
        let (mover, mut node) = (net.nodes[before].clone(), net.nodes[at].clone());
        moves.links.leave(&mover);
        moves.links.leave(&node);
        drop_unread(&mut node);
        let (name, dtype) = (net.value(node.output()).name.clone(), net.value(node.output()).dtype);
        let shape = net.shape(mover.input(0)).to_vec();
        let mapped = net.add_value(&name, dtype, &shape);
        let outputs = std::mem::replace(&mut node.outputs, vec![mapped]);
        net.nodes[before] = Node { inputs: mover.inputs, ..node };
        net.nodes[at] = Node { kind: mover.kind, inputs: vec![Some(mapped)], outputs, origin: mover.origin };
        for changed in [before, at] {
            moves.links.enter(&net.nodes[changed]);
            moves.links.place(&net.nodes[changed], changed);
        }
        n_sunk += 1;
        at = before;
    }
    n_sunk
}

/// Facts about the values computed so far, in a walk over the nodes in order.
struct Moves {
    links: Links,
    is_of_anchor: Vec<bool>,
    /// Whether a value comes from an anchor, possibly through moves.
    comes_moved: Vec<bool>,
    /// Whether a value comes from an anchor, with permuted dimensions.
    is_turned: Vec<bool>,
}

impl Moves {
    /// Finds the last of the moves before a map of one tensor, if the moved value comes from a product or
    /// convolution. Must be called for the nodes in order.
    fn moved_map(&mut self, net: &Net, at: usize) -> Option<usize> {
        let (Moves { links, is_of_anchor, comes_moved, is_turned }, node) = (self, &net.nodes[at]);
        for known in [&mut *is_of_anchor, comes_moved, is_turned] {
            known.resize(net.values.len(), false);
        }
        let to = node.outputs[0].0;
        is_of_anchor[to] = comes_from_anchor(net, is_of_anchor, node);
        let moved = node.inputs.first().copied().flatten().filter(|_| is_move(&node.kind));
        comes_moved[to] = moved.map_or(is_of_anchor[to], |from| comes_moved[from.0]);
        let turns = matches!(node.kind, Kind::Transpose(_));
        is_turned[to] = moved.is_some_and(|from| is_turned[from.0] || turns && comes_moved[from.0]);
        let Kind::Map(value) = &node.kind else { return None };
        let mut read = scalar::inputs(value);
        read.dedup();
        let [slot] = read[..] else { return None };
        let x = node.input(slot);
        let is_same = net.shape(node.output()) == net.shape(x);
        // Moves that are only views have a rule of their own.
        links.producers[x.0].filter(|_| links.n_uses[x.0] == 1 && is_turned[x.0] && is_same)
    }
}
