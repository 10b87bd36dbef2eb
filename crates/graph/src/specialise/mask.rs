//! Attention masks of language models with a key-value cache: all ones, or causal for the new tokens.

use std::borrow::Cow;

use super::{Bindings, Specialiser, Varies};
use crate::error::Place;
use crate::op::{Binary, Where};
use crate::{DType, Dim, Graph, Node, Op, Tensor, TensorType, Value, ValueId};

/// Name that exporters give the mask of a language model with a cache.
pub(super) const MASK: &str = "attention_mask";

/// Bindings of a model with a cache of open length: the mask has the total length of cached and new tokens,
/// and is all ones if it has one element for each key.
pub(super) fn with_cache<'b>(graph: &Graph, bindings: &'b Bindings) -> Cow<'b, Bindings> {
    let named = |name: &str| graph.inputs.iter().map(|&id| graph.value(id)).find(|value| value.name == name);
    let dims = |name: &str| named(name)?.declared.as_ref()?.dims.as_deref();
    let is_open = |dim: &Dim| matches!((dim, &bindings.open), (Dim::Named(name), Some(open)) if name == open);
    let is_cache = |id: &ValueId| {
        let declared = graph.value(*id).declared.as_ref();
        declared.and_then(|declared| declared.dims.as_ref()).is_some_and(|dims| dims.len() == 4 && is_open(&dims[2]))
    };
    if !graph.inputs.iter().any(is_cache) {
        return Cow::Owned(Bindings { open: None, ..bindings.clone() });
    }
    let is_given = bindings.values.iter().any(|(name, _)| name == MASK);
    let (Some([outer @ .., length]), false) = (dims(MASK), is_given) else { return Cow::Borrowed(bindings) };
    let size = |dim: &Dim| bindings.bound(std::slice::from_ref(dim)).ok().map(|sizes| sizes[0]);
    let past = bindings.open.as_ref().and_then(|open| size(&Dim::Named(open.clone())));
    let new = ["input_ids", "inputs_embeds"].into_iter().find_map(|name| size(dims(name)?.get(1)?));
    let mut made = bindings.clone();
    match (length, size(length), past, new) {
        (_, Some(_), ..) => {}
        (Dim::Named(name), None, Some(past), Some(new)) => made.dims.push((name.clone(), past + new)),
        _ => return Cow::Borrowed(bindings),
    }
    if outer.len() == 1 {
        made.values.push((MASK.to_owned(), "1".to_owned()));
    }
    Cow::Owned(made)
}

/// Term added where a token does not see a key: about the lowest number to which others can be added without
/// overflow.
const UNSEEN: f64 = -1e38;
const UNSEEN_F16: f64 = -6e4;

impl Specialiser {
    /// Adds nodes that compute a causal mask for an input with a row for each new token and a column for each
    /// key, so that each token sees the keys up to its own position; `None` for any other mask.
    pub(super) fn causal_mask(&mut self, mask: &Value, bindings: &Bindings) -> Option<ValueId> {
        let (open, ty) = (bindings.open.as_ref()?, mask.ty.as_ref()?);
        let past = bindings.bound(&[Dim::Named(open.clone())]).ok()?[0];
        let [outer @ .., n_new, n_all] = &ty.shape[..] else { return None };
        let is_one = !outer.is_empty() && outer.iter().all(|n| *n == 1) && past + n_new == *n_all;
        (mask.name == MASK && mask.constant.is_none() && is_one).then_some(())?;
        let mut numbers = |first: usize, n: usize, others: &[usize], varies: Varies| {
            let shape = [outer, others].concat();
            let all: Vec<i128> = (first..first + n).map(|at| at as i128).collect();
            self.given(Tensor::from_integers(DType::I64, shape, &all), varies)
        };
        let columns = numbers(0, *n_all, &[1, *n_all], Varies { shape: true, elements: false });
        let rows = numbers(past, *n_new, &[*n_new, 1], Varies { shape: false, elements: true });
        let seen = TensorType::new(DType::Bool, ty.shape.clone());
        let seen = self.computed(Binary::LessOrEqual.into(), &[columns, rows], seen);
        if ty.dtype == DType::Bool {
            return Some(seen);
        }
        let [yes, no] = match ty.dtype {
            DType::F16 => [0.0, UNSEEN_F16],
            dtype if dtype.is_float() => [0.0, UNSEEN],
            _ => [1.0, 0.0],
        };
        let [yes, no] = [yes, no].map(|number| self.given(Tensor::scalar(ty.dtype, number), Varies::default()));
        Some(self.computed(Where.into(), &[seen, yes, no], ty.clone()))
    }

    fn given(&mut self, tensor: Tensor, varies: Varies) -> ValueId {
        let ty = Some(tensor.ty().clone());
        self.graph.add_value(Value { name: MASK.to_owned(), ty, constant: Some(tensor), varies, ..Value::default() })
    }

    fn computed(&mut self, op: Op, inputs: &[ValueId], ty: TensorType) -> ValueId {
        let varies = Varies { shape: true, elements: true };
        let value = Value { name: MASK.to_owned(), ty: Some(ty), varies, ..Value::default() };
        let new = self.graph.add_value(value);
        let place = Place { node: MASK.to_owned(), operator: "Where".to_owned(), opset: 0 };
        let inputs = inputs.iter().map(|id| Some(*id)).collect();
        self.graph.add_node(Node { op, place, inputs, outputs: vec![Some(new)] });
        new
    }
}
