//! Winners of final races.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::Record;

/// Winner of a run's final race. Its JSON accompanies the record of its trial and does not repeat the fields
/// of the record.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Winner {
    /// Workload, as in [`Record`].
    #[serde(skip)]
    pub workload: String,
    /// Target, as in [`Record`].
    #[serde(skip)]
    pub target: String,
    /// Template, as in [`Record`].
    #[serde(skip)]
    pub template: String,
    /// Threads, as in [`Record`].
    #[serde(skip)]
    pub threads: u32,
    /// Configuration, as in [`Record`].
    #[serde(skip)]
    pub config: Json,
    /// Median over the rounds of the race, in nanoseconds.
    pub median_ns: f64,
    /// Margin over the runner-up, as a share of the winner's median; `None` for a single finalist.
    pub margin: Option<f64>,
    /// Relative spread of the rounds: the larger of the winner's and the runner-up's, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
    /// Configuration of the runner-up; `None` for a single finalist.
    pub runner_up: Option<Json>,
    /// Throughput at the median, in GFLOP/s.
    pub gflops: f64,
    /// Whether the output was compared with the reference in the race.
    pub verified: bool,
    /// Version, as in [`Record`].
    pub version: String,
    /// Toolchain, as in [`Record`].
    pub toolchain: String,
    /// Time of the measurement, as in [`Record`].
    pub unix_time: u64,
    /// Whether it was imported, as in [`Record`].
    #[serde(skip)]
    pub is_imported: bool,
}

impl Winner {
    /// Refuses winners that no version can have written, and numbers that JSON cannot express.
    ///
    /// # Errors
    /// A message that names the number, in one line.
    pub(super) fn check(&self) -> Result<(), String> {
        if !(self.median_ns > 0.0 && self.median_ns.is_finite()) {
            return Err(format!("winner: median_ns {} is not a positive number", self.median_ns));
        }
        // The throughput of a command is 0, since its operations are not counted.
        if !(self.gflops >= 0.0 && self.gflops.is_finite()) {
            return Err(format!("winner: gflops {} is not a number of at least 0", self.gflops));
        }
        for (name, number) in [("margin", self.margin), ("spread", self.spread)] {
            if let Some(number) = number.filter(|number| !number.is_finite()) {
                return Err(format!("winner: {name} {number} is not a number"));
            }
        }
        Ok(())
    }

    /// Winner with the configuration and key of this record.
    pub(crate) fn of(self, record: &Record) -> Winner {
        let Record { workload, target, template, threads, config, .. } = record.clone();
        Winner { workload, target, template, threads, config, ..self }
    }
}
