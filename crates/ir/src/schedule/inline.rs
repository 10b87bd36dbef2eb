//! Inlining a stage into its readers.

use super::Illegal;
use super::compute_at::{Stage, take_stage};
use super::tree::{buffer_id, simplify_block};
use crate::expr::Expr;
use crate::index::Ranges;
use crate::program::{BufferId, LoopId, Program, Stmt};

/// See [`super::Step::Inline`].
pub fn inline(program: &mut Program, buffer: &str) -> Result<(), Illegal> {
    let id = buffer_id(program, buffer)?;
    let fail = |why: &str| Illegal::Buffer { buffer: buffer.to_owned(), why: why.to_owned() };
    let Stage { loops, axes, leaf } = take_stage(program, id)?;
    let Stmt::Store { value, .. } = leaf else {
        return Err(fail("it is a reduction, which would be repeated for every read"));
    };
    if loops.iter().any(|(v, _)| !axes.contains(v) && value.uses(*v)) {
        return Err(fail("its elements are written several times"));
    }
    if program.buffers.iter().any(|b| b.dtype != program.buffer(id).dtype) {
        return Err(fail("other buffers are of another element type, to which it would not be rounded"));
    }
    let body = std::mem::take(&mut program.body);
    let body = replace_reads(body, id, &axes, &value);
    program.body = simplify_block(body, &mut Ranges::default());
    Ok(())
}

fn replace_reads(block: Vec<Stmt>, id: BufferId, axes: &[LoopId], value: &Expr) -> Vec<Stmt> {
    block
        .into_iter()
        .map(|mut s| {
            for inner in s.blocks_mut() {
                *inner = replace_reads(std::mem::take(inner), id, axes, value);
            }
            s.map_own_loads(&mut |b, index| {
                (b == id).then(|| {
                    value.map_index(&mut |i| {
                        i.rewrite(&mut |atom| match atom {
                            crate::Atom::Var(v) => axes.iter().position(|a| a == v).map(|at| index[at].clone()),
                            _ => None,
                        })
                    })
                })
            })
        })
        .collect()
}
