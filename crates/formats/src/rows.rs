//! Rows of a file, each a configuration with its outcome, and irregularities.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde_json::{Number, Value as Json};
use tilewright_search::{Outcome, Seconds, Timing};

use crate::json::{JsonFault, JsonReader};
use crate::outcome::{NotedOutcome, brief};
use crate::read::{FormatError, ReadResults};
use crate::results::{ConfigResult, ParameterValues, Results, TunerTask};

/// Maximum number of parameters of a configuration.
const MOST_PARAMETERS: usize = 1000;
/// Maximum number of parts of a parameter's value.
const MOST_PARTS: usize = 256;
/// Maximum length of a parameter's value as text, in bytes.
const MOST_TEXT: usize = 4096;
/// Maximum number of values in a description, over all parameters.
const MOST_LISTED: usize = 1 << 20;
/// Maximum total number of parameters and fields of all rows: some gigabytes of memory.
const MOST_COST: usize = 1 << 26;
const COST_OF_ROW: usize = 16;

/// Irregularities of a file, by kind: the count and the first one.
#[derive(Default)]
struct Oddities(Vec<(&'static str, u64, String)>);

impl Oddities {
    fn add(&mut self, what: &'static str, first: impl FnOnce() -> String) {
        match self.0.iter_mut().find(|(known, ..)| *known == what) {
            Some((_, n, _)) => *n += 1,
            None => self.0.push((what, 1, first())),
        }
    }

    fn lines(&self, n_rows: u64) -> impl Iterator<Item = String> {
        self.0.iter().map(move |(what, n, first)| format!("{what}: {n} of {n_rows}, the first {first}"))
    }
}

/// Parameter, and its values as text.
#[derive(Default)]
pub(crate) struct ParameterColumn {
    pub(crate) name: String,
    values: Vec<String>,
    places: HashMap<String, u32>,
    /// Whether other values are not allowed.
    is_listed: bool,
}

impl ParameterColumn {
    /// Makes a parameter whose values are those that occur.
    pub(crate) fn open(name: &str) -> ParameterColumn {
        ParameterColumn { name: name.into(), ..ParameterColumn::default() }
    }

    /// Makes a parameter with these values.
    pub(crate) fn listed(name: &str, values: Vec<Json>, lists: &mut Lists) -> Result<ParameterColumn, JsonFault> {
        let mut column = ParameterColumn::open(name);
        values.into_iter().try_for_each(|value| column.list(Some(value), lists))?;
        column.is_listed = true;
        Ok(column)
    }

    /// Reads a parameter with the values of the next array.
    pub(crate) fn read(name: &str, reader: &mut JsonReader, lists: &mut Lists) -> Result<ParameterColumn, JsonFault> {
        let mut column = ParameterColumn { is_listed: true, ..ParameterColumn::open(name) };
        reader.array(|reader| {
            let value = reader.value(MOST_PARTS)?;
            column.list(value, lists)
        })?;
        Ok(column)
    }

    fn list(&mut self, value: Option<Json>, lists: &mut Lists) -> Result<(), JsonFault> {
        let value =
            text_of(value).map_err(|problem| JsonFault::Problem(format!("parameter {}: {problem}", self.name)))?;
        if self.places.contains_key(&value) {
            lists.twice.get_or_insert_with(|| {
                format!("parameter {} lists {} twice; it counts once", brief(&self.name), brief(&value))
            });
            return Ok(());
        }
        lists.n_values += 1;
        if lists.n_values > MOST_LISTED {
            return Err(JsonFault::Problem(format!("more than {MOST_LISTED} values of parameters")));
        }
        self.add(value);
        Ok(())
    }

    fn add(&mut self, value: String) -> u32 {
        let place = self.values.len() as u32;
        self.places.insert(value.clone(), place);
        self.values.push(value);
        place
    }

    /// Values, in the order in which they are listed or occur.
    pub(crate) fn values(&self) -> impl Iterator<Item = Json> + '_ {
        self.values.iter().map(|text| serde_json::from_str(text).expect("invariant: printed from JSON"))
    }

    /// Returns the index of a value, and adds the value if any may occur.
    fn place(&mut self, value: Option<Json>) -> Result<u32, String> {
        let value = text_of(value).map_err(|problem| format!("parameter {}: {problem}", self.name))?;
        match self.places.get(&value) {
            Some(&place) => Ok(place),
            None if self.is_listed => {
                let mut allowed = self.values.iter().take(32).cloned().collect::<Vec<_>>().join(", ");
                allowed += if self.values.len() > 32 { ", …" } else { "" };
                Err(format!("parameter {} cannot be {value}; allowed: {allowed}", self.name))
            }
            None => Ok(self.add(value)),
        }
    }
}

/// Count of the listed values, and an irregularity of them.
#[derive(Default)]
pub(crate) struct Lists {
    n_values: usize,
    pub(crate) twice: Option<String>,
}

/// Formats a value as text, the same text for equal numbers.
fn text_of(value: Option<Json>) -> Result<String, String> {
    let text = value.map(|value| alike(value).to_string()).filter(|text| text.len() <= MOST_TEXT);
    text.ok_or_else(|| format!("a value of more than {MOST_PARTS} parts or {MOST_TEXT} bytes"))
}

/// Converts whole floating-point numbers to integers: Python takes 8.0 for 8.
fn alike(value: Json) -> Json {
    /// Largest number up to which all integers are floating-point numbers, too.
    const LARGEST: f64 = 9_007_199_254_740_992.0;
    match value {
        Json::Number(number) => {
            match number.as_f64().filter(|x| number.is_f64() && x.fract() == 0.0 && x.abs() <= LARGEST) {
                Some(whole) => Json::Number(Number::from(whole as i64)),
                None => Json::Number(number),
            }
        }
        Json::Array(items) => items.into_iter().map(alike).collect(),
        Json::Object(members) => members.into_iter().map(|(name, value)| (name, alike(value))).collect(),
        other => other,
    }
}

/// Configuration as in a file: each parameter's value; `None` if it is too long.
pub(crate) type ConfigInFile = Vec<(String, Option<Json>)>;

/// Reads the value of a parameter.
pub(crate) fn read_value(reader: &mut JsonReader) -> Result<Option<Json>, JsonFault> {
    reader.value(MOST_PARTS)
}

/// Times and date of a row.
#[derive(Clone, Copy, Default)]
pub(crate) struct Circumstances {
    pub(crate) seconds: Seconds,
    /// Time of the measurement, in seconds since 1970; 0 if unknown.
    pub(crate) unix_time: u64,
}

/// Rows of one task that were read so far.
pub(crate) struct TaskRows {
    task: TunerTask,
    columns: Vec<ParameterColumn>,
    parameters: ParameterSource,
    /// Index of the row of each configuration, by its values' indices.
    at_config: HashMap<Box<[u32]>, usize>,
    /// Outcomes of each configuration, in order, and the circumstances of the first measurement; a winner
    /// whose time is unknown has no outcomes.
    measured: Vec<(Vec<Outcome>, Circumstances)>,
    n_rows: u64,
    n_kept: usize,
    /// Position of the current row.
    at: Option<String>,
    oddities: Oddities,
    /// Further irregularities, one per line.
    pub(crate) notes: Vec<String>,
}

/// Source of the parameters.
#[derive(PartialEq)]
enum ParameterSource {
    /// First row, which has all parameters.
    FromFirstRow,
    /// All rows, each of which may lack some parameters.
    FromAllRows,
    /// Given columns.
    All,
}

/// Index for a parameter that a row does not have.
const LACKING: u32 = u32::MAX;

const LEFT_OUT: &str = "rows left out";
const MEASURED_AGAIN: &str =
    "rows of configurations that are recorded already (the median of those that succeeded counts)";

impl TaskRows {
    /// Makes an empty table of these parameters, or of those of the first row if they are unknown.
    pub(crate) fn new(task: TunerTask, columns: Option<Vec<ParameterColumn>>, notes: Vec<String>) -> TaskRows {
        let parameters = if columns.is_some() { ParameterSource::All } else { ParameterSource::FromFirstRow };
        TaskRows {
            task,
            columns: columns.unwrap_or_default(),
            parameters,
            at_config: HashMap::new(),
            measured: Vec::new(),
            n_rows: 0,
            n_kept: 0,
            at: None,
            oddities: Oddities::default(),
            notes,
        }
    }

    /// Makes an empty table whose rows may have different parameters; one that a row lacks is null in it.
    pub(crate) fn of_any(task: TunerTask) -> TaskRows {
        TaskRows { parameters: ParameterSource::FromAllRows, ..TaskRows::new(task, None, Vec::new()) }
    }

    /// Whether there is a parameter of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.columns.iter().any(|column| column.name == name)
    }

    /// Begins the row at this position.
    pub(crate) fn begin(&mut self, place: String) {
        self.at = Some(place);
    }

    /// Notes an irregularity of the current row.
    pub(crate) fn remark(&mut self, what: &'static str, found: &str) {
        let place = self.at.as_deref().unwrap_or_default();
        self.oddities.add(what, || format!("{place}: {}", brief(found)));
    }

    /// Counts the current row as unreadable.
    pub(crate) fn leave_out(&mut self, problem: &str) {
        self.n_rows += 1;
        let place = self.at.take().unwrap_or_default();
        self.oddities.add(LEFT_OUT, || format!("{place}: {}", brief(problem)));
    }

    /// Notes that the file is truncated.
    pub(crate) fn is_cut_off(&mut self) {
        let left_out =
            self.at.take().map_or(String::new(), |place| format!(", and {place}, where it ends, is left out"));
        let n_rows = self.n_rows;
        self.notes.push(format!("the file is not closed, as a stopped run leaves it: {n_rows} whole rows{left_out}"));
    }

    /// Adds the current row, or skips it if its configuration is invalid.
    ///
    /// # Errors
    /// If there are too many rows or parameters.
    pub(crate) fn add(
        &mut self,
        config: ConfigInFile,
        reading: NotedOutcome,
        of: Circumstances,
    ) -> Result<(), FormatError> {
        self.enter(config, Some(reading), of)
    }

    /// Adds the current row as a winner without further data, or skips it if its configuration is invalid.
    ///
    /// # Errors
    /// As [`TaskRows::add`].
    pub(crate) fn add_winner(&mut self, config: ConfigInFile) -> Result<(), FormatError> {
        self.enter(config, None, Circumstances::default())
    }

    fn enter(
        &mut self,
        config: ConfigInFile,
        reading: Option<NotedOutcome>,
        of: Circumstances,
    ) -> Result<(), FormatError> {
        if config.is_empty() && (self.parameters != ParameterSource::All || self.columns.is_empty()) {
            self.leave_out("there are no parameters");
            return Ok(());
        }
        if self.parameters == ParameterSource::FromFirstRow {
            self.parameters = ParameterSource::All;
            self.columns = config.iter().map(|(name, _)| ParameterColumn::open(name)).collect();
        }
        let config = match self.places(config) {
            Ok(config) => config,
            Err(problem) => {
                self.leave_out(&problem);
                return Ok(());
            }
        };
        if self.columns.len() > MOST_PARAMETERS {
            let problem = format!("{} parameters, of {MOST_PARAMETERS} at most", self.columns.len());
            return Err(FormatError::Entry { place: self.at.take().unwrap_or_default(), problem });
        }
        let place = self.at.take().unwrap_or_default();
        (self.n_rows, self.n_kept) = (self.n_rows + 1, self.n_kept + 1);
        let most = MOST_COST / (self.columns.len() + COST_OF_ROW);
        if self.n_kept > most {
            return Err(FormatError::TooMany { limit: most });
        }
        let (outcome, oddity) = reading.map_or((None, None), |reading| (Some(reading.outcome), reading.oddity));
        if let Some((what, found)) = oddity {
            self.oddities.add(what, || format!("{place}: {}", brief(&found)));
        }
        match self.at_config.entry(config) {
            Entry::Vacant(entry) => {
                entry.insert(self.measured.len());
                self.measured.push((outcome.into_iter().collect(), of));
            }
            Entry::Occupied(entry) => {
                self.oddities.add(MEASURED_AGAIN, || place);
                self.measured[*entry.get()].0.extend(outcome);
            }
        }
        Ok(())
    }

    fn places(&mut self, config: ConfigInFile) -> Result<Box<[u32]>, String> {
        let mut places: Vec<u32> = vec![LACKING; self.columns.len()];
        for (at, (name, value)) in config.into_iter().enumerate() {
            // Parameters are nearly always in order.
            let is_it = |column: &&ParameterColumn| column.name == name;
            let at = match self.columns.get(at).filter(is_it) {
                Some(_) => at,
                None => match self.columns.iter().position(|column| column.name == name) {
                    Some(at) => at,
                    None if self.parameters == ParameterSource::FromAllRows => {
                        self.columns.push(ParameterColumn::open(&name));
                        places.push(LACKING);
                        places.len() - 1
                    }
                    None => {
                        let known: Vec<&str> = self.columns.iter().map(|column| column.name.as_str()).collect();
                        return Err(format!("unknown parameter {name}; the space has {}", known.join(", ")));
                    }
                },
            };
            places[at] = self.columns[at].place(value)?;
        }
        if self.parameters == ParameterSource::FromAllRows {
            // Trailing missing values are dropped, so that equal configurations stay equal when columns are
            // added.
            while places.last() == Some(&LACKING) {
                places.pop();
            }
        } else if let Some(at) = places.iter().position(|&place| place == LACKING) {
            return Err(format!("parameter {} is missing", self.columns[at].name));
        }
        Ok(places.into())
    }

    /// Finishes the results.
    pub(crate) fn results(mut self) -> Results {
        self.notes.extend(self.oddities.lines(self.n_rows));
        let n_columns = self.columns.len();
        let row = |(outcomes, of): (Vec<Outcome>, Circumstances)| {
            let outcome = of_repeated(outcomes);
            ConfigResult { places: Box::default(), outcome, seconds: of.seconds, unix_time: of.unix_time }
        };
        let mut rows: Vec<ConfigResult> = self.measured.into_iter().map(row).collect();
        for (places, at) in self.at_config {
            let mut places = places.into_vec();
            places.resize(n_columns, LACKING);
            for (column, place) in self.columns.iter_mut().zip(&mut places) {
                if *place == LACKING {
                    *place = match column.places.get("null") {
                        Some(place) => *place,
                        None => column.add("null".into()),
                    };
                }
            }
            rows[at].places = places.into();
        }
        let parameter =
            |column: ParameterColumn| ParameterValues { values: column.values().collect(), name: column.name };
        let parameters = self.columns.into_iter().map(parameter).collect();
        Results { task: self.task, parameters, rows, n_rows: self.n_rows, notes: self.notes }
    }
}

/// Combines several measurements of a configuration to the median of the successful ones; `None` without
/// measurements.
fn of_repeated(outcomes: Vec<Outcome>) -> Option<Outcome> {
    if outcomes.len() > 1 {
        let medians: Vec<f64> = outcomes.iter().filter_map(|outcome| Some(outcome.timing()?.median_ns)).collect();
        if !medians.is_empty() {
            return Some(Outcome::Measured(Timing::of_samples(&medians, false)));
        }
    }
    outcomes.into_iter().next()
}

/// Rows of several tasks in one file.
#[derive(Default)]
pub(crate) struct Sheets {
    rows: Vec<TaskRows>,
    at_task: HashMap<TunerTask, usize>,
    /// Number of lines that belong to no task.
    n_lines: u64,
    oddities: Oddities,
    notes: Vec<String>,
}

/// Maximum number of tasks of one file.
const MOST_TASKS: usize = 1 << 16;

impl Sheets {
    /// Returns the rows of a task; `new` makes them if there are none yet.
    ///
    /// # Errors
    /// If there are too many tasks.
    pub(crate) fn of(&mut self, task: TunerTask, new: fn(TunerTask) -> TaskRows) -> Result<&mut TaskRows, FormatError> {
        let n_tasks = self.rows.len();
        let at = match self.at_task.entry(task) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(_) if n_tasks == MOST_TASKS => return Err(FormatError::TooManyTasks { limit: MOST_TASKS }),
            Entry::Vacant(entry) => {
                self.rows.push(new(entry.key().clone()));
                *entry.insert(n_tasks)
            }
        };
        self.n_lines += 1;
        Ok(&mut self.rows[at])
    }

    /// Counts the entry at a position as unreadable.
    pub(crate) fn leave_out(&mut self, place: &str, problem: &str) {
        self.n_lines += 1;
        self.oddities.add(LEFT_OUT, || format!("{place}: {}", brief(problem)));
    }

    /// Finishes the results of all tasks, with the irregularities of the file.
    pub(crate) fn results(mut self) -> ReadResults {
        self.notes.extend(self.oddities.lines(self.n_lines));
        (self.rows.into_iter().map(TaskRows::results).collect(), self.notes)
    }
}

impl Sheets {
    /// Finishes the results of a document; a truncated one has the rows so far.
    ///
    /// # Errors
    /// If the document is not JSON.
    pub(crate) fn end(
        mut self,
        reader: &mut JsonReader,
        read: Result<(), JsonFault>,
    ) -> Result<ReadResults, FormatError> {
        match read.and_then(|()| reader.peek()) {
            Ok(None) => {}
            Ok(Some(_)) => self.notes.push(format!("what stands behind the end is left out, from {}", reader.place())),
            Err(JsonFault::End) => {
                let n_rows = self.n_lines;
                self.notes.push(format!("the file is not closed, as a stopped run leaves it: {n_rows} whole rows"));
            }
            Err(fault) => return Err(reader.error(fault)),
        }
        Ok(self.results())
    }
}
