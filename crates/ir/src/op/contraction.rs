//! Untransformed programs of matrix products.

use super::builder::ElementOps;
use super::{Contraction, Factor, Heads, StageSpec, Workload};
use crate::expr::{BinaryOp, Expr, ReduceOp};
use crate::index::Index;
use crate::program::{LoopId, Program, Role, Stmt};

impl Contraction {
    /// Builds the program, of one stage or of two if there is an epilogue.
    pub(super) fn program(&self, w: &Workload) -> Program {
        let first = usize::from(self.batch.is_none());
        let mut p = w.builder();
        let [of_a, of_b] = w.factors();
        let [a, b] = [(&self.a, self.m, of_a), (&self.b, self.n, of_b)].map(|(factor, outer, dtype)| {
            let Heads { before, after, .. } = factor.heads;
            p.set_dtype(dtype);
            p.input(factor.name, &factor.in_order(self.batch.map(|b| before + b + after), [outer, self.k]))
        });
        p.set_dtype(w.dtype);
        let shape = self.in_order(self.batch, [self.m, self.n]);
        let last = shape.len() - 1;
        let mut of_result = shape.clone();
        of_result[last] /= w.sums_per_element();
        let operands = ElementOps::new(&mut p, w, of_result[last], &of_result);
        let plain = w.is_plain();
        let role = if plain { Role::Output } else { Role::Temporary };
        let named = |loops: [&'static str; 3]| {
            let [b, i, j] = loops;
            self.in_order((first == 0).then_some(b), [i, j]).into_iter().zip(shape.clone()).collect::<Vec<_>>()
        };
        let [b_loop, i_loop, j_loop, k] = Contraction::LOOPS;
        let reduce = Some((ReduceOp::Sum, &[(k, self.k)][..]));
        let axes = named([b_loop, i_loop, j_loop]);
        p.set_dtype(w.dtype.arithmetic());
        let sum = p.stage(StageSpec { name: self.sum(w), axes: &axes, reduce, role }, |v| {
            let at = |name: &str| axes.iter().position(|(axis, _)| *axis == name).map(|d| v[d].clone());
            let at_of = |factor: &Factor, outer: &str| {
                let outer = at(outer).expect("every product has rows and columns");
                factor.in_order(at(b_loop).map(|b| b.offset(factor.heads.before)), [outer, v[last + 1].clone()])
            };
            let (left, right) = (at_of(&self.a, i_loop), at_of(&self.b, j_loop));
            Expr::binary(BinaryOp::Mul, w.factor(Expr::Load(a, left)), w.factor(Expr::Load(b, right)))
        });
        p.set_dtype(w.result_dtype());
        if !plain && self.batch.is_none() {
            operands.finish(&mut p, sum, self.output);
        } else if !plain {
            let axes = named(Contraction::FINISH);
            p.stage(StageSpec { name: self.output, axes: &axes, reduce: None, role: Role::Output }, |at| {
                operands.apply(Expr::Load(sum, at.to_vec()), at, last)
            });
        }
        open_loops(p.finish(), w)
    }
}

/// Limits loops over open sizes to the values of each run.
fn open_loops(mut program: Program, w: &Workload) -> Program {
    for (name, range) in w.open_sizes() {
        let at = Contraction::OPEN.iter().position(|open| *open == name).expect("other sizes are numbers");
        let names = [Some(Contraction::LOOPS[at + 1]), Contraction::FINISH.get(at + 1).copied()];
        let loops: Vec<LoopId> = names.into_iter().flatten().filter_map(|name| program.find_loop(name)).collect();
        let extent = program.open_size(name, range);
        run_to(&mut program.body, &loops, &extent);
    }
    program
}

/// Sets the extent of loops.
pub(super) fn run_to(block: &mut [Stmt], loops: &[LoopId], extent: &Index) {
    for stmt in block {
        if let Stmt::For(l) = stmt
            && loops.contains(&l.var)
        {
            l.extent = extent.clone();
        }
        stmt.blocks_mut().for_each(|inner| run_to(inner, loops, extent));
    }
}
