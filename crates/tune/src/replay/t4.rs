//! T4, the results format of the autotuning community's benchmark suite.

use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

use super::read::{Contents, ReplayError, Row, failed, parse, timed};
use crate::space::{Config, Space};
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

/// What stands for success.
const CORRECT: &str = "correct";

/// How failures are called. T4 tells fewer of them apart than we do: of classes with one name, the first one is read.
const INVALIDITY: &[(&str, ErrorClass)] = &[
    ("compile", ErrorClass::CompileErrorDevice),
    ("compile", ErrorClass::CompileErrorHost),
    ("runtime", ErrorClass::RuntimeError),
    ("runtime", ErrorClass::Unknown),
    ("timeout", ErrorClass::RunTimeout),
    ("timeout", ErrorClass::BuildTimeout),
    ("correctness", ErrorClass::WrongAnswer),
    ("constraints", ErrorClass::InstantiationError),
];

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
    if entry.invalidity == CORRECT {
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
    let class = INVALIDITY.iter().find(|(name, _)| *name == entry.invalidity).map(|(_, class)| *class);
    let class = class.ok_or_else(|| format!("unknown invalidity {:?}", entry.invalidity))?;
    Ok(failed(class, &entry.invalidity))
}

/// The document of these outcomes: medians, in nanoseconds, so that they are read back to the bit.
pub(super) fn document<'a>(
    space: &Space,
    outcomes: impl Iterator<Item = (&'a Config, &'a Outcome)>,
    about: &[(&str, Json)],
) -> Json {
    let mut metadata: Map<String, Json> = about.iter().map(|(name, value)| ((*name).into(), value.clone())).collect();
    metadata.insert("timeunit".into(), "nanoseconds".into());
    let entry = |(config, outcome): (&Config, &Outcome)| {
        let measurement = |ns| json!({"name": OBJECTIVE, "value": ns, "unit": "nanoseconds"});
        let invalidity = outcome.class().map_or(CORRECT, |class| {
            let row = INVALIDITY.iter().find(|(_, other)| *other == class);
            row.expect("invariant: each class of errors has a name in T4").0
        });
        json!({
            "configuration": space.config_to_json(config),
            "invalidity": invalidity,
            "correctness": u8::from(outcome.timing().is_some()),
            "measurements": outcome.timing().map(|timing| measurement(timing.median_ns)).into_iter().collect::<Vec<_>>(),
            "objectives": [OBJECTIVE],
        })
    };
    json!({"schema_version": "1.0.0", "metadata": metadata, "results": outcomes.map(entry).collect::<Vec<_>>()})
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_a_name() {
        for class in ErrorClass::ALL {
            assert_eq!(INVALIDITY.iter().filter(|(_, other)| *other == class).count(), 1, "{class}");
        }
    }
}
