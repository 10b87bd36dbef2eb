//! Stores of winners that machines share: a folder, or a copy of one that an HTTP server serves.
//!
//! ```text
//! tilewright-store               "tilewright store 1", then the folders of targets, a line each
//! x86_64-znver5-512/index        names of entries, a line each
//! x86_64-znver5-512/3f/3f….jsonl an entry
//! ```
//!
//! An entry has the winners of a workload on a target with some number of threads: records as JSON lines, the
//! fastest of each template and each version of its space. It is replaced as a whole, so that a concurrent
//! reader sees the entry before or after and takes no lock. A reader checks that entries are plausible, as an
//! import does; a server that does not answer is asked only once.

mod entry;
mod first_use;
mod push;
mod store_location;
mod verify;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tilewright_ir::op::Workload;
use tilewright_tune::record::RejectReason;
use tilewright_tune::{PassedOver, Winner};

pub use entry::{Entry, EntryKey};
pub use push::Pushed;
pub use verify::Verified;

use crate::best::{Best, validators};
use crate::error::Error;
use crate::version::{RELEASE, release_of};
use entry::{ENDING, folder_of, is_name, parse, place_of};
use store_location::StoreLocation;

/// Environment variable that names the shared store if no option does.
pub const STORE_VARIABLE: &str = "TILEWRIGHT_STORE";

/// Name of the file that marks a store.
const MARK: &str = "tilewright-store";
/// First line of that file.
const VERSION: &str = "tilewright store 1";
/// Name of the list of a target's entries.
const INDEX: &str = "index";
/// Maximum sizes in bytes of an entry, of the mark, and of the list of a target's entries.
const MOST_ENTRY_BYTES: u64 = 4 << 20;
const MOST_MARK_BYTES: u64 = 1 << 20;
const MOST_INDEX_BYTES: u64 = 256 << 20;
/// Maximum number of notes that are kept.
const MOST_NOTES: usize = 5;

/// Store of race winners, shared by machines.
#[derive(Debug)]
pub struct SharedStore {
    place: StoreLocation,
    /// Names of entries by the target's folder, for a store on a server: one request instead of one for each
    /// missing entry.
    names: Mutex<HashMap<String, Arc<HashSet<String>>>>,
    /// Folders of targets, once the mark has been read.
    targets: Mutex<Option<Arc<Vec<String>>>>,
    is_lost: AtomicBool,
    notes: Mutex<Vec<String>>,
}

/// Visitor of a store's entries: receives the path of each, and its winners or the reason why it cannot be
/// used.
pub type Visit<'a> = &'a mut dyn FnMut(&str, Result<Vec<Entry>, String>) -> Result<(), Error>;

impl SharedStore {
    /// Store at a folder, or at an address such as `http://host/path`.
    ///
    /// # Errors
    /// Bad input if the text is neither. Nothing is read yet.
    pub fn new(place: &str) -> Result<SharedStore, Error> {
        Ok(SharedStore {
            place: StoreLocation::parse(place)?,
            names: Mutex::default(),
            targets: Mutex::default(),
            is_lost: AtomicBool::new(false),
            notes: Mutex::default(),
        })
    }

    /// Store at the given location, else at that of [`STORE_VARIABLE`]; `None` without either.
    ///
    /// # Errors
    /// As [`SharedStore::new`].
    pub fn of_user(given: Option<&str>) -> Result<Option<Arc<SharedStore>>, Error> {
        let of_environment = || std::env::var(STORE_VARIABLE).ok().filter(|place| !place.is_empty());
        let place = given.map(str::to_owned).or_else(of_environment);
        place.map(|place| SharedStore::new(&place).map(Arc::new)).transpose()
    }

    /// Name of the store, for messages.
    pub fn name(&self) -> String {
        format!("store {}", self.place)
    }

    /// Location of the store, as [`SharedStore::new`] takes it.
    pub fn place(&self) -> String {
        self.place.to_string()
    }

    /// Warnings since the last call about entries that could not be used.
    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds a line about something that could not be used.
    pub(crate) fn note(&self, why: &str) {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        if notes.len() < MOST_NOTES {
            notes.push(format!("{}: {why}", self.name()));
        }
    }

    /// Finds the fastest plausible winner of a workload, of one template or of all, and counts implausible
    /// ones. A store that cannot be read has none, and a note says so.
    pub(crate) fn best(
        &self,
        workload: &Workload,
        target: &str,
        threads: u32,
        template: Option<&str>,
    ) -> (Option<Best>, PassedOver) {
        let mut passed_over = PassedOver::default();
        let key = EntryKey { workload: workload.to_string(), target: target.to_owned(), threads };
        let mut winners = self.entry(&key).unwrap_or_default();
        winners.retain(|winner| template.is_none_or(|template| winner.line.record.template == template));
        winners.sort_by(|a, b| a.median_ns().total_cmp(&b.median_ns()));
        let validators = validators(workload, target, threads);
        for winner in winners {
            let record = &winner.line.record;
            let validator = validators(&record.template);
            match validator.reject_reason(&record.config, Some(winner.median_ns())) {
                None => {
                    let best = winner.line.winner.as_ref().map(|raced| self.best_of(workload, raced));
                    return (best, passed_over);
                }
                Some(reason) => {
                    passed_over.count(reason);
                    if reason == RejectReason::TooFast {
                        let (ns, least) = (winner.median_ns(), validator.least_ns());
                        self.refuse(workload, &format!("{ns} ns is faster than the machine can be ({least:.1} ns)"));
                    } else if Entry::new(winner.line.clone()).is_some_and(|ours| ours.space == winner.space) {
                        self.refuse(workload, "its configuration is not of the space that it names");
                    }
                }
            }
        }
        (None, passed_over)
    }

    fn best_of(&self, workload: &Workload, winner: &Winner) -> Best {
        Best {
            is_imported: true,
            store: Some(self.place.to_string()),
            is_of_this_release: winner.verified && release_of(&winner.version) == RELEASE,
            ..Best::of_winner(workload, winner)
        }
    }

    /// Notes that an entry is not used.
    pub(crate) fn refuse(&self, workload: &Workload, why: &str) {
        self.note(&format!("the entry of {workload} is refused: {why}"));
    }

    /// Winners of an entry; `None` if it is missing, or cannot be read, which is noted.
    fn entry(&self, key: &EntryKey) -> Option<Vec<Entry>> {
        if self.is_lost.load(Ordering::Relaxed) {
            return None;
        }
        let path = key.path();
        let lost = |why: String| {
            self.is_lost.store(true, Ordering::Relaxed);
            self.note(&format!("{why} (it is not used)"));
        };
        self.targets().map_err(lost).ok()?;
        if matches!(self.place, StoreLocation::Http(..)) {
            let names = self.names(&folder_of(&key.target)).map_err(lost).ok()?;
            if !names.contains(&key.name()) {
                return None;
            }
        }
        let text = self.place.read(&path, MOST_ENTRY_BYTES).map_err(lost).ok()??;
        let refused = |why: String| self.note(&format!("the entry of {} is refused: {why}", key.workload));
        let winners = parse(&path, &text).map_err(refused).ok()?;
        (winners[0].key() == *key).then_some(winners)
    }

    /// Folders of targets, once the mark has been checked.
    ///
    /// # Errors
    /// If it is not a store, is of a later version, or cannot be read.
    fn targets(&self) -> Result<Arc<Vec<String>>, String> {
        let mut known = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(targets) = &*known {
            return Ok(Arc::clone(targets));
        }
        let mark = self.place.read(MARK, MOST_MARK_BYTES)?;
        let mark = mark.ok_or("there is no store (`tilewright store push` makes one)")?;
        let text = String::from_utf8(mark).map_err(|_| format!("{MARK} is no text"))?;
        let mut lines = text.lines();
        match lines.next() {
            Some(VERSION) => {}
            Some(other) if other.starts_with("tilewright store ") => {
                return Err("a newer version of tilewright wrote it".to_owned());
            }
            _ => return Err(format!("{MARK} is not that of a store")),
        }
        let targets = lines.filter(|line| !line.is_empty() && folder_of(line) == **line).map(str::to_owned).collect();
        Ok(Arc::clone(known.insert(Arc::new(targets))))
    }

    /// Names of a target's entries, from its list or from the folder's content.
    ///
    /// # Errors
    /// If they cannot be read, or the list is truncated.
    fn names(&self, target: &str) -> Result<Arc<HashSet<String>>, String> {
        let mut known = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(names) = known.get(target) {
            return Ok(Arc::clone(names));
        }
        let names = match &self.place {
            StoreLocation::Folder(folder) => {
                names_below(&folder.join(target)).map_err(|error| format!("{target}: {error}"))?
            }
            StoreLocation::Http(..) => {
                let path = format!("{target}/{INDEX}");
                let list = self.place.read(&path, MOST_INDEX_BYTES)?.unwrap_or_default();
                let list = String::from_utf8(list).map_err(|_| format!("{path} is no text"))?;
                if !list.is_empty() && !list.ends_with('\n') || list.lines().any(|name| !is_name(name)) {
                    return Err(format!("{path} is cut off or damaged"));
                }
                list.lines().map(str::to_owned).collect()
            }
        };
        let names = Arc::new(names);
        known.insert(target.to_owned(), Arc::clone(&names));
        Ok(names)
    }

    /// Winners for a machine, by the name of its target, or for all. Invalid entries are left out, with a
    /// warning.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn winners(&self, machine: Option<&str>) -> Result<Vec<Entry>, Error> {
        let mut all = Vec::new();
        let is_wanted = |folder: &str| machine.is_none_or(|machine| folder.starts_with(&folder_of(machine)));
        self.visit(&is_wanted, &mut |path, winners| {
            match winners {
                Ok(winners) => all.extend(winners),
                Err(why) => self.note(&format!("{path} is refused: {why}")),
            }
            Ok(())
        })?;
        all.retain(|winner| machine.is_none_or(|machine| is_of(&winner.line.record.target, machine)));
        Ok(all)
    }

    /// Visits the entries of those targets whose folder name `is_wanted` accepts, ordered by path.
    ///
    /// # Errors
    /// If the store cannot be read, or the visitor fails.
    pub fn visit(&self, is_wanted: &dyn Fn(&str) -> bool, visit: Visit) -> Result<(), Error> {
        let failed = |why: String| Error::failed(format!("{}: {why}", self.name()));
        for target in self.targets().map_err(failed)?.iter().filter(|target| is_wanted(target)) {
            let names = self.names(target).map_err(failed)?;
            let mut names: Vec<&String> = names.iter().collect();
            names.sort();
            for name in names {
                let path = format!("{target}/{}", place_of(name));
                if let Some(text) = self.place.read(&path, MOST_ENTRY_BYTES).map_err(failed)? {
                    visit(&path, parse(&path, &text))?;
                }
            }
        }
        Ok(())
    }
}

/// Whether records of a target are of a machine, in any cache state and of any class.
pub(super) fn is_of(target: &str, machine: &str) -> bool {
    target.strip_prefix(machine).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '@']))
}

/// Names of the entries below a target's folder.
fn names_below(folder: &std::path::Path) -> std::io::Result<HashSet<String>> {
    let mut names = HashSet::new();
    for digits in StoreLocation::names_in(folder)?.iter().filter(|name| name.len() == 2) {
        let files = StoreLocation::names_in(&folder.join(digits))?;
        let entries = files.iter().filter_map(|file| file.strip_suffix(ENDING));
        names.extend(entries.filter(|name| is_name(name) && name.starts_with(digits.as_str())).map(str::to_owned));
    }
    Ok(names)
}
