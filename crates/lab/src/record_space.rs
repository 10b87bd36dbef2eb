//! Recording of a space: the outcomes of all configurations, of a sample, or of listed ones.

mod listed;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::time::{Duration, Instant};

use serde_json::{Map, Value as Json, json};
use tilewright::format::{count, digits, errors_text, grouped};
use tilewright::version::BUILD;
use tilewright::{
    Caches, Database, Error, Note, Opened, Plan, Recorder, Recording, earlier, errors_of, gflops, task_key,
};
use tilewright_device::device::WorkerCommand;
use tilewright_device::{Device, DeviceOptions};
use tilewright_ir::op::Workload;
use tilewright_search::{
    Budget, Config, ErrorClass, Event, HeadStart, Outcome, RecordedSpace, Space, Summary, Trial, Tuning,
};
use tilewright_tune::{Task, TaskKey};

pub use self::listed::read_configs;
use crate::Caller;

/// Search that draws samples; configurations are recorded under its name.
const SEARCH: &str = "random";
/// Number of configurations that are measured to estimate the time of the whole space.
const N_FIRST: usize = 16;
/// Maximum estimated time in seconds of a recording that was not limited explicitly.
const LONGEST_S: f64 = 3600.0;
/// Maximum number of configurations to record.
pub const MOST: u64 = 10_000_000;

/// Extent of a recording.
#[derive(Clone, Copy)]
pub enum Extent<'a> {
    /// All of them.
    All,
    /// Random sample of this size, or all if the space is smaller.
    Sample(u64),
    /// Listed configurations, in this order, without repetition.
    Listed(&'a [Config]),
}

/// Request to record a space.
#[derive(Clone, Copy)]
pub struct RecordingRequest<'a> {
    /// Task whose space is recorded.
    pub task: &'a Task,
    /// Configurations to record.
    pub extent: Extent<'a>,
    /// Seed of the sample and of the random inputs.
    pub seed: u64,
    /// Timeout of a configuration's runs; `None` for the default.
    pub run_timeout: Option<Duration>,
}

/// Listed configuration with its outcome.
#[derive(Debug, Clone)]
pub struct ListedConfig {
    /// The configuration.
    pub config: Config,
    /// Outcome; `None` if interrupted before it was measured.
    pub outcome: Option<Outcome>,
    /// Throughput in GFLOP/s, if measured.
    pub gflops: Option<f64>,
}

impl ListedConfig {
    fn new(config: Config, outcome: Option<&Outcome>, workload: &Workload) -> ListedConfig {
        let timing = outcome.and_then(Outcome::timing);
        ListedConfig {
            config,
            outcome: outcome.cloned(),
            gflops: timing.map(|timing| gflops(workload, timing.median_ns)),
        }
    }

    /// Name of the outcome, and the reason of a failure.
    fn said(&self) -> (Option<&'static str>, Option<&str>) {
        let reason = match &self.outcome {
            Some(Outcome::Failed { message, .. }) => Some(message.as_str()),
            _ => None,
        };
        (self.outcome.as_ref().map(|outcome| Outcome::name_of(outcome.class())), reason)
    }

    fn json(&self, space: &Space) -> Json {
        let (outcome, reason) = self.said();
        json!({
            "config": space.config_to_json(&self.config),
            "outcome": outcome,
            "reason": reason,
            "median_ns": self.outcome.as_ref().and_then(Outcome::timing).map(|timing| timing.median_ns),
            "gflops": self.gflops,
        })
    }

    /// Line of a table: throughput, or the class of the error with its reason, and the configuration.
    fn line(&self, space: &Space) -> String {
        let said = match (self.gflops, self.said()) {
            (Some(gflops), _) => format!("{} GFLOP/s", digits(gflops)),
            (None, (Some(class), reason)) => {
                format!("{class} ({})", reason.unwrap_or_default().lines().next().unwrap_or_default())
            }
            (None, (None, _)) => "not measured".to_owned(),
        };
        format!("{said:>16}  {}", space.config_to_json(&self.config))
    }
}

/// Result of a recording.
#[derive(Debug)]
pub struct RecordedPart {
    /// Key of the trials.
    pub key: TaskKey,
    /// Recorded configurations.
    pub space: RecordedSpace,
    /// Number of configurations in the whole space.
    pub size: u128,
    /// Number of configurations requested.
    pub n_asked: usize,
    /// Listed configurations with their outcomes, in order; `None` unless configurations were listed.
    pub listed: Option<Vec<ListedConfig>>,
    /// Number of new trials.
    pub n_new: usize,
    /// Number of failures by class.
    pub errors: BTreeMap<ErrorClass, u64>,
    /// Throughput of the best in GFLOP/s.
    pub best_gflops: Option<f64>,
    /// Duration in seconds.
    pub seconds: f64,
    /// Seed of the sample and of the random inputs.
    pub seed: u64,
}

impl RecordedPart {
    /// Returns the result as JSON, as printed by `record-space --json`.
    pub fn json(&self) -> Json {
        let RecordedPart { key, space, .. } = self;
        let errors = self.errors.iter().map(|(class, n)| (class.name().to_owned(), (*n).into()));
        json!({
            "workload": key.workload,
            "template": key.template,
            "target": key.target,
            "threads": key.threads,
            "seed": self.seed,
            "size": u64::try_from(self.size).unwrap_or(u64::MAX),
            "configurations": space.len(),
            "missing": self.n_asked - space.len(),
            "valid": space.n_valid(),
            "new_trials": self.n_new,
            "errors": errors.collect::<Map<_, _>>(),
            "best_gflops": self.best_gflops,
            "seconds": self.seconds,
            "results": self.listed.as_ref().map(|listed| {
                listed.iter().map(|listed| listed.json(space.space())).collect::<Vec<_>>()
            }),
        })
    }

    /// Formats a summary, in several lines.
    pub fn summary(&self) -> String {
        let n_missing = self.n_asked - self.space.len();
        let lines = self.listed.iter().flatten().map(|listed| listed.line(self.space.space()) + "\n");
        let mut text: String = lines.collect();
        text += &format!(
            "{} of {} recorded, {} of them valid{}",
            count(self.space.len() as u64, "configuration"),
            grouped(self.size),
            grouped(self.space.n_valid()),
            self.best_gflops.map_or(String::new(), |best| format!(", the best at {} GFLOP/s", digits(best))),
        );
        if !self.errors.is_empty() {
            text += &format!("\nerrors   {}", errors_text(&self.errors));
        }
        if n_missing > 0 {
            let n_missing = count(n_missing as u64, "configuration");
            text += &format!("\nmissing  {n_missing}: the run was interrupted; run it again to go on");
        }
        text
    }

    /// Writes the recording as T4 results, compressed by gzip if `is_packed`.
    ///
    /// # Errors
    /// Errors of the writer.
    pub fn write(&self, out: &mut dyn io::Write, is_packed: bool) -> io::Result<()> {
        let key = &self.key;
        let about = [
            ("workload", key.workload.as_str().into()),
            ("target", key.target.as_str().into()),
            ("template", key.template.as_str().into()),
            ("threads", key.threads.into()),
            ("seed", self.seed.into()),
            ("version", BUILD.into()),
        ];
        tilewright_formats::write_space(&self.space, out, is_packed, &about)
    }
}

/// Recording of a space in progress.
struct RecordingRun<'a> {
    request: RecordingRequest<'a>,
    /// Device; `None` if it was stopped before it was ready.
    device: Option<Device>,
    recording: Recording,
    caller: Caller<'a>,
    database: &'a Database,
    /// Recorded trials of the task, of any run.
    trials: Vec<Trial>,
}

/// Records a space in a database; recorded trials are reused, whichever search made them. When stopped it
/// leaves what is complete, and the next call continues from there.
///
/// # Errors
/// Bad input if the space is too large; failure if workers do not start or records cannot be written.
pub fn record(
    request: RecordingRequest,
    opened: Opened,
    worker: &WorkerCommand,
    caller: Caller,
) -> Result<RecordedPart, Error> {
    let RecordingRequest { task, seed, extent, run_timeout } = request;
    let database = &opened.database.clone();
    let key = task_key(task, Caches::Warm);
    // A recorded space is not only about the best configuration.
    let options =
        DeviceOptions { seed, to_the_end: true, ..DeviceOptions::new(worker.clone(), task.setting.n_threads) };
    let options = DeviceOptions { run_timeout: run_timeout.unwrap_or(options.run_timeout), ..options };
    let told = |note: Note| {
        if let Note::Message(line) = note {
            caller.say(line);
        }
    };
    let trials =
        earlier(&opened.store, &key, task, &options.limits(), &told).map_err(|error| database.refuse(error))?.trials;
    let device = caller.start_device(&task.setting.workload, &task.setting.target, options)?;
    let recorder = Recorder::new(opened, task, key.clone(), SEARCH.to_owned(), seed);
    let mut run = RecordingRun { request, device, recording: Recording::new(recorder), caller, database, trials };
    let start = Instant::now();
    let n_before = run.trials.len();
    let size = task.space.size();
    caller.say(format!("{}: template {}, {}", key.workload, key.template, count(size, "configuration")));
    let configs = match extent {
        Extent::All => {
            run.check_time()?;
            run.draw(MOST, &[])?
        }
        Extent::Sample(n) => run.draw(n, &[])?,
        Extent::Listed(configs) => configs.to_vec(),
    };
    run.measure(&configs)?;
    run.recording.conclude(None).map_err(|error| database.failure(&error))?;

    let mut trials = run.trials;
    let n_new = trials.len() - n_before;
    let asked: HashSet<&Config> = configs.iter().collect();
    trials.retain(|trial| asked.contains(&trial.config));
    let n_asked = configs.len();
    let recorded = RecordedSpace::new(task.space.clone(), trials.iter().cloned());
    Ok(RecordedPart {
        key,
        size,
        n_asked,
        listed: matches!(extent, Extent::Listed(_)).then(|| listed(configs, &trials, task)),
        n_new,
        errors: errors_of(&trials),
        best_gflops: recorded.optimum_ns().map(|ns| gflops(&task.setting.workload, ns)),
        space: recorded,
        seconds: start.elapsed().as_secs_f64(),
        seed,
    })
}

/// Looks up the outcome of each configuration.
fn listed(configs: Vec<Config>, trials: &[Trial], task: &Task) -> Vec<ListedConfig> {
    let outcomes: HashMap<&Config, &Outcome> = trials.iter().map(|trial| (&trial.config, &trial.outcome)).collect();
    let listed = |config: Config| {
        let outcome = outcomes.get(&config).copied();
        ListedConfig::new(config, outcome, &task.setting.workload)
    };
    configs.into_iter().map(listed).collect()
}

impl RecordingRun<'_> {
    /// Draws `n` configurations of the space, except the known ones, in random order, or all if there are
    /// fewer.
    fn draw(&self, n: u64, known: &[Trial]) -> Result<Vec<Config>, Error> {
        let mut search = self.search()?;
        search.observe(known);
        Ok(search.propose(usize::try_from(n).unwrap_or(usize::MAX)))
    }

    /// Makes the search that draws configurations.
    fn search(&self) -> Result<Box<dyn tilewright_search::Search>, Error> {
        let RecordingRequest { task, seed, .. } = self.request;
        tilewright_search::build(SEARCH, &task.space, seed).map_err(Error::failed)
    }

    /// Measures a few configurations, and refuses a space whose rest would take too long.
    fn check_time(&mut self) -> Result<(), Error> {
        let size = self.request.task.space.size();
        let first = self.draw(N_FIRST as u64, &self.trials)?;
        let Some(summary) = self.measure(&first)?.filter(|summary| summary.n_trials > 0) else { return Ok(()) };
        let rate = summary.n_trials as f64 / summary.wall_seconds;
        let seconds = (size - self.trials.len() as u128) as f64 / rate;
        if (seconds <= LONGEST_S && size <= MOST.into()) || self.caller.is_stopped() {
            return Ok(());
        }
        Err(Error::input(format!(
            "all {} configurations would take {}, at {} a second (give --max N for a sample, or for all of up to {})",
            grouped(size),
            hours(seconds),
            digits(rate),
            grouped(MOST)
        )))
    }

    /// Measures the configurations that are not recorded; `None` if all are, or if stopped.
    fn measure(&mut self, configs: &[Config]) -> Result<Option<Summary>, Error> {
        let known: HashSet<&Config> = self.trials.iter().map(|trial| &trial.config).collect();
        let n_known = configs.iter().filter(|config| known.contains(config)).count() as u64;
        let n_new = configs.len() as u64 - n_known;
        // It is never asked for proposals: the budget ends with the guesses.
        let mut search = self.search()?;
        let RecordingRun { request, device: Some(device), recording, caller, database, trials } = self else {
            return Ok(None);
        };
        if n_new == 0 || caller.is_stopped() {
            return Ok(None);
        }
        caller.say(format!("{} to measure, {n_known} recorded already in {}", grouped(n_new), database.name()));
        let plan = Plan { most_trials: Some(configs.len() as u64), n_earlier: n_known, ..Plan::default() };
        let prior = trials.clone();
        let mut lost = None;
        let RecordingRequest { task, seed, .. } = *request;
        let summary = caller.watch(&task.setting.workload, Some(SEARCH), seed, |observer| {
            observer.note(Note::Search(recording, &plan));
            let head_start = HeadStart { prior: &prior, guesses: configs };
            Tuning::new(search.as_mut(), task.into(), head_start).run(
                device,
                Budget { trials: Some(n_new), ..Budget::default() },
                caller.stop,
                &mut |event| {
                    if let Event::Trial(report) = &event {
                        trials.push(report.trial.clone());
                        observer.note(Note::Trial(report));
                    }
                    recording.take_note(&event, &|line| observer.note(Note::Message(line))).map_err(|error| {
                        lost = Some(database.failure(&error));
                        "records cannot be written".into()
                    })
                },
            )
        });
        match lost {
            Some(lost) => Err(lost),
            None => summary.map(Some).map_err(|error| Error::failed(&error).because(error)),
        }
    }
}

/// Formats a long time in words.
fn hours(seconds: f64) -> String {
    let hours = seconds / 3600.0;
    if hours < 48.0 { format!("{hours:.1} hours") } else { format!("{} days", grouped((hours / 24.0).round())) }
}
