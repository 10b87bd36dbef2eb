//! Tuning programs of others: a command with places for the values of parameters.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewright_device::Caches;
use tilewright_device::command::{Commands, FOLDER, Metric, Options, Template, TemplateError};
use tilewright_device::host;
use tilewright_ir::Target;
use tilewright_search::expression::{self, Datum};
use tilewright_search::{
    Budget, Config, Constraint, Event, HeadStart, Parameter, Space, Subject, Timing, Trial, Tuning,
};
use tilewright_tune::predict::content_hash;
use tilewright_tune::{Judge, TaskKey, Winner};

use super::files::Files;
use super::finals::{self, End, EndLimits, Finals, Leader};
use super::kernel::KERNEL;
use super::recorder::{self, Recorder, Recording};
use super::transfer::best_of_file;
use super::{
    Begin, DEFAULT_SEARCH, DEFAULT_TIME, Earlier, Found, Note, Plan, Race, Tuned, Wall, earlier_of, fastest, open,
    since_1970,
};
use crate::best::{Best, target_name};
use crate::database::{Database, Opened};
use crate::error::Error;
use crate::referee::parse_metric;
use crate::version::BUILD;
use crate::words::{digits, duration};

/// Prefix of commands' workloads in records, and name of their template.
pub const COMMAND: &str = "command";

/// Samples of a trial, and runs before them, where a command is timed and nothing else is asked for.
const SAMPLES_OF_TIMES: usize = 3;
const WARMUPS_OF_TIMES: usize = 1;
/// Error of a trial's median besides the spread of its samples, as a share.
const NOISE_OF_RECORDS: f64 = 0.1;

/// A command that is to be tuned, and how. Times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CommandRequest {
    /// Command, with `{name}` as the placeholder of a parameter's value, `{*name}` of its words, and `{dir}`
    /// of the folder of its build.
    pub command: String,
    /// The parameters in order, each with its values: `8,16,32`, `1..8` with both ends, or a list in Python's
    /// way.
    pub parameters: Vec<(String, String)>,
    /// Conditions on the parameters.
    pub constraints: Vec<String>,
    /// Command that builds it.
    pub build: Option<String>,
    /// Command that checks a run, by exit code 0; it reads the run's output.
    pub check: Option<String>,
    /// Command before each run.
    pub prepare: Option<String>,
    /// Command after each run.
    pub cleanup: Option<String>,
    /// Metric to minimise: `wall`, `cpu`, or the number that a regular expression finds in the output.
    pub metric: String,
    /// Whether that number is to be great instead.
    pub maximize: bool,
    /// Whether all of them are started by a shell.
    pub shell: bool,
    /// Longest that a run may take.
    pub timeout: f64,
    /// Longest that a build may take.
    pub build_timeout: f64,
    /// Bytes of data that each process may have; half the memory of the machine by default.
    pub memory_bytes: Option<u64>,
    /// CPUs on which it is run.
    pub threads: usize,
    /// Samples of a trial; by default 3 of a time, after one run that warms up, and one of another number.
    pub samples: Option<usize>,
    /// Whether hopeless runs are not ended early.
    pub to_the_end: bool,
    /// The search, with options behind a colon.
    pub search: String,
    /// Trials to come to, those recorded by earlier runs included.
    pub trials: Option<u64>,
    /// Time for the search; a minute where trials are not given either.
    pub time: Option<f64>,
    /// Seed of the search.
    pub seed: u64,
    /// Whether the leaders race at the end.
    pub race: bool,
    /// Whether its records are deleted first.
    pub fresh: bool,
    /// Results of another tuner whose best configurations are measured first, as far as they fit.
    pub transfer: Option<PathBuf>,
}

impl Default for CommandRequest {
    /// No command; by the clock, and a minute for whatever has to end.
    fn default() -> CommandRequest {
        CommandRequest {
            command: String::new(),
            parameters: Vec::new(),
            constraints: Vec::new(),
            build: None,
            check: None,
            prepare: None,
            cleanup: None,
            metric: "wall".to_owned(),
            maximize: false,
            shell: false,
            timeout: 60.0,
            build_timeout: 60.0,
            memory_bytes: None,
            threads: 1,
            samples: None,
            to_the_end: false,
            search: DEFAULT_SEARCH.to_owned(),
            trials: None,
            time: None,
            seed: 0,
            race: true,
            fresh: false,
            transfer: None,
        }
    }
}

/// Whether a text is written as a range: numbers with two dots between them.
fn is_range(text: &str) -> bool {
    let mut ends = text.split("..").map(|end| end.trim_start_matches('=').trim());
    let is_number = |end: &str| end.parse::<f64>().is_ok();
    text.contains("..") && ends.clone().all(|end| end.is_empty() || is_number(end)) && ends.any(is_number)
}

/// Parses a list of values: `8,16,32`, `1..8` with both ends, or a list as Python writes it.
///
/// # Errors
/// Where it lists none, or a range that is not one of whole numbers.
pub fn parse_values(text: &str) -> Result<Vec<Datum>, Error> {
    let text = text.trim();
    let is_expression = text.starts_with(['[', '(']) || text.contains('(');
    if is_expression {
        return expression::list(text).map_err(Error::input);
    }
    if let Some((first, last)) = text.split_once("..")
        && let (Ok(first), Ok(last)) = (first.trim().parse::<i64>(), last.trim().trim_start_matches('=').parse::<i64>())
    {
        if last < first || last.abs_diff(first) >= 1 << 20 {
            return Err(Error::input(format!(
                "{first}..{last} has no values, or more than 2^20 (write the lesser first)"
            )));
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
    // Only numbers that are written as they are printed: others are passed on as they are.
    let number = |item: &&str| item.parse::<i64>().ok().filter(|number| number.to_string() == **item);
    let numbers: Option<Vec<i64>> = items.iter().map(number).collect();
    Ok(match numbers {
        Some(numbers) => numbers.into_iter().map(Datum::Int).collect(),
        None => items.iter().map(|item| Datum::from(*item)).collect(),
    })
}

/// Makes the space of parameters, each with its values, under conditions.
///
/// # Errors
/// Where a parameter or a condition is none, or no configuration is left.
pub fn space_of(name: &str, parameters: &[(String, Vec<Datum>)], constraints: &[String]) -> Result<Space, Error> {
    if parameters.is_empty() {
        return Err(Error::input("there are no parameters (give some with -p name=8,16,32)"));
    }
    for (name, _) in parameters {
        let is_plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !is_plain || !expression::is_name(name) || name == FOLDER {
            let reason = "give letters, digits and _, and no word of the expressions, nor `dir`";
            return Err(Error::input(format!("{name:?} cannot be the name of a parameter ({reason})")));
        }
    }
    let parameters: Vec<Parameter> = parameters.iter().map(|(name, values)| Parameter::of_data(name, values)).collect();
    let constraint = |text: &String| {
        let refuse = |error| Error::input(format!("the constraint `{text}`: {error}"));
        Constraint::parse(text, text, &parameters).map_err(refuse)
    };
    let constraints = constraints.iter().map(constraint).collect::<Result<Vec<_>, Error>>()?;
    Space::new(name, parameters, constraints).map_err(Error::input)
}

impl CommandRequest {
    /// Makes the space of its configurations.
    ///
    /// # Errors
    /// Where a parameter or a constraint is none, or no configuration is left.
    pub fn space(&self) -> Result<Space, Error> {
        let values = |(name, text): &(String, String)| {
            let values = parse_values(text).map_err(|error| Error::input(format!("the values of {name}: {error}")))?;
            Ok((name.clone(), values))
        };
        let parameters = self.parameters.iter().map(values).collect::<Result<Vec<_>, Error>>()?;
        space_of(COMMAND, &parameters, &self.constraints)
    }

    /// Parses the metric.
    ///
    /// # Errors
    /// If the text is neither a time nor a regular expression.
    pub fn metric(&self) -> Result<Metric, Error> {
        parse_metric(&self.metric, self.maximize)
    }

    /// Parses the commands and the metric.
    ///
    /// # Errors
    /// Where a text is no command, or the metric none.
    fn options(&self) -> Result<Options, Error> {
        let mut names: Vec<&str> = self.parameters.iter().map(|(name, _)| name.as_str()).collect();
        names.push(FOLDER);
        let template = |option: &str, text: &str| {
            let read = if self.shell { Template::shell } else { Template::words };
            let refuse = |error: TemplateError| Error::input(format!("--{option}: {error}"));
            read(text, &names).map_err(refuse)
        };
        let optional =
            |option: &str, text: &Option<String>| text.as_ref().map(|text| template(option, text)).transpose();
        let run = template(COMMAND, &self.command)?;
        let metric = self.metric()?;
        let (n_samples, n_warmups) = match self.samples {
            Some(n) => (n, usize::from(n > 1 && metric.is_time())),
            None if metric.is_time() => (SAMPLES_OF_TIMES, WARMUPS_OF_TIMES),
            None => (1, 0),
        };
        let plain = Options::new(run);
        Ok(Options {
            build: optional("build", &self.build)?,
            check: optional("check", &self.check)?,
            prepare: optional("prepare", &self.prepare)?,
            cleanup: optional("cleanup", &self.cleanup)?,
            metric,
            n_samples,
            n_warmups,
            build_timeout: seconds("--build-timeout", self.build_timeout)?,
            run_timeout: seconds("--timeout", self.timeout)?,
            to_the_end: self.to_the_end,
            memory_bytes: self.memory_bytes.unwrap_or(plain.memory_bytes),
            cpus: host::pin_cpus(self.threads),
            ..plain
        })
    }

    /// Name in records: the program's name, and a hash of all that its times depend on: the texts, and the
    /// contents of these files.
    fn workload(&self, files: &Files) -> String {
        let first = self.command.split_whitespace().next().unwrap_or("none");
        let program = Path::new(first).file_name().map_or(first.into(), |name| name.to_string_lossy());
        let names: Vec<&str> = self.parameters.iter().map(|(name, _)| name.as_str()).collect();
        let parts = (&self.command, names, &self.build, &self.check, &self.prepare, &self.cleanup);
        let parts = (parts, &self.metric, self.maximize, self.shell, files.hashes());
        let text = serde_json::to_vec(&parts).expect("invariant: texts have a form in JSON");
        let program: String = program.chars().filter(|c| c.is_ascii_alphanumeric() || "._-".contains(*c)).collect();
        format!("{COMMAND}:{program}-{:08x}", content_hash(&text) as u32)
    }
}

/// A time that is given in seconds.
pub(super) fn seconds(what: &str, value: f64) -> Result<Duration, Error> {
    let time = Duration::try_from_secs_f64(value).ok().filter(|time| !time.is_zero());
    time.ok_or_else(|| Error::input(format!("{what} takes a number of seconds above 0, not {value}")))
}

/// Course of a search, its options and its budget: the part that all kinds of requests share.
pub(super) struct Course<'a> {
    /// The search, with options behind a colon.
    pub search: &'a str,
    /// Trials to come to.
    pub trials: Option<u64>,
    /// Time for the search.
    pub time: Option<Duration>,
    /// Seed of the search.
    pub seed: u64,
    /// Whether the leaders race.
    pub race: bool,
    /// Whether what is recorded is forgotten first.
    pub fresh: bool,
    /// CPUs, as records have them.
    pub threads: usize,
    /// The machine, as records have it.
    pub target: &'a Target,
    /// Results of another tuner to begin with.
    pub transfer: Option<&'a Path>,
}

/// Tunes a command.
///
/// # Errors
/// Where the request does not fit, or the database cannot be written.
pub fn tune_command(
    request: &CommandRequest,
    database: &Database,
    stop: &AtomicBool,
    note: &(dyn Fn(Note) + Sync),
) -> Result<Tuned, Error> {
    let (wall, target) = (Wall::new(), host::target());
    let course = Course {
        search: &request.search,
        trials: request.trials,
        time: request.time.map(|time| seconds("--time", time)).transpose()?,
        seed: request.seed,
        race: request.race,
        fresh: request.fresh,
        threads: request.threads,
        target: &target,
        transfer: request.transfer.as_deref(),
    };
    let (space, options) = (Arc::new(request.space()?), request.options()?);
    for name in space.names().filter(|name| !options.templates().any(|(_, template)| template.reads(name))) {
        let mend = if request.shell { format!(", or name ${}", Template::variable(name)) } else { String::new() };
        note(Note::Message(format!(
            "no text uses the parameter {name}, so it changes nothing (write {{{name}}}{mend})"
        )));
    }
    let files = Files::of_commands(&options);
    note(Note::Message(files.line()));
    carry_out(&course, request.workload(&files), space, options, (database, wall), stop, note)
}

/// Searches what a machine of commands measures, records it, and races the leaders.
pub(super) fn carry_out(
    course: &Course,
    workload: String,
    space: Arc<Space>,
    options: Options,
    (database, mut wall): (&Database, Wall),
    stop: &AtomicBool,
    note: &(dyn Fn(Note) + Sync),
) -> Result<Tuned, Error> {
    let see = |error| Error::input(format!("{error} (see `tilewright searches`)"));
    let mut search = tilewright_search::build(course.search, &space, course.seed).map_err(see)?;
    let guesses = course.transfer.map_or(Ok(Vec::new()), |file| best_of_file(file, &space, note))?;
    let key = TaskKey {
        workload,
        target: target_name(course.target, Caches::Warm),
        template: space.name().to_owned(),
        threads: u32::try_from(course.threads).unwrap_or(u32::MAX),
    };
    let opened = open(database, course.fresh.then_some(&key), note)?;
    let (judge, limits) = (Judge::of_space(&space), options.limits());
    let earlier = earlier_of(&opened.store, &key, &space, &|_| judge.clone(), &limits, note)
        .map_err(|error| database.refuse(error))?;
    let n_earlier = earlier.trials.len() as u64;
    let left = course.trials.map(|trials| trials.saturating_sub(n_earlier));
    let time = course.time.or(if course.trials.is_none() { Some(DEFAULT_TIME) } else { None });
    let nothing_left = match left {
        Some(0) => Some("all trials asked for are recorded already"),
        _ if u128::from(n_earlier) >= space.size() => Some("the whole space is recorded already"),
        _ => None,
    };
    note(Note::Begin(&Begin {
        key: key.clone(),
        space_size: space.size(),
        database: database.name(),
        n_earlier,
        default_time: time.filter(|_| course.time.is_none() && nothing_left.is_none()),
        is_emulated: false,
    }));
    let steps = |config: &Config| options.steps(&space, config);
    let named = |best: Best, config: &Config| Best {
        value: Some(options.metric.value(best.median_ns)),
        commands: Some(steps(config)),
        ..best
    };
    let report = |new: &[Trial], summary: Option<&tilewright_search::Summary>, wall: &Wall| {
        Tuned::of(&key, (course.search, course.seed), database, &earlier, new, summary, wall)
    };
    if let Some(nothing_left) = nothing_left {
        note(Note::Message(nothing_left.to_owned()));
        if let Some(winner) = settled_winner(&opened, &key, &judge).map_err(|error| database.refuse(error))? {
            wall.seconds.start = wall.lap();
            let config = space.config_from_json(&winner.config);
            let best = Best::of_own(tilewright_tune::Best::Confirmed(winner.clone()));
            let best = config.map_or(best.clone(), |config| named(best, &config));
            return Ok(Tuned { verified: winner.verified, best: Some(best), ..report(&[], None, &wall) });
        }
    }
    let end_limits = EndLimits { untuned: Duration::ZERO, ..EndLimits::of(time) };
    let plan = Plan { time, most_trials: course.trials, n_earlier, ..Plan::default() };
    note(Note::Plan(&plan));
    let failed = |error: std::io::Error| Error::failed("a folder for what is built").because(error);
    let mut commands = Commands::new(space.clone(), options.clone()).map_err(failed)?;
    wall.seconds.start = wall.lap();
    let recorder = Recorder::of_space(opened, &space, key.clone(), course.search.to_owned(), course.seed);
    let recorder = Recording::new(recorder);
    note(Note::Search(&recorder, &plan));
    let mut found = Found { trials: earlier.trials.clone(), lost: None };
    let subject = Subject::described(&space, &steps);
    let mut tuning = Tuning::new(search.as_mut(), subject, HeadStart { prior: &earlier.trials, guesses: &guesses });
    let budget = Budget { trials: left, time, ..Budget::default() };
    let ended = tuning.go_on(&mut commands, budget, stop, &mut |event| {
        if let Event::Trial(report) = &event {
            found.trials.push(report.trial.clone());
            note(Note::Trial(report));
        }
        if let Err(error) = recorder.take_note(&event, &|message| note(Note::Message(message))) {
            found.lost.get_or_insert(error);
            stop.store(true, Ordering::Relaxed);
        }
        Ok(())
    });
    wall.seconds.search = wall.lap();
    let summary = tuning.summary(ended.map_err(|error| Error::failed(&error).because(error))?);
    let Found { trials, lost } = found;
    let end_limits = end_limits.after(earlier.searched().saturating_add(Duration::from_secs_f64(wall.seconds.search)));
    let end = match course.race {
        true => finals::run(&mut commands, (subject, None), &trials, &earlier.imported, end_limits, stop, &|n| note(n)),
        false => Ok(End::NoTime),
    };
    wall.end_race(end.as_ref().ok());
    if let Ok(End::Raced(finals)) = &end {
        let show = |ns: f64| if options.metric.is_time() { duration(ns) } else { digits(options.metric.value(ns)) };
        if let Some(told) = contradiction(finals, &earlier, &show) {
            note(Note::Message(told));
        }
    }
    let winner = match &end {
        Ok(End::Raced(finals)) => Some(winner_of(finals, &key, &space, options.check.is_some())),
        _ => None,
    };
    let recorded = recorder.conclude(winner.as_ref());
    let end = end.map_err(|error| Error::failed("measuring the leading candidates").because(error))?;
    drop(commands);
    wall.seconds.end = wall.lap();
    let lost = lost.or(recorded.err()).map(|error| database.failure(&error));
    let tuned = report(&trials[earlier.trials.len()..], Some(&summary), &wall);
    let (best, race) = match (&end, winner) {
        (End::Raced(finals), Some(winner)) => {
            let best = Best::of_unnamed_winner(&winner);
            let race = Race {
                relative_error: None,
                is_tie: finals.is_tie(),
                untuned_gflops: None,
                untuned: finals.untuned,
                n_leaders: finals.ranking.len(),
            };
            (Some(named(best, &finals.ranking[0].config)), Some(race))
        }
        (End::NoTime, _) => {
            let imported = &earlier.imported;
            let best = fastest(&trials, imported).and_then(|Trial { config, outcome }| {
                let median_ns = outcome.timing()?.median_ns;
                let best = Best::unnamed(space.name().to_owned(), space.config_to_json(config), median_ns);
                Some(named(Best { is_imported: imported.contains(config), ..best }, config))
            });
            (best, None)
        }
        _ => (None, None),
    };
    let verified = best.is_some() && options.check.is_some();
    Ok(Tuned { best, race, verified, recorded: lost.is_none(), lost, ..tuned })
}

/// Whether records of this name are of a command, or of a kernel of the user's.
pub fn is_own(workload: &str) -> bool {
    [COMMAND, KERNEL].iter().any(|kind| workload.strip_prefix(kind).is_some_and(|rest| rest.starts_with(':')))
}

/// The best that is recorded of a command or a kernel of the user's on a machine; none where nothing is.
///
/// # Errors
/// Where the database cannot be read.
pub fn best_own(database: &Database, name: &str, target: &Target, threads: usize) -> Result<Option<Best>, Error> {
    let Some(store) = database.open_to_read()? else { return Ok(None) };
    let (target, threads) = (target_name(target, Caches::Warm), u32::try_from(threads).unwrap_or(u32::MAX));
    let all = |_: &str| Judge::default();
    let found = || -> Result<Option<Best>, tilewright_tune::StoreError> {
        let Some(best) = store.best(name, &target, threads, None, &all)?.0 else { return Ok(None) };
        let best = Best::of_own(best);
        let (records, _) = store.trials_of(name, &target, threads, Some(&best.template), &all)?;
        let steps = records.into_iter().find(|record| record.config == best.config).map(|record| record.steps);
        let metric = steps.as_deref().and_then(Metric::of_steps);
        Ok(Some(Best { value: metric.map(|metric| metric.value(best.median_ns)), commands: steps, ..best }))
    };
    found().map_err(|error| database.refuse(error))
}

/// Describes the largest contradiction between a race and an earlier run's record here that noise does not
/// explain, in a line.
fn contradiction(finals: &Finals, earlier: &Earlier, show: &dyn Fn(f64) -> String) -> Option<String> {
    let known: HashMap<&Config, Timing> = earlier
        .trials
        .iter()
        .filter(|trial| !earlier.imported.contains(&trial.config))
        .filter_map(|trial| Some((&trial.config, *trial.outcome.timing()?)))
        .collect();
    let off = finals.ranking.iter().filter_map(|Leader { config, timing, .. }| {
        let recorded = known.get(config)?;
        let factor = (timing.median_ns / recorded.median_ns).max(recorded.median_ns / timing.median_ns);
        let noise = NOISE_OF_RECORDS + recorded.spread + timing.spread;
        (factor - 1.0 > noise).then_some((factor, recorded.median_ns, timing.median_ns))
    });
    let (_, recorded_ns, raced_ns) = off.max_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
    Some(format!(
        "the race contradicts the records: {} where {} is recorded (where the program has changed, begin anew with \
         --fresh)",
        show(raced_ns),
        show(recorded_ns)
    ))
}

/// The winner of a race since which nothing was recorded.
fn settled_winner(
    opened: &Opened,
    key: &TaskKey,
    judge: &Judge,
) -> Result<Option<Winner>, tilewright_tune::StoreError> {
    let TaskKey { workload, target, template, threads } = key;
    match opened.store.best(workload, target, *threads, Some(template), &|_| judge.clone())?.0 {
        Some(tilewright_tune::Best::Confirmed(winner)) if opened.store.is_settled(&winner)? => Ok(Some(winner)),
        _ => Ok(None),
    }
}

fn winner_of(finals: &Finals, key: &TaskKey, space: &Space, verified: bool) -> Winner {
    let config = |at: usize| space.config_to_json(&finals.ranking[at].config);
    Winner {
        workload: key.workload.clone(),
        target: key.target.clone(),
        template: key.template.clone(),
        threads: key.threads,
        config: config(0),
        median_ns: finals.ranking[0].timing.median_ns,
        margin: finals.margin(),
        spread: Some(finals.spread()),
        runner_up: (finals.ranking.len() > 1).then(|| config(1)),
        gflops: 0.0,
        verified,
        version: BUILD.to_owned(),
        toolchain: recorder::toolchain(),
        unix_time: since_1970().as_secs(),
        is_imported: false,
    }
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
        check("../a,..,a..b", "[\"../a\", \"..\", \"a..b\"]");
        check("[i / 10 for i in range(1, 3)]", "[0.1, 0.2]");
        for text in ["0.1..0.5", "1..", "..8", "1..8..2", "1..4,8", "1..1e3", "0..=0.5", "-1.5 .. 1"] {
            let error = parse_values(text).unwrap_err().to_string();
            assert!(error.contains("no range of whole numbers"), "{text}: {error}");
        }
        assert!(parse_values("[1, x]").unwrap_err().to_string().contains("position 5: unknown name x"));
    }

    #[test]
    fn what_is_wrong_with_a_request_is_said() {
        let plain = CommandRequest {
            command: "./app {tile}".into(),
            parameters: vec![("tile".into(), "8,16".into())],
            ..CommandRequest::default()
        };
        assert_eq!(plain.space().unwrap().size(), 2);
        let check = |change: fn(&mut CommandRequest), expected: &str| {
            let mut request = plain.clone();
            change(&mut request);
            let error = request.space().err().or_else(|| request.options().err()).unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(
            |r| r.command = "./app {til}".into(),
            "--command: position 7: {til} is no parameter; there are tile, dir",
        );
        check(|r| r.command = " ".into(), "--command: the command is empty");
        check(|r| r.parameters.clear(), "there are no parameters");
        check(|r| r.parameters[0].0 = "dir".into(), "\"dir\" cannot be the name of a parameter");
        check(|r| r.constraints = vec!["tile > x".into()], "the constraint `tile > x`: position 8: unknown name x");
        check(|r| r.constraints = vec!["tile > 99".into()], "no configuration satisfies tile > 99");
        check(|r| r.metric = "(".into(), "--metric: ");
        check(|r| r.maximize = true, "--maximize does not go with it");
        check(|r| r.timeout = 0.0, "--timeout takes a number of seconds above 0");
    }

    #[test]
    fn records_are_known_by_all_that_times_depend_on() {
        let plain = CommandRequest { command: "./app {tile}".into(), ..CommandRequest::default() };
        let name = plain.workload(&Files::default());
        assert!(name.starts_with("command:app-") && name.len() == "command:app-".len() + 8, "{name}");
        let other = CommandRequest { build: Some("make".into()), ..plain.clone() };
        assert_ne!(other.workload(&Files::default()), name);
        let same = CommandRequest { seed: 9, trials: Some(3), ..plain };
        assert_eq!(same.workload(&Files::default()), name);
    }
}
