//! Import of records. If any line is not a record, nothing is imported; otherwise, all records of known
//! workloads, targets and spaces are imported.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::Path;

use tilewright_formats::{
    A_DATABASE, Collection, Format, FormatError, MOST_BYTES, Recorded, detect, is_foreign, name_of, named, read,
    records,
};
use tilewright_ir::op::{Workload, WorkloadError};
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_tune::record::{Exported, Imported, RecordError, RecordLine, RejectReason, read_lines};
use tilewright_tune::{Error as TuneError, Record, RunTime, TaskKey, Validator, Winner};

use crate::best::{gflops, validators};
use crate::database::Database;
use crate::error::{Error, one_line};
use crate::observer::{Note, Observer};
use crate::subject::own::is_own;
use crate::version::{RELEASE, release_of};

/// Name of our own format, in addition to those of `tilewright_formats`.
pub const RECORDS: &str = "records";

/// Maximum number of threads of a record.
pub const MOST_THREADS: usize = 4096;

impl Database {
    /// Imports records in JSON lines, as [`Store::export`](tilewright_tune::Store::export) writes them;
    /// `name` is the input's name in messages.
    ///
    /// # Errors
    /// Bad input if a line is no record, or no record fits; failure if the database cannot be written.
    pub fn import(
        &self,
        mut input: impl BufRead + Seek,
        name: &str,
        observer: &dyn Observer,
    ) -> Result<Imported, Error> {
        let mut importer = LineValidator::default();
        importer.inspect(&mut input, name)?;
        input.rewind().map_err(|error| Error::failed(format!("cannot read {name}")).because(error))?;
        self.bring_in(input, name, importer, observer)
    }

    /// Imports, as [`Database::import`] does, from input that cannot be rewound. All of it is read before
    /// anything is written, so that a slow writer does not keep the database locked.
    ///
    /// # Errors
    /// As [`Database::import`].
    pub fn import_once(&self, input: impl Read, name: &str, observer: &dyn Observer) -> Result<Imported, Error> {
        let mut importer = LineValidator::default();
        let mut kept = ReplayedInput { input, bytes: Vec::new() };
        importer.inspect(BufReader::with_capacity(1 << 16, &mut kept), name)?;
        self.bring_in(&kept.bytes[..], name, importer, observer)
    }

    /// Imports results of another tuner, read by `tilewright_formats` from a file of this name. Returns notes
    /// on its irregularities.
    ///
    /// # Errors
    /// Bad input if there is no usable result; failure if the database cannot be written.
    pub fn import_results(&self, recorded: &Recorded, name: &str, observer: &dyn Observer) -> Result<Imported, Error> {
        for line in recorded.notes.iter().chain(recorded.results.iter().flat_map(|results| &results.notes)) {
            observer.note(Note::Message(format!("{name}: {line}")));
        }
        let lines = recorded.results.iter().flat_map(|results| records(recorded.format.name, results));
        let text: String = lines.map(|line| line.to_text() + "\n").collect();
        if text.is_empty() {
            return Err(Error::input(format!("{name}: {}", FormatError::NoTimes)));
        }
        self.import_once(text.as_bytes(), name, observer)
    }

    /// Imports a file or standard input: our records or those of another tuner, in the given format or one
    /// detected by content. Returns the name of the format.
    ///
    /// # Errors
    /// Bad input if it cannot be read, and as [`Database::import`] and [`Database::import_results`].
    pub fn import_any(
        &self,
        file: Option<&Path>,
        format: Option<&'static Format>,
        observer: &dyn Observer,
    ) -> Result<(Imported, &'static str), Error> {
        let name = file.map_or("standard input".to_owned(), |path| path.display().to_string());
        let unreadable = |e: io::Error| Error::input(format!("cannot read {name}: {e} (give a file of JSON lines)"));
        let mut input: Box<dyn Read> = match file {
            None => Box::new(io::stdin().lock()),
            Some(path) if path.is_dir() => {
                let hint = "give a file of JSON lines";
                return Err(Error::input(format!("cannot read {name}: it is a folder ({hint})")));
            }
            Some(path) => Box::new(File::open(path).map_err(unreadable)?),
        };
        // The format is detected by the first bytes.
        let mut start = Vec::new();
        input.by_ref().take(1 << 16).read_to_end(&mut start).map_err(unreadable)?;
        if start.starts_with(A_DATABASE) {
            let hint = "give the JSON lines that `export` writes of it";
            return Err(Error::input(format!("cannot import {name}: it is a database ({hint})")));
        }
        let format = format.or_else(|| detect(&start).ok()).filter(|format| format.name != RECORDS);
        let whole = start.as_slice().chain(input);
        let imported = match (format, file.filter(|path| path.is_file())) {
            (Some(format), _) => {
                let mut bytes = Vec::new();
                whole.take(MOST_BYTES).read_to_end(&mut bytes).map_err(unreadable)?;
                let path = file.unwrap_or(Path::new(&name));
                let recorded = read(&name_of(path), &bytes, None, Some(format));
                let recorded = recorded.map_err(|error| Error::input(format!("{name}: {error}")))?;
                self.import_results(&recorded, &name, observer)
            }
            (None, Some(path)) => {
                let file = File::open(path).map_err(unreadable)?;
                self.import(BufReader::with_capacity(1 << 16, file), &name, observer)
            }
            (None, None) => self.import_once(whole, &name, observer),
        };
        Ok((imported?, format.map_or(RECORDS, |format| format.name)))
    }

    /// Exports records as results by task, for other formats, with a count of the records that this version
    /// cannot read.
    ///
    /// # Errors
    /// If there is no database, it cannot be read, or it has too many records.
    pub fn results(&self) -> Result<(Recorded, Exported), Error> {
        let name = self.name();
        let store = self.open_existing()?;
        let (mut collection, mut fault) = (Collection::default(), None);
        let exported = store.each_line(&mut |line| {
            collection.add(line.record).map_err(|error| {
                fault = Some(Error::input(format!("{name}: {error}")));
                io::Error::other("too much")
            })
        });
        match (exported, fault) {
            (_, Some(fault)) => Err(fault),
            (Err(error), None) => Err(self.refuse(error)),
            (Ok(exported), None) => {
                let format = named(RECORDS).expect("invariant: our own format is listed");
                Ok((Recorded { format, results: collection.results(), notes: Vec::new() }, exported))
            }
        }
    }

    /// Writes the inspected lines to the database.
    fn bring_in(
        &self,
        input: impl BufRead,
        name: &str,
        mut importer: LineValidator,
        observer: &dyn Observer,
    ) -> Result<Imported, Error> {
        let mut opened = self.open_to_write()?;
        if let Some(warning) = opened.warning.take() {
            observer.note(Note::Message(warning));
        }
        let imported = opened.store.import(input, &mut |line| importer.check(line));
        let imported = imported.map_err(|error| match error {
            TuneError::Record(error) => no_record(name, &error),
            TuneError::Store(error) => self.failure(&error),
        })?;
        opened.check().map_err(|error| self.failure(&error))?;
        Ok(imported)
    }
}

/// Input that is kept, so that it can be read once more.
struct ReplayedInput<R> {
    input: R,
    bytes: Vec<u8>,
}

impl<R: Read> Read for ReplayedInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.bytes.extend_from_slice(&buffer[..n]);
        Ok(n)
    }
}

fn no_record(name: &str, error: &RecordError) -> Error {
    let hint = "give JSON lines as `export` writes them; nothing was imported";
    Error::input(format!("{name}: {error} ({hint})"))
}

/// Validator of lines before they are imported.
#[derive(Default)]
pub(crate) struct LineValidator {
    validators: HashMap<TaskKey, Validator>,
}

impl LineValidator {
    /// Reads and checks all lines before the database is opened: making spaces takes time, during which the
    /// database must not be locked.
    ///
    /// # Errors
    /// Bad input if a line is not a record, or no record fits.
    fn inspect(&mut self, input: impl BufRead, name: &str) -> Result<(), Error> {
        let (mut n_good, mut first_refused) = (0u64, None);
        for (number, line) in read_lines(input) {
            match self.check(line.map_err(|error| no_record(name, &error))?) {
                Ok(_) => n_good += 1,
                Err(reason) => first_refused = first_refused.or(Some((number, reason))),
            }
        }
        if let Some((number, reason)) = first_refused.filter(|_| n_good == 0) {
            return Err(Error::input(format!(
                "{name}: line {number}: {reason} (no line has a record that fits; nothing was imported)"
            )));
        }
        Ok(())
    }

    /// Returns the line with its names and numbers as this version writes them, and the shortest plausible
    /// time.
    ///
    /// Records of a newer version may be of workloads and spaces that this one does not know, and records of
    /// an older version, of earlier versions of spaces; both are kept, for other machines and for transfer
    /// learning.
    ///
    /// # Errors
    /// If the record is implausible, with the reason.
    pub(crate) fn check(&mut self, line: RecordLine) -> Result<(RecordLine, f64), String> {
        let RecordLine { mut record, mut winner } = line;
        check_form(&record)?;
        if is_own(&record.workload) {
            // Plausible times of a user's program are unknown.
            return Ok((RecordLine { record, winner }, 0.0));
        }
        let is_newer = numbers(release_of(&record.version)) > numbers(RELEASE);
        let workload = match Workload::parse(&record.workload) {
            Ok(workload) => workload,
            Err(_) if is_newer || is_foreign(&record.workload) => return Ok((RecordLine { record, winner }, 0.0)),
            // The error's own text would list all workloads.
            Err(WorkloadError::Unknown { given, .. }) => return Err(format!("unknown workload `{given}`")),
            Err(error) => return Err(one_line(&error.to_string())),
        };
        record.workload = workload.to_string();
        let Record { target, template, threads, .. } = &record;
        let key = TaskKey {
            workload: record.workload.clone(),
            target: target.clone(),
            template: template.clone(),
            threads: *threads,
        };
        let validator = self.validators.entry(key).or_insert_with(|| validators(&workload, target, *threads)(template));
        let times = [record.outcome.timing().map(|t| t.median_ns), winner.as_ref().map(|w| w.median_ns)];
        if let Some(ns) = times.into_iter().flatten().find(|ns| *ns < validator.least_ns()) {
            let least = validator.least_ns();
            return Err(format!("{ns} ns is faster than the machine can be, which needs {least:.1} ns"));
        }
        if validator.reject_reason_of(&record) == Some(RejectReason::OtherSpace) {
            let schedules = || parse_steps(&record.steps).is_ok_and(|s| apply_all(&workload.program(), &s).is_ok());
            if !is_newer && (record.steps.is_empty() || !schedules()) {
                return Err(match validator.space().map(|space| space.config_from_json(&record.config)) {
                    Some(Err(error)) => one_line(&format!("the configuration is not of the space: {error}")),
                    _ => format!("there is no template `{template}` for {workload}"),
                });
            }
            // A race in another space says nothing about this space, and must not hide its winner.
            winner = None;
        } else if let Some(space) = validator.space()
            && let Ok(config) = space.config_from_json(&record.config)
        {
            record.config = space.config_to_json(&config);
        }
        // Derived values are recomputed, as those of the file may be wrong.
        let winner = winner.map(|winner| Winner {
            workload: record.workload.clone(),
            config: record.config.clone(),
            gflops: gflops(&workload, winner.median_ns),
            ..winner
        });
        Ok((RecordLine { record, winner }, validator.least_ns()))
    }
}

/// Checks everything that does not depend on the workload.
fn check_form(record: &Record) -> Result<(), String> {
    let Record { target, template, search, version, toolchain, threads, seconds, run, conditions, .. } = record;
    let texts = [("target", target), ("template", template), ("search", search), ("version", version)];
    let device = conditions.device.iter().map(|device| ("device", device));
    for (name, text) in texts.into_iter().chain([("toolchain", toolchain)]).chain(device) {
        if text.chars().any(char::is_control) {
            return Err(format!("{name} holds a control character"));
        }
    }
    if target.is_empty() || template.is_empty() {
        return Err("target or template is empty".to_owned());
    }
    if *threads as usize > MOST_THREADS {
        return Err(format!("threads {threads} is more than {MOST_THREADS}"));
    }
    let elapsed_s = run.map_or(0.0, |RunTime { elapsed_s, .. }| elapsed_s);
    let spans = [("build", seconds.build), ("run", seconds.run), ("verify", seconds.verify), ("elapsed_s", elapsed_s)];
    match spans.iter().find(|(_, span)| !(0.0..=MOST_SECONDS).contains(span)) {
        Some((name, span)) => Err(format!("{name} {span} is no number of seconds")),
        None => Ok(()),
    }
}

/// A thousand years, in seconds.
const MOST_SECONDS: f64 = 3.2e10;

/// Numbers of a version, for comparison; the lowest for a text that is not a version.
fn numbers(text: &str) -> Vec<u64> {
    let numbers = text.split('.').map(|part| part.parse().ok());
    numbers.collect::<Option<_>>().unwrap_or_default()
}
