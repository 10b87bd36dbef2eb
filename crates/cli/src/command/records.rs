//! `export` and `import`: records as JSON lines, or in the formats of other tuners.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tilewright::{Database, Note, RECORDS};
use tilewright_formats::{Format, Results, check_writable, write};
use tilewright_tune::StoreError;
use tilewright_tune::record::{Exported, Imported};

use super::formats::{FormatArgs, format, read_file};
use super::{DatabaseArgs, count};
use crate::error::{OrBadInput, bad_input};
use crate::output::{StdoutError, message, writable, write_result, write_result_of};

/// Arguments of `export`.
#[derive(Args, Debug)]
pub struct ExportArgs {
    /// File to write [default: standard output]
    file: Option<PathBuf>,
    /// Format to write; `formats` lists them
    #[arg(long = "as", value_name = "NAME", value_parser = format, default_value = RECORDS)]
    written_as: &'static Format,
    /// File of another tuner to convert to that format, instead of the records of a database
    #[arg(long, value_name = "FILE", conflicts_with = "db")]
    from: Option<PathBuf>,
    #[command(flatten)]
    format: FormatArgs,
    /// Task to write, if there are several, by its number or a part of its text [default: all]
    #[arg(long, value_name = "N|TEXT")]
    task: Option<String>,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// Arguments of `import`.
#[derive(Args, Debug)]
pub struct ImportArgs {
    /// File to read, of a format that `formats` lists [default: standard input]
    file: Option<PathBuf>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// Writes all records as JSON lines, winners with the results of their races; or results of tasks in another
/// format.
///
/// # Errors
/// Bad input if there is nothing to write, or the file cannot be created.
pub fn export(args: &ExportArgs, as_json: bool) -> anyhow::Result<()> {
    let file = args.file.as_deref().filter(|path| *path != Path::new("-"));
    if as_json && file.is_none() {
        return Err(bad_input("export --json needs a FILE: without one, standard output carries the records"));
    }
    if args.format.given.is_some() && args.from.is_none() {
        return Err(bad_input("--format says what a file --from is (--as says what is written)"));
    }
    if args.written_as.name != RECORDS || args.from.is_some() || args.task.is_some() {
        return export_results(args, file, as_json);
    }
    // Before the database is opened, because the file may be its inherited descriptor.
    let output = file.map(|path| writable(path, as_json, "another FILE")).transpose()?;
    let database = args.records.database()?;
    let store = database.open_existing()?;
    let (Some(path), Some(output)) = (file, output) else {
        // There are many short lines.
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

/// Writes the results of tasks in the requested format.
fn export_results(args: &ExportArgs, file: Option<&Path>, as_json: bool) -> anyhow::Result<()> {
    let (recorded, of) = match &args.from {
        Some(from) => (read_file(from, None, &args.format)?, from.display().to_string()),
        None => {
            let database = args.records.database()?;
            let (recorded, exported) = database.results()?;
            tell_left_out(&exported);
            (recorded, database.name())
        }
    };
    recorded.notes.iter().for_each(|note| message(&format!("{of}: {note}")));
    let chosen: Vec<Results> = match &args.task {
        Some(task) => vec![recorded.task(Some(task)).map_err(|error| bad_input(format!("{of}: {error}")))?.clone()],
        None => recorded.results,
    };
    for results in &chosen {
        results.notes.iter().for_each(|note| message(&format!("{of}: {note}")));
    }
    let written_as = args.written_as;
    check_writable(written_as, &chosen).or_bad_input("")?;
    let n: u64 = chosen.iter().map(|results| results.rows.len() as u64).sum();
    let write = |out: &mut dyn Write| write(written_as, &chosen, out).map_err(io::Error::other);
    let text = |name: &str| format!("{} of {of} written to {name} as {}", count(n, "configuration"), written_as.name);
    let Some(path) = file else {
        let mut out = BufWriter::with_capacity(1 << 16, io::stdout().lock());
        write(&mut out).and_then(|()| out.flush()).map_err(StdoutError)?;
        message(&text("standard output"));
        return Ok(());
    };
    let name = path.display().to_string();
    let output = writable(path, as_json, "another FILE")?;
    output.write(|file| write(file)).with_context(|| format!("cannot write {name}"))?;
    let json = json!({
        "records": n,
        "left_out": 0,
        "tasks": chosen.len(),
        "format": written_as.name,
        "file": name,
        "from": of,
    });
    write_result_of(&output, as_json, &json, &text(&name))
}

fn tell_left_out(exported: &Exported) {
    if exported.left_out > 0 {
        message(&format!("{} that this version does not understand left out", count(exported.left_out, "record")));
    }
}

/// Adds the records of JSON lines: nothing if any line is not a record, otherwise those of known workloads,
/// machines and spaces. Results of another tuner are added as far as they can be read.
///
/// # Errors
/// Bad input if the file cannot be read, a line is not a record, or no record fits.
pub fn import(args: &ImportArgs, as_json: bool) -> anyhow::Result<()> {
    let database = args.records.database()?;
    let tell = |note: Note| {
        if let Note::Message(line) = note {
            message(&line);
        }
    };
    let file = args.file.as_deref().filter(|path| *path != Path::new("-"));
    let (imported, format) = database.import_any(file, args.format.given, &tell)?;
    let name = file.map_or("standard input".to_owned(), |path| path.display().to_string());
    show_imported(&imported, format, &name, &database, as_json)
}

/// Reports what was imported.
///
/// # Errors
/// If standard output cannot be written.
pub(super) fn show_imported(
    imported: &Imported,
    format: &str,
    name: &str,
    database: &Database,
    as_json: bool,
) -> anyhow::Result<()> {
    let Imported { read, new, n_refused, refused } = imported;
    for (number, reason) in refused {
        message(&format!("{name}: line {number}: {reason}: left out"));
    }
    if *n_refused > refused.len() as u64 {
        message(&format!("{name}: {} left out in all", count(*n_refused, "line")));
    }
    let path = database.path.to_string_lossy();
    let json = json!({"read": read, "new": new, "left_out": n_refused, "file": name, "format": format, "db": path});
    let of = if format == RECORDS { String::new() } else { format!(" ({format})") };
    let text = format!("{} read from {name}{of}, {new} of them new in {}", count(*read, "record"), database.name());
    write_result(as_json, &json, &text)
}
