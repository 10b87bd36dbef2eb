//! Output: results to standard output, as text or as a JSON document, or to files; everything else to
//! standard error.

use std::io::{self, Write};
use std::path::Path;

use serde_json::Value as Json;
use tilewright::{file, one_line};

use crate::error::bad_input;

pub use crate::progress::message;
pub use tilewright::file::{Destination, check_apart};
pub use tilewright::format::{digits, duration, grouped, shell_quoted, table};

/// Failure to write standard output.
#[derive(Debug)]
pub struct StdoutError(pub io::Error);

impl std::fmt::Display for StdoutError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot write to standard output: {}", self.0)
    }
}

impl std::error::Error for StdoutError {}

/// Writes bytes to standard output.
///
/// # Errors
/// [`StdoutError`], also if the reader has closed it.
pub fn write_stdout(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    Ok(out.write_all(bytes).and_then(|()| out.flush()).map_err(StdoutError)?)
}

/// Opens a destination of contents, which cannot be standard output beside a JSON document.
///
/// # Errors
/// Bad input if it is, or nothing can be written there.
pub fn writable(path: &Path, as_json: bool, mend: &str) -> anyhow::Result<Destination> {
    match file::writable(path, mend)? {
        Destination::Stdout(_) if as_json => {
            let path = one_line(&path.to_string_lossy());
            Err(bad_input(format!("--json and {path} both take standard output (give {mend})")))
        }
        place => Ok(place),
    }
}

/// Writes a result: the JSON document if requested, otherwise the text. A line break is added.
///
/// # Errors
/// [`StdoutError`].
pub fn write_result(as_json: bool, json: &Json, text: &str) -> anyhow::Result<()> {
    let shown = if as_json { json.to_string() } else { text.trim_end_matches('\n').to_owned() };
    if shown.is_empty() { Ok(()) } else { write_stdout(format!("{shown}\n").as_bytes()) }
}

/// Reports on the contents written to a destination: as a result, but as text on standard error if standard
/// output holds the contents themselves.
///
/// # Errors
/// [`StdoutError`].
pub fn write_result_of(place: &Destination, as_json: bool, json: &Json, text: &str) -> anyhow::Result<()> {
    match place {
        Destination::Stdout(_) => {
            message(text.trim_end_matches('\n'));
            Ok(())
        }
        _ => write_result(as_json, json, text),
    }
}
