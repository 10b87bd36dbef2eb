//! Messages on runs that did not go as they should.

use tilewright_search::Ended;

use super::Tuned;
use crate::error::{Error, ErrorKind, Setting};
use crate::format::{count, errors_text};
use crate::run::together::TunedMany;

impl Tuned {
    /// Limit to raise, where most of the candidates came to it.
    pub fn limit_to_raise(&self) -> Option<Setting> {
        let most = self.cut_off.iter().find(|(_, n)| 2 * **n > self.trials);
        most.and_then(|(class, _)| Setting::limit_of(*class))
    }

    /// Reason why there is no best, where there should be one: the run has not been interrupted.
    pub fn failure(&self) -> Option<Error> {
        let was_interrupted = matches!(self.ended, None | Some(Ended::Interrupted));
        if self.best.is_some() || was_interrupted || self.emulated && self.any_right {
            return None;
        }
        if self.trials == 0 {
            return Some(Error::of(ErrorKind::TimeUp, "the time was up before a candidate was measured"));
        }
        if self.any_right {
            // What was not done in time shows which limit was too low.
            let limits: Vec<Setting> = self.errors.keys().filter_map(|class| Setting::limit_of(*class)).collect();
            let text = "the leading candidates failed when they were measured again";
            return Some(Error::of(ErrorKind::LeadersFailed(limits), text));
        }
        let example = self.example.as_ref().map(|(class, message)| format!("; for example {class}: {message}"));
        let text = format!(
            "none of {} gave a right answer ({}){}",
            count(self.trials, "candidate"),
            errors_text(&self.errors),
            example.unwrap_or_default()
        );
        Some(Error::of(ErrorKind::NoneRight(self.limit_to_raise()), text))
    }
}

impl TunedMany {
    /// The first workload that lost records, or else that has no winner where it should have one; and why.
    pub fn failure(&mut self) -> Option<(String, Error)> {
        let lost =
            self.workloads.iter_mut().find_map(|task| Some((task.tuned.workload.clone(), task.tuned.lost.take()?)));
        let without = || {
            let task = self.workloads.iter().find(|task| task.tuned.best.is_none() && !self.interrupted)?;
            Some((task.tuned.workload.clone(), task.tuned.failure()?))
        };
        lost.or_else(without)
    }
}
