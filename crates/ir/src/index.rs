//! Integer index expressions: loop extents, array subscripts and guards.
//!
//! An [`Index`] is kept as a canonical sum, `constant + Σ coefficient · atom`, so that equality, substitution
//! and the stride of a loop in an access are lookups rather than rewriting problems.

use std::sync::Arc;

use num_traits::PrimInt;
use smallvec::{SmallVec, smallvec};

use crate::ids::LoopId;

/// Greatest common divisor of two numbers that are not negative; with 0, the other number.
pub fn gcd<T: PrimInt>(a: T, b: T) -> T {
    if b.is_zero() { a } else { gcd(b, a % b) }
}

/// Index expression in canonical form, `constant + Σ coefficient · atom`: atoms sorted and distinct,
/// coefficients nonzero.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Index {
    /// Terms, stored inline if they are few, as is usual: indices are created and copied by the thousand.
    terms: SmallVec<[(Atom, i64); 3]>,
    constant: i64,
}

/// Indivisible part of an [`Index`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Atom {
    /// Value of a loop variable.
    Var(LoopId),
    /// Floor division by a constant.
    FloorDiv(Arc<Index>, i64),
    /// Remainder of floor division: in `0..divisor` for a positive divisor.
    Mod(Arc<Index>, i64),
    /// Minimum of two.
    Min(Arc<Index>, Arc<Index>),
    /// Maximum of two.
    Max(Arc<Index>, Arc<Index>),
}

impl From<i64> for Index {
    fn from(constant: i64) -> Index {
        Index { terms: SmallVec::new(), constant }
    }
}

impl From<LoopId> for Index {
    fn from(var: LoopId) -> Index {
        Index::atom(Atom::Var(var))
    }
}

impl Atom {
    /// Whether `var` occurs anywhere in the atom.
    pub fn uses(&self, var: LoopId) -> bool {
        match self {
            Atom::Var(v) => *v == var,
            Atom::FloorDiv(e, _) | Atom::Mod(e, _) => e.uses(var),
            Atom::Min(a, b) | Atom::Max(a, b) => a.uses(var) || b.uses(var),
        }
    }
}

impl Index {
    /// Wraps a single atom, without simplification.
    pub fn atom(atom: Atom) -> Index {
        Index { terms: smallvec![(atom, 1)], constant: 0 }
    }

    /// Terms, sorted by atom.
    pub fn terms(&self) -> &[(Atom, i64)] {
        &self.terms
    }

    /// Constant term.
    pub fn constant(&self) -> i64 {
        self.constant
    }

    /// Value of a constant index; `None` if the index has atoms.
    pub fn as_const(&self) -> Option<i64> {
        self.terms.is_empty().then_some(self.constant)
    }

    /// Coefficient of a loop variable as a direct term (not inside a division, remainder, min or max); 0 if
    /// there is no such term.
    pub fn coefficient(&self, var: LoopId) -> i64 {
        self.terms.iter().find(|(atom, _)| *atom == Atom::Var(var)).map_or(0, |(_, c)| *c)
    }

    /// Whether `var` occurs anywhere in the expression.
    pub fn uses(&self, var: LoopId) -> bool {
        self.terms.iter().any(|(atom, _)| atom.uses(var))
    }

    /// Calls `visit` for every loop variable in the expression, repeats included.
    pub fn for_each_var(&self, visit: &mut dyn FnMut(LoopId)) {
        for (atom, _) in &self.terms {
            match atom {
                Atom::Var(v) => visit(*v),
                Atom::FloorDiv(e, _) | Atom::Mod(e, _) => e.for_each_var(visit),
                Atom::Min(a, b) | Atom::Max(a, b) => {
                    a.for_each_var(visit);
                    b.for_each_var(visit);
                }
            }
        }
    }

    fn add_term(&mut self, atom: &Atom, coefficient: i64) {
        match self.terms.binary_search_by(|(a, _)| a.cmp(atom)) {
            Ok(at) => {
                self.terms[at].1 = self.terms[at].1.wrapping_add(coefficient);
                if self.terms[at].1 == 0 {
                    self.terms.remove(at);
                }
            }
            Err(at) if coefficient != 0 => self.terms.insert(at, (atom.clone(), coefficient)),
            Err(_) => {}
        }
    }

    /// `self + other`.
    pub fn add(&self, other: &Index) -> Index {
        self.add_scaled(other, 1)
    }

    /// `self + factor · other`, in one merge of both term lists.
    pub fn add_scaled(&self, other: &Index, factor: i64) -> Index {
        let constant = self.constant.wrapping_add(other.constant.wrapping_mul(factor));
        if other.terms.is_empty() || factor == 0 {
            return Index { terms: self.terms.clone(), constant };
        }
        let mut terms = SmallVec::with_capacity(self.terms.len() + other.terms.len());
        let mut mine = self.terms.iter().peekable();
        for (atom, c) in &other.terms {
            while let Some(smaller) = mine.next_if(|(a, _)| a < atom) {
                terms.push(smaller.clone());
            }
            let same = mine.next_if(|(a, _)| a == atom).map_or(0, |(_, c)| *c);
            let c = same.wrapping_add(c.wrapping_mul(factor));
            if c != 0 {
                terms.push((atom.clone(), c));
            }
        }
        terms.extend(mine.cloned());
        let mut sum = Index { terms, constant };
        sum.join_remainders();
        sum
    }

    /// Replaces multiples of `d·floor(x / d) + x mod d` with those of `x`.
    fn join_remainders(&mut self) {
        let joined = |sum: &Index| {
            sum.terms.iter().find_map(|(remainder, c)| {
                let Atom::Mod(x, d) = remainder else { return None };
                let quotient = x.floor_div(*d);
                let ([(quotient, 1)], 0, 1..) = (quotient.terms(), quotient.constant, *d) else { return None };
                let by = c.checked_mul(*d)?;
                sum.terms.contains(&(quotient.clone(), by)).then(|| (remainder.clone(), quotient.clone(), x.scale(*c)))
            })
        };
        while let Some((remainder, quotient, whole)) = joined(self) {
            self.terms.retain(|(atom, _)| *atom != remainder && *atom != quotient);
            self.constant = self.constant.wrapping_add(whole.constant);
            whole.terms.iter().for_each(|(atom, c)| self.add_term(atom, *c));
        }
    }

    /// `self − other`.
    pub fn sub(&self, other: &Index) -> Index {
        self.add_scaled(other, -1)
    }

    /// `self − other` if the difference is a constant.
    fn distance(&self, other: &Index) -> Option<i64> {
        if self.terms == other.terms {
            return Some(self.constant.wrapping_sub(other.constant));
        }
        // The difference of two minima is constant if their operands differ by one constant.
        if let [[(Atom::Min(a, b), 1)], [(Atom::Min(c, d), 1)]] = [&self.terms[..], &other.terms[..]] {
            let apart = a.distance(c).filter(|apart| b.distance(d) == Some(*apart))?;
            return Some(apart.wrapping_add(self.constant.wrapping_sub(other.constant)));
        }
        // Sums with different terms differ by a constant only if remainders cancel quotients.
        let is_plain = |e: &Index| !e.terms.iter().any(|(atom, _)| matches!(atom, Atom::FloorDiv(..) | Atom::Mod(..)));
        if is_plain(self) && is_plain(other) { None } else { self.sub(other).as_const() }
    }

    /// `self · factor`.
    pub fn scale(&self, factor: i64) -> Index {
        if factor == 0 {
            return Index::from(0);
        }
        Index {
            terms: self.terms.iter().map(|(a, c)| (a.clone(), c.wrapping_mul(factor))).collect(),
            constant: self.constant.wrapping_mul(factor),
        }
    }

    /// `self + constant`.
    pub fn offset(&self, constant: i64) -> Index {
        Index { terms: self.terms.clone(), constant: self.constant.wrapping_add(constant) }
    }

    /// Substitutes the variables that have known values.
    pub fn with_values(&self, value: &dyn Fn(LoopId) -> Option<i64>) -> Index {
        if !self.terms.iter().all(|(atom, _)| matches!(atom, Atom::Var(_))) {
            return self.rewrite(&mut |atom| match atom {
                Atom::Var(v) => value(*v).map(Index::from),
                Atom::FloorDiv(..) | Atom::Mod(..) | Atom::Min(..) | Atom::Max(..) => None,
            });
        }
        let mut constant = self.constant;
        let mut is_unknown = |atom: &Atom, c: i64| match atom {
            Atom::Var(v) => match value(*v) {
                Some(x) => {
                    constant = constant.wrapping_add(c.wrapping_mul(x));
                    false
                }
                None => true,
            },
            Atom::FloorDiv(..) | Atom::Mod(..) | Atom::Min(..) | Atom::Max(..) => true,
        };
        let terms = self.terms.iter().filter(|(atom, c)| is_unknown(atom, *c)).cloned().collect();
        Index { terms, constant }
    }

    /// `floor(self / divisor)`, with multiples of the divisor taken out of the division.
    ///
    /// A divisor below one is kept as written, so that an invalid program can be represented, printed and
    /// rejected.
    pub fn floor_div(&self, divisor: i64) -> Index {
        if divisor == 1 {
            return self.clone();
        }
        if divisor < 1 {
            return Index::atom(Atom::FloorDiv(Arc::new(self.clone()), divisor));
        }
        let (whole, rest) = self.multiples(divisor);
        match (rest.terms.as_slice(), rest.constant) {
            ([], c) => whole.offset(c.div_euclid(divisor)),
            _ => match rest.without_division(divisor) {
                Some((dividend, divisor)) => whole.add(&dividend.floor_div(divisor)),
                None => whole.add(&Index::atom(Atom::FloorDiv(Arc::new(rest), divisor))),
            },
        }
    }

    /// Combines two nested divisions into a single dividend and divisor:
    /// `floor((x + floor(y / a)) / b) = floor((a x + y) / (a b))`.
    ///
    /// `None` if the sum has no division or several, or if numbers become too large.
    fn without_division(&self, divisor: i64) -> Option<(Index, i64)> {
        let mut divisions = self.terms.iter().filter(|(atom, _)| matches!(atom, Atom::FloorDiv(..)));
        let (Some((division @ Atom::FloorDiv(inner, by), 1)), None) = (divisions.next(), divisions.next()) else {
            return None;
        };
        let fits = |c: i64| c.checked_mul(*by).is_some_and(|c| c.checked_abs().is_some_and(|c| c < 1 << 60));
        if *by < 1 || !fits(divisor) || !fits(self.constant) || !self.terms.iter().all(|(_, c)| fits(*c)) {
            return None;
        }
        let x = self.sub(&Index::atom(division.clone()));
        Some((x.scale(*by).add(inner), by * divisor))
    }

    /// `self − divisor · floor(self / divisor)`.
    pub fn modulo(&self, divisor: i64) -> Index {
        if divisor == 1 {
            return Index::from(0);
        }
        if divisor < 1 {
            return Index::atom(Atom::Mod(Arc::new(self.clone()), divisor));
        }
        let (_, rest) = self.multiples(divisor);
        if let Some(c) = rest.as_const() {
            return Index::from(c.rem_euclid(divisor));
        }
        if let Some(r) = rest.residue(divisor) {
            return Index::from(r);
        }
        Index::atom(Atom::Mod(Arc::new(rest), divisor))
    }

    /// Remainder by `divisor`, if it is the same for all values of the variables.
    pub fn residue(&self, divisor: i64) -> Option<i64> {
        let mut sum = self.constant.rem_euclid(divisor);
        for (atom, c) in &self.terms {
            if c % divisor == 0 {
                continue;
            }
            let r = match atom {
                Atom::Min(a, b) | Atom::Max(a, b) => {
                    let (ra, rb) = (a.residue(divisor)?, b.residue(divisor)?);
                    if ra != rb {
                        return None;
                    }
                    ra
                }
                Atom::Var(_) | Atom::FloorDiv(..) | Atom::Mod(..) => return None,
            };
            // 128 bits, as divisors may be large.
            let term = i128::from(c.rem_euclid(divisor)) * i128::from(r);
            sum = (i128::from(sum) + term).rem_euclid(i128::from(divisor)) as i64;
        }
        Some(sum)
    }

    /// Splits into `(whole, rest)` with `self = divisor · whole + rest`, where `rest` has the terms not
    /// divisible by `divisor`, and the remainder of the constant.
    pub fn multiples(&self, divisor: i64) -> (Index, Index) {
        let (mut whole, mut rest) =
            (Index::from(self.constant.div_euclid(divisor)), Index::from(self.constant.rem_euclid(divisor)));
        for (atom, c) in &self.terms {
            if c % divisor == 0 {
                whole.add_term(atom, c / divisor);
            } else {
                rest.add_term(atom, *c);
            }
        }
        (whole, rest)
    }

    /// Minimum of both.
    pub fn smaller(&self, other: &Index) -> Index {
        match self.distance(other) {
            Some(d) if d <= 0 => self.clone(),
            Some(_) => other.clone(),
            None => {
                let (a, b) = if self <= other { (self, other) } else { (other, self) };
                Index::atom(Atom::Min(Arc::new(a.clone()), Arc::new(b.clone())))
            }
        }
    }

    /// Maximum of both.
    pub fn larger(&self, other: &Index) -> Index {
        match self.distance(other) {
            Some(d) if d >= 0 => self.clone(),
            Some(_) => other.clone(),
            None => {
                let (a, b) = if self <= other { (self, other) } else { (other, self) };
                Index::atom(Atom::Max(Arc::new(a.clone()), Arc::new(b.clone())))
            }
        }
    }

    /// Rebuilds the expression bottom-up, replacing the atoms for which `replace` returns a value.
    ///
    /// `replace` is called for an atom after its parts have been rebuilt; `None` keeps the atom.
    pub fn rewrite(&self, replace: &mut dyn FnMut(&Atom) -> Option<Index>) -> Index {
        let mut out = Index::from(self.constant);
        for (atom, c) in &self.terms {
            let rebuilt = match atom {
                Atom::Var(_) => {
                    match replace(atom) {
                        Some(new) => out = out.add_scaled(&new, *c),
                        None => out.add_term(atom, *c),
                    }
                    continue;
                }
                Atom::FloorDiv(e, d) => e.rewrite(replace).floor_div(*d),
                Atom::Mod(e, d) => e.rewrite(replace).modulo(*d),
                Atom::Min(a, b) => a.rewrite(replace).smaller(&b.rewrite(replace)),
                Atom::Max(a, b) => a.rewrite(replace).larger(&b.rewrite(replace)),
            };
            // A rebuilt compound may have become a plain sum, whose variables were already passed to
            // `replace`.
            let mut value = Index::from(rebuilt.constant);
            for (part, pc) in &rebuilt.terms {
                let offered = !matches!(part, Atom::Var(_));
                match offered.then(|| replace(part)).flatten() {
                    Some(new) => value = value.add_scaled(&new, *pc),
                    None => value.add_term(part, *pc),
                }
            }
            out = out.add_scaled(&value, *c);
        }
        out
    }

    /// Replaces a loop variable by an expression.
    pub fn substitute(&self, var: LoopId, by: &Index) -> Index {
        if !self.uses(var) {
            return self.clone();
        }
        // Plain sums, by far the most common, need no recursive rebuilding.
        if self.terms.iter().all(|(atom, _)| matches!(atom, Atom::Var(_))) {
            let mut rest = self.clone();
            rest.terms.retain(|(atom, _)| *atom != Atom::Var(var));
            return rest.add_scaled(by, self.coefficient(var));
        }
        self.rewrite(&mut |atom| (*atom == Atom::Var(var)).then(|| by.clone()))
    }

    /// Evaluates the index under an assignment of the loop variables; `None` on a division by zero or an
    /// overflow.
    pub fn eval(&self, value_of: &dyn Fn(LoopId) -> i64) -> Option<i64> {
        let mut sum = self.constant;
        for (atom, c) in &self.terms {
            let v = match atom {
                Atom::Var(v) => value_of(*v),
                Atom::FloorDiv(e, d) => floor_div(e.eval(value_of)?, *d)?,
                Atom::Mod(e, d) => {
                    let e = e.eval(value_of)?;
                    e.checked_sub(floor_div(e, *d)?.checked_mul(*d)?)?
                }
                Atom::Min(a, b) => a.eval(value_of)?.min(b.eval(value_of)?),
                Atom::Max(a, b) => a.eval(value_of)?.max(b.eval(value_of)?),
            };
            sum = sum.checked_add(v.checked_mul(*c)?)?;
        }
        Some(sum)
    }
}

fn floor_div(a: i64, b: i64) -> Option<i64> {
    let q = a.checked_div(b)?;
    Some(if a % b != 0 && ((a < 0) != (b < 0)) { q - 1 } else { q })
}

/// Loops around a point of a program, outermost first, with their extents.
///
/// A variable `v` lies in `0..extent(v)`, where the extent may mention outer variables.
#[derive(Clone, Debug, Default)]
pub struct Ranges {
    loops: Vec<(LoopId, Index)>,
    /// Number of outermost variables that represent open sizes.
    n_open: usize,
}

/// Maximum number of upper bounds kept of one expression; dropping some is sound.
const MAX_BOUNDS: usize = 16;

impl Ranges {
    /// Ranges outside all loops, with the variables of open (dynamic) sizes and their numbers of values.
    pub fn of_sizes(sizes: impl Iterator<Item = (LoopId, i64)>) -> Ranges {
        let loops: Vec<(LoopId, Index)> = sizes.map(|(var, n)| (var, n.into())).collect();
        Ranges { n_open: loops.len(), loops }
    }

    /// Whether an expression depends on an open (dynamic) size.
    pub fn is_open(&self, e: &Index) -> bool {
        self.loops[..self.n_open].iter().any(|(var, _)| e.uses(*var))
    }

    /// Enters a loop.
    pub fn push(&mut self, var: LoopId, extent: Index) {
        self.loops.push((var, extent));
    }

    /// Runs `inner` with an additional loop in scope.
    pub fn inside<T>(&mut self, var: LoopId, extent: &Index, inner: impl FnOnce(&mut Ranges) -> T) -> T {
        self.push(var, extent.clone());
        let result = inner(self);
        self.pop();
        result
    }

    /// Leaves the innermost loop.
    pub fn pop(&mut self) {
        self.loops.pop();
    }

    /// The loops, outermost first.
    pub fn loops(&self) -> &[(LoopId, Index)] {
        &self.loops
    }

    /// Upper bound of an expression inside these loops, if one is known.
    ///
    /// Variables are eliminated from the innermost outwards by their symbolic extents, so that `12·a + b`
    /// with `b < min(12, 127 − 12·a)` is found to be at most 126.
    pub fn upper(&self, e: &Index) -> Option<i64> {
        if let Some(c) = e.as_const() {
            return Some(c);
        }
        self.upper_of_box(e).or_else(|| self.upper_bounds(e, 0).iter().filter_map(Index::as_const).min())
    }

    /// Largest value of a plain sum of variables with constant extents; `None` on overflow.
    fn upper_of_box(&self, e: &Index) -> Option<i64> {
        e.terms.iter().try_fold(e.constant, |sum, (atom, c)| {
            let Atom::Var(var) = atom else { return None };
            let (_, extent) = self.loops.iter().rev().find(|(v, _)| v == var)?;
            let last = extent.as_const()?.checked_sub(1)?;
            if *c > 0 { sum.checked_add(last.checked_mul(*c)?) } else { Some(sum) }
        })
    }

    /// Lower bound of an expression inside these loops, if one is known.
    pub fn lower(&self, e: &Index) -> Option<i64> {
        if let Some(c) = e.as_const() {
            return Some(c);
        }
        self.upper(&e.scale(-1)).map(|b| -b)
    }

    /// Superset of the values that an expression takes inside these loops, in ascending order; `None` if it
    /// would be too large to enumerate.
    pub fn values(&self, e: &Index) -> Option<Vec<i64>> {
        const MOST: i64 = 1024;
        let mut variables = Vec::new();
        e.for_each_var(&mut |v| {
            if !variables.contains(&v) {
                variables.push(v);
            }
        });
        let mut points: Vec<Vec<(LoopId, i64)>> = vec![Vec::new()];
        for v in variables {
            let (_, extent) = self.loops.iter().rev().find(|(l, _)| *l == v)?;
            let n = self.upper(extent)?.max(0);
            if n.checked_mul(points.len() as i64)? > MOST {
                return None;
            }
            let with = |point: &Vec<(LoopId, i64)>, at| point.iter().copied().chain([(v, at)]).collect();
            points = points.iter().flat_map(|point| (0..n).map(move |at| with(point, at))).collect();
        }
        let value = |point: &Vec<(LoopId, i64)>| {
            let of = |v| point.iter().find(|(l, _)| *l == v).expect("every variable has a value").1;
            e.eval(&of)
        };
        let mut values = points.iter().map(value).collect::<Option<Vec<i64>>>()?;
        values.sort_unstable();
        values.dedup();
        Some(values)
    }

    /// Upper bounds of an expression that depend only on the `keep` outermost loops. All of them hold, so the
    /// value is at most the smallest.
    ///
    /// Empty if no bound is known. With `keep` 0, all bounds are constants.
    pub fn upper_bounds(&self, e: &Index, keep: usize) -> Vec<Index> {
        let inner = &self.loops[keep..];
        let without = |var: LoopId, c: i64, extent: &Index| {
            let mut rest = e.clone();
            rest.terms.retain(|(atom, _)| *atom != Atom::Var(var));
            if c > 0 {
                rest = rest.add_scaled(extent, c);
                rest.constant = rest.constant.wrapping_sub(c);
            }
            self.upper_bounds(&rest, keep)
        };
        // The innermost variable first if it is a direct term: the terms of its extent may cancel against the
        // rest.
        if let Some((var, extent)) = inner.iter().rev().find(|(v, _)| e.uses(*v)) {
            let c = e.coefficient(*var);
            let is_alone = e.terms.iter().all(|(atom, _)| matches!(atom, Atom::Var(_)) || !atom.uses(*var));
            if c != 0 && is_alone {
                return without(*var, c, extent);
            }
        }
        // Then compound atoms: a min with a positive coefficient is at most either side, and so on.
        let is_both = |atom: &Atom, c: i64| matches!((atom, c), (Atom::Min(..), 1..) | (Atom::Max(..), ..0));
        let goes_in = |atom: &Atom| keep == 0 || inner.iter().any(|(v, _)| atom.uses(*v));
        let compound = e.terms.iter().find(|(a, c)| !matches!(a, Atom::Var(_)) && (is_both(a, *c) || goes_in(a)));
        if let Some((atom, c)) = compound {
            let c = *c;
            let mut rest = e.clone();
            rest.terms.retain(|(other, _)| other != atom);
            let with = |x: &Index| self.upper_bounds(&rest.add_scaled(x, c), keep);
            let bounds = match atom {
                Atom::Min(a, b) | Atom::Max(a, b) => {
                    let (a, b) = (with(a), with(b));
                    if is_both(atom, c) {
                        a.into_iter().chain(b).collect()
                    } else {
                        // The value is one of the two, so a bound must cover both.
                        match (smallest(&a), smallest(&b)) {
                            (Some(a), Some(b)) => vec![a.larger(&b)],
                            _ => Vec::new(),
                        }
                    }
                }
                Atom::FloorDiv(x, d) if *d > 0 => {
                    let sign = c.signum();
                    let parts = self.upper_bounds(&x.scale(sign), keep);
                    let rests = self.upper_bounds(&rest, keep);
                    let scaled = |b: &Index| b.scale(sign).floor_div(*d).scale(c);
                    let mut bounds: Vec<Index> =
                        rests.iter().flat_map(|r| parts.iter().map(move |p| r.add(&scaled(p)))).collect();
                    let opposite = rest.terms.iter().find_map(|(a, k)| match a {
                        Atom::FloorDiv(y, by) if by == d && *k == -c => Some((a, y)),
                        _ => None,
                    });
                    if let Some((atom, y)) = opposite {
                        // floor(x/d) − floor(y/d) is at most (x − y)/d rounded up, in which many terms may
                        // cancel.
                        let (more, less) = if c > 0 { (x, y) } else { (y, x) };
                        let apart = more.sub(less).offset(d - 1).floor_div(*d).scale(c.abs());
                        let others = rest.add(&Index::atom(atom.clone()).scale(c));
                        bounds.extend(self.upper_bounds(&others.add(&apart), keep));
                    }
                    if c % d == 0 {
                        // c·floor(x/d) = (c/d)·(x − x mod d), in which both terms may cancel against the
                        // rest.
                        let exact = x.sub(&x.modulo(*d)).scale(c / d);
                        bounds.extend(self.upper_bounds(&rest.add(&exact), keep));
                    }
                    bounds
                }
                Atom::Mod(x, d) if *d > 0 => {
                    let most = if c < 0 {
                        0
                    } else if self.lower(x).is_some_and(|l| l >= 0) {
                        self.upper(x).map_or(d - 1, |u| u.min(d - 1))
                    } else {
                        d - 1
                    };
                    self.upper_bounds(&rest.offset(c * most), keep)
                }
                Atom::FloorDiv(..) | Atom::Mod(..) | Atom::Var(_) => Vec::new(),
            };
            return prune(bounds);
        }
        if let Some((var, extent)) = inner.iter().rev().find(|(v, _)| e.coefficient(*v) != 0) {
            return without(*var, e.coefficient(*var), extent);
        }
        let unknown = keep == 0 && !e.terms.is_empty();
        if unknown { Vec::new() } else { vec![e.clone()] }
    }

    /// Simplifies an index by the loops' ranges, for example a division whose quotient is constant or a
    /// minimum one operand of which is always smaller.
    pub fn simplify(&self, e: &Index) -> Index {
        if e.terms.iter().all(|(a, _)| matches!(a, Atom::Var(_))) {
            return e.clone();
        }
        e.rewrite(&mut |atom| match atom {
            Atom::Var(_) => None,
            Atom::FloorDiv(x, d) if *d > 0 => {
                let q = self.lower(x)?.div_euclid(*d);
                (self.upper(x)?.div_euclid(*d) == q).then(|| Index::from(q))
            }
            Atom::Mod(x, d) if *d > 0 => {
                let q = self.lower(x)?.div_euclid(*d);
                (self.upper(x)?.div_euclid(*d) == q).then(|| x.offset(-q * d))
            }
            Atom::FloorDiv(..) | Atom::Mod(..) => None,
            Atom::Min(..) | Atom::Max(..) => {
                let is_min = matches!(atom, Atom::Min(..));
                let covers = |a: &Index, b: &Index| {
                    let d = a.sub(b);
                    if is_min { self.upper(&d).is_some_and(|u| u <= 0) } else { self.lower(&d).is_some_and(|l| l >= 0) }
                };
                let mut sides = Vec::new();
                sides_of(&Index::atom(atom.clone()), is_min, &mut sides);
                let mut kept: Vec<&Index> = Vec::new();
                for side in &sides {
                    if !kept.iter().any(|k| covers(k, side)) {
                        kept.retain(|k| !covers(side, k));
                        kept.push(side);
                    }
                }
                let joined = |a: Index, b: Index| if is_min { a.smaller(&b) } else { a.larger(&b) };
                (kept.len() < sides.len()).then(|| kept.into_iter().cloned().reduce(joined)).flatten()
            }
        })
    }
}

/// Collects the operands of nested minima (or maxima) into `sides`.
fn sides_of(e: &Index, is_min: bool, sides: &mut Vec<Index>) {
    match (e.terms.as_slice(), is_min) {
        ([(Atom::Min(a, b), 1)], true) | ([(Atom::Max(a, b), 1)], false) => {
            sides_of(&a.offset(e.constant), is_min, sides);
            sides_of(&b.offset(e.constant), is_min, sides);
        }
        _ => sides.push(e.clone()),
    }
}

/// Minimum of several indices; `None` for an empty list.
pub fn smallest(of: &[Index]) -> Option<Index> {
    of.iter().cloned().reduce(|a, b| a.smaller(&b))
}

/// Drops bounds that are never tighter than another one.
fn prune(bounds: Vec<Index>) -> Vec<Index> {
    let mut kept: Vec<Index> = Vec::with_capacity(bounds.len());
    for b in bounds {
        match kept.iter().enumerate().find_map(|(at, k)| b.distance(k).map(|d| (at, d))) {
            Some((at, d)) if d < 0 => kept[at] = b,
            Some(_) => {}
            None if kept.len() < MAX_BOUNDS => kept.push(b),
            None => {}
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v(i: u32) -> Index {
        Index::from(LoopId(i))
    }

    #[test]
    fn division_takes_out_what_divides() {
        let e = v(0).scale(48).add(&v(1).scale(16)).add(&v(2));
        let mut r = Ranges::default();
        r.push(LoopId(0), 21.into());
        r.push(LoopId(1), 3.into());
        r.push(LoopId(2), 16.into());
        assert_eq!(r.simplify(&e.floor_div(48)), v(0));
        assert_eq!(r.simplify(&e.modulo(48)), v(1).scale(16).add(&v(2)));
    }

    #[test]
    fn digits_of_a_fused_loop_come_together() {
        // Channel, row and column of a 3 × 3 window over one loop, split by 1, 6 or 18, with a stride of 5
        // elements.
        for factor in [1, 6, 18] {
            let x = v(0).scale(factor).add(&v(1));
            let (channel, row, column) = (x.floor_div(9), x.floor_div(3).modulo(3), x.modulo(3));
            let flat = channel.scale(45).add(&row.scale(15)).add(&column.scale(5)).add(&v(2));
            assert_eq!(flat, x.scale(5).add(&v(2)));
        }
    }

    #[test]
    fn bounds_follow_symbolic_extents() {
        let mut r = Ranges::default();
        r.push(LoopId(0), 11.into());
        r.push(LoopId(1), Index::from(12).smaller(&Index::from(127).sub(&v(0).scale(12))));
        let t = v(0).scale(12).add(&v(1));
        assert_eq!(r.upper(&t), Some(126));
        // The tile at row 8·t of 1009 always has at least one remaining row.
        assert_eq!(r.lower(&Index::from(1009).sub(&t.scale(8))), Some(1));
    }

    #[test]
    fn remainders_that_agree_are_known() {
        let e = Index::from(256).smaller(&Index::from(1000).sub(&v(0).scale(256)));
        assert_eq!(e.modulo(4), Index::from(0));
        assert_eq!(e.residue(7), None);
    }
}
