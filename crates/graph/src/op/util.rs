//! Helpers of several operators: axes, broadcasting, strided copies.

use crate::error::invalid;
use crate::{DType, OpError, Tensor, TensorType};

/// Resolves an axis that may count from the end.
///
/// # Errors
/// If the axis is out of range.
pub fn axis(axis: i64, rank: usize) -> Result<usize, OpError> {
    let counted = if axis < 0 { axis.saturating_add(rank as i64) } else { axis };
    usize::try_from(counted)
        .ok()
        .filter(|&a| a < rank)
        .ok_or_else(|| invalid!("axis {axis} is not one of {rank} dimensions"))
}

/// Resolves axes that may count from the end, and checks that none is repeated.
pub fn axes(list: &[i64], rank: usize) -> Result<Vec<usize>, OpError> {
    let mut found = Vec::with_capacity(list.len());
    for &a in list {
        let a = axis(a, rank)?;
        if found.contains(&a) {
            return Err(invalid!("axis {a} is there twice"));
        }
        found.push(a);
    }
    Ok(found)
}

/// Larger of two numbers; NaN if one is NaN.
pub fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// Smaller of two numbers; NaN if one is NaN.
pub fn smaller(a: f64, b: f64) -> f64 {
    if a < b || a.is_nan() { a } else { b }
}

/// Converts a dimension to `usize`; a negative one is an error.
pub fn size(dim: i64) -> Result<usize, OpError> {
    usize::try_from(dim).map_err(|_| invalid!("a dimension would be {dim}"))
}

/// Row-major strides of a contiguous tensor, in elements.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    strides
}

/// Product of the dimensions.
pub fn product(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Common shape that all of these broadcast to.
pub fn broadcast(shapes: &[&[usize]]) -> Result<Vec<usize>, OpError> {
    let rank = shapes.iter().map(|shape| shape.len()).max().unwrap_or(0);
    let mut out = vec![1; rank];
    for shape in shapes {
        for (to, &d) in out[rank - shape.len()..].iter_mut().zip(*shape) {
            if *to == 1 {
                *to = d;
            } else if d != 1 && d != *to {
                let texts: Vec<String> = shapes.iter().map(|s| crate::tensor::shape_text(s)).collect();
                return Err(invalid!("shapes {} do not broadcast", texts.join(" and ")));
            }
        }
    }
    Ok(out)
}

/// Strides for reading a tensor of `shape` as broadcast to `out`: 0 along repeated dimensions.
pub fn broadcast_strides(shape: &[usize], out: &[usize]) -> Vec<usize> {
    let own = strides(shape);
    let missing = out.len() - shape.len();
    let stride = |d: usize| if d < missing || shape[d - missing] == 1 { 0 } else { own[d - missing] };
    (0..out.len()).map(stride).collect()
}

/// Visits each element of a shape in row-major order, with its offset by each of the given strides.
pub fn for_each<const N: usize>(shape: &[usize], by: [&[usize]; N], mut act: impl FnMut(usize, [usize; N])) {
    let n = product(shape);
    let Some((&last, outer)) = shape.split_last() else {
        return act(0, [0; N]);
    };
    let steps: [usize; N] = std::array::from_fn(|i| by[i][outer.len()]);
    let mut at = 0;
    let mut index = vec![0; outer.len()];
    let mut places = [0; N];
    while at < n {
        let mut inner = places;
        for _ in 0..last {
            act(at, inner);
            at += 1;
            inner.iter_mut().zip(steps).for_each(|(place, step)| *place += step);
        }
        for d in (0..outer.len()).rev() {
            index[d] += 1;
            places.iter_mut().zip(by).for_each(|(place, strides)| *place += strides[d]);
            if index[d] < outer[d] {
                break;
            }
            places.iter_mut().zip(by).for_each(|(place, strides)| *place -= strides[d] * outer[d]);
            index[d] = 0;
        }
    }
}

/// Copies elements into a contiguous tensor of `shape`: the element of an index is read `offset + Σ index ·
/// strides`.
pub fn copy_strided(tensor: &Tensor, shape: &[usize], strides: &[isize], offset: usize) -> Tensor {
    let size = tensor.dtype().size();
    let bytes = tensor.bytes();
    let n = product(shape);
    let mut out = Vec::with_capacity(n * size);
    let mut index = vec![0; shape.len()];
    let mut from = offset as isize;
    let (last, last_stride) = match (shape.last(), strides.last()) {
        (Some(&last), Some(&stride)) => (last, stride),
        _ => (1, 1),
    };
    let outer = shape.len().saturating_sub(1);
    while out.len() < n * size {
        if last_stride == 1 {
            let start = from as usize * size;
            out.extend_from_slice(&bytes[start..start + last * size]);
        } else {
            let mut place = from;
            for _ in 0..last {
                let start = place as usize * size;
                out.extend_from_slice(&bytes[start..start + size]);
                place += last_stride;
            }
        }
        for d in (0..outer).rev() {
            index[d] += 1;
            from += strides[d];
            if index[d] < shape[d] {
                break;
            }
            from -= strides[d] * shape[d] as isize;
            index[d] = 0;
        }
    }
    Tensor::new(TensorType::new(tensor.dtype(), shape), out.into()).expect("as many elements as the shape takes")
}

/// Gathers elements of a tensor by flat index; `None` yields zero.
pub fn pick(tensor: &Tensor, shape: Vec<usize>, places: impl Iterator<Item = Option<usize>>) -> Tensor {
    let size = tensor.dtype().size();
    let bytes = tensor.bytes();
    let mut out = Vec::with_capacity(product(&shape) * size);
    for place in places {
        match place {
            Some(at) => out.extend_from_slice(&bytes[at * size..(at + 1) * size]),
            None => out.resize(out.len() + size, 0),
        }
    }
    Tensor::new(TensorType::new(tensor.dtype(), shape), out.into()).expect("as many elements as the shape takes")
}

/// Permutes the dimensions, and copies the elements.
pub fn transpose(tensor: &Tensor, order: &[usize]) -> Tensor {
    let own = strides(tensor.shape());
    let shape: Vec<usize> = order.iter().map(|&d| tensor.shape()[d]).collect();
    let strides: Vec<isize> = order.iter().map(|&d| own[d] as isize).collect();
    copy_strided(tensor, &shape, &strides, 0)
}

/// Broadcasts a tensor to a larger shape.
pub fn expand(tensor: &Tensor, shape: &[usize]) -> Tensor {
    let strides: Vec<isize> = broadcast_strides(tensor.shape(), shape).iter().map(|&s| s as isize).collect();
    copy_strided(tensor, shape, &strides, 0)
}

/// Splits a shape at a dimension: number of elements before it, along it, and after it.
pub fn around(shape: &[usize], axis: usize) -> (usize, usize, usize) {
    (product(&shape[..axis]), shape[axis], product(&shape[axis + 1..]))
}

/// Checks that a type is a floating-point one.
pub fn check_float(dtype: DType) -> Result<(), OpError> {
    if dtype.is_float() { Ok(()) } else { Err(invalid!("its input is {dtype}, and should be floating-point")) }
}

/// Checks that a shape has at least this rank.
pub fn check_rank(shape: &[usize], at_least: usize) -> Result<(), OpError> {
    if shape.len() >= at_least {
        Ok(())
    } else {
        let shape = crate::tensor::shape_text(shape);
        Err(invalid!("its input has shape {shape}, and should have {at_least} dimensions or more"))
    }
}
