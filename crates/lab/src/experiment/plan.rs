//! Plan of an experiment: its runs, their files, and the state of their completion.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;
use serde_json::{Value as Json, json};
use tilewright::file::write_whole;
use tilewright::format::{count, grouped, shell_quoted};
use tilewright::version::{RELEASE, release_of};
use tilewright::{Database, Error, Session, since_1970, trials_of, with_suffix};
use tilewright_device::device::WorkerCommand;
use tilewright_ir::op::Workload;
use tilewright_tune::{PassedOver, Record, Task, TemplateSetting, Validator};

use super::ExperimentRequest;
use super::finished::{Finished, RunSummary, only_run};
use super::folder::{self, RUNS};
use super::hardware::Hardware;
use super::machine::MachineResults;
use super::planned::Planned;
use super::table::{Arm, ComparedMoment, Experiment, Length, ResultView, SpaceProblem, Transferred, TrialCount};
use crate::clock::utc;
use crate::history::SearchRun;
use crate::{Caller, LabEvent, OrFailed};

/// Plan of an experiment, with all sizes fixed.
pub struct ExperimentPlan {
    pub(super) experiment: &'static Experiment,
    pub(super) problems: Vec<SpaceProblem>,
    pub(super) arms: Vec<Arm>,
    pub(super) budget: f64,
    pub(super) seed: u64,
    pub(super) repeats: u64,
    pub(super) hardware: Hardware,
    pub(super) folder: PathBuf,
    pub(super) runs: Vec<Planned>,
    /// Summaries of runs in `data.json`, by their commands.
    pub(super) known: BTreeMap<String, RunSummary>,
    /// Results of other machines.
    pub(super) elsewhere: Vec<MachineResults>,
}

/// Minimum time limit in seconds of a run that counts trials. A dozen slow candidates on a busy machine may
/// need it, and such a run is limited by its trials.
const LEAST_SECONDS: f64 = 60.0;
/// Seconds until a run begins to search: for data and its reference, workers, and the machine's peak.
const START_SECONDS: f64 = 1.0;
/// Seconds of a race of a run's best candidates.
const RACE_SECONDS: f64 = 8.0;

/// Arm that tunes the transfer sources.
const SOURCE: Arm = Arm { label: "source", search: "gbt:batch=64", transfer: Transferred::Nothing };

/// Seconds of a run besides its search.
pub(super) fn beside_search(experiment: &Experiment) -> f64 {
    START_SECONDS + if experiment.is_raced { (experiment.moments.len() + 1) as f64 * RACE_SECONDS } else { 0.0 }
}

impl Experiment {
    /// Whether runs on a machine try configurations beyond its limits: a CPU has none.
    fn is_beyond_limits(&self, hardware: &Hardware) -> bool {
        self.beyond_limits && hardware.is_gpu()
    }

    /// Makes the task of a problem on a machine.
    ///
    /// # Errors
    /// Bad input if its space does not exist.
    pub(super) fn task(&self, problem: &SpaceProblem, hardware: &Hardware) -> Result<Task, Error> {
        let workload = Workload::parse(problem.workload).map_err(Error::input)?;
        let setting = TemplateSetting { workload, target: hardware.target.clone(), n_threads: hardware.threads };
        let task = Task::new(setting, problem.template).map_err(Error::input)?;
        if self.is_beyond_limits(hardware) { task.beyond_limits().map_err(Error::input) } else { Ok(task) }
    }
}

/// Maximum number of trials of a run; `None` if only time limits it.
pub(super) fn n_trials(length: Length, task: &Task, budget: f64) -> Option<u64> {
    let size = task.space.size() as f64;
    let trials = match length.trials {
        TrialCount::Count(trials) => trials as f64,
        TrialCount::ShareOfSpace(share) => share * size,
        TrialCount::Any => return None,
    };
    Some((trials * budget).round().clamp(1.0, size) as u64)
}

/// Maximum duration of a run in seconds.
fn seconds(length: Length, budget: f64) -> f64 {
    let least = if length.trials == TrialCount::Any { 0.0 } else { LEAST_SECONDS };
    // Rounded to milliseconds, so that products such as 0.1 · 3 are readable.
    ((length.seconds * budget).max(least) * 1e3).round().max(1.0) / 1e3
}

/// Selects the members of a list by name, or all if no name is given.
///
/// # Errors
/// Bad input if there is no such member.
pub(super) fn only<T>(kind: &str, asked: &[String], all: Vec<T>, name: impl Fn(&T) -> String) -> Result<Vec<T>, Error> {
    if let Some(unknown) = asked.iter().find(|asked| !all.iter().any(|one| name(one) == **asked)) {
        let known: Vec<String> = all.iter().map(name).collect();
        return Err(Error::input(format!("the experiment has no {kind} {unknown}; there are {}", known.join("; "))));
    }
    Ok(all.into_iter().filter(|one| asked.is_empty() || asked.contains(&name(one))).collect())
}

/// Database of the transfer sources of a repetition.
fn sources_of(seed: u64) -> String {
    format!("sources_{seed}.db")
}

/// Stem of the file names of a run.
fn stem(problem: &str, arm: &str, seed: u64) -> String {
    let plain = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    format!("{}_{}_{seed}", plain(problem), plain(arm))
}

/// Database of a run.
fn database_of(problem: &str, arm: &str, seed: u64) -> String {
    format!("{}.db", stem(problem, arm, seed))
}

impl ExperimentPlan {
    /// Plans an experiment for this machine.
    ///
    /// # Errors
    /// Bad input if there is no such problem or arm, or a search or a space does not exist.
    pub fn new(request: &ExperimentRequest) -> Result<ExperimentPlan, Error> {
        let ExperimentRequest { experiment, budget, seed, ref hardware, .. } = *request;
        let problems = only("problem", &request.problems, experiment.problems.to_vec(), |one| one.label.to_owned())?;
        let arms = only("arm", &request.arms, experiment.arms(), |arm| arm.label.to_owned())?;
        let repeats = request.repeats.unwrap_or(experiment.repeats);
        let folder = request.folder.clone().unwrap_or_else(|| Path::new("experiments").join(experiment.name));
        let mut runs = Vec::new();
        let with_tasks = |problems: &[SpaceProblem]| {
            let with_task = |problem: &SpaceProblem| Ok((*problem, experiment.task(problem, hardware)?));
            problems.iter().map(with_task).collect::<Result<Vec<_>, Error>>()
        };
        let learns = arms.iter().any(|arm| matches!(arm.transfer, Transferred::Model | Transferred::ModelAndStart));
        let sources = with_tasks(if learns { experiment.sources } else { &[] })?;
        let targets = with_tasks(&problems)?;
        // Each repetition covers everything before the next one starts, so that an interrupted experiment has
        // some results of each arm.
        for seed in (0..repeats).map(|repeat| seed.wrapping_add(repeat)) {
            let of_sources = sources.iter().map(|source| (source, &SOURCE, true));
            let of_problems = targets.iter().flat_map(|problem| arms.iter().map(move |arm| (problem, arm, false)));
            for ((problem, task), arm, is_source) in of_sources.chain(of_problems) {
                tilewright_search::build(arm.search, task.problem(), seed)
                    .map_err(|error| Error::input(format!("{error} (see `tilewright searches`)")))?;
                let stem = stem(problem.label, arm.label, seed);
                let before = targets.iter().take_while(|(other, _)| other.label != problem.label).last();
                let teacher = match arm.transfer {
                    Transferred::Nothing => None,
                    Transferred::Model | Transferred::ModelAndStart => Some(sources_of(seed)),
                    Transferred::Previous => before.map(|(other, _)| database_of(other.label, arm.label, seed)),
                };
                runs.push(Planned {
                    arm: *arm,
                    problem: *problem,
                    seed,
                    n_trials: n_trials(experiment.length, task, budget),
                    seconds: seconds(experiment.length, budget),
                    hardware: hardware.clone(),
                    beyond_limits: experiment.is_beyond_limits(hardware),
                    has_guesses: experiment.with_guesses || arm.transfer == Transferred::ModelAndStart,
                    is_raced: experiment.is_raced && !is_source,
                    to_the_end: experiment.to_the_end,
                    database: if is_source { sources_of(seed) } else { database_of(problem.label, arm.label, seed) },
                    stem,
                    is_source,
                    teacher,
                });
            }
        }
        let (known, elsewhere) = (BTreeMap::new(), Vec::new());
        let hardware = hardware.clone();
        Ok(ExperimentPlan {
            experiment,
            problems,
            arms,
            budget,
            seed,
            repeats,
            hardware,
            folder,
            runs,
            known,
            elsewhere,
        })
    }

    /// All runs, including those of transfer sources.
    pub fn runs(&self) -> &[Planned] {
        &self.runs
    }

    pub(super) fn runs_folder(&self) -> PathBuf {
        self.folder.join(RUNS)
    }

    /// Path of the database of a run.
    fn database(&self, planned: &Planned) -> PathBuf {
        self.runs_folder().join(&planned.database)
    }

    /// Path of the file that exists once a run is complete.
    fn marker(&self, planned: &Planned) -> PathBuf {
        self.runs_folder().join(format!("{}.json", planned.stem))
    }

    /// Maximum duration of a run, in seconds.
    pub(super) fn most_seconds(&self, planned: &Planned) -> f64 {
        planned.seconds + beside_search(self.experiment)
    }

    /// Marker of a complete run, if there is one.
    pub(super) fn marker_of(&self, planned: &Planned) -> Result<Option<Json>, Error> {
        let path = self.marker(planned);
        if !path.exists() {
            return Ok(None);
        }
        let marker = fs::read(&path).or_failed(path.display())?;
        let marker: Json = serde_json::from_slice(&marker).or_failed(path.display())?;
        if marker["command"] != planned.command() {
            let reason = format!("{} is of another version of the experiment", path.display());
            return Err(Error::input(format!("{reason} (give another folder with -o)")));
        }
        Ok(Some(marker))
    }

    /// Whether a run is done: it is complete, or it is a source that no run needs any more.
    pub(super) fn is_complete(&self, planned: &Planned) -> bool {
        let is_known = |planned: &Planned| self.marker(planned).exists() || self.known.contains_key(&planned.command());
        let mut learners = self.compared().filter(|other| other.seed == planned.seed);
        is_known(planned) || (planned.is_source && learners.all(is_known))
    }

    /// Command that repeats the run.
    pub(super) fn command(&self) -> String {
        let ExperimentPlan { experiment, budget, repeats, seed, hardware, .. } = self;
        let name = experiment.name;
        let hardware = hardware.option().join(" ");
        let size = format!("--budget {budget} --repeats {repeats} --seed {seed} {hardware}");
        let words = |kind: &str, labels: Vec<&str>, n_all: usize| -> String {
            let word = |label: &&str| format!(" --{kind} {}", shell_quoted(label));
            if labels.len() == n_all { String::new() } else { labels.iter().map(word).collect() }
        };
        let problems = self.problems.iter().map(|problem| problem.label).collect();
        let arms = self.arms.iter().map(|arm| arm.label).collect();
        let problems = words("problem", problems, experiment.problems.len());
        let arms = words("arm", arms, experiment.arms().len());
        format!("tilewright experiment {name} {size}{problems}{arms}")
    }

    /// Extent of the runs, in one line.
    pub(super) fn extent(&self) -> String {
        let trials = || self.runs.iter().filter_map(|planned| planned.n_trials);
        let seconds = self.runs.iter().map(|planned| planned.seconds).fold(0.0, f64::max);
        let of_run = match (trials().min(), trials().max()) {
            (Some(least), Some(most)) if least == most => format!("{} or {seconds} s", count(most, "trial")),
            (Some(least), Some(most)) => format!("{} to {} or {seconds} s", grouped(least), count(most, "trial")),
            _ => format!("{seconds} s"),
        };
        let n_sources = self.runs.iter().filter(|planned| planned.is_source).count() as u64;
        let sources = match n_sources {
            0 => String::new(),
            n => format!(", and {} to learn from", count(n, "such run")),
        };
        format!(
            "{} of {of_run} each{sources}; {} of each arm on each problem, seeds from {} on",
            count(self.compared().count() as u64, "run"),
            self.repeats,
            self.seed
        )
    }

    /// Creates the folder, or checks that it holds a part of this experiment and reads its `data.json`. No
    /// other process can claim it until the returned file is closed.
    pub(super) fn claim_folder(&mut self) -> Result<File, Error> {
        // The number of repetitions may be increased later.
        let own = json!({
            "experiment": self.experiment.name,
            "budget": self.budget,
            "seed": self.seed,
            "threads": self.hardware.threads,
            "target": self.hardware.target.name(),
        });
        let (claim, data) = folder::claim(&self.folder, &own)?;
        self.learn(&data)?;
        Ok(claim)
    }

    /// Loads the results in `data.json` of runs whose records may be gone.
    ///
    /// # Errors
    /// Bad input if it holds runs that this plan cannot continue from without records, because it would
    /// overwrite them.
    fn learn(&mut self, data: &Json) -> Result<(), Error> {
        let is_alike =
            data["cpu"] == self.hardware.name && release_of(data["version"].as_str().unwrap_or_default()) == RELEASE;
        // A histogram needs every trial, and trials are only in the records.
        let is_enough = is_alike && !self.experiment.views.contains(&ResultView::Histogram);
        let n_moments = self.moments().len();
        let planned: BTreeSet<String> = self.compared().map(Planned::command).collect();
        let mut n_lost = 0;
        for row in data["runs"].as_array().into_iter().flatten() {
            let summary = RunSummary::deserialize(row).ok().filter(|summary| {
                is_enough
                    && summary.is_settled
                    && summary.found.len() == n_moments
                    && planned.contains(&summary.command)
            });
            if let Some(summary) = summary {
                self.known.insert(summary.command.clone(), summary);
                continue;
            }
            let [problem, arm] = ["problem", "arm"].map(|name| row[name].as_str().unwrap_or_default());
            let stem = stem(problem, arm, row["seed"].as_u64().unwrap_or_default());
            n_lost += u64::from(!self.runs_folder().join(format!("{stem}.db")).exists());
        }
        if n_lost > 0 {
            let name = self.folder.display();
            let reason = format!(
                "{name} holds {} without records, of more repeats, problems or arms, another version or another machine: they would be lost",
                count(n_lost, "run")
            );
            return Err(Error::input(format!(
                "{reason} (give another folder with -o, or the options that it was made with)"
            )));
        }
        Ok(())
    }

    /// Executes a run, from its beginning if an earlier one was interrupted; sources share a database and
    /// continue.
    pub(super) fn carry_out_run(&self, planned: &Planned, worker: &WorkerCommand, caller: Caller) -> Result<(), Error> {
        let database = self.database(planned);
        for ending in ["", "-wal", "-shm"].iter().filter(|_| !planned.is_source) {
            let path = with_suffix(&database, ending);
            if path.exists() {
                fs::remove_file(&path).or_failed(path.display())?;
            }
        }
        let request = planned.request(&self.folder)?;
        let session = Session::new(Database::new(Some(&database))?, worker.clone());
        let (started, start) = (since_1970().as_secs(), Instant::now());
        let (workload, search) = (request.workload()?, request.settings().search.as_str());
        let mut tuned = caller
            .watch(workload, Some(search), planned.seed, |observer| session.run(&request, caller.stop, observer))?;
        (caller.tell)(LabEvent::Tuned(&tuned));
        if let Some(lost) = tuned.lost.take() {
            return Err(lost);
        }
        if caller.is_stopped() {
            return Ok(());
        }
        let marker = json!({
            "command": planned.command(),
            "arm": planned.arm.label,
            "started": utc(started),
            "seconds": start.elapsed().as_secs_f64(),
            "failure": tuned.failure().map(|failure| failure.to_string()),
            "result": serde_json::to_value(&tuned).expect("invariant: it is numbers and text by name"),
        });
        let path = self.marker(planned);
        write_whole(&path, |file| file.write_all(marker.to_string().as_bytes())).or_failed(path.display())
    }

    /// Moments at which results are compared, the end last.
    pub(super) fn moments(&self) -> Vec<ComparedMoment> {
        let scaled = self.experiment.moments.iter().map(|moment| moment.scaled(self.budget));
        scaled.chain([ComparedMoment::End]).collect()
    }

    /// Runs whose results are compared.
    pub(super) fn compared(&self) -> impl Iterator<Item = &Planned> {
        self.runs.iter().filter(|planned| !planned.is_source)
    }

    /// Complete runs, with their trials if there are records of them.
    pub(super) fn finished(&self, caller: Caller) -> Result<Vec<Finished<'_>>, Error> {
        let mut finished = Vec::new();
        for planned in self.compared() {
            // Users who delete records to save space may leave the small files beside them.
            let marker = self.marker_of(planned)?;
            let known = self.known.get(&planned.command());
            let (summary, run) = match (marker.filter(|_| self.database(planned).exists() || known.is_none()), known) {
                (Some(marker), _) => {
                    let records = self.records(planned, caller)?;
                    // On a busy machine a short run may end before its first trial.
                    let run = only_run(&records).unwrap_or_else(|| SearchRun {
                        template: planned.problem.template.unwrap_or_default().to_owned(),
                        search: planned.arm.search.to_owned(),
                        seed: planned.seed,
                        trials: Vec::new(),
                    });
                    let started = marker["started"].as_str().unwrap_or_default().to_owned();
                    let summary =
                        RunSummary::new(planned.command(), started, &records, &run, &marker["result"], &self.moments());
                    (summary, Some(run))
                }
                (None, Some(summary)) => (summary.clone(), None),
                (None, None) => continue,
            };
            let task = self.experiment.task(&planned.problem, &self.hardware)?;
            let (space_size, workload) = (task.space.size() as f64, task.setting.workload);
            finished.push(Finished { planned, workload, space_size, summary, run });
        }
        Ok(finished)
    }

    /// Trials in the database of a run.
    pub(super) fn records(&self, planned: &Planned, caller: Caller) -> Result<Vec<Record>, Error> {
        let database = Database::new(Some(&self.database(planned)))?;
        let gone =
            || format!("{} is gone (delete {} to repeat the run)", database.name(), self.marker(planned).display());
        let store = database.open_to_read()?.ok_or_else(|| Error::input(gone()))?;
        let mut records = Vec::new();
        let refuse = |error| database.refuse(error);
        let mut passed_over = PassedOver::default();
        for key in store.tasks().map_err(refuse)? {
            let workload = Workload::parse(&key.workload).map_err(Error::input)?;
            // Results of a run count even if its space has changed since.
            let validator = |template: &str| Validator::new(&workload, &key.target, key.threads, template, None);
            records.extend(trials_of(&store, &key, &validator, &mut passed_over).map_err(refuse)?);
        }
        if passed_over.total() > 0 {
            caller.say(format!("{}: {passed_over}", database.name()));
        }
        Ok(records)
    }
}
