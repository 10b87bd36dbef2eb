//! Samples of images at coordinates, and Fourier transforms.

use std::f64::consts::TAU;

use tilewright_graph::DType;
use tilewright_graph::op::{AffineGrid, Beyond, Dft, GridSample, SampleMode, Stft, axis};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond, UnaryOp};

use crate::import::Job;
use crate::net::{Kind, ValueId};
use crate::scalar::{add, choose_if, input, less, max, min, mul, number, of, sub};

/// Elements of a matrix that a Fourier transform multiplies by, at most.
const MOST_OF_TRANSFORM: usize = 1 << 24;

fn minus(a: Expr, b: Expr) -> Expr {
    Expr::binary(BinaryOp::Sub, a, b)
}

/// Brings a coordinate back into an image of `n` pixels, where values outside are those of the image.
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

impl Job<'_> {
    /// The pixels along one dimension of places: for each tap their numbers, and weights, which are 0 where
    /// they are beyond the image.
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

    /// Samples of an image at coordinates.
    pub(crate) fn grid_sample(&mut self, op: &GridSample) -> Option<()> {
        let (x, grid, to, shape) = (self.try_input(0)?, self.try_input(1)?, self.output()?, self.shape(0)?);
        if self.is_whole(x) {
            return self.in_doubles(|job| job.grid_sample(op));
        }
        (self.is_real(x) && self.is_real(grid)).then_some(())?;
        let of_grid = self.net.shape(grid).to_vec();
        let grid = if self.is_f32(x) { grid } else { self.double("grid", grid, &of_grid) };
        let (n, c, image) = (shape[0], shape[1], &shape[2..]);
        let (rank, area): (usize, i64) = (image.len(), image.iter().product());
        let places: i64 = self.net.shape(to)[2..].iter().product();
        let one = [n, 1, places];
        let columns = self.tuple_columns(grid, n * places, rank as i64);
        let of_dims: Vec<Vec<(ValueId, ValueId)>> = (0..rank)
            .map(|d| {
                // The last coordinate is of the first dimension.
                let coordinate = self.viewed("coordinate", columns[rank - 1 - d], &one);
                self.taps(op, coordinate, image[d], &one)
            })
            .collect();
        let n_taps = of_dims[0].len();
        let all = n_taps.pow(rank as u32);
        (all <= 64).then_some(())?;
        let table = self.viewed("table", x, &[n, c, area]);
        let full = [n, c, places];
        let mut sum: Option<ValueId> = None;
        for combination in 0..all {
            let chosen: Vec<(ValueId, ValueId)> =
                (0..rank).map(|d| of_dims[d][combination / n_taps.pow(d as u32) % n_taps]).collect();
            let stride = |d: usize| image[d + 1..].iter().product::<i64>() as f64;
            let place = (0..rank).map(|d| mul(input(d), number(stride(d)))).reduce(add)?;
            let indices: Vec<ValueId> = chosen.iter().map(|tap| tap.0).collect();
            let place = self.whole_map("pixels", place, &indices, &one);
            let place = self.repeated("pixels", place, &full);
            let pixel = self.step("pixels", Kind::Gather { axis: 2, by_element: true }, &[table, place], &full);
            let weight = (1..=rank).map(input).fold(input(0), mul);
            // What lies beyond has no weight, whatever the pixel is that stands for it.
            let is_weighed = (1..=rank).map(|at| {
                let not = |cond: Cond| Cond::Not(Box::new(cond));
                not(not(less(input(at), number(0.0))).and(not(less(number(0.0), input(at)))))
            });
            let weighed = choose_if(is_weighed.reduce(Cond::and)?, weight, number(0.0));
            let (value, mut inputs) = match sum {
                Some(_) => (add(weighed, input(rank + 1)), vec![pixel]),
                None => (weighed, vec![pixel]),
            };
            inputs.extend(chosen.iter().map(|tap| tap.1));
            inputs.extend(sum);
            sum = Some(self.step("sum", Kind::Map(value), &inputs, &full));
        }
        self.push(Kind::View, &[sum?], to);
        Some(())
    }

    /// Coordinates of affine maps.
    pub(crate) fn affine_grid(&mut self, op: &AffineGrid) -> Option<()> {
        let (maps, to) = (self.try_input(0)?, self.output()?);
        self.is_real(maps).then_some(())?;
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
        Some(())
    }

    /// The matrix, in the precision of a value, that `rows` of complex numbers, or of numbers, are multiplied
    /// by for `n_out` terms of their Fourier transform of length `n`.
    fn transform(
        &mut self,
        like: ValueId,
        [n_in, parts]: [usize; 2],
        n: usize,
        [n_out, out_parts]: [usize; 2],
        is_inverse: bool,
    ) -> Option<ValueId> {
        let (rows, columns) = (n_in * parts, n_out * out_parts);
        (rows.checked_mul(columns)? <= MOST_OF_TRANSFORM && n > 0).then_some(())?;
        let (sign, share) = if is_inverse { (1.0, 1.0 / n as f64) } else { (-1.0, 1.0) };
        let mut numbers = vec![0.0; rows * columns];
        // Of numbers the other half of their transform is this one turned round, with other signs of sines.
        let n_given = if out_parts == 1 { n_in.min(n / 2 + 1) } else { n_in.min(n) };
        for t in 0..n_given {
            let times = if out_parts == 1 && t > 0 && 2 * t != n { 2.0 } else { 1.0 };
            for k in 0..n_out {
                let (sine, cosine) = (sign * TAU * ((k * t) % n) as f64 / n as f64).sin_cos();
                for part in 0..parts {
                    // i times a number is it turned by a right angle.
                    let terms = if part == 0 { [cosine, sine] } else { [-sine, cosine] };
                    for out_part in 0..out_parts {
                        numbers[(t * parts + part) * columns + k * out_parts + out_part] =
                            terms[out_part] * share * times;
                    }
                }
            }
        }
        Some(self.real_constant("waves", like, &[rows as i64, columns as i64], &numbers))
    }

    /// A Fourier transform along a dimension, as a product with a matrix.
    pub(crate) fn fourier(&mut self, op: &Dft) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        self.is_real(x).then_some(())?;
        let from_half = op.is_inverse && op.is_onesided;
        let out = self.net.shape(to).to_vec();
        let rank = shape.len();
        let along = match op.axis {
            Some(along) => along,
            None => self.try_input(2).map_or(Some(-2), |id| self.net.scalar(id).map(|along| along as i64))?,
        };
        let at = axis(along, rank).ok()?;
        let n = match self.try_input(1) {
            Some(id) => self.net.scalar(id)? as usize,
            None if from_half => 2 * (shape[at] as usize).saturating_sub(1),
            None => shape[at] as usize,
        };
        let (n_in, parts) = (shape[at], shape[rank - 1]);
        let waves = self.transform(
            x,
            [n_in as usize, parts as usize],
            n,
            [out[at] as usize, out[rank - 1] as usize],
            op.is_inverse,
        )?;
        let outer: i64 = shape[..at].iter().product();
        let inner: i64 = shape[at + 1..rank - 1].iter().product();
        let x = self.viewed("apart", x, &[outer, n_in, inner, parts]);
        let x = self.step("turned", Kind::Transpose(vec![0, 2, 1, 3]), &[x], &[outer, inner, n_in, parts]);
        let x = self.viewed("rows", x, &[outer * inner, n_in * parts]);
        let found = self.matrix_product("terms", x, waves, false);
        let found = self.viewed("terms", found, &[outer, inner, out[at], out[rank - 1]]);
        let back =
            self.step("back", Kind::Transpose(vec![0, 2, 1, 3]), &[found], &[outer, out[at], inner, out[rank - 1]]);
        self.push(Kind::View, &[back], to);
        Some(())
    }

    /// Fourier transforms of windows of a signal.
    pub(crate) fn windows_of_fourier(&mut self, _: &Stft) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        self.is_real(x).then_some(())?;
        let (&[batch, n, parts], &[_, n_windows, n_out, _]) = (&shape[..], self.net.shape(to)) else { return None };
        let step = self.net.scalar(self.try_input(1)?)? as i64;
        let length = match (self.try_input(3), self.try_input(2)) {
            (Some(length), _) => self.net.scalar(length)? as i64,
            (None, window) => self.net.value(window?).n_elements(),
        };
        let places: Vec<i64> = (0..n_windows).flat_map(|w| (0..length).map(move |t| w * step + t)).collect();
        let places = self.whole_constant("places", DType::I64, &[n_windows, length], &places);
        let x = self.viewed("signal", x, &[batch, n, parts]);
        let sizes = [batch, n_windows, length, parts];
        let mut seen = self.step("windows", Kind::Gather { axis: 1, by_element: false }, &[x, places], &sizes);
        if let Some(window) = self.try_input(2) {
            (self.net.value(window).dtype == self.net.value(x).dtype).then_some(())?;
            let window = self.viewed("window", window, &[length, 1]);
            seen = self.step("weighed", Kind::Map(mul(input(0), input(1))), &[seen, window], &sizes);
        }
        let waves =
            self.transform(x, [length as usize, parts as usize], length as usize, [n_out as usize, 2], false)?;
        let rows = self.viewed("rows", seen, &[batch * n_windows, length * parts]);
        let found = self.matrix_product("terms", rows, waves, false);
        self.push(Kind::View, &[found], to);
        Some(())
    }
}
