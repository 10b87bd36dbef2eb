//! Many matrix multiplications of one shape.

use super::product::Product;
use super::{Operator, Size, Workload};
use crate::program::Program;

/// `C[b, m, n] = Σ_k A[b, m, k] · B[b, k, n]`, where each factor may be stored transposed.
pub const BATCH_MATMUL: Operator = Operator {
    name: "batch_matmul",
    text: "C[b, m, n] = sum over k of A[b, m, k] * B[b, k, n]",
    sizes: &[
        Size::new("b", "number of products"),
        Size::new("m", "rows of A and C"),
        Size::new("n", "columns of B and C"),
        Size::new("k", "columns of A, rows of B"),
        Size::flag("ta", "1 where A is stored as [b, k, m]"),
        Size::flag("tb", "1 where B is stored as [b, n, k]"),
    ],
    constants: &["a", "b"],
    has_layout: false,
    has_inexact: |_| false,
    check: |_| Ok(()),
    program,
    flops: |w| ["b", "m", "n", "k"].iter().map(|s| w.size(s) as f64).product::<f64>() * 2.0,
    share_inside: |_| 1.0,
};

fn program(w: &Workload) -> Program {
    let (b, m, n, k) = (w.size("b"), w.size("m"), w.size("n"), w.size("k"));
    let stored = |transposed: &str, rows: i64, columns: i64| match w.size(transposed) {
        0 => vec![b, rows, columns],
        _ => vec![b, columns, rows],
    };
    let product = Product {
        inputs: [("A", stored("ta", m, k)), ("B", stored("tb", k, n))],
        output: "C",
        axes: &[("b", b), ("i", m), ("j", n)],
        outer: &["ob", "oi", "oj"],
        k,
        index: |w, v| {
            let at = |transposed: &str, row: usize, column: usize| {
                let (row, column) = if w.size(transposed) == 0 { (row, column) } else { (column, row) };
                vec![v[0].clone(), v[row].clone(), v[column].clone()]
            };
            [at("ta", 1, 3), at("tb", 3, 2)]
        },
    };
    product.program(w)
}
