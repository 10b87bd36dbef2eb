//! Operators that no kernel computes as functions in C, with kernels around them that find places.

use tilewright_graph::op::{
    Binary, Col2Im, Geometry, Inputs, MaxUnpool, Operation, Resize, ResizeMode, RoiAlign, Rounding, Scatter, TopK,
    Unary, axis,
};
use tilewright_graph::{DType, Tensor, TensorType};
use tilewright_ir::Expr;
use tilewright_ir::expr::BinaryOp;
use tilewright_runtime::host::{
    BINARY, COPY, COUPLING, CROP, DET, HostCall, HostOperator, MAX_POOL, MEL, ROI_ALIGN, SCATTER, SELECT, TOP_K, UNARY,
};

use crate::import::Job;
use crate::net::{Kind, ValueId};
use crate::scalar::{self, add, choose, choose_if, clip, input, less, mul, number, sub, where_less};

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

    /// Integers of i64 that an expression makes of others.
    pub(crate) fn whole_map(&mut self, what: &str, value: Expr, inputs: &[ValueId], shape: &[i64]) -> ValueId {
        let to = self.value(what, DType::I64, shape);
        self.push(Kind::Map(value), inputs, to)
    }

    /// Multiples of a number along one of `rank` dimensions.
    pub(crate) fn counted(&mut self, rank: usize, axis: usize, n: i64, stride: i64) -> ValueId {
        let mut along = vec![1; rank];
        along[axis] = n;
        self.whole_constant("counted", DType::I64, &along, &(0..n).map(|at| at * stride).collect::<Vec<_>>())
    }

    /// Elements or slices of a tensor replaced by updates, or combined with them, from these places on. A
    /// place is −1 where an index leads out of the tensor.
    pub(crate) fn scattered(&mut self, how: Scatter, from: ValueId, places: ValueId, updates: ValueId) -> Option<()> {
        let to = self.output()?;
        self.scattered_to(how, from, places, updates, to)
    }

    fn scattered_to(
        &mut self,
        how: Scatter,
        from: ValueId,
        places: ValueId,
        updates: ValueId,
        to: ValueId,
    ) -> Option<()> {
        let how = match how {
            Scatter::Replace => 0,
            // A boolean that is added or multiplied is `or` and `and`.
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
        let (index, places) = self.before_expansion(index, axis, &shape).unwrap_or((index, places));
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

    /// Undoes the expansion of indices along all dimensions behind one, which are as in the data: whole rows
    /// are scattered then, as where messages along the edges of a graph are added up.
    fn before_expansion(&self, index: ValueId, axis: usize, data: &[i64]) -> Option<(ValueId, Vec<i64>)> {
        let maker = self.net.nodes.iter().rev().find(|node| node.outputs.contains(&index))?;
        let Kind::Map(Expr::Load(_, _)) = &maker.kind else { return None };
        let (from, full) = (maker.input(0), self.net.shape(index));
        let small = self.net.shape(from);
        let is_row = |d: usize| if d > axis { small[d] == 1 && full[d] == data[d] } else { small[d] == full[d] };
        (small.len() == full.len() && (0..full.len()).all(is_row)).then(|| (from, small.to_vec()))
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

    /// A function of each element that kernels do not have.
    pub(crate) fn unary_in_c(&mut self, f: Unary) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        if f == Unary::BitwiseNot {
            let ones = self.whole_constant("ones", self.net.value(x).dtype, &[], &[-1]);
            return self.binary_of(2, x, ones, to);
        }
        self.is_real(x).then_some(())?;
        let functions = [Unary::Acos, Unary::Acosh, Unary::Asin, Unary::Asinh, Unary::Atan, Unary::Atanh];
        let function = functions.iter().position(|known| *known == f)? as i64;
        let n = self.net.value(x).n_elements();
        self.call(UNARY, vec![self.type_number(x)?, n, function], 0, &[x], &[to]);
        Some(())
    }

    /// A function of each integer, in f64 unless it is exact in integers.
    pub(crate) fn unary_of_whole(&mut self, f: Unary) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        let (least, most) = self.net.value(x).dtype.integer_range();
        if let Unary::Shrink { bias, lambd } = f
            && bias.fract() == 0.0
            && lambd >= 0.0
        {
            // An integer is beyond a bound where it is beyond the bound's next integer inwards.
            let low = number((-lambd).ceil().max(least as f64));
            let high = number(lambd.floor().min(most as f64));
            let above = choose_if(less(high, input(0)), sub(input(0), number(bias)), number(0.0));
            let value = choose_if(less(input(0), low), add(input(0), number(bias)), above);
            self.push(Kind::Map(value), &[x], to);
            return Some(());
        }
        self.in_doubles(|job| {
            let (x, to) = (job.try_input(0)?, job.output()?);
            job.push(Kind::Map(scalar::unary(f, input(0))?), &[x], to);
            Some(())
        })
    }

    /// Lowers the node in f64, where integers are what it reads first and what it gives; numbers
    /// beyond these are the nearest ones.
    pub(crate) fn in_doubles(&mut self, lower: impl FnOnce(&mut Self) -> Option<()>) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        let (shape, out) = (self.net.shape(x).to_vec(), self.net.shape(to).to_vec());
        let (wide, found) = (self.double("wide", x, &shape), self.value("found", DType::F64, &out));
        (self.inputs[0], self.outputs[0]) = (Some(wide), Some(found));
        lower(self)?;
        let dtype = self.net.value(to).dtype;
        let (least, most) = dtype.integer_range();
        let bounded = self.step("bounded", Kind::Map(clip(input(0), least as f64, most as f64)), &[found], &out);
        let value = if dtype == DType::Bool { scalar::is_not_zero(input(0)) } else { input(0) };
        self.push(Kind::Map(value), &[bounded], to);
        Some(())
    }

    /// A function of two elements that kernels do not have.
    pub(crate) fn binary_in_c(&mut self, f: Binary) -> Option<()> {
        let (a, b, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let function = match f {
            Binary::BitwiseAnd => 0,
            Binary::BitwiseOr => 1,
            Binary::BitwiseXor => 2,
            Binary::BitShift { to_left: true } => 3,
            Binary::BitShift { to_left: false } => 4,
            Binary::Mod { of_dividend: true } => 5,
            Binary::Mod { of_dividend: false } => 6,
            Binary::Pow if self.is_whole(a) && self.is_whole(b) => return self.whole_power(a, b, to),
            _ => return None,
        };
        self.binary_of(function, a, b, to)
    }

    /// Raises integers to powers of integers; lower bits of a power are those of the power of i64.
    fn whole_power(&mut self, a: ValueId, b: ValueId, to: ValueId) -> Option<()> {
        let shape = self.net.shape(to).to_vec();
        let [a, b] = [a, b].map(|id| self.whole_map("wide", input(0), &[id], &shape));
        let power = self.value("power", DType::I64, &shape);
        self.binary_of(7, a, b, power)?;
        self.push(Kind::Map(input(0)), &[power], to);
        Some(())
    }

    fn binary_of(&mut self, function: i64, a: ValueId, b: ValueId, to: ValueId) -> Option<()> {
        let dtype = self.net.value(a).dtype;
        (self.has_code(a) && dtype != DType::Bool && self.net.value(b).dtype == dtype).then_some(())?;
        let shape = self.net.shape(to).to_vec();
        let (a, b) = (self.repeated("left", a, &shape), self.repeated("right", b, &shape));
        let n = shape.iter().product();
        self.call(BINARY, vec![self.type_number(a)?, n, function], 0, &[a, b], &[to]);
        Some(())
    }

    /// Reinterprets the bits as elements of another type.
    pub(crate) fn bits_as(&mut self) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        let n_bytes = self.net.value(x).n_bytes();
        (n_bytes == self.net.value(to).n_bytes()).then_some(())?;
        self.call(COPY, vec![n_bytes as i64], 0, &[x], &[to]);
        Some(())
    }

    /// Determinants of matrices.
    pub(crate) fn determinants(&mut self) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        self.is_real(x).then_some(())?;
        let &[ref outer @ .., n, _] = &shape[..] else { return None };
        let parameters = vec![self.type_number(x)?, outer.iter().product(), n];
        self.call(DET, parameters, 8 * (n * n) as usize, &[x], &[to]);
        Some(())
    }

    /// Selects the result of one of two graphs.
    pub(crate) fn selected(&mut self, refused: Option<bool>) -> Option<()> {
        let (truth, a, b, to) = (self.try_input(0)?, self.try_input(1)?, self.try_input(2)?, self.output()?);
        let parameters = vec![self.net.value(to).n_bytes() as i64, refused.map_or(-1, i64::from)];
        self.call(SELECT, parameters, 0, &[truth, a, b], &[to]);
        Some(())
    }

    /// Computes probabilities of classes from those of their pairs.
    pub(crate) fn coupled(&mut self, n_classes: usize) -> Option<()> {
        let (pairs, to) = (self.try_input(0)?, self.output()?);
        self.is_f32(pairs).then_some(())?;
        let scratch_bytes = 16 * n_classes * (n_classes + 1);
        self.call(COUPLING, vec![self.net.shape(to)[0], n_classes as i64], scratch_bytes, &[pairs], &[to]);
        Some(())
    }

    /// Converts a value to f64.
    pub(crate) fn double(&mut self, what: &str, id: ValueId, shape: &[i64]) -> ValueId {
        let to = self.value(what, DType::F64, shape);
        self.push(Kind::Map(input(0)), &[id], to)
    }

    /// Computes weights from frequencies to mel bands.
    pub(crate) fn mel_weights(&mut self) -> Option<()> {
        let (rate, low, high, to) = (self.try_input(2)?, self.try_input(3)?, self.try_input(4)?, self.output()?);
        [rate, low, high, to].iter().all(|id| self.has_code(*id)).then_some(())?;
        let one = |job: &Self, at: usize| job.net.value(job.try_input(at)?).constant.as_ref()?.i64s().first().copied();
        let parameters = vec![one(self, 1)?, one(self, 0)?];
        let shape = |job: &Self, id: ValueId| job.net.shape(id).to_vec();
        let (of_rate, of_low, of_high, out) = (shape(self, rate), shape(self, low), shape(self, high), shape(self, to));
        let rate = self.whole_map("rate", input(0), &[rate], &of_rate);
        let (low, high) = (self.double("low", low, &of_low), self.double("high", high, &of_high));
        let weights = self.value("weights", DType::F64, &out);
        self.call(MEL, parameters, 0, &[rate, low, high], &[weights]);
        self.push(Kind::Map(input(0)), &[weights], to);
        Some(())
    }

    /// Makes the bounds of a region: its starts along all dimensions, then its ends; a dimension that is not
    /// resized is whole.
    fn region(&mut self, axes: &[usize], rank: usize) -> Option<ValueId> {
        let n = 2 * rank as i64;
        let given = self.try_input(1).filter(|id| self.net.value(*id).n_elements() > 0);
        let all = [vec![0, 0], vec![0, 1]].concat();
        let ends: Vec<i64> = (0..n).map(|at| all[2 + usize::from(at >= rank as i64)]).collect();
        let ends = self.whole_constant("ends", DType::I64, &[n], &ends);
        let ends = self.double("ends", ends, &[n]);
        let Some(given) = given else { return Some(ends) };
        self.has_code(given).then_some(())?;
        let place = |at: i64| {
            let found = axes.iter().position(|axis| *axis as i64 == at % rank as i64);
            found.map_or(-1, |found| found as i64 + if at < rank as i64 { 0 } else { axes.len() as i64 })
        };
        let places: Vec<i64> = (0..n).map(place).collect();
        let is_given: Vec<i64> = places.iter().map(|place| i64::from(*place >= 0)).collect();
        let places: Vec<i64> = places.into_iter().map(|place| place.max(0)).collect();
        let (places, is_given) = (
            self.whole_constant("places", DType::I64, &[n], &places),
            self.whole_constant("is_given", DType::Bool, &[n], &is_given),
        );
        let given = self.double("region", given, &[2 * axes.len() as i64]);
        let given = self.step("region", Kind::Gather { axis: 0, by_element: false }, &[given, places], &[n]);
        let to = self.value("region", DType::F64, &[n]);
        Some(self.push(Kind::Map(choose(input(0), input(1), input(2))), &[is_given, given, ends], to))
    }

    /// Resizes a region of an image.
    pub(crate) fn cropped(&mut self, op: &Resize) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        if self.is_whole(x) {
            return self.in_doubles(|job| job.cropped(op));
        }
        (self.is_real(x) && shape.len() <= 16).then_some(())?;
        let resized = op.resized(Inputs(&self.facts())).ok()?;
        let (mode, cubic) = match op.mode {
            ResizeMode::Nearest(Rounding::HalfDown) => (0, 0.0),
            ResizeMode::Nearest(Rounding::HalfUp) => (1, 0.0),
            ResizeMode::Nearest(Rounding::Floor) => (2, 0.0),
            ResizeMode::Nearest(Rounding::Ceil) => (3, 0.0),
            ResizeMode::Linear => (4, 0.0),
            ResizeMode::Cubic(a) => (5, a),
        };
        let (cubic, outside) = (cubic.to_bits() as i64, op.outside.to_bits() as i64);
        let excludes = i64::from(op.excludes_outside);
        let mut parameters = vec![self.type_number(x)?, shape.len() as i64, mode, cubic, outside, excludes];
        let mut n_entries = 0;
        for (d, &from) in shape.iter().enumerate() {
            let of_axis = resized.iter().find(|axis| axis.axis == d);
            let narrow = of_axis.filter(|_| op.antialias).map_or(1.0, |axis| axis.factor.min(1.0));
            let most = match mode {
                0..=3 => 1,
                _ => 2 * ((if mode == 5 { 2.0 } else { 1.0 }) / narrow).ceil() as i64 + 1,
            };
            let to = self.net.shape(to)[d];
            parameters.extend([from, to, narrow.to_bits() as i64, most]);
            n_entries += to * (1 + most);
        }
        let axes: Vec<usize> = resized.iter().map(|axis| axis.axis).collect();
        let region = self.region(&axes, shape.len())?;
        self.call(CROP, parameters, 16 * n_entries as usize, &[x, region], &[to]);
        Some(())
    }

    /// Regions of images, divided into bins.
    pub(crate) fn regions(&mut self, op: &RoiAlign) -> Option<()> {
        let (x, regions, images, to) = (self.try_input(0)?, self.try_input(1)?, self.try_input(2)?, self.output()?);
        (self.is_real(x) && self.net.value(regions).dtype == self.net.value(x).dtype).then_some(())?;
        self.is_whole(images).then_some(())?;
        let n = self.net.value(images).n_elements();
        let images = self.whole_map("images", input(0), &[images], &[n]);
        let [rows, columns, samples] = [op.out[0], op.out[1], op.n_samples].map(|size| size as i64);
        let (is_max, is_half) = (i64::from(op.is_max), i64::from(op.is_half_pixel));
        let rest = [n, rows, columns, samples, is_max, is_half, op.scale.to_bits() as i64];
        let parameters = [&[self.type_number(x)?], &self.shape(0)?[..], &rest].concat();
        self.call(ROI_ALIGN, parameters, 0, &[x, regions, images], &[to]);
        Some(())
    }

    /// The largest number of each window, and where it is.
    pub(crate) fn pooled_places(&mut self, geometry: &Geometry, columns_first: bool) -> Option<()> {
        let (x, shape) = (self.try_input(0)?, self.shape(0)?);
        let dtype = self.net.value(x).dtype;
        (self.is_real(x) || self.is_whole(x) && dtype.size() < 8).then_some(())?;
        let rank = geometry.kernel.len();
        let least = if self.is_real(x) { f64::NEG_INFINITY } else { dtype.integer_range().0 as f64 };
        let planes = shape[..2].iter().product();
        let least = least.to_bits() as i64;
        let mut parameters = vec![self.type_number(x)?, least, planes, rank as i64, i64::from(columns_first)];
        for d in 0..rank {
            let sizes = [geometry.out[d], geometry.kernel[d], geometry.strides[d], geometry.dilations[d]];
            parameters.push(shape[2 + d]);
            parameters.extend(sizes.map(|size| size as i64));
            parameters.push(geometry.begins[d]);
        }
        let out: Vec<i64> = geometry.out.iter().map(|&n| n as i64).collect();
        let out = [&shape[..2], &out].concat();
        let (values, places) = (self.output_or(0, dtype, &out), self.output_or(1, DType::I64, &out));
        self.call(MAX_POOL, parameters, 0, &[x], &[values, places]);
        Some(())
    }

    /// A tensor of zeros.
    fn zeros(&mut self, dtype: DType, shape: &[i64]) -> ValueId {
        let zero = self.value("zero", dtype, &[]);
        self.net.values[zero.0].constant = Some(Tensor::scalar(dtype, 0.0));
        self.repeated("zeros", zero, shape)
    }

    /// Numbers back at places of the image that a pool found them in.
    pub(crate) fn unpooled(&mut self, op: &MaxUnpool) -> Option<()> {
        let (x, places, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let inferred = op.infer(Inputs(self.facts().get(..2)?)).ok()?.remove(0).shape;
        let inferred: Vec<i64> = inferred.iter().map(|&d| d as i64).collect();
        let out = self.net.shape(to).to_vec();
        let shape = self.net.shape(places).to_vec();
        let mut place = input(0);
        if inferred != out {
            // Each digit of a place counts more in a larger image.
            let over = |x: Expr, n: i64| Expr::binary(BinaryOp::Div, x, number(n as f64));
            let behind = |shape: &[i64], d: usize| shape[d + 1..].iter().product::<i64>();
            let digit = |d: usize| {
                let from = over(input(0), behind(&inferred, d));
                let rounds = mul(over(from.clone(), inferred[d]), number(inferred[d] as f64));
                mul(Expr::binary(BinaryOp::Sub, from, rounds), number(behind(&out, d) as f64))
            };
            place = (0..out.len()).map(digit).reduce(add)?;
        }
        let n: i64 = inferred.iter().product();
        let is_inside = less(input(0), number(n as f64)).and(less(number(-1.0), input(0)));
        let place = choose_if(is_inside, place, number(-1.0));
        let places = self.whole_map("places", place, &[places], &shape);
        let zeros = self.zeros(self.net.value(x).dtype, &out);
        self.scattered(Scatter::Replace, zeros, places, x)
    }

    /// Sums of overlapping blocks, in an image with a border, which is then cut off.
    pub(crate) fn blocks_added(&mut self, op: &Col2Im) -> Option<()> {
        let (x, to) = (self.try_input(0)?, self.output()?);
        self.has_code(x).then_some(())?;
        let list = |job: &Self, at: usize| Some(job.net.value(job.try_input(at)?).constant.as_ref()?.i64s());
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
        Some(())
    }

    /// Columns of `n` rows of `depth` numbers each.
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
