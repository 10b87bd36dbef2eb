//! Register tiles for reductions.

use super::Illegal;
use super::region::{Access, for_each_access};
use super::tree::{
    at_start, buffer_id, drop_decided, edit_loops, nest, new_buffer, require_open, simplify_block, single_loop,
};
use crate::dependence::writes_are_disjoint;
use crate::expr::{Cond, Expr};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, LoopId, LoopKind, Program, Role, Scope, Stmt};
use crate::text::index_to_string;

/// More elements along one dimension of a tile than this are no register tile.
const MOST_ELEMENTS: i64 = 4096;

/// See [`super::Step::Accumulate`].
///
/// The loops inside `at` whose variables the result's subscripts mention become the dimensions of the
/// tile; the nests that begin and end it are clones of those loops, so that a later annotation of one
/// reaches all three.
pub fn accumulate(program: &mut Program, buffer: &str, at: &str, name: &str) -> Result<(), Illegal> {
    let result = buffer_id(program, buffer)?;
    let var = single_loop(program, at)?;
    let dtype = program.buffer(result).dtype;
    let tile = new_buffer(program, name, dtype, Scope::Register, Role::Temporary)?;
    let mut shape = Vec::new();
    require_open(program, var)?;
    edit_loops(program, var, &mut |names, mut l, ranges| {
        let fail = |why: &str| Illegal::Body { target: at.to_owned(), why: format!("{why} `{buffer}`") };
        let mut ranges = ranges.clone();
        ranges.push(l.var, l.extent.clone());
        // The statement that holds the reduction; copies staged before it stay before it.
        let holds = |s: &Stmt| {
            let mut found = false;
            s.walk(&mut |s| found |= matches!(s, Stmt::Update { buffer, .. } if *buffer == result));
            found
        };
        let places: Vec<usize> = (0..l.body.len()).filter(|&i| holds(&l.body[i])).collect();
        let [place] = places.as_slice() else {
            return Err(fail("its body must hold exactly one statement with a reduction into"));
        };
        let reduction = l.body.remove(*place);
        let (mut loops, mut stmt) = (Vec::new(), &reduction);
        let (index, first) = loop {
            match stmt {
                Stmt::For(inner) => {
                    loops.push((inner.var, inner.extent.clone(), inner.kind));
                    // Copies staged inside the nest precede the one statement that goes on inwards.
                    let mut inside = inner.body.iter().filter(|s| holds(s));
                    let (Some(only), None) = (inside.next(), inside.next()) else {
                        return Err(fail("a single statement must reduce into"));
                    };
                    stmt = only;
                }
                Stmt::Update { index, first, .. } => break (index.clone(), first.clone()),
                _ => return Err(fail("a condition stands before the reduction into")),
            }
        };
        if n_uses(&reduction, result) > 2 {
            return Err(fail("inside, something besides the reduction uses"));
        }
        let is_spatial = |v: LoopId| index.iter().any(|i| i.uses(v));
        // A rest that the reduction ends with may leave elements out; there is one of each from
        // its beginning on.
        let begin = |i: &Index| at_start(i, loops.iter().map(|l| l.0).filter(|&v| !is_spatial(v)));
        let mut around = ranges.clone();
        loops.iter().for_each(|(v, extent, _)| around.push(*v, extent.clone()));
        let mut spatial: Vec<(LoopId, Index, LoopKind)> = Vec::new();
        for (v, extent, kind) in loops.iter().filter(|l| is_spatial(l.0)) {
            let at_first = match begin(extent) {
                first if first == *extent || first.as_const().is_some() => first,
                // Of a sum whose length depends on the loops around.
                first => around.simplify(&first),
            };
            if at_first != *extent && (at_first.as_const().is_none() || ranges.upper(extent) != at_first.as_const()) {
                return Err(fail("the extent of a loop over the result grows with one of the reduction into"));
            }
            spatial.push((*v, at_first, *kind));
        }
        let mut inside = ranges.clone();
        spatial.iter().for_each(|(v, e, _)| inside.push(*v, e.clone()));
        // Each place of the tile stands for an element of its own, begun in the same iteration.
        if spatial.iter().any(|(v, _, _)| !writes_are_disjoint(&index, *v, &inside) || first.uses(*v)) {
            return Err(fail("inside, different iterations of loops over the result reduce into one element of"));
        }
        shape = Vec::with_capacity(spatial.len());
        for (v, extent, _) in &spatial {
            match inside.upper(extent) {
                Some(n) if n <= MOST_ELEMENTS => shape.push(n),
                _ => {
                    let (target, extent) = (names.loop_name(*v).to_owned(), index_to_string(names, extent));
                    return Err(Illegal::TooLong { target, extent, most: MOST_ELEMENTS });
                }
            }
        }
        let place_in_tile: Vec<Index> = spatial.iter().map(|(v, _, _)| (*v).into()).collect();
        let each = |stmt: Stmt| nest(spatial.iter().cloned(), vec![stmt]);
        // Outside loops of the reduction at their first iteration: the tile starts afresh, else from memory.
        let op = op_of(stmt);
        // No double is the largest integer of 64 bits: an infinite one stands for it.
        let is_largest = dtype.is_wide() && op.identity() == f64::INFINITY;
        let identity = Expr::Const(if is_largest { op.identity() } else { dtype.round(op.identity()) });
        let fresh = each(Stmt::Store { buffer: tile, index: place_in_tile.clone(), value: identity });
        let resumed =
            each(Stmt::Store { buffer: tile, index: place_in_tile.clone(), value: Expr::Load(result, index.clone()) });
        let starts = first.map_index(&mut |i| at_start(i, loops.iter().map(|l| l.0)));
        let begin = match drop_decided(&starts) {
            Cond::True => fresh,
            Cond::Not(c) if *c == Cond::True => resumed,
            cond => vec![Stmt::If { cond, then: fresh, otherwise: resumed }],
        };
        let end =
            each(Stmt::Store { buffer: result, index: index.clone(), value: Expr::Load(tile, place_in_tile.clone()) });
        let reduction = retarget(reduction, result, tile, &place_in_tile);
        let new = [Stmt::Alloc(tile)].into_iter().chain(begin).chain([reduction]).chain(end);
        l.body.splice(*place..*place, simplify_block(new.collect(), &mut ranges));
        Ok(vec![Stmt::For(l)])
    })?;
    program.buffers[tile.0 as usize].shape = shape;
    Ok(())
}

/// Reads, writes and allocations of a buffer; an update's own is a read and a write.
fn n_uses(stmt: &Stmt, buffer: BufferId) -> usize {
    let mut n = 0;
    let block = std::slice::from_ref(stmt);
    for_each_access(block, buffer, Access::Any, &mut Ranges::default(), &mut |_, _| n += 1);
    stmt.walk(&mut |s| n += usize::from(*s == Stmt::Alloc(buffer)));
    n
}

fn op_of(update: &Stmt) -> crate::expr::ReduceOp {
    match update {
        Stmt::Update { op, .. } => *op,
        _ => unreachable!("the walk ends at an update"),
    }
}

fn retarget(stmt: Stmt, from: BufferId, to: BufferId, place: &[Index]) -> Stmt {
    match stmt {
        Stmt::For(mut l) => {
            l.body = l.body.into_iter().map(|s| retarget(s, from, to, place)).collect();
            Stmt::For(l)
        }
        Stmt::Update { buffer, op, value, .. } if buffer == from => {
            Stmt::Update { buffer: to, index: place.to_vec(), op, value, first: Cond::Not(Box::new(Cond::True)) }
        }
        other => other,
    }
}
