//! Translation of a graph of known sizes to PyTorch's operators, as Python text.

use std::collections::HashMap;

use tilewright_graph::op::{Aspect, Rounding};
use tilewright_graph::op::{
    Attention, Binary, Cell, Clip, Conv, ConvTranspose, Coordinates, Fact, Gemm, Inputs, Pad, PadMode, Pool, PoolKind,
    Recurrent, RecurrentDirection, Reduce, ReduceKind, Resize, ResizeMode, Softmax, SoftmaxKind, Unary, Variadic, axis,
};
use tilewright_graph::{DType, Graph, Node, NodeId, Op, Tensor, ValueId};

/// Function `model(self, …)` that takes a graph's inputs and returns its outputs.
pub(super) struct Text {
    pub(super) code: String,
    /// Names of the function's arguments.
    pub(super) inputs: Vec<String>,
    /// Tensors that the text reads as `self.c0`, `self.c1` and so on.
    pub(super) constants: Vec<Tensor>,
}

/// Writes a graph whose types are all known; an error names the node for which PyTorch has no operator.
pub(super) fn text_of(graph: &Graph) -> Result<Text, String> {
    let mut writer = PythonWriter { graph, constants: Vec::new(), known: HashMap::new() };
    let last_uses = last_uses(graph);
    let arguments: Vec<String> = graph.inputs.iter().map(|&id| name(id)).collect();
    let mut code = format!("def model({}):\n", [vec!["self".to_owned()], arguments].concat().join(", "));
    for (id, node) in graph.nodes() {
        let refused = |reason| format!("{} has no like in PyTorch here: {reason}", node.place);
        code += &format!("    {}\n", writer.line(node).map_err(refused)?);
        // Values that are not read any more are returned to PyTorch's allocator.
        let dead: Vec<String> = last_uses.get(&id).into_iter().flatten().map(|&value| name(value)).collect();
        if !dead.is_empty() {
            code += &format!("    del {}\n", dead.join(", "));
        }
    }
    let outputs: Vec<String> = graph.outputs.iter().map(|&id| writer.value(id)).collect();
    code += &format!("    return [{}]\n", outputs.join(", "));
    let inputs = graph.inputs.iter().map(|&id| graph.value(id).name.clone()).collect();
    Ok(Text { code, inputs, constants: writer.constants })
}

/// Values, by the node that reads them last.
fn last_uses(graph: &Graph) -> HashMap<NodeId, Vec<ValueId>> {
    let mut last: HashMap<ValueId, NodeId> = HashMap::new();
    for (id, node) in graph.nodes() {
        for &value in node.inputs.iter().chain(node.outputs.first()).flatten() {
            last.insert(value, id);
        }
    }
    let mut by_node: HashMap<NodeId, Vec<ValueId>> = HashMap::new();
    for (value, id) in last {
        if graph.value(value).constant.is_none() && !graph.outputs.contains(&value) {
            by_node.entry(id).or_default().push(value);
        }
    }
    by_node.values_mut().for_each(|values| values.sort());
    by_node
}

fn name(id: ValueId) -> String {
    format!("v{}", id.0)
}

/// Formats a list in Python's syntax.
fn list<T: std::fmt::Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    format!("[{}]", items.join(", "))
}

/// Formats a number in Python's syntax.
fn number(x: f64) -> String {
    match (x.is_finite(), x.is_nan()) {
        (true, _) => format!("{x:?}"),
        (_, true) => "float('nan')".to_owned(),
        _ => format!("float('{}inf')", if x < 0.0 { "-" } else { "" }),
    }
}

fn truth(holds: bool) -> &'static str {
    if holds { "True" } else { "False" }
}

fn dtype(dtype: DType) -> Result<&'static str, String> {
    Ok(match dtype {
        DType::F16 => "torch.float16",
        DType::Bf16 => "torch.bfloat16",
        DType::F32 => "torch.float32",
        DType::F64 => "torch.float64",
        DType::I8 => "torch.int8",
        DType::I16 => "torch.int16",
        DType::I32 => "torch.int32",
        DType::I64 => "torch.int64",
        DType::U8 => "torch.uint8",
        DType::Bool => "torch.bool",
        other => return Err(format!("elements {}", other.name())),
    })
}

/// Formats borders as arguments of PyTorch's `pad`: of the last dimension first, without outer ones that are
/// 0.
fn borders_text(borders: &[(i64, i64)]) -> String {
    let outer = borders.iter().take_while(|&&pair| pair == (0, 0)).count();
    list(borders[outer..].iter().rev().flat_map(|&(before, behind)| [before, behind]))
}

struct PythonWriter<'a> {
    graph: &'a Graph,
    constants: Vec<Tensor>,
    /// Indices of constants, by their value.
    known: HashMap<ValueId, usize>,
}

impl PythonWriter<'_> {
    fn value(&mut self, id: ValueId) -> String {
        let Some(constant) = &self.graph.value(id).constant else { return name(id) };
        let at = *self.known.entry(id).or_insert_with(|| {
            self.constants.push(constant.clone());
            self.constants.len() - 1
        });
        format!("self.c{at}")
    }

    /// Text of an input; that of Python's `None` if it is left out.
    fn optional(&mut self, node: &Node, at: usize) -> String {
        node.inputs.get(at).copied().flatten().map_or_else(|| "None".to_owned(), |id| self.value(id))
    }

    fn shape(&self, node: &Node, at: usize) -> &[usize] {
        node.inputs.get(at).copied().flatten().map_or(&[], |id| &self.graph.ty(id).shape)
    }

    fn constant(&self, node: &Node, at: usize) -> Option<&Tensor> {
        self.graph.value(node.inputs.get(at).copied().flatten()?).constant.as_ref()
    }

    fn has(&self, node: &Node, at: usize) -> bool {
        node.inputs.get(at).copied().flatten().is_some()
    }

    /// Result of `read` for the types and values of a node's inputs.
    fn facts<T>(
        &self,
        node: &Node,
        read: impl FnOnce(Inputs<'_>) -> Result<T, tilewright_graph::OpError>,
    ) -> Result<T, String> {
        let fact = |id: ValueId| Fact { ty: self.graph.ty(id), value: self.graph.value(id).constant.as_ref() };
        let facts: Vec<Option<Fact<'_>>> = node.inputs.iter().map(|id| id.map(fact)).collect();
        read(Inputs(&facts)).map_err(|error| error.to_string())
    }

    /// Statement of a node.
    fn line(&mut self, node: &Node) -> Result<String, String> {
        let inputs: Vec<String> = (0..node.inputs.len()).map(|at| self.optional(node, at)).collect();
        let is_read = |id: &ValueId| !self.graph.value(*id).users.is_empty() || self.graph.outputs.contains(id);
        let wanted: Vec<ValueId> = node.outputs.iter().flatten().copied().filter(is_read).collect();
        let text = self.expression(node, &inputs)?;
        // Operators with several outputs return a tuple, whose last values may be unused.
        let several = matches!(node.op, Op::Split(_) | Op::TopK(_) | Op::Recurrent(_));
        if several {
            let names: Vec<String> = node.outputs.iter().map(|id| id.map_or("_".to_owned(), name)).collect();
            return Ok(format!("{}, *_ = {text}", names.join(", ")));
        }
        match (wanted[..].first(), node.outputs.first()) {
            (Some(&id), Some(Some(first))) if wanted.len() == 1 && id == *first => Ok(format!("{} = {text}", name(id))),
            _ => Err("an output besides the first is read".to_owned()),
        }
    }

    /// Expression for the value of a node, or for the tuple of its values.
    fn expression(&self, node: &Node, inputs: &[String]) -> Result<String, String> {
        let x = inputs.first().cloned().unwrap_or_default();
        let y = inputs.get(1).cloned().unwrap_or_default();
        let out = node.outputs.iter().flatten().next().map(|&id| self.graph.ty(id)).ok_or("nobody reads it")?;
        let shape = self.shape(node, 0);
        let dim = |at: i64| axis(at, shape.len()).map_err(|error| error.to_string());
        Ok(match &node.op {
            Op::Unary(unary) => unary_text(*unary, &x)?,
            Op::Binary(binary) => self.binary(*binary, node, &[x, y]),
            Op::Variadic(variadic) => variadic_text(*variadic, inputs),
            Op::Where(_) => format!("torch.where({})", inputs.join(", ")),
            Op::Clip(clip) => self.clip(clip, node, inputs),
            Op::Cast(_) => format!("{x}.to({})", dtype(out.dtype)?),
            Op::Dropout(_) => x,
            Op::Concat(concat) => format!("torch.cat({}, {})", list(inputs), concat.axis),
            Op::Reshape(_) | Op::Flatten(_) | Op::Squeeze(_) | Op::Unsqueeze(_) => {
                format!("{x}.reshape({})", list(&out.shape))
            }
            Op::Expand(_) => format!("{x}.expand({})", list(&out.shape)),
            Op::Tile(_) => format!("{x}.repeat({})", list(self.facts(node, |facts| Ok(facts.tensor(1)?.i64s()))?)),
            Op::Transpose(transpose) => {
                let order = transpose.order(shape.len()).map_err(|error| error.to_string())?;
                format!("{x}.permute({})", list(order))
            }
            Op::Slice(slice) => slice_text(&x, &self.facts(node, |facts| slice.parts(facts))?),
            Op::Split(split) => {
                let at = dim(split.axis)?;
                let sizes = node.outputs.iter().map(|id| id.map(|id| self.graph.ty(id).shape[at]));
                let sizes = sizes.collect::<Option<Vec<_>>>().ok_or("a part is not read")?;
                format!("torch.split({x}, {}, {at})", list(sizes))
            }
            Op::Gather(gather) => format!("{x}[{}{y}.long()]", ":, ".repeat(dim(gather.axis)?)),
            Op::GatherElements(gather) => {
                let at = dim(gather.axis)?;
                format!("torch.gather({x}, {at}, torch.where({y} < 0, {y} + {}, {y}).long())", shape[at])
            }
            Op::Trilu(trilu) => {
                let k = if self.has(node, 1) { self.facts(node, |facts| Ok(facts.tensor(1)?.i64s()))? } else { vec![] };
                let side = if trilu.upper { "triu" } else { "tril" };
                format!("torch.{side}({x}, {})", k.first().copied().unwrap_or(0))
            }
            Op::TopK(top) => {
                let (at, is_largest) = (dim(top.axis)?, truth(top.is_largest));
                format!("torch.topk({x}, {}, {at}, {is_largest})", out.shape[at])
            }
            Op::Pad(pad) => self.pad(pad, node, inputs)?,
            Op::MatMul(_) => format!("torch.matmul({x}, {y})"),
            Op::Gemm(gemm) => self.gemm(gemm, node, inputs),
            Op::Einsum(einsum) => format!("torch.einsum('{}', {})", einsum.equation, inputs.join(", ")),
            Op::Conv(conv) => self.conv(conv, node, inputs)?,
            Op::ConvTranspose(conv) => self.conv_transpose(conv, node, inputs)?,
            Op::DepthToSpace(to) if to.channels_first => format!("F.pixel_shuffle({x}, {})", to.block),
            Op::SpaceToDepth(to) if to.channels_first => format!("F.pixel_unshuffle({x}, {})", to.block),
            Op::Pool(pool) => pool_text(pool, shape, &x)?,
            Op::GlobalPool(pool) => global_pool_text(pool.kind, shape.len(), &x)?,
            Op::Reduce(reduce) => self.reduce(reduce, node, &x)?,
            Op::ArgReduce(by) if !by.takes_last => {
                let which = if by.is_min { "argmin" } else { "argmax" };
                format!("torch.{which}({x}, {}, {})", dim(by.axis)?, truth(by.keeps_dims))
            }
            Op::Softmax(softmax) => softmax_text(*softmax, shape, &x)?,
            Op::BatchNormalization(norm) if norm.training_momentum.is_none() => {
                let [scale, bias, mean, variance] = [1, 2, 3, 4].map(|at| &inputs[at]);
                let epsilon = number(norm.epsilon);
                format!("F.batch_norm({x}, {mean}, {variance}, {scale}, {bias}, False, 0.0, {epsilon})")
            }
            Op::InstanceNormalization(norm) => {
                format!("F.instance_norm({x}, weight={y}, bias={}, eps={})", inputs[2], number(norm.epsilon))
            }
            Op::GroupNormalization(norm) if !norm.scales_groups => {
                format!("F.group_norm({x}, {}, {y}, {}, {})", norm.n_groups, inputs[2], number(norm.epsilon))
            }
            Op::LayerNormalization(norm) => {
                let (dims, bias) = (&shape[dim(norm.axis)?..], inputs.get(2).map_or("None", String::as_str));
                let turned =
                    |text: &str| if text == "None" { text.into() } else { format!("{text}.reshape({dims:?})") };
                format!("F.layer_norm({x}, {dims:?}, {}, {}, {})", turned(&y), turned(bias), number(norm.epsilon))
            }
            Op::RmsNormalization(norm) => {
                let dims = &shape[dim(norm.axis)?..];
                format!("F.rms_norm({x}, {dims:?}, {y}.reshape({dims:?}), {})", number(norm.epsilon))
            }
            Op::LpNormalization(norm) => {
                format!("{x} / torch.linalg.vector_norm({x}, {}, {}, True)", number(norm.p), dim(norm.axis)?)
            }
            Op::Lrn(lrn) if lrn.size % 2 == 1 => {
                let [alpha, beta, bias] = [lrn.alpha, lrn.beta, lrn.bias].map(number);
                format!("F.local_response_norm({x}, {}, {alpha}, {beta}, {bias})", lrn.size)
            }
            Op::Resize(resize) => resize_text(resize, shape, &out.shape, &x)?,
            Op::Recurrent(recurrent) => self.recurrent(recurrent, node, inputs)?,
            Op::Attention(attention) => self.attention(attention, node, inputs)?,
            _ => return Err("not translated".to_owned()),
        })
    }

    fn binary(&self, binary: Binary, node: &Node, [a, b]: &[String; 2]) -> String {
        let is_float = node.inputs[0].is_some_and(|id| self.graph.ty(id).dtype.is_float());
        let between = |sign: &str| format!("{a} {sign} {b}");
        match binary {
            Binary::Add => between("+"),
            Binary::Sub => between("-"),
            Binary::Mul => between("*"),
            Binary::Div if is_float => between("/"),
            Binary::Div => format!("torch.div({a}, {b}, rounding_mode='trunc')"),
            Binary::Mod { of_dividend: true } => format!("torch.fmod({a}, {b})"),
            Binary::Mod { of_dividend: false } => format!("torch.remainder({a}, {b})"),
            Binary::Pow => format!("torch.pow({a}, {b}).to({a}.dtype)"),
            Binary::PRelu => format!("torch.where({a} < 0, {a} * {b}, {a})"),
            Binary::Equal => between("=="),
            Binary::Greater => between(">"),
            Binary::GreaterOrEqual => between(">="),
            Binary::Less => between("<"),
            Binary::LessOrEqual => between("<="),
            Binary::And | Binary::BitwiseAnd => between("&"),
            Binary::Or | Binary::BitwiseOr => between("|"),
            Binary::Xor | Binary::BitwiseXor => between("^"),
            Binary::BitShift { to_left: true } => between("<<"),
            Binary::BitShift { to_left: false } => between(">>"),
        }
    }

    fn clip(&self, clip: &Clip, node: &Node, inputs: &[String]) -> String {
        let is_float = node.inputs[0].is_some_and(|id| self.graph.ty(id).dtype.is_float());
        let bound = |given: Option<f64>, at: usize| {
            let known = given.or_else(|| self.constant(node, at).and_then(|x| x.floats().first().copied()));
            match known {
                Some(x) if is_float => number(x),
                Some(x) => format!("{x:.0}"),
                None => inputs.get(at).cloned().unwrap_or_else(|| "None".to_owned()),
            }
        };
        let (min, max) = (bound(clip.min, 1), bound(clip.max, 2));
        if min == "None" && max == "None" {
            return inputs[0].clone();
        }
        format!("torch.clamp({}, {min}, {max})", inputs[0])
    }

    fn pad(&self, pad: &Pad, node: &Node, inputs: &[String]) -> Result<String, String> {
        let borders = borders_text(&self.facts(node, |facts| pad.borders(facts))?);
        let x = &inputs[0];
        Ok(match (pad.mode, &pad.attributes) {
            (PadMode::Constant, Some((_, value))) => format!("F.pad({x}, {borders}, value={})", number(*value)),
            (PadMode::Constant, None) if self.has(node, 2) => {
                let value = self.facts(node, |facts| Ok(facts.tensor(2)?.floats()))?;
                format!("F.pad({x}, {borders}, value={})", number(value.first().copied().unwrap_or(0.0)))
            }
            (PadMode::Constant, None) => format!("F.pad({x}, {borders})"),
            (PadMode::Edge, _) => format!("F.pad({x}, {borders}, 'replicate')"),
            (PadMode::Reflect, _) => format!("F.pad({x}, {borders}, 'reflect')"),
            (PadMode::Wrap, _) => format!("F.pad({x}, {borders}, 'circular')"),
        })
    }

    fn gemm(&self, gemm: &Gemm, node: &Node, inputs: &[String]) -> String {
        let turned = |text: &str, is: bool| if is { format!("{text}.t()") } else { text.to_owned() };
        let a = turned(&inputs[0], gemm.transposes_a);
        let (alpha, beta) = (number(gemm.alpha), number(gemm.beta));
        let is_plain = gemm.alpha == 1.0 && gemm.beta == 1.0;
        let bias = inputs.get(2).filter(|text| *text != "None");
        match bias {
            Some(bias) if is_plain && gemm.transposes_b && self.shape(node, 2).len() == 1 => {
                format!("F.linear({a}, {}, {bias})", inputs[1])
            }
            Some(bias) => {
                let b = turned(&inputs[1], gemm.transposes_b);
                format!("torch.addmm({bias}, {a}, {b}, beta={beta}, alpha={alpha})")
            }
            None => format!("torch.mm({a}, {}) * {alpha}", turned(&inputs[1], gemm.transposes_b)),
        }
    }

    fn conv(&self, conv: &Conv, node: &Node, inputs: &[String]) -> Result<String, String> {
        let found = conv.shape(self.shape(node, 0), self.shape(node, 1)).map_err(|error| error.to_string())?;
        let window = &found.geometry;
        let n = spatial(window.kernel.len())?;
        let bias = inputs.get(2).map_or("None", String::as_str);
        let (x, padding) = if window.begins == window.ends && window.begins.iter().all(|&pad| pad >= 0) {
            (inputs[0].clone(), window.begins.clone())
        } else {
            let borders: Vec<_> = window.begins.iter().copied().zip(window.ends.iter().copied()).collect();
            (format!("F.pad({}, {})", inputs[0], borders_text(&borders)), vec![0; window.begins.len()])
        };
        let (strides, dilations) = (&window.strides, &window.dilations);
        let rest = format!("{strides:?}, {padding:?}, {dilations:?}, {}", found.groups);
        Ok(format!("F.conv{n}d({x}, {}, {bias}, {rest})", inputs[1]))
    }

    fn conv_transpose(&self, conv: &ConvTranspose, node: &Node, inputs: &[String]) -> Result<String, String> {
        let found = conv.shape(self.shape(node, 0), self.shape(node, 1)).map_err(|error| error.to_string())?;
        let window = &found.geometry;
        let n = spatial(window.kernel.len())?;
        let (mut padding, mut behind) = (Vec::new(), Vec::new());
        for (d, &size) in found.image.iter().enumerate() {
            let begin = window.begins[d];
            let full = (window.out[d] - 1) * window.strides[d] + window.dilations[d] * (window.kernel[d] - 1) + 1;
            let more = size as i64 - (full as i64 - 2 * begin);
            let most = window.strides[d].max(window.dilations[d]) as i64;
            if begin < 0 || !(0..most).contains(&more) {
                return Err(format!("borders {:?} and {:?}", window.begins, window.ends));
            }
            padding.push(begin);
            behind.push(more);
        }
        let bias = inputs.get(2).map_or("None", String::as_str);
        let (strides, groups, dilations) = (&window.strides, conv.groups, &window.dilations);
        let rest = format!("{strides:?}, {padding:?}, {behind:?}, {groups}, {dilations:?}");
        Ok(format!("F.conv_transpose{n}d({}, {}, {bias}, {rest})", inputs[0], inputs[1]))
    }

    fn reduce(&self, reduce: &Reduce, node: &Node, x: &str) -> Result<String, String> {
        let axes = self.facts(node, |facts| reduce.axes(facts))?.ok_or("a reduction along no dimension")?;
        if axes.is_empty() {
            return Err("a reduction along no dimension".to_owned());
        }
        let (dims, keeps) = (list(axes), truth(reduce.keeps_dims));
        Ok(match reduce.kind {
            ReduceKind::Sum => format!("torch.sum({x}, {dims}, {keeps})"),
            ReduceKind::Mean => format!("torch.mean({x}, {dims}, {keeps})"),
            ReduceKind::Max => format!("torch.amax({x}, {dims}, {keeps})"),
            ReduceKind::Min => format!("torch.amin({x}, {dims}, {keeps})"),
            ReduceKind::L1 => format!("torch.sum(torch.abs({x}), {dims}, {keeps})"),
            ReduceKind::L2 => format!("torch.linalg.vector_norm({x}, 2, {dims}, {keeps})"),
            ReduceKind::SumSquare => format!("torch.sum({x} * {x}, {dims}, {keeps})"),
            ReduceKind::LogSum => format!("torch.log(torch.sum({x}, {dims}, {keeps}))"),
            ReduceKind::LogSumExp => format!("torch.logsumexp({x}, {dims}, {keeps})"),
            ReduceKind::Prod => return Err("a product of elements".to_owned()),
        })
    }

    fn recurrent(&self, recurrent: &Recurrent, node: &Node, inputs: &[String]) -> Result<String, String> {
        let Recurrent { cell, direction, activations, clip, batch_first, .. } = recurrent;
        // ONNX's gates are iofc and zrh, PyTorch's ifgo and rzn.
        let (kind, gates, wanted) = match cell {
            Cell::Lstm { couples_gates: false, rounds: false } => {
                ("lstm", "(0, 2, 3, 1)", &[Unary::Sigmoid, Unary::Tanh, Unary::Tanh][..])
            }
            Cell::Gru { resets_behind: true } => ("gru", "(1, 0, 2)", &[Unary::Sigmoid, Unary::Tanh][..]),
            Cell::Rnn => ("rnn", "(0,)", &[Unary::Tanh][..]),
            other => return Err(format!("such cells ({})", other.name())),
        };
        let is_usual = activations.chunks(wanted.len()).all(|own| own == wanted);
        if !is_usual || clip.is_some() || self.has(node, 4) || self.has(node, 7) {
            return Err("activations, bounds, lengths or peepholes".to_owned());
        }
        if self.constant(node, 1).is_none() || self.constant(node, 2).is_none() {
            return Err("weights that are no constants".to_owned());
        }
        let directions = match direction {
            RecurrentDirection::Forward => "[False]",
            RecurrentDirection::Reverse => "[True]",
            RecurrentDirection::Both => "[False, True]",
        };
        let given = |at: usize| inputs.get(at).map_or("None", String::as_str);
        let [x, w, r, b, state, memory] = [0, 1, 2, 3, 5, 6].map(given);
        let ordered = format!("'{kind}', {gates}, {x}, {w}, {r}, {b}, [{state}, {memory}]");
        Ok(format!("recurrent({ordered}, {directions}, {})", truth(*batch_first)))
    }

    fn attention(&self, attention: &Attention, node: &Node, inputs: &[String]) -> Result<String, String> {
        let Attention { softcap, left_window, right_window, is_causal, scale, .. } = attention;
        let has_past = (4..7).any(|at| self.has(node, at));
        if has_past || *softcap != 0.0 || left_window.is_some() || right_window.is_some() {
            return Err("a cache, a bound or a window".to_owned());
        }
        if *is_causal && (self.has(node, 3) || self.shape(node, 0).len() != 4) {
            return Err("a mask besides the causal one".to_owned());
        }
        if self.shape(node, 0).len() != 4 {
            return Err("heads in one dimension".to_owned());
        }
        let mask = inputs.get(3).map_or("None", String::as_str);
        let (scale, causal) = (scale.map_or("None".to_owned(), number), truth(*is_causal));
        let groups = truth(self.shape(node, 0)[1] != self.shape(node, 1)[1]);
        let rest = format!("{mask}, 0.0, {causal}, scale={scale}, enable_gqa={groups}");
        Ok(format!("F.scaled_dot_product_attention({}, {}, {}, {rest})", inputs[0], inputs[1], inputs[2]))
    }
}

/// Number of spatial dimensions, if PyTorch has operators for it.
fn spatial(n: usize) -> Result<usize, String> {
    if (1..=3).contains(&n) { Ok(n) } else { Err(format!("images of {n} dimensions")) }
}

fn slice_text(x: &str, parts: &[(usize, i64, usize)]) -> String {
    let mut turned = Vec::new();
    let of_dim = |(at, &(start, step, n)): (usize, &(usize, i64, usize))| {
        let span = step.unsigned_abs() as usize * n.saturating_sub(1);
        if step < 0 {
            turned.push(at);
        }
        let first = if step < 0 && n > 0 { start - span } else { start };
        format!("{first}:{}:{}", if n == 0 { first } else { first + span + 1 }, step.unsigned_abs())
    };
    let dims: Vec<String> = parts.iter().enumerate().map(of_dim).collect();
    let part = format!("{x}[{}]", dims.join(", "));
    if turned.is_empty() { part } else { format!("torch.flip({part}, {turned:?})") }
}

fn pool_text(pool: &Pool, shape: &[usize], x: &str) -> Result<String, String> {
    let window = pool.geometry(shape).map_err(|error| error.to_string())?;
    spatial(window.kernel.len())?;
    // Borders that exactly contain the windows, so that no rounding up is needed.
    let needed = |d: usize| {
        let span = (window.out[d] - 1) * window.strides[d] + window.dilations[d] * (window.kernel[d] - 1) + 1;
        span as i64 - shape[2 + d] as i64 - window.begins[d]
    };
    let reaches = |d: usize| needed(d) <= window.ends[d];
    let dims = 0..window.kernel.len();
    let ends: Vec<i64> = dims.clone().map(|d| needed(d).max(window.ends[d])).collect();
    let (kernel, strides, begins, dilations) = (&window.kernel, &window.strides, &window.begins, &window.dilations);
    match pool.kind {
        PoolKind::Max { .. } => {
            Ok(format!("max_pool({x}, {kernel:?}, {strides:?}, {begins:?}, {ends:?}, {dilations:?})"))
        }
        PoolKind::Average { counts_borders } => {
            let is_dilated = dilations.iter().any(|&d| d != 1);
            if is_dilated || (counts_borders && !dims.clone().all(reaches)) {
                return Err("means of windows with gaps, or beyond borders that count".to_owned());
            }
            let counts = truth(counts_borders);
            Ok(format!("mean_pool({x}, {kernel:?}, {strides:?}, {begins:?}, {ends:?}, {counts})"))
        }
        PoolKind::Lp { .. } => Err("norms of windows".to_owned()),
    }
}

fn global_pool_text(kind: PoolKind, rank: usize, x: &str) -> Result<String, String> {
    let dims = list(2..rank);
    match kind {
        PoolKind::Max { .. } => Ok(format!("torch.amax({x}, {dims}, True)")),
        PoolKind::Average { .. } => Ok(format!("torch.mean({x}, {dims}, True)")),
        PoolKind::Lp { .. } => Err("norms of images".to_owned()),
    }
}

fn softmax_text(softmax: Softmax, shape: &[usize], x: &str) -> Result<String, String> {
    let at = axis(softmax.axis, shape.len()).map_err(|error| error.to_string())?;
    let function = match softmax.kind {
        SoftmaxKind::Soft => "torch.softmax",
        SoftmaxKind::Log => "torch.log_softmax",
        SoftmaxKind::Hard => return Err("a hard maximum".to_owned()),
    };
    Ok(match softmax.is_flat && at + 1 < shape.len() {
        true => format!("{function}({x}.flatten({at}), {at}).reshape({shape:?})"),
        false => format!("{function}({x}, {at})"),
    })
}

fn resize_text(resize: &Resize, shape: &[usize], out: &[usize], x: &str) -> Result<String, String> {
    let n = spatial(shape.len().saturating_sub(2))?;
    if shape[..2] != out[..2] || resize.antialias || resize.excludes_outside || resize.aspect != Aspect::Stretch {
        return Err("a resize of channels, or with antialias or an aspect".to_owned());
    }
    let size = list(&out[2..]);
    let is_whole = shape[2..].iter().zip(&out[2..]).all(|(&from, &to)| from > 0 && to % from == 0);
    let aligned = truth(resize.coordinates == Coordinates::AlignCorners);
    let is_usual = matches!(
        resize.coordinates,
        Coordinates::HalfPixel | Coordinates::PytorchHalfPixel | Coordinates::AlignCorners
    );
    match (resize.mode, resize.coordinates) {
        (ResizeMode::Nearest(Rounding::Floor), Coordinates::Asymmetric) => {
            Ok(format!("F.interpolate({x}, {size}, mode='nearest')"))
        }
        // Integer scales repeat elements, whatever the rounding.
        (ResizeMode::Nearest(_), Coordinates::HalfPixel | Coordinates::PytorchHalfPixel) if is_whole => {
            Ok(format!("F.interpolate({x}, {size}, mode='nearest')"))
        }
        (ResizeMode::Linear, _) if is_usual => {
            let mode = ["linear", "bilinear", "trilinear"][n - 1];
            Ok(format!("F.interpolate({x}, {size}, mode='{mode}', align_corners={aligned})"))
        }
        (ResizeMode::Cubic(a), _) if is_usual && n == 2 && (a + 0.75).abs() < 1e-6 => {
            Ok(format!("F.interpolate({x}, {size}, mode='bicubic', align_corners={aligned})"))
        }
        (mode, coordinates) => Err(format!("{mode:?} by {coordinates:?}")),
    }
}

fn variadic_text(variadic: Variadic, inputs: &[String]) -> String {
    let nested = |function: &str| {
        let join = |all: String, next: &String| format!("torch.{function}({all}, {next})");
        inputs[1..].iter().fold(inputs[0].clone(), join)
    };
    match variadic {
        Variadic::Max => nested("maximum"),
        Variadic::Min => nested("minimum"),
        Variadic::Sum => inputs.join(" + "),
        Variadic::Mean => format!("({}) / {}", inputs.join(" + "), inputs.len()),
    }
}

fn unary_text(unary: Unary, x: &str) -> Result<String, String> {
    let call = |function: &str| format!("{function}({x})");
    let with = |function: &str, a: f64| format!("{function}({x}, {})", number(a));
    Ok(match unary {
        Unary::Abs => call("torch.abs"),
        Unary::Acos => call("torch.acos"),
        Unary::Acosh => call("torch.acosh"),
        Unary::Affine { alpha, beta } => format!("{x} * {} + {}", number(alpha), number(beta)),
        Unary::Asin => call("torch.asin"),
        Unary::Asinh => call("torch.asinh"),
        Unary::Atan => call("torch.atan"),
        Unary::Atanh => call("torch.atanh"),
        Unary::BitwiseNot => call("torch.bitwise_not"),
        Unary::Ceil => call("torch.ceil"),
        Unary::Celu { alpha } => with("F.celu", alpha),
        Unary::Cos => call("torch.cos"),
        Unary::Cosh => call("torch.cosh"),
        Unary::Elu { alpha } => with("F.elu", alpha),
        Unary::Erf => call("torch.erf"),
        Unary::Exp => call("torch.exp"),
        Unary::Floor => call("torch.floor"),
        Unary::Gelu { by_tanh } => format!("F.gelu({x}, approximate='{}')", if by_tanh { "tanh" } else { "none" }),
        Unary::HardSigmoid { alpha, beta } => format!("torch.clamp({x} * {} + {}, 0, 1)", number(alpha), number(beta)),
        Unary::HardSwish => call("F.hardswish"),
        Unary::Identity => x.to_owned(),
        Unary::IsInf { negative: true, positive: true } => call("torch.isinf"),
        Unary::IsNan => call("torch.isnan"),
        Unary::LeakyRelu { alpha } => with("F.leaky_relu", alpha),
        Unary::Log => call("torch.log"),
        Unary::Mish => call("F.mish"),
        Unary::Neg => call("torch.neg"),
        Unary::Not => call("torch.logical_not"),
        Unary::Reciprocal => call("torch.reciprocal"),
        Unary::Relu => call("torch.relu"),
        Unary::Round => call("torch.round"),
        Unary::ScaledTanh { alpha, beta } => format!("{} * torch.tanh({x} * {})", number(alpha), number(beta)),
        Unary::Sigmoid => call("torch.sigmoid"),
        Unary::Sign => call("torch.sign"),
        Unary::Sin => call("torch.sin"),
        Unary::Sinh => call("torch.sinh"),
        Unary::Softplus => call("F.softplus"),
        Unary::Softsign => call("F.softsign"),
        Unary::Sqrt => call("torch.sqrt"),
        Unary::Swish { alpha: 1.0 } => call("F.silu"),
        Unary::Swish { alpha } => format!("{x} * torch.sigmoid({x} * {})", number(alpha)),
        Unary::Tan => call("torch.tan"),
        Unary::Tanh => call("torch.tanh"),
        other => return Err(format!("the function {other:?}")),
    })
}
