//! Errors as the command line shows them: one line, and an exit code that says whose fault it is.

use std::fmt;

pub use tilewright::one_line;

/// Error of the user's input or usage: exit code 2.
#[derive(Debug)]
struct BadInput(String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// An error that is the fault of the user's input.
pub fn bad_input(reason: impl fmt::Display) -> anyhow::Error {
    BadInput(reason.to_string()).into()
}

/// Results whose errors are the fault of the user's input.
pub trait OrBadInput<T> {
    /// The value, or the error as bad input with a hint behind it.
    ///
    /// # Errors
    /// The same as before.
    fn or_bad_input(self, hint: &str) -> anyhow::Result<T>;
}

impl<T, E: fmt::Display> OrBadInput<T> for Result<T, E> {
    fn or_bad_input(self, hint: &str) -> anyhow::Result<T> {
        self.map_err(|error| if hint.is_empty() { bad_input(error) } else { bad_input(format!("{error} ({hint})")) })
    }
}

/// The exit code for an error: 2 for bad input, 0 where the reader of our output went away, 1 for all else.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if is_closed_pipe(error) {
        0
    } else if error.chain().any(is_bad_input) {
        2
    } else {
        1
    }
}

/// Whether a cause is the fault of the user's input.
fn is_bad_input(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.is::<BadInput>() || cause.downcast_ref::<tilewright::Error>().is_some_and(tilewright::Error::is_input)
}

/// Whether the error is a closed pipe: the reader of our output has read enough, as `head` does.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let closed = |e: &std::io::Error| e.kind() == std::io::ErrorKind::BrokenPipe;
    error.downcast_ref::<crate::output::StdoutError>().is_some_and(|e| closed(&e.0))
}

/// An error with its causes on one line.
pub fn describe(error: &anyhow::Error) -> String {
    // Errors that print their cause themselves would say everything twice.
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let part = one_line(&cause.to_string());
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
