//! Timing a kernel that has been found right.

use crate::protocol::Plan;
use std::time::Instant;

/// A sample shorter than this averages several runs, so that reading the clock does not count.
const MIN_SAMPLE_NS: f64 = 30_000.0;
/// A kernel is not timed where the run that checked it, beside other work, took this many times the best …
const HOPELESS_CHECKED: f64 = 2.0;
/// … or this many times, where that run took longer than this …
const HOPELESS_CHECKED_LONG: f64 = 1.05;
const CHECKED_LONG_NS: f64 = 1e9;
/// … nor timed again where its first run alone took this many times the best …
const HOPELESS_FIRST: f64 = 1.15;
/// … where such a run is long enough for cold caches not to count.
const LONG_NS: f64 = 1e6;
/// A first run longer than this …
const VERY_LONG_NS: f64 = 4e6;
/// … takes more than this many times the best only where the kernel does.
const HOPELESS_VERY_LONG: f64 = 1.05;
/// A kernel whose fastest warm sample takes this many times the best is not sampled further …
const HOPELESS_WARM: f64 = 1.05;
/// … once it was sampled for so long.
const ENOUGH_NS: f64 = 0.5e6;
/// A warm-up that takes this many times the time to spend is the only sample.
const WARM_ENOUGH: f64 = 10.0;
/// Samples beyond which nothing is learnt.
const MOST_SAMPLES: usize = 1000;

/// Samples of a kernel's run time.
pub struct Samples {
    /// Nanoseconds a run.
    pub ns: Vec<f64>,
    /// Whether sampling ended early.
    pub stopped_early: bool,
}

/// Times `run`, which has been run before, when it was checked.
///
/// With `flush`, which empties the caches, each sample is one run after it.
pub fn sample(plan: &Plan, run: &mut dyn FnMut(), flush: &mut dyn FnMut()) -> Samples {
    let hopeless = |ns: f64, factor: f64| plan.best_ns.is_some_and(|best| ns > factor * best);
    let enough = |ns: f64| Samples { ns: vec![ns], stopped_early: true };
    let checked_ns = plan.first_ns;
    let factor = if checked_ns > CHECKED_LONG_NS { HOPELESS_CHECKED_LONG } else { HOPELESS_CHECKED };
    if !plan.cold && checked_ns > LONG_NS && hopeless(checked_ns, factor) {
        return enough(checked_ns);
    }
    let mut timed = |n_runs: u32| {
        let start = Instant::now();
        for _ in 0..n_runs {
            run();
        }
        start.elapsed().as_nanos() as f64 / f64::from(n_runs)
    };
    // The first run warms up: other kernels ran since the one that checked this one.
    let first_ns = timed(1);
    let factor = if first_ns > VERY_LONG_NS { HOPELESS_VERY_LONG } else { HOPELESS_FIRST };
    if !plan.cold && first_ns > LONG_NS && hopeless(first_ns, factor) {
        return enough(first_ns);
    }
    if !plan.cold && first_ns > WARM_ENOUGH * plan.min_time_ns {
        return Samples { ns: vec![first_ns], stopped_early: false };
    }
    let estimate = if first_ns < LONG_NS { timed(1).min(first_ns) } else { first_ns };
    let n_runs = if plan.cold { 1 } else { (MIN_SAMPLE_NS / estimate.max(1.0)).ceil().clamp(1.0, 1e6) as u32 };
    let (mut ns, mut total, mut fastest) = (Vec::new(), 0.0, f64::INFINITY);
    while ns.len() < MOST_SAMPLES && (total < plan.min_time_ns || ns.len() < plan.min_samples as usize) {
        if plan.cold {
            flush();
        }
        let sample = timed(n_runs);
        ns.push(sample);
        total += sample * f64::from(n_runs);
        fastest = fastest.min(sample);
        if total >= ENOUGH_NS && hopeless(fastest, HOPELESS_WARM) {
            return Samples { ns, stopped_early: true };
        }
    }
    Samples { ns, stopped_early: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(first_ns: f64, best_ns: Option<f64>) -> Plan {
        Plan { min_time_ns: 1e6, min_samples: 3, first_ns, best_ns, cold: false }
    }

    #[test]
    fn a_hopeless_kernel_is_not_run_again() {
        let mut runs = 0;
        let samples = sample(&plan(5e6, Some(1e6)), &mut || runs += 1, &mut || {});
        assert!(samples.stopped_early);
        assert_eq!((samples.ns.as_slice(), runs), (&[5e6][..], 0));
    }

    #[test]
    fn a_very_long_run_is_its_own_sample() {
        let mut runs = 0;
        let mut run = || {
            runs += 1;
            std::thread::sleep(std::time::Duration::from_millis(11));
        };
        let samples = sample(&plan(11e6, None), &mut run, &mut || {});
        assert_eq!((samples.stopped_early, samples.ns.len(), runs), (false, 1, 1));
    }

    #[test]
    fn sampling_lasts_as_long_as_asked() {
        let spin = || {
            let start = Instant::now();
            while start.elapsed().as_micros() < 50 {}
        };
        let samples = sample(&plan(50e3, None), &mut { spin }, &mut || {});
        assert!(!samples.stopped_early);
        assert!(samples.ns.iter().sum::<f64>() >= 1e6, "{:?}", samples.ns);
    }
}
