//! Measuring candidates: batches are built and checked on all workers side by side, then timed one after the other. While
//! one is timed, the other workers build what comes next, on other cores.

mod ahead;

use crate::data::{Data, DataError, anonymous_file};
use crate::host;
use crate::objects;
use crate::protocol::{Assignment, Plan, Reply, Request, Source};
use crate::workers::{Answer, Workers, describe};
use ahead::{Ahead, State};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use tilewright_ir::op::Workload;
use tilewright_ir::{Step, Target};
use tilewright_tune::{BoxError, Config, ErrorClass, Measure, Measured, Outcome, Seconds, Timing};

pub use crate::workers::WorkerCommand;

/// A candidate is given up where its first run takes so many times as long as the fastest first run so far …
const HOPELESS_RUN: u32 = 5;
/// … but not before so long: starting its worker anew takes a part of that, and so does a busy machine's delay.
const LEAST_LIMIT: Duration = Duration::from_millis(300);
/// While none has come to its end, each try of a candidate may take so many times as long as the one before.
const LIMIT_GROWTH: u32 = 4;
/// Samples that a trial has at least: what makes kernels slow for a while outlasts a second one, and another candidate tells more.
const SAMPLES_OF_TRIAL: u32 = 1;

/// How candidates are built, run and timed.
#[derive(Debug, Clone)]
pub struct Options {
    /// How to start a worker process.
    pub worker: WorkerCommand,
    /// Worker processes that build side by side.
    pub n_workers: usize,
    /// Threads a kernel may use.
    pub n_threads: usize,
    /// CPUs to pin to while timing, one a thread.
    pub cpus: Vec<usize>,
    /// Seed of the random inputs.
    pub seed: u64,
    /// Longest a build may take.
    pub build_timeout: Duration,
    /// Longest a candidate's runs may take together.
    pub run_timeout: Duration,
    /// Whether candidates that are hopeless against the fastest are run and timed to the end all the same.
    pub to_the_end: bool,
    /// Time to spend in a candidate's runs, once it is known to be right.
    pub min_time: Duration,
    /// Whether caches are emptied before each run.
    pub cold: bool,
    /// Whether times are what cores would take that nobody else slows down. Where kernels are compared with what is timed
    /// in another way they must not be.
    pub at_best_pace: bool,
    /// Memory a worker may use beyond what it starts with.
    pub memory_bytes: u64,
}

impl Options {
    /// Defaults for this machine: a worker a CPU, 10 s a build, 10 s a run, 10 ms of timing, half the memory.
    pub fn new(worker: WorkerCommand, n_threads: usize) -> Options {
        Options {
            worker,
            n_workers: most_workers(),
            n_threads,
            cpus: host::pin_cpus(n_threads),
            seed: 0,
            build_timeout: Duration::from_secs(10),
            run_timeout: Duration::from_secs(10),
            to_the_end: false,
            min_time: Duration::from_millis(10),
            cold: false,
            at_best_pace: true,
            memory_bytes: host::memory_bytes().unwrap_or(8 << 30) / 2,
        }
    }
}

/// Worker processes that are of use.
fn most_workers() -> usize {
    host::allowed_cpus().len().clamp(1, 8)
}

/// Why nothing can be measured at all.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is no data to run on.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The worker processes do not start.
    #[error("cannot run worker processes: {0}")]
    Workers(#[from] io::Error),
    /// The workload's buffers exceed this machine's memory.
    #[error("{workload} needs {needed_mib} MiB of memory, and this machine has {memory_mib}; give smaller sizes")]
    TooLarge {
        /// The workload.
        workload: String,
        /// What it needs.
        needed_mib: u64,
        /// What there is.
        memory_mib: u64,
    },
}

/// Turns a configuration into its schedule.
type StepsOf = Box<dyn Fn(&Config) -> Vec<Step> + Send>;

/// The CPU, as a place to measure one workload.
pub struct Device {
    workers: Workers,
    options: Options,
    steps: StepsOf,
    next_id: u64,
    /// The fastest first run so far, with the comparison of its answer.
    fastest_check: Option<Duration>,
    /// Candidates of batches to come.
    ahead: Vec<Ahead>,
    // Workers map the one file and read and write the other; both must outlive them.
    _data: Data,
    _objects: File,
}

/// A candidate that a worker has built and found right.
#[derive(Debug, Clone, Copy)]
struct Kept {
    worker: usize,
    id: u64,
    /// For building and checking.
    seconds: Seconds,
    /// What its first run took, and how many times as long as they could the cores took meanwhile.
    first_ns: f64,
    first_pace: f64,
    /// ‖out − reference‖ / ‖reference‖ of its answer.
    relative_error: f64,
}

/// What a worker does with a source.
#[derive(Debug, Clone, Copy)]
struct Building {
    /// Which source.
    at: usize,
    id: u64,
    /// How long its first run may take.
    limit: Duration,
    phase: Phase,
}

/// How far a source is.
#[derive(Debug, Clone, Copy)]
enum Phase {
    /// It is being built.
    Build,
    /// Built in so many seconds; its buffers are being prepared.
    Prepare { build: f64 },
    /// It is in its first run, or its answer is being compared.
    Run { build: f64, start: Instant },
}

/// The tries of a source that were given up.
#[derive(Debug, Clone, Copy, Default)]
struct GivenUp {
    /// The limit of the last one.
    limit: Duration,
    /// All of them together.
    seconds: Seconds,
}

impl Device {
    /// Whether this machine has the memory to measure a workload.
    ///
    /// # Errors
    /// [`DeviceError::TooLarge`] where it has not.
    pub fn check_memory(workload: &Workload) -> Result<(), DeviceError> {
        let program = workload.program();
        // Inputs and outputs once, and the reference and its inputs in double precision; then all of them in every worker.
        let elements: u64 = program.arguments().filter_map(|(_, b)| b.n_elements()).sum();
        let bytes = workload.dtype.bytes();
        let needed = elements.saturating_mul((bytes + 24).max(bytes * most_workers() as u64 + 8));
        match host::memory_bytes() {
            Some(memory) if needed > memory => Err(DeviceError::TooLarge {
                workload: workload.to_string(),
                needed_mib: needed >> 20,
                memory_mib: memory >> 20,
            }),
            _ => Ok(()),
        }
    }

    /// Prepares inputs and reference outputs and starts the workers.
    ///
    /// # Errors
    /// [`DeviceError`] where memory does not suffice or workers do not start.
    pub fn new(
        workload: Workload,
        target: &Target,
        options: Options,
        steps: impl Fn(&Config) -> Vec<Step> + Send + 'static,
    ) -> Result<Device, DeviceError> {
        Device::check_memory(&workload)?;
        let untuned = workload.program();
        let data = Data::new(&untuned, options.seed, host::allowed_cpus().len().max(1))?;
        let objects = anonymous_file(c"tilewright-objects")?;
        objects::make_appending(&objects)?;
        let assignment = Assignment {
            workload: workload.to_string(),
            target: target.into(),
            n_threads: options.n_threads,
            cpus: options.cpus.clone(),
            data_fd: data.file.as_raw_fd(),
            data_offsets: data.offsets.clone(),
            objects_fd: objects.as_raw_fd(),
            memory_bytes: options.memory_bytes,
        };
        let workers = Workers::start(options.worker.clone(), assignment, options.n_workers)?;
        Ok(Device {
            workers,
            options,
            steps: Box::new(steps),
            next_id: 0,
            fastest_check: None,
            ahead: Vec::new(),
            _data: data,
            _objects: objects,
        })
    }

    /// From the next candidate on, whatever others take, its runs may take so long together.
    pub fn run_to_the_end(&mut self, run_timeout: Duration) {
        self.options.run_timeout = run_timeout;
        self.options.to_the_end = true;
    }

    /// How long the first run of a candidate may take that was given up after `given_up`, if it was.
    ///
    /// Until one candidate has come to its end nobody knows what is slow: all of them are tried for a short time, then
    /// those that are left for a longer one.
    fn run_limit(&self, given_up: Duration, to_the_end: bool) -> Duration {
        let hopeless = match self.fastest_check {
            _ if to_the_end => self.options.run_timeout,
            Some(fastest) => fastest * HOPELESS_RUN,
            None => given_up * LIMIT_GROWTH,
        };
        hopeless.max(LEAST_LIMIT).min(self.options.run_timeout)
    }

    /// Builds and checks sources side by side; for each, a kept kernel or what became of it. Code that is made quickly
    /// will do to learn about a configuration; what is compared and kept is LLVM's.
    fn build(
        &mut self,
        sources: &[Source],
        quickly: bool,
        to_the_end: bool,
    ) -> io::Result<Vec<Result<Kept, Measured>>> {
        let mut results: Vec<Option<Result<Kept, Measured>>> = sources.iter().map(|_| None).collect();
        let mut given_up = vec![GivenUp::default(); sources.len()];
        // Those whose worker went after they were found right: they are built again, not checked again.
        let mut lost: Vec<Option<Kept>> = vec![None; sources.len()];
        let mut waiting = VecDeque::new();
        let mut building: Vec<Option<Building>> = vec![None; self.workers.len()];
        // By worker, what it has built ahead: which source, the kernel's number, seconds.
        let mut ready: Vec<VecDeque<(usize, u64, f64)>> = vec![VecDeque::new(); self.workers.len()];
        let first_limit = self.run_limit(Duration::ZERO, to_the_end);
        for (at, source) in sources.iter().enumerate() {
            let announced = self.ahead.iter().position(|ahead| ahead.source == *source);
            match announced.map(|place| self.ahead.remove(place).state) {
                None | Some(State::Waiting) => waiting.push_back(at),
                Some(State::Building(worker, id)) => {
                    building[worker] = Some(Building { at, id, limit: first_limit, phase: Phase::Build });
                }
                Some(State::Built(worker, id, build)) => ready[worker].push_back((at, id, build)),
                Some(State::Failed(measured)) => results[at] = Some(Err(measured)),
            }
        }
        loop {
            let mut n_busy = building.iter().flatten().count();
            for (worker, slot) in building.iter_mut().enumerate() {
                if slot.is_some() || !self.workers.is_idle(worker) {
                    continue;
                }
                n_busy += 1;
                let is_core_left = n_busy * self.options.n_threads <= self.workers.len();
                if let Some((at, id, build)) = ready[worker].pop_front() {
                    self.workers.ask(worker, &Request::Check { id }, self.options.run_timeout);
                    *slot = Some(Building { at, id, limit: first_limit, phase: Phase::Prepare { build } });
                } else if waiting.is_empty() && is_core_left {
                    // What one worker has built ahead while another timed would be checked by it alone.
                    let most = (0..ready.len()).max_by_key(|&other| ready[other].len());
                    if let Some(other) = most.filter(|&other| ready[other].len() > 1)
                        && let Some((at, id, _)) = ready[other].pop_back()
                    {
                        self.workers.tell(other, &Request::Drop { id });
                        waiting.push_back(at);
                    }
                }
                while slot.is_none()
                    && let Some(at) = waiting.pop_front()
                {
                    let limit = self.run_limit(given_up[at].limit, to_the_end);
                    if lost[at].is_none() && limit <= given_up[at].limit {
                        results[at] = Some(Err(self.too_slow(given_up[at])));
                        continue;
                    }
                    let id = self.next_id;
                    self.next_id += 1;
                    let request = Request::Build { id, source: sources[at].clone(), quickly, aside: false };
                    self.workers.ask(worker, &request, self.options.build_timeout);
                    *slot = Some(Building { at, id, limit, phase: Phase::Build });
                }
            }
            if results.iter().all(Option::is_some) {
                break;
            }
            let (worker, answer) = self.workers.next_answer()?;
            if !matches!(answer, Answer::Reply(_)) {
                waiting.extend(ready[worker].drain(..).map(|(at, ..)| at));
                self.forget_ahead(worker);
                for (other, result) in results.iter_mut().enumerate() {
                    if let Some(Ok(kept)) = result
                        && kept.worker == worker
                    {
                        lost[other] = Some(*kept);
                        *result = None;
                        waiting.push_back(other);
                    }
                }
            }
            let Some(Building { at, id, limit, phase }) = building[worker].take() else {
                self.note_ahead(worker, answer, &mut Vec::new());
                continue;
            };
            let mut seconds = given_up[at].seconds;
            if let Phase::Prepare { build } | Phase::Run { build, .. } = phase {
                seconds.build += build;
            }
            let mut go_on = |phase| building[worker] = Some(Building { at, id, limit, phase });
            results[at] = Some(match (answer, phase) {
                (Answer::Reply(Reply::Built { seconds: build, .. }), Phase::Build) => match lost[at] {
                    Some(kept) => Ok(Kept { worker, id, ..kept }),
                    None => {
                        self.workers.ask(worker, &Request::Check { id }, self.options.run_timeout);
                        go_on(Phase::Prepare { build });
                        continue;
                    }
                },
                (Answer::Reply(Reply::Prepared { .. }), Phase::Prepare { build }) => {
                    self.workers.go_on(worker, limit);
                    go_on(Phase::Run { build, start: Instant::now() });
                    continue;
                }
                (
                    Answer::Reply(Reply::Checked { seconds: verify, first_ns, first_pace, relative_error, .. }),
                    Phase::Run { start, .. },
                ) => {
                    let took = start.elapsed();
                    self.fastest_check = Some(self.fastest_check.map_or(took, |fastest| fastest.min(took)));
                    seconds.verify += verify;
                    Ok(Kept { worker, id, seconds, first_ns, first_pace, relative_error })
                }
                (Answer::TimedOut, Phase::Run { .. }) => {
                    seconds.run += limit.as_secs_f64();
                    given_up[at] = GivenUp { limit, seconds };
                    waiting.push_back(at);
                    continue;
                }
                (answer, Phase::Build) => Err(self.not_built(answer, seconds)),
                (Answer::Reply(Reply::Failed { class, message, seconds: verify, .. }), _) => {
                    self.workers.tell(worker, &Request::Drop { id });
                    seconds.verify += verify;
                    Err(failed(class.0, message, seconds))
                }
                (Answer::Reply(other), _) => {
                    Err(failed(ErrorClass::Unknown, format!("unexpected reply {other:?}"), seconds))
                }
                (answer, _) => Err(self.did_not_return(&answer, seconds)),
            });
        }
        Ok(results.into_iter().map(|r| r.expect("every source was built or failed")).collect())
    }

    /// What became of a candidate that its worker did not build.
    fn not_built(&self, answer: Answer, mut seconds: Seconds) -> Measured {
        match answer {
            Answer::Reply(Reply::Failed { class, message, seconds: build, .. }) => {
                seconds.build += build;
                failed(class.0, message, seconds)
            }
            Answer::Reply(other) => failed(ErrorClass::Unknown, format!("unexpected reply {other:?}"), seconds),
            Answer::Died(status) => {
                let why = format!("the compiler crashed: {}", describe(status));
                failed(ErrorClass::CompileErrorHost, why, seconds)
            }
            Answer::TimedOut => {
                let build = self.options.build_timeout.as_secs_f64();
                seconds.build += build;
                failed(ErrorClass::BuildTimeout, format!("not built within {build} s"), seconds)
            }
        }
    }

    /// What became of a candidate whose first run was given up.
    fn too_slow(&self, GivenUp { limit, seconds }: GivenUp) -> Measured {
        let mut message = format!("not finished within {} s", (1e2 * limit.as_secs_f64()).round() / 1e2);
        if let Some(fastest) = self.fastest_check.filter(|_| limit < self.options.run_timeout) {
            message += &format!(", where the fastest so far took {:.3} s", fastest.as_secs_f64());
        }
        failed(ErrorClass::RunTimeout, message, seconds)
    }

    /// What became of a candidate whose run ended its worker.
    fn did_not_return(&self, answer: &Answer, mut seconds: Seconds) -> Measured {
        match answer {
            Answer::Died(status) => failed(ErrorClass::RuntimeError, describe(*status), seconds),
            Answer::TimedOut | Answer::Reply(_) => {
                let limit = self.options.run_timeout.as_secs_f64();
                seconds.run += limit;
                failed(ErrorClass::RunTimeout, format!("not finished within {limit} s"), seconds)
            }
        }
    }

    /// Times a kept kernel for a round, or as long as it takes to see that it does not come near one that leads. Beside a
    /// trial, and nothing else, other workers build ahead; those that went meanwhile are added to `gone`, and where its own
    /// had gone before there is no result.
    fn run(
        &mut self,
        kept: Kept,
        leading_ns: Option<f64>,
        round: Round,
        is_trial: bool,
        gone: &mut Vec<usize>,
    ) -> io::Result<Option<Measured>> {
        let is_busy = |device: &Device| match is_trial {
            true => !device.workers.is_idle(kept.worker),
            false => device.ahead.iter().any(|ahead| matches!(ahead.state, State::Building(..))),
        };
        while is_busy(self) {
            if is_trial {
                self.build_ahead();
            }
            let (worker, answer) = self.workers.next_answer()?;
            self.note_ahead(worker, answer, gone);
        }
        if gone.contains(&kept.worker) {
            return Ok(None);
        }
        let plan = Plan {
            min_time_ns: round.time.as_nanos() as f64,
            min_samples: round.min_samples,
            first_ns: kept.first_ns,
            first_pace: if self.options.at_best_pace { kept.first_pace } else { 1.0 },
            leading_ns: leading_ns.filter(|_| !self.options.to_the_end),
            cold: self.options.cold,
            at_best_pace: self.options.at_best_pace,
        };
        self.workers.ask(kept.worker, &Request::Run { id: kept.id, plan }, self.options.run_timeout);
        let answer = loop {
            if is_trial {
                self.build_ahead();
            }
            match self.workers.next_answer()? {
                (worker, answer) if worker == kept.worker => break answer,
                (worker, answer) => self.note_ahead(worker, answer, gone),
            }
        };
        if !matches!(answer, Answer::Reply(_)) {
            gone.push(kept.worker);
            self.forget_ahead(kept.worker);
        }
        let mut seconds = kept.seconds;
        Ok(Some(match answer {
            Answer::Reply(Reply::Timed { samples_ns, stopped_early, seconds: run, .. }) => {
                seconds.run += run;
                Measured { outcome: Outcome::Measured(Timing::of_samples(&samples_ns, stopped_early)), seconds }
            }
            Answer::Reply(Reply::Failed { class, message, seconds: run, .. }) => {
                seconds.run += run;
                failed(class.0, message, seconds)
            }
            Answer::Reply(other) => failed(ErrorClass::Unknown, format!("unexpected reply {other:?}"), seconds),
            answer => self.did_not_return(&answer, seconds),
        }))
    }

    /// Builds, verifies and times sources; the same as [`Measure::measure`] for programs that have no configuration.
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub fn measure_sources(
        &mut self,
        sources: &[Source],
        leading_ns: Option<f64>,
        done: &mut dyn FnMut(usize, Measured) -> ControlFlow<()>,
    ) -> io::Result<()> {
        let mut left: Vec<usize> = (0..sources.len()).collect();
        // While none leads, the fastest of the sources does.
        let mut fastest_ns: Option<f64> = None;
        while !left.is_empty() {
            let batch: Vec<Source> = left.iter().map(|&at| sources[at].clone()).collect();
            let (mut kept, mut again, mut gone) = (Vec::new(), Vec::new(), Vec::new());
            let mut given_up = false;
            for (at, built) in left.into_iter().zip(self.build(&batch, true, self.options.to_the_end)?) {
                match built {
                    Ok(one) => kept.push((at, one)),
                    Err(measured) => given_up |= done(at, measured).is_break(),
                }
            }
            let round = Round { time: self.options.min_time, min_samples: SAMPLES_OF_TRIAL };
            while !kept.is_empty() && !given_up {
                // First those whose workers are not building ahead.
                let place = kept.iter().position(|(_, one)| self.workers.is_idle(one.worker)).unwrap_or(0);
                let (at, one) = kept.remove(place);
                let ran = self.run(one, leading_ns.or(fastest_ns), round, true, &mut gone)?;
                again.extend(kept.extract_if(.., |(_, other)| gone.contains(&other.worker)).map(|(at, _)| at));
                let Some(measured) = ran else {
                    again.push(at);
                    continue;
                };
                if !gone.contains(&one.worker) {
                    self.forget(one);
                }
                if let Outcome::Measured(timing) = &measured.outcome {
                    fastest_ns = Some(fastest_ns.map_or(timing.median_ns, |fastest| fastest.min(timing.median_ns)));
                }
                given_up = done(at, measured).is_break();
            }
            kept.into_iter().for_each(|(_, one)| self.forget(one));
            if given_up {
                break;
            }
            left = again;
        }
        Ok(())
    }

    fn source(&self, config: &Config) -> Source {
        Source::Steps(steps_text(&(self.steps)(config)))
    }

    fn forget(&mut self, kept: Kept) {
        self.workers.tell(kept.worker, &Request::Drop { id: kept.id });
    }

    /// Times candidates against each other. The result for each is the timing over its rounds' medians, or what became
    /// of it, with the relative error of its answer.
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub fn race(&mut self, sources: &[Source], rounds: u32, round: Round) -> io::Result<Vec<(Outcome, Option<f64>)>> {
        let mut racers = self.start_race(sources)?;
        self.race_rounds(&mut racers.iter_mut().collect::<Vec<_>>(), rounds, round)?;
        let end = |racer: Racer| {
            let relative_error = racer.relative_error();
            (self.end_race(racer), relative_error)
        };
        Ok(racers.into_iter().map(end).collect())
    }

    /// Builds and checks candidates for [`Device::race_rounds`] and [`Device::race_round`].
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub fn start_race(&mut self, sources: &[Source]) -> io::Result<Vec<Racer>> {
        let built = self.build(sources, false, true)?;
        let racer = |built| match built {
            Ok(kept) => Racer { kept: Some(kept), ..Racer::default() },
            Err(Measured { outcome, .. }) => Racer { failure: Some(outcome), ..Racer::default() },
        };
        Ok(built.into_iter().map(racer).collect())
    }

    /// Rounds that each run every candidate once in a new order, so that a change of the machine's speed hits all alike.
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub fn race_rounds(&mut self, racers: &mut [&mut Racer], rounds: u32, round: Round) -> io::Result<()> {
        let mut order: Vec<usize> = (0..racers.len()).collect();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(self.options.seed);
        for _ in 0..rounds {
            // What a candidate finds in the caches, and how fast the cores just are, depends on who ran before it.
            order.shuffle(&mut rng);
            for &at in &order {
                self.race_round(racers[at], round)?;
            }
        }
        Ok(())
    }

    /// One round of one candidate: its median is kept.
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub fn race_round(&mut self, racer: &mut Racer, round: Round) -> io::Result<()> {
        if let (Some(kept), None) = (racer.kept, &racer.failure) {
            match self.run(kept, None, round, false, &mut Vec::new())?.map(|measured| measured.outcome) {
                Some(Outcome::Measured(timing)) => racer.medians_ns.push(timing.median_ns),
                failure => racer.failure = failure,
            }
        }
        Ok(())
    }

    /// Forgets a candidate and sums up its rounds.
    pub fn end_race(&mut self, racer: Racer) -> Outcome {
        if let Some(kept) = racer.kept {
            self.forget(kept);
        }
        racer.failure.unwrap_or_else(|| match racer.medians_ns.as_slice() {
            [] => Outcome::Failed { class: ErrorClass::Unknown, message: "it was never run".to_owned() },
            medians => Outcome::Measured(Timing::of_samples(medians, false)),
        })
    }
}

/// What one candidate's runs in a round of a race come to at least.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Their time together.
    pub time: Duration,
    /// Samples of a long kernel, after a run that warms up; that may itself be the sample where one will do.
    pub min_samples: u32,
}

/// A candidate in a race.
#[derive(Debug, Default)]
pub struct Racer {
    kept: Option<Kept>,
    /// Median nanoseconds a run, one for each round.
    pub medians_ns: Vec<f64>,
    failure: Option<Outcome>,
}

impl Racer {
    /// ‖out − reference‖ / ‖reference‖ of its answer; none where it was not right.
    pub fn relative_error(&self) -> Option<f64> {
        self.kept.map(|kept| kept.relative_error)
    }

    /// Nanoseconds a run in its fastest round; infinite where it has none, or failed.
    pub fn fastest_ns(&self) -> f64 {
        match self.failure {
            None => self.medians_ns.iter().copied().fold(f64::INFINITY, f64::min),
            Some(_) => f64::INFINITY,
        }
    }
}

fn failed(class: ErrorClass, message: String, seconds: Seconds) -> Measured {
    Measured { outcome: Outcome::Failed { class, message }, seconds }
}

/// The text of a schedule, as it is recorded and sent to workers.
pub fn steps_text(steps: &[Step]) -> String {
    steps.iter().map(|s| format!("{s}\n")).collect()
}

impl Measure for Device {
    /// Where kernels leave cores free while they are timed.
    fn works_ahead(&self) -> bool {
        self.workers.len() > 1 && (1..host::allowed_cpus().len()).contains(&self.options.cpus.len())
    }

    fn announce(&mut self, batch: &[Config]) {
        let sources: Vec<Source> = batch.iter().map(|c| self.source(c)).collect();
        self.announce_sources(sources);
    }

    fn measure(
        &mut self,
        batch: &[Config],
        leading_ns: Option<f64>,
        done: &mut dyn FnMut(usize, Measured) -> ControlFlow<()>,
    ) -> Result<(), BoxError> {
        let sources: Vec<Source> = batch.iter().map(|c| self.source(c)).collect();
        Ok(self.measure_sources(&sources, leading_ns, done)?)
    }
}
