//! Tuning of arbitrary programs: a command line with placeholders for parameter values.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewright_device::command::{CommandOptions, CommandTemplate, FOLDER, NamedMetric, Objectives, TemplateError};
use tilewright_device::host;
use tilewright_search::expression::{self, Datum};
use tilewright_search::{Constraint, Parameter, Space};
use tilewright_tune::predict::content_hash;

use super::files::Files;
use super::own::OwnRun;
use crate::error::{Error, Setting};
use crate::observer::{Note, Observer, while_telling};
use crate::referee::parse_metric;
use crate::request::Settings;

/// Prefix of commands in records, and name of their template.
pub const COMMAND: &str = "command";

/// Default number of samples of a trial of a timed command, and of warm-up runs before them.
const SAMPLES_OF_TIMES: usize = 3;
const WARMUPS_OF_TIMES: usize = 1;
/// Maximum number of samples of a trial.
const MOST_SAMPLES: usize = 1000;
/// Default timeout of a build or a run.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Command to be tuned, with parameters.
///
/// In all of its texts `{name}` stands for the value of a parameter, `{*name}` for its words, and `{dir}` for
/// the folder of its build.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Command {
    command: String,
    /// The parameters in order, each with its values.
    parameters: Vec<(String, String)>,
    constraints: Vec<String>,
    build: Option<String>,
    check: Option<String>,
    prepare: Option<String>,
    cleanup: Option<String>,
    metric: Option<String>,
    maximize: bool,
    /// Metrics by name, for multi-objective tuning.
    objectives: Vec<(String, String, Direction)>,
    shell: bool,
    samples: Option<usize>,
}

/// Direction of optimization of a metric.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Lower is better.
    #[default]
    Minimize,
    /// Higher is better.
    Maximize,
}

impl Command {
    /// Makes a command whose wall-clock time is minimised.
    pub fn new(command: impl Into<String>) -> Command {
        Command { command: command.into(), ..Command::default() }
    }

    /// Adds a parameter with its values: `8,16,32`, `1..8` with both ends, or a list as Python writes it.
    #[must_use]
    pub fn parameter(mut self, name: impl Into<String>, values: impl Into<String>) -> Command {
        self.parameters.push((name.into(), values.into()));
        self
    }

    /// Adds a constraint on the parameters, such as `tile * t <= 64`.
    #[must_use]
    pub fn constraint(mut self, condition: impl Into<String>) -> Command {
        self.constraints.push(condition.into());
        self
    }

    /// Sets the build command, run once for each distinct text of it.
    #[must_use]
    pub fn build(self, command: impl Into<String>) -> Command {
        Command { build: Some(command.into()), ..self }
    }

    /// Sets the command that checks a run: it reads the run's output, and exits with 0 if that is correct.
    #[must_use]
    pub fn check(self, command: impl Into<String>) -> Command {
        Command { check: Some(command.into()), ..self }
    }

    /// Sets the command executed before each run.
    #[must_use]
    pub fn prepare(self, command: impl Into<String>) -> Command {
        Command { prepare: Some(command.into()), ..self }
    }

    /// Sets the command executed after each run.
    #[must_use]
    pub fn cleanup(self, command: impl Into<String>) -> Command {
        Command { cleanup: Some(command.into()), ..self }
    }

    /// Sets the metric: `wall`, `cpu`, or a regular expression that extracts a number from the output.
    #[must_use]
    pub fn metric(self, metric: impl Into<String>) -> Command {
        Command { metric: Some(metric.into()), ..self }
    }

    /// Adds one of two to four named metrics for multi-objective tuning. The first one leads; the result is
    /// the Pareto set of all.
    #[must_use]
    pub fn objective(mut self, name: impl Into<String>, metric: impl Into<String>, direction: Direction) -> Command {
        self.objectives.push((name.into(), metric.into(), direction));
        self
    }

    /// Sets whether the metric is maximised, rather than minimised.
    #[must_use]
    pub fn maximize(self, maximize: bool) -> Command {
        Command { maximize, ..self }
    }

    /// Sets whether commands are started by a shell, rather than split into words.
    #[must_use]
    pub fn shell(self, shell: bool) -> Command {
        Command { shell, ..self }
    }

    /// Sets the number of samples per trial; by default 3 for a time, after a warm-up run, and 1 for any
    /// other metric.
    #[must_use]
    pub fn samples(self, samples: impl Into<Option<usize>>) -> Command {
        Command { samples: samples.into(), ..self }
    }
}

/// Whether a text is written as a range: two dots after a number, or before one alone.
fn is_range(text: &str) -> bool {
    let is_number = |end: &str| end.trim_start_matches('=').trim().parse::<f64>().is_ok();
    text.split_once("..").is_some_and(|(first, last)| is_number(first) || first.trim().is_empty() && is_number(last))
}

/// Parses a list of values: `8,16,32`, `1..8` with both ends, or a list as Python writes it.
///
/// # Errors
/// If the list is empty, or a range is not of integers.
pub fn parse_values(text: &str) -> Result<Vec<Datum>, Error> {
    let text = text.trim();
    let is_expression = text.starts_with(['[', '(']) || text.contains('(');
    if is_expression {
        return expression::list(text).map_err(Error::input);
    }
    if let Some((first, last)) = text.split_once("..")
        && let (Ok(first), Ok(last)) = (first.trim().parse::<i64>(), last.trim().trim_start_matches('=').parse::<i64>())
    {
        let reason = match last.abs_diff(first) {
            _ if last < first => Some("has no values (write the lesser first)"),
            1_048_576.. => Some("has more than 2^20 values (write fewer, such as [2**i for i in range(20)])"),
            _ => None,
        };
        if let Some(reason) = reason {
            return Err(Error::input(format!("{first}..{last} {reason}")));
        }
        return Ok((first..=last).map(Datum::Int).collect());
    }
    let items: Vec<&str> = text.split(',').map(str::trim).collect();
    if items.contains(&"") {
        let mend = "write 8,16,32 or 1..8 or [2**i for i in range(8)], and an empty one as in ['', '-e']";
        return Err(Error::input(format!("a value is missing ({mend})")));
    }
    if let Some(range) = items.iter().find(|item| is_range(item)) {
        let mend = "write 0.1,0.2,0.3 or [i / 10 for i in range(1, 6)], and whole numbers alone as in 1..8";
        return Err(Error::input(format!("{range} is no range of whole numbers, which alone has steps ({mend})")));
    }
    // Only numbers that print as they are written: other texts are passed on unchanged.
    let number = |item: &&str| item.parse::<i64>().ok().filter(|number| number.to_string() == **item);
    let numbers: Option<Vec<i64>> = items.iter().map(number).collect();
    Ok(match numbers {
        Some(numbers) => numbers.into_iter().map(Datum::Int).collect(),
        None => items.iter().map(|item| Datum::from(*item)).collect(),
    })
}

/// Whether a text is a valid parameter name: letters, digits and `_`, neither a keyword of expressions nor
/// [`FOLDER`].
pub fn is_plain_name(name: &str) -> bool {
    let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    is_plain && expression::is_name(name) && name != FOLDER
}

/// Whether a name is plain, or an element of a list with a plain name, such as `sizes[0]`.
fn is_name_or_place(name: &str) -> bool {
    let (list, places) = name.split_at(name.find('[').unwrap_or(name.len()));
    let is_number = |place: &str| place.parse::<u16>().is_ok_and(|number| number.to_string() == place);
    let is_place = |place: &str| place.strip_prefix('[').is_some_and(is_number);
    is_plain_name(list)
        && (places.is_empty() || places.strip_suffix(']').is_some_and(|all| all.split(']').all(is_place)))
}

/// Error for an invalid parameter name.
pub fn refuse_name(name: &str, mend: &str) -> Error {
    Error::input(format!("{name:?} cannot be the name of a parameter ({mend})"))
}

/// Builds the space of parameters with their values, under constraints.
///
/// # Errors
/// If a parameter or a condition is malformed, or no configuration is left.
pub fn space_of(name: &str, parameters: &[(String, Vec<Datum>)], constraints: &[String]) -> Result<Space, Error> {
    if parameters.is_empty() {
        return Err(Error::input("there are no parameters (give some, such as name=8,16,32)"));
    }
    let parameters: Vec<Parameter> = parameters.iter().map(|(name, values)| Parameter::of_data(name, values)).collect();
    let constraint = |text: &String| {
        let refuse = |error| Error::input(format!("the constraint `{text}`: {error}"));
        Constraint::parse(text, text, &parameters).map_err(refuse)
    };
    let constraints = constraints.iter().map(constraint).collect::<Result<Vec<_>, Error>>()?;
    Space::new(name, parameters, constraints).map_err(Error::input)
}

impl Command {
    /// Builds the space of configurations.
    ///
    /// # Errors
    /// If a parameter or a constraint is malformed, or no configuration is left.
    pub fn space(&self) -> Result<Space, Error> {
        self.check_names()?;
        let values = |(name, text): &(String, String)| {
            let values = parse_values(text).map_err(|error| Error::input(format!("the values of {name}: {error}")))?;
            Ok((name.clone(), values))
        };
        let parameters = self.parameters.iter().map(values).collect::<Result<Vec<_>, Error>>()?;
        space_of(COMMAND, &parameters, &self.constraints)
    }

    fn check_names(&self) -> Result<(), Error> {
        let names = || self.parameters.iter().map(|(name, _)| name);
        if let Some(name) = names().find(|name| !is_name_or_place(name)) {
            let mend =
                "give ASCII letters, digits and _, a place as in sizes[0], no word of the expressions, nor `dir`";
            return Err(refuse_name(name, mend));
        }
        let variable = |name: &String| CommandTemplate::variable(name);
        for (at, name) in names().enumerate() {
            let is_same = |other: &&String| *other != name && variable(other) == variable(name);
            if let Some(other) = names().take(at).find(is_same) {
                let why = format!("{other} and {name} are both {} to a shell (rename one)", variable(name));
                return Err(Error::input(why));
            }
        }
        Ok(())
    }

    /// Parses the metrics.
    ///
    /// # Errors
    /// If a text is neither a time nor a regular expression, or the metrics cannot be combined.
    pub fn parsed_objectives(&self) -> Result<Objectives, Error> {
        if self.objectives.is_empty() {
            return parse_metric(self.metric_text(), self.maximize).map(Objectives::from);
        }
        if self.metric.is_some() || self.maximize {
            return Err(Error::setting(Setting::Metric, ": one without a name is beside others (name each)"));
        }
        let objective = |(name, text, direction): &(String, String, Direction)| {
            let metric = parse_metric(text, *direction == Direction::Maximize)?;
            Ok(NamedMetric { name: name.clone(), metric })
        };
        let all = self.objectives.iter().map(objective).collect::<Result<Vec<_>, Error>>()?;
        Objectives::several(all).map_err(|error| Error::setting(Setting::Metric, format!(": {error}")))
    }

    fn metric_text(&self) -> &str {
        self.metric.as_deref().unwrap_or("wall")
    }

    /// Parses the commands and the metric.
    ///
    /// # Errors
    /// If a command or the metric is malformed.
    fn options(&self, settings: &Settings) -> Result<CommandOptions, Error> {
        let mut names: Vec<&str> = self.parameters.iter().map(|(name, _)| name.as_str()).collect();
        names.push(FOLDER);
        let template = |setting: Setting, text: &str| {
            let read = if self.shell { CommandTemplate::shell } else { CommandTemplate::words };
            let refuse = |error: TemplateError| Error::setting(setting, format!(": {error}"));
            read(text, &names).map_err(refuse)
        };
        let optional =
            |setting: Setting, text: &Option<String>| text.as_ref().map(|text| template(setting, text)).transpose();
        let run = template(Setting::Command, &self.command)?;
        let objectives = self.parsed_objectives()?;
        let has_time = objectives.all().iter().any(|objective| objective.metric.is_time());
        let (n_samples, n_warmups) = match self.samples {
            Some(n) if !(1..=MOST_SAMPLES).contains(&n) => {
                return Err(Error::input(format!("a trial has 1 to {MOST_SAMPLES} samples, not {n}")));
            }
            Some(n) => (n, usize::from(n > 1 && has_time)),
            None if has_time => (SAMPLES_OF_TIMES, WARMUPS_OF_TIMES),
            None => (1, 0),
        };
        let plain = CommandOptions::new(run);
        Ok(CommandOptions {
            build: optional(Setting::Build, &self.build)?,
            check: optional(Setting::Check, &self.check)?,
            prepare: optional(Setting::Prepare, &self.prepare)?,
            cleanup: optional(Setting::Cleanup, &self.cleanup)?,
            objectives,
            n_samples,
            n_warmups,
            build_timeout: settings.build_timeout.unwrap_or(TIMEOUT),
            run_timeout: settings.run_timeout.unwrap_or(TIMEOUT),
            to_the_end: settings.to_the_end,
            memory_bytes: settings.memory_bytes.unwrap_or(plain.memory_bytes),
            cpus: host::pin_cpus(settings.threads),
            ..plain
        })
    }

    /// Name in records: the program's name, and a hash of everything that its times depend on: the texts, and
    /// the contents of these files.
    fn workload(&self, files: &Files) -> String {
        let first = self.command.split_whitespace().next().unwrap_or("none");
        let program = Path::new(first).file_name().map_or(first.into(), |name| name.to_string_lossy());
        let names: Vec<&str> = self.parameters.iter().map(|(name, _)| name.as_str()).collect();
        let parts = (&self.command, names, &self.build, &self.check, &self.prepare, &self.cleanup);
        let parts = (parts, self.metric_text(), self.maximize, self.shell, files.hashes());
        let text = match self.objectives.as_slice() {
            [] => serde_json::to_vec(&parts),
            several => serde_json::to_vec(&(parts, several)),
        };
        let text = text.expect("invariant: texts have a form in JSON");
        let program: String = program.chars().filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c)).collect();
        format!("{COMMAND}:{program}-{:08x}", content_hash(&text) as u32)
    }
}

/// Makes the subject of a run of a command.
///
/// # Errors
/// If a text of the command is malformed.
pub(crate) fn subject<'a>(
    command: &Command,
    settings: &'a Settings,
    observer: &dyn Observer,
) -> Result<OwnRun<'a>, Error> {
    let tell = |text: &str| observer.note(Note::Message(text.to_owned()));
    let space = Arc::new(while_telling(tell, || command.space())?);
    let options = command.options(settings)?;
    if options.objectives.is_several() && settings.stop_below.is_some() {
        let mend = "end the search by a number of trials or a time";
        return Err(Error::input(format!("what a search is expected to gain is of one metric alone ({mend})")));
    }
    for name in space.names().filter(|name| !options.templates().any(|(_, template)| template.reads(name))) {
        let mend =
            if command.shell { format!(", or name ${}", CommandTemplate::variable(name)) } else { String::new() };
        observer.note(Note::Message(format!(
            "no text uses the parameter {name}, so it changes nothing (write {{{name}}}{mend})"
        )));
    }
    let files = Files::of_commands(&options);
    observer.note(Note::MayBeStale(files.line()));
    Ok(OwnRun::new(settings, command.workload(&files), &host::target(), space, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_listed_in_several_ways() {
        let check = |text: &str, expected: &str| {
            let values = parse_values(text).map(|values| Datum::List(values.into()).to_string());
            assert_eq!(values.map_err(|error| error.to_string()), Ok(expected.to_owned()), "{text}");
        };
        check("8,16, 32", "[8, 16, 32]");
        check("1..4", "[1, 2, 3, 4]");
        check("-1..=1", "[-1, 0, 1]");
        check("[2**i for i in range(4)]", "[1, 2, 4, 8]");
        check("range(0, 9, 4)", "[0, 4, 8]");
        check("-O2,-O3", "[\"-O2\", \"-O3\"]");
        check("0.50,1", "[\"0.50\", \"1\"]");
        check("08,16", "[\"08\", \"16\"]");
        check("a", "[\"a\"]");
        assert!(parse_values("1,,2").unwrap_err().to_string().contains("a value is missing"));
        assert!(parse_values("9..1").unwrap_err().to_string().contains("write the lesser first"));
        assert!(parse_values("0..1048576").unwrap_err().to_string().contains("more than 2^20 values (write fewer"));
        check("../a,..,a..b", "[\"../a\", \"..\", \"a..b\"]");
        check("[i / 10 for i in range(1, 3)]", "[0.1, 0.2]");
        for text in
            ["0.1..0.5", "1..", "..8", "1..8..2", "1..4,8", "1..1e3", "0..=0.5", "-1.5 .. 1", "0..10**9", "1..n"]
        {
            let error = parse_values(text).unwrap_err().to_string();
            assert!(error.contains("no range of whole numbers"), "{text}: {error}");
        }
        assert!(parse_values("[1, x]").unwrap_err().to_string().contains("position 5: unknown name x"));
    }

    #[test]
    fn what_is_wrong_with_a_command_is_said() {
        let plain = Command::new("./app {tile}").parameter("tile", "8,16");
        assert_eq!(plain.space().unwrap().size(), 2);
        let check = |change: fn(Command) -> Command, expected: &str| {
            let command = change(plain.clone());
            let options = || command.options(&Settings::default());
            let error = command.space().err().or_else(|| options().err()).unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(
            |of| Command { command: "./app {til}".into(), ..of },
            "the command: position 7: {til} is not a parameter; there are tile, dir",
        );
        check(|of| Command { command: " ".into(), ..of }, "the command: the command is empty");
        check(|of| Command { parameters: Vec::new(), ..of }, "there are no parameters");
        check(|of| of.parameter("dir", "1"), "\"dir\" cannot be the name of a parameter");
        for name in ["t[", "t[]", "t[x]", "t[01]", "t[0]x", "t]0[", "[0]", "t[0]]", "dir[0]", "if[0]", "t[-1]"] {
            let refused = plain.clone().parameter(name, "1").space().unwrap_err().to_string();
            assert!(refused.contains("cannot be the name of a parameter"), "{name}: {refused}");
        }
        check(
            |of| of.parameter("tile_0", "1").parameter("tile[0]", "1"),
            "tile_0 and tile[0] are both TILEWRIGHT_tile_0 to a shell (rename one)",
        );
        check(|of| of.constraint("tile > x"), "the constraint `tile > x`: position 8: unknown name x");
        check(|of| of.constraint("tile > 99"), "no configuration satisfies tile > 99");
        check(|of| of.metric("("), "the metric: ");
        check(|of| of.maximize(true), "times are minimised, so --maximize does not apply");
        let several = |of: Command| of.objective("a", "a (.*)", Direction::Minimize);
        check(|of| of.objective("a", "a (.*)", Direction::Minimize), "1 metrics at once (give 2 to 4");
        let two = |of: Command, name, metric| several(of).objective(name, metric, Direction::Maximize);
        assert!(two(plain.clone(), "b", "b (.*)").parsed_objectives().is_ok());
        let error = |of: Command| of.parsed_objectives().unwrap_err().to_string();
        assert!(error(two(plain.clone(), "a", "b (.*)")).contains("the metric a is given twice"));
        assert!(error(two(plain.clone(), "a b", "b (.*)")).contains("\"a b\" is not a name of a metric"));
        assert!(error(two(plain.clone(), "b", "wall")).contains("times are minimised, so --maximize does not apply"));
        assert!(error(two(plain.clone(), "b", "(")).contains("the metric: "));
        assert!(error(two(plain.clone().metric("cpu"), "b", "b (.*)")).contains("name each"));
    }

    #[test]
    fn records_are_known_by_all_that_times_depend_on() {
        let plain = Command::new("./app {tile}");
        let name = plain.workload(&Files::default());
        assert!(name.starts_with("command:app-") && name.len() == "command:app-".len() + 8, "{name}");
        let other = plain.clone().build("make");
        assert_ne!(other.workload(&Files::default()), name);
        let same = plain.metric("wall").samples(3);
        assert_eq!(same.workload(&Files::default()), name);
    }
}
