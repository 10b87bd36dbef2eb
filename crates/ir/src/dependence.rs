//! Dependence analysis: whether different iterations of a loop access the same element.

use crate::index::{Atom, Index, Ranges, gcd};
use crate::program::{BufferId, Loop, LoopId, Stmt};

/// Pair of accesses that may touch the same element in different iterations of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataRace<'a> {
    /// Buffer that both access.
    pub buffer: BufferId,
    /// Subscripts of the access that writes.
    pub write: &'a [Index],
    /// Subscripts of the other access, a read or a write; equal to `write` if an access conflicts with
    /// itself.
    pub other: &'a [Index],
}

/// Finds accesses that keep the iterations of a loop from running in parallel, regardless of the loop's
/// current kind; `None` if no two iterations conflict.
///
/// `outer` holds the enclosing loops, outermost first. All buffers written inside are considered, except
/// temporaries allocated inside. The analysis is conservative: a reported race need not be real, see
/// [`are_disjoint`].
pub fn find_race<'a>(l: &'a Loop, outer: &Ranges) -> Option<DataRace<'a>> {
    if outer.upper(&l.extent).is_some_and(|u| u <= 1) {
        return None;
    }
    let mut ranges = outer.clone();
    ranges.push(l.var, l.extent.clone());
    let mut shared = AccessGatherer { accesses: Vec::new(), inner: Vec::new() };
    shared.block(&l.body, &mut ranges);
    let meets = |a: &Access<'_>, b: &Access<'_>| {
        a.buffer == b.buffer
            && !are_disjoint(Subscripts::new(a.index, &a.ranges), Subscripts::new(b.index, &b.ranges), l.var)
    };
    shared.accesses.iter().enumerate().filter(|(_, a)| a.writes).find_map(|(i, a)| {
        // Each pair of writes is checked once.
        let mut others = shared.accesses.iter().enumerate().filter(|(j, b)| !b.writes || *j >= i);
        let (_, b) = others.find(|(_, b)| meets(a, b))?;
        Some(DataRace { buffer: a.buffer, write: a.index, other: b.index })
    })
}

/// Access to a buffer that outlives one iteration.
struct Access<'a> {
    buffer: BufferId,
    index: &'a [Index],
    ranges: Ranges,
    writes: bool,
}

/// Gathers the accesses inside a loop to buffers that the loop writes and that outlive one iteration.
struct AccessGatherer<'a> {
    accesses: Vec<Access<'a>>,
    /// Temporaries allocated inside the loop.
    inner: Vec<BufferId>,
}

impl<'a> AccessGatherer<'a> {
    fn block(&mut self, block: &'a [Stmt], ranges: &mut Ranges) {
        let mut written = Vec::new();
        for stmt in block {
            stmt.walk(&mut |s| match s {
                Stmt::Alloc(b) => self.inner.push(*b),
                s => written.extend(s.own_write().map(|(b, _)| b)),
            });
        }
        written.retain(|b| !self.inner.contains(b));
        self.gather(block, &written, ranges);
    }

    fn gather(&mut self, block: &'a [Stmt], written: &[BufferId], ranges: &mut Ranges) {
        for stmt in block {
            each_own_access(stmt, &mut |buffer, index, writes| {
                let known = |a: &Access<'_>| {
                    a.buffer == buffer && a.writes == writes && a.index == index && a.ranges.loops() == ranges.loops()
                };
                if written.contains(&buffer) && !self.accesses.iter().any(known) {
                    self.accesses.push(Access { buffer, index, ranges: ranges.clone(), writes });
                }
            });
            stmt.each_block(ranges, |block, ranges| self.gather(block, written, ranges));
        }
    }
}

/// Calls `visit` for the elements that a statement itself writes (`true`) and reads (`false`), keeping the
/// lifetime of their subscripts.
///
/// An update reads the element that it writes, but is visited as a write only.
fn each_own_access<'a>(stmt: &'a Stmt, visit: &mut dyn FnMut(BufferId, &'a [Index], bool)) {
    stmt.own_nodes().for_each(|node| node.for_each_load(&mut |buffer, index| visit(buffer, index, false)));
    if let Some((buffer, index)) = stmt.own_write() {
        visit(buffer, index, true);
    }
}

/// Whether different iterations of the loop over `var` write disjoint elements with this access; false if
/// that cannot be proven.
///
/// `ranges` holds all loops around the access, outermost first: those before `var` have the same values in
/// both iterations, those after it may have any. Conditions around the access are not considered.
pub fn writes_are_disjoint(index: &[Index], var: LoopId, ranges: &Ranges) -> bool {
    let own = Subscripts::new(index, ranges);
    are_disjoint(own, own, var)
}

/// Subscripts of an access, with the ranges of all loops around it.
#[derive(Clone, Copy)]
pub struct Subscripts<'a> {
    index: &'a [Index],
    ranges: &'a Ranges,
}

impl<'a> Subscripts<'a> {
    /// Subscripts inside loops of these ranges.
    pub fn new(index: &'a [Index], ranges: &'a Ranges) -> Subscripts<'a> {
        Subscripts { index, ranges }
    }
}

/// Whether two accesses to one buffer are disjoint in different iterations of `var`; false if that cannot be
/// proven.
///
/// Assume a conflict, so that each subscript of `a` equals that of `b`. In an equation
/// `c·T + rest = c·T′ + rest′` where the rests differ by less than `|c|`, `T = T′` follows. Loop variables
/// outside `var` are equal from the start; terms found equal cancel in the other equations; and two indices
/// are equal if their quotients and remainders by the same divisor are, which undoes the fusion of loops. If
/// `var` itself is found equal, the accesses conflict within one iteration only.
pub fn are_disjoint(a: Subscripts, b: Subscripts, var: LoopId) -> bool {
    if are_unequal(a, b, var) {
        return true;
    }
    // Quotients and remainders of one number may have been simplified separately: `floor((8 x + y) / 32)` is
    // `floor(x / 4)` beside `x mod 4` if y is below 8.
    let [left, right] = [a, b].map(|of| of.index.iter().map(|i| reduced(i, of.ranges)).collect::<Vec<_>>());
    (left != a.index || right != b.index)
        && are_unequal(Subscripts::new(&left, a.ranges), Subscripts::new(&right, b.ranges), var)
}

/// Drops the terms of divisions and remainders that are too small to affect the result: `(16·t + l) // 128`
/// with l below 16 becomes `t // 8`.
pub fn reduced(index: &Index, ranges: &Ranges) -> Index {
    let is_plain = |i: &Index| i.terms().iter().all(|(atom, _)| matches!(atom, Atom::Var(_)));
    if is_plain(index) {
        return index.clone();
    }
    index.rewrite(&mut |atom| {
        let (Atom::FloorDiv(x, d) | Atom::Mod(x, d)) = atom else { return None };
        x.terms().iter().find_map(|(_, c)| {
            let common = gcd(c.unsigned_abs(), d.unsigned_abs()) as i64;
            if common <= 1 || *d < 1 {
                return None;
            }
            let (whole, rest) = x.multiples(common);
            let is_small = !rest.terms().is_empty()
                && ranges.lower(&rest).is_some_and(|least| least >= 0)
                && ranges.upper(&rest).is_some_and(|most| most < common);
            is_small.then(|| match atom {
                Atom::FloorDiv(..) => whole.floor_div(d / common),
                _ => whole.modulo(d / common).scale(common).add(&rest),
            })
        })
    })
}

fn are_unequal(a: Subscripts, b: Subscripts, var: LoopId) -> bool {
    let Some(depth) = a.ranges.loops().iter().position(|(v, _)| *v == var) else { return false };
    let mut equal = Equal { vars: a.ranges.loops()[..depth].iter().map(|(v, _)| *v).collect(), atoms: Vec::new() };
    let mut equations = a.index.iter().cloned().zip(b.index.iter().cloned()).collect::<Vec<_>>();
    loop {
        let n_known = equal.vars.len() + equal.atoms.len();
        for (left, right) in &equations {
            equal.learn((left, a.ranges), (right, b.ranges));
        }
        if equal.vars.contains(&var) {
            return true;
        }
        if equal.vars.len() + equal.atoms.len() == n_known {
            return false;
        }
        for i in 0..equal.atoms.len() {
            if let Atom::Mod(x, d) = &equal.atoms[i]
                && equal.has_all((&x.floor_div(*d), a.ranges), b.ranges)
                && !equations.iter().any(|(left, _)| *left == **x)
            {
                equations.push(((**x).clone(), (**x).clone()));
            }
        }
    }
}

/// Values known to be equal in two iterations.
struct Equal {
    vars: Vec<LoopId>,
    atoms: Vec<Atom>,
}

impl Equal {
    fn has(&self, atom: &Atom) -> bool {
        if self.atoms.contains(atom) {
            return true;
        }
        let mut all = true;
        Index::atom(atom.clone()).for_each_var(&mut |v| all &= self.vars.contains(&v));
        all
    }

    /// Whether all atoms of an index, as given or [reduced], are known to be equal.
    fn has_all(&self, (index, left): (&Index, &Ranges), right: &Ranges) -> bool {
        let all = |index: &Index| index.terms().iter().all(|(atom, _)| self.has(atom));
        all(index) || {
            let shorter = reduced(index, left);
            shorter != *index && shorter == reduced(index, right) && all(&shorter)
        }
    }

    /// Derives equal atoms from the equality of two indices.
    fn learn(&mut self, a: (&Index, &Ranges), b: (&Index, &Ranges)) {
        let (mut left, mut right) = (a.0.clone(), b.0.clone());
        for (atom, c) in a.0.terms() {
            if has_term(b.0, atom, *c) && self.has(atom) {
                let term = Index::atom(atom.clone()).scale(*c);
                (left, right) = (left.sub(&term), right.sub(&term));
            }
        }
        while let Some(atom) = self.dominant((&left, a.1), (&right, b.1)) {
            let c = left.terms().iter().find(|(x, _)| *x == atom).expect("the atom is of this index").1;
            let term = Index::atom(atom.clone()).scale(c);
            (left, right) = (left.sub(&term), right.sub(&term));
            match atom {
                Atom::Var(v) => self.vars.push(v),
                atom => self.atoms.push(atom),
            }
        }
    }

    /// Atom of both indices whose coefficient exceeds the largest possible difference of the remaining terms.
    fn dominant(&self, a: (&Index, &Ranges), b: (&Index, &Ranges)) -> Option<Atom> {
        a.0.terms().iter().filter(|(atom, c)| has_term(b.0, atom, *c)).find_map(|(atom, c)| {
            let term = Index::atom(atom.clone()).scale(*c);
            let (left, right) = (a.0.sub(&term), b.0.sub(&term));
            let apart = a.1.upper(&left)?.checked_sub(b.1.lower(&right)?)?;
            let apart_other_way = b.1.upper(&right)?.checked_sub(a.1.lower(&left)?)?;
            (i128::from(apart.max(apart_other_way)) < i128::from(c.unsigned_abs())).then(|| atom.clone())
        })
    }
}

fn has_term(index: &Index, atom: &Atom, c: i64) -> bool {
    index.terms().iter().any(|(a, k)| a == atom && *k == c)
}
