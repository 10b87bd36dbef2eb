//! Status of a run, on a line.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tilewright_search::{ErrorClass, Trial, pause};

use tilewright::Plan;
use tilewright::format::{digits, errors_text, grouped};

/// Status of a run.
#[derive(Debug, Clone)]
pub struct RunStatus {
    /// Start of the run, by [`pause::now`].
    pub start: Instant,
    /// Time limit.
    pub time: Option<Duration>,
    /// Trials recorded, those of earlier runs included.
    pub n_trials: u64,
    /// Trials of this run.
    pub n_new: u64,
    /// Number of trials at which the run ends, including those of earlier runs.
    pub most_trials: Option<u64>,
    /// Throughput of the best so far.
    pub best_gflops: Option<f64>,
    /// Best so far in words, if there is no operation count.
    pub best: Option<String>,
    /// Measured peak of the machine.
    pub peak_gflops: Option<f64>,
    /// Failures of this run by class.
    pub errors: BTreeMap<ErrorClass, u64>,
    /// Phase after the search.
    pub phase: Option<String>,
}

impl Default for RunStatus {
    /// Status of a run that starts now.
    fn default() -> RunStatus {
        RunStatus {
            start: pause::now(),
            time: None,
            n_trials: 0,
            n_new: 0,
            most_trials: None,
            best_gflops: None,
            best: None,
            peak_gflops: None,
            errors: BTreeMap::new(),
            phase: None,
        }
    }
}

impl RunStatus {
    /// Status of a search that is about to begin.
    pub fn of_plan(plan: &Plan) -> RunStatus {
        RunStatus {
            time: plan.time,
            n_trials: plan.n_earlier,
            most_trials: plan.most_trials,
            best_gflops: plan.best_gflops,
            peak_gflops: plan.peak_gflops,
            ..RunStatus::default()
        }
    }

    /// Status of a phase before or after a search.
    pub fn of_phase(phase: &str) -> RunStatus {
        RunStatus { phase: Some(phase.to_owned()), ..RunStatus::default() }
    }

    /// Counts a trial.
    pub fn count(&mut self, trial: &Trial) {
        self.n_trials += 1;
        self.n_new += 1;
        if let Some(class) = trial.outcome.class() {
            *self.errors.entry(class).or_default() += 1;
        }
    }

    /// Begins the race of `n` leaders.
    pub fn race(&mut self, n: usize) {
        self.phase = Some(match n {
            1 => "measuring the best again".to_owned(),
            n => format!("measuring the {n} best against each other"),
        });
    }

    /// Formats the status on a line.
    pub fn line(&self) -> String {
        let seconds = (pause::now() - self.start).as_secs_f64();
        if let Some(phase) = &self.phase {
            return format!("{seconds:.0} s · {phase}");
        }
        let is_late = self.time.is_some_and(|time| seconds > time.as_secs_f64());
        let mut parts = vec![match self.time {
            // No other work continues for long beyond the limit.
            Some(_) if is_late && self.n_new == 0 => format!("{seconds:.0} s, finishing the first kernel"),
            Some(time) => format!("{seconds:.0} s, {:.0} s left", (time.as_secs_f64() - seconds).max(0.0)),
            None => format!("{seconds:.0} s"),
        }];
        let rate = if seconds > 0.0 { self.n_new as f64 / seconds } else { 0.0 };
        let of = self.most_trials.map_or(String::new(), |most| format!(" of {}", grouped(most)));
        let trials = if self.most_trials.unwrap_or(self.n_trials) == 1 { "trial" } else { "trials" };
        parts.push(format!("{}{of} {trials} ({rate:.1}/s)", grouped(self.n_trials)));
        parts.push(match (self.best_gflops, self.peak_gflops) {
            (None, _) if self.best.is_some() => format!("best {}", self.best.as_deref().unwrap_or_default()),
            (None, _) => "nothing valid yet".to_owned(),
            (Some(best), None) => format!("best {} GFLOP/s", digits(best)),
            (Some(best), Some(peak)) => {
                format!("best {} GFLOP/s, {:.1} % of peak", digits(best), 100.0 * best / peak)
            }
        });
        if !self.errors.is_empty() {
            parts.push(errors_text(&self.errors));
        }
        parts.join(" · ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_one_line() {
        let mut status = RunStatus {
            time: Some(Duration::from_secs(60)),
            n_trials: 1200,
            peak_gflops: Some(250.0),
            ..RunStatus::default()
        };
        assert_eq!(status.line(), "0 s, 60 s left · 1,200 trials (0.0/s) · nothing valid yet");
        status.time = None;
        status.most_trials = Some(2000);
        status.best_gflops = Some(125.0);
        status.errors.insert(ErrorClass::WrongAnswer, 2);
        let line = status.line();
        assert!(line.ends_with("best 125.0 GFLOP/s, 50.0 % of peak · 2 wrong_answer"), "{line}");
        assert!(line.starts_with("0 s · 1,200 of 2,000 trials"), "{line}");
    }
}
