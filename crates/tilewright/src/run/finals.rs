//! Final race of a run: the best candidates are measured against each other, so that noise does not choose
//! the winner.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tilewright_search::{
    BoxError, Candidate, Config, ErrorClass, Measure, Next, Outcome, RaceLimits, Standing, Subject, Timing, Trial,
    is_tie,
};

use crate::observer::{Note, Observer};

/// Interval between checks for an interrupt.
const LOOK: Duration = Duration::from_millis(50);
/// Maximum ratio to the leading time at which a candidate may in truth be the fastest.
const NEAR: f64 = 1.3;
/// Rank of the leading trial that admission compares with, so that one or two lucky timings exclude nothing.
const N_LEADING: usize = 3;
/// Maximum number of candidates that are measured again: enough to include one that was measured in a slow
/// moment.
const MOST_LEADERS: u64 = 24;
/// Time for all rounds together.
const TIME: Duration = Duration::from_secs(5);
/// Time for all rounds together after an interrupt, when the user waits.
const TIME_INTERRUPTED: Duration = Duration::from_secs(1);
/// Maximum time for all rounds of a race, as one part in this many of the search's time. With builds and
/// checks a race takes [`RaceLimits::GOAL`] times as long, so that it is shorter than the search.
const PART_OF_SEARCH: u32 = 4;
/// Time up to which the rounds of a race are not shortened, however short the search was.
const FEW_ROUNDS: Duration = Duration::from_millis(500);
/// Bounds of the time of a whole race, which takes no longer than the search: the lower one suffices to race
/// a few candidates, and a race that reaches the upper one hangs.
const SHORTEST_RACE: Duration = Duration::from_secs(1);
const LONGEST_RACE: Duration = Duration::from_secs(60);
/// Time limit of the untuned kernel, with its build and verification, after a long search and after the
/// shortest.
const UNTUNED_LIMIT: Duration = Duration::from_secs(3);
const SHORTEST_UNTUNED_LIMIT: Duration = Duration::from_millis(100);
/// Share of that time within which a run of the untuned kernel must end.
const PART_FOR_UNTUNED_RUN: f64 = 0.75;

/// Time limits of the end of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndLimits {
    /// Time for all rounds of the race, usually kept.
    pub rounds: Duration,
    /// Time for the race as a whole.
    pub race: Duration,
    /// Time for the untuned kernel, its build and verification included.
    pub untuned: Duration,
}

impl EndLimits {
    /// Limits after a search of this length; `None` for any.
    pub fn of(search: Option<Duration>) -> EndLimits {
        let rounds = search.map_or(TIME, |time| TIME.min(time / PART_OF_SEARCH));
        let race = search.unwrap_or(LONGEST_RACE).clamp(SHORTEST_RACE, LONGEST_RACE);
        EndLimits { rounds, race, untuned: (2 * rounds).clamp(SHORTEST_UNTUNED_LIMIT, UNTUNED_LIMIT) }
    }

    /// Limits reduced to fit the actual length of the search.
    pub fn after(self, search: Duration) -> EndLimits {
        let rounds = self.rounds.min((search / PART_OF_SEARCH).max(FEW_ROUNDS));
        EndLimits { rounds, untuned: self.untuned.min((2 * rounds).max(SHORTEST_UNTUNED_LIMIT)), ..self }
    }

    /// Limits when the user waits for the end.
    fn of_interrupted(self) -> EndLimits {
        let rounds = self.rounds.min(TIME_INTERRUPTED);
        EndLimits { rounds, race: self.race.min(2 * TIME_INTERRUPTED), untuned: Duration::ZERO }
    }
}

/// Result of the end of a run.
#[derive(Debug)]
pub enum RunEnd {
    /// Race with a winner.
    Raced(Finals),
    /// No correct candidate, or none that was correct again.
    NoLeader,
    /// Too little time for a round.
    NoTime,
}

impl RunEnd {
    /// Race, if there was one.
    pub(crate) fn finals(&self) -> Option<&Finals> {
        match self {
            RunEnd::Raced(finals) => Some(finals),
            RunEnd::NoLeader | RunEnd::NoTime => None,
        }
    }
}

/// Result of the final race.
#[derive(Debug)]
pub struct Finals {
    /// Finalists, fastest first, at least one.
    pub ranking: Vec<Leader>,
    /// Result of the untuned kernel.
    pub untuned: Untuned,
    /// Time spent on the untuned kernel.
    pub untuned_time: Duration,
}

/// Finalist of the race.
#[derive(Debug)]
pub struct Leader {
    /// Configuration of the finalist.
    pub config: Config,
    /// Timing over its rounds.
    pub timing: Timing,
    /// First quartile of its rounds in nanoseconds per run, by which it is ranked.
    pub quartile_ns: f64,
    /// Relative error of its result, ‖out − reference‖ / ‖reference‖, if known.
    pub relative_error: Option<f64>,
}

/// Result of the untuned kernel: the first guess, which runs if nothing is recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum Untuned {
    /// Measured; in the same rounds as the winner if about as fast.
    Measured {
        /// Nanoseconds per run.
        ns: f64,
    },
    /// Equal to the winner.
    Winner {
        /// Nanoseconds per run.
        ns: f64,
    },
    /// Stopped at a time limit.
    SlowerThan {
        /// Time limit.
        limit: Duration,
    },
    /// Not measured.
    #[default]
    Failed,
}

impl Untuned {
    /// Nanoseconds per run, if known.
    pub fn ns(self) -> Option<f64> {
        match self {
            Untuned::Measured { ns } | Untuned::Winner { ns } => Some(ns),
            Untuned::SlowerThan { .. } | Untuned::Failed => None,
        }
    }
}

impl Finals {
    /// Margin of the winner: the share by which the runner-up is slower; `None` for a single finalist.
    pub fn margin(&self) -> Option<f64> {
        match self.ranking.as_slice() {
            [first, second, ..] => Some((second.quartile_ns / first.quartile_ns - 1.0).max(0.0)),
            _ => None,
        }
    }

    /// Relative spread of the winner's or the runner-up's rounds, the larger one.
    pub fn spread(&self) -> f64 {
        self.ranking.iter().take(2).map(|leader| leader.timing.spread).fold(0.0, f64::max)
    }

    /// Whether winner and runner-up are statistically indistinguishable.
    pub fn is_tie(&self) -> bool {
        self.margin().is_some_and(|margin| is_tie(margin, self.spread()))
    }
}

/// Trials from which the finalists are taken.
#[derive(Clone, Copy)]
pub struct Contenders<'a> {
    /// Space of the trials, with the descriptions of its configurations.
    pub subject: Subject<'a>,
    /// Trials, valid or not.
    pub trials: &'a [Trial],
    /// Imported configurations, whose times may be from another machine: they race in addition to the best
    /// measured ones, and displace none of them.
    pub imported: &'a HashSet<Config>,
    /// Nanoseconds that a run is expected to take, where the cost of a trial is no time.
    pub run_ns: Option<f64>,
}

impl Contenders<'_> {
    /// Run time of the best trial in nanoseconds; infinite without a valid one.
    fn best_ns(&self) -> f64 {
        let costs = self.trials.iter().map(|trial| trial.outcome.cost());
        self.run_ns.unwrap_or_else(|| costs.fold(f64::INFINITY, f64::min))
    }
}

/// Races the best candidates, and then measures the baseline.
///
/// # Errors
/// If workers do not start.
pub fn run(
    measure: &mut dyn Measure,
    contenders: Contenders,
    baseline: Option<Candidate>,
    limits: EndLimits,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<RunEnd, BoxError> {
    let is_stopped = || stop.load(Ordering::Relaxed);
    // A user who interrupts the search waits for a short race; an interrupt during a race ends it.
    let was_stopped = is_stopped();
    let limits = if was_stopped { limits.of_interrupted() } else { limits };
    // The limit must allow for a candidate that is built and verified and has a round.
    let run_time = Duration::try_from_secs_f64(contenders.best_ns() / 1e9).unwrap_or_default();
    if 3 * run_time > limits.race {
        return Ok(RunEnd::NoTime);
    }
    let start = Instant::now();
    let mut ranking = rank(measure, contenders, limits, (!was_stopped).then_some(stop), observer)?;
    let is_late = start.elapsed() + run_time >= limits.race || is_stopped() && !was_stopped;
    if ranking.is_empty() {
        let is_any_right = contenders.trials.iter().any(|trial| trial.outcome.timing().is_some());
        return Ok(if is_any_right && is_late { RunEnd::NoTime } else { RunEnd::NoLeader });
    }
    let start = Instant::now();
    let untuned = match baseline {
        Some(baseline) => compare(measure, contenders, &mut ranking, baseline, limits.untuned, stop)?,
        None => Untuned::Failed,
    };
    Ok(RunEnd::Raced(Finals { ranking, untuned, untuned_time: start.elapsed() }))
}

/// Races the best candidates within these limits, and until `stop` is raised. Returns them fastest first,
/// without those that had no round; empty if no trial is valid or there was too little time for a round.
///
/// # Errors
/// If workers do not start.
pub fn rank(
    measure: &mut dyn Measure,
    contenders: Contenders,
    limits: EndLimits,
    stop: Option<&AtomicBool>,
    observer: &dyn Observer,
) -> Result<Vec<Leader>, BoxError> {
    let Contenders { subject, trials, imported, run_ns } = contenders;
    let limits = RaceLimits { rounds: limits.rounds, total: limits.race, best_ns: contenders.best_ns() };
    let leaders = leaders(trials, imported, run_ns, limits);
    if leaders.is_empty() {
        return Ok(Vec::new());
    }
    let candidates: Vec<Candidate> = leaders.iter().map(|trial| subject.candidate(trial.config.clone())).collect();
    let standings = measure.race(&candidates, limits, stop, &mut |n| observer.note(Note::Race(n)))?;
    let leader = |Standing { at, outcome, quartile_ns, relative_error }| match outcome {
        Outcome::Measured(timing) => {
            Some(Leader { config: leaders[at].config.clone(), timing, quartile_ns, relative_error })
        }
        Outcome::Failed { class, message } => {
            observer.note(Note::LeaderFailed(class, message));
            None
        }
    };
    Ok(standings.into_iter().filter_map(leader).collect())
}

/// Leaders: the trials that may be the best in truth, as many as can be measured in this time. Those of this
/// machine come first, the apparently best ahead, then those that were imported.
fn leaders<'t>(
    trials: &'t [Trial],
    imported: &HashSet<Config>,
    run_ns: Option<f64>,
    limits: RaceLimits,
) -> Vec<&'t Trial> {
    let time = limits.rounds / RaceLimits::STAGES;
    let timed = trials.iter().filter_map(|trial| Some((trial, *trial.outcome.timing()?)));
    let (theirs, own): (Vec<_>, Vec<_>) = timed.partition(|(trial, _)| imported.contains(&trial.config));
    let n_sides = if own.is_empty() || theirs.is_empty() { 1 } else { 2 };
    [own, theirs]
        .into_iter()
        .flat_map(|side| {
            // What is imported has its own times.
            let best_ns = side.iter().map(|(_, timing)| timing.median_ns).fold(f64::INFINITY, f64::min);
            let limits = RaceLimits { best_ns: run_ns.unwrap_or(best_ns), ..limits };
            leaders_of(side, limits.affordable(time / n_sides), MOST_LEADERS / u64::from(n_sides))
        })
        .collect()
}

fn leaders_of(mut leaders: Vec<(&Trial, Timing)>, n_rounds: u64, most: u64) -> Vec<&Trial> {
    leaders.sort_by(|(_, a), (_, b)| a.median_ns.total_cmp(&b.median_ns));
    let Some((_, leading)) = leaders.get(N_LEADING - 1).or(leaders.last()) else { return Vec::new() };
    let leading_ns = leading.median_ns;
    leaders.retain(|(_, timing)| timing.median_ns <= NEAR * leading_ns);
    leaders.sort_by_key(|(_, timing)| timing.stopped_early);
    leaders.truncate((n_rounds / RaceLimits::LEAST_ROUNDS).clamp(2, most) as usize);
    leaders.into_iter().map(|(trial, _)| trial).collect()
}

/// Compares the winner with the baseline, which becomes the winner if it is at least as fast and was a trial
/// of the search.
///
/// A baseline close to the winner races against it: measured alone, a kernel finds a GPU within its power
/// limit, or a CPU cooler, and is faster than in any race.
fn compare(
    measure: &mut dyn Measure,
    contenders: Contenders,
    ranking: &mut Vec<Leader>,
    baseline: Candidate,
    limit: Duration,
    stop: &AtomicBool,
) -> Result<Untuned, BoxError> {
    let start = Instant::now();
    let winner_ns = ranking[0].timing.median_ns;
    if let Some(at) = ranking.iter().position(|leader| leader.config == baseline.config) {
        let ns = ranking[at].timing.median_ns;
        if ns > winner_ns {
            return Ok(Untuned::Measured { ns });
        }
        ranking[..=at].rotate_right(1);
        return Ok(Untuned::Winner { ns });
    }
    if limit.is_zero() || stop.load(Ordering::Relaxed) {
        return Ok(Untuned::Failed);
    }
    let alone = untuned(measure, baseline.clone(), winner_ns, limit, stop)?;
    if alone.ns().is_none_or(|ns| ns > NEAR * winner_ns) {
        return Ok(alone);
    }
    let left = limit.saturating_sub(start.elapsed());
    let limits = RaceLimits { rounds: left / RaceLimits::GOAL, total: left, best_ns: winner_ns };
    let both = [contenders.subject.candidate(ranking[0].config.clone()), baseline];
    let standings = measure.race(&both, limits, Some(stop), &mut |_| ())?;
    let leader = |at: usize| {
        let standing = standings.iter().find(|standing| standing.at == at)?;
        let (timing, config) = (*standing.outcome.timing()?, both[at].config.clone());
        let Standing { quartile_ns, relative_error, .. } = *standing;
        Some(Leader { config, timing, quartile_ns, relative_error })
    };
    let (Some(winner), Some(baseline)) = (leader(0), leader(1)) else { return Ok(alone) };
    let ns = baseline.timing.median_ns;
    // A configuration that was not a trial, as without guesses, has no record to mark as the winner.
    let is_trial = contenders.trials.iter().any(|trial| trial.config == baseline.config);
    if ns > winner.timing.median_ns || !is_trial {
        return Ok(Untuned::Measured { ns: winner_ns * ns / winner.timing.median_ns });
    }
    ranking.splice(0..1, [baseline, winner]);
    Ok(Untuned::Winner { ns })
}

/// Measures the baseline, only once if it is slow.
fn untuned(
    measure: &mut dyn Measure,
    plain: Candidate,
    best_ns: f64,
    limit: Duration,
    stop: &AtomicBool,
) -> Result<Untuned, BoxError> {
    let start = Instant::now();
    let patience = limit.mul_f64(PART_FOR_UNTUNED_RUN);
    measure.submit(&[Candidate { patience: Some(patience), ..plain }]);
    while !stop.load(Ordering::Relaxed) && start.elapsed() < limit {
        match measure.next(Some(best_ns), LOOK)? {
            Next::Done(_, measured) => {
                return Ok(match measured.outcome {
                    Outcome::Measured(timing) => Untuned::Measured { ns: timing.median_ns },
                    Outcome::Failed { class: ErrorClass::RunTimeout, .. } => Untuned::SlowerThan { limit: patience },
                    Outcome::Failed { .. } => Untuned::Failed,
                });
            }
            Next::Pending => {}
            Next::Idle => break,
        }
    }
    measure.cancel(0)?;
    Ok(Untuned::Failed)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use tilewright_search::{Measured, MeasuringTraits, Parameter, Space};

    use super::*;

    fn trial(rank: u64, median_ns: f64, stopped_early: bool) -> Trial {
        let timing = Timing::of_samples(&[median_ns; 3], stopped_early);
        Trial { config: Config::new([rank]), outcome: Outcome::Measured(timing) }
    }

    /// Limits of a race whose rounds together take `rounds`.
    fn limits(rounds: Duration) -> RaceLimits {
        RaceLimits { rounds, total: LONGEST_RACE, best_ns: 0.0 }
    }

    fn check(trials: &[Trial], rounds: Duration, ranks: &[u64]) {
        let found: Vec<u64> = leaders(trials, &HashSet::new(), None, limits(rounds))
            .iter()
            .map(|trial| trial.config.ranks()[0])
            .collect();
        assert_eq!(found, ranks);
    }

    /// Measurements that never return a result, and count the candidates submitted.
    #[derive(Default)]
    struct Never {
        n_submitted: u64,
        is_cancelled: bool,
    }

    impl Measure for Never {
        fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
            self.n_submitted += candidates.len() as u64;
            0..self.n_submitted
        }

        fn next(&mut self, _: Option<f64>, at_most: Duration) -> Result<Next, BoxError> {
            std::thread::sleep(at_most);
            Ok(Next::Pending)
        }

        fn wind_down(&mut self) {}

        fn cancel(&mut self, _: u64) -> Result<(), BoxError> {
            self.is_cancelled = true;
            Ok(())
        }

        fn race(
            &mut self,
            _: &[Candidate],
            _: RaceLimits,
            _: Option<&AtomicBool>,
            _: &mut dyn FnMut(usize),
        ) -> Result<Vec<Standing>, BoxError> {
            Ok(Vec::new())
        }

        fn machine(&self) -> MeasuringTraits {
            MeasuringTraits::default()
        }
    }

    #[test]
    fn an_untuned_kernel_whose_build_does_not_end_is_given_up_in_time() {
        let (mut never, limit, stop) = (Never::default(), Duration::from_millis(120), AtomicBool::new(false));
        let plain = Candidate { config: Config::new([0]), steps: "".into(), patience: None };
        let start = Instant::now();
        assert_eq!(untuned(&mut never, plain, 1e6, limit, &stop).unwrap(), Untuned::Failed);
        let took = start.elapsed();
        assert!(took >= limit && took < limit + Duration::from_secs(2), "{took:?}");
        assert_eq!((never.n_submitted, never.is_cancelled), (1, true));
    }

    /// Measurements of configurations whose ranks are their nanoseconds in a race; measured alone, each takes
    /// a tenth less, as on a GPU that is at its power limit in races.
    #[derive(Default)]
    struct Capped {
        submitted: Vec<u64>,
        n_races: usize,
    }

    fn measured(ns: f64) -> Timing {
        Timing::of_samples(&[ns; 9], false)
    }

    impl Measure for Capped {
        fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
            self.submitted.extend(candidates.iter().map(|candidate| candidate.config.ranks()[0]));
            0..1
        }

        fn next(&mut self, _: Option<f64>, _: Duration) -> Result<Next, BoxError> {
            let next = self.submitted.pop().map(|ns| Measured::of(Outcome::Measured(measured(0.9 * ns as f64))));
            Ok(next.map_or(Next::Idle, |measured| Next::Done(0, measured)))
        }

        fn wind_down(&mut self) {}

        fn cancel(&mut self, _: u64) -> Result<(), BoxError> {
            Ok(())
        }

        fn race(
            &mut self,
            candidates: &[Candidate],
            _: RaceLimits,
            _: Option<&AtomicBool>,
            _: &mut dyn FnMut(usize),
        ) -> Result<Vec<Standing>, BoxError> {
            self.n_races += 1;
            let standing = |(at, candidate): (usize, &Candidate)| {
                let ns = candidate.config.ranks()[0] as f64;
                Standing { at, outcome: Outcome::Measured(measured(ns)), quartile_ns: ns, relative_error: None }
            };
            Ok(candidates.iter().enumerate().map(standing).collect())
        }

        fn machine(&self) -> MeasuringTraits {
            MeasuringTraits::default()
        }
    }

    #[test]
    fn a_first_guess_near_the_winner_races_against_it() {
        let space = Space::new("test", vec![Parameter::ordinal("ns", 0..2000)], Vec::new()).unwrap();
        let trials = [trial(990, 990.0, false)];
        let check = |ranking: &[u64], guess: u64, expected: Untuned, winner: u64, n_races: usize| {
            let leader = |ns: &u64| Leader {
                config: Config::new([*ns]),
                timing: measured(*ns as f64),
                quartile_ns: *ns as f64,
                relative_error: None,
            };
            let mut ranking: Vec<Leader> = ranking.iter().map(leader).collect();
            let (mut capped, stop) = (Capped::default(), AtomicBool::new(false));
            let guess = Candidate { config: Config::new([guess]), steps: "".into(), patience: None };
            let limit = Duration::from_secs(1);
            let subject = Subject::from(&space);
            let contenders = Contenders { subject, trials: &trials, imported: &HashSet::new(), run_ns: None };
            let found = compare(&mut capped, contenders, &mut ranking, guess, limit, &stop).unwrap();
            assert_eq!((found, ranking[0].config.ranks()[0], capped.n_races), (expected, winner, n_races));
        };
        // Measured alone, it would seem faster.
        check(&[1000, 1010], 1050, Untuned::Measured { ns: 1050.0 }, 1000, 1);
        check(&[1000, 1010], 990, Untuned::Winner { ns: 990.0 }, 990, 1);
        // The search did not propose it.
        check(&[1000, 1010], 980, Untuned::Measured { ns: 980.0 }, 1000, 1);
        check(&[1000, 1010], 1010, Untuned::Measured { ns: 1010.0 }, 1000, 0);
        check(&[1000, 1010], 1000, Untuned::Winner { ns: 1000.0 }, 1000, 0);
        // A baseline far behind need not be compared more precisely.
        check(&[1000, 1010], 1900, Untuned::Measured { ns: 1710.0 }, 1000, 0);
    }

    #[test]
    fn leaders_are_those_near_the_best() {
        let failed = Trial {
            config: Config::new([9]),
            outcome: Outcome::Failed { class: ErrorClass::Unknown, message: "".into() },
        };
        check(&[], TIME, &[]);
        check(&[failed], TIME, &[]);
        let short = [trial(0, 150.0, false), trial(1, 110.0, false), trial(2, 100.0, false), trial(3, 105.0, true)];
        check(&short, TIME, &[2, 1, 3]);
        // Two trials that a disturbance made look fast race against those that it did not affect.
        let false_best = [trial(0, 100.0, false), trial(1, 60.0, false), trial(2, 70.0, false), trial(3, 130.0, false)];
        check(&false_best, TIME, &[1, 2, 0, 3]);
        // With a kernel of half a second, only the first two can be measured again.
        let long: Vec<Trial> = (0..6).map(|i| trial(i, 5e8 + i as f64, false)).collect();
        check(&long, TIME, &[0, 1]);
        check(&long, TIME_INTERRUPTED, &[0, 1]);
    }

    #[test]
    fn a_short_search_has_a_short_end() {
        let check = |seconds: Option<f64>, expected: [f64; 3]| {
            let EndLimits { rounds, race, untuned } = EndLimits::of(seconds.map(Duration::from_secs_f64));
            assert_eq!([rounds, race, untuned].map(|limit| limit.as_secs_f64()), expected, "{seconds:?}");
        };
        check(None, [5.0, 60.0, 3.0]);
        check(Some(60.0), [5.0, 60.0, 3.0]);
        check(Some(10.0), [2.5, 10.0, 3.0]);
        check(Some(1.0), [0.25, 1.0, 0.5]);
        check(Some(0.004), [0.001, 1.0, 0.1]);
        // A user who asks for a number of trials is told the maximum, and waits in proportion to the time
        // that they took.
        let after = |promised: Option<f64>, seconds: f64| {
            let promised = EndLimits::of(promised.map(Duration::from_secs_f64));
            let EndLimits { rounds, race, untuned } = promised.after(Duration::from_secs_f64(seconds));
            assert_eq!(race, promised.race);
            [rounds, untuned].map(|limit| limit.as_secs_f64())
        };
        assert_eq!(after(None, 0.8), [0.5, 1.0]);
        assert_eq!(after(None, 4.0), [1.0, 2.0]);
        assert_eq!(after(None, 1e6), [5.0, 3.0]);
        assert_eq!(after(Some(1.0), 9.0), [0.25, 0.5]);
        let interrupted = EndLimits::of(None).of_interrupted();
        assert_eq!((interrupted.rounds, interrupted.race), (TIME_INTERRUPTED, 2 * TIME_INTERRUPTED));
    }

    #[test]
    fn what_was_imported_keeps_nobody_out() {
        let own = (0..30).map(|i| trial(i, 100.0 + i as f64 / 10.0, false));
        let trials: Vec<Trial> = own.chain((30..60).map(|i| trial(i, 10.0 + i as f64 / 100.0, false))).collect();
        let imported: HashSet<Config> = trials[30..].iter().map(|trial| trial.config.clone()).collect();
        let ranks = |imported: &HashSet<Config>| -> Vec<u64> {
            leaders(&trials, imported, None, limits(TIME)).iter().map(|trial| trial.config.ranks()[0]).collect()
        };
        assert_eq!(ranks(&imported), (0..12).chain(30..42).collect::<Vec<_>>());
        assert_eq!(ranks(&HashSet::new()), (30..54).collect::<Vec<_>>());
        let all = trials.iter().map(|trial| trial.config.clone()).collect();
        assert_eq!(ranks(&all), (30..54).collect::<Vec<_>>());
    }

    #[test]
    fn a_margin_within_the_spread_is_a_tie() {
        let leader = |rank, quartile_ns, spread| Leader {
            config: Config::new([rank]),
            timing: Timing { spread, ..Timing::of_samples(&[1.0; 9], false) },
            quartile_ns,
            relative_error: None,
        };
        let finals = |spread| Finals {
            ranking: vec![leader(0, 100.0, spread), leader(1, 102.0, 0.001)],
            untuned: Untuned::Failed,
            untuned_time: Duration::ZERO,
        };
        assert!(finals(0.03).is_tie() && !finals(0.01).is_tie());
        assert!((finals(0.0).margin().unwrap() - 0.02).abs() < 1e-12);
    }
}
