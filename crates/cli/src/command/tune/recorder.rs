//! Trials on their way into the database.

use std::time::Instant;

use tilewright_tune::record::least_ns;
use tilewright_tune::{Record, Report, RunTime, StoreError, Task, TaskKey, Winner, pause};

use crate::clock::since_1970;
use crate::database::{Database, Opened};

/// Keeps the trials of a batch until they are committed.
#[derive(Debug)]
pub struct Recorder {
    /// None once it is closed.
    opened: Option<Opened>,
    database: Database,
    key: TaskKey,
    /// What is recorded as faster than this is measured again and gives way.
    least_ns: f64,
    search: String,
    seed: u64,
    toolchain: String,
    start: Instant,
    start_unix_ms: u64,
    pending: Vec<Record>,
}

impl Recorder {
    /// A recorder for the trials of one search that starts now.
    pub fn new(opened: Opened, task: &Task, key: TaskKey, search: String, seed: u64) -> Recorder {
        Recorder {
            database: opened.database.clone(),
            opened: Some(opened),
            least_ns: least_ns(&task.setting.workload, &key.target, key.threads.into()),
            key,
            search,
            seed,
            toolchain: toolchain(),
            start: pause::now(),
            start_unix_ms: since_1970().as_millis() as u64,
            pending: Vec::new(),
        }
    }

    /// Where it records.
    pub fn database(&self) -> &Database {
        &self.database
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
            steps: report.steps.to_string(),
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
            is_imported: false,
        });
    }

    /// Writes what has been noted since the last time.
    ///
    /// # Errors
    /// Where the database cannot be written, and then the trials stay noted, or is gone.
    pub fn commit(&mut self) -> Result<(), StoreError> {
        if !self.pending.is_empty() {
            let opened = self.opened.as_mut().expect("invariant: nothing is noted after the end");
            opened.store.insert(&self.pending, self.least_ns)?;
            self.pending.clear();
            opened.check()?;
        }
        Ok(())
    }

    /// Writes what is left, and the winner where there is one, and closes the database: whoever copies the file then need not
    /// know of the log beside it.
    ///
    /// # Errors
    /// Where the database cannot be written, or is gone.
    pub fn conclude(&mut self, winner: Option<&Winner>) -> Result<(), StoreError> {
        self.commit()?;
        let Some(mut opened) = self.opened.take() else { return Ok(()) };
        if let Some(winner) = winner {
            opened.store.set_winner(winner)?;
        }
        opened.check()
    }
}

/// The compiler, as records name it.
pub fn toolchain() -> String {
    format!("LLVM {}", tilewright_codegen::llvm_version())
}
