//! The fully connected layer.

use super::product::Product;
use super::{Operator, Size, Workload};
use crate::program::Program;

/// `Y[m, n] = Σ_k X[m, k] · W[n, k]`, all row-major: weights lie as networks store them.
pub const DENSE: Operator = Operator {
    name: "dense",
    text: "Y[m, n] = sum over k of X[m, k] * W[n, k]",
    sizes: &[
        Size::new("m", "rows of X and Y"),
        Size::new("n", "rows of W, columns of Y"),
        Size::new("k", "columns of X and W"),
    ],
    constants: &["w"],
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
        inputs: [("X", vec![m, k]), ("W", vec![n, k])],
        output: "Y",
        axes: &[("i", m), ("j", n)],
        outer: &["oi", "oj"],
        k,
        index: |_, v| [vec![v[0].clone(), v[2].clone()], vec![v[1].clone(), v[2].clone()]],
    };
    product.program(w)
}
