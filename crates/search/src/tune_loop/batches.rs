//! Batches of candidates: in progress, chosen for later, and left over from an earlier call.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;

use crate::Error;
use crate::measure::{Candidate, Measure, Measured, Subject};
use crate::space::Config;
use crate::trial::Trial;

/// Batches other than the current one.
#[derive(Default)]
pub(super) struct Batches {
    /// Batches left over from the previous call, which come first.
    waiting: VecDeque<Batch>,
    /// Batch chosen to come next, possibly already submitted.
    next: Option<Batch>,
    /// Batches left over for the next call.
    left_over: VecDeque<Batch>,
}

impl Batches {
    /// Makes the state in which these batches are waiting.
    pub(super) fn of(waiting: VecDeque<Batch>) -> Batches {
        Batches { waiting, ..Batches::default() }
    }

    /// Takes the batch to measure now, if one is chosen or waiting.
    pub(super) fn take(&mut self) -> Option<Batch> {
        self.next.take().or_else(|| self.waiting.pop_front())
    }

    /// Chooses a waiting batch to come next unless one is chosen; returns whether one is.
    pub(super) fn look_ahead(&mut self) -> bool {
        if self.next.is_none() {
            self.next = self.waiting.pop_front();
        }
        self.next.is_some()
    }

    /// Chooses the batch that comes next.
    pub(super) fn put_next(&mut self, batch: Batch) {
        self.next = Some(batch);
    }

    /// Submits the next batch as well.
    pub(super) fn submit_next(&mut self, measure: &mut dyn Measure) {
        if let Some(next) = &mut self.next {
            next.submit(measure);
        }
    }

    /// Cancels the next batch, which stays chosen.
    pub(super) fn withdraw_next(&mut self, measure: &mut dyn Measure) -> Result<(), Error> {
        self.next.as_mut().map_or(Ok(()), |next| next.cancel(measure))
    }

    /// Truncates the current batch to `most` candidates; the others come next.
    pub(super) fn cut(&mut self, batch: &mut Batch, most: usize, measure: &mut dyn Measure) -> Result<(), Error> {
        if batch.candidates.len() > most {
            batch.cancel(measure)?;
            self.next = Some(Batch::of(batch.candidates.split_off(most), batch.is_guess));
        }
        Ok(())
    }

    /// Keeps an early result of the next batch, to be reported with it; a result of any other batch is
    /// dropped.
    pub(super) fn keep_early(&mut self, number: u64, measured: Measured) {
        if let Some(next) = self.next.as_mut().filter(|next| next.candidate(number).is_some()) {
            next.early.push_back((number, measured));
        }
    }

    /// Leaves a batch for the next call.
    pub(super) fn leave(&mut self, batch: Batch) {
        self.left_over.push_back(batch);
    }

    /// Cancels the remaining batches and returns them for the next call.
    pub(super) fn into_left_over(self, measure: &mut dyn Measure) -> Result<VecDeque<Batch>, Error> {
        let Batches { waiting, next, mut left_over } = self;
        left_over.extend(next.into_iter().chain(waiting));
        left_over.iter_mut().try_for_each(|batch| batch.cancel(measure))?;
        Ok(left_over)
    }
}

/// Candidates that are measured together.
pub(super) struct Batch {
    pub(super) candidates: Vec<Candidate>,
    /// Whether the batch is of guesses, which no search has proposed.
    pub(super) is_guess: bool,
    /// Numbers of the candidates, once they are submitted.
    pub(super) numbers: Option<Range<u64>>,
    /// Results that arrived during the previous batch.
    pub(super) early: VecDeque<(u64, Measured)>,
}

impl Batch {
    pub(super) fn new(configs: Vec<Config>, is_guess: bool, subject: Subject) -> Batch {
        Batch::of(configs.into_iter().map(|config| subject.candidate(config)).collect(), is_guess)
    }

    pub(super) fn of(candidates: Vec<Candidate>, is_guess: bool) -> Batch {
        Batch { candidates, is_guess, numbers: None, early: VecDeque::new() }
    }

    /// Returns the rest of the batch without the measured candidates.
    pub(super) fn without(&self, measured: &[(u64, Trial)]) -> Batch {
        let measured: HashSet<u64> = measured.iter().map(|(number, _)| *number).collect();
        let numbered = self.numbers.clone().into_iter().flatten().zip(&self.candidates);
        let left = numbered.filter(|(number, _)| !measured.contains(number)).map(|(_, candidate)| candidate.clone());
        Batch::of(left.collect(), self.is_guess)
    }

    /// Submits the batch unless it is submitted already.
    pub(super) fn submit(&mut self, measure: &mut dyn Measure) {
        if self.numbers.is_none() {
            self.numbers = Some(measure.submit(&self.candidates));
        }
    }

    /// Cancels the batch and everything submitted after it.
    pub(super) fn cancel(&mut self, measure: &mut dyn Measure) -> Result<(), Error> {
        self.early.clear();
        self.numbers.take().map_or(Ok(()), |numbers| measure.cancel(numbers.start)).map_err(Error::Measure)
    }

    /// Returns the candidate with this number; `None` if it is of another batch.
    pub(super) fn candidate(&self, number: u64) -> Option<&Candidate> {
        let numbers = self.numbers.as_ref().filter(|numbers| numbers.contains(&number))?;
        self.candidates.get((number - numbers.start) as usize)
    }
}
