//! Protocol between parent and child: one JSON value per line.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Unavailable;
use super::model::StoredTensor;

/// Message of the parent to the child, on standard input. Each gets exactly one [`ChildReply`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ChildRequest {
    /// Asks for the version of the peer's library.
    Version { peer: String },
    /// Loads the peer's library, prepares the workload, runs it once and verifies the result. Sent at most
    /// once.
    Start {
        peer: String,
        workload: String,
        threads: usize,
        /// Folder that is searched first for libraries.
        folder: Option<PathBuf>,
        /// Index of the device, for GPU libraries.
        gpu: Option<u32>,
        /// Inherited descriptor of the workload's data, and the offset of each argument.
        data_fd: i32,
        data_offsets: Vec<u64>,
    },
    /// Loads a model into a runtime and runs it once. Sent at most once, instead of a `Start`.
    Open {
        peer: String,
        model: PathBuf,
        /// Sizes of named dimensions.
        dims: Vec<(String, usize)>,
        threads: usize,
        folder: Option<PathBuf>,
        /// Index of the device, for GPU runtimes.
        gpu: Option<u32>,
        /// Inherited descriptor of the memory of the tensors.
        data_fd: i32,
        inputs: Vec<StoredTensor>,
    },
    /// Runs the model on these inputs, which later rounds use as well.
    Run { inputs: Vec<StoredTensor> },
    /// Runs once to warm up, then takes samples until both limits are reached.
    Round { min_time_ns: u64, min_samples: u32 },
    /// Runs once and compares the result with the reference.
    Check,
}

/// Message of the child to the parent, on the standard output that the child was started with.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ChildReply {
    /// Reply to `Version`.
    Version { version: String },
    /// Reply to `Start` and `Open`: prepared and verified.
    Ready { version: String, details: String, core_type: Option<String> },
    /// Reply to `Round`: nanoseconds per run.
    Round { times_ns: Vec<f64> },
    /// Reply to `Check`: correct.
    Checked { relative_error: f64 },
    /// Reply to `Run`.
    Outputs { outputs: Vec<StoredTensor> },
    /// Reply to any request that cannot be served.
    Unavailable(Unavailable),
}
