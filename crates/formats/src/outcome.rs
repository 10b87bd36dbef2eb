//! Outcomes as other tuners record them: a time, a failure, or a value that stands for a failure.

use serde_json::Value as Json;

use tilewright_search::{ErrorClass, Outcome, Timing};

use crate::format::OBJECTIVE;

/// Outcome of a configuration, with an irregularity of its notation.
pub(crate) struct NotedOutcome {
    pub(crate) outcome: Outcome,
    /// Kind of irregularity, and the text found.
    pub(crate) oddity: Option<(&'static str, String)>,
}

/// Time of a day, beyond which a time is not a measurement but stands for a failure.
const LONGEST_NS: f64 = 86_400e9;
/// Largest numbers of integer types and of f32, which stand for failures in any unit.
const LARGEST: &[f64] = &[i32::MAX as f64, u32::MAX as f64, i64::MAX as f64, u64::MAX as f64, f32::MAX as f64];

/// Kernel Tuner's names of failures. It has fewer of them than we have classes: a name that several classes
/// share is read as the first of them.
const FAILURES: &[(&str, ErrorClass)] = &[
    ("CompilationFailedConfig", ErrorClass::CompileErrorDevice),
    ("CompilationFailedConfig", ErrorClass::CompileErrorHost),
    ("CompilationFailedConfig", ErrorClass::BuildTimeout),
    ("RuntimeFailedConfig", ErrorClass::RuntimeError),
    ("RuntimeFailedConfig", ErrorClass::RunTimeout),
    ("RuntimeFailedConfig", ErrorClass::WrongAnswer),
    ("RuntimeFailedConfig", ErrorClass::Unknown),
    ("InvalidConfig", ErrorClass::InstantiationError),
];

/// Kernel Tuner's name of a failure of this class.
pub(crate) fn failure_of(class: ErrorClass) -> &'static str {
    let row = FAILURES.iter().find(|(_, known)| *known == class);
    row.expect("invariant: each class of errors has a name in Kernel Tuner").0
}

/// Names in a value, which is a list or a single name.
pub(crate) fn names(value: Option<Json>) -> Vec<String> {
    match value {
        Some(Json::Array(items)) => items.into_iter().flat_map(|item| names(Some(item))).collect(),
        Some(Json::String(name)) => vec![name],
        _ => Vec::new(),
    }
}

/// Objectives as text, if time is not the only one.
pub(crate) fn other_objective(objectives: &[String]) -> Option<String> {
    let quoted = || objectives.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(" and ");
    objectives.iter().any(|name| name != OBJECTIVE).then(quoted)
}

const NOT_POSITIVE: &str = "rows counted as failed, for their time is no positive number";
const TOO_LONG: &str =
    "rows counted as failed, for a time beyond a day or the largest number of its type stands for a failure";
const NO_TIME: &str = "rows counted as failed, for they have no time";
const UNKNOWN_FAILURE: &str = "rows counted as failed, in a way that is not known here";
const SINGLE_RUNS: &str = "rows with several times, of which the median counts";

impl From<Outcome> for NotedOutcome {
    fn from(outcome: Outcome) -> NotedOutcome {
        NotedOutcome { outcome, oddity: None }
    }
}

impl NotedOutcome {
    /// Makes a failure of a class that the file names differently.
    pub(crate) fn failed(class: ErrorClass, found: &str) -> NotedOutcome {
        let begin: String = found.chars().take(80).collect();
        Outcome::Failed { class, message: format!("recorded as {begin}") }.into()
    }

    /// Makes a failure with an irregularity.
    pub(crate) fn odd(class: ErrorClass, what: &'static str, found: String) -> NotedOutcome {
        NotedOutcome { oddity: Some((what, brief(&found))), ..NotedOutcome::failed(class, &found) }
    }

    /// Makes a failure with an unknown name.
    pub(crate) fn unknown(found: &str) -> NotedOutcome {
        NotedOutcome::odd(ErrorClass::Unknown, UNKNOWN_FAILURE, format!("{found:?}"))
    }

    /// Reads a failure by Kernel Tuner's name.
    pub(crate) fn of_failure(name: &str) -> NotedOutcome {
        match FAILURES.iter().find(|(known, _)| *known == name) {
            Some((_, class)) => NotedOutcome::failed(*class, name),
            None => NotedOutcome::unknown(name),
        }
    }

    /// Reads a time: a number, a number as text, several numbers, or a failure.
    pub(crate) fn of_time(time: Option<&Json>, unit_ns: f64) -> NotedOutcome {
        match time {
            None => NotedOutcome::odd(ErrorClass::Unknown, NO_TIME, "none".into()),
            Some(Json::String(text)) => match text.trim().parse::<f64>() {
                Ok(time) => of_number(time, text, unit_ns),
                Err(_) => NotedOutcome::of_failure(text),
            },
            Some(Json::Array(times)) if !times.is_empty() => NotedOutcome::of_times(times, unit_ns),
            Some(time) => of_number(time.as_f64().unwrap_or(f64::NAN), &time.to_string(), unit_ns),
        }
    }

    /// Reads the runs of a measurement, usually several.
    pub(crate) fn of_runs(times: &[Json], unit_ns: f64) -> NotedOutcome {
        let reading = NotedOutcome::of_times(times, unit_ns);
        let is_sound = reading.outcome.timing().is_some_and(|timing| timing.n_samples as usize == times.len());
        if is_sound { reading.outcome.into() } else { reading }
    }

    /// Reads several times of a configuration: the median of the valid ones.
    pub(crate) fn of_times(times: &[Json], unit_ns: f64) -> NotedOutcome {
        let readings: Vec<NotedOutcome> = times.iter().map(|time| NotedOutcome::of_time(Some(time), unit_ns)).collect();
        let sound_ns: Vec<f64> = readings.iter().filter_map(|r| Some(r.outcome.timing()?.median_ns)).collect();
        match readings.into_iter().next() {
            None => NotedOutcome::of_time(None, unit_ns),
            Some(first) if sound_ns.is_empty() => first,
            Some(_) => {
                let outcome = Outcome::Measured(Timing::of_samples(&sound_ns, false));
                let found = format!("{} of {} are sound", sound_ns.len(), times.len());
                NotedOutcome { outcome, oddity: Some((SINGLE_RUNS, found)) }
            }
        }
    }
}

fn of_number(time: f64, found: &str, unit_ns: f64) -> NotedOutcome {
    let ns = time * unit_ns;
    // NaN is not above 0 either, and the product may underflow to 0.
    if !(time > 0.0 && time.is_finite() && ns > 0.0) {
        NotedOutcome::odd(ErrorClass::Unknown, NOT_POSITIVE, found.into())
    } else if ns > LONGEST_NS || LARGEST.contains(&time) {
        NotedOutcome::odd(ErrorClass::Unknown, TOO_LONG, found.into())
    } else {
        Outcome::Measured(Timing::of_samples(&[ns], false)).into()
    }
}

/// Returns the beginning of a text, on one line.
pub(crate) fn brief(found: &str) -> String {
    let escaped =
        found.chars().take(80).map(|c| if c.is_control() { c.escape_default().to_string() } else { c.into() });
    let rest = if found.chars().nth(80).is_some() { "…" } else { "" };
    escaped.chain([rest.to_owned()]).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_class_has_a_name() {
        for class in ErrorClass::ALL {
            assert_eq!(FAILURES.iter().filter(|(_, other)| *other == class).count(), 1, "{class}");
        }
    }

    #[test]
    fn what_stands_for_a_failure_is_one() {
        let check = |time: Json, unit_ns: f64, expected: Option<f64>| {
            let reading = NotedOutcome::of_time(Some(&time), unit_ns);
            assert_eq!(reading.outcome.timing().map(|timing| timing.median_ns), expected, "{time} of {unit_ns} ns");
            assert!(expected.is_some() || reading.oddity.is_some(), "{time} is told");
        };
        const MS: f64 = 1e6;
        check(json!(2.5), MS, Some(2.5e6));
        check(json!("2.5"), MS, Some(2.5e6));
        check(json!([3, "NaN", 1.0, -1, 2]), MS, Some(2e6));
        // Twenty hours of milliseconds, two seconds of nanoseconds.
        check(json!(72_000_000), MS, Some(7.2e13));
        check(json!(2_147_483_646), 1.0, Some(2_147_483_646.0));
        let none =
            [json!(0), json!(-1), json!(null), json!("NaN"), json!("Infinity"), json!(true), json!({}), json!([])];
        let large = [json!(1e20), json!(2147483647), json!(1e9), json!(1e300), json!(u64::MAX), json!([1e20, 0])];
        for time in none.into_iter().chain(large) {
            check(time, MS, None);
        }
        check(json!(2147483647), 1.0, None);
        check(json!(1e-300), 1e-30, None);
    }
}
