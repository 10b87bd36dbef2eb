//! Mixtures of experts: feed-forward networks of which each token passes through a few (ONNX Runtime's `MoE`
//! and `QMoE`).

use super::repeat::{GraphDraft, carry_out, known, nowhere, with_all};
use super::{
    Binary, Body, Cast, Clip, Concat, Expand, Fact, Gather, GatherBlockQuantized, GatherElements, Import, Inputs, Loop,
    MatMul, MatMulNBits, OneHot, Op, Operation, Operator, Reduce, ReduceKind, Reshape, ScaledBlocks, Scatter,
    ScatterNd, Shape, Softmax, SoftmaxKind, TopK, Transpose, Unary, Unsqueeze,
};
use crate::error::{Place, invalid, unsupported};
use crate::specialise::infer_graph;
use crate::{DType, Graph, OpError, Tensor, TensorType, Value, ValueId};

/// Mixture of experts. Inputs: 0 the tokens `[…, hidden]`, 1 the router's scores `[tokens, experts]`, then
/// weights `[experts, wide, hidden]` and `[experts, hidden, inner]`, each followed by an optional bias;
/// weights of few bits have scales before the bias, and zero points as inputs 11 and 12.
#[derive(Debug, Clone)]
pub struct Experts {
    /// Number of experts that a token passes through.
    pub k: usize,
    /// Whether the shares of a token's experts add up to 1, rather than those of all experts.
    pub is_normalized: bool,
    /// Function between the two products.
    pub activation: ExpertActivation,
    /// Bits and block size of the weights (`QMoE`); size 0 for one scale a row.
    pub blocks: Option<[ScaledBlocks; 2]>,
    /// Whether activations may be rounded to 8 bits (`accuracy_level` 4).
    pub rounds: bool,
}

/// Function between the two products of an expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertActivation {
    /// A function of each number.
    Unary(Unary),
    /// Pairs `(g, l)` become `g · sigmoid(alpha · g) · (l + beta)`, with `g` and `l` bounded by `limit`.
    SwiGlu {
        /// Factor within the sigmoid.
        alpha: f64,
        /// Term added to the linear part.
        beta: f64,
        /// Largest magnitude; infinite for none.
        limit: f64,
    },
    /// None.
    Identity,
}

/// Sizes of a mixture of experts.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    hidden: usize,
    experts: usize,
    /// Rows of the first weights.
    wide: usize,
    /// Columns of the second weights.
    inner: usize,
}

/// Number of tokens that an expert processes at once. Products of as many rows take as long as reading the
/// weights from memory.
const BLOCK_ROWS: usize = 12;

/// Weights of a product: those of all experts, one behind the other, or of one of them.
#[derive(Clone, Copy)]
enum Weights {
    /// Rows of all experts.
    Rows,
    /// Columns of all experts.
    Columns,
    /// Weights of one expert, by its index.
    Of(usize),
}

const DOMAIN: &str = "com.microsoft";

pub(super) const ROWS: &[Operator] = &[
    Operator { domain: DOMAIN, name: "MoE", since: &[1], n_inputs: 5..=8, import: |node| import(node, None) },
    Operator {
        domain: DOMAIN,
        name: "QMoE",
        since: &[1],
        n_inputs: 6..=20,
        import: |node| {
            let kind = node.text_or("quant_type", "int")?;
            // -1 is the default: what is written in the model is not packed for one kind of machine.
            if kind != "int" || node.int_or("weights_prepacked", 0)? > 0 {
                return Err(unsupported!(
                    "quant_type={kind} or prepacked weights are not supported (give plain integers)"
                ));
            }
            let bits = node.int_or("expert_weight_bits", 4)?;
            let size = node.int_or("block_size", 0)?.max(0) as usize;
            let of = |name: &str| Ok(node.int(name)?.unwrap_or(bits));
            let own = [of("fc1_expert_weight_bits")?, of("fc2_expert_weight_bits")?];
            let _ = node.int("fc3_expert_weight_bits")?;
            if own.iter().any(|bits| ![2, 4, 8].contains(bits)) || size > 0 && (size < 16 || !size.is_power_of_two()) {
                return Err(unsupported!("weights of {own:?} bits in blocks of {size} are not supported"));
            }
            import(node, Some(own.map(|bits| ScaledBlocks { bits: bits as usize, size })))
        },
    },
];

fn import(node: &Import, blocks: Option<[ScaledBlocks; 2]>) -> Result<Op, OpError> {
    let k = node.int_or("k", 1)?;
    let k = usize::try_from(k).ok().filter(|k| *k > 0).ok_or_else(|| invalid!("k={k} is no number of experts"))?;
    let activation = match node.text_or("activation_type", "relu")?.as_str() {
        "relu" => ExpertActivation::Unary(Unary::Relu),
        "gelu" => ExpertActivation::Unary(Unary::Gelu { by_tanh: true }),
        "silu" => ExpertActivation::Unary(Unary::Swish { alpha: 1.0 }),
        "identity" => ExpertActivation::Identity,
        "swiglu" => match node.int_or("swiglu_fusion", 0)? {
            1 => ExpertActivation::SwiGlu {
                alpha: node.float_or("activation_alpha", 1.0)?,
                beta: node.float_or("activation_beta", 0.0)?,
                limit: node.float_or("swiglu_limit", f32::INFINITY)?,
            },
            other => return Err(unsupported!("swiglu_fusion={other} is not supported (interleave gates, 1)")),
        },
        other => return Err(unsupported!("activation_type={other} is not supported")),
    };
    for name in ["activation_alpha", "activation_beta", "swiglu_limit"] {
        let _ = node.float(name)?;
    }
    // ONNX Runtime's CPU kernels ignore `use_sparse_mixer`.
    let _ = (node.int("use_sparse_mixer")?, node.int("swiglu_fusion")?);
    if node.flag("swiglu_limit_after_activation", false)? {
        return Err(unsupported!("attribute `swiglu_limit_after_activation` is not supported"));
    }
    let rounds = node.int_or("accuracy_level", 0)? == 4;
    Ok(Experts { k, is_normalized: node.flag("normalize_routing_weights", false)?, activation, blocks, rounds }.into())
}

impl Experts {
    /// Indices of the inputs that one of the two products reads: weights, scales, bias and zero points.
    fn ports(&self, of: usize) -> [usize; 4] {
        match self.blocks {
            Some(_) => [2 + 3 * of, 3 + 3 * of, 4 + 3 * of, 11 + of],
            None => [2 + 2 * of, usize::MAX, 3 + 2 * of, usize::MAX],
        }
    }

    fn sizes(&self, inputs: &[Option<Fact<'_>>]) -> Result<Sizes, OpError> {
        let shape = |at: usize| Inputs(inputs).shape(at);
        let used: Vec<usize> = [0, 1].into_iter().chain([0, 1].into_iter().flat_map(|of| self.ports(of))).collect();
        if let Some(at) = (0..inputs.len()).find(|at| inputs[*at].is_some() && !used.contains(at)) {
            return Err(unsupported!("its input {} is not supported", at + 1));
        }
        let (x, scores, first, second) = (shape(0)?, shape(1)?, shape(self.ports(0)[0])?, shape(self.ports(1)[0])?);
        let each = |of: usize| self.blocks.map_or(1, |blocks| 8 / blocks[of].bits);
        let refuse = || invalid!("tokens {x:?}, scores {scores:?}, weights {first:?} and {second:?} do not fit");
        let (&[.., hidden], &[tokens, experts], &[e, wide, a], &[f, b, inner]) = (x, scores, first, second) else {
            return Err(refuse());
        };
        let (a, inner) = (a * each(0), inner * each(1));
        let parts = if matches!(self.activation, ExpertActivation::SwiGlu { .. }) { 2 } else { 1 };
        let n_tokens: usize = x[..x.len() - 1].iter().product();
        let fits = [tokens, e, f, a, b, wide] == [n_tokens, experts, experts, hidden, hidden, inner * parts];
        if !fits || self.k > experts || hidden * inner == 0 {
            return Err(refuse());
        }
        Ok(Sizes { tokens, hidden, experts, wide, inner })
    }

    /// Equivalent graph of other operators for inputs of these types. If few tokens pass through few experts,
    /// the weights of these are looked up. Of many tokens, `by_loops`, each expert processes its own in a
    /// loop, some rows at a time. Else all tokens pass through all experts, and shares of 0 leave most of
    /// them out. `is_open`: the number of tokens is any.
    ///
    /// # Errors
    /// If the inputs do not fit.
    pub(crate) fn graph(
        &self,
        inputs: &[Option<Fact<'_>>],
        place: &Place,
        is_open: bool,
        by_loops: bool,
    ) -> Result<Graph, OpError> {
        let sizes = self.sizes(inputs)?;
        let mut draft = GraphDraft { graph: Graph::default(), place };
        draft.graph.inputs = inputs.iter().map(|_| draft.graph.add_value(Value::default())).collect();
        let ids = draft.graph.inputs.clone();
        let mut job = Drawing { op: self, inputs, ids: ids.clone(), sizes, draft };
        let x = job.reshaped(ids[0], &[-1, sizes.hidden as i64]);
        let (shares, which) = job.routed(ids[1]);
        // Numbers of tokens in f16 are exact up to 2048 alone.
        let by_loops = by_loops && job.dtype() == DType::F32 && sizes.tokens > BLOCK_ROWS;
        let y = match () {
            () if !is_open && sizes.tokens * self.k < sizes.experts => job.of_chosen(x, shares, which),
            () if !is_open && by_loops && 2 * self.k <= sizes.experts => job.of_each(x, shares, which)?,
            () => job.of_all(x, shares, which)?,
        };
        let shape = job.draft.node(Shape { start: 0, end: None }.into(), &[ids[0]]);
        let y = job.draft.node(Reshape { shape: None, allow_zero: false }.into(), &[y, shape]);
        job.draft.graph.outputs = vec![y];
        Ok(job.draft.graph)
    }
}

/// Graph of a mixture of experts, or of a part of it, under construction.
struct Drawing<'a> {
    op: &'a Experts,
    inputs: &'a [Option<Fact<'a>>],
    /// Inputs of the operator as values of the graph.
    ids: Vec<ValueId>,
    sizes: Sizes,
    draft: GraphDraft<'a>,
}

impl Drawing<'_> {
    fn reshaped(&mut self, x: ValueId, shape: &[i64]) -> ValueId {
        let shape = self.draft.constant(Tensor::vector(shape));
        self.draft.node(Reshape { shape: None, allow_zero: false }.into(), &[x, shape])
    }

    fn widened(&mut self, x: ValueId, axes: &[i64]) -> ValueId {
        self.draft.node(Unsqueeze { axes: Some(axes.to_vec()) }.into(), &[x])
    }

    fn product_of(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.draft.node(Op::Binary(Binary::Mul), &[a, b])
    }

    fn summed(&mut self, x: ValueId, axis: i64) -> ValueId {
        let sum = Reduce { kind: ReduceKind::Sum, axes: Some(vec![axis]), keeps_dims: false, none_is_none: false };
        self.draft.node(sum.into(), &[x])
    }

    /// Input, if it is given.
    fn input(&self, at: usize) -> Option<ValueId> {
        self.inputs.get(at).copied().flatten().map(|_| self.ids[at])
    }

    /// Experts of each token `[tokens, k]`, and their shares.
    fn routed(&mut self, scores: ValueId) -> (ValueId, ValueId) {
        let top = TopK { k: Some(self.op.k), axis: -1, is_largest: true };
        let [best, which] = self.draft.pair(top.into(), &[scores]);
        let softmax = Op::from(Softmax { kind: SoftmaxKind::Soft, axis: -1, is_flat: false });
        if self.op.is_normalized {
            return (self.draft.node(softmax, &[best]), which);
        }
        let shares = self.draft.node(softmax, &[scores]);
        (self.draft.node(GatherElements { axis: -1 }.into(), &[shares, which]), which)
    }

    /// Applies the function of the experts along the last dimension, of `n` results; there are `outer`
    /// dimensions before it.
    fn activated(&mut self, x: ValueId, outer: usize, n: usize) -> ValueId {
        let (alpha, beta, limit) = match self.op.activation {
            ExpertActivation::Identity => return x,
            ExpertActivation::Unary(f) => return self.draft.node(Op::Unary(f), &[x]),
            ExpertActivation::SwiGlu { alpha, beta, limit } => (alpha, beta, limit),
        };
        let pairs = self.reshaped(x, &[vec![0; outer], vec![n as i64, 2]].concat());
        let [mut gate, mut linear] = [0, 1].map(|at| {
            let at = self.draft.number(at);
            self.draft.node(Gather { axis: -1 }.into(), &[pairs, at])
        });
        if limit.is_finite() {
            gate = self.draft.node(Clip { min: None, max: Some(limit) }.into(), &[gate]);
            linear = self.draft.node(Clip { min: Some(-limit), max: Some(limit) }.into(), &[linear]);
        }
        if beta != 0.0 {
            let dtype = self.dtype();
            let beta = self.draft.constant(Tensor::from_floats(dtype, [], &[beta]));
            linear = self.draft.node(Op::Binary(Binary::Add), &[linear, beta]);
        }
        let gate = self.draft.node(Op::Unary(Unary::Swish { alpha }), &[gate]);
        self.product_of(gate, linear)
    }

    /// Rows and columns of the weights of one of the two products.
    fn extents(&self, of: usize) -> [usize; 2] {
        let Sizes { hidden, wide, inner, .. } = self.sizes;
        [[wide, hidden], [hidden, inner]][of]
    }

    /// Bits and block size of the weights of a product, where one scale a row is one block of it.
    fn blocks(&self, of: usize) -> Option<ScaledBlocks> {
        let (blocks, [_, columns]) = (self.op.blocks?[of], self.extents(of));
        let size = if blocks.size > 0 { blocks.size } else { 1 << columns.trailing_zeros() };
        Some(ScaledBlocks { size, ..blocks })
    }

    /// Scales of the weights of a product, `[experts, rows, blocks]`.
    fn scales(&mut self, of: usize, blocks: ScaledBlocks, which: Weights) -> Option<ValueId> {
        let scales = self.chosen(self.op.ports(of)[1], which)?;
        let [rows, columns] = self.extents(of);
        let n_blocks = columns.div_ceil(blocks.size);
        if self.op.blocks?[of].size > 0 {
            return Some(scales);
        }
        let n = if matches!(which, Weights::Of(_)) { 1 } else { self.sizes.experts };
        let column = self.widened(scales, &[2]);
        let to = self.draft.constant(Tensor::vector(&[n as i64, rows as i64, n_blocks as i64]));
        Some(self.draft.node(Expand.into(), &[column, to]))
    }

    /// Input with something for each expert, if it is given, or its part for one expert.
    fn chosen(&mut self, at: usize, which: Weights) -> Option<ValueId> {
        let whole = self.input(at)?;
        let Weights::Of(expert) = which else { return Some(whole) };
        if let Some(tensor) = self.inputs[at].and_then(|fact| fact.value) {
            let part = tensor.rows(expert..expert + 1).expect("there is such an expert");
            return Some(self.draft.constant(part));
        }
        let at = self.draft.constant(Tensor::vector(&[expert as i64]));
        Some(self.draft.node(Gather { axis: 0 }.into(), &[whole, at]))
    }

    /// Products of the looked-up weights with `x` `[tokens, 1 or k, 1, columns]`: `[tokens, k, rows]`.
    fn looked_up(&mut self, of: usize, x: ValueId, which: ValueId) -> ValueId {
        let [weights, _, bias, zeros] = self.op.ports(of);
        let weights = self.input(weights).expect("there are weights");
        let own = match self.blocks(of) {
            None => self.draft.node(Gather { axis: 0 }.into(), &[weights, which]),
            Some(blocks) => {
                let (scales, zeros) = (self.scales(of, blocks, Weights::Rows), self.input(zeros));
                let op = GatherBlockQuantized { blocks, quantize_axis: 2, gather_axis: 0 };
                self.draft.join_by(op.into(), vec![Some(weights), Some(which), scales, zeros])
            }
        };
        let terms = self.product_of(own, x);
        let sums = self.summed(terms, -1);
        self.input(bias).map_or(sums, |bias| {
            let own = self.draft.node(Gather { axis: 0 }.into(), &[bias, which]);
            self.draft.node(Op::Binary(Binary::Add), &[sums, own])
        })
    }

    fn of_chosen(&mut self, x: ValueId, shares: ValueId, which: ValueId) -> ValueId {
        let x = self.widened(x, &[1, 2]);
        let sums = self.looked_up(0, x, which);
        let between = self.activated(sums, 2, self.sizes.inner);
        let between = self.widened(between, &[2]);
        let each = self.looked_up(1, between, which);
        let shares = self.widened(shares, &[2]);
        let scaled = self.product_of(each, shares);
        self.summed(scaled, 1)
    }

    /// Product of `x`, in a shape of two dimensions, with weights.
    ///
    /// # Errors
    /// If packed zero points cannot be joined.
    fn of_weights(&mut self, of: usize, x: ValueId, which: Weights) -> Result<ValueId, OpError> {
        let [weights, _, _, zeros] = self.op.ports(of);
        let weights = self.chosen(weights, which).expect("there are weights");
        let ([rows, columns], experts) = (self.extents(of), self.sizes.experts);
        let joins = matches!(which, Weights::Columns);
        let [n, k] = match which {
            Weights::Rows => [experts * rows, columns],
            Weights::Columns => [rows, experts * columns],
            Weights::Of(_) => [rows, columns],
        };
        let Some(blocks) = self.blocks(of) else {
            let order = if joins { vec![0, 2, 1] } else { vec![2, 0, 1] };
            let turn = Op::from(Transpose { order: Some(order) });
            // Loops compute anew what depends on constants alone.
            let turned = match self.draft.graph.value(weights).constant.clone() {
                Some(own) if matches!(which, Weights::Of(_)) => {
                    let fact = Some(Fact { ty: own.ty(), value: Some(&own) });
                    let turned = turn.operation().evaluate(Inputs(&[fact]))?.remove(0);
                    self.draft.constant(turned)
                }
                _ => self.draft.node(turn, &[weights]),
            };
            let matrix = self.reshaped(turned, &[k as i64, n as i64]);
            return Ok(self.draft.node(MatMul.into(), &[x, matrix]));
        };
        let n_blocks = k / blocks.size;
        let zeros = self.chosen(zeros, which);
        let scales = self.scales(of, blocks, which).ok_or_else(|| invalid!("its scales are missing"))?;
        let each = 8 / blocks.bits;
        if zeros.is_some()
            && (self.op.blocks.is_some_and(|own| own[of].size == 0) || joins && columns / blocks.size % each != 0)
        {
            return Err(unsupported!("zero points of blocks that share a byte between experts are not supported"));
        }
        let mut matrix = |id: ValueId, shape: &[usize]| {
            let order = Transpose { order: Some(vec![1, 0, 2]) };
            let id = if joins { self.draft.node(order.into(), &[id]) } else { id };
            let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
            self.reshaped(id, &shape)
        };
        let weights = matrix(weights, &[n, n_blocks, blocks.size / each]);
        let zeros = zeros.map(|zeros| matrix(zeros, &[n, n_blocks.div_ceil(each)]));
        let scales = matrix(scales, &[n, n_blocks]);
        let op = MatMulNBits { n, k, blocks, rounds: self.op.rounds };
        Ok(self.draft.join_by(op.into(), vec![Some(x), Some(weights), Some(scales), zeros]))
    }

    /// Shares of all experts in each token, `[tokens, experts]`, and ones for those that it passes through.
    fn placed(&mut self, shares: ValueId, which: ValueId) -> [ValueId; 2] {
        let dtype = self.dtype();
        let off_and_on = self.draft.constant(Tensor::from_floats(dtype, [2], &[0.0, 1.0]));
        let n = self.draft.number(self.sizes.experts as i64);
        let is_one = self.draft.node(OneHot { axis: -1 }.into(), &[which, n, off_and_on]);
        let shares = self.widened(shares, &[2]);
        let placed = self.product_of(is_one, shares);
        [self.summed(placed, 1), self.summed(is_one, 1)]
    }

    /// Passes the tokens of each expert through it in a loop of its own, which adds to the result of all.
    ///
    /// # Errors
    /// If zero points have no scales in blocks.
    fn of_each(&mut self, x: ValueId, shares: ValueId, which: ValueId) -> Result<ValueId, OpError> {
        let Sizes { tokens, hidden, experts, .. } = self.sizes;
        let [shares, is_one] =
            self.placed(shares, which).map(|id| self.draft.node(Transpose { order: Some(vec![1, 0]) }.into(), &[id]));
        let count = self.summed(is_one, 1);
        let mut count = self.draft.node(Cast { to: Some(DType::I64) }.into(), &[count]);
        for (f, by) in [(Binary::Add, BLOCK_ROWS - 1), (Binary::Div, BLOCK_ROWS)] {
            let by = self.draft.number(by as i64);
            count = self.draft.node(Op::Binary(f), &[count, by]);
        }
        // An expert's own tokens come first. The others have shares of 0, as have the places after them.
        let all = TopK { k: Some(tokens), axis: -1, is_largest: true };
        let [_, order] = self.draft.pair(all.into(), &[is_one]);
        let shares = self.draft.node(GatherElements { axis: -1 }.into(), &[shares, order]);
        let [order, shares] =
            [(order, DType::I64), (shares, self.dtype())].map(|(id, dtype)| self.in_blocks(id, dtype));
        let zero = self.draft.constant(Tensor::from_floats(self.dtype(), [1], &[0.0]));
        let whole = self.draft.constant(Tensor::vector(&[tokens as i64, hidden as i64]));
        let mut y = self.draft.node(Expand.into(), &[zero, whole]);
        for expert in 0..experts {
            let at = self.draft.number(expert as i64);
            let own = [count, order, shares].map(|id| self.draft.node(Gather { axis: 0 }.into(), &[id, at]));
            y = self.of_one(expert, own, x, y)?;
        }
        Ok(y)
    }

    fn dtype(&self) -> DType {
        self.inputs[0].expect("there are tokens").dtype()
    }

    /// Divides `[experts, tokens]` into blocks of rows, with zeros at the end of the last one:
    /// `[experts, blocks, rows]`.
    fn in_blocks(&mut self, mut id: ValueId, dtype: DType) -> ValueId {
        let Sizes { tokens, experts, .. } = self.sizes;
        let n_blocks = tokens.div_ceil(BLOCK_ROWS);
        let n_added = n_blocks * BLOCK_ROWS - tokens;
        if n_added > 0 {
            let none = TensorType::new(dtype, [experts, n_added]);
            let n_bytes = none.checked_bytes().expect("fewer bytes than the tokens have");
            let zeros = Tensor::new(none, vec![0; n_bytes].into()).expect("its bytes are as many");
            let zeros = self.draft.constant(zeros);
            id = self.draft.node(Concat { axis: 1 }.into(), &[id, zeros]);
        }
        self.reshaped(id, &[experts as i64, n_blocks as i64, BLOCK_ROWS as i64])
    }

    /// Adds the loop of an expert over the blocks of its tokens, whose number, indices and shares are `own`.
    fn of_one(&mut self, expert: usize, own: [ValueId; 3], x: ValueId, y: ValueId) -> Result<ValueId, OpError> {
        let [count, order, shares] = own;
        let given: Vec<usize> = (0..self.inputs.len()).filter(|at| self.inputs[*at].is_some()).collect();
        let mut inputs = vec![Some(count), None, Some(y), Some(x), Some(order), Some(shares)];
        let n_own = inputs.len();
        inputs.extend(given.iter().map(|at| Some(self.ids[*at])));
        let mut draft = GraphDraft { graph: Graph::default(), place: self.draft.place };
        draft.graph.inputs = inputs.iter().map(|_| draft.graph.add_value(Value::default())).collect();
        let ports = draft.graph.inputs.clone();
        let mut ids = vec![ports[0]; self.inputs.len()];
        given.iter().zip(&ports[n_own..]).for_each(|(at, id)| ids[*at] = *id);
        let mut body = Drawing { op: self.op, inputs: self.inputs, ids, sizes: self.sizes, draft };
        let y = body.block(expert, [ports[0], ports[2], ports[3], ports[4], ports[5]])?;
        let goes_on = body.draft.constant(Tensor::from_integers(DType::Bool, [], &[1]));
        body.draft.graph.outputs = vec![goes_on, y];
        let captures = (3..inputs.len()).collect();
        let op = Loop { body: Body { graph: Box::new(body.draft.graph), captures }, n_carried: 1 };
        Ok(self.draft.join_by(op.into(), inputs))
    }

    /// Passes a block of tokens through an expert, and adds the results to `y`.
    fn block(&mut self, expert: usize, [at, y, x, order, shares]: [ValueId; 5]) -> Result<ValueId, OpError> {
        let [order, shares] = [order, shares].map(|id| self.draft.node(Gather { axis: 0 }.into(), &[id, at]));
        let mut rows = self.draft.node(Gather { axis: 0 }.into(), &[x, order]);
        for of in 0..2 {
            rows = self.of_weights(of, rows, Weights::Of(expert))?;
            if let Some(bias) = self.chosen(self.op.ports(of)[2], Weights::Of(expert)) {
                rows = self.draft.node(Op::Binary(Binary::Add), &[rows, bias]);
            }
            if of == 0 {
                rows = self.activated(rows, 1, self.sizes.inner);
            }
        }
        let shares = self.widened(shares, &[1]);
        let rows = self.product_of(rows, shares);
        let places = self.widened(order, &[1]);
        Ok(self.draft.node(ScatterNd { reduction: Scatter::Add }.into(), &[y, places, rows]))
    }

    fn of_all(&mut self, x: ValueId, shares: ValueId, which: ValueId) -> Result<ValueId, OpError> {
        let Sizes { experts, wide, inner, .. } = self.sizes;
        let mut sums = self.of_weights(0, x, Weights::Rows)?;
        if let Some(bias) = self.input(self.op.ports(0)[2]) {
            let bias = self.reshaped(bias, &[(experts * wide) as i64]);
            sums = self.draft.node(Op::Binary(Binary::Add), &[sums, bias]);
        }
        let between = self.activated(sums, 1, experts * inner);
        let [of_all, _] = self.placed(shares, which);
        let apart = self.reshaped(between, &[-1, experts as i64, inner as i64]);
        let factors = self.widened(of_all, &[2]);
        let scaled = self.product_of(apart, factors);
        let scaled = self.reshaped(scaled, &[-1, (experts * inner) as i64]);
        let sums = self.of_weights(1, scaled, Weights::Columns)?;
        let Some(bias) = self.input(self.op.ports(1)[2]) else { return Ok(sums) };
        let of_bias = self.draft.node(MatMul.into(), &[of_all, bias]);
        Ok(self.draft.node(Op::Binary(Binary::Add), &[sums, of_bias]))
    }
}

impl Operation for Experts {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let none = TensorType::new(DType::Bool, []);
        infer_graph(&self.graph(inputs.0, &nowhere(), false, false)?, &with_all(inputs.0, &none))
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let none = Tensor::from_integers(DType::Bool, [], &[0]);
        let given = known(inputs.0)?.into_iter().map(|tensor| tensor.unwrap_or_else(|| none.clone())).collect();
        carry_out(&self.graph(inputs.0, &nowhere(), false, false)?, given)
    }
}
