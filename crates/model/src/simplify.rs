//! Rewriting a net into fewer operations before kernels are made of it.

use tilewright_graph::{DType, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::BinaryOp;

use crate::net::{Kind, Net, Node, ValueId};
use crate::scalar::{self, add, cost, input, substitute};
use crate::{attention, embedding};

/// Operations of a map that is made of several, at most.
pub const MOST_COST: usize = 400;
/// Most operations of a map that is computed again for every element that it is broadcast to.
const CHEAP: usize = 2;

/// Rounds of all rules, at most. A round sees chains of any length to their end; a model of a few thousand
/// nodes takes less than ten.
const MOST_ROUNDS: usize = 100;

/// Applies all rules until none does anything.
pub fn simplify(net: &mut Net) {
    rewrite(net);
    attention::split_sequences(net);
    drop_views(net);
    attention::turn_sequences(net);
    // Once all that they are scaled by is in their matrices.
    attention::join_products(net);
    rewrite(net);
    attention::place_heads(net);
    rewrite(net);
}

fn rewrite(net: &mut Net) {
    /// Each says how many places it changed.
    const RULES: [fn(&mut Net) -> usize; 7] = [
        drop_identities,
        sink_views,
        merge_maps,
        fold_affine,
        turn_products,
        embedding::look_up,
        attention::sink_moves,
    ];
    drop_views(net);
    let mut is_done = false;
    for _ in 0..MOST_ROUNDS {
        let n_changes: usize = RULES.iter().map(|rule| rule(net)).sum();
        is_done = n_changes == 0;
        if is_done {
            break;
        }
        drop_views(net);
    }
    // Each round leaves a net that computes the same, so that the last one serves even then.
    debug_assert!(is_done, "the rules undo each other");
    interleave_groups(net);
    drop_views(net);
    net.prune();
}

/// A shuffle of the channels of a grouped convolution becomes the order in which that one stores them. The
/// weights stay as they are; what maps in between have by channel is shuffled.
fn interleave_groups(net: &mut Net) {
    // What maps are given instead of constants, and views instead of transpositions, changes neither.
    let links = Links::of(net);
    for at in 0..net.nodes.len() {
        shuffled_in_place(net, &links, at);
    }
}

/// Rewrites a transposition that is such a shuffle.
fn shuffled_in_place(net: &mut Net, links: &Links, at: usize) -> Option<()> {
    let Kind::Transpose(order) = &net.nodes[at].kind else { return None };
    let producer = |id: ValueId| links.producers[id.0].filter(|_| links.n_uses[id.0] == 1);
    // Groups, channels of a group and pixels, of one image.
    let mut from = net.nodes[at].input(0);
    let sizes: Vec<(usize, i64)> = net.shape(from).iter().copied().enumerate().filter(|(_, n)| *n > 1).collect();
    let [(first, groups), (second, of_group), rest @ ..] = &sizes[..] else { return None };
    let place = |axis: usize| order.iter().position(|from| *from == axis);
    let in_order: Vec<usize> = [*second, *first].into_iter().chain(rest.iter().map(|(axis, _)| *axis)).collect();
    if !in_order.is_sorted_by_key(|axis| place(*axis)) {
        return None;
    }
    let n = groups * of_group;
    let mut maps = Vec::new();
    let anchor = loop {
        let before = producer(from)?;
        match &net.nodes[before].kind {
            Kind::View => from = net.nodes[before].input(0),
            Kind::Map(_) => {
                let mut varying = net.nodes[before].inputs.iter().flatten();
                from = *varying.find(|id| net.value(**id).constant.is_none())?;
                maps.push(before);
            }
            Kind::Conv(_) => break before,
            _ => return None,
        }
    };
    let out = net.shape(net.nodes[anchor].output()).to_vec();
    let Kind::Conv(conv) = &net.nodes[anchor].kind else { return None };
    let is_single = net.value(net.nodes[anchor].input(0)).dtype == DType::F32;
    let fits = is_single && !conv.transposed && !conv.interleaved && conv.groups == *groups && out[..2] == [1, n];
    if !fits || conv.groups == net.shape(net.nodes[anchor].input(0))[1] {
        return None;
    }
    // All of the maps, or none.
    let mut shuffled = Vec::new();
    for &map in &maps {
        if net.shape(net.nodes[map].output()) != out {
            return None;
        }
        let mut n_varying = 0;
        for (slot, id) in net.nodes[map].inputs.iter().enumerate() {
            let id = (*id)?;
            match &net.value(id).constant {
                None => n_varying += 1,
                Some(_) if net.value(id).n_elements() == 1 => {}
                Some(_) => {
                    let shape = net.shape(id).to_vec();
                    let by_channel = shape.len() >= 3 && shape[shape.len() - 3] == n && net.value(id).n_elements() == n;
                    let numbers = net.numbers(id).filter(|_| by_channel)?;
                    let source = |to: i64| (to % groups) * of_group + to / groups;
                    let numbers: Vec<f32> = (0..n).map(|to| numbers[source(to) as usize]).collect();
                    shuffled.push((map, slot, shape, numbers));
                }
            }
        }
        if n_varying != 1 {
            return None;
        }
    }
    for (map, slot, shape, numbers) in shuffled {
        let name = format!("{}.shuffled", net.nodes[map].origin);
        net.nodes[map].inputs[slot] = Some(net.add_constant(&name, &shape, &numbers));
    }
    let Kind::Conv(conv) = &mut net.nodes[anchor].kind else { return None };
    conv.interleaved = true;
    net.nodes[at].kind = Kind::View;
    Some(())
}

/// Producers and readers of a net's values, counted once and updated as nodes change.
pub struct Links {
    /// How often each value is read, the net's outputs included.
    pub n_uses: Vec<usize>,
    /// The node that computes each value.
    pub producers: Vec<Option<usize>>,
}

impl Links {
    pub fn of(net: &Net) -> Links {
        Links { n_uses: net.n_uses(), producers: net.producers() }
    }

    /// A node reads what it did not read before.
    pub fn enter(&mut self, node: &Node) {
        for id in node.inputs.iter().flatten() {
            self.n_uses.resize(self.n_uses.len().max(id.0 + 1), 0);
            self.n_uses[id.0] += 1;
        }
    }

    /// A node reads no more.
    pub fn leave(&mut self, node: &Node) {
        node.inputs.iter().flatten().for_each(|id| self.n_uses[id.0] -= 1);
    }

    /// The node at a place computes its outputs.
    pub fn place(&mut self, node: &Node, at: usize) {
        for id in &node.outputs {
            self.producers.resize(self.producers.len().max(id.0 + 1), None);
            self.producers[id.0] = Some(at);
        }
    }
}

/// A map that gives its input as it is becomes a view.
fn drop_identities(net: &mut Net) -> usize {
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

/// Views of views become one, views of the same shape none, and views of constants constants. Maps read what
/// they read several times, by way of such views perhaps, in one place.
fn drop_views(net: &mut Net) {
    let producers = net.producers();
    let mut is_output = vec![false; net.values.len()];
    net.outputs.iter().for_each(|id| is_output[id.0] = true);
    // What is read in the place of each value: nodes come before those that read them.
    let mut read: Vec<ValueId> = (0..net.values.len()).map(ValueId).collect();
    for at in 0..net.nodes.len() {
        net.nodes[at].inputs.iter_mut().flatten().for_each(|id| *id = read[id.0]);
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
}

/// A map's operand in terms of another shape of the same elements; none where it cannot be.
fn reexpressed(operand: &[i64], from: &[i64], to: &[i64]) -> Option<Vec<i64>> {
    let count = |shape: &[i64]| shape.iter().product::<i64>();
    // Where all have one element, the operand is to have the same shape, or each view would need another.
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

/// A map of a view becomes a view of a map, so that the map meets what computes the view's input.
fn sink_views(net: &mut Net) -> usize {
    let mut n_sunk = 0;
    let mut links = Links::of(net);
    let mut is_of_anchor = vec![false; net.values.len()];
    let nodes = std::mem::take(&mut net.nodes);
    for node in nodes {
        let is_map = matches!(node.kind, Kind::Map(_));
        let new = match is_map.then(|| sunk(net, &links, &is_of_anchor, &node)).flatten() {
            None => vec![node],
            Some(new) => {
                n_sunk += 1;
                links.leave(&node);
                new.iter().for_each(|node| links.enter(node));
                new
            }
        };
        for node in new {
            links.place(&node, net.nodes.len());
            is_of_anchor.resize(net.values.len(), false);
            is_of_anchor[node.outputs[0].0] = comes_from_anchor(net, &is_of_anchor, &node);
            net.nodes.push(node);
        }
    }
    n_sunk
}

/// Whether a node is a product or a convolution, or a map of such.
pub fn comes_from_anchor(net: &Net, is_of_anchor: &[bool], node: &Node) -> bool {
    match &node.kind {
        Kind::Conv(_) | Kind::Product { .. } | Kind::Packed(_) => true,
        Kind::Map(_) => {
            let n_own = net.value(node.output()).n_elements();
            let mut whole = node.inputs.iter().flatten().filter(|id| net.value(**id).n_elements() == n_own);
            whole.any(|id| is_of_anchor[id.0])
        }
        _ => false,
    }
}

/// Nodes that replace a map of a view; the nodes before it are those of the net.
fn sunk(net: &mut Net, links: &Links, is_of_anchor: &[bool], node: &Node) -> Option<Vec<Node>> {
    let Links { n_uses, producers } = links;
    let node = node.clone();
    let out = net.shape(node.output()).to_vec();
    let count = |shape: &[i64]| shape.iter().product::<i64>();
    let Kind::Map(value) = &node.kind else { return None };
    let mut read = scalar::inputs(value);
    read.sort_unstable();
    read.dedup();
    // A map of one tensor and numbers becomes a part of the map behind the view.
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
    // Where another input is what a kernel computes, a view ahead of it would only be moved from one to the
    // other.
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

/// A map of a map becomes one.
fn merge_maps(net: &mut Net) -> usize {
    let mut n_merged = 0;
    let mut links = Links::of(net);
    let mut is_merged = vec![false; net.nodes.len()];
    for at in 0..net.nodes.len() {
        while let Some(before) = mergeable(net, &links, at) {
            let (node, inner) = (&net.nodes[at], &net.nodes[before]);
            let (Kind::Map(outer), Kind::Map(value)) = (&node.kind, &inner.kind) else { unreachable!("both are maps") };
            let merged = merged(net, node, outer, inner, value);
            links.leave(node);
            // Others may read what is only spread.
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

/// The map before a map that may become a part of it.
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
        // What only spreads a smaller tensor is read from that.
        let is_spread = matches!(value, Expr::Load(slot, _) if
            net.value(net.nodes[before].input(slot.0 as usize)).n_elements() < net.value(id).n_elements());
        let may = is_spread || is_private && (!is_repeated || own <= CHEAP * n_reads.max(1) || !is_small && own < 15);
        (may && cost(outer) + n_reads * own <= MOST_COST).then_some(before)
    })
}

/// The map of a map.
pub fn merged(net: &Net, node: &Node, outer: &Expr, inner: &Node, value: &Expr) -> Node {
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
    // It is computed in the type of its own.
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

/// The names of the model's nodes that two nodes come from.
pub fn joined(a: &str, b: &str) -> String {
    if a == b || b.split(" + ").any(|part| part == a) { b.to_owned() } else { format!("{a} + {b}") }
}

/// Has a map read each value in one place.
fn join_reads(node: &mut Node) {
    let Kind::Map(value) = &node.kind else { return };
    let first = |slot: usize| node.inputs.iter().position(|id| *id == node.inputs[slot]).expect("it is itself");
    if (0..node.inputs.len()).all(|slot| first(slot) == slot) {
        return;
    }
    node.kind = Kind::Map(substitute(value, &|at| input(first(at))));
    drop_unread(node);
}

/// Leaves out inputs that a map does not read.
pub fn drop_unread(node: &mut Node) {
    let Kind::Map(value) = &node.kind else { return };
    let read = scalar::inputs(value);
    let kept: Vec<usize> = (0..node.inputs.len()).filter(|slot| read.contains(slot)).collect();
    // A map of numbers alone keeps one, so that it has a shape to be of.
    if kept.len() == node.inputs.len() || kept.is_empty() {
        return;
    }
    let value = substitute(value, &|at| input(kept.iter().position(|&slot| slot == at).expect("it is read")));
    node.inputs = kept.iter().map(|&slot| node.inputs[slot]).collect();
    node.kind = Kind::Map(value);
}

/// Numbers of an expression by channel of an anchor's result: of a constant or a literal.
pub(crate) fn by_channel(net: &Net, node: &Node, e: &Expr, out: &[i64], axis: usize) -> Option<Vec<f64>> {
    let n = out[axis] as usize;
    match e {
        Expr::Const(x) => Some(vec![*x; n]),
        Expr::Load(slot, _) => {
            let id = node.inputs[slot.0 as usize]?;
            let shape = net.shape(id);
            let missing = out.len().checked_sub(shape.len())?;
            let is_along = shape.iter().enumerate().all(|(d, &n)| n == 1 || d + missing == axis);
            let numbers = net.numbers(id).filter(|_| is_along)?;
            let one = |c: usize| f64::from(numbers[if numbers.len() == 1 { 0 } else { c }]);
            Some((0..n).map(one).collect())
        }
        _ => None,
    }
}

/// Factors and terms by channel behind a convolution or a product with constant weights become part of the
/// weights and one bias.
fn fold_affine(net: &mut Net) -> usize {
    let mut n_folded = 0;
    let n_uses = net.n_uses();
    let mut users: Vec<Option<usize>> = vec![None; net.values.len()];
    for (at, node) in net.nodes.iter().enumerate() {
        node.inputs.iter().flatten().for_each(|id| users[id.0] = Some(at));
    }
    for at in 0..net.nodes.len() {
        // What is folded are constants: who reads what anchors compute stays the same.
        let only = net.nodes[at].outputs.first().filter(|id| n_uses[id.0] == 1).and_then(|id| users[id.0]);
        if let Some(user) = only {
            n_folded += usize::from(fold_affine_into(net, at, user).is_some());
        }
    }
    n_folded
}

/// Folds the affine map of a node's only reader into the node.
fn fold_affine_into(net: &mut Net, at: usize, user: usize) -> Option<()> {
    let anchor = net.nodes[at].clone();
    let out = net.shape(anchor.output()).to_vec();
    let axis = match &anchor.kind {
        Kind::Conv(_) => 1,
        Kind::Product { .. } if out.len() == 2 => 1,
        _ => return None,
    };
    let weights = anchor.input(1);
    net.value(weights).constant.as_ref()?;
    let x = anchor.output();
    let node = net.nodes[user].clone();
    let Kind::Map(value) = &node.kind else { return None };
    if net.shape(node.output()) != out || net.value(node.output()).dtype != net.value(x).dtype {
        return None;
    }
    let slot = node.inputs.iter().position(|id| *id == Some(x))?;
    let mut value = value.clone();
    let n = out[axis] as usize;
    let (mut factor, mut term, mut n_folded) = (vec![1.0; n], vec![0.0; n], 0);
    while let Some((op, by, rest)) = innermost(&value, slot) {
        let Some(numbers) = by_channel(net, &node, &by, &out, axis) else { break };
        match op {
            BinaryOp::Mul => {
                factor.iter_mut().zip(&numbers).for_each(|(f, x)| *f *= x);
                term.iter_mut().zip(&numbers).for_each(|(t, x)| *t *= x);
            }
            BinaryOp::Add => term.iter_mut().zip(&numbers).for_each(|(t, x)| *t += x),
            _ => term.iter_mut().zip(&numbers).for_each(|(t, x)| *t -= x),
        }
        value = rest;
        n_folded += 1;
    }
    let has_factor = factor.iter().any(|&f| f != 1.0);
    if n_folded == 0 || n_folded == 1 && !has_factor {
        return None;
    }
    let mut new = node.clone();
    if has_factor {
        let scaled = scaled_weights(net, &anchor, weights, &factor)?;
        net.nodes[at].inputs[1] = Some(scaled);
    }
    if term.iter().any(|&t| t != 0.0) {
        let shape: Vec<i64> = std::iter::once(n as i64).chain(out[axis + 1..].iter().map(|_| 1)).collect();
        let numbers: Vec<f32> = term.iter().map(|&t| t as f32).collect();
        let bias = net.add_constant(&format!("{}.bias", anchor.origin), &shape, &numbers);
        new.inputs.push(Some(bias));
        let bias = new.inputs.len() - 1;
        value = substitute(&value, &|at| if at == slot { add(input(slot), input(bias)) } else { input(at) });
    }
    new.kind = Kind::Map(value);
    drop_unread(&mut new);
    if matches!(&new.kind, Kind::Map(Expr::Load(..))) {
        // Nothing is left but the value itself.
        new.kind = Kind::View;
    }
    net.nodes[user] = new;
    Some(())
}

/// Operation that is applied to an input at each of its reads, where that is the same and has another
/// operand: the operation, the operand, and the expression without it.
fn innermost(value: &Expr, slot: usize) -> Option<(BinaryOp, Expr, Expr)> {
    let is_x = |e: &Expr| matches!(e, Expr::Load(b, _) if b.0 as usize == slot);
    let mut parents: Vec<&Expr> = Vec::new();
    fn collect<'a>(e: &'a Expr, is_x: &dyn Fn(&Expr) -> bool, parents: &mut Vec<&'a Expr>) -> Option<()> {
        match e {
            Expr::Binary(_, a, b) => {
                if is_x(a) || is_x(b) {
                    parents.push(e);
                }
                for side in [a, b] {
                    if !is_x(side) {
                        collect(side, is_x, parents)?;
                    }
                }
                Some(())
            }
            Expr::Unary(_, x) => {
                if is_x(x) {
                    return None;
                }
                collect(x, is_x, parents)
            }
            Expr::Const(_) => Some(()),
            // By itself.
            Expr::Load(..) if is_x(e) => None,
            Expr::Load(..) => Some(()),
            _ => None,
        }
    }
    collect(value, &is_x, &mut parents)?;
    let first = (*parents.first()?).clone();
    if parents.iter().any(|other| **other != first) {
        return None;
    }
    let Expr::Binary(op, a, b) = &first else { return None };
    let by = match (op, is_x(a), is_x(b)) {
        (BinaryOp::Add | BinaryOp::Mul | BinaryOp::Sub, true, false) => (**b).clone(),
        (BinaryOp::Add | BinaryOp::Mul, false, true) => (**a).clone(),
        _ => return None,
    };
    Some((*op, by, scalar::replaced(value, &first, &input(slot))))
}

/// Weights with each channel of the output scaled.
fn scaled_weights(net: &mut Net, anchor: &Node, weights: ValueId, factor: &[f64]) -> Option<ValueId> {
    let shape = net.shape(weights).to_vec();
    let axis = match &anchor.kind {
        Kind::Conv(conv) if conv.transposed => 1,
        Kind::Conv(_) => 0,
        Kind::Product { turned, .. } => usize::from(!turned),
        _ => return None,
    };
    let inside: usize = shape[axis + 1..].iter().product::<i64>() as usize;
    let tensor = net.value(weights).constant.clone().filter(|tensor| tensor.dtype() == DType::F32)?;
    // From bytes to bytes: weights are most of what a model has.
    let mut bytes = vec![0; tensor.bytes().len()];
    let (from, to) = (tensor.bytes().as_chunks::<4>().0, bytes.as_chunks_mut::<4>().0);
    for ((from, to), factor) in from.chunks(inside).zip(to.chunks_mut(inside)).zip(factor.iter().cycle()) {
        for (from, to) in from.iter().zip(to) {
            *to = ((f64::from(f32::from_le_bytes(*from)) * factor) as f32).to_le_bytes();
        }
    }
    let id = net.add_value(&format!("{}.scaled", net.value(weights).name), DType::F32, &shape);
    net.values[id.0].constant = Tensor::new(tensor.ty().clone(), bytes.into());
    Some(id)
}

/// A factor that is turned before a product is read as it is.
fn turn_products(net: &mut Net) -> usize {
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
