//! Import of a graph of many operators to a net of few kinds of operations.
//!
//! [`NodeImport::lower`] dispatches on the operator; there is a file of lowerings for each family. If a node
//! has no lowering, the reason is stored with it.

mod any_length;
mod any_scale;
mod attention;
mod call;
mod conv;
mod einsum;
mod elementwise;
mod fourier;
mod gather;
mod job;
mod movement;
mod norm;
mod pool;
mod product;
mod quantize;
mod random;
mod recurrent;
mod reduce;
mod repeat;
mod sample;
mod scatter;
mod softmax;
mod trees;
mod volumes;

use bytes::Bytes;
use tilewright_graph::op::{Coordinates, Fact, Inputs, Scatter, Unary};
use tilewright_graph::{DType, Graph, Node as GraphNode, Op, Tensor, TensorType};

use crate::half_precision::is_half;
use crate::net::{Evaluated, Kind, Net, Node, State, ValueId};
use crate::no_code::{Lowered, NoCode, Otherwise};
use crate::scalar;

pub(crate) use conv::window_of;
pub(crate) use gather::from_start;
pub(crate) use job::NodeImport;

/// Imports a specialised graph. A node without code becomes a host operator.
///
/// With `dots`, products of 8-bit integers with a constant operand stay integer products.
pub fn import(graph: &Graph, dots: bool) -> Net {
    let [open_size, second_size] = [graph.open_size, graph.second_size].map(|size| size.map(|size| size as i64));
    let mut net = Net { open_size, second_size, ..Net::default() };
    for (_, value) in graph.values() {
        let ty = value.ty.as_ref().expect("every value of a specialised graph has its type");
        let shape: Vec<i64> = ty.shape.iter().map(|&d| d as i64).collect();
        // Kernels keep numbers of 8 bits as f32.
        let (dtype, constant) = match (ty.dtype.is_float8(), &value.constant) {
            (true, constant) => (DType::F32, constant.as_ref().map(Tensor::widened)),
            (false, constant) => (ty.dtype, constant.clone()),
        };
        let id = net.add_value(&value.name, dtype, &shape);
        match constant {
            Some(constant) if value.varies.any() => net.varying.push((id, constant)),
            constant => net.values[id.0].constant = constant,
        }
    }
    net.inputs = graph.inputs.iter().map(|id| ValueId(id.0 as usize)).collect();
    net.outputs = graph.outputs.iter().map(|id| ValueId(id.0 as usize)).collect();
    for (_, node) in graph.nodes() {
        let inputs: Vec<Option<ValueId>> = node.inputs.iter().map(|id| id.map(|id| ValueId(id.0 as usize))).collect();
        // Unused outputs are omitted.
        let is_read = |id: &tilewright_graph::ValueId| !graph.value(*id).users.is_empty() || graph.outputs.contains(id);
        let outputs: Vec<Option<ValueId>> =
            node.outputs.iter().map(|id| id.filter(is_read).map(|id| ValueId(id.0 as usize))).collect();
        let mut job = NodeImport { graph, node, net: &mut net, inputs: inputs.clone(), outputs: outputs.clone(), dots };
        let n_nodes = job.net.nodes.len();
        // If the lowering fails, the intermediate values that it added stay unused.
        if let Err(reason) = job.lower() {
            job.net.nodes.truncate(n_nodes);
            job.inputs = inputs;
            // Outputs without elements are constants by now.
            job.outputs = outputs.into_iter().map(|id| id.filter(|id| !job.is_empty(*id))).collect();
            if job.evaluate().is_none() {
                job.host(reason);
            }
        }
    }
    keep_states(graph, &mut net);
    net.prune();
    net
}

/// Turns inputs of open length into states: those whose only reader concatenates them with new elements to an
/// output.
fn keep_states(graph: &Graph, net: &mut Net) {
    let (users, producers) = (net.users(), net.producers());
    let of_graph = |id: ValueId| graph.value(tilewright_graph::ValueId(id.0 as u32));
    for at in 0..net.nodes.len() {
        let node = &net.nodes[at];
        let (Kind::Concat(axis), &[Some(past), Some(new)]) = (&node.kind, &node.inputs[..]) else { continue };
        let (axis, value) = (*axis, node.output());
        // Exporters also concatenate an initially empty cache with an input, which leaves a view of the
        // whole. Caches of 16 bits are widened, and outputs rounded.
        let (mut past, mut reader) = (past, at);
        while let Some(link) = producers[past.0].filter(|&link| is_same(net, link) && users[past.0] == [reader]) {
            (past, reader) = (net.nodes[link].input(0), link);
        }
        // Outputs are views of computed values.
        let mut reached = vec![value];
        let mut next = 0;
        while let Some(id) = reached.get(next) {
            reached
                .extend(users[id.0].iter().filter(|user| is_same(net, **user)).map(|user| net.nodes[*user].output()));
            next += 1;
        }
        let Some(present) = reached.into_iter().find(|id| net.outputs.contains(id)) else { continue };
        let is_whole = net.shape(past).len() == net.shape(value).len();
        if !net.inputs.contains(&past) || !is_whole || !of_graph(past).varies.any() || users[past.0] != [reader] {
            continue;
        }
        let dtype = net.value(past).dtype;
        let [past_name, present_name] = [past, present].map(|id| of_graph(id).name.clone());
        let state = State { past: past_name, present: present_name, dtype, value, axis };
        net.states.push(state);
        net.inputs.retain(|id| *id != past);
        net.outputs.retain(|id| *id != present);
        (net.nodes[at].kind, net.nodes[at].inputs) = (Kind::Append(axis), vec![Some(new)]);
    }
}

/// Whether a node's output has the elements of its input: in another shape, or widened from 16 bits or
/// rounded to them.
fn is_same(net: &Net, at: usize) -> bool {
    let node = &net.nodes[at];
    match &node.kind {
        Kind::View => true,
        Kind::Map(value) if *value == scalar::input(0) => {
            let [from, to] = [node.input(0), node.output()].map(|id| net.value(id));
            from.shape == to.shape && (is_half(from.dtype) || is_half(to.dtype))
        }
        _ => false,
    }
}

impl NodeImport<'_> {
    /// Lowers the node to operations that have code, or returns the reason why there is none.
    fn lower(&mut self) -> Lowered {
        self.check_outputs()?;
        let node = self.node;
        match &node.op {
            // Elements.
            Op::Unary(Unary::Identity) => self.view(),
            Op::Unary(Unary::IsInf { .. }) => self.infinite(),
            Op::Unary(f) => self.unary(*f),
            Op::Binary(f) => self.binary(*f),
            Op::Variadic(f) => self.variadic(*f),
            Op::Clip(op) => self.clipped(op),
            Op::Where(_) => self.map(|x| Some(scalar::choose(x[0].clone(), x[1].clone(), x[2].clone()))),
            Op::Cast(_) => self.cast(),
            Op::BitCast(_) => self.bits_as(),
            Op::Dropout(_) => self.dropout(),
            Op::Trilu(op) => self.trilu(op),
            // Movement.
            Op::Reshape(_) | Op::Flatten(_) | Op::Squeeze(_) | Op::Unsqueeze(_) => self.view(),
            Op::Expand(_) => self.expanded(),
            Op::Transpose(op) => self.transposed(op),
            Op::Slice(op) => self.sliced(op),
            Op::Split(op) => self.split(op),
            Op::Concat(op) => self.concatenated(op),
            Op::Pad(op) => self.padded(op).otherwise(|| self.bordered(op)),
            Op::Tile(_) => self.tiled(),
            Op::CenterCropPad(op) => self.centred(op),
            Op::ReverseSequence(op) => self.reversed(op),
            Op::DepthToSpace(op) => self.depth_to_space(op),
            Op::SpaceToDepth(op) => self.space_to_depth(op),
            // Look-ups and writes.
            Op::Gather(op) => self.gather(op),
            Op::GatherElements(op) => self.gather_elements(op),
            Op::GatherNd(op) => {
                self.gathered_by_tuples(op.n_batch_dims).otherwise(|| self.gathered_at(op.n_batch_dims))
            }
            Op::GatherBlockQuantized(op) => self.packed_slices(op),
            Op::Compress(op) => self.compressed(op.axis),
            Op::OneHot(op) => self.one_hot(op),
            Op::ScatterNd(op) if op.reduction == Scatter::Replace => {
                self.box_replaced().otherwise(|| self.scatter_nd(Scatter::Replace))
            }
            Op::ScatterNd(op) => self.scatter_nd(op.reduction),
            Op::ScatterElements(op) => self.scatter_elements(op.axis, op.reduction),
            Op::TensorScatter(op) => self.cached(op),
            Op::MaxUnpool(op) => self.unpooled(op),
            Op::Col2Im(op) => self.blocks_added(op),
            // Reductions.
            Op::Reduce(op) => self.reduced(op),
            Op::ArgReduce(op) => self.arg_reduce(op),
            Op::TopK(op) => self.top_k(op),
            Op::Cumulative(op) => self.running_along(op),
            Op::Pool(op) => self.pooled(op),
            Op::GlobalPool(op) => self.pooled_globally(op),
            Op::Softmax(op) => self.softmax(op),
            Op::NegativeLogLikelihoodLoss(op) => self.loss(op, false),
            Op::SoftmaxCrossEntropyLoss(op) => self.loss(&op.0, true),
            op => self.lower_layer(op),
        }
    }

    /// Lowers a node whose operator is a network layer, or similar.
    fn lower_layer(&mut self, op: &Op) -> Lowered {
        match op {
            // Normalizations.
            Op::BatchNormalization(op) => self.batch_norm(op),
            Op::LayerNormalization(op) => self.layer_norm(op),
            Op::InstanceNormalization(op) => self.instance_norm(op),
            Op::GroupNormalization(op) => self.group_normalization(op),
            Op::RmsNormalization(op) => self.rms_norm(op),
            Op::LpNormalization(op) => self.lp_normalization(op),
            Op::MeanVarianceNormalization(op) => self.mean_variance(op),
            Op::Lrn(op) => self.lrn(op),
            // Products and convolutions.
            Op::Conv(op) => self.conv(op),
            Op::ConvTranspose(op) => self.conv_transpose(op),
            Op::ConvInteger(op) => self.conv_integer(op),
            Op::QLinearConv(op) => self.qlinear_conv(op),
            Op::MatMul(_) => self.matmul(),
            Op::Gemm(op) => self.gemm(op),
            Op::MatMulInteger(_) => self.matmul_integer(),
            Op::QLinearMatMul(_) => self.quantized_matrices(),
            Op::MatMulNBits(op) => self.packed_product(op),
            Op::Einsum(op) => self.einsum(op).otherwise(|| self.sums_by_indices(op)),
            // Conversions with a scale.
            Op::QuantizeLinear(op) => self.quantize(*op),
            Op::DequantizeLinear(op) => self.dequantize(op.0),
            Op::DynamicQuantizeLinear(_) => self.quantize_by_range(),
            // Images and signals.
            Op::Resize(op) if op.coordinates == Coordinates::TfCropAndResize => self.cropped(op),
            Op::Resize(op) => self.resized(op),
            Op::GridSample(op) => self.grid_sample(op),
            Op::AffineGrid(op) => self.affine_grid(op),
            Op::RoiAlign(op) => self.regions(op),
            Op::Dft(op) => self.fourier(op),
            Op::Stft(op) => self.windows_of_fourier(op),
            Op::MelWeightMatrix(_) => self.mel_weights(),
            // Networks, trees and the rest.
            Op::Attention(op) => self.attention(op),
            Op::GroupQueryAttention(op) => self.grouped_attention(op),
            Op::KeyMask(op) => self.key_mask(op.least),
            Op::RotaryEmbedding(op) => self.rotated(op),
            Op::Recurrent(op) => self.recurrent(op),
            Op::Loop(op) => self.loop_of(op),
            Op::Random(op) => self.random(op),
            Op::TreeEnsemble(op) => self.trees(op),
            Op::PairwiseCoupling(op) => self.coupled(op.n_classes),
            Op::Det(_) => self.determinants(),
            Op::Select(op) => self.selected(op.refused),
            _ => Err(NoCode::Operator),
        }
    }

    /// Checks that the used outputs besides the first have lowerings, and makes outputs without elements
    /// constants.
    fn check_outputs(&mut self) -> Lowered {
        let has_several = matches!(
            self.node.op,
            Op::Attention(_)
                | Op::GroupQueryAttention(_)
                | Op::BatchNormalization(_)
                | Op::Dropout(_)
                | Op::DynamicQuantizeLinear(_)
                | Op::LayerNormalization(_)
                | Op::Loop(_)
                | Op::Pool(_)
                | Op::Recurrent(_)
                | Op::SoftmaxCrossEntropyLoss(_)
                | Op::Split(_)
                | Op::TopK(_)
        );
        if let Some(at) = (1..self.outputs.len()).find(|&at| self.outputs[at].is_some() && !has_several) {
            return Err(NoCode::Output(at));
        }
        for to in &mut self.outputs {
            if let Some(id) = to.filter(|id| self.net.value(*id).n_elements() == 0) {
                self.net.values[id.0].constant = Tensor::new(self.net.value(id).ty(), Bytes::new());
                *to = None;
            }
        }
        match self.try_input(0) {
            Some(id) if self.is_empty(id) && !matches!(self.node.op, Op::Concat(_)) => {
                Err(NoCode::Empty(self.net.value(id).name.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Leaves the node to the reference, for this reason.
    fn host(&mut self, reason: NoCode) {
        let dummy = |net: &mut Net, at: usize, node: &GraphNode| {
            net.add_value(&format!("{}.unused{at}", node.place.node), DType::F32, &[0])
        };
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for (at, output) in self.outputs.iter().enumerate() {
            outputs.push(output.unwrap_or_else(|| dummy(self.net, at, self.node)));
        }
        self.net.nodes.push(Node {
            kind: Kind::Host(Box::new(Evaluated { op: self.node.op.clone(), reason })),
            inputs: self.inputs.clone(),
            outputs,
            origin: self.node.place.node.clone(),
        });
    }

    /// Evaluates the node if all of its inputs are known or have no elements; its outputs become constants.
    fn evaluate(&mut self) -> Option<()> {
        if self.node.op.is_random() {
            return None;
        }
        let empty = |ty: &TensorType| Tensor::new(ty.clone(), Bytes::new());
        let outputs: Vec<ValueId> = self.outputs.iter().flatten().copied().collect();
        let found: Vec<(ValueId, Tensor)> = if outputs.iter().all(|id| self.net.value(*id).n_elements() == 0) {
            outputs.iter().filter_map(|id| Some((*id, empty(&self.net.value(*id).ty())?))).collect()
        } else {
            let values: Vec<Option<Option<Tensor>>> = self
                .facts()
                .iter()
                .map(|fact| {
                    let Some(fact) = fact else { return Some(None) };
                    let known = fact.value.cloned().or_else(|| empty(fact.ty));
                    known.map(Some)
                })
                .collect();
            let values = values.into_iter().collect::<Option<Vec<Option<Tensor>>>>()?;
            let facts: Vec<_> =
                values.iter().map(|x| x.as_ref().map(|x| Fact { ty: x.ty(), value: Some(x) })).collect();
            let results = self.node.op.operation().evaluate(Inputs(&facts)).ok()?;
            let kept = |x: Tensor| if x.dtype().is_float8() { x.widened() } else { x };
            self.outputs.iter().zip(results).filter_map(|(id, x)| Some(((*id)?, kept(x)))).collect()
        };
        for (id, tensor) in found {
            self.net.values[id.0].constant = Some(tensor);
        }
        Some(())
    }
}
