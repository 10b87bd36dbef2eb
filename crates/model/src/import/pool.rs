//! Import of pooling, over windows and over whole images.

use tilewright_graph::DType;
use tilewright_graph::op::{Geometry, GlobalPool, Pool, PoolKind};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, ReduceOp, UnaryOp};
use tilewright_runtime::host::MAX_POOL;

use super::job::{NodeImport, ints};
use crate::net::{Kind, ValueId, Windows};
use crate::no_code::{Lowered, need};
use crate::scalar::{self, input, mul, number, of};

impl NodeImport<'_> {
    /// Computes p-norms over a reduction or windows.
    pub(super) fn norm(&mut self, x: ValueId, kind: Kind, p: f64, shape: &[i64]) -> Lowered<ValueId> {
        self.need_real(x)?;
        let own = self.net.shape(x).to_vec();
        let size = of(UnaryOp::Abs, input(0));
        let (power, root) = match p {
            1.0 => (size, input(0)),
            2.0 => (mul(input(0), input(0)), of(UnaryOp::Sqrt, input(0))),
            p => {
                let power = Expr::binary(BinaryOp::Pow, size, number(p));
                (power, Expr::binary(BinaryOp::Pow, input(0), number(1.0 / p)))
            }
        };
        let powers = self.step("powers", Kind::Map(power), &[x], &own);
        let sum = self.step("sum", kind, &[powers], shape);
        Ok(self.step("norm", Kind::Map(root), &[sum], shape))
    }

    /// Computes the largest number of each window, and its position.
    fn pooled_places(&mut self, geometry: &Geometry, columns_first: bool) -> Lowered {
        let (x, shape) = (self.input(0)?, self.shape(0)?);
        let dtype = self.net.value(x).dtype;
        let takes = "f32, f64 and integers of up to 32 bits";
        need(self.is_real(x) || self.is_whole(x) && dtype.size() < 8, || self.no_code_for(x, takes))?;
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
        Ok(())
    }

    /// Lowers a pool of windows.
    pub(super) fn pooled(&mut self, op: &Pool) -> Lowered {
        let x = self.input(0)?;
        let geometry = op.geometry(self.graph_shape(0)?)?;
        if let (PoolKind::Max { columns_first }, Some(_)) = (op.kind, self.try_output(1)) {
            return self.pooled_places(&geometry, columns_first);
        }
        let to = self.output()?;
        if !matches!(op.kind, PoolKind::Max { .. }) || !self.has_code(x) {
            self.need_real(x)?;
        }
        let with = |image: &[i64], rest: i64| [&[rest, rest][..], image].concat();
        let windows = Windows {
            kernel: with(&ints(&geometry.kernel), 1),
            strides: with(&ints(&geometry.strides), 1),
            dilations: with(&ints(&geometry.dilations), 1),
            before: with(&geometry.begins, 0),
        };
        let shape = self.net.shape(to).to_vec();
        match op.kind {
            PoolKind::Max { .. } => {
                self.push(Kind::Window(ReduceOp::Max, windows), &[x], to);
            }
            PoolKind::Average { counts_borders } => {
                let sum = self.step("sum", Kind::Window(ReduceOp::Sum, windows.clone()), &[x], &shape);
                self.averaged(sum, &geometry, (windows, counts_borders), to)?;
            }
            PoolKind::Lp { p } => {
                let norm = self.norm(x, Kind::Window(ReduceOp::Sum, windows), p, &shape)?;
                self.push(Kind::View, &[norm], to);
            }
        }
        Ok(())
    }

    /// Divides the sums of windows by the number of elements that count in each.
    fn averaged(
        &mut self,
        sum: ValueId,
        geometry: &Geometry,
        (windows, counts_borders): (Windows, bool),
        to: ValueId,
    ) -> Lowered {
        let out = self.net.shape(to)[2..].to_vec();
        let image = self.shape(0)?[2..].to_vec();
        // Number of counted positions of each window along a dimension.
        let counts = |d: usize| -> Vec<i64> {
            let (low, high) = match counts_borders {
                true => (-geometry.begins[d], image[d] + geometry.ends[d]),
                false => (0, image[d]),
            };
            let place =
                |o: i64, k: i64| o * geometry.strides[d] as i64 + k * geometry.dilations[d] as i64 - geometry.begins[d];
            let inside =
                |o: i64| (0..geometry.kernel[d] as i64).filter(|&k| (low..high).contains(&place(o, k))).count();
            (0..out[d]).map(|o| inside(o) as i64).collect()
        };
        let of_each: Vec<Vec<i64>> = (0..image.len()).map(counts).collect();
        if of_each.iter().all(|counts| counts.iter().all(|n| *n == counts[0])) {
            let n: i64 = of_each.iter().map(|counts| counts[0]).product();
            self.push(Kind::Map(scalar::part(input(0), n as f64, self.decides())), &[sum], to);
            return Ok(());
        }
        if self.is_open_behind(self.shape(0)?[0]) {
            return self.averaged_of_ones(sum, geometry, (windows, counts_borders), to);
        }
        let mut factors = vec![1.0];
        for counts in &of_each {
            factors = factors.iter().flat_map(|f| counts.iter().map(move |n| f / *n as f64)).collect();
        }
        let factors = self.real_constant("factors", sum, &out, &factors);
        self.push(Kind::Map(mul(input(0), input(1))), &[sum, factors], to);
        Ok(())
    }

    /// Divides the sums of windows by those of ones that lie where elements count: their borders are where a
    /// run's are.
    fn averaged_of_ones(
        &mut self,
        sum: ValueId,
        geometry: &Geometry,
        (mut windows, counts_borders): (Windows, bool),
        to: ValueId,
    ) -> Lowered {
        let (mut ones, mut counts) = (vec![1, 1], vec![1, 1]);
        for (d, size) in self.shape(0)?[2..].iter().enumerate() {
            let border = if counts_borders { geometry.begins[d] + geometry.ends[d] } else { 0 };
            ones.push(size + border);
            counts.push(geometry.out[d] as i64);
            if counts_borders {
                windows.before[2 + d] = 0;
            }
        }
        let ones = self.real_constant("ones", sum, &ones, &vec![1.0; ones.iter().product::<i64>() as usize]);
        let counts = self.step("counts", Kind::Window(ReduceOp::Sum, windows), &[ones], &counts);
        let part = Expr::binary(BinaryOp::Div, input(0), input(1));
        self.push(Kind::Map(part), &[sum, counts], to);
        Ok(())
    }

    /// Lowers a pool of whole images.
    pub(super) fn pooled_globally(&mut self, op: &GlobalPool) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_real(x)?;
        let shape = self.net.shape(x).to_vec();
        let axes: Vec<usize> = (2..shape.len()).collect();
        let out = self.net.shape(to).to_vec();
        match op.kind {
            PoolKind::Max { .. } => {
                self.push(Kind::Reduce(ReduceOp::Max, axes), &[x], to);
            }
            PoolKind::Average { .. } => {
                let n: i64 = shape[2..].iter().product();
                let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, axes), &[x], &out);
                self.push(Kind::Map(scalar::part(input(0), n as f64, self.decides())), &[sum], to);
            }
            PoolKind::Lp { p } => {
                let norm = self.norm(x, Kind::Reduce(ReduceOp::Sum, axes), p, &out)?;
                self.push(Kind::View, &[norm], to);
            }
        }
        Ok(())
    }
}
