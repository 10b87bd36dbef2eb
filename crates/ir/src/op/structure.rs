//! Structure of operators, which each operator provides for templates and adapters of other libraries.

use super::{Nest, Packed, Workload};
use crate::program::Program;
use std::sync::Arc;

/// Structure of an operator before its epilogue: sizes, and the names of buffers and loops in its program.
///
/// Templates and adapters of other libraries match on the structure, never on the operator's name.
#[derive(Clone, Debug, PartialEq)]
pub enum Structure {
    /// Matrix product, possibly batched.
    Contraction(Contraction),
    /// Sliding window: a convolution.
    Window(Window),
    /// Matrix product with block-quantized weights.
    Packed(Packed),
    /// Loop nest given as a program.
    Nest(Arc<Nest>),
}

impl Structure {
    /// Builds the untransformed program of a workload of this structure.
    pub(super) fn program(&self, w: &Workload) -> Program {
        match self {
            Structure::Contraction(contraction) => contraction.program(w),
            Structure::Window(window) => window.program(w),
            Structure::Packed(packed) => packed.program(w),
            Structure::Nest(nest) => nest.program().clone(),
        }
    }

    /// Number of floating-point operations of a run: twice the number of multiply-accumulates, including
    /// those with padding and excluding the epilogue. For a loop nest, the operations of all its iterations,
    /// at least one each.
    pub fn flops(&self) -> f64 {
        match self {
            Structure::Contraction(c) => {
                [c.m, c.n, c.k].iter().map(|n| *n as f64).product::<f64>() * 2.0 * c.batch.unwrap_or(1) as f64
            }
            Structure::Packed(p) => [p.m, p.n, p.k].iter().map(|n| *n as f64).product::<f64>() * 2.0,
            // In a transposed convolution, each input element is multiplied with each tap; inserted zeros are
            // not counted.
            Structure::Window(w) => {
                let met = w.axes.iter().map(|a| (if w.transposed { a.input } else { a.output } * a.filter) as f64);
                2.0 * w.n as f64 * w.k as f64 * (w.c / w.groups) as f64 * met.product::<f64>()
            }
            Structure::Nest(nest) => nest.flops(),
        }
    }

    /// Share of these operations whose operand is not padding, which no kernel can skip. For a loop nest, the
    /// share is 0, as none of its operations is known to be necessary.
    pub fn share_inside(&self) -> f64 {
        match self {
            Structure::Contraction(_) | Structure::Packed(_) => 1.0,
            Structure::Window(w) => w.share_inside(),
            // A schedule may compute values shared by iterations once.
            Structure::Nest(_) => 0.0,
        }
    }

    /// Shape of the result.
    pub fn output_shape(&self) -> Vec<i64> {
        match self {
            Structure::Contraction(c) => c.in_order(c.batch, [c.m, c.n]),
            Structure::Packed(p) => vec![p.m, p.n],
            Structure::Window(w) => vec![w.n, w.k, w.axes[0].output, w.axes[1].output],
            Structure::Nest(nest) => nest.output().shape.clone(),
        }
    }

    /// Dimension of the result for channels, and thus for a bias.
    pub fn channel_axis(&self) -> usize {
        match self {
            Structure::Contraction(c) => usize::from(c.batch.is_some()) + 1,
            Structure::Window(_) | Structure::Packed(_) => 1,
            Structure::Nest(nest) => nest.output().shape.len().saturating_sub(1),
        }
    }
}

/// `C[b, m, n] = Σ_k A[b, m, k] · B[b, k, n]`, where each operand may be stored with its last two dimensions
/// transposed.
///
/// The program has the loops [`LOOPS`](Contraction::LOOPS), the first only if there is a batch. With an
/// epilogue, the product is the stage [`ACC`](Contraction::ACC), and the loops
/// [`FINISH`](Contraction::FINISH) compute the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contraction {
    /// Batch size; `None` if the program has no batch loop.
    pub batch: Option<i64>,
    /// Rows of A and C.
    pub m: i64,
    /// Columns of B and C.
    pub n: i64,
    /// Columns of A, rows of B.
    pub k: i64,
    /// Operand A.
    pub a: Factor,
    /// Operand B.
    pub b: Factor,
    /// Name of the result's buffer.
    pub output: &'static str,
    /// Whether C is stored as `[m, b, n]`, the batch interleaved with the rows.
    pub output_beside: bool,
}

/// Operand of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor {
    /// Name of the operand's buffer.
    pub name: &'static str,
    /// Whether the reduction dimension is stored first: A transposed, or B as written.
    pub k_first: bool,
    /// Layout of the batch.
    pub heads: Heads,
}

/// Layout of a batched operand in its buffer, in terms of attention heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heads {
    /// Whether the batch is the second dimension, interleaved with the rows, rather than the first.
    pub beside: bool,
    /// Number of heads in the buffer before those used.
    pub before: i64,
    /// Number of heads in the buffer after those used.
    pub after: i64,
}

impl Factor {
    /// Orders `products` (if there is a batch), the rows or columns, and the reduction as the factor's
    /// dimensions.
    pub(super) fn in_order<T>(&self, products: Option<T>, [outer, k]: [T; 2]) -> Vec<T> {
        let [first, second] = if self.k_first { [k, outer] } else { [outer, k] };
        match products {
            Some(products) if self.heads.beside => vec![first, products, second],
            Some(products) => vec![products, first, second],
            None => vec![first, second],
        }
    }

    /// Creates an operand whose batch dimension, if any, comes first, with no other heads in its buffer.
    pub(super) fn plain(name: &'static str, k_first: bool) -> Factor {
        Factor { name, k_first, heads: Heads::default() }
    }
}

impl Contraction {
    /// Loops of the product: batch, rows, columns, reduction.
    pub const LOOPS: [&'static str; 4] = ["b", "i", "j", "k"];
    /// Loops of the epilogue stage: batch, rows, columns.
    pub const FINISH: [&'static str; 3] = ["ob", "oi", "oj"];
    /// Loop over the columns of one group inside [`FINISH`](Contraction::FINISH), for a gated epilogue; the
    /// loop over columns is then over pairs of groups.
    pub const OF_PAIR: &'static str = "op";
    /// Sizes that may be open (dynamic): rows, columns and reduction.
    pub const OPEN: [&'static str; 3] = ["m", "n", "k"];
    /// Stage of the product, if there is an epilogue.
    pub const ACC: &'static str = "acc";

    /// Whether all buffers are `[batch, rows, columns]` or transposed, without other heads.
    pub fn is_dense(&self) -> bool {
        !self.output_beside && [self.a, self.b].iter().all(|factor| factor.heads == Heads::default())
    }

    /// Orders `products` (if there is a batch), rows and columns as the dimensions of C.
    pub(super) fn in_order<T>(&self, products: Option<T>, [rows, columns]: [T; 2]) -> Vec<T> {
        match products {
            Some(products) if self.output_beside => vec![rows, products, columns],
            Some(products) => vec![products, rows, columns],
            None => vec![rows, columns],
        }
    }

    /// Name of the buffer that accumulates the product: the output, or the stage before the epilogue.
    pub fn sum(&self, w: &Workload) -> &'static str {
        if w.is_plain() { self.output } else { Contraction::ACC }
    }
}

/// Convolution
/// `Y[n, k, p, q] = Σ_{c, r, s} X[n, c, p·stride + r·dilation, q·stride + s·dilation] · W[k, c, r, s]` of
/// padded X, and its variants: grouped, depthwise, transposed.
///
/// With groups, output channels of a group sum over input channels of that group only. A transposed
/// convolution scatters, `Y[n, k, h·stride − before + r·dilation, …] += X[n, c, h, w] · W[c, k, r, s]`, and
/// is computed as an ordinary convolution of X, with zeros inserted and padded, with the flipped filter.
///
/// Stages have the same names in every such operator: [`ACC`](Window::ACC) sums the products of weights and
/// input over `c`, `r` and `s`, reading the stage [`PAD`](Window::PAD) if the input is padded or has a
/// prologue; the last stage applies the epilogue and stores the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Batch size: number of images.
    pub n: i64,
    /// Channels of X.
    pub c: i64,
    /// Channels of Y.
    pub k: i64,
    /// Number of groups of channels, which are convolved separately.
    pub groups: i64,
    /// Whether channels of Y are interleaved across groups (a channel shuffle): channel `j` of group `g` is
    /// `j · groups + g`, rather than `g · k / groups + j`.
    pub interleaved: bool,
    /// Whether each channel of Y reads one channel of X, without a loop over input channels (depthwise).
    pub depthwise: bool,
    /// Whether the convolution is transposed.
    pub transposed: bool,
    /// Geometry along rows and along columns.
    pub axes: [WindowAxis; 2],
    /// Whether integers are padded with their zero point, the input [`ZERO`](Window::ZERO), rather than with
    /// zeros.
    pub zero_point: bool,
    /// Whether the number of rows is open (dynamic); the axes then have the maximum number.
    pub open_rows: bool,
}

/// Spatial axis of a [`Window`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowAxis {
    /// Extent of the input.
    pub input: i64,
    /// Extent of the filter, in taps.
    pub filter: i64,
    /// Stride, of the output if the convolution is transposed, else of the input.
    pub stride: i64,
    /// Dilation, the distance of the filter's taps.
    pub dilation: i64,
    /// Padding before the input, in elements; for a transposed convolution, the elements cropped from the
    /// beginning of the output.
    pub before: i64,
    /// Padding after the input, in elements; for a transposed convolution, the elements cropped from the end
    /// of the output, or negative if the output is extended.
    pub after: i64,
    /// Extent of the output.
    pub output: i64,
}

impl WindowAxis {
    /// Whether the axis has a single element and a filter of a single tap.
    fn is_single(&self) -> bool {
        (self.input, self.filter, self.output) == (1, 1, 1)
    }

    /// Extent of the dilated filter, from the first tap to the last, both included.
    pub fn reach(&self) -> i64 {
        self.dilation * (self.filter - 1) + 1
    }
}

impl Window {
    /// Name of the input.
    pub const INPUT: &'static str = "X";
    /// Name of the weights.
    pub const WEIGHTS: &'static str = "W";
    /// Name of the input's zero point, a buffer of one element.
    pub const ZERO: &'static str = "x_zero";
    /// Name of the stage that pads the input and applies the prologue.
    pub const PAD: &'static str = "pad";
    /// Name of the stage that accumulates the products.
    pub const ACC: &'static str = "acc";
    /// Name of the result.
    pub const OUTPUT: &'static str = "Y";
    /// Name of the input in the layout that the template chooses.
    pub const KEPT_INPUT: &'static str = "X.in";
    /// Name of the result in the layout that the template chooses.
    pub const KEPT_OUTPUT: &'static str = "Y.out";
    /// Size that may be open (dynamic): rows of the input, in steps that are multiples of the stride.
    pub const OPEN: &'static str = "h";

    /// Number of input channels that each output channel reduces over; `None` if there is no loop over them
    /// (depthwise).
    pub fn summed_channels(&self) -> Option<i64> {
        (!self.depthwise).then_some(self.c / self.groups)
    }

    /// Shape of the weights.
    pub fn weights(&self) -> Vec<i64> {
        let [r, s] = self.axes.map(|axis| axis.filter);
        match (self.depthwise, self.transposed) {
            (true, _) => vec![self.k, r, s],
            (false, false) => vec![self.k, self.c / self.groups, r, s],
            (false, true) => vec![self.c, self.k / self.groups, r, s],
        }
    }

    /// Dimensions of the weights for output channels and for reduced input channels; for a depthwise
    /// convolution, only the first is meaningful.
    pub fn weight_axes(&self) -> [usize; 2] {
        if self.transposed { [1, 0] } else { [0, 1] }
    }

    /// Whether the input is read through the stage [`PAD`](Window::PAD).
    pub fn has_pad(&self, w: &Workload) -> bool {
        self.is_padded() || !w.prologue().is_empty()
    }

    pub(super) fn is_padded(&self) -> bool {
        self.transposed || self.axes.iter().any(|axis| (axis.before, axis.after) != (0, 0))
    }

    /// Whether images are single columns of pixels, which can become rows without a change in memory, so that
    /// kernels vectorize along them.
    pub(super) fn is_column(&self) -> bool {
        let [rows, columns] = &self.axes;
        columns.is_single() && !rows.is_single() && !self.open_rows
    }

    /// Axes of the program: those of a pointwise convolution are flattened to a single row of pixels, so that
    /// schedules can split it regardless of row boundaries, unless rows are open (dynamic).
    pub fn program_axes(&self) -> [WindowAxis; 2] {
        let is_pointwise = |axis: &WindowAxis| axis.filter == 1 && axis.stride == 1 && axis.output == axis.input;
        if self.open_rows || self.depthwise || self.is_padded() || !self.axes.iter().all(is_pointwise) {
            return self.axes;
        }
        let row = |n| WindowAxis { input: n, filter: 1, stride: 1, dilation: 1, before: 0, after: 0, output: n };
        [row(1), row(self.axes[0].output * self.axes[1].output)]
    }
}
