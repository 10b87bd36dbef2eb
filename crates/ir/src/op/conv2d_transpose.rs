//! Transposed two-dimensional convolution.

use super::{Operator, OperatorSize, Structure, Window, WindowAxis, Workload};

/// `Y[n, k, h·stride − pad + r·dilation, w·stride − pad + s·dilation] += X[n, c, h, w] · W[c, k, r, s]`.
///
/// Computed as a convolution of X, with zeros inserted and padded, with the flipped filter.
///
/// # Source
/// ONNX operator ConvTranspose; padding crops the output, `out_pad` extends its end.
pub const CONV2D_TRANSPOSE: Operator = Operator {
    name: "conv2d_transpose",
    text: "Y[n, k, h*stride - pad + r*dilation, w*stride - pad + s*dilation] += X[n, c, h, w] * W[c, k, r, s]",
    sizes: &[
        OperatorSize::new("n", "images").or(1),
        OperatorSize::new("c", "input channels"),
        OperatorSize::new("h", "rows of the input"),
        OperatorSize::new("w", "columns of the input"),
        OperatorSize::new("k", "output channels"),
        OperatorSize::new("r", "rows of the filter"),
        OperatorSize::new("s", "columns of the filter"),
        OperatorSize::of("stride", 1, "stride_h", "output rows from input to input"),
        OperatorSize::of("stride", 1, "stride_w", "output columns from input to input"),
        OperatorSize::of("pad", 0, "pad_top", "output rows taken away above"),
        OperatorSize::of("pad", 0, "pad_left", "output columns taken away to the left"),
        OperatorSize::of("pad", 0, "pad_bottom", "output rows taken away below"),
        OperatorSize::of("pad", 0, "pad_right", "output columns taken away to the right"),
        OperatorSize::of("dilation", 1, "dilation_h", "output rows from tap to tap"),
        OperatorSize::of("dilation", 1, "dilation_w", "output columns from tap to tap"),
        OperatorSize::of("out_pad", 0, "out_pad_h", "output rows added below"),
        OperatorSize::of("out_pad", 0, "out_pad_w", "output columns added to the right"),
    ],
    constants: &["w"],
    has_layout: true,
    has_prologue: false,
    has_inexact: Workload::fills_tiles,
    check: WindowAxis::check_transposed,
    structure,
};

fn structure(w: &Workload) -> Structure {
    let [n, c, k] = ["n", "c", "k"].map(|size| w.size(size));
    let axes = WindowAxis::transposed(w);
    let zero_point = false;
    Structure::Window(Window {
        n,
        c,
        k,
        groups: 1,
        interleaved: false,
        depthwise: false,
        transposed: true,
        axes,
        zero_point,
        open_rows: Window::has_open_rows(w),
    })
}
