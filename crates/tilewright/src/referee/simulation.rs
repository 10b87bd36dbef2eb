//! Error rates and power of the referee on simulated machines.

use super::*;
use rand::RngExt;

/// Noise of a simulated machine: speeds that drift and swing, periods in which other processes take a share
/// of it, outliers, a slower position in the round, and noise of each run.
struct Noisy {
    rng: Xoshiro256PlusPlus,
    n_runs: u64,
    log_drift: f64,
    is_busy: bool,
    /// Standard deviation of the logarithm of each run.
    sigma: f64,
}

impl Noisy {
    fn new(seed: u64, sigma: f64) -> Noisy {
        let rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ 0x5eed);
        Noisy { rng, n_runs: 0, log_drift: 0.0, is_busy: false, sigma }
    }

    /// Approximately normal random number, with mean 0 and variance 1.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.rng.random::<f64>()).sum::<f64>() - 6.0
    }

    /// Random factor by which a run takes longer.
    fn factor(&mut self) -> f64 {
        self.n_runs += 1;
        self.log_drift += 0.004 * self.normal();
        if self.rng.random_bool(0.03) {
            self.is_busy = !self.is_busy;
        }
        let swing = 0.1 * (self.n_runs as f64 / 40.0).sin();
        let busy = if self.is_busy { 0.3 } else { 0.0 };
        let place = if self.n_runs.is_multiple_of(2) { 0.01 } else { 0.0 };
        // Pareto distribution without a variance: one in a hundred outliers takes 22 times as long.
        let outlier = if self.rng.random_bool(0.05) { -self.rng.random::<f64>().max(1e-9).ln() / 1.5 } else { 0.0 };
        (self.log_drift + swing + busy + place + outlier + self.sigma * self.normal()).exp()
    }
}

/// Simulates a race of two contestants, of which the second takes `slowdown` times as long as the first.
fn simulated(seed: u64, slowdown: f64, sigma: f64, rules: &Rules) -> Raced {
    let mut noisy = Noisy::new(seed, sigma);
    let mut sample = |at: usize| Ok(Some(10.0 * noisy.factor() * if at == 1 { slowdown } else { 1.0 }));
    let rules = Rules { seed, ..rules.clone() };
    referee(&["a".into(), "b".into()], &rules, &mut sample, &|cost| cost, &mut |_, _| {}).unwrap()
}

const SIGMA: f64 = 0.04;

fn allowing(rounds: usize) -> Rules {
    Rules { rounds: Some(rounds), time: Some(Duration::MAX / 4), allow: Some(0.05), ..Rules::default() }
}

#[test]
fn alarms_are_rarely_false() {
    let n_alarms = |slowdown: f64, sigma: f64, rounds: usize| {
        (0..1000).filter(|&seed| !simulated(seed, slowdown, sigma, &allowing(rounds)).slower.is_empty()).count()
    };
    assert!(n_alarms(1.0, SIGMA, 1000) <= 1);
    assert!(n_alarms(1.0, 0.2, 60) <= 1, "so much noise");
    // A slowdown exactly equal to the allowance is the hardest case.
    assert!(n_alarms(1.05, SIGMA, 100) <= 10);
}

#[test]
fn slowdowns_are_found() {
    let all: Vec<Raced> = (0..200).map(|seed| simulated(seed, 1.1, SIGMA, &allowing(1000))).collect();
    let n_found = all.iter().filter(|raced| raced.slower == ["b"]).count();
    let mut rounds: Vec<usize> = all.iter().map(|raced| raced.rounds).collect();
    rounds.sort_unstable();
    assert!(n_found >= 198, "{n_found}, {rounds:?}");
    assert!(rounds[100] <= 120, "{rounds:?}");
}

#[test]
fn the_winner_is_the_same_each_time() {
    let rules = Rules { rounds: Some(200), time: Some(Duration::MAX / 4), ..Rules::default() };
    for (slowdown, sigma) in [(1.01, SIGMA), (1.01, 0.01), (1.03, SIGMA)] {
        let all: Vec<Raced> = (0..60).map(|seed| simulated(seed, slowdown, sigma, &rules)).collect();
        let n_wrong = all.iter().filter(|raced| raced.winner.as_deref() == Some("b")).count();
        assert!(n_wrong <= 1, "{n_wrong} of 60: {slowdown}, {sigma}");
        assert!(all.iter().all(|raced| raced.winner.is_some() != (raced.tied == ["a", "b"])));
    }
    let n_found = (0..60).filter(|&seed| simulated(seed, 1.03, 0.01, &rules).winner.as_deref() == Some("a")).count();
    assert!(n_found >= 59, "{n_found}");
    // Equal contestants must have no winner: the error rate is 1 %.
    let rules = Rules { rounds: Some(100), ..rules };
    let n_winners = (0..1000).filter(|&seed| simulated(seed, 1.0, SIGMA, &rules).winner.is_some()).count();
    assert!(n_winners <= 10, "{n_winners}");
}

#[test]
fn plainly_slower_ones_leave_early() {
    let mut noisy = Noisy::new(1, 0.01);
    let mut n_runs = [0; 4];
    let mut sample = |at: usize| {
        n_runs[at] += 1;
        Ok(Some(noisy.factor() * [1.5, 1.0, 1.0, 2.0][at]))
    };
    let names = ["x", "y", "y", "z"].map(str::to_owned);
    let rules = Rules { rounds: Some(300), ..Rules::default() };
    let raced = referee(&names, &rules, &mut sample, &|cost| cost, &mut |_, _| {}).unwrap();
    assert_eq!((raced.winner.as_deref(), raced.choice.as_str()), (None, "y"));
    assert_eq!(raced.tied, ["y", "y (2)"]);
    assert!(n_runs[0] < 50 && n_runs[3] < 50 && n_runs[1] == n_runs[2] && n_runs[1] > 50, "{n_runs:?}");
    let x = &raced.contestants[0];
    assert_eq!((x.stands, x.samples.len()), (Standpoint::Slower, n_runs[0]));
    assert!(x.interval[0].unwrap() < 1.5 && x.interval[1].unwrap() > 1.5, "{x:?}");
}

#[test]
fn equal_numbers_are_a_tie() {
    let mut sample = |_| Ok(Some(3.0));
    let names = ["x", "y"].map(str::to_owned);
    let raced = referee(&names, &Rules::default(), &mut sample, &|cost| cost, &mut |_, _| {}).unwrap();
    assert_eq!((raced.tied.len(), raced.ended, raced.rounds), (2, RaceEnd::Plain, 10));
    let ci = Rules { allow: Some(0.0), ..Rules::default() };
    let raced = referee(&names, &ci, &mut sample, &|cost| cost, &mut |_, _| {}).unwrap();
    assert_eq!((raced.slower.len(), raced.contestants[1].stands), (0, Standpoint::Within));
}

#[test]
fn rules_that_cannot_tell_are_refused() {
    let check = |rules: Rules, n: usize, expected: &str| {
        let names = vec!["x".to_owned(); n];
        let refused = referee(&names, &rules, &mut |_| Ok(Some(1.0)), &|cost| cost, &mut |_, _| {}).unwrap_err();
        assert!(refused.is_input() && refused.to_string().contains(expected), "{refused}");
    };
    let rounds = |n| Rules { rounds: Some(n), ..Rules::default() };
    check(Rules::default(), 1, "two contestants");
    check(rounds(5), 2, "give 9 or more");
    check(Rules { allow: Some(0.05), ..rounds(7) }, 2, "give 8 or more");
    check(rounds(1001), 2, "give 1000 or fewer");
    check(Rules { allow: Some(f64::NAN), ..Rules::default() }, 2, "a share from 0");
}

#[test]
fn callables_race() {
    let spin = |n: u64| (0..n).fold(1u64, |x, i| std::hint::black_box(x.wrapping_mul(31) ^ i));
    let (mut short, mut long) = (|| assert_ne!(spin(20_000), 0), || assert_ne!(spin(60_000), 0));
    let rules = Rules { rounds: Some(200), ..Rules::default() };
    let raced = race(&mut [("long", &mut long), ("short", &mut short)], &rules).unwrap();
    assert_eq!(raced.winner.as_deref(), Some("short"), "{raced:?}");
    assert!(raced.contestants[0].ratio.is_some_and(|ratio| ratio > 2.0));
}
