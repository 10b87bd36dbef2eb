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
    /// The workload.
    pub workload: String,
    /// The template.
    pub template: String,
    /// The search.
    pub search: String,
    /// The target, as records name it.
    pub target: String,
    /// Threads that the kernel may use.
    pub threads: u32,
    /// The seed.
    pub seed: u64,
    /// Number of trials recorded, including those of earlier runs.
    pub trials: u64,
    /// Trials of this run.
    pub new_trials: u64,
    /// Seconds of the search.
    pub seconds: f64,
    /// Time of the run by phase, by the wall clock.
    pub wall_seconds: WallSeconds,
    /// Trials of this run in a second.
    pub trials_per_second: f64,
    /// Time of the search by activity.
    pub seconds_in: SecondsIn,
    /// Failures by class, those of earlier runs included.
    #[serde(serialize_with = "by_name")]
    pub errors: BTreeMap<ErrorClass, u64>,
    /// Measured peak of the machine, in 10⁹ operations a second.
    pub peak_gflops: Option<f64>,
    /// The database.
    pub db: String,
    /// Whether all that was found is recorded.
    pub recorded: bool,
    /// The winner; the fastest trial without a race; none where nothing was right or measured.
    pub best: Option<Best>,
    /// The race, where there was one.
    #[serde(flatten)]
    pub race: Option<Race>,
    /// Whether the best has given the right answer; on an emulated device, whether any candidate has.
    pub verified: bool,
    /// Whether the device is emulated: there are no times then, no best, and nothing is recorded.
    pub emulated: bool,
    /// Reason why the search ended; `None` where it was not begun.
    #[serde(skip)]
    pub ended: Option<Ended>,
    /// Candidates that came to a limit, by class.
    #[serde(skip)]
    pub cut_off: BTreeMap<ErrorClass, u64>,
    /// Failure of one of the failed candidates.
    #[serde(skip)]
    pub example: Option<(ErrorClass, String)>,
    /// Whether any candidate was right.
    #[serde(skip)]
    pub any_right: bool,
    /// Error that lost records of it, if so; the run ended with that.
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

/// Time of a search by activity, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct SecondsIn {
    /// Proposing and observing.
    pub search: f64,
    /// Building, on all workers.
    pub build: f64,
    /// Running for the timing.
    pub run: f64,
    /// Running and comparing for the verification.
    pub verify: f64,
}

/// The race at the end of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Race {
    /// ‖out − reference‖ / ‖reference‖ of the winner's answer.
    pub relative_error: Option<f64>,
    /// Whether winner and runner-up cannot be told apart.
    #[serde(rename = "tie")]
    pub is_tie: bool,
    /// Throughput of the first guess, which runs where nothing is recorded.
    pub untuned_gflops: Option<f64>,
    /// Time of the first guess.
    #[serde(skip)]
    pub untuned: Untuned,
    /// Number of leaders that finished the race.
    #[serde(skip)]
    pub n_leaders: usize,
}

/// Time of a run by phase, in seconds by the wall clock, which add up to the whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct WallSeconds {
    /// Start, until the search begins.
    pub start: f64,
    /// The search.
    pub search: f64,
    /// The race.
    pub race: f64,
    /// The untuned kernel.
    pub untuned: f64,
    /// Seconds to write the last records and to end workers.
    pub end: f64,
    /// All of them.
    pub total: f64,
}

/// Laps of a run.
pub(crate) struct Wall {
    last: Instant,
    pub seconds: WallSeconds,
}

impl Wall {
    /// Starts the clock.
    pub fn new() -> Wall {
        Wall { last: Instant::now(), seconds: WallSeconds::default() }
    }

    /// Seconds since the last part ended.
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

    /// The race has ended, with the untuned kernel behind it.
    pub fn end_race(&mut self, end: Option<&RunEnd>) {
        let both = self.lap();
        self.seconds.untuned = match end {
            Some(RunEnd::Raced(finals)) => finals.untuned_time.as_secs_f64().min(both),
            _ => 0.0,
        };
        self.seconds.race = both - self.seconds.untuned;
    }
}
