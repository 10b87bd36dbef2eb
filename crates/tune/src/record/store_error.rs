//! Reasons why a store cannot be used.

use std::io;
use std::time::Duration;

use rusqlite::ErrorCode;

/// Timeout of the wait for another process that is writing.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// File that is not a database.
    #[error("not a database")]
    NotADatabase,
    /// Database of another program.
    #[error("a database of another program (application id {application_id:#x})")]
    Foreign {
        /// Application id of that program; 0 if it sets none.
        application_id: i32,
    },
    /// File written by a later version.
    #[error("schema version {found}; this version knows up to {known}")]
    NewerSchema {
        /// Schema version of the file.
        found: i32,
        /// Latest schema version known.
        known: i32,
    },
    /// Location that cannot be written: the file, its folder or the connection.
    #[error("not writable")]
    ReadOnly,
    /// Full disk.
    #[error("disk or database full")]
    Full,
    /// Timeout while another process held the file locked.
    #[error("locked by another process for {} s", .waited.as_secs())]
    Busy {
        /// Time waited.
        waited: Duration,
    },
    /// Damaged file.
    #[error("damaged: {0}")]
    Damaged(String),
    /// File that is no longer at its path, so that writes would be lost.
    #[error("deleted, moved or replaced while it was in use: what was recorded since is not in it")]
    Gone,
    /// Failed output of records.
    #[error("cannot write: {0}")]
    Write(#[source] io::Error),
    /// Other failure of SQLite.
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
