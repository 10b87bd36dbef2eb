//! Templates of convolutions: one that chooses among the algorithms, and one for each algorithm alone.

mod col2im;
mod direct;
mod im2col;
mod paper;
mod winograd;

use super::algorithm::{self, Algorithm};
use super::share::Work;
use super::{Setting, Template, ceil_div};
use tilewright_ir::op::{Layout, Workload};
use tilewright_ir::schedule::LayoutAxis::{self, Inner, Outer, Whole};

pub use paper::CONV_4_4_4_2_2_2;

/// Whether the stages of a workload are those of a convolution.
fn is_convolution(w: &Workload) -> bool {
    ["conv2d", "depthwise_conv2d", "conv2d_transpose"].contains(&w.operator().name)
}

/// The least share of the products of the operator as written that any algorithm takes.
pub fn least_share(w: &Workload) -> f64 {
    if is_convolution(w) && Shape::of(w).has_winograd { winograd::least_share() } else { 1.0 }
}

/// Every algorithm that applies, as a choice of the search.
pub const CONV: Template = Template {
    name: "conv",
    text: "direct convolution, im2col, Winograd's algorithm or col2im, whichever is faster",
    serves: is_convolution,
    space: |s| algorithm::space("conv", s, &Shape::of(&s.workload), ALGORITHMS),
    steps: |s, space, config| algorithm::steps(s, &Shape::of(&s.workload), ALGORITHMS, space, config),
    estimate: Some(|s, space, config| algorithm::estimate(s, &Shape::of(&s.workload), ALGORITHMS, space, config)),
};

/// Direct convolution alone.
pub const CONV_DIRECT: Template = Template {
    name: "conv-direct",
    text: "direct convolution: register tile of channels and pixels, channels or pixels as lanes, blocked layouts",
    serves: is_convolution,
    space: |s| algorithm::space("conv-direct", s, &Shape::of(&s.workload), &[direct::DIRECT]),
    steps: |s, space, config| (direct::DIRECT.steps)(s, &Shape::of(&s.workload), space, config),
    estimate: Some(|s, space, config| (direct::DIRECT.estimate)(s, &Shape::of(&s.workload), space, config)),
};

/// Winograd's algorithm alone.
pub const CONV_WINOGRAD: Template = Template {
    name: "conv-winograd",
    text: "Winograd's F(2x2, 3x3) and F(4x4, 3x3): transforms and products of a block of tile rows",
    serves: |w| is_convolution(w) && Shape::of(w).has_winograd,
    space: |s| algorithm::space("conv-winograd", s, &Shape::of(&s.workload), &[winograd::WINOGRAD]),
    steps: |s, space, config| (winograd::WINOGRAD.steps)(s, &Shape::of(&s.workload), space, config),
    estimate: Some(|s, space, config| (winograd::WINOGRAD.estimate)(s, &Shape::of(&s.workload), space, config)),
};

/// The matrix product of weights and patches alone.
pub const CONV_IM2COL: Template = Template {
    name: "conv-im2col",
    text: "matrix product of weights and patches: patches whole or by blocks, register tile of channels and pixels",
    serves: |w| is_convolution(w) && (im2col::IM2COL.applies)(&Shape::of(w)),
    space: |s| algorithm::space("conv-im2col", s, &Shape::of(&s.workload), &[im2col::IM2COL]),
    steps: |s, space, config| (im2col::IM2COL.steps)(s, &Shape::of(&s.workload), space, config),
    estimate: Some(|s, space, config| (im2col::IM2COL.estimate)(s, &Shape::of(&s.workload), space, config)),
};

/// The product of a transposed convolution, whose columns are added up, alone.
pub const CONV_COL2IM: Template = Template {
    name: "conv-col2im",
    text: "transposed convolution without inserted zeros: product of weights and input, columns added up row by row",
    serves: |w| is_convolution(w) && (col2im::COL2IM.applies)(&Shape::of(w)),
    space: |s| algorithm::space("conv-col2im", s, &Shape::of(&s.workload), &[col2im::COL2IM]),
    steps: |s, space, config| (col2im::COL2IM.steps)(s, &Shape::of(&s.workload), space, config),
    estimate: Some(|s, space, config| (col2im::COL2IM.estimate)(s, &Shape::of(&s.workload), space, config)),
};

/// All algorithms.
const ALGORITHMS: &[Algorithm<Shape>] = &[direct::DIRECT, im2col::IM2COL, winograd::WINOGRAD, col2im::COL2IM];

/// The sizes of a convolution's reduction, read off its untransformed program.
///
/// The stages are named alike in every operator of the kind: `acc[n, k, p, q]` sums over `c`, `r` and `s` the products
/// of the weights `W` with the input, `pad` where it is padded, and the last stage stores what the epilogue makes of it.
struct Shape {
    n: i64,
    k: i64,
    p: i64,
    q: i64,
    /// Input channels that one output sums over; none in a depthwise convolution.
    c: Option<i64>,
    /// Rows and columns of a filter.
    r: i64,
    s: i64,
    /// Elements from one output to the next, along rows and columns.
    stride: [i64; 2],
    /// Whether the input is read through a stage that pads it.
    padded: bool,
    /// Channels of the output that read the same channels of the input.
    k_group: i64,
    /// Whether it is a transposed convolution's.
    transposed: bool,
    /// Whether Winograd's algorithm applies, 3×3, stride 1, no dilation, no groups, and its rounding is accepted.
    has_winograd: bool,
    /// Whether the input is read with zeros inserted, as in a transposed convolution of a stride above 1, and some result
    /// meets some tap.
    inserts_zeros: bool,
}

impl Shape {
    fn of(w: &Workload) -> Shape {
        let program = w.program();
        let shape =
            |name: &str| &program.buffer(program.find_buffer(name).expect("a stage of every convolution")).shape;
        let (acc, weights) = (shape("acc"), shape("W"));
        let depthwise = program.find_loop("c").is_none();
        let transposed = w.operator().name == "conv2d_transpose";
        let [r, s] = [weights[weights.len() - 2], weights[weights.len() - 1]];
        let groups = if depthwise || transposed { 1 } else { w.size("groups") };
        Shape {
            n: acc[0],
            k: acc[1],
            p: acc[2],
            q: acc[3],
            c: (!depthwise).then(|| if transposed { weights[0] } else { weights[1] }),
            r,
            s,
            stride: if transposed { [1, 1] } else { [w.size("stride_h"), w.size("stride_w")] },
            padded: program.find_buffer("pad").is_some(),
            k_group: acc[1] / groups,
            inserts_zeros: transposed
                && ["stride_h", "stride_w"].iter().any(|size| w.size(size) > 1)
                && meets_taps(w, "h", "r", "top", acc[2])
                && meets_taps(w, "w", "s", "left", acc[3]),
            has_winograd: !w.exact && w.has_inexact(),
            transposed,
        }
    }

    /// What threads may share of it.
    fn work(&self) -> Work {
        let Shape { n, k, p, q, c, r, s, k_group, .. } = *self;
        Work { results: n * (k / k_group), rows: k_group, columns: p * q, sum: c.unwrap_or(1) * r * s }
    }
}

/// Whether along an axis of a transposed convolution some tap meets some of the results: with padding beyond what the taps
/// reach none does.
fn meets_taps(w: &Workload, axis: &str, taps: &str, side: &str, results: i64) -> bool {
    let size = |name: &str| w.size(&format!("{name}_{axis}"));
    let (stride, dilation, pad) = (size("stride"), size("dilation"), w.size(&format!("pad_{side}")));
    (0..w.size(axis)).any(|i| (0..w.size(taps)).any(|tap| (0..results).contains(&(i * stride + tap * dilation - pad))))
}

/// What divides a number, from `least` on, and the number itself.
fn divisors(n: i64, least: i64) -> impl Iterator<Item = i64> {
    (1..=n).filter(move |d| n % d == 0 && (*d >= least || *d == n))
}

/// NCHW with blocks of channels next to each other.
fn channels_last(block: i64) -> [LayoutAxis; 5] {
    [Whole(0), Outer(1, block), Whole(2), Whole(3), Inner(1, block)]
}

/// Whether the template chooses the layouts in which activations come and go.
fn is_blocked(setting: &Setting) -> bool {
    setting.workload.layout() == Layout::Blocked
}
