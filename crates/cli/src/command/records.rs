//! `export` and `import`: records as JSON lines.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tilewright_tune::{Error, StoreError};

use super::{DatabaseArgs, count};
use crate::error::bad_input;
use crate::output::{StdoutError, message, writable, write_result};

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
        let n = store.export(&mut out).map_err(|error| match error {
            StoreError::Write(error) => anyhow::Error::from(StdoutError(error)),
            other => other.into(),
        })?;
        message(&format!("{} exported from {}", count(n, "record"), database.name()));
        return Ok(());
    };
    let name = path.display().to_string();
    let mut n = 0;
    let written = output.write(|file| {
        n = store.export(file).map_err(|error| match error {
            StoreError::Write(error) => error,
            other => io::Error::other(other),
        })?;
        Ok(())
    });
    written.with_context(|| format!("cannot write {name}"))?;
    let json = json!({"records": n, "file": name, "db": database.path.to_string_lossy()});
    write_result(as_json, &json, &format!("{} exported from {} to {name}", count(n, "record"), database.name()))
}

/// Adds the records of JSON lines, all or none.
///
/// # Errors
/// Bad input where the file cannot be read or a line is no record.
pub fn import(args: &ImportArgs, as_json: bool) -> anyhow::Result<()> {
    let database = args.records.database()?;
    let (name, imported) = match args.file.as_deref().filter(|path| *path != Path::new("-")) {
        Some(path) => {
            let name = path.display().to_string();
            let unreadable = |e| bad_input(format!("cannot read {name}: {e} (give a file of JSON lines)"));
            let file = File::open(path).map_err(unreadable)?;
            if file.metadata().is_ok_and(|m| m.is_dir()) {
                return Err(bad_input(format!("cannot read {name}: it is a folder (give a file of JSON lines)")));
            }
            if path.is_file() {
                (name, database.open_to_write()?.import(BufReader::with_capacity(1 << 16, file)))
            } else {
                let bytes = read_to_end(file, &name)?;
                (name, database.open_to_write()?.import(&bytes[..]))
            }
        }
        None => {
            let name = "standard input".to_owned();
            let bytes = read_to_end(io::stdin().lock(), &name)?;
            (name, database.open_to_write()?.import(&bytes[..]))
        }
    };
    let imported = imported.map_err(|error| match error {
        Error::Record(error) => bad_input(format!("{name}: {error} (nothing was imported)")),
        other => anyhow::Error::from(other).context(format!("database {}", database.name())),
    })?;
    let json = json!({"read": imported.read, "new": imported.new, "file": name, "db": database.path.to_string_lossy()});
    let text = format!(
        "{} read from {name}, {} of them new in {}",
        count(imported.read, "record"),
        imported.new,
        database.name()
    );
    write_result(as_json, &json, &text)
}

/// All that comes from elsewhere, before anything is written: a slow writer must not keep the database locked.
fn read_to_end(mut input: impl Read, name: &str) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.read_to_end(&mut bytes).with_context(|| format!("cannot read {name}"))?;
    Ok(bytes)
}
