//! Replay: measuring by looking outcomes up in a recorded table.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::measure::{BoxError, Measure, Measured, Seconds};
use crate::record::Record;
use crate::space::{Config, ConfigError, Space};
use crate::trial::{ErrorClass, Outcome, Trial};

/// Recorded outcomes of configurations of one space.
#[derive(Debug, Clone)]
pub struct RecordedTable {
    space: Arc<Space>,
    results: HashMap<Config, Measured>,
}

impl RecordedTable {
    /// The table of these trials; of two with one configuration the later one counts.
    pub fn new(space: Arc<Space>, trials: impl IntoIterator<Item = Trial>) -> RecordedTable {
        let entry = |trial: Trial| (trial.config, Measured { outcome: trial.outcome, seconds: Seconds::default() });
        RecordedTable { space, results: trials.into_iter().map(entry).collect() }
    }

    /// The table of these records, with the seconds they took when they were measured.
    ///
    /// # Errors
    /// [`ConfigError`] where a record's configuration is not one of the space's.
    pub fn from_records(space: Arc<Space>, records: &[Record]) -> Result<RecordedTable, ConfigError> {
        let entry = |record: &Record| {
            let measured = Measured { outcome: record.outcome.clone(), seconds: record.seconds };
            Ok((space.config_from_json(&record.config)?, measured))
        };
        let results = records.iter().map(entry).collect::<Result<_, ConfigError>>()?;
        Ok(RecordedTable { space, results })
    }

    /// The space whose configurations the table holds.
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// How many configurations are recorded.
    pub fn len(&self) -> usize {
        self.results.len()
    }

    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.results.is_empty()
    }

    /// The best recorded median in nanoseconds; `None` where every trial failed.
    pub fn optimum_ns(&self) -> Option<f64> {
        let medians = self.results.values().filter_map(|measured| Some(measured.outcome.timing()?.median_ns));
        medians.min_by(f64::total_cmp)
    }
}

impl Measure for RecordedTable {
    /// A configuration that is not in the table fails with [`ErrorClass::Unknown`].
    fn measure(
        &mut self,
        batch: &[Config],
        _best_ns: Option<f64>,
        done: &mut dyn FnMut(usize, Measured) -> ControlFlow<()>,
    ) -> Result<(), BoxError> {
        for (i, config) in batch.iter().enumerate() {
            let missing = || Measured {
                outcome: Outcome::Failed { class: ErrorClass::Unknown, message: "not in the recorded table".into() },
                seconds: Seconds::default(),
            };
            if done(i, self.results.get(config).cloned().unwrap_or_else(missing)).is_break() {
                break;
            }
        }
        Ok(())
    }
}
