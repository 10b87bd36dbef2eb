//! Attention and positions as operators of ONNX: products of matrices with maps around them.

use tilewright_graph::DType;
use tilewright_graph::op::{Attention, Products, RotaryEmbedding};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond, ReduceOp, UnaryOp};

use crate::import::Job;
use crate::net::{Kind, ValueId};
use crate::scalar::{add, choose_if, input, less, mul, number, of, sub};

/// Neither holds.
fn either(a: Cond, b: Cond) -> Cond {
    let not = |cond: Cond| Cond::Not(Box::new(cond));
    not(not(a).and(not(b)))
}

impl Job<'_> {
    /// Heads of a tensor, `[batch, heads, steps, size]`, that lie apart or in one dimension.
    fn heads(&mut self, x: ValueId, n_heads: Option<usize>) -> Option<ValueId> {
        let shape = self.net.shape(x).to_vec();
        match (&shape[..], n_heads) {
            ([_, _, _, _], _) => Some(x),
            (&[b, s, all], Some(h)) if h > 0 => {
                let (h, d) = (h as i64, all / h as i64);
                let apart = self.step("apart", Kind::View, &[x], &[b, s, h, d]);
                Some(self.step("heads", Kind::Transpose(vec![0, 2, 1, 3]), &[apart], &[b, h, s, d]))
            }
            _ => None,
        }
    }

    /// Keys or values of all heads with those of the past before them, as the node's output at a place.
    fn with_past(&mut self, at: usize, output: usize, n_heads: Option<usize>) -> Option<ValueId> {
        let new = self.heads(self.try_input(at)?, n_heads)?;
        let mut all = new;
        if let Some(past) = self.try_input(at + 3).filter(|past| self.net.value(*past).n_elements() > 0) {
            let mut shape = self.net.shape(new).to_vec();
            shape[2] += self.net.shape(past)[2];
            all = self.step("all", Kind::Concat(2), &[past, new], &shape);
        }
        if let Some(to) = self.outputs.get(output).copied().flatten() {
            self.push(Kind::View, &[all], to);
        }
        Some(all)
    }

    /// Repeats heads of keys or values, each for `repeats` heads of queries, as matrices.
    fn matrices_of_heads(&mut self, x: ValueId, repeats: i64) -> Option<ValueId> {
        let &[b, h, t, d] = self.net.shape(x) else { return None };
        if repeats == 1 {
            return Some(self.viewed("matrices", x, &[b * h, t, d]));
        }
        let single = self.step("single", Kind::View, &[x], &[b, h, 1, t, d]);
        let repeated = self.repeated("repeated", single, &[b, h, repeats, t, d]);
        Some(self.step("matrices", Kind::View, &[repeated], &[b * h * repeats, t, d]))
    }

    /// Addend of a mask to products, `[.., total]`.
    fn mask(&mut self, total: i64) -> Option<Option<ValueId>> {
        let Some(mask) = self.try_input(3) else { return Some(None) };
        self.has_code(mask).then_some(())?;
        let mut mask = mask;
        let mut shape = self.net.shape(mask).to_vec();
        if self.net.value(mask).dtype == DType::Bool {
            let added = self.value("added", DType::F32, &shape);
            let value = choose_if(less(number(0.0), input(0)), number(0.0), number(f64::NEG_INFINITY));
            mask = self.push(Kind::Map(value), &[mask], added);
        }
        let width = *shape.last()?;
        // Keys that a shorter mask does not speak of are not seen.
        if width != 1 && width < total {
            *shape.last_mut()? = total;
            mask = self.step("mask", Kind::Pad(vec![0; shape.len()], f64::NEG_INFINITY), &[mask], &shape);
        }
        Some(Some(mask))
    }

    /// Mask of the products that a query does not see: a condition on values that are added to the inputs.
    fn hidden(&mut self, op: &Attention, sizes: [i64; 3], inputs: &mut Vec<ValueId>) -> Option<Cond> {
        let [past, steps, total] = sizes;
        let first = inputs.len();
        inputs.push(self.counted(2, 0, steps, 1));
        inputs.push(self.counted(1, 0, total, 1));
        let (row, column) = (input(first), input(first + 1));
        let mut offset = number(past as f64);
        let mut all: Vec<Cond> = Vec::new();
        if let Some(valid) = self.try_input(6) {
            self.is_whole(valid).then_some(())?;
            let batch = self.net.value(valid).n_elements();
            inputs.push(self.viewed("valid", valid, &[batch, 1, 1, 1]));
            let valid = input(first + 2);
            if self.try_input(4).is_none() {
                offset = sub(valid.clone(), number(steps as f64));
            }
            all.push(Cond::Not(Box::new(less(column.clone(), valid))));
        }
        let place = || add(row.clone(), offset.clone());
        let minus = |a: Expr, b: Expr| Expr::binary(BinaryOp::Sub, a, b);
        if op.is_causal {
            all.push(less(place(), column.clone()));
        }
        if let Some(n) = op.left_window {
            all.push(less(number(n as f64), minus(place(), column.clone())));
        }
        if let Some(n) = op.right_window {
            all.push(less(number(n as f64), minus(column.clone(), place())));
        }
        let found = all.into_iter().reduce(either);
        if found.is_none() {
            inputs.truncate(first);
        }
        Some(found.unwrap_or(Cond::Not(Box::new(Cond::True))))
    }

    /// Scaled dot-product attention.
    pub(crate) fn attention(&mut self, op: &Attention) -> Option<()> {
        let (q, k, v) = (self.try_input(0)?, self.try_input(1)?, self.try_input(2)?);
        let dtype = self.net.value(q).dtype;
        (self.is_real(q) && [k, v].iter().all(|&id| self.net.value(id).dtype == dtype)).then_some(())?;
        let is_apart = self.shape(0)?.len() == 4;
        let q = self.heads(q, op.n_q_heads)?;
        let (k, v) = (self.with_past(1, 1, op.n_kv_heads)?, self.with_past(2, 2, op.n_kv_heads)?);
        let &[b, h, s, d] = self.net.shape(q) else { return None };
        let (&[_, n_kv, total, _], &[.., width]) = (self.net.shape(k), self.net.shape(v)) else { return None };
        let past = self.try_input(4).map_or(0, |past| self.net.shape(past)[2]);
        let (keys, values) = (self.matrices_of_heads(k, h / n_kv)?, self.matrices_of_heads(v, h / n_kv)?);
        let queries = self.viewed("queries", q, &[b * h, s, d]);
        let (flat, shape) = ([b * h, s, total], [b, h, s, total]);
        let products = self.matrix_product("products", queries, keys, true);
        let products = self.viewed("products", products, &shape);
        let scale = op.scale.unwrap_or(1.0 / (d as f64).sqrt());
        let scaled = mul(input(0), number(scale));
        let bounded = match op.softcap > 0.0 {
            true => mul(of(UnaryOp::Tanh, mul(scaled.clone(), number(1.0 / op.softcap))), number(op.softcap)),
            false => scaled,
        };
        let bounded = self.step("bounded", Kind::Map(bounded), &[products], &shape);
        let mut inputs = vec![bounded];
        let mut value = input(0);
        if let Some(mask) = self.mask(total)? {
            inputs.push(mask);
            value = add(value, input(1));
        }
        let hidden = self.hidden(op, [past, s, total], &mut inputs)?;
        let masked = choose_if(hidden, number(f64::NEG_INFINITY), value);
        let masked = self.step("masked", Kind::Map(masked), &inputs, &shape);
        let kept = [b, h, s, 1];
        let largest = self.step("largest", Kind::Reduce(ReduceOp::Max, vec![3]), &[masked], &kept);
        // A query that sees no key gives zeros.
        let (least, smallest) = match dtype {
            DType::F32 => (f64::from(f32::MIN), f64::from(f32::MIN_POSITIVE)),
            _ => (f64::MIN, f64::MIN_POSITIVE),
        };
        let finite = choose_if(less(input(1), number(least)), number(least), input(1));
        let power = of(UnaryOp::Exp, Expr::binary(BinaryOp::Sub, input(0), finite));
        let power = self.step("power", Kind::Map(power), &[masked, largest], &shape);
        let sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, vec![3]), &[power], &kept);
        let share = Expr::binary(BinaryOp::Div, input(0), input(1));
        let share = choose_if(less(input(1), number(smallest)), number(0.0), share);
        let shares = self.step("shares", Kind::Map(share), &[power, sum], &shape);
        if let Some(to) = self.outputs.get(3).copied().flatten() {
            let shown = match op.products {
                Products::Plain | Products::Bounded => bounded,
                Products::Masked => masked,
                Products::Softmax => shares,
            };
            self.push(Kind::View, &[shown], to);
        }
        let Some(to) = self.output() else { return Some(()) };
        let shares = self.viewed("shares", shares, &flat);
        let found = self.matrix_product("found", shares, values, false);
        if is_apart {
            self.push(Kind::View, &[found], to);
            return Some(());
        }
        let found = self.viewed("heads", found, &[b, h, s, width]);
        let turned = self.step("together", Kind::Transpose(vec![0, 2, 1, 3]), &[found], &[b, s, h, width]);
        self.push(Kind::View, &[turned], to);
        Some(())
    }

    /// Pairs of numbers turned by the angles of their positions.
    pub(crate) fn rotated(&mut self, op: &RotaryEmbedding) -> Option<()> {
        let (x, to, shape) = (self.try_input(0)?, self.output()?, self.shape(0)?);
        self.is_f32(x).then_some(())?;
        // Steps come first where heads are in one dimension.
        let (x, sizes, steps_first) = match shape[..] {
            [b, h, s, d] => (x, [b, h, s, d], false),
            [b, s, all] if op.n_heads > 0 => {
                let sizes = [b, s, op.n_heads as i64, all / op.n_heads as i64];
                (self.viewed("heads", x, &sizes), sizes, true)
            }
            _ => return None,
        };
        let [b, _, _, d] = sizes;
        let s = if steps_first { sizes[1] } else { sizes[2] };
        let turned = if op.n_turned == 0 { d } else { op.n_turned as i64 };
        let half = turned / 2;
        let mut angles = Vec::new();
        for at in [1, 2] {
            let mut table = self.try_input(at)?;
            self.is_f32(table).then_some(())?;
            if let Some(positions) = self.try_input(3) {
                let kind = Kind::Gather { axis: 0, by_element: false };
                table = self.step("angles", kind, &[table, positions], &[b, s, half]);
            }
            let along = if steps_first { [b, s, 1, half] } else { [b, 1, s, half] };
            (self.net.value(table).n_elements() == b * s * half).then_some(())?;
            angles.push(self.viewed("angles", table, &along));
        }
        let with = |sizes: [i64; 4], last: i64| [sizes[0], sizes[1], sizes[2], last];
        let slice = |job: &mut Self, x: ValueId, first: i64, step: i64, n: i64| {
            let parts = vec![(0, 1), (0, 1), (0, 1), (first, step)];
            job.step("part", Kind::Slice(parts), &[x], &with(sizes, n))
        };
        let (first, second) = match op.is_interleaved {
            true => (slice(self, x, 0, 2, half), slice(self, x, 1, 2, half)),
            false => (slice(self, x, 0, 1, half), slice(self, x, half, 1, half)),
        };
        let inputs = [first, second, angles[0], angles[1]];
        let minus = Expr::binary(BinaryOp::Sub, mul(input(2), input(0)), mul(input(3), input(1)));
        let plus = add(mul(input(3), input(0)), mul(input(2), input(1)));
        let real = self.step("real", Kind::Map(minus), &inputs, &with(sizes, half));
        let imaginary = self.step("imaginary", Kind::Map(plus), &inputs, &with(sizes, half));
        let mut parts = vec![real, imaginary];
        if op.is_interleaved {
            let single = [sizes[0], sizes[1], sizes[2], half, 1];
            let pair = [sizes[0], sizes[1], sizes[2], half, 2];
            let parts_apart = parts.iter().map(|&id| self.viewed("single", id, &single)).collect::<Vec<_>>();
            let pairs = self.step("pairs", Kind::Concat(4), &parts_apart, &pair);
            parts = vec![self.step("turned", Kind::View, &[pairs], &with(sizes, turned))];
        }
        if turned < d {
            parts.push(slice(self, x, turned, 1, d - turned));
        }
        let all = if parts.len() == 1 { parts[0] } else { self.step("all", Kind::Concat(3), &parts, &sizes) };
        self.push(Kind::View, &[all], to);
        Some(())
    }
}
