//! Import of `Einsum`.

use tilewright_graph::DType;
use tilewright_graph::op::{Einsum, Inputs};
use tilewright_ir::expr::ReduceOp;

use super::job::NodeImport;
use super::reduce::MOST_COUNTED;
use crate::net::{Kind, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{input, mul};

/// Positions of entries in a list that contains all of them.
fn places_in(list: &[usize], entries: &[usize]) -> Vec<usize> {
    let place = |entry| list.iter().position(|own| own == entry).expect("the list has all entries");
    entries.iter().map(place).collect()
}

impl NodeImport<'_> {
    /// Lowers an `Einsum` of two tensors to matrix products.
    pub(super) fn einsum(&mut self, op: &Einsum) -> Lowered {
        let (a, b, to) = (self.input(0)?, self.input(1)?, self.output()?);
        self.need_f32(a)?;
        self.need_f32(b)?;
        need(self.try_input(2).is_none(), || NoCode::Form("more than two factors"))?;
        let indices = op.indices(Inputs(&self.facts()))?;
        let size = |at: &usize| indices.sizes[*at] as i64;
        let [of_a, of_b] = [&indices.inputs[0], &indices.inputs[1]];
        for (of, id) in [(of_a, a), (of_b, b)] {
            let is_once = of.iter().all(|at| of.iter().filter(|other| *other == at).count() == 1);
            let is_whole = of.iter().map(size).eq(self.net.shape(id).iter().copied());
            need(is_once && is_whole, || NoCode::Form("factors that broadcast, or a diagonal of one"))?;
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
        need(is_of_both, || NoCode::Form("sums along indices of one factor"))?;
        let count = |of: &[usize]| of.iter().map(size).product::<i64>();
        let leading: Vec<i64> = if batch.is_empty() { Vec::new() } else { vec![count(&batch)] };
        let matrices = |first: &[usize], second: &[usize]| [&leading[..], &[count(first), count(second)]].concat();
        let mut turned = |what: &str, id: ValueId, own: &[usize], parts: [&[usize]; 2]| {
            let order: Vec<usize> = [&batch, parts[0], parts[1]].concat();
            let places: Vec<usize> = places_in(own, &order);
            let shape: Vec<i64> = order.iter().map(size).collect();
            let moved = self.step(what, Kind::Transpose(places), &[id], &shape);
            self.step(what, Kind::View, &[moved], &matrices(parts[0], parts[1]))
        };
        let (a, b) = (turned("a", a, of_a, [&rows, &sums]), turned("b", b, of_b, [&sums, &columns]));
        let kind = Kind::Product { turned: false, heads: None };
        let product = self.step("product", kind, &[a, b], &matrices(&rows, &columns));
        let order: Vec<usize> = [batch, rows, columns].concat();
        let apart = self.step("apart", Kind::View, &[product], &order.iter().map(size).collect::<Vec<_>>());
        let places = places_in(&order, &out);
        self.push(Kind::Transpose(places), &[apart], to);
        Ok(())
    }

    /// Lowers any `Einsum` to one sum over all its summed indices.
    pub(super) fn sums_by_indices(&mut self, op: &Einsum) -> Lowered {
        let to = self.output()?;
        let indices = op.indices(Inputs(&self.facts()))?;
        let sizes: Vec<i64> = indices.sizes.iter().map(|&n| n as i64).collect();
        let mut factors = Vec::new();
        for (at, own) in indices.inputs.iter().enumerate() {
            let x = self.input(at)?;
            self.need_code(x)?;
            let shape = self.net.shape(x).to_vec();
            // Each index once, in order; a repeated index selects a diagonal.
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
                let order: Vec<usize> = places_in(own, &once);
                self.step("turned", Kind::Transpose(order), &[x], &extents)
            } else {
                let n: i64 = extents.iter().product();
                let too_large =
                    || NoCode::Size { what: "elements of a factor with a diagonal", size: n, most: MOST_COUNTED };
                need(n < MOST_COUNTED, too_large)?;
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
        let value = (0..factors.len()).map(input).reduce(mul).ok_or(NoCode::Missing(0))?;
        let terms = self.step("terms", Kind::Map(value), &factors, &sizes);
        let mut kept = sizes.clone();
        kept[indices.n_out..].fill(1);
        let summed: Vec<usize> = (indices.n_out..sizes.len()).collect();
        let sums = match summed.is_empty() {
            true => terms,
            false => self.step("sums", Kind::Reduce(ReduceOp::Sum, summed), &[terms], &kept),
        };
        self.push(Kind::View, &[sums], to);
        Ok(())
    }
}
