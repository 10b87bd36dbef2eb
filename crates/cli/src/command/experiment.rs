//! `experiment`: experiments of the papers and our own, each a table of runs of `tune`, with data and plots.

mod contest;
mod data;
mod elsewhere;
mod finished;
mod results;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context;
use clap::{Args, Parser};
use serde::Deserialize;
use serde_json::{Value as Json, json};
use tilewright_device::host;
use tilewright_ir::op::Workload;
use tilewright_tune::{Judge, PassedOver, Record, Task, search};

use super::tune::{Interrupts, TuneArgs, tune};
use super::{MachineArgs, count, make_task};
use crate::clock::utc;
use crate::error::{OrBadInput, bad_input};
use crate::output::{grouped, message, open_lock, shell_quoted, write_result, write_whole};
use elsewhere::Machine;
use finished::{Finished, Summary, n_complete, only_run};
use table::{Arm, EXPERIMENTS, Experiment, Length, Moment, Problem, Transferred, Trials, View};
use tilewright::Database;
use tilewright::since_1970;
use tilewright::version::{RELEASE, release_of};
use tilewright::{trials_of, with_suffix};

/// Arguments of `experiment`.
#[derive(Args, Debug)]
pub struct ExperimentArgs {
    /// Experiment to run [default: list them]
    name: Option<String>,
    /// List the experiments
    #[arg(long)]
    list: bool,
    /// Problem to keep to, by its name in tables; can be repeated [default: all]
    #[arg(long = "problem", value_name = "NAME")]
    problems: Vec<String>,
    /// Arm to keep to, by its name in tables; can be repeated [default: all]
    #[arg(long = "arm", value_name = "NAME")]
    arms: Vec<String>,
    /// How many times as long as usual each run is
    #[arg(long, value_name = "SCALE", default_value_t = 1.0)]
    budget: f64,
    /// Runs of each arm on each problem [default: as the experiment says]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    repeats: Option<u64>,
    /// Folder for data and plots [default: experiments/NAME]
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Folder of the same experiment's results on another machine, to show what holds on both; can be
    /// repeated
    #[arg(long, value_name = "DIR")]
    beside: Vec<PathBuf>,
    /// Seed of the first of the repeats
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Threads that a kernel may use
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
}

/// The arguments of `tune` as words of a command line.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct TuneWords {
    #[command(flatten)]
    args: TuneArgs,
}

/// An experiment with its sizes.
struct Plan<'a> {
    experiment: &'a Experiment,
    problems: Vec<Problem>,
    arms: Vec<Arm>,
    budget: f64,
    seed: u64,
    repeats: u64,
    threads: usize,
    folder: PathBuf,
    runs: Vec<Planned>,
    /// What `data.json` says of runs, by their commands.
    known: BTreeMap<String, Summary>,
    /// What was found on other machines.
    elsewhere: Vec<Machine>,
}

/// A run of `tune`.
struct Planned {
    arm: Arm,
    problem: Problem,
    seed: u64,
    /// The most trials that it may have; `None` if only time limits it.
    n_trials: Option<u64>,
    /// The longest that it may search, in seconds.
    seconds: f64,
    /// The arguments of `tune`, but for the database.
    words: Vec<String>,
    /// The name of the file that says what it came to.
    stem: String,
    /// The name of its database, which is its own but for sources.
    database: String,
    /// Whether it is there only for others to learn from.
    is_source: bool,
}

/// The folder of the runs within that of the experiment.
const RUNS: &str = "runs";

/// Seconds that a run which counts trials has at least. A dozen slow candidates on a busy machine may take
/// them, and such a run is about trials.
const LEAST_SECONDS: f64 = 60.0;
/// Seconds until a run begins to search: data and its reference, workers, the machine's peak.
const START_SECONDS: f64 = 1.0;
/// Seconds of a race of a run's leaders.
const RACE_SECONDS: f64 = 8.0;

/// What tunes the sources.
const SOURCE: Arm = Arm { label: "source", search: "gbt:batch=64", transfer: Transferred::Nothing };

/// Runs an experiment, or lists them.
///
/// # Errors
/// Bad input where there is no such experiment, a search does not exist, or the folder holds something else;
/// failure where workers do not start or files cannot be written.
pub fn run(args: &ExperimentArgs, as_json: bool) -> anyhow::Result<()> {
    let Some(name) = args.name.as_ref().filter(|_| !args.list) else { return list(as_json) };
    let experiment = EXPERIMENTS.iter().find(|experiment| experiment.name == name).ok_or_else(|| {
        let known: Vec<&str> = EXPERIMENTS.iter().map(|experiment| experiment.name).collect();
        bad_input(format!("unknown experiment {name}; there are {}", known.join(", ")))
    })?;
    if !(args.budget > 0.0 && args.budget <= 1e6) {
        return Err(bad_input(format!("--budget {} is not possible (give a number above 0)", args.budget)));
    }
    let mut plan = plan(experiment, args)?;
    let _claim = plan.claim_folder()?;
    plan.elsewhere = Machine::read_all(&args.beside, &plan)?;
    elsewhere::check_distinct(&plan.elsewhere, &plan)?;
    let interrupts = Interrupts::watch()?;
    message(&plan.extent());
    let mut pace = Pace::default();
    for (at, planned) in plan.runs.iter().enumerate() {
        if interrupts.stop.load(Ordering::Relaxed) {
            break;
        }
        let most = plan.most_seconds(planned);
        if let Some(marker) = plan.marker_of(planned)? {
            pace.note(marker["seconds"].as_f64().unwrap_or(most), most);
            continue;
        }
        if plan.is_complete(planned) {
            continue;
        }
        let left = plan.runs[at..].iter().filter(|other| !plan.is_complete(other));
        let left = pace.expect(left.map(|other| plan.most_seconds(other)).sum());
        message(&format!("run {} of {}, {left}: {}", at + 1, plan.runs.len(), planned.command()));
        let start = Instant::now();
        plan.carry_out(planned, &interrupts)?;
        pace.note(start.elapsed().as_secs_f64(), most);
    }
    let mut finished = plan.finished()?;
    if experiment.is_raced {
        contest::hold_heats(&plan, &mut finished, &interrupts)?;
        contest::hold(&plan, &mut finished, &interrupts)?;
    }
    let json = results::write(&plan, &finished)?;
    let (n_runs, n_complete) = (plan.compared().count(), n_complete(&finished));
    let text = format!(
        "{n_complete} of {} in {}{}",
        count(n_runs as u64, "run"),
        plan.folder.display(),
        if n_complete < n_runs { "; run the same again to go on" } else { "" }
    );
    write_result(as_json, &json, &text)
}

fn list(as_json: bool) -> anyhow::Result<()> {
    let mut text = String::new();
    let mut rows = Vec::new();
    for experiment in EXPERIMENTS {
        let cost = cost(experiment)?;
        let source = match experiment.figure {
            "" => experiment.paper.to_owned(),
            figure => format!("{}, {figure}", experiment.paper),
        };
        text += &format!("{} ({source}): {}\n    {cost}\n", experiment.name, experiment.compares);
        if !experiment.differs.is_empty() {
            text += &format!("    differs: {}\n", experiment.differs);
        }
        rows.push(json!({
            "name": experiment.name,
            "paper": experiment.paper,
            "figure": experiment.figure,
            "compares": experiment.compares,
            "differs": experiment.differs,
            "cost": cost,
        }));
    }
    write_result(as_json, &json!({"experiments": rows}), &text)
}

/// What an experiment takes at a budget of 1.
fn cost(experiment: &Experiment) -> anyhow::Result<String> {
    let n_arms = experiment.arms().len() as u64;
    let n_of = |problems: u64, sources: u64| experiment.repeats * (n_arms * problems + sources);
    let n_runs = n_of(experiment.problems.len() as u64, experiment.sources.len() as u64);
    let mut text = count(n_runs, "run");
    if experiment.length.trials != Trials::Any {
        let trials = |problem: &Problem| Ok(n_trials(experiment.length, &task(problem, 1)?, 1.0).unwrap_or(0));
        let sum = |problems: &[Problem]| problems.iter().map(trials).sum::<anyhow::Result<u64>>();
        text += &format!(", {}", count(n_of(sum(experiment.problems)?, sum(experiment.sources)?), "trial"));
    }
    let seconds = n_runs as f64 * (experiment.length.seconds + beside_search(experiment));
    Ok(format!("{text}, at most {}", minutes(seconds)))
}

/// Seconds of a run in which it does not search.
fn beside_search(experiment: &Experiment) -> f64 {
    START_SECONDS + if experiment.is_raced { (experiment.moments.len() + 1) as f64 * RACE_SECONDS } else { 0.0 }
}

/// Seconds as minutes, or as hours where they are many.
fn minutes(seconds: f64) -> String {
    match seconds / 60.0 {
        minutes if minutes < 1.0 => "1 min".to_owned(),
        minutes if minutes < 120.0 => format!("{} min", minutes.ceil()),
        minutes => format!("{} h", (minutes / 60.0).ceil()),
    }
}

/// How fast runs come to their ends.
#[derive(Default)]
struct Pace {
    /// Seconds that complete runs took, and the most that they might have taken.
    took: f64,
    most: f64,
}

impl Pace {
    fn note(&mut self, took: f64, most: f64) {
        self.took += took;
        self.most += most;
    }

    /// How long runs take that may take so many seconds at most.
    fn expect(&self, most: f64) -> String {
        match self.most > 0.0 {
            true => format!("about {} left", minutes(most * self.took / self.most)),
            false => format!("at most {} left", minutes(most)),
        }
    }
}

fn task(problem: &Problem, threads: usize) -> anyhow::Result<Task> {
    let workload = Workload::parse(problem.workload).or_bad_input("")?;
    make_task(workload, host::target(), threads, problem.template)
}

/// The most trials of a run; `None` if only time limits it.
fn n_trials(length: Length, task: &Task, budget: f64) -> Option<u64> {
    let size = task.space.size() as f64;
    let trials = match length.trials {
        Trials::Count(trials) => trials as f64,
        Trials::ShareOfSpace(share) => share * size,
        Trials::Any => return None,
    };
    Some((trials * budget).round().clamp(1.0, size) as u64)
}

/// The most seconds of a run.
fn seconds(length: Length, budget: f64) -> f64 {
    let least = if length.trials == Trials::Any { 0.0 } else { LEAST_SECONDS };
    // Milliseconds, so that products such as 0.1 · 3 read well.
    ((length.seconds * budget).max(least) * 1e3).round().max(1.0) / 1e3
}

fn plan<'a>(experiment: &'a Experiment, args: &ExperimentArgs) -> anyhow::Result<Plan<'a>> {
    let machine = MachineArgs { threads: args.threads, target: "host".into() };
    machine.runnable_target()?;
    let problems = only("problem", &args.problems, experiment.problems.to_vec(), |problem| problem.label)?;
    let arms = only("arm", &args.arms, experiment.arms(), |arm| arm.label)?;
    let repeats = args.repeats.unwrap_or(experiment.repeats);
    let folder = args.output.clone().unwrap_or_else(|| Path::new("experiments").join(experiment.name));
    let mut runs = Vec::new();
    let with_tasks = |problems: &[Problem]| {
        let with_task = |problem: &Problem| Ok((*problem, task(problem, args.threads)?));
        problems.iter().map(with_task).collect::<anyhow::Result<Vec<_>>>()
    };
    let learns = arms.iter().any(|arm| arm.transfer != Transferred::Nothing);
    let sources = with_tasks(if learns { experiment.sources } else { &[] })?;
    let targets = with_tasks(&problems)?;
    // A repeat of everything comes before the next one, so a broken-off experiment has something of each arm.
    for seed in (0..repeats).map(|repeat| args.seed.wrapping_add(repeat)) {
        let of_sources = sources.iter().map(|source| (source, &SOURCE, true));
        let of_problems = targets.iter().flat_map(|problem| arms.iter().map(move |arm| (problem, arm, false)));
        for ((problem, task), arm, is_source) in of_sources.chain(of_problems) {
            search::build(arm.search, task.problem(), seed).or_bad_input("see `tilewright searches`")?;
            let n_trials = n_trials(experiment.length, task, args.budget);
            let mut planned =
                Planned::new(arm, problem, seed, n_trials, seconds(experiment.length, args.budget), is_source);
            planned.words.extend(["--threads".into(), args.threads.to_string()]);
            let has_guesses = experiment.with_guesses || arm.transfer == Transferred::ModelAndStart;
            planned.words.extend((!has_guesses).then(|| "--no-guesses".to_owned()));
            planned.words.extend((!experiment.is_raced || is_source).then(|| "--no-race".to_owned()));
            planned.words.extend(experiment.to_the_end.then(|| "--to-the-end".to_owned()));
            if arm.transfer != Transferred::Nothing {
                // Within the folder, which may be moved.
                planned.words.extend(["--transfer".into(), format!("{RUNS}/{}", sources_of(seed))]);
            }
            runs.push(planned);
        }
    }
    let &ExperimentArgs { budget, seed, threads, .. } = args;
    Ok(Plan {
        experiment,
        problems,
        arms,
        budget,
        seed,
        repeats,
        threads,
        folder,
        runs,
        known: BTreeMap::new(),
        elsewhere: Vec::new(),
    })
}

/// The members of a list that are asked for by name, or all if none is.
///
/// # Errors
/// Bad input if there is no such member.
fn only<T: Copy>(kind: &str, asked: &[String], all: Vec<T>, name: fn(&T) -> &str) -> anyhow::Result<Vec<T>> {
    if let Some(unknown) = asked.iter().find(|asked| !all.iter().any(|one| name(one) == **asked)) {
        let known: Vec<&str> = all.iter().map(name).collect();
        return Err(bad_input(format!(
            "--{kind} {unknown} is none of the experiment's; there are {}",
            known.join("; ")
        )));
    }
    Ok(all.into_iter().filter(|one| asked.is_empty() || asked.iter().any(|asked| name(one) == asked)).collect())
}

/// The database of the sources of a repeat.
fn sources_of(seed: u64) -> String {
    format!("sources_{seed}.db")
}

/// The name of the files of a run.
fn stem(problem: &str, arm: &str, seed: u64) -> String {
    let plain = |text: &str| text.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    format!("{}_{}_{seed}", plain(problem), plain(arm))
}

impl Planned {
    fn new(arm: &Arm, problem: &Problem, seed: u64, n_trials: Option<u64>, seconds: f64, is_source: bool) -> Planned {
        let mut words = vec![problem.workload.to_owned(), "--search".into(), arm.search.into()];
        words.extend(problem.template.into_iter().flat_map(|template| ["--template".into(), template.into()]));
        words.extend(["--seed".into(), seed.to_string()]);
        words.extend(n_trials.into_iter().flat_map(|n_trials| ["--trials".into(), n_trials.to_string()]));
        words.extend(["--time".into(), seconds.to_string()]);
        let stem = stem(problem.label, arm.label, seed);
        let database = if is_source { sources_of(seed) } else { format!("{stem}.db") };
        Planned { arm: *arm, problem: *problem, seed, n_trials, seconds, words, stem, database, is_source }
    }

    /// How a user repeats it.
    fn command(&self) -> String {
        let words: Vec<String> = self.words.iter().map(|word| shell_quoted(word)).collect();
        format!("tilewright tune {}", words.join(" "))
    }
}

impl Plan<'_> {
    fn runs_folder(&self) -> PathBuf {
        self.folder.join(RUNS)
    }

    /// A run's own database.
    fn database(&self, planned: &Planned) -> PathBuf {
        self.runs_folder().join(&planned.database)
    }

    /// The file that is there once a run is complete.
    fn marker(&self, planned: &Planned) -> PathBuf {
        self.runs_folder().join(format!("{}.json", planned.stem))
    }

    /// The longest that a run may take, in seconds.
    fn most_seconds(&self, planned: &Planned) -> f64 {
        planned.seconds + beside_search(self.experiment)
    }

    /// What was noted of a run once it was complete, where it is.
    fn marker_of(&self, planned: &Planned) -> anyhow::Result<Option<Json>> {
        let path = self.marker(planned);
        if !path.exists() {
            return Ok(None);
        }
        let marker = fs::read(&path).with_context(|| path.display().to_string())?;
        let marker: Json = serde_json::from_slice(&marker).with_context(|| path.display().to_string())?;
        if marker["command"] != planned.command() {
            let reason = format!("{} is of another version of the experiment", path.display());
            return Err(bad_input(format!("{reason} (give another folder with -o)")));
        }
        Ok(Some(marker))
    }

    /// Whether a run is done: it is complete, or it is a source from which no run has yet to learn.
    fn is_complete(&self, planned: &Planned) -> bool {
        let is_known = |planned: &Planned| self.marker(planned).exists() || self.known.contains_key(&planned.command());
        let mut learners = self.compared().filter(|other| other.seed == planned.seed);
        is_known(planned) || (planned.is_source && learners.all(is_known))
    }

    /// How a user repeats it.
    fn command(&self) -> String {
        let Plan { experiment, budget, repeats, seed, threads, .. } = self;
        let name = experiment.name;
        let size = format!("--budget {budget} --repeats {repeats} --seed {seed} --threads {threads}");
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

    /// What is run, in one line.
    fn extent(&self) -> String {
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

    /// Makes the folder, or checks that it holds a part of the same and reads what `data.json` knows of it.
    /// No other process may claim it until the file that this gives is closed.
    fn claim_folder(&mut self) -> anyhow::Result<File> {
        let name = self.folder.display();
        let cannot = |error: std::io::Error| bad_input(format!("cannot write to {name}: {error} (give another -o)"));
        let path = self.folder.join("plan.json");
        let data = || -> Option<Json> { serde_json::from_slice(&data::read(&self.folder).ok()?).ok() };
        let mut written = results::FILES.iter().map(|name| self.folder.join(name));
        if !path.exists()
            && data().is_none()
            && let Some(foreign) = written.find(|path| path.exists())
        {
            let reason = format!("{} is no experiment's and would be written over", foreign.display());
            return Err(bad_input(format!("{reason} (give another folder with -o)")));
        }
        fs::create_dir_all(self.runs_folder()).map_err(cannot)?;
        let claim = open_lock(&self.runs_folder().join("lock")).map_err(cannot)?;
        // Some file systems have no locks.
        if let Err(TryLockError::WouldBlock) = claim.try_lock() {
            return Err(bad_input(format!("another process is at work in {name} (wait for it, or give another -o)")));
        }
        let data = data();
        // More repeats may be asked for later.
        let own = json!({
            "experiment": self.experiment.name,
            "budget": self.budget,
            "seed": self.seed,
            "threads": self.threads,
            "target": host::target().to_string(),
        });
        let is_own = |there: &Json| own.as_object().into_iter().flatten().all(|(name, value)| there[name] == *value);
        let there: Result<Json, _> = fs::read(&path).map(|bytes| serde_json::from_slice(&bytes).unwrap_or_default());
        if !there.as_ref().ok().into_iter().chain(&data).all(is_own) {
            let reason = format!("{name} holds runs with another name, budget, seed, machine or number of threads");
            return Err(bad_input(format!("{reason} (give another folder with -o)")));
        }
        if there.is_err() {
            write_whole(&path, |file| file.write_all(own.to_string().as_bytes())).map_err(cannot)?;
        }
        self.learn(&data.unwrap_or_default())?;
        Ok(claim)
    }

    /// Notes what `data.json` says of runs whose records may be gone.
    ///
    /// # Errors
    /// Bad input if it holds runs that this plan cannot go on from without records: it would write over them.
    fn learn(&mut self, data: &Json) -> anyhow::Result<()> {
        let is_alike =
            data["cpu"] == host::cpu_name() && release_of(data["version"].as_str().unwrap_or_default()) == RELEASE;
        // A histogram needs every trial, and each is only in the records.
        let is_enough = is_alike && !self.experiment.views.contains(&View::Histogram);
        let n_moments = self.moments().len();
        let planned: BTreeSet<String> = self.compared().map(Planned::command).collect();
        let mut n_lost = 0;
        for row in data["runs"].as_array().into_iter().flatten() {
            let summary = Summary::deserialize(row).ok().filter(|summary| {
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
            return Err(bad_input(format!(
                "{reason} (give another folder with -o, or the options that it was made with)"
            )));
        }
        Ok(())
    }

    /// Carries out a run, from its beginning if an earlier one was broken off; sources share a database and
    /// go on.
    fn carry_out(&self, planned: &Planned, interrupts: &Interrupts) -> anyhow::Result<()> {
        let database = self.database(planned);
        for ending in ["", "-wal", "-shm"].iter().filter(|_| !planned.is_source) {
            let path = with_suffix(&database, ending);
            if path.exists() {
                fs::remove_file(&path).with_context(|| path.display().to_string())?;
            }
        }
        let words = TuneWords::try_parse_from(&planned.words);
        let TuneWords { mut args } = words.expect("invariant: `tune` takes its own arguments");
        args.keep_within(&self.folder, database);
        let workload = Workload::parse(planned.problem.workload).or_bad_input("")?;
        let (started, start) = (since_1970().as_secs(), Instant::now());
        let report = tune(&args, &workload, false, interrupts)?;
        if let Some(lost) = report.lost {
            return Err(lost);
        }
        if interrupts.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        let marker = json!({
            "command": planned.command(),
            "arm": planned.arm.label,
            "started": utc(started),
            "seconds": start.elapsed().as_secs_f64(),
            "failure": report.failure.map(|failure| format!("{failure:#}")),
            "result": report.json,
        });
        let path = self.marker(planned);
        write_whole(&path, |file| file.write_all(marker.to_string().as_bytes()))
            .with_context(|| path.display().to_string())
    }

    /// When results are compared, the end last.
    fn moments(&self) -> Vec<Moment> {
        let scaled = self.experiment.moments.iter().map(|moment| moment.scaled(self.budget));
        scaled.chain([Moment::End]).collect()
    }

    /// The runs that the experiment is about.
    fn compared(&self) -> impl Iterator<Item = &Planned> {
        self.runs.iter().filter(|planned| !planned.is_source)
    }

    /// The runs that are complete, with their trials where there are records of them.
    fn finished(&self) -> anyhow::Result<Vec<Finished<'_>>> {
        let mut finished = Vec::new();
        for planned in self.compared() {
            // Somebody who deletes records to save space may leave the small files beside them.
            let marker = self.marker_of(planned)?;
            let known = self.known.get(&planned.command());
            let (summary, run) = match (marker.filter(|_| self.database(planned).exists() || known.is_none()), known) {
                (Some(marker), _) => {
                    let records = self.records(planned)?;
                    let run = only_run(&records).ok_or_else(|| anyhow::anyhow!("{} has no trials", planned.stem))?;
                    let started = marker["started"].as_str().unwrap_or_default().to_owned();
                    let summary =
                        Summary::new(planned.command(), started, &records, &run, &marker["result"], &self.moments());
                    (summary, Some(run))
                }
                (None, Some(summary)) => (summary.clone(), None),
                (None, None) => continue,
            };
            let task = task(&planned.problem, self.threads)?;
            let (space_size, workload) = (task.space.size() as f64, task.setting.workload);
            finished.push(Finished { planned, workload, space_size, summary, run });
        }
        Ok(finished)
    }

    /// The trials of a run's own database.
    fn records(&self, planned: &Planned) -> anyhow::Result<Vec<Record>> {
        let database = Database::new(Some(&self.database(planned)))?;
        let gone =
            || format!("{} is gone (delete {} to repeat the run)", database.name(), self.marker(planned).display());
        let store = database.open_to_read()?.ok_or_else(|| bad_input(gone()))?;
        let mut records = Vec::new();
        let refuse = |error| database.refuse(error);
        let mut passed_over = PassedOver::default();
        for key in store.tasks().map_err(refuse)? {
            let workload = Workload::parse(&key.workload).or_bad_input("")?;
            // What a run found counts whatever has become of its space since.
            let judge = |template: &str| Judge::new(&workload, &key.target, key.threads, template, None);
            records.extend(trials_of(&store, &key, &judge, &mut passed_over).map_err(refuse)?);
        }
        if passed_over.total() > 0 {
            message(&format!("{}: {passed_over}", database.name()));
        }
        Ok(records)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_can_be_run() {
        for experiment in EXPERIMENTS {
            let args = ExperimentArgs {
                name: None,
                list: false,
                problems: Vec::new(),
                arms: Vec::new(),
                budget: 1.0,
                repeats: None,
                output: None,
                beside: Vec::new(),
                seed: 0,
                threads: 1,
            };
            let plan = plan(experiment, &args).unwrap_or_else(|error| panic!("{}: {error}", experiment.name));
            let mut stems: Vec<&str> = plan.runs.iter().map(|planned| planned.stem.as_str()).collect();
            for planned in &plan.runs {
                let parsed = TuneWords::try_parse_from(&planned.words);
                assert!(parsed.is_ok(), "{}: {}", experiment.name, planned.command());
            }
            stems.sort_unstable();
            stems.dedup();
            assert_eq!(stems.len(), plan.runs.len(), "{}: each run has files of its own", experiment.name);
        }
    }
}
