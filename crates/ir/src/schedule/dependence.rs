//! Legality checks: dependences between iterations of a loop that access the same element.

use super::Illegal;
use super::tree::{allocated_in, count_in};
use crate::dependence::{DataRace, Subscripts, are_disjoint, find_race};
use crate::expr::{Cond, ReduceOp};
use crate::index::{Atom, Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, LoopKind, Program, Stmt};
use crate::text::index_to_string;

/// Access to an element of a buffer that outlives the analyzed block.
struct OuterAccess {
    buffer: BufferId,
    index: Vec<Index>,
    /// All enclosing loops.
    ranges: Ranges,
    writes: bool,
    /// Operation and start condition if the access is by an update, which reads and writes.
    update: Option<(ReduceOp, Cond)>,
}

/// Requires that the iterations of a loop are independent: no iteration accesses an element that another one
/// writes.
///
/// # Errors
/// [`Illegal::Dependent`] with two accesses that may conflict.
pub fn require_independent(names: &Program, l: &Loop, ranges: &Ranges) -> Result<(), Illegal> {
    match find_race(l, ranges) {
        None => Ok(()),
        Some(DataRace { buffer, write, other }) => Err(dependent(names, l.var, buffer, write, other)),
    }
}

/// Requires that parallel loops around and inside the loop over `var` are still provably independent after a
/// rewrite of extents or subscripts.
///
/// # Errors
/// See [`require_independent`].
pub fn require_still_independent(program: &Program, var: LoopId) -> Result<(), Illegal> {
    require_any_order(program, Some(var))
}

/// Requires that all parallel loops are still provably independent after a rewrite of subscripts.
///
/// # Errors
/// See [`require_independent`].
pub fn require_all_still_independent(program: &Program) -> Result<(), Illegal> {
    require_any_order(program, None)
}

/// Requires that parallel loops are independent; `near` restricts the check to loops around and inside the
/// given one.
fn require_any_order(program: &Program, near: Option<LoopId>) -> Result<(), Illegal> {
    program.parts().into_iter().try_for_each(|part| still_independent(program, part, near, &mut program.ranges()))
}

fn still_independent(
    program: &Program,
    block: &[Stmt],
    near: Option<LoopId>,
    ranges: &mut Ranges,
) -> Result<(), Illegal> {
    for s in block {
        if let Stmt::For(l) = s {
            let in_any_order = match l.kind {
                LoopKind::Serial | LoopKind::Unrolled | LoopKind::Tensor(_) => false,
                LoopKind::Parallel
                | LoopKind::Vectorized
                | LoopKind::Block(_)
                | LoopKind::Thread(_)
                | LoopKind::Turns => true,
            };
            let is_near = |var: LoopId| {
                ranges.loops().iter().any(|(v, _)| *v == var) || count_in(std::slice::from_ref(s), var) > 0
            };
            if in_any_order && near.is_none_or(is_near) {
                require_independent(program, l, ranges)?;
            }
        }
        let mut found = Ok(());
        s.each_block(ranges, |b, ranges| {
            if found.is_ok() {
                found = still_independent(program, b, near, ranges);
            }
        });
        found?;
    }
    Ok(())
}

/// Requires that iterations which access the same element keep their order when the loops of a perfect nest
/// are reordered.
///
/// Such iterations differ only in loops that do not determine the element, so the order of these loops must
/// be kept. Updates with the same operation commute, except that the first one must stay first.
pub fn require_order_kept(
    names: &Program,
    before: &[Loop],
    after: &[LoopId],
    body: &[Stmt],
    outside: &Ranges,
) -> Result<(), Illegal> {
    let mut ranges = outside.clone();
    before.iter().for_each(|l| ranges.push(l.var, l.extent.clone()));
    for (a, b) in conflicts(&accesses(body, &mut ranges)) {
        let free = free_loops(before, a, b);
        if let (Some((op, first)), Some((other_op, other_first))) = (&a.update, &b.update)
            && op == other_op
            && first_at_zero(first, &free)
            && first_at_zero(other_first, &free)
        {
            continue;
        }
        let mut now = after.iter().filter(|v| free.contains(v));
        if let Some(moved) = free.iter().find(|v| now.next() != Some(v)) {
            return Err(dependent(names, *moved, a.buffer, &a.index, &b.index));
        }
    }
    Ok(())
}

/// Whether the condition never holds, or holds only where all the loops are at zero, the first iteration in
/// any order.
fn first_at_zero(first: &Cond, free: &[LoopId]) -> bool {
    fn is_zero(cond: &Cond, vars: &mut Vec<LoopId>) -> bool {
        match cond {
            Cond::Eq(a, b) => {
                let sum = a.sub(b);
                let add = |(atom, c): &(Atom, i64)| match atom {
                    Atom::Var(v) if *c > 0 => {
                        vars.push(*v);
                        true
                    }
                    _ => false,
                };
                sum.constant() == 0 && sum.terms().iter().all(add)
            }
            Cond::And(a, b) => is_zero(a, vars) && is_zero(b, vars),
            Cond::True | Cond::Lt(..) | Cond::Less(..) | Cond::Not(..) => false,
        }
    }
    let mut vars = Vec::new();
    *first == Cond::Not(Box::new(Cond::True)) || is_zero(first, &mut vars) && free.iter().all(|v| vars.contains(v))
}

/// Loops of a nest in which iterations with conflicting accesses may differ.
fn free_loops(nest: &[Loop], a: &OuterAccess, b: &OuterAccess) -> Vec<LoopId> {
    let mut free: Vec<LoopId> = Vec::new();
    for l in nest.iter().filter(|l| a.ranges.upper(&l.extent).is_none_or(|n| n > 1)) {
        // The proof assumes that the previous loops are equal, which matters if the subscripts use them.
        let relies_on_free = free.iter().any(|v| a.index.iter().chain(&b.index).any(|e| e.uses(*v)));
        if relies_on_free
            || !are_disjoint(Subscripts::new(&a.index, &a.ranges), Subscripts::new(&b.index, &b.ranges), l.var)
        {
            free.push(l.var);
        }
    }
    free
}

fn accesses(block: &[Stmt], ranges: &mut Ranges) -> Vec<OuterAccess> {
    let mut found = Vec::new();
    gather(block, &allocated_in(block), ranges, &mut found);
    found
}

fn gather(block: &[Stmt], private: &[BufferId], ranges: &mut Ranges, found: &mut Vec<OuterAccess>) {
    for s in block {
        let mut add = |buffer, index: &[Index], writes, update| {
            if !private.contains(&buffer) {
                found.push(OuterAccess { buffer, index: index.to_vec(), ranges: ranges.clone(), writes, update });
            }
        };
        let (mut reads, mut update) = (Vec::new(), None);
        s.for_each_own_read(&mut |buffer, index| reads.push((buffer, index.to_vec())));
        if let Stmt::Update { op, first, .. } = s {
            // The read of the old value comes last and belongs to the write.
            reads.pop();
            update = Some((*op, first.clone()));
        }
        reads.iter().for_each(|(buffer, index)| add(*buffer, index, false, None));
        if let Some((buffer, index)) = s.own_write() {
            add(buffer, index, true, update);
        }
        s.each_block(ranges, |b, ranges| gather(b, private, ranges, found));
    }
}

/// Pairs of accesses to one buffer in which the first writes, including each write paired with itself.
fn conflicts(all: &[OuterAccess]) -> impl Iterator<Item = (&OuterAccess, &OuterAccess)> {
    let writes = all.iter().enumerate().filter(|(_, a)| a.writes);
    writes.flat_map(move |(i, a)| {
        let others = all.iter().enumerate().filter(move |(j, b)| b.buffer == a.buffer && (!b.writes || *j >= i));
        others.map(move |(_, b)| (a, b))
    })
}

fn dependent(names: &Program, var: LoopId, buffer: BufferId, write: &[Index], other: &[Index]) -> Illegal {
    let element = |index: &[Index]| {
        let subscripts: Vec<String> = index.iter().map(|i| index_to_string(names, i)).collect();
        format!("{}[{}]", names.buffer(buffer).name, subscripts.join(", "))
    };
    let why = if write == other {
        format!("several of them may write the same element {}", element(write))
    } else {
        format!("what one writes as {} another may use as {}", element(write), element(other))
    };
    Illegal::Dependent { target: names.loop_name(var).to_owned(), why }
}
