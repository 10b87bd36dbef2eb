//! Formatting of numbers and words for people.

use std::collections::BTreeMap;
use std::time::Duration;

use tilewright_search::ErrorClass;

/// Parses a time in seconds.
///
/// # Errors
/// If the text is not a time.
pub fn seconds(text: &str) -> Result<Duration, String> {
    scaled(text, 1.0, "a number of seconds above 0")
}

/// Parses a time in milliseconds.
///
/// # Errors
/// If the text is not a time.
pub fn milliseconds(text: &str) -> Result<Duration, String> {
    scaled(text, 1e-3, "a number of milliseconds above 0")
}

fn scaled(text: &str, unit: f64, expected: &str) -> Result<Duration, String> {
    let value = text.parse::<f64>().ok().filter(|x| *x > 0.0 && *x <= 1e9);
    value.map(|x| Duration::from_secs_f64(x * unit)).ok_or_else(|| format!("expected {expected}"))
}

/// Formats an integer with thousands separated by commas.
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

/// Formats nanoseconds as milliseconds or microseconds, with four digits.
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

/// Formats a number of 0 or above with about four significant digits.
pub fn digits(x: f64) -> String {
    let decimals = match x {
        // So long a number that its digits are none to read.
        1e15.. => return format!("{x:.3e}"),
        100.0.. => 1,
        10.0.. => 2,
        0.1.. | 0.0 => 3,
        0.01.. => 4,
        0.001.. => 5,
        _ => return format!("{x:.3e}"),
    };
    format!("{x:.decimals$}")
}

/// Formats a count with its noun, in the singular for 1.
pub fn count(n: impl Into<u128>, thing: &str) -> String {
    let n = n.into();
    format!("{} {thing}{}", grouped(n), if n == 1 { "" } else { "s" })
}

/// Formats a fraction as a percentage, or as a bound if it is so large that its digits are meaningless, such
/// as the lead of a metric of 0.
pub fn percent(part: f64) -> String {
    match part > 1e4 {
        true => "more than 1,000,000 %".to_owned(),
        false => format!("{:.1} %", 100.0 * part),
    }
}

/// Formats failure counts by class, in words.
pub fn errors_text(errors: &BTreeMap<ErrorClass, u64>) -> String {
    errors.iter().map(|(class, n)| format!("{n} {class}")).collect::<Vec<_>>().join(", ")
}

/// Quotes a word for a shell, if needed.
pub fn shell_quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_@%+=:,./-".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// Formats rows as a table: the first column flush left, the others flush right, two blanks between.
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
        assert_eq!([count(1_u64, "trial"), count(11_776_392_u64, "trial")], ["1 trial", "11,776,392 trials"]);
        assert_eq!([duration(850.0), duration(12_345.0), duration(9.5e6)], ["850 ns", "12.35 µs", "9.500 ms"]);
        assert_eq!([0.0, 0.1234, 0.0123456, 1.5e-9].map(digits), ["0.000", "0.123", "0.0123", "1.500e-9"]);
        assert_eq!([4.5, 45.678, 4567.89, 1e17].map(digits), ["4.500", "45.68", "4567.9", "1.000e17"]);
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["impl".into(), "GFLOP/s".into()], vec!["gemm".into(), "9".into()]];
        assert_eq!(table(&rows), "impl  GFLOP/s\ngemm        9\n");
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
}
