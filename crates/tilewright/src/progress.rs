//! Live progress on standard error: one line redrawn on a terminal, lines now and then elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Status;

/// How often the line is redrawn on a terminal.
const REDRAW: Duration = Duration::from_millis(200);
/// How often there is a line elsewhere.
const LINE_EVERY: Duration = Duration::from_secs(2);

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
        message(line);
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
            message(&line);
        } else {
            return;
        }
        self.last_line = Some(Instant::now());
    }
}

/// Writes a line to standard error; where that is gone, nobody wants to know.
pub fn message(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}
