//! Diagnostics of runs without a usable result.

use tilewright_search::Ended;

use super::Tuned;
use crate::error::{Error, ErrorKind, Setting};
use crate::format::{count, errors_text};
use crate::run::together::{TunedMany, TunedTask};

impl Tuned {
    /// Limit to raise, if most of the candidates hit it.
    pub fn limit_to_raise(&self) -> Option<Setting> {
        let most = self.cut_off.iter().find(|(_, n)| 2 * **n > self.trials);
        most.and_then(|(class, _)| Setting::limit_of(*class))
    }

    /// Error that explains why a run that should have a best candidate has none; `None` for an interrupted
    /// run.
    pub fn failure(&self) -> Option<Error> {
        let was_interrupted = matches!(self.ended, None | Some(Ended::Interrupted));
        if self.best.is_some() || was_interrupted || self.emulated && self.any_right {
            return None;
        }
        if self.trials == 0 {
            return Some(Error::of(ErrorKind::TimeUp, "the time was up before a candidate was measured"));
        }
        if self.any_right {
            // Timeouts show which limit was too low.
            let limits: Vec<Setting> = self.errors.keys().filter_map(|class| Setting::limit_of(*class)).collect();
            let text = "the leading candidates failed when they were measured again";
            return Some(Error::of(ErrorKind::LeadersFailed(limits), text));
        }
        let text = format!(
            "none of {} gave a right answer ({}){}",
            count(self.trials, "candidate"),
            errors_text(&self.errors),
            self.example_text()
        );
        Some(Error::of(ErrorKind::NoneRight(self.limit_to_raise()), text))
    }
}

impl Tuned {
    /// Failure of one candidate, to end a sentence about all of them; empty if none failed.
    pub fn example_text(&self) -> String {
        self.example.as_ref().map_or(String::new(), |(class, message)| format!("; for example {class}: {message}"))
    }
}

impl TunedMany {
    /// First workload that lost records, or that has no winner though it should have one, with its error.
    pub fn failure(&mut self) -> Option<(String, Error)> {
        let lost =
            self.workloads.iter_mut().find_map(|task| Some((task.tuned.workload.clone(), task.tuned.lost.take()?)));
        let without = || {
            let is_without = |task: &&TunedTask| task.tuned.best.is_none() && !task.is_not_begun();
            let task = self.workloads.iter().find(is_without).filter(|_| !self.interrupted)?;
            Some((task.tuned.workload.clone(), task.tuned.failure()?))
        };
        lost.or_else(without)
    }
}
