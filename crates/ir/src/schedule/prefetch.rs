//! Prefetching for a later iteration.

use super::Illegal;
use super::region::{AccessKind, redirect_reads, region, writes};
use super::tree::{allocated_in, buffer_id, edit_loops, nest, new_loop, require_open, simplify_block, single_loop};
use crate::dependence::reduced;
use crate::index::Index;
use crate::program::{Buffer, LoopKind, Program, Stmt};

/// Size in bytes of a cache line on every supported machine.
pub const LINE_BYTES: i64 = 64;
/// Maximum number of cache lines that one iteration prefetches; more cost more than they gain.
pub const MOST_PREFETCHED_LINES: i64 = 128;

/// Applies [`Step::Prefetch`](super::Step::Prefetch).
pub fn prefetch(program: &mut Program, buffer: &str, at: &str, ahead: i64) -> Result<(), Illegal> {
    const MOST_AHEAD: i64 = 1 << 20;
    let target = buffer_id(program, buffer)?;
    if !(0..=MOST_AHEAD).contains(&ahead) {
        let (target, what) = (at.to_owned(), "prefetch distance");
        return Err(Illegal::OutOfRange { target, what, least: 0, most: MOST_AHEAD, value: ahead });
    }
    let var = single_loop(program, at)?;
    let rank = program.buffer(target).shape.len();
    let per_line = LINE_BYTES / program.buffer(target).dtype.bytes() as i64;
    let loops =
        (0..rank).map(|d| new_loop(program, &format!("{at}.prefetch.{buffer}.{d}"))).collect::<Result<Vec<_>, _>>()?;
    require_open(program, var)?;
    edit_loops(program, var, &mut |names, mut l, ranges| {
        let mut ranges = ranges.clone();
        ranges.push(l.var, l.extent.clone());
        let fail = |why: String| Illegal::Buffer { buffer: buffer.to_owned(), why };
        if allocated_in(&l.body).contains(&target) {
            return Err(fail(format!(
                "it is made anew in each iteration of `{at}`, so there is nothing to fetch before"
            )));
        }
        // For a panel that several tiles share, the part of one tile.
        let by_digits = redirect_reads(l.body.clone(), target, target, &mut ranges.clone(), &|index, ranges| {
            index.iter().map(|e| reduced(e, ranges)).collect()
        });
        let touched =
            region(names, &by_digits, target, AccessKind::Any, &ranges, &format!("in loop `{at}`")).map_err(fail)?;
        let steps = steps_of_lines(names.buffer(target), per_line);
        let counts: Vec<i64> = touched.most.iter().zip(&steps).map(|(&n, &s)| (n + s - 1) / s).collect();
        let lines = counts.iter().try_fold(1i64, |n, &c| n.checked_mul(c)).unwrap_or(i64::MAX);
        if lines > MOST_PREFETCHED_LINES {
            return Err(fail(format!(
                "one iteration of `{at}` touches {lines} cache lines, more than {MOST_PREFETCHED_LINES}"
            )));
        }
        let later = Index::from(var).offset(ahead);
        let index = touched
            .lower
            .iter()
            .zip(&loops)
            .zip(&steps)
            .map(|((lo, &v), &s)| lo.substitute(var, &later).add(&Index::from(v).scale(s)))
            .collect();
        let for_write = writes(&l.body, target);
        let stmt = Stmt::Prefetch { buffer: target, index, for_write };
        let fetch = nest(loops.iter().zip(&counts).map(|(&v, &n)| (v, Index::from(n), LoopKind::Unrolled)), vec![stmt]);
        l.body.splice(0..0, simplify_block(fetch, &mut ranges));
        Ok(vec![Stmt::For(l)])
    })
}

/// Distances between prefetches in each dimension: a cache line in the last one. For 8-bit and 16-bit
/// elements, a line spans several steps of a dimension if the dimensions inside it are short.
fn steps_of_lines(buffer: &Buffer, per_line: i64) -> Vec<i64> {
    let mut steps = vec![1; buffer.shape.len()];
    let mut left = per_line;
    for (step, &extent) in steps.iter_mut().zip(&buffer.shape).rev() {
        *step = left;
        if buffer.dtype.bytes() > 2 || extent > left {
            break;
        }
        left /= extent.max(1);
    }
    steps
}
