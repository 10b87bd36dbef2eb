//! The parent's side of one peer process.
//!
//! Settings a child gets, whatever the environment of the parent says (`environment`):
//!
//! | variable | value | why |
//! |---|---|---|
//! | `X_NUM_THREADS`, X: OMP, OPENBLAS, MKL, RAYON, MATMUL | threads | read when the library loads |
//! | `OMP_PROC_BIND` | `close` | threads stay on their cores |
//! | `OMP_WAIT_POLICY` | `active` | threads spin between calls instead of sleeping |
//! | `MKL_DYNAMIC` | `FALSE` | as many threads as were asked for |
//! | `OPENBLAS_CORETYPE` | a core type, or unset | read when the library loads |
//!
//! Of the OpenMP settings only the wait policy matters: oneDNN 2.6.3 on 2 threads of an AMD EPYC (family 26,
//! 2 cores, GNU OpenMP 12, 2026-11-20) reached 480 GFLOP/s at 256³ and 320 at 17×333×129 with `active`, as
//! with the default (which also spins for a while), but 270 and 30 to 100 with `passive`. `OMP_PROC_BIND`
//! unset, `close` and `spread` with `OMP_PLACES=cores` were equal within 3 % there; bound threads cannot be
//! moved to one core.

use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use tilewright_device::ChildProcess;
use tilewright_search::pause;

use super::Unavailable;
use super::protocol::{ChildReply, ChildRequest};

/// Hidden subcommand that must call [`worker_main`](super::worker_main) in this executable.
pub const WORKER_SUBCOMMAND: &str = "peer-worker";

/// Prefixes of environment variables of the libraries, which are removed for a child.
const LIBRARY_PREFIXES: &[&str] = &[
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "GOTO_",
    "DNNL_",
    "ONEDNN_",
    "RAYON_",
    "MATMUL_",
    "ORT_",
    "OV_",
    "TBB_",
    "CLBLAST_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDNN_",
    "NVIDIA_TF32_",
];

/// Process of a peer, stopped by signal except while it serves a request.
#[derive(Debug)]
pub(super) struct Child {
    process: ChildProcess,
    replies: Receiver<Option<ChildReply>>,
}

impl Child {
    /// Starts this executable's worker subcommand.
    pub(super) fn spawn(threads: usize, core_type: Option<&str>) -> Result<Child, Unavailable> {
        let broken =
            |error: std::io::Error| Unavailable::Broken { reason: format!("its process does not start: {error}") };
        let mut command = Command::new(std::env::current_exe().map_err(broken)?);
        command.arg(WORKER_SUBCOMMAND);
        // Huge pages for the library's allocations, as for our kernels' buffers.
        command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if LIBRARY_PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
                command.env_remove(&name);
            }
        }
        command.envs(environment(threads, core_type));
        let (sender, replies) = channel();
        let process = ChildProcess::start(command, move |reply| sender.send(reply).is_ok()).map_err(broken)?;
        Ok(Child { process, replies })
    }

    /// Resumes the child, sends a request, waits at most `limit` for the reply, and stops the child again.
    pub(super) fn ask(&mut self, request: &ChildRequest, limit: Duration) -> Result<ChildReply, Unavailable> {
        self.process.go_on();
        self.process.tell(request);
        let deadline = pause::now() + limit;
        let answer = loop {
            match self.replies.recv_timeout(deadline.saturating_duration_since(pause::now())) {
                // This process was suspended meanwhile.
                Err(RecvTimeoutError::Timeout) if pause::now() < deadline => {}
                answer => break answer,
            }
        };
        let reason = match answer {
            Ok(Some(reply)) => {
                self.process.stop();
                return Ok(reply);
            }
            Ok(None) | Err(RecvTimeoutError::Disconnected) => {
                format!("its process ended: {}", self.process.last_words())
            }
            Err(RecvTimeoutError::Timeout) => {
                self.process.last_words();
                "it did not answer in time".to_owned()
            }
        };
        Err(Unavailable::Broken { reason })
    }
}

fn environment(threads: usize, core_type: Option<&str>) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("OMP_NUM_THREADS", threads.to_string()),
        ("OMP_PROC_BIND", "close".to_owned()),
        ("OMP_WAIT_POLICY", "active".to_owned()),
        ("OPENBLAS_NUM_THREADS", threads.to_string()),
        ("MKL_NUM_THREADS", threads.to_string()),
        ("MKL_DYNAMIC", "FALSE".to_owned()),
        ("RAYON_NUM_THREADS", threads.to_string()),
        ("MATMUL_NUM_THREADS", threads.to_string()),
    ];
    if let Some(core_type) = core_type {
        variables.push(("OPENBLAS_CORETYPE", core_type.to_owned()));
    }
    variables
}
