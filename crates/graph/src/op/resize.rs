//! Resampling of images to other sizes.

use super::util::{around, axes, size};
use super::{Import, Inputs, Op, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{OpError, Tensor, TensorType};

/// Interpolation method.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ResizeMode {
    /// Nearest neighbour.
    Nearest(Rounding),
    /// Linear interpolation.
    Linear,
    /// Cubic convolution with this coefficient (`cubic_coeff_a`).
    Cubic(f64),
}

/// Rounding rule of nearest-neighbour interpolation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Rounding {
    HalfDown,
    HalfUp,
    Floor,
    Ceil,
}

/// Mapping of output coordinates to input coordinates (`coordinate_transformation_mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Coordinates {
    HalfPixel,
    HalfPixelSymmetric,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
    TfHalfPixelForNearest,
    TfCropAndResize,
}

/// Policy for the aspect ratio when sizes are given (`keep_aspect_ratio_policy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Aspect {
    Stretch,
    NotLarger,
    NotSmaller,
}

/// Resampling of an image to another size. Inputs 1 to 3, each optional, are the region of interest, the
/// scale factors and the sizes.
#[derive(Debug, Clone)]
pub struct Resize {
    /// Interpolation method.
    pub mode: ResizeMode,
    /// Mapping of coordinates.
    pub coordinates: Coordinates,
    /// Whether pixels outside the image get weight 0 and the other weights are renormalised.
    pub excludes_outside: bool,
    /// Value for pixels outside the image (`extrapolation_value`), for a region that exceeds it.
    pub outside: f64,
    /// Whether downsampling is antialiased.
    pub antialias: bool,
    /// Dimensions of region, factors and sizes; `None` for all.
    pub axes: Option<Vec<i64>>,
    /// Policy for the aspect ratio.
    pub aspect: Aspect,
    /// Scale factors of an attribute (`Upsample` before opset 9).
    pub factors: Option<Vec<f64>>,
    /// Index of the input with the factors.
    pub factors_at: usize,
}

fn upsample(node: &Import) -> Result<Op, OpError> {
    let mode = match node.text_or("mode", "nearest")?.as_str() {
        "nearest" => ResizeMode::Nearest(Rounding::Floor),
        "linear" | "bilinear" => ResizeMode::Linear,
        other => return Err(unsupported!("mode={other} is not supported")),
    };
    let factors =
        if node.version < 9 && (node.version >= 7 || !node.has_input(1)) { node.floats("scales")? } else { None };
    let factors = factors.map(|list| list.into_iter().map(f64::from).collect());
    Ok(Resize {
        mode,
        coordinates: Coordinates::Asymmetric,
        excludes_outside: false,
        outside: 0.0,
        antialias: false,
        axes: None,
        aspect: Aspect::Stretch,
        factors,
        factors_at: 1,
    }
    .into())
}

fn resize(node: &Import) -> Result<Op, OpError> {
    if node.version < 11 {
        return upsample(node);
    }
    let known = [
        ("half_pixel", Coordinates::HalfPixel),
        ("half_pixel_symmetric", Coordinates::HalfPixelSymmetric),
        ("pytorch_half_pixel", Coordinates::PytorchHalfPixel),
        ("align_corners", Coordinates::AlignCorners),
        ("asymmetric", Coordinates::Asymmetric),
        ("tf_half_pixel_for_nn", Coordinates::TfHalfPixelForNearest),
        ("tf_crop_and_resize", Coordinates::TfCropAndResize),
    ];
    let coordinates = node.one_of("coordinate_transformation_mode", "half_pixel", &known)?;
    let known = [
        ("round_prefer_floor", Rounding::HalfDown),
        ("round_prefer_ceil", Rounding::HalfUp),
        ("floor", Rounding::Floor),
        ("ceil", Rounding::Ceil),
    ];
    let rounding = node.one_of("nearest_mode", "round_prefer_floor", &known)?;
    let cubic = node.float_or("cubic_coeff_a", -0.75)?;
    let known = [
        ("nearest", ResizeMode::Nearest(rounding)),
        ("linear", ResizeMode::Linear),
        ("cubic", ResizeMode::Cubic(cubic)),
    ];
    let mode = node.one_of("mode", "nearest", &known)?;
    let known = [("stretch", Aspect::Stretch), ("not_larger", Aspect::NotLarger), ("not_smaller", Aspect::NotSmaller)];
    let is_new = node.version >= 18;
    Ok(Resize {
        mode,
        coordinates,
        excludes_outside: node.flag("exclude_outside", false)?,
        outside: node.float_or("extrapolation_value", 0.0)?,
        antialias: is_new && node.flag("antialias", false)?,
        axes: if is_new { node.ints("axes")? } else { None },
        aspect: if is_new { node.one_of("keep_aspect_ratio_policy", "stretch", &known)? } else { Aspect::Stretch },
        factors: None,
        factors_at: 2,
    }
    .into())
}

pub(super) const ROWS: &[Operator] =
    &[row("Resize", &[10, 11, 13, 18, 19], 1..=4, resize), row("Upsample", &[7, 9, 10], 1..=2, upsample)];

/// Resampling along a dimension.
#[derive(Debug, Clone, Copy)]
pub struct ResizedAxis {
    /// Index of the dimension.
    pub axis: usize,
    /// Size of the input along it.
    pub from: usize,
    /// Size of the output along it.
    pub to: usize,
    /// Scale factor, which need not be `to / from`.
    pub factor: f64,
    /// Start and end of the region of interest, relative to the size.
    pub region: (f64, f64),
}

/// Interpolation along a dimension: for each output coordinate, the input coordinates with their weights.
pub type AxisSums = (usize, Vec<Vec<(usize, f64)>>);

impl Rounding {
    /// Half of a pixel. Places within a millionth of the middle of two pixels count as the middle, as in ONNX
    /// Runtime.
    pub const HALF: f64 = 0.5 + 1e-6;
}

impl Resize {
    /// Dimensions whose size or region changes.
    ///
    /// # Errors
    /// If factors or sizes are not known or do not fit.
    pub fn resized(&self, inputs: Inputs<'_>) -> Result<Vec<ResizedAxis>, OpError> {
        let shape = inputs.shape(0)?;
        let rank = shape.len();
        let axes = axes(&self.axes.clone().unwrap_or_else(|| (0..rank as i64).collect()), rank)?;
        let filled = |at: usize| Ok(inputs.optional_tensor(at)?.filter(|x| x.n_elements() > 0));
        let factors = match &self.factors {
            Some(factors) => Some(factors.clone()),
            None => filled(self.factors_at)?.map(Tensor::floats),
        };
        let sizes = if self.factors_at == 2 { filled(3)?.map(Tensor::i64s) } else { None };
        let region = match self.coordinates {
            Coordinates::TfCropAndResize => filled(1)?.map(Tensor::floats),
            _ => None,
        };
        let n = axes.len();
        let fits = factors.as_ref().is_none_or(|f| f.len() == n)
            && sizes.as_ref().is_none_or(|s| s.len() == n)
            && region.as_ref().is_none_or(|r| r.len() == 2 * n);
        if !fits || factors.is_none() && sizes.is_none() {
            return Err(invalid!("factors or sizes do not fit {n} dimensions"));
        }
        let span = |at: usize| region.as_ref().map_or((0.0, 1.0), |r| (r[at], r[at + n]));
        if let Some(sizes) = sizes {
            let ratio = |at: usize| sizes[at] as f64 / shape[axes[at]] as f64;
            let ratios = (0..n).map(ratio);
            let kept = match self.aspect {
                Aspect::Stretch => None,
                Aspect::NotLarger => Some(ratios.fold(f64::INFINITY, f64::min)),
                Aspect::NotSmaller => Some(ratios.fold(0.0, f64::max)),
            };
            let of = |at: usize| {
                let from = shape[axes[at]];
                let (to, factor) = match kept {
                    None => (size(sizes[at])?, ratio(at)),
                    Some(factor) => ((factor * from as f64 + 0.5).floor() as usize, factor),
                };
                Ok(ResizedAxis { axis: axes[at], from, to, factor, region: span(at) })
            };
            return (0..n).map(of).collect();
        }
        let factors = factors.unwrap_or_default();
        let of = |at: usize| {
            let (from, factor) = (shape[axes[at]], factors[at]);
            if !factor.is_finite() || factor < 0.0 {
                return Err(invalid!("a factor is {factor}"));
            }
            let region = span(at);
            // Factors apply to the region. The product is that of f32: 24 · f32(50 / 24) is 50.
            let extent = factor as f32 * (region.1 - region.0) as f32 * from as f32;
            let to = extent.floor().max(0.0) as usize;
            Ok(ResizedAxis { axis: axes[at], from, to, factor, region })
        };
        (0..n).map(of).collect()
    }

    /// Weights of the interpolation along each resized dimension; `None` if an output may be outside the
    /// image.
    ///
    /// # Errors
    /// As [`Resize::resized`].
    pub fn sums(&self, inputs: Inputs<'_>) -> Result<Option<Vec<AxisSums>>, OpError> {
        if self.coordinates == Coordinates::TfCropAndResize {
            return Ok(None);
        }
        let of_axis = |axis: ResizedAxis| (axis.axis, (0..axis.to).map(|at| self.taps(at, &axis).0).collect());
        let changes = |axis: &ResizedAxis| axis.from != axis.to || axis.factor != 1.0;
        Ok(Some(self.resized(inputs)?.into_iter().filter(changes).map(of_axis).collect()))
    }

    /// Coordinate in the input of a pixel of the output. For nearest neighbours it is rounded to f32 after
    /// each operation, as in ONNX Runtime, so that 4 / f32(4 / 3) is 3 and not just below.
    fn coordinate(&self, at: usize, axis: &ResizedAxis) -> f64 {
        if !matches!(self.mode, ResizeMode::Nearest(_)) {
            return self.place(at, axis);
        }
        let (x, factor) = (at as f32, axis.factor as f32);
        let half = (x + 0.5) / factor - 0.5;
        f64::from(match self.coordinates {
            Coordinates::HalfPixel => half,
            Coordinates::PytorchHalfPixel if axis.to > 1 => half,
            Coordinates::Asymmetric => x / factor,
            Coordinates::TfHalfPixelForNearest => (x + 0.5) / factor,
            Coordinates::AlignCorners if axis.to > 1 => x * (axis.from as f32 - 1.0) / (axis.to as f32 - 1.0),
            _ => return self.place(at, axis),
        })
    }

    /// Coordinate in the input of a pixel of the output, in f64.
    fn place(&self, at: usize, axis: &ResizedAxis) -> f64 {
        let (x, factor, from, to) = (at as f64, axis.factor, axis.from as f64, axis.to as f64);
        match self.coordinates {
            Coordinates::HalfPixel => (x + 0.5) / factor - 0.5,
            Coordinates::HalfPixelSymmetric => {
                let adjustment = to / (factor * from);
                let centre = from / 2.0;
                centre * (1.0 - adjustment) + (x + 0.5) / factor - 0.5
            }
            Coordinates::PytorchHalfPixel => {
                if to > 1.0 {
                    (x + 0.5) / factor - 0.5
                } else {
                    0.0
                }
            }
            // The last position of the output is the last one of the input, for any factor.
            Coordinates::AlignCorners => {
                if to > 1.0 {
                    x * (from - 1.0) / (to - 1.0)
                } else {
                    0.0
                }
            }
            Coordinates::Asymmetric => x / factor,
            Coordinates::TfHalfPixelForNearest => (x + 0.5) / factor,
            Coordinates::TfCropAndResize => {
                let (start, end) = axis.region;
                if to > 1.0 {
                    start * (from - 1.0) + x * (end - start) * (from - 1.0) / (to - 1.0)
                } else {
                    0.5 * (start + end) * (from - 1.0)
                }
            }
        }
    }

    /// Pixels that contribute to a position of the output, with their weights, and whether the position is
    /// outside the image.
    fn taps(&self, at: usize, axis: &ResizedAxis) -> (Vec<(usize, f64)>, bool) {
        let x = self.coordinate(at, axis);
        let n = axis.from as i64;
        let is_outside = self.coordinates == Coordinates::TfCropAndResize && (x < 0.0 || x > (n - 1) as f64);
        let clamped = |place: i64| place.clamp(0, n - 1) as usize;
        // When downsampling, the filter is as wide as a pixel of the output.
        let shrink = if self.antialias { axis.factor.min(1.0) } else { 1.0 };
        let (radius, weight): (f64, Box<dyn Fn(f64) -> f64>) = match self.mode {
            ResizeMode::Nearest(rounding) => {
                let place = match rounding {
                    Rounding::HalfDown => (x - Rounding::HALF).ceil(),
                    Rounding::HalfUp => (x + Rounding::HALF).floor(),
                    Rounding::Floor => x.floor(),
                    Rounding::Ceil => x.ceil(),
                };
                return (vec![(clamped(place as i64), 1.0)], is_outside);
            }
            ResizeMode::Linear => (1.0, Box::new(|d: f64| (1.0 - d.abs()).max(0.0))),
            ResizeMode::Cubic(a) => (
                2.0,
                Box::new(move |d: f64| {
                    let d = d.abs();
                    if d <= 1.0 {
                        ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0
                    } else if d < 2.0 {
                        ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a
                    } else {
                        0.0
                    }
                }),
            ),
        };
        let reach = radius / shrink;
        let (first, last) = ((x - reach).ceil() as i64, (x + reach).floor() as i64);
        let mut taps = Vec::new();
        let mut sum = 0.0;
        for place in first..=last {
            let w = weight((place as f64 - x) * shrink);
            if w == 0.0 || self.excludes_outside && !(0..n).contains(&place) {
                continue;
            }
            taps.push((clamped(place), w));
            sum += w;
        }
        if sum != 0.0 {
            taps.iter_mut().for_each(|(_, w)| *w /= sum);
        }
        (taps, is_outside)
    }
}

impl Operation for Resize {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut ty = inputs.ty(0)?.clone();
        for axis in self.resized(inputs)? {
            if axis.from == 0 && axis.to > 0 {
                return Err(invalid!("an image without pixels has no size {}", axis.to));
            }
            ty.shape[axis.axis] = axis.to;
        }
        Ok(vec![ty])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        if let (false, Some(of_axes)) = (ty.dtype.is_float(), self.sums(inputs)?)
            && matches!(self.mode, ResizeMode::Nearest(_))
        {
            // Doubles cannot represent all integers.
            let mut numbers = x.integers();
            let mut shape = x.shape().to_vec();
            for (axis, places) in of_axes {
                let (outer, n, inner) = around(&shape, axis);
                let at = |o: usize, place: usize| (o * n + place) * inner;
                let rows = (0..outer).flat_map(|o| places.iter().map(move |taps| at(o, taps[0].0)));
                numbers = rows.flat_map(|start| numbers[start..start + inner].to_vec()).collect();
                shape[axis] = places.len();
            }
            return Ok(vec![Tensor::from_integers(ty.dtype, ty.shape, &numbers)]);
        }
        let (mut numbers, mut shape) = (x.floats(), x.shape().to_vec());
        // Dimension by dimension; a position outside the image in one dimension is outside it.
        let mut is_outside = vec![false; numbers.len()];
        for resized in self.resized(inputs)? {
            let is_same = resized.from == resized.to && resized.factor == 1.0;
            if is_same && self.coordinates != Coordinates::TfCropAndResize {
                continue;
            }
            let (outer, n, inner) = around(&shape, resized.axis);
            let taps: Vec<_> = (0..resized.to).map(|at| self.taps(at, &resized)).collect();
            let mut out = Vec::with_capacity(outer * taps.len() * inner);
            let mut outside = Vec::with_capacity(out.capacity());
            for o in 0..outer {
                for (taps, is_beyond) in &taps {
                    for i in 0..inner {
                        let at = |place: usize| (o * n + place) * inner + i;
                        out.push(taps.iter().map(|&(place, w)| w * numbers[at(place)]).sum());
                        outside.push(*is_beyond || taps.iter().any(|&(place, _)| is_outside[at(place)]));
                    }
                }
            }
            (numbers, is_outside) = (out, outside);
            shape[resized.axis] = resized.to;
        }
        numbers.iter_mut().zip(is_outside).filter(|(_, is)| *is).for_each(|(x, _)| *x = self.outside);
        if !ty.dtype.is_float() {
            numbers.iter_mut().for_each(|x| *x = x.round_ties_even());
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}
