//! Models with open (dynamic) dimensions, whose sizes each run gives.
//!
//! There is no symbolic inference: the model is lowered at a few sizes, and the results are compared. Numbers
//! that differ, such as those of shapes, must be affine in the size of one dimension; everything else must be
//! equal. The result is the net of the largest sizes: tensors have the layout for these, and kernels process
//! only the part for the sizes of a run, by their number of rows or within rows.

mod columns;
mod groups;
mod items;
mod least;
pub(crate) mod loops;
mod pieces;
mod pitch;
mod sized;
mod vary;

use std::collections::{HashMap, HashSet};

use tilewright_graph::{Tensor, TensorType};
use tilewright_ir::gcd;
use tilewright_ir::op::{Contraction, Epilogue, Heads, Operand, SizeRange, Structure, Window, Workload, WorkloadError};
use tilewright_runtime::{OpenDimension, RunSize};

use crate::fuse::{Fused, Kernel, Moving, Open, Step, Steps, Undivided, nest, open_nest};
use crate::layouts::{block_of, conversion_of};
use crate::net::{AsHeads, Kind, Line, Net, Node, Repeat, State, Track, ValueId};

pub(crate) use self::columns::{exchange_columns, has_open_columns};
pub(crate) use self::groups::Groups;
pub use self::items::{open_items, open_or_repeat};
use self::least::{Least, integers, require_nodes};
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

/// Maximum number of elements of a value that depend on the size individually, unless they are consecutive
/// numbers.
const MOST_NUMBERS: usize = 64;

/// Whether numbers are consecutive at all sizes.
pub(crate) fn are_counted(sizes: &[RunSize]) -> bool {
    sizes.iter().all(|size| (size.factor, size.divisor, size.multiple) == (sizes[0].factor, 1, 1))
        && sizes.windows(2).all(|pair| pair[1].term == pair[0].term + 1)
}

/// Sizes of a dimension at which a model is lowered besides the largest: odd ones in the upper half of the
/// range, which other dimensions of the model are unlikely to have by chance; `others` are known sizes of
/// these.
fn probes(dim: &OpenDimension, others: &[i64]) -> Option<[i64; 2]> {
    let is_prime = |n: i64| n > 2 && (2..n).take_while(|d| d * d <= n).all(|d| n % d != 0);
    let inside = || (dim.least..dim.most).filter(|&size| dim.has(size) && size > 1);
    let pick = |wanted: f64, other: Option<i64>| {
        let goal = dim.least + ((dim.most - dim.least) as f64 * wanted) as i64;
        let rest = inside().filter(|size| Some(*size) != other);
        rest.min_by_key(|&size| (others.contains(&size), !is_prime(size), (size - goal).abs()))
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
    let size = RunSize { factor, divisor, ..RunSize::constant(y0 * divisor - factor * x0) };
    let is_whole = dim.step * factor % divisor == 0 && (dim.least * factor + size.term) % divisor == 0;
    is_whole.then_some(size)
}

/// Sizes at which a model with open dimensions is lowered and compared: for each dimension two, with the
/// others at their largest, and last the largest of all.
pub(crate) struct Probes<'a> {
    dims: &'a [OpenDimension],
    at: Vec<[i64; 2]>,
}

impl<'a> Probes<'a> {
    /// Chooses sizes of one dimension or of two.
    fn new(dims: &'a [OpenDimension]) -> Result<Probes<'a>, OpenError> {
        let mut at: Vec<[i64; 2]> = Vec::with_capacity(dims.len());
        for dim in dims {
            let few = || OpenError::Few { name: dim.name.clone(), least: dim.least, most: dim.most };
            let others = dims.iter().filter(|other| *other != dim).map(|other| other.most);
            let others: Vec<i64> = others.chain(at.iter().flatten().copied()).collect();
            at.push(probes(dim, &others).ok_or_else(few)?);
        }
        Ok(Probes { dims, at })
    }

    /// Largest size of each dimension.
    fn most(&self) -> Vec<i64> {
        self.dims.iter().map(|dim| dim.most).collect()
    }

    /// Sizes to lower a model at, in order.
    fn sizes(&self) -> impl Iterator<Item = Vec<i64>> {
        let of = move |(dim, sizes): (usize, &[i64; 2])| {
            sizes.map(|size| {
                let mut own = self.most();
                own[dim] = size;
                own
            })
        };
        self.at.iter().enumerate().flat_map(of).chain([self.most()])
    }

    /// Dimension with which numbers at these sizes vary; the first if none or several.
    fn dim_of<T: PartialEq>(&self, at_sizes: &[T]) -> usize {
        let differs = |dim: &usize| at_sizes[2 * dim..2 * dim + 2].iter().any(|own| Some(own) != at_sizes.last());
        let mut found = (0..self.dims.len()).filter(differs);
        found.next().filter(|_| found.next().is_none()).unwrap_or(0)
    }

    /// Number that is these at the probes' sizes; `None` unless it is affine in the size of one dimension.
    pub(crate) fn fit(&self, at_sizes: &[i64]) -> Option<RunSize> {
        let dim = self.dim_of(at_sizes);
        let (own, most) = (&self.dims[dim], *at_sizes.last()?);
        let size = through(own, self.at[dim], [at_sizes[2 * dim], at_sizes[2 * dim + 1]])?;
        let others = (0..self.dims.len()).filter(|other| *other != dim);
        let is_same = others.flat_map(|other| &at_sizes[2 * other..2 * other + 2]).all(|n| *n == most);
        (is_same && size.at(own.most) == most).then_some(RunSize { dim, ..size })
    }
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
    let of_least = lower(&dims.iter().map(|dim| dim.least).collect::<Vec<_>>())?;
    let least = Least { dims: &dims, net: of_least.net.clone() };
    nets.iter().try_for_each(|fused| least.require_branches_of(&fused.net))?;
    // Transpositions of a single row, for example, are none.
    let few = if dim.least == 1 && second.is_none() { lower(&[dim.least + dim.step])? } else { of_least };
    // Blocks of attention are worth it, but not a refusal.
    let divided = Undivided::divided(&nets).filter(|_| second.is_none());
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

/// Comparison of a model at several sizes.
struct SizeComparison<'a> {
    probes: &'a Probes<'a>,
    /// Nets of the probes' sizes but for the largest.
    nets: &'a [Fused],
    /// Net of the largest sizes.
    whole: &'a Fused,
}

impl SizeComparison<'_> {
    /// Error of a node that differs between two sizes of a dimension.
    fn differs(&self, node: &str, what: &str, dim: usize, [first, second]: [i64; 2]) -> OpenError {
        let name = self.probes.dims[dim].name.clone();
        OpenError::Differs { node: node.to_owned(), what: what.to_owned(), name, first, second }
    }

    /// Error of a node for which something differs between the sizes that are compared.
    fn differs_at<T: PartialEq>(&self, node: &str, what: &str, at_sizes: &[T]) -> OpenError {
        let dim = self.probes.dim_of(at_sizes);
        self.differs(node, what, dim, self.probes.at[dim])
    }

    /// Results of a function of each net, the largest last.
    fn each<T>(&self, of: impl Fn(&Fused) -> T) -> Vec<T> {
        self.nets.iter().chain([self.whole]).map(of).collect()
    }

    /// Compares the nodes.
    fn nodes(&self) -> Result<(), OpenError> {
        let whole = &self.whole.net;
        let sizes = self.probes.at.iter().enumerate().flat_map(|(dim, at)| at.map(|size| (dim, size)));
        for (probe, (dim, at)) in self.nets.iter().zip(sizes) {
            let (other, at) = (&probe.net, [at, self.probes.dims[dim].most]);
            let named = |node: Option<&Node>| node.map_or("the model".to_owned(), |node| node.origin.clone());
            let all = whole.nodes.iter().zip(&other.nodes);
            if let Some((node, _)) = all.clone().find(|(a, b)| !are_alike(a, b)) {
                return Err(self.differs(&node.origin, "differs", dim, at));
            }
            if whole.nodes.len() != other.nodes.len() || whole.values.len() != other.values.len() {
                let n = whole.nodes.len().min(other.nodes.len());
                let rest = whole.nodes.get(n).or(other.nodes.get(n)).or(whole.nodes.last());
                return Err(self.differs(&named(rest), "differs", dim, at));
            }
        }
        Ok(())
    }

    /// Values that exist in a run; a shape whose `Reshape` has become a view, for example, does not.
    fn used(&self) -> HashSet<ValueId> {
        let net = &self.whole.net;
        let nodes = net.nodes.iter().chain(self.whole.sequences().flat_map(|sequence| &sequence.nodes));
        let of_nodes = nodes.flat_map(|node| node.inputs.iter().flatten().chain(&node.outputs));
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
            let of_nets = self.each(|fused| fused.net.values[at].shape.clone());
            let fail = |what: &str, of: &[i64]| self.differs_at(&self.whole.net.maker_of(ValueId(at)), what, of);
            let ranks: Vec<i64> = of_nets.iter().map(|shape| shape.len() as i64).collect();
            if ranks.iter().any(|rank| Some(rank) != ranks.last()) {
                return Err(fail("has another number of dimensions", &ranks));
            }
            let fit = |axis: usize| {
                let of: Vec<i64> = of_nets.iter().map(|shape| shape[axis]).collect();
                let is_there = |size: &RunSize| {
                    let least = self.probes.dims[size.dim].least;
                    size.factor == 0 || size.at(least) >= least.min(1)
                };
                let size = self.probes.fit(&of).filter(is_there);
                let size = size.ok_or_else(|| fail("has a size without a factor and a term", &of))?;
                Ok(Some(size).filter(|size| size.factor != 0))
            };
            let axes = (0..whole.shape.len()).map(fit).collect::<Result<Vec<_>, _>>()?;
            let is_same = |constant: &Option<&Tensor>| match (&whole.constant, constant) {
                (None, None) => true,
                (Some(whole), Some(part)) => is_corner(part, whole),
                _ => false,
            };
            let constants = self.nets.iter().map(|fused| fused.net.values[at].constant.as_ref());
            let are_same: Vec<i64> = constants.map(|own| is_same(&own).into()).chain([1]).collect();
            if are_same.contains(&0) {
                return Err(fail("computes with other numbers", &are_same));
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
            let of = |fused: &Fused| fused.net.varying.get(at).filter(|(own, _)| own == id).map(|(_, own)| own.clone());
            let fail = |of: &[i64]| self.differs_at(&self.whole.net.maker_of(*id), "computes with other numbers", of);
            let found: Option<Vec<Tensor>> = self.each(of).into_iter().collect();
            let found = found.ok_or_else(|| fail(&vec![0; self.nets.len() + 1]))?;
            if found.iter().all(|part| is_corner(part, whole)) {
                same.push((*id, whole.clone()));
                continue;
            }
            let lengths: Vec<i64> = found.iter().map(|x| x.n_elements() as i64).collect();
            let is_number = found.iter().all(|own| own.ty() == whole.ty());
            let is_list = found.iter().all(|x| x.shape().len() == 1 && !x.shape().contains(&0));
            (is_number || is_list).then_some(()).ok_or_else(|| fail(&lengths))?;
            let found: Option<Vec<Vec<i64>>> = found.iter().map(integers).collect();
            let found = found.ok_or_else(|| fail(&lengths))?;
            let n = found[found.len() - 1].len();
            let of_element = |at: usize| found.iter().map(|own| own[at]).collect::<Vec<i64>>();
            let size = |at: usize| self.probes.fit(&of_element(at));
            // A list that has another length at each size is of consecutive numbers.
            let is_counted = |all: &Vec<i64>| all.windows(2).all(|pair| pair[1] == pair[0] + 1);
            let sizes = match is_number {
                true => (0..n).map(size).collect::<Option<Vec<_>>>(),
                false if found.iter().all(is_counted) => {
                    let next =
                        |first: RunSize, at: usize| RunSize { term: first.term + at as i64 * first.divisor, ..first };
                    size(0).map(|first| (0..n).map(|at| next(first, at)).collect())
                }
                false => None,
            };
            // A table has a row for each size of one dimension.
            let are_of_one = |sizes: &Vec<RunSize>| {
                let mut open = sizes.iter().filter(|size| size.factor != 0).map(|size| size.dim);
                let first = open.next();
                open.all(|dim| Some(dim) == first)
            };
            let sizes = sizes.filter(|sizes| sizes.len() <= MOST_NUMBERS || are_counted(sizes)).filter(are_of_one);
            let sizes = sizes.ok_or_else(|| fail(&of_element(0)))?;
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
            let of_step = |fused: &'_ Fused| match fused.steps.get(at) {
                Some(Step::Host(Node { kind: Kind::Call(call), outputs, .. })) if *outputs == node.outputs => {
                    Some(call.clone()).filter(|call| call.parameters.len() == whole.parameters.len())
                }
                _ => None,
            };
            let fail = || self.differs(&node.origin, "has other parameters", 0, self.probes.at[0]);
            let calls: Option<Vec<_>> = self.each(of_step).into_iter().collect();
            let calls = calls.filter(|calls| calls.iter().all(|call| call.scratch_bytes <= whole.scratch_bytes));
            let calls = calls.ok_or_else(fail)?;
            if calls.iter().all(|call| call.parameters == whole.parameters) {
                continue;
            }
            let of_parameter = |at: usize| calls.iter().map(|call| call.parameters[at]).collect::<Vec<i64>>();
            let sizes = (0..whole.parameters.len()).map(|at| self.probes.fit(&of_parameter(at)));
            found.insert(node.outputs[0], sizes.collect::<Option<Vec<_>>>().ok_or_else(fail)?);
        }
        Ok(found)
    }

    /// Finds the open sizes of products and convolutions.
    fn sizes(&self) -> Result<SizesOf, OpenError> {
        let by_result = self.nets.iter().map(|probe| {
            let kernels = probe.each().filter_map(|(step, _)| match step {
                Step::Kernel(kernel) => Some((kernel.output, kernel)),
                _ => None,
            });
            kernels.collect::<HashMap<ValueId, &Kernel>>()
        });
        let by_result: Vec<HashMap<ValueId, &Kernel>> = by_result.collect();
        let mut all = HashMap::new();
        for (step, _) in self.whole.each() {
            let Step::Kernel(kernel) = step else { continue };
            if matches!(kernel.workload.structure(), Structure::Nest(_)) {
                continue;
            }
            let fail = |dim: usize| {
                let at = [self.probes.at[dim][0], self.probes.dims[dim].most];
                self.differs(&kernel.origin, "is computed in another way", dim, at)
            };
            let of_nets = by_result.iter().map(|known| Some(known.get(&kernel.output)?.workload.clone()));
            let mut changed: Vec<Workload> = of_nets.collect::<Option<_>>().ok_or_else(|| fail(0))?;
            let mut open = Vec::new();
            if let Some(at) = changed.iter().position(|other| *other.operator() != *kernel.workload.operator()) {
                return Err(fail(at / 2));
            }
            for size in kernel.workload.operator().sizes {
                let most = kernel.workload.size(size.name);
                let of: Vec<i64> = changed.iter().map(|workload| workload.size(size.name)).chain([most]).collect();
                let found = self.probes.fit(&of).ok_or_else(|| fail(self.probes.dim_of(&of)))?;
                if found.factor != 0 {
                    open.push((size.name, found));
                    for workload in &mut changed {
                        *workload = workload.with_size(size.name, most).ok_or_else(|| fail(found.dim))?;
                    }
                }
            }
            if let Some(at) = changed.iter().position(|other| other.to_string() != kernel.workload.to_string()) {
                return Err(fail(at / 2));
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
            assert_eq!(probes(&dim, &[]), expected, "{dim:?}");
        }
    }

    #[test]
    fn numbers_are_a_factor_and_a_term() {
        let tokens = dim(1, 512, 1);
        let through = |xs, ys| super::through(&tokens, xs, ys);
        assert_eq!(through([7, 13], [21, 39]), Some(RunSize { factor: 3, ..RunSize::constant(0) }));
        assert_eq!(through([7, 13], [6, 12]), Some(RunSize { factor: 1, ..RunSize::constant(-1) }));
        assert_eq!(through([7, 13], [49, 169]), Some(RunSize { factor: 20, ..RunSize::constant(-91) }));
        assert_eq!(through([7, 13], [4, 7]), None);
        let rows = RunSize { factor: 1, divisor: 32, ..RunSize::constant(96) };
        assert_eq!(super::through(&dim(320, 1280, 32), [896, 1088], [31, 37]), Some(rows));
        let rounded = RunSize { factor: 1, multiple: 16, ..RunSize::constant(0) };
        assert_eq!([1, 16, 17].map(|n| rounded.at(n)), [16, 16, 32]);
    }

    #[test]
    fn numbers_depend_on_one_dimension() {
        let dims = [dim(0, 47, 1), dim(1, 512, 1)];
        let probes = Probes::new(&dims).unwrap();
        assert_eq!(probes.sizes().collect::<Vec<_>>(), [[29, 512], [37, 512], [47, 307], [47, 409], [47, 512]]);
        let of = |dim: usize, factor: i64, term: i64| Some(RunSize { dim, factor, ..RunSize::constant(term) });
        for (at_sizes, expected) in [
            ([30, 38, 48, 48, 48], of(0, 1, 1)),
            ([1024, 1024, 614, 818, 1024], of(1, 2, 0)),
            ([9, 9, 9, 9, 9], of(0, 0, 9)),
            ([541, 549, 354, 456, 559], None),
            ([7, 7, 300, 409, 512], None),
        ] {
            assert_eq!(probes.fit(&at_sizes), expected, "{at_sizes:?}");
        }
    }
}
