//! T4, the result format of the autotuning community's benchmark suite.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Map, Value as Json, json};
use tilewright_search::{ErrorClass, OtherCosts, Outcome, Seconds};

use super::{ERROR, MOST_TIMES, OBJECTIVE, number, task_of};
use crate::json::{JsonFault, JsonReader};
use crate::outcome::{NotedOutcome, names, other_objective};
use crate::read::{FormatError, Input, ReadResults, read_member};
use crate::results::{ConfigResult, Results, TunerTask};
use crate::rows::{Circumstances, ConfigInFile, TaskRows, read_value};
use crate::time;

/// Reads results.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    let mut head = T4Head::default();
    let mut reader = JsonReader::new(input.file)?;
    let read = reader.object(|reader, name| head.read(&name, reader));
    reader.as_far_as_it_goes(read)?;
    let mut rows = TaskRows::new(head.task(input.name), input.described, Vec::new());
    read_member(input.file, "results", &mut rows, |reader, rows| read_rows(&head, reader, rows))?;
    Ok((vec![rows.results()], Vec::new()))
}

/// Members of the document besides the rows.
#[derive(Default)]
struct T4Head {
    timeunit: Option<String>,
    metadata: Map<String, Json>,
}

/// Names of the metadata of the problem in our own files.
const PROBLEM: &[&str] = &["problem_size", "workload", "threads"];

impl T4Head {
    /// Reads a member of the document.
    fn read(&mut self, name: &str, reader: &mut JsonReader) -> Result<(), JsonFault> {
        match (name, reader.peek()?) {
            ("metadata", Some(b'{')) => reader.object(|reader, name| {
                let value = read_value(reader)?;
                if name == "timeunit" {
                    self.timeunit = value.as_ref().and_then(Json::as_str).map(str::to_owned);
                }
                self.metadata.extend(value.map(|value| (name, value)));
                Ok(())
            }),
            _ => reader.skip(),
        }
    }

    /// Makes the task from the metadata, as far as they describe it.
    fn task(&self, name: &str) -> TunerTask {
        let of = |names: [&str; 2]| names.into_iter().find_map(|name| self.metadata.get(name));
        let task = task_of(name, of(["kernel_name", "template"]), of(["device_name", "target"]));
        let known = PROBLEM.iter().filter_map(|name| Some((name, self.metadata.get(*name)?)));
        known.fold(task, |task, (name, value)| task.with(name, value))
    }
}

/// Row as it is read.
#[derive(Default)]
struct ReadRow {
    configuration: Option<ConfigInFile>,
    invalidity: Option<Json>,
    correctness: Option<Json>,
    /// Measured time with its unit.
    time: Option<(Option<Json>, String)>,
    error: Option<Json>,
    /// Times of single runs.
    runtimes: Option<Json>,
    objectives: Vec<String>,
    /// Costs by further objectives, as we write them: `cost_2` and so on.
    other_costs: BTreeMap<String, f64>,
    timestamp: Option<Json>,
    /// Time of compiling and checking.
    compilation: Option<Json>,
    validation: Option<Json>,
}

/// Prefix of the names of our measurements by further objectives.
const OTHER_COST: &str = "cost_";

/// Word for success.
const CORRECT: &str = "correct";

/// Names of failures. T4 distinguishes fewer of them than we do: a name that several classes share is read as
/// the first of them.
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
const UNKNOWN_UNIT: &str = "rows counted as failed, because their unit of time is not s, ms, us or ns";
const BAD_COSTS: &str = "rows counted as failed, for a cost is no positive number, or they are too many";
const OTHER_OBJECTIVE: &str = "rows of another objective, whose times are replayed";

/// Reads the rows.
fn read_rows(head: &T4Head, reader: &mut JsonReader, rows: &mut TaskRows) -> Result<(), JsonFault> {
    let mut n_rows = 0;
    reader.array(|reader| {
        rows.begin(format!("results[{n_rows}]"));
        n_rows += 1;
        if reader.peek()? != Some(b'{') {
            reader.skip()?;
            rows.leave_out("not an object");
            return Ok(());
        }
        let mut entry = ReadRow::default();
        reader.object(|reader, name| entry.read(&name, reader))?;
        match entry.configuration.take() {
            Some(config) => {
                entry.objectives.retain(|name| !name.starts_with(OTHER_COST));
                if let Some(found) = other_objective(&entry.objectives) {
                    rows.remark(OTHER_OBJECTIVE, &found);
                }
                let timeunit = head.timeunit.as_deref();
                rows.add(config, entry.reading(timeunit), entry.circumstances(timeunit))?;
            }
            None => rows.leave_out("no object `configuration`"),
        }
        Ok(())
    })
}

impl ReadRow {
    /// Reads a member of a row.
    fn read(&mut self, name: &str, reader: &mut JsonReader) -> Result<(), JsonFault> {
        match (name, reader.peek()?) {
            ("configuration", Some(b'{')) => {
                let mut config = ConfigInFile::new();
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
            ("timestamp", _) => self.timestamp = read_value(reader)?,
            ("times", Some(b'{')) => reader.object(|reader, name| {
                match name.as_str() {
                    "runtimes" => self.runtimes = reader.value(MOST_TIMES)?,
                    // Kernel Tuner omits the second word.
                    "compilation_time" | "compilation" => self.compilation = read_value(reader)?,
                    "validation" => self.validation = read_value(reader)?,
                    _ => reader.skip()?,
                }
                Ok(())
            })?,
            _ => reader.skip()?,
        }
        Ok(())
    }

    fn read_measurement(&mut self, reader: &mut JsonReader) -> Result<(), JsonFault> {
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
            Some(name) if name.starts_with(OTHER_COST) => {
                self.other_costs.extend(value.and_then(|value| value.as_f64()).map(|cost| (name.to_owned(), cost)));
            }
            _ => {}
        }
        Ok(())
    }

    /// Times and date of the row.
    fn circumstances(&self, timeunit: Option<&str>) -> Circumstances {
        let unit_s = nanoseconds(timeunit.unwrap_or("ms")).unwrap_or_default() * 1e-9;
        let [build, verify] = [&self.compilation, &self.validation].map(|time| number(time) * unit_s);
        let unix_time = self.timestamp.as_ref().and_then(Json::as_str).and_then(time::unix_time);
        Circumstances { seconds: Seconds { build, run: 0.0, verify }, unix_time: unix_time.unwrap_or_default() }
    }

    /// Outcome of the row's configuration.
    fn reading(&self, timeunit: Option<&str>) -> NotedOutcome {
        let invalidity = match &self.invalidity {
            None | Some(Json::Null) => CORRECT,
            Some(Json::String(text)) => text,
            Some(other) => return NotedOutcome::unknown(&other.to_string()),
        };
        if let Some((name, class)) = INVALIDITY.iter().find(|(name, _)| *name == invalidity) {
            return NotedOutcome::failed(*class, name);
        }
        if invalidity != CORRECT {
            return NotedOutcome::unknown(invalidity);
        }
        let correctness = match &self.correctness {
            Some(Json::Bool(is_right)) => Some(f64::from(u8::from(*is_right))),
            Some(number) => number.as_f64(),
            None => None,
        };
        if correctness == Some(0.0) {
            return NotedOutcome::odd(ErrorClass::WrongAnswer, WRONG, "correctness 0".into());
        }
        match &self.error {
            None | Some(Json::Null) => {}
            Some(Json::String(failure)) => return NotedOutcome::of_failure(failure),
            Some(other) => return NotedOutcome::unknown(&other.to_string()),
        }
        let measured_in = |unit: &str| match unit {
            "" => nanoseconds(timeunit.unwrap_or("ms")).ok_or_else(|| timeunit.unwrap_or_default().to_owned()),
            unit => nanoseconds(unit).ok_or_else(|| unit.to_owned()),
        };
        let in_unit = |unit: &str, read: &dyn Fn(f64) -> NotedOutcome| match measured_in(unit) {
            Ok(unit_ns) => read(unit_ns),
            Err(unit) => NotedOutcome::odd(ErrorClass::Unknown, UNKNOWN_UNIT, format!("{unit:?}")),
        };
        let mut reading = match (&self.time, &self.runtimes) {
            (None, Some(Json::Array(times))) => in_unit("", &|unit_ns| NotedOutcome::of_times(times, unit_ns)),
            (Some((time, unit)), _) => in_unit(unit, &|unit_ns| NotedOutcome::of_time(time.as_ref(), unit_ns)),
            (None, _) => NotedOutcome::of_time(None, 1.0),
        };
        if let Some(part) = correctness.filter(|part| *part != 1.0) {
            reading.oddity.get_or_insert_with(|| (PARTLY_RIGHT, format!("correctness {part}")));
        }
        self.with_other_costs(reading)
    }

    /// Adds costs by further objectives to a time.
    fn with_other_costs(&self, mut reading: NotedOutcome) -> NotedOutcome {
        let costs: Vec<f64> = self.other_costs.values().copied().collect();
        if let Outcome::Measured(timing) = &mut reading.outcome {
            match OtherCosts::new(&costs) {
                Ok(others) => timing.others = others,
                Err(error) => return NotedOutcome::odd(ErrorClass::Unknown, BAD_COSTS, error.to_string()),
            }
        }
        reading
    }
}
/// Row as it is written: in nanoseconds, so that medians are read back exactly.
pub(super) struct T4Row<'a> {
    config: Json,
    outcome: &'a Outcome,
    seconds: Seconds,
    unix_time: Option<u64>,
}

impl T4Row<'_> {
    /// Makes the row of a configuration.
    pub(super) fn of(config: Json, outcome: &Outcome) -> T4Row<'_> {
        T4Row { config, outcome, seconds: Seconds::default(), unix_time: None }
    }

    fn to_json(&self) -> Json {
        let T4Row { config, outcome, seconds, unix_time } = self;
        let invalidity = outcome.class().map_or(CORRECT, |class| {
            let row = INVALIDITY.iter().find(|(_, other)| *other == class);
            row.expect("invariant: each class of errors has a name in T4").0
        });
        let median_ns: Vec<f64> = outcome.timing().map(|timing| timing.median_ns).into_iter().collect();
        let measurement = |ns| json!({"name": OBJECTIVE, "value": ns, "unit": "nanoseconds"});
        let others = outcome.timing().map_or(&[][..], |timing| timing.others.as_slice());
        let names = (2..).take(others.len()).map(|at| format!("{OTHER_COST}{at}"));
        let other_costs =
            names.clone().zip(others).map(|(name, cost)| json!({"name": name, "value": cost, "unit": ""}));
        let mut entry = json!({
            "configuration": config,
            "times": {
                "compilation_time": seconds.build * 1e9,
                "runtimes": median_ns,
                "framework": 0,
                "search_algorithm": 0,
                "validation": seconds.verify * 1e9,
            },
            "invalidity": invalidity,
            "correctness": u8::from(outcome.timing().is_some()),
            "measurements": median_ns.iter().map(measurement).chain(other_costs).collect::<Vec<_>>(),
            "objectives": std::iter::once(OBJECTIVE.to_owned()).chain(names).collect::<Vec<_>>(),
        });
        if let Some(unix_time) = unix_time {
            entry["timestamp"] = time::text_of(*unix_time, 'T').into();
        }
        entry
    }
}

/// Writes a document row by row.
pub(super) fn write_entries<'a>(
    out: &mut dyn Write,
    entries: impl Iterator<Item = T4Row<'a>>,
    about: &[(&str, Json)],
) -> io::Result<()> {
    let mut metadata: Map<String, Json> = about.iter().map(|(name, value)| ((*name).into(), value.clone())).collect();
    metadata.insert("timeunit".into(), "nanoseconds".into());
    write!(out, "{{\"schema_version\":\"1.0.0\",\"metadata\":{},\"results\":[", Json::Object(metadata))?;
    for (at, entry) in entries.enumerate() {
        let comma = if at == 0 { "" } else { "," };
        write!(out, "{comma}\n{}", entry.to_json())?;
    }
    writeln!(out, "]}}")
}

/// Writes results.
pub(super) fn write(results: &Results, out: &mut dyn Write) -> io::Result<()> {
    let task = &results.task;
    let mut about = vec![("kernel_name", task.kernel.as_str().into()), ("device_name", task.device.as_str().into())];
    about.extend(PROBLEM.iter().filter_map(|name| Some((*name, task.field(name)?))));
    let entries = results.rows.iter().map(|row| {
        let ConfigResult { seconds, unix_time, .. } = row;
        let unix_time = Some(*unix_time).filter(|time| *time > 0);
        T4Row { config: results.config(row), outcome: row.expect_outcome(), seconds: *seconds, unix_time }
    });
    write_entries(out, entries, &about)
}

/// Nanoseconds of a unit; some existing files spell one of them with a single l.
pub(super) fn nanoseconds(unit: &str) -> Option<f64> {
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
