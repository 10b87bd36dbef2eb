//! `export` and `import`: records as JSON lines.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use serde_json::json;
use tilewright_tune::{Error, StoreError};

use super::{DatabaseArgs, count};
use crate::error::bad_input;
use crate::output::{StdoutError, message, write_result};

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

/// Writes all records as JSON lines.
///
/// # Errors
/// Bad input where there is no database or the file cannot be created.
pub fn export(args: &ExportArgs, as_json: bool) -> anyhow::Result<()> {
    if as_json && args.file.is_none() {
        return Err(bad_input("export --json needs a FILE: without one, standard output carries the records"));
    }
    let database = args.records.database()?;
    let store = database
        .open_to_read()?
        .ok_or_else(|| bad_input(format!("there is no database {} (give one with --db)", database.name())))?;
    let Some(path) = &args.file else {
        // Lines are many and short.
        let mut out = BufWriter::with_capacity(1 << 16, std::io::stdout().lock());
        let n = store.export(&mut out).map_err(|error| match error {
            StoreError::Write(error) => anyhow::Error::from(StdoutError(error)),
            other => other.into(),
        })?;
        message(&format!("{} exported from {}", count(n, "record"), database.name()));
        return Ok(());
    };
    let name = path.display().to_string();
    let file = File::create(path).map_err(|e| bad_input(format!("cannot write {name}: {e} (give another FILE)")))?;
    let n = store.export(&mut BufWriter::with_capacity(1 << 16, file)).with_context(|| name.clone())?;
    let json = json!({"records": n, "file": name, "db": database.path});
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
            (name, database.open_to_write()?.import(BufReader::with_capacity(1 << 16, file)))
        }
        None => {
            // Read to the end first: a slow writer must not keep the database locked.
            let mut bytes = Vec::new();
            std::io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
            ("standard input".to_owned(), database.open_to_write()?.import(&bytes[..]))
        }
    };
    let imported = imported.map_err(|error| match error {
        Error::Record(error) => bad_input(format!("{name}: {error} (nothing was imported)")),
        other => anyhow::Error::from(other).context(format!("database {}", database.name())),
    })?;
    let json = json!({"read": imported.read, "new": imported.new, "file": name, "db": database.path});
    let text = format!(
        "{} read from {name}, {} of them new in {}",
        count(imported.read, "record"),
        imported.new,
        database.name()
    );
    write_result(as_json, &json, &text)
}
