//! Records: trials with everything needed to reproduce, compare and resume them.

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

/// Key of a tuning task: the trials of one space on one machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TaskKey {
    /// Workload, as in [`Record`].
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
    /// Operator with its sizes, for example `matmul:m=1024,n=1024,k=1024`.
    pub workload: String,
    /// Name of the target on which the trial ran.
    pub target: String,
    /// Template that declares the space.
    pub template: String,
    /// Number of threads.
    pub threads: u32,
    /// Configuration: an object from parameter to value.
    pub config: Json,
    /// Outcome of the trial.
    pub outcome: Outcome,
    /// Seconds of building, running and verifying.
    pub seconds: Seconds,
    /// Schedule steps as text; empty if the configuration could not be instantiated.
    pub steps: String,
    /// Search that proposed the configuration, with its options.
    pub search: String,
    /// Seed of the search.
    pub seed: u64,
    /// Number in the workload's history.
    pub trial: u64,
    /// Tilewright version that measured the trial.
    pub version: String,
    /// Compiler that built the kernel, with its version.
    pub toolchain: String,
    /// Unix time of the measurement, in seconds.
    pub unix_time: u64,
    /// Time within its run; `None` in records of early versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunTime>,
    /// Limit that caused the failure and may be raised; `None` for other outcomes and in records of early
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
    /// Conditions of the measurement, as far as known.
    #[serde(flatten)]
    pub conditions: Conditions,
    /// Whether the record was imported, so that it may have been measured on another machine. Exports do not
    /// contain this.
    #[serde(skip)]
    pub is_imported: bool,
}

/// Time of a trial within the run that measured it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RunTime {
    /// Unix time of the run's start in milliseconds, which identifies the run.
    pub start_unix_ms: u64,
    /// Wall-clock seconds from the run's start to the trial's end.
    pub elapsed_s: f64,
}

impl Record {
    /// Refuses records that no version can have written, and numbers that JSON cannot express.
    ///
    /// # Errors
    /// A message that names the field, in one line.
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

    /// Converts the record to a trial of `space`.
    ///
    /// # Errors
    /// [`ConfigError`] if the configuration is not in the space, for example after a change of the template.
    pub fn trial(&self, space: &Space) -> Result<Trial, ConfigError> {
        Ok(Trial { config: space.config_from_json(&self.config)?, outcome: self.outcome.clone() })
    }
}
