//! Recorder of trials: writes them to the database in batches.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tilewright_search::{Event, Report, Space, pause};
use tilewright_tune::record::least_ns;
use tilewright_tune::{Record, RunTime, StoreError, Task, TaskKey, Winner};

use crate::clock::since_1970;
use crate::database::{Database, Opened};
use crate::error::Error;
use crate::version::BUILD;

/// Recorder that buffers the trials of a batch until they are committed.
#[derive(Debug)]
pub struct Recorder {
    /// Open database; `None` once it is closed.
    opened: Option<Opened>,
    database: Database,
    space: Arc<Space>,
    key: TaskKey,
    /// Time below which a record is implausible: the configuration is measured again, and the record
    /// replaced.
    least_ns: f64,
    search: String,
    seed: u64,
    toolchain: String,
    start: Instant,
    start_unix_ms: u64,
    /// Start of the current pause, if the clock is paused.
    rests: Option<Instant>,
    pending: Vec<Record>,
}

impl Recorder {
    /// Makes a recorder for the trials of a search that starts now.
    pub fn new(opened: Opened, task: &Task, key: TaskKey, search: String, seed: u64) -> Recorder {
        let least_ns = least_ns(&task.setting.workload, &key.target, key.threads.into());
        Recorder::of_space(opened, &task.space, least_ns, key, search, seed)
    }

    /// Makes the recorder of a space, with a lower bound on its times.
    pub(crate) fn of_space(
        opened: Opened,
        space: &Arc<Space>,
        least_ns: f64,
        key: TaskKey,
        search: String,
        seed: u64,
    ) -> Recorder {
        Recorder {
            database: opened.database.clone(),
            opened: Some(opened),
            space: Arc::clone(space),
            least_ns,
            key,
            search,
            seed,
            toolchain: toolchain(),
            start: pause::now(),
            start_unix_ms: since_1970().as_millis() as u64,
            rests: None,
            pending: Vec::new(),
        }
    }

    /// Buffers a trial.
    fn add(&mut self, report: &Report) {
        let config = self.space.config_to_json(&report.trial.config);
        self.pending.push(Record {
            workload: self.key.workload.clone(),
            target: self.key.target.clone(),
            template: self.key.template.clone(),
            threads: self.key.threads,
            config,
            outcome: report.trial.outcome.clone(),
            seconds: report.seconds,
            steps: report.steps.to_string(),
            search: self.search.clone(),
            seed: self.seed,
            trial: report.number,
            version: BUILD.to_owned(),
            toolchain: self.toolchain.clone(),
            unix_time: since_1970().as_secs(),
            limit: report.limit,
            conditions: report.conditions.clone(),
            run: Some(RunTime {
                start_unix_ms: self.start_unix_ms,
                elapsed_s: (pause::now() - self.start).as_secs_f64(),
            }),
            is_imported: false,
        });
    }

    /// Writes the buffered trials.
    ///
    /// # Errors
    /// If the database cannot be written, in which case the trials stay buffered, or is gone.
    fn commit(&mut self) -> Result<(), StoreError> {
        if !self.pending.is_empty() {
            let opened = self.opened.as_mut().expect("invariant: nothing is noted after the end");
            opened.store.insert(&self.pending, self.least_ns)?;
            self.pending.clear();
            opened.check()?;
        }
        Ok(())
    }

    /// Writes the remaining trials and the winner, if there is one, and closes the database, so that users
    /// who copy the file need not know of the log beside it.
    ///
    /// # Errors
    /// If the database cannot be written, or is gone.
    fn conclude(&mut self, winner: Option<&Winner>) -> Result<(), StoreError> {
        self.commit()?;
        let Some(mut opened) = self.opened.take() else { return Ok(()) };
        if let Some(winner) = winner {
            opened.store.set_winner(winner)?;
        }
        opened.check()
    }
}

/// Shared recorder, for the run itself and for handlers that end the program in the middle of it.
#[derive(Debug, Clone)]
pub struct Recording(Arc<Mutex<Recorder>>);

impl Recording {
    /// Wraps a recorder.
    pub fn new(recorder: Recorder) -> Recording {
        Recording(Arc::new(Mutex::new(recorder)))
    }

    /// Pauses the search's clock.
    pub fn rest(&self) {
        lock(&self.0).rests = Some(pause::now());
    }

    /// Resumes the search's clock.
    pub fn go_on(&self) {
        let mut recorder = lock(&self.0);
        if let Some(since) = recorder.rests.take() {
            recorder.start += pause::now() - since;
        }
    }

    /// Buffers a trial, or commits a batch. If the database is busy, `tell` receives a message, and the
    /// records are written with a later batch.
    ///
    /// # Errors
    /// If the database cannot be written, or is gone.
    pub fn take_note(&self, event: &Event, tell: &dyn Fn(String)) -> Result<(), StoreError> {
        let mut recorder = lock(&self.0);
        match event {
            Event::Trial(report) => recorder.add(report),
            Event::Batch(_) => match recorder.commit() {
                Err(error @ StoreError::Busy { .. }) => tell(format!("the database is {error}; going on")),
                committed => return committed,
            },
        }
        Ok(())
    }

    /// Commits buffered trials.
    ///
    /// # Errors
    /// If the database cannot be written, or is gone.
    pub fn commit(&self) -> Result<(), Error> {
        let mut recorder = lock(&self.0);
        recorder.commit().map_err(|error| recorder.database.failure(&error))
    }

    /// Commits buffered trials and the winner, if there is one, and closes the database.
    ///
    /// # Errors
    /// If the database cannot be written, or is gone.
    pub fn conclude(&self, winner: Option<&Winner>) -> Result<(), StoreError> {
        lock(&self.0).conclude(winner)
    }
}

/// Locks a mutex, even if another thread panicked while holding it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Compiler version as recorded with trials.
pub fn toolchain() -> String {
    tilewright_codegen::llvm_version().map_or("no LLVM".to_owned(), |version| format!("LLVM {version}"))
}
