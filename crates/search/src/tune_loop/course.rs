//! State of the loop during one call, until its budget is spent.

use std::borrow::Cow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::batches::{Batch, Batches};
use super::{Budget, Ended, Event, Report, Tuning};
use crate::Error;
use crate::measure::{BoxError, Measure, Next};
use crate::trial::{Outcome, Trial};

/// Time from the beginning of a course within which further guesses are started while no trial is valid.
const FOR_A_RESULT: Duration = Duration::from_secs(5);
/// Grace period for running candidates at the end of a course; most are done by then.
const LAST_WAIT: Duration = Duration::from_millis(500);
/// Interval at which the end of the course is checked for.
const LOOK: Duration = Duration::from_millis(50);
/// Horizon in seconds whose expected gain decides whether a run continues.
const OUTLOOK_S: f64 = 60.0;

/// Clock reading of a course, taken once per turn, so that all decisions of the turn agree.
#[derive(Clone, Copy)]
struct Moment {
    /// Time since the beginning of the course.
    now: Duration,
    /// Time left of the budget.
    left: Duration,
    is_stopped: bool,
}

impl Moment {
    fn is_late(self) -> bool {
        self.left.is_zero()
    }

    /// Whether, as a rule, no more candidates are started.
    fn is_over(self) -> bool {
        self.is_stopped || self.is_late()
    }
}

/// Phase of a course, which determines how long the results of a batch are awaited.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// First guess of a run without a valid trial: measured however long it takes.
    First,
    /// Within the budget.
    Searching,
    /// Past the time budget, one candidate at a time while no trial is valid.
    ForAResult,
    /// End of the course: running candidates have until this time.
    Draining(Duration),
}

impl Phase {
    fn is_over(self, moment: Moment) -> bool {
        match self {
            Phase::First | Phase::ForAResult => moment.is_stopped,
            Phase::Searching => moment.is_over(),
            Phase::Draining(_) => true,
        }
    }

    /// Longest wait for a result.
    fn patience(self, moment: Moment) -> Duration {
        match self {
            Phase::First | Phase::ForAResult => Duration::MAX,
            Phase::Searching => moment.left,
            Phase::Draining(until) => until.saturating_sub(moment.now),
        }
    }
}

/// Results of the current batch.
struct BatchResults {
    phase: Phase,
    reports: Vec<Report>,
    /// Trials by the numbers of their candidates.
    trials: Vec<(u64, Trial)>,
    /// Reason why the observer ended the run.
    refused: Option<BoxError>,
    /// Reason why nothing can be measured.
    broken: Option<BoxError>,
}

/// Call of [`Tuning::go_on`].
pub(super) struct Course<'c, 'a> {
    tuning: &'c mut Tuning<'a>,
    measure: &'c mut dyn Measure,
    budget: Budget,
    stop: &'c AtomicBool,
    observer: &'c mut dyn FnMut(Event) -> Result<(), BoxError>,
    batches: Batches,
    start: Duration,
    /// Trials of earlier courses.
    n_before: u64,
    /// Whether a batch is chosen before the results of the previous one arrive, to save time.
    works_ahead: bool,
}

impl<'c, 'a> Course<'c, 'a> {
    pub(super) fn new(
        tuning: &'c mut Tuning<'a>,
        measure: &'c mut dyn Measure,
        budget: Budget,
        stop: &'c AtomicBool,
        observer: &'c mut dyn FnMut(Event) -> Result<(), BoxError>,
    ) -> Course<'c, 'a> {
        let (start, n_before) = ((tuning.stats.clock)(), tuning.stats.n_trials);
        let batches = Batches::of(std::mem::take(&mut tuning.left_over));
        let works_ahead = measure.machine().works_ahead && tuning.search.looks_ahead();
        Course { tuning, measure, budget, stop, observer, batches, start, n_before, works_ahead }
    }

    /// Runs the course to its end; returns the reason for the end.
    ///
    /// # Errors
    /// As [`Tuning::go_on`].
    pub(super) fn carry_out(mut self) -> Result<Ended, Error> {
        let untold = std::mem::take(&mut self.tuning.untold);
        self.observe(&untold);
        let ended = loop {
            if let Some(ended) = self.round()? {
                break ended;
            }
        };
        self.tuning.left_over = self.batches.into_left_over(self.measure)?;
        Ok(ended)
    }

    /// Chooses a batch and measures it; returns the reason if the course ends.
    fn round(&mut self) -> Result<Option<Ended>, Error> {
        let begun = self.moment();
        let left = self.trials_left();
        let is_first = !std::mem::replace(&mut self.tuning.is_begun, true);
        let phase = match self.begin(begun, left, is_first) {
            Ok(phase) => phase,
            Err(ended) => return Ok(Some(ended)),
        };
        let Some(mut batch) = self.batches.take().or_else(|| self.choose(begun, left, is_first)) else {
            return Ok(Some(Ended::Time));
        };
        if batch.candidates.is_empty() {
            let has_time = self.tuning.stats.may_think(self.moment().left);
            return Ok(Some(if has_time { Ended::Exhausted } else { Ended::Time }));
        }
        let most = if begun.is_late() { 1 } else { self.budget.most_at_a_time(left) };
        self.batches.cut(&mut batch, most, self.measure)?;
        batch.submit(self.measure);
        if self.works_ahead && !begun.is_late() {
            self.look_ahead(&batch, left.saturating_sub(batch.candidates.len() as u64));
        }
        let round = self.wait_for(&mut batch, phase)?;
        self.finish(batch, round)
    }

    fn moment(&self) -> Moment {
        let now = (self.tuning.stats.clock)() - self.start;
        let left = self.budget.time.map_or(Duration::MAX, |time| time.saturating_sub(now));
        Moment { now, left, is_stopped: self.stop.load(Ordering::Relaxed) }
    }

    /// Number of trials left of the budget.
    fn trials_left(&self) -> u64 {
        let most = self.budget.trials.map_or(u64::MAX, |trials| trials + self.n_before);
        most.saturating_sub(self.tuning.stats.n_trials)
    }

    /// Phase of a batch that begins now, or the reason why none does.
    fn begin(&self, moment: Moment, left: u64, is_first: bool) -> Result<Phase, Ended> {
        let has_none = self.tuning.stats.best.is_none();
        match moment.is_late() {
            _ if moment.is_stopped => Err(Ended::Interrupted),
            _ if left == 0 => Err(Ended::Trials),
            _ if is_first => Ok(Phase::First),
            false if self.gains_little(moment) => Err(Ended::LittleGain),
            false => Ok(Phase::Searching),
            true if has_none && moment.now < FOR_A_RESULT => Ok(Phase::ForAResult),
            true => Err(Ended::Time),
        }
    }

    /// Whether the gain expected of the next minute is too small.
    fn gains_little(&self, moment: Moment) -> bool {
        let stats = &self.tuning.stats;
        let n_trials = stats.n_trials - self.n_before;
        self.budget
            .stop_below
            .is_some_and(|least| stats.expected_gain(OUTLOOK_S, n_trials, moment.now).is_some_and(|gain| gain < least))
    }

    /// Chooses a batch: guesses as long as there are any, and then proposals of the search; `None` if the
    /// search has no time to propose.
    fn choose(&mut self, moment: Moment, left: u64, is_first: bool) -> Option<Batch> {
        let Tuning { search, subject, stats, guesses, .. } = &mut *self.tuning;
        let n = if is_first || moment.is_late() { 1 } else { self.budget.most_at_a_time(left) };
        let guesses = stats.guess(guesses, n);
        if !guesses.is_empty() {
            return Some(Batch::new(guesses, true, *subject));
        }
        stats.may_think(moment.left).then(|| {
            let n = self.budget.at_a_time(stats.n_known(), left);
            Batch::new(stats.propose(*search, subject.space, n), false, *subject)
        })
    }

    /// Chooses the batch after the current one, and submits it to be measured after that; `left` trials of
    /// the budget are then left.
    fn look_ahead(&mut self, batch: &Batch, left: u64) {
        if left == 0 {
            return;
        }
        if !self.batches.look_ahead() {
            let moment = self.moment();
            let Tuning { search, subject, stats, guesses, .. } = &mut *self.tuning;
            let guesses = stats.guess(guesses, self.budget.most_at_a_time(left));
            if !guesses.is_empty() {
                self.batches.put_next(Batch::new(guesses, true, *subject));
            } else if !batch.is_guess && stats.may_think(moment.left) {
                // A search that does not know of the guesses yet could propose them again.
                let n = self.budget.at_a_time(stats.n_known() + batch.candidates.len() as u64, left);
                self.batches.put_next(Batch::new(stats.propose(*search, subject.space, n), false, *subject));
            }
        }
        self.batches.submit_next(self.measure);
    }

    /// Waits for the results of the current batch, as long as its phase allows.
    fn wait_for(&mut self, batch: &mut Batch, phase: Phase) -> Result<BatchResults, Error> {
        let leading_ns = self.tuning.stats.leading_ns();
        let mut round = BatchResults { phase, reports: Vec::new(), trials: Vec::new(), refused: None, broken: None };
        while round.reports.len() < batch.candidates.len() {
            let came = match batch.early.pop_front() {
                Some((number, measured)) => Ok(Next::Done(number, measured)),
                None => {
                    let moment = self.moment();
                    if round.phase.is_over(moment) && !matches!(round.phase, Phase::Draining(_)) {
                        round.phase = Phase::Draining(moment.now + LAST_WAIT);
                        self.batches.withdraw_next(self.measure)?;
                        self.measure.wind_down();
                    }
                    let at_most = round.phase.patience(moment).min(LOOK);
                    if at_most.is_zero() {
                        break;
                    }
                    self.measure.next(leading_ns, at_most)
                }
            };
            match came {
                Ok(Next::Done(number, measured)) => {
                    let Some(candidate) = batch.candidate(number) else {
                        self.batches.keep_early(number, measured);
                        continue;
                    };
                    let report = self.tuning.stats.enter(candidate, measured);
                    round.trials.push((number, report.trial.clone()));
                    round.refused = (self.observer)(Event::Trial(&report)).err();
                    round.reports.push(report);
                    if round.refused.is_some() || self.moment().is_over() {
                        break;
                    }
                }
                Ok(Next::Pending) => {}
                Ok(Next::Idle) => break,
                Err(error) => {
                    round.broken = Some(error);
                    break;
                }
            }
        }
        Ok(round)
    }

    /// Reports the current batch to the search and the observer; returns the reason if the course ends.
    fn finish(&mut self, mut batch: Batch, round: BatchResults) -> Result<Option<Ended>, Error> {
        let BatchResults { phase, reports, mut trials, refused, broken } = round;
        let moment = self.moment();
        if reports.len() < batch.candidates.len() && broken.is_none() {
            self.batches.withdraw_next(self.measure)?;
            if phase.is_over(moment) {
                self.batches.leave(batch.without(&trials));
            }
            batch.cancel(self.measure)?;
        }
        trials.sort_by_key(|(number, _)| *number);
        let trials: Vec<Trial> = trials.into_iter().map(|(_, trial)| trial).collect();
        if moment.is_over() {
            // A search that is not asked again need not observe.
            self.tuning.untold.extend(trials);
        } else {
            self.observe(&trials);
        }
        if let Some(error) = refused {
            return Err(Error::Observer(error));
        }
        (self.observer)(Event::Batch(&reports)).map_err(Error::Observer)?;
        if let Some(numbers) = &batch.numbers {
            self.measure.recorded(numbers.end);
        }
        broken.map_or(Ok(()), Err).map_err(Error::Measure)?;
        // A measuring side that gives no results would be polled forever.
        Ok((reports.is_empty() && !moment.is_late()).then_some(Ended::Interrupted))
    }

    /// Reports trials to the search, and counts the time as search time.
    fn observe(&mut self, trials: &[Trial]) {
        let Tuning { search, stats, .. } = &mut *self.tuning;
        let told = if search.weighs_objectives() { Cow::Borrowed(trials) } else { joined(trials) };
        stats.search(|| search.observe(&told));
    }
}

/// Trials with one objective each: the geometric mean if there are several.
fn joined(trials: &[Trial]) -> Cow<'_, [Trial]> {
    let has_several = |trial: &Trial| trial.outcome.timing().is_some_and(|timing| !timing.others.is_empty());
    if !trials.iter().any(has_several) {
        return Cow::Borrowed(trials);
    }
    let join = |trial: &Trial| match &trial.outcome {
        Outcome::Measured(timing) => Trial { outcome: Outcome::Measured(timing.joined()), ..trial.clone() },
        Outcome::Failed { .. } => trial.clone(),
    };
    trials.iter().map(join).collect()
}
