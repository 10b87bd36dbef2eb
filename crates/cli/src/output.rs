//! Where results and messages go: results to standard output, as text or as one JSON document, or to files;
//! all else to standard error.

use std::io::{self, Write};

use serde_json::Value as Json;

pub use tilewright::file::{Destination, check_apart, writable};
pub use tilewright::words::{digits, duration, grouped, shell_quoted};

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

/// Writes a line to standard error; where that is gone, nobody wants to know.
pub fn message(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
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
    fn columns_line_up() {
        let rows = [vec!["impl".into(), "GFLOP/s".into()], vec!["gemm".into(), "9".into()]];
        assert_eq!(table(&rows), "impl  GFLOP/s\ngemm        9\n");
    }
}
