//! Time in which this process was stopped: by Ctrl-Z, in a frozen container, by a debugger. It counts for
//! neither candidates nor searches.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Interval at which a thread reads the clock.
const BEAT: Duration = Duration::from_millis(100);
/// Largest delay of a reading that the system's scheduling explains: after a larger one, the process counts
/// as stopped.
const LATEST: Duration = Duration::from_millis(500);

static PAUSES: Mutex<Pauses> = Mutex::new(Pauses { last_beat: None, total: Duration::ZERO });

/// State of the pauses so far.
struct Pauses {
    /// Time of the last reading; `None` until a thread watches.
    last_beat: Option<Instant>,
    total: Duration,
}

impl Pauses {
    /// Returns the total of the pauses until `now`. A pause is detected by the first caller after it, the
    /// watching thread or another.
    fn until(&mut self, now: Instant) -> Duration {
        if let Some(last) = &mut self.last_beat {
            let gap = now.saturating_duration_since(*last);
            if gap > LATEST {
                self.total += gap;
            }
            *last = now.max(*last);
        }
        self.total
    }
}

fn pauses() -> MutexGuard<'static, Pauses> {
    PAUSES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to detect pauses; earlier ones are not counted.
///
/// # Errors
/// If no thread can be started.
pub fn watch() -> io::Result<()> {
    let mut pauses = pauses();
    if pauses.last_beat.is_none() {
        let beat = || {
            loop {
                std::thread::sleep(BEAT);
                total();
            }
        };
        std::thread::Builder::new().name("pauses".to_owned()).spawn(beat)?;
        pauses.last_beat = Some(Instant::now());
    }
    Ok(())
}

/// Total length of all pauses so far.
pub fn total() -> Duration {
    pauses().until(Instant::now())
}

/// Current time of a clock that stands still during pauses.
pub fn now() -> Instant {
    let mut pauses = pauses();
    let now = Instant::now();
    now - pauses.until(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beat_that_comes_late_ends_a_pause() {
        let start = Instant::now();
        let mut pauses = Pauses { last_beat: None, total: Duration::ZERO };
        let mut at = |ms: u64, last_beat: Option<u64>| {
            if let Some(ms) = last_beat {
                pauses.last_beat = Some(start + Duration::from_millis(ms));
            }
            pauses.until(start + Duration::from_millis(ms)).as_millis()
        };
        assert_eq!(at(10_000, None), 0, "nobody watches");
        assert_eq!(at(100, Some(0)), 0);
        // Delay on a busy machine.
        assert_eq!(at(550, None), 0);
        assert_eq!(at(5_550, None), 5_000);
        // Reading that is older than that of another thread.
        assert_eq!(at(5_540, None), 5_000);
        assert_eq!(at(5_650, None), 5_000);
        assert_eq!(at(6_650, None), 6_000);
    }
}
