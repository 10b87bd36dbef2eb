//! Sampling of images at coordinates.

use super::util::{larger, product, size, strides};
use super::window::advance;
use super::{Inputs, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{OpError, Tensor, TensorType};

/// Interpolation method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SampleMode {
    Nearest,
    Linear,
    Cubic,
}

/// Policy for coordinates outside the image (`padding_mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Beyond {
    Zeros,
    Border,
    Reflection,
}

/// Samples of an image `[n, c, …]`, input 0, at the coordinates of input 1, `[n, …, dimensions]`, which range
/// from -1 to 1 over the image.
#[derive(Debug, Clone, Copy)]
pub struct GridSample {
    /// Interpolation method.
    pub mode: SampleMode,
    /// Policy for coordinates outside the image.
    pub beyond: Beyond,
    /// Whether -1 and 1 are the centres of the outermost pixels, rather than their outer edges.
    pub aligns_corners: bool,
}

/// Sampling grid for [`GridSample`] from affine matrices, input 0, for an image of the size in input 1.
#[derive(Debug, Clone, Copy)]
pub struct AffineGrid {
    /// Whether -1 and 1 are the centres of the outermost pixels, rather than their outer edges.
    pub aligns_corners: bool,
}

/// Pooling of regions of interest to a fixed size. Inputs: image `[n, c, h, w]`, regions `[r, 4]`, and the
/// batch index of each region `[r]`.
#[derive(Debug, Clone, Copy)]
pub struct RoiAlign {
    /// Whether the maximum of the samples is taken, rather than their mean.
    pub is_max: bool,
    /// Whether coordinates are shifted by half a pixel (`half_pixel`).
    pub is_half_pixel: bool,
    /// Height and width of the output.
    pub out: [usize; 2],
    /// Samples per output pixel in each direction; 0 derives the number from the region's size.
    pub n_samples: usize,
    /// Factor from a region's coordinates to the image's (`spatial_scale`).
    pub scale: f64,
}

pub(super) const ROWS: &[Operator] =
    &[
        row("GridSample", &[16, 20, 22], 2..=2, |node| {
            let known = [
                ("linear", SampleMode::Linear),
                ("bilinear", SampleMode::Linear),
                ("nearest", SampleMode::Nearest),
                ("cubic", SampleMode::Cubic),
                ("bicubic", SampleMode::Cubic),
            ];
            let mode = node.one_of("mode", "linear", &known)?;
            let known = [("zeros", Beyond::Zeros), ("border", Beyond::Border), ("reflection", Beyond::Reflection)];
            let beyond = node.one_of("padding_mode", "zeros", &known)?;
            Ok(GridSample { mode, beyond, aligns_corners: node.flag("align_corners", false)? }.into())
        }),
        row("AffineGrid", &[20], 2..=2, |node| {
            Ok(AffineGrid { aligns_corners: node.flag("align_corners", false)? }.into())
        }),
        row("RoiAlign", &[10, 16, 22], 3..=3, |node| {
            let is_max = node.one_of("mode", "avg", &[("avg", false), ("max", true)])?;
            let is_half_pixel = node.version >= 16
                && node.one_of(
                    "coordinate_transformation_mode",
                    "half_pixel",
                    &[("half_pixel", true), ("output_half_pixel", false)],
                )?;
            let out = [size(node.int_or("output_height", 1)?)?, size(node.int_or("output_width", 1)?)?];
            let n_samples = size(node.int_or("sampling_ratio", 0)?)?;
            Ok(RoiAlign { is_max, is_half_pixel, out, n_samples, scale: node.float_or("spatial_scale", 1.0)? }.into())
        }),
    ];

impl GridSample {
    /// Converts a coordinate to a position among `n` pixels.
    fn place(&self, x: f64, n: f64) -> f64 {
        if self.aligns_corners { (x + 1.0) / 2.0 * (n - 1.0) } else { ((x + 1.0) * n - 1.0) / 2.0 }
    }

    /// Maps a position into the image, for modes in which positions outside take values of the image.
    fn inside(&self, x: f64, n: f64) -> f64 {
        let (low, high) = if self.aligns_corners { (0.0, n - 1.0) } else { (-0.5, n - 0.5) };
        match self.beyond {
            Beyond::Zeros => x,
            Beyond::Border => x.clamp(0.0, (n - 1.0).max(0.0)),
            Beyond::Reflection => {
                let span = high - low;
                if span <= 0.0 {
                    return low;
                }
                let at = (x - low).rem_euclid(2.0 * span);
                low + if at > span { 2.0 * span - at } else { at }
            }
        }
    }

    /// Pixels along one dimension, each with its weight; `None` for a pixel outside the image.
    fn taps(&self, coordinate: f64, n: usize) -> Vec<(Option<usize>, f64)> {
        let size = n as f64;
        let x = self.place(coordinate, size);
        let x = if self.mode == SampleMode::Cubic { x } else { self.inside(x, size) };
        let pixel = |at: f64| {
            let at = self.inside(at, size);
            let at = if self.beyond == Beyond::Zeros { at } else { at.round().clamp(0.0, size - 1.0) };
            (0.0..size).contains(&at).then_some(at as usize)
        };
        match self.mode {
            SampleMode::Nearest => vec![(pixel(x.round_ties_even()), 1.0)],
            SampleMode::Linear => {
                let first = x.floor();
                vec![(pixel(first), 1.0 - (x - first)), (pixel(first + 1.0), x - first)]
            }
            SampleMode::Cubic => {
                let (first, a) = (x.floor(), -0.75);
                let near = |d: f64| ((a + 2.0) * d - (a + 3.0)) * d * d + 1.0;
                let far = |d: f64| ((a * d - 5.0 * a) * d + 8.0 * a) * d - 4.0 * a;
                let t = x - first;
                let weights = [far(t + 1.0), near(t), near(1.0 - t), far(2.0 - t)];
                (0..4).map(|k| (pixel(first - 1.0 + k as f64), weights[k])).collect()
            }
        }
    }
}

impl Operation for GridSample {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (ty, grid) = (inputs.ty(0)?, inputs.shape(1)?);
        let rank = ty.shape.len().saturating_sub(2);
        let fits = rank > 0 && grid.len() == rank + 2 && grid[0] == ty.shape[0] && grid[rank + 1] == rank;
        if !fits || ty.shape[2..].contains(&0) {
            return Err(invalid!("coordinates of shape {grid:?} do not fit {ty}"));
        }
        Ok(vec![TensorType::new(ty.dtype, [&ty.shape[..2], &grid[1..=rank]].concat())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (x, grid) = (inputs.tensor(0)?, inputs.tensor(1)?.floats());
        let numbers = x.floats();
        let image = &x.shape()[2..];
        let (rank, c, area) = (image.len(), x.shape()[1], product(image));
        let own = strides(image);
        let places = product(&ty.shape[2..]);
        let mut out = vec![0.0; ty.n_elements()];
        for n in 0..x.shape()[0] {
            for place in 0..places {
                // The last coordinate belongs to the first dimension.
                let at = (n * places + place) * rank;
                let taps: Vec<_> = (0..rank).map(|d| self.taps(grid[at + rank - 1 - d], image[d])).collect();
                let lengths: Vec<usize> = taps.iter().map(Vec::len).collect();
                let mut index = vec![0; rank];
                loop {
                    let tap = (0..rank).try_fold((0, 1.0), |(place, weight), d| {
                        let (at, w) = taps[d][index[d]];
                        Some((place + at? * own[d], weight * w))
                    });
                    if let Some((from, weight)) = tap {
                        for channel in 0..c {
                            let image = (n * c + channel) * area;
                            out[(n * c + channel) * places + place] += weight * numbers[image + from];
                        }
                    }
                    if !advance(&mut index, &lengths) {
                        break;
                    }
                }
            }
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}

impl Operation for AffineGrid {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let wanted: Vec<usize> = inputs.tensor(1)?.i64s().into_iter().map(size).collect::<Result<_, _>>()?;
        let rank = wanted.len().saturating_sub(2);
        if rank == 0 || ty.shape != [wanted[0], rank, rank + 1] {
            return Err(invalid!("maps {ty} do not fit a size {wanted:?}"));
        }
        Ok(vec![TensorType::new(ty.dtype, [&wanted[..1], &wanted[2..], &[rank]].concat())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let maps = inputs.tensor(0)?.floats();
        let rank = ty.shape.len() - 2;
        let image = &ty.shape[1..=rank];
        let mut out = Vec::with_capacity(ty.n_elements());
        for map in maps.chunks(rank * (rank + 1)) {
            for place in 0..product(image) {
                // The first coordinate belongs to the last dimension.
                let mut rest = place;
                let coordinates: Vec<f64> = (0..rank)
                    .rev()
                    .map(|d| {
                        let (at, n) = ((rest % image[d]) as f64, image[d] as f64);
                        rest /= image[d];
                        if self.aligns_corners { -1.0 + 2.0 * at / (n - 1.0) } else { -1.0 + (2.0 * at + 1.0) / n }
                    })
                    .collect();
                out.extend(
                    map.chunks(rank + 1)
                        .map(|row| row[..rank].iter().zip(&coordinates).map(|(a, x)| a * x).sum::<f64>() + row[rank]),
                );
            }
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}

impl Operation for RoiAlign {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        match (&ty.shape[..], inputs.shape(1)?, inputs.shape(2)?) {
            (&[_, c, h, w], &[n, 4], &[m]) if n == m && h * w > 0 => {
                Ok(vec![TensorType::new(ty.dtype, [n, c, self.out[0], self.out[1]])])
            }
            _ => Err(invalid!("regions of shape {:?} do not fit {ty}", inputs.shape(1)?)),
        }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let &[n, c, height, width] = x.shape() else { unreachable!("four dimensions") };
        let (numbers, regions, images) = (x.floats(), inputs.tensor(1)?.floats(), inputs.tensor(2)?.i64s());
        let offset = if self.is_half_pixel { 0.5 } else { 0.0 };
        let mut out = Vec::with_capacity(ty.n_elements());
        for (region, &image) in regions.chunks(4).zip(&images) {
            let image = usize::try_from(image).ok().filter(|&image| image < n);
            let image = image.ok_or_else(|| invalid!("a region names an image that does not exist"))?;
            let [left, top, right, bottom] = [0, 1, 2, 3].map(|i| region[i] * self.scale - offset);
            let least = if self.is_half_pixel { 0.0 } else { 1.0 };
            let bins = [(bottom - top).max(least) / self.out[0] as f64, (right - left).max(least) / self.out[1] as f64];
            let counts = bins.map(|bin| if self.n_samples > 0 { self.n_samples } else { bin.ceil().max(0.0) as usize });
            if counts[0].saturating_mul(counts[1]) > 1 << 24 {
                return Err(unsupported!("a region of {:?} samples is not supported", counts));
            }
            for channel in 0..c {
                let pixels = &numbers[(image * c + channel) * height * width..][..height * width];
                for row in 0..self.out[0] {
                    for column in 0..self.out[1] {
                        let (mut sum, mut largest) = (0.0, f64::NEG_INFINITY);
                        for i in 0..counts[0] {
                            for j in 0..counts[1] {
                                let y = top + (row as f64 + (i as f64 + 0.5) / counts[0] as f64) * bins[0];
                                let x = left + (column as f64 + (j as f64 + 0.5) / counts[1] as f64) * bins[1];
                                let taps = corners(y, x, height, width);
                                sum += taps.iter().map(|&(at, w)| pixels[at] * w).sum::<f64>();
                                let best = taps.iter().map(|&(at, w)| pixels[at] * w).fold(f64::NEG_INFINITY, larger);
                                largest = larger(largest, best);
                            }
                        }
                        let n_samples = (counts[0] * counts[1]).max(1) as f64;
                        out.push(if self.is_max { largest } else { sum / n_samples });
                    }
                }
            }
        }
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &out)])
    }
}

/// Four pixels around a position, with their weights.
fn corners(y: f64, x: f64, height: usize, width: usize) -> [(usize, f64); 4] {
    if y < -1.0 || y > height as f64 || x < -1.0 || x > width as f64 {
        return [(0, 0.0); 4];
    }
    let split = |x: f64, n: usize| {
        let x = x.max(0.0);
        let low = (x as usize).min(n - 1);
        let part = if low == n - 1 { 0.0 } else { x - low as f64 };
        (low, (low + 1).min(n - 1), part)
    };
    let ((top, bottom, v), (left, right, h)) = (split(y, height), split(x, width));
    [
        (top * width + left, (1.0 - v) * (1.0 - h)),
        (top * width + right, (1.0 - v) * h),
        (bottom * width + left, v * (1.0 - h)),
        (bottom * width + right, v * h),
    ]
}
