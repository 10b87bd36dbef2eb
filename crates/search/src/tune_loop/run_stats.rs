//! Statistics of a run: trials, the best one, and the time that the search took.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::{Clock, Report};
use crate::measure::{Candidate, Measured, Seconds};
use crate::outlook::expected_gain;
use crate::search::Search;
use crate::space::{Config, Space};
use crate::trial::{ErrorClass, Trial};

/// Maximum number of leading trials: the fastest of ten, the two fastest of twenty and so on.
const MOST_LEADING: usize = 10;
const ONE_LEADS_OF: usize = 10;

/// Memory and counts of a run.
pub(super) struct RunStats<'a> {
    pub(super) clock: Clock<'a>,
    /// Configurations that were measured or are being measured.
    pub(super) seen: HashSet<Config>,
    pub(super) best: Option<Trial>,
    /// Times of all trials in nanoseconds, infinite for failures, in the order in which they ended.
    costs_ns: Vec<f64>,
    /// Medians of the fastest trials, ascending, at most [`MOST_LEADING`], and the number of trials that they
    /// are the fastest of.
    leading_ns: Vec<f64>,
    n_measured: usize,
    n_prior: u64,
    pub(super) n_trials: u64,
    pub(super) errors: BTreeMap<ErrorClass, u64>,
    pub(super) cut_off: BTreeMap<ErrorClass, u64>,
    pub(super) seconds: Seconds,
    pub(super) search_time: Duration,
    /// Time that the search took for its last proposal.
    last_thought: Duration,
}

impl<'a> RunStats<'a> {
    pub(super) fn new(prior: &[Trial], clock: Clock<'a>) -> RunStats<'a> {
        let mut stats = RunStats {
            clock,
            seen: prior.iter().map(|trial| trial.config.clone()).collect(),
            best: None,
            costs_ns: Vec::new(),
            leading_ns: Vec::new(),
            n_measured: 0,
            n_prior: prior.len() as u64,
            n_trials: 0,
            errors: BTreeMap::new(),
            cut_off: BTreeMap::new(),
            seconds: Seconds::default(),
            search_time: Duration::ZERO,
            last_thought: Duration::ZERO,
        };
        prior.iter().for_each(|trial| stats.rank(trial));
        stats
    }

    pub(super) fn n_known(&self) -> u64 {
        self.n_prior + self.n_trials
    }

    pub(super) fn best_ns(&self) -> Option<f64> {
        self.best.as_ref().map(|trial| trial.outcome.cost())
    }

    /// Median of the slowest leading trial. The fastest of many trials owes its time partly to luck, and
    /// compared with it good candidates would look hopeless.
    pub(super) fn leading_ns(&self) -> Option<f64> {
        self.leading_ns.get((self.n_measured / ONE_LEADS_OF).clamp(1, MOST_LEADING) - 1).copied()
    }

    /// Share of the best time that the next `seconds` are expected to gain at a pace of `n_trials` in
    /// `elapsed`; `None` if too few trials are known.
    pub(super) fn expected_gain(&self, seconds: f64, n_trials: u64, elapsed: Duration) -> Option<f64> {
        let pace = n_trials as f64 / elapsed.as_secs_f64();
        expected_gain(&self.costs_ns, pace * seconds).filter(|_| pace.is_finite() && pace > 0.0)
    }

    fn rank(&mut self, trial: &Trial) {
        self.costs_ns.push(trial.outcome.cost());
        let Some(timing) = trial.outcome.timing() else { return };
        if timing.median_ns < self.best_ns().unwrap_or(f64::INFINITY) {
            self.best = Some(trial.clone());
        }
        let at = self.leading_ns.partition_point(|&ns| ns <= timing.median_ns);
        self.leading_ns.insert(at, timing.median_ns);
        self.leading_ns.truncate(MOST_LEADING);
        self.n_measured += 1;
    }

    /// Runs a part of the search and counts its time as search time.
    pub(super) fn search<T>(&mut self, part: impl FnOnce() -> T) -> T {
        let start = (self.clock)();
        let result = part();
        self.search_time += (self.clock)() - start;
        result
    }

    /// Takes at most `n` guesses that are new.
    pub(super) fn guess(&mut self, guesses: &mut dyn Iterator<Item = Config>, n: usize) -> Vec<Config> {
        guesses.filter(|config| self.seen.insert(config.clone())).take(n).collect()
    }

    /// Whether a proposal that takes as long as the last one leaves time to measure it.
    pub(super) fn may_think(&self, left: Duration) -> bool {
        self.last_thought < left
    }

    /// New configurations that a search proposes.
    pub(super) fn propose(&mut self, search: &mut dyn Search, space: &Space, n: usize) -> Vec<Config> {
        let before = self.search_time;
        let mut batch = self.search(|| search.propose(n));
        self.last_thought = self.search_time - before;
        batch.retain(|config| {
            let fresh = space.contains(config) && self.seen.insert(config.clone());
            debug_assert!(fresh, "invariant: a search proposes only legal configurations that are new: {config:?}");
            fresh
        });
        batch
    }

    pub(super) fn enter(&mut self, candidate: &Candidate, measured: Measured) -> Report {
        let trial = Trial { config: candidate.config.clone(), outcome: measured.outcome };
        let sound = trial.outcome.timing().is_none_or(|timing| timing.median_ns > 0.0 && timing.median_ns.is_finite());
        assert!(sound, "invariant: a median is positive and finite: {:?}", trial.outcome);
        self.rank(&trial);
        if let Some(class) = trial.outcome.class() {
            *self.errors.entry(class).or_default() += 1;
            *self.cut_off.entry(class).or_default() += u64::from(measured.limit.is_some());
        }
        self.seconds += measured.seconds;
        self.n_trials += 1;
        let number = self.n_known() - 1;
        Report {
            number,
            trial,
            steps: Arc::clone(&candidate.steps),
            seconds: measured.seconds,
            limit: measured.limit,
            conditions: measured.conditions,
            best_ns: self.best_ns(),
        }
    }
}
