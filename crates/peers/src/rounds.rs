//! Several implementations of the same computation, measured in interleaved rounds.

use std::time::Instant;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_device::device::RoundLength;
use tilewright_search::Timing;

/// Minimum length of a sample, which averages several shorter runs.
pub(super) const SAMPLE_NS: f64 = 100_000.0;

/// Runs a round, after a warm-up run; returns nanoseconds per run, one value for each sample.
///
/// Times are wall-clock times: the implementation may have threads of its own, even if it uses one at a time.
///
/// # Errors
///
/// First error of a run.
pub fn wall_samples_ns<E>(round: RoundLength, mut run: impl FnMut() -> Result<(), E>) -> Result<Vec<f64>, E> {
    let mut timed = |n_runs: u32| {
        let start = Instant::now();
        (0..n_runs).try_for_each(|_| run())?;
        Ok(start.elapsed().as_nanos() as f64 / f64::from(n_runs))
    };
    let n_runs = (SAMPLE_NS / timed(1)?.max(1.0)).ceil() as u32;
    let (start, mut samples_ns) = (Instant::now(), Vec::new());
    while samples_ns.len() < round.min_samples.max(1) as usize || start.elapsed() < round.time {
        samples_ns.push(timed(n_runs)?);
    }
    Ok(samples_ns)
}

/// Function that runs a round and returns nanoseconds per run, one value for each sample, or the reason why
/// it cannot.
type RunRound<'a> = Box<dyn FnMut(RoundLength) -> Result<Vec<f64>, String> + 'a>;

/// Implementation in a comparison.
pub struct Entrant<'a> {
    run: RunRound<'a>,
    medians_ns: Vec<f64>,
    failure: Option<String>,
}

impl<'a> Entrant<'a> {
    /// Makes an entrant from the function that runs a round; between rounds it must keep no core busy.
    pub fn new(run: impl FnMut(RoundLength) -> Result<Vec<f64>, String> + 'a) -> Entrant<'a> {
        Entrant { run: Box::new(run), medians_ns: Vec::new(), failure: None }
    }

    fn round(&mut self, round: RoundLength) {
        match (self.run)(round) {
            Ok(samples_ns) => self.medians_ns.push(Timing::of_samples(&samples_ns, false).median_ns),
            Err(reason) => self.failure = Some(reason),
        }
    }
}

/// Runs rounds, each in a random order of the entrants, and returns the timing of each entrant over the
/// medians of its rounds, in their order. An entrant that fails once is not run again.
///
/// # Errors
///
/// For each entrant, the reason of its failure.
///
/// # Panics
///
/// If there is no round.
pub fn run_rounds(
    mut entrants: Vec<Entrant<'_>>,
    n_rounds: u32,
    round: RoundLength,
    seed: u64,
) -> Vec<Result<Timing, String>> {
    assert!(n_rounds > 0, "a time needs a round");
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..entrants.len()).collect();
    for _ in 0..n_rounds {
        order.shuffle(&mut rng);
        for &at in &order {
            if entrants[at].failure.is_none() {
                entrants[at].round(round);
            }
        }
    }
    let result = |entrant: Entrant<'_>| match entrant.failure {
        None => Ok(Timing::of_samples(&entrant.medians_ns, false)),
        Some(reason) => Err(reason),
    };
    entrants.into_iter().map(result).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use super::*;

    #[test]
    fn samples_are_as_many_and_as_long_as_asked_and_a_failure_ends_them() {
        let mut n_runs = 0;
        let mut run = |most: u32| {
            n_runs += 1;
            std::thread::sleep(Duration::from_millis(1));
            if n_runs > most { Err("no more") } else { Ok(()) }
        };
        let round = |ms| RoundLength { time: Duration::from_millis(ms), min_samples: 3 };
        let few = wall_samples_ns(round(0), || run(100)).expect("it runs");
        assert!(few.len() == 3 && few.iter().all(|&ns| ns >= 1e6), "{few:?}");
        assert_eq!(wall_samples_ns(round(1_000_000), || run(20)), Err("no more"));
        assert_eq!(n_runs, 21);
    }

    #[test]
    fn rounds_are_interleaved_and_a_failure_is_one_entrants() {
        let ran = RefCell::new(Vec::new());
        let entrant = |at: usize, fails_after: usize| {
            let (ran, mut n_rounds) = (&ran, 0);
            Entrant::new(move |_| {
                n_rounds += 1;
                ran.borrow_mut().push(at);
                if n_rounds > fails_after { Err(format!("{at} fails")) } else { Ok(vec![1.0, at as f64, 9.0]) }
            })
        };
        let round = RoundLength { time: Duration::ZERO, min_samples: 3 };
        let results = run_rounds(vec![entrant(3, 10), entrant(4, 2), entrant(5, 10)], 6, round, 1);
        let medians: Vec<Result<f64, String>> = results.into_iter().map(|r| r.map(|t| t.median_ns)).collect();
        assert_eq!(medians, [Ok(3.0), Err("4 fails".to_owned()), Ok(5.0)]);
        let ran = ran.into_inner();
        for all in ran[..9].chunks(3) {
            let mut sorted = all.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, [3, 4, 5], "everybody once a round: {ran:?}");
        }
        assert_eq!(ran.len(), 6 + 3 + 6, "{ran:?}");
    }
}
