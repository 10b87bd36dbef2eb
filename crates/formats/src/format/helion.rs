//! Configurations of Helion: one saved by `helion.Config.save`, or an entry of its cache, `*.best_config`,
//! which holds the configuration as text, and the key for which it was tuned.
//!
//! # Source
//! `helion/runtime/config.py` and `helion/autotuner/local_cache.py`.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

use serde_json::{Map, Value as Json};

use super::task_of;
use crate::json::JsonReader;
use crate::read::{FormatError, Input, ReadResults};
use crate::results::Results;
use crate::rows::{ConfigInFile, TaskRows, read_value};

/// Names of the members of an entry that hold the configuration and its key.
const CONFIG: &str = "config";
const KEY: &str = "key";
/// Ending of the names of entries.
const ENDING: &str = ".best_config";
/// Fields of the key that describe what an entry was tuned for: the device, and types and sizes of arguments.
const DEVICE: &str = "hardware";
const ARGUMENTS: &str = "specialization_key";

/// Reads the single configuration of a file.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    let mut members = ConfigInFile::new();
    let mut reader = JsonReader::new(input.file)?;
    let read = reader.object(|reader, name| {
        members.push((name, read_value(reader)?));
        Ok(())
    });
    if let Err(fault) = read {
        return Err(reader.error(fault));
    }
    let member = |name: &str| members.iter().rfind(|(known, _)| known == name)?.1.as_ref();
    let fields = member(KEY).and_then(|key| key.get("fields"));
    let kernel = input.name.strip_suffix(ENDING).unwrap_or(input.name);
    let mut task = task_of(kernel, None, fields.and_then(|fields| fields.get(DEVICE)));
    let arguments = fields.and_then(|fields| fields.get(ARGUMENTS));
    task = arguments.into_iter().fold(task, |task, arguments| task.with(ARGUMENTS, arguments));
    let entry: Option<Map<String, Json>> = member(CONFIG).and_then(Json::as_str).and_then(|text| {
        let Ok(Json::Object(config)) = serde_json::from_str(text) else { return None };
        Some(config)
    });
    let config = entry.map(|config| config.into_iter().map(|(name, value)| (name, Some(value))).collect());
    let mut rows = TaskRows::new(task, None, Vec::new());
    rows.begin("the configuration".to_owned());
    rows.add_winner(config.unwrap_or(members))?;
    Ok((vec![rows.results()], Vec::new()))
}

/// Writes the best configuration as `helion.Config.load` reads it.
pub(super) fn write(results: &Results, out: &mut dyn Write) -> io::Result<()> {
    let best = results.best().expect("invariant: there is one, which was checked");
    let config = match results.config(best) {
        Json::Object(config) => Json::Object(in_lists(config)),
        other => other,
    };
    serde_json::to_writer_pretty(&mut *out, &config)?;
    writeln!(out)
}

/// Converts parameters that are elements of a list, `sizes[0]` and so on without a gap, to a list.
fn in_lists(config: Map<String, Json>) -> Map<String, Json> {
    let place_of = |name: &str| {
        let (list, place) = name.strip_suffix(']')?.rsplit_once('[')?;
        Some((list.to_owned(), place.parse::<usize>().ok()?))
    };
    let mut lists: HashMap<String, BTreeMap<usize, &Json>> = HashMap::new();
    for (name, value) in &config {
        if let Some((list, place)) = place_of(name) {
            lists.entry(list).or_default().insert(place, value);
        }
    }
    lists.retain(|_, places| places.keys().copied().eq(0..places.len()));
    let mut made = Map::new();
    for (name, value) in &config {
        match place_of(name).and_then(|(list, _)| lists.get_key_value(&list)) {
            Some((list, places)) if !made.contains_key(list) => {
                made.insert(list.clone(), places.values().copied().cloned().collect());
            }
            Some(_) => {}
            None => drop(made.insert(name.clone(), value.clone())),
        }
    }
    // Lists may be elements of lists.
    if lists.is_empty() { made } else { in_lists(made) }
}
