//! Models with a net for each combination of sizes of their open dimensions, if no single net supports all of
//! them.
//!
//! Each net is that of a model with exactly those sizes, so there is no data beyond a size: convolutions pad
//! with zeros at the ends of their images, and means count only actual elements.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use tilewright_graph::Tensor;
use tilewright_runtime::OpenDimension;

use super::OpenError;
use crate::fuse::{Fused, SizedNets};
use crate::net::{Net, ValueId};

/// Maximum number of nets of a model, each of which has steps and code of its own.
pub const MOST_NETS: i64 = 128;

/// Number of combinations of sizes.
pub fn n_combinations(dims: &[OpenDimension]) -> i64 {
    dims.iter().fold(1, |n, dim| n * ((dim.most - dim.least) / dim.step + 1))
}

/// Combinations of sizes, largest first; the size of the last dimension varies fastest.
fn combinations(dims: &[OpenDimension]) -> Vec<Vec<i64>> {
    dims.iter().fold(vec![Vec::new()], |known, dim| {
        let sizes = || (dim.least..=dim.most).rev().step_by(dim.step as usize);
        known.iter().flat_map(|sizes_before| sizes().map(|size| [&sizes_before[..], &[size]].concat())).collect()
    })
}

/// Makes a net from those that `lower` makes of a model at each `wanted` combination of sizes of some
/// dimensions.
///
/// # Errors
/// As `lower`, or if the nets differ in their inputs or outputs, or have states.
///
/// # Panics
/// If there is no dimension, or no combination is wanted.
pub fn open_sized<E: From<OpenError>>(
    dims: &[OpenDimension],
    wanted: impl Fn(&[i64]) -> bool,
    mut lower: impl FnMut(&[i64]) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let mut sizes = combinations(dims);
    sizes.retain(|sizes| wanted(sizes));
    of_nets(dims, sizes, |sizes| lower(sizes))
}

/// Makes a net as [`open_sized`] does, from nets for any size of the dimension `opened`: one for each wanted
/// combination of the other dimensions' sizes.
///
/// # Errors
/// As [`open_sized`], or if the dimension cannot be open.
///
/// # Panics
/// If there is no such dimension, or no combination is wanted.
pub fn open_beside<E: From<OpenError>>(
    dims: &[OpenDimension],
    opened: usize,
    wanted: impl Fn(&[i64]) -> bool,
    mut lower: impl FnMut(&[i64]) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let dim = &dims[opened];
    let mut sizes = combinations(dims);
    let mut needed: Vec<Vec<i64>> = sizes.iter().filter(|sizes| wanted(sizes)).cloned().collect();
    needed.iter_mut().for_each(|sizes| sizes[opened] = dim.most);
    sizes.retain(|sizes| needed.contains(sizes));
    of_nets(dims, sizes, |sizes| {
        let made = super::open(dim, |size| {
            let mut sizes = sizes.to_vec();
            sizes[opened] = size;
            lower(&sizes)
        })?;
        made.clone().open_kernels()?;
        Ok(made)
    })
}

/// Gives a net for any size of a dimension a member for each size.
pub(super) fn whole(mut fused: Fused) -> Fused {
    let dim = &fused.open.as_ref().expect("invariant: it has a dimension").dim;
    fused.sized = Some(SizedNets { dims: vec![dim.clone()], sizes: vec![vec![dim.most]] });
    fused
}

/// Makes a net from those that `lower` makes of a model at the given sizes, largest first.
fn of_nets<E: From<OpenError>>(
    dims: &[OpenDimension],
    sizes: Vec<Vec<i64>>,
    mut lower: impl FnMut(&[i64]) -> Result<Fused, E>,
) -> Result<Fused, E> {
    let name = dims.first().expect("a dimension is open").name.clone();
    let refuse = |node: &str, why: &str| {
        let (node, why, name) = (node.to_owned(), why.to_owned(), name.clone());
        E::from(OpenError::Node { node, why, name })
    };
    let mut known = KnownConstants::default();
    let mut nets = Vec::with_capacity(sizes.len());
    for own in &sizes {
        let mut fused = lower(own)?;
        if let Some(state) = fused.net.states.first() {
            return Err(refuse(&state.past, "is a past, of which there is one for all sizes"));
        }
        known.share(&mut fused.net);
        nets.push(fused);
    }
    let mut whole = nets.remove(0);
    for fused in &nets {
        let ports = |net: &Net| net.inputs.iter().chain(&net.outputs).copied().collect::<Vec<ValueId>>();
        let (own, of_whole) = (ports(&fused.net), ports(&whole.net));
        let is_alike = |(own, whole_id): (&ValueId, &ValueId)| {
            let (own, whole) = (fused.net.value(*own), whole.net.value(*whole_id));
            let fits = own.shape.iter().zip(&whole.shape).all(|(own, whole)| own <= whole);
            (&own.name, own.dtype, own.shape.len()) == (&whole.name, whole.dtype, whole.shape.len()) && fits
        };
        let differs = own.iter().zip(&of_whole).find(|pair| !is_alike(*pair));
        if let Some((_, id)) = differs {
            return Err(refuse(
                &whole.net.value(*id).name,
                "is not the same but for its sizes, at the most the largest's",
            ));
        }
        if own.len() != of_whole.len() {
            return Err(refuse("the model", "has other inputs and outputs at another size"));
        }
    }
    whole.pieces = nets;
    whole.sized = Some(SizedNets { dims: dims.to_vec(), sizes });
    Ok(whole)
}

/// Constants of nets, without duplicates.
#[derive(Default)]
struct KnownConstants(HashMap<u64, Vec<Tensor>>);

impl KnownConstants {
    /// Replaces constants of a net by equal ones of other nets.
    fn share(&mut self, net: &mut Net) {
        for constant in net.values.iter_mut().filter_map(|value| value.constant.as_mut()) {
            let mut hasher = DefaultHasher::new();
            constant.bytes().hash(&mut hasher);
            let alike = self.0.entry(hasher.finish()).or_default();
            match alike.iter().find(|known| *known == constant) {
                Some(known) => *constant = known.clone(),
                None => alike.push(constant.clone()),
            }
        }
    }
}
