//! Protocol between parent and child: a JSON value a line.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Unavailable;
use super::model::StoredTensor;

/// Parent to child, on standard input. Exactly one [`ChildReply`] answers each.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ChildRequest {
    /// Ask for the version of the peer's library.
    Version { peer: String },
    /// Load the peer's library, prepare the workload, run it once and check the result. Comes at most once.
    Start {
        peer: String,
        workload: String,
        threads: usize,
        /// Folder in which libraries are looked for first.
        folder: Option<PathBuf>,
        /// The number of the device, for libraries for GPUs.
        gpu: Option<u32>,
        /// Descriptor, inherited, of the workload's data, and where that of each argument begins.
        data_fd: i32,
        data_offsets: Vec<u64>,
    },
    /// Load a model into a runtime and run it once. Comes at most once, instead of a `Start`.
    Open {
        peer: String,
        model: PathBuf,
        /// Sizes of named dimensions.
        dims: Vec<(String, usize)>,
        threads: usize,
        folder: Option<PathBuf>,
        /// Number of the device, for runtimes on GPUs.
        gpu: Option<u32>,
        /// Descriptor, inherited, of the memory that tensors lie in.
        data_fd: i32,
        inputs: Vec<StoredTensor>,
    },
    /// Run the model on these inputs, which later rounds have as well.
    Run { inputs: Vec<StoredTensor> },
    /// Run once to warm up, then take samples until both limits are reached.
    Round { min_time_ns: u64, min_samples: u32 },
    /// Run once and compare with the reference.
    Check,
}

/// Child to parent, on what was standard output when the child started.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ChildReply {
    /// Answer to `Version`.
    Version { version: String },
    /// Answer to `Start` and `Open`: prepared and checked.
    Ready { version: String, details: String, core_type: Option<String> },
    /// Answer to `Round`: nanoseconds a run.
    Round { times_ns: Vec<f64> },
    /// Answer to `Check`: passed.
    Checked { relative_error: f64 },
    /// Answer to `Run`.
    Outputs { outputs: Vec<StoredTensor> },
    /// Answer to any request that cannot be served.
    Unavailable(Unavailable),
}
