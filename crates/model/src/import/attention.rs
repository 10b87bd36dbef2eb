//! Import of `Attention` and `RotaryEmbedding`: matrix products with maps around them.

use tilewright_graph::DType;
use tilewright_graph::op::{Attention, CacheSizes, GroupQueryAttention, Inputs, Products, RotaryEmbedding};
use tilewright_ir::Expr;
use tilewright_ir::expr::{BinaryOp, Cond, ReduceOp, UnaryOp};

use super::job::NodeImport;
use super::movement::turning;
use crate::net::{Kind, Node, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{add, choose_if, input, less, mul, number, of, sub};

impl NodeImport<'_> {
    /// Reshapes a tensor to heads, `[batch, heads, steps, size]`; in the input, they are separate or share a
    /// dimension.
    fn heads(&mut self, x: ValueId, n_heads: Option<usize>) -> Lowered<ValueId> {
        let shape = self.net.shape(x).to_vec();
        match (&shape[..], n_heads) {
            ([_, _, _, _], _) => Ok(x),
            (&[b, s, all], Some(h)) if h > 0 => {
                let (h, d) = (h as i64, all / h as i64);
                let apart = self.step("apart", Kind::View, &[x], &[b, s, h, d]);
                Ok(self.turned_around("heads", apart, &[0, 2, 1, 3]))
            }
            _ => Err(self.no_code_of_rank(x, "heads of their own, or in one dimension")),
        }
    }

    /// Permutes the dimensions of a tensor.
    fn turned_around(&mut self, what: &str, x: ValueId, order: &[usize]) -> ValueId {
        let shape: Vec<i64> = order.iter().map(|&axis| self.net.shape(x)[axis]).collect();
        let kind = turning(self.net.shape(x), order);
        self.step(what, kind, &[x], &shape)
    }

    /// Appends keys or values of all heads to those of the past, and any unused room of a cache, as the
    /// node's output at an index. Returns them without the unused room.
    fn with_past(&mut self, new: ValueId, past: Option<ValueId>, n_past: i64, output: usize) -> ValueId {
        let &[b, h, n, d] = self.net.shape(new) else { unreachable!("heads lie apart") };
        let room = past.map_or(n, |past| self.net.shape(past)[2].max(n_past + n));
        let part = |job: &mut Self, past: ValueId, first: i64, n: i64| match n == job.net.shape(past)[2] {
            true => past,
            false => job.step("part", Kind::Slice(vec![(0, 1), (0, 1), (first, 1), (0, 1)]), &[past], &[b, h, n, d]),
        };
        let mut all = new;
        if let Some(past) = past.filter(|_| n_past > 0) {
            let before = part(self, past, 0, n_past);
            all = self.step("all", Kind::Concat(2), &[before, new], &[b, h, n_past + n, d]);
        }
        if let Some(to) = self.try_output(output) {
            let mut cache = all;
            if let Some(past) = past.filter(|_| room > n_past + n) {
                let behind = part(self, past, n_past + n, room - n_past - n);
                cache = self.step("cache", Kind::Concat(2), &[all, behind], &[b, h, room, d]);
            }
            self.push(Kind::View, &[cache], to);
        }
        all
    }

    /// Repeats heads of keys or values, each for `repeats` heads of queries, as matrices.
    fn matrices_of_heads(&mut self, x: ValueId, repeats: i64) -> Lowered<ValueId> {
        let [b, h, t, d] = self.sizes_of(x)?;
        if repeats == 1 {
            return Ok(self.viewed("matrices", x, &[b * h, t, d]));
        }
        let single = self.step("single", Kind::View, &[x], &[b, h, 1, t, d]);
        let repeated = self.repeated("repeated", single, &[b, h, repeats, t, d]);
        Ok(self.step("matrices", Kind::View, &[repeated], &[b * h * repeats, t, d]))
    }

    /// Converts a mask to a term of the products, `[.., total]`.
    fn mask(&mut self, mask: Option<ValueId>, total: i64) -> Lowered<Option<ValueId>> {
        let Some(mask) = mask else { return Ok(None) };
        self.need_code(mask)?;
        let mut mask = mask;
        let mut shape = self.net.shape(mask).to_vec();
        if self.net.value(mask).dtype == DType::Bool {
            let added = self.value("added", DType::F32, &shape);
            let value = choose_if(less(number(0.0), input(0)), number(0.0), number(f64::NEG_INFINITY));
            mask = self.push(Kind::Map(value), &[mask], added);
        }
        let width = self.last_size(mask)?;
        // Keys beyond the end of a shorter mask are masked out.
        if width != 1 && width < total {
            shape.last_mut().into_iter().for_each(|last| *last = total);
            mask = self.step("mask", Kind::Pad(vec![0; shape.len()], f64::NEG_INFINITY), &[mask], &shape);
        }
        Ok(Some(mask))
    }

    /// Numbers that are added for keys that no query sees, or that one does not see.
    pub(super) fn key_mask(&mut self, least: f64) -> Lowered {
        let (mask, to) = (self.input(0)?, self.output()?);
        self.need_integers(mask)?;
        let &[batch, _, queries, keys] = self.net.shape(to) else { unreachable!("a mask of products") };
        let (is_seen, inputs) = match self.net.shape(mask).len() {
            1 => {
                let counts = self.viewed("counts", mask, &[batch, 1, 1, 1]);
                (less(input(1), input(0)), vec![counts, self.counted(1, 0, keys, 1)])
            }
            _ => (less(number(0.0), input(0)), vec![self.viewed("keys", mask, &[batch, 1, queries, keys])]),
        };
        self.push(Kind::Map(choose_if(is_seen, number(0.0), number(least))), &inputs, to);
        Ok(())
    }

    /// Mask of the products that a query does not see: a condition on values that are added to the inputs.
    pub(super) fn hidden(
        &mut self,
        op: &Attention,
        valid: Option<ValueId>,
        has_past: bool,
        [past, steps, total]: [i64; 3],
        inputs: &mut Vec<ValueId>,
    ) -> Lowered<Option<Cond>> {
        let first = inputs.len();
        inputs.push(self.counted(2, 0, steps, 1));
        inputs.push(self.counted(1, 0, total, 1));
        let (row, column) = (input(first), input(first + 1));
        let mut offset = number(past as f64);
        if self.varies() {
            offset = input(inputs.len());
            let past = self.whole_constant("past", DType::I64, &[1], &[past]);
            inputs.push(self.varying(past));
        }
        let mut all: Vec<Cond> = Vec::new();
        if let Some(valid) = valid {
            self.need_integers(valid)?;
            let batch = self.net.value(valid).n_elements();
            inputs.push(self.viewed("valid", valid, &[batch, 1, 1, 1]));
            let valid = input(inputs.len() - 1);
            if !has_past {
                offset = sub(valid.clone(), number(steps as f64));
            }
            all.push(Cond::Not(Box::new(less(column.clone(), valid))));
        }
        let place = || add(row.clone(), offset.clone());
        let minus = |a: Expr, b: Expr| Expr::binary(BinaryOp::Sub, a, b);
        // A single query in the last position sees all keys.
        if op.is_causal && (steps > 1 || past + steps != total || valid.is_some()) {
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
        Ok(found)
    }

    /// Scaled dot-product attention.
    pub(super) fn attention(&mut self, op: &Attention) -> Lowered {
        let [q, k, v] = [self.input(0)?, self.input(1)?, self.input(2)?];
        // No keys: the results are empty sums.
        if self.is_empty(k) && self.try_input(4).is_none_or(|past| self.is_empty(past)) {
            return Err(NoCode::Empty(self.net.value(k).name.clone()));
        }
        let is_apart = self.shape(0)?.len() == 4;
        let [q, k, v] = [self.heads(q, op.n_q_heads)?, self.heads(k, op.n_kv_heads)?, self.heads(v, op.n_kv_heads)?];
        let [mask, past_k, past_v, valid] = [3, 4, 5, 6].map(|at| self.try_input(at));
        let past = [past_k, past_v];
        self.attended(op, Attended { heads: [q, k, v], past, n_past: None, mask, valid, sink: None, is_apart })
    }

    /// Lowers attention whose heads share keys and values, with rotary embeddings and a cache.
    pub(super) fn grouped_attention(&mut self, op: &GroupQueryAttention) -> Lowered {
        let CacheSizes { batch, new, depth, width, past, .. } = op.sizes(Inputs(&self.facts()))?;
        let [b, s, d, width, past] = [batch, new, depth, width, past].map(|n| n as i64);
        let [n_q, n_kv] = op.n_heads().map(|n| n as i64);
        let all = self.input(0)?;
        let sizes = [n_q * d, n_kv * d, n_kv * width];
        let mut parts = [Some(all), self.try_input(1), self.try_input(2)];
        if parts[1].is_none() {
            let mut first = 0;
            for (part, n) in parts.iter_mut().zip(sizes) {
                let kind = Kind::Slice(vec![(0, 1), (0, 1), (first, 1)]);
                *part = Some(self.step("part", kind, &[all], &[b, s, n]));
                first += n;
            }
        }
        let [Some(mut q), Some(mut k), Some(v)] = parts else { return Err(NoCode::Missing(2)) };
        if op.rotary.is_some() {
            let positions = self.try_input(9).unwrap_or_else(|| self.positions(past, [b, s]));
            let tables = [self.input(7)?, self.input(8)?];
            let angles = self.last_size(tables[0])? as usize;
            let turned = |job: &mut Self, x: ValueId, n_heads: i64| {
                let rotary = op.rotary_of(n_heads as usize, angles, d as usize);
                let rotary = rotary.ok_or(NoCode::Form("rotations without an attribute"))?;
                job.turned(&rotary, x, tables, Some(positions))
            };
            if b * s == 1 {
                // The heads of a row are contiguous, and are rotated together.
                let both = self.step("both", Kind::Concat(2), &[q, k], &[1, 1, sizes[0] + sizes[1]]);
                let both = turned(self, both, n_q + n_kv)?;
                let mut part = |first: i64, n: i64| {
                    self.step("part", Kind::Slice(vec![(0, 1), (0, 1), (first, 1)]), &[both], &[1, 1, n])
                };
                [q, k] = [part(0, sizes[0]), part(sizes[0], sizes[1])];
            } else {
                [q, k] = [turned(self, q, n_q)?, turned(self, k, n_kv)?];
            }
        }
        let [q, k, v] = [(q, n_q), (k, n_kv), (v, n_kv)].map(|(x, n)| self.heads(x, Some(n as usize)));
        let past_of = [self.try_input(3), self.try_input(4)];
        let (mask, heads) = (self.try_input(10), [q?, k?, v?]);
        let sink = match (self.try_input(11), op.is_smooth) {
            (None, true) => Some(self.real_constant("sink", heads[0], &[n_q], &vec![0.0; n_q as usize])),
            (given, _) => given,
        };
        let (valid, n_past) = (None, Some(past));
        self.attended(&op.attention, Attended { heads, past: past_of, n_past, mask, valid, sink, is_apart: false })
    }

    /// Whether an input of the node depends on the size of the open dimension.
    pub(super) fn varies(&self) -> bool {
        self.graph().varies(&self.node.inputs).any()
    }

    /// Marks a constant as depending on the open dimension; equal constants of several nodes become one
    /// tensor.
    pub(super) fn varying(&mut self, id: ValueId) -> ValueId {
        let Some(constant) = self.net.values[id.0].constant.take() else { return id };
        match self.net.varying.iter().find(|(_, known)| *known == constant) {
            Some((known, _)) => *known,
            None => {
                self.net.varying.push((id, constant));
                id
            }
        }
    }

    /// Positions of new steps after a past.
    fn positions(&mut self, past: i64, [b, s]: [i64; 2]) -> ValueId {
        let counted: Vec<i64> = (0..b * s).map(|at| past + at % s).collect();
        let id = self.whole_constant("positions", DType::I64, &[b, s], &counted);
        if self.varies() { self.varying(id) } else { id }
    }

    /// Attention of separate heads.
    fn attended(&mut self, op: &Attention, parts: Attended) -> Lowered {
        let Attended { heads: [q, k, v], past: [past_k, past_v], n_past, mask, valid, sink, is_apart } = parts;
        self.need_real(q)?;
        self.need_same_type(q, k)?;
        self.need_same_type(q, v)?;
        let past = n_past.unwrap_or_else(|| past_k.map_or(0, |past| self.net.shape(past)[2]));
        let (k, v) = (self.with_past(k, past_k, past, 1), self.with_past(v, past_v, past, 2));
        let [b, h, s, d] = self.sizes_of(q)?;
        let ([_, n_kv, total, _], width) = (self.sizes_of(k)?, self.last_size(v)?);
        // For a single step, heads that share keys are the rows of one product.
        let (n_products, rows) = if s == 1 { (b * n_kv, h / n_kv) } else { (b * h, s) };
        let (keys, values) = match s {
            1 => (self.matrices_of_heads(k, 1)?, self.matrices_of_heads(v, 1)?),
            _ => (self.matrices_of_heads(k, h / n_kv)?, self.matrices_of_heads(v, h / n_kv)?),
        };
        let queries = self.viewed("queries", q, &[n_products, rows, d]);
        let (flat, shape) = ([n_products, rows, total], [b, h, s, total]);
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
        if let Some(mask) = self.mask(mask, total)? {
            inputs.push(mask);
            value = add(value, input(1));
        }
        let n_inputs = inputs.len();
        let hidden = self.hidden(op, valid, past_k.is_some(), [past, s, total], &mut inputs)?;
        let masked = match hidden {
            None if n_inputs == 1 => bounded,
            None => self.step("masked", Kind::Map(value), &inputs, &shape),
            Some(hidden) => {
                let masked = choose_if(hidden, number(f64::NEG_INFINITY), value);
                self.step("masked", Kind::Map(masked), &inputs, &shape)
            }
        };
        let shares = self.shares(masked, sink)?;
        if let Some(to) = self.try_output(3) {
            let shown = match op.products {
                Products::Plain | Products::Bounded => bounded,
                Products::Masked => masked,
                Products::Softmax => shares,
            };
            self.push(Kind::View, &[shown], to);
        }
        let Some(to) = self.try_output(0) else { return Ok(()) };
        let shares = self.viewed("shares", shares, &flat);
        let found = self.matrix_product("found", shares, values, false);
        if is_apart {
            self.push(Kind::View, &[found], to);
            return Ok(());
        }
        let found = self.viewed("heads", found, &[b, h, s, width]);
        let turned = self.turned_around("together", found, &[0, 2, 1, 3]);
        self.push(Kind::View, &[turned], to);
        Ok(())
    }

    /// Softmax of products over the keys; the exponential of a number for each head, if given, is added to
    /// the sum.
    fn shares(&mut self, masked: ValueId, sink: Option<ValueId>) -> Lowered<ValueId> {
        let (shape, dtype) = (self.net.shape(masked).to_vec(), self.net.value(masked).dtype);
        let [b, h, s, _] = self.sizes_of(masked)?;
        let kept = [b, h, s, 1];
        let mut largest = self.step("largest", Kind::Reduce(ReduceOp::Max, vec![3]), &[masked], &kept);
        let sink = match sink {
            None => None,
            Some(sink) => {
                self.need_same_type(masked, sink)?;
                let sink = self.viewed("sink", sink, &[1, h, 1, 1]);
                let larger = Expr::binary(BinaryOp::Max, input(0), input(1));
                largest = self.step("larger", Kind::Map(larger), &[largest, sink], &kept);
                Some(sink)
            }
        };
        // The result of a query that sees no key is zero.
        let (least, smallest) = match dtype {
            DType::F32 => (f64::from(f32::MIN), f64::from(f32::MIN_POSITIVE)),
            _ => (f64::MIN, f64::MIN_POSITIVE),
        };
        let finite = choose_if(less(input(1), number(least)), number(least), input(1));
        let power = of(UnaryOp::Exp, Expr::binary(BinaryOp::Sub, input(0), finite));
        let power = self.step("power", Kind::Map(power), &[masked, largest], &shape);
        let mut sum = self.step("sum", Kind::Reduce(ReduceOp::Sum, vec![3]), &[power], &kept);
        if let Some(sink) = sink {
            let more = of(UnaryOp::Exp, Expr::binary(BinaryOp::Sub, input(1), input(2)));
            sum = self.step("more", Kind::Map(add(input(0), more)), &[sum, sink, largest], &kept);
        }
        let share = Expr::binary(BinaryOp::Div, input(0), input(1));
        let share = choose_if(less(input(1), number(smallest)), number(0.0), share);
        Ok(self.step("shares", Kind::Map(share), &[power, sum], &shape))
    }

    /// Lowers a rotary embedding: pairs of numbers rotated by the angles of their positions.
    pub(super) fn rotated(&mut self, op: &RotaryEmbedding) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        let tables = [self.input(op.inputs[0])?, self.input(op.inputs[1])?];
        let turned = self.turned(op, x, tables, self.try_input(op.inputs[2]))?;
        self.push(Kind::View, &[turned], to);
        Ok(())
    }

    /// Rotates pairs of a tensor's numbers by angles whose cosines and sines the tables contain.
    fn turned(
        &mut self,
        op: &RotaryEmbedding,
        x: ValueId,
        tables: [ValueId; 2],
        positions: Option<ValueId>,
    ) -> Lowered<ValueId> {
        let shape = self.net.shape(x).to_vec();
        self.need_f32(x)?;
        let half = self.last_size(tables[0])?;
        // Steps come first if the heads share a dimension.
        let (sizes, steps_first) = match shape[..] {
            [b, h, s, d] => ([b, h, s, d], false),
            [b, s, all] if op.n_heads > 0 => ([b, s, op.n_heads as i64, all / op.n_heads as i64], true),
            [b, s, all] if half > 0 => ([b, s, all / (2 * half), 2 * half], true),
            _ => return Err(self.no_code_of_rank(x, "heads of their own, or in one dimension")),
        };
        let apart = self.viewed("heads", x, &sizes);
        let [b, _, _, d] = sizes;
        let s = if steps_first { sizes[1] } else { sizes[2] };
        let positions = positions.map(|positions| match self.net.shape(positions) {
            [1] if b * s > 1 => {
                let steps = self.counted(2, 1, s, 1);
                let all = self.step("positions", Kind::Map(add(input(0), input(1))), &[positions, steps], &[1, s]);
                self.repeated("positions", all, &[b, s])
            }
            _ => positions,
        });
        let mut angles = Vec::new();
        for mut table in tables {
            self.need_f32(table)?;
            if let Some(positions) = positions {
                let kind = Kind::Gather { axis: 0, by_element: false };
                let (outer, n) = (self.net.shape(positions).to_vec(), self.net.value(positions).n_elements());
                need(n == b * s, || NoCode::Form("positions that are not of each step"))?;
                let inputs = [Some(table), Some(positions)];
                let is_same = |node: &&Node| {
                    matches!(node.kind, Kind::Gather { axis: 0, by_element: false }) && node.inputs == inputs
                };
                // Queries and keys of all layers share these.
                let known = self.net.nodes.iter().find(is_same).map(Node::output);
                table = match known {
                    Some(known) => known,
                    None => self.step("angles", kind, &[table, positions], &[&outer[..], &[half]].concat()),
                };
            }
            let n_angles = self.net.value(table).n_elements();
            need(n_angles == b * s * half, || NoCode::Form("tables of angles that are not of each step"))?;
            let [first, second] = if steps_first { [s, 1] } else { [1, s] };
            let along = if op.is_interleaved { [b, first, second, half, 1] } else { [b, first, second, 1, half] };
            angles.push(self.viewed("angles", table, &along));
        }
        // The two numbers of a pair are along a dimension of their own, in which they are swapped.
        let turned = 2 * half;
        let with = |last: i64| [sizes[0], sizes[1], sizes[2], last];
        let pairs_of = |last: [i64; 2]| [sizes[0], sizes[1], sizes[2], last[0], last[1]];
        let (pair, axis) = if op.is_interleaved { ([half, 2], 4) } else { ([2, half], 3) };
        let part = |job: &mut Self, first: i64, n: i64| match n == d {
            true => apart,
            false => job.step("part", Kind::Slice(vec![(0, 1), (0, 1), (0, 1), (first, 1)]), &[apart], &with(n)),
        };
        let first = part(self, 0, turned);
        let pairs = self.viewed("pairs", first, &pairs_of(pair));
        let mut reverse = vec![(0, 1); 5];
        reverse[axis] = (1, -1);
        let others = self.step("others", Kind::Slice(reverse), &[pairs], &pairs_of(pair));
        let mut along = [1; 5];
        along[axis] = 2;
        let signs = self.real_constant("signs", x, &along, &[-1.0, 1.0]);
        let value = add(mul(input(0), input(2)), mul(mul(input(1), input(3)), input(4)));
        let inputs = [pairs, others, angles[0], angles[1], signs];
        let mixed = self.step("turned", Kind::Map(value), &inputs, &pairs_of(pair));
        let mut all = self.viewed("all", mixed, &with(turned));
        if turned < d {
            let rest = part(self, turned, d - turned);
            all = self.step("all", Kind::Concat(3), &[all, rest], &sizes);
        }
        Ok(self.viewed("whole", all, &shape))
    }
}

/// Condition that `a` or `b` holds.
pub(super) fn either(a: Cond, b: Cond) -> Cond {
    let not = |cond: Cond| Cond::Not(Box::new(cond));
    not(not(a).and(not(b)))
}

/// Parts of an attention.
struct Attended {
    /// Queries, keys and values, `[batch, heads, steps, size]`.
    heads: [ValueId; 3],
    /// Keys and values of the past.
    past: [Option<ValueId>; 2],
    /// Number of past keys and values that are valid, if not all are.
    n_past: Option<i64>,
    mask: Option<ValueId>,
    /// Number of keys of each sequence that are not padding.
    valid: Option<ValueId>,
    /// Number for each head whose exponential the softmax adds to its sum.
    sink: Option<ValueId>,
    /// Whether the heads of the queries, and thus of the results, are separate.
    is_apart: bool,
}
