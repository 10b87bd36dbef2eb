//! Import of a graph of many operators to a net of few kinds.

use bytes::Bytes;
use tilewright_codegen::llvm_version;
use tilewright_graph::op::{
    ConvShape, Coordinates, Fact, Inputs, Pad, PadMode, PoolKind, Scatter, SoftmaxKind, Unary, axis, product_shape,
};
use tilewright_graph::{DType, Graph, Node as GraphNode, Op, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::{self, BinaryOp, ReduceOp, UnaryOp};

use crate::heads::turning;
use crate::jumps::decides;
use crate::net::{Convolution, Kind, Line, Net, Node, State, ValueId, Windows};
use crate::scalar::{self, add, div, input, mul, number, of, sub};

/// The net of a specialised graph. What has no code becomes a host operator.
///
/// With `dots`, products of 8-bit integers of which one is known are such of integers.
pub fn import(graph: &Graph, dots: bool) -> Net {
    let mut net = Net::default();
    for (_, value) in graph.values() {
        let ty = value.ty.as_ref().expect("every value of a specialised graph has its type");
        let shape: Vec<i64> = ty.shape.iter().map(|&d| d as i64).collect();
        let id = net.add_value(&value.name, ty.dtype, &shape);
        match &value.constant {
            Some(constant) if value.varies => net.varying.push((id, constant.clone())),
            constant => net.values[id.0].constant.clone_from(constant),
        }
    }
    net.inputs = graph.inputs.iter().map(|id| ValueId(id.0 as usize)).collect();
    net.outputs = graph.outputs.iter().map(|id| ValueId(id.0 as usize)).collect();
    for (_, node) in graph.nodes() {
        let inputs: Vec<Option<ValueId>> = node.inputs.iter().map(|id| id.map(|id| ValueId(id.0 as usize))).collect();
        // What nobody reads need not be there.
        let is_read = |id: &tilewright_graph::ValueId| !graph.value(*id).users.is_empty() || graph.outputs.contains(id);
        let outputs: Vec<Option<ValueId>> =
            node.outputs.iter().map(|id| id.filter(is_read).map(|id| ValueId(id.0 as usize))).collect();
        let mut job = Job { graph, node, net: &mut net, inputs: inputs.clone(), outputs: outputs.clone(), dots };
        let n_nodes = job.net.nodes.len();
        // Values on the way of what has no code after all are read by nobody.
        if job.lower().is_none() || !compiles(job.net, n_nodes) {
            job.net.nodes.truncate(n_nodes);
            job.inputs = inputs;
            // What has no elements is known by now.
            job.outputs = outputs.into_iter().map(|id| id.filter(|id| !job.is_empty(*id))).collect();
            if job.evaluate().is_none() {
                job.host();
            }
        }
    }
    keep_states(graph, &mut net);
    net.prune();
    net
}

/// Makes states of inputs with a length that runs say: those that alone are read ahead of what is new, by a
/// concatenation which is an output.
fn keep_states(graph: &Graph, net: &mut Net) {
    let users = net.users();
    let of_graph = |id: ValueId| graph.value(tilewright_graph::ValueId(id.0 as u32));
    for at in 0..net.nodes.len() {
        let node = &net.nodes[at];
        let (Kind::Concat(axis), &[Some(past), Some(new)]) = (&node.kind, &node.inputs[..]) else { continue };
        let (axis, value) = (*axis, node.output());
        // Outputs are views of what is computed for them.
        let is_view = |user: &&usize| matches!(net.nodes[**user].kind, Kind::View);
        let views = users[value.0].iter().filter(is_view).map(|&user| net.nodes[user].output());
        let Some(present) = std::iter::once(value).chain(views).find(|id| net.outputs.contains(id)) else { continue };
        if !net.inputs.contains(&past) || !of_graph(past).varies || users[past.0] != [at] {
            continue;
        }
        let state = State { past: of_graph(past).name.clone(), present: of_graph(present).name.clone(), value, axis };
        net.states.push(state);
        net.inputs.retain(|id| *id != past);
        net.outputs.retain(|id| *id != present);
        (net.nodes[at].kind, net.nodes[at].inputs) = (Kind::Append(axis), vec![Some(new)]);
    }
}

/// Whether this build has code for the operations of a net from one of them on. Without LLVM there is some
/// where all is f32 or all is f64, and none for powers.
fn compiles(net: &Net, from: usize) -> bool {
    let are = |node: &Node, dtype: DType| {
        node.inputs.iter().flatten().chain(&node.outputs).all(|id| net.value(*id).dtype == dtype)
    };
    let has_code = |node: &Node| match &node.kind {
        Kind::View | Kind::Call(_) | Kind::Host(_) => true,
        Kind::Sequence(sequence) => compiles(&sequence.body, 0),
        Kind::Map(value) if has_power(value) => false,
        _ => are(node, DType::F32) || are(node, DType::F64),
    };
    llvm_version().is_some() || net.nodes[from..].iter().all(has_code)
}

fn has_power(value: &Expr) -> bool {
    let mut has_power = false;
    expr::Node::Expr(value).walk(&mut |node| {
        has_power |= matches!(node, expr::Node::Expr(Expr::Binary(BinaryOp::Pow, ..)));
    });
    has_power
}

/// The windows of a convolution over one or two dimensions, unless parts of the image are left out.
pub(crate) fn window_of(found: &ConvShape, transposed: bool) -> Option<Convolution> {
    let geometry = &found.geometry;
    let rank = geometry.kernel.len();
    if rank > 2 || geometry.begins.iter().chain(&geometry.ends).any(|&n| n < 0) {
        return None;
    }
    let mut after = geometry.ends.clone();
    if transposed {
        // What is added to the output's size is what the border behind it would leave out.
        let behind = |d: usize| {
            let reach = (geometry.out[d] as i64 - 1) * geometry.strides[d] as i64
                + (geometry.kernel[d] as i64 - 1) * geometry.dilations[d] as i64
                + 1;
            reach - geometry.begins[d] - found.image[d] as i64
        };
        after = (0..rank).map(behind).collect();
    }
    // Beyond the windows' reach is beyond the operator here.
    if after.iter().any(|&n| n < 0) {
        return None;
    }
    // What has one dimension has rows of one element.
    let two = |list: &[i64], rest: i64| if list.len() == 2 { [list[0], list[1]] } else { [rest, list[0]] };
    Some(Convolution {
        interleaved: false,
        groups: found.groups as i64,
        strides: two(&ints(&geometry.strides), 1),
        dilations: two(&ints(&geometry.dilations), 1),
        before: two(&geometry.begins, 0),
        after: two(&after, 0),
        transposed,
    })
}

/// A node of the graph on its way into the net.
pub(crate) struct Job<'a> {
    graph: &'a Graph,
    pub(crate) node: &'a GraphNode,
    pub(crate) net: &'a mut Net,
    pub(crate) inputs: Vec<Option<ValueId>>,
    pub(crate) outputs: Vec<Option<ValueId>>,
    /// Whether kernels multiply 8-bit integers.
    pub(crate) dots: bool,
}

fn ints(list: &[usize]) -> Vec<i64> {
    list.iter().map(|&n| n as i64).collect()
}

impl Job<'_> {
    /// Types and known values of the node's inputs.
    pub(crate) fn facts(&self) -> Vec<Option<Fact<'_>>> {
        let fact = |id: &Option<tilewright_graph::ValueId>| {
            let value = self.graph.value((*id)?);
            Some(Fact { ty: value.ty.as_ref()?, value: value.constant.as_ref() })
        };
        self.node.inputs.iter().map(fact).collect()
    }

    pub(crate) fn try_input(&self, at: usize) -> Option<ValueId> {
        self.inputs.get(at).copied().flatten()
    }

    pub(crate) fn shape(&self, at: usize) -> Option<Vec<i64>> {
        Some(self.net.shape(self.try_input(at)?).to_vec())
    }

    fn graph_shape(&self, at: usize) -> Option<&[usize]> {
        Some(&self.graph.ty((*self.node.inputs.get(at)?)?).shape)
    }

    pub(crate) fn is_f32(&self, id: ValueId) -> bool {
        self.net.value(id).dtype == DType::F32
    }

    /// Tells whether a value has no elements.
    fn is_empty(&self, id: ValueId) -> bool {
        self.net.value(id).n_elements() == 0
    }

    /// Whether there is code for its elements. Nothing but a cast has such for numbers of 16 bits, since
    /// graphs are widened.
    pub(crate) fn has_code(&self, id: ValueId) -> bool {
        self.net.element_type(id).is_some_and(|dtype| !dtype.is_half())
    }

    /// Whether its elements are integers or booleans that there is code for.
    pub(crate) fn is_whole(&self, id: ValueId) -> bool {
        self.net.element_type(id).is_some_and(|dtype| !dtype.is_float())
    }

    pub(crate) fn output(&self) -> Option<ValueId> {
        self.outputs[0]
    }

    pub(crate) fn push(&mut self, kind: Kind, inputs: &[ValueId], output: ValueId) -> ValueId {
        let inputs = inputs.iter().map(|&id| Some(id)).collect();
        self.net.nodes.push(Node { kind, inputs, outputs: vec![output], origin: self.node.place.node.clone() });
        output
    }

    /// A node that makes several values.
    pub(crate) fn push_several(&mut self, kind: Kind, inputs: &[ValueId], outputs: &[ValueId]) {
        let inputs = inputs.iter().map(|&id| Some(id)).collect();
        self.net.nodes.push(Node { kind, inputs, outputs: outputs.to_vec(), origin: self.node.place.node.clone() });
    }

    /// A value on the way to the node's output.
    pub(crate) fn value(&mut self, what: &str, dtype: DType, shape: &[i64]) -> ValueId {
        let name = format!("{}.{what}", self.node.place.node);
        self.net.add_value(&name, dtype, shape)
    }

    /// A node whose output is on the way, of the type of what it reads first.
    pub(crate) fn step(&mut self, what: &str, kind: Kind, inputs: &[ValueId], shape: &[i64]) -> ValueId {
        let to = self.value(what, self.net.value(inputs[0]).dtype, shape);
        self.push(kind, inputs, to)
    }

    fn host(&mut self) {
        let dummy = |net: &mut Net, at: usize, node: &GraphNode| {
            net.add_value(&format!("{}.unused{at}", node.place.node), DType::F32, &[0])
        };
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for (at, output) in self.outputs.iter().enumerate() {
            outputs.push(output.unwrap_or_else(|| dummy(self.net, at, self.node)));
        }
        self.net.nodes.push(Node {
            kind: Kind::Host(Box::new(self.node.op.clone())),
            inputs: self.inputs.clone(),
            outputs,
            origin: self.node.place.node.clone(),
        });
    }

    /// Whether a last digit of the node's output decides.
    pub(crate) fn decides(&self) -> bool {
        self.node.outputs[0].is_some_and(|to| decides(self.graph, to))
    }

    /// Elements by elements: the node's output of all its inputs.
    fn map(&mut self, value: impl FnOnce(&[Expr]) -> Option<Expr>) -> Option<()> {
        let inputs: Vec<ValueId> = self.inputs.iter().copied().collect::<Option<_>>()?;
        let to = self.output()?;
        if !self.has_code(to) || !inputs.iter().all(|&id| self.has_code(id)) {
            return None;
        }
        let elements: Vec<Expr> = inputs
            .iter()
            .enumerate()
            .map(|(at, &id)| match self.net.literal(id) {
                // A number of a higher rank would make the output's rank higher.
                Some(x) if self.net.shape(id).len() <= self.net.shape(to).len() => x,
                _ => input(at),
            })
            .collect();
        let value = value(&elements)?;
        self.push(Kind::Map(value), &inputs, to);
        Some(())
    }

    /// Lowers the test for infinite elements.
    fn infinite(&mut self) -> Option<()> {
        let Op::Unary(Unary::IsInf { positive, negative }) = self.node.op else { return None };
        let most = match self.net.value(self.try_input(0)?).dtype {
            DType::F32 => f64::from(f32::MAX),
            DType::F64 => f64::MAX,
            _ => return None,
        };
        self.map(|x| {
            let high = scalar::where_less(number(most), x[0].clone(), number(1.0), number(0.0));
            let low = scalar::where_less(x[0].clone(), number(-most), number(1.0), number(0.0));
            Some(match (positive, negative) {
                (true, true) => scalar::max(high, low),
                (true, false) => high,
                (false, true) => low,
                (false, false) => number(0.0),
            })
        })
    }

    /// Lowers to a view in the output's shape.
    pub(crate) fn view(&mut self) -> Option<()> {
        let (from, to) = (self.try_input(0)?, self.output()?);
        self.push(Kind::View, &[from], to);
        Some(())
    }

    fn lower(&mut self) -> Option<()> {
        let has_several = matches!(
            self.node.op,
            Op::Attention(_)
                | Op::GroupQueryAttention(_)
                | Op::BatchNormalization(_)
                | Op::Dropout(_)
                | Op::DynamicQuantizeLinear(_)
                | Op::LayerNormalization(_)
                | Op::Pool(_)
                | Op::Recurrent(_)
                | Op::SoftmaxCrossEntropyLoss(_)
                | Op::Split(_)
                | Op::TopK(_)
        );
        if self.outputs.iter().skip(1).any(Option::is_some) && !has_several {
            return None;
        }
        // There is nothing to compute of what has no elements.
        for to in &mut self.outputs {
            if let Some(id) = to.filter(|id| self.net.value(*id).n_elements() == 0) {
                self.net.values[id.0].constant = Tensor::new(self.net.value(id).ty(), Bytes::new());
                *to = None;
            }
        }
        if !matches!(self.node.op, Op::Concat(_)) && self.try_input(0).is_some_and(|id| self.is_empty(id)) {
            return None;
        }
        let node = self.node;
        match &node.op {
            Op::Unary(Unary::Identity) => self.view(),
            Op::Dropout(_) => self.dropout(),
            Op::Unary(Unary::IsInf { .. }) => self.infinite(),
            Op::Unary(f) => {
                if !scalar::is_whole(*f) && self.is_whole(self.try_input(0)?) {
                    return self.unary_in_c(*f).or_else(|| self.unary_of_whole(*f));
                }
                self.map(|x| scalar::unary(*f, x[0].clone())).or_else(|| self.unary_in_c(*f))
            }
            Op::Binary(_) if self.scaled_integer_product().is_some() => Some(()),
            Op::Binary(f) => {
                let are_whole = [0, 1].map(|at| self.try_input(at).map(|id| self.is_whole(id)));
                let [is_whole, exponent_is_whole] = [are_whole[0]?, are_whole[1]?];
                let is_exact = self.decides();
                self.map(|x| match f {
                    tilewright_graph::op::Binary::Pow if is_whole && !exponent_is_whole => {
                        Some(scalar::power_of_whole(x[0].clone(), x[1].clone()))
                    }
                    // A product with the inverse is less than an integer that the quotient is.
                    tilewright_graph::op::Binary::Div if is_exact => {
                        Some(Expr::binary(BinaryOp::Div, x[0].clone(), x[1].clone()))
                    }
                    f if is_whole => scalar::binary_of_whole(*f, x[0].clone(), x[1].clone()),
                    f => scalar::binary(*f, x[0].clone(), x[1].clone()),
                })
                .or_else(|| self.binary_in_c(*f))
            }
            Op::Variadic(f) => {
                use tilewright_graph::op::Variadic as V;
                let (f, is_exact) = (*f, self.decides());
                (!matches!(f, V::Mean) || self.is_real(self.output()?)).then_some(())?;
                self.map(|x| {
                    let all = x.iter().cloned();
                    Some(match f {
                        V::Max => all.reduce(scalar::max)?,
                        V::Min => all.reduce(scalar::min)?,
                        V::Sum => all.reduce(add)?,
                        V::Mean => scalar::part(all.reduce(add)?, x.len() as f64, is_exact),
                    })
                })
            }
            Op::Clip(clip) => self.clipped(clip),
            Op::Where(_) => self.map(|x| Some(scalar::choose(x[0].clone(), x[1].clone(), x[2].clone()))),
            Op::Cast(_) => {
                // What it may be like is not read.
                self.inputs.truncate(1);
                let (from, to) = (self.net.value(self.try_input(0)?).dtype, self.net.value(self.output()?).dtype);
                match to {
                    _ if from == to => self.view(),
                    // Of what is beyond these few bits the lowest stay, which stores of bytes do not see to.
                    DType::I2 | DType::I4 | DType::U2 | DType::U4 => None,
                    DType::Bool => self.map(|x| Some(scalar::is_not_zero(x[0].clone()))),
                    _ => {
                        let (x, to) = (self.try_input(0)?, self.output()?);
                        [x, to].iter().all(|&id| self.net.element_type(id).is_some()).then_some(())?;
                        self.push(Kind::Map(input(0)), &[x], to);
                        Some(())
                    }
                }
            }
            Op::Reshape(_) | Op::Flatten(_) | Op::Squeeze(_) | Op::Unsqueeze(_) => self.view(),
            Op::Expand(_) => {
                self.inputs.truncate(1);
                self.map(|x| Some(x[0].clone()))
            }
            Op::Transpose(transpose) => {
                let order = transpose.order(self.shape(0)?.len()).ok()?;
                let (from, to) = (self.try_input(0)?, self.output()?);
                self.moved(turning(self.net.shape(from), &order), from, to)
            }
            Op::Slice(slice) => {
                let parts = slice.parts(Inputs(&self.facts())).ok()?;
                let (from, to) = (self.try_input(0)?, self.output()?);
                self.moved(Kind::Slice(parts.iter().map(|part| (part.0 as i64, part.1)).collect()), from, to)
            }
            Op::Gather(gather) => {
                let (from, index, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
                let shape = self.shape(0)?;
                let axis = axis(gather.axis, shape.len()).ok()?;
                match self.net.value(index).constant.as_ref().map(Tensor::i64s).as_deref() {
                    Some(&[place]) => self.part(from, axis, place, to),
                    _ => self.gathered(from, index, axis, false, to),
                }
            }
            Op::GatherElements(gather) => {
                let (from, index, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
                let axis = axis(gather.axis, self.shape(0)?.len()).ok()?;
                self.gathered(from, index, axis, true, to)
            }
            Op::GatherNd(gather) => {
                self.gathered_by_tuples(gather.n_batch_dims).or_else(|| self.gathered_at(gather.n_batch_dims))
            }
            Op::ScatterNd(scatter) => match scatter.reduction {
                Scatter::Replace => self.box_replaced().or_else(|| self.scatter_nd(Scatter::Replace)),
                how => self.scatter_nd(how),
            },
            Op::ScatterElements(scatter) => self.scatter_elements(scatter.axis, scatter.reduction),
            Op::TopK(top) => self.top_k(top),
            Op::Split(split) => {
                let (from, rank) = (self.try_input(0)?, self.shape(0)?.len());
                let axis = axis(split.axis, rank).ok()?;
                let mut start = 0;
                for (at, to) in self.outputs.clone().into_iter().enumerate() {
                    let n = self.graph.ty(self.node.outputs[at]?).shape[axis] as i64;
                    let mut parts = vec![(0, 1); rank];
                    parts[axis].0 = start;
                    start += n;
                    if let Some(to) = to {
                        self.moved(Kind::Slice(parts), from, to)?;
                    }
                }
                Some(())
            }
            Op::Concat(concat) => {
                let to = self.output()?;
                let axis = axis(concat.axis, self.net.shape(to).len()).ok()?;
                let mut inputs: Vec<ValueId> = self.inputs.iter().copied().collect::<Option<_>>()?;
                inputs.retain(|id| self.net.value(*id).n_elements() > 0);
                self.has_code(to).then_some(())?;
                self.push(Kind::Concat(axis), &inputs, to);
                Some(())
            }
            Op::Pad(pad) => self.padded(pad).or_else(|| self.bordered(pad)),
            Op::BatchNormalization(norm) => {
                let [scale, offset, mean, variance] = [1, 2, 3, 4].map(|at| self.net.numbers(self.try_input(at)?));
                let is_known = [&scale, &offset, &mean, &variance].iter().all(|numbers| numbers.is_some());
                if !is_known || norm.training_momentum.is_some() {
                    return self.batch_normalization(norm);
                }
                let (scale, offset, mean, variance) = (scale?, offset?, mean?, variance?);
                let factor: Vec<f32> = (0..scale.len())
                    .map(|c| (f64::from(scale[c]) / (f64::from(variance[c]) + norm.epsilon).sqrt()) as f32)
                    .collect();
                let term: Vec<f32> = (0..scale.len())
                    .map(|c| {
                        let factor = f64::from(scale[c]) / (f64::from(variance[c]) + norm.epsilon).sqrt();
                        (f64::from(offset[c]) - f64::from(mean[c]) * factor) as f32
                    })
                    .collect();
                let (x, to) = (self.try_input(0)?, self.output()?);
                let mut shape = vec![1; self.net.shape(x).len().saturating_sub(1)];
                *shape.first_mut()? = scale.len() as i64;
                self.is_f32(x).then_some(())?;
                let name = self.node.place.node.clone();
                let factor = self.net.add_constant(&format!("{name}.factor"), &shape, &factor);
                let term = self.net.add_constant(&format!("{name}.term"), &shape, &term);
                self.push(Kind::Map(add(mul(input(0), input(1)), input(2))), &[x, factor, term], to);
                Some(())
            }
            Op::Conv(conv) => {
                let found = conv.shape(self.graph_shape(0)?, self.graph_shape(1)?).ok()?;
                self.convolution(&found, false).or_else(|| self.convolution_by_products(&found))
            }
            Op::ConvTranspose(conv) => {
                let found = conv.shape(self.graph_shape(0)?, self.graph_shape(1)?).ok()?;
                let plain = if found.groups == 1 { self.convolution(&found, true) } else { None };
                plain.or_else(|| self.transposed_convolution(&found))
            }
            Op::MatMul(_) => {
                let (a, b, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
                self.product_of(a, b, to).or_else(|| self.product_of_others())
            }
            Op::Gemm(gemm) => {
                let [m, n, k] = gemm.sizes(self.graph_shape(0)?, self.graph_shape(1)?).ok()?;
                let (m, n, k) = (m as i64, n as i64, k as i64);
                let (mut a, b, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
                if !self.is_f32(a) || !self.is_f32(b) {
                    return self.gemm_of_others(gemm, [m, n, k]);
                }
                if gemm.transposes_a {
                    a = self.step("a", Kind::Transpose(vec![1, 0]), &[a], &[m, k]);
                }
                let kind = Kind::Product { turned: gemm.transposes_b, heads: None };
                let c = self.try_input(2).filter(|_| gemm.beta != 0.0);
                if c.is_none() && gemm.alpha == 1.0 {
                    self.push(kind, &[a, b], to);
                    return Some(());
                }
                let product = self.step("product", kind, &[a, b], &[m, n]);
                let scaled = mul(input(0), number(gemm.alpha));
                match c {
                    None => self.push(Kind::Map(scaled), &[product], to),
                    Some(c) => {
                        let sum = add(scaled, mul(input(1), number(gemm.beta)));
                        self.push(Kind::Map(sum), &[product, c], to)
                    }
                };
                Some(())
            }
            Op::Pool(pool) => {
                let x = self.try_input(0)?;
                let geometry = pool.geometry(self.graph_shape(0)?).ok()?;
                if let (PoolKind::Max { columns_first }, Some(Some(_))) = (pool.kind, self.outputs.get(1)) {
                    return self.pooled_places(&geometry, columns_first);
                }
                let to = self.output()?;
                let is_fitting = matches!(pool.kind, PoolKind::Max { .. }) && self.has_code(x) || self.is_real(x);
                is_fitting.then_some(())?;
                let with = |image: &[i64], rest: i64| [&[rest, rest][..], image].concat();
                let windows = Windows {
                    kernel: with(&ints(&geometry.kernel), 1),
                    strides: with(&ints(&geometry.strides), 1),
                    dilations: with(&ints(&geometry.dilations), 1),
                    before: with(&geometry.begins, 0),
                };
                match pool.kind {
                    PoolKind::Max { .. } => {
                        self.push(Kind::Window(ReduceOp::Max, windows), &[x], to);
                    }
                    PoolKind::Average { counts_borders } => {
                        let shape = self.net.shape(to).to_vec();
                        let sum = self.step("sum", Kind::Window(ReduceOp::Sum, windows), &[x], &shape);
                        let image = self.shape(0)?[2..].to_vec();
                        // Places of a window that count, of each dimension.
                        let counts = |d: usize| -> Vec<i64> {
                            let (low, high) = match counts_borders {
                                true => (-geometry.begins[d], image[d] + geometry.ends[d]),
                                false => (0, image[d]),
                            };
                            let place = |o: i64, k: i64| {
                                o * geometry.strides[d] as i64 + k * geometry.dilations[d] as i64 - geometry.begins[d]
                            };
                            let inside = |o: i64| {
                                (0..geometry.kernel[d] as i64).filter(|&k| (low..high).contains(&place(o, k))).count()
                            };
                            (0..shape[d + 2]).map(|o| inside(o) as i64).collect()
                        };
                        let of_each: Vec<Vec<i64>> = (0..image.len()).map(counts).collect();
                        let is_even = of_each.iter().all(|counts| counts.iter().all(|n| *n == counts[0]));
                        if is_even {
                            let n: i64 = of_each.iter().map(|counts| counts[0]).product();
                            self.push(Kind::Map(scalar::part(input(0), n as f64, self.decides())), &[sum], to);
                        } else {
                            let mut factors = vec![1.0];
                            for counts in &of_each {
                                factors =
                                    factors.iter().flat_map(|f| counts.iter().map(move |n| f / *n as f64)).collect();
                            }
                            let factors = self.real_constant("factors", x, &shape[2..], &factors);
                            self.push(Kind::Map(mul(input(0), input(1))), &[sum, factors], to);
                        }
                    }
                    PoolKind::Lp { p } => {
                        let shape = self.net.shape(to).to_vec();
                        let norm = self.norm(x, Kind::Window(ReduceOp::Sum, windows), p, &shape)?;
                        self.push(Kind::View, &[norm], to);
                    }
                }
                Some(())
            }
            Op::GlobalPool(pool) => {
                let (x, to) = (self.try_input(0)?, self.output()?);
                self.is_real(x).then_some(())?;
                let shape = self.net.shape(x).to_vec();
                let axes: Vec<usize> = (2..shape.len()).collect();
                match pool.kind {
                    PoolKind::Max { .. } => {
                        self.push(Kind::Reduce(ReduceOp::Max, axes), &[x], to);
                    }
                    PoolKind::Average { .. } => {
                        let n: i64 = shape[2..].iter().product();
                        let out = self.net.shape(to).to_vec();
                        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, axes), &[x], &out);
                        self.push(Kind::Map(scalar::part(input(0), n as f64, self.decides())), &[sum], to);
                    }
                    PoolKind::Lp { p } => {
                        let out = self.net.shape(to).to_vec();
                        let norm = self.norm(x, Kind::Reduce(ReduceOp::Sum, axes), p, &out)?;
                        self.push(Kind::View, &[norm], to);
                    }
                }
                Some(())
            }
            Op::Reduce(reduce) => self.reduced(reduce),
            Op::Softmax(softmax) => {
                let (x, to) = (self.try_input(0)?, self.output()?);
                if softmax.kind == SoftmaxKind::Hard {
                    return self.hardmax(softmax);
                }
                self.is_real(x).then_some(())?;
                let (outer, n, inner) = softmax.split(self.graph_shape(0)?).ok()?;
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
                let is_log = softmax.kind == SoftmaxKind::Log;
                let power = self.step("power", Kind::Map(of(UnaryOp::Exp, below.clone())), &[x, largest], &work);
                let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, vec![axis]), &[power], &kept);
                let (value, from) = match is_log {
                    true => (sub(below, of(UnaryOp::Log, input(2))), vec![x, largest, sum]),
                    false => (div(input(0), input(1)), vec![power, sum]),
                };
                if work == shape {
                    self.push(Kind::Map(value), &from, to);
                } else {
                    let result = self.step("result", Kind::Map(value), &from, &work);
                    self.push(Kind::View, &[result], to);
                }
                Some(())
            }
            Op::LayerNormalization(norm) => {
                let (x, to) = (self.try_input(0)?, self.output()?);
                self.is_real(x).then_some(())?;
                self.layer_statistics(norm)?;
                let rank = self.shape(0)?.len();
                let axis = axis(norm.axis, rank).ok()?;
                let normal = self.normalised(x, (axis..rank).collect(), norm.epsilon)?;
                self.scaled(normal, self.try_input(1), self.try_input(2), to)
            }
            Op::InstanceNormalization(norm) => {
                let (x, to) = (self.try_input(0)?, self.output()?);
                let shape = self.shape(0)?;
                let normal = self.normalised(x, (2..shape.len()).collect(), norm.epsilon)?;
                let mut channels = vec![1; shape.len() - 1];
                channels[0] = shape[1];
                let (scale, offset) = (self.try_input(1)?, self.try_input(2)?);
                let scale = self.step("scale", Kind::View, &[scale], &channels);
                let offset = self.step("offset", Kind::View, &[offset], &channels);
                self.scaled(normal, Some(scale), Some(offset), to)
            }
            Op::RmsNormalization(norm) => {
                let (x, to) = (self.try_input(0)?, self.output()?);
                self.is_real(x).then_some(())?;
                let shape = self.shape(0)?;
                let rank = shape.len();
                let axis = axis(norm.axis, rank).ok()?;
                let mut kept = shape.clone();
                kept[axis..].fill(1);
                let n: i64 = shape[axis..].iter().product();
                let square = self.step("square", Kind::Map(mul(input(0), input(0))), &[x], &shape);
                let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, (axis..rank).collect()), &[square], &kept);
                let root = add(mul(input(1), number(1.0 / n as f64)), number(norm.epsilon));
                let value = mul(input(0), div(number(1.0), of(UnaryOp::Sqrt, root)));
                match self.try_input(1) {
                    None => self.push(Kind::Map(value), &[x, sum], to),
                    Some(scale) => self.push(Kind::Map(mul(value, input(2))), &[x, sum, scale], to),
                };
                Some(())
            }
            Op::Recurrent(recurrent) => self.recurrent(recurrent),
            Op::Lrn(lrn) => {
                let (x, to) = (self.try_input(0)?, self.output()?);
                self.is_real(x).then_some(())?;
                let shape = self.shape(0)?;
                let ones = vec![1; shape.len()];
                let (mut kernel, mut before) = (ones.clone(), vec![0; shape.len()]);
                kernel[1] = lrn.size as i64;
                before[1] = (lrn.size as i64 - 1) / 2;
                let windows = Windows { kernel, strides: ones.clone(), dilations: ones, before };
                let square = self.step("square", Kind::Map(mul(input(0), input(0))), &[x], &shape);
                let sum = self.step("sum", Kind::Window(ReduceOp::Sum, windows), &[square], &shape);
                let energy = add(mul(input(1), number(lrn.alpha / lrn.size as f64)), number(lrn.bias));
                let power = of(UnaryOp::Exp, mul(of(UnaryOp::Log, energy), number(-lrn.beta)));
                self.push(Kind::Map(mul(input(0), power)), &[x, sum], to);
                Some(())
            }
            Op::Resize(resize) if resize.coordinates == Coordinates::TfCropAndResize => self.cropped(resize),
            Op::Resize(resize) => self.resized(resize),
            Op::Select(op) => self.selected(op.refused),
            Op::PairwiseCoupling(coupling) => self.coupled(coupling.n_classes),
            Op::MelWeightMatrix(_) => self.mel_weights(),
            Op::ArgReduce(reduce) => self.arg_reduce(reduce),
            Op::TreeEnsemble(trees) => self.trees(trees),
            Op::OneHot(one_hot) => self.one_hot(one_hot),
            Op::Cumulative(running) => self.running_along(running),
            Op::Attention(attention) => self.attention(attention),
            Op::GroupQueryAttention(op) => self.grouped_attention(op),
            Op::RotaryEmbedding(rotary) => self.rotated(rotary),
            Op::Trilu(trilu) => self.trilu(trilu),
            Op::Tile(_) => self.tiled(),
            Op::CenterCropPad(crop) => self.centred(crop),
            Op::LpNormalization(norm) => self.lp_normalization(norm),
            Op::MeanVarianceNormalization(norm) => self.mean_variance(norm),
            Op::ReverseSequence(reverse) => self.reversed(reverse),
            Op::TensorScatter(scatter) => self.cached(scatter),
            Op::Compress(compress) => self.compressed(compress.axis),
            Op::NegativeLogLikelihoodLoss(loss) => self.loss(loss, false),
            Op::SoftmaxCrossEntropyLoss(loss) => self.loss(&loss.0, true),
            Op::GridSample(sample) => self.grid_sample(sample),
            Op::AffineGrid(grid) => self.affine_grid(grid),
            Op::Dft(dft) => self.fourier(dft),
            Op::Stft(stft) => self.windows_of_fourier(stft),
            Op::RoiAlign(align) => self.regions(align),
            Op::Det(_) => self.determinants(),
            Op::BitCast(_) => self.bits_as(),
            Op::MaxUnpool(unpool) => self.unpooled(unpool),
            Op::Col2Im(blocks) => self.blocks_added(blocks),
            Op::ConvInteger(conv) => {
                let found = conv.0.shape(self.graph_shape(0)?, self.graph_shape(1)?).ok()?;
                self.integer_convolution(&conv.0).or_else(|| self.whole_convolution(&found))
            }
            Op::QLinearMatMul(_) => self.quantized_matrices(),
            Op::QLinearConv(conv) => {
                let found = conv.0.shape(self.graph_shape(0)?, self.graph_shape(3)?).ok()?;
                self.quantized_convolution(&found)
            }
            Op::GroupNormalization(norm) => self.group_normalization(norm),
            Op::Einsum(einsum) => self.einsum(einsum).or_else(|| self.sums_by_indices(einsum)),
            Op::QuantizeLinear(quantize) => self.quantize(*quantize),
            Op::DequantizeLinear(dequantize) => self.dequantize(dequantize.0),
            Op::DynamicQuantizeLinear(_) => self.quantize_by_range(),
            Op::MatMulNBits(op) => self.packed_product(op),
            Op::GatherBlockQuantized(op) => self.packed_slices(op),
            Op::MatMulInteger(_) => {
                self.integer_product().or_else(|| self.quantized_product()).or_else(|| self.whole_product())
            }
            Op::DepthToSpace(depth) => {
                let (x, to) = (self.try_input(0)?, self.output()?);
                self.has_code(x).then_some(())?;
                let &[n, c, h, w] = &self.shape(0)?[..] else { return None };
                let b = depth.block as i64;
                let (split, order) = match depth.channels_first {
                    true => ([n, c / (b * b), b, b, h, w], vec![0, 1, 4, 2, 5, 3]),
                    false => ([n, b, b, c / (b * b), h, w], vec![0, 3, 4, 1, 5, 2]),
                };
                self.regrouped(x, &split, order, to)
            }
            Op::SpaceToDepth(depth) => {
                let (x, to) = (self.try_input(0)?, self.output()?);
                self.has_code(x).then_some(())?;
                let &[n, c, h, w] = &self.shape(0)?[..] else { return None };
                let b = depth.block as i64;
                let order = if depth.channels_first { vec![0, 1, 3, 5, 2, 4] } else { vec![0, 3, 5, 1, 2, 4] };
                self.regrouped(x, &[n, c, h / b, b, w / b, b], order, to)
            }
            _ => None,
        }
    }

    /// Borders of a known number, or of elements that lie on a line.
    fn padded(&mut self, pad: &Pad) -> Option<()> {
        let borders = pad.borders(Inputs(&self.facts())).ok()?;
        let fill = match &pad.attributes {
            Some((_, fill)) => *fill,
            None if self.try_input(2).is_some() => match self.net.literal(self.try_input(2)?)? {
                Expr::Const(fill) => fill,
                _ => return None,
            },
            None => 0.0,
        };
        let (from, to) = (self.try_input(0)?, self.output()?);
        match pad.mode {
            PadMode::Constant => self.moved(Kind::Pad(borders.iter().map(|b| b.0).collect(), fill), from, to),
            PadMode::Reflect => self.reflected(from, &borders, to),
            mode => {
                let from_shape = self.shape(0)?;
                let to_shape = self.net.shape(to).to_vec();
                let place = |d: usize, at: i64| {
                    let n = from_shape[d];
                    let at = at - borders[d].0;
                    match mode {
                        PadMode::Edge => at.clamp(0, n - 1),
                        _ => at.rem_euclid(n),
                    }
                };
                let line = |d: usize| match borders[d] {
                    (0, 0) => Some(Line::SAME),
                    _ => Line::through(&(0..to_shape[d]).map(|at| place(d, at)).collect::<Vec<_>>()),
                };
                let lines = (0..to_shape.len()).map(line).collect::<Option<Vec<_>>>()?;
                self.moved(Kind::Pick(lines), from, to)
            }
        }
    }

    /// Lowers to one position of a dimension, without that dimension.
    fn part(&mut self, from: ValueId, axis: usize, place: i64, to: ValueId) -> Option<()> {
        self.has_code(from).then_some(())?;
        let mut shape = self.net.shape(from).to_vec();
        let mut parts = vec![(0, 1); shape.len()];
        parts[axis].0 = if place < 0 { place + shape[axis] } else { place };
        shape[axis] = 1;
        let part = self.step("part", Kind::Slice(parts), &[from], &shape);
        self.push(Kind::View, &[part], to);
        Some(())
    }

    /// Elements at the numbers of `index` along a dimension.
    fn gathered(&mut self, from: ValueId, index: ValueId, axis: usize, by_element: bool, to: ValueId) -> Option<()> {
        (self.has_code(from) && self.is_whole(index)).then_some(())?;
        self.push(Kind::Gather { axis, by_element }, &[from, index], to);
        Some(())
    }

    /// Slices at known tuples of places, without dimensions that both have in common.
    fn gathered_by_tuples(&mut self, n_batch_dims: usize) -> Option<()> {
        let (from, index, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let (shape, tuples) = (self.shape(0)?, self.shape(1)?);
        let numbers = self.net.value(index).constant.as_ref().filter(|_| n_batch_dims == 0)?.i64s();
        let n = *tuples.last()? as usize;
        self.has_code(from).then_some(())?;
        let flat = |tuple: &[i64]| {
            let place =
                |at: i64, (place, extent): (&i64, &i64)| at * extent + if *place < 0 { place + extent } else { *place };
            tuple.iter().zip(&shape).fold(0, place)
        };
        let places: Vec<i64> = numbers.chunks(n).map(flat).collect();
        let inner: i64 = shape[n..].iter().product();
        let outer: i64 = shape[..n].iter().product();
        if places.iter().copied().eq(0..outer) {
            self.push(Kind::View, &[from], to);
            return Some(());
        }
        let table = self.step("table", Kind::View, &[from], &[outer, inner]);
        let name = format!("{}.places", self.node.place.node);
        let list = self.net.add_value(&name, DType::I64, &[places.len() as i64]);
        let bytes: Vec<u8> = places.iter().flat_map(|place| place.to_le_bytes()).collect();
        self.net.values[list.0].constant = Tensor::new(self.net.value(list).ty(), bytes.into());
        let kind = Kind::Gather { axis: 0, by_element: false };
        let rows = self.step("rows", kind, &[table, list], &[places.len() as i64, inner]);
        self.push(Kind::View, &[rows], to);
        Some(())
    }

    /// A tensor with a part of some dimensions replaced, as where a slice is assigned to.
    fn box_replaced(&mut self) -> Option<()> {
        let (from, index, new, to) = (self.try_input(0)?, self.try_input(1)?, self.try_input(2)?, self.output()?);
        let (shape, n) = (self.shape(0)?, *self.shape(1)?.last()? as usize);
        let numbers = self.net.value(index).constant.as_ref()?.i64s();
        (self.has_code(from) && n > 0).then_some(())?;
        let from_start = |(at, extent): (&i64, &i64)| if *at < 0 { at + extent } else { *at };
        let tuples: Vec<Vec<i64>> =
            numbers.chunks(n).map(|tuple| tuple.iter().zip(&shape).map(from_start).collect()).collect();
        let (first, last) = (tuples.first()?, tuples.last()?);
        let sizes: Vec<i64> = first.iter().zip(last).map(|(first, last)| last - first + 1).collect();
        let is_inside = |d: usize| first[d] >= 0 && sizes[d] > 0 && last[d] < shape[d];
        (0..n).all(is_inside).then_some(())?;
        // All places of the box, in order.
        let place = |at: i64| {
            let behind = |d: usize| sizes[d + 1..].iter().product::<i64>();
            (0..n).map(|d| first[d] + at / behind(d) % sizes[d]).collect::<Vec<i64>>()
        };
        let n_places = sizes.iter().product::<i64>();
        (n_places == tuples.len() as i64 && tuples.iter().zip(0..).all(|(t, at)| *t == place(at))).then_some(())?;
        // Each element is one of the box, with a border around it, or an old one.
        let mut starts = first.clone();
        starts.resize(shape.len(), 0);
        let is_part = |d: usize| d < n && sizes[d] < shape[d];
        let mask_shape: Vec<i64> = (0..shape.len()).map(|d| if is_part(d) { shape[d] } else { 1 }).collect();
        let is_new = |at: i64| {
            let at_dim = |d: usize| at / mask_shape[d + 1..].iter().product::<i64>() % mask_shape[d];
            (0..n).filter(|&d| is_part(d)).all(|d| (0..sizes[d]).contains(&(at_dim(d) - first[d])))
        };
        let mask: Vec<u8> = (0..mask_shape.iter().product()).map(|at| u8::from(is_new(at))).collect();
        let inner = [&sizes[..], &shape[n..]].concat();
        let name = format!("{}.is_new", self.node.place.node);
        let is_new = self.net.add_value(&name, DType::Bool, &mask_shape);
        self.net.values[is_new.0].constant = Tensor::new(self.net.value(is_new).ty(), mask.into());
        let new = self.step("new", Kind::View, &[new], &inner);
        let new = self.step("bordered", Kind::Pad(starts, 0.0), &[new], &shape);
        self.push(Kind::Map(scalar::choose(input(0), input(1), input(2))), &[is_new, new, from], to);
        Some(())
    }

    /// A tensor with its borders mirrored.
    fn reflected(&mut self, mut from: ValueId, borders: &[(i64, i64)], to: ValueId) -> Option<()> {
        self.is_f32(from).then_some(())?;
        let mut shape = self.net.shape(from).to_vec();
        for (d, &(before, after)) in borders.iter().enumerate().filter(|(_, border)| **border != (0, 0)) {
            let n = shape[d];
            ((0..n).contains(&before) && (0..n).contains(&after)).then_some(())?;
            let part = |job: &mut Self, first: i64, n: i64| {
                let mut parts = vec![(0, 1); shape.len()];
                parts[d] = (first, -1);
                let mut own = shape.clone();
                own[d] = n;
                (n > 0).then(|| job.step("border", Kind::Slice(parts), &[from], &own))
            };
            let ahead = part(self, before, before);
            let behind = part(self, n - 2, after);
            let all: Vec<ValueId> = [ahead, Some(from), behind].into_iter().flatten().collect();
            shape[d] = n + before + after;
            from = self.step("padded", Kind::Concat(d), &all, &shape);
        }
        self.push(Kind::View, &[from], to);
        Some(())
    }

    /// A tensor in another shape, its dimensions in another order, in the output's shape.
    fn regrouped(&mut self, x: ValueId, split: &[i64], order: Vec<usize>, to: ValueId) -> Option<()> {
        let turned: Vec<i64> = order.iter().map(|&d| split[d]).collect();
        let x = self.step("split", Kind::View, &[x], split);
        let x = self.step("turned", Kind::Transpose(order), &[x], &turned);
        self.push(Kind::View, &[x], to);
        Some(())
    }

    /// Elements at other places.
    pub(crate) fn moved(&mut self, kind: Kind, from: ValueId, to: ValueId) -> Option<()> {
        self.has_code(from).then_some(())?;
        self.push(kind, &[from], to);
        Some(())
    }

    /// Logarithms of sums of powers along dimensions, without overflow.
    pub(crate) fn log_of_sum(&mut self, x: ValueId, axes: Vec<usize>, kept: &[i64], to: ValueId) -> Option<()> {
        self.is_real(x).then_some(())?;
        let shape = self.net.shape(x).to_vec();
        let largest = self.step("largest", Kind::Reduce(ReduceOp::Max, axes.clone()), &[x], kept);
        // Where all are minus infinity, so is the result; where one is infinite, too.
        let finite = scalar::clip(input(1), f32::MIN.into(), f32::MAX.into());
        let power = of(UnaryOp::Exp, sub(input(0), finite.clone()));
        let power = self.step("power", Kind::Map(power), &[x, largest], &shape);
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, axes), &[power], kept);
        let value = add(of(UnaryOp::Log, input(0)), finite);
        let value = self.step("value", Kind::Map(value), &[sum, largest], kept);
        self.push(Kind::View, &[value], to);
        Some(())
    }

    /// Mean 0 and variance 1 along dimensions.
    pub(crate) fn normalised(&mut self, x: ValueId, axes: Vec<usize>, epsilon: f64) -> Option<ValueId> {
        self.is_real(x).then_some(())?;
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
        Some(self.step("normal", Kind::Map(mul(input(0), input(1))), &[apart, factor], &shape))
    }

    /// Times a scale, plus an offset, which may be left out.
    pub(crate) fn scaled(
        &mut self,
        x: ValueId,
        scale: Option<ValueId>,
        offset: Option<ValueId>,
        to: ValueId,
    ) -> Option<()> {
        let inputs: Vec<ValueId> = [Some(x), scale, offset].into_iter().flatten().collect();
        let scaled = if scale.is_some() { mul(input(0), input(1)) } else { input(0) };
        let value = if offset.is_some() { add(scaled, input(inputs.len() - 1)) } else { scaled };
        self.push(Kind::Map(value), &inputs, to);
        Some(())
    }

    /// A convolution over one or two dimensions, with its bias added behind it.
    fn convolution(&mut self, found: &ConvShape, transposed: bool) -> Option<()> {
        let (mut x, mut w, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        (self.is_f32(x) && self.is_f32(w)).then_some(())?;
        let rank = found.geometry.kernel.len();
        let kind = Kind::Conv(window_of(found, transposed)?);
        let out = self.net.shape(to).to_vec();
        let mut shape = out.clone();
        if rank == 1 {
            let with_rows = |shape: &[i64]| [&shape[..2], &[1], &shape[2..]].concat();
            let (image, weights) = (with_rows(&self.shape(0)?), with_rows(&self.shape(1)?));
            x = self.step("image", Kind::View, &[x], &image);
            w = match self.net.numbers(w) {
                Some(numbers) => self.net.add_constant(&format!("{}.w", self.node.place.node), &weights, &numbers),
                None => self.step("weights", Kind::View, &[w], &weights),
            };
            shape = with_rows(&out);
        }
        let bias = self.try_input(2);
        let mut last = if bias.is_none() && rank == 2 { to } else { self.value("conv", DType::F32, &shape) };
        self.push(kind, &[x, w], last);
        if let Some(bias) = bias {
            let channels = [self.net.value(bias).n_elements(), 1, 1];
            let bias = match self.net.numbers(bias) {
                Some(numbers) => self.net.add_constant(&format!("{}.b", self.node.place.node), &channels, &numbers),
                None => self.step("bias", Kind::View, &[bias], &channels),
            };
            let sum = if rank == 2 { to } else { self.value("sum", DType::F32, &shape) };
            last = self.push(Kind::Map(add(input(0), input(1))), &[last, bias], sum);
        }
        if rank == 1 {
            self.push(Kind::View, &[last], to);
        }
        Some(())
    }

    /// The graph that the node is of.
    pub(crate) fn graph(&self) -> &Graph {
        self.graph
    }

    /// A product of matrices or of many.
    pub(crate) fn product_of(&mut self, a: ValueId, b: ValueId, to: ValueId) -> Option<()> {
        (self.is_f32(a) && self.is_f32(b)).then_some(())?;
        let found = product_shape(self.graph_shape(0)?, self.graph_shape(1)?).ok()?;
        let [m, n, k] = found.sizes.map(|size| size as i64);
        let count = |batch: &[usize]| batch.iter().product::<usize>() as i64;
        let n_products = count(&found.batch);
        let [n_left, n_right] = found.batches.each_ref().map(|batch| count(batch));
        let mut factors = [a, b];
        let product = Kind::Product { turned: false, heads: None };
        let (kind, left, right, out) = if n_right == 1 {
            // One matrix for all: they are the rows of one product.
            (product, vec![n_products * m, k], vec![k, n], vec![n_products * m, n])
        } else if n_left == 1 && [m, n, k, n_products].iter().all(|&size| size > 0) {
            // One matrix for all: the weights of a convolution of images, by single elements.
            factors.reverse();
            let kind = Convolution {
                groups: 1,
                interleaved: false,
                strides: [1; 2],
                dilations: [1; 2],
                before: [0; 2],
                after: [0; 2],
                transposed: false,
            };
            (Kind::Conv(kind), vec![n_products, k, 1, n], vec![m, k, 1, 1], vec![n_products, m, 1, n])
        } else {
            for (factor, batch, rows, columns) in [(0, n_left, m, k), (1, n_right, k, n)] {
                if batch < n_products {
                    let sizes = [&ints(&found.batch)[..], &[rows, columns]].concat();
                    factors[factor] = self.step("repeated", Kind::Map(input(0)), &[factors[factor]], &sizes);
                }
            }
            (product, vec![n_products, m, k], vec![n_products, k, n], vec![n_products, m, n])
        };
        let viewed = |job: &mut Self, id: ValueId, what: &str, shape: &[i64]| {
            if job.net.shape(id) == shape {
                return id;
            }
            if let Some(tensor) = job.net.value(id).constant.clone() {
                let name = format!("{}.{what}", job.node.place.node);
                let new = job.net.add_value(&name, DType::F32, shape);
                let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
                job.net.values[new.0].constant = Some(tensor.reshaped(shape));
                return new;
            }
            job.step(what, Kind::View, &[id], shape)
        };
        let factors = [viewed(self, factors[0], "a", &left), viewed(self, factors[1], "b", &right)];
        if self.net.shape(to) == out {
            self.push(kind, &factors, to);
        } else {
            let product = self.step("product", kind, &factors, &out);
            self.push(Kind::View, &[product], to);
        }
        Some(())
    }
}
