//! Database: the SQLite file of the records.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::{Connection, ErrorCode, MAIN_DB, OpenFlags};
use tilewright_device::limits::Allowed;
use tilewright_tune::{Store, StoreError};

use crate::error::{Error, ErrorKind, one_line};
use crate::shared::SharedStore;

/// Location of the records: an SQLite file, perhaps with a shared store behind it.
#[derive(Debug, Clone)]
pub struct Database {
    /// Path of the file.
    pub path: PathBuf,
    /// Whether the user named it.
    is_given: bool,
    /// Option by which the user named it, or would.
    option: Option<&'static str>,
    /// Store of winners that is queried for workloads without records here.
    shared: Option<Arc<SharedStore>>,
}

impl Database {
    /// Database in the given file, or in the default one in the user's data folder.
    ///
    /// # Errors
    /// If the name is empty, or none is given and the user has no data folder.
    pub fn new(given: Option<&Path>) -> Result<Database, Error> {
        if let Some(path) = given {
            if path.as_os_str().is_empty() {
                return Err(Error::input("the name of the database's file is empty (give a path)"));
            }
            return Ok(Database { path: path.to_owned(), is_given: true, option: None, shared: None });
        }
        let absolute = |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|p| p.is_absolute());
        let folder = absolute("XDG_DATA_HOME").or_else(|| Some(absolute("HOME")?.join(".local/share")));
        let none = || Error::of(ErrorKind::NoHome, "there is no home folder to keep records in");
        let path = folder.ok_or_else(none)?.join("tilewright").join("records.db");
        Ok(Database { path, is_given: false, option: None, shared: None })
    }

    /// Sets the option that names the file, for messages.
    #[must_use]
    pub fn called(self, option: &'static str) -> Database {
        Database { option: Some(option), ..self }
    }

    /// Sets the shared store that is queried for workloads without records here.
    #[must_use]
    pub fn before(self, shared: Option<Arc<SharedStore>>) -> Database {
        Database { shared, ..self }
    }

    /// Shared store that is queried for workloads without records here.
    pub fn shared(&self) -> Option<&Arc<SharedStore>> {
        self.shared.as_ref()
    }

    /// Whether the user named the file, rather than taking the default.
    pub fn is_given(&self) -> bool {
        self.is_given
    }

    /// Name of the file, for messages.
    pub fn name(&self) -> String {
        one_line(&self.path.display().to_string())
    }

    /// Opens the store for writing; creates it if it does not exist.
    ///
    /// # Errors
    /// If the file cannot be written or is not ours; this is bad input if the user named the file.
    pub fn open_to_write(&self) -> Result<Opened, Error> {
        if !self.is_given
            && let Some(folder) = self.path.parent()
        {
            let cannot = |error: io::Error| Error::failed(format!("cannot create {}", folder.display())).because(error);
            std::fs::create_dir_all(folder).map_err(cannot)?;
        }
        let connection = self.connect(OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)?;
        if connection.is_readonly(MAIN_DB).map_err(|e| self.refuse(e.into()))? {
            return Err(self.refuse(StoreError::ReadOnly));
        }
        let store = Store::new(connection).map_err(|e| self.refuse(e))?;
        let is_linked = self.path.metadata().is_ok_and(|file| file.nlink() > 1);
        let advice = "use one name at a time, or it will be damaged";
        let warning = is_linked.then(|| format!("{} has another name, a hard link: {advice}", self.label()));
        Ok(Opened { store, database: self.clone(), file: self.file(), warning })
    }

    /// Identity of the file at the path, if any: its device and its number there.
    fn file(&self) -> Option<(u64, u64)> {
        self.path.metadata().ok().map(|file| (file.dev(), file.ino()))
    }

    /// Opens the store for reading; `None` if the file does not exist.
    ///
    /// # Errors
    /// If the file cannot be read or is not ours; this is bad input if the user named the file.
    pub fn open_to_read(&self) -> Result<Option<Store>, Error> {
        if self.path.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(None);
        }
        // Reading a database in use requires write access to the index of its log. SQLite itself opens a file
        // that is not writable as read-only.
        let connection = self.connect(OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        match Store::new(connection) {
            Ok(store) => Ok(Some(store)),
            // Either error is possible if the folder or the file system is read-only.
            Err(StoreError::ReadOnly) => self.open_at_rest().map(Some),
            Err(StoreError::Sqlite(error)) if error.sqlite_error_code() == Some(ErrorCode::CannotOpen) => {
                self.open_at_rest().map(Some)
            }
            Err(error) => Err(self.refuse(error)),
        }
    }

    /// Opens a store that must exist.
    ///
    /// # Errors
    /// As [`Database::open_to_read`], and bad input if there is no file.
    pub fn open_existing(&self) -> Result<Store, Error> {
        let none = || Error::of(ErrorKind::NoDatabase, format!("there is no database {}", self.name()));
        self.open_to_read()?.ok_or_else(none)
    }

    /// Opens the store in a folder that cannot be written, where SQLite has no place for the index of the
    /// log. If there is no log with content beside the file, no process is writing the file either.
    fn open_at_rest(&self) -> Result<Store, Error> {
        let log = with_suffix(&self.path, "-wal");
        if log.metadata().is_ok_and(|log| log.len() > 0) {
            let both = format!("{} and {}", self.name(), log.display());
            let reason =
                "its last records are in the log beside it, which can be read only where the folder can be written";
            return Err(self.fault(&format!("{reason}; copy {both} into a folder of yours")));
        }
        let mut uri = "file:".to_owned();
        for &byte in self.path.as_os_str().as_bytes() {
            match byte {
                b'/' | b'.' | b'-' | b'_' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => uri.push(char::from(byte)),
                _ => uri += &format!("%{byte:02X}"),
            }
        }
        uri += "?immutable=1";
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(uri, flags).map_err(|e| self.refuse(e.into()))?;
        Store::new(connection).map_err(|e| self.refuse(e))
    }

    fn connect(&self, flags: OpenFlags) -> Result<Connection, Error> {
        match self.path.metadata() {
            Ok(there) if there.is_dir() => return Err(self.fault("it is a folder")),
            Ok(there) if !there.is_file() => return Err(self.fault("it is no plain file")),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(self.fault(&format!("cannot be reached: {error}")));
            }
            _ => {}
        }
        if let Some(folder) = self.path.parent().filter(|f| !f.as_os_str().is_empty() && !f.is_dir()) {
            return Err(self.fault(&format!("there is no folder {}", folder.display())));
        }
        // Names such as `:memory:` and `file:…` are special to SQLite, but not with a folder before them.
        let plain = if self.path.is_absolute() { self.path.clone() } else { Path::new(".").join(&self.path) };
        Connection::open_with_flags(plain, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX).map_err(|e| self.refuse(e.into()))
    }

    /// Error of a store that cannot be opened, with the file's name and a hint to mend it; bad input if the
    /// user named the file.
    pub fn refuse(&self, error: StoreError) -> Error {
        match error {
            StoreError::Busy { .. } | StoreError::Full | StoreError::Gone => self.failure(&error),
            _ if self.is_given => Error::input(self.failure(&error)),
            _ => self.failure(&error),
        }
    }

    /// Error of a store during a run, with the file's name and a hint to mend it.
    pub fn failure(&self, error: &StoreError) -> Error {
        let another = self.another();
        let name = self.name();
        let advice = match error {
            StoreError::Full => "make room and run the same again".to_owned(),
            StoreError::Busy { .. } => "run the same again when it is free".to_owned(),
            StoreError::Gone => "run the same again".to_owned(),
            StoreError::NewerSchema { .. } => format!("a newer version of tilewright wrote it; {another}"),
            StoreError::NotADatabase => format!("{another}, or move this one away"),
            StoreError::Damaged(_) => {
                format!("{another}, or move this one away, with {name}-wal and {name}-shm where they are there")
            }
            StoreError::Sqlite(error)
                if error.sqlite_error_code() == Some(ErrorCode::SystemIoFailure)
                    && let Some(bytes) = Allowed::here().file_bytes =>
            {
                format!("files may have no more than {bytes} bytes: raise `ulimit -f`, or {another}")
            }
            StoreError::Sqlite(error)
                if error.sqlite_error_code() == Some(ErrorCode::SystemIoFailure)
                    && with_suffix(&self.path, "-wal").exists() =>
            {
                format!("{another}, or wait for runs that still use a deleted one with {name}-wal and {name}-shm")
            }
            _ => another,
        };
        Error::failed(format!("{}: {error} ({advice})", self.label()))
    }

    fn fault(&self, reason: &str) -> Error {
        let text = format!("{}: {reason} ({})", self.label(), self.another());
        if self.is_given { Error::input(text) } else { Error::failed(text) }
    }

    fn another(&self) -> String {
        self.option.map_or("give another file".to_owned(), |option| format!("give another file with {option}"))
    }

    fn label(&self) -> String {
        format!("database {}", self.name())
    }
}

/// Store that is open for writing, with its file.
#[derive(Debug)]
pub struct Opened {
    /// The store.
    pub store: Store,
    /// Database that it belongs to.
    pub database: Database,
    /// Identity of the file, as of [`Database::file`].
    file: Option<(u64, u64)>,
    /// Warning about the file, if it has further names (hard links).
    pub warning: Option<String>,
}

impl Opened {
    /// Checks that the open store is still the file at the path.
    ///
    /// # Errors
    /// [`StoreError::Gone`] if the file was deleted, moved or replaced. SQLite then leaves the log beside
    /// the path alone, which may be another file's by now.
    pub fn check(&self) -> Result<(), StoreError> {
        let is_there = self.file.is_some() && self.file == self.database.file();
        if is_there { Ok(()) } else { Err(StoreError::Gone) }
    }
}

/// Path with a suffix appended to its file name, after any extension.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut longer = path.as_os_str().to_owned();
    longer.push(suffix);
    longer.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_at_rest_is_read_unless_its_log_has_records() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::new(Some(&folder.path().join("a b.db"))).unwrap();
        let log = with_suffix(&database.path, "-wal");
        drop(database.open_to_write().unwrap());
        assert!(database.open_at_rest().is_ok());
        std::fs::write(&log, "").unwrap();
        assert!(database.open_at_rest().is_ok(), "there is nothing in it");
        std::fs::write(&log, "frames").unwrap();
        let Err(error) = database.open_at_rest() else { panic!("what is in the log is not read") };
        let error = error.to_string();
        assert!(error.contains("copy") && error.contains("a b.db-wal into a folder"), "{error}");
    }
}
