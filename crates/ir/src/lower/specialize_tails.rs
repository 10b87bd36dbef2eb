//! Separates full tiles from tails.
//!
//! A split by a factor that does not divide the extent leaves an inner extent `min(f, rest)`. If that loop is
//! to be unrolled or vectorized, its extent must be a constant. The pass finds the loop that decides the
//! minimum and creates two versions:
//!
//! * if the deciding loop is serial, `for t in ceil(n / f) { … min(f, n − f·t) … }` becomes a loop over the
//!   full tiles followed by one tail;
//! * otherwise the loop's body becomes `if rest < f { tail } else { full }`.
//!
//! A tail's extent is a constant if the remainder by `f` is: 1009 rows in tiles of 8 leave exactly one. If
//! the extent is one of a few values, for example because a smaller last block has another tail than the
//! others, each value gets a version. A tail that depends on an open size has a version for each number of
//! rows below the tile's.
//!
//! A tile of few rows takes far longer a row than a full one: its sums depend on each other, and each row
//! reads the other operand anew. If an open size leaves a tail of at most a quarter of a tile, it is computed
//! together with the last full tile, as two tiles of about equal height: nine rows in tiles of eight are five
//! and four.

use crate::expr::Cond;
use crate::index::{Atom, Index, Ranges};
use crate::lower::simplify::simplify_block;
use crate::lower::{MOST_VERSIONS, leaves, version_loops};
use crate::program::{Loop, LoopId, LoopKind, Stmt};

/// Maximum number of versions of a tail that does not depend on an open size.
const MOST_TAILS: u32 = 3;

/// Maximum number of leaf statements after unrolling, over all versions of a tail that depends on an open
/// size.
const MOST_STATEMENTS: usize = 4096;

/// Specializes tails, in a block inside the loops of `ranges`.
pub fn specialize_tails(block: Vec<Stmt>, ranges: &mut Ranges) -> Vec<Stmt> {
    in_block(block, ranges, MOST_VERSIONS)
}

fn in_block(block: Vec<Stmt>, ranges: &mut Ranges, versions: u32) -> Vec<Stmt> {
    version_loops(block, ranges, versions, in_loop)
}

fn in_loop(l: Loop, ranges: &mut Ranges, versions: u32, out: &mut Vec<Stmt>) {
    let undecided = match l.kind {
        // An extent that such a loop decides becomes constant when the loop is unrolled or its lanes are
        // known.
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
        let halves = Halves::of(&l, &found, ranges);
        ranges.push(l.var, n_full.clone());
        let full = replace(&l.body, &found, &f.into(), ranges);
        let full = match &halves {
            Some(halves) => simplify_block(halves.or(full), ranges),
            None => full,
        };
        ranges.pop();
        // A tail exists only if 0 < rest < f.
        let tail = |short: &Index| -> Vec<Stmt> {
            l.body.iter().map(|s| replace_stmt(s, &found, short).substitute(l.var, &n_full)).collect()
        };
        let tail = by_value(&found, &rest, versions, ranges, tail);
        // A negative extent leaves no tail either.
        let cond = Cond::Lt(Index::from(-1), n_full.clone()).and(Cond::Lt(0.into(), rest.clone()));
        let cond = match &halves {
            Some(halves) => cond.and(halves.leave(&n_full, &rest)),
            None => cond,
        };
        let tail = simplify_block(vec![Stmt::If { cond, then: tail, otherwise: Vec::new() }], ranges);
        in_loop(Loop { var: l.var, extent: n_full, kind: l.kind, body: full }, ranges, versions, out);
        out.extend(in_block(tail, ranges, versions));
        return;
    }
    let halves = Halves::of(&l, &found, ranges);
    ranges.push(l.var, l.extent.clone());
    // In a nonempty tail, 0 < rest < f.
    let tail = |short: &Index| replace(&l.body, &found, short, &mut ranges.clone());
    let mut short = match ranges.lower(&found.rest) {
        Some(least) if least >= 1 => by_value(&found, &found.rest, versions, ranges, tail),
        _ => tail(&found.rest),
    };
    let mut full = replace(&l.body, &found, &found.full.into(), ranges);
    if let Some(halves) = halves {
        let cond = halves.leave(&l.var.into(), &found.rest);
        short = vec![Stmt::If { cond, then: short, otherwise: Vec::new() }];
        full = simplify_block(halves.or(full), ranges);
    }
    let cond = Cond::Lt(found.rest.clone(), found.full.into());
    let split = vec![Stmt::If { cond, then: short, otherwise: full }];
    ranges.pop();
    in_loop(Loop { var: l.var, extent: l.extent, kind: l.kind, body: split }, ranges, versions, out);
}

/// Extent `min(full, rest)` whose minimum depends on the current loop and its enclosing loops.
struct Undecided {
    atom: Atom,
    full: i64,
    rest: Index,
    /// Whether the extent is a number of vector lanes, which a mask can limit.
    is_of_lanes: bool,
}

impl Undecided {
    /// Returns `whole` if the loop counts the tiles of `whole`: `rest = whole − full·var`, extent =
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

/// Two tiles of about equal height in place of a full one and a short tail, in the iteration of the full one.
struct Halves {
    /// Condition that the tile is the last full one and that a short tail follows it in the same loop.
    cond: Cond,
    first: Vec<Stmt>,
    second: Vec<Stmt>,
    /// Maximum number of iterations of a short tail.
    most: i64,
}

impl Halves {
    /// Makes the tiles for a loop over tiles and the extent that it decides; `None` if no open size decides
    /// it, or if the body is not a tile of rows.
    fn of(l: &Loop, found: &Undecided, ranges: &Ranges) -> Option<Halves> {
        let Undecided { full, rest, is_of_lanes, .. } = found;
        let most = full / 4;
        if *is_of_lanes || most == 0 || rest.coefficient(l.var) != -full || !ranges.is_open(rest) {
            return None;
        }
        let values: Vec<i64> = (1..=most).filter(|more| may_be(rest, full + more)).collect();
        let halves = |more: &i64| {
            let height = (full + more + 1) / 2;
            let tile = |start, height| TileOfRows { tiles: l.var, found, start, height }.block(&l.body, None);
            Some((tile(0, height)?, tile(height, full + more - height)?))
        };
        let all: Option<Vec<_>> = values.iter().map(halves).collect();
        let (first, second): (Vec<_>, Vec<_>) = all?.into_iter().unzip();
        let n_leaves = |tiles: &[Vec<Stmt>]| tiles.iter().map(|tile| leaves(tile)).sum::<usize>();
        if n_leaves(&first).max(n_leaves(&second)) > MOST_STATEMENTS {
            return None;
        }
        let of = |tiles: &[Vec<Stmt>]| {
            let tile = |more: &Index| {
                let at = values.iter().position(|value| more.as_const() == Some(*value));
                tiles[at.expect("invariant: there is a tile for each of the values")].clone()
            };
            by_choice(&values, &rest.offset(-full), &tile)
        };
        let cond = Cond::Lt((*full).into(), rest.clone())
            .and(Cond::Lt(rest.clone(), (full + most + 1).into()))
            .and(Cond::Lt(Index::from(l.var).offset(1), l.extent.clone()));
        Some(Halves { cond, first: of(&first), second: of(&second), most })
    }

    /// The two tiles if a short tail follows, else the full one. Each tile is in a block of its own, as both
    /// allocate the same temporaries.
    fn or(&self, full: Vec<Stmt>) -> Vec<Stmt> {
        let (cond, first, second) = (self.cond.clone(), self.first.clone(), self.second.clone());
        let first = Stmt::If { cond: cond.clone(), then: first, otherwise: Vec::new() };
        vec![first, Stmt::If { cond, then: second, otherwise: full }]
    }

    /// Condition that a tail of `rest` iterations behind `n_full` full tiles is computed by itself.
    fn leave(&self, n_full: &Index, rest: &Index) -> Cond {
        let is_short = Cond::Lt(rest.clone(), (self.most + 1).into());
        Cond::Not(Box::new(Cond::Lt(0.into(), n_full.clone()).and(is_short)))
    }
}

/// Tile of `height` rows that begins `start` rows into a full one.
struct TileOfRows<'a> {
    /// Variable that counts tiles.
    tiles: LoopId,
    found: &'a Undecided,
    start: i64,
    height: i64,
}

impl TileOfRows<'_> {
    /// Rewrites a block, in the loop `row` over the rows of a tile; `None` if not all of its work belongs to
    /// rows.
    fn block(&self, block: &[Stmt], row: Option<LoopId>) -> Option<Vec<Stmt>> {
        block.iter().map(|s| self.stmt(s, row)).collect()
    }

    fn stmt(&self, stmt: &Stmt, row: Option<LoopId>) -> Option<Stmt> {
        let rows = Index::atom(self.found.atom.clone());
        match stmt {
            Stmt::For(l) if l.extent == rows => {
                let body = self.block(&l.body, row.xor(Some(l.var)))?;
                row.is_none().then(|| Stmt::For(Loop { extent: self.height.into(), body, ..l.clone() }))
            }
            Stmt::For(l) => {
                let (extent, body) = (self.index(&l.extent, row)?, self.block(&l.body, row)?);
                Some(Stmt::For(Loop { extent, body, ..l.clone() }))
            }
            Stmt::If { cond, then, otherwise } => {
                let (then, otherwise) = (self.block(then, row)?, self.block(otherwise, row)?);
                let own = Stmt::If { cond: cond.clone(), then: Vec::new(), otherwise: Vec::new() };
                let Stmt::If { cond, .. } = self.own(&own, row)? else { unreachable!("an `if` stays one") };
                Some(Stmt::If { cond, then, otherwise })
            }
            Stmt::Prefetch { .. } if row.is_none() => Some(stmt.clone()),
            _ => self.own(stmt, row),
        }
    }

    /// Rewrites a statement without nested ones.
    fn own(&self, stmt: &Stmt, row: Option<LoopId>) -> Option<Stmt> {
        let mut is_of_rows = true;
        let new = stmt.map_index(&mut |e| {
            self.index(e, row).unwrap_or_else(|| {
                is_of_rows = false;
                e.clone()
            })
        });
        is_of_rows.then_some(new)
    }

    /// Makes an index that of the same row, counted from the beginning of the full tile.
    fn index(&self, e: &Index, row: Option<LoopId>) -> Option<Index> {
        let mut is_of_rows = true;
        e.rewrite(&mut |atom| {
            is_of_rows &= *atom != self.found.atom;
            None
        });
        let Some(row) = row else { return (is_of_rows && !e.uses(self.tiles)).then(|| e.clone()) };
        let (full, at) = (self.found.full, Index::from(row).offset(self.start));
        let (tile, within) = (Index::from(self.tiles).add(&at.floor_div(full)), at.modulo(full));
        is_of_rows.then(|| match self.start {
            0 => e.clone(),
            _ => e.substitute(row, &within).substitute(self.tiles, &tile),
        })
    }
}

/// Emits a tail of `rest` iterations, at least one and fewer than `full`: a version for each possible number
/// if there are few or an open size decides, else a single version of variable extent.
fn by_value(
    found: &Undecided,
    rest: &Index,
    versions: u32,
    ranges: &Ranges,
    tail: impl Fn(&Index) -> Vec<Stmt>,
) -> Vec<Stmt> {
    let full = found.full;
    let known = if full == 2 { Some(1) } else { rest.residue(full).filter(|&r| r > 0) };
    let all = || ranges.is_open(rest).then(|| (1..full).collect());
    let mut values = known.map(|one| vec![one]).or_else(|| ranges.values(rest)).or_else(all).unwrap_or_default();
    values.retain(|&value| 0 < value && value < full && may_be(rest, value));
    if ranges.is_open(rest) && found.is_of_lanes && values.len() > MOST_TAILS as usize {
        return tail(rest);
    }
    if ranges.is_open(rest)
        && let Some(largest) = values.last()
        && leaves(&tail(&(*largest).into())).saturating_mul(values.len()) <= MOST_STATEMENTS
    {
        return by_choice(&values, rest, &tail);
    }
    let Some(last) = values.pop().filter(|_| values.len() < versions.min(MOST_TAILS) as usize) else {
        return tail(rest);
    };
    values.into_iter().rev().fold(tail(&last.into()), |otherwise, value| {
        let cond = Cond::Eq(rest.clone(), value.into());
        vec![Stmt::If { cond, then: tail(&value.into()), otherwise }]
    })
}

/// Whether the remainders of an index by powers of two permit a value.
fn may_be(e: &Index, value: i64) -> bool {
    [2, 4, 8, 16, 32].into_iter().all(|by| e.residue(by).is_none_or(|rest| rest == value.rem_euclid(by)))
}

/// Emits versions of a tail for values in ascending order, selected by binary search.
fn by_choice(values: &[i64], rest: &Index, tail: &impl Fn(&Index) -> Vec<Stmt>) -> Vec<Stmt> {
    match values {
        [] => Vec::new(),
        [only] => tail(&(*only).into()),
        _ => {
            let (less, more) = values.split_at(values.len() / 2);
            let cond = Cond::Lt(rest.clone(), more[0].into());
            vec![Stmt::If { cond, then: by_choice(less, rest, tail), otherwise: by_choice(more, rest, tail) }]
        }
    }
}

fn replace(block: &[Stmt], found: &Undecided, by: &Index, ranges: &mut Ranges) -> Vec<Stmt> {
    simplify_block(block.iter().map(|s| replace_stmt(s, found, by)).collect(), ranges)
}

fn replace_stmt(stmt: &Stmt, found: &Undecided, by: &Index) -> Stmt {
    stmt.map_index(&mut |i| i.rewrite(&mut |atom| (*atom == found.atom).then(|| by.clone())))
}

/// Finds the first min in an extent of an unrolled or vectorized loop that `var` decides.
fn undecided_min(block: &[Stmt], var: LoopId, ranges: &Ranges) -> Option<Undecided> {
    let mut known: Vec<LoopId> = ranges.loops().iter().map(|(v, _)| *v).collect();
    known.push(var);
    TailSearch { var, known, repeated: Vec::new() }.block(block)
}

struct TailSearch {
    /// Variable of the current loop.
    var: LoopId,
    /// Variables of the current loop and its enclosing loops.
    known: Vec<LoopId>,
    /// Unrolled and vectorized loops between the current loop and the statement searched; extents that they
    /// decide need no version.
    repeated: Vec<LoopId>,
}

impl TailSearch {
    fn block(&mut self, block: &[Stmt]) -> Option<Undecided> {
        block.iter().find_map(|s| {
            let repeats = match s {
                Stmt::For(l) if matches!(l.kind, LoopKind::Unrolled | LoopKind::Vectorized) => {
                    if let Some(found) = self.index(&l.extent) {
                        return Some(Undecided { is_of_lanes: l.kind == LoopKind::Vectorized, ..found });
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
                    let rest = rest.as_ref().clone();
                    decides_here.then(|| Undecided { atom: atom.clone(), full, rest, is_of_lanes: false })
                } else if decided_later {
                    // An inner loop decides, even if its own bound is not constant.
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
