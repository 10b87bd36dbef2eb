//! Inlining a stage into its readers.

use super::Illegal;
use super::compute_at::{Stage, take_stage};
use super::region::reads;
use super::tree::{buffer_id, simplify_block, substituted};
use crate::expr::{Expr, Node};
use crate::index::{Index, Ranges};
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
    let dtype = program.buffer(id).dtype;
    let is_of_one_type = dtype.arithmetic() == dtype && program.buffers.iter().all(|b| b.dtype == dtype);
    let as_element = Expr::cast(dtype, value.clone());
    // Where nothing is of another type, a value is what the element would be.
    let value_for = |s: &Stmt| {
        let mut is_plain = is_of_one_type;
        s.own_nodes().for_each(|node| {
            node.walk(&mut |node| is_plain &= !matches!(node, Node::Expr(Expr::Cast(..) | Expr::Gather(..))));
        });
        if is_plain { value.clone() } else { as_element.clone() }
    };
    let inlined = |s: Stmt| {
        let alone = vec![s];
        if !reads(&alone, id) {
            return alone;
        }
        simplify_block(replace_reads(alone, id, &axes, &value_for), &mut Ranges::default())
    };
    program.body = std::mem::take(&mut program.body).into_iter().flat_map(inlined).collect();
    Ok(())
}

fn replace_reads(block: Vec<Stmt>, id: BufferId, axes: &[LoopId], value_for: &dyn Fn(&Stmt) -> Expr) -> Vec<Stmt> {
    block
        .into_iter()
        .map(|mut s| {
            for inner in s.blocks_mut() {
                *inner = replace_reads(std::mem::take(inner), id, axes, value_for);
            }
            let value = value_for(&s);
            s.map_own_loads(&mut |b, index| {
                (b == id).then(|| {
                    let by: Vec<(LoopId, Index)> = axes.iter().copied().zip(index.iter().cloned()).collect();
                    let mut value = value.clone();
                    value.for_each_index_mut(&mut |i| *i = substituted(i, &by));
                    value
                })
            })
        })
        .collect()
}
