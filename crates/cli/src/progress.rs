//! Live progress on standard error: one line redrawn on a terminal, occasional lines elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tilewright::{Note, Observer, Recording, Setting, Workload, gflops};

use crate::error::option;
use crate::status::RunStatus;
use crate::summary::{beginning, turn};

/// Interval at which the line is redrawn on a terminal.
const REDRAW: Duration = Duration::from_millis(200);
/// Interval between lines elsewhere.
const LINE_EVERY: Duration = Duration::from_secs(2);
/// Time at the start before anything is shown.
const QUIET: Duration = Duration::from_millis(500);

/// Shows a status until it is finished. Clones show the same one.
#[derive(Debug, Clone)]
pub struct Progress {
    shared: Arc<Mutex<ProgressState>>,
    is_terminal: bool,
}

#[derive(Debug)]
struct ProgressState {
    status: RunStatus,
    /// Whether the status line is currently drawn on the terminal.
    is_drawn: bool,
    last_line: Option<Instant>,
    ticker: Option<JoinHandle<()>>,
    is_finished: bool,
}

impl Progress {
    /// Begins to show a status.
    pub fn start(status: RunStatus) -> Progress {
        let is_terminal = std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
        let shared = ProgressState { status, is_drawn: false, last_line: None, ticker: None, is_finished: false };
        let progress = Progress { shared: Arc::new(Mutex::new(shared)), is_terminal };
        let ticking = progress.clone();
        let tick = move || {
            loop {
                std::thread::park_timeout(if ticking.is_terminal { REDRAW } else { LINE_EVERY });
                let mut shared = ticking.lock();
                if shared.is_finished {
                    return;
                }
                shared.draw(ticking.is_terminal, false);
            }
        };
        // If the system refuses a thread, lines are printed only on changes.
        progress.lock().ticker = std::thread::Builder::new().spawn(tick).ok();
        progress
    }

    /// Changes the status. A new best and a new phase are shown immediately, and so is the first change.
    pub fn update(&self, change: impl FnOnce(&mut RunStatus)) {
        let mut shared = self.lock();
        let shown = |status: &RunStatus| (status.best_gflops, status.best.clone(), status.phase.is_some());
        let before = shown(&shared.status);
        change(&mut shared.status);
        if shown(&shared.status) != before || shared.last_line.is_none() {
            shared.draw(self.is_terminal, true);
        }
    }

    /// Shows a message above the status.
    pub fn message(&self, line: &str) {
        let mut shared = self.lock();
        shared.clear();
        message(line);
        if !shared.is_finished {
            shared.draw(self.is_terminal, false);
        }
    }

    /// Erases the status line.
    pub fn finish(&self) {
        let ticker = {
            let mut shared = self.lock();
            shared.is_finished = true;
            shared.clear();
            shared.ticker.take()
        };
        if let Some(ticker) = ticker {
            ticker.thread().unpark();
            let _ = ticker.join();
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProgressState {
    fn clear(&mut self) {
        if std::mem::take(&mut self.is_drawn) {
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
        }
    }

    fn draw(&mut self, is_terminal: bool, is_news: bool) {
        let line = self.status.line();
        if is_terminal {
            let columns = terminal_size::terminal_size_of(std::io::stderr()).map_or(80, |(width, _)| width.0);
            let shown: String = line.chars().take(usize::from(columns).saturating_sub(1)).collect();
            let mut out = std::io::stderr().lock();
            let _ = write!(out, "\r\x1b[K{shown}").and_then(|()| out.flush());
            self.is_drawn = true;
        } else if is_news || self.last_line.is_none_or(|at| at.elapsed() + REDRAW >= LINE_EVERY) {
            message(&line);
        } else {
            return;
        }
        self.last_line = Some(Instant::now());
    }
}

/// Writes a line to standard error; errors are ignored.
pub fn message(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

type ShowBest = dyn Fn(&mut RunStatus, Option<f64>) + Send + Sync;

/// Callback that receives the recorder of a run, once it has begun, and its display.
pub type Concern<'a> = Box<dyn Fn(Option<&Recording>, &Progress) + Send + Sync + 'a>;

/// Display of a run's progress, on standard error.
pub struct Shown<'a> {
    /// Function that sets the best so far, in nanoseconds, in a status.
    show_best: Box<ShowBest>,
    /// Names of the tasks that share the time of the run; empty for a single task.
    together: Vec<String>,
    /// Index of the workload whose turn it is.
    at: AtomicUsize,
    search: String,
    seed: u64,
    /// Callback that receives the recorder and the display of the run, whenever they change.
    concern: Concern<'a>,
    start: Instant,
    /// Progress of the reference, in per cent, that was last shown.
    told: AtomicU64,
    progress: Mutex<Option<Progress>>,
}

impl<'a> Shown<'a> {
    /// Makes the display of a run without results yet.
    pub fn new(workload: &Workload, search: Option<&str>, seed: u64, concern: Concern<'a>) -> Shown<'a> {
        let workload = workload.clone();
        let show_best = move |status: &mut RunStatus, best_ns: Option<f64>| {
            status.best_gflops = best_ns.map(|ns| gflops(&workload, ns));
        };
        Shown::by(Box::new(show_best), search.unwrap_or_default(), seed, concern)
    }

    /// Makes the display of a user's command or kernel, whose best `show` formats.
    pub fn of_own(
        show: impl Fn(f64) -> String + Send + Sync + 'static,
        search: &str,
        seed: u64,
        concern: Concern<'a>,
    ) -> Shown<'a> {
        let show_best = move |status: &mut RunStatus, best_ns: Option<f64>| status.best = best_ns.map(&show);
        Shown::by(Box::new(show_best), search, seed, concern)
    }

    /// Makes the display of workloads with these names that share the time.
    pub fn together(names: Vec<String>, concern: Concern<'a>) -> Shown<'a> {
        let shown = Shown::by(Box::new(|_, _| ()), "", 0, concern);
        shown.start(None, RunStatus::default());
        Shown { together: names, ..shown }
    }

    fn by(show_best: Box<ShowBest>, search: &str, seed: u64, concern: Concern<'a>) -> Shown<'a> {
        let (start, told, progress) = (Instant::now(), AtomicU64::new(0), Mutex::new(None));
        let (together, at) = (Vec::new(), AtomicUsize::new(0));
        Shown { show_best, together, at, search: search.to_owned(), seed, concern, start, told, progress }
    }

    /// Shows a note.
    fn show(&self, note: Note) {
        let phase = |text: String| self.update(|status| status.phase = Some(text));
        match note {
            Note::Message(line) => self.message(&line),
            Note::MayBeStale(line) => {
                self.message(&format!("{line}: where a program has changed, begin anew with --fresh"));
            }
            Note::Turn(whose, recording) => {
                self.at.store(whose, Ordering::Relaxed);
                if let Some(progress) = &*self.lock() {
                    (self.concern)(Some(recording), progress);
                }
            }
            Note::TurnEnd(turned) => phase(turn(turned, &self.together)),
            Note::Race(_) if !self.together.is_empty() => {
                let label = &self.together[self.at.load(Ordering::Relaxed)];
                phase(format!("measuring the best of {label} against each other"));
            }
            _ if !self.together.is_empty() => {}
            Note::LeftOut(line) => self.message(&line),
            Note::Begin(begin) => {
                beginning(begin, &self.search, self.seed).iter().for_each(|line| message(line));
            }
            Note::Plan(plan) => self.message(&plan.to_string()),
            Note::Start => self.start(None, RunStatus::of_phase("start: random inputs")),
            Note::Rounds(_) => self.finish(),
            Note::Reference(part) => {
                let percent = (100.0 * part) as u64;
                if self.start.elapsed() > QUIET && self.told.fetch_max(percent, Ordering::Relaxed) < percent {
                    phase(format!("start: {percent} % of the reference answer"));
                }
            }
            Note::Search(recording, plan) => self.start(Some(recording), RunStatus::of_plan(plan)),
            Note::Trial(report) => self.update(|status| {
                status.count(&report.trial);
                (self.show_best)(status, report.best_ns);
            }),
            Note::Race(n) => self.update(|status| status.race(n)),
            Note::LeaderFailed(class, why) => {
                let limit = Setting::limit_of(class).map(option);
                let raise = limit.map_or(String::new(), |option| format!(" (raise {option})"));
                self.message(&format!("a leader failed when it was measured again: {class}: {why}{raise}"));
            }
            _ => {}
        }
    }

    /// Erases the status line, which is temporary.
    pub fn finish(&self) {
        if let Some(progress) = self.lock().take() {
            progress.finish();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Progress>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows a status from now on.
    fn start(&self, recording: Option<&Recording>, status: RunStatus) {
        self.finish();
        let progress = Progress::start(status);
        (self.concern)(recording, &progress);
        *self.lock() = Some(progress);
    }

    fn update(&self, change: impl FnOnce(&mut RunStatus)) {
        if let Some(progress) = &*self.lock() {
            progress.update(change);
        }
    }

    /// Shows a message above the status.
    pub fn message(&self, line: &str) {
        match &*self.lock() {
            Some(progress) => progress.message(line),
            None => message(line),
        }
    }
}

impl Observer for Shown<'_> {
    fn note(&self, note: Note) {
        self.show(note);
    }
}
