//! Models with open (dynamic) dimensions, whose sizes each run gives.
//!
//! There is no symbolic inference: the model is lowered at a few sizes, and the results are compared. Numbers
//! that differ, such as those of shapes, must be affine in the size of one dimension; everything else must be
//! equal. The result is the net of the largest sizes: tensors have the layout for these, and kernels process
//! only the part for the sizes of a run, by their number of rows or within rows.

mod columns;
mod comparison;
mod groups;
mod items;
mod least;
pub(crate) mod loops;
mod pieces;
mod pitch;
mod sized;
mod vary;

use std::collections::HashMap;

use tilewright_graph::{Tensor, TensorType};
use tilewright_ir::op::{Contraction, Epilogue, Heads, Operand, SizeRange, Structure, Window, WorkloadError};
use tilewright_runtime::{OpenDimension, RunSize};

use crate::fuse::{Fused, Kernel, Moving, Open, Step, Steps, Undivided, nest, open_nest};
use crate::layouts::{block_of, conversion_of};
use crate::net::{Kind, Line, Net, Node, State, Track, ValueId};

pub(crate) use self::columns::{exchange_columns, has_open_columns};
use self::comparison::SizeComparison;
pub(crate) use self::comparison::{Probes, are_counted};
pub(crate) use self::groups::Groups;
pub use self::items::{open_items, open_or_repeat};
use self::least::{Least, require_nodes};
use self::pieces::rooms;
pub use self::pieces::{DecoderDims, PieceSizes, open_decoder, open_pieces};
pub use self::sized::{MOST_NETS, n_combinations, open_beside, open_sized};

/// Multiple of columns that products with open columns compute: whole vectors on every machine. Columns
/// beyond the size of a run are in memory that nothing else reads.
const WHOLE_VECTORS: i64 = 16;

/// Open sizes of products and convolutions by their results, each with its name in the workload.
type SizesOf = HashMap<ValueId, Vec<(&'static str, RunSize)>>;

/// Parameters of calls as numbers of the size, by the first output of each.
type SizesOfCalls = HashMap<ValueId, Vec<RunSize>>;

/// Reason why a dimension cannot be open (dynamic).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Range with too few sizes to compare.
    #[error("{name}={least}..{most} has too few sizes to be open (give a number, or at least four sizes)")]
    Few {
        /// Name of the dimension.
        name: String,
        /// Smallest size.
        least: i64,
        /// Largest size.
        most: i64,
    },
    /// Dimension whose smallest size leaves tensors empty.
    #[error("{name} begins at 0, which only the past of a language model may (begin at 1)")]
    Empty {
        /// Name of the dimension.
        name: String,
    },
    /// Part of the model that differs between sizes in an unsupported way.
    #[error("`{node}` {what} between {name}={first} and {name}={second}: {name} cannot be open (give a number)")]
    Differs {
        /// Node of the model.
        node: String,
        /// Description of the difference.
        what: String,
        /// Name of the dimension.
        name: String,
        /// First size compared.
        first: i64,
        /// Second size compared.
        second: i64,
    },
    /// Node without code for a dynamic size.
    #[error("`{node}` {why}: {name} cannot be open (give a number)")]
    Node {
        /// Name of the model's node, input or output.
        node: String,
        /// Reason.
        why: String,
        /// Name of the dimension.
        name: String,
    },
}

/// Open (dynamic) dimensions of a net.
#[derive(Debug, Clone)]
pub struct OpenNet {
    /// Name and range of the dimension.
    pub dim: OpenDimension,
    /// Name and range of a second one, if any.
    pub second: Option<OpenDimension>,
    /// Dimensions of each value that depend on one of them.
    pub(crate) axes: Vec<Vec<Option<RunSize>>>,
    /// Open sizes of products and convolutions, by their results.
    sizes: SizesOf,
    /// Values whose elements are numbers that depend on a size.
    numbers: Vec<(ValueId, Vec<RunSize>)>,
    /// Lengths of rows that are longer in memory than at the largest size.
    longer: HashMap<ValueId, i64>,
}

/// Makes a fused net with an open dimension; `lower` lowers the model at a size.
///
/// # Errors
/// As `lower`, or if the dimension cannot be open.
pub fn open<E: From<OpenError>>(
    dim: &OpenDimension,
    mut lower: impl FnMut(i64) -> Result<Fused, E>,
) -> Result<Fused, E> {
    open_both(dim, None, |size, _| lower(size))
}

/// Makes a fused net with an open dimension, and with a second one if there is one, on which no dimension of
/// a value may depend together with the first; `lower` lowers the model at a size of each.
///
/// # Errors
/// As `lower`, or if a dimension cannot be open.
pub fn open_both<E: From<OpenError>>(
    dim: &OpenDimension,
    second: Option<&OpenDimension>,
    mut lower: impl FnMut(i64, i64) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let dims: Vec<OpenDimension> = [dim].into_iter().chain(second).cloned().collect();
    let probes = Probes::new(&dims)?;
    let mut lower = |sizes: &[i64]| lower(sizes[0], sizes.get(1).copied().unwrap_or(0));
    let mut nets = probes.sizes().map(|sizes| lower(&sizes)).collect::<Result<Vec<Fused>, E>>()?;
    // The model may be invalid at the smallest sizes, or another one.
    let least_sizes: Vec<i64> = dims.iter().map(|dim| dim.least).collect();
    let of_least = lower(&least_sizes)?;
    let least = Least { dims: &dims, net: of_least.net.clone() };
    nets.iter().try_for_each(|fused| least.require_branches_of(&fused.net))?;
    let mut of_few = |sizes: Vec<i64>| if sizes == least_sizes { Ok(of_least.clone()) } else { lower(&sizes) };
    let few = probes.few().map(|sizes| sizes.map(&mut of_few).transpose());
    let few = few.collect::<Result<Vec<Option<Fused>>, E>>()?;
    // Blocks of attention are worth it, but not a refusal.
    let divided = if second.is_none() { Undivided::divided(&nets) } else { None };
    let divided = divided.and_then(|divided| compared(&probes, divided).ok());
    let made = match divided.filter(|made| made.clone().open_kernels().is_ok()) {
        Some(made) => made,
        None => {
            nets.iter_mut().for_each(|fused| fused.undivided = None);
            compared(&probes, nets.clone())?
        }
    };
    least.require(&made)?;
    require_nodes(&probes, few, &nets)?;
    Ok(made)
}

/// Makes a fused net with open dimensions of nets lowered at the sizes of probes.
fn compared(probes: &Probes, mut nets: Vec<Fused>) -> Result<Fused, OpenError> {
    let (dim, second) = (&probes.dims[0], probes.dims.get(1));
    vary::read_numbers(probes, &mut nets).map_err(|error| OpenError::Node {
        node: dim.name.clone(),
        why: format!("has no kernel for any size: {error}"),
        name: dim.name.clone(),
    })?;
    let mut whole = nets.pop().expect("invariant: the largest is last");
    let states = &whole.net.states;
    let mut dims = probes.dims.iter().enumerate();
    if let Some(dim) = dims.find(|(at, dim)| dim.least < 1 && (*at > 0 || states.is_empty())) {
        return Err(OpenError::Empty { name: dim.1.name.clone() });
    }
    let job = SizeComparison { probes, nets: &nets, whole: &whole };
    job.nodes()?;
    let axes = job.axes()?;
    let (sizes, calls) = (job.sizes()?, job.calls()?);
    let (mut numbers, same) = job.numbers()?;
    whole.set_sizes_of_calls(&calls);
    for (id, constant) in same {
        // Kernels read single numbers from memory, as those of a size.
        match constant.n_elements() == 1 && !constant.dtype().is_float() {
            true => numbers.push((id, vec![RunSize::constant(constant.i64s()[0])])),
            false => whole.net.values[id.0].constant = Some(constant),
        }
    }
    let open = OpenNet { dim: dim.clone(), second: second.cloned(), axes, sizes, numbers, longer: HashMap::new() };
    check(&whole, &open)?;
    whole.open = Some(open);
    Ok(whole)
}

/// Whether the only open dimension of a tensor, if any, is the first one longer than 1, so that a shorter
/// tensor is a prefix of a longer one.
fn is_in_rows(shape: &[i64], axes: &[Option<RunSize>]) -> bool {
    let mut open = (0..axes.len()).filter(|axis| axes[*axis].is_some());
    match (open.next(), open.next()) {
        (None, _) => true,
        (Some(axis), None) => shape[..axis].iter().all(|&n| n == 1),
        (Some(_), Some(_)) => false,
    }
}

/// First item of a constant whose items along its open dimension are all equal; `None` if they differ.
fn item_of(net: &Net, id: ValueId, axes: &[Option<RunSize>]) -> Option<Tensor> {
    let constant = net.value(id).constant.as_ref()?;
    let (axis, size) = axes.iter().enumerate().find_map(|(axis, size)| Some((axis, (*size)?)))?;
    let (mut shape, bytes) = (constant.shape().to_vec(), constant.bytes());
    let n_of_item = usize::try_from(size.factor).ok().filter(|n| *n > 0)?;
    if size.term != 0 || shape[axis] % n_of_item != 0 || !is_in_rows(net.shape(id), axes) {
        return None;
    }
    let n_bytes = bytes.len() / (shape[axis] / n_of_item);
    shape[axis] = n_of_item;
    let is_repeated = n_bytes > 0 && bytes.chunks(n_bytes).all(|item| *item == bytes[..n_bytes]);
    is_repeated.then(|| Tensor::new(TensorType::new(constant.dtype(), shape), bytes.slice(..n_bytes)))?
}

/// Maximum number of copies for an input or output whose open dimension is not the outermost, between the
/// caller's packed memory and a run's memory with room for the largest size: some 0.1 ms if all are short.
const MOST_MOVES: i64 = 4096;

/// Number of elements of the dimensions before the only open one; 1 if nothing is open, `None` if several
/// dimensions are.
fn outer_of_open(shape: &[i64], axes: &[Option<RunSize>]) -> Option<i64> {
    let mut open = (0..axes.len()).filter(|axis| axes[*axis].is_some());
    match (open.next(), open.next()) {
        (None, _) => Some(1),
        (Some(axis), None) => Some(shape[..axis].iter().product()),
        (Some(_), Some(_)) => None,
    }
}

/// Checks what kernels do not cover: inputs, outputs, views, parts and concatenations.
fn check(fused: &Fused, open: &OpenNet) -> Result<(), OpenError> {
    let (net, axes) = (&fused.net, |id: ValueId| &open.axes[id.0][..]);
    let refuse = |node: &str, why: &str, ids: &[ValueId]| {
        let size = ids.iter().flat_map(|id| axes(*id)).flatten().next();
        let dim = size.map_or(&open.dim, |size| open.dim_of(*size));
        Err(OpenError::Node { node: node.to_owned(), why: why.to_owned(), name: dim.name.clone() })
    };
    for &id in net.inputs.iter().chain(&net.outputs) {
        let n_ahead = outer_of_open(net.shape(id), axes(id));
        if n_ahead.is_none_or(|n| n > MOST_MOVES) {
            return refuse(&net.value(id).name, "has the open dimension behind another one", &[id]);
        }
    }
    let in_memory = |id: ValueId| in_memory(net.shape(id), axes(id));
    let mut within: Vec<&Node> = Vec::new();
    for sequence in fused.sequences() {
        within.extend(&sequence.nodes);
        let moves = |moving: &&Moving| !is_part_of_steps(net, moving, &in_memory);
        if let (Some(node), Some(moving)) = (sequence.nodes.last(), sequence.moving.iter().find(moves)) {
            return refuse(&node.origin, "has steps of a sequence", &[moving.value, moving.of]);
        }
    }
    for node in net.nodes.iter().chain(within) {
        let all = || node.inputs.iter().flatten().chain(&node.outputs);
        let ids: Vec<ValueId> = all().copied().collect();
        let refuse = |why: &str| refuse(&node.origin, why, &ids);
        if all().all(|id| axes(*id).iter().all(Option::is_none)) {
            continue;
        }
        match &node.kind {
            Kind::View if in_memory(node.input(0)) != in_memory(node.output()) => {
                return refuse("joins or divides the open dimension");
            }
            Kind::Concat(axis) => {
                let parts: Vec<ValueId> = node.inputs.iter().flatten().copied().collect();
                let is_open = |id: &ValueId| axes(*id)[*axis].is_some();
                // An open part of a concatenation that follows others must end where the whole ends.
                let (Some((last, others)), outer) = (parts.split_last(), &axes(node.output())[..*axis]) else {
                    continue;
                };
                if others.iter().any(is_open) || is_open(last) && outer.iter().any(Option::is_some) {
                    return refuse("joins tensors along the open dimension");
                }
            }
            Kind::Pad(..) | Kind::Window(..) | Kind::Pick(_) => {
                let (from, to) = (node.input(0), node.output());
                // The distance of an element from the one it is read from is the same at all sizes.
                let is_kept = |axis: usize| {
                    let (Some(own), Some(result)) = (axes(from)[axis], axes(to)[axis]) else { return false };
                    let [factor, divisor] = match &node.kind {
                        Kind::Window(_, w) => [1, w.strides[axis]],
                        Kind::Pick(lines) => [lines[axis].divisor, lines[axis].factor],
                        _ => [1, 1],
                    };
                    own.factor * result.divisor * factor == result.factor * own.divisor * divisor
                };
                let is_open = |axis: &usize| axes(to)[*axis].is_some() || axes(from)[*axis].is_some();
                if (0..axes(to).len()).filter(is_open).any(|axis| !is_kept(axis)) {
                    return refuse("cuts or resizes the open dimension");
                }
            }
            Kind::Pixels { .. } => return refuse("turns channels to pixels"),
            Kind::Append(axis) => {
                let is_open_before = axes(node.output())[..*axis].iter().any(Option::is_some);
                if is_open_before || axes(node.output())[*axis + 1..].iter().any(Option::is_some) {
                    return refuse("appends to a state in which another dimension is open");
                }
            }
            // What goes from one iteration to the next is copied as a whole; rows lie one behind the other.
            Kind::Loop(repeat) => {
                let carried = &node.inputs[2..2 + repeat.n_carried];
                let is_open = |id: &ValueId| axes(*id).iter().any(Option::is_some);
                if carried.iter().flatten().any(is_open) || all().any(|id| !is_in_rows(net.shape(*id), axes(*id))) {
                    return refuse("repeats steps with the open dimension");
                }
            }
            Kind::Packed(_) => return refuse("has packed weights, whose kernels know their rows"),
            // Functions take whole tensors, whose elements lie one behind the other.
            Kind::Call(_) => {
                if let Some(id) = all().find(|id| !is_in_rows(net.shape(**id), axes(**id))) {
                    let (operator, name) = (node.operator(), &net.value(*id).name);
                    let why = format!("({operator}) takes `{name}` with the open dimension behind another one");
                    return refuse(&why);
                }
            }
            Kind::Host(_) => {
                return refuse(&format!("({}) has no code for a size that runs say", node.operator()));
            }
            Kind::View | Kind::Map(_) | Kind::Transpose(_) | Kind::Slice(_) | Kind::Reduce(..) => {}
            Kind::Conv(_) | Kind::Product { .. } | Kind::Gather { .. } | Kind::Sequence(_) => {}
        }
    }
    Ok(())
}

/// Open dimension of a tensor in memory: the number of elements ahead of it, and with what follows it, its
/// factor, term and divisor, and the dimension it depends on.
type OpenPart = [i64; 5];

/// Open dimensions of a tensor in memory. Strides after an open dimension are those of the largest size.
fn in_memory(shape: &[i64], axes: &[Option<RunSize>]) -> Vec<OpenPart> {
    let of = |(axis, size): (usize, &Option<RunSize>)| {
        let size = (*size)?;
        let [outer, inner] = [&shape[..axis], &shape[axis + 1..]].map(|part| part.iter().product::<i64>());
        Some([outer, size.factor * inner, size.term * inner, size.divisor, size.dim as i64])
    };
    axes.iter().enumerate().filter_map(of).collect()
}

/// Whether a value of a step is, at all sizes, the same part of a tensor of all steps as at the largest, to
/// which strides in memory belong: elements as far apart, of as many rows.
fn is_part_of_steps(net: &Net, moving: &Moving, in_memory: &dyn Fn(ValueId) -> Vec<OpenPart>) -> bool {
    let (part, of) = (in_memory(moving.value), in_memory(moving.of));
    let n = net.value(moving.value).n_elements();
    let is_whole = moving.first.is_none_or(|first| in_memory(first) == part);
    let is_alike = part.len() == of.len() && part.iter().zip(&of).all(|(part, of)| part[1..] == of[1..]);
    let Track { first, by, round, next } = moving.track;
    let are_parts = [first, next, if round > 1 { by } else { 0 }].iter().all(|n_elements| n_elements % n == 0);
    is_whole && is_alike && (are_parts || part == of)
}

impl OpenNet {
    /// Dimension that a number depends on.
    pub(crate) fn dim_of(&self, size: RunSize) -> &OpenDimension {
        let second = self.second.as_ref().filter(|_| size.dim == 1);
        second.unwrap_or(&self.dim)
    }

    /// Open dimension of a value of a net, if it is not the outermost; see [`Fused::open_behind`].
    fn behind(&self, net: &Net, id: ValueId) -> Option<(usize, RunSize)> {
        let axes = self.axes.get(id.0)?;
        let (axis, size) = axes.iter().enumerate().find_map(|(axis, size)| Some((axis, (*size)?)))?;
        (!is_in_rows(net.shape(id), axes)).then_some((axis, size))
    }

    /// Largest value of an open number.
    fn most(&self, size: RunSize) -> i64 {
        size.at(self.dim_of(size).most)
    }

    /// Range of an open number.
    fn range(&self, size: RunSize) -> SizeRange {
        let dim = self.dim_of(size);
        let step = if size.multiple == 1 { size.factor * dim.step / size.divisor } else { size.multiple };
        SizeRange { least: size.at(dim.least), most: size.at(dim.most), step }
    }
}

impl Fused {
    /// Has calls take parameters of a run.
    fn set_sizes_of_calls(&mut self, calls: &SizesOfCalls) {
        let of_steps = self.steps.iter_mut().filter_map(|step| match step {
            Step::Host(node) => Some(node),
            _ => None,
        });
        for node in of_steps.chain(&mut self.net.nodes) {
            if let (Kind::Call(call), Some(sizes)) = (&mut node.kind, node.outputs.first().and_then(|id| calls.get(id)))
            {
                call.sizes.clone_from(sizes);
            }
        }
    }

    /// Values whose elements are numbers that depend on the size of the open dimension.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (ValueId, &[RunSize])> {
        let numbers = self.open.as_ref().map_or(&[][..], |open| &open.numbers);
        // Values that no kernel reads have no memory.
        let is_read = |id: ValueId| {
            self.sequences().flat_map(Steps::outer_values).any(|of| of == id)
                || self.each().any(|(step, _)| match step {
                    Step::Kernel(kernel) => kernel.inputs.contains(&id),
                    Step::Host(node) => node.inputs.contains(&Some(id)),
                    Step::Part { of, .. } => *of == id,
                    _ => false,
                })
        };
        numbers.iter().filter(move |(id, _)| is_read(*id)).map(|(id, sizes)| (*id, &sizes[..]))
    }

    /// Open dimension of a value, if it is not the outermost: its index and its size in a run. Its rows are
    /// then not contiguous, unlike in the caller's memory.
    pub(crate) fn open_behind(&self, id: ValueId) -> Option<(usize, RunSize)> {
        self.open.as_ref()?.behind(&self.net, id)
    }

    /// Whether an input or output is not stored as the caller passes it: its open dimension, or that of its
    /// rows, is not the outermost.
    pub(crate) fn is_packed_apart(&self, id: ValueId) -> bool {
        self.open_behind(id).is_some() || self.n_outer_of_rows(id) > 1
    }

    /// Whether a dimension of an input or output is a fraction of the open size: a multiple of it divided by
    /// more than 1.
    pub(crate) fn has_divided_ports(&self) -> bool {
        let Some(open) = &self.open else { return false };
        let mut ports = self.net.inputs.iter().chain(&self.net.outputs);
        ports.any(|id| open.axes[id.0].iter().flatten().any(|size| size.divisor > 1))
    }

    /// Whether steps of a sequence are a loop of as many iterations as a run says, which takes longer than
    /// steps of a number of them.
    pub fn has_open_loops(&self) -> bool {
        self.open.is_some() && self.steps.iter().any(|step| matches!(step, Step::While(_)))
    }

    /// Whether convolutions process as many rows of an image, or elements of a sequence, as a run says, which
    /// fewer algorithms can than a number of them.
    pub fn has_open_rows(&self) -> bool {
        let is_along = |name: &str| [Window::OPEN, "w"].contains(&name);
        let sizes = |open: &OpenNet| open.sizes.values().flatten().any(|(name, _)| is_along(name));
        self.open.as_ref().is_some_and(sizes)
    }

    /// Number of elements by which a run extends states: the difference of their length and the dimension's
    /// size.
    pub(crate) fn appends(&self) -> i64 {
        let Some(open) = &self.open else { return 0 };
        let of = |state: &State| open.axes[state.value.0][state.axis].map_or(0, |size| size.term);
        self.net.states.first().map_or(0, of)
    }

    /// Makes the sizes of kernels open if they depend on the open dimension, if any.
    ///
    /// # Errors
    /// If a kernel has no form for any size.
    pub(crate) fn open_kernels(mut self) -> Result<Fused, OpenError> {
        let Some(mut open) = self.open.take() else { return Ok(self) };
        for step in &self.steps {
            let Step::Kernel(kernel) = step else { continue };
            // Converted images are values that were added later.
            if kernel.output.0 >= open.axes.len() {
                open.axes.resize(kernel.output.0 + 1, Vec::new());
                open.axes[kernel.output.0] = open.axes[kernel.inputs[0].0].clone();
            }
        }
        open.axes.resize(self.net.values.len(), Vec::new());
        self.share_items(&mut open);
        self.lengthen_rows(&mut open);
        self.steps = self.opened_steps(&self.steps, &open)?;
        self.open = Some(open);
        Ok(self)
    }

    /// Makes products of an open batch read one item of constants whose items are all equal, such as
    /// encodings of positions that an exporter repeats for each text.
    fn share_items(&mut self, open: &mut OpenNet) {
        for step in &mut self.steps {
            let Step::Kernel(kernel) = step else { continue };
            let is_product = matches!(kernel.workload.structure(), Structure::Contraction(_));
            let sizes = open.sizes.get(&kernel.output).map(Vec::as_slice);
            if !is_product || !matches!(sizes, Some([("b", _)])) {
                continue;
            }
            for id in &mut kernel.inputs {
                let Some(item) = item_of(&self.net, *id, &open.axes[id.0]) else { continue };
                let (name, ty) = (format!("{}.item", self.net.value(*id).name), item.ty());
                let shape: Vec<i64> = ty.shape.iter().map(|n| *n as i64).collect();
                *id = self.net.add_value(&name, ty.dtype, &shape);
                self.net.values[id.0].constant = Some(item);
                open.axes.push(vec![None; shape.len()]);
            }
        }
    }

    /// Steps, all of this net or those of a sequence, with kernels of open sizes.
    fn opened_steps(&self, steps: &[Step], open: &OpenNet) -> Result<Vec<Step>, OpenError> {
        let rows = self.in_rows(open);
        let mut changed = Vec::with_capacity(steps.len());
        for step in steps {
            changed.push(match step {
                Step::Kernel(kernel) => {
                    let made = self.open_kernel(kernel, open, &rows);
                    let refused = |error: WorkloadError| OpenError::Node {
                        node: kernel.origin.clone(),
                        why: format!("has no kernel for any size: {error}"),
                        name: open.dim.name.clone(),
                    };
                    Step::Kernel(made.map_err(|error| error.unwrap_or_else(refused))?)
                }
                Step::Sequence(sequence) => {
                    let net = Net { nodes: sequence.nodes.clone(), ..self.net.clone() };
                    let steps = Fused { net, ..self.clone() }.opened_steps(&sequence.steps, open)?;
                    Step::Sequence(Steps { steps, ..sequence.clone() })
                }
                other => other.clone(),
            });
        }
        Ok(changed)
    }

    /// Net of one row: open dimensions are 1 in all values that consist of contiguous rows.
    fn in_rows(&self, open: &OpenNet) -> Net {
        let mut net = self.net.clone();
        for (value, axes) in net.values.iter_mut().zip(&open.axes) {
            if is_in_rows(&value.shape, axes) {
                axes.iter().zip(&mut value.shape).filter(|(open, _)| open.is_some()).for_each(|(_, n)| *n = 1);
            }
        }
        net
    }

    fn open_kernel(&self, kernel: &Kernel, open: &OpenNet, rows: &Net) -> Result<Kernel, NoOpenForm> {
        let is_open = |id: &ValueId| open.axes[id.0].iter().any(Option::is_some);
        if !kernel.inputs.iter().chain([&kernel.output]).any(is_open) {
            return Ok(kernel.clone());
        }
        let refuse = |why: String| {
            NoOpenForm::Why(OpenError::Node { node: kernel.origin.clone(), why, name: open.dim.name.clone() })
        };
        match kernel.workload.structure() {
            Structure::Contraction(product) => {
                let sizes = &open.sizes[&kernel.output];
                if let &[("b", size)] = &sizes[..]
                    && let Some(kernel) = self.open_batch(kernel, size, open)
                {
                    return Ok(kernel);
                }
                if let Some((name, _)) = sizes.iter().find(|(name, _)| !Contraction::OPEN.contains(name)) {
                    return Err(refuse(format!("is a product whose size {name} would be open")));
                }
                let rounded = |(name, size): &(&'static str, RunSize)| {
                    let is_whole = *name == "n"
                        && open.most(*size) % WHOLE_VECTORS == 0
                        && self.has_own_memory(kernel.inputs[1])
                        && self.has_own_memory(kernel.output);
                    (*name, RunSize { multiple: if is_whole { WHOLE_VECTORS } else { 1 }, ..*size })
                };
                // A size that is constant after rounding is not open.
                let open_sizes = sizes.iter().map(rounded).filter_map(|(name, size)| {
                    let mut range = open.range(size);
                    range.most = open.room(kernel, &product, name).unwrap_or(range.most);
                    (range.least < range.most).then_some(((name, range), size))
                });
                let (ranges, sizes): (Vec<(&str, SizeRange)>, Vec<RunSize>) = open_sizes.unzip();
                let apart = self.apart(kernel, &product, open);
                let one = apart.and_then(|_| kernel.workload.with_size("b", 1));
                let workload = one.as_ref().unwrap_or(&kernel.workload).with_ranges(&ranges)?;
                let apart = apart.filter(|_| one.is_some());
                let is_longer = |(name, _): &(&str, SizeRange)| open.room(kernel, &product, name).is_some();
                let rooms = if ranges.iter().any(is_longer) { rooms(&workload) } else { Vec::new() };
                let open = Some(Box::new(Open { sizes, each: None, apart, rooms }));
                Ok(Kernel { workload, open, ..kernel.clone() })
            }
            Structure::Window(_) => match open.sizes[&kernel.output][..] {
                [("n", size)] => {
                    let workload = kernel.workload.with_size("n", 1).expect("one image is a convolution's");
                    Ok(each(Kernel { workload, ..kernel.clone() }, size, open))
                }
                // Columns of images of one row are rows of those of one column: the same elements in memory.
                [("w", size)] if let Some(column) = kernel.workload.in_column() => {
                    let workload = column.with_ranges(&[(Window::OPEN, open.range(size))])?;
                    Ok(sized(Kernel { workload, ..kernel.clone() }, vec![size]))
                }
                [(Window::OPEN, size)] => {
                    let workload = kernel.workload.with_ranges(&[(Window::OPEN, open.range(size))])?;
                    Ok(sized(Kernel { workload, ..kernel.clone() }, vec![size]))
                }
                ref sizes => {
                    let names: Vec<&str> = sizes.iter().map(|(name, _)| *name).collect();
                    Err(refuse(format!("is a convolution whose sizes {} would be open", names.join(", "))))
                }
            },
            Structure::Nest(_) if kernel.members.is_empty() => {
                let (from, to_blocks) = (kernel.inputs[0], kernel.block > 1);
                let dtype = self.net.element_type(from).expect("images are of types that have code");
                let (workload, size) = match open.axes[from.0][..] {
                    [Some(size), ..] => {
                        let workload = conversion_of(dtype, rows.shape(from), kernel.in_blocks, to_blocks, None)?;
                        return Ok(each(Kernel { workload, ..kernel.clone() }, size, open));
                    }
                    [_, _, Some(size), _] => {
                        let range = Some((size, open.range(size)));
                        (conversion_of(dtype, self.net.shape(from), kernel.in_blocks, to_blocks, range)?, size)
                    }
                    [_, _, None, Some(size)] if self.net.shape(from)[2] == 1 => {
                        let &[n, c, _, columns] = self.net.shape(from) else { unreachable!("it is an image") };
                        let range = Some((size, open.range(size)));
                        (conversion_of(dtype, &[n, c, columns, 1], kernel.in_blocks, to_blocks, range)?, size)
                    }
                    _ => return Err(refuse("is an image of any size".to_owned())),
                };
                Ok(sized(Kernel { workload, ..kernel.clone() }, vec![size]))
            }
            Structure::Nest(_) => self.open_nest(kernel, open, rows),
            Structure::Packed(_) => Err(refuse("has packed weights, whose kernels know their rows".to_owned())),
        }
    }

    /// Number of matrices of the second operand of a product, if that is an input whose second open dimension
    /// is behind them, so that the product of each can read it in the caller's packed memory.
    fn apart(&self, kernel: &Kernel, product: &Contraction, open: &OpenNet) -> Option<i64> {
        let root = self.root_of(kernel.inputs[1]);
        let (axis, _) = open.behind(&self.net, root).filter(|(_, size)| (size.dim, size.divisor) == (1, 1))?;
        let shape = self.net.shape(root);
        let n = product.batch.filter(|n| shape[..axis].iter().product::<i64>() == *n)?;
        let is_plain = |heads: Heads| heads == Heads::default();
        let is_apart = is_plain(product.b.heads)
            && (is_plain(product.a.heads)
                || product.m == 1 && (product.a.heads.before, product.a.heads.after) == (0, 0))
            && (!product.output_beside || product.m == 1);
        let others = Epilogue::operands(kernel.workload.epilogue());
        let is_of_elements = others.iter().all(|(.., kind)| *kind == Operand::Element);
        let sizes = &open.sizes[&kernel.output];
        let is_alone = sizes.iter().all(|(name, _)| *name != "b" && open.room(kernel, product, name).is_none());
        let is_whole = self.net.value(root).n_elements() == self.net.value(kernel.inputs[1]).n_elements();
        let fits = is_apart && is_of_elements && is_alone && is_whole && kernel.workload.prologue().is_empty();
        (fits && self.net.inputs.contains(&root)).then_some(n)
    }

    /// Whether all that reads an input are products that read it in the caller's memory.
    pub(crate) fn is_read_in_place(&self, id: ValueId) -> bool {
        if self.open.as_ref().is_none_or(|open| open.second.is_none()) {
            return false;
        }
        let is_it = |own: &ValueId| self.root_of(*own) == id;
        let reads_otherwise = |step: &Step| match step {
            Step::Kernel(kernel) => {
                let mut inputs = kernel.inputs.iter().enumerate();
                inputs.any(|(at, own)| is_it(own) && !(at == 1 && kernel.apart().is_some()))
            }
            Step::Part { .. } => false,
            Step::Host(node) => node.inputs.iter().flatten().any(is_it),
            Step::Join { parts, .. } => parts.iter().any(is_it),
            Step::Append { from, .. } | Step::Set { from, .. } => is_it(from),
            Step::Sequence(_) | Step::While(_) | Step::Again(_) => true,
        };
        let reads =
            |step: &Step| matches!(step, Step::Kernel(kernel) if kernel.apart().is_some() && is_it(&kernel.inputs[1]));
        let is_output = || self.net.outputs.iter().any(is_it);
        self.steps.iter().any(reads) && !self.steps.iter().any(reads_otherwise) && !is_output()
    }

    /// Makes a product of an open batch the repeated product of one item, if the items of all operands are
    /// contiguous.
    fn open_batch(&self, kernel: &Kernel, size: RunSize, open: &OpenNet) -> Option<Kernel> {
        let items = RunSize { dim: size.dim, factor: 1, ..RunSize::constant(0) };
        // A constant is packed once, for all items.
        let is_shared =
            |id: &ValueId| self.net.value(*id).constant.is_none() || open.axes[id.0].iter().all(Option::is_none);
        let is_by_items = |id: &ValueId| is_in_rows(self.net.shape(*id), &open.axes[id.0]) && is_shared(id);
        let fits = size.term == 0 && kernel.inputs.iter().chain([&kernel.output]).all(is_by_items);
        let workload = fits.then(|| kernel.workload.with_size("b", size.factor))??;
        Some(each(Kernel { workload, ..kernel.clone() }, items, open))
    }

    /// Makes a nest open: as a repeated kernel of one row, else with open loops.
    fn open_nest(&self, kernel: &Kernel, open: &OpenNet, rows: &Net) -> Result<Kernel, NoOpenForm> {
        let of = |net: &Net, id: ValueId| if kernel.in_blocks > 1 { block_of(net, id, kernel.in_blocks) } else { 1 };
        // An image that is read in another layout than it is computed in is a value of its own.
        let same = |made: Kernel| {
            let (inputs, origin) = (kernel.inputs.clone(), kernel.origin.clone());
            assert_eq!(made.inputs.len(), inputs.len(), "a nest of the same nodes reads as many values");
            Kernel { inputs, in_blocks: kernel.in_blocks, origin, ..made }
        };
        if let Some(size) = self.row_size(kernel, open) {
            // Blocks are those of the whole image: an image of a single row does not count as one.
            let made = nest(rows, &kernel.members, &|id| of(&self.net, id))?;
            return Ok(each(same(made), size, open));
        }
        let range = |id: ValueId, axis: usize| {
            let size = (*open.axes[id.0].get(axis)?)?;
            Some((size, open.range(size)))
        };
        let (made, sizes) = open_nest(&self.net, &kernel.members, &|id| of(&self.net, id), &range)?;
        Ok(sized(same(made), sizes))
    }

    /// Number of rows that a nest computes one by one, if it does.
    fn row_size(&self, kernel: &Kernel, open: &OpenNet) -> Option<RunSize> {
        let net = &self.net;
        let axis_of = |id: ValueId| open.axes[id.0].iter().position(Option::is_some);
        // Counted from the last dimension, as values broadcast.
        let place = |id: ValueId| axis_of(id).map(|axis| net.shape(id).len() - axis);
        let size = open.axes[kernel.output.0][axis_of(kernel.output)?]?;
        let fits = |id: ValueId| {
            let own = axis_of(id).and_then(|axis| open.axes[id.0][axis]);
            let n_row = net.value(id).n_elements() / open.most(size);
            let is_plain = net.value(id).constant.is_none() || n_row > 1;
            is_in_rows(net.shape(id), &open.axes[id.0]) && own.is_none_or(|own| own == size && is_plain)
        };
        let is_by_rows = |node: &Node| {
            let ids = || node.inputs.iter().flatten().chain(&node.outputs).copied();
            let to = node.output();
            let is_kept = match &node.kind {
                Kind::Map(_) => ids().filter_map(place).all(|own| Some(own) == place(to)),
                Kind::Reduce(_, dims) => axis_of(node.input(0)).is_none_or(|axis| !dims.contains(&axis)),
                Kind::Slice(parts) => axis_of(to).is_none_or(|axis| parts[axis] == (0, 1)),
                Kind::Gather { .. } => axis_of(node.input(0)).is_none(),
                Kind::Concat(axis) => axis_of(to) != Some(*axis),
                Kind::Pad(before, _) => axis_of(to).is_none_or(|axis| before[axis] == 0),
                Kind::Pick(lines) => axis_of(to).is_none_or(|axis| lines[axis] == Line::SAME),
                // A window of one row sees that row alone.
                Kind::Window(_, w) => axis_of(to).is_none_or(|axis| (w.kernel[axis], w.before[axis]) == (1, 0)),
                _ => true,
            };
            is_kept && axis_of(to).is_some() && ids().all(fits)
        };
        kernel.members.iter().all(|&at| is_by_rows(&net.nodes[at])).then_some(size)
    }

    /// Value that a value is ultimately a part of.
    fn root_of(&self, id: ValueId) -> ValueId {
        let part_of = |id: ValueId| {
            self.steps.iter().find_map(|step| match step {
                Step::Part { of, part, .. } if *part == id => Some(*of),
                Step::Sequence(sequence) => sequence.part_of(id),
                _ => None,
            })
        };
        let mut root = id;
        while let Some(of) = part_of(root) {
            root = of;
        }
        root
    }

    /// Whether a value is in the run's own memory, with room for the largest size.
    fn has_own_memory(&self, id: ValueId) -> bool {
        let root = self.root_of(id);
        let mut passed = vec![id, root];
        passed.extend(self.steps.iter().filter_map(|step| match step {
            Step::Part { of, part, .. } if *of == root => Some(*part),
            _ => None,
        }));
        let net = &self.net;
        let is_ours =
            |id: &ValueId| !net.inputs.contains(id) && !net.outputs.contains(id) && net.value(*id).constant.is_none();
        passed.iter().all(is_ours)
    }
}

/// Gives a kernel its open sizes.
fn sized(kernel: Kernel, sizes: Vec<RunSize>) -> Kernel {
    Kernel { open: Some(Box::new(Open { sizes, each: None, apart: None, rooms: Vec::new() })), ..kernel }
}

/// Makes a kernel of one row that is repeated `size` times.
fn each(kernel: Kernel, size: RunSize, open: &OpenNet) -> Kernel {
    let along = kernel.inputs.iter().chain([&kernel.output]).map(|id| open.axes[id.0].iter().any(Option::is_some));
    let each = Some((size, open.range(size), along.collect()));
    Kernel { open: Some(Box::new(Open { sizes: Vec::new(), each, apart: None, rooms: Vec::new() })), ..kernel }
}

/// Reason why a kernel has no form for any size.
enum NoOpenForm {
    Why(OpenError),
    Workload(Box<WorkloadError>),
}

impl From<WorkloadError> for NoOpenForm {
    fn from(error: WorkloadError) -> NoOpenForm {
        NoOpenForm::Workload(Box::new(error))
    }
}

impl NoOpenForm {
    fn unwrap_or_else(self, of_workload: impl Fn(WorkloadError) -> OpenError) -> OpenError {
        match self {
            NoOpenForm::Why(error) => error,
            NoOpenForm::Workload(error) => of_workload(*error),
        }
    }
}
