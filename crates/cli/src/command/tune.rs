//! `tune`: searches, records, and measures the leaders against each other at the end.

pub mod finals;
pub mod recorder;
mod transfer;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde_json::{Map, Value as Json, json};
use tilewright_device::{Device, Options, host, peak};
use tilewright_ir::DType;
use tilewright_ir::op::Workload;
use tilewright_ir::reference::work;
use tilewright_tune::{
    Budget, Config, Ended, ErrorClass, Event, Experience, HeadStart, Judge, Limits, Outcome, PassedOver, Record,
    Seconds, Store, StoreError, Summary, Task, TaskKey, Trial, Winner, search, transfer::warm_start,
};

use super::predict::likely_configs;
use super::{
    DatabaseArgs, KnownBest, WorkloadArgs, count, device_options, gflops, make_task, on_interrupt, percent,
    start_device, target_name, trials_of,
};
use crate::clock::since_1970;
use crate::database::Database;
use crate::error::{OrBadInput, bad_input, describe};
use crate::output::{digits, duration, message, table, write_result};
use crate::progress::{Progress, Status, errors_text};
use finals::{End, EndLimits, Finals, Untuned};
use recorder::Recorder;
use transfer::Transfer;

/// The search where none is asked for.
const DEFAULT_SEARCH: &str = "auto";
/// The time where neither time nor trials are given.
const DEFAULT_TIME: Duration = Duration::from_secs(60);

/// What a start takes at least, what each element of a buffer adds to it, and what part of the peak products
/// of matrices reach in it: as measured on 2 CPUs of Zen 4 (2026-11-25).
const START_S: f64 = 0.1;
const START_NS_AN_ELEMENT: f64 = 8.0;
const PART_OF_PEAK: f64 = 0.6;
/// A run that takes so many seconds is worth a word before it.
const SLOW_RUN_S: f64 = 0.1;

/// What is said of a run that was interrupted early.
const INTERRUPTED: &str = "interrupted before a candidate was measured";

/// Configurations of a model that are tried first, at most.
const MOST_PREDICTED: usize = 16;

/// Arguments of `tune`.
#[derive(Args, Debug)]
pub struct TuneArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    /// Search, with options behind a colon, such as genetic:population=50; see `searches`
    #[arg(long, value_name = "NAME", default_value = DEFAULT_SEARCH)]
    search: String,
    /// Template whose space is searched [default: the operator's first one]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// Trials to come to, those recorded by earlier runs included
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    trials: Option<u64>,
    /// Time for the search in this run [default: 60 where --trials is not given either]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    time: Option<Duration>,
    /// Seed of the search and of the random inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Leave out the configurations that the template would begin with: the search proposes all
    #[arg(long)]
    no_guesses: bool,
    /// Leave out the race of the leaders and the untuned program at the end: the fastest trial is the result
    #[arg(long)]
    no_race: bool,
    /// Learn from recorded trials of other workloads: all in the database, or those named; a run begins with their best
    /// configurations, and a search with a model that can learn from them does
    #[arg(long, value_name = "DB[,WORKLOAD...]", value_parser = Transfer::parse)]
    transfer: Option<Transfer>,
    /// Begin with what a model, which `predict train --db` wrote, says is best
    #[arg(long, value_name = "MODEL")]
    predict: Option<PathBuf>,
    /// Empty the caches before each run
    #[arg(long)]
    cold: bool,
    /// Run and time hopeless candidates to the end too, as where the whole space is of interest
    #[arg(long)]
    to_the_end: bool,
    /// Time to spend in the runs of each candidate, in milliseconds
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    min_time: Option<Duration>,
    /// Longest that building a candidate may take
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    build_timeout: Option<Duration>,
    /// Longest that the runs of a candidate may take; hopeless ones are given up earlier
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    run_timeout: Option<Duration>,
    #[command(flatten)]
    records: DatabaseArgs,
}

impl TuneArgs {
    /// Has the run keep its records in this file, and look within the folder for what it learns from.
    pub fn keep_within(&mut self, folder: &Path, database: PathBuf) {
        self.records.db = Some(database);
        if let Some(transfer) = &mut self.transfer {
            transfer.path = folder.join(&transfer.path);
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    scaled(text, 1.0, "a number of seconds above 0")
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    scaled(text, 1e-3, "a number of milliseconds above 0")
}

fn scaled(text: &str, unit: f64, expected: &str) -> Result<Duration, String> {
    let value = text.parse::<f64>().ok().filter(|x| *x > 0.0 && *x <= 1e9);
    value.map(|x| Duration::from_secs_f64(x * unit)).ok_or_else(|| format!("expected {expected}"))
}

/// What a run is about, once the arguments have been understood.
struct Run<'a> {
    args: &'a TuneArgs,
    workload: Workload,
    task: Task,
    database: Database,
    key: TaskKey,
    options: Options,
    peak_gflops: Option<f64>,
    wall: WallTime,
    /// Whether all that was found is recorded.
    is_recorded: bool,
}

/// What earlier runs have recorded.
pub struct Earlier {
    /// Their trials, as far as they can be true.
    pub trials: Vec<Trial>,
    /// How many of them came to a limit, by class.
    cut_off: BTreeMap<ErrorClass, u64>,
    /// The configurations of those that were imported.
    imported: HashSet<Config>,
}

/// What a run came to.
pub struct Report {
    /// As `tune --json` prints it.
    pub json: Json,
    text: String,
    /// Why there is no winner, where there should be one.
    pub failure: Option<anyhow::Error>,
    /// Why records of it are lost, where they are; the run ended with that.
    pub lost: Option<anyhow::Error>,
}

/// Tunes a workload, or each workload of a set.
///
/// # Errors
/// Bad input where an argument does not fit or the database given cannot be written; failure where no candidate gave a
/// right answer, workers do not start or records cannot be written.
pub fn run(args: &TuneArgs, as_json: bool) -> anyhow::Result<()> {
    let workloads = args.of.workloads()?;
    let interrupts = Interrupts::watch()?;
    args.of.machine.warn_of_limits();
    if let [workload] = &workloads[..] {
        let report = tune(args, workload, false, &interrupts)?;
        if report.failure.is_none() || as_json {
            write_result(as_json, &report.json, &report.text)?;
        }
        return report.lost.or(report.failure).map_or(Ok(()), Err);
    }
    // The set's own database may have nothing to learn from yet; another one has it, or never will.
    if let Some(transfer) = &args.transfer
        && transfer.path != args.records.database()?.path
    {
        transfer.open()?;
    }
    let mut reports = Vec::new();
    let mut fault = None;
    for workload in &workloads {
        if interrupts.stop.load(Ordering::Relaxed) {
            break;
        }
        let mut report = match tune(args, workload, true, &interrupts) {
            Ok(report) => report,
            Err(error) if reports.is_empty() => return Err(error),
            // What was found until then is told.
            Err(error) => {
                fault = Some(error.context(workload.to_string()));
                break;
            }
        };
        message(&match &report.failure {
            None => format!("{}\n", report.text),
            Some(failure) => format!("error: {workload}: {}\n", describe(failure)),
        });
        fault = report.lost.take().map(|lost| lost.context(workload.to_string()));
        reports.push(report);
        if fault.is_some() {
            break;
        }
    }
    let mut rows = vec![["workload", "GFLOP/s", "time"].map(str::to_owned).to_vec()];
    for (workload, report) in workloads.iter().zip(&reports) {
        let number = |name: &str| report.json["best"][name].as_f64();
        rows.push(vec![
            workload.to_string(),
            number("gflops").map_or("none".to_owned(), digits),
            number("ms_median").map_or(String::new(), |ms| duration(ms * 1e6)),
        ]);
    }
    let json = json!({"workloads": reports.iter().map(|r| &r.json).collect::<Vec<_>>()});
    write_result(as_json, &json, &table(&rows))?;
    fault.or_else(|| reports.into_iter().find_map(|report| report.failure)).map_or(Ok(()), Err)
}

/// Tunes one workload, alone or of a set.
///
/// # Errors
/// As [`run`], but that a run without a winner is a report of that.
pub fn tune(args: &TuneArgs, workload: &Workload, is_of_set: bool, interrupts: &Interrupts) -> anyhow::Result<Report> {
    let wall = WallTime::new();
    Device::check_memory(workload).or_bad_input("")?;
    let target = args.of.machine.runnable_target()?;
    let n_threads = args.of.machine.threads;
    let task = make_task(workload.clone(), target, n_threads, args.template.as_deref())?;
    let key = task_key(&task, args.cold);
    let see = "see `tilewright searches`";
    let has_model = search::transfers(&args.search).or_bad_input(see)?;
    let mut problem = task.problem();
    let mut guesses = if args.no_guesses { Vec::new() } else { task.guesses(args.seed) };
    match args.transfer.as_ref().map(|transfer| learned(transfer, &key, &task, has_model)) {
        None => {}
        Some(Ok(Learned { experience, carried_over })) => {
            if experience.is_some() {
                // What was measured elsewhere says more than the template's model of the machine.
                guesses.clear();
            }
            if experience.is_none() || !args.no_guesses {
                guesses.splice(0..0, carried_over);
            }
            problem.experience = experience.map(Arc::new);
        }
        // The first of a set may have none before it to learn from.
        Some(Err(error)) if is_of_set => message(&format!("{}: {error:#}", key.workload)),
        Some(Err(error)) => return Err(error),
    }
    if let Some(model) = &args.predict {
        let predicted = likely_configs(model, &task, args.cold, MOST_PREDICTED)?;
        let n_configs = count(predicted.len() as u64, "configuration");
        message(&format!("beginning with {n_configs} predicted by {}", model.display()));
        guesses.splice(0..0, predicted);
    }
    let mut search = search::build(&args.search, problem, args.seed).or_bad_input(see)?;
    let database = args.records.database()?;
    let opened = database.open_to_write()?;
    let options = options(args, n_threads)?;
    let earlier = earlier(&opened.store, &key, &task, &options.limits()).map_err(|error| database.refuse(error))?;

    let time = args.time.or(if args.trials.is_none() { Some(DEFAULT_TIME) } else { None });
    let left = args.trials.map(|trials| trials.saturating_sub(earlier.trials.len() as u64));
    let nothing_left = match left {
        Some(0) => Some("all trials asked for are recorded already"),
        _ if earlier.trials.len() as u128 >= task.space.size() => Some("the whole space is recorded already"),
        _ => None,
    };
    introduce(args, &key, &task, &database, &earlier, time.filter(|_| nothing_left.is_none()));
    let mut run = Run {
        args,
        workload: workload.clone(),
        task,
        database,
        key,
        options,
        peak_gflops: None,
        wall,
        is_recorded: true,
    };
    if let Some(nothing_left) = nothing_left {
        if let Some(known) = run.known_winner(&opened.store).map_err(|error| run.database.refuse(error))? {
            message(nothing_left);
            run.wall.start = run.wall.lap();
            return Ok(run.announce_again(&earlier, &known));
        }
        let race = if args.no_race { "" } else { "; the leaders have yet to be raced" };
        message(&format!("{nothing_left}: there is nothing to search{race}"));
    }

    run.peak_gflops = peak::gflops(&host::target(), workload.dtype, n_threads).ok();
    let limits = EndLimits::of(time);
    run.announce(time, limits);
    let Some(mut device) = run.device(interrupts)? else { return Ok(run.interrupted(&earlier)) };
    run.wall.start = run.wall.lap();
    let best_ns = earlier.trials.iter().map(|t| t.outcome.cost()).min_by(f64::total_cmp).filter(|ns| ns.is_finite());
    let progress = Progress::start(Status {
        time,
        n_trials: earlier.trials.len() as u64,
        most_trials: args.trials,
        best_gflops: best_ns.map(|ns| gflops(workload, ns)),
        peak_gflops: run.peak_gflops,
        ..Status::default()
    });
    let recorder = Recorder::new(opened, &run.task, run.key.clone(), args.search.clone(), args.seed);
    let recorder = Arc::new(Mutex::new(recorder));
    interrupts.concern(Some(&recorder), &progress);

    let mut trials = earlier.trials.clone();
    let budget = Budget { trials: left, time, ..Budget::default() };
    let mut lost = None;
    let summary = tilewright_tune::tune(
        search.as_mut(),
        (&run.task).into(),
        &mut device,
        HeadStart { prior: &earlier.trials, guesses: &guesses },
        budget,
        &interrupts.stop,
        &mut |event| {
            if let Err(error) = take_note(&event, &run.task, &recorder, &progress, &mut trials) {
                // What was found until then is raced and told all the same.
                lost.get_or_insert(error);
                interrupts.stop.store(true, Ordering::Relaxed);
            }
            Ok(())
        },
    );
    run.wall.search = run.wall.lap();
    let end = match &summary {
        Ok(_) if !args.no_race => {
            // What is at the path of a database that is gone is another's; opening it would give it the log of ours.
            let others = if lost.is_none() { trials_of_others(&trials, &run, &progress) } else { Vec::new() };
            let known = [trials.as_slice(), others.as_slice()].concat();
            finals::run(&mut device, &run.task, &known, &earlier.imported, limits, &interrupts.stop, &progress)
        }
        _ => Ok(End::NoTime),
    };
    progress.finish();
    run.wall.end_race(end.as_ref().ok());
    let summary = summary?;
    let winner = match &end {
        Ok(End::Raced(finals)) => Some(run.winner(finals)),
        _ => None,
    };
    let recorded = recorder.lock().unwrap_or_else(PoisonError::into_inner).conclude(winner.as_ref());
    let end = end.map_err(anyhow::Error::from_boxed).context("measuring the leading candidates")?;
    drop(device);
    run.wall.end = run.wall.lap();
    let lost = lost.or(recorded.err()).map(|error| run.database.failure(&error));
    run.is_recorded = lost.is_none();
    let report = run.conclude(&summary, &earlier, &end, &trials);
    Ok(Report { lost, ..report })
}

/// Where the time of a run went, in seconds by the wall clock: parts that add up to the whole.
#[derive(Debug, Clone, Copy)]
struct WallTime {
    last: Instant,
    /// Until the search begins.
    start: f64,
    search: f64,
    race: f64,
    untuned: f64,
    /// Writing what is left and ending workers.
    end: f64,
}

impl WallTime {
    /// From now on.
    fn new() -> WallTime {
        WallTime { last: Instant::now(), start: 0.0, search: 0.0, race: 0.0, untuned: 0.0, end: 0.0 }
    }

    /// Seconds since the last part ended.
    fn lap(&mut self) -> f64 {
        let last = std::mem::replace(&mut self.last, Instant::now());
        (self.last - last).as_secs_f64()
    }

    /// The race has ended, with the untuned program behind it.
    fn end_race(&mut self, end: Option<&End>) {
        let both = self.lap();
        self.untuned = match end {
            Some(End::Raced(finals)) => finals.untuned_time.as_secs_f64().min(both),
            _ => 0.0,
        };
        self.race = both - self.untuned;
    }

    fn parts(self) -> [(&'static str, f64); 5] {
        let WallTime { start, search, race, untuned, end, .. } = self;
        [("start", start), ("search", search), ("race", race), ("untuned", untuned), ("end", end)]
    }

    fn total(self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }

    fn json(self) -> Json {
        let parts = self.parts().into_iter().chain([("total", self.total())]);
        Json::Object(parts.map(|(name, seconds)| (name.to_owned(), seconds.into())).collect())
    }
}

impl std::fmt::Display for WallTime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = self.parts().map(|(name, seconds)| format!("{name} {seconds:.1} s"));
        write!(f, "{:.1} s: {}", self.total(), parts.join(", "))
    }
}

/// What other processes have recorded of the same space meanwhile: a winner that has not been raced against it must not
/// hide it.
fn trials_of_others(own: &[Trial], run: &Run, progress: &Progress) -> Vec<Trial> {
    let recorded = || -> anyhow::Result<Vec<Record>> {
        let TaskKey { workload, target, template, threads } = &run.key;
        let store = run.database.open_to_read()?;
        let Some(store) = store else { return Ok(Vec::new()) };
        let judge = |_: &str| Judge::of(&run.task);
        let found = store.trials_of(workload, target, *threads, Some(template), &judge);
        Ok(found.map_err(|error| run.database.failure(&error))?.0)
    };
    let recorded = recorded().unwrap_or_else(|error| {
        progress.message(&format!("what others have recorded is not known: {}", describe(&error)));
        Vec::new()
    });
    let own: HashSet<&Config> = own.iter().map(|trial| &trial.config).collect();
    let limits = run.options.limits();
    let recorded = recorded.iter().filter(|record| !may_do_better(record, &limits));
    let recorded = recorded.filter_map(|record| record.trial(&run.task.space).ok());
    let others: Vec<Trial> = recorded.filter(|trial| !own.contains(&trial.config)).collect();
    if !others.is_empty() {
        progress.message(&format!("another process has recorded {} meanwhile", count(others.len() as u64, "trial")));
    }
    others
}

/// What the trials of a task have in common.
pub fn task_key(task: &Task, cold: bool) -> TaskKey {
    TaskKey {
        workload: task.setting.workload.to_string(),
        target: target_name(&task.setting.target, cold),
        template: task.template.name.to_owned(),
        threads: u32::try_from(task.setting.n_threads).expect("no machine has so many CPUs"),
    }
}

/// Records a trial or a batch, shows it and adds it to the trials.
///
/// # Errors
/// Where the database cannot be written, or is gone.
pub fn take_note(
    event: &Event,
    task: &Task,
    recorder: &Mutex<Recorder>,
    progress: &Progress,
    trials: &mut Vec<Trial>,
) -> Result<(), StoreError> {
    let mut recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner);
    match event {
        Event::Trial(report) => {
            recorder.add(task, report);
            trials.push(report.trial.clone());
            progress.update(|status| {
                status.n_trials += 1;
                status.n_new += 1;
                status.best_gflops = report.best_ns.map(|ns| gflops(&task.setting.workload, ns));
                if let Some(class) = report.trial.outcome.class() {
                    *status.errors.entry(class).or_default() += 1;
                }
            });
        }
        Event::Batch(_) => match recorder.commit() {
            // What it could not write is written with a later batch.
            Err(error @ StoreError::Busy { .. }) => progress.message(&format!("the database is {error}; going on")),
            committed => return committed,
        },
    }
    Ok(())
}

/// What earlier tasks are to a search.
struct Learned {
    /// Something to fit its model on, where it has one.
    experience: Option<Experience>,
    /// Configurations to begin with.
    carried_over: Vec<Config>,
}

/// What the records that `--transfer` names are to the search, which has a model that can learn from them or not.
fn learned(transfer: &Transfer, key: &TaskKey, task: &Task, has_model: bool) -> anyhow::Result<Learned> {
    let tasks = transfer.tasks(key)?;
    let n_tasks = count(tasks.len() as u64, "task");
    let experience = has_model.then(|| Experience::of(&tasks)).filter(|experience| !experience.is_empty());
    let carried_over = warm_start(task, &tasks);
    let n_configs = count(carried_over.len() as u64, "configuration");
    let name = transfer.name();
    match &experience {
        Some(experience) => {
            let n_programs = count(experience.contexts.len() as u64, "program");
            message(&format!("learning from {n_programs} of {n_tasks} in {name}, {n_configs} carried over"));
        }
        None if carried_over.is_empty() => {
            let what = match has_model {
                true => "there is no program to learn from".to_owned(),
                false => format!("no configuration of template {} can be carried over", key.template),
            };
            return Err(bad_input(format!("{what} among the {n_tasks} of database {name}")));
        }
        None => message(&format!("beginning with {n_configs} carried over from {name}")),
    }
    Ok(Learned { experience, carried_over })
}

/// The trials of earlier runs that belong to the space as it is now and can be true, without those that failed of
/// lower limits than these: they may do better. The others are measured again where the search comes by them.
///
/// # Errors
/// Where the database fails.
pub fn earlier(store: &Store, key: &TaskKey, task: &Task, limits: &Limits) -> Result<Earlier, StoreError> {
    let mut passed_over = PassedOver::default();
    let mut records = trials_of(store, key, &|_| Judge::of(task), &mut passed_over)?;
    if passed_over.total() > 0 {
        message(&passed_over.to_string());
    }
    let n_records = records.len();
    records.retain(|record| !may_do_better(record, limits));
    let n_below = n_records - records.len();
    if n_below > 0 {
        message(&format!("{} that failed of lower limits may be tried again", count(n_below as u64, "candidate")));
    }
    let (mut trials, mut imported, mut cut_off) = (Vec::with_capacity(records.len()), HashSet::new(), BTreeMap::new());
    for record in &records {
        let Ok(trial) = record.trial(&task.space) else { continue };
        if record.is_imported {
            imported.insert(trial.config.clone());
        }
        if let (Some(class), Some(_)) = (trial.outcome.class(), record.limit) {
            *cut_off.entry(class).or_default() += 1;
        }
        trials.push(trial);
    }
    Ok(Earlier { trials, cut_off, imported })
}

/// Whether a record is of a failure of a lower limit than these.
fn may_do_better(record: &Record, limits: &Limits) -> bool {
    record.limit.is_some_and(|limit| limit.is_below(limits))
}

/// How candidates are built, run and timed.
fn options(args: &TuneArgs, n_threads: usize) -> anyhow::Result<Options> {
    let options = device_options(n_threads)?;
    Ok(Options {
        seed: args.seed,
        cold: args.cold,
        to_the_end: args.to_the_end,
        build_timeout: args.build_timeout.unwrap_or(options.build_timeout),
        run_timeout: args.run_timeout.unwrap_or(options.run_timeout),
        min_time: args.min_time.unwrap_or(options.min_time),
        ..options
    })
}

/// Says what is going to happen.
fn introduce(
    args: &TuneArgs,
    key: &TaskKey,
    task: &Task,
    database: &Database,
    earlier: &Earlier,
    time: Option<Duration>,
) {
    message(&format!(
        "{} on {}, {}: template {}, {}, search {}, seed {}",
        key.workload,
        key.target,
        count(key.threads, "thread"),
        key.template,
        count(task.space.size(), "configuration"),
        args.search,
        args.seed
    ));
    let there = match earlier.trials.len() as u64 {
        0 => String::new(),
        n => format!(", where {} of earlier runs are", count(n, "trial")),
    };
    message(&format!("recording to {}{there}", database.name()));
    if args.time.is_none()
        && let Some(time) = time
    {
        message(&format!("searching for {} s (choose with --time or --trials)", time.as_secs()));
    }
}

/// On the first interrupt the run ends early but in order; on the second it ends at once, with all recorded.
pub struct Interrupts {
    /// Raised by the first one.
    pub stop: AtomicBool,
    /// What records and shows the run at hand.
    at_hand: Mutex<Option<AtHand>>,
}

/// What records a run, once it has begun, and what shows it.
struct AtHand {
    recorder: Option<Arc<Mutex<Recorder>>>,
    progress: Progress,
}

impl Interrupts {
    /// Watches from now on.
    ///
    /// # Errors
    /// Where the system does not let us.
    pub fn watch() -> anyhow::Result<Arc<Interrupts>> {
        let interrupts = Arc::new(Interrupts { stop: AtomicBool::new(false), at_hand: Mutex::new(None) });
        let watching = interrupts.clone();
        on_interrupt(move || watching.leave())?;
        Ok(interrupts)
    }

    /// The run at hand is this one now; without a recorder as long as it starts.
    pub fn concern(&self, recorder: Option<&Arc<Mutex<Recorder>>>, progress: &Progress) {
        let at_hand = AtHand { recorder: recorder.cloned(), progress: progress.clone() };
        *self.at_hand.lock().unwrap_or_else(PoisonError::into_inner) = Some(at_hand);
    }

    fn leave(&self) {
        let at_hand = self.at_hand.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = !self.stop.swap(true, Ordering::Relaxed);
        let Some(AtHand { recorder, progress }) = at_hand.as_ref() else { std::process::exit(130) };
        if is_first {
            progress.message("stopping; interrupt again to leave at once");
            return;
        }
        let commit = |recorder: &Arc<Mutex<Recorder>>| {
            let mut recorder = recorder.lock().unwrap_or_else(PoisonError::into_inner);
            recorder.commit().map_err(|error| recorder.database().failure(&error))
        };
        let committed = recorder.as_ref().map_or(Ok(()), commit);
        progress.finish();
        match committed {
            Ok(()) => message("left; all trials are recorded"),
            Err(fault) => {
                message(&format!("error: left, and the last batch could not be recorded: {}", describe(&fault)));
            }
        }
        std::process::exit(130);
    }
}

impl Run<'_> {
    /// Says how long what comes may take.
    fn announce(&self, time: Option<Duration>, limits: EndLimits) {
        let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
        let mut parts = Vec::new();
        if let Some(peak) = self.peak_gflops {
            let run_seconds = gflops(&self.workload, 1.0) / (1e9 * peak);
            parts.push(format!("start: about {:.1} s", self.start_seconds(peak)));
            if run_seconds >= SLOW_RUN_S {
                parts.push(format!("first kernel: some {run_seconds:.1} s a run"));
            }
        }
        parts.push(match (time, self.args.trials) {
            (Some(time), _) => format!("search: {}", seconds(time)),
            (None, trials) => format!("search: until there are {}", count(trials.unwrap_or(0), "trial")),
        });
        if !self.args.no_race {
            parts.push(format!("race: at most {}", seconds(limits.race)));
            parts.push(format!("untuned program: at most {}", seconds(limits.untuned)));
        }
        message(&parts.join("; "));
    }

    /// About how long the start takes, where kernels reach this peak at best.
    fn start_seconds(&self, peak_gflops: f64) -> f64 {
        let program = self.workload.program();
        let n_elements: u64 = program.buffers.iter().filter_map(|buffer| buffer.n_elements()).sum();
        // All CPUs take part, in double precision.
        let n_cpus = host::allowed_cpus().len() as f64 / self.task.setting.n_threads as f64;
        let flops = 1e9 * peak_gflops * n_cpus * self.workload.dtype.bytes() as f64 / DType::F64.bytes() as f64;
        START_S + 2.0 * work(&program) / (PART_OF_PEAK * flops) + n_elements as f64 * START_NS_AN_ELEMENT / 1e9
    }

    /// The device with its workers; none after an interrupt.
    fn device(&self, interrupts: &Interrupts) -> anyhow::Result<Option<Device>> {
        start_device(&self.workload, &self.task.setting.target, self.options.clone(), Some(interrupts))
    }

    /// The result of a run that was interrupted before it began.
    fn interrupted(mut self, earlier: &Earlier) -> Report {
        self.wall.start = self.wall.lap();
        let mut json = self.json(earlier.trials.len() as u64, &errors_of(&earlier.trials), None);
        json.insert("best".into(), Json::Null);
        json.insert("verified".into(), false.into());
        Report { json: Json::Object(json), text: INTERRUPTED.to_owned(), failure: None, lost: None }
    }

    /// The winner of this template's race, where it was run here and nothing was recorded since.
    fn known_winner(&self, store: &Store) -> Result<Option<Winner>, StoreError> {
        let TaskKey { workload, target, template, threads } = &self.key;
        match store.best(workload, target, *threads, Some(template), &|_| Judge::of(&self.task))?.0 {
            Some(tilewright_tune::Best::Confirmed(winner)) if store.is_settled(&winner)? => Ok(Some(winner)),
            _ => Ok(None),
        }
    }

    fn winner(&self, finals: &Finals) -> Winner {
        let config = |at: usize| self.task.space.config_to_json(&finals.ranking[at].config);
        let median_ns = finals.ranking[0].timing.median_ns;
        Winner {
            workload: self.key.workload.clone(),
            target: self.key.target.clone(),
            template: self.key.template.clone(),
            threads: self.key.threads,
            config: config(0),
            median_ns,
            margin: finals.margin(),
            runner_up: (finals.ranking.len() > 1).then(|| config(1)),
            gflops: gflops(&self.workload, median_ns),
            verified: true,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            toolchain: recorder::toolchain(),
            unix_time: since_1970().as_secs(),
            is_imported: false,
        }
    }

    /// The result of a run that had nothing left to do.
    fn announce_again(&self, earlier: &Earlier, winner: &Winner) -> Report {
        let mut json = self.json(earlier.trials.len() as u64, &errors_of(&earlier.trials), None);
        json.insert("best".into(), self.best_json(winner));
        json.insert("verified".into(), winner.verified.into());
        let text = format!(
            "{}\nwinner   {} GFLOP/s, {}{}\nconfig   {}",
            self.title(),
            digits(gflops(&self.workload, winner.median_ns)),
            duration(winner.median_ns),
            winner.margin.map_or(String::new(), |margin| format!(", {} ahead of the runner-up", percent(margin))),
            winner.config
        );
        Report { json: Json::Object(json), text, failure: None, lost: None }
    }

    /// The result of a run, however it ended.
    fn conclude(&self, summary: &Summary, earlier: &Earlier, end: &End, trials: &[Trial]) -> Report {
        let to_raise = option_to_raise(&[&earlier.cut_off, &summary.cut_off], trials.len() as u64);
        if let Some(option) = to_raise
            && trials.iter().any(|trial| trial.outcome.timing().is_some())
        {
            message(&format!("most candidates came to the limit of {option}: raise it, and they are tried again"));
        }
        if summary.ended == Ended::Exhausted {
            message("the whole space has been measured");
        }
        let errors = errors_of(trials);
        let mut json = self.json(trials.len() as u64, &errors, Some(summary));
        let (text, failure) = match end {
            End::Raced(finals) => {
                let winner = self.winner(finals);
                json.insert("best".into(), self.best_json(&winner));
                json.insert("relative_error".into(), json!(finals.ranking[0].relative_error));
                json.insert("tie".into(), finals.is_tie().into());
                json.insert("untuned_gflops".into(), json!(finals.untuned.ns().map(|ns| gflops(&self.workload, ns))));
                (self.text(summary, finals, &winner, &errors), None)
            }
            End::NoTime if let Some(best) = self.fastest(summary, trials, &earlier.imported) => {
                json.insert("best".into(), best.to_json(&self.workload));
                let why = if self.args.no_race { "not raced" } else { "the time was too short for a race" };
                let text = format!(
                    "{}\nfastest  {} GFLOP/s, {}: one trial, {why}\nconfig   {}\n{}",
                    self.title(),
                    digits(gflops(&self.workload, best.median_ns)),
                    duration(best.median_ns),
                    best.config,
                    self.ending(summary, &errors)
                );
                (text, None)
            }
            End::NoTime | End::NoLeader => {
                json.insert("best".into(), Json::Null);
                let failure =
                    (summary.ended != Ended::Interrupted).then(|| self.nothing_valid(trials, &errors, to_raise));
                (INTERRUPTED.to_owned(), failure)
            }
        };
        json.insert("verified".into(), (!json["best"].is_null()).into());
        Report { json: Json::Object(json), text, failure, lost: None }
    }

    fn best_json(&self, winner: &Winner) -> Json {
        let best = tilewright_tune::Best::Confirmed(winner.clone());
        KnownBest::new(best).to_json(&self.workload)
    }

    /// The fastest trial, as what is known best without a race. What was imported need not have been measured on
    /// this machine: it counts only where nothing else does.
    fn fastest(&self, summary: &Summary, trials: &[Trial], imported: &HashSet<Config>) -> Option<KnownBest> {
        let own = trials.iter().filter(|trial| trial.outcome.timing().is_some() && !imported.contains(&trial.config));
        let own = own.min_by(|a, b| a.outcome.cost().total_cmp(&b.outcome.cost()));
        let trial = own.or(summary.best.as_ref())?;
        Some(KnownBest {
            template: self.key.template.clone(),
            config: self.task.space.config_to_json(&trial.config),
            median_ns: trial.outcome.timing()?.median_ns,
            margin: None,
            is_confirmed: false,
            is_imported: imported.contains(&trial.config),
        })
    }

    fn nothing_valid(
        &self,
        trials: &[Trial],
        errors: &BTreeMap<ErrorClass, u64>,
        to_raise: Option<&str>,
    ) -> anyhow::Error {
        if trials.is_empty() {
            return anyhow::anyhow!("the time was up before a candidate was measured (give more with --time)");
        }
        // What was not done in time says which option gives it more.
        let raised: Vec<&str> = errors.keys().filter_map(|class| option_of(*class)).collect();
        let more = format!(" (give more with {})", raised.join(" and "));
        if trials.iter().any(|trial| trial.outcome.timing().is_some()) {
            let hint = if raised.is_empty() { " (run the same to race others)" } else { more.as_str() };
            return anyhow::anyhow!("the leading candidates failed when they were measured again{hint}");
        }
        let example = trials.iter().find_map(|trial| match &trial.outcome {
            Outcome::Failed { class, message } => Some(format!("; for example {class}: {message}")),
            Outcome::Measured(_) => None,
        });
        anyhow::anyhow!(
            "none of {} gave a right answer ({}){}{}",
            count(trials.len() as u64, "candidate"),
            errors_text(errors),
            example.unwrap_or_default(),
            to_raise.map_or(String::new(), |option| format!(" (raise {option}, and they are tried again)"))
        )
    }

    fn title(&self) -> String {
        format!("{} on {}, {}", self.key.workload, self.key.target, count(self.key.threads, "thread"))
    }

    fn text(&self, summary: &Summary, finals: &Finals, winner: &Winner, errors: &BTreeMap<ErrorClass, u64>) -> String {
        let of_peak = |gflops: f64| {
            self.peak_gflops.map_or(String::new(), |peak| {
                format!(", {} of the measured peak of {}", percent(gflops / peak), digits(peak))
            })
        };
        let mut text = format!(
            "{}\nwinner   {} GFLOP/s, {}{}; verified against the reference{}\n",
            self.title(),
            digits(winner.gflops),
            duration(winner.median_ns),
            of_peak(winner.gflops),
            finals.ranking[0].relative_error.map_or(String::new(), |e| format!(", relative error {e:.1e}"))
        );
        let n = finals.ranking.len() as u64;
        text += &match winner.margin {
            None => "margin   no other candidate came near\n".to_owned(),
            Some(margin) if finals.is_tie() => format!(
                "margin   tie within noise: the runner-up of {n} is {} slower, rounds spread by {}\n",
                percent(margin),
                percent(finals.spread())
            ),
            Some(margin) => format!(
                "margin   {} ahead of the runner-up of {n}; rounds spread by {}\n",
                percent(margin),
                percent(finals.spread())
            ),
        };
        text += &match finals.untuned {
            Untuned::Measured { ns } => format!(
                "untuned  {} GFLOP/s, {}: the winner is {} times as fast\n",
                digits(gflops(&self.workload, ns)),
                duration(ns),
                digits(ns / winner.median_ns)
            ),
            Untuned::SlowerThan { limit } => format!(
                "untuned  > {} s: the winner is more than {} times as fast\n",
                limit.as_secs_f64(),
                digits(limit.as_nanos() as f64 / winner.median_ns)
            ),
            Untuned::Failed => "untuned  not measured\n".to_owned(),
        };
        text + &format!("config   {}\n{}", winner.config, self.ending(summary, errors))
    }

    /// What each result ends with: failures, where the time went and where the records are.
    fn ending(&self, summary: &Summary, errors: &BTreeMap<ErrorClass, u64>) -> String {
        let errors = if errors.is_empty() { String::new() } else { format!("errors   {}\n", errors_text(errors)) };
        let Seconds { build, run, verify } = summary.seconds;
        let mut text = format!(
            "{errors}time     {}\nsearch   {} ({} trials/s): proposals {:.1} s, build {build:.1} s on all workers, run {run:.1} s, \
             verify {verify:.1} s\n",
            self.wall,
            count(summary.n_trials, "trial"),
            digits(rate(summary)),
            summary.search_seconds,
        );
        if self.is_recorded {
            text += &format!("records  {}\n", self.database.name());
        }
        text
    }

    fn json(&self, n_trials: u64, errors: &BTreeMap<ErrorClass, u64>, summary: Option<&Summary>) -> Map<String, Json> {
        let seconds = summary.map_or(Seconds::default(), |s| s.seconds);
        let errors: Map<String, Json> =
            errors.iter().map(|(class, n)| (class.name().to_owned(), (*n).into())).collect();
        let json = json!({
            "workload": self.key.workload,
            "template": self.key.template,
            "search": self.args.search,
            "target": self.key.target,
            "threads": self.key.threads,
            "seed": self.args.seed,
            "trials": n_trials,
            "new_trials": summary.map_or(0, |s| s.n_trials),
            "seconds": summary.map_or(0.0, |s| s.wall_seconds),
            "wall_seconds": self.wall.json(),
            "trials_per_second": summary.map_or(0.0, rate),
            "seconds_in": {
                "search": summary.map_or(0.0, |s| s.search_seconds),
                "build": seconds.build,
                "run": seconds.run,
                "verify": seconds.verify,
            },
            "errors": errors,
            "peak_gflops": self.peak_gflops,
            "db": self.database.path.to_string_lossy(),
            "recorded": self.is_recorded,
        });
        match json {
            Json::Object(object) => object,
            _ => unreachable!("it is written as an object"),
        }
    }
}

fn rate(summary: &Summary) -> f64 {
    if summary.wall_seconds > 0.0 { summary.n_trials as f64 / summary.wall_seconds } else { 0.0 }
}

/// The option to raise where most of so many candidates came to its limit, as some counts by class say
/// together.
fn option_to_raise(cut_off: &[&BTreeMap<ErrorClass, u64>], n_trials: u64) -> Option<&'static str> {
    let n_of = |class: &ErrorClass| cut_off.iter().filter_map(|counts| counts.get(class)).sum::<u64>();
    ErrorClass::ALL.into_iter().find(|class| 2 * n_of(class) > n_trials).and_then(option_of)
}

/// The option that a class of failures is a matter of.
pub fn option_of(class: ErrorClass) -> Option<&'static str> {
    match class {
        ErrorClass::BuildTimeout => Some("--build-timeout"),
        ErrorClass::RunTimeout => Some("--run-timeout"),
        _ => None,
    }
}

/// Failures by class.
pub fn errors_of(trials: &[Trial]) -> BTreeMap<ErrorClass, u64> {
    let mut errors = BTreeMap::new();
    for class in trials.iter().filter_map(|trial| trial.outcome.class()) {
        *errors.entry(class).or_default() += 1;
    }
    errors
}
