//! Tuned problems as CSV: one row for each problem with its best parameters.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hasher;

use fnv::FnvHasher;

use super::count;
use super::specification::{KernelSpecification, ProblemError};

/// Maximum number of values of a column that messages list.
const MOST_NAMED: usize = 12;

/// Reason why a table is not usable as training data; the error is in the file or the request.
#[derive(Debug, thiserror::Error)]
pub enum TrainingTableError {
    /// Column that the table does not have.
    #[error("there is no column {column}; there are {known}")]
    NoColumn {
        /// Name that was given.
        column: String,
        /// Names of the columns.
        known: String,
    },
    /// Table with a single column, whose values contain another separator.
    #[error("the head is one column, as if {found} separated values: {head:?} (put commas between them)")]
    Separator {
        /// Name of the separator.
        found: &'static str,
        /// Header line.
        head: String,
    },
    /// Two columns of the same name.
    #[error("column {column} occurs twice")]
    ColumnTwice {
        /// The name.
        column: String,
    },
    /// Row with more or fewer values than the header.
    #[error("line {line}: {} in {}", count(*found, "value"), count(*expected, "column"))]
    Ragged {
        /// Line number, from 1.
        line: u64,
        /// Number of values in the line.
        found: usize,
        /// Number of columns in the header.
        expected: usize,
    },
    /// Row that is not UTF-8.
    #[error("line {line} is not UTF-8")]
    NoText {
        /// Line number, from 1.
        line: u64,
    },
    /// Value that is invalid for its field.
    #[error("line {line}: {error}")]
    Field {
        /// Line number, from 1.
        line: u64,
        /// Reason.
        error: ProblemError,
    },
    /// Value of a parameter that the specification does not list.
    #[error("line {line}: parameter {parameter} cannot be {value:?}; its values are {known}")]
    Parameter {
        /// Line number, from 1.
        line: u64,
        /// The parameter.
        parameter: String,
        /// The value.
        value: String,
        /// Values in the specification, as text.
        known: String,
    },
    /// Table without rows.
    #[error("there are no rows")]
    Empty,
    /// Filter that no row passes.
    #[error("no row has {column}={value}; its values are {known}")]
    NothingLeft {
        /// The column.
        column: String,
        /// The value.
        value: String,
        /// Values in the column.
        known: String,
    },
    /// Constraint that no row satisfies.
    #[error("constraint {constraint} holds for none of the {} ({text})", count(*n_rows, "row"))]
    NeverHolds {
        /// The constraint.
        constraint: String,
        /// The predicate.
        text: String,
        /// Number of rows.
        n_rows: usize,
    },
}

/// Separators of values in tables that are not comma-separated.
const SEPARATORS: [(char, &str); 4] = [('\t', "tabs"), (';', "semicolons"), ('|', "bars"), (' ', "blanks")];

/// Problem with its best parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunedProblem {
    /// Value of each field of the specification, as a number.
    pub problem: Vec<i64>,
    /// Index of each parameter's best value.
    pub answer: Vec<u32>,
    /// Value of the grouping column; empty without one.
    pub group: String,
}

/// Reads the rows that have the given values in the given columns. Columns that the specification does not
/// name are ignored.
///
/// # Errors
/// [`TrainingTableError`], with the line number.
pub fn read_rows(
    kernel: &KernelSpecification,
    table: &[u8],
    filters: &[(String, String)],
    group: Option<&str>,
) -> Result<Vec<TunedProblem>, TrainingTableError> {
    let mut reader =
        csv::ReaderBuilder::new().has_headers(false).flexible(true).trim(csv::Trim::All).from_reader(table);
    let mut records = reader.byte_records().enumerate().map(|(at, record)| {
        // When reading from memory, the reader can fail only if it is asked to check lengths.
        let record = record.expect("invariant: bytes are read as they are");
        let line = record.position().map_or(at as u64 + 1, csv::Position::line);
        csv::StringRecord::from_byte_record(record)
            .map(|record| (line, record))
            .map_err(|_| TrainingTableError::NoText { line })
    });
    let head = records.next().ok_or(TrainingTableError::Empty)??.1;
    let separator = SEPARATORS.iter().find(|(separator, _)| head.len() == 1 && head[0].contains(*separator));
    if let Some(&(_, found)) = separator {
        return Err(TrainingTableError::Separator { found, head: head[0].to_owned() });
    }
    let column = |name: &str| {
        let mut places = (0..head.len()).filter(|&at| &head[at] == name);
        let known = || head.iter().collect::<Vec<_>>().join(", ");
        let place =
            places.next().ok_or_else(|| TrainingTableError::NoColumn { column: name.into(), known: known() })?;
        if places.next().is_some() { Err(TrainingTableError::ColumnTwice { column: name.into() }) } else { Ok(place) }
    };
    let given = kernel.given_fields().map(|field| Ok((field.name.as_str(), column(&field.name)?)));
    let given: HashMap<&str, usize> = given.collect::<Result<_, TrainingTableError>>()?;
    let parameters = kernel.parameters.iter().map(|parameter| Ok((parameter, column(&parameter.name)?)));
    let parameters: Vec<_> = parameters.collect::<Result<_, TrainingTableError>>()?;
    let group = group.map(column).transpose()?;
    let filters = filters.iter().map(|(name, value)| Ok((name, value, column(name)?, BTreeSet::new())));
    let mut filters: Vec<_> = filters.collect::<Result<_, TrainingTableError>>()?;

    let mut rows = Vec::new();
    for record in records {
        let (line, record) = record?;
        if record.len() != head.len() {
            return Err(TrainingTableError::Ragged { line, found: record.len(), expected: head.len() });
        }
        let mut is_wanted = true;
        for (_, value, at, seen) in &mut filters {
            is_wanted &= record[*at] == **value;
            if seen.len() <= MOST_NAMED {
                seen.insert(record[*at].to_owned());
            }
        }
        if !is_wanted {
            continue;
        }
        let value = |name: &str| given.get(name).map(|&at| &record[at]);
        let problem = kernel.problem(value).map_err(|error| TrainingTableError::Field { line, error })?;
        let index = |(parameter, at): &(&super::ParameterSpecification, usize)| {
            let value = &record[*at];
            parameter.values.iter().position(|known| known == value).map(|index| index as u32).ok_or_else(|| {
                let (parameter, known) = (parameter.name.clone(), parameter.values.join(", "));
                TrainingTableError::Parameter { line, parameter, value: value.into(), known }
            })
        };
        let answer = parameters.iter().map(index).collect::<Result<_, _>>()?;
        rows.push(TunedProblem { problem, answer, group: group.map_or(String::new(), |at| record[at].to_owned()) });
    }
    if rows.is_empty() {
        return Err(match filters.into_iter().find(|(_, value, _, seen)| !seen.is_empty() && !seen.contains(*value)) {
            None => TrainingTableError::Empty,
            Some((column, value, _, seen)) => {
                let mut known = seen.iter().take(MOST_NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
                known += if seen.len() > MOST_NAMED { ", …" } else { "" };
                TrainingTableError::NothingLeft { column: column.clone(), value: value.clone(), known }
            }
        });
    }
    if !kernel.constraints.is_empty() {
        check_constraints(kernel, &rows)?;
    }
    Ok(rows)
}

/// Refuses a constraint that no row satisfies, since it cannot be what its author meant.
fn check_constraints(kernel: &KernelSpecification, rows: &[TunedProblem]) -> Result<(), TrainingTableError> {
    let mut never: Vec<_> = kernel.constraints.iter().collect();
    for row in rows {
        let violated: Vec<&str> = kernel.violated(&row.problem, &row.answer).map(|c| c.name.as_str()).collect();
        never.retain(|constraint| violated.contains(&constraint.name.as_str()));
        if never.is_empty() {
            return Ok(());
        }
    }
    let (constraint, text) = (never[0].name.clone(), never[0].text.clone());
    Err(TrainingTableError::NeverHolds { constraint, text, n_rows: rows.len() })
}

/// Hash of the contents: 64-bit FNV-1a.
pub fn content_hash(bytes: &[u8]) -> u64 {
    let mut hash = FnvHasher::default();
    hash.write(bytes);
    hash.finish()
}
