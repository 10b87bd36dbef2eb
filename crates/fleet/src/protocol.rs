//! Protocol between a tuner and the devices of a fleet: subjects, and messages in JSON.
//!
//! A task consists of candidates of one assignment, in the order of measurement; each has a result of its
//! own. Candidates are sent as the text of their schedules, so that devices do not depend on the version of a
//! template.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewright_device::Caches;
use tilewright_search::{Candidate, Conditions, Config, Limit, Measured, Outcome, RaceLimits, Seconds, Standing};

use crate::error::Error;

/// Protocol version, part of every subject.
pub const VERSION: &str = "v1";
/// Stream of tasks.
pub const TASKS: &str = "TW_TASKS";
/// Stream of results.
pub const RESULTS: &str = "TW_RESULTS";
/// Key-value bucket of device descriptions, and its stream.
pub const DEVICES: &str = "KV_TW_DEVICES";
/// Part of a subject that denotes any device of a class.
pub const ANY: &str = "any";

/// Maximum number of bytes of a failure's message that are sent.
const MOST_OF_MESSAGE: usize = 16 << 10;

/// Checks that a name is a valid part of a subject.
///
/// # Errors
/// [`Error::Name`] if the name is not valid.
pub fn check_name(what: &'static str, name: &str) -> Result<(), Error> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let is_name = (1..=40).contains(&name.len()) && name.chars().all(is_plain) && name != ANY;
    if is_name { Ok(()) } else { Err(Error::Name { given: name.chars().take(60).collect(), what }) }
}

/// Subject of a run's tasks for a device of a class, or for [`ANY`].
pub fn task_subject(class: &str, device: &str, run: &str) -> String {
    format!("tw.{VERSION}.task.{class}.{device}.{run}")
}

/// Subject of a device's results for a run.
pub fn result_subject(run: &str, device: &str) -> String {
    format!("tw.{VERSION}.result.{run}.{device}")
}

/// Subject for reports that a device is working on a run's task.
pub fn started_subject(run: &str) -> String {
    format!("tw.{VERSION}.started.{run}")
}

/// Subject for devices' queries for the remaining part of a run's task.
pub fn rest_subject(run: &str) -> String {
    format!("tw.{VERSION}.rest.{run}")
}

/// Subject for cancelling tasks of a run.
pub fn cancel_subject(run: &str) -> String {
    format!("tw.{VERSION}.cancel.{run}")
}

/// Subject (key) of a device's description.
pub fn device_subject(device: &str) -> String {
    format!("$KV.TW_DEVICES.{device}")
}

/// Name of the consumer of tasks for any device of a class.
pub fn class_consumer(class: &str) -> String {
    format!("class-{class}")
}

/// Name of the consumer of tasks for a device.
pub fn device_consumer(device: &str) -> String {
    format!("device-{device}")
}

/// Workload of candidates, and the settings for building, running and timing them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// Workload as text.
    pub workload: String,
    /// Target of the schedules, as text.
    pub target: String,
    /// Number of threads that a kernel may use.
    pub threads: usize,
    /// Seed of the random inputs.
    pub seed: u64,
    /// Cache state before a run.
    pub caches: Caches,
    /// Whether slow candidates are timed completely, rather than pruned.
    pub to_the_end: bool,
    /// Minimum time of a candidate's timed runs in seconds; `None` for the device's default.
    pub min_time_s: Option<f64>,
    /// Timeout of a build, in seconds.
    pub build_timeout_s: Option<f64>,
    /// Timeout of a candidate's runs, in seconds.
    pub run_timeout_s: Option<f64>,
}

/// Candidate sent to a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// Schedule of the candidate.
    pub steps: String,
    /// Configuration, repeated in the result so that it can be recorded without the task.
    pub config: String,
    /// Timeout of its runs in seconds that overrides the default, if any.
    pub patience_s: Option<f64>,
}

impl Sent {
    /// Returns the candidate to measure.
    pub fn candidate(&self) -> Candidate {
        let patience = self.patience_s.and_then(|s| Duration::try_from_secs_f64(s).ok());
        Candidate { config: Config::new([]), steps: self.steps.as_str().into(), patience }
    }
}

/// Task of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceTask {
    /// Name of the run.
    pub run: String,
    /// Number of the task in its run.
    pub number: u64,
    /// Workload and settings.
    pub assignment: Assignment,
    /// Candidates, each with its index in the task.
    pub candidates: Vec<Sent>,
    /// Median of the best candidate in nanoseconds, for pruning.
    pub leading_ns: Option<f64>,
    /// Limits of a race; `None` for single measurements.
    pub race: Option<RaceTimes>,
    /// Lease of the task in seconds, which a working device renews.
    pub lease_s: f64,
}

/// Limits of a race.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RaceTimes {
    /// Time for all rounds, in seconds.
    pub rounds_s: f64,
    /// Time for the race as a whole, in seconds.
    pub total_s: f64,
    /// Expected time of the fastest kernel, in nanoseconds.
    pub best_ns: f64,
}

impl From<RaceLimits> for RaceTimes {
    fn from(limits: RaceLimits) -> RaceTimes {
        RaceTimes {
            rounds_s: limits.rounds.as_secs_f64(),
            total_s: limits.total.as_secs_f64(),
            best_ns: limits.best_ns,
        }
    }
}

impl From<RaceTimes> for RaceLimits {
    fn from(bounds: RaceTimes) -> RaceLimits {
        let time = |s: f64| Duration::try_from_secs_f64(s).unwrap_or_default();
        RaceLimits { rounds: time(bounds.rounds_s), total: time(bounds.total_s), best_ns: bounds.best_ns }
    }
}

/// Result of a candidate or of a race.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// Number of the task.
    pub task: u64,
    /// Index of the candidate in its task.
    pub index: usize,
    /// Name of the device that measured it.
    pub device: String,
    /// Result.
    pub what: Finding,
}

impl Done {
    /// Message id of the result, by which the server drops duplicates.
    pub fn id(&self, run: &str) -> String {
        format!("{run}.{}.{}", self.task, self.index)
    }
}

/// Result of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Finding {
    /// Result of a candidate.
    Trial {
        /// Configuration of the candidate.
        config: String,
        /// Outcome of the candidate.
        outcome: Outcome,
        /// Seconds spent on the candidate, by activity.
        seconds: Seconds,
        /// Limit that caused the failure, if any; under a higher one the candidate may succeed.
        limit: Option<Limit>,
        /// Conditions of the measurement.
        #[serde(default)]
        conditions: Conditions,
    },
    /// Result of a race.
    Race(Vec<Finalist>),
    /// Reason why the device cannot measure anything.
    Broken(String),
}

impl Finding {
    /// Result of a candidate on a device of this name.
    pub fn of(sent: &Sent, device: &str, measured: Measured) -> Finding {
        let Measured { mut outcome, seconds, limit, conditions } = measured;
        if let Outcome::Failed { message, .. } = &mut outcome {
            // A compiler's message may be long, and servers limit the size of messages.
            message.truncate(message.floor_char_boundary(MOST_OF_MESSAGE));
        }
        let conditions = Conditions { device: Some(device.to_owned()), ..conditions };
        Finding::Trial { config: sent.config.clone(), outcome, seconds, limit, conditions }
    }
}

/// Finalist of a race. The quartile of a failed one is absent, which means infinite.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Finalist {
    at: usize,
    outcome: Outcome,
    quartile_ns: Option<f64>,
    relative_error: Option<f64>,
}

impl From<Standing> for Finalist {
    fn from(Standing { at, outcome, quartile_ns, relative_error }: Standing) -> Finalist {
        Finalist { at, outcome, quartile_ns: Some(quartile_ns).filter(|ns| ns.is_finite()), relative_error }
    }
}

impl From<Finalist> for Standing {
    fn from(Finalist { at, outcome, quartile_ns, relative_error }: Finalist) -> Standing {
        Standing { at, outcome, quartile_ns: quartile_ns.unwrap_or(f64::INFINITY), relative_error }
    }
}

/// Report that a device is working on a task, sent when it starts, when it renews its lease, and when it
/// returns the task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Number of the task.
    pub task: u64,
    /// Index of the current candidate, if candidates are measured one at a time.
    pub index: Option<usize>,
    /// Name of the device; `None` when it returns the task.
    pub device: Option<String>,
}

/// Query of a device for the remaining part of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Number of the task; `None` to ask whether the tuner is online.
    pub task: Option<u64>,
    /// Name of the device.
    pub device: String,
    /// Number of deliveries of the task, including this one.
    pub n_times: u64,
}

/// Remaining part of a task.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RemainingTask {
    /// Indices of the candidates that are still wanted.
    pub wanted: Vec<usize>,
    /// Whether one of the candidates may crash the machine, so that they must be measured one at a time.
    pub is_dangerous: bool,
    /// Whether this device is excluded from the run.
    pub is_aside: bool,
}

/// Cancellation of tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cancel {
    /// Tasks from this number on, including running ones.
    From(u64),
    /// Tasks that are not running.
    WindDown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parts_of_subjects() {
        for name in ["lab", "pi-4_b", "0"] {
            assert!(check_name("class", name).is_ok(), "{name}");
        }
        for name in ["", "any", "a.b", "A", "a b", "*", ">", &"x".repeat(41)] {
            assert!(check_name("class", name).is_err(), "{name}");
        }
    }

    #[test]
    fn what_failed_in_a_race_comes_over() {
        let outcome = Outcome::Failed { class: tilewright_search::ErrorClass::RuntimeError, message: "x".into() };
        let standing = Standing { at: 3, outcome, quartile_ns: f64::INFINITY, relative_error: None };
        let text = serde_json::to_string(&Finalist::from(standing.clone())).unwrap();
        assert_eq!(Standing::from(serde_json::from_str::<Finalist>(&text).unwrap()), standing);
    }
}
