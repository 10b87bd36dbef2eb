//! Register tiles for reductions.

use super::Illegal;
use super::region::reads;
use super::tree::{buffer_id, edit_loops, nest, simplify_block, single_loop};
use crate::expr::{Cond, Expr};
use crate::index::Index;
use crate::program::{Buffer, LoopId, LoopKind, Program, Role, Scope, Stmt};

/// See [`super::Step::Accumulate`].
///
/// The loops inside `at` whose variables the result's subscripts mention become the dimensions of the tile; the
/// nests that begin and end it are clones of those loops, so that a later annotation of one reaches all three.
pub fn accumulate(program: &mut Program, buffer: &str, at: &str, name: &str) -> Result<(), Illegal> {
    let result = buffer_id(program, buffer)?;
    if program.find_buffer(name).is_some() {
        return Err(Illegal::NameTaken(name.to_owned()));
    }
    let var = single_loop(program, at)?;
    let dtype = program.buffer(result).dtype;
    let tile = program.add_buffer(Buffer {
        name: name.to_owned(),
        dtype,
        shape: Vec::new(),
        scope: Scope::Register,
        role: Role::Temporary,
    });
    let mut shape = Vec::new();
    edit_loops(program, var, &mut |mut l, ranges| {
        let fail = |why: &str| Illegal::Body { target: at.to_owned(), why: why.to_owned() };
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
            return Err(fail("its body must hold exactly one reduction into the buffer"));
        };
        if l.body.iter().enumerate().any(|(i, s)| i != *place && reads(std::slice::from_ref(s), result)) {
            return Err(fail("the result is read beside its reduction"));
        }
        let reduction = l.body.remove(*place);
        let (mut loops, mut stmt) = (Vec::new(), &reduction);
        let (index, first) = loop {
            match stmt {
                Stmt::For(inner) => {
                    loops.push((inner.var, inner.extent.clone(), inner.kind));
                    // Copies staged inside the nest precede the one statement that goes on inwards.
                    let mut inside = inner.body.iter().filter(|s| holds(s));
                    let (Some(only), None) = (inside.next(), inside.next()) else {
                        return Err(fail("the reduction must be a single statement"));
                    };
                    stmt = only;
                }
                Stmt::Update { index, first, .. } => break (index.clone(), first.clone()),
                _ => return Err(fail("the reduction stands under a condition")),
            }
        };
        let spatial: Vec<(LoopId, Index, LoopKind)> =
            loops.iter().filter(|(v, _, _)| index.iter().any(|i| i.uses(*v))).cloned().collect();
        if spatial
            .iter()
            .any(|(_, e, _)| loops.iter().any(|(v, _, _)| e.uses(*v) && !spatial.iter().any(|(s, _, _)| s == v)))
        {
            return Err(fail("an extent of the result's loops depends on a loop of the reduction"));
        }
        let mut inside = ranges.clone();
        shape.clear();
        for (v, extent, _) in &loops {
            if spatial.iter().any(|(s, _, _)| s == v) {
                match inside.upper(extent) {
                    Some(n) if n <= 4096 => shape.push(n),
                    _ => return Err(fail("the result's loops inside it have no small constant bound")),
                }
            }
            inside.push(*v, extent.clone());
        }
        let place_in_tile: Vec<Index> = spatial.iter().map(|(v, _, _)| (*v).into()).collect();
        let each = |stmt: Stmt| nest(spatial.iter().cloned(), vec![stmt]);
        // Outside loops of the reduction at their first iteration: the tile starts afresh, else from memory.
        let op = op_of(stmt);
        let fresh = each(Stmt::Store { buffer: tile, index: place_in_tile.clone(), value: Expr::Const(op.identity()) });
        let resumed =
            each(Stmt::Store { buffer: tile, index: place_in_tile.clone(), value: Expr::Load(result, index.clone()) });
        let starts =
            first.map_index(&mut |i| loops.iter().fold(i.clone(), |i, (v, _, _)| i.substitute(*v, &Index::from(0))));
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

fn op_of(update: &Stmt) -> crate::expr::ReduceOp {
    match update {
        Stmt::Update { op, .. } => *op,
        _ => unreachable!("the walk ends at an update"),
    }
}

/// The conjunction without its parts `0 == 0`.
fn drop_decided(cond: &Cond) -> Cond {
    match cond {
        Cond::Eq(a, b) if a == b => Cond::True,
        Cond::And(a, b) => drop_decided(a).and(drop_decided(b)),
        other => other.clone(),
    }
}

fn retarget(stmt: Stmt, from: crate::BufferId, to: crate::BufferId, place: &[Index]) -> Stmt {
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
