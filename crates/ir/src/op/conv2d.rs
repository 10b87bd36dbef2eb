//! Two-dimensional convolution.

use super::{Operator, OperatorSize, Structure, Window, WindowAxis, Workload, WorkloadError};

/// `Y[n, k, p, q] = Σ_{c, r, s} X[n, c, p·stride + r·dilation, q·stride + s·dilation] · W[k, c, r, s]`,
/// X padded.
///
/// With groups, output channels of group g sum over input channels of group g only. With `interleave`, Y
/// holds the first channel of each group, then the second, as after a channel shuffle (Zhang et al.,
/// "ShuffleNet", 2017, section 3.1), while W holds one group after the other. The program of a pointwise
/// convolution, 1×1 with stride 1 and no padding, flattens images to one row of h·w columns, with the same
/// layout in memory. Images that are a single column of pixels (w = 1, with neither filter nor padding along
/// it) become rows (h = 1) in the canonical form of every convolution.
pub const CONV2D: Operator = Operator {
    name: "conv2d",
    text: "Y[n, k, p, q] = sum over c, r, s of padded X[n, c, p*stride + r*dilation, q*stride + s*dilation] * W[k, c, r, s]",
    sizes: &[
        OperatorSize::new("n", "images").or(1),
        OperatorSize::new("c", "input channels"),
        OperatorSize::new("h", "rows of the input"),
        OperatorSize::new("w", "columns of the input"),
        OperatorSize::new("k", "output channels"),
        OperatorSize::new("r", "rows of the filter"),
        OperatorSize::new("s", "columns of the filter"),
        OperatorSize::of("stride", 1, "stride_h", "rows from output to output"),
        OperatorSize::of("stride", 1, "stride_w", "columns from output to output"),
        OperatorSize::of("pad", 0, "pad_top", "rows of zeros above"),
        OperatorSize::of("pad", 0, "pad_left", "columns of zeros to the left"),
        OperatorSize::of("pad", 0, "pad_bottom", "rows of zeros below"),
        OperatorSize::of("pad", 0, "pad_right", "columns of zeros to the right"),
        OperatorSize::of("dilation", 1, "dilation_h", "rows from tap to tap"),
        OperatorSize::of("dilation", 1, "dilation_w", "columns from tap to tap"),
        OperatorSize::new("groups", "groups of channels").or(1),
        OperatorSize::flag(
            "interleave",
            "1 where output channels of the groups take turns: Y[n, j*groups + g] is channel j of group g",
        ),
        OperatorSize::flag(
            "x_zero",
            "1 where integers are padded with their zero point, the input `x_zero`, else with zeros",
        ),
    ],
    constants: &["w"],
    has_layout: true,
    has_prologue: true,
    has_inexact: |w| w.fills_tiles() || w.has_winograd(),
    check,
    structure,
};

fn check(w: &Workload) -> Result<(), WorkloadError> {
    let divisor = w.size("groups");
    for key in ["c", "k"] {
        let value = w.size(key);
        if value % divisor != 0 {
            return Err(WorkloadError::Indivisible { divisor_key: "groups", divisor, key, value });
        }
    }
    WindowAxis::check_forward(w)
}

fn structure(w: &Workload) -> Structure {
    let [n, c, k, groups] = ["n", "c", "k", "groups"].map(|size| w.size(size));
    let axes = WindowAxis::forward(w);
    let interleaved = w.size("interleave") == 1;
    let zero_point = w.size(Window::ZERO) == 1;
    let (depthwise, transposed, open_rows) = (false, false, Window::has_open_rows(w));
    Structure::Window(Window { n, c, k, groups, interleaved, depthwise, transposed, axes, zero_point, open_rows })
}
