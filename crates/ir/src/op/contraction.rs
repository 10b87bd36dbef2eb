//! The programs of matrix products.

use super::builder::Operands;
use super::{Contraction, Factor, StageSpec, Workload};
use crate::expr::{BinaryOp, Expr, ReduceOp};
use crate::index::Index;
use crate::program::{Program, Role};

impl Contraction {
    /// The output as one stage, or as two where there is an epilogue.
    pub(super) fn program(&self, w: &Workload) -> Program {
        let first = usize::from(self.batch.is_none());
        let batch = |rest: [i64; 2]| self.batch.into_iter().chain(rest).collect::<Vec<_>>();
        let stored =
            |factor: &Factor, outer: i64| batch(if factor.k_first { [self.k, outer] } else { [outer, self.k] });
        let mut p = w.builder();
        let a = p.input(self.a.name, &stored(&self.a, self.m));
        let b = p.input(self.b.name, &stored(&self.b, self.n));
        let shape = batch([self.m, self.n]);
        let last = shape.len() - 1;
        let operands = Operands::new(&mut p, w, shape[last], &shape);
        let plain = w.epilogue().is_empty();
        let role = if plain { Role::Output } else { Role::Temporary };
        let named = |loops: &[&'static str]| loops.iter().copied().zip(shape.clone()).collect::<Vec<_>>();
        let [.., k] = Contraction::LOOPS;
        let reduce = Some((ReduceOp::Sum, &[(k, self.k)][..]));
        let axes = named(&Contraction::LOOPS[first..3]);
        let sum = p.stage(StageSpec { name: self.sum(w), axes: &axes, reduce, role }, |v| {
            let k = &v[last + 1];
            let at = |factor: &Factor, outer: &Index| {
                let pair = if factor.k_first { [k, outer] } else { [outer, k] };
                v[..last - 1].iter().chain(pair).cloned().collect()
            };
            let (left, right) = (at(&self.a, &v[last - 1]), at(&self.b, &v[last]));
            Expr::binary(BinaryOp::Mul, Expr::Load(a, left), Expr::Load(b, right))
        });
        if !plain {
            let axes = named(&Contraction::FINISH[first..]);
            p.stage(StageSpec { name: self.output, axes: &axes, reduce: None, role: Role::Output }, |at| {
                operands.apply(Expr::Load(sum, at.to_vec()), at, last)
            });
        }
        p.finish()
    }
}
