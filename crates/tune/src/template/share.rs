//! Division of work among threads: by results, by the reduction, or not at all.
//!
//! Threads take tiles of a result if there are enough of them. For a small result with a long reduction, each
//! takes a part of the reduction instead; the partial sums are added up in their order once all are done, so
//! that results depend on the schedule alone. The smallest problems are done before another thread has
//! started, so one thread does everything. There is a parameter only if several of these may be the best.

use super::step::{layout, reorder, rfactor, split};
use super::{TemplateSetting, ceil_div, constraint_over, none_of};
use tilewright_ir::Step;
use tilewright_ir::schedule::LINE_BYTES;
use tilewright_ir::schedule::LayoutAxis::{Inner, Outer, Whole};
use tilewright_search::{Config, Constraint, Parameter, Space, Value};

/// Name of the parameter.
const NAME: &str = "share";

/// Number of multiply-adds below which one thread takes less time than starting others and waiting for them.
const FEWEST_TO_SHARE: i64 = 1 << 19;
/// Minimum number of multiply-adds of each thread's part for which adding up parts is worthwhile.
const FEWEST_TO_SUM_APART: i64 = 1 << 16;
/// Maximum number of results of which each thread may have a copy.
const MOST_RESULTS_EACH: i64 = 1 << 15;
/// Number of elements of a sum per thread and per row or column of its result from which on every thread
/// reads too much if rows or columns are shared.
const LONG_SUM: i64 = 8;
/// Number of results for each thread from which on no sum needs to be shared.
const RESULTS_PER_THREAD: i64 = 4;
/// Number of results from which on all threads take part in adding up partial sums.
pub const MANY_RESULTS: i64 = 1 << 13;

/// Granularity of a thread's part of a sum: whole vectors of any machine and whole steps of any unrolling.
const SUM_STEP: i64 = 64;

/// Cycles for starting other threads, and for waiting for them.
const START_CYCLES: f64 = 2000.0;

/// Buffer of the partial sums, and prefix of the names of their loops.
pub const PARTS: &str = "S";
/// Loop over the partial sums, in the stage that adds them up.
pub const PART: &str = "part";
/// Loop over the partial sums, in the stage that computes them.
pub const EACH_PART: &str = "S.part";
/// Remainder of the reduction loop, within a part.
pub const IN_PART: &str = "in_part";

/// Dimension of the work that is shared among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedWork {
    /// Tiles of the result.
    Result,
    /// Parts of the reduction.
    Sum,
    /// Nothing: one thread does everything.
    Nothing,
}

impl SharedWork {
    /// All variants, each with its value of the parameter.
    const ALL: [(SharedWork, &'static str); 3] =
        [(SharedWork::Result, "result"), (SharedWork::Sum, "sum"), (SharedWork::Nothing, "nothing")];

    /// Sharing that a configuration selects.
    pub fn of(s: &TemplateSetting, space: &Space, config: &Config) -> SharedWork {
        if s.n_threads == 1 {
            return SharedWork::Nothing;
        }
        match space.has(NAME) {
            true => SharedWork::named(&space.value(config, NAME)),
            false => SharedWork::Result,
        }
    }

    fn named(value: &Value) -> SharedWork {
        SharedWork::ALL.iter().find(|(_, name)| *name == value.text()).expect("every value is listed").0
    }

    fn name(self) -> &'static str {
        SharedWork::ALL.iter().find(|(share, _)| *share == self).expect("every value is listed").1
    }

    /// Restricts a constraint to configurations with this sharing.
    pub fn only(self, constraint: Constraint) -> Constraint {
        constraint.only_where(NAME, self.name())
    }

    /// Restricts a constraint to configurations with another sharing.
    pub fn except(self, constraint: Constraint) -> Constraint {
        constraint.except_where(NAME, self.name())
    }

    /// Constraint that fixes a parameter, which only this sharing uses, at its first value elsewhere.
    pub fn owns(self, parameters: &[Parameter], name: &str, first: &str) -> Constraint {
        let text = format!("{name} == '{first}'");
        self.except(constraint_over(&format!("{name}_of_{}", self.name()), &[name], &text, parameters))
    }

    /// Constraint that excludes a value of a parameter with this sharing.
    pub fn excludes(self, parameters: &[Parameter], name: &str, value: &str) -> Constraint {
        let text = none_of(parameters, name, &[value]);
        self.only(constraint_over(&format!("{name}_without_{}", self.name()), &[name], &text, parameters))
    }
}

/// Sizes of a problem that matter for sharing work among threads.
#[derive(Clone, Copy, Debug)]
pub struct ShareableWork {
    /// Number of products or images, each with operands of its own.
    pub results: i64,
    /// Rows of each result.
    pub rows: i64,
    /// Columns of the result.
    pub columns: i64,
    /// Extent of the reduction.
    pub sum: i64,
    /// Whether reductions must not be shared: for dynamic rows, of which these are the maximum, or for gated
    /// results.
    pub has_whole_sums: bool,
}

impl ShareableWork {
    /// Number of results.
    pub fn elements(&self) -> i64 {
        self.results.saturating_mul(self.rows).saturating_mul(self.columns)
    }

    /// Whether sharing the reduction among threads may be faster.
    pub fn has_long_sum(&self, s: &TemplateSetting) -> bool {
        let n_threads = s.n_threads as i64;
        s.n_threads > 1
            && !self.has_whole_sums
            && self.results < RESULTS_PER_THREAD * n_threads
            && self.elements() <= MOST_RESULTS_EACH
            && self.elements().saturating_mul(self.sum) >= FEWEST_TO_SUM_APART
            && self.sum >= LONG_SUM * n_threads * self.rows.max(self.columns)
    }

    /// Whether there is a choice of sharing.
    pub fn is_choice(&self, s: &TemplateSetting) -> bool {
        let is_small = self.elements().saturating_mul(self.sum) < FEWEST_TO_SHARE;
        s.n_threads > 1 && is_small || self.has_long_sum(s)
    }

    /// Parameter of the sharing; `None` if there is no choice.
    ///
    /// `can_share_sum` tells whether the algorithm can share a long reduction.
    pub fn parameter(&self, s: &TemplateSetting, can_share_sum: bool) -> Option<Parameter> {
        let is_there = |share: &SharedWork| *share != SharedWork::Sum || can_share_sum && self.has_long_sum(s);
        let values: Vec<&str> =
            SharedWork::ALL.iter().filter(|(share, _)| is_there(share)).map(|(_, name)| *name).collect();
        self.is_choice(s).then(|| Parameter::categorical(NAME, &values).optional())
    }

    /// Parameter of an algorithm that can share long reductions, with the same values at every size; if there
    /// is no choice, threads share the result.
    pub fn parameter_at_any_size(&self, s: &TemplateSetting) -> Option<Parameter> {
        let held = || Parameter::categorical(NAME, &[SharedWork::Result.name()]).optional();
        (s.n_threads > 1).then(|| self.parameter(s, true).unwrap_or_else(held))
    }

    /// Restricts a constraint to configurations in which threads share the result.
    pub fn of_result(&self, s: &TemplateSetting, constraint: Constraint) -> Constraint {
        if self.is_choice(s) { SharedWork::Result.only(constraint) } else { constraint }
    }

    /// Cycles of the busiest thread, given the total `cycles`.
    ///
    /// `n_iterations` is the extent of the shared loop, `n_tiles` the number of tiles whose reduction is
    /// shared.
    pub fn of_busiest_thread(
        &self,
        s: &TemplateSetting,
        share: SharedWork,
        cycles: f64,
        n_iterations: i64,
        n_tiles: i64,
    ) -> f64 {
        let n_threads = s.n_threads as i64;
        let (part, n_begins) = match share {
            SharedWork::Nothing => (1.0, 0),
            SharedWork::Sum => (1.0 / n_threads as f64, n_tiles),
            SharedWork::Result => (ceil_div(n_iterations, n_threads) as f64 / n_iterations as f64, 1),
        };
        cycles * part + overhead(s, share, n_begins, self.elements())
    }
}

/// Extent of a part of a reduction, with at most one part per thread.
pub fn part_of(s: &TemplateSetting, sum: i64, step: i64) -> i64 {
    ceil_div(ceil_div(sum, s.n_threads as i64), step) * step
}

/// Extent of a part of a product's reduction, at least [`SUM_STEP`].
pub fn part_of_product(s: &TemplateSetting, sum: i64) -> i64 {
    let least = part_of(s, sum, SUM_STEP);
    let last = |part: i64| sum - (ceil_div(sum, part) - 1) * part;
    (least..sum).step_by(SUM_STEP as usize).find(|&part| last(part) >= SUM_STEP).unwrap_or(sum)
}

/// Makes a stage sum parts of a loop, `part` iterations each. `result` are the loops over its result,
/// outermost first, and `rest` those of the sum that stay as they are.
///
/// The partial results are [`PARTS`]. Their loops are [`EACH_PART`], outermost, then those named after the
/// stage's.
pub fn in_parts(stage: &str, result: &[&str], sum: &str, rest: &[&str], part: i64) -> Vec<Step> {
    vec![
        split(sum, part, PART, IN_PART),
        reorder(&[&[PART], result, &[IN_PART], rest].concat()),
        rfactor(stage, PART, PARTS),
    ]
}

/// Pads the partial sums so that each part has cache lines of its own. `order` is the dimensions of the
/// partial sums in memory order; the one at `padded` has `extent` elements, each of `inside` elements of the
/// dimensions further inside.
pub fn on_own_lines(s: &TemplateSetting, order: &[usize], padded: usize, extent: i64, inside: i64) -> Step {
    let per_line = LINE_BYTES / s.workload.dtype.bytes() as i64;
    let fills = (1..=per_line).find(|n| n * inside % per_line == 0).expect("a line's worth of them does");
    let padded_extent = ceil_div(extent, fills) * fills;
    let axes = order.iter().enumerate().flat_map(|(at, &axis)| match at == padded {
        // One tile that fills the padded extent.
        true => vec![Outer(axis, padded_extent), Inner(axis, padded_extent)],
        false => vec![Whole(axis)],
    });
    layout(PARTS, &axes.collect::<Vec<_>>())
}

/// Overhead of the sharing in cycles: `n_begins` parallel regions, and adding up the partial sums of
/// `results` results.
pub fn overhead(s: &TemplateSetting, share: SharedWork, n_begins: i64, results: i64) -> f64 {
    let lanes = s.target.lanes(s.workload.dtype) as f64;
    match share {
        SharedWork::Nothing => 0.0,
        SharedWork::Result => START_CYCLES * n_begins as f64,
        // Most parts come from other cores' caches.
        SharedWork::Sum => START_CYCLES * n_begins as f64 + (results * s.n_threads as i64) as f64 * 8.0 / lanes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright_ir::Target;
    use tilewright_ir::op::Workload;

    fn setting(n_threads: usize) -> TemplateSetting {
        let workload = Workload::parse("matmul:m=128,n=384,k=1536").unwrap();
        TemplateSetting { workload, target: Target::named("x86-64-v4").unwrap(), n_threads }
    }

    #[test]
    fn the_busiest_thread_has_what_is_left_of_uneven_iterations() {
        let work = ShareableWork { results: 1, rows: 128, columns: 384, sum: 1536, has_whole_sums: false };
        let check = |n_threads: usize, share: SharedWork, n_iterations: i64, expected: f64| {
            let cycles = work.of_busiest_thread(&setting(n_threads), share, 12e6, n_iterations, 1);
            assert!((cycles - expected).abs() < 1.0, "{n_threads} threads, {n_iterations} iterations: {cycles}");
        };
        assert!(!work.is_choice(&setting(2)), "it is too large to be left to one thread");
        check(1, SharedWork::Nothing, 3, 12e6);
        check(2, SharedWork::Result, 2, 6e6 + START_CYCLES);
        check(2, SharedWork::Result, 3, 8e6 + START_CYCLES);
        check(2, SharedWork::Result, 9, 12e6 * 5.0 / 9.0 + START_CYCLES);
        check(4, SharedWork::Result, 6, 4e6 + START_CYCLES);
    }
}
