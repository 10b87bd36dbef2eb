//! Operators defined as ONNX functions: of ONNX Runtime's domain, as its tools write them, of ONNX's own, and
//! of OpenVINO's.

use super::proto::{AttributeProto, FunctionProto, NodeProto};
use super::{NEWEST_OPSET, plain_domain};
use crate::OpError;
use crate::error::unsupported;

/// Domain of the operators that ONNX Runtime adds.
const DOMAIN: &str = "com.microsoft";

/// Definitions of operators by others: `name(inputs) defaults -> outputs: statements`. An input `_` is left
/// out, one with `?` may be, an output `_` is not computed; `@` is an attribute of the call. An attribute
/// with the default `?` may be left out, one with `==` and a number is that number in calls of the row.
/// Unnamed attributes are 0 where they are given.
const FUNCTIONS: &[&str] = &[
    "Gelu(x) -> y: y = Gelu(x)",
    "QuickGelu(x) alpha=1.702 -> y: y = Swish[alpha=@alpha](x)",
    "BiasGelu(x, b) -> y: s = Add(x, b); y = Gelu(s)",
    "FastGelu(x) -> y: y = Gelu[approximate=tanh](x)",
    "FastGelu(x, b) -> y: s = Add(x, b); y = Gelu[approximate=tanh](s)",
    "QuantizeLinear(x, s, z?) axis=1 block_size=0 -> y: \
     y = QuantizeLinear[axis=@axis, block_size=@block_size](x, s, z)",
    "DequantizeLinear(x, s, z?) axis=1 block_size=0 -> y: \
     y = DequantizeLinear[axis=@axis, block_size=@block_size](x, s, z)",
    "SimplifiedLayerNormalization(x, g) axis=-1 epsilon=1e-5 stash_type=1 -> y, _: \
     y = RMSNormalization[axis=@axis, epsilon=@epsilon](x, g)",
    "SkipSimplifiedLayerNormalization(x, r, g) epsilon=1e-12 -> y, _, _, s: \
     s = Add(x, r); y = RMSNormalization[axis=-1, epsilon=@epsilon](s, g)",
    "SkipSimplifiedLayerNormalization(x, r, g, b) epsilon=1e-12 -> y, _, _, s: \
     t = Add(x, r); s = Add(t, b); y = RMSNormalization[axis=-1, epsilon=@epsilon](s, g)",
    "SkipLayerNormalization(x, r, g) epsilon=1e-12 -> y, _, _, s: \
     s = Add(x, r); y = LayerNormalization[axis=-1, epsilon=@epsilon](s, g)",
    "SkipLayerNormalization(x, r, g, o) epsilon=1e-12 -> y, _, _, s: \
     s = Add(x, r); y = LayerNormalization[axis=-1, epsilon=@epsilon](s, g, o)",
    "SkipLayerNormalization(x, r, g, o, b) epsilon=1e-12 -> y, _, _, s: \
     t = Add(x, r); s = Add(t, b); y = LayerNormalization[axis=-1, epsilon=@epsilon](s, g, o)",
    "EmbedLayerNormalization(ids, kinds, words, places, of_kinds, g, o) epsilon=1e-12 -> y, n, s: \
     count = Shape[start=1, end=2](ids); m = Squeeze(count); zero = Constant[value_int=0](); \
     one = Constant[value_int=1](); at = Range(zero, m, one); a = Gather(words, ids); b = Gather(places, at); \
     c = Gather(of_kinds, kinds); t = Add(a, b); s = Add(t, c); \
     y = LayerNormalization[axis=-1, epsilon=@epsilon](s, g, o); \
     batch = Shape[end=1](ids); none = ConstantOfShape(batch); n = Cast[to=6](none)",
    "EmbedLayerNormalization(ids, _, words, places, _, g, o) epsilon=1e-12 -> y, n, s: \
     count = Shape[start=1, end=2](ids); m = Squeeze(count); zero = Constant[value_int=0](); \
     one = Constant[value_int=1](); at = Range(zero, m, one); a = Gather(words, ids); b = Gather(places, at); \
     s = Add(a, b); y = LayerNormalization[axis=-1, epsilon=@epsilon](s, g, o); \
     batch = Shape[end=1](ids); none = ConstantOfShape(batch); n = Cast[to=6](none)",
    "EmbedLayerNormalization(ids, kinds?, words, places, of_kinds?, g, o, mask) epsilon=1e-12 -> y, n, s: \
     y, none, s = com.microsoft.EmbedLayerNormalization[epsilon=@epsilon]\
     (ids, kinds, words, places, of_kinds, g, o); \
     along = Constant[value_ints=1](); n = ReduceSum[keepdims=0](mask, along)",
    "Attention(x, w, b, mask?) num_heads=1 unidirectional=0 mask_filter_value=-10000.0 -> y, _: \
     p = MatMul(x, w); s = Add(p, b); q, k, v = Split[axis=-1, num_outputs=3](s); \
     y = com.microsoft.MultiHeadAttention[num_heads=@num_heads, unidirectional=@unidirectional, \
     mask_filter_value=@mask_filter_value](q, k, v, , mask)",
    "Attention(x, w, b, mask?, past) num_heads=1 unidirectional=0 mask_filter_value=-10000.0 -> y, present: \
     p = MatMul(x, w); s = Add(p, b); q, k, v = Split[axis=-1, num_outputs=3](s); \
     y, present = com.microsoft.AttentionWithPast[num_heads=@num_heads, unidirectional=@unidirectional, \
     mask_filter_value=@mask_filter_value](q, k, v, mask, past)",
    // Keys and values of the past are one tensor, and those of the present another one.
    "AttentionWithPast(q, k, v, mask?, past) num_heads=1 unidirectional=0 mask_filter_value=-10000.0 \
     -> y, present: first = Constant[value_ints=0](); ek, ev = Split[axis=0, num_outputs=2](past); \
     pk = Squeeze(ek, first); pv = Squeeze(ev, first); \
     y, ok, ov = com.microsoft.MultiHeadAttention[num_heads=@num_heads, unidirectional=@unidirectional, \
     mask_filter_value=@mask_filter_value](q, k, v, , mask, , pk, pv); \
     uk = Unsqueeze(ok, first); uv = Unsqueeze(ov, first); present = Concat[axis=0](uk, uv)",
    "MultiHeadAttention(q, k, v, b, mask?) num_heads=1 unidirectional=0 mask_filter_value=-10000.0 -> y, _, _: \
     bq, bk, bv = Split[axis=0, num_outputs=3](b); q1 = Add(q, bq); k1 = Add(k, bk); v1 = Add(v, bv); \
     y = com.microsoft.MultiHeadAttention[num_heads=@num_heads, unidirectional=@unidirectional, \
     mask_filter_value=@mask_filter_value](q1, k1, v1, , mask)",
    "MultiHeadAttention(q, k, v, _, mask) num_heads=1 unidirectional=0 mask_filter_value=-10000.0 -> y, _, _: \
     more = com.microsoft.KeyMask[mask_filter_value=@mask_filter_value](mask, k); \
     y = com.microsoft.MultiHeadAttention[num_heads=@num_heads, unidirectional=@unidirectional]\
     (q, k, v, , , more)",
    "MultiHeadAttention(q, k, v, _, _, more?) num_heads=1 unidirectional==1 mask_filter_value=-10000.0 \
     -> y, _, _: \
     y = Attention[q_num_heads=@num_heads, kv_num_heads=@num_heads, is_causal=1](q, k, v, more)",
    "MultiHeadAttention(q, k, v) num_heads=1 mask_filter_value=-10000.0 -> y, _, _: \
     zero = Constant[value_float=0.0](); none = CastLike(zero, q); \
     y = com.microsoft.MultiHeadAttention[num_heads=@num_heads](q, k, v, , , none)",
    "MultiHeadAttention(q, k, v, _, _, more) num_heads=1 -> y, _, _: \
     first = Constant[value_ints=0 0](); rest = Constant[value_ints=-1](); \
     n = Constant[value_int=@num_heads](); heads = Reshape(n, rest); \
     apart = Concat[axis=0](first, heads, rest); together = Concat[axis=0](first, rest); \
     qh = Reshape(q, apart); kh = Reshape(k, apart); vh = Reshape(v, apart); \
     qt = Transpose[perm=0 2 1 3](qh); kt = Transpose[perm=0 2 3 1](kh); vt = Transpose[perm=0 2 1 3](vh); \
     d = Shape[start=3](qh); f = CastLike(d, q); root = Sqrt(f); p = MatMul(qt, kt); scaled = Div(p, root); \
     scores = Add(scaled, more); shares = Softmax[axis=-1](scores); sums = MatMul(shares, vt); \
     turned = Transpose[perm=0 2 1 3](sums); y = Reshape(turned, together)",
    "MultiHeadAttention(q, k, v, _, _, more?, pk, pv) num_heads=1 unidirectional=0 mask_filter_value=-10000.0 \
     -> y, ok, ov: \
     y, ok, ov = Attention[q_num_heads=@num_heads, kv_num_heads=@num_heads, is_causal=@unidirectional]\
     (q, k, v, more, pk, pv)",
    "MultiHeadAttention(q, k, v, _, mask, _, pk, pv) num_heads=1 unidirectional=0 mask_filter_value=-10000.0 \
     -> y, ok, ov: more = com.microsoft.KeyMask[mask_filter_value=@mask_filter_value](mask, k, pk); \
     y, ok, ov = Attention[q_num_heads=@num_heads, kv_num_heads=@num_heads, is_causal=@unidirectional]\
     (q, k, v, more, pk, pv)",
    "MultiHeadAttention(q, k, v, b, mask?, more?, pk, pv) num_heads=1 unidirectional=0 \
     mask_filter_value=-10000.0 -> y, ok, ov: \
     bq, bk, bv = Split[axis=0, num_outputs=3](b); q1 = Add(q, bq); k1 = Add(k, bk); v1 = Add(v, bv); \
     y, ok, ov = com.microsoft.MultiHeadAttention[num_heads=@num_heads, unidirectional=@unidirectional, \
     mask_filter_value=@mask_filter_value](q1, k1, v1, , mask, more, pk, pv)",
    // The levels of bitsandbytes: `FP4` and `NF4`.
    "MatMulBnb4(x, b, a) K=0 N=0 block_size=0 quant_type==0 -> y: \
     levels = Constant[value_floats=0 0.005208333333 0.66666667 1 0.33333333 0.5 0.16666667 0.25 \
     0 -0.005208333333 -0.66666667 -1 -0.33333333 -0.5 -0.16666667 -0.25](); \
     y = com.microsoft.MatMulOfLevels[K=@K, N=@N, block_size=@block_size](x, b, a, levels)",
    "MatMulBnb4(x, b, a) K=0 N=0 block_size=0 quant_type==1 -> y: \
     levels = Constant[value_floats=-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 \
     -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 \
     0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1](); \
     y = com.microsoft.MatMulOfLevels[K=@K, N=@N, block_size=@block_size](x, b, a, levels)",
    // Two weights in a byte, the first one in its upper half, of the transposed matrix; blocks run on from
    // row to row.
    "MatMulOfLevels(x, b, a, levels) K=0 N=0 block_size=0 -> y: \
     n_levels = Constant[value_int=16](); bytes = Cast[to=7](b); upper = Div(bytes, n_levels); \
     lower = Mod(bytes, n_levels); last = Constant[value_ints=-1](); u = Unsqueeze(upper, last); \
     l = Unsqueeze(lower, last); which = Concat[axis=-1](u, l); pairs = Gather(levels, which); \
     k = Constant[value_int=@K](); n = Constant[value_int=@N](); size = Constant[value_int=@block_size](); \
     all = Mul(n, k); zero = Constant[value_int=0](); one = Constant[value_int=1](); at = Range(zero, all, one); \
     of_block = Div(at, size); most = Gather(a, of_block); row = Reshape(pairs, last); \
     first = Unsqueeze(zero, last); end = Unsqueeze(all, last); plain = Slice(row, first, end); \
     scaled = Mul(plain, most); ks = Unsqueeze(k, last); ns = Unsqueeze(n, last); \
     of_matrix = Concat[axis=0](ns, ks); w = Reshape(scaled, of_matrix); t = Transpose[perm=1 0](w); \
     y = MatMul(x, t)",
    "MatMulIntegerToFloat(a, b, sa, sb, za?, zb?) -> y: \
     p = MatMulInteger(a, b, za, zb); f = Cast[to=1](p); s = Mul(sa, sb); y = Mul(f, s)",
    "MatMulIntegerToFloat(a, b, sa, sb, za?, zb?, c) -> y: \
     p = MatMulInteger(a, b, za, zb); f = Cast[to=1](p); s = Mul(sa, sb); t = Mul(f, s); y = Add(t, c)",
    "DynamicQuantizeMatMul(a, b, sb, zb?) -> y: \
     q, sa, za = DynamicQuantizeLinear(a); p = MatMulInteger(q, b, za, zb); f = Cast[to=1](p); \
     s = Mul(sa, sb); y = Mul(f, s)",
    "DynamicQuantizeMatMul(a, b, sb, zb?, c) -> y: \
     q, sa, za = DynamicQuantizeLinear(a); p = MatMulInteger(q, b, za, zb); f = Cast[to=1](p); \
     s = Mul(sa, sb); t = Mul(f, s); y = Add(t, c)",
    "DynamicQuantizeLSTM(x, w, r, b?, lens?, h?, c?, p?, sw, zw, sr, zr) hidden_size=0 direction=forward \
     input_forget=0 activations=? activation_alpha=? activation_beta=? clip=? -> y, oh, oc: \
     each = Constant[value_ints=0 1 -1](); \
     nw = Cast[to=1](w); aw = Reshape(zw, each); bw = Cast[to=1](aw); cw = Sub(nw, bw); \
     fw = Transpose[perm=0 2 1](cw); \
     nr = Cast[to=1](r); ar = Reshape(zr, each); br = Cast[to=1](ar); cr = Sub(nr, br); \
     fr = Transpose[perm=0 2 1](cr); \
     y, oh, oc = com.microsoft.LSTM[hidden_size=@hidden_size, direction=@direction, input_forget=@input_forget, \
     activations=@activations, activation_alpha=@activation_alpha, activation_beta=@activation_beta, clip=@clip]\
     (x, fw, fr, b, lens, h, c, p, sw, sr)",
    "QAttention(x, w, b, sx, sw, mask?, zx?, zw?) num_heads=1 unidirectional=0 mask_filter_value=-10000.0 \
     -> y, _: \
     s = com.microsoft.MatMulIntegerToFloat(x, w, sx, sw, zx, zw, b); \
     q, k, v = Split[axis=-1, num_outputs=3](s); \
     y = com.microsoft.MultiHeadAttention[num_heads=@num_heads, unidirectional=@unidirectional, \
     mask_filter_value=@mask_filter_value](q, k, v, , mask)",
    "QAttention(x, w, b, sx, sw, mask?, zx?, zw?, past) num_heads=1 unidirectional=0 \
     mask_filter_value=-10000.0 -> y, present: \
     s = com.microsoft.MatMulIntegerToFloat(x, w, sx, sw, zx, zw, b); \
     q, k, v = Split[axis=-1, num_outputs=3](s); \
     y, present = com.microsoft.AttentionWithPast[num_heads=@num_heads, unidirectional=@unidirectional, \
     mask_filter_value=@mask_filter_value](q, k, v, mask, past)",
    "QEmbedLayerNormalization(ids, kinds, words, places, of_kinds, g, o, mask?, sw, sp, sk, sg, so, \
     zw, zp, zk, zg, zo) epsilon=1e-12 -> y, n: \
     a = DequantizeLinear(words, sw, zw); b = DequantizeLinear(places, sp, zp); \
     c = DequantizeLinear(of_kinds, sk, zk); d = DequantizeLinear(g, sg, zg); e = DequantizeLinear(o, so, zo); \
     y, n = com.microsoft.EmbedLayerNormalization[epsilon=@epsilon](ids, kinds, a, b, c, d, e, mask)",
    "QEmbedLayerNormalization(ids, _, words, places, _, g, o, mask?, sw, sp, _, sg, so, zw, zp, _, zg, zo) \
     epsilon=1e-12 -> y, n: \
     a = DequantizeLinear(words, sw, zw); b = DequantizeLinear(places, sp, zp); \
     d = DequantizeLinear(g, sg, zg); e = DequantizeLinear(o, so, zo); \
     y, n = com.microsoft.EmbedLayerNormalization[epsilon=@epsilon](ids, , a, b, , d, e, mask)",
];

/// Kind of an attribute that has no default.
const LEFT_OUT: i64 = 0;
/// Kind of an attribute with the number that calls of the row give it.
const REQUIRED: i64 = -1;

/// Operators of ONNX's own domain, as in [`FUNCTIONS`].
const PLAIN: &[&str] = &["SwiGLU(a, b) alpha=1.0 -> y: gate = Swish[alpha=@alpha](a); y = Mul(gate, b)"];

/// Operators of OpenVINO's domain, as in [`FUNCTIONS`]: what NNCF leaves in a network that PyTorch exports.
const OPENVINO: &[&str] = &["FakeQuantize(x, low, high, from, to) levels=256 -> y: \
     count = Constant[value_int=@levels](); n = Cast[to=1](count); one = Constant[value_float=1.0](); \
     most = Sub(n, one); zero = Constant[value_float=0.0](); wide = Sub(high, low); step = Div(wide, most); \
     a = Sub(x, low); b = Div(a, step); c = Round(b); d = Max(c, zero); level = Min(d, most); \
     new = Sub(to, from); by = Div(new, most); e = Mul(level, by); y = Add(e, from)"];

/// Definitions of an operator, without the leading name and `(`.
fn definitions(domain: &str, name: &str) -> impl Iterator<Item = &'static str> {
    let rows = match (domain, name) {
        // Models use this operator without a domain.
        (DOMAIN, _) | ("", "SimplifiedLayerNormalization") => FUNCTIONS,
        ("", _) => PLAIN,
        ("org.openvinotoolkit", _) => OPENVINO,
        _ => &[],
    };
    rows.iter().filter_map(move |row| row.strip_prefix(name)?.strip_prefix('('))
}

/// Whether an operator is one of these functions.
pub fn has(domain: &str, name: &str) -> bool {
    definitions(domain, name).next().is_some()
}

/// Function body of a node's operator; `None` if the operator is not a function.
///
/// # Errors
/// If the node has inputs or attributes that the definition does not support.
pub fn known<'a>(node: &NodeProto<'a>) -> Option<Result<FunctionProto<'a>, OpError>> {
    let domain = plain_domain(node.domain);
    if !has(domain, node.op_type) {
        return None;
    }
    let mut functions = definitions(domain, node.op_type).map(|row| read(node, row));
    let fits = |function: &FunctionProto<'_>| {
        let mut required = function.defaults.iter().filter(|attribute| attribute.kind == REQUIRED);
        let is_called_with =
            |a: &AttributeProto<'_>| node.attributes.iter().any(|b| b.name == a.name && b.int == a.int);
        if !required.all(is_called_with) {
            return false;
        }
        let n = function.inputs.len().max(node.inputs.len());
        (0..n).all(|at| {
            let is_given = node.inputs.get(at).is_some_and(|name| !name.is_empty());
            match function.inputs.get(at) {
                Some(name) if name.ends_with('?') => true,
                name => is_given == name.is_some_and(|name| *name != "_"),
            }
        })
    };
    let Some(mut function) = functions.find(fits) else {
        return Some(Err(unsupported!("it is not supported with these inputs")));
    };
    function.inputs.iter_mut().for_each(|name| *name = name.trim_end_matches('?'));
    let is_named = |name: &str| function.defaults.iter().any(|default| default.name == name);
    let is_zero = |a: &AttributeProto<'_>| {
        a.int.unwrap_or(0) == 0
            && a.float.unwrap_or(0.0) == 0.0
            && [a.ints.len(), a.floats.len(), a.text.map_or(0, <[u8]>::len), a.texts.len()] == [0; 4]
    };
    if let Some(other) = node.attributes.iter().find(|attribute| !is_named(attribute.name) && !is_zero(attribute)) {
        return Some(Err(unsupported!("attribute `{}` is not supported", other.name)));
    }
    function.defaults.retain(|default| ![LEFT_OUT, REQUIRED].contains(&default.kind));
    let is_asked = |(at, name): (usize, &&str)| *name == "_" && node.outputs.get(at).is_some_and(|out| !out.is_empty());
    if let Some(at) = function.outputs.iter().enumerate().position(is_asked) {
        return Some(Err(unsupported!("its output {} is not supported", at + 1)));
    }
    Some(Ok(function))
}

/// Parses a definition, without the leading name and `(`; its nodes are named after the call.
fn read<'a>(call: &NodeProto<'a>, row: &'static str) -> FunctionProto<'a> {
    let list = |text: &'static str| text.split(',').map(str::trim).collect::<Vec<&str>>();
    let (head, statements) = row.split_once(": ").expect("statements stand behind a colon");
    let (inputs, head) = head.split_once(')').expect("inputs end");
    let (defaults, outputs) = head.split_once("->").expect("outputs stand behind an arrow");
    let node = |statement: &'static str| {
        let (outputs, call_of) = statement.split_once(" = ").expect("a statement is a call");
        let (operator, inputs) = call_of.strip_suffix(')').and_then(|text| text.split_once('(')).expect("a call");
        let (operator, attributes) = operator.split_once('[').unwrap_or((operator, ""));
        let (domain, op_type) = operator.rsplit_once('.').unwrap_or(("", operator));
        let attributes = attributes.trim_end_matches(']').split(", ").filter(|text| !text.is_empty());
        NodeProto {
            name: call.name,
            op_type,
            domain,
            inputs: if inputs.is_empty() { Vec::new() } else { list(inputs) },
            outputs: list(outputs.trim()),
            attributes: attributes.map(attribute).collect(),
        }
    };
    FunctionProto {
        name: call.op_type,
        domain: call.domain,
        inputs: list(inputs),
        outputs: list(outputs),
        defaults: defaults.split_whitespace().map(attribute).collect(),
        nodes: statements.split("; ").map(node).collect(),
        opsets: vec![("", NEWEST_OPSET), (DOMAIN, 1)],
    }
}

/// An attribute, as `name=value`: one without a default, one that calls give, one of the call, an integer,
/// several, another number or several, or a word.
fn attribute(text: &'static str) -> AttributeProto<'static> {
    let (name, value) = text.split_once('=').expect("an attribute has a value");
    let mut attribute = AttributeProto { name, ..AttributeProto::default() };
    let whole = |text: &str| text.parse::<i64>();
    if value == "?" {
        attribute.kind = LEFT_OUT;
    } else if let Some(number) = value.strip_prefix('=') {
        (attribute.kind, attribute.int) = (REQUIRED, number.parse().ok());
    } else if let Some(reference) = value.strip_prefix('@') {
        attribute.reference = reference;
    } else if let Ok(numbers) = value.split(' ').map(whole).collect::<Result<Vec<i64>, _>>() {
        // Names of list attributes have this ending.
        match numbers[..] {
            [number] if name != "value_ints" => (attribute.kind, attribute.int) = (2, Some(number)),
            _ => (attribute.kind, attribute.ints) = (7, numbers),
        }
    } else if name == "value_floats" {
        let numbers = value.split(' ').map(|number| number.parse::<f32>().expect("a number"));
        (attribute.kind, attribute.floats) = (6, numbers.flat_map(f32::to_le_bytes).collect());
    } else if let Ok(number) = value.parse() {
        (attribute.kind, attribute.float) = (1, Some(number));
    } else {
        (attribute.kind, attribute.text) = (3, Some(value.as_bytes()));
    }
    attribute
}
