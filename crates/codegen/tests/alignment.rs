//! Kernels for arguments that are aligned to their elements only.

mod common;

use common::gemm::{ALayout, Gemm};
use common::*;
use tilewright_ir::expr::{BinaryOp, Expr, UnaryOp};
use tilewright_ir::op::Workload;
use tilewright_ir::{DType, Program, Stmt, lower};

/// Products of every layout, whose rows and vectors are aligned within their buffers, and a row of vectors
/// with a tail.
fn programs() -> Vec<Program> {
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::F64] {
        for a in [ALayout::Panels, ALayout::Rows, ALayout::Plain] {
            all.push(Gemm { dtype, a, parallel: true, ..Gemm::default() }.program());
            all.push(Gemm { dtype, a, prepacked: true, ..Gemm::default() }.program());
        }
        for n in [16, 32, 61] {
            let mut p = program(&format!("row of {n}"));
            let x = input(&mut p, "X", dtype, &[n]);
            let y = output(&mut p, "Y", dtype, &[n]);
            let l = p.add_loop("l");
            let value = bin(BinaryOp::Max, un(UnaryOp::Exp, load(x, &[ix(l)])), Expr::Const(0.5));
            p.body = vec![vector(l, n, vec![store(y, &[ix(l)], value)])] as Vec<Stmt>;
            all.push(p);
        }
    }
    let text = "conv2d:c=16,h=6,w=6,k=16,r=3,s=3,pad=1,layout=blocked,epilogue=bias+add+relu";
    all.push(lower::lower(&Workload::parse(text).unwrap().program()));
    all
}

#[test]
fn arguments_may_begin_at_any_element() {
    for p in programs() {
        targets().iter().for_each(|target| check_barely_aligned(&p, target));
    }
}
