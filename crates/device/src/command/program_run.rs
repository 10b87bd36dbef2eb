//! Results of runs of programs.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use crate::child::describe;

/// Reason for the end of a run.
#[derive(Debug)]
pub enum ProgramEnd {
    /// Exit, or death by a signal.
    Ended(ExitStatus),
    /// Timeout.
    TimedOut,
    /// Cancellation.
    GivenUp,
    /// Failure to start the program.
    NotStarted(String, io::Error),
}

/// Result of a run.
#[derive(Debug)]
pub struct ProgramRun {
    /// End of the run.
    pub end: ProgramEnd,
    /// Wall-clock seconds, from the request to start the program.
    pub wall_s: f64,
    /// Seconds of CPU time of all its processes that were waited for.
    pub cpu_s: f64,
    /// End of its standard output.
    pub output: Vec<u8>,
    /// End of its standard error.
    pub errors: Vec<u8>,
    /// Last matches of the metrics in output that was dropped, for both streams; empty if all was kept.
    pub found_before: [Vec<Option<String>>; 2],
}

impl ProgramRun {
    /// Result for a program that could not be started.
    pub fn not_started(words: &[String], error: io::Error) -> ProgramRun {
        ProgramRun {
            end: ProgramEnd::NotStarted(words[0].clone(), error),
            wall_s: 0.0,
            cpu_s: 0.0,
            output: Vec::new(),
            errors: Vec::new(),
            found_before: [Vec::new(), Vec::new()],
        }
    }

    /// Describes a failure: the exit status, and the last line of output.
    pub fn complaint(&self, program: &str) -> String {
        let how = match &self.end {
            ProgramEnd::Ended(status) => match status.code() {
                // A shell reports death by a signal this way.
                Some(code @ 129..160) => {
                    format!("{program} ended with exit code {code}, {}", describe(ExitStatus::from_raw(code - 128)))
                }
                Some(code) => format!("{program} ended with exit code {code}"),
                None => format!("{program}: {}", describe(*status)),
            },
            ProgramEnd::TimedOut => format!("{program} had not ended after {:.3} s", self.wall_s),
            ProgramEnd::GivenUp => format!("{program} was given up"),
            ProgramEnd::NotStarted(name, error) if error.kind() == io::ErrorKind::NotFound => {
                format!("{program} cannot be started: there is no program {name} (install it, or give its path)")
            }
            ProgramEnd::NotStarted(name, error) => format!("{program} cannot be started, {name}: {error}"),
        };
        let last = [&self.errors, &self.output].into_iter().find_map(|text| {
            let text = String::from_utf8_lossy(text);
            // Compilers report errors first and count them at the end.
            let wrong = text.lines().find(|line| line.contains("error:"));
            let last = wrong.or_else(|| text.lines().rev().find(|line| !line.trim().is_empty()));
            last.map(|line| line.trim().chars().filter(|c| !c.is_control()).take(300).collect::<String>())
        });
        last.map_or(how.clone(), |last| format!("{how}: {last}"))
    }

    /// Whether the program exited with 0.
    pub fn is_success(&self) -> bool {
        matches!(&self.end, ProgramEnd::Ended(status) if status.success())
    }
}
