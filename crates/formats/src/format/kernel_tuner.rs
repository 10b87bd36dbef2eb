//! Caches of Kernel Tuner.

use std::io::{self, Write};

use serde_json::{Map, Value as Json, json};
use tilewright_search::Seconds;

use super::{ERROR, MILLISECONDS_NS, MOST_TIMES, OBJECTIVE, number, task_of};
use crate::json::{JsonFault, JsonReader};
use crate::outcome::{NotedOutcome, brief, failure_of, names, other_objective};
use crate::read::{FormatError, Input, ReadResults, read_member};
use crate::results::{ParameterValues, Results};
use crate::rows::{Circumstances, ConfigInFile, Lists, ParameterColumn, TaskRows, read_value};
use crate::time;

/// Reads a cache.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    let mut head = CacheHead::default();
    let mut reader = JsonReader::new(input.file)?;
    let read = reader.object(|reader, name| head.read(&name, reader));
    reader.as_far_as_it_goes(read)?;
    let mut rows = head.rows(input.name, input.described)?;
    read_member(input.file, "cache", &mut rows, read_rows)?;
    Ok((vec![rows.results()], Vec::new()))
}

const PROBLEM_SIZE: &str = "problem_size";

/// Members of the document besides the rows.
#[derive(Default)]
struct CacheHead {
    /// Names of the parameters, in order.
    keys: Option<Vec<String>>,
    columns: Vec<ParameterColumn>,
    objectives: Vec<String>,
    lists: Lists,
    notes: Vec<String>,
    device: Option<Json>,
    kernel: Option<Json>,
    problem_size: Option<Json>,
}

impl CacheHead {
    /// Reads a member of the document.
    fn read(&mut self, name: &str, reader: &mut JsonReader) -> Result<(), JsonFault> {
        match (name, reader.peek()?) {
            ("tune_params_keys", Some(b'[')) => self.keys = Some(names(read_value(reader)?)),
            ("tune_params", Some(b'{')) => reader.object(|reader, name| {
                if reader.peek()? == Some(b'[') {
                    self.columns.push(ParameterColumn::read(&name, reader, &mut self.lists)?);
                    return Ok(());
                }
                self.columns.push(ParameterColumn::open(&name));
                self.notes.push(format!("tune_params.{}: no list of values; those that occur are taken", brief(&name)));
                reader.skip()
            })?,
            ("device_name", Some(_)) => self.device = read_value(reader)?,
            ("kernel_name", Some(_)) => self.kernel = read_value(reader)?,
            ("problem_size", Some(_)) => self.problem_size = read_value(reader)?,
            ("objective", Some(_)) => self.objectives = names(read_value(reader)?),
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// Makes an empty table of the listed parameters, or of those described elsewhere.
    fn rows(self, name: &str, described: Option<Vec<ParameterColumn>>) -> Result<TaskRows, FormatError> {
        let CacheHead { keys, mut columns, objectives, lists, mut notes, device, kernel, problem_size } = self;
        if described.is_none() && keys.is_none() && columns.is_empty() {
            let problem = "missing; without it parameters cannot be told from measurements".into();
            return Err(FormatError::Entry { place: "tune_params".into(), problem });
        }
        if let Some(keys) = keys {
            let mut of_name = |name: &String| match columns.iter().position(|column| column.name == *name) {
                Some(at) => columns.swap_remove(at),
                None => {
                    notes.push(format!("tune_params has no {}; its values are those that occur", brief(name)));
                    ParameterColumn::open(name)
                }
            };
            columns = keys.iter().map(&mut of_name).collect();
        }
        notes.extend(lists.twice);
        notes.extend(other_objective(&objectives).map(|found| format!("the objective is {found}; times are replayed")));
        let mut task = task_of(name, kernel.as_ref(), device.as_ref());
        if let Some(size) = problem_size {
            task = task.with(PROBLEM_SIZE, &size);
        }
        Ok(TaskRows::new(task, Some(described.unwrap_or(columns)), notes))
    }
}

/// Reads the rows.
fn read_rows(reader: &mut JsonReader, rows: &mut TaskRows) -> Result<(), JsonFault> {
    reader.object(|reader, key| {
        rows.begin(format!("cache[{key:?}]"));
        if reader.peek()? != Some(b'{') {
            reader.skip()?;
            rows.leave_out("not an object");
            return Ok(());
        }
        let (mut config, mut time, mut error) = (ConfigInFile::new(), None, None);
        let (mut compile, mut benchmark, mut verification, mut timestamp) = (None, None, None, None);
        reader.object(|reader, name| {
            match name.as_str() {
                _ if rows.has(&name) => config.push((name, read_value(reader)?)),
                OBJECTIVE => time = reader.value(MOST_TIMES)?,
                ERROR => error = read_value(reader)?,
                "compile_time" => compile = read_value(reader)?,
                "benchmark_time" => benchmark = read_value(reader)?,
                "verification_time" => verification = read_value(reader)?,
                "timestamp" => timestamp = read_value(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let reading = match error {
            None | Some(Json::Null) => NotedOutcome::of_time(time.as_ref(), MILLISECONDS_NS),
            Some(Json::String(failure)) => NotedOutcome::of_failure(&failure),
            Some(other) => NotedOutcome::unknown(&other.to_string()),
        };
        let [build, run, verify] = [compile, benchmark, verification].map(|time| number(&time) * 1e-3);
        let unix_time = timestamp.as_ref().and_then(Json::as_str).and_then(time::unix_time).unwrap_or_default();
        Ok(rows.add(config, reading, Circumstances { seconds: Seconds { build, run, verify }, unix_time })?)
    })
}

/// Writes a cache, closed such that Kernel Tuner can open it again and continue.
pub(super) fn write(results: &Results, out: &mut dyn Write) -> io::Result<()> {
    let Results { task, rows, .. } = results;
    let parameters: Vec<ParameterValues> = results.parameters.iter().map(of_one_type).collect();
    let names: Vec<&str> = parameters.iter().map(|parameter| parameter.name.as_str()).collect();
    let values = parameters.iter().map(|ParameterValues { name, values }| (name.clone(), sorted(values).into()));
    let head = json!({
        "device_name": task.device,
        "kernel_name": task.kernel,
        PROBLEM_SIZE: task.field(PROBLEM_SIZE),
        "tune_params_keys": names,
        "tune_params": values.collect::<Map<String, Json>>(),
        "objective": [OBJECTIVE],
    });
    write!(out, "{{")?;
    for (name, value) in head.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        write!(out, "\n{}: {value},", Json::from(name.as_str()))?;
    }
    write!(out, "\n\"cache\": {{")?;
    for (at, row) in rows.iter().enumerate() {
        let values = parameters.iter().zip(&row.places);
        let mut entry: Map<String, Json> =
            values.map(|(parameter, &at)| (parameter.name.clone(), parameter.values[at as usize].clone())).collect();
        let key = entry.values().map(in_python).collect::<Vec<_>>().join(",");
        match row.expect_outcome().timing() {
            Some(timing) => {
                let time = timing.median_ns / MILLISECONDS_NS;
                entry.extend([(OBJECTIVE.into(), time.into()), ("times".into(), json!([time]))]);
            }
            None => {
                let failure = row.expect_outcome().class().map(failure_of);
                entry.extend([(ERROR.into(), failure.into())]);
            }
        }
        let Seconds { build, run, verify } = row.seconds;
        let spent = [("compile_time", build), ("verification_time", verify), ("benchmark_time", run)];
        entry.extend(spent.map(|(name, seconds)| (name.to_owned(), (seconds * 1e3).into())));
        entry.insert("timestamp".into(), time::text_of(row.unix_time, ' ').into());
        let comma = if at == 0 { "" } else { "," };
        write!(out, "{comma}\n{}: {}", Json::from(key), Json::Object(entry))?;
    }
    write!(out, "}}\n}}")
}

/// Converts all values of a parameter to floating point if one is: Python distinguishes 1.0 from 1 in its
/// keys.
fn of_one_type(parameter: &ParameterValues) -> ParameterValues {
    let ParameterValues { name, values } = parameter;
    let is_real = values.iter().all(Json::is_number) && values.iter().any(Json::is_f64);
    let real = |value: &Json| value.as_f64().filter(|_| is_real).map_or(value.clone(), Json::from);
    ParameterValues { name: name.clone(), values: values.iter().map(real).collect() }
}

/// Values in ascending order, if all are numbers.
fn sorted(values: &[Json]) -> Vec<Json> {
    let mut sorted = values.to_vec();
    if values.iter().all(Json::is_number) {
        let number = |value: &Json| value.as_f64().unwrap_or_default();
        sorted.sort_by(|a, b| number(a).total_cmp(&number(b)));
    }
    sorted
}

/// Formats a value as Python's `str` does.
fn in_python(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        other => repr(other),
    }
}

fn repr(value: &Json) -> String {
    let listed = |items: &[Json]| items.iter().map(repr).collect::<Vec<_>>().join(", ");
    match value {
        Json::Null => "None".into(),
        Json::Bool(true) => "True".into(),
        Json::Bool(false) => "False".into(),
        Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(x) => float(x),
            None => number.to_string(),
        },
        Json::String(text) => match text.contains('\'') && !text.contains('"') {
            true => format!("\"{text}\""),
            false => format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'")),
        },
        Json::Array(items) => format!("[{}]", listed(items)),
        Json::Object(members) => {
            let member =
                |(name, value): (&String, &Json)| format!("{}: {}", repr(&Json::from(name.as_str())), repr(value));
            format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Formats a floating-point number as Python does: the shortest text that reads back, with an exponent of at
/// least two digits below 1e-4 and from 1e16 on.
fn float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{x:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_python_does() {
        for (value, expected) in [
            (json!(16), "16"),
            (json!("16"), "16"),
            (json!(true), "True"),
            (json!(null), "None"),
            (json!(0.5), "0.5"),
            (json!(1e-7), "1e-07"),
            (json!(1.5e-5), "1.5e-05"),
            (json!(1e16), "1e+16"),
            (json!(123456789.25), "123456789.25"),
            (json!([1, "a", 2.5]), "[1, 'a', 2.5]"),
            (json!(["it's"]), "[\"it's\"]"),
        ] {
            assert_eq!(in_python(&value), expected, "{value}");
        }
    }
}
