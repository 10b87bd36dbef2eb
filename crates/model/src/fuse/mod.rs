//! Operator fusion: a simplified net becomes kernels, which are products and convolutions with their
//! epilogues, and loop nests of all other operations.

mod absorb;
mod groups;
mod nest;
mod pairs;
mod pixels;
mod repeat;
mod workload;

use std::borrow::Cow;
use std::collections::HashMap;

use tilewright_graph::{Graph, Op, with_both_branches};
use tilewright_ir::Target;
use tilewright_ir::op::{SizeRange, Structure, Workload, WorkloadError};
use tilewright_runtime::{OpenDimension, RunSize};

use self::absorb::{absorb_maps, absorb_prologues};
use self::groups::groups;
pub(crate) use self::nest::{nest, open_nest};
use self::pairs::pair_products;
pub use self::repeat::RunLoop;
use self::repeat::steps_of_loop;
pub(crate) use self::workload::convolution_of;
use self::workload::{convolution, packed, product};
use crate::attention::{Level2, divide_attention, divide_heads};
use crate::epilogue::Operations;
use crate::half_precision::widened;
use crate::import::import;
use crate::net::{Evaluated, Kind, Net, Node, Read, Sequence, Track, ValueId};
use crate::no_code::NoCode;
use crate::open::{Groups, OpenNet, exchange_columns, has_open_columns};
use crate::quantized::epilogue::opening;
use crate::quantized::graph::{has_dots, in_bytes};
use crate::quantized::has_7_bits;
use crate::rules::{Trace, simplify};

/// Kernel of a fused net: its workload, inputs and output.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Workload for tuning and compilation.
    pub workload: Workload,
    /// Inputs in argument order.
    pub inputs: Vec<ValueId>,
    /// Output.
    pub output: ValueId,
    /// Names of the model's nodes that it was fused from, for display.
    pub origin: String,
    /// Nodes of the net that a nest computes, the last of which yields the kernel's output; empty for other
    /// kernels, and for a layout conversion.
    pub(crate) members: Vec<usize>,
    /// Channel block of its output (NCHWc); 1 for the plain layout.
    pub block: i64,
    /// Channel block of a nest's images, or of a conversion's input or output; 1 if all are plain.
    pub(crate) in_blocks: i64,
    /// Open sizes, if the kernel depends on an open dimension of the model.
    pub(crate) open: Option<Box<Open>>,
}

/// Open sizes of a kernel, which each run determines.
#[derive(Debug, Clone)]
pub(crate) struct Open {
    /// Sizes of the workload, in its order.
    pub(crate) sizes: Vec<RunSize>,
    /// Number of times that the workload's kernel is repeated, the range of that number, and which arguments
    /// advance with each repetition.
    pub(crate) each: Option<(RunSize, SizeRange, Vec<bool>)>,
    /// Number of times that the workload's kernel is executed, each on the next matrix of a batch, if its
    /// second operand is read in the caller's memory, where the batch is ahead of an open dimension.
    pub(crate) apart: Option<i64>,
    /// Number of elements of each input and the output that the code assumes, as other pieces of a run have
    /// more rows; empty if it assumes no more than there are.
    pub(crate) rooms: Vec<i64>,
}

impl Kernel {
    /// Text that kernels with the same code share.
    pub(crate) fn code_name(&self) -> String {
        match self.open.as_ref().and_then(|open| open.each.as_ref()) {
            None => self.workload.to_string(),
            Some((_, range, along)) => format!("{} each={range} {along:?}", self.workload),
        }
    }

    /// Number of elements of an input, or of the output behind them, that its code assumes, if they may be
    /// more than there are.
    pub(crate) fn room(&self, argument: usize) -> Option<usize> {
        self.open.as_ref().and_then(|open| open.rooms.get(argument)).map(|n| *n as usize)
    }

    /// Number of matrices of its second operand that it reads one by one in the caller's memory.
    pub(crate) fn apart(&self) -> Option<i64> {
        self.open.as_ref().and_then(|open| open.apart)
    }

    /// Sizes of its code, in order.
    pub(crate) fn sizes(&self) -> Vec<RunSize> {
        let each = |open: &Open| open.sizes.iter().copied().chain(open.each.as_ref().map(|(size, ..)| *size)).collect();
        self.open.as_ref().map_or(Vec::new(), |open| each(open))
    }
}

/// Step of a run, in the order of [`Fused::steps`].
#[derive(Debug, Clone)]
pub enum Step {
    /// Kernel call.
    Kernel(Kernel),
    /// Steps repeated for each time step of a sequence.
    Sequence(Steps),
    /// Operator without code, evaluated by the reference.
    Host(Node),
    /// Copy of new elements to the end of a state along a dimension.
    Append {
        /// New elements.
        from: ValueId,
        /// State after the copy, in its new length.
        to: ValueId,
        /// Dimension that grows.
        axis: usize,
    },
    /// Copy of a value to the memory of another one.
    Set {
        /// Source.
        from: ValueId,
        /// Destination, of equal size.
        to: ValueId,
    },
    /// Start of a loop: the steps up to its end repeat while its condition holds.
    While(RunLoop),
    /// End of the innermost open loop.
    Again(RunLoop),
    /// View: `part` is `of` from `offset` elements on. No work.
    Part {
        /// Value that is viewed.
        of: ValueId,
        /// View.
        part: ValueId,
        /// Offset in elements.
        offset: i64,
    },
    /// Concatenation; no work for parts that are computed in place.
    Join {
        /// Parts.
        parts: Vec<ValueId>,
        /// Concatenated value.
        whole: ValueId,
    },
}

impl Step {
    /// Number of steps in [`Fused::each`]: those of a sequence, else 1.
    pub(crate) fn n_parts(&self) -> usize {
        if let Step::Sequence(sequence) = self { sequence.steps.len() } else { 1 }
    }
}

/// Steps that repeat for each time step of a sequence.
#[derive(Debug, Clone)]
pub struct Steps {
    /// Number of time steps.
    pub n_steps: i64,
    /// Steps of one iteration: kernels, and views of their results.
    pub steps: Vec<Step>,
    /// Values whose memory differs from time step to time step.
    pub moving: Vec<Moving>,
    /// Nodes of one iteration, of which members of its kernels are.
    pub(crate) nodes: Vec<Node>,
}

impl Steps {
    /// Values outside that the steps read or write.
    pub(crate) fn outer_values(&self) -> impl Iterator<Item = ValueId> {
        self.moving.iter().flat_map(|moving| moving.first.into_iter().chain([moving.of]))
    }

    /// Value that a value of the steps is a part of, if any.
    pub(crate) fn part_of(&self, id: ValueId) -> Option<ValueId> {
        let part = self.steps.iter().find_map(|step| match step {
            Step::Part { of, part, .. } if *part == id => Some(*of),
            _ => None,
        });
        part.or_else(|| self.moving.iter().find(|moving| moving.value == id).map(|moving| moving.of))
    }
}

/// Value that is another slice of a tensor in each time step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moving {
    /// The value.
    pub value: ValueId,
    /// Tensor that contains the slices.
    pub of: ValueId,
    /// Position of the slices; with `first`, that of the previous time step's slice.
    pub track: Track,
    /// Value in the first time step, if it otherwise comes from the previous one.
    pub first: Option<ValueId>,
}

impl Moving {
    /// Tensor that contains the value in a time step, and its offset in elements.
    pub fn at(&self, step: i64) -> (ValueId, i64) {
        match self.first {
            None => (self.of, self.track.at(step)),
            Some(first) if step == 0 => (first, 0),
            Some(_) => (self.of, self.track.at(step - 1)),
        }
    }
}

/// Independent items of a run, such as those of a batch.
#[derive(Debug, Clone)]
pub struct Items {
    /// Dimension that counts the items.
    pub dim: OpenDimension,
    /// Whether each input, and then each output, has a part for each item.
    pub(crate) ports: Vec<bool>,
    /// Groups of items that steps process together, if any.
    pub(crate) groups: Option<Groups>,
}

/// Open dimensions of a model that has a net for each combination of their sizes.
#[derive(Debug, Clone)]
pub struct SizedNets {
    /// The dimensions.
    pub dims: Vec<OpenDimension>,
    /// Sizes of each net, in the order of the nets; for a dimension of which a net supports any size, the
    /// largest.
    pub(crate) sizes: Vec<Vec<i64>>,
}

/// Fused net: the steps of a run, in order.
#[derive(Debug, Clone)]
pub struct Fused {
    /// Values, inputs and outputs.
    pub net: Net,
    /// Steps of the run.
    pub steps: Vec<Step>,
    /// Open (dynamic) dimension, if any; the net is then for its largest size.
    pub open: Option<OpenNet>,
    /// Open (dynamic) number of rows (new tokens) per run, if any; the net is then for the largest piece.
    pub rows: Option<OpenDimension>,
    /// Nets of smaller pieces, in descending order, or of other sizes.
    pub pieces: Vec<Fused>,
    /// Sizes that have nets of their own, if any: this net is for the largest.
    pub sized: Option<SizedNets>,
    /// Dimension of the rows, for each input and then each output.
    pub(crate) axes_of_rows: Vec<Option<usize>>,
    /// Number of items that the net processes, if other numbers have nets of their own; else 1.
    pub(crate) n_items: i64,
    /// Independent items whose number each run gives, if any; the net is then for one item, or for the most
    /// if each number has nets of its own.
    pub items: Option<Items>,
    /// Passes that made the net from a graph.
    pub trace: Trace,
    /// Net before it was fused, if it is one of several sizes of an open dimension: its attention may still
    /// be divided.
    pub(crate) undivided: Option<Box<Undivided>>,
}

/// Net before its attention is divided and its nodes are fused.
#[derive(Debug, Clone)]
pub(crate) struct Undivided {
    net: Net,
    trace: Trace,
    fusing: Fusing,
    l2: Level2,
}

impl Undivided {
    /// Divides the attention of a model lowered at several sizes, the largest last, and fuses the nets;
    /// `None` if there is nothing to divide, or if divided nets have no kernels.
    pub(crate) fn divided(nets: &[Fused]) -> Option<Vec<Fused>> {
        let all: Vec<&Undivided> = nets.iter().map(|fused| fused.undivided.as_deref()).collect::<Option<_>>()?;
        let mut own: Vec<Net> = all.iter().map(|undivided| undivided.net.clone()).collect();
        if divide_heads(&mut own, all[0].l2) == 0 {
            return None;
        }
        let fused = |(net, undivided): (Net, &&Undivided)| {
            let mut trace = undivided.trace.clone();
            trace.pass("divide_attention", undivided.net.nodes.len(), net.nodes.len());
            undivided.fusing.fused(net, trace).ok()
        };
        own.into_iter().zip(&all).map(fused).collect()
    }
}

/// Options of fusing.
#[derive(Debug, Clone, Copy)]
struct Fusing {
    /// Number of columns in turns of products of which one gates the other; `None` if they are not paired.
    pairs: Option<i64>,
    /// Whether kernels round exactly as the graph's operators do.
    exact: bool,
    /// Whether weights of 7 bits are declared as such.
    narrows: bool,
    /// Whether products round their operands to bf16.
    rounds: bool,
}

impl Fusing {
    fn fused(self, net: Net, mut trace: Trace) -> Result<Fused, WorkloadError> {
        let mut fused = fuse_with(net, self.pairs)?;
        trace.0.append(&mut fused.trace.0);
        fused.trace = trace;
        fused.workloads_mut().for_each(|workload| workload.exact |= self.exact);
        if self.narrows {
            fused.narrow_weights();
        }
        if self.rounds {
            fused.round();
        }
        Ok(fused)
    }
}

impl Fused {
    /// Distinct workloads that can be tuned in their order, each with its number of calls per run. A
    /// [representative](Workload::representative) stands for workloads that differ only in numbers.
    pub fn tasks(&self) -> Vec<(Workload, usize)> {
        let mut all = self.distinct_workloads();
        all.retain(|(task, _)| task.has_members_of_one_answer());
        all
    }

    /// Number of distinct workloads that cannot be tuned.
    pub fn n_untunable(&self) -> usize {
        self.distinct_workloads().iter().filter(|(task, _)| !task.has_members_of_one_answer()).count()
    }

    /// Representatives of all workloads, each with its number of calls per run.
    fn distinct_workloads(&self) -> Vec<(Workload, usize)> {
        let mut tasks: Vec<(Workload, usize)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for (step, times) in self.all() {
            if let Step::Kernel(kernel) = step {
                let task = kernel.workload.representative();
                let place = *places.entry(task.to_string()).or_insert(tasks.len());
                match tasks.get_mut(place) {
                    Some((_, n)) => *n += times,
                    None => tasks.push((task, times)),
                }
            }
        }
        tasks
    }

    /// Steps, each with its number of executions per run; those of a sequence one by one. A step of a loop
    /// whose number of iterations is unknown counts once.
    pub fn each(&self) -> impl Iterator<Item = (&Step, usize)> {
        let (mut n, mut outer) = (1_usize, Vec::new());
        self.steps.iter().flat_map(move |step| {
            match step {
                Step::While(round) => {
                    outer.push(n);
                    n = n.saturating_mul(round.n.map_or(1, |n| n as usize));
                }
                Step::Again(_) => n = outer.pop().unwrap_or(1),
                _ => {}
            }
            match step {
                Step::Sequence(sequence) => {
                    let times = n.saturating_mul(sequence.n_steps as usize);
                    sequence.steps.iter().map(|step| (step, times)).collect()
                }
                step => vec![(step, n)],
            }
        })
    }

    /// Whether each of [all](Fused::all) steps is in a loop with an unknown number of iterations.
    pub fn are_uncounted(&self) -> Vec<bool> {
        let (mut are, mut outer) = (Vec::new(), vec![false]);
        for step in self.forms().flat_map(|form| &form.steps) {
            let is_within = *outer.last().expect("all is within nothing");
            match step {
                Step::While(round) => outer.push(is_within || round.n.is_none()),
                Step::Again(_) => drop(outer.pop()),
                _ => {}
            }
            are.extend(std::iter::repeat_n(is_within, step.n_parts()));
        }
        are
    }

    /// Sequences among the steps.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = &Steps> {
        self.steps.iter().filter_map(|step| match step {
            Step::Sequence(sequence) => Some(sequence),
            _ => None,
        })
    }

    /// Workload of each kernel, mutable, for changing its options.
    pub fn workloads_mut(&mut self) -> impl Iterator<Item = &mut Workload> {
        let of_pieces = self.pieces.iter_mut().flat_map(|piece| &mut piece.steps);
        kernels_mut(self.steps.iter_mut().chain(of_pieces)).map(|kernel| &mut kernel.workload)
    }
}

/// Kernels among steps and in sequences of them.
fn kernels_mut<'a>(steps: impl IntoIterator<Item = &'a mut Step>) -> impl Iterator<Item = &'a mut Kernel> {
    let each = steps.into_iter().flat_map(|step| match step {
        Step::Sequence(sequence) => sequence.steps.iter_mut().collect(),
        step => vec![step],
    });
    each.filter_map(|step| match step {
        Step::Kernel(kernel) => Some(kernel),
        _ => None,
    })
}

impl Fused {
    /// Lets products round their operands to bf16 if the target multiplies these faster than f32.
    /// Convolutions of few channels, as of a network's input, are excluded, as their pairs are rarely full.
    pub fn round_factors(&mut self, target: &Target) {
        if target.prefers_dot2() {
            self.round();
            self.undivided.iter_mut().for_each(|undivided| undivided.fusing.rounds = true);
        }
    }

    fn round(&mut self) {
        const LEAST_CHANNELS: i64 = 8;
        let is_worth_it = |workload: &Workload| match workload.structure() {
            Structure::Window(window) => window.c >= LEAST_CHANNELS,
            Structure::Contraction(_) | Structure::Packed(_) | Structure::Nest(_) => true,
        };
        self.workloads_mut().for_each(|workload| workload.bf16 = is_worth_it(workload));
    }
}

impl Fused {
    /// Declares weights of 7 bits as such. Sums of two of their products with bytes fit 16 bits, which
    /// machines without dot products of bytes multiply faster.
    fn narrow_weights(&mut self) {
        let Fused { net, steps, .. } = self;
        let narrow = |kernel: &mut Kernel| {
            let tensor = kernel.inputs.get(1).and_then(|id| net.value(*id).constant.as_ref());
            if let Some(narrow) = kernel.workload.with_7_bit_weights()
                && tensor.is_some_and(has_7_bits)
            {
                kernel.workload = narrow;
            }
        };
        kernels_mut(steps).for_each(narrow);
    }
}

/// Lowers a specialised graph to kernels for a target, which decides whether 8-bit integers are multiplied as
/// such, and for runs with a number of threads, whose caches the scores of attention should fit. With
/// `exact`, kernels round exactly as the graph's operators do: f16 and bf16 after each operator.
///
/// # Errors
/// As [`fuse`].
pub fn lower(graph: &Graph, exact: bool, target: &Target, threads: usize) -> Result<Fused, WorkloadError> {
    let mut trace = Trace::default();
    let with_branches = with_both_branches(graph, target.gpu.is_some());
    trace.graph_pass("both_branches", graph, &with_branches);
    let with_bytes = in_bytes(&with_branches, target);
    trace.graph_pass("in_bytes", &with_branches, &with_bytes);
    let wide = widened(&with_bytes, exact);
    trace.graph_pass("widen", &with_bytes, &wide);
    let wide = with_bodies(wide, &|body| widened(&in_bytes(body, target), exact).into_owned());
    let mut net = import(&wide, has_dots(target));
    net.branches.clone_from(&graph.branches);
    if has_open_columns(&wide) {
        exchange_columns(&mut net);
    }
    if target.gpu.is_some() {
        net.nodes.iter_mut().for_each(evaluate_loop);
    }
    trace.pass("import", wide.nodes().len(), net.nodes.len());
    trace.0.extend(simplify(&mut net).0);
    let is_cpu = target.gpu.is_none();
    let fusing = Fusing {
        // No GPU template supports paired columns.
        pairs: is_cpu.then(|| target.lanes(tilewright_ir::DType::F32)),
        exact,
        narrows: target.adds_pairs_of_bytes(),
        rounds: false,
    };
    let l2 = Level2::new(target, threads);
    let undivided = (is_cpu && net.open_size.is_some())
        .then(|| Box::new(Undivided { net: net.clone(), trace: trace.clone(), fusing, l2 }));
    if is_cpu && undivided.is_none() {
        let n_nodes = net.nodes.len();
        if divide_attention(&mut net, l2) > 0 {
            trace.pass("divide_attention", n_nodes, net.nodes.len());
        }
    }
    Ok(Fused { undivided, ..fusing.fused(net, trace)? })
}

/// Rewrites the bodies of loops, including nested ones.
fn with_bodies<'a>(graph: Cow<'a, Graph>, rewrite: &dyn Fn(&Graph) -> Graph) -> Cow<'a, Graph> {
    if !graph.nodes().any(|(_, node)| matches!(node.op, Op::Loop(_))) {
        return graph;
    }
    let mut graph = graph.into_owned();
    for op in graph.ops_mut() {
        if let Op::Loop(op) = op {
            let body = rewrite(&op.body.graph);
            *op.body.graph = with_bodies(Cow::Owned(body), rewrite).into_owned();
        }
    }
    Cow::Owned(graph)
}

/// Leaves a loop to the reference, since a sequence of GPU launches cannot branch.
fn evaluate_loop(node: &mut Node) {
    if let Kind::Loop(repeat) = &node.kind {
        let (op, reason) = (repeat.op.clone(), NoCode::Form("loops on a GPU whose end a run decides on"));
        node.kind = Kind::Host(Box::new(Evaluated { op, reason }));
    }
}

/// Fuses a simplified net into steps.
///
/// # Errors
/// If an operation is larger than any memory.
pub fn fuse(net: Net) -> Result<Fused, WorkloadError> {
    fuse_with(net, None)
}

/// Fuses a simplified net. If `pairs` is given, products of which one gates the other are fused with that
/// number of columns of each in turns.
fn fuse_with(mut net: Net, pairs: Option<i64>) -> Result<Fused, WorkloadError> {
    let (mut trace, n_nodes) = (Trace::default(), net.nodes.len());
    let mut gated = pairs.map(|columns| pair_products(&mut net, columns)).unwrap_or_default();
    let mut opened = |node: &Node| {
        let of_pair = node.outputs.first().and_then(|id| gated.remove(id));
        of_pair.unwrap_or_else(|| opening(&net, node))
    };
    let mut epilogues: Vec<Operations> = net.nodes.iter().map(&mut opened).collect();
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
                Step::Kernel(product(&net, node, *turned, *heads, [&Vec::new(), &epilogues[at]])?)
            }
            Kind::Packed(packing) => Step::Kernel(packed(&net, node, *packing, &epilogues[at])?),
            Kind::Sequence(sequence) => Step::Sequence(steps_of(&mut net, node, sequence, &mut trace)?),
            Kind::Loop(repeat) => {
                steps.extend(steps_of_loop(&mut net, node, repeat, &mut trace)?);
                continue;
            }
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
    Ok(Fused {
        net,
        steps,
        open: None,
        rows: None,
        pieces: Vec::new(),
        sized: None,
        axes_of_rows: Vec::new(),
        n_items: 1,
        items: None,
        trace,
        undivided: None,
    })
}

/// Makes the steps of a sequence, whose values become values of the enclosing net.
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
    let nodes = body.nodes.iter().map(|node| node.renamed(&outer)).collect();
    let step = |step: Step| match step {
        Step::Kernel(kernel) => {
            let inputs = kernel.inputs.iter().map(|id| outer(*id)).collect();
            Step::Kernel(Kernel { inputs, output: outer(kernel.output), ..kernel })
        }
        Step::Part { of, part, offset } => Step::Part { of: outer(of), part: outer(part), offset },
        _ => {
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
    Ok(Steps { n_steps: sequence.n_steps, steps: steps.into_iter().map(step).collect(), moving, nodes })
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

/// Whether a concatenation of tensors is contiguous in memory.
fn is_flat(net: &Net, node: &Node, axis: usize) -> bool {
    net.shape(node.output())[..axis].iter().all(|&n| n == 1)
}

fn is_anchor(kind: &Kind) -> bool {
    matches!(kind, Kind::Conv(_) | Kind::Product { .. } | Kind::Packed(_))
}

/// Shape in memory, with at least one dimension; images have blocks of `block` adjacent channels.
pub(crate) fn in_memory(shape: &[i64], block: i64) -> Vec<i64> {
    match *shape {
        [] => vec![1],
        [n, c, h, w] if block > 1 => vec![n, c / block, h, w, block],
        _ => shape.to_vec(),
    }
}
