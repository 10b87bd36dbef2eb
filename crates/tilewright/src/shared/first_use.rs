//! Verification of a shared store's entry before its first use: its kernel is built and run in a worker, and
//! the whole output is compared with the reference.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tilewright_device::device::{RoundLength, WorkerCommand};
use tilewright_device::protocol::ProgramSource;
use tilewright_device::{Caches, DeviceOptions};
use tilewright_search::{Conditions, Outcome, Seconds};
use tilewright_tune::Record;

use crate::choice::Choice;
use crate::clock::since_1970;
use crate::database::Database;
use crate::error::Error;
use crate::run::recorder::toolchain;
use crate::shared::SharedStore;
use crate::subject::workload::{start_device, task_key};
use crate::version::BUILD;

/// Minimum time and samples of the measurement that is recorded.
const ROUND: RoundLength = RoundLength { time: Duration::from_millis(25), min_samples: 2 };
/// Name of the search in these records.
const SEARCH: &str = "store";

/// Builds, verifies and times a configuration with caches in this state; returns the record of the trial,
/// which may be a failure.
///
/// # Errors
/// If memory does not suffice or workers do not start.
///
/// # Cost
/// The time of the reference, some tenths of a second for a layer of a network.
pub(crate) fn tried(choice: &Choice, caches: Caches, worker: &WorkerCommand) -> Result<Record, Error> {
    let task = &choice.task;
    let setting = &task.setting;
    let options = DeviceOptions { n_workers: 1, caches, ..DeviceOptions::new(worker.clone(), setting.n_threads) };
    let device = start_device(setting.workload.clone(), &setting.target, options, &AtomicBool::new(false), &())?;
    let mut device = device.expect("nobody stops the start");
    let steps = task.steps_text(&choice.config);
    let failed = |error: std::io::Error| Error::failed(&error).because(error);
    let racers = device.start_race(&[ProgramSource::Steps(steps.clone())], &|| false).map_err(failed)?;
    let mut racer = racers.into_iter().next().expect("a race has as many candidates as sources");
    device.race_round(&mut racer, ROUND).map_err(failed)?;
    let key = task_key(task, caches);
    Ok(Record {
        workload: key.workload,
        target: key.target,
        template: key.template,
        threads: key.threads,
        config: task.space.config_to_json(&choice.config),
        outcome: device.end_race(racer),
        seconds: Seconds::default(),
        steps: steps.to_string(),
        search: SEARCH.to_owned(),
        seed: 0,
        trial: 0,
        version: BUILD.to_owned(),
        toolchain: toolchain(),
        unix_time: since_1970().as_secs(),
        run: None,
        limit: None,
        conditions: Conditions::default(),
        is_imported: false,
    })
}

/// Checks that the record is of a kernel with a correct result.
pub(crate) fn is_right(record: &Record) -> Result<(), String> {
    match &record.outcome {
        Outcome::Measured(_) => Ok(()),
        Outcome::Failed { class, message } => Err(format!("it failed here: {class}: {message}")),
    }
}

impl SharedStore {
    /// Verifies a winner of the store, and records the result.
    ///
    /// # Errors
    /// If it must not be used, with the reason in one line.
    pub(crate) fn try_out(
        &self,
        choice: &Choice,
        caches: Caches,
        worker: &WorkerCommand,
        database: &Database,
    ) -> Result<(), String> {
        let record = tried(choice, caches, worker).map_err(|error| error.to_string())?;
        let kept = database.open_to_write().and_then(|mut opened| {
            opened.store.insert(std::slice::from_ref(&record), 0.0).map_err(|error| database.failure(&error))
        });
        if let Err(why) = kept {
            self.note(&format!("a check of an entry is not recorded: {why}"));
        }
        is_right(&record)
    }
}
