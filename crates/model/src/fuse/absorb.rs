//! Fusion of elementwise maps into products and convolutions, as prologues and epilogues.

use tilewright_ir::op::{CONV2D, Epilogue, EpilogueFunction, Operand, Workload};
use tilewright_ir::{DType, Expr};

use super::groups::is_of_nest;
use super::is_anchor;
use crate::epilogue::{self, OperandsIn, Operations, byte_parts};
use crate::net::{Kind, Net, Node, ValueId};
use crate::quantized::epilogue::{QuantizedOutput, closing, example, may_close};
use crate::rules::{drop_unread, joined, merged};
use crate::scalar::{self, input};

/// Kind of an epilogue operand, per channel or per element, and its type; `None` if the value cannot be one.
fn operand_of(net: &Net, id: ValueId, out: &[i64], axis: usize) -> Option<(Operand, DType)> {
    let dtype = net.element_type(id).filter(|dtype| matches!(dtype, DType::F32 | DType::U8))?;
    let shape = net.shape(id);
    let is_along = out.len().checked_sub(shape.len()).is_some_and(|missing| {
        shape.iter().enumerate().all(|(d, &n)| n == if d + missing == axis { out[axis] } else { 1 })
            && shape.len() + axis >= out.len()
    });
    let is_whole = net.value(id).n_elements() == out.iter().product::<i64>();
    match (is_along, is_whole) {
        (true, _) => Some((Operand::Channel, dtype)),
        (_, true) => Some((Operand::Element, dtype)),
        _ => None,
    }
}

/// Turns maps after products and convolutions into epilogues, where possible.
pub(super) fn absorb_maps(net: &mut Net, epilogues: &mut Vec<Operations>) {
    let mut job = Absorbing::new(net, std::mem::take(epilogues));
    // A map of two products could be the epilogue of either: the later one takes it, as the other's result is
    // available by then.
    for at in (0..job.net.nodes.len()).rev() {
        let mut anchor = is_anchor(&job.net.nodes[at].kind).then_some(at);
        while let Some(at) = anchor {
            anchor = job.absorb(at);
        }
    }
    *epilogues = job.done();
}

/// State of absorbing nodes into epilogues. Nodes keep their indices until the end.
struct Absorbing<'a> {
    net: &'a mut Net,
    epilogues: Vec<Operations>,
    /// Nodes that read each value; may include nodes that no longer do.
    users: Vec<Vec<usize>>,
    is_output: Vec<bool>,
    is_removed: Vec<bool>,
    /// Sort key of each node: its final position, and the order among the anchors that moved there.
    order: Vec<(usize, usize)>,
    n_moved: usize,
}

impl<'a> Absorbing<'a> {
    fn new(net: &'a mut Net, epilogues: Vec<Operations>) -> Absorbing<'a> {
        let n = net.nodes.len();
        let mut is_output = vec![false; net.values.len()];
        net.outputs.iter().for_each(|id| is_output[id.0] = true);
        let users = net.users();
        let order = (0..n).map(|at| (at, usize::MAX)).collect();
        Absorbing { net, epilogues, users, is_output, is_removed: vec![false; n], order, n_moved: 0 }
    }

    /// Sorts the remaining nodes, and returns their epilogues.
    fn done(self) -> Vec<Operations> {
        let mut kept: Vec<usize> = (0..self.order.len()).filter(|&at| !self.is_removed[at]).collect();
        kept.sort_by_key(|&at| self.order[at]);
        let mut nodes: Vec<Option<Node>> = std::mem::take(&mut self.net.nodes).into_iter().map(Some).collect();
        let mut epilogues = self.epilogues;
        self.net.nodes = kept.iter().map(|&at| nodes[at].take().expect("each stands at one place")).collect();
        kept.into_iter().map(|at| std::mem::take(&mut epilogues[at])).collect()
    }

    /// Finds the node that alone reads a value.
    fn only_user(&self, id: ValueId) -> Option<usize> {
        let is_user = |at: &&usize| !self.is_removed[**at] && reads(&self.net.nodes[**at], id);
        let mut users = self.users[id.0].iter().filter(is_user);
        let first = users.next().filter(|_| !self.is_output[id.0])?;
        users.all(|other| other == first).then_some(*first)
    }

    /// Replaces a node.
    fn set(&mut self, at: usize, node: Node) {
        self.users.resize(self.net.values.len(), Vec::new());
        self.is_output.resize(self.net.values.len(), false);
        node.inputs.iter().flatten().for_each(|id| self.users[id.0].push(at));
        self.net.nodes[at] = node;
    }

    /// Follows a chain of floating-point maps, each read only by the next, to one that yields 8-bit integers:
    /// returns their indices, the last one's index, and the composed map. `None` if the first already yields
    /// such integers.
    fn quantized_again(&self, first: usize) -> Option<(Vec<usize>, usize, Node)> {
        const MOST: usize = 3;
        let mut passed = vec![first];
        let mut all = self.net.nodes[first].clone();
        while passed.len() <= MOST {
            let Kind::Map(value) = &all.kind else { return None };
            let is_of_numbers = self.net.element_type(all.output()) == Some(DType::F32);
            let next = self.only_user(all.output()).filter(|_| is_of_numbers)?;
            let Kind::Map(outer) = &self.net.nodes[next].kind else { return None };
            let both = merged(self.net, &self.net.nodes[next], outer, &all, value);
            if matches!(self.net.element_type(both.output()), Some(DType::U8 | DType::I8)) {
                return Some((passed, next, both));
            }
            passed.push(next);
            all = both;
        }
        None
    }

    /// Absorbs what it can of the map after an anchor, or of a chain of maps; returns the anchor's new index
    /// if it may absorb a further map.
    fn absorb(&mut self, at: usize) -> Option<usize> {
        let user = self.only_user(self.net.nodes[at].output())?;
        if may_close(self.net, &self.net.nodes[at], &self.epilogues[at])
            && let Some((passed, next, all)) = self.quantized_again(user)
            && let Some(found) = self.take(at, (next, all), &passed)
        {
            return found;
        }
        let node = self.net.nodes[user].clone();
        self.take(at, (user, node), &[])?
    }

    /// Absorbs what it can of a map after an anchor. If the map is composed of several, of which `passed` are
    /// all but the last, it is absorbed as a whole or up to a quantization. Returns `None` if nothing is
    /// absorbed, else the anchor's new index if it may absorb a further map.
    fn take(&mut self, at: usize, (user, node): (usize, Node), passed: &[usize]) -> Option<Option<usize>> {
        let mut anchor = self.net.nodes[at].clone();
        let x = anchor.output();
        let net = &mut *self.net;
        let out = net.shape(x).to_vec();
        let axis = channel_axis(&anchor.kind, &out);
        let Kind::Map(value) = &node.kind else { return None };
        let closes = may_close(net, &anchor, &self.epilogues[at]);
        let of_map = net.value(node.output()).dtype;
        if net.shape(node.output()) != out || of_map != net.value(x).dtype && !closes {
            return None;
        }
        let slot = node.inputs.iter().position(|id| *id == Some(x))?;
        // The anchor's own result is not in memory, so it cannot be an operand.
        let operands = |net: &Net, slot: usize| operand_of(net, node.inputs[slot].filter(|id| *id != x)?, &out, axis);
        let before = &self.epilogues[at];
        let bytes = if closes { bytes_of(net, &node, slot, &operands, before) } else { None };
        let (all, part, dtype) = match bytes {
            Some(found) => found,
            None if !passed.is_empty() => return None,
            None => {
                let (found, part) = epilogue::largest(value, slot, &|slot| operands(net, slot))?;
                let of_slot = |slot: usize| node.inputs[slot].expect("a map has all inputs").0;
                let own = found.into_iter().map(|(operation, slot)| (operation, slot.map(of_slot)));
                (before.iter().cloned().chain(own).collect::<Operations>(), part, net.value(x).dtype)
            }
        };
        if part == *value && dtype != of_map {
            return None;
        }
        let operations = all.iter().map(|(operation, _)| *operation).collect();
        example(net, &anchor).with_epilogue(operations).ok()?;
        // The operands become inputs of the anchor, so they must be computed before it.
        let mut read = all.iter().filter_map(|(_, id)| id.map(|id| Some(ValueId(id)))).collect::<Vec<_>>();
        read.retain(|id| !anchor.inputs[2..].contains(id));
        anchor.inputs.extend(read);
        passed.iter().for_each(|at| self.is_removed[*at] = true);
        if part == *value {
            anchor.outputs.clone_from(&node.outputs);
            anchor.origin = joined(&anchor.origin, &node.origin);
            self.is_removed[at] = true;
            self.epilogues[user] = all;
            self.set(user, anchor);
            return Some(Some(user));
        }
        let output = net.add_value(&format!("{}.part", node.origin), dtype, &out);
        anchor.outputs = vec![output];
        let rest = scalar::replaced(value, &part, &input(node.inputs.len()));
        let mut rest_node = Node { kind: Kind::Map(rest), ..node };
        rest_node.inputs.push(Some(output));
        drop_unread(&mut rest_node);
        self.set(user, rest_node);
        // Directly before the rest of the map, where all operands are available.
        self.order[at] = (self.order[user].0, self.n_moved);
        self.n_moved += 1;
        self.epilogues[at] = all;
        self.set(at, anchor);
        Some(None)
    }
}

/// Matches a map, or a part of it, that quantizes an anchor's result: returns the anchor's operations
/// including the quantization, that part, and its type.
fn bytes_of(
    net: &mut Net,
    node: &Node,
    slot: usize,
    operands: OperandsIn,
    before: &Operations,
) -> Option<(Operations, Expr, tilewright_graph::DType)> {
    let Kind::Map(value) = &node.kind else { return None };
    let whole = net.element_type(node.output()).map(|dtype| (value, value, dtype));
    let parts = byte_parts(value, slot).into_iter().filter_map(|part| match part {
        Expr::Cast(dtype, inner) => Some((part, &**inner, *dtype)),
        _ => None,
    });
    whole.into_iter().chain(parts).find_map(|(part, quantized, dtype)| {
        let of_value = match dtype {
            DType::U8 => tilewright_graph::DType::U8,
            DType::I8 => tilewright_graph::DType::I8,
            _ => return None,
        };
        let output = QuantizedOutput { value: quantized, slot, dtype };
        Some((closing(net, node, output, operands, before)?, part.clone(), of_value))
    })
}

/// Channel axis of the kernel's result.
fn channel_axis(kind: &Kind, out: &[i64]) -> usize {
    if matches!(kind, Kind::Conv(_)) { 1 } else { out.len() - 1 }
}

/// Turns maps before convolutions into prologues if nothing else reads them: recomputing a map costs less
/// than writing its result and reading it back. A map whose input is computed by a nest for it alone stays in
/// that nest.
pub(super) fn absorb_prologues(net: &mut Net, epilogues: &mut Vec<Operations>) -> Vec<Operations> {
    let (n_uses, producers) = (net.n_uses(), net.producers());
    let mut prologues: Vec<Operations> = vec![Vec::new(); net.nodes.len()];
    let mut absorbed = Vec::new();
    let mut all_users = net.users();
    for at in 0..net.nodes.len() {
        let node = net.nodes[at].clone();
        let users = all_users[node.output().0].clone();
        let may_change = |user: &usize| {
            let Node { kind, inputs, .. } = &net.nodes[*user];
            let n_reads = inputs.iter().filter(|id| **id == Some(node.output())).count();
            matches!(kind, Kind::Conv(conv) if !conv.transposed) && inputs[0] == Some(node.output()) && n_reads == 1
        };
        if users.len() != n_uses[node.output().0] || !users.iter().all(may_change) {
            continue;
        }
        let Some((x, operations)) = prologue_of(net, &node) else { continue };
        let operations = with_one_line(net, operations);
        // A nest with no other reader computes the map too.
        let is_of_own_nest = producers[x.0].is_some_and(|before| is_of_nest(net, &net.nodes[before]));
        if is_of_own_nest && n_uses[x.0] == 1 {
            continue;
        }
        absorbed.push(at);
        for user in users {
            all_users[x.0].push(user);
            prologues[user] = operations.clone();
            let anchor = &mut net.nodes[user];
            anchor.inputs[0] = Some(x);
            anchor.inputs.extend(operations.iter().filter_map(|(_, id)| id.map(|id| Some(ValueId(id)))));
            anchor.origin = joined(&node.origin, &anchor.origin);
        }
    }
    leave_out(&mut net.nodes, &absorbed);
    leave_out(epilogues, &absorbed);
    leave_out(&mut prologues, &absorbed);
    prologues
}

/// Removes the entries at these indices, which are ascending.
fn leave_out<T>(list: &mut Vec<T>, places: &[usize]) {
    let (mut rest, mut next) = (places.iter().peekable(), 0..);
    list.retain(|_| {
        let at = next.next().expect("places have no end");
        rest.next_if(|place| **place == at).is_none()
    });
}

fn reads(node: &Node, id: ValueId) -> bool {
    node.inputs.contains(&Some(id))
}

/// Matches a map that can be a prologue, as it is cheap and reads one input besides per-channel constants:
/// that input, and the operations with their constants.
fn prologue_of(net: &Net, node: &Node) -> Option<(ValueId, Operations)> {
    let Kind::Map(value) = &node.kind else { return None };
    let shape = net.shape(node.output());
    let slot = node.inputs.iter().position(|id| id.is_some_and(|id| net.value(id).constant.is_none()))?;
    let x = node.input(slot);
    let is_single = |id: ValueId| net.element_type(id) == Some(DType::F32);
    if shape.len() != 4 || net.shape(x) != shape || !is_single(x) || !is_single(node.output()) {
        return None;
    }
    let operands = |slot: usize| {
        let id = node.inputs[slot].filter(|id| net.value(*id).constant.is_some())?;
        operand_of(net, id, shape, 1).filter(|(kind, _)| *kind == Operand::Channel)
    };
    let (operations, part) = epilogue::largest(value, slot, &operands)?;
    let is_cheap = operations.iter().all(|(operation, _)| match operation.function() {
        EpilogueFunction::Bias
        | EpilogueFunction::Scale
        | EpilogueFunction::Linear
        | EpilogueFunction::Relu
        | EpilogueFunction::LeakyRelu => true,
        EpilogueFunction::Clip | EpilogueFunction::HardSigmoid | EpilogueFunction::HardSwish => true,
        EpilogueFunction::Add | EpilogueFunction::Mul | EpilogueFunction::Gated => false,
        EpilogueFunction::Sigmoid | EpilogueFunction::Tanh | EpilogueFunction::Gelu | EpilogueFunction::Silu => false,
        EpilogueFunction::Init | EpilogueFunction::Dequant | EpilogueFunction::QuantU8 | EpilogueFunction::QuantI8 => {
            false
        }
        EpilogueFunction::Round | EpilogueFunction::AddU8 => false,
    });
    if part != *value || !is_cheap || operations.is_empty() {
        return None;
    }
    let own: Operations = operations
        .into_iter()
        .map(|(operation, slot)| (operation, slot.map(|slot| node.inputs[slot].expect("a map has all inputs").0)))
        .collect();
    let sizes = ["c", "h", "w", "k", "r", "s"].map(|size| (size, 1));
    let check = Workload::new(&CONV2D, &sizes).expect("it is a convolution of one element");
    check.with_prologue(own.iter().map(|(operation, _)| *operation).collect()).ok()?;
    Some((x, own))
}

/// Merges leading per-channel factors and terms of operations into one factor and one term.
fn with_one_line(net: &mut Net, operations: Operations) -> Operations {
    let (mut factor, mut term) = (vec![1.0], vec![0.0]);
    let mut n_joined = 0;
    for (operation, operand) in &operations {
        let numbers = operand.and_then(|id| net.numbers(ValueId(id)));
        let by = |at: usize| numbers.as_ref().map(|numbers| f64::from(numbers[at]));
        let n = numbers.as_ref().map_or(factor.len(), Vec::len).max(factor.len());
        if factor.len() < n {
            (factor, term) = (vec![factor[0]; n], vec![term[0]; n]);
        }
        let line = |at: usize| match (operation.function(), operation.numbers()) {
            (EpilogueFunction::Scale, _) => Some((by(at)?, 0.0)),
            (EpilogueFunction::Bias, _) => Some((1.0, by(at)?)),
            (EpilogueFunction::Linear, [factor, term]) => Some((*factor, *term)),
            _ => None,
        };
        let Some(lines) = (0..n).map(line).collect::<Option<Vec<_>>>() else { break };
        for (at, (by, more)) in lines.into_iter().enumerate() {
            (factor[at], term[at]) = (factor[at] * by, term[at] * by + more);
        }
        n_joined += 1;
    }
    if n_joined <= 2 || factor.len() == 1 {
        return operations;
    }
    let mut joined = Vec::new();
    for (name, function, numbers) in
        [("scale", EpilogueFunction::Scale, factor), ("bias", EpilogueFunction::Bias, term)]
    {
        let numbers: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
        let id = net.add_constant(name, &[numbers.len() as i64, 1, 1], &numbers);
        joined.push((Epilogue::new(function, &[]).expect("it has no numbers"), Some(id.0)));
    }
    joined.extend(operations.into_iter().skip(n_joined));
    joined
}
