//! Candidates from a source to a result: built on all workers, then checked and timed one after the other.

use super::{Device, Round};
use crate::host;
use crate::protocol::{Lane, Plan, Reply, Request, Source};
use crate::timing::MOST_FLUSHING;
use crate::workers::{Answer, describe, is_from_outside};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use tilewright_tune::{ErrorClass, Limit, Measured, Outcome, Seconds, Timing, pause};

/// A candidate is given up if its first run takes so many times as long as the fastest first run so far …
const HOPELESS_RUN: u32 = 5;
/// … but not before so long: a new worker takes a part of that to start, and so does a busy machine's delay.
const LEAST_LIMIT: Duration = Duration::from_millis(100);
/// While none has come to its end, each try of a candidate may take so many times as long as the one before.
const LIMIT_GROWTH: u32 = 4;
/// A first run that takes so many times as long as the fastest is no longer alone: its exact time does not
/// matter any more, and others are checked meanwhile …
const SLOW_RUN: u32 = 3;
/// … but not before so long.
const LEAST_SLOW: Duration = Duration::from_millis(30);

/// How long a candidate that is tested may go on when all is over: most are done by then.
const LAST_WAIT: Duration = Duration::from_millis(500);
/// How often it is looked whether all is over.
const LOOK: Duration = Duration::from_millis(50);
/// How long it may take to empty the caches a few times, whatever their size.
const MOST_FLUSHING_TIME: Duration = Duration::from_secs(5);

/// What came to no end of its own, or was stopped meanwhile, is measured again so often at most.
const MOST_RETRIES: u32 = 3;

/// Most kernels that a worker goes on with by itself: enough for as long as a search thinks, and few enough
/// that other workers, too, test theirs.
const MOST_QUEUED: usize = 4;

/// What candidates are to come to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Goal {
    /// Code that is made quickly will do to learn about a configuration; what is compared and kept is LLVM's.
    pub quickly: bool,
    /// Whether none is given up for being slow.
    pub to_the_end: bool,
    /// How they are timed; otherwise they are found right and kept.
    pub trial: Option<Trial>,
}

/// How a trial is timed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trial {
    pub round: Round,
    /// What leads so far: one that does not come near is not timed for long.
    pub leading_ns: Option<f64>,
}

/// A source that is to be measured, now or later.
pub(super) struct Candidate {
    /// Its place in the batch; `None` if it was announced for one to come.
    at: Option<usize>,
    source: Source,
    state: State,
    /// How long its first run took at least when it was given up, if it was.
    given_up: Duration,
    /// Whether there was a pause in its test: what that took says nothing.
    is_disturbed: bool,
    n_retries: u32,
    seconds: Seconds,
}

/// How far a candidate is.
enum State {
    Waiting,
    Building(Kernel),
    Built(Kernel),
    /// Its worker goes on to check and time it after others, those with lower numbers first.
    Queued {
        kernel: Kernel,
        number: u64,
        limit: Duration,
    },
    /// Its buffers are being prepared.
    Preparing {
        kernel: Kernel,
        is_alone: bool,
        limit: Duration,
    },
    /// It is in its first run, or its answer is being compared.
    Running {
        kernel: Kernel,
        is_alone: bool,
        start: Instant,
        limit: Duration,
    },
    Checked(Kept),
    Timing(Kept),
    Done(Measured),
}

/// A kernel by its worker and its number there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernel {
    pub worker: usize,
    pub id: u64,
}

/// A kernel that was found right.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept {
    pub kernel: Kernel,
    /// Whether no other kernel has run since its first run began.
    is_alone: bool,
    /// ‖out − reference‖ / ‖reference‖ of its answer.
    pub relative_error: f64,
}

impl State {
    fn kernel(&self) -> Option<Kernel> {
        match self {
            State::Waiting | State::Done(_) => None,
            State::Building(kernel)
            | State::Built(kernel)
            | State::Queued { kernel, .. }
            | State::Preparing { kernel, .. }
            | State::Running { kernel, .. } => Some(*kernel),
            State::Checked(kept) | State::Timing(kept) => Some(kept.kernel),
        }
    }

    fn is_of(&self, worker: usize) -> bool {
        self.kernel().is_some_and(|kernel| kernel.worker == worker)
    }

    /// Which thread of its worker is at work on it.
    fn lane(&self) -> Option<Lane> {
        match self {
            State::Building(_) => Some(Lane::Build),
            State::Preparing { .. } | State::Running { .. } | State::Timing(_) => Some(Lane::Test),
            State::Waiting | State::Built(_) | State::Queued { .. } | State::Checked(_) | State::Done(_) => None,
        }
    }

    /// Whether it is in test, and no other kernel has run since its first run began.
    fn is_alone(&self) -> bool {
        match self {
            State::Preparing { is_alone, .. } | State::Running { is_alone, .. } => *is_alone,
            State::Timing(kept) => kept.is_alone,
            _ => false,
        }
    }

    /// Whether it runs, or is about to.
    fn is_in_test(&self) -> bool {
        self.lane() == Some(Lane::Test)
    }
}

impl Device {
    /// Begins with a batch.
    pub(super) fn begin(&mut self, sources: &[Source]) {
        for (at, source) in sources.iter().enumerate() {
            match self.candidates.iter_mut().find(|c| c.at.is_none() && c.source == *source) {
                Some(announced) => announced.at = Some(at),
                None => self.candidates.push(Candidate::new(Some(at), source.clone())),
            }
        }
        // What is wanted first is built first.
        self.candidates.sort_by_key(|c| c.at.unwrap_or(usize::MAX));
    }

    /// Gets the batch under way, and takes note of the next one if other cores can build that meanwhile.
    pub(super) fn look_ahead(&mut self, goal: Goal, next: &mut dyn FnMut() -> Vec<Source>) {
        if self.has_cores_left() {
            self.set_to_work(goal);
            self.candidates.extend(next().into_iter().map(|source| Candidate::new(None, source)));
        }
    }

    /// The next of the batch whose trial has ended, with its place; `None` if all were told, or all is over:
    /// then none begins any more, and those in test have a last moment.
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub(super) fn next_trial(&mut self, goal: Goal, over: &dyn Fn() -> bool) -> io::Result<Option<(usize, Measured)>> {
        let mut last = None;
        while self.candidates.iter().any(|c| c.at.is_some()) {
            match self.candidates.iter().position(Candidate::is_done).map(|place| self.candidates.remove(place)) {
                Some(Candidate { at: Some(at), state: State::Done(measured), .. }) => {
                    if self.candidates.iter().all(|c| c.at.is_none()) && !over() {
                        // Workers go on with what comes next while the caller keeps its books.
                        self.set_to_work(goal);
                    }
                    return Ok(Some((at, measured)));
                }
                _ if !over() => self.advance(goal)?,
                _ => {
                    self.forget_untested();
                    let last = *last.get_or_insert_with(|| Instant::now() + LAST_WAIT);
                    if self.candidates.is_empty() || Instant::now() >= last {
                        self.abandon()?;
                    } else {
                        self.advance(goal)?;
                    }
                }
            }
        }
        Ok(None)
    }

    /// Forgets those that no worker tests, or is about to.
    fn forget_untested(&mut self) {
        let is_left = |c: &Candidate| match c.state {
            State::Waiting | State::Building(_) | State::Built(_) => false,
            State::Checked(_) | State::Done(_) => c.at.is_some(),
            State::Queued { .. } | State::Preparing { .. } | State::Running { .. } | State::Timing(_) => true,
        };
        let forgotten: Vec<Candidate> = self.candidates.extract_if(.., |c| !is_left(c)).collect();
        forgotten.into_iter().filter_map(|c| c.state.kernel()).for_each(|kernel| self.forget(kernel));
    }

    /// Takes all of the batch to where they are found right, as far as they come before all is over; in their
    /// order a kept kernel, or what became of it.
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub(super) fn keep(
        &mut self,
        goal: Goal,
        over: &dyn Fn() -> bool,
    ) -> io::Result<Vec<Option<Result<Kept, Measured>>>> {
        let is_settled = |c: &Candidate| c.at.is_none() || matches!(c.state, State::Checked(_) | State::Done(_));
        while !self.candidates.iter().all(is_settled) && !over() {
            self.advance(goal)?;
        }
        let n_candidates = self.candidates.iter().filter_map(|c| c.at).max().map_or(0, |last| last + 1);
        let mut results: Vec<Option<Result<Kept, Measured>>> = (0..n_candidates).map(|_| None).collect();
        for Candidate { at, state, .. } in self.candidates.extract_if(.., |c| c.at.is_some() && is_settled(c)) {
            results[at.expect("it is of the batch")] = match state {
                State::Checked(kept) => Some(Ok(kept)),
                State::Done(measured) => Some(Err(measured)),
                _ => unreachable!("it is settled"),
            };
        }
        if self.candidates.iter().any(|c| c.at.is_some()) {
            self.abandon()?;
        }
        Ok(results)
    }

    /// Ends the batch and what was to come after it; what is tested is given up.
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub(super) fn abandon(&mut self) -> io::Result<()> {
        for Candidate { state, .. } in std::mem::take(&mut self.candidates) {
            match state.kernel() {
                Some(kernel) if state.is_in_test() => self.workers.give_up(kernel.worker)?,
                Some(kernel) => self.forget(kernel),
                None => {}
            }
        }
        self.step_aside(false);
        Ok(())
    }

    /// Forgets a kernel.
    pub(super) fn forget(&mut self, kernel: Kernel) {
        self.workers.tell(kernel.worker, &Request::Drop { id: kernel.id });
    }

    /// A worker that is gone took its kernels with it.
    fn forget_worker(&mut self, worker: usize) {
        self.candidates.iter_mut().filter(|c| c.state.is_of(worker)).for_each(|c| c.state = State::Waiting);
    }

    /// Gives idle workers something to do and waits for the next answer, unless some candidates ended by that
    /// alone.
    fn advance(&mut self, goal: Goal) -> io::Result<()> {
        if self.set_to_work(goal) {
            return Ok(());
        }
        let (now, slow) = (pause::now(), self.slow_run());
        let becomes_slow = self.candidates.iter().filter_map(|c| match c.state {
            State::Running { start, .. } if goal.trial.is_some() => Some(start + slow),
            _ => None,
        });
        self.listen(becomes_slow.filter(|&at| at > now).chain([now + LOOK]).min())
    }

    /// Gives up hopeless candidates, and gives idle workers something to do; tells whether any was given up.
    fn set_to_work(&mut self, goal: Goal) -> bool {
        let any_given_up = self.give_up_hopeless(goal);
        // Where kernels leave no core free, all of the batch are built before any is tested.
        let is_building = |c: &Candidate| matches!(c.state, State::Building(_));
        let is_unbuilt = |c: &Candidate| c.at.is_some() && matches!(c.state, State::Waiting) || is_building(c);
        let at_once = self.has_cores_left() || goal.trial.is_none();
        if at_once || !self.candidates.iter().any(is_unbuilt) {
            self.start_tests(goal);
        }
        let is_timed = self.is_tested() && goal.trial.is_some();
        if at_once || !self.is_tested() {
            self.start_builds(goal, is_timed);
        }
        self.step_aside(is_timed);
        any_given_up
    }

    /// Whether a kernel runs, or is about to.
    fn is_tested(&self) -> bool {
        self.candidates.iter().any(|c| c.state.is_in_test())
    }

    /// Moves this thread, too, away from where kernels are timed, as long as they are.
    pub(super) fn step_aside(&mut self, is_timed: bool) {
        let is_aside = is_timed && self.has_cores_left();
        if std::mem::replace(&mut self.is_aside, is_aside) != is_aside {
            host::pin_thread(if is_aside { &self.other_cpus } else { &self.all_cpus });
        }
    }

    /// Whether other workers can build on other cores than those on which a kernel is timed.
    pub(super) fn has_cores_left(&self) -> bool {
        self.workers.len() > 1 && !self.options.cpus.is_empty() && !self.other_cpus.is_empty()
    }

    /// Starts to time right kernels and to check built ones whose workers are idle: one after the other
    /// except for slow ones, or all side by side if none is timed.
    fn start_tests(&mut self, goal: Goal) {
        let waits = |c: &Candidate| match c.state {
            State::Checked(kept) => self.workers.is_idle(kept.kernel.worker, Lane::Test),
            _ => false,
        };
        if let Some(trial) = goal.trial
            && !self.is_tested()
            && let Some(place) = self.candidates.iter().position(waits)
            && let State::Checked(kept) = self.candidates[place].state
        {
            self.make_room();
            self.ask_to_time(kept, trial);
            self.candidates[place].state = State::Timing(Kept { is_alone: true, ..kept });
        }
        // Those of the batch come first, and those that were not given up yet.
        let is_wanted = |&place: &usize| self.candidates[place].is_wanted(goal);
        let mut places: Vec<usize> = (0..self.candidates.len()).filter(is_wanted).collect();
        places.sort_by_key(|&place| (self.candidates[place].at.is_none(), self.candidates[place].given_up));
        for &place in &places {
            let Candidate { state: State::Built(kernel), .. } = self.candidates[place] else { continue };
            if !self.workers.is_idle(kernel.worker, Lane::Test) || !self.may_check(goal) {
                continue;
            }
            let mut is_alone = goal.trial.is_some() && !self.options.cold;
            for other in &mut self.candidates {
                if let State::Running { is_alone: others, .. } = &mut other.state {
                    (is_alone, *others) = (false, false);
                }
            }
            if is_alone {
                self.make_room();
            }
            let limit = self.run_limit(self.candidates[place].given_up, goal);
            let alone = if is_alone { self.slow_run() } else { Duration::ZERO };
            let plan = goal.trial.map(|trial| self.plan(trial, alone.as_nanos() as f64));
            let request = Request::Check { id: kernel.id, plan };
            self.workers.ask(kernel.worker, &request, self.options.run_timeout);
            self.candidates[place].state = State::Preparing { kernel, is_alone, limit };
        }
        if self.has_cores_left() {
            self.queue_tests(goal, &places);
        }
    }

    /// Has the worker that tests go on with its next kernels by itself: this side may be busy when it is
    /// done, or be kept waiting for a core by a build.
    fn queue_tests(&mut self, goal: Goal, places: &[usize]) {
        let Some(trial) = goal.trial else { return };
        // Those that wait to be timed come first: what they took so far is lost where their worker is.
        if self.candidates.iter().any(|c| matches!(c.state, State::Checked(_))) {
            return;
        }
        let tested = self.candidates.iter().find(|c| c.state.is_alone()).and_then(|c| c.state.kernel());
        let Some(tested) = tested else { return };
        let plan = Some(self.plan(trial, self.slow_run().as_nanos() as f64));
        let mut n_queued = self.candidates.iter().filter(|c| matches!(c.state, State::Queued { .. })).count();
        for &place in places {
            let Candidate { state: State::Built(kernel), given_up, .. } = self.candidates[place] else { continue };
            if kernel.worker == tested.worker && n_queued < MOST_QUEUED {
                n_queued += 1;
                self.workers.tell(kernel.worker, &Request::Check { id: kernel.id, plan });
                let (number, limit) = (self.next_id, self.run_limit(given_up, goal));
                self.next_id += 1;
                self.candidates[place].state = State::Queued { kernel, number, limit };
            }
        }
    }

    /// Whether another candidate can be checked now.
    fn may_check(&self, goal: Goal) -> bool {
        let slow = self.slow_run();
        goal.trial.is_none()
            || self.candidates.iter().filter(|c| c.state.is_in_test()).all(|c| match c.state {
                State::Running { start, .. } => pause::now() - start >= slow,
                _ => false,
            })
    }

    fn slow_run(&self) -> Duration {
        self.fastest_check.map_or(LEAST_SLOW, |fastest| LEAST_SLOW.max(fastest * SLOW_RUN))
    }

    /// Moves what is built away from the cores on which a kernel is timed.
    fn make_room(&self) {
        for worker in (0..self.workers.len()).filter(|&worker| !self.workers.is_idle(worker, Lane::Build)) {
            self.workers.pin(worker, &self.other_cpus);
        }
    }

    /// The workers that can build now, in the order in which they should: as many threads as workers build or
    /// test.
    ///
    /// The first workers build most, so that what they prepare is found there again; but one that may have to
    /// be given up takes with it what it has built.
    fn builders(&self) -> Vec<usize> {
        let slow = self.slow_run();
        let is_slow = |worker: &usize| {
            self.candidates.iter().any(|c| match c.state {
                State::Running { kernel, start, .. } => kernel.worker == *worker && pause::now() - start >= slow,
                _ => false,
            })
        };
        let all = 0..self.workers.len();
        let n_busy = |lane| all.clone().filter(|&worker| !self.workers.is_idle(worker, lane)).count();
        let n_free = all.len().saturating_sub(n_busy(Lane::Build) + n_busy(Lane::Test));
        let mut idle: Vec<usize> = all.filter(|&worker| self.workers.is_idle(worker, Lane::Build)).collect();
        idle.sort_by_key(is_slow);
        idle.truncate(n_free);
        idle
    }

    /// Has workers build; beside a kernel that is timed on other cores.
    fn start_builds(&mut self, goal: Goal, is_timed: bool) {
        for worker in self.builders() {
            let is_wanted = |c: &&mut Candidate| matches!(c.state, State::Waiting) && c.is_wanted(goal);
            let wanted = self.candidates.iter_mut().filter(is_wanted);
            let Some(next) = wanted.min_by_key(|c| (c.at.is_none(), c.given_up)) else { return };
            let id = self.next_id;
            self.next_id += 1;
            next.state = State::Building(Kernel { worker, id });
            self.workers.pin(worker, if is_timed { &self.other_cpus } else { &self.all_cpus });
            let request = Request::Build { id, source: next.source.clone(), quickly: goal.quickly };
            self.workers.ask(worker, &request, self.options.build_timeout);
        }
    }

    /// The plan of timing a kernel. Its first run counts as alone if it takes `alone_ns` at most.
    fn plan(&self, Trial { round, leading_ns }: Trial, alone_ns: f64) -> Plan {
        Plan {
            min_time_ns: round.time.as_nanos() as f64,
            min_samples: round.min_samples,
            alone_ns,
            leading_ns: leading_ns.filter(|_| !self.options.to_the_end),
            cold: self.options.cold,
            at_best_pace: self.options.at_best_pace,
        }
    }

    /// Asks a worker to time a kernel.
    fn ask_to_time(&mut self, kept: Kept, trial: Trial) {
        let (plan, round) = (self.plan(trial, if kept.is_alone { f64::MAX } else { 0.0 }), trial.round);
        let Kernel { worker, id } = kept.kernel;
        // What it takes to empty the caches is not the candidate's.
        let flushing = if plan.cold { MOST_FLUSHING_TIME + round.time * MOST_FLUSHING } else { Duration::ZERO };
        self.workers.ask(worker, &Request::Run { id, plan }, self.options.run_timeout + flushing);
    }

    /// Waits for what the next worker says, until some moment at most, and takes note of it.
    fn listen(&mut self, until: Option<Instant>) -> io::Result<()> {
        let answered = self.workers.next_answer(until)?;
        self.note_pauses();
        let Some((worker, lane, answer)) = answered else { return Ok(()) };
        let is_gone = !matches!(answer, Answer::Reply(_));
        let is_its = |c: &Candidate| c.state.lane() == Some(lane) && c.state.is_of(worker);
        // What was abandoned is none of them any more.
        if let Some(place) = self.candidates.iter().position(is_its) {
            let state = std::mem::replace(&mut self.candidates[place].state, State::Waiting);
            let kernel = state.kernel();
            if let (Answer::Reply(reply), Some(Kernel { id, .. })) = (&answer, kernel) {
                assert_eq!(
                    reply.id(),
                    Some(id),
                    "invariant: threads of workers answer in the order in which they were asked"
                );
            }
            let next = match answer {
                Answer::Died(status) if is_from_outside(status) => {
                    self.retry(place, &describe(status))?;
                    State::Waiting
                }
                answer => self.next_state(place, state, answer),
            };
            let next = self.unless_disturbed(place, next);
            if let (State::Done(_) | State::Waiting, Some(kernel), false) = (&next, kernel, is_gone) {
                self.forget(kernel);
            }
            self.candidates[place].state = next;
        }
        if is_gone {
            self.forget_worker(worker);
        } else if lane == Lane::Test && !self.candidates.iter().any(is_its) {
            self.take_queued(worker);
        }
        Ok(())
    }

    /// Marks what was in test, or may have been, when this process was stopped: its worker may have been
    /// stopped with it.
    fn note_pauses(&mut self) {
        let paused = pause::total();
        if std::mem::replace(&mut self.paused, paused) != paused {
            let may_run = |c: &&mut Candidate| c.state.is_in_test() || matches!(c.state, State::Queued { .. });
            self.candidates.iter_mut().filter(may_run).for_each(|c| c.is_disturbed = true);
        }
    }

    /// What becomes of a candidate; where its test was disturbed, and it is not known to be at fault, it
    /// begins anew.
    fn unless_disturbed(&mut self, place: usize, next: State) -> State {
        let is_of_time = match &next {
            State::Waiting => false,
            State::Checked(_) => true,
            State::Done(measured) => matches!(measured.outcome.class(), None | Some(ErrorClass::RunTimeout)),
            _ => return next,
        };
        let candidate = &mut self.candidates[place];
        let was_disturbed = std::mem::take(&mut candidate.is_disturbed);
        if was_disturbed && is_of_time && candidate.n_retries < MOST_RETRIES {
            candidate.n_retries += 1;
            return State::Waiting;
        }
        next
    }

    /// Has a candidate measured again whose worker was ended from outside.
    ///
    /// # Errors
    /// Where that has happened too often.
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

    /// A worker that is done with one kernel goes on with the one that is queued there.
    fn take_queued(&mut self, worker: usize) {
        let is_alone = !self.is_tested();
        let queued = self.candidates.iter_mut().filter_map(|c| match c.state {
            State::Queued { kernel, number, limit } if kernel.worker == worker => {
                Some((number, State::Preparing { kernel, is_alone, limit }, &mut c.state))
            }
            _ => None,
        });
        let Some((_, preparing, state)) = queued.min_by_key(|&(number, ..)| number) else { return };
        *state = preparing;
        self.workers.go_on(worker, Lane::Test, self.options.run_timeout);
        // One that waits to be timed is no longer the last that ran.
        for candidate in &mut self.candidates {
            if let State::Checked(kept) = &mut candidate.state {
                kept.is_alone = false;
            }
        }
    }

    /// What its worker's answer makes of a candidate.
    fn next_state(&mut self, place: usize, state: State, answer: Answer) -> State {
        let mut seconds = self.candidates[place].seconds;
        let next = match (state, answer) {
            (State::Building(kernel), Answer::Reply(Reply::Built { seconds: build, .. })) => {
                seconds.build += build;
                State::Built(kernel)
            }
            (State::Preparing { kernel, is_alone, limit }, Answer::Reply(Reply::Prepared { .. })) => {
                self.workers.go_on(kernel.worker, Lane::Test, limit);
                State::Running { kernel, is_alone, start: pause::now(), limit }
            }
            (
                State::Running { kernel, is_alone, .. },
                Answer::Reply(Reply::Checked { seconds: verify, run_seconds, relative_error, is_timed, .. }),
            ) => {
                seconds.verify += verify;
                let took = Duration::from_secs_f64(run_seconds);
                self.fastest_check = Some(self.fastest_check.map_or(took, |fastest| fastest.min(took)));
                let kept = Kept { kernel, is_alone, relative_error };
                if is_timed {
                    self.workers.go_on(kernel.worker, Lane::Test, self.options.run_timeout);
                    State::Timing(kept)
                } else {
                    State::Checked(kept)
                }
            }
            // Another one was checked beside it, which its worker could not know: it is timed again, unless
            // it is hopeless.
            (
                State::Timing(kept @ Kept { is_alone: false, .. }),
                Answer::Reply(Reply::Timed { stopped_early: false, seconds: run, .. }),
            ) => {
                seconds.run += run;
                State::Checked(kept)
            }
            (State::Running { limit, .. }, Answer::TimedOut) => {
                seconds.run += limit.as_secs_f64();
                self.candidates[place].given_up = limit;
                State::Waiting
            }
            (State::Building(_), Answer::Died(status)) => {
                let why = format!("the compiler crashed: {}", describe(status));
                State::Done(failed(ErrorClass::CompileErrorHost, why, seconds, self.limit_of_crash(status)))
            }
            (State::Building(_), Answer::TimedOut) => {
                let build = self.options.build_timeout.as_secs_f64();
                seconds.build += build;
                let message = format!("not built within {build} s");
                State::Done(failed(ErrorClass::BuildTimeout, message, seconds, Some(Limit::BuildS(build))))
            }
            (state, answer) => {
                let part = match state {
                    State::Building(_) => &mut seconds.build,
                    State::Timing(_) => &mut seconds.run,
                    _ => &mut seconds.verify,
                };
                let (outcome, limit) = self.outcome(answer, part);
                State::Done(Measured { outcome, seconds, limit })
            }
        };
        self.candidates[place].seconds = seconds;
        next
    }

    /// What a worker's last answer says of a candidate, with the limit that it came to, if it did, and for
    /// how many seconds it was at work.
    fn outcome(&self, answer: Answer, took: &mut f64) -> (Outcome, Option<Limit>) {
        let (class, message, limit) = match answer {
            Answer::Reply(Reply::Timed { samples_ns, stopped_early, seconds, .. }) => {
                *took += seconds;
                return (Outcome::Measured(Timing::of_samples(&samples_ns, stopped_early)), None);
            }
            Answer::Reply(Reply::Failed { class, message, lacks_memory, seconds, .. }) => {
                *took += seconds;
                (class.0, message, lacks_memory.then_some(self.memory_limit()))
            }
            Answer::Reply(other) => (ErrorClass::Unknown, format!("unexpected reply {other:?}"), None),
            Answer::Died(status) => (ErrorClass::RuntimeError, describe(status), self.limit_of_crash(status)),
            Answer::TimedOut => {
                let limit = self.options.run_timeout.as_secs_f64();
                *took += limit;
                (ErrorClass::RunTimeout, format!("not finished within {limit} s"), Some(Limit::RunS(limit)))
            }
        };
        (Outcome::Failed { class, message }, limit)
    }

    fn memory_limit(&self) -> Limit {
        Limit::MemoryBytes(self.options.memory_bytes)
    }

    /// Code that aborts, our own or LLVM's, lacks memory.
    fn limit_of_crash(&self, status: ExitStatus) -> Option<Limit> {
        (status.signal() == Some(libc::SIGABRT)).then(|| self.memory_limit())
    }

    /// Times a kernel that is kept, with nothing built beside it; again where there was a pause.
    ///
    /// # Errors
    /// Where a worker cannot be started anew, or is ended from outside.
    pub(super) fn time_kept(&mut self, kept: Kept, round: Round) -> io::Result<Outcome> {
        while !self.workers.are_idle() {
            self.listen(None)?;
        }
        for _ in 0..=MOST_RETRIES {
            let paused = pause::total();
            self.ask_to_time(kept, Trial { round, leading_ns: None });
            let answer = loop {
                match self.workers.next_answer(None)? {
                    Some((worker, Lane::Test, answer)) if worker == kept.kernel.worker => break answer,
                    _ => {}
                }
            };
            let is_kept = match answer {
                Answer::Died(status) if is_from_outside(status) => return Err(io::Error::other(describe(status))),
                Answer::Reply(_) => true,
                _ => false,
            };
            if !is_kept || pause::total() == paused {
                return Ok(self.outcome(answer, &mut 0.0).0);
            }
        }
        Err(io::Error::other("this process was stopped again and again"))
    }

    /// How long the first run of a candidate may take that was given up after `given_up`, if it was.
    ///
    /// Until one candidate has come to its end nobody knows what is slow: all of them are tried for a short
    /// time, then those that are left for a longer one.
    fn run_limit(&self, given_up: Duration, goal: Goal) -> Duration {
        let hopeless = match self.fastest_check {
            _ if goal.to_the_end => self.options.run_timeout,
            Some(fastest) => fastest * HOPELESS_RUN,
            None => given_up * LIMIT_GROWTH,
        };
        hopeless.max(LEAST_LIMIT).min(self.options.run_timeout)
    }

    /// Gives up again those that were given up before, without a reason to let them run for longer; tells
    /// whether there were any.
    fn give_up_hopeless(&mut self, goal: Goal) -> bool {
        let mut any_given_up = false;
        for place in 0..self.candidates.len() {
            let Candidate { state, given_up, seconds, .. } = &self.candidates[place];
            let was_given_up = matches!(state, State::Waiting) && *given_up > Duration::ZERO;
            if was_given_up && self.run_limit(*given_up, goal) <= *given_up {
                let mut message = format!("not finished within {} s", (1e6 * given_up.as_secs_f64()).round() / 1e6);
                if let Some(fastest) = self.fastest_check.filter(|_| *given_up < self.options.run_timeout) {
                    message += &format!(", where the fastest so far took {:.3} s", fastest.as_secs_f64());
                }
                let limit = (*given_up >= self.options.run_timeout).then_some(Limit::RunS(given_up.as_secs_f64()));
                let measured = failed(ErrorClass::RunTimeout, message, *seconds, limit);
                self.candidates[place].state = State::Done(measured);
                any_given_up = true;
            }
        }
        any_given_up
    }
}

impl Candidate {
    fn new(at: Option<usize>, source: Source) -> Candidate {
        Candidate {
            at,
            source,
            state: State::Waiting,
            given_up: Duration::ZERO,
            is_disturbed: false,
            n_retries: 0,
            seconds: Seconds::default(),
        }
    }

    /// Whether it is of the batch, or may be tested ahead, as it may where kernels are timed.
    fn is_wanted(&self, goal: Goal) -> bool {
        self.at.is_some() || goal.trial.is_some()
    }

    /// Whether it is of the batch and has come to its end.
    fn is_done(&self) -> bool {
        self.at.is_some() && matches!(self.state, State::Done(_))
    }
}

fn failed(class: ErrorClass, message: String, seconds: Seconds, limit: Option<Limit>) -> Measured {
    Measured { outcome: Outcome::Failed { class, message }, seconds, limit }
}
