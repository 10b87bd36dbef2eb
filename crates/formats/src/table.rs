//! Results as training data: a table with a row for each task and its best configuration.

use std::collections::BTreeSet;

use serde_json::Value as Json;

use crate::outcome::brief;
use crate::results::Results;

/// Reason why results do not form a table; the error is in the results or the request.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// Filter that no result passes.
    #[error("no task has {name}={value}; there are {known}")]
    NothingLeft {
        /// The column.
        name: String,
        /// The value.
        value: String,
        /// Existing columns and values.
        known: String,
    },
    /// Task with other parameters than the first one.
    #[error(
        "{task} has parameters {found}, and {first} has {expected} (choose with --where kernel=NAME, or give files of one kernel)"
    )]
    Parameters {
        /// The task.
        task: String,
        /// Parameters of that task.
        found: String,
        /// First task.
        first: String,
        /// Parameters of the first task.
        expected: String,
    },
    /// Results without a successful configuration.
    #[error("no task has a configuration that was measured successfully")]
    Empty,
}

/// Table of tuned problems, with the specification of their kernel.
#[derive(Debug, Clone)]
pub struct ProblemTable {
    /// Specification of the kernel in TOML: the fields that vary, and parameters with the values that occur.
    pub specification: String,
    /// Rows as CSV.
    pub rows: String,
    /// Number of rows.
    pub n_rows: usize,
}

/// Maximum number of columns and values that a message lists.
const MOST_NAMED: usize = 12;

/// Makes the table of those tasks that have these values in these columns, which are `kernel`, `device` and
/// the fields of problems.
///
/// # Errors
/// [`TableError`].
pub fn table(results: &[Results], filters: &[(String, String)]) -> Result<ProblemTable, TableError> {
    let mut tasks: Vec<(&Results, Vec<(String, Json)>)> = results.iter().map(|of| (of, fields(of))).collect();
    for (name, value) in filters {
        let has = |fields: &[(String, Json)]| fields.iter().any(|(known, is)| known == name && text(is) == *value);
        let all = std::mem::take(&mut tasks);
        let known: BTreeSet<String> =
            all.iter().flat_map(|(_, fields)| fields).map(|(name, value)| format!("{name}={}", text(value))).collect();
        tasks = all.into_iter().filter(|(_, fields)| has(fields)).collect();
        if tasks.is_empty() {
            let mut listed = known.iter().take(MOST_NAMED).map(|text| brief(text)).collect::<Vec<_>>().join(", ");
            listed += if known.len() > MOST_NAMED { ", …" } else { "" };
            return Err(TableError::NothingLeft { name: name.clone(), value: value.clone(), known: listed });
        }
    }
    tasks.retain(|(of, _)| of.best().is_some());
    let (first, _) = tasks.first().ok_or(TableError::Empty)?;
    let names = |of: &Results| of.parameters.iter().map(|parameter| parameter.name.clone()).collect::<Vec<_>>();
    let expected = names(first);
    for (of, _) in &tasks {
        let found = names(of);
        if found != expected {
            let [task, first] = [of, first].map(|of| brief(&of.task.to_string()));
            let [found, expected] = [found, expected].map(|names| names.join(", "));
            return Err(TableError::Parameters { task, found, first, expected });
        }
    }
    // Names of all fields, in the order in which they first occur.
    let mut columns: Vec<String> = Vec::new();
    for (name, _) in tasks.iter().flat_map(|(_, fields)| fields) {
        if !columns.contains(name) {
            columns.push(name.clone());
        }
    }
    let value = |fields: &[(String, Json)], name: &str| {
        fields.iter().find(|(known, _)| known == name).map_or(Json::from("none"), |(_, value)| value.clone())
    };
    let of_column = |name: &str| tasks.iter().map(|(_, fields)| value(fields, name)).collect::<Vec<_>>();
    let differs = |name: &String| of_column(name).iter().any(|value| *value != of_column(name)[0]);
    let asked: Vec<&String> = columns.iter().filter(|name| differs(name)).collect();
    // With a single problem, no field varies.
    let asked = if asked.is_empty() { columns.iter().collect() } else { asked };

    let mut specification = format!("name = {}\n", quoted(&first.task.kernel));
    specification += "fields = [\n";
    for name in &asked {
        let values = of_column(name);
        match values.iter().all(Json::is_i64) {
            true => specification += &format!("  {{ name = {} }},\n", quoted(name)),
            false => specification += &format!("  {{ name = {}, values = {} }},\n", quoted(name), listed(&values)),
        }
    }
    specification += "]\nparameters = [\n";
    for (at, name) in expected.iter().enumerate() {
        let values: Vec<Json> = tasks.iter().flat_map(|(of, _)| of.parameters[at].values.iter().cloned()).collect();
        let list = match values.iter().map(Json::as_i64).collect::<Option<BTreeSet<i64>>>() {
            Some(numbers) => format!("{:?}", numbers.into_iter().collect::<Vec<_>>()),
            None => listed(&values),
        };
        specification += &format!("  {{ name = {}, values = {list} }},\n", quoted(&as_name(name)));
    }
    specification += "]\n";

    let head = columns.iter().cloned().chain(expected.iter().map(|name| as_name(name)));
    let mut rows = line(head);
    for (of, fields) in &tasks {
        let best = of.best().expect("invariant: those without were left out");
        let config = of.config(best);
        let answer = expected.iter().map(|name| text(&config[name.as_str()]));
        rows += &line(columns.iter().map(|name| text(&value(fields, name))).chain(answer));
    }
    Ok(ProblemTable { specification, rows, n_rows: tasks.len() })
}

/// Fields of a task's problem, with a field for each leaf of lists and objects.
fn fields(of: &Results) -> Vec<(String, Json)> {
    let task = &of.task;
    let mut fields = vec![("kernel".to_owned(), Json::from(task.kernel.as_str()))];
    fields.push(("device".to_owned(), task.device.as_str().into()));
    for (name, _) in &task.problem {
        leaves(&as_name(name), &task.field(name).unwrap_or_default(), &mut fields);
    }
    fields
}

fn leaves(name: &str, value: &Json, found: &mut Vec<(String, Json)>) {
    match value {
        Json::Array(items) => {
            items.iter().enumerate().for_each(|(at, item)| leaves(&format!("{name}_{at}"), item, found));
        }
        Json::Object(members) => {
            members.iter().for_each(|(of, member)| leaves(&format!("{name}_{}", as_name(of)), member, found));
        }
        leaf => found.push((name.to_owned(), leaf.clone())),
    }
}

/// Converts a text to a name that is valid in expressions.
fn as_name(name: &str) -> String {
    let plain = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' });
    let begin = if name.starts_with(|c: char| c.is_ascii_digit()) { "_" } else { "" };
    begin.chars().chain(plain).collect()
}

/// Formats a value for a table.
fn text(value: &Json) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Formats distinct values as a list of texts in TOML.
fn listed(values: &[Json]) -> String {
    let texts: BTreeSet<String> = values.iter().map(text).collect();
    format!("[{}]", texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", "))
}

/// Formats a text for TOML, whose escapes include those of JSON.
fn quoted(text: &str) -> String {
    Json::from(text).to_string()
}

/// Formats a line of comma-separated values.
fn line(values: impl Iterator<Item = String>) -> String {
    let quoted = values.map(|value| format!("\"{}\"", value.replace('"', "\"\"")));
    quoted.collect::<Vec<_>>().join(",") + "\n"
}
