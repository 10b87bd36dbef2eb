//! The tuning loop: asks a search for candidates, has them measured, tells the search, and keeps the books.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Error;
use crate::measure::{BoxError, Candidate, Conditions, Measure, Measured, Next, Seconds, Subject};
use crate::pause;
use crate::search::Search;
use crate::space::{Config, Space};
use crate::trial::{ErrorClass, Limit, Trial};

/// Budget of a run: when it stops, and how many candidates it measures at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// The most trials to measure in this call. A caller that resumes subtracts what is recorded already.
    pub trials: Option<u64>,
    /// The most wall-clock time to spend in this call, without pauses. No candidate is begun past it, and
    /// those at hand have a moment to end; but the first guess is always finished, and others follow for a
    /// few seconds until one is valid, so that there is a result.
    pub time: Option<Duration>,
    /// Largest batch of candidates to ask for, at least 1. They compile side by side, and a killed run loses
    /// at most one batch. Only the first are asked for all at once, later ones as more is known: see
    /// [`Tuning::go_on`].
    pub batch: usize,
    /// Smallest batch of candidates to ask for: where this many are measured side by side.
    pub least: usize,
}

impl Default for Budget {
    /// No limit, 16 candidates at a time.
    fn default() -> Budget {
        Budget { trials: None, time: None, batch: 16, least: 1 }
    }
}

/// Time from the beginning of a run until which further guesses are begun even past the budget, as long as no
/// trial is valid.
const FOR_A_RESULT: Duration = Duration::from_secs(5);

/// Known trials for each candidate of a batch: batches grow with what is known.
const KNOWN_PER_CANDIDATE: u64 = 16;

impl Budget {
    /// The most of the trials that are left to ask for at a time.
    fn most_at_a_time(&self, left: u64) -> usize {
        left.min(self.batch.max(self.least).max(1) as u64) as usize
    }

    /// Trials to ask a search for, of those that are left, where `n_known` are known.
    fn at_a_time(&self, n_known: u64, left: u64) -> usize {
        let grown = if n_known == 0 { u64::MAX } else { (n_known / KNOWN_PER_CANDIDATE).max(self.least.max(1) as u64) };
        self.most_at_a_time(left.min(grown))
    }
}

/// Trials and guesses that a run begins with; by default none.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadStart<'a> {
    /// Trials of an earlier run or of another, told to the search first and never measured again.
    pub prior: &'a [Trial],
    /// Configurations that are measured before anything that the search proposes, in their order.
    pub guesses: &'a [Config],
}

/// Report of one trial of a run, for the observer.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Number in the workload's history: the count of prior trials and of those reported before.
    pub number: u64,
    /// Configuration and its outcome.
    pub trial: Trial,
    /// Text of the schedule, as of its [`Candidate`].
    pub steps: Arc<str>,
    /// Seconds, by what they were spent on.
    pub seconds: Seconds,
    /// Limit that caused the failure, which another run may raise; `None` otherwise.
    pub limit: Option<Limit>,
    /// Device on which it was measured, and its state.
    pub conditions: Conditions,
    /// The best median so far in nanoseconds, this trial included.
    pub best_ns: Option<f64>,
}

/// Event of a run, for the observer.
#[derive(Debug)]
pub enum Event<'a> {
    /// End of one trial: the moment to show progress.
    Trial(&'a Report),
    /// End of a batch, as far as it was measured: the moment to commit records.
    Batch(&'a [Report]),
}

/// Summary of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The best of the prior and the new trials; `None` where all failed.
    pub best: Option<Trial>,
    /// Trials measured in this call, failures included.
    pub n_trials: u64,
    /// Number of them that failed, by class; classes without failures are left out.
    pub errors: BTreeMap<ErrorClass, u64>,
    /// Number of those that had come to a limit that another run may raise.
    pub cut_off: BTreeMap<ErrorClass, u64>,
    /// Seconds spent proposing and observing.
    pub search_seconds: f64,
    /// Seconds spent on candidates, summed over all of them.
    pub seconds: Seconds,
    /// Seconds by the wall clock, without pauses.
    pub wall_seconds: f64,
    /// Reason for its end.
    pub ended: Ended,
}

/// Reasons for which a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The budget of trials is spent.
    Trials,
    /// The budget of time is spent.
    Time,
    /// The search has nothing left to propose.
    Exhausted,
    /// The stop flag was raised, or the measuring side gave a batch up.
    Interrupted,
}

/// Time for which candidates under test may continue after the end: most are done by then.
const LAST_WAIT: Duration = Duration::from_millis(500);
/// Interval of the checks whether all is over.
const LOOK: Duration = Duration::from_millis(50);

/// Runs `search` over the subject's space against `measure` until the budget is spent, the space is exhausted
/// or `stop` is raised: one call of [`Tuning::go_on`].
///
/// # Errors
/// As [`Tuning::go_on`].
///
/// # Panics
/// As [`Tuning::go_on`].
pub fn tune(
    search: &mut dyn Search,
    subject: Subject,
    measure: &mut dyn Measure,
    head_start: HeadStart,
    budget: Budget,
    stop: &AtomicBool,
    observer: &mut dyn FnMut(Event) -> Result<(), BoxError>,
) -> Result<Summary, Error> {
    let mut tuning = Tuning::new(search, subject, head_start);
    let ended = tuning.go_on(measure, budget, stop, observer)?;
    Ok(tuning.summary(ended))
}

/// A search under way. It advances by [`Tuning::go_on`] whenever it is given time, so that several can take
/// turns.
pub struct Tuning<'a> {
    search: &'a mut dyn Search,
    subject: Subject<'a>,
    books: Books<'a>,
    /// Guesses that are not measured yet.
    guesses: std::vec::IntoIter<Config>,
    /// Whether there is a valid trial, or the first guess has been tried.
    is_begun: bool,
    /// Trials that the search has not been told yet.
    untold: Vec<Trial>,
    /// Batches that were chosen when the time was up.
    left_over: VecDeque<Batch>,
    wall: Duration,
}

impl<'a> Tuning<'a> {
    /// Makes a run that begins with the first [`Tuning::go_on`]: the search is told the trials of the head
    /// start first, and those of its guesses like its own.
    pub fn new(search: &'a mut dyn Search, subject: Subject<'a>, head_start: HeadStart) -> Tuning<'a> {
        let start = pause::now();
        Tuning::by_clock(search, subject, head_start, Rc::new(move || pause::now() - start))
    }

    /// Makes a run that keeps time by another clock.
    fn by_clock(
        search: &'a mut dyn Search,
        subject: Subject<'a>,
        head_start: HeadStart,
        clock: Clock<'a>,
    ) -> Tuning<'a> {
        let HeadStart { prior, guesses } = head_start;
        let books = Books::new(prior, clock);
        let guesses: Vec<Config> = guesses.iter().filter(|config| subject.space.contains(config)).cloned().collect();
        let is_begun = books.best.is_some() || guesses.iter().all(|config| books.seen.contains(config));
        Tuning {
            search,
            subject,
            books,
            guesses: guesses.into_iter(),
            is_begun,
            untold: prior.to_vec(),
            left_over: VecDeque::new(),
            wall: Duration::ZERO,
        }
    }

    /// The best median so far in nanoseconds.
    pub fn best_ns(&self) -> Option<f64> {
        self.books.best_ns()
    }

    /// Summary so far of a run that last ended in this way.
    pub fn summary(&self, ended: Ended) -> Summary {
        let books = &self.books;
        Summary {
            best: books.best.clone(),
            n_trials: books.n_trials,
            errors: books.errors.clone(),
            cut_off: books.cut_off.clone(),
            search_seconds: books.search_time.as_secs_f64(),
            seconds: books.seconds,
            wall_seconds: self.wall.as_secs_f64(),
            ended,
        }
    }

    /// Continues the run until the budget is spent, the space is exhausted or `stop` is raised; returns the
    /// reason for its end.
    ///
    /// The observer is told every trial as it completes and the end of every batch; where it fails, the run
    /// ends.
    ///
    /// Where no valid trial is known the first guess is measured alone, so that there is a result as soon as
    /// can be. A search is not asked where it thought for longer the last time than is left.
    ///
    /// Where something is known a batch is a sixteenth of that, one candidate at least: what is chosen
    /// together is chosen without the others' results, and early every result changes the choice.
    ///
    /// The search is told a batch as a whole and in order of batches, whatever comes first: what it proposes
    /// does not depend on how many candidates `measure` has under way. What is chosen and not measured when
    /// the time is up comes first the next time.
    ///
    /// # Errors
    /// [`Error::Measure`] and [`Error::Observer`]. What was measured until then has been observed.
    ///
    /// # Panics
    /// Where a median is not a positive, finite number: the measuring side's fault.
    pub fn go_on(
        &mut self,
        measure: &mut dyn Measure,
        budget: Budget,
        stop: &AtomicBool,
        observer: &mut dyn FnMut(Event) -> Result<(), BoxError>,
    ) -> Result<Ended, Error> {
        let clock = self.books.clock.clone();
        let start = clock();
        let ended = self.go_on_since(start, measure, budget, stop, observer);
        self.wall += clock() - start;
        ended
    }

    fn go_on_since(
        &mut self,
        start: Duration,
        measure: &mut dyn Measure,
        budget: Budget,
        stop: &AtomicBool,
        observer: &mut dyn FnMut(Event) -> Result<(), BoxError>,
    ) -> Result<Ended, Error> {
        let Tuning { search, subject, books, guesses, is_begun, untold, left_over, .. } = self;
        let subject = *subject;
        let since = books.clock.clone();
        let clock = || since() - start;
        let told = std::mem::take(untold);
        books.search(|| search.observe(&told));
        let time_left = || budget.time.map_or(Duration::MAX, |time| time.saturating_sub(clock()));
        let stopped = || stop.load(Ordering::Relaxed);
        let works_ahead = measure.machine().works_ahead && search.looks_ahead();
        let n_before = books.n_trials;
        // What was left over the last time, and what is now.
        let mut waiting = std::mem::take(left_over);
        // Chosen, and submitted perhaps.
        let mut next: Option<Batch> = None;
        let ended = loop {
            let left = budget.trials.map_or(u64::MAX, |trials| (trials + n_before).saturating_sub(books.n_trials));
            let is_first = !std::mem::replace(is_begun, true);
            let is_late = time_left().is_zero();
            let is_for_a_result = is_late && books.best.is_none() && clock() < FOR_A_RESULT;
            if stopped() {
                break Ended::Interrupted;
            } else if left == 0 {
                break Ended::Trials;
            } else if is_late && !is_first && !is_for_a_result {
                break Ended::Time;
            }
            let mut batch = match next.take().or_else(|| waiting.pop_front()) {
                Some(batch) => batch,
                None => {
                    let n = if is_first || is_late { 1 } else { budget.most_at_a_time(left) };
                    let guesses = books.guess(guesses, n);
                    if !guesses.is_empty() {
                        Batch::new(guesses, true, subject)
                    } else if !books.may_think(time_left()) {
                        break Ended::Time;
                    } else {
                        let n = budget.at_a_time(books.n_known(), left);
                        Batch::new(books.propose(*search, subject.space, n), false, subject)
                    }
                }
            };
            if batch.candidates.is_empty() {
                break if books.may_think(time_left()) { Ended::Exhausted } else { Ended::Time };
            }
            let most = if is_late { 1 } else { budget.most_at_a_time(left) };
            if batch.candidates.len() > most {
                batch.withdraw(measure)?;
                next = Some(Batch::of(batch.candidates.split_off(most), batch.is_guess));
            }
            batch.submit(measure);
            let leading_ns = books.leading_ns();
            let left = left.saturating_sub(batch.candidates.len() as u64);
            // Where that gains time a batch is chosen before the results of the one before are there.
            if works_ahead && next.is_none() && left > 0 && !is_late {
                next = waiting.pop_front();
            }
            if works_ahead && next.is_none() && left > 0 && !is_late {
                let guesses = books.guess(guesses, budget.most_at_a_time(left));
                if !guesses.is_empty() {
                    next = Some(Batch::new(guesses, true, subject));
                } else if !batch.is_guess && books.may_think(time_left()) {
                    // One that does not know of the guesses yet could propose them again.
                    let n = budget.at_a_time(books.n_known() + batch.candidates.len() as u64, left);
                    next = Some(Batch::new(books.propose(*search, subject.space, n), false, subject));
                }
            }
            if works_ahead
                && left > 0
                && !is_late
                && let Some(next) = &mut next
            {
                next.submit(measure);
            }
            let over = || stopped() || time_left().is_zero() && !is_first && !is_for_a_result;
            let mut reports = Vec::with_capacity(batch.candidates.len());
            let mut trials = Vec::with_capacity(batch.candidates.len());
            let (mut refused, mut broken) = (None, None);
            // When those that are tested have had their last moment.
            let mut last = None;
            while reports.len() < batch.candidates.len() {
                let came = match batch.early.pop_front() {
                    Some((number, measured)) => Ok(Next::Done(number, measured)),
                    None => {
                        if over() && last.is_none() {
                            last = Some(clock() + LAST_WAIT);
                            if let Some(next) = &mut next {
                                next.withdraw(measure)?;
                            }
                            measure.wind_down();
                        }
                        let left = match last {
                            Some(last) => last.saturating_sub(clock()),
                            None if is_first || is_for_a_result => Duration::MAX,
                            None => time_left(),
                        };
                        let at_most = left.min(LOOK);
                        if at_most.is_zero() && last.is_some() {
                            break;
                        }
                        measure.next(leading_ns, at_most)
                    }
                };
                match came {
                    Ok(Next::Done(number, measured)) => {
                        let Some(candidate) = batch.candidate(number) else {
                            // It is of the batch that comes next, and told with it.
                            if let Some(next) = next.as_mut().filter(|next| next.candidate(number).is_some()) {
                                next.early.push_back((number, measured));
                            }
                            continue;
                        };
                        let report = books.enter(candidate, measured);
                        trials.push((number, report.trial.clone()));
                        refused = observer(Event::Trial(&report)).err();
                        reports.push(report);
                        if refused.is_some() || stopped() || time_left().is_zero() {
                            break;
                        }
                    }
                    Ok(Next::Pending) => {}
                    Ok(Next::Idle) => break,
                    Err(error) => {
                        broken = Some(error);
                        break;
                    }
                }
            }
            if reports.len() < batch.candidates.len() && broken.is_none() {
                if let Some(next) = &mut next {
                    next.withdraw(measure)?;
                }
                if over() {
                    left_over.push_back(batch.without(&trials));
                }
                batch.withdraw(measure)?;
            }
            trials.sort_by_key(|(number, _)| *number);
            let trials: Vec<Trial> = trials.into_iter().map(|(_, trial)| trial).collect();
            if stopped() || time_left().is_zero() {
                // One that is not asked again need not learn.
                untold.extend(trials);
            } else {
                books.search(|| search.observe(&trials));
            }
            if let Some(error) = refused {
                return Err(Error::Observer(error));
            }
            observer(Event::Batch(&reports)).map_err(Error::Observer)?;
            if let Some(numbers) = &batch.numbers {
                measure.recorded(numbers.end);
            }
            broken.map_or(Ok(()), Err).map_err(Error::Measure)?;
            // A measuring side that gives no results would be asked for ever.
            if reports.is_empty() && !time_left().is_zero() {
                break Ended::Interrupted;
            }
        };
        left_over.extend(next.into_iter().chain(waiting));
        left_over.iter_mut().try_for_each(|batch| batch.withdraw(measure))?;
        Ok(ended)
    }
}

/// The time since some moment.
type Clock<'a> = Rc<dyn Fn() -> Duration + 'a>;

/// Candidates that are measured together.
struct Batch {
    candidates: Vec<Candidate>,
    /// Whether no search has proposed it.
    is_guess: bool,
    /// Numbers of the candidates, once they are submitted.
    numbers: Option<Range<u64>>,
    /// Results of them that came while the batch before was under way.
    early: VecDeque<(u64, Measured)>,
}

impl Batch {
    fn new(configs: Vec<Config>, is_guess: bool, subject: Subject) -> Batch {
        Batch::of(configs.into_iter().map(|config| subject.candidate(config)).collect(), is_guess)
    }

    fn of(candidates: Vec<Candidate>, is_guess: bool) -> Batch {
        Batch { candidates, is_guess, numbers: None, early: VecDeque::new() }
    }

    /// The batch without the candidates that are measured.
    fn without(&self, measured: &[(u64, Trial)]) -> Batch {
        let measured: HashSet<u64> = measured.iter().map(|(number, _)| *number).collect();
        let numbered = self.numbers.clone().into_iter().flatten().zip(&self.candidates);
        let left = numbered.filter(|(number, _)| !measured.contains(number)).map(|(_, candidate)| candidate.clone());
        Batch::of(left.collect(), self.is_guess)
    }

    /// Has it measured, unless it is already.
    fn submit(&mut self, measure: &mut dyn Measure) {
        if self.numbers.is_none() {
            self.numbers = Some(measure.submit(&self.candidates));
        }
    }

    /// Has it measured no longer, nor what was submitted after it.
    fn withdraw(&mut self, measure: &mut dyn Measure) -> Result<(), Error> {
        self.early.clear();
        self.numbers.take().map_or(Ok(()), |numbers| measure.cancel(numbers.start)).map_err(Error::Measure)
    }

    /// The candidate of a number; none where that is of another batch.
    fn candidate(&self, number: u64) -> Option<&Candidate> {
        let numbers = self.numbers.as_ref().filter(|numbers| numbers.contains(&number))?;
        self.candidates.get((number - numbers.start) as usize)
    }
}

/// The last of the leading trials is the fastest of ten, the second fastest of twenty and so on, but no later
/// than this.
const MOST_LEADING: usize = 10;
const ONE_LEADS_OF: usize = 10;

/// Records and counts of the loop.
struct Books<'a> {
    clock: Clock<'a>,
    /// Configurations that were measured or are being measured.
    seen: HashSet<Config>,
    best: Option<Trial>,
    /// Medians of the fastest, ascending, [`MOST_LEADING`] at most, and of how many they are.
    leading_ns: Vec<f64>,
    n_measured: usize,
    n_prior: u64,
    n_trials: u64,
    errors: BTreeMap<ErrorClass, u64>,
    cut_off: BTreeMap<ErrorClass, u64>,
    seconds: Seconds,
    search_time: Duration,
    /// Time that the search took for its last proposal.
    last_thought: Duration,
}

impl<'a> Books<'a> {
    fn new(prior: &[Trial], clock: Clock<'a>) -> Books<'a> {
        let mut books = Books {
            clock,
            seen: prior.iter().map(|trial| trial.config.clone()).collect(),
            best: None,
            leading_ns: Vec::new(),
            n_measured: 0,
            n_prior: prior.len() as u64,
            n_trials: 0,
            errors: BTreeMap::new(),
            cut_off: BTreeMap::new(),
            seconds: Seconds::default(),
            search_time: Duration::ZERO,
            last_thought: Duration::ZERO,
        };
        prior.iter().for_each(|trial| books.rank(trial));
        books
    }

    fn n_known(&self) -> u64 {
        self.n_prior + self.n_trials
    }

    fn best_ns(&self) -> Option<f64> {
        self.best.as_ref().map(|trial| trial.outcome.cost())
    }

    /// The median of the last of those that lead. The fastest of many is seldom the best: it owes its time to
    /// luck, too, and beside it good candidates would look hopeless.
    fn leading_ns(&self) -> Option<f64> {
        self.leading_ns.get((self.n_measured / ONE_LEADS_OF).clamp(1, MOST_LEADING) - 1).copied()
    }

    fn rank(&mut self, trial: &Trial) {
        let Some(timing) = trial.outcome.timing() else { return };
        if timing.median_ns < self.best_ns().unwrap_or(f64::INFINITY) {
            self.best = Some(trial.clone());
        }
        let at = self.leading_ns.partition_point(|&ns| ns <= timing.median_ns);
        self.leading_ns.insert(at, timing.median_ns);
        self.leading_ns.truncate(MOST_LEADING);
        self.n_measured += 1;
    }

    /// Runs a part of the search on the search's clock.
    fn search<T>(&mut self, part: impl FnOnce() -> T) -> T {
        let start = (self.clock)();
        let result = part();
        self.search_time += (self.clock)() - start;
        result
    }

    /// Takes at most `n` guesses that are new.
    fn guess(&mut self, guesses: &mut dyn Iterator<Item = Config>, n: usize) -> Vec<Config> {
        guesses.filter(|config| self.seen.insert(config.clone())).take(n).collect()
    }

    /// Whether a search that thinks as long as the last time has something measured in the time that is left.
    fn may_think(&self, left: Duration) -> bool {
        self.last_thought < left
    }

    /// New configurations that a search proposes.
    fn propose(&mut self, search: &mut dyn Search, space: &Space, n: usize) -> Vec<Config> {
        let before = self.search_time;
        let mut batch = self.search(|| search.propose(n));
        self.last_thought = self.search_time - before;
        batch.retain(|config| {
            let fresh = space.contains(config) && self.seen.insert(config.clone());
            debug_assert!(fresh, "invariant: a search proposes only legal configurations that are new: {config:?}");
            fresh
        });
        batch
    }

    fn enter(&mut self, candidate: &Candidate, measured: Measured) -> Report {
        let trial = Trial { config: candidate.config.clone(), outcome: measured.outcome };
        let sound = trial.outcome.timing().is_none_or(|timing| timing.median_ns > 0.0 && timing.median_ns.is_finite());
        assert!(sound, "invariant: a median is positive and finite: {:?}", trial.outcome);
        self.rank(&trial);
        if let Some(class) = trial.outcome.class() {
            *self.errors.entry(class).or_default() += 1;
            *self.cut_off.entry(class).or_default() += u64::from(measured.limit.is_some());
        }
        self.seconds += measured.seconds;
        self.n_trials += 1;
        let number = self.n_known() - 1;
        Report {
            number,
            trial,
            steps: Arc::clone(&candidate.steps),
            seconds: measured.seconds,
            limit: measured.limit,
            conditions: measured.conditions,
            best_ns: self.best_ns(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::measure::{Machine, RaceLimits, Standing};
    use crate::search::{SEARCHES, build};
    use crate::space::Parameter;
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
            _ => Outcome::Measured(Timing {
                median_ns,
                min_ns: median_ns,
                spread: 0.0,
                n_samples: 1,
                stopped_early: false,
            }),
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
        let summary = tune(
            search.as_mut(),
            subject(&space),
            &mut table,
            HeadStart { prior, guesses: &[] },
            budget,
            stop,
            &mut observer,
        )
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
        let (summary, _) =
            run("random", &[], Budget { time: Some(Duration::ZERO), ..trials(9) }, &AtomicBool::new(false));
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
        let summary =
            tune(search.as_mut(), subject(&space), &mut table, HeadStart::default(), trials(20), &stop, &mut observer)
                .unwrap();
        assert_eq!((summary.n_trials, summary.ended, committed), (7, Ended::Interrupted, 7));
    }

    #[test]
    fn one_lucky_trial_does_not_lead() {
        let leading_ns = |known: &[Trial]| Books::new(known, Rc::new(|| Duration::ZERO)).leading_ns();
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

    /// A table that has candidates of two batches at once, and tells the last ones first or the first ones.
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

        fn race(
            &mut self,
            _: &[Candidate],
            _: RaceLimits,
            _: Option<&AtomicBool>,
            _: &mut dyn FnMut(usize),
        ) -> Result<Vec<Standing>, BoxError> {
            unreachable!("nothing is raced")
        }

        fn machine(&self) -> Machine {
            Machine { works_ahead: true }
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
                    let summary =
                        tune(search.as_mut(), subject, &mut ahead, head_start, budget, &stop, &mut observer).unwrap();
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
            tune(search.as_mut(), subject(&space), &mut table, head_start, budget, &stop, &mut observer).unwrap();
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

    /// A table of which each trial takes its time, and a search that takes its own.
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

        fn race(
            &mut self,
            _: &[Candidate],
            _: RaceLimits,
            _: Option<&AtomicBool>,
            _: &mut dyn FnMut(usize),
        ) -> Result<Vec<Standing>, BoxError> {
            unreachable!("nothing is raced")
        }

        fn machine(&self) -> Machine {
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
        let budget = Budget { trials: Some(20), time: Some(Duration::from_secs(limit)), batch: 5, least: 1 };
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
        // … and another guess is tried where the first is wrong, for a while.
        check_time([2, 3, 0], &[], &[3, 2, 4], (2, 6));
        check_time([2, 3, 0], &[], &[3, 7, 4], (2, 6));
        check_time([2, 6, 0], &[], &[3, 2, 4], (1, 6));
        // What is known already is no reason …
        let known = |index: u128| Trial { config: table().space().config_at(index), outcome: outcome_at(index) };
        check_time([0, 3, 0], &[known(5)], &[1, 2], (0, 0));
        // … and what is known to fail is none.
        check_time([0, 3, 0], &[known(3)], &[3], (0, 0));
        check_time([0, 3, 0], &[known(3)], &[3, 2], (1, 3));
    }

    #[test]
    fn a_search_is_not_asked_that_would_think_past_the_limit() {
        check_time([10, 1, 4], &[], &[], (5, 9));
        check_time([30, 1, 4], &[], &[], (9, 29));
        // One of which nothing is known is asked.
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
                // What is left over need not fit the next turn.
                let batch = if n_turns % 4 == 1 { 1 } else { 4 };
                let budget = Budget { time, trials: time.is_none().then_some(2), batch, least: 1 };
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
                // What was proposed and not measured is left for the next turn, whatever it was.
                match ended {
                    Ended::Exhausted => break,
                    Ended::Time | Ended::Trials => assert!(n_turns < 20, "{name}"),
                    Ended::Interrupted => panic!("{name}: nobody did"),
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

        fn race(
            &mut self,
            _: &[Candidate],
            _: RaceLimits,
            _: Option<&AtomicBool>,
            _: &mut dyn FnMut(usize),
        ) -> Result<Vec<Standing>, BoxError> {
            unreachable!("nothing is raced")
        }

        fn machine(&self) -> Machine {
            Machine::default()
        }
    }

    #[test]
    fn broken_parts_end_the_run_with_their_reason() {
        let mut table = table();
        let space = table.space().clone();
        let stop = AtomicBool::new(false);
        let mut search = search::build("random", &space, 1).unwrap();
        let error = tune(
            search.as_mut(),
            subject(&space),
            &mut Broken,
            HeadStart::default(),
            trials(9),
            &stop,
            &mut |_| Ok(()),
        )
        .unwrap_err();
        assert_eq!(error.to_string(), "measuring failed: no worker");
        let mut full = |_: Event| Err("disk full".into());
        let error =
            tune(search.as_mut(), subject(&space), &mut table, HeadStart::default(), trials(9), &stop, &mut full)
                .unwrap_err();
        assert_eq!(error.to_string(), "recording failed: disk full");
    }
}
