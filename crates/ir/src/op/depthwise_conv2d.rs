//! Depthwise convolution.

use super::{Operator, OperatorSize, Structure, Window, WindowAxis, Workload};

/// `Y[n, k, p, q] = Σ_{r, s} X[n, k / multiplier, p·stride + r·dilation, q·stride + s·dilation] ·
/// W[k, r, s]`, X padded.
pub const DEPTHWISE_CONV2D: Operator = Operator {
    name: "depthwise_conv2d",
    text: "Y[n, k, p, q] = sum over r, s of padded X[n, k / multiplier, p*stride + r*dilation, q*stride + s*dilation] * W[k, r, s]",
    sizes: &[
        OperatorSize::new("n", "images").or(1),
        OperatorSize::new("c", "input channels"),
        OperatorSize::new("h", "rows of the input"),
        OperatorSize::new("w", "columns of the input"),
        OperatorSize::new("r", "rows of the filter"),
        OperatorSize::new("s", "columns of the filter"),
        OperatorSize::new("multiplier", "output channels for each input channel").or(1),
        OperatorSize::of("stride", 1, "stride_h", "rows from output to output"),
        OperatorSize::of("stride", 1, "stride_w", "columns from output to output"),
        OperatorSize::of("pad", 0, "pad_top", "rows of zeros above"),
        OperatorSize::of("pad", 0, "pad_left", "columns of zeros to the left"),
        OperatorSize::of("pad", 0, "pad_bottom", "rows of zeros below"),
        OperatorSize::of("pad", 0, "pad_right", "columns of zeros to the right"),
        OperatorSize::of("dilation", 1, "dilation_h", "rows from tap to tap"),
        OperatorSize::of("dilation", 1, "dilation_w", "columns from tap to tap"),
        OperatorSize::flag(
            "x_zero",
            "1 where integers are padded with their zero point, the input `x_zero`, else with zeros",
        ),
    ],
    constants: &["w"],
    has_layout: true,
    has_prologue: true,
    has_inexact: |_| false,
    check: WindowAxis::check_forward,
    structure,
};

fn structure(w: &Workload) -> Structure {
    let (n, c) = (w.size("n"), w.size("c"));
    let (k, axes) = (c * w.size("multiplier"), WindowAxis::forward(w));
    let zero_point = w.size(Window::ZERO) == 1;
    Structure::Window(Window {
        n,
        c,
        k,
        groups: c,
        interleaved: false,
        depthwise: true,
        transposed: false,
        axes,
        zero_point,
        open_rows: Window::has_open_rows(w),
    })
}
