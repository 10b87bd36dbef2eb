//! T1, the description of a search space that accompanies T4 results.

use serde_json::Value as Json;
use tilewright_search::expression::{self, Datum, Expression, ExpressionError, ValueType, VariableNames};
use tilewright_search::{Constraint, Parameter, Space};

use crate::json::{JsonFault, JsonReader};
use crate::outcome::brief;
use crate::read::{FormatError, Input, ReadResults};
use crate::results::{ConfigResult, Results};
use crate::rows::{Lists, ParameterColumn, read_value};

/// Refuses to read results, with a message that explains the use of a description.
pub(super) fn refuse(_: Input) -> Result<ReadResults, FormatError> {
    Err(FormatError::NoResults { found: "a T1 description", mend: "give results, and this file with --description" })
}

/// Description of a space.
pub struct SpaceDescription {
    pub(crate) columns: Vec<ParameterColumn>,
    /// Expressions that legal configurations satisfy.
    conditions: Vec<String>,
    /// Duplicate values, as a note.
    pub(crate) twice: Option<String>,
}

impl SpaceDescription {
    /// Parses a T1 file, plain or compressed by gzip.
    ///
    /// # Errors
    /// [`FormatError`], in one line, with the position.
    pub fn read(file: &[u8]) -> Result<SpaceDescription, FormatError> {
        let (mut columns, mut conditions, mut lists) = (Vec::new(), Vec::new(), Lists::default());
        let mut reader = JsonReader::new(file)?;
        let mut member = |reader: &mut JsonReader, name: String| match (name.as_str(), reader.peek()?) {
            ("TuningParameters", Some(b'[')) => reader.array(|reader| {
                columns.push(parameter(reader, &mut lists)?);
                Ok(())
            }),
            ("Conditions", Some(b'[')) => reader.array(|reader| {
                conditions.extend(condition(reader)?);
                Ok(())
            }),
            _ => reader.skip(),
        };
        let read = reader.object(|reader, name| match (name.as_str(), reader.peek()?) {
            ("ConfigurationSpace", Some(b'{')) => reader.object(&mut member),
            _ => reader.skip(),
        });
        match read {
            Err(fault) => Err(reader.error(fault)),
            Ok(()) if columns.is_empty() => Err(FormatError::Entry {
                place: "ConfigurationSpace.TuningParameters".into(),
                problem: "no parameters, so this is no T1 file".into(),
            }),
            Ok(()) => Ok(SpaceDescription { columns, conditions, twice: lists.twice }),
        }
    }

    /// Makes the described space.
    ///
    /// # Errors
    /// [`FormatError`] if a condition is invalid, or there is no valid space.
    pub fn space(&self, name: &str) -> Result<Space, FormatError> {
        let of_column = |column: &ParameterColumn| {
            let values: Vec<Datum> = column.values().map(|value| datum(&value)).collect();
            Parameter::of_data(&column.name, &values)
        };
        let parameters: Vec<Parameter> = self.columns.iter().map(of_column).collect();
        let constraint = |(at, text): (usize, &String)| {
            let place = || format!("condition {}, {}", at + 1, brief(text));
            let wrong = |error: ExpressionError| FormatError::Entry { place: place(), problem: error.to_string() };
            Constraint::parse(&format!("condition {}", at + 1), text, &parameters).map_err(wrong)
        };
        let constraints = self.conditions.iter().enumerate().map(constraint).collect::<Result<_, _>>()?;
        Ok(Space::new(name, parameters, constraints)?)
    }

    /// Lists the conditions that some results violate, in one line; the results themselves determine what is
    /// legal.
    pub(crate) fn disagreement(&self, results: &Results) -> Vec<String> {
        let data: Vec<Vec<Datum>> =
            results.parameters.iter().map(|parameter| parameter.values.iter().map(datum).collect()).collect();
        let names = results.parameters.iter().zip(&data);
        let scope: VariableNames =
            names.map(|(parameter, data)| (parameter.name.clone(), ValueType::of_all(data))).collect();
        let told = |text: &String| {
            let code = Expression::parse(text).and_then(|expression| expression.compile_condition(&scope));
            let code = match code {
                Ok(code) => code,
                Err(error) => return Some(format!("the condition {} is not checked: {error}", brief(text))),
            };
            let holds = |row: &&ConfigResult| {
                let values = row.places.iter().zip(&data).map(|(&at, data)| Some(data[at as usize].clone()));
                code.holds(&values.collect::<Vec<_>>())
            };
            let mut broken = results.rows.iter().filter(|row| !holds(row));
            let first = broken.next()?;
            let (n, of) = (1 + broken.count(), results.rows.len());
            let first = brief(&results.config(first).to_string());
            Some(format!(
                "configurations that the condition {} does not allow: {n} of {of}, the first {first}",
                brief(text)
            ))
        };
        self.conditions.iter().filter_map(told).collect()
    }
}

/// Value as expressions see it.
fn datum(value: &Json) -> Datum {
    match value {
        Json::Null => Datum::Nothing,
        Json::Bool(holds) => Datum::Bool(*holds),
        Json::Number(number) => match number.as_i64() {
            Some(whole) => Datum::Int(whole),
            None => Datum::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => text.as_str().into(),
        Json::Array(items) => Datum::List(items.iter().map(datum).collect()),
        Json::Object(_) => value.to_string().as_str().into(),
    }
}

/// Reads the expression of a condition.
fn condition(reader: &mut JsonReader) -> Result<Option<String>, JsonFault> {
    let mut expression = None;
    reader.object(|reader, name| {
        match name.as_str() {
            "Expression" => expression = read_value(reader)?,
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    Ok(expression.as_ref().and_then(Json::as_str).map(str::to_owned))
}

fn parameter(reader: &mut JsonReader, lists: &mut Lists) -> Result<ParameterColumn, JsonFault> {
    let (mut parameter, mut values) = (String::new(), None);
    reader.object(|reader, name| {
        match (name.as_str(), reader.peek()?) {
            ("Name", Some(b'"')) => {
                let name = read_value(reader)?;
                parameter = name.as_ref().and_then(Json::as_str).unwrap_or_default().to_owned();
            }
            ("Values", Some(b'[')) => values = Some(Ok(ParameterColumn::read(&parameter, reader, lists)?)),
            ("Values", _) => values = Some(Err(read_value(reader)?)),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let wrong = |problem: String| {
        JsonFault::Refused(FormatError::Entry { place: format!("parameter {}", brief(&parameter)), problem })
    };
    match values {
        Some(Ok(mut column)) => {
            column.name = parameter;
            Ok(column)
        }
        Some(Err(Some(Json::String(text)))) => {
            let values = expression::list(&text).map_err(|error| wrong(format!("its values, {error}")))?;
            ParameterColumn::listed(&parameter, values.iter().map(Datum::to_json).collect(), lists)
        }
        Some(Err(_)) => Err(wrong("its values are no list, nor a text that writes one as Python does".into())),
        None => Err(wrong("it has no `Values`".into())),
    }
}
