//! Records of earlier runs.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use tilewright_search::{Config, ErrorClass, Limits, Seconds, Space, Trial};
use tilewright_tune::{PassedOver, Record, Store, StoreError, Task, TaskKey, Validator};

use crate::best::trials_of;
use crate::format::count;
use crate::observer::{Note, Observer};

/// Usable trials of earlier runs.
#[derive(Debug, Default)]
pub struct Earlier {
    /// Plausible trials.
    pub trials: Vec<Trial>,
    /// Number of failures by class that a higher limit may avoid.
    pub cut_off: BTreeMap<ErrorClass, u64>,
    /// Configurations of imported trials.
    pub imported: HashSet<Config>,
    /// Approximate seconds of each trial on this machine, with its median in nanoseconds if it succeeded.
    pub history: Vec<(f64, Option<f64>)>,
}

impl Earlier {
    /// Approximate total time of this machine's searches that measured these trials.
    pub(crate) fn searched(&self) -> Duration {
        let seconds = self.history.iter().map(|(seconds, _)| seconds).sum();
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// Reads the plausible trials of earlier runs that belong to the current space. Failures under lower limits
/// than these are left out, as the configurations may succeed now; they are measured again if the search
/// proposes them.
///
/// # Errors
/// If the database fails.
pub fn earlier(
    store: &Store,
    key: &TaskKey,
    task: &Task,
    limits: &Limits,
    observer: &dyn Observer,
) -> Result<Earlier, StoreError> {
    earlier_of(store, key, &task.space, &Validator::of(task), limits, observer)
}

/// Reads the records of earlier runs on a space.
pub(crate) fn earlier_of(
    store: &Store,
    key: &TaskKey,
    space: &Space,
    validator: &Validator,
    limits: &Limits,
    observer: &dyn Observer,
) -> Result<Earlier, StoreError> {
    let mut passed_over = PassedOver::default();
    let mut records = trials_of(store, key, &|_| validator.clone(), &mut passed_over)?;
    if passed_over.total() > 0 {
        observer.note(Note::Message(passed_over.to_string()));
    }
    let n_records = records.len();
    records.retain(|record| !may_do_better(record, limits));
    let n_below = n_records - records.len();
    if n_below > 0 {
        let n_below = count(n_below as u64, "candidate");
        observer.note(Note::Message(format!("{n_below} that failed of lower limits may be tried again")));
    }
    let mut earlier = Earlier::default();
    for record in &records {
        let Ok(trial) = record.trial(space) else { continue };
        if record.is_imported {
            earlier.imported.insert(trial.config.clone());
        } else {
            let Seconds { build, run, verify } = record.seconds;
            earlier.history.push((build.max(run + verify), trial.outcome.timing().map(|timing| timing.median_ns)));
        }
        if let (Some(class), Some(_)) = (trial.outcome.class(), record.limit) {
            *earlier.cut_off.entry(class).or_default() += 1;
        }
        earlier.trials.push(trial);
    }
    Ok(earlier)
}

/// Whether a record is a failure under a lower limit than these.
pub(crate) fn may_do_better(record: &Record, limits: &Limits) -> bool {
    record.limit.is_some_and(|limit| limit.is_below(limits))
}

/// Number of failures by class.
pub fn errors_of(trials: &[Trial]) -> BTreeMap<ErrorClass, u64> {
    let mut errors = BTreeMap::new();
    for class in trials.iter().filter_map(|trial| trial.outcome.class()) {
        *errors.entry(class).or_default() += 1;
    }
    errors
}
