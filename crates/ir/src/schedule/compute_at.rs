//! Computing a stage where it is used.

use super::Illegal;
use super::region::{Access, reads, redirect_reads, region};
use super::tree::{buffer_id, edit_loops, nest, simplify_block, single_loop};
use crate::index::Index;
use crate::program::{BufferId, LoopId, LoopKind, Program, Role, Scope, Stmt};

/// See [`super::Step::ComputeAt`].
pub fn compute_at(program: &mut Program, buffer: &str, at: &str) -> Result<(), Illegal> {
    let id = buffer_id(program, buffer)?;
    let var = single_loop(program, at)?;
    let fail = |why: &str| Illegal::Buffer { buffer: buffer.to_owned(), why: why.to_owned() };
    if program.buffer(id).role != Role::Temporary {
        return Err(fail("only a stage in between can be moved"));
    }
    let (loops, leaf) =
        take_stage(program, id).ok_or_else(|| fail("it is not computed by one plain nest of its own"))?;
    let (_, index) = leaf.own_write().expect("a stage's leaf writes");
    let axes: Option<Vec<LoopId>> =
        index.iter().map(|i| loops.iter().map(|l| l.0).find(|v| *i == Index::from(*v))).collect();
    let axes = axes.ok_or_else(|| fail("its subscripts are not its loops"))?;
    let names = program.clone();
    let mut shape = Vec::new();
    edit_loops(program, var, &mut |mut l, ranges| {
        let mut ranges = ranges.clone();
        ranges.push(l.var, l.extent.clone());
        let needed = region(&names, &l.body, id, Access::Read, &ranges)
            .map_err(|why| Illegal::Buffer { buffer: buffer.to_owned(), why })?;
        shape = needed.most.clone();
        // The stage's own loops, now over the needed part: what they computed is shifted by where it begins.
        let extent_of = |v: LoopId, whole: &Index| match axes.iter().position(|a| *a == v) {
            Some(d) => needed.extent[d].clone(),
            None => whole.clone(),
        };
        let shifted = axes
            .iter()
            .zip(&needed.lower)
            .fold(leaf.clone(), |leaf, (v, lo)| leaf.substitute(*v, &Index::from(*v).add(lo)));
        let moved = at_index(shifted, axes.iter().map(|&v| v.into()).collect());
        let nest = nest(loops.iter().map(|(v, e)| (*v, extent_of(*v, e), LoopKind::Serial)), vec![moved]);
        let body = redirect_reads(std::mem::take(&mut l.body), id, id, &mut ranges.clone(), &|index, ranges| {
            index.iter().zip(&needed.lower).map(|(e, lo)| ranges.simplify(&e.sub(lo))).collect()
        });
        l.body = body;
        let first = l.body.iter().position(|s| reads(std::slice::from_ref(s), id)).unwrap_or(0);
        let new = [Stmt::Alloc(id)].into_iter().chain(simplify_block(nest, &mut ranges));
        l.body.splice(first..first, new.collect::<Vec<_>>());
        Ok(vec![Stmt::For(l)])
    })?;
    let everywhere = reads_outside(program, id, var);
    if everywhere {
        return Err(fail("it is read outside that loop too"));
    }
    let moved = &mut program.buffers[id.0 as usize];
    moved.shape = shape;
    moved.scope = Scope::Local;
    Ok(())
}

/// Removes the nest and the allocation of a stage from the top level, and gives its loops and its assignment.
pub fn take_stage(program: &mut Program, id: BufferId) -> Option<(Vec<(LoopId, Index)>, Stmt)> {
    let place = program.body.iter().position(|s| super::region::writes(std::slice::from_ref(s), id))?;
    let (mut loops, mut stmt) = (Vec::new(), &program.body[place]);
    while let Stmt::For(l) = stmt {
        let [only] = l.body.as_slice() else { return None };
        if l.kind != LoopKind::Serial {
            return None;
        }
        loops.push((l.var, l.extent.clone()));
        stmt = only;
    }
    stmt.own_write().filter(|(b, _)| *b == id)?;
    let leaf = stmt.clone();
    program.body.remove(place);
    program.body.retain(|s| *s != Stmt::Alloc(id));
    Some((loops, leaf))
}

fn at_index(stmt: Stmt, at: Vec<Index>) -> Stmt {
    match stmt {
        Stmt::Store { buffer, value, .. } => Stmt::Store { buffer, index: at, value },
        Stmt::Update { buffer, op, value, first, .. } => Stmt::Update { buffer, index: at, op, value, first },
        other => other,
    }
}

fn reads_outside(program: &Program, id: BufferId, var: LoopId) -> bool {
    fn search(block: &[Stmt], id: BufferId, var: LoopId) -> bool {
        block.iter().any(|s| match s {
            Stmt::For(l) if l.var == var => false,
            _ => {
                let mut own = false;
                s.for_each_own_read(&mut |b, _| own |= b == id);
                own || s.blocks().any(|b| search(b, id, var))
            }
        })
    }
    search(&program.body, id, var)
}
