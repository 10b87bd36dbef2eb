//! Messages on runs that did not go as they should.

use tilewright_search::{Ended, ErrorClass};

use super::Tuned;
use crate::error::Error;
use crate::words::{count, errors_text};

/// The option of the command that a class of failures is a matter of.
pub fn option_of(class: ErrorClass) -> Option<&'static str> {
    match class {
        ErrorClass::BuildTimeout => Some("--build-timeout"),
        ErrorClass::RunTimeout => Some("--run-timeout"),
        _ => None,
    }
}

impl Tuned {
    /// The option of the command to raise, where most of the candidates came to its limit.
    pub fn option_to_raise(&self) -> Option<&'static str> {
        let most = self.cut_off.iter().find(|(_, n)| 2 * **n > self.trials);
        most.and_then(|(class, _)| option_of(*class))
    }

    /// Reason why there is no best, where there should be one: the run has not been interrupted.
    pub fn failure(&self) -> Option<Error> {
        let was_interrupted = matches!(self.ended, None | Some(Ended::Interrupted));
        if self.best.is_some() || was_interrupted || self.emulated && self.any_right {
            return None;
        }
        if self.trials == 0 {
            return Some(Error::failed("the time was up before a candidate was measured (give more with --time)"));
        }
        if self.any_right {
            // What was not done in time says which option gives it more.
            let raised: Vec<&str> = self.errors.keys().filter_map(|class| option_of(*class)).collect();
            let more = format!(" (give more with {})", raised.join(" and "));
            let hint = if raised.is_empty() { " (run the same to race others)" } else { more.as_str() };
            return Some(Error::failed(format!("the leading candidates failed when they were measured again{hint}")));
        }
        let example = self.example.as_ref().map(|(class, message)| format!("; for example {class}: {message}"));
        Some(Error::failed(format!(
            "none of {} gave a right answer ({}){}{}",
            count(self.trials, "candidate"),
            errors_text(&self.errors),
            example.unwrap_or_default(),
            self.option_to_raise()
                .map_or(String::new(), |option| format!(" (raise {option}, and they are tried again)"))
        )))
    }
}
