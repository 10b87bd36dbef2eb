//! Splitting a loop in two.

use super::dependence::require_still_independent;
use super::tree::{edit_loops, new_loop, require_serial, simplify_block, single_loop, substitute};
use super::{Illegal, Tail};
use crate::expr::Cond;
use crate::index::Index;
use crate::program::{Loop, LoopKind, Program, Stmt};
use crate::text::index_to_string;

/// Applies [`Step::Split`](super::Step::Split).
pub fn split(
    program: &mut Program,
    target: &str,
    factor: i64,
    tail: Tail,
    outer: &str,
    inner: &str,
) -> Result<(), Illegal> {
    const MOST: i64 = 1 << 40;
    let var = single_loop(program, target)?;
    if !(1..=MOST).contains(&factor) {
        let (target, what) = (target.to_owned(), "split factor");
        return Err(Illegal::OutOfRange { target, what, least: 1, most: MOST, value: factor });
    }
    let (outer, inner) = (new_loop(program, outer)?, new_loop(program, inner)?);
    edit_loops(program, var, &mut |names, l, ranges| {
        require_serial(names, &l)?;
        // With a single iteration, the outer loop is always zero and is omitted from sums.
        let is_single = ranges.upper(&l.extent).is_some_and(|n| n <= factor);
        let begin = if is_single { Index::from(0) } else { Index::from(outer).scale(factor) };
        let value = begin.add(&inner.into());
        let divides = l.extent.residue(factor) == Some(0);
        if tail == Tail::Exact && !divides {
            return Err(Illegal::NotDivisible {
                target: target.to_owned(),
                extent: index_to_string(names, &l.extent),
                factor,
            });
        }
        let rest = l.extent.sub(&begin);
        let mut body = l.body;
        substitute(&mut body, &[(var, value)]);
        let inner_extent = match tail {
            Tail::Shrink if !divides => Index::from(factor).smaller(&rest),
            Tail::Guard if !divides => {
                let cond = Cond::Lt(inner.into(), rest);
                body = vec![Stmt::If { cond, then: body, otherwise: Vec::new() }];
                factor.into()
            }
            Tail::Exact | Tail::Shrink | Tail::Guard => factor.into(),
        };
        let body = vec![Stmt::For(Loop { var: inner, extent: inner_extent, kind: LoopKind::Serial, body })];
        let extent = l.extent.offset(factor - 1).floor_div(factor);
        let stmt = Stmt::For(Loop { var: outer, extent, kind: LoopKind::Serial, body });
        Ok(simplify_block(vec![stmt], &mut ranges.clone()))
    })?;
    require_still_independent(program, inner)
}
