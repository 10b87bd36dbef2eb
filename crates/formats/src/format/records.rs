//! Tilewright's own records, as JSON lines.

use std::io::{self, BufReader, Write};

use serde_json::{Value as Json, json};
use tilewright_tune::RecordError;
use tilewright_tune::record::{Record, RecordLine, read_lines};

use crate::json::unpacked;
use crate::read::{FormatError, Input, ReadResults};
use crate::records;
use crate::results::{Results, TunerTask};
use crate::rows::{Circumstances, Sheets, TaskRows};

/// Names of the fields of a record's task.
pub(crate) const WORKLOAD: &str = "workload";
pub(crate) const THREADS: &str = "threads";

/// Reads records; records of other tuners' tasks keep the names of these.
pub(super) fn read(input: Input) -> Result<ReadResults, FormatError> {
    let mut sheets = Sheets::default();
    for (number, line) in read_lines(BufReader::new(unpacked(input.file))) {
        let record = match line {
            Ok(RecordLine { record, .. }) => record,
            Err(RecordError::Malformed { line, problem }) => {
                sheets.leave_out(&format!("line {line}"), &problem);
                continue;
            }
            Err(RecordError::Read { source, .. }) => return Err(FormatError::Packed(source)),
        };
        add(&mut sheets, format!("line {number}"), record)?;
    }
    Ok(sheets.results())
}

/// Adds a record to the rows of its task.
pub(crate) fn add(sheets: &mut Sheets, place: String, record: Record) -> Result<(), FormatError> {
    let Record { outcome, seconds, unix_time, .. } = &record;
    let (outcome, of) = (outcome.clone(), Circumstances { seconds: *seconds, unix_time: *unix_time });
    let rows = sheets.of(task_of(&record), |task| TaskRows::new(task, None, Vec::new()))?;
    rows.begin(place);
    let Json::Object(config) = record.config else { unreachable!("invariant: a record's configuration is an object") };
    rows.add(config.into_iter().map(|(name, value)| (name, Some(value))).collect(), outcome.into(), of)
}

/// Task of a record.
fn task_of(record: &Record) -> TunerTask {
    let Record { workload, target, template, threads, .. } = record;
    records::foreign_task(record).unwrap_or_else(|| TunerTask {
        kernel: template.clone(),
        device: target.clone(),
        problem: vec![(WORKLOAD.into(), json!(workload).to_string()), (THREADS.into(), threads.to_string())],
    })
}

/// Writes records.
pub(super) fn write(results: &Results, out: &mut dyn Write) -> io::Result<()> {
    records::records("records", results).try_for_each(|line| writeln!(out, "{}", line.to_text()))
}
