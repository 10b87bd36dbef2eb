//! The crate's error.

/// Errors of this crate. The fault is the caller's.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LearnError {
    /// Numbers that belong to rows are more or fewer than the rows.
    #[error("{n_rows} rows of features, but {found} {what}")]
    Length {
        /// Name of the numbers.
        what: &'static str,
        /// The rows.
        n_rows: usize,
        /// Number of numbers.
        found: usize,
    },
    /// A number that a model should learn or build on is not one.
    #[error("the {what} of row {row} is {value}, not a finite number")]
    NotFinite {
        /// Name of the number.
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
        /// Valid values.
        expected: &'static str,
    },
}
