//! The crate's error: one variant for each part that can refuse.

use crate::measure::BoxError;
use crate::record::{RecordError, StoreError};
use crate::search::SearchError;
use crate::space::{ConfigError, SpaceError};

/// What this crate can refuse, by the part that refuses.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A space that cannot be built: the template's fault, or the operator's sizes are beyond it.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// A configuration that does not belong to its space: the fault of whoever wrote it.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A search or an option that does not exist: the user's fault.
    #[error(transparent)]
    Search(#[from] SearchError),
    /// A record that cannot be read: the file's fault.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A database that cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The measuring side broke down as a whole (one failed candidate is an outcome, not an error).
    #[error("measuring failed: {0}")]
    Measure(#[source] BoxError),
    /// The observer of the loop refused an event, for example because a record could not be written.
    #[error("recording failed: {0}")]
    Observer(#[source] BoxError),
}
