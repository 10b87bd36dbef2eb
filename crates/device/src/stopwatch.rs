//! How long runs of a kernel take.

use std::time::Instant;

/// The part of the time for which a thread that never waits has a core where hardly anybody takes it away.
const MOSTLY: f64 = 0.8;

/// Tells how long something takes on one thread or on several.
///
/// On one thread the time is what the thread had a core for: it stands still while another process, or another machine on
/// the same host, has the core. On several it is time on the wall: while one of them stands still the others do its work.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch {
    n_threads: usize,
    wall: Instant,
    /// What the thread had run before; none where the system does not count it.
    thread_ns: Option<u64>,
}

impl Stopwatch {
    /// Starts for what the calling thread does, together with others where `n_threads` is more than 1.
    pub fn start(n_threads: usize) -> Stopwatch {
        Stopwatch { n_threads, wall: Instant::now(), thread_ns: thread_ns() }
    }

    /// Nanoseconds since the start; to be asked by the thread that started it.
    pub fn ns(&self) -> f64 {
        let [thread_ns, wall_ns] = self.both_ns();
        if self.n_threads == 1 { thread_ns } else { wall_ns }
    }

    /// Whether the time on the wall, where that counts, holds much in which the calling thread, which never waits, had no core.
    pub fn is_disturbed(&self) -> bool {
        let [thread_ns, wall_ns] = self.both_ns();
        self.n_threads > 1 && thread_ns < MOSTLY * wall_ns
    }

    /// Nanoseconds of this thread and on the wall.
    fn both_ns(&self) -> [f64; 2] {
        let wall_ns = self.wall.elapsed().as_nanos() as f64;
        let of_thread = self.thread_ns.zip(thread_ns()).map(|(before, now)| now.saturating_sub(before) as f64);
        [of_thread.unwrap_or(wall_ns), wall_ns]
    }
}

/// Nanoseconds that this thread has run; none where the system does not count them.
fn thread_ns() -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes a `timespec`.
    let is_known = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) } == 0;
    is_known.then(|| time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_a_thread_waits_for_counts_where_there_are_several() {
        let pause = Duration::from_millis(20);
        let [one, two] = [1, 2].map(Stopwatch::start);
        std::thread::sleep(pause);
        assert!(!one.is_disturbed() && two.is_disturbed());
        let (one, two) = (one.ns(), two.ns());
        assert!(one < pause.as_nanos() as f64 / 2.0 && two >= pause.as_nanos() as f64, "{one} {two}");
    }

    #[test]
    fn work_takes_time() {
        let [one, two] = [1, 2].map(Stopwatch::start);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(5) {}
        assert!(one.ns() > 0.5e6 && two.ns() >= 5e6, "{} {}", one.ns(), two.ns());
    }
}
