//! Reading of files: detection of the format, and the steps from rows to results.

use std::io::{BufRead, BufReader, Read};

use serde_json::Value as Json;
use tilewright_search::SpaceError;

use crate::format::{FORMATS, Format, SpaceDescription, names_of_formats};
use crate::json::{JsonFault, JsonReader, MOST_BYTES, unpacked};
use crate::outcome::brief;
use crate::results::{Results, TunerTask};
use crate::rows::{ParameterColumn, Sheets, TaskRows};

/// Maximum length of a line in bytes.
const LINE_LIMIT: u64 = 16 << 20;
/// Maximum number of tasks that a message lists.
const MOST_NAMED: usize = 4;

/// Reason why a file cannot be used; the error is in the file or the request.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// Invalid description of the space.
    #[error("the description: {0} (without a description, parameters have the values that occur)")]
    Description(#[source] Box<FormatError>),
    /// Damaged compressed data.
    #[error("cannot be unpacked: {0}")]
    Packed(#[source] std::io::Error),
    /// File beyond the size limit.
    #[error("longer than {limit} bytes when unpacked")]
    TooLong {
        /// Maximum size in bytes.
        limit: u64,
    },
    /// Invalid JSON, or JSON that lacks members of its format.
    #[error("line {line}, column {column}: {problem}")]
    Json {
        /// Line number, from 1.
        line: usize,
        /// Column number, from 1.
        column: usize,
        /// Reason, in one line.
        problem: String,
    },
    /// Unknown format.
    #[error("{found}; there are {}", names_of_formats(|format| format.has_results()))]
    Format {
        /// Kind of file, as far as known.
        found: &'static str,
    },
    /// Format without results.
    #[error("{found}, which has no results ({mend})")]
    NoResults {
        /// Kind of file.
        found: &'static str,
        /// Hint: how such a file can be used.
        mend: &'static str,
    },
    /// Invalid entry.
    #[error("{place}: {problem}")]
    Entry {
        /// Position of the entry.
        place: String,
        /// Reason, in one line.
        problem: String,
    },
    /// Too many rows.
    #[error("more than {limit} rows, which is the limit at this number of parameters")]
    TooMany {
        /// Maximum number of rows.
        limit: usize,
    },
    /// Too many tasks.
    #[error("more than {limit} tasks")]
    TooManyTasks {
        /// Maximum number of tasks.
        limit: usize,
    },
    /// Parameters that do not form a valid space.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// File without rows, or without any known outcome.
    #[error("{}{reasons}", match n_rows { 0 => "there are no rows".into(), n => format!("none of its {n} rows can be read") })]
    NoRows {
        /// Number of rows.
        n_rows: u64,
        /// Reasons, as far as known.
        reasons: String,
    },
    /// Results without a successful configuration.
    #[error("none of its {n_rows} configurations was measured successfully{reasons}")]
    NothingValid {
        /// Number of configurations.
        n_rows: usize,
        /// Notes that may explain it.
        reasons: String,
    },
    /// Winners without times, although times are needed.
    #[error("these are winners without times (`tune --transfer` begins with them, `predict train` learns from them)")]
    NoTimes,
    /// Several tasks, of which one must be selected.
    #[error("results of {n_tasks} tasks: {tasks} (choose one with --task, by its number or a part of its text)")]
    Tasks {
        /// Number of tasks.
        n_tasks: usize,
        /// First few tasks.
        tasks: String,
    },
    /// Task that does not exist.
    #[error("no task {asked:?}; there are {tasks}")]
    NoTask {
        /// Requested task.
        asked: String,
        /// First few existing tasks.
        tasks: String,
    },
}

/// Contents of a file.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Format of the file.
    pub format: &'static Format,
    /// Results, by task.
    pub results: Vec<Results>,
    /// Notes on irregularities of the file, one per line.
    pub notes: Vec<String>,
}

impl Recorded {
    /// Best configurations of all other tasks, for [`carried_over`](crate::carried_over).
    ///
    /// # Errors
    /// As [`Results::best_config`].
    pub fn others(&self, task: &TunerTask) -> Result<Vec<Json>, FormatError> {
        let others = self.results.iter().filter(|results| results.task != *task);
        others.filter_map(|results| results.best_config().transpose()).collect()
    }

    /// Selects the results of a task by its number, from 1, its text, or a part that only its text contains;
    /// without a selection, the only results.
    ///
    /// # Errors
    /// If several tasks match, or none.
    pub fn task(&self, asked: Option<&str>) -> Result<&Results, FormatError> {
        let found: Vec<&Results> = match asked {
            None => self.results.iter().collect(),
            Some(asked) => {
                let number = asked.parse::<usize>().ok().and_then(|number| self.results.get(number.checked_sub(1)?));
                let of_text = |is_it: &dyn Fn(&str) -> bool| -> Vec<&Results> {
                    self.results.iter().filter(|results| is_it(&results.task.to_string())).collect()
                };
                let equal = || Some(of_text(&|text| text == asked)).filter(|found| !found.is_empty());
                number.map(|found| vec![found]).or_else(equal).unwrap_or_else(|| of_text(&|text| text.contains(asked)))
            }
        };
        let listed = |found: &[&Results]| {
            let one = |results: &&Results| brief(&results.task.to_string());
            let named = found.iter().take(MOST_NAMED).map(one).collect::<Vec<_>>().join("; ");
            if found.len() > MOST_NAMED { named + "; …" } else { named }
        };
        match (&found[..], asked) {
            ([results], _) => Ok(results),
            ([], Some(asked)) if !self.results.is_empty() => {
                let tasks = listed(&self.results.iter().collect::<Vec<_>>());
                Err(FormatError::NoTask { asked: asked.into(), tasks })
            }
            ([], _) => Err(FormatError::NoRows { n_rows: 0, reasons: String::new() }),
            (several, _) => Err(FormatError::Tasks { n_tasks: several.len(), tasks: listed(several) }),
        }
    }
}

/// File to be read.
pub(crate) struct Input<'a> {
    /// Name of the file without the extensions that denote its format.
    pub(crate) name: &'a str,
    pub(crate) file: &'a [u8],
    /// Parameters that are described elsewhere.
    pub(crate) described: Option<Vec<ParameterColumn>>,
}

/// Results of a file, and notes on its irregularities.
pub(crate) type ReadResults = (Vec<Results>, Vec<String>);

/// Reads a file, plain or compressed by gzip, in one of the [`FORMATS`]: the given one, or the one detected
/// from the contents. `description` is a T1 file, which provides the parameters and values if a file does not
/// list them; without one they are those that occur.
///
/// Files of other tuners are read as far as possible. A row without a configuration of these parameters is
/// skipped. A time that is not a positive number, or stands for a failure, is a failure. For a configuration
/// in several rows, the median of the successful ones is used. A truncated file is read up to its end. All of
/// this is reported in notes.
///
/// # Errors
/// [`FormatError`], in one line, with the position, if nothing can be read.
pub fn read(
    name: &str,
    file: &[u8],
    description: Option<&[u8]>,
    format: Option<&'static Format>,
) -> Result<Recorded, FormatError> {
    let of_description = |error| FormatError::Description(Box::new(error));
    let mut description = description.map(SpaceDescription::read).transpose().map_err(of_description)?;
    let described = description.as_mut().map(|description| std::mem::take(&mut description.columns));
    let format = format.map_or_else(|| detect(file), Ok)?;
    let is_used = described.is_none() || format.takes_description;
    let (mut results, mut notes) = (format.read)(Input { name, file, described })?;
    if !is_used {
        notes.push(format!("the description is not used: files of {} say what they have", format.name));
    }
    if let Some(description) = description.filter(|_| is_used) {
        for results in &mut results {
            let disagreement = description.disagreement(results);
            results.notes.extend(description.twice.clone().into_iter().chain(disagreement));
        }
    }
    if results.iter().all(|results| results.rows.is_empty()) {
        let n_rows = results.iter().map(|results| results.n_rows).sum();
        notes.extend(results.into_iter().flat_map(|results| results.notes));
        let reasons = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
        return Err(FormatError::NoRows { n_rows, reasons });
    }
    Ok(Recorded { format, results, notes })
}

/// First bytes of an SQLite database, such as one of records.
pub const A_DATABASE: &[u8] = b"SQLite format 3\0";

/// Detects the format of a file by its content; its beginning may suffice.
///
/// # Errors
/// If the format is not one of [`FORMATS`].
pub fn detect(file: &[u8]) -> Result<&'static Format, FormatError> {
    if file.starts_with(A_DATABASE) {
        return Err(FormatError::Format { found: "a database (give the JSON lines that `export` writes of it)" });
    }
    let mut found: Option<&'static Format> = None;
    let mut reader = JsonReader::new(file)?;
    let sign = |sign: &str| {
        let is_number = !sign.is_empty() && sign.bytes().all(|byte| byte.is_ascii_digit());
        let sign = if is_number { Format::A_NUMBER } else { sign };
        FORMATS.iter().position(|format| format.signs.contains(&sign))
    };
    loop {
        match reader.peek() {
            Err(fault) => return Err(reader.error(fault)),
            Ok(None) => return Err(FormatError::Format { found: "an empty file" }),
            Ok(Some(b'{')) => break,
            Ok(Some(b'[')) => {
                let list = sign(Format::A_LIST).map(|at| &FORMATS[at]);
                return list.ok_or(FormatError::Format { found: "a list" });
            }
            // A log may begin with comments.
            Ok(Some(b'#')) => match reader.skip_line() {
                Ok(()) => {}
                Err(fault) => return Err(reader.error(fault)),
            },
            Ok(Some(_)) => {
                let found = "no JSON (tables and specifications of kernels are for `predict`)";
                return Err(FormatError::Format { found });
            }
        }
    }
    let mut best = FORMATS.len();
    let read = reader.object(|reader, name| {
        if let Some(at) = sign(&name).filter(|at| *at < best) {
            best = at;
            found = Some(&FORMATS[at]);
            // The file may still have the members of another format, which contain these.
            if !FORMATS[at].is_doubtful {
                return Err(JsonFault::Enough);
            }
        }
        reader.skip()
    });
    match (read, found) {
        (_, Some(format)) => Ok(format),
        (Ok(()), None) => Err(FormatError::Format { found: "JSON of an unknown kind" }),
        (Err(JsonFault::End), None) => Err(FormatError::Format { found: "a file that ends before it says what it is" }),
        (Err(fault), None) => Err(reader.error(fault)),
    }
}

/// Reads the rows in a member of the document; if the file is truncated, those before its end.
pub(crate) fn read_member(
    file: &[u8],
    member: &str,
    rows: &mut TaskRows,
    read: impl Fn(&mut JsonReader, &mut TaskRows) -> Result<(), JsonFault>,
) -> Result<(), FormatError> {
    let mut reader = JsonReader::new(file)?;
    let whole = reader.object(|reader, name| if name == member { read(reader, rows) } else { reader.skip() });
    match whole.and_then(|()| reader.peek()) {
        Ok(None) => {}
        Ok(Some(_)) => rows.notes.push(format!("what stands behind the end is left out, from {}", reader.place())),
        Err(JsonFault::End) => rows.is_cut_off(),
        Err(fault) => return Err(reader.error(fault)),
    }
    Ok(())
}

/// Reads the lines of a log, each of which is a JSON value; other lines are skipped. Comments begin with `#`.
pub(crate) fn read_lines(
    file: &[u8],
    mut read: impl FnMut(&str, &mut JsonReader, &mut Sheets) -> Result<(), JsonFault>,
) -> Result<Sheets, FormatError> {
    let mut sheets = Sheets::default();
    let (mut input, mut line, mut n_lines, mut n_bytes) = (BufReader::new(unpacked(file)), Vec::new(), 0u64, 0u64);
    loop {
        line.clear();
        let n = input.by_ref().take(LINE_LIMIT).read_until(b'\n', &mut line).map_err(FormatError::Packed)? as u64;
        (n_lines, n_bytes) = (n_lines + 1, n_bytes + n);
        match n {
            0 => return Ok(sheets),
            LINE_LIMIT => return Err(FormatError::TooLong { limit: LINE_LIMIT }),
            _ if n_bytes > MOST_BYTES => return Err(FormatError::TooLong { limit: MOST_BYTES }),
            _ => {}
        }
        let text = line.trim_ascii();
        if text.is_empty() || text.starts_with(b"#") {
            continue;
        }
        let place = format!("line {n_lines}");
        let problem = match JsonReader::new(text) {
            Err(error) => error,
            Ok(mut reader) => match read(&place, &mut reader, &mut sheets) {
                Ok(()) => continue,
                Err(JsonFault::Refused(error @ (FormatError::TooMany { .. } | FormatError::TooManyTasks { .. }))) => {
                    return Err(error);
                }
                Err(fault) => reader.error(fault),
            },
        };
        let problem = match problem {
            FormatError::Json { column, problem, .. } => format!("column {column}: {problem}"),
            other => other.to_string(),
        };
        sheets.leave_out(&place, &problem);
    }
}
