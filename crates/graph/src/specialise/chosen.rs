//! Rows that `NonZero` chooses, computed as all rows of which some do not count.
//!
//! A graph network or a mixture of experts chooses rows by a condition, computes with them row by row, and
//! adds the results up by index. As many rows as there are elements, in an order of their own, with the
//! condition beside them, have a known shape, and a row that was not chosen adds nothing.

use std::collections::{HashMap, HashSet};

use super::varies::{is_elementwise, moves};
use super::{Specialiser, Varies};
use crate::error::Place;
use crate::op::{
    Cast, Concat, Fact, GatherNd, Inputs, Op, Reduce, ReduceKind, Reshape, Scatter, Transpose, Unsqueeze, Where, axis,
};
use crate::{DType, Graph, Node, OpError, Problem, Reason, Tensor, TensorType, Value, ValueId};

/// Maximum number of elements of a condition.
const MOST_ROWS: usize = 1 << 20;

/// Dimension of a tensor that has a row for each element of a condition.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Rows {
    axis: usize,
    /// Vector of truths: the rows that count.
    counts: ValueId,
    /// Whether each row is the coordinates of its element.
    is_own: bool,
    /// Whether rows that do not count are indices, too, as the coordinates of elements are.
    is_index: bool,
}

/// Values that depend on rows which may not count.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    rows: HashMap<ValueId, Rows>,
    /// Constants with the number of such rows among their elements: 1 for each such element, 0 for others.
    numbers: HashMap<ValueId, Tensor>,
    /// Condition for each number of rows; `None` if there are several.
    of_length: HashMap<usize, Option<ValueId>>,
    /// Vector of truths for each value that was searched.
    found: HashMap<ValueId, ValueId>,
    /// Vector of truths for each list of joined ones, or numbers of rows that all count.
    joined: HashMap<Vec<Result<ValueId, usize>>, ValueId>,
    /// Conditions whose rows are multiplied, and their maximum number if sizes are fixed.
    multiplied: HashSet<ValueId>,
    most_multiplied: usize,
}

/// Property of an output.
enum Becomes {
    Plain,
    Number(Tensor),
    Rows(Rows),
}

impl Specialiser {
    /// Whether a node searches for elements, or reads what depends on chosen rows.
    pub(super) fn is_of_chosen(&self, node: &Node, inputs: &[Option<ValueId>]) -> bool {
        let Some(chosen) = &self.chosen else { return false };
        let is_marked = |id: &ValueId| chosen.rows.contains_key(id) || chosen.numbers.contains_key(id);
        let is_known = |id: &Option<ValueId>| id.is_some_and(|id| self.graph.value(id).constant.is_some());
        matches!(node.op, Op::NonZero(_)) && !is_known(&inputs[0]) || inputs.iter().flatten().any(is_marked)
    }

    /// Specialises such a node.
    ///
    /// # Errors
    /// If it would compute something else from rows that do not count.
    pub(super) fn chosen_node(
        &mut self,
        old: &Graph,
        node: &Node,
        inputs: &[Option<ValueId>],
        map: &mut [Option<ValueId>],
    ) -> Result<(), Box<Problem>> {
        let refuse = || Box::new(Problem { place: Some(node.place.clone()), reason: Reason::Op(OpError::ShapeOfData) });
        if let (Op::NonZero(_), Some(of), Some(Some(output))) = (&node.op, inputs[0], node.outputs.first()) {
            let coordinates = self.all_coordinates(of, &node.place).ok_or_else(refuse)?;
            map[output.0 as usize] = Some(coordinates);
            return Ok(());
        }
        if let Op::If(_) = node.op {
            let is_plain = |id: ValueId| self.rows(id).is_none() && !self.is_number(id);
            let is_known = inputs[0].is_some_and(|id| self.graph.value(id).constant.is_some() && is_plain(id));
            return if is_known { self.plain_node(old, node, inputs, map) } else { Err(refuse()) };
        }
        let given = self.without_others(&node.op, inputs, &node.place).ok_or_else(refuse)?;
        self.plain_node(old, node, &given, map)?;
        for output in node.outputs.iter().flatten() {
            let Some(new) = map[output.0 as usize] else { return Err(refuse()) };
            let becomes = self.becomes(&node.op, inputs, new, &node.place).ok_or_else(refuse)?;
            map[output.0 as usize] = Some(self.marked(&node.op, new, becomes, &node.place).ok_or_else(refuse)?);
        }
        Ok(())
    }

    /// Notes what an output becomes. Integers that are looked up are indices where they do not count, too.
    fn marked(&mut self, op: &Op, new: ValueId, becomes: Becomes, place: &Place) -> Option<ValueId> {
        let is_looked_up = matches!(op, Op::Gather(_) | Op::GatherElements(_) | Op::GatherNd(_));
        let value = self.graph.value(new);
        let is_integer = matches!(value.ty.as_ref()?.dtype, DType::I32 | DType::I64);
        let may_be_none = is_looked_up && is_integer && value.constant.is_none();
        match becomes {
            Becomes::Plain => {}
            Becomes::Number(of) => drop(self.chosen.as_mut()?.numbers.insert(new, of)),
            Becomes::Rows(rows) if may_be_none && !rows.is_index => {
                let first = self.neutral(new, ReduceKind::Sum, place)?;
                let new = self.counted(new, rows, first, place)?;
                self.chosen.as_mut()?.rows.insert(new, Rows { is_index: true, ..rows });
                return Some(new);
            }
            Becomes::Rows(rows) => drop(self.chosen.as_mut()?.rows.insert(new, rows)),
        }
        Some(new)
    }

    /// Whether an output of the graph has rows that do not count, or their number.
    pub(super) fn is_of_rows(&self, id: ValueId) -> bool {
        self.rows(id).is_some() || self.is_number(id)
    }

    fn rows(&self, id: ValueId) -> Option<Rows> {
        self.chosen.as_ref()?.rows.get(&id).copied()
    }

    fn is_number(&self, id: ValueId) -> bool {
        self.chosen.as_ref().is_some_and(|chosen| chosen.numbers.contains_key(&id))
    }

    fn type_of(&self, id: ValueId) -> Option<TensorType> {
        self.graph.value(id).ty.clone()
    }

    /// Coordinates of all elements of a value, `[rank, n]`. A dimension of the open size is the slowest.
    fn all_coordinates(&mut self, of: ValueId, place: &Place) -> Option<ValueId> {
        let (ty, varies) = (self.type_of(of)?, self.graph.value(of).varies);
        let (rank, n) = (ty.shape.len(), ty.n_elements());
        if rank == 0 || n > MOST_ROWS || self.is_of_rows(of) {
            return None;
        }
        let open = self.graph.open_size.filter(|_| varies.shape);
        let first = open.and_then(|open| ty.shape.iter().rposition(|n| *n == open)).unwrap_or(0);
        let order: Vec<usize> = std::iter::once(first).chain((0..rank).filter(|axis| *axis != first)).collect();
        let mut numbers = vec![0; rank * n];
        let mut stride = 1;
        for &axis in order.iter().rev() {
            (0..n).for_each(|at| numbers[axis * n + at] = (at / stride % ty.shape[axis]) as i128);
            stride *= ty.shape[axis];
        }
        let counts = match self.chosen.as_ref()?.found.get(&of) {
            Some(counts) => *counts,
            None => self.truths(of, &order, place)?,
        };
        let chosen = self.chosen.as_mut()?;
        chosen.found.insert(of, counts);
        chosen.know_length(n, counts);
        let coordinates = Tensor::from_integers(DType::I64, [rank, n], &numbers);
        let new = self.constant_of(coordinates, Varies { shape: varies.shape, elements: false }, place);
        self.chosen.as_mut()?.rows.insert(new, Rows { axis: 1, counts, is_own: true, is_index: true });
        Some(new)
    }

    /// Truths of a value's elements as a vector, with its dimensions in the given order.
    fn truths(&mut self, of: ValueId, order: &[usize], place: &Place) -> Option<ValueId> {
        let ty = self.type_of(of)?;
        let mut truths = of;
        if ty.dtype != DType::Bool {
            truths = self.added(Cast { to: Some(DType::Bool) }.into(), &[truths], place)?;
        }
        if !order.is_sorted() {
            let order = order.iter().map(|axis| *axis as i64).collect();
            truths = self.added(Transpose { order: Some(order) }.into(), &[truths], place)?;
        }
        if ty.shape.len() == 1 && truths != of {
            return Some(truths);
        }
        self.added(Reshape { shape: Some(vec![-1]), allow_zero: false }.into(), &[truths], place)
    }

    fn constant_of(&mut self, tensor: Tensor, varies: Varies, place: &Place) -> ValueId {
        let name = format!("{} rows {}", place.node, self.graph.values().len());
        let ty = Some(tensor.ty().clone());
        self.graph.add_value(Value { name, ty, constant: Some(tensor), varies, ..Value::default() })
    }

    /// Adds a node with one output.
    fn added(&mut self, op: Op, inputs: &[ValueId], place: &Place) -> Option<ValueId> {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let facts = super::facts_of(&self.graph, &inputs);
        let ty = op.operation().infer(Inputs(&facts)).ok()?.into_iter().next();
        let varies = self.varies(&op, &inputs);
        let name = format!("{} rows {}", place.node, self.graph.values().len());
        let new = self.graph.add_value(Value { name, ty, varies, ..Value::default() });
        self.graph.add_node(Node { op, place: place.clone(), inputs, outputs: vec![Some(new)] });
        Some(new)
    }

    /// Inputs of a node that sums up or scatters rows, of which those that do not count become neutral; of
    /// other nodes, the same inputs.
    fn without_others(&mut self, op: &Op, inputs: &[Option<ValueId>], place: &Place) -> Option<Vec<Option<ValueId>>> {
        let mut given = inputs.to_vec();
        let rows: Vec<Option<Rows>> = inputs.iter().map(|id| self.rows((*id)?)).collect();
        let is_by_index = matches!(
            op,
            Op::Gather(_) | Op::GatherElements(_) | Op::GatherNd(_) | Op::ScatterElements(_) | Op::ScatterNd(_)
        );
        // Indices of rows that do not count may be no indices.
        if let (true, Some(Some(places @ Rows { is_index: false, .. }))) = (is_by_index, rows.get(1)) {
            let first = self.neutral(inputs[1]?, ReduceKind::Sum, place)?;
            given[1] = Some(self.counted(inputs[1]?, *places, first, place)?);
        }
        match (op, &rows[..]) {
            (Op::ScatterElements(_) | Op::ScatterNd(_), [data, Some(places), Some(updates)]) => {
                let reduction = match op {
                    Op::ScatterElements(scatter) => scatter.reduction,
                    Op::ScatterNd(scatter) => scatter.reduction,
                    _ => return None,
                };
                let same = (places.axis, places.counts) == (updates.axis, updates.counts);
                (data.is_none() && same).then_some(())?;
                let other = match (reduction, op) {
                    (Scatter::Add, _) => self.neutral(inputs[2]?, ReduceKind::Sum, place)?,
                    (Scatter::Mul, _) => self.neutral(inputs[2]?, ReduceKind::Prod, place)?,
                    (Scatter::Max, _) => self.neutral(inputs[2]?, ReduceKind::Max, place)?,
                    (Scatter::Min, _) => self.neutral(inputs[2]?, ReduceKind::Min, place)?,
                    // Each element has a row, which writes what is there.
                    (Scatter::Replace, Op::ScatterNd(_)) if places.is_own => {
                        self.added(GatherNd { n_batch_dims: 0 }.into(), &[inputs[0]?, given[1]?], place)?
                    }
                    (Scatter::Replace, _) => return None,
                };
                given[2] = Some(self.counted(inputs[2]?, *updates, other, place)?);
            }
            (Op::Reduce(reduce), [Some(rows), ..]) if self.reduced(reduce, inputs)?.contains(&rows.axis) => {
                let other = self.neutral(inputs[0]?, reduce.kind, place)?;
                given[0] = Some(self.counted(inputs[0]?, *rows, other, place)?);
            }
            _ => {}
        }
        Some(given)
    }

    /// Rows of a value where they count, and others elsewhere.
    fn counted(&mut self, id: ValueId, rows: Rows, other: ValueId, place: &Place) -> Option<ValueId> {
        let n_behind = self.type_of(id)?.shape.len() - rows.axis - 1;
        let mut truths = rows.counts;
        if n_behind > 0 {
            let axes = (1..=n_behind as i64).collect();
            truths = self.added(Unsqueeze { axes: Some(axes) }.into(), &[truths], place)?;
        }
        self.added(Where.into(), &[truths, id, other], place)
    }

    /// Number that a reduction of a value's elements leaves out.
    fn neutral(&mut self, id: ValueId, kind: ReduceKind, place: &Place) -> Option<ValueId> {
        let dtype = self.type_of(id)?.dtype;
        let (least, most) = if dtype.is_float() { (0, 0) } else { dtype.integer_range() };
        let limit = |float, integer| match dtype.is_float() {
            true => Tensor::scalar(dtype, float),
            false => Tensor::from_integers(dtype, [], &[integer]),
        };
        let number = match kind {
            ReduceKind::L1 | ReduceKind::L2 | ReduceKind::LogSum | ReduceKind::Sum | ReduceKind::SumSquare => {
                Tensor::scalar(dtype, 0.0)
            }
            ReduceKind::Prod => Tensor::scalar(dtype, 1.0),
            ReduceKind::Max => limit(f64::NEG_INFINITY, least),
            ReduceKind::Min => limit(f64::INFINITY, most),
            ReduceKind::Mean | ReduceKind::LogSumExp => return None,
        };
        Some(self.constant_of(number, Varies::default(), place))
    }

    /// Dimensions that a node reduces; `None` if they are not known.
    fn reduced(&self, reduce: &Reduce, inputs: &[Option<ValueId>]) -> Option<Vec<usize>> {
        let axes = reduce.axes(Inputs(&super::facts_of(&self.graph, inputs))).ok()?;
        Some(axes.unwrap_or_default())
    }

    /// Dimensions that a node leaves out or puts in.
    fn named_axes(&self, op: &Op, inputs: &[Option<ValueId>], rank: usize) -> Option<Vec<usize>> {
        let axes = match op {
            Op::Squeeze(squeeze) => &squeeze.axes,
            Op::Unsqueeze(unsqueeze) => &unsqueeze.axes,
            _ => return None,
        };
        let axes = match (axes, inputs.get(1).copied().flatten()) {
            (Some(axes), _) => axes.clone(),
            (None, given) => self.graph.value(given?).constant.as_ref()?.i64s(),
        };
        axes.iter().map(|at| axis(*at, rank).ok()).collect()
    }

    /// Property of an output of a node with such inputs; `None` if rows that do not count would make a
    /// difference.
    fn becomes(&mut self, op: &Op, inputs: &[Option<ValueId>], new: ValueId, place: &Place) -> Option<Becomes> {
        let rows: Vec<Option<Rows>> = inputs.iter().map(|id| self.rows((*id)?)).collect();
        let first = rows.first().copied().flatten();
        let out = self.type_of(new)?.shape;
        let is_constant = self.graph.value(new).constant.is_some();
        let numbers: Vec<usize> =
            (0..inputs.len()).filter(|&at| inputs[at].is_some_and(|id| self.is_number(id))).collect();
        match op {
            Op::Shape(_) | Op::Size(_) => {
                let Some(rows) = first else { return Some(Becomes::Plain) };
                let mut axes = vec![0; self.type_of(inputs[0]?)?.shape.len()];
                axes[rows.axis] = 1;
                let all = match op {
                    Op::Shape(shape) => {
                        let place = |at: i64| (if at < 0 { at + axes.len() as i64 } else { at }).max(0) as usize;
                        let end = place(shape.end.unwrap_or(i64::MAX)).min(axes.len());
                        axes[place(shape.start).min(end)..end].to_vec()
                    }
                    _ => vec![1],
                };
                return match all.contains(&1) {
                    true => Some(Becomes::Number(Tensor::from_integers(DType::I64, out, &all))),
                    false => Some(Becomes::Plain),
                };
            }
            Op::ConstantOfShape(_) => return self.made(inputs[0]?, &out),
            Op::Expand(_) if first.is_none() && numbers == [1] => return self.made(inputs[1]?, &out),
            _ if rows.iter().all(Option::is_none) => {
                return is_constant.then(|| self.numbers_among(op, inputs, &out)).flatten();
            }
            _ => {}
        }
        let is_size = match op {
            Op::Expand(_) | Op::Reshape(_) => numbers.iter().all(|&at| at == 1),
            Op::Slice(_) => numbers.iter().all(|&at| at == 2),
            _ => numbers.is_empty(),
        };
        let found = if is_size { self.rows_of(op, inputs, &rows, &out, place)? } else { return None };
        let Some(mut found) = found else { return Some(Becomes::Plain) };
        let n = *self.type_of(found.counts)?.shape.first()?;
        if !self.are_of_axis(op, inputs, &numbers, &out, found.axis)? {
            return None;
        }
        let is_part = matches!(op, Op::Gather(_) | Op::Concat(_) | Op::Slice(_));
        let keeps = matches!(op, Op::Cast(_)) || moves(op) && !is_part;
        found.is_own &= keeps && first.is_some();
        let is_moved = matches!(op, Op::Cast(_)) || moves(op) && (first.is_some() || matches!(op, Op::Concat(_)));
        found.is_index = is_moved && rows.iter().flatten().all(|rows| rows.is_index);
        (out.get(found.axis) == Some(&n)).then_some(Becomes::Rows(found))
    }

    /// Whether the sizes that are numbers of rows are those of one dimension of the output.
    fn are_of_axis(
        &self,
        op: &Op,
        inputs: &[Option<ValueId>],
        numbers: &[usize],
        out: &[usize],
        axis_of_rows: usize,
    ) -> Option<bool> {
        let Some(&at) = numbers.first() else { return Some(true) };
        let of = self.chosen.as_ref()?.numbers.get(&inputs[at]?)?.i64s();
        let axes: Vec<usize> = match (op, inputs.get(3).copied().flatten()) {
            (Op::Slice(_), Some(axes)) => {
                let axes = self.graph.value(axes).constant.as_ref()?.i64s();
                axes.iter().map(|at| axis(*at, out.len()).ok()).collect::<Option<_>>()?
            }
            (Op::Slice(_), None) => (0..of.len()).collect(),
            _ => (out.len().checked_sub(of.len())?..out.len()).collect(),
        };
        Some(axes.iter().zip(&of).all(|(axis, of)| *of == 0 || *axis == axis_of_rows))
    }

    /// Rows of a new tensor of this shape, of which one element is a number of rows.
    fn made(&self, shape: ValueId, out: &[usize]) -> Option<Becomes> {
        let chosen = self.chosen.as_ref()?;
        let of = chosen.numbers.get(&shape)?.i64s();
        let n_ahead = out.len().checked_sub(of.len())?;
        let mut axes = (0..of.len()).filter(|at| of[*at] == 1);
        let (axis, None) = (axes.next()? + n_ahead, axes.next()) else { return None };
        let counts = (*chosen.of_length.get(&out[axis])?)?;
        Some(Becomes::Rows(Rows { axis, counts, is_own: false, is_index: false }))
    }

    /// Elements of a constant that depend on numbers of rows: those to which they are moved, or all.
    fn numbers_among(&self, op: &Op, inputs: &[Option<ValueId>], out: &[usize]) -> Option<Becomes> {
        let numbers = &self.chosen.as_ref()?.numbers;
        let n_moved = match op {
            Op::Concat(_) => inputs.len(),
            op if moves(op) || matches!(op, Op::Cast(_)) => 1,
            _ => 0,
        };
        let is_moved = n_moved > 0 && !inputs[n_moved..].iter().flatten().any(|id| numbers.contains_key(id));
        let all = Tensor::from_integers(DType::I64, out, &vec![1; out.iter().product()]);
        if !is_moved || matches!(op, Op::Cast(_)) {
            let same = inputs[0].and_then(|id| numbers.get(&id)).filter(|_| is_moved);
            return Some(Becomes::Number(same.cloned().unwrap_or(all)));
        }
        let marks: Vec<Option<Tensor>> = (inputs.iter().enumerate())
            .map(|(at, id)| {
                let value = self.graph.value((*id)?);
                let none =
                    |ty: &TensorType| Tensor::from_integers(DType::I64, ty.shape.clone(), &vec![0; ty.n_elements()]);
                let own = || numbers.get(&(*id)?).cloned().or_else(|| value.ty.as_ref().map(none));
                if at < n_moved { own() } else { value.constant.clone() }
            })
            .collect();
        let facts: Vec<_> = marks.iter().map(|x| x.as_ref().map(|x| Fact { ty: x.ty(), value: Some(x) })).collect();
        let found = op.operation().evaluate(Inputs(&facts)).ok()?.into_iter().next()?;
        Some(if found.i64s().contains(&1) { Becomes::Number(found) } else { Becomes::Plain })
    }

    /// Rows of the output of a node that reads rows; `Some(None)` if it has none.
    fn rows_of(
        &mut self,
        op: &Op,
        inputs: &[Option<ValueId>],
        rows: &[Option<Rows>],
        out: &[usize],
        place: &Place,
    ) -> Option<Option<Rows>> {
        let types: Vec<Option<TensorType>> = inputs.iter().map(|id| self.type_of((*id)?)).collect();
        let rank = |at: usize| types.get(at).and_then(Option::as_ref).map(|ty| ty.shape.len());
        let (first, second) = (rows.first().copied().flatten(), rows.get(1).copied().flatten());
        let moved = |rows: Rows, axis: usize| Some(Some(Rows { axis, ..rows }));
        let is_alone = rows.iter().skip(1).all(Option::is_none);
        match op {
            op if is_elementwise(op) => self.rows_side_by_side(&types, rows, out.len()).map(Some),
            Op::Expand(_) => moved(first?, first?.axis + out.len() - rank(0)?),
            Op::Slice(_) => {
                let steps = inputs.get(4).copied().flatten().map(|id| self.graph.value(id).constant.as_ref());
                let is_forward =
                    steps.is_none_or(|steps| steps.is_some_and(|steps| steps.i64s().iter().all(|n| *n > 0)));
                is_forward.then_some(())?;
                moved(first?, first?.axis)
            }
            Op::Transpose(transpose) => {
                let rank = rank(0)?;
                let order: Vec<i64> = transpose.order.clone().unwrap_or((0..rank as i64).rev().collect());
                let rows = first?;
                moved(rows, order.iter().position(|at| axis(*at, rank).ok() == Some(rows.axis))?)
            }
            Op::Squeeze(_) | Op::Unsqueeze(_) => {
                let (rows, n_in, n_out) = (first?, rank(0)?, out.len());
                let axes = self.named_axes(op, inputs, n_in.max(n_out))?;
                match n_out > n_in {
                    true => moved(rows, (0..n_out).filter(|at| !axes.contains(at)).nth(rows.axis)?),
                    false => moved(rows, (0..n_in).filter(|at| !axes.contains(at)).position(|at| at == rows.axis)?),
                }
            }
            Op::Flatten(_) | Op::Reshape(_) => moved(first?, axis_of(&types[0].as_ref()?.shape, first?.axis, out)?),
            Op::Gather(gather) => {
                let at = axis(gather.axis, rank(0)?).ok()?;
                match (first, second) {
                    (None, Some(places)) => moved(places, places.axis + at),
                    (Some(rows), None) if rows.axis < at => moved(rows, rows.axis),
                    (Some(rows), None) if rows.axis > at => moved(rows, rows.axis + rank(1)? - 1),
                    _ => None,
                }
            }
            Op::GatherNd(GatherNd { n_batch_dims: 0 }) if first.is_none() && second?.axis + 1 < rank(1)? => {
                moved(second?, second?.axis)
            }
            Op::GatherElements(gather) if first.is_none() => {
                (axis(gather.axis, rank(0)?).ok()? == second?.axis).then_some(second)
            }
            Op::Concat(concat) => self.rows_in_turn(axis(concat.axis, out.len()).ok()?, &types, rows, place).map(Some),
            Op::ScatterElements(scatter) => {
                (rows[0].is_none() && axis(scatter.axis, out.len()).ok()? == second?.axis).then_some(None)
            }
            Op::ScatterNd(_) => (rows[0].is_none() && second?.axis + 1 < rank(1)?).then_some(None),
            Op::Reduce(reduce) => {
                let (rows, axes) = (first?, self.reduced(reduce, inputs)?);
                let n_ahead = axes.iter().filter(|axis| **axis < rows.axis && !reduce.keeps_dims).count();
                if axes.contains(&rows.axis) { Some(None) } else { moved(rows, rows.axis - n_ahead) }
            }
            Op::MatMul(_) | Op::Gemm(_) => {
                let is_row = match op {
                    Op::Gemm(gemm) => !gemm.transposes_a && first?.axis == 0,
                    _ => rank(1)? == 2 && first?.axis + 1 < rank(0)?,
                };
                let chosen = self.chosen.as_mut()?;
                chosen.multiplied.insert(first?.counts);
                let is_light = self.graph.open_size.is_some() || chosen.multiplied.len() <= chosen.most_multiplied;
                (is_row && is_light && is_alone).then_some(first)
            }
            Op::Split(split) => (axis(split.axis, out.len()).ok()? != first?.axis).then_some(first),
            Op::Softmax(op) if !op.is_flat => (axis(op.axis, out.len()).ok()? != first?.axis).then_some(first),
            Op::LayerNormalization(op) if is_alone => (axis(op.axis, out.len()).ok()? > first?.axis).then_some(first),
            _ => None,
        }
    }

    /// Rows of the result of operands that broadcast.
    fn rows_side_by_side(&self, types: &[Option<TensorType>], rows: &[Option<Rows>], rank: usize) -> Option<Rows> {
        let mut found: Option<Rows> = None;
        for (ty, rows) in types.iter().zip(rows) {
            let (Some(ty), Some(rows)) = (ty, rows) else { continue };
            let rows = Rows { axis: (rows.axis + rank).checked_sub(ty.shape.len())?, ..*rows };
            let is_same = found.is_none_or(|of| (of.axis, of.counts) == (rows.axis, rows.counts));
            found = is_same.then_some(Some(rows))?;
        }
        let found = found?;
        // Operands without rows are the same for all of them.
        let is_one = |(ty, rows): (&Option<TensorType>, &Option<Rows>)| match (ty, rows) {
            (Some(ty), None) => (found.axis + ty.shape.len()).checked_sub(rank).is_none_or(|at| ty.shape[at] == 1),
            _ => true,
        };
        types.iter().zip(rows).all(is_one).then_some(found)
    }

    /// Rows of tensors that are joined along a dimension; rows of tensors that have none all count.
    fn rows_in_turn(
        &mut self,
        along: usize,
        types: &[Option<TensorType>],
        rows: &[Option<Rows>],
        place: &Place,
    ) -> Option<Rows> {
        let known = rows.iter().flatten().next()?;
        if known.axis != along {
            let is_same =
                |rows: &Option<Rows>| rows.is_some_and(|of| (of.axis, of.counts) == (known.axis, known.counts));
            return rows.iter().all(is_same).then_some(*known);
        }
        let mut parts = Vec::with_capacity(rows.len());
        for (ty, rows) in types.iter().zip(rows) {
            parts.push(match rows {
                Some(rows) if rows.axis == along => Ok(rows.counts),
                Some(_) => return None,
                None => Err(ty.as_ref()?.shape[along]),
            });
        }
        let counts = match self.chosen.as_ref()?.joined.get(&parts) {
            Some(counts) => *counts,
            None => {
                let varies = Varies { shape: self.graph.open_size.is_some(), elements: false };
                let truths: Vec<ValueId> = (parts.iter())
                    .map(|part| {
                        part.unwrap_or_else(|n| {
                            let ones = Tensor::from_integers(DType::Bool, [n], &vec![1; n]);
                            self.constant_of(ones, varies, place)
                        })
                    })
                    .collect();
                self.added(Concat { axis: 0 }.into(), &truths, place)?
            }
        };
        let n = *self.type_of(counts)?.shape.first()?;
        let chosen = self.chosen.as_mut()?;
        chosen.joined.insert(parts, counts);
        chosen.know_length(n, counts);
        Some(Rows { axis: along, counts, is_own: false, is_index: false })
    }
}

impl Chosen {
    /// Account of no rows yet; at fixed sizes products process those of at most so many conditions.
    pub fn of(most_multiplied: usize) -> Chosen {
        Chosen { most_multiplied, ..Chosen::default() }
    }

    fn know_length(&mut self, n: usize, counts: ValueId) {
        let known = self.of_length.entry(n).or_insert(Some(counts));
        *known = known.filter(|known| *known == counts);
    }
}

/// Dimension of a reshaped tensor that has the elements of one of its dimensions; `None` if these are divided
/// or joined with others.
fn axis_of(shape: &[usize], axis: usize, out: &[usize]) -> Option<usize> {
    let ahead = |shape: &[usize]| shape.iter().product::<usize>();
    (0..out.len()).find(|&at| out[at] == shape[axis] && ahead(&out[..at]) == ahead(&shape[..axis]))
}
