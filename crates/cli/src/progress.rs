//! Live progress on standard error: one line redrawn on a terminal, lines now and then elsewhere.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tilewright::words::errors_text;
use tilewright_tune::{ErrorClass, pause};

use crate::output::{digits, grouped};

/// How often the line is redrawn on a terminal.
const REDRAW: Duration = Duration::from_millis(200);
/// How often there is a line elsewhere.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// What a run has come to so far.
#[derive(Debug, Clone)]
pub struct Status {
    /// When it began, by [`pause::now`].
    pub start: Instant,
    /// How long it may take.
    pub time: Option<Duration>,
    /// Trials recorded, those of earlier runs included.
    pub n_trials: u64,
    /// Trials of this run.
    pub n_new: u64,
    /// Trials to come to, those of earlier runs included.
    pub most_trials: Option<u64>,
    /// Throughput of the best so far.
    pub best_gflops: Option<f64>,
    /// The best so far in words, where nobody counts operations.
    pub best: Option<String>,
    /// What the machine can do at best.
    pub peak_gflops: Option<f64>,
    /// Failures of this run by class.
    pub errors: BTreeMap<ErrorClass, u64>,
    /// What is done once the search is over.
    pub phase: Option<String>,
}

impl Default for Status {
    /// Nothing yet, from now on.
    fn default() -> Status {
        Status {
            start: pause::now(),
            time: None,
            n_trials: 0,
            n_new: 0,
            most_trials: None,
            best_gflops: None,
            best: None,
            peak_gflops: None,
            errors: BTreeMap::new(),
            phase: None,
        }
    }
}

impl Status {
    fn line(&self) -> String {
        let seconds = (pause::now() - self.start).as_secs_f64();
        if let Some(phase) = &self.phase {
            return format!("{seconds:.0} s · {phase}");
        }
        let is_late = self.time.is_some_and(|time| seconds > time.as_secs_f64());
        let mut parts = vec![match self.time {
            // Nothing else goes on for long past the limit.
            Some(_) if is_late && self.n_new == 0 => format!("{seconds:.0} s, finishing the first kernel"),
            Some(time) => format!("{seconds:.0} s, {:.0} s left", (time.as_secs_f64() - seconds).max(0.0)),
            None => format!("{seconds:.0} s"),
        }];
        let rate = if seconds > 0.0 { self.n_new as f64 / seconds } else { 0.0 };
        let of = self.most_trials.map_or(String::new(), |most| format!(" of {}", grouped(most)));
        let trials = if self.most_trials.unwrap_or(self.n_trials) == 1 { "trial" } else { "trials" };
        parts.push(format!("{}{of} {trials} ({rate:.1}/s)", grouped(self.n_trials)));
        parts.push(match (self.best_gflops, self.peak_gflops) {
            (None, _) if self.best.is_some() => format!("best {}", self.best.as_deref().unwrap_or_default()),
            (None, _) => "nothing valid yet".to_owned(),
            (Some(best), None) => format!("best {} GFLOP/s", digits(best)),
            (Some(best), Some(peak)) => {
                format!("best {} GFLOP/s, {:.1} % of peak", digits(best), 100.0 * best / peak)
            }
        });
        if !self.errors.is_empty() {
            parts.push(errors_text(&self.errors));
        }
        parts.join(" · ")
    }
}

/// Shows a status until it is finished. Clones show the same one.
#[derive(Debug, Clone)]
pub struct Progress {
    shared: Arc<Mutex<Shared>>,
    is_terminal: bool,
}

#[derive(Debug)]
struct Shared {
    status: Status,
    /// Whether the status line stands on the terminal.
    is_drawn: bool,
    last_line: Option<Instant>,
    ticker: Option<JoinHandle<()>>,
    is_finished: bool,
}

impl Progress {
    /// Begins to show a status.
    pub fn start(status: Status) -> Progress {
        let is_terminal = std::io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
        let shared = Shared { status, is_drawn: false, last_line: None, ticker: None, is_finished: false };
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
        // Where the system refuses a thread, lines come with changes alone.
        progress.lock().ticker = std::thread::Builder::new().spawn(tick).ok();
        progress
    }

    /// Changes the status. A new best and a new phase are shown at once, and so is the first change.
    pub fn update(&self, change: impl FnOnce(&mut Status)) {
        let mut shared = self.lock();
        let shown = |status: &Status| (status.best_gflops, status.best.clone(), status.phase.is_some());
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
        crate::output::message(line);
        if !shared.is_finished {
            shared.draw(self.is_terminal, false);
        }
    }

    /// Takes the status line away.
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

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
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
            crate::output::message(&line);
        } else {
            return;
        }
        self.last_line = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_one_line() {
        let mut status = Status {
            time: Some(Duration::from_secs(60)),
            n_trials: 1200,
            peak_gflops: Some(250.0),
            ..Status::default()
        };
        assert_eq!(status.line(), "0 s, 60 s left · 1,200 trials (0.0/s) · nothing valid yet");
        status.time = None;
        status.most_trials = Some(2000);
        status.best_gflops = Some(125.0);
        status.errors.insert(ErrorClass::WrongAnswer, 2);
        let line = status.line();
        assert!(line.ends_with("best 125.0 GFLOP/s, 50.0 % of peak · 2 wrong_answer"), "{line}");
        assert!(line.starts_with("0 s · 1,200 of 2,000 trials"), "{line}");
    }
}
