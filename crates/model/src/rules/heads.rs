//! Rules for batched products that read and write attention heads in place, without transposes.

use tilewright_ir::op::Heads;

use super::only_user;
use super::strided::{Strided, strided, without_units};
use crate::net::{AsHeads, Kind, Net, Node, ValueId};

/// Operand of a batch of products, read in place from another tensor.
struct InPlace {
    /// Tensor that the operand is a part of, and its shape as the product reads it.
    source: ValueId,
    shape: Vec<i64>,
    heads: Heads,
    /// Whether the last two dimensions are stored transposed.
    turned: bool,
    /// Index of the operand among equal parts of the tensor, and the number of parts.
    part: (i64, i64),
}

/// Layout of an operand of a batch of products in the tensor that it is transposed from, if a product can
/// read it there: with the last two dimensions in order or, if `may_turn`, transposed.
fn in_place(net: &Net, producers: &[Option<usize>], id: ValueId, may_turn: bool) -> Option<InPlace> {
    let Strided { source, offset, dims } = strided(net, producers, id, None);
    let n_all = net.value(source).n_elements();
    let &[(b, of_b), first, second] = &dims[..] else { return None };
    if source == id || b == 1 || net.element_type(source).is_none() {
        return None;
    }
    [(first, second, false), (second, first, true)].into_iter().filter(|way| may_turn || !way.2).find_map(
        |((rows, of_row), (columns, of_column), turned)| {
            if columns > 1 && of_column != 1 {
                return None;
            }
            let found = |shape: Vec<i64>, heads: Heads, part: (i64, i64)| {
                // Contiguous operands need no layout.
                (turned || heads != Heads::default()).then_some(InPlace { source, shape, heads, turned, part })
            };
            let is_outside = of_b == rows * columns && (of_row == columns || rows == 1);
            if is_outside && offset % of_b == 0 && n_all % of_b == 0 {
                let (before, all) = (offset / of_b, n_all / of_b);
                let heads = Heads { beside: false, before, after: all - before - b };
                return found(vec![all, rows, columns], heads, (0, 1));
            }
            // Rows of one sequence, or of several contiguous ones.
            let n_part = rows * of_row;
            let is_beside = of_b == columns && of_row % columns == 0 && n_part > 0 && n_all % n_part == 0;
            let (part, offset) = (offset / n_part.max(1), offset % n_part.max(1));
            let (before, all) = (offset / columns, of_row / columns);
            if !is_beside || offset % columns != 0 || before + b > all {
                return None;
            }
            let heads = Heads { beside: true, before, after: all - before - b };
            found(vec![rows, all, columns], heads, (part, n_all / n_part))
        },
    )
}

/// Makes batches of products read their operands from the tensors that these are transposed from.
pub(super) fn read_heads(net: &mut Net) -> usize {
    let mut n_changed = 0;
    let producers = net.producers();
    for at in 0..net.nodes.len() {
        let Kind::Product { mut turned, heads } = net.nodes[at].kind else { continue };
        let out = net.shape(net.nodes[at].output()).to_vec();
        if out.len() != 3 || heads.is_some_and(|heads| heads.of_a != Heads::default() || heads.of_b != Heads::default())
        {
            continue;
        }
        let beside = heads.is_some_and(|heads| heads.beside);
        let b = heads.map_or(out[0], |heads| heads.b);
        let inputs = [0, 1].map(|slot| net.nodes[at].input(slot));
        let of_a = in_place(net, &producers, inputs[0], false);
        let of_b = in_place(net, &producers, inputs[1], true);
        if of_a.is_none() && of_b.is_none() {
            continue;
        }
        turned ^= of_b.as_ref().is_some_and(|of_b| of_b.turned);
        let mut new = [Heads::default(); 2];
        for (slot, found) in [of_a, of_b].into_iter().enumerate() {
            let Some(InPlace { source, shape, heads, part, .. }) = found else { continue };
            new[slot] = heads;
            let source = part_of(net, source, part);
            let view = view(net, source, &shape);
            net.nodes[at].inputs[slot] = Some(view);
        }
        let is_plain = !beside && new == [Heads::default(); 2];
        let heads = (!is_plain).then_some(AsHeads { b, of_a: new[0], of_b: new[1], beside });
        net.nodes[at].kind = Kind::Product { turned, heads };
        n_changed += 1;
    }
    net.sort();
    n_changed
}

/// Reshapes a value, with a view appended to the nodes.
fn view(net: &mut Net, from: ValueId, shape: &[i64]) -> ValueId {
    if net.shape(from) == shape {
        return from;
    }
    let (name, dtype) = (net.value(from).name.clone(), net.value(from).dtype);
    let to = net.add_value(&name, dtype, shape);
    net.nodes.push(Node { kind: Kind::View, inputs: vec![Some(from)], outputs: vec![to], origin: name });
    to
}

/// Slices one of `n_parts` equal parts from a value, with a node appended to the nodes.
fn part_of(net: &mut Net, from: ValueId, (part, n_parts): (i64, i64)) -> ValueId {
    if n_parts == 1 {
        return from;
    }
    let n = net.value(from).n_elements() / n_parts;
    let parts = view(net, from, &[n_parts, n]);
    let (name, dtype) = (net.value(from).name.clone(), net.value(from).dtype);
    let to = net.add_value(&name, dtype, &[1, n]);
    let kind = Kind::Slice(vec![(part, 1), (0, 1)]);
    net.nodes.push(Node { kind, inputs: vec![Some(parts)], outputs: vec![to], origin: name });
    to
}

/// Makes batches of products write their results where these are transposed to.
pub(super) fn write_heads(net: &mut Net) -> usize {
    let mut n_changed = 0;
    let (users, producers) = (net.users(), net.producers());
    for at in 0..net.nodes.len() {
        let Kind::Product { turned, heads } = net.nodes[at].kind else { continue };
        let x = net.nodes[at].output();
        let &[b, m, n] = net.shape(x) else { continue };
        if b == 1 || m == 1 || heads.is_some_and(|heads| heads.beside) {
            continue;
        }
        let Some(mover) = moved_beside(net, &users, &producers, x, [b, m, n]) else { continue };
        let (name, dtype) = (net.value(x).name.clone(), net.value(x).dtype);
        let beside = net.add_value(&name, dtype, &[m, b, n]);
        net.nodes[at].outputs = vec![beside];
        let none = AsHeads { b, of_a: Heads::default(), of_b: Heads::default(), beside: true };
        net.nodes[at].kind = Kind::Product { turned, heads: Some(AsHeads { beside: true, ..heads.unwrap_or(none) }) };
        net.nodes[mover].kind = Kind::View;
        net.nodes[mover].inputs = vec![Some(beside)];
        n_changed += 1;
    }
    n_changed
}

/// Node that transposes results `[b, m, n]`, as their only reader, to rows with all products side by side.
fn moved_beside(
    net: &Net,
    users: &[Vec<usize>],
    producers: &[Option<usize>],
    x: ValueId,
    [b, m, n]: [i64; 3],
) -> Option<usize> {
    let mut id = x;
    loop {
        let user = only_user(net, users, id)?;
        let node = &net.nodes[user];
        id = node.output();
        match node.kind {
            Kind::View => {}
            Kind::Transpose(_) => {
                let Strided { source, dims, .. } = strided(net, producers, id, Some(x));
                let wanted = without_units(&[(m, n), (b, m * n), (n, 1)]);
                return (source == x && without_units(&dims) == wanted).then_some(user);
            }
            _ => return None,
        }
    }
}
