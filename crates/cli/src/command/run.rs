//! `run`: an ONNX model on inputs, with the kernels that are recorded.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tilewright_model::npy::write_tensors;
use tilewright_model::{Making, Runner, profile_table};
use tilewright_runtime::Threads;

use super::model::{InputArgs, ModelArgs};
use super::store::StoreArgs;
use super::{CacheArgs, DatabaseArgs, MachineArgs};
use crate::error::one_line;
use crate::output::{duration, write_result};

/// Arguments of `run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    inputs: InputArgs,
    /// Folder to write each output to as NAME.npy
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Keep out algorithms that round more than the operators as written, such as Winograd's
    #[arg(long)]
    exact: bool,
    /// Show how long each kernel takes
    #[arg(long)]
    profile: bool,
    /// Runs to take the median of
    #[arg(long, value_name = "N", default_value_t = 20)]
    runs: usize,
    #[command(flatten)]
    machine: MachineArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    cache: CacheArgs,
}

/// Runs a model.
///
/// # Errors
/// Bad input where the model or an input does not fit; else where it has no code, or an output cannot be
/// written.
pub fn run(args: &RunArgs, as_json: bool) -> anyhow::Result<()> {
    let mut model = args.model.read()?;
    let given = args.inputs.given(&model.graph)?;
    let (file, given) = args.model.fed(&mut model, given)?;
    let special = file.supported(&model)?;
    let inputs = file.inputs(&model, &given)?;
    let target = args.machine.place().runnable_target()?;
    let fused = file.fused(&special, args.exact, &target)?;
    drop(special);
    drop(model);
    let database = args.database.database()?;
    let records = args.store.records(&database)?;
    let (compiled, mut runner) = args.cache.with(|cache| {
        let making = Making { cache, for_runs: true };
        let compiled = file.compiled(fused, args.exact, &args.machine, &target, (&database, &records), making)?;
        let runner = Runner::cached(&compiled, &Threads::new(args.machine.threads)?, cache)?;
        Ok((compiled, runner))
    })?;
    runner.set_all(&inputs)?;
    runner.run()?;
    let outputs = runner.outputs();
    let files = args.output.as_deref().map(|folder| write_tensors(folder, &outputs)).transpose()?;
    let median_ns = runner.median_ns(args.runs)?;
    let steps = if args.profile { compiled.profile(&mut runner, args.runs)? } else { compiled.steps() };

    let listed = outputs.iter().enumerate().map(|(at, (name, tensor))| {
        let file = files.as_ref().map(|files| files[at].display().to_string());
        json!({"name": name, "dtype": tensor.dtype().name(), "shape": tensor.shape(), "file": file})
    });
    let n_steps = |kind: &str| steps.iter().filter(|step| step.kind == kind).count();
    let mut json = json!({
        "model": args.model.name(),
        "threads": args.machine.threads,
        "device": args.machine.device,
        "outputs": listed.collect::<Vec<_>>(),
        "ms_median": median_ns / 1e6,
        "kernels": n_steps("kernel"),
        "copies": n_steps("copy"),
        "host_operators": n_steps("host"),
        "arena_bytes": compiled.memory.total,
        "arena_bound_bytes": compiled.memory.bound,
        "untuned_kernels": compiled.n_guessed,
    });
    let mut text = String::new();
    for (at, (name, tensor)) in outputs.iter().enumerate() {
        // Where a file could not be called so, it is told how.
        let file = files.as_ref().map(|files| files[at].display().to_string());
        let file = file.filter(|file| !file.ends_with(&format!("/{name}.npy")));
        text +=
            &format!("{}  {}{}\n", one_line(name), tensor.ty(), file.map_or(String::new(), |f| format!("  in {f}")));
    }
    text += &format!("{} a run with {}\n", duration(median_ns), args.machine.place());
    if args.profile {
        json["profile"] = json!(steps);
        text += &format!("\n{}", profile_table(&steps));
    }
    write_result(as_json, &json, &text)
}
