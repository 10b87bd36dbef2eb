//! Rules that compose maps.

use tilewright_ir::Expr;

use super::{Links, MOST_COST, drop_unread, joined};
use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{self, cost, input, substitute};

/// Maximum number of operations of a map that is recomputed for every element that it is broadcast to.
const CHEAP: usize = 2;

/// Merges maps of maps.
pub(super) fn merge_maps(net: &mut Net) -> usize {
    let mut n_merged = 0;
    let mut links = Links::of(net);
    let mut is_merged = vec![false; net.nodes.len()];
    for at in 0..net.nodes.len() {
        while let Some(before) = mergeable(net, &links, at) {
            let (node, inner) = (&net.nodes[at], &net.nodes[before]);
            let (Kind::Map(outer), Kind::Map(value)) = (&node.kind, &inner.kind) else { unreachable!("both are maps") };
            let merged = merged(net, node, outer, inner, value);
            links.leave(node);
            // A map that only broadcasts may have other readers.
            if links.n_uses[inner.output().0] == 0 {
                links.leave(inner);
                links.producers[inner.output().0] = None;
                is_merged[before] = true;
            }
            links.enter(&merged);
            net.nodes[at] = merged;
            n_merged += 1;
        }
    }
    let mut is_merged = is_merged.into_iter();
    net.nodes.retain(|_| is_merged.next() == Some(false));
    n_merged
}

/// Input map that can be merged into a map.
fn mergeable(net: &Net, links: &Links, at: usize) -> Option<usize> {
    let node = &net.nodes[at];
    let Kind::Map(outer) = &node.kind else { return None };
    let Links { n_uses, producers } = links;
    let n_out = net.value(node.output()).n_elements();
    node.inputs.iter().flatten().find_map(|&id| {
        let before = producers[id.0]?;
        let Kind::Map(value) = &net.nodes[before].kind else { return None };
        let slots: Vec<usize> = (0..node.inputs.len()).filter(|&slot| node.inputs[slot] == Some(id)).collect();
        let n_reads = scalar::inputs(outer).iter().filter(|slot| slots.contains(slot)).count();
        let is_private = n_uses[id.0] == slots.len();
        let is_small = net.value(id).n_elements() < n_out;
        let own = cost(value);
        let is_repeated = n_reads > 1 || is_small;
        // A map that only broadcasts a smaller tensor is replaced by reads of that tensor.
        let is_spread = matches!(value, Expr::Load(slot, _) if
            net.value(net.nodes[before].input(slot.0 as usize)).n_elements() < net.value(id).n_elements());
        let may = is_spread || is_private && (!is_repeated || own <= CHEAP * n_reads.max(1) || !is_small && own < 15);
        (may && cost(outer) + n_reads * own <= MOST_COST).then_some(before)
    })
}

/// Composes two maps.
pub(crate) fn merged(net: &Net, node: &Node, outer: &Expr, inner: &Node, value: &Expr) -> Node {
    let mut inputs: Vec<Option<ValueId>> = Vec::new();
    let mut slot = |id: Option<ValueId>| {
        inputs.iter().position(|other| *other == id).unwrap_or_else(|| {
            inputs.push(id);
            inputs.len() - 1
        })
    };
    let of_outer: Vec<Option<usize>> =
        node.inputs.iter().map(|id| (*id != Some(inner.output())).then(|| slot(*id))).collect();
    let of_inner: Vec<usize> = inner.inputs.iter().map(|id| slot(*id)).collect();
    let value = substitute(value, &|at| input(of_inner[at]));
    // The inner map is computed in its own type.
    let dtype_of = |id: ValueId| net.element_type(id).expect("maps are of types that have code");
    let own = dtype_of(inner.output());
    let all = node.inputs.iter().chain(&inner.inputs).flatten().copied().chain([node.output()]);
    let is_of_one_type = all.map(dtype_of).all(|dtype| dtype == own) && net.stays(inner.output());
    let value = if is_of_one_type { value } else { Expr::cast(own, value) };
    let merged = substitute(outer, &|at| of_outer[at].map_or_else(|| value.clone(), input));
    let mut node = Node {
        kind: Kind::Map(merged),
        inputs,
        outputs: node.outputs.clone(),
        origin: joined(&inner.origin, &node.origin),
    };
    drop_unread(&mut node);
    node
}
