//! Gather and scatter operators.

use super::util::{around, axis, larger, pick, product, size, smaller, strides};
use super::{Import, Inputs, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Slices of input 0 along `axis`, chosen by the indices of input 1. The output's shape is that of input 0
/// with `axis` replaced by the indices' dimensions.
#[derive(Debug, Clone, Copy)]
pub struct Gather {
    /// Dimension that the indices refer to; negative counts from the end.
    pub axis: i64,
}

/// Elements of input 0: at each place of input 1, its index replaces the place's coordinate along `axis`. The
/// output has the shape of input 1.
#[derive(Debug, Clone, Copy)]
pub struct GatherElements {
    /// Dimension that the indices refer to; negative counts from the end.
    pub axis: i64,
}

/// Slices of input 0, each chosen by a coordinate tuple: the tuples are the last dimension of input 1.
#[derive(Debug, Clone, Copy)]
pub struct GatherNd {
    /// Number of leading dimensions shared by both inputs, which the tuples do not index.
    pub n_batch_dims: usize,
}

/// Reduction of the previous element with the scattered one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Scatter {
    Replace,
    Add,
    Mul,
    Max,
    Min,
}

/// Copy of input 0 with the elements of input 2 scattered into it: at each place of input 1, its index
/// replaces the place's coordinate along `axis`.
#[derive(Debug, Clone, Copy)]
pub struct ScatterElements {
    /// Dimension that the indices refer to; negative counts from the end.
    pub axis: i64,
    /// Reduction with the previous element.
    pub reduction: Scatter,
}

/// Copy of input 0 with slices of input 2 scattered to coordinate tuples, which are the last dimension of
/// input 1.
#[derive(Debug, Clone, Copy)]
pub struct ScatterNd {
    /// Reduction with the previous elements.
    pub reduction: Scatter,
}

/// Update of a key or value cache, input 0, with new entries, input 1, written along `axis` at the start
/// position of each batch element, input 2 (0 by default).
#[derive(Debug, Clone, Copy)]
pub struct TensorScatter {
    /// Sequence dimension of the cache; negative counts from the end.
    pub axis: i64,
    /// Whether positions past the end wrap around to the beginning; else they are an error.
    pub is_circular: bool,
}

/// Encoding of integer indices, input 0, as one-hot vectors along a new dimension of size `depth`, input 1.
/// Input 2 holds the two values `[off, on]`: `on` at the index, `off` elsewhere and everywhere for an index
/// out of range. The output has the type of input 2.
#[derive(Debug, Clone, Copy)]
pub struct OneHot {
    /// Position of the new dimension in the output; negative counts from the end.
    pub axis: i64,
}

/// Slices of input 0 along `axis` for which the boolean vector, input 1, is true; without an axis, elements
/// of the flattened input.
#[derive(Debug, Clone, Copy)]
pub struct Compress {
    /// Dimension that slices are taken along; `None` flattens the input.
    pub axis: Option<i64>,
}

fn reduction(node: &Import, since: i64) -> Result<Scatter, OpError> {
    let known = [
        ("none", Scatter::Replace),
        ("add", Scatter::Add),
        ("mul", Scatter::Mul),
        ("max", Scatter::Max),
        ("min", Scatter::Min),
    ];
    if node.version < since { Ok(Scatter::Replace) } else { node.one_of("reduction", "none", &known) }
}

fn import_scatter(node: &Import) -> Result<super::Op, OpError> {
    Ok(ScatterElements { axis: node.int_or("axis", 0)?, reduction: reduction(node, 16)? }.into())
}

pub(super) const ROWS: &[Operator] = &[
    row("Gather", &[1, 11, 13], 2..=2, |node| Ok(Gather { axis: node.int_or("axis", 0)? }.into())),
    row("GatherElements", &[11, 13], 2..=2, |node| Ok(GatherElements { axis: node.int_or("axis", 0)? }.into())),
    row("GatherND", &[11, 12, 13], 2..=2, |node| {
        let n = if node.version < 12 { 0 } else { node.int_or("batch_dims", 0)? };
        Ok(GatherNd { n_batch_dims: size(n)? }.into())
    }),
    row("Scatter", &[9, 11], 3..=3, import_scatter),
    row("ScatterElements", &[11, 13, 16, 18], 3..=3, import_scatter),
    row("ScatterND", &[11, 13, 16, 18], 3..=3, |node| Ok(ScatterNd { reduction: reduction(node, 16)? }.into())),
    row("TensorScatter", &[24], 2..=3, |node| {
        let is_circular = node.one_of("mode", "linear", &[("linear", false), ("circular", true)])?;
        Ok(TensorScatter { axis: node.int_or("axis", -2)?, is_circular }.into())
    }),
    row("OneHot", &[9, 11, 28], 3..=3, |node| Ok(OneHot { axis: node.int_or("axis", -1)? }.into())),
    row("Compress", &[9, 11, 28], 2..=2, |node| Ok(Compress { axis: node.int("axis")? }.into())),
];

/// Converts indices that may count from the end to positions.
fn places(indices: &Tensor, n: usize) -> Result<Vec<usize>, OpError> {
    let place = |index: i64| {
        let counted = if index < 0 { index.saturating_add(n as i64) } else { index };
        let place = usize::try_from(counted).ok().filter(|&place| place < n);
        place.ok_or_else(|| invalid!("index {index} is not one of {n}"))
    };
    indices.i64s().into_iter().map(place).collect()
}

impl Operation for Gather {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let at = axis(self.axis, ty.shape.len())?;
        let shape = [&ty.shape[..at], inputs.shape(1)?, &ty.shape[at + 1..]].concat();
        Ok(vec![TensorType::new(ty.dtype, shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let at = axis(self.axis, x.shape().len())?;
        let (outer, n, inner) = around(x.shape(), at);
        let places = places(inputs.tensor(1)?, n)?;
        let size = inner * ty.dtype.size();
        let mut bytes = Vec::with_capacity(ty.n_elements() * ty.dtype.size());
        for o in 0..outer {
            for &place in &places {
                let start = (o * n + place) * size;
                bytes.extend_from_slice(&x.bytes()[start..start + size]);
            }
        }
        Ok(vec![Tensor::new(ty, bytes.into()).expect("a slice for each index")])
    }
}

/// Position in the data along an axis, for each element of the indices.
fn element_places(data: &[usize], indices: &Tensor, axis: usize) -> Result<Vec<usize>, OpError> {
    let shape = indices.shape();
    let fits = shape.len() == data.len() && (0..data.len()).all(|d| d == axis || shape[d] <= data[d]);
    if !fits {
        return Err(invalid!("indices of shape {shape:?} do not fit data of shape {data:?}"));
    }
    let own = strides(data);
    let along = places(indices, data[axis])?;
    if (0..data.len()).all(|d| d == axis || shape[d] == data[d]) {
        let (_, n, inner) = around(shape, axis);
        let slices = along.chunks(inner.max(1)).enumerate();
        let slice = |(at, slice): (usize, &[usize])| {
            let outer = at / n * data[axis];
            slice.iter().enumerate().map(|(i, along)| (outer + along) * inner + i).collect::<Vec<usize>>()
        };
        return Ok(slices.flat_map(slice).collect());
    }
    let place = |(at, along): (usize, usize)| {
        let mut rest = at;
        let mut to = along * own[axis];
        for d in (0..shape.len()).rev() {
            if d != axis {
                to += rest % shape[d] * own[d];
            }
            rest /= shape[d];
        }
        to
    };
    Ok(along.into_iter().enumerate().map(place).collect())
}

impl Operation for GatherElements {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        axis(self.axis, ty.shape.len())?;
        Ok(vec![TensorType::new(ty.dtype, inputs.shape(1)?)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let (x, indices) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let places = element_places(x.shape(), indices, axis(self.axis, x.shape().len())?)?;
        Ok(vec![pick(x, indices.shape().to_vec(), places.into_iter().map(Some))])
    }
}

/// Start of the slice in the data for each tuple of indices, and the size of a slice.
fn slice_places(data: &[usize], indices: &Tensor, n_batch: usize) -> Result<(Vec<usize>, usize), OpError> {
    let refuse = || invalid!("indices of shape {:?} do not fit data of shape {data:?}", indices.shape());
    let (&depth, outer) = indices.shape().split_last().ok_or_else(refuse)?;
    let end = n_batch.checked_add(depth).filter(|&end| end <= data.len()).ok_or_else(refuse)?;
    if outer.len() < n_batch || outer[..n_batch] != data[..n_batch] {
        return Err(refuse());
    }
    let own = strides(data);
    let slice = product(&data[end..]);
    let batch = product(&data[n_batch..]);
    let n_tuples = product(outer);
    let per_batch = n_tuples / product(&outer[..n_batch]).max(1);
    let numbers = indices.i64s();
    let mut found = Vec::with_capacity(n_tuples);
    for tuple in 0..n_tuples {
        let mut place = tuple / per_batch.max(1) * batch;
        for k in 0..depth {
            let (index, n) = (numbers[tuple * depth + k], data[n_batch + k]);
            let counted = if index < 0 { index.saturating_add(n as i64) } else { index };
            let counted = usize::try_from(counted).ok().filter(|&i| i < n);
            place += counted.ok_or_else(|| invalid!("index {index} is not one of {n}"))? * own[n_batch + k];
        }
        found.push(place);
    }
    Ok((found, slice))
}

impl Operation for GatherNd {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (ty, indices) = (inputs.ty(0)?, inputs.shape(1)?);
        let refuse = || invalid!("indices of shape {indices:?} do not fit {ty}");
        let (&depth, outer) = indices.split_last().ok_or_else(refuse)?;
        let end = self.n_batch_dims.checked_add(depth).ok_or_else(refuse)?;
        let rest = ty.shape.get(end..).ok_or_else(refuse)?;
        Ok(vec![TensorType::new(ty.dtype, [outer, rest].concat())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let (places, slice) = slice_places(x.shape(), inputs.tensor(1)?, self.n_batch_dims)?;
        let places = places.into_iter().flat_map(|start| (start..start + slice).map(Some));
        Ok(vec![pick(x, ty.shape, places)])
    }
}

impl Scatter {
    /// Applies updates, in order, at the given positions.
    fn apply(self, data: &Tensor, updates: &Tensor, places: impl Iterator<Item = usize>) -> Result<Tensor, OpError> {
        if data.dtype() != updates.dtype() {
            return Err(invalid!("updates of {} do not fit data of {}", updates.dtype(), data.dtype()));
        }
        if self == Scatter::Replace {
            let size = data.dtype().size();
            let mut bytes = data.bytes().to_vec();
            for (at, place) in places.enumerate() {
                let update = &updates.bytes()[at * size..(at + 1) * size];
                bytes[place * size..(place + 1) * size].copy_from_slice(update);
            }
            return Ok(Tensor::new(data.ty().clone(), bytes.into()).expect("as many bytes as before"));
        }
        if data.dtype().is_float() {
            let (mut numbers, updates) = (data.floats(), updates.floats());
            for (at, place) in places.enumerate() {
                let (number, update) = (&mut numbers[place], updates[at]);
                *number = match self {
                    Scatter::Replace => update,
                    Scatter::Add => *number + update,
                    Scatter::Mul => *number * update,
                    Scatter::Max => larger(*number, update),
                    Scatter::Min => smaller(*number, update),
                };
            }
            return Ok(Tensor::from_floats(data.dtype(), data.shape(), &numbers));
        }
        let (mut numbers, updates) = (data.integers(), updates.integers());
        for (at, place) in places.enumerate() {
            let (number, update) = (&mut numbers[place], updates[at]);
            *number = match self {
                Scatter::Replace => update,
                Scatter::Add => *number + update,
                Scatter::Mul => number.wrapping_mul(update),
                Scatter::Max => (*number).max(update),
                Scatter::Min => (*number).min(update),
            };
        }
        Ok(Tensor::from_integers(data.dtype(), data.shape(), &numbers))
    }
}

impl Operation for ScatterElements {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        axis(self.axis, ty.shape.len())?;
        if inputs.shape(1)? != inputs.shape(2)? {
            return Err(invalid!("indices of {:?} and updates of {:?}", inputs.shape(1)?, inputs.shape(2)?));
        }
        Ok(vec![ty.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let (x, updates) = (inputs.tensor(0)?, inputs.tensor(2)?);
        let places = element_places(x.shape(), inputs.tensor(1)?, axis(self.axis, x.shape().len())?)?;
        Ok(vec![self.reduction.apply(x, updates, places.into_iter())?])
    }
}

impl Operation for ScatterNd {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (ty, indices) = (inputs.ty(0)?, inputs.shape(1)?);
        let refuse = || invalid!("indices of shape {indices:?} do not fit {ty}");
        let (&depth, outer) = indices.split_last().ok_or_else(refuse)?;
        let rest = ty.shape.get(depth..).ok_or_else(refuse)?;
        if inputs.shape(2)? != [outer, rest].concat() {
            return Err(invalid!("updates of shape {:?} do not fit indices of {indices:?}", inputs.shape(2)?));
        }
        Ok(vec![ty.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let (x, updates) = (inputs.tensor(0)?, inputs.tensor(2)?);
        let (places, slice) = slice_places(x.shape(), inputs.tensor(1)?, 0)?;
        Ok(vec![self.reduction.apply(x, updates, places.into_iter().flat_map(|start| start..start + slice))?])
    }
}

impl Operation for TensorScatter {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (ty, update) = (inputs.ty(0)?, inputs.ty(1)?);
        let at = axis(self.axis, ty.shape.len())?;
        let fits = ty.shape.len() == update.shape.len()
            && at > 0
            && (0..ty.shape.len())
                .all(|d| if d == at { update.shape[d] <= ty.shape[d] } else { update.shape[d] == ty.shape[d] });
        if fits { Ok(vec![ty.clone()]) } else { Err(invalid!("{update} does not fit into {ty}")) }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let (x, update) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let at = axis(self.axis, x.shape().len())?;
        let n_batch = x.shape()[0];
        let starts = inputs.optional_i64s(2)?.unwrap_or_else(|| vec![0; n_batch]);
        let (outer, n, inner) = around(x.shape(), at);
        let new = update.shape()[at];
        if starts.len() != n_batch {
            return Err(invalid!("{} places do not fit a batch of {n_batch}", starts.len()));
        }
        let per_batch = outer / n_batch.max(1);
        let mut places = Vec::with_capacity(update.n_elements());
        for o in 0..outer {
            for k in 0..new {
                let to = starts[o / per_batch.max(1)].saturating_add(k as i64);
                let to = if self.is_circular { to.rem_euclid(n as i64) } else { to };
                let to = usize::try_from(to).ok().filter(|&to| to < n);
                let to = to.ok_or_else(|| invalid!("new entries do not fit a cache of {n}"))?;
                places.extend((0..inner).map(|i| (o * n + to) * inner + i));
            }
        }
        Ok(vec![Scatter::Replace.apply(x, update, places.into_iter())?])
    }
}

impl Operation for OneHot {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let depth = inputs.tensor(1)?.i64s().first().copied().ok_or_else(|| invalid!("its depth is empty"))?;
        let mut shape = inputs.shape(0)?.to_vec();
        let at = axis(self.axis, shape.len() + 1)?;
        shape.insert(at, size(depth)?);
        if inputs.shape(2)? != [2] {
            return Err(invalid!("its values should be two"));
        }
        Ok(vec![TensorType::new(inputs.fact(2)?.dtype(), shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (indices, values) = (inputs.tensor(0)?.i64s(), inputs.tensor(2)?);
        let (_, n, inner) = around(&ty.shape, axis(self.axis, ty.shape.len())?);
        let place = |at: usize| {
            let index = indices[at / (n * inner) * inner + at % inner];
            let index = if index < 0 { index.saturating_add(n as i64) } else { index };
            Some(usize::from(index == (at / inner % n) as i64))
        };
        Ok(vec![pick(values, ty.shape.clone(), (0..ty.n_elements()).map(place))])
    }
}

impl Compress {
    fn kept(&self, inputs: Inputs<'_>) -> Result<(Vec<usize>, usize, Vec<usize>), OpError> {
        let x = inputs.ty(0)?;
        let at = self.axis.map(|at| axis(at, x.shape.len())).transpose()?;
        let shape = if at.is_some() { x.shape.clone() } else { vec![x.n_elements()] };
        let condition = inputs.tensor(1)?;
        if condition.dtype() != DType::Bool || condition.n_elements() > shape[at.unwrap_or(0)] {
            return Err(unsupported!("a condition {condition:?} does not fit {x}"));
        }
        let kept = condition.bytes().iter().enumerate().filter(|(_, is)| **is != 0).map(|(at, _)| at);
        Ok((shape, at.unwrap_or(0), kept.collect()))
    }
}

impl Operation for Compress {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (mut shape, at, kept) = self.kept(inputs)?;
        shape[at] = kept.len();
        Ok(vec![TensorType::new(inputs.fact(0)?.dtype(), shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let (shape, at, kept) = self.kept(inputs)?;
        let x = inputs.tensor(0)?.reshaped(shape.clone());
        let (outer, n, inner) = around(&shape, at);
        let mut out = shape;
        out[at] = kept.len();
        let places = (0..outer)
            .flat_map(|o| kept.iter().flat_map(move |&k| ((o * n + k) * inner..(o * n + k + 1) * inner).map(Some)));
        Ok(vec![pick(&x, out, places)])
    }
}
