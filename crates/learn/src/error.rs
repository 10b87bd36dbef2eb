//! Error type of the crate.

/// Error of this crate: invalid arguments of the caller.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum LearnError {
    /// Per-row values whose number differs from the number of rows.
    #[error("{n_rows} rows of features, but {found} {what}")]
    Length {
        /// Name of the values.
        what: &'static str,
        /// Number of rows.
        n_rows: usize,
        /// Number of values.
        found: usize,
    },
    /// Value that is not finite.
    #[error("the {what} of row {row} is {value}, not a finite number")]
    NotFinite {
        /// Name of the value.
        what: &'static str,
        /// Index of the row.
        row: usize,
        /// The number.
        value: f32,
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
}
