//! Observers of runs, and the notes that they are told.

use std::fmt;
use std::time::Duration;

use tilewright_search::{ErrorClass, Report};
use tilewright_tune::TaskKey;

use crate::format::count;
use crate::run::finals::EndLimits;
use crate::run::recorder::Recording;
use crate::run::together::TurnEnd;

/// Observer of a run, told of its progress by any of its threads. Each method does nothing unless it is
/// written; whoever passes notes on writes [`Observer::note`] alone.
///
/// `()` observes nothing, and functions of a [`Note`] are observers.
pub trait Observer: Sync {
    /// Takes a note, and has the method of its kind take what it holds.
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

    /// Message for the user, in a line.
    fn message(&self, _text: &str) {}

    /// The run has begun.
    fn begin(&self, _begin: &Begin) {}

    /// The run has a plan.
    fn plan(&self, _plan: &Plan) {}

    /// A trial has come to its end.
    fn trial(&self, _report: &Report) {}

    /// The race of this many leaders begins.
    fn race(&self, _n_leaders: usize) {}

    /// The turn of one of several tasks has ended.
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

/// Note on the progress of a run, sent by any of its threads.
#[derive(Debug)]
#[non_exhaustive]
pub enum Note<'a> {
    /// Message for the user.
    Message(String),
    /// Message about records that are believed although a program may have changed since.
    MayBeStale(String),
    /// A device starts.
    Start,
    /// Beginning of the run.
    Begin(&'a Begin),
    /// Plan of the run.
    Plan(&'a Plan),
    /// Finished share of the reference answer, from 0 to 1.
    Reference(f64),
    /// The search begins; whatever it has measured can be committed by this.
    Search(&'a Recording, &'a Plan),
    /// A trial has come to its end.
    Trial(&'a Report),
    /// Start of the race of this many leaders.
    Race(usize),
    /// A leader failed when it was measured again.
    LeaderFailed(ErrorClass, String),
    /// A peer cannot be measured, and why.
    LeftOut(String),
    /// Start of this many rounds, during which nothing else should run.
    Rounds(u32),
    /// Turn of one of several tasks: later notes are of it, and its trials so far can be committed by the
    /// recording.
    Turn(usize, &'a Recording),
    /// A turn has ended.
    TurnEnd(&'a TurnEnd),
}

/// Subject of a run.
#[derive(Debug, Clone)]
pub struct Begin {
    /// Key of its trials.
    pub key: TaskKey,
    /// Configurations of the space.
    pub space_size: u128,
    /// The name of the database.
    pub database: String,
    /// Trials of earlier runs.
    pub n_earlier: u64,
    /// Time that it will search, where the request left that open.
    pub default_time: Option<Duration>,
    /// Whether the device is emulated: nothing is recorded.
    pub is_emulated: bool,
}

/// Plan of a run.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Time that it searches.
    pub time: Option<Duration>,
    /// Trials to come to.
    pub most_trials: Option<u64>,
    /// Trials of earlier runs, and the fastest of them.
    pub n_earlier: u64,
    /// The throughput of the fastest of them.
    pub best_gflops: Option<f64>,
    /// Measured peak of the machine.
    pub peak_gflops: Option<f64>,
    /// About how long the start takes, and a run of a kernel at peak, in seconds.
    pub start_and_run_s: Option<(f64, f64)>,
    /// Time limits of the end; `None` without a race.
    pub limits: Option<EndLimits>,
}

/// Seconds of a run that is announced as slow.
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
