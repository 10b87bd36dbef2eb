//! Benchmarks of whole models: ours and other runtimes, measured in interleaved rounds.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use tilewright::bench::OURS;
use tilewright::format::{digits, duration, percent, table};
use tilewright::version::BUILD;
use tilewright::{Cache, DeviceSpec, Error, one_line, since_1970};
use tilewright_device::device::RoundLength;
use tilewright_device::host;
use tilewright_graph::{Agreement, DynamicPart, Graph, Tensor, Value, evaluate, summarise};
use tilewright_peers::{Entrant, ModelPeer, ModelPeerSpec, ModelSetup, run_rounds, wall_samples_ns};
use tilewright_runtime::SharedPool;

use crate::compile::Compiled;
use crate::dynamic::{PartOptions, PartRunner};
use crate::inputs::named_dims;
use crate::runner::Runner;

/// Minimum length of a round: time and samples for each implementation.
const ROUND: RoundLength = RoundLength { time: Duration::from_millis(100), min_samples: 3 };

/// Request to benchmark implementations of a model side by side.
pub struct ModelBenchRequest<'a> {
    /// Path of the model's file, which other runtimes read themselves.
    pub path: &'a Path,
    /// Specialised graph of the model, or of the part ahead of shapes that depend on the data.
    pub graph: &'a Graph,
    /// Our compilations of the model, by the name of their row; `None` for one that cannot run here. Ratios
    /// are relative to the row [`OURS`].
    pub ours: Vec<(&'static str, &'a Compiled)>,
    /// Cache of GPU code.
    pub cache: &'a Cache,
    /// Inputs of the file, including those that are constants in the graph.
    pub inputs: &'a [(Value, Tensor)],
    /// Number of threads that each implementation may use.
    pub threads: usize,
    /// Other runtimes to measure.
    pub peers: Vec<&'static ModelPeerSpec>,
    /// Folder searched for the libraries of runtimes before the system's folders.
    pub peer_path: Option<PathBuf>,
    /// Index of the GPU that all implementations run on; `None` for the CPU.
    pub gpu: Option<u32>,
    /// Number of rounds; each runs every implementation once, in random order.
    pub rounds: u32,
}

/// Result of a benchmark.
#[derive(Debug)]
pub struct ModelBench {
    /// Number of floating-point operations of a run, as far as known before it.
    pub flops: f64,
    /// Source of the reference outputs: the interpreter, or the first implementation that yields outputs.
    pub reference: Option<&'static str>,
    /// Whether outputs depend on random numbers, and cannot be compared.
    pub is_random: bool,
    /// Rows, one per implementation that ran, fastest first.
    pub rows: Vec<ModelBenchRow>,
}

/// Result of an implementation. Its JSON is a row of what `tilewright bench --json` prints.
#[derive(Debug, Clone, Serialize)]
pub struct ModelBenchRow {
    /// Path of the model's file.
    pub workload: String,
    /// Name of the implementation: one of ours, or a peer.
    #[serde(rename = "impl")]
    pub implementation: &'static str,
    /// Number of threads.
    pub threads: usize,
    /// Median throughput, in GFLOP/s.
    pub gflops_median: f64,
    /// Throughput of the best round, in GFLOP/s.
    pub gflops_best: f64,
    /// Median over the rounds' medians, in milliseconds.
    pub ms_median: f64,
    /// Time of the best round, in milliseconds.
    pub ms_best: f64,
    /// Throughput divided by ours; `None` if ours did not run.
    pub ratio_to_ours: Option<f64>,
    /// Relative spread of its rounds.
    pub spread: f64,
    /// Number of rounds.
    pub rounds: u32,
    /// Source of the reference outputs.
    pub reference: Option<&'static str>,
    /// Smallest cosine similarity of an output with the reference's; `None` if their shapes differ or the
    /// model has random numbers.
    pub cosine: Option<f64>,
    /// Largest relative error of an output, ‖out − reference‖ / ‖reference‖.
    pub relative_error: Option<f64>,
    /// Largest absolute difference of two elements, divided by the largest absolute element of the reference.
    pub max_error: Option<f64>,
    /// Version of the library.
    pub version: String,
    /// Description of the runtime's settings for the model.
    pub details: String,
}

impl ModelBench {
    /// Formats the result as a table for people.
    pub fn text(&self, path: &Path, place: &DeviceSpec) -> String {
        let mut cells =
            vec![["impl", "time", "best", "spread", "GFLOP/s", "ours/impl", "error"].map(str::to_owned).to_vec()];
        let no_error = if self.is_random { "random" } else { "other shapes" };
        for row in &self.rows {
            cells.push(vec![
                row.implementation.to_owned(),
                duration(row.ms_median * 1e6),
                duration(row.ms_best * 1e6),
                percent(row.spread),
                digits(row.gflops_median),
                row.ratio_to_ours.map_or("-".to_owned(), |ratio| format!("{:.3}", 1.0 / ratio)),
                row.max_error.map_or(no_error.to_owned(), |error| format!("{error:.1e}")),
            ]);
        }
        let mut text = format!("{}, {place}\n{}", path.display(), table(&cells));
        if let Some(reference) = self.reference {
            text += &format!("error: the largest difference from the {reference}'s answer over its largest element\n");
        }
        for row in &self.rows {
            text += &format!("  {}: {} {}\n", row.implementation, row.version, row.details);
        }
        text
    }

    /// Our speedups over the other implementations; empty if ours did not run.
    pub fn ours_over_theirs(&self) -> Vec<(&'static str, f64)> {
        let others = self.rows.iter().filter(|row| row.implementation != OURS);
        others.filter_map(|row| Some((row.implementation, 1.0 / row.ratio_to_ours?))).collect()
    }
}

/// Implementation that has run once and yielded outputs.
struct ReadyImplementation<'a> {
    name: &'static str,
    version: String,
    details: String,
    agreement: Option<Agreement>,
    who: NetImplementation<'a>,
}

enum NetImplementation<'a> {
    Ours(Box<WholeRunner<'a>>),
    Peer(Box<ModelPeer>),
}

/// Compiled model, followed by a part whose shapes depend on the data, if any.
struct WholeRunner<'a> {
    runner: Runner,
    /// Names of the graph's outputs, in order.
    names: Vec<String>,
    part: Option<PartRunner<'a>>,
}

impl WholeRunner<'_> {
    fn run(&mut self) -> Result<(), Error> {
        self.runner.run().map_err(|error| Error::failed(&error).because(error))?;
        match self.part {
            Some(_) => self.outputs().map(drop),
            None => Ok(()),
        }
    }

    /// Outputs of the model; those of a part are computed.
    fn outputs(&mut self) -> Result<Vec<Tensor>, Error> {
        let mut ahead = self.runner.outputs();
        // States are among the outputs of the graph.
        ahead.sort_by_key(|(name, _)| self.names.iter().position(|own| own == name));
        let ahead: Vec<Tensor> = ahead.into_iter().map(|(_, tensor)| tensor).collect();
        let Some(part) = &mut self.part else { return Ok(ahead) };
        let outputs = part.run(&ahead).map_err(|error| Error::failed(one_line(&error.to_string())))?;
        Ok(outputs.into_iter().map(|(_, tensor)| tensor).collect())
    }
}

impl ReadyImplementation<'_> {
    /// Measures a round; returns the nanoseconds per run of each sample.
    fn round(&mut self, round: RoundLength) -> Result<Vec<f64>, String> {
        let plain = |error: &dyn std::fmt::Display| one_line(&error.to_string());
        match &mut self.who {
            NetImplementation::Ours(runner) => wall_samples_ns(round, || runner.run()).map_err(|error| plain(&error)),
            NetImplementation::Peer(peer) => peer.round(round).map_err(|reason| plain(&reason)),
        }
    }
}

/// Part of a model whose shapes depend on the data, with the options of compiling its nodes.
pub type BenchedPart<'a> = Option<(&'a DynamicPart, PartOptions<'a>)>;

/// Benchmarks a model, with its part whose shapes depend on the data, if any. Runtimes that cannot run it are
/// left out, with a message to `note`.
///
/// # Errors
/// If inputs do not fit the model, threads or memory do not suffice, or no implementation can run the model.
pub fn bench_model(
    request: &ModelBenchRequest,
    part: BenchedPart<'_>,
    note: &dyn Fn(&str),
) -> Result<ModelBench, Error> {
    let ModelBenchRequest { path, graph, inputs, threads, .. } = request;
    let flops = summarise(graph).flops() as f64;
    let is_random = graph.is_random() || part.as_ref().is_some_and(|(part, _)| part.is_random());
    let (mut reference, mut contestants) = (None, Vec::new());
    if !request.ours.is_empty() {
        // All implementations run on the same CPUs, except on a GPU, whose driver has threads of its own.
        if request.ours.iter().all(|(_, compiled)| compiled.model.cpu().is_some()) {
            host::pin_thread(&host::pin_cpus(*threads));
        }
        let read: Vec<&str> = graph.inputs.iter().map(|&id| graph.value(id).name.as_str()).collect();
        let variable = inputs.iter().filter(|(value, _)| read.contains(&value.name.as_str()));
        let variable: Vec<_> = variable.map(|(value, x)| (value.name.as_str(), x.clone())).collect();
        let wanted = evaluate(graph, &variable).and_then(|ahead| match part {
            Some((part, _)) => Ok(part.evaluate(&ahead)?.into_iter().map(|(_, tensor)| tensor).collect()),
            None => Ok(ahead),
        });
        match wanted {
            Ok(wanted) => reference = Some(("interpreter", wanted)),
            Err(error) => note(&format!("no reference: {}", one_line(&error.to_string()))),
        }
    }
    for (name, compiled) in &request.ours {
        let (runner, outputs) = ours(compiled, request, part)?;
        let n_steps = compiled.model.plan().steps.len();
        let steps = if n_steps == 1 { "step" } else { "steps" };
        let details = format!("{n_steps} {steps}, {} of them untuned", compiled.n_guessed);
        contestants.push((*name, BUILD.to_owned(), details, outputs, NetImplementation::Ours(Box::new(runner))));
    }
    let dims = named_dims(inputs);
    let inputs: Vec<(String, Tensor)> = inputs.iter().map(|(value, x)| (value.name.clone(), x.clone())).collect();
    let folder = request.peer_path.as_deref();
    let setup =
        ModelSetup { model: path, dims: &dims, inputs: &inputs, flops, threads: *threads, folder, gpu: request.gpu };
    for spec in &request.peers {
        match ModelPeer::start(spec.name, setup).and_then(|mut peer| Ok((peer.run(&inputs)?, peer))) {
            Ok((outputs, peer)) => {
                let (version, details) = (peer.version().to_owned(), peer.details().to_owned());
                contestants.push((spec.name, version, details, outputs, NetImplementation::Peer(Box::new(peer))));
            }
            Err(reason) => note(&format!("{}: {}", spec.name, one_line(&reason.to_string()))),
        }
    }
    if contestants.is_empty() {
        return Err(Error::failed(format!("nothing runs {} (see above)", path.display())));
    }
    let compare = |(name, version, details, outputs, who): (_, _, _, Vec<Tensor>, _)| {
        let (_, wanted) = reference.get_or_insert_with(|| (name, outputs.clone()));
        let agreement = Agreement::of_all(&outputs, wanted).filter(|_| !is_random);
        ReadyImplementation { name, version, details, agreement, who }
    };
    let mut contestants: Vec<ReadyImplementation<'_>> = contestants.into_iter().map(compare).collect();
    let entrants = contestants.iter_mut().map(|contestant| Entrant::new(|round| contestant.round(round))).collect();
    let timings = run_rounds(entrants, request.rounds, ROUND, since_1970().as_nanos() as u64);

    let reference = reference.map(|(name, _)| name);
    let mut rows = Vec::new();
    for (contestant, timing) in contestants.into_iter().zip(timings) {
        let ReadyImplementation { name, version, details, agreement, .. } = contestant;
        match timing {
            Ok(timing) => rows.push(ModelBenchRow {
                workload: path.display().to_string(),
                implementation: name,
                threads: *threads,
                gflops_median: flops / timing.median_ns,
                gflops_best: flops / timing.min_ns,
                ms_median: timing.median_ns / 1e6,
                ms_best: timing.min_ns / 1e6,
                // Filled in once the throughput of ours is known.
                ratio_to_ours: None,
                spread: timing.spread,
                rounds: timing.n_samples,
                reference,
                cosine: agreement.map(|agreement| agreement.cosine),
                relative_error: agreement.map(|agreement| agreement.relative_error),
                max_error: agreement.map(|agreement| agreement.max_error),
                version,
                details,
            }),
            Err(reason) => note(&format!("{name}: {reason}")),
        }
    }
    let ours_ms = rows.iter().find(|row| row.implementation == OURS).map(|row| row.ms_median);
    rows.iter_mut().for_each(|row| row.ratio_to_ours = ours_ms.map(|ours_ms| ours_ms / row.ms_median));
    rows.sort_by(|a, b| a.ms_median.total_cmp(&b.ms_median));
    Ok(ModelBench { flops, reference, is_random, rows })
}

/// Prepares one of our compilations; returns it with its outputs.
fn ours<'a>(
    compiled: &Compiled,
    request: &ModelBenchRequest,
    part: BenchedPart<'a>,
) -> Result<(WholeRunner<'a>, Vec<Tensor>), Error> {
    let failed = |error: crate::RunError| Error::failed(&error).because(error);
    let threads = SharedPool::new(request.threads);
    let threads = threads.map_err(|error| Error::failed("no threads for a run").because(error))?;
    let mut runner = Runner::cached(compiled, &threads, request.cache).map_err(failed)?;
    runner.set_all(request.inputs).map_err(failed)?;
    let part = part.map(|(part, options)| PartRunner::new(part, options));
    let names = request.graph.outputs.iter().map(|&id| request.graph.value(id).name.clone()).collect();
    let mut whole = WholeRunner { runner, names, part };
    whole.runner.run().map_err(failed)?;
    let outputs = whole.outputs()?;
    Ok((whole, outputs))
}
