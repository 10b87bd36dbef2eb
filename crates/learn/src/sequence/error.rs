//! The module's error.

use std::path::PathBuf;

/// What can go wrong while a model is trained, saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum SequenceError {
    /// No example to learn from, or none to validate with.
    #[error("there are no {what} examples")]
    Empty {
        /// Which ones.
        what: &'static str,
    },
    /// An example that does not fit the vocabulary.
    #[error("{what} example {index}: {found} {things}, but the vocabulary has {expected}")]
    Mismatch {
        /// Of which examples.
        what: &'static str,
        /// Which one, from 0.
        index: usize,
        /// What is counted.
        things: &'static str,
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// An answer holds a value that its parameter does not have.
    #[error("{what} example {index}: {parameter} has {expected} values, so there is no value {found}")]
    NoSuchValue {
        /// Of which examples.
        what: &'static str,
        /// Which one, from 0.
        index: usize,
        /// The parameter.
        parameter: String,
        /// The index found.
        found: u32,
        /// How many values there are.
        expected: usize,
    },
    /// A vocabulary that no model can be made for.
    #[error("the vocabulary has {what}")]
    BadVocabulary {
        /// What is wrong with it.
        what: String,
    },
    /// An option out of its range.
    #[error("{option} cannot be {value}; it is {expected}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// The value found.
        value: String,
        /// What it can be.
        expected: &'static str,
    },
    /// The caller's progress function broke training off.
    #[error("training was stopped after {epochs} epochs")]
    Stopped {
        /// The epochs that were done.
        epochs: usize,
    },
    /// A file cannot be read or written.
    #[error("{}: cannot {action}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A file is not what it should be: truncated, or something else.
    #[error("{}: not {expected}: {reason}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it should be.
        expected: &'static str,
        /// What gives it away.
        reason: String,
    },
    /// A checkpoint belongs to another training.
    #[error("{}: a checkpoint of another training: other examples, options or architecture; remove it to begin anew", path.display())]
    OtherTraining {
        /// The checkpoint.
        path: PathBuf,
    },
}
