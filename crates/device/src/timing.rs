//! Timing of verified kernels.
//!
//! A kernel that is clearly slower than the best one is pruned: after the run that verified it
//! ([`HOPELESS_CHECKED`], [`HOPELESS_CHECKED_LONG`] and, if nothing else ran meanwhile, [`HOPELESS_FIRST`],
//! [`HOPELESS_VERY_LONG`]), or while it is sampled ([`HOPELESS_WARM`]). Only runs longer than [`LONG_NS`] are
//! pruned that early, and allowances are made for cold caches ([`COLD_NS_A_BYTE`]) and for waiting for a core
//! ([`WAIT_NS`]).

use std::time::Duration;

use crate::interference::Variation;
use crate::protocol::{Caches, TimingPlan};
use crate::stopwatch::{MOST_TRIES, time_ns};

/// Minimum length of a candidate's runs in a round of a race.
#[derive(Debug, Clone, Copy)]
pub struct RoundLength {
    /// Total time of the runs.
    pub time: Duration,
    /// Number of samples of a long kernel, after a warm-up run; with 1, the warm-up run itself counts.
    pub min_samples: u32,
}

/// Minimum length of a sample: a shorter one averages several runs, so that reading the clock and measuring
/// the pace do not matter.
const MIN_SAMPLE_NS: f64 = 100_000.0;
/// Multiple of the leading time that prunes a kernel by the run that verified it, beside other work.
const HOPELESS_CHECKED: f64 = 2.0;
/// Multiple of the leading time that prunes a kernel by such a run of more than [`CHECKED_LONG_NS`].
const HOPELESS_CHECKED_LONG: f64 = 1.05;
const CHECKED_LONG_NS: f64 = 1e9;
/// Time that one of several threads may have waited for a core on which another candidate is built, in
/// nanoseconds.
const WAIT_NS: f64 = 10e6;
/// Multiple of the leading time that prunes a kernel by a first run without other work beside it.
const HOPELESS_FIRST: f64 = 1.15;
/// Minimum length of a first run that may prune its kernel, in nanoseconds.
const LONG_NS: f64 = 1e6;
/// Time that a first run waits for main memory because other kernels used the caches before it: a core gets
/// some 10 GB/s. Without this allowance, 12 of the 15 best of 150 configurations were pruned (Zen 4,
/// 2026-11-22).
const COLD_NS_A_BYTE: f64 = 0.1;
/// Minimum length of a first run that [`HOPELESS_VERY_LONG`] judges, in nanoseconds: noise is a small part of
/// it.
const VERY_LONG_NS: f64 = 4e6;
/// Multiple of the leading time that prunes a kernel by a very long first run.
const HOPELESS_VERY_LONG: f64 = 1.05;
/// Multiple of the leading time at which the fastest warm sample of a kernel ends its sampling.
const HOPELESS_WARM: f64 = 1.05;
/// Minimum total time of samples before a kernel may be pruned by them, in nanoseconds.
const ENOUGH_NS: f64 = 0.5e6;
/// Maximum share of cold caches in a warm-up run that counts as a sample, if one sample suffices.
const COLD_AT_MOST: f64 = 0.1;
/// Multiple of the intended time beyond which a warm-up run, or the samples so far, suffice.
const WARM_ENOUGH: f64 = 10.0;
/// Maximum time for flushing all caches, as a multiple of the time of the samples; for flushing constants
/// alone, the maximum is once that time.
pub const MOST_FLUSHING: u32 = 10;
/// Minimum number of cold samples: a single one may be disturbed.
const FEW_COLD: usize = 3;
/// Size in bytes up to which constants are loaded so fast that their cold state does not matter.
const FEW_BYTES: u64 = 16 << 10;
/// Maximum number of samples; more would not improve the result.
const MOST_SAMPLES: usize = 1000;

/// Samples of a kernel's run time.
pub struct Samples {
    /// Samples in nanoseconds per run.
    pub ns: Vec<f64>,
    /// Whether sampling ended early.
    pub stopped_early: bool,
}

/// First run of a kernel, which verified it.
#[derive(Debug, Clone, Copy)]
pub struct First {
    /// Time of the run in nanoseconds.
    pub ns: f64,
    /// Slowdown of the cores by interference meanwhile, 1 or more.
    pub pace: f64,
    /// Time including the comparison of the result, in nanoseconds.
    pub checked_ns: f64,
}

impl First {
    /// First run of a kernel that has not been run before.
    pub const UNKNOWN: First = First { ns: f64::INFINITY, pace: 1.0, checked_ns: f64::INFINITY };

    /// Whether it counts as timed: no other kernel ran meanwhile, nor has since.
    pub fn is_alone(&self, plan: &TimingPlan) -> bool {
        self.checked_ns <= plan.alone_ns
    }

    /// Nanoseconds of the run, and the pace if times are corrected by it.
    fn timed(&self, plan: &TimingPlan) -> (f64, f64) {
        (self.ns, if plan.at_best_pace { self.pace } else { 1.0 })
    }
}

/// Size of a kernel: threads and memory.
#[derive(Debug, Clone, Copy)]
pub struct KernelDemands {
    /// Number of threads.
    pub n_threads: usize,
    /// Bytes of the buffers that it accesses.
    pub n_bytes: u64,
}

impl KernelDemands {
    /// Nanoseconds that the kernel may wait for main memory if other kernels used the caches before it.
    fn cold_ns(self) -> f64 {
        COLD_NS_A_BYTE * self.n_bytes as f64
    }
}

/// Verified kernel to be timed.
pub struct TimedKernel<'a> {
    /// Runs the kernel as many times as asked, in a row, and returns the nanoseconds.
    pub run: &'a mut dyn FnMut(u32) -> f64,
    /// Size of the kernel.
    pub size: KernelDemands,
    /// Flushes the caches, and returns the nanoseconds that it took, which do not count as the kernel's.
    pub flush: &'a mut dyn FnMut() -> f64,
    /// Returns the current slowdown of the cores by interference.
    pub pace: &'a mut dyn FnMut() -> f64,
}

/// Whether a time is clearly slower than the leading one. The more times vary by chance, the larger the
/// difference must be.
fn is_hopeless(plan: &TimingPlan, variation: &Variation, ns: f64, factor: f64, n_samples: usize) -> bool {
    plan.leading_ns.is_some_and(|leading| ns > factor * variation.by_chance(n_samples) * leading)
}

/// Whether a first run prunes its kernel; up to `not_its_ns` of it may be due to cold caches or waiting. Only
/// a long run is conclusive.
fn is_first_hopeless(plan: &TimingPlan, variation: &Variation, ns: f64, factor: f64, not_its_ns: f64) -> bool {
    plan.caches == Caches::Warm && ns > LONG_NS && is_hopeless(plan, variation, ns - not_its_ns, factor, 1)
}

/// Multiple of the leading time that prunes a kernel by a first run of `ns` without other work beside it.
fn hopeless_first(ns: f64) -> f64 {
    if ns > VERY_LONG_NS { HOPELESS_VERY_LONG } else { HOPELESS_FIRST }
}

/// Samples of a kernel that its first run already prunes; `None` if it is to be timed.
pub fn at_first(plan: &TimingPlan, variation: &Variation, first: First, size: KernelDemands) -> Option<Samples> {
    let (ns, pace) = first.timed(plan);
    let ns = variation.undisturbed_ns(ns, pace);
    let wait_ns = if size.n_threads > 1 { WAIT_NS } else { 0.0 };
    let (factor, not_its_ns) = match first.is_alone(plan) {
        true => (hopeless_first(ns), size.cold_ns()),
        false if ns > CHECKED_LONG_NS => (HOPELESS_CHECKED_LONG, size.cold_ns() + wait_ns),
        false => (HOPELESS_CHECKED, size.cold_ns() + wait_ns),
    };
    is_first_hopeless(plan, variation, ns, factor, not_its_ns).then(|| Samples { ns: vec![ns], stopped_early: true })
}

/// Cache state to establish before runs, if `n_bytes` bytes would have to be flushed: for few constants,
/// timing each run separately is not worthwhile.
pub fn emptied(caches: Caches, n_bytes: u64) -> Caches {
    match caches {
        Caches::ColdConstants if n_bytes <= FEW_BYTES => Caches::Warm,
        caches => caches,
    }
}

/// Samples a kernel's time.
///
/// Unless caches are to be warm, each sample is a single run after flushing them. Samples are corrected for
/// interference by `variation`, which learns from them.
pub fn sample(plan: &TimingPlan, variation: &mut Variation, first: First, subject: TimedKernel) -> Samples {
    let TimedKernel { run, size, flush, pace } = subject;
    if let Some(samples) = at_first(plan, variation, first, size) {
        return samples;
    }
    let mut pace_before = pace();
    // Nanoseconds per run, and the pace of the cores meanwhile.
    let mut timed = |n_runs: u32| {
        let ns = run(n_runs) / f64::from(n_runs);
        let pace_after = pace();
        let paces = (pace_before + pace_after) / 2.0;
        pace_before = pace_after;
        (ns, paces)
    };
    // The first run warms up: unless it was the one that verified this kernel, others ran since.
    let first = if first.is_alone(plan) { first.timed(plan) } else { timed(1) };
    let first_ns = variation.undisturbed_ns(first.0, first.1);
    if is_first_hopeless(plan, variation, first_ns, hopeless_first(first_ns), size.cold_ns()) {
        return Samples { ns: vec![first_ns], stopped_early: true };
    }
    let most_ns = WARM_ENOUGH * plan.min_time_ns;
    let is_sample = plan.caches == Caches::Warm
        && first_ns > LONG_NS
        && size.cold_ns() < COLD_AT_MOST * first_ns
        && (plan.min_samples == 1 || first_ns > most_ns);
    let mut samples = Vec::from_iter(is_sample.then_some(first));
    let mut total: f64 = samples.iter().map(|(ns, _)| ns).sum();
    let estimate = if first_ns < LONG_NS { timed(1).0.min(first_ns) } else { first_ns };
    let n_runs =
        if plan.caches != Caches::Warm { 1 } else { (MIN_SAMPLE_NS / estimate.max(1.0)).ceil().clamp(1.0, 1e6) as u32 };
    let (mut fastest, mut stopped_early) = (f64::INFINITY, false);
    let most_flushing = if plan.caches == Caches::Cold { MOST_FLUSHING } else { 1 };
    let (mut flushing_ns, most_flushing_ns) = (0.0, f64::from(most_flushing) * plan.min_time_ns);
    while !stopped_early
        && samples.len() < MOST_SAMPLES
        && (flushing_ns < most_flushing_ns || samples.len() < FEW_COLD.max(plan.min_samples as usize))
        && (total < plan.min_time_ns || samples.len() < plan.min_samples as usize && total < most_ns)
    {
        if plan.caches != Caches::Warm {
            flushing_ns += flush();
        }
        let (ns, pace) = timed(n_runs);
        samples.push((ns, pace));
        total += ns * f64::from(n_runs);
        fastest = f64::min(fastest, variation.undisturbed_ns(ns, pace));
        stopped_early = total >= ENOUGH_NS && is_hopeless(plan, variation, fastest, HOPELESS_WARM, samples.len());
    }
    variation.learn(&samples);
    let ns = samples.iter().map(|&(ns, pace)| variation.undisturbed_ns(ns, pace)).collect();
    Samples { ns, stopped_early }
}

/// Samples a kernel's time at each of `n` sizes by `sample`, and returns geometric means over the sizes: of
/// the smallest samples, and so on up to the largest.
pub fn of_all(plan: &TimingPlan, n: usize, mut sample: impl FnMut(&TimingPlan, usize) -> Samples) -> Samples {
    // The leading kernel is known only by its mean.
    let each = TimingPlan { min_time_ns: plan.min_time_ns / n as f64, leading_ns: None, ..*plan };
    let mut of_each: Vec<Vec<f64>> = (0..n).map(|at| sample(&each, at).ns).collect();
    of_each.iter_mut().for_each(|ns| ns.sort_by(f64::total_cmp));
    let n_samples = of_each.iter().map(Vec::len).max().unwrap_or(0);
    let mean = |at: usize| {
        let logs = of_each.iter().map(|ns| ns[at * ns.len() / n_samples].ln());
        (logs.sum::<f64>() / n as f64).exp()
    };
    Samples { ns: (0..n_samples).map(mean).collect(), stopped_early: false }
}

/// Times `run` as in a round of a race, without correction for interference; returns samples in nanoseconds
/// per run. `run` uses `n_threads` threads and accesses `n_bytes` bytes.
pub fn sample_round(round: RoundLength, n_threads: usize, n_bytes: u64, mut run: impl FnMut()) -> Vec<f64> {
    let mut timed = |n_runs: u32| time_ns(n_threads, MOST_TRIES, || (0..n_runs).for_each(|_| run()));
    sample_round_by(&mut timed, round, n_threads, n_bytes)
}

/// Times by another clock, such as a GPU's: `timed` runs the kernel as many times as asked, in a row, and
/// returns the nanoseconds.
pub fn sample_round_by(
    timed: &mut dyn FnMut(u32) -> f64,
    round: RoundLength,
    n_threads: usize,
    n_bytes: u64,
) -> Vec<f64> {
    let plan = TimingPlan {
        min_time_ns: round.time.as_nanos() as f64,
        min_samples: round.min_samples,
        alone_ns: 0.0,
        leading_ns: None,
        caches: Caches::Warm,
        at_best_pace: false,
    };
    let first = First::UNKNOWN;
    let size = KernelDemands { n_threads, n_bytes };
    let subject = TimedKernel { run: timed, size, flush: &mut || 0.0, pace: &mut || 1.0 };
    sample(&plan, &mut Variation::default(), first, subject).ns
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn plan(leading_ns: Option<f64>) -> TimingPlan {
        TimingPlan {
            min_time_ns: 1e6,
            min_samples: 3,
            alone_ns: 0.0,
            leading_ns,
            caches: Caches::Warm,
            at_best_pace: true,
        }
    }

    /// Samples of a kernel that took this long when it was verified and takes the time of `run`, and the
    /// number of its runs.
    fn timed(
        plan: &TimingPlan,
        first_ns: f64,
        n_bytes: u64,
        pace: f64,
        ns_of_run: impl Fn(u32) -> f64,
    ) -> (Samples, u32) {
        let mut n_runs = 0;
        let mut run = |n: u32| {
            n_runs += n;
            (n_runs - n..n_runs).map(&ns_of_run).sum()
        };
        let first = First { ns: first_ns, pace: 1.0, checked_ns: 2.0 * first_ns };
        let size = KernelDemands { n_threads: 1, n_bytes };
        let subject = TimedKernel { run: &mut run, size, flush: &mut || 0.0, pace: &mut || pace };
        (sample(plan, &mut Variation::default(), first, subject), n_runs)
    }

    #[test]
    fn a_hopeless_kernel_is_not_run_again() {
        let (samples, n_runs) = timed(&plan(Some(1e6)), 5e6, 0, 1.0, |_| 5e6);
        assert!(samples.stopped_early);
        assert_eq!((samples.ns.as_slice(), n_runs), (&[5e6][..], 0));
    }

    #[test]
    fn cold_caches_do_not_make_a_kernel_hopeless() {
        let of_bytes = |n_bytes| timed(&plan(Some(4e6)), 3e6, n_bytes, 1.0, |at| if at == 0 { 9e6 } else { 3e6 });
        let (samples, n_runs) = of_bytes(0);
        assert_eq!((samples.stopped_early, samples.ns.as_slice(), n_runs), (true, &[9e6][..], 1));
        let (samples, n_runs) = of_bytes(60_000_000);
        assert_eq!((samples.stopped_early, samples.ns.as_slice(), n_runs), (false, &[3e6; 3][..], 4));
    }

    #[test]
    fn a_very_long_run_is_its_own_sample() {
        let (samples, n_runs) = timed(&plan(None), 11e6, 0, 1.0, |_| 11e6);
        assert_eq!((samples.stopped_early, samples.ns.len(), n_runs), (false, 1, 1));
        let (samples, n_runs) = timed(&plan(None), 11e6, 60_000_000, 1.0, |_| 11e6);
        assert_eq!((samples.stopped_early, samples.ns.len(), n_runs), (false, 1, 2));
    }

    #[test]
    fn a_run_as_long_as_asked_will_do_where_one_is_enough() {
        let one = TimingPlan { min_samples: 1, ..plan(None) };
        let (samples, n_runs) = timed(&one, 5e6, 0, 1.0, |_| 5e6);
        assert_eq!((samples.stopped_early, samples.ns.as_slice(), n_runs), (false, &[5e6][..], 1));
        // If cold caches may have slowed it down, another run follows.
        let (samples, n_runs) = timed(&one, 5e6, 10_000_000, 1.0, |at| if at == 0 { 6e6 } else { 5e6 });
        assert_eq!((samples.stopped_early, samples.ns.as_slice(), n_runs), (false, &[5e6][..], 2));
    }

    #[test]
    fn a_first_run_alone_is_not_repeated() {
        let alone = TimingPlan { min_samples: 1, alone_ns: 10e6, ..plan(None) };
        let (samples, n_runs) = timed(&alone, 5e6, 0, 1.0, |_| 4e6);
        assert_eq!((samples.stopped_early, samples.ns.as_slice(), n_runs), (false, &[5e6][..], 0));
        // The first run warms up the caches for the following samples.
        let (samples, n_runs) = timed(&alone, 5e6, 60_000_000, 1.0, |_| 4e6);
        assert_eq!((samples.ns.as_slice(), n_runs), (&[4e6][..], 1));
        let (samples, n_runs) = timed(&TimingPlan { leading_ns: Some(4e6), ..alone }, 5e6, 0, 1.0, |_| 4e6);
        assert_eq!((samples.stopped_early, samples.ns.as_slice(), n_runs), (true, &[5e6][..], 0));
        // Other kernels may have run beside a run that took longer.
        let (samples, n_runs) = timed(&TimingPlan { alone_ns: 9e6, ..alone }, 5e6, 0, 1.0, |_| 4e6);
        assert_eq!((samples.stopped_early, samples.ns.as_slice(), n_runs), (false, &[4e6][..], 1));
    }

    #[test]
    fn sampling_lasts_as_long_as_asked() {
        let (samples, _) = timed(&plan(None), 200e3, 0, 1.0, |_| 200e3);
        assert!(!samples.stopped_early);
        assert!(samples.ns.iter().sum::<f64>() >= 1e6, "{:?}", samples.ns);
    }

    #[test]
    fn few_constants_are_left_in_the_caches_but_nothing_where_all_is_to_be_cold() {
        assert_eq!(emptied(Caches::ColdConstants, FEW_BYTES), Caches::Warm);
        assert_eq!(emptied(Caches::ColdConstants, FEW_BYTES + 1), Caches::ColdConstants);
        assert_eq!(emptied(Caches::Cold, 64), Caches::Cold);
        assert_eq!(emptied(Caches::Warm, 1 << 30), Caches::Warm);
    }

    #[test]
    fn every_run_finds_caches_that_were_emptied_of_constants_but_no_longer_than_the_runs_take() {
        for (flush_ns, expected) in [(0.0, 20), (50e3, 20), (100e3, 10), (5e6, FEW_COLD)] {
            let plan = TimingPlan { min_samples: 1, caches: Caches::ColdConstants, ..plan(None) };
            let (mut n_flushes, mut n_runs) = (0, 0);
            let mut flush = || {
                n_flushes += 1;
                flush_ns
            };
            let mut run = |n: u32| {
                n_runs += n;
                50e3 * f64::from(n)
            };
            let first = First { ns: 50e3, pace: 1.0, checked_ns: 100e3 };
            let size = KernelDemands { n_threads: 1, n_bytes: 0 };
            let subject = TimedKernel { run: &mut run, size, flush: &mut flush, pace: &mut || 1.0 };
            let samples = sample(&plan, &mut Variation::default(), first, subject);
            assert_eq!((samples.ns.len(), n_flushes), (expected, expected), "{flush_ns}");
            // The run that verified it was beside another one: it warms up, and is timed after a flush.
            assert_eq!(n_runs as usize, expected + 2);
        }
    }

    #[test]
    fn a_cold_kernel_is_not_timed_for_longer_because_caches_are_slow_to_empty() {
        // The time limit is a millisecond of the kernel, and ten for the caches.
        for (flush_ns, kernel_ns, expected) in [
            (0.0, 5e3, 200),
            (200e3, 5e3, 50),
            (5e6, 5e3, FEW_COLD),
            (100e6, 5e3, FEW_COLD),
            (100e6, 500e3, 2),
            (100e6, 50e6, 1),
        ] {
            let plan = TimingPlan { min_samples: 1, caches: Caches::Cold, ..plan(None) };
            let (mut clock_ns, mut n_flushes) = (0.0, 0);
            let mut flush = || {
                clock_ns += flush_ns;
                n_flushes += 1;
                flush_ns
            };
            let first = First { ns: kernel_ns, pace: 1.0, checked_ns: 2.0 * kernel_ns };
            let size = KernelDemands { n_threads: 1, n_bytes: 0 };
            let mut run = |n: u32| kernel_ns * f64::from(n);
            let subject = TimedKernel { run: &mut run, size, flush: &mut flush, pace: &mut || 1.0 };
            let samples = sample(&plan, &mut Variation::default(), first, subject);
            assert_eq!((samples.ns.len(), n_flushes), (expected, expected), "{flush_ns} {kernel_ns}");
            assert!(samples.ns.iter().all(|&ns| ns == kernel_ns), "{:?}", samples.ns);
            assert!(clock_ns <= 11e6 || expected <= FEW_COLD, "{clock_ns}");
        }
    }

    #[test]
    fn times_are_those_of_undisturbed_cores() {
        let mut variation = Variation::default();
        // Samples of a kernel that follows the pace, of which every fourth is measured at the second pace.
        let mut at_paces = |paces: [f64; 2]| {
            let n_looks = Cell::new(0);
            let now = || paces[usize::from(n_looks.get() % 4 == 3)];
            let look = || {
                n_looks.set(n_looks.get() + 1);
                now()
            };
            let first = First { ns: 200e3 * paces[0], pace: paces[0], checked_ns: 400e3 };
            let size = KernelDemands { n_threads: 1, n_bytes: 0 };
            let mut run = |n: u32| 200e3 * now() * f64::from(n);
            let subject = TimedKernel { run: &mut run, size, flush: &mut || 0.0, pace: &mut { look } };
            sample(&plan(None), &mut variation, first, subject).ns
        };
        assert!(at_paces([2.0; 2]).iter().all(|&ns| ns == 400e3), "nothing has been learnt");
        for _ in 0..20 {
            at_paces([1.0, 2.0]);
        }
        let (undisturbed, disturbed) = (at_paces([1.0; 2]), at_paces([2.0; 2]));
        assert!(undisturbed.iter().all(|&ns| ns == 200e3), "{undisturbed:?}");
        assert!(disturbed.iter().all(|&ns| ns < 320e3), "{disturbed:?}");
    }
}
