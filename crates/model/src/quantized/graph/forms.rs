//! Integer convolutions over one or three dimensions as two-dimensional ones.

use tilewright_graph::op::{AutoPad, Concat, Conv, ConvShape, Expand, Gather, Reshape, Transpose, WindowAttributes};
use tilewright_graph::{Place, Tensor, ValueId};

use super::Quantizer;

/// Dimensionality of a convolution, with what is needed to make it two-dimensional.
pub enum ConvolutionForm {
    /// Two-dimensional convolution, or a product.
    Rows,
    /// Convolution over one dimension: an image of a single row.
    Line,
    /// Three-dimensional convolution: planes whose channels include those of all planes in their windows.
    Volume(Box<ConvShape>),
}

impl ConvolutionForm {
    /// Whether the convolution is two-dimensional already.
    pub fn is_rows(&self) -> bool {
        matches!(self, ConvolutionForm::Rows)
    }

    /// Form of a convolution of these sizes; `None` if it has more dimensions, or three and groups.
    pub fn of(found: &ConvShape) -> Option<ConvolutionForm> {
        match found.image.len() {
            1 => Some(ConvolutionForm::Line),
            2 => Some(ConvolutionForm::Rows),
            3 if found.groups == 1 && found.geometry.begins[0] >= 0 => {
                Some(ConvolutionForm::Volume(Box::new(found.clone())))
            }
            _ => None,
        }
    }

    /// Two-dimensional convolution, with the shape of its image; `conv` is the original one, with the sizes
    /// `found`.
    pub fn over_rows(&self, conv: &Conv, found: &ConvShape) -> (Conv, Vec<usize>) {
        let geometry = &found.geometry;
        let image = [&[found.n, found.c], &found.image[..]].concat();
        let (image, skipped, row) = match self {
            ConvolutionForm::Rows => return (conv.clone(), image),
            ConvolutionForm::Line => (with_row(&image), 0, Some(1)),
            ConvolutionForm::Volume(_) => {
                let channels = [found.n * geometry.out[0], found.c * geometry.kernel[0]];
                ([&channels[..], &found.image[1..]].concat(), 1, None)
            }
        };
        let two = |sizes: &[usize]| Some(row.into_iter().chain(sizes[skipped..].iter().copied()).collect());
        let borders = |sizes: &[i64]| row.map(|_| 0).into_iter().chain(sizes[skipped..].to_vec()).collect::<Vec<i64>>();
        let window = WindowAttributes {
            kernel: two(&geometry.kernel),
            strides: two(&geometry.strides),
            dilations: two(&geometry.dilations),
            pads: Some([borders(&geometry.begins), borders(&geometry.ends)].concat()),
            auto_pad: AutoPad::Given,
            ceil: false,
        };
        (Conv { window, groups: Some(found.groups) }, image)
    }

    /// Shape of filters `[outputs, inputs, …]` in two dimensions, and the index in the original of each of
    /// their elements.
    pub fn filters(&self, shape: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let n = shape.iter().product::<usize>();
        match self {
            ConvolutionForm::Rows => (shape.to_vec(), (0..n).collect()),
            ConvolutionForm::Line => (with_row(shape), (0..n).collect()),
            ConvolutionForm::Volume(_) => {
                let (c, depth, area) = (shape[1], shape[2], shape[3] * shape[4]);
                let place = |at: usize| {
                    let (tap, channel) = (at / area / c % depth, at / area % c);
                    ((at / area / c / depth * c + channel) * depth + tap) * area + at % area
                };
                (vec![shape[0], c * depth, shape[3], shape[4]], (0..n).map(place).collect())
            }
        }
    }
}

/// Inserts a dimension of size 1 after the channels.
fn with_row(shape: &[usize]) -> Vec<usize> {
    [&shape[..2], &[1], &shape[2..]].concat()
}

impl Quantizer<'_> {
    /// Image in the form that the two-dimensional convolution reads, padded along the depth with `zero`.
    pub fn read_as(
        &mut self,
        form: &ConvolutionForm,
        name: &str,
        place: &Place,
        x: ValueId,
        zero: Option<ValueId>,
    ) -> Option<ValueId> {
        match form {
            ConvolutionForm::Rows => Some(x),
            ConvolutionForm::Line => {
                let shape = with_row(&self.shape(x));
                self.reshaped(format!("{name}.row"), place, x, &shape)
            }
            ConvolutionForm::Volume(found) => self.planes(found, name, place, x, zero),
        }
    }

    /// Gathers the planes that windows of a volume see, `[images · planes, taps · channels, rows, columns]`.
    fn planes(
        &mut self,
        found: &ConvShape,
        name: &str,
        place: &Place,
        x: ValueId,
        zero: Option<ValueId>,
    ) -> Option<ValueId> {
        let geometry = &found.geometry;
        let (n_taps, stride, dilation, planes) =
            (geometry.kernel[0], geometry.strides[0], geometry.dilations[0], geometry.out[0]);
        let before = geometry.begins[0] as usize;
        let behind = ((planes - 1) * stride + (n_taps - 1) * dilation + 1).saturating_sub(before + found.image[0]);
        let mut parts = Vec::new();
        for (what, n) in [("before", before), ("", 0), ("behind", behind)] {
            if what.is_empty() {
                parts.push(Some(x));
            } else if n > 0 {
                let shape = [&[found.n, found.c, n], &found.image[1..]].concat();
                let zero = match zero {
                    Some(zero) => zero,
                    None => {
                        let zero = Tensor::from_integers(self.new.ty(x).dtype, vec![], &[0]);
                        self.add_constant(format!("{name}.nothing"), zero)
                    }
                };
                let sizes = self.sizes(format!("{name}.{what}.shape"), &shape);
                parts.push(Some(self.step(format!("{name}.{what}"), Expand, place, vec![Some(zero), Some(sizes)])?));
            }
        }
        let padded = match parts.len() {
            1 => x,
            _ => self.step(format!("{name}.padded"), Concat { axis: 2 }, place, parts)?,
        };
        let order = Transpose { order: Some(vec![0, 2, 1, 3, 4]) };
        let by_plane = self.step(format!("{name}.planes"), order, place, vec![Some(padded)])?;
        let seen: Vec<i64> =
            (0..planes * n_taps).map(|at| (at / n_taps * stride + at % n_taps * dilation) as i64).collect();
        let seen = Tensor::vector(&seen).reshaped(vec![planes, n_taps]);
        let seen = self.add_constant(format!("{name}.places"), seen);
        let taps = self.step(format!("{name}.taps"), Gather { axis: 1 }, place, vec![Some(by_plane), Some(seen)])?;
        let shape = [&[found.n * planes, n_taps * found.c], &found.image[1..]].concat();
        self.reshaped(format!("{name}.seen"), place, taps, &shape)
    }

    /// Result of the two-dimensional convolution in the shape of the original one.
    pub fn written_from(&mut self, form: &ConvolutionForm, name: String, place: &Place, y: ValueId) -> Option<ValueId> {
        let mut shape = self.shape(y);
        match form {
            ConvolutionForm::Rows => Some(y),
            ConvolutionForm::Line => {
                shape.remove(2);
                self.reshaped(name, place, y, &shape)
            }
            ConvolutionForm::Volume(found) => {
                let by_plane = [&[found.n, found.geometry.out[0]], &shape[1..]].concat();
                let by_plane = self.reshaped(format!("{name}.planes"), place, y, &by_plane)?;
                let order = Transpose { order: Some(vec![0, 2, 1, 3, 4]) };
                self.step(name, order, place, vec![Some(by_plane)])
            }
        }
    }

    fn sizes(&mut self, name: String, shape: &[usize]) -> ValueId {
        let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        self.add_constant(name, Tensor::vector(&sizes))
    }

    fn reshaped(&mut self, name: String, place: &Place, x: ValueId, shape: &[usize]) -> Option<ValueId> {
        let sizes = self.sizes(format!("{name}.shape"), shape);
        self.step(name, Reshape { shape: None, allow_zero: false }, place, vec![Some(x), Some(sizes)])
    }
}
