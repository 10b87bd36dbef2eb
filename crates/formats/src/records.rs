//! Conversion of results to Tilewright's own records.

use tilewright_search::Conditions;
use tilewright_tune::record::{Record, RecordLine};

use crate::format::FORMATS;
use crate::format::records::{THREADS, WORKLOAD, add};
use crate::read::FormatError;
use crate::results::{Results, TunerTask};
use crate::rows::Sheets;

/// Name of an unknown device.
const UNKNOWN: &str = "unknown";

/// Converts results that were read in this format to records. Results of our own tasks become the original
/// records; for others, the workload is the name of the format with the task's text. A winner without a
/// recorded time yields no record.
pub fn records<'a>(format: &'a str, results: &'a Results) -> impl Iterator<Item = RecordLine> + 'a {
    let TunerTask { kernel, device, .. } = &results.task;
    let text = |name| results.task.field(name).and_then(|value| value.as_str().map(str::to_owned));
    let threads = results.task.field(THREADS).and_then(|value| value.as_u64()).and_then(|n| u32::try_from(n).ok());
    let workload = text(WORKLOAD).unwrap_or_else(|| format!("{format}:{}", results.task.text()));
    let device = if device.is_empty() { UNKNOWN } else { device };
    results.rows.iter().enumerate().filter_map(move |(at, row)| {
        let record = Record {
            workload: without_controls(&workload),
            target: without_controls(device),
            template: without_controls(kernel),
            threads: threads.filter(|n| *n > 0).unwrap_or(1),
            config: results.config(row),
            outcome: row.outcome.clone()?,
            seconds: row.seconds,
            steps: String::new(),
            search: format.to_owned(),
            seed: 0,
            trial: at as u64,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            toolchain: format.to_owned(),
            unix_time: row.unix_time,
            run: None,
            limit: None,
            conditions: Conditions::default(),
            is_imported: false,
        };
        Some(RecordLine { record, winner: None })
    })
}

fn without_controls(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Whether a record's workload is another tuner's task.
pub fn is_foreign(workload: &str) -> bool {
    split(workload).is_some()
}

/// Splits a foreign workload into the name of the format and the task's text.
fn split(workload: &str) -> Option<(&str, &str)> {
    let (format, text) = workload.split_once(':')?;
    FORMATS.iter().any(|known| known.name == format).then_some((format, text))
}

/// Task of a record that was read from a file of another tuner.
pub(crate) fn foreign_task(record: &Record) -> Option<TunerTask> {
    let (_, text) = split(&record.workload)?;
    TunerTask::parse(text, if record.target == UNKNOWN { "" } else { &record.target })
}

/// Collector of records, which groups them as results by task, in order of first occurrence.
#[derive(Default)]
pub struct Collection {
    sheets: Sheets,
    n_records: u64,
}

impl Collection {
    /// Adds a record.
    ///
    /// # Errors
    /// If there are too many records.
    pub fn add(&mut self, record: Record) -> Result<(), FormatError> {
        self.n_records += 1;
        add(&mut self.sheets, format!("record {}", self.n_records), record)
    }

    /// Results of the records added.
    pub fn results(self) -> Vec<Results> {
        self.sheets.results().0
    }
}
