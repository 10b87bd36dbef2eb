//! Writing of shared stores.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use tilewright_tune::record::{Imported, RecordLine};

use super::entry::{Entry, EntryKey, folder_of, improve, parse, print};
use super::store_location::StoreLocation;
use super::{INDEX, MARK, MOST_ENTRY_BYTES, SharedStore, VERSION, names_below};
use crate::database::Database;
use crate::error::{Error, one_line};
use crate::file::write_whole;
use crate::import::LineValidator;
use crate::observer::Observer;
use crate::subject::own::is_own;

/// Time to wait for other writers to finish.
const PATIENCE: Duration = Duration::from_secs(30);

/// Counts of what was written to a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pushed {
    /// Number of winners offered.
    pub read: u64,
    /// Number of winners that were better than those in the store, and so were written.
    pub better: u64,
    /// Number of winners that were refused.
    pub refused: u64,
}

/// Factory of errors about a store's files, with the store's name.
struct Faults(String);

impl Faults {
    fn of(&self, path: &Path, error: &io::Error) -> Error {
        let hint = "give a folder that can be written";
        Error::input(format!("{}: cannot write {}: {error} ({hint})", self.0, one_line(&path.display().to_string())))
    }
}

impl Database {
    /// Winners of races on this machine, as entries of a store. Those of users' commands and kernels are left
    /// out.
    ///
    /// # Errors
    /// If there is no database, or it cannot be read.
    pub fn winners(&self) -> Result<Vec<Entry>, Error> {
        let mut winners = Vec::new();
        let gather = &mut |line: RecordLine| {
            let is_raced_here = line.winner.as_ref().is_some_and(|winner| winner.verified && !winner.is_imported);
            winners
                .extend(Some(line).filter(|line| is_raced_here && !is_own(&line.record.workload)).and_then(Entry::new));
            Ok(())
        };
        self.open_existing()?.each_line(gather).map_err(|error| self.refuse(error))?;
        Ok(winners)
    }

    /// Imports the winners of a store, for a machine by the name of its target, or for all.
    ///
    /// # Errors
    /// If the store cannot be read, or the database cannot be written.
    pub fn pull(&self, store: &SharedStore, machine: Option<&str>, observer: &dyn Observer) -> Result<Imported, Error> {
        let lines: String = store.winners(machine)?.iter().map(|winner| winner.line.to_text() + "\n").collect();
        self.import_once(lines.as_bytes(), &store.name(), observer)
    }
}

impl SharedStore {
    /// Writes winners to the store, each if it is better than the stored one of its template and version;
    /// initialises a missing or empty folder as a store. Implausible winners are left out, with a note.
    ///
    /// # Errors
    /// Bad input if the store is a server's or cannot be written, the folder holds something else, or
    /// another process writes for longer than half a minute.
    pub fn push(&self, winners: Vec<Entry>) -> Result<Pushed, Error> {
        let StoreLocation::Folder(folder) = &self.place else {
            return Err(Error::input(format!("{} is read-only (give the folder that is served)", self.name())));
        };
        let faults = Faults(self.name());
        fs::create_dir_all(folder).map_err(|error| faults.of(folder, &error))?;
        let _lock = locked(&self.name(), folder)?;
        self.check_place(folder)?;
        let mut pushed = Pushed { read: winners.len() as u64, ..Pushed::default() };
        let mut by_key: BTreeMap<EntryKey, Vec<Entry>> = BTreeMap::new();
        let mut importer = LineValidator::default();
        for winner in winners {
            match admitted(&mut importer, winner) {
                Ok(winner) => by_key.entry(winner.key()).or_default().push(winner),
                Err(why) => {
                    pushed.refused += 1;
                    self.note(&why);
                }
            }
        }
        let targets: BTreeSet<String> = by_key.keys().map(|key| folder_of(&key.target)).collect();
        for (key, winners) in by_key {
            pushed.better += self.improve(folder, &key, winners)?;
        }
        for target in &targets {
            write_index(&folder.join(target)).map_err(|error| faults.of(&folder.join(target), &error))?;
        }
        let known = self.targets().map(|known| known.iter().cloned().collect()).unwrap_or_default();
        let mark = format!("{VERSION}\n{}", targets.union(&known).map(|name| format!("{name}\n")).collect::<String>());
        let path = folder.join(MARK);
        write_whole(&path, |file| file.write_all(mark.as_bytes())).map_err(|error| faults.of(&path, &error))?;
        *self.targets.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = None;
        Ok(pushed)
    }

    /// Checks that the folder is a store, or empty.
    fn check_place(&self, folder: &Path) -> Result<(), Error> {
        let names = StoreLocation::names_in(folder).map_err(|error| Faults(self.name()).of(folder, &error))?;
        match self.targets() {
            Ok(_) => Ok(()),
            Err(_) if names.is_empty() => Ok(()),
            Err(_) if !names.iter().any(|name| name == MARK) => {
                Err(Error::input(format!("{}: the folder holds something else (give one of its own)", self.name())))
            }
            Err(why) => Err(Error::input(format!("{}: {why}", self.name()))),
        }
    }

    /// Adds winners to their entry; returns how many of them are better than the stored ones.
    fn improve(&self, folder: &Path, key: &EntryKey, new: Vec<Entry>) -> Result<u64, Error> {
        let path = key.path();
        let text = self.place.read(&path, MOST_ENTRY_BYTES).map_err(Error::failed)?;
        // A damaged entry is replaced, and so is the entry of another key with the same name.
        let mut winners = text.and_then(|text| parse(&path, &text).ok()).unwrap_or_default();
        winners.retain(|winner| winner.key() == *key);
        let n_better = new.into_iter().filter(|new| improve(&mut winners, new.clone())).count();
        if n_better > 0 {
            let path: PathBuf = folder.join(path);
            let write = || {
                fs::create_dir_all(path.parent().expect("an entry lies in a folder"))?;
                write_whole(&path, |file| file.write_all(print(&winners).as_bytes()))
            };
            write().map_err(|error| Faults(self.name()).of(&path, &error))?;
        }
        Ok(n_better as u64)
    }
}

/// Winner as this version writes it, if it is plausible. Winners of another version's spaces stay as they
/// are.
///
/// # Errors
/// If it is implausible, with the reason in one line.
pub(super) fn admitted(importer: &mut LineValidator, winner: Entry) -> Result<Entry, String> {
    let refused = |why: String| format!("the entry of {} is refused: {why}", winner.line.record.workload);
    if is_own(&winner.line.record.workload) {
        return Err(refused("commands and kernels of users stay on their machine".to_owned()));
    }
    let (line, _) = importer.check(winner.line.clone()).map_err(refused)?;
    Ok(if line.winner.is_some() { Entry { line, ..winner } } else { winner })
}

/// Writes the list of a target's entries into the target's folder.
pub(super) fn write_index(folder: &Path) -> io::Result<()> {
    let names = names_below(folder)?;
    let names: BTreeSet<&String> = names.iter().collect();
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    write_whole(&folder.join(INDEX), |file| file.write_all(text.as_bytes()))
}

/// Locks the store of this name against other writers until the file is dropped.
///
/// # Errors
/// If the folder cannot be opened, or others write for longer than half a minute.
pub(super) fn locked(name: &str, folder: &Path) -> Result<File, Error> {
    lock(folder).map_err(|error| Faults(name.to_owned()).of(folder, &error))
}

fn lock(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process writes to it"));
            }
            Err(error) => return Err(error.into()),
        }
    }
}
