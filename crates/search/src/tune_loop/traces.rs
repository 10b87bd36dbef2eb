//! Traces: calls of the loop to a search and a measuring side, in order, by a simulated clock.

use std::fmt::Write;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

use super::*;
use crate::measure::{Candidate, Measured, MeasuringTraits, Next, Queue};
use crate::space::{Parameter, Space};
use crate::trial::{Outcome, Timing};

/// Script of a run, by the clock's seconds and the measuring side's turns.
#[derive(Clone, Copy, Default)]
struct Script {
    works_ahead: bool,
    proposal_s: u64,
    trial_s: u64,
    /// Values that fail; any other value takes that many nanoseconds.
    failing: &'static [i64],
    /// Turns at which there is no result yet, for a second; at which nothing is left; and at which measuring
    /// fails.
    pending: &'static [usize],
    idle: &'static [usize],
    broken: &'static [usize],
    /// Whether the last candidate comes first.
    is_backwards: bool,
    /// Second from which the stop flag is raised.
    stop_s: Option<u64>,
}

/// Clock and log that both sides of the loop share.
#[derive(Default)]
struct Stage {
    script: Script,
    now_s: u64,
    n_turns: usize,
    log: String,
    stop: Arc<AtomicBool>,
}

impl Stage {
    fn log(&mut self, what: std::fmt::Arguments) {
        writeln!(self.log, "{:>4} {what}", self.now_s).unwrap();
    }

    fn spend(&mut self, seconds: u64) {
        self.now_s += seconds;
        let is_stopped = self.script.stop_s.is_some_and(|stop| self.now_s >= stop);
        self.stop.fetch_or(is_stopped, Ordering::Relaxed);
    }
}

/// Search that counts up, and measuring side that measures in order; a value of `x` is a configuration.
struct Side<'a> {
    stage: &'a Mutex<Stage>,
    space: &'a Space,
    queue: Queue,
    waiting: Vec<(u64, Candidate)>,
    next: u64,
}

impl<'a> Side<'a> {
    fn new(stage: &'a Mutex<Stage>, space: &'a Space) -> Side<'a> {
        Side { stage, space, queue: Queue::default(), waiting: Vec::new(), next: 0 }
    }

    fn stage(&self) -> MutexGuard<'a, Stage> {
        self.stage.lock().unwrap()
    }

    fn values<'b>(&self, configs: impl IntoIterator<Item = &'b Config>) -> Vec<i64> {
        configs.into_iter().map(|config| self.space.int(config, "x")).collect()
    }
}

impl Search for Side<'_> {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let ranks = self.next..(self.next + n as u64).min(self.space.n_values(0));
        self.next = ranks.end;
        let configs: Vec<Config> = ranks.map(|rank| Config::new([rank])).collect();
        let values = self.values(&configs);
        let mut stage = self.stage();
        stage.log(format_args!("propose {n}: {values:?}"));
        let seconds = stage.script.proposal_s;
        stage.spend(seconds);
        configs
    }

    fn looks_ahead(&self) -> bool {
        true
    }

    fn observe(&mut self, trials: &[Trial]) {
        let values = self.values(trials.iter().map(|trial| &trial.config));
        self.stage().log(format_args!("observe {values:?}"));
    }
}

impl Measure for Side<'_> {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        let numbers = self.queue.submit(candidates);
        self.waiting.extend(std::iter::from_fn(|| self.queue.pop()));
        let values = self.values(candidates.iter().map(|candidate| &candidate.config));
        self.stage().log(format_args!("submit {numbers:?}: {values:?}"));
        numbers
    }

    fn next(&mut self, leading_ns: Option<f64>, at_most: Duration) -> Result<Next, BoxError> {
        let mut stage = self.stage();
        stage.n_turns += 1;
        let (turn, script) = (stage.n_turns, stage.script);
        let wait = format!("next within {} ms, {leading_ns:?} leads", at_most.as_millis());
        if script.broken.contains(&turn) {
            stage.log(format_args!("{wait}: broken"));
            return Err("no worker".into());
        }
        if script.pending.contains(&turn) {
            stage.log(format_args!("{wait}: pending"));
            stage.spend(1);
            return Ok(Next::Pending);
        }
        if script.idle.contains(&turn) || self.waiting.is_empty() {
            stage.log(format_args!("{wait}: idle"));
            return Ok(Next::Idle);
        }
        let (number, candidate) = self.waiting.remove(if script.is_backwards { self.waiting.len() - 1 } else { 0 });
        let value = self.space.int(&candidate.config, "x");
        stage.log(format_args!("{wait}: {number}"));
        stage.spend(script.trial_s);
        let outcome = match script.failing.contains(&value) {
            true => Outcome::Failed { class: ErrorClass::RunTimeout, message: String::new() },
            false => Outcome::Measured(Timing::of_samples(&[value as f64], false)),
        };
        Ok(Next::Done(number, Measured::of(outcome)))
    }

    fn wind_down(&mut self) {
        self.waiting.clear();
        self.stage().log(format_args!("wind down"));
    }

    fn recorded(&mut self, before: u64) {
        self.stage().log(format_args!("recorded below {before}"));
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        self.waiting.retain(|(number, _)| *number < from);
        self.stage().log(format_args!("cancel from {from}"));
        Ok(())
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits { works_ahead: self.stage().script.works_ahead }
    }
}

/// Trace of a run over the values 1 to 40, which continues once for each budget.
fn trace(name: &str, script: Script, guesses: &[u64], budgets: &[Budget]) -> String {
    let stop = Arc::new(AtomicBool::new(false));
    let stage = Mutex::new(Stage { script, log: format!("{name}\n"), stop: stop.clone(), ..Stage::default() });
    let space = Space::new("test", vec![Parameter::ordinal("x", 1..=40)], vec![]).unwrap();
    let (mut search, mut measure) = (Side::new(&stage, &space), Side::new(&stage, &space));
    search.next = 20;
    let guesses: Vec<Config> = guesses.iter().map(|rank| Config::new([*rank])).collect();
    let clock = Rc::new(|| Duration::from_secs(stage.lock().unwrap().now_s));
    let head_start = HeadStart { prior: &[], guesses: &guesses };
    let mut tuning = Tuning::by_clock(&mut search, Subject::from(&space), head_start, clock);
    for budget in budgets {
        let mut observer = |event: Event| {
            let mut stage = stage.lock().unwrap();
            match event {
                Event::Trial(report) => stage.log(format_args!("trial {}: {:?}", report.number, report.best_ns)),
                Event::Batch(reports) => stage.log(format_args!("batch of {}", reports.len())),
            }
            Ok(())
        };
        let ended = tuning.go_on(&mut measure, *budget, &stop, &mut observer);
        let ended = ended.map_or_else(|error| error.to_string(), |ended| format!("{ended:?}"));
        stage.lock().unwrap().log(format_args!("ended: {ended}"));
    }
    std::mem::take(&mut stage.lock().unwrap().log)
}

#[test]
fn the_loop_asks_in_this_order() {
    let plain = Script { trial_s: 1, ..Script::default() };
    let ahead = Script { works_ahead: true, ..plain };
    let budget = |trials: u64| Budget { trials: Some(trials), batch: 3, ..Budget::default() };
    let time = |seconds: u64| Budget { time: Some(Duration::from_secs(seconds)), batch: 3, ..Budget::default() };
    let found = [
        trace("one batch after the other", plain, &[7, 5, 7, 9, 11], &[budget(9)]),
        trace("a batch ahead", ahead, &[7, 5, 9], &[budget(9)]),
        trace("results of the next batch come first", Script { is_backwards: true, ..ahead }, &[], &[budget(5)]),
        trace("the time is up within a batch", ahead, &[], &[time(2), time(2), budget(2)]),
        trace("a first guess that takes longer than there is time", plain, &[7, 5], &[time(0), time(3)]),
        trace("guesses until one is valid", Script { failing: &[8, 6], ..ahead }, &[7, 5, 9, 1], &[time(1), time(1)]),
        trace("no valid guess for a while", Script { failing: &[8, 6], trial_s: 3, ..plain }, &[7, 5, 9], &[time(1)]),
        trace("a result that does not come", Script { pending: &[3, 4, 5], ..ahead }, &[7], &[time(3), budget(1)]),
        trace("stopped", Script { stop_s: Some(3), ..ahead }, &[7], &[budget(30), budget(30)]),
        trace("idle", Script { idle: &[1], ..ahead }, &[], &[budget(6), budget(2)]),
        trace("idle within a batch", Script { idle: &[3], ..ahead }, &[], &[budget(6)]),
        trace("broken", Script { broken: &[3], ..ahead }, &[], &[budget(6), budget(3)]),
        trace("slow thought", Script { proposal_s: 4, ..ahead }, &[7], &[time(9), time(20)]),
        trace("smaller batches the next time", ahead, &[], &[time(1), Budget { batch: 1, ..budget(4) }]),
        trace("exhausted", ahead, &[7], &[Budget { least: 12, ..budget(30) }]),
    ];
    let (found, expected) = (found.join("\n"), include_str!("traces.txt"));
    assert_eq!(found, expected, "the whole of it:\n{found}");
}
