//! Import of normalisations, as reductions and maps.

use tilewright_graph::DType;
use tilewright_graph::op::{
    BatchNormalization, GroupNormalization, InstanceNormalization, LayerNormalization, LpNormalization, Lrn,
    MeanVarianceNormalization, RmsNormalization, axis,
};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, ReduceOp, UnaryOp};

use super::job::NodeImport;
use crate::net::{Kind, ValueId, Windows};
use crate::no_code::{Lowered, need};
use crate::scalar::{add, choose_if, div, input, less, mul, not, number, of, sub};

impl NodeImport<'_> {
    /// Normalises to mean 0 and variance 1 along dimensions.
    fn normalised(&mut self, x: ValueId, axes: Vec<usize>, epsilon: f64) -> Lowered<ValueId> {
        self.need_real(x)?;
        let shape = self.net.shape(x).to_vec();
        let mut kept = shape.clone();
        axes.iter().for_each(|&axis| kept[axis] = 1);
        let share = 1.0 / axes.iter().map(|&axis| shape[axis]).product::<i64>() as f64;
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, axes.clone()), &[x], &kept);
        let apart = sub(input(0), mul(input(1), number(share)));
        let apart = self.step("apart", Kind::Map(apart), &[x, sum], &shape);
        let square = self.step("square", Kind::Map(mul(input(0), input(0))), &[apart], &shape);
        let variance = self.step("variance", Kind::Reduce(ReduceOp::Sum, axes), &[square], &kept);
        let root = of(UnaryOp::Sqrt, add(mul(input(0), number(share)), number(epsilon)));
        let factor = self.step("factor", Kind::Map(div(number(1.0), root)), &[variance], &kept);
        Ok(self.step("normal", Kind::Map(mul(input(0), input(1))), &[apart, factor], &shape))
    }

    /// Multiplies by a scale and adds an offset, each optional.
    fn scaled(&mut self, x: ValueId, scale: Option<ValueId>, offset: Option<ValueId>, to: ValueId) -> Lowered {
        let inputs: Vec<ValueId> = [Some(x), scale, offset].into_iter().flatten().collect();
        let scaled = if scale.is_some() { mul(input(0), input(1)) } else { input(0) };
        let value = if offset.is_some() { add(scaled, input(inputs.len() - 1)) } else { scaled };
        self.push(Kind::Map(value), &inputs, to);
        Ok(())
    }

    /// Lowers a normalization of groups of channels to mean 0 and variance 1, with scale and offset per group
    /// or channel.
    pub(super) fn group_normalization(&mut self, op: &GroupNormalization) -> Lowered {
        let (x, scale, offset, to) = (self.input(0)?, self.input(1)?, self.input(2)?, self.output()?);
        let shape = self.net.shape(x).to_vec();
        let groups = op.n_groups as i64;
        let of_groups = match self.net.open_size {
            Some(_) => [&[shape[0], groups, shape[1] / groups], &shape[2..]].concat(),
            None => vec![shape[0], groups, shape[1..].iter().product::<i64>() / groups],
        };
        let grouped = self.step("groups", Kind::View, &[x], &of_groups);
        let mut normal = self.normalised(grouped, (2..of_groups.len()).collect(), op.epsilon)?;
        let mut by = vec![1; of_groups.len() - 1];
        by[0] = groups;
        if !op.scales_groups {
            normal = self.step("channels", Kind::View, &[normal], &shape);
            by = vec![1; shape.len() - 1];
            by[0] = shape[1];
        }
        let scale = self.step("scale", Kind::View, &[scale], &by);
        let offset = self.step("offset", Kind::View, &[offset], &by);
        if op.scales_groups {
            let scaled = self.value("scaled", DType::F32, &of_groups);
            self.scaled(normal, Some(scale), Some(offset), scaled)?;
            self.push(Kind::View, &[scaled], to);
            return Ok(());
        }
        self.scaled(normal, Some(scale), Some(offset), to)
    }

    /// Lowers a division by the norm along a dimension; vectors of zeros are unchanged.
    pub(super) fn lp_normalization(&mut self, op: &LpNormalization) -> Lowered {
        let (x, to, mut kept) = (self.input(0)?, self.output()?, self.shape(0)?);
        let axis = axis(op.axis, kept.len())?;
        kept[axis] = 1;
        let norm = self.norm(x, Kind::Reduce(ReduceOp::Sum, vec![axis]), op.p, &kept)?;
        // A norm of NaN is not 0, so the results are NaN.
        let is_zero = less(input(1), number(1.0)).and(not(less(number(0.0), input(1))));
        let value = choose_if(is_zero, number(0.0), Expr::binary(BinaryOp::Div, input(0), input(1)));
        self.push(Kind::Map(value), &[x, norm], to);
        Ok(())
    }

    /// Sums along dimensions, which are kept with size 1; also returns the shape and the number of terms of
    /// each sum.
    pub(super) fn sums(&mut self, x: ValueId, axes: &[usize]) -> (ValueId, Vec<i64>, f64) {
        let mut kept = self.net.shape(x).to_vec();
        let n: i64 = axes.iter().map(|&axis| kept[axis]).product();
        axes.iter().for_each(|&axis| kept[axis] = 1);
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, axes.to_vec()), &[x], &kept);
        (sum, kept, n as f64)
    }

    /// Computes means and variances along dimensions, and the deviations of elements from their means.
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

    /// Normalises to mean 0 and variance 1 along dimensions.
    pub(super) fn mean_variance(&mut self, op: &MeanVarianceNormalization) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_real(x)?;
        let rank = self.shape(0)?.len();
        let axes = op.axes.iter().map(|&at| axis(at, rank)).collect::<Result<Vec<_>, _>>()?;
        let [_, variance, apart] = self.moments(x, &axes);
        let deviation = add(of(UnaryOp::Sqrt, input(1)), number(1e-9));
        self.push(Kind::Map(Expr::binary(BinaryOp::Div, input(0), deviation)), &[apart, variance], to);
        Ok(())
    }

    /// Computes the optional outputs of a layer normalization: means and inverse standard deviations.
    fn layer_statistics(&mut self, op: &LayerNormalization) -> Lowered {
        let x = self.input(0)?;
        let outputs = [1, 2].map(|at| self.try_output(at));
        if outputs == [None; 2] {
            return Ok(());
        }
        let rank = self.shape(0)?.len();
        let axes: Vec<usize> = (axis(op.axis, rank)?..rank).collect();
        let [mean, variance, _] = self.moments(x, &axes);
        let inverse = div(number(1.0), of(UnaryOp::Sqrt, add(input(0), number(op.epsilon))));
        for ((from, value), to) in [(mean, input(0)), (variance, inverse)].into_iter().zip(outputs) {
            if let Some(to) = to {
                self.push(Kind::Map(value), &[from], to);
            }
        }
        Ok(())
    }

    /// Normalises channels by statistics that are inputs, or those of the batch.
    fn batch_normalization(&mut self, op: &BatchNormalization) -> Lowered {
        let (x, shape) = (self.input(0)?, self.shape(0)?);
        self.need_real(x)?;
        need(shape.len() >= 2, || self.no_code_of_rank(x, "batches of channels"))?;
        let channels = [&[shape[1]], &vec![1; shape.len() - 2][..]].concat();
        let mut given = Vec::new();
        for at in 1..5 {
            let id = self.input(at)?;
            self.need_real(id)?;
            given.push(self.viewed("statistics", id, &channels));
        }
        if let Some(momentum) = op.training_momentum {
            let axes: Vec<usize> = (0..shape.len()).filter(|&d| d != 1).collect();
            let [mean, variance, _] = self.moments(x, &axes);
            for (slot, new) in [(2, mean), (3, variance)] {
                let new = self.viewed("own", new, &channels);
                if let Some(to) = self.try_output(slot - 1) {
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
        Ok(())
    }

    /// Lowers a batch normalization: known statistics become one factor and one term by channel.
    pub(super) fn batch_norm(&mut self, op: &BatchNormalization) -> Lowered {
        let known = |at: usize| self.net.numbers(self.try_input(at)?);
        let (Some(scale), Some(offset), Some(mean), Some(variance), None) =
            (known(1), known(2), known(3), known(4), op.training_momentum)
        else {
            return self.batch_normalization(op);
        };
        let n = scale.len();
        let factor = |c: usize| f64::from(scale[c]) / (f64::from(variance[c]) + op.epsilon).sqrt();
        let term = |c: usize| (f64::from(offset[c]) - f64::from(mean[c]) * factor(c)) as f32;
        let (factor, term): (Vec<f32>, Vec<f32>) = (0..n).map(|c| (factor(c) as f32, term(c))).unzip();
        let (x, to) = (self.input(0)?, self.output()?);
        let rank = self.net.shape(x).len();
        need(rank > 1, || self.no_code_of_rank(x, "batches of channels"))?;
        let shape = [&[n as i64], &vec![1; rank - 2][..]].concat();
        self.need_f32(x)?;
        let (factor, term) = (self.constant("factor", &shape, &factor), self.constant("term", &shape, &term));
        self.push(Kind::Map(add(mul(input(0), input(1)), input(2))), &[x, factor, term], to);
        Ok(())
    }

    /// Lowers mean 0 and variance 1 along the last dimensions.
    pub(super) fn layer_norm(&mut self, op: &LayerNormalization) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_real(x)?;
        self.layer_statistics(op)?;
        let rank = self.shape(0)?.len();
        let axis = axis(op.axis, rank)?;
        let normal = self.normalised(x, (axis..rank).collect(), op.epsilon)?;
        self.scaled(normal, self.try_input(1), self.try_input(2), to)
    }

    /// Lowers mean 0 and variance 1 of each channel of each image.
    pub(super) fn instance_norm(&mut self, op: &InstanceNormalization) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        let n_channels = self.shape(0)?[1];
        let x = self.apart_from_channels(x).unwrap_or(x);
        let shape = self.net.shape(x).to_vec();
        let normal = self.normalised(x, (2..shape.len()).collect(), op.epsilon)?;
        let mut channels = vec![1; shape.len() - 1];
        channels[0] = n_channels;
        let (scale, offset) = (self.input(1)?, self.input(2)?);
        let scale = self.step("scale", Kind::View, &[scale], &channels);
        let offset = self.step("offset", Kind::View, &[offset], &channels);
        if self.net.shape(to) == shape {
            return self.scaled(normal, Some(scale), Some(offset), to);
        }
        let scaled = self.value("scaled", self.net.value(x).dtype, &shape);
        self.scaled(normal, Some(scale), Some(offset), scaled)?;
        self.push(Kind::View, &[scaled], to);
        Ok(())
    }

    /// Groups of channels of images `[n, groups, channels, rows, columns]`, where a view joins channels with
    /// rows and columns, of which one may be open.
    fn apart_from_channels(&mut self, x: ValueId) -> Option<ValueId> {
        self.net.open_size?;
        let [n, groups, _] = *self.net.shape(x) else { return None };
        let view = self.net.nodes.iter().rfind(|node| node.outputs == [x] && matches!(node.kind, Kind::View))?;
        let images = view.input(0);
        let shape = match self.net.shape(images) {
            [batch, c, image @ ..] if *batch == n && c % groups == 0 && !image.is_empty() => {
                [&[n, groups, c / groups], image].concat()
            }
            _ => return None,
        };
        Some(self.step("groups", Kind::View, &[images], &shape))
    }

    /// Lowers a division by the root of the mean square along the last dimensions.
    pub(super) fn rms_norm(&mut self, op: &RmsNormalization) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_real(x)?;
        let shape = self.shape(0)?;
        let rank = shape.len();
        let axis = axis(op.axis, rank)?;
        let mut kept = shape.clone();
        kept[axis..].fill(1);
        let n: i64 = shape[axis..].iter().product();
        let square = self.step("square", Kind::Map(mul(input(0), input(0))), &[x], &shape);
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, (axis..rank).collect()), &[square], &kept);
        let root = add(mul(input(1), number(1.0 / n as f64)), number(op.epsilon));
        let value = mul(input(0), div(number(1.0), of(UnaryOp::Sqrt, root)));
        match self.try_input(1) {
            None => self.push(Kind::Map(value), &[x, sum], to),
            Some(scale) => self.push(Kind::Map(mul(value, input(2))), &[x, sum, scale], to),
        };
        Ok(())
    }

    /// Lowers a division by a power of the squares of neighbouring channels.
    pub(super) fn lrn(&mut self, op: &Lrn) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_real(x)?;
        let shape = self.shape(0)?;
        let ones = vec![1; shape.len()];
        let (mut kernel, mut before) = (ones.clone(), vec![0; shape.len()]);
        kernel[1] = op.size as i64;
        before[1] = (op.size as i64 - 1) / 2;
        let windows = Windows { kernel, strides: ones.clone(), dilations: ones, before };
        let square = self.step("square", Kind::Map(mul(input(0), input(0))), &[x], &shape);
        let sum = self.step("sum", Kind::Window(ReduceOp::Sum, windows), &[square], &shape);
        let energy = add(mul(input(1), number(op.alpha / op.size as f64)), number(op.bias));
        let power = of(UnaryOp::Exp, mul(of(UnaryOp::Log, energy), number(-op.beta)));
        self.push(Kind::Map(mul(input(0), power)), &[x, sum], to);
        Ok(())
    }
}
