//! `bench MODEL.onnx`: a whole model here and in other runtimes, interleaved in one run.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde_json::{Map, Value as Json, json};
use tilewright::bench::OURS;
use tilewright::version::BUILD;
use tilewright_device::device::Round;
use tilewright_device::host;
use tilewright_graph::{Agreement, Dim, Graph, Random, Specialised, Tensor, Value, bind_inputs, evaluate, summarise};
use tilewright_model::Runner;
use tilewright_peers::{Entrant, MODEL_PEERS, ModelPeer, ModelPeerSpec, ModelSetup, run_rounds, wall_samples_ns};
use tilewright_runtime::Threads;
use tilewright_tune::Timing;

use super::bench::{self, BenchArgs};
use super::model::{BindingArgs, ModelArgs, problem_line};
use super::run::read_input;
use super::{count, percent};
use crate::error::{bad_input, describe, one_line};
use crate::output::{digits, duration, message, table, write_result};

/// What the runs of one implementation in one round come to.
const ROUND: Round = Round { time: Duration::from_millis(100), min_samples: 3 };
/// Seed of inputs that are not given.
const SEED: u64 = 1;

/// Inputs of a model.
#[derive(Args, Debug)]
pub struct InputArgs {
    #[command(flatten)]
    bindings: BindingArgs,
    /// Input as NAME=FILE.npy, FILE.npy where there is one input, or FILE.npz with several; can be given
    /// again. What is not given is random, or ones where it is integers
    #[arg(long, value_name = "[NAME=]FILE")]
    input: Vec<String>,
}

impl InputArgs {
    /// Whether none is given.
    pub fn is_empty(&self) -> bool {
        self.bindings.is_empty() && self.input.is_empty()
    }

    /// The tensors that are given by files, with the names of inputs of a graph.
    ///
    /// # Errors
    /// Bad input where a file has none, or a name is missing.
    fn given(&self, graph: &Graph) -> anyhow::Result<Vec<(String, Tensor)>> {
        let names: Vec<&str> = graph.inputs.iter().map(|&id| graph.value(id).name.as_str()).collect();
        let mut given = Vec::new();
        for text in &self.input {
            for (name, tensor) in read_input(text)? {
                let name = match (name, &names[..]) {
                    (Some(name), _) => name,
                    (None, [name]) => (*name).to_owned(),
                    (None, _) => {
                        let names = names.join(", ");
                        return Err(bad_input(format!("--input needs a name (give NAME=FILE; there are {names})")));
                    }
                };
                given.push((name, tensor));
            }
        }
        Ok(given)
    }
}

/// A tensor for each input of a graph: a given one, what is bound, or a random one.
///
/// # Errors
/// Bad input where something does not fit the graph, or a size is not bound.
fn all_inputs(
    graph: &Graph,
    bindings: &BindingArgs,
    given: &[(String, Tensor)],
) -> anyhow::Result<Vec<(Value, Tensor)>> {
    let values = bind_inputs(graph, &bindings.bindings()?);
    let values = values.map_err(|problem| bad_input(one_line(&problem.to_string())))?;
    let mut random = Random::new(SEED);
    let mut inputs = Vec::with_capacity(values.len());
    for value in values {
        let ty = value.ty.clone().expect("an input that is bound has its type");
        let file = given.iter().rfind(|(name, _)| *name == value.name).map(|(_, tensor)| tensor.clone());
        if let Some(file) = file.as_ref().filter(|file| *file.ty() != ty) {
            let what = format!("--input {}: the file has {}, and the model takes {ty}", value.name, file.ty());
            return Err(bad_input(format!("{what} (convert it with .astype)")));
        }
        let tensor = file.or_else(|| value.constant.clone()).unwrap_or_else(|| random.input(&ty));
        inputs.push((value, tensor));
    }
    Ok(inputs)
}

/// The sizes of inputs' named dimensions; one that names several sizes is left out.
fn named_dims(inputs: &[(Value, Tensor)]) -> Vec<(String, usize)> {
    let mut dims: Vec<(String, Option<usize>)> = Vec::new();
    for (value, tensor) in inputs {
        let declared = value.declared.as_ref().and_then(|declared| declared.dims.as_ref());
        for (dim, &size) in declared.into_iter().flatten().zip(tensor.shape()) {
            let Dim::Named(name) = dim else { continue };
            match dims.iter_mut().find(|(known, _)| known == name) {
                Some((_, known)) if *known != Some(size) => *known = None,
                Some(_) => {}
                None => dims.push((name.clone(), Some(size))),
            }
        }
    }
    dims.into_iter().filter_map(|(name, size)| Some((name, size?))).collect()
}

/// The runtimes, for the help text.
pub fn peers_help() -> String {
    let lines = MODEL_PEERS.iter().map(|spec| format!("  {:18} {}\n", spec.name, spec.text));
    format!("Peers for a model:\n{}", lines.collect::<String>())
}

/// The runtimes asked for, without those that are no different on so many threads.
fn chosen(list: Option<&str>, threads: usize) -> anyhow::Result<Vec<&'static ModelPeerSpec>> {
    let mut chosen: Vec<&'static ModelPeerSpec> = Vec::new();
    let names = list.map_or(Vec::new(), |list| list.split(',').map(str::trim).collect());
    for name in names.iter().filter(|name| **name != "none") {
        let mut found = MODEL_PEERS.iter().filter(|spec| spec.name == *name || spec.library == *name).peekable();
        if found.peek().is_none() {
            let known = MODEL_PEERS.iter().map(|spec| spec.name).collect::<Vec<_>>().join(", ");
            return Err(bad_input(format!("no peer for models is called `{name}`; there are {known}")));
        }
        chosen.extend(found);
    }
    let is_wanted = |spec: &&ModelPeerSpec| list.is_none() || chosen.iter().any(|known| known.name == spec.name);
    Ok(MODEL_PEERS.iter().filter(is_wanted).filter(|spec| spec.is_of_its_own(threads)).collect())
}

/// One implementation's result.
struct Row {
    implementation: &'static str,
    timing: Timing,
    agreement: Option<Agreement>,
    version: String,
    details: String,
}

/// A model that is measured.
struct Case<'a> {
    path: &'a Path,
    threads: usize,
    special: Specialised,
    /// All inputs, those too that are constants here.
    inputs: Vec<(String, Tensor)>,
    flops: f64,
}

impl Case<'_> {
    /// Inputs of the specialised graph.
    fn variable(&self) -> Vec<(&str, Tensor)> {
        let names = self.special.graph.inputs.iter().map(|&id| self.special.graph.value(id).name.as_str());
        names.filter_map(|name| self.inputs.iter().find(|(n, _)| n == name).map(|(_, x)| (name, x.clone()))).collect()
    }
}

/// Measures a model.
///
/// # Errors
/// Bad input if the model or a peer is none; failure if no implementation runs it.
pub fn run(args: &BenchArgs, path: &Path, as_json: bool) -> anyhow::Result<()> {
    let threads = args.machine.threads;
    let peers = chosen(args.against.as_deref(), threads)?;
    let name = path.display().to_string();
    let model = ModelArgs::new(&name, &args.inputs.bindings).read()?;
    let given = args.inputs.given(&model.graph)?;
    let bindings = args.inputs.bindings.clone();
    let bindings = given.iter().fold(bindings, |all, (name, tensor)| all.with_input(name, tensor));
    let inputs = all_inputs(&model.graph, &bindings, &given)?;
    let dims = named_dims(&inputs);
    let inputs: Vec<(String, Tensor)> = inputs.into_iter().map(|(value, x)| (value.name, x)).collect();
    let bound = ModelArgs::new(&name, &bindings);
    bench::prepare(args)?;
    let special = bound.specialise(&model, usize::MAX)?;
    drop(model);
    let flops = summarise(&special.graph).flops() as f64;
    let case = Case { path, threads, special, inputs, flops };

    let (mut ours, mut details) = (None, String::new());
    // The right answer, or else the first one that somebody gives.
    let mut reference: Option<(&str, Vec<Tensor>)> = None;
    match case.special.problems.first() {
        Some(problem) => message(&format!("{OURS}: {}", problem_line(problem))),
        None => {
            let graph = &case.special.graph;
            let (code, n_guessed) = bound.compiled(args.exact, &args.machine, &args.records)?;
            // All run on the same CPUs.
            host::pin_thread(&host::pin_cpus(threads));
            let mut runner = Runner::new(&code, &Threads::new(threads)?)?;
            for (name, tensor) in case.variable() {
                runner.set(name, &tensor)?;
            }
            runner.run()?;
            details = format!("{}, {n_guessed} of them untuned", count(code.model.plan().steps.len() as u64, "step"));
            ours = Some(runner);
            match evaluate(graph, &case.variable()) {
                Ok(outputs) => reference = Some(("interpreter", outputs)),
                Err(error) => message(&format!("no reference: {}", one_line(&error.to_string()))),
            }
        }
    }
    let mut agreements = Vec::new();
    let mut agree = |name, outputs: Vec<Tensor>| {
        let (_, wanted) = reference.get_or_insert_with(|| (name, outputs.clone()));
        agreements.push(Agreement::of_all(&outputs, wanted));
    };
    if let Some(runner) = &ours {
        agree(OURS, runner.outputs().into_iter().map(|(_, tensor)| tensor).collect());
    }
    let mut started: Vec<(&'static str, ModelPeer)> = Vec::new();
    let setup = ModelSetup {
        model: path,
        dims: &dims,
        inputs: &case.inputs,
        flops,
        threads,
        folder: args.peer_path.as_deref(),
    };
    for spec in peers {
        match ModelPeer::start(spec.name, setup).and_then(|mut peer| Ok((peer.run(&case.inputs)?, peer))) {
            Ok((outputs, peer)) => {
                agree(spec.name, outputs);
                started.push((spec.name, peer));
            }
            Err(reason) => message(&format!("{}: {}", spec.name, one_line(&reason.to_string()))),
        }
    }
    let has_ours = ours.is_some();
    anyhow::ensure!(has_ours || !started.is_empty(), "nothing runs {} (see above)", path.display());

    let mut entrants = Vec::new();
    if let Some(runner) = &mut ours {
        entrants.push(Entrant::new(|round| {
            wall_samples_ns(round, || runner.run().map(drop)).map_err(|error| one_line(&describe(&error.into())))
        }));
    }
    entrants.extend(
        started
            .iter_mut()
            .map(|(_, peer)| Entrant::new(|round| peer.round(round).map_err(|reason| one_line(&reason.to_string())))),
    );
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_nanos() as u64);
    let timings = run_rounds(entrants, args.rounds, ROUND, seed);
    let own = has_ours.then(|| (OURS, BUILD.to_owned(), details));
    let theirs = started.iter().map(|(name, peer)| (*name, peer.version().to_owned(), peer.details().to_owned()));
    let mut rows = Vec::new();
    for (((implementation, version, details), agreement), timing) in
        own.into_iter().chain(theirs).zip(agreements).zip(timings)
    {
        match timing {
            Ok(timing) => rows.push(Row { implementation, timing, agreement, version, details }),
            Err(reason) => message(&format!("{implementation}: {reason}")),
        }
    }
    rows.sort_by(|a, b| a.timing.median_ns.total_cmp(&b.timing.median_ns));
    tell(&case, reference.map(|(name, _)| name), &rows, as_json)
}

/// Says what came of it.
fn tell(case: &Case<'_>, reference: Option<&str>, rows: &[Row], as_json: bool) -> anyhow::Result<()> {
    let ours_ns = rows.iter().find(|row| row.implementation == OURS).map(|row| row.timing.median_ns);
    let json_rows = rows.iter().map(|row| {
        json!({
            "workload": case.path.display().to_string(),
            "impl": row.implementation,
            "threads": case.threads,
            "gflops_median": case.flops / row.timing.median_ns,
            "gflops_best": case.flops / row.timing.min_ns,
            "ms_median": row.timing.median_ns / 1e6,
            "ms_best": row.timing.min_ns / 1e6,
            // Throughput of this implementation over ours.
            "ratio_to_ours": ours_ns.map(|ours_ns| ours_ns / row.timing.median_ns),
            "spread": row.timing.spread,
            "rounds": row.timing.n_samples,
            // What answers were compared with; the least cosine of the outputs and their largest errors.
            "reference": reference,
            "cosine": row.agreement.map(|agreement| agreement.cosine),
            "relative_error": row.agreement.map(|agreement| agreement.relative_error),
            "max_error": row.agreement.map(|agreement| agreement.max_error),
            "version": row.version,
            "details": row.details,
        })
    });
    let peers = rows.iter().filter(|row| row.implementation != OURS);
    let geomean: Map<String, Json> =
        peers.filter_map(|row| Some((row.implementation.to_owned(), json!(row.timing.median_ns / ours_ns?)))).collect();
    let json = json!({"rows": json_rows.collect::<Vec<_>>(), "geomean": geomean});

    let mut cells =
        vec![["impl", "time", "best", "spread", "GFLOP/s", "ours/impl", "error"].map(str::to_owned).to_vec()];
    for row in rows {
        cells.push(vec![
            row.implementation.to_owned(),
            duration(row.timing.median_ns),
            duration(row.timing.min_ns),
            percent(row.timing.spread),
            digits(case.flops / row.timing.median_ns),
            ours_ns.map_or("-".to_owned(), |ours_ns| format!("{:.3}", row.timing.median_ns / ours_ns)),
            row.agreement.map_or("other shapes".to_owned(), |agreement| format!("{:.1e}", agreement.max_error)),
        ]);
    }
    let threads = count(case.threads as u64, "thread");
    let mut text = format!("{}, {threads}\n{}", case.path.display(), table(&cells));
    if let Some(reference) = reference {
        text += &format!("error: the largest difference from the {reference}'s answer over its largest element\n");
    }
    for row in rows {
        text += &format!("  {}: {} {}\n", row.implementation, row.version, row.details);
    }
    write_result(as_json, &json, &text)
}

/// The model that a list of workloads is, if it is one.
///
/// # Errors
/// Bad input where it comes with something else.
pub fn model_of(workloads: &[String]) -> anyhow::Result<Option<PathBuf>> {
    match (workloads, workloads.iter().find(|text| ModelArgs::is_model(text))) {
        (_, None) => Ok(None),
        ([_], Some(model)) => Ok(Some(model.into())),
        (_, Some(model)) => Err(bad_input(format!("a model is measured alone (give {model} without workloads)"))),
    }
}
