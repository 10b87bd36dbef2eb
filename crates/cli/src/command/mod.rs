//! The subcommands, and what several of them take.

pub mod bench;
pub mod best;
pub mod doctor;
pub mod experiment;
pub mod predict;
pub mod record_space;
pub mod records;
pub mod replay;
pub mod report;
pub mod searches;
pub mod show;
pub mod space;
pub mod tune;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde_json::{Value as Json, json};
use tilewright_device::data::DataError;
use tilewright_device::device::WorkerCommand;
use tilewright_device::limits::{self, Allowed};
use tilewright_device::{Device, DeviceError, Options, host};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_ir::target::NAMED;
use tilewright_tune::record::Judges;
use tilewright_tune::{Best, Judge, PassedOver, Record, Setting, Store, StoreError, TEMPLATES, Task, TaskKey};

use crate::database::Database;
use crate::error::{OrBadInput, bad_input};
use crate::output::{grouped, message, shell_quoted};
use crate::progress::{Progress, Status};
use tune::Interrupts;

/// The hidden subcommand that is a worker of a device.
pub const WORKER: &str = "worker";

/// A file that the user named, as a whole; `wanted` says what it should be.
///
/// # Errors
/// Bad input where it cannot be read.
fn read_file(path: &Path, wanted: &str) -> anyhow::Result<Vec<u8>> {
    let name = path.display();
    if path.is_dir() {
        return Err(bad_input(format!("cannot read {name}: it is a folder (give {wanted})")));
    }
    std::fs::read(path).map_err(|error| bad_input(format!("cannot read {name}: {error} (give {wanted})")))
}

/// What is to be computed, on what.
#[derive(Args, Debug)]
pub struct WorkloadArgs {
    /// Operator and sizes, such as matmul:m=1024,n=1024,k=1024, or an alias, such as matmul-1024
    pub workload: String,
    /// Keep out algorithms that round more than the operator as written, such as Winograd's; the same as
    /// exact=1
    #[arg(long)]
    pub exact: bool,
    /// The machine and the threads.
    #[command(flatten)]
    pub machine: MachineArgs,
}

impl WorkloadArgs {
    /// The workload.
    ///
    /// # Errors
    /// Bad input where the text names none.
    pub fn workload(&self) -> anyhow::Result<Workload> {
        let mut workload = Workload::parse(&self.workload).or_bad_input("")?;
        workload.exact |= self.exact;
        Ok(workload)
    }

    /// The workload, or those of a set.
    ///
    /// # Errors
    /// As [`WorkloadArgs::workload`].
    pub fn workloads(&self) -> anyhow::Result<Vec<Workload>> {
        parse_workloads(&self.workload, self.exact)
    }
}

/// The workloads that a text names: one, or those of a set.
///
/// # Errors
/// Bad input where it names none.
pub fn parse_workloads(text: &str, exact: bool) -> anyhow::Result<Vec<Workload>> {
    let mut workloads = Workload::parse_all(text).or_bad_input("")?;
    workloads.iter_mut().for_each(|w| w.exact |= exact);
    Ok(workloads)
}

/// Most threads that code is made for.
const MOST_THREADS: usize = 4096;

/// The machine that kernels are for.
#[derive(Args, Debug)]
pub struct MachineArgs {
    /// Threads that a kernel may use
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: usize,
    /// Machine to generate code for: host, x86-64, x86-64-v3, x86-64-v4, aarch64, cortex-a53
    #[arg(long, value_name = "NAME", default_value = "host")]
    pub target: String,
}

/// Where records are kept.
#[derive(Args, Debug)]
pub struct DatabaseArgs {
    /// Database of records [default: tilewright/records.db in the user's data folder]
    #[arg(long, value_name = "FILE")]
    pub db: Option<PathBuf>,
}

impl DatabaseArgs {
    /// The database.
    ///
    /// # Errors
    /// See [`Database::new`].
    pub fn database(&self) -> anyhow::Result<Database> {
        Database::new(self.db.as_deref())
    }
}

impl MachineArgs {
    /// The target.
    ///
    /// # Errors
    /// Bad input where no target has this name.
    pub fn target(&self) -> anyhow::Result<Target> {
        if self.target == "host" {
            return Ok(host::target());
        }
        Target::named(&self.target).ok_or_else(|| {
            let known: Vec<&str> = std::iter::once("host").chain(NAMED.iter().map(|(name, _)| *name)).collect();
            bad_input(format!("unknown target `{}`; there are {}", self.target, known.join(", ")))
        })
    }

    /// The target, for kernels that are to run here.
    ///
    /// # Errors
    /// Bad input if there is no such target, it is another kind of machine, or there are fewer CPUs than
    /// threads.
    pub fn runnable_target(&self) -> anyhow::Result<Target> {
        let target = self.target()?;
        let host = host::target();
        if target.arch != host.arch || target.vector_bits > host.vector_bits {
            let reason = format!("kernels for target `{}` do not run on this machine, which is {host}", self.target);
            return Err(bad_input(format!("{reason} (leave --target out; `show` makes code for other machines)")));
        }
        self.check_cpus()?;
        Ok(target)
    }

    /// The number of threads, for kernels that need not run here unless the target is this machine.
    ///
    /// # Errors
    /// Bad input where no machine, or not this one, has so many.
    pub fn check_threads(&self) -> anyhow::Result<()> {
        if self.target == "host" {
            self.check_cpus()
        } else if (1..=MOST_THREADS).contains(&self.threads) {
            Ok(())
        } else {
            Err(bad_input(format!("--threads {} is not possible (give 1 to {MOST_THREADS})", self.threads)))
        }
    }

    /// Says what of the system's limits, besides those that are refused, makes times or runs other than they
    /// would be.
    pub fn warn_of_limits(&self) {
        let allowed = Allowed::here();
        if let Some(cpus) = allowed.cpus.filter(|&cpus| cpus < self.threads as f64) {
            let fewer = if self.threads > 1 { "give fewer --threads, or " } else { "" };
            message(&format!(
                "warning: a quota leaves this process the time of {cpus:.2} CPUs, too little for {}: times will be the quota's, \
                 not the kernel's ({fewer}raise the quota)",
                count(self.threads as u64, "thread")
            ));
        }
        if let Some(seconds) = allowed.cpu_seconds {
            message(&format!("warning: a process ends after {seconds} s of CPU time (`ulimit -t`)"));
        }
    }

    /// Whether this machine has as many CPUs as there are threads.
    fn check_cpus(&self) -> anyhow::Result<()> {
        let most = host::allowed_cpus().len().max(1);
        if (1..=most).contains(&self.threads) {
            return Ok(());
        }
        Err(bad_input(format!("--threads {} is not possible on this machine (give 1 to {most})", self.threads)))
    }
}

/// The task of a template, by default the operator's first one.
///
/// # Errors
/// Bad input where the operator has no such template or its space does not exist for this workload.
pub fn make_task(workload: Workload, target: Target, n_threads: usize, template: Option<&str>) -> anyhow::Result<Task> {
    Task::new(Setting { workload, target, n_threads }, template).or_bad_input("")
}

/// Checks that some operator has a template of this name.
///
/// # Errors
/// Bad input where none has.
fn check_template(name: &str) -> anyhow::Result<()> {
    if TEMPLATES.iter().any(|known| known.name == name) {
        return Ok(());
    }
    let known = TEMPLATES.iter().map(|known| known.name).collect::<Vec<_>>().join(", ");
    Err(bad_input(format!("no template `{name}`; there are {known}")))
}

/// Says that nothing is recorded of a workload but what is passed over, and what records it: the same
/// machine, where that is this one, threads, caches and database.
fn nothing_recorded(
    workload: &str,
    target: &str,
    machine: &MachineArgs,
    cold: bool,
    database: &Database,
    passed_over: &PassedOver,
) -> String {
    let n_threads = machine.threads;
    let mut tune = format!("tilewright tune {}", shell_quoted(workload));
    if machine.target != "host" {
        tune += &format!(" --target {}", machine.target);
    }
    if n_threads != 1 {
        tune += &format!(" --threads {n_threads}");
    }
    if cold {
        tune += " --cold";
    }
    if let Some(option) = database.option() {
        tune += &format!(" {option} {}", shell_quoted(&database.path.display().to_string()));
    }
    let threads = count(n_threads as u64, "thread");
    let mut nothing = format!("nothing is recorded for {workload} on {target} with {threads} in {}", database.name());
    if passed_over.total() > 0 {
        nothing += &format!(" that can be shown: {passed_over}");
    }
    match machine.runnable_target() {
        Ok(_) => format!("{nothing}; run `{tune}`"),
        Err(_) => format!("{nothing} (`show --guess` needs no records)"),
    }
}

/// The name that records bear: the target, and the conditions of its measurement if they are unusual.
pub fn target_name(target: &Target, cold: bool) -> String {
    format!("{target}{}", if cold { "/cold" } else { "" })
}

/// The target that records name, where it is this machine or one that is known by name.
pub fn known_target(name: &str) -> Option<Target> {
    let known = std::iter::once(host::target()).chain(NAMED.iter().filter_map(|(name, _)| Target::named(name)));
    known.into_iter().find(|target| [false, true].iter().any(|cold| target_name(target, *cold) == name))
}

/// What records of a workload that name this target and threads are held against, by template.
pub fn judges<'a>(workload: &'a Workload, target: &'a str, threads: u32) -> impl Fn(&str) -> Judge + 'a {
    let machine = known_target(target);
    move |template| Judge::new(workload, target, threads, template, machine.clone())
}

/// The best that is recorded of a workload and can be true, and what is passed over.
///
/// # Errors
/// Where the database fails.
pub fn known_best(
    store: &Store,
    workload: &Workload,
    target: &str,
    threads: u32,
    template: Option<&str>,
) -> Result<(Option<KnownBest>, PassedOver), StoreError> {
    let judges = judges(workload, target, threads);
    let (best, passed_over) = store.best(&workload.to_string(), target, threads, template, &judges)?;
    if best.is_some() && passed_over.total() > 0 {
        message(&format!("{workload}: {passed_over}"));
    }
    Ok((best.map(KnownBest::new), passed_over))
}

/// The trials of a task that can be true; what is passed over is added up.
///
/// # Errors
/// Where the database fails.
pub fn trials_of(
    store: &Store,
    key: &TaskKey,
    judges: Judges,
    passed_over: &mut PassedOver,
) -> Result<Vec<Record>, StoreError> {
    let TaskKey { workload, target, template, threads } = key;
    let (records, doubted) = store.trials_of(workload, target, *threads, Some(template), judges)?;
    *passed_over += doubted;
    Ok(records)
}

/// Throughput in 10⁹ floating-point operations a second.
pub fn gflops(workload: &Workload, ns: f64) -> f64 {
    workload.flops() / ns
}

/// Has this done at each interrupt.
///
/// # Errors
/// Where the system does not let us.
pub fn on_interrupt(act: impl FnMut() + Send + 'static) -> anyhow::Result<()> {
    ctrlc::set_handler(act).map_err(|error| match error {
        ctrlc::Error::System(refused) => {
            anyhow::anyhow!("cannot watch for interrupts: {refused}{}", limits::advice(&refused))
        }
        other => anyhow::Error::from(other).context("cannot watch for interrupts"),
    })
}

/// Options of a device whose workers are this same program, on the CPUs that peers run on as well.
///
/// # Errors
/// Where the path of this program is unknown.
pub fn device_options(n_threads: usize) -> anyhow::Result<Options> {
    let program = std::env::current_exe().context("the path of this executable is unknown")?;
    Ok(Options::new(WorkerCommand { program, arguments: vec![WORKER.to_owned()] }, n_threads))
}

/// A device, with how far its start is shown where that takes long; none after an interrupt.
///
/// # Errors
/// Where memory does not suffice or workers do not start.
pub fn start_device(
    workload: &Workload,
    target: &Target,
    options: Options,
    interrupts: Option<&Interrupts>,
) -> anyhow::Result<Option<Device>> {
    const QUIET: Duration = Duration::from_millis(500);
    let progress = Progress::start(Status { phase: Some("start: random inputs".to_owned()), ..Status::default() });
    if let Some(interrupts) = interrupts {
        interrupts.concern(None, &progress);
    }
    let (start, last_told) = (Instant::now(), AtomicU64::new(0));
    let watch = |part: f64| {
        let percent = (100.0 * part) as u64;
        if start.elapsed() > QUIET && last_told.fetch_max(percent, Ordering::Relaxed) < percent {
            progress.update(|status| status.phase = Some(format!("start: {percent} % of the reference answer")));
        }
        let is_stopped = interrupts.is_some_and(|interrupts| interrupts.stop.load(Ordering::Relaxed));
        if is_stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let device = Device::new_watched(workload.clone(), target, options, &watch);
    progress.finish();
    match device {
        Ok(device) => Ok(Some(device)),
        Err(DeviceError::Data(DataError::GivenUp)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// What is recorded as the best, as it is shown.
#[derive(Debug, Clone)]
pub struct KnownBest {
    /// The template it belongs to.
    pub template: String,
    /// The configuration, by parameter.
    pub config: Json,
    /// Its median in nanoseconds.
    pub median_ns: f64,
    /// By what part of its median the runner-up is slower, where it was measured against others.
    pub margin: Option<f64>,
    /// Whether it is the winner of a run that was completed.
    pub is_confirmed: bool,
    /// Whether it was imported, and need not have been measured on this machine.
    pub is_imported: bool,
}

impl KnownBest {
    /// The best of a store.
    pub fn new(best: Best) -> KnownBest {
        match best {
            Best::Confirmed(winner) => KnownBest {
                template: winner.template,
                config: winner.config,
                median_ns: winner.median_ns,
                margin: winner.margin,
                is_confirmed: true,
                is_imported: winner.is_imported,
            },
            Best::Trial(record) => KnownBest {
                median_ns: record.outcome.cost(),
                is_imported: record.is_imported,
                template: record.template,
                config: record.config,
                margin: None,
                is_confirmed: false,
            },
        }
    }

    /// As in the JSON of `tune` and `best`.
    pub fn to_json(&self, workload: &Workload) -> Json {
        json!({
            "gflops": gflops(workload, self.median_ns),
            "ms_median": self.median_ns / 1e6,
            "config": self.config,
            "margin": self.margin,
            "template": self.template,
            "confirmed": self.is_confirmed,
        })
    }
}

/// A part as per cent.
pub fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// `n` things, in the singular where it is one.
pub fn count(n: impl Into<u128>, thing: &str) -> String {
    let n = n.into();
    format!("{} {thing}{}", grouped(n), if n == 1 { "" } else { "s" })
}
