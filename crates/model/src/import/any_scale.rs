//! Resampling along a dimension whose sizes a run says: positions in the image, the pixels around them and
//! their weights are computed with the sizes of the run.

use tilewright_graph::DType;
use tilewright_graph::op::{Aspect, Coordinates, Resize, ResizeMode, ResizedAxis, Rounding};
use tilewright_ir::Expr;
use tilewright_ir::expr::UnaryOp;

use super::job::NodeImport;
use crate::net::{Kind, ValueId};
use crate::scalar::{add, choose_if, div, input, less, max, min, mul, number, of, sub};

/// Slots of the expression of a position: its own number, and the sizes of the image and of the result.
const AT: usize = 0;
const FROM: usize = 1;
const TO: usize = 2;

impl NodeImport<'_> {
    /// Pixels that contribute to each position along a dimension, and their weights in the given shape;
    /// `None` if they have no form for any size.
    pub(super) fn taps_of_run(
        &mut self,
        op: &Resize,
        axis: &ResizedAxis,
        (x, along): (ValueId, &[i64]),
    ) -> Option<(Vec<ValueId>, Vec<ValueId>)> {
        let has_form = !op.antialias && !op.excludes_outside && op.aspect == Aspect::Stretch;
        let position = has_form.then(|| position(op, axis, self.has_sizes(op)))??;
        let (taps, first): (i64, Expr) = match op.mode {
            ResizeMode::Nearest(rounding) => (1, rounded(rounding, position.clone())),
            ResizeMode::Linear => (2, of(UnaryOp::Floor, position.clone())),
            ResizeMode::Cubic(_) => (4, sub(of(UnaryOp::Floor, position.clone()), number(1.0))),
        };
        let n = axis.to as i64;
        let counted = self.counted(1, 0, n, 1);
        let at = self.double("at", counted, &[n]);
        let sizes = [("from", axis.from), ("to", axis.to)].map(|(what, size)| {
            let size = self.number_of_run(what, size as i64);
            self.double(what, size, &[])
        });
        let inputs = [at, sizes[0], sizes[1]];
        let map = |job: &mut Self, what: &str, value: Expr, inputs: &[ValueId]| {
            let to = job.value(what, DType::F64, &[n]);
            job.push(Kind::Map(value), inputs, to)
        };
        let position = map(self, "position", position, &inputs);
        let first = map(self, "first", first, &inputs);
        let (mut pixels, mut weights) = (Vec::new(), Vec::new());
        for tap in 0..taps {
            let place = add(input(0), number(tap as f64));
            let clamped = max(min(place.clone(), sub(input(1), number(1.0))), number(0.0));
            let pixel = map(self, "pixel", clamped, &[first, sizes[0]]);
            pixels.push(self.whole_map("pixels", input(0), &[pixel], &[n]));
            let Some(weight) = weight(op.mode, sub(place, input(1))) else { continue };
            let weight = map(self, "weight", weight, &[first, position]);
            let of_type = self.value("weights", self.net.value(x).dtype, &[n]);
            let weight = self.push(Kind::Map(input(0)), &[weight], of_type);
            weights.push(self.viewed("weights", weight, along));
        }
        Some((pixels, weights))
    }

    /// Whether a node says the size of its result, rather than a factor.
    pub(super) fn has_sizes(&self, op: &Resize) -> bool {
        op.factors_at == 2 && self.try_input(3).is_some_and(|id| self.net.value(id).n_elements() > 0)
    }
}

/// Position in the image of a pixel of the result, in slots [`AT`], [`FROM`] and [`TO`].
fn position(op: &Resize, axis: &ResizedAxis, has_sizes: bool) -> Option<Expr> {
    let (at, from, to) = (input(AT), input(FROM), input(TO));
    let factor = if has_sizes { div(to.clone(), from.clone()) } else { number(axis.factor) };
    let from_centre = |at: Expr| div(add(at, number(0.5)), factor.clone());
    let half = sub(from_centre(at.clone()), number(0.5));
    let unless_single = |position: Expr| choose_if(less(number(1.0), to.clone()), position, number(0.0));
    Some(match op.coordinates {
        Coordinates::HalfPixel => half,
        Coordinates::HalfPixelSymmetric => {
            let adjustment = div(to, mul(factor.clone(), from.clone()));
            add(mul(mul(from, number(0.5)), sub(number(1.0), adjustment)), half)
        }
        Coordinates::PytorchHalfPixel => unless_single(half),
        Coordinates::AlignCorners => {
            let last = sub(to.clone(), number(1.0));
            unless_single(div(mul(at, sub(from, number(1.0))), max(last, number(1.0))))
        }
        Coordinates::Asymmetric => div(at, factor),
        Coordinates::TfHalfPixelForNearest => from_centre(at),
        Coordinates::TfCropAndResize => return None,
    })
}

fn rounded(rounding: Rounding, x: Expr) -> Expr {
    match rounding {
        Rounding::HalfDown => of(UnaryOp::Ceil, sub(x, number(Rounding::HALF))),
        Rounding::HalfUp => of(UnaryOp::Floor, add(x, number(Rounding::HALF))),
        Rounding::Floor => of(UnaryOp::Floor, x),
        Rounding::Ceil => of(UnaryOp::Ceil, x),
    }
}

/// Weight of a pixel at a distance from the position; `None` if it is the only one.
fn weight(mode: ResizeMode, distance: Expr) -> Option<Expr> {
    let d = of(UnaryOp::Abs, distance);
    let polynomial = |[a, b, c, e]: [f64; 4]| {
        let inner = add(mul(number(a), d.clone()), number(b));
        let inner = add(mul(inner, d.clone()), number(c));
        add(mul(inner, d.clone()), number(e))
    };
    match mode {
        ResizeMode::Nearest(_) => None,
        ResizeMode::Linear => Some(max(sub(number(1.0), d), number(0.0))),
        ResizeMode::Cubic(a) => {
            let (near, far) =
                (polynomial([a + 2.0, -(a + 3.0), 0.0, 1.0]), polynomial([a, -5.0 * a, 8.0 * a, -4.0 * a]));
            let beyond = choose_if(less(d.clone(), number(2.0)), far, number(0.0));
            Some(choose_if(less(number(1.0), d.clone()), beyond, near))
        }
    }
}
