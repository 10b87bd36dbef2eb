//! Reading a buffer through a copy that has the reader's loops as its axes.

use super::Illegal;
use super::compute_at::stage_nest;
use super::tree::{buffer_id, nest, new_buffer, new_loop, require_fits, substituted};
use crate::expr::Expr;
use crate::index::{Index, Ranges};
use crate::program::{LoopId, LoopKind, Program, Role, Scope, Stmt};
use crate::text::index_to_string;

/// See [`super::Step::Reindex`].
///
/// # Source
/// `reindex` of TVM's TensorIR (Feng et al., 2023, arXiv 2207.04296). Ours names the buffer rather than the
/// read's position, and only takes the loops that the subscripts mention.
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
    let index = match <[Vec<Index>; 1]>::try_from(reads) {
        Ok([index]) if source != reader => index,
        Ok(_) => return Err(fail("it is what the stage computes".to_owned())),
        Err(reads) if reads.is_empty() => return Err(fail(format!("it is not read by the stage `{stage}`"))),
        Err(reads) => return Err(fail(format!("the stage `{stage}` reads {} different elements of it", reads.len()))),
    };
    let mut ranges = Ranges::default();
    found.loops.iter().for_each(|(v, extent)| ranges.push(*v, extent.clone()));
    for (i, &n) in index.iter().zip(&program.buffer(source).shape) {
        // A condition around the read does not move with it.
        if !(ranges.lower(i).is_some_and(|l| l >= 0) && ranges.upper(i).is_some_and(|u| u < n)) {
            return Err(fail(format!("the subscript {} may lie outside it", index_to_string(program, i))));
        }
    }
    let mut axes = found.loops;
    axes.retain(|(v, _)| index.iter().any(|i| i.uses(*v)));
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
    let value = Expr::Load(source, index.iter().map(|i| substituted(i, &copied)).collect());
    let store = Stmt::Store { buffer: copy, index: loops.iter().map(|&l| l.into()).collect(), value };
    let fill = nest(loops.iter().zip(&axes).map(|(&l, (_, e))| (l, e.clone(), LoopKind::Serial)), vec![store]);
    let here = Expr::Load(copy, axes.iter().map(|(v, _)| Index::from(*v)).collect());
    let stage = at_leaf(program.body.remove(place), &mut |leaf| {
        leaf.map_own_loads(&mut |b, _| (b == source).then(|| here.clone()))
    });
    program.body.splice(place..place, [Stmt::Alloc(copy)].into_iter().chain(fill).chain([stage]));
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
