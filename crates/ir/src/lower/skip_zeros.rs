//! Skips terms of a reduction that are known to contribute nothing.
//!
//! A padded convolution reads `select(inside, X[…], 0) * W[…]`. If the reduction was initialized before, so
//! that `first` never holds, the update becomes `if inside { … X[…] * W[…] }`. Each part of the condition is
//! tested in the outermost loop that decides it:
//!
//! ```text
//! for r in 3 {                              for r in 3 {
//!   for c in 8 {                              if 0 < p + r {
//!     acc[] += select(0 < p + r,      →         for c in 8 {
//!       X[p + r - 1, c], 0.0) * W[r, c]           acc[] += X[p + r - 1, c] * W[r, c]
//! ```
//!
//! Conditions that depend on the lanes of a vectorized loop stay a `select`. Sums are equal as long as no
//! factor of a zero is infinite or NaN.

use crate::expr::{BinaryOp, Cond, Expr};
use crate::lower::simplify::never;
use crate::program::{Loop, LoopId, LoopKind, Stmt};

/// Skips updates that add zero, in a block.
pub fn skip_zeros(block: Vec<Stmt>) -> Vec<Stmt> {
    close(guard_block(block))
}

/// Statement that runs only if all conditions hold, which are conditions on indices.
struct Guarded {
    conds: Vec<Cond>,
    stmt: Stmt,
}

impl Guarded {
    fn always(stmt: Stmt) -> Guarded {
        Guarded { conds: Vec::new(), stmt }
    }
}

fn guard_block(block: Vec<Stmt>) -> Vec<Guarded> {
    block.into_iter().flat_map(guard).collect()
}

fn guard(stmt: Stmt) -> Vec<Guarded> {
    match stmt {
        Stmt::For(l) if l.kind == LoopKind::Vectorized => guard_vectorized(l),
        Stmt::For(l) => vec![guard_loop(l)],
        Stmt::If { cond, then, otherwise } => {
            let then = guard_block(then);
            // A block with allocations stays nested.
            let allocates = then.iter().any(|g| matches!(g.stmt, Stmt::Alloc(_)));
            if allocates || !otherwise.is_empty() || !cond.is_on_indices() {
                return vec![Guarded::always(Stmt::If { cond, then: close(then), otherwise: skip_zeros(otherwise) })];
            }
            let mut parts = Vec::new();
            conjuncts(cond, &mut parts);
            let inside = |mut g: Guarded| {
                g.conds.splice(0..0, parts.iter().cloned());
                g
            };
            then.into_iter().map(inside).collect()
        }
        Stmt::Update { .. } => vec![guard_update(stmt, None)],
        Stmt::Alloc(_) | Stmt::Store { .. } | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {
            vec![Guarded::always(stmt)]
        }
    }
}

/// Hoists conditions out of a loop if all of its statements share them and they do not depend on its
/// variable.
fn guard_loop(l: Loop) -> Guarded {
    let mut body = guard_block(l.body);
    let conds = match l.kind {
        LoopKind::Serial | LoopKind::Unrolled | LoopKind::Tensor(_) => {
            shared(&body).into_iter().filter(|c| !c.uses(l.var)).collect()
        }
        // Whether to start threads must not depend on the condition of a single element.
        LoopKind::Parallel | LoopKind::Vectorized | LoopKind::Block(_) | LoopKind::Thread(_) | LoopKind::Turns => {
            Vec::new()
        }
    };
    body.iter_mut().for_each(|g| g.conds.retain(|c| !conds.contains(c)));
    Guarded { conds, stmt: Stmt::For(Loop { body: close(body), ..l }) }
}

/// Splits a vectorized loop over statements with different conditions into several, as a vectorized loop must
/// not contain conditions and its iterations are independent. For the same reason, an inner unrolled loop
/// with conditions is interchanged with it.
fn guard_vectorized(l: Loop) -> Vec<Guarded> {
    let mut out: Vec<Guarded> = Vec::new();
    let lanes = |body| Stmt::For(Loop { var: l.var, extent: l.extent.clone(), kind: l.kind, body });
    for stmt in l.body {
        match stmt {
            Stmt::For(inner) if !inner.extent.uses(l.var) && skips(&inner.body, l.var) => {
                out.push(guard_loop(Loop { body: vec![lanes(inner.body)], ..inner }));
            }
            stmt => {
                let g = guard_update(stmt, Some(l.var));
                match out.last_mut() {
                    Some(Guarded { conds, stmt: Stmt::For(last) }) if last.var == l.var && *conds == g.conds => {
                        last.body.push(g.stmt);
                    }
                    _ => out.push(Guarded { conds: g.conds, stmt: lanes(vec![g.stmt]) }),
                }
            }
        }
    }
    out
}

/// Whether an update in the block contributes nothing under conditions that do not depend on the lanes.
fn skips(block: &[Stmt], lane: LoopId) -> bool {
    block.iter().any(|s| match s {
        Stmt::Update { .. } => !guard_update(s.clone(), Some(lane)).conds.is_empty(),
        _ => s.blocks().any(|b| skips(b, lane)),
    })
}

/// Guards an update by the conditions under which it contributes something; other statements are unchanged.
fn guard_update(stmt: Stmt, lane: Option<LoopId>) -> Guarded {
    match stmt {
        Stmt::Update { buffer, index, op, value, first } if first == never() => {
            let mut conds = Vec::new();
            let is_tested = |c: &Cond| c.is_on_indices() && lane.is_none_or(|lane| !c.uses(lane));
            let value = without(value, op.identity(), &is_tested, &mut conds);
            Guarded { conds, stmt: Stmt::Update { buffer, index, op, value, first } }
        }
        other => Guarded::always(other),
    }
}

/// Returns the value for the case that it is not `neutral`, and collects the conditions of that case.
fn without(value: Expr, neutral: f64, is_tested: &dyn Fn(&Cond) -> bool, conds: &mut Vec<Cond>) -> Expr {
    match value {
        Expr::Binary(BinaryOp::Mul, a, b) if neutral == 0.0 => {
            Expr::binary(BinaryOp::Mul, without(*a, neutral, is_tested, conds), without(*b, neutral, is_tested, conds))
        }
        Expr::Select(cond, a, b) => {
            let (cond, kept) = if *b == Expr::Const(neutral) {
                (*cond, *a)
            } else if *a == Expr::Const(neutral) {
                (Cond::Not(cond), *b)
            } else {
                return Expr::Select(cond, a, b);
            };
            let mut parts = Vec::new();
            conjuncts(cond, &mut parts);
            let (tested, left): (Vec<Cond>, Vec<Cond>) = parts.into_iter().partition(is_tested);
            conds.extend(tested);
            let kept = without(kept, neutral, is_tested, conds);
            match left.into_iter().reduce(Cond::and) {
                None => kept,
                Some(cond) => Expr::Select(Box::new(cond), Box::new(kept), Box::new(Expr::Const(neutral))),
            }
        }
        Expr::Const(x) if x == neutral => {
            conds.push(never());
            value
        }
        other => other,
    }
}

fn conjuncts(cond: Cond, parts: &mut Vec<Cond>) {
    match cond {
        Cond::True => {}
        Cond::And(a, b) => {
            conjuncts(*a, parts);
            conjuncts(*b, parts);
        }
        other if parts.contains(&other) => {}
        other => parts.push(other),
    }
}

/// Conditions that all statements share.
fn shared(block: &[Guarded]) -> Vec<Cond> {
    let Some((first, rest)) = block.split_first() else { return Vec::new() };
    first.conds.iter().filter(|c| rest.iter().all(|g| g.conds.contains(c))).cloned().collect()
}

/// Emits the statements, with one test for adjacent statements that share a condition.
fn close(block: Vec<Guarded>) -> Vec<Stmt> {
    let mut out = Vec::with_capacity(block.len());
    let mut rest = block.into_iter().peekable();
    while let Some(first) = rest.next() {
        if first.conds.is_empty() {
            out.push(first.stmt);
            continue;
        }
        let mut conds = first.conds.clone();
        let mut run = vec![first];
        while let Some(next) = rest.next_if(|next| next.conds.iter().any(|c| conds.contains(c))) {
            conds.retain(|c| next.conds.contains(c));
            run.push(next);
        }
        run.iter_mut().for_each(|g| g.conds.retain(|c| !conds.contains(c)));
        let cond = conds.into_iter().fold(Cond::True, Cond::and);
        out.push(Stmt::If { cond, then: close(run), otherwise: Vec::new() });
    }
    out
}
