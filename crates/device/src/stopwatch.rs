//! Timing of a kernel's runs.

use std::time::{Duration, Instant};

/// Share of the time for which a thread that never waits has a core on a machine with little other load.
const MOSTLY: f64 = 0.8;
/// The system's count of a thread's CPU time has occasional errors, below one per cent of this time.
const LONG_NS: f64 = 50e6;
/// Maximum number of repetitions of work that lost its core.
pub const MOST_TRIES: u32 = 3;

/// Times `work`, which uses `n_threads` threads including the calling one, in nanoseconds, at least 1.
///
/// On one thread the time is that in which the thread had a core: the clock stands still while another
/// process, or another virtual machine, has it. On several threads it is wall-clock time, as the others
/// continue while one stands still. If the calling thread lost its core for long, neither is exact: the work
/// is repeated, up to `most_tries` times, and the least disturbed time counts.
pub fn time_ns(n_threads: usize, most_tries: u32, work: impl FnMut()) -> f64 {
    time(n_threads, most_tries, work).0
}

/// Times `work` as [`time_ns`] does, and returns whether the time was undisturbed, as far as the calling
/// thread can tell.
pub fn time(n_threads: usize, most_tries: u32, mut work: impl FnMut()) -> (f64, bool) {
    let (mut time_ns, mut most_share) = (1.0, -1.0);
    for _ in 0..most_tries {
        let (wall, before) = (Instant::now(), thread_ns());
        work();
        let (after, wall_ns) = (thread_ns(), wall.elapsed().as_nanos() as f64);
        let own_ns = before.zip(after).map_or(wall_ns, |(before, after)| after.saturating_sub(before) as f64);
        let share = own_ns / wall_ns.max(1.0);
        if share > most_share {
            most_share = share;
            time_ns = if n_threads == 1 { own_ns } else { wall_ns };
        }
        if share >= MOSTLY || n_threads == 1 && wall_ns > LONG_NS {
            break;
        }
    }
    (time_ns.max(1.0), n_threads == 1 || most_share >= MOSTLY)
}

/// Nanoseconds that this thread has run; `None` if the system does not count them.
fn thread_ns() -> Option<u64> {
    time_of(libc::CLOCK_THREAD_CPUTIME_ID).map(|time| time.as_nanos() as u64)
}

/// Current time of a system clock; `None` if the system lacks it.
pub fn time_of(clock: libc::clockid_t) -> Option<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes a `timespec`.
    let is_known = unsafe { libc::clock_gettime(clock, &raw mut time) } == 0;
    is_known.then(|| Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(60);

    fn sleep() {
        std::thread::sleep(PAUSE);
    }

    /// Uses the CPU for this time, however long that takes on a busy machine.
    fn spin() {
        let (start, start_ns) = (Instant::now(), thread_ns().unwrap());
        while start.elapsed() < PAUSE || thread_ns().unwrap().saturating_sub(start_ns) < PAUSE.as_nanos() as u64 {}
    }

    #[test]
    fn what_a_thread_waits_for_counts_where_there_are_several() {
        let [(one, is_whole), (two, is_whole_of_two)] = [1, 2].map(|n_threads| time(n_threads, MOST_TRIES, sleep));
        assert!(is_whole && !is_whole_of_two);
        let pause_ns = PAUSE.as_nanos() as f64;
        assert!((1.0..0.5 * pause_ns).contains(&one) && two >= pause_ns, "{one} {two}");
    }

    #[test]
    fn work_takes_time() {
        let [one, two] = [1, 2].map(|n_threads| time_ns(n_threads, MOST_TRIES, spin));
        let pause_ns = PAUSE.as_nanos() as f64;
        assert!(one >= 0.5 * pause_ns && two >= pause_ns, "{one} {two}");
    }

    #[test]
    fn work_that_lost_its_core_is_repeated() {
        let mut n_runs = 0;
        let ns = time_ns(1, MOST_TRIES, || {
            n_runs += 1;
            match n_runs {
                1 => std::thread::sleep(PAUSE / 6),
                _ => spin(),
            }
        });
        assert!(n_runs == 2 && ns >= 0.5 * PAUSE.as_nanos() as f64, "{n_runs} {ns}");
    }
}
