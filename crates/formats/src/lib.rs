//! Files of other tuners: the recorded results of a kernel's configurations, read and written.
//!
//! [`FORMATS`] lists the formats. [`read`] detects the format of a file from its contents and gives its
//! [`Results`] by [`TunerTask`]. [`Results::space`] makes a space for a replay, [`records`] makes records of
//! our own, [`table`] makes a table to learn from, and [`write()`] writes results in another format.
#![forbid(unsafe_code)]

use std::path::Path;

mod format;
mod json;
mod outcome;
mod read;
mod records;
mod results;
mod rows;
mod table;
mod time;

pub use format::{FORMATS, Format, SpaceDescription, WriteError, check_writable, named, write, write_space};
pub use json::MOST_BYTES;
pub use read::{A_DATABASE, FormatError, Recorded, detect, read};
pub use records::{Collection, is_foreign, records};
pub use results::{ConfigResult, ParameterValues, Results, TunerTask, carried_over};
pub use table::{ProblemTable, TableError, table};

/// Name of a file without the extensions that denote its format.
pub fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    let endings = [".json", ".jsonl", ".log"];
    endings.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name).to_owned()
}
