//! Winners: what a run confirmed at its end.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::Record;

/// The configuration that a run confirmed at its end by measuring the leading candidates against each other.
/// As JSON it goes with the record of its trial, without what that says already.
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
    /// Median of the race's measurements, in nanoseconds.
    pub median_ns: f64,
    /// Margin to the runner-up, as a share of the own median; `None` where there was no other candidate.
    pub margin: Option<f64>,
    /// Spread of the rounds of it and of the runner-up, relative to their medians, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread: Option<f64>,
    /// The configuration of the runner-up.
    pub runner_up: Option<Json>,
    /// Throughput at the median, in 10^9 floating-point operations a second.
    pub gflops: f64,
    /// Whether its output was compared with the reference when it was measured again.
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
    /// Refuses winners that no version writes, and numbers that JSON cannot express.
    ///
    /// # Errors
    /// Names the number in one line.
    pub(super) fn check(&self) -> Result<(), String> {
        if !(self.median_ns > 0.0 && self.median_ns.is_finite()) {
            return Err(format!("winner: median_ns {} is not a positive number", self.median_ns));
        }
        // Nobody counts the operations of a command.
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

    /// The winner as the configuration of this record.
    pub(crate) fn of(self, record: &Record) -> Winner {
        let Record { workload, target, template, threads, config, .. } = record.clone();
        Winner { workload, target, template, threads, config, ..self }
    }
}
