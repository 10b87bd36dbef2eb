//! Experiment on operators: each is tuned, then compared with libraries in interleaved rounds.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tilewright::bench::{Bench, BenchRequest, OURS, PEERS};
use tilewright::format::{count, digits};
use tilewright::version::BUILD;
use tilewright::{Database, Error, Note, Request, Session, since_1970, with_suffix};
use tilewright_device::device::WorkerCommand;

use super::beside::{self, BesideRequest};
use super::folder::PAGE;
use super::plan::only;
use super::results::markdown;
use super::table::{RESNET_AND_MATMUL, SpaceProblem};
use super::{Cost, ExperimentResult, data, folder};
use crate::clock::utc;
use crate::plot::{Bar, Layer, Marks, Plot, PlotAxis, Scale, colours, sheet};
use crate::stats::geometric_mean;
use crate::{Caller, LabEvent, OrFailed};

/// Name on the command line.
pub const NAME: &str = "autotvm-operators";
/// Paper that it reproduces.
pub const PAPER: &str = "AutoTVM";
/// Figure that it reproduces.
pub const FIGURE: &str = "figure 10";
/// Subject of the comparison, in one line.
pub const COMPARES: &str = "C1 to C12 and 1024³, each tuned, beside other libraries";
/// Deviations from the paper, in one line.
pub const DIFFERS: &str = "the libraries that `bench` knows in the place of TensorComprehensions, TensorFlow Lite and the ARM \
                           Compute Library; no depthwise layers";
/// Deviations due to running on a CPU, in one line.
pub const ON_CPUS: &str = "a CPU; oneDNN and OpenBLAS in the place of cuDNN";
/// Default tuning time per operator.
pub const TIME: Duration = Duration::from_secs(60);

/// Rounds of a comparison; each runs every implementation once, in random order.
const ROUNDS: u32 = 15;
/// Seconds that start, race and comparison of an operator take.
const BESIDE_SECONDS: f64 = 30.0;

/// Operator that was tuned and measured; a row of `data.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct OperatorOutcome {
    problem: String,
    workload: String,
    started: String,
    version: String,
    cpu: String,
    trials: u64,
    /// Measured implementations, the fastest first.
    implementations: Vec<MeasuredOperator>,
    /// Libraries that were left out, with reasons.
    left_out: Vec<String>,
}

/// Implementation of an operator.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct MeasuredOperator {
    name: String,
    gflops: f64,
    ms_median: f64,
    spread: f64,
    version: String,
}

/// Cost of all operators.
pub fn cost() -> Cost {
    let n_runs = RESNET_AND_MATMUL.len() as u64;
    Cost { n_runs, n_trials: None, most_seconds: n_runs as f64 * (TIME.as_secs_f64() + BESIDE_SECONDS) }
}

/// Tunes and measures the operators without results in the folder, and writes data, a plot and a page. When
/// stopped it leaves what is complete; the next call continues from there.
///
/// # Errors
/// Bad input if there is no such problem or the folder holds something else; failure if workers do not
/// start or files cannot be written.
pub fn carry_out(request: &BesideRequest, worker: &WorkerCommand, caller: Caller) -> Result<ExperimentResult, Error> {
    let problems = only("problem", &request.problems, RESNET_AND_MATMUL.to_vec(), |one| one.label.to_owned())?;
    let (folder, own) = (request.folder(NAME), request.identity(NAME));
    let (_claim, before) = folder::claim(&folder, &own)?;
    let rows = before["operators"].as_array().into_iter().flatten();
    let known = rows.filter_map(|row| OperatorOutcome::deserialize(row).ok());
    let known = known.map(|outcome| (outcome.problem.clone(), outcome)).collect();
    let names: Vec<&str> = problems.iter().map(|problem| problem.label).collect();
    let mut outcomes = beside::outcomes(&folder, &names, known, caller, |place, at| {
        measure(request, &problems[place], &at("db"), worker, caller)
    })?;
    let n_complete = names.iter().filter(|name| outcomes.contains_key(**name)).count();
    let outcomes: Vec<OperatorOutcome> =
        RESNET_AND_MATMUL.iter().filter_map(|problem| outcomes.remove(problem.label)).collect();
    let page = OperatorsPage { request, folder: &folder, outcomes: &outcomes };
    Ok(ExperimentResult { data: page.write(own)?, n_runs: problems.len(), n_complete, folder })
}

/// Tunes an operator and compares it with libraries; `None` if stopped.
fn measure(
    request: &BesideRequest,
    problem: &SpaceProblem,
    database: &Path,
    worker: &WorkerCommand,
    caller: Caller,
) -> Result<Option<OperatorOutcome>, Error> {
    let BesideRequest { time, seed, ref hardware, ref peer_path, .. } = *request;
    // Starts over if an earlier run was interrupted.
    for path in ["", "-wal", "-shm"].map(|ending| with_suffix(database, ending)) {
        if path.exists() {
            fs::remove_file(&path).or_failed(path.display())?;
        }
    }
    let started = utc(since_1970().as_secs());
    let tuning = Request::parse(problem.workload)?
        .threads(hardware.threads)
        .target(hardware.target.clone())
        .seed(seed)
        .time(time);
    let workload = tuning.workload()?;
    let session = Session::new(Database::new(Some(database))?, worker.clone());
    caller.say(format!("{}: tuning it for {} s", problem.label, time.as_secs_f64()));
    let search = tuning.settings().search.as_str();
    let mut tuned =
        caller.watch(workload, Some(search), seed, |observer| session.run(&tuning, caller.stop, observer))?;
    (caller.tell)(LabEvent::Tuned(&tuned));
    if let Some(lost) = tuned.lost.take() {
        return Err(lost);
    }
    if caller.is_stopped() {
        return Ok(None);
    }
    let bench = BenchRequest {
        target: hardware.target.clone(),
        threads: hardware.threads,
        rounds: ROUNDS,
        peer_path: peer_path.clone(),
        ..BenchRequest::new(workload.clone())
    };
    let left_out = std::sync::Mutex::new(Vec::new());
    let note = |note: Note| match note {
        Note::LeftOut(reason) => left_out.lock().expect("nobody panics").push(reason),
        note => (caller.tell)(LabEvent::Note(note)),
    };
    (caller.tell)(LabEvent::Begin(workload, None, seed));
    let measured = session.bench(&bench, &note);
    (caller.tell)(LabEvent::Done);
    let Bench::Measured(rows) = measured? else {
        return Err(Error::failed(format!(
            "{}: no candidate was valid within {} s",
            problem.label,
            time.as_secs_f64()
        )));
    };
    let left_out = left_out.into_inner().expect("nobody panics");
    left_out.iter().for_each(|reason| caller.say(reason.clone()));
    let implementations = rows.into_iter().map(|row| MeasuredOperator {
        name: row.implementation.to_owned(),
        gflops: row.gflops_median,
        ms_median: row.ms_median,
        spread: row.spread,
        version: row.version,
    });
    Ok(Some(OperatorOutcome {
        problem: problem.label.to_owned(),
        workload: problem.workload.to_owned(),
        started,
        version: BUILD.to_owned(),
        cpu: hardware.name.clone(),
        trials: tuned.new_trials,
        implementations: implementations.collect(),
        left_out,
    }))
}

impl OperatorOutcome {
    fn of(&self, name: &str) -> Option<&MeasuredOperator> {
        self.implementations.iter().find(|measured| measured.name == name)
    }

    /// Our speedup over another implementation.
    fn speedup(&self, other: &str) -> Option<f64> {
        Some(self.of(other)?.ms_median / self.of(OURS)?.ms_median)
    }
}

/// Contents of the folder.
struct OperatorsPage<'a> {
    request: &'a BesideRequest,
    folder: &'a Path,
    outcomes: &'a [OperatorOutcome],
}

impl OperatorsPage<'_> {
    /// Writes all files and returns the contents of `data.json`.
    fn write(&self, own: Json) -> Result<Json, Error> {
        let speedups =
            self.others().into_iter().filter_map(|name| Some(json!({"over": name, "geomean": self.mean(name)?})));
        let facts = json!({
            "paper": PAPER,
            "figure": FIGURE,
            "differs": self.request.hardware.differences(ON_CPUS, DIFFERS),
            "command": self.request.command(NAME),
            "complete": self.outcomes.len() == RESNET_AND_MATMUL.len(),
            "operators": self.outcomes,
            "speedups": speedups.collect::<Vec<_>>(),
        });
        let files = [("speed.svg", sheet(&[self.speed()], 1)), (PAGE, self.readme())];
        beside::write(self.folder, own, facts, files.map(|(name, text)| (name.to_owned(), text)))
    }

    /// Libraries that were measured on any operator.
    fn others(&self) -> Vec<&'static str> {
        let all = PEERS.iter().map(|spec| spec.name);
        all.filter(|name| self.outcomes.iter().any(|outcome| outcome.of(name).is_some())).collect()
    }

    /// Our speedup over another implementation, as the geometric mean over the operators that both run.
    fn mean(&self, other: &str) -> Option<f64> {
        let ratios: Vec<f64> = self.outcomes.iter().filter_map(|outcome| outcome.speedup(other)).collect();
        geometric_mean(&ratios)
    }

    fn readme(&self) -> String {
        let differs = self.request.hardware.differences(ON_CPUS, DIFFERS);
        let mut out = format!("# {NAME}\n\n{PAPER}: {COMPARES} ({FIGURE}).\nDiffers from the paper: {differs}.\n");
        let Some(first) = self.outcomes.first() else { return out + "\nNo operator is complete yet.\n" };
        let _ = write!(
            out,
            "\n`{}` on {}, {}, from {} on, version {}.\n{} of {} complete, {}; each is tuned for {} s.\n\n\
             GFLOP/s, the median over rounds in which all ran in turns; the last row is how many times as fast ours is, \
             as geometric means.\n\n",
            self.request.command(NAME),
            first.cpu,
            self.request.hardware.target.name(),
            first.started,
            first.version,
            self.outcomes.len(),
            count(RESNET_AND_MATMUL.len() as u64, "operator"),
            self.request.hardware.extent(),
            self.request.time.as_secs_f64(),
        );
        let others = self.others();
        let names = || std::iter::once(OURS).chain(others.iter().copied());
        let mut rows = vec![["problem", "trials"].into_iter().chain(names()).map(str::to_owned).collect::<Vec<_>>()];
        for outcome in self.outcomes {
            let speed = |name: &str| outcome.of(name).map_or("–".to_owned(), |measured| digits(measured.gflops));
            let first = [outcome.problem.clone(), outcome.trials.to_string()];
            rows.push(first.into_iter().chain(names().map(speed)).collect());
        }
        let mean = |name: &&str| self.mean(name).map_or("–".to_owned(), |mean| format!("{mean:.2}"));
        let first = ["ours over it", "", ""].map(str::to_owned);
        rows.push(first.into_iter().chain(others.iter().map(mean)).collect());
        out += &markdown(&rows);
        let left_out: std::collections::BTreeSet<&str> =
            self.outcomes.iter().flat_map(|outcome| &outcome.left_out).map(String::as_str).collect();
        if !left_out.is_empty() {
            out += "\nLeft out:\n\n";
            out.extend(left_out.iter().map(|reason| format!("- {reason}\n")));
        }
        out + "\n## Speed\n\n![Speed](speed.svg)\n\n"
            + &format!("`{}` holds the numbers and `runs/` the records.\n", data::name(self.folder))
    }

    /// Bar chart with a bar for each implementation of each operator.
    fn speed(&self) -> Plot {
        let names: Vec<&str> = std::iter::once(OURS).chain(self.others()).collect();
        let labels: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let width = 0.8 / names.len() as f64;
        let layers = names.iter().zip(colours(&labels)).enumerate().map(|(at, (name, colour))| {
            let bars = self.outcomes.iter().enumerate().filter_map(|(place, outcome)| {
                let measured = outcome.of(name)?;
                let left = place as f64 - 0.4 + at as f64 * width;
                let text = format!("{name}: {} GFLOP/s", digits(measured.gflops));
                Some(Bar { x: (left, left + width * 0.92), y: (0.0, measured.gflops), text })
            });
            Layer { label: (*name).to_owned(), colour, marks: Marks::Bars(bars.collect()) }
        });
        let problems = self.outcomes.iter().map(|outcome| outcome.problem.clone()).collect();
        Plot {
            title: "Speed of operators".into(),
            x: PlotAxis { label: String::new(), scale: Scale::Categories(problems) },
            y: PlotAxis { label: "GFLOP/s".into(), scale: Scale::FromZero },
            layers: layers.collect(),
        }
    }
}
