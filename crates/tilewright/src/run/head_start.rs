//! Warm start of a search: transferred knowledge, and the configurations that are measured first.

use std::path::Path;
use std::sync::Arc;

use tilewright_search::{Config, Experience, Space};
use tilewright_tune::transfer::{experience, warm_start};
use tilewright_tune::{Task, TaskKey};

use super::transfer::{Transfer, best_of_file};
use crate::error::{Error, ErrorKind};
use crate::format::count;
use crate::observer::{Note, Observer};
use crate::request::Settings;
use crate::subject::HeadOfSearch;

fn no_search(error: impl std::fmt::Display) -> Error {
    Error::of(ErrorKind::NoSearch, error)
}

/// Makes the search of a task, with the configurations to try before its first proposal.
pub(crate) fn search_of(
    settings: &Settings,
    task: &Task,
    key: &TaskKey,
    observer: &dyn Observer,
) -> Result<HeadOfSearch, Error> {
    let most_programs = tilewright_search::most_experience(&settings.search).map_err(no_search)?;
    let mut problem = task.problem();
    let mut guesses = if settings.guesses { task.guesses(settings.seed) } else { Vec::new() };
    if let Some(transfer) = &settings.transfer {
        match learned(transfer, key, task, most_programs, observer) {
            Ok(Learned { experience, carried_over }) => {
                if experience.is_some() {
                    // Measurements from elsewhere say more than the template's model of the machine.
                    guesses.clear();
                }
                if experience.is_none() || settings.guesses {
                    guesses.splice(0..0, carried_over);
                }
                problem.experience = experience.map(Arc::new);
            }
            Err(error) if transfer.is_optional => {
                observer.note(Note::Message(format!("{}: {error}", key.workload)));
            }
            Err(error) => return Err(error),
        }
    }
    guesses.splice(0..0, settings.first.iter().cloned());
    let search = tilewright_search::build(&settings.search, problem, settings.seed).map_err(no_search)?;
    Ok((search, guesses))
}

/// Makes the search of a space without a model of its own, beginning with the best of another tuner's
/// results.
pub(crate) fn own_search(
    settings: &Settings,
    space: &Arc<Space>,
    observer: &dyn Observer,
) -> Result<HeadOfSearch, Error> {
    let file = settings.transfer.as_ref().map(Transfer::file).transpose()?;
    let search = tilewright_search::build(&settings.search, space, settings.seed).map_err(no_search)?;
    let best = |file: &Path| best_of_file(file, space, observer);
    let guesses: Vec<Config> = file.as_deref().map_or(Ok(Vec::new()), best)?;
    Ok((search, guesses))
}

/// Knowledge of earlier tasks for a search.
struct Learned {
    /// Experience for the search's model, if it has one.
    experience: Option<Experience>,
    /// Configurations to begin with.
    carried_over: Vec<Config>,
}

/// Prepares the records to learn from, for a search whose model, if it has one, can learn from this many
/// programs.
fn learned(
    transfer: &Transfer,
    key: &TaskKey,
    task: &Task,
    most_programs: Option<usize>,
    observer: &dyn Observer,
) -> Result<Learned, Error> {
    let tasks = transfer.tasks(key, observer)?;
    let n_tasks = count(tasks.len() as u64, "task");
    let experience = most_programs.map(|most| experience(&tasks, most)).filter(|experience| !experience.is_empty());
    let carried_over = warm_start(task, &tasks);
    let n_configs = count(carried_over.len() as u64, "configuration");
    let name = transfer.name();
    let told = match &experience {
        Some(experience) => {
            let n_programs = count(experience.contexts.len() as u64, "program");
            format!("learning from {n_programs} of {n_tasks} in {name}, {n_configs} carried over")
        }
        None if carried_over.is_empty() => {
            let what = match most_programs {
                Some(_) => "there is no program to learn from".to_owned(),
                None => format!("no configuration of template {} can be carried over", key.template),
            };
            return Err(Error::input(format!("{what} among the {n_tasks} of database {name}")));
        }
        None => format!("beginning with {n_configs} carried over from {name}"),
    };
    observer.note(Note::Message(told));
    Ok(Learned { experience, carried_over })
}
