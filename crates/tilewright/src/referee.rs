//! Referee: a race of commands or callables in interleaved rounds, with a verdict by a fixed rule.
//!
//! In each round every contestant has one sample, in a freshly shuffled order, so that disturbances of the
//! machine affect all alike. Two contestants are compared by the logarithms of the ratios of their samples in
//! the same round. If one takes `r` times as long as the other, then after subtracting `ln r` each sign is a
//! fair coin flip, because the order in the round is random: drift, outliers and bursts change the magnitudes
//! and not the signs. Hence Wilcoxon's signed-rank test has its nominal error rate without any assumption
//! about the noise, and its inversion gives a confidence interval of `r`.
//!
//! - A contestant is slower than another if the whole interval of their ratio is above 1; in a race against a
//!   baseline, above the allowed slowdown.
//! - The winner is the contestant that all others are slower than. Without a winner, the contestants that no
//!   other is faster than are tied; the first of them in the given order is the choice, which is thus
//!   deterministic.
//! - [`ERROR`] is the probability that any statement of a race is wrong: it is divided among the pairs, and
//!   among the interim looks at the results.

mod commands;
mod rule;
#[cfg(test)]
mod simulation;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;
use tilewright_search::quantile;

pub use self::commands::CommandRace;
pub(crate) use self::commands::parse_metric;
use self::rule::{Interval, Looks, SignedRank};
use crate::error::Error;

/// Family-wise error rate of a race: the probability that any of its statements is wrong.
pub const ERROR: f64 = 0.01;
/// Equivalence margin: a relative difference below which all remaining contestants are a tie.
pub const PLAIN_TIE: f64 = 0.01;
/// Default maximum of rounds.
pub const MOST_ROUNDS: usize = 1000;
/// Default time of a race if neither time nor rounds are given; a few rounds are run in any case.
const DEFAULT_TIME: Duration = Duration::from_secs(60);
/// Minimum time of a sample of a callable: shorter calls are repeated.
const LEAST_SAMPLE: Duration = Duration::from_millis(1);

/// Rules of a race: its limits, and the question that it answers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rules {
    /// Maximum number of rounds; [`MOST_ROUNDS`] by default.
    pub rounds: Option<usize>,
    /// Time after which no round starts. By default a minute, if `rounds` is not set either, but at least as
    /// many rounds as a verdict needs.
    pub time: Option<Duration>,
    /// Seed of the random orders.
    pub seed: u64,
    /// Allowed slowdown against the first contestant, the baseline, as a share; `None` to find a winner
    /// instead.
    pub allow: Option<f64>,
}

impl Rules {
    /// Error rate of one question among `n` contestants.
    fn error_of_one(&self, n: usize) -> f64 {
        ERROR / if self.allow.is_some() { n - 1 } else { n * (n - 1) }.max(1) as f64
    }

    /// Checks that there are contestants, and enough rounds for a verdict.
    fn check(&self, n: usize) -> Result<(), Error> {
        if n < 2 {
            return Err(Error::input("a race takes two contestants or more"));
        }
        let least = Looks::least_rounds(self.error_of_one(n));
        match self.rounds {
            Some(rounds) if rounds < least => Err(Error::input(format!(
                "{rounds} rounds cannot tell {n} contestants apart at an error rate of 1 % (give {least} or more)"
            ))),
            Some(rounds) if rounds > MOST_ROUNDS => {
                Err(Error::input(format!("{rounds} rounds are too many (give {MOST_ROUNDS} or fewer)")))
            }
            _ if self.allow.is_some_and(|allow| !(0.0..=100.0).contains(&allow)) => {
                Err(Error::input("the slowdown that is allowed is a share from 0 to 100, such as 0.05"))
            }
            _ => Ok(()),
        }
    }
}

/// Reason why a race ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RaceEnd {
    /// Clear verdict that further rounds would not change.
    Plain,
    /// Maximum number of rounds.
    Rounds,
    /// Time limit.
    Time,
    /// Interrupt.
    Interrupted,
}

/// Verdict on a contestant, relative to the winner, to the choice of a tie, or to the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standpoint {
    /// Reference that the others are compared with.
    Reference,
    /// Slower; against a baseline, by more than the allowance.
    Slower,
    /// Within the allowance of the baseline.
    Within,
    /// Indistinguishable with these samples.
    Undecided,
}

/// Result of one contestant. Samples are milliseconds for a time, otherwise in the metric's unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Contestant {
    /// Name, unique in the race.
    pub name: String,
    /// Median sample; `null` without samples.
    pub median: Option<f64>,
    /// First and third quartile of the samples.
    pub quartiles: Option<[f64; 2]>,
    /// Cost relative to the reference's, so that more is worse whatever the metric: 1 for the reference,
    /// `null` without a round.
    pub ratio: Option<f64>,
    /// Confidence interval of the ratio; an unbounded end is `null`.
    pub interval: [Option<f64>; 2],
    /// Verdict.
    pub stands: Standpoint,
    /// Samples, one per round.
    pub samples: Vec<f64>,
}

/// Result of a race.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Raced {
    /// Contestants in the order given.
    pub contestants: Vec<Contestant>,
    /// Winner: the contestant that all others are slower than; `null` if there is none, or against a
    /// baseline.
    pub winner: Option<String>,
    /// Choice: the winner, else the first of the tied ones; the baseline if there is one.
    pub choice: String,
    /// Tied contestants, which none is faster than; empty if there is a winner or a baseline.
    pub tied: Vec<String>,
    /// Allowed slowdown against the baseline, as a share.
    pub allow: Option<f64>,
    /// Contestants that are slower than the baseline by more than the allowance.
    pub slower: Vec<String>,
    /// Number of rounds of the contestants that stayed to the end.
    pub rounds: usize,
    /// Reason for the end.
    pub ended: RaceEnd,
    /// Duration in seconds.
    pub seconds: f64,
    /// Confidence level of all statements together.
    pub confidence: f64,
    /// Seed of the random orders.
    pub seed: u64,
}

/// State of a race.
struct RaceState<'a> {
    rules: &'a Rules,
    /// Cost by contestant and round.
    costs: Vec<Vec<f64>>,
    /// Contestants still in the race.
    left: Vec<usize>,
    /// Error rate of each end of a contestant's interval at the last interim look that it took part in.
    errors: Vec<f64>,
    law: SignedRank,
}

/// Progress callback: receives the number of finished rounds and of remaining contestants.
pub type TellRound<'a> = &'a mut dyn FnMut(usize, usize);

/// Races contestants. `sample` returns the cost of a run of the contestant at an index, a positive number of
/// which less is better, or `None` to end the race; `shown` converts costs to samples. Repeated names get a
/// number appended.
///
/// # Errors
/// Bad input if the rules do not fit; errors of `sample`.
pub fn referee(
    names: &[String],
    rules: &Rules,
    sample: &mut dyn FnMut(usize) -> Result<Option<f64>, Error>,
    shown: &dyn Fn(f64) -> f64,
    tell: TellRound,
) -> Result<Raced, Error> {
    rules.check(names.len())?;
    let start = Instant::now();
    let mut race = RaceState::new(names.len(), rules);
    let mut looks = Looks::new(rules.error_of_one(names.len()));
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(rules.seed);
    let mut n_rounds = 0;
    let ended = loop {
        let ended = match race.round(&mut rng, sample)? {
            false => Some(RaceEnd::Interrupted),
            true => {
                n_rounds += 1;
                race.is_over(n_rounds, start.elapsed(), looks.error)
            }
        };
        let is_plain = looks.look(n_rounds, ended.is_some()).is_some_and(|error| race.judge(error));
        tell(n_rounds, race.left.len());
        if is_plain {
            break RaceEnd::Plain;
        }
        if let Some(ended) = ended {
            break ended;
        }
    };
    let end = RaceOutcome { ended, rounds: n_rounds, seconds: start.elapsed().as_secs_f64() };
    Ok(race.raced(&distinct(names), end, shown))
}

/// Races closures by wall-clock time, each called once before the first round as a warm-up. Calls shorter
/// than a millisecond are repeated, and a sample is their mean. Samples are in milliseconds.
///
/// All closures run in this process, so that each finds the memory and the caches as the previous one left
/// them.
///
/// # Errors
/// Bad input if the rules do not fit.
pub fn race(contestants: &mut [(&str, &mut dyn FnMut())], rules: &Rules) -> Result<Raced, Error> {
    let names: Vec<String> = contestants.iter().map(|(name, _)| (*name).to_owned()).collect();
    race_calls(&names, rules, &mut |at| {
        (contestants[at].1)();
        ControlFlow::Continue(())
    })
}

/// Races calls as [`race`] does, by a function that takes the contestant's index and can cancel the race.
///
/// # Errors
/// Bad input if the rules do not fit.
pub fn race_calls(
    names: &[String],
    rules: &Rules,
    call: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Raced, Error> {
    rules.check(names.len())?;
    let mut time = |at: usize, n_calls: u32| {
        let start = Instant::now();
        let is_done = (0..n_calls).try_for_each(|_| call(at)).is_continue();
        // The clock may not have advanced in between.
        is_done.then(|| (start.elapsed() / n_calls).max(Duration::from_nanos(1)))
    };
    let calls_of = |time: Duration| (LEAST_SAMPLE.as_nanos() / time.as_nanos()).clamp(1, 1_000_000) as u32;
    // If the race is aborted here, it is aborted again in the first round.
    let mut n_calls = vec![1; names.len()];
    for (at, n) in n_calls.iter_mut().enumerate() {
        let Some(first) = time(at, 1).and_then(|_| time(at, 1)) else { break };
        *n = calls_of(first);
    }
    let mut sample = |at: usize| Ok(time(at, n_calls[at]).map(|time| time.as_secs_f64() * 1e3));
    referee(names, rules, &mut sample, &|ms| ms, &mut |_, _| {})
}

/// Makes the names distinct.
fn distinct(names: &[String]) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for name in names {
        let numbered = (2..).map(|number| format!("{name} ({number})"));
        let fresh = std::iter::once(name.clone()).chain(numbered).find(|name| !all.contains(name));
        all.extend(fresh);
    }
    all
}

/// End of a race.
struct RaceOutcome {
    ended: RaceEnd,
    rounds: usize,
    seconds: f64,
}

impl RaceState<'_> {
    fn new(n: usize, rules: &Rules) -> RaceState<'_> {
        RaceState {
            rules,
            costs: vec![Vec::new(); n],
            left: (0..n).collect(),
            errors: vec![0.0; n],
            law: SignedRank::new(),
        }
    }

    /// Takes a sample of each remaining contestant; returns whether all have one. An aborted round does not
    /// count.
    fn round(
        &mut self,
        rng: &mut Xoshiro256PlusPlus,
        sample: &mut dyn FnMut(usize) -> Result<Option<f64>, Error>,
    ) -> Result<bool, Error> {
        let mut order = self.left.clone();
        order.shuffle(rng);
        let mut costs = Vec::new();
        for &at in &order {
            let Some(cost) = sample(at)? else { return Ok(false) };
            costs.push(cost);
        }
        order.iter().zip(costs).for_each(|(&at, cost)| self.costs[at].push(cost));
        self.law.advance();
        Ok(true)
    }

    /// Reason to end the race after this many rounds and this time, if any.
    fn is_over(&self, n_rounds: usize, elapsed: Duration, error: f64) -> Option<RaceEnd> {
        let (time, least) = match (self.rules.time, self.rules.rounds) {
            (Some(time), _) => (time, 0),
            (None, Some(_)) => (Duration::MAX, 0),
            (None, None) => (DEFAULT_TIME, Looks::least_rounds(error)),
        };
        let is_late = elapsed + elapsed / n_rounds as u32 > time && n_rounds >= least;
        match () {
            () if n_rounds >= self.rules.rounds.unwrap_or(MOST_ROUNDS) => Some(RaceEnd::Rounds),
            () if is_late => Some(RaceEnd::Time),
            () => None,
        }
    }

    /// Interval of a contestant's log-ratio to another, over the rounds that both took part in.
    fn interval(&self, at: usize, to: usize, law: &SignedRank, error: f64) -> Interval {
        let differences: Vec<f64> = self.costs[at].iter().zip(&self.costs[to]).map(|(a, b)| a.ln() - b.ln()).collect();
        law.interval(&differences, error)
    }

    /// Examines the results with this error rate: removes contestants with a final verdict, and returns
    /// whether the verdict on the race is clear.
    fn judge(&mut self, error: f64) -> bool {
        self.left.iter().for_each(|&at| self.errors[at] = error);
        let interval = |at: usize, to: usize| self.interval(at, to, &self.law, error);
        if let Some(allow) = self.rules.allow {
            let limit = allow.ln_1p();
            let is_open = |at: usize| {
                let Interval { low, high, .. } = interval(at, 0);
                low <= limit && high > limit
            };
            self.left = self.left.iter().copied().filter(|&at| at == 0 || is_open(at)).collect();
            return self.left.len() == 1;
        }
        let all = &self.left;
        let is_beaten = |at: usize| all.iter().any(|&to| at != to && interval(at, to).low > 0.0);
        let unbeaten: Vec<usize> = all.iter().copied().filter(|&at| !is_beaten(at)).collect();
        let is_near = |at: usize, to: usize| {
            let (Interval { low, high, .. }, limit) = (interval(at, to), PLAIN_TIE.ln_1p());
            at >= to || low > -limit && high < limit
        };
        let is_plain = unbeaten.iter().all(|&at| unbeaten.iter().all(|&to| is_near(at, to)));
        // Medians of ratios need not be transitive; in a cycle there is no winner.
        if !unbeaten.is_empty() {
            self.left = unbeaten;
        }
        is_plain && !self.left.is_empty()
    }

    /// Makes the result, with the names of the contestants.
    fn raced(&self, names: &[String], end: RaceOutcome, shown: &dyn Fn(f64) -> f64) -> Raced {
        let allow = self.rules.allow;
        let reference = if allow.is_some() { 0 } else { self.left.first().copied().unwrap_or(0) };
        let contestants: Vec<Contestant> =
            (0..names.len()).map(|at| self.contestant(at, reference, names[at].clone(), shown)).collect();
        let left: Vec<String> = self.left.iter().map(|&at| names[at].clone()).collect();
        let slower = contestants.iter().filter(|one| allow.is_some() && one.stands == Standpoint::Slower);
        Raced {
            slower: slower.map(|one| one.name.clone()).collect(),
            winner: if allow.is_none() && left.len() == 1 { left.first().cloned() } else { None },
            choice: names[reference].clone(),
            tied: if allow.is_none() && left.len() > 1 { left } else { Vec::new() },
            contestants,
            allow,
            rounds: end.rounds,
            ended: end.ended,
            seconds: end.seconds,
            confidence: 1.0 - ERROR,
            seed: self.rules.seed,
        }
    }

    fn contestant(&self, at: usize, reference: usize, name: String, shown: &dyn Fn(f64) -> f64) -> Contestant {
        let n = self.costs[at].len().min(self.costs[reference].len());
        let error = if self.costs[at].len() <= self.costs[reference].len() { at } else { reference };
        let law = if n == self.costs[self.left[0]].len() { self.law.clone() } else { SignedRank::of(n) };
        let interval = self.interval(at, reference, &law, self.errors[error]);
        let limit = self.rules.allow.map(f64::ln_1p);
        let stands = match limit {
            _ if at == reference => Standpoint::Reference,
            Some(limit) if interval.low > limit => Standpoint::Slower,
            Some(limit) if interval.high <= limit => Standpoint::Within,
            None if !self.left.contains(&at) => Standpoint::Slower,
            _ => Standpoint::Undecided,
        };
        let known = |end: f64| Some(end.exp()).filter(|_| n > 0 && end.is_finite() && at != reference);
        let samples: Vec<f64> = self.costs[at].iter().map(|&cost| shown(cost)).collect();
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let of = |part: f64| (!sorted.is_empty()).then(|| quantile(&sorted, part));
        Contestant {
            name,
            median: of(0.5),
            quartiles: of(0.25).zip(of(0.75)).map(|(low, high)| [low, high]),
            ratio: (n > 0).then(|| if at == reference { 1.0 } else { interval.middle.exp() }),
            interval: [known(interval.low), known(interval.high)],
            stands,
            samples,
        }
    }
}
