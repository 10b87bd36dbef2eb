//! Options of `bench`, for workloads and for models.

use std::path::{Path, PathBuf};

use clap::Args;
use tilewright::bench::PEERS;
use tilewright_ir::Target;
use tilewright_lab::load;
use tilewright_peers::MODEL_PEERS;

use super::model::{BindingArgs, InputArgs};
use super::{CacheArgs, DatabaseArgs, KernelRounding, MachineArgs};
use crate::error::bad_input;
use crate::output::message;

/// Arguments of `bench`.
#[derive(Args, Debug)]
#[command(after_help = peers_help())]
pub struct BenchArgs {
    /// Operators and sizes, such as matmul:m=1024,n=1024,k=1024, aliases, such as matmul-1024, or sets of
    /// them, such as resnet18; or a model, MODEL.onnx
    #[arg(required = true, value_name = "WORKLOAD")]
    pub workloads: Vec<String>,
    /// Peers or libraries to compare with, separated by commas, or `none` [default: peers in the workload's
    /// layout]
    #[arg(long, value_name = "LIST")]
    pub against: Option<String>,
    /// Folder, such as an unpacked Python wheel, that is searched recursively for peers' libraries before the
    /// system's folders
    #[arg(long, value_name = "FOLDER")]
    pub peer_path: Option<PathBuf>,
    #[command(flatten)]
    pub rounding: KernelRounding,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Rounds; each runs every implementation once, in random order
    #[arg(long, value_name = "R", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: u32,
    #[command(flatten)]
    pub records: DatabaseArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten, next_help_heading = "For a model")]
    pub bindings: BindingArgs,
    #[command(flatten)]
    pub inputs: InputArgs,
}

/// Peers, for the help text.
fn peers_help() -> String {
    let lines = PEERS.iter().map(|spec| format!("  {:15} {}\n", spec.name, spec.text));
    format!(
        "Peers:\n{}\n{}\nIn the JSON, ratio_to_ours is the throughput of an implementation over ours, \
         and geomean that of ours over the peer's.",
        lines.collect::<String>(),
        model_peers_help()
    )
}

/// Checks that the folder given for other libraries exists.
///
/// # Errors
/// Bad input if it is not a folder.
pub fn check_peer_path(folder: Option<&Path>) -> anyhow::Result<()> {
    match folder.filter(|folder| !folder.is_dir()) {
        None => Ok(()),
        Some(folder) => {
            Err(bad_input(format!("--peer-path: {} is no folder; give one with libraries", folder.display())))
        }
    }
}

/// Runtimes, for the help text.
fn model_peers_help() -> String {
    let lines = MODEL_PEERS.iter().map(|spec| format!("  {:18} {}\n", spec.name, spec.text));
    format!("Peers for a model:\n{}", lines.collect::<String>())
}

/// Resolves the requested machine, and warns of anything that distorts times.
///
/// # Errors
/// Bad input if kernels for the target do not run here.
pub fn prepare(args: &BenchArgs) -> anyhow::Result<Target> {
    let target = args.machine.place().runnable_target()?;
    args.machine.warn_of_limits();
    if let Some(warning) = load::warning() {
        message(&warning);
    }
    Ok(target)
}

/// Rows of a table selected by a list, each by one of its names; `None` without a list.
///
/// # Errors
/// Bad input if a name matches no row; `none` describes what is missing.
pub fn chosen<T>(
    rows: &'static [T],
    list: Option<&str>,
    none: &str,
    names: fn(&T) -> [&'static str; 2],
) -> anyhow::Result<Option<Vec<&'static T>>> {
    let Some(list) = list.map(|list| if list == "none" { "" } else { list }) else { return Ok(None) };
    let asked: Vec<&str> = list.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if let Some(name) = asked.iter().find(|name| !rows.iter().any(|row| names(row).contains(name))) {
        let known = rows.iter().map(|row| names(row)[0]).collect::<Vec<_>>().join(", ");
        return Err(bad_input(format!("{none} is called `{name}`; there are {known}")));
    }
    Ok(Some(rows.iter().filter(|row| asked.iter().any(|name| names(row).contains(name))).collect()))
}
