//! Final comparison of an experiment: the kernels that runs found, at their ends and at earlier moments, are
//! timed in interleaved rounds.
//!
//! On a shared machine, one minute may be half as fast as the next, so that the times of consecutive runs are
//! not comparable.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tilewright::file::write_whole;
use tilewright::format::count;
use tilewright::{Contenders, EndLimits, Error, rank};
use tilewright_device::device::{RoundLength, WorkerCommand};
use tilewright_device::protocol::ProgramSource;
use tilewright_device::{Device, DeviceOptions};
use tilewright_search::Trial;
use tilewright_tune::{Record, Task};

use super::finished::{BestFound, Finished};
use super::plan::ExperimentPlan;
use super::table::ComparedMoment;
use crate::{Caller, OrFailed};

/// Number of sittings and of rounds in each, which run every kernel: as many as first quartiles need to be
/// reproducible within 1 % on a noisy machine.
const SITTINGS: u32 = 5;
const ROUNDS: u32 = 9;
/// Minimum time and number of samples of a kernel in a round.
const ROUND: RoundLength = RoundLength { time: Duration::from_millis(15), min_samples: 2 };

/// Nanoseconds of kernels by their schedules, as text; `None` for a kernel that fails.
type Times = BTreeMap<String, Option<f64>>;

/// Replaces a run's fastest trial at each earlier moment by the winner of a race of its best candidates until
/// then, which is the result of the run if it had ended there. Interrupted runs remain unsettled.
///
/// # Errors
/// If workers do not start or a file cannot be read or written.
pub fn hold_heats(
    plan: &ExperimentPlan,
    finished: &mut [Finished],
    worker: &WorkerCommand,
    caller: Caller,
) -> Result<(), Error> {
    let path = plan.runs_folder().join("heats.json");
    // Schedules of the winners; `None` if no trial was valid, or none was correct again.
    let mut known: BTreeMap<String, Option<String>> = read(&path);
    let moments = plan.moments();
    for f in finished {
        let Some(run) = &f.run else { continue };
        let mut heats = None;
        for (at, &moment) in moments.iter().enumerate().filter(|(_, moment)| **moment != ComparedMoment::End) {
            // A repeated run has another start time.
            let name = format!("{} of {}, {moment}", f.planned.stem, f.summary.started);
            let n_trials = moment.n_trials(run);
            if !known.contains_key(&name) {
                if caller.is_stopped() {
                    f.summary.found[at] = None;
                    f.summary.is_settled = false;
                    continue;
                }
                caller.say(format!("{}: a race of its leaders {moment}", f.planned.stem));
                let heats = match &mut heats {
                    Some(heats) => heats,
                    none => none.insert(Heats::new(plan, f, worker, caller)?),
                };
                known.insert(name.clone(), heats.winner(n_trials)?);
                write(&path, &known)?;
            }
            // Its time is measured in the final comparison.
            let winner = known[&name].clone();
            f.summary.found[at] = winner.map(|steps| BestFound { trials: n_trials as u64, steps, ns: None });
        }
    }
    Ok(())
}

/// Task, records and device for races of a run's best candidates, at any moment.
struct Heats {
    task: Task,
    records: Vec<Record>,
    device: Device,
}

impl Heats {
    fn new(plan: &ExperimentPlan, of: &Finished, worker: &WorkerCommand, caller: Caller) -> Result<Heats, Error> {
        Ok(Heats {
            task: plan.experiment.task(&of.planned.problem, &plan.hardware)?,
            records: plan.records(of.planned, caller)?,
            device: device(plan, of, of.planned.seed, worker, caller)?,
        })
    }

    /// Schedule that wins a race of the best candidates among the run's first trials.
    fn winner(&mut self, n_trials: usize) -> Result<Option<String>, Error> {
        let Heats { task, records, device } = self;
        let trials: Vec<Trial> =
            records.iter().take(n_trials).filter_map(|record| record.trial(&task.space).ok()).collect();
        let limits = EndLimits::of(None);
        let imported = HashSet::new();
        let contenders = Contenders { subject: (&*task).into(), trials: &trials, imported: &imported, run_ns: None };
        let ranking = rank(device, contenders, limits, None, &());
        let ranking = ranking.map_err(|error| Error::failed(&error).because(error))?;
        Ok(ranking.first().map(|leader| task.steps_text(&leader.config)))
    }
}

/// Times the kernels that runs found on each problem in interleaved rounds, unless that is done already, and
/// replaces the runs' own times. After an interrupt, the remaining problems have no times.
///
/// # Errors
/// If workers do not start or a file cannot be written.
pub fn hold(
    plan: &ExperimentPlan,
    finished: &mut [Finished],
    worker: &WorkerCommand,
    caller: Caller,
) -> Result<(), Error> {
    let path = plan.runs_folder().join("contest.json");
    let mut known: BTreeMap<String, Times> = read(&path);
    for problem in &plan.problems {
        let own = || finished.iter().filter(|f| f.planned.problem.label == problem.label);
        let kernels: BTreeSet<&str> =
            own().flat_map(|f| &f.summary.found).flatten().map(|found| found.steps.as_str()).collect();
        let is_timed = |times: &Times| kernels.iter().all(|&steps| times.contains_key(steps));
        let Some(first) = own().next() else { continue };
        if known.get(problem.label).is_some_and(is_timed) {
            continue;
        }
        if caller.is_stopped() {
            // Times measured with fewer kernels are not comparable with these.
            known.remove(problem.label);
            continue;
        }
        caller.say(format!("{}: timing what the runs found, {}", problem.label, count(kernels.len() as u64, "kernel")));
        let times = race(plan, first, &kernels, worker, caller)?;
        known.insert(problem.label.to_owned(), times);
        write(&path, &known)?;
    }
    for f in finished {
        settle(&mut f.summary.found, known.get(f.planned.problem.label));
    }
    Ok(())
}

/// Replaces the times that a run itself measured by those of a race, and removes them for kernels that failed
/// there. Without a race kernels have no times.
fn settle(found: &mut [Option<BestFound>], times: Option<&Times>) {
    for slot in found {
        let time = |found: &BestFound| times.map(|times| times.get(&found.steps).copied().flatten());
        *slot = slot.take().and_then(|found| match time(&found) {
            None => Some(BestFound { ns: None, ..found }),
            Some(ns) => Some(BestFound { ns: Some(ns?), ..found }),
        });
    }
}

/// Reads a JSON file; returns the default if it is missing or incomplete.
fn read<T: DeserializeOwned + Default>(path: &Path) -> T {
    fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

fn write(path: &Path, known: &impl Serialize) -> Result<(), Error> {
    let json = serde_json::to_vec(known).expect("invariant: it is numbers and text by name");
    write_whole(path, |file| file.write_all(&json)).or_failed(path.display())
}

/// Starts a device for schedules of a run's workload, with random inputs of this seed.
fn device(
    plan: &ExperimentPlan,
    of: &Finished,
    seed: u64,
    worker: &WorkerCommand,
    caller: Caller,
) -> Result<Device, Error> {
    let options = DeviceOptions { seed, ..DeviceOptions::new(worker.clone(), plan.hardware.threads) };
    let unstopped = Caller { stop: &AtomicBool::new(false), ..caller };
    let device = unstopped.start_device(&of.workload, &plan.hardware.target, options)?;
    Ok(device.expect("nobody interrupts the start"))
}

fn race(
    plan: &ExperimentPlan,
    of: &Finished,
    kernels: &BTreeSet<&str>,
    worker: &WorkerCommand,
    caller: Caller,
) -> Result<Times, Error> {
    let mut device = device(plan, of, 0, worker, caller)?;
    let sources: Vec<ProgramSource> = kernels.iter().map(|&steps| ProgramSource::Steps(steps.to_owned())).collect();
    let racers =
        device.race(&sources, SITTINGS, ROUNDS, ROUND).map_err(|error| Error::failed(&error).because(error))?;
    let times = racers.iter().map(|racer| Some(racer.quartile_ns()).filter(|ns| ns.is_finite()));
    Ok(kernels.iter().map(|&steps| steps.to_owned()).zip(times).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_measured_gives_way_to_the_race() {
        let found = |steps: &str, ns| Some(BestFound { trials: 1, steps: steps.to_owned(), ns });
        let own = || [found("a", Some(1.0)), None, found("b", Some(2.0)), found("c", None)];
        let times: Times = [("a".to_owned(), Some(1.5)), ("b".to_owned(), None)].into();
        let mut settled = own();
        settle(&mut settled, Some(&times));
        assert_eq!(settled, [found("a", Some(1.5)), None, None, None]);
        let mut settled = own();
        settle(&mut settled, None);
        assert_eq!(settled, [found("a", None), None, found("b", None), found("c", None)]);
    }
}
