//! Import of quantization, dequantization, and products of quantized tensors.

use tilewright_graph::op::{Binary, ConvShape, QLinearConv, QuantizeLinear, ReduceKind, Scaling, Unary};
use tilewright_graph::{DType, Float8, Graph, Op, Tensor, ValueId as GraphValueId};
use tilewright_ir::expr::{BinaryOp, ReduceOp, UnaryOp};
use tilewright_ir::{DType as ElementType, Expr};

use super::job::NodeImport;
use crate::net::{Kind, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{add, clip, input, max, min, mul, number, of, quantized, sub, where_less};

/// Dynamically quantized matrix, from [`NodeImport::levels_by_range`].
pub(super) struct Levels {
    /// Matrix of u8.
    levels: ValueId,
    scale: ValueId,
    zero: ValueId,
}

/// Constant operand `[k, n]` of products with levels.
#[derive(Clone, Copy)]
pub(super) struct IntegerFactor {
    /// Elements of i8.
    pub weights: ValueId,
    /// Correction of each column's sums per unit of the levels' zero point: the negative column sum, as i32.
    pub of_zero: ValueId,
    /// Scale of each column.
    pub scales: ValueId,
}

/// Bits of the significand of an f32, without the first one.
const F32_MANTISSA: i32 = 23;

/// Rounds a number within a format's range to its nearest one, ties to even. From the least exponent on, a
/// sum rounded to f32 does it: of the number and a multiple of it by a power of two, whose last bit is worth
/// a step of the format. Smaller numbers are multiples of the same step.
fn float8(format: Float8, x: &Expr) -> Expr {
    let power = |exponent: i32| number(2_f64.powi(exponent));
    let large = mul(x.clone(), power(F32_MANTISSA - format.mantissa));
    let rounded = sub(Expr::cast(ElementType::F32, add(large.clone(), x.clone())), large);
    let step = format.least_exponent - format.mantissa;
    let multiple = mul(of(UnaryOp::Round, mul(x.clone(), power(-step))), power(step));
    where_less(of(UnaryOp::Abs, x.clone()), power(format.least_exponent), multiple, rounded)
}

/// Maximum number of operators through which a value is followed to one that is not negative.
const MOST_DEPTH: usize = 8;

/// Whether no element of a value is below zero, by the operators that compute it; NaN is not below zero.
fn is_nonnegative(graph: &Graph, id: GraphValueId, depth: usize) -> bool {
    if let Some(constant) = &graph.value(id).constant {
        return !constant.floats().iter().any(|x| *x < 0.0);
    }
    let Some(producer) = graph.value(id).producer.filter(|_| depth > 0) else { return false };
    let node = graph.node(producer.0);
    let is_input =
        |at: usize| node.inputs.get(at).copied().flatten().is_some_and(|id| is_nonnegative(graph, id, depth - 1));
    match &node.op {
        Op::Unary(Unary::Relu | Unary::Abs | Unary::Exp | Unary::Sigmoid | Unary::HardSigmoid { .. }) => true,
        Op::Clip(clip) => clip.min.map_or_else(|| is_input(1), |min| min >= 0.0),
        Op::Binary(Binary::Add | Binary::Mul | Binary::Div) => is_input(0) && is_input(1),
        Op::Reduce(of) if matches!(of.kind, ReduceKind::LogSum | ReduceKind::LogSumExp) => false,
        Op::Unary(Unary::Identity | Unary::Sqrt) | Op::Pool(_) | Op::GlobalPool(_) | Op::Reduce(_) => is_input(0),
        Op::Reshape(_) | Op::Flatten(_) | Op::Squeeze(_) | Op::Unsqueeze(_) | Op::Transpose(_) => is_input(0),
        Op::Slice(_) => is_input(0),
        Op::Concat(_) => (0..node.inputs.len()).all(is_input),
        _ => false,
    }
}

impl NodeImport<'_> {
    /// Returns the scale or zero point of an input's elements, in a shape that broadcasts with it.
    fn scaling(&mut self, at: usize, op: Scaling) -> Lowered<ValueId> {
        let id = self.input(at)?;
        let shape = self.shape(0)?;
        let n = self.net.value(id).n_elements();
        // Constant scales and zero points become literals in expressions, where epilogues recognise them.
        if let Some(number) = self.net.uniform(id).filter(|_| self.is_f32(id) || self.is_whole(id)) {
            return Ok(self.constant("scaling", &[], &[number as f32]));
        }
        if op.block > 0 {
            let axis = op.dimension(shape.len())?;
            return self.scaling_of_blocks(id, &shape, axis, op.block as i64);
        }
        let mut along = vec![1; if n == 1 { 0 } else { shape.len() - op.dimension(shape.len())? }];
        along.first_mut().into_iter().for_each(|first| *first = n);
        Ok(self.step("scaling", Kind::View, &[id], &along))
    }

    /// Repeats the scales or zero points of blocks along a dimension for each element of a block.
    fn scaling_of_blocks(&mut self, id: ValueId, shape: &[i64], axis: usize, block: i64) -> Lowered<ValueId> {
        self.need_code(id)?;
        let n_blocks = self.net.shape(id)[axis];
        let around = |along: &[i64]| [&shape[..axis], along, &shape[axis + 1..]].concat();
        let single = self.step("single", Kind::View, &[id], &around(&[n_blocks, 1]));
        let blocks = self.repeated("blocks", single, &around(&[n_blocks, block]));
        let all = self.step("scaling", Kind::View, &[blocks], &around(&[n_blocks * block]));
        if self.net.shape(all) == shape {
            return Ok(all);
        }
        Ok(self.step("scaling", Kind::Slice(vec![(0, 1); shape.len()]), &[all], shape))
    }

    /// Returns scale and zero point, both in f32.
    fn scale_and_zero(&mut self, op: Scaling) -> Lowered<[ValueId; 2]> {
        let scale = self.scaling(1, op)?;
        let zero = match self.try_input(2) {
            Some(_) => {
                let zero = self.scaling(2, op)?;
                self.single(zero)?
            }
            None => self.constant("zero", &[], &[0.0]),
        };
        self.need_f32(scale)?;
        Ok([scale, zero])
    }

    /// Quantizes numbers to multiples of a scale, still in f32.
    pub(crate) fn quantized(&mut self, op: Scaling, dtype: DType, x: ValueId) -> Lowered<ValueId> {
        let [scale, zero] = self.scale_and_zero(op)?;
        self.need_f32(x)?;
        if let Some(format) = Float8::of(dtype) {
            let shape = self.net.shape(x).to_vec();
            let by = self.net.literal(scale).unwrap_or(input(1));
            let quotient = Expr::binary(BinaryOp::Div, input(0), by);
            let quotient = self.step("quotient", Kind::Map(quotient), &[x, scale], &shape);
            return Ok(self.rounded_to(format, quotient));
        }
        let (least, most) = dtype.integer_range();
        need(most - least < 1 << 17, || NoCode::Form("integers of more than 16 bits with a scale"))?;
        let [by, plus] = [(scale, 1), (zero, 2)].map(|(id, at)| self.net.literal(id).unwrap_or(input(at)));
        let multiple = of(UnaryOp::Round, Expr::binary(BinaryOp::Div, input(0), by));
        let value = quantized(add(multiple, plus), least as f64, most as f64);
        let shape = self.net.shape(x).to_vec();
        Ok(self.step("multiple", Kind::Map(value), &[x, scale, zero], &shape))
    }

    /// Rounds f32 to the nearest number of a format of 8 bits, as f32.
    pub(super) fn rounded_to(&mut self, format: Float8, x: ValueId) -> ValueId {
        let shape = self.net.shape(x).to_vec();
        let within = self.step("within", Kind::Map(clip(input(0), -format.most, format.most)), &[x], &shape);
        self.step("rounded", Kind::Map(float8(format, &input(0))), &[within], &shape)
    }

    /// Element type of the node's first output in the model.
    pub(super) fn output_type(&self) -> DType {
        let id = self.node.outputs[0].expect("a node that is lowered has an output");
        self.graph().ty(id).dtype
    }

    /// Lowers a quantization.
    pub(crate) fn quantize(&mut self, op: QuantizeLinear) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_code(to)?;
        let x = if self.is_whole(x) { self.single(x)? } else { x };
        let multiple = self.quantized(op.0, self.output_type(), x)?;
        self.push(Kind::Map(input(0)), &[multiple], to);
        Ok(())
    }

    /// Lowers a dequantization.
    pub(crate) fn dequantize(&mut self, op: Scaling) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_f32(to)?;
        let [scale, zero] = self.scale_and_zero(op)?;
        let x = self.single(x)?;
        let [by, less] = [(scale, 1), (zero, 2)].map(|(id, at)| self.net.literal(id).unwrap_or(input(at)));
        self.push(Kind::Map(mul(sub(input(0), less), by)), &[x, scale, zero], to);
        Ok(())
    }

    /// Quantizes numbers by a scale and zero point from their range; returns levels, scale and zero point,
    /// all in f32. The zero point of numbers that are not negative is a constant.
    fn by_range(&mut self, x: ValueId, may_be_negative: bool) -> Lowered<[ValueId; 3]> {
        let shape = self.net.shape(x).to_vec();
        self.need_f32(x)?;
        let (flat, one) = ([shape.iter().product::<i64>()], [1]);
        let list = self.step("list", Kind::View, &[x], &flat);
        let low = match may_be_negative {
            true => self.step("extreme", Kind::Reduce(ReduceOp::Min, vec![0]), &[list], &one),
            false => self.constant("least", &one, &[0.0]),
        };
        let high = self.step("extreme", Kind::Reduce(ReduceOp::Max, vec![0]), &[list], &one);
        let width = sub(max(input(1), number(0.0)), min(input(0), number(0.0)));
        let width = Expr::binary(BinaryOp::Div, width, number(255.0));
        // A NaN scale stays NaN, so that all results are NaN.
        let scale = where_less(number(0.0), width.clone(), width.clone(), add(width, number(1.0)));
        let scale = self.step("scale", Kind::Map(scale), &[low, high], &one);
        let zero = match may_be_negative {
            true => {
                let zero = Expr::binary(BinaryOp::Div, of(UnaryOp::Neg, min(input(0), number(0.0))), input(1));
                self.step("zero", Kind::Map(clip(of(UnaryOp::Round, zero), 0.0, 255.0)), &[low, scale], &one)
            }
            false => self.constant("zero", &[], &[0.0]),
        };
        let multiple = of(UnaryOp::Round, Expr::binary(BinaryOp::Div, input(0), input(1)));
        let plus = self.net.literal(zero).unwrap_or(input(2));
        let value = quantized(add(multiple, plus), 0.0, 255.0);
        let multiple = self.step("multiple", Kind::Map(value), &[x, scale, zero], &shape);
        Ok([multiple, scale, zero])
    }

    /// Rounds numbers to the 256 levels of their range.
    pub(super) fn rounded_by_range(&mut self, x: ValueId) -> Lowered<ValueId> {
        let levels = self.by_range(x, true)?;
        let shape = self.net.shape(x).to_vec();
        Ok(self.step("rounded", Kind::Map(mul(sub(input(0), input(2)), input(1))), &levels, &shape))
    }

    /// Quantizes a matrix to the levels of its range.
    pub(super) fn levels_by_range(&mut self, x: ValueId) -> Lowered<Levels> {
        let [multiple, scale, whole] = self.by_range(x, true)?;
        let shape = self.net.shape(x).to_vec();
        let [levels, zero] =
            [("levels", &shape[..]), ("zero", &[1])].map(|(what, shape)| self.value(what, DType::U8, shape));
        self.push(Kind::Map(input(0)), &[multiple], levels);
        self.push(Kind::Map(input(0)), &[whole], zero);
        Ok(Levels { levels, scale, zero })
    }

    /// Multiplies a dynamically quantized matrix by a constant integer operand.
    pub(super) fn product_of_levels(&mut self, what: &str, x: &Levels, factor: IntegerFactor) -> ValueId {
        let [m, n] = [self.net.shape(x.levels)[0], self.net.shape(factor.weights)[1]];
        let both = || Kind::Map(mul(input(0), input(1)));
        let terms = self.step("terms", both(), &[factor.of_zero, x.zero], &[n]);
        let factors = self.step("factors", both(), &[factor.scales, x.scale], &[n]);
        let product = self.value(what, DType::F32, &[m, n]);
        let kind = Kind::Product { turned: false, heads: None };
        self.push(kind, &[x.levels, factor.weights, terms, factors], product)
    }

    /// Lowers a dynamic quantization to `u8`, by a scale and zero point from the numbers' range.
    pub(super) fn quantize_by_range(&mut self) -> Lowered {
        let x = self.input(0)?;
        let outputs = self.outputs.clone();
        let may_be_negative = !self.node.inputs[0].is_some_and(|id| is_nonnegative(self.graph, id, MOST_DEPTH));
        for (from, to) in self.by_range(x, may_be_negative)?.into_iter().zip(outputs) {
            let Some(to) = to else { continue };
            if self.net.literal(from).is_some() && !self.net.outputs.contains(&to) {
                self.net.values[to.0].constant = Some(Tensor::scalar(DType::U8, 0.0));
                continue;
            }
            let from = match self.net.shape(from) == self.net.shape(to) {
                true => from,
                false => self.step("number", Kind::View, &[from], &[]),
            };
            self.push(Kind::Map(input(0)), &[from], to);
        }
        Ok(())
    }

    /// Lowers a product of quantized matrices whose readers all convert it to f32: the sums are computed in
    /// f32, as exactly as the readers would keep them.
    pub(super) fn quantized_product(&mut self) -> Lowered {
        let (a, b, to) = (self.input(0)?, self.input(1)?, self.output()?);
        need(self.is_read_as_single(), || NoCode::Form("sums that are read as integers"))?;
        let mut factors = [a, b];
        for (slot, id) in [a, b].into_iter().enumerate() {
            // Constants stay constant.
            if let Some(numbers) = self.centred_constant(id, slot) {
                let shape = self.net.shape(id).to_vec();
                factors[slot] = self.constant("weights", &shape, &numbers);
                continue;
            }
            let single = self.single(id)?;
            factors[slot] = match self.try_input(2 + slot) {
                None => single,
                Some(zero) if self.net.value(zero).n_elements() == 1 => {
                    let zero = self.single(zero)?;
                    let zero = self.step("zero", Kind::View, &[zero], &[]);
                    let shape = self.net.shape(id).to_vec();
                    self.step("centred", Kind::Map(sub(input(0), input(1))), &[single, zero], &shape)
                }
                Some(_) => return Err(NoCode::Form("computed zero points of rows or columns")),
            };
        }
        let shape = self.net.shape(to).to_vec();
        let sums = self.value("sums", DType::F32, &shape);
        self.product_of(factors[0], factors[1], sums)?;
        self.push(Kind::Map(input(0)), &[sums], to);
        Ok(())
    }

    /// Returns the elements of a constant operand minus its constant zero point, or zero points per column of
    /// operand B.
    fn centred_constant(&self, id: ValueId, slot: usize) -> Option<Vec<f32>> {
        let numbers = self.net.value(id).constant.as_ref()?.floats();
        let zeros = match self.try_input(2 + slot) {
            None => vec![0.0],
            Some(zero) => self.net.value(zero).constant.as_ref()?.floats(),
        };
        let are_of_columns = slot == 1 && self.net.shape(id).last() == Some(&(zeros.len() as i64));
        if zeros.len() != 1 && !are_of_columns {
            return None;
        }
        Some(numbers.into_iter().zip(zeros.iter().cycle()).map(|(x, zero)| (x - zero) as f32).collect())
    }

    /// Whether all readers of the node's output convert it to f32.
    fn is_read_as_single(&self) -> bool {
        let Some(output) = self.node.outputs.first().copied().flatten() else { return false };
        let graph = self.graph();
        let is_cast = |user: &tilewright_graph::NodeId| {
            let node = graph.node(*user);
            let is_single = node.outputs[0].is_some_and(|id| graph.ty(id).dtype == DType::F32);
            matches!(node.op, Op::Cast(_)) && is_single
        };
        !graph.outputs.contains(&output) && graph.value(output).users.iter().all(is_cast)
    }

    /// Subtracts the zero point from 8-bit integers: a single one, or one for each position of the dimension
    /// that `n_behind` dimensions follow.
    pub(super) fn less_zero(&mut self, x: ValueId, zero: Option<ValueId>, n_behind: usize) -> Lowered<ValueId> {
        self.need_integers(x)?;
        let shape = self.net.shape(x).to_vec();
        let to = self.value("centred", DType::I32, &shape);
        let Some(zero) = zero else { return Ok(self.push(Kind::Map(input(0)), &[x], to)) };
        let n = self.net.value(zero).n_elements();
        let zero = match self.net.shape(zero).len() {
            _ if n == 1 => self.viewed("zero", zero, &[]),
            1 => self.viewed("zero", zero, &[&[n], &vec![1; n_behind][..]].concat()),
            _ => zero,
        };
        Ok(self.push(Kind::Map(Expr::binary(BinaryOp::Sub, input(0), input(1))), &[x, zero], to))
    }

    /// Rescales sums and converts them to 8-bit integers. Operands may have a scale for each position of a
    /// dimension; `n_behind` gives the number of dimensions after it, for each operand. Intermediate numbers
    /// are f64, so that sums are exact.
    fn requantized(&mut self, x: ValueId, n_behind: [usize; 2]) -> Lowered {
        let to = self.output()?;
        let shape = self.net.shape(x).to_vec();
        let mut inputs = vec![x];
        for (at, behind) in [(1, n_behind[0]), (4, n_behind[1]), (6, 0), (7, 0)] {
            let id = self.input(at)?;
            self.need_code(id)?;
            let n = self.net.value(id).n_elements();
            let along = if n == 1 { Vec::new() } else { [&[n], &vec![1; behind][..]].concat() };
            inputs.push(self.viewed("scale", id, &along));
        }
        let (least, most) = self.net.value(to).dtype.integer_range();
        let factor = Expr::binary(BinaryOp::Div, mul(input(1), input(2)), input(3));
        let scaled = self.value("scaled", DType::F64, &shape);
        let value = add(of(UnaryOp::Round, mul(input(0), factor)), input(4));
        self.push(Kind::Map(clip(value, least as f64, most as f64)), &inputs, scaled);
        let bytes = self.value("bytes", self.net.value(to).dtype, &shape);
        self.push(Kind::Map(input(0)), &[scaled], bytes);
        self.push(Kind::View, &[bytes], to);
        Ok(())
    }

    /// Lowers a product of quantized matrices.
    pub(super) fn quantized_matrices(&mut self) -> Lowered {
        let (a, b) = (self.input(0)?, self.input(3)?);
        let (a, b) = (self.less_zero(a, self.try_input(2), 1)?, self.less_zero(b, self.try_input(5), 0)?);
        let product = self.product_by_sums(a, b)?;
        self.requantized(product, [1, 0])
    }

    /// Lowers a convolution of quantized images.
    fn quantized_convolution(&mut self, found: &ConvShape) -> Lowered {
        let (x, w, to) = (self.input(0)?, self.input(3)?, self.output()?);
        let rank = self.net.shape(to).len();
        let (x, w) = (self.less_zero(x, self.try_input(2), 0)?, self.less_zero(w, self.try_input(5), rank - 1)?);
        let product = self.convolved(found, x, w)?;
        let out = self.net.shape(to).to_vec();
        let sum = self.value("biased", DType::I32, &out);
        self.biased(product, 8, sum)?;
        self.requantized(sum, [0, rank - 2])
    }

    /// Lowers a convolution of quantized tensors.
    pub(super) fn qlinear_conv(&mut self, op: &QLinearConv) -> Lowered {
        let found = op.0.shape(self.graph_shape(0)?, self.graph_shape(3)?)?;
        self.quantized_convolution(&found)
    }
}
