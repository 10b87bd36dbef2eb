//! Trials on their way into the database.

use std::time::Instant;

use tilewright_device::device::steps_text;
use tilewright_tune::{Record, Report, RunTime, Store, StoreError, Task, TaskKey, Winner, pause};

use crate::clock::since_1970;

/// Keeps the trials of a batch until they are committed.
#[derive(Debug)]
pub struct Recorder {
    /// None once it is closed.
    store: Option<Store>,
    key: TaskKey,
    search: String,
    seed: u64,
    toolchain: String,
    start: Instant,
    start_unix_ms: u64,
    pending: Vec<Record>,
}

impl Recorder {
    /// A recorder for the trials of one search that starts now.
    pub fn new(store: Store, key: TaskKey, search: String, seed: u64) -> Recorder {
        let start_unix_ms = since_1970().as_millis() as u64;
        let (start, toolchain) = (pause::now(), toolchain());
        Recorder { store: Some(store), key, search, seed, toolchain, start, start_unix_ms, pending: Vec::new() }
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
            unix_time: since_1970().as_secs(),
            limit: report.limit,
            run: Some(RunTime {
                start_unix_ms: self.start_unix_ms,
                elapsed_s: (pause::now() - self.start).as_secs_f64(),
            }),
        });
    }

    /// Writes what has been noted since the last time.
    ///
    /// # Errors
    /// Where the database cannot be written; the trials stay noted.
    pub fn commit(&mut self) -> Result<(), StoreError> {
        if !self.pending.is_empty() {
            let store = self.store.as_mut().expect("invariant: nothing is noted after the end");
            store.insert(&self.pending)?;
            self.pending.clear();
        }
        Ok(())
    }

    /// Writes what is left, and the winner where there is one, and closes the database: whoever copies the file then need not
    /// know of the log beside it.
    ///
    /// # Errors
    /// Where the database cannot be written.
    pub fn conclude(&mut self, winner: Option<&Winner>) -> Result<(), StoreError> {
        self.commit()?;
        match (self.store.take(), winner) {
            (Some(mut store), Some(winner)) => store.set_winner(winner),
            _ => Ok(()),
        }
    }
}

/// The compiler, as records name it.
pub fn toolchain() -> String {
    format!("LLVM {}", tilewright_codegen::llvm_version())
}
