//! Operators that are a few maps, sums and moves.

use tilewright_graph::op::{
    BatchNormalization, CenterCropPad, Clip, Cumulative, Inputs, LayerNormalization, LossReduction, LpNormalization,
    MeanVarianceNormalization, NegativeLogLikelihoodLoss, Pad, PadMode, Reduce, ReduceKind, ReverseSequence, Scatter,
    Softmax, TensorScatter, Trilu, axis,
};
use tilewright_graph::{DType, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond, ReduceOp, UnaryOp};
use tilewright_runtime::host::CUMULATIVE;

use crate::host::from_start;
use crate::import::Job;
use crate::net::{Kind, ValueId};
use crate::scalar::{
    add, choose_if, div, input, is_extreme, less, max, min, mul, not, number, of, part, sub, where_less,
};

/// Numbers that a running sum adds for each of its own by windows, at most.
const MOST_RUNNING: i64 = 1024;

/// Whether an integer is another one.
pub(crate) fn is_number(x: Expr, n: i64) -> Cond {
    less(number(n as f64 - 1.0), x.clone()).and(less(x, number(n as f64 + 1.0)))
}

impl Job<'_> {
    /// Whether its elements are numbers that functions of numbers have code for.
    pub(crate) fn is_real(&self, id: ValueId) -> bool {
        matches!(self.net.value(id).dtype, DType::F32 | DType::F64)
    }

    /// A value in another shape of as many elements.
    pub(crate) fn viewed(&mut self, what: &str, x: ValueId, shape: &[i64]) -> ValueId {
        if self.net.shape(x) == shape { x } else { self.step(what, Kind::View, &[x], shape) }
    }

    /// A value repeated to a larger shape.
    pub(crate) fn repeated(&mut self, what: &str, x: ValueId, shape: &[i64]) -> ValueId {
        if self.net.shape(x) == shape { x } else { self.step(what, Kind::Map(input(0)), &[x], shape) }
    }

    /// Between bounds that are known, or are inputs.
    pub(crate) fn clipped(&mut self, op: &Clip) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        self.has_code(x).then_some(())?;
        let mut inputs = vec![x];
        let mut bound = |at: usize, given: Option<f64>, none: f64| match (given, self.try_input(at)) {
            (Some(x), _) => number(x),
            (None, None) => number(none),
            (None, Some(id)) => match self.net.literal(id) {
                // NaN is no bound.
                Some(Expr::Const(x)) if x.is_nan() => number(none),
                Some(x) => x,
                None => {
                    inputs.push(id);
                    input(inputs.len() - 1)
                }
            },
        };
        let (low, high) = (bound(1, op.min, f64::NEG_INFINITY), bound(2, op.max, f64::INFINITY));
        for id in &mut inputs[1..] {
            *id = self.viewed("bound", *id, &[]);
        }
        self.push(Kind::Map(min(max(input(0), low), high)), &inputs, to);
        Some(())
    }

    /// A triangle of each matrix.
    pub(crate) fn trilu(&mut self, op: &Trilu) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        self.has_code(x).then_some(())?;
        let &[.., rows, columns] = &shape[..] else { return None };
        let mut inputs = vec![x, self.counted(2, 0, rows, 1), self.counted(1, 0, columns, 1)];
        let k = match self.try_input(1) {
            Some(k) if self.net.value(k).n_elements() == 1 => match self.net.scalar(k) {
                Some(k) => number(k),
                None => {
                    inputs.push(self.viewed("k", k, &[]));
                    input(3)
                }
            },
            _ => number(0.0),
        };
        let above = Expr::binary(BinaryOp::Sub, input(2), input(1));
        let is_out = if op.upper { less(above, k) } else { less(k, above) };
        self.push(Kind::Map(choose_if(is_out, number(0.0), input(0))), &inputs, to);
        Some(())
    }

    /// Running sums or products along a dimension that may be known in a run alone.
    pub(crate) fn running_along(&mut self, op: &Cumulative) -> Option<()> {
        let (x, along, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let shape = self.net.shape(x).to_vec();
        let rank = shape.len();
        if let Some(along) = self.net.scalar(along) {
            return self.running(op, x, axis(along as i64, rank).ok()?, to);
        }
        self.is_whole(along).then_some(())?;
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
        Some(())
    }

    /// Running sums or products, as windows that end or begin at each place; of many numbers one by one.
    fn running(&mut self, op: &Cumulative, x: ValueId, axis: usize, to: ValueId) -> Option<()> {
        let shape = self.net.shape(x).to_vec();
        let n = shape[axis];
        self.has_code(x).then_some(())?;
        if n > MOST_RUNNING {
            let dtype = self.net.value(x).dtype;
            (self.is_real(x) || matches!(dtype, DType::I32 | DType::I64)).then_some(())?;
            let sizes = [shape[..axis].iter().product(), n, shape[axis + 1..].iter().product()];
            let flags = [op.is_reverse, op.is_exclusive, op.is_product].map(i64::from);
            let parameters = [&[self.type_number(x)?], &sizes[..], &flags].concat();
            self.call(CUMULATIVE, parameters, 0, &[x], &[to]);
            return Some(());
        }
        self.running_windows(op, x, axis, to)
    }

    /// Along a dimension the first of the largest numbers as 1, all others as 0.
    pub(crate) fn hardmax(&mut self, op: &Softmax) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        self.is_real(x).then_some(())?;
        let shape: Vec<usize> = self.shape(0)?.iter().map(|&d| d as usize).collect();
        let (outer, n, inner) = op.split(&shape).ok()?;
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
        Some(())
    }

    /// Norms of what a reduction or windows have together.
    pub(crate) fn norm(&mut self, x: ValueId, kind: Kind, p: f64, shape: &[i64]) -> Option<ValueId> {
        self.is_real(x).then_some(())?;
        let own = self.net.shape(x).to_vec();
        let size = of(UnaryOp::Abs, input(0));
        let (power, root) = match p {
            1.0 => (size, input(0)),
            2.0 => (mul(input(0), input(0)), of(UnaryOp::Sqrt, input(0))),
            p => {
                let power = Expr::binary(BinaryOp::Pow, size, number(p));
                (power, Expr::binary(BinaryOp::Pow, input(0), number(1.0 / p)))
            }
        };
        let powers = self.step("powers", Kind::Map(power), &[x], &own);
        let sum = self.step("sum", kind, &[powers], shape);
        Some(self.step("norm", Kind::Map(root), &[sum], shape))
    }

    /// Divided by the norm along a dimension; nothing but zeros stays as it is.
    pub(crate) fn lp_normalization(&mut self, op: &LpNormalization) -> Option<()> {
        let (x, to, mut kept) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        let axis = axis(op.axis, kept.len()).ok()?;
        kept[axis] = 1;
        let norm = self.norm(x, Kind::Reduce(ReduceOp::Sum, vec![axis]), op.p, &kept)?;
        // A norm of NaN is not 0: what follows from it is NaN.
        let is_zero = less(input(1), number(1.0)).and(not(less(number(0.0), input(1))));
        let value = choose_if(is_zero, number(0.0), Expr::binary(BinaryOp::Div, input(0), input(1)));
        self.push(Kind::Map(value), &[x, norm], to);
        Some(())
    }

    /// Sums, and how many each is of, along dimensions that stay with size 1.
    fn sums(&mut self, x: ValueId, axes: &[usize]) -> (ValueId, Vec<i64>, f64) {
        let mut kept = self.net.shape(x).to_vec();
        let n: i64 = axes.iter().map(|&axis| kept[axis]).product();
        axes.iter().for_each(|&axis| kept[axis] = 1);
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, axes.to_vec()), &[x], &kept);
        (sum, kept, n as f64)
    }

    /// Means and variances along dimensions, and how far elements are from their means.
    fn moments(&mut self, x: ValueId, axes: &[usize]) -> [ValueId; 3] {
        let shape = self.net.shape(x).to_vec();
        let (sum, kept, n) = self.sums(x, axes);
        let share = || mul(input(0), number(1.0 / n));
        let mean = self.step("mean", Kind::Map(share()), &[sum], &kept);
        let apart = self.step("apart", Kind::Map(sub(input(0), input(1))), &[x, mean], &shape);
        let square = self.step("square", Kind::Map(mul(input(0), input(0))), &[apart], &shape);
        let (sum, ..) = self.sums(square, axes);
        let variance = self.step("variance", Kind::Map(share()), &[sum], &kept);
        [mean, variance, apart]
    }

    /// Mean 0 and variance 1 along dimensions.
    pub(crate) fn mean_variance(&mut self, op: &MeanVarianceNormalization) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        self.is_real(x).then_some(())?;
        let rank = self.shape(0)?.len();
        let axes = op.axes.iter().map(|&at| axis(at, rank).ok()).collect::<Option<Vec<_>>>()?;
        let [_, variance, apart] = self.moments(x, &axes);
        let deviation = add(of(UnaryOp::Sqrt, input(1)), number(1e-9));
        self.push(Kind::Map(Expr::binary(BinaryOp::Div, input(0), deviation)), &[apart, variance], to);
        Some(())
    }

    /// The means and inverse deviations that a normalization of last dimensions gives besides.
    pub(crate) fn layer_statistics(&mut self, op: &LayerNormalization) -> Option<()> {
        let x = self.try_input(0)?;
        let outputs = [1, 2].map(|at| self.outputs.get(at).copied().flatten());
        if outputs == [None; 2] {
            return Some(());
        }
        let rank = self.shape(0)?.len();
        let axes: Vec<usize> = (axis(op.axis, rank).ok()?..rank).collect();
        let [mean, variance, _] = self.moments(x, &axes);
        let inverse = div(number(1.0), of(UnaryOp::Sqrt, add(input(0), number(op.epsilon))));
        for ((from, value), to) in [(mean, input(0)), (variance, inverse)].into_iter().zip(outputs) {
            if let Some(to) = to {
                self.push(Kind::Map(value), &[from], to);
            }
        }
        Some(())
    }

    /// Channels scaled and moved by statistics that are inputs, or the batch's own.
    pub(crate) fn batch_normalization(&mut self, op: &BatchNormalization) -> Option<()> {
        let (x, shape) = (self.try_input(0)?, self.shape(0)?);
        (self.is_real(x) && shape.len() >= 2).then_some(())?;
        let channels = [&[shape[1]], &vec![1; shape.len() - 2][..]].concat();
        let mut given = Vec::new();
        for at in 1..5 {
            let id = self.try_input(at)?;
            self.is_real(id).then_some(())?;
            given.push(self.viewed("statistics", id, &channels));
        }
        if let Some(momentum) = op.training_momentum {
            let axes: Vec<usize> = (0..shape.len()).filter(|&d| d != 1).collect();
            let [mean, variance, _] = self.moments(x, &axes);
            for (slot, new) in [(2, mean), (3, variance)] {
                let new = self.viewed("own", new, &channels);
                if let Some(to) = self.outputs.get(slot - 1).copied().flatten() {
                    let running = add(mul(input(0), number(momentum)), mul(input(1), number(1.0 - momentum)));
                    let running = self.step("running", Kind::Map(running), &[given[slot], new], &channels);
                    self.push(Kind::View, &[running], to);
                }
                given[slot] = new;
            }
        }
        let factor = div(input(1), of(UnaryOp::Sqrt, add(input(4), number(op.epsilon))));
        let value = add(mul(sub(input(0), input(3)), factor), input(2));
        let to = self.output()?;
        self.push(Kind::Map(value), &[&[x], &given[..]].concat(), to);
        Some(())
    }

    /// Lowers a reduction. Over no dimensions it still maps each element.
    pub(crate) fn reduced(&mut self, reduce: &Reduce) -> Option<()> {
        use ReduceKind as R;
        let (x, to) = (self.try_input(0)?, self.output()?);
        match reduce.kind {
            R::Mean if self.is_whole(x) => return self.mean_of_whole(reduce),
            R::L2 | R::LogSum | R::LogSumExp if self.is_whole(x) => return self.in_doubles(|job| job.reduced(reduce)),
            _ => {}
        }
        self.has_code(x).then_some(())?;
        let axes = reduce.axes(Inputs(&self.facts())).ok()?.unwrap_or_default();
        let square = || Some(mul(input(0), input(0)));
        if axes.is_empty() {
            let value = match reduce.kind {
                R::L1 | R::L2 => of(UnaryOp::Abs, input(0)),
                R::SumSquare => square()?,
                R::LogSum => of(UnaryOp::Log, input(0)),
                R::LogSumExp | R::Max | R::Mean | R::Min | R::Prod | R::Sum => return self.view(),
            };
            self.push(Kind::Map(value), &[x], to);
            return Some(());
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
            R::L2 => (ReduceOp::Sum, square(), Some(of(UnaryOp::Sqrt, input(0)))),
            R::SumSquare => (ReduceOp::Sum, square(), None),
            R::LogSum => (ReduceOp::Sum, None, Some(of(UnaryOp::Log, input(0)))),
            R::Prod => (ReduceOp::Product, None, None),
            R::LogSumExp => return None,
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
        Some(())
    }

    /// Reduces integers to their mean: the quotient, cut off, of a sum of integers.
    fn mean_of_whole(&mut self, reduce: &Reduce) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        let wide = if self.net.value(x).dtype == DType::U64 { DType::U64 } else { DType::I64 };
        let (shape, out) = (self.net.shape(x).to_vec(), self.net.shape(to).to_vec());
        let (from, sum) = (self.value("wide", wide, &shape), self.value("sum", wide, &out));
        self.push(Kind::Map(input(0)), &[x], from);
        (self.inputs[0], self.outputs[0]) = (Some(from), Some(sum));
        self.reduced(&Reduce { kind: ReduceKind::Sum, ..reduce.clone() })?;
        let n = self.net.value(x).n_elements() / self.net.value(to).n_elements();
        let mean = self.value("mean", DType::F64, &out);
        // A product with the inverse may be less than an integer that the quotient is.
        self.push(Kind::Map(Expr::binary(BinaryOp::Div, input(0), number(n as f64))), &[sum], mean);
        self.push(Kind::Map(input(0)), &[mean], to);
        Some(())
    }

    /// The beginnings of sequences reversed.
    pub(crate) fn reversed(&mut self, op: &ReverseSequence) -> Option<()> {
        let (x, lengths, to, shape) = (self.try_input(0)?, self.try_input(1)?, self.output()?, self.shape(0)?);
        let rank = shape.len();
        let (time, batch) = (axis(op.time_axis, rank).ok()?, axis(op.batch_axis, rank).ok()?);
        (self.is_whole(lengths) && self.has_code(x)).then_some(())?;
        let mut along = vec![1; rank];
        along[batch] = shape[batch];
        let lengths = self.viewed("lengths", lengths, &along);
        let steps = self.counted(rank, time, shape[time], 1);
        let turned = sub(Expr::binary(BinaryOp::Sub, input(0), input(1)), number(1.0));
        let place = where_less(input(1), input(0), turned, input(1));
        let places = self.whole_map("places", place, &[lengths, steps], &shape);
        self.push(Kind::Gather { axis: time, by_element: true }, &[x, places], to);
        Some(())
    }

    /// Slices at tuples of places that are known in a run alone, in batches that both have in common.
    pub(crate) fn gathered_at(&mut self, n_batch: usize) -> Option<()> {
        let (from, index, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let (shape, tuples) = (self.shape(0)?, self.shape(1)?);
        let (&depth, outer) = tuples.split_last()?;
        (self.has_code(from) && self.is_whole(index) && depth > 0).then_some(())?;
        let end = n_batch + depth as usize;
        let n: i64 = outer.iter().product();
        let mut inputs = self.tuple_columns(index, n, depth);
        let stride = |d: usize| shape[d + 1..end].iter().product::<i64>();
        let clamped = |k: usize| {
            let extent = shape[n_batch + k];
            let place = from_start(input(k), extent);
            mul(max(min(place, number(extent as f64 - 1.0)), number(0.0)), number(stride(n_batch + k) as f64))
        };
        let mut place = (0..depth as usize).map(clamped).reduce(add)?;
        if n_batch > 0 {
            let n_batches: i64 = shape[..n_batch].iter().product();
            let per_batch = n / n_batches;
            let rows = (0..n).map(|at| at / per_batch * stride(n_batch - 1)).collect::<Vec<_>>();
            inputs.push(self.whole_constant("batches", DType::I64, &[n], &rows));
            place = add(place, input(depth as usize));
        }
        let places = self.whole_map("places", place, &inputs, &[n]);
        let (rows, width) = (shape[..end].iter().product(), shape[end..].iter().product());
        let table = self.viewed("table", from, &[rows, width]);
        let kind = Kind::Gather { axis: 0, by_element: false };
        let found = self.step("rows", kind, &[table, places], &[n, width]);
        self.push(Kind::View, &[found], to);
        Some(())
    }

    /// A cache with new entries from the places on that an input says.
    pub(crate) fn cached(&mut self, op: &TensorScatter) -> Option<()> {
        let (x, updates) = (self.try_input(0)?, self.try_input(1)?);
        let (shape, new) = (self.shape(0)?, self.shape(1)?);
        let axis = axis(op.axis, shape.len()).ok()?;
        let (n, n_new, batch) = (shape[axis], new[axis], *shape.first()?);
        let outer: i64 = shape[..axis].iter().product();
        let inner: i64 = shape[axis + 1..].iter().product();
        let starts = match self.try_input(2) {
            Some(starts) => self.viewed("starts", starts, &[batch, 1, 1]),
            None => self.whole_constant("starts", DType::I64, &[1, 1, 1], &[0]),
        };
        let rows = [batch, outer / batch, n_new];
        let bases = (0..outer).map(|o| o * n * inner).collect::<Vec<_>>();
        let bases = self.whole_constant("bases", DType::I64, &[batch, outer / batch, 1], &bases);
        let steps = self.counted(1, 0, n_new, 1);
        let at = add(input(0), input(1));
        let at = if op.is_circular {
            where_less(at.clone(), number(n as f64), at.clone(), sub(at, number(n as f64)))
        } else {
            at
        };
        let is_inside = less(at.clone(), number(n as f64)).and(less(number(-1.0), at.clone()));
        let place = choose_if(is_inside, add(mul(at, number(inner as f64)), input(2)), number(-1.0));
        let places = self.whole_map("places", place, &[starts, steps, bases], &rows);
        let places = self.viewed("places", places, &[outer * n_new]);
        self.scattered(Scatter::Replace, x, places, updates)
    }

    /// A tensor repeated along its dimensions.
    pub(crate) fn tiled(&mut self) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        self.has_code(x).then_some(())?;
        let out = self.net.shape(to).to_vec();
        let mut apart = Vec::new();
        let mut whole = Vec::new();
        for (&n, &m) in shape.iter().zip(&out) {
            apart.extend([1, n]);
            whole.extend([m / n, n]);
        }
        let apart = self.viewed("apart", x, &apart);
        let tiles = self.repeated("tiles", apart, &whole);
        self.push(Kind::View, &[tiles], to);
        Some(())
    }

    /// Cut or padded around the centre.
    pub(crate) fn centred(&mut self, _: &CenterCropPad) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        let out = self.net.shape(to).to_vec();
        let before = |(&n, &wanted): (&i64, &i64)| if n >= wanted { -((n - wanted) / 2) } else { (wanted - n) / 2 };
        self.moved(Kind::Pad(shape.iter().zip(&out).map(before).collect(), 0.0), x, to)
    }

    /// Borders of any mode, dimension by dimension; a number that is known in a run alone around the rest.
    pub(crate) fn bordered(&mut self, op: &Pad) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        let borders = op.borders(Inputs(&self.facts())).ok()?;
        self.has_code(x).then_some(())?;
        let out = self.net.shape(to).to_vec();
        if op.mode == PadMode::Constant {
            let fill = self.try_input(2)?;
            let fill = self.viewed("fill", fill, &[]);
            let mut inputs =
                vec![self.step("padded", Kind::Pad(borders.iter().map(|b| b.0).collect(), 0.0), &[x], &out)];
            inputs.push(fill);
            let mut value = input(0);
            for (d, &(before, after)) in borders.iter().enumerate().filter(|(_, border)| **border != (0, 0)) {
                let mut along = vec![1; out.len() - d];
                along[0] = out[d];
                let is_in = |at: i64| i64::from(at >= before && at < out[d] - after);
                let is_in: Vec<i64> = (0..out[d]).map(is_in).collect();
                inputs.push(self.whole_constant("inside", DType::Bool, &along, &is_in));
                value = choose_if(less(number(0.0), input(inputs.len() - 1)), value, input(1));
            }
            self.push(Kind::Map(value), &inputs, to);
            return Some(());
        }
        let mut x = x;
        let mut now = shape.clone();
        for (d, &(before, _)) in borders.iter().enumerate().filter(|(_, border)| **border != (0, 0)) {
            let n = shape[d];
            let source = |at: i64| match op.mode {
                PadMode::Edge => at.clamp(0, n - 1),
                PadMode::Reflect if n == 1 => 0,
                PadMode::Reflect => {
                    let at = at.rem_euclid(2 * (n - 1));
                    at.min(2 * (n - 1) - at)
                }
                _ => at.rem_euclid(n),
            };
            now[d] = out[d];
            let list: Vec<i64> = (0..out[d]).map(|at| source(at - before)).collect();
            let list = self.whole_constant("sources", DType::I64, &[out[d]], &list);
            x = self.step("bordered", Kind::Gather { axis: d, by_element: false }, &[x, list], &now);
        }
        self.push(Kind::View, &[x], to);
        Some(())
    }

    /// Slices for which a known condition holds.
    pub(crate) fn compressed(&mut self, along: Option<i64>) -> Option<()> {
        let (x, holds, to, mut shape) = (self.try_input(0)?, self.try_input(1)?, self.output()?, self.shape(0)?);
        self.has_code(x).then_some(())?;
        let axis = match along {
            Some(along) => axis(along, shape.len()).ok()?,
            None => {
                shape = vec![shape.iter().product()];
                0
            }
        };
        let holds = self.net.value(holds).constant.as_ref()?.i64s();
        let places: Vec<i64> =
            (0..shape[axis]).zip(&holds).filter(|(_, holds)| **holds != 0).map(|(at, _)| at).collect();
        let x = self.viewed("list", x, &shape);
        let list = self.whole_constant("places", DType::I64, &[places.len() as i64], &places);
        self.push(Kind::Gather { axis, by_element: false }, &[x, list], to);
        Some(())
    }

    /// Logarithms of shares along dimension 1.
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

    /// The loss of labels, of scores or of logarithms of shares.
    pub(crate) fn loss(&mut self, op: &NegativeLogLikelihoodLoss, of_scores: bool) -> Option<()> {
        let (mut x, labels, shape) = (self.try_input(0)?, self.try_input(1)?, self.shape(0)?);
        (self.is_real(x) && self.is_whole(labels)).then_some(())?;
        let places: i64 = shape[2..].iter().product();
        let (flat, row) = ([shape[0], shape[1], places], [shape[0], 1, places]);
        x = self.viewed("flat", x, &flat);
        if of_scores {
            x = self.log_softmax(x);
            if let Some(to) = self.outputs.get(1).copied().flatten() {
                self.push(Kind::View, &[x], to);
            }
        }
        let Some(to) = self.output() else { return Some(()) };
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
            return Some(());
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
        Some(())
    }

    /// All as it is, and all of it kept.
    pub(crate) fn dropout(&mut self) -> Option<()> {
        let x = self.try_input(0)?;
        if let Some(to) = self.output() {
            self.push(Kind::View, &[x], to);
        }
        if let Some(mask) = self.outputs.get(1).copied().flatten() {
            let value = self.net.value(mask);
            let n = value.n_elements() as usize;
            let all = Tensor::from_integers(value.dtype, value.ty().shape, &vec![1; n]);
            self.net.values[mask.0].constant = Some(all);
        }
        Some(())
    }
}
