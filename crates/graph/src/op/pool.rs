//! Pooling: over windows, and over whole images.

use super::util::{check_rank, larger, product, size, strides};
use super::window::advance;
use super::{Geometry, Import, Inputs, Operation, Operator, WindowAttributes, row};
use crate::error::invalid;
use crate::{DType, OpError, Tensor, TensorType};

/// Reduction of each window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PoolKind {
    /// Maximum.
    Max {
        /// Whether the second output, the index of the maximum, is in column-major order.
        columns_first: bool,
    },
    /// Arithmetic mean.
    Average {
        /// Whether padding counts as elements (`count_include_pad`).
        counts_borders: bool,
    },
    /// Lp norm: `(Σ |x|^p)^(1/p)`.
    Lp {
        /// Exponent of the norm.
        p: f64,
    },
}

/// Pooling of an image `[n, c, …]`: one result for each window.
#[derive(Debug, Clone)]
pub struct Pool {
    /// Reduction of each window.
    pub kind: PoolKind,
    /// Window size, strides, dilations and padding.
    pub window: WindowAttributes,
}

/// Pooling of an image `[n, c, …]` over all spatial dimensions: one result for each channel.
#[derive(Debug, Clone, Copy)]
pub struct GlobalPool {
    /// Reduction of each channel.
    pub kind: PoolKind,
}

/// Inverse of max pooling: writes the elements of input 0 to the indices of input 1 (the second output of a
/// max [`Pool`]), zeros elsewhere. Input 2, optional, is the output's shape.
#[derive(Debug, Clone)]
pub struct MaxUnpool {
    /// Window size, strides and padding of the pool that is inverted.
    pub window: WindowAttributes,
}

const MAX: PoolKind = PoolKind::Max { columns_first: false };
const AVERAGE: PoolKind = PoolKind::Average { counts_borders: false };

pub(super) const ROWS: &[Operator] = &[
    row("MaxPool", &[1, 8, 10, 11, 12, 22], 1..=1, |node| {
        let columns_first = node.version >= 8 && node.flag("storage_order", false)?;
        Ok(Pool::import(node, PoolKind::Max { columns_first })?.into())
    }),
    row("AveragePool", &[1, 7, 10, 11, 19, 22], 1..=1, |node| {
        let counts_borders = node.version >= 7 && node.flag("count_include_pad", false)?;
        Ok(Pool::import(node, PoolKind::Average { counts_borders })?.into())
    }),
    row("LpPool", &[2, 11, 18, 22], 1..=1, |node| {
        let p = node.int_or("p", 2)? as f64;
        Ok(Pool::import(node, PoolKind::Lp { p })?.into())
    }),
    row("GlobalMaxPool", &[1, 22], 1..=1, |_| Ok(GlobalPool { kind: MAX }.into())),
    row("GlobalAveragePool", &[1, 22], 1..=1, |_| Ok(GlobalPool { kind: AVERAGE }.into())),
    row("GlobalLpPool", &[2, 22], 1..=1, |node| {
        Ok(GlobalPool { kind: PoolKind::Lp { p: node.int_or("p", 2)? as f64 } }.into())
    }),
    row("MaxUnpool", &[9, 11, 22], 2..=3, |node| Ok(MaxUnpool { window: WindowAttributes::import(node)? }.into())),
];

impl Pool {
    /// Reads the windows of a pool.
    ///
    /// # Errors
    /// If an attribute is wrong, or the size of a window is missing.
    pub fn import(node: &Import, kind: PoolKind) -> Result<Pool, OpError> {
        let mut window = WindowAttributes::import(node)?;
        window.ceil = node.flag("ceil_mode", false)?;
        if window.kernel.is_none() {
            return Err(invalid!("it has no kernel_shape"));
        }
        Ok(Pool { kind, window })
    }

    /// Placement of the windows over an image of this shape `[n, c, …]`.
    ///
    /// # Errors
    /// If the windows do not fit.
    pub fn geometry(&self, shape: &[usize]) -> Result<Geometry, OpError> {
        check_rank(shape, 3)?;
        let kernel = self.window.kernel.as_ref().expect("a pool has a size of windows");
        self.window.over(&shape[2..], kernel)
    }
}

impl Operation for Pool {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let shape = [&ty.shape[..2.min(ty.shape.len())], &self.geometry(&ty.shape)?.out].concat();
        let mut types = vec![TensorType::new(ty.dtype, shape.clone())];
        if matches!(self.kind, PoolKind::Max { .. }) {
            types.push(TensorType::new(DType::I64, shape));
        }
        Ok(types)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let geometry = self.geometry(x.shape())?;
        let image = &x.shape()[2..];
        let (area, own) = (product(image), strides(image));
        let numbers = x.floats();
        let n = product(&geometry.out);
        let (mut out, mut places) = (vec![0.0; ty.n_elements()], vec![0_i128; ty.n_elements()]);
        let mut index = vec![0; image.len()];
        for at in 0..n {
            let mut reads = Vec::new();
            geometry.for_window(&index, image, &own, &mut |_, place| reads.push(place));
            // Number of window positions within the image and its padding, without those beyond.
            let with_borders = || -> usize {
                (0..image.len())
                    .map(|d| {
                        let room = image[d] as i64 + geometry.begins[d] + geometry.ends[d];
                        let start = index[d] * geometry.strides[d];
                        (0..geometry.kernel[d]).filter(|k| ((start + k * geometry.dilations[d]) as i64) < room).count()
                    })
                    .product()
            };
            let n_places = match self.kind {
                PoolKind::Average { counts_borders: true } => with_borders(),
                _ => reads.len(),
            };
            for channel in 0..out.len() / n {
                let x = &numbers[channel * area..(channel + 1) * area];
                let to = channel * n + at;
                match self.kind {
                    PoolKind::Max { columns_first } => {
                        let mut best: Option<usize> = None;
                        for &place in &reads {
                            if best.is_none_or(|best| x[place] > x[best] || x[place].is_nan() && !x[best].is_nan()) {
                                best = Some(place);
                            }
                        }
                        out[to] = best.map_or(f64::NEG_INFINITY, |best| x[best]);
                        let best = best.unwrap_or(0);
                        let place = if columns_first {
                            (0..image.len()).rev().fold(0, |sum, d| sum * image[d] + best / own[d] % image[d])
                        } else {
                            best
                        };
                        places[to] = (channel * area + place) as i128;
                    }
                    PoolKind::Average { .. } => {
                        out[to] = reads.iter().map(|&place| x[place]).sum::<f64>() / n_places as f64;
                    }
                    PoolKind::Lp { p } => out[to] = norm(reads.iter().map(|&place| x[place]), p),
                }
            }
            advance(&mut index, &geometry.out);
        }
        let mut tensors = vec![Tensor::from_floats(ty.dtype, ty.shape.clone(), &out)];
        if matches!(self.kind, PoolKind::Max { .. }) {
            tensors.push(Tensor::from_integers(DType::I64, ty.shape, &places));
        }
        Ok(tensors)
    }
}

pub(super) fn norm(numbers: impl Iterator<Item = f64>, p: f64) -> f64 {
    if p == 1.0 {
        numbers.map(f64::abs).sum()
    } else if p == 2.0 {
        numbers.map(|x| x * x).sum::<f64>().sqrt()
    } else {
        numbers.map(|x| x.abs().powf(p)).sum::<f64>().powf(1.0 / p)
    }
}

impl Operation for GlobalPool {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut ty = inputs.ty(0)?.clone();
        check_rank(&ty.shape, 2)?;
        ty.shape[2..].fill(1);
        Ok(vec![ty])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let area = product(&x.shape()[2..]);
        let numbers = x.floats();
        let of_channel = |channel: usize| {
            let x = &numbers[channel * area..(channel + 1) * area];
            match self.kind {
                PoolKind::Max { .. } => x.iter().copied().fold(f64::NEG_INFINITY, larger),
                PoolKind::Average { .. } => x.iter().sum::<f64>() / area as f64,
                PoolKind::Lp { p } => norm(x.iter().copied(), p),
            }
        };
        let out: Vec<f64> = (0..ty.n_elements()).map(of_channel).collect();
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}

impl Operation for MaxUnpool {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut ty = inputs.ty(0)?.clone();
        check_rank(&ty.shape, 3)?;
        if inputs.shape(1)? != ty.shape {
            return Err(invalid!("places of shape {:?} do not fit {ty}", inputs.shape(1)?));
        }
        if let Some(wanted) = inputs.optional_i64s(2)? {
            ty.shape = wanted.into_iter().map(size).collect::<Result<_, _>>()?;
            return Ok(vec![ty]);
        }
        let kernel = self.window.kernel.clone().ok_or_else(|| invalid!("it has no kernel_shape"))?;
        let geometry = self.window.given(&kernel)?;
        if kernel.len() + 2 != ty.shape.len() {
            return Err(invalid!("windows of {kernel:?} do not fit {ty}"));
        }
        for d in 0..kernel.len() {
            let full = (ty.shape[d + 2] as i64 - 1).checked_mul(geometry.strides[d] as i64);
            let full = full.ok_or_else(|| invalid!("strides are too large"))? + kernel[d] as i64;
            ty.shape[d + 2] = size(full - geometry.begins[d] - geometry.ends[d])?;
        }
        Ok(vec![ty])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (x, places) = (inputs.tensor(0)?, inputs.tensor(1)?.i64s());
        // Indices refer to the image that the windows' sizes imply; the output may be larger.
        let inferred = self.infer(Inputs(&inputs.0[..2]))?.remove(0);
        let mut out = vec![0.0; ty.n_elements()];
        let own = strides(&inferred.shape);
        let to = strides(&ty.shape);
        for (number, place) in x.floats().into_iter().zip(places) {
            let place = usize::try_from(place).ok().filter(|&place| place < inferred.n_elements().max(out.len()));
            let place = place.ok_or_else(|| invalid!("a place is beyond the image"))?;
            let same = inferred.shape == ty.shape || place >= inferred.n_elements();
            let place =
                if same { place } else { (0..own.len()).map(|d| place / own[d] % inferred.shape[d] * to[d]).sum() };
            *out.get_mut(place).ok_or_else(|| invalid!("a place is beyond the image"))? = number;
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}
