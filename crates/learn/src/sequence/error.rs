//! The module's error.

use std::fmt;

/// Files of models and trainings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A model's numbers.
    Weights,
    /// All else about a model.
    Description,
    /// The state of a training.
    Checkpoint,
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FileKind::Weights => "the weights of this model",
            FileKind::Description => "the description of a model",
            FileKind::Checkpoint => "a checkpoint",
        })
    }
}

/// Reason why a model cannot be trained, saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum SequenceError {
    /// No examples to train on, or none to validate on.
    #[error("there are no {what} examples")]
    Empty {
        /// Name of the examples.
        what: &'static str,
    },
    /// An example that does not fit the vocabulary.
    #[error("{what} example {index}: {found} {things}, but the vocabulary has {expected}")]
    Mismatch {
        /// Name of the examples.
        what: &'static str,
        /// Index of the example, from 0.
        index: usize,
        /// Name of the counted things.
        things: &'static str,
        /// Number found.
        found: usize,
        /// Number expected.
        expected: usize,
    },
    /// An answer holds a value that its parameter does not have.
    #[error("{what} example {index}: {parameter} has {expected} values, so there is no value {found}")]
    NoSuchValue {
        /// Name of the examples.
        what: &'static str,
        /// Index of the example, from 0.
        index: usize,
        /// The parameter.
        parameter: String,
        /// The index found.
        found: u32,
        /// Number of values of the parameter.
        expected: usize,
    },
    /// A vocabulary that no model can be made for.
    #[error("the vocabulary has {what}")]
    BadVocabulary {
        /// Reason.
        what: String,
    },
    /// An option out of its range.
    #[error("{option} cannot be {value}; it is {expected}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// The value found.
        value: String,
        /// Valid values.
        expected: &'static str,
    },
    /// The caller's progress function broke training off.
    #[error("training was stopped after {epochs} epochs")]
    Stopped {
        /// The epochs that were done.
        epochs: usize,
    },
    /// The caller could not keep a checkpoint.
    #[error("the checkpoint cannot be kept: {0}")]
    Unkept(#[source] std::io::Error),
    /// Bytes are not what they should be: truncated, or something else.
    #[error("not {kept}: {reason}")]
    Foreign {
        /// Kind of file expected.
        kept: FileKind,
        /// Evidence that the file is another.
        reason: String,
    },
    /// A checkpoint belongs to another training.
    #[error("a checkpoint of another training: other examples, options or architecture; remove it to begin anew")]
    OtherTraining,
}
