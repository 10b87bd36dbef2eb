//! Peels the first and last iterations of a loop, for which conditions inside the loop are not statically
//! decided.
//!
//! At the borders of a padded convolution, some taps lie in the padding; in the interior, none does. A loop
//! that alone decides between the two becomes up to three loops, and the middle one needs no condition:
//!
//! ```text
//!                                                   unrolled s in 3 { if 0 < s { … } }
//! for q in 56 {                                     for q in 54 {
//!   unrolled s in 3 {                        →        unrolled s in 3 { … }
//!     if 0 < q + s && q + s < 57 { … }              }
//!                                                   unrolled s in 3 { if s < 2 { … } }
//! ```
//!
//! A parallel loop stays a single loop that distinguishes the three pieces by its variable. Halide's loop
//! partitioning (Ragan-Kelley et al., PLDI 2013, section 4.6) is the same transformation with run-time
//! bounds; here, cuts are at constants only.

use crate::expr::{Cond, TreePart};
use crate::index::{Index, Ranges};
use crate::lower::simplify::simplify_block;
use crate::lower::unroll::{leaves, unroll_block};
use crate::lower::{MOST_VERSIONS, version_loops};
use crate::program::{Loop, LoopId, LoopKind, Stmt};

/// Maximum number of leaf statements after unrolling, over all versions of one loop's body.
const MOST_STATEMENTS: usize = 4096;

/// Partitions loops, in a block inside the loops of `ranges`.
pub fn partition_loops(block: Vec<Stmt>, ranges: &mut Ranges) -> Vec<Stmt> {
    in_block(block, ranges, MOST_VERSIONS)
}

fn in_block(block: Vec<Stmt>, ranges: &mut Ranges, versions: u32) -> Vec<Stmt> {
    version_loops(block, ranges, versions, in_loop)
}

fn in_loop(l: Loop, ranges: &mut Ranges, versions: u32, out: &mut Vec<Stmt>) {
    let Loop { var, extent, kind, body } = &l;
    let cuts = match (kind, extent.as_const()) {
        (LoopKind::Serial | LoopKind::Parallel, Some(n)) => cuts(&l, n, ranges),
        _ => Vec::new(),
    };
    let n_pieces = cuts.len() as u32 + 1;
    let too_many = n_pieces > versions || leaves(body).saturating_mul(n_pieces as usize) > MOST_STATEMENTS;
    if n_pieces == 1 || too_many {
        ranges.push(*var, extent.clone());
        let body = in_block(l.body, ranges, versions);
        ranges.pop();
        out.push(Stmt::For(Loop { body, ..l }));
        return;
    }
    let n = extent.as_const().expect("a loop with cuts has a constant extent");
    let ends = cuts.iter().chain([&n]);
    let mut pieces: Vec<Stmt> = Vec::new();
    let mut branches: Vec<(i64, Vec<Stmt>)> = Vec::new();
    for (&from, &to) in [0].iter().chain(&cuts).zip(ends) {
        // The variable starts at zero in each piece, so that its range is known.
        let shift = |block: &[Stmt], by: i64| -> Vec<Stmt> {
            block.iter().map(|s| s.substitute(*var, &Index::from(*var).offset(by))).collect()
        };
        let shifted = shift(body, from);
        if *kind == LoopKind::Serial {
            let piece = Loop { var: *var, extent: (to - from).into(), kind: *kind, body: shifted };
            let piece = simplify_block(vec![Stmt::For(piece)], ranges);
            pieces.extend(in_pieces(piece, *var, ranges, versions / n_pieces));
        } else {
            ranges.push(*var, (to - from).into());
            let piece = in_block(simplify_block(shifted, ranges), ranges, versions / n_pieces);
            // Unrolled here while the range is known; outside the piece, the loop has its full range again.
            let piece = simplify_block(unroll_block(piece, ranges), ranges);
            ranges.pop();
            branches.push((to, shift(&piece, -from)));
        }
    }
    if let Some((_, last)) = branches.pop() {
        let body = branches.into_iter().rev().fold(last, |otherwise, (to, then)| {
            vec![Stmt::If { cond: Cond::Lt((*var).into(), to.into()), then, otherwise }]
        });
        pieces.push(Stmt::For(Loop { var: *var, extent: extent.clone(), kind: *kind, body }));
    }
    out.extend(pieces);
}

/// Runs the pass inside a piece, which itself is not cut further.
fn in_pieces(block: Vec<Stmt>, var: LoopId, ranges: &mut Ranges, versions: u32) -> Vec<Stmt> {
    block
        .into_iter()
        .flat_map(|s| match s {
            Stmt::For(l) if l.var == var => {
                ranges.push(l.var, l.extent.clone());
                let body = in_block(l.body, ranges, versions);
                ranges.pop();
                vec![Stmt::For(Loop { body, ..l })]
            }
            other => in_block(vec![other], ranges, versions),
        })
        .collect()
}

/// Chooses the iterations at which to cut a loop of `n` iterations, in order: after the first special
/// iterations and before the last ones.
fn cuts(l: &Loop, n: i64, ranges: &mut Ranges) -> Vec<i64> {
    if n < 2 {
        return Vec::new();
    }
    let mut search = CutSearch { var: l.var, n, ranges, inside: Vec::new(), front: 0, back: n };
    search.ranges.push(l.var, l.extent.clone());
    search.block(&l.body);
    search.ranges.pop();
    let (front, back) = (search.front, search.back);
    let mut cuts = vec![front, back];
    cuts.dedup();
    cuts.retain(|&at| 0 < at && at < n);
    cuts
}

struct CutSearch<'r> {
    var: LoopId,
    n: i64,
    /// Loops around the current statement.
    ranges: &'r mut Ranges,
    /// Loops between the loop to cut and the current statement, and whether each is unrolled or vectorized.
    inside: Vec<(LoopId, bool)>,
    /// First iteration after those at the front that leave some condition undecided.
    front: i64,
    /// First iteration of those at the back that leave some condition undecided.
    back: i64,
}

impl CutSearch<'_> {
    fn block(&mut self, block: &[Stmt]) {
        for stmt in block {
            match stmt {
                Stmt::For(l) => {
                    let is_repeated = matches!(l.kind, LoopKind::Unrolled | LoopKind::Vectorized);
                    self.ranges.push(l.var, l.extent.clone());
                    self.inside.push((l.var, is_repeated));
                    self.block(&l.body);
                    self.inside.pop();
                    self.ranges.pop();
                }
                Stmt::If { cond, then, otherwise } => {
                    // A test once per iteration costs almost nothing.
                    if !self.inside.is_empty() {
                        self.conditions(TreePart::Cond(cond));
                    }
                    self.block(then);
                    self.block(otherwise);
                }
                Stmt::Store { value, .. } | Stmt::Update { value, .. } => self.conditions(TreePart::Expr(value)),
                Stmt::Alloc(_) | Stmt::Prefetch { .. } | Stmt::Barrier | Stmt::Wait(_) => {}
            }
        }
    }

    fn conditions(&mut self, node: TreePart) {
        match node {
            TreePart::Cond(Cond::Lt(a, b)) => self.less(&b.sub(a).offset(-1)),
            // An equality holds in at most one iteration, which is not worth a copy of the rest.
            TreePart::Cond(Cond::True | Cond::Eq(..) | Cond::Less(..)) => {}
            node => node.children().for_each(|child| self.conditions(child)),
        }
    }

    /// Records the iterations that leave `0 <= e` undecided.
    fn less(&mut self, e: &Index) {
        let step = e.coefficient(self.var);
        let rest = e.sub(&Index::from(self.var).scale(step));
        let (mut waits, mut is_repeated, mut is_alone) = (false, false, true);
        rest.for_each_var(&mut |v| match self.inside.iter().find(|(inner, _)| *inner == v) {
            Some((_, repeated)) => {
                waits |= !repeated;
                is_repeated |= repeated;
            }
            None => is_alone = false,
        });
        // A condition that also depends on an inner serial loop is tested once per iteration of that loop,
        // which is expensive only if each unrolled copy has a separate test.
        if step == 0 || rest.uses(self.var) || waits && !is_repeated {
            return;
        }
        let (Some(least), Some(most)) = (self.ranges.lower(&rest), self.ranges.upper(&rest)) else { return };
        // The condition is undecided from `start` to `end`: the first value of the variable for which it may
        // hold (or may fail, if `e` decreases), and the first for which it must hold (or fail).
        let (start, end) = if step > 0 {
            (-most.div_euclid(step), -least.div_euclid(step))
        } else {
            (least.div_euclid(-step) + 1, most.div_euclid(-step) + 1)
        };
        let (start, end) = (start.clamp(0, self.n), end.clamp(0, self.n));
        // The peeled iterations decide the condition on their own only if it depends on no outer loop.
        let few = if is_alone { (self.n / 4).max(1) } else { self.n / 4 };
        if end <= few && end <= self.n - start {
            self.front = self.front.max(end);
        } else if self.n - start <= few {
            self.back = self.back.min(start);
        }
    }
}
