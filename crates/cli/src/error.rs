//! Errors as shown on the command line: one line, and an exit code that distinguishes bad input from
//! failures.

use std::fmt;

pub use tilewright::one_line;
use tilewright::{ErrorKind, Setting};

/// Error of the user's input or usage: exit code 2.
#[derive(Debug)]
struct BadInput(String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// Makes an error caused by the user's input.
pub fn bad_input(reason: impl fmt::Display) -> anyhow::Error {
    BadInput(reason.to_string()).into()
}

/// Extension of results whose errors are caused by the user's input.
pub trait OrBadInput<T> {
    /// Converts an error to bad input with a hint appended.
    ///
    /// # Errors
    /// If the result is an error.
    fn or_bad_input(self, hint: &str) -> anyhow::Result<T>;
}

impl<T, E: fmt::Display> OrBadInput<T> for Result<T, E> {
    fn or_bad_input(self, hint: &str) -> anyhow::Result<T> {
        self.map_err(|error| if hint.is_empty() { bad_input(error) } else { bad_input(format!("{error} ({hint})")) })
    }
}

/// Exit code for an error: 2 for bad input, 0 if the reader of our output has closed it, 1 for everything
/// else.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if is_closed_pipe(error) {
        0
    } else if error.chain().any(is_bad_input) {
        2
    } else {
        1
    }
}

/// Whether a cause is the user's input.
fn is_bad_input(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.is::<BadInput>() || cause.downcast_ref::<tilewright::Error>().is_some_and(tilewright::Error::is_input)
}

/// Whether the error is a closed pipe: the reader of our output has read enough, as `head` does.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let closed = |e: &std::io::Error| e.kind() == std::io::ErrorKind::BrokenPipe;
    error.downcast_ref::<crate::output::StdoutError>().is_some_and(|e| closed(&e.0))
}

/// Option that sets a setting.
pub fn option(setting: Setting) -> &'static str {
    match setting {
        Setting::Build => "--build",
        Setting::BuildTimeout => "--build-timeout",
        Setting::Cache => "--cache",
        Setting::Check => "--check",
        Setting::Cleanup => "--cleanup",
        Setting::Command => "--command",
        Setting::Device => "--device",
        Setting::Metric => "--metric",
        Setting::Name => "--name",
        Setting::Prepare => "--prepare",
        Setting::Runner => "--runner",
        Setting::RunTimeout => run_timeout_option(),
        Setting::Threads => "--threads",
        Setting::Transfer => "--transfer",
        Setting::Weights => "--weights",
        // Settings added later have no option until it is listed here.
        _ => "the setting",
    }
}

/// Option that sets the timeout of a run: a command has one of its own, unless the general one is given.
fn run_timeout_option() -> &'static str {
    let is_given = |option: &str| {
        let is_it = |argument: String| {
            argument.strip_prefix(option).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        std::env::args_os().any(|argument| argument.into_string().is_ok_and(is_it))
    };
    if is_given("--command") && !is_given("--run-timeout") { "--timeout" } else { "--run-timeout" }
}

/// Rephrases an error of the library for the command: settings become options, and hints name options.
fn words(error: &tilewright::Error) -> String {
    let advice = match error.kind() {
        ErrorKind::Setting(Setting::Cache) if error.text().ends_with(')') => {
            return format!("--cache{}, or --no-cache)", error.text().trim_end_matches(')'));
        }
        ErrorKind::Setting(setting) => return format!("{}{}", option(*setting), error.text()),
        ErrorKind::NoSearch => "see `tilewright searches`".to_owned(),
        ErrorKind::OtherMachine => "leave --target out; `show` makes code for other machines".to_owned(),
        ErrorKind::NotOnDevice { device } => format!("leave --device {device} out"),
        ErrorKind::WrongDevice { given, wanted } => format!("give --device {wanted}, not {given}"),
        ErrorKind::NotForGpu => "give --target opencl, or --device opencl".to_owned(),
        ErrorKind::NoDatabase => "give another one".to_owned(),
        ErrorKind::NoHome => "give --db FILE".to_owned(),
        ErrorKind::NothingToTransfer => "leave --transfer out".to_owned(),
        ErrorKind::NoName => "give --name NAME: letters, digits and underscores, no digit first".to_owned(),
        ErrorKind::NoCompiler => "or give --as c, which needs none".to_owned(),
        ErrorKind::Unwritable => "give another -o".to_owned(),
        ErrorKind::TimeUp => "give more with --time".to_owned(),
        ErrorKind::NoneRight(Some(limit)) => format!("raise {}, and they are tried again", option(*limit)),
        ErrorKind::LeadersFailed(limits) if limits.is_empty() => "run the same to race others".to_owned(),
        ErrorKind::LeadersFailed(limits) => {
            format!("give more with {}", limits.iter().map(|limit| option(*limit)).collect::<Vec<_>>().join(" and "))
        }
        _ => return error.to_string(),
    };
    format!("{error} ({advice})")
}

/// Formats an error with its causes on one line.
pub fn describe(error: &anyhow::Error) -> String {
    // Errors that print their cause themselves would repeat everything.
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let part = one_line(&cause.downcast_ref().map_or_else(|| cause.to_string(), words));
        if !parts.iter().any(|earlier| earlier.contains(&part)) {
            parts.push(part);
        }
    }
    parts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn errors_are_one_line_with_their_causes() {
        let check = |error: anyhow::Error, text: &str, code: u8| {
            assert_eq!((describe(&error).as_str(), exit_code(&error)), (text, code));
        };
        check(anyhow::anyhow!("a\n  b\tc"), "a b c", 1);
        check(Err::<(), _>(anyhow::anyhow!("inner")).context("outer").unwrap_err(), "outer: inner", 1);
        check(Err::<(), _>(bad_input("inner")).context("outer").unwrap_err(), "outer: inner", 2);
        check(anyhow::anyhow!("inner").context("outer: inner"), "outer: inner", 1);
        check(anyhow::anyhow!("inner").context("outer: inner (advice)"), "outer: inner (advice)", 1);
        check(Err::<(), _>("m=0").or_bad_input("give more").unwrap_err(), "m=0 (give more)", 2);
    }
}
