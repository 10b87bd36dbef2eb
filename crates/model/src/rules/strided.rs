//! Rules that replace moves by strided views of other values' memory.

use crate::net::{Kind, Net, ValueId};

/// Tensor as a part of another one's memory: its offset, and its dimensions with their strides.
pub(super) struct Strided {
    pub(super) source: ValueId,
    pub(super) offset: i64,
    pub(super) dims: Vec<(i64, i64)>,
}

/// Strides of a value in the value that it is a view of.
pub(super) fn strided(net: &Net, producers: &[Option<usize>], id: ValueId, stop: Option<ValueId>) -> Strided {
    let whole = || {
        let mut stride = 1;
        let mut dims: Vec<(i64, i64)> = Vec::new();
        for &n in net.shape(id).iter().rev() {
            dims.push((n, stride));
            stride *= n;
        }
        dims.reverse();
        Strided { source: id, offset: 0, dims }
    };
    let node = match producers[id.0].map(|at| &net.nodes[at]) {
        Some(node) if stop != Some(id) => node,
        _ => return whole(),
    };
    let moved = match &node.kind {
        Kind::View => {
            let from = strided(net, producers, node.input(0), stop);
            reshaped(&from.dims, net.shape(id)).map(|dims| Strided { dims, ..from })
        }
        Kind::Transpose(order) => {
            let from = strided(net, producers, node.input(0), stop);
            let dims = order.iter().map(|&d| from.dims[d]).collect();
            Some(Strided { dims, ..from })
        }
        Kind::Slice(parts) => {
            let from = strided(net, producers, node.input(0), stop);
            let offset = from.dims.iter().zip(parts).map(|((_, stride), (first, _))| first * stride).sum::<i64>();
            let all = net.shape(id).iter().zip(&from.dims).zip(parts);
            let dims = all.map(|((n, dim), part)| (*n, dim.1 * part.1)).collect();
            Some(Strided { offset: from.offset + offset, dims, ..from })
        }
        _ => None,
    };
    moved.unwrap_or_else(whole)
}

/// Reshapes strided dimensions; `None` if elements would have to move.
fn reshaped(dims: &[(i64, i64)], shape: &[i64]) -> Option<Vec<(i64, i64)>> {
    let joined = without_units(dims);
    let mut out = Vec::with_capacity(shape.len());
    let mut rest = joined.into_iter();
    let (mut n, mut stride) = rest.next().unwrap_or((1, 1));
    for &wanted in shape {
        if wanted == 1 {
            out.push((1, 0));
            continue;
        }
        if n == 1 {
            (n, stride) = rest.next()?;
        }
        if n % wanted != 0 {
            return None;
        }
        n /= wanted;
        out.push((wanted, n * stride));
    }
    (n == 1 && rest.next().is_none()).then_some(out)
}

/// Dimensions of more than one element, with contiguous ones merged.
pub(super) fn without_units(dims: &[(i64, i64)]) -> Vec<(i64, i64)> {
    let mut joined: Vec<(i64, i64)> = Vec::new();
    for &(n, stride) in dims.iter().filter(|(n, _)| *n != 1) {
        match joined.last_mut() {
            Some((outer, outer_stride)) if *outer_stride == n * stride => {
                (*outer, *outer_stride) = (*outer * n, stride)
            }
            _ => joined.push((n, stride)),
        }
    }
    joined
}
