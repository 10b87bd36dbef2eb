//! Records: trials with everything needed to repeat, compare and resume them.

mod fleet;
mod lines;
mod store;
mod store_error;
mod validator;
mod winner;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use tilewright_search::{Conditions, ConfigError, Limit, Outcome, Seconds, Space, Trial};

pub use lines::{RecordError, RecordLine, read_lines};
pub use store::{BestRecord, Exported, Imported, Store, Validators};
pub use store_error::StoreError;
pub use validator::{PassedOver, RejectReason, Validator, least_ns};
pub use winner::Winner;

/// Key of the trials of one space on one machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TaskKey {
    /// As in [`Record`].
    pub workload: String,
    /// Target, as in [`Record`].
    pub target: String,
    /// Template, as in [`Record`].
    pub template: String,
    /// Threads, as in [`Record`].
    pub threads: u32,
}

/// Record of a trial. Workload, target, template, threads and configuration together identify it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The operator with its sizes, for example `matmul:m=1024,n=1024,k=1024`.
    pub workload: String,
    /// The machine that ran it, as the target describes itself.
    pub target: String,
    /// The template that declares the space.
    pub template: String,
    /// Threads the kernel ran on.
    pub threads: u32,
    /// The configuration: an object from parameter to value.
    pub config: Json,
    /// Outcome of the trial.
    pub outcome: Outcome,
    /// Seconds of building, running and verifying.
    pub seconds: Seconds,
    /// The schedule steps that the configuration stood for, as text; empty if it could not be instantiated.
    pub steps: String,
    /// The search that proposed it, with its options.
    pub search: String,
    /// The seed of that search.
    pub seed: u64,
    /// The trial's number in the workload's history.
    pub trial: u64,
    /// The version of Tilewright that measured it.
    pub version: String,
    /// The compiler that built it, with its version.
    pub toolchain: String,
    /// Time of the measurement, in seconds since 1970.
    pub unix_time: u64,
    /// Time within its run; absent where an earlier version recorded it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunTime>,
    /// The limit that it failed of; absent where it did not fail of one that can be raised, and in records of
    /// versions that did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
    /// Conditions of the measurement, as far as they are known.
    #[serde(flatten)]
    pub conditions: Conditions,
    /// Whether it came by import, so that it need not have been measured on this machine. It does not travel.
    #[serde(skip)]
    pub is_imported: bool,
}

/// The place of a trial in the run that measured it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RunTime {
    /// Start of the run, in milliseconds since 1970, which tells runs apart.
    pub start_unix_ms: u64,
    /// Seconds from the start of the run until the trial was complete, by the wall clock.
    pub elapsed_s: f64,
}

impl Record {
    /// Refuses records that no version writes, and numbers that JSON cannot express.
    ///
    /// # Errors
    /// Names the field in one line.
    fn check(&self) -> Result<(), String> {
        if !self.config.is_object() {
            return Err("config is not an object".into());
        }
        if self.threads == 0 {
            return Err("threads is 0".into());
        }
        let Seconds { build, run, verify } = self.seconds;
        let elapsed_s = self.run.map_or(0.0, |run| run.elapsed_s);
        let Conditions { frequency_mhz, temperature_c, .. } = self.conditions;
        let timing = self.outcome.timing().map_or([0.0; 2], |timing| [timing.min_ns, timing.spread]);
        let finite = [
            ("build", build),
            ("run", run),
            ("verify", verify),
            ("elapsed_s", elapsed_s),
            ("min_ns", timing[0]),
            ("spread", timing[1]),
            ("frequency_mhz", frequency_mhz.unwrap_or(0.0)),
            ("temperature_c", temperature_c.unwrap_or(0.0)),
        ];
        match finite.iter().find(|(_, number)| !number.is_finite()) {
            Some((name, number)) => Err(format!("{name} {number} is not a number")),
            None => Ok(()),
        }
    }

    /// The record as a trial of `space`.
    ///
    /// # Errors
    /// [`ConfigError`] if the configuration is not one of the space's, as after a change of the template.
    pub fn trial(&self, space: &Space) -> Result<Trial, ConfigError> {
        Ok(Trial { config: space.config_from_json(&self.config)?, outcome: self.outcome.clone() })
    }
}
