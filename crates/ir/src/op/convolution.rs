//! What the convolutions share.

use super::builder::Operands;
use super::{Layout, ProgramBuilder, StageSpec, Workload, WorkloadError};
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp};
use crate::index::Index;
use crate::program::{Part, Program, Role};

/// The names of the sizes along one spatial direction.
pub(super) struct Direction {
    input: &'static str,
    filter: &'static str,
    stride: &'static str,
    dilation: &'static str,
    before: &'static str,
    after: &'static str,
    out_pad: &'static str,
    /// What its elements are called.
    unit: &'static str,
}

/// Rows, then columns.
const DIRECTIONS: [Direction; 2] = [
    Direction {
        input: "h",
        filter: "r",
        stride: "stride_h",
        dilation: "dilation_h",
        before: "pad_top",
        after: "pad_bottom",
        out_pad: "out_pad_h",
        unit: "rows",
    },
    Direction {
        input: "w",
        filter: "s",
        stride: "stride_w",
        dilation: "dilation_w",
        before: "pad_left",
        after: "pad_right",
        out_pad: "out_pad_w",
        unit: "columns",
    },
];

/// One spatial axis: a filter moves over a padded input.
pub(super) struct Axis {
    /// Elements of the input.
    input: i64,
    /// Elements of the padded input.
    padded: i64,
    /// Where the input begins in the padded one; negative where it is cut off.
    before: i64,
    /// Elements of the padded input from one of the input to the next.
    spread: i64,
    /// Taps of the filter.
    pub filter: i64,
    /// Elements of the padded input from tap to tap.
    dilation: i64,
    /// Elements of the padded input from one output to the next.
    stride: i64,
    /// Elements of the output.
    pub output: i64,
}

impl Axis {
    fn reach(w: &Workload, d: &Direction) -> i64 {
        w.size(d.dilation) * (w.size(d.filter) - 1) + 1
    }

    /// Both axes of a convolution.
    pub(super) fn forward(w: &Workload) -> [Axis; 2] {
        DIRECTIONS.map(|d| {
            let (input, before, stride) = (w.size(d.input), w.size(d.before), w.size(d.stride));
            let padded = input + before + w.size(d.after);
            let output = (padded - Axis::reach(w, &d)) / stride + 1;
            let (filter, dilation) = (w.size(d.filter), w.size(d.dilation));
            Axis { input, padded, before, spread: 1, filter, dilation, stride, output }
        })
    }

    /// Both axes, where each output sees one element of the input, in order, as a single row: an image of the same
    /// elements that every schedule can cut without regard to where its rows end.
    pub(super) fn as_one_row(axes: [Axis; 2]) -> [Axis; 2] {
        let is_pointwise = |a: &Axis| a.filter == 1 && a.stride == 1 && a.output == a.input && !a.is_padded();
        if !axes.iter().all(is_pointwise) {
            return axes;
        }
        let row =
            |n: i64| Axis { input: n, padded: n, before: 0, spread: 1, filter: 1, dilation: 1, stride: 1, output: n };
        [row(1), row(axes[0].output * axes[1].output)]
    }

    /// Both axes of a transposed convolution, as a plain one over the input with zeros inserted.
    pub(super) fn transposed(w: &Workload) -> [Axis; 2] {
        DIRECTIONS.map(|d| {
            let (input, spread, reach) = (w.size(d.input), w.size(d.stride), Axis::reach(w, &d));
            let cut = w.size(d.before) + w.size(d.after);
            let output = (input - 1) * spread + reach + w.size(d.out_pad) - cut;
            let (filter, dilation) = (w.size(d.filter), w.size(d.dilation));
            let (padded, before) = (output + reach - 1, reach - 1 - w.size(d.before));
            Axis { input, padded, before, spread, filter, dilation, stride: 1, output }
        })
    }

    /// Whether the filter of a convolution fits.
    pub(super) fn check_forward(w: &Workload) -> Result<(), WorkloadError> {
        for d in &DIRECTIONS {
            let (reach, available) = (Axis::reach(w, d), w.size(d.input) + w.size(d.before) + w.size(d.after));
            if reach > available {
                return Err(WorkloadError::FilterTooLarge { reach, available, unit: d.unit });
            }
        }
        Ok(())
    }

    /// Whether a transposed convolution has an output.
    pub(super) fn check_transposed(w: &Workload) -> Result<(), WorkloadError> {
        for d in &DIRECTIONS {
            let (value, most) = (w.size(d.out_pad), w.size(d.stride).max(w.size(d.dilation)));
            if value >= most {
                return Err(WorkloadError::OutputPadding { key: d.out_pad, value, most });
            }
            let taken = w.size(d.before) + w.size(d.after);
            let available = (w.size(d.input) - 1) * w.size(d.stride) + Axis::reach(w, d) + value;
            if taken >= available {
                return Err(WorkloadError::NoOutput { taken, available, unit: d.unit });
            }
        }
        Ok(())
    }

    fn is_padded(&self) -> bool {
        self.padded != self.input
    }

    /// Which share of the products that are counted, each tap of each output, meet an element of the input.
    pub(super) fn share_inside_forward(w: &Workload) -> f64 {
        share_inside(Axis::forward(w), |a, moved| n_within(a.output, a.stride, moved, a.input), |a| a.output)
    }

    /// The same of a transposed one, where each tap of each element of the input counts, and meets an output
    /// or none.
    pub(super) fn share_inside_transposed(w: &Workload) -> f64 {
        share_inside(Axis::transposed(w), |a, moved| n_within(a.input, a.spread, -moved, a.output), |a| a.input)
    }

    /// The element of the input at a place of the padded one, and where there is one.
    fn unpad(&self, at: &Index) -> (Index, Cond) {
        unpad(at, self.before, self.spread, self.padded, self.input)
    }

    /// The place in the padded input that a tap meets for an output.
    fn meet(&self, output: &Index, tap: &Index) -> Index {
        output.scale(self.stride).add(&tap.scale(self.dilation))
    }
}

/// The element of an input at a place of the padded one, and where there is one: the first of `input` elements
/// lies at `before` of `padded` places, each next one `spread` further on.
pub(crate) fn unpad(at: &Index, before: i64, spread: i64, padded: i64, input: i64) -> (Index, Cond) {
    let moved = at.offset(-before);
    let element = moved.floor_div(spread);
    let (first, last) = (-before, padded - 1 - before);
    let mut inside = Cond::True;
    if first < 0 {
        inside = inside.and(Cond::Lt(Index::from(-1), element.clone()));
    }
    if last.div_euclid(spread) >= input {
        inside = inside.and(Cond::Lt(element.clone(), input.into()));
    }
    if spread > 1 {
        inside = inside.and(Cond::Eq(moved.modulo(spread), 0.into()));
    }
    (element, inside)
}

/// Of the pairs of a tap and one of `counted` places, the share that `met` counts, by where the tap lies seen
/// from the input's beginning.
fn share_inside(axes: [Axis; 2], met: fn(&Axis, i64) -> i64, counted: fn(&Axis) -> i64) -> f64 {
    let share = |axis: &Axis| {
        let inside: f64 = (0..axis.filter).map(|tap| met(axis, tap * axis.dilation - axis.before) as f64).sum();
        inside / (counted(axis) as f64 * axis.filter as f64)
    };
    axes.iter().map(share).product()
}

/// How many of the numbers below `n` the map `x · step + offset` leaves within `0..end`.
fn n_within(n: i64, step: i64, offset: i64, end: i64) -> i64 {
    let reached = |bound: i64| -(offset - bound).div_euclid(step);
    (reached(end).min(n) - reached(0).max(0)).max(0)
}

/// The channel of the input and the subscripts of the weights, for an output channel and the loops of the sum: an input
/// channel where that is a loop, then row and column of the filter.
type Tap<'a> = dyn Fn(&Index, &[Index]) -> (Index, Vec<Index>) + 'a;

/// A convolution, in terms of what the kinds differ in.
pub(super) struct Convolution<'a> {
    /// Channels of the input and of the output.
    pub channels: [i64; 2],
    /// Rows and columns.
    pub axes: [Axis; 2],
    /// Shape of the weights.
    pub weights: &'a [i64],
    /// Input channels that one output channel sums over, where that is a loop.
    pub summed_channels: Option<i64>,
    /// Whether there is a padded copy even without padding.
    pub always_padded: bool,
    /// What one product multiplies.
    pub tap: &'a Tap<'a>,
}

impl Convolution<'_> {
    /// Stages `pad` (where there is padding), `acc` and the output.
    pub(super) fn program(&self, w: &Workload) -> Program {
        let n = w.size("n");
        let ([rows, columns], [c, k]) = (&self.axes, self.channels);
        let blocked = w.layout() == Layout::Blocked;
        let mut p = ProgramBuilder::new(w);
        let shape = [n, k, rows.output, columns.output];
        let mut input = p.input("X", &[n, c, rows.input, columns.input]);
        let weights = p.input("W", self.weights);
        let mut operands = Operands::new(&mut p, w, k, &shape);
        if blocked {
            input = p.copy(Part::Prepare, input, "X.in", &["xn", "xc", "xh", "xw"], Role::Kept);
            let keep = |r| p.copy(Part::Prepare, r, "R.in", &["rn", "rk", "rp", "rq"], Role::Kept);
            operands.residual = operands.residual.map(keep);
        }
        if self.always_padded || self.axes.iter().any(Axis::is_padded) {
            let axes = [("pn", n), ("pc", c), ("ph", rows.padded), ("pw", columns.padded)];
            input = p.stage(StageSpec { name: "pad", axes: &axes, reduce: None, role: Role::Temporary }, |v| {
                let ((row, row_inside), (column, column_inside)) = (rows.unpad(&v[2]), columns.unpad(&v[3]));
                let element = Expr::Load(input, vec![v[0].clone(), v[1].clone(), row, column]);
                match row_inside.and(column_inside) {
                    Cond::True => element,
                    inside => Expr::Select(Box::new(inside), Box::new(element), Box::new(Expr::Const(0.0))),
                }
            });
        }
        let axes = [("n", n), ("k", k), ("p", rows.output), ("q", columns.output)];
        let sum: Vec<(&str, i64)> = self
            .summed_channels
            .map(|c| ("c", c))
            .into_iter()
            .chain([("r", rows.filter), ("s", columns.filter)])
            .collect();
        let reduce = Some((ReduceOp::Sum, &sum[..]));
        let acc = p.stage(StageSpec { name: "acc", axes: &axes, reduce, role: Role::Temporary }, |v| {
            let (at, sum) = v.split_at(4);
            let (channel, weight) = (self.tap)(&at[1], sum);
            let [r, s] = [&sum[sum.len() - 2], &sum[sum.len() - 1]];
            let element = vec![at[0].clone(), channel, rows.meet(&at[2], r), columns.meet(&at[3], s)];
            Expr::binary(BinaryOp::Mul, Expr::Load(input, element), Expr::Load(weights, weight))
        });
        let (name, role) = if blocked { ("Y.out", Role::Kept) } else { ("Y", Role::Output) };
        let axes = [("on", n), ("ok", k), ("op", rows.output), ("oq", columns.output)];
        let out = p.stage(StageSpec { name, axes: &axes, reduce: None, role }, |at| {
            operands.apply(w, Expr::Load(acc, at.to_vec()), at, 1)
        });
        if blocked {
            p.copy(Part::Finish, out, "Y", &["yn", "yk", "yp", "yq"], Role::Output);
        }
        p.finish()
    }
}
