//! `*.autotune.json`, in which Triton's autotuner stores the measurements of a key.

use std::io::{self, Write};

use serde_json::{Map, Value as Json};

use super::{MILLISECONDS_NS, MOST_TIMES, task_of};
use crate::json::JsonReader;
use crate::outcome::NotedOutcome;
use crate::read::{FormatError, Input, ReadResults};
use crate::results::Results;
use crate::rows::{Circumstances, ConfigInFile, Sheets, TaskRows, read_value};

/// Name of the field of the problem.
const KEY: &str = "key";

/// Arguments of `triton.Config` besides `kwargs`, which are the kernel's.
const OPTIONS: &[&str] = &["num_warps", "num_ctas", "num_stages", "maxnreg", "pre_hook", "ir_override"];

/// Reads the timings. The file is named after the kernel.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    let mut task = task_of(input.name.strip_suffix(".autotune").unwrap_or(input.name), None, None);
    let mut reader = JsonReader::new(input.file)?;
    let read = reader.object(|reader, name| {
        match name.as_str() {
            KEY => task = read_value(reader)?.map_or(task.clone(), |key| task.clone().with(KEY, &key)),
            _ => reader.skip()?,
        }
        Ok(())
    });
    reader.as_far_as_it_goes(read)?;
    let mut sheets = Sheets::default();
    let mut reader = JsonReader::new(input.file)?;
    let mut n_rows = 0;
    let read = reader.object(|reader, name| match name.as_str() {
        "configs_timings" => reader.array(|reader| {
            let place = format!("configs_timings[{n_rows}]");
            n_rows += 1;
            let pair = reader.value(MOST_TIMES)?;
            let (config, times) = match pair.as_ref().and_then(Json::as_array).map(Vec::as_slice) {
                Some([Json::Object(config), times]) => (config, times),
                _ => {
                    sheets.leave_out(&place, "no configuration with its times");
                    return Ok(());
                }
            };
            // The median is the first of the quantiles.
            let time = times.as_array().map_or(Some(times), |times| times.first());
            let rows = sheets.of(task.clone(), |task| TaskRows::new(task, None, Vec::new()))?;
            rows.begin(place);
            Ok(rows.add(flat(config), NotedOutcome::of_time(time, MILLISECONDS_NS), Circumstances::default())?)
        }),
        _ => reader.skip(),
    });
    sheets.end(&mut reader, read)
}

/// Merges the arguments of the kernel and the options of its compilation; null values were not chosen.
fn flat(config: &Map<String, Json>) -> ConfigInFile {
    let mut values = ConfigInFile::new();
    for (name, value) in config {
        match value {
            Json::Object(arguments) => values.extend(arguments.iter().map(|(n, v)| (n.clone(), Some(v.clone())))),
            Json::Null => {}
            value => values.push((name.clone(), Some(value.clone()))),
        }
    }
    values
}

/// Writes the timings as Triton's autotuner reads them: a configuration's arguments, and its median for each
/// quantile, which is infinite for a failure.
pub(super) fn write(results: &Results, out: &mut dyn Write) -> io::Result<()> {
    let task = &results.task;
    let values = || Json::Array(task.problem.iter().filter_map(|(name, _)| task.field(name)).collect());
    write!(out, "{{\"{KEY}\": {}, \"configs_timings\": [", task.field(KEY).unwrap_or_else(values))?;
    for (at, row) in results.rows.iter().enumerate() {
        let (mut options, mut kwargs) = (Map::new(), Map::new());
        for (name, value) in results.config(row).as_object().into_iter().flatten() {
            let is_option = OPTIONS.contains(&name.as_str());
            // An option that was not chosen gets Triton's default.
            if is_option && value.is_null() {
                continue;
            }
            let place = if is_option { &mut options } else { &mut kwargs };
            place.insert(name.clone(), value.clone());
        }
        let mut config = Map::from_iter([("kwargs".to_owned(), kwargs.into())]);
        config.extend(options);
        // JSON has no infinity, but Python's dialect does.
        let infinite = || "Infinity".to_owned();
        let time = row
            .expect_outcome()
            .timing()
            .map_or_else(infinite, |t| Json::from(t.median_ns / MILLISECONDS_NS).to_string());
        let comma = if at == 0 { "" } else { "," };
        write!(out, "{comma}\n[{}, [{time}, {time}, {time}]]", Json::Object(config))?;
    }
    writeln!(out, "\n]}}")
}
