//! Padding a loop of a stage to a multiple.

use super::Illegal;
use super::compute_at::stage_nest;
use super::tree::{buffer_id, require_fits};
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp, TreePart};
use crate::index::Index;
use crate::program::{BufferId, Loop, LoopId, Program, Role, Stmt};

/// Maximum extent of a padded loop.
const MOST: i64 = 1 << 40;

/// Applies [`Step::Pad`](super::Step::Pad).
///
/// # Source
/// `pad_einsum` of TVM's TensorIR. This variant pads one loop, and stages that [`super::Step::Reindex`] has
/// created.
pub fn pad(program: &mut Program, stage: &str, target: &str, multiple: i64) -> Result<(), Illegal> {
    let result = buffer_id(program, stage)?;
    if !(1..=MOST).contains(&multiple) {
        let (target, what) = (target.to_owned(), "multiple");
        return Err(Illegal::OutOfRange { target, what, least: 1, most: MOST, value: multiple });
    }
    let nest = stage_nest(program, result)?;
    let fail = |why: String| Illegal::Body { target: target.to_owned(), why };
    let found = nest.loops.iter().find(|(v, _)| program.loop_name(*v) == target);
    let Some((var, extent)) = found else { return Err(fail(format!("it is no loop of the stage `{stage}`"))) };
    let Some(n) = extent.as_const() else { return Err(fail("its extent is not a constant".to_owned())) };
    if nest.loops.iter().any(|(_, extent)| extent.uses(*var)) {
        return Err(fail("the extent of a loop inside it depends on it".to_owned()));
    }
    let (var, padded) = (*var, (n + multiple - 1) / multiple * multiple);
    if padded == n {
        return Ok(());
    }
    let (index, value, reduces) = match nest.leaf {
        Stmt::Store { index, value, .. } => (index, value, None),
        Stmt::Update { index, value, op, .. } => (index, value, Some(*op)),
        _ => unreachable!("a stage's leaf is an assignment"),
    };
    // Dimensions of temporaries to extend, which are those along the loop.
    let along = |b: BufferId, index: &[Index]| -> Result<Option<(BufferId, usize)>, Illegal> {
        let used: Vec<usize> = (0..index.len()).filter(|&d| index[d].uses(var)).collect();
        let buffer = program.buffer(b);
        match used[..] {
            [] => Ok(None),
            [d] if index[d] == Index::from(var) && buffer.role == Role::Temporary => Ok(Some((b, d))),
            _ => Err(fail(format!("`{}` is not a temporary one dimension of which is that loop", buffer.name))),
        }
    };
    let written = along(result, index)?;
    if written.is_none() && !(reduces == Some(ReduceOp::Sum) && is_product_along(value, var)) {
        let why = "more of it would change the result: it is not a sum of products whose factors all lie along it";
        return Err(fail(why.to_owned()));
    }
    let mut reads = Vec::new();
    let mut refused = None;
    value.for_each_load(&mut |b, index| match along(b, index) {
        Ok(Some(read)) if !reads.contains(&read) => reads.push(read),
        Ok(_) => {}
        Err(e) => refused = Some(e),
    });
    if let Some(e) = refused {
        return Err(e);
    }
    if reads.iter().any(|(b, _)| *b == result) {
        return Err(fail(format!("the stage `{stage}` reads itself")));
    }
    let mut gathers = false;
    TreePart::Expr(value)
        .walk(&mut |node| gathers |= matches!(node, TreePart::Expr(e @ Expr::Gather(..)) if e.uses(var)));
    if gathers {
        return Err(fail(format!("the stage `{stage}` gathers along it")));
    }
    let place = nest.place;
    lengthen(&mut program.body[place], var, padded);
    for (b, d) in reads {
        fill_with_zeros(program, b, d, n, padded)?;
    }
    if let Some((b, d)) = written {
        program.buffers[b.0 as usize].shape[d] = padded;
        require_fits(program, b)?;
    }
    Ok(())
}

/// Whether a value is a product of numbers and loads that all depend on the loop.
fn is_product_along(value: &Expr, var: LoopId) -> bool {
    match value {
        Expr::Load(_, index) => index.iter().any(|i| i.uses(var)),
        Expr::Binary(BinaryOp::Mul, a, b) => [a, b].into_iter().all(|side| is_product_along(side, var)),
        _ => false,
    }
}

fn lengthen(stmt: &mut Stmt, var: LoopId, extent: i64) {
    if let Stmt::For(l) = stmt {
        if l.var == var {
            l.extent = extent.into();
        }
        l.body.iter_mut().for_each(|s| lengthen(s, var, extent));
    }
}

/// Pads a dimension of a temporary with zeros.
fn fill_with_zeros(program: &mut Program, b: BufferId, d: usize, n: i64, padded: i64) -> Result<(), Illegal> {
    let name = program.buffer(b).name.clone();
    let fail = |why: &str| Illegal::Buffer { buffer: name.clone(), why: why.to_owned() };
    let nest = stage_nest(program, b)?;
    let Stmt::Store { index, .. } = nest.leaf else {
        return Err(fail("it is a sum, whose own loop is to be padded first"));
    };
    let is_along = |(v, extent): &&(LoopId, Index)| index[d] == Index::from(*v) && extent.as_const() == Some(n);
    let Some((var, _)) = nest.loops.iter().find(is_along) else {
        return Err(fail("it is not computed by a loop along the dimension that is padded"));
    };
    let (var, place) = (*var, nest.place);
    if index.iter().enumerate().any(|(at, i)| at != d && i.uses(var)) {
        return Err(fail("several of its subscripts mention the loop along the dimension that is padded"));
    }
    let inside = Cond::Lt(var.into(), n.into());
    let filled = at_store(program.body.remove(place), &mut |value| {
        Expr::Select(Box::new(inside.clone()), Box::new(value), Box::new(Expr::Const(0.0)))
    });
    program.body.insert(place, filled);
    lengthen(&mut program.body[place], var, padded);
    program.buffers[b.0 as usize].shape[d] = padded;
    require_fits(program, b)
}

/// Changes the value that a nest stores.
fn at_store(stmt: Stmt, change: &mut dyn FnMut(Expr) -> Expr) -> Stmt {
    match stmt {
        Stmt::For(Loop { var, extent, kind, body }) => {
            let body = body.into_iter().map(|s| at_store(s, change)).collect();
            Stmt::For(Loop { var, extent, kind, body })
        }
        Stmt::Store { buffer, index, value } => Stmt::Store { buffer, index, value: change(value) },
        other => other,
    }
}
