//! Rewriting of quantized graphs to integer operators where possible.

use std::borrow::Cow;
use std::collections::HashMap;

use tilewright_graph::op::{
    Binary, Cast, Conv, DequantizeLinear, Fact, Gather, Gemm, Inputs, MatMul, PoolKind, QuantizeLinear, Scaling, Unary,
};
use tilewright_graph::{DType, Graph, Node, Op, Place, Tensor, TensorType, Value, ValueId};
use tilewright_ir::Target;

mod blocks;
mod factors;
mod forms;
mod phases;
mod sinking;

use factors::Integers;
use sinking::with_sunk_quantization;

/// Rewrites a specialised graph whose `DequantizeLinear` nodes read constants.
///
/// Unless the target multiplies 8-bit integers faster than f32, these constants become floating-point
/// numbers, and nothing else changes. Otherwise products and convolutions whose operands are such integers
/// with a scale become integer operators, i8 activations become u8, and operators that move or select
/// elements do so with integers.
pub fn in_bytes<'a>(graph: &'a Graph, target: &Target) -> Cow<'a, Graph> {
    let is_quantized = |op: &Op| {
        matches!(op, Op::DequantizeLinear(_) | Op::QuantizeLinear(_) | Op::MatMulInteger(_) | Op::ConvInteger(_))
            || matches!(op, Op::QLinearMatMul(_) | Op::QLinearConv(_))
    };
    if !graph.nodes().any(|(_, node)| is_quantized(&node.op)) {
        return Cow::Borrowed(graph);
    }
    let dots = has_dots(target);
    let sunk = if dots { with_sunk_quantization(graph, target) } else { Cow::Borrowed(graph) };
    let (graph, n) = (&*sunk, sunk.values().len());
    let mut job = Quantizer {
        old: graph,
        new: Graph::default(),
        plain: vec![None; n],
        bytes: vec![None; n],
        is_shifted: vec![false; n],
        target,
        dots,
        tables: HashMap::new(),
    };
    job.new.name.clone_from(&graph.name);
    (job.new.open_size, job.new.second_size) = (graph.open_size, graph.second_size);
    for &id in &graph.inputs {
        let new = job.plain(id);
        job.new.inputs.push(new);
    }
    for (_, node) in graph.nodes() {
        job.node(node);
    }
    for &id in &graph.outputs {
        let new = job.plain(id);
        job.new.outputs.push(new);
    }
    Cow::Owned(job.new)
}

/// Integers that represent numbers: each minus a zero point, times a scale.
#[derive(Clone)]
struct QuantizedValue {
    /// The integers, in the new graph.
    id: ValueId,
    scale: Tensor,
    /// Zero point, of the type of the integers; `None` if it is 0.
    zero: Option<Tensor>,
    /// Dimension of the scales, if there are several.
    axis: usize,
    /// Operator that converts the integers to numbers, and its place.
    op: Op,
    place: Place,
}

impl QuantizedValue {
    fn is_of_tensor(&self) -> bool {
        self.scale.n_elements() == 1
    }

    /// Scales of the channels of an operator's result. If `n_results` is given, each channel of these
    /// integers contributes only to that many channels of the result.
    fn scales_of_channels(&self, n: usize, n_results: Option<usize>) -> Option<Vec<f32>> {
        if self.is_of_tensor() {
            return Some(vec![self.scales()[0]; n]);
        }
        let n_results = n_results.filter(|_| self.axis == 1)?;
        let each = self.scales().into_iter().flat_map(|scale| std::iter::repeat_n(scale, n_results));
        Some(each.collect::<Vec<f32>>()).filter(|all| all.len() == n)
    }

    /// Zero point as a tensor of one element; `None` if there are several.
    fn only_zero(&self) -> Option<Tensor> {
        let zero = self.zero.as_ref().map(|zero| (zero.dtype(), zero.integers()));
        let (dtype, zeros) = zero.unwrap_or((DType::U8, vec![0]));
        zeros.iter().all(|zero| *zero == zeros[0]).then(|| Tensor::from_integers(dtype, Vec::new(), &zeros[..1]))
    }

    /// Whether there is a single scale and zero point.
    fn is_single(&self) -> bool {
        self.is_of_tensor() && self.zeros().len() == 1
    }

    /// Zero points as integers: a single one, or as many as there are scales.
    fn zeros(&self) -> Vec<i64> {
        self.zero.as_ref().map_or(vec![0], Tensor::i64s)
    }

    fn scales(&self) -> Vec<f32> {
        self.scale.floats().into_iter().map(|x| x as f32).collect()
    }

    /// Whether integers represent the same numbers as equal integers of another tensor.
    fn is_like(&self, other: &QuantizedValue) -> bool {
        let zeros = |of: &QuantizedValue| {
            let zeros = of.zeros();
            if zeros.iter().all(|zero| *zero == zeros[0]) { vec![zeros[0]] } else { zeros }
        };
        self.scale.bytes() == other.scale.bytes()
            && self.scales().iter().all(|scale| scale.is_normal() && *scale > 0.0)
            && zeros(self) == zeros(other)
            && (self.is_of_tensor() || self.axis == other.axis)
    }
}

struct Quantizer<'a> {
    old: &'a Graph,
    new: Graph,
    /// New value of each old one, with the same type.
    plain: Vec<Option<ValueId>>,
    /// Integers from which old values are dequantized, if they are.
    bytes: Vec<Option<QuantizedValue>>,
    /// Whether an old i8 value has become u8, with 128 added.
    is_shifted: Vec<bool>,
    target: &'a Target,
    /// Whether the target multiplies 8-bit integers faster than f32.
    dots: bool,
    /// Tables from which new values are gathered, with the value of the indices.
    tables: HashMap<ValueId, (ValueId, Tensor)>,
}

/// Whether a target multiplies 8-bit integers faster than f32.
pub fn has_dots(target: &Target) -> bool {
    [[false, true], [true, true]].iter().any(|signed| target.dot4_lanes(*signed) > 0) || target.widens_bytes()
}

/// Repeats a single number `n` times, or returns `n` numbers; `None` for any other length.
fn spread<T: Copy>(numbers: &[T], n: usize) -> Option<Vec<T>> {
    match numbers {
        [one] => Some(vec![*one; n]),
        all => (all.len() == n).then(|| all.to_vec()),
    }
}

/// Types of values, and elements of constants.
fn facts<'a>(graph: &'a Graph, inputs: &[Option<ValueId>]) -> Vec<Option<Fact<'a>>> {
    let fact = |id: &Option<ValueId>| {
        let value = graph.value((*id)?);
        Some(Fact { ty: value.ty.as_ref()?, value: value.constant.as_ref() })
    };
    inputs.iter().map(fact).collect()
}

impl Quantizer<'_> {
    fn constant_of(&self, id: ValueId) -> Option<&Tensor> {
        self.new.value(id).constant.as_ref()
    }

    fn shape(&self, id: ValueId) -> Vec<usize> {
        self.new.ty(id).shape.clone()
    }

    fn add_constant(&mut self, name: String, tensor: Tensor) -> ValueId {
        let (ty, constant) = (Some(tensor.ty().clone()), Some(tensor));
        self.new.add_value(Value { name, ty, constant, ..Value::default() })
    }

    /// Returns the new value for an old one, with the same type.
    fn plain(&mut self, id: ValueId) -> ValueId {
        if let Some(known) = self.plain[id.0 as usize] {
            return known;
        }
        let value = self.old.value(id);
        let new = match self.bytes[id.0 as usize].clone() {
            None => self.new.add_value(Value { producer: None, users: Vec::new(), ..value.clone() }),
            Some(bytes) => self.dequantized(&bytes, value),
        };
        self.plain[id.0 as usize] = Some(new);
        new
    }

    /// Adds the dequantization of integers.
    fn dequantized(&mut self, bytes: &QuantizedValue, like: &Value) -> ValueId {
        let name = &like.name;
        let scale = self.add_constant(format!("{name}.scale"), bytes.scale.clone());
        let zero = bytes.zero.clone().map(|zero| self.add_constant(format!("{name}.zero"), zero));
        let inputs = vec![Some(bytes.id), Some(scale), zero];
        let ty = TensorType::new(DType::F32, self.shape(bytes.id));
        let new = Value { ty: Some(ty), producer: None, users: Vec::new(), constant: None, ..like.clone() };
        let id = self.new.add_value(new);
        let node = Node { op: bytes.op.clone(), place: bytes.place.clone(), inputs, outputs: vec![Some(id)] };
        self.add(node);
        id
    }

    /// Adds a node, or its results as constants if all of its inputs are constant and the same at any size.
    fn add(&mut self, node: Node) {
        let given = facts(&self.new, &node.inputs);
        let is_known = !given.is_empty() && given.iter().flatten().all(|fact| fact.value.is_some());
        let is_fixed = !self.new.varies(&node.inputs).any() && !node.op.is_random();
        let found = (is_known && is_fixed).then(|| node.op.operation().evaluate(Inputs(&given)).ok()).flatten();
        match found {
            Some(tensors) => {
                for (id, tensor) in node.outputs.iter().zip(tensors) {
                    id.iter().for_each(|id| self.new.value_mut(*id).constant = Some(tensor.clone()));
                }
            }
            None => {
                self.new.add_node(node);
            }
        }
    }

    /// Adds a node with one output, of the inferred type; `None` if inference fails.
    fn step(
        &mut self,
        name: String,
        op: impl Into<Op>,
        place: &Place,
        inputs: Vec<Option<ValueId>>,
    ) -> Option<ValueId> {
        let op = op.into();
        let mut types = op.operation().infer(Inputs(&facts(&self.new, &inputs))).ok()?;
        let ty = Some(types.swap_remove(0));
        let varies = self.new.varies(&inputs);
        let id = self.new.add_value(Value { name, ty, varies, ..Value::default() });
        self.add(Node { op, place: place.clone(), inputs, outputs: vec![Some(id)] });
        Some(id)
    }

    fn node(&mut self, node: &Node) {
        let done = match &node.op {
            Op::DequantizeLinear(op) => self.dequantize(node, op.0),
            Op::QuantizeLinear(op) if self.dots => self.quantize(node, *op),
            Op::MatMul(_) if self.dots => self.product(node, false).or_else(|| self.packed_product(node, false)),
            Op::Gemm(gemm) if self.dots && is_plain(gemm) => {
                let transposes = gemm.transposes_b;
                self.product(node, transposes).or_else(|| self.packed_product(node, transposes))
            }
            Op::MatMulInteger(_) if self.dots => self.integer_product(node),
            Op::QLinearMatMul(_) if self.dots => self.quantized(node, None),
            Op::Conv(conv) if self.dots => self.convolution(node, conv),
            Op::ConvInteger(conv) if self.dots => self.integer_convolution(node, &conv.0),
            Op::QLinearConv(conv) if self.dots => self.quantized(node, Some(&conv.0)),
            _ if self.dots && moves(node) => self.moved(node),
            _ => None,
        };
        if done.is_some() {
            return;
        }
        let mut new = node.clone();
        new.inputs.iter_mut().flatten().for_each(|id| *id = self.plain(*id));
        if matches!(node.op, Op::Concat(_)) && self.any_is_shifted(node) {
            for (id, new) in node.inputs.iter().flatten().zip(new.inputs.iter_mut().flatten()) {
                if !self.is_shifted[id.0 as usize] {
                    *new = self.shifted_copy(*new, &node.place);
                }
            }
            node.outputs.iter().flatten().for_each(|id| _ = self.shifted_value(*id));
        } else if self.first_is_shifted(node) {
            if has_zero_of_first(&node.op) {
                new.inputs.resize(new.inputs.len().max(3), None);
                new.inputs[2] = self.zero_of_first(node);
            } else {
                node.outputs.iter().flatten().for_each(|id| _ = self.shifted_value(*id));
            }
        }
        new.outputs.iter_mut().flatten().for_each(|id| *id = self.plain(*id));
        self.add(new);
    }

    /// Integers from which a node's input was dequantized.
    fn input_bytes(&self, node: &Node, at: usize) -> Option<QuantizedValue> {
        self.bytes[node.inputs.get(at).copied().flatten()?.0 as usize].clone()
    }

    /// Records the integers from which numbers are dequantized, without computing the numbers yet.
    fn dequantize(&mut self, node: &Node, scaling: Scaling) -> Option<()> {
        let (x, to) = (node.inputs[0]?, node.outputs[0]?);
        let is_shifted = self.is_shifted[x.0 as usize];
        let id = self.plain(x);
        let ty = self.new.ty(id).clone();
        let is_constant = self.constant_of(id).is_some();
        let fits = match ty.dtype {
            DType::U8 | DType::I8 => self.dots || is_constant,
            _ => is_constant,
        };
        (fits && scaling.block == 0 && self.old.ty(to).dtype == DType::F32).then_some(())?;
        let scale = self.old.value(node.inputs[1]?).constant.clone()?;
        let zero = match node.inputs.get(2).copied().flatten() {
            Some(zero) => Some(self.old.value(zero).constant.clone()?),
            None => None,
        };
        let zero = if is_shifted { Some(shifted(zero.as_ref(), &scale)) } else { zero };
        (scale.dtype() == DType::F32).then_some(())?;
        let axis = if scale.n_elements() == 1 { 0 } else { scaling.dimension(ty.shape.len()).ok()? };
        let (op, place) = (node.op.clone(), node.place.clone());
        self.bytes[to.0 as usize] = Some(QuantizedValue { id, scale, zero, axis, op, place });
        Some(())
    }

    /// Removes a dequantization followed by an equal quantization, and makes integers unsigned if all readers
    /// dequantize them.
    fn quantize(&mut self, node: &Node, op: QuantizeLinear) -> Option<()> {
        let (x, to) = (node.inputs[0]?, node.outputs[0]?);
        let constant = |at: usize| -> Option<Option<Tensor>> {
            match node.inputs.get(at).copied().flatten() {
                Some(id) => self.old.value(id).constant.clone().map(Some),
                None => Some(None),
            }
        };
        let (scale, zero) = (constant(1)??, constant(2)?);
        let dtype = self.old.ty(to).dtype;
        let is_output = self.old.outputs.contains(&to);
        let is_shifted = self.may_shift(to);
        let zero = if is_shifted { Some(shifted(zero.as_ref(), &scale)) } else { zero };
        let dtype = if is_shifted { DType::U8 } else { dtype };
        if let Some(bytes) = self.bytes[x.0 as usize].clone().filter(|_| !is_output && op.0.block == 0) {
            let axis = op.0.dimension(self.old.ty(x).shape.len()).unwrap_or(0);
            let own = QuantizedValue { scale: scale.clone(), zero: zero.clone(), axis, ..bytes.clone() };
            if self.new.ty(bytes.id).dtype == dtype && bytes.is_like(&own) {
                (self.plain[to.0 as usize], self.is_shifted[to.0 as usize]) = (Some(bytes.id), is_shifted);
                return Some(());
            }
        }
        let to_zero = |zero: &Option<Tensor>| zero.clone().unwrap_or_else(|| Tensor::scalar(DType::U8, 0.0));
        if dtype == DType::U8 && op.0.block == 0 && scale.n_elements() == 1 {
            let ty = TensorType::new(DType::U8, self.old.ty(to).shape.clone());
            if let Some((bytes, table)) = self.table(x, &ty.shape, op, &scale, &to_zero(&zero)) {
                let new = Value { ty: Some(ty), producer: None, users: Vec::new(), ..self.old.value(to).clone() };
                let new = self.new.add_value(new);
                (self.plain[to.0 as usize], self.is_shifted[to.0 as usize]) = (Some(new), is_shifted);
                self.tables.insert(new, (bytes, table.clone()));
                let table = self.add_constant(format!("{}.table", self.old.value(to).name), table);
                let inputs = vec![Some(table), Some(bytes)];
                self.add(Node {
                    op: Gather { axis: 0 }.into(),
                    place: node.place.clone(),
                    inputs,
                    outputs: vec![Some(new)],
                });
                return Some(());
            }
        }
        is_shifted.then_some(())?;
        let inputs = vec![
            Some(self.plain(x)),
            Some(self.plain(node.inputs[1]?)),
            Some(self.add_constant(format!("{}.zero", self.old.value(to).name), zero?)),
        ];
        let new = self.shifted_value(to);
        let op = QuantizeLinear(Scaling { dtype: None, ..op.0 });
        self.add(Node { op: op.into(), place: node.place.clone(), inputs, outputs: vec![Some(new)] });
        Some(())
    }

    /// Whether i8 numbers may become u8, with 128 added: whether each reader has a constant zero point of
    /// theirs, or moves them to such readers.
    fn may_shift(&self, id: ValueId) -> bool {
        let graph = self.old;
        let is_known = |user: &Node, at: usize| {
            user.inputs.get(at).copied().flatten().is_none_or(|id| graph.value(id).constant.is_some())
        };
        let is_single = |id: Option<ValueId>| id.is_some_and(|id| graph.ty(id).dtype == DType::F32);
        let may_read = |user: &Node| match &user.op {
            Op::DequantizeLinear(op) if op.0.block == 0 => {
                is_single(user.outputs[0]) && is_single(user.inputs[1]) && is_known(user, 1) && is_known(user, 2)
            }
            op if has_zero_of_first(op) => is_known(user, 2),
            _ => moves(user) && user.outputs.len() == 1 && user.outputs[0].is_some_and(|id| self.may_shift(id)),
        };
        let is_first_alone = |user: &Node| user.inputs[0] == Some(id) && !user.inputs[1..].contains(&Some(id));
        let mut users = graph.value(id).users.iter().map(|user| graph.node(*user));
        graph.ty(id).dtype == DType::I8
            && !graph.outputs.contains(&id)
            && users.all(|user| (matches!(user.op, Op::Concat(_)) || is_first_alone(user)) && may_read(user))
    }

    /// Adds a u8 value in place of an i8 one.
    fn shifted_value(&mut self, id: ValueId) -> ValueId {
        let old = self.old.value(id);
        let ty = Some(TensorType::new(DType::U8, self.old.ty(id).shape.clone()));
        let new = self.new.add_value(Value { ty, producer: None, users: Vec::new(), ..old.clone() });
        (self.plain[id.0 as usize], self.is_shifted[id.0 as usize]) = (Some(new), true);
        new
    }

    fn first_is_shifted(&self, node: &Node) -> bool {
        node.inputs.first().copied().flatten().is_some_and(|id| self.is_shifted[id.0 as usize])
    }

    fn any_is_shifted(&self, node: &Node) -> bool {
        node.inputs.iter().flatten().any(|id| self.is_shifted[id.0 as usize])
    }

    /// Adds u8 integers that are i8 ones plus 128.
    fn shifted_copy(&mut self, id: ValueId, place: &Place) -> ValueId {
        let name = self.new.value(id).name.clone();
        let one = self.add_constant(format!("{name}.one"), Tensor::scalar(DType::F32, 1.0));
        let zero = self.add_constant(format!("{name}.zero"), Tensor::scalar(DType::U8, 128.0));
        let whole = self.step(format!("{name}.whole"), Cast { to: Some(DType::F32) }, place, vec![Some(id)]);
        let quantize = QuantizeLinear(Scaling { axis: 0, block: 0, dtype: None });
        let bytes = self.step(format!("{name}.unsigned"), quantize, place, vec![whole, Some(one), Some(zero)]);
        bytes.expect("invariant: i8 integers have u8 ones")
    }

    /// Zero point, input 2, of a node's first input in the new graph.
    fn zero_of_first(&mut self, node: &Node) -> Option<ValueId> {
        let zero = node.inputs.get(2).copied().flatten();
        if !self.first_is_shifted(node) {
            return zero.map(|id| self.plain(id));
        }
        let known = zero.and_then(|id| self.old.value(id).constant.as_ref());
        let zero = shifted(known, &Tensor::scalar(DType::F32, 1.0));
        Some(self.add_constant(format!("{}.zero", node.place.node), zero))
    }

    /// Finds the u8 value from which numbers of this shape are computed, and computes the quantized result
    /// for each u8; `None` if anything else contributes, or the computation is cheap.
    fn table(
        &self,
        numbers: ValueId,
        shape: &[usize],
        op: QuantizeLinear,
        scale: &Tensor,
        zero: &Tensor,
    ) -> Option<(ValueId, Tensor)> {
        let mut of = ElementSource { bytes: None, is_costly: false };
        let column = self.column(numbers, shape, &mut of, MOST_DEPTH)?;
        let bytes = of.bytes.filter(|_| of.is_costly)?;
        let inputs = [Some(&column), Some(scale), Some(zero)];
        Some((bytes, evaluated(&QuantizeLinear(Scaling { axis: 0, ..op.0 }).into(), &inputs)?))
    }

    /// Computes an elementwise value for each u8 that it may be computed from; a constant number stays one.
    fn column(&self, id: ValueId, shape: &[usize], of: &mut ElementSource, depth: usize) -> Option<Tensor> {
        if let Some(constant) = &self.old.value(id).constant {
            return (constant.n_elements() == 1).then(|| constant.reshaped(Vec::new()));
        }
        if let Some(bytes) = &self.bytes[id.0 as usize] {
            let fits = bytes.is_single() && self.new.ty(bytes.id).dtype == DType::U8;
            (fits && self.shape(bytes.id) == shape && self.constant_of(bytes.id).is_none()).then_some(())?;
            let own = Tensor::from_integers(DType::U8, vec![256], &(0..256).collect::<Vec<i128>>());
            let (source, numbers) = self.tables.get(&bytes.id).cloned().unwrap_or((bytes.id, own));
            (*of.bytes.get_or_insert(source) == source).then_some(())?;
            of.is_costly |= self.tables.contains_key(&bytes.id);
            let op = DequantizeLinear(Scaling { axis: 0, block: 0, dtype: None });
            return evaluated(&op.into(), &[Some(&numbers), Some(&bytes.scale), bytes.zero.as_ref()]);
        }
        let node = self.old.node(self.old.value(id).producer?.0);
        let is_pointwise = matches!(node.op, Op::Unary(_) | Op::Binary(_) | Op::Clip(_));
        (is_pointwise && depth > 0).then_some(())?;
        of.is_costly |= matches!(&node.op, Op::Unary(function) if is_costly(*function));
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for input in &node.inputs {
            inputs.push(match input {
                Some(id) => Some(self.column(*id, shape, of, depth - 1)?),
                None => None,
            });
        }
        evaluated(&node.op, &inputs.iter().map(Option::as_ref).collect::<Vec<_>>())
    }

    /// Moves integers instead of the numbers that they represent.
    fn moved(&mut self, node: &Node) -> Option<()> {
        let all: Vec<ValueId> = match &node.op {
            Op::Concat(_) => node.inputs.iter().copied().collect::<Option<_>>()?,
            _ => vec![node.inputs[0]?],
        };
        let mut parts = all.iter().map(|id| self.bytes[id.0 as usize].clone());
        let first = parts.next()??;
        let is_alike = |part: Option<QuantizedValue>| {
            part.is_some_and(|part| part.is_like(&first) && self.new.ty(part.id).dtype == self.new.ty(first.id).dtype)
        };
        let mut axis = first.axis;
        if let (false, Op::Transpose(turn)) = (first.is_of_tensor(), &node.op) {
            axis = turn.order(self.shape(first.id).len()).ok()?.iter().position(|from| *from == axis)?;
        }
        let may = first.is_of_tensor() || matches!(node.op, Op::Transpose(_));
        (parts.all(is_alike) && may && first.scales().iter().all(|scale| *scale > 0.0)).then_some(())?;
        let mut inputs: Vec<Option<ValueId>> = Vec::with_capacity(node.inputs.len());
        for id in &node.inputs {
            let bytes = id.filter(|id| all.contains(id)).and_then(|id| self.bytes[id.0 as usize].as_ref());
            inputs.push(match (bytes, id) {
                (Some(bytes), _) => Some(bytes.id),
                (None, Some(id)) => Some(self.plain(*id)),
                (None, None) => None,
            });
        }
        let types = node.op.operation().infer(Inputs(&facts(&self.new, &inputs))).ok()?;
        let dtype = self.new.ty(first.id).dtype;
        let n_outputs = node.outputs.len();
        (types.len() >= n_outputs && types[..n_outputs].iter().all(|ty| ty.dtype == dtype)).then_some(())?;
        let mut outputs = Vec::with_capacity(n_outputs);
        for (output, ty) in node.outputs.iter().zip(types) {
            let Some(old) = *output else {
                outputs.push(None);
                continue;
            };
            let value = self.old.value(old);
            let (name, varies) = (format!("{}.integers", value.name), value.varies);
            let id = self.new.add_value(Value { name, ty: Some(ty), varies, ..Value::default() });
            self.bytes[old.0 as usize] = Some(QuantizedValue { id, axis, ..first.clone() });
            if let Op::DequantizeLinear(op) = &first.op {
                let scaling = Scaling { axis: axis as i64, ..op.0 };
                let bytes = self.bytes[old.0 as usize].as_mut().expect("it was just put there");
                bytes.op = DequantizeLinear(scaling).into();
            }
            outputs.push(Some(id));
        }
        self.add(Node { op: node.op.clone(), place: node.place.clone(), inputs, outputs });
        Some(())
    }

    /// Rewrites a product of dequantized numbers, the second operand constant.
    fn product(&mut self, node: &Node, turned: bool) -> Option<()> {
        let (a, b) = (self.input_bytes(node, 0)?, self.input_bytes(node, 1)?);
        let integers = self.matrix(&b, turned)?;
        self.of_numbers(node, [&a, &b], integers)
    }

    /// Rewrites a convolution of dequantized numbers with constant filters.
    fn convolution(&mut self, node: &Node, conv: &Conv) -> Option<()> {
        let (x, w) = (self.input_bytes(node, 0)?, self.input_bytes(node, 1)?);
        let shape = self.shape(x.id);
        let integers = self.filters(&w, conv, &shape)?;
        self.pays(&integers, self.new.ty(x.id).dtype).then_some(())?;
        self.of_numbers(node, [&x, &w], integers)
    }

    fn of_numbers(&mut self, node: &Node, [a, b]: [&QuantizedValue; 2], integers: Integers) -> Option<()> {
        let bias = node.inputs.get(2).copied().flatten();
        let product = self.of_bytes(node, [a, b], integers, &|a, b| a * b, bias)?;
        self.plain[node.outputs[0]?.0 as usize] = Some(product);
        Some(())
    }

    /// Rewrites an operator of two operands as an integer one, with a bias, and scaled by what `factor`
    /// computes from their scales. If that fails, the graph is unchanged.
    fn of_bytes(
        &mut self,
        node: &Node,
        [a, b]: [&QuantizedValue; 2],
        integers: Integers,
        factor: &dyn Fn(f32, f32) -> f32,
        bias: Option<ValueId>,
    ) -> Option<ValueId> {
        let along = integers.along.clone();
        let ty = self.new.ty(a.id);
        (matches!(ty.dtype, DType::U8 | DType::I8) && ty.shape.len() >= 2).then_some(())?;
        (self.constant_of(a.id).is_none() && !self.new.ty(a.id).shape.contains(&0)).then_some(())?;
        let (of_a, of_b) = (a.scales_of_channels(along[0], integers.n_results)?, spread(&b.scales(), along[0])?);
        let both = || of_a.iter().zip(&of_b);
        let factors: Vec<f32> = both().map(|(of_a, of_b)| factor(*of_a, *of_b)).collect();
        let sums: Vec<f32> = both().map(|(of_a, of_b)| of_a * of_b).collect();
        let (place, to) = (&node.place, node.outputs[0]?);
        let name = self.old.value(to).name.clone();
        let zero = a.only_zero()?;
        let zero = a.zero.is_some().then(|| self.add_constant(format!("{name}.zero"), zero));
        let mut x = self.sums(&format!("{name}.sums"), place, [Some(a.id), zero], &integers)?;
        let mut rest = bias;
        if let Some(bias) = bias.and_then(|id| self.bias_of(id, &sums, &along)) {
            let bias = self.add_constant(format!("{name}.bias"), bias);
            x = self.step(format!("{name}.biased"), Binary::Add, place, vec![Some(x), Some(bias)])?;
            rest = None;
        }
        let x = self.step(format!("{name}.whole"), Cast { to: Some(DType::F32) }, place, vec![Some(x)])?;
        let numbers: Vec<f64> = factors.into_iter().map(f64::from).collect();
        let scale = Tensor::from_floats(DType::F32, along.clone(), &numbers);
        let scale = self.add_constant(format!("{name}.factors"), scale);
        let is_last = self.old.ty(to).dtype == DType::F32 && integers.form.is_rows();
        let named = |is_last, what: &str| if is_last { name.clone() } else { format!("{name}.{what}") };
        let mut x =
            self.step(named(is_last && rest.is_none(), "product"), Binary::Mul, place, vec![Some(x), Some(scale)])?;
        if let Some(bias) = rest {
            let mut bias = self.plain(bias);
            if along.len() > 1 {
                let tensor = self.constant_of(bias)?.reshaped(along);
                bias = self.add_constant(format!("{name}.bias"), tensor);
            }
            x = self.step(named(integers.form.is_rows(), "sum"), Binary::Add, place, vec![Some(x), Some(bias)])?;
        }
        self.written_from(&integers.form, name, place, x)
    }

    /// Bias as integers in the scale of the sums, one for each column; `None` if the bias has another scale.
    fn bias_of(&self, id: ValueId, scales: &[f32], along: &[usize]) -> Option<Tensor> {
        let bytes = self.bytes[id.0 as usize].as_ref()?;
        let tensor = self.constant_of(bytes.id).filter(|tensor| tensor.dtype() == DType::I32)?;
        let n = scales.len();
        let is_row = tensor.shape().last() == Some(&n) && tensor.n_elements() == n;
        let own = spread(&bytes.scales(), n)?;
        let is_near = |(a, b): (&f32, &f32)| a.to_bits().abs_diff(b.to_bits()) <= 1;
        let fits = is_row && bytes.zeros().iter().all(|zero| *zero == 0) && own.iter().zip(scales).all(is_near);
        fits.then(|| tensor.reshaped(along.to_vec()))
    }

    /// Constant operand of an integer operator, with its zero points.
    fn known_factor(&mut self, node: &Node, axis: usize) -> Option<QuantizedValue> {
        let zero = match node.inputs.get(3).copied().flatten() {
            Some(zero) => Some(self.old.value(zero).constant.clone()?),
            None => None,
        };
        let n = zero.as_ref().map_or(1, Tensor::n_elements);
        let scale = Tensor::from_floats(DType::F32, vec![n], &vec![1.0; n]);
        let id = self.plain(node.inputs[1]?);
        Some(QuantizedValue { id, scale, zero, axis, op: node.op.clone(), place: node.place.clone() })
    }

    /// Rewrites an integer product with a constant operand B, from which the zero points are subtracted.
    fn integer_product(&mut self, node: &Node) -> Option<()> {
        let bytes = self.known_factor(node, 1)?;
        let integers = self.matrix(&bytes, false)?;
        self.with_factor(node, integers)
    }

    /// Rewrites an integer convolution with constant filters, from which the zero points are subtracted.
    fn integer_convolution(&mut self, node: &Node, conv: &Conv) -> Option<()> {
        let bytes = self.known_factor(node, 0)?;
        let shape = self.old.ty(node.inputs[0]?).shape.clone();
        let integers = self.filters(&bytes, conv, &shape)?;
        self.with_factor(node, integers)
    }

    /// Computes the result of an operator with another constant operand, which has no zero point.
    fn with_factor(&mut self, node: &Node, integers: Integers) -> Option<()> {
        let (x, zero) = (Some(self.plain(node.inputs[0]?)), self.zero_of_first(node));
        let to = node.outputs[0]?;
        let name = self.old.value(to).name.clone();
        let sums = self.sums(&name, &node.place, [x, zero], &integers)?;
        self.plain[to.0 as usize] = Some(self.written_from(&integers.form, name, &node.place, sums)?);
        Some(())
    }

    /// Splits a product or convolution of quantized tensors into an integer operator, a scaling, and a
    /// quantization.
    fn quantized(&mut self, node: &Node, conv: Option<&Conv>) -> Option<()> {
        let constant = |at: usize| self.old.value(node.inputs[at]?).constant.clone();
        let (scale, zero) = (constant(6)?, constant(7)?);
        (scale.n_elements() == 1 && zero.n_elements() == 1).then_some(())?;
        let parts = [0, 3].map(|at| Some((constant(at + 1)?, constant(at + 2)?)));
        let [Some(of_a), Some(of_b)] = parts else { return None };
        let axis = if conv.is_some() { 0 } else { 1 };
        let mut factors = Vec::with_capacity(2);
        for (at, (scale, zero)) in [(0, of_a), (3, of_b)] {
            let id = self.plain(node.inputs[at]?);
            (scale.dtype() == DType::F32).then_some(())?;
            let zero = if at == 0 && self.first_is_shifted(node) { shifted(Some(&zero), &scale) } else { zero };
            let (op, place, zero) = (node.op.clone(), node.place.clone(), Some(zero));
            factors.push(QuantizedValue { id, scale, zero, axis, op, place });
        }
        let by = scale.floats()[0] as f32;
        if conv.is_none() && constant(3).is_none() {
            let product = self.product_of_numbers(node, &factors, &|a, b| a * b / by)?;
            return self.requantized(node, product, zero);
        }
        let integers = match conv {
            None => self.matrix(&factors[1], false)?,
            Some(conv) => {
                let shape = self.shape(factors[0].id);
                self.filters(&factors[1], conv, &shape)?
            }
        };
        let bias = match node.inputs.get(8).copied().flatten() {
            None => None,
            Some(bias) => {
                // The bias has the scale of the sums.
                let tensor = self.old.value(bias).constant.clone()?;
                let scale: Vec<f64> = spread(&factors[1].scales(), integers.along[0])?
                    .into_iter()
                    .map(|scale| f64::from(factors[0].scales()[0] * scale))
                    .collect();
                let scale = Tensor::from_floats(DType::F32, vec![scale.len()], &scale);
                let id = self.plain(bias);
                (tensor.dtype() == DType::I32).then_some(())?;
                let (op, place) = (node.op.clone(), node.place.clone());
                self.bytes[bias.0 as usize] = Some(QuantizedValue { id, scale, zero: None, axis: 0, op, place });
                Some(bias)
            }
        };
        let product = self.of_bytes(node, [&factors[0], &factors[1]], integers, &|a, b| a * b / by, bias)?;
        self.requantized(node, product, zero)
    }

    /// Computes a product of two variable operands in floating point, on integers minus their zero points.
    fn product_of_numbers(
        &mut self,
        node: &Node,
        factors: &[QuantizedValue],
        factor: &dyn Fn(f32, f32) -> f32,
    ) -> Option<ValueId> {
        let (place, name) = (&node.place, self.old.value(node.outputs[0]?).name.clone());
        let mut numbers = Vec::with_capacity(2);
        for (at, bytes) in factors.iter().enumerate() {
            bytes.is_single().then_some(())?;
            let whole =
                self.step(format!("{name}.factor{at}"), Cast { to: Some(DType::F32) }, place, vec![Some(bytes.id)])?;
            let zero = Tensor::scalar(DType::F32, bytes.zeros()[0] as f64);
            let zero = self.add_constant(format!("{name}.zero{at}"), zero);
            numbers.push(Some(self.step(
                format!("{name}.number{at}"),
                Binary::Sub,
                place,
                vec![Some(whole), Some(zero)],
            )?));
        }
        let product = self.step(format!("{name}.sums"), MatMul, place, numbers)?;
        let scale = f64::from(factor(factors[0].scales()[0], factors[1].scales()[0]));
        let scale = self.add_constant(format!("{name}.factor"), Tensor::scalar(DType::F32, scale));
        self.step(format!("{name}.product"), Binary::Mul, place, vec![Some(product), Some(scale)])
    }

    /// Quantizes multiples of the scale of a node's result.
    fn requantized(&mut self, node: &Node, multiples: ValueId, zero: Tensor) -> Option<()> {
        let to = node.outputs[0]?;
        let name = self.old.value(to).name.clone();
        let one = self.add_constant(format!("{name}.one"), Tensor::scalar(DType::F32, 1.0));
        let is_shifted = self.may_shift(to);
        let zero = zero.reshaped(Vec::new());
        let zero = if is_shifted { shifted(Some(&zero), &zero) } else { zero };
        let zero = self.add_constant(format!("{name}.zero"), zero);
        let inputs = vec![Some(multiples), Some(one), Some(zero)];
        let quantize = QuantizeLinear(Scaling { axis: 0, block: 0, dtype: None });
        let to = if is_shifted { self.shifted_value(to) } else { self.plain(to) };
        self.add(Node { op: quantize.into(), place: node.place.clone(), inputs, outputs: vec![Some(to)] });
        Some(())
    }
}

/// Maximum depth of operators between two quantizations that one table replaces.
const MOST_DEPTH: usize = 12;

/// Source of a value that is computed element by element.
struct ElementSource {
    /// Integers from which the value is computed, once found.
    bytes: Option<ValueId>,
    /// Whether a lookup costs less than the computation.
    is_costly: bool,
}

/// Whether a function takes more than a few instructions.
fn is_costly(function: Unary) -> bool {
    use Unary as U;
    let is_cheap = matches!(function, U::Abs | U::Ceil | U::Floor | U::Identity)
        || matches!(function, U::LeakyRelu { .. } | U::Neg | U::Not | U::Relu | U::Round | U::Sign | U::Sqrt);
    !is_cheap
}

/// Evaluates an operator with one output and constant inputs.
fn evaluated(op: &Op, inputs: &[Option<&Tensor>]) -> Option<Tensor> {
    let facts: Vec<Option<Fact>> =
        inputs.iter().map(|tensor| tensor.map(|tensor| Fact { ty: tensor.ty(), value: Some(tensor) })).collect();
    op.operation().evaluate(Inputs(&facts)).ok().filter(|outputs| outputs.len() == 1)?.pop()
}

/// Converts i8 zero points, of the shape of the scales, to u8 for integers to which 128 was added.
fn shifted(zero: Option<&Tensor>, scale: &Tensor) -> Tensor {
    let shape = zero.map_or(scale.shape(), Tensor::shape).to_vec();
    let numbers = zero.map_or(vec![0; scale.n_elements()], Tensor::i64s);
    let numbers: Vec<i128> = numbers.into_iter().map(|zero| i128::from(zero) + 128).collect();
    Tensor::from_integers(DType::U8, shape, &numbers)
}

/// Whether an operator's third input is the zero point of its first one.
fn has_zero_of_first(op: &Op) -> bool {
    matches!(op, Op::QLinearMatMul(_) | Op::QLinearConv(_) | Op::MatMulInteger(_) | Op::ConvInteger(_))
}

fn is_plain(gemm: &Gemm) -> bool {
    !gemm.transposes_a && gemm.alpha == 1.0 && gemm.beta == 1.0
}

/// Whether a node selects elements of its first input, or of all inputs, by position or as the largest ones.
fn moves(node: &Node) -> bool {
    let is_one = node.outputs.len() == 1;
    match &node.op {
        Op::Reshape(_) | Op::Flatten(_) | Op::Squeeze(_) | Op::Unsqueeze(_) | Op::Transpose(_) | Op::Slice(_) => true,
        Op::Expand(_) | Op::Tile(_) | Op::Split(_) | Op::Concat(_) | Op::Unary(Unary::Identity) => true,
        Op::DepthToSpace(_) | Op::SpaceToDepth(_) | Op::Gather(_) | Op::GatherElements(_) => true,
        Op::Pool(pool) => is_one && matches!(pool.kind, PoolKind::Max { .. }),
        _ => false,
    }
}
