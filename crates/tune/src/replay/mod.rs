//! Replay: measuring by looking outcomes up in a recorded space.
//!
//! A recorded space is a file in which others, or we, keep what became of every configuration. [`RecordedSpace::read`]
//! reads the formats there are; [`RecordedSpace::replay`] runs a search on it many times and says how near to the
//! optimum it comes, without a device.

mod json;
mod kernel_tuner;
mod outcome;
mod python;
mod read;
mod records;
mod repeats;
mod rows;
mod t1;
mod t4;

use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
pub use read::ReplayError;
pub use repeats::{AtBudget, Replay, ReplayPlan};
use serde_json::Value as Json;

use crate::measure::{BoxError, Measure, Measured, Seconds};
use crate::space::{Config, Space};
use crate::trial::{ErrorClass, Outcome, Trial};

/// Recorded outcomes of configurations of one space.
#[derive(Debug, Clone)]
pub struct RecordedSpace {
    space: Arc<Space>,
    outcomes: Arc<HashMap<Config, Outcome>>,
    notes: Arc<[String]>,
}

impl RecordedSpace {
    /// The recorded space of these trials; of two with one configuration the later one counts.
    pub fn new(space: Arc<Space>, trials: impl IntoIterator<Item = Trial>) -> RecordedSpace {
        let outcomes = trials.into_iter().map(|trial| (trial.config, trial.outcome)).collect();
        RecordedSpace { space, outcomes: Arc::new(outcomes), notes: Arc::default() }
    }

    /// The space whose configurations are recorded.
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// What is odd about the file that it was read from, each in a line: rows that were left out or count as failed, an end
    /// that is missing.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// How many configurations are recorded.
    pub fn len(&self) -> usize {
        self.outcomes.len()
    }

    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.outcomes.is_empty()
    }

    /// How many configurations were measured successfully.
    pub fn n_valid(&self) -> usize {
        self.outcomes.values().filter(|outcome| outcome.timing().is_some()).count()
    }

    /// Writes everything recorded as T4 results, in the order of the space, packed by gzip if asked for. `about` goes into
    /// their metadata. [`RecordedSpace::read`] gives the medians back, and of failures the class as far as T4 has one.
    ///
    /// # Errors
    /// Where `output` fails.
    pub fn write_t4(&self, mut output: impl Write, is_packed: bool, about: &[(&str, Json)]) -> io::Result<()> {
        let mut outcomes: Vec<(&Config, &Outcome)> = self.outcomes.iter().collect();
        outcomes.sort_by_key(|(config, _)| self.space.index_of(config));
        let document = t4::document(&self.space, outcomes.into_iter(), about);
        if is_packed {
            let mut packed = GzEncoder::new(output, Compression::default());
            serde_json::to_writer(&mut packed, &document)?;
            packed.finish()?.flush()
        } else {
            serde_json::to_writer(&mut output, &document)?;
            output.flush()
        }
    }

    /// The best recorded median in nanoseconds; `None` where every trial failed.
    pub fn optimum_ns(&self) -> Option<f64> {
        self.outcomes.values().filter_map(|outcome| Some(outcome.timing()?.median_ns)).min_by(f64::total_cmp)
    }
}

impl Measure for RecordedSpace {
    /// A configuration that is not recorded fails with [`ErrorClass::Unknown`].
    fn measure(
        &mut self,
        batch: &[Config],
        _leading_ns: Option<f64>,
        _over: &dyn Fn() -> bool,
        _next: &mut dyn FnMut() -> Vec<Config>,
        done: &mut dyn FnMut(usize, Measured) -> ControlFlow<()>,
    ) -> Result<(), BoxError> {
        for (i, config) in batch.iter().enumerate() {
            let missing = || Outcome::Failed { class: ErrorClass::Unknown, message: "not recorded".into() };
            let outcome = self.outcomes.get(config).cloned().unwrap_or_else(missing);
            if done(i, Measured { outcome, seconds: Seconds::default(), limit: None }).is_break() {
                break;
            }
        }
        Ok(())
    }
}
