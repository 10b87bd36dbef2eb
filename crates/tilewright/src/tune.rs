//! Tuning: a search, its records, and a race of the leaders at the end.

pub mod command;
mod files;
pub mod finals;
pub mod kernel;
pub mod many;
pub mod recorder;
mod summary;
pub mod transfer;
mod turns;
pub mod verdict;

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};
use tilewright_device::data::DataError;
use tilewright_device::device::WorkerCommand;
use tilewright_device::{Caches, Device, DeviceError, Options, host, peak};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::work;
use tilewright_ir::{DType, Target};
use tilewright_search::{
    BoxError, Budget, Config, Ended, ErrorClass, Event, Experience, HeadStart, Limits, Measure, Outcome, Report,
    Search, Seconds, Space, Summary, Trial, Tuning,
};
use tilewright_tune::record::Judges;
use tilewright_tune::transfer::{experience, warm_start};
use tilewright_tune::{self as core, Judge, PassedOver, Record, Setting, Store, StoreError, Task, TaskKey, Winner};

use crate::best::{Best, CACHES, gflops, known_best, target_name, trials_of};
use crate::database::{Database, Opened};
use crate::error::Error;
use crate::version::BUILD;
use crate::words::count;
use finals::{End, EndLimits, Finals, Untuned};
use recorder::{Recorder, Recording};
use transfer::Transfer;

/// The search where none is asked for.
pub const DEFAULT_SEARCH: &str = "auto";
/// The time where neither time nor trials are given.
pub const DEFAULT_TIME: Duration = Duration::from_secs(60);

/// Least time of a start, time for each element of a buffer, and share of the peak that matrix products reach
/// in it: as measured on 2 CPUs of Zen 4 (2026-11-25).
const START_S: f64 = 0.1;
const START_NS_AN_ELEMENT: f64 = 8.0;
const PART_OF_PEAK: f64 = 0.6;

/// Request to tune a workload.
#[derive(Debug, Clone)]
pub struct TuneRequest {
    /// The operator and its sizes.
    pub workload: Workload,
    /// The machine that code is generated for, which must be able to run here.
    pub target: Target,
    /// Threads that a kernel may use.
    pub threads: usize,
    /// The template whose space is searched; by default the operator's first one.
    pub template: Option<String>,
    /// The search, with options behind a colon.
    pub search: String,
    /// Trials to come to, those recorded by earlier runs included.
    pub trials: Option<u64>,
    /// Time for the search; [`DEFAULT_TIME`] where trials are not given either.
    pub time: Option<Duration>,
    /// Seed of the search and of the random inputs.
    pub seed: u64,
    /// Whether the configurations that the template's model ranks first are tried first.
    pub guesses: bool,
    /// Whether the leaders race at the end, and the untuned program is measured.
    pub race: bool,
    /// Whether what is recorded of it is forgotten first.
    pub fresh: bool,
    /// State of the caches before timed runs.
    pub caches: Caches,
    /// Whether hopeless candidates are run and timed to the end too.
    pub to_the_end: bool,
    /// Time to spend in the runs of each candidate.
    pub min_time: Option<Duration>,
    /// Longest that building a candidate may take.
    pub build_timeout: Option<Duration>,
    /// Longest that the runs of a candidate may take.
    pub run_timeout: Option<Duration>,
    /// Records of other workloads to learn from.
    pub transfer: Option<Transfer>,
    /// Whether the records to learn from may be missing.
    pub transfer_is_optional: bool,
    /// Configurations to begin with, before any guess.
    pub first: Vec<Config>,
    /// The device without a compiler on which candidates run, if that is not this machine.
    pub runner: Option<OnRunner>,
}

/// A device on which a runner runs kernels: see [`tilewright_device::runner`].
#[derive(Debug, Clone)]
pub struct OnRunner {
    /// The command that starts the runner.
    pub command: String,
    /// Whether the device is emulated: its times mean nothing, and are not recorded.
    pub is_emulated: bool,
}

impl TuneRequest {
    /// A minute for a kernel of one thread on this machine.
    pub fn new(workload: Workload) -> TuneRequest {
        TuneRequest {
            workload,
            target: host::target(),
            threads: 1,
            template: None,
            search: DEFAULT_SEARCH.to_owned(),
            trials: None,
            time: None,
            seed: 0,
            guesses: true,
            race: true,
            fresh: false,
            caches: Caches::Warm,
            to_the_end: false,
            min_time: None,
            build_timeout: None,
            run_timeout: None,
            transfer: None,
            transfer_is_optional: false,
            first: Vec::new(),
            runner: None,
        }
    }

    /// Makes the default request for the workload that a text names.
    ///
    /// # Errors
    /// Where it names none.
    pub fn parse(workload: &str) -> Result<TuneRequest, Error> {
        Workload::parse(workload).map(TuneRequest::new).map_err(Error::input)
    }

    /// The task that is tuned.
    ///
    /// # Errors
    /// Where this machine has not the memory, or there is no such template or space.
    pub fn task(&self) -> Result<Task, Error> {
        Device::check_memory(&self.workload).map_err(Error::input)?;
        let (workload, target) = (self.workload.clone(), self.target.clone());
        Task::new(Setting { workload, target, n_threads: self.threads }, self.template.as_deref()).map_err(Error::input)
    }

    /// Options for building, running and timing candidates.
    pub fn options(&self, worker: WorkerCommand) -> Options {
        let options = Options::new(worker, self.threads);
        Options {
            seed: self.seed,
            caches: self.caches,
            to_the_end: self.to_the_end,
            build_timeout: self.build_timeout.unwrap_or(options.build_timeout),
            run_timeout: self.run_timeout.unwrap_or(options.run_timeout),
            min_time: self.min_time.unwrap_or(options.min_time),
            runner: self.runner.as_ref().map(|runner| runner.command.clone()),
            ..options
        }
    }
}

/// A place other than this machine where candidates are measured, such as a fleet.
#[derive(Clone, Copy)]
pub struct Elsewhere<'a> {
    /// The class of its machines, by which records know it.
    pub class: &'a str,
    /// The fewest candidates that keep it busy.
    pub least_batch: usize,
    /// Measured peak, in 10⁹ operations a second, where it is known.
    pub peak_gflops: Option<f64>,
    /// Whether its machines are emulated.
    pub is_emulated: bool,
    /// Starts what measures there.
    pub start: &'a Start<'a>,
}

/// Starts what measures.
pub type Start<'a> = dyn Fn() -> Result<Box<dyn Measure + 'a>, Error> + Sync + 'a;

/// Key of the trials of a task that are measured on machines of a class.
pub fn key_of_class(class: &str, key: TaskKey) -> TaskKey {
    TaskKey { target: format!("{}@{class}", key.target), ..key }
}

/// Note on the progress of a run, sent by any of its threads.
#[derive(Debug)]
#[non_exhaustive]
pub enum Note<'a> {
    /// Message for the user.
    Message(String),
    /// A device starts.
    Start,
    /// Beginning of the run.
    Begin(&'a Begin),
    /// Plan of the run.
    Plan(&'a Plan),
    /// Finished share of the reference answer, from 0 to 1.
    Reference(f64),
    /// The search begins; whatever it has measured can be committed by this.
    Search(&'a Recording, &'a Plan),
    /// A trial has come to its end.
    Trial(&'a Report),
    /// Start of the race of this many leaders.
    Race(usize),
    /// A leader failed when it was measured again.
    LeaderFailed(ErrorClass, String),
    /// A peer cannot be measured, and why.
    LeftOut(String),
    /// Start of this many rounds, during which nothing else should run.
    Rounds(u32),
    /// Turn of one of several tasks: later notes are of it, and its trials so far can be committed by the
    /// recording.
    Turn(usize, &'a Recording),
    /// A turn has ended.
    Turned(&'a many::Turned),
}

/// Subject of a run.
#[derive(Debug, Clone)]
pub struct Begin {
    /// Key of its trials.
    pub key: TaskKey,
    /// Configurations of the space.
    pub space_size: u128,
    /// The name of the database.
    pub database: String,
    /// Trials of earlier runs.
    pub n_earlier: u64,
    /// Time that it will search, where the request left that open.
    pub default_time: Option<Duration>,
    /// Whether the device is emulated: nothing is recorded.
    pub is_emulated: bool,
}

/// Plan of a run.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Time that it searches.
    pub time: Option<Duration>,
    /// Trials to come to.
    pub most_trials: Option<u64>,
    /// Trials of earlier runs, and the fastest of them.
    pub n_earlier: u64,
    /// The throughput of the fastest of them.
    pub best_gflops: Option<f64>,
    /// Measured peak of the machine.
    pub peak_gflops: Option<f64>,
    /// About how long the start takes, and a run of a kernel at peak, in seconds.
    pub start_and_run_s: Option<(f64, f64)>,
    /// Time limits of the end; `None` without a race.
    pub limits: Option<EndLimits>,
}

/// Result of a run. Its JSON is what `tilewright tune --json` prints.
#[derive(Debug, Serialize)]
pub struct Tuned {
    /// The workload.
    pub workload: String,
    /// The template.
    pub template: String,
    /// The search.
    pub search: String,
    /// The target, as records name it.
    pub target: String,
    /// Threads that the kernel may use.
    pub threads: u32,
    /// The seed.
    pub seed: u64,
    /// Number of trials recorded, including those of earlier runs.
    pub trials: u64,
    /// Trials of this run.
    pub new_trials: u64,
    /// Seconds of the search.
    pub seconds: f64,
    /// Time of the run by phase, by the wall clock.
    pub wall_seconds: WallSeconds,
    /// Trials of this run in a second.
    pub trials_per_second: f64,
    /// Time of the search by activity.
    pub seconds_in: SecondsIn,
    /// Failures by class, those of earlier runs included.
    #[serde(serialize_with = "by_name")]
    pub errors: BTreeMap<ErrorClass, u64>,
    /// Measured peak of the machine, in 10⁹ operations a second.
    pub peak_gflops: Option<f64>,
    /// The database.
    pub db: String,
    /// Whether all that was found is recorded.
    pub recorded: bool,
    /// The winner; the fastest trial without a race; none where nothing was right or measured.
    pub best: Option<Best>,
    /// The race, where there was one.
    #[serde(flatten)]
    pub race: Option<Race>,
    /// Whether the best has given the right answer; on an emulated device, whether any candidate has.
    pub verified: bool,
    /// Whether the device is emulated: there are no times then, no best, and nothing is recorded.
    pub emulated: bool,
    /// Reason why the search ended; `None` where it was not begun.
    #[serde(skip)]
    pub ended: Option<Ended>,
    /// Candidates that came to a limit, by class.
    #[serde(skip)]
    pub cut_off: BTreeMap<ErrorClass, u64>,
    /// Failure of one of the failed candidates.
    #[serde(skip)]
    pub example: Option<(ErrorClass, String)>,
    /// Whether any candidate was right.
    #[serde(skip)]
    pub any_right: bool,
    /// Error that lost records of it, if so; the run ended with that.
    #[serde(skip)]
    pub lost: Option<Error>,
}

impl Tuned {
    /// Makes the result of a run without a winner yet, with its new trials.
    fn of(
        key: &TaskKey,
        (search, seed): (&str, u64),
        database: &Database,
        earlier: &Earlier,
        new: &[Trial],
        summary: Option<&Summary>,
        wall: &Wall,
    ) -> Tuned {
        let all = || earlier.trials.iter().chain(new);
        let mut errors = errors_of(&earlier.trials);
        errors_of(new).into_iter().for_each(|(class, n)| *errors.entry(class).or_default() += n);
        let mut cut_off = earlier.cut_off.clone();
        for (class, n) in summary.iter().flat_map(|summary| &summary.cut_off) {
            *cut_off.entry(*class).or_default() += n;
        }
        let seconds = summary.map(|s| s.seconds).unwrap_or_default();
        let rate = |s: &Summary| if s.wall_seconds > 0.0 { s.n_trials as f64 / s.wall_seconds } else { 0.0 };
        Tuned {
            workload: key.workload.clone(),
            template: key.template.clone(),
            search: search.to_owned(),
            target: key.target.clone(),
            threads: key.threads,
            seed,
            trials: all().count() as u64,
            new_trials: summary.map_or(0, |s| s.n_trials),
            seconds: summary.map_or(0.0, |s| s.wall_seconds),
            wall_seconds: wall.seconds,
            trials_per_second: summary.map_or(0.0, rate),
            seconds_in: SecondsIn {
                search: summary.map_or(0.0, |s| s.search_seconds),
                build: seconds.build,
                run: seconds.run,
                verify: seconds.verify,
            },
            errors,
            peak_gflops: None,
            db: database.path.to_string_lossy().into_owned(),
            recorded: true,
            best: None,
            race: None,
            verified: false,
            emulated: false,
            ended: summary.map(|s| s.ended),
            cut_off,
            example: all().find_map(|trial| match &trial.outcome {
                Outcome::Failed { class, message } => Some((*class, message.clone())),
                Outcome::Measured(_) => None,
            }),
            any_right: all().any(|trial| trial.outcome.timing().is_some()),
            lost: None,
        }
    }
}

fn by_name<S: Serializer>(errors: &BTreeMap<ErrorClass, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(errors.iter().map(|(class, n)| (class.name(), n)))
}

/// Time of a search by activity, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct SecondsIn {
    /// Proposing and observing.
    pub search: f64,
    /// Building, on all workers.
    pub build: f64,
    /// Running for the timing.
    pub run: f64,
    /// Running and comparing for the verification.
    pub verify: f64,
}

/// The race at the end of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Race {
    /// ‖out − reference‖ / ‖reference‖ of the winner's answer.
    pub relative_error: Option<f64>,
    /// Whether winner and runner-up cannot be told apart.
    #[serde(rename = "tie")]
    pub is_tie: bool,
    /// Throughput of the program as it is written, or on a GPU of what the template guesses first.
    pub untuned_gflops: Option<f64>,
    /// Time of the program as it is written, or on a GPU of the template's first guess.
    #[serde(skip)]
    pub untuned: Untuned,
    /// Number of leaders that finished the race.
    #[serde(skip)]
    pub n_leaders: usize,
}

/// Time of a run by phase, in seconds by the wall clock, which add up to the whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct WallSeconds {
    /// Start, until the search begins.
    pub start: f64,
    /// The search.
    pub search: f64,
    /// The race.
    pub race: f64,
    /// The untuned program.
    pub untuned: f64,
    /// Seconds to write the last records and to end workers.
    pub end: f64,
    /// All of them.
    pub total: f64,
}

/// Laps of a run.
struct Wall {
    last: Instant,
    seconds: WallSeconds,
}

impl Wall {
    /// Starts the clock.
    fn new() -> Wall {
        Wall { last: Instant::now(), seconds: WallSeconds::default() }
    }

    /// Seconds since the last part ended.
    fn lap(&mut self) -> f64 {
        let last = std::mem::replace(&mut self.last, Instant::now());
        let lap = (self.last - last).as_secs_f64();
        self.seconds.total += lap;
        lap
    }

    /// Discards the time since the last lap.
    fn skip(&mut self) {
        self.last = Instant::now();
    }

    /// The race has ended, with the untuned program behind it.
    fn end_race(&mut self, end: Option<&End>) {
        let both = self.lap();
        self.seconds.untuned = match end {
            Some(End::Raced(finals)) => finals.untuned_time.as_secs_f64().min(both),
            _ => 0.0,
        };
        self.seconds.race = both - self.seconds.untuned;
    }
}

/// Records of earlier runs.
#[derive(Debug, Default)]
pub struct Earlier {
    /// Plausible trials of earlier runs.
    pub trials: Vec<Trial>,
    /// Numbers of those that came to a limit, by class.
    pub cut_off: BTreeMap<ErrorClass, u64>,
    /// The configurations of those that were imported.
    pub imported: HashSet<Config>,
    /// Seconds that each trial of this machine took, about, and its time in nanoseconds where it was valid.
    pub course: Vec<(f64, Option<f64>)>,
}

impl Earlier {
    /// About how long the searches of this machine took that measured these trials.
    fn searched(&self) -> Duration {
        let seconds = self.course.iter().map(|(seconds, _)| seconds).sum();
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// Time since 1970.
pub fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Key of the trials of a task.
///
/// # Panics
/// Where there are more threads than any machine has CPUs.
pub fn task_key(task: &Task, caches: Caches) -> TaskKey {
    TaskKey {
        workload: task.setting.workload.to_string(),
        target: target_name(&task.setting.target, caches),
        template: task.template.name.to_owned(),
        threads: u32::try_from(task.setting.n_threads).expect("no machine has so many CPUs"),
    }
}

/// Reads the plausible trials of earlier runs that belong to the present space, except failures under lower
/// limits than these, which may succeed now. The trials left out are measured again if the search proposes
/// them.
///
/// # Errors
/// Where the database fails.
pub fn earlier(
    store: &Store,
    key: &TaskKey,
    task: &Task,
    limits: &Limits,
    note: &dyn Fn(Note),
) -> Result<Earlier, StoreError> {
    earlier_of(store, key, &task.space, &|_| Judge::of(task), limits, note)
}

/// Reads the records of earlier runs on a space.
fn earlier_of(
    store: &Store,
    key: &TaskKey,
    space: &Space,
    judges: Judges,
    limits: &Limits,
    note: &dyn Fn(Note),
) -> Result<Earlier, StoreError> {
    let mut passed_over = PassedOver::default();
    let mut records = trials_of(store, key, judges, &mut passed_over)?;
    if passed_over.total() > 0 {
        note(Note::Message(passed_over.to_string()));
    }
    let n_records = records.len();
    records.retain(|record| !may_do_better(record, limits));
    let n_below = n_records - records.len();
    if n_below > 0 {
        let n_below = count(n_below as u64, "candidate");
        note(Note::Message(format!("{n_below} that failed of lower limits may be tried again")));
    }
    let mut earlier = Earlier::default();
    for record in &records {
        let Ok(trial) = record.trial(space) else { continue };
        if record.is_imported {
            earlier.imported.insert(trial.config.clone());
        } else {
            let Seconds { build, run, verify } = record.seconds;
            earlier.course.push((build.max(run + verify), trial.outcome.timing().map(|timing| timing.median_ns)));
        }
        if let (Some(class), Some(_)) = (trial.outcome.class(), record.limit) {
            *earlier.cut_off.entry(class).or_default() += 1;
        }
        earlier.trials.push(trial);
    }
    Ok(earlier)
}

/// Whether a record is of a failure of a lower limit than these.
fn may_do_better(record: &Record, limits: &Limits) -> bool {
    record.limit.is_some_and(|limit| limit.is_below(limits))
}

/// Failures by class.
pub fn errors_of(trials: &[Trial]) -> BTreeMap<ErrorClass, u64> {
    let mut errors = BTreeMap::new();
    for class in trials.iter().filter_map(|trial| trial.outcome.class()) {
        *errors.entry(class).or_default() += 1;
    }
    errors
}

/// Findings of a run, and the error that lost records, if any.
struct Found {
    /// All trials, those of earlier runs included.
    trials: Vec<Trial>,
    lost: Option<StoreError>,
}

/// A run, once its request has been understood.
struct Run<'a> {
    request: &'a TuneRequest,
    note: &'a (dyn Fn(Note) + Sync),
    stop: &'a AtomicBool,
    task: Task,
    key: TaskKey,
    database: &'a Database,
    options: Options,
    peak_gflops: Option<f64>,
    earlier: Earlier,
    /// Place where candidates are measured, unless here.
    place: Option<Elsewhere<'a>>,
}

/// Tunes a workload, here or at another place.
///
/// # Errors
/// Where the request does not fit, the database cannot be written, or workers do not start. A run in which no
/// candidate was right is a [`Tuned`] without a best.
pub fn tune<'a>(
    request: &'a TuneRequest,
    place: Option<Elsewhere<'a>>,
    database: &'a Database,
    worker: &WorkerCommand,
    stop: &'a AtomicBool,
    note: &'a (dyn Fn(Note) + Sync),
) -> Result<Tuned, Error> {
    let mut wall = Wall::new();
    let task = request.task()?;
    let key = key_at(place, task_key(&task, request.caches));
    let (search, guesses) = search_of(request, &task, &key, note)?;
    let opened = open(database, request.fresh.then_some(&key), note)?;
    let guesses =
        with_best_elsewhere(guesses, request, place, &task, &opened.store).map_err(|error| database.refuse(error))?;
    let mut run = Run::new(request, (task, key), database, &opened.store, worker, stop, note)?;
    run.place = place;
    run.carry_out(search, &guesses, opened, &mut wall)
}

/// Opens a database to record in it, where what it has of `forgotten` is forgotten.
fn open<'a>(
    database: &Database,
    forgotten: impl IntoIterator<Item = &'a TaskKey>,
    note: &dyn Fn(Note),
) -> Result<Opened, Error> {
    let mut opened = database.open_to_write()?;
    if let Some(warning) = &opened.warning {
        note(Note::Message(warning.clone()));
    }
    for key in forgotten {
        let n_forgotten = opened.store.forget(key).map_err(|error| database.failure(&error))?;
        note(Note::Message(format!("{} of earlier runs forgotten", count(n_forgotten, "trial"))));
    }
    Ok(opened)
}

/// The fastest trial. What was imported need not have been measured on this machine: it counts only where
/// nothing else does.
fn fastest<'t>(trials: &'t [Trial], imported: &HashSet<Config>) -> Option<&'t Trial> {
    let timed = trials.iter().filter(|trial| trial.outcome.timing().is_some());
    let is_imported = |trial: &Trial| imported.contains(&trial.config);
    timed.min_by(|a, b| is_imported(a).cmp(&is_imported(b)).then(a.outcome.cost().total_cmp(&b.outcome.cost())))
}

/// Key of the trials of a task, at a place or here.
fn key_at(place: Option<Elsewhere>, key: TaskKey) -> TaskKey {
    match place {
        Some(place) => key_of_class(place.class, key),
        None => key,
    }
}

/// The search, and what is tried before it proposes anything.
fn search_of(
    request: &TuneRequest,
    task: &Task,
    key: &TaskKey,
    note: &(dyn Fn(Note) + Sync),
) -> Result<(Box<dyn Search>, Vec<Config>), Error> {
    let see = |error| Error::input(format!("{error} (see `tilewright searches`)"));
    let most_programs = tilewright_search::most_experience(&request.search).map_err(see)?;
    let mut problem = task.problem();
    let mut guesses = if request.guesses { task.guesses(request.seed) } else { Vec::new() };
    match request.transfer.as_ref().map(|transfer| learned(transfer, key, task, most_programs, note)) {
        None => {}
        Some(Ok(Learned { experience, carried_over })) => {
            if experience.is_some() {
                // What was measured elsewhere says more than the template's model of the machine.
                guesses.clear();
            }
            if experience.is_none() || request.guesses {
                guesses.splice(0..0, carried_over);
            }
            problem.experience = experience.map(Arc::new);
        }
        Some(Err(error)) if request.transfer_is_optional => {
            note(Note::Message(format!("{}: {error}", key.workload)));
        }
        Some(Err(error)) => return Err(error),
    }
    guesses.splice(0..0, request.first.iter().cloned());
    let search = tilewright_search::build(&request.search, problem, request.seed).map_err(see)?;
    Ok((search, guesses))
}

/// Guesses behind what is recorded as the best of the same task on other caches.
fn with_best_elsewhere(
    mut guesses: Vec<Config>,
    request: &TuneRequest,
    place: Option<Elsewhere>,
    task: &Task,
    store: &Store,
) -> Result<Vec<Config>, StoreError> {
    let TuneRequest { workload, caches, .. } = request;
    for elsewhere in CACHES.into_iter().filter(|elsewhere| elsewhere != caches) {
        let TaskKey { target, template, threads, .. } = &key_at(place, task_key(task, elsewhere));
        let (best, _) = known_best(store, workload, target, *threads, Some(template))?;
        let config = best.and_then(|best| task.space.config_from_json(&best.config).ok());
        guesses.splice(0..0, config);
    }
    Ok(guesses)
}

/// Knowledge of earlier tasks for a search.
struct Learned {
    /// Experience for its model, where it has one.
    experience: Option<Experience>,
    /// Configurations to begin with.
    carried_over: Vec<Config>,
}

/// Prepares the records to learn from for the search, which has a model that can learn from so many programs,
/// or none.
fn learned(
    transfer: &Transfer,
    key: &TaskKey,
    task: &Task,
    most_programs: Option<usize>,
    note: &(dyn Fn(Note) + Sync),
) -> Result<Learned, Error> {
    let tasks = transfer.tasks(key, &|n| note(n))?;
    let n_tasks = count(tasks.len() as u64, "task");
    let experience = most_programs.map(|most| experience(&tasks, most)).filter(|experience| !experience.is_empty());
    let carried_over = warm_start(task, &tasks);
    let n_configs = count(carried_over.len() as u64, "configuration");
    let name = transfer.name();
    match &experience {
        Some(experience) => {
            let n_programs = count(experience.contexts.len() as u64, "program");
            note(Note::Message(format!("learning from {n_programs} of {n_tasks} in {name}, {n_configs} carried over")));
        }
        None if carried_over.is_empty() => {
            let what = match most_programs {
                Some(_) => "there is no program to learn from".to_owned(),
                None => format!("no configuration of template {} can be carried over", key.template),
            };
            return Err(Error::input(format!("{what} among the {n_tasks} of database {name}")));
        }
        None => note(Note::Message(format!("beginning with {n_configs} carried over from {name}"))),
    }
    Ok(Learned { experience, carried_over })
}

impl<'a> Run<'a> {
    /// Makes a run that continues from the records.
    fn new(
        request: &'a TuneRequest,
        (task, key): (Task, TaskKey),
        database: &'a Database,
        store: &Store,
        worker: &WorkerCommand,
        stop: &'a AtomicBool,
        note: &'a (dyn Fn(Note) + Sync),
    ) -> Result<Run<'a>, Error> {
        let options = request.options(worker.clone());
        let earlier = earlier(store, &key, &task, &options.limits(), &|n| note(n));
        let earlier = earlier.map_err(|error| database.refuse(error))?;
        Ok(Run { request, note, stop, task, key, database, options, peak_gflops: None, earlier, place: None })
    }

    /// Whether times mean nothing where candidates are measured.
    fn is_emulated(&self) -> bool {
        match self.place {
            Some(place) => place.is_emulated,
            None => self.request.runner.as_ref().is_some_and(|runner| runner.is_emulated),
        }
    }

    /// Whether leaders race.
    fn may_race(&self) -> bool {
        self.request.race && !self.is_emulated()
    }

    /// Trials to come to that are not recorded.
    fn left(&self) -> Option<u64> {
        self.request.trials.map(|trials| trials.saturating_sub(self.earlier.trials.len() as u64))
    }

    /// Reason why there is nothing to search, if so.
    fn nothing_left(&self) -> Option<&'static str> {
        match self.left() {
            Some(0) => Some("all trials asked for are recorded already"),
            _ if self.earlier.trials.len() as u128 >= self.task.space.size() => {
                Some("the whole space is recorded already")
            }
            _ => None,
        }
    }

    /// Result of a run without new trials, with the known winner.
    fn as_before(&self, known: &Winner, wall: &Wall) -> Tuned {
        let best = Best::of_winner(&self.request.workload, known);
        Tuned { verified: known.verified, best: Some(best), ..self.tuned(&[], None, wall) }
    }

    fn carry_out(
        &mut self,
        mut search: Box<dyn Search>,
        guesses: &[Config],
        opened: Opened,
        wall: &mut Wall,
    ) -> Result<Tuned, Error> {
        let request = self.request;
        let n_earlier = self.earlier.trials.len() as u64;
        let time = request.time.or(if request.trials.is_none() { Some(DEFAULT_TIME) } else { None });
        let nothing_left = self.nothing_left();
        (self.note)(Note::Begin(&Begin {
            key: self.key.clone(),
            space_size: self.task.space.size(),
            database: self.database.name(),
            n_earlier,
            default_time: time.filter(|_| request.time.is_none() && nothing_left.is_none()),
            is_emulated: self.is_emulated(),
        }));
        if let Some(nothing_left) = nothing_left {
            if let Some(known) = self.known_winner(&opened.store).map_err(|error| self.database.refuse(error))? {
                (self.note)(Note::Message(nothing_left.to_owned()));
                wall.seconds.start = wall.lap();
                return Ok(self.as_before(&known, wall));
            }
            let race = if request.race { "; the leaders have yet to be raced" } else { "" };
            (self.note)(Note::Message(format!("{nothing_left}: there is nothing to search{race}")));
        }
        self.peak_gflops = match self.place {
            Some(place) => place.peak_gflops,
            // What a device can do nobody has measured.
            None if request.target.gpu.is_some() || request.runner.is_some() => None,
            None => peak::gflops(&host::target(), request.workload.dtype, request.threads).ok(),
        };
        let limits = EndLimits::of(time);
        let costs = self.earlier.trials.iter().map(|trial| trial.outcome.cost());
        let best_ns = costs.min_by(f64::total_cmp).filter(|ns| ns.is_finite());
        let plan = Plan {
            time,
            most_trials: request.trials,
            n_earlier,
            best_gflops: best_ns.map(|ns| gflops(&request.workload, ns)),
            peak_gflops: self.peak_gflops,
            start_and_run_s: self
                .peak_gflops
                .filter(|_| self.place.is_none())
                .map(|peak| (self.start_seconds(peak), gflops(&request.workload, 1.0) / (1e9 * peak))),
            limits: self.may_race().then_some(limits),
        };
        (self.note)(Note::Plan(&plan));
        let Some(mut device) = self.measure()? else {
            wall.seconds.start = wall.lap();
            return Ok(self.tuned(&[], None, wall));
        };
        wall.seconds.start = wall.lap();
        let recorder = Recorder::new(opened, &self.task, self.key.clone(), request.search.clone(), request.seed);
        let recorder = Recording::new(recorder);
        (self.note)(Note::Search(&recorder, &plan));
        let mut found = Found { trials: self.earlier.trials.clone(), lost: None };
        let head_start = HeadStart { prior: &self.earlier.trials, guesses };
        let mut tuning = Tuning::new(search.as_mut(), (&self.task).into(), head_start);
        let least = self.place.map_or(1, |place| place.least_batch);
        let budget = Budget { trials: self.left(), time, least, ..Budget::default() };
        let ended = tuning
            .go_on(device.as_mut(), budget, self.stop, &mut |event| self.take_note(&event, &recorder, &mut found));
        wall.seconds.search = wall.lap();
        let ended = ended.map_err(|error| Error::failed(&error).because(error))?;
        let limits = limits.after(self.earlier.searched().saturating_add(Duration::from_secs_f64(wall.seconds.search)));
        self.finish(Some(device), &recorder, found, &tuning.summary(ended), limits, wall)
    }

    /// Notes, records and tells of an event.
    fn take_note(&self, event: &Event, recorder: &Recording, found: &mut Found) -> Result<(), BoxError> {
        if let Event::Trial(report) = event {
            found.trials.push(report.trial.clone());
            let best_ns = report.best_ns.filter(|_| !self.is_emulated());
            (self.note)(Note::Trial(&Report { best_ns, ..(*report).clone() }));
        }
        if self.is_emulated() {
            return Ok(());
        }
        if let Err(error) = recorder.take_note(event, &|message| (self.note)(Note::Message(message))) {
            // What was found until then is raced and told all the same.
            found.lost.get_or_insert(error);
            self.stop.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Races the leaders, where that is asked for and there is a device, and says what it came to.
    fn finish(
        &self,
        mut device: Option<Box<dyn Measure + '_>>,
        recorder: &Recording,
        Found { trials, lost }: Found,
        summary: &Summary,
        limits: EndLimits,
        wall: &mut Wall,
    ) -> Result<Tuned, Error> {
        let request = self.request;
        let end = match &mut device {
            Some(device) if self.may_race() => {
                // What is at the path of a database that is gone is another's; opening it would give it the
                // log of ours.
                let others = if lost.is_none() { self.trials_of_others(&trials) } else { Vec::new() };
                let known = [trials.as_slice(), others.as_slice()].concat();
                let imported = &self.earlier.imported;
                let subject = ((&self.task).into(), finals::plain_of(&self.task, request.seed));
                finals::run(device.as_mut(), subject, &known, imported, limits, self.stop, &|n| (self.note)(n))
            }
            _ => Ok(End::NoTime),
        };
        wall.end_race(end.as_ref().ok());
        let winner = match &end {
            Ok(End::Raced(finals)) => Some(self.winner(finals)),
            _ => None,
        };
        let recorded = recorder.conclude(winner.as_ref());
        let end = end.map_err(|error| Error::failed("measuring the leading candidates").because(error))?;
        drop(device);
        wall.seconds.end = wall.lap();
        let lost = lost.or(recorded.err()).map(|error| self.database.failure(&error));
        let mut tuned = self.tuned(&trials[self.earlier.trials.len()..], Some(summary), wall);
        tuned.recorded = lost.is_none();
        tuned.lost = lost;
        match (&end, winner) {
            (End::Raced(finals), Some(winner)) => {
                let untuned_gflops = finals.untuned.ns().map(|ns| gflops(&request.workload, ns));
                tuned.best = Some(Best::of_winner(&request.workload, &winner));
                tuned.race = Some(Race {
                    relative_error: finals.ranking[0].relative_error,
                    is_tie: finals.is_tie(),
                    untuned_gflops,
                    untuned: finals.untuned,
                    n_leaders: finals.ranking.len(),
                });
            }
            _ if self.is_emulated() => {}
            (End::NoTime, _) => tuned.best = self.fastest(&trials),
            _ => {}
        }
        tuned.verified = tuned.best.is_some() || self.is_emulated() && tuned.any_right;
        Ok(tuned)
    }

    /// Result of a run without a winner yet, with its new trials.
    fn tuned(&self, new: &[Trial], summary: Option<&Summary>, wall: &Wall) -> Tuned {
        let request = self.request;
        let tuned =
            Tuned::of(&self.key, (&request.search, request.seed), self.database, &self.earlier, new, summary, wall);
        Tuned { peak_gflops: self.peak_gflops, emulated: self.is_emulated(), ..tuned }
    }

    /// About how long the start takes, where kernels reach this peak at best.
    fn start_seconds(&self, peak_gflops: f64) -> f64 {
        let workload = &self.request.workload;
        let program = workload.program();
        let n_elements: u64 = program.buffers.iter().filter_map(|buffer| buffer.n_elements()).sum();
        // All CPUs take part, in double precision.
        let n_cpus = host::allowed_cpus().len() as f64 / self.request.threads as f64;
        let flops = 1e9 * peak_gflops * n_cpus * workload.dtype.arithmetic().bytes() as f64 / DType::F64.bytes() as f64;
        START_S + 2.0 * work(&program) / (PART_OF_PEAK * flops) + n_elements as f64 * START_NS_AN_ELEMENT / 1e9
    }

    /// The device with its workers; none after an interrupt.
    fn device(&self) -> Result<Option<Device>, Error> {
        let (workload, options) = (self.request.workload.clone(), self.options.clone());
        start_device(workload, &self.task.setting.target, options, self.stop, self.note)
    }

    /// Starts the measurement, here or at another place; `None` after an interrupt.
    fn measure(&self) -> Result<Option<Box<dyn Measure + 'a>>, Error> {
        match self.place {
            Some(place) => {
                (self.note)(Note::Start);
                (place.start)().map(Some)
            }
            None => Ok(self.device()?.map(|device| Box::new(device) as Box<dyn Measure>)),
        }
    }

    /// The winner of this template's race, where it was run here and nothing was recorded since.
    fn known_winner(&self, store: &Store) -> Result<Option<Winner>, StoreError> {
        let TaskKey { workload, target, template, threads } = &self.key;
        match store.best(workload, target, *threads, Some(template), &|_| Judge::of(&self.task))?.0 {
            Some(core::Best::Confirmed(winner)) if store.is_settled(&winner)? => Ok(Some(winner)),
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
            spread: Some(finals.spread()),
            runner_up: (finals.ranking.len() > 1).then(|| config(1)),
            gflops: gflops(&self.request.workload, median_ns),
            verified: true,
            version: BUILD.to_owned(),
            toolchain: recorder::toolchain(),
            unix_time: since_1970().as_secs(),
            is_imported: false,
        }
    }

    /// The fastest trial, as what is known best without a race.
    fn fastest(&self, trials: &[Trial]) -> Option<Best> {
        let imported = &self.earlier.imported;
        let trial = fastest(trials, imported)?;
        let config = self.task.space.config_to_json(&trial.config);
        let median_ns = trial.outcome.timing()?.median_ns;
        let best = Best::new(&self.request.workload, self.key.template.clone(), config, median_ns);
        Some(Best { is_imported: imported.contains(&trial.config), ..best })
    }

    /// Trials that other processes have meanwhile recorded of the same space: a winner that was not raced
    /// against them must not hide them.
    fn trials_of_others(&self, own: &[Trial]) -> Vec<Trial> {
        let recorded = || -> Result<Vec<Record>, Error> {
            let Some(store) = self.database.open_to_read()? else { return Ok(Vec::new()) };
            let mut passed_over = PassedOver::default();
            let found = trials_of(&store, &self.key, &|_| Judge::of(&self.task), &mut passed_over);
            found.map_err(|error| self.database.failure(&error))
        };
        let recorded = recorded().unwrap_or_else(|error| {
            (self.note)(Note::Message(format!("what others have recorded is not known: {error}")));
            Vec::new()
        });
        let own: HashSet<&Config> = own.iter().map(|trial| &trial.config).collect();
        let limits = self.options.limits();
        let recorded = recorded.iter().filter(|record| !may_do_better(record, &limits));
        let recorded = recorded.filter_map(|record| record.trial(&self.task.space).ok());
        let others: Vec<Trial> = recorded.filter(|trial| !own.contains(&trial.config)).collect();
        if !others.is_empty() {
            let n_others = count(others.len() as u64, "trial");
            (self.note)(Note::Message(format!("another process has recorded {n_others} meanwhile")));
        }
        others
    }
}

/// A device for a workload; none where `stop` is raised before it is ready.
///
/// # Errors
/// Where memory does not suffice or workers do not start.
pub fn start_device(
    workload: Workload,
    target: &Target,
    options: Options,
    stop: &AtomicBool,
    note: &(dyn Fn(Note) + Sync),
) -> Result<Option<Device>, Error> {
    use std::ops::ControlFlow;
    note(Note::Start);
    let watch = |part: f64| {
        note(Note::Reference(part));
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    match Device::new_watched(workload, target, options, &watch) {
        Ok(device) => Ok(Some(device)),
        Err(DeviceError::Data(DataError::GivenUp)) => Ok(None),
        Err(error) => Err(Error::failed(&error).because(error)),
    }
}

/// A lock that a panic of another thread does not keep.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
