//! Matrix multiplication.

use super::{Contraction, Factor, Operator, OperatorSize, Structure, Workload};

/// `C[m, n] = Σ_k A[m, k] · B[k, n]`, all row-major.
pub const MATMUL: Operator = Operator {
    name: "matmul",
    text: "C[m, n] = sum over k of A[m, k] * B[k, n]",
    sizes: &[
        OperatorSize::new("m", "rows of A and C"),
        OperatorSize::new("n", "columns of B and C"),
        OperatorSize::new("k", "columns of A, rows of B"),
    ],
    constants: &["a", "b"],
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
        a: Factor::plain("A", false),
        b: Factor::plain("B", true),
        output: "C",
        output_beside: false,
    })
}
