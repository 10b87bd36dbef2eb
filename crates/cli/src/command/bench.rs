//! `bench`: the best recorded kernel and peer libraries, interleaved in one run.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use clap::Args;
use serde_json::{Map, Value as Json, json};
use tilewright::bench::{Bench, BenchRequest, BenchRow, PEERS, ours_over_theirs, table_of};
use tilewright::{Caches, Note, Observer, Session, target_name};
use tilewright_device::Device;
use tilewright_ir::Target;
use tilewright_lab::load;
use tilewright_lab::stats::geometric_mean;

use super::bench_model;
use super::model::{BindingArgs, InputArgs};
use super::{CacheArgs, DatabaseArgs, MachineArgs, Rounding, count, nothing_recorded, parse_workloads, worker_command};
use crate::error::{OrBadInput, bad_input};
use crate::interrupts::Interrupts;
use crate::output::{message, table, write_result};
use crate::progress::Shown;

/// Arguments of `bench`.
#[derive(Args, Debug)]
#[command(after_help = peers_help())]
pub struct BenchArgs {
    /// Operators and sizes, such as matmul:m=1024,n=1024,k=1024, aliases, such as matmul-1024, or sets of
    /// them, such as resnet18; or a model, MODEL.onnx
    #[arg(required = true, value_name = "WORKLOAD")]
    workloads: Vec<String>,
    /// Peers or libraries to measure beside, separated by commas, or `none` [default: peers in the workload's
    /// layout]
    #[arg(long, value_name = "LIST")]
    pub against: Option<String>,
    /// Folder, such as one of an unpacked Python wheel, in which and below which peers' libraries are looked
    /// for before the system's
    #[arg(long, value_name = "FOLDER")]
    pub peer_path: Option<PathBuf>,
    #[command(flatten)]
    pub rounding: Rounding,
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

/// The peers, for the help text.
fn peers_help() -> String {
    let lines = PEERS.iter().map(|spec| format!("  {:15} {}\n", spec.name, spec.text));
    format!(
        "Peers:\n{}\n{}\nIn the JSON, ratio_to_ours is the throughput of an implementation over ours, \
         and geomean that of ours over the peer's.",
        lines.collect::<String>(),
        bench_model::peers_help()
    )
}

/// Checks that other libraries can be looked for where an option says.
///
/// # Errors
/// Bad input where that is no folder.
pub fn check_peer_path(folder: Option<&Path>) -> anyhow::Result<()> {
    match folder.filter(|folder| !folder.is_dir()) {
        None => Ok(()),
        Some(folder) => {
            Err(bad_input(format!("--peer-path: {} is no folder; give one with libraries", folder.display())))
        }
    }
}

/// Measures workloads.
///
/// # Errors
/// Bad input if a workload or a peer does not exist; failure if no workload has a recorded kernel.
pub fn run(args: &BenchArgs, as_json: bool) -> anyhow::Result<()> {
    check_peer_path(args.peer_path.as_deref())?;
    if let Some(model) = bench_model::alone(&args.workloads, "measured")? {
        return bench_model::run(args, &model, as_json);
    }
    if !args.bindings.is_empty() || !args.inputs.is_empty() {
        return Err(bad_input("--dim, --shape, --set and --input are for a model (give MODEL.onnx)"));
    }
    let mut workloads = Vec::new();
    for text in &args.workloads {
        workloads.extend(parse_workloads(text, args.rounding)?);
    }
    for workload in &workloads {
        Device::check_memory(workload).or_bad_input("")?;
    }
    let peers = chosen(PEERS, args.against.as_deref(), "no peer", |spec| [spec.name, spec.library])?;
    let target = prepare(args)?;
    let session = Session::new(args.records.database()?, worker_command()?);
    let interrupts = Interrupts::default();
    // Why a peer is left out is said once for all workloads.
    let said = Mutex::new(HashSet::new());
    let mut all: Vec<BenchRow> = Vec::new();
    let mut text = String::new();
    let mut fault = None;
    for workload in &workloads {
        let request = BenchRequest {
            target: target.clone(),
            threads: args.machine.threads,
            against: peers.clone(),
            peer_path: args.peer_path.clone(),
            rounds: args.rounds,
            ..BenchRequest::new(workload.clone())
        };
        let shown = Shown::new(workload, None, 0, interrupts.concerned());
        let measured = session.bench(&request, &|note: Note| match note {
            Note::LeftOut(why) if !said.lock().is_ok_and(|mut said| said.insert(why.clone())) => {}
            note => shown.note(note),
        });
        shown.finish();
        match measured {
            Ok(Bench::Measured(rows)) => {
                let threads = count(args.machine.threads as u64, "thread");
                text += &format!("{workload}, {threads}\n{}\n", table_of(workload, &rows));
                all.extend(rows);
            }
            Ok(Bench::NothingRecorded(passed_over)) => {
                let (workload, target) = (workload.to_string(), target_name(&target, Caches::Warm));
                let database = session.database();
                message(&nothing_recorded(&workload, &target, &args.machine, Caches::Warm, database, &passed_over));
            }
            Err(error) if all.is_empty() => return Err(error.into()),
            // What was measured until then is told.
            Err(error) => {
                fault = Some(error.into());
                break;
            }
        }
    }
    anyhow::ensure!(!all.is_empty(), "no kernel is recorded for any of the workloads (run `tilewright tune` first)");
    let mean = |(name, ratios): (&'static str, Vec<f64>)| Some((name, geometric_mean(&ratios)?, ratios.len()));
    let means: Vec<(&str, f64, usize)> = ours_over_theirs(&all).into_iter().filter_map(mean).collect();
    if workloads.len() > 1 && !means.is_empty() {
        text += "geometric mean of ours / theirs\n";
        let row = |(name, mean, n): &(&str, f64, usize)| {
            vec![(*name).to_owned(), format!("{mean:.3}"), count(*n as u64, "workload")]
        };
        text += &table(&means.iter().map(row).collect::<Vec<_>>());
    }
    let geomean: Map<String, Json> = means.iter().map(|(name, mean, _)| ((*name).to_owned(), json!(mean))).collect();
    write_result(as_json, &json!({"rows": all, "geomean": geomean}), &text)?;
    fault.map_or(Ok(()), Err)
}

/// The machine that is asked for, and a word of what will make times others than they could be.
///
/// # Errors
/// Bad input where kernels for the target do not run here.
pub fn prepare(args: &BenchArgs) -> anyhow::Result<Target> {
    let target = args.machine.place().runnable_target()?;
    args.machine.warn_of_limits();
    if let Some(warning) = load::warning() {
        message(&warning);
    }
    Ok(target)
}

/// Rows of a table that a list asks for, each by one of its names; `None` without a list.
///
/// # Errors
/// Bad input where a name is of no row; `none` says what there is not.
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
