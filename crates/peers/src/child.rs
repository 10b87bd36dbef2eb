//! The parent's side of one peer process.
//!
//! Settings a child gets, whatever the environment of the parent says (`environment`):
//!
//! | variable | value | why |
//! |---|---|---|
//! | `X_NUM_THREADS`, X: OMP, OPENBLAS, RAYON, MATMUL | threads | read when the library loads |
//! | `OMP_PROC_BIND` | `close` | threads stay on their cores |
//! | `OMP_WAIT_POLICY` | `active` | threads spin between calls instead of sleeping |
//! | `OPENBLAS_CORETYPE` | a core type, or unset | read when the library loads |
//!
//! Of the OpenMP settings only the wait policy matters: oneDNN 2.6.3 on 2 threads of an AMD EPYC (family 26,
//! 2 cores, GNU OpenMP 12, 2026-11-20) made 480 GFLOP/s at 256³ and 320 at 17×333×129 with `active`, as with
//! the default (which spins too, for a while), but 270 and 30 to 100 with `passive`. `OMP_PROC_BIND` unset,
//! `close` and `spread` with `OMP_PLACES=cores` were equal within 3 % there; bound threads cannot be moved to
//! one core.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use tilewright_tune::pause;

use super::os;
use super::protocol::{Reply, Request};

/// The hidden subcommand that must lead to [`worker_main`](super::worker_main) in this executable.
pub const WORKER_SUBCOMMAND: &str = "peer-worker";

/// Variables with these beginnings belong to the libraries and do not reach a child.
const LIBRARY_PREFIXES: &[&str] =
    &["OMP_", "GOMP_", "KMP_", "OPENBLAS_", "GOTO_", "DNNL_", "ONEDNN_", "RAYON_", "MATMUL_"];

/// A peer's process, stopped by signal unless it is answering.
#[derive(Debug)]
pub(super) struct Child {
    process: std::process::Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    /// Bytes read beyond the last complete line.
    unread: Vec<u8>,
}

impl Child {
    /// Start this executable's worker subcommand.
    pub(super) fn spawn(threads: usize, core_type: Option<&str>) -> anyhow::Result<Child> {
        let executable = std::env::current_exe().context("the path of this executable is unknown")?;
        let mut command = Command::new(executable);
        command.arg(WORKER_SUBCOMMAND);
        // Large pages for whatever the library allocates, as our kernels' buffers have them.
        command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if LIBRARY_PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(&name);
            }
        }
        command.envs(environment(threads, core_type));
        // Standard error goes nowhere: libraries print warnings there, and our own errors come as replies.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().context("a peer's process does not start")?;
        let stdin = process.stdin.take().expect("standard input is piped");
        let stdout = process.stdout.take().expect("standard output is piped");
        Ok(Child { process, stdin, stdout, unread: Vec::new() })
    }

    /// Let the child run, ask, wait at most `limit` for the answer, and stop it again.
    pub(super) fn ask(&mut self, request: &Request, limit: Duration) -> anyhow::Result<Reply> {
        let mut line = serde_json::to_string(request).expect("requests have no maps with odd keys");
        line.push('\n');
        os::resume(self.process.id());
        let answer = self
            .stdin
            .write_all(line.as_bytes())
            .map_err(anyhow::Error::from)
            .and_then(|()| self.read_line(pause::now() + limit));
        match answer {
            Ok(answer) => {
                os::stop(self.process.id());
                serde_json::from_slice(&answer).context("a peer's process answered no JSON")
            }
            Err(error) => {
                self.process.kill().ok();
                Err(match self.process.wait() {
                    Ok(status) => error.context(format!("a peer's process ended ({status})")),
                    Err(_) => error,
                })
            }
        }
    }

    fn read_line(&mut self, deadline: Instant) -> anyhow::Result<Vec<u8>> {
        let mut n_searched = 0;
        loop {
            if let Some(end) = self.unread[n_searched..].iter().position(|&byte| byte == b'\n') {
                let rest = self.unread.split_off(n_searched + end + 1);
                return Ok(std::mem::replace(&mut self.unread, rest));
            }
            n_searched = self.unread.len();
            let left = deadline.saturating_duration_since(pause::now());
            if !os::readable(self.stdout.as_raw_fd(), left)? {
                if pause::now() < deadline {
                    // This process was stopped meanwhile.
                    continue;
                }
                anyhow::bail!("it did not answer in time");
            }
            let mut chunk = [0; 64 * 1024];
            let n_read = std::io::Read::read(&mut self.stdout, &mut chunk)?;
            if n_read == 0 {
                anyhow::bail!("it closed its output");
            }
            self.unread.extend_from_slice(&chunk[..n_read]);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SIGKILL also ends a stopped process.
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn environment(threads: usize, core_type: Option<&str>) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("OMP_NUM_THREADS", threads.to_string()),
        ("OMP_PROC_BIND", "close".to_owned()),
        ("OMP_WAIT_POLICY", "active".to_owned()),
        ("OPENBLAS_NUM_THREADS", threads.to_string()),
        ("RAYON_NUM_THREADS", threads.to_string()),
        ("MATMUL_NUM_THREADS", threads.to_string()),
    ];
    if let Some(core_type) = core_type {
        variables.push(("OPENBLAS_CORETYPE", core_type.to_owned()));
    }
    variables
}
