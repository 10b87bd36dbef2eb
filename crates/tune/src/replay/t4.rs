//! T4, the results format of the autotuning community's benchmark suite.

use serde::Deserialize;
use serde_json::{Map, Value as Json};

use super::read::{Contents, ReplayError, Row, failed, parse, timed};
use crate::trial::{ErrorClass, Outcome};

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    metadata: Metadata,
    results: Vec<Entry>,
}

#[derive(Deserialize, Default)]
struct Metadata {
    timeunit: Option<String>,
}

#[derive(Deserialize)]
struct Entry {
    configuration: Map<String, Json>,
    invalidity: String,
    #[serde(default)]
    measurements: Vec<Measurement>,
    #[serde(default)]
    objectives: Vec<String>,
}

#[derive(Deserialize)]
struct Measurement {
    name: String,
    value: Json,
    #[serde(default)]
    unit: String,
}

/// The objective that is replayed.
const OBJECTIVE: &str = "time";

pub(super) fn read(bytes: &[u8]) -> Result<Contents, ReplayError> {
    let Document { metadata, results } = parse(bytes)?;
    let row = |(i, entry): (usize, Entry)| {
        let place = format!("results[{i}]");
        match outcome(&entry, metadata.timeunit.as_deref()) {
            Ok(outcome) => Ok(Row { place, config: entry.configuration, outcome }),
            Err(problem) => Err(ReplayError::Entry { place, problem }),
        }
    };
    Ok(Contents { parameters: None, rows: results.into_iter().enumerate().map(row).collect::<Result<_, _>>()? })
}

fn outcome(entry: &Entry, timeunit: Option<&str>) -> Result<Outcome, String> {
    let class = match entry.invalidity.as_str() {
        "correct" => {
            if let Some(other) = entry.objectives.iter().find(|name| *name != OBJECTIVE) {
                return Err(format!("the objective is {other:?}, but only {OBJECTIVE:?} can be replayed"));
            }
            let time = entry.measurements.iter().find(|measurement| measurement.name == OBJECTIVE);
            let time = time.ok_or_else(|| format!("no measurement of {OBJECTIVE:?}"))?;
            let unit = if time.unit.is_empty() { timeunit.unwrap_or("milliseconds") } else { &time.unit };
            let unit_ns = nanoseconds(unit).ok_or_else(|| format!("unknown unit of time {unit:?}"))?;
            let outcome = time.value.as_f64().and_then(|value| timed(value, unit_ns));
            return outcome.ok_or_else(|| format!("the time {} is not a positive number", time.value));
        }
        "compile" => ErrorClass::CompileErrorDevice,
        "runtime" => ErrorClass::RuntimeError,
        "timeout" => ErrorClass::RunTimeout,
        "correctness" => ErrorClass::WrongAnswer,
        "constraints" => ErrorClass::InstantiationError,
        other => return Err(format!("unknown invalidity {other:?}")),
    };
    Ok(failed(class, &entry.invalidity))
}

/// How many nanoseconds a unit has; files in circulation spell one of them with a single l.
fn nanoseconds(unit: &str) -> Option<f64> {
    match unit {
        "seconds" | "s" => Some(1e9),
        "milliseconds" | "miliseconds" | "ms" => Some(1e6),
        "microseconds" | "us" => Some(1e3),
        "nanoseconds" | "ns" => Some(1.0),
        _ => None,
    }
}
