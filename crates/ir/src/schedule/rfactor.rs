//! Factored reductions: partial sums, then their sum.

use super::Illegal;
use super::compute_at::stage_nest;
use super::tree::{
    at_start, buffer_id, drop_decided, nest, new_buffer, new_loop, require_fits, single_loop, substitute, substituted,
};
use crate::expr::{Cond, Expr};
use crate::index::Index;
use crate::program::{LoopId, LoopKind, Program, Role, Scope, Stmt};
use crate::text::index_to_string;

/// Applies [`Step::Rfactor`](super::Step::Rfactor).
///
/// # Source
/// `rfactor` of Halide (Suriana, Adams and Kamil, "Parallel associative reductions in Halide", 2017).
pub fn rfactor(program: &mut Program, stage: &str, target: &str, name: &str) -> Result<(), Illegal> {
    let result = buffer_id(program, stage)?;
    let var = single_loop(program, target)?;
    let fail = |why: String| Illegal::Body { target: target.to_owned(), why };
    let found = stage_nest(program, result)?;
    let place = found.place;
    let Stmt::Update { index, op, value, first, .. } = found.leaf.clone() else {
        return Err(fail(format!("the stage `{stage}` does not reduce")));
    };
    let mut reads_itself = false;
    value.for_each_load(&mut |b, _| reads_itself |= b == result);
    if reads_itself {
        return Err(fail(format!("the stage `{stage}` reads itself")));
    }
    let is_axis = |v: LoopId| index.iter().any(|i| i.uses(v));
    if is_axis(var) || !found.loops.iter().any(|(v, _)| *v == var) {
        return Err(fail(format!("the stage `{stage}` does not reduce over it")));
    }
    let others: Vec<LoopId> = found.loops.iter().map(|l| l.0).filter(|&v| v != var && !is_axis(v)).collect();
    let mut ranges = program.ranges();
    found.loops.iter().for_each(|(v, extent)| ranges.push(*v, extent.clone()));
    // Every partial sum has elements in the first iteration of the other loops.
    let begin = |i: &Index| at_start(i, others.iter().copied());
    // Number of elements of an axis, and the extent of its loop.
    let axis = |v: LoopId, extent: &Index| {
        let is_own = v != var && found.loops.iter().all(|(other, _)| !extent.uses(*other));
        if is_own && ranges.is_open(extent) {
            return Some((ranges.upper(extent)?, extent.clone()));
        }
        let n = ranges.simplify(&begin(extent)).as_const()?;
        let is_constant = ranges.upper(extent) == Some(n) && (v == var || extent.as_const() == Some(n));
        // Later iterations of the other loops may have fewer partial sums.
        is_constant.then(|| (n, n.into()))
    };
    let mut axes: Vec<(LoopId, i64, Index)> = Vec::with_capacity(found.loops.len());
    for (v, extent) in &found.loops {
        let is_fine = if *v == var || is_axis(*v) {
            let axis = axis(*v, extent).ok_or("is not a constant");
            axis.map(|(n, there)| axes.push((*v, n, there)))
        } else {
            ranges.lower(extent).filter(|n| *n >= 1).map(|_| ()).ok_or("may be empty")
        };
        if let Err(why) = is_fine {
            let (extent, v) = (index_to_string(program, extent), program.loop_name(*v));
            return Err(fail(format!("the extent {extent} of loop `{v}` {why}")));
        }
    }
    let at_start = first.map_index(&mut |i| begin(i).substitute(var, &Index::from(0)));
    if drop_decided(&at_start) != Cond::True {
        return Err(fail(format!("the stage `{stage}` does not begin where all its loops do")));
    }

    let loops = found.loops;
    let dtype = program.buffer(result).dtype;
    let parts = new_buffer(program, name, dtype, Scope::Global, Role::Temporary)?;
    program.buffers[parts.0 as usize].shape = axes.iter().map(|axis| axis.1).collect();
    require_fits(program, parts)?;
    let mut by: Vec<(LoopId, Index)> = Vec::with_capacity(loops.len());
    let mut nest_of_parts = Vec::with_capacity(loops.len());
    for (v, extent) in &loops {
        let own = new_loop(program, &format!("{name}.{}", program.loop_name(*v)))?;
        nest_of_parts.push((own, substituted(extent, &by), LoopKind::Serial));
        by.push((*v, own.into()));
    }
    let places: Vec<Index> = axes.iter().map(|axis| axis.0.into()).collect();
    let started = others.iter().fold(Cond::True, |all, &v| all.and(Cond::Eq(v.into(), 0.into())));
    let mut part = [Stmt::Update { buffer: parts, index: places.clone(), op, value, first: started }];
    substitute(&mut part, &by);
    let in_parts = nest(nest_of_parts.into_iter(), part.into());
    let read = Expr::Load(parts, places);
    let first = Cond::Eq(var.into(), 0.into());
    let rest = Stmt::Update { buffer: result, index, op, value: read, first };
    let together = nest(axes.into_iter().map(|(v, _, there)| (v, there, LoopKind::Serial)), vec![rest]);
    let new = [Stmt::Alloc(parts)].into_iter().chain(in_parts).chain(together);
    program.body.splice(place..=place, new);
    Ok(())
}
