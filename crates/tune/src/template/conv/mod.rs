//! Templates of convolutions: one that selects among the algorithms, and one for each algorithm.

mod col2im;
mod direct;
mod im2col;
mod paper;
mod winograd;

use super::algorithm::{self, Algorithm};
use super::share::ShareableWork;
use super::{Template, TemplateSetting, ceil_div};
use tilewright_ir::gcd;
use tilewright_ir::op::{Layout, SizeRange, Structure, Window, WindowAxis, Workload};

pub use paper::CONV_4_4_4_2_2_2;

/// Whether the stages of a workload are those of a convolution.
fn is_convolution(w: &Workload) -> bool {
    matches!(w.structure(), Structure::Window(_))
}

/// Smallest share of the operator's multiplications that any algorithm performs.
pub fn least_share(w: &Workload) -> f64 {
    if is_convolution(w) && ReductionSizes::of(w).has_winograd { winograd::least_share() } else { 1.0 }
}

/// Whether a setting is a convolution on a CPU.
fn is_convolution_on_cpu(s: &TemplateSetting) -> bool {
    s.target.gpu.is_none() && is_convolution(&s.workload)
}

/// All convolution algorithms that apply, as a choice of the search.
pub const CONV: Template = Template {
    name: "conv",
    text: "direct convolution, im2col, Winograd's algorithm or col2im, whichever is faster",
    serves: |s| is_convolution_on_cpu(s),
    space: |s| algorithm::space("conv", s, &ReductionSizes::of(&s.workload), ALGORITHMS),
    steps: |s, space, config| algorithm::steps(s, &ReductionSizes::of(&s.workload), ALGORITHMS, space, config),
    estimate: Some(|s, space, config| {
        algorithm::estimate(s, &ReductionSizes::of(&s.workload), ALGORITHMS, space, config)
    }),
};

/// Direct convolution.
pub const CONV_DIRECT: Template = Template {
    name: "conv-direct",
    text: "direct convolution: register tile of channels and pixels, channels or pixels as lanes, blocked layouts",
    serves: |s| is_convolution_on_cpu(s),
    space: |s| algorithm::space("conv-direct", s, &ReductionSizes::of(&s.workload), &[direct::DIRECT]),
    steps: |s, space, config| (direct::DIRECT.steps)(s, &ReductionSizes::of(&s.workload), space, config),
    estimate: Some(|s, space, config| (direct::DIRECT.estimate)(s, &ReductionSizes::of(&s.workload), space, config)),
};

/// Winograd's algorithm.
pub const CONV_WINOGRAD: Template = Template {
    name: "conv-winograd",
    text: "Winograd's F(2x2, 3x3) and F(4x4, 3x3): transforms and products of a block of tile rows",
    serves: |s| is_convolution_on_cpu(s) && ReductionSizes::of(&s.workload).has_winograd,
    space: |s| algorithm::space("conv-winograd", s, &ReductionSizes::of(&s.workload), &[winograd::WINOGRAD]),
    steps: |s, space, config| (winograd::WINOGRAD.steps)(s, &ReductionSizes::of(&s.workload), space, config),
    estimate: Some(|s, space, config| {
        (winograd::WINOGRAD.estimate)(s, &ReductionSizes::of(&s.workload), space, config)
    }),
};

/// Matrix product of weights and patches (im2col).
pub const CONV_IM2COL: Template = Template {
    name: "conv-im2col",
    text: "im2col and a matrix product: patches all at once or by blocks, register tile of channels and pixels",
    serves: |s| is_convolution_on_cpu(s) && (im2col::IM2COL.applies)(&ReductionSizes::of(&s.workload)),
    space: |s| algorithm::space("conv-im2col", s, &ReductionSizes::of(&s.workload), &[im2col::IM2COL]),
    steps: |s, space, config| (im2col::IM2COL.steps)(s, &ReductionSizes::of(&s.workload), space, config),
    estimate: Some(|s, space, config| (im2col::IM2COL.estimate)(s, &ReductionSizes::of(&s.workload), space, config)),
};

/// Matrix product followed by col2im, for a transposed convolution.
pub const CONV_COL2IM: Template = Template {
    name: "conv-col2im",
    text: "transposed convolution without inserted zeros: product of weights and input, then col2im row by row",
    serves: |s| is_convolution_on_cpu(s) && (col2im::COL2IM.applies)(&ReductionSizes::of(&s.workload)),
    space: |s| algorithm::space("conv-col2im", s, &ReductionSizes::of(&s.workload), &[col2im::COL2IM]),
    steps: |s, space, config| (col2im::COL2IM.steps)(s, &ReductionSizes::of(&s.workload), space, config),
    estimate: Some(|s, space, config| (col2im::COL2IM.estimate)(s, &ReductionSizes::of(&s.workload), space, config)),
};

/// All algorithms.
const ALGORITHMS: &[Algorithm<ReductionSizes>] = &[direct::DIRECT, im2col::IM2COL, winograd::WINOGRAD, col2im::COL2IM];

/// Sizes of a convolution's reduction, taken from its program.
struct ReductionSizes {
    n: i64,
    k: i64,
    p: i64,
    q: i64,
    /// Input channels that one output sums over; `None` in a depthwise convolution.
    c: Option<i64>,
    /// Rows and columns of a filter.
    r: i64,
    s: i64,
    /// Elements from one output to the next, along rows and columns.
    stride: [i64; 2],
    /// Whether the input is read through a stage that pads it or applies a prologue.
    padded: bool,
    /// Whether the padding is a zero point, which contributes to sums, instead of zeros.
    zero_point: bool,
    /// Whether there is a prologue, which should not be repeated for every product of an element.
    has_prologue: bool,
    /// Whether elements are 8-bit integers.
    has_integers: bool,
    /// Whether operands are rounded before they are multiplied, as their copies are.
    rounds: bool,
    /// Number of output channels that read the same input channels.
    k_group: i64,
    /// Number of input channels.
    channels: i64,
    /// Whether output channels of different groups alternate.
    interleaved: bool,
    /// Whether the convolution is transposed.
    transposed: bool,
    /// Common divisor of all possible numbers of rows of the result, if the number is dynamic.
    open_rows: Option<i64>,
    /// Dimensions of the weights: that of output channels and that of the channels summed over.
    weight_axes: [usize; 2],
    /// Rows and columns, as the operator has them.
    axes: [WindowAxis; 2],
    /// Whether Winograd's algorithm applies, 3×3, stride 1, no dilation, no groups, and its
    /// rounding is accepted.
    has_winograd: bool,
    /// Whether neighbours in a network determine the layout of the channels of input or result.
    is_agreed: bool,
    /// Whether the input is read with zeros inserted, as in a transposed convolution of a stride above 1, and
    /// some result meets some tap.
    inserts_zeros: bool,
}

impl ReductionSizes {
    fn of(w: &Workload) -> ReductionSizes {
        let Structure::Window(window) = w.structure() else { panic!("{w} is no convolution") };
        let Window { n, k, groups, interleaved, depthwise, transposed, axes, zero_point, open_rows, .. } = window;
        let [p, q] = window.program_axes().map(|axis| axis.output);
        let [r, s] = axes.map(|axis| axis.filter);
        let open_rows = open_rows.then(|| common_rows(w.range(Window::OPEN), &axes[0], transposed));
        ReductionSizes {
            n,
            k,
            p,
            q,
            c: window.summed_channels(),
            r,
            s,
            stride: if transposed { [1, 1] } else { axes.map(|axis| axis.stride) },
            padded: window.has_pad(w),
            zero_point,
            has_prologue: !w.prologue().is_empty(),
            has_integers: w.has_integer_factors(),
            rounds: w.takes_bf16(),
            // All channels of a depthwise convolution are cut the same way.
            k_group: if depthwise { k } else { k / groups },
            channels: window.c,
            interleaved: interleaved && groups > 1,
            inserts_zeros: transposed && axes.iter().any(|axis| axis.stride > 1) && axes.iter().all(meets_taps),
            weight_axes: window.weight_axes(),
            axes,
            // The Winograd step requires an image of four dimensions, as the padded one has.
            has_winograd: open_rows.is_none_or(|rows| rows % winograd::SMALLEST_TILE == 0)
                && !w.exact
                && w.has_winograd()
                && (w.layout().channels()[0] == 1 || window.has_pad(w)),
            is_agreed: matches!(w.layout(), Layout::Channels { .. }),
            transposed,
            open_rows,
        }
    }

    /// Work that threads may share.
    fn work(&self) -> ShareableWork {
        let ReductionSizes { n, k, p, q, c, r, s, k_group, .. } = *self;
        ShareableWork {
            results: n * (k / k_group),
            rows: k_group,
            columns: p * q,
            sum: c.unwrap_or(1) * r * s,
            has_whole_sums: false,
        }
    }
}

/// Common divisor of the numbers of rows of the result for all numbers of input rows in a range.
fn common_rows(range: SizeRange, rows: &WindowAxis, transposed: bool) -> i64 {
    let (of_step, of_least) = match transposed {
        true => (range.step * rows.stride, rows.output - (range.most - range.least) * rows.stride),
        false => (range.step / rows.stride, rows.output - (range.most - range.least) / rows.stride),
    };
    gcd(of_step, of_least)
}

/// Whether, along an axis of a transposed convolution, any tap contributes to any result: none does if the
/// padding exceeds the reach of the taps.
fn meets_taps(axis: &WindowAxis) -> bool {
    let meets = |i: i64, tap: i64| i * axis.stride + tap * axis.dilation - axis.before;
    (0..axis.input).any(|i| (0..axis.filter).any(|tap| (0..axis.output).contains(&meets(i, tap))))
}

/// Divisors of a number, from `least` on, and the number itself.
fn divisors(n: i64, least: i64) -> impl Iterator<Item = i64> {
    (1..=n).filter(move |d| n % d == 0 && (*d >= least || *d == n))
}

/// Whether the template chooses the layouts of the activations.
fn is_blocked(setting: &TemplateSetting) -> bool {
    setting.workload.layout() == Layout::Blocked
}

/// Whether the input and the result have, or may have, contiguous channels, as chosen by the template or by
/// neighbours in a network.
fn in_blocks(setting: &TemplateSetting) -> [bool; 2] {
    setting.workload.layout().channels().map(|channels| is_blocked(setting) || channels > 1)
}
