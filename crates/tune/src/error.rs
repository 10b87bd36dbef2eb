//! The crate's error: one variant for each part that can refuse.

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
