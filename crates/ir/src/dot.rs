//! Dot products of four 8-bit integers, or of two bf16 numbers or 16-bit integers, which CPUs add to 32-bit
//! sums in one or two instructions.
//!
//! A schedule divides the sum by four, puts the loop over the four around the loops of a tile, and marks it:
//!
//! ```text
//! dot4 kk in 4 {
//!   unrolled i in 6 {
//!     vectorized j in 16 { C.r[i, j] += A[i, 4*ko + kk] * B.p[ko, j, kk] first never }
//!   }
//! }
//! ```
//!
//! The marked loop means the same as a plain loop: sums are modulo 2^32 in any order. The four elements of
//! each factor are adjacent in memory, which is fastest, or have a constant stride, as the rows that a
//! depthwise convolution sums over. The loop may have fewer iterations if the length of the sum is not a
//! multiple of four. A factor may be an element under a condition on indices and zero otherwise, as for
//! padding: lowering skips products that add nothing.
//!
//! A loop marked `dot2` has two iterations and adds products of bf16 numbers to f32 sums as `vdpbf16ps` does:
//! the second product first, each of the two additions rounded once, to nearest. Subnormal factors and sums
//! count as zeros, so a bf16 copy that only such loops read may hold zeros for subnormal f32 numbers. A
//! `dot2` loop may also multiply 16-bit integers and then adds to sums modulo 2^32.

use crate::dtype::DType;
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp};
use crate::index::{Index, Ranges};
use crate::program::{BufferId, Loop, LoopId, LoopKind, Program, Stmt, TensorProduct};

/// Products that an instruction for 8-bit integers sums into each 32-bit accumulator.
pub const STEPS: i64 = 4;

/// Kind of dot products, with the statements allowed in their loop.
#[derive(Clone, Copy)]
struct DotKind {
    steps: i64,
    factors: &'static [DType],
    sums: DType,
    too_many_steps: &'static str,
    no_product: &'static str,
    apart: &'static str,
}

const FOURS: DotKind = DotKind {
    steps: STEPS,
    factors: &[DType::I8, DType::I7, DType::U8],
    sums: DType::I32,
    too_many_steps: "a dot product takes 4 steps of a sum at a time",
    no_product: "only sums of products of two 8-bit integers each, or of halves of them, begun before, may stand in it",
    apart: "the four steps of a dot product lie at one distance from each other in both factors",
};

const PAIRS: DotKind = DotKind {
    steps: 2,
    factors: &[DType::Bf16],
    sums: DType::F32,
    too_many_steps: "a dot product of bf16 takes 2 steps of a sum at a time",
    no_product: "only f32 sums of products of two bf16 numbers each, begun before, may stand in it",
    apart: "the two steps of a dot product lie at one distance from each other in both factors",
};

const SHORT_PAIRS: DotKind = DotKind {
    steps: 2,
    factors: &[DType::I16],
    sums: DType::I32,
    too_many_steps: "a dot product of 16-bit integers takes 2 steps of a sum at a time",
    no_product: "only sums of products of two 16-bit integers each, begun before, may stand in it",
    apart: PAIRS.apart,
};

/// Whether the first update in these statements accumulates integers.
pub fn adds_to_integers(program: &Program, stmts: &[Stmt]) -> bool {
    fn first(program: &Program, stmts: &[Stmt]) -> Option<DType> {
        stmts.iter().find_map(|stmt| match stmt {
            Stmt::For(l) => first(program, &l.body),
            Stmt::If { then, otherwise, .. } => first(program, then).or_else(|| first(program, otherwise)),
            Stmt::Update { buffer, .. } => Some(program.buffers.get(buffer.0 as usize)?.dtype),
            _ => None,
        })
    }
    first(program, stmts).is_some_and(|dtype| !dtype.is_float())
}

/// Whether dot products can multiply integers of a type.
pub fn is_factor(dtype: DType) -> bool {
    FOURS.factors.contains(&dtype)
}

/// Operand of a dot product: a loaded element and, for 4-bit weights, the index of the nibble extracted from
/// it.
pub fn factor(value: &Expr) -> Option<(BufferId, &[Index], Option<&Index>)> {
    match value {
        Expr::Load(buffer, index) => Some((*buffer, index, None)),
        Expr::Binary(BinaryOp::Nibble, x, half) => match (&**x, &**half) {
            (Expr::Load(buffer, index), Expr::FromIndex(half)) => Some((*buffer, index, Some(half))),
            _ => None,
        },
        _ => None,
    }
}

/// Checks that a loop is a dot product that instructions of kind `how` can compute.
///
/// # Errors
/// The reason why the loop is not such a product.
pub fn check(program: &Program, l: &Loop, how: TensorProduct, ranges: &mut Ranges) -> Result<(), &'static str> {
    let kind = match how {
        TensorProduct::Dot2 if adds_to_integers(program, &l.body) => SHORT_PAIRS,
        TensorProduct::Dot2 => PAIRS,
        _ => FOURS,
    };
    if ranges.upper(&l.extent).is_none_or(|n| n > kind.steps) {
        return Err(kind.too_many_steps);
    }
    ranges.inside(l.var, &l.extent, |ranges| block(program, &l.body, kind, &mut vec![l.var], ranges))
}

/// Strips the conditions on indices outside of which a factor is zero; `None` if such a condition uses a
/// variable of `fixed`.
fn unpadded<'a>(value: &'a Expr, fixed: &[LoopId]) -> Option<&'a Expr> {
    let Expr::Select(cond, x, zero) = value else { return Some(value) };
    let is_fixed = cond.is_on_indices() && !fixed.iter().any(|var| cond.uses(*var));
    if is_fixed && **zero == Expr::Const(0.0) { unpadded(x, fixed) } else { None }
}

/// Checks statements; conditions on factors must not use a variable of `fixed`: that of the steps, then those
/// of the lanes.
fn block(
    program: &Program,
    stmts: &[Stmt],
    kind: DotKind,
    fixed: &mut Vec<LoopId>,
    ranges: &mut Ranges,
) -> Result<(), &'static str> {
    let steps = fixed[0];
    for stmt in stmts {
        match stmt {
            Stmt::For(l) => {
                let n_fixed = fixed.len();
                fixed.extend((l.kind == LoopKind::Vectorized).then_some(l.var));
                ranges.inside(l.var, &l.extent, |ranges| block(program, &l.body, kind, fixed, ranges))?;
                fixed.truncate(n_fixed);
            }
            Stmt::If { cond, then, otherwise } if !cond.uses(steps) => {
                block(program, then, kind, fixed, ranges)?;
                block(program, otherwise, kind, fixed, ranges)?;
            }
            Stmt::Update { buffer, index, op: ReduceOp::Sum, value: Expr::Binary(BinaryOp::Mul, a, b), first } => {
                let [a, b] = [a, b].map(|x| unpadded(x, fixed).and_then(factor));
                let (Some((a, of_a, _)), Some((b, of_b, _))) = (a, b) else {
                    return Err(kind.no_product);
                };
                let dtype = |b: &BufferId| program.buffers.get(b.0 as usize).map(|b| b.dtype);
                let are_factors = [&a, &b].into_iter().all(|b| dtype(b).is_some_and(|of| kind.factors.contains(&of)));
                if *first != Cond::Not(Box::new(Cond::True)) || !are_factors || dtype(buffer) != Some(kind.sums) {
                    return Err(kind.no_product);
                }
                if index.iter().any(|i| ranges.simplify(i).uses(steps)) {
                    return Err("a sum has one place for all steps");
                }
                for (factor, index) in [(a, of_a), (b, of_b)] {
                    require_distance(program, factor, index, steps, ranges).ok_or(kind.apart)?;
                }
            }
            _ => return Err(kind.no_product),
        }
    }
    Ok(())
}

/// Checks that the steps of a factor have a constant stride in memory.
fn require_distance(
    program: &Program,
    factor: BufferId,
    index: &[Index],
    steps: LoopId,
    ranges: &Ranges,
) -> Option<()> {
    let strides = program.buffer(factor).strides();
    let flat = index.iter().zip(&strides).fold(Index::from(0), |sum, (i, stride)| sum.add(&i.scale(*stride)));
    let flat = ranges.simplify(&flat);
    let distance = flat.coefficient(steps);
    (distance > 0 && !flat.sub(&Index::from(steps).scale(distance)).uses(steps)).then_some(())
}
