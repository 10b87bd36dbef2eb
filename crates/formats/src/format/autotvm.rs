//! Logs of AutoTVM 0.2, a line of JSON for each measurement.
//!
//! Our own records are written as entities that AutoTVM decodes: factorizations as splits, everything else as
//! other options; workload, target and threads are keyword arguments, which identify our records when they
//! are read back.

use std::io::{self, Write};

use serde_json::{Value as Json, json};
use tilewright_search::{ErrorClass, Seconds};

use super::records::{THREADS, WORKLOAD};
use crate::json::{JsonFault, JsonReader};
use crate::outcome::NotedOutcome;
use crate::read::{FormatError, Input, ReadResults, read_lines};
use crate::results::{Results, TunerTask};
use crate::rows::{Circumstances, ConfigInFile, Sheets, TaskRows};

/// Maximum number of parts of a line.
pub(super) const MOST_PARTS: usize = 1 << 16;
/// Nanoseconds per unit of a cost, which is in seconds.
pub(super) const UNIT_NS: f64 = 1e9;
/// Cost of a failure, as AutoTVM writes it.
const FAILED_S: f64 = 1e9;
const TARGET: &str = "target";
const ARGUMENTS: &str = "args";
const KEYWORDS: &str = "kwargs";

/// Reads a log.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    Ok(read_lines(input.file, read_line)?.results())
}

fn read_line(place: &str, reader: &mut JsonReader, sheets: &mut Sheets) -> Result<(), JsonFault> {
    let line = reader.value(MOST_PARTS)?.unwrap_or_default();
    let problem = |what: &str| JsonFault::Problem(what.into());
    let [target, kernel, arguments, keywords] = match line["input"].as_array().map(Vec::as_slice) {
        Some([target, kernel, arguments, keywords, ..]) => [target, kernel, arguments, keywords],
        _ => return Err(problem("no list `input` of a target, a task, arguments and keywords")),
    };
    let (Some(target), Some(kernel)) = (target.as_str(), kernel.as_str()) else {
        return Err(problem("target and task in `input` are no texts"));
    };
    let entity = line["config"]["entity"].as_array().ok_or_else(|| problem("no list `entity` in `config`"))?;
    let mut config = ConfigInFile::new();
    for knob in entity {
        match knob.as_array().map(Vec::as_slice) {
            // Option that was not chosen.
            Some([Json::String(_), Json::String(_), Json::Null]) => {}
            Some([Json::String(name), Json::String(_), value]) => config.push((name.clone(), Some(value.clone()))),
            _ => return Err(problem("an entity is no name with kind and value")),
        }
    }
    let (reading, of) = result_of(&line["result"])
        .ok_or_else(|| problem("no list `result` of costs, the number of an error, seconds and the time of day"))?;
    let rows = sheets.of(task_of(target, kernel, arguments, keywords), TaskRows::of_any)?;
    rows.begin(place.to_owned());
    Ok(rows.add(config, reading, of)?)
}

/// Parses a result of AutoTVM or Ansor: costs, the number of an error, total seconds and the timestamp.
pub(super) fn result_of(result: &Json) -> Option<(NotedOutcome, Circumstances)> {
    let [costs, error, seconds, unix_time] = result.as_array()?.as_slice() else { return None };
    let error = error.as_u64()?;
    let reading = match error.checked_sub(1) {
        None => NotedOutcome::of_runs(costs.as_array()?, UNIT_NS),
        // AutoTVM numbers errors in the order of our classes.
        Some(at) => match usize::try_from(at).ok().and_then(|at| ErrorClass::ALL.get(at)) {
            Some(class) => NotedOutcome::failed(*class, &format!("error {error}")),
            None => NotedOutcome::unknown(&format!("error {error}")),
        },
    };
    let number =
        |value: &Json| value.as_f64().filter(|number| number.is_finite() && *number >= 0.0).unwrap_or_default();
    // Only the sum of the time spent is known.
    let seconds = Seconds { build: 0.0, run: number(seconds), verify: 0.0 };
    Some((reading, Circumstances { seconds, unix_time: number(unix_time) as u64 }))
}

fn task_of(target: &str, kernel: &str, arguments: &Json, keywords: &Json) -> TunerTask {
    if let (Some(workload), Some(target), Some(threads)) =
        (keywords[WORKLOAD].as_str(), keywords[TARGET].as_str(), keywords[THREADS].as_u64())
    {
        let task = TunerTask { kernel: kernel.into(), device: target.into(), problem: Vec::new() };
        return task.with(WORKLOAD, &workload.into()).with(THREADS, &threads.into());
    }
    let task = TunerTask { kernel: kernel.into(), device: target.into(), problem: Vec::new() };
    let task = task.with(ARGUMENTS, arguments);
    if keywords.as_object().is_none_or(serde_json::Map::is_empty) { task } else { task.with(KEYWORDS, keywords) }
}

/// Writes the lines of a task.
pub(super) fn write(results: &Results, out: &mut dyn Write) -> io::Result<()> {
    let task = &results.task;
    let mut keywords = task.field(KEYWORDS).unwrap_or_else(|| json!({}));
    let mut target = task.device.clone();
    if task.field(WORKLOAD).is_some() {
        keywords = json!({WORKLOAD: task.field(WORKLOAD), TARGET: task.device, THREADS: task.field(THREADS)});
        target = "llvm".into();
    } else if task.field(ARGUMENTS).is_none() {
        // Task of another tuner.
        keywords = task.problem.iter().map(|(name, _)| (name.clone(), task.field(name).unwrap_or_default())).collect();
    }
    let arguments = task.field(ARGUMENTS).unwrap_or_else(|| json!([]));
    for (index, row) in results.rows.iter().enumerate() {
        let Json::Object(config) = results.config(row) else { unreachable!("invariant: a configuration is an object") };
        // Parameters that a row lacks are null.
        let entity = config.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| {
            let is_split = value.as_array().is_some_and(|sizes| !sizes.is_empty() && sizes.iter().all(Json::is_i64));
            json!([name, if is_split { "sp" } else { "ot" }, value])
        });
        let (costs, error) = match row.expect_outcome().class() {
            None => (row.expect_outcome().cost() / UNIT_NS, 0),
            Some(class) => {
                let at = ErrorClass::ALL.iter().position(|known| *known == class);
                (FAILED_S, at.expect("invariant: all classes are listed") + 1)
            }
        };
        let spent = row.seconds.build + row.seconds.run + row.seconds.verify;
        let line = json!({
            "input": [target, task.kernel, arguments, keywords],
            "config": {"index": index, "code_hash": null, "entity": entity.collect::<Vec<_>>()},
            "result": [[costs], error, spent, row.unix_time as f64],
            "version": 0.2,
            "tvm_version": concat!("tilewright-", env!("CARGO_PKG_VERSION")),
        });
        writeln!(out, "{line}")?;
    }
    Ok(())
}
