//! Child processes with a line protocol: JSON requests on standard input, JSON replies on standard output.

use crate::limits::Allowed;
use crate::spawn::{Spawned, Stream};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

/// Child process, which ends when this handle is dropped, or with the thread that started it.
#[derive(Debug)]
pub struct ChildProcess {
    child: Spawned,
    stdin: File,
}

impl ChildProcess {
    /// Starts a program, with the arguments, environment and folder of a command. A thread passes each reply
    /// to `heard`, and `None` at the end of the stream or after a reply that does not parse; `heard` returns
    /// whether to continue.
    ///
    /// # Errors
    /// If the system refuses the process or the thread.
    pub fn start<R: DeserializeOwned>(
        command: Command,
        mut heard: impl FnMut(Option<R>) -> bool + Send + 'static,
    ) -> io::Result<ChildProcess> {
        let streams = [Stream::Piped, Stream::Piped, Stream::Null];
        // SAFETY: only async-signal-safe calls are made.
        let mut child = unsafe {
            Spawned::start(&command, streams, || {
                // The child ends with this process, however this one ends, and leaves Ctrl-C and the like to
                // it; but Ctrl-Z stops it.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                    libc::signal(signal, libc::SIG_IGN);
                }
                // A crash of the code that it runs is expected: no core dump.
                let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                libc::setrlimit(libc::RLIMIT_CORE, &none);
                Ok(())
            })
        }?;
        let stdin = child.stdin.take().expect("standard input is piped");
        let stdout = child.stdout.take().expect("standard output is piped");
        let process = ChildProcess { child, stdin };
        let listen = move || {
            for line in BufReader::new(stdout).lines() {
                let Some(answer) = line.ok().and_then(|line| serde_json::from_str(&line).ok()) else { break };
                if !heard(Some(answer)) {
                    return;
                }
            }
            heard(None);
        };
        // If this fails, the process ends.
        std::thread::Builder::new().spawn(listen)?;
        Ok(process)
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a message as a line. A dead process is noticed when its reply is awaited.
    ///
    /// # Panics
    /// If the message cannot be serialized as JSON.
    pub fn tell(&mut self, message: &impl Serialize) {
        let mut line = serde_json::to_vec(message).expect("messages are plain data");
        line.push(b'\n');
        let _ = self.stdin.write_all(&line);
    }

    /// Suspends the process (`SIGSTOP`) until [`ChildProcess::go_on`].
    pub fn stop(&self) {
        self.child.signal(libc::SIGSTOP);
    }

    /// Resumes the process (`SIGCONT`).
    pub fn go_on(&self) {
        self.child.signal(libc::SIGCONT);
    }

    /// Kills the process, even a suspended one, without waiting for its end.
    pub fn kill(&mut self) {
        self.child.signal(libc::SIGKILL);
    }

    /// Ends the process, if it has not ended by itself, and returns its exit status.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn end(&mut self) -> io::Result<ExitStatus> {
        self.kill();
        Ok(self.child.wait()?.0)
    }

    /// Describes the end of the process in words.
    pub fn last_words(&mut self) -> String {
        self.end().map_or_else(|unknown| unknown.to_string(), describe)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Describes the end of a process in words.
pub fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGSEGV) => "access to memory outside its buffers (SIGSEGV)".to_owned(),
        Some(libc::SIGBUS) => "access to memory outside its buffers (SIGBUS)".to_owned(),
        Some(libc::SIGFPE) => "division by zero (SIGFPE)".to_owned(),
        Some(libc::SIGILL) => "illegal instruction (SIGILL)".to_owned(),
        Some(libc::SIGABRT) => "aborted (SIGABRT)".to_owned(),
        Some(libc::SIGKILL) => match Allowed::here().cpu_seconds {
            None => "killed, perhaps for want of memory (SIGKILL)".to_owned(),
            Some(most) => format!("killed, perhaps after {most} s of CPU time, see `ulimit -t` (SIGKILL)"),
        },
        Some(libc::SIGXCPU) => "it had all the CPU time that `ulimit -t` allows (SIGXCPU)".to_owned(),
        Some(libc::SIGXFSZ) => "it wrote a larger file than `ulimit -f` allows (SIGXFSZ)".to_owned(),
        Some(libc::SIGSYS) => "it made a system call that is forbidden to candidates (SIGSYS)".to_owned(),
        Some(signal) => format!("ended by signal {signal}"),
        None => format!("ended with exit code {}", status.code().unwrap_or(-1)),
    }
}
