//! Trials on their way into the database.

use std::time::{SystemTime, UNIX_EPOCH};

use tilewright_device::device::steps_text;
use tilewright_tune::{Record, Report, Store, StoreError, Task, TaskKey, Winner};

/// Keeps the trials of a batch until they are committed.
#[derive(Debug)]
pub struct Recorder {
    store: Store,
    key: TaskKey,
    search: String,
    seed: u64,
    toolchain: String,
    pending: Vec<Record>,
}

impl Recorder {
    /// A recorder for the trials of one search.
    pub fn new(store: Store, key: TaskKey, search: String, seed: u64) -> Recorder {
        Recorder { store, key, search, seed, toolchain: toolchain(), pending: Vec::new() }
    }

    /// Takes note of a trial.
    pub fn add(&mut self, task: &Task, report: &Report) {
        self.pending.push(Record {
            workload: self.key.workload.clone(),
            target: self.key.target.clone(),
            template: self.key.template.clone(),
            threads: self.key.threads,
            config: task.space.config_to_json(&report.trial.config),
            outcome: report.trial.outcome.clone(),
            seconds: report.seconds,
            steps: steps_text(&task.steps(&report.trial.config)),
            search: self.search.clone(),
            seed: self.seed,
            trial: report.number,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            toolchain: self.toolchain.clone(),
            unix_time: unix_time(),
        });
    }

    /// Writes what has been noted since the last time.
    ///
    /// # Errors
    /// Where the database cannot be written; the trials stay noted.
    pub fn commit(&mut self) -> Result<(), StoreError> {
        if !self.pending.is_empty() {
            self.store.insert(&self.pending)?;
            self.pending.clear();
        }
        Ok(())
    }

    /// Records the winner.
    ///
    /// # Errors
    /// Where the database cannot be written.
    pub fn set_winner(&mut self, winner: &Winner) -> Result<(), StoreError> {
        self.store.set_winner(winner)
    }
}

/// The compiler, as records name it.
pub fn toolchain() -> String {
    format!("LLVM {}", tilewright_codegen::llvm_version())
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
