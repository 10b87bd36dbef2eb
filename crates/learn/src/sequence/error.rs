//! The module's error.

use std::fmt;

/// What is kept of models and trainings, each in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// A model's numbers.
    Weights,
    /// All else about a model.
    Description,
    /// The state of a training.
    Checkpoint,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kept::Weights => "the weights of this model",
            Kept::Description => "the description of a model",
            Kept::Checkpoint => "a checkpoint",
        })
    }
}

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
    /// The caller could not keep a checkpoint.
    #[error("the checkpoint cannot be kept: {0}")]
    Unkept(#[source] std::io::Error),
    /// Bytes are not what they should be: truncated, or something else.
    #[error("not {kept}: {reason}")]
    Foreign {
        /// What they should be.
        kept: Kept,
        /// What gives them away.
        reason: String,
    },
    /// A checkpoint belongs to another training.
    #[error("a checkpoint of another training: other examples, options or architecture; remove it to begin anew")]
    OtherTraining,
}
