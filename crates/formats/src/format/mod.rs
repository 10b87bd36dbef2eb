//! Formats: one file and one row of [`FORMATS`] each.

mod ansor;
mod autotvm;
mod clblast;
mod helion;
mod kernel_tuner;
mod ktt;
mod metaschedule;
pub(crate) mod records;
mod t1;
mod t4;
mod triton;
mod vllm;

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value as Json;
use tilewright_search::RecordedSpace;

pub use t1::SpaceDescription;

use crate::outcome::brief;
use crate::read::{FormatError, Input, ReadResults};
use crate::results::{Results, TunerTask};

/// Objective that is replayed.
pub(crate) const OBJECTIVE: &str = "time";
/// Key of a failure in the current Kernel Tuner's caches, and name of a T4 measurement that stands for one.
const ERROR: &str = "__error__";
/// Maximum number of times of single runs of one configuration.
const MOST_TIMES: usize = 1 << 16;

/// Format of files.
pub struct Format {
    /// Name in options and messages.
    pub name: &'static str,
    /// Description of the files.
    pub what: &'static str,
    /// Contents that are read, or other use of the files.
    pub read_for: &'static str,
    /// Names of members that identify the format, [`Format::A_LIST`] or [`Format::A_NUMBER`].
    pub(crate) signs: &'static [&'static str],
    /// Whether these members may also be in files of a format further down.
    pub(crate) is_doubtful: bool,
    /// Whether a description may provide the parameters.
    pub(crate) takes_description: bool,
    pub(crate) read: fn(Input) -> Result<ReadResults, FormatError>,
    writer: Option<Writer>,
}

/// Writer of a format.
enum Writer {
    /// Document with one task.
    Document(WriteTask),
    /// Lines of any number of tasks.
    Lines(WriteTask),
    /// Document with the best configuration of one task.
    Winner(WriteTask),
    /// Document with the best configurations of several tasks, each with its key.
    Winners(WriteWinners),
}

/// Function that writes configurations, each with its number of rows.
type WriteWinners = fn(&[(u64, Json)], &mut dyn Write) -> io::Result<()>;

/// Function that writes the results of a task.
type WriteTask = fn(&Results, &mut dyn Write) -> io::Result<()>;

impl Format {
    /// Sign of files that are a list.
    pub(crate) const A_LIST: &'static str = "[";
    /// Sign of files whose members are named by numbers.
    pub(crate) const A_NUMBER: &'static str = "0";

    /// Whether the format can be written.
    pub fn is_written(&self) -> bool {
        self.writer.is_some()
    }

    /// Whether the format stores configurations without times.
    fn holds_winners(&self) -> bool {
        matches!(self.writer, Some(Writer::Winner(_) | Writer::Winners(_)))
    }

    /// Whether files of the format contain results.
    pub fn has_results(&self) -> bool {
        self.name != "t1"
    }
}

impl fmt::Debug for Format {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(self.name)
    }
}

/// Table of formats. A file that matches several has the first of them.
pub static FORMATS: &[Format] = &[
    Format {
        name: "kernel-tuner",
        what: "caches of Kernel Tuner, closed or not",
        read_for: "times and failures",
        signs: &["cache", "tune_params_keys"],
        is_doubtful: false,
        takes_description: true,
        read: kernel_tuner::read,
        writer: Some(Writer::Document(kernel_tuner::write)),
    },
    Format {
        name: "clblast",
        what: "JSON of CLBlast's tuners",
        read_for: "times",
        signs: &["clblast_device_type", "kernel_family"],
        is_doubtful: false,
        takes_description: false,
        read: clblast::read,
        writer: None,
    },
    Format {
        name: "t4",
        what: "T4 results 1.0.0, as of Kernel Tuner and BAT",
        read_for: "times and failures",
        signs: &["results"],
        is_doubtful: true,
        takes_description: true,
        read: t4::read,
        writer: Some(Writer::Document(t4::write)),
    },
    Format {
        name: "t1",
        what: "T1 descriptions 1.0.0 of a space",
        read_for: "parameters and conditions; kernels in C",
        signs: &["ConfigurationSpace"],
        is_doubtful: false,
        takes_description: false,
        read: t1::refuse,
        writer: None,
    },
    Format {
        name: "ktt",
        what: "results of KTT, as JSON",
        read_for: "times and failures",
        signs: &["Results"],
        is_doubtful: false,
        takes_description: false,
        read: ktt::read,
        writer: None,
    },
    Format {
        name: "autotvm",
        what: "logs of AutoTVM 0.2",
        read_for: "times and failures, by task",
        signs: &["input"],
        is_doubtful: false,
        takes_description: false,
        read: autotvm::read,
        writer: Some(Writer::Lines(autotvm::write)),
    },
    Format {
        name: "ansor",
        what: "logs of Ansor, v0.5 and v0.6",
        read_for: "times and failures of programs, by task",
        signs: &["i"],
        is_doubtful: false,
        takes_description: false,
        read: ansor::read,
        writer: None,
    },
    Format {
        name: "metaschedule",
        what: "tuning records of MetaSchedule",
        read_for: "times of programs, by task",
        signs: &[Format::A_LIST],
        is_doubtful: false,
        takes_description: false,
        read: metaschedule::read,
        writer: None,
    },
    Format {
        name: "triton",
        what: "`*.autotune.json` of Triton",
        read_for: "times",
        signs: &["configs_timings"],
        is_doubtful: false,
        takes_description: false,
        read: triton::read,
        writer: Some(Writer::Document(triton::write)),
    },
    Format {
        name: "vllm",
        what: "vLLM's and SGLang's tables of tuned kernels, as of `fused_moe`",
        read_for: "winners, by number of rows",
        signs: &["triton_version", Format::A_NUMBER],
        is_doubtful: false,
        takes_description: false,
        read: vllm::read,
        writer: Some(Writer::Winners(vllm::write)),
    },
    Format {
        name: "helion",
        what: "configurations of Helion, saved or `*.best_config`",
        read_for: "winners",
        signs: &["block_sizes", "flat_config"],
        is_doubtful: false,
        takes_description: false,
        read: helion::read,
        writer: Some(Writer::Winner(helion::write)),
    },
    Format {
        name: "records",
        what: "records of ours, as JSON lines",
        read_for: "everything",
        signs: &["workload"],
        is_doubtful: false,
        takes_description: false,
        read: records::read,
        writer: Some(Writer::Lines(records::write)),
    },
];

/// Format by name.
pub fn named(name: &str) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.name == name)
}

/// Names of formats, in one line.
pub(crate) fn names_of_formats(is_meant: impl Fn(&Format) -> bool) -> String {
    FORMATS.iter().filter(|format| is_meant(format)).map(|format| format.name).collect::<Vec<_>>().join(", ")
}

/// Reason why results cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// Format that is only read.
    #[error("{name} is not written; there are {}", names_of_formats(Format::is_written))]
    NotWritten {
        /// Name of the format.
        name: &'static str,
    },
    /// Several tasks, in a format with one task per file.
    #[error("{name} has one task in a file, and these are {n_tasks}: {tasks} (choose one with --task)")]
    Tasks {
        /// Name of the format.
        name: &'static str,
        /// Number of tasks.
        n_tasks: usize,
        /// First few tasks.
        tasks: String,
    },
    /// Winners without times, in a format that needs times.
    #[error(
        "{name} has times, and these are winners without any; there are {}",
        names_of_formats(Format::holds_winners)
    )]
    NoTimes {
        /// Name of the format.
        name: &'static str,
    },
    /// Tasks without a number of rows, or several with one number, in a format that identifies tasks by it.
    #[error("{name} has one configuration for each number of rows M, and {problem} (choose one with --task)")]
    Key {
        /// Name of the format.
        name: &'static str,
        /// Description of the task and of the problem.
        problem: String,
    },
    /// Absence of results.
    #[error("there are no results to write")]
    Nothing,
    /// Failed output.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Writes results in a format, after checking that the format can represent them.
///
/// # Errors
/// [`WriteError`].
pub fn write(format: &Format, results: &[Results], out: &mut dyn Write) -> Result<(), WriteError> {
    check_writable(format, results)?;
    match format.writer.as_ref().expect("invariant: it was checked") {
        Writer::Document(write) | Writer::Lines(write) | Writer::Winner(write) => {
            results.iter().try_for_each(|results| Ok(write(results, out)?))
        }
        Writer::Winners(write) => Ok(write(&keyed(format.name, results)?, out)?),
    }
}

/// Checks that a format can represent these results.
///
/// # Errors
/// [`WriteError`].
pub fn check_writable(format: &Format, results: &[Results]) -> Result<(), WriteError> {
    let name = format.name;
    let writer = format.writer.as_ref().ok_or(WriteError::NotWritten { name })?;
    let is_there = |results: &Results| match format.holds_winners() {
        true => results.best().is_some(),
        false => !results.rows.is_empty(),
    };
    if !results.iter().any(is_there) {
        return Err(WriteError::Nothing);
    }
    if !format.holds_winners() && !results.iter().all(Results::has_outcomes) {
        return Err(WriteError::NoTimes { name });
    }
    match (writer, results) {
        (Writer::Lines(_), _) | (Writer::Document(_) | Writer::Winner(_), [_]) => Ok(()),
        (Writer::Winners(_), _) => keyed(name, results).map(drop),
        (Writer::Document(_) | Writer::Winner(_), several) => {
            let tasks: Vec<String> = several.iter().take(4).map(|results| results.task.to_string()).collect();
            let more = if several.len() > 4 { "; …" } else { "" };
            Err(WriteError::Tasks { name, n_tasks: several.len(), tasks: tasks.join("; ") + more })
        }
    }
}

/// Best configurations of tasks by their numbers of rows, in ascending order.
fn keyed(name: &'static str, results: &[Results]) -> Result<Vec<(u64, Json)>, WriteError> {
    let mut found: BTreeMap<u64, Json> = BTreeMap::new();
    for results in results {
        let Some(best) = results.best() else { continue };
        let refuse = |what: &str| WriteError::Key { name, problem: brief(&format!("{what} {}", results.task)) };
        let key = results.task.n_rows().ok_or_else(|| refuse("there is no number of rows in"))?;
        if found.insert(key, results.config(best)).is_some() {
            return Err(refuse("there are two of"));
        }
    }
    Ok(found.into_iter().collect())
}

/// Writes a recorded space as T4 results, in index order, compressed by gzip if `is_packed`. `about` is added
/// to the metadata. [`read`](crate::read()) restores the medians, and the error classes that T4
/// distinguishes.
///
/// # Errors
/// If `output` fails.
pub fn write_space(
    space: &RecordedSpace,
    mut output: impl Write,
    is_packed: bool,
    about: &[(&str, Json)],
) -> io::Result<()> {
    let entries = || {
        let outcomes = space.outcomes().into_iter();
        outcomes.map(|(config, outcome)| t4::T4Row::of(space.space().config_to_json(config), outcome))
    };
    if is_packed {
        let mut packed = GzEncoder::new(output, Compression::default());
        t4::write_entries(&mut packed, entries(), about)?;
        packed.finish()?.flush()
    } else {
        t4::write_entries(&mut output, entries(), about)?;
        output.flush()
    }
}

/// Nanoseconds per millisecond, the unit of most formats.
const MILLISECONDS_NS: f64 = 1e6;

/// Makes the task of a file that names its kernel but does not describe the problem.
fn task_of(name: &str, kernel: Option<&Json>, device: Option<&Json>) -> TunerTask {
    let text = |value: Option<&Json>| value.and_then(Json::as_str).unwrap_or_default().to_owned();
    let kernel = Some(text(kernel)).filter(|kernel| !kernel.is_empty()).unwrap_or_else(|| name.to_owned());
    TunerTask { kernel, device: text(device), problem: Vec::new() }
}

/// Number in an optional member of an object.
fn number(value: &Option<Json>) -> f64 {
    value.as_ref().and_then(Json::as_f64).filter(|number| number.is_finite() && *number >= 0.0).unwrap_or_default()
}
