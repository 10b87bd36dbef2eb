//! `export` and `import`: records as JSON lines.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tilewright_ir::op::{Workload, WorkloadError};
use tilewright_ir::schedule::{apply_all, parse_steps};
use tilewright_tune::record::{Doubt, Exported, Imported, Line, RecordError, read_lines};
use tilewright_tune::{Error, Judge, Record, RunTime, StoreError, TaskKey, Winner};

use super::{DatabaseArgs, MOST_THREADS, count, open_to_write};
use crate::error::{bad_input, one_line};
use crate::output::{StdoutError, message, writable, write_result, write_result_of};
use tilewright::Database;
use tilewright::version::{RELEASE, release_of};
use tilewright::{gflops, judges};

/// Arguments of `export`.
#[derive(Args, Debug)]
pub struct ExportArgs {
    /// File to write [default: standard output]
    file: Option<PathBuf>,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// Arguments of `import`.
#[derive(Args, Debug)]
pub struct ImportArgs {
    /// File to read [default: standard input]
    file: Option<PathBuf>,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// Writes all records as JSON lines, winners with what their races said.
///
/// # Errors
/// Bad input where there is no database or the file cannot be created.
pub fn export(args: &ExportArgs, as_json: bool) -> anyhow::Result<()> {
    let file = args.file.as_deref().filter(|path| *path != Path::new("-"));
    if as_json && file.is_none() {
        return Err(bad_input("export --json needs a FILE: without one, standard output carries the records"));
    }
    // Before the database is opened, whose descriptor the file may be.
    let output = file.map(|path| writable(path, "another FILE")).transpose()?;
    let database = args.records.database()?;
    let store = database
        .open_to_read()?
        .ok_or_else(|| bad_input(format!("there is no database {} (give one with --db)", database.name())))?;
    let (Some(path), Some(output)) = (file, output) else {
        // Lines are many and short.
        let mut out = BufWriter::with_capacity(1 << 16, io::stdout().lock());
        let exported = store.export(&mut out).map_err(|error| match error {
            StoreError::Write(error) => anyhow::Error::from(StdoutError(error)),
            other => database.refuse(other).into(),
        })?;
        tell_left_out(&exported);
        message(&format!("{} exported from {}", count(exported.written, "record"), database.name()));
        return Ok(());
    };
    let name = path.display().to_string();
    let (mut exported, mut fault) = (Exported::default(), None);
    let written = output.write(|file| {
        exported = store.export(file).map_err(|error| match error {
            StoreError::Write(error) => error,
            other => {
                fault = Some(database.refuse(other));
                io::Error::other("the database cannot be read")
            }
        })?;
        Ok(())
    });
    if let Some(fault) = fault {
        return Err(fault.into());
    }
    written.with_context(|| format!("cannot write {name}"))?;
    tell_left_out(&exported);
    let (n, left_out) = (exported.written, exported.left_out);
    let json = json!({"records": n, "left_out": left_out, "file": name, "db": database.path.to_string_lossy()});
    write_result_of(
        &output,
        as_json,
        &json,
        &format!("{} exported from {} to {name}", count(n, "record"), database.name()),
    )
}

fn tell_left_out(exported: &Exported) {
    if exported.left_out > 0 {
        message(&format!("{} that this version does not understand left out", count(exported.left_out, "record")));
    }
}

/// Adds the records of JSON lines: none where a line is no record, else those that fit what is known of
/// workloads, machines and spaces.
///
/// # Errors
/// Bad input where the file cannot be read, a line is no record, or no record fits.
pub fn import(args: &ImportArgs, as_json: bool) -> anyhow::Result<()> {
    let database = args.records.database()?;
    match args.file.as_deref().filter(|path| *path != Path::new("-")) {
        Some(path) => {
            let name = path.display().to_string();
            let unreadable = |e| bad_input(format!("cannot read {name}: {e} (give a file of JSON lines)"));
            let file = File::open(path).map_err(unreadable)?;
            if file.metadata().is_ok_and(|m| m.is_dir()) {
                return Err(bad_input(format!("cannot read {name}: it is a folder (give a file of JSON lines)")));
            }
            if path.is_file() {
                let mut customs = Customs::default();
                let mut input = BufReader::with_capacity(1 << 16, file);
                customs.inspect(&mut input, &name)?;
                input.rewind().with_context(|| format!("cannot read {name}"))?;
                import_from(input, &name, customs, &database, as_json)
            } else {
                import_once(file, &name, &database, as_json)
            }
        }
        None => import_once(io::stdin().lock(), "standard input", &database, as_json),
    }
}

/// Imports what can be read only once. All is read before anything is written: a slow writer must not keep
/// the database locked.
fn import_once(input: impl Read, name: &str, database: &Database, as_json: bool) -> anyhow::Result<()> {
    let mut customs = Customs::default();
    let mut kept = Kept { input, bytes: Vec::new() };
    customs.inspect(BufReader::with_capacity(1 << 16, &mut kept), name)?;
    import_from(&kept.bytes[..], name, customs, database, as_json)
}

/// Input that is kept to be read once more.
struct Kept<R> {
    input: R,
    bytes: Vec<u8>,
}

impl<R: Read> Read for Kept<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.bytes.extend_from_slice(&buffer[..n]);
        Ok(n)
    }
}

fn no_record(name: &str, error: &RecordError) -> anyhow::Error {
    let hint = "give JSON lines as `export` writes them; nothing was imported";
    bad_input(format!("{name}: {error} ({hint})"))
}

/// Imports what was inspected.
fn import_from(
    input: impl BufRead,
    name: &str,
    mut customs: Customs,
    database: &Database,
    as_json: bool,
) -> anyhow::Result<()> {
    let mut opened = open_to_write(database)?;
    let imported = opened.store.import(input, &mut |line| customs.check(line));
    let imported = imported.map_err(|error| match error {
        Error::Record(error) => no_record(name, &error),
        Error::Store(error) => database.failure(&error).into(),
        other => other.into(),
    })?;
    opened.check().map_err(|error| database.failure(&error))?;
    let Imported { read, new, n_refused, refused } = imported;
    for (number, reason) in &refused {
        message(&format!("{name}: line {number}: {reason}: left out"));
    }
    if n_refused > refused.len() as u64 {
        message(&format!("{name}: {} left out in all", count(n_refused, "line")));
    }
    let path = database.path.to_string_lossy();
    let json = json!({"read": read, "new": new, "left_out": n_refused, "file": name, "db": path});
    let text = format!("{} read from {name}, {new} of them new in {}", count(read, "record"), database.name());
    write_result(as_json, &json, &text)
}

/// What lines are held against before they come in.
#[derive(Default)]
struct Customs {
    judges: HashMap<TaskKey, Judge>,
}

impl Customs {
    /// Reads lines, and holds each against what is known, before the database is opened: making spaces takes
    /// time, in which it shall not be locked.
    ///
    /// # Errors
    /// Bad input where a line is no record, or none has one that fits.
    fn inspect(&mut self, input: impl BufRead, name: &str) -> anyhow::Result<()> {
        let (mut n_good, mut first_refused) = (0u64, None);
        for (number, line) in read_lines(input) {
            match self.check(line.map_err(|error| no_record(name, &error))?) {
                Ok(_) => n_good += 1,
                Err(reason) => first_refused = first_refused.or(Some((number, reason))),
            }
        }
        if let Some((number, reason)) = first_refused.filter(|_| n_good == 0) {
            return Err(bad_input(format!(
                "{name}: line {number}: {reason} (no line has a record that fits; nothing was imported)"
            )));
        }
        Ok(())
    }

    /// The line with its names and numbers as this version writes them, and the shortest time that can be
    /// true.
    ///
    /// What a newer version wrote may be of workloads and spaces that this one does not know, and what an
    /// older one did, of spaces as they were; both are kept, for other machines and for learning from.
    ///
    /// # Errors
    /// Why there cannot be such a record.
    fn check(&mut self, line: Line) -> Result<(Line, f64), String> {
        let Line { mut record, winner } = line;
        check_form(&record)?;
        let is_newer = numbers(release_of(&record.version)) > numbers(RELEASE);
        let workload = match Workload::parse(&record.workload) {
            Ok(workload) => workload,
            Err(_) if is_newer => return Ok((Line { record, winner }, 0.0)),
            // It lists all there are.
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
        let judge = self.judges.entry(key).or_insert_with(|| judges(&workload, target, *threads)(template));
        let times = [record.outcome.timing().map(|t| t.median_ns), winner.as_ref().map(|w| w.median_ns)];
        if let Some(ns) = times.into_iter().flatten().find(|ns| *ns < judge.least_ns()) {
            let least = judge.least_ns();
            return Err(format!("{ns} ns is faster than the machine can be, which needs {least:.1} ns"));
        }
        if judge.doubt_of(&record) == Some(Doubt::OtherSpace) {
            let schedules = || parse_steps(&record.steps).is_ok_and(|s| apply_all(&workload.program(), &s).is_ok());
            if !is_newer && (record.steps.is_empty() || !schedules()) {
                return Err(match judge.space().map(|space| space.config_from_json(&record.config)) {
                    Some(Err(error)) => one_line(&format!("the configuration is not of the space: {error}")),
                    _ => format!("there is no template `{template}` for {workload}"),
                });
            }
        } else if let Some(space) = judge.space()
            && let Ok(config) = space.config_from_json(&record.config)
        {
            record.config = space.config_to_json(&config);
        }
        // What follows from the rest is not believed.
        let winner = winner.map(|winner| Winner {
            workload: record.workload.clone(),
            config: record.config.clone(),
            gflops: gflops(&workload, winner.median_ns),
            ..winner
        });
        Ok((Line { record, winner }, judge.least_ns()))
    }
}

/// Checks what needs no knowledge of workloads.
fn check_form(record: &Record) -> Result<(), String> {
    let Record { target, template, search, version, toolchain, threads, seconds, run, .. } = record;
    let texts = [("target", target), ("template", template), ("search", search), ("version", version)];
    for (name, text) in texts.into_iter().chain([("toolchain", toolchain)]) {
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

/// A thousand years.
const MOST_SECONDS: f64 = 3.2e10;

/// The numbers of a version, to compare; of a text that is none, the lowest.
fn numbers(text: &str) -> Vec<u64> {
    let numbers = text.split('.').map(|part| part.parse().ok());
    numbers.collect::<Option<_>>().unwrap_or_default()
}
