//! Steps that change how a loop's iterations are executed.

use super::Illegal;
use super::dependence::require_independent;
use super::tree::{edit_loops, loop_id, loops_around, require_serial};
use crate::gpu::products;
use crate::index::Ranges;
use crate::program::{Loop, LoopKind, Program, Stmt, TensorProduct};
use crate::text::index_to_string;

/// Maximum number of lanes; more are useless on any machine and only bloat the code.
const MOST_LANES: i64 = 1024;
/// Maximum number of copies of a loop body.
const MOST_UNROLLED: i64 = 4096;

/// Applies [`Step::Vectorize`](super::Step::Vectorize).
pub fn vectorize(program: &mut Program, target: &str) -> Result<(), Illegal> {
    set_kind(program, target, LoopKind::Vectorized, &|names, l, ranges| {
        if !l.body.iter().all(Stmt::is_vectorizable) {
            return Err(Illegal::Body {
                target: target.to_owned(),
                why: "only a loop of plain assignments, or of unrolled loops of such, can be vectorized".to_owned(),
            });
        }
        bounded(names, l, ranges, MOST_LANES)?;
        require_independent(names, l, ranges)
    })
}

/// Applies [`Step::Unroll`](super::Step::Unroll).
pub fn unroll(program: &mut Program, target: &str) -> Result<(), Illegal> {
    set_kind(program, target, LoopKind::Unrolled, &|names, l, ranges| bounded(names, l, ranges, MOST_UNROLLED))
}

/// Applies [`Step::Parallel`](super::Step::Parallel).
pub fn parallel(program: &mut Program, target: &str) -> Result<(), Illegal> {
    require_none_on_path(program, target, LoopKind::Parallel)?;
    set_kind(program, target, LoopKind::Parallel, &require_independent)
}

/// Applies [`Step::Bind`](super::Step::Bind).
pub fn bind(program: &mut Program, target: &str, axis: LoopKind) -> Result<(), Illegal> {
    if !matches!(axis, LoopKind::Block(0..=2) | LoopKind::Thread(0..=2) | LoopKind::Turns) {
        return Err(Illegal::Body { target: target.to_owned(), why: format!("`{}` is not a GPU axis", axis.name()) });
    }
    require_none_on_path(program, target, axis)?;
    set_kind(program, target, axis, &require_independent)
}

/// Applies [`Step::Tensorize`](super::Step::Tensorize).
pub fn tensorize(program: &mut Program, target: &str, how: TensorProduct) -> Result<(), Illegal> {
    set_kind(program, target, LoopKind::Tensor(how), &|names, l, ranges| {
        let no_product = |why: &str| Illegal::Body { target: target.to_owned(), why: why.to_owned() };
        products::check(names, l, how, ranges).map_err(no_product)
    })
}

/// Requires that no loop around or inside this one is of the given kind.
fn require_none_on_path(program: &Program, target: &str, kind: LoopKind) -> Result<(), Illegal> {
    let var = loop_id(program, target)?;
    let around = loops_around(program, var);
    let mut found = around.iter().find(|l| l.kind == kind).map(|l| l.var);
    for s in program.parts().into_iter().flatten() {
        s.walk(&mut |s| {
            if let Stmt::For(l) = s
                && l.kind == kind
                && l.var != var
                && loops_around(program, l.var).iter().any(|l| l.var == var)
            {
                found = Some(l.var);
            }
        });
    }
    match found {
        None => Ok(()),
        Some(other) => Err(Illegal::Body {
            target: target.to_owned(),
            why: format!("loop `{}`, around or inside it, is {} already", program.loop_name(other), kind.name()),
        }),
    }
}

type Check<'a> = &'a dyn Fn(&Program, &Loop, &Ranges) -> Result<(), Illegal>;

/// Sets the kind of every loop of this name; each must be serial and pass the check.
fn set_kind(program: &mut Program, target: &str, kind: LoopKind, check: Check) -> Result<(), Illegal> {
    let var = loop_id(program, target)?;
    edit_loops(program, var, &mut |names, mut l, ranges| {
        require_serial(names, &l)?;
        check(names, &l, ranges)?;
        l.kind = kind;
        Ok(vec![Stmt::For(l)])
    })
}

fn bounded(names: &Program, l: &Loop, ranges: &Ranges, most: i64) -> Result<(), Illegal> {
    match ranges.upper(&l.extent) {
        Some(n) if n <= most => Ok(()),
        _ => Err(Illegal::TooLong {
            target: names.loop_name(l.var).to_owned(),
            extent: index_to_string(names, &l.extent),
            most,
        }),
    }
}
