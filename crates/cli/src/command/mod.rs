//! Subcommands, and the arguments that several of them share.

pub mod bench;
pub mod bench_args;
pub mod bench_model;
pub mod best;
pub mod check;
pub mod compile;
pub mod experiment;
pub mod fleet;
pub mod fleet_args;
pub mod formats;
pub mod model;
pub mod network;
mod own_args;
pub mod predict;
pub mod race;
pub mod record_space;
pub mod records;
pub mod replay;
pub mod report;
pub mod run;
pub mod show;
pub mod space;
pub mod store;
pub mod tune;
pub mod tune_args;
mod tune_own;
pub mod tune_report;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use tilewright::{CPU, Cache, Caches, DeviceSpec, HOST, NO_CACHE, target_names};
use tilewright_codegen::Interface;
use tilewright_device::device::WorkerCommand;
use tilewright_device::limits::{self, Allowed};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_tune::{PassedOver, TEMPLATES, Task, TemplateSetting};

use crate::error::{OrBadInput, bad_input, one_line};
use crate::output::{message, shell_quoted};
use tilewright::Database;
pub use tilewright::format::count;

/// Hidden subcommand that runs a worker of a device.
pub const WORKER: &str = "worker";

/// Reads a whole file named by the user; `wanted` describes the expected content.
///
/// # Errors
/// Bad input if it cannot be read.
fn read_file(path: &Path, wanted: &str) -> anyhow::Result<Vec<u8>> {
    Ok(tilewright::file::read(path, wanted)?)
}

/// Rounding of values that kernels compute on the way to their results.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct KernelRounding {
    /// Exclude algorithms that round more than the operators as written, such as Winograd's; the same as
    /// exact=1
    #[arg(long, conflicts_with = "bf16")]
    pub exact: bool,
    /// Round the operands of products to bf16 if the CPU multiplies bf16 faster than f32; the same as bf16=1
    #[arg(long)]
    pub bf16: bool,
}

impl KernelRounding {
    /// Sets this rounding in a workload.
    pub fn ask(self, workload: &mut Workload) {
        workload.exact |= self.exact;
        workload.bf16 |= self.bf16;
    }

    /// Command line options that request this rounding.
    pub fn options(self) -> &'static str {
        match self {
            KernelRounding { exact: true, .. } => " --exact",
            KernelRounding { bf16: true, .. } => " --bf16",
            KernelRounding { .. } => "",
        }
    }
}

/// Workload and machine.
#[derive(Args, Debug)]
pub struct WorkloadArgs {
    /// Operator and sizes, such as matmul:m=1024,n=1024,k=1024, or an alias, such as matmul-1024
    pub workload: String,
    /// Arithmetic of the kernels.
    #[command(flatten)]
    pub rounding: KernelRounding,
    /// The machine and the threads.
    #[command(flatten)]
    pub machine: MachineArgs,
}

impl WorkloadArgs {
    /// Parses the workload.
    ///
    /// # Errors
    /// Bad input if the text names no workload.
    pub fn workload(&self) -> anyhow::Result<Workload> {
        let mut workload = Workload::parse(&self.workload).or_bad_input("")?;
        self.rounding.ask(&mut workload);
        Ok(workload)
    }

    /// Parses the workload, or the workloads of a set.
    ///
    /// # Errors
    /// As [`WorkloadArgs::workload`].
    pub fn workloads(&self) -> anyhow::Result<Vec<Workload>> {
        parse_workloads(&self.workload, self.rounding)
    }
}

/// Parses the workloads that a text names: one, or those of a set.
///
/// # Errors
/// Bad input if it names none.
pub fn parse_workloads(text: &str, rounding: KernelRounding) -> anyhow::Result<Vec<Workload>> {
    let mut workloads = Workload::parse_all(text).or_bad_input("")?;
    workloads.iter_mut().for_each(|workload| rounding.ask(workload));
    Ok(workloads)
}

/// The machine that kernels are for.
#[derive(Args, Debug)]
pub struct MachineArgs {
    /// Threads that a kernel may use
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: usize,
    /// Machine to generate code for
    #[arg(long, value_name = "NAME", default_value = HOST, help = target_help())]
    pub target: String,
    /// Device that runs kernels: cpu, or an OpenCL device, as opencl or opencl:1; see `doctor`
    #[arg(long, value_name = "DEVICE", default_value = CPU, conflicts_with = "target")]
    pub device: String,
}

/// Database of records.
#[derive(Args, Debug)]
pub struct DatabaseArgs {
    /// Database of records [default: tilewright/records.db in the user's data folder]
    #[arg(long, value_name = "FILE")]
    pub db: Option<PathBuf>,
}

impl DatabaseArgs {
    /// Opens the database.
    ///
    /// # Errors
    /// See [`Database::new`].
    pub fn database(&self) -> anyhow::Result<Database> {
        Ok(Database::new(self.db.as_deref())?.called("--db"))
    }
}

/// Folder of compiled kernels.
#[derive(Args, Debug)]
pub struct CacheArgs {
    /// Cache folder of compiled kernels, at most 256 MiB [default: tilewright in the user's cache folder]
    #[arg(long, value_name = "FOLDER")]
    cache: Option<PathBuf>,
    /// Compile everything anew, without a cache
    #[arg(long, conflicts_with = "cache")]
    no_cache: bool,
}

impl CacheArgs {
    /// Runs `act` with the cache, and reports if the cache could not be written.
    ///
    /// # Errors
    /// See [`Cache::new`], and errors of `act`.
    pub fn with<T>(&self, act: impl FnOnce(&Cache) -> anyhow::Result<T>) -> anyhow::Result<T> {
        if self.no_cache {
            return act(&NO_CACHE);
        }
        let cache = Cache::new(self.cache.as_deref())?;
        let done = act(&cache);
        cache.refusal().iter().for_each(|why| message(why));
        done
    }
}

fn target_help() -> String {
    format!("Machine to generate code for: {}", target_names())
}

impl MachineArgs {
    /// Converts the arguments to a device specification, which resolves the target and checks the threads.
    pub fn place(&self) -> DeviceSpec<'_> {
        DeviceSpec { device: &self.device, target: &self.target, threads: self.threads }
    }

    /// Warns of system limits that distort times or end runs, besides those that are refused.
    pub fn warn_of_limits(&self) {
        Allowed::here().warnings(self.threads).iter().for_each(|warning| message(&format!("warning: {warning}")));
    }
}

/// Makes the task of a template, by default the operator's first one.
///
/// # Errors
/// Bad input if the operator has no such template or its space does not exist for this workload.
pub fn make_task(workload: Workload, target: Target, n_threads: usize, template: Option<&str>) -> anyhow::Result<Task> {
    Task::new(TemplateSetting { workload, target, n_threads }, template).or_bad_input("")
}

/// Checks that an operator has a template of this name.
///
/// # Errors
/// Bad input if there is no such template.
fn check_template(name: &str) -> anyhow::Result<()> {
    if TEMPLATES.iter().any(|known| known.name == name) {
        return Ok(());
    }
    let known = TEMPLATES.iter().map(|known| known.name).collect::<Vec<_>>().join(", ");
    Err(bad_input(format!("no template `{name}`; there are {known}")))
}

/// State of the caches before timed runs.
#[derive(Args, Debug, Clone, Copy)]
pub struct ColdArgs {
    /// Empty the caches before each run: of all data, or of constants only, as in a model
    #[arg(long, value_name = "WHAT", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    cold: Option<Cold>,
}

#[derive(clap::ValueEnum, Debug, Clone, Copy)]
enum Cold {
    All,
    Constants,
}

impl ColdArgs {
    /// State of the caches that was requested, if any.
    pub fn asked(&self) -> Option<Caches> {
        self.cold.map(|cold| match cold {
            Cold::All => Caches::Cold,
            Cold::Constants => Caches::ColdConstants,
        })
    }

    /// State of the caches, warm by default.
    pub fn caches(&self) -> Caches {
        self.asked().unwrap_or_default()
    }
}

/// Command that tunes something for the same machine, into the same database, with further options `more`.
pub fn tune_command(what: &str, more: &str, machine: &MachineArgs, database: &Database) -> String {
    let mut command = format!("tilewright tune {}", shell_quoted(what));
    if machine.target != HOST {
        command += &format!(" --target {}", machine.target);
    }
    if machine.device != CPU {
        command += &format!(" --device {}", machine.device);
    }
    if machine.threads != 1 {
        command += &format!(" --threads {}", machine.threads);
    }
    command += more;
    if database.is_given() {
        command += &format!(" --db {}", shell_quoted(&database.path.display().to_string()));
    }
    command
}

/// Reports that a workload has no records except skipped ones, and the command that records it: for the same
/// machine, if it is this one, threads, caches and database.
fn nothing_recorded(
    workload: &str,
    target: &str,
    machine: &MachineArgs,
    caches: Caches,
    database: &Database,
    passed_over: &PassedOver,
) -> String {
    let n_threads = machine.threads;
    let cold = match caches {
        Caches::Warm => "",
        Caches::ColdConstants => " --cold=constants",
        Caches::Cold => " --cold",
    };
    let tune = tune_command(workload, cold, machine, database);
    let threads = count(n_threads as u64, "thread");
    let mut nothing = format!("nothing is recorded for {workload} on {target} with {threads} in {}", database.name());
    if passed_over.total() > 0 {
        nothing += &format!(" that can be shown: {passed_over}");
    }
    match machine.place().runnable_target() {
        Ok(_) => format!("{nothing}; run `{tune}`"),
        Err(_) => format!("{nothing} (`show --guess` needs no records)"),
    }
}

/// Reports the records that were skipped in a search for a workload's.
pub fn tell_passed_over(workload: &Workload, passed_over: &PassedOver) {
    if passed_over.total() > 0 {
        message(&format!("{workload}: {passed_over}"));
    }
}

/// Finds a row of a table by its name; each row has its description.
pub fn named<T: Copy + Send + Sync>(
    rows: &'static [(T, &'static str, &'static str)],
) -> impl TypedValueParser<Value = T> {
    let possible = rows.iter().map(|(_, name, text)| PossibleValue::new(*name).help(*text));
    let value = move |name: String| rows.iter().find(|(_, known, _)| *known == name).expect("it is possible").0;
    PossibleValuesParser::new(possible).map(value)
}

/// Checks that an option's value is a valid prefix of C functions.
///
/// # Errors
/// Bad input where it is not a C identifier.
pub fn check_identifier(option: &str, name: &str) -> anyhow::Result<()> {
    if Interface::is_prefix(name) {
        return Ok(());
    }
    let hint = "give letters, digits and underscores, no digit first";
    Err(bad_input(format!("{option} `{}` is not a C identifier ({hint})", one_line(name))))
}

/// Calls `act` at each interrupt; a hang-up is none under `nohup`.
///
/// # Errors
/// If the system refuses the handler.
pub fn on_interrupt(act: impl FnMut() + Send + 'static) -> anyhow::Result<()> {
    limits::keeping_nohup(|| ctrlc::set_handler(act)).map_err(|error| match error {
        ctrlc::Error::System(refused) => {
            anyhow::anyhow!("cannot watch for interrupts: {refused}{}", limits::advice(&refused))
        }
        other => anyhow::Error::from(other).context("cannot watch for interrupts"),
    })
}

/// Command that starts a worker: this same program.
///
/// # Errors
/// If the path of this program is unknown.
pub fn worker_command() -> anyhow::Result<WorkerCommand> {
    let program = std::env::current_exe().context("the path of this executable is unknown")?;
    Ok(WorkerCommand { program, arguments: vec![WORKER.to_owned()] })
}
