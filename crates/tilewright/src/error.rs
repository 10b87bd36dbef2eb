//! Errors, each of one line.

use std::error::Error as StdError;
use std::fmt;

use tilewright_search::{BoxError, ErrorClass};

/// Error with a one-line text: what failed, where, and how to mend it.
#[derive(Debug)]
pub struct Error {
    text: String,
    kind: ErrorKind,
    source: Option<BoxError>,
}

/// Kind of an error, with its facts. A shell whose settings have names of their own, such as options, can use
/// it to name the option at fault.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Bad input, described by the text.
    Input,
    /// Failed work, described by the text.
    Failed,
    /// Setting that does not fit; the text continues its name.
    Setting(Setting),
    /// Unknown search, or unknown option of one.
    NoSearch,
    /// Target whose code this machine does not run.
    OtherMachine,
    /// Command or CPU kernel requested for a device that is not a CPU.
    NotOnDevice {
        /// Name of the device.
        device: String,
    },
    /// Kernel in a language that the device does not run.
    WrongDevice {
        /// Name of the device.
        given: String,
        /// Name of a device that would run it.
        wanted: &'static str,
    },
    /// Request for OpenCL C of a CPU kernel.
    NotForGpu,
    /// Missing database.
    NoDatabase,
    /// Missing default folder: the user has no home.
    NoHome,
    /// Transfer source without any usable result.
    NothingToTransfer,
    /// Text from which no library name can be made.
    NoName,
    /// C compiler that does not run.
    NoCompiler,
    /// File that cannot be written.
    Unwritable,
    /// Timeout before any candidate was measured.
    TimeUp,
    /// Run without a correct candidate, with the limit that most of them hit, if any.
    NoneRight(Option<Setting>),
    /// Race whose finalists all failed when measured again, with the limits that some of them hit.
    LeadersFailed(Vec<Setting>),
}

/// Setting of a request, a session or a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Setting {
    /// Command that builds the program.
    Build,
    /// Timeout of a build.
    BuildTimeout,
    /// Folder of the code cache.
    Cache,
    /// Command that checks the output of a run.
    Check,
    /// Command executed after each run.
    Cleanup,
    /// Command that is tuned.
    Command,
    /// Device that runs kernels.
    Device,
    /// Metric that is optimised.
    Metric,
    /// Name of a library.
    Name,
    /// Command executed before each run.
    Prepare,
    /// Command that starts the runner of a remote device.
    Runner,
    /// Timeout of a candidate's runs.
    RunTimeout,
    /// Number of threads.
    Threads,
    /// Database or results for transfer learning.
    Transfer,
    /// Storage form of a library's weights.
    Weights,
}

impl Setting {
    /// Setting that raises the limit of a class of failures, if any.
    pub fn limit_of(class: ErrorClass) -> Option<Setting> {
        match class {
            ErrorClass::BuildTimeout => Some(Setting::BuildTimeout),
            ErrorClass::RunTimeout => Some(Setting::RunTimeout),
            _ => None,
        }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Setting::Build => "the build",
            Setting::BuildTimeout => "the build timeout",
            Setting::Cache => "the cache",
            Setting::Check => "the check",
            Setting::Cleanup => "the cleanup",
            Setting::Command => "the command",
            Setting::Device => "the device",
            Setting::Metric => "the metric",
            Setting::Name => "the name",
            Setting::Prepare => "the preparation",
            Setting::Runner => "the runner",
            Setting::RunTimeout => "the run timeout",
            Setting::Threads => "the number of threads",
            Setting::Transfer => "the transfer",
            Setting::Weights => "the weights",
        })
    }
}

impl Error {
    /// Makes an error of kind [`ErrorKind::Input`].
    pub fn input(reason: impl fmt::Display) -> Error {
        Error::of(ErrorKind::Input, reason)
    }

    /// Makes an error of kind [`ErrorKind::Failed`].
    pub fn failed(reason: impl fmt::Display) -> Error {
        Error::of(ErrorKind::Failed, reason)
    }

    /// Makes an error of a given kind.
    pub fn of(kind: ErrorKind, reason: impl fmt::Display) -> Error {
        Error { text: reason.to_string(), kind, source: None }
    }

    /// Makes an error of a setting, whose name the text continues.
    pub(crate) fn setting(setting: Setting, text: impl fmt::Display) -> Error {
        Error::of(ErrorKind::Setting(setting), text)
    }

    /// Attaches the underlying error.
    #[must_use]
    pub fn because(self, source: impl Into<BoxError>) -> Error {
        Error { source: Some(source.into()), ..self }
    }

    /// Kind of the error.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Text without the name of the setting.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether the input is at fault, rather than an event during the work.
    pub fn is_input(&self) -> bool {
        !matches!(
            self.kind,
            ErrorKind::Failed | ErrorKind::TimeUp | ErrorKind::NoneRight(_) | ErrorKind::LeadersFailed(_)
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            ErrorKind::Setting(setting) => write!(f, "{setting}{}", self.text),
            _ => f.write_str(&self.text),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

/// Flattens a text to one line: line breaks and control characters become blanks, runs of blanks a single
/// one.
pub fn one_line(text: &str) -> String {
    let blank = |c: char| c.is_whitespace() || c.is_control();
    let words: Vec<&str> = text.split(blank).filter(|word| !word.is_empty()).collect();
    words.join(" ")
}
