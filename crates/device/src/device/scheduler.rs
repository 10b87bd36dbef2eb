//! Scheduling of candidates: they are built on all workers, then verified and timed one at a time.
//!
//! This module is the policy alone: which candidate is built, verified and timed next, where and for how
//! long, how a reply changes its state, and when it is hopeless. It receives the replies of workers and the
//! list of their idle threads, and returns commands; [`Device`](super::Device) executes them.

use crate::child::describe;
use crate::protocol::{Caches, EMULATED_NS, ProgramSource, Reply, TimingPlan, WorkerRequest, WorkerThread};
use crate::timing::{MOST_FLUSHING, RoundLength};
use crate::workers::{IdleThreads, WorkerEvent, is_from_outside};
use std::io;
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use tilewright_search::{Conditions, ErrorClass, Limit, Measured, Outcome, Seconds, Timing};

/// Multiple of the fastest first run so far at which a candidate's first run is given up, if it exceeds
/// [`LEAST_LIMIT`].
const HOPELESS_RUN: u32 = 5;
/// Minimum time limit of a first run: restarting its worker takes a part of that, and so does a delay on a
/// busy machine.
const LEAST_LIMIT: Duration = Duration::from_millis(100);
/// Growth of the time limit with each try of a candidate, while none has finished.
const LIMIT_GROWTH: u32 = 4;
/// Multiple of the fastest first run at which a first run, if longer than [`LEAST_SLOW`], no longer has the
/// machine to itself: its exact time no longer matters, and others are verified meanwhile.
const SLOW_RUN: u32 = 3;
/// Minimum time before others are verified beside a slow first run.
const LEAST_SLOW: Duration = Duration::from_millis(30);
/// Timeout for flushing the caches a few times, whatever their size.
const MOST_FLUSHING_TIME: Duration = Duration::from_secs(5);

/// Maximum number of repeated measurements of a candidate whose test was stopped or disturbed from outside.
pub(crate) const MOST_RETRIES: u32 = 3;

/// Maximum number of kernels queued in a worker: enough for the time that a search takes to propose, and few
/// enough that other workers also test what they have built.
const MOST_QUEUED: usize = 4;

/// Settings that stay the same while candidates are measured.
#[derive(Debug, Clone)]
pub(super) struct Policy {
    /// Number of worker processes.
    pub n_workers: usize,
    /// Whether workers can build on other cores while a kernel is timed.
    pub has_cores_left: bool,
    /// Length of a trial's timing.
    pub round: RoundLength,
    pub build_timeout: Duration,
    pub run_timeout: Duration,
    /// Whether slow candidates are timed completely, rather than pruned.
    pub to_the_end: bool,
    pub caches: Caches,
    pub at_best_pace: bool,
    pub memory_bytes: u64,
}

/// Purpose of measuring candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    /// Time them as trials of a search, with code that compiles quickly: good enough to learn about a
    /// configuration.
    Trial,
    /// Verify and keep them, without pruning, with LLVM's code, for comparisons and for the record.
    Keep,
}

/// Command to the workers.
#[derive(Debug)]
pub(super) enum WorkerCommands {
    /// Send a request to a worker's thread, which must answer before the timeout.
    Ask { worker: usize, request: WorkerRequest, timeout: Duration },
    /// Send a request to a worker that it does not answer, or not before others.
    Tell { worker: usize, request: WorkerRequest },
    /// Extend the timeout of a worker's thread that has not finished.
    GoOn { worker: usize, lane: WorkerThread, timeout: Duration },
    /// Have a worker build only beside the cores on which kernels are timed, or on all.
    Pin { worker: usize, is_beside: bool },
    /// Move this process off the cores on which kernels are timed, or back.
    StepAside(bool),
    /// Kill and restart a worker, whose work is given up.
    GiveUp { worker: usize },
}

/// Source to be measured.
struct Submission {
    /// Number, smaller for earlier ones.
    number: u64,
    /// Number of its submission; earlier ones come first.
    submission: u64,
    source: ProgramSource,
    /// Timeout of its runs, independent of other candidates, if one is given.
    patience: Option<Duration>,
    state: CandidateState,
    /// Time limit at which its first run was given up; zero if it was not.
    given_up: Duration,
    /// Whether its test was interrupted by a pause, which makes its times meaningless.
    is_disturbed: bool,
    n_retries: u32,
    seconds: Seconds,
}

/// Progress of a candidate.
enum CandidateState {
    Waiting,
    Building(WorkerKernel),
    Built(WorkerKernel),
    /// Queued in its worker, to be verified and timed after others; lower numbers come first.
    Queued {
        kernel: WorkerKernel,
        number: u64,
        limit: Duration,
    },
    /// Having its buffers prepared.
    Preparing {
        kernel: WorkerKernel,
        is_alone: bool,
        limit: Duration,
    },
    /// Running for the first time, or having its result compared with the reference.
    Running {
        kernel: WorkerKernel,
        is_alone: bool,
        start: Instant,
        limit: Duration,
    },
    Checked(VerifiedKernel),
    Timing(VerifiedKernel),
    Done(Measured),
}

/// Kernel, by its worker and its number there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct WorkerKernel {
    pub worker: usize,
    pub id: u64,
}

/// Kernel that was found correct.
#[derive(Debug, Clone, Copy)]
pub(super) struct VerifiedKernel {
    pub kernel: WorkerKernel,
    /// Whether no other kernel has run since its first run began.
    pub is_alone: bool,
    /// Relative error of its result, ‖out − reference‖ / ‖reference‖.
    pub relative_error: f64,
}

impl CandidateState {
    fn kernel(&self) -> Option<WorkerKernel> {
        match self {
            CandidateState::Waiting | CandidateState::Done(_) => None,
            CandidateState::Building(kernel)
            | CandidateState::Built(kernel)
            | CandidateState::Queued { kernel, .. }
            | CandidateState::Preparing { kernel, .. }
            | CandidateState::Running { kernel, .. } => Some(*kernel),
            CandidateState::Checked(kept) | CandidateState::Timing(kept) => Some(kept.kernel),
        }
    }

    fn is_of(&self, worker: usize) -> bool {
        self.kernel().is_some_and(|kernel| kernel.worker == worker)
    }

    /// Thread of its worker that is working on it.
    fn lane(&self) -> Option<WorkerThread> {
        match self {
            CandidateState::Building(_) => Some(WorkerThread::Build),
            CandidateState::Preparing { .. } | CandidateState::Running { .. } | CandidateState::Timing(_) => {
                Some(WorkerThread::Test)
            }
            CandidateState::Waiting
            | CandidateState::Built(_)
            | CandidateState::Queued { .. }
            | CandidateState::Checked(_)
            | CandidateState::Done(_) => None,
        }
    }

    /// Whether it is being tested, and no other kernel has run since its first run began.
    fn is_alone(&self) -> bool {
        match self {
            CandidateState::Preparing { is_alone, .. } | CandidateState::Running { is_alone, .. } => *is_alone,
            CandidateState::Timing(kept) => kept.is_alone,
            _ => false,
        }
    }

    /// Whether it is running, or about to.
    fn is_in_test(&self) -> bool {
        self.lane() == Some(WorkerThread::Test)
    }
}

impl Submission {
    /// Order of precedence, smallest first: by submission, then those that have not been given up.
    fn precedence(&self) -> (u64, Duration) {
        (self.submission, self.given_up)
    }
}

/// Scheduler of the workers.
pub(super) struct Scheduler {
    policy: Policy,
    goal: Goal,
    /// Candidates, ordered by number.
    candidates: Vec<Submission>,
    n_submitted: u64,
    /// Number of the next kernel.
    next_id: u64,
    /// Fastest first run so far, including the comparison of its result.
    fastest_check: Option<Duration>,
    /// Fastest trial so far.
    fastest_ns: Option<f64>,
    /// Median of the leading candidate: slower ones are not timed for long.
    leading_ns: Option<f64>,
    is_aside: bool,
    /// Threads of workers that wait for a request.
    idle: IdleThreads,
    commands: Vec<WorkerCommands>,
}

impl Scheduler {
    /// Makes a scheduler without candidates.
    pub fn new(policy: Policy) -> Scheduler {
        Scheduler {
            idle: vec![[false; 2]; policy.n_workers],
            policy,
            goal: Goal::Trial,
            candidates: Vec::new(),
            n_submitted: 0,
            next_id: 0,
            fastest_check: None,
            fastest_ns: None,
            leading_ns: None,
            is_aside: false,
            commands: Vec::new(),
        }
    }

    /// Adds sources, each with a timeout of its runs that overrides the default, if any; returns their
    /// numbers.
    pub fn submit(&mut self, sources: impl IntoIterator<Item = (ProgramSource, Option<Duration>)>) -> Range<u64> {
        let first = self.n_submitted;
        for (source, patience) in sources {
            self.candidates.push(Submission {
                number: self.n_submitted,
                submission: first,
                source,
                patience,
                state: CandidateState::Waiting,
                given_up: Duration::ZERO,
                is_disturbed: false,
                n_retries: 0,
                seconds: Seconds::default(),
            });
            self.n_submitted += 1;
        }
        first..self.n_submitted
    }

    /// Whether workers can build while kernels are timed.
    pub fn has_cores_left(&self) -> bool {
        self.policy.has_cores_left
    }

    /// Sets the goal of measuring from now on.
    pub fn aim(&mut self, goal: Goal) {
        self.goal = goal;
    }

    /// Sets the median of the best candidate, against which others are pruned.
    pub fn lead(&mut self, leading_ns: Option<f64>) {
        self.leading_ns = leading_ns;
    }

    /// Whether no candidate is left.
    pub fn is_done(&self) -> bool {
        self.candidates.is_empty()
    }

    /// Takes a finished candidate, if any.
    pub fn take_done(&mut self) -> Option<(u64, Measured)> {
        let place = self.candidates.iter().position(|c| matches!(c.state, CandidateState::Done(_)))?;
        let Submission { number, state: CandidateState::Done(measured), .. } = self.candidates.remove(place) else {
            unreachable!("it is done")
        };
        if let Outcome::Measured(timing) = &measured.outcome {
            self.fastest_ns = Some(self.fastest_ns.map_or(timing.median_ns, |fastest| fastest.min(timing.median_ns)));
        }
        Some((number, measured))
    }

    /// Whether each candidate is verified or finished.
    pub fn is_settled(&self) -> bool {
        self.candidates.iter().all(|c| matches!(c.state, CandidateState::Checked(_) | CandidateState::Done(_)))
    }

    /// Takes the candidates that are verified or finished.
    pub fn take_settled(&mut self) -> Vec<(u64, Result<VerifiedKernel, Measured>)> {
        let is_settled = |c: &mut Submission| matches!(c.state, CandidateState::Checked(_) | CandidateState::Done(_));
        let settled = self.candidates.extract_if(.., is_settled).map(|c| match c.state {
            CandidateState::Checked(kept) => (c.number, Ok(kept)),
            CandidateState::Done(measured) => (c.number, Err(measured)),
            _ => unreachable!("it is settled"),
        });
        settled.collect()
    }

    /// Drops candidates that no worker is testing or about to test.
    pub fn wind_down(&mut self) -> Vec<WorkerCommands> {
        let is_untested = |c: &mut Submission| {
            matches!(c.state, CandidateState::Waiting | CandidateState::Building(_) | CandidateState::Built(_))
        };
        let forgotten: Vec<Submission> = self.candidates.extract_if(.., is_untested).collect();
        forgotten.into_iter().filter_map(|c| c.state.kernel()).for_each(|kernel| self.forget(kernel));
        std::mem::take(&mut self.commands)
    }

    /// Cancels the candidates from this number on, those in test included.
    pub fn cancel(&mut self, from: u64) -> Vec<WorkerCommands> {
        let cancelled: Vec<Submission> = self.candidates.extract_if(.., |c| c.number >= from).collect();
        let mut given_up = Vec::new();
        for Submission { state, .. } in cancelled {
            match state.kernel() {
                Some(kernel) if state.is_in_test() => {
                    given_up.push(kernel.worker);
                    self.commands.push(WorkerCommands::GiveUp { worker: kernel.worker });
                }
                Some(kernel) => self.forget(kernel),
                None => {}
            }
        }
        given_up.into_iter().for_each(|worker| self.forget_worker(worker));
        if self.candidates.is_empty() {
            self.step_aside(false);
        }
        std::mem::take(&mut self.commands)
    }

    /// Prunes slow candidates, and assigns work to idle threads; returns the commands to send.
    pub fn act(&mut self, now: Instant, idle: IdleThreads) -> Vec<WorkerCommands> {
        self.idle = idle;
        self.give_up_hopeless();
        // If kernels leave no core free, all candidates are built before any is tested.
        let is_unbuilt = |c: &Submission| matches!(c.state, CandidateState::Waiting | CandidateState::Building(_));
        let at_once = self.policy.has_cores_left || self.goal == Goal::Keep;
        if at_once || !self.candidates.iter().any(is_unbuilt) {
            self.start_tests(now);
        }
        let is_timed = self.is_tested() && self.goal == Goal::Trial;
        if at_once || !self.is_tested() {
            self.start_builds(now, is_timed);
        }
        self.step_aside(is_timed);
        std::mem::take(&mut self.commands)
    }

    /// Next time at which it must act without a reply from a worker.
    pub fn wakes(&self, now: Instant) -> Option<Instant> {
        let slow = self.slow_run();
        let becomes_slow = self.candidates.iter().filter_map(|c| match c.state {
            CandidateState::Running { start, .. } if self.goal == Goal::Trial => Some(start + slow),
            _ => None,
        });
        becomes_slow.filter(|&at| at > now).min()
    }

    /// Handles a reply of a worker's thread; returns the commands to send.
    ///
    /// # Errors
    /// If workers were killed from outside with the same candidate too often.
    pub fn heard(
        &mut self,
        now: Instant,
        worker: usize,
        lane: WorkerThread,
        answer: WorkerEvent,
    ) -> io::Result<Vec<WorkerCommands>> {
        let is_gone = !matches!(answer, WorkerEvent::Reply(_));
        let is_there = |c: &Submission| c.state.lane() == Some(lane) && c.state.is_of(worker);
        // A cancelled candidate is not found by its id, even if another one has been requested meanwhile.
        let id = if let WorkerEvent::Reply(reply) = &answer { reply.id() } else { None };
        let is_its = |c: &Submission| {
            is_there(c) && (id.is_none() || c.state.kernel().is_none_or(|kernel| Some(kernel.id) == id))
        };
        if let Some(place) = self.candidates.iter().position(is_its) {
            let state = std::mem::replace(&mut self.candidates[place].state, CandidateState::Waiting);
            let kernel = state.kernel();
            let next = match answer {
                WorkerEvent::Died(status) if is_from_outside(status) => {
                    self.retry(place, &describe(status))?;
                    CandidateState::Waiting
                }
                WorkerEvent::DeviceLost(why) => {
                    self.retry(place, &why)?;
                    CandidateState::Waiting
                }
                answer => self.next_state(now, place, state, answer),
            };
            let next = self.unless_disturbed(place, next);
            if let (CandidateState::Done(_) | CandidateState::Waiting, Some(kernel), false) = (&next, kernel, is_gone) {
                self.forget(kernel);
            }
            self.candidates[place].state = next;
        } else if !is_gone && let Some(place) = self.candidates.iter().position(is_there) {
            // The thread has yet to reply to the request that was sent since.
            let timeout = match self.candidates[place].state {
                CandidateState::Building(_) => self.policy.build_timeout,
                CandidateState::Running { limit, .. } => limit,
                _ => self.run_timeout(&self.candidates[place]) + self.flushing(self.policy.round),
            };
            self.commands.push(WorkerCommands::GoOn { worker, lane, timeout });
        }
        if is_gone {
            self.forget_worker(worker);
        } else if lane == WorkerThread::Test && !self.candidates.iter().any(is_there) {
            self.take_queued(worker);
        }
        Ok(std::mem::take(&mut self.commands))
    }

    /// Marks the candidates in test as disturbed, after this process and perhaps its workers were suspended.
    pub fn was_paused(&mut self) {
        let may_run = |c: &&mut Submission| c.state.is_in_test() || matches!(c.state, CandidateState::Queued { .. });
        self.candidates.iter_mut().filter(may_run).for_each(|c| c.is_disturbed = true);
    }

    /// Timing plan of a verified kernel in a round, with the timeout.
    pub fn round(&self, round: RoundLength, is_alone: bool) -> (TimingPlan, Duration) {
        let plan = self.plan(round, None, if is_alone { f64::MAX } else { 0.0 });
        (plan, self.policy.run_timeout + self.flushing(round))
    }

    /// Drops a kernel.
    fn forget(&mut self, kernel: WorkerKernel) {
        let request = WorkerRequest::Drop { id: kernel.id };
        self.commands.push(WorkerCommands::Tell { worker: kernel.worker, request });
    }

    /// Forgets the kernels of a worker that has ended.
    fn forget_worker(&mut self, worker: usize) {
        self.candidates.iter_mut().filter(|c| c.state.is_of(worker)).for_each(|c| c.state = CandidateState::Waiting);
    }

    /// Whether a kernel is running, or about to.
    fn is_tested(&self) -> bool {
        self.candidates.iter().any(|c| c.state.is_in_test())
    }

    /// Moves this process, too, off the cores on which kernels are timed, while they are.
    fn step_aside(&mut self, is_timed: bool) {
        let is_aside = is_timed && self.policy.has_cores_left;
        if std::mem::replace(&mut self.is_aside, is_aside) != is_aside {
            self.commands.push(WorkerCommands::StepAside(is_aside));
        }
    }

    fn is_idle(&self, worker: usize, lane: WorkerThread) -> bool {
        self.idle[worker][lane as usize]
    }

    /// Sends a request to a thread of a worker.
    fn ask(&mut self, worker: usize, request: WorkerRequest, timeout: Duration) {
        self.idle[worker][request.lane() as usize] = false;
        self.commands.push(WorkerCommands::Ask { worker, request, timeout });
    }

    fn go_on(&mut self, worker: usize, timeout: Duration) {
        self.commands.push(WorkerCommands::GoOn { worker, lane: WorkerThread::Test, timeout });
    }

    /// Starts to time verified kernels, and to verify built ones, on idle workers: one at a time, except for
    /// slow ones; or all in parallel if they are not timed.
    fn start_tests(&mut self, now: Instant) {
        let waits = |c: &Submission| match c.state {
            CandidateState::Checked(kept) => self.is_idle(kept.kernel.worker, WorkerThread::Test),
            _ => false,
        };
        if self.goal == Goal::Trial
            && !self.is_tested()
            && let Some(place) = self.candidates.iter().position(waits)
            && let CandidateState::Checked(kept) = self.candidates[place].state
        {
            self.make_room();
            self.ask_to_time(place, kept);
            self.candidates[place].state = CandidateState::Timing(VerifiedKernel { is_alone: true, ..kept });
        }
        let mut places: Vec<usize> = (0..self.candidates.len()).collect();
        places.sort_by_key(|&place| self.candidates[place].precedence());
        for &place in &places {
            let Submission { state: CandidateState::Built(kernel), .. } = self.candidates[place] else { continue };
            if !self.is_idle(kernel.worker, WorkerThread::Test) || !self.may_check(now) {
                continue;
            }
            let mut is_alone = self.goal == Goal::Trial && self.policy.caches == Caches::Warm;
            for other in &mut self.candidates {
                if let CandidateState::Running { is_alone: others, .. } = &mut other.state {
                    (is_alone, *others) = (false, false);
                }
            }
            if is_alone {
                self.make_room();
            }
            let limit = self.run_limit(&self.candidates[place]);
            let alone = if is_alone { self.slow_run() } else { Duration::ZERO };
            let plan = self.plan_of_trial(&self.candidates[place], alone.as_nanos() as f64);
            let plan = (self.goal == Goal::Trial).then_some(plan);
            let timeout = self.run_timeout(&self.candidates[place]);
            self.ask(kernel.worker, WorkerRequest::Check { id: kernel.id, plan }, timeout);
            self.candidates[place].state = CandidateState::Preparing { kernel, is_alone, limit };
        }
        if self.policy.has_cores_left && self.goal == Goal::Trial {
            self.queue_tests(&places);
        }
    }

    /// Has the testing worker continue with its next kernels by itself: this process may be busy when it
    /// finishes, or waiting for a core because of a build.
    fn queue_tests(&mut self, places: &[usize]) {
        // Candidates that wait to be timed come first: the work on them is lost with their worker.
        if self.candidates.iter().any(|c| matches!(c.state, CandidateState::Checked(_))) {
            return;
        }
        let tested = self.candidates.iter().find(|c| c.state.is_alone()).and_then(|c| c.state.kernel());
        let Some(tested) = tested else { return };
        let mut n_queued = self.candidates.iter().filter(|c| matches!(c.state, CandidateState::Queued { .. })).count();
        for &place in places {
            let Submission { state: CandidateState::Built(kernel), .. } = self.candidates[place] else { continue };
            if kernel.worker == tested.worker && n_queued < MOST_QUEUED {
                n_queued += 1;
                let candidate = &self.candidates[place];
                let plan = Some(self.plan_of_trial(candidate, self.slow_run().as_nanos() as f64));
                let limit = self.run_limit(candidate);
                let request = WorkerRequest::Check { id: kernel.id, plan };
                self.commands.push(WorkerCommands::Tell { worker: kernel.worker, request });
                let number = self.next_id;
                self.next_id += 1;
                self.candidates[place].state = CandidateState::Queued { kernel, number, limit };
            }
        }
    }

    /// Whether another candidate can be verified now.
    fn may_check(&self, now: Instant) -> bool {
        let slow = self.slow_run();
        self.goal == Goal::Keep
            || self.candidates.iter().filter(|c| c.state.is_in_test()).all(|c| match c.state {
                CandidateState::Running { start, .. } => now - start >= slow,
                _ => false,
            })
    }

    fn slow_run(&self) -> Duration {
        self.fastest_check.map_or(LEAST_SLOW, |fastest| LEAST_SLOW.max(fastest * SLOW_RUN))
    }

    /// Moves builds off the cores on which a kernel is timed.
    fn make_room(&mut self) {
        for worker in (0..self.policy.n_workers).filter(|&worker| !self.idle[worker][WorkerThread::Build as usize]) {
            self.commands.push(WorkerCommands::Pin { worker, is_beside: true });
        }
    }

    /// Workers that can build now, preferred ones first: as many threads as there are workers build or test.
    ///
    /// The first workers build most, so that their prepared buffers are reused; but a worker that may have to
    /// be killed loses what it has built.
    fn builders(&self, now: Instant) -> Vec<usize> {
        let slow = self.slow_run();
        let is_slow = |worker: &usize| {
            self.candidates.iter().any(|c| match c.state {
                CandidateState::Running { kernel, start, .. } => kernel.worker == *worker && now - start >= slow,
                _ => false,
            })
        };
        let all = 0..self.policy.n_workers;
        let n_busy = |lane| all.clone().filter(|&worker| !self.is_idle(worker, lane)).count();
        let n_free = all.len().saturating_sub(n_busy(WorkerThread::Build) + n_busy(WorkerThread::Test));
        let mut idle: Vec<usize> = all.filter(|&worker| self.is_idle(worker, WorkerThread::Build)).collect();
        idle.sort_by_key(is_slow);
        idle.truncate(n_free);
        idle
    }

    /// Starts builds; beside a kernel being timed, on other cores.
    fn start_builds(&mut self, now: Instant, is_timed: bool) {
        for worker in self.builders(now) {
            let waiting = self.candidates.iter_mut().filter(|c| matches!(c.state, CandidateState::Waiting));
            let Some(next) = waiting.min_by_key(|c| c.precedence()) else { return };
            let id = self.next_id;
            self.next_id += 1;
            next.state = CandidateState::Building(WorkerKernel { worker, id });
            let request = WorkerRequest::Build { id, source: next.source.clone(), quickly: self.goal == Goal::Trial };
            self.commands.push(WorkerCommands::Pin { worker, is_beside: is_timed });
            self.ask(worker, request, self.policy.build_timeout);
        }
    }

    /// Builds a timing plan. `alone_ns`: a first run up to this long counts as undisturbed.
    fn plan(&self, round: RoundLength, leading_ns: Option<f64>, alone_ns: f64) -> TimingPlan {
        TimingPlan {
            min_time_ns: round.time.as_nanos() as f64,
            min_samples: round.min_samples,
            alone_ns,
            leading_ns,
            caches: self.policy.caches,
            at_best_pace: self.policy.at_best_pace,
        }
    }

    /// Builds the timing plan of a trial; `alone_ns` as in [`Scheduler::plan`].
    fn plan_of_trial(&self, candidate: &Submission, alone_ns: f64) -> TimingPlan {
        // Without a leading candidate, the fastest so far is used.
        let leading_ns = self.leading_ns.or(self.fastest_ns).filter(|_| !self.goes_to_the_end(candidate));
        self.plan(self.policy.round, leading_ns, alone_ns)
    }

    /// Time allowed for emptying the caches, which does not count against the candidate.
    fn flushing(&self, round: RoundLength) -> Duration {
        match self.policy.caches {
            Caches::Warm => Duration::ZERO,
            Caches::ColdConstants | Caches::Cold => MOST_FLUSHING_TIME + round.time * MOST_FLUSHING,
        }
    }

    /// Asks a worker to time a candidate.
    fn ask_to_time(&mut self, place: usize, kept: VerifiedKernel) {
        let candidate = &self.candidates[place];
        let plan = self.plan_of_trial(candidate, if kept.is_alone { f64::MAX } else { 0.0 });
        let timeout = self.run_timeout(candidate) + self.flushing(self.policy.round);
        let WorkerKernel { worker, id } = kept.kernel;
        self.ask(worker, WorkerRequest::Run { id, plan }, timeout);
    }

    /// Moves a candidate to its next state or, if its test was disturbed from outside, back to the start.
    fn unless_disturbed(&mut self, place: usize, next: CandidateState) -> CandidateState {
        let is_of_time = match &next {
            CandidateState::Waiting => false,
            CandidateState::Checked(_) => true,
            CandidateState::Done(measured) => matches!(measured.outcome.class(), None | Some(ErrorClass::RunTimeout)),
            _ => return next,
        };
        let candidate = &mut self.candidates[place];
        let was_disturbed = std::mem::take(&mut candidate.is_disturbed);
        if was_disturbed && is_of_time && candidate.n_retries < MOST_RETRIES {
            candidate.n_retries += 1;
            return CandidateState::Waiting;
        }
        next
    }

    /// Repeats the measurement of a candidate whose worker was killed from outside.
    ///
    /// # Errors
    /// If that has happened too often.
    fn retry(&mut self, place: usize, why: &str) -> io::Result<()> {
        let candidate = &mut self.candidates[place];
        candidate.n_retries += 1;
        candidate.is_disturbed = false;
        if candidate.n_retries > MOST_RETRIES {
            let times = candidate.n_retries;
            return Err(io::Error::other(format!(
                "{times} times a worker ended with the same candidate: {why}; nothing is recorded of that one"
            )));
        }
        Ok(())
    }

    /// Continues with the kernel that is queued in a worker which has finished one.
    fn take_queued(&mut self, worker: usize) {
        let is_alone = !self.is_tested();
        let queued = self.candidates.iter_mut().filter_map(|c| match c.state {
            CandidateState::Queued { kernel, number, limit } if kernel.worker == worker => {
                Some((number, CandidateState::Preparing { kernel, is_alone, limit }, &mut c.state))
            }
            _ => None,
        });
        let Some((_, preparing, state)) = queued.min_by_key(|&(number, ..)| number) else { return };
        *state = preparing;
        self.go_on(worker, self.policy.run_timeout);
        // A kernel that waits to be timed is no longer the last one that ran.
        for candidate in &mut self.candidates {
            if let CandidateState::Checked(kept) = &mut candidate.state {
                kept.is_alone = false;
            }
        }
    }

    /// Next state of a candidate after its worker's answer.
    fn next_state(&mut self, now: Instant, place: usize, state: CandidateState, answer: WorkerEvent) -> CandidateState {
        let mut seconds = self.candidates[place].seconds;
        let next = match (state, answer) {
            (CandidateState::Building(kernel), WorkerEvent::Reply(Reply::Built { seconds: build, .. })) => {
                seconds.build += build;
                CandidateState::Built(kernel)
            }
            (CandidateState::Preparing { kernel, is_alone, limit }, WorkerEvent::Reply(Reply::Prepared { .. })) => {
                self.go_on(kernel.worker, limit);
                CandidateState::Running { kernel, is_alone, start: now, limit }
            }
            // The duration of the comparison says nothing about the candidate.
            (CandidateState::Running { kernel, is_alone, start, .. }, WorkerEvent::Reply(Reply::Ran { .. })) => {
                let limit = self.run_timeout(&self.candidates[place]);
                self.go_on(kernel.worker, limit);
                CandidateState::Running { kernel, is_alone, start, limit }
            }
            (
                CandidateState::Running { kernel, is_alone, .. },
                WorkerEvent::Reply(Reply::Checked { seconds: verify, run_seconds, relative_error, is_timed, .. }),
            ) => {
                seconds.verify += verify;
                let took = Duration::from_secs_f64(run_seconds);
                self.fastest_check = Some(self.fastest_check.map_or(took, |fastest| fastest.min(took)));
                let kept = VerifiedKernel { kernel, is_alone, relative_error };
                if is_timed {
                    self.go_on(kernel.worker, self.run_timeout(&self.candidates[place]));
                    CandidateState::Timing(kept)
                } else {
                    CandidateState::Checked(kept)
                }
            }
            // Another one was verified beside it, which its worker could not know: it is timed again, unless
            // it is hopeless.
            (
                CandidateState::Timing(kept @ VerifiedKernel { is_alone: false, .. }),
                WorkerEvent::Reply(Reply::Timed { stopped_early: false, seconds: run, .. }),
            ) => {
                seconds.run += run;
                CandidateState::Checked(kept)
            }
            (CandidateState::Running { limit, .. }, WorkerEvent::TimedOut) => {
                seconds.run += limit.as_secs_f64();
                self.candidates[place].given_up = limit;
                CandidateState::Waiting
            }
            (CandidateState::Building(_), WorkerEvent::Died(status)) => {
                let why = format!("the compiler crashed: {}", describe(status));
                CandidateState::Done(failed(ErrorClass::CompileErrorHost, why, seconds, self.limit_of_crash(status)))
            }
            (CandidateState::Building(_), WorkerEvent::TimedOut) => {
                let build = self.policy.build_timeout.as_secs_f64();
                seconds.build += build;
                let message = format!("not built within {build} s");
                CandidateState::Done(failed(ErrorClass::BuildTimeout, message, seconds, Some(Limit::BuildS(build))))
            }
            (state, answer) => {
                let part = match state {
                    CandidateState::Building(_) => &mut seconds.build,
                    CandidateState::Timing(_) => &mut seconds.run,
                    _ => &mut seconds.verify,
                };
                let conditions = match &answer {
                    WorkerEvent::Reply(Reply::Timed { conditions, .. }) => conditions.clone(),
                    _ => Conditions::default(),
                };
                let timeout = self.run_timeout(&self.candidates[place]);
                let (outcome, limit) = match self.outcome(answer, timeout, part) {
                    // On a busy machine, a slow kernel may finish before its timeout is enforced.
                    (Outcome::Measured(timing), _)
                        if timing.min_ns > timeout.as_nanos() as f64 && timing.min_ns != EMULATED_NS =>
                    {
                        timed_out(timeout)
                    }
                    outcome => outcome,
                };
                CandidateState::Done(Measured { outcome, seconds, limit, conditions })
            }
        };
        self.candidates[place].seconds = seconds;
        next
    }

    /// Outcome of a candidate from its worker's last reply, with the limit that it exceeded, if any; adds its
    /// working time to `took`, in seconds.
    pub fn outcome(&self, answer: WorkerEvent, timeout: Duration, took: &mut f64) -> (Outcome, Option<Limit>) {
        let (class, message, limit) = match answer {
            WorkerEvent::Reply(Reply::Timed { samples_ns, stopped_early, seconds, .. }) => {
                *took += seconds;
                return (Outcome::Measured(Timing::of_samples(&samples_ns, stopped_early)), None);
            }
            WorkerEvent::Reply(Reply::Failed { class, message, lacks_memory, seconds, .. }) => {
                *took += seconds;
                (class.0, message, lacks_memory.then_some(self.memory_limit()))
            }
            WorkerEvent::Reply(other) => (ErrorClass::Unknown, format!("unexpected reply {other:?}"), None),
            WorkerEvent::Died(status) => (ErrorClass::RuntimeError, describe(status), self.limit_of_crash(status)),
            WorkerEvent::DeviceLost(why) => (ErrorClass::Unknown, why, None),
            WorkerEvent::TimedOut => {
                *took += timeout.as_secs_f64();
                return timed_out(timeout);
            }
        };
        (Outcome::Failed { class, message }, limit)
    }

    fn memory_limit(&self) -> Limit {
        Limit::MemoryBytes(self.policy.memory_bytes)
    }

    /// Limit that a crash points to: SIGABRT, from our code or LLVM's, means out of memory.
    fn limit_of_crash(&self, status: ExitStatus) -> Option<Limit> {
        (status.signal() == Some(libc::SIGABRT)).then(|| self.memory_limit())
    }

    /// Timeout of a candidate's first run, longer for one that was given up before.
    ///
    /// Until one candidate has finished, it is unknown what is slow: all of them are tried for a short time,
    /// then the remaining ones for a longer time.
    fn run_limit(&self, candidate: &Submission) -> Duration {
        let hopeless = match self.fastest_check {
            _ if self.goes_to_the_end(candidate) => self.run_timeout(candidate),
            Some(fastest) => fastest * HOPELESS_RUN,
            None => candidate.given_up * LIMIT_GROWTH,
        };
        hopeless.max(LEAST_LIMIT).min(self.run_timeout(candidate))
    }

    /// Whether a candidate is run and timed completely, however slow it is.
    fn goes_to_the_end(&self, candidate: &Submission) -> bool {
        self.policy.to_the_end || self.goal == Goal::Keep || candidate.patience.is_some()
    }

    /// Timeout of a candidate's runs.
    fn run_timeout(&self, candidate: &Submission) -> Duration {
        candidate.patience.unwrap_or(self.policy.run_timeout)
    }

    /// Fails candidates that were given up before, unless they may now run for longer.
    fn give_up_hopeless(&mut self) {
        for place in 0..self.candidates.len() {
            let candidate @ Submission { state, given_up, seconds, .. } = &self.candidates[place];
            let was_given_up = matches!(state, CandidateState::Waiting) && *given_up > Duration::ZERO;
            let timeout = self.run_timeout(candidate);
            if was_given_up && self.run_limit(candidate) <= *given_up {
                let mut message = format!("not finished within {} s", (1e6 * given_up.as_secs_f64()).round() / 1e6);
                if let Some(fastest) = self.fastest_check.filter(|_| *given_up < timeout) {
                    message += &format!(", where the fastest so far took {:.3} s", fastest.as_secs_f64());
                }
                let limit = (*given_up >= timeout).then_some(Limit::RunS(given_up.as_secs_f64()));
                let measured = failed(ErrorClass::RunTimeout, message, *seconds, limit);
                self.candidates[place].state = CandidateState::Done(measured);
            }
        }
    }
}

/// Outcome of a candidate whose run exceeds the timeout, with that limit.
fn timed_out(timeout: Duration) -> (Outcome, Option<Limit>) {
    let limit = timeout.as_secs_f64();
    let message = format!("not finished within {limit} s");
    (Outcome::Failed { class: ErrorClass::RunTimeout, message }, Some(Limit::RunS(limit)))
}

fn failed(class: ErrorClass, message: String, seconds: Seconds, limit: Option<Limit>) -> Measured {
    Measured { seconds, limit, ..Measured::failed(class, message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILD: usize = WorkerThread::Build as usize;
    const TEST: usize = WorkerThread::Test as usize;

    /// Scheduler with simulated workers: none of them runs, and time passes as the test says.
    struct Trace {
        scheduler: Scheduler,
        idle: IdleThreads,
        now: Instant,
        /// Commands and results, abbreviated.
        said: Vec<String>,
    }

    impl Trace {
        fn new(n_workers: usize) -> Trace {
            let policy = Policy {
                n_workers,
                has_cores_left: n_workers > 1,
                round: RoundLength { time: Duration::from_millis(10), min_samples: 1 },
                build_timeout: Duration::from_secs(10),
                run_timeout: Duration::from_secs(10),
                to_the_end: false,
                caches: Caches::Warm,
                at_best_pace: true,
                memory_bytes: 1 << 30,
            };
            let idle = vec![[true; 2]; n_workers];
            Trace { scheduler: Scheduler::new(policy), idle, now: Instant::now(), said: Vec::new() }
        }

        fn submit(&mut self, n: usize) {
            self.scheduler.submit((0..n).map(|at| (ProgramSource::Steps(format!("{at}")), None)));
            self.act();
        }

        fn act(&mut self) {
            let commands = self.scheduler.act(self.now, self.idle.clone());
            self.note(commands);
        }

        fn note(&mut self, commands: Vec<WorkerCommands>) {
            for command in commands {
                match command {
                    WorkerCommands::Ask { worker, request, .. } => {
                        assert!(self.idle[worker][request.lane() as usize], "only idle threads are asked");
                        self.idle[worker][request.lane() as usize] = false;
                        self.said.push(format!("{worker}: {}", short(&request)));
                    }
                    WorkerCommands::Tell { worker, request } => {
                        self.said.push(format!("{worker}: ({})", short(&request)))
                    }
                    WorkerCommands::GoOn { worker, lane, .. } => self.idle[worker][lane as usize] = false,
                    WorkerCommands::GiveUp { worker } => {
                        self.idle[worker] = [false; 2];
                        self.said.push(format!("{worker}: give up"));
                    }
                    WorkerCommands::Pin { .. } | WorkerCommands::StepAside(_) => {}
                }
            }
        }

        fn heard(&mut self, worker: usize, lane: usize, answer: WorkerEvent) {
            self.idle[worker] = match answer {
                WorkerEvent::Reply(_) => {
                    let mut idle = self.idle[worker];
                    idle[lane] = true;
                    idle
                }
                // It is started anew.
                WorkerEvent::Died(_) | WorkerEvent::TimedOut | WorkerEvent::DeviceLost(_) => [false; 2],
            };
            let lane = if lane == BUILD { WorkerThread::Build } else { WorkerThread::Test };
            let commands = self.scheduler.heard(self.now, worker, lane, answer).unwrap();
            self.note(commands);
            self.act();
        }

        fn built(&mut self, worker: usize, id: u64) {
            self.heard(worker, BUILD, WorkerEvent::Reply(Reply::Built { id, seconds: 0.01 }));
        }

        fn prepared(&mut self, worker: usize, id: u64) {
            self.heard(worker, TEST, WorkerEvent::Reply(Reply::Prepared { id }));
        }

        /// Replies that the kernel is correct after a first run of `run`.
        fn checked(&mut self, worker: usize, id: u64, run: Duration, is_timed: bool) {
            let (seconds, run_seconds) = (run.as_secs_f64(), run.as_secs_f64());
            let reply = Reply::Checked { id, seconds, run_seconds, relative_error: 0.0, is_timed };
            self.heard(worker, TEST, WorkerEvent::Reply(reply));
        }

        fn timed(&mut self, worker: usize, id: u64, ns: f64) {
            let reply = Reply::Timed {
                id,
                samples_ns: vec![ns],
                stopped_early: false,
                seconds: 0.01,
                conditions: Conditions::default(),
            };
            self.heard(worker, TEST, WorkerEvent::Reply(reply));
        }

        fn ready(&mut self, worker: usize) {
            self.idle[worker] = [true; 2];
            self.act();
        }

        #[track_caller]
        fn expect(&mut self, said: &[&str]) {
            assert_eq!(std::mem::take(&mut self.said), said);
        }

        /// Numbers and classes of the finished candidates.
        fn done(&mut self) -> Vec<(u64, Option<ErrorClass>)> {
            std::iter::from_fn(|| self.scheduler.take_done()).map(|(n, m)| (n, m.outcome.class())).collect()
        }
    }

    fn short(request: &WorkerRequest) -> String {
        match request {
            WorkerRequest::Build { id, source: ProgramSource::Steps(text), .. } => format!("build {text} as {id}"),
            WorkerRequest::Build { id, .. } => format!("build {id}"),
            WorkerRequest::Check { id, .. } => format!("check {id}"),
            WorkerRequest::Run { id, .. } => format!("run {id}"),
            WorkerRequest::Drop { id } => format!("drop {id}"),
        }
    }

    const MS: Duration = Duration::from_millis(1);

    fn signal(number: i32) -> WorkerEvent {
        WorkerEvent::Died(ExitStatus::from_raw(number))
    }

    #[test]
    fn a_candidate_is_built_checked_timed_and_dropped() {
        let mut t = Trace::new(1);
        t.submit(1);
        t.expect(&["0: build 0 as 0"]);
        t.built(0, 0);
        t.expect(&["0: check 0"]);
        t.prepared(0, 0);
        t.checked(0, 0, MS, true);
        t.timed(0, 0, 1e6);
        t.expect(&["0: (drop 0)"]);
        assert_eq!(t.done(), [(0, None)]);
        assert!(t.scheduler.is_done());
    }

    #[test]
    fn workers_build_while_one_tests_and_it_goes_on_by_itself() {
        let mut t = Trace::new(2);
        t.submit(4);
        t.expect(&["0: build 0 as 0", "1: build 1 as 1"]);
        t.built(0, 0);
        // Two threads at a time: one tests, one builds.
        t.expect(&["0: check 0"]);
        t.built(1, 1);
        t.expect(&["0: build 2 as 2"]);
        t.built(0, 2);
        t.expect(&["0: (check 2)", "0: build 3 as 4"]);
        t.prepared(0, 0);
        t.checked(0, 0, MS, true);
        t.timed(0, 0, 1e6);
        t.expect(&["0: (drop 0)"]);
        // The worker has continued with the queued kernel.
        t.prepared(0, 2);
        t.checked(0, 2, MS, true);
        t.timed(0, 2, 1e6);
        t.expect(&["0: (drop 2)", "1: check 1"]);
        assert_eq!(t.done(), [(0, None), (2, None)]);
    }

    #[test]
    fn where_no_core_is_left_all_are_built_before_any_is_tested() {
        let mut t = Trace::new(1);
        t.submit(2);
        t.built(0, 0);
        t.built(0, 1);
        t.expect(&["0: build 0 as 0", "0: build 1 as 1", "0: check 0"]);
    }

    #[test]
    fn a_crash_costs_its_candidate_and_others_on_that_worker_begin_anew() {
        let mut t = Trace::new(2);
        t.submit(3);
        t.built(0, 0);
        t.built(1, 1);
        t.built(0, 2);
        t.expect(&["0: build 0 as 0", "1: build 1 as 1", "0: check 0", "0: build 2 as 2", "0: (check 2)"]);
        t.prepared(0, 0);
        t.heard(0, TEST, signal(libc::SIGSEGV));
        assert_eq!(t.done(), [(0, Some(ErrorClass::RuntimeError))]);
        // The kernel that was queued there is built anew.
        t.expect(&["1: check 1"]);
        t.ready(0);
        t.expect(&["0: build 2 as 4"]);
        t.prepared(1, 1);
        t.checked(1, 1, MS, true);
        t.built(0, 4);
        t.timed(1, 1, 1e6);
        t.expect(&["1: (drop 1)", "0: check 4"]);
        t.prepared(0, 4);
        t.checked(0, 4, MS, true);
        t.timed(0, 4, 1e6);
        assert_eq!(t.done(), [(1, None), (2, None)]);
        assert!(t.scheduler.is_done());
    }

    #[test]
    fn what_is_killed_from_outside_is_tried_again_but_not_for_ever() {
        let mut t = Trace::new(1);
        t.submit(1);
        for id in 0..u64::from(MOST_RETRIES) {
            t.built(0, id);
            t.heard(0, TEST, signal(libc::SIGKILL));
            assert_eq!(t.done(), []);
            t.ready(0);
        }
        t.built(0, u64::from(MOST_RETRIES));
        let killed = t.scheduler.heard(t.now, 0, WorkerThread::Test, signal(libc::SIGKILL));
        assert!(killed.unwrap_err().to_string().contains("nothing is recorded"));
    }

    #[test]
    fn a_slow_first_run_is_given_up_beside_a_fast_one_and_measured_where_none_is_faster() {
        for another_is_fast in [true, false] {
            let mut t = Trace::new(1);
            t.submit(2);
            t.built(0, 0);
            t.built(0, 1);
            t.prepared(0, 0);
            // Its worker is restarted and it waits; the limit of a first try is short.
            t.heard(0, TEST, WorkerEvent::TimedOut);
            t.ready(0);
            // Candidates not tried yet come first.
            t.built(0, 2);
            t.built(0, 3);
            t.prepared(0, 2);
            if another_is_fast {
                t.checked(0, 2, MS, true);
                t.timed(0, 2, 1e6);
                t.prepared(0, 3);
                t.heard(0, TEST, WorkerEvent::TimedOut);
                let mut done = t.done();
                done.sort_by_key(|(number, _)| *number);
                assert_eq!(done, [(0, Some(ErrorClass::RunTimeout)), (1, None)]);
            } else {
                t.heard(0, TEST, WorkerEvent::TimedOut);
                t.ready(0);
                assert_eq!(t.done(), []);
                assert!(t.said.last().is_some_and(|said| said.contains("build")), "{:?}", t.said);
            }
        }
    }

    #[test]
    fn a_kernel_slower_than_the_timeout_fails_even_where_it_was_not_interrupted() {
        let timeout_ns = Trace::new(1).scheduler.policy.run_timeout.as_nanos() as f64;
        let late = Some(ErrorClass::RunTimeout);
        for (ns, expected) in [(timeout_ns, None), (1.1 * timeout_ns, late), (EMULATED_NS, None)] {
            let mut t = Trace::new(1);
            t.submit(1);
            t.built(0, 0);
            t.prepared(0, 0);
            t.checked(0, 0, MS, true);
            t.timed(0, 0, ns);
            assert_eq!(t.done(), [(0, expected)]);
        }
    }

    #[test]
    fn an_answer_that_its_worker_compares_has_as_long_as_any_run() {
        let mut t = Trace::new(1);
        t.submit(1);
        t.built(0, 0);
        t.prepared(0, 0);
        let ran = WorkerEvent::Reply(Reply::Ran { id: 0 });
        let commands = t.scheduler.heard(t.now, 0, WorkerThread::Test, ran).unwrap();
        let timeouts = commands.iter().filter_map(|command| match command {
            WorkerCommands::GoOn { worker: 0, lane: WorkerThread::Test, timeout } => Some(*timeout),
            _ => None,
        });
        assert_eq!(timeouts.collect::<Vec<_>>(), [t.scheduler.policy.run_timeout]);
        t.note(commands);
        t.checked(0, 0, MS, true);
        t.timed(0, 0, 1e6);
        assert_eq!(t.done(), [(0, None)]);
    }

    #[test]
    fn a_slow_run_lets_others_be_checked_and_is_timed_again() {
        let mut t = Trace::new(2);
        t.submit(2);
        t.built(0, 0);
        t.built(1, 1);
        t.expect(&["0: build 0 as 0", "1: build 1 as 1", "0: check 0"]);
        t.prepared(0, 0);
        t.act();
        t.expect(&[]);
        assert_eq!(t.scheduler.wakes(t.now), Some(t.now + LEAST_SLOW));
        t.now += LEAST_SLOW;
        t.act();
        t.expect(&["1: check 1"]);
        t.prepared(1, 1);
        t.checked(1, 1, 40 * MS, false);
        t.checked(0, 0, 70 * MS, false);
        t.expect(&["0: run 0"]);
        t.timed(0, 0, 7e7);
        t.timed(1, 1, 4e7);
        t.expect(&["0: (drop 0)", "1: run 1", "1: (drop 1)"]);
        assert_eq!(t.done(), [(0, None), (1, None)]);
    }

    #[test]
    fn a_pause_in_a_test_is_nobodys_fault() {
        let mut t = Trace::new(1);
        t.submit(1);
        t.built(0, 0);
        t.prepared(0, 0);
        t.scheduler.was_paused();
        t.heard(0, TEST, WorkerEvent::TimedOut);
        assert_eq!(t.done(), []);
        t.ready(0);
        t.built(0, 1);
        t.prepared(0, 1);
        t.checked(0, 1, MS, true);
        t.timed(0, 1, 1e6);
        assert_eq!(t.done(), [(0, None)]);
    }

    #[test]
    fn winding_down_leaves_what_is_tested_and_cancelling_leaves_nothing() {
        let mut t = Trace::new(2);
        t.submit(3);
        t.built(0, 0);
        t.built(1, 1);
        t.said.clear();
        let commands = t.scheduler.wind_down();
        t.note(commands);
        t.expect(&["1: (drop 1)", "0: (drop 2)"]);
        let commands = t.scheduler.cancel(0);
        t.note(commands);
        t.expect(&["0: give up"]);
        assert!(t.scheduler.is_done());
        // Later replies about cancelled candidates are ignored.
        t.heard(0, TEST, WorkerEvent::Reply(Reply::Prepared { id: 0 }));
        t.expect(&[]);
    }

    #[test]
    fn an_answer_of_one_that_was_forgotten_is_not_the_next_ones() {
        let mut t = Trace::new(1);
        t.submit(1);
        t.expect(&["0: build 0 as 0"]);
        let commands = t.scheduler.wind_down();
        t.note(commands);
        t.said.clear();
        // Its reply is on the way when the next request is sent.
        t.idle[0] = [true; 2];
        t.submit(1);
        t.expect(&["0: build 0 as 1"]);
        t.built(0, 0);
        t.expect(&[]);
        assert!(!t.idle[0][BUILD], "it still builds");
        t.built(0, 1);
        t.expect(&["0: check 1"]);
    }

    #[test]
    fn a_worker_that_tests_one_that_was_forgotten_still_answers_for_the_next_one() {
        let mut t = Trace::new(2);
        t.submit(3);
        t.built(0, 0);
        t.built(1, 1);
        t.prepared(0, 0);
        t.built(0, 2);
        assert_eq!(t.said.last().unwrap(), "0: (check 2)");
        t.checked(0, 0, MS, true);
        // Its worker would continue with the third one, and has begun by the time that the cancellation
        // arrives.
        let commands = t.scheduler.cancel(1);
        t.note(commands);
        t.timed(0, 0, 1e6);
        t.submit(1);
        t.said.clear();
        t.built(0, 4);
        t.expect(&["0: check 4"]);
        t.prepared(0, 2);
        assert!(!t.idle[0][TEST], "it still tests");
        t.timed(0, 2, 1e6);
        assert!(!t.idle[0][TEST], "it still tests");
        t.prepared(0, 4);
        t.checked(0, 4, MS, true);
        t.timed(0, 4, 1e6);
        t.expect(&["0: (drop 4)"]);
    }

    #[test]
    fn of_two_batches_the_first_comes_first_even_those_that_were_given_up() {
        let mut t = Trace::new(1);
        t.submit(1);
        t.submit(1);
        t.built(0, 0);
        t.built(0, 1);
        t.prepared(0, 0);
        t.heard(0, TEST, WorkerEvent::TimedOut);
        t.said.clear();
        t.ready(0);
        t.built(0, 2);
        t.built(0, 3);
        t.expect(&["0: build 0 as 2", "0: build 0 as 3", "0: check 2"]);
    }

    #[test]
    fn kept_candidates_are_checked_side_by_side_and_not_timed() {
        let mut t = Trace::new(2);
        t.scheduler.aim(Goal::Keep);
        t.submit(2);
        t.built(0, 0);
        t.built(1, 1);
        t.expect(&["0: build 0 as 0", "1: build 1 as 1", "0: check 0", "1: check 1"]);
        t.prepared(0, 0);
        t.prepared(1, 1);
        t.checked(1, 1, MS, false);
        assert!(!t.scheduler.is_settled());
        t.heard(0, TEST, signal(libc::SIGFPE));
        assert!(t.scheduler.is_settled());
        let settled = t.scheduler.take_settled();
        assert!(matches!(settled[..], [(0, Err(_)), (1, Ok(_))]));
    }
}
