//! Options of `tune`, and the requests that they make.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tilewright::format::{milliseconds, seconds};
use tilewright::{Caches, DEFAULT_SEARCH, Job, OnRunner, Request, Transfer, Workload};
use tilewright_device::host;
use tilewright_ir::Target;
use tilewright_lab::predict::likely_configs;

use super::fleet_args::FleetArgs;
use super::model::BindingArgs;
use super::own_args::{OF_COMMAND, OwnArgs};
use super::race::share;
use super::{ColdArgs, DatabaseArgs, WorkloadArgs, count};
use crate::output::message;

/// Maximum number of a model's predicted configurations that are tried first.
const MOST_PREDICTED: usize = 16;

/// Arguments of `tune`.
#[derive(Args, Debug)]
#[command(mut_arg("workload", |arg| {
    let arg = arg.required(false).required_unless_present_any(OWN).default_value_ifs(OWN.map(no_workload));
    arg.conflicts_with_all(OWN).conflicts_with_all(OF_COMMAND)
}), mut_arg("url", |arg| arg.requires("on").conflicts_with_all(NOT_ON)), mut_args(|arg| {
    if NOT_OWN.contains(&arg.get_id().as_str()) { arg.conflicts_with_all(OWN) } else { arg }
}))]
pub struct TuneArgs {
    #[command(flatten)]
    pub(super) of: WorkloadArgs,
    #[command(flatten)]
    pub(super) bindings: BindingArgs,
    /// Search, with options behind a colon, such as genetic:population=50; see `searches`
    #[arg(long, value_name = "NAME", default_value = DEFAULT_SEARCH)]
    pub(super) search: String,
    /// Template whose space is searched [default: the operator's first one]
    #[arg(long, value_name = "NAME")]
    template: Option<String>,
    /// Total number of trials, including those recorded by earlier runs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) trials: Option<u64>,
    /// Time for the search in this run [default: 60 if neither --trials nor --stop-below is given]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) time: Option<Duration>,
    /// End the search when the next minute is expected to gain less than this share of the best time, such as
    /// 1%; without --time there is no time limit then
    #[arg(long, value_name = "PERCENT", value_parser = share, conflicts_with = "together")]
    pub(super) stop_below: Option<f64>,
    /// Share the time among the workloads of a set, each turn going to the workload with the largest expected
    /// gain of their total time; --time is then the time of the whole run
    #[arg(long)]
    pub(super) together: bool,
    /// Seed of the search and of the random inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// Skip the template's first guesses: the search proposes all configurations
    #[arg(long)]
    no_guesses: bool,
    /// Skip the race of the leaders and the untuned kernel at the end: the fastest trial is the result
    #[arg(long)]
    pub(super) no_race: bool,
    /// Start over: discard the recorded trials of the workload, for example after a change of a program or of
    /// the machine
    #[arg(long)]
    pub(super) fresh: bool,
    /// Learn from recorded trials of other workloads: all in the database, or those named; a run begins with
    /// their best configurations, and searches with a transferable model learn from them. A command or a
    /// kernel of yours begins with the best configurations in a file of another tuner
    #[arg(long, value_name = "DB[,WORKLOAD...]", value_parser = transfer)]
    pub(super) transfer: Option<Transfer>,
    /// Begin with the configurations that a model predicts to be best; `predict train --db` writes such
    /// models
    #[arg(long, value_name = "MODEL")]
    predict: Option<PathBuf>,
    #[command(flatten)]
    pub(super) cold: ColdArgs,
    /// Time slow candidates completely instead of stopping them early, if the whole space is of interest
    #[arg(long)]
    pub(super) to_the_end: bool,
    /// Include configurations beyond a GPU's limits, as papers do; each is an instantiation_error
    #[arg(long)]
    beyond_limits: bool,
    /// Minimum time of the runs of each candidate, in milliseconds
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub(super) min_time: Option<Duration>,
    /// Timeout of building a candidate
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) build_timeout: Option<Duration>,
    /// Timeout of the runs of a candidate; slow candidates are stopped earlier
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
    pub(super) on: Option<String>,
    /// Measure on a device without a compiler, through a runner that this command starts: 'ssh pi ./tw-run';
    /// see `runner`
    #[arg(long, value_name = "COMMAND", conflicts_with = "on")]
    runner: Option<String>,
}

/// Options that replace the workload.
const OWN: [&str; 2] = ["command", "kernel"];

/// Options of workloads alone.
const NOT_OWN: [&str; 8] = ["exact", "bf16", "dim", "shape", "set", "together", "predict", "runner"];

/// Options that do not apply to a fleet, or that its devices determine.
const NOT_ON: [&str; 6] = ["together", "command", "kernel", "device", "target", "beyond_limits"];

/// Workload, the number of its calls in the whole program, and the cache state.
pub type CountedTask = (Workload, usize, Caches);

/// Machine that measures candidates: the target, and the runner if it is another device.
pub type MeasuringMachine = (Target, Option<OnRunner>);

fn transfer(text: &str) -> Result<Transfer, String> {
    Ok(Transfer::parse(text)?.called("--transfer"))
}

/// Condition under which the workload is optional: if this option is given.
fn no_workload(own: &'static str) -> (&'static str, clap::builder::ArgPredicate, Option<&'static str>) {
    (own, clap::builder::ArgPredicate::IsPresent, Some(""))
}

impl TuneArgs {
    /// Threads that a user's program or kernel may use.
    ///
    /// # Errors
    /// Bad input if there are fewer CPUs.
    pub fn own_threads(&self) -> anyhow::Result<usize> {
        self.of.machine.place().cpu_target()?;
        Ok(self.of.machine.threads)
    }

    /// Resolves the threads and the device for a user's kernel.
    ///
    /// # Errors
    /// As [`TuneArgs::own_threads`], for a CPU kernel.
    pub fn own_place(&self, is_for_gpu: bool) -> anyhow::Result<(usize, String)> {
        let threads = if is_for_gpu { self.of.machine.threads } else { self.own_threads()? };
        Ok((threads, self.of.machine.device.clone()))
    }

    /// Parses the workloads.
    ///
    /// # Errors
    /// Bad input if none is named.
    pub fn workloads(&self) -> anyhow::Result<Vec<Workload>> {
        self.of.workloads()
    }

    /// Finds the machine that measures candidates. A runner is started for that, and reports its device.
    ///
    /// # Errors
    /// Bad input if there is no such machine, or code for the target does not run there.
    pub fn machine(&self) -> anyhow::Result<MeasuringMachine> {
        Ok(match self.on {
            // The devices of a fleet report their own target.
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
        (target, runner): &MeasuringMachine,
        workload: &Workload,
        is_of_set: bool,
    ) -> anyhow::Result<Request> {
        // The first one of a set may have nothing before it to learn from.
        let transfer = self.transfer.clone().map(|transfer| if is_of_set { transfer.optional() } else { transfer });
        let request = self.request(workload.clone()).target(target.clone()).runner(runner.clone()).transfer(transfer);
        let Some(model) = &self.predict else { return Ok(request) };
        let first = likely_configs(model, &request.task()?, self.cold.caches(), MOST_PREDICTED)?;
        let n_configs = count(first.len() as u64, "configuration");
        message(&format!("beginning with {n_configs} predicted by {}", model.display()));
        Ok(request.first(first))
    }
}
