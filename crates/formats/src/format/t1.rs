//! T1, the description of a space that belongs to T4 results.

use serde_json::Value as Json;
use tilewright_tune::expression::{self, Datum};

use crate::json::{Fault, Reader};
use crate::outcome::brief;
use crate::read::{Found, Input, ReadError};
use crate::rows::{Column, Lists, read_value};

/// Says what a description is good for.
pub(super) fn refuse(_: Input) -> Result<Found, ReadError> {
    Err(ReadError::NoResults { found: "a T1 description", mend: "give results, and this file with --description" })
}

/// The parameters with their values, and oddities of these. Conditions are left out: the results say what is
/// legal.
pub(crate) fn read_columns(file: &[u8]) -> Result<(Vec<Column>, Option<String>), ReadError> {
    let (mut columns, mut lists) = (Vec::new(), Lists::default());
    let mut reader = Reader::new(file)?;
    let mut member = |reader: &mut Reader, name: String| {
        if name != "TuningParameters" || reader.peek()? != Some(b'[') {
            return reader.skip();
        }
        reader.array(|reader| {
            columns.push(parameter(reader, &mut lists)?);
            Ok(())
        })
    };
    let read = reader.object(|reader, name| match (name.as_str(), reader.peek()?) {
        ("ConfigurationSpace", Some(b'{')) => reader.object(&mut member),
        _ => reader.skip(),
    });
    match read {
        Err(fault) => Err(reader.error(fault)),
        Ok(()) if columns.is_empty() => Err(ReadError::Entry {
            place: "ConfigurationSpace.TuningParameters".into(),
            problem: "no parameters, so this is no T1 file".into(),
        }),
        Ok(()) => Ok((columns, lists.twice)),
    }
}

fn parameter(reader: &mut Reader, lists: &mut Lists) -> Result<Column, Fault> {
    let (mut parameter, mut values) = (String::new(), None);
    reader.object(|reader, name| {
        match (name.as_str(), reader.peek()?) {
            ("Name", Some(b'"')) => {
                let name = read_value(reader)?;
                parameter = name.as_ref().and_then(Json::as_str).unwrap_or_default().to_owned();
            }
            ("Values", Some(b'[')) => values = Some(Ok(Column::read(&parameter, reader, lists)?)),
            ("Values", _) => values = Some(Err(read_value(reader)?)),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let wrong = |problem: String| {
        Fault::Refused(ReadError::Entry { place: format!("parameter {}", brief(&parameter)), problem })
    };
    match values {
        Some(Ok(mut column)) => {
            column.name = parameter;
            Ok(column)
        }
        Some(Err(Some(Json::String(text)))) => {
            let values = expression::list(&text).map_err(|error| wrong(format!("its values, {error}")))?;
            Column::listed(&parameter, values.iter().map(Datum::to_json).collect(), lists)
        }
        Some(Err(_)) => Err(wrong("its values are no list, nor a text that writes one as Python does".into())),
        None => Err(wrong("it has no `Values`".into())),
    }
}
