//! Import of gather operators.

use tilewright_graph::op::{Gather, GatherElements, OneHot, Unary, axis};
use tilewright_graph::{DType, Op, Tensor};
use tilewright_ir::Expr;

use super::job::NodeImport;
use crate::net::{Kind, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{add, choose_if, input, less, max, min, mul, not, number, where_less};

impl NodeImport<'_> {
    /// Lowers to a slice at one position of a dimension, without that dimension.
    fn part(&mut self, from: ValueId, axis: usize, place: i64, to: ValueId) -> Lowered {
        self.need_code(from)?;
        let mut shape = self.net.shape(from).to_vec();
        let mut parts = vec![(0, 1); shape.len()];
        parts[axis].0 = if place < 0 { place + shape[axis] } else { place };
        shape[axis] = 1;
        let part = self.step("part", Kind::Slice(parts), &[from], &shape);
        self.push(Kind::View, &[part], to);
        Ok(())
    }

    /// Lowers to a gather of the elements at the positions `index` along a dimension.
    fn gathered(&mut self, from: ValueId, index: ValueId, axis: usize, by_element: bool, to: ValueId) -> Lowered {
        self.need_code(from)?;
        self.need_integers(index)?;
        self.push(Kind::Gather { axis, by_element }, &[from, index], to);
        Ok(())
    }

    /// Lowers to slices at constant index tuples; batches are not supported.
    pub(super) fn gathered_by_tuples(&mut self, n_batch_dims: usize) -> Lowered {
        let (from, index, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let shape = self.shape(0)?;
        need(n_batch_dims == 0, || NoCode::Form("known indices of batches"))?;
        let numbers = self.known(index)?.i64s();
        let n = self.last_size(index)? as usize;
        self.need_code(from)?;
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
            return Ok(());
        }
        let table = self.step("table", Kind::View, &[from], &[outer, inner]);
        let name = format!("{}.places", self.node.place.node);
        let bytes: Vec<u8> = places.iter().flat_map(|place| place.to_le_bytes()).collect();
        let list = self.net.add_bytes(&name, DType::I64, &[places.len() as i64], bytes);
        let kind = Kind::Gather { axis: 0, by_element: false };
        let rows = self.step("rows", kind, &[table, list], &[places.len() as i64, inner]);
        self.push(Kind::View, &[rows], to);
        Ok(())
    }

    /// Lowers one-hot: along a new dimension, one number at the position of an index and another number
    /// elsewhere.
    pub(super) fn one_hot(&mut self, op: &OneHot) -> Lowered {
        let (index, values, to) = (self.input(0)?, self.input(2)?, self.output()?);
        self.need_code(index)?;
        self.need_code(to)?;
        self.need_code(values)?;
        let (mut inputs, mut parts) = (Vec::new(), Vec::new());
        for at in 0..2 {
            parts.push(self.net.literal_at(values, at).unwrap_or_else(|| input(2 + at)));
            let part = self.step("value", Kind::Slice(vec![(at as i64, 1)]), &[values], &[1]);
            inputs.push(self.viewed("value", part, &[]));
        }
        let shape = self.net.shape(to).to_vec();
        let axis = axis(op.axis, shape.len())?;
        let (mut column, mut along) = (shape.clone(), vec![1; shape.len()]);
        (column[axis], along[axis]) = (1, shape[axis]);
        let of_index = self.net.shape(index).to_vec();
        let index = self.whole_map("index", input(0), &[index], &of_index);
        let places = self.whole_constant("places", DType::I64, &along, &(0..shape[axis]).collect::<Vec<_>>());
        let column = self.step("column", Kind::View, &[index], &column);
        // Negative numbers count from the end.
        let differs = |index: Expr| not(not(less(index.clone(), input(1))).and(not(less(input(1), index))));
        let is_other = differs(input(0)).and(differs(add(input(0), number(shape[axis] as f64))));
        let value = choose_if(is_other, parts[0].clone(), parts[1].clone());
        self.push(Kind::Map(value), &[column, places, inputs[0], inputs[1]], to);
        Ok(())
    }

    /// Lowers to slices at index tuples known only in a run, in batches along shared leading dimensions.
    pub(super) fn gathered_at(&mut self, n_batch: usize) -> Lowered {
        let (from, index, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let (shape, tuples) = (self.shape(0)?, self.shape(1)?);
        let (depth, outer) = (self.last_size(index)?, &tuples[..tuples.len() - 1]);
        self.need_code(from)?;
        self.need_integers(index)?;
        need(depth > 0, || NoCode::Form("tuples without indices"))?;
        let end = n_batch + depth as usize;
        let n: i64 = outer.iter().product();
        let mut inputs = self.tuple_columns(index, n, depth);
        let stride = |d: usize| shape[d + 1..end].iter().product::<i64>();
        let clamped = |k: usize| {
            let extent = shape[n_batch + k];
            let place = from_start(input(k), extent);
            mul(max(min(place, number(extent as f64 - 1.0)), number(0.0)), number(stride(n_batch + k) as f64))
        };
        let mut place = (0..depth as usize).map(clamped).reduce(add).expect("a tuple has an index");
        if n_batch > 0 {
            let n_batches: i64 = shape[..n_batch].iter().product();
            let per_batch = n / n_batches;
            let rows = (0..n).map(|at| at / per_batch * stride(n_batch - 1)).collect::<Vec<_>>();
            inputs.push(self.whole_constant("batches", DType::I64, &[n], &rows));
            place = add(place, input(depth as usize));
        }
        let places = self.whole_map("places", place, &inputs, &[n]);
        let (rows, width) = (shape[..end].iter().product(), shape[end..].iter().product());
        let table = self.viewed("table", from, &[rows, width]);
        let kind = Kind::Gather { axis: 0, by_element: false };
        let found = self.step("rows", kind, &[table, places], &[n, width]);
        self.push(Kind::View, &[found], to);
        Ok(())
    }

    /// Lowers to the slices for which a constant condition holds.
    pub(super) fn compressed(&mut self, along: Option<i64>) -> Lowered {
        let (x, holds, to, mut shape) = (self.input(0)?, self.input(1)?, self.output()?, self.shape(0)?);
        self.need_code(x)?;
        let axis = match along {
            Some(along) => axis(along, shape.len())?,
            None => {
                shape = vec![shape.iter().product()];
                0
            }
        };
        let holds = self.known(holds)?.i64s();
        let places: Vec<i64> =
            (0..shape[axis]).zip(&holds).filter(|(_, holds)| **holds != 0).map(|(at, _)| at).collect();
        let x = self.viewed("list", x, &shape);
        let list = self.whole_constant("places", DType::I64, &[places.len() as i64], &places);
        self.push(Kind::Gather { axis, by_element: false }, &[x, list], to);
        Ok(())
    }

    /// Splits `n` rows of `depth` numbers into columns.
    pub(super) fn tuple_columns(&mut self, rows: ValueId, n: i64, depth: i64) -> Vec<ValueId> {
        let table = self.step("tuples", Kind::View, &[rows], &[n, depth]);
        let column = |k: i64| {
            let column = self.step("column", Kind::Slice(vec![(0, 1), (k, 1)]), &[table], &[n, 1]);
            self.step("column", Kind::View, &[column], &[n])
        };
        (0..depth).map(column).collect()
    }

    /// Lowers a gather along one dimension; a single constant position becomes a slice.
    pub(super) fn gather(&mut self, op: &Gather) -> Lowered {
        let (from, index, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let axis = axis(op.axis, self.shape(0)?.len())?;
        match self.net.value(index).constant.as_ref().map(Tensor::i64s).as_deref() {
            Some(&[place]) => self.part(from, axis, place, to),
            _ => {
                self.note_selection(from, index, axis);
                self.gathered(from, index, axis, false, to)
            }
        }
    }

    /// Notes that an input, in whatever shape, selects slices of a constant.
    fn note_selection(&mut self, from: ValueId, index: ValueId, axis: usize) {
        let is_kept = |op: &Op| {
            matches!(op, Op::Cast(_) | Op::Reshape(_) | Op::Flatten(_) | Op::Squeeze(_) | Op::Unsqueeze(_))
                || matches!(op, Op::Unary(Unary::Identity))
        };
        let mut source = tilewright_graph::ValueId(index.0 as u32);
        while let Some((node, _)) = self.graph.value(source).producer
            && let (node, Some(Some(input))) = (self.graph.node(node), self.graph.node(node).inputs.first())
            && is_kept(&node.op)
        {
            source = *input;
        }
        let source = ValueId(source.0 as usize);
        if self.net.inputs.contains(&source) && self.net.value(from).constant.is_some() {
            self.net.selections.push((source, self.net.shape(from)[axis]));
        }
    }

    /// Lowers a gather in which each element has its own position along one dimension.
    pub(super) fn gather_elements(&mut self, op: &GatherElements) -> Lowered {
        let (from, index, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let axis = axis(op.axis, self.shape(0)?.len())?;
        self.gathered(from, index, axis, true, to)
    }
}

/// Normalises an index, which counts from the end if it is negative.
pub(crate) fn from_start(index: Expr, n: i64) -> Expr {
    where_less(index.clone(), number(0.0), add(index.clone(), number(n as f64)), index)
}
