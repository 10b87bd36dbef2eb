//! Softmax and normalisations.

use super::util::{around, axes, axis, broadcast, broadcast_strides, check_rank, for_each, product, size};
use super::{Import, Inputs, Op, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Variant of softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SoftmaxKind {
    /// Softmax: `exp(x) / Σ exp(x)`.
    Soft,
    /// Log-softmax.
    Log,
    /// Hardmax: 1 at the first maximum, 0 elsewhere.
    Hard,
}

/// Softmax, log-softmax or hardmax along a dimension.
#[derive(Debug, Clone, Copy)]
pub struct Softmax {
    /// Variant of softmax.
    pub kind: SoftmaxKind,
    /// Dimension to normalise; negative counts from the end.
    pub axis: i64,
    /// Whether all dimensions from `axis` on are normalised together, as before opset 13.
    pub is_flat: bool,
}

/// Batch normalisation of an image `[n, c, …]` at inference: `(x − mean) / √(variance + epsilon) · scale +
/// bias`, with scale, bias, mean and variance `[c]` as inputs 1 to 4.
#[derive(Debug, Clone, Copy)]
pub struct BatchNormalization {
    /// Addend of the variance.
    pub epsilon: f64,
    /// Momentum of the running statistics in training mode: the batch's own statistics are used, and updated
    /// running ones are outputs. `None` at inference.
    pub training_momentum: Option<f64>,
}

/// Normalisation of each channel of each image to mean 0 and variance 1, scaled and shifted per channel by
/// inputs 1 and 2.
#[derive(Debug, Clone, Copy)]
pub struct InstanceNormalization {
    /// Addend of the variance.
    pub epsilon: f64,
}

/// Normalisation of each group of channels to mean 0 and variance 1, scaled and shifted per channel by inputs
/// 1 and 2.
#[derive(Debug, Clone, Copy)]
pub struct GroupNormalization {
    /// Addend of the variance.
    pub epsilon: f64,
    /// Number of groups.
    pub n_groups: usize,
    /// Whether scale and bias are per group, `[groups]`, as in opset 18, rather than per channel.
    pub scales_groups: bool,
}

/// Normalisation over all dimensions from `axis` on to mean 0 and variance 1, scaled and shifted by inputs 1
/// and 2. Outputs: the result, the mean, and the inverse standard deviation.
#[derive(Debug, Clone, Copy)]
pub struct LayerNormalization {
    /// First of the normalised dimensions; negative counts from the end.
    pub axis: i64,
    /// Addend of the variance.
    pub epsilon: f64,
}

/// Division by the root mean square over all dimensions from `axis` on, scaled by input 1.
#[derive(Debug, Clone, Copy)]
pub struct RmsNormalization {
    /// First of the normalised dimensions; negative counts from the end.
    pub axis: i64,
    /// Addend of the mean square.
    pub epsilon: f64,
}

/// Normalisation along `axes` to mean 0 and variance 1.
#[derive(Debug, Clone)]
pub struct MeanVarianceNormalization {
    /// Normalised dimensions.
    pub axes: Vec<i64>,
}

/// Division by the L1 or L2 norm along a dimension.
#[derive(Debug, Clone, Copy)]
pub struct LpNormalization {
    /// Dimension of the norm; negative counts from the end.
    pub axis: i64,
    /// Order of the norm.
    pub p: f64,
}

/// Local response normalisation across channels: `x / (bias + alpha/size · Σ x²)^beta`, summed over `size`
/// neighbouring channels.
#[derive(Debug, Clone, Copy)]
pub struct Lrn {
    /// `alpha` of the formula.
    pub alpha: f64,
    /// `beta` of the formula.
    pub beta: f64,
    /// `bias` of the formula.
    pub bias: f64,
    /// Number of neighbouring channels in the sum.
    pub size: usize,
}

fn softmax(node: &Import, kind: SoftmaxKind) -> Result<Op, OpError> {
    let is_flat = node.version < 13;
    Ok(Softmax { kind, axis: node.int_or("axis", if is_flat { 1 } else { -1 })?, is_flat }.into())
}

pub(super) const ROWS: &[Operator] = &[
    row("Softmax", &[1, 11, 13], 1..=1, |node| softmax(node, SoftmaxKind::Soft)),
    row("LogSoftmax", &[1, 11, 13], 1..=1, |node| softmax(node, SoftmaxKind::Log)),
    row("Hardmax", &[1, 11, 13], 1..=1, |node| softmax(node, SoftmaxKind::Hard)),
    row("BatchNormalization", &[6, 7, 9, 14, 15], 5..=5, |node| {
        let epsilon = node.float_or("epsilon", 1e-5)?;
        let momentum = node.float_or("momentum", 0.9)?;
        // Old versions have statistics per element, and signal training by the number of outputs.
        let is_of_channels = node.version >= 9 || node.flag("spatial", true)?;
        let is_training = match node.version {
            14.. => node.flag("training_mode", false)?,
            6 => !node.flag("is_test", false)? && node.n_outputs > 1,
            _ => node.n_outputs > 1,
        };
        if !is_of_channels || is_training && node.version < 14 {
            return Err(unsupported!("training, or statistics of each element, are not supported at this opset"));
        }
        Ok(BatchNormalization { epsilon, training_momentum: is_training.then_some(momentum) }.into())
    }),
    row("InstanceNormalization", &[6, 22], 3..=3, |node| {
        Ok(InstanceNormalization { epsilon: node.float_or("epsilon", 1e-5)? }.into())
    }),
    row("GroupNormalization", &[18, 21], 3..=3, |node| {
        let _ = node.int("stash_type")?;
        let n_groups = node.int("num_groups")?.ok_or_else(|| invalid!("it has no num_groups"))?;
        let epsilon = node.float_or("epsilon", 1e-5)?;
        Ok(GroupNormalization { epsilon, n_groups: size(n_groups)?, scales_groups: node.version < 21 }.into())
    }),
    // ONNX Runtime supports it at all opsets, and its optimizer writes it into older models.
    row("LayerNormalization", &[1, 17], 2..=3, |node| {
        let _ = node.int("stash_type")?;
        Ok(LayerNormalization { axis: node.int_or("axis", -1)?, epsilon: node.float_or("epsilon", 1e-5)? }.into())
    }),
    row("RMSNormalization", &[23], 2..=2, |node| {
        let _ = node.int("stash_type")?;
        Ok(RmsNormalization { axis: node.int_or("axis", -1)?, epsilon: node.float_or("epsilon", 1e-5)? }.into())
    }),
    row("MeanVarianceNormalization", &[9, 13], 1..=1, |node| {
        Ok(MeanVarianceNormalization { axes: node.ints("axes")?.unwrap_or_else(|| vec![0, 2, 3]) }.into())
    }),
    row("LpNormalization", &[1, 22], 1..=1, |node| {
        Ok(LpNormalization { axis: node.int_or("axis", -1)?, p: node.int_or("p", 2)? as f64 }.into())
    }),
    row("LRN", &[1, 13], 1..=1, |node| {
        let n = node.int("size")?.ok_or_else(|| invalid!("it has no size"))?;
        let (alpha, beta) = (node.float_or("alpha", 1e-4)?, node.float_or("beta", 0.75)?);
        Ok(Lrn { alpha, beta, bias: node.float_or("bias", 1.0)?, size: size(n)?.max(1) }.into())
    }),
];

impl Softmax {
    /// Splits a shape at `axis`: the number of elements before it, along it, and after it.
    ///
    /// # Errors
    /// If there is no such dimension.
    pub fn split(&self, shape: &[usize]) -> Result<(usize, usize, usize), OpError> {
        // A scalar counts as a vector of one element.
        let shape = if shape.is_empty() { &[1] } else { shape };
        let rank = shape.len();
        let at = if self.is_flat && self.axis == rank as i64 { rank } else { axis(self.axis, rank)? };
        Ok(if self.is_flat { (product(&shape[..at]), product(&shape[at..]), 1) } else { around(shape, at) })
    }
}

impl Operation for Softmax {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        self.split(inputs.shape(0)?)?;
        Ok(vec![inputs.ty(0)?.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let (outer, n, inner) = self.split(x.shape())?;
        let mut numbers = x.floats();
        for o in 0..outer {
            for i in 0..inner {
                let at = |k: usize| (o * n + k) * inner + i;
                let largest = (0..n).map(|k| numbers[at(k)]).fold(f64::NEG_INFINITY, f64::max);
                if self.kind == SoftmaxKind::Hard {
                    let first = (0..n).find(|&k| numbers[at(k)] == largest);
                    (0..n).for_each(|k| numbers[at(k)] = f64::from(u8::from(Some(k) == first)));
                    continue;
                }
                let sum: f64 = (0..n).map(|k| (numbers[at(k)] - largest).exp()).sum();
                for k in 0..n {
                    let x = numbers[at(k)] - largest;
                    numbers[at(k)] = if self.kind == SoftmaxKind::Log { x - sum.ln() } else { x.exp() / sum };
                }
            }
        }
        Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)])
    }
}

/// Mean and variance of numbers.
fn moments(numbers: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let (sum, n) = numbers.clone().fold((0.0, 0.0), |(sum, n), x| (sum + x, n + 1.0));
    let mean = sum / n;
    (mean, numbers.map(|x| (x - mean) * (x - mean)).sum::<f64>() / n)
}

/// Returns an input that must have `n` numbers.
fn one_each(inputs: Inputs<'_>, at: usize, n: usize) -> Result<Vec<f64>, OpError> {
    let numbers = inputs.tensor(at)?.floats();
    if numbers.len() == n {
        Ok(numbers)
    } else {
        Err(invalid!("its input {} has {} numbers, and should have {n}", at + 1, numbers.len()))
    }
}

impl Operation for BatchNormalization {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        check_rank(&ty.shape, 1)?;
        let channels = ty.shape.get(1).copied().unwrap_or(1);
        for at in 1..5 {
            if inputs.ty(at)?.shape != [channels] {
                let found = inputs.ty(at)?;
                return Err(invalid!("its input {} is {found}, and should have {channels} numbers", at + 1));
            }
        }
        let mut types = vec![ty.clone()];
        if self.training_momentum.is_some() {
            types.extend([inputs.ty(3)?.clone(), inputs.ty(4)?.clone()]);
        }
        Ok(types)
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let x = inputs.tensor(0)?;
        let c = x.shape().get(1).copied().unwrap_or(1);
        let (scale, offset) = (one_each(inputs, 1, c)?, one_each(inputs, 2, c)?);
        let (mut mean, mut variance) = (one_each(inputs, 3, c)?, one_each(inputs, 4, c)?);
        let area = product(x.shape().get(2..).unwrap_or(&[]));
        let mut numbers = x.floats();
        let mut running = Vec::new();
        if let Some(momentum) = self.training_momentum {
            let mut news = [mean.clone(), variance.clone()];
            for channel in 0..c {
                let of_channel = numbers.iter().enumerate().filter(|(at, _)| at / area.max(1) % c == channel);
                let (m, v) = moments(of_channel.map(|(_, x)| *x));
                news[0][channel] = mean[channel] * momentum + m * (1.0 - momentum);
                news[1][channel] = variance[channel] * momentum + v * (1.0 - momentum);
                (mean[channel], variance[channel]) = (m, v);
            }
            for (at, new) in news.iter().enumerate() {
                let ty = inputs.ty(3 + at)?;
                running.push(Tensor::from_floats(ty.dtype, ty.shape.clone(), new));
            }
        }
        for (at, numbers) in numbers.chunks_mut(area.max(1)).enumerate() {
            let channel = at % c;
            let factor = scale[channel] / (variance[channel] + self.epsilon).sqrt();
            numbers.iter_mut().for_each(|x| *x = (*x - mean[channel]) * factor + offset[channel]);
        }
        let mut outputs = vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)];
        outputs.extend(running);
        Ok(outputs)
    }
}

/// Normalises each group of `n` consecutive numbers.
fn normalise(numbers: &mut [f64], n: usize, epsilon: f64) {
    for stretch in numbers.chunks_mut(n.max(1)) {
        let (mean, variance) = moments(stretch.iter().copied());
        let factor = 1.0 / (variance + epsilon).sqrt();
        stretch.iter_mut().for_each(|x| *x = (*x - mean) * factor);
    }
}

/// Scales and shifts each channel.
fn scale_channels(numbers: &mut [f64], area: usize, scale: &[f64], offset: &[f64]) {
    for (at, numbers) in numbers.chunks_mut(area.max(1)).enumerate() {
        let channel = at % scale.len();
        numbers.iter_mut().for_each(|x| *x = *x * scale[channel] + offset[channel]);
    }
}

impl Operation for InstanceNormalization {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        check_rank(inputs.shape(0)?, 3)?;
        Ok(vec![inputs.ty(0)?.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let x = inputs.tensor(0)?;
        let (c, area) = (x.shape()[1], product(&x.shape()[2..]));
        let mut numbers = x.floats();
        normalise(&mut numbers, area, self.epsilon);
        scale_channels(&mut numbers, area, &one_each(inputs, 1, c)?, &one_each(inputs, 2, c)?);
        Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)])
    }
}

impl Operation for GroupNormalization {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        check_rank(&ty.shape, 2)?;
        if self.n_groups == 0 || !ty.shape[1].is_multiple_of(self.n_groups) {
            return Err(invalid!("{} channels have no {} equal groups", ty.shape[1], self.n_groups));
        }
        Ok(vec![ty.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let x = inputs.tensor(0)?;
        let (c, area) = (x.shape()[1], product(&x.shape()[2..]));
        let per_group = c / self.n_groups;
        let mut numbers = x.floats();
        normalise(&mut numbers, per_group * area, self.epsilon);
        let (n, area) = if self.scales_groups { (self.n_groups, per_group * area) } else { (c, area) };
        scale_channels(&mut numbers, area, &one_each(inputs, 1, n)?, &one_each(inputs, 2, n)?);
        Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)])
    }
}

/// Scales and shifts by inputs that broadcast to the last dimensions.
fn scale_last(numbers: &mut [f64], shape: &[usize], scale: &Tensor, offset: Option<&Tensor>) -> Result<(), OpError> {
    let fits = |x: &Tensor| broadcast(&[x.shape(), shape]).is_ok_and(|out| out == shape);
    if !fits(scale) || !offset.is_none_or(fits) {
        return Err(invalid!("its scale {scale:?} or offset does not broadcast to {shape:?}"));
    }
    let factors = scale.floats();
    for_each(shape, [&broadcast_strides(scale.shape(), shape)], |at, [from]| numbers[at] *= factors[from]);
    if let Some(offset) = offset {
        let terms = offset.floats();
        for_each(shape, [&broadcast_strides(offset.shape(), shape)], |at, [from]| numbers[at] += terms[from]);
    }
    Ok(())
}

impl Operation for LayerNormalization {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let at = axis(self.axis, ty.shape.len())?;
        let mut shape = ty.shape.clone();
        shape[at..].fill(1);
        // Statistics are at least f32.
        let dtype = if ty.dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let statistics = TensorType::new(dtype, shape);
        Ok(vec![ty.clone(), statistics.clone(), statistics])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(inputs)?;
        let x = inputs.tensor(0)?;
        let n = product(&x.shape()[axis(self.axis, x.shape().len())?..]);
        let mut numbers = x.floats();
        // Empty rows have statistics too.
        let rows = (0..product(&types[1].shape)).map(|row| &numbers[row * n..][..n]);
        let statistics: Vec<(f64, f64)> = rows.map(|row| moments(row.iter().copied())).collect();
        normalise(&mut numbers, n, self.epsilon);
        scale_last(&mut numbers, x.shape(), inputs.tensor(1)?, inputs.optional_tensor(2)?)?;
        let means: Vec<f64> = statistics.iter().map(|(mean, _)| *mean).collect();
        let inverse: Vec<f64> = statistics.iter().map(|(_, v)| 1.0 / (v + self.epsilon).sqrt()).collect();
        Ok(vec![
            Tensor::from_floats(x.dtype(), x.shape(), &numbers),
            Tensor::from_floats(types[1].dtype, types[1].shape.clone(), &means),
            Tensor::from_floats(types[1].dtype, types[1].shape.clone(), &inverse),
        ])
    }
}

impl Operation for RmsNormalization {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        axis(self.axis, ty.shape.len())?;
        Ok(vec![TensorType::new(inputs.fact(1)?.dtype(), ty.shape.clone())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let n = product(&x.shape()[axis(self.axis, x.shape().len())?..]);
        let mut numbers = x.floats();
        for stretch in numbers.chunks_mut(n.max(1)) {
            let square = stretch.iter().map(|x| x * x).sum::<f64>() / n as f64;
            let factor = 1.0 / (square + self.epsilon).sqrt();
            stretch.iter_mut().for_each(|x| *x *= factor);
        }
        scale_last(&mut numbers, x.shape(), inputs.tensor(1)?, None)?;
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}

impl Operation for MeanVarianceNormalization {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        axes(&self.axes, inputs.shape(0)?.len())?;
        Ok(vec![inputs.ty(0)?.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let axes = axes(&self.axes, x.shape().len())?;
        let mut kept = x.shape().to_vec();
        axes.iter().for_each(|&d| kept[d] = 1);
        let n_kept = product(&kept);
        let n_each = (x.n_elements() / n_kept.max(1)) as f64;
        let by = broadcast_strides(&kept, x.shape());
        let mut numbers = x.floats();
        let (mut means, mut squares) = (vec![0.0; n_kept], vec![0.0; n_kept]);
        for_each(x.shape(), [&by], |at, [to]| means[to] += numbers[at] / n_each);
        for_each(x.shape(), [&by], |at, [to]| squares[to] += (numbers[at] - means[to]).powi(2) / n_each);
        for_each(x.shape(), [&by], |at, [to]| numbers[at] = (numbers[at] - means[to]) / (squares[to].sqrt() + 1e-9));
        Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)])
    }
}

impl Operation for LpNormalization {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        axis(self.axis, inputs.shape(0)?.len())?;
        Ok(vec![inputs.ty(0)?.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let (outer, n, inner) = around(x.shape(), axis(self.axis, x.shape().len())?);
        let mut numbers = x.floats();
        for o in 0..outer {
            for i in 0..inner {
                let at = |k: usize| (o * n + k) * inner + i;
                let norm = super::pool::norm((0..n).map(|k| numbers[at(k)]), self.p);
                // Vectors of zeros are unchanged.
                (0..n).for_each(|k| numbers[at(k)] = if norm == 0.0 { 0.0 } else { numbers[at(k)] / norm });
            }
        }
        Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)])
    }
}

impl Operation for Lrn {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        check_rank(inputs.shape(0)?, 2)?;
        Ok(vec![inputs.ty(0)?.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let x = inputs.tensor(0)?;
        let (outer, c, inner) = around(x.shape(), 1);
        let numbers = x.floats();
        let mut out = vec![0.0; numbers.len()];
        let (before, behind) = ((self.size - 1) / 2, self.size / 2);
        for o in 0..outer {
            for channel in 0..c {
                let (first, last) = (channel.saturating_sub(before), channel.saturating_add(behind).min(c - 1));
                for i in 0..inner {
                    let at = |channel: usize| (o * c + channel) * inner + i;
                    let energy: f64 = (first..=last).map(|k| numbers[at(k)] * numbers[at(k)]).sum();
                    let divisor = (self.bias + self.alpha / self.size as f64 * energy).powf(self.beta);
                    out[at(channel)] = numbers[at(channel)] / divisor;
                }
            }
        }
        Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &out)])
    }
}
