//! `tune`: searches, records, and races the best candidates at the end.

use std::sync::atomic::Ordering;

use serde_json::{Value as Json, json};
use tilewright::{DEFAULT_TIME, Request, Session, Workload};
use tilewright_model::{ConfiguredModel, LayoutPurpose, laid_out, settle};

use super::fleet::on_fleet;
use super::model::ModelArgs;
use super::tune_args::{CountedTask, MeasuringMachine, TuneArgs};
use super::tune_report::{RunReport, write_set};
use super::{count, tune_own, worker_command};
use crate::error::{bad_input, describe};
use crate::interrupts::Interrupts;
use crate::output::{message, write_result};
use crate::progress::Shown;
use crate::summary;

/// Tunes a workload, or each workload of a set.
///
/// # Errors
/// Bad input if an argument does not fit or the given database cannot be written; failure if no candidate is
/// correct, workers do not start or records cannot be written.
pub fn run(args: &TuneArgs, as_json: bool) -> anyhow::Result<()> {
    if args.own.is_asked_for() {
        return tune_own::run(args, as_json);
    }
    if ModelArgs::is_model(&args.of.workload) {
        return tune_model(args, as_json);
    }
    args.bindings.refuse(&args.of.workload)?;
    let workloads = args.workloads()?;
    let machine = args.machine()?;
    if let Some(class) = &args.on {
        let requests = workloads.iter().map(|workload| args.request_for(&machine, workload, workloads.len() > 1));
        return on_fleet(args, class, requests.collect::<anyhow::Result<Vec<_>>>()?, None, as_json);
    }
    let interrupts = Interrupts::watch()?;
    args.of.machine.warn_of_limits();
    if args.together {
        let caches = args.cold.caches();
        let tasks: Vec<CountedTask> = workloads.iter().map(|workload| (workload.clone(), 1, caches)).collect();
        return together(args, &machine, &tasks, &interrupts)?.write(as_json);
    }
    if let [workload] = &workloads[..] {
        let report = tune(args, &machine, workload, false, &interrupts)?;
        if report.failure.is_none() || as_json {
            write_result(as_json, &report.json, &report.text)?;
        }
        return report.lost.or(report.failure).map_or(Ok(()), Err);
    }
    // The set's own database may have nothing to learn from yet; any other one must have something now.
    if let Some(transfer) = &args.transfer
        && transfer.path != args.records.database()?.path
    {
        transfer.open()?;
    }
    let mut reports = Vec::new();
    let mut fault = None;
    for workload in &workloads {
        if interrupts.stop.load(Ordering::Relaxed) {
            break;
        }
        let mut report = match tune(args, &machine, workload, true, &interrupts) {
            Ok(report) => report,
            Err(error) if reports.is_empty() => return Err(error),
            // Results found so far are reported.
            Err(error) => {
                fault = Some(error.context(workload.to_string()));
                break;
            }
        };
        message(&match &report.failure {
            None => format!("{}\n", report.text),
            Some(failure) => format!("error: {workload}: {}\n", describe(failure)),
        });
        fault = report.lost.take().map(|lost| lost.context(workload.to_string()));
        reports.push(report);
        if fault.is_some() {
            break;
        }
    }
    write_set(&workloads, &reports, as_json)?;
    fault.or_else(|| reports.into_iter().find_map(|report| report.failure)).map_or(Ok(()), Err)
}

/// Tunes the kernels of a model together.
fn tune_model(args: &TuneArgs, as_json: bool) -> anyhow::Result<()> {
    if args.stop_below.is_some() {
        return Err(bad_input("--stop-below is for one workload at a time, not for a model (leave it out)"));
    }
    let file = ModelArgs::new(&args.of.workload, &args.bindings);
    let model = file.read()?;
    let machine = args.machine()?;
    let (target, runner) = &machine;
    let (plain, _) = file.divided(&model, args.of.rounding, (target, args.of.machine.threads))?;
    let threads = args.of.machine.threads;
    let records = args.records.database()?.records()?;
    let fused = match args.on {
        Some(_) => plain.clone(),
        None => laid_out(plain.clone(), target, threads, LayoutPurpose::Tune(&records))?,
    };
    let (found, asked) = (fused.caches(target), args.cold.asked());
    let task = |(workload, n): (Workload, usize)| {
        let caches = asked.unwrap_or(found.of(&workload));
        (workload, n, caches)
    };
    let tasks: Vec<CountedTask> = fused.tasks().into_iter().map(task).collect();
    let n_untunable = fused.n_untunable();
    if n_untunable > 0 {
        let kernels = count(n_untunable as u64, "kernel");
        let why = "a smaller size's answer is no part of a larger one's";
        message(&format!("{kernels} of any size cannot be tuned ({why}): a model of the machine chooses them"));
    }
    if tasks.is_empty() {
        return Err(bad_input(format!("{} has no kernels to tune", args.of.workload)));
    }
    if let Some(class) = &args.on {
        let request = |(workload, _, caches): &CountedTask| {
            anyhow::Ok(args.request_for(&machine, workload, true)?.caches(*caches))
        };
        let requests = tasks.iter().map(request).collect::<anyhow::Result<Vec<_>>>()?;
        let whole = args.trials.is_none().then(|| args.time.unwrap_or(DEFAULT_TIME));
        return on_fleet(args, class, requests, whole, as_json);
    }
    let interrupts = Interrupts::watch()?;
    args.of.machine.warn_of_limits();
    // A GPU's compiler may take longer for a whole model than all the trials.
    let runs_here = runner.is_none() && target.gpu.is_none();
    let before = runs_here.then(|| ConfiguredModel::known(plain.clone(), target, threads, &records)).transpose()?;
    drop(records);
    let mut tuned = together(args, &machine, &tasks, &interrupts)?;
    if let Some(before) = before.filter(|_| tuned.is_whole(&interrupts)) {
        let database = args.records.database()?;
        // Of several numbers of tokens per run, the smallest is the most common.
        let pieces = file.pieces()?;
        let tokens = pieces.as_ref().and_then(|(name, numbers)| Some((name.as_str(), *numbers.first()?)));
        let largest = file.open_dims(&model.graph)?.map(|open| {
            let whole = file.with_tokens(tokens);
            let whole = open.items.iter().fold(whole, |whole, items| whole.at(items, items.least));
            let whole = open.second.iter().fold(whole, |whole, second| whole.at(second, second.most));
            whole.at(&open.dim, open.dim.most)
        });
        let inputs = largest.as_ref().unwrap_or(&file).inputs(&model, &[])?;
        let whole = ConfiguredModel::known(plain, target, threads, &database.records()?)
            .and_then(|after| settle(&before, after, &inputs, &database));
        match whole {
            Ok(whole) => {
                tuned.text += &whole.text();
                tuned.json["run"] = json!(whole);
            }
            Err(error) => message(&format!("the whole model was not run: {}", describe(&error.into()))),
        }
    }
    tuned.write(as_json)
}

/// Result of a run in which workloads shared the time.
struct Together {
    json: Json,
    text: String,
    failure: Option<anyhow::Error>,
}

impl Together {
    /// Whether every workload has a best, and the user has not interrupted.
    fn is_whole(&self, interrupts: &Interrupts) -> bool {
        self.failure.is_none() && !interrupts.stop.load(Ordering::Relaxed)
    }

    fn write(self, as_json: bool) -> anyhow::Result<()> {
        write_result(as_json, &self.json, &self.text)?;
        self.failure.map_or(Ok(()), Err)
    }
}

/// Tunes workloads together, each with the number of its calls in the whole program: they share the time.
fn together(
    args: &TuneArgs,
    machine: &MeasuringMachine,
    tasks: &[CountedTask],
    interrupts: &Interrupts,
) -> anyhow::Result<Together> {
    let time = args.time.unwrap_or(DEFAULT_TIME);
    let request = |(workload, n, caches): &CountedTask| {
        Ok((args.request_for(machine, workload, true)?.caches(*caches).time(None), *n as f64))
    };
    let labels: Vec<String> = tasks.iter().map(|(workload, ..)| workload.label()).collect();
    let tasks = tasks.iter().map(request).collect::<anyhow::Result<Vec<(Request, f64)>>>()?;
    let session = Session::new(args.records.database()?, worker_command()?);
    let n_workloads = count(labels.len() as u64, "workload");
    message(&format!(
        "{n_workloads} together for {} s, recording to {}",
        time.as_secs_f64(),
        session.database().name()
    ));
    let shown = Shown::together(labels.clone(), interrupts.concerned());
    let tuned = session.run_together(&tasks, time, &interrupts.stop, &shown);
    shown.finish();
    let mut tuned = tuned?;
    let text = summary::together(&tuned, &labels);
    let json = serde_json::to_value(&tuned).expect("invariant: it is numbers and text by name");
    let is_without = tuned.interrupted && tuned.workloads.iter().all(|task| summary::failure(&task.tuned).is_some());
    let failure = match tuned.failure() {
        Some((workload, error)) => Some(anyhow::Error::from(error).context(workload)),
        None => is_without.then(|| summary::failure(&tuned.workloads[0].tuned)).flatten(),
    };
    Ok(Together { json, text, failure })
}

/// Tunes one workload, alone or of a set.
///
/// # Errors
/// As [`run`], except that a run without a winner is reported as a result.
fn tune(
    args: &TuneArgs,
    machine: &MeasuringMachine,
    workload: &Workload,
    is_of_set: bool,
    interrupts: &Interrupts,
) -> anyhow::Result<RunReport> {
    let request = args.request_for(machine, workload, is_of_set)?;
    let session = Session::new(args.records.database()?, worker_command()?);
    let shown = Shown::new(workload, Some(&args.search), args.seed, interrupts.concerned());
    let tuned = session.run(&request, &interrupts.stop, &shown);
    shown.finish();
    Ok(RunReport::new(args, workload, tuned?))
}
