//! Measurement interface between searches and the devices or tables that measure candidates.

use std::collections::VecDeque;
use std::ops::{AddAssign, Range};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::space::{Config, Space};
use crate::trial::{ErrorClass, Limit, Outcome, is_tie, quantile};

/// Boxed error from outside this crate.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Seconds spent on a trial, by activity.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Seconds {
    /// Building: instantiating and compiling. Candidates compile in parallel, so sums may exceed the wall
    /// clock.
    pub build: f64,
    /// Timed runs.
    pub run: f64,
    /// Verification: a run, and the comparison with the reference.
    pub verify: f64,
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Seconds) {
        self.build += other.build;
        self.run += other.run;
        self.verify += other.verify;
    }
}

/// Configuration to measure, with its description.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Point of the space.
    pub config: Config,
    /// Schedule as text, one step per line; empty if configurations are not programs, as in a replay.
    pub steps: Arc<str>,
    /// Timeout of its runs, regardless of other candidates. By default (`None`) a run that is much slower
    /// than the best is pruned.
    pub patience: Option<Duration>,
}

/// Description of configurations as text, such as a program's schedule or a command line.
pub trait Describe {
    /// Describes a configuration; an empty text is no description.
    fn describe(&self, config: &Config) -> String;
}

impl<F: Fn(&Config) -> String> Describe for F {
    fn describe(&self, config: &Config) -> String {
        self(config)
    }
}

/// Subject of a tuning run: a space, with an optional description of its configurations.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The space.
    pub space: &'a Space,
    describe: Option<&'a dyn Describe>,
}

impl<'a> Subject<'a> {
    /// Candidate of a configuration.
    pub fn candidate(&self, config: Config) -> Candidate {
        let steps = self.describe.map_or_else(|| Arc::from(""), |by| by.describe(&config).into());
        Candidate { config, steps, patience: None }
    }

    /// Subject whose configurations have descriptions, which are recorded with them.
    pub fn described(space: &'a Space, describe: &'a dyn Describe) -> Subject<'a> {
        Subject { space, describe: Some(describe) }
    }
}

impl<'a> From<&'a Space> for Subject<'a> {
    /// Makes a subject whose configurations have no descriptions.
    fn from(space: &'a Space) -> Subject<'a> {
        Subject { space, describe: None }
    }
}

/// Conditions of a measurement: the device and its state, as far as known.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Conditions {
    /// Name of the device in a fleet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Frequency of its cores in megahertz.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frequency_mhz: Option<f64>,
    /// Temperature in degrees Celsius.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
}

/// Result of measuring a candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Outcome.
    pub outcome: Outcome,
    /// Seconds spent on it, by activity.
    pub seconds: Seconds,
    /// Limit that caused the failure, if any; under a higher one the candidate may succeed.
    pub limit: Option<Limit>,
    /// Device and its state.
    pub conditions: Conditions,
}

impl Measured {
    /// Result with an outcome alone; everything else is unknown.
    pub fn of(outcome: Outcome) -> Measured {
        Measured { outcome, seconds: Seconds::default(), limit: None, conditions: Conditions::default() }
    }

    /// Failure that took no time.
    pub fn failed(class: ErrorClass, message: String) -> Measured {
        Measured::of(Outcome::Failed { class, message })
    }
}

/// Answer of [`Measure::next`].
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// Result of the candidate with this number.
    Done(u64, Measured),
    /// No result within the time given.
    Pending,
    /// Nothing is left to measure.
    Idle,
}

/// Properties of a measuring side that searches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MeasuringTraits {
    /// Whether candidates should be submitted ahead of earlier results, because they are built meanwhile.
    pub works_ahead: bool,
}

/// Time limits of a race, the repeated measurement of the best candidates against each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RaceLimits {
    /// Time for all rounds; a race usually stays within it.
    pub rounds: Duration,
    /// Time for the race as a whole: a round that would not end within it is not started.
    pub total: Duration,
    /// Expected run time of the fastest candidate in nanoseconds, as far as known.
    pub best_ns: f64,
}

impl RaceLimits {
    /// Duration of a candidate's share of a round. For a long kernel, another round later is more informative
    /// than a second sample now.
    pub const ROUND: Duration = Duration::from_millis(15);
    /// Rounds before the first half of the candidates is eliminated; the next stage has twice as many
    /// (successive halving).
    pub const LEAST_ROUNDS: u64 = 3;
    /// Maximum number of eliminations, the last one included.
    pub const STAGES: u32 = 3;
    /// Usual ratio of a race's duration, with builds and verification, to that of its rounds.
    pub const GOAL: u32 = 3;
    /// Minimum number of rounds of the two leading candidates for a clear winner, and for a tie.
    const ROUNDS_UNTIL_PLAIN: usize = 4;
    const ROUNDS_UNTIL_TIE: usize = 8;
    /// Minimum relative lead of a clear winner, above the variation that memory placement causes between
    /// processes, and its minimum ratio to the spread of the rounds.
    const PLAIN_LEAD: f64 = 0.03;
    const PLAIN_SPREADS: f64 = 2.0;

    /// Number of rounds of one candidate that fit within `time`.
    pub fn affordable(&self, time: Duration) -> u64 {
        let round_ns = self.best_ns.max(RaceLimits::ROUND.as_nanos() as f64);
        (time.as_nanos() as f64 / round_ns) as u64
    }

    /// Whether further rounds would change nothing, given the round times of the leader and the runner-up in
    /// nanoseconds: one is clearly faster, or both are indistinguishable.
    pub fn is_settled(leading_ns: &[f64], next_ns: &[f64]) -> bool {
        let n_rounds = leading_ns.len().min(next_ns.len());
        if n_rounds < RaceLimits::ROUNDS_UNTIL_PLAIN {
            return false;
        }
        let of = |rounds_ns: &[f64]| {
            let mut sorted = rounds_ns.to_vec();
            sorted.sort_by(f64::total_cmp);
            let [low, middle, high] = [0.25, 0.5, 0.75].map(|part| quantile(&sorted, part));
            (low, (high - low) / middle)
        };
        let ((leading_ns, leading_spread), (next_ns, next_spread)) = (of(leading_ns), of(next_ns));
        let (lead, spread) = (next_ns / leading_ns - 1.0, leading_spread.max(next_spread));
        let is_plain = lead > RaceLimits::PLAIN_LEAD.max(RaceLimits::PLAIN_SPREADS * spread);
        is_plain || n_rounds >= RaceLimits::ROUNDS_UNTIL_TIE && is_tie(lead, spread)
    }
}

/// Rank of a candidate after a race.
#[derive(Debug, Clone, PartialEq)]
pub struct Standing {
    /// Index of the candidate in the list that the race was given.
    pub at: usize,
    /// Outcome over all its rounds, or its failure.
    pub outcome: Outcome,
    /// First quartile of its rounds in nanoseconds per run, by which it is ranked; infinite for a failure.
    pub quartile_ns: f64,
    /// Relative error of its result, ‖out − reference‖ / ‖reference‖, if known.
    pub relative_error: Option<f64>,
}

/// Measuring side of a tuning run: a device, or the replay of a recorded space.
///
/// The loop polls a measuring side, which never calls back, so a proxy for a remote device only forwards
/// calls.
pub trait Measure: Send {
    /// Submits candidates, to be measured in order after earlier ones; returns their numbers.
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64>;

    /// Waits up to `at_most` for the next result of any submitted candidate; each candidate has one result.
    /// `leading_ns` is the median of the best candidate so far, against which much slower ones may be pruned.
    ///
    /// # Errors
    /// If measuring as a whole is impossible, such as a worker that cannot be started. A candidate that
    /// fails is an [`Outcome`].
    fn next(&mut self, leading_ns: Option<f64>, at_most: Duration) -> Result<Next, BoxError>;

    /// Stops starting candidates; those not started yet get no result.
    fn wind_down(&mut self);

    /// Notifies the measuring side that the results of all candidates below this number are recorded.
    fn recorded(&mut self, _before: u64) {}

    /// Cancels all candidates from this number on, running ones included.
    ///
    /// # Errors
    /// As [`Measure::next`].
    fn cancel(&mut self, from: u64) -> Result<(), BoxError>;

    /// Races candidates against each other: measures them in interleaved rounds and eliminates the slower
    /// ones. Returns the remaining candidates, fastest first, then those that failed last; candidates that
    /// were eliminated or had no round are left out. `left` receives the number of candidates in the race
    /// whenever it changes, and `stop` ends the race early.
    ///
    /// # Errors
    /// As [`Measure::next`]; the default implementation always fails.
    fn race(
        &mut self,
        candidates: &[Candidate],
        limits: RaceLimits,
        stop: Option<&AtomicBool>,
        left: &mut dyn FnMut(usize),
    ) -> Result<Vec<Standing>, BoxError> {
        let _ = (candidates, limits, stop, left);
        Err("nothing is raced here".into())
    }

    /// Properties of the measuring side.
    fn machine(&self) -> MeasuringTraits;
}

/// Queue of numbered candidates, for measuring sides that process them one at a time.
#[derive(Debug, Clone, Default)]
pub struct Queue {
    waiting: VecDeque<(u64, Candidate)>,
    n_submitted: u64,
}

impl Queue {
    /// Appends candidates, as [`Measure::submit`].
    pub fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        let first = self.n_submitted;
        self.n_submitted += candidates.len() as u64;
        self.waiting.extend((first..).zip(candidates.iter().cloned()));
        first..self.n_submitted
    }

    /// Takes the candidate that has waited longest.
    pub fn pop(&mut self) -> Option<(u64, Candidate)> {
        self.waiting.pop_front()
    }

    /// Removes candidates from this number on, as [`Measure::cancel`]; all of them with 0, as
    /// [`Measure::wind_down`].
    pub fn cancel(&mut self, from: u64) {
        self.waiting.retain(|(number, _)| *number < from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_race_is_over_where_more_rounds_say_nothing_new() {
        let check = |leading_ns: &[f64], lead: f64, expected: bool| {
            let next: Vec<f64> = leading_ns.iter().map(|ns| ns * (1.0 + lead)).collect();
            assert_eq!(RaceLimits::is_settled(leading_ns, &next), expected, "{leading_ns:?}, {lead}");
        };
        let calm = [100.0, 100.2, 100.1, 100.3, 100.2, 100.1, 100.0, 100.2];
        let noisy = [100.0, 104.0, 110.0, 101.0, 107.0, 103.0, 112.0, 102.0];
        check(&calm, 0.1, true);
        check(&calm[..4], 0.1, true);
        check(&calm[..3], 0.1, false);
        // Memory placement in one process can cause as much.
        check(&calm, 0.02, false);
        check(&noisy, 0.1, false);
        check(&noisy, 0.02, true);
        check(&noisy[..7], 0.02, false);
        check(&[], 0.1, false);
        check(&[5.0; 8], 0.0, true);
    }
}
