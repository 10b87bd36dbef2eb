//! Replay: measuring by looking up outcomes in a recorded space.
//!
//! A recorded space holds the outcomes of many or all configurations, measured here or by others;
//! [`RecordedSpace::replay`] runs a search on it many times and reports how close it comes to the optimum,
//! without a device.

mod repeats;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub use repeats::{AtBudget, Replay, ReplayPlan};

use crate::measure::{BoxError, Candidate, Measure, Measured, MeasuringTraits, Next, Queue, RaceLimits, Standing};
use crate::space::{Config, Space};
use crate::trial::{ErrorClass, Outcome, Trial};

/// Recorded outcomes of configurations of one space.
#[derive(Debug, Clone)]
pub struct RecordedSpace {
    space: Arc<Space>,
    outcomes: Arc<HashMap<Config, Outcome>>,
    notes: Arc<[String]>,
    /// Configurations to look up.
    queue: Queue,
}

impl RecordedSpace {
    /// Recorded space of these trials; of two trials of the same configuration, the later one counts.
    pub fn new(space: Arc<Space>, trials: impl IntoIterator<Item = Trial>) -> RecordedSpace {
        let outcomes = trials.into_iter().map(|trial| (trial.config, trial.outcome)).collect();
        RecordedSpace { space, outcomes: Arc::new(outcomes), notes: Arc::default(), queue: Queue::default() }
    }

    /// Attaches notes on irregularities of the file that the space was read from.
    pub fn with_notes(self, notes: Vec<String>) -> RecordedSpace {
        RecordedSpace { notes: notes.into(), ..self }
    }

    /// Returns the space whose configurations are recorded.
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// Notes on the file that the space was read from, one per line, such as rows left out or counted as
    /// failures, or a missing end.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Number of recorded configurations.
    pub fn len(&self) -> usize {
        self.outcomes.len()
    }

    /// Whether there are no recorded configurations.
    pub fn is_empty(&self) -> bool {
        self.outcomes.is_empty()
    }

    /// Number of configurations that were measured successfully.
    pub fn n_valid(&self) -> usize {
        self.outcomes.values().filter(|outcome| outcome.timing().is_some()).count()
    }

    /// Recorded configurations with their outcomes, in the order of the space's indices.
    pub fn outcomes(&self) -> Vec<(&Config, &Outcome)> {
        let mut outcomes: Vec<(&Config, &Outcome)> = self.outcomes.iter().collect();
        outcomes.sort_by_key(|(config, _)| self.space.index_of(config));
        outcomes
    }

    /// Lowest recorded median in nanoseconds; `None` if every trial failed.
    pub fn optimum_ns(&self) -> Option<f64> {
        self.outcomes.values().filter_map(|outcome| Some(outcome.timing()?.median_ns)).min_by(f64::total_cmp)
    }
}

impl RecordedSpace {
    /// Outcome of a configuration; one that is not recorded fails with [`ErrorClass::Unknown`].
    pub fn outcome(&self, config: &Config) -> Outcome {
        let missing = || Outcome::Failed { class: ErrorClass::Unknown, message: "not recorded".into() };
        self.outcomes.get(config).cloned().unwrap_or_else(missing)
    }
}

impl Measure for RecordedSpace {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        self.queue.submit(candidates)
    }

    fn next(&mut self, _leading_ns: Option<f64>, _at_most: Duration) -> Result<Next, BoxError> {
        Ok(match self.queue.pop() {
            None => Next::Idle,
            Some((number, Candidate { config, .. })) => {
                let outcome = self.outcome(&config);
                Next::Done(number, Measured::of(outcome))
            }
        })
    }

    fn wind_down(&mut self) {
        self.queue.cancel(0);
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        self.queue.cancel(from);
        Ok(())
    }

    fn race(
        &mut self,
        candidates: &[Candidate],
        _limits: RaceLimits,
        _stop: Option<&AtomicBool>,
        _left: &mut dyn FnMut(usize),
    ) -> Result<Vec<Standing>, BoxError> {
        let standing = |(at, candidate): (usize, &Candidate)| {
            let outcome = self.outcome(&candidate.config);
            Standing { at, quartile_ns: outcome.cost(), outcome, relative_error: None }
        };
        let mut standings: Vec<Standing> = candidates.iter().enumerate().map(standing).collect();
        standings.sort_by(|a, b| a.quartile_ns.total_cmp(&b.quartile_ns));
        Ok(standings)
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits::default()
    }
}
