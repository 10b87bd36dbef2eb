//! Rules for products with a transposed operand B, and for several products of one tensor.

use tilewright_graph::DType;
use tilewright_ir::Expr;
use tilewright_ir::expr::BinaryOp;

use super::{by_channel, joined, only_user};
use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{add, input, mul, number};

/// Makes products read a transposed operand B in place.
pub(super) fn turn_products(net: &mut Net) -> usize {
    let mut n_turned = 0;
    let (n_uses, producers) = (net.n_uses(), net.producers());
    for at in 0..net.nodes.len() {
        let Kind::Product { turned, heads: None } = net.nodes[at].kind else { continue };
        let b = net.nodes[at].input(1);
        let Some(before) = producers[b.0].filter(|_| n_uses[b.0] == 1) else { continue };
        let Kind::Transpose(order) = &net.nodes[before].kind else { continue };
        let rank = order.len();
        let swaps = (0..rank - 2).all(|d| order[d] == d) && order[rank - 2..] == [rank - 1, rank - 2];
        if swaps {
            net.nodes[at].inputs[1] = Some(net.nodes[before].input(0));
            net.nodes[at].kind = Kind::Product { turned: !turned, heads: None };
            n_turned += 1;
        }
    }
    n_turned
}

/// Moves a factor of operand B to operand A if that has fewer elements, as exporters scale both the queries
/// and all keys of a cache.
pub(super) fn scale_fewer(net: &mut Net) -> usize {
    let mut n_moved = 0;
    let (n_uses, producers) = (net.n_uses(), net.producers());
    for at in 0..net.nodes.len() {
        let Kind::Product { heads: None, .. } = net.nodes[at].kind else { continue };
        let (a, mut b) = (net.nodes[at].input(0), net.nodes[at].input(1));
        if net.value(a).n_elements() >= net.value(b).n_elements() || net.value(a).dtype != net.value(b).dtype {
            continue;
        }
        let found = loop {
            let Some(before) = producers[b.0].filter(|_| n_uses[b.0] == 1) else { break None };
            match net.nodes[before].kind {
                Kind::View | Kind::Transpose(_) => b = net.nodes[before].input(0),
                _ => break scaled(net, before).map(|(x, factor)| (before, x, factor)),
            }
        };
        let Some((before, x, factor)) = found else { continue };
        (net.nodes[before].kind, net.nodes[before].inputs) = (Kind::View, vec![Some(x)]);
        let (name, origin) = (net.value(a).name.clone(), net.nodes[at].origin.clone());
        let (dtype, shape) = (net.value(a).dtype, net.shape(a).to_vec());
        let scaled = net.add_value(&format!("{name}.scaled"), dtype, &shape);
        let kind = Kind::Map(mul(input(0), number(factor)));
        net.nodes.push(Node { kind, inputs: vec![Some(a)], outputs: vec![scaled], origin });
        net.nodes[at].inputs[0] = Some(scaled);
        n_moved += 1;
    }
    net.sort();
    n_moved
}

/// Value that a node multiplies by a number, and the number.
fn scaled(net: &Net, at: usize) -> Option<(ValueId, f64)> {
    let node = &net.nodes[at];
    let Kind::Map(Expr::Binary(BinaryOp::Mul, x, y)) = &node.kind else { return None };
    let factor = |e: &Expr| match e {
        Expr::Const(x) => Some(*x),
        Expr::Load(slot, _) => net.scalar(node.inputs[slot.0 as usize]?),
        _ => None,
    };
    let (x, factor) = factor(y).map(|factor| (x, factor)).or_else(|| Some((y, factor(x)?)))?;
    let Expr::Load(slot, _) = &**x else { return None };
    let x = node.inputs[slot.0 as usize]?;
    (net.shape(x) == net.shape(node.output())).then_some((x, factor))
}

/// Makes products that share operand B, which is repeated for them, the rows of one product: queries that
/// share keys, of one token or behind a cache.
pub(super) fn share_operands(net: &mut Net) -> usize {
    let mut n_shared = 0;
    let (n_uses, producers) = (net.n_uses(), net.producers());
    for at in 0..net.nodes.len() {
        let Kind::Product { turned, heads: None } = net.nodes[at].kind else { continue };
        let (a, b, to) = (net.nodes[at].input(0), net.nodes[at].input(1), net.nodes[at].output());
        let (&[n_products, m, k], &[_, _, n]) = (net.shape(a), net.shape(to)) else { continue };
        // Rows of an open number of tokens are not contiguous. With a cache, it is its length that is open.
        if m > 1 && net.states.is_empty() {
            continue;
        }
        let Some((source, is_swapped)) = repeated(net, &producers, &n_uses, b) else { continue };
        let &[.., rows, columns] = net.shape(source) else { continue };
        let n_own = net.value(source).n_elements() / (rows * columns).max(1);
        if n_own == 0 || n_products % n_own != 0 {
            continue;
        }
        let origin = net.nodes[at].origin.clone();
        let mut viewed = |from: ValueId, shape: &[i64]| {
            let (name, dtype) = (net.value(from).name.clone(), net.value(from).dtype);
            let to = net.add_value(&name, dtype, shape);
            net.nodes.push(Node {
                kind: Kind::View,
                inputs: vec![Some(from)],
                outputs: vec![to],
                origin: origin.clone(),
            });
            to
        };
        let m_all = n_products / n_own * m;
        let together = viewed(a, &[n_own, m_all, k]);
        let own = viewed(source, &[n_own, rows, columns]);
        let (name, dtype) = (net.value(to).name.clone(), net.value(to).dtype);
        let result = net.add_value(&name, dtype, &[n_own, m_all, n]);
        net.nodes.push(Node { kind: Kind::View, inputs: vec![Some(result)], outputs: vec![to], origin });
        net.nodes[at].kind = Kind::Product { turned: turned != is_swapped, heads: None };
        net.nodes[at].inputs = vec![Some(together), Some(own)];
        net.nodes[at].outputs = vec![result];
        n_shared += 1;
    }
    net.sort();
    n_shared
}

/// Matrices of which each is repeated several times, one after the other, to make up a value; and whether
/// they are transposed in it.
fn repeated(net: &Net, producers: &[Option<usize>], n_uses: &[usize], mut id: ValueId) -> Option<(ValueId, bool)> {
    let mut is_swapped = false;
    loop {
        let node = producers[id.0].filter(|_| n_uses[id.0] == 1).map(|at| &net.nodes[at])?;
        let from = node.inputs.first().copied().flatten()?;
        let (own, all) = (net.shape(from), net.shape(id));
        let (rank, inner) = (all.len(), all.len().checked_sub(2)?);
        match &node.kind {
            Kind::View if own.ends_with(&all[inner..]) => {}
            Kind::Transpose(order) => {
                let swaps = (0..inner).all(|d| order[d] == d) && order[inner..] == [rank - 1, inner];
                swaps.then_some(())?;
                is_swapped = !is_swapped;
            }
            Kind::Map(value) if *value == input(0) && own.len() == rank && rank > 2 => {
                let is_alike = |d: usize| own[d] == all[d] || d + 3 == rank && own[d] == 1;
                return (own != all && (0..rank).all(is_alike)).then_some((from, is_swapped));
            }
            _ => return None,
        }
        id = from;
    }
}

/// Whether a value is read only by batched products, possibly through moves or slices.
fn is_for_heads(net: &Net, users: &[Vec<usize>], id: ValueId) -> bool {
    let mut own = users[id.0].iter().map(|&at| &net.nodes[at]).peekable();
    let is_read = own.peek().is_some() && !net.outputs.contains(&id);
    is_read
        && own.all(|node| match node.kind {
            Kind::View | Kind::Transpose(_) | Kind::Slice(_) => is_for_heads(net, users, node.output()),
            Kind::Product { heads: None, .. } => net.shape(node.output()).len() == 3,
            _ => false,
        })
}

/// Whether a value has no map as its only reader, which could become the product's epilogue.
fn is_finished(net: &Net, users: &[Vec<usize>], id: ValueId) -> bool {
    let is_read = !users[id.0].is_empty() && !net.outputs.contains(&id);
    is_read
        && match users[id.0][..] {
            [user] => match net.nodes[user].kind {
                Kind::View => is_finished(net, users, net.nodes[user].output()),
                Kind::Map(_) => false,
                _ => true,
            },
            _ => true,
        }
}

/// Merges products of one tensor with several constant matrices into one product with the concatenated
/// matrices, of which each result is a slice. The products are either all for heads, or have a single row.
pub(super) fn join_products(net: &mut Net) -> usize {
    let (mut at, mut users, mut producers) = (0, net.users(), net.producers());
    let mut n_joined = 0;
    while at < net.nodes.len() {
        if let Some(parts) = joinable(net, &users, &producers, at) {
            join(net, &parts);
            n_joined += 1;
            (users, producers) = (net.users(), net.producers());
        }
        at += 1;
    }
    n_joined
}

/// Product that may be merged with others.
struct JoinableProduct {
    /// Index of the product's node.
    at: usize,
    /// Weights, and the bias of each column.
    weights: ValueId,
    bias: Vec<f64>,
    /// Result with the bias.
    to: ValueId,
}

fn part(net: &Net, users: &[Vec<usize>], at: usize) -> Option<JoinableProduct> {
    let node = &net.nodes[at];
    let Kind::Product { heads: None, .. } = node.kind else { return None };
    let (x, out) = (node.output(), net.shape(node.output()).to_vec());
    let weights = node.input(1);
    net.value(weights).constant.as_ref().filter(|tensor| out.len() == 2 && tensor.dtype() == DType::F32)?;
    let n = out[1] as usize;
    let user = only_user(net, users, x)?;
    let next = &net.nodes[user];
    let (bias, to) = match &next.kind {
        Kind::Map(Expr::Binary(BinaryOp::Add, a, b)) if net.shape(next.output()) == out => {
            let is_x = |e: &Expr| matches!(e, Expr::Load(slot, _) if next.inputs[slot.0 as usize] == Some(x));
            let other = if is_x(a) { b } else { a };
            (is_x(a) != is_x(b)).then_some(())?;
            (by_channel(net, next, other, &out, 1)?, next.output())
        }
        _ => (vec![0.0; n], x),
    };
    // Slices of a single row are contiguous. A language model uses the same weights for several rows.
    let may_be_rows = out[0] == 1 || !net.states.is_empty();
    let may_be_part = is_for_heads(net, users, to) || may_be_rows && is_finished(net, users, to);
    may_be_part.then_some(JoinableProduct { at, weights, bias, to })
}

/// Products that may be merged with a given one, which is the first of them.
fn joinable(
    net: &Net,
    users: &[Vec<usize>],
    producers: &[Option<usize>],
    first: usize,
) -> Option<Vec<JoinableProduct>> {
    let one = part(net, users, first)?;
    let (kind, a) = (&net.nodes[first].kind, net.nodes[first].input(0));
    let viewed = |id: ValueId| match producers[id.0].map(|at| &net.nodes[at]) {
        Some(node) if matches!(node.kind, Kind::View) => node.input(0),
        _ => id,
    };
    let is_alike = |at: &usize| {
        let node = &net.nodes[*at];
        let turned = |kind: &Kind| matches!(kind, Kind::Product { turned: true, .. });
        matches!(node.kind, Kind::Product { .. })
            && viewed(node.input(0)) == viewed(a)
            && net.shape(node.input(0)) == net.shape(a)
            && turned(&node.kind) == turned(kind)
    };
    let others = (first + 1..net.nodes.len()).filter(is_alike).filter_map(|at| part(net, users, at));
    let all: Vec<JoinableProduct> = std::iter::once(one).chain(others).collect();
    (all.len() > 1).then_some(all)
}

fn join(net: &mut Net, parts: &[JoinableProduct]) {
    let first = net.nodes[parts[0].at].clone();
    let Kind::Product { turned, .. } = first.kind else { unreachable!("it is a product") };
    let a = first.input(0);
    let (m, k) = (net.shape(a)[0], net.shape(a)[1]);
    let widths: Vec<i64> = parts.iter().map(|part| net.shape(part.to)[1]).collect();
    let n: i64 = widths.iter().sum();
    let matrices: Vec<Vec<f32>> = parts.iter().map(|part| net.numbers(part.weights).expect("it is known")).collect();
    let numbers: Vec<f32> = match turned {
        true => matrices.concat(),
        false => {
            let row = |at: usize| {
                let of =
                    |(matrix, width): (&Vec<f32>, &i64)| matrix[at * *width as usize..][..*width as usize].to_vec();
                matrices.iter().zip(&widths).flat_map(of).collect::<Vec<f32>>()
            };
            (0..k as usize).flat_map(row).collect()
        }
    };
    let shape = if turned { [n, k] } else { [k, n] };
    let origin = parts.iter().map(|part| net.nodes[part.at].origin.clone()).reduce(|a, b| joined(&a, &b));
    let origin = origin.unwrap_or_default();
    let weights = net.add_constant(&format!("{origin}.weights"), &shape, &numbers);
    let bias: Vec<f32> = parts.iter().flat_map(|part| part.bias.iter().map(|&x| x as f32)).collect();
    let dtype = net.value(first.output()).dtype;
    let sum = net.add_value(&format!("{origin}.sum"), dtype, &[m, n]);
    let node = |kind: Kind, inputs: &[ValueId], output: ValueId| Node {
        kind,
        inputs: inputs.iter().map(|&id| Some(id)).collect(),
        outputs: vec![output],
        origin: origin.clone(),
    };
    let mut new = Vec::new();
    if bias.iter().all(|x| *x == 0.0) {
        new.push(node(first.kind.clone(), &[a, weights], sum));
    } else {
        let bias = net.add_constant(&format!("{origin}.bias"), &[n], &bias);
        let product = net.add_value(&format!("{origin}.product"), dtype, &[m, n]);
        new.push(node(first.kind.clone(), &[a, weights], product));
        new.push(node(Kind::Map(add(input(0), input(1))), &[product, bias], sum));
    }
    let mut before = 0;
    for (part, width) in parts.iter().zip(&widths) {
        new.push(node(Kind::Slice(vec![(0, 1), (before, 1)]), &[sum], part.to));
        before += width;
    }
    // The nodes that computed the parts are removed.
    let outputs: Vec<ValueId> = parts.iter().map(|part| part.to).collect();
    let place = parts[0].at;
    let of_parts = |at: usize, node: &Node| parts.iter().any(|p| p.at == at) || outputs.contains(&node.output());
    let nodes = std::mem::take(&mut net.nodes);
    for (at, old) in nodes.into_iter().enumerate() {
        if at == place {
            net.nodes.append(&mut new);
        }
        if !of_parts(at, &old) {
            net.nodes.push(old);
        }
    }
    net.sort();
}
