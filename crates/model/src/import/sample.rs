//! Import of resampling, and of sampling images at coordinates.

use tilewright_graph::DType;
use tilewright_graph::op::{
    AffineGrid, AxisSums, Beyond, Coordinates, GridSample, Inputs, Resize, ResizeMode, ResizedAxis, RoiAlign, Rounding,
    SampleMode,
};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond, UnaryOp};
use tilewright_runtime::host::{CROP, ROI_ALIGN};

use super::job::NodeImport;
use crate::net::{Kind, Line, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{add, choose, choose_if, input, less, max, min, mul, number, of, sub};

/// Maximum number of pixels along a dimension that contribute to a pixel of a resized image.
const MOST_TAPS: usize = 32;

impl NodeImport<'_> {
    /// Resizes an image, dimension by dimension: pixels are picked, or a few of them summed.
    pub(super) fn resized(&mut self, op: &Resize) -> Lowered {
        let (from, to) = (self.input(0)?, self.output()?);
        self.need_code(from)?;
        let resized = op.resized(Inputs(&self.facts()))?;
        if let Some(table) = self.resized_table(op, &resized, from) {
            self.push(Kind::View, &[table], to);
            return Ok(());
        }
        let mut of_axes = op.sums(Inputs(&self.facts()))?.unwrap_or_default();
        let is_pick = |(_, places): &AxisSums| places.iter().all(|taps| matches!(taps[..], [(_, w)] if w == 1.0));
        // Aligned corners are a line at some sizes alone.
        let is_of_size = op.coordinates == Coordinates::AlignCorners && self.is_open_behind(self.shape(0)?[0]);
        if of_axes.iter().all(is_pick) && !is_of_size {
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
        for (_, places) in &of_axes {
            let n = most_taps(places);
            let too_large = || NoCode::Size { what: "pixels that make one", size: n as i64, most: MOST_TAPS as i64 };
            need((1..=MOST_TAPS).contains(&n), too_large)?;
        }
        // Integers are summed in floating point, and rounded.
        let is_summed = !self.is_real(from) && !of_axes.iter().all(is_pick);
        let mut x = if is_summed { self.double("numbers", from, &shape) } else { from };
        // The last dimension comes first, while there are few rows; along the other dimensions, whole rows of
        // contiguous pixels are combined.
        for of_axis in of_axes.iter().rev() {
            let (axis, places) = of_axis;
            let is_open = self.is_open_behind(shape[0]);
            let of_run = resized.iter().find(|own| own.axis == *axis).filter(|_| is_open);
            x = match (endless(places, shape[*axis] as usize).filter(|_| is_open && !is_pick(of_axis)), of_run) {
                (Some(places), _) => self.resized_along(x, &(*axis, places), (false, true))?,
                (None, Some(own)) if let Some(made) = self.resized_by_run(x, op, own) => made,
                _ => self.resized_along(x, of_axis, (is_pick(of_axis), false))?,
            };
        }
        match is_summed {
            true => {
                let rounded = Expr::cast(tilewright_ir::DType::F64, of(UnaryOp::Round, input(0)));
                self.push(Kind::Map(rounded), &[x], to)
            }
            false => self.push(Kind::View, &[x], to),
        };
        Ok(())
    }

    /// Resizes a tensor along one dimension, of which pixels may be picked, or have no end.
    fn resized_along(
        &mut self,
        x: ValueId,
        (axis, places): &AxisSums,
        (is_pick, is_endless): (bool, bool),
    ) -> Lowered<ValueId> {
        let n = places.len() as i64;
        let mut shape = self.net.shape(x).to_vec();
        let (is_single, n_before) = (shape[*axis] == 1, shape[*axis]);
        shape[*axis] = n;
        let is_all = |taps: &Vec<(usize, f64)>| (taps.iter().map(|(_, weight)| weight).sum::<f64>() - 1.0).abs() < 1e-6;
        if is_single && places.iter().all(is_all) {
            return Ok(self.repeated("pixels", x, &shape));
        }
        let mut along = vec![1; shape.len() - axis];
        along[0] = n;
        let (mut picked, mut weights) = (Vec::new(), Vec::new());
        for tap in 0..most_taps(places) {
            let of = |taps: &Vec<(usize, f64)>| taps.get(tap).copied().unwrap_or((taps[0].0, 0.0));
            let list: Vec<i64> = places.iter().map(|taps| of(taps).0 as i64).collect();
            let mut list = self.whole_constant("pixels", DType::I64, &[n], &list);
            if is_endless {
                let end = self.number_of_run("end", n_before);
                list = self.whole_map("pixels", min(input(0), sub(input(1), number(1.0))), &[list, end], &[n]);
            }
            let kind = Kind::Gather { axis: *axis, by_element: false };
            picked.push(self.step("picked", kind, &[x, list], &shape));
            let numbers: Vec<f64> = places.iter().map(|taps| of(taps).1).collect();
            weights.push(self.real_constant("weights", x, &along, &numbers));
        }
        if is_pick {
            return Ok(picked[0]);
        }
        Ok(self.weighted(picked, weights, &shape))
    }

    /// Resizes a constant, such as a table of positions, to sizes of a run, which may be its own in some run.
    fn resized_table(&mut self, op: &Resize, resized: &[ResizedAxis], from: ValueId) -> Option<ValueId> {
        let shape = self.net.shape(from).to_vec();
        let is_table = self.net.value(from).constant.is_some() && self.is_real(from) && self.has_sizes(op);
        let (images, others): (Vec<&ResizedAxis>, Vec<&ResizedAxis>) = resized.iter().partition(|own| own.axis >= 2);
        let is_of_images = others.iter().all(|own| own.from == own.to) && !images.is_empty();
        let is_open = is_table && is_of_images && self.is_open_behind(shape[0]);
        let by_axis = |x: Option<ValueId>, own: &&ResizedAxis| self.resized_by_run(x?, op, own);
        if is_open { images.iter().rev().fold(Some(from), by_axis) } else { None }
    }

    /// Resizes a tensor along a dimension by the sizes of a run; `None` if that has no code.
    fn resized_by_run(&mut self, x: ValueId, op: &Resize, own: &ResizedAxis) -> Option<ValueId> {
        let mut shape = self.net.shape(x).to_vec();
        shape[own.axis] = own.to as i64;
        let mut along = vec![1; shape.len() - own.axis];
        along[0] = own.to as i64;
        let (pixels, weights) = self.taps_of_run(op, own, (x, &along))?;
        let kind = Kind::Gather { axis: own.axis, by_element: false };
        let mut picked = Vec::new();
        for list in pixels {
            picked.push(self.step("picked", kind.clone(), &[x, list], &shape));
        }
        Some(if weights.is_empty() { picked[0] } else { self.weighted(picked, weights, &shape) })
    }

    /// Sum of pixels, each with its weight.
    fn weighted(&mut self, picked: Vec<ValueId>, weights: Vec<ValueId>, shape: &[i64]) -> ValueId {
        let n_taps = picked.len();
        let value = (0..n_taps).map(|tap| mul(input(tap), input(n_taps + tap))).reduce(add);
        let value = value.expect("a pixel is made of one");
        self.step("sum", Kind::Map(value), &[picked, weights].concat(), shape)
    }

    /// Makes the bounds of a region: its starts along all dimensions, then its ends; a dimension that is not
    /// resized is covered in full.
    fn region(&mut self, axes: &[usize], rank: usize) -> Lowered<ValueId> {
        let n = 2 * rank as i64;
        let given = self.try_input(1).filter(|id| self.net.value(*id).n_elements() > 0);
        let all = [vec![0, 0], vec![0, 1]].concat();
        let ends: Vec<i64> = (0..n).map(|at| all[2 + usize::from(at >= rank as i64)]).collect();
        let ends = self.whole_constant("ends", DType::I64, &[n], &ends);
        let ends = self.double("ends", ends, &[n]);
        let Some(given) = given else { return Ok(ends) };
        self.need_code(given)?;
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
        Ok(self.push(Kind::Map(choose(input(0), input(1), input(2))), &[is_given, given, ends], to))
    }

    /// Resizes a region of an image.
    pub(super) fn cropped(&mut self, op: &Resize) -> Lowered {
        let (x, to, shape) = (self.input(0)?, self.output()?, self.shape(0)?);
        if self.is_whole(x) {
            return self.in_doubles(|job| job.cropped(op));
        }
        self.need_real(x)?;
        need(shape.len() <= 16, || self.no_code_of_rank(x, "up to 16"))?;
        let resized = op.resized(Inputs(&self.facts()))?;
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
        Ok(())
    }

    /// Lowers regions of interest of images, divided into bins.
    pub(super) fn regions(&mut self, op: &RoiAlign) -> Lowered {
        let (x, regions, images, to) = (self.input(0)?, self.input(1)?, self.input(2)?, self.output()?);
        self.need_real(x)?;
        self.need_same_type(regions, x)?;
        self.need_integers(images)?;
        let n = self.net.value(images).n_elements();
        let images = self.whole_map("images", input(0), &[images], &[n]);
        let [rows, columns, samples] = [op.out[0], op.out[1], op.n_samples].map(|size| size as i64);
        let (is_max, is_half) = (i64::from(op.is_max), i64::from(op.is_half_pixel));
        let rest = [n, rows, columns, samples, is_max, is_half, op.scale.to_bits() as i64];
        let parameters = [&[self.type_number(x)?], &self.shape(0)?[..], &rest].concat();
        self.call(ROI_ALIGN, parameters, 0, &[x, regions, images], &[to]);
        Ok(())
    }

    /// Computes, for each tap along one dimension, the pixels' indices and weights; the weights of pixels
    /// outside the image are 0.
    fn taps(&mut self, op: &GridSample, coordinate: ValueId, n: i64, shape: &[i64]) -> Vec<(ValueId, ValueId)> {
        let size = n as f64;
        let x = match op.aligns_corners {
            true => mul(add(input(0), number(1.0)), number((size - 1.0) / 2.0)),
            false => sub(mul(add(input(0), number(1.0)), number(size / 2.0)), number(0.5)),
        };
        let x = if op.mode == SampleMode::Cubic { x } else { inside(op, x, size) };
        let x = self.step("place", Kind::Map(x), &[coordinate], shape);
        let first = match op.mode {
            SampleMode::Nearest => of(UnaryOp::Round, input(0)),
            SampleMode::Linear | SampleMode::Cubic => of(UnaryOp::Floor, input(0)),
        };
        let part = || minus(input(0), of(UnaryOp::Floor, input(0)));
        let weights: Vec<(f64, Expr)> = match op.mode {
            SampleMode::Nearest => vec![(0.0, number(1.0))],
            SampleMode::Linear => vec![(0.0, minus(number(1.0), part())), (1.0, part())],
            SampleMode::Cubic => {
                let a = -0.75;
                let near = |d: Expr| {
                    let inner = sub(mul(d.clone(), number(a + 2.0)), number(a + 3.0));
                    add(mul(inner, mul(d.clone(), d)), number(1.0))
                };
                let far = |d: Expr| {
                    let inner = add(mul(sub(mul(d.clone(), number(a)), number(5.0 * a)), d.clone()), number(8.0 * a));
                    sub(mul(inner, d), number(4.0 * a))
                };
                vec![
                    (-1.0, far(add(part(), number(1.0)))),
                    (0.0, near(part())),
                    (1.0, near(minus(number(1.0), part()))),
                    (2.0, far(minus(number(2.0), part()))),
                ]
            }
        };
        let mut found = Vec::new();
        for (behind, weight) in weights {
            let at = add(first.clone(), number(behind));
            let at = inside(op, at, size);
            let at = match op.beyond {
                Beyond::Zeros => at,
                _ => min(max(of(UnaryOp::Round, at), number(0.0)), number(size - 1.0)),
            };
            let is_inside = || less(number(-1.0), at.clone()).and(less(at.clone(), number(size)));
            let index = choose_if(is_inside(), at.clone(), number(0.0));
            let index = self.step("pixel", Kind::Map(index), &[x], shape);
            let index = self.whole_map("pixel", input(0), &[index], shape);
            let weight = choose_if(is_inside(), weight, number(0.0));
            found.push((index, self.step("weight", Kind::Map(weight), &[x], shape)));
        }
        found
    }

    /// Lowers sampling of an image at coordinates.
    pub(super) fn grid_sample(&mut self, op: &GridSample) -> Lowered {
        let (x, grid, to, shape) = (self.input(0)?, self.input(1)?, self.output()?, self.shape(0)?);
        if self.is_whole(x) {
            return self.in_doubles(|job| job.grid_sample(op));
        }
        self.need_real(x)?;
        self.need_real(grid)?;
        let of_grid = self.net.shape(grid).to_vec();
        let grid = if self.is_f32(x) { grid } else { self.double("grid", grid, &of_grid) };
        let (n, c, image) = (shape[0], shape[1], &shape[2..]);
        let (rank, area): (usize, i64) = (image.len(), image.iter().product());
        let places: i64 = self.net.shape(to)[2..].iter().product();
        let one = [n, 1, places];
        let columns = self.tuple_columns(grid, n * places, rank as i64);
        let of_dims: Vec<Vec<(ValueId, ValueId)>> = (0..rank)
            .map(|d| {
                // The last coordinate belongs to the first dimension.
                let coordinate = self.viewed("coordinate", columns[rank - 1 - d], &one);
                self.taps(op, coordinate, image[d], &one)
            })
            .collect();
        let n_taps = of_dims[0].len();
        let all = n_taps.pow(rank as u32);
        let too_large = || NoCode::Size { what: "pixels of a sample", size: all as i64, most: 64 };
        need(all <= 64, too_large)?;
        let table = self.viewed("table", x, &[n, c, area]);
        let full = [n, c, places];
        let mut sum: Option<ValueId> = None;
        for combination in 0..all {
            let chosen: Vec<(ValueId, ValueId)> =
                (0..rank).map(|d| of_dims[d][combination / n_taps.pow(d as u32) % n_taps]).collect();
            let stride = |d: usize| image[d + 1..].iter().product::<i64>() as f64;
            let place =
                (0..rank).map(|d| mul(input(d), number(stride(d)))).reduce(add).expect("an image has a dimension");
            let indices: Vec<ValueId> = chosen.iter().map(|tap| tap.0).collect();
            let place = self.whole_map("pixels", place, &indices, &one);
            let place = self.repeated("pixels", place, &full);
            let pixel = self.step("pixels", Kind::Gather { axis: 2, by_element: true }, &[table, place], &full);
            let weight = (1..=rank).map(input).fold(input(0), mul);
            // A pixel outside the image has no weight, and any pixel may stand for it.
            let is_weighed = (1..=rank).map(|at| {
                let not = |cond: Cond| Cond::Not(Box::new(cond));
                not(not(less(input(at), number(0.0))).and(not(less(number(0.0), input(at)))))
            });
            let weighed =
                choose_if(is_weighed.reduce(Cond::and).expect("an image has a dimension"), weight, number(0.0));
            let (value, mut inputs) = match sum {
                Some(_) => (add(weighed, input(rank + 1)), vec![pixel]),
                None => (weighed, vec![pixel]),
            };
            inputs.extend(chosen.iter().map(|tap| tap.1));
            inputs.extend(sum);
            sum = Some(self.step("sum", Kind::Map(value), &inputs, &full));
        }
        self.push(Kind::View, &[sum.expect("a sample has a pixel")], to);
        Ok(())
    }

    /// Lowers the coordinates of affine maps.
    pub(super) fn affine_grid(&mut self, op: &AffineGrid) -> Lowered {
        let (maps, to) = (self.input(0)?, self.output()?);
        self.need_real(maps)?;
        let out = self.net.shape(to).to_vec();
        let rank = out.len() - 2;
        let (n, image) = (out[0], &out[1..=rank]);
        let places: i64 = image.iter().product();
        let mut numbers = Vec::with_capacity(places as usize * (rank + 1));
        for place in 0..places {
            let mut rest = place;
            for d in (0..rank).rev() {
                let (at, size) = ((rest % image[d]) as f64, image[d] as f64);
                rest /= image[d];
                let x = match op.aligns_corners {
                    true => -1.0 + 2.0 * at / (size - 1.0),
                    false => -1.0 + (2.0 * at + 1.0) / size,
                };
                numbers.push(x);
            }
            numbers.push(1.0);
        }
        let all = self.real_constant("places", maps, &[1, places, rank as i64 + 1], &numbers);
        let turned = Kind::Transpose(vec![0, 2, 1]);
        let maps = self.step("turned", turned, &[maps], &[n, rank as i64 + 1, rank as i64]);
        let found = self.products(all, maps)?;
        self.push(Kind::View, &[found], to);
        Ok(())
    }
}

/// Largest number of pixels that contribute to a position.
fn most_taps(places: &[Vec<(usize, f64)>]) -> usize {
    places.iter().map(Vec::len).max().unwrap_or(0)
}

/// Pixels that one is made of, and their weights.
type Taps = Vec<(usize, f64)>;

/// Taps of pixels that are a whole number of times as many as those they are made of, `n`, as if these had no
/// end: a look-up of one beyond takes the last. From the third pixel on, all are made of as many neighbours
/// by the same weights. `None` where that is not what the taps are.
fn endless(places: &[Taps], n: usize) -> Option<Vec<Taps>> {
    const FIRST: usize = 2;
    let times = places.len() / n.max(1);
    let end = FIRST * times;
    let pattern = (n > 2 * FIRST && places.len() == times * n).then(|| &places[end..end + times])?;
    let moved = |at: usize| {
        let by = at / times - FIRST;
        pattern[at % times].iter().map(|(pixel, weight)| (pixel + by, *weight)).collect::<Taps>()
    };
    let made: Vec<Taps> = (0..places.len()).map(|at| if at < end { places[at].clone() } else { moved(at) }).collect();
    // Weights of each pixel.
    let weight_of = |taps: &[(usize, f64)], pixel: usize| {
        taps.iter().filter(|(at, _)| (*at).min(n - 1) == pixel).map(|(_, weight)| weight).sum::<f64>()
    };
    let is_same = |(found, wanted): (&Taps, &Taps)| {
        let mut pixels = found.iter().chain(wanted).map(|(pixel, _)| (*pixel).min(n - 1));
        pixels.all(|pixel| (weight_of(found, pixel) - weight_of(wanted, pixel)).abs() < 1e-6)
    };
    made.iter().zip(places).all(is_same).then_some(made)
}

pub(super) fn minus(a: Expr, b: Expr) -> Expr {
    Expr::binary(BinaryOp::Sub, a, b)
}

/// Maps a coordinate into an image of `n` pixels, for modes in which positions outside take values of the
/// image.
fn inside(op: &GridSample, x: Expr, n: f64) -> Expr {
    match op.beyond {
        Beyond::Zeros => x,
        Beyond::Border => min(max(x, number(0.0)), number(n - 1.0)),
        Beyond::Reflection => {
            let (low, high) = if op.aligns_corners { (0.0, n - 1.0) } else { (-0.5, n - 0.5) };
            let span = high - low;
            if span <= 0.0 {
                return number(low);
            }
            let from = sub(x, number(low));
            let rounds = of(UnaryOp::Floor, mul(from.clone(), number(1.0 / (2.0 * span))));
            let at = minus(from, mul(rounds, number(2.0 * span)));
            let back = minus(number(2.0 * span), at.clone());
            add(choose_if(less(number(span), at.clone()), back, at), number(low))
        }
    }
}
