//! `run`: an ONNX model on inputs, with the kernels that are recorded.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;
use serde_json::{Value as Json, json};
use tilewright::file::write_whole;
use tilewright_graph::{DType, Random, Tensor, TensorType};
use tilewright_model::npy::{read_npy, read_npz, write_npy};
use tilewright_model::{Compiled, Runner, Step};
use tilewright_runtime::Threads;

use super::model::ModelArgs;
use super::{DatabaseArgs, MachineArgs, count, read_file};
use crate::error::{bad_input, one_line};
use crate::output::{digits, duration, table, write_result};
use tilewright_lab::stats::median;

/// Arguments of `run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Input as NAME=FILE.npy, FILE.npy where there is one input, or FILE.npz with several; can be given
    /// again; what is not given is random
    #[arg(long, value_name = "[NAME=]FILE")]
    input: Vec<String>,
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
}

/// Runs a model.
///
/// # Errors
/// Bad input where the model or an input does not fit; else where it has no code, or an output cannot be
/// written.
pub fn run(args: &RunArgs, as_json: bool) -> anyhow::Result<()> {
    let inputs = args.input.iter().map(|text| read_input(text)).collect::<anyhow::Result<Vec<_>>>()?;
    let (compiled, n_guessed) = args.model.compiled(args.exact, &args.machine, &args.database)?;
    let mut runner = Runner::new(&compiled, &Threads::new(args.machine.threads)?)?;
    let types: Vec<(String, TensorType)> = runner.inputs().map(|(name, ty)| (name.to_owned(), ty.clone())).collect();
    for (at, (name, ty)) in types.iter().enumerate() {
        runner.set(name, &Random::new(at as u64).input(ty)).map_err(bad_input)?;
    }
    for (name, tensor) in inputs.into_iter().flatten() {
        let name = match (name, &types[..]) {
            (Some(name), _) => name,
            (None, [(name, _)]) => name.clone(),
            (None, _) => {
                let names: Vec<&str> = types.iter().map(|(name, _)| name.as_str()).collect();
                return Err(bad_input(format!(
                    "--input needs a name (give NAME=FILE; there are {})",
                    names.join(", ")
                )));
            }
        };
        runner.set(&name, &tensor).map_err(bad_input)?;
    }
    runner.run()?;
    let outputs = runner.outputs();
    let files = args.output.as_deref().map(|folder| write_outputs(folder, &outputs)).transpose()?;
    let ns = (0..args.runs.max(1)).map(|_| runner.run().map(|ns| ns as f64)).collect::<Result<Vec<_>, _>>()?;
    let median_ns = median(&ns).expect("there is a run");
    let n_steps = compiled.model.plan().steps.len();
    let mut step_ns = vec![0; n_steps];
    if args.profile {
        let mut of_runs = vec![vec![0; n_steps]; args.runs.max(1)];
        of_runs.iter_mut().try_for_each(|ns| runner.profile(ns))?;
        let of_step = |at: usize| of_runs.iter().map(|ns| ns[at] as f64).collect::<Vec<_>>();
        let median_of = |at: usize| median(&of_step(at)).expect("there is a run") as u64;
        step_ns = (0..n_steps).map(median_of).collect();
    }
    let steps = profiled(&compiled, &step_ns);

    let listed = outputs.iter().enumerate().map(|(at, (name, tensor))| {
        let file = files.as_ref().map(|files| files[at].display().to_string());
        json!({"name": name, "dtype": tensor.dtype().name(), "shape": tensor.shape(), "file": file})
    });
    let mut json = json!({
        "model": args.model.name(),
        "threads": args.machine.threads,
        "outputs": listed.collect::<Vec<_>>(),
        "ms_median": median_ns / 1e6,
        "kernels": steps.iter().filter(|step| step.kind == "kernel").count(),
        "copies": steps.iter().filter(|step| step.kind == "copy").count(),
        "host_operators": steps.iter().filter(|step| step.kind == "host").count(),
        "arena_bytes": compiled.memory.total,
        "arena_bound_bytes": compiled.memory.bound,
        "untuned_kernels": n_guessed,
    });
    let mut text = String::new();
    for (name, tensor) in &outputs {
        text += &format!("{}  {}\n", one_line(name), tensor.ty());
    }
    text += &format!("{} a run with {}\n", duration(median_ns), count(args.machine.threads as u64, "thread"));
    if args.profile {
        let total: u64 = step_ns.iter().sum();
        json["profile"] = steps.iter().map(Profiled::json).collect();
        let mut by_time: Vec<&Profiled> = steps.iter().collect();
        by_time.sort_by_key(|step| std::cmp::Reverse(step.ns));
        let rows = by_time.iter().map(|step| {
            let share = 100.0 * step.ns as f64 / total.max(1) as f64;
            let gflops = if step.flops > 0.0 {
                format!("{} GFLOP/s", digits(step.flops / step.ns as f64))
            } else {
                String::new()
            };
            let what = format!("{}  {}", brief(&step.label, 70), brief(&one_line(&step.name), 50));
            vec![what, duration(step.ns as f64), format!("{share:.1} %"), gflops]
        });
        text += &format!("\n{}", table(&rows.collect::<Vec<_>>()));
    }
    write_result(as_json, &json, &text)
}

/// A text that is no longer than so many characters.
fn brief(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// What a step of a run took.
struct Profiled {
    name: String,
    kind: &'static str,
    workload: String,
    /// What people read in place of the workload.
    label: String,
    ns: u64,
    flops: f64,
}

impl Profiled {
    fn json(&self) -> Json {
        json!({
            "name": self.name,
            "kind": self.kind,
            "workload": self.workload,
            "us": self.ns as f64 / 1e3,
            "gflops": if self.flops > 0.0 { Some(self.flops / self.ns.max(1) as f64) } else { None },
        })
    }
}

fn profiled(compiled: &Compiled, step_ns: &[u64]) -> Vec<Profiled> {
    let steps = compiled.model.plan().steps.iter().zip(&compiled.origins).zip(step_ns);
    let profiled = steps.map(|((step, origin), ns)| {
        let fused = origin.map(|at| &compiled.fused.steps[at]);
        let (kind, workload, label, flops) = match fused {
            Some(Step::Kernel(kernel)) => {
                let workload = &kernel.workload;
                ("kernel", workload.to_string(), workload.label(), workload.flops())
            }
            Some(Step::Host(node)) => ("host", node.operator(), format!("{} without code", node.operator()), 0.0),
            _ => ("copy", String::new(), "copy".to_owned(), 0.0),
        };
        Profiled { name: step.name.clone(), kind, workload, label, ns: *ns, flops }
    });
    profiled.collect()
}

/// Inputs of an option: with a name, or without one.
///
/// # Errors
/// Bad input where the file has none.
pub fn read_input(text: &str) -> anyhow::Result<Vec<(Option<String>, Tensor)>> {
    let whole = Path::new(text);
    let (name, path) = match text.rsplit_once('=') {
        Some((name, path)) if !whole.exists() => (Some(name.to_owned()), Path::new(path)),
        _ => (None, whole),
    };
    let file = Bytes::from(read_file(path, "a .npy or .npz file")?);
    let refuse = |error| bad_input(format!("{}: {error}", path.display()));
    if file.starts_with(b"PK") {
        let tensors = read_npz(&file).map_err(refuse)?;
        return Ok(tensors.into_iter().map(|(name, tensor)| (Some(name), tensor)).collect());
    }
    Ok(vec![(name, read_npy(&file).map_err(refuse)?)])
}

/// Writes outputs, each as a file of its name.
fn write_outputs(folder: &Path, outputs: &[(String, Tensor)]) -> anyhow::Result<Vec<PathBuf>> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let mut files: Vec<PathBuf> = Vec::new();
    for (name, tensor) in outputs {
        // NumPy has no such type.
        let as_single = || Tensor::from_floats(DType::F32, tensor.shape(), &tensor.floats());
        let tensor = &if tensor.dtype() == DType::Bf16 { as_single() } else { tensor.clone() };
        // What a name of a file cannot have becomes `_`; two names may then be alike.
        let plain: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
            .take(100)
            .collect();
        let names = (0u32..).map(|n| if n == 0 { format!("{plain}.npy") } else { format!("{plain}.{n}.npy") });
        let path = names.map(|name| folder.join(name)).find(|path| !files.contains(path)).expect("some number is free");
        write_whole(&path, |file| file.write_all(&write_npy(tensor)))
            .with_context(|| format!("cannot write {}", path.display()))?;
        files.push(path);
    }
    Ok(files)
}
