//! Deformable convolution: samples of the image at separate coordinates for each element of each window, and
//! a 1×1 convolution of the samples.

use super::draft::{Draft, Port, Row, row};
use crate::error::{invalid, unsupported};
use crate::op::{
    AutoPad, Beyond, Binary, Cast, Concat, Conv, Gather, GridSample, Range, Reshape, SampleMode, Shape, Unary,
    Unsqueeze, Where, WindowAttributes,
};
use crate::{DType, Tensor};

/// ONNX's own operators that are decomposed.
pub const ROWS: &[Row] = &[row("DeformConv", &[19, 22], 3..=5, |node, draft| {
    let window = WindowAttributes::import(node)?;
    if window.kernel.as_ref().is_some_and(|kernel| kernel.len() != 2) {
        return Err(unsupported!("of windows those of two dimensions are supported"));
    }
    let one_each = |given: &Option<Vec<usize>>| given.clone().unwrap_or_else(|| vec![1; 2]);
    let (strides, dilations) = (one_each(&window.strides), one_each(&window.dilations));
    let pads = window.pads.unwrap_or_else(|| vec![0; 4]);
    let (&[stride_y, stride_x], &[dilation_y, dilation_x], &[top, left, ..]) =
        (&strides[..], &dilations[..], &pads[..])
    else {
        return Err(invalid!("its strides, dilations and pads are not two for each of two dimensions"));
    };
    let [groups, offset_groups] = [node.int_or("group", 1)?, node.int_or("offset_group", 1)?];
    if groups < 1 || offset_groups < 1 {
        return Err(invalid!("it has group={groups} and offset_group={offset_groups}"));
    }
    let mut job = Deformed { draft, offset_groups };
    let sides = [
        Side { dim: 2, stride: stride_y, dilation: dilation_y, pad: top },
        Side { dim: 3, stride: stride_x, dilation: dilation_x, pad: left },
    ];
    let mut columns = job.sampled(sides);
    if node.has_input(4) {
        columns = job.masked(columns);
    }
    Ok(vec![job.convolved(columns, groups as usize, node.has_input(3))])
})];

const IMAGE: Port = Port::Input(0);
const WEIGHTS: Port = Port::Input(1);
const OFFSETS: Port = Port::Input(2);
const BIAS: Port = Port::Input(3);
const MASK: Port = Port::Input(4);

/// Windows along one dimension.
#[derive(Clone, Copy)]
struct Side {
    /// Dimension of the image and of the weights.
    dim: i64,
    stride: usize,
    dilation: usize,
    pad: i64,
}

/// Decomposition of a deformable convolution.
struct Deformed<'a> {
    draft: &'a mut Draft,
    /// Number of groups of channels with offsets of their own.
    offset_groups: i64,
}

impl Deformed<'_> {
    fn numbers(&mut self, numbers: &[i64]) -> Port {
        self.draft.constant(Tensor::vector(numbers))
    }

    /// Adds the sizes of a range of a tensor's dimensions.
    fn sizes(&mut self, of: Port, start: i64, end: i64) -> Port {
        self.draft.op(Shape { start, end: Some(end) }, &[of])
    }

    fn reshaped(&mut self, x: Port, sizes: &[Port]) -> Port {
        let shape = self.draft.op(Concat { axis: 0 }, sizes);
        self.draft.op(Reshape { shape: None, allow_zero: false }, &[x, shape])
    }

    /// Adds the product of the numbers of images and of offset groups.
    fn n_parts(&mut self) -> Port {
        let (n, groups) = (self.sizes(OFFSETS, 0, 1), self.numbers(&[self.offset_groups]));
        self.draft.op(Binary::Mul, &[n, groups])
    }

    /// Adds the numbers `0, step, …`, one for each position of a dimension, of the type of the offsets,
    /// followed by dimensions of size 1.
    fn steps(&mut self, (of, dim): (Port, i64), step: usize, n_behind: usize) -> Port {
        let n = self.sizes(of, dim, dim + 1);
        let [zero, one, step] =
            [0, 1, step as i128].map(|x| self.draft.constant(Tensor::from_integers(DType::I64, [], &[x])));
        let scalar = self.numbers(&[]);
        let n = self.draft.op(Reshape { shape: None, allow_zero: false }, &[n, scalar]);
        let all = self.draft.op(Range, &[zero, n, one]);
        let all = self.draft.op(Binary::Mul, &[all, step]);
        let shape = self.numbers(&[&[-1][..], &vec![1; n_behind]].concat());
        let all = self.draft.op(Reshape { shape: None, allow_zero: false }, &[all, shape]);
        self.draft.op(Cast { to: None }, &[all, OFFSETS])
    }

    fn number(&mut self, x: f64) -> Port {
        let x = self.draft.constant(Tensor::scalar(DType::F64, x));
        self.draft.op(Cast { to: None }, &[x, OFFSETS])
    }

    /// Adds coordinates along one dimension, from -1 to 1 over the image, `[parts, rows and columns of a
    /// window, rows and columns of the output, 1]`; in `offsets`, the dimension that holds both directions'
    /// offsets follows the window's.
    fn coordinates(&mut self, offsets: Port, side: Side) -> Port {
        let Side { dim, stride, dilation, pad } = side;
        // Columns vary along the last dimension, rows along the last but one.
        let n_behind = 3 - dim as usize;
        let inside = self.steps((WEIGHTS, dim), dilation, 2 + n_behind);
        let outside = self.steps((OFFSETS, dim), stride, n_behind);
        let which = self.draft.constant(Tensor::from_integers(DType::I64, [], &[(dim - 2).into()]));
        let offset = self.draft.op(Gather { axis: 3 }, &[offsets, which]);
        let begin = self.number(-pad as f64);
        let place = self.draft.op(Binary::Add, &[inside, outside]);
        let place = self.draft.op(Binary::Add, &[place, begin]);
        let place = self.draft.op(Binary::Add, &[offset, place]);
        let size = self.sizes(IMAGE, dim, dim + 1);
        let size = self.draft.op(Cast { to: None }, &[size, OFFSETS]);
        let (two, one) = (self.number(2.0), self.number(1.0));
        let twice = self.draft.op(Binary::Mul, &[place, two]);
        let odd = self.draft.op(Binary::Add, &[twice, one]);
        let part = self.draft.op(Binary::Div, &[odd, size]);
        let centred = self.draft.op(Binary::Sub, &[part, one]);
        let axis = self.numbers(&[-1]);
        self.draft.op(Unsqueeze { axes: None }, &[centred, axis])
    }

    /// Adds samples for all windows, `[parts, channels of a part, elements of a window · rows, columns]`.
    fn sampled(&mut self, [y, x]: [Side; 2]) -> Port {
        let (parts, window, out) = (self.n_parts(), self.sizes(WEIGHTS, 2, 4), self.sizes(OFFSETS, 2, 4));
        let two = self.numbers(&[2]);
        let offsets = self.reshaped(OFFSETS, &[parts, window, two, out]);
        // The first coordinate belongs to the last dimension.
        let coordinates = [self.coordinates(offsets, x), self.coordinates(offsets, y)];
        let grid = self.draft.op(Concat { axis: -1 }, &coordinates);
        let (rest, columns) = (self.numbers(&[-1]), self.sizes(OFFSETS, 3, 4));
        let grid = self.reshaped(grid, &[parts, rest, columns, two]);
        let (channels, groups) = (self.sizes(IMAGE, 1, 2), self.numbers(&[self.offset_groups]));
        let channels = self.draft.op(Binary::Div, &[channels, groups]);
        let image = self.sizes(IMAGE, 2, 4);
        let image = self.reshaped(IMAGE, &[parts, channels, image]);
        let sample = GridSample { mode: SampleMode::Linear, beyond: Beyond::Zeros, aligns_corners: false };
        let samples = self.draft.op(sample, &[image, grid]);
        // GridSample treats a NaN coordinate as outside the image; here it must give NaN.
        let [in_columns, in_rows] = coordinates.map(|places| self.draft.op(Unary::IsNan, &[places]));
        let lacks = self.draft.op(Binary::Or, &[in_columns, in_rows]);
        let one = self.numbers(&[1]);
        let lacks = self.reshaped(lacks, &[parts, one, rest, columns]);
        let nan = self.number(f64::NAN);
        self.draft.op(Where, &[lacks, nan, samples])
    }

    /// Multiplies samples by the mask.
    fn masked(&mut self, samples: Port) -> Port {
        let (parts, one, rest) = (self.n_parts(), self.numbers(&[1]), self.numbers(&[-1]));
        let columns = self.sizes(OFFSETS, 3, 4);
        let mask = self.reshaped(MASK, &[parts, one, rest, columns]);
        self.draft.op(Binary::Mul, &[samples, mask])
    }

    /// Adds the products of each window's samples and the weights.
    fn convolved(&mut self, samples: Port, groups: usize, has_bias: bool) -> Port {
        let (n, rest, out) = (self.sizes(IMAGE, 0, 1), self.numbers(&[-1]), self.sizes(OFFSETS, 2, 4));
        let columns = self.reshaped(samples, &[n, rest, out]);
        let (channels, ones) = (self.sizes(WEIGHTS, 0, 1), self.numbers(&[1, 1]));
        let weights = self.reshaped(WEIGHTS, &[channels, rest, ones]);
        let mut inputs = vec![columns, weights];
        inputs.extend(has_bias.then_some(BIAS));
        let window = WindowAttributes {
            kernel: None,
            strides: None,
            dilations: None,
            pads: None,
            auto_pad: AutoPad::Given,
            ceil: false,
        };
        self.draft.op(Conv { window, groups: Some(groups) }, &inputs)
    }
}
