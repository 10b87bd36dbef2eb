//! Fusing two nested loops into one.

use super::Illegal;
use super::dependence::require_still_independent;
use super::tree::{edit_loops, new_loop, require_serial, simplify_block, single_loop, substitute};
use crate::expr::Cond;
use crate::index::Index;
use crate::program::{Loop, LoopId, LoopKind, Program, Stmt};
use crate::text::index_to_string;

/// Applies [`Step::Fuse`](super::Step::Fuse).
pub fn fuse(program: &mut Program, outer: &str, inner: &str, fused: &str) -> Result<(), Illegal> {
    let (outer_var, inner_var) = (single_loop(program, outer)?, single_loop(program, inner)?);
    let fused = new_loop(program, fused)?;
    edit_loops(program, outer_var, &mut |names, l, ranges| {
        require_serial(names, &l)?;
        let not_nested = || Illegal::NotNested { outer: outer.to_owned(), inner: inner.to_owned() };
        let Ok([Stmt::For(within)]) = <[Stmt; 1]>::try_from(l.body) else { return Err(not_nested()) };
        if within.var != inner_var {
            return Err(not_nested());
        }
        require_serial(names, &within)?;
        let Some(n) = within.extent.as_const().filter(|&n| n >= 1) else {
            return Err(Illegal::Body {
                target: inner.to_owned(),
                why: format!("its extent {} is not a constant", index_to_string(names, &within.extent)),
            });
        };
        let (a, b) = (Index::from(fused).floor_div(n), Index::from(fused).modulo(n));
        let mut body = within.body;
        substitute(&mut body, &[(outer_var, a.clone()), (inner_var, b.clone())]);
        if n > 1 {
            body.iter_mut()
                .for_each(|s| join_first(s, &Cond::Eq(a.clone(), 0.into()), &Cond::Eq(b.clone(), 0.into()), fused));
        }
        let stmt = Stmt::For(Loop { var: fused, extent: l.extent.scale(n), kind: LoopKind::Serial, body });
        Ok(simplify_block(vec![stmt], &mut ranges.clone()))
    })?;
    require_still_independent(program, fused)
}

/// Replaces the condition that both loops are at zero by that of the fused loop, so that later steps
/// recognize the first iteration of a reduction.
fn join_first(stmt: &mut Stmt, outer: &Cond, inner: &Cond, fused: LoopId) {
    fn without(cond: &Cond, part: &Cond) -> Option<Cond> {
        match cond {
            c if c == part => Some(Cond::True),
            Cond::And(a, b) => match (without(a, part), without(b, part)) {
                (Some(a), _) => Some(a.and((**b).clone())),
                (None, Some(b)) => Some((**a).clone().and(b)),
                (None, None) => None,
            },
            _ => None,
        }
    }
    if let Stmt::Update { first, .. } = stmt
        && let Some(rest) = without(first, outer).and_then(|rest| without(&rest, inner))
    {
        *first = Cond::Eq(fused.into(), 0.into()).and(rest);
    }
    stmt.blocks_mut().flatten().for_each(|s| join_first(s, outer, inner, fused));
}
