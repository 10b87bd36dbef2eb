//! Tuning loop: asks a search for candidates, has them measured, and reports their outcomes to the search.

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

/// Budget of a run: when it ends, and the batch size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget {
    /// Maximum number of trials of this call. A caller that resumes subtracts recorded ones.
    pub trials: Option<u64>,
    /// Maximum wall-clock time of this call, without pauses. No candidate is started later, and running ones
    /// get a short grace period. The first guess is always finished, and further ones follow for a few
    /// seconds until one is valid, so that there is a result.
    pub time: Option<Duration>,
    /// Early stopping: the run ends when the improvement expected within the next minute falls below this
    /// share of the best time; see [`expected_gain`](crate::expected_gain).
    pub stop_below: Option<f64>,
    /// Maximum batch size, at least 1. A killed run loses at most one batch. Batches grow with the number of
    /// trials: see [`Tuning::go_on`].
    pub batch: usize,
    /// Minimum batch size: the number of candidates that are measured in parallel.
    pub least: usize,
}

impl Default for Budget {
    /// Budget without limits and with batches of at most 16.
    fn default() -> Budget {
        Budget { trials: None, time: None, stop_below: None, batch: 16, least: 1 }
    }
}

/// Known trials for each candidate of a batch: batches grow with what is known.
const KNOWN_PER_CANDIDATE: u64 = 16;

impl Budget {
    /// Maximum number of the `left` trials to ask for at a time.
    fn most_at_a_time(&self, left: u64) -> usize {
        left.min(self.batch.max(self.least).max(1) as u64) as usize
    }

    /// Number of the `left` trials to ask a search for when `n_known` are known.
    fn at_a_time(&self, n_known: u64, left: u64) -> usize {
        let grown = if n_known == 0 { u64::MAX } else { (n_known / KNOWN_PER_CANDIDATE).max(self.least.max(1) as u64) };
        self.most_at_a_time(left.min(grown))
    }
}

/// Known trials and initial guesses of a run (warm start); empty by default.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadStart<'a> {
    /// Trials of earlier runs, which the search observes first and which are not measured again.
    pub prior: &'a [Trial],
    /// Configurations measured before any proposal of the search, in order.
    pub guesses: &'a [Config],
}

/// Report of one trial, for the observer.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Number in the workload's history, continuing the count of prior trials.
    pub number: u64,
    /// Configuration and its outcome.
    pub trial: Trial,
    /// Schedule as text, as in its [`Candidate`](crate::Candidate).
    pub steps: Arc<str>,
    /// Seconds spent on it, by activity.
    pub seconds: Seconds,
    /// Limit that caused the failure, if any; under a higher one the trial may succeed.
    pub limit: Option<Limit>,
    /// Device on which it was measured, and its state.
    pub conditions: Conditions,
    /// Best median so far in nanoseconds, this trial included; `None` before the first success.
    pub best_ns: Option<f64>,
}

/// Event of a run, for the observer.
#[derive(Debug)]
pub enum Event<'a> {
    /// End of one trial: time to show progress.
    Trial(&'a Report),
    /// End of a batch with its reports: time to commit records.
    Batch(&'a [Report]),
}

/// Summary of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Best of the prior and the new trials; `None` if all failed.
    pub best: Option<Trial>,
    /// Number of trials of this call, failures included.
    pub n_trials: u64,
    /// Number of failed trials by class, without zeros.
    pub errors: BTreeMap<ErrorClass, u64>,
    /// Number of failed trials by class whose failure a higher limit may avoid.
    pub cut_off: BTreeMap<ErrorClass, u64>,
    /// Seconds spent proposing and observing.
    pub search_seconds: f64,
    /// Seconds spent on candidates, summed over all.
    pub seconds: Seconds,
    /// Wall-clock seconds, without pauses.
    pub wall_seconds: f64,
    /// Reason for the end.
    pub ended: Ended,
}

/// Reason for the end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Budget of trials spent.
    Trials,
    /// Budget of time spent.
    Time,
    /// Early stopping: expected improvement below [`Budget::stop_below`].
    LittleGain,
    /// Space exhausted: the search has nothing left to propose.
    Exhausted,
    /// Interruption by the stop flag, or by the measuring side.
    Interrupted,
}

/// Tuning run in progress. It advances by [`Tuning::go_on`], so that several runs can take turns.
pub struct Tuning<'a> {
    search: &'a mut dyn Search,
    subject: Subject<'a>,
    stats: RunStats<'a>,
    /// Guesses that are not measured yet.
    guesses: std::vec::IntoIter<Config>,
    /// Whether there is a valid trial, or the first guess has been tried.
    is_begun: bool,
    /// Trials that the search has not observed yet.
    untold: Vec<Trial>,
    /// Batches that were chosen but not measured when the time ran out.
    left_over: VecDeque<Batch>,
    wall: Duration,
}

impl<'a> Tuning<'a> {
    /// Makes a run that starts with the first [`Tuning::go_on`]. The search observes the prior trials of the
    /// head start first, and the outcomes of its guesses like its own.
    pub fn new(search: &'a mut dyn Search, subject: Subject<'a>, head_start: HeadStart) -> Tuning<'a> {
        let start = pause::now();
        Tuning::by_clock(search, subject, head_start, Rc::new(move || pause::now() - start))
    }

    /// Makes a run with the given clock.
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

    /// Runs until the budget is spent, the space is exhausted or `stop` is raised: [`Tuning::go_on`] once,
    /// and the summary.
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

    /// Best median so far in nanoseconds; `None` before the first success.
    pub fn best_ns(&self) -> Option<f64> {
        self.stats.best_ns()
    }

    /// Summary so far, given the reason for the last end.
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
    /// The observer receives every trial as it completes and the end of every batch; if it fails, the run
    /// ends.
    ///
    /// The first guess is measured alone if no valid trial is known, so that there is a result as soon as
    /// possible. The search is not asked if its last proposal took longer than the time left.
    ///
    /// The size of a batch is a sixteenth of the number of known trials, at least one: the candidates of a
    /// batch are chosen without each other's results, and early in a run every result changes the choice.
    ///
    /// The search observes batches as a whole and in their order, regardless of the order of the results: its
    /// proposals do not depend on how many candidates `measure` runs at once. Candidates that are chosen but
    /// not measured when the time runs out come first in the next call.
    ///
    /// # Errors
    /// [`Error::Measure`] and [`Error::Observer`]. Everything measured until then has been observed.
    ///
    /// # Panics
    /// If a median is not a positive, finite number: a bug of the measuring side.
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

/// Time since some moment.
type Clock<'a> = Rc<dyn Fn() -> Duration + 'a>;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;
