//! Where results and messages go: results to standard output, as text or as one JSON document, or to files;
//! all else to standard error.

mod file;

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use serde_json::Value as Json;

use crate::error::bad_input;
pub use file::{Destination, open_lock, write_whole};

/// Standard output could not be written.
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
/// [`StdoutError`]; a reader that went away is one as well.
pub fn write_stdout(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    Ok(out.write_all(bytes).and_then(|()| out.flush()).map_err(StdoutError)?)
}

/// The place of a file that the user named, before the work that fills it; `other` says how to name another.
///
/// # Errors
/// Bad input where it cannot be written to, or is a database or the log of one: the user took one option for
/// another.
pub fn writable(path: &Path, other: &str) -> anyhow::Result<Destination> {
    let name = path.display();
    let refused = |reason: &str| Err(bad_input(format!("{name} {reason} (give {other})")));
    if is_database(path) {
        return refused("is a database and would be written over");
    }
    if is_beside_database(path) {
        return refused("is where the database beside it has its log");
    }
    Destination::at(path).map_err(|error| bad_input(format!("cannot write {name}: {error} (give {other})")))
}

/// Checks that what is written to a place of this name leaves these files alone, which are needed as well.
///
/// # Errors
/// Bad input where it is the place of one of them.
pub fn check_apart(path: &Path, place: &Destination, files: &[&Path], other: &str) -> anyhow::Result<()> {
    match files.iter().find(|file| place.is_at(file)) {
        None => Ok(()),
        Some(file) => {
            let [name, file] = [path, file].map(Path::display);
            Err(bad_input(format!("{name} would be written over {file}, which is needed (give {other})")))
        }
    }
}

/// Whether a file is a database of SQLite, as by its first bytes.
fn is_database(path: &Path) -> bool {
    let mut start = Vec::new();
    let is_read = path.is_file() && File::open(path).is_ok_and(|file| file.take(16).read_to_end(&mut start).is_ok());
    is_read && start == b"SQLite format 3\0"
}

/// Whether SQLite takes a file of this name for a part of the database beside it.
fn is_beside_database(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let mut databases = ["-wal", "-shm", "-journal"].iter().filter_map(|ending| name.strip_suffix(ending));
    databases.any(|database| is_database(&path.with_file_name(database)))
}

/// Writes a result: the JSON document where it was asked for, the text otherwise. A line break is added.
///
/// # Errors
/// [`StdoutError`].
pub fn write_result(as_json: bool, json: &Json, text: &str) -> anyhow::Result<()> {
    let shown = if as_json { json.to_string() } else { text.trim_end_matches('\n').to_owned() };
    if shown.is_empty() { Ok(()) } else { write_stdout(format!("{shown}\n").as_bytes()) }
}

/// Writes what there is to say of what went to a place: as a result, but a text for people on standard error
/// where standard output holds that itself.
///
/// # Errors
/// [`StdoutError`].
pub fn write_result_of(place: &Destination, as_json: bool, json: &Json, text: &str) -> anyhow::Result<()> {
    match place {
        Destination::Stdout(_) if !as_json => {
            message(text.trim_end_matches('\n'));
            Ok(())
        }
        _ => write_result(as_json, json, text),
    }
}

/// A word of a command that is shown, as a shell takes it.
pub fn shell_quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_@%+=:,./-".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Writes a line to standard error; where that is gone, nobody wants to know.
pub fn message(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// A number with thousands separated by commas.
pub fn grouped(n: impl ToString) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Nanoseconds as milliseconds or microseconds, with four digits.
pub fn duration(ns: f64) -> String {
    if ns < 1e3 {
        format!("{ns:.0} ns")
    } else if ns < 1e6 {
        format!("{} µs", digits(ns / 1e3))
    } else if ns < 1e9 {
        format!("{} ms", digits(ns / 1e6))
    } else {
        format!("{} s", digits(ns / 1e9))
    }
}

/// A positive number with about four digits.
pub fn digits(x: f64) -> String {
    let decimals = if x >= 100.0 {
        1
    } else if x >= 10.0 {
        2
    } else {
        3
    };
    format!("{x:.decimals$}")
}

/// Rows in columns: the first column flush left, the others flush right, two blanks between.
pub fn table(rows: &[Vec<String>]) -> String {
    let n_columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..n_columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            if column > 0 {
                line.push_str("  ");
            }
            line.push_str(&if column == 0 { format!("{cell}{pad}") } else { format!("{pad}{cell}") });
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!([grouped(7), grouped(899756), grouped(1234567)], ["7", "899,756", "1,234,567"]);
        assert_eq!([duration(850.0), duration(12_345.0), duration(9.5e6)], ["850 ns", "12.35 µs", "9.500 ms"]);
    }

    #[test]
    fn a_shell_reads_words_as_they_are() {
        for word in ["matmul:m=8,n=8,k=8", "a/b-c_1.db", "größe", "2x2", "gbt:batch=64,trees=3"] {
            assert_eq!(shell_quoted(word), word);
        }
        for word in ["", "a b", "epilogue=clip(0;7)", "it's", "$HOME", "~x", "*", "a\\b", "\"", "'", "a\nb", "\u{00d7}"]
        {
            let quoted = shell_quoted(word);
            let script = format!("printf %s {quoted}");
            let read = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!((quoted.starts_with('\''), read.stdout), (true, word.as_bytes().to_vec()), "{quoted}");
        }
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["impl".into(), "GFLOP/s".into()], vec!["gemm".into(), "9".into()]];
        assert_eq!(table(&rows), "impl  GFLOP/s\ngemm        9\n");
    }
}
