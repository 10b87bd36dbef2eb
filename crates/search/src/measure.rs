//! Measuring: the seam between searches and whatever runs their candidates.

use std::collections::VecDeque;
use std::ops::{AddAssign, Range};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::space::{Config, Space};
use crate::trial::{ErrorClass, Limit, Outcome, is_tie, quantile};

/// An error of a part that this crate does not know.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Seconds of a trial, by what they were spent on.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Seconds {
    /// Instantiating and compiling. Candidates compile side by side, so sums may exceed the wall clock.
    pub build: f64,
    /// Running for the timing.
    pub run: f64,
    /// Running and comparing for the verification.
    pub verify: f64,
}

impl AddAssign for Seconds {
    fn add_assign(&mut self, other: Seconds) {
        self.build += other.build;
        self.run += other.run;
        self.verify += other.verify;
    }
}

/// Configuration to measure, with the text of its schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The point of the space.
    pub config: Config,
    /// Text of its schedule, a line a step; empty where configurations are no programs, as in a replay.
    pub steps: Arc<str>,
    /// Timeout of its runs, whatever other candidates take; by default a hopeless one is pruned earlier.
    pub patience: Option<Duration>,
}

/// Description of configurations as text: the schedule of a program, a command line.
pub trait Describe {
    /// Describes a configuration; empty where there is nothing to say.
    fn describe(&self, config: &Config) -> String;
}

impl<F: Fn(&Config) -> String> Describe for F {
    fn describe(&self, config: &Config) -> String {
        self(config)
    }
}

/// Subject of a search: a space, and the description of its configurations, if there is one.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// The space.
    pub space: &'a Space,
    describe: Option<&'a dyn Describe>,
}

impl<'a> Subject<'a> {
    /// The candidate of a configuration.
    pub fn candidate(&self, config: Config) -> Candidate {
        let steps = self.describe.map_or_else(|| Arc::from(""), |by| by.describe(&config).into());
        Candidate { config, steps, patience: None }
    }

    /// A space whose configurations have descriptions, which are recorded with them.
    pub fn described(space: &'a Space, describe: &'a dyn Describe) -> Subject<'a> {
        Subject { space, describe: Some(describe) }
    }
}

impl<'a> From<&'a Space> for Subject<'a> {
    /// A space whose configurations have no descriptions.
    fn from(space: &'a Space) -> Subject<'a> {
        Subject { space, describe: None }
    }
}

/// Device on which a candidate was measured, and its state, as far as they are known.
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

/// The result for one candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// Outcome.
    pub outcome: Outcome,
    /// Seconds, by what they were spent on.
    pub seconds: Seconds,
    /// Limit that caused the failure, which another run may raise; `None` otherwise.
    pub limit: Option<Limit>,
    /// Device and its state.
    pub conditions: Conditions,
}

impl Measured {
    /// Makes a result of an outcome alone; everything else is unknown.
    pub fn of(outcome: Outcome) -> Measured {
        Measured { outcome, seconds: Seconds::default(), limit: None, conditions: Conditions::default() }
    }

    /// A failure that took no time.
    pub fn failed(class: ErrorClass, message: String) -> Measured {
        Measured::of(Outcome::Failed { class, message })
    }
}

/// Answer of [`Measure::next`].
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// The result of a candidate, by its number.
    Done(u64, Measured),
    /// No result came in the time given.
    Pending,
    /// Nothing is left to measure.
    Idle,
}

/// Properties of what measures that searches depend on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MeasuringTraits {
    /// Whether candidates should be submitted before the results of others are there, because it builds them
    /// meanwhile.
    pub works_ahead: bool,
}

/// Time limits of a race.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RaceLimits {
    /// Time for all rounds, as a rule.
    pub rounds: Duration,
    /// Time for the race as a whole: a round that would not end by then is not begun.
    pub total: Duration,
    /// Expected time of the fastest candidate's run in nanoseconds, as far as it is known.
    pub best_ns: f64,
}

impl RaceLimits {
    /// A round of one: for a long kernel another one after the others' tells more than a second sample.
    pub const ROUND: Duration = Duration::from_millis(15);
    /// Rounds before the first half leaves; the next has twice as many.
    pub const LEAST_ROUNDS: u64 = 3;
    /// Times that candidates leave, at most, with the end.
    pub const STAGES: u32 = 3;
    /// Ratio of the length of a race, with what it builds and checks, to that of its rounds, as a rule.
    pub const GOAL: u32 = 3;
    /// Rounds of the two leading candidates before which nothing is plain, and before which nothing is a tie.
    const ROUNDS_UNTIL_PLAIN: usize = 4;
    const ROUNDS_UNTIL_TIE: usize = 8;
    /// A lead that is more than what a process's luck with its memory makes of a kernel's time, and how many
    /// times what rounds spread it has to be.
    const PLAIN_LEAD: f64 = 0.03;
    const PLAIN_SPREADS: f64 = 2.0;

    /// Rounds of one candidate for which there is time.
    pub fn affordable(&self, time: Duration) -> u64 {
        let round_ns = self.best_ns.max(RaceLimits::ROUND.as_nanos() as f64);
        (time.as_nanos() as f64 / round_ns) as u64
    }

    /// Whether more rounds would say nothing that is not known, by the rounds of the leading candidate and of
    /// the next, in nanoseconds: one is plainly ahead of the other, or the two cannot be told apart.
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

/// A candidate after a race.
#[derive(Debug, Clone, PartialEq)]
pub struct Standing {
    /// Index among the candidates that were to race.
    pub at: usize,
    /// Outcome over its rounds, or its failure.
    pub outcome: Outcome,
    /// First quartile of its rounds, by which it is ranked, in nanoseconds a run; infinite for a failure.
    pub quartile_ns: f64,
    /// ‖out − reference‖ / ‖reference‖ of its answer, where that is known.
    pub relative_error: Option<f64>,
}

/// Measurement of candidates: by a device, or by the replay of a recorded table.
///
/// All calls go to it, and it never calls back: a proxy for a measurement elsewhere need only forward them.
pub trait Measure: Send {
    /// Submits candidates, to be measured after those submitted before; returns their numbers.
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64>;

    /// Returns the next result, of any candidate submitted, at most once for each; waits for `at_most` at
    /// most. `leading_ns` is the median of the candidate that leads so far, against which hopeless timings
    /// may be pruned.
    ///
    /// # Errors
    /// If measuring as a whole is impossible, such as a worker that cannot be started. A candidate that
    /// fails is an [`Outcome`].
    fn next(&mut self, leading_ns: Option<f64>, at_most: Duration) -> Result<Next, BoxError>;

    /// Begins no further candidates; those not begun yet have no result.
    fn wind_down(&mut self);

    /// Tells that all results of candidates below this number are on record.
    fn recorded(&mut self, _before: u64) {}

    /// Cancels all candidates from this number on, those under way too.
    ///
    /// # Errors
    /// As [`Measure::next`].
    fn cancel(&mut self, from: u64) -> Result<(), BoxError>;

    /// Times candidates against each other, and ends early where `stop` is raised: the fastest first, those
    /// that failed last, without those that fell behind or had no round. `left` is told how many are in the
    /// race whenever that changes.
    ///
    /// # Errors
    /// As [`Measure::next`]; always by default.
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

    /// Properties of what measures.
    fn machine(&self) -> MeasuringTraits;
}

/// Candidates that wait, with their numbers: for what measures one after the other, at once.
#[derive(Debug, Clone, Default)]
pub struct Queue {
    waiting: VecDeque<(u64, Candidate)>,
    n_submitted: u64,
}

impl Queue {
    /// As [`Measure::submit`].
    pub fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        let first = self.n_submitted;
        self.n_submitted += candidates.len() as u64;
        self.waiting.extend((first..).zip(candidates.iter().cloned()));
        first..self.n_submitted
    }

    /// Candidate that has waited longest.
    pub fn pop(&mut self) -> Option<(u64, Candidate)> {
        self.waiting.pop_front()
    }

    /// As [`Measure::cancel`]; [`Measure::wind_down`] where all are meant.
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
        // The pages of one process make as much.
        check(&calm, 0.02, false);
        check(&noisy, 0.1, false);
        check(&noisy, 0.02, true);
        check(&noisy[..7], 0.02, false);
        check(&[], 0.1, false);
        check(&[5.0; 8], 0.0, true);
    }
}
