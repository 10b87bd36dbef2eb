//! Import of scatter operators: maps that compute the indices, and C functions that write the elements.

use tilewright_graph::op::{Col2Im, Inputs, MaxUnpool, Operation, Scatter, TensorScatter, axis};
use tilewright_graph::{DType, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::BinaryOp;
use tilewright_runtime::host::SCATTER;

use super::gather::from_start;
use super::job::NodeImport;
use crate::net::{Kind, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{self, add, choose_if, input, less, mul, number, sub, where_less};

/// Maximum number of bytes of positions that are compared with those of a box.
const MOST_POSITIONS: usize = 1 << 26;

impl NodeImport<'_> {
    /// Lowers a scatter that replaces a box of a tensor, as an assignment to a slice does.
    pub(super) fn box_replaced(&mut self) -> Lowered {
        let (from, index, new, to) = (self.input(0)?, self.input(1)?, self.input(2)?, self.output()?);
        let (shape, n) = (self.shape(0)?, self.last_size(index)? as usize);
        // Positions may be as many as a mask of attention has elements.
        let numbers = self.computed(1, MOST_POSITIONS)?.i64s();
        self.need_code(from)?;
        need(n > 0, || NoCode::Form("tuples without indices"))?;
        let place = |tuple: &[i64]| -> Vec<i64> {
            tuple.iter().zip(&shape).map(|(at, extent)| if *at < 0 { at + extent } else { *at }).collect()
        };
        let (Some(first), Some(last)) = (numbers.chunks(n).next(), numbers.chunks(n).last()) else {
            return Err(self.no_elements(index));
        };
        let [first, last] = [first, last].map(place);
        let sizes: Vec<i64> = first.iter().zip(&last).map(|(first, last)| last - first + 1).collect();
        let is_inside = |d: usize| first[d] >= 0 && sizes[d] > 0 && last[d] < shape[d];
        let no_box = || NoCode::Form("slices that are no box");
        need((0..n).all(is_inside), no_box)?;
        // All positions of the box, in order.
        let behind: Vec<i64> = (0..n).map(|d| sizes[d + 1..].iter().product()).collect();
        let is_at = |tuple: &[i64], at: i64| {
            (0..n).all(|d| {
                let own = if tuple[d] < 0 { tuple[d] + shape[d] } else { tuple[d] };
                own == first[d] + at / behind[d] % sizes[d]
            })
        };
        let n_places = sizes.iter().product::<i64>() as usize;
        let is_in_order = numbers.chunks(n).zip(0..).all(|(tuple, at)| is_at(tuple, at));
        need(n_places == numbers.len() / n && is_in_order, no_box)?;
        if sizes == shape[..n] {
            self.push(Kind::View, &[new], to);
            return Ok(());
        }
        // Each element is one of the padded box, or an old one.
        let mut starts = first.clone();
        starts.resize(shape.len(), 0);
        let is_part = |d: usize| d < n && sizes[d] < shape[d];
        let mask_shape: Vec<i64> = (0..shape.len()).map(|d| if is_part(d) { shape[d] } else { 1 }).collect();
        let is_new = |at: i64| {
            let at_dim = |d: usize| at / mask_shape[d + 1..].iter().product::<i64>() % mask_shape[d];
            (0..n).filter(|&d| is_part(d)).all(|d| (0..sizes[d]).contains(&(at_dim(d) - first[d])))
        };
        let mask: Vec<u8> = (0..mask_shape.iter().product()).map(|at| u8::from(is_new(at))).collect();
        let inner = [&sizes[..], &shape[n..]].concat();
        let name = format!("{}.is_new", self.node.place.node);
        let is_new = self.net.add_value(&name, DType::Bool, &mask_shape);
        self.net.values[is_new.0].constant = Tensor::new(self.net.value(is_new).ty(), mask.into());
        let new = self.step("new", Kind::View, &[new], &inner);
        let new = self.step("bordered", Kind::Pad(starts, 0.0), &[new], &shape);
        self.push(Kind::Map(scalar::choose(input(0), input(1), input(2))), &[is_new, new, from], to);
        Ok(())
    }

    /// Lowers an update of a cache at positions that an input gives.
    pub(super) fn cached(&mut self, op: &TensorScatter) -> Lowered {
        let (x, updates) = (self.input(0)?, self.input(1)?);
        let (shape, new) = (self.shape(0)?, self.shape(1)?);
        let axis = axis(op.axis, shape.len())?;
        let (n, n_new, batch) = (shape[axis], new[axis], shape[0]);
        let outer: i64 = shape[..axis].iter().product();
        let inner: i64 = shape[axis + 1..].iter().product();
        let starts = match self.try_input(2) {
            Some(starts) => self.viewed("starts", starts, &[batch, 1, 1]),
            None => self.whole_constant("starts", DType::I64, &[1, 1, 1], &[0]),
        };
        let rows = [batch, outer / batch, n_new];
        let bases = (0..outer).map(|o| o * n * inner).collect::<Vec<_>>();
        let bases = self.whole_constant("bases", DType::I64, &[batch, outer / batch, 1], &bases);
        let steps = self.counted(1, 0, n_new, 1);
        let at = add(input(0), input(1));
        let at = if op.is_circular {
            where_less(at.clone(), number(n as f64), at.clone(), sub(at, number(n as f64)))
        } else {
            at
        };
        let is_inside = less(at.clone(), number(n as f64)).and(less(number(-1.0), at.clone()));
        let place = choose_if(is_inside, add(mul(at, number(inner as f64)), input(2)), number(-1.0));
        let places = self.whole_map("places", place, &[starts, steps, bases], &rows);
        let places = self.viewed("places", places, &[outer * n_new]);
        self.scattered(Scatter::Replace, x, places, updates)
    }

    /// Replaces elements or slices of a tensor at these positions by updates, or combines them. The position
    /// is −1 if an index is out of bounds.
    fn scattered(&mut self, how: Scatter, from: ValueId, places: ValueId, updates: ValueId) -> Lowered {
        let to = self.output()?;
        self.scattered_to(how, from, places, updates, to)
    }

    fn scattered_to(&mut self, how: Scatter, from: ValueId, places: ValueId, updates: ValueId, to: ValueId) -> Lowered {
        let how = match how {
            Scatter::Replace => 0,
            // Adding or multiplying booleans is `or` or `and`.
            Scatter::Add if self.net.value(from).dtype == DType::Bool => 3,
            Scatter::Mul if self.net.value(from).dtype == DType::Bool => 4,
            Scatter::Add => 1,
            Scatter::Mul => 2,
            Scatter::Max => 3,
            Scatter::Min => 4,
        };
        if how != 0 {
            self.need_code(from)?;
        }
        let (n, rows) = (self.net.value(from).n_elements(), self.net.value(places).n_elements());
        if rows == 0 || self.net.value(updates).n_elements() == 0 {
            self.push(Kind::View, &[from], to);
            return Ok(());
        }
        let width = self.net.value(updates).n_elements() / rows;
        self.call(SCATTER, vec![self.type_number(from)?, n, rows, width, how], 0, &[from, places, updates], &[to]);
        Ok(())
    }

    /// Lowers a scatter of elements at indices along one dimension.
    pub(super) fn scatter_elements(&mut self, along: i64, how: Scatter) -> Lowered {
        let (from, index, updates) = (self.input(0)?, self.input(1)?, self.input(2)?);
        self.need_integers(index)?;
        let (shape, places) = (self.shape(0)?, self.shape(1)?);
        let axis = axis(along, shape.len())?;
        let (index, places) = self.before_expansion(index, axis, &shape).unwrap_or((index, places));
        let fits = |d: usize| d == axis || places[d] <= shape[d];
        let is_inside = shape.len() == places.len() && (0..shape.len()).all(fits);
        need(is_inside, || NoCode::Form("more indices than the tensor has elements"))?;
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

    /// Undoes the expansion of indices along all dimensions after the scattered one if they are as in the
    /// data: then whole rows are scattered, as in the sums over edges of graph neural networks.
    fn before_expansion(&self, index: ValueId, axis: usize, data: &[i64]) -> Option<(ValueId, Vec<i64>)> {
        let maker = self.net.nodes.iter().rev().find(|node| node.outputs.contains(&index))?;
        let Kind::Map(Expr::Load(_, _)) = &maker.kind else { return None };
        let (from, full) = (maker.input(0), self.net.shape(index));
        let small = self.net.shape(from);
        let is_row = |d: usize| if d > axis { small[d] == 1 && full[d] == data[d] } else { small[d] == full[d] };
        (small.len() == full.len() && (0..full.len()).all(is_row)).then(|| (from, small.to_vec()))
    }

    /// Lowers a scatter of slices at index tuples.
    pub(super) fn scatter_nd(&mut self, how: Scatter) -> Lowered {
        let (from, index, updates) = (self.input(0)?, self.input(1)?, self.input(2)?);
        self.need_integers(index)?;
        let (shape, tuples) = (self.shape(0)?, self.shape(1)?);
        let (depth, outer) = (self.last_size(index)?, &tuples[..tuples.len() - 1]);
        let n = outer.iter().product();
        if depth == 0 || n == 0 {
            // Without an index, the whole tensor is one slice.
            let places = self.whole_constant("places", DType::I64, &[n], &vec![0; n as usize]);
            return self.scattered(how, from, places, updates);
        }
        let columns = self.tuple_columns(index, n, depth);
        let stride = |k: usize| shape[k + 1..].iter().product::<i64>();
        let term = |k: usize| mul(from_start(input(k), shape[k]), number(stride(k) as f64));
        let place = (0..columns.len()).map(term).reduce(add).expect("a tuple has an index");
        let bounds: Vec<(Expr, i64)> = (0..columns.len()).map(|k| (input(k), shape[k])).collect();
        let places = self.whole_map("places", or_outside(place, &bounds), &columns, &[n]);
        self.scattered(how, from, places, updates)
    }

    /// Adds a tensor of zeros.
    pub(crate) fn zeros(&mut self, dtype: DType, shape: &[i64]) -> ValueId {
        let zero = self.value("zero", dtype, &[]);
        self.net.values[zero.0].constant = Some(Tensor::scalar(dtype, 0.0));
        self.repeated("zeros", zero, shape)
    }

    /// Lowers an unpooling: numbers return to the positions where a pooling found them.
    pub(super) fn unpooled(&mut self, op: &MaxUnpool) -> Lowered {
        let (x, places, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let inferred = op.infer(Inputs(&self.facts()[..2]))?.remove(0).shape;
        let inferred: Vec<i64> = inferred.iter().map(|&d| d as i64).collect();
        let out = self.net.shape(to).to_vec();
        let shape = self.net.shape(places).to_vec();
        let mut place = input(0);
        if inferred != out {
            // The strides of positions are larger in a larger image.
            let over = |x: Expr, n: i64| Expr::binary(BinaryOp::Div, x, number(n as f64));
            let behind = |shape: &[i64], d: usize| shape[d + 1..].iter().product::<i64>();
            let digit = |d: usize| {
                let from = over(input(0), behind(&inferred, d));
                let rounds = mul(over(from.clone(), inferred[d]), number(inferred[d] as f64));
                mul(Expr::binary(BinaryOp::Sub, from, rounds), number(behind(&out, d) as f64))
            };
            place = (0..out.len()).map(digit).reduce(add).expect("an image has a dimension");
        }
        let n: i64 = inferred.iter().product();
        let is_inside = less(input(0), number(n as f64)).and(less(number(-1.0), input(0)));
        let place = choose_if(is_inside, place, number(-1.0));
        let places = self.whole_map("places", place, &[places], &shape);
        let zeros = self.zeros(self.net.value(x).dtype, &out);
        self.scattered(Scatter::Replace, zeros, places, x)
    }

    /// Lowers the sum of overlapping blocks, in a padded image that is then cropped.
    pub(super) fn blocks_added(&mut self, op: &Col2Im) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_code(x)?;
        let list = |job: &Self, at: usize| Ok::<_, NoCode>(job.known(job.input(at)?)?.i64s());
        let (image, block) = (list(self, 1)?, list(self, 2)?);
        let rank = image.len();
        let dilations = op.dilations.clone().unwrap_or_else(|| vec![1; rank]);
        let strides = op.strides.clone().unwrap_or_else(|| vec![1; rank]);
        let pads = op.pads.clone().unwrap_or_else(|| vec![0; 2 * rank]);
        let reach = |d: usize| dilations[d] * (block[d] - 1) + 1;
        let count = |d: usize| (image[d] + pads[d] + pads[d + rank] - reach(d)) / strides[d] + 1;
        let counts: Vec<i64> = (0..rank).map(count).collect();
        let wide: Vec<i64> = (0..rank).map(|d| (counts[d] - 1) * strides[d] + reach(d)).collect();
        let out = self.net.shape(to).to_vec();
        let (planes, area): (i64, i64) = (out[..2].iter().product(), wide.iter().product());
        let digit = |at: i64, shape: &[i64], d: usize| at / shape[d + 1..].iter().product::<i64>() % shape[d];
        let (n_inside, n_windows): (i64, i64) = (block.iter().product(), counts.iter().product());
        let mut places = Vec::new();
        for inside in 0..n_inside {
            for window in 0..n_windows {
                let at = |d: usize| digit(window, &counts, d) * strides[d] + digit(inside, &block, d) * dilations[d];
                places.push((0..rank).fold(0, |place, d| place * wide[d] + at(d)));
            }
        }
        let n = places.len() as i64;
        let of_block = self.whole_constant("blocks", DType::I64, &[n], &places);
        let of_plane = self.counted(2, 0, planes, area);
        let places = self.whole_map("places", add(input(0), input(1)), &[of_plane, of_block], &[planes, n]);
        let all = [&out[..2], &wide[..]].concat();
        let dtype = self.net.value(x).dtype;
        let zeros = self.zeros(dtype, &all);
        let sums = self.value("sums", dtype, &all);
        self.scattered_to(Scatter::Add, zeros, places, x, sums)?;
        let before: Vec<i64> = [0, 0].into_iter().chain((0..rank).map(|d| -pads[d])).collect();
        self.push(Kind::Pad(before, 0.0), &[sums], to);
        Ok(())
    }
}

/// Selects a position if all indices are within bounds, else −1.
fn or_outside(place: Expr, bounds: &[(Expr, i64)]) -> Expr {
    let is_inside = |place: Expr, (index, n): &(Expr, i64)| {
        let is_below = less(index.clone(), number(*n as f64));
        let is_above = less(number(-(*n as f64) - 1.0), index.clone());
        choose_if(is_below.and(is_above), place, number(-1.0))
    };
    bounds.iter().fold(place, is_inside)
}
