//! Load of the machine by other programs, which distorts measurements.

use std::time::{Duration, Instant};

/// Time for which the load is watched.
const WINDOW: Duration = Duration::from_millis(250);
/// Number of CPUs in use from which on a measurement is disturbed.
const TOO_MANY: f64 = 0.25;
/// Ticks of `/proc/stat` per second, on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Samples the machine's load for a moment, and returns a warning if other programs keep it busy. This
/// process must be idle.
pub fn warning() -> Option<String> {
    let read = || busy_ticks(&std::fs::read_to_string("/proc/stat").ok()?);
    let (start, before) = (Instant::now(), read()?);
    std::thread::sleep(WINDOW);
    let busy = read()?.saturating_sub(before) as f64 / TICKS_PER_SECOND / start.elapsed().as_secs_f64();
    (busy > TOO_MANY)
        .then(|| format!("other programs keep {busy:.1} CPUs busy: expect noise, and threads in each other's way"))
}

/// Ticks for which all CPUs together have been busy.
fn busy_ticks(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    // The fields are user nice system idle iowait irq softirq steal; guests are included in user.
    Some(ticks.iter().take(8).sum::<u64>() - ticks.get(3)? - ticks.get(4)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_is_all_but_idle_and_waiting() {
        assert_eq!(busy_ticks("cpu  10 2 3 1000 500 1 1 1 7 7\ncpu0 1 2 3\n"), Some(18));
        assert_eq!(busy_ticks("intr 1 2 3\n"), None);
    }
}
