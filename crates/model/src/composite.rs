//! Operators that take several kinds of nodes: places of extremes, running sums, images in other sizes, sums
//! by indices, quantized numbers.

use tilewright_graph::op::{
    ArgReduce, AxisSums, Cumulative, Einsum, GroupNormalization, Inputs, OneHot, QuantizeLinear, Resize, Scaling, axis,
};
use tilewright_graph::{DType, Op, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, ReduceOp, UnaryOp};

use crate::import::Job;
use crate::net::{Kind, Line, ValueId, Windows};
use crate::scalar::{
    add, choose_if, clip, input, is_extreme, less, max, min, mul, not, number, of, quantized, sub, where_less,
};

/// Pixels that each pixel of a resized image is made of along a dimension, at most.
const MOST_TAPS: usize = 32;
/// Single precision counts so far.
const MOST_COUNTED: i64 = 1 << 24;

/// Counts the most pixels that a place is made of.
fn most_taps(places: &[Vec<(usize, f64)>]) -> usize {
    places.iter().map(Vec::len).max().unwrap_or(0)
}

impl Job<'_> {
    /// A constant of integers.
    pub(crate) fn whole_constant(&mut self, what: &str, dtype: DType, shape: &[i64], numbers: &[i64]) -> ValueId {
        let id = self.value(what, dtype, shape);
        let numbers: Vec<i128> = numbers.iter().map(|&n| n.into()).collect();
        let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        self.net.values[id.0].constant = Some(Tensor::from_integers(dtype, shape, &numbers));
        id
    }

    /// Adds a constant of f32 numbers.
    pub(crate) fn constant(&mut self, what: &str, shape: &[i64], numbers: &[f32]) -> ValueId {
        let name = format!("{}.{what}", self.node.place.node);
        self.net.add_constant(&name, shape, numbers)
    }

    /// Adds a constant of numbers in the precision of a value.
    pub(crate) fn real_constant(&mut self, what: &str, like: ValueId, shape: &[i64], numbers: &[f64]) -> ValueId {
        let dtype = self.net.value(like).dtype;
        let id = self.value(what, dtype, shape);
        let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        self.net.values[id.0].constant = Some(Tensor::from_floats(dtype, shape, numbers));
        id
    }

    /// Lowers the position of the largest or smallest element of a dimension: the least or last position that
    /// has it.
    pub(crate) fn arg_reduce(&mut self, op: &ArgReduce) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        let shape = self.net.shape(x).to_vec();
        let axis = axis(op.axis, shape.len()).ok()?;
        let n = shape[axis];
        (self.has_code(x) && n < MOST_COUNTED).then_some(())?;
        let (mut kept, mut along) = (shape.clone(), vec![1; shape.len()]);
        (kept[axis], along[axis]) = (1, n);
        let counted: Vec<f32> = (0..n).map(|at| at as f32).collect();
        let places = self.constant("places", &along, &counted);
        let extreme = if op.is_min { ReduceOp::Min } else { ReduceOp::Max };
        let best = self.step("best", Kind::Reduce(extreme, vec![axis]), &[x], &kept);
        let (order, none) = if op.takes_last { (ReduceOp::Max, -1) } else { (ReduceOp::Min, n) };
        let is_extreme = match self.is_real(x) {
            true => is_extreme(input(0), input(1), op.is_min),
            false => not(less(input(0), input(1))).and(not(less(input(1), input(0)))),
        };
        let place = choose_if(is_extreme, input(2), number(none as f64));
        let to_place = self.value("place", DType::F32, &shape);
        let place = self.push(Kind::Map(place), &[x, best, places], to_place);
        let found = self.step("found", Kind::Reduce(order, vec![axis]), &[place], &kept);
        let whole = self.value("whole", DType::I64, &kept);
        self.push(Kind::Map(input(0)), &[found], whole);
        self.push(Kind::View, &[whole], to);
        Some(())
    }

    /// Lowers one-hot: one of two numbers at the position of an index along a new dimension, the other
    /// elsewhere.
    pub(crate) fn one_hot(&mut self, op: &OneHot) -> Option<()> {
        let (index, values, to) = (self.try_input(0)?, self.try_input(2)?, self.output()?);
        (self.has_code(index) && self.has_code(to) && self.has_code(values)).then_some(())?;
        let (mut inputs, mut parts) = (Vec::new(), Vec::new());
        for at in 0..2 {
            parts.push(self.net.literal_at(values, at).unwrap_or_else(|| input(2 + at)));
            let part = self.step("value", Kind::Slice(vec![(at as i64, 1)]), &[values], &[1]);
            inputs.push(self.viewed("value", part, &[]));
        }
        let shape = self.net.shape(to).to_vec();
        let axis = axis(op.axis, shape.len()).ok()?;
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
        Some(())
    }

    /// Running sums or products along a dimension, as windows that end or begin at each place.
    pub(crate) fn running_windows(&mut self, op: &Cumulative, x: ValueId, axis: usize, to: ValueId) -> Option<()> {
        let shape = self.net.shape(x).to_vec();
        let n = shape[axis];
        let ones = vec![1; shape.len()];
        let (mut kernel, mut before) = (ones.clone(), vec![0; shape.len()]);
        kernel[axis] = n;
        before[axis] = match (op.is_reverse, op.is_exclusive) {
            (false, false) => n - 1,
            (false, true) => n,
            (true, false) => 0,
            (true, true) => -1,
        };
        let reduce = if op.is_product { ReduceOp::Product } else { ReduceOp::Sum };
        let windows = Windows { kernel, strides: ones.clone(), dilations: ones, before };
        self.push(Kind::Window(reduce, windows), &[x], to);
        Some(())
    }

    /// Resizes an image, dimension by dimension: pixels are picked, or a few of them summed.
    pub(crate) fn resized(&mut self, op: &Resize) -> Option<()> {
        let (from, to) = (self.try_input(0)?, self.output()?);
        self.has_code(from).then_some(())?;
        let mut of_axes = op.sums(Inputs(&self.facts())).ok()??;
        let is_pick = |(_, places): &AxisSums| places.iter().all(|taps| matches!(taps[..], [(_, w)] if w == 1.0));
        if of_axes.iter().all(is_pick) {
            let mut lines = vec![Some(Line::SAME); self.net.shape(from).len()];
            for (axis, places) in &of_axes {
                lines[*axis] = Line::through(&places.iter().map(|taps| taps[0].0 as i64).collect::<Vec<_>>());
            }
            if let Some(lines) = lines.into_iter().collect::<Option<Vec<_>>>() {
                return self.moved(Kind::Pick(lines), from, to);
            }
        }
        let shape = self.net.shape(from).to_vec();
        let is_whole = |axis: usize, n: usize| shape[axis] == n as i64;
        let is_same =
            |places: &[Vec<(usize, f64)>]| places.iter().enumerate().all(|(at, taps)| taps[..] == [(at, 1.0)]);
        of_axes.retain(|(axis, places)| !is_whole(*axis, places.len()) || !is_same(places));
        of_axes.iter().all(|(_, places)| (1..=MOST_TAPS).contains(&most_taps(places))).then_some(())?;
        // Integers are summed as numbers, and rounded.
        let is_summed = !self.is_real(from) && !of_axes.iter().all(is_pick);
        let mut x = if is_summed { self.double("numbers", from, &shape) } else { from };
        // Rows first, while there are few of them; the rest of their pixels are neighbours.
        for of_axis in of_axes.iter().rev() {
            x = self.resized_along(x, of_axis, is_pick(of_axis))?;
        }
        match is_summed {
            true => {
                let rounded = Expr::cast(tilewright_ir::DType::F64, of(UnaryOp::Round, input(0)));
                self.push(Kind::Map(rounded), &[x], to)
            }
            false => self.push(Kind::View, &[x], to),
        };
        Some(())
    }

    /// Resizes a tensor along one dimension.
    fn resized_along(&mut self, x: ValueId, (axis, places): &AxisSums, is_pick: bool) -> Option<ValueId> {
        let n = places.len() as i64;
        let mut shape = self.net.shape(x).to_vec();
        shape[*axis] = n;
        let mut along = vec![1; shape.len() - axis];
        along[0] = n;
        let (mut picked, mut weights) = (Vec::new(), Vec::new());
        for tap in 0..most_taps(places) {
            let of = |taps: &Vec<(usize, f64)>| taps.get(tap).copied().unwrap_or((taps[0].0, 0.0));
            let list: Vec<i64> = places.iter().map(|taps| of(taps).0 as i64).collect();
            let list = self.whole_constant("pixels", DType::I64, &[n], &list);
            let kind = Kind::Gather { axis: *axis, by_element: false };
            picked.push(self.step("picked", kind, &[x, list], &shape));
            let numbers: Vec<f64> = places.iter().map(|taps| of(taps).1).collect();
            weights.push(self.real_constant("weights", x, &along, &numbers));
        }
        if is_pick {
            return Some(picked[0]);
        }
        let n_taps = picked.len();
        let value = (0..n_taps).map(|tap| mul(input(tap), input(n_taps + tap))).reduce(add)?;
        Some(self.step("sum", Kind::Map(value), &[picked, weights].concat(), &shape))
    }

    /// Groups of channels with mean 0 and variance 1, scaled and moved by group or by channel.
    pub(crate) fn group_normalization(&mut self, op: &GroupNormalization) -> Option<()> {
        let (x, scale, offset, to) = (self.try_input(0)?, self.try_input(1)?, self.try_input(2)?, self.output()?);
        let shape = self.net.shape(x).to_vec();
        let groups = op.n_groups as i64;
        let of_groups = [shape[0], groups, shape[1..].iter().product::<i64>() / groups];
        let grouped = self.step("groups", Kind::View, &[x], &of_groups);
        let mut normal = self.normalised(grouped, vec![2], op.epsilon)?;
        let mut by = vec![groups, 1];
        if !op.scales_groups {
            normal = self.step("channels", Kind::View, &[normal], &shape);
            by = vec![1; shape.len() - 1];
            by[0] = shape[1];
        }
        let scale = self.step("scale", Kind::View, &[scale], &by);
        let offset = self.step("offset", Kind::View, &[offset], &by);
        if op.scales_groups {
            let scaled = self.value("scaled", DType::F32, &of_groups);
            self.scaled(normal, Some(scale), Some(offset), scaled)?;
            self.push(Kind::View, &[scaled], to);
            return Some(());
        }
        self.scaled(normal, Some(scale), Some(offset), to)
    }

    /// A sum of products of two tensors by indices, as products of matrices.
    pub(crate) fn einsum(&mut self, op: &Einsum) -> Option<()> {
        let (a, b, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        (self.try_input(2).is_none() && self.is_f32(a) && self.is_f32(b)).then_some(())?;
        let indices = op.indices(Inputs(&self.facts())).ok()?;
        let size = |at: &usize| indices.sizes[*at] as i64;
        let [of_a, of_b] = [&indices.inputs[0], &indices.inputs[1]];
        for (of, id) in [(of_a, a), (of_b, b)] {
            let is_once = of.iter().all(|at| of.iter().filter(|other| *other == at).count() == 1);
            let is_whole = of.iter().map(size).eq(self.net.shape(id).iter().copied());
            (is_once && is_whole).then_some(())?;
        }
        let chosen = |of: &[usize], is: &dyn Fn(&usize) -> bool| of.iter().copied().filter(is).collect::<Vec<_>>();
        let out: Vec<usize> = (0..indices.n_out).collect();
        let batch = chosen(&out, &|at| of_a.contains(at) && of_b.contains(at));
        let rows = chosen(&out, &|at| of_a.contains(at) && !of_b.contains(at));
        let columns = chosen(&out, &|at| of_b.contains(at) && !of_a.contains(at));
        let sums = chosen(of_a, &|at| *at >= indices.n_out);
        let is_of_both = sums.iter().all(|at| of_b.contains(at))
            && of_b.iter().all(|at| *at < indices.n_out || sums.contains(at))
            && !sums.is_empty();
        is_of_both.then_some(())?;
        let count = |of: &[usize]| of.iter().map(size).product::<i64>();
        let leading: Vec<i64> = if batch.is_empty() { Vec::new() } else { vec![count(&batch)] };
        let matrices = |first: &[usize], second: &[usize]| [&leading[..], &[count(first), count(second)]].concat();
        let mut turned = |what: &str, id: ValueId, own: &[usize], parts: [&[usize]; 2]| {
            let order: Vec<usize> = [&batch, parts[0], parts[1]].concat();
            let places: Vec<usize> = order.iter().map(|at| own.iter().position(|o| o == at)).collect::<Option<_>>()?;
            let shape: Vec<i64> = order.iter().map(size).collect();
            let moved = self.step(what, Kind::Transpose(places), &[id], &shape);
            Some(self.step(what, Kind::View, &[moved], &matrices(parts[0], parts[1])))
        };
        let (a, b) = (turned("a", a, of_a, [&rows, &sums])?, turned("b", b, of_b, [&sums, &columns])?);
        let kind = Kind::Product { turned: false, heads: None };
        let product = self.step("product", kind, &[a, b], &matrices(&rows, &columns));
        let order: Vec<usize> = [batch, rows, columns].concat();
        let apart = self.step("apart", Kind::View, &[product], &order.iter().map(size).collect::<Vec<_>>());
        let places = out.iter().map(|at| order.iter().position(|o| o == at)).collect::<Option<Vec<_>>>()?;
        self.push(Kind::Transpose(places), &[apart], to);
        Some(())
    }

    /// Sums of products of tensors by any indices, as sums over all of these.
    pub(crate) fn sums_by_indices(&mut self, op: &Einsum) -> Option<()> {
        let to = self.output()?;
        let indices = op.indices(Inputs(&self.facts())).ok()?;
        let sizes: Vec<i64> = indices.sizes.iter().map(|&n| n as i64).collect();
        let mut factors = Vec::new();
        for (at, own) in indices.inputs.iter().enumerate() {
            let x = self.try_input(at)?;
            self.has_code(x).then_some(())?;
            let shape = self.net.shape(x).to_vec();
            // Each index once, in order; along one that is there twice lies a diagonal.
            let mut once = own.clone();
            once.sort_unstable();
            once.dedup();
            let stride = |d: usize| shape[d + 1..].iter().product::<i64>();
            let of_index = |index: usize| (0..own.len()).filter(move |&d| own[d] == index);
            let extent = |index: usize| of_index(index).map(|d| shape[d]).max().unwrap_or(1);
            let extents: Vec<i64> = once.iter().map(|&index| extent(index)).collect();
            let along: Vec<i64> = (0..sizes.len())
                .map(|index| once.iter().position(|own| *own == index).map_or(1, |at| extents[at]))
                .collect();
            let turned = if once.len() == own.len() {
                let order: Vec<usize> =
                    once.iter().map(|index| own.iter().position(|d| d == index)).collect::<Option<_>>()?;
                self.step("turned", Kind::Transpose(order), &[x], &extents)
            } else {
                let n: i64 = extents.iter().product();
                (n < MOST_COUNTED).then_some(())?;
                let place = |at: i64| {
                    let digit = |k: usize| at / extents[k + 1..].iter().product::<i64>() % extents[k];
                    let step = |k: usize| of_index(once[k]).filter(|&d| shape[d] > 1).map(stride).sum::<i64>();
                    (0..once.len()).map(|k| digit(k) * step(k)).sum::<i64>()
                };
                let places = self.whole_constant("diagonal", DType::I64, &[n], &(0..n).map(place).collect::<Vec<_>>());
                let list = self.step("list", Kind::View, &[x], &[shape.iter().product()]);
                self.step("diagonal", Kind::Gather { axis: 0, by_element: false }, &[list, places], &[n])
            };
            factors.push(self.viewed("factor", turned, &along));
        }
        let value = (0..factors.len()).map(input).reduce(mul)?;
        let terms = self.step("terms", Kind::Map(value), &factors, &sizes);
        let mut kept = sizes.clone();
        kept[indices.n_out..].fill(1);
        let summed: Vec<usize> = (indices.n_out..sizes.len()).collect();
        let sums = match summed.is_empty() {
            true => terms,
            false => self.step("sums", Kind::Reduce(ReduceOp::Sum, summed), &[terms], &kept),
        };
        self.push(Kind::View, &[sums], to);
        Some(())
    }

    /// The scale or zero point of an input's elements, in the shape that maps read it in.
    fn scaling(&mut self, at: usize, op: Scaling) -> Option<ValueId> {
        let id = self.try_input(at)?;
        let shape = self.shape(0)?;
        let n = self.net.value(id).n_elements();
        // Known scales and zero points stand in expressions, where epilogues find them.
        if let Some(number) = self.net.uniform(id).filter(|_| self.is_f32(id) || self.is_whole(id)) {
            return Some(self.constant("scaling", &[], &[number as f32]));
        }
        if op.block > 0 {
            let axis = axis(op.axis, shape.len()).ok()?;
            return self.scaling_of_blocks(id, &shape, axis, op.block as i64);
        }
        let mut along = vec![1; if n == 1 { 0 } else { shape.len() - axis(op.axis, shape.len()).ok()? }];
        along.first_mut().into_iter().for_each(|first| *first = n);
        Some(self.step("scaling", Kind::View, &[id], &along))
    }

    /// The scales or zero points of blocks along a dimension, each as often as a block has elements.
    fn scaling_of_blocks(&mut self, id: ValueId, shape: &[i64], axis: usize, block: i64) -> Option<ValueId> {
        self.has_code(id).then_some(())?;
        let n_blocks = self.net.shape(id)[axis];
        let around = |along: &[i64]| [&shape[..axis], along, &shape[axis + 1..]].concat();
        let single = self.step("single", Kind::View, &[id], &around(&[n_blocks, 1]));
        let blocks = self.repeated("blocks", single, &around(&[n_blocks, block]));
        let all = self.step("scaling", Kind::View, &[blocks], &around(&[n_blocks * block]));
        if self.net.shape(all) == shape {
            return Some(all);
        }
        Some(self.step("scaling", Kind::Slice(vec![(0, 1); shape.len()]), &[all], shape))
    }

    /// Converts a tensor to f32.
    fn single(&mut self, id: ValueId) -> Option<ValueId> {
        self.has_code(id).then_some(())?;
        if self.is_f32(id) {
            return Some(id);
        }
        let shape = self.net.shape(id).to_vec();
        let to = self.value("single", DType::F32, &shape);
        Some(self.push(Kind::Map(input(0)), &[id], to))
    }

    /// Scale and zero point, both in f32.
    fn scale_and_zero(&mut self, op: Scaling) -> Option<[ValueId; 2]> {
        let scale = self.scaling(1, op)?;
        let zero = match self.try_input(2) {
            Some(_) => {
                let zero = self.scaling(2, op)?;
                self.single(zero)?
            }
            None => self.constant("zero", &[], &[0.0]),
        };
        self.is_f32(scale).then_some([scale, zero])
    }

    /// Quantizes numbers to multiples of a scale, still in f32.
    fn quantized(&mut self, op: Scaling, dtype: DType, x: ValueId) -> Option<ValueId> {
        let [scale, zero] = self.scale_and_zero(op)?;
        let (least, most) = dtype.integer_range();
        (self.is_f32(x) && most - least < 1 << 17).then_some(())?;
        let [by, plus] = [(scale, 1), (zero, 2)].map(|(id, at)| self.net.literal(id).unwrap_or(input(at)));
        let multiple = of(UnaryOp::Round, Expr::binary(BinaryOp::Div, input(0), by));
        let value = quantized(add(multiple, plus), least as f64, most as f64);
        let shape = self.net.shape(x).to_vec();
        Some(self.step("multiple", Kind::Map(value), &[x, scale, zero], &shape))
    }

    /// Numbers as whole multiples of a scale.
    pub(crate) fn quantize(&mut self, op: QuantizeLinear) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        self.has_code(to).then_some(())?;
        let x = if self.is_whole(x) { self.single(x)? } else { x };
        let multiple = self.quantized(op.0, self.net.value(to).dtype, x)?;
        self.push(Kind::Map(input(0)), &[multiple], to);
        Some(())
    }

    /// Whole multiples of a scale as numbers.
    pub(crate) fn dequantize(&mut self, op: Scaling) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        self.is_f32(to).then_some(())?;
        let [scale, zero] = self.scale_and_zero(op)?;
        let x = self.single(x)?;
        let [by, less] = [(scale, 1), (zero, 2)].map(|(id, at)| self.net.literal(id).unwrap_or(input(at)));
        self.push(Kind::Map(mul(sub(input(0), less), by)), &[x, scale, zero], to);
        Some(())
    }

    /// Numbers as `u8` by a scale and a zero point of their range.
    pub(crate) fn quantize_by_range(&mut self) -> Option<()> {
        let x = self.try_input(0)?;
        let shape = self.net.shape(x).to_vec();
        self.is_f32(x).then_some(())?;
        let (flat, one) = ([shape.iter().product::<i64>()], [1]);
        let list = self.step("list", Kind::View, &[x], &flat);
        let [low, high] = [ReduceOp::Min, ReduceOp::Max]
            .map(|extreme| self.step("extreme", Kind::Reduce(extreme, vec![0]), &[list], &one));
        let width = sub(max(input(1), number(0.0)), min(input(0), number(0.0)));
        let width = Expr::binary(BinaryOp::Div, width, number(255.0));
        let scale = where_less(number(0.0), width.clone(), width, number(1.0));
        let scale = self.step("scale", Kind::Map(scale), &[low, high], &one);
        let zero = Expr::binary(BinaryOp::Div, of(UnaryOp::Neg, min(input(0), number(0.0))), input(1));
        let zero = self.step("zero", Kind::Map(clip(of(UnaryOp::Round, zero), 0.0, 255.0)), &[low, scale], &one);
        let multiple = of(UnaryOp::Round, Expr::binary(BinaryOp::Div, input(0), input(1)));
        let value = quantized(add(multiple, input(2)), 0.0, 255.0);
        let multiple = self.step("multiple", Kind::Map(value), &[x, scale, zero], &shape);
        let outputs = self.outputs.clone();
        for (from, to) in [multiple, scale, zero].into_iter().zip(outputs) {
            let Some(to) = to else { continue };
            let from = match self.net.shape(from) == self.net.shape(to) {
                true => from,
                false => self.step("number", Kind::View, &[from], &[]),
            };
            self.push(Kind::Map(input(0)), &[from], to);
        }
        Some(())
    }

    /// A product of quantized matrices that is read as f32 numbers alone: these count the
    /// sums as exactly as they keep them.
    pub(crate) fn quantized_product(&mut self) -> Option<()> {
        let (a, b, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        self.is_read_as_single().then_some(())?;
        let mut factors = [a, b];
        for (slot, id) in [a, b].into_iter().enumerate() {
            // What is known stays known.
            if let Some(numbers) = self.centred_constant(id, slot) {
                let shape = self.net.shape(id).to_vec();
                factors[slot] = self.constant("weights", &shape, &numbers);
                continue;
            }
            let single = self.single(id)?;
            factors[slot] = match self.try_input(2 + slot) {
                None => single,
                Some(zero) if self.net.value(zero).n_elements() == 1 => {
                    let zero = self.single(zero)?;
                    let zero = self.step("zero", Kind::View, &[zero], &[]);
                    let shape = self.net.shape(id).to_vec();
                    self.step("centred", Kind::Map(sub(input(0), input(1))), &[single, zero], &shape)
                }
                Some(_) => return None,
            };
        }
        let shape = self.net.shape(to).to_vec();
        let sums = self.value("sums", DType::F32, &shape);
        self.product_of(factors[0], factors[1], sums)?;
        self.push(Kind::Map(input(0)), &[sums], to);
        Some(())
    }

    /// The elements of a known factor less its known zero point, or zero points of the columns of the second
    /// factor.
    fn centred_constant(&self, id: ValueId, slot: usize) -> Option<Vec<f32>> {
        let numbers = self.net.value(id).constant.as_ref()?.floats();
        let zeros = match self.try_input(2 + slot) {
            None => vec![0.0],
            Some(zero) => self.net.value(zero).constant.as_ref()?.floats(),
        };
        let are_of_columns = slot == 1 && self.net.shape(id).last() == Some(&(zeros.len() as i64));
        (zeros.len() == 1 || are_of_columns).then_some(())?;
        Some(numbers.into_iter().zip(zeros.iter().cycle()).map(|(x, zero)| (x - zero) as f32).collect())
    }

    /// Whether all readers of the node's output convert it to f32.
    fn is_read_as_single(&self) -> bool {
        let Some(output) = self.node.outputs.first().copied().flatten() else { return false };
        let graph = self.graph();
        let is_cast = |user: &tilewright_graph::NodeId| {
            let node = graph.node(*user);
            let is_single = node.outputs[0].is_some_and(|id| graph.ty(id).dtype == DType::F32);
            matches!(node.op, Op::Cast(_)) && is_single
        };
        !graph.outputs.contains(&output) && graph.value(output).users.iter().all(is_cast)
    }
}
