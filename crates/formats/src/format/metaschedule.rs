//! Tuning records of MetaSchedule: a line of JSON for each measurement, whose program is a trace.
//!
//! The instructions form the sketch of a program; each sampling decision is a parameter.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::ansor::SKETCH;
use super::autotvm::{MOST_PARTS, UNIT_NS};
use crate::json::{JsonFault, JsonReader};
use crate::outcome::NotedOutcome;
use crate::read::{FormatError, Input, ReadResults, read_lines};
use crate::results::TunerTask;
use crate::rows::{Circumstances, ConfigInFile, Sheets, TaskRows};

/// Reads tuning records.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    Ok(read_lines(input.file, read_line)?.results())
}

fn read_line(place: &str, reader: &mut JsonReader, sheets: &mut Sheets) -> Result<(), JsonFault> {
    let line = reader.value(MOST_PARTS)?.unwrap_or_default();
    let problem = |what: &str| JsonFault::Problem(what.into());
    let (workload, record) = match line.as_array().map(Vec::as_slice) {
        Some([Json::Number(workload), Json::Array(record)]) => (workload, record),
        Some([Json::String(_), _]) => {
            let mend = "a workload of MetaSchedule without times (give tuning records)";
            return Err(problem(mend));
        }
        _ => return Err(problem("no pair of a workload's number and a record")),
    };
    let [trace, times, target, arguments] = match record.as_slice() {
        [trace, times, target, arguments, ..] => [trace, times, target, arguments],
        _ => return Err(problem("no record of a trace, run times, a target and arguments")),
    };
    let instructions = trace[0].as_array().ok_or_else(|| problem("no list of instructions in the trace"))?;
    let kinds: Vec<&str> = instructions.iter().map(|instruction| instruction[0].as_str().unwrap_or_default()).collect();
    let mut config: ConfigInFile = vec![(SKETCH.into(), Some(short(&kinds.join(" ")).into()))];
    let mut seen = HashMap::new();
    for decision in trace[1].as_array().into_iter().flatten() {
        let at = decision[0].as_u64().and_then(|at| usize::try_from(at).ok());
        let kind = at.and_then(|at| kinds.get(at)).ok_or_else(|| problem("a decision of no instruction"))?;
        let n = seen.entry(*kind).and_modify(|n| *n += 1).or_insert(0);
        config.push((format!("{kind}{n}"), Some(decision[1].clone())));
    }
    let reading = match times {
        Json::Array(times) => NotedOutcome::of_runs(times, UNIT_NS),
        _ => NotedOutcome::of_time(None, UNIT_NS),
    };
    let device = target.as_str().map_or_else(|| target.to_string(), str::to_owned);
    let task = TunerTask { kernel: format!("workload-{workload}"), device, problem: Vec::new() };
    let rows = sheets.of(task.with("args", arguments), TaskRows::of_any)?;
    rows.begin(place.to_owned());
    Ok(rows.add(config, reading, Circumstances::default())?)
}

/// Returns a short text that identifies a long one: traces have hundreds of instructions.
fn short(text: &str) -> String {
    format!("{:016x}", tilewright_tune::predict::content_hash(text.as_bytes()))
}
