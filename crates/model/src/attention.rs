//! Products around attention: queries, keys and values as one product, heads read and written where they lie.

use tilewright_graph::DType;
use tilewright_ir::Expr;
use tilewright_ir::expr::BinaryOp;
use tilewright_ir::op::Heads;

use crate::net::{AsHeads, Kind, Net, Node, ValueId};
use crate::scalar::{self, add, input};
use crate::simplify::{Links, by_channel, comes_from_anchor, drop_unread, joined};

/// Has products of a batch read and write where what they compute with lies.
pub fn place_heads(net: &mut Net) {
    read_heads(net);
    write_heads(net);
}

/// A tensor as a part of another one's memory: where it begins, and its dimensions with the distances of
/// their elements.
struct Strided {
    source: ValueId,
    offset: i64,
    dims: Vec<(i64, i64)>,
}

/// Strides of a value in the one that it is a view of.
fn strided(net: &Net, producers: &[Option<usize>], id: ValueId, stop: Option<ValueId>) -> Strided {
    let whole = || {
        let mut stride = 1;
        let mut dims: Vec<(i64, i64)> = Vec::new();
        for &n in net.shape(id).iter().rev() {
            dims.push((n, stride));
            stride *= n;
        }
        dims.reverse();
        Strided { source: id, offset: 0, dims }
    };
    let node = match producers[id.0].map(|at| &net.nodes[at]) {
        Some(node) if stop != Some(id) => node,
        _ => return whole(),
    };
    let moved = match &node.kind {
        Kind::View => {
            let from = strided(net, producers, node.input(0), stop);
            reshaped(&from.dims, net.shape(id)).map(|dims| Strided { dims, ..from })
        }
        Kind::Transpose(order) => {
            let from = strided(net, producers, node.input(0), stop);
            let dims = order.iter().map(|&d| from.dims[d]).collect();
            Some(Strided { dims, ..from })
        }
        Kind::Slice(parts) => {
            let from = strided(net, producers, node.input(0), stop);
            let offset = from.dims.iter().zip(parts).map(|((_, stride), (first, _))| first * stride).sum::<i64>();
            let all = net.shape(id).iter().zip(&from.dims).zip(parts);
            let dims = all.map(|((n, dim), part)| (*n, dim.1 * part.1)).collect();
            Some(Strided { offset: from.offset + offset, dims, ..from })
        }
        _ => None,
    };
    moved.unwrap_or_else(whole)
}

/// The dimensions in another shape, where no element has to move.
fn reshaped(dims: &[(i64, i64)], shape: &[i64]) -> Option<Vec<(i64, i64)>> {
    let joined = without_units(dims);
    let mut out = Vec::with_capacity(shape.len());
    let mut rest = joined.into_iter();
    let (mut n, mut stride) = rest.next().unwrap_or((1, 1));
    for &wanted in shape {
        if wanted == 1 {
            out.push((1, 0));
            continue;
        }
        if n == 1 {
            (n, stride) = rest.next()?;
        }
        if n % wanted != 0 {
            return None;
        }
        n /= wanted;
        out.push((wanted, n * stride));
    }
    (n == 1 && rest.next().is_none()).then_some(out)
}

/// Dimensions of more than one element, those joined that are walked as one.
fn without_units(dims: &[(i64, i64)]) -> Vec<(i64, i64)> {
    let mut joined: Vec<(i64, i64)> = Vec::new();
    for &(n, stride) in dims.iter().filter(|(n, _)| *n != 1) {
        match joined.last_mut() {
            Some((outer, outer_stride)) if *outer_stride == n * stride => {
                (*outer, *outer_stride) = (*outer * n, stride)
            }
            _ => joined.push((n, stride)),
        }
    }
    joined
}

fn is_move(kind: &Kind) -> bool {
    matches!(kind, Kind::View | Kind::Transpose(_))
}

/// A map of what is only moved becomes a move of the map, so that the map meets the product behind the move.
pub fn sink_moves(net: &mut Net) -> usize {
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

/// Facts of the values computed so far, in a walk over nodes in their order.
struct Moves {
    links: Links,
    is_of_anchor: Vec<bool>,
    /// Whether a value is of an anchor, by way of moves perhaps.
    comes_moved: Vec<bool>,
    /// Whether what is moved comes from an anchor, with its dimensions in another order.
    is_turned: Vec<bool>,
}

impl Moves {
    /// Finds the last of the moves ahead of a map of one tensor, where a product or a convolution gives
    /// what is moved. Calls go through the nodes in their order.
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
        // Views alone are seen to by themselves.
        links.producers[x.0].filter(|_| links.n_uses[x.0] == 1 && is_turned[x.0] && is_same)
    }
}

/// The node that alone reads a value.
fn only_user(net: &Net, users: &[Vec<usize>], id: ValueId) -> Option<usize> {
    let &[user] = &users[id.0][..] else { return None };
    (!net.outputs.contains(&id)).then_some(user)
}

/// Whether a value goes into products of batches and nowhere else, moved or in parts perhaps.
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

/// Most sequences whose products are computed apart.
const MOST_SEQUENCES: i64 = 16;

/// Products of the heads of several sequences, which lie one behind the other and each with its heads side by
/// side, become products of one sequence each, which can read and write heads where they lie.
pub fn split_sequences(net: &mut Net) {
    replace_each(net, split_product);
}

/// Puts others in the place of each node that `of` has some for; the nodes before it are then those of the
/// net.
fn replace_each(net: &mut Net, of: fn(&mut Net, &Links, &Node) -> Option<Vec<Node>>) {
    let mut links = Links::of(net);
    for node in std::mem::take(&mut net.nodes) {
        let new = match of(net, &links, &node) {
            None => vec![node],
            Some(new) => {
                links.leave(&node);
                new.iter().for_each(|node| links.enter(node));
                new
            }
        };
        for node in new {
            links.place(&node, net.nodes.len());
            net.nodes.push(node);
        }
    }
}

/// Replaces one product, and returns the nodes that stand in its place.
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

/// Number of sequences in a batch of factors whose heads are moved from where they lie side by side.
fn n_sequences(net: &Net, producers: &[Option<usize>], id: ValueId) -> Option<i64> {
    let view = producers[id.0].map(|at| &net.nodes[at]).filter(|node| matches!(node.kind, Kind::View))?;
    let from = view.input(0);
    let &[sequences, heads, _, _] = net.shape(from) else { return None };
    let Strided { source, dims, .. } = strided(net, producers, from, None);
    let is_apart = source != from && dims[0].1 != heads * dims[1].1;
    let fits = net.shape(id)[0] == sequences * heads && heads > 1 && (2..=MOST_SEQUENCES).contains(&sequences);
    (is_apart && fits).then_some(sequences)
}

/// Replaces the transposition of concatenated products, each of one sequence, by a transposition of each.
pub fn turn_sequences(net: &mut Net) {
    replace_each(net, turn_parts);
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

/// Products of one tensor with several known matrices, for heads all of them, become one product with the
/// matrices next to each other, of which each is a part.
pub fn join_products(net: &mut Net) {
    let (mut at, mut users, mut producers) = (0, net.users(), net.producers());
    while at < net.nodes.len() {
        if let Some(parts) = joinable(net, &users, &producers, at) {
            join(net, &parts);
            (users, producers) = (net.users(), net.producers());
        }
        at += 1;
    }
}

/// A product that may be joined with others.
struct Part {
    /// Index of the product's node.
    at: usize,
    /// Weights, and the bias of each column.
    weights: ValueId,
    bias: Vec<f64>,
    /// Result with the bias.
    to: ValueId,
}

fn part(net: &Net, users: &[Vec<usize>], at: usize) -> Option<Part> {
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
    is_for_heads(net, users, to).then_some(Part { at, weights, bias, to })
}

/// The products that may be joined with one, itself the first of them.
fn joinable(net: &Net, users: &[Vec<usize>], producers: &[Option<usize>], first: usize) -> Option<Vec<Part>> {
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
    let all: Vec<Part> = std::iter::once(one).chain(others).collect();
    (all.len() > 1).then_some(all)
}

fn join(net: &mut Net, parts: &[Part]) {
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
    let bias = net.add_constant(&format!("{origin}.bias"), &[n], &bias);
    let dtype = net.value(first.output()).dtype;
    let product = net.add_value(&format!("{origin}.product"), dtype, &[m, n]);
    let sum = net.add_value(&format!("{origin}.sum"), dtype, &[m, n]);
    let node = |kind: Kind, inputs: &[ValueId], output: ValueId| Node {
        kind,
        inputs: inputs.iter().map(|&id| Some(id)).collect(),
        outputs: vec![output],
        origin: origin.clone(),
    };
    let mut new = vec![
        node(first.kind.clone(), &[a, weights], product),
        node(Kind::Map(add(input(0), input(1))), &[product, bias], sum),
    ];
    let mut before = 0;
    for (part, width) in parts.iter().zip(&widths) {
        new.push(node(Kind::Slice(vec![(0, 1), (before, 1)]), &[sum], part.to));
        before += width;
    }
    // What computed the parts before does so no more.
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

/// A factor of a batch of products where it lies.
struct InPlace {
    /// The tensor that it is a part of, and the shape that the product has of that.
    source: ValueId,
    shape: Vec<i64>,
    heads: Heads,
    /// The last two dimensions are stored transposed.
    turned: bool,
    /// Index of the equal part of the tensor that the factor is, and the number of parts.
    part: (i64, i64),
}

/// Layout of a factor of a batch of products in the tensor that it is moved from, where a product can read it
/// there: with its last two dimensions as they are, or the other way round where that may be.
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
                // As it is, there is nothing to say.
                (turned || heads != Heads::default()).then_some(InPlace { source, shape, heads, turned, part })
            };
            let is_outside = of_b == rows * columns && (of_row == columns || rows == 1);
            if is_outside && offset % of_b == 0 && n_all % of_b == 0 {
                let (before, all) = (offset / of_b, n_all / of_b);
                let heads = Heads { beside: false, before, after: all - before - b };
                return found(vec![all, rows, columns], heads, (0, 1));
            }
            // The rows of one sequence, or of several one behind the other.
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

/// Products of a batch read their factors from what these are moved from.
fn read_heads(net: &mut Net) {
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
    }
    net.sort();
}

/// A value in another shape; what makes it is behind all nodes.
fn view(net: &mut Net, from: ValueId, shape: &[i64]) -> ValueId {
    if net.shape(from) == shape {
        return from;
    }
    let (name, dtype) = (net.value(from).name.clone(), net.value(from).dtype);
    let to = net.add_value(&name, dtype, shape);
    net.nodes.push(Node { kind: Kind::View, inputs: vec![Some(from)], outputs: vec![to], origin: name });
    to
}

/// An equal part of a value, one of `n_parts`; the node that makes it is behind all others.
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

/// Products of a batch write their results where they are moved to.
fn write_heads(net: &mut Net) {
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
    }
}

/// The node that moves results `[b, m, n]`, which nobody else reads, to rows with all products side by side.
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
