//! Import of matrix products of all types.

use tilewright_graph::DType;
use tilewright_graph::op::{Gemm, product_shape};
use tilewright_ir::Expr;
use tilewright_ir::expr::ReduceOp;

use super::job::{NodeImport, ints};
use crate::net::{Convolution, Kind, ValueId};
use crate::no_code::{Lowered, NoCode, Otherwise, need};
use crate::scalar::{add, input, mul, number};

/// Most matrices whose rows are multiplied one matrix after the other.
const MOST_APART: i64 = 4;

impl NodeImport<'_> {
    /// Multiplies two matrices, or batches of matrices.
    pub(super) fn product_of(&mut self, a: ValueId, b: ValueId, to: ValueId) -> Lowered {
        self.need_f32(a)?;
        self.need_f32(b)?;
        let found = product_shape(self.graph_shape(0)?, self.graph_shape(1)?)?;
        let [m, n, k] = found.sizes.map(|size| size as i64);
        let count = |batch: &[usize]| batch.iter().product::<usize>() as i64;
        let n_products = count(&found.batch);
        let [n_left, n_right] = found.batches.each_ref().map(|batch| count(batch));
        let is_many = (2..=MOST_APART).contains(&n_products) && n_left == n_products;
        if is_many
            && self.net.shape(b).len() == 2
            && self.net.value(b).constant.is_some()
            && (self.is_open_behind(n_products) && !self.has_open_cache() || self.net.second_size == Some(m))
        {
            self.product_of_each([a, b, to], [n_products, m, n, k]);
            return Ok(());
        }
        if n_right == 1
            && self.net.shape(b).len() == 2
            && self.net.value(b).constant.is_some()
            && let Some(n_ahead) = self.n_ahead_of_open(a)
        {
            self.product_of_turned([a, b, to], [n_ahead, n_products * m / n_ahead, n, k]);
            return Ok(());
        }
        let mut factors = [a, b];
        let product = Kind::Product { turned: false, heads: None };
        // Matrices with an open number of rows are not merged: their rows are not contiguous.
        let is_apart = n_products > 1 && self.is_open_size(m) && self.net.value(b).constant.is_none();
        let (kind, left, right, out) = if n_right == 1 && !is_apart {
            // Operand B is shared: the rows of all matrices are those of one product.
            (product, vec![n_products * m, k], vec![k, n], vec![n_products * m, n])
        } else if n_left == 1 && [m, n, k, n_products].iter().all(|&size| size > 0) {
            // Operand A is shared: it becomes the weights of a 1×1 convolution.
            factors.reverse();
            let kind = Convolution {
                groups: 1,
                interleaved: false,
                strides: [1; 2],
                dilations: [1; 2],
                before: [0; 2],
                after: [0; 2],
                transposed: false,
            };
            (Kind::Conv(kind), vec![n_products, k, 1, n], vec![m, k, 1, 1], vec![n_products, m, 1, n])
        } else {
            for (factor, batch, rows, columns) in [(0, n_left, m, k), (1, n_right, k, n)] {
                if batch < n_products {
                    let sizes = [&ints(&found.batch)[..], &[rows, columns]].concat();
                    factors[factor] = self.step("repeated", Kind::Map(input(0)), &[factors[factor]], &sizes);
                }
            }
            (product, vec![n_products, m, k], vec![n_products, k, n], vec![n_products, m, n])
        };
        let viewed = |job: &mut Self, id: ValueId, what: &str, shape: &[i64]| {
            if job.net.shape(id) == shape {
                return id;
            }
            if let Some(tensor) = job.net.value(id).constant.clone() {
                let name = format!("{}.{what}", job.node.place.node);
                let new = job.net.add_value(&name, DType::F32, shape);
                let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
                job.net.values[new.0].constant = Some(tensor.reshaped(shape));
                return new;
            }
            job.step(what, Kind::View, &[id], shape)
        };
        let factors = [viewed(self, factors[0], "a", &left), viewed(self, factors[1], "b", &right)];
        if self.net.shape(to) == out {
            self.push(kind, &factors, to);
        } else {
            let product = self.step("product", kind, &factors, &out);
            self.push(Kind::View, &[product], to);
        }
        Ok(())
    }

    /// Products of several matrices, whose number of rows may be open, with one: rows of the next matrix do
    /// not lie behind them.
    fn product_of_each(&mut self, [a, b, to]: [ValueId; 3], [n_products, m, n, k]: [i64; 4]) {
        let all = self.viewed("matrices", a, &[n_products, m, k]);
        let mut products = Vec::new();
        for at in 0..n_products {
            let own = self.step("matrix", Kind::Slice(vec![(at, 1), (0, 1), (0, 1)]), &[all], &[1, m, k]);
            let own = self.viewed("rows", own, &[m, k]);
            let product = self.step("product", Kind::Product { turned: false, heads: None }, &[own, b], &[m, n]);
            products.push(self.viewed("products", product, &[1, m, n]));
        }
        let joined = self.step("products", Kind::Concat(0), &products, &[n_products, m, n]);
        self.push(Kind::View, &[joined], to);
    }

    /// Number of rows ahead of the open dimension of rows, if that is not the first one longer than 1.
    fn n_ahead_of_open(&self, rows: ValueId) -> Option<i64> {
        let (_, outer) = self.net.shape(rows).split_last()?;
        let axis = outer.iter().position(|n| *n > 1 && self.is_open_size(*n))?;
        Some(outer[..axis].iter().product()).filter(|n_ahead| *n_ahead > 1)
    }

    /// Product of rows whose open dimension is behind others: the rows of all matrices are those of one
    /// product once that dimension comes first.
    fn product_of_turned(&mut self, [a, b, to]: [ValueId; 3], [n_ahead, m, n, k]: [i64; 4]) {
        let turned = || Kind::Transpose(vec![1, 0, 2]);
        let all = self.viewed("matrices", a, &[n_ahead, m, k]);
        let rows = self.step("turned", turned(), &[all], &[m, n_ahead, k]);
        let rows = self.step("rows", Kind::View, &[rows], &[m * n_ahead, k]);
        let products = Kind::Product { turned: false, heads: None };
        let products = self.step("products", products, &[rows, b], &[m * n_ahead, n]);
        let products = self.step("products", Kind::View, &[products], &[m, n_ahead, n]);
        let products = self.step("products", turned(), &[products], &[n_ahead, m, n]);
        self.push(Kind::View, &[products], to);
    }

    /// Products of as many matrices, `[.., m, k]` and `[.., k, n]`, whose leading dimensions broadcast.
    pub(super) fn products(&mut self, a: ValueId, b: ValueId) -> Lowered<ValueId> {
        let (of_a, of_b) = (self.net.shape(a).to_vec(), self.net.shape(b).to_vec());
        let &[ref batch_a @ .., m, k] = &of_a[..] else { return Err(self.no_code_of_rank(a, "matrices")) };
        let &[ref batch_b @ .., _, n] = &of_b[..] else { return Err(self.no_code_of_rank(b, "matrices")) };
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
            return Ok(self.viewed("products", found, &[&batch[..], &[m, n]].concat()));
        }
        self.need_code(a)?;
        self.need_same_type(a, b)?;
        let left = self.viewed("left", a, &[batch_a, &[m, k, 1]].concat());
        let right = self.viewed("right", b, &[batch_b, &[1, k, n]].concat());
        let terms =
            self.step("terms", Kind::Map(mul(input(0), input(1))), &[left, right], &[&batch[..], &[m, k, n]].concat());
        let sums = Kind::Reduce(ReduceOp::Sum, vec![rank + 1]);
        let sums = self.step("sums", sums, &[terms], &[&batch[..], &[m, 1, n]].concat());
        Ok(self.viewed("products", sums, &[&batch[..], &[m, n]].concat()))
    }

    /// Multiplies matrices `[.., m, k]` by as many `[.., n, k]`, or `[.., k, n]` if `turned` is false.
    pub(super) fn matrix_product(&mut self, what: &str, a: ValueId, b: ValueId, turned: bool) -> ValueId {
        let (of_a, of_b) = (self.net.shape(a).to_vec(), self.net.shape(b).to_vec());
        let (&[ref outer @ .., m, k], &[.., rows, columns]) = (&of_a[..], &of_b[..]) else {
            unreachable!("both are matrices")
        };
        let n = if turned { rows } else { columns };
        let out = [outer, &[m, n]].concat();
        if self.is_f32(a) {
            return self.step(what, Kind::Product { turned, heads: None }, &[a, b], &out);
        }
        // Sums run along the last dimension of a transposed operand B, else along the one before.
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

    /// Multiplies two operands of any rank as matrices, by elementwise products and sums.
    pub(super) fn product_by_sums(&mut self, a: ValueId, b: ValueId) -> Lowered<ValueId> {
        let as_sizes = |shape: &[i64]| shape.iter().map(|&d| d as usize).collect::<Vec<_>>();
        let (of_a, of_b) = (self.net.shape(a).to_vec(), self.net.shape(b).to_vec());
        let found = product_shape(&as_sizes(&of_a), &as_sizes(&of_b))?;
        let a = if of_a.len() == 1 { self.viewed("row", a, &[1, of_a[0]]) } else { a };
        let b = if of_b.len() == 1 { self.viewed("column", b, &[of_b[0], 1]) } else { b };
        let products = self.products(a, b)?;
        let out: Vec<i64> = found.out.iter().map(|&d| d as i64).collect();
        Ok(self.viewed("product", products, &out))
    }

    /// Multiplies matrices of f64 or of integers, scales the product, and adds another matrix.
    fn gemm_of_others(&mut self, op: &Gemm, [m, n, k]: [i64; 3]) -> Lowered {
        let (mut a, mut b, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let is_whole = self.is_whole(a);
        let is_exact = !is_whole || op.alpha.fract() == 0.0 && op.beta.fract() == 0.0;
        need(is_exact, || NoCode::Form("integers times fractions"))?;
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
        Ok(())
    }

    /// Lowers a product of f64 or integer matrices.
    fn product_of_others(&mut self) -> Lowered {
        let (a, b, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let product = self.product_by_sums(a, b)?;
        self.push(Kind::View, &[product], to);
        Ok(())
    }

    /// Lowers a product of 8-bit integers with zero points, in integer arithmetic.
    fn whole_product(&mut self) -> Lowered {
        let (a, b, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let (a, b) = (self.less_zero(a, self.try_input(2), 1)?, self.less_zero(b, self.try_input(3), 0)?);
        let product = self.product_by_sums(a, b)?;
        self.push(Kind::View, &[product], to);
        Ok(())
    }

    /// Lowers a product of matrices, or of batches that broadcast.
    pub(super) fn matmul(&mut self) -> Lowered {
        let (a, b, to) = (self.input(0)?, self.input(1)?, self.output()?);
        self.product_of(a, b, to).otherwise(|| self.product_of_others())
    }

    /// Lowers a product of matrices of bytes to sums in 32 bits.
    pub(super) fn matmul_integer(&mut self) -> Lowered {
        if self.integer_product().is_some() {
            return Ok(());
        }
        self.quantized_product().otherwise(|| self.whole_product())
    }

    /// Lowers a scaled product of two matrices plus a scaled third.
    pub(super) fn gemm(&mut self, op: &Gemm) -> Lowered {
        let [m, n, k] = op.sizes(self.graph_shape(0)?, self.graph_shape(1)?)?.map(|size| size as i64);
        let (mut a, b, to) = (self.input(0)?, self.input(1)?, self.output()?);
        if !self.is_f32(a) || !self.is_f32(b) {
            return self.gemm_of_others(op, [m, n, k]);
        }
        if op.transposes_a {
            a = self.step("a", Kind::Transpose(vec![1, 0]), &[a], &[m, k]);
        }
        let kind = Kind::Product { turned: op.transposes_b, heads: None };
        let c = self.try_input(2).filter(|_| op.beta != 0.0);
        if c.is_none() && op.alpha == 1.0 {
            self.push(kind, &[a, b], to);
            return Ok(());
        }
        let product = self.step("product", kind, &[a, b], &[m, n]);
        let scaled = mul(input(0), number(op.alpha));
        match c {
            None => self.push(Kind::Map(scaled), &[product], to),
            Some(c) => {
                let sum = add(scaled, mul(input(1), number(op.beta)));
                self.push(Kind::Map(sum), &[product, c], to)
            }
        };
        Ok(())
    }
}
