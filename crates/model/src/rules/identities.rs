//! Maps and slices that give their input as it is.

use tilewright_ir::Expr;

use crate::net::{Kind, Net};

/// A map that gives its input as it is becomes a view.
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
