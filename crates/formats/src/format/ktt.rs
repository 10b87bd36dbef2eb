//! Results of KTT, as JSON.

use serde_json::Value as Json;
use tilewright_search::ErrorClass;

use super::t4::nanoseconds;
use super::{MOST_TIMES, task_of};
use crate::json::{JsonFault, JsonReader};
use crate::outcome::NotedOutcome;
use crate::read::{FormatError, Input, ReadResults};
use crate::rows::{Circumstances, ConfigInFile, Sheets, TaskRows, read_value};

/// Names of failures.
const STATUS: &[(&str, ErrorClass)] = &[
    ("ComputationFailed", ErrorClass::RuntimeError),
    ("ValidationFailed", ErrorClass::WrongAnswer),
    ("CompilationFailed", ErrorClass::CompileErrorDevice),
    ("DeviceLimitsExceeded", ErrorClass::InstantiationError),
];

/// Reads results, with a task for each kernel.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    let (mut unit_ns, mut device) = (1e3, None);
    let mut reader = JsonReader::new(input.file)?;
    let read = reader.object(|reader, name| match (name.as_str(), reader.peek()?) {
        ("Metadata", Some(b'{')) => reader.object(|reader, name| {
            match name.as_str() {
                "TimeUnit" => {
                    let unit = read_value(reader)?;
                    unit_ns = unit.as_ref().and_then(Json::as_str).and_then(nanoseconds).unwrap_or(unit_ns);
                }
                "Device" => device = read_value(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        }),
        _ => reader.skip(),
    });
    reader.as_far_as_it_goes(read)?;
    let mut sheets = Sheets::default();
    let mut reader = JsonReader::new(input.file)?;
    let mut n_rows = 0;
    let read = reader.object(|reader, name| match name.as_str() {
        "Results" => reader.array(|reader| {
            let place = format!("Results[{n_rows}]");
            n_rows += 1;
            if reader.peek()? != Some(b'{') {
                sheets.leave_out(&place, "not an object");
                return reader.skip();
            }
            let (mut kernel, mut status, mut duration, mut config) = (None, None, None, None);
            reader.object(|reader, name| {
                match (name.as_str(), reader.peek()?) {
                    ("KernelName", _) => kernel = read_value(reader)?,
                    ("Status", _) => status = read_value(reader)?,
                    ("TotalDuration", _) => duration = reader.value(MOST_TIMES)?,
                    ("Configuration", Some(b'[')) => config = Some(read_config(reader)?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
            let Some(config) = config else {
                sheets.leave_out(&place, "no list `Configuration`");
                return Ok(());
            };
            let reading = match status.as_ref().map_or("Ok", |status| status.as_str().unwrap_or_default()) {
                "Ok" => NotedOutcome::of_time(duration.as_ref(), unit_ns),
                name => match STATUS.iter().find(|(known, _)| *known == name) {
                    Some((_, class)) => NotedOutcome::failed(*class, name),
                    None => NotedOutcome::unknown(name),
                },
            };
            let task = task_of(input.name, kernel.as_ref(), device.as_ref());
            let rows = sheets.of(task, |task| TaskRows::new(task, None, Vec::new()))?;
            rows.begin(place);
            Ok(rows.add(config, reading, Circumstances::default())?)
        }),
        _ => reader.skip(),
    });
    sheets.end(&mut reader, read)
}

/// Reads pairs of names and values.
fn read_config(reader: &mut JsonReader) -> Result<ConfigInFile, JsonFault> {
    let mut config = ConfigInFile::new();
    reader.array(|reader| {
        let (mut of, mut value) = (String::new(), None);
        reader.object(|reader, name| {
            match name.as_str() {
                "Name" => {
                    of = read_value(reader)?.and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
                }
                "Value" => value = read_value(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        config.push((of, value));
        Ok(())
    })?;
    Ok(config)
}
