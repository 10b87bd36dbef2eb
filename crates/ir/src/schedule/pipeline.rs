//! Software pipelining of copies to shared memory through registers.

use super::Illegal;
use super::region::writes;
use super::tree::{
    allocated_in, buffer_id, edit_loops, new_buffer, require_fits, require_open, require_serial, simplify_block,
    single_loop, substitute,
};
use crate::expr::{Cond, Expr};
use crate::gpu::relocate;
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, Program, Role, Scope, Stmt};

/// Applies [`Step::Pipeline`](super::Step::Pipeline).
pub fn pipeline(program: &mut Program, buffer: &str, at: &str, name: &str, twice: bool) -> Result<(), Illegal> {
    let copy = buffer_id(program, buffer)?;
    let var = single_loop(program, at)?;
    let dtype = program.buffer(copy).dtype;
    let ahead = new_buffer(program, name, dtype, Scope::Register, Role::Temporary)?;
    let mut shape = Vec::new();
    require_open(program, var)?;
    edit_loops(program, var, &mut |names, mut l, ranges| {
        let fail = |why: &str| Illegal::Body { target: at.to_owned(), why: format!("{why} `{buffer}`") };
        require_serial(names, &l)?;
        let Some(extent @ 1..) = l.extent.as_const() else {
            return Err(fail("only in a loop of constant extent can loads go ahead of the copy"));
        };
        let fills: Vec<usize> = (0..l.body.len()).filter(|&i| writes(&l.body[i..=i], copy)).collect();
        let &[fill] = fills.as_slice() else {
            return Err(fail("its body must hold exactly one nest that fills"));
        };
        if !l.body[..fill].contains(&Stmt::Alloc(copy)) {
            return Err(fail("each iteration must make anew"));
        }
        let mut around = ranges.clone();
        around.push(l.var, l.extent.clone());
        let mut loops = Vec::new();
        let (put, load) = divided(&l.body[fill], copy, ahead, &mut loops)
            .ok_or_else(|| fail("its body must hold loops and conditions around one assignment to"))?;
        let mut inside = around.clone();
        for (v, extent) in &loops {
            let most = inside.upper(extent).ok_or_else(|| fail("there is no bound to the loops that fill"))?;
            shape.push(most);
            inside.push(*v, extent.clone());
        }
        // The data loaded must be available one iteration earlier.
        let made = allocated_in(&l.body);
        let mut is_there = true;
        load.walk(&mut |s| {
            s.for_each_own_read(&mut |b, _| is_there &= !made.contains(&b) && !writes(&l.body, b));
        });
        if !is_there {
            return Err(fail("an iteration itself makes what is copied to"));
        }
        let of = |iteration: Index, ranges: &Ranges| {
            let mut block = vec![load.clone()];
            substitute(&mut block, &[(var, iteration)]);
            simplify_block(block, &mut ranges.clone())
        };
        let first = of(Index::from(0), ranges);
        let mut new = vec![put];
        if extent > 1 {
            let next = Index::from(var).offset(1);
            let then = of(next.clone(), &around);
            new.push(Stmt::If { cond: Cond::Lt(next, l.extent.clone()), then, otherwise: Vec::new() });
        }
        l.body.splice(fill..=fill, new);
        let mut before = vec![Stmt::Alloc(ahead)];
        if twice {
            l.body.retain(|s| *s != Stmt::Alloc(copy));
            let turn = Index::from(var).modulo(2);
            let mut place = |index: &[Index]| [std::slice::from_ref(&turn), index].concat();
            l.body = l.body.into_iter().map(|s| relocate(s, copy, copy, &mut place)).collect();
            before.push(Stmt::Alloc(copy));
        }
        Ok(before.into_iter().chain(first).chain([Stmt::For(l)]).collect())
    })?;
    program.buffers[ahead.0 as usize].shape = shape;
    if twice {
        program.buffers[copy.0 as usize].shape.insert(0, 2);
    }
    require_fits(program, copy)?;
    require_fits(program, ahead)
}

/// Whether a statement consists of loops and conditions around one assignment to the buffer.
pub fn is_assignment(fill: &Stmt, copy: BufferId) -> bool {
    match fill {
        Stmt::For(Loop { body, .. }) => matches!(body.as_slice(), [only] if is_assignment(only, copy)),
        Stmt::If { then, otherwise, .. } => {
            otherwise.is_empty() && matches!(then.as_slice(), [only] if is_assignment(only, copy))
        }
        Stmt::Store { buffer, .. } => *buffer == copy,
        _ => false,
    }
}

/// Splits a nest that fills a buffer into one that fills it from registers and one that loads these
/// registers, which have the nest's loops as axes.
fn divided(fill: &Stmt, copy: BufferId, ahead: BufferId, loops: &mut Vec<(LoopId, Index)>) -> Option<(Stmt, Stmt)> {
    match fill {
        Stmt::For(l) => {
            let [only] = l.body.as_slice() else { return None };
            loops.push((l.var, l.extent.clone()));
            let (put, load) = divided(only, copy, ahead, loops)?;
            let around = |body| Stmt::For(Loop { body: vec![body], extent: l.extent.clone(), ..*l });
            Some((around(put), around(load)))
        }
        Stmt::If { cond, then, otherwise } if otherwise.is_empty() => {
            let [only] = then.as_slice() else { return None };
            let (put, load) = divided(only, copy, ahead, loops)?;
            let under = |s| Stmt::If { cond: cond.clone(), then: vec![s], otherwise: Vec::new() };
            Some((under(put), under(load)))
        }
        Stmt::Store { buffer, index, value } if *buffer == copy => {
            let place: Vec<Index> = loops.iter().map(|(v, _)| (*v).into()).collect();
            let put = Stmt::Store { buffer: copy, index: index.clone(), value: Expr::Load(ahead, place.clone()) };
            Some((put, Stmt::Store { buffer: ahead, index: place, value: value.clone() }))
        }
        _ => None,
    }
}
