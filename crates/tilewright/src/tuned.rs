//! Results of runs.

mod diagnostics;

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Serialize, Serializer};
use tilewright_search::{Ended, ErrorClass, Outcome, Summary, Trial};
use tilewright_tune::TaskKey;

use crate::best::Best;
use crate::error::Error;
use crate::request::Settings;
use crate::run::earlier::{Earlier, errors_of};
use crate::run::finals::{RunEnd, Untuned};

/// Result of a run. Its JSON is what `tilewright tune --json` prints.
#[derive(Debug, Serialize)]
pub struct Tuned {
    /// Workload, as in records.
    pub workload: String,
    /// Name of the template.
    pub template: String,
    /// Search with its options.
    pub search: String,
    /// Target, as named in records.
    pub target: String,
    /// Number of threads that the kernel may use.
    pub threads: u32,
    /// Seed of the search.
    pub seed: u64,
    /// Number of recorded trials, those of earlier runs included.
    pub trials: u64,
    /// Number of trials of this run.
    pub new_trials: u64,
    /// Duration of the search in seconds.
    pub seconds: f64,
    /// Wall-clock time of the run by phase.
    pub wall_seconds: WallSeconds,
    /// Trials per second in this run.
    pub trials_per_second: f64,
    /// Seconds of the search by activity.
    pub seconds_in: SecondsIn,
    /// Number of failures by class, those of earlier runs included.
    #[serde(serialize_with = "by_name")]
    pub errors: BTreeMap<ErrorClass, u64>,
    /// Measured peak of the machine, in GFLOP/s.
    pub peak_gflops: Option<f64>,
    /// Path of the database.
    pub db: String,
    /// Whether all trials are recorded.
    pub recorded: bool,
    /// Winner of the race, or the fastest trial without a race; `None` if no candidate was correct, or none
    /// measured.
    pub best: Option<Best>,
    /// Final race, if there was one.
    #[serde(flatten)]
    pub race: Option<Race>,
    /// Whether the best candidate's result was verified; on an emulated device, whether any candidate's was.
    pub verified: bool,
    /// Whether the device is emulated: then there are no times and no best, and nothing is recorded.
    pub emulated: bool,
    /// Reason why the search ended; `None` if it was not started.
    #[serde(skip)]
    pub ended: Option<Ended>,
    /// Number of candidates by class whose failure a higher limit may avoid.
    #[serde(skip)]
    pub cut_off: BTreeMap<ErrorClass, u64>,
    /// Message of one of the failed candidates.
    #[serde(skip)]
    pub example: Option<(ErrorClass, String)>,
    /// Whether any candidate was correct.
    #[serde(skip)]
    pub any_right: bool,
    /// Error that ended the run because records were lost.
    #[serde(skip)]
    pub lost: Option<Error>,
}

impl Tuned {
    /// Makes the result of a run without a winner yet, with its new trials.
    pub(crate) fn of(key: &TaskKey, settings: &Settings, earlier: &Earlier, found: &NewTrials) -> Tuned {
        let NewTrials { new, summary, seconds: wall_seconds } = *found;
        let all = || earlier.trials.iter().chain(new);
        let mut errors = errors_of(&earlier.trials);
        errors_of(new).into_iter().for_each(|(class, n)| *errors.entry(class).or_default() += n);
        let mut cut_off = earlier.cut_off.clone();
        for (class, n) in summary.iter().flat_map(|summary| &summary.cut_off) {
            *cut_off.entry(*class).or_default() += n;
        }
        let seconds = summary.map(|s| s.seconds).unwrap_or_default();
        let rate = |s: &Summary| if s.wall_seconds > 0.0 { s.n_trials as f64 / s.wall_seconds } else { 0.0 };
        Tuned {
            workload: key.workload.clone(),
            template: key.template.clone(),
            search: settings.search.clone(),
            target: key.target.clone(),
            threads: key.threads,
            seed: settings.seed,
            trials: all().count() as u64,
            new_trials: summary.map_or(0, |s| s.n_trials),
            seconds: summary.map_or(0.0, |s| s.wall_seconds),
            wall_seconds,
            trials_per_second: summary.map_or(0.0, rate),
            seconds_in: SecondsIn {
                search: summary.map_or(0.0, |s| s.search_seconds),
                build: seconds.build,
                run: seconds.run,
                verify: seconds.verify,
            },
            errors,
            peak_gflops: None,
            db: String::new(),
            recorded: true,
            best: None,
            race: None,
            verified: false,
            emulated: false,
            ended: summary.map(|s| s.ended),
            cut_off,
            example: all().find_map(|trial| match &trial.outcome {
                Outcome::Failed { class, message } => Some((*class, message.clone())),
                Outcome::Measured(_) => None,
            }),
            any_right: all().any(|trial| trial.outcome.timing().is_some()),
            lost: None,
        }
    }
}

/// New trials of a run, and the time that they took.
pub(crate) struct NewTrials<'a> {
    pub new: &'a [Trial],
    pub summary: Option<&'a Summary>,
    pub seconds: WallSeconds,
}

fn by_name<S: Serializer>(errors: &BTreeMap<ErrorClass, u64>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(errors.iter().map(|(class, n)| (class.name(), n)))
}

/// Seconds of a search by activity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct SecondsIn {
    /// Search itself: proposing and observing.
    pub search: f64,
    /// Building, summed over all workers.
    pub build: f64,
    /// Timed runs.
    pub run: f64,
    /// Verification: runs, and comparison with the reference.
    pub verify: f64,
}

/// Final race of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Race {
    /// Relative error of the winner's result, ‖out − reference‖ / ‖reference‖, if known.
    pub relative_error: Option<f64>,
    /// Whether winner and runner-up are statistically indistinguishable.
    #[serde(rename = "tie")]
    pub is_tie: bool,
    /// Throughput of the first guess in GFLOP/s, which runs if nothing is recorded.
    pub untuned_gflops: Option<f64>,
    /// Result of the first guess.
    #[serde(skip)]
    pub untuned: Untuned,
    /// Number of finalists at the end of the race.
    #[serde(skip)]
    pub n_leaders: usize,
}

/// Wall-clock seconds of a run by phase; they add up to the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct WallSeconds {
    /// Start-up, until the search begins.
    pub start: f64,
    /// The search.
    pub search: f64,
    /// The race.
    pub race: f64,
    /// Untuned kernel.
    pub untuned: f64,
    /// Shutdown: writing the last records, and ending workers.
    pub end: f64,
    /// Total of all phases.
    pub total: f64,
}

/// Stopwatch of a run's phases.
pub(crate) struct Wall {
    last: Instant,
    pub seconds: WallSeconds,
}

impl Wall {
    /// Starts the clock.
    pub fn new() -> Wall {
        Wall { last: Instant::now(), seconds: WallSeconds::default() }
    }

    /// Seconds since the last lap.
    pub fn lap(&mut self) -> f64 {
        let last = std::mem::replace(&mut self.last, Instant::now());
        let lap = (self.last - last).as_secs_f64();
        self.seconds.total += lap;
        lap
    }

    /// Discards the time since the last lap.
    pub fn skip(&mut self) {
        self.last = Instant::now();
    }

    /// Splits the time since the last lap between the race and the untuned kernel.
    pub fn end_race(&mut self, end: Option<&RunEnd>) {
        let both = self.lap();
        self.seconds.untuned = match end {
            Some(RunEnd::Raced(finals)) => finals.untuned_time.as_secs_f64().min(both),
            _ => 0.0,
        };
        self.seconds.race = both - self.seconds.untuned;
    }
}
