//! The crate's error: one variant for each part that can refuse.

use crate::record::{RecordError, StoreError};

/// Error of this crate, by the part that refuses.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A record that cannot be read: the file's fault.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A database that cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}
