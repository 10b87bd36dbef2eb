//! Access regions: the part of a buffer that a block of statements accesses.

use crate::expr::Expr;
use crate::index::{Index, Ranges, smallest};
use crate::program::{BufferId, LoopId, Program, Stmt};
use crate::text::index_to_string;

/// Rectangular region of a buffer: first element and extent of each dimension, in terms of outer loops.
pub struct Region {
    /// Subscripts of the first element.
    pub lower: Vec<Index>,
    /// Number of elements.
    pub extent: Vec<Index>,
    /// Constant upper bounds of `extent`.
    pub most: Vec<i64>,
}

/// Kind of accesses considered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    Read,
    Any,
}

/// Computes the region of `buffer` that `block` accesses, given the loops around the block. Errors say why
/// there is no such region, with `place` as the block's description.
pub fn region(
    program: &Program,
    block: &[Stmt],
    buffer: BufferId,
    access: AccessKind,
    outside: &Ranges,
    place: &str,
) -> Result<Region, String> {
    let shape = &program.buffer(buffer).shape;
    let mut union: Option<(Vec<Index>, Vec<Index>)> = None;
    let mut failed = None;
    let mut bounds = Bounds { outside, inside: Vec::new(), known: Vec::new() };
    for_each_access(block, buffer, access, &mut outside.clone(), &mut |index, ranges| {
        let (mut low, mut high) = (Vec::new(), Vec::new());
        for (e, &n) in index.iter().zip(shape) {
            let Some((lo, hi)) = bounds.of(e, n, ranges) else {
                failed = Some(format!("no bounds are known of the subscript {}", index_to_string(program, e)));
                return;
            };
            low.push(lo);
            high.push(hi);
        }
        union = Some(match union.take() {
            None => (low, high),
            Some((l, h)) => (
                l.iter().zip(&low).map(|(a, b)| a.smaller(b)).collect(),
                h.iter().zip(&high).map(|(a, b)| a.larger(b)).collect(),
            ),
        });
    });
    if let Some(why) = failed {
        return Err(why);
    }
    let Some((lower, upper)) = union else { return Err(format!("it is not used {place}")) };
    let extent: Vec<Index> =
        lower.iter().zip(&upper).map(|(l, h)| outside.simplify(&subtract_inside(&h.offset(1), l))).collect();
    let most: Vec<i64> = extent.iter().zip(shape).map(|(e, &n)| outside.upper(e).map_or(n, |u| u.min(n))).collect();
    if most.iter().any(|&n| n < 1) {
        return Err(format!("all that is used of it {place} lies outside it"));
    }
    Ok(Region { lower, extent, most })
}

/// First and last values of subscripts, computed once for all accesses inside the same loops.
struct Bounds<'a> {
    outside: &'a Ranges,
    inside: Vec<(LoopId, Index)>,
    known: Vec<((Index, i64), (Index, Index))>,
}

impl Bounds<'_> {
    /// Bounds of a subscript of a dimension of extent `n`, in terms of outer loops.
    fn of(&mut self, e: &Index, n: i64, ranges: &Ranges) -> Option<(Index, Index)> {
        if self.inside != ranges.loops() {
            self.inside = ranges.loops().to_vec();
            self.known.clear();
        }
        if let Some((_, found)) = self.known.iter().find(|((of, extent), _)| of == e && *extent == n) {
            return Some(found.clone());
        }
        let keep = self.outside.loops().len();
        let mut hi = smallest(&ranges.upper_bounds(e, keep))?;
        let mut lo = smallest(&ranges.upper_bounds(&e.scale(-1), keep))?.scale(-1);
        // Subscripts outside the buffer are guarded and never reached.
        if self.outside.lower(&lo).is_none_or(|l| l < 0) {
            lo = lo.larger(&0.into());
        }
        if self.outside.upper(&hi).is_none_or(|u| u >= n) {
            hi = hi.smaller(&(n - 1).into());
        }
        self.known.push(((e.clone(), n), (lo.clone(), hi.clone())));
        Some((lo, hi))
    }
}

/// `a − b`, with the subtraction distributed into a min that is the only term, so that constants cancel.
pub fn subtract_inside(a: &Index, b: &Index) -> Index {
    use crate::index::Atom;
    match a.terms() {
        [(Atom::Min(x, y), 1)] => {
            let c = a.constant();
            subtract_inside(&x.offset(c), b).smaller(&subtract_inside(&y.offset(c), b))
        }
        _ => a.sub(b),
    }
}

/// Calls `visit` for every access to `buffer` in the block, with all loops around it.
pub fn for_each_access(
    block: &[Stmt],
    buffer: BufferId,
    access: AccessKind,
    ranges: &mut Ranges,
    visit: &mut dyn FnMut(&[Index], &Ranges),
) {
    for s in block {
        s.for_each_own_read(&mut |b, index| {
            if b == buffer {
                visit(index, ranges);
            }
        });
        if let Some((b, index)) = s.own_write()
            && access == AccessKind::Any
            && b == buffer
        {
            visit(index, ranges);
        }
        s.each_block(ranges, |inner, ranges| for_each_access(inner, buffer, access, ranges, visit));
    }
}

/// Whether any statement of the block reads the buffer.
pub fn reads(block: &[Stmt], buffer: BufferId) -> bool {
    let mut found = false;
    for_each_access(block, buffer, AccessKind::Read, &mut Ranges::default(), &mut |_, _| found = true);
    found
}

/// Whether any statement of the block writes the buffer.
pub fn writes(block: &[Stmt], buffer: BufferId) -> bool {
    let mut found = false;
    for s in block {
        s.walk(&mut |s| found |= s.own_write().is_some_and(|(b, _)| b == buffer));
    }
    found
}

/// Redirects every read of `buffer` at `index` in the block to `to` at `place(index, enclosing loops)`.
pub fn redirect_reads(
    block: Vec<Stmt>,
    buffer: BufferId,
    to: BufferId,
    ranges: &mut Ranges,
    place: &dyn Fn(&[Index], &Ranges) -> Vec<Index>,
) -> Vec<Stmt> {
    block
        .into_iter()
        .map(|mut s| {
            s.each_block_mut(ranges, |inner, ranges| {
                *inner = redirect_reads(std::mem::take(inner), buffer, to, ranges, place);
            });
            map_loads_of(s, buffer, &mut |index| Expr::Load(to, place(index, ranges)))
        })
        .collect()
}

/// Replaces the statement's own loads of a buffer, excluding nested statements.
pub fn map_loads_of(stmt: Stmt, buffer: BufferId, to: &mut dyn FnMut(&[Index]) -> Expr) -> Stmt {
    let mut is_read = false;
    stmt.for_each_own_read(&mut |b, _| is_read |= b == buffer);
    // Rebuilding is avoided for the many statements that do not read the buffer.
    if is_read { stmt.map_own_loads(&mut |b, index| (b == buffer).then(|| to(index))) } else { stmt }
}
