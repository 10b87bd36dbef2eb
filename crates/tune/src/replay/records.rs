//! Exported records as a recorded space.

use std::io::BufReader;

use serde_json::Value as Json;

use super::ReplayError;
use super::json::unpacked;
use super::rows::{Column, Rows};
use crate::record::{Line, Record, RecordError, read_lines};

pub(super) fn read(file: &[u8], described: Option<Vec<Column>>) -> Result<Rows, ReplayError> {
    let mut first: Option<Record> = None;
    let mut rows = Rows::new(described, Vec::new());
    let mut n_records = 0;
    for (_, line) in read_lines(BufReader::new(unpacked(file))) {
        let Line { record, .. } = match line {
            Ok(line) => line,
            Err(RecordError::Malformed { line, problem }) => {
                rows.begin(format!("line {line}"));
                rows.leave_out(&problem);
                continue;
            }
            Err(RecordError::Read { source, .. }) => return Err(ReplayError::Packed(source)),
        };
        n_records += 1;
        let place = format!("record {n_records}");
        let first = first.get_or_insert_with(|| record.clone());
        let task = |r: &Record| format!("{}, {}, {}, threads {}", r.workload, r.target, r.template, r.threads);
        if task(&record) != task(first) {
            let problem = format!("it is of {} and the first record of {}", task(&record), task(first));
            return Err(ReplayError::Entry { place, problem });
        }
        rows.begin(place);
        let Json::Object(config) = record.config else {
            unreachable!("invariant: a record's configuration is an object")
        };
        let config = config.into_iter().map(|(name, value)| (name, Some(value))).collect();
        rows.add(config, record.outcome.into())?;
    }
    Ok(rows)
}
