//! Which configuration of a kernel runs: the best that is recorded, or what the model of the machine guesses.

use tilewright::{Caches, Error, Session};
use tilewright_ir::op::Workload;
use tilewright_ir::{Program, Target};
use tilewright_tune::{Config, Setting, Task};

/// Where a kernel's configuration comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Source {
    /// It was measured: so many nanoseconds.
    Recorded(f64),
    /// A model of the machine ranks it first.
    Guessed,
}

/// A kernel's configuration.
pub struct Choice {
    /// What it is a configuration of.
    pub task: Task,
    /// It.
    pub config: Config,
    /// Where it comes from.
    pub source: Source,
}

impl Choice {
    /// The scheduled program.
    ///
    /// # Errors
    /// Where a step is illegal: the template's fault.
    pub fn program(&self) -> Result<Program, Error> {
        let workload = &self.task.setting.workload;
        let error = |(at, why)| Error::failed(format!("{workload}: step {} cannot be done: {why}", at + 1));
        self.task.program(&self.config).map_err(error)
    }
}

/// The best configuration that is known of a workload for a run that finds such caches; where none is, the
/// best with others.
///
/// # Errors
/// Where records cannot be read, or no template has a configuration for it.
pub fn choose(
    session: &Session,
    workload: &Workload,
    target: &Target,
    threads: usize,
    caches: Caches,
) -> Result<Choice, Error> {
    let setting = || Setting { workload: workload.clone(), target: target.clone(), n_threads: threads };
    for caches in [caches, Caches::ColdConstants, Caches::Warm] {
        let Some(best) = session.best_on(workload, target, threads, caches)? else { continue };
        let task = Task::new(setting(), Some(&best.template)).map_err(Error::input)?;
        // A space that has changed since has other configurations.
        if let Ok(config) = task.space.config_from_json(&best.config) {
            return Ok(Choice { task, config, source: Source::Recorded(best.median_ns) });
        }
    }
    let task = Task::new(setting(), None).map_err(Error::input)?;
    let config = task.first_guess(0).unwrap_or_else(|| task.space.config_at(0));
    Ok(Choice { task, config, source: Source::Guessed })
}
