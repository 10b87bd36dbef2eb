//! Verification of whole shared stores.

use std::fs;
use std::path::Path;

use tilewright_device::device::WorkerCommand;
use tilewright_device::host;
use tilewright_ir::op::Workload;

use super::entry::print;
use super::first_use::{is_right, tried};
use super::push::{admitted, locked, write_index};
use super::store_location::StoreLocation;
use super::{Entry, SharedStore};
use crate::best::{Best, CACHES, target_name};
use crate::error::Error;
use crate::file::write_whole;
use crate::import::LineValidator;

/// Result of verifying a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Verified {
    /// Number of winners read.
    pub read: u64,
    /// Number of winners built, run and compared with the reference.
    pub run: u64,
    /// Refused winners, or whole entries, one line each with the reason.
    pub refused: Vec<String>,
    /// Whether the refused ones were removed.
    pub is_mended: bool,
}

impl SharedStore {
    /// Checks that every winner is plausible; given a command that starts workers, winners for this machine
    /// are also built, run and compared with the reference. Refused ones are removed if `removes`.
    ///
    /// # Errors
    /// If the store cannot be read, or entries are to be removed and it cannot be written.
    pub fn verify(&self, worker: Option<&WorkerCommand>, removes: bool) -> Result<Verified, Error> {
        let mut found = Verified::default();
        let mut importer = LineValidator::default();
        let mut mended: Vec<(String, Vec<Entry>)> = Vec::new();
        self.visit(&|_| true, &mut |path, winners| {
            let winners = match winners {
                Ok(winners) => winners,
                Err(why) => {
                    found.refused.push(format!("{path}: {why}"));
                    mended.push((path.to_owned(), Vec::new()));
                    return Ok(());
                }
            };
            let n_winners = winners.len();
            let mut right = Vec::new();
            for winner in winners {
                found.read += 1;
                let checked = admitted(&mut importer, winner.clone());
                match checked.and_then(|checked| run_here(&checked, worker)) {
                    Ok(has_run) => {
                        found.run += u64::from(has_run);
                        right.push(winner);
                    }
                    Err(why) => found.refused.push(format!("{path}: {why}")),
                }
            }
            if right.len() < n_winners {
                mended.push((path.to_owned(), right));
            }
            Ok(())
        })?;
        if removes && !mended.is_empty() {
            self.mend(&mended)?;
            found.is_mended = true;
        }
        Ok(found)
    }

    /// Rewrites entries with the remaining winners.
    fn mend(&self, mended: &[(String, Vec<Entry>)]) -> Result<(), Error> {
        let StoreLocation::Folder(folder) = &self.place else {
            return Err(Error::input(format!("{} is read-only (give the folder that is served)", self.name())));
        };
        let write = |path: &Path, winners: &[Entry]| match winners {
            [] => fs::remove_file(path),
            winners => write_whole(path, |file| file.write_all(print(winners).as_bytes())),
        };
        let _lock = locked(&self.name(), folder)?;
        for (path, winners) in mended {
            let whole = folder.join(path);
            let target = path.split('/').next().expect("a path has a first part");
            let fault = |error| Error::failed(format!("{}: cannot write {path}: {error}", self.name()));
            write(&whole, winners).and_then(|()| write_index(&folder.join(target))).map_err(fault)?;
        }
        Ok(())
    }
}

/// Builds and runs a winner of this machine; returns false for a winner of another one.
///
/// # Errors
/// If it is refused, with the reason in one line.
fn run_here(winner: &Entry, worker: Option<&WorkerCommand>) -> Result<bool, String> {
    let (record, target) = (&winner.line.record, host::target());
    let caches = CACHES.into_iter().find(|caches| target_name(&target, *caches) == record.target);
    let threads = record.threads as usize;
    let (Some(caches), Some(worker)) = (caches, worker) else { return Ok(false) };
    if threads > host::allowed_cpus().len().max(1) {
        return Ok(false);
    }
    let workload = Workload::parse(&record.workload).map_err(|error| error.to_string())?;
    let best = Best::new(&workload, record.template.clone(), record.config.clone(), winner.median_ns());
    // A winner of another version of the space cannot be verified here.
    let Ok(choice) = best.choice(&workload, &target, threads) else { return Ok(false) };
    let record = tried(&choice, caches, worker).map_err(|error| error.to_string())?;
    is_right(&record).map_err(|why| format!("the entry of {workload} is refused: {why}"))?;
    Ok(true)
}
