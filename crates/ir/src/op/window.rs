//! Untransformed programs of convolutions.

use super::builder::ElementOps;
use super::contraction::run_to;
use super::{Epilogue, Layout, Operand, SizeRange, StageSpec, Window, WindowAxis, Workload, WorkloadError};
use crate::dtype::DType;
use crate::expr::{BinaryOp, Cond, Expr, ReduceOp};
use crate::index::Index;
use crate::program::{Part, Program, Role};
use crate::schedule::LayoutAxis;
use crate::schedule::layout::lay_out;
use std::slice::from_ref;

/// Names of the sizes along one spatial direction.
struct DirectionSizes {
    input: &'static str,
    filter: &'static str,
    stride: &'static str,
    dilation: &'static str,
    before: &'static str,
    after: &'static str,
    out_pad: &'static str,
    /// Name of the elements, for messages.
    unit: &'static str,
}

/// Directions: rows, then columns.
const DIRECTIONS: [DirectionSizes; 2] = [
    DirectionSizes {
        input: "h",
        filter: "r",
        stride: "stride_h",
        dilation: "dilation_h",
        before: "pad_top",
        after: "pad_bottom",
        out_pad: "out_pad_h",
        unit: "rows",
    },
    DirectionSizes {
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

/// Corresponding size of the other direction: of columns for one of rows, and vice versa.
pub(super) fn turned(name: &str) -> Option<&'static str> {
    let names = |d: &DirectionSizes| [d.input, d.filter, d.stride, d.dilation, d.before, d.after, d.out_pad];
    let [rows, columns] = DIRECTIONS.each_ref().map(names);
    let other = |of: [&str; 7], to: [&'static str; 7]| of.iter().position(|n| *n == name).map(|at| to[at]);
    other(rows, columns).or_else(|| other(columns, rows))
}

impl WindowAxis {
    /// Axis without its output extent.
    fn sized(w: &Workload, d: &DirectionSizes) -> WindowAxis {
        let [input, filter, stride, dilation, before, after] =
            [d.input, d.filter, d.stride, d.dilation, d.before, d.after].map(|name| w.size(name));
        WindowAxis { input, filter, stride, dilation, before, after, output: 0 }
    }

    /// Both axes of a convolution.
    pub(super) fn forward(w: &Workload) -> [WindowAxis; 2] {
        DIRECTIONS.map(|d| {
            let axis = WindowAxis::sized(w, &d);
            let output = (axis.input + axis.before + axis.after - axis.reach()) / axis.stride + 1;
            WindowAxis { output, ..axis }
        })
    }

    /// Both axes of a transposed convolution.
    pub(super) fn transposed(w: &Workload) -> [WindowAxis; 2] {
        DIRECTIONS.map(|d| {
            let axis = WindowAxis::sized(w, &d);
            let after = axis.after - w.size(d.out_pad);
            let output = (axis.input - 1) * axis.stride + axis.reach() - axis.before - after;
            WindowAxis { after, output, ..axis }
        })
    }

    /// Checks that the filter of a convolution fits the padded input.
    pub(super) fn check_forward(w: &Workload) -> Result<(), WorkloadError> {
        for d in &DIRECTIONS {
            let axis = WindowAxis::sized(w, d);
            let (reach, available) = (axis.reach(), axis.input + axis.before + axis.after);
            if reach > available {
                return Err(WorkloadError::FilterTooLarge { reach, available, unit: d.unit });
            }
        }
        Ok(())
    }

    /// Checks that a transposed convolution has an output.
    pub(super) fn check_transposed(w: &Workload) -> Result<(), WorkloadError> {
        for d in &DIRECTIONS {
            let axis = WindowAxis::sized(w, d);
            let (value, most) = (w.size(d.out_pad), axis.stride.max(axis.dilation));
            if value >= most {
                return Err(WorkloadError::OutputPadding { key: d.out_pad, value, most });
            }
            let taken = axis.before + axis.after;
            let available = (axis.input - 1) * axis.stride + axis.reach() + value;
            if taken >= available {
                return Err(WorkloadError::NoOutput { taken, available, unit: d.unit });
            }
        }
        Ok(())
    }
}

/// Axis as the program computes it: a filter slides over a padded input, with zeros inserted for a transposed
/// convolution.
struct PaddedAxis {
    /// Number of elements of the input.
    input: i64,
    /// Number of elements of the padded input.
    padded: i64,
    /// Offset of the input in the padded input, in elements; negative if the input is cropped.
    before: i64,
    /// Distance in the padded input between adjacent elements of the input.
    spread: i64,
    /// Number of taps of the filter.
    filter: i64,
    /// Distance in the padded input between adjacent taps.
    dilation: i64,
    /// Distance in the padded input between adjacent outputs.
    stride: i64,
    /// Number of elements of the output.
    output: i64,
}

impl PaddedAxis {
    fn of(axis: &WindowAxis, transposed: bool) -> PaddedAxis {
        let &WindowAxis { input, filter, stride, dilation, before, after, output } = axis;
        if !transposed {
            let padded = input + before + after;
            return PaddedAxis { input, padded, before, spread: 1, filter, dilation, stride, output };
        }
        let last = axis.reach() - 1;
        let (padded, before) = (output + last, last - before);
        PaddedAxis { input, padded, before, spread: stride, filter, dilation, stride: 1, output }
    }

    /// Returns the element of the input at a position of the padded input, and the condition that it exists.
    ///
    /// The input ends at `end`, which may be less than its allocated extent for open (dynamic) rows.
    fn unpad(&self, at: &Index, end: &Index) -> (Index, Cond) {
        let is_behind = (self.padded - 1 - self.before).div_euclid(self.spread) >= self.input;
        unpad(at, self.before, self.spread, is_behind.then_some(end))
    }

    /// Position in the padded input that a tap reads for an output.
    fn meet(&self, output: &Index, tap: &Index) -> Index {
        output.scale(self.stride).add(&tap.scale(self.dilation))
    }

    /// Share of the pairs of a tap and a counted position that multiply an existing input element into an
    /// existing output element. Counted positions are elements of the input if `transposed`, else of the
    /// output.
    fn share_inside(&self, transposed: bool) -> f64 {
        let met = |tap: i64| {
            let moved = tap * self.dilation - self.before;
            match transposed {
                true => n_within(self.input, self.spread, -moved, self.output),
                false => n_within(self.output, self.stride, moved, self.input),
            }
        };
        let counted = if transposed { self.input } else { self.output };
        (0..self.filter).map(|tap| met(tap) as f64).sum::<f64>() / (counted as f64 * self.filter as f64)
    }
}

/// Returns the element of an input at a position of the padded input, and the condition that it exists: the
/// first element is at `before`, the others follow at distance `spread`, and there are `end` of them, `None`
/// if positions never exceed the last.
pub(crate) fn unpad(at: &Index, before: i64, spread: i64, end: Option<&Index>) -> (Index, Cond) {
    let moved = at.offset(-before);
    let element = moved.floor_div(spread);
    let mut inside = Cond::True;
    if before > 0 {
        inside = inside.and(Cond::Lt(Index::from(-1), element.clone()));
    }
    if let Some(end) = end {
        inside = inside.and(Cond::Lt(element.clone(), end.clone()));
    }
    if spread > 1 {
        inside = inside.and(Cond::Eq(moved.modulo(spread), 0.into()));
    }
    (element, inside)
}

/// Number of integers below `n` that `x · step + offset` maps into `0..end`.
fn n_within(n: i64, step: i64, offset: i64, end: i64) -> i64 {
    let reached = |bound: i64| -(offset - bound).div_euclid(step);
    (reached(end).min(n) - reached(0).max(0)).max(0)
}

impl Window {
    /// Whether a workload's number of rows is open (dynamic).
    pub(super) fn has_open_rows(w: &Workload) -> bool {
        w.open_sizes().any(|(name, _)| name == Window::OPEN)
    }

    /// Whether the number of rows of the result is affine in that of the input: the convolution is
    /// transposed, or its stride divides the step of the range.
    pub(super) fn may_open(&self, range: SizeRange) -> bool {
        let [rows, _] = self.axes;
        self.transposed || range.step % rows.stride == 0
    }

    /// Share of the counted products that read an element of the input.
    pub(super) fn share_inside(&self) -> f64 {
        self.axes.iter().map(|axis| PaddedAxis::of(axis, self.transposed).share_inside(self.transposed)).product()
    }

    /// Channel of the input and subscripts of the weights, for an output channel and the reduction loops: an
    /// input channel, if there is a loop over it, then row and column of the filter.
    fn tap(&self, k: &Index, sum: &[Index]) -> (Index, Vec<Index>) {
        if self.depthwise {
            return (k.floor_div(self.k / self.c), [from_ref(k), sum].concat());
        }
        if self.transposed {
            let flipped = |axis: usize| Index::from(self.axes[axis].filter - 1).sub(&sum[1 + axis]);
            return (sum[0].clone(), vec![sum[0].clone(), k.clone(), flipped(0), flipped(1)]);
        }
        let of_group = match self.groups {
            1 => 0.into(),
            groups => k.floor_div(self.k / groups).scale(self.c / groups),
        };
        (of_group.add(&sum[0]), [from_ref(k), sum].concat())
    }

    /// Builds the stages `pad` (if there is padding or a prologue), `acc` and the output.
    pub(super) fn program(&self, w: &Workload) -> Program {
        let &Window { n, c, k, .. } = self;
        let [rows, columns] = self.program_axes().map(|axis| PaddedAxis::of(&axis, self.transposed));
        let mut p = w.builder();
        let open = self.open_rows.then(|| p.open_size(Window::OPEN, w.range(Window::OPEN)));
        let end_of_rows = open.clone().unwrap_or_else(|| rows.input.into());
        let blocked = w.layout() == Layout::Blocked;
        let shape = [n, k, rows.output, columns.output];
        let [of_input, of_weights] = w.factors();
        p.set_dtype(of_input);
        let mut input = p.input(Window::INPUT, &[n, c, rows.input, columns.input]);
        p.set_dtype(of_weights);
        let weights = p.input(Window::WEIGHTS, &self.weights());
        p.set_dtype(of_input);
        let zero = self.zero_point.then(|| p.input(Window::ZERO, &[1]));
        let ahead = ElementOps::of_prologue(&mut p, w, c);
        let mut operands = ElementOps::new(&mut p, w, k, &shape);
        p.set_dtype(of_input);
        if blocked {
            input = p.copy(Part::Prepare, input, Window::KEPT_INPUT, &["xn", "xc", "xh", "xw"], Role::Kept);
            operands.keep(&mut p);
        }
        if self.has_pad(w) {
            if w.takes_bf16() {
                p.set_dtype(DType::Bf16);
            }
            let axes = [("pn", n), ("pc", c), ("ph", rows.padded), ("pw", columns.padded)];
            let spec = StageSpec { name: Window::PAD, axes: &axes, reduce: None, role: Role::Temporary };
            input = p.stage(spec, |v| {
                let ((row, row_inside), (column, column_inside)) =
                    (rows.unpad(&v[2], &end_of_rows), columns.unpad(&v[3], &columns.input.into()));
                let element = Expr::Load(input, vec![v[0].clone(), v[1].clone(), row, column]);
                let element = ahead.apply(element, v, 1);
                let outside = zero.map_or(Expr::Const(0.0), |zero| Expr::Load(zero, vec![0.into()]));
                match row_inside.and(column_inside) {
                    Cond::True => element,
                    inside => Expr::Select(Box::new(inside), Box::new(element), Box::new(outside)),
                }
            });
        }
        let axes = [("n", n), ("k", k), ("p", rows.output), ("q", columns.output)];
        let channels = self.summed_channels().map(|c| ("c", c));
        let sum: Vec<(&str, i64)> = channels.into_iter().chain([("r", rows.filter), ("s", columns.filter)]).collect();
        let reduce = Some((ReduceOp::Sum, &sum[..]));
        p.set_dtype(w.dtype.arithmetic());
        let acc = p.stage(StageSpec { name: Window::ACC, axes: &axes, reduce, role: Role::Temporary }, |v| {
            let (at, sum) = v.split_at(4);
            let (channel, weight) = self.tap(&at[1], sum);
            let [r, s] = [&sum[sum.len() - 2], &sum[sum.len() - 1]];
            let element = vec![at[0].clone(), channel, rows.meet(&at[2], r), columns.meet(&at[3], s)];
            let element = Expr::Load(input, element);
            let element = if self.has_pad(w) { element } else { w.factor(element) };
            Expr::binary(BinaryOp::Mul, element, w.factor(Expr::Load(weights, weight)))
        });
        p.set_dtype(w.result_dtype());
        let (name, role) = if blocked { (Window::KEPT_OUTPUT, Role::Kept) } else { (Window::OUTPUT, Role::Output) };
        let axes = [("on", n), ("ok", k), ("op", rows.output), ("oq", columns.output)];
        let out = p.stage(StageSpec { name, axes: &axes, reduce: None, role }, |at| {
            let mut sum = at.to_vec();
            if self.interleaved {
                let group = at[1].modulo(self.groups).scale(k / self.groups);
                sum[1] = group.add(&at[1].floor_div(self.groups));
            }
            operands.apply(Expr::Load(acc, sum), at, 1)
        });
        if blocked {
            p.copy(Part::Finish, out, Window::OUTPUT, &["yn", "yk", "yp", "yq"], Role::Output);
        }
        let mut program = p.finish();
        if let Some(size) = open {
            self.open_rows_of(&mut program, &size);
        }
        Window::lay_out_channels(&mut program, w);
        program
    }

    /// Lays out images in the channel blocks that the workload specifies.
    fn lay_out_channels(program: &mut Program, w: &Workload) {
        let [of_input, of_output] = w.layout().channels();
        let operands = Epilogue::operands(w.epilogue()).into_iter().filter(|(.., kind)| *kind == Operand::Element);
        let outputs = operands.map(|(_, name, _)| name).chain([Window::OUTPUT.to_owned()]);
        for (name, block) in [(Window::INPUT.to_owned(), of_input)].into_iter().chain(outputs.map(|y| (y, of_output))) {
            if block > 1 {
                let id = program.find_buffer(&name).expect("it is an argument");
                lay_out(program, id, &Window::channels_last(block));
            }
        }
    }

    /// Limits loops over rows to the number of each run.
    fn open_rows_of(&self, program: &mut Program, size: &Index) {
        let [axis, _] = self.axes;
        let [padded, output] = if self.transposed {
            let output = size.scale(axis.stride).offset(axis.output - axis.input * axis.stride);
            [output.offset(axis.reach() - 1), output]
        } else {
            let padded = size.offset(axis.before + axis.after);
            let output = padded.offset(-axis.reach()).floor_div(axis.stride).offset(1);
            [padded, output]
        };
        for (names, extent) in [(&["ph"][..], padded), (&["p", "op"], output)] {
            let loops: Vec<_> = names.iter().filter_map(|name| program.find_loop(name)).collect();
            run_to(&mut program.body, &loops, &extent);
        }
    }

    /// Layout NCHWc: blocks of `channels` adjacent channels innermost.
    pub fn channels_last(channels: i64) -> [LayoutAxis; 5] {
        use LayoutAxis::{Inner, Outer, Whole};
        [Whole(0), Outer(1, channels), Whole(2), Whole(3), Inner(1, channels)]
    }
}
