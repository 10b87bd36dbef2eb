//! Matrix multiplication.

use super::{Operator, ProgramBuilder, Size, StageSpec, Workload};
use crate::expr::{BinaryOp, Expr, ReduceOp};
use crate::program::{Program, Role};

const fn size(name: &'static str, text: &'static str) -> Size {
    Size { name, text, default: None, least: 1 }
}

/// `C[m, n] = Σ_k A[m, k] · B[k, n]`, all row-major.
pub const MATMUL: Operator = Operator {
    name: "matmul",
    text: "C[m, n] = sum over k of A[m, k] * B[k, n]",
    sizes: &[size("m", "rows of A and C"), size("n", "columns of B and C"), size("k", "columns of A, rows of B")],
    constants: &["a", "b"],
    program,
    flops: |w| 2.0 * w.size("m") as f64 * w.size("n") as f64 * w.size("k") as f64,
};

fn program(w: &Workload) -> Program {
    let (m, n, k) = (w.size("m"), w.size("n"), w.size("k"));
    let mut p = ProgramBuilder::new(w);
    let a = p.input("A", &[m, k]);
    let b = p.input("B", &[k, n]);
    p.stage(
        StageSpec {
            name: "C",
            axes: &[("i", m), ("j", n)],
            reduce: Some((ReduceOp::Sum, &[("k", k)])),
            role: Role::Output,
        },
        |v| {
            let a = Expr::Load(a, vec![v[0].clone(), v[2].clone()]);
            let b = Expr::Load(b, vec![v[2].clone(), v[1].clone()]);
            Expr::binary(BinaryOp::Mul, a, b)
        },
    );
    p.finish()
}
