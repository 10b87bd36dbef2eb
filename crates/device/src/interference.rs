//! Interference: how much other load slows the cores down at the moment.
//!
//! On a shared machine, other load slows cores down for milliseconds to seconds: a busy hardware thread on
//! the same core takes two fifths of its speed. Times measured meanwhile are corrected for it.

use std::ffi::c_void;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tilewright_runtime::ThreadPool;

/// Number of independent sums, enough to keep a core's multipliers and adders busy.
const N_SUMS: usize = 56;
/// Number of elements that are summed: they fit in any first-level cache.
const N_NUMBERS: usize = N_SUMS * 64;
/// Number of passes over the elements: some ten microseconds.
const N_ROUNDS: usize = 40;
/// Tries of a look, of which the fastest counts: a thread that loses its core for a moment is not slow.
const N_TRIES: usize = 3;
/// Maximum slowdown caused by other load; a larger one has another cause.
const MOST: f64 = 2.0;
/// Length of the first looks, and the pause between two of them.
const FIRST_LOOKS: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(200);
/// Number of looks that are remembered.
const N_LOOKS: usize = 4096;
/// Share of the looks regarded as undisturbed, as one in this many: the quantile that gives the cores' best
/// time.
const UNDISTURBED: usize = 20;
/// Number of looks after which the cores' best time is recomputed.
const RENEWAL: usize = 128;

/// Interference meter of the cores that a pool's threads run on.
pub struct Interference {
    work: PaceWork,
    /// Nanoseconds of the last looks, in a ring buffer.
    looks_ns: Vec<f64>,
    n_looks: usize,
    /// Nanoseconds of a look on undisturbed cores.
    undisturbed_ns: f64,
}

/// Work of one look, the same for each thread.
struct PaceWork {
    numbers: Box<[f32]>,
    /// Nanoseconds by thread.
    times: Box<[AtomicU64]>,
}

impl Interference {
    /// Calibrates the meter to the best speed of the cores.
    pub fn new(pool: &mut ThreadPool) -> Interference {
        let numbers = (0..N_NUMBERS).map(|i| 1.0 + i as f32 / N_NUMBERS as f32).collect();
        let work = PaceWork { numbers, times: (0..pool.n_threads()).map(|_| AtomicU64::new(0)).collect() };
        let mut pace = Interference { work, looks_ns: Vec::new(), n_looks: 0, undisturbed_ns: 1.0 };
        let start = Instant::now();
        // At least once: on a busy machine this thread may be suspended for as long as that.
        loop {
            pace.now(pool);
            if start.elapsed() >= FIRST_LOOKS {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        pace.renew();
        pace
    }

    /// Current slowdown of the cores relative to their best speed, 1 or more.
    pub fn now(&mut self, pool: &mut ThreadPool) -> f64 {
        let n_threads = self.work.times.len();
        let env = std::ptr::from_ref(&self.work).cast_mut().cast();
        // SAFETY: the body only reads the work, except for atomic times, and the work outlives the call.
        unsafe { pool.run(work, env, n_threads as i64) };
        let sum: u64 = self.work.times.iter().map(|time| time.load(Ordering::Relaxed)).sum();
        let look_ns = sum as f64 / n_threads as f64;
        match self.looks_ns.get_mut(self.n_looks % N_LOOKS) {
            Some(oldest) => *oldest = look_ns,
            None => self.looks_ns.push(look_ns),
        }
        self.n_looks += 1;
        if self.n_looks.is_multiple_of(RENEWAL) {
            self.renew();
        }
        (look_ns / self.undisturbed_ns).min(MOST)
    }

    fn renew(&mut self) {
        let mut looks_ns = self.looks_ns.clone();
        let at = looks_ns.len() / UNDISTURBED;
        self.undisturbed_ns = *looks_ns.select_nth_unstable_by(at, f64::total_cmp).1;
    }
}

unsafe extern "C" fn work(work: *mut c_void, iteration: i64, _thread: i64) {
    // SAFETY: `Interference::now` passes work that outlives the call and that no thread writes to.
    let work = unsafe { &*work.cast::<PaceWork>() };
    let once = || {
        let start = Instant::now();
        let mut sums = [0.0f32; N_SUMS];
        for _ in 0..N_ROUNDS {
            for part in black_box(&work.numbers).as_chunks::<N_SUMS>().0 {
                for (sum, number) in sums.iter_mut().zip(part) {
                    *sum = *sum * 0.5 + number;
                }
            }
        }
        black_box(sums);
        start.elapsed().as_nanos() as u64
    };
    let fastest = (0..N_TRIES).map(|_| once()).min().unwrap_or(0);
    work.times[iteration as usize].store(fastest, Ordering::Relaxed);
}

/// Model of how a workload's kernel times vary with interference, learned from samples of the same kernel.
///
/// Times grow with the slowdown, `log time = … + sensitivity · log slowdown`: little for kernels bound by
/// memory latency, in full for compute-bound ones. The rest is noise.
pub struct Variation {
    /// Sums of products of deviations from a kernel's means, in logarithms.
    pace_time: f64,
    pace_pace: f64,
    /// Sum of squares of the residuals, and the number of degrees of freedom.
    noise: f64,
    n_free: f64,
}

/// Weight of the prior belief that times do not depend on the pace, equal to that of a few samples of one
/// kernel at different paces: a single time that is corrected too much leads a search astray, while one that
/// is corrected too little is only one of many.
const SENSITIVITY_WEIGHT: f64 = 0.2;
/// Maximum sensitivity; a kernel that seems to be more sensitive was disturbed by something else.
const MOST_SENSITIVITY: f64 = 1.2;
/// Typical duration of a period of constant pace, in nanoseconds.
const SPELL_NS: f64 = 4e6;
/// Standard deviation of the noise that is assumed a priori, and its weight in samples.
const NOISE: f64 = 0.03;
const NOISE_WEIGHT: f64 = 10.0;

impl Default for Variation {
    fn default() -> Variation {
        Variation {
            pace_time: 0.0,
            pace_pace: SENSITIVITY_WEIGHT,
            noise: NOISE * NOISE * NOISE_WEIGHT,
            n_free: NOISE_WEIGHT,
        }
    }
}

/// Logarithm of the pace during a run, estimated from the pace at its ends: the longer the run, the less
/// these tell.
fn log_pace_meanwhile(ns: f64, pace: f64) -> f64 {
    pace.ln() / (1.0 + ns / SPELL_NS)
}

impl Variation {
    /// Learns from samples of one kernel: pairs of nanoseconds and slowdown.
    pub fn learn(&mut self, samples: &[(f64, f64)]) {
        let n = samples.len() as f64;
        let logarithms = || samples.iter().map(|&(ns, pace)| (ns.ln(), log_pace_meanwhile(ns, pace)));
        let (sum_ns, sum_pace) = logarithms().fold((0.0, 0.0), |(a, b), (ns, pace)| (a + ns, b + pace));
        let deviations = || logarithms().map(|(ns, pace)| (ns - sum_ns / n, pace - sum_pace / n));
        for (ns, pace) in deviations() {
            self.pace_time += ns * pace;
            self.pace_pace += pace * pace;
        }
        let sensitivity = self.sensitivity();
        self.noise += deviations().map(|(ns, pace)| (ns - sensitivity * pace).powi(2)).sum::<f64>();
        self.n_free += (n - 1.0).max(0.0);
    }

    fn sensitivity(&self) -> f64 {
        (self.pace_time / self.pace_pace).clamp(0.0, MOST_SENSITIVITY)
    }

    /// Time corrected to undisturbed cores.
    pub fn undisturbed_ns(&self, ns: f64, pace: f64) -> f64 {
        ns / (self.sensitivity() * log_pace_meanwhile(ns, pace)).exp()
    }

    /// Factor by which the mean of `n_samples` samples may be too large by chance: two standard deviations.
    pub fn by_chance(&self, n_samples: usize) -> f64 {
        (2.0 * (self.noise / self.n_free / n_samples as f64).sqrt()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_looks_are_at_what_the_cores_can_do_or_slower() {
        for n_threads in [1, 2] {
            let mut pool = ThreadPool::new(n_threads, &[]).unwrap();
            let mut pace = Interference::new(&mut pool);
            let mut paces: Vec<f64> = (0..1000).map(|_| pace.now(&mut pool)).collect();
            paces.sort_unstable_by(f64::total_cmp);
            assert!(paces[0] > 0.0 && paces[500] > 0.9, "{} {}", paces[0], paces[500]);
        }
    }

    #[test]
    fn variation_is_learnt_from_samples_of_the_same_kernel() {
        for exponent in [0.0, 0.5, 1.0] {
            for noise in [0.0, 0.2f64] {
                let mut variation = Variation::default();
                for kernel in 1..200 {
                    let sample = |(pace, off): (f64, f64)| {
                        (1e3 * f64::from(kernel) * pace.powf(exponent) * (off * noise).exp(), pace)
                    };
                    // The noise is independent of the pace.
                    variation.learn(&[(1.0, 1.0), (1.0, -1.0), (1.5, 1.0), (1.5, -1.0)].map(sample));
                }
                assert!((variation.undisturbed_ns(8e3, 1.6) / (8e3 / 1.6f64.powf(exponent)) - 1.0).abs() < 0.02);
                assert!(variation.undisturbed_ns(8e7, 1.6) > 0.95 * 8e7);
                let deviation = variation.by_chance(1).ln() / 2.0;
                assert!((deviation - noise * (4.0f64 / 3.0).sqrt()).abs() < 0.02, "{deviation} {noise}");
                assert!(variation.by_chance(4) <= variation.by_chance(1));
            }
        }
    }
}
