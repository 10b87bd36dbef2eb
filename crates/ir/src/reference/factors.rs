//! Evaluation of factors that are expressions, such as unpacked weights, before the sum of products.

use crate::dtype::DType;
use crate::expr::{BinaryOp, Expr, ReduceOp, TreePart};
use crate::index::Index;
use crate::program::{Buffer, BufferId, Loop, LoopId, LoopKind, Program, Role, Scope, Stmt};
use std::borrow::Cow;

/// Minimum number of products per value of a factor for which the factor is evaluated in advance.
const LEAST_USES: i64 = 4;

/// Moves factors of sums of products that are expressions to buffers: a separate nest evaluates such a factor
/// once for each iteration of the loops on which it depends.
///
/// # Cost
/// Memory for these factors, at most twice that of their operands.
pub(super) fn factors_ahead(program: &Program) -> Cow<'_, Program> {
    if !program.parts().into_iter().flatten().any(|stmt| factor_of(program, stmt).is_some()) {
        return Cow::Borrowed(program);
    }
    let mut ahead = program.clone();
    let parts = program.clone().map_parts(|block| {
        let mut statements = Vec::with_capacity(block.len());
        for mut stmt in block {
            while let Some(factor) = factor_of(&ahead, &stmt) {
                statements.extend(factor.evaluated(&mut ahead, &mut stmt));
            }
            statements.push(stmt);
        }
        statements
    });
    Cow::Owned(Program { buffers: ahead.buffers, ..parts })
}

/// Factor of a sum of products.
struct Factor {
    /// Whether this is the second factor.
    is_second: bool,
    /// Loops on which the factor depends, with their extents; those of the reduction come first.
    loops: Vec<(LoopId, i64)>,
    dtype: DType,
}

/// Returns the factors of the product that nested loops sum.
fn factors_mut(sum: &mut Stmt) -> [&mut Expr; 2] {
    match sum {
        Stmt::For(l) => factors_mut(&mut l.body[0]),
        Stmt::Update { value: Expr::Binary(_, a, b), .. } => [a, b],
        _ => unreachable!("a sum of products"),
    }
}

/// Finds a factor worth evaluating in advance, in loops of constant extent around a sum of products.
fn factor_of(program: &Program, stmt: &Stmt) -> Option<Factor> {
    let (mut loops, mut inner) = (Vec::new(), stmt);
    while let Stmt::For(l) = inner {
        let [only] = l.body.as_slice() else { return None };
        loops.push((l.var, l.extent.as_const().filter(|extent| *extent > 0)?));
        inner = only;
    }
    let Stmt::Update { buffer, index, op: ReduceOp::Sum, value: Expr::Binary(BinaryOp::Mul, a, b), .. } = inner else {
        return None;
    };
    let dtype = match program.buffers.get(buffer.0 as usize)?.dtype {
        DType::I32 => DType::I32,
        dtype if dtype.is_float() => DType::F64,
        _ => return None,
    };
    let n_of = |loops: &[(LoopId, i64)]| loops.iter().try_fold(1_i64, |n, (_, extent)| n.checked_mul(*extent));
    let n_products = n_of(&loops)?;
    let is_of_result = |(var, _): &(LoopId, i64)| index.iter().any(|i| i.coefficient(*var) != 0);
    [a, b].into_iter().enumerate().find_map(|(at, factor)| {
        let used = variables(factor)?;
        let mut own: Vec<_> = loops.iter().copied().filter(|(var, _)| used.contains(var)).collect();
        own.sort_by_key(is_of_result);
        let n = n_of(&own)?;
        let is_small = n <= elements_read(program, factor)?.checked_mul(2)?;
        let pays = own.len() == used.len() && is_small && n_products / n >= LEAST_USES;
        pays.then_some(Factor { is_second: at == 1, loops: own, dtype })
    })
}

/// Loop variables on which an expression depends; `None` for loads, also with a cast, and for expressions
/// without reads.
fn variables(factor: &Expr) -> Option<Vec<LoopId>> {
    let inner = match factor {
        Expr::Cast(_, x) => x.as_ref(),
        _ => factor,
    };
    if matches!(inner, Expr::Load(..)) {
        return None;
    }
    let (mut used, mut reads) = (Vec::new(), false);
    factor.for_each_load(&mut |_, _| reads = true);
    let mut copy = factor.clone();
    copy.for_each_index_mut(&mut |index| index.for_each_var(&mut |var| used.push(var)));
    used.sort_unstable();
    used.dedup();
    reads.then_some(used)
}

/// Number of elements of the buffers that an expression reads; `None` for gathers and selects.
fn elements_read(program: &Program, factor: &Expr) -> Option<i64> {
    let (mut buffers, mut is_plain): (Vec<BufferId>, _) = (Vec::new(), true);
    TreePart::Expr(factor).walk(&mut |node| match node {
        TreePart::Expr(Expr::Load(b, _)) => buffers.push(*b),
        TreePart::Expr(Expr::Gather(..) | Expr::Select(..)) => is_plain = false,
        _ => {}
    });
    buffers.sort_unstable();
    buffers.dedup();
    let of = |b: &BufferId| i64::try_from(program.buffers.get(b.0 as usize)?.n_elements()?).ok();
    is_plain.then(|| buffers.iter().map(of).sum::<Option<i64>>())?
}

impl Factor {
    /// Adds the factor's buffer, replaces the factor in the sum by it, and returns the statements that fill
    /// it.
    fn evaluated(self, program: &mut Program, sum: &mut Stmt) -> [Stmt; 2] {
        let shape = self.loops.iter().map(|(_, extent)| *extent).collect();
        let name = format!("factor {}", program.buffers.len());
        let buffer = Buffer { name, dtype: self.dtype, shape, scope: Scope::Global, role: Role::Temporary };
        let buffer = program.add_buffer(buffer);
        let index: Vec<Index> = self.loops.iter().map(|(var, _)| Index::from(*var)).collect();
        let [first, second] = factors_mut(sum);
        let factor = if self.is_second { second } else { first };
        let value = std::mem::replace(factor, Expr::Load(buffer, index.clone()));
        let store = Stmt::Store { buffer, index, value };
        let nest = self.loops.into_iter().rev().fold(store, |body, (var, extent)| {
            Stmt::For(Loop { var, extent: extent.into(), kind: LoopKind::Serial, body: vec![body] })
        });
        [Stmt::Alloc(buffer), nest]
    }
}

#[cfg(test)]
mod tests {
    use super::super::nest::ParallelNest;
    use super::*;
    use crate::op::Workload;

    /// Checks that only the elements of A are left to the interpreter.
    fn check(workload: &str) {
        let workload = Workload::parse(workload).unwrap();
        let program = workload.program();
        let ahead = factors_ahead(&program);
        let iterations = |stmt: &Stmt| {
            let mut n = 1;
            stmt.walk(&mut |s| {
                if let Stmt::For(l) = s {
                    n *= l.extent.as_const().unwrap();
                }
            });
            n
        };
        let memory: Vec<_> = ahead.buffers.iter().map(|b| vec![1.0; b.n_elements().unwrap() as usize]).collect();
        let is_interpreted = |stmt: &&Stmt| ParallelNest::of(&ahead, stmt, &memory).is_none();
        let most = ahead.body.iter().filter(is_interpreted).map(iterations).max().unwrap_or(0);
        assert!(most <= workload.size("m") * workload.size("k"), "{workload}: {most} iterations are interpreted");
    }

    #[test]
    fn sums_with_unpacked_weights_are_not_interpreted() {
        check("packed_matmul:m=16,n=40,k=64,block=16");
        check("packed_matmul:m=16,n=40,k=64,zeros=1");
        check("packed_matmul:m=16,n=40,k=64,zeros=1,int8=1");
        check("packed_matmul:m=16,n=40,k=64,block=16,bits=8,int8=1");
    }
}
