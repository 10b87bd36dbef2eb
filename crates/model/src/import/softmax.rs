//! Import of softmax, and of losses based on it.

use tilewright_graph::op::{LossReduction, NegativeLogLikelihoodLoss, Softmax, SoftmaxKind};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, ReduceOp, UnaryOp};

use super::job::NodeImport;
use super::reduce::is_number;
use crate::net::{Kind, ValueId};
use crate::no_code::Lowered;
use crate::scalar::{choose_if, div, input, is_extreme, less, mul, not, number, of, sub};

impl NodeImport<'_> {
    /// Lowers a hardmax: 1 for the first of the largest elements along a dimension, 0 for all others.
    fn hardmax(&mut self, op: &Softmax) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_real(x)?;
        let shape: Vec<usize> = self.shape(0)?.iter().map(|&d| d as usize).collect();
        let (outer, n, inner) = op.split(&shape)?;
        let (flat, kept) = ([outer as i64, n as i64, inner as i64], [outer as i64, 1, inner as i64]);
        let x = self.viewed("flat", x, &flat);
        let counted: Vec<f32> = (0..n).map(|at| at as f32).collect();
        let places = self.constant("places", &[n as i64, 1], &counted);
        let best = self.step("best", Kind::Reduce(ReduceOp::Max, vec![1]), &[x], &kept);
        let place = choose_if(is_extreme(input(0), input(1), false), input(2), number(n as f64));
        let place = self.step("place", Kind::Map(place), &[x, best, places], &flat);
        let first = self.step("first", Kind::Reduce(ReduceOp::Min, vec![1]), &[place], &kept);
        let is_other = not(not(less(input(0), input(1))).and(not(less(input(1), input(0)))));
        let value = choose_if(is_other, number(0.0), number(1.0));
        let found = self.value("found", self.net.value(to).dtype, &flat);
        self.push(Kind::Map(value), &[first, places], found);
        self.push(Kind::View, &[found], to);
        Ok(())
    }

    /// Computes the log-softmax along dimension 1.
    fn log_softmax(&mut self, x: ValueId) -> ValueId {
        let shape = self.net.shape(x).to_vec();
        let mut kept = shape.clone();
        kept[1] = 1;
        let largest = self.step("largest", Kind::Reduce(ReduceOp::Max, vec![1]), &[x], &kept);
        let below = self.step("below", Kind::Map(sub(input(0), input(1))), &[x, largest], &shape);
        let power = self.step("power", Kind::Map(of(UnaryOp::Exp, input(0))), &[below], &shape);
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, vec![1]), &[power], &kept);
        self.step("logarithms", Kind::Map(sub(input(0), of(UnaryOp::Log, input(1)))), &[below, sum], &shape)
    }

    /// Lowers the loss of labels, given scores or log-probabilities.
    pub(super) fn loss(&mut self, op: &NegativeLogLikelihoodLoss, of_scores: bool) -> Lowered {
        let (mut x, labels, shape) = (self.input(0)?, self.input(1)?, self.shape(0)?);
        self.need_real(x)?;
        self.need_integers(labels)?;
        let places: i64 = shape[2..].iter().product();
        let (flat, row) = ([shape[0], shape[1], places], [shape[0], 1, places]);
        x = self.viewed("flat", x, &flat);
        if of_scores {
            x = self.log_softmax(x);
            if let Some(to) = self.try_output(1) {
                self.push(Kind::View, &[x], to);
            }
        }
        let Some(to) = self.try_output(0) else { return Ok(()) };
        let labels = self.viewed("labels", labels, &row);
        let is_ignored = |label: Expr| op.ignored.map(|n| is_number(label, n));
        let class = is_ignored(input(0)).map_or(input(0), |is| choose_if(is, number(0.0), input(0)));
        let class = self.whole_map("class", class, &[labels], &row);
        let picked = self.step("picked", Kind::Gather { axis: 1, by_element: true }, &[x, class], &row);
        let weight = match self.try_input(2) {
            Some(weights) => {
                let found = self.value("weight", self.net.value(weights).dtype, &row);
                self.push(Kind::Gather { axis: 0, by_element: false }, &[weights, class], found)
            }
            None => self.constant("weight", &[1, 1, 1], &[1.0]),
        };
        let counted =
            |x: Expr, label: usize| is_ignored(input(label)).map_or(x.clone(), |is| choose_if(is, number(0.0), x));
        let losses = counted(of(UnaryOp::Neg, mul(input(0), input(1))), 2);
        let losses = self.step("losses", Kind::Map(losses), &[picked, weight, labels], &row);
        if op.reduction == LossReduction::None {
            self.push(Kind::View, &[losses], to);
            return Ok(());
        }
        let (sum, kept, _) = self.sums(losses, &[0, 1, 2]);
        let result = match op.reduction {
            LossReduction::Mean => {
                let dtype = self.net.value(losses).dtype;
                let weights = self.value("weights", dtype, &row);
                self.push(Kind::Map(counted(input(0), 1)), &[weight, labels], weights);
                let (all, ..) = self.sums(weights, &[0, 1, 2]);
                self.step("mean", Kind::Map(Expr::binary(BinaryOp::Div, input(0), input(1))), &[sum, all], &kept)
            }
            _ => sum,
        };
        self.push(Kind::View, &[result], to);
        Ok(())
    }

    /// Lowers a softmax along dimensions, or its logarithm.
    pub(super) fn softmax(&mut self, op: &Softmax) -> Lowered {
        if op.kind == SoftmaxKind::Hard {
            return self.hardmax(op);
        }
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_real(x)?;
        let (outer, n, inner) = op.split(self.graph_shape(0)?)?;
        let shape = self.net.shape(x).to_vec();
        let same = [outer as i64, n as i64, inner as i64];
        let flat = if inner == 1 { same[..2].to_vec() } else { same.to_vec() };
        // The usual case, the last dimension, needs no other shape.
        let is_last = shape.last() == Some(&(n as i64)) && inner == 1;
        let (work, axis) = if is_last { (shape.clone(), shape.len() - 1) } else { (flat, 1) };
        let x = if work == shape { x } else { self.step("flat", Kind::View, &[x], &work) };
        let mut kept = work.clone();
        kept[axis] = 1;
        let largest = self.step("largest", Kind::Reduce(ReduceOp::Max, vec![axis]), &[x], &kept);
        let below = sub(input(0), input(1));
        let power = self.step("power", Kind::Map(of(UnaryOp::Exp, below.clone())), &[x, largest], &work);
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, vec![axis]), &[power], &kept);
        let (value, from) = match op.kind {
            SoftmaxKind::Log => (sub(below, of(UnaryOp::Log, input(2))), vec![x, largest, sum]),
            _ => {
                // The sum is at least 1. A division takes ten times as long as a product.
                let inverse = self.step("inverse", Kind::Map(div(number(1.0), input(0))), &[sum], &kept);
                (mul(input(0), input(1)), vec![power, inverse])
            }
        };
        if work == shape {
            self.push(Kind::Map(value), &from, to);
        } else {
            let result = self.step("result", Kind::Map(value), &from, &work);
            self.push(Kind::View, &[result], to);
        }
        Ok(())
    }
}
