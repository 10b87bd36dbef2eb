//! Grouped-query attention with a key-value cache, as ONNX Runtime's domain defines it for language models.

use super::attention::heads_apart;
use super::util::{copy_strided, size, strides};
use super::{Attention, Fact, Import, Inputs, Op, Operation, Operator, Products, RotaryEmbedding};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Causal grouped-query attention (ONNX Runtime's `GroupQueryAttention`): several query heads share a head of
/// keys and values. Inputs: 0 to 2 queries, keys and values, each `[batch, new, heads · depth]`, or all
/// packed into the first; 3 and 4 past keys and values `[batch, heads, past, depth]`; 5 each sequence's
/// length minus one; 6 the longest length; 7 and 8 cosines and sines of the rotary embedding; 9 positions; 10
/// a bias added to the query-key products; 11 a number for each head (`head_sink`), whose exponential the
/// softmax adds to its sum. Outputs: the result, and present keys and values.
///
/// All sequences of a batch must have the same length.
#[derive(Debug, Clone)]
pub struct GroupQueryAttention {
    /// Attention of the unpacked queries, keys and values, after their rotary embedding.
    pub attention: Attention,
    /// Rotary embedding of queries and keys, if any.
    pub rotary: Option<RotaryEmbedding>,
    /// Whether the softmax adds 1, the exponential of 0, to its sum where no number is given for a head.
    pub is_smooth: bool,
}

/// Sizes of an attention with a key-value cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSizes {
    /// Batch size: number of sequences.
    pub batch: usize,
    /// Number of new tokens of each sequence.
    pub new: usize,
    /// Head size of queries and keys.
    pub depth: usize,
    /// Head size of values.
    pub width: usize,
    /// Number of cached tokens before the new ones.
    pub past: usize,
    /// Capacity of the cache in tokens: of the past and of the present tensors.
    pub rooms: [usize; 2],
}

fn import(node: &Import) -> Result<Op, OpError> {
    let heads = |name: &str| size(node.int_or(name, 0)?);
    let (n_q, n_kv) = (heads("num_heads")?, heads("kv_num_heads")?);
    if n_q == 0 || n_kv == 0 || !n_q.is_multiple_of(n_kv) {
        return Err(invalid!("num_heads={n_q} is no multiple of kv_num_heads={n_kv}"));
    }
    // A cache that holds all tokens is one that never evicts any; a smaller one is refused with its sizes.
    let _ = node.flag("sliding_window_cache", false)?;
    let is_smooth = node.int_or("smooth_softmax", 0)? > 0;
    for name in ["qk_output", "kv_cache_bit_width"] {
        if node.int_or(name, 0)? > 0 {
            return Err(unsupported!("attribute `{name}` is not supported"));
        }
    }
    for name in ["k_quant_type", "v_quant_type"] {
        let kind = node.text_or(name, "NONE")?;
        if kind != "NONE" {
            return Err(unsupported!("{name}={kind} is not supported"));
        }
    }
    // These belong to inputs that are not supported.
    for name in ["qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"] {
        let _ = node.float(name)?;
    }
    let is_interleaved = node.flag("rotary_interleaved", false)?;
    let turns = node.flag("do_rotary", false)?;
    let rotary = RotaryEmbedding { is_interleaved, n_turned: 0, n_heads: 0, inputs: [1, 2, 3] };
    let window = node.int_or("local_window_size", -1)?;
    let attention = Attention {
        is_causal: node.flag("causal", true)?,
        n_kv_heads: Some(n_kv),
        n_q_heads: Some(n_q),
        // Some exporters write 0 for the default.
        scale: node.float("scale")?.filter(|&scale| scale != 0.0).map(f64::from),
        softcap: node.float_or("softcap", 0.0)?,
        products: Products::Plain,
        left_window: (window > 0).then_some(window - 1),
        right_window: None,
    };
    Ok(GroupQueryAttention { attention, rotary: turns.then_some(rotary), is_smooth }.into())
}

pub(super) const ROWS: &[Operator] =
    &[Operator { domain: "com.microsoft", name: "GroupQueryAttention", since: &[1], n_inputs: 7..=17, import }];

impl GroupQueryAttention {
    /// Numbers of query heads, and of key and value heads.
    pub fn n_heads(&self) -> [usize; 2] {
        [self.attention.n_q_heads, self.attention.n_kv_heads].map(|n| n.expect("the operator says them"))
    }

    /// Rotary embedding of queries or of keys, given their number of heads; `None` without one.
    pub fn rotary_of(&self, n_heads: usize, angles: usize, depth: usize) -> Option<RotaryEmbedding> {
        let n_turned = if 2 * angles == depth { 0 } else { 2 * angles };
        self.rotary.map(|rotary| RotaryEmbedding { n_heads, n_turned, ..rotary })
    }

    /// Derives the sizes from the inputs.
    ///
    /// # Errors
    /// If inputs do not fit, lengths are not known, or sequences of a batch differ in length.
    pub fn sizes(&self, inputs: Inputs<'_>) -> Result<CacheSizes, OpError> {
        if let Some(at) = (12..inputs.n_inputs()).find(|at| inputs.optional(*at).is_some()) {
            return Err(unsupported!("its input {} is not supported", at + 1));
        }
        let [n_q, n_kv] = self.n_heads();
        if let Some(sink) = inputs.optional(11).filter(|sink| *sink.shape() != [n_q]) {
            return Err(invalid!("its head_sink of shape {:?} has no number for each of {n_q} heads", sink.shape()));
        }
        let &[batch, new, all] = inputs.shape(0)? else { return Err(invalid!("its queries have no three dimensions")) };
        let apart = |at: usize| heads_apart(inputs.shape(at)?, Some(n_kv));
        let is_packed = inputs.optional(1).is_none();
        let (depth, width) = match is_packed {
            true => (all / (n_q + 2 * n_kv), all / (n_q + 2 * n_kv)),
            false => (all / n_q, apart(2)?[3]),
        };
        let of_new = |depth: usize| [batch, n_kv, new, depth];
        let fits = match is_packed {
            true => all == depth * (n_q + 2 * n_kv) && inputs.optional(2).is_none(),
            false => all == depth * n_q && apart(1)? == of_new(depth) && apart(2)? == of_new(width),
        };
        if !fits || depth == 0 || new == 0 {
            return Err(invalid!("its queries, keys and values do not fit {n_q} and {n_kv} heads"));
        }
        let room = |at: usize, depth: usize| match inputs.optional(at).map(|past| past.shape()) {
            None => Ok(0),
            Some(&[b, h, room, d]) if [b, h, d] == [batch, n_kv, depth] => Ok(room),
            Some(shape) => Err(invalid!("its input {} of shape {shape:?} is no past", at + 1)),
        };
        let before = room(3, depth)?;
        if inputs.optional(3).is_some() != inputs.optional(4).is_some() || room(4, width)? != before {
            return Err(invalid!("past keys and values do not fit each other"));
        }
        let lengths = inputs.tensor(5)?.i64s();
        let longest = inputs.tensor(6)?.i64s();
        let (&[last, ..], &[longest]) = (&lengths[..], &longest[..]) else {
            return Err(invalid!("its lengths are no numbers"));
        };
        if lengths.len() != batch || lengths.iter().any(|length| *length != last) || last.saturating_add(1) != longest {
            return Err(unsupported!(
                "sequences of a batch with lengths of their own are not supported (give each its past and no padding)"
            ));
        }
        let past = usize::try_from(longest).ok().and_then(|all| all.checked_sub(new)).filter(|past| *past <= before);
        let past = past.ok_or_else(|| invalid!("{longest} keys are not {new} and a past of {before} at most"))?;
        Ok(CacheSizes { batch, new, depth, width, past, rooms: [before, before.max(past + new)] })
    }
}

impl Operation for GroupQueryAttention {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let CacheSizes { batch, new, depth, width, rooms: [_, room], .. } = self.sizes(inputs)?;
        let [n_q, n_kv] = self.n_heads();
        let dtype = inputs.fact(0)?.dtype();
        let types = [vec![batch, new, n_q * width], vec![batch, n_kv, room, depth], vec![batch, n_kv, room, width]];
        Ok(types.map(|shape| TensorType::new(dtype, shape)).to_vec())
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let CacheSizes { batch, new, depth, width, past, rooms: [_, room] } = self.sizes(inputs)?;
        let [n_q, n_kv] = self.n_heads();
        let x = inputs.tensor(0)?;
        let part = |at: usize, first: usize, n: usize| -> Result<Tensor, OpError> {
            if let Some(own) = inputs.optional_tensor(at)?.filter(|_| at > 0 || inputs.optional(1).is_some()) {
                return Ok(own.clone());
            }
            let by: Vec<isize> = strides(x.shape()).into_iter().map(|stride| stride as isize).collect();
            Ok(copy_strided(x, &[batch, new, n], &by, first))
        };
        let (all_q, all_k) = (n_q * depth, n_kv * depth);
        let mut q = part(0, 0, all_q)?;
        let mut k = part(1, all_q, all_k)?;
        let v = part(2, all_q + all_k, n_kv * width)?;
        if self.rotary.is_some() {
            let angles = inputs.shape(7)?.last().copied().unwrap_or(0);
            let counted: Vec<i128> = (0..batch * new).map(|at| (past + at % new) as i128).collect();
            let counted = Tensor::from_integers(DType::I64, [batch, new], &counted);
            let positions = inputs.optional_tensor(9)?.unwrap_or(&counted);
            let turned = |x: &Tensor, n_heads: usize| -> Result<Tensor, OpError> {
                let given = [x, inputs.tensor(7)?, inputs.tensor(8)?, positions];
                let facts = given.map(|x| Some(Fact { ty: x.ty(), value: Some(x) }));
                let op = self.rotary_of(n_heads, angles, depth).expect("it rotates");
                Ok(op.evaluate(Inputs(&facts))?.swap_remove(0))
            };
            (q, k) = (turned(&q, n_q)?, turned(&k, n_kv)?);
        }
        let kept = |at: usize, depth: usize, from: usize, n: usize| -> Result<Option<Tensor>, OpError> {
            let Some(all) = inputs.optional_tensor(at)? else { return Ok(None) };
            let by: Vec<isize> = strides(all.shape()).into_iter().map(|stride| stride as isize).collect();
            Ok(Some(copy_strided(all, &[batch, n_kv, n, depth], &by, from * depth)))
        };
        let (past_k, past_v) = (kept(3, depth, 0, past)?, kept(4, width, 0, past)?);
        let zeros = self.is_smooth.then(|| Tensor::from_floats(x.dtype(), [n_q], &vec![0.0; n_q]));
        let sink = inputs.optional_tensor(11)?.or(zeros.as_ref());
        let bias = inputs.optional_tensor(10)?;
        let given = [Some(&q), Some(&k), Some(&v), bias, past_k.as_ref(), past_v.as_ref(), None, sink];
        let facts = given.map(|x| x.map(|x| Fact { ty: x.ty(), value: Some(x) }));
        let mut found = self.attention.evaluate(Inputs(&facts))?;
        found.truncate(3);
        // After the last key, the unused room of a cache is unchanged.
        for (at, depth) in [(1, depth), (2, width)].into_iter().filter(|_| room > past + new) {
            let rest = kept(at + 2, depth, past + new, room - past - new)?.expect("there is a cache");
            let heads = |x: &Tensor| x.bytes().len() / (batch * n_kv);
            let (of_all, of_rest) = (heads(&found[at]), heads(&rest));
            let rows = found[at].bytes().chunks(of_all).zip(rest.bytes().chunks(of_rest));
            let bytes: Vec<u8> = rows.flat_map(|(all, rest)| [all, rest].concat()).collect();
            let ty = TensorType::new(rest.dtype(), [batch, n_kv, room, depth]);
            found[at] = Tensor::new(ty, bytes.into()).expect("as many bytes as the cache has");
        }
        Ok(found)
    }
}
