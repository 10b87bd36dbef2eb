//! Reductions along dimensions.

use super::util::{around, axes, axis, broadcast_strides, for_each, larger, smaller};
use super::{Import, Inputs, Op, Operation, Operator, row};
use crate::error::invalid;
use crate::{DType, OpError, Tensor, TensorType};

/// Kind of reduction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ReduceKind {
    L1,
    L2,
    LogSum,
    LogSumExp,
    Max,
    Mean,
    Min,
    Prod,
    Sum,
    SumSquare,
}

/// Reduction along some dimensions.
#[derive(Debug, Clone)]
pub struct Reduce {
    /// Kind of reduction.
    pub kind: ReduceKind,
    /// Dimensions of the attribute. `None`: they are input 1, or all if that is omitted.
    pub axes: Option<Vec<i64>>,
    /// Whether reduced dimensions are kept with size 1.
    pub keeps_dims: bool,
    /// Whether an empty list of dimensions reduces none of them, rather than all (`noop_with_empty_axes`).
    pub none_is_none: bool,
}

/// Index of the largest or smallest element along a dimension (`ArgMax`, `ArgMin`).
#[derive(Debug, Clone, Copy)]
pub struct ArgReduce {
    /// Whether the smallest element is sought.
    pub is_min: bool,
    /// Dimension to search; negative counts from the end.
    pub axis: i64,
    /// Whether the dimension is kept with size 1.
    pub keeps_dims: bool,
    /// Whether the last of several equal elements is taken (`select_last_index`).
    pub takes_last: bool,
}

/// Cumulative sum or product along a dimension, which is given by input 1.
#[derive(Debug, Clone, Copy)]
pub struct Cumulative {
    /// Whether products are accumulated, rather than sums.
    pub is_product: bool,
    /// Whether each result excludes the element at its own position.
    pub is_exclusive: bool,
    /// Whether accumulation runs from the end.
    pub is_reverse: bool,
}

fn reduce(node: &Import, kind: ReduceKind) -> Result<Op, OpError> {
    // `ReduceSum` takes its axes as an input since an earlier version than the others.
    let since = if kind == ReduceKind::Sum { 13 } else { 18 };
    let is_old = node.version < since;
    Ok(Reduce {
        kind,
        axes: if is_old { node.ints("axes")? } else { None },
        keeps_dims: node.flag("keepdims", true)?,
        none_is_none: !is_old && node.flag("noop_with_empty_axes", false)?,
    }
    .into())
}

fn arg(node: &Import, is_min: bool) -> Result<Op, OpError> {
    let takes_last = node.version >= 12 && node.flag("select_last_index", false)?;
    Ok(ArgReduce { is_min, axis: node.int_or("axis", 0)?, keeps_dims: node.flag("keepdims", true)?, takes_last }.into())
}

fn cumulative(node: &Import, is_product: bool) -> Result<Op, OpError> {
    let (is_exclusive, is_reverse) = (node.flag("exclusive", false)?, node.flag("reverse", false)?);
    Ok(Cumulative { is_product, is_exclusive, is_reverse }.into())
}

pub(super) const ROWS: &[Operator] = &[
    row("ReduceL1", &[1, 11, 13, 18], 1..=2, |node| reduce(node, ReduceKind::L1)),
    row("ReduceL2", &[1, 11, 13, 18], 1..=2, |node| reduce(node, ReduceKind::L2)),
    row("ReduceLogSum", &[1, 11, 13, 18, 28], 1..=2, |node| reduce(node, ReduceKind::LogSum)),
    row("ReduceLogSumExp", &[1, 11, 13, 18, 28], 1..=2, |node| reduce(node, ReduceKind::LogSumExp)),
    row("ReduceMax", &[1, 11, 12, 13, 18, 20], 1..=2, |node| reduce(node, ReduceKind::Max)),
    row("ReduceMean", &[1, 11, 13, 18], 1..=2, |node| reduce(node, ReduceKind::Mean)),
    row("ReduceMin", &[1, 11, 12, 13, 18, 20], 1..=2, |node| reduce(node, ReduceKind::Min)),
    row("ReduceProd", &[1, 11, 13, 18], 1..=2, |node| reduce(node, ReduceKind::Prod)),
    row("ReduceSum", &[1, 11, 13], 1..=2, |node| reduce(node, ReduceKind::Sum)),
    row("ReduceSumSquare", &[1, 11, 13, 18], 1..=2, |node| reduce(node, ReduceKind::SumSquare)),
    row("ArgMax", &[1, 11, 12, 13], 1..=1, |node| arg(node, false)),
    row("ArgMin", &[1, 11, 12, 13], 1..=1, |node| arg(node, true)),
    row("CumSum", &[11, 14], 2..=2, |node| cumulative(node, false)),
    row("CumProd", &[26], 2..=2, |node| cumulative(node, true)),
];

impl Reduce {
    /// Dimensions to reduce; `None` if the operator copies its input.
    ///
    /// # Errors
    /// If the dimensions are not known, or do not exist.
    pub fn axes(&self, inputs: Inputs<'_>) -> Result<Option<Vec<usize>>, OpError> {
        let rank = inputs.shape(0)?.len();
        let given = match &self.axes {
            Some(axes) => axes.clone(),
            None => inputs.optional_i64s(1)?.unwrap_or_default(),
        };
        match given.is_empty() {
            true if self.none_is_none => Ok(None),
            true => Ok(Some((0..rank).collect())),
            false => axes(&given, rank).map(Some),
        }
    }
}

impl Operation for Reduce {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let axes = self.axes(inputs)?.unwrap_or_default();
        let dims = ty.shape.iter().enumerate().filter_map(|(d, &n)| match axes.contains(&d) {
            true => self.keeps_dims.then_some(1),
            false => Some(n),
        });
        Ok(vec![TensorType::new(ty.dtype, dims.collect::<Vec<_>>())])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        use ReduceKind as K;
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let Some(axes) = self.axes(inputs)? else {
            return self.evaluate_elements(x);
        };
        let mut kept = x.shape().to_vec();
        axes.iter().for_each(|&d| kept[d] = 1);
        let by = broadcast_strides(&kept, x.shape());
        let n = ty.n_elements();
        let n_each = x.n_elements() / n.max(1);
        if !x.dtype().is_float() && !matches!(self.kind, K::L2 | K::LogSum | K::LogSumExp) {
            let numbers = x.integers();
            let (least, most) = x.dtype().integer_range();
            let start = match self.kind {
                K::Max => least,
                K::Min => most,
                K::Prod => 1,
                _ => 0,
            };
            let mut sums = vec![start; n];
            for_each(x.shape(), [&by], |at, [to]| {
                let (sum, x) = (&mut sums[to], numbers[at]);
                *sum = match self.kind {
                    K::Max => x.max(*sum),
                    K::Min => x.min(*sum),
                    K::Prod => sum.wrapping_mul(x),
                    K::L1 => *sum + x.abs(),
                    K::SumSquare => sum.wrapping_add(x.wrapping_mul(x)),
                    K::Sum | K::Mean | K::L2 | K::LogSum | K::LogSumExp => *sum + x,
                };
            });
            if self.kind == K::Mean {
                // As in ONNX Runtime and NumPy: the truncated quotient of doubles.
                sums.iter_mut().for_each(|sum| *sum = (*sum as f64 / n_each.max(1) as f64) as i128);
            }
            return Ok(vec![Tensor::from_integers(ty.dtype, ty.shape, &sums)]);
        }
        let numbers = x.floats();
        let start = match self.kind {
            K::Max | K::LogSumExp => f64::NEG_INFINITY,
            K::Min => f64::INFINITY,
            K::Prod => 1.0,
            _ => 0.0,
        };
        let mut sums = vec![start; n];
        for_each(x.shape(), [&by], |at, [to]| {
            let (sum, x) = (&mut sums[to], numbers[at]);
            *sum = match self.kind {
                K::Max | K::LogSumExp => larger(x, *sum),
                K::Min => smaller(x, *sum),
                K::Prod => *sum * x,
                K::L1 => *sum + x.abs(),
                K::L2 | K::SumSquare => *sum + x * x,
                K::Sum | K::Mean | K::LogSum => *sum + x,
            };
        });
        if self.kind == K::LogSumExp {
            // The largest element is subtracted, so that nothing overflows.
            let largest: Vec<f64> = sums.iter().map(|&m| if m.is_finite() { m } else { 0.0 }).collect();
            let infinite = sums;
            sums = vec![0.0; n];
            for_each(x.shape(), [&by], |at, [to]| sums[to] += (numbers[at] - largest[to]).exp());
            for ((sum, m), was) in sums.iter_mut().zip(largest).zip(infinite) {
                *sum = if was == f64::INFINITY { was } else { sum.ln() + m };
            }
        }
        sums.iter_mut().for_each(|sum| match self.kind {
            K::Mean => *sum /= n_each as f64,
            K::L2 => *sum = sum.sqrt(),
            K::LogSum => *sum = sum.ln(),
            _ => {}
        });
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &sums)])
    }
}

impl Reduce {
    /// Evaluates a reduction over no dimensions, which still maps each element.
    fn evaluate_elements(&self, x: &Tensor) -> Result<Vec<Tensor>, OpError> {
        use ReduceKind as K;
        let of_one = |x: f64| match self.kind {
            K::L1 | K::L2 => x.abs(),
            K::LogSum => x.ln(),
            K::SumSquare => x * x,
            K::LogSumExp | K::Max | K::Mean | K::Min | K::Prod | K::Sum => x,
        };
        if matches!(self.kind, K::LogSumExp | K::Max | K::Mean | K::Min | K::Prod | K::Sum) {
            return Ok(vec![x.clone()]);
        }
        if !x.dtype().is_float() && self.kind != K::LogSum {
            let of_one = |&x: &i128| if self.kind == K::SumSquare { x.wrapping_mul(x) } else { x.abs() };
            let numbers: Vec<i128> = x.integers().iter().map(of_one).collect();
            return Ok(vec![Tensor::from_integers(x.dtype(), x.shape(), &numbers)]);
        }
        let numbers: Vec<f64> = x.floats().into_iter().map(of_one).collect();
        Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)])
    }
}

impl Operation for ArgReduce {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let mut shape = inputs.shape(0)?.to_vec();
        let at = axis(self.axis, shape.len())?;
        if shape[at] == 0 {
            return Err(invalid!("dimension {at} has no elements"));
        }
        if self.keeps_dims {
            shape[at] = 1;
        } else {
            shape.remove(at);
        }
        Ok(vec![TensorType::new(DType::I64, shape)])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let (outer, n, inner) = around(x.shape(), axis(self.axis, x.shape().len())?);
        let (floats, integers) = match x.dtype().is_float() {
            true => (x.floats(), Vec::new()),
            false => (Vec::new(), x.integers()),
        };
        let is_more = |order: std::cmp::Ordering| if self.is_min { order.is_lt() } else { order.is_gt() };
        let is_better = |x: usize, than: usize| {
            if !integers.is_empty() {
                let order = integers[x].cmp(&integers[than]);
                return is_more(order) || self.takes_last && order.is_eq();
            }
            // NaN counts as both the largest and the smallest.
            let (x, than) = (floats[x], floats[than]);
            match x.partial_cmp(&than) {
                Some(order) => is_more(order) || self.takes_last && order.is_eq(),
                None if than.is_nan() => x.is_nan() && self.takes_last,
                None => true,
            }
        };
        let mut places = Vec::with_capacity(outer * inner);
        for o in 0..outer {
            for i in 0..inner {
                let at = |k: usize| (o * n + k) * inner + i;
                let mut best = 0;
                for k in 1..n {
                    if is_better(at(k), at(best)) {
                        best = k;
                    }
                }
                places.push(best as i128);
            }
        }
        Ok(vec![Tensor::from_integers(DType::I64, ty.shape, &places)])
    }
}

impl Operation for Cumulative {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        Ok(vec![inputs.ty(0)?.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let x = inputs.tensor(0)?;
        let along = inputs.tensor(1)?.i64s();
        let along = *along.first().ok_or_else(|| invalid!("its axis is empty"))?;
        let (outer, n, inner) = around(x.shape(), axis(along, x.shape().len())?);
        fn run<T: Copy>(job: Cumulative, sizes: [usize; 3], x: &[T], start: T, step: impl Fn(T, T) -> T) -> Vec<T> {
            let [outer, n, inner] = sizes;
            let mut out = vec![start; x.len()];
            for o in 0..outer {
                for i in 0..inner {
                    let mut sum = start;
                    for k in 0..n {
                        let k = if job.is_reverse { n - 1 - k } else { k };
                        let at = (o * n + k) * inner + i;
                        let next = step(sum, x[at]);
                        out[at] = if job.is_exclusive { sum } else { next };
                        sum = next;
                    }
                }
            }
            out
        }
        let sizes = [outer, n, inner];
        Ok(vec![if x.dtype().is_float() {
            let start = if self.is_product { 1.0 } else { 0.0 };
            let step = |a: f64, b: f64| if self.is_product { a * b } else { a + b };
            Tensor::from_floats(x.dtype(), x.shape(), &run(*self, sizes, &x.floats(), start, step))
        } else {
            let step = |a: i128, b: i128| if self.is_product { a.wrapping_mul(b) } else { a.wrapping_add(b) };
            let start = self.is_product.into();
            Tensor::from_integers(x.dtype(), x.shape(), &run(*self, sizes, &x.integers(), start, step))
        }])
    }
}
