//! Import of three-dimensional convolutions, as two-dimensional ones, and of transposed ones as blocks.

use tilewright_graph::op::{ConvShape, Geometry};

use super::conv::window_of;
use super::job::{NodeImport, ints};
use crate::net::{Convolution, Kind, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{add, input};

impl NodeImport<'_> {
    /// Lowers a three-dimensional convolution: to one of columns if windows are one element wide and high,
    /// else to one of planes, each with the channels of all planes that its windows see.
    pub(super) fn convolution_of_volumes(&mut self, found: &ConvShape) -> Lowered {
        let (x, w, to) = (self.input(0)?, self.input(1)?, self.output()?);
        self.need_f32(x)?;
        self.need_f32(w)?;
        let geometry = &found.geometry;
        need(geometry.kernel.len() == 3, || NoCode::Form("windows over more than three dimensions"))?;
        let is_one = |d: usize| geometry.kernel[d] == 1 && geometry.out[d] == found.image[d];
        let is_pointwise = is_one(0) && is_one(1) && is_one(2);
        need(!is_pointwise, || NoCode::Form("windows of one element, which a product takes"))?;
        match is_one(1) && is_one(2) {
            true => self.convolution_of_columns(found, [x, w], to),
            false => self.convolution_of_planes(found, [x, w], to),
        }
    }

    /// Lowers a convolution along the first spatial dimension: rows and columns of a plane become columns.
    fn convolution_of_columns(&mut self, found: &ConvShape, [x, w]: [ValueId; 2], to: ValueId) -> Lowered {
        let one = |sizes: &[usize]| vec![sizes[0], 1];
        let joined = |sizes: &[usize]| vec![sizes[0], sizes[1] * sizes[2]];
        let of = &found.geometry;
        let geometry = Geometry {
            kernel: one(&of.kernel),
            strides: one(&of.strides),
            dilations: one(&of.dilations),
            begins: vec![of.begins[0], 0],
            ends: vec![of.ends[0], 0],
            out: joined(&of.out),
        };
        let plain = ConvShape { image: joined(&found.image), geometry, ..found.clone() };
        let window = window(&plain)?;
        let [n, c, m, groups] = [found.n, found.c, found.m, found.groups].map(|size| size as i64);
        let x = self.viewed("columns", x, &[&[n, c], &ints(&plain.image)[..]].concat());
        let from = self.net.shape(w).to_vec();
        let w = self.weights_as(w, &from, &[0, 1, 2, 3, 4], &[m, c / groups, of.kernel[0] as i64, 1]);
        let y = self.convolved_and_biased(window, [x, w], &[&[n, m], &ints(&plain.geometry.out)[..]].concat());
        self.push(Kind::View, &[y], to);
        Ok(())
    }

    /// Lowers to a convolution of planes, whose channels are those of all planes that its windows see, plane
    /// by plane within each group.
    fn convolution_of_planes(&mut self, found: &ConvShape, [mut x, w]: [ValueId; 2], to: ValueId) -> Lowered {
        let of = &found.geometry;
        let rest = |sizes: &[usize]| sizes[1..].to_vec();
        let geometry = Geometry {
            kernel: rest(&of.kernel),
            strides: rest(&of.strides),
            dilations: rest(&of.dilations),
            begins: of.begins[1..].to_vec(),
            ends: of.ends[1..].to_vec(),
            out: rest(&of.out),
        };
        let n_taps = of.kernel[0];
        let plain = ConvShape {
            n: found.n * of.out[0],
            c: found.c * n_taps,
            image: rest(&found.image),
            geometry,
            ..found.clone()
        };
        let window = window(&plain)?;
        let [n, c, m, groups] = [found.n, found.c, found.m, found.groups].map(|size| size as i64);
        let [taps, stride, dilation, planes] =
            [n_taps, of.strides[0], of.dilations[0], of.out[0]].map(|size| size as i64);
        let (image, out, kernel) = (ints(&plain.image), ints(&plain.geometry.out), ints(&plain.geometry.kernel));
        // No window extends further.
        let padded = [&[n, c, (planes - 1) * stride + (taps - 1) * dilation + 1], &image[..]].concat();
        if self.net.shape(x) != padded || of.begins[0] != 0 {
            x = self.step("padded", Kind::Pad(vec![0, 0, of.begins[0], 0, 0], 0.0), &[x], &padded);
        }
        let order = vec![0, 2, 1, 3, 4];
        let by_plane = [&[n, padded[2], c], &image[..]].concat();
        x = self.step("planes", Kind::Transpose(order.clone()), &[x], &by_plane);
        let mut seen = Vec::with_capacity(n_taps);
        for tap in 0..taps {
            let mut parts = vec![(0, 1); 5];
            parts[1] = (tap * dilation, stride);
            let part = self.step("tap", Kind::Slice(parts), &[x], &[&[n, planes, c], &image[..]].concat());
            seen.push(self.viewed("tap", part, &[&[n * planes, groups, c / groups], &image[..]].concat()));
        }
        let all = [&[n * planes, groups, taps * c / groups], &image[..]].concat();
        let all = if seen.len() == 1 { seen[0] } else { self.step("taps", Kind::Concat(2), &seen, &all) };
        x = self.viewed("seen", all, &[&[n * planes, taps * c], &image[..]].concat());
        let from = self.net.shape(w).to_vec();
        let w = self.weights_as(w, &from, &order, &[&[m, taps * c / groups], &kernel[..]].concat());
        let y = self.convolved_and_biased(window, [x, w], &[&[n * planes, m], &out[..]].concat());
        let y = self.viewed("by plane", y, &[&[n, planes, m], &out[..]].concat());
        self.push(Kind::Transpose(order), &[y], to);
        Ok(())
    }

    /// Lowers a transposed convolution whose windows do not overlap: each element becomes a block, by one
    /// product.
    pub(super) fn transposed_by_blocks(&mut self, found: &ConvShape) -> Lowered {
        let (x, w, to) = (self.input(0)?, self.input(1)?, self.output()?);
        self.need_f32(x)?;
        self.need_f32(w)?;
        let of = &found.geometry;
        let rank = of.kernel.len();
        let is_apart = (0..rank).all(|d| {
            let is_dense = of.kernel[d] == of.strides[d] && (of.dilations[d] == 1 || of.kernel[d] == 1);
            is_dense && of.begins[d] == 0 && found.image[d] == of.out[d] * of.strides[d]
        });
        need(is_apart, || NoCode::Form("windows that overlap, or leave elements between them"))?;
        let [n, c, m, groups] = [found.n, found.c, found.m, found.groups].map(|size| size as i64);
        let (kernel, places) = (ints(&of.kernel), ints(&of.out));
        let (taps, n_places) = (kernel.iter().product::<i64>(), places.iter().product::<i64>());
        let (of_group, results) = (c / groups, m / groups * taps);
        let w = self.weights_as(w, &[groups, of_group, results], &[0, 2, 1], &[1, groups, results, of_group]);
        let x = self.viewed("elements", x, &[n, groups, of_group, n_places]);
        let blocks = self.products(w, x)?;
        let apart = [&[n, m], &kernel[..], &places[..]].concat();
        let blocks = self.viewed("blocks", blocks, &apart);
        let order: Vec<usize> = [0, 1].into_iter().chain((0..rank).flat_map(|d| [2 + rank + d, 2 + d])).collect();
        let beside: Vec<i64> = order.iter().map(|&d| apart[d]).collect();
        let image = self.step("image", Kind::Transpose(order), &[blocks], &beside);
        let image = self.viewed("image", image, &[&[n, m], &ints(&found.image)[..]].concat());
        self.biased(image, 2, to)
    }

    /// Permutes the dimensions of weights of shape `from`, and reshapes them to `to`; constants stay
    /// constant.
    fn weights_as(&mut self, w: ValueId, from: &[i64], order: &[usize], to: &[i64]) -> ValueId {
        let turned: Vec<i64> = order.iter().map(|&d| from[d]).collect();
        if let Some(numbers) = self.net.numbers(w) {
            let stride = |d: usize| from[d + 1..].iter().product::<i64>() as usize;
            let source = |at: usize| {
                let (mut at, mut source) = (at, 0);
                for (&d, &size) in order.iter().zip(&turned).rev() {
                    source += at % size as usize * stride(d);
                    at /= size as usize;
                }
                source
            };
            let moved: Vec<f32> = (0..numbers.len()).map(|at| numbers[source(at)]).collect();
            return self.constant("weights", to, &moved);
        }
        let w = self.viewed("weights", w, from);
        let w = self.step("turned", Kind::Transpose(order.to_vec()), &[w], &turned);
        self.viewed("weights", w, to)
    }

    /// Adds a two-dimensional convolution, with the bias of the node.
    fn convolved_and_biased(&mut self, window: Convolution, factors: [ValueId; 2], out: &[i64]) -> ValueId {
        let y = self.step("conv", Kind::Conv(window), &factors, out);
        let Some(bias) = self.try_input(2) else { return y };
        let bias = self.viewed("bias", bias, &[out[1], 1, 1]);
        self.step("sum", Kind::Map(add(input(0), input(1))), &[y, bias], out)
    }
}

fn window(found: &ConvShape) -> Lowered<Convolution> {
    window_of(found, false).ok_or(NoCode::Form("windows that leave out parts of the image"))
}
