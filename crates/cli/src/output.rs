//! Where results and messages go: results to standard output, as text or as one JSON document, or to files; all else
//! to standard error.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

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

/// Writes a file beside its place first, so that it is there as a whole or as it was. What is no file, such as a pipe, is
/// written to as it is.
///
/// # Errors
/// Where the folder cannot be written to.
pub fn write_whole(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let create = |path: &Path| Ok::<_, io::Error>(BufWriter::with_capacity(1 << 16, File::create(path)?));
    if path.metadata().is_ok_and(|there| !there.is_file()) {
        let mut file = create(path)?;
        return write(&mut file).and_then(|()| file.flush());
    }
    // A link stays one: what it leads to is replaced.
    let path = &path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let part = with_suffix(path, ".part");
    let mut file = create(&part)?;
    let written = write(&mut file).and_then(|()| file.flush());
    drop(file);
    written.and_then(|()| std::fs::rename(&part, path)).inspect_err(|_| {
        let _ = std::fs::remove_file(&part);
    })
}

/// A path of a name that is longer by an ending, behind an extension too.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut longer = path.as_os_str().to_owned();
    longer.push(suffix);
    longer.into()
}

/// Writes a result: the JSON document where it was asked for, the text otherwise. A line break is added.
///
/// # Errors
/// [`StdoutError`].
pub fn write_result(as_json: bool, json: &Json, text: &str) -> anyhow::Result<()> {
    let shown = if as_json { json.to_string() } else { text.trim_end_matches('\n').to_owned() };
    if shown.is_empty() { Ok(()) } else { write_stdout(format!("{shown}\n").as_bytes()) }
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
    fn a_link_stays_and_what_it_leads_to_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        std::fs::write(&file, "before").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_whole(&link, |out| out.write_all(b"after")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read(&file).unwrap(), b"after");
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["impl".into(), "GFLOP/s".into()], vec!["gemm".into(), "9".into()]];
        assert_eq!(table(&rows), "impl  GFLOP/s\ngemm        9\n");
    }
}
