//! `tune --on`: workloads on the devices of a fleet.

use std::time::Duration;

use tilewright::{Note, Request, Session};

use crate::command::tune_args::TuneArgs;
use crate::command::tune_report::{RunReport, write_set};
use crate::command::worker_command;
use crate::interrupts::Interrupts;
use crate::output::{message, write_result};
use crate::progress::Shown;

/// Tunes workloads on the devices of a class: one on all of them, several in parallel; if these belong to a
/// `whole`, such as a model, they share that time.
///
/// # Errors
/// Bad input if an argument does not fit; failure if the server cannot be reached, or a run has no winner.
pub fn on_fleet(
    args: &TuneArgs,
    class: &str,
    requests: Vec<Request>,
    whole: Option<Duration>,
    as_json: bool,
) -> anyhow::Result<()> {
    let fleet = args.fleet.fleet(Some(class))?;
    let requests = match whole {
        Some(time) => tilewright_fleet::in_equal_parts(requests, time),
        None => requests,
    };
    let interrupts = Interrupts::watch()?;
    let session = Session::new(args.records.database()?, worker_command()?);
    let workload = |at: usize| requests[at].workload();
    if let [request] = &requests[..] {
        let shown = Shown::new(workload(0)?, Some(&args.search), args.seed, interrupts.concerned());
        let tuned = tilewright_fleet::tune(&session, &fleet, request, &interrupts.stop, &shown);
        shown.finish();
        let report = RunReport::new(args, workload(0)?, tuned?);
        if report.failure.is_none() || as_json {
            write_result(as_json, &report.json, &report.text)?;
        }
        return report.lost.or(report.failure).map_or(Ok(()), Err);
    }
    let tell = |at: usize, note: Note| {
        if let (Note::Message(line), Ok(workload)) = (note, workload(at)) {
            message(&format!("{workload}: {line}"));
        }
    };
    let all = tilewright_fleet::tune_many(&session, &fleet, &requests, &interrupts.stop, &tell)?;
    let (mut workloads, mut reports, mut fault) = (Vec::new(), Vec::new(), None);
    for (at, tuned) in all {
        let workload = workload(at)?;
        match tuned {
            Ok(tuned) => {
                workloads.push(workload.clone());
                reports.push(RunReport::new(args, workload, tuned));
            }
            Err(error) => fault = Some(anyhow::Error::from(error).context(workload.to_string())),
        }
    }
    write_set(&workloads, &reports, as_json)?;
    fault.or_else(|| reports.into_iter().find_map(|report| report.lost.or(report.failure))).map_or(Ok(()), Err)
}
