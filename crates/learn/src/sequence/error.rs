//! Errors of sequence models.

use std::fmt;

/// Kind of file of a model or training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// Weights of a model.
    Weights,
    /// Description of a model.
    Description,
    /// Checkpoint of a training.
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
    /// Missing examples for training or validation.
    #[error("there are no {what} examples")]
    Empty {
        /// Name of the examples.
        what: &'static str,
    },
    /// Example that does not fit the vocabulary.
    #[error("{what} example {index}: {found} {things}, but the vocabulary has {expected}")]
    Mismatch {
        /// Name of the examples.
        what: &'static str,
        /// Index of the example, from 0.
        index: usize,
        /// Name of the things counted.
        things: &'static str,
        /// Number found.
        found: usize,
        /// Number expected.
        expected: usize,
    },
    /// Answer with a value index that its parameter does not have.
    #[error("{what} example {index}: {parameter} has {expected} values, so there is no value {found}")]
    NoSuchValue {
        /// Name of the examples.
        what: &'static str,
        /// Index of the example, from 0.
        index: usize,
        /// The parameter.
        parameter: String,
        /// Index found.
        found: u32,
        /// Number of values of the parameter.
        expected: usize,
    },
    /// Vocabulary that no model can be made for.
    #[error("the vocabulary has {what}")]
    BadVocabulary {
        /// Reason.
        what: String,
    },
    /// Option out of its range.
    #[error("{option} cannot be {value}; it is {expected}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// The value found.
        value: String,
        /// Valid values.
        expected: &'static str,
    },
    /// Training stopped by the progress callback.
    #[error("training was stopped after {epochs} epochs")]
    Stopped {
        /// Number of completed epochs.
        epochs: usize,
    },
    /// Failure to store a checkpoint.
    #[error("the checkpoint cannot be kept: {0}")]
    Unkept(#[source] std::io::Error),
    /// File that is truncated, or of another kind.
    #[error("not {kept}: {reason}")]
    Foreign {
        /// Expected kind of file.
        kept: FileKind,
        /// Evidence for that.
        reason: String,
    },
    /// Checkpoint of another training.
    #[error("a checkpoint of another training: other examples, options or architecture; remove it to begin anew")]
    OtherTraining,
}
