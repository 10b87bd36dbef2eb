//! The crate's error.

use crate::baselines::Baseline;

/// What this crate can refuse. The fault is the caller's.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LearnError {
    /// Numbers that belong to rows are more or fewer than the rows.
    #[error("{n_rows} rows of features, but {found} {what}")]
    Length {
        /// What there should be one of for each row.
        what: &'static str,
        /// The rows.
        n_rows: usize,
        /// How many there are.
        found: usize,
    },
    /// A number that a model should learn or build on is not one.
    #[error("the {what} of row {row} is {value}, not a finite number")]
    NotFinite {
        /// What the number is.
        what: &'static str,
        /// The row.
        row: usize,
        /// The number.
        value: f32,
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
    /// A classifier that fails on the rows it was given.
    #[error("{baseline:?} failed: {reason}")]
    Baseline {
        /// The classifier.
        baseline: Baseline,
        /// What it says.
        reason: String,
    },
}
