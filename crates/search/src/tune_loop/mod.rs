//! The tuning loop: asks a search for candidates, has them measured, tells the search, and keeps statistics.

mod batches;
mod course;
mod run_stats;

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use batches::Batch;
use course::Course;
use run_stats::RunStats;

use crate::Error;
use crate::measure::{BoxError, Conditions, Measure, Seconds, Subject};
use crate::pause;
use crate::search::Search;
use crate::space::Config;
use crate::trial::{ErrorClass, Limit, Trial};

/// Budget of a run: when it stops, and how many candidates it measures at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget {
    /// The most trials to measure in this call. A caller that resumes subtracts what is recorded already.
    pub trials: Option<u64>,
    /// The most wall-clock time to spend in this call, without pauses. No candidate is begun past it, and
    /// those at hand have a moment to end; but the first guess is always finished, and others follow for a
    /// few seconds until one is valid, so that there is a result.
    pub time: Option<Duration>,
    /// Share of the best time by which the next minute has to be expected to shorten it for the run to go on;
    /// see [`expected_gain`](crate::expected_gain).
    pub stop_below: Option<f64>,
    /// Largest batch of candidates to ask for, at least 1. They compile side by side, and a killed run loses
    /// at most one batch. Only the first are asked for all at once, later ones as more is known: see
    /// [`Tuning::go_on`].
    pub batch: usize,
    /// Smallest batch of candidates to ask for: where this many are measured side by side.
    pub least: usize,
}

impl Default for Budget {
    /// No limit, 16 candidates at a time.
    fn default() -> Budget {
        Budget { trials: None, time: None, stop_below: None, batch: 16, least: 1 }
    }
}

/// Known trials for each candidate of a batch: batches grow with what is known.
const KNOWN_PER_CANDIDATE: u64 = 16;

impl Budget {
    /// The most of the trials that are left to ask for at a time.
    fn most_at_a_time(&self, left: u64) -> usize {
        left.min(self.batch.max(self.least).max(1) as u64) as usize
    }

    /// Trials to ask a search for, of those that are left, where `n_known` are known.
    fn at_a_time(&self, n_known: u64, left: u64) -> usize {
        let grown = if n_known == 0 { u64::MAX } else { (n_known / KNOWN_PER_CANDIDATE).max(self.least.max(1) as u64) };
        self.most_at_a_time(left.min(grown))
    }
}

/// Trials and guesses that a run begins with; by default none.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadStart<'a> {
    /// Trials of an earlier run or of another, told to the search first and never measured again.
    pub prior: &'a [Trial],
    /// Configurations that are measured before anything that the search proposes, in their order.
    pub guesses: &'a [Config],
}

/// Report of one trial of a run, for the observer.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Number in the workload's history: the count of prior trials and of those reported before.
    pub number: u64,
    /// Configuration and its outcome.
    pub trial: Trial,
    /// The text of its schedule, as of its [`Candidate`](crate::Candidate).
    pub steps: Arc<str>,
    /// Seconds, by what they were spent on.
    pub seconds: Seconds,
    /// Limit that caused the failure, which another run may raise; `None` otherwise.
    pub limit: Option<Limit>,
    /// Device on which it was measured, and its state.
    pub conditions: Conditions,
    /// The best median so far in nanoseconds, this trial included.
    pub best_ns: Option<f64>,
}

/// Event of a run, for the observer.
#[derive(Debug)]
pub enum Event<'a> {
    /// End of one trial: the moment to show progress.
    Trial(&'a Report),
    /// End of a batch, as far as it was measured: the moment to commit records.
    Batch(&'a [Report]),
}

/// Summary of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The best of the prior and the new trials; `None` where all failed.
    pub best: Option<Trial>,
    /// Trials measured in this call, failures included.
    pub n_trials: u64,
    /// Number of them that failed, by class; classes without failures are left out.
    pub errors: BTreeMap<ErrorClass, u64>,
    /// Number of those that had come to a limit that another run may raise.
    pub cut_off: BTreeMap<ErrorClass, u64>,
    /// Seconds spent proposing and observing.
    pub search_seconds: f64,
    /// Seconds spent on candidates, summed over all of them.
    pub seconds: Seconds,
    /// Seconds by the wall clock, without pauses.
    pub wall_seconds: f64,
    /// Reason for its end.
    pub ended: Ended,
}

/// Reasons for which a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The budget of trials is spent.
    Trials,
    /// The budget of time is spent.
    Time,
    /// The next minute is expected to gain less than [`Budget::stop_below`].
    LittleGain,
    /// The search has nothing left to propose.
    Exhausted,
    /// The stop flag was raised, or the measuring side gave a batch up.
    Interrupted,
}

/// A search under way. It advances by [`Tuning::go_on`] whenever it is given time, so that several can take
/// turns.
pub struct Tuning<'a> {
    search: &'a mut dyn Search,
    subject: Subject<'a>,
    stats: RunStats<'a>,
    /// Guesses that are not measured yet.
    guesses: std::vec::IntoIter<Config>,
    /// Whether there is a valid trial, or the first guess has been tried.
    is_begun: bool,
    /// Trials that the search has not been told yet.
    untold: Vec<Trial>,
    /// Batches that were chosen when the time was up.
    left_over: VecDeque<Batch>,
    wall: Duration,
}

impl<'a> Tuning<'a> {
    /// Makes a run that begins with the first [`Tuning::go_on`]: the search is told the trials of the head
    /// start first, and those of its guesses like its own.
    pub fn new(search: &'a mut dyn Search, subject: Subject<'a>, head_start: HeadStart) -> Tuning<'a> {
        let start = pause::now();
        Tuning::by_clock(search, subject, head_start, Rc::new(move || pause::now() - start))
    }

    /// Makes a run that keeps time by another clock.
    fn by_clock(
        search: &'a mut dyn Search,
        subject: Subject<'a>,
        head_start: HeadStart,
        clock: Clock<'a>,
    ) -> Tuning<'a> {
        let HeadStart { prior, guesses } = head_start;
        let stats = RunStats::new(prior, clock);
        let guesses: Vec<Config> = guesses.iter().filter(|config| subject.space.contains(config)).cloned().collect();
        let is_begun = stats.best.is_some() || guesses.iter().all(|config| stats.seen.contains(config));
        Tuning {
            search,
            subject,
            stats,
            guesses: guesses.into_iter(),
            is_begun,
            untold: prior.to_vec(),
            left_over: VecDeque::new(),
            wall: Duration::ZERO,
        }
    }

    /// Runs until the budget is spent, the space is exhausted or `stop` is raised: one call of
    /// [`Tuning::go_on`], and its summary.
    ///
    /// # Errors
    /// As [`Tuning::go_on`].
    ///
    /// # Panics
    /// As [`Tuning::go_on`].
    pub fn run(
        mut self,
        measure: &mut dyn Measure,
        budget: Budget,
        stop: &AtomicBool,
        observer: &mut dyn FnMut(Event) -> Result<(), BoxError>,
    ) -> Result<Summary, Error> {
        let ended = self.go_on(measure, budget, stop, observer)?;
        Ok(self.summary(ended))
    }

    /// The best median so far in nanoseconds.
    pub fn best_ns(&self) -> Option<f64> {
        self.stats.best_ns()
    }

    /// Summary so far of a run that last ended in this way.
    pub fn summary(&self, ended: Ended) -> Summary {
        let stats = &self.stats;
        Summary {
            best: stats.best.clone(),
            n_trials: stats.n_trials,
            errors: stats.errors.clone(),
            cut_off: stats.cut_off.clone(),
            search_seconds: stats.search_time.as_secs_f64(),
            seconds: stats.seconds,
            wall_seconds: self.wall.as_secs_f64(),
            ended,
        }
    }

    /// Continues the run until the budget is spent, the space is exhausted or `stop` is raised; returns the
    /// reason for its end.
    ///
    /// The observer is told every trial as it completes and the end of every batch; where it fails, the run
    /// ends.
    ///
    /// The first guess is measured alone if no valid trial is known, so that there is a result as soon as can
    /// be. A search is not asked where it thought for longer the last time than is left.
    ///
    /// Batches are a sixteenth of what is known, one candidate at least: the candidates of a batch are chosen
    /// without each other's results, and early every result changes the choice.
    ///
    /// The search is told a batch as a whole and in order of batches, whatever comes first: what it proposes
    /// does not depend on how many candidates `measure` has under way. What is chosen and not measured when
    /// the time is up comes first the next time.
    ///
    /// # Errors
    /// [`Error::Measure`] and [`Error::Observer`]. What was measured until then has been observed.
    ///
    /// # Panics
    /// If a median is not a positive, finite number: the measuring side's fault.
    pub fn go_on(
        &mut self,
        measure: &mut dyn Measure,
        budget: Budget,
        stop: &AtomicBool,
        observer: &mut dyn FnMut(Event) -> Result<(), BoxError>,
    ) -> Result<Ended, Error> {
        let clock = self.stats.clock.clone();
        let start = clock();
        let ended = Course::new(self, measure, budget, stop, observer).carry_out();
        self.wall += clock() - start;
        ended
    }
}

/// The time since some moment.
type Clock<'a> = Rc<dyn Fn() -> Duration + 'a>;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;
