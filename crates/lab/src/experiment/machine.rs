//! Results of an experiment on one machine.

use serde::{Deserialize, Serialize};

use super::finished::RunSummary;

/// Results of one machine, from its `data.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MachineResults {
    pub cpu: String,
    pub target: String,
    pub version: String,
    #[serde(skip_serializing)]
    pub(super) runs: Vec<RunElsewhere>,
}

/// Run on a machine.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct RunElsewhere {
    pub problem: String,
    pub arm: String,
    #[serde(flatten)]
    pub summary: RunSummary,
}

impl MachineResults {
    /// Number of runs.
    pub fn n_runs(&self) -> usize {
        self.runs.len()
    }

    /// Share of the best known time on this machine that each run of an arm on a problem reached at one of
    /// the plan's moments; 0 if it had no result.
    pub fn shares(&self, problem: &str, arm: &str, moment: usize) -> Vec<f64> {
        let of_problem = || self.runs.iter().filter(|run| run.problem == problem);
        let found = of_problem().flat_map(|run| &run.summary.found).flatten();
        let best = found.filter_map(|found| found.ns).min_by(f64::total_cmp);
        let share = |run: &RunElsewhere| Some(best? / run.summary.found[moment].as_ref()?.ns?);
        of_problem().filter(|run| run.arm == arm).map(|run| share(run).unwrap_or(0.0)).collect()
    }
}
