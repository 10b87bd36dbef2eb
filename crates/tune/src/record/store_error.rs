//! Reasons why a store cannot be used.

use std::io;
use std::time::Duration;

use rusqlite::ErrorCode;

/// Timeout of the wait for another process that is writing.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file is something else.
    #[error("not a database")]
    NotADatabase,
    /// The file is a database of another program.
    #[error("a database of another program (application id {application_id:#x})")]
    Foreign {
        /// The mark of that program; 0 where it sets none.
        application_id: i32,
    },
    /// A file that a later version wrote.
    #[error("schema version {found}; this version knows up to {known}")]
    NewerSchema {
        /// The version of the file.
        found: i32,
        /// The latest version known.
        known: i32,
    },
    /// The file, its folder or the connection does not allow writing.
    #[error("not writable")]
    ReadOnly,
    /// No space is left.
    #[error("disk or database full")]
    Full,
    /// Another process held the file for longer than we wait.
    #[error("locked by another process for {} s", .waited.as_secs())]
    Busy {
        /// Time that was waited.
        waited: Duration,
    },
    /// The file is damaged.
    #[error("damaged: {0}")]
    Damaged(String),
    /// The file is no longer where it was opened: what is written to it is lost.
    #[error("deleted, moved or replaced while it was in use: what was recorded since is not in it")]
    Gone,
    /// The records could not be written out.
    #[error("cannot write: {0}")]
    Write(#[source] io::Error),
    /// Any other failure of the database.
    #[error("{0}")]
    Sqlite(#[source] rusqlite::Error),
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> StoreError {
        match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase) => StoreError::NotADatabase,
            Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => StoreError::ReadOnly,
            Some(ErrorCode::DiskFull) => StoreError::Full,
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => StoreError::Busy { waited: BUSY_TIMEOUT },
            Some(ErrorCode::DatabaseCorrupt) => StoreError::Damaged(error.to_string()),
            _ => StoreError::Sqlite(error),
        }
    }
}
