//! `tune`: searches, records, and measures the leaders against each other at the end.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use clap::Args;
use serde_json::{Value as Json, json};
pub use tilewright::words::{milliseconds, seconds};
use tilewright::{Caches, DEFAULT_SEARCH, DEFAULT_TIME, Job, OnRunner, Request, Session, Transfer, Tuned, Workload};
use tilewright_device::host;
use tilewright_ir::Target;
use tilewright_lab::predict::likely_configs;
use tilewright_model::{Choices, Layouts, laid_out, settle};

use super::fleet::{FleetArgs, on_fleet};
use super::model::{BindingArgs, ModelArgs};
use super::race::share;
use super::tune_command::{self, OwnArgs};
use super::{ColdArgs, DatabaseArgs, WorkloadArgs, count, worker_command};
use crate::error::{bad_input, describe};
use crate::interrupts::{Interrupts, remark};
use crate::output::{digits, duration, message, table, write_result};
use crate::progress::Shown;
use crate::summary;

/// Configurations of a model that are tried first, at most.
const MOST_PREDICTED: usize = 16;

/// Arguments of `tune`.
#[derive(Args, Debug)]
#[command(mut_arg("workload", |arg| {
    arg.required(false).required_unless_present_any(OWN).conflicts_with_all(OWN).default_value_ifs(OWN.map(no_workload))
}), mut_arg("url", |arg| arg.requires("on")))]
pub struct TuneArgs {
    #[command(flatten)]
    of: WorkloadArgs,
    #[command(flatten)]
    bindings: BindingArgs,
    /// Search, with options behind a colon, such as genetic:population=50; see `searches`
    #[arg(long, value_name = "NAME", default_value = DEFAULT_SEARCH)]
    pub(super) search: String,
    /// Template whose space is searched [default: the operator's first one]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// Trials to come to, those recorded by earlier runs included
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) trials: Option<u64>,
    /// Time for the search in this run [default: 60 where neither --trials nor --stop-below is given]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) time: Option<Duration>,
    /// End the search where the next minute is expected to gain less than this share of the best time, such
    /// as 1%; no time limit then unless --time gives one
    #[arg(long, value_name = "PERCENT", value_parser = share, conflicts_with = "together")]
    stop_below: Option<f64>,
    /// Share the time among the workloads of a set, each turn to the one by which all of them together are
    /// expected to gain most; --time is then the time of the whole run
    #[arg(long)]
    together: bool,
    /// Seed of the search and of the random inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// Leave out the configurations that the template would begin with: the search proposes all
    #[arg(long)]
    no_guesses: bool,
    /// Leave out the race of the leaders and the untuned kernel at the end: the fastest trial is the result
    #[arg(long)]
    pub(super) no_race: bool,
    /// Begin anew: forget what is recorded of it, as where a program or a machine has changed
    #[arg(long)]
    pub(super) fresh: bool,
    /// Learn from recorded trials of other workloads: all in the database, or those named; a run begins with
    /// their best configurations, and a search with a model that can learn from them does. A command or a
    /// kernel of yours begins with the best of a file of another tuner
    #[arg(long, value_name = "DB[,WORKLOAD...]", value_parser = transfer)]
    pub(super) transfer: Option<Transfer>,
    /// Begin with what a model, which `predict train --db` wrote, says is best
    #[arg(long, value_name = "MODEL")]
    predict: Option<PathBuf>,
    #[command(flatten)]
    cold: ColdArgs,
    /// Run and time hopeless candidates to the end too, as where the whole space is of interest
    #[arg(long)]
    pub(super) to_the_end: bool,
    /// Leave in what a GPU's limits rule out, as papers do: an instantiation_error each
    #[arg(long)]
    beyond_limits: bool,
    /// Time to spend in the runs of each candidate, in milliseconds
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub(super) min_time: Option<Duration>,
    /// Longest that building a candidate may take
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) build_timeout: Option<Duration>,
    /// Longest that the runs of a candidate may take; hopeless ones are given up earlier
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) run_timeout: Option<Duration>,
    #[command(flatten)]
    pub(super) records: DatabaseArgs,
    #[command(flatten)]
    pub(super) own: OwnArgs,
    #[command(flatten)]
    pub(super) fleet: FleetArgs,
    /// Measure on the devices of this class of a fleet: see `fleet` and `serve`
    #[arg(long, value_name = "CLASS", requires = "url", conflicts_with_all = NOT_ON)]
    on: Option<String>,
    /// Measure on a device without a compiler, where this starts a runner: 'ssh pi ./tw-run'; see `runner`
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["on", "command", "kernel"])]
    runner: Option<String>,
}

/// Options that are tuned in the place of a workload.
const OWN: [&str; 2] = ["command", "kernel"];

/// Options without meaning on a fleet, or that its devices decide.
const NOT_ON: [&str; 6] = ["together", "command", "kernel", "device", "target", "beyond_limits"];

/// A workload, how often the whole runs it, and what it finds in the caches.
type Task = (Workload, usize, Caches);

/// Machine that measures candidates: the target, and the runner where that is another device.
type Machine = (Target, Option<OnRunner>);

fn transfer(text: &str) -> Result<Transfer, String> {
    Ok(Transfer::parse(text)?.called("--transfer"))
}

/// Condition that makes the workload optional: where this option is given.
fn no_workload(own: &'static str) -> (&'static str, clap::builder::ArgPredicate, Option<&'static str>) {
    (own, clap::builder::ArgPredicate::IsPresent, Some(""))
}

impl TuneArgs {
    /// Threads that a user's program or kernel may use.
    ///
    /// # Errors
    /// Bad input where there are fewer CPUs.
    pub fn own_threads(&self) -> anyhow::Result<usize> {
        self.of.machine.place().cpu_target()?;
        Ok(self.of.machine.threads)
    }

    /// The threads and the device for a kernel of the user's.
    ///
    /// # Errors
    /// As [`TuneArgs::own_threads`], of one for CPUs.
    pub fn own_place(&self, is_for_gpu: bool) -> anyhow::Result<(usize, String)> {
        let threads = if is_for_gpu { self.of.machine.threads } else { self.own_threads()? };
        Ok((threads, self.of.machine.device.clone()))
    }

    /// The workloads that it names.
    ///
    /// # Errors
    /// Bad input where it names none.
    pub fn workloads(&self) -> anyhow::Result<Vec<Workload>> {
        self.of.workloads()
    }

    /// Finds the machine that measures candidates. A runner is started for that, and reports its device.
    ///
    /// # Errors
    /// Bad input where there is no such machine, or code for the target does not run there.
    pub fn machine(&self) -> anyhow::Result<Machine> {
        Ok(match self.on {
            // What they are, its devices say.
            Some(_) => (host::target(), None),
            None => self.of.machine.place().with_runner(self.runner.as_deref())?,
        })
    }

    /// Makes the request for a subject.
    pub fn request(&self, job: impl Into<Job>) -> Request {
        let request = Request::new(job)
            .search(self.search.as_str())
            .trials(self.trials)
            .time(self.time)
            .stop_below(self.stop_below)
            .seed(self.seed)
            .threads(self.of.machine.threads)
            .guesses(!self.no_guesses)
            .race(!self.no_race)
            .fresh(self.fresh)
            .caches(self.cold.caches())
            .to_the_end(self.to_the_end)
            .beyond_limits(self.beyond_limits)
            .min_time(self.min_time)
            .build_timeout(self.build_timeout)
            .run_timeout(self.run_timeout)
            .memory_bytes(self.own.memory_bytes())
            .transfer(self.transfer.clone());
        match &self.template {
            Some(template) => request.template(template.as_str()),
            None => request,
        }
    }

    /// Makes the request for one of its workloads, alone or of a set.
    ///
    /// # Errors
    /// Bad input if a model does not fit.
    pub fn request_for(
        &self,
        (target, runner): &Machine,
        workload: &Workload,
        is_of_set: bool,
    ) -> anyhow::Result<Request> {
        // The first of a set may have none before it to learn from.
        let transfer = self.transfer.clone().map(|transfer| if is_of_set { transfer.optional() } else { transfer });
        let request = self.request(workload.clone()).target(target.clone()).runner(runner.clone()).transfer(transfer);
        let Some(model) = &self.predict else { return Ok(request) };
        let first = likely_configs(model, &request.task()?, self.cold.caches(), MOST_PREDICTED)?;
        let n_configs = count(first.len() as u64, "configuration");
        message(&format!("beginning with {n_configs} predicted by {}", model.display()));
        Ok(request.first(first))
    }
}

/// Result of a run.
pub struct Report {
    /// Result as `tune --json` prints it.
    pub json: Json,
    /// Result as a user reads it.
    pub text: String,
    /// Reason why there is no winner, where there should be one.
    pub failure: Option<anyhow::Error>,
    /// Error that lost records, where it did; the run ended with that.
    pub lost: Option<anyhow::Error>,
}

/// Tunes a workload, or each workload of a set.
///
/// # Errors
/// Bad input where an argument does not fit or the database given cannot be written; failure where no
/// candidate gave a right answer, workers do not start or records cannot be written.
pub fn run(args: &TuneArgs, as_json: bool) -> anyhow::Result<()> {
    if args.own.is_asked_for() {
        return tune_command::run(args, as_json);
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
        let tasks: Vec<Task> = workloads.iter().map(|workload| (workload.clone(), 1, caches)).collect();
        return together(args, &machine, &tasks, &interrupts)?.write(as_json);
    }
    if let [workload] = &workloads[..] {
        let report = tune(args, &machine, workload, false, &interrupts)?;
        if report.failure.is_none() || as_json {
            write_result(as_json, &report.json, &report.text)?;
        }
        return report.lost.or(report.failure).map_or(Ok(()), Err);
    }
    // The set's own database may have nothing to learn from yet; another one has it, or never will.
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
            // What was found until then is told.
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

/// Writes what the workloads of a set came to.
///
/// # Errors
/// If it cannot be written.
pub fn write_set(workloads: &[Workload], reports: &[Report], as_json: bool) -> anyhow::Result<()> {
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

/// Tunes the kernels of a model together.
fn tune_model(args: &TuneArgs, as_json: bool) -> anyhow::Result<()> {
    if args.stop_below.is_some() {
        return Err(bad_input("--stop-below is for one workload at a time, not for a model (leave it out)"));
    }
    let file = ModelArgs::new(&args.of.workload, &args.bindings);
    let model = file.read()?;
    let machine = args.machine()?;
    let (target, runner) = &machine;
    let plain = file.lowered(&model, args.of.rounding, target)?;
    let threads = args.of.machine.threads;
    let records = args.records.database()?.records()?;
    let fused = match args.on {
        Some(_) => plain.clone(),
        None => laid_out(plain.clone(), target, threads, Layouts::Tune(&records))?,
    };
    let (found, asked) = (fused.caches(target), args.cold.asked());
    let task = |(workload, n): (Workload, usize)| {
        let caches = asked.unwrap_or(found.of(&workload));
        (workload, n, caches)
    };
    let tasks: Vec<Task> = fused.tasks().into_iter().map(task).collect();
    if tasks.is_empty() {
        return Err(bad_input(format!("{} has no kernels to tune", args.of.workload)));
    }
    if let Some(class) = &args.on {
        let request =
            |(workload, _, caches): &Task| anyhow::Ok(args.request_for(&machine, workload, true)?.caches(*caches));
        let requests = tasks.iter().map(request).collect::<anyhow::Result<Vec<_>>>()?;
        let whole = args.trials.is_none().then(|| args.time.unwrap_or(DEFAULT_TIME));
        return on_fleet(args, class, requests, whole, as_json);
    }
    let interrupts = Interrupts::watch()?;
    args.of.machine.warn_of_limits();
    // A GPU's compiler may take longer for a whole model than all the trials.
    let runs_here = runner.is_none() && target.gpu.is_none();
    let before = runs_here.then(|| Choices::known(plain.clone(), target, threads, &records)).transpose()?;
    drop(records);
    let mut tuned = together(args, &machine, &tasks, &interrupts)?;
    if let Some(before) = before.filter(|_| tuned.is_whole(&interrupts)) {
        let database = args.records.database()?;
        let largest = file.open_dim()?.map(|dim| file.at(&dim, dim.most));
        let inputs = largest.as_ref().unwrap_or(&file).inputs(&model, &[])?;
        let whole = Choices::known(plain, target, threads, &database.records()?)
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
    /// Whether every workload has its best, and nobody waits.
    fn is_whole(&self, interrupts: &Interrupts) -> bool {
        self.failure.is_none() && !interrupts.stop.load(Ordering::Relaxed)
    }

    fn write(self, as_json: bool) -> anyhow::Result<()> {
        write_result(as_json, &self.json, &self.text)?;
        self.failure.map_or(Ok(()), Err)
    }
}

/// Tunes workloads together, each with how often the whole runs it: they share the time.
fn together(args: &TuneArgs, machine: &Machine, tasks: &[Task], interrupts: &Interrupts) -> anyhow::Result<Together> {
    let time = args.time.unwrap_or(DEFAULT_TIME);
    let request = |(workload, n, caches): &Task| {
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
    let failure = tuned.failure().map(|(workload, error)| anyhow::Error::from(error).context(workload));
    Ok(Together { json, text, failure })
}

/// Tunes one workload, alone or of a set.
///
/// # Errors
/// As [`run`], but that a run without a winner is a report of that.
fn tune(
    args: &TuneArgs,
    machine: &Machine,
    workload: &Workload,
    is_of_set: bool,
    interrupts: &Interrupts,
) -> anyhow::Result<Report> {
    let request = args.request_for(machine, workload, is_of_set)?;
    let session = Session::new(args.records.database()?, worker_command()?);
    let shown = Shown::new(workload, Some(&args.search), args.seed, interrupts.concerned());
    let tuned = session.run(&request, &interrupts.stop, &shown);
    shown.finish();
    Ok(Report::new(args, workload, tuned?))
}

impl Report {
    /// Reports a run.
    pub fn new(args: &TuneArgs, workload: &Workload, mut tuned: Tuned) -> Report {
        remark(&tuned);
        let lost = tuned.lost.take().map(anyhow::Error::from);
        let json = serde_json::to_value(&tuned).expect("invariant: it is numbers and text by name");
        let text = summary::tuned(&tuned, workload, !args.no_race);
        let failure = tuned.failure().map(anyhow::Error::from);
        Report { json, text, failure, lost }
    }
}
