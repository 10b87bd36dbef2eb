//! What the matrix products share.

use super::builder::Operands;
use super::{ProgramBuilder, StageSpec, Workload};
use crate::expr::{BinaryOp, Expr, ReduceOp};
use crate::index::Index;
use crate::program::{BufferId, Program, Role};

/// A product of matrices, perhaps of many.
pub(super) struct Product<'a> {
    /// Inputs with their shapes.
    pub inputs: [(&'a str, Vec<i64>); 2],
    /// The output's name.
    pub output: &'a str,
    /// Axes of the output: loops of the product.
    pub axes: &'a [(&'a str, i64)],
    /// Loops of the epilogue.
    pub outer: &'a [&'a str],
    pub k: i64,
    /// The subscripts of both inputs, of the output's and the sum's.
    pub index: fn(&Workload, &[Index]) -> [Vec<Index>; 2],
}

impl Product<'_> {
    /// The output as one stage, or as two where there is an epilogue.
    pub(super) fn program(self, w: &Workload) -> Program {
        let mut p = ProgramBuilder::new(w);
        let inputs: [BufferId; 2] = self.inputs.map(|(name, shape)| p.input(name, &shape));
        let shape: Vec<i64> = self.axes.iter().map(|a| a.1).collect();
        let last = shape.len() - 1;
        let operands = Operands::new(&mut p, w, shape[last], &shape);
        let plain = w.epilogue().is_empty();
        let (name, role) = if plain { (self.output, Role::Output) } else { ("acc", Role::Temporary) };
        let reduce = Some((ReduceOp::Sum, &[("k", self.k)][..]));
        let sum = p.stage(StageSpec { name, axes: self.axes, reduce, role }, |v| {
            let [a, b] = (self.index)(w, v);
            Expr::binary(BinaryOp::Mul, Expr::Load(inputs[0], a), Expr::Load(inputs[1], b))
        });
        if !plain {
            let axes: Vec<(&str, i64)> = self.outer.iter().copied().zip(shape).collect();
            p.stage(StageSpec { name: self.output, axes: &axes, reduce: None, role: Role::Output }, |at| {
                operands.apply(w, Expr::Load(sum, at.to_vec()), at, last)
            });
        }
        p.finish()
    }
}
