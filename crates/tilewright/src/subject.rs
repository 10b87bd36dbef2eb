//! Subjects of runs: workloads, commands and kernels, behind one interface.

pub mod command;
mod files;
pub mod kernel;
pub mod own;
pub mod workload;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tilewright_device::command::Objectives;
use tilewright_search::{Candidate, Config, Limits, Measure, Search, Space, Subject};
use tilewright_tune::{Store, StoreError, TaskKey, Validator};

use crate::best::Best;
use crate::error::Error;
use crate::observer::Observer;

/// Search of a run, and the configurations that are measured before it proposes any.
pub(crate) type HeadOfSearch = (Box<dyn Search>, Vec<Config>);

/// Subject of a run, once its request has been understood.
pub(crate) trait Runnable: Sync {
    /// Key of its trials.
    fn key(&self) -> &TaskKey;

    /// Space of its configurations.
    fn space(&self) -> &Arc<Space>;

    /// Validator of records: they must be of this space.
    fn validator(&self) -> Validator;

    /// Lower bound on plausible times, in nanoseconds.
    fn least_ns(&self) -> f64;

    /// Limits of builds and runs.
    fn limits(&self) -> Limits;

    /// Space with the descriptions of its configurations.
    fn subject(&self) -> Subject<'_>;

    /// Makes the search, with the configurations to begin with.
    ///
    /// # Errors
    /// If there is no such search, or the requested source has nothing to learn from.
    fn search(&self, observer: &dyn Observer) -> Result<HeadOfSearch, Error>;

    /// Configurations recorded as the best under other conditions, to begin with.
    ///
    /// # Errors
    /// If the store fails.
    fn best_elsewhere(&self, _store: &Store) -> Result<Vec<Config>, StoreError> {
        Ok(Vec::new())
    }

    /// Starts the measurement; `None` after an interrupt.
    ///
    /// # Errors
    /// If memory does not suffice or workers do not start.
    fn start(&self, stop: &AtomicBool, observer: &dyn Observer) -> Result<Option<Box<dyn Measure + '_>>, Error>;

    /// Minimum batch size that keeps the measurement busy.
    fn least_batch(&self) -> usize {
        1
    }

    /// Whether the measuring device is emulated, so that times are meaningless.
    fn is_emulated(&self) -> bool {
        false
    }

    /// Measures the peak of the machine, in 10⁹ operations a second, if possible.
    fn peak_gflops(&self) -> Option<f64> {
        None
    }

    /// Estimated seconds of a start, and of a kernel run at peak throughput.
    fn start_and_run_s(&self, _peak_gflops: f64) -> Option<(f64, f64)> {
        None
    }

    /// Baseline of the winner.
    fn baseline(&self) -> Option<Candidate> {
        None
    }

    /// Whether every measured candidate has given the correct result.
    fn is_verified(&self) -> bool;

    /// Throughput for a time, in 10⁹ operations a second; 0 without an operation count.
    fn gflops(&self, _ns: f64) -> f64 {
        0.0
    }

    /// Metrics of a user's program, which may have changed since it was recorded.
    fn objectives(&self) -> Option<&Objectives> {
        None
    }

    /// Adds the form in which users know a configuration to a result.
    fn describe(&self, best: Best, _config: &Config) -> Best {
        best
    }
}
