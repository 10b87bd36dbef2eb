//! The end of an experiment: what its runs found is timed side by side.
//!
//! On a machine that others share, one minute may be half as fast as the next. Runs that took place one after the other cannot
//! be compared by what they measured themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use tilewright_device::protocol::Source;
use tilewright_device::{Device, host};
use tilewright_tune::Outcome;

use super::{Finished, Found, Plan};
use crate::command::tune::Interrupts;
use crate::command::{count, device_options};
use crate::output::{message, write_whole};

/// Rounds, each of which runs every kernel.
const ROUNDS: u32 = 15;
/// Time in the runs of a kernel in a round.
const ROUND: Duration = Duration::from_millis(15);

/// Nanoseconds of kernels by their schedules, as text; none of one that fails.
type Times = BTreeMap<String, Option<f64>>;

/// Times what the runs on each problem found, unless the same was timed before, and puts these times in place of the runs' own.
///
/// # Errors
/// Where workers do not start or a file cannot be written.
pub fn hold(plan: &Plan, finished: &mut [Finished], interrupts: &Interrupts) -> anyhow::Result<()> {
    let path = plan.runs_folder().join("contest.json");
    let known = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut known: BTreeMap<String, Times> = known.unwrap_or_default();
    for problem in plan.experiment.problems {
        let own = || finished.iter().filter(|f| f.planned.problem.label == problem.label);
        let kernels: BTreeSet<&str> =
            own().flat_map(|f| &f.found).flatten().map(|found| found.steps.as_str()).collect();
        let is_timed = |times: &Times| kernels.iter().all(|&steps| times.contains_key(steps));
        let Some(first) = own().next() else { continue };
        if known.get(problem.label).is_some_and(is_timed) {
            continue;
        }
        if interrupts.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        message(&format!("{}: timing what the runs found, {}", problem.label, count(kernels.len() as u64, "kernel")));
        let times = race(plan, first, &kernels)?;
        known.insert(problem.label.to_owned(), times);
        let json = serde_json::to_vec(&known).context("times are numbers")?;
        write_whole(&path, |file| file.write_all(&json)).with_context(|| path.display().to_string())?;
    }
    for f in finished {
        let times = known.get(f.planned.problem.label);
        for slot in &mut f.found {
            let time = |found: &Found| times?.get(&found.steps).copied().flatten();
            *slot = slot.take().and_then(|found| Some(Found { ns: time(&found)?, ..found }));
        }
    }
    Ok(())
}

fn race(plan: &Plan, of: &Finished, kernels: &BTreeSet<&str>) -> anyhow::Result<Times> {
    let options = device_options(plan.threads)?;
    let mut device = Device::new(of.workload.clone(), &host::target(), options, |_| Vec::new())?;
    let sources: Vec<Source> = kernels.iter().map(|&steps| Source::Steps(steps.to_owned())).collect();
    let outcomes = device.race(&sources, ROUNDS, ROUND)?;
    let time = |outcome: Outcome| Some(outcome.timing()?.median_ns);
    Ok(kernels.iter().map(|&steps| steps.to_owned()).zip(outcomes.into_iter().map(|(o, _)| time(o))).collect())
}
