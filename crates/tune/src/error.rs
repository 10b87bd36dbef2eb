//! Error type of the crate.

use crate::record::{RecordError, StoreError};

/// Error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid record in a file.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Failure of the database.
    #[error(transparent)]
    Store(#[from] StoreError),
}
