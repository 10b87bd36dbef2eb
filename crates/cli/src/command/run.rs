//! `run`: an ONNX model on inputs, with its recorded kernels.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use tilewright::format::count;
use tilewright_graph::{DynamicPart, Model, Tensor};
use tilewright_model::npy::write_tensors;
use tilewright_model::{CompileOptions, Compiled, PartOptions, PartRunner, ProfiledStep, Runner, profile_table};
use tilewright_runtime::{OpenDimension, SharedPool};
use tilewright_search::Timing;

use super::model::{InputArgs, KnownKernels, ModelArgs};
use super::store::StoreArgs;
use super::{CacheArgs, DatabaseArgs, KernelRounding, MachineArgs, worker_command};
use crate::error::{bad_input, one_line};
use crate::output::{duration, write_result};

/// Number of sizes of an open dimension at which a model runs if none is given.
const N_SIZES: usize = 5;

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
    #[command(flatten)]
    rounding: KernelRounding,
    /// Show the time of each kernel
    #[arg(long)]
    profile: bool,
    /// Sizes of the open dimension to run at, separated by commas; with two open dimensions, such as
    /// batch=1,8; can be given again [default: the inputs' size, else five from least to most, and both ends
    /// of a batch]
    #[arg(long, value_name = "SIZES")]
    at: Vec<String>,
    /// Number of tokens of a run, if the model takes several [default: the fewest]
    #[arg(long, value_name = "N")]
    tokens: Option<i64>,
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

impl RunArgs {
    /// Dimension of tokens, and their number per run, if the model takes several numbers.
    fn tokens_of_a_run(&self) -> anyhow::Result<Option<(String, i64)>> {
        match (self.model.pieces()?, self.tokens) {
            (None, None) => Ok(None),
            (None, Some(n)) => Err(bad_input(format!(
                "--tokens {n} is for a model that takes several (give --dim NAME=1,{})",
                n.max(2)
            ))),
            (Some((name, numbers)), n) => Ok(Some((name, n.or(numbers.first().copied()).unwrap_or(1)))),
        }
    }

    /// Requested sizes of an open dimension; no name is needed before them if it is the only one.
    fn asked(&self, dim: &OpenDimension, is_alone: bool) -> anyhow::Result<Vec<i64>> {
        let mut sizes = Vec::new();
        for text in &self.at {
            let (name, list) = text.rsplit_once('=').map_or((None, text.as_str()), |(name, list)| (Some(name), list));
            if name.map_or(!is_alone, |name| name != dim.name) {
                continue;
            }
            for size in list.split(',') {
                let number = size.trim().parse().ok().filter(|size| dim.has(*size));
                let OpenDimension { name, least, most, step } = dim;
                let why = || format!("--at {size}: {name} is one of {least}..{most} in steps of {step}");
                sizes.push(number.ok_or_else(|| bad_input(one_line(&why())))?);
            }
        }
        Ok(sizes)
    }

    /// Sizes of an open dimension at which the model runs, in order: the requested ones, otherwise that of
    /// the inputs or else `n` representative ones.
    fn sizes_of(
        &self,
        dim: &OpenDimension,
        asked: Vec<i64>,
        of_inputs: Option<i64>,
        n: usize,
    ) -> anyhow::Result<Vec<i64>> {
        match (of_inputs, &asked[..]) {
            (None, []) => Ok(dim.spread(n)),
            (None, _) => Ok(asked),
            (Some(size), []) => Ok(vec![size]),
            (Some(size), sizes) if sizes.last() == Some(&size) => Ok(asked),
            (Some(size), _) => Err(bad_input(format!(
                "--at: the inputs have {}={size} (give that last, or leave it out)",
                one_line(&dim.name)
            ))),
        }
    }

    /// Sizes of the open dimensions in each run, in order; empty if no dimension is open.
    fn sizes(
        &self,
        model: &Model,
        given: &[(String, Tensor)],
        tokens: Option<(&str, i64)>,
    ) -> anyhow::Result<Vec<Vec<(OpenDimension, i64)>>> {
        let Some(open) = self.model.open_dims(&model.graph)? else {
            return match self.at.is_empty() {
                true => Ok(Vec::new()),
                false => Err(bad_input("--at is for a model with an open dimension (give --dim NAME=LEAST..MOST)")),
            };
        };
        let dim = self.model.dim_behind(open.dim.clone(), tokens)?;
        let names: Vec<&str> = [&dim].into_iter().chain(open.others()).map(|dim| dim.name.as_str()).collect();
        let name_of = |text: &String| text.rsplit_once('=').map(|(name, _)| name.to_owned());
        if let Some(name) = self.at.iter().filter_map(name_of).find(|name| !names.contains(&name.as_str())) {
            let known = names.join(" and ");
            return Err(bad_input(one_line(&format!("--at {name}: no such dimension is open (there is {known})"))));
        }
        let of_inputs = self.model.size_of(&dim, &model.graph, given)?;
        let sizes = self.sizes_of(&dim, self.asked(&dim, true)?, of_inputs, N_SIZES)?;
        let mut all: Vec<Vec<(OpenDimension, i64)>> = sizes.into_iter().map(|size| vec![(dim.clone(), size)]).collect();
        for other in open.others() {
            let of_inputs = self.model.size_of(other, &model.graph, given)?;
            let numbers = self.sizes_of(other, self.asked(other, false)?, of_inputs, 2)?;
            let with = |n: i64| all.iter().map(move |own| [&[(other.clone(), n)], &own[..]].concat());
            all = numbers.into_iter().flat_map(with).collect();
        }
        Ok(all)
    }
}

/// Model at sizes of its open dimensions.
fn at(file: &ModelArgs, sizes: &[(OpenDimension, i64)]) -> ModelArgs {
    sizes.iter().fold(file.clone(), |file, (dim, size)| file.at(dim, *size))
}

/// Runs a model.
///
/// # Errors
/// Bad input if the model or an input does not fit; failure if code cannot be generated for it, or an output
/// cannot be written.
pub fn run(args: &RunArgs, as_json: bool) -> anyhow::Result<()> {
    let mut model = args.model.read()?;
    let given = args.inputs.given(&model.graph)?;
    let tokens = args.tokens_of_a_run()?;
    let tokens = tokens.as_ref().map(|(name, n)| (name.as_str(), *n));
    let whole = args.model.with_tokens(tokens);
    let sizes = args.sizes(&model, &given, tokens)?;
    let last = sizes.last().map_or(&[][..], Vec::as_slice);
    let (bound, given) = at(&whole, last).fed(&mut model, given)?;
    // Fed tensors bind the shapes of the inputs, which are open if a dimension is.
    let file = if sizes.is_empty() { bound } else { args.model.clone() };
    let with_tokens = file.with_tokens(tokens);
    let at_sizes =
        |own: &Vec<(OpenDimension, i64)>| at(&with_tokens, own).inputs(&model, if own == last { &given } else { &[] });
    let mut inputs = sizes.iter().map(at_sizes).collect::<anyhow::Result<Vec<_>>>()?;
    if sizes.is_empty() {
        inputs.push(file.inputs(&model, &given)?);
    }
    let target = args.machine.place().runnable_target()?;
    let (fused, part) = file.only_at(&sizes).divided(&model, args.rounding, (&target, args.machine.threads))?;
    drop(model);
    let database = args.database.database()?;
    let records = args.store.records(&database)?;
    let pool = SharedPool::new(args.machine.threads)?;
    let (compiled, mut runner) = args.cache.with(|cache| {
        let making = CompileOptions { cache, for_runs: true };
        let compiled = file.compiled(
            fused,
            args.rounding,
            &args.machine,
            &target,
            KnownKernels { database: &database, records: &records },
            making,
        )?;
        cache.fill(&compiled.model, &worker_command()?);
        let runner = Runner::cached(&compiled, &pool, cache)?;
        Ok((compiled, runner))
    })?;
    let mut medians_ns = Vec::with_capacity(inputs.len());
    let mut outputs = Vec::new();
    for (at, inputs) in inputs.iter().enumerate() {
        // The model may have no input from which the size follows.
        for (dim, size) in sizes.get(at).into_iter().flatten() {
            runner.set_dim(&dim.name, *size)?;
        }
        if let Some((name, n)) = tokens {
            runner.set_dim(name, n)?;
        }
        runner.set_all(inputs)?;
        runner.run()?;
        outputs = runner.outputs();
        medians_ns.push(runner.median_ns(args.runs)?);
    }
    let dynamic = part.map(|part| {
        args.cache.with(|cache| {
            let making = CompileOptions { cache, for_runs: true };
            let (threads, records) = (args.machine.threads, &records);
            let options = PartOptions { target: &target, pool: &pool, threads, records, making };
            DynamicRun::new(&part, &mut outputs, args.runs, options)
        })
    });
    let dynamic = dynamic.transpose()?;
    let files = args.output.as_deref().map(|folder| write_tensors(folder, &outputs)).transpose()?;
    let steps = if args.profile { compiled.profile(&mut runner, args.runs)? } else { compiled.steps() };
    let done = RunsOfModel { sizes, medians_ns, outputs, files, dynamic, steps };
    write_result(as_json, &done.json(args, &compiled), &done.text(args))
}

/// Runs of a model, one for each of its sizes, with the outputs of the last one.
struct RunsOfModel {
    /// Sizes of the open dimensions in each run; empty if none is open.
    sizes: Vec<Vec<(OpenDimension, i64)>>,
    /// Median time of each size; of the model if no dimension is open.
    medians_ns: Vec<f64>,
    outputs: Vec<(String, Tensor)>,
    /// Files of the outputs, if they are written.
    files: Option<Vec<PathBuf>>,
    dynamic: Option<DynamicRun>,
    steps: Vec<ProfiledStep>,
}

impl RunsOfModel {
    fn file(&self, output: usize) -> Option<String> {
        self.files.as_ref().map(|files| files[output].display().to_string())
    }

    fn median_ns(&self) -> f64 {
        *self.medians_ns.last().expect("there is a run")
    }

    fn json(&self, args: &RunArgs, compiled: &Compiled) -> serde_json::Value {
        let listed = self.outputs.iter().enumerate().map(|(at, (name, tensor))| {
            json!({"name": name, "dtype": tensor.dtype().name(), "shape": tensor.shape(), "file": self.file(at)})
        });
        let n_steps = |kind: &str| self.steps.iter().filter(|step| step.kind == kind).count();
        let mut json = json!({
            "model": args.model.name(),
            "threads": args.machine.threads,
            "device": args.machine.device,
            "outputs": listed.collect::<Vec<_>>(),
            "ms_median": self.median_ns() / 1e6,
            "kernels": n_steps("kernel"),
            "copies": n_steps("copy"),
            "host_operators": n_steps("host"),
            "arena_bytes": compiled.memory.total,
            "arena_bound_bytes": compiled.memory.bound,
            "untuned_kernels": compiled.n_guessed,
        });
        if !self.sizes.is_empty() {
            let each = self.sizes.iter().zip(&self.medians_ns);
            json["sizes"] = each.map(|(own, ns)| sizes_json(own, *ns)).collect();
        }
        if let Some(dynamic) = &self.dynamic {
            json["dynamic_part"] = dynamic.json();
        }
        if args.profile {
            json["profile"] = json!(self.steps);
        }
        json
    }

    fn text(&self, args: &RunArgs) -> String {
        let mut text = String::new();
        for (at, (name, tensor)) in self.outputs.iter().enumerate() {
            // If a file could not be named after its output, its name is shown.
            let file = self.file(at).filter(|file| !file.ends_with(&format!("/{name}.npy")));
            let file = file.map_or(String::new(), |f| format!("  in {f}"));
            text += &format!("{}  {}{file}\n", one_line(name), tensor.ty());
        }
        let place = args.machine.place();
        for (own, ns) in self.sizes.iter().zip(&self.medians_ns) {
            let own: Vec<String> = own.iter().map(|(dim, size)| format!("{}={size}", one_line(&dim.name))).collect();
            text += &format!("{}: {} a run with {place}\n", own.join(", "), duration(*ns));
        }
        if self.sizes.is_empty() {
            text += &format!("{} a run with {place}\n", duration(self.median_ns()));
        }
        text += &self.dynamic.as_ref().map_or(String::new(), DynamicRun::text);
        if args.profile {
            text += &format!("\n{}", profile_table(&self.steps));
        }
        text
    }
}

/// Runs of a part whose shapes depend on the data.
struct DynamicRun {
    n_nodes: usize,
    /// Number of nodes that ran as kernels.
    n_kernels: usize,
    /// Name of its first node.
    first: String,
    /// Median of its times.
    ns: f64,
}

impl DynamicRun {
    /// Runs a part, and replaces the outputs of the graph before it by the model's outputs.
    fn new(
        part: &DynamicPart,
        outputs: &mut Vec<(String, Tensor)>,
        n_runs: usize,
        options: PartOptions<'_>,
    ) -> anyhow::Result<DynamicRun> {
        let ahead: Vec<Tensor> = std::mem::take(outputs).into_iter().map(|(_, tensor)| tensor).collect();
        let mut runner = PartRunner::new(part, options);
        let mut run = || runner.run(&ahead).map_err(|error| anyhow::anyhow!("{}", one_line(&error.to_string())));
        // The first run determines the shapes.
        *outputs = run()?;
        let mut samples_ns = Vec::with_capacity(n_runs);
        for _ in 0..n_runs.max(1) {
            let start = Instant::now();
            run()?;
            samples_ns.push(start.elapsed().as_nanos() as f64);
        }
        let first = part.first().map_or(String::new(), |place| place.node.clone());
        let ns = Timing::of_samples(&samples_ns, false).median_ns;
        Ok(DynamicRun { n_nodes: part.n_nodes(), n_kernels: runner.n_kernels(), first, ns })
    }

    fn text(&self) -> String {
        let DynamicRun { n_nodes, n_kernels, first, ns } = self;
        let kernels = match n_kernels {
            0 => "evaluated".to_owned(),
            _ => format!("{} and the others evaluated", count(*n_kernels as u64, "kernel")),
        };
        let (time, first) = (duration(*ns), one_line(first));
        format!("and {time} for {n_nodes} nodes from {first} on, whose shapes depend on the data: {kernels}\n")
    }

    fn json(&self) -> serde_json::Value {
        let DynamicRun { n_nodes, n_kernels, first, ns } = self;
        json!({"nodes": n_nodes, "kernels": n_kernels, "first": first, "ms": ns / 1e6})
    }
}

/// Time of a run as JSON, with the sizes of all open dimensions by their names.
fn sizes_json(sizes: &[(OpenDimension, i64)], ns: f64) -> serde_json::Value {
    let (dim, size) = sizes.last().expect("a dimension is open");
    let at: serde_json::Map<_, _> = sizes.iter().map(|(dim, size)| (dim.name.clone(), json!(size))).collect();
    json!({"dim": dim.name, "size": size, "at": at, "ms": ns / 1e6})
}
