//! Inlining a stage into its readers.

use super::Illegal;
use super::compute_at::take_stage;
use super::tree::{buffer_id, simplify_block};
use crate::expr::Expr;
use crate::index::{Index, Ranges};
use crate::program::{BufferId, LoopId, Program, Role, Stmt};

/// See [`super::Step::Inline`].
pub fn inline(program: &mut Program, buffer: &str) -> Result<(), Illegal> {
    let id = buffer_id(program, buffer)?;
    let fail = |why: &str| Illegal::Buffer { buffer: buffer.to_owned(), why: why.to_owned() };
    if program.buffer(id).role != Role::Temporary {
        return Err(fail("only a stage in between can be inlined"));
    }
    let (loops, leaf) =
        take_stage(program, id).ok_or_else(|| fail("it is not computed by one plain nest of its own"))?;
    let Stmt::Store { index, value, .. } = leaf else {
        return Err(fail("it is a reduction, which would be repeated for every read"));
    };
    let axes: Option<Vec<LoopId>> =
        index.iter().map(|i| loops.iter().map(|l| l.0).find(|v| *i == Index::from(*v))).collect();
    let axes = axes.ok_or_else(|| fail("its subscripts are not its loops"))?;
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
