//! How long runs of a kernel take.

use std::time::Instant;

/// Tells how long something takes on one thread or on several.
///
/// On one thread the time is what the thread had a core for: it stands still while another process, or another machine on
/// the same host, has the core. On several it is time on the wall: while one of them stands still the others do its work.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch(Start);

#[derive(Debug, Clone, Copy)]
enum Start {
    OfThread { ns: u64 },
    OfWall(Instant),
}

impl Stopwatch {
    /// Starts for what the calling thread does, together with others where `n_threads` is more than 1.
    pub fn start(n_threads: usize) -> Stopwatch {
        Stopwatch(match thread_ns() {
            Some(ns) if n_threads == 1 => Start::OfThread { ns },
            _ => Start::OfWall(Instant::now()),
        })
    }

    /// Nanoseconds since the start; to be asked by the thread that started it.
    pub fn ns(&self) -> f64 {
        match self.0 {
            Start::OfThread { ns } => thread_ns().unwrap_or(ns).saturating_sub(ns) as f64,
            Start::OfWall(start) => start.elapsed().as_nanos() as f64,
        }
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
        let (one, two) = (Stopwatch::start(1), Stopwatch::start(2));
        std::thread::sleep(pause);
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
