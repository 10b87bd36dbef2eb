//! Access to a buffer through a copy that has the stage's loops as its axes.

use super::Illegal;
use super::compute_at::stage_nest;
use super::tree::{buffer_id, nest, new_buffer, new_loop, require_fits, substituted};
use crate::dependence::writes_are_disjoint;
use crate::expr::Expr;
use crate::index::Index;
use crate::program::{LoopId, LoopKind, Program, Role, Scope, Stmt};
use crate::text::index_to_string;

/// Applies [`Step::Reindex`](super::Step::Reindex).
///
/// # Source
/// `reindex` of TVM's TensorIR (Feng et al., 2023, arXiv 2207.04296). This variant takes the buffer rather
/// than the position of the access, and uses only the loops that occur in the subscripts.
pub fn reindex(program: &mut Program, stage: &str, buffer: &str, name: &str) -> Result<(), Illegal> {
    let (reader, source) = (buffer_id(program, stage)?, buffer_id(program, buffer)?);
    let fail = |why: String| Illegal::Buffer { buffer: buffer.to_owned(), why };
    let found = stage_nest(program, reader)?;
    let (place, leaf) = (found.place, found.leaf.clone());
    let mut reads: Vec<Vec<Index>> = Vec::new();
    leaf.for_each_own_read(&mut |b, index| {
        if b == source && !reads.iter().any(|r| r == index) {
            reads.push(index.to_vec());
        }
    });
    let is_written = source == reader;
    if is_written {
        let old_value = usize::from(matches!(leaf, Stmt::Update { .. }));
        let mut n_reads = 0;
        leaf.for_each_own_read(&mut |b, _| n_reads += usize::from(b == source));
        if n_reads > old_value {
            return Err(fail("the stage reads what it computes".to_owned()));
        }
        reads = leaf.own_write().map(|(_, index)| index.to_vec()).into_iter().collect();
    }
    let index = match <[Vec<Index>; 1]>::try_from(reads) {
        Ok([index]) => index,
        Err(reads) if reads.is_empty() => return Err(fail(format!("it is not read by the stage `{stage}`"))),
        Err(reads) => return Err(fail(format!("the stage `{stage}` reads {} different elements of it", reads.len()))),
    };
    let mut ranges = program.ranges();
    found.loops.iter().for_each(|(v, extent)| ranges.push(*v, extent.clone()));
    for (i, &n) in index.iter().zip(&program.buffer(source).shape) {
        // A condition around the read would not move with it.
        if !(ranges.lower(i).is_some_and(|l| l >= 0) && ranges.upper(i).is_some_and(|u| u < n)) {
            return Err(fail(format!("the subscript {} may lie outside it", index_to_string(program, i))));
        }
    }
    let mut axes = found.loops;
    axes.retain(|(v, _)| index.iter().any(|i| i.uses(*v)));
    if is_written && axes.iter().any(|(v, _)| !writes_are_disjoint(&index, *v, &ranges)) {
        return Err(fail("several iterations of the stage's loops write one element of it".to_owned()));
    }
    if axes.is_empty() {
        return Err(fail(format!("its subscripts in the stage `{stage}` mention no loop")));
    }
    let mut shape = Vec::with_capacity(axes.len());
    for (v, extent) in &axes {
        let n = extent.as_const().ok_or_else(|| Illegal::Body {
            target: program.loop_name(*v).to_owned(),
            why: format!("its extent {} is not a constant", index_to_string(program, extent)),
        })?;
        shape.push(n);
    }
    let dtype = program.buffer(source).dtype;
    let copy = new_buffer(program, name, dtype, Scope::Global, Role::Temporary)?;
    program.buffers[copy.0 as usize].shape = shape;
    require_fits(program, copy)?;
    let loops = (0..axes.len()).map(|i| new_loop(program, &format!("{name}.{i}"))).collect::<Result<Vec<_>, _>>()?;
    let copied: Vec<(LoopId, Index)> = axes.iter().zip(&loops).map(|((v, _), &l)| (*v, l.into())).collect();
    let in_source = index.iter().map(|i| substituted(i, &copied)).collect();
    let in_copy = loops.iter().map(|&l| l.into()).collect();
    let store = match is_written {
        false => Stmt::Store { buffer: copy, index: in_copy, value: Expr::Load(source, in_source) },
        true => Stmt::Store { buffer: source, index: in_source, value: Expr::Load(copy, in_copy) },
    };
    let moved = nest(loops.iter().zip(&axes).map(|(&l, (_, e))| (l, e.clone(), LoopKind::Serial)), vec![store]);
    let here: Vec<Index> = axes.iter().map(|(v, _)| Index::from(*v)).collect();
    let stage = at_leaf(program.body.remove(place), &mut |leaf| match (is_written, leaf) {
        (true, Stmt::Store { value, .. }) => Stmt::Store { buffer: copy, index: here.clone(), value },
        (true, Stmt::Update { op, value, first, .. }) => {
            Stmt::Update { buffer: copy, index: here.clone(), op, value, first }
        }
        (_, leaf) => leaf.map_own_loads(&mut |b, _| (b == source).then(|| Expr::Load(copy, here.clone()))),
    });
    let (before, after) = if is_written { (vec![stage], moved) } else { (moved, vec![stage]) };
    program.body.splice(place..place, [Stmt::Alloc(copy)].into_iter().chain(before).chain(after));
    Ok(())
}

/// Changes the assignment inside a nest of loops.
fn at_leaf(stmt: Stmt, change: &mut dyn FnMut(Stmt) -> Stmt) -> Stmt {
    match stmt {
        Stmt::For(mut l) => {
            l.body = l.body.into_iter().map(|s| at_leaf(s, change)).collect();
            Stmt::For(l)
        }
        leaf => change(leaf),
    }
}
