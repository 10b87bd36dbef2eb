//! Commands as candidates: users' programs that are built, run and timed with values in place of
//! placeholders.
//!
//! Builds run in parallel, each text once, also on the CPUs of runs while there is nothing to run; runs are
//! executed one after the other, alone on their CPUs. A program that crashes, hangs or computes a wrong
//! result costs one trial.

mod keeper;
mod metric;
mod process;
mod program_run;
mod template;

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tilewright_search::{
    BoxError, Candidate, Config, ErrorClass, Limit, Limits, Measure, Measured, MeasuringTraits, Next, OtherCosts,
    Outcome, RaceLimits, Seconds, Space, Standing, Timing, Value, quantile,
};

use crate::device::MOST_RETRIES;
use crate::failure::Failure;
use crate::folder::Folder;
use crate::{host, kernel};
pub use metric::{Metric, MetricError, NamedMetric, Objectives};
use process::{Helper, MOST_OUTPUT, ProcessSetting};
use program_run::{ProgramEnd, ProgramRun};
pub use template::{CommandTemplate, Invocation, TemplateError};

/// Name of the placeholder for the build folder.
pub const FOLDER: &str = "dir";

/// Timeout of a run, as a multiple of the leading time.
const HOPELESS: f64 = 4.0;
/// Minimum timeout of a run.
const LEAST_RUN: Duration = Duration::from_millis(100);
/// Multiple of the leading time up to which the first sample is followed by further ones.
const WORTH_MORE: f64 = 1.5;
/// Number of candidates that run all rounds of a race; of more, the slower half leaves after some rounds.
const FINALISTS: usize = 6;
/// Maximum number of rounds of a race, if there is time.
const MOST_ROUNDS: u64 = 12;
/// Number of samples of a trial that suffices.
const MOST_SAMPLES: usize = 100;

/// Options of measuring commands: command lines, metrics and limits.
#[derive(Debug, Clone)]
pub struct CommandOptions {
    /// Command that is measured.
    pub run: CommandTemplate,
    /// Command that builds a configuration, in the folder `{dir}`.
    pub build: Option<CommandTemplate>,
    /// Command that verifies a run: it reads the run's output, and exits with 0 if that is correct.
    pub check: Option<CommandTemplate>,
    /// Command executed before each run.
    pub prepare: Option<CommandTemplate>,
    /// Command executed after each run.
    pub cleanup: Option<CommandTemplate>,
    /// Metrics of a run.
    pub objectives: Objectives,
    /// Minimum number of samples of a trial.
    pub n_samples: usize,
    /// Number of warm-up runs before the first sample.
    pub n_warmups: usize,
    /// Minimum time of a trial's samples.
    pub min_time: Duration,
    /// Timeout of a build.
    pub build_timeout: Duration,
    /// Timeout of a run.
    pub run_timeout: Duration,
    /// Whether slow candidates are timed completely, rather than pruned.
    pub to_the_end: bool,
    /// Memory limit of each process, in bytes of data.
    pub memory_bytes: u64,
    /// CPUs that runs are pinned to.
    pub cpus: Vec<usize>,
}

impl CommandOptions {
    /// Options for a wall-clock metric: one sample, timeouts of 60 s, one CPU, half the memory.
    pub fn new(run: CommandTemplate) -> CommandOptions {
        CommandOptions {
            run,
            build: None,
            check: None,
            prepare: None,
            cleanup: None,
            objectives: Metric::Wall.into(),
            n_samples: 1,
            n_warmups: 0,
            min_time: Duration::ZERO,
            build_timeout: Duration::from_secs(60),
            run_timeout: Duration::from_secs(60),
            to_the_end: false,
            memory_bytes: host::memory_bytes().unwrap_or(8 << 30) / 2,
            cpus: host::pin_cpus(1),
        }
    }

    /// Resource limits of candidates.
    pub fn limits(&self) -> Limits {
        Limits {
            build_s: self.build_timeout.as_secs_f64(),
            run_s: self.run_timeout.as_secs_f64(),
            memory_bytes: self.memory_bytes,
        }
    }

    /// Description of a configuration as it is recorded, one line per command, with `{dir}` unexpanded.
    pub fn steps(&self, space: &Space, config: &Config) -> String {
        let value = |name: &str| if name == FOLDER { format!("{{{FOLDER}}}") } else { text_of(space, config, name) };
        let line = |(what, template): (&str, &CommandTemplate)| format!("{what} {}\n", template.with(&value));
        self.templates().map(line).chain([self.objectives.lines()]).collect()
    }

    /// Command lines with their names, in order.
    pub fn templates(&self) -> impl Iterator<Item = (&'static str, &CommandTemplate)> {
        let (build, prepare) = (self.build.as_ref(), self.prepare.as_ref());
        let (check, cleanup) = (self.check.as_ref(), self.cleanup.as_ref());
        let all =
            [("build", build), ("prepare", prepare), ("run", Some(&self.run)), ("check", check), ("cleanup", cleanup)];
        all.into_iter().filter_map(|(name, template)| Some((name, template?)))
    }
}

/// Value of a parameter, as it is written in a command.
fn text_of(space: &Space, config: &Config, name: &str) -> String {
    match space.value(config, name) {
        Value::Text(text) => text,
        other => other.to_string(),
    }
}

/// Failure of a trial or of a part of it.
#[derive(Debug, Clone)]
struct TrialFailure {
    class: ErrorClass,
    message: String,
    limit: Option<Limit>,
    /// Whether the device itself failed, whatever runs on it.
    is_of_device: bool,
}

impl From<Failure> for TrialFailure {
    fn from(Failure { class, message, is_of_device, .. }: Failure) -> TrialFailure {
        TrialFailure { is_of_device, ..TrialFailure::new(class, message) }
    }
}

impl TrialFailure {
    fn new(class: ErrorClass, message: impl Into<String>) -> TrialFailure {
        TrialFailure { class, message: message.into(), limit: None, is_of_device: false }
    }

    fn outcome(self) -> Outcome {
        Outcome::Failed { class: self.class, message: self.message }
    }
}

/// Runs a command once, on any CPU, and returns its output.
///
/// # Errors
/// A message, if it fails; `what` names the command in it.
pub fn run_to_end(
    invocation: &Invocation,
    what: &str,
    timeout: Duration,
    memory_bytes: u64,
) -> Result<Vec<u8>, String> {
    let setting = ProcessSetting {
        cpus: &[],
        memory_bytes,
        timeout,
        input: None,
        most_output: usize::MAX,
        metrics: Vec::new(),
        is_over: &|| false,
    };
    let run = process::run(invocation, &setting);
    let said = match kernel::ProcessResult::last_of(&run.output) {
        Some(kernel::ProcessResult::Failed { message, .. }) if !run.is_success() => Some(format!("{what}: {message}")),
        _ => None,
    };
    if run.is_success() { Ok(run.output) } else { Err(said.unwrap_or_else(|| run.complaint(what))) }
}

/// Runs a command once with inherited streams, on these CPUs (any if empty), and returns the metric's value;
/// `None` if cancelled by `is_over`.
///
/// # Errors
/// A message, if it fails; `what` names the command in it.
pub fn sample(
    invocation: &Invocation,
    what: &str,
    metric: &Metric,
    cpus: &[usize],
    timeout: Duration,
    is_over: &dyn Fn() -> bool,
) -> Result<Option<f64>, String> {
    let setting = ProcessSetting {
        cpus,
        memory_bytes: u64::MAX,
        timeout,
        input: None,
        most_output: MOST_OUTPUT,
        metrics: vec![metric],
        is_over,
    };
    let run = process::run(invocation, &setting);
    match run.end {
        ProgramEnd::GivenUp => Ok(None),
        _ if !run.is_success() => Err(run.complaint(what)),
        _ => match metric.samples_ns(&run, 0) {
            Ok(samples) => Ok(samples.first().copied()),
            Err((_, message)) => Err(format!("{what}: {message}")),
        },
    }
}

/// Build of a configuration: its folder, or the reason why it failed. It may be in progress.
#[derive(Debug, Clone)]
enum BuildState {
    UnderWay,
    Done(Result<(), TrialFailure>),
}

/// State that all threads share.
struct CommandsShared {
    options: CommandOptions,
    space: Arc<Space>,
    /// Folder of the builds.
    root: Folder,
    /// CPUs for builds while something is timed; if empty, builds and runs take turns.
    beside: Vec<usize>,
    /// Number of threads that build on these CPUs.
    n_beside: usize,
    state: Mutex<CommandsState>,
    changed: Condvar,
    helpers: Mutex<Helpers>,
    /// Number from which on candidates are cancelled.
    given_up_from: AtomicU64,
    is_closed: AtomicBool,
}

/// Idle persistent processes, with the words that started them, and their CPUs.
type Helpers = Vec<(Vec<String>, Vec<usize>, Helper)>;

#[derive(Default)]
struct CommandsState {
    waiting: VecDeque<WaitingCandidate>,
    done: VecDeque<(u64, Measured)>,
    builds: HashMap<u64, BuildState>,
    /// Number of the candidate that is running.
    running: Option<u64>,
    n_building: usize,
    /// Number of the builds that use the CPUs of runs while nothing runs.
    n_in_the_way: usize,
    n_submitted: u64,
    leading_ns: Option<f64>,
    is_winding_down: bool,
    /// Reason to end the run: the device failed too often.
    fault: Option<String>,
}

impl CommandsState {
    /// Puts a candidate first again, with which the device failed; too many failures end the run.
    fn measure_again(&mut self, mut job: WaitingCandidate, why: &str) {
        self.builds.remove(&job.key);
        job.n_losses += 1;
        if job.n_losses > MOST_RETRIES {
            let times = job.n_losses;
            self.fault = Some(format!(
                "{times} times the device failed with the same candidate: {why}; nothing is recorded of that one"
            ));
        }
        self.waiting.push_front(job);
    }
}

/// Waiting candidate.
struct WaitingCandidate {
    number: u64,
    candidate: Candidate,
    /// Key of the configuration's build.
    key: u64,
    build_s: f64,
    /// Number of times that the device failed with it.
    n_losses: u32,
}

/// Measuring side whose candidates are commands.
pub struct Commands {
    shared: Arc<CommandsShared>,
    threads: Vec<JoinHandle<()>>,
}

impl Commands {
    /// Makes a measuring side for the configurations of a space, with a folder for builds.
    ///
    /// # Errors
    /// If the system refuses the folder, or a thread.
    pub fn new(space: Arc<Space>, options: CommandOptions) -> io::Result<Commands> {
        let root = Folder::new("tilewright-build")?;
        let beside = host::cpus_beside(&host::allowed_cpus(), &options.cpus);
        let n_beside = if options.build.is_none() { 0 } else { beside.len().min(8) };
        let shared = Arc::new(CommandsShared {
            options,
            space,
            root,
            beside,
            n_beside,
            state: Mutex::default(),
            changed: Condvar::new(),
            helpers: Mutex::default(),
            given_up_from: AtomicU64::new(u64::MAX),
            is_closed: AtomicBool::new(false),
        });
        let mut commands = Commands { shared: shared.clone(), threads: Vec::new() };
        let n_builders = if shared.options.build.is_none() { 0 } else { n_beside + 1 };
        for at in 0..=n_builders {
            let shared = shared.clone();
            let work = move || if at == 0 { shared.run_all() } else { shared.build_all(at <= n_beside) };
            commands.threads.push(std::thread::Builder::new().name("command".into()).spawn(work)?);
        }
        Ok(commands)
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
        self.shared.changed.notify_all();
        self.threads.drain(..).for_each(|thread| {
            let _ = thread.join();
        });
    }
}

impl CommandsShared {
    fn lock(&self) -> MutexGuard<'_, CommandsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, CommandsState>, at_most: Duration) -> MutexGuard<'a, CommandsState> {
        self.changed.wait_timeout(state, at_most).unwrap_or_else(PoisonError::into_inner).0
    }

    fn helpers(&self) -> MutexGuard<'_, Helpers> {
        self.helpers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a program, or gives its work to a persistent process of ours.
    fn run(&self, invocation: &Invocation, setting: &ProcessSetting) -> ProgramRun {
        let Some(n_words) = invocation.stays_after else { return process::run(invocation, setting) };
        let (words, request) = invocation.words.split_at(n_words);
        let known = {
            let mut helpers = self.helpers();
            let known = helpers.iter().position(|(of, cpus, _)| of == words && cpus == setting.cpus);
            known.map(|at| helpers.swap_remove(at).2)
        };
        let take = |helper: Helper| {
            let work = helper.take(request, setting);
            // A failure that earlier work in a process may have caused is not counted against this one.
            let is_doubtful =
                work.is_doubtful && !work.run.is_success() && matches!(work.run.end, ProgramEnd::Ended(_));
            if !is_doubtful {
                let helper = work.helper.map(|helper| (words.to_vec(), setting.cpus.to_vec(), helper));
                self.helpers().extend(helper);
            }
            (work.run, is_doubtful)
        };
        match known.map(take) {
            Some((run, false)) => run,
            _ => match Helper::start(words, setting) {
                Ok(helper) => take(helper).0,
                Err(error) => ProgramRun::not_started(words, error),
            },
        }
    }

    fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Relaxed)
    }

    /// Command line of a configuration, with this folder.
    fn invocation(&self, template: &CommandTemplate, config: &Config, folder: &Path) -> Invocation {
        template.with(&|name| match name {
            FOLDER => folder.to_string_lossy().into_owned(),
            name => text_of(&self.space, config, name),
        })
    }

    /// Hash that distinguishes the folders of configurations: of the command that builds it or, without one,
    /// of the command that is run.
    fn key(&self, config: &Config) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let template = self.options.build.as_ref().unwrap_or(&self.options.run);
        let mut hasher = DefaultHasher::new();
        self.invocation(template, config, Path::new("")).hash(&mut hasher);
        hasher.finish()
    }

    fn folder(&self, key: u64) -> PathBuf {
        self.root.path().join(format!("{key:016x}"))
    }

    /// Whether a candidate can be run.
    fn is_ready(&self, state: &CommandsState, job: &WaitingCandidate) -> bool {
        self.options.build.is_none() || matches!(state.builds.get(&job.key), Some(BuildState::Done(_)))
    }

    /// Makes the folder of a configuration, and builds it there, on these CPUs; on any if empty.
    fn build(&self, config: &Config, key: u64, cpus: &[usize], is_over: &dyn Fn() -> bool) -> Result<(), TrialFailure> {
        let folder = self.folder(key);
        let failed = |error| TrialFailure::new(ErrorClass::Unknown, format!("the folder of the build: {error}"));
        if self.options.templates().any(|(_, template)| template.reads(FOLDER)) {
            fs::create_dir_all(&folder).map_err(failed)?;
        }
        let Some(build) = &self.options.build else { return Ok(()) };
        let timeout = self.options.build_timeout;
        let invocation = self.invocation(build, config, &folder);
        let run = self.run(
            &invocation,
            &ProcessSetting {
                cpus,
                memory_bytes: self.options.memory_bytes,
                timeout,
                input: None,
                most_output: MOST_OUTPUT,
                metrics: Vec::new(),
                is_over,
            },
        );
        if run.is_success() {
            return Ok(());
        }
        let message = run.complaint(&format!("the build, {},", invocation.words[0]));
        let said =
            self.options.objectives.leading().failure(&run.output).filter(|_| matches!(run.end, ProgramEnd::Ended(_)));
        if let Some(failure) = said {
            return Err(failure.into());
        }
        Err(match run.end {
            ProgramEnd::TimedOut => TrialFailure {
                limit: Some(Limit::BuildS(timeout.as_secs_f64())),
                ..TrialFailure::new(ErrorClass::BuildTimeout, message)
            },
            ProgramEnd::NotStarted(..) => TrialFailure::new(ErrorClass::InstantiationError, message),
            _ => TrialFailure::new(ErrorClass::CompileErrorHost, message),
        })
    }

    /// Build of a configuration, made now if missing, for measuring it at once.
    fn built(&self, config: &Config, is_over: &dyn Fn() -> bool) -> Result<(), TrialFailure> {
        let key = self.key(config);
        if let Some(BuildState::Done(result)) = self.lock().builds.get(&key) {
            return result.clone();
        }
        let result = self.build(config, key, &[], is_over);
        if !is_over() {
            self.lock().builds.insert(key, BuildState::Done(result.clone()));
        }
        result
    }

    /// Builds until the end, in a thread of its own: beside runs, or on their CPUs while there is nothing to
    /// run.
    fn build_all(&self, is_beside: bool) {
        let cpus = if is_beside { &self.beside } else { &self.options.cpus };
        let mut state = self.lock();
        while !self.is_closed() {
            let are_idle = || state.running.is_none() && !state.waiting.iter().any(|job| self.is_ready(&state, job));
            let may_begin = !state.is_winding_down && (is_beside || state.n_building >= self.n_beside && are_idle());
            let next = state.waiting.iter().position(|job| may_begin && !state.builds.contains_key(&job.key));
            let Some(at) = next else {
                state = self.wait(state, Duration::from_secs(1));
                continue;
            };
            let job = &state.waiting[at];
            let (number, key, config) = (job.number, job.key, job.candidate.config.clone());
            state.builds.insert(key, BuildState::UnderWay);
            state.n_building += 1;
            state.n_in_the_way += usize::from(!is_beside);
            drop(state);
            let start = Instant::now();
            let is_over = || self.is_closed() || self.given_up_from.load(Ordering::Relaxed) <= number;
            let result = self.build(&config, key, cpus, &is_over);
            state = self.lock();
            state.n_building -= 1;
            state.n_in_the_way -= usize::from(!is_beside);
            if is_over() {
                state.builds.remove(&key);
            } else {
                state.builds.insert(key, BuildState::Done(result));
                if let Some(job) = state.waiting.iter_mut().find(|job| job.number == number) {
                    job.build_s = start.elapsed().as_secs_f64();
                }
            }
            self.changed.notify_all();
        }
    }

    /// Runs candidates one after the other until the end, in a thread of its own.
    fn run_all(&self) {
        let mut state = self.lock();
        while !self.is_closed() && state.fault.is_none() {
            let needs_build = self.options.build.is_some();
            let may_begin = !state.is_winding_down && state.n_in_the_way == 0;
            let next = state.waiting.iter().position(|job| may_begin && self.is_ready(&state, job));
            let Some(job) = next.and_then(|at| state.waiting.remove(at)) else {
                state = self.wait(state, Duration::from_secs(1));
                continue;
            };
            let build = match state.builds.get(&job.key) {
                Some(BuildState::Done(result)) => result.clone(),
                _ => Ok(()),
            };
            state.running = Some(job.number);
            let leading_ns = state.leading_ns;
            drop(state);
            let is_over = || self.is_closed() || self.given_up_from.load(Ordering::Relaxed) <= job.number;
            let mut seconds = Seconds { build: job.build_s, ..Seconds::default() };
            let config = &job.candidate.config;
            let result = build
                .and_then(|()| if needs_build { Ok(()) } else { self.build(config, job.key, &[], &is_over) })
                .and_then(|()| self.trial(config, leading_ns, &mut seconds, &is_over));
            state = self.lock();
            state.running = None;
            match result {
                _ if is_over() => {}
                Err(failure) if failure.is_of_device => state.measure_again(job, &failure.message),
                result => {
                    let limit = result.as_ref().err().and_then(|failure| failure.limit);
                    let outcome = result.map_or_else(TrialFailure::outcome, Outcome::Measured);
                    state.done.push_back((job.number, Measured { seconds, limit, ..Measured::of(outcome) }));
                }
            }
            self.changed.notify_all();
        }
    }

    /// Runs a candidate as often as a trial requires.
    fn trial(
        &self,
        config: &Config,
        leading_ns: Option<f64>,
        seconds: &mut Seconds,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Timing, TrialFailure> {
        let options = &self.options;
        let begin = Instant::now();
        // A candidate that is slow by one objective may be the best by another.
        let leading_ns = leading_ns.filter(|_| !options.to_the_end && !options.objectives.is_several());
        let mut samples: Vec<Vec<f64>> = vec![Vec::new(); options.objectives.all().len()];
        let mut n_runs = 0;
        let mut stopped_early = false;
        while !is_over() {
            let run = self.run_once(config, leading_ns, n_runs == 0, seconds, is_over)?;
            n_runs += 1;
            let is_hopeless = leading_ns.is_some_and(|leading| run[0].iter().all(|&ns| ns > WORTH_MORE * leading));
            if n_runs > options.n_warmups || is_hopeless {
                samples.iter_mut().zip(run).for_each(|(all, new)| all.extend(new));
            }
            let n_samples = samples[0].len();
            let is_enough = n_samples >= options.n_samples.max(1) && begin.elapsed() >= options.min_time;
            if is_hopeless || is_enough || n_samples >= MOST_SAMPLES.max(options.n_samples) {
                stopped_early = is_hopeless && !is_enough;
                break;
            }
        }
        if samples[0].is_empty() {
            return Err(TrialFailure::new(ErrorClass::Unknown, "it was given up"));
        }
        let others: Vec<f64> =
            samples[1..].iter().map(|samples| Timing::of_samples(samples, false).median_ns).collect();
        let others = OtherCosts::new(&others).expect("invariant: samples are positive, and objectives are few");
        Ok(Timing { others, ..Timing::of_samples(&samples[0], stopped_early) })
    }

    /// Runs a configuration once, with the commands before and after it; returns the samples of the run, by
    /// objective.
    fn run_once(
        &self,
        config: &Config,
        leading_ns: Option<f64>,
        is_checked: bool,
        seconds: &mut Seconds,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<f64>>, TrialFailure> {
        let options = &self.options;
        let folder = self.folder(self.key(config));
        let start = |template: &CommandTemplate, timeout: Duration, input: Option<&[u8]>, more: Option<String>| {
            let mut invocation = self.invocation(template, config, &folder);
            invocation.words.extend(more);
            let setting = ProcessSetting {
                cpus: &options.cpus,
                memory_bytes: options.memory_bytes,
                timeout,
                input,
                most_output: MOST_OUTPUT,
                metrics: options.objectives.all().iter().map(|objective| &objective.metric).collect(),
                is_over,
            };
            self.run(&invocation, &setting)
        };
        let beside = |template: &Option<CommandTemplate>, what: &str, class: ErrorClass, input: Option<&[u8]>| {
            let Some(template) = template else { return Ok(()) };
            let run = start(template, options.run_timeout, input, None);
            if run.is_success() { Ok(()) } else { Err(TrialFailure::new(class, run.complaint(what))) }
        };
        beside(&options.prepare, "--prepare", ErrorClass::RuntimeError, None)?;
        // For other metrics, the time of a good run is unknown.
        let patience = leading_ns.filter(|_| *options.objectives.leading() == Metric::Wall).map(|leading_ns| {
            Duration::try_from_secs_f64(HOPELESS * leading_ns / 1e9).unwrap_or(Duration::MAX).max(LEAST_RUN)
        });
        let timeout = patience.map_or(options.run_timeout, |patience| patience.min(options.run_timeout));
        // A kernel that looks hopeless to its own process is not timed further.
        let leading = leading_ns.filter(|_| *options.objectives.leading() == Metric::Kernel).map(|ns| ns.to_string());
        let run = start(&options.run, timeout, None, leading);
        seconds.run += run.wall_s;
        let begin = Instant::now();
        let result = self.judge(&run, timeout).and_then(|()| {
            if is_checked {
                beside(&options.check, "--check", ErrorClass::WrongAnswer, Some(&run.output))?;
            }
            options.objectives.samples(&run).map_err(|(class, message)| TrialFailure::new(class, message))
        });
        let cleaned = beside(&options.cleanup, "--cleanup", ErrorClass::RuntimeError, None);
        seconds.verify += begin.elapsed().as_secs_f64();
        let samples = result?;
        cleaned.map(|()| samples)
    }

    /// Checks that a run has ended as it should.
    fn judge(&self, run: &ProgramRun, timeout: Duration) -> Result<(), TrialFailure> {
        let message = || run.complaint("the command");
        match &run.end {
            ProgramEnd::Ended(status) if status.success() => Ok(()),
            ProgramEnd::Ended(_) => Err(match self.options.objectives.leading().failure(&run.output) {
                Some(failure) => failure.into(),
                None => TrialFailure::new(ErrorClass::RuntimeError, message()),
            }),
            ProgramEnd::TimedOut if timeout < self.options.run_timeout => Err(TrialFailure::new(
                ErrorClass::RunTimeout,
                format!("hopeless: ended after {:.3} s, {HOPELESS} times what the leading ones take", run.wall_s),
            )),
            ProgramEnd::TimedOut => Err(TrialFailure {
                limit: Some(Limit::RunS(timeout.as_secs_f64())),
                ..TrialFailure::new(ErrorClass::RunTimeout, message())
            }),
            ProgramEnd::NotStarted(..) => Err(TrialFailure::new(ErrorClass::InstantiationError, message())),
            ProgramEnd::GivenUp => Err(TrialFailure::new(ErrorClass::Unknown, message())),
        }
    }
}

impl Measure for Commands {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        let mut state = self.shared.lock();
        let first = state.n_submitted;
        self.shared.given_up_from.store(u64::MAX, Ordering::Relaxed);
        state.is_winding_down = false;
        for candidate in candidates {
            let (number, key) = (state.n_submitted, self.shared.key(&candidate.config));
            state.waiting.push_back(WaitingCandidate {
                number,
                candidate: candidate.clone(),
                key,
                build_s: 0.0,
                n_losses: 0,
            });
            state.n_submitted += 1;
        }
        self.shared.changed.notify_all();
        first..state.n_submitted
    }

    fn next(&mut self, leading_ns: Option<f64>, at_most: Duration) -> Result<Next, BoxError> {
        let until = Instant::now() + at_most;
        let mut state = self.shared.lock();
        state.leading_ns = leading_ns;
        loop {
            if let Some((number, measured)) = state.done.pop_front() {
                return Ok(Next::Done(number, measured));
            }
            if let Some(why) = &state.fault {
                return Err(io::Error::other(why.clone()).into());
            }
            let is_idle = state.running.is_none() && (state.waiting.is_empty() || state.is_winding_down);
            let left = until.saturating_duration_since(Instant::now());
            if is_idle || left.is_zero() {
                return Ok(if is_idle { Next::Idle } else { Next::Pending });
            }
            state = self.shared.wait(state, left);
        }
    }

    fn wind_down(&mut self) {
        let mut state = self.shared.lock();
        state.waiting.clear();
        state.is_winding_down = true;
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        self.shared.given_up_from.store(from, Ordering::Relaxed);
        let mut state = self.shared.lock();
        state.waiting.retain(|job| job.number < from);
        state.done.retain(|(number, _)| *number < from);
        // A run or a build in progress notices this soon.
        while state.running.is_some_and(|number| number >= from) || state.n_building > 0 && from == 0 {
            state = self.shared.wait(state, Duration::from_millis(20));
        }
        Ok(())
    }

    fn race(
        &mut self,
        candidates: &[Candidate],
        limits: RaceLimits,
        stop: Option<&AtomicBool>,
        left: &mut dyn FnMut(usize),
    ) -> Result<Vec<Standing>, BoxError> {
        self.cancel(0)?;
        // Processes used by trials are not reused in a race.
        self.shared.helpers().clear();
        let start = Instant::now();
        let is_over = || start.elapsed() >= limits.total || stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
        let mut racers: Vec<CommandRacer> =
            (0..candidates.len()).map(|at| CommandRacer { at, samples: Vec::new() }).collect();
        let mut failed = Vec::new();
        let mut stage_ends = RaceLimits::LEAST_ROUNDS;
        left(racers.len());
        for round in 1..=MOST_ROUNDS {
            let mut n = 0;
            while n < racers.len() && !is_over() {
                let racer = &mut racers[n];
                let config = &candidates[racer.at].config;
                let mut seconds = Seconds::default();
                let run = self.shared.built(config, &is_over);
                let run = run.and_then(|()| self.shared.run_once(config, None, round == 1, &mut seconds, &is_over));
                match run {
                    _ if is_over() => {}
                    Ok(mut samples) => racer.samples.append(&mut samples[0]),
                    Err(failure) if failure.is_of_device => return Err(io::Error::other(failure.message).into()),
                    Err(failure) => {
                        failed.push(Standing {
                            at: racer.at,
                            outcome: failure.outcome(),
                            quartile_ns: f64::INFINITY,
                            relative_error: None,
                        });
                        racers.remove(n);
                        continue;
                    }
                }
                n += 1;
            }
            if is_over() || racers.is_empty() {
                break;
            }
            racers.sort_by(|a, b| a.quartile_ns().total_cmp(&b.quartile_ns()));
            if round == stage_ends && racers.len() > FINALISTS {
                racers.truncate(racers.len().div_ceil(2));
                left(racers.len());
                stage_ends += 2 * RaceLimits::LEAST_ROUNDS;
            }
            let is_settled = match racers.as_slice() {
                [leading, next, ..] => RaceLimits::is_settled(&leading.samples, &next.samples),
                _ => round >= RaceLimits::LEAST_ROUNDS,
            };
            let is_long = round >= RaceLimits::LEAST_ROUNDS && start.elapsed() >= limits.rounds;
            if racers.len() <= FINALISTS && (is_settled || is_long) {
                break;
            }
        }
        racers.retain(|racer| !racer.samples.is_empty());
        racers.sort_by(|a, b| a.quartile_ns().total_cmp(&b.quartile_ns()));
        let standing = |racer: CommandRacer| Standing {
            at: racer.at,
            quartile_ns: racer.quartile_ns(),
            outcome: Outcome::Measured(Timing::of_samples(&racer.samples, false)),
            relative_error: None,
        };
        Ok(racers.into_iter().map(standing).chain(failed).collect())
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits { works_ahead: self.shared.options.build.is_some() && !self.shared.beside.is_empty() }
    }
}

/// Candidate in a race.
struct CommandRacer {
    at: usize,
    samples: Vec<f64>,
}

impl CommandRacer {
    fn quartile_ns(&self) -> f64 {
        let mut sorted = self.samples.clone();
        sorted.sort_by(f64::total_cmp);
        if sorted.is_empty() { f64::INFINITY } else { quantile(&sorted, 0.25) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright_search::Parameter;
    use tilewright_search::expression::Datum;

    /// Program that speaks the protocol of a persistent process: its time is a serial number, and it fails on
    /// demand.
    const HELPER: &str = r#"
        n=0
        while read -r line; do
            n=$((n + 1))
            case $line in
            *die*) kill -SEGV $$;;
            *odd*) [ $n = 1 ] || { echo '{"status":256,"is_doubtful":true,"stays":true}'; continue; };;
            *last*) stays=false;;
            *) stays=true;;
            esac
            echo "{\"Timed\":{\"samples_ns\":[$$],\"relative_error\":0}}"
            echo "{\"status\":0,\"is_doubtful\":false,\"stays\":${stays:-true}}"
        done"#;

    #[test]
    fn a_process_stays_until_something_goes_wrong_in_it() {
        let values = ["a", "b", "odd", "c", "die", "d", "last", "e"];
        let data = values.map(Datum::from);
        let space = Arc::new(Space::new("kernel", vec![Parameter::of_data("t", &data)], Vec::new()).unwrap());
        let candidates: Vec<Candidate> = values.map(|value| candidate(&space, value)).into();
        let text = format!("sh -c {} {{t}}", CommandTemplate::quoted(HELPER));
        let run = CommandTemplate::words(&text, &["t"]).unwrap().staying_after(3);
        let options =
            CommandOptions { objectives: Metric::Kernel.into(), to_the_end: true, ..CommandOptions::new(run) };
        let mut commands = Commands::new(space, options).unwrap();
        commands.submit(&candidates);
        let mut outcomes = Vec::new();
        while outcomes.len() < values.len() {
            match commands.next(None, Duration::from_secs(60)).unwrap() {
                Next::Done(_, measured) => outcomes.push(measured.outcome),
                other => panic!("{other:?}"),
            }
        }
        let process = |at: usize| match &outcomes[at] {
            Outcome::Measured(timing) => timing.median_ns,
            Outcome::Failed { class, message } => panic!("{}: {class}: {message}", values[at]),
        };
        assert_eq!(process(0), process(1), "it stays");
        assert_ne!(process(1), process(2), "a failure that may be of another is not believed");
        assert_eq!(process(2), process(3));
        match &outcomes[4] {
            Outcome::Failed { class: ErrorClass::RuntimeError, message } if message.contains("SIGSEGV") => {}
            other => panic!("{other:?}"),
        }
        assert_ne!(process(3), process(5), "what comes next has a process of its own");
        assert_eq!(process(5), process(6));
        assert_ne!(process(6), process(7), "one that says so takes no more");
    }

    /// A device that fails is no fault of the candidate that it had: that one is measured again by a process
    /// of its own, and where the device stays away, the run ends.
    #[test]
    fn a_lost_device_costs_no_trial() {
        let folder = Folder::new("tilewright-test").unwrap();
        let data = ["a", "lost", "b"].map(Datum::from);
        let space = Arc::new(Space::new("kernel", vec![Parameter::of_data("t", &data)], Vec::new()).unwrap());
        let candidates: Vec<Candidate> = ["a", "lost", "b"].map(|value| candidate(&space, value)).into();
        let measure = |is_back: bool| {
            let flag = folder.path().join(if is_back { "once" } else { "always" });
            let helper = format!(
                r#"while read -r line; do
                    case $line in
                    *lost*) [ -e {flag} ] || {{
                        {keep} : > {flag}
                        echo '{{"Failed":{{"class":"runtime_error","message":"gone","is_of_device":true}}}}'
                        echo '{{"status":256,"is_doubtful":false,"stays":false}}'
                        exit 1
                    }};;
                    esac
                    echo '{{"Timed":{{"samples_ns":[5],"relative_error":0}}}}'
                    echo '{{"status":0,"is_doubtful":false,"stays":true}}'
                done"#,
                flag = flag.display(),
                keep = if is_back { "" } else { "#" },
            );
            let text = format!("sh -c {} {{t}}", CommandTemplate::quoted(&helper));
            let run = CommandTemplate::words(&text, &["t"]).unwrap().staying_after(3);
            let options =
                CommandOptions { objectives: Metric::Kernel.into(), to_the_end: true, ..CommandOptions::new(run) };
            let mut commands = Commands::new(space.clone(), options).unwrap();
            commands.submit(&candidates);
            let mut measured = Vec::new();
            let ended = loop {
                match commands.next(None, Duration::from_secs(60)) {
                    Ok(Next::Done(number, of)) => measured.push((number, matches!(of.outcome, Outcome::Measured(_)))),
                    Ok(Next::Idle) => break Ok(()),
                    Ok(Next::Pending) => panic!("{measured:?}"),
                    Err(error) => break Err(error.to_string()),
                }
            };
            (measured, ended)
        };
        assert_eq!(measure(true), (vec![(0, true), (1, true), (2, true)], Ok(())));
        let (measured, ended) = measure(false);
        assert_eq!(measured, [(0, true)], "nothing is recorded of what the device failed with");
        let ended = ended.unwrap_err();
        assert!(ended.starts_with("4 times the device failed with the same candidate: gone"), "{ended}");
    }

    fn candidate(space: &Space, value: &str) -> Candidate {
        let config = space.config_from_json(&serde_json::json!({ "t": value })).unwrap();
        Candidate { config, steps: "".into(), patience: None }
    }
}
