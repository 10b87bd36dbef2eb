//! Reports of `tune` on one workload, and on a set.

use serde_json::{Value as Json, json};
use tilewright::{Tuned, Workload};

use super::tune_args::TuneArgs;
use crate::interrupts::remark;
use crate::output::{digits, duration, table, write_result};
use crate::summary;

/// Result of a run.
pub struct RunReport {
    /// Result as `tune --json` prints it.
    pub json: Json,
    /// Result as a user reads it.
    pub text: String,
    /// Reason why there is no winner, if there should be one.
    pub failure: Option<anyhow::Error>,
    /// Error that lost records and ended the run, if any.
    pub lost: Option<anyhow::Error>,
}

impl RunReport {
    /// Reports a run.
    pub fn new(args: &TuneArgs, workload: &Workload, mut tuned: Tuned) -> RunReport {
        remark(&tuned);
        let lost = tuned.lost.take().map(anyhow::Error::from);
        let json = serde_json::to_value(&tuned).expect("invariant: it is numbers and text by name");
        let text = summary::tuned(&tuned, workload, !args.no_race);
        let failure = summary::failure(&tuned);
        RunReport { json, text, failure, lost }
    }
}

/// Writes the results of the workloads of a set.
///
/// # Errors
/// If it cannot be written.
pub fn write_set(workloads: &[Workload], reports: &[RunReport], as_json: bool) -> anyhow::Result<()> {
    let mut rows = vec![["workload", "GFLOP/s", "time"].map(str::to_owned).to_vec()];
    for (workload, report) in workloads.iter().zip(reports) {
        let number = |name: &str| report.json["best"][name].as_f64();
        rows.push(vec![
            workload.to_string(),
            number("gflops").map_or("none".to_owned(), digits),
            number("ms_median").map_or(String::new(), |ms| duration(ms * 1e6)),
        ]);
    }
    let json = json!({"workloads": reports.iter().map(|r| &r.json).collect::<Vec<_>>()});
    write_result(as_json, &json, &table(&rows))
}
