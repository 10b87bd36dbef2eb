//! Protocol between the tuner and its workers: one JSON document per line, over the worker's standard
//! streams.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tilewright_search::{Conditions, ErrorClass};

/// Thread of a worker, which serves one request at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerThread {
    /// Builder thread.
    Build,
    /// Tester thread, which runs kernels.
    Test,
}

/// Request to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum WorkerRequest {
    /// Builds a program, and keeps it under a number.
    Build {
        /// The number.
        id: u64,
        /// Source of the program.
        source: ProgramSource,
        /// Whether to use the fast back end.
        quickly: bool,
    },
    /// Runs a kept program for the first time, and verifies its result. [`Reply::Prepared`] precedes the
    /// reply, and [`Reply::Timed`] follows it if `is_timed`.
    Check {
        /// Number of the program.
        id: u64,
        /// Timing plan; `None` to verify only.
        plan: Option<TimingPlan>,
    },
    /// Times a kept, verified program.
    Run {
        /// Number of the program.
        id: u64,
        /// Timing plan.
        plan: TimingPlan,
    },
    /// Drops a kept program.
    Drop {
        /// Number of the program.
        id: u64,
    },
}

impl WorkerRequest {
    /// Thread that serves the request.
    pub fn lane(&self) -> WorkerThread {
        match self {
            // Served in the order of requests, so that a program to be dropped exists.
            WorkerRequest::Build { .. } | WorkerRequest::Drop { .. } => WorkerThread::Build,
            WorkerRequest::Check { .. } | WorkerRequest::Run { .. } => WorkerThread::Test,
        }
    }
}

/// Time that an emulated device reports for every correct kernel, as its real times are meaningless. It is
/// longer than any run may take, so that no candidate is pruned for its time.
pub const EMULATED_NS: f64 = 1e12;

/// Source of a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramSource {
    /// Schedule steps, one per line, for the workload that the worker was started for.
    Steps(String),
    /// Lowered program in the text format. Its arguments must be the workload's.
    Lowered(String),
}

/// Cache state before a timed run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Caches {
    /// Warm: as the previous run left the caches.
    #[default]
    Warm,
    /// Warm, except for constants and buffers made of them: as in a model whose weights do not stay in cache
    /// from run to run, while a kernel's inputs were just written by the previous kernel.
    ColdConstants,
    /// Cold.
    Cold,
}

/// Plan for timing a kernel.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct TimingPlan {
    /// Minimum time of all samples, in nanoseconds.
    pub min_time_ns: f64,
    /// Minimum number of samples.
    pub min_samples: u32,
    /// Threshold for counting the first run as timed: no other kernel runs meanwhile, if run and comparison
    /// take at most this many nanoseconds.
    pub alone_ns: f64,
    /// Median of the best candidate, if any: a clearly slower kernel is pruned.
    pub leading_ns: Option<f64>,
    /// Cache state before a run.
    pub caches: Caches,
    /// Whether times are corrected for interference.
    pub at_best_pace: bool,
}

/// Reply of a worker, with the thread that sends it.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The worker is ready.
    Ready,
    /// Failure of the worker to start; it exits.
    NotReady {
        /// Reason.
        reason: String,
    },
    /// Crash of this thread; the process is about to end.
    Crashed,
    /// Last words of a worker whose device failed, whatever runs on it.
    DeviceLost {
        /// Error of the driver.
        reason: String,
    },
    /// Successful build.
    Built {
        /// Number of the program.
        id: u64,
        /// Duration in seconds.
        seconds: f64,
    },
    /// Start of the first run, after the program's buffers are ready.
    Prepared {
        /// Number of the program.
        id: u64,
    },
    /// End of the first run; its result is now compared, which may take longer than the run.
    Ran {
        /// Number of the program.
        id: u64,
    },
    /// Correct result.
    Checked {
        /// Number of the program.
        id: u64,
        /// Duration in seconds.
        seconds: f64,
        /// Seconds of run and comparison alone.
        run_seconds: f64,
        /// Largest relative error of an output.
        relative_error: f64,
        /// Whether [`Reply::Timed`] follows at once, as the first run counts as timed or the kernel is
        /// pruned.
        is_timed: bool,
    },
    /// Times of a program.
    Timed {
        /// Number of the program.
        id: u64,
        /// Samples in nanoseconds per run.
        samples_ns: Vec<f64>,
        /// Whether sampling ended early.
        stopped_early: bool,
        /// Seconds spent in runs.
        seconds: f64,
        /// Conditions of the device, if it is another machine.
        conditions: Conditions,
    },
    /// Failed request.
    Failed {
        /// Number of the program.
        id: u64,
        /// Class of the failure.
        class: ClassName,
        /// Description of the failure.
        message: String,
        /// Whether the cause is a lack of memory.
        lacks_memory: bool,
        /// Duration in seconds.
        seconds: f64,
    },
}

impl Reply {
    /// Number of the program that it is about; `None` for replies about the worker.
    pub fn id(&self) -> Option<u64> {
        match self {
            Reply::Ready | Reply::NotReady { .. } | Reply::Crashed | Reply::DeviceLost { .. } => None,
            Reply::Built { id, .. }
            | Reply::Prepared { id }
            | Reply::Ran { id }
            | Reply::Checked { id, .. }
            | Reply::Timed { id, .. }
            | Reply::Failed { id, .. } => Some(*id),
        }
    }
}

/// Error class by its stable name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct ClassName(pub ErrorClass);

impl From<ClassName> for String {
    fn from(name: ClassName) -> String {
        name.0.name().to_owned()
    }
}

impl TryFrom<String> for ClassName {
    type Error = String;
    fn try_from(name: String) -> Result<ClassName, String> {
        ErrorClass::from_name(&name).map(ClassName).ok_or_else(|| format!("no error class `{name}`"))
    }
}

/// Assignment of a worker, its first line of input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerAssignment {
    /// Workload as text.
    pub workload: String,
    /// Target as text.
    pub target: String,
    /// Number of threads that a kernel may use.
    pub n_threads: usize,
    /// CPUs that threads are pinned to while timing, one each.
    pub cpus: Vec<usize>,
    /// Inherited file descriptor of the test data.
    pub data_fd: i32,
    /// Offset of each argument's data: an input's contents, or an output's reference as `f64`.
    pub data_offsets: Vec<u64>,
    /// Inherited file descriptor of the objects that workers share.
    pub objects_fd: i32,
    /// Memory limit: address space beyond that at the start, in bytes.
    pub memory_bytes: u64,
    /// Folder in which GPU drivers may cache code.
    #[serde(default)]
    pub drivers_folder: Option<PathBuf>,
    /// Runner on which kernels run; `None` for this machine.
    #[serde(default)]
    pub runner: Option<RunnerOf>,
}

/// Runner of a remote device.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunnerOf {
    /// Command that starts it.
    pub command: String,
    /// Timeout of a candidate's runs in total, in seconds.
    pub run_timeout_s: f64,
}
