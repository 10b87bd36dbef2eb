//! Errors that end a run.

use crate::measure::BoxError;

/// Reason why the loop gave a run up: one of the two parts that it asks broke down.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The measuring side broke down as a whole (one failed candidate is an outcome, not an error).
    #[error("measuring failed: {0}")]
    Measure(#[source] BoxError),
    /// The observer of the loop refused an event, for example because a record could not be written.
    #[error("recording failed: {0}")]
    Observer(#[source] BoxError),
}
