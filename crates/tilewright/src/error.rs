//! Errors, each in one line.

use std::error::Error as StdError;
use std::fmt;

use tilewright_search::BoxError;

/// Why something was not done: its text says what, where and how to mend it.
#[derive(Debug)]
pub struct Error {
    text: String,
    is_input: bool,
    source: Option<BoxError>,
}

impl Error {
    /// Error of the user's input.
    pub fn input(reason: impl fmt::Display) -> Error {
        Error { text: reason.to_string(), is_input: true, source: None }
    }

    /// Error of something that failed on the way.
    pub fn failed(reason: impl fmt::Display) -> Error {
        Error { text: reason.to_string(), is_input: false, source: None }
    }

    /// Adds the error that caused this one.
    #[must_use]
    pub fn because(self, source: impl Into<BoxError>) -> Error {
        Error { source: Some(source.into()), ..self }
    }

    /// Whether the input is at fault, rather than an event during the work.
    pub fn is_input(&self) -> bool {
        self.is_input
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

/// Text on one line: line breaks and other control characters become blanks, runs of blanks one blank.
pub fn one_line(text: &str) -> String {
    let blank = |c: char| c.is_whitespace() || c.is_control();
    let words: Vec<&str> = text.split(blank).filter(|word| !word.is_empty()).collect();
    words.join(" ")
}
