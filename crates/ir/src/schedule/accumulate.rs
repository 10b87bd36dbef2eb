//! Register tiles for reductions.

use super::Illegal;
use super::region::{AccessKind, for_each_access};
use super::tree::{
    at_start, buffer_id, drop_decided, edit_loops, nest, new_buffer, require_open, simplify_block, single_loop,
};
use crate::dependence::writes_are_disjoint;
use crate::expr::{Cond, Expr, ReduceOp};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, LoopId, LoopKind, Program, Role, Scope, Stmt};
use crate::text::index_to_string;

/// Maximum extent of a register tile along a dimension.
const MOST_ELEMENTS: i64 = 4096;

/// Applies [`Step::Accumulate`](super::Step::Accumulate).
///
/// The loops inside `at` whose variables occur in the result's subscripts become the dimensions of the tile.
/// The nests that initialize and store the tile are clones of these loops, so that a later annotation applies
/// to all three nests.
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
        // Copies staged before the statement with the reduction stay before it.
        let holds = |s: &Stmt| reduces_into(s, result);
        let places: Vec<usize> = (0..l.body.len()).filter(|&i| holds(&l.body[i])).collect();
        let [place] = places.as_slice() else {
            return Err(fail("its body must hold exactly one statement with a reduction into"));
        };
        let reduction = l.body.remove(*place);
        let Reduction { loops, index, first, op } = Reduction::find(&reduction, result).map_err(fail)?;
        let spatial = spatial_loops(&loops, &index, &ranges).map_err(fail)?;
        let mut inside = ranges.clone();
        spatial.iter().for_each(|(v, e, _)| inside.push(*v, e.clone()));
        // Each position of the tile represents a distinct element, initialized in the same iteration.
        if spatial.iter().any(|(v, _, _)| !writes_are_disjoint(&index, *v, &inside) || first.uses(*v)) {
            return Err(fail("inside, different iterations of loops over the result reduce into one element of"));
        }
        shape = shape_of(names, &spatial, &inside)?;
        let place_in_tile: Vec<Index> = spatial.iter().map(|(v, _, _)| (*v).into()).collect();
        let each = |stmt: Stmt| nest(spatial.iter().cloned(), vec![stmt]);
        // In the first iteration of the reduction loops outside, the tile starts from the identity, else from
        // memory. An f64 cannot represent the largest 64-bit integer, so infinity stands for it.
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

/// Loop of a nest: its variable, extent and kind.
type NestLoop = (LoopId, Index, LoopKind);

/// Whether a statement contains a reduction into a buffer.
fn reduces_into(stmt: &Stmt, result: BufferId) -> bool {
    let mut found = false;
    stmt.walk(&mut |s| found |= matches!(s, Stmt::Update { buffer, .. } if *buffer == result));
    found
}

/// Reduction: the loops around its update, outermost first, and the update itself.
struct Reduction {
    loops: Vec<NestLoop>,
    index: Vec<Index>,
    first: Cond,
    op: ReduceOp,
}

impl Reduction {
    /// Finds the only reduction into `result` in a statement.
    fn find(nest: &Stmt, result: BufferId) -> Result<Reduction, &'static str> {
        let (mut loops, mut stmt) = (Vec::new(), nest);
        let (index, first, op) = loop {
            match stmt {
                Stmt::For(inner) => {
                    loops.push((inner.var, inner.extent.clone(), inner.kind));
                    // Copies staged inside the nest precede the only statement with the reduction.
                    let mut inside = inner.body.iter().filter(|s| reduces_into(s, result));
                    let (Some(only), None) = (inside.next(), inside.next()) else {
                        return Err("a single statement must reduce into");
                    };
                    stmt = only;
                }
                Stmt::Update { index, first, op, .. } => break (index.clone(), first.clone(), *op),
                _ => return Err("a condition stands before the reduction into"),
            }
        };
        if n_uses(nest, result) > 2 {
            return Err("inside, something besides the reduction uses");
        }
        Ok(Reduction { loops, index, first, op })
    }
}

/// Loops over the result, with their extents at the start of the reduction: the tail at its end may cover
/// fewer elements, but every element is covered at the start.
fn spatial_loops(loops: &[NestLoop], index: &[Index], ranges: &Ranges) -> Result<Vec<NestLoop>, &'static str> {
    let is_spatial = |v: LoopId| index.iter().any(|i| i.uses(v));
    let begin = |i: &Index| at_start(i, loops.iter().map(|l| l.0).filter(|&v| !is_spatial(v)));
    let mut around = ranges.clone();
    loops.iter().for_each(|(v, extent, _)| around.push(*v, extent.clone()));
    let mut spatial = Vec::new();
    for (v, extent, kind) in loops.iter().filter(|l| is_spatial(l.0)) {
        let at_first = match begin(extent) {
            first if first == *extent || first.as_const().is_some() => first,
            // Extent of a sum whose length depends on the enclosing loops.
            first => around.simplify(&first),
        };
        if at_first != *extent && (at_first.as_const().is_none() || ranges.upper(extent) != at_first.as_const()) {
            return Err("the extent of a loop over the result grows with one of the reduction into");
        }
        spatial.push((*v, at_first, *kind));
    }
    Ok(spatial)
}

/// Shape of a tile over these loops.
fn shape_of(names: &Program, spatial: &[NestLoop], inside: &Ranges) -> Result<Vec<i64>, Illegal> {
    let size = |(v, extent, _): &NestLoop| match inside.upper(extent) {
        Some(n) if n <= MOST_ELEMENTS => Ok(n),
        _ => {
            let (target, extent) = (names.loop_name(*v).to_owned(), index_to_string(names, extent));
            Err(Illegal::TooLong { target, extent, most: MOST_ELEMENTS })
        }
    };
    spatial.iter().map(size).collect()
}

/// Number of reads, writes and allocations of a buffer; an update counts as a read and a write.
fn n_uses(stmt: &Stmt, buffer: BufferId) -> usize {
    let mut n = 0;
    let block = std::slice::from_ref(stmt);
    for_each_access(block, buffer, AccessKind::Any, &mut Ranges::default(), &mut |_, _| n += 1);
    stmt.walk(&mut |s| n += usize::from(*s == Stmt::Alloc(buffer)));
    n
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
