//! Products and convolutions of integers or of f64, as sums of products, and quantized operators.

use tilewright_graph::DType;
use tilewright_graph::op::{ConvShape, Gemm, product_shape};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, ReduceOp, UnaryOp};

use crate::import::Job;
use crate::net::{Kind, ValueId};
use crate::scalar::{add, clip, input, mul, number, of};

/// Elements of a window that are gathered into one tensor, at most.
const MOST_TAPS: i64 = 512;

impl Job<'_> {
    /// Products of as many matrices, `[.., m, k]` and `[.., k, n]`, whose leading dimensions broadcast.
    pub(crate) fn products(&mut self, a: ValueId, b: ValueId) -> Option<ValueId> {
        let (of_a, of_b) = (self.net.shape(a).to_vec(), self.net.shape(b).to_vec());
        let (&[ref batch_a @ .., m, k], &[ref batch_b @ .., _, n]) = (&of_a[..], &of_b[..]) else { return None };
        let rank = batch_a.len().max(batch_b.len());
        let dim = |batch: &[i64], d: usize| if d < rank - batch.len() { 1 } else { batch[d + batch.len() - rank] };
        let batch: Vec<i64> = (0..rank).map(|d| dim(batch_a, d).max(dim(batch_b, d))).collect();
        let n_products = batch.iter().product();
        if self.is_f32(a) && self.is_f32(b) {
            let a = self.repeated("left", a, &[&batch[..], &[m, k]].concat());
            let b = self.repeated("right", b, &[&batch[..], &[k, n]].concat());
            let (a, b) = (self.viewed("left", a, &[n_products, m, k]), self.viewed("right", b, &[n_products, k, n]));
            let kind = Kind::Product { turned: false, heads: None };
            let found = self.step("products", kind, &[a, b], &[n_products, m, n]);
            return Some(self.viewed("products", found, &[&batch[..], &[m, n]].concat()));
        }
        (self.has_code(a) && self.net.value(a).dtype == self.net.value(b).dtype).then_some(())?;
        let left = self.viewed("left", a, &[batch_a, &[m, k, 1]].concat());
        let right = self.viewed("right", b, &[batch_b, &[1, k, n]].concat());
        let terms =
            self.step("terms", Kind::Map(mul(input(0), input(1))), &[left, right], &[&batch[..], &[m, k, n]].concat());
        let sums = Kind::Reduce(ReduceOp::Sum, vec![rank + 1]);
        let sums = self.step("sums", sums, &[terms], &[&batch[..], &[m, 1, n]].concat());
        Some(self.viewed("products", sums, &[&batch[..], &[m, n]].concat()))
    }

    /// Multiplies matrices `[.., m, k]` by as many of `[.., n, k]`, or `[.., k, n]` unless they are turned.
    pub(crate) fn matrix_product(&mut self, what: &str, a: ValueId, b: ValueId, turned: bool) -> ValueId {
        let (of_a, of_b) = (self.net.shape(a).to_vec(), self.net.shape(b).to_vec());
        let (&[ref outer @ .., m, k], &[.., rows, columns]) = (&of_a[..], &of_b[..]) else {
            unreachable!("both are matrices")
        };
        let n = if turned { rows } else { columns };
        let out = [outer, &[m, n]].concat();
        if self.is_f32(a) {
            return self.step(what, Kind::Product { turned, heads: None }, &[a, b], &out);
        }
        // Sums go along the last dimension of turned factors, else along the one before.
        let (of_a, of_b, all, behind, sums) = match turned {
            true => ([m, 1, k], [1, n, k], [m, n, k], 2, [m, n, 1]),
            false => ([m, k, 1], [1, k, n], [m, k, n], 1, [m, 1, n]),
        };
        let left = self.viewed("left", a, &[outer, &of_a].concat());
        let right = self.viewed("right", b, &[outer, &of_b].concat());
        let terms = Kind::Map(mul(input(0), input(1)));
        let terms = self.step("terms", terms, &[left, right], &[outer, &all].concat());
        let kind = Kind::Reduce(ReduceOp::Sum, vec![outer.len() + behind]);
        let sums = self.step("sums", kind, &[terms], &[outer, &sums].concat());
        self.viewed(what, sums, &out)
    }

    /// Two factors of any number of dimensions as matrices, multiplied.
    pub(crate) fn product_by_sums(&mut self, a: ValueId, b: ValueId) -> Option<ValueId> {
        let as_sizes = |shape: &[i64]| shape.iter().map(|&d| d as usize).collect::<Vec<_>>();
        let (of_a, of_b) = (self.net.shape(a).to_vec(), self.net.shape(b).to_vec());
        let found = product_shape(&as_sizes(&of_a), &as_sizes(&of_b)).ok()?;
        let a = if of_a.len() == 1 { self.viewed("row", a, &[1, of_a[0]]) } else { a };
        let b = if of_b.len() == 1 { self.viewed("column", b, &[of_b[0], 1]) } else { b };
        let products = self.products(a, b)?;
        let out: Vec<i64> = found.out.iter().map(|&d| d as i64).collect();
        Some(self.viewed("product", products, &out))
    }

    /// Multiplies matrices of f64 or of integers, scales the product, and adds another matrix.
    pub(crate) fn gemm_of_others(&mut self, op: &Gemm, [m, n, k]: [i64; 3]) -> Option<()> {
        let (mut a, mut b, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let is_whole = self.is_whole(a);
        (!is_whole || op.alpha.fract() == 0.0 && op.beta.fract() == 0.0).then_some(())?;
        if op.transposes_a {
            a = self.step("a", Kind::Transpose(vec![1, 0]), &[a], &[m, k]);
        }
        if op.transposes_b {
            b = self.step("b", Kind::Transpose(vec![1, 0]), &[b], &[k, n]);
        }
        let product = self.products(a, b)?;
        let scaled = |x: Expr, factor: f64| if factor == 1.0 { x } else { mul(x, number(factor)) };
        match self.try_input(2).filter(|_| op.beta != 0.0) {
            None => self.push(Kind::Map(scaled(input(0), op.alpha)), &[product], to),
            Some(c) => {
                let sum = add(scaled(input(0), op.alpha), scaled(input(1), op.beta));
                self.push(Kind::Map(sum), &[product, c], to)
            }
        };
        Some(())
    }

    /// Products of f64 or of integers.
    pub(crate) fn product_of_others(&mut self) -> Option<()> {
        let (a, b, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let product = self.product_by_sums(a, b)?;
        self.push(Kind::View, &[product], to);
        Some(())
    }

    /// A convolution of images of any number of dimensions, as products with what windows see.
    pub(crate) fn convolved(&mut self, found: &ConvShape, x: ValueId, w: ValueId) -> Option<ValueId> {
        let geometry = &found.geometry;
        let whole = |list: &[usize]| list.iter().map(|&n| n as i64).collect::<Vec<_>>();
        let (kernel, out, image) = (whole(&geometry.kernel), whole(&geometry.out), whole(&found.image));
        let (strides, dilations) = (whole(&geometry.strides), whole(&geometry.dilations));
        let [n, c, m, groups] = [found.n, found.c, found.m, found.groups].map(|size| size as i64);
        let (n_taps, places): (i64, i64) = (kernel.iter().product(), out.iter().product());
        (n_taps <= MOST_TAPS).then_some(())?;
        let rank = image.len();
        // No window reaches further.
        let reach = |d: usize| (out[d] - 1) * strides[d] + (kernel[d] - 1) * dilations[d] + 1;
        let padded: Vec<i64> = [n, c].into_iter().chain((0..rank).map(reach)).collect();
        let before: Vec<i64> = [0, 0].into_iter().chain(geometry.begins.iter().copied()).collect();
        let x = match self.net.shape(x) == padded && before.iter().all(|&n| n == 0) {
            true => x,
            false => self.step("padded", Kind::Pad(before, 0.0), &[x], &padded),
        };
        let mut taps = Vec::new();
        for tap in 0..n_taps {
            let behind = |d: usize| kernel[d + 1..].iter().product::<i64>();
            let first = |d: usize| tap / behind(d) % kernel[d] * dilations[d];
            let parts = [(0, 1), (0, 1)].into_iter().chain((0..rank).map(|d| (first(d), strides[d]))).collect();
            let shape: Vec<i64> = [n, c].iter().chain(&out).copied().collect();
            let part = self.step("tap", Kind::Slice(parts), &[x], &shape);
            taps.push(self.viewed("tap", part, &[n, groups, c / groups, 1, places]));
        }
        let all = [n, groups, c / groups, n_taps, places];
        let seen = if taps.len() == 1 { taps[0] } else { self.step("taps", Kind::Concat(3), &taps, &all) };
        let depth = c / groups * n_taps;
        let seen = self.viewed("seen", seen, &[n, groups, depth, places]);
        let w = self.viewed("weights", w, &[1, groups, m / groups, depth]);
        let products = self.products(w, seen)?;
        Some(self.viewed("convolved", products, &[&[n, m], &out[..]].concat()))
    }

    /// A convolution that none of those over one or two dimensions is.
    pub(crate) fn convolution_by_products(&mut self, found: &ConvShape) -> Option<()> {
        let (x, w, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        (self.is_real(x) && self.is_real(w)).then_some(())?;
        let product = self.convolved(found, x, w)?;
        self.biased(product, 2, to)
    }

    /// A bias of each channel added, where there is one.
    fn biased(&mut self, x: ValueId, at: usize, to: ValueId) -> Option<()> {
        let Some(bias) = self.try_input(at) else {
            self.push(Kind::View, &[x], to);
            return Some(());
        };
        let rank = self.net.shape(to).len();
        let n = self.net.value(bias).n_elements();
        let bias = self.viewed("bias", bias, &[&[n], &vec![1; rank - 2][..]].concat());
        self.push(Kind::Map(add(input(0), input(1))), &[x, bias], to);
        Some(())
    }

    /// A transposed convolution: one of the image with zeros between its elements, by weights turned round.
    pub(crate) fn transposed_convolution(&mut self, found: &ConvShape) -> Option<()> {
        let (x, w, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        (self.is_real(x) && self.is_real(w)).then_some(())?;
        let geometry = &found.geometry;
        let rank = found.image.len();
        let [n, c, m, groups] = [found.n, found.c, found.m, found.groups].map(|size| size as i64);
        let (mut apart, mut wide, mut spread) = (vec![n, c], vec![n, c], vec![n, c]);
        let mut before = vec![0, 0];
        for d in 0..rank {
            let (size, stride) = (geometry.out[d] as i64, geometry.strides[d] as i64);
            apart.extend([size, 1]);
            wide.extend([size, stride]);
            spread.push(size * stride);
            before.extend([0, 0]);
        }
        let apart = self.viewed("apart", x, &apart);
        let wide = if spread == self.net.shape(x) {
            apart
        } else {
            self.step("wide", Kind::Pad(before, 0.0), &[apart], &wide)
        };
        let spread = self.viewed("spread", wide, &spread);
        // Channels of each group first, then those that it reads, turned round along all other dimensions.
        let kernel: Vec<i64> = geometry.kernel.iter().map(|&k| k as i64).collect();
        let by_group = [&[groups, c / groups, m / groups], &kernel[..]].concat();
        let turned = [&[groups, m / groups, c / groups], &kernel[..]].concat();
        let order: Vec<usize> = [0, 2, 1].into_iter().chain(3..3 + rank).collect();
        let w = self.viewed("groups", w, &by_group);
        let w = self.step("turned", Kind::Transpose(order), &[w], &turned);
        let back = [(0, 1); 3].into_iter().chain(kernel.iter().map(|&k| (k - 1, -1))).collect();
        let w = self.step("round", Kind::Slice(back), &[w], &turned);
        let reach = |d: usize| (kernel[d] - 1) * geometry.dilations[d] as i64;
        let plain = ConvShape {
            geometry: tilewright_graph::op::Geometry {
                begins: (0..rank).map(|d| reach(d) - geometry.begins[d]).collect(),
                strides: vec![1; rank],
                // Windows of a transposed one lie over its output.
                out: found.image.clone(),
                ..geometry.clone()
            },
            ..found.clone()
        };
        let product = self.convolved(&plain, spread, w)?;
        self.biased(product, 2, to)
    }

    /// Subtracts the zero point from bytes, which is a single one or one for each position of a dimension
    /// that has `n_behind` behind it.
    fn less_zero(&mut self, x: ValueId, zero: Option<ValueId>, n_behind: usize) -> Option<ValueId> {
        self.is_whole(x).then_some(())?;
        let shape = self.net.shape(x).to_vec();
        let to = self.value("centred", DType::I32, &shape);
        let Some(zero) = zero else { return Some(self.push(Kind::Map(input(0)), &[x], to)) };
        let n = self.net.value(zero).n_elements();
        let zero = match self.net.shape(zero).len() {
            _ if n == 1 => self.viewed("zero", zero, &[]),
            1 => self.viewed("zero", zero, &[&[n], &vec![1; n_behind][..]].concat()),
            _ => zero,
        };
        Some(self.push(Kind::Map(Expr::binary(BinaryOp::Sub, input(0), input(1))), &[x, zero], to))
    }

    /// A product of bytes with zero points, in integers.
    pub(crate) fn whole_product(&mut self) -> Option<()> {
        let (a, b, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let (a, b) = (self.less_zero(a, self.try_input(2), 1)?, self.less_zero(b, self.try_input(3), 0)?);
        let product = self.product_by_sums(a, b)?;
        self.push(Kind::View, &[product], to);
        Some(())
    }

    /// A convolution of bytes with zero points, in integers.
    pub(crate) fn whole_convolution(&mut self, found: &ConvShape) -> Option<()> {
        let (x, w, to) = (self.try_input(0)?, self.try_input(1)?, self.output()?);
        let behind = self.shape(1)?.len() - 1;
        let (x, w) = (self.less_zero(x, self.try_input(2), 0)?, self.less_zero(w, self.try_input(3), behind)?);
        let product = self.convolved(found, x, w)?;
        self.push(Kind::View, &[product], to);
        Some(())
    }

    /// Scales integers, and converts them to bytes; the second factor may have a scale for each position of a
    /// dimension that has so many behind it. Intermediate numbers are f64, as sums are exact.
    fn requantized(&mut self, x: ValueId, n_behind: [usize; 2]) -> Option<()> {
        let to = self.output()?;
        let shape = self.net.shape(x).to_vec();
        let mut inputs = vec![x];
        for (at, behind) in [(1, n_behind[0]), (4, n_behind[1]), (6, 0), (7, 0)] {
            let id = self.try_input(at)?;
            self.has_code(id).then_some(())?;
            let n = self.net.value(id).n_elements();
            let along = if n == 1 { Vec::new() } else { [&[n], &vec![1; behind][..]].concat() };
            inputs.push(self.viewed("scale", id, &along));
        }
        let (least, most) = self.net.value(to).dtype.integer_range();
        let factor = Expr::binary(BinaryOp::Div, mul(input(1), input(2)), input(3));
        let scaled = self.value("scaled", DType::F64, &shape);
        let value = add(of(UnaryOp::Round, mul(input(0), factor)), input(4));
        self.push(Kind::Map(clip(value, least as f64, most as f64)), &inputs, scaled);
        let bytes = self.value("bytes", self.net.value(to).dtype, &shape);
        self.push(Kind::Map(input(0)), &[scaled], bytes);
        self.push(Kind::View, &[bytes], to);
        Some(())
    }

    /// A product of quantized matrices.
    pub(crate) fn quantized_matrices(&mut self) -> Option<()> {
        let (a, b) = (self.try_input(0)?, self.try_input(3)?);
        let (a, b) = (self.less_zero(a, self.try_input(2), 1)?, self.less_zero(b, self.try_input(5), 0)?);
        let product = self.product_by_sums(a, b)?;
        self.requantized(product, [1, 0])
    }

    /// A convolution of quantized images.
    pub(crate) fn quantized_convolution(&mut self, found: &ConvShape) -> Option<()> {
        let (x, w, to) = (self.try_input(0)?, self.try_input(3)?, self.output()?);
        let rank = self.net.shape(to).len();
        let (x, w) = (self.less_zero(x, self.try_input(2), 0)?, self.less_zero(w, self.try_input(5), rank - 1)?);
        let product = self.convolved(found, x, w)?;
        let out = self.net.shape(to).to_vec();
        let sum = self.value("biased", DType::I32, &out);
        self.biased(product, 8, sum)?;
        self.requantized(sum, [0, rank - 2])
    }
}
