//! Results of an experiment on other machines, compared as shares of the best time known on each.
//!
//! Nanoseconds of two machines are not comparable; each run's share of the best known on its machine is.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tilewright::Error;
use tilewright::version::BUILD;

use super::data;
use super::finished::{Finished, RunSummary};
use super::machine::{MachineResults, RunElsewhere};
use super::plan::ExperimentPlan;

/// Contents of a `data.json`: the facts that comparable experiments share, and the machine.
#[derive(Deserialize)]
struct Data {
    experiment: String,
    budget: f64,
    threads: usize,
    #[serde(flatten)]
    machine: MachineResults,
}

/// Reads the results in folders that `experiment` wrote.
///
/// # Errors
/// Bad input if there are none, or they are of another experiment, budget or number of threads.
pub fn read_all(folders: &[PathBuf], plan: &ExperimentPlan) -> Result<Vec<MachineResults>, Error> {
    folders.iter().map(|folder| read(folder, plan)).collect()
}

fn read(folder: &Path, plan: &ExperimentPlan) -> Result<MachineResults, Error> {
    let path = data::path(folder);
    let cannot = |reason: String| {
        Error::input(format!(
            "--beside {}: {reason} (give a folder of results of `{}`)",
            folder.display(),
            plan.command()
        ))
    };
    if fs::canonicalize(folder).is_ok_and(|there| fs::canonicalize(&plan.folder).is_ok_and(|own| own == there)) {
        return Err(cannot("it is the experiment's own folder".into()));
    }
    let bytes = data::read(folder).map_err(|error| cannot(format!("cannot read {}: {error}", path.display())))?;
    let data: Data =
        serde_json::from_slice(&bytes).map_err(|error| cannot(format!("{} is not one: {error}", path.display())))?;
    let Data { experiment, budget, threads, mut machine } = data;
    if (&*experiment, budget, threads) != (plan.experiment.name, plan.budget, plan.hardware.threads) {
        return Err(cannot(format!("its results are of {experiment} at budget {budget} with --threads {threads}")));
    }
    // Runs that were interrupted, or whose races were, are not comparable yet; neither are other arms.
    let n_moments = plan.moments().len();
    machine.runs.retain(|run| {
        run.summary.is_timed()
            && run.summary.found.len() == n_moments
            && plan.arms.iter().any(|arm| arm.label == run.arm)
    });
    Ok(machine)
}

/// Makes the results of this machine.
pub fn here(plan: &ExperimentPlan, finished: &[Finished]) -> MachineResults {
    let runs = finished.iter().filter(|f| f.summary.is_timed()).map(|f| RunElsewhere {
        problem: f.planned.problem.label.to_owned(),
        arm: f.planned.arm.label.to_owned(),
        summary: f.summary.clone(),
    });
    MachineResults {
        cpu: plan.hardware.name.clone(),
        target: plan.hardware.target.name(),
        version: BUILD.to_owned(),
        runs: runs.collect(),
    }
}

/// Checks that no run is counted twice, in two folders or in one of them and the plan's.
///
/// # Errors
/// Bad input if a run is counted twice.
pub fn check_distinct(machines: &[MachineResults], plan: &ExperimentPlan) -> Result<(), Error> {
    let mut seen = BTreeSet::new();
    let elsewhere = machines.iter().flat_map(|machine| &machine.runs).map(|run| &run.summary);
    let mut summaries = elsewhere.chain(plan.known.values());
    match summaries.find(|run| !seen.insert((&run.command, &run.started, run.elapsed_s.to_bits()))) {
        None => Ok(()),
        Some(RunSummary { command, started, .. }) => Err(Error::input(format!(
            "`{command}` of {started} is in two of the folders (give each --beside once, without that of -o)"
        ))),
    }
}
