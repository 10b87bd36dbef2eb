//! Simplifies indices and conditions, and removes loops of one iteration, dead branches and empty loops.

use crate::expr::{Cond, Expr, Rewrite};
use crate::index::{Index, Ranges, gcd};
use crate::program::{Loop, LoopKind, Stmt, TensorProduct};

/// Simplifies a block inside the loops of `ranges`.
pub fn simplify_block(block: Vec<Stmt>, ranges: &mut Ranges) -> Vec<Stmt> {
    let mut out = Vec::with_capacity(block.len());
    for stmt in block {
        simplify_stmt(stmt, ranges, &mut out);
    }
    out
}

fn simplify_stmt(stmt: Stmt, ranges: &mut Ranges, out: &mut Vec<Stmt>) {
    match stmt {
        Stmt::For(l) => {
            let extent = ranges.simplify(&l.extent);
            match extent.as_const() {
                Some(n) if n <= 0 => {}
                // A block loop defines a kernel even with one iteration, and a dot product of one step reads
                // its factors like one of four steps.
                Some(1) if !matches!(l.kind, LoopKind::Block(_) | LoopKind::Tensor(TensorProduct::Dot4)) => {
                    let zero = Index::from(0);
                    let body = l.body.iter().map(|s| s.substitute(l.var, &zero)).collect();
                    inline(simplify_block(body, ranges), out);
                }
                _ => {
                    ranges.push(l.var, extent.clone());
                    let body = simplify_block(l.body, ranges);
                    ranges.pop();
                    if !body.is_empty() {
                        out.push(Stmt::For(Loop { var: l.var, extent, kind: l.kind, body }));
                    }
                }
            }
        }
        Stmt::If { cond, then, otherwise } => {
            let cond = Simplify(ranges).cond(&cond);
            match decided(&cond) {
                Some(true) => inline(simplify_block(then, ranges), out),
                Some(false) => inline(simplify_block(otherwise, ranges), out),
                None => {
                    let (then, otherwise) = (simplify_block(then, ranges), simplify_block(otherwise, ranges));
                    if !then.is_empty() || !otherwise.is_empty() {
                        out.push(Stmt::If { cond, then, otherwise });
                    }
                }
            }
        }
        Stmt::Alloc(_) | Stmt::Barrier | Stmt::Wait(_) => out.push(stmt),
        Stmt::Store { buffer, index, value } => out.push(Stmt::Store {
            buffer,
            index: index.iter().map(|i| ranges.simplify(i)).collect(),
            value: Simplify(ranges).expr(&value),
        }),
        Stmt::Update { buffer, index, op, value, first } => out.push(Stmt::Update {
            buffer,
            index: index.iter().map(|i| ranges.simplify(i)).collect(),
            op,
            value: Simplify(ranges).expr(&value),
            first: Simplify(ranges).cond(&first),
        }),
        Stmt::Prefetch { .. } => out.push(stmt.map_index(&mut |i| ranges.simplify(i))),
    }
}

/// Splices a block's statements into the enclosing block.
///
/// Buffers live until the end of the block that allocates them, so a block with allocations stays nested, as
/// `if true { … }`.
pub fn inline(block: Vec<Stmt>, out: &mut Vec<Stmt>) {
    if block.iter().any(|s| matches!(s, Stmt::Alloc(_))) {
        out.push(Stmt::If { cond: Cond::True, then: block, otherwise: Vec::new() });
    } else {
        out.extend(block);
    }
}

fn decided(cond: &Cond) -> Option<bool> {
    match cond {
        Cond::True => Some(true),
        Cond::Not(c) => decided(c).map(|b| !b),
        Cond::Lt(..) | Cond::Eq(..) | Cond::Less(..) | Cond::And(..) => None,
    }
}

/// Condition that never holds.
pub fn never() -> Cond {
    Cond::Not(Box::new(Cond::True))
}

/// Simplifies values and conditions.
struct Simplify<'a>(&'a Ranges);

impl Rewrite for Simplify<'_> {
    fn index(&mut self, index: &Index) -> Index {
        self.0.simplify(index)
    }

    fn expr(&mut self, expr: &Expr) -> Expr {
        let Expr::Select(cond, a, b) = expr else { return expr.map_parts(self) };
        let cond = self.cond(cond);
        match decided(&cond) {
            Some(true) => self.expr(a),
            Some(false) => self.expr(b),
            None => Expr::Select(Box::new(cond), Box::new(self.expr(a)), Box::new(self.expr(b))),
        }
    }

    fn cond(&mut self, cond: &Cond) -> Cond {
        let ranges = self.0;
        match cond {
            Cond::Lt(a, b) => {
                let (a, b) = (ranges.simplify(a), ranges.simplify(b));
                let d = a.sub(&b);
                if ranges.upper(&d).is_some_and(|u| u < 0) {
                    Cond::True
                } else if ranges.lower(&d).is_some_and(|l| l >= 0) {
                    never()
                } else {
                    let (a, b) = smaller_terms(a, b, true);
                    Cond::Lt(a, b)
                }
            }
            Cond::Eq(a, b) => {
                let (a, b) = (ranges.simplify(a), ranges.simplify(b));
                let d = a.sub(&b);
                if d == Index::from(0) {
                    Cond::True
                } else if ranges.upper(&d).is_some_and(|u| u < 0) || ranges.lower(&d).is_some_and(|l| l > 0) {
                    never()
                } else {
                    let (a, b) = smaller_terms(a, b, false);
                    Cond::Eq(a, b)
                }
            }
            Cond::And(a, b) => {
                let (a, b) = (self.cond(a), self.cond(b));
                match (decided(&a), decided(&b)) {
                    (Some(false), _) | (_, Some(false)) => never(),
                    _ => a.and(b),
                }
            }
            Cond::Not(c) => match self.cond(c) {
                Cond::Not(inner) if *inner != Cond::True => *inner,
                Cond::Not(_) => Cond::True,
                c => Cond::Not(Box::new(c)),
            },
            Cond::True | Cond::Less(..) => cond.map_parts(self),
        }
    }
}

/// Sides of a comparison, `a < b` or `a == b`, without common factors and with a constant on one side only.
fn smaller_terms(a: Index, b: Index, is_less: bool) -> (Index, Index) {
    let d = a.sub(&b);
    let common = d.terms().iter().fold(0, |g, (_, c)| gcd(g, c.unsigned_abs()));
    let Some(common) = i64::try_from(common).ok().filter(|&g| g >= 1) else { return (a, b) };
    let divides = d.constant() % common == 0;
    let needless = common > 1 || a.constant() != 0 && b.constant() != 0;
    if !needless || !(is_less || divides) {
        return (a, b);
    }
    // Σ⁺ − Σ⁻ + c < 0 for multiples of g: Σ⁺/g − Σ⁻/g < ceil(−c / g).
    let bound = -d.constant().div_euclid(common);
    let (mut left, mut right) = (Index::from((-bound).max(0)), Index::from(bound.max(0)));
    for (atom, c) in d.terms() {
        let term = Index::atom(atom.clone()).scale(c.abs() / common);
        let side = if *c > 0 { &mut left } else { &mut right };
        *side = side.add(&term);
    }
    (left, right)
}
