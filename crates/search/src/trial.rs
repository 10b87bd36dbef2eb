//! Trials: configurations with the outcome of compiling and measuring them. A failure is data, with its
//! class.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::other_costs::OtherCosts;
use crate::space::Config;

/// Error class of a failed trial. Together with success, [`Outcome::Measured`], these are the nine classes of
/// the NoSE paper.
///
/// # Source
/// NoSE, table I. The names are stable: records and scripts rely on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorClass {
    /// Template or schedule step that refused the configuration.
    InstantiationError,
    /// Failed code generation on the host.
    CompileErrorHost,
    /// Failed compilation or loading on the device.
    CompileErrorDevice,
    /// Crash of the kernel, or error reported by the device.
    RuntimeError,
    /// Output that differs from the reference by more than the tolerance.
    WrongAnswer,
    /// Timeout of the build.
    BuildTimeout,
    /// Timeout of the runs.
    RunTimeout,
    /// Any other failure.
    Unknown,
}

impl ErrorClass {
    /// Every class, in order of declaration.
    pub const ALL: [ErrorClass; 8] = [
        ErrorClass::InstantiationError,
        ErrorClass::CompileErrorHost,
        ErrorClass::CompileErrorDevice,
        ErrorClass::RuntimeError,
        ErrorClass::WrongAnswer,
        ErrorClass::BuildTimeout,
        ErrorClass::RunTimeout,
        ErrorClass::Unknown,
    ];

    /// Stable name in snake case, as in records.
    pub fn name(self) -> &'static str {
        match self {
            ErrorClass::InstantiationError => "instantiation_error",
            ErrorClass::CompileErrorHost => "compile_error_host",
            ErrorClass::CompileErrorDevice => "compile_error_device",
            ErrorClass::RuntimeError => "runtime_error",
            ErrorClass::WrongAnswer => "wrong_answer",
            ErrorClass::BuildTimeout => "build_timeout",
            ErrorClass::RunTimeout => "run_timeout",
            ErrorClass::Unknown => "unknown",
        }
    }

    /// Returns the class with this name.
    pub fn from_name(name: &str) -> Option<ErrorClass> {
        ErrorClass::ALL.into_iter().find(|class| class.name() == name)
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.pad(self.name())
    }
}

/// Resource limit that caused a failure: under a higher one the configuration may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Timeout of the build, in seconds.
    BuildS(f64),
    /// Timeout of the runs, in seconds.
    RunS(f64),
    /// Memory limit of the worker, in bytes above its baseline.
    MemoryBytes(u64),
}

/// Resource limits under which candidates are built and run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Timeout of a build, in seconds.
    pub build_s: f64,
    /// Timeout of all runs of a candidate in total, in seconds.
    pub run_s: f64,
    /// Memory limit of a worker, in bytes above its baseline.
    pub memory_bytes: u64,
}

impl Limit {
    /// Name and value of the limit, as a table stores them.
    pub fn parts(self) -> (&'static str, f64) {
        match self {
            Limit::BuildS(seconds) => ("build_s", seconds),
            Limit::RunS(seconds) => ("run_s", seconds),
            Limit::MemoryBytes(bytes) => ("memory_bytes", bytes as f64),
        }
    }

    /// Limit of a stored name and value; `None` if this version does not know it.
    pub fn from_parts(name: &str, number: f64) -> Option<Limit> {
        let known = [Limit::BuildS(number), Limit::RunS(number), Limit::MemoryBytes(number as u64)];
        known.into_iter().find(|limit| limit.parts().0 == name)
    }

    /// Whether a candidate that failed because of this limit is worth another try under `limits`.
    pub fn is_below(self, limits: &Limits) -> bool {
        match self {
            Limit::BuildS(seconds) => seconds < limits.build_s,
            Limit::RunS(seconds) => seconds < limits.run_s,
            Limit::MemoryBytes(bytes) => bytes < limits.memory_bytes,
        }
    }
}

/// Statistics of a kernel's run time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Median over the samples, in nanoseconds per run; positive and finite.
    pub median_ns: f64,
    /// Fastest sample, in nanoseconds per run.
    pub min_ns: f64,
    /// Relative spread: interquartile range over median; 0 for a single sample.
    pub spread: f64,
    /// Number of samples, each of which may average several runs of a short kernel.
    pub n_samples: u32,
    /// Whether sampling ended early because the kernel was much slower than the best (pruned); the median is
    /// then rough.
    pub stopped_early: bool,
    /// Costs by the second and further objectives, of a command with several metrics.
    pub others: OtherCosts,
}

impl Timing {
    /// Least cost, which stands for a metric that is 0 and minimised.
    pub const LEAST_COST: f64 = 1e-150;
    /// Greatest cost, which stands for a metric that is 0 and maximised.
    pub const GREATEST_COST: f64 = 1e150;
    /// Cost of a maximised metric of 1; of greater values it is less.
    const UNIT: f64 = 1e9;

    /// Cost of a metric, which searches minimise: the value, or in proportion to its reciprocal where it is
    /// maximised. A cost is above 0 and finite, so that 0 is kept as the limit. `None` for a value below 0,
    /// which has no ratio to others, or that is not finite.
    pub fn cost_of(value: f64, maximize: bool) -> Option<f64> {
        (value >= 0.0 && value.is_finite()).then(|| match maximize {
            true => (Timing::UNIT / value.abs()).min(Timing::GREATEST_COST),
            false => value.max(Timing::LEAST_COST),
        })
    }

    /// Metric of which this is the cost.
    pub fn value_of(cost: f64, maximize: bool) -> f64 {
        match maximize {
            true if cost >= Timing::GREATEST_COST => 0.0,
            false if cost <= Timing::LEAST_COST => 0.0,
            true => Timing::UNIT / cost,
            false => cost,
        }
    }

    /// Statistics of samples in nanoseconds per run, with quartiles by [`quantile`].
    ///
    /// # Panics
    /// If there are no samples.
    pub fn of_samples(samples_ns: &[f64], stopped_early: bool) -> Timing {
        let mut sorted = samples_ns.to_vec();
        sorted.sort_by(f64::total_cmp);
        let median_ns = quantile(&sorted, 0.5);
        Timing {
            median_ns,
            min_ns: sorted[0],
            spread: ((quantile(&sorted, 0.75) - quantile(&sorted, 0.25)) / median_ns).min(f64::MAX),
            n_samples: sorted.len() as u32,
            stopped_early,
            others: OtherCosts::default(),
        }
    }
}

/// Whether a winner and a runner-up that is slower by the fraction `margin` are indistinguishable, given the
/// relative spread of their rounds.
pub fn is_tie(margin: f64, spread: f64) -> bool {
    margin <= spread
}

/// Quantile `q`, from 0 to 1, of sorted values, interpolated linearly.
///
/// # Panics
/// If there are no values.
pub fn quantile(sorted: &[f64], q: f64) -> f64 {
    let position = q * (sorted.len() - 1) as f64;
    let below = sorted[position.floor() as usize];
    below + (sorted[position.ceil() as usize] - below) * position.fract()
}

/// Outcome of a trial.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Success: the candidate compiled, ran, was verified and timed.
    Measured(Timing),
    /// Failure.
    Failed {
        /// Class of the failure.
        class: ErrorClass,
        /// Description of the failure, in one line or more.
        message: String,
    },
}

impl Outcome {
    /// Name of success, in place of an error class.
    pub const NO_ERROR: &str = "no_error";

    /// Timing of a success; `None` for a failure.
    pub fn timing(&self) -> Option<&Timing> {
        match self {
            Outcome::Measured(timing) => Some(timing),
            Outcome::Failed { .. } => None,
        }
    }

    /// Error class of a failure; `None` for a success.
    pub fn class(&self) -> Option<ErrorClass> {
        match self {
            Outcome::Measured(_) => None,
            Outcome::Failed { class, .. } => Some(*class),
        }
    }

    /// Name of the outcome in records and results: `no_error`, or the class of its error.
    pub fn name_of(class: Option<ErrorClass>) -> &'static str {
        class.map_or(Outcome::NO_ERROR, ErrorClass::name)
    }

    /// Median in nanoseconds per run, infinite for a failure; for searches, never stored.
    pub fn cost(&self) -> f64 {
        self.timing().map_or(f64::INFINITY, |timing| timing.median_ns)
    }

    /// Throughput in runs per nanosecond, 0 for a failure; for searches, never stored.
    pub fn fitness(&self) -> f64 {
        // The reciprocal of a tiny time, which only an imported record can have, overflows.
        self.timing().map_or(0.0, |timing| timing.median_ns.recip().min(f64::MAX))
    }
}

/// Configuration with its outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    /// The configuration.
    pub config: Config,
    /// Outcome.
    pub outcome: Outcome,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_costs_and_back() {
        for (value, maximize) in [(0.0, false), (0.0, true), (2.5, false), (4.0, true), (1e200, true), (1e-300, false)]
        {
            let cost = Timing::cost_of(value, maximize).unwrap();
            assert!(cost > 0.0 && cost.is_finite(), "{value}: {cost}");
            // What is next to 0 is 0.
            let expected = if value == 1e-300 { 0.0 } else { value };
            assert_eq!(Timing::value_of(cost, maximize), expected);
        }
        for maximize in [false, true] {
            assert_eq!(Timing::cost_of(-0.0, maximize), Timing::cost_of(0.0, maximize));
            assert_eq!([-1.0, f64::NAN, f64::INFINITY].map(|value| Timing::cost_of(value, maximize)), [None; 3]);
        }
        assert!(Timing::cost_of(3.0, true) < Timing::cost_of(2.0, true));
    }

    #[test]
    fn class_names_are_stable_and_parse_back() {
        let names = ErrorClass::ALL.map(ErrorClass::name);
        assert_eq!(
            names.join(" "),
            "instantiation_error compile_error_host compile_error_device runtime_error wrong_answer build_timeout \
             run_timeout unknown"
        );
        assert_eq!(names.map(ErrorClass::from_name), ErrorClass::ALL.map(Some));
    }

    #[test]
    fn fitness_is_a_number() {
        let timing = |median_ns| Outcome::Measured(Timing::of_samples(&[median_ns], false));
        assert_eq!(timing(4.0).fitness(), 0.25);
        assert!(timing(5e-324).fitness().is_finite());
    }

    #[test]
    fn limits_are_kept_by_name_and_compared_with_their_own_kind() {
        let limits = Limits { build_s: 10.0, run_s: 2.0, memory_bytes: 1000 };
        for (limit, is_below) in [
            (Limit::BuildS(9.0), true),
            (Limit::BuildS(10.0), false),
            (Limit::RunS(1.5), true),
            (Limit::RunS(9.0), false),
            (Limit::MemoryBytes(999), true),
            (Limit::MemoryBytes(1000), false),
        ] {
            let (name, number) = limit.parts();
            assert_eq!((Limit::from_parts(name, number), limit.is_below(&limits)), (Some(limit), is_below));
        }
        assert_eq!(Limit::from_parts("patience", 1.0), None);
    }

    #[test]
    fn samples_are_summed_up_by_their_quartiles() {
        let timing = Timing::of_samples(&[40.0, 10.0, 20.0, 30.0, 50.0], false);
        assert_eq!((timing.median_ns, timing.min_ns, timing.n_samples), (30.0, 10.0, 5));
        assert!((timing.spread - 20.0 / 30.0).abs() < 1e-12);
        assert_eq!(Timing::of_samples(&[7.0], true).spread, 0.0);
    }
}
