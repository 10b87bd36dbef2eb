//! Strided batched matmul, whose operands and results may be interleaved in memory, like the heads of
//! attention.

use super::{Contraction, Factor, Heads, Operator, OperatorSize, Structure, Workload};

/// `C[b, m, n] = Σ_k A[b, m, k] · B[b, k, n]`, where each of the three may be stored as `[m, b, n]` instead
/// of `[b, m, n]`, and each operand may be a slice of a buffer with other heads before and after.
///
/// Thus the packed projections of queries, keys and values, `[tokens, 3 · heads · size]`, can be both
/// operands of the scores and one operand of their product with the values, whose result has the row layout
/// of the next product, all without a copy.
pub const HEADS_MATMUL: Operator = Operator {
    name: "heads_matmul",
    text: "C[b, m, n] = sum over k of A[b, m, k] * B[b, k, n], each stored with rows or products outside",
    sizes: &[
        OperatorSize::new("b", "number of products"),
        OperatorSize::new("m", "rows of A and C"),
        OperatorSize::new("n", "columns of B and C"),
        OperatorSize::new("k", "columns of A, rows of B"),
        OperatorSize::flag("tb", "1 where B is stored with k last"),
        OperatorSize::flag("ha", "1 where A is stored as [m, b, k]"),
        OperatorSize::flag("hb", "1 where B is stored as [k, b, n], or as [n, b, k]"),
        OperatorSize::flag("hc", "1 where C is stored as [m, b, n]"),
        OperatorSize::count("a_before", "products that A has ahead of those that are used"),
        OperatorSize::count("a_after", "products that A has behind them"),
        OperatorSize::count("b_before", "products that B has ahead of those that are used"),
        OperatorSize::count("b_after", "products that B has behind them"),
    ],
    constants: &["a", "b"],
    has_layout: false,
    has_prologue: false,
    has_inexact: Workload::fills_tiles,
    check: |_| Ok(()),
    structure,
};

fn structure(w: &Workload) -> Structure {
    let heads = |beside: &str, before: &str, after: &str| Heads {
        beside: w.size(beside) == 1,
        before: w.size(before),
        after: w.size(after),
    };
    let a = Factor { name: "A", k_first: false, heads: heads("ha", "a_before", "a_after") };
    let b = Factor { name: "B", k_first: w.size("tb") == 0, heads: heads("hb", "b_before", "b_after") };
    Structure::Contraction(Contraction {
        batch: Some(w.size("b")),
        m: w.size("m"),
        n: w.size("n"),
        k: w.size("k"),
        a,
        b,
        output: "C",
        output_beside: w.size("hc") == 1,
    })
}
