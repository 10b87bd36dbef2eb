//! Comparison of a model at several sizes: what is equal, and numbers that are affine in a size.

use std::collections::{HashMap, HashSet};

use tilewright_graph::Tensor;
use tilewright_ir::gcd;
use tilewright_ir::op::{Structure, Workload};
use tilewright_runtime::{OpenDimension, RunSize};

use super::{OpenError, SizesOf, SizesOfCalls};
use crate::fuse::{Fused, Kernel, Step};
use crate::net::{AsHeads, Kind, Node, Repeat, ValueId};

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
pub(super) fn probes(dim: &OpenDimension, others: &[i64]) -> Option<[i64; 2]> {
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
    pub(super) dims: &'a [OpenDimension],
    pub(super) at: Vec<[i64; 2]>,
}

impl<'a> Probes<'a> {
    /// Chooses sizes of one dimension or of two.
    pub(super) fn new(dims: &'a [OpenDimension]) -> Result<Probes<'a>, OpenError> {
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
    pub(super) fn sizes(&self) -> impl Iterator<Item = Vec<i64>> {
        let of = move |(dim, sizes): (usize, &[i64; 2])| {
            sizes.map(|size| {
                let mut own = self.most();
                own[dim] = size;
                own
            })
        };
        self.at.iter().enumerate().flat_map(of).chain([self.most()])
    }

    /// Sizes of few rows, for each dimension, with the others at their largest; `None` if those of probes are
    /// as few. Of a single row, transpositions, for example, are none.
    pub(super) fn few(&self) -> impl Iterator<Item = Option<Vec<i64>>> {
        self.dims.iter().zip(&self.at).enumerate().map(|(at, (dim, [first, _]))| {
            let mut own = self.most();
            own[at] = if dim.least == 1 { dim.least + dim.step } else { dim.least };
            (own[at] >= 1 && own[at] < *first).then_some(own)
        })
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

/// Comparison of a model at several sizes.
pub(super) struct SizeComparison<'a> {
    pub(super) probes: &'a Probes<'a>,
    /// Nets of the probes' sizes but for the largest.
    pub(super) nets: &'a [Fused],
    /// Net of the largest sizes.
    pub(super) whole: &'a Fused,
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
    pub(super) fn nodes(&self) -> Result<(), OpenError> {
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
    pub(super) fn axes(&self) -> Result<Vec<Vec<Option<RunSize>>>, OpenError> {
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
    pub(super) fn numbers(&self) -> Result<(Vec<(ValueId, Vec<RunSize>)>, Vec<(ValueId, Tensor)>), OpenError> {
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
    pub(super) fn calls(&self) -> Result<SizesOfCalls, OpenError> {
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
    pub(super) fn sizes(&self) -> Result<SizesOf, OpenError> {
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
pub(super) fn is_corner(part: &Tensor, whole: &Tensor) -> bool {
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

/// Elements of a tensor of whole numbers.
pub(super) fn integers(tensor: &Tensor) -> Option<Vec<i64>> {
    match tensor.dtype().is_float() {
        true => tensor.floats().into_iter().map(|x| (x.fract() == 0.0).then_some(x as i64)).collect(),
        false => Some(tensor.i64s()),
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
