//! Fully connected layer.

use super::{Contraction, Factor, Operator, OperatorSize, Structure, Workload};

/// `Y[m, n] = Σ_k X[m, k] · W[n, k]`, all row-major; the weights are in the usual layout `[out, in]` of
/// frameworks.
pub const DENSE: Operator = Operator {
    name: "dense",
    text: "Y[m, n] = sum over k of X[m, k] * W[n, k]",
    sizes: &[
        OperatorSize::new("m", "rows of X and Y"),
        OperatorSize::new("n", "rows of W, columns of Y"),
        OperatorSize::new("k", "columns of X and W"),
    ],
    constants: &["w"],
    has_layout: false,
    has_prologue: false,
    has_inexact: Workload::fills_tiles,
    check: |_| Ok(()),
    structure,
};

fn structure(w: &Workload) -> Structure {
    Structure::Contraction(Contraction {
        batch: None,
        m: w.size("m"),
        n: w.size("n"),
        k: w.size("k"),
        a: Factor::plain("X", false),
        b: Factor::plain("W", false),
        output: "Y",
        output_beside: false,
    })
}
