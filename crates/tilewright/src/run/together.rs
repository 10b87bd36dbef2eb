//! Tuning of several tasks that share time: each turn goes to the task from which the total is expected to
//! gain most.
//!
//! A search keeps its state from turn to turn. The workers of a task end with its turn and start anew with
//! the next one, which takes some 60 ms; the task's inputs, reference and compiled code are kept.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tilewright_device::device::WorkerCommand;
use tilewright_device::{Device, host, peak};
use tilewright_search::{Budget, Ended, Event, HeadStart, Measure, Tuning, pause};
use tilewright_tune::Winner;
use tilewright_tune::record::least_ns;
use tilewright_tune::template::least_flops;

use super::finals::EndLimits;
use super::recorder::Recording;
use super::turns::{History, TURN, TrialRate, next};
use super::{Findings, Run, open};
use crate::database::Database;
use crate::error::Error;
use crate::observer::{Note, Observer};
use crate::request::Request;
use crate::subject::workload::WorkloadRun;
use crate::subject::{HeadOfSearch, Runnable};
use crate::tuned::{Tuned, Wall};

/// Length of a task's first turn, and the minimum of all: its first guess is measured, however long that
/// takes.
const FIRST_TURN: Duration = Duration::from_millis(250);
/// Time past the limit in which tasks without a result may still begin their first turns: as much again, and
/// this at least.
const LEAST_FOR_FIRST_TURNS: Duration = Duration::from_secs(15);
/// Least number of turns for each task; where the time does not suffice for them, turns are shorter.
const LEAST_TURNS: u32 = 2;
/// Length of a turn relative to the start of the workers; some trials must fit, too ([`TrialRate`]).
const STARTS_PER_TURN: u32 = 10;
/// Share of the time kept for races. A race may start at most this late, or [`LEAST_LATE`]; tasks that miss
/// it report their fastest trial and race in the next run.
const PART_FOR_RACES: f64 = 0.15;
const LEAST_LATE: Duration = Duration::from_secs(1);
/// Time for all rounds of a race, as one part in this many of the race's share: candidates are built and
/// verified as well. A race may take [`SHORTEST_RACE`] if its share is less.
const PART_FOR_ROUNDS: u32 = 2;
const SHORTEST_RACE: Duration = Duration::from_secs(1);
/// Maximum share of the memory, as one part in this many, that waiting tasks may hold; data beyond it are
/// recreated.
const PART_OF_MEMORY: u64 = 4;

/// End of a turn, when several tasks are tuned together.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnEnd {
    /// Index of the task.
    pub at: usize,
    /// Median of the task's best so far, in nanoseconds.
    pub best_ns: Option<f64>,
    /// Weighted total of all tasks' bests so far, in nanoseconds; `None` until every task has one.
    pub whole_ns: Option<f64>,
    /// Number of tasks with a correct candidate.
    pub n_known: usize,
    /// Number of trials of all tasks in this run so far.
    pub n_trials: u64,
    /// Seconds since the run began.
    pub seconds: f64,
    /// Time left for searching.
    pub left: Duration,
}

/// Result of tuning several tasks together.
#[derive(Debug, Serialize)]
pub struct TunedMany {
    /// Result of each task, in the order given.
    pub workloads: Vec<TunedTask>,
    /// Weighted total of all tasks before the run, in milliseconds; `None` if one had no record.
    pub whole_ms_before: Option<f64>,
    /// Weighted total of all tasks after the run, in milliseconds; `None` if one has no result.
    pub whole_ms: Option<f64>,
    /// Progress: seconds since the start, and the weighted total in milliseconds, at each change.
    pub curve: Vec<(f64, f64)>,
    /// Duration of the run in seconds.
    pub seconds: f64,
    /// Number of turns of all tasks.
    pub turns: u64,
    /// Whether the search ended because no further turn was expected to pay off.
    pub ended_early: bool,
    /// Whether it was interrupted.
    pub interrupted: bool,
}

/// Result of one of several tasks tuned together.
#[derive(Debug, Serialize)]
pub struct TunedTask {
    /// Result, as of a separate run.
    #[serde(flatten)]
    pub tuned: Tuned,
    /// Weight: number of its calls in the whole program.
    pub weight: f64,
    /// Share of the weighted total; `None` without a result.
    pub share: Option<f64>,
    /// Lower bound on its time in milliseconds, by the measured peak.
    pub ms_bound: f64,
    /// Number of its turns.
    pub turns: u64,
}

/// Task, with its state from turn to turn.
struct Player<'a> {
    run: &'a Run<'a>,
    workload: &'a WorkloadRun<'a>,
    weight: f64,
    tuning: Tuning<'a>,
    history: History,
    /// Device; `None` before the task's first turn, and when memory is short.
    device: Option<Device>,
    /// Time that the last start of the device or of its workers took.
    start: Duration,
    trial_rate: TrialRate,
    /// Recording; `None` before the task's first turn.
    recording: Option<Recording>,
    found: Findings,
    wall: Wall,
    ended: Option<Ended>,
    n_turns: u64,
}

/// Tunes tasks that share this time, each with the number of times that the whole program runs it.
///
/// # Errors
/// If a request does not fit, the database cannot be written, or workers do not start. A task without a
/// correct candidate is not an error: its result has no best.
pub(crate) fn run_together(
    tasks: &[(Request, f64)],
    time: Duration,
    database: &Database,
    worker: &WorkerCommand,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<TunedMany, Error> {
    let begin = pause::now();
    check(tasks)?;
    let observers: Vec<Named> = tasks.iter().map(|(request, _)| Named::new(request, observer)).collect();
    let workloads = tasks.iter().map(|(request, _)| WorkloadRun::new(request, None, worker));
    let workloads = workloads.collect::<Result<Vec<WorkloadRun>, Error>>()?;
    let each = || workloads.iter().zip(&observers);
    let mut heads = each().map(|(workload, named)| workload.search(named)).collect::<Result<Vec<_>, Error>>()?;
    let forgotten = workloads.iter().filter(|workload| workload.settings().fresh);
    let opened = open(database, forgotten.map(Runnable::key), observer)?;
    let mut runs = Vec::new();
    for ((workload, named), (_, guesses)) in each().zip(&mut heads) {
        let elsewhere = workload.best_elsewhere(&opened.store).map_err(|error| database.refuse(error))?;
        guesses.splice(0..0, elsewhere);
        runs.push(Run::new(workload, workload.settings(), database, &opened.store, stop, named)?);
    }
    drop(opened);
    let mut peaks = HashMap::new();
    for (run, workload) in runs.iter_mut().zip(&workloads).filter(|(_, workload)| workload.is_of_these_cpus()) {
        let of = (peak::PeakKind::of(workload.workload(), &host::target()), workload.settings().threads);
        run.peak_gflops = *peaks.entry(of).or_insert_with(|| workload.peak_gflops());
    }
    let players = runs.iter().zip(&workloads).zip(&mut heads).zip(tasks);
    let players = players.map(|((of, head), (_, weight))| Player::new(of, head, *weight));
    let mut game = Game { begin, time, observer, players: players.collect(), curve: Vec::new() };
    let whole_ns_before = game.whole_ns();
    game.curve.extend(whole_ns_before.map(|ns| (0.0, ns / 1e6)));
    let ended_early = game.search(stop)?;
    let interrupted = stop.load(Ordering::Relaxed);
    let turns = game.players.iter().map(|player| player.n_turns).sum();
    let workloads = game.race()?;
    Ok(TunedMany {
        whole_ms_before: whole_ns_before.map(|ns| ns / 1e6),
        whole_ms: workloads.iter().map(TunedTask::ms_of_whole).sum(),
        workloads,
        curve: game.curve,
        seconds: (pause::now() - begin).as_secs_f64(),
        turns,
        ended_early,
        interrupted,
    })
}

/// State of tasks that share time.
struct Game<'a> {
    begin: Instant,
    time: Duration,
    observer: &'a dyn Observer,
    players: Vec<Player<'a>>,
    /// Seconds, and the weighted total in milliseconds, at each change.
    curve: Vec<(f64, f64)>,
}

impl Game<'_> {
    fn histories(&self) -> Vec<&History> {
        self.players.iter().map(|player| &player.history).collect()
    }

    /// Weighted total in nanoseconds, once every task has a result.
    fn whole_ns(&self) -> Option<f64> {
        self.histories().into_iter().map(History::share_ns).sum()
    }

    /// Time since the run began.
    fn elapsed(&self) -> Duration {
        pause::now() - self.begin
    }

    /// Gives turns until the time is up, except for the time that races need; returns whether the search
    /// ended early because no turn was worth its time.
    fn search(&mut self, stop: &AtomicBool) -> Result<bool, Error> {
        let is_raced = self.players.iter().any(|player| player.run.settings.race);
        let time = if is_raced { self.time.mul_f64(1.0 - PART_FOR_RACES) } else { self.time };
        let turn = (time / (LEAST_TURNS * self.players.len() as u32)).clamp(FIRST_TURN, TURN);
        let mut awake: Option<usize> = None;
        loop {
            let left = time.saturating_sub(self.elapsed());
            // The flag is also raised when records are lost.
            let chosen = if stop.load(Ordering::Relaxed) { None } else { next(&self.histories()) };
            // A first result is worth more than the limit, within reason.
            let is_late = self.elapsed() >= time + time.max(LEAST_FOR_FIRST_TURNS);
            let chosen = chosen.filter(|at| !left.is_zero() || self.players[*at].history.is_new() && !is_late);
            if let Some(before) = awake.take_if(|before| Some(*before) != chosen) {
                self.rest(before);
            }
            let Some(at) = chosen else { return Ok(!left.is_zero() && !stop.load(Ordering::Relaxed)) };
            awake = Some(at);
            let turn = if self.players[at].history.is_new() { FIRST_TURN } else { turn };
            self.players[at].take_turn(at, turn, left, self.observer)?;
            self.tell(at, time);
        }
    }

    /// Reports the end of a turn.
    fn tell(&mut self, at: usize, time: Duration) {
        let (whole_ns, elapsed) = (self.whole_ns(), self.elapsed());
        let changed = whole_ns.map(|ns| ns / 1e6).filter(|ms| self.curve.last().is_none_or(|(_, last)| last != ms));
        self.curve.extend(changed.map(|ms| (elapsed.as_secs_f64(), ms)));
        self.observer.note(Note::TurnEnd(&TurnEnd {
            at,
            best_ns: self.players[at].history.best_ns(),
            whole_ns,
            n_known: self.histories().iter().filter(|history| history.best_ns().is_some()).count(),
            n_trials: self.players.iter().map(Player::n_trials).sum(),
            seconds: elapsed.as_secs_f64(),
            left: time.saturating_sub(elapsed),
        }));
    }

    /// Ends the workers of a task, and drops its device if memory is short.
    fn rest(&mut self, at: usize) {
        let devices = self.players.iter().filter_map(|player| player.device.as_ref());
        let n_bytes: u64 = devices.map(|device| device.data().n_bytes()).sum();
        let is_short = host::memory_bytes().is_some_and(|memory| n_bytes > memory / PART_OF_MEMORY);
        let player = &mut self.players[at];
        match &mut player.device {
            Some(device) if !is_short => device.rest(),
            device => *device = None,
        }
    }

    /// Races the best candidates of each task, those with the largest share of the total first.
    fn race(&mut self) -> Result<Vec<TunedTask>, Error> {
        let share = |player: &Player| player.history.share_ns().unwrap_or(0.0);
        let mut order: Vec<(usize, Player)> = std::mem::take(&mut self.players).into_iter().enumerate().collect();
        order.sort_by(|(_, a), (_, b)| share(b).total_cmp(&share(a)));
        let n_tasks = order.len();
        let mut tasks: Vec<(usize, TunedTask)> = Vec::new();
        let late = self.time + self.time.mul_f64(PART_FOR_RACES).max(LEAST_LATE);
        for (at, player) in order {
            let time = self.time.saturating_sub(self.elapsed()) / (n_tasks - tasks.len()) as u32;
            let time = (self.elapsed() < late).then_some(time);
            tasks.push((at, player.conclude(at, time, self.observer)?));
        }
        tasks.sort_by_key(|(at, _)| *at);
        let mut tasks: Vec<TunedTask> = tasks.into_iter().map(|(_, task)| task).collect();
        if let Some(whole_ms) = tasks.iter().map(TunedTask::ms_of_whole).sum::<Option<f64>>() {
            tasks.iter_mut().for_each(|task| task.share = task.ms_of_whole().map(|ms| ms / whole_ms));
            self.curve.push((self.elapsed().as_secs_f64(), whole_ms));
        }
        Ok(tasks)
    }
}

impl TunedMany {
    /// Number of workloads without a result whose first turn never came, as the time was up.
    pub fn n_not_begun(&self) -> usize {
        if self.interrupted { 0 } else { self.workloads.iter().filter(|task| task.is_not_begun()).count() }
    }
}

impl TunedTask {
    /// Whether it has no result, as its first turn never came.
    pub(crate) fn is_not_begun(&self) -> bool {
        self.turns == 0 && self.tuned.best.is_none()
    }

    /// Contribution to the time of the whole, in milliseconds.
    fn ms_of_whole(&self) -> Option<f64> {
        self.tuned.best.as_ref().map(|best| self.weight * best.ms_median)
    }
}

impl<'a> Player<'a> {
    fn new(
        (run, workload): (&'a Run<'a>, &'a WorkloadRun<'a>),
        (search, guesses): &'a mut HeadOfSearch,
        weight: f64,
    ) -> Player<'a> {
        let (key, earlier) = (workload.key(), &run.earlier);
        let flops_bound = run.peak_gflops.map(|peak| least_flops(workload.workload()) / peak);
        let threads = run.settings.threads as f64;
        let bound_ns = flops_bound.unwrap_or_else(|| least_ns(workload.workload(), &key.target, threads));
        let mut history = History::new(weight, bound_ns);
        earlier.history.iter().for_each(|(seconds, ns)| history.spend(*seconds, *ns));
        if run.nothing_left().is_some() {
            history.end();
        }
        let head_start = HeadStart { prior: &earlier.trials, guesses };
        let earlier_s: f64 = earlier.history.iter().map(|(seconds, _)| seconds).sum();
        Player {
            run,
            workload,
            weight,
            tuning: Tuning::new(search.as_mut(), workload.subject(), head_start),
            history,
            device: None,
            start: Duration::ZERO,
            trial_rate: TrialRate::of(earlier_s, earlier.history.len()),
            recording: None,
            found: Findings { trials: earlier.trials.clone(), lost: None },
            wall: Wall::new(),
            ended: None,
            n_turns: 0,
        }
    }

    /// Number of trials of this run.
    fn n_trials(&self) -> u64 {
        (self.found.trials.len() - self.run.earlier.trials.len()) as u64
    }

    /// Time spent on the task's search.
    fn searched(&self) -> Duration {
        Duration::from_secs_f64(self.wall.seconds.search)
    }

    /// Starts the device or its workers if needed; returns false after an interrupt.
    fn wake(&mut self) -> Result<bool, Error> {
        self.wall.skip();
        match &mut self.device {
            Some(device) => device.wake().map_err(|error| Error::failed(&error).because(error))?,
            None => self.device = self.workload.device(self.run.stop, self.run.observer)?,
        }
        let start = self.wall.lap();
        self.wall.seconds.start += start;
        self.start = Duration::from_secs_f64(start);
        Ok(self.device.is_some())
    }

    /// Recording, created by the first turn.
    fn recording(&mut self) -> Result<Recording, Error> {
        if let Some(recording) = &self.recording {
            return Ok(recording.clone());
        }
        let recording = self.run.recording(self.run.database.open_to_write()?);
        Ok(self.recording.insert(recording).clone())
    }

    /// Searches for the time of a turn, or for the time left if that is less.
    fn take_turn(&mut self, at: usize, turn: Duration, left: Duration, observer: &dyn Observer) -> Result<(), Error> {
        self.n_turns += 1;
        let recording = self.recording()?;
        observer.note(Note::Turn(at, &recording));
        if !self.wake()? {
            return Ok(());
        }
        recording.go_on();
        let run = self.run;
        let own = run.settings.time.map_or(Duration::MAX, |time| time.saturating_sub(self.searched()));
        let least = match self.history.is_new() {
            true => Duration::ZERO,
            false => (STARTS_PER_TURN * self.start).max(self.trial_rate.least_turn()),
        };
        let time = turn.max(least).min(left.saturating_sub(self.start)).min(own);
        let trials = run.left().map(|left| left - (self.found.trials.len() - run.earlier.trials.len()) as u64);
        let budget = Budget { trials, time: Some(time), ..Budget::default() };
        let budget = Budget { batch: budget.batch.min(self.trial_rate.most_at_a_time(time)), ..budget };
        let n_before = self.found.trials.len();
        let device = self.device.as_mut().expect("it is awake");
        let (found, history) = (&mut self.found, &mut self.history);
        let mut last = pause::now();
        let ended = self.tuning.go_on(device, budget, run.stop, &mut |event| {
            if let Event::Trial(report) = &event {
                let now = pause::now();
                let ns = report.trial.outcome.timing().map(|timing| timing.median_ns);
                history.spend((now - std::mem::replace(&mut last, now)).as_secs_f64(), ns);
            }
            run.take_note(&event, &recording, found)
        });
        recording.rest();
        history.spend((pause::now() - last + self.start).as_secs_f64(), None);
        let took = self.wall.lap();
        self.wall.seconds.search += took;
        self.trial_rate = TrialRate::of(took, self.found.trials.len() - n_before);
        let ended = ended.map_err(|error| Error::failed(&error).because(error))?;
        let is_over = run.settings.time.is_some_and(|time| time <= self.searched());
        if is_over || matches!(ended, Ended::Trials | Ended::Exhausted) {
            self.history.end();
        }
        self.ended = Some(ended);
        Ok(())
    }

    /// Races the best candidates in this time, if there is a race and anything is new, and makes the task's
    /// result.
    fn conclude(mut self, at: usize, time: Option<Duration>, observer: &dyn Observer) -> Result<TunedTask, Error> {
        let run = self.run;
        self.wall.skip();
        let known = if self.n_trials() == 0 { self.known_winner()? } else { None };
        let tuned = match known {
            Some(known) => run.as_before(&known, &self.wall),
            None => {
                let recording = self.recording()?;
                observer.note(Note::Turn(at, &recording));
                // A user who interrupts the search does not wait for all races.
                let is_wanted =
                    run.settings.race && !run.stop.load(Ordering::Relaxed) && self.tuning.best_ns().is_some();
                let time = time.filter(|_| is_wanted);
                if time.is_some() {
                    self.wake()?;
                }
                let device = self.device.take().filter(|_| time.is_some());
                let measure = device.map(|device| Box::new(device) as Box<dyn Measure>);
                let time = time.unwrap_or_default();
                let limits = EndLimits {
                    rounds: time / PART_FOR_ROUNDS,
                    race: time.max(SHORTEST_RACE),
                    untuned: Duration::ZERO,
                };
                let summary = self.tuning.summary(self.ended.unwrap_or(Ended::Time));
                let tuned = run.finish((measure, &recording), self.found, &summary, limits, &mut self.wall)?;
                Tuned { ended: self.ended, ..tuned }
            }
        };
        let ms_bound = self.history.bound_ns() / 1e6;
        Ok(TunedTask { tuned, weight: self.weight, share: None, ms_bound, turns: self.n_turns })
    }

    /// Winner of an earlier race, if nothing has been recorded since.
    fn known_winner(&self) -> Result<Option<Winner>, Error> {
        let Some(store) = self.run.database.open_to_read()? else { return Ok(None) };
        self.run.known_winner(&store).map_err(|error| self.run.database.refuse(error))
    }
}

/// Refuses tasks that cannot share time.
fn check(tasks: &[(Request, f64)]) -> Result<(), Error> {
    if tasks.is_empty() {
        return Err(Error::input("there is nothing to tune (give a workload at least)"));
    }
    let mut keys = HashSet::new();
    for (request, weight) in tasks {
        let (workload, settings) = (request.workload()?, request.settings());
        if !(*weight > 0.0 && weight.is_finite()) {
            return Err(Error::input(format!("{workload}: a weight is {weight} (give a number above 0)")));
        }
        if settings.runner.as_ref().is_some_and(|runner| runner.is_emulated) {
            return Err(Error::input(format!(
                "{workload}: an emulated device has no times by which tasks could share some (tune one at a time)"
            )));
        }
        if !keys.insert((workload.to_string(), settings.threads, settings.template.clone(), settings.caches)) {
            return Err(Error::input(format!("{workload} is there twice (give it once, with both weights added)")));
        }
    }
    Ok(())
}

/// Observer that forwards notes, and prefixes messages with the workload.
struct Named<'a> {
    workload: String,
    observer: &'a dyn Observer,
}

impl<'a> Named<'a> {
    fn new(request: &Request, observer: &'a dyn Observer) -> Named<'a> {
        Named { workload: request.workload().map(ToString::to_string).unwrap_or_default(), observer }
    }
}

impl Observer for Named<'_> {
    fn note(&self, note: Note) {
        self.observer.note(match note {
            Note::Message(line) => Note::Message(format!("{}: {line}", self.workload)),
            note => note,
        });
    }
}
