//! What a tuner and the devices of a fleet say to each other: subjects, and messages in JSON.
//!
//! A task is some candidates of one assignment, in the order in which they are to be measured; what becomes
//! of each is a result of its own. Candidates travel as the text of their schedules, so that what runs does
//! not depend on the version of a template.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tilewright_device::Caches;
use tilewright_tune::{Candidate, Conditions, Config, Limit, Measured, Outcome, RaceLimits, Seconds, Standing};

use crate::error::Error;

/// The version of all of this, in every subject.
pub const VERSION: &str = "v1";
/// The stream of what is to be done.
pub const TASKS: &str = "TW_TASKS";
/// The stream of what came of it.
pub const RESULTS: &str = "TW_RESULTS";
/// The bucket of devices, and its stream.
pub const DEVICES: &str = "KV_TW_DEVICES";
/// What stands for a device where any of a class will do.
pub const ANY: &str = "any";

/// The bytes of a failure's message that are sent.
const MOST_OF_MESSAGE: usize = 16 << 10;

/// Checks that something may be a part of a subject.
///
/// # Errors
/// [`Error::Name`] where it may not.
pub fn check_name(what: &'static str, name: &str) -> Result<(), Error> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    let is_name = (1..=40).contains(&name.len()) && name.chars().all(is_plain) && name != ANY;
    if is_name { Ok(()) } else { Err(Error::Name { given: name.chars().take(60).collect(), what }) }
}

/// Tasks of a run, for a device of a class or [`ANY`].
pub fn task_subject(class: &str, device: &str, run: &str) -> String {
    format!("tw.{VERSION}.task.{class}.{device}.{run}")
}

/// What a device found out for a run.
pub fn result_subject(run: &str, device: &str) -> String {
    format!("tw.{VERSION}.result.{run}.{device}")
}

/// A device is at a task of a run.
pub fn started_subject(run: &str) -> String {
    format!("tw.{VERSION}.started.{run}")
}

/// What of a task of a run is still wanted.
pub fn rest_subject(run: &str) -> String {
    format!("tw.{VERSION}.rest.{run}")
}

/// Tasks of a run are not wanted any more.
pub fn cancel_subject(run: &str) -> String {
    format!("tw.{VERSION}.cancel.{run}")
}

/// Where a device says what it is.
pub fn device_subject(device: &str) -> String {
    format!("$KV.TW_DEVICES.{device}")
}

/// Who takes tasks for any device of a class.
pub fn class_consumer(class: &str) -> String {
    format!("class-{class}")
}

/// Who takes tasks for one device.
pub fn device_consumer(device: &str) -> String {
    format!("device-{device}")
}

/// What candidates are of, and how they are built, run and timed.
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
    /// What a run finds in the caches.
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
    /// Its schedule.
    pub steps: String,
    /// Its configuration, which the result says again: whoever takes it later need know nothing else.
    pub config: String,
    /// How long its runs may take, whatever others do.
    pub patience_s: Option<f64>,
}

impl Sent {
    /// What a device measures.
    pub fn candidate(&self) -> Candidate {
        let patience = self.patience_s.and_then(|s| Duration::try_from_secs_f64(s).ok());
        Candidate { config: Config::new([]), steps: self.steps.as_str().into(), patience }
    }
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// The run.
    pub run: String,
    /// The task's number in it.
    pub number: u64,
    /// What the candidates are of.
    pub assignment: Assignment,
    /// The candidates, each with its place in the task.
    pub candidates: Vec<Sent>,
    /// The median of one that leads, in nanoseconds.
    pub leading_ns: Option<f64>,
    /// The limits of a race, where the candidates are timed against each other.
    pub race: Option<Bounds>,
    /// The device has the task for so long, and renews that.
    pub lease_s: f64,
}

/// Limits of a race.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bounds {
    /// All rounds, in seconds.
    pub rounds_s: f64,
    /// The race as a whole.
    pub total_s: f64,
    /// What a run of the fastest takes, in nanoseconds.
    pub best_ns: f64,
}

impl From<RaceLimits> for Bounds {
    fn from(limits: RaceLimits) -> Bounds {
        Bounds { rounds_s: limits.rounds.as_secs_f64(), total_s: limits.total.as_secs_f64(), best_ns: limits.best_ns }
    }
}

impl From<Bounds> for RaceLimits {
    fn from(bounds: Bounds) -> RaceLimits {
        let time = |s: f64| Duration::try_from_secs_f64(s).unwrap_or_default();
        RaceLimits { rounds: time(bounds.rounds_s), total: time(bounds.total_s), best_ns: bounds.best_ns }
    }
}

/// What came of a candidate, or of a race.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// The task.
    pub task: u64,
    /// The candidate's place in it.
    pub index: usize,
    /// Which device found that out.
    pub device: String,
    /// What it is.
    pub what: Finding,
}

impl Done {
    /// By this a result is known: what is sent twice is kept once.
    pub fn id(&self, run: &str) -> String {
        format!("{run}.{}.{}", self.task, self.index)
    }
}

/// What a device found out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Finding {
    /// What became of a candidate.
    Trial {
        /// Its configuration.
        config: String,
        /// What became of it.
        outcome: Outcome,
        /// Where its time went.
        seconds: Seconds,
        /// What it failed of that another run may allow more of.
        limit: Option<Limit>,
        /// Where that was.
        #[serde(default)]
        conditions: Conditions,
    },
    /// What a race came to.
    Race(Vec<Place>),
    /// Nothing can be measured there, and why.
    Broken(String),
}

impl Finding {
    /// What became of a candidate on a device of this name.
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
pub struct Place {
    at: usize,
    outcome: Outcome,
    quartile_ns: Option<f64>,
    relative_error: Option<f64>,
}

impl From<Standing> for Place {
    fn from(Standing { at, outcome, quartile_ns, relative_error }: Standing) -> Place {
        Place { at, outcome, quartile_ns: Some(quartile_ns).filter(|ns| ns.is_finite()), relative_error }
    }
}

impl From<Place> for Standing {
    fn from(Place { at, outcome, quartile_ns, relative_error }: Place) -> Standing {
        Standing { at, outcome, quartile_ns: quartile_ns.unwrap_or(f64::INFINITY), relative_error }
    }
}

/// A device is at a task: said when it begins, and whenever it renews its lease. Or it has given it back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// The task.
    pub task: u64,
    /// The candidate, where the device has one at a time.
    pub index: Option<usize>,
    /// Which device; none any more where it was given back.
    pub device: Option<String>,
}

/// A device asks what of a task is still wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// The task; none to ask whether anybody is there.
    pub task: Option<u64>,
    /// Which device.
    pub device: String,
    /// How often the task was given away, with this time.
    pub n_times: u64,
}

/// What of a task is still wanted.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rest {
    /// The candidates' places.
    pub wanted: Vec<usize>,
    /// Whether one of them may take the machine along: they are to be measured one after the other.
    pub is_dangerous: bool,
    /// Whether this device is to leave the run to others.
    pub is_aside: bool,
}

/// Tasks are not wanted any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cancel {
    /// All from this number on: what is under way too.
    From(u64),
    /// What is not under way.
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
        let outcome = Outcome::Failed { class: tilewright_tune::ErrorClass::RuntimeError, message: "x".into() };
        let standing = Standing { at: 3, outcome, quartile_ns: f64::INFINITY, relative_error: None };
        let text = serde_json::to_string(&Place::from(standing.clone())).unwrap();
        assert_eq!(Standing::from(serde_json::from_str::<Place>(&text).unwrap()), standing);
    }
}
