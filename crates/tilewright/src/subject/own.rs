//! Users' programs as subjects of runs: candidates are command lines.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tilewright_device::Caches;
use tilewright_device::command::{CommandOptions, Commands, Objectives};
use tilewright_device::folder::Folder;
use tilewright_ir::Target;
use tilewright_search::{Config, Describe, Limits, Measure, Space, Subject};
use tilewright_tune::{TaskKey, Validator};

use super::command::COMMAND;
use super::kernel::KERNEL;
use super::workload::threads_in_records;
use super::{HeadOfSearch, Runnable};
use crate::best::{Best, ParetoPoint, target_name};
use crate::database::Database;
use crate::error::Error;
use crate::observer::Observer;
use crate::request::Settings;
use crate::run::head_start::own_search;

/// Command of a request, or a kernel that a command calls, as the subject of a run.
pub(crate) struct OwnRun<'a> {
    settings: &'a Settings,
    key: TaskKey,
    space: Arc<Space>,
    steps: CommandLines,
    is_verified: bool,
    /// Folder of the files that all candidates read, kept until the run ends.
    _folder: Option<Folder>,
}

/// Command lines of a configuration.
struct CommandLines {
    space: Arc<Space>,
    options: CommandOptions,
}

impl Describe for CommandLines {
    fn describe(&self, config: &Config) -> String {
        self.options.steps(&self.space, config)
    }
}

impl<'a> OwnRun<'a> {
    /// Makes the subject of a space measured by commands, with its name in records.
    pub fn new(
        settings: &'a Settings,
        workload: String,
        target: &Target,
        space: Arc<Space>,
        options: CommandOptions,
    ) -> Self {
        let key = TaskKey {
            workload,
            target: target_name(target, Caches::Warm),
            template: space.name().to_owned(),
            threads: threads_in_records(settings.threads),
        };
        let is_verified = options.check.is_some();
        let steps = CommandLines { space: space.clone(), options };
        OwnRun { settings, key, space, steps, is_verified, _folder: None }
    }

    /// Makes candidates verify their results themselves, using the content of a folder.
    pub fn that_checks(self, folder: Folder) -> Self {
        OwnRun { is_verified: true, _folder: Some(folder), ..self }
    }
}

impl Runnable for OwnRun<'_> {
    fn key(&self) -> &TaskKey {
        &self.key
    }

    fn space(&self) -> &Arc<Space> {
        &self.space
    }

    fn validator(&self) -> Validator {
        Validator::of_space(&self.space)
    }

    fn least_ns(&self) -> f64 {
        0.0
    }

    fn limits(&self) -> Limits {
        self.steps.options.limits()
    }

    fn subject(&self) -> Subject<'_> {
        Subject::described(&self.space, &self.steps)
    }

    fn search(&self, observer: &dyn Observer) -> Result<HeadOfSearch, Error> {
        own_search(self.settings, &self.space, observer)
    }

    fn start(&self, _stop: &AtomicBool, _observer: &dyn Observer) -> Result<Option<Box<dyn Measure + '_>>, Error> {
        let failed = |error: std::io::Error| Error::failed("a folder for what is built").because(error);
        let commands = Commands::new(self.space.clone(), self.steps.options.clone()).map_err(failed)?;
        Ok(Some(Box::new(commands)))
    }

    fn is_verified(&self) -> bool {
        self.is_verified
    }

    fn objectives(&self) -> Option<&Objectives> {
        Some(&self.steps.options.objectives)
    }

    fn describe(&self, best: Best, config: &Config) -> Best {
        Best {
            value: Some(self.steps.options.objectives.leading().value(best.median_ns)),
            commands: Some(self.steps.describe(config)),
            ..best
        }
    }
}

/// Whether a name in records is of a user's command or kernel.
pub fn is_own(workload: &str) -> bool {
    [COMMAND, KERNEL].iter().any(|kind| workload.strip_prefix(kind).is_some_and(|rest| rest.starts_with(':')))
}

/// Best record of a user's command or kernel on a machine; `None` if there is none.
///
/// # Errors
/// If the database cannot be read.
pub fn best_own(database: &Database, name: &str, target: &Target, threads: usize) -> Result<Option<Best>, Error> {
    let Some(store) = database.open_to_read()? else { return Ok(None) };
    let (target, threads) = (target_name(target, Caches::Warm), threads_in_records(threads));
    let all = |_: &str| Validator::default();
    let found = || -> Result<Option<Best>, tilewright_tune::StoreError> {
        let Some(best) = store.best(name, &target, threads, None, &all)?.0 else { return Ok(None) };
        let best = Best::of_own(best);
        let (records, _) = store.trials_of(name, &target, threads, Some(&best.template), &all)?;
        let steps = records.iter().find(|record| record.config == best.config).map(|record| record.steps.clone());
        let objectives = steps.as_deref().and_then(Objectives::of_steps);
        let value = objectives.as_ref().map(|objectives| objectives.leading().value(best.median_ns));
        let pareto = objectives.as_ref().map_or(Vec::new(), |objectives| ParetoPoint::of_records(objectives, &records));
        Ok(Some(Best { value, commands: steps, pareto, ..best }))
    };
    found().map_err(|error| database.refuse(error))
}
