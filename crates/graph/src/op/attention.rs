//! `Attention` and `RotaryEmbedding`.

use super::util::{broadcast, broadcast_strides, product, size, transpose};
use super::{Import, Inputs, Op, Operation, Operator, row};
use crate::error::{invalid, unsupported};
use crate::{DType, OpError, Tensor, TensorType};

/// Scaled dot-product attention (ONNX `Attention`), `softmax(scale · Q·Kᵀ + mask) · V`. Inputs: 0 to 2
/// queries, keys and values, `[batch, heads, sequence, head_size]` or `[batch, sequence, heads · head_size]`;
/// 3 a mask that broadcasts to `[batch, heads, queries, keys]`, boolean or added; 4 and 5 past keys and
/// values; 6 the number of keys of each sequence that are not padding; 7, of grouped attention, a number for
/// each head whose exponential the softmax adds to its sum. Outputs: the result, present keys and
/// values (past ones first), and the query-key products.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Whether a query attends only to keys at its own position and before.
    pub is_causal: bool,
    /// Number of heads of keys and values, for inputs of three dimensions.
    pub n_kv_heads: Option<usize>,
    /// Number of heads of queries, for inputs of three dimensions.
    pub n_q_heads: Option<usize>,
    /// Factor of the query-key products; by default 1/√head_size.
    pub scale: Option<f64>,
    /// Soft cap of the products: `softcap · tanh(x / softcap)`; 0 for none.
    pub softcap: f64,
    /// Stage at which the last output takes the query-key products (`qk_matmul_output_mode`).
    pub products: Products,
    /// Sliding window: number of keys before its own position that a query attends to; `None` without a
    /// bound.
    pub left_window: Option<i64>,
    /// Sliding window: number of keys after its own position that a query attends to; `None` without a bound.
    pub right_window: Option<i64>,
}

/// Stage of the query-key products: as scaled, after the soft cap, after the mask, or after the softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Products {
    Plain,
    Bounded,
    Masked,
    Softmax,
}

/// Rotary position embedding: rotates pairs of a head's elements by position-dependent angles. Cosines and
/// sines are `[positions, rotated / 2]` and looked up by the positions input; without that input they are
/// `[batch, sequence, rotated / 2]`. A position input of one element is the position of the first token.
#[derive(Debug, Clone, Copy)]
pub struct RotaryEmbedding {
    /// Whether a pair is two neighbouring elements; else they are half of the rotated elements apart.
    pub is_interleaved: bool,
    /// Number of elements of a head that are rotated (`rotary_embedding_dim`); 0 for all.
    pub n_turned: usize,
    /// Number of heads, for inputs of three dimensions; 0 derives it from the size of the angles.
    pub n_heads: usize,
    /// Indices of the inputs cosines, sines and positions.
    pub inputs: [usize; 3],
}

/// Mask of keys as ONNX Runtime's attentions take it, as numbers that are added to the query-key products,
/// `[batch, 1, 1 or queries, keys]`. Inputs: 0 the mask, integers above 0 for keys that are seen, `[batch,
/// keys]` or `[batch, queries, keys]`, or the number of keys that are seen of each sequence, `[batch]`; 1 the
/// new keys, `[batch, steps, hidden]`; 2 the past ones, if any, `[batch, heads, past, head_size]`.
#[derive(Debug, Clone, Copy)]
pub struct KeyMask {
    /// Number added for keys that are not seen.
    pub least: f64,
}

fn import(node: &Import) -> Result<Op, OpError> {
    let heads = |name: &str| node.int(name)?.filter(|&n| n != 0).map(size).transpose();
    // Sums are always f64 here.
    let _ = node.int("softmax_precision")?;
    let window = |name: &str| Ok(if node.version < 25 { None } else { node.int(name)?.filter(|&n| n >= 0) });
    Ok(Attention {
        is_causal: node.flag("is_causal", false)?,
        n_kv_heads: heads("kv_num_heads")?,
        n_q_heads: heads("q_num_heads")?,
        scale: node.float("scale")?.map(f64::from),
        softcap: node.float_or("softcap", 0.0)?,
        products: match node.int_or("qk_matmul_output_mode", 0)? {
            0 => Products::Plain,
            1 => Products::Bounded,
            2 => Products::Masked,
            3 => Products::Softmax,
            mode => return Err(unsupported!("qk_matmul_output_mode={mode} is not supported")),
        },
        left_window: window("left_window_size")?,
        right_window: window("right_window_size")?,
    }
    .into())
}

pub(super) const ROWS: &[Operator] = &[
    row("Attention", &[23, 24, 25], 3..=7, import),
    row("RotaryEmbedding", &[23], 3..=4, |node| {
        let n_turned = size(node.int_or("rotary_embedding_dim", 0)?)?;
        let n_heads = size(node.int_or("num_heads", 0)?)?;
        let is_interleaved = node.flag("interleaved", false)?;
        Ok(RotaryEmbedding { is_interleaved, n_turned, n_heads, inputs: [1, 2, 3] }.into())
    }),
    // Of rows of functions.
    Operator {
        domain: "com.microsoft",
        name: "KeyMask",
        since: &[1],
        n_inputs: 2..=3,
        import: |node| Ok(KeyMask { least: node.float_or("mask_filter_value", -10000.0)? }.into()),
    },
    Operator {
        domain: "com.microsoft",
        name: "RotaryEmbedding",
        since: &[1],
        n_inputs: 4..=4,
        import: |node| {
            let n_turned = size(node.int_or("rotary_embedding_dim", 0)?)?;
            let n_heads = size(node.int_or("num_heads", 0)?)?;
            if node.float_or("scale", 1.0)? != 1.0 || node.flag("is_packed_batching", false)? {
                return Err(unsupported!("a scale of its own and packed batches are not supported"));
            }
            let is_interleaved = node.flag("interleaved", false)?;
            Ok(RotaryEmbedding { is_interleaved, n_turned, n_heads, inputs: [2, 3, 1] }.into())
        },
    },
];

/// Returns `[batch, heads, steps, size]` for a shape with the heads in a dimension of their own or not.
pub(super) fn heads_apart(shape: &[usize], n_heads: Option<usize>) -> Result<[usize; 4], OpError> {
    match (shape, n_heads) {
        (&[b, h, s, d], _) => Ok([b, h, s, d]),
        (&[b, s, all], Some(h)) if h > 0 && all.is_multiple_of(h) => Ok([b, h, s, all / h]),
        _ => Err(invalid!("its input of shape {shape:?} has no {n_heads:?} heads")),
    }
}

/// Converts a tensor to `[batch, heads, steps, size]`.
fn apart(x: &Tensor, n_heads: Option<usize>) -> Result<Tensor, OpError> {
    let [b, h, s, d] = heads_apart(x.shape(), n_heads)?;
    Ok(if x.shape().len() == 4 { x.clone() } else { transpose(&x.reshaped([b, s, h, d]), &[0, 2, 1, 3]) })
}

/// Sizes of an attention.
struct AttentionSizes {
    q: [usize; 4],
    k: [usize; 4],
    v: [usize; 4],
    past: usize,
}

impl AttentionSizes {
    /// Total number of keys, including those of the past.
    fn total(&self) -> usize {
        self.past + self.k[2]
    }
}

/// Numbers that a mask adds to the products `[batch, heads, steps, keys]`: 0 or minus infinity for a boolean
/// mask, else the mask's numbers.
fn mask(inputs: Inputs<'_>, shape: &[usize; 4]) -> Result<Vec<f64>, OpError> {
    let [_, n_heads, steps, total] = *shape;
    let mut added = vec![0.0; product(shape)];
    let Some(mask) = inputs.optional_tensor(3)? else { return Ok(added) };
    let [outer @ .., width] = mask.shape() else { return Err(invalid!("its mask is a scalar")) };
    let row = if *width == 1 && total != 1 { *width } else { (*width).min(total) };
    let full = [outer, &[if row == 1 { 1 } else { total }]].concat();
    if broadcast(&[&full, shape]).is_ok_and(|out| out == *shape) && *width <= total {
        let numbers: Vec<f64> = match mask.dtype() {
            DType::Bool => mask.bytes().iter().map(|&b| if b != 0 { 0.0 } else { f64::NEG_INFINITY }).collect(),
            _ => mask.floats(),
        };
        let by = broadcast_strides(mask.shape(), &[&shape[..3], &[*width]].concat());
        for (at, added) in added.iter_mut().enumerate() {
            let column = at % total;
            let index = [at / (total * steps * n_heads), at / (total * steps) % n_heads, at / total % steps];
            let from: usize = index.iter().zip(&by).map(|(i, stride)| i * stride).sum();
            // Keys beyond the end of a shorter mask are masked out.
            *added = if *width == 1 {
                numbers[from]
            } else {
                numbers.get(from + column).copied().filter(|_| column < *width).unwrap_or(f64::NEG_INFINITY)
            };
        }
        Ok(added)
    } else {
        Err(invalid!("its mask {mask:?} does not broadcast to {shape:?}"))
    }
}

impl Attention {
    fn sizes(&self, inputs: Inputs<'_>) -> Result<AttentionSizes, OpError> {
        let q = heads_apart(inputs.shape(0)?, self.n_q_heads)?;
        let k = heads_apart(inputs.shape(1)?, self.n_kv_heads)?;
        let v = heads_apart(inputs.shape(2)?, self.n_kv_heads)?;
        let past = inputs.optional(4).map_or(Ok(0), |past| match *past.shape() {
            [b, h, s, d] if [b, h, d] == [k[0], k[1], k[3]] => Ok(s),
            _ => Err(invalid!("past keys of shape {:?} do not fit", past.shape())),
        })?;
        let past_of_values = inputs.optional(5).map_or(&[][..], |past| past.shape());
        let fits = q[0] == k[0]
            && [k[0], k[1], k[2]] == [v[0], v[1], v[2]]
            && q[3] == k[3]
            && k[1] > 0
            && q[1].is_multiple_of(k[1])
            && inputs.optional(4).is_some() == inputs.optional(5).is_some()
            && (past_of_values.is_empty() || past_of_values == [v[0], v[1], past, v[3]]);
        if fits {
            Ok(AttentionSizes { q, k, v, past })
        } else {
            Err(invalid!("queries {q:?}, keys {k:?} and values {v:?} do not fit"))
        }
    }

    /// Keys or values, input `at`, separated by heads and appended to those of the past.
    fn with_past(&self, inputs: Inputs<'_>, at: usize, ty: &TensorType) -> Result<Tensor, OpError> {
        let new = apart(inputs.tensor(at)?, self.n_kv_heads)?;
        let Some(past) = inputs.optional_tensor(at + 3)? else { return Ok(new) };
        let mut bytes = Vec::with_capacity(past.bytes().len() + new.bytes().len());
        let n = ty.shape[0] * ty.shape[1];
        let (before, behind) = (past.bytes().len() / n.max(1), new.bytes().len() / n.max(1));
        for at in 0..n {
            bytes.extend_from_slice(&past.bytes()[at * before..(at + 1) * before]);
            bytes.extend_from_slice(&new.bytes()[at * behind..(at + 1) * behind]);
        }
        Ok(Tensor::new(ty.clone(), bytes.into()).expect("past and new"))
    }

    /// Masks out keys beyond the lengths, the causal bound and the windows.
    fn hide(&self, inputs: Inputs<'_>, sizes: &AttentionSizes, added: &mut [f64]) -> Result<(), OpError> {
        let ([batch, n_heads, steps, _], total) = (sizes.q, sizes.total());
        let n_valid = inputs.optional_i64s(6)?;
        if n_valid.as_ref().is_some_and(|n| n.len() != batch) {
            return Err(invalid!("lengths of keys do not fit a batch of {batch}"));
        }
        for (at, added) in added.iter_mut().enumerate() {
            let (column, row, b) = ((at % total) as i64, (at / total % steps) as i64, at / (total * steps * n_heads));
            let valid = n_valid.as_ref().map(|n| n[b]);
            let offset = match valid {
                Some(valid) if inputs.optional(4).is_none() => valid.saturating_sub(steps as i64),
                _ => sizes.past as i64,
            };
            let place = row.saturating_add(offset);
            let is_hidden = self.is_causal && column > place
                || self.left_window.is_some_and(|n| place.saturating_sub(column) > n)
                || self.right_window.is_some_and(|n| column.saturating_sub(place) > n)
                || valid.is_some_and(|valid| column >= valid);
            if is_hidden {
                *added = f64::NEG_INFINITY;
            }
        }
        Ok(())
    }

    /// Computes the weighted sums of values, and the requested products.
    fn attend(
        &self,
        sizes: &AttentionSizes,
        queries: &[f64],
        [k, v]: [&[f64]; 2],
        added: &[f64],
        sink: Option<&[f64]>,
    ) -> (Vec<f64>, Vec<f64>) {
        let AttentionSizes { q: [batch, n_heads, steps, depth], k: [_, n_kv, ..], v: [.., width], .. } = *sizes;
        let total = sizes.total();
        let scale = self.scale.unwrap_or(1.0 / (depth as f64).sqrt());
        let repeats = n_heads / n_kv;
        let mut shown = vec![0.0; added.len()];
        let mut out = vec![0.0; batch * n_heads * steps * width];
        for row in 0..batch * n_heads * steps {
            let (b, head) = (row / (steps * n_heads), row / steps % n_heads);
            let of_head = (b * n_kv + head / repeats) * total;
            let q = &queries[row * depth..(row + 1) * depth];
            let added = &added[row * total..(row + 1) * total];
            let shown = &mut shown[row * total..(row + 1) * total];
            let mut scores = Vec::with_capacity(total);
            for j in 0..total {
                let key = &k[(of_head + j) * depth..(of_head + j + 1) * depth];
                let product = q.iter().zip(key).map(|(a, b)| a * b).sum::<f64>() * scale;
                let bounded = if self.softcap > 0.0 { (product / self.softcap).tanh() * self.softcap } else { product };
                shown[j] = match self.products {
                    Products::Plain if self.softcap > 0.0 => bounded,
                    Products::Plain => product,
                    Products::Bounded => bounded,
                    Products::Masked | Products::Softmax => bounded + added[j],
                };
                scores.push(bounded + added[j]);
            }
            // The result of a query that sees no key is zero.
            let sees_none = added.iter().all(|&x| x == f64::NEG_INFINITY);
            let sink = sink.map_or(f64::NEG_INFINITY, |sink| sink[head]);
            let largest = scores.iter().copied().fold(sink, f64::max);
            let sum = scores.iter().map(|x| (x - largest).exp()).sum::<f64>() + (sink - largest).exp();
            for (j, x) in scores.iter().enumerate() {
                let weight = if sees_none { 0.0 } else { (x - largest).exp() / sum };
                if self.products == Products::Softmax {
                    shown[j] = weight;
                }
                let value = &v[(of_head + j) * width..(of_head + j + 1) * width];
                if weight != 0.0 {
                    out[row * width..(row + 1) * width].iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
                }
            }
        }
        (out, shown)
    }
}

impl Operation for Attention {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let AttentionSizes { q: [b, h, s, _], k, v, past } = self.sizes(inputs)?;
        let dtype = inputs.fact(0)?.dtype();
        let total = past + k[2];
        let out = if inputs.shape(0)?.len() == 4 { vec![b, h, s, v[3]] } else { vec![b, s, h * v[3]] };
        Ok(vec![
            TensorType::new(dtype, out),
            TensorType::new(inputs.fact(1)?.dtype(), [b, k[1], total, k[3]]),
            TensorType::new(inputs.fact(2)?.dtype(), [b, v[1], total, v[3]]),
            TensorType::new(dtype, [b, h, s, total]),
        ])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let types = self.infer(inputs)?;
        let sizes = self.sizes(inputs)?;
        let [batch, n_heads, steps, _] = sizes.q;
        let queries = apart(inputs.tensor(0)?, self.n_q_heads)?.floats();
        let (keys, values) = (self.with_past(inputs, 1, &types[1])?, self.with_past(inputs, 2, &types[2])?);
        let shape = [batch, n_heads, steps, sizes.total()];
        let mut added = mask(inputs, &shape)?;
        self.hide(inputs, &sizes, &mut added)?;
        let sink = inputs.optional_tensor(7)?.map(Tensor::floats);
        let (out, shown) = self.attend(&sizes, &queries, [&keys.floats(), &values.floats()], &added, sink.as_deref());
        let out = Tensor::from_floats(types[0].dtype, [batch, n_heads, steps, sizes.v[3]], &out);
        let out = if types[0].shape.len() == 4 {
            out
        } else {
            transpose(&out, &[0, 2, 1, 3]).reshaped(types[0].shape.clone())
        };
        let shown = Tensor::from_floats(types[3].dtype, shape, &shown);
        Ok(vec![out, keys, values, shown])
    }
}

impl RotaryEmbedding {
    /// Returns `[batch, heads, steps, size]`, and the number of rotated elements of a head.
    fn sizes(&self, inputs: Inputs<'_>) -> Result<([usize; 4], usize), OpError> {
        let [cosines, sines, _] = self.inputs;
        let half = inputs.shape(cosines)?.last().copied().unwrap_or(0);
        let n_heads = match self.n_heads {
            0 => inputs.shape(0)?.last().map_or(0, |n| n / (2 * half).max(1)),
            n_heads => n_heads,
        };
        let sizes = heads_apart(inputs.shape(0)?, Some(n_heads))?;
        let turned = if self.n_turned == 0 { sizes[3] } else { self.n_turned };
        if turned <= sizes[3] && 2 * half == turned && inputs.shape(cosines)? == inputs.shape(sines)? {
            Ok((sizes, turned))
        } else {
            Err(invalid!("angles of shape {:?} do not fit heads of {}", inputs.shape(cosines)?, sizes[3]))
        }
    }
}

impl Operation for KeyMask {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let keys = inputs.ty(1)?;
        let past = inputs.optional(2).map_or(0, |past| past.shape().get(2).copied().unwrap_or(0));
        let shape = match (inputs.shape(0)?, &keys.shape[..]) {
            (&[n], &[batch, new, _]) if n == batch => vec![batch, 1, 1, past + new],
            (&[batch, keys], _) => vec![batch, 1, 1, keys],
            (&[batch, queries, keys], _) => vec![batch, 1, queries, keys],
            (mask, keys) => {
                return Err(unsupported!(
                    "its mask of shape {mask:?} beside keys of shape {keys:?} is not supported (give one of shape \
                     [batch], [batch, keys] or [batch, queries, keys])"
                ));
            }
        };
        Ok(vec![TensorType { dtype: keys.dtype, shape }])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let (mask, keys) = (inputs.tensor(0)?, ty.shape[3]);
        let numbers = mask.i64s();
        let is_seen = |at: usize| match mask.shape().len() {
            1 => ((at % keys) as i64) < numbers[at / keys],
            _ => numbers[at] > 0,
        };
        let n = ty.shape.iter().product();
        let added: Vec<f64> = (0..n).map(|at| if is_seen(at) { 0.0 } else { self.least }).collect();
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &added)])
    }
}

impl Operation for RotaryEmbedding {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        self.sizes(inputs)?;
        Ok(vec![inputs.ty(0)?.clone()])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ([batch, n_heads, steps, depth], turned) = self.sizes(inputs)?;
        let x = inputs.tensor(0)?;
        let (cosines, sines) = (inputs.tensor(self.inputs[0])?.floats(), inputs.tensor(self.inputs[1])?.floats());
        let positions = inputs.optional_i64s(self.inputs[2])?;
        let is_first = inputs.optional(self.inputs[2]).is_some_and(|positions| positions.shape() == [1]);
        let half = turned / 2;
        let n_angles = cosines.len() / half.max(1);
        let heads_first = x.shape().len() == 4;
        let mut numbers = x.floats();
        for b in 0..batch {
            for s in 0..steps {
                let place = match &positions {
                    Some(positions) if is_first => positions[0].saturating_add(s as i64),
                    Some(positions) => positions.get(b * steps + s).copied().unwrap_or(-1),
                    None => (b * steps + s) as i64,
                };
                let place = usize::try_from(place).ok().filter(|&place| place < n_angles);
                let place = place.ok_or_else(|| invalid!("a position has no angles"))?;
                for head in 0..n_heads {
                    let start = match heads_first {
                        true => ((b * n_heads + head) * steps + s) * depth,
                        false => ((b * steps + s) * n_heads + head) * depth,
                    };
                    for i in 0..half {
                        let (first, second) = if self.is_interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
                        let (a, b) = (numbers[start + first], numbers[start + second]);
                        let (cosine, sine) = (cosines[place * half + i], sines[place * half + i]);
                        numbers[start + first] = cosine * a - sine * b;
                        numbers[start + second] = sine * a + cosine * b;
                    }
                }
            }
        }
        Ok(vec![Tensor::from_floats(x.dtype(), x.shape(), &numbers)])
    }
}
