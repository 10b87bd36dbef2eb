//! Operators that no kernel computes as functions in C, with kernels around them that find places.

use tilewright_graph::op::{Scatter, TopK, axis};
use tilewright_graph::{DType, Tensor, TensorType};
use tilewright_ir::Expr;
use tilewright_runtime::host::{HostCall, HostOperator, SCATTER, TOP_K};

use crate::import::Job;
use crate::net::{Kind, ValueId};
use crate::scalar::{add, choose_if, input, less, mul, number, where_less};

impl Job<'_> {
    /// The number of a value's element type among parameters of host operators, where runs have that type.
    pub(crate) fn type_number(&self, id: ValueId) -> Option<i64> {
        let name = self.net.value(id).dtype.name();
        let (dtype, _) = tilewright_ir::DType::ALL.into_iter().find(|(_, known)| *known == name)?;
        Some(HostCall::type_number(dtype))
    }

    /// Calls a host operator.
    pub(crate) fn call(
        &mut self,
        operator: HostOperator,
        parameters: Vec<i64>,
        scratch_bytes: usize,
        inputs: &[ValueId],
        outputs: &[ValueId],
    ) {
        let call = HostCall { operator, parameters, scratch_bytes };
        self.push_several(Kind::Call(Box::new(call)), inputs, outputs);
    }

    /// The node's output at a place, or one of this type that nobody reads.
    pub(crate) fn output_or(&mut self, at: usize, dtype: DType, shape: &[i64]) -> ValueId {
        match self.outputs.get(at).copied().flatten() {
            Some(id) => id,
            None => self.value(&format!("unused{at}"), dtype, shape),
        }
    }

    /// The largest or smallest along a dimension, and where they are.
    pub(crate) fn top_k(&mut self, op: &TopK) -> Option<()> {
        let x = self.try_input(0)?;
        let shape = self.net.shape(x).to_vec();
        let axis = axis(op.axis, shape.len()).ok()?;
        let known = self.outputs.iter().flatten().next().copied()?;
        let out = self.net.shape(known).to_vec();
        let around = [shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product(), out[axis]];
        let parameters = [&[self.type_number(x)?], &around[..], &[i64::from(op.is_largest)]].concat();
        let values = self.output_or(0, self.net.value(x).dtype, &out);
        let places = self.output_or(1, DType::I64, &out);
        self.call(TOP_K, parameters, 16 * out[axis] as usize, &[x], &[values, places]);
        Some(())
    }

    /// Whole numbers of i64 that an expression makes of others.
    fn whole_map(&mut self, what: &str, value: Expr, inputs: &[ValueId], shape: &[i64]) -> ValueId {
        let to = self.value(what, DType::I64, shape);
        self.push(Kind::Map(value), inputs, to)
    }

    /// Multiples of a number along one of so many dimensions.
    fn counted(&mut self, rank: usize, axis: usize, n: i64, stride: i64) -> ValueId {
        let mut along = vec![1; rank];
        along[axis] = n;
        self.whole_constant("counted", DType::I64, &along, &(0..n).map(|at| at * stride).collect::<Vec<_>>())
    }

    /// Elements or slices of a tensor replaced by updates, or combined with them, from these places on; a place
    /// is −1 where an index leads out of the tensor.
    pub(crate) fn scattered(&mut self, how: Scatter, from: ValueId, places: ValueId, updates: ValueId) -> Option<()> {
        let to = self.output()?;
        let how = match how {
            Scatter::Replace => 0,
            // A truth that is added or multiplied is `or` and `and`.
            Scatter::Add if self.net.value(from).dtype == DType::Bool => 3,
            Scatter::Mul if self.net.value(from).dtype == DType::Bool => 4,
            Scatter::Add => 1,
            Scatter::Mul => 2,
            Scatter::Max => 3,
            Scatter::Min => 4,
        };
        (how == 0 || self.has_code(from)).then_some(())?;
        let (n, rows) = (self.net.value(from).n_elements(), self.net.value(places).n_elements());
        if rows == 0 || self.net.value(updates).n_elements() == 0 {
            self.push(Kind::View, &[from], to);
            return Some(());
        }
        let width = self.net.value(updates).n_elements() / rows;
        self.call(SCATTER, vec![self.type_number(from)?, n, rows, width, how], 0, &[from, places, updates], &[to]);
        Some(())
    }

    /// Elements at the indices of a dimension, in a tensor of no more than the data's other dimensions.
    pub(crate) fn scatter_elements(&mut self, along: i64, how: Scatter) -> Option<()> {
        let (from, index, updates) = (self.try_input(0)?, self.try_input(1)?, self.try_input(2)?);
        self.is_whole(index).then_some(())?;
        let (shape, places) = (self.shape(0)?, self.shape(1)?);
        let axis = axis(along, shape.len()).ok()?;
        let fits = |d: usize| d == axis || places[d] <= shape[d];
        (shape.len() == places.len() && (0..shape.len()).all(fits)).then_some(())?;
        let stride = |d: usize| shape[d + 1..].iter().product::<i64>();
        let mut inputs = vec![index];
        for d in (0..shape.len()).filter(|&d| d != axis && places[d] > 1) {
            inputs.push(self.counted(shape.len(), d, places[d], stride(d)));
        }
        let others = (1..inputs.len()).map(input);
        let place = others.fold(mul(from_start(input(0), shape[axis]), number(stride(axis) as f64)), add);
        let place = or_outside(place, &[(input(0), shape[axis])]);
        let places = self.whole_map("places", place, &inputs, &places);
        self.scattered(how, from, places, updates)
    }

    /// Slices at tuples of indices.
    pub(crate) fn scatter_nd(&mut self, how: Scatter) -> Option<()> {
        let (from, index, updates) = (self.try_input(0)?, self.try_input(1)?, self.try_input(2)?);
        self.is_whole(index).then_some(())?;
        let (shape, tuples) = (self.shape(0)?, self.shape(1)?);
        let (&depth, outer) = tuples.split_last()?;
        let n = outer.iter().product();
        if depth == 0 || n == 0 {
            // Without an index, all of the tensor is one slice.
            let places = self.whole_constant("places", DType::I64, &[n], &vec![0; n as usize]);
            return self.scattered(how, from, places, updates);
        }
        let columns = self.tuple_columns(index, n, depth);
        let stride = |k: usize| shape[k + 1..].iter().product::<i64>();
        let term = |k: usize| mul(from_start(input(k), shape[k]), number(stride(k) as f64));
        let place = (0..columns.len()).map(term).reduce(add)?;
        let bounds: Vec<(Expr, i64)> = (0..columns.len()).map(|k| (input(k), shape[k])).collect();
        let places = self.whole_map("places", or_outside(place, &bounds), &columns, &[n]);
        self.scattered(how, from, places, updates)
    }

    /// The columns of `n` rows of so many whole numbers each.
    pub(crate) fn tuple_columns(&mut self, rows: ValueId, n: i64, depth: i64) -> Vec<ValueId> {
        let table = self.step("tuples", Kind::View, &[rows], &[n, depth]);
        let column = |k: i64| {
            let column = self.step("column", Kind::Slice(vec![(0, 1), (k, 1)]), &[table], &[n, 1]);
            self.step("column", Kind::View, &[column], &[n])
        };
        (0..depth).map(column).collect()
    }

    /// The node's outputs as constants, where all that it reads is known or has no elements.
    pub(crate) fn evaluate(&mut self) -> Option<()> {
        let empty = |ty: &TensorType| Tensor::new(ty.clone(), bytes::Bytes::new());
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
            let facts: Vec<_> = values
                .iter()
                .map(|x| x.as_ref().map(|x| tilewright_graph::op::Fact { ty: x.ty(), value: Some(x) }))
                .collect();
            let results = self.node.op.operation().evaluate(tilewright_graph::op::Inputs(&facts)).ok()?;
            self.outputs.iter().zip(results).filter_map(|(id, x)| Some(((*id)?, x))).collect()
        };
        for (id, tensor) in found {
            self.net.values[id.0].constant = Some(tensor);
        }
        Some(())
    }
}

/// An index that counts from the end where it is negative.
pub(crate) fn from_start(index: Expr, n: i64) -> Expr {
    where_less(index.clone(), number(0.0), add(index.clone(), number(n as f64)), index)
}

/// A place where all indices are of their dimensions, else −1.
fn or_outside(place: Expr, bounds: &[(Expr, i64)]) -> Expr {
    let is_inside = |place: Expr, (index, n): &(Expr, i64)| {
        let is_below = less(index.clone(), number(*n as f64));
        let is_above = less(number(-(*n as f64) - 1.0), index.clone());
        choose_if(is_below.and(is_above), place, number(-1.0))
    };
    bounds.iter().fold(place, is_inside)
}
