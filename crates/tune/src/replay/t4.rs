//! T4, the results format of the autotuning community's benchmark suite.

use serde_json::{Map, Value as Json, json};

use super::json::{Fault, Reader};
use super::outcome::Reading;
use super::read::{ERROR, MOST_TIMES, OBJECTIVE, names, other_objective};
use super::rows::{Column, Rows, Values, read_value};
use crate::space::{Config, Space};
use crate::trial::{ErrorClass, Outcome};

/// What stands beside the rows.
#[derive(Default)]
pub(super) struct Head {
    timeunit: Option<String>,
}

impl Head {
    /// Reads a member of the document.
    pub(super) fn read(&mut self, name: &str, reader: &mut Reader) -> Result<(), Fault> {
        match (name, reader.peek()?) {
            ("metadata", Some(b'{')) => reader.object(|reader, name| {
                let value = read_value(reader)?;
                if name == "timeunit" {
                    self.timeunit = value.and_then(|unit| unit.as_str().map(str::to_owned));
                }
                Ok(())
            }),
            _ => reader.skip(),
        }
    }

    /// No rows yet; of the parameters described elsewhere, or those of the first row.
    pub(super) fn rows(&self, described: Option<Vec<Column>>) -> Rows {
        Rows::new(described, Vec::new())
    }
}

/// A row.
#[derive(Default)]
struct Entry {
    configuration: Option<Values>,
    invalidity: Option<Json>,
    correctness: Option<Json>,
    /// The measured time with its unit.
    time: Option<(Option<Json>, String)>,
    error: Option<Json>,
    /// The times of single runs.
    runtimes: Option<Json>,
    objectives: Vec<String>,
}

/// What stands for success.
const CORRECT: &str = "correct";

/// Names of failures. T4 tells fewer of them apart than we do: of classes with one name the first is read.
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

const WRONG: &str = "rows counted as failed, for their correctness is 0";
const PARTLY_RIGHT: &str = "rows whose correctness is neither 0 nor 1 (they count as right)";
const UNKNOWN_UNIT: &str = "rows counted as failed, for their unit of time is none of s, ms, us, ns";
const OTHER_OBJECTIVE: &str = "rows of another objective, whose times are replayed";

/// Reads the rows.
pub(super) fn read_rows(head: &Head, reader: &mut Reader, rows: &mut Rows) -> Result<(), Fault> {
    let mut n_rows = 0;
    reader.array(|reader| {
        rows.begin(format!("results[{n_rows}]"));
        n_rows += 1;
        if reader.peek()? != Some(b'{') {
            reader.skip()?;
            rows.leave_out("not an object");
            return Ok(());
        }
        let mut entry = Entry::default();
        reader.object(|reader, name| entry.read(&name, reader))?;
        match entry.configuration.take() {
            Some(config) => {
                if let Some(found) = other_objective(&entry.objectives) {
                    rows.remark(OTHER_OBJECTIVE, &found);
                }
                rows.add(config, entry.reading(head.timeunit.as_deref()))?;
            }
            None => rows.leave_out("no object `configuration`"),
        }
        Ok(())
    })
}

impl Entry {
    /// Reads a member of a row.
    fn read(&mut self, name: &str, reader: &mut Reader) -> Result<(), Fault> {
        match (name, reader.peek()?) {
            ("configuration", Some(b'{')) => {
                let mut config = Values::new();
                reader.object(|reader, name| {
                    config.push((name, read_value(reader)?));
                    Ok(())
                })?;
                self.configuration = Some(config);
            }
            ("invalidity", _) => self.invalidity = read_value(reader)?,
            ("correctness", _) => self.correctness = read_value(reader)?,
            ("objectives", _) => self.objectives = names(read_value(reader)?),
            ("measurements", Some(b'[')) => reader.array(|reader| self.read_measurement(reader))?,
            ("times", Some(b'{')) => reader.object(|reader, name| {
                if name != "runtimes" {
                    return reader.skip();
                }
                self.runtimes = reader.value(MOST_TIMES)?;
                Ok(())
            })?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn read_measurement(&mut self, reader: &mut Reader) -> Result<(), Fault> {
        if reader.peek()? != Some(b'{') {
            return reader.skip();
        }
        let (mut of, mut value, mut unit) = (None, None, None);
        reader.object(|reader, name| {
            match name.as_str() {
                "name" => of = read_value(reader)?,
                "value" => value = reader.value(MOST_TIMES)?,
                "unit" => unit = read_value(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        match of.as_ref().and_then(Json::as_str) {
            Some(OBJECTIVE) => {
                self.time = Some((value, unit.and_then(|unit| unit.as_str().map(str::to_owned)).unwrap_or_default()));
            }
            Some(ERROR) => self.error = value,
            _ => {}
        }
        Ok(())
    }

    /// What became of the row's configuration.
    fn reading(&self, timeunit: Option<&str>) -> Reading {
        let invalidity = match &self.invalidity {
            None | Some(Json::Null) => CORRECT,
            Some(Json::String(text)) => text,
            Some(other) => return Reading::unknown(&other.to_string()),
        };
        if let Some((name, class)) = INVALIDITY.iter().find(|(name, _)| *name == invalidity) {
            return Reading::failed(*class, name);
        }
        if invalidity != CORRECT {
            return Reading::unknown(invalidity);
        }
        let correctness = match &self.correctness {
            Some(Json::Bool(is_right)) => Some(f64::from(u8::from(*is_right))),
            Some(number) => number.as_f64(),
            None => None,
        };
        if correctness == Some(0.0) {
            return Reading::odd(ErrorClass::WrongAnswer, WRONG, "correctness 0".into());
        }
        match &self.error {
            None | Some(Json::Null) => {}
            Some(Json::String(failure)) => return Reading::of_failure(failure),
            Some(other) => return Reading::unknown(&other.to_string()),
        }
        let measured_in = |unit: &str| match unit {
            "" => nanoseconds(timeunit.unwrap_or("ms")).ok_or_else(|| timeunit.unwrap_or_default().to_owned()),
            unit => nanoseconds(unit).ok_or_else(|| unit.to_owned()),
        };
        let in_unit = |unit: &str, read: &dyn Fn(f64) -> Reading| match measured_in(unit) {
            Ok(unit_ns) => read(unit_ns),
            Err(unit) => Reading::odd(ErrorClass::Unknown, UNKNOWN_UNIT, format!("{unit:?}")),
        };
        let mut reading = match (&self.time, &self.runtimes) {
            (None, Some(Json::Array(times))) => in_unit("", &|unit_ns| Reading::of_times(times, unit_ns)),
            (Some((time, unit)), _) => in_unit(unit, &|unit_ns| Reading::of_time(time.as_ref(), unit_ns)),
            (None, _) => Reading::of_time(None, 1.0),
        };
        if let Some(part) = correctness.filter(|part| *part != 1.0) {
            reading.oddity.get_or_insert_with(|| (PARTLY_RIGHT, format!("correctness {part}")));
        }
        reading
    }
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
    match unit.trim().to_lowercase().as_str() {
        "seconds" | "second" | "sec" | "s" => Some(1e9),
        "milliseconds" | "millisecond" | "miliseconds" | "msec" | "ms" => Some(1e6),
        "microseconds" | "microsecond" | "usec" | "us" | "µs" => Some(1e3),
        "nanoseconds" | "nanosecond" | "nsec" | "ns" => Some(1.0),
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
