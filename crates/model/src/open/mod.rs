//! Models with an open (dynamic) dimension, whose size each run gives.
//!
//! There is no symbolic inference: the model is lowered at a few sizes, and the results are compared. Numbers
//! that differ, such as those of shapes, must be affine in the size; everything else must be equal. The
//! result is the net of the largest size: tensors have the layout for that size, and kernels process only the
//! part for the size of a run, by their number of rows or within rows.

mod columns;
mod groups;
mod items;
pub(crate) mod loops;
mod pieces;
mod pitch;
mod sized;
mod vary;

use std::collections::{HashMap, HashSet};

use tilewright_graph::{Tensor, TensorType};
use tilewright_ir::gcd;
use tilewright_ir::op::{Contraction, SizeRange, Structure, Window, WorkloadError};
use tilewright_runtime::{OpenDimension, RunSize};

use crate::fuse::{Fused, Kernel, Moving, Open, Step, Steps, nest, open_nest};
use crate::layouts::{block_of, conversion_of};
use crate::net::{AsHeads, Kind, Line, Net, Node, Repeat, State, ValueId};

pub(crate) use self::columns::{exchange_columns, has_open_columns};
pub(crate) use self::groups::Groups;
pub use self::items::{open_items, open_or_repeat};
use self::pieces::rooms;
pub use self::pieces::{open_batches, open_pieces};
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

/// Open (dynamic) dimension of a net.
#[derive(Debug, Clone)]
pub struct OpenNet {
    /// Name and range of the dimension.
    pub dim: OpenDimension,
    /// Dimensions of each value that depend on it.
    pub(crate) axes: Vec<Vec<Option<RunSize>>>,
    /// Open sizes of products and convolutions, by their results.
    sizes: SizesOf,
    /// Values whose elements are numbers that depend on the size.
    numbers: Vec<(ValueId, Vec<RunSize>)>,
    /// Lengths of rows that are longer in memory than at the largest size.
    longer: HashMap<ValueId, i64>,
}

/// Maximum number of elements of a value that depend on the size individually, unless they are consecutive
/// numbers.
const MOST_NUMBERS: usize = 64;

/// Whether numbers are consecutive at all sizes.
pub(crate) fn are_counted(sizes: &[RunSize]) -> bool {
    sizes.iter().all(|size| (size.factor, size.divisor, size.multiple) == (sizes[0].factor, 1, 1))
        && sizes.windows(2).all(|pair| pair[1].term == pair[0].term + 1)
}

/// Sizes of a dimension at which a model is lowered besides the largest: odd ones in the upper half of the
/// range, which other dimensions of the model are unlikely to have by chance.
fn probes(dim: &OpenDimension) -> Option<[i64; 2]> {
    let is_prime = |n: i64| n > 2 && (2..n).take_while(|d| d * d <= n).all(|d| n % d != 0);
    let inside = || (dim.least..dim.most).filter(|&size| dim.has(size) && size > 1);
    let pick = |wanted: f64, other: Option<i64>| {
        let goal = dim.least + ((dim.most - dim.least) as f64 * wanted) as i64;
        let others = inside().filter(|size| Some(*size) != other);
        others.min_by_key(|&size| (!is_prime(size), (size - goal).abs()))
    };
    let first = pick(0.6, None)?;
    Some([first, pick(0.8, Some(first))?])
}

/// Affine function through two points; `None` unless it is an integer at all sizes of the dimension.
fn through(dim: &OpenDimension, [x0, x1]: [i64; 2], [y0, y1]: [i64; 2]) -> Option<RunSize> {
    let (rise, run) = (y1 - y0, (x1 - x0).abs());
    let rise = if x1 < x0 { -rise } else { rise };
    let common = gcd(rise.abs(), run).max(1);
    let (factor, divisor) = (rise / common, run / common);
    let size = RunSize { factor, term: y0 * divisor - factor * x0, divisor, multiple: 1 };
    let is_whole = dim.step * factor % divisor == 0 && (dim.least * factor + size.term) % divisor == 0;
    is_whole.then_some(size)
}

/// Makes a fused net with an open dimension; `lower` lowers the model at a size.
///
/// # Errors
/// As `lower`, or if the dimension cannot be open.
pub fn open<E: From<OpenError>>(
    dim: &OpenDimension,
    mut lower: impl FnMut(i64) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let few = || OpenError::Few { name: dim.name.clone(), least: dim.least, most: dim.most };
    let at = probes(dim).ok_or_else(few)?;
    let mut nets = [lower(at[0])?, lower(at[1])?, lower(dim.most)?];
    // The model may be invalid at the smallest size.
    lower(dim.least)?;
    vary::read_numbers(dim, at, &mut nets).map_err(|error| OpenError::Node {
        node: dim.name.clone(),
        why: format!("has no kernel for any size: {error}"),
        name: dim.name.clone(),
    })?;
    let [first, second, mut whole] = nets;
    let probes = [first, second];
    if dim.least < 1 && whole.net.states.is_empty() {
        return Err(OpenError::Empty { name: dim.name.clone() }.into());
    }
    let job = SizeComparison { dim, at, probes: [&probes[0], &probes[1]], whole: &whole };
    job.nodes()?;
    let axes = job.axes()?;
    let (sizes, calls) = (job.sizes()?, job.calls()?);
    let (mut numbers, same) = job.numbers()?;
    whole.set_sizes_of_calls(&calls);
    for (id, constant) in same {
        // Kernels read single numbers from memory, as those of a size.
        match constant.n_elements() == 1 && !constant.dtype().is_float() {
            true => numbers.push((id, vec![RunSize { factor: 0, term: constant.i64s()[0], divisor: 1, multiple: 1 }])),
            false => whole.net.values[id.0].constant = Some(constant),
        }
    }
    let open = OpenNet { dim: dim.clone(), axes, sizes, numbers, longer: HashMap::new() };
    check(&whole, &open)?;
    whole.open = Some(open);
    Ok(whole)
}

/// Comparison of a model at several sizes.
struct SizeComparison<'a> {
    dim: &'a OpenDimension,
    at: [i64; 2],
    probes: [&'a Fused; 2],
    /// Net of the largest size.
    whole: &'a Fused,
}

impl SizeComparison<'_> {
    fn differs(&self, node: &str, what: &str, first: i64, second: i64) -> OpenError {
        OpenError::Differs { node: node.to_owned(), what: what.to_owned(), name: self.dim.name.clone(), first, second }
    }

    /// Compares the nodes.
    fn nodes(&self) -> Result<(), OpenError> {
        let whole = &self.whole.net;
        for (probe, at) in self.probes.iter().zip(self.at) {
            let other = &probe.net;
            let named = |node: Option<&Node>| node.map_or("the model".to_owned(), |node| node.origin.clone());
            let all = whole.nodes.iter().zip(&other.nodes);
            if let Some((node, _)) = all.clone().find(|(a, b)| !are_alike(a, b)) {
                return Err(self.differs(&node.origin, "differs", at, self.dim.most));
            }
            if whole.nodes.len() != other.nodes.len() || whole.values.len() != other.values.len() {
                let n = whole.nodes.len().min(other.nodes.len());
                let rest = whole.nodes.get(n).or(other.nodes.get(n)).or(whole.nodes.last());
                return Err(self.differs(&named(rest), "differs", at, self.dim.most));
            }
        }
        Ok(())
    }

    /// Node that computes or reads a value, for messages.
    fn node_of(&self, id: ValueId) -> String {
        let nodes = &self.whole.net.nodes;
        let maker = nodes.iter().find(|node| node.outputs.contains(&id));
        let found = maker.or_else(|| nodes.iter().find(|node| node.inputs.contains(&Some(id))));
        found.map_or_else(|| self.whole.net.value(id).name.clone(), |node| node.origin.clone())
    }

    /// Values that exist in a run; a shape whose `Reshape` has become a view, for example, does not.
    fn used(&self) -> HashSet<ValueId> {
        let net = &self.whole.net;
        let of_nodes = net.nodes.iter().flat_map(|node| node.inputs.iter().flatten().chain(&node.outputs));
        let of_states = net.states.iter().map(|state| &state.value);
        let of_steps = self.whole.each().flat_map(|(step, _)| match step {
            Step::Kernel(kernel) => kernel.inputs.iter().chain([&kernel.output]).collect(),
            Step::Host(node) => node.inputs.iter().flatten().chain(&node.outputs).collect(),
            Step::Part { of, part, .. } => vec![of, part],
            Step::Set { from, to } => vec![from, to],
            _ => Vec::new(),
        });
        of_nodes.chain(of_states).chain(of_steps).chain(&net.inputs).chain(&net.outputs).copied().collect()
    }

    /// Finds which dimensions of values depend on the size.
    fn axes(&self) -> Result<Vec<Vec<Option<RunSize>>>, OpenError> {
        let used = self.used();
        let mut all = Vec::with_capacity(self.whole.net.values.len());
        for (at, whole) in self.whole.net.values.iter().enumerate() {
            if !used.contains(&ValueId(at)) {
                all.push(vec![None; whole.shape.len()]);
                continue;
            }
            let of_probes = self.probes.map(|probe| &probe.net.values[at]);
            let fail = |what: &str| self.differs(&self.node_of(ValueId(at)), what, self.at[0], self.at[1]);
            if of_probes.iter().any(|value| value.shape.len() != whole.shape.len()) {
                return Err(fail("has another number of dimensions"));
            }
            let fit = |axis: usize| {
                let size = through(self.dim, self.at, of_probes.map(|value| value.shape[axis])).filter(|size| {
                    size.at(self.dim.most) == whole.shape[axis] && size.at(self.dim.least) >= self.dim.least.min(1)
                });
                let size = size.ok_or_else(|| fail("has a size without a factor and a term"))?;
                Ok(Some(size).filter(|size| size.factor != 0))
            };
            let axes = (0..whole.shape.len()).map(fit).collect::<Result<Vec<_>, _>>()?;
            for probe in of_probes {
                let is_same = match (&whole.constant, &probe.constant) {
                    (None, None) => true,
                    (Some(whole), Some(part)) => is_corner(part, whole),
                    _ => false,
                };
                if !is_same {
                    return Err(fail("computes with other numbers"));
                }
            }
            all.push(axes);
        }
        Ok(all)
    }

    /// Finds the elements that depend on the size, and constants that could have.
    #[allow(clippy::type_complexity)]
    fn numbers(&self) -> Result<(Vec<(ValueId, Vec<RunSize>)>, Vec<(ValueId, Tensor)>), OpenError> {
        let (mut numbers, mut same) = (Vec::new(), Vec::new());
        let used = self.used();
        for (at, (id, whole)) in self.whole.net.varying.iter().enumerate() {
            if !used.contains(id) {
                continue;
            }
            let fail = || self.differs(&self.node_of(*id), "computes with other numbers", self.at[0], self.at[1]);
            let of_probes = self.probes.map(|probe| probe.net.varying.get(at).filter(|(own, _)| own == id));
            let [Some((_, first)), Some((_, second))] = of_probes else { return Err(fail()) };
            if [first, second].into_iter().all(|part| is_corner(part, whole)) {
                same.push((*id, whole.clone()));
                continue;
            }
            let is_number = first.ty() == whole.ty() && second.ty() == whole.ty();
            let is_list = [first, second, whole].iter().all(|x| x.shape().len() == 1 && !x.shape().contains(&0));
            (is_number || is_list).then_some(()).ok_or_else(fail)?;
            let whole_numbers = |tensor: &Tensor| match tensor.dtype().is_float() {
                true => tensor.floats().into_iter().map(|x| (x.fract() == 0.0).then_some(x as i64)).collect(),
                false => Some(tensor.i64s()),
            };
            let [Some(first), Some(second), Some(most)] = [first, second, whole].map(whole_numbers) else {
                return Err(fail());
            };
            let size = |at: usize| {
                through(self.dim, self.at, [first[at], second[at]]).filter(|size| size.at(self.dim.most) == most[at])
            };
            // A list that has another length at each size is of consecutive numbers.
            let is_counted = |all: &[i64]| all.windows(2).all(|pair| pair[1] == pair[0] + 1);
            let sizes = match is_number {
                true => (0..most.len()).map(size).collect::<Option<Vec<_>>>(),
                false if [&first, &second, &most].into_iter().all(|all| is_counted(all)) => {
                    let next =
                        |first: RunSize, at: usize| RunSize { term: first.term + at as i64 * first.divisor, ..first };
                    size(0).map(|first| (0..most.len()).map(|at| next(first, at)).collect())
                }
                false => None,
            };
            let sizes = sizes.filter(|sizes| sizes.len() <= MOST_NUMBERS || are_counted(sizes)).ok_or_else(fail)?;
            numbers.push((*id, sizes));
        }
        Ok((numbers, same))
    }

    /// Finds parameters of calls that depend on the size: those of each node that has such.
    fn calls(&self) -> Result<SizesOfCalls, OpenError> {
        let mut found = SizesOfCalls::new();
        for (at, step) in self.whole.steps.iter().enumerate() {
            let Step::Host(node) = step else { continue };
            let Kind::Call(whole) = &node.kind else { continue };
            let of_probes = self.probes.map(|probe| match probe.steps.get(at) {
                Some(Step::Host(Node { kind: Kind::Call(call), outputs, .. })) if *outputs == node.outputs => {
                    Some(call).filter(|call| call.parameters.len() == whole.parameters.len())
                }
                _ => None,
            });
            let fail = || self.differs(&node.origin, "has other parameters", self.at[0], self.at[1]);
            let [Some(first), Some(second)] = of_probes else { return Err(fail()) };
            if first.scratch_bytes.max(second.scratch_bytes) > whole.scratch_bytes {
                return Err(fail());
            }
            if first.parameters == whole.parameters && second.parameters == whole.parameters {
                continue;
            }
            let sizes = first.parameters.iter().zip(&second.parameters).zip(&whole.parameters);
            let sizes = sizes.map(|((first, second), most)| {
                let size = through(self.dim, self.at, [*first, *second]);
                size.filter(|size| size.at(self.dim.most) == *most)
            });
            found.insert(node.outputs[0], sizes.collect::<Option<Vec<_>>>().ok_or_else(fail)?);
        }
        Ok(found)
    }

    /// Finds the open sizes of products and convolutions.
    fn sizes(&self) -> Result<SizesOf, OpenError> {
        let by_result = self.probes.map(|probe| {
            let kernels = probe.each().filter_map(|(step, _)| match step {
                Step::Kernel(kernel) => Some((kernel.output, kernel)),
                _ => None,
            });
            kernels.collect::<HashMap<ValueId, &Kernel>>()
        });
        let mut all = HashMap::new();
        for (step, _) in self.whole.each() {
            let Step::Kernel(kernel) = step else { continue };
            if matches!(kernel.workload.structure(), Structure::Nest(_)) {
                continue;
            }
            let fail = || self.differs(&kernel.origin, "is computed in another way", self.at[0], self.dim.most);
            let [Some(first), Some(second)] = by_result.each_ref().map(|known| known.get(&kernel.output)) else {
                return Err(fail());
            };
            let mut open = Vec::new();
            let mut changed = [first.workload.clone(), second.workload.clone()];
            if changed.iter().any(|other| *other.operator() != *kernel.workload.operator()) {
                return Err(fail());
            }
            for size in kernel.workload.operator().sizes {
                let most = kernel.workload.size(size.name);
                let of_probes = changed.each_ref().map(|workload| workload.size(size.name));
                let found = through(self.dim, self.at, of_probes).filter(|found| found.at(self.dim.most) == most);
                let found = found.ok_or_else(fail)?;
                if found.factor != 0 {
                    open.push((size.name, found));
                    for workload in &mut changed {
                        *workload = workload.with_size(size.name, most).ok_or_else(fail)?;
                    }
                }
            }
            if changed.iter().any(|other| other.to_string() != kernel.workload.to_string()) {
                return Err(fail());
            }
            all.insert(kernel.output, open);
        }
        Ok(all)
    }
}

/// Whether two nodes do the same with tensors of other sizes.
fn are_alike(a: &Node, b: &Node) -> bool {
    let kinds = match (&a.kind, &b.kind) {
        (Kind::Sequence(a), Kind::Sequence(b)) => {
            let nodes = || a.body.nodes.iter().zip(&b.body.nodes);
            let is_same = a.n_steps == b.n_steps && a.body.nodes.len() == b.body.nodes.len();
            is_same && nodes().all(|(a, b)| are_alike(a, b))
        }
        (Kind::Loop(a), Kind::Loop(b)) => a.n_carried == b.n_carried && a.n == b.n && are_alike_inside(a, b),
        // How many products a batch has is compared in workloads.
        (Kind::Product { turned, heads: Some(a) }, Kind::Product { turned: other, heads: Some(b) }) => {
            turned == other && AsHeads { b: 0, ..*a } == AsHeads { b: 0, ..*b }
        }
        // Parameters are compared as numbers of the size.
        (Kind::Call(a), Kind::Call(b)) => a.operator.name == b.operator.name,
        (a, b) => format!("{a:?}") == format!("{b:?}"),
    };
    kinds && a.inputs == b.inputs && a.outputs == b.outputs
}

/// Whether iterations of two loops do the same: what they have of other sizes is read by calls alone.
fn are_alike_inside(a: &Repeat, b: &Repeat) -> bool {
    let [a, b] = [&a.body, &b.body];
    let is_same = (&a.inputs, &a.outputs) == (&b.inputs, &b.outputs) && a.values.len() == b.values.len();
    let nodes = || a.nodes.iter().zip(&b.nodes);
    if !is_same || a.nodes.len() != b.nodes.len() || nodes().any(|(a, b)| !are_alike(a, b)) {
        return false;
    }
    let differ = |id: &ValueId| a.shape(*id) != b.shape(*id);
    let (calls, others): (Vec<&Node>, Vec<&Node>) = a.nodes.iter().partition(|node| matches!(node.kind, Kind::Call(_)));
    let constants = a.values.iter().zip(&b.values).all(|(a, b)| a.constant == b.constant);
    let ids = others.iter().flat_map(|node| node.inputs.iter().flatten().chain(&node.outputs));
    constants && !ids.chain(calls.iter().flat_map(|node| &node.outputs)).any(differ)
}

/// Whether the elements of a tensor are those of a larger one with the same indices.
fn is_corner(part: &Tensor, whole: &Tensor) -> bool {
    let (own, all) = (part.shape(), whole.shape());
    if own.len() != all.len() || own.iter().zip(all).any(|(own, all)| own > all) || part.dtype() != whole.dtype() {
        return false;
    }
    if part.bytes().is_empty() {
        return true;
    }
    let row = own.last().copied().unwrap_or(1);
    let width = part.bytes().len() / part.n_elements();
    if width == 0 {
        // Two elements share a byte.
        return own.get(1..) == all.get(1..) && whole.bytes().starts_with(part.bytes());
    }
    let n_rows = part.n_elements() / row;
    (0..n_rows).all(|at| {
        let (mut rest, mut from, mut stride) = (at, 0, all.last().copied().unwrap_or(1));
        for axis in (0..own.len().saturating_sub(1)).rev() {
            from += rest % own[axis] * stride;
            rest /= own[axis];
            stride *= all[axis];
        }
        whole.bytes()[from * width..][..row * width] == part.bytes()[at * row * width..][..row * width]
    })
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
    let refuse = |node: &str, why: &str| {
        Err(OpenError::Node { node: node.to_owned(), why: why.to_owned(), name: open.dim.name.clone() })
    };
    for &id in net.inputs.iter().chain(&net.outputs) {
        let n_ahead = outer_of_open(net.shape(id), axes(id));
        if n_ahead.is_none_or(|n| n > MOST_MOVES) {
            return refuse(&net.value(id).name, "has the open dimension behind another one");
        }
    }
    let in_memory = |id: ValueId| in_memory(net.shape(id), axes(id));
    let sequences = fused.steps.iter().filter_map(|step| match step {
        Step::Sequence(sequence) => Some(sequence),
        _ => None,
    });
    let mut within: Vec<&Node> = Vec::new();
    for sequence in sequences {
        within.extend(&sequence.nodes);
        let moves = |moving: &&Moving| !is_part_of_steps(net, moving, &in_memory);
        if let (Some(node), Some(_)) = (sequence.nodes.last(), sequence.moving.iter().find(moves)) {
            return refuse(&node.origin, "has steps of a sequence");
        }
    }
    for node in net.nodes.iter().chain(within) {
        let all = || node.inputs.iter().flatten().chain(&node.outputs);
        if all().all(|id| axes(*id).iter().all(Option::is_none)) {
            continue;
        }
        match &node.kind {
            Kind::View if in_memory(node.input(0)) != in_memory(node.output()) => {
                return refuse(&node.origin, "joins or divides the open dimension");
            }
            Kind::Concat(axis) => {
                let parts: Vec<ValueId> = node.inputs.iter().flatten().copied().collect();
                let is_open = |id: &ValueId| axes(*id)[*axis].is_some();
                // An open part of a concatenation that follows others must end where the whole ends.
                let (Some((last, others)), outer) = (parts.split_last(), &axes(node.output())[..*axis]) else {
                    continue;
                };
                if others.iter().any(is_open) || is_open(last) && outer.iter().any(Option::is_some) {
                    return refuse(&node.origin, "joins tensors along the open dimension");
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
                    return refuse(&node.origin, "cuts or resizes the open dimension");
                }
            }
            Kind::Append(axis) => {
                let is_open_before = axes(node.output())[..*axis].iter().any(Option::is_some);
                if is_open_before || axes(node.output())[*axis + 1..].iter().any(Option::is_some) {
                    return refuse(&node.origin, "appends to a state in which another dimension is open");
                }
            }
            // What goes from one iteration to the next is copied as a whole; rows lie one behind the other.
            Kind::Loop(repeat) => {
                let carried = &node.inputs[2..2 + repeat.n_carried];
                let is_open = |id: &ValueId| axes(*id).iter().any(Option::is_some);
                if carried.iter().flatten().any(is_open) || all().any(|id| !is_in_rows(net.shape(*id), axes(*id))) {
                    return refuse(&node.origin, "repeats steps with the open dimension");
                }
            }
            Kind::Packed(_) => return refuse(&node.origin, "has packed weights, whose kernels know their rows"),
            // Functions take whole tensors, whose elements lie one behind the other.
            Kind::Call(_) => {
                if let Some(id) = all().find(|id| !is_in_rows(net.shape(**id), axes(**id))) {
                    let (operator, name) = (node.operator(), &net.value(*id).name);
                    let why = format!("({operator}) takes `{name}` with the open dimension behind another one");
                    return refuse(&node.origin, &why);
                }
            }
            Kind::Host(_) => {
                return refuse(&node.origin, &format!("({}) has no code for a size that runs say", node.operator()));
            }
            Kind::View | Kind::Map(_) | Kind::Transpose(_) | Kind::Slice(_) | Kind::Reduce(..) => {}
            Kind::Conv(_) | Kind::Product { .. } | Kind::Gather { .. } | Kind::Sequence(_) => {}
        }
    }
    Ok(())
}

/// Open dimension of a tensor in memory: the number of elements ahead of it, and with what follows it, its
/// factor, term and divisor.
type OpenPart = [i64; 4];

/// Open dimensions of a tensor in memory. Strides after an open dimension are those of the largest size.
fn in_memory(shape: &[i64], axes: &[Option<RunSize>]) -> Vec<OpenPart> {
    let of = |(axis, size): (usize, &Option<RunSize>)| {
        let size = (*size)?;
        let [outer, inner] = [&shape[..axis], &shape[axis + 1..]].map(|part| part.iter().product::<i64>());
        Some([outer, size.factor * inner, size.term * inner, size.divisor])
    };
    axes.iter().enumerate().filter_map(of).collect()
}

/// Whether a value of a step is, at all sizes, as much of a tensor of all steps as at the largest.
fn is_part_of_steps(net: &Net, moving: &Moving, in_memory: &dyn Fn(ValueId) -> Vec<OpenPart>) -> bool {
    let part = in_memory(moving.value);
    let n = net.value(moving.value).n_elements();
    let is_whole = moving.first.is_none_or(|first| in_memory(first) == part);
    let is_of_each = match (&part[..], &in_memory(moving.of)[..]) {
        ([], []) => true,
        ([[1, part @ ..]], [[_, of @ ..]]) => part == of && moving.track.first % n == 0 && moving.track.by % n == 0,
        _ => false,
    };
    is_whole && is_of_each
}

/// Range of an open number.
fn range_of(dim: &OpenDimension, size: RunSize) -> SizeRange {
    let step = if size.multiple == 1 { size.factor * dim.step / size.divisor } else { size.multiple };
    SizeRange { least: size.at(dim.least), most: size.at(dim.most), step }
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
            self.each().any(|(step, _)| match step {
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
        let axes = self.open.as_ref()?.axes.get(id.0)?;
        let (axis, size) = axes.iter().enumerate().find_map(|(axis, size)| Some((axis, (*size)?)))?;
        (!is_in_rows(self.net.shape(id), axes)).then_some((axis, size))
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
        self.steps = self.opened_steps(&open)?;
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

    /// Steps whose kernels have open sizes.
    fn opened_steps(&self, open: &OpenNet) -> Result<Vec<Step>, OpenError> {
        let rows = self.in_rows(open);
        let mut changed = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
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
                    let within = Fused { net, steps: sequence.steps.clone(), ..self.clone() };
                    Step::Sequence(Steps { steps: within.opened_steps(open)?, ..sequence.clone() })
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
                        && size.at(open.dim.most) % WHOLE_VECTORS == 0
                        && self.has_own_memory(kernel.inputs[1])
                        && self.has_own_memory(kernel.output);
                    (*name, RunSize { multiple: if is_whole { WHOLE_VECTORS } else { 1 }, ..*size })
                };
                // A size that is constant after rounding is not open.
                let open_sizes = sizes.iter().map(rounded).filter_map(|(name, size)| {
                    let mut range = range_of(&open.dim, size);
                    range.most = open.room(kernel, &product, name).unwrap_or(range.most);
                    (range.least < range.most).then_some(((name, range), size))
                });
                let (ranges, sizes): (Vec<(&str, SizeRange)>, Vec<RunSize>) = open_sizes.unzip();
                let workload = kernel.workload.with_ranges(&ranges)?;
                let is_longer = |(name, _): &(&str, SizeRange)| open.room(kernel, &product, name).is_some();
                let rooms = if ranges.iter().any(is_longer) { rooms(&workload) } else { Vec::new() };
                let open = Some(Box::new(Open { sizes, each: None, rooms }));
                Ok(Kernel { workload, open, ..kernel.clone() })
            }
            Structure::Window(_) => match open.sizes[&kernel.output][..] {
                [("n", size)] => {
                    let workload = kernel.workload.with_size("n", 1).expect("one image is a convolution's");
                    Ok(each(Kernel { workload, ..kernel.clone() }, size, open))
                }
                // Columns of images of one row are rows of those of one column: the same elements in memory.
                [("w", size)] if let Some(column) = kernel.workload.in_column() => {
                    let workload = column.with_ranges(&[(Window::OPEN, range_of(&open.dim, size))])?;
                    Ok(sized(Kernel { workload, ..kernel.clone() }, vec![size]))
                }
                [(Window::OPEN, size)] => {
                    let workload = kernel.workload.with_ranges(&[(Window::OPEN, range_of(&open.dim, size))])?;
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
                        let range = Some((size, range_of(&open.dim, size)));
                        (conversion_of(dtype, self.net.shape(from), kernel.in_blocks, to_blocks, range)?, size)
                    }
                    [_, _, None, Some(size)] if self.net.shape(from)[2] == 1 => {
                        let &[n, c, _, columns] = self.net.shape(from) else { unreachable!("it is an image") };
                        let range = Some((size, range_of(&open.dim, size)));
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

    /// Makes a product of an open batch the repeated product of one item, if the items of all operands are
    /// contiguous.
    fn open_batch(&self, kernel: &Kernel, size: RunSize, open: &OpenNet) -> Option<Kernel> {
        let items = RunSize { factor: 1, term: 0, multiple: 1, divisor: 1 };
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
            Some((size, range_of(&open.dim, size)))
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
            let n_row = net.value(id).n_elements() / size.at(open.dim.most);
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
        let mut root = id;
        while let Some(of) = self.steps.iter().find_map(|step| match step {
            Step::Part { of, part, .. } if *part == root => Some(*of),
            _ => None,
        }) {
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
    Kernel { open: Some(Box::new(Open { sizes, each: None, rooms: Vec::new() })), ..kernel }
}

/// Makes a kernel of one row that is repeated `size` times.
fn each(kernel: Kernel, size: RunSize, open: &OpenNet) -> Kernel {
    let along = kernel.inputs.iter().chain([&kernel.output]).map(|id| open.axes[id.0].iter().any(Option::is_some));
    let each = Some((size, range_of(&open.dim, size), along.collect()));
    Kernel { open: Some(Box::new(Open { sizes: Vec::new(), each, rooms: Vec::new() })), ..kernel }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn dim(least: i64, most: i64, step: i64) -> OpenDimension {
        OpenDimension { name: "n".to_owned(), least, most, step }
    }

    #[test]
    fn probes_are_apart_and_inside() {
        for (dim, expected) in [
            (dim(1, 512, 1), Some([307, 409])),
            (dim(1, 32, 1), Some([19, 23])),
            (dim(32, 512, 32), Some([320, 416])),
            (dim(1, 2, 1), None),
        ] {
            assert_eq!(probes(&dim), expected, "{dim:?}");
        }
    }

    #[test]
    fn numbers_are_a_factor_and_a_term() {
        let tokens = dim(1, 512, 1);
        let through = |xs, ys| super::through(&tokens, xs, ys);
        assert_eq!(through([7, 13], [21, 39]), Some(RunSize { factor: 3, term: 0, multiple: 1, divisor: 1 }));
        assert_eq!(through([7, 13], [6, 12]), Some(RunSize { factor: 1, term: -1, multiple: 1, divisor: 1 }));
        assert_eq!(through([7, 13], [49, 169]), Some(RunSize { factor: 20, term: -91, multiple: 1, divisor: 1 }));
        assert_eq!(through([7, 13], [4, 7]), None);
        let rows = RunSize { factor: 1, term: 96, divisor: 32, multiple: 1 };
        assert_eq!(super::through(&dim(320, 1280, 32), [896, 1088], [31, 37]), Some(rows));
        let rounded = RunSize { factor: 1, term: 0, multiple: 16, divisor: 1 };
        assert_eq!([1, 16, 17].map(|n| rounded.at(n)), [16, 16, 32]);
    }
}
