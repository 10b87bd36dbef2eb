//! Import of operators that move elements: views, transposes, slices, concatenations and padding.

use tilewright_graph::DType;
use tilewright_graph::op::{
    CenterCropPad, Concat, DepthToSpace, Inputs, Pad, PadMode, ReverseSequence, Slice, SpaceToDepth, Split, Transpose,
    axis,
};
use tilewright_ir::Expr;
use tilewright_ir::expr::BinaryOp;

use super::job::NodeImport;
use crate::net::{Kind, Line, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{choose_if, input, less, number, sub, where_less};

impl NodeImport<'_> {
    /// Lowers to a view in the output's shape.
    pub(super) fn view(&mut self) -> Lowered {
        let (from, to) = (self.input(0)?, self.output()?);
        self.push(Kind::View, &[from], to);
        Ok(())
    }

    /// Lowers a padding with a constant, or with elements at positions that an affine map gives.
    pub(super) fn padded(&mut self, pad: &Pad) -> Lowered {
        let borders = pad.borders(Inputs(&self.facts()))?;
        let fill = match &pad.attributes {
            Some((_, fill)) => *fill,
            None => match self.try_input(2).map(|id| (id, self.net.literal(id))) {
                Some((_, Some(Expr::Const(fill)))) => fill,
                Some((id, _)) => return Err(self.unknown(id)),
                None => 0.0,
            },
        };
        let (from, to) = (self.input(0)?, self.output()?);
        match pad.mode {
            PadMode::Constant => self.moved(Kind::Pad(borders.iter().map(|b| b.0).collect(), fill), from, to),
            PadMode::Reflect => self.reflected(from, &borders, to),
            mode => {
                let from_shape = self.shape(0)?;
                let to_shape = self.net.shape(to).to_vec();
                let place = |d: usize, at: i64| {
                    let n = from_shape[d];
                    let at = at - borders[d].0;
                    match mode {
                        PadMode::Edge => at.clamp(0, n - 1),
                        _ => at.rem_euclid(n),
                    }
                };
                let line = |d: usize| match borders[d] {
                    (0, 0) => Some(Line::SAME),
                    _ => Line::through(&(0..to_shape[d]).map(|at| place(d, at)).collect::<Vec<_>>()),
                };
                let lines = (0..to_shape.len()).map(line).collect::<Option<Vec<_>>>();
                let lines = lines.ok_or(NoCode::Form("borders that are no line of elements"))?;
                self.moved(Kind::Pick(lines), from, to)
            }
        }
    }

    /// Pads a tensor by reflection.
    fn reflected(&mut self, mut from: ValueId, borders: &[(i64, i64)], to: ValueId) -> Lowered {
        self.need_f32(from)?;
        let mut shape = self.net.shape(from).to_vec();
        for (d, &(before, after)) in borders.iter().enumerate().filter(|(_, border)| **border != (0, 0)) {
            let n = shape[d];
            let is_once = (0..n).contains(&before) && (0..n).contains(&after);
            need(is_once, || NoCode::Form("borders that mirror more than the tensor"))?;
            let part = |job: &mut Self, first: i64, n: i64| {
                let mut parts = vec![(0, 1); shape.len()];
                parts[d] = (first, -1);
                let mut own = shape.clone();
                own[d] = n;
                (n > 0).then(|| job.step("border", Kind::Slice(parts), &[from], &own))
            };
            let ahead = part(self, before, before);
            let behind = part(self, n - 2, after);
            let all: Vec<ValueId> = [ahead, Some(from), behind].into_iter().flatten().collect();
            shape[d] = n + before + after;
            from = self.step("padded", Kind::Concat(d), &all, &shape);
        }
        self.push(Kind::View, &[from], to);
        Ok(())
    }

    /// Lowers to a reshape, a transpose, and a reshape to the output's shape.
    fn regrouped(&mut self, x: ValueId, split: &[i64], order: Vec<usize>, to: ValueId) -> Lowered {
        let turned: Vec<i64> = order.iter().map(|&d| split[d]).collect();
        let x = self.step("split", Kind::View, &[x], split);
        let x = self.step("turned", Kind::Transpose(order), &[x], &turned);
        self.push(Kind::View, &[x], to);
        Ok(())
    }

    /// Adds an operation that moves elements.
    pub(crate) fn moved(&mut self, kind: Kind, from: ValueId, to: ValueId) -> Lowered {
        self.need_code(from)?;
        self.push(kind, &[from], to);
        Ok(())
    }

    /// Lowers a reversal of the beginnings of sequences.
    pub(super) fn reversed(&mut self, op: &ReverseSequence) -> Lowered {
        let (x, lengths, to, shape) = (self.input(0)?, self.input(1)?, self.output()?, self.shape(0)?);
        let rank = shape.len();
        let (time, batch) = (axis(op.time_axis, rank)?, axis(op.batch_axis, rank)?);
        self.need_integers(lengths)?;
        self.need_code(x)?;
        let mut along = vec![1; rank];
        along[batch] = shape[batch];
        let lengths = self.viewed("lengths", lengths, &along);
        let steps = self.counted(rank, time, shape[time], 1);
        let turned = sub(Expr::binary(BinaryOp::Sub, input(0), input(1)), number(1.0));
        let place = where_less(input(1), input(0), turned, input(1));
        let places = self.whole_map("places", place, &[lengths, steps], &shape);
        self.push(Kind::Gather { axis: time, by_element: true }, &[x, places], to);
        Ok(())
    }

    /// Lowers a repetition of a tensor along its dimensions.
    pub(super) fn tiled(&mut self) -> Lowered {
        let (x, to, shape) = (self.input(0)?, self.output()?, self.shape(0)?);
        self.need_code(x)?;
        let out = self.net.shape(to).to_vec();
        let mut apart = Vec::new();
        let mut whole = Vec::new();
        for (&n, &m) in shape.iter().zip(&out) {
            apart.extend([1, n]);
            whole.extend([m / n, n]);
        }
        let apart = self.viewed("apart", x, &apart);
        let tiles = self.repeated("tiles", apart, &whole);
        self.push(Kind::View, &[tiles], to);
        Ok(())
    }

    /// Lowers a crop or padding around the centre.
    pub(crate) fn centred(&mut self, _: &CenterCropPad) -> Lowered {
        let (x, to, shape) = (self.input(0)?, self.output()?, self.shape(0)?);
        let out = self.net.shape(to).to_vec();
        let before = |(&n, &wanted): (&i64, &i64)| if n >= wanted { -((n - wanted) / 2) } else { (wanted - n) / 2 };
        self.moved(Kind::Pad(shape.iter().zip(&out).map(before).collect(), 0.0), x, to)
    }

    /// Lowers a padding of any mode, dimension by dimension, also with a number that is known only in a run.
    pub(super) fn bordered(&mut self, op: &Pad) -> Lowered {
        let (x, to, shape) = (self.input(0)?, self.output()?, self.shape(0)?);
        let borders = op.borders(Inputs(&self.facts()))?;
        self.need_code(x)?;
        let out = self.net.shape(to).to_vec();
        if op.mode == PadMode::Constant {
            let fill = self.input(2)?;
            let fill = self.viewed("fill", fill, &[]);
            let mut inputs =
                vec![self.step("padded", Kind::Pad(borders.iter().map(|b| b.0).collect(), 0.0), &[x], &out)];
            inputs.push(fill);
            let mut value = input(0);
            for (d, &(before, after)) in borders.iter().enumerate().filter(|(_, border)| **border != (0, 0)) {
                let mut along = vec![1; out.len() - d];
                along[0] = out[d];
                let is_in = |at: i64| i64::from(at >= before && at < out[d] - after);
                let is_in: Vec<i64> = (0..out[d]).map(is_in).collect();
                inputs.push(self.whole_constant("inside", DType::Bool, &along, &is_in));
                value = choose_if(less(number(0.0), input(inputs.len() - 1)), value, input(1));
            }
            self.push(Kind::Map(value), &inputs, to);
            return Ok(());
        }
        let mut x = x;
        let mut now = shape.clone();
        for (d, &(before, _)) in borders.iter().enumerate().filter(|(_, border)| **border != (0, 0)) {
            let n = shape[d];
            let source = |at: i64| match op.mode {
                PadMode::Edge => at.clamp(0, n - 1),
                PadMode::Reflect if n == 1 => 0,
                PadMode::Reflect => {
                    let at = at.rem_euclid(2 * (n - 1));
                    at.min(2 * (n - 1) - at)
                }
                _ => at.rem_euclid(n),
            };
            now[d] = out[d];
            let list: Vec<i64> = (0..out[d]).map(|at| source(at - before)).collect();
            let list = self.whole_constant("sources", DType::I64, &[out[d]], &list);
            x = self.step("bordered", Kind::Gather { axis: d, by_element: false }, &[x, list], &now);
        }
        self.push(Kind::View, &[x], to);
        Ok(())
    }

    /// Lowers a permutation of dimensions.
    pub(super) fn transposed(&mut self, op: &Transpose) -> Lowered {
        let order = op.order(self.shape(0)?.len())?;
        let (from, to) = (self.input(0)?, self.output()?);
        self.moved(turning(self.net.shape(from), &order), from, to)
    }

    /// Lowers a slice with starts and steps along dimensions.
    pub(super) fn sliced(&mut self, op: &Slice) -> Lowered {
        let parts = op.parts(Inputs(&self.facts()))?;
        let (from, to) = (self.input(0)?, self.output()?);
        self.moved(Kind::Slice(parts.iter().map(|part| (part.0 as i64, part.1)).collect()), from, to)
    }

    /// Lowers to one slice for each output.
    pub(super) fn split(&mut self, op: &Split) -> Lowered {
        let (from, rank) = (self.input(0)?, self.shape(0)?.len());
        let axis = axis(op.axis, rank)?;
        let mut start = 0;
        for (at, to) in self.outputs.clone().into_iter().enumerate() {
            let of_graph = self.node.outputs[at].ok_or(NoCode::Unread)?;
            let mut parts = vec![(0, 1); rank];
            parts[axis].0 = start;
            start += self.graph.ty(of_graph).shape[axis] as i64;
            if let Some(to) = to {
                self.moved(Kind::Slice(parts), from, to)?;
            }
        }
        Ok(())
    }

    /// Lowers a concatenation, without operands that have no elements.
    pub(super) fn concatenated(&mut self, op: &Concat) -> Lowered {
        let to = self.output()?;
        let axis = axis(op.axis, self.net.shape(to).len())?;
        let mut inputs = self.all_inputs()?;
        inputs.retain(|id| self.net.value(*id).n_elements() > 0);
        if let [only] = inputs[..] {
            self.push(Kind::View, &[only], to);
            return Ok(());
        }
        self.need_code(to)?;
        self.push(Kind::Concat(axis), &inputs, to);
        Ok(())
    }

    /// Lowers blocks of channels to blocks of pixels.
    pub(super) fn depth_to_space(&mut self, op: &DepthToSpace) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_code(x)?;
        let [n, c, h, w] = self.sizes_of(x)?;
        let b = op.block as i64;
        let (split, order) = match op.channels_first {
            true => ([n, c / (b * b), b, b, h, w], vec![0, 1, 4, 2, 5, 3]),
            false => ([n, b, b, c / (b * b), h, w], vec![0, 3, 4, 1, 5, 2]),
        };
        self.regrouped(x, &split, order, to)
    }

    /// Lowers blocks of pixels to blocks of channels.
    pub(super) fn space_to_depth(&mut self, op: &SpaceToDepth) -> Lowered {
        let (x, to) = (self.input(0)?, self.output()?);
        self.need_code(x)?;
        let [n, c, h, w] = self.sizes_of(x)?;
        let b = op.block as i64;
        let order = if op.channels_first { vec![0, 1, 3, 5, 2, 4] } else { vec![0, 3, 5, 1, 2, 4] };
        self.regrouped(x, &[n, c, h / b, b, w / b, b], order, to)
    }
}

/// Operation that permutes dimensions: a view if only dimensions of size 1 change their position.
pub(super) fn turning(shape: &[i64], order: &[usize]) -> Kind {
    let moved = order.iter().filter(|axis| shape[**axis] != 1);
    if moved.is_sorted() { Kind::View } else { Kind::Transpose(order.to_vec()) }
}
