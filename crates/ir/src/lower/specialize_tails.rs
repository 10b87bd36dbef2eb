//! Separates full tiles from tails.
//!
//! A split whose factor does not divide leaves an inner extent `min(f, rest)`. Where that loop is to be
//! unrolled or vectorized, its extent must be a constant. The pass finds the loop that decides which of the
//! two it is and makes two versions of what follows:
//!
//! * `for t in ceil(n / f) { … min(f, n − f·t) … }` becomes a loop over the full tiles and one tail after it,
//!   where the deciding loop is serial;
//! * otherwise the loop's body becomes `if rest < f { tail } else { full }`.
//!
//! A tail's extent is a constant wherever the remainder by `f` is: 1009 rows in tiles of 8 leave exactly one.

use crate::expr::Cond;
use crate::index::{Atom, Index, Ranges};
use crate::lower::simplify::simplify_block;
use crate::lower::{MOST_VERSIONS, version_loops};
use crate::program::{Loop, LoopId, LoopKind, Stmt};

/// The pass.
pub fn specialize_tails(block: Vec<Stmt>) -> Vec<Stmt> {
    in_block(block, &mut Ranges::default(), MOST_VERSIONS)
}

fn in_block(block: Vec<Stmt>, ranges: &mut Ranges, versions: u32) -> Vec<Stmt> {
    version_loops(block, ranges, versions, in_loop)
}

fn in_loop(l: Loop, ranges: &mut Ranges, versions: u32, out: &mut Vec<Stmt>) {
    let undecided = match l.kind {
        // What such a loop decides is constant once it is repeated or its lanes are known.
        LoopKind::Unrolled | LoopKind::Vectorized => None,
        _ if versions <= 1 => None,
        _ => undecided_min(&l.body, l.var, ranges),
    };
    let Some(found) = undecided else {
        ranges.push(l.var, l.extent.clone());
        let body = in_block(l.body, ranges, versions);
        ranges.pop();
        if !body.is_empty() {
            out.push(Stmt::For(Loop { var: l.var, extent: l.extent, kind: l.kind, body }));
        }
        return;
    };
    let versions = versions / 2;
    if l.kind == LoopKind::Serial
        && let Some(whole) = found.peels(&l, ranges)
    {
        let f = found.full;
        let (n_full, rest) = (ranges.simplify(&whole.floor_div(f)), ranges.simplify(&whole.modulo(f)));
        ranges.push(l.var, n_full.clone());
        let full = replace(&l.body, &found, &f.into(), ranges);
        ranges.pop();
        // There is a tail only where 0 < rest < f.
        let short = if f == 2 { Index::from(1) } else { rest.clone() };
        let tail: Vec<Stmt> =
            l.body.iter().map(|s| replace_stmt(s, &found, &short).substitute(l.var, &n_full)).collect();
        // A negative extent leaves no tail either.
        let cond = Cond::Lt(Index::from(-1), n_full.clone()).and(Cond::Lt(0.into(), rest));
        let tail = simplify_block(vec![Stmt::If { cond, then: tail, otherwise: Vec::new() }], ranges);
        in_loop(Loop { var: l.var, extent: n_full, kind: l.kind, body: full }, ranges, versions, out);
        out.extend(in_block(tail, ranges, versions));
        return;
    }
    ranges.push(l.var, l.extent.clone());
    // In the tail 0 < rest < f, so a known remainder is the rest itself; an empty tail would need rest ≤ 0.
    let known = if found.full == 2 { Some(1) } else { found.rest.residue(found.full) };
    let short = match known {
        Some(r) if ranges.lower(&found.rest).is_some_and(|l| l >= 1) => Index::from(r),
        _ => found.rest.clone(),
    };
    let split = vec![Stmt::If {
        cond: Cond::Lt(found.rest.clone(), found.full.into()),
        then: replace(&l.body, &found, &short, ranges),
        otherwise: replace(&l.body, &found, &found.full.into(), ranges),
    }];
    ranges.pop();
    in_loop(Loop { var: l.var, extent: l.extent, kind: l.kind, body: split }, ranges, versions, out);
}

/// `min(full, rest)`, where which of the two it is depends on the loop at hand and loops outside it.
struct Undecided {
    atom: Atom,
    full: i64,
    rest: Index,
}

impl Undecided {
    /// `whole` where the loop counts the tiles of `whole`: `rest = whole − full·var`, extent =
    /// ceil(whole / full).
    fn peels(&self, l: &Loop, ranges: &Ranges) -> Option<Index> {
        if self.rest.coefficient(l.var) != -self.full {
            return None;
        }
        let whole = self.rest.add(&Index::from(l.var).scale(self.full));
        let n_tiles = whole.offset(self.full - 1).floor_div(self.full);
        (!whole.uses(l.var) && ranges.simplify(&n_tiles) == l.extent).then_some(whole)
    }
}

fn replace(block: &[Stmt], found: &Undecided, by: &Index, ranges: &mut Ranges) -> Vec<Stmt> {
    simplify_block(block.iter().map(|s| replace_stmt(s, found, by)).collect(), ranges)
}

fn replace_stmt(stmt: &Stmt, found: &Undecided, by: &Index) -> Stmt {
    stmt.map_index(&mut |i| i.rewrite(&mut |atom| (*atom == found.atom).then(|| by.clone())))
}

/// The first min in an extent of an unrolled or vectorized loop that `var` decides.
fn undecided_min(block: &[Stmt], var: LoopId, ranges: &Ranges) -> Option<Undecided> {
    let mut known: Vec<LoopId> = ranges.loops().iter().map(|(v, _)| *v).collect();
    known.push(var);
    Search { var, known, repeated: Vec::new() }.block(block)
}

struct Search {
    /// The loop at hand.
    var: LoopId,
    /// It and the loops outside it.
    known: Vec<LoopId>,
    /// Unrolled and vectorized loops between it and the place searched: what they decide needs no version.
    repeated: Vec<LoopId>,
}

impl Search {
    fn block(&mut self, block: &[Stmt]) -> Option<Undecided> {
        block.iter().find_map(|s| {
            let repeats = match s {
                Stmt::For(l) if matches!(l.kind, LoopKind::Unrolled | LoopKind::Vectorized) => {
                    if let Some(found) = self.index(&l.extent) {
                        return Some(found);
                    }
                    self.repeated.push(l.var);
                    true
                }
                _ => false,
            };
            let found = s.blocks().find_map(|b| self.block(b));
            if repeats {
                self.repeated.pop();
            }
            found
        })
    }

    fn index(&self, e: &Index) -> Option<Undecided> {
        e.terms().iter().find_map(|(atom, _)| match atom {
            Atom::Min(a, b) => {
                let (full, rest) = match (a.as_const(), b.as_const()) {
                    (Some(c), None) => (c, b),
                    (None, Some(c)) => (c, a),
                    _ => return self.index(a).or_else(|| self.index(b)),
                };
                let (mut all_known, mut decided_later) = (true, false);
                rest.for_each_var(&mut |v| {
                    if !self.known.contains(&v) {
                        all_known = false;
                        decided_later |= !self.repeated.contains(&v);
                    }
                });
                if all_known {
                    let decides_here = rest.uses(self.var) && full >= 1;
                    decides_here.then(|| Undecided { atom: atom.clone(), full, rest: rest.as_ref().clone() })
                } else if decided_later {
                    // A loop further in decides; whether its own bound is constant does not matter.
                    None
                } else {
                    self.index(rest)
                }
            }
            Atom::FloorDiv(x, _) | Atom::Mod(x, _) => self.index(x),
            Atom::Max(a, b) => self.index(a).or_else(|| self.index(b)),
            Atom::Var(_) => None,
        })
    }
}
