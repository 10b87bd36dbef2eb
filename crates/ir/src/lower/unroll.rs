//! Unrolls loops by repeating their bodies.
//!
//! A loop that cannot be unrolled or vectorized, because its extent is not constant or the code would
//! explode, becomes a serial loop, which is always correct but slower. Unrolled statements are simplified;
//! empty loops and conditions are dropped.

use crate::index::{Index, Ranges};
use crate::lower::simplify::{inline, simplify_block};
use crate::program::{Loop, LoopKind, Stmt};

/// Maximum number of leaf statements of one unrolled loop.
const MOST_STATEMENTS: usize = 16384;

/// Unrolls loops, in a block inside the loops of `ranges`.
pub fn unroll_block(block: Vec<Stmt>, ranges: &mut Ranges) -> Vec<Stmt> {
    let mut out = Vec::with_capacity(block.len());
    for stmt in block {
        match stmt {
            Stmt::For(l) => unroll_loop(l, ranges, &mut out),
            Stmt::If { cond, then, otherwise } => {
                let (then, otherwise) = (unroll_block(then, ranges), unroll_block(otherwise, ranges));
                if !then.is_empty() || !otherwise.is_empty() {
                    out.push(Stmt::If { cond, then, otherwise });
                }
            }
            Stmt::Alloc(_)
            | Stmt::Store { .. }
            | Stmt::Update { .. }
            | Stmt::Prefetch { .. }
            | Stmt::Barrier
            | Stmt::Wait(_) => {
                out.push(stmt);
            }
        }
    }
    out
}

fn unroll_loop(l: Loop, ranges: &mut Ranges, out: &mut Vec<Stmt>) {
    let Loop { var, extent, kind, body } = l;
    let n = extent.as_const();
    if kind == LoopKind::Unrolled
        && let Some(n) = n
        && (n.max(0) as usize).saturating_mul(leaves(&body)) <= MOST_STATEMENTS
    {
        for i in 0..n {
            // Substituting first makes inner extents that depend on this loop constant.
            let copy = body.iter().map(|s| s.substitute(var, &Index::from(i))).collect();
            inline(unroll_block(simplify_block(copy, ranges), ranges), out);
        }
        return;
    }
    ranges.push(var, extent.clone());
    let body = unroll_block(body, ranges);
    ranges.pop();
    if body.is_empty() {
        return;
    }
    let has_loops = body.iter().any(|s| matches!(s, Stmt::For(_)));
    let kind = match kind {
        LoopKind::Unrolled => LoopKind::Serial,
        // Lanes limited by an open size get a mask.
        LoopKind::Vectorized if n.is_none() && !ranges.is_open(&extent) || has_loops => LoopKind::Serial,
        kind => kind,
    };
    out.push(Stmt::For(Loop { var, extent, kind, body }));
}

/// Number of leaf statements of a block after unrolling.
pub fn leaves(block: &[Stmt]) -> usize {
    block
        .iter()
        .map(|s| match s {
            Stmt::For(l) => {
                let times = if l.kind == LoopKind::Unrolled { l.extent.as_const().unwrap_or(1).max(1) } else { 1 };
                leaves(&l.body).saturating_mul(times as usize)
            }
            Stmt::If { then, otherwise, .. } => leaves(then).saturating_add(leaves(otherwise)),
            Stmt::Alloc(_)
            | Stmt::Store { .. }
            | Stmt::Update { .. }
            | Stmt::Prefetch { .. }
            | Stmt::Barrier
            | Stmt::Wait(_) => 1,
        })
        .fold(0, usize::saturating_add)
}
