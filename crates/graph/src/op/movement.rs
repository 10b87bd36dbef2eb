//! Operators that move elements: transposes, slices, padding, block rearrangements.

use super::util::{axes, axis, check_rank, copy_strided, pick, product, size};
use super::util::{strides, transpose};
use super::{ANY, Inputs, Operation, Operator, row};
use crate::error::invalid;
use crate::{OpError, Tensor, TensorType};

/// Permutation of dimensions.
#[derive(Debug, Clone)]
pub struct Transpose {
    /// Input dimension for each output dimension; `None` reverses their order.
    pub order: Option<Vec<i64>>,
}

/// Concatenation of all inputs along `axis`.
#[derive(Debug, Clone, Copy)]
pub struct Concat {
    /// Dimension to concatenate along; negative counts from the end.
    pub axis: i64,
}

/// Split into consecutive parts along `axis`.
#[derive(Debug, Clone)]
pub struct Split {
    /// Dimension to split; negative counts from the end.
    pub axis: i64,
    /// Sizes of the parts, if they are an attribute (before opset 13); else they are input 1, if given.
    pub sizes: Option<Vec<i64>>,
    /// Number of equal parts, if no sizes are given.
    pub n_parts: usize,
    /// Whether the last part may be smaller: from opset 18 on, if `num_outputs` is given.
    pub may_be_uneven: bool,
}

/// Starts, ends and axes.
type SliceAttributes = (Vec<i64>, Vec<i64>, Option<Vec<i64>>);

/// Strided slice along some dimensions.
#[derive(Debug, Clone)]
pub struct Slice {
    /// Starts, ends and axes of attributes (before opset 10). `None`: starts, ends, axes and steps are inputs
    /// 1 to 4.
    pub attributes: Option<SliceAttributes>,
}

/// Repetition of the whole tensor along each dimension; the numbers of repetitions are input 1.
#[derive(Debug, Clone, Copy)]
pub struct Tile;

/// Source of the padded elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PadMode {
    /// Constant value.
    Constant,
    /// Nearest element of the border.
    Edge,
    /// Reflection at the border element, which is not repeated.
    Reflect,
    /// Periodic continuation: elements of the opposite side.
    Wrap,
}

/// Padding at the beginning and end of dimensions; negative sizes crop.
#[derive(Debug, Clone)]
pub struct Pad {
    /// Source of the padded elements.
    pub mode: PadMode,
    /// Pad sizes and constant of attributes (before opset 11). `None`: sizes, constant and axes are inputs 1
    /// to 3.
    pub attributes: Option<(Vec<i64>, f64)>,
}

/// Rearrangement of channels into blocks of pixels: `[n, c, h, w]` becomes `[n, c/block², h·block, w·block]`.
#[derive(Debug, Clone, Copy)]
pub struct DepthToSpace {
    /// Edge of a block in pixels.
    pub block: usize,
    /// Whether channels are split as `[c, block, block]` (mode `CRD`), rather than `[block, block, c]`
    /// (`DCR`).
    pub channels_first: bool,
}

/// Rearrangement of blocks of pixels into channels: `[n, c, h, w]` becomes `[n, c·block², h/block, w/block]`.
#[derive(Debug, Clone, Copy)]
pub struct SpaceToDepth {
    /// Edge of a block in pixels.
    pub block: usize,
    /// Whether channels are ordered as `[c, block, block]` (mode `CRD`), rather than `[block, block, c]`
    /// (`DCR`).
    pub channels_first: bool,
}

/// Reversal of the first elements of each sequence of a batch; their number per sequence is input 1.
#[derive(Debug, Clone, Copy)]
pub struct ReverseSequence {
    /// Dimension along the sequence, 0 or 1.
    pub time_axis: i64,
    /// Dimension of the batch, 0 or 1.
    pub batch_axis: i64,
}

/// Upper or lower triangle of the matrices in the last two dimensions; all other elements become 0. Input 1,
/// optional, moves the diagonal.
#[derive(Debug, Clone, Copy)]
pub struct Trilu {
    /// Whether the upper triangle is kept, rather than the lower.
    pub upper: bool,
}

/// Centred crop or zero padding of some dimensions to the sizes of input 1.
#[derive(Debug, Clone)]
pub struct CenterCropPad {
    /// Dimensions of the sizes; `None` for all.
    pub axes: Option<Vec<i64>>,
}

/// Sum of overlapping columns into an image, the adjoint of `im2col`. Inputs: columns `[n, c · block,
/// windows]`, the image's size, and the block's size.
#[derive(Debug, Clone)]
pub struct Col2Im {
    /// Dilations of the window, 1 by default.
    pub dilations: Option<Vec<i64>>,
    /// Padding: all beginnings, then all ends; 0 by default.
    pub pads: Option<Vec<i64>>,
    /// Strides of the window, 1 by default.
    pub strides: Option<Vec<i64>>,
}

/// Number of elements of a square block.
fn block_size(block: i64) -> Result<usize, OpError> {
    if (1..1 << 15).contains(&block) { Ok(block as usize) } else { Err(invalid!("it has blocksize={block}")) }
}

pub(super) const ROWS: &[Operator] = &[
    row("Transpose", &[1, 13, 21, 23, 24, 25], 1..=1, |node| Ok(Transpose { order: node.ints("perm")? }.into())),
    row("Concat", &[1, 4, 11, 13], 1..=ANY, |node| {
        let axis = match node.int("axis")? {
            Some(axis) => axis,
            None if node.version < 4 => 1,
            None => return Err(invalid!("it has no axis")),
        };
        Ok(Concat { axis }.into())
    }),
    row("Split", &[2, 11, 13, 18], 1..=2, |node| {
        let sizes = if node.version < 13 { node.ints("split")? } else { None };
        let given = if node.version >= 18 { node.int("num_outputs")? } else { None };
        if given.is_some_and(|n| n != node.n_outputs as i64) {
            return Err(invalid!("it has {} outputs, and num_outputs={}", node.n_outputs, given.unwrap_or(0)));
        }
        let n_parts = node.n_outputs;
        Ok(Split { axis: node.int_or("axis", 0)?, sizes, n_parts, may_be_uneven: given.is_some() }.into())
    }),
    row("Slice", &[1, 10, 11, 13], 1..=5, |node| {
        if node.version >= 10 {
            return Ok(Slice { attributes: None }.into());
        }
        let list = |name: &str| node.ints(name)?.ok_or_else(|| invalid!("it has no {name}"));
        Ok(Slice { attributes: Some((list("starts")?, list("ends")?, node.ints("axes")?)) }.into())
    }),
    row("Tile", &[6, 13], 2..=2, |_| Ok(Tile.into())),
    row("Pad", &[1, 2, 11, 13, 18, 19, 21, 23, 24, 25], 1..=4, |node| {
        let modes = [
            ("constant", PadMode::Constant),
            ("edge", PadMode::Edge),
            ("reflect", PadMode::Reflect),
            ("wrap", PadMode::Wrap),
        ];
        let mode = node.one_of("mode", "constant", &modes)?;
        let attributes = if node.version < 11 {
            let name = if node.version < 2 { "paddings" } else { "pads" };
            let pads = node.ints(name)?.ok_or_else(|| invalid!("it has no {name}"))?;
            Some((pads, node.float_or("value", 0.0)?))
        } else {
            None
        };
        Ok(Pad { mode, attributes }.into())
    }),
    row("DepthToSpace", &[1, 11, 13, 28], 1..=1, |node| {
        let block = node.int("blocksize")?.ok_or_else(|| invalid!("it has no blocksize"))?;
        let channels_first = match node.version {
            1 => false,
            _ => node.one_of("mode", "DCR", &[("DCR", false), ("CRD", true)])?,
        };
        Ok(DepthToSpace { block: block_size(block)?, channels_first }.into())
    }),
    row("SpaceToDepth", &[1, 13, 28], 1..=1, |node| {
        let block = node.int("blocksize")?.ok_or_else(|| invalid!("it has no blocksize"))?;
        let channels_first = match node.version {
            28 => node.one_of("mode", "DCR", &[("DCR", false), ("CRD", true)])?,
            _ => false,
        };
        Ok(SpaceToDepth { block: block_size(block)?, channels_first }.into())
    }),
    row("ReverseSequence", &[10, 28], 2..=2, |node| {
        Ok(ReverseSequence { time_axis: node.int_or("time_axis", 0)?, batch_axis: node.int_or("batch_axis", 1)? }
            .into())
    }),
    row("Trilu", &[14], 1..=2, |node| Ok(Trilu { upper: node.flag("upper", true)? }.into())),
    row("CenterCropPad", &[18], 2..=2, |node| Ok(CenterCropPad { axes: node.ints("axes")? }.into())),
    row("Col2Im", &[18], 3..=3, |node| {
        let (dilations, pads) = (node.ints("dilations")?, node.ints("pads")?);
        Ok(Col2Im { dilations, pads, strides: node.ints("strides")? }.into())
    }),
];

impl Transpose {
    /// Permutation for a tensor of the rank: the input dimension for each output dimension.
    ///
    /// # Errors
    /// If the attribute is not a permutation of the dimensions.
    pub fn order(&self, rank: usize) -> Result<Vec<usize>, OpError> {
        match &self.order {
            None => Ok((0..rank).rev().collect()),
            Some(order) if order.len() == rank => axes(order, rank),
            Some(order) => Err(invalid!("{order:?} is no order of {rank} dimensions")),
        }
    }
}

impl Operation for Transpose {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let order = self.order(ty.shape.len())?;
        Ok(vec![TensorType::new(ty.dtype, order.iter().map(|&d| ty.shape[d]).collect::<Vec<_>>())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        Ok(vec![transpose(x, &self.order(x.shape().len())?)])
    }
}

impl Operation for Concat {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut ty = inputs.ty(0)?.clone();
        let axis = axis(self.axis, ty.shape.len())?;
        for at in 1..inputs.n_inputs() {
            let other = inputs.ty(at)?;
            let fits = other.shape.len() == ty.shape.len()
                && other.dtype == ty.dtype
                && (0..ty.shape.len()).all(|d| d == axis || other.shape[d] == ty.shape[d]);
            if !fits {
                return Err(invalid!("{other} does not go behind {ty} along axis {axis}"));
            }
            ty.shape[axis] += other.shape[axis];
        }
        Ok(vec![ty])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let axis = axis(self.axis, ty.shape.len())?;
        let n_outer = product(&ty.shape[..axis]);
        let mut bytes = Vec::with_capacity(ty.n_elements() * ty.dtype.size());
        for outer in 0..n_outer {
            for at in 0..inputs.n_inputs() {
                let all = inputs.tensor(at)?.bytes();
                let part = all.len() / n_outer;
                bytes.extend_from_slice(&all[outer * part..(outer + 1) * part]);
            }
        }
        Ok(vec![Tensor::new(ty, bytes.into()).expect("the inputs' elements")])
    }
}

/// Slices a tensor along an axis.
pub(super) fn part(x: &Tensor, axis: usize, start: usize, n: usize) -> Tensor {
    let mut shape = x.shape().to_vec();
    let own: Vec<isize> = strides(&shape).iter().map(|&s| s as isize).collect();
    shape[axis] = n;
    let offset = start * own[axis] as usize;
    copy_strided(x, &shape, &own, offset)
}

impl Split {
    fn sizes(&self, inputs: Inputs<'_>) -> Result<(usize, Vec<usize>), OpError> {
        let shape = inputs.shape(0)?;
        let axis = axis(self.axis, shape.len())?;
        let n = shape[axis];
        let given = self.sizes.clone().map_or_else(|| inputs.optional_i64s(1), |sizes| Ok(Some(sizes)))?;
        let sizes: Vec<usize> = match given {
            Some(sizes) => sizes.into_iter().map(size).collect::<Result<_, _>>()?,
            None if self.n_parts == 0 => return Err(invalid!("it has no outputs")),
            None if !self.may_be_uneven && !n.is_multiple_of(self.n_parts) => {
                return Err(invalid!("a dimension of {n} has no {} equal parts", self.n_parts));
            }
            None => {
                let each = n.div_ceil(self.n_parts);
                (0..self.n_parts).map(|at| each.min(n.saturating_sub(at * each))).collect()
            }
        };
        if sizes.iter().try_fold(0_usize, |sum, &n| sum.checked_add(n)) != Some(n) {
            return Err(invalid!("parts of {sizes:?} are not the dimension's {n}"));
        }
        Ok((axis, sizes))
    }
}

impl Operation for Split {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (axis, sizes) = self.sizes(inputs)?;
        let ty = inputs.ty(0)?;
        let part = |&n: &usize| {
            let mut part = ty.clone();
            part.shape[axis] = n;
            part
        };
        Ok(sizes.iter().map(part).collect())
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let (axis, sizes) = self.sizes(inputs)?;
        let x = inputs.tensor(0)?;
        let mut start = 0;
        let parts = sizes.iter().map(|&n| {
            start += n;
            part(x, axis, start - n, n)
        });
        Ok(parts.collect())
    }
}

impl Slice {
    /// Start, step and number of elements along each dimension of the input.
    ///
    /// # Errors
    /// If the bounds are not known or do not fit.
    pub fn parts(&self, inputs: Inputs<'_>) -> Result<Vec<(usize, i64, usize)>, OpError> {
        let shape = inputs.shape(0)?;
        let (starts, ends, given) = match &self.attributes {
            Some(attributes) => attributes.clone(),
            None => (inputs.tensor(1)?.i64s(), inputs.tensor(2)?.i64s(), inputs.optional_i64s(3)?),
        };
        let steps = if self.attributes.is_some() { None } else { inputs.optional_i64s(4)? };
        let steps = steps.unwrap_or_else(|| vec![1; starts.len()]);
        let given = given.unwrap_or_else(|| (0..starts.len() as i64).collect());
        let axes = axes(&given, shape.len())?;
        if [ends.len(), steps.len(), axes.len()] != [starts.len(); 3] {
            return Err(invalid!("starts, ends, axes and steps are not of one length"));
        }
        let mut parts: Vec<(usize, i64, usize)> = shape.iter().map(|&n| (0, 1, n)).collect();
        for (((&start, &end), &step), &axis) in starts.iter().zip(&ends).zip(&steps).zip(&axes) {
            let n = shape[axis] as i64;
            // An empty dimension has no last element.
            let place =
                |at: i64, low: i64, high: i64| (if at < 0 { at.saturating_add(n) } else { at }).max(low).min(high);
            let (start, span) = if step > 0 {
                let start = place(start, 0, n);
                (start, place(end, 0, n) - start)
            } else {
                let start = place(start, 0, n - 1);
                (start, start - place(end, -1, n - 1))
            };
            let by = step.unsigned_abs();
            if by == 0 {
                return Err(invalid!("a step is 0"));
            }
            let n_places = (span.max(0) as u64).div_ceil(by) as usize;
            // If there is at most one element, the step does not matter.
            parts[axis] = (start.max(0) as usize, if n_places > 1 { step } else { 1 }, n_places);
        }
        Ok(parts)
    }
}

impl Operation for Slice {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let parts = self.parts(inputs)?;
        Ok(vec![TensorType::new(inputs.fact(0)?.dtype(), parts.iter().map(|part| part.2).collect::<Vec<_>>())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let parts = self.parts(inputs)?;
        let x = inputs.tensor(0)?;
        let own = strides(x.shape());
        let shape: Vec<usize> = parts.iter().map(|part| part.2).collect();
        let by: Vec<isize> = parts.iter().zip(&own).map(|(part, &stride)| part.1 as isize * stride as isize).collect();
        let offset = parts.iter().zip(&own).map(|(part, &stride)| part.0 * stride).sum();
        Ok(vec![copy_strided(x, &shape, &by, offset)])
    }
}

/// Makes a tensor of this shape from the elements of another one of equal rank: `from` maps a dimension and
/// an index along it to the index in `x`. Elements from outside are 0.
fn picked(x: &Tensor, shape: Vec<usize>, from: impl Fn(usize, usize) -> Option<usize>) -> Tensor {
    let own = strides(x.shape());
    let place = |at: usize| {
        let (mut rest, mut place) = (at, 0);
        for d in (0..shape.len()).rev() {
            place += from(d, rest % shape[d]).filter(|&index| index < x.shape()[d])? * own[d];
            rest /= shape[d];
        }
        Some(place)
    };
    pick(x, shape.clone(), (0..product(&shape)).map(place))
}

impl Operation for Tile {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut ty = inputs.ty(0)?.clone();
        let repeats = inputs.tensor(1)?.i64s();
        if repeats.len() != ty.shape.len() {
            return Err(invalid!("it has {} repeats of {} dimensions", repeats.len(), ty.shape.len()));
        }
        for (dim, repeat) in ty.shape.iter_mut().zip(repeats) {
            *dim = dim.checked_mul(size(repeat)?).ok_or_else(|| invalid!("{repeat} repeats are too many"))?;
        }
        Ok(vec![ty])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        Ok(vec![picked(x, ty.shape, |d, index| Some(index % x.shape()[d]))])
    }
}

impl Pad {
    /// Padding before and after each dimension; negative to crop.
    ///
    /// # Errors
    /// If the sizes are not known or do not fit.
    pub fn borders(&self, inputs: Inputs<'_>) -> Result<Vec<(i64, i64)>, OpError> {
        let rank = inputs.shape(0)?.len();
        let pads = match &self.attributes {
            Some((pads, _)) => pads.clone(),
            None => inputs.tensor(1)?.i64s(),
        };
        let given = if self.attributes.is_some() { None } else { inputs.optional_i64s(3)? };
        let axes = axes(&given.unwrap_or_else(|| (0..rank as i64).collect()), rank)?;
        if pads.len() != 2 * axes.len() {
            return Err(invalid!("{} sizes of borders do not fit {} dimensions", pads.len(), axes.len()));
        }
        let mut borders = vec![(0, 0); rank];
        for (at, &axis) in axes.iter().enumerate() {
            borders[axis] = (pads[at], pads[at + axes.len()]);
        }
        Ok(borders)
    }

    fn source(&self, at: i64, n: i64) -> Option<i64> {
        if (0..n).contains(&at) {
            return Some(at);
        }
        match self.mode {
            PadMode::Constant => None,
            PadMode::Edge => Some(at.clamp(0, n - 1)),
            PadMode::Wrap => Some(at.rem_euclid(n)),
            PadMode::Reflect if n == 1 => Some(0),
            PadMode::Reflect => {
                let period = 2 * (n - 1);
                let at = at.rem_euclid(period);
                Some(at.min(period - at))
            }
        }
    }
}

impl Operation for Pad {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut ty = inputs.ty(0)?.clone();
        for (dim, (before, behind)) in ty.shape.iter_mut().zip(self.borders(inputs)?) {
            if *dim == 0 && self.mode != PadMode::Constant && (before > 0 || behind > 0) {
                return Err(invalid!("a dimension without elements has no border to repeat"));
            }
            let padded = (*dim as i64).checked_add(before).and_then(|n| n.checked_add(behind));
            *dim = padded.map_or_else(|| Err(invalid!("a border of {before} is too large")), size)?;
        }
        Ok(vec![ty])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let borders = self.borders(inputs)?;
        let x = inputs.tensor(0)?;
        let own = strides(x.shape());
        // Source of each position of the output, for each dimension.
        let sources: Vec<Vec<Option<usize>>> = (0..ty.shape.len())
            .map(|d| {
                let n = x.shape()[d] as i64;
                let from = |at: usize| self.source(at as i64 - borders[d].0, n).map(|from| from as usize * own[d]);
                (0..ty.shape[d]).map(from).collect()
            })
            .collect();
        let constant = match &self.attributes {
            Some((_, value)) => Tensor::scalar(ty.dtype, *value),
            None => match inputs.optional_tensor(2)? {
                Some(value) if value.n_elements() == 1 && value.dtype() == ty.dtype => value.clone(),
                Some(value) => return Err(invalid!("the constant {value:?} is no single {}", ty.dtype)),
                None => Tensor::scalar(ty.dtype, 0.0),
            },
        };
        let size = ty.dtype.size();
        let mut bytes = Vec::with_capacity(ty.n_elements() * size);
        for at in 0..ty.n_elements() {
            let mut rest = at;
            let mut from = Some(0);
            for d in (0..ty.shape.len()).rev() {
                from = from.zip(sources[d][rest % ty.shape[d]]).map(|(sum, place)| sum + place);
                rest /= ty.shape[d];
            }
            match from {
                Some(from) => bytes.extend_from_slice(&x.bytes()[from * size..(from + 1) * size]),
                None => bytes.extend_from_slice(constant.bytes()),
            }
        }
        Ok(vec![Tensor::new(ty, bytes.into()).expect("an element for each place")])
    }
}

/// Checks that an image has four dimensions, and returns them.
fn image(shape: &[usize]) -> Result<[usize; 4], OpError> {
    shape.try_into().map_err(|_| invalid!("its input has shape {shape:?}, and should have 4 dimensions"))
}

impl Operation for DepthToSpace {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let [n, c, h, w] = image(inputs.shape(0)?)?;
        let b = self.block;
        let channels = b.checked_mul(b).filter(|area| c.is_multiple_of(*area)).map(|area| c / area);
        let channels = channels.ok_or_else(|| invalid!("{c} channels are no multiple of blocks of {b}×{b}"))?;
        Ok(vec![TensorType::new(inputs.fact(0)?.dtype(), [n, channels, h * b, w * b])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let [n, c, h, w] = image(x.shape())?;
        let b = self.block;
        let (split, order) = match self.channels_first {
            true => ([n, c / (b * b), b, b, h, w], [0, 1, 4, 2, 5, 3]),
            false => ([n, b, b, c / (b * b), h, w], [0, 3, 4, 1, 5, 2]),
        };
        Ok(vec![transpose(&x.reshaped(split), &order).reshaped(ty.shape)])
    }
}

impl Operation for SpaceToDepth {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let [n, c, h, w] = image(inputs.shape(0)?)?;
        let b = self.block;
        if !h.is_multiple_of(b) || !w.is_multiple_of(b) {
            return Err(invalid!("an image of {h}×{w} has no blocks of {b}×{b}"));
        }
        Ok(vec![TensorType::new(inputs.fact(0)?.dtype(), [n, c * b * b, h / b, w / b])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let [n, c, h, w] = image(x.shape())?;
        let b = self.block;
        let split = x.reshaped([n, c, h / b, b, w / b, b]);
        let order = if self.channels_first { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
        Ok(vec![transpose(&split, &order).reshaped(ty.shape)])
    }
}

impl Operation for ReverseSequence {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        check_rank(&ty.shape, 2)?;
        let (time, batch) = (axis(self.time_axis, ty.shape.len())?, axis(self.batch_axis, ty.shape.len())?);
        if time == batch || inputs.shape(1)? != [ty.shape[batch]] {
            return Err(invalid!("lengths of shape {:?} do not fit {ty}", inputs.shape(1)?));
        }
        Ok(vec![ty.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let (x, lengths) = (inputs.tensor(0)?, inputs.tensor(1)?.i64s());
        let shape = x.shape();
        let (time, batch) = (axis(self.time_axis, shape.len())?, axis(self.batch_axis, shape.len())?);
        if let Some(length) = lengths.iter().find(|&&length| length < 0 || length as usize > shape[time]) {
            return Err(invalid!("a length of {length} does not fit {} steps", shape[time]));
        }
        let own = strides(shape);
        let place = |at: usize| {
            let t = at / own[time] % shape[time];
            let length = lengths[at / own[batch] % shape[batch]] as usize;
            let from = if t < length { length - 1 - t } else { t };
            Some(at - t * own[time] + from * own[time])
        };
        Ok(vec![pick(x, shape.to_vec(), (0..x.n_elements()).map(place))])
    }
}

impl Operation for Trilu {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        check_rank(&ty.shape, 2)?;
        Ok(vec![ty.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        self.infer(inputs)?;
        let x = inputs.tensor(0)?;
        let k = inputs.optional_i64s(1)?.and_then(|k| k.first().copied()).unwrap_or(0);
        let [.., rows, columns] = x.shape() else { unreachable!("two dimensions or more") };
        let place = |at: usize| {
            let (row, column) = (at / columns % rows, at % columns);
            let above = (column as i64).saturating_sub(row as i64);
            (if self.upper { above >= k } else { above <= k }).then_some(at)
        };
        Ok(vec![pick(x, x.shape().to_vec(), (0..x.n_elements()).map(place))])
    }
}

impl Operation for CenterCropPad {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut ty = inputs.ty(0)?.clone();
        let rank = ty.shape.len();
        let wanted = inputs.tensor(1)?.i64s();
        let axes = axes(&self.axes.clone().unwrap_or_else(|| (0..rank as i64).collect()), rank)?;
        if axes.len() != wanted.len() {
            return Err(invalid!("{} sizes do not fit {} axes", wanted.len(), axes.len()));
        }
        for (axis, n) in axes.into_iter().zip(wanted) {
            ty.shape[axis] = size(n)?;
        }
        Ok(vec![ty])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let shape = ty.shape.clone();
        let from = |d: usize, index: usize| {
            let (n, wanted) = (x.shape()[d], shape[d]);
            if n >= wanted { Some(index + (n - wanted) / 2) } else { index.checked_sub((wanted - n) / 2) }
        };
        Ok(vec![picked(x, ty.shape, from)])
    }
}

/// Placement of windows in an image, for [`Col2Im`].
struct ImageWindows {
    image: Vec<usize>,
    block: Vec<usize>,
    counts: Vec<usize>,
    dilations: Vec<i64>,
    strides: Vec<i64>,
    begins: Vec<i64>,
}

impl Col2Im {
    fn columns(&self, inputs: Inputs<'_>) -> Result<ImageWindows, OpError> {
        let list = |at| -> Result<Vec<usize>, OpError> { inputs.tensor(at)?.i64s().into_iter().map(size).collect() };
        let (image, block) = (list(1)?, list(2)?);
        let n = image.len();
        let dilations = self.dilations.clone().unwrap_or_else(|| vec![1; n]);
        let strides = self.strides.clone().unwrap_or_else(|| vec![1; n]);
        let pads = self.pads.clone().unwrap_or_else(|| vec![0; 2 * n]);
        let lengths = [block.len(), dilations.len(), strides.len(), pads.len() / 2];
        let numbers = dilations.iter().chain(&strides).chain(&pads);
        let is_small = numbers.clone().all(|n| (-1 << 31..1 << 31).contains(n))
            && image.iter().chain(&block).all(|&n| n < 1 << 31);
        if lengths != [n; 4] || !is_small || strides.iter().any(|&s| s < 1) || block.contains(&0) {
            return Err(invalid!("its sizes are not of one length, or not positive"));
        }
        let count = |d: usize| {
            let window = dilations[d] * (block[d] as i64 - 1) + 1;
            let room = image[d] as i64 + pads[d] + pads[d + n] - window;
            if room < 0 { 0 } else { (room / strides[d] + 1) as usize }
        };
        let counts = (0..n).map(count).collect();
        Ok(ImageWindows { counts, begins: pads[..n].to_vec(), image, block, dilations, strides })
    }
}

impl Operation for Col2Im {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let columns = self.columns(inputs)?;
        let ty = inputs.ty(0)?;
        let block = columns.block.iter().fold(1_usize, |n, &d| n.saturating_mul(d));
        match ty.shape[..] {
            [n, c, l]
                if c.is_multiple_of(block)
                    && columns.counts.iter().try_fold(1_usize, |n, &d| n.checked_mul(d)) == Some(l) =>
            {
                let shape = [&[n, c / block][..], &columns.image].concat();
                Ok(vec![TensorType::new(ty.dtype, shape)])
            }
            _ => Err(invalid!("{ty} does not fit an image of {:?} in blocks of {:?}", columns.image, columns.block)),
        }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let columns = self.columns(inputs)?;
        let x = inputs.tensor(0)?.floats();
        let (block, count, area) = (product(&columns.block), product(&columns.counts), product(&columns.image));
        let mut sums = vec![0.0; ty.n_elements()];
        let digits = |mut at: usize, shape: &[usize]| {
            let mut index = vec![0; shape.len()];
            for d in (0..shape.len()).rev() {
                index[d] = at % shape[d];
                at /= shape[d];
            }
            index
        };
        for (at, &number) in x.iter().enumerate() {
            let (l, k, outer) = (at % count, at / count % block, at / count / block);
            let (window, inside) = (digits(l, &columns.counts), digits(k, &columns.block));
            let place = (0..columns.image.len()).try_fold(0, |place, d| {
                let to = window[d] as i64 * columns.strides[d] + inside[d] as i64 * columns.dilations[d];
                let to = usize::try_from(to - columns.begins[d]).ok().filter(|&to| to < columns.image[d])?;
                Some(place * columns.image[d] + to)
            });
            if let Some(place) = place {
                sums[outer * area + place] += number;
            }
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &sums)])
    }
}
