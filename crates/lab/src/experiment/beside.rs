//! Experiments that tune each problem once, and compare the result with other implementations.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value as Json, json};
use tilewright::Error;
use tilewright::file::write_whole;

use super::data;
use super::folder::RUNS;
use super::hardware::Hardware;
use crate::{Caller, OrFailed, load};

/// Request to run such an experiment, or a part of it.
#[derive(Clone)]
pub struct BesideRequest {
    /// Problems to run; empty for all.
    pub problems: Vec<String>,
    /// Tuning time of each problem.
    pub time: Duration,
    /// Folder for data and plots; `None` for `experiments/` and the name.
    pub folder: Option<PathBuf>,
    /// Seed of searches and of random weights.
    pub seed: u64,
    /// Machine that all run on.
    pub hardware: Hardware,
    /// Folder searched for peers' libraries before the system's folders.
    pub peer_path: Option<PathBuf>,
}

impl BesideRequest {
    /// Folder of data and plots of the experiment.
    pub(super) fn folder(&self, name: &str) -> PathBuf {
        self.folder.clone().unwrap_or_else(|| Path::new("experiments").join(name))
    }

    /// Facts that must be the same to continue in a folder.
    pub(super) fn identity(&self, name: &str) -> Json {
        json!({
            "experiment": name,
            "seconds": self.time.as_secs_f64(),
            "seed": self.seed,
            "threads": self.hardware.threads,
            "target": self.hardware.target.name(),
        })
    }

    /// Command that repeats the experiment.
    pub(super) fn command(&self, name: &str) -> String {
        let BesideRequest { time, seed, hardware, .. } = self;
        let folder = self.peer_path.as_ref().map_or(String::new(), |_| " --peer-path FOLDER".to_owned());
        let (time, hardware) = (time.as_secs_f64(), hardware.option().join(" "));
        format!("tilewright experiment {name} --time {time} --seed {seed} {hardware}{folder}")
    }
}

/// Adds the results of `measure` for each problem to the known outcomes, and saves each in a separate file as
/// soon as it is available. `measure` receives the index of the problem and the path of its files, to which
/// an ending is added, and returns `None` if it was stopped.
///
/// # Errors
/// Errors of `measure`, or if a file cannot be written.
pub(super) fn outcomes<T: Serialize + DeserializeOwned>(
    folder: &Path,
    problems: &[&str],
    mut known: BTreeMap<String, T>,
    caller: Caller,
    mut measure: impl FnMut(usize, &dyn Fn(&str) -> PathBuf) -> Result<Option<T>, Error>,
) -> Result<BTreeMap<String, T>, Error> {
    for (place, problem) in problems.iter().enumerate() {
        let at = |ending: &str| folder.join(RUNS).join(format!("{problem}.{ending}"));
        let marker = at("json");
        if known.contains_key(*problem) {
            continue;
        }
        if caller.is_stopped() {
            break;
        }
        if let Some(outcome) = fs::read(&marker).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            known.insert((*problem).to_owned(), outcome);
            continue;
        }
        load::warning().into_iter().for_each(|warning| caller.say(warning));
        if let Some(outcome) = measure(place, &at)? {
            let text = serde_json::to_string(&outcome).expect("invariant: it is numbers and text by name");
            write_whole(&marker, |file| file.write_all(text.as_bytes())).or_failed(marker.display())?;
            known.insert((*problem).to_owned(), outcome);
        }
    }
    Ok(known)
}

/// Writes the data of an experiment, `own` and the facts, and its other files; returns the data.
///
/// # Errors
/// If a file cannot be written.
pub(super) fn write(
    folder: &Path,
    mut own: Json,
    facts: Json,
    files: impl IntoIterator<Item = (String, String)>,
) -> Result<Json, Error> {
    let facts = facts.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone()));
    own.as_object_mut().expect("it is one").extend(facts);
    data::write(folder, &format!("{own:#}\n")).or_failed(data::path(folder).display())?;
    for (name, text) in files {
        let path = folder.join(name);
        write_whole(&path, |file| file.write_all(text.as_bytes())).or_failed(path.display())?;
    }
    Ok(own)
}
