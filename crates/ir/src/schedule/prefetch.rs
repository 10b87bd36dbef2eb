//! Prefetching for a later iteration.

use super::Illegal;
use super::region::{AccessKind, redirect_reads, region, writes};
use super::tree::{
    allocated_in, buffer_id, edit_block, edit_loops, nest, new_loop, require_open, simplify_block, single_loop,
};
use crate::dependence::reduced;
use crate::index::{Index, Ranges};
use crate::program::{Buffer, BufferId, LoopId, LoopKind, Program, Stmt};

/// Size in bytes of a cache line on every supported machine.
pub const LINE_BYTES: i64 = 64;
/// Maximum number of cache lines that one iteration prefetches; more cost more than they gain.
pub const MOST_PREFETCHED_LINES: i64 = 128;
/// Number of iterations in a turn of a loop with an open extent. All but the first of a turn share what is
/// prefetched; those of later turns prefetch it again, which costs little. The first one, which may be the
/// only one of a run, is not held up: it touches again what it reads itself.
const TURN_OF_OPEN: i64 = 4;

/// Applies [`Step::Prefetch`](super::Step::Prefetch).
pub fn prefetch(program: &mut Program, buffer: &str, at: &str, ahead: i64, inside: &[String]) -> Result<(), Illegal> {
    const MOST_AHEAD: i64 = 1 << 20;
    let target = buffer_id(program, buffer)?;
    if !(0..=MOST_AHEAD).contains(&ahead) {
        let (target, what) = (at.to_owned(), "prefetch distance");
        return Err(Illegal::OutOfRange { target, what, least: 0, most: MOST_AHEAD, value: ahead });
    }
    let var = single_loop(program, at)?;
    let inside = inside.iter().map(|name| single_loop(program, name)).collect::<Result<Vec<_>, _>>()?;
    // A part is consecutive lines.
    let n_loops = if inside.is_empty() { program.buffer(target).shape.len() } else { 1 };
    let loops = (0..n_loops)
        .map(|d| new_loop(program, &format!("{at}.prefetch.{buffer}.{d}")))
        .collect::<Result<Vec<_>, _>>()?;
    inside.iter().chain([&var]).try_for_each(|&l| require_open(program, l))?;
    edit_loops(program, var, &mut |names, mut l, ranges| {
        let mut ranges = ranges.clone();
        ranges.push(l.var, l.extent.clone());
        let fail = |why: String| Illegal::Buffer { buffer: buffer.to_owned(), why };
        if allocated_in(&l.body).contains(&target) {
            return Err(fail(format!(
                "it is made anew in each iteration of `{at}`, so there is nothing to fetch before"
            )));
        }
        let mut lines = Lines::of(names, target, at, &l.body, &ranges).map_err(fail)?;
        let Some((&innermost, outer)) = inside.split_last() else {
            lines.move_to(var, &Index::from(var).offset(ahead));
            l.body.splice(0..0, simplify_block(lines.fetch(&loops, at).map_err(fail)?, &mut ranges));
            return Ok(vec![Stmt::For(l)]);
        };
        let per_line = lines.per_line(names).map_err(fail)?;
        let (innermost_name, mut is_there) = (names.loop_name(innermost), false);
        edit_block(names, &mut l.body, innermost, &mut ranges, &mut |_, mut inner, ranges| {
            let mut ranges = ranges.clone();
            ranges.push(inner.var, inner.extent.clone());
            // The number of the iteration, of so many, and how many iterations of `at` ahead it fetches.
            let (mut at, mut n, mut reach) = (Index::from(0), 1i64, Index::from(ahead));
            for &l in outer.iter().chain([&innermost]) {
                let name = names.loop_name(l);
                let Some((_, extent)) = ranges.loops().iter().find(|(var, _)| *var == l) else {
                    return Err(fail(format!("`{innermost_name}` is not inside `{name}`")));
                };
                let most = ranges.upper(extent).ok_or_else(|| fail(format!("no bound is known of loop `{name}`")))?;
                let (turn, most) = match ranges.is_open(extent) && most > TURN_OF_OPEN {
                    true => {
                        let turn = Index::from(l).modulo(TURN_OF_OPEN);
                        reach = reach.smaller(&turn.scale(ahead));
                        (turn.larger(&Index::from(1)).offset(-1), TURN_OF_OPEN - 1)
                    }
                    false => (Index::from(l), most),
                };
                (at, n) = (at.scale(most).add(&turn), n.saturating_mul(most));
            }
            is_there = true;
            let mut lines = lines.clone();
            lines.move_to(var, &Index::from(var).add(&reach));
            let fetch = lines.fetch_part(loops[0], per_line, &at, n, innermost_name).map_err(fail)?;
            inner.body.splice(0..0, simplify_block(fetch, &mut ranges));
            Ok(vec![Stmt::For(inner)])
        })?;
        if is_there { Ok(vec![Stmt::For(l)]) } else { Err(fail(format!("`{innermost_name}` is not inside `{at}`"))) }
    })
}

/// Cache lines of a buffer that an iteration of a loop touches.
#[derive(Clone)]
struct Lines {
    buffer: BufferId,
    for_write: bool,
    /// Subscripts of the first element, and extents.
    first: Vec<Index>,
    extents: Vec<i64>,
    /// Distances between lines in each dimension.
    steps: Vec<i64>,
}

impl Lines {
    /// `ranges`: of the loops around the body, including its own.
    fn of(program: &Program, buffer: BufferId, at: &str, body: &[Stmt], ranges: &Ranges) -> Result<Lines, String> {
        // For a panel that several tiles share, the part of one tile.
        let by_digits = redirect_reads(body.to_vec(), buffer, buffer, &mut ranges.clone(), &|index, ranges| {
            index.iter().map(|e| reduced(e, ranges)).collect()
        });
        let touched = region(program, &by_digits, buffer, AccessKind::Any, ranges, &format!("in loop `{at}`"))?;
        let steps = steps_of_lines(program.buffer(buffer));
        Ok(Lines { buffer, for_write: writes(body, buffer), first: touched.lower, extents: touched.most, steps })
    }

    /// Makes them those of another iteration.
    fn move_to(&mut self, var: LoopId, iteration: &Index) {
        self.first.iter_mut().for_each(|e| *e = e.substitute(var, iteration));
    }

    /// Prefetches all of them.
    fn fetch(&self, loops: &[LoopId], at: &str) -> Result<Vec<Stmt>, String> {
        let counts: Vec<i64> = self.extents.iter().zip(&self.steps).map(|(&n, &s)| (n + s - 1) / s).collect();
        require_few(counts.iter().try_fold(1i64, |n, &c| n.checked_mul(c)).unwrap_or(i64::MAX), at)?;
        let parts = self.first.iter().zip(loops).zip(&self.steps);
        let index = parts.map(|((first, &v), &s)| first.add(&Index::from(v).scale(s))).collect();
        let fetch = Stmt::Prefetch { buffer: self.buffer, index, for_write: self.for_write };
        Ok(nest(loops.iter().zip(&counts).map(|(&v, &n)| (v, Index::from(n), LoopKind::Unrolled)), vec![fetch]))
    }

    /// Number of elements of a line, if the lines follow each other in memory.
    fn per_line(&self, program: &Program) -> Result<i64, String> {
        let buffer = program.buffer(self.buffer);
        let first = self.extents.iter().position(|&n| n > 1).unwrap_or(0);
        let mut inner = self.extents.iter().zip(&buffer.shape).skip(first + 1);
        match inner.all(|(n, whole)| n == whole) {
            true => Ok(LINE_BYTES / buffer.dtype.bytes() as i64),
            false => Err("what an iteration touches is not contiguous, so it has no parts".to_owned()),
        }
    }

    /// Prefetches the lines of iteration `at` out of `n`. The last subscript counts on beyond the end of its
    /// dimension.
    fn fetch_part(&self, l: LoopId, per_line: i64, at: &Index, n: i64, name: &str) -> Result<Vec<Stmt>, String> {
        let elements = self.extents.iter().try_fold(1i64, |n, &e| n.checked_mul(e)).unwrap_or(i64::MAX);
        let per_part = per_line.saturating_mul(n.max(1));
        let part = elements / per_part + i64::from(elements % per_part > 0);
        require_few(part, name)?;
        let mut index = self.first.clone();
        if let Some(last) = index.last_mut() {
            *last = last.add(&at.scale(part).add(&Index::from(l)).scale(per_line));
        }
        let fetch = Stmt::Prefetch { buffer: self.buffer, index, for_write: self.for_write };
        Ok(nest([(l, Index::from(part), LoopKind::Unrolled)].into_iter(), vec![fetch]))
    }
}

fn require_few(lines: i64, at: &str) -> Result<(), String> {
    match lines <= MOST_PREFETCHED_LINES {
        true => Ok(()),
        false => Err(format!("one iteration of `{at}` touches {lines} cache lines, more than {MOST_PREFETCHED_LINES}")),
    }
}

/// Distances between prefetches in each dimension: a cache line in the last one. For 8-bit and 16-bit
/// elements, a line spans several steps of a dimension if the dimensions inside it are short.
fn steps_of_lines(buffer: &Buffer) -> Vec<i64> {
    let mut steps = vec![1; buffer.shape.len()];
    let mut left = LINE_BYTES / buffer.dtype.bytes() as i64;
    for (step, &extent) in steps.iter_mut().zip(&buffer.shape).rev() {
        *step = left;
        if buffer.dtype.bytes() > 2 || extent > left {
            break;
        }
        left /= extent.max(1);
    }
    steps
}
