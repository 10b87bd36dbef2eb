//! Transposed two-dimensional convolution.

use super::convolution::{Axis, Convolution};
use super::{Operator, Size, Workload};
use crate::index::Index;
use crate::program::Program;

/// `Y[n, k, h·stride − pad + r·dilation, w·stride − pad + s·dilation] += X[n, c, h, w] · W[c, k, r, s]`.
///
/// Computed as a convolution with the flipped filter over X with zeros inserted and around it.
///
/// # Source
/// The operator ConvTranspose of ONNX; padding takes away from the output, `out_pad` adds to it at its end.
pub const CONV2D_TRANSPOSE: Operator = Operator {
    name: "conv2d_transpose",
    text: "Y[n, k, h*stride - pad + r*dilation, w*stride - pad + s*dilation] += X[n, c, h, w] * W[c, k, r, s]",
    sizes: &[
        Size::new("n", "images").or(1),
        Size::new("c", "input channels"),
        Size::new("h", "rows of the input"),
        Size::new("w", "columns of the input"),
        Size::new("k", "output channels"),
        Size::new("r", "rows of the filter"),
        Size::new("s", "columns of the filter"),
        Size::of("stride", 1, "stride_h", "output rows from input to input"),
        Size::of("stride", 1, "stride_w", "output columns from input to input"),
        Size::of("pad", 0, "pad_top", "output rows taken away above"),
        Size::of("pad", 0, "pad_left", "output columns taken away to the left"),
        Size::of("pad", 0, "pad_bottom", "output rows taken away below"),
        Size::of("pad", 0, "pad_right", "output columns taken away to the right"),
        Size::of("dilation", 1, "dilation_h", "output rows from tap to tap"),
        Size::of("dilation", 1, "dilation_w", "output columns from tap to tap"),
        Size::of("out_pad", 0, "out_pad_h", "output rows added below"),
        Size::of("out_pad", 0, "out_pad_w", "output columns added to the right"),
    ],
    constants: &["w"],
    has_layout: true,
    has_inexact: |_| false,
    check: Axis::check_transposed,
    program,
    // Each element of the input meets each tap; zeros inserted are not counted.
    flops: |w| 2.0 * ["n", "c", "h", "w", "k", "r", "s"].iter().map(|s| w.size(s) as f64).product::<f64>(),
    share_inside: Axis::share_inside_transposed,
};

fn program(w: &Workload) -> Program {
    let (c, k) = (w.size("c"), w.size("k"));
    let axes = Axis::transposed(w);
    let (last_row, last_column) = (axes[0].filter - 1, axes[1].filter - 1);
    let convolution = Convolution {
        channels: [c, k],
        weights: &[c, k, axes[0].filter, axes[1].filter],
        axes,
        summed_channels: Some(c),
        always_padded: true,
        tap: &|k, sum| {
            let flipped = |last: i64, tap: &Index| Index::from(last).sub(tap);
            let weight = vec![sum[0].clone(), k.clone(), flipped(last_row, &sum[1]), flipped(last_column, &sum[2])];
            (sum[0].clone(), weight)
        },
    };
    convolution.program(w)
}
