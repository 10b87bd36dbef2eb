//! Folder of an experiment: ownership, and earlier contents.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;

use serde_json::Value as Json;
use tilewright::Error;
use tilewright::file::{open_lock, write_whole};

use super::data;

/// Folder of the runs, within that of the experiment.
pub const RUNS: &str = "runs";

/// File with all trials.
pub const TRIALS: &str = "trials.csv";
/// File with the page.
pub const PAGE: &str = "README.md";
/// Files that an experiment writes besides plots.
pub const FILES: [&str; 4] = [data::PLAIN, data::PACKED, TRIALS, PAGE];

/// Creates the folder of an experiment, or checks that it contains a part of the one identified by `own`.
/// Returns a lock that excludes other processes until it is closed, and the contents of `data.json`, null if
/// the file is missing.
///
/// # Errors
/// Bad input if it holds something else, is in use by another process, or cannot be written.
pub fn claim(folder: &Path, own: &Json) -> Result<(File, Json), Error> {
    let name = folder.display();
    let cannot = |error: io::Error| Error::input(format!("cannot write to {name}: {error} (give another -o)"));
    let path = folder.join("plan.json");
    let data = || -> Option<Json> { serde_json::from_slice(&data::read(folder).ok()?).ok() };
    let mut written = FILES.iter().map(|name| folder.join(name));
    if !path.exists()
        && data().is_none()
        && let Some(foreign) = written.find(|path| path.exists())
    {
        let reason = format!("{} is no experiment's and would be written over", foreign.display());
        return Err(Error::input(format!("{reason} (give another folder with -o)")));
    }
    fs::create_dir_all(folder.join(RUNS)).map_err(cannot)?;
    let claim = open_lock(&folder.join(RUNS).join("lock")).map_err(cannot)?;
    // Some file systems do not support locks.
    if let Err(TryLockError::WouldBlock) = claim.try_lock() {
        return Err(Error::input(format!("another process is at work in {name} (wait for it, or give another -o)")));
    }
    let data = data();
    let is_own = |there: &Json| own.as_object().into_iter().flatten().all(|(name, value)| there[name] == *value);
    let there: Result<Json, _> = fs::read(&path).map(|bytes| serde_json::from_slice(&bytes).unwrap_or_default());
    if !there.as_ref().ok().into_iter().chain(&data).all(is_own) {
        let reason = format!("{name} holds runs with another name, budget, seed, machine or number of threads");
        return Err(Error::input(format!("{reason} (give another folder with -o)")));
    }
    if there.is_err() {
        write_whole(&path, |file| file.write_all(own.to_string().as_bytes())).map_err(cannot)?;
    }
    Ok((claim, data.unwrap_or_default()))
}
