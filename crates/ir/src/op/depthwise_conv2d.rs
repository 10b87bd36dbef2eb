//! Convolution of each channel by itself.

use super::{Axis, Operator, Size, Structure, Window, Workload};

/// `Y[n, k, p, q] = Σ_{r, s} X[n, k / multiplier, p·stride + r·dilation, q·stride + s·dilation] ·
/// W[k, r, s]`, X padded.
pub const DEPTHWISE_CONV2D: Operator = Operator {
    name: "depthwise_conv2d",
    text: "Y[n, k, p, q] = sum over r, s of padded X[n, k / multiplier, p*stride + r*dilation, q*stride + s*dilation] * W[k, r, s]",
    sizes: &[
        Size::new("n", "images").or(1),
        Size::new("c", "input channels"),
        Size::new("h", "rows of the input"),
        Size::new("w", "columns of the input"),
        Size::new("r", "rows of the filter"),
        Size::new("s", "columns of the filter"),
        Size::new("multiplier", "output channels for each input channel").or(1),
        Size::of("stride", 1, "stride_h", "rows from output to output"),
        Size::of("stride", 1, "stride_w", "columns from output to output"),
        Size::of("pad", 0, "pad_top", "rows of zeros above"),
        Size::of("pad", 0, "pad_left", "columns of zeros to the left"),
        Size::of("pad", 0, "pad_bottom", "rows of zeros below"),
        Size::of("pad", 0, "pad_right", "columns of zeros to the right"),
        Size::of("dilation", 1, "dilation_h", "rows from tap to tap"),
        Size::of("dilation", 1, "dilation_w", "columns from tap to tap"),
        Size::flag("x_zero", "1 where integers are padded with their zero point, the input `x_zero`, else with zeros"),
    ],
    constants: &["w"],
    has_layout: true,
    has_prologue: true,
    has_inexact: |_| false,
    check: Axis::check_forward,
    structure,
};

fn structure(w: &Workload) -> Structure {
    let (n, c) = (w.size("n"), w.size("c"));
    let (k, axes) = (c * w.size("multiplier"), Axis::forward(w));
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
    })
}
