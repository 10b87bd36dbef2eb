//! Candidates of batches to come: built while kernels are timed, on other cores.

use super::Device;
use crate::protocol::{Reply, Request, Source};
use crate::workers::Answer;
use tilewright_tune::{Measured, Seconds};

/// A candidate that has been announced.
pub struct Ahead {
    pub source: Source,
    pub state: State,
}

/// How far such a candidate is; numbers are those of its worker and of its kernel there.
pub enum State {
    Waiting,
    Building(usize, u64),
    /// In so many seconds.
    Built(usize, u64, f64),
    Failed(Measured),
}

impl Device {
    /// Tells which sources will be measured after the next ones; the same as [`tilewright_tune::Measure::announce`].
    pub fn announce_sources(&mut self, sources: impl IntoIterator<Item = Source>) {
        self.ahead.extend(sources.into_iter().map(|source| Ahead { source, state: State::Waiting }));
    }

    /// Has idle workers build what was announced, on other cores than those on which kernels are timed.
    pub(super) fn build_ahead(&mut self) {
        for worker in 0..self.workers.len() {
            if self.workers.is_idle(worker)
                && let Some(next) = self.ahead.iter_mut().find(|a| matches!(a.state, State::Waiting))
            {
                let id = self.next_id;
                self.next_id += 1;
                next.state = State::Building(worker, id);
                let request = Request::Build { id, source: next.source.clone(), quickly: true, aside: true };
                self.workers.ask(worker, &request, self.options.build_timeout);
            }
        }
    }

    /// Takes note of what became of a candidate that a worker built ahead; workers that are gone are added to `gone`.
    pub(super) fn note_ahead(&mut self, worker: usize, answer: Answer, gone: &mut Vec<usize>) {
        if !matches!(answer, Answer::Reply(_)) {
            gone.push(worker);
            self.forget_ahead(worker);
        }
        let building = self.ahead.iter().enumerate().find_map(|(at, ahead)| match ahead.state {
            State::Building(w, id) if w == worker => Some((at, id)),
            _ => None,
        });
        let Some((at, id)) = building else { return };
        self.ahead[at].state = match answer {
            Answer::Reply(Reply::Built { seconds, .. }) => State::Built(worker, id, seconds),
            answer => State::Failed(self.not_built(answer, Seconds::default())),
        };
    }

    /// What a worker that is gone had built ahead will be built again.
    pub(super) fn forget_ahead(&mut self, worker: usize) {
        for ahead in &mut self.ahead {
            if matches!(ahead.state, State::Built(w, ..) if w == worker) {
                ahead.state = State::Waiting;
            }
        }
    }
}
