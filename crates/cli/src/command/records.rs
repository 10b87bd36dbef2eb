//! `export` and `import`: records as JSON lines.

use std::fs::File;
use std::io::{self, BufReader, BufWriter};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tilewright::{Database, Note};
use tilewright_tune::StoreError;
use tilewright_tune::record::{Exported, Imported};

use super::{DatabaseArgs, count};
use crate::error::bad_input;
use crate::output::{StdoutError, message, writable, write_result, write_result_of};

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
    let tell = |note: Note| {
        if let Note::Message(line) = note {
            message(&line);
        }
    };
    match args.file.as_deref().filter(|path| *path != Path::new("-")) {
        Some(path) => {
            let name = path.display().to_string();
            let unreadable = |e| bad_input(format!("cannot read {name}: {e} (give a file of JSON lines)"));
            let file = File::open(path).map_err(unreadable)?;
            if file.metadata().is_ok_and(|m| m.is_dir()) {
                return Err(bad_input(format!("cannot read {name}: it is a folder (give a file of JSON lines)")));
            }
            let imported = match path.is_file() {
                true => database.import(BufReader::with_capacity(1 << 16, file), &name, &tell),
                false => database.import_once(file, &name, &tell),
            };
            show_imported(&imported?, &name, &database, as_json)
        }
        None => {
            let name = "standard input";
            show_imported(&database.import_once(io::stdin().lock(), name, &tell)?, name, &database, as_json)
        }
    }
}

fn show_imported(imported: &Imported, name: &str, database: &Database, as_json: bool) -> anyhow::Result<()> {
    let Imported { read, new, n_refused, refused } = imported;
    for (number, reason) in refused {
        message(&format!("{name}: line {number}: {reason}: left out"));
    }
    if *n_refused > refused.len() as u64 {
        message(&format!("{name}: {} left out in all", count(*n_refused, "line")));
    }
    let path = database.path.to_string_lossy();
    let json = json!({"read": read, "new": new, "left_out": n_refused, "file": name, "db": path});
    let text = format!("{} read from {name}, {new} of them new in {}", count(*read, "record"), database.name());
    write_result(as_json, &json, &text)
}
