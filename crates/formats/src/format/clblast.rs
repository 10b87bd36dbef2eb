//! JSON of CLBlast's tuners.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::{MILLISECONDS_NS, MOST_TIMES, OBJECTIVE, task_of};
use crate::json::JsonReader;
use crate::outcome::NotedOutcome;
use crate::read::{FormatError, Input, ReadResults};
use crate::results::TunerTask;
use crate::rows::{Circumstances, ConfigInFile, Sheets, TaskRows, read_value};

/// Keys beside the rows that describe the device: the first one present names it.
const DEVICE: &[&str] = &["clblast_device_name", "device", "device_name"];
/// Prefixes of names that describe the problem that was tuned.
const PROBLEM: &[&str] = &["arg_", "precision"];

/// Reads results, with a task for each kernel: one file may have two.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    let mut head = BTreeMap::new();
    let mut reader = JsonReader::new(input.file)?;
    let read = reader.object(|reader, name| {
        match DEVICE.contains(&name.as_str()) || PROBLEM.iter().any(|begin| name.starts_with(begin)) {
            true => head.extend(read_value(reader)?.map(|value| (name, value))),
            false => reader.skip()?,
        }
        Ok(())
    });
    reader.as_far_as_it_goes(read)?;
    let device = DEVICE.iter().find_map(|name| head.get(*name));
    let task = |kernel: Option<&Json>| -> TunerTask {
        let problem = head.iter().filter(|(name, _)| !DEVICE.contains(&name.as_str()));
        problem.fold(task_of(input.name, kernel, device), |task, (name, value)| task.with(name, value))
    };
    let mut sheets = Sheets::default();
    let mut reader = JsonReader::new(input.file)?;
    let mut n_rows = 0;
    let read = reader.object(|reader, name| match name.as_str() {
        "results" => reader.array(|reader| {
            let place = format!("results[{n_rows}]");
            n_rows += 1;
            let (mut kernel, mut time, mut config) = (None, None, None);
            if reader.peek()? != Some(b'{') {
                sheets.leave_out(&place, "not an object");
                return reader.skip();
            }
            reader.object(|reader, name| {
                match (name.as_str(), reader.peek()?) {
                    ("kernel", _) => kernel = read_value(reader)?,
                    (OBJECTIVE, _) => time = reader.value(MOST_TIMES)?,
                    ("parameters", Some(b'{')) => {
                        let mut values = ConfigInFile::new();
                        reader.object(|reader, name| {
                            values.push((name, read_value(reader)?));
                            Ok(())
                        })?;
                        config = Some(values);
                    }
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
            let Some(config) = config else {
                sheets.leave_out(&place, "no object `parameters`");
                return Ok(());
            };
            let rows = sheets.of(task(kernel.as_ref()), |task| TaskRows::new(task, None, Vec::new()))?;
            rows.begin(place);
            Ok(rows.add(config, NotedOutcome::of_time(time.as_ref(), MILLISECONDS_NS), Circumstances::default())?)
        }),
        _ => reader.skip(),
    });
    sheets.end(&mut reader, read)
}
