//! Grouping of operations to be fused into loop nests.

use super::{contiguous, is_flat};
use crate::net::{Kind, Net, Node, ValueId};
use crate::rules::MOST_COST;
use crate::scalar::cost;

/// Groups nodes into nests: the nodes of each nest in order, at the index of its last node.
pub(super) fn groups(net: &Net) -> Vec<Option<Vec<usize>>> {
    let (n_uses, producers, users) = (net.n_uses(), net.producers(), net.readers());
    let mut groups: Vec<Option<Vec<usize>>> = vec![None; net.nodes.len()];
    let mut is_taken = vec![false; net.nodes.len()];
    for root in (0..net.nodes.len()).rev() {
        if is_taken[root] || !is_of_nest(net, &net.nodes[root]) {
            continue;
        }
        let mut members = vec![root];
        let mut n_operations = operations_of(&net.nodes[root]);
        is_taken[root] = true;
        // Repeated until nothing changes: a value with several readers can join once all of them have.
        loop {
            let is_free = |at: usize| !is_taken[at] && is_of_nest(net, &net.nodes[at]);
            let is_plain_view = |at: usize| {
                let node = &net.nodes[at];
                let is_plain = |from: ValueId| without_ones(net.shape(from)) == without_ones(net.shape(node.output()));
                matches!(node.kind, Kind::View) && is_plain(node.input(0))
            };
            let is_inside = |id: ValueId| {
                n_uses[id.0] == users[id.0].len() && users[id.0].iter().all(|user| members.contains(user))
            };
            // Values that are read directly, or through views that only add or remove dimensions of size 1.
            let candidate = |id: ValueId| {
                let view = producers[id.0].filter(|&at| is_plain_view(at) && !is_taken[at]);
                let id = view.map_or(id, |view| net.nodes[view].input(0));
                let at = producers[id.0].filter(|at| is_free(*at))?;
                let mut found = FusionCandidate { at, ids: vec![id], views: Vec::new(), users: Vec::new() };
                for &user in &users[id.0] {
                    if members.contains(&user) {
                        found.users.push(user);
                        continue;
                    }
                    let viewed = net.nodes[user].outputs[0];
                    (is_plain_view(user) && is_inside(viewed)).then_some(())?;
                    found.views.push(user);
                    found.ids.push(viewed);
                    found.users.extend(&users[viewed.0]);
                }
                (n_uses[id.0] == users[id.0].len()).then_some(found)
            };
            let read = members.iter().flat_map(|&member| net.nodes[member].inputs.iter().flatten());
            let mut candidates = read.filter_map(|id| candidate(*id));
            let fits = |new: &FusionCandidate| n_operations + operations_of(&net.nodes[new.at]) <= MOST_OPERATIONS;
            let Some(new) = candidates.find(|new| fits(new) && may_join(net, &members, root, new)) else { break };
            drop(candidates);
            n_operations += operations_of(&net.nodes[new.at]);
            for at in new.views.into_iter().chain([new.at]) {
                is_taken[at] = true;
                members.push(at);
            }
        }
        members.sort_unstable();
        groups[root] = Some(members);
    }
    groups
}

pub(super) fn is_of_nest(net: &Net, node: &Node) -> bool {
    match &node.kind {
        Kind::Map(_) | Kind::Transpose(_) | Kind::Pad(..) | Kind::Pick(_) | Kind::Reduce(..) | Kind::Window(..) => true,
        Kind::Gather { .. } | Kind::Pixels { .. } => true,
        Kind::Slice(parts) => contiguous(net, node, parts).is_none(),
        Kind::Concat(axis) => !is_flat(net, node, *axis),
        Kind::View | Kind::Conv(_) | Kind::Product { .. } | Kind::Packed(_) | Kind::Sequence(_) | Kind::Loop(_) => {
            false
        }
        Kind::Call(_) | Kind::Host(_) | Kind::Append(_) => false,
    }
}

/// Maximum number of operations of a nest, which is compiled as one function, and may be one expression.
const MOST_OPERATIONS: usize = 4 * MOST_COST;

/// Counts the operations that a node adds to a nest.
fn operations_of(node: &Node) -> usize {
    match &node.kind {
        Kind::Map(value) => cost(value).max(1),
        _ => 1,
    }
}

/// A shape without dimensions of one element.
fn without_ones(shape: &[i64]) -> Vec<i64> {
    shape.iter().copied().filter(|&n| n != 1).collect()
}

/// Factor by which readers must have more elements than a tensor for it to be computed before them.
const LITTLE: i64 = 8;

/// Node that is read only by nodes of a nest.
struct FusionCandidate {
    at: usize,
    /// Results of the node, and views of them.
    ids: Vec<ValueId>,
    /// Nodes of these views.
    views: Vec<usize>,
    /// Nodes that read the result or a view of it.
    users: Vec<usize>,
}

/// Whether a node can be computed within the nest of its readers.
fn may_join(
    net: &Net,
    members: &[usize],
    root: usize,
    FusionCandidate { at, ids, users, .. }: &FusionCandidate,
) -> bool {
    let node = &net.nodes[*at];
    let kinds = || members.iter().map(|&member| &net.nodes[member].kind);
    let has_window = kinds().any(|kind| matches!(kind, Kind::Window(..)));
    let has_reduce = kinds().any(|kind| matches!(kind, Kind::Reduce(..)));
    let count = |id: ValueId| net.value(id).n_elements();
    let n_own = count(node.output());
    let overlaps = |user: &usize| match &net.nodes[*user].kind {
        Kind::Window(_, windows) => windows.kernel.iter().zip(&windows.strides).any(|(k, s)| k > s),
        _ => false,
    };
    let n_root = count(net.nodes[root].output());
    // A gather reads its table from memory.
    let gathers_from = |user: &usize| {
        let user = &net.nodes[*user];
        matches!(user.kind, Kind::Gather { .. }) && user.inputs[0].is_some_and(|id| ids.contains(&id))
    };
    let is_little = n_own * LITTLE <= n_root && !has_window;
    // The kernel of pixels only moves them.
    let is_of_pixels = matches!(net.nodes[root].kind, Kind::Pixels { .. });
    if is_of_pixels || users.iter().any(gathers_from) {
        return false;
    }
    match &node.kind {
        Kind::Gather { .. } => users.len() == 1 && !has_window && n_own >= n_root,
        Kind::Map(value) => {
            // A value with one element per row is computed once per row.
            let is_of_row = is_of_rows(net.shape(node.output()), net.shape(net.nodes[root].output()));
            let is_once = is_of_row || is_little;
            let is_repeated = users.iter().any(overlaps) || n_own < n_root && !has_reduce && !is_once;
            !is_repeated || cost(value) <= 2
        }
        Kind::Transpose(_) | Kind::Slice(_) | Kind::Pick(_) => {
            !has_reduce && !has_window && users.len() == 1 && n_own >= n_root
        }
        Kind::Pad(..) => !has_reduce && !has_window && users.len() == 1 && n_own == n_root,
        Kind::Reduce(_, axes) => {
            let from = net.shape(node.input(0));
            let out = net.shape(net.nodes[root].output());
            let is_last = axes.iter().min().is_some_and(|&first| {
                let begins = match out.len() == from.len() {
                    true => out[..first] == from[..first],
                    false => without_ones(out).starts_with(&without_ones(&from[..first])),
                };
                (first..from.len()).all(|d| axes.contains(&d) || from[d] == 1) && begins
            });
            let is_same = kinds().all(|kind| match kind {
                Kind::Reduce(_, others) => others == axes,
                Kind::Map(_) | Kind::View => true,
                _ => false,
            });
            let is_plain =
                |kind: &Kind| matches!(kind, Kind::Reduce(..) | Kind::Map(_) | Kind::Transpose(_) | Kind::View);
            // No element is computed twice, as the node is computed before its readers.
            is_last && is_same && !has_window || n_own <= n_root && !has_window && kinds().all(is_plain)
        }
        Kind::Window(..) => {
            let is_map = |user: &usize| matches!(net.nodes[*user].kind, Kind::Map(_));
            !has_window && !has_reduce && users.iter().all(is_map) && n_own == n_root
        }
        _ => false,
    }
}

/// Whether a tensor has one element for each row of another: their first dimensions are the same, and it has
/// no others.
fn is_of_rows(shape: &[i64], of: &[i64]) -> bool {
    if shape.len() != of.len() {
        return without_ones(of).starts_with(&without_ones(shape));
    }
    let n_same = shape.iter().zip(of).take_while(|(a, b)| a == b).count();
    shape[n_same..].iter().all(|&n| n == 1)
}
