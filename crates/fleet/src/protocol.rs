//! Protocol between a tuner and the devices of a fleet: subjects, and messages in JSON.
//!
//! A task is some candidates of one assignment, in the order in which they are to be measured; what becomes
//! of each is a result of its own. Candidates travel as the text of their schedules, so that what runs does
//! not depend on the version of a template.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewright_device::Caches;
use tilewright_search::{Candidate, Conditions, Config, Limit, Measured, Outcome, RaceLimits, Seconds, Standing};

use crate::error::Error;

/// The version of all of this, in every subject.
pub const VERSION: &str = "v1";
/// Stream of tasks.
pub const TASKS: &str = "TW_TASKS";
/// Stream of results.
pub const RESULTS: &str = "TW_RESULTS";
/// The bucket of devices, and its stream.
pub const DEVICES: &str = "KV_TW_DEVICES";
/// Name in a subject that stands for any device of a class.
pub const ANY: &str = "any";

/// The bytes of a failure's message that are sent.
const MOST_OF_MESSAGE: usize = 16 << 10;

/// Checks that something may be a part of a subject.
///
/// # Errors
/// [`Error::Name`] if it may not.
pub fn check_name(what: &'static str, name: &str) -> Result<(), Error> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let is_name = (1..=40).contains(&name.len()) && name.chars().all(is_plain) && name != ANY;
    if is_name { Ok(()) } else { Err(Error::Name { given: name.chars().take(60).collect(), what }) }
}

/// Tasks of a run, for a device of a class or [`ANY`].
pub fn task_subject(class: &str, device: &str, run: &str) -> String {
    format!("tw.{VERSION}.task.{class}.{device}.{run}")
}

/// Subject of a device's results for a run.
pub fn result_subject(run: &str, device: &str) -> String {
    format!("tw.{VERSION}.result.{run}.{device}")
}

/// A device is at a task of a run.
pub fn started_subject(run: &str) -> String {
    format!("tw.{VERSION}.started.{run}")
}

/// Subject on which devices ask what is still wanted of a run's task.
pub fn rest_subject(run: &str) -> String {
    format!("tw.{VERSION}.rest.{run}")
}

/// Tasks of a run are not wanted any more.
pub fn cancel_subject(run: &str) -> String {
    format!("tw.{VERSION}.cancel.{run}")
}

/// Key of a device's description.
pub fn device_subject(device: &str) -> String {
    format!("$KV.TW_DEVICES.{device}")
}

/// Consumer of tasks for any device of a class.
pub fn class_consumer(class: &str) -> String {
    format!("class-{class}")
}

/// Consumer of tasks for a device.
pub fn device_consumer(device: &str) -> String {
    format!("device-{device}")
}

/// Workload of candidates, and the settings for building, running and timing them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The workload's text.
    pub workload: String,
    /// The text of the target that schedules are for.
    pub target: String,
    /// Threads a kernel may use.
    pub threads: usize,
    /// Seed of the random inputs.
    pub seed: u64,
    /// State of the caches before a run.
    pub caches: Caches,
    /// Whether hopeless candidates are run and timed to the end too.
    pub to_the_end: bool,
    /// Time to spend in the runs of a candidate, in seconds; by default the device's.
    pub min_time_s: Option<f64>,
    /// Longest that a build may take.
    pub build_timeout_s: Option<f64>,
    /// Longest that the runs of a candidate may take.
    pub run_timeout_s: Option<f64>,
}

/// A candidate under way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sent {
    /// Schedule of the candidate.
    pub steps: String,
    /// Configuration, which the result repeats so that it can be recorded without the task.
    pub config: String,
    /// Timeout of its runs, whatever other candidates take.
    pub patience_s: Option<f64>,
}

impl Sent {
    /// The candidate to measure.
    pub fn candidate(&self) -> Candidate {
        let patience = self.patience_s.and_then(|s| Duration::try_from_secs_f64(s).ok());
        Candidate { config: Config::new([]), steps: self.steps.as_str().into(), patience }
    }
}

/// Task of a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceTask {
    /// Run of the task.
    pub run: String,
    /// Number of the task in its run.
    pub number: u64,
    /// Workload and settings.
    pub assignment: Assignment,
    /// The candidates, each with its place in the task.
    pub candidates: Vec<Sent>,
    /// The median of one that leads, in nanoseconds.
    pub leading_ns: Option<f64>,
    /// The limits of a race, where the candidates are timed against each other.
    pub race: Option<RaceTimes>,
    /// Time for which the device has the task, in seconds; a device at work renews it.
    pub lease_s: f64,
}

/// Limits of a race.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RaceTimes {
    /// All rounds, in seconds.
    pub rounds_s: f64,
    /// The race as a whole.
    pub total_s: f64,
    /// Time of the fastest kernel, in nanoseconds.
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
    /// The task.
    pub task: u64,
    /// Index of the candidate in its task.
    pub index: usize,
    /// Device that measured.
    pub device: String,
    /// Result.
    pub what: Finding,
}

impl Done {
    /// Id of the result: the server stores a duplicate once.
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
        /// Seconds of building, checking and timing.
        seconds: Seconds,
        /// Limit that it exceeded, which another run may raise.
        limit: Option<Limit>,
        /// Conditions of the measurement.
        #[serde(default)]
        conditions: Conditions,
    },
    /// Result of a race.
    Race(Vec<Finalist>),
    /// Reason why nothing can be measured there.
    Broken(String),
}

impl Finding {
    /// Makes the result of a candidate on a device of this name.
    pub fn of(sent: &Sent, device: &str, measured: Measured) -> Finding {
        let Measured { mut outcome, seconds, limit, conditions } = measured;
        if let Outcome::Failed { message, .. } = &mut outcome {
            // A compiler may have much to say, and servers take no message of any size.
            message.truncate(message.floor_char_boundary(MOST_OF_MESSAGE));
        }
        let conditions = Conditions { device: Some(device.to_owned()), ..conditions };
        Finding::Trial { config: sent.config.clone(), outcome, seconds, limit, conditions }
    }
}

/// A candidate after a race. One that failed has no quartile, which is infinite then.
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

/// Message that a device works on a task: sent when it begins, whenever it renews its lease, and when it
/// gives the task back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The task.
    pub task: u64,
    /// The candidate, where the device has one at a time.
    pub index: Option<usize>,
    /// Name of the device; `None` where it gives the task back.
    pub device: Option<String>,
}

/// Question of a device what is still wanted of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// The task; `None` to ask whether the tuner is there.
    pub task: Option<u64>,
    /// Name of the device.
    pub device: String,
    /// Number of deliveries of the task, this one included.
    pub n_times: u64,
}

/// Remaining part of a task.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RemainingTask {
    /// The candidates' places.
    pub wanted: Vec<usize>,
    /// Whether one of them may take the machine along: they are to be measured one after the other.
    pub is_dangerous: bool,
    /// Whether this device is to leave the run to others.
    pub is_aside: bool,
}

/// Message that tasks are cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cancel {
    /// All from this number on, including those under way.
    From(u64),
    /// All that are not under way.
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
