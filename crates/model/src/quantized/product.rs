//! Import of products of 8-bit integers with a constant operand, whose accumulators are converted in the
//! epilogue.

use tilewright_graph::op::{Binary, Cast, Conv};
use tilewright_graph::{DType, Node as GraphNode, Op, Tensor, ValueId as GraphValueId};

use crate::import::{NodeImport, window_of};
use crate::net::{Kind, Net, ValueId};
use crate::scalar::{input, mul, sub};

impl NodeImport<'_> {
    fn net_value(&self, id: GraphValueId) -> ValueId {
        ValueId(id.0 as usize)
    }

    /// Node that computes a value with a single reader.
    fn producer_for_one(&self, id: GraphValueId) -> Option<&GraphNode> {
        let graph = self.graph();
        let value = graph.value(id);
        (value.users.len() == 1 && !graph.outputs.contains(&id)).then_some(())?;
        Some(graph.node(value.producer?.0))
    }

    /// Lowers an integer product that is used as 32-bit integers.
    pub(crate) fn integer_product(&mut self) -> Option<()> {
        let (node, to) = (self.node, self.try_output(0)?);
        self.dots.then_some(())?;
        let inputs = self.factors_of(node, None)?;
        self.push_product(inputs, to)
    }

    /// Lowers an integer product, possibly with an integer bias, that is converted to f32 and scaled as a
    /// whole or per column.
    pub(crate) fn scaled_integer_product(&mut self) -> Option<()> {
        let (node, to) = (self.node, self.try_output(0)?);
        (self.dots && matches!(node.op, Op::Binary(Binary::Mul)) && self.is_f32(to)).then_some(())?;
        let [a, b] = [node.inputs[0]?, node.inputs[1]?];
        let cast = |id: GraphValueId| {
            let cast = self.producer_for_one(id)?;
            (matches!(cast.op, Op::Cast(Cast { to: Some(DType::F32) }))).then_some(cast.inputs[0]?)
        };
        let (whole, scale) = cast(a).map(|x| (x, b)).or_else(|| Some((cast(b)?, a)))?;
        let mut product = self.producer_for_one(whole)?;
        let mut bias = None;
        if matches!(product.op, Op::Binary(Binary::Add)) {
            let [x, y] = [product.inputs[0]?, product.inputs[1]?];
            let (x, y) = if self.graph().value(y).constant.is_some() { (x, y) } else { (y, x) };
            bias = Some(self.graph().value(y).constant.clone()?);
            product = self.producer_for_one(x)?;
        }
        let product = product.clone();
        let out = self.net.shape(to).to_vec();
        let whole = self.net_value(product.outputs[0]?);
        (self.net.shape(whole) == out).then_some(())?;
        let scale = self.net_value(scale);
        let channel = match &product.op {
            Op::MatMulInteger(_) => out.len().checked_sub(1)?,
            Op::ConvInteger(_) => 1,
            _ => return None,
        };
        let n = out[channel];
        let shape = self.net.shape(scale).to_vec();
        let by_channel = shape.iter().rev().eq(out
            .iter()
            .enumerate()
            .rev()
            .take(shape.len())
            .map(|(d, n)| if d == channel { n } else { &1 }));
        let has_all = by_channel && self.net.value(scale).n_elements() == n;
        (self.is_f32(scale) && (has_all || self.net.value(scale).n_elements() == 1)).then_some(())?;
        if let Op::ConvInteger(conv) = &product.op {
            let mut inputs = self.filters_of(&product, bias.as_ref())?;
            inputs.push(self.by_column("factors", scale, n));
            return self.push_convolution(&conv.0, inputs, to);
        }
        let mut inputs = self.factors_of(&product, bias.as_ref())?;
        inputs.push(self.by_column("factors", scale, n));
        self.push_product(inputs, to)
    }

    /// Lowers an integer convolution that is used as 32-bit integers.
    pub(crate) fn integer_convolution(&mut self, conv: &Conv) -> Option<()> {
        let (node, to) = (self.node, self.try_output(0)?);
        self.dots.then_some(())?;
        let inputs = self.filters_of(node, None)?;
        self.push_convolution(conv, inputs, to)
    }

    /// Image and filters of an integer convolution, the zero point that the image is padded with, and the
    /// terms added to the sums of each channel.
    fn filters_of(&mut self, node: &GraphNode, bias: Option<&Tensor>) -> Option<Vec<ValueId>> {
        let [x, w] = [0, 1].map(|at| node.inputs[at].map(|id| self.net_value(id)));
        let (x, w) = (x?, w?);
        let weights = self.net.value(w).constant.clone().filter(|tensor| tensor.dtype() == DType::I8)?;
        let dtype = self.net.value(x).dtype;
        let zero = node.inputs.get(2).copied().flatten().map(|id| self.net_value(id));
        zero.is_none_or(|id| self.net.value(id).n_elements() == 1).then_some(())?;
        let is_byte = matches!(dtype, DType::U8 | DType::I8);
        (is_byte && node.inputs.get(3).copied().flatten().is_none() && weights.shape().len() == 4).then_some(())?;
        let n = weights.shape()[0];
        let bias = bias.map_or(vec![0; n], Tensor::i64s);
        (bias.len() == n).then_some(())?;
        let sum = |filter: &[u8]| filter.iter().map(|w| i64::from(*w as i8)).sum::<i64>();
        let sums: Vec<i64> = weights.bytes().chunks(weights.n_elements() / n).map(sum).collect();
        let mut inputs = vec![x, w];
        inputs.extend(zero.filter(|id| !self.is_zero(*id)).map(|id| self.viewed("padding", id, &[1])));
        inputs.extend(self.terms(zero, &bias, &sums, &[n as i64, 1, 1]));
        Some(inputs)
    }

    /// Whether a value is known to be 0.
    fn is_zero(&self, id: ValueId) -> bool {
        self.net.value(id).constant.as_ref().is_some_and(|tensor| tensor.i64s().iter().all(|&x| x == 0))
    }

    /// Terms added to the sums of each column or channel: the bias minus operand A's zero point times the sum
    /// of operand B's elements; `None` if all are 0.
    fn terms(&mut self, zero: Option<ValueId>, bias: &[i64], sums: &[i64], shape: &[i64]) -> Option<ValueId> {
        let known = zero.map(|id| self.net.value(id).constant.as_ref().map(|tensor| tensor.i64s()[0]));
        if let Some(zero) = known.unwrap_or(Some(0)) {
            // Sums wrap around, as in kernels.
            let terms: Vec<i64> =
                bias.iter().zip(sums).map(|(bias, sum)| i64::from((bias - zero * sum) as i32)).collect();
            let is_any = terms.iter().any(|&x| x != 0);
            return is_any.then(|| self.whole_constant("terms", DType::I32, shape, &terms));
        }
        let sums = self.whole_constant("sums", DType::I32, shape, sums);
        let bias = self.whole_constant("bias", DType::I32, shape, bias);
        let zero = self.viewed("zero", zero?, &[1]);
        let terms = self.value("terms", DType::I32, shape);
        let value = sub(input(0), mul(input(1), input(2)));
        Some(self.push(Kind::Map(value), &[bias, sums, zero], terms))
    }

    fn push_convolution(&mut self, conv: &Conv, mut inputs: Vec<ValueId>, to: ValueId) -> Option<()> {
        let shape = |id: ValueId| self.net.shape(id).iter().map(|&d| d as usize).collect::<Vec<_>>();
        let found = conv.shape(&shape(inputs[0]), &shape(inputs[1])).ok()?;
        let window = window_of(&found, false)?;
        let is_padded = [window.before, window.after].concat().iter().any(|&n| n > 0);
        let is_byte = |net: &Net, id: ValueId| matches!(net.value(id).dtype, DType::U8 | DType::I8);
        let (mut at, net) = (0, &*self.net);
        inputs.retain(|id| {
            at += 1;
            at <= 2 || is_padded || !is_byte(net, *id)
        });
        self.push(Kind::Conv(window), &inputs, to);
        Some(())
    }

    /// Expands a single number to all columns; one number per column stays as it is.
    fn by_column(&mut self, what: &str, id: ValueId, n: i64) -> ValueId {
        let value = self.net.value(id);
        if let Some(numbers) = self.net.numbers(id) {
            let one = numbers.len() == 1;
            let all: Vec<f32> = (0..n as usize).map(|at| numbers[if one { 0 } else { at }]).collect();
            return self.constant(what, &[n], &all);
        }
        match value.n_elements() == n {
            true => self.viewed(what, id, &[n]),
            false => {
                let single = self.viewed(what, id, &[1]);
                self.step(what, Kind::Map(input(0)), &[single], &[n])
            }
        }
    }

    /// Operands of an integer product as matrices, with the terms added to the sums of each column: the bias
    /// minus operand A's zero point times the column sums of operand B.
    fn factors_of(&mut self, node: &GraphNode, bias: Option<&Tensor>) -> Option<Vec<ValueId>> {
        let [a, b] = [0, 1].map(|at| node.inputs[at].map(|id| self.net_value(id)));
        let (a, b) = (a?, b?);
        let zero = |at: usize| node.inputs.get(at).copied().flatten().map(|id| self.net_value(id));
        let is_byte = matches!(self.net.value(a).dtype, DType::U8 | DType::I8);
        let weights = self.net.value(b).constant.clone().filter(|tensor| tensor.dtype() == DType::I8)?;
        let (&[k, n], shape) = (self.net.shape(b), self.net.shape(a).to_vec()) else { return None };
        let m = shape.split_last().filter(|(last, _)| **last == k)?.1.iter().product::<i64>();
        (is_byte && zero(3).is_none() && shape.len() >= 2 && [m, k, n].iter().all(|&size| size > 0)).then_some(())?;
        let bias = match bias {
            None => vec![0; n as usize],
            Some(bias) => {
                let numbers = bias.i64s();
                (bias.dtype() == DType::I32 && numbers.len() == n as usize).then_some(numbers)?
            }
        };
        let zero = zero(2);
        zero.is_none_or(|id| self.net.value(id).n_elements() == 1).then_some(())?;
        let mut sums = vec![0i64; n as usize];
        for row in weights.bytes().chunks(n as usize) {
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += i64::from(*x as i8));
        }
        let a = self.viewed("rows", a, &[m, k]);
        let mut inputs = vec![a, b];
        inputs.extend(self.terms(zero, &bias, &sums, &[n]));
        Some(inputs)
    }

    /// Adds a product of matrices, and a view of it in the shape of `to`.
    fn push_product(&mut self, inputs: Vec<ValueId>, to: ValueId) -> Option<()> {
        let matrix = [self.net.shape(inputs[0])[0], self.net.shape(inputs[1])[1]];
        let kind = Kind::Product { turned: false, heads: None };
        if *self.net.shape(to) == matrix {
            self.push(kind, &inputs, to);
            return Some(());
        }
        let product = self.value("product", self.net.value(to).dtype, &matrix);
        self.push(kind, &inputs, product);
        self.push(Kind::View, &[product], to);
        Some(())
    }
}
