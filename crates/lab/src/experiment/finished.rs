//! Summary of a complete run.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use tilewright::gflops;
use tilewright_ir::op::Workload;
use tilewright_search::{Outcome, Seconds};
use tilewright_tune::Record;

use super::planned::Planned;
use super::table::ComparedMoment;
use crate::history::{Curve, SearchRun, runs};

/// Complete run.
pub struct Finished<'a> {
    pub planned: &'a Planned,
    pub workload: Workload,
    /// Number of configurations in the space.
    pub space_size: f64,
    pub summary: RunSummary,
    /// Trials of the run; `None` if only `data.json` has the run, as its records are gone.
    pub run: Option<SearchRun>,
}

/// Summary of a run for tables and curves, kept in `data.json` so that an experiment can continue without the
/// records of earlier runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    /// Command that reproduces the run.
    pub command: String,
    /// Date and time of its start.
    pub started: String,
    /// Build that ran it; empty if unknown.
    #[serde(default)]
    pub version: String,
    /// Number of trials.
    pub trials: u64,
    /// Seconds until the end of its last trial.
    pub elapsed_s: f64,
    /// Duration of the run in seconds, with start-up and final race.
    pub seconds: f64,
    /// Seconds of the search itself.
    pub search_seconds: f64,
    /// Trials by their outcome.
    pub outcomes: BTreeMap<String, TrialGroup>,
    /// Improvements: number of the trial, from 1, seconds until it ended, and its nanoseconds.
    pub improvements: Vec<(u64, f64, f64)>,
    /// Best kernel at each of the plan's moments, the end last; `None` if no trial was valid.
    pub found: Vec<Option<BestFound>>,
    /// Whether `found` is final, as the races for earlier moments were held.
    pub is_settled: bool,
}

/// Trials with the same outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TrialGroup {
    /// Number of trials.
    pub n: u64,
    /// Seconds spent on them.
    pub seconds: Seconds,
}

/// Best kernel of a run at some moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BestFound {
    /// Number of trials until then.
    pub trials: u64,
    /// Schedule of the kernel, as text.
    pub steps: String,
    /// Nanoseconds per run; `None` until it is timed beside the kernels of other runs.
    pub ns: Option<f64>,
}

impl RunSummary {
    /// Summarises the trials of a run and its `tune --json` at these moments.
    pub fn new(
        command: String,
        started: String,
        records: &[Record],
        run: &SearchRun,
        result: &Json,
        moments: &[ComparedMoment],
    ) -> RunSummary {
        let mut outcomes: BTreeMap<String, TrialGroup> = BTreeMap::new();
        for trial in &run.trials {
            let sum = outcomes.entry(Outcome::name_of(trial.result.err()).to_owned()).or_default();
            sum.n += 1;
            sum.seconds += trial.seconds;
        }
        let improvements = run.best_so_far(|n, _| n as f64, |ns| ns).points.into_iter();
        let seconds = |json: &Json| json.as_f64().unwrap_or(0.0);
        RunSummary {
            command,
            started,
            version: records.first().map_or(String::new(), |record| record.version.clone()),
            trials: run.trials.len() as u64,
            elapsed_s: run.seconds(),
            seconds: seconds(&result["seconds"]),
            search_seconds: seconds(&result["seconds_in"]["search"]),
            outcomes,
            improvements: improvements.map(|(n, ns)| (n as u64, run.trials[n as usize - 1].elapsed_s, ns)).collect(),
            found: moments.iter().map(|&moment| found(records, run, result, moment)).collect(),
            is_settled: true,
        }
    }

    /// Whether the run's results are final and, if the experiment does so, timed together with those of other
    /// runs.
    pub fn is_timed(&self) -> bool {
        self.is_settled && self.found.iter().flatten().all(|found| found.ns.is_some())
    }

    /// Seconds spent on the trials.
    pub fn seconds_in(&self) -> Seconds {
        self.outcomes.values().fold(Seconds::default(), |mut sum, trials| {
            sum += trials.seconds;
            sum
        })
    }

    /// Best-so-far curve: `position` maps a trial's number, from 1, and its end in seconds; `value` maps
    /// nanoseconds.
    pub fn best_so_far(&self, position: impl Fn(u64, f64) -> f64, value: impl Fn(f64) -> f64) -> Curve {
        let points = self.improvements.iter().map(|&(n, elapsed_s, ns)| (position(n, elapsed_s), value(ns)));
        Curve { points: points.collect(), end: position(self.trials, self.elapsed_s) }
    }

    /// Number of the first trial at least this fast.
    pub fn reached(&self, ns: f64) -> Option<u64> {
        Some(self.improvements.iter().find(|(_, _, own)| *own <= ns)?.0)
    }
}

impl Finished<'_> {
    pub fn gflops(&self, ns: f64) -> f64 {
        gflops(&self.workload, ns)
    }

    /// Whether the time limit ended the run before all its trials were made.
    pub fn is_cut_short(&self) -> bool {
        self.planned.n_trials.is_some_and(|n_trials| self.summary.trials < n_trials)
    }

    /// Nanoseconds of the best kernel at one of the plan's moments.
    pub fn ns_at(&self, moment: usize) -> Option<f64> {
        self.summary.found[moment].as_ref()?.ns
    }

    /// Nanoseconds of the final kernel.
    pub fn best_ns(&self) -> Option<f64> {
        self.ns_at(self.summary.found.len().checked_sub(1)?)
    }
}

/// Number of complete runs of the experiment.
pub fn n_complete(finished: &[Finished]) -> usize {
    finished.iter().filter(|f| f.summary.is_timed()).count()
}

/// Trials of the only run in these records; `None` if there are several.
pub fn only_run(records: &[Record]) -> Option<SearchRun> {
    runs(records).into_iter().next()
}

/// Result of a run at a moment: its fastest trial by then, or, at the end, the winner that `tune` reports.
fn found(records: &[Record], run: &SearchRun, result: &Json, moment: ComparedMoment) -> Option<BestFound> {
    let n_trials = moment.n_trials(run);
    let (record, ns) = match moment {
        ComparedMoment::Seconds(_) | ComparedMoment::Trials(_) => {
            let at = run.best_of_first(n_trials)?;
            (&records[at], run.trials[at].result.ok()?)
        }
        ComparedMoment::End => {
            let best = &result["best"];
            (records.iter().find(|record| record.config == best["config"])?, best["ms_median"].as_f64()? * 1e6)
        }
    };
    Some(BestFound { trials: n_trials as u64, steps: record.steps.clone(), ns: Some(ns) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn records() -> [Record; 4] {
        let record = |trial: u64, ns: Option<f64>, elapsed_s: f64| -> Record {
            let outcome = match ns {
                Some(ns) => json!({"class": "no_error", "median_ns": ns, "min_ns": ns, "spread": 0.0, "n_samples": 3,
                    "stopped_early": false}),
                None => json!({"class": "run_timeout", "message": "ran longer than 10 s"}),
            };
            let record = json!({
                "workload": "matmul:m=8,n=8,k=8", "target": "t", "template": "p", "threads": 1,
                "config": {"u": trial}, "outcome": outcome, "seconds": {"build": 1.0, "run": 0.0, "verify": 0.0},
                "steps": format!("unroll {trial}"), "search": "random", "seed": 0, "trial": trial, "version": "0",
                "toolchain": "LLVM", "unix_time": 1, "run": {"start_unix_ms": 1000, "elapsed_s": elapsed_s},
            });
            serde_json::from_value(record).unwrap()
        };
        [record(0, None, 0.5), record(1, Some(30.0), 1.0), record(2, Some(10.0), 2.0), record(3, Some(11.0), 3.0)]
    }

    #[test]
    fn what_a_run_found_is_its_best_by_then_and_the_winner_of_its_race_at_the_end() {
        let records = records();
        let run = only_run(&records).unwrap();
        let result = json!({"best": {"config": {"u": 3}, "ms_median": 10.5e-6}});
        let found = |moment| found(&records, &run, &result, moment).map(|f| (f.trials, f.steps, f.ns.map(f64::round)));
        assert_eq!(found(ComparedMoment::Seconds(0.9)), None);
        assert_eq!(found(ComparedMoment::Trials(1)), None);
        for by_the_second in [ComparedMoment::Seconds(1.5), ComparedMoment::Trials(2)] {
            assert_eq!(found(by_the_second), Some((2, "unroll 1".into(), Some(30.0))));
        }
        for later in [ComparedMoment::Seconds(9.0), ComparedMoment::Trials(100)] {
            assert_eq!(found(later), Some((4, "unroll 2".into(), Some(10.0))));
        }
        assert_eq!(found(ComparedMoment::End), Some((4, "unroll 3".into(), Some(11.0))));
    }

    #[test]
    fn a_run_without_trials_has_found_nothing() {
        let run = SearchRun { template: "p".into(), search: "random".into(), seed: 0, trials: Vec::new() };
        let moments = [ComparedMoment::Seconds(1.5), ComparedMoment::Trials(1), ComparedMoment::End];
        let summary = RunSummary::new("tune".into(), "now".into(), &[], &run, &json!({"best": null}), &moments);
        assert_eq!((summary.trials, summary.elapsed_s, &summary.found[..]), (0, 0.0, &[None, None, None][..]));
        assert!(summary.is_timed() && summary.improvements.is_empty() && summary.reached(1e9).is_none());
    }

    #[test]
    fn a_summary_says_what_the_trials_say() {
        let records = records();
        let run = only_run(&records).unwrap();
        let result = json!({"seconds": 4.0, "seconds_in": {"search": 0.5}});
        let summary =
            RunSummary::new("tune".into(), "now".into(), &records, &run, &result, &[ComparedMoment::Seconds(1.5)]);
        assert_eq!((summary.trials, summary.elapsed_s, summary.search_seconds), (4, 3.0, 0.5));
        assert_eq!(summary.improvements, [(2, 1.0, 30.0), (3, 2.0, 10.0)]);
        assert_eq!((summary.outcomes["no_error"].n, summary.outcomes["run_timeout"].n), (3, 1));
        assert_eq!(summary.seconds_in(), run.seconds_in());
        let by_time = |c: Curve| (c.points, c.end);
        assert_eq!(
            by_time(summary.best_so_far(|_, elapsed_s| elapsed_s, |ns| ns)),
            by_time(run.best_so_far(|_, trial| trial.elapsed_s, |ns| ns))
        );
        for ns in [5.0, 10.0, 12.0, 30.0, 40.0] {
            assert_eq!(summary.reached(ns), run.reached(ns).map(|(n, _)| n));
        }
        let text = serde_json::to_string(&summary).unwrap();
        assert_eq!(serde_json::from_str::<RunSummary>(&text).unwrap(), summary);
    }
}
