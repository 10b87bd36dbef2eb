//! Errors, each in one line.

use std::error::Error as StdError;
use std::fmt;

use tilewright_search::{BoxError, ErrorClass};

/// Reason why something was not done: its text tells what, where and how to mend it.
#[derive(Debug)]
pub struct Error {
    text: String,
    kind: ErrorKind,
    source: Option<BoxError>,
}

/// Kind of an error, with its facts. A program whose settings have names of its own, such as options, can
/// name those that an error is about.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Input that does not fit, as the text says.
    Input,
    /// Work that failed, as the text says.
    Failed,
    /// A setting that does not fit; the text continues its name.
    Setting(Setting),
    /// A search that does not exist, or does not have such an option.
    NoSearch,
    /// Code for a target that does not run on this machine.
    OtherMachine,
    /// Commands and kernels for CPUs on a device that is none.
    NotOnDevice {
        /// Name of the device.
        device: String,
    },
    /// A kernel in a language that its device does not run.
    WrongDevice {
        /// Name of the device.
        given: String,
        /// Name of a device that runs it.
        wanted: &'static str,
    },
    /// OpenCL C of a kernel for CPUs.
    NotForGpu,
    /// A database that does not exist.
    NoDatabase,
    /// No folder of the user's in which there is a place for it by default.
    NoHome,
    /// Results of which nothing fits.
    NothingToTransfer,
    /// A text that makes no name for a library.
    NoName,
    /// A C compiler that does not run.
    NoCompiler,
    /// A file that cannot be written.
    Unwritable,
    /// The time was up before a candidate was measured.
    TimeUp,
    /// No candidate was right, most of them at a limit if there is one.
    NoneRight(Option<Setting>),
    /// Leaders that failed when they were measured again, some of them at limits.
    LeadersFailed(Vec<Setting>),
}

/// Setting of a request, a session or a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Setting {
    /// Command that builds a command's program.
    Build,
    /// Timeout of a build.
    BuildTimeout,
    /// Folder of compiled kernels.
    Cache,
    /// Command that checks a run.
    Check,
    /// Command after each run.
    Cleanup,
    /// Command that is tuned.
    Command,
    /// Device that runs kernels.
    Device,
    /// Metric that is minimised.
    Metric,
    /// Name of a library.
    Name,
    /// Command before each run.
    Prepare,
    /// Command that starts a runner.
    Runner,
    /// Timeout of the runs of a candidate.
    RunTimeout,
    /// Number of threads.
    Threads,
    /// Results to learn from.
    Transfer,
    /// Form of a library's weights.
    Weights,
}

impl Setting {
    /// Setting that is the limit of a class of failures.
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
    /// Makes an error of the user's input.
    pub fn input(reason: impl fmt::Display) -> Error {
        Error::of(ErrorKind::Input, reason)
    }

    /// Makes an error of something that failed on the way.
    pub fn failed(reason: impl fmt::Display) -> Error {
        Error::of(ErrorKind::Failed, reason)
    }

    /// Makes an error of a kind.
    pub fn of(kind: ErrorKind, reason: impl fmt::Display) -> Error {
        Error { text: reason.to_string(), kind, source: None }
    }

    /// Makes an error of a setting, whose name the text continues.
    pub(crate) fn setting(setting: Setting, text: impl fmt::Display) -> Error {
        Error::of(ErrorKind::Setting(setting), text)
    }

    /// Adds the error that caused this one.
    #[must_use]
    pub fn because(self, source: impl Into<BoxError>) -> Error {
        Error { source: Some(source.into()), ..self }
    }

    /// Kind of the error.
    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// Text without the name of the setting, if the error is about one.
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

/// Returns a text on one line: line breaks and other control characters become blanks, runs of blanks one
/// blank.
pub fn one_line(text: &str) -> String {
    let blank = |c: char| c.is_whitespace() || c.is_control();
    let words: Vec<&str> = text.split(blank).filter(|word| !word.is_empty()).collect();
    words.join(" ")
}
