//! Computation of a stage inside a loop of its reader.

use super::Illegal;
use super::region::{AccessKind, reads, redirect_reads, region, writes};
use super::tree::{
    at_start, buffer_id, count, edit_loops, nest, require_open, simplify_block, single_loop, substitute, substituted,
};
use crate::index::Index;
use crate::program::{BufferId, LoopId, LoopKind, Program, Role, Scope, Stmt};
use crate::text::index_to_string;

/// Applies [`Step::ComputeAt`](super::Step::ComputeAt).
pub fn compute_at(program: &mut Program, buffer: &str, at: &str) -> Result<(), Illegal> {
    let id = buffer_id(program, buffer)?;
    let var = single_loop(program, at)?;
    let fail = |why: String| Illegal::Buffer { buffer: buffer.to_owned(), why };
    let MiddleStage { loops, axes, leaf } = take_stage(program, id)?;
    let mut own = program.ranges();
    let is_of_sizes = |extent: &Index| loops.iter().all(|(v, _)| !extent.uses(*v));
    loops.iter().for_each(|(v, extent)| own.push(*v, extent.clone()));
    for (v, &n) in axes.iter().zip(&program.buffer(id).shape).filter_map(|(v, n)| Some((v.as_ref()?, n))) {
        let (_, extent) = loops.iter().find(|(l, _)| l == v).expect("an axis is a loop");
        // The tail at the end of a reduction may cover fewer elements than its start.
        let at_first = at_start(extent, loops.iter().map(|l| l.0).filter(|v| !axes.contains(&Some(*v))));
        let at_first = own.simplify(&at_first);
        // For an open size, the whole dimension is computed.
        let is_whole = at_first.as_const() == Some(n) || is_of_sizes(&at_first) && own.upper(&at_first) == Some(n);
        if !is_whole {
            let (v, extent) = (program.loop_name(*v), index_to_string(program, extent));
            return Err(fail(format!("its loop `{v}` of extent {extent} does not cover all {n} elements")));
        }
    }
    if count(program, var) == 0 {
        return Err(fail(format!("loop `{at}` is its own")));
    }
    let whole_shape = program.buffer(id).shape.clone();
    let mut shape = Vec::new();
    require_open(program, var)?;
    edit_loops(program, var, &mut |names, mut l, ranges| {
        let mut ranges = ranges.clone();
        ranges.push(l.var, l.extent.clone());
        let place = format!("in loop `{at}`");
        let needed = region(names, &l.body, id, AccessKind::Read, &ranges, &place).map_err(fail)?;
        shape = needed.most.clone();
        // The stage's own loops now cover the needed part only; subscripts are shifted by its start.
        let shifts: Vec<(LoopId, Index)> = axes
            .iter()
            .zip(&needed.lower)
            .filter(|(_, lo)| **lo != 0.into())
            .filter_map(|(v, lo)| v.map(|v| (v, lo.add(&v.into()))))
            .collect();
        let mut extents = Vec::with_capacity(loops.len());
        for (v, whole) in &loops {
            extents.push(match axes.iter().position(|a| *a == Some(*v)) {
                Some(d) if is_of_sizes(whole) => needed.extent[d].clone(),
                Some(d) if needed.lower[d] == 0.into() && needed.extent[d].as_const() == Some(whole_shape[d]) => {
                    substituted(whole, &shifts)
                }
                Some(_) => {
                    let v = names.loop_name(*v);
                    return Err(fail(format!("only a part of what its loop `{v}` runs over is read {place}")));
                }
                None => substituted(whole, &shifts),
            });
        }
        let mut moved = [leaf.clone()];
        substitute(&mut moved, &shifts);
        let moved = moved.map(|leaf| at_index(leaf, axes.iter().map(|v| v.map_or(0.into(), Index::from)).collect()));
        let nest = nest(loops.iter().zip(extents).map(|((v, _), e)| (*v, e, LoopKind::Serial)), moved.into());
        let body = redirect_reads(std::mem::take(&mut l.body), id, id, &mut ranges.clone(), &|index, ranges| {
            index.iter().zip(&needed.lower).map(|(e, lo)| ranges.simplify(&e.sub(lo))).collect()
        });
        l.body = body;
        let first = l.body.iter().position(|s| reads(std::slice::from_ref(s), id)).unwrap_or(0);
        let new = [Stmt::Alloc(id)].into_iter().chain(simplify_block(nest, &mut ranges));
        l.body.splice(first..first, new.collect::<Vec<_>>());
        Ok(vec![Stmt::For(l)])
    })?;
    if reads_outside(program, id, var) {
        return Err(fail(format!("it is read outside loop `{at}` too")));
    }
    let moved = &mut program.buffers[id.0 as usize];
    moved.shape = shape;
    moved.scope = Scope::Local;
    Ok(())
}

/// Intermediate stage: a nest of serial loops around the only assignment to its buffer.
pub struct MiddleStage {
    /// Loops of the stage with their extents, outermost first.
    pub loops: Vec<(LoopId, Index)>,
    /// Loop variable that is the subscript of each dimension; `None` if the dimension has a single element.
    pub axes: Vec<Option<LoopId>>,
    /// Assignment of the stage.
    pub leaf: Stmt,
}

/// Stage at its position in the program: a statement of the body that is a nest of serial loops around one
/// assignment.
pub struct StageNest<'a> {
    /// Position of the statement in the body.
    pub place: usize,
    /// Loops of the nest with their extents, outermost first.
    pub loops: Vec<(LoopId, Index)>,
    /// Assignment of the stage.
    pub leaf: &'a Stmt,
}

/// Finds the nest that computes a buffer.
pub fn stage_nest(program: &Program, id: BufferId) -> Result<StageNest<'_>, Illegal> {
    let no_nest = || Illegal::Buffer {
        buffer: program.buffer(id).name.clone(),
        why: "it is not computed by one nest of serial loops of its own".to_owned(),
    };
    let writers: Vec<usize> =
        (0..program.body.len()).filter(|&i| writes(std::slice::from_ref(&program.body[i]), id)).collect();
    let [place] = writers[..] else { return Err(no_nest()) };
    let (mut loops, mut leaf) = (Vec::new(), &program.body[place]);
    while let Stmt::For(l) = leaf {
        let ([only], LoopKind::Serial) = (l.body.as_slice(), l.kind) else { return Err(no_nest()) };
        loops.push((l.var, l.extent.clone()));
        leaf = only;
    }
    if leaf.own_write().is_none() {
        return Err(no_nest());
    }
    Ok(StageNest { place, loops, leaf })
}

/// Stage removed from the program.
pub struct TakenStage {
    /// Loops of the stage with their extents, outermost first.
    pub loops: Vec<(LoopId, Index)>,
    /// Assignment of the stage.
    pub leaf: Stmt,
}

/// Finds the nest of an intermediate stage.
fn movable_nest(program: &Program, id: BufferId) -> Result<StageNest<'_>, Illegal> {
    let buffer = program.buffer(id);
    if buffer.role != Role::Temporary {
        let why = "only a stage in between can be moved".to_owned();
        return Err(Illegal::Buffer { buffer: buffer.name.clone(), why });
    }
    stage_nest(program, id)
}

/// Removes a stage and its allocation, if nothing between it and its readers would change its result.
pub fn take_nest(program: &mut Program, id: BufferId) -> Result<TakenStage, Illegal> {
    let fail = |why: String| Illegal::Buffer { buffer: program.buffer(id).name.clone(), why };
    let StageNest { place, loops, leaf: stmt } = movable_nest(program, id)?;
    let mut sources = Vec::new();
    stmt.for_each_own_read(&mut |b, _| sources.push(b));
    if let Stmt::Update { .. } = stmt {
        // The read of the old value comes last.
        sources.pop();
    }
    if sources.contains(&id) {
        return Err(fail("it reads itself".to_owned()));
    }
    if let Some(source) = sources.into_iter().find(|&b| writes(&program.body[place + 1..], b)) {
        let source = &program.buffer(source).name;
        return Err(fail(format!("it reads `{source}`, which is written while it is needed")));
    }
    let leaf = stmt.clone();
    program.body.remove(place);
    program.body.retain(|s| *s != Stmt::Alloc(id));
    program.body = drop_prefetches(std::mem::take(&mut program.body), id);
    Ok(TakenStage { loops, leaf })
}

/// Removes a stage each of whose subscripts is a loop variable.
pub fn take_stage(program: &mut Program, id: BufferId) -> Result<MiddleStage, Illegal> {
    let StageNest { loops, leaf, .. } = movable_nest(program, id)?;
    let (_, index) = leaf.own_write().expect("a stage's leaf is an assignment");
    let axis = |(i, n): (&Index, &i64)| match loops.iter().map(|l| l.0).find(|v| *i == Index::from(*v)) {
        None if *n == 1 && *i == 0.into() => Some(None),
        None => None,
        found => Some(found),
    };
    let axes = index.iter().zip(&program.buffer(id).shape).map(axis).collect::<Option<Vec<_>>>().filter(|axes| {
        // Each dimension has a separate loop.
        axes.iter().enumerate().all(|(at, v)| v.is_none() || !axes[..at].contains(v))
    });
    let axes = axes.ok_or_else(|| Illegal::Buffer {
        buffer: program.buffer(id).name.clone(),
        why: "each of its subscripts must be a loop of its own; move it before splitting them".to_owned(),
    })?;
    let TakenStage { loops, leaf } = take_nest(program, id)?;
    Ok(MiddleStage { loops, axes, leaf })
}

/// Removes the prefetches of a buffer and the loops around them from a block.
fn drop_prefetches(block: Vec<Stmt>, id: BufferId) -> Vec<Stmt> {
    let without = |mut s: Stmt| {
        let had_blocks = s.blocks().any(|b| !b.is_empty());
        s.blocks_mut().for_each(|b| *b = drop_prefetches(std::mem::take(b), id));
        let emptied = had_blocks && s.blocks().all(|b| b.is_empty());
        let fetches = matches!(s, Stmt::Prefetch { buffer, .. } if buffer == id);
        (!emptied && !fetches).then_some(s)
    };
    block.into_iter().filter_map(without).collect()
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
