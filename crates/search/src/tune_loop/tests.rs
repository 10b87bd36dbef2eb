//! Whole runs: budgets, resumption, turns, time.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::measure::{Candidate, Measured, MeasuringTraits, Next};
use crate::search::{SEARCHES, build};
use crate::space::{Parameter, Space};
use crate::trial::{Outcome, Timing};
use crate::{RecordedSpace, search};

fn subject(space: &Arc<Space>) -> Subject<'_> {
    Subject::from(&**space)
}

/// 24 configurations, every fourth of which fails; the last one that does not is the fastest.
fn table() -> RecordedSpace {
    let parameters = vec![Parameter::ordinal("a", 0..4), Parameter::ordinal("b", 0..6)];
    let space = Arc::new(Space::new("test", parameters, vec![]).unwrap());
    let trial = |index: u128| Trial { config: space.config_at(index), outcome: outcome_at(index) };
    RecordedSpace::new(space.clone(), (0..24).map(trial))
}

fn outcome_at(index: u128) -> Outcome {
    let median_ns = 100.0 - index as f64;
    match index % 4 {
        3 => Outcome::Failed { class: ErrorClass::WrongAnswer, message: "off by one".into() },
        _ => Outcome::Measured(Timing::of_samples(&[median_ns], false)),
    }
}

fn run(search: &str, prior: &[Trial], budget: Budget, stop: &AtomicBool) -> (Summary, Vec<Report>) {
    let mut table = table();
    let space = table.space().clone();
    let mut search = build(search, &space, 1).unwrap();
    let mut committed = Vec::new();
    let mut shown = 0;
    let mut observer = |event: Event| {
        match event {
            Event::Trial(_) => shown += 1,
            Event::Batch(reports) => committed.extend_from_slice(reports),
        }
        Ok(())
    };
    let summary = Tuning::new(search.as_mut(), subject(&space), HeadStart { prior, guesses: &[] })
        .run(&mut table, budget, stop, &mut observer)
        .unwrap();
    assert_eq!((shown, committed.len()), (summary.n_trials, summary.n_trials as usize));
    (summary, committed)
}

fn trials(n: u64) -> Budget {
    Budget { trials: Some(n), batch: 5, ..Budget::default() }
}

#[test]
fn budgets_of_trials_are_kept_exactly() {
    for row in SEARCHES {
        for n in [0, 1, 7, 24] {
            let (summary, reports) = run(row.name, &[], trials(n), &AtomicBool::new(false));
            assert_eq!((summary.n_trials, summary.ended), (n, Ended::Trials), "{}", row.name);
            assert!(reports.iter().map(|report| report.number).eq(0..n));
        }
    }
}

#[test]
fn the_whole_space_gives_the_optimum_and_every_failure() {
    for row in SEARCHES {
        let (summary, reports) = run(row.name, &[], Budget::default(), &AtomicBool::new(false));
        assert_eq!((summary.n_trials, summary.ended), (24, Ended::Exhausted), "{}", row.name);
        assert_eq!(summary.errors, BTreeMap::from([(ErrorClass::WrongAnswer, 6)]));
        assert_eq!(summary.best.unwrap().outcome.cost(), 78.0);
        assert!(
            reports
                .windows(2)
                .all(|pair| pair[1].best_ns.is_some_and(|best| pair[0].best_ns.is_none_or(|b| best <= b)))
        );
    }
}

#[test]
fn a_resumed_run_repeats_nothing() {
    for row in SEARCHES {
        let (_, first) = run(row.name, &[], trials(9), &AtomicBool::new(false));
        let prior: Vec<Trial> = first.into_iter().map(|report| report.trial).collect();
        let (summary, rest) = run(row.name, &prior, Budget::default(), &AtomicBool::new(false));
        assert_eq!(summary.n_trials, 24 - 9, "{}", row.name);
        assert_eq!(rest[0].number, 9);
        assert!(rest.iter().all(|report| prior.iter().all(|trial| trial.config != report.trial.config)));
        assert_eq!(summary.best.unwrap().outcome.cost(), 78.0);
    }
}

#[test]
fn a_raised_flag_and_a_spent_time_stop_the_run() {
    let (summary, _) = run("random", &[], Budget::default(), &AtomicBool::new(true));
    assert_eq!((summary.n_trials, summary.ended), (0, Ended::Interrupted));
    let (summary, _) = run("random", &[], Budget { time: Some(Duration::ZERO), ..trials(9) }, &AtomicBool::new(false));
    assert_eq!((summary.n_trials, summary.ended), (0, Ended::Time));
}

#[test]
fn an_interrupted_batch_keeps_what_was_measured() {
    let mut table = table();
    let space = table.space().clone();
    let mut search = search::build("random", &space, 1).unwrap();
    let stop = AtomicBool::new(false);
    let mut committed = 0;
    let mut observer = |event: Event| {
        match event {
            Event::Trial(report) => stop.store(report.number == 6, Ordering::Relaxed),
            Event::Batch(reports) => committed += reports.len(),
        }
        Ok(())
    };
    let summary = Tuning::new(search.as_mut(), subject(&space), HeadStart::default())
        .run(&mut table, trials(20), &stop, &mut observer)
        .unwrap();
    assert_eq!((summary.n_trials, summary.ended, committed), (7, Ended::Interrupted, 7));
}

#[test]
fn one_lucky_trial_does_not_lead() {
    let leading_ns = |known: &[Trial]| RunStats::new(known, Rc::new(|| Duration::ZERO)).leading_ns();
    let trials: Vec<Trial> =
        run("grid", &[], Budget::default(), &AtomicBool::new(false)).1.into_iter().map(|r| r.trial).collect();
    let measured: Vec<Trial> = trials.into_iter().filter(|trial| trial.outcome.timing().is_some()).collect();
    assert_eq!(measured.len(), 18);
    assert_eq!(leading_ns(&[]), None);
    assert_eq!(leading_ns(&measured[..1]), Some(100.0));
    assert_eq!(leading_ns(&measured), Some(78.0));
    let many: Vec<Trial> = (0..200).map(|at| measured[at % 18].clone()).collect();
    // Of 200, ten lead; the fastest is there eleven times.
    assert_eq!(leading_ns(&many), Some(78.0));
    let third = [&measured[17..], &measured[..17], &measured[..12]].concat();
    assert_eq!(leading_ns(&third), Some(80.0));
}

/// Table that holds candidates of two batches at once, and returns the last or the first of them first.
struct Ahead {
    table: RecordedSpace,
    waiting: Vec<(u64, Candidate)>,
    is_backwards: bool,
    n_ahead: usize,
}

impl Measure for Ahead {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        self.n_ahead += usize::from(!self.waiting.is_empty());
        let numbers = self.table.submit(candidates);
        self.table.cancel(0).unwrap();
        self.waiting.extend(numbers.clone().zip(candidates.iter().cloned()));
        numbers
    }

    fn next(&mut self, _: Option<f64>, _: Duration) -> Result<Next, BoxError> {
        if self.waiting.is_empty() {
            return Ok(Next::Idle);
        }
        let (number, candidate) = self.waiting.remove(if self.is_backwards { self.waiting.len() - 1 } else { 0 });
        let outcome = self.table.outcome(&candidate.config);
        Ok(Next::Done(number, Measured::of(outcome)))
    }

    fn wind_down(&mut self) {
        self.waiting.clear();
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        self.waiting.retain(|(number, _)| *number < from);
        Ok(())
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits { works_ahead: true }
    }
}

#[test]
fn looking_ahead_changes_neither_budgets_nor_what_is_found() {
    for row in SEARCHES {
        for budget in [trials(0), trials(1), trials(7), trials(24), Budget { batch: 5, ..Budget::default() }] {
            let found = [false, true].map(|is_backwards| {
                let mut ahead = Ahead { table: table(), waiting: vec![], is_backwards, n_ahead: 0 };
                let space = ahead.table.space().clone();
                let guesses = [space.config_at(3), space.config_at(1), space.config_at(3)];
                let mut search = build(row.name, &space, 1).unwrap();
                let mut measured = Vec::new();
                let mut observer = |event: Event| {
                    if let Event::Batch(reports) = event {
                        let mut batch: Vec<Config> = reports.iter().map(|r| r.trial.config.clone()).collect();
                        batch.sort();
                        measured.push(batch);
                    }
                    Ok(())
                };
                let head_start = HeadStart { prior: &[], guesses: &guesses };
                let stop = AtomicBool::new(false);
                let subject = subject(&space);
                let summary = Tuning::new(search.as_mut(), subject, head_start)
                    .run(&mut ahead, budget, &stop, &mut observer)
                    .unwrap();
                assert_eq!(summary.n_trials, budget.trials.unwrap_or(24), "{}", row.name);
                let distinct: HashSet<&Config> = measured.iter().flatten().collect();
                assert_eq!(distinct.len() as u64, summary.n_trials);
                if summary.n_trials == 24 {
                    assert_eq!(summary.best.unwrap().outcome.cost(), 78.0);
                    assert_eq!(ahead.n_ahead > 0, search.looks_ahead(), "{}", row.name);
                }
                measured
            });
            assert_eq!(found[0], found[1], "{}: proposals depend on what comes first", row.name);
        }
    }
}

#[test]
fn batches_grow_with_what_is_known() {
    let parameters = vec![Parameter::ordinal("a", 0..1000)];
    let space = Arc::new(Space::new("test", parameters, vec![]).unwrap());
    let outcome = Outcome::Measured(Timing::of_samples(&[1.0], false));
    let trial = |index: u128| Trial { config: space.config_at(index), outcome: outcome.clone() };
    let mut table = RecordedSpace::new(space.clone(), (0..1000).map(trial));
    let prior: Vec<Trial> = (900..1000).map(trial).collect();
    let guesses: Vec<Config> = (400..420).map(|index| space.config_at(index)).collect();
    let mut lengths = |head_start: HeadStart, trials: u64| {
        let mut lengths = Vec::new();
        let mut observer = |event: Event| {
            if let Event::Batch(reports) = event {
                lengths.push(reports.len());
            }
            Ok(())
        };
        let budget = Budget { trials: Some(trials), ..Budget::default() };
        let mut search = build("random", &space, 1).unwrap();
        let stop = AtomicBool::new(false);
        Tuning::new(search.as_mut(), subject(&space), head_start)
            .run(&mut table, budget, &stop, &mut observer)
            .unwrap();
        lengths
    };
    let from_scratch = lengths(HeadStart::default(), 400);
    assert_eq!(from_scratch[..4], [16, 1, 1, 1]);
    assert_eq!(from_scratch[16..20], [1, 2, 2, 2]);
    assert_eq!(from_scratch.iter().max(), Some(&16));
    assert_eq!(lengths(HeadStart { prior: &prior, guesses: &[] }, 14), [6, 6, 2]);
    assert_eq!(lengths(HeadStart { prior: &[], guesses: &guesses }, 24), [1, 16, 3, 1, 1, 1, 1]);
    assert_eq!(lengths(HeadStart { prior: &prior, guesses: &guesses }, 22), [16, 4, 2]);
}

/// Table whose trials take time, and a search that takes time as well.
struct Timed<'a, T> {
    of: T,
    takes_s: u64,
    now_s: &'a AtomicU64,
}

impl Measure for Timed<'_, RecordedSpace> {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        self.of.submit(candidates)
    }

    fn next(&mut self, leading_ns: Option<f64>, at_most: Duration) -> Result<Next, BoxError> {
        let next = self.of.next(leading_ns, at_most)?;
        if let Next::Done(..) = next {
            self.now_s.fetch_add(self.takes_s, Ordering::Relaxed);
        }
        Ok(next)
    }

    fn wind_down(&mut self) {
        self.of.wind_down();
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        self.of.cancel(from)
    }

    fn machine(&self) -> MeasuringTraits {
        self.of.machine()
    }
}

impl Search for Timed<'_, Box<dyn Search>> {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        self.now_s.fetch_add(self.takes_s, Ordering::Relaxed);
        self.of.propose(n)
    }

    fn observe(&mut self, trials: &[Trial]) {
        self.of.observe(trials);
    }
}

/// Checks the number of trials in `limit` seconds, and the time of the end, where each trial and each
/// proposal takes this many seconds.
#[track_caller]
fn check_time([limit, trial, proposal]: [u64; 3], prior: &[Trial], guesses: &[u128], expected: (u64, u64)) {
    let now_s = AtomicU64::new(0);
    let space = table().space().clone();
    let guesses: Vec<Config> = guesses.iter().map(|index| space.config_at(*index)).collect();
    let mut measure = Timed { of: table(), takes_s: trial, now_s: &now_s };
    let search = build("random", &space, 1).unwrap();
    let mut search = Timed { of: search, takes_s: proposal, now_s: &now_s };
    let budget = Budget { time: Some(Duration::from_secs(limit)), ..Budget { batch: 5, ..trials(20) } };
    let head_start = HeadStart { prior, guesses: &guesses };
    let clock = Rc::new(|| Duration::from_secs(now_s.load(Ordering::Relaxed)));
    let mut tuning = Tuning::by_clock(&mut search, subject(&space), head_start, clock);
    let ended = tuning.go_on(&mut measure, budget, &AtomicBool::new(false), &mut |_| Ok(())).unwrap();
    let summary = tuning.summary(ended);
    assert_eq!((summary.n_trials, summary.wall_seconds as u64), expected);
    assert_eq!(summary.ended, Ended::Time);
}

#[test]
fn nothing_is_begun_past_the_limit_but_the_first_guess() {
    // The first proposals are five.
    check_time([10, 3, 0], &[], &[], (4, 12));
    check_time([0, 3, 0], &[], &[], (0, 0));
    // A result is worth more than the limit …
    check_time([0, 3, 0], &[], &[1, 2, 4], (1, 3));
    check_time([2, 3, 0], &[], &[1, 2, 4], (1, 3));
    // … and another guess is tried if the first is wrong, for a while.
    check_time([2, 3, 0], &[], &[3, 2, 4], (2, 6));
    check_time([2, 3, 0], &[], &[3, 7, 4], (2, 6));
    check_time([2, 6, 0], &[], &[3, 2, 4], (1, 6));
    // A valid trial that is known is no reason …
    let known = |index: u128| Trial { config: table().space().config_at(index), outcome: outcome_at(index) };
    check_time([0, 3, 0], &[known(5)], &[1, 2], (0, 0));
    // … and neither is a guess that is known to fail.
    check_time([0, 3, 0], &[known(3)], &[3], (0, 0));
    check_time([0, 3, 0], &[known(3)], &[3, 2], (1, 3));
}

/// Number of trials until a run ends that stops below a share: times fall from 2 to 1 over a space of 4,096,
/// one trial takes a second, and the search is random.
fn trials_until(stop_below: f64, prior: &[Trial]) -> (u64, Ended) {
    let space = Arc::new(Space::new("test", vec![Parameter::ordinal("a", 0..4096)], vec![]).unwrap());
    let outcome = |at: u128| Outcome::Measured(Timing::of_samples(&[1e6 * (2.0 - at as f64 / 4096.0)], false));
    let trials = (0..4096).map(|at| Trial { config: space.config_at(at), outcome: outcome(at) });
    let now_s = AtomicU64::new(0);
    let mut measure = Timed { of: RecordedSpace::new(space.clone(), trials), takes_s: 1, now_s: &now_s };
    let mut search = build("random", &space, 1).unwrap();
    let clock = Rc::new(|| Duration::from_secs(now_s.load(Ordering::Relaxed)));
    let head_start = HeadStart { prior, guesses: &[] };
    let mut tuning = Tuning::by_clock(search.as_mut(), subject(&space), head_start, clock);
    let budget = Budget { stop_below: Some(stop_below), ..Budget::default() };
    let ended = tuning.go_on(&mut measure, budget, &AtomicBool::new(false), &mut |_| Ok(())).unwrap();
    (tuning.summary(ended).n_trials, ended)
}

/// The best of n random trials is 1/n above the optimum, and 60 more gain 1/n − 1/(n + 60): less than 0.01
/// from 53 trials on, than 0.001 from 217 on; since only half of the trials count, twice as many are needed.
#[test]
fn a_run_ends_where_the_next_minute_gains_too_little() {
    let (few, many) = (trials_until(0.01, &[]), trials_until(0.001, &[]));
    assert!(few.1 == Ended::LittleGain && (60..250).contains(&few.0), "{few:?}");
    assert!(many.1 == Ended::LittleGain && (few.0..900).contains(&many.0), "{many:?}");
    assert_eq!(trials_until(1e-9, &[]), (4096, Ended::Exhausted));
    // Trials of an earlier run count, but the pace needs a trial of this one.
    let space = Space::new("test", vec![Parameter::ordinal("a", 0..4096)], vec![]).unwrap();
    let outcome = Outcome::Measured(Timing::of_samples(&[1e6], false));
    let prior: Vec<Trial> =
        (0..100).map(|at| Trial { config: space.config_at(at), outcome: outcome.clone() }).collect();
    let (n_trials, ended) = trials_until(0.01, &prior);
    assert!(ended == Ended::LittleGain && n_trials <= 6, "{n_trials} {ended:?}");
}

#[test]
fn a_search_is_not_asked_that_would_think_past_the_limit() {
    check_time([10, 1, 4], &[], &[], (5, 9));
    check_time([30, 1, 4], &[], &[], (9, 29));
    // A search whose time for a proposal is unknown is asked.
    check_time([3, 1, 4], &[], &[], (0, 4));
}

#[test]
fn a_run_in_turns_measures_each_once_and_forgets_none() {
    for name in ["grid", "random", "genetic", "auto"] {
        let now_s = AtomicU64::new(0);
        let space = table().space().clone();
        let guesses: Vec<Config> = [5, 3, 9, 12, 6].map(|index| space.config_at(index)).into();
        let head_start = HeadStart { prior: &[], guesses: &guesses };
        let mut measure = Timed { of: table(), takes_s: 2, now_s: &now_s };
        let mut search = build(name, &space, 1).unwrap();
        let clock = Rc::new(|| Duration::from_secs(now_s.load(Ordering::Relaxed)));
        let mut tuning = Tuning::by_clock(search.as_mut(), subject(&space), head_start, clock);
        let (mut numbers, mut configs, mut n_turns) = (Vec::new(), Vec::new(), 0);
        loop {
            // Some turns end by time, in the middle of a batch, and others by trials.
            let time = Some(Duration::from_secs(5)).filter(|_| n_turns % 2 == 0);
            // A batch that is left over need not fit the next turn.
            let batch = if n_turns % 4 == 1 { 1 } else { 4 };
            let budget = Budget { time, trials: time.is_none().then_some(2), batch, ..Budget::default() };
            let mut observer = |event: Event| {
                match event {
                    Event::Trial(report) => {
                        numbers.push(report.number);
                        configs.push(report.trial.config.clone());
                    }
                    Event::Batch(reports) => assert!(reports.len() <= batch, "{name}"),
                }
                Ok(())
            };
            let ended = tuning.go_on(&mut measure, budget, &AtomicBool::new(false), &mut observer).unwrap();
            n_turns += 1;
            // Proposals that were not measured are left for the next turn, whatever the reason for the end.
            match ended {
                Ended::Exhausted => break,
                Ended::Time | Ended::Trials => assert!(n_turns < 20, "{name}"),
                Ended::Interrupted | Ended::LittleGain => panic!("{name}: nobody did"),
            }
        }
        assert_eq!(configs[..5], guesses, "{name}");
        assert_eq!(configs.iter().collect::<HashSet<_>>().len(), 24, "{name}");
        assert_eq!(numbers, (0..24).collect::<Vec<_>>(), "{name}");
        let summary = tuning.summary(Ended::Exhausted);
        assert_eq!((summary.n_trials, summary.wall_seconds), (24, 48.0), "{name}");
        assert_eq!(tuning.best_ns(), Some(78.0), "{name}");
    }
}

struct Broken;

impl Measure for Broken {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        0..candidates.len() as u64
    }

    fn next(&mut self, _: Option<f64>, _: Duration) -> Result<Next, BoxError> {
        Err("no worker".into())
    }

    fn wind_down(&mut self) {}

    fn cancel(&mut self, _: u64) -> Result<(), BoxError> {
        Ok(())
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits::default()
    }
}

#[test]
fn broken_parts_end_the_run_with_their_reason() {
    let mut table = table();
    let space = table.space().clone();
    let stop = AtomicBool::new(false);
    let mut search = search::build("random", &space, 1).unwrap();
    let error = Tuning::new(search.as_mut(), subject(&space), HeadStart::default())
        .run(&mut Broken, trials(9), &stop, &mut |_| Ok(()))
        .unwrap_err();
    assert_eq!(error.to_string(), "measuring failed: no worker");
    let mut full = |_: Event| Err("disk full".into());
    let error = Tuning::new(search.as_mut(), subject(&space), HeadStart::default())
        .run(&mut table, trials(9), &stop, &mut full)
        .unwrap_err();
    assert_eq!(error.to_string(), "recording failed: disk full");
}
