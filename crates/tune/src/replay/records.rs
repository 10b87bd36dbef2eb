//! Exported records as a recorded space.

use serde_json::Value as Json;

use super::read::{Contents, ReplayError, Row};
use crate::record::{Line, Record, RecordError, read_lines};

pub(super) fn read(bytes: &[u8]) -> Result<Contents, ReplayError> {
    let mut first: Option<Record> = None;
    let mut rows = Vec::new();
    for line in read_lines(bytes) {
        let Line { record, .. } = line.map_err(|error| match error {
            RecordError::Malformed { line, problem } => ReplayError::Entry { place: format!("line {line}"), problem },
            RecordError::Read { line, source } => {
                ReplayError::Entry { place: format!("line {line}"), problem: source.to_string() }
            }
        })?;
        let first = first.get_or_insert_with(|| record.clone());
        let place = format!("record {}", rows.len() + 1);
        let task = |r: &Record| format!("{}, {}, {}, threads {}", r.workload, r.target, r.template, r.threads);
        if task(&record) != task(first) {
            let problem = format!("it is of {} and the first record of {}", task(&record), task(first));
            return Err(ReplayError::Entry { place, problem });
        }
        let Json::Object(config) = record.config else {
            return Err(ReplayError::Entry { place, problem: "config is not an object".into() });
        };
        rows.push(Row { place, config, outcome: record.outcome });
    }
    Ok(Contents { parameters: None, rows })
}
