//! Messages between the tuner and its workers: one JSON document a line, over the worker's standard streams.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tilewright_search::{Conditions, ErrorClass};

/// Thread of a worker. Each serves one request at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerThread {
    /// The thread that builds.
    Build,
    /// The one that runs kernels.
    Test,
}

/// Request to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum WorkerRequest {
    /// Build a program and keep it under a number.
    Build {
        /// The number.
        id: u64,
        /// Source of the program.
        source: ProgramSource,
        /// Whether code that is made quickly will do.
        quickly: bool,
    },
    /// Run a kept program for the first time and check its answer. [`Reply::Prepared`] comes before the
    /// answer, and [`Reply::Timed`] after it if the answer says so.
    Check {
        /// The number that the program is kept under.
        id: u64,
        /// Plan of the timing; `None` where the program is only checked.
        plan: Option<TimingPlan>,
    },
    /// Time a kept program that has been checked.
    Run {
        /// The number that the program is kept under.
        id: u64,
        /// Plan of the timing.
        plan: TimingPlan,
    },
    /// Forget a kept program.
    Drop {
        /// The number that the program is kept under.
        id: u64,
    },
}

impl WorkerRequest {
    /// Thread that serves the request.
    pub fn lane(&self) -> WorkerThread {
        match self {
            // In the order in which they are asked, so that what is dropped is there.
            WorkerRequest::Build { .. } | WorkerRequest::Drop { .. } => WorkerThread::Build,
            WorkerRequest::Check { .. } | WorkerRequest::Run { .. } => WorkerThread::Test,
        }
    }
}

/// Source of a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramSource {
    /// Schedule steps, one a line, for the workload the worker was started for.
    Steps(String),
    /// A lowered program in the text format, compiled as it is. Its arguments must be the workload's.
    Lowered(String),
}

/// State of the caches before a timed run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Caches {
    /// Warm, as the run before left them.
    #[default]
    Warm,
    /// Warm, but without constants and buffers made of them: as in a model whose weights do not stay in the
    /// caches from one run to the next, while a kernel's inputs were just written by the kernel before.
    ColdConstants,
    /// Cold.
    Cold,
}

/// Plan by which a kernel is timed.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct TimingPlan {
    /// Least time spent in samples, in nanoseconds.
    pub min_time_ns: f64,
    /// Least number of samples.
    pub min_samples: u32,
    /// The first run counts as timed, because no other kernel runs meanwhile, if with the comparison of its
    /// answer it takes no longer than this.
    pub alone_ns: f64,
    /// Median of a kernel that leads so far: one that is clearly slower is not sampled further.
    pub leading_ns: Option<f64>,
    /// State of the caches before a run.
    pub caches: Caches,
    /// Whether times are what undisturbed cores would take, not what these took.
    pub at_best_pace: bool,
}

/// Reply of a worker, with the thread that sends it.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The worker is ready.
    Ready,
    /// The worker cannot get ready, and ends.
    NotReady {
        /// Reason.
        reason: String,
    },
    /// The process is about to end by a crash of this thread.
    Crashed,
    /// The program is built.
    Built {
        /// The number that the program is kept under.
        id: u64,
        /// Seconds it took.
        seconds: f64,
    },
    /// The buffers of the program are ready, and its first run begins.
    Prepared {
        /// The number that the program is kept under.
        id: u64,
    },
    /// The first run is over, and its answer is compared by this process, which may take longer than the run.
    Ran {
        /// The number that the program is kept under.
        id: u64,
    },
    /// The program ran and was right.
    Checked {
        /// The number that the program is kept under.
        id: u64,
        /// Seconds it took.
        seconds: f64,
        /// Seconds of the run and the comparison alone.
        run_seconds: f64,
        /// The largest relative error of an output as a whole.
        relative_error: f64,
        /// Whether it is timed at once, as it was alone or is hopeless: [`Reply::Timed`] is next.
        is_timed: bool,
    },
    /// Times of the program.
    Timed {
        /// The number that the program is kept under.
        id: u64,
        /// Nanoseconds a run, one for each sample.
        samples_ns: Vec<f64>,
        /// Whether sampling ended early.
        stopped_early: bool,
        /// Seconds spent in runs.
        seconds: f64,
        /// Conditions of the device, where it is another machine.
        conditions: Conditions,
    },
    /// The request failed.
    Failed {
        /// The program's number.
        id: u64,
        /// Class of the failure.
        class: ClassName,
        /// Description of the failure.
        message: String,
        /// Whether that is for want of memory.
        lacks_memory: bool,
        /// Seconds it took.
        seconds: f64,
    },
}

impl Reply {
    /// The number of the program that it is about.
    pub fn id(&self) -> Option<u64> {
        match self {
            Reply::Ready | Reply::NotReady { .. } | Reply::Crashed => None,
            Reply::Built { id, .. }
            | Reply::Prepared { id }
            | Reply::Ran { id }
            | Reply::Checked { id, .. }
            | Reply::Timed { id, .. }
            | Reply::Failed { id, .. } => Some(*id),
        }
    }
}

/// An error class by its stable name.
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

/// Assignment of a worker: its first line of input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerAssignment {
    /// The workload's text.
    pub workload: String,
    /// The text of the target to generate code for.
    pub target: String,
    /// Threads a kernel may use.
    pub n_threads: usize,
    /// CPUs to pin to while timing, one a thread.
    pub cpus: Vec<usize>,
    /// File descriptor, inherited, of the data: inputs and reference outputs.
    pub data_fd: i32,
    /// Offset of each argument's data: an input's contents, or an output's reference as `f64`.
    pub data_offsets: Vec<u64>,
    /// Descriptor of the file of objects that the workers share.
    pub objects_fd: i32,
    /// Address space the worker may use beyond what it has at its start, in bytes.
    pub memory_bytes: u64,
    /// Folder in which drivers of devices may cache compiled code.
    #[serde(default)]
    pub drivers_folder: Option<PathBuf>,
    /// The runner on which kernels run, where that is not this machine.
    #[serde(default)]
    pub runner: Option<RunnerOf>,
}

/// A runner of kernels elsewhere.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunnerOf {
    /// The command that starts it.
    pub command: String,
    /// Seconds that the runs of a candidate may take together.
    pub run_timeout_s: f64,
}
