//! Matrix multiplication.

use super::product::Product;
use super::{Operator, Size, Workload};
use crate::program::Program;

/// `C[m, n] = Σ_k A[m, k] · B[k, n]`, all row-major.
pub const MATMUL: Operator = Operator {
    name: "matmul",
    text: "C[m, n] = sum over k of A[m, k] * B[k, n]",
    sizes: &[
        Size::new("m", "rows of A and C"),
        Size::new("n", "columns of B and C"),
        Size::new("k", "columns of A, rows of B"),
    ],
    constants: &["a", "b"],
    has_layout: false,
    has_inexact: |_| false,
    check: |_| Ok(()),
    program,
    flops: |w| 2.0 * w.size("m") as f64 * w.size("n") as f64 * w.size("k") as f64,
    share_inside: |_| 1.0,
};

fn program(w: &Workload) -> Program {
    let (m, n, k) = (w.size("m"), w.size("n"), w.size("k"));
    let product = Product {
        inputs: [("A", vec![m, k]), ("B", vec![k, n])],
        output: "C",
        axes: &[("i", m), ("j", n)],
        outer: &["oi", "oj"],
        k,
        index: |_, v| [vec![v[0].clone(), v[2].clone()], vec![v[2].clone(), v[1].clone()]],
    };
    product.program(w)
}
