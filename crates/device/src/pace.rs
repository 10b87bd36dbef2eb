//! How fast the cores run at the moment, against what they can do.
//!
//! On a shared machine others slow the cores down for milliseconds or for seconds at a time: a hardware thread on the same
//! core takes two fifths of its speed. A kernel that is timed just then is no slower for it.

use crate::memory::Fenced;
use crate::pool::Pool;
use crate::tile::Tile;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::error::Error;
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tilewright_codegen::{Kernel, Runtime};
use tilewright_ir::{DType, Program, Target};

/// Steps of the reduction whose operands fit in any first-level cache.
const DEPTH: i64 = 64;
/// Multiply-adds of vectors: some ten microseconds.
const N_UPDATES: i64 = 40_000;
/// How often that is done at a look, of which the fastest counts: a thread that loses its core for a moment is not slow.
const N_TRIES: usize = 3;
/// No neighbour slows a core down by more; what looks slower has another reason.
const MOST: f64 = 2.5;
/// How long the first looks take, and the pause between two of them.
const FIRST_LOOKS: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(200);
/// For about so long back, in seconds, the looks count from which the pace lately is known.
const LATELY_S: f64 = 0.2;

/// How many times as long as they can the cores take for the same work.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Look {
    /// At the moment.
    pub now: f64,
    /// In the last moments: some spells last for milliseconds, others for seconds.
    pub lately: f64,
}

impl Look {
    /// What cores are that nobody disturbs.
    pub const UNDISTURBED: Look = Look { now: 1.0, lately: 1.0 };

    /// Between two looks.
    pub fn between(before: Look, after: Look) -> Look {
        Look { now: (before.now * after.now).sqrt(), lately: (before.lately * after.lately).sqrt() }
    }

    /// What looks at both ends of a run tell of the pace in between, as a logarithm: the longer it is, the less the moments
    /// of the looks do.
    fn log_meanwhile(self, ns: f64) -> f64 {
        self.lately.ln() + (self.now / self.lately).ln() / (1.0 + ns / SPELL_NS)
    }
}

/// The pace of the cores that a pool's threads run on.
///
/// It is that of a register tile of sums with its loads, since what slows that down slows fast kernels down: of slow changes
/// in their times, 13 %, such a look leaves 2 %, one at 128-bit sums leaves 5 to 7 %.
pub struct Pace {
    work: Work,
    /// The fastest look: what the cores can do.
    least_ns: f64,
    /// By the CPU of the calling thread, as each has its own neighbours.
    lately: HashMap<i32, Lately>,
}

/// The logarithms of the last paces.
struct Lately {
    weighted_sum: f64,
    weight: f64,
    last: Instant,
}

/// The work of one look, the same for each thread.
struct Work {
    kernel: Kernel,
    runtime: Runtime,
    /// What each thread has to itself.
    places: Vec<Place>,
}

struct Place {
    arguments: Vec<Fenced>,
    scratch: Fenced,
    /// What its last look took, in nanoseconds.
    ns: AtomicU64,
}

impl Place {
    fn new(kernel: &Kernel, program: &Program) -> io::Result<Place> {
        let sizes = program.arguments().map(|(_, buffer)| buffer.size_bytes().unwrap_or(0));
        Ok(Place {
            arguments: sizes.map(Fenced::new).collect::<io::Result<_>>()?,
            scratch: Fenced::new(kernel.scratch_bytes(1))?,
            ns: AtomicU64::new(0),
        })
    }
}

impl Pace {
    /// Finds out how fast the cores can be.
    ///
    /// # Errors
    /// Where code generation fails or memory does not suffice.
    pub fn new(pool: &mut Pool, target: &Target) -> Result<Pace, Box<dyn Error>> {
        // As many sums as leave registers for the operands of a step.
        let (rows, vectors) = match target.n_vector_registers {
            32.. => (6, 4),
            _ if target.has_fma => (6, 2),
            _ => (4, 2),
        };
        let dtype = DType::F32;
        let rounds = N_UPDATES / (rows * vectors * DEPTH);
        let tile = Tile { dtype, rows, vectors, lanes: target.lanes(dtype), factors: rows, depth: DEPTH, rounds };
        let program = tile.program(1);
        let kernel = tilewright_codegen::compile(&program, target)?;
        let places = (0..pool.n_threads()).map(|_| Place::new(&kernel, &program)).collect::<io::Result<_>>()?;
        let work = Work { kernel, runtime: pool.runtime(), places };
        let mut pace = Pace { work, least_ns: f64::INFINITY, lately: HashMap::new() };
        let start = Instant::now();
        while start.elapsed() < FIRST_LOOKS {
            pace.look(pool);
            std::thread::sleep(PAUSE);
        }
        // Before now nobody knew what the cores can do.
        pace.lately.clear();
        Ok(pace)
    }

    /// Looks how many times as long as they can the cores take for the same work.
    pub fn look(&mut self, pool: &mut Pool) -> Look {
        let n_threads = self.work.places.len();
        self.work.runtime = pool.runtime();
        let env = std::ptr::from_ref(&self.work).cast_mut().cast();
        // SAFETY: the body only reads the work, but for atomic times and each thread's own memory, and the work outlives the
        // call.
        unsafe { pool.run(work, env, n_threads as i64) };
        let sum: u64 = self.work.places.iter().map(|place| place.ns.load(Ordering::Relaxed)).sum();
        let look_ns = (sum as f64 / n_threads as f64).max(1.0);
        self.least_ns = self.least_ns.min(look_ns);
        let now = (look_ns / self.least_ns).min(MOST);
        // SAFETY: the call has no conditions. Where the system does not know the CPU it says so with a number, too.
        let cpu = unsafe { libc::sched_getcpu() };
        let at = Instant::now();
        let lately = self.lately.entry(cpu).or_insert(Lately { weighted_sum: 0.0, weight: 0.0, last: at });
        let stays = (-(at - lately.last).as_secs_f64() / LATELY_S).exp();
        lately.last = at;
        lately.weighted_sum = stays * lately.weighted_sum + now.ln();
        lately.weight = stays * lately.weight + 1.0;
        Look { now, lately: (lately.weighted_sum / lately.weight).exp() }
    }
}

unsafe extern "C" fn work(work: *mut c_void, iteration: i64, _thread: i64) {
    // SAFETY: `Pace::look` passes work that outlives the call and that nobody writes to.
    let Work { kernel, runtime, places } = unsafe { &*work.cast::<Work>() };
    let Place { arguments, scratch, ns } = &places[iteration as usize];
    let arguments: Vec<*mut u8> = arguments.iter().map(Fenced::pointer).collect();
    let once = || {
        let start = Instant::now();
        // SAFETY: the buffers have the sizes that the program and the kernel ask for, and no other iteration has them.
        unsafe { kernel.run(&arguments, &[], scratch.pointer(), runtime) };
        start.elapsed().as_nanos() as u64
    };
    let fastest = (0..N_TRIES).map(|_| once()).min().unwrap_or(0);
    ns.store(fastest, Ordering::Relaxed);
}

/// How the times of a workload's kernels vary, learnt from samples of the same kernel.
///
/// They grow with the pace, `log time = … + sensitivity · log pace`: what waits for memory hardly does, what computes does
/// in full. How much is learnt from visits to the same kernel seconds apart: within one, the pace changes faster than looks
/// at it can follow. What is left is noise, of visits and of samples within one.
pub struct Variation {
    /// Sums of products of deviations of visits from their kernel's means, of logarithms, and how many deviations were free.
    pace_time: f64,
    pace_pace: f64,
    time_time: f64,
    n_free_visits: f64,
    /// Sum of squares of what is left of deviations within visits, and how many of them were free.
    noise: f64,
    n_free: f64,
}

/// What is known of earlier visits to a kernel: their number, and means of logarithms.
#[derive(Debug, Clone, Copy, Default)]
pub struct Visits {
    n: f64,
    pace: f64,
    time: f64,
}

impl Visits {
    /// What the kernel takes, in nanoseconds, whatever the pace was; none before the first visit.
    pub fn ns(&self) -> Option<f64> {
        (self.n > 0.0).then(|| self.time.exp())
    }
}

/// Sensitivity that is assumed before anything is learnt …
const SENSITIVITY: f64 = 0.9;
/// … with the weight of a few visits to one kernel at different paces.
const SENSITIVITY_WEIGHT: f64 = 0.2;
/// Kernels that seem to grow more have met something else.
const MOST_SENSITIVITY: f64 = 1.2;
/// About as long a spell lasts in which the pace stays the same, in nanoseconds.
const SPELL_NS: f64 = 4e6;
/// Standard deviation of the noise that is assumed, with the weight of so many samples or visits.
const NOISE: f64 = 0.03;
const NOISE_WEIGHT: f64 = 10.0;

impl Default for Variation {
    fn default() -> Variation {
        let noise = NOISE * NOISE * NOISE_WEIGHT;
        Variation {
            pace_time: SENSITIVITY * SENSITIVITY_WEIGHT,
            pace_pace: SENSITIVITY_WEIGHT,
            time_time: SENSITIVITY * SENSITIVITY * SENSITIVITY_WEIGHT + noise,
            n_free_visits: NOISE_WEIGHT,
            noise,
            n_free: NOISE_WEIGHT,
        }
    }
}

impl Variation {
    /// Takes over the samples of a visit to a kernel, nanoseconds and the look meanwhile, at least one.
    pub fn learn(&mut self, visits: &mut Visits, samples: &[(f64, Look)]) {
        let n = samples.len() as f64;
        let logarithms = || samples.iter().map(|&(ns, look)| (ns.ln(), look.log_meanwhile(ns)));
        let (sum_time, sum_pace) = logarithms().fold((0.0, 0.0), |(a, b), (time, pace)| (a + time, b + pace));
        let (time, pace) = (sum_time / n, sum_pace / n);
        let (off_time, off_pace) = (time - visits.time, pace - visits.pace);
        visits.n += 1.0;
        visits.time += off_time / visits.n;
        visits.pace += off_pace / visits.n;
        // Welford's update: nothing at the first visit.
        let weight = 1.0 - 1.0 / visits.n;
        self.pace_time += weight * off_pace * off_time;
        self.pace_pace += weight * off_pace * off_pace;
        self.time_time += weight * off_time * off_time;
        self.n_free_visits += if visits.n > 1.0 { 1.0 } else { 0.0 };
        let sensitivity = self.sensitivity();
        let left = |(t, p): (f64, f64)| (t - time - sensitivity * (p - pace)).powi(2);
        self.noise += logarithms().map(left).sum::<f64>();
        self.n_free += n - 1.0;
    }

    fn sensitivity(&self) -> f64 {
        (self.pace_time / self.pace_pace).clamp(0.0, MOST_SENSITIVITY)
    }

    /// The time that a run would take of the cores at what they can do.
    pub fn undisturbed_ns(&self, ns: f64, look: Look) -> f64 {
        ns / (self.sensitivity() * look.log_meanwhile(ns)).exp()
    }

    /// By what factor the mean of so many samples may be too large by chance, seldom by more: two standard deviations.
    pub fn by_chance(&self, n_samples: usize) -> f64 {
        let sensitivity = self.sensitivity();
        let left = self.time_time - 2.0 * sensitivity * self.pace_time + sensitivity * sensitivity * self.pace_pace;
        let of_visits = left / self.n_free_visits;
        (2.0 * (of_visits + self.noise / self.n_free / n_samples as f64).sqrt()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host;

    #[test]
    fn most_looks_are_at_what_the_cores_can_do_or_slower() {
        for n_threads in [1, 2] {
            let mut pool = Pool::new(n_threads, &[]);
            let mut pace = Pace::new(&mut pool, &host::target()).unwrap();
            let looks: Vec<Look> = (0..1000).map(|_| pace.look(&mut pool)).collect();
            let mut paces: Vec<f64> = looks.iter().map(|look| look.now).collect();
            paces.sort_unstable_by(f64::total_cmp);
            assert!(paces[0] > 0.0 && paces[500] > 0.9, "{} {}", paces[0], paces[500]);
            assert!(looks.iter().all(|look| (paces[0] * 0.99..=paces[999] * 1.01).contains(&look.lately)));
        }
    }

    #[test]
    fn variation_is_learnt_from_samples_of_the_same_kernel() {
        for exponent in [0.0, 0.5, 1.0] {
            for noise in [0.0, 0.2f64] {
                let mut variation = Variation::default();
                for kernel in 1..200 {
                    let mut visits = Visits::default();
                    // The noise has nothing to do with the pace, and what the pace does within a visit nothing with the times.
                    for (pace, off) in [(1.0f64, 1.0), (1.5, 1.0), (1.0, -1.0), (1.5, -1.0)] {
                        let ns = 1e3 * f64::from(kernel) * pace.powf(exponent) * (off * noise).exp();
                        variation.learn(
                            &mut visits,
                            &[0.9, 1.0 / 0.9].map(|off| (ns, Look { now: off * pace, lately: pace })),
                        );
                    }
                }
                let undisturbed = |ns: f64, now, lately| variation.undisturbed_ns(ns, Look { now, lately }) / ns;
                let expected = 1.6f64.powf(-exponent);
                assert!((undisturbed(8e3, 1.6, 1.0) / expected - 1.0).abs() < 0.03);
                assert!((undisturbed(8e7, 1.6, 1.6) / expected - 1.0).abs() < 0.03);
                assert!(undisturbed(8e7, 1.6, 1.0) > 0.95);
                let deviation = variation.by_chance(1000).ln() / 2.0;
                assert!((deviation - noise * (4.0f64 / 3.0).sqrt()).abs() < 0.02, "{deviation} {noise}");
                assert!(variation.by_chance(1) >= variation.by_chance(4));
            }
        }
    }
}
