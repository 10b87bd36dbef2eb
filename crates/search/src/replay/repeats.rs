//! Repeated runs of a search on a recorded space.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::RecordedSpace;
use crate::search::{self, SearchError};
use crate::space::Config;
use crate::tune_loop::{Budget, Event, HeadStart, Tuning};

/// Plan of a replay: the search, and its repetitions.
#[derive(Debug, Clone)]
pub struct ReplayPlan {
    /// Search with its options, as [`search::build`] takes it.
    pub search: String,
    /// Numbers of trials, failures included, after which the best one is reported.
    pub budgets: Vec<u64>,
    /// Number of runs of the search, each up to the largest budget.
    pub n_repeats: usize,
    /// Seed of the first run, incremented for each further one.
    pub seed: u64,
    /// Maximum batch size, at least 1, as in [`Budget`].
    pub batch: usize,
    /// Number of parallel runs. The results do not depend on it.
    pub n_threads: usize,
    /// Configurations tried before any proposal of the search; unrecorded ones are skipped.
    pub guesses: Vec<Config>,
}

/// Results of a replay.
#[derive(Debug, Clone, PartialEq)]
pub struct Replay {
    /// Results at each budget of the plan, in its order.
    pub budgets: Vec<AtBudget>,
    /// Milliseconds of the search per trial.
    pub overhead_ms_per_evaluation: f64,
}

/// Result of all runs at a budget.
#[derive(Debug, Clone, PartialEq)]
pub struct AtBudget {
    /// Number of trials.
    pub budget: u64,
    /// Fraction of the optimum reached, by run: the optimum's time over the best time found; 0 if all trials
    /// failed.
    pub fractions: Vec<f64>,
}

impl AtBudget {
    /// Mean fraction over the runs.
    pub fn mean(&self) -> f64 {
        self.fractions.iter().sum::<f64>() / self.fractions.len() as f64
    }

    /// Standard deviation of the fraction over the runs; 0 for a single one.
    pub fn std(&self) -> f64 {
        let mean = self.mean();
        let squares: f64 = self.fractions.iter().map(|fraction| (fraction - mean).powi(2)).sum();
        (squares / (self.fractions.len() as f64 - 1.0).max(1.0)).sqrt()
    }
}

/// Curve of one run.
struct RunCurve {
    /// Best time after each trial, infinite before the first that succeeds.
    best_ns: Vec<f64>,
    search_seconds: f64,
}

impl RecordedSpace {
    /// Runs a search several times, and compares its best trials with the recorded optimum.
    ///
    /// # Errors
    /// [`SearchError`] if there is no such search.
    ///
    /// # Panics
    /// If nothing is recorded or every trial failed: then there is no optimum.
    pub fn replay(&self, plan: &ReplayPlan) -> Result<Replay, SearchError> {
        self.replay_until(plan, &AtomicBool::new(false))
    }

    /// Replays as [`RecordedSpace::replay`] until `stop` is set; the fractions then cover the trials so far.
    ///
    /// # Errors
    /// As for [`RecordedSpace::replay`].
    ///
    /// # Panics
    /// As for [`RecordedSpace::replay`].
    pub fn replay_until(&self, plan: &ReplayPlan, stop: &AtomicBool) -> Result<Replay, SearchError> {
        let optimum_ns = self.optimum_ns().expect("invariant: a recorded space that is replayed has an optimum");
        search::build(&plan.search, &self.space, plan.seed)?;
        let (next, runs) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work = || {
            loop {
                let repeat = next.fetch_add(1, Ordering::Relaxed);
                if repeat >= plan.n_repeats || stop.load(Ordering::Relaxed) {
                    break;
                }
                let run = self.run(plan, repeat, stop);
                runs.lock().expect("invariant: no run panics with the lock").push((repeat, run));
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..plan.n_threads.clamp(1, plan.n_repeats.max(1)) {
                // If no further thread can be started, the existing ones do all the work.
                if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
        let mut runs = runs.into_inner().expect("invariant: no run panics with the lock");
        runs.sort_by_key(|(repeat, _)| *repeat);
        let fraction = |run: &RunCurve, budget: u64| {
            let tried = run.best_ns.len().min(usize::try_from(budget).unwrap_or(usize::MAX));
            run.best_ns[..tried].last().map_or(0.0, |best_ns| optimum_ns / best_ns)
        };
        let at =
            |&budget: &u64| AtBudget { budget, fractions: runs.iter().map(|(_, run)| fraction(run, budget)).collect() };
        let seconds: f64 = runs.iter().map(|(_, run)| run.search_seconds).sum();
        let n_trials: usize = runs.iter().map(|(_, run)| run.best_ns.len()).sum();
        Ok(Replay {
            budgets: plan.budgets.iter().map(at).collect(),
            overhead_ms_per_evaluation: 1e3 * seconds / n_trials.max(1) as f64,
        })
    }

    fn run(&self, plan: &ReplayPlan, repeat: usize, stop: &AtomicBool) -> RunCurve {
        let seed = plan.seed.wrapping_add(repeat as u64);
        let mut search = search::build(&plan.search, &self.space, seed).expect("invariant: it was built once already");
        let budget = Budget { trials: plan.budgets.iter().max().copied(), batch: plan.batch, ..Budget::default() };
        let mut best_ns = Vec::new();
        let mut observer = |event: Event| {
            if let Event::Trial(report) = event {
                best_ns.push(report.best_ns.unwrap_or(f64::INFINITY));
            }
            Ok(())
        };
        let mut table = self.clone();
        let head_start = HeadStart { prior: &[], guesses: &plan.guesses };
        let tuning = Tuning::new(search.as_mut(), (&*self.space).into(), head_start);
        let summary = tuning.run(&mut table, budget, stop, &mut observer);
        let summary = summary.unwrap_or_else(|error| panic!("invariant: a look-up cannot fail: {error}"));
        let search_seconds = summary.search_seconds;
        RunCurve { best_ns, search_seconds }
    }
}
