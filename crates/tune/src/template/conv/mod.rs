//! Templates of convolutions: direct, as a matrix product, and by Winograd's algorithm.

mod direct;
mod im2col;
mod paper;
mod winograd;

use super::Setting;
use tilewright_ir::op::Layout;

pub use direct::CONV_DIRECT;
pub use im2col::CONV_IM2COL;
pub use paper::CONV_4_4_4_2_2_2;
pub use winograd::CONV_WINOGRAD;

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
    r: i64,
    s: i64,
    /// Whether the input is read through a stage that pads it.
    padded: bool,
    /// Channels of the output that read the same channels of the input.
    k_group: i64,
    /// Whether Winograd's algorithm applies: 3×3, stride 1, no dilation, no groups.
    has_winograd: bool,
}

impl Shape {
    fn of(setting: &Setting) -> Shape {
        let w = &setting.workload;
        let program = w.program();
        let shape = |name: &str| &program.buffer(program.find_buffer(name).expect("a stage of every convolution")).shape;
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
            padded: program.find_buffer("pad").is_some(),
            k_group: acc[1] / groups,
            has_winograd: w.operator().name == "conv2d"
                && (r, s) == (3, 3)
                && groups == 1
                && ["stride_h", "stride_w", "dilation_h", "dilation_w"].iter().all(|size| w.size(size) == 1),
        }
    }
}

/// Whether the template chooses the layouts in which activations come and go.
fn is_blocked(setting: &Setting) -> bool {
    setting.workload.layout() == Layout::Blocked
}

fn ceil_div(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}
