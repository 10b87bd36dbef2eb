//! Records as JSON lines; unknown fields are ignored.

use std::io::{self, BufRead, Read};

use serde::{Deserialize, Serialize};

use super::{Record, Winner};

/// Maximum length of a line in bytes, far above that of any record.
const LINE_LIMIT: u64 = 16 << 20;

/// Line of JSON: a record and, if its configuration won a race, the result of the race.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordLine {
    /// The trial.
    #[serde(flatten)]
    pub record: Record,
    /// Result of the race; `None` if the configuration won no race.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub winner: Option<Winner>,
}

/// Reason why a line cannot be read as a record; the error is in the file.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// Error of the reader.
    #[error("line {line}: {source}")]
    Read {
        /// Line, counted from 1.
        line: u64,
        /// Error of the system.
        source: io::Error,
    },
    /// Line that is not a record.
    #[error("line {line}: {problem}")]
    Malformed {
        /// Line, counted from 1.
        line: u64,
        /// Reason, in one line.
        problem: String,
    },
}

impl RecordLine {
    /// Formats the line as JSON, without a line break.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).expect("invariant: a record consists of text, numbers and JSON")
    }

    /// Parses a line of JSON.
    ///
    /// # Errors
    /// A description of the problem, in one line.
    pub fn parse(line: &[u8]) -> Result<RecordLine, String> {
        let RecordLine { record, winner } = serde_json::from_slice(line)
            .map_err(|error| one_line(&error.to_string().replace(" at line 1 column ", " at column ")))?;
        record.check()?;
        winner.as_ref().map_or(Ok(()), Winner::check)?;
        let winner = winner.map(|winner| winner.of(&record));
        Ok(RecordLine { record, winner })
    }
}

/// Reads records from JSON lines, each with its line number, from 1; blank lines are skipped.
///
/// # Errors
/// An item that could not be read or is not a record. Reading can continue after a malformed line.
pub fn read_lines(mut input: impl BufRead) -> impl Iterator<Item = (u64, Result<RecordLine, RecordError>)> {
    let mut line = 0;
    let mut bytes = Vec::new();
    std::iter::from_fn(move || {
        loop {
            line += 1;
            bytes.clear();
            match input.by_ref().take(LINE_LIMIT).read_until(b'\n', &mut bytes) {
                Ok(0) => return None,
                Ok(_) if bytes.trim_ascii().is_empty() => continue,
                Ok(n) if n as u64 == LINE_LIMIT && bytes.last() != Some(&b'\n') => {
                    let problem = format!("longer than {LINE_LIMIT} bytes");
                    return Some((line, Err(RecordError::Malformed { line, problem })));
                }
                Ok(_) => {
                    let parsed = RecordLine::parse(bytes.trim_ascii());
                    return Some((line, parsed.map_err(|problem| RecordError::Malformed { line, problem })));
                }
                Err(source) => return Some((line, Err(RecordError::Read { line, source }))),
            }
        }
    })
}

/// Makes text that may quote the input fit on one line of a terminal.
fn one_line(text: &str) -> String {
    let escaped = text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] });
    escaped.take(300).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::record::RunTime;
    use tilewright_search::{Conditions, Seconds};
    use tilewright_search::{ErrorClass, Limit, OtherCosts, Outcome, Timing};

    fn any_record() -> impl Strategy<Value = Record> {
        let others = prop::collection::vec(1e-3f64..1e12, 0..4);
        let timing = (1e-3f64..1e12, 1e-3f64..1e12, 0f64..9.0, any::<u32>(), any::<bool>(), others);
        let measured = timing.prop_map(|(median_ns, min_ns, spread, n_samples, stopped_early, others)| {
            let others = OtherCosts::new(&others).unwrap();
            Outcome::Measured(Timing { median_ns, min_ns, spread, n_samples, stopped_early, others })
        });
        let failed = (prop::sample::select(&ErrorClass::ALL[..]), any::<String>())
            .prop_map(|(class, message)| Outcome::Failed { class, message });
        let numbers = (1..u32::MAX, any::<u64>(), any::<u64>(), any::<u64>(), 0f64..1e6);
        (prop_oneof![measured, failed], numbers, prop::array::uniform7(any::<String>()), any::<i64>()).prop_map(
            |(outcome, (threads, seed, trial, unix_time, build), texts, mr)| {
                let [workload, target, template, steps, search, version, toolchain] = texts;
                let seconds = Seconds { build, run: build / 3.0, verify: 0.0 };
                let config = json!({"mr": mr, "order": [&search], "m": [seed]});
                Record {
                    workload,
                    target,
                    template,
                    threads,
                    config,
                    outcome,
                    seconds,
                    steps,
                    search,
                    seed,
                    trial,
                    version,
                    toolchain,
                    unix_time,
                    run: (trial % 2 == 0).then_some(RunTime { start_unix_ms: seed, elapsed_s: build }),
                    limit: [None, Some(Limit::RunS(build)), Some(Limit::MemoryBytes(seed))][trial as usize % 3],
                    conditions: Conditions {
                        device: trial.is_multiple_of(2).then(|| "pi1".to_owned()),
                        frequency_mhz: trial.is_multiple_of(3).then_some(build),
                        temperature_c: trial.is_multiple_of(5).then_some(-build),
                    },
                    is_imported: false,
                }
            },
        )
    }

    fn any_line() -> impl Strategy<Value = RecordLine> {
        let race = (1e-3f64..1e12, prop::option::of(0f64..9.0), 1e-3f64..1e6, any::<bool>(), any::<u64>());
        (any_record(), prop::option::of(race)).prop_map(|(record, race)| {
            let winner = race.map(|(median_ns, margin, gflops, verified, unix_time)| {
                let winner = Winner {
                    median_ns,
                    margin,
                    spread: margin.map(|margin| margin / 2.0),
                    runner_up: margin.map(|_| record.config.clone()),
                    gflops,
                    verified,
                    version: record.version.clone(),
                    toolchain: record.toolchain.clone(),
                    unix_time,
                    ..Winner::default()
                };
                winner.of(&record)
            });
            RecordLine { record, winner }
        })
    }

    proptest! {
        #[test]
        fn printing_and_parsing_is_the_identity(line in any_line()) {
            let text = line.to_text();
            prop_assert!(!text.contains('\n'));
            prop_assert_eq!(RecordLine::parse(text.as_bytes()), Ok(line));
        }

        #[test]
        fn arbitrary_bytes_give_one_line_each(bytes: Vec<u8>) {
            for error in read_lines(&bytes[..]).filter_map(|(_, line)| line.err()) {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }

        #[test]
        fn broken_records_give_one_line_each(
            line in any_line(),
            at: prop::sample::Index,
            byte: u8,
            cut: bool,
        ) {
            let mut line = line.to_text().into_bytes();
            let at = at.index(line.len());
            line[at] = byte;
            if cut {
                line.truncate(at);
            }
            for error in read_lines(&line[..]).filter_map(|(_, line)| line.err()) {
                prop_assert!(!error.to_string().chars().any(char::is_control), "{error}");
            }
        }
    }

    const LINE: &str = r#"{"workload":"matmul:m=8,n=8,k=8","target":"x86-64","template":"gemm","threads":1,"config":{"mr":4},"outcome":{"class":"no_error","median_ns":10.5,"min_ns":10.0,"spread":0.1,"n_samples":3,"stopped_early":false},"seconds":{"build":0.1,"run":0.2,"verify":0.3},"steps":"split i 4","search":"random","seed":7,"trial":0,"version":"0.1.0","toolchain":"LLVM 22","unix_time":1800000000}"#;

    const WINNER: &str = r#","winner":{"median_ns":9.5,"margin":0.02,"runner_up":{"mr":2},"gflops":107.8,"verified":true,"version":"0.1.0","toolchain":"LLVM 22","unix_time":1800000009}}"#;

    #[test]
    fn the_form_is_stable() {
        let of_winner = format!("{}{WINNER}", &LINE[..LINE.len() - 1]);
        for text in [LINE, &of_winner] {
            let line = RecordLine::parse(text.as_bytes()).unwrap();
            assert_eq!(line.to_text(), text);
            let with_more = text.replace(r#""threads":1"#, r#""colour":"red","threads":1"#);
            assert_eq!(RecordLine::parse(with_more.as_bytes()).unwrap(), line);
        }
        let nonsense = of_winner.replace("107.8", "-1.0");
        let problem = RecordLine::parse(nonsense.as_bytes()).unwrap_err();
        assert_eq!(problem, "winner: gflops -1 is not a number of at least 0");
    }

    fn check_problem(find: &str, replace: &str, expected: &str) {
        let text = format!("\n{LINE}\n{}\n", LINE.replace(find, replace));
        let problems: Vec<_> = read_lines(text.as_bytes()).filter_map(|(_, line)| line.err()).collect();
        assert_eq!(problems.len(), 1, "{problems:?}");
        let problem = problems[0].to_string();
        assert!(problem.starts_with("line 3: ") && problem.contains(expected), "{problem}");
    }

    #[test]
    fn malformed_lines_are_named_with_their_problem() {
        check_problem(LINE, "{", "EOF while parsing");
        check_problem(LINE, "[1]", "invalid type");
        check_problem(r#""threads":1,"#, "", "missing field `threads`");
        check_problem(r#""threads":1"#, r#""threads":0"#, "threads is 0");
        check_problem(r#""threads":1"#, r#""threads":-1"#, "invalid value: integer `-1`");
        check_problem(r#"{"mr":4}"#, "4", "config is not an object");
        check_problem("no_error", "bad\\nluck", r#"unknown error class "bad\nluck""#);
        check_problem(r#""median_ns":10.5,"#, "", "missing field `median_ns`");
        check_problem("10.5", "-1", "median_ns -1 is not a positive number");
        check_problem("10.5", "1e999", "out of range");
        let others = |costs: &str| format!(r#""stopped_early":false,"other_costs":{costs}"#);
        check_problem(r#""stopped_early":false"#, &others("[1, -2]"), "other_costs: the cost -2 is not a positive");
        check_problem(r#""stopped_early":false"#, &others("[1, 1, 1, 1]"), "other_costs: 5 objectives are more than 4");
        check_problem("random", "\u{1}", "control character");
    }

    #[test]
    fn endless_lines_are_refused() {
        let mut lines = read_lines(io::BufReader::new(io::repeat(b'x')));
        let problem = lines.next().unwrap().1.unwrap_err().to_string();
        assert_eq!(problem, format!("line 1: longer than {LINE_LIMIT} bytes"));
    }
}
