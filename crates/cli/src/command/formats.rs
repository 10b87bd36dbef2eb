//! Files of other tuners, as arguments of commands, and `formats`, which lists their formats.

use std::path::Path;

use clap::Args;
use serde_json::json;
use tilewright_formats::{FORMATS, Format, FormatError, Recorded, name_of, named, read};

use crate::error::bad_input;
use crate::output::{table, write_result};

/// Format of a file.
#[derive(Args, Debug)]
pub struct FormatArgs {
    /// Format of the file; `formats` lists them [default: detected from its contents]
    #[arg(long = "format", value_name = "NAME", value_parser = format)]
    pub given: Option<&'static Format>,
}

/// Finds the format of this name.
///
/// # Errors
/// If there is none; the message lists the known ones.
pub fn format(name: &str) -> Result<&'static Format, String> {
    let known = || FORMATS.iter().map(|format| format.name).collect::<Vec<_>>().join(", ");
    named(name).ok_or_else(|| format!("there are {}", known()))
}

/// Reads what another tuner recorded in a file.
///
/// # Errors
/// Bad input if the file cannot be read, or has no usable content.
pub fn read_file(path: &Path, description: Option<&[u8]>, format: &FormatArgs) -> anyhow::Result<Recorded> {
    let file = super::read_file(path, "results of a tuner; `tilewright formats` lists which")?;
    let recorded = read(&name_of(path), &file, description, format.given);
    recorded.map_err(|error| refuse(path, &error))
}

/// Makes the error of a file.
pub fn refuse(path: &Path, error: &FormatError) -> anyhow::Error {
    bad_input(format!("{}: {error}", path.display()))
}

/// Lists the formats.
///
/// # Errors
/// Failure if the output cannot be written.
pub fn run(as_json: bool) -> anyhow::Result<()> {
    let json = |format: &Format| {
        let Format { name, what, read_for, .. } = format;
        json!({"name": name, "what": what, "read": read_for, "written": format.is_written()})
    };
    let head = ["format", "files", "read for", "written"].map(str::to_owned).to_vec();
    let row = |format: &Format| {
        let written = if format.is_written() { "yes" } else { "no" };
        [format.name, format.what, format.read_for, written].map(str::to_owned).to_vec()
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(FORMATS.iter().map(row)).collect();
    write_result(as_json, &json!({"formats": FORMATS.iter().map(json).collect::<Vec<_>>()}), &(table(&rows) + "\n"))
}
