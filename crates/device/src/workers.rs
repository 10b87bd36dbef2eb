//! The tuner's end of its worker processes.

use crate::protocol::{Assignment, Reply, Request};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// How to start a worker: a program whose standard streams are served by [`crate::worker::serve`].
#[derive(Debug, Clone)]
pub struct WorkerCommand {
    /// The program.
    pub program: std::path::PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// How long a worker may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// What came from a worker.
pub enum Answer {
    /// It replied.
    Reply(Reply),
    /// It is gone; it has been started anew.
    Died(ExitStatus),
    /// It did not reply in time; it has been killed and started anew.
    TimedOut,
}

/// A fixed number of worker processes, each doing one thing at a time.
pub struct Workers {
    command: WorkerCommand,
    assignment: Assignment,
    slots: Vec<Slot>,
    sender: Sender<(usize, u64, Option<Reply>)>,
    receiver: Receiver<(usize, u64, Option<Reply>)>,
}

struct Slot {
    child: Child,
    stdin: ChildStdin,
    /// Told apart from predecessors, whose last words may still be under way.
    generation: u64,
    deadline: Option<Instant>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Workers {
    /// Starts `n` workers and waits until they are ready.
    ///
    /// # Errors
    /// Where a worker cannot be started or ends before it is ready.
    pub fn start(command: WorkerCommand, assignment: Assignment, n: usize) -> io::Result<Workers> {
        let (sender, receiver) = channel();
        let mut workers = Workers { command, assignment, slots: Vec::new(), sender, receiver };
        for at in 0..n {
            let slot = workers.spawn(at, 0)?;
            workers.slots.push(slot);
        }
        for _ in 0..n {
            workers.await_ready()?;
        }
        Ok(workers)
    }

    /// Number of workers.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether the worker waits for a request.
    pub fn is_idle(&self, at: usize) -> bool {
        self.slots[at].deadline.is_none()
    }

    /// Sends a request that will be answered within `timeout` or be the worker's last.
    pub fn ask(&mut self, at: usize, request: &Request, timeout: Duration) {
        self.send(at, request);
        self.go_on(at, timeout);
    }

    /// Lets a worker that is not done yet go on for so long.
    pub fn go_on(&mut self, at: usize, timeout: Duration) {
        self.slots[at].deadline = Some(Instant::now() + timeout);
    }

    /// Sends a request that is not answered.
    pub fn tell(&mut self, at: usize, request: &Request) {
        self.send(at, request);
    }

    fn send(&mut self, at: usize, request: &Request) {
        let mut line = serde_json::to_vec(request).expect("requests are plain data");
        line.push(b'\n');
        // A worker that is gone is noticed when its answer is awaited.
        let _ = self.slots[at].stdin.write_all(&line);
    }

    /// Waits for the next answer from any worker that was asked something.
    ///
    /// # Errors
    /// Where a worker that died cannot be started anew.
    ///
    /// # Panics
    /// Where no worker was asked anything.
    pub fn next_answer(&mut self) -> io::Result<(usize, Answer)> {
        loop {
            let (late, deadline) = self
                .slots
                .iter()
                .enumerate()
                .filter_map(|(at, s)| s.deadline.map(|d| (at, d)))
                .min_by_key(|(_, d)| *d)
                .expect("an answer is awaited only after a question");
            match self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((at, generation, _)) if generation != self.slots[at].generation => {}
                Ok((at, _, Some(reply))) => {
                    self.slots[at].deadline = None;
                    return Ok((at, Answer::Reply(reply)));
                }
                Ok((at, _, None)) => {
                    let status = self.slots[at].child.wait()?;
                    let asked = self.slots[at].deadline.is_some();
                    self.restart(at)?;
                    if asked {
                        return Ok((at, Answer::Died(status)));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.restart(late)?;
                    return Ok((late, Answer::TimedOut));
                }
                Err(RecvTimeoutError::Disconnected) => unreachable!("this side holds a sender"),
            }
        }
    }

    fn restart(&mut self, at: usize) -> io::Result<()> {
        let generation = self.slots[at].generation + 1;
        self.slots[at] = self.spawn(at, generation)?;
        self.await_ready()
    }

    /// Waits for a worker's first word, keeping what others say meanwhile.
    fn await_ready(&mut self) -> io::Result<()> {
        let give_up = Instant::now() + START_TIMEOUT;
        let mut kept = Vec::new();
        let outcome = loop {
            match self.receiver.recv_timeout(give_up.saturating_duration_since(Instant::now())) {
                Ok((_, _, Some(Reply::Ready))) => break Ok(()),
                Ok((at, generation, None)) if generation == self.slots[at].generation && self.is_idle(at) => {
                    let status = self.slots[at].child.wait()?;
                    break Err(io::Error::other(format!("a worker ended before it was ready: {}", describe(status))));
                }
                Ok(other) => kept.push(other),
                Err(_) => break Err(io::Error::other("a worker did not get ready in time")),
            }
        };
        for message in kept {
            let _ = self.sender.send(message);
        }
        outcome
    }

    fn spawn(&self, at: usize, generation: u64) -> io::Result<Slot> {
        let mut command = Command::new(&self.command.program);
        command.args(&self.command.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // SAFETY: between fork and exec only async-signal-safe calls are made.
        unsafe {
            command.pre_exec(|| {
                // Workers end with the tuner, however it ends, and leave Ctrl-C to it.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::setpgid(0, 0);
                // A crash of a candidate is expected: no core dump.
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &none);
                Ok(())
            });
        }
        let mut child = command.spawn()?;
        let mut stdin = child.stdin.take().expect("standard input is piped");
        let stdout = child.stdout.take().expect("standard output is piped");
        let mut line = serde_json::to_vec(&self.assignment).expect("an assignment is plain data");
        line.push(b'\n');
        let _ = stdin.write_all(&line);
        let sender = self.sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let reply = line.ok().and_then(|l| serde_json::from_str(&l).ok());
                let ended = reply.is_none();
                if sender.send((at, generation, reply)).is_err() || ended {
                    return;
                }
            }
            let _ = sender.send((at, generation, None));
        });
        Ok(Slot { child, stdin, generation, deadline: None })
    }
}

/// How a process ended, in words.
pub fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGSEGV) => "access to memory outside its buffers (SIGSEGV)".to_owned(),
        Some(libc::SIGBUS) => "access to memory outside its buffers (SIGBUS)".to_owned(),
        Some(libc::SIGFPE) => "division by zero (SIGFPE)".to_owned(),
        Some(libc::SIGILL) => "illegal instruction (SIGILL)".to_owned(),
        Some(libc::SIGABRT) => "aborted (SIGABRT)".to_owned(),
        Some(libc::SIGKILL) => "killed, perhaps for want of memory (SIGKILL)".to_owned(),
        Some(signal) => format!("ended by signal {signal}"),
        None => format!("ended with exit code {}", status.code().unwrap_or(-1)),
    }
}
