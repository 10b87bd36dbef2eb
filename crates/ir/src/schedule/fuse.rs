//! Fusing two nested loops into one.

use super::Illegal;
use super::dependence::require_still_independent;
use super::tree::{edit_loops, new_loop, require_serial, simplify_block, single_loop};
use crate::index::Index;
use crate::program::{Loop, LoopKind, Program, Stmt};
use crate::text::index_to_string;

/// See [`super::Step::Fuse`].
pub fn fuse(program: &mut Program, outer: &str, inner: &str, fused: &str) -> Result<(), Illegal> {
    let (outer_var, inner_var) = (single_loop(program, outer)?, single_loop(program, inner)?);
    let fused = new_loop(program, fused)?;
    let names = program.clone();
    edit_loops(program, outer_var, &mut |l, ranges| {
        require_serial(&names, &l)?;
        let not_nested = || Illegal::NotNested { outer: outer.to_owned(), inner: inner.to_owned() };
        let [Stmt::For(within)] = l.body.as_slice() else { return Err(not_nested()) };
        if within.var != inner_var {
            return Err(not_nested());
        }
        require_serial(&names, within)?;
        let Some(n) = within.extent.as_const().filter(|&n| n >= 1) else {
            return Err(Illegal::Body {
                target: inner.to_owned(),
                why: format!("its extent {} is not a constant", index_to_string(&names, &within.extent)),
            });
        };
        let (a, b) = (Index::from(fused).floor_div(n), Index::from(fused).modulo(n));
        let body = within.body.iter().map(|s| s.substitute(outer_var, &a).substitute(inner_var, &b)).collect();
        let stmt = Stmt::For(Loop { var: fused, extent: l.extent.scale(n), kind: LoopKind::Serial, body });
        Ok(simplify_block(vec![stmt], &mut ranges.clone()))
    })?;
    require_still_independent(program, fused)
}
