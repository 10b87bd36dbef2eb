//! Rules that remove identities: maps and slices that return their input, concatenations that restore a
//! tensor.

use tilewright_ir::Expr;

use super::strided::{Strided, strided, without_units};
use super::{Links, replace_each};
use crate::net::{Kind, Net, Node, ValueId};

/// Turns maps that return their input unchanged into views.
pub(super) fn drop_identities(net: &mut Net) -> usize {
    let mut n_dropped = 0;
    for at in 0..net.nodes.len() {
        let node = &net.nodes[at];
        let from = match &node.kind {
            Kind::Slice(parts) if parts.iter().all(|part| *part == (0, 1)) => node.input(0),
            Kind::Map(Expr::Load(slot, _)) => node.input(slot.0 as usize),
            _ => continue,
        };
        let (a, b) = (net.value(from), net.value(node.output()));
        if a.n_elements() == b.n_elements() && a.dtype == b.dtype {
            net.nodes[at].kind = Kind::View;
            net.nodes[at].inputs = vec![Some(from)];
            n_dropped += 1;
        }
    }
    n_dropped
}

/// Replaces concatenations of adjacent slices of a tensor by one slice.
pub(super) fn join_parts(net: &mut Net) -> usize {
    replace_each(net, joined_part)
}

/// Nodes that slice the result of a concatenation from one tensor.
fn joined_part(net: &mut Net, links: &Links, node: &Node) -> Option<Vec<Node>> {
    let Kind::Concat(axis) = node.kind else { return None };
    let to = node.output();
    net.shape(to)[..axis].iter().all(|&n| n == 1).then_some(())?;
    // The tensor, and the range in it of the parts so far.
    let mut found: Option<(ValueId, i64, i64)> = None;
    for id in node.inputs.iter().flatten() {
        let Strided { source, offset, dims } = strided(net, &links.producers, *id, None);
        let n = net.value(*id).n_elements();
        let (of, first, end) = found.unwrap_or((source, offset, offset));
        let is_next = source != *id && source == of && offset == end && without_units(&dims) == [(n, 1)];
        found = is_next.then_some((source, first, end + n));
        found?;
    }
    let (source, first, end) = found?;
    let step = |kind: Kind, from: ValueId, to: ValueId| Node {
        kind,
        inputs: vec![Some(from)],
        outputs: vec![to],
        origin: node.origin.clone(),
    };
    // Whole rows keep their dimensions, of which one may be open.
    if let ([_, rows @ ..], [_, of_source @ ..]) = (net.shape(to), net.shape(source)) {
        let n: i64 = rows.iter().product();
        if axis == 0 && rows == of_source && n > 0 && first % n == 0 {
            let parts = std::iter::once((first / n, 1)).chain(rows.iter().map(|_| (0, 1))).collect();
            return Some(vec![step(Kind::Slice(parts), source, to)]);
        }
    }
    let (name, dtype) = (net.value(to).name.clone(), net.value(to).dtype);
    let flat = net.add_value(&name, dtype, &[net.value(source).n_elements()]);
    let part = net.add_value(&name, dtype, &[end - first]);
    let cut = step(Kind::Slice(vec![(first, 1)]), flat, part);
    Some(vec![step(Kind::View, source, flat), cut, step(Kind::View, part, to)])
}
