//! Comparison with a model at its smallest sizes, far from the sizes that are compared otherwise: a bound
//! such as `min(size, 128)` or a test such as `size > 128` is another function of the size below 128.

use std::collections::HashMap;

use tilewright_graph::Tensor;
use tilewright_runtime::{OpenDimension, RunSize};

use super::OpenError;
use super::comparison::{Probes, SizeComparison, integers, is_corner};
use super::vary::read_numbers;
use crate::fuse::Fused;
use crate::net::{Net, ValueId};

/// Net of the smallest sizes, imported alone: what it computes is compared by the names of values.
pub(super) struct Least<'a> {
    /// Open dimensions.
    pub dims: &'a [OpenDimension],
    /// Net of a size of each.
    pub net: Net,
}

impl Least<'_> {
    /// Error of a node that is another one at the smallest size.
    fn differs(&self, node: String, what: &str) -> OpenError {
        let dim = &self.dims[0];
        let (name, what) = (dim.name.clone(), what.to_owned());
        OpenError::Differs { node, what, name, first: dim.least, second: dim.most }
    }

    /// Checks that conditions on a size choose the same branches as in a larger net.
    ///
    /// # Errors
    /// If one does not.
    pub fn require_branches_of(&self, other: &Net) -> Result<(), OpenError> {
        let (own, other) = (&self.net.branches, &other.branches);
        if own == other {
            return Ok(());
        }
        let differs = own.iter().zip(other).find(|(own, other)| own != other).map(|(own, _)| own);
        let (node, _) = differs.or(own.last()).or(other.last()).expect("invariant: one of them has a branch");
        Err(self.differs(node.clone(), "takes another branch"))
    }

    /// Checks that the values of an open net are these at the smallest sizes: how many elements they have,
    /// and which, if they depend on sizes alone.
    ///
    /// # Errors
    /// If one is not.
    pub fn require(&self, whole: &Fused) -> Result<(), OpenError> {
        let Some(open) = &whole.open else { return Ok(()) };
        let (own, all) = (by_name(&self.net), by_name(&whole.net));
        let [of_least, of_most] = [&self.net, &whole.net].map(known_elements);
        let numbers: HashMap<ValueId, &Vec<RunSize>> = open.numbers.iter().map(|(id, sizes)| (*id, sizes)).collect();
        let at = |size: RunSize| size.at(self.dims[size.dim].least);
        for (name, id) in all {
            let Some(&least) = own.get(name) else { continue };
            let fail = |what: &str| Err(self.differs(whole.net.maker_of(id), what));
            let sizes = whole.net.shape(id).iter().zip(&open.axes[id.0]);
            let n: i64 = sizes.map(|(n, size)| size.map_or(*n, at)).product();
            if n != self.net.value(least).n_elements() {
                return fail("has a size without a factor and a term");
            }
            let numbers = numbers.get(&id);
            let is_same = match (of_least.get(&least), numbers, of_most.get(&id)) {
                (Some(found), Some(sizes), _) => {
                    integers(found).is_some_and(|own| own.iter().zip(*sizes).all(|(n, size)| *n == at(*size)))
                }
                (Some(found), None, Some(all)) => is_part(found, all),
                _ => true,
            };
            if !is_same {
                return fail("computes with other numbers");
            }
        }
        Ok(())
    }

    /// Checks that what depends on sizes alone is the same in the net of the largest sizes.
    ///
    /// # Errors
    /// If something is not.
    pub fn require_part_of(&self, most: &Net) -> Result<(), OpenError> {
        self.require_branches_of(most)?;
        let (all, [own, known]) = (by_name(most), [&self.net, most].map(known_elements));
        for (name, id) in by_name(&self.net) {
            let of_most = all.get(name).and_then(|id| known.get(id));
            if let (Some(found), Some(all)) = (own.get(&id), of_most)
                && !is_part(found, all)
            {
                return Err(self.differs(self.net.maker_of(id), "computes with other numbers"));
            }
        }
        Ok(())
    }
}

/// Checks that numbers within nodes are affine also where few rows are, by nets of few of one dimension and
/// the largest number of the others, if they have as many nodes as those of probes, the last of which is the
/// largest.
///
/// # Errors
/// If one is not.
pub(super) fn require_nodes(probes: &Probes, few: Vec<Option<Fused>>, nets: &[Fused]) -> Result<(), OpenError> {
    let most = nets.last().expect("invariant: the largest is last");
    let sizes: Vec<Option<Vec<i64>>> = probes.few().collect();
    for (dim, (few, sizes)) in few.into_iter().zip(sizes).enumerate() {
        let (Some(few), Some(sizes)) = (few, sizes) else { continue };
        let mut own = Probes { dims: probes.dims, at: probes.at.clone() };
        own.at[dim] = [sizes[dim], probes.at[dim][0]];
        let mut nets = nets.to_vec();
        nets[2 * dim + 1] = std::mem::replace(&mut nets[2 * dim], few);
        let n_nodes = |fused: &Fused| (fused.net.nodes.len(), fused.net.values.len());
        if nets.iter().any(|fused| n_nodes(fused) != n_nodes(most)) || read_numbers(&own, &mut nets).is_err() {
            continue;
        }
        let whole = nets.pop().expect("invariant: the largest is last");
        SizeComparison { probes: &own, nets: &nets, whole: &whole }.nodes()?;
    }
    Ok(())
}

/// Values that nodes read or compute, by their names, without names that several have.
fn by_name(net: &Net) -> HashMap<&str, ValueId> {
    let mut found: HashMap<&str, Option<ValueId>> = HashMap::new();
    for id in net.nodes.iter().flat_map(|node| node.inputs.iter().flatten().chain(&node.outputs)) {
        let of_name = found.entry(&net.value(*id).name).or_insert(Some(*id));
        *of_name = of_name.filter(|known| known == id);
    }
    found.into_iter().filter(|(name, _)| !name.is_empty()).filter_map(|(name, id)| Some((name, id?))).collect()
}

/// Elements of the values that the model and its sizes determine.
fn known_elements(net: &Net) -> HashMap<ValueId, &Tensor> {
    let constants = net.values.iter().enumerate().filter_map(|(at, v)| Some((ValueId(at), v.constant.as_ref()?)));
    net.varying.iter().map(|(id, elements)| (*id, elements)).chain(constants).collect()
}

/// Whether the elements of a tensor are those of a larger one, as far as both have as many dimensions.
fn is_part(found: &Tensor, all: &Tensor) -> bool {
    found.shape().len() != all.shape().len() || is_corner(found, all)
}
