//! Multistage pipelining: asynchronous copies to shared memory, issued some iterations ahead.

use super::Illegal;
use super::pipeline::is_assignment;
use super::region::writes;
use super::tree::{
    allocated_in, buffer_id, edit_loops, require_fits, require_open, require_serial, simplify_block, single_loop,
    substitute,
};
use crate::expr::Cond;
use crate::gpu::relocate;
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, LoopKind, Program, Scope, Stmt};
use std::collections::BTreeSet;

/// Maximum number of iterations with completed or pending copies.
const MOST_STAGES: i64 = 8;

/// Applies [`Step::Stream`](super::Step::Stream).
pub fn stream(
    program: &mut Program,
    buffers: &[String],
    at: &str,
    stages: i64,
    [held, last, fed, multicast]: [bool; 4],
) -> Result<(), Illegal> {
    let copies: Vec<BufferId> = buffers.iter().map(|name| buffer_id(program, name)).collect::<Result<_, _>>()?;
    let var = single_loop(program, at)?;
    let least = if held { 3 } else { 2 };
    if !(least..=MOST_STAGES).contains(&stages) {
        let (target, most) = (at.to_owned(), MOST_STAGES);
        return Err(Illegal::OutOfRange { target, what: "number of stages", least, most, value: stages });
    }
    require_copies(program, buffers, &copies, [fed, multicast])?;
    require_open(program, var)?;
    // Copies that threads make together.
    let mut by_threads = BTreeSet::new();
    edit_loops(program, var, &mut |names, mut l, ranges| {
        let fail =
            |why: &str, buffer: &str| Err(Illegal::Body { target: at.to_owned(), why: format!("{why} `{buffer}`") });
        require_serial(names, &l)?;
        let Some(extent @ 1..) = l.extent.as_const() else {
            return fail("only in a loop of constant extent can copies go ahead of what reads", &buffers[0]);
        };
        let made = allocated_in(&l.body);
        for (copy, buffer) in copies.iter().zip(buffers) {
            match require_fill(&l.body, *copy, &made) {
                Ok(true) => {
                    by_threads.insert(*copy);
                }
                Ok(false) => {}
                Err(why) => return fail(why, buffer),
            }
        }
        let of_loop = Streamed { var, extent, stages, held, last };
        let before = of_loop.go_ahead(&mut l, &copies, ranges);
        Ok(before.into_iter().chain([Stmt::For(l)]).collect())
    })?;
    set_scopes(program, buffers, &copies, &|copy| !by_threads.contains(&copy), [fed, multicast])?;
    for copy in copies {
        program.buffers[copy.0 as usize].shape.insert(0, stages);
        require_fits(program, copy)?;
    }
    Ok(())
}

/// Checks that copies are in shared memory and distinct, and that their options are compatible.
fn require_copies(
    program: &Program,
    buffers: &[String],
    copies: &[BufferId],
    [fed, multicast]: [bool; 2],
) -> Result<(), Illegal> {
    if multicast && !fed {
        let why = "only a warp that does nothing else copies for other blocks (add `fed`)".to_owned();
        return Err(Illegal::Buffer { buffer: buffers.join(" "), why });
    }
    for (place, (id, name)) in copies.iter().zip(buffers).enumerate() {
        if program.buffer(*id).scope != Scope::Shared || copies[..place].contains(id) {
            let why = "each copy is named once and shared by a block (stage it as shared)".to_owned();
            return Err(Illegal::Buffer { buffer: name.clone(), why });
        }
    }
    Ok(())
}

/// Checks that one nest of a loop's body fills a copy from data available some iterations earlier; `made`
/// holds the buffers allocated in an iteration. Returns whether threads fill it together.
fn require_fill(body: &[Stmt], copy: BufferId, made: &[BufferId]) -> Result<bool, &'static str> {
    let filled: Vec<usize> = (0..body.len()).filter(|&i| writes(&body[i..=i], copy)).collect();
    let &[fill] = filled.as_slice() else {
        return Err("its body must hold exactly one nest that fills");
    };
    if !body[..fill].contains(&Stmt::Alloc(copy)) {
        return Err("each iteration must make anew");
    }
    let mut by_threads = false;
    body[fill].walk(&mut |s| {
        if matches!(s, Stmt::For(Loop { kind: LoopKind::Thread(_), .. })) {
            by_threads = true;
        }
    });
    if !is_assignment(&body[fill], copy) {
        return Err("its body must hold loops and conditions around one assignment to");
    }
    // The data copied must be available some iterations earlier.
    let mut is_there = true;
    body[fill].walk(&mut |s| {
        s.for_each_own_read(&mut |b, _| is_there &= !made.contains(&b) && !writes(body, b));
    });
    if !is_there {
        return Err("an iteration itself makes what is copied to");
    }
    Ok(by_threads)
}

/// Loop whose copies are issued ahead.
struct Streamed {
    var: LoopId,
    extent: i64,
    stages: i64,
    /// Whether a stage stays valid for one more iteration.
    held: bool,
    /// Whether an iteration issues copies at its end.
    last: bool,
}

impl Streamed {
    /// Makes each iteration issue the copies of a later one. Returns the statements before the loop.
    fn go_ahead(&self, l: &mut Loop, copies: &[BufferId], ranges: &Ranges) -> Vec<Stmt> {
        // Iterations use the stages in rotation.
        let turn = Index::from(self.var).modulo(self.stages);
        l.body.retain(|s| !matches!(s, Stmt::Alloc(b) if copies.contains(b)));
        for copy in copies {
            let mut place = |index: &[Index]| [std::slice::from_ref(&turn), index].concat();
            l.body = std::mem::take(&mut l.body).into_iter().map(|s| relocate(s, *copy, *copy, &mut place)).collect();
        }
        let (filling, others): (Vec<Stmt>, Vec<Stmt>) = std::mem::take(&mut l.body)
            .into_iter()
            .partition(|s| copies.iter().any(|copy| writes(std::slice::from_ref(s), *copy)));
        let of = |iteration: Index, ranges: &Ranges| {
            let mut block = filling.clone();
            substitute(&mut block, &[(self.var, iteration)]);
            simplify_block(block, &mut ranges.clone())
        };
        let ahead = if self.held { self.stages - 2 } else { self.stages - 1 };
        let mut before: Vec<Stmt> = copies.iter().map(|copy| Stmt::Alloc(*copy)).collect();
        for iteration in 0..ahead {
            if iteration > 0 {
                // There are at most this many groups, so this ends a group without waiting.
                before.push(Stmt::Wait(ahead as u8));
            }
            if iteration < self.extent {
                before.extend(of(iteration.into(), ranges));
            }
        }
        l.body = vec![Stmt::Wait((ahead - 1) as u8)];
        if self.extent > ahead {
            let mut around = ranges.clone();
            around.push(l.var, l.extent.clone());
            let next = Index::from(self.var).offset(ahead);
            let then = of(next.clone(), &around);
            let copies = Stmt::If { cond: Cond::Lt(next, l.extent.clone()), then, otherwise: Vec::new() };
            l.body.extend(others);
            let place = if self.last { l.body.len() } else { 1 };
            l.body.insert(place, copies);
        } else {
            l.body.extend(others);
        }
        before
    }
}

/// Sets the scope of each copy; `by_one` holds the copies that a single thread makes.
fn set_scopes(
    program: &mut Program,
    buffers: &[String],
    copies: &[BufferId],
    by_one: &dyn Fn(BufferId) -> bool,
    [fed, multicast]: [bool; 2],
) -> Result<(), Illegal> {
    for (copy, name) in copies.iter().zip(buffers) {
        if fed && !by_one(*copy) {
            let why = "threads copy it together, so that no warp does it alone (leave its loops serial)".to_owned();
            return Err(Illegal::Buffer { buffer: name.clone(), why });
        }
        program.buffers[copy.0 as usize].scope = match (by_one(*copy), fed) {
            (true, true) if multicast => Scope::Multicast,
            (true, true) => Scope::Produced,
            (true, false) => Scope::Bulk,
            (false, _) => Scope::Async,
        };
    }
    Ok(())
}
