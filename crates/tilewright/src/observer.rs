//! Observers of runs, and the notes that they receive.

use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use tilewright_search::{ErrorClass, Report};
use tilewright_tune::TaskKey;

use crate::format::count;
use crate::run::finals::EndLimits;
use crate::run::recorder::Recording;
use crate::run::together::TurnEnd;

/// Observer of a run's progress, called from any of its threads. All methods do nothing by default; an
/// observer that forwards notes implements only [`Observer::note`].
///
/// `()` observes nothing, and functions that take a [`Note`] are observers.
pub trait Observer: Sync {
    /// Receives a note; by default calls the method for its kind.
    fn note(&self, note: Note) {
        match note {
            Note::Message(text) | Note::MayBeStale(text) => self.message(&text),
            Note::Begin(begin) => self.begin(begin),
            Note::Plan(plan) => self.plan(plan),
            Note::Trial(report) => self.trial(report),
            Note::Race(n_leaders) => self.race(n_leaders),
            Note::TurnEnd(turned) => self.turned(turned),
            _ => {}
        }
    }

    /// Receives a message for the user, in one line.
    fn message(&self, _text: &str) {}

    /// Receives the beginning of a run.
    fn begin(&self, _begin: &Begin) {}

    /// Receives the plan of a run.
    fn plan(&self, _plan: &Plan) {}

    /// Receives a finished trial.
    fn trial(&self, _report: &Report) {}

    /// Receives the beginning of a race of this many finalists.
    fn race(&self, _n_leaders: usize) {}

    /// Receives the end of a turn of one of several tasks.
    fn turned(&self, _turned: &TurnEnd) {}
}

impl Observer for () {
    fn note(&self, _note: Note) {}
}

impl<F: Fn(Note) + Sync + ?Sized> Observer for F {
    fn note(&self, note: Note) {
        self(note);
    }
}

/// Event of a run, sent from any of its threads.
#[derive(Debug)]
#[non_exhaustive]
pub enum Note<'a> {
    /// Message for the user.
    Message(String),
    /// Message about records that are trusted although a program may have changed since.
    MayBeStale(String),
    /// Start of a device.
    Start,
    /// Beginning of the run.
    Begin(&'a Begin),
    /// Plan of the run.
    Plan(&'a Plan),
    /// Progress of computing the reference result, from 0 to 1.
    Reference(f64),
    /// Start of the search. The recording can commit trials at any time, as in a signal handler.
    Search(&'a Recording, &'a Plan),
    /// End of a trial.
    Trial(&'a Report),
    /// Start of a race of this many finalists.
    Race(usize),
    /// Failure of a finalist when it was measured again.
    LeaderFailed(ErrorClass, String),
    /// Peer that cannot be measured, with the reason.
    LeftOut(String),
    /// Start of this many benchmark rounds, during which nothing else should run.
    Rounds(u32),
    /// Start of a turn of one of several tasks, by its index. Later notes are about it, and the recording can
    /// commit its trials.
    Turn(usize, &'a Recording),
    /// End of a turn.
    TurnEnd(&'a TurnEnd),
}

/// Subject of a run, as its observer learns it.
#[derive(Debug, Clone)]
pub struct Begin {
    /// Key of its trials in the database.
    pub key: TaskKey,
    /// Number of configurations in the space.
    pub space_size: u128,
    /// Name of the database.
    pub database: String,
    /// Number of trials of earlier runs.
    pub n_earlier: u64,
    /// Search time, if the request leaves it at the default.
    pub default_time: Option<Duration>,
    /// Whether the device is emulated, so that nothing is recorded.
    pub is_emulated: bool,
}

/// Plan of a run.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Time limit of the search.
    pub time: Option<Duration>,
    /// Number of trials at which the search ends, earlier runs included.
    pub most_trials: Option<u64>,
    /// Number of trials of earlier runs.
    pub n_earlier: u64,
    /// Throughput of the best of them, in GFLOP/s.
    pub best_gflops: Option<f64>,
    /// Measured peak of the machine, in GFLOP/s.
    pub peak_gflops: Option<f64>,
    /// Estimated seconds of the start-up, and of a kernel run at peak throughput.
    pub start_and_run_s: Option<(f64, f64)>,
    /// Time limits of the race and the untuned kernel; `None` without a race.
    pub limits: Option<EndLimits>,
}

/// Time after which [`while_telling`] tells.
const SILENCE: Duration = Duration::from_secs(2);

/// Counts the configurations that constraints allow, by `work`; calls `tell` with a message if that takes
/// long.
pub fn while_telling<T>(tell: impl FnOnce(&str) + Send, work: impl FnOnce() -> T) -> T {
    while_telling_after(SILENCE, tell, work)
}

fn while_telling_after<T>(silence: Duration, tell: impl FnOnce(&str) + Send, work: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (is_done, waiting) = mpsc::channel::<()>();
        scope.spawn(move || {
            if waiting.recv_timeout(silence) == Err(RecvTimeoutError::Timeout) {
                let less = "fewer values, or constraints of fewer parameters, take less";
                tell(&format!("counting the configurations that the constraints allow, which takes long ({less})"));
            }
        });
        let result = work();
        drop(is_done);
        result
    })
}

/// Time of a run in seconds above which it is announced as slow.
const SLOW_RUN_S: f64 = 0.1;

impl fmt::Display for Plan {
    /// Writes the times that the parts of the run may take.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
        let mut parts = Vec::new();
        if let Some((start_s, run_s)) = self.start_and_run_s {
            parts.push(format!("start: about {start_s:.1} s"));
            if run_s >= SLOW_RUN_S {
                parts.push(format!("first kernel: some {run_s:.1} s a run"));
            }
        }
        parts.push(match (self.time, self.most_trials) {
            (Some(time), _) => format!("search: {}", seconds(time)),
            (None, Some(trials)) => format!("search: until there are {}", count(trials, "trial")),
            (None, None) => "search: until little more is expected".to_owned(),
        });
        if let Some(limits) = self.limits {
            parts.push(format!("race: at most {}", seconds(limits.race)));
            parts.push(format!("untuned kernel: at most {}", seconds(limits.untuned)));
        }
        f.write_str(&parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn only_work_that_takes_long_is_told_of() {
        let n_told = AtomicUsize::new(0);
        let tell = |text: &str| {
            assert!(text.starts_with("counting the configurations"), "{text}");
            n_told.fetch_add(1, Ordering::Relaxed);
        };
        let is_told = || while n_told.load(Ordering::Relaxed) == 0 {};
        while_telling_after(Duration::ZERO, tell, is_told);
        assert_eq!(while_telling_after(Duration::from_secs(3600), tell, || 7), 7);
        assert_eq!(n_told.into_inner(), 1);
    }
}
