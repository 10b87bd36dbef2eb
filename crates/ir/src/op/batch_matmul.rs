//! Batched matrix multiplication.

use super::{Contraction, Factor, Operator, OperatorSize, Structure, Workload};

/// `C[b, m, n] = Σ_k A[b, m, k] · B[b, k, n]`, where each operand may be stored transposed.
pub const BATCH_MATMUL: Operator = Operator {
    name: "batch_matmul",
    text: "C[b, m, n] = sum over k of A[b, m, k] * B[b, k, n]",
    sizes: &[
        OperatorSize::new("b", "number of products"),
        OperatorSize::new("m", "rows of A and C"),
        OperatorSize::new("n", "columns of B and C"),
        OperatorSize::new("k", "columns of A, rows of B"),
        OperatorSize::flag("ta", "1 where A is stored as [b, k, m]"),
        OperatorSize::flag("tb", "1 where B is stored as [b, n, k]"),
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
        batch: Some(w.size("b")),
        m: w.size("m"),
        n: w.size("n"),
        k: w.size("k"),
        a: Factor::plain("A", w.size("ta") == 1),
        b: Factor::plain("B", w.size("tb") == 0),
        output: "C",
        output_beside: false,
    })
}
