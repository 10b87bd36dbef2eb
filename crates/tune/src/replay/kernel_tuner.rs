//! Caches of Kernel Tuner.

use serde_json::Value as Json;

use super::ReplayError;
use super::json::{Fault, Reader};
use super::outcome::{Reading, brief};
use super::read::{ERROR, MOST_TIMES, OBJECTIVE, names, other_objective};
use super::rows::{Column, Lists, Rows, Values, read_value};

/// Times are in milliseconds.
const UNIT_NS: f64 = 1e6;

/// What stands beside the rows.
#[derive(Default)]
pub(super) struct Head {
    /// The names of the parameters, in order.
    keys: Option<Vec<String>>,
    columns: Vec<Column>,
    objectives: Vec<String>,
    lists: Lists,
    notes: Vec<String>,
}

impl Head {
    /// Reads a member of the document.
    pub(super) fn read(&mut self, name: &str, reader: &mut Reader) -> Result<(), Fault> {
        match (name, reader.peek()?) {
            ("tune_params_keys", Some(b'[')) => self.keys = Some(names(read_value(reader)?)),
            ("tune_params", Some(b'{')) => reader.object(|reader, name| {
                if reader.peek()? == Some(b'[') {
                    self.columns.push(Column::read(&name, reader, &mut self.lists)?);
                    return Ok(());
                }
                self.columns.push(Column::open(&name));
                self.notes.push(format!("tune_params.{}: no list of values; those that occur are taken", brief(&name)));
                reader.skip()
            })?,
            ("objective", Some(_)) => self.objectives = names(read_value(reader)?),
            _ => reader.skip()?,
        }
        Ok(())
    }

    /// No rows yet, of the parameters that are listed; or of those described elsewhere.
    pub(super) fn rows(self, described: Option<Vec<Column>>) -> Result<Rows, ReplayError> {
        let Head { keys, mut columns, objectives, lists, mut notes } = self;
        if described.is_none() && keys.is_none() && columns.is_empty() {
            let problem = "missing; without it parameters cannot be told from measurements".into();
            return Err(ReplayError::Entry { place: "tune_params".into(), problem });
        }
        if let Some(keys) = keys {
            let mut of_name = |name: &String| match columns.iter().position(|column| column.name == *name) {
                Some(at) => columns.swap_remove(at),
                None => {
                    notes.push(format!("tune_params has no {}; its values are those that occur", brief(name)));
                    Column::open(name)
                }
            };
            columns = keys.iter().map(&mut of_name).collect();
        }
        notes.extend(lists.twice);
        notes.extend(other_objective(&objectives).map(|found| format!("the objective is {found}; times are replayed")));
        Ok(Rows::new(Some(described.unwrap_or(columns)), notes))
    }
}

/// Reads the rows.
pub(super) fn read_rows(reader: &mut Reader, rows: &mut Rows) -> Result<(), Fault> {
    reader.object(|reader, key| {
        rows.begin(format!("cache[{key:?}]"));
        if reader.peek()? != Some(b'{') {
            reader.skip()?;
            rows.leave_out("not an object");
            return Ok(());
        }
        let (mut config, mut time, mut error) = (Values::new(), None, None);
        reader.object(|reader, name| {
            match name.as_str() {
                _ if rows.has(&name) => config.push((name, read_value(reader)?)),
                OBJECTIVE => time = reader.value(MOST_TIMES)?,
                ERROR => error = read_value(reader)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        let reading = match error {
            None | Some(Json::Null) => Reading::of_time(time.as_ref(), UNIT_NS),
            Some(Json::String(failure)) => Reading::of_failure(&failure),
            Some(other) => Reading::unknown(&other.to_string()),
        };
        Ok(rows.add(config, reading)?)
    })
}
