//! Logs of Ansor, v0.5 and v0.6: a line of JSON for each measurement, whose program is a list of steps.
//!
//! The kinds of steps, by stage, form the sketch of a program; each decision of the search about a step is a
//! parameter: the factors of a split, the unroll factor of a loop, and so on.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::autotvm::{MOST_PARTS, result_of};
use crate::json::{JsonFault, JsonReader};
use crate::read::{FormatError, Input, ReadResults, read_lines};
use crate::results::TunerTask;
use crate::rows::{ConfigInFile, Sheets, TaskRows};

/// Name of the parameter that identifies the sketch.
pub(super) const SKETCH: &str = "sketch";

/// Reads a log.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    Ok(read_lines(input.file, read_line)?.results())
}

fn read_line(place: &str, reader: &mut JsonReader, sheets: &mut Sheets) -> Result<(), JsonFault> {
    let line = reader.value(MOST_PARTS)?.unwrap_or_default();
    let problem = |what: &str| JsonFault::Problem(what.into());
    let (task, steps) = match line["i"].as_array().map(Vec::as_slice) {
        Some([Json::Array(task), Json::Array(state), ..]) => (task, state.get(1).and_then(Json::as_array)),
        Some([Json::String(_), ..]) => {
            return Err(problem("a line of AutoTVM 0.1 (AutoTVM itself makes it one of 0.2)"));
        }
        _ => return Err(problem("no list `i` of a task and its steps")),
    };
    let steps = steps.ok_or_else(|| problem("no list of steps in `i`"))?;
    let [Some(key), Some(target)] = [0, 1].map(|at| task.get(at).and_then(Json::as_str)) else {
        return Err(problem("key and target of the task in `i` are no texts"));
    };
    let mut config: ConfigInFile = vec![(SKETCH.into(), None)];
    let (mut sketch, mut seen) = (String::new(), HashMap::new());
    for step in steps {
        let (kind, rest) = match step.as_array().map(Vec::as_slice) {
            Some([Json::String(kind), rest @ ..]) => (kind, rest),
            _ => return Err(problem("a step is no list that begins with its kind")),
        };
        let stage = rest.first().map_or(String::new(), Json::to_string);
        sketch += &format!("{kind}{stage} ");
        let at = seen.entry(kind.clone()).and_modify(|at| *at += 1).or_insert(0);
        let chosen = match (kind.as_str(), rest) {
            // Stage, loop, extent, factors.
            ("SP", [_, _, _, factors @ Json::Array(_), ..]) => Some(factors.clone()),
            // Stage, loop, text.
            ("PR", [_, _, text]) => Some(text.clone()),
            (_, [_, rest @ ..]) if !rest.is_empty() => Some(Json::from(rest.to_vec())),
            _ => None,
        };
        config.extend(chosen.map(|chosen| (format!("{kind}{at}"), Some(chosen))));
    }
    config[0].1 = Some(sketch.trim_end().into());
    let (reading, of) = result_of(&line["r"])
        .ok_or_else(|| problem("no list `r` of costs, the number of an error, seconds and the time of day"))?;
    let rows = sheets.of(task_of(key, target), TaskRows::of_any)?;
    rows.begin(place.to_owned());
    Ok(rows.add(config, reading, of)?)
}

/// Task of a key: a list of a function's hash or name and its arguments, as text.
fn task_of(key: &str, target: &str) -> TunerTask {
    let task = |kernel: &str| TunerTask { kernel: kernel.into(), device: target.into(), problem: Vec::new() };
    match serde_json::from_str::<Json>(key) {
        Ok(Json::Array(parts)) if parts.first().is_some_and(Json::is_string) => {
            let kernel = parts[0].as_str().unwrap_or_default();
            task(kernel).with("args", &Json::from(parts[1..].to_vec()))
        }
        _ => task(key),
    }
}
