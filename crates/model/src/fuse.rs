//! Fusion of a simplified net to kernels: products and convolutions with their epilogues, and nests of the
//! rest.

use std::collections::HashMap;

use tilewright_graph::{Graph, with_both_branches};
use tilewright_ir::expr::{Cond, ReduceOp, Subscript};
use tilewright_ir::op::{
    Epilogue, Function, Operand, ProgramBuilder, Range, StageSpec, Structure, Workload, WorkloadError,
};
use tilewright_ir::{BufferId, DType, Expr, Index, LoopId, OpenSize, Program, Role, Stmt, Target};
use tilewright_runtime::Size;

use crate::epilogue::{self, OperandsIn, Operations, byte_parts};
use crate::halves::widened;
use crate::import::import;
use crate::net::{AsHeads, Convolution, Kind, Net, Node, Packing, Read, Sequence, Track, ValueId, Windows};
use crate::open::OpenNet;
use crate::quantized::epilogue::{closing, example, may_close, opening, padding, types_of};
use crate::quantized::graph::{has_dots, in_bytes};
use crate::rules::{MOST_COST, Trace, drop_unread, joined, merged, simplify};
use crate::scalar::{self, cost, input};

/// Kernel of a fused graph: its workload, inputs and output.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Workload, as it is tuned.
    pub workload: Workload,
    /// Inputs, in the order of the program's.
    pub inputs: Vec<ValueId>,
    /// The only output.
    pub output: ValueId,
    /// The model's nodes that it comes from, for people.
    pub origin: String,
    /// The nodes of the net that a nest computes, the last one's output being its own; none of others, and
    /// none where it only gives its input another layout.
    pub(crate) members: Vec<usize>,
    /// Block of adjacent channels of its output.
    pub block: i64,
    /// Block of adjacent channels of a nest's images, or of those that a conversion makes or takes; 1 where
    /// all lie plain.
    pub(crate) in_blocks: i64,
    /// Sizes that runs say, where the model has an open dimension that the kernel depends on.
    pub(crate) open: Option<Box<Open>>,
}

/// Sizes of a kernel that runs say.
#[derive(Debug, Clone)]
pub(crate) struct Open {
    /// Sizes of the workload's own, in its order.
    pub(crate) sizes: Vec<Size>,
    /// Number of times that the workload's kernel runs, one behind the other, and the range of that; which of
    /// the arguments are further along each time.
    pub(crate) each: Option<(Size, Range, Vec<bool>)>,
}

impl Kernel {
    /// Text that kernels with the same code share.
    pub(crate) fn code_name(&self) -> String {
        match self.open.as_ref().and_then(|open| open.each.as_ref()) {
            None => self.workload.to_string(),
            Some((_, range, along)) => format!("{} each={range} {along:?}", self.workload),
        }
    }

    /// Sizes of its code, in order.
    pub(crate) fn sizes(&self) -> Vec<Size> {
        let each = |open: &Open| open.sizes.iter().copied().chain(open.each.as_ref().map(|(size, ..)| *size)).collect();
        self.open.as_ref().map_or(Vec::new(), |open| each(open))
    }
}

/// Step of a run.
#[derive(Debug, Clone)]
pub enum Step {
    /// Runs a kernel.
    Kernel(Kernel),
    /// Runs the same for each step of a sequence.
    Sequence(Steps),
    /// Runs an operator without code.
    Host(Node),
    /// Copies what is new behind what a state has along a dimension.
    Append {
        /// New elements.
        from: ValueId,
        /// The state, as long as it then is.
        to: ValueId,
        /// The dimension.
        axis: usize,
    },
    /// No work: `part` is a view into `of`, `offset` elements in.
    Part {
        /// The whole.
        of: ValueId,
        /// The part.
        part: ValueId,
        /// Elements ahead of it.
        offset: i64,
    },
    /// No work where the parts are computed in place: a value is the concatenation of others.
    Join {
        /// The parts.
        parts: Vec<ValueId>,
        /// The whole.
        whole: ValueId,
    },
}

/// Sequence: steps of a run that repeat for each step of a sequence.
#[derive(Debug, Clone)]
pub struct Steps {
    /// Number of the sequence's steps.
    pub n_steps: i64,
    /// Steps of an iteration: kernels, and parts of their results.
    pub steps: Vec<Step>,
    /// Values that are somewhere else at each step.
    pub moving: Vec<Moving>,
}

/// A value that is another part of a tensor at each step of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moving {
    /// The value.
    pub value: ValueId,
    /// The tensor.
    pub of: ValueId,
    /// Position in that tensor; of the step before where there is a first one.
    pub track: Track,
    /// Value at the first step, where it comes from the step before.
    pub first: Option<ValueId>,
}

impl Moving {
    /// Tensor that it is a part of at a step, and its offset in elements.
    pub fn at(&self, step: i64) -> (ValueId, i64) {
        match self.first {
            None => (self.of, self.track.at(step)),
            Some(first) if step == 0 => (first, 0),
            Some(_) => (self.of, self.track.at(step - 1)),
        }
    }
}

/// Fused net: the steps of a run, in order.
#[derive(Debug, Clone)]
pub struct Fused {
    /// The values, and what the model takes and gives.
    pub net: Net,
    /// Steps of a run.
    pub steps: Vec<Step>,
    /// Dimension of which runs say a size; the net is then that of the largest.
    pub open: Option<OpenNet>,
    /// Passes that made it of a graph.
    pub trace: Trace,
}

impl Fused {
    /// The workloads, each once, in their order, with how often a run has them; one that
    /// [represents](Workload::representative) several in the place of these.
    pub fn tasks(&self) -> Vec<(Workload, usize)> {
        let mut tasks: Vec<(Workload, usize)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for (step, times) in self.each() {
            if let Step::Kernel(kernel) = step {
                let task = kernel.workload.representative();
                if !task.has_members_of_one_answer() {
                    continue;
                }
                let place = *places.entry(task.to_string()).or_insert(tasks.len());
                match tasks.get_mut(place) {
                    Some((_, n)) => *n += times,
                    None => tasks.push((task, times)),
                }
            }
        }
        tasks
    }

    /// Steps, each with the number of times that a run has it; of a sequence, the steps of its body.
    pub fn each(&self) -> impl Iterator<Item = (&Step, usize)> {
        self.steps.iter().flat_map(|step| match step {
            Step::Sequence(sequence) => sequence.steps.iter().map(|step| (step, sequence.n_steps as usize)).collect(),
            step => vec![(step, 1)],
        })
    }

    /// The workload of each kernel, to change what is asked of it.
    pub fn workloads_mut(&mut self) -> impl Iterator<Item = &mut Workload> {
        let each = self.steps.iter_mut().flat_map(|step| match step {
            Step::Sequence(sequence) => sequence.steps.iter_mut().collect(),
            step => vec![step],
        });
        each.filter_map(|step| match step {
            Step::Kernel(kernel) => Some(&mut kernel.workload),
            _ => None,
        })
    }
}

impl Fused {
    /// Has products round their factors to bf16 where the target multiplies these faster than f32. Few
    /// channels, as those of a network's input, are not worth it: pairs of them are rarely full.
    pub fn round_factors(&mut self, target: &Target) {
        const LEAST_CHANNELS: i64 = 8;
        let is_worth_it = |workload: &Workload| match workload.structure() {
            Structure::Window(window) => window.c >= LEAST_CHANNELS,
            Structure::Contraction(_) | Structure::Packed(_) | Structure::Nest(_) => true,
        };
        if target.prefers_dot2() {
            self.workloads_mut().for_each(|workload| workload.bf16 = is_worth_it(workload));
        }
    }
}

/// Lowers a specialised graph to kernels for a target, which decides whether they multiply 8-bit integers.
/// With `exact`, kernels round as the graph's operators are written, no more and no less: f16 and bf16 are
/// then rounded to behind each operator.
///
/// # Errors
/// As [`fuse`].
pub fn lower(graph: &Graph, exact: bool, target: &Target) -> Result<Fused, WorkloadError> {
    let mut trace = Trace::default();
    let with_branches = with_both_branches(graph);
    trace.graph_pass("both_branches", graph, &with_branches);
    let with_bytes = in_bytes(&with_branches, target);
    trace.graph_pass("in_bytes", &with_branches, &with_bytes);
    let wide = widened(&with_bytes, exact);
    trace.graph_pass("widen", &with_bytes, &wide);
    let mut net = import(&wide, has_dots(target));
    trace.pass("import", wide.nodes().len(), net.nodes.len());
    trace.0.extend(simplify(&mut net).0);
    let mut fused = fuse(net)?;
    trace.0.append(&mut fused.trace.0);
    fused.trace = trace;
    fused.workloads_mut().for_each(|workload| workload.exact |= exact);
    Ok(fused)
}

/// Fuses a simplified net.
///
/// # Errors
/// If an operation is larger than any memory.
pub fn fuse(mut net: Net) -> Result<Fused, WorkloadError> {
    let (mut trace, n_nodes) = (Trace::default(), net.nodes.len());
    let mut epilogues: Vec<Operations> = net.nodes.iter().map(|node| opening(&net, node)).collect();
    absorb_maps(&mut net, &mut epilogues);
    let prologues = absorb_prologues(&mut net, &mut epilogues);
    let groups = groups(&net);
    let mut is_inside = vec![false; net.nodes.len()];
    groups.iter().flatten().flatten().for_each(|&member| is_inside[member] = true);
    let mut steps = Vec::new();
    for (at, node) in net.nodes.clone().iter().enumerate() {
        steps.push(match &node.kind {
            Kind::Conv(conv) => Step::Kernel(convolution(&net, node, conv, [&prologues[at], &epilogues[at]])?),
            Kind::Product { turned, heads } => {
                Step::Kernel(product(&net, node, (*turned, *heads), [&Vec::new(), &epilogues[at]])?)
            }
            Kind::Packed(packing) => Step::Kernel(packed(&net, node, *packing, &epilogues[at])?),
            Kind::Sequence(sequence) => Step::Sequence(steps_of(&mut net, node, sequence, &mut trace)?),
            Kind::Call(_) | Kind::Host(_) => Step::Host(node.clone()),
            Kind::Append(axis) => Step::Append { from: node.input(0), to: node.output(), axis: *axis },
            Kind::View if is_inside[at] => continue,
            Kind::View => Step::Part { of: node.input(0), part: node.output(), offset: 0 },
            Kind::Slice(parts) if let Some(offset) = contiguous(&net, node, parts) => {
                Step::Part { of: node.input(0), part: node.output(), offset }
            }
            Kind::Concat(axis) if is_flat(&net, node, *axis) => {
                Step::Join { parts: node.inputs.iter().flatten().copied().collect(), whole: node.output() }
            }
            _ => match &groups[at] {
                None => continue,
                Some(members) => Step::Kernel(nest(&net, members, &|_| 1)?),
            },
        });
    }
    trace.pass("fuse", n_nodes, steps.len());
    Ok(Fused { net, steps, open: None, trace })
}

/// The steps of a sequence, whose values become values of the net around it.
fn steps_of(net: &mut Net, node: &Node, sequence: &Sequence, trace: &mut Trace) -> Result<Steps, WorkloadError> {
    let mut body = sequence.body.clone();
    trace.within(&node.origin, simplify(&mut body));
    let Fused { net: body, steps, trace: of_body, .. } = fuse(body)?;
    trace.within(&node.origin, of_body);
    let mut ids = Vec::with_capacity(body.values.len());
    for (at, value) in body.values.iter().enumerate() {
        let known = sequence.constants.iter().find(|(own, _)| own.0 == at).map(|(_, outer)| *outer);
        ids.push(known.unwrap_or_else(|| {
            net.values.push(value.clone());
            ValueId(net.values.len() - 1)
        }));
    }
    let outer = |id: ValueId| ids[id.0];
    let step = |step: Step| match step {
        Step::Kernel(kernel) => {
            let inputs = kernel.inputs.iter().map(|id| outer(*id)).collect();
            Step::Kernel(Kernel { inputs, output: outer(kernel.output), ..kernel })
        }
        Step::Part { of, part, offset } => Step::Part { of: outer(of), part: outer(part), offset },
        Step::Sequence(_) | Step::Host(_) | Step::Append { .. } | Step::Join { .. } => {
            unreachable!("a step of a sequence is made of maps, products and their parts")
        }
    };
    let written = |at: usize| {
        let (output, track) = sequence.writes[at];
        (node.outputs[output], track)
    };
    let read = |(id, read): (&ValueId, &Read)| {
        let value = outer(*id);
        match *read {
            Read::Part(input, track) => Moving { value, of: node.input(input), track, first: None },
            Read::Before { output, first } => {
                let (of, track) = written(output);
                Moving { value, of, track, first: Some(node.input(first)) }
            }
        }
    };
    let write = |(at, id): (usize, &ValueId)| {
        let (of, track) = written(at);
        Moving { value: outer(*id), of, track, first: None }
    };
    let reads = body.inputs.iter().zip(&sequence.reads).map(read);
    let moving = reads.chain(body.outputs.iter().enumerate().map(write)).collect();
    Ok(Steps { n_steps: sequence.n_steps, steps: steps.into_iter().map(step).collect(), moving })
}

/// Offset of a slice in elements, if it is contiguous.
fn contiguous(net: &Net, node: &Node, parts: &[(i64, i64)]) -> Option<i64> {
    let (from, to) = (net.shape(node.input(0)), net.shape(node.output()));
    let cut: Vec<usize> = (0..from.len()).filter(|&d| from[d] != to[d]).collect();
    let Some(&first) = cut.first() else {
        return parts.iter().all(|part| *part == (0, 1)).then_some(0);
    };
    let is_one = cut.len() == 1 && from[..first].iter().all(|&n| n == 1) && parts.iter().all(|part| part.1 == 1);
    is_one.then(|| parts[first].0 * from[first + 1..].iter().product::<i64>())
}

/// Whether tensors one behind the other are so in memory too.
fn is_flat(net: &Net, node: &Node, axis: usize) -> bool {
    net.shape(node.output())[..axis].iter().all(|&n| n == 1)
}

fn is_anchor(kind: &Kind) -> bool {
    matches!(kind, Kind::Conv(_) | Kind::Product { .. } | Kind::Packed(_))
}

/// Operand kind of an input of a result, per channel or per element, and its type; `None` for others.
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

/// Maps behind products and convolutions become their epilogues, as far as they can.
fn absorb_maps(net: &mut Net, epilogues: &mut Vec<Operations>) {
    let mut job = Absorbing::new(net, std::mem::take(epilogues));
    // A kernel of two products could take the map of either: the later one has what the other computes.
    for at in (0..job.net.nodes.len()).rev() {
        let mut anchor = is_anchor(&job.net.nodes[at].kind).then_some(at);
        while let Some(at) = anchor {
            anchor = job.absorb(at);
        }
    }
    *epilogues = job.done();
}

/// Nodes on their way into others' epilogues. They keep their indices until all is done.
struct Absorbing<'a> {
    net: &'a mut Net,
    epilogues: Vec<Operations>,
    /// Nodes that read each value, and some that did.
    users: Vec<Vec<usize>>,
    is_output: Vec<bool>,
    is_removed: Vec<bool>,
    /// Sort key of each node: the place that it ends at, and the order of anchors that moved there.
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

    /// Puts the nodes that are left in their order, and returns their epilogues.
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

    /// Follows maps of numbers, each read by the next alone, to one that makes integers of 8 bits: finds
    /// their places, the last one's place, and the map of all. `None` where the first makes such integers
    /// itself.
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

    /// Takes what it can of the map behind an anchor, or of several one behind the other; where it then
    /// stands, if a further map may follow.
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

    /// Takes what it can of a map behind an anchor: of one made of several, of which `passed` are all but the
    /// last, all of it or a part of it that is quantized. `None` where it takes nothing, else where it then
    /// stands, if a further map may follow.
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
        // The result itself is nowhere but in the kernel.
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
        // The operands are the anchor's inputs from now on, so that they are computed before it.
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
        // Just ahead of the rest, where all operands are there.
        self.order[at] = (self.order[user].0, self.n_moved);
        self.n_moved += 1;
        self.epilogues[at] = all;
        self.set(at, anchor);
        Some(None)
    }
}

/// Takes a map, or a part of it, that quantizes what an anchor gives: the operations of the anchor with it,
/// that part, and its type.
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
        Some((closing(net, node, (quantized, slot), dtype, operands, before)?, part.clone(), of_value))
    })
}

/// The kernel's channel axis.
fn channel_axis(kind: &Kind, out: &[i64]) -> usize {
    if matches!(kind, Kind::Conv(_)) { 1 } else { out.len() - 1 }
}

/// Maps ahead of convolutions become their prologues where nothing else reads them: to compute one again
/// costs less than to write it and to read it back. A nest that makes a map's input for it alone keeps it.
fn absorb_prologues(net: &mut Net, epilogues: &mut Vec<Operations>) -> Vec<Operations> {
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
        // A nest that nobody else reads computes the map too.
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

/// Leaves out the entries at these places, which are in order.
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

/// A map as a prologue, where it is cheap and reads one input besides constants by channel: that input, and
/// the operations with their constants.
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
        Function::Bias | Function::Scale | Function::Linear | Function::Relu | Function::LeakyRelu => true,
        Function::Clip | Function::HardSigmoid | Function::HardSwish => true,
        Function::Add | Function::Mul => false,
        Function::Sigmoid | Function::Tanh | Function::Gelu | Function::Silu => false,
        Function::Init | Function::Dequant | Function::QuantU8 | Function::QuantI8 => false,
        Function::Round | Function::AddU8 => false,
    });
    if part != *value || !is_cheap || operations.is_empty() {
        return None;
    }
    let own: Operations = operations
        .into_iter()
        .map(|(operation, slot)| (operation, slot.map(|slot| node.inputs[slot].expect("a map has all inputs").0)))
        .collect();
    let check = Workload::parse("conv2d:c=1,h=1,w=1,k=1,r=1,s=1").expect("it is one");
    check.with_prologue(own.iter().map(|(operation, _)| *operation).collect()).ok()?;
    Some((x, own))
}

/// Operations that begin with one factor and one term by channel where they began with several.
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
            (Function::Scale, _) => Some((by(at)?, 0.0)),
            (Function::Bias, _) => Some((1.0, by(at)?)),
            (Function::Linear, [factor, term]) => Some((*factor, *term)),
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
    for (name, function, numbers) in [("scale", Function::Scale, factor), ("bias", Function::Bias, term)] {
        let numbers: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
        let id = net.add_constant(name, &[numbers.len() as i64, 1, 1], &numbers);
        joined.push((Epilogue::new(function, &[]).expect("it has no numbers"), Some(id.0)));
    }
    joined.extend(operations.into_iter().skip(n_joined));
    joined
}

/// The workload of an anchor with its prologue and epilogue, and its inputs in the order of the program's.
fn anchored(
    net: &Net,
    node: &Node,
    head: &str,
    names: &[&str],
    operations: [&Operations; 2],
) -> Result<Kernel, WorkloadError> {
    let [prologue, epilogue] =
        operations.map(|list| list.iter().map(|(operation, _)| *operation).collect::<Vec<Epilogue>>());
    let mut inputs: Vec<ValueId> = (0..names.len()).map(|at| node.input(at)).collect();
    let padding = padding(net, node);
    let mut constants = Vec::new();
    let is_constant = |id: ValueId| net.value(id).constant.is_some();
    constants.extend(names.iter().zip(&inputs).filter(|(_, id)| is_constant(**id)).map(|(name, _)| (*name).to_owned()));
    inputs.extend(padding);
    constants.extend(padding.map(|_| "x_zero".to_owned()));
    let operands = [Epilogue::prologue_operands(&prologue), Epilogue::operands(&epilogue)];
    for (operands, operations) in operands.into_iter().zip(operations) {
        for (at, name, _) in operands {
            let id = ValueId(operations[at].1.expect("an operation with an operand has an input"));
            inputs.push(id);
            constants.extend(is_constant(id).then(|| name.to_lowercase()));
        }
    }
    let workload = Workload::parse(head)?.with_prologue(prologue)?.with_epilogue(epilogue)?;
    // Some operators do not have their first input constant.
    let known = workload.operator().constants;
    constants.retain(|name| !names.contains(&name.as_str()) || known.contains(&name.as_str()));
    let workload = workload.with_constants(constants)?;
    let (output, origin, members) = (node.output(), node.origin.clone(), Vec::new());
    Ok(Kernel { workload, inputs, output, origin, members, block: 1, in_blocks: 1, open: None })
}

fn convolution(
    net: &Net,
    node: &Node,
    conv: &Convolution,
    operations: [&Operations; 2],
) -> Result<Kernel, WorkloadError> {
    let [x, w] = [0, 1].map(|slot| net.shape(node.input(slot)));
    let mut head = head_of(conv, x, w, net.shape(node.output())[1]);
    if let Some(types) = types_of(net, node) {
        head += &format!(",dtype={types},x_zero={}", u8::from(padding(net, node).is_some()));
    }
    anchored(net, node, &head, &["x", "w"], operations)
}

/// The operator and sizes of a convolution of images by weights of these shapes to some channels.
pub(crate) fn head_of(conv: &Convolution, x: &[i64], w: &[i64], n_channels: i64) -> String {
    let is_depthwise = conv.groups == x[1] && conv.groups > 1 && !conv.transposed;
    let channels = match (is_depthwise, conv.transposed) {
        (true, _) => format!("multiplier={}", n_channels / x[1]),
        (false, true) => format!("k={n_channels}"),
        (false, false) => {
            format!("k={n_channels},groups={},interleave={}", conv.groups, u8::from(conv.interleaved))
        }
    };
    let operator = match (is_depthwise, conv.transposed) {
        (true, _) => "depthwise_conv2d",
        (_, true) => "conv2d_transpose",
        _ => "conv2d",
    };
    let Convolution { strides: [sh, sw], dilations: [dh, dw], before: [bh, bw], after: [ah, aw], .. } = &conv;
    format!(
        "{operator}:n={},c={},h={},w={},r={},s={},{channels},stride_h={sh},stride_w={sw},pad_top={bh},pad_left={bw},\
         pad_bottom={ah},pad_right={aw},dilation_h={dh},dilation_w={dw}",
        x[0], x[1], x[2], x[3], w[2], w[3]
    )
}

fn product(
    net: &Net,
    node: &Node,
    (turned, heads): (bool, Option<AsHeads>),
    operations: [&Operations; 2],
) -> Result<Kernel, WorkloadError> {
    let (a, out) = (net.shape(node.input(0)), net.shape(node.output()));
    let k = a[a.len() - 1];
    if let Some(AsHeads { b, of_a, of_b, beside }) = heads {
        let (m, n) = (if beside { out[0] } else { out[1] }, out[2]);
        let bit = u8::from;
        let head = format!(
            "heads_matmul:b={b},m={m},n={n},k={k},tb={},ha={},hb={},hc={},a_before={},a_after={},b_before={},b_after={}",
            bit(turned),
            bit(of_a.beside),
            bit(of_b.beside),
            bit(beside),
            of_a.before,
            of_a.after,
            of_b.before,
            of_b.after,
        );
        return anchored(net, node, &head, &["a", "b"], operations);
    }
    let types = types_of(net, node).map_or(String::new(), |types| format!(",dtype={types}"));
    let (head, names) = match (out, turned) {
        (&[m, n], true) => (format!("dense:m={m},n={n},k={k}{types}"), ["x", "w"]),
        (&[m, n], false) => (format!("matmul:m={m},n={n},k={k}{types}"), ["a", "b"]),
        (_, turned) => {
            let [b, m, n] = [out[0], out[1], out[2]];
            (format!("batch_matmul:b={b},m={m},n={n},k={k},tb={}", u8::from(turned)), ["a", "b"])
        }
    };
    anchored(net, node, &head, &names, operations)
}

fn packed(net: &Net, node: &Node, packing: Packing, epilogue: &Operations) -> Result<Kernel, WorkloadError> {
    let (a, out) = (net.shape(node.input(0)), net.shape(node.output()));
    let Packing { bits, block, has_zeros, rounds } = packing;
    let (m, n, k) = (out[0], out[1], a[1]);
    let [zeros, rounds] = [has_zeros, rounds].map(u8::from);
    let head = format!("packed_matmul:m={m},n={n},k={k},bits={bits},block={block},zeros={zeros},int8={rounds}");
    anchored(net, node, &head, &["a", "w", "s", "z"][..3 + usize::from(has_zeros)], [&Vec::new(), epilogue])
}

/// The nodes of each nest, by its last one, in order.
fn groups(net: &Net) -> Vec<Option<Vec<usize>>> {
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
        // Until nothing joins: a value with several readers may when they all have.
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
            // What is read, by way of views perhaps that change nothing but dimensions of one element.
            let candidate = |id: ValueId| {
                let view = producers[id.0].filter(|&at| is_plain_view(at) && !is_taken[at]);
                let id = view.map_or(id, |view| net.nodes[view].input(0));
                let at = producers[id.0].filter(|at| is_free(*at))?;
                let mut found = Candidate { at, ids: vec![id], views: Vec::new(), users: Vec::new() };
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
            let fits = |new: &Candidate| n_operations + operations_of(&net.nodes[new.at]) <= MOST_OPERATIONS;
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

fn is_of_nest(net: &Net, node: &Node) -> bool {
    match &node.kind {
        Kind::Map(_) | Kind::Transpose(_) | Kind::Pad(..) | Kind::Pick(_) | Kind::Reduce(..) | Kind::Window(..) => true,
        Kind::Gather { .. } => true,
        Kind::Slice(parts) => contiguous(net, node, parts).is_none(),
        Kind::Concat(axis) => !is_flat(net, node, *axis),
        Kind::View | Kind::Conv(_) | Kind::Product { .. } | Kind::Packed(_) | Kind::Sequence(_) => false,
        Kind::Call(_) | Kind::Host(_) | Kind::Append(_) => false,
    }
}

/// Operations of a nest, at most: it is compiled as one function, and may be one expression.
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

/// A tensor is computed ahead of its readers where these have this many times as many elements.
const LITTLE: i64 = 8;

/// A node that only nodes of a nest read.
struct Candidate {
    at: usize,
    /// Results of the node, and views of them.
    ids: Vec<ValueId>,
    /// The nodes of these views.
    views: Vec<usize>,
    /// Nodes that read it or a view.
    users: Vec<usize>,
}

/// Whether a node can be computed within the nest of those that read it.
fn may_join(net: &Net, members: &[usize], root: usize, Candidate { at, ids, users, .. }: &Candidate) -> bool {
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
    // What is gathered from is in memory.
    let gathers_from = |user: &usize| {
        let user = &net.nodes[*user];
        matches!(user.kind, Kind::Gather { .. }) && user.inputs[0].is_some_and(|id| ids.contains(&id))
    };
    let is_little = n_own * LITTLE <= n_root && !has_window;
    if users.iter().any(gathers_from) {
        return false;
    }
    match &node.kind {
        Kind::Gather { .. } => users.len() == 1 && !has_window && n_own >= n_root,
        Kind::Map(value) => {
            // What is of a row is computed once for it.
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
            // Nothing of it is computed twice, as it is computed ahead.
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

/// Builds the program of a nest.
struct Builder<'a> {
    net: &'a Net,
    /// Builder of the program; `None` while a stage is made.
    program: Option<ProgramBuilder>,
    /// The members that compute each value.
    producers: Vec<(ValueId, usize)>,
    /// Values that are in buffers.
    buffers: Vec<(ValueId, BufferId)>,
    /// Whether all values have elements of one type.
    is_of_one_type: bool,
    /// Function for the block of adjacent channels of a value.
    block_of: &'a dyn Fn(ValueId) -> i64,
    /// Function for what runs say of a dimension of a value.
    open: &'a dyn Fn(ValueId, usize) -> Option<(Size, Range)>,
    /// Loops along such dimensions.
    ends: Vec<OpenLoop>,
}

/// Makes a nest; `block_of` tells the block of adjacent channels of each image.
pub(crate) fn nest(net: &Net, members: &[usize], block_of: &dyn Fn(ValueId) -> i64) -> Result<Kernel, WorkloadError> {
    Ok(open_nest(net, members, block_of, &|_, _| None)?.0)
}

/// Makes a nest as [`nest`] does, of values some of whose dimensions are as long as runs say, at most as in
/// the net: `open` tells which, with the range. Returns the sizes that are then the workload's, in its order.
pub(crate) fn open_nest(
    net: &Net,
    members: &[usize],
    block_of: &dyn Fn(ValueId) -> i64,
    open: &dyn Fn(ValueId, usize) -> Option<(Size, Range)>,
) -> Result<(Kernel, Vec<Size>), WorkloadError> {
    let nodes: Vec<&Node> = members.iter().map(|&at| &net.nodes[at]).collect();
    let root = *nodes.last().expect("a nest has a node");
    let producers: Vec<(ValueId, usize)> = nodes.iter().zip(members).map(|(node, &at)| (node.output(), at)).collect();
    let is_inside = |id: ValueId| producers.iter().any(|(own, _)| *own == id);
    let mut inputs: Vec<ValueId> = Vec::new();
    for id in nodes.iter().flat_map(|node| node.inputs.iter().flatten()) {
        if !is_inside(*id) && !inputs.contains(id) && net.scalar(*id).is_none() {
            inputs.push(*id);
        }
    }
    let mut constants = Vec::new();
    for (at, id) in inputs.iter().enumerate() {
        constants.extend(net.value(*id).constant.is_some().then(|| format!("i{at}")));
    }
    let mut program = ProgramBuilder::new("nest", DType::F32, constants);
    let dtype_of = |id: ValueId| net.element_type(id).expect("nests are of types that have code");
    let of_input = |(at, id): (usize, &ValueId)| {
        program.set_dtype(dtype_of(*id));
        (*id, program.input(&format!("I{at}"), &in_memory(net.shape(*id), block_of(*id))))
    };
    let buffers = inputs.iter().enumerate().map(of_input).collect();
    let all = || nodes.iter().flat_map(|node| node.inputs.iter().flatten().chain(&node.outputs));
    let is_of_one_type = all().all(|id| dtype_of(*id) == dtype_of(root.output())) && net.stays(root.output());
    let ends = Vec::new();
    let mut builder = Builder { net, program: Some(program), producers, buffers, is_of_one_type, block_of, open, ends };
    for (at, node) in nodes.iter().enumerate() {
        let is_root = at + 1 == nodes.len();
        if is_root || is_staged(net, node, &nodes) {
            builder.stage(node, &format!("T{at}"), is_root);
        }
    }
    let origin = nodes.iter().map(|node| node.origin.clone()).reduce(|a, b| joined(&a, &b)).unwrap_or_default();
    let program = builder.program.expect("it is there between stages").finish();
    let (program, sizes) = with_open_loops(program, builder.ends);
    let workload = Workload::nest(program)?;
    let (output, members, block) = (root.output(), members.to_vec(), block_of(root.output()));
    Ok((Kernel { workload, inputs, output, origin, members, block, in_blocks: 1, open: None }, sizes))
}

/// A loop that runs as far as a run says.
struct OpenLoop {
    name: String,
    size: Size,
    range: Range,
    /// Multiple of iterations that run: those beyond the size leave what they combine as it is.
    multiple: i64,
}

/// Iterations of an open reduction along contiguous elements that run at a time, at most and at least: whole
/// vectors, so that their lanes can be parts of one result.
const MOST_AT_ONCE: i64 = 64;
const LEAST_AT_ONCE: i64 = 16;

/// The multiple of iterations that an open reduction runs, where the largest size is such a multiple.
fn at_once(range: Range) -> i64 {
    let halved = std::iter::successors(Some(MOST_AT_ONCE), |n| (*n > LEAST_AT_ONCE).then_some(n / 2));
    halved.into_iter().find(|n| range.most % n == 0).unwrap_or(1)
}

/// Has loops of a program run as far as runs say; the sizes, in the program's order.
fn with_open_loops(mut program: Program, ends: Vec<OpenLoop>) -> (Program, Vec<Size>) {
    /// Extents of loops, and where what they combine ends.
    type Ends = HashMap<LoopId, (Index, Option<Index>)>;
    fn run_to(block: &mut [Stmt], ends: &Ends, inside: &Cond) {
        for stmt in block {
            let mut inside = inside.clone();
            if let Stmt::For(l) = stmt
                && let Some((extent, end)) = ends.get(&l.var)
            {
                l.extent = extent.clone();
                inside = end.iter().fold(inside, |inside, end| inside.and(Cond::Lt(l.var.into(), end.clone())));
            }
            if let (Stmt::Update { op, value, .. }, true) = (&mut *stmt, inside != Cond::True) {
                let own = std::mem::replace(value, Expr::Const(0.0));
                *value = Expr::Select(Box::new(inside.clone()), Box::new(own), Box::new(Expr::Const(op.identity())));
            }
            stmt.blocks_mut().for_each(|inner| run_to(inner, ends, &inside));
        }
    }
    let mut sizes: Vec<Size> = Vec::new();
    let mut extent = |program: &mut Program, size: Size, Range { least, most, step }: Range| {
        let at = sizes.iter().position(|known| *known == size).unwrap_or_else(|| {
            let name = format!("s{}", sizes.len());
            let var = program.add_loop(format!("{name}.steps"));
            program.sizes.push(OpenSize { name, var, least, step, n_values: (most - least) / step + 1 });
            sizes.push(size);
            sizes.len() - 1
        });
        program.sizes[at].index()
    };
    let mut found = Ends::new();
    for OpenLoop { name, size, range, multiple } in ends {
        let Some(var) = program.find_loop(&name) else { continue };
        let end = extent(&mut program, size, range);
        if multiple == 1 {
            found.insert(var, (end, None));
            continue;
        }
        let least = (range.least + multiple - 1) / multiple * multiple;
        let whole = extent(&mut program, Size { multiple, ..size }, Range { least, step: multiple, ..range });
        found.insert(var, (whole, Some(end)));
    }
    run_to(&mut program.body, &found, &Cond::True);
    (program, sizes)
}

/// Shape in memory, with one dimension at least; of images with blocks of `block` adjacent channels.
pub(crate) fn in_memory(shape: &[i64], block: i64) -> Vec<i64> {
    match *shape {
        [] => vec![1],
        [n, c, h, w] if block > 1 => vec![n, c / block, h, w, block],
        _ => shape.to_vec(),
    }
}

/// Whether a value of a nest is computed once for all that read it, rather than by each of them.
fn is_staged(net: &Net, node: &Node, nodes: &[&Node]) -> bool {
    let id = node.output();
    // What is gathered is looked up once.
    const LOOK_UP: usize = 4;
    let gathers = |id: &ValueId| nodes.iter().any(|n| n.output() == *id && matches!(n.kind, Kind::Gather { .. }));
    let own_cost = match &node.kind {
        Kind::Reduce(..) | Kind::Window(..) => return true,
        Kind::Map(value) => cost(value) + LOOK_UP * node.inputs.iter().flatten().filter(|id| gathers(id)).count(),
        Kind::Gather { .. } => LOOK_UP,
        _ => return false,
    };
    let n_own = net.value(id).n_elements();
    // As itself, or as a view of it within the nest.
    let views = nodes.iter().filter(|n| matches!(n.kind, Kind::View) && n.input(0) == id).map(|n| n.output());
    let ids: Vec<Option<ValueId>> = views.chain([id]).map(Some).collect();
    let reads_it = |user: &&&Node| !matches!(user.kind, Kind::View) && user.inputs.iter().any(|id| ids.contains(id));
    let users: Vec<&&Node> = nodes.iter().filter(reads_it).collect();
    let is_larger =
        |user: &&&Node| net.value(user.output()).n_elements() > n_own && !matches!(user.kind, Kind::Reduce(..));
    let n_reads: usize = users
        .iter()
        .map(|user| match &user.kind {
            Kind::Map(outer) => {
                let slots: Vec<usize> = (0..user.inputs.len()).filter(|&s| ids.contains(&user.inputs[s])).collect();
                scalar::inputs(outer).iter().filter(|slot| slots.contains(slot)).count()
            }
            _ => 1,
        })
        .sum();
    own_cost > 2 && (n_reads > 1 || users.iter().any(is_larger))
}

impl Builder<'_> {
    /// Computes a node into a buffer.
    fn stage(&mut self, node: &Node, name: &str, is_root: bool) {
        let role = if is_root { Role::Output } else { Role::Temporary };
        let block = (self.block_of)(node.output());
        let shape = in_memory(self.net.shape(node.output()), block);
        let names: Vec<String> = (0..shape.len()).map(|d| format!("{}{d}", name.to_lowercase())).collect();
        let axes: Vec<(&str, i64)> = names.iter().map(String::as_str).zip(shape.iter().copied()).collect();
        let rank = axes.len();
        let mut program = self.program.take().expect("it is there between stages");
        let this = &*self;
        // The loops of a reduction, with the dimensions that they are along.
        let (op, reduced): (Option<ReduceOp>, Vec<(usize, i64)>) = match &node.kind {
            Kind::Reduce(op, dims) => {
                let from = this.net.shape(node.input(0));
                (Some(*op), dims.iter().map(|&d| (d, from[d])).collect())
            }
            Kind::Window(op, windows) => {
                let long = windows.kernel.iter().copied().enumerate().filter(|(_, n)| *n > 1);
                (Some(*op), long.collect())
            }
            _ => (None, Vec::new()),
        };
        let inner_names: Vec<String> = (0..reduced.len()).map(|d| format!("{}r{d}", name.to_lowercase())).collect();
        let open = self.open;
        let of_axes = names.iter().enumerate().filter_map(|(d, name)| Some((name, open(node.output(), d)?, 1)));
        let of_inner = inner_names.iter().zip(&reduced);
        let of_inner = of_inner.filter_map(|(name, (d, _))| match node.kind {
            Kind::Reduce(..) => {
                let (size, range) = open(node.input(0), *d)?;
                let is_last = d + 1 == self.net.shape(node.input(0)).len();
                Some((name, (size, range), if is_last { at_once(range) } else { 1 }))
            }
            _ => None,
        });
        let end =
            |(name, (size, range), multiple): (&String, _, _)| OpenLoop { name: name.clone(), size, range, multiple };
        let ends: Vec<OpenLoop> = of_axes.chain(of_inner).map(end).collect();
        let inner: Vec<(&str, i64)> =
            inner_names.iter().map(String::as_str).zip(reduced.iter().map(|(_, n)| *n)).collect();
        let value = |vars: &[Index]| -> Expr {
            let (places, sums) = vars.split_at(rank);
            let out = &match places {
                [n, blocks, h, w, c] if block > 1 => vec![n.clone(), blocks.scale(block).add(c), h.clone(), w.clone()],
                _ => places.to_vec(),
            };
            match &node.kind {
                Kind::Reduce(..) => {
                    let mut at = out.to_vec();
                    reduced.iter().zip(sums).for_each(|((d, _), var)| at[*d] = var.clone());
                    this.element(node.input(0), &at)
                }
                Kind::Window(op, windows) => this.tap(node.input(0), node.output(), windows, *op, out, &reduced, sums),
                _ => this.computed(node, out),
            }
        };
        let reduce = op.map(|op| (op, &inner[..]));
        let spec = StageSpec { name, axes: &axes, reduce, role };
        program.set_dtype(this.net.element_type(node.output()).expect("nests are of types that have code"));
        let buffer = program.stage(spec, value);
        self.program = Some(program);
        self.ends.extend(ends);
        self.buffers.push((node.output(), buffer));
    }

    /// Term of a window for one of its positions.
    #[expect(clippy::too_many_arguments, reason = "they are what a stage has")]
    fn tap(
        &self,
        from: ValueId,
        to: ValueId,
        windows: &Windows,
        op: ReduceOp,
        out: &[Index],
        reduced: &[(usize, i64)],
        sums: &[Index],
    ) -> Expr {
        let (shape, extents) = (self.net.shape(from), self.net.shape(to));
        let (mut at, mut inside) = (Vec::with_capacity(out.len()), Cond::True);
        for d in 0..out.len() {
            let (stride, dilation, before) = (windows.strides[d], windows.dilations[d], windows.before[d]);
            let first = out[d].scale(stride).offset(-before);
            let place = match reduced.iter().position(|(dim, _)| *dim == d) {
                Some(tap) => first.add(&sums[tap].scale(dilation)),
                None => first,
            };
            if before > 0 {
                inside = inside.and(Cond::Lt(Index::from(-1), place.clone()));
            }
            if (extents[d] - 1) * stride + (windows.kernel[d] - 1) * dilation - before >= shape[d] {
                inside = inside.and(Cond::Lt(place.clone(), Index::from(shape[d])));
            }
            at.push(place);
        }
        let value = self.element(from, &at);
        match inside {
            Cond::True => value,
            _ => Expr::Select(Box::new(inside), Box::new(value), Box::new(Expr::Const(op.identity()))),
        }
    }

    /// An element of a value, where it is in a buffer or computed.
    fn element(&self, id: ValueId, at: &[Index]) -> Expr {
        let shape = self.net.shape(id);
        // Numbers that broadcast are read at their only place.
        let missing = at.len() - shape.len().min(at.len());
        let at: Vec<Index> = shape
            .iter()
            .enumerate()
            .map(|(d, &n)| if n == 1 { Index::from(0) } else { at[d + missing].clone() })
            .collect();
        if let Some((_, buffer)) = self.buffers.iter().find(|(own, _)| *own == id) {
            let place = match (&at[..], (self.block_of)(id)) {
                ([], _) => vec![Index::from(0)],
                ([n, c, h, w], block @ 2..) => {
                    vec![n.clone(), c.floor_div(block), h.clone(), w.clone(), c.modulo(block)]
                }
                _ => at,
            };
            return Expr::Load(*buffer, place);
        }
        if let Some(x) = self.net.literal(id) {
            return x;
        }
        let (_, producer) = self.producers.iter().find(|(own, _)| *own == id).expect("a nest computes what it reads");
        let value = self.computed(&self.net.nodes[*producer], &at);
        match self.net.element_type(id) {
            // It is computed in the type of its own.
            Some(dtype) if !self.is_of_one_type => Expr::cast(dtype, value),
            _ => value,
        }
    }

    /// An element of what a node computes, of those that it reads.
    fn computed(&self, node: &Node, at: &[Index]) -> Expr {
        match &node.kind {
            Kind::Map(value) => value.map_loads(&mut |slot, _| Some(self.element(node.input(slot.0 as usize), at))),
            // Only dimensions of one element differ.
            Kind::View => {
                let mut long = at.iter().zip(self.net.shape(node.output())).filter(|(_, n)| **n != 1);
                let place = |n: &i64| match n {
                    1 => Index::from(0),
                    _ => long.next().expect("a view keeps its long dimensions").0.clone(),
                };
                let from: Vec<Index> = self.net.shape(node.input(0)).iter().map(place).collect();
                self.element(node.input(0), &from)
            }
            Kind::Transpose(order) => {
                let mut from = vec![Index::from(0); order.len()];
                order.iter().zip(at).for_each(|(&d, place)| from[d] = place.clone());
                self.element(node.input(0), &from)
            }
            Kind::Slice(parts) => {
                let from: Vec<Index> =
                    at.iter().zip(parts).map(|(place, (start, step))| place.scale(*step).offset(*start)).collect();
                self.element(node.input(0), &from)
            }
            Kind::Pick(lines) => {
                let place = |(place, line): (&Index, &crate::net::Line)| {
                    let line_at = place.scale(line.factor).offset(line.term);
                    if line.divisor == 1 { line_at } else { line_at.floor_div(line.divisor) }
                };
                let from: Vec<Index> = at.iter().zip(lines).map(place).collect();
                self.element(node.input(0), &from)
            }
            Kind::Pad(before, fill) => {
                let shape = self.net.shape(node.input(0));
                let out = self.net.shape(node.output());
                let from: Vec<Index> = at.iter().zip(before).map(|(place, before)| place.offset(-before)).collect();
                let mut inside = Cond::True;
                for d in 0..from.len() {
                    if before[d] > 0 {
                        inside = inside.and(Cond::Lt(Index::from(-1), from[d].clone()));
                    }
                    if out[d] - before[d] > shape[d] {
                        inside = inside.and(Cond::Lt(from[d].clone(), Index::from(shape[d])));
                    }
                }
                let value = self.element(node.input(0), &from);
                Expr::Select(Box::new(inside), Box::new(value), Box::new(Expr::Const(*fill)))
            }
            Kind::Concat(axis) => {
                let mut end = self.net.shape(node.output())[*axis];
                let mut value: Option<Expr> = None;
                for id in node.inputs.iter().flatten().rev() {
                    let n = self.net.shape(*id)[*axis];
                    let start = end - n;
                    let mut from = at.to_vec();
                    from[*axis] = at[*axis].offset(-start);
                    let own = self.element(*id, &from);
                    value = Some(match value {
                        None => own,
                        Some(behind) => {
                            let is_own = Cond::Lt(at[*axis].clone(), Index::from(end));
                            Expr::Select(Box::new(is_own), Box::new(own), Box::new(behind))
                        }
                    });
                    end = start;
                }
                value.expect("a concat has inputs")
            }
            Kind::Gather { axis, by_element } => {
                let [table, numbers] = [0, 1].map(|slot| node.input(slot));
                let n = if *by_element { 1 } else { self.net.shape(numbers).len() };
                let of_number = if *by_element { at } else { &at[*axis..axis + n] };
                let number = Subscript::Value(Box::new(self.element(numbers, of_number)));
                let known = |at: &[Index]| at.iter().cloned().map(Subscript::Index).collect::<Vec<_>>();
                let subscripts = [known(&at[..*axis]), vec![number], known(&at[axis + n..])].concat();
                match self.buffers.iter().find(|(own, _)| *own == table) {
                    Some((_, buffer)) => Expr::Gather(*buffer, subscripts),
                    None => self.net.literal(table).expect("what is gathered from is in memory"),
                }
            }
            _ => unreachable!("reductions are computed into buffers"),
        }
    }
}
