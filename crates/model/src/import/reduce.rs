//! Import of reductions, cumulative sums, and `ArgMax`/`ArgMin`.

use tilewright_graph::DType;
use tilewright_graph::op::{ArgReduce, Cumulative, Inputs, Reduce, ReduceKind, TopK, axis};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond, ReduceOp, UnaryOp};
use tilewright_runtime::host::{CUMULATIVE, TOP_K};

use super::job::NodeImport;
use crate::net::{Kind, ValueId, Windows};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{self, add, choose_if, input, is_extreme, less, mul, not, number, of, part, sub};

/// Limit up to which f32 counts exactly.
pub(super) const MOST_COUNTED: i64 = 1 << 24;

/// Maximum number of terms per element of a running sum that is computed by windows.
const MOST_RUNNING: i64 = 1024;

impl NodeImport<'_> {
    /// Computes the logarithm of the sum of exponentials along dimensions, without overflow.
    fn log_of_sum(&mut self, x: ValueId, axes: Vec<usize>, kept: &[i64], to: ValueId) -> Lowered {
        self.need_real(x)?;
        let shape = self.net.shape(x).to_vec();
        let largest = self.step("largest", Kind::Reduce(ReduceOp::Max, axes.clone()), &[x], kept);
        // If all elements are −∞, so is the result; if one is +∞, so is the result.
        let finite = scalar::clip(input(1), f32::MIN.into(), f32::MAX.into());
        let power = of(UnaryOp::Exp, sub(input(0), finite.clone()));
        let power = self.step("power", Kind::Map(power), &[x, largest], &shape);
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, axes), &[power], kept);
        let value = add(of(UnaryOp::Log, input(0)), finite);
        let value = self.step("value", Kind::Map(value), &[sum, largest], kept);
        self.push(Kind::View, &[value], to);
        Ok(())
    }

    /// Lowers the position of the largest or smallest element along a dimension; of equal elements, the first
    /// or last.
    pub(super) fn arg_reduce(&mut self, op: &ArgReduce) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        let shape = self.net.shape(x).to_vec();
        let axis = axis(op.axis, shape.len())?;
        let n = shape[axis];
        self.need_code(x)?;
        let too_large = || NoCode::Size { what: "elements of the dimension", size: n, most: MOST_COUNTED };
        need(n < MOST_COUNTED, too_large)?;
        let (mut kept, mut along) = (shape.clone(), vec![1; shape.len()]);
        (kept[axis], along[axis]) = (1, n);
        let counted: Vec<f32> = (0..n).map(|at| at as f32).collect();
        let places = self.constant("places", &along, &counted);
        let extreme = if op.is_min { ReduceOp::Min } else { ReduceOp::Max };
        let best = self.step("best", Kind::Reduce(extreme, vec![axis]), &[x], &kept);
        let (order, none) = if op.takes_last { (ReduceOp::Max, -1) } else { (ReduceOp::Min, MOST_COUNTED) };
        let is_extreme = match self.is_real(x) {
            true => is_extreme(input(0), input(1), op.is_min),
            false => not(less(input(0), input(1))).and(not(less(input(1), input(0)))),
        };
        let place = choose_if(is_extreme, input(2), number(none as f64));
        let to_place = self.value("place", DType::F32, &shape);
        let place = self.push(Kind::Map(place), &[x, best, places], to_place);
        let found = self.step("found", Kind::Reduce(order, vec![axis]), &[place], &kept);
        let whole = self.value("whole", DType::I64, &kept);
        self.push(Kind::Map(input(0)), &[found], whole);
        self.push(Kind::View, &[whole], to);
        Ok(())
    }

    /// Lowers running products along a dimension to windows that end or begin at each position.
    fn running_products(&mut self, op: &Cumulative, x: ValueId, axis: usize, to: ValueId) -> Lowered {
        let shape = self.net.shape(x).to_vec();
        let n = shape[axis];
        let ones = vec![1; shape.len()];
        let (mut kernel, mut before) = (ones.clone(), vec![0; shape.len()]);
        kernel[axis] = n;
        before[axis] = match (op.is_reverse, op.is_exclusive) {
            (false, false) => n - 1,
            (false, true) => n,
            (true, false) => 0,
            (true, true) => -1,
        };
        let windows = Windows { kernel, strides: ones.clone(), dilations: ones, before };
        self.push(Kind::Window(ReduceOp::Product, windows), &[x], to);
        Ok(())
    }

    /// Lowers running sums along a dimension to masked sums over all elements, so that the nodes do not
    /// depend on the length.
    fn running_sums(&mut self, op: &Cumulative, x: ValueId, axis: usize, to: ValueId) -> Lowered {
        let (shape, dtype) = (self.net.shape(x).to_vec(), self.net.value(x).dtype);
        let n = shape[axis];
        let [outer, inner] = [&shape[..axis], &shape[axis + 1..]].map(|part| part.iter().product::<i64>());
        let counted: Vec<i64> = (0..n).collect();
        let positions = self.whole_constant("positions", DType::I64, &[1, n, 1, 1], &counted);
        let own = if self.varies() { self.varying(positions) } else { positions };
        let added = self.viewed("added", own, &[1, 1, n, 1]);
        let x = self.viewed("steps", x, &[outer, 1, n, inner]);
        let is_added = match (op.is_reverse, op.is_exclusive) {
            (false, false) => not(less(input(1), input(2))),
            (false, true) => less(input(2), input(1)),
            (true, false) => not(less(input(2), input(1))),
            (true, true) => less(input(1), input(2)),
        };
        let each = self.value("each", dtype, &[outer, n, n, inner]);
        let each = self.push(Kind::Map(choose_if(is_added, input(0), number(0.0))), &[x, own, added], each);
        let sum = self.value("sum", dtype, &[outer, n, 1, inner]);
        let sum = self.push(Kind::Reduce(ReduceOp::Sum, vec![2]), &[each], sum);
        self.push(Kind::View, &[sum], to);
        Ok(())
    }

    /// Lowers running sums or products along a dimension that may be known only in a run.
    pub(super) fn running_along(&mut self, op: &Cumulative) -> Lowered {
        let (x, along, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let shape = self.net.shape(x).to_vec();
        let rank = shape.len();
        if let Some(along) = self.net.scalar(along) {
            return self.running(op, x, axis(along as i64, rank)?, to);
        }
        self.need_integers(along)?;
        let mut all = vec![self.viewed("axis", along, &[])];
        for d in 0..rank {
            let of_axis = self.value("running", self.net.value(x).dtype, &shape);
            self.running(op, x, d, of_axis)?;
            all.push(of_axis);
        }
        let value = (0..rank as i64 - 1).fold(input(rank), |value, d| {
            let is = not(not(is_number(input(0), d)).and(not(is_number(input(0), d - rank as i64))));
            choose_if(is, input(1 + d as usize), value)
        });
        self.push(Kind::Map(value), &all, to);
        Ok(())
    }

    /// Lowers running sums or products: each position separately, or, for many elements, one after the other.
    fn running(&mut self, op: &Cumulative, x: ValueId, axis: usize, to: ValueId) -> Lowered {
        let shape = self.net.shape(x).to_vec();
        let n = shape[axis];
        self.need_code(x)?;
        if n > MOST_RUNNING {
            let dtype = self.net.value(x).dtype;
            let takes = "f32, f64, i32 and i64";
            let is_summed = self.is_real(x) || matches!(dtype, DType::I32 | DType::I64);
            need(is_summed, || self.no_code_for(x, takes))?;
            let sizes = [shape[..axis].iter().product(), n, shape[axis + 1..].iter().product()];
            let flags = [op.is_reverse, op.is_exclusive, op.is_product].map(i64::from);
            let parameters = [&[self.type_number(x)?], &sizes[..], &flags].concat();
            self.call(CUMULATIVE, parameters, 0, &[x], &[to]);
            return Ok(());
        }
        if op.is_product { self.running_products(op, x, axis, to) } else { self.running_sums(op, x, axis, to) }
    }

    /// Lowers a reduction. Over no dimensions it still maps each element.
    pub(super) fn reduced(&mut self, reduce: &Reduce) -> Lowered {
        use ReduceKind as R;
        let (x, to) = (self.input(0)?, self.output()?);
        match reduce.kind {
            R::Mean if self.is_whole(x) => return self.mean_of_whole(reduce),
            R::L2 | R::LogSum | R::LogSumExp if self.is_whole(x) => return self.in_doubles(|job| job.reduced(reduce)),
            _ => {}
        }
        self.need_code(x)?;
        let axes = reduce.axes(Inputs(&self.facts()))?.unwrap_or_default();
        let square = || mul(input(0), input(0));
        if axes.is_empty() {
            let value = match reduce.kind {
                R::L1 | R::L2 => of(UnaryOp::Abs, input(0)),
                R::SumSquare => square(),
                R::LogSum => of(UnaryOp::Log, input(0)),
                R::LogSumExp | R::Max | R::Mean | R::Min | R::Prod | R::Sum => return self.view(),
            };
            self.push(Kind::Map(value), &[x], to);
            return Ok(());
        }
        let shape = self.net.shape(x).to_vec();
        let mut kept = shape.clone();
        axes.iter().for_each(|&axis| kept[axis] = 1);
        let n: i64 = axes.iter().map(|&axis| shape[axis]).product();
        if reduce.kind == R::LogSumExp {
            return self.log_of_sum(x, axes, &kept, to);
        }
        let (op, before, after) = match reduce.kind {
            R::Max => (ReduceOp::Max, None, None),
            R::Min => (ReduceOp::Min, None, None),
            R::Sum => (ReduceOp::Sum, None, None),
            R::Mean => (ReduceOp::Sum, None, Some(part(input(0), n as f64, self.decides()))),
            R::L1 => (ReduceOp::Sum, Some(of(UnaryOp::Abs, input(0))), None),
            R::L2 => (ReduceOp::Sum, Some(square()), Some(of(UnaryOp::Sqrt, input(0)))),
            R::SumSquare => (ReduceOp::Sum, Some(square()), None),
            R::LogSum => (ReduceOp::Sum, None, Some(of(UnaryOp::Log, input(0)))),
            R::Prod => (ReduceOp::Product, None, None),
            R::LogSumExp => unreachable!("it has a lowering of its own"),
        };
        let mut x = x;
        if let Some(before) = before {
            x = self.step("before", Kind::Map(before), &[x], &shape);
        }
        let keeps = self.net.shape(to) == kept;
        let kind = Kind::Reduce(op, axes);
        match (keeps, after) {
            (true, None) => self.push(kind, &[x], to),
            (true, Some(after)) => {
                x = self.step("reduced", kind, &[x], &kept);
                self.push(Kind::Map(after), &[x], to)
            }
            (false, after) => {
                x = self.step("reduced", kind, &[x], &kept);
                if let Some(after) = after {
                    x = self.step("after", Kind::Map(after), &[x], &kept);
                }
                self.push(Kind::View, &[x], to)
            }
        };
        Ok(())
    }

    /// Reduces integers to their mean: the truncated quotient of an integer sum.
    fn mean_of_whole(&mut self, reduce: &Reduce) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        let wide = if self.net.value(x).dtype == DType::U64 { DType::U64 } else { DType::I64 };
        let (shape, out) = (self.net.shape(x).to_vec(), self.net.shape(to).to_vec());
        let (from, sum) = (self.value("wide", wide, &shape), self.value("sum", wide, &out));
        self.push(Kind::Map(input(0)), &[x], from);
        (self.inputs[0], self.outputs[0]) = (Some(from), Some(sum));
        self.reduced(&Reduce { kind: ReduceKind::Sum, ..reduce.clone() })?;
        let n = self.net.value(x).n_elements() / self.net.value(to).n_elements();
        let mean = self.value("mean", DType::F64, &out);
        // A product with the inverse may round below a quotient that is an integer.
        self.push(Kind::Map(Expr::binary(BinaryOp::Div, input(0), number(n as f64))), &[sum], mean);
        self.push(Kind::Map(input(0)), &[mean], to);
        Ok(())
    }

    /// Lowers the largest or smallest elements along a dimension, with their positions.
    pub(super) fn top_k(&mut self, op: &TopK) -> Lowered {
        let x = self.input(0)?;
        let shape = self.net.shape(x).to_vec();
        let axis = axis(op.axis, shape.len())?;
        let known = self.outputs.iter().flatten().next().copied().ok_or(NoCode::Unread)?;
        let out = self.net.shape(known).to_vec();
        let around = [shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product(), out[axis]];
        let parameters = [&[self.type_number(x)?], &around[..], &[i64::from(op.is_largest)]].concat();
        let values = self.output_or(0, self.net.value(x).dtype, &out);
        let places = self.output_or(1, DType::I64, &out);
        self.call(TOP_K, parameters, 16 * out[axis] as usize, &[x], &[values, places]);
        Ok(())
    }
}

/// Condition that an integer equals `n`.
pub(super) fn is_number(x: Expr, n: i64) -> Cond {
    less(number(n as f64 - 1.0), x.clone()).and(less(x, number(n as f64 + 1.0)))
}
