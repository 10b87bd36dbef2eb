//! Tuner's side of its worker processes.

use crate::child::{ChildProcess, describe};
use crate::host;
use crate::protocol::{Reply, WorkerAssignment, WorkerRequest, WorkerThread};
use crate::stopwatch::time_of;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use tilewright_search::pause;

/// Command that starts a worker: a program whose standard streams [`crate::worker::serve`] serves.
#[derive(Debug, Clone)]
pub struct WorkerCommand {
    /// Program to start.
    pub program: std::path::PathBuf,
    /// Arguments of the program.
    pub arguments: Vec<String>,
}

const LANES: [WorkerThread; 2] = [WorkerThread::Build, WorkerThread::Test];

/// Timeout for the start of a worker.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Multiple of a timeout for which a worker may wait for its cores. A thread that waits in vain for another
/// one uses no core either.
const PATIENCE: u32 = 4;

/// Minimum time for which a worker may wait for its cores: other processes may have all of them for that
/// long.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);

/// Minimum time by which a deadline is postponed.
const LEAST_WAIT: Duration = Duration::from_millis(5);

/// Maximum number of restarts of a process that the system refuses or that ends before it is ready.
const MOST_RESTARTS: u32 = 3;
/// Pause before a restart.
const BEFORE_RESTART: Duration = Duration::from_millis(200);

/// Event of a worker's thread.
pub enum WorkerEvent {
    /// Reply to the request.
    Reply(Reply),
    /// Death of its process, which is being restarted.
    Died(ExitStatus),
    /// Timeout; its process has been killed and is being restarted.
    TimedOut,
    /// Failure of its device, whatever ran there, with the driver's error; its process is being restarted.
    DeviceLost(String),
}

/// Whether each thread of each worker is idle, by worker and [`WorkerThread`].
pub type IdleThreads = Vec<[bool; 2]>;

/// Pool of worker processes, each of which builds one program and tests another at a time.
pub struct Workers {
    command: WorkerCommand,
    assignment: WorkerAssignment,
    slots: Vec<Slot>,
    sender: Sender<Heard>,
    receiver: Receiver<Heard>,
}

/// Worker, its generation, and a thread's message; `None` if the worker has ended.
type Heard = (usize, u64, Option<(WorkerThread, Reply)>);

struct Slot {
    process: ChildProcess,
    /// Distinguishes the worker from its predecessors, whose last messages may still arrive.
    generation: u64,
    /// Whether it has not yet reported that it is ready.
    is_starting: bool,
    /// Number of consecutive ends before it was ready.
    n_false_starts: u32,
    /// Deadlines by the thread's number; `None` for an idle thread.
    deadlines: [Option<Deadline>; 2],
    /// Whether its last message said that the builder crashed.
    is_build_crash: bool,
}

/// Deadline of a worker's thread: a time of [`pause::now`], and the CPU time that it must have had by then.
///
/// On a busy machine, a kernel that is not slow may take long to finish.
#[derive(Clone, Copy)]
struct Deadline {
    at: Instant,
    start: Instant,
    timeout: Duration,
    /// CPU time used before the deadline.
    ran: Option<Duration>,
}

impl Deadline {
    /// Next time to check, if the worker has used the cores for less than its timeout.
    fn put_off(self, ran: Option<Duration>) -> Option<Deadline> {
        let ran = ran?.saturating_sub(self.ran?);
        let missing = self.timeout.checked_sub(ran).filter(|missing| !missing.is_zero())?;
        let patience = (self.timeout * PATIENCE).max(LEAST_PATIENCE);
        let at = (self.at + missing.max(LEAST_WAIT)).min(self.start + patience);
        (at > self.at).then_some(Deadline { at, ..self })
    }
}

impl Slot {
    /// CPU time of a thread of its process together with its helper threads; `None` if the system does not
    /// report it.
    fn ran(&self, lane: WorkerThread) -> Option<Duration> {
        // The main thread is the builder.
        let main = format!("/proc/{0}/task/{0}/schedstat", self.process.id());
        let main_ns = std::fs::read_to_string(main).ok()?.split_whitespace().next()?.parse().ok()?;
        let build = Duration::from_nanos(main_ns);
        if lane == WorkerThread::Build {
            return Some(build);
        }
        let mut clock = 0;
        // SAFETY: the call writes a clock's number.
        let has_clock = unsafe { libc::clock_getcpuclockid(self.process.id().cast_signed(), &raw mut clock) } == 0;
        let all = has_clock.then(|| time_of(clock)).flatten()?;
        Some(all.saturating_sub(build))
    }

    /// Whether its process has been stopped by a signal.
    fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap_or_default();
        // "17 (name) T …", where the name may be anything.
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with(['T', 't']))
    }

    /// Starts the timeout of a thread.
    fn begin(&mut self, lane: WorkerThread, timeout: Duration) {
        let (start, ran) = (pause::now(), self.ran(lane));
        self.deadlines[lane as usize] = Some(Deadline { at: start + timeout, start, timeout, ran });
    }
}

impl Workers {
    /// Starts `n` workers and waits until they are ready.
    ///
    /// # Errors
    /// If a worker cannot be started or ends before it is ready.
    pub fn start(command: WorkerCommand, assignment: WorkerAssignment, n: usize) -> io::Result<Workers> {
        let (sender, receiver) = channel();
        let mut workers = Workers { command, assignment, slots: Vec::new(), sender, receiver };
        workers.fill(n)?;
        Ok(workers)
    }

    /// Starts workers until there are `n`, and waits until they are ready.
    ///
    /// # Errors
    /// As [`Workers::start`].
    pub fn fill(&mut self, n: usize) -> io::Result<()> {
        for at in self.slots.len()..n {
            let slot = self.spawn(at, 0)?;
            self.slots.push(slot);
        }
        while self.slots.iter().any(|slot| slot.is_starting) {
            self.next_answer(None)?;
        }
        Ok(())
    }

    /// Stops all workers.
    pub fn clear(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.process.kill());
        self.slots.clear();
        // Their last messages are discarded.
        (self.sender, self.receiver) = channel();
    }

    /// Number of workers.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether a thread of a worker is ready and idle.
    pub fn is_idle(&self, at: usize, lane: WorkerThread) -> bool {
        self.slots[at].deadlines[lane as usize].is_none()
    }

    /// Idle threads of all workers.
    pub fn idle(&self) -> IdleThreads {
        self.slots.iter().map(|slot| slot.deadlines.map(|deadline| deadline.is_none())).collect()
    }

    /// Whether all threads of all workers are idle.
    pub fn are_idle(&self) -> bool {
        self.idle().iter().flatten().all(|&is_idle| is_idle)
    }

    /// Sends a request with a timeout for the reply, counted while its thread has the cores; on expiry the
    /// worker is killed.
    pub fn ask(&mut self, at: usize, request: &WorkerRequest, timeout: Duration) {
        self.tell(at, request);
        self.go_on(at, request.lane(), timeout);
    }

    /// Extends the timeout of a thread's request.
    pub fn go_on(&mut self, at: usize, lane: WorkerThread, timeout: Duration) {
        self.slots[at].begin(lane, timeout);
    }

    /// Sends a request without a reply, or without a timeout.
    pub fn tell(&mut self, at: usize, request: &WorkerRequest) {
        self.slots[at].process.tell(request);
    }

    /// Pins a worker's builder to these CPUs from now on.
    pub fn pin(&self, at: usize, cpus: &[usize]) {
        host::pin(self.slots[at].process.id().cast_signed(), cpus);
    }

    /// Kills a worker and restarts it; its threads are idle once it is ready.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn give_up(&mut self, at: usize) -> io::Result<()> {
        self.slots[at].process.kill();
        self.slots[at] = self.spawn(at, self.slots[at].generation + 1)?;
        Ok(())
    }

    /// Restarts all workers.
    ///
    /// # Errors
    /// If one cannot be started.
    pub fn renew(&mut self) -> io::Result<()> {
        (0..self.slots.len()).try_for_each(|at| self.give_up(at))
    }

    /// Restarts a worker that ended before it was ready, unless this has happened too often.
    fn restart(&mut self, at: usize, why: &str) -> io::Result<()> {
        let n_false_starts = self.slots[at].n_false_starts + 1;
        // Initial workers are not retried: their user learns at once what is wrong.
        if self.slots[at].generation == 0 || n_false_starts > MOST_RESTARTS {
            return Err(io::Error::other(why.to_owned()));
        }
        std::thread::sleep(BEFORE_RESTART);
        self.give_up(at)?;
        self.slots[at].n_false_starts = n_false_starts;
        Ok(())
    }

    /// Waits for the next event of any worker, at most until a time of [`pause::now`], or until a restarted
    /// worker is ready.
    ///
    /// # Errors
    /// If a worker that died cannot be restarted.
    ///
    /// # Panics
    /// If all workers are idle.
    pub fn next_answer(&mut self, until: Option<Instant>) -> io::Result<Option<(usize, WorkerThread, WorkerEvent)>> {
        loop {
            let lanes = self.slots.iter().enumerate().flat_map(|(at, s)| LANES.map(|lane| (at, lane, s)));
            let (late, late_lane, deadline) = lanes
                .filter_map(|(at, lane, s)| s.deadlines[lane as usize].map(|d| (at, lane, d)))
                .min_by_key(|(.., d)| d.at)
                .expect("an answer is awaited only after a question");
            let wake = until.map_or(deadline.at, |until| until.min(deadline.at));
            match self.receiver.recv_timeout(wake.saturating_duration_since(pause::now())) {
                Ok((at, generation, _)) if generation != self.slots[at].generation => {}
                Ok((at, _, Some((_, Reply::Crashed)))) => self.slots[at].is_build_crash = true,
                Ok((at, _, Some((lane, Reply::DeviceLost { reason })))) => {
                    self.give_up(at)?;
                    return Ok(Some((at, lane, WorkerEvent::DeviceLost(reason))));
                }
                Ok((at, _, Some((lane, reply)))) => {
                    let slot = &mut self.slots[at];
                    if !slot.is_starting {
                        slot.deadlines[lane as usize] = None;
                        return Ok(Some((at, lane, WorkerEvent::Reply(reply))));
                    }
                    if let Reply::NotReady { reason } = reply {
                        self.restart(at, &format!("a worker did not get ready: {reason}"))?;
                        continue;
                    }
                    (slot.is_starting, slot.n_false_starts, slot.deadlines) = (false, 0, [None; 2]);
                    return Ok(None);
                }
                Ok((at, _, None)) => {
                    // A worker that sends invalid messages may not end by itself.
                    let status = self.slots[at].process.end()?;
                    if self.slots[at].is_starting {
                        self.restart(at, &format!("a worker ended before it was ready: {}", describe(status)))?;
                        continue;
                    }
                    // The tested kernel crashes, unless it is known to be the builder.
                    let is_test = !self.slots[at].is_build_crash && !self.is_idle(at, WorkerThread::Test);
                    self.give_up(at)?;
                    return Ok(Some((
                        at,
                        if is_test { WorkerThread::Test } else { WorkerThread::Build },
                        WorkerEvent::Died(status),
                    )));
                }
                // Not yet: this process was suspended meanwhile.
                Err(RecvTimeoutError::Timeout) if pause::now() < wake => {}
                Err(RecvTimeoutError::Timeout) if wake < deadline.at => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {
                    let slot = &mut self.slots[late];
                    if slot.is_stopped() {
                        slot.begin(late_lane, deadline.timeout);
                        continue;
                    }
                    let put_off = deadline.put_off(slot.ran(late_lane));
                    slot.deadlines[late_lane as usize] = put_off;
                    if put_off.is_some() {
                        continue;
                    }
                    if slot.is_starting {
                        return Err(io::Error::other("a worker did not get ready in time"));
                    }
                    self.give_up(late)?;
                    return Ok(Some((late, late_lane, WorkerEvent::TimedOut)));
                }
                Err(RecvTimeoutError::Disconnected) => unreachable!("this side holds a sender"),
            }
        }
    }

    /// Starts a process, with further attempts if the system is temporarily short of resources.
    fn spawn(&self, at: usize, generation: u64) -> io::Result<Slot> {
        let mut n_refusals = 0;
        loop {
            match self.try_to_spawn(at, generation) {
                Err(e) if n_refusals < MOST_RESTARTS && is_for_the_moment(&e) => {
                    n_refusals += 1;
                    std::thread::sleep(BEFORE_RESTART);
                }
                spawned => return spawned,
            }
        }
    }

    fn try_to_spawn(&self, at: usize, generation: u64) -> io::Result<Slot> {
        let mut command = Command::new(&self.command.program);
        command.args(&self.command.arguments);
        let sender = self.sender.clone();
        let mut process = ChildProcess::start(command, move |heard| sender.send((at, generation, heard)).is_ok())?;
        process.tell(&self.assignment);
        let start = pause::now();
        let deadline = Deadline { at: start + START_TIMEOUT, start, timeout: START_TIMEOUT, ran: None };
        let deadlines = [Some(deadline); 2];
        Ok(Slot { process, generation, is_starting: true, n_false_starts: 0, deadlines, is_build_crash: false })
    }
}

/// Whether the system may allow later what it refuses now: it is short of processes, threads or memory.
fn is_for_the_moment(refusal: &io::Error) -> bool {
    matches!(refusal.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM))
}

/// Signals that a kernel or a compiler can cause: anything else that ends a worker comes from outside.
const FAULTS: [i32; 7] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT, libc::SIGTRAP, libc::SIGSYS];

/// Whether a process was killed from outside: by a limit of the system, or by a user.
pub fn is_from_outside(status: ExitStatus) -> bool {
    status.signal().is_some_and(|signal| !FAULTS.contains(&signal))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright_ir::Target;

    fn shell(script: &str) -> WorkerCommand {
        WorkerCommand { program: "/bin/sh".into(), arguments: vec!["-c".to_owned(), script.to_owned()] }
    }

    fn assignment() -> WorkerAssignment {
        WorkerAssignment {
            workload: String::new(),
            target: Target::named("x86-64").unwrap().to_string(),
            n_threads: 1,
            cpus: Vec::new(),
            data_fd: -1,
            data_offsets: Vec::new(),
            objects_fd: -1,
            memory_bytes: 0,
            drivers_folder: None,
            runner: None,
        }
    }

    /// Reply of a worker that runs `work`, a shell command, when it is asked to build.
    fn answer_after(work: &str, timeout: Duration) -> WorkerEvent {
        answer_of(work, &[WorkerRequest::Drop { id: 0 }], timeout).1
    }

    /// Reply of a worker to several requests, with the thread that sends it.
    fn answer_of(work: &str, requests: &[WorkerRequest], timeout: Duration) -> (WorkerThread, WorkerEvent) {
        let script = format!(
            "read -r assignment; echo '[\"Build\",\"Ready\"]'; read -r request; {work}; echo '[\"Build\",\"Ready\"]'"
        );
        let mut workers = Workers::start(shell(&script), assignment(), 1).unwrap();
        requests.iter().for_each(|request| workers.ask(0, request, timeout));
        let (_, lane, answer) = workers.next_answer(None).unwrap().expect("it was waited for");
        (lane, answer)
    }

    #[test]
    fn who_is_not_ready_says_why() {
        let fail =
            |script: &str| Workers::start(shell(script), assignment(), 1).err().expect("it is not ready").to_string();
        let reason = fail("read -r assignment; echo '[\"Build\",{\"NotReady\":{\"reason\":\"no luck\"}}]'");
        assert_eq!(reason, "a worker did not get ready: no luck");
        assert_eq!(fail("exit 3"), "a worker ended before it was ready: ended with exit code 3");
        let reason = fail("kill -XCPU $$");
        assert!(reason.contains("`ulimit -t`"), "{reason}");
    }

    #[test]
    fn what_ends_a_worker_from_outside_is_no_fault() {
        for (signal, expected) in [("KILL", true), ("XCPU", true), ("XFSZ", true), ("SEGV", false), ("ABRT", false)] {
            let answer = answer_after(&format!("kill -{signal} $$"), Duration::from_secs(60));
            assert!(matches!(answer, WorkerEvent::Died(status) if is_from_outside(status) == expected), "{signal}");
        }
    }

    #[test]
    fn a_worker_that_is_stopped_is_waited_for() {
        // The process is resumed long after its timeout.
        let work = "(sleep 2; kill -CONT $$) & kill -STOP $$";
        assert!(matches!(answer_after(work, Duration::from_millis(300)), WorkerEvent::Reply(Reply::Ready)));
    }

    #[test]
    fn a_worker_that_waits_for_a_core_has_longer() {
        assert!(matches!(answer_after("sleep 1.5", Duration::from_secs(1)), WorkerEvent::Reply(Reply::Ready)));
    }

    #[test]
    fn a_worker_is_given_up_that_has_run_for_long_or_waits_forever() {
        for work in ["while :; do :; done", "exec sleep 60"] {
            assert!(matches!(answer_after(work, Duration::from_millis(100)), WorkerEvent::TimedOut));
        }
    }

    #[test]
    fn a_crash_is_of_what_is_tested_unless_the_builder_says_otherwise() {
        let both = [WorkerRequest::Drop { id: 0 }, WorkerRequest::Check { id: 1, plan: None }];
        for (requests, last_words, expected) in [
            (&both[..], "", WorkerThread::Test),
            (&both[..], "echo '[\"Build\",\"Crashed\"]'; ", WorkerThread::Build),
            (&both[..1], "", WorkerThread::Build),
        ] {
            let (lane, answer) = answer_of(&format!("{last_words}exit 3"), requests, Duration::from_secs(60));
            assert!(lane == expected && matches!(answer, WorkerEvent::Died(_)), "{last_words}");
        }
    }

    #[test]
    fn threads_of_a_worker_have_deadlines_of_their_own() {
        let both = [WorkerRequest::Drop { id: 0 }, WorkerRequest::Check { id: 1, plan: None }];
        let (lane, answer) = answer_of("echo '[\"Test\",\"Ready\"]'; exec sleep 60", &both, Duration::from_secs(60));
        assert!(lane == WorkerThread::Test && matches!(answer, WorkerEvent::Reply(_)));
    }

    #[test]
    fn a_worker_that_ends_or_talks_nonsense_has_died() {
        assert!(matches!(answer_after("echo nonsense; exec sleep 60", Duration::from_secs(60)), WorkerEvent::Died(_)));
        assert!(
            matches!(answer_after("exit 3", Duration::from_secs(60)), WorkerEvent::Died(status) if status.code() == Some(3))
        );
    }
}
