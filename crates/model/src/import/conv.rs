//! Import of convolutions: those of images directly, others as products with patches (im2col).

use tilewright_graph::DType;
use tilewright_graph::op::{Conv, ConvInteger, ConvShape, ConvTranspose};

use super::job::{NodeImport, ints};
use crate::net::{Convolution, Kind, ValueId};
use crate::no_code::{Lowered, NoCode, Otherwise, need};
use crate::scalar::{add, input};

/// Maximum number of elements of a window that are gathered into one tensor.
const MOST_TAPS: i64 = 512;

impl NodeImport<'_> {
    /// Lowers a convolution over one or two dimensions, followed by its bias.
    pub(crate) fn convolution(&mut self, found: &ConvShape, transposed: bool) -> Lowered {
        let (mut x, mut w, to) = (self.input(0)?, self.input(1)?, self.output()?);
        self.need_f32(x)?;
        self.need_f32(w)?;
        let rank = found.geometry.kernel.len();
        let window = window_of(found, transposed);
        let other = NoCode::Form("windows over more than two dimensions, or that leave out parts of the image");
        let kind = Kind::Conv(window.ok_or(other)?);
        let out = self.net.shape(to).to_vec();
        let mut shape = out.clone();
        if rank == 1 {
            let with_rows = |shape: &[i64]| [&shape[..2], &[1], &shape[2..]].concat();
            let (image, weights) = (with_rows(&self.shape(0)?), with_rows(&self.shape(1)?));
            x = self.step("image", Kind::View, &[x], &image);
            w = match self.net.numbers(w) {
                Some(numbers) => self.net.add_constant(&format!("{}.w", self.node.place.node), &weights, &numbers),
                None => self.step("weights", Kind::View, &[w], &weights),
            };
            shape = with_rows(&out);
        }
        let bias = self.try_input(2);
        let mut last = if bias.is_none() && rank == 2 { to } else { self.value("conv", DType::F32, &shape) };
        self.push(kind, &[x, w], last);
        if let Some(bias) = bias {
            let channels = [self.net.value(bias).n_elements(), 1, 1];
            let bias = match self.net.numbers(bias) {
                Some(numbers) => self.net.add_constant(&format!("{}.b", self.node.place.node), &channels, &numbers),
                None => self.step("bias", Kind::View, &[bias], &channels),
            };
            let sum = if rank == 2 { to } else { self.value("sum", DType::F32, &shape) };
            last = self.push(Kind::Map(add(input(0), input(1))), &[last, bias], sum);
        }
        if rank == 1 {
            self.push(Kind::View, &[last], to);
        }
        Ok(())
    }

    /// Lowers a convolution over any number of dimensions to products with the patches that windows see.
    pub(super) fn convolved(&mut self, found: &ConvShape, x: ValueId, w: ValueId) -> Lowered<ValueId> {
        let geometry = &found.geometry;
        let whole = |list: &[usize]| list.iter().map(|&n| n as i64).collect::<Vec<_>>();
        let (kernel, out, image) = (whole(&geometry.kernel), whole(&geometry.out), whole(&found.image));
        let (strides, dilations) = (whole(&geometry.strides), whole(&geometry.dilations));
        let [n, c, m, groups] = [found.n, found.c, found.m, found.groups].map(|size| size as i64);
        let (n_taps, places): (i64, i64) = (kernel.iter().product(), out.iter().product());
        let too_large = || NoCode::Size { what: "elements of a window", size: n_taps, most: MOST_TAPS };
        need(n_taps <= MOST_TAPS, too_large)?;
        let rank = image.len();
        // No window extends further.
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
        Ok(self.viewed("convolved", products, &[&[n, m], &out[..]].concat()))
    }

    /// Lowers a convolution that the one- and two-dimensional forms do not cover.
    fn convolution_by_products(&mut self, found: &ConvShape) -> Lowered {
        let (x, w, to) = (self.input(0)?, self.input(1)?, self.output()?);
        self.need_real(x)?;
        self.need_real(w)?;
        let product = self.convolved(found, x, w)?;
        self.biased(product, 2, to)
    }

    /// Adds the bias of each channel, if any.
    pub(super) fn biased(&mut self, x: ValueId, at: usize, to: ValueId) -> Lowered {
        let Some(bias) = self.try_input(at) else {
            self.push(Kind::View, &[x], to);
            return Ok(());
        };
        let rank = self.net.shape(to).len();
        let n = self.net.value(bias).n_elements();
        let bias = self.viewed("bias", bias, &[&[n], &vec![1; rank - 2][..]].concat());
        self.push(Kind::Map(add(input(0), input(1))), &[x, bias], to);
        Ok(())
    }

    /// Lowers a transposed convolution to a convolution of the image with zeros between its elements, by
    /// flipped weights.
    fn transposed_convolution(&mut self, found: &ConvShape) -> Lowered {
        let (x, w, to) = (self.input(0)?, self.input(1)?, self.output()?);
        self.need_real(x)?;
        self.need_real(w)?;
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
        // The weights have the output channels of each group first, then its input channels, and are flipped
        // along all other dimensions.
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
                // Windows of a transposed convolution slide over its output.
                out: found.image.clone(),
                ..geometry.clone()
            },
            ..found.clone()
        };
        let product = self.convolved(&plain, spread, w)?;
        self.biased(product, 2, to)
    }

    /// Lowers a convolution of 8-bit integers with zero points, in integer arithmetic.
    fn whole_convolution(&mut self, found: &ConvShape) -> Lowered {
        let (x, w, to) = (self.input(0)?, self.input(1)?, self.output()?);
        let behind = self.shape(1)?.len() - 1;
        let (x, w) = (self.less_zero(x, self.try_input(2), 0)?, self.less_zero(w, self.try_input(3), behind)?);
        let product = self.convolved(found, x, w)?;
        self.push(Kind::View, &[product], to);
        Ok(())
    }

    /// Lowers a convolution.
    pub(super) fn conv(&mut self, op: &Conv) -> Lowered {
        let found = op.shape(self.graph_shape(0)?, self.graph_shape(1)?)?;
        self.convolution(&found, false)
            .otherwise(|| self.convolution_of_volumes(&found))
            .otherwise(|| self.convolution_by_products(&found))
    }

    /// Lowers a transposed convolution.
    pub(super) fn conv_transpose(&mut self, op: &ConvTranspose) -> Lowered {
        let found = op.shape(self.graph_shape(0)?, self.graph_shape(1)?)?;
        if found.groups == 1 && self.convolution(&found, true).is_ok() {
            return Ok(());
        }
        self.transposed_by_blocks(&found).otherwise(|| self.transposed_convolution(&found))
    }

    /// Lowers a convolution of bytes to sums in 32 bits.
    pub(super) fn conv_integer(&mut self, op: &ConvInteger) -> Lowered {
        let found = op.0.shape(self.graph_shape(0)?, self.graph_shape(1)?)?;
        if self.integer_convolution(&op.0).is_some() {
            return Ok(());
        }
        self.whole_convolution(&found)
    }
}

/// Returns the geometry of a convolution over one or two dimensions; `None` if parts of the image are
/// cropped.
pub(crate) fn window_of(found: &ConvShape, transposed: bool) -> Option<Convolution> {
    let geometry = &found.geometry;
    let rank = geometry.kernel.len();
    if rank > 2 || geometry.begins.iter().chain(&geometry.ends).any(|&n| n < 0) {
        return None;
    }
    let mut after = geometry.ends.clone();
    if transposed {
        // Output padding reduces the padding after the output.
        let behind = |d: usize| {
            let reach = (geometry.out[d] as i64 - 1) * geometry.strides[d] as i64
                + (geometry.kernel[d] as i64 - 1) * geometry.dilations[d] as i64
                + 1;
            reach - geometry.begins[d] - found.image[d] as i64
        };
        after = (0..rank).map(behind).collect();
    }
    // Negative padding, where the output exceeds all windows, is not supported here.
    if after.iter().any(|&n| n < 0) {
        return None;
    }
    // One dimension becomes two: rows of one element.
    let two = |list: &[i64], rest: i64| if list.len() == 2 { [list[0], list[1]] } else { [rest, list[0]] };
    Some(Convolution {
        interleaved: false,
        groups: found.groups as i64,
        strides: two(&ints(&geometry.strides), 1),
        dilations: two(&ints(&geometry.dilations), 1),
        before: two(&geometry.begins, 0),
        after: two(&after, 0),
        transposed,
    })
}
