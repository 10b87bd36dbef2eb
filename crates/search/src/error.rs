//! Errors that end a tuning run.

use crate::measure::BoxError;

/// Reason why the tuning loop stopped with an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Failure of the measuring side as a whole. A single candidate that fails is an outcome, not an error.
    #[error("measuring failed: {0}")]
    Measure(#[source] BoxError),
    /// Error returned by the observer of the loop, for example because a record could not be written.
    #[error("recording failed: {0}")]
    Observer(#[source] BoxError),
}
