//! Convolutions.

use super::matmul::{add_product, centred, check_zero};
use super::util::{product, size, strides};
use super::window::advance;
use super::{AutoPad, Geometry, Import, Inputs, Operation, Operator, WindowAttributes, row};
use crate::error::invalid;
use crate::{DType, OpError, Tensor, TensorType};

/// Convolution of an image `[n, c, …]` with weights `[m, c/groups, …]`. Input 2 is the bias `[m]`, which is
/// optional; the output is `[n, m, …]`.
#[derive(Debug, Clone)]
pub struct Conv {
    /// Kernel size, strides, dilations and padding.
    pub window: WindowAttributes,
    /// Number of groups: output channels of a group read the input channels of that group only. `None`: each
    /// channel is a group.
    pub groups: Option<usize>,
}

/// Convolution of integer tensors with an i32 result: inputs 2 and 3 are the zero points of image and
/// weights.
#[derive(Debug, Clone)]
pub struct ConvInteger(pub Conv);

/// Transposed convolution of an image `[n, c, …]` with weights `[c, m/groups, …]`; the output is `[n, m, …]`.
#[derive(Debug, Clone)]
pub struct ConvTranspose {
    /// Kernel size, strides, dilations and padding.
    pub window: WindowAttributes,
    /// Number of groups of channels, which are convolved separately.
    pub groups: usize,
    /// Rows and columns added at the end of each spatial dimension of the output.
    pub output_padding: Option<Vec<i64>>,
    /// Spatial sizes of the output, from which the padding is derived.
    pub output_shape: Option<Vec<i64>>,
}

impl Conv {
    /// Reads the attributes of a convolution.
    ///
    /// # Errors
    /// If the attributes are not valid sizes.
    pub fn import(node: &Import) -> Result<Conv, OpError> {
        Ok(Conv { window: WindowAttributes::import(node)?, groups: Some(size(node.int_or("group", 1)?)?) })
    }
}

pub(super) const ROWS: &[Operator] = &[
    row("Conv", &[1, 11, 22], 2..=3, |node| Ok(Conv::import(node)?.into())),
    row("ConvInteger", &[10], 2..=4, |node| Ok(ConvInteger(Conv::import(node)?).into())),
    row("ConvTranspose", &[1, 11, 22], 2..=3, |node| {
        let (output_padding, output_shape) = (node.ints("output_padding")?, node.ints("output_shape")?);
        let groups = size(node.int_or("group", 1)?)?;
        Ok(ConvTranspose { window: WindowAttributes::import(node)?, groups, output_padding, output_shape }.into())
    }),
];

/// Sizes of a convolution.
#[derive(Debug, Clone)]
pub struct ConvShape {
    /// Batch size.
    pub n: usize,
    /// Number of input channels.
    pub c: usize,
    /// Number of output channels.
    pub m: usize,
    /// Number of groups of channels.
    pub groups: usize,
    /// Spatial sizes of the image; of a transposed convolution, those of its output.
    pub image: Vec<usize>,
    /// Placement of the windows over `image`.
    pub geometry: Geometry,
}

impl ConvShape {
    /// Shape of the output.
    pub fn out(&self) -> Vec<usize> {
        [&[self.n, self.m][..], &self.geometry.out].concat()
    }
}

impl Conv {
    /// Computes the sizes for an image `x` and weights `w` of these shapes.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn shape(&self, x: &[usize], w: &[usize]) -> Result<ConvShape, OpError> {
        let groups = self.groups.unwrap_or_else(|| x.get(1).copied().unwrap_or(0));
        let refuse = || invalid!("weights of shape {w:?} in {groups} groups do not fit an image of {x:?}");
        let (&[n, c, ref image @ ..], &[m, per_group, ref kernel @ ..]) = (x, w) else { return Err(refuse()) };
        let fits = groups > 0
            && per_group.checked_mul(groups) == Some(c)
            && m.is_multiple_of(groups)
            && image.len() == kernel.len();
        if !fits || image.is_empty() {
            return Err(refuse());
        }
        let geometry = self.window.over(image, kernel)?;
        Ok(ConvShape { n, c, m, groups, image: image.to_vec(), geometry })
    }
}

/// Convolves numbers: multiplies the weights by a matrix with every window as a column.
pub(super) fn convolve(shape: &ConvShape, x: &[f64], w: &[f64]) -> Vec<f64> {
    const ELEMENTS: usize = 1 << 20;
    let ConvShape { n, c, m, groups, image, geometry } = shape;
    let (area, taps, places) = (product(image), product(&geometry.kernel), product(&geometry.out));
    let (c, m, depth) = (c / groups, m / groups, c / groups * taps);
    let own = strides(image);
    let mut out = vec![0.0; n * groups * m * places];
    if out.is_empty() || depth == 0 {
        return out;
    }
    let width = (ELEMENTS / depth).clamp(8, places.max(8));
    let mut index = vec![0; image.len()];
    for first in (0..places).step_by(width) {
        let width = width.min(places - first);
        // Reads of each window of this stretch: the tap, and the position in the image.
        let mut reads = Vec::with_capacity(width * taps);
        for column in 0..width {
            geometry.for_window(&index, image, &own, &mut |tap, place| reads.push((column, tap, place)));
            advance(&mut index, &geometry.out);
        }
        let mut columns = vec![0.0; depth * width];
        let mut sums = vec![0.0; m * width];
        for part in 0..n * groups {
            for channel in 0..c {
                let x = &x[(part * c + channel) * area..][..area];
                let columns = &mut columns[channel * taps * width..][..taps * width];
                reads.iter().for_each(|&(column, tap, place)| columns[tap * width + column] = x[place]);
            }
            sums.fill(0.0);
            let weights = &w[part % groups * m * depth..][..m * depth];
            add_product([m, width, depth], weights, &columns, &mut sums);
            for row in 0..m {
                let to = (part * m + row) * places + first;
                out[to..to + width].copy_from_slice(&sums[row * width..(row + 1) * width]);
            }
        }
    }
    out
}

/// Adds a number to each channel of images with `places` positions.
pub(super) fn add_bias(numbers: &mut [f64], bias: Option<&Tensor>, m: usize, places: usize) -> Result<(), OpError> {
    let Some(bias) = bias else { return Ok(()) };
    let bias = bias.floats();
    if bias.len() != m {
        return Err(invalid!("{} numbers to add do not fit {m} channels", bias.len()));
    }
    for (channel, numbers) in numbers.chunks_mut(places.max(1)).enumerate() {
        numbers.iter_mut().for_each(|x| *x += bias[channel % m]);
    }
    Ok(())
}

impl Operation for Conv {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let shape = self.shape(inputs.shape(0)?, inputs.shape(1)?)?;
        Ok(vec![TensorType::new(inputs.fact(0)?.dtype(), shape.out())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let (x, w) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let shape = self.shape(x.shape(), w.shape())?;
        let mut numbers = convolve(&shape, &x.floats(), &w.floats());
        add_bias(&mut numbers, inputs.optional_tensor(2)?, shape.m, product(&shape.geometry.out))?;
        Ok(vec![Tensor::from_floats(x.dtype(), shape.out(), &numbers)])
    }
}

impl Operation for ConvInteger {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let shape = self.0.shape(inputs.shape(0)?, inputs.shape(1)?)?;
        for (at, n) in [1, shape.m].into_iter().enumerate() {
            check_zero(inputs, at + 2, inputs.fact(at)?.dtype(), Some(n))?;
        }
        Ok(vec![TensorType::new(DType::I32, shape.out())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let (x, w) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let shape = self.0.shape(x.shape(), w.shape())?;
        let image = centred(x, inputs.optional_tensor(2)?, 1)?;
        let weights = centred(w, inputs.optional_tensor(3)?, 0)?;
        Ok(vec![Tensor::from_floats(DType::I32, shape.out(), &convolve(&shape, &image, &weights))])
    }
}

impl ConvTranspose {
    /// Computes the sizes for an input `x` and weights `w` of these shapes. Windows slide over the output: it
    /// is `image`, and `geometry.out` is the input's size.
    ///
    /// # Errors
    /// If image and weights do not fit.
    pub fn shape(&self, x: &[usize], w: &[usize]) -> Result<ConvShape, OpError> {
        let refuse = || invalid!("weights of shape {w:?} in {} groups do not fit an image of {x:?}", self.groups);
        let (&[n, c, ref places @ ..], &[c_weights, per_group, ref kernel @ ..]) = (x, w) else {
            return Err(refuse());
        };
        let fits = c == c_weights && self.groups > 0 && c.is_multiple_of(self.groups) && places.len() == kernel.len();
        let m = per_group.checked_mul(self.groups).filter(|_| fits && !places.is_empty()).ok_or_else(refuse)?;
        let mut geometry = self.window.given(kernel)?;
        geometry.out = places.to_vec();
        let rank = places.len();
        let zeros = vec![0; rank];
        let extra = self.output_padding.as_ref().unwrap_or(&zeros);
        // The output's shape may include batch and channels.
        let wanted = self.output_shape.as_ref().map(|shape| &shape[shape.len().saturating_sub(rank)..]);
        let in_range = |list: &[i64]| list.len() == rank && list.iter().all(|n| (0..1 << 31).contains(n));
        if !in_range(extra) || wanted.is_some_and(|wanted| !in_range(wanted)) || kernel.contains(&0) {
            return Err(refuse());
        }
        let mut image = Vec::with_capacity(rank);
        for d in 0..rank {
            let (stride, window) = (
                geometry.strides[d] as i64,
                (kernel[d] as i64 - 1).saturating_mul(geometry.dilations[d] as i64).min(1 << 60) + 1,
            );
            let full = (places[d] as i64 - 1).checked_mul(stride).filter(|&full| full < 1 << 60);
            let full = full.ok_or_else(refuse)? + extra[d] + window;
            let same = self.window.auto_pad != AutoPad::Given && self.window.auto_pad != AutoPad::Valid;
            let wanted =
                wanted.map(|wanted| wanted[d]).or_else(|| same.then(|| (places[d] as i64).saturating_mul(stride)));
            if let Some(wanted) = wanted {
                // Padding may be negative: the image is then larger than the extent of the windows.
                let total = full - wanted;
                let total = if self.output_shape.is_some() { total } else { total.max(0) };
                let smaller = total.div_euclid(2);
                let begins_smaller = self.window.auto_pad == AutoPad::SameUpper;
                geometry.begins[d] = if begins_smaller { smaller } else { total - smaller };
                geometry.ends[d] = total - geometry.begins[d];
            } else if self.window.auto_pad == AutoPad::Valid {
                (geometry.begins[d], geometry.ends[d]) = (0, 0);
            }
            image.push(size(full - geometry.begins[d] - geometry.ends[d])?);
        }
        Ok(ConvShape { n, c, m, groups: self.groups, image, geometry })
    }
}

impl Operation for ConvTranspose {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let shape = self.shape(inputs.shape(0)?, inputs.shape(1)?)?;
        let out = [&[shape.n, shape.m][..], &shape.image].concat();
        Ok(vec![TensorType::new(inputs.fact(0)?.dtype(), out)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (x, w) = (inputs.tensor(0)?, inputs.tensor(1)?);
        let shape = self.shape(x.shape(), w.shape())?;
        let ConvShape { n, c, m, groups, image, geometry } = &shape;
        let (area, taps, places) = (product(image), product(&geometry.kernel), product(&geometry.out));
        let (c, m, rows) = (c / groups, m / groups, m / groups * taps);
        let (numbers, weights) = (x.floats(), w.floats());
        let own = strides(image);
        let mut out = vec![0.0; ty.n_elements()];
        for part in 0..n * groups {
            let group = part % groups;
            // Transposed `[c, m·taps]`.
            let of_group = &weights[group * c * rows..(group + 1) * c * rows];
            let turned: Vec<f64> = (0..rows * c).map(|at| of_group[at % c * rows + at / c]).collect();
            let mut columns = vec![0.0; rows * places];
            if !columns.is_empty() && c > 0 {
                add_product(
                    [rows, places, c],
                    &turned,
                    &numbers[part * c * places..(part + 1) * c * places],
                    &mut columns,
                );
            }
            let mut index = vec![0; image.len()];
            for column in 0..places {
                geometry.for_window(&index, image, &own, &mut |tap, place| {
                    for channel in 0..m {
                        out[(part * m + channel) * area + place] += columns[(channel * taps + tap) * places + column];
                    }
                });
                advance(&mut index, &geometry.out);
            }
        }
        add_bias(&mut out, inputs.optional_tensor(2)?, shape.m, area)?;
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}
