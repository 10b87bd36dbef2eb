//! Experiment on whole networks: before and after tuning, compared with other runtimes.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tilewright::bench::OURS;
use tilewright::file::write_whole;
use tilewright::format::{count, digits, duration, percent, shell_quoted};
use tilewright::version::BUILD;
use tilewright::{Database, Error, NO_CACHE, Request, Session, TunedMany, Workload, since_1970, with_suffix};
use tilewright_device::device::WorkerCommand;
use tilewright_graph::networks::{NETWORKS, Network};
use tilewright_graph::{Bindings, Specialised, Tensor, Value, onnx, specialise};
use tilewright_ir::Target;
use tilewright_model::bench::{ModelBench, ModelBenchRequest, ModelBenchRow, bench_model};
use tilewright_model::{
    CompileOptions, Fused, LayoutPurpose, all_inputs, compile_guessed, compile_known, laid_out, lower, read_model,
};
use tilewright_peers::{MODEL_PEERS, ModelPeerSpec};

use super::beside::{self, BesideRequest};
use super::folder::PAGE;
use super::plan::only;
use super::results::markdown;
use super::{Cost, ExperimentResult, Hardware, data, folder};
use crate::clock::utc;
use crate::history::MedianCurve;
use crate::plot::{Bar, Layer, Marks, Plot, PlotAxis, Scale, colours, sheet};
use crate::stats::geometric_mean;
use crate::{Caller, LabEvent, OrFailed};

/// Name on the command line.
pub const NAME: &str = "autotvm-end-to-end";
/// Paper that it reproduces.
pub const PAPER: &str = "AutoTVM";
/// Figure that it reproduces.
pub const FIGURE: &str = "figure 11";
/// Subject of the comparison, in one line.
pub const COMPARES: &str = "five networks untuned and tuned, beside other runtimes";
/// Deviations from the paper, in one line.
pub const DIFFERS: &str = "seeded weights; the runtimes that `bench` knows in the place of MXNet and TensorFlow Lite";
/// Deviations due to running on a CPU, in one line.
pub const ON_CPUS: &str = "a CPU";
/// Default tuning time per network.
pub const TIME: Duration = Duration::from_secs(40);

/// Rounds of a comparison; each runs every implementation once, in random order.
const ROUNDS: u32 = 15;
/// Seconds that the comparison of a network takes, including starts, outputs and the reference.
const BENCH_SECONDS: f64 = 20.0;
/// Our implementation, with the configurations that the model of the machine ranks first.
const UNTUNED: &str = "untuned";
/// Values of the networks' open sizes: as many steps as Zaremba et al. unroll.
const DIMS: [(&str, usize); 1] = [("steps", 20)];

/// Network that was tuned and measured; a row of `data.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct NetworkOutcome {
    network: String,
    /// Command that repeats the tuning.
    command: String,
    started: String,
    version: String,
    cpu: String,
    /// Seconds of tuning and measuring together.
    seconds: f64,
    /// Number of operations of a run, in 10⁹.
    gflop: f64,
    /// Number of kernel calls in a run.
    kernels: usize,
    /// Number of distinct kernels, which are tuned.
    workloads: usize,
    trials: u64,
    /// Seconds of tuning and the sum of the kernels' milliseconds, at each change.
    curve: Vec<(f64, f64)>,
    /// Implementations measured, the slowest last.
    implementations: Vec<MeasuredNetwork>,
    /// Implementations left out, with the reasons.
    left_out: Vec<String>,
}

/// Implementation of a network.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct MeasuredNetwork {
    name: String,
    ms_median: f64,
    ms_best: f64,
    spread: f64,
    gflops: f64,
    rounds: u32,
    /// Largest difference from the reference output, relative to its largest element.
    max_error: Option<f64>,
    version: String,
}

/// Cost with this much time per network.
pub fn cost(time: Duration) -> Cost {
    let n_runs = NETWORKS.len() as u64;
    Cost { n_runs, n_trials: None, most_seconds: n_runs as f64 * (time.as_secs_f64() + BENCH_SECONDS) }
}

/// Tunes and measures the networks without results in the folder, and writes data, plots and a page. When
/// stopped it leaves what is complete; the next call continues from there.
///
/// # Errors
/// Bad input if there is no such network or the folder holds something else; failure if workers do not
/// start or files cannot be written.
pub fn carry_out(request: &BesideRequest, worker: &WorkerCommand, caller: Caller) -> Result<ExperimentResult, Error> {
    let networks = only("problem", &request.problems, NETWORKS.iter().collect(), |network| network.name.to_owned())?;
    let (folder, own) = (request.folder(NAME), request.identity(NAME));
    let (_claim, before) = folder::claim(&folder, &own)?;
    let rows = before["networks"].as_array().into_iter().flatten();
    let known = rows.filter_map(|row| NetworkOutcome::deserialize(row).ok());
    let known = known.map(|outcome| (outcome.network.clone(), outcome)).collect();
    let names: Vec<&str> = networks.iter().map(|network| network.name).collect();
    let mut outcomes = beside::outcomes(&folder, &names, known, caller, |place, at| {
        measure(request, networks[place], [&at("onnx"), &at("db")], worker, caller)
    })?;
    let n_complete = names.iter().filter(|name| outcomes.contains_key(**name)).count();
    let outcomes: Vec<NetworkOutcome> = NETWORKS.iter().filter_map(|network| outcomes.remove(network.name)).collect();
    let page = NetworksPage { request, folder: &folder, outcomes: &outcomes };
    Ok(ExperimentResult { data: page.write(own)?, n_runs: networks.len(), n_complete, folder })
}

/// Network, written to a file and ready for code generation.
struct PreparedNetwork {
    bindings: Bindings,
    inputs: Vec<(Value, Tensor)>,
    special: Specialised,
    fused: Fused,
}

/// Writes a network to `path` and lowers it.
///
/// # Errors
/// If it cannot be written, or code cannot be generated for it.
fn prepare(
    network: &Network,
    seed: u64,
    path: &Path,
    (target, threads): (&Target, usize),
) -> Result<PreparedNetwork, Error> {
    let file = onnx::write(&network.build(seed));
    write_whole(path, |to| to.write_all(&file)).or_failed(path.display())?;
    let model = read_model(path)?;
    let is_open = |name: &str| onnx_dims(&model.graph).any(|dim| dim == name);
    let dims: Vec<(String, usize)> =
        DIMS.iter().filter(|(name, _)| is_open(name)).map(|&(name, size)| (name.to_owned(), size)).collect();
    let bindings = Bindings { dims, fold_bytes: usize::MAX, ..Bindings::default() };
    let inputs = all_inputs(&model.graph, &bindings, &[], 1)?;
    let special = specialise(&model.graph, &bindings);
    if let Some(problem) = special.problems.first() {
        return Err(Error::failed(format!("{}: {problem}", network.name)));
    }
    let fused = lower(&special.graph, false, target, threads).or_failed(network.name)?;
    Ok(PreparedNetwork { bindings, inputs, special, fused })
}

/// Runs that tuned a network.
struct TunedNetwork {
    session: Session,
    /// Number of kernel calls in a run of the network.
    n_kernels: usize,
    together: TunedMany,
}

/// Tunes the kernels of a network together, from the beginning if an earlier run was interrupted.
fn tune(
    request: &BesideRequest,
    network: &Network,
    own: &Fused,
    session: Session,
    caller: Caller,
) -> Result<TunedNetwork, Error> {
    let BesideRequest { time, seed, ref hardware, .. } = *request;
    let (target, threads) = (&hardware.target, hardware.threads);
    let caches = own.caches(target);
    let request = |(workload, n): (Workload, usize)| {
        let caches = caches.of(&workload);
        (Request::new(workload).threads(threads).target(target.clone()).seed(seed).caches(caches), n as f64)
    };
    let workloads: Vec<Workload> = own.tasks().into_iter().map(|(workload, _)| workload).collect();
    let n_kernels = own.tasks().iter().map(|(_, n)| *n).sum();
    let tasks: Vec<(Request, f64)> = own.tasks().into_iter().map(request).collect();
    caller.say(format!(
        "{}: tuning {} together for {} s",
        network.name,
        count(workloads.len() as u64, "kernel"),
        time.as_secs_f64()
    ));
    (caller.tell)(LabEvent::Together(&workloads));
    let tuned = session.run_together(&tasks, time, caller.stop, &caller);
    (caller.tell)(LabEvent::Done);
    let mut together = tuned?;
    match together.workloads.iter_mut().find_map(|task| task.tuned.lost.take()) {
        Some(lost) => Err(lost),
        None => Ok(TunedNetwork { session, n_kernels, together }),
    }
}

/// Measures a network, and reports the runtimes that were left out.
///
/// Measurements are bound to CPUs in a separate thread, so that the next network is tuned on all CPUs.
fn compare(bench: &ModelBenchRequest) -> (Result<ModelBench, Error>, Vec<String>) {
    std::thread::scope(|scope| {
        let bench = || {
            let left_out = std::sync::Mutex::new(Vec::new());
            let measured =
                bench_model(bench, None, &|line| left_out.lock().expect("nobody panics").push(line.to_owned()));
            (measured, left_out.into_inner().expect("nobody panics"))
        };
        scope.spawn(bench).join().expect("invariant: a comparison gives an error where it fails")
    })
}

/// Tunes a network and compares it with other implementations; `None` if stopped.
fn measure(
    request: &BesideRequest,
    network: &Network,
    [path, database]: [&Path; 2],
    worker: &WorkerCommand,
    caller: Caller,
) -> Result<Option<NetworkOutcome>, Error> {
    let BesideRequest { time, seed, ref hardware, .. } = *request;
    let (target, threads) = (&hardware.target, hardware.threads);
    let (started, start) = (since_1970().as_secs(), Instant::now());
    let PreparedNetwork { bindings, inputs, special, fused } = prepare(network, seed, path, (target, threads))?;
    for path in ["", "-wal", "-shm"].map(|ending| with_suffix(database, ending)) {
        if path.exists() {
            fs::remove_file(&path).or_failed(path.display())?;
        }
    }
    let failed = |error: tilewright_model::CompileError| Error::failed(&error).because(error);
    let own = laid_out(fused.clone(), target, threads, LayoutPurpose::Guess).map_err(failed)?;
    let session = Session::new(Database::new(Some(database))?, worker.clone());
    let tuned = tune(request, network, &own, session, caller)?;
    if caller.is_stopped() {
        return Ok(None);
    }

    caller.say(format!("{}: measuring it beside other runtimes", network.name));
    let untuned = compile_guessed(fused.clone(), target, threads).map_err(failed)?;
    let records = tuned.session.database().records()?;
    let best = compile_known(fused, target, threads, &records, CompileOptions::default()).map_err(failed)?;
    let (measured, left_out) = compare(&ModelBenchRequest {
        path,
        graph: &special.graph,
        ours: vec![(OURS, &best), (UNTUNED, &untuned)],
        cache: &NO_CACHE,
        inputs: &inputs,
        threads,
        peers: runtimes(hardware).collect(),
        gpu: target.gpu.map(|gpu| gpu.number),
        peer_path: request.peer_path.clone(),
        rounds: ROUNDS,
    });
    left_out.iter().for_each(|line| caller.say(line));
    let ModelBench { flops, rows, .. } = measured?;
    let options: String = bindings.dims.iter().map(|(name, size)| format!(" --dim {name}={size}")).collect();
    let (file, time) = (shell_quoted(&format!("{}.onnx", network.name)), time.as_secs_f64());
    let hardware_option = hardware.option().join(" ");
    Ok(Some(NetworkOutcome {
        network: network.name.to_owned(),
        command: format!("tilewright tune {file}{options} --time {time} --seed {seed} {hardware_option}"),
        started: utc(started),
        version: BUILD.to_owned(),
        cpu: hardware.name.clone(),
        seconds: start.elapsed().as_secs_f64(),
        gflop: flops / 1e9,
        kernels: tuned.n_kernels,
        workloads: tuned.together.workloads.len(),
        trials: tuned.together.workloads.iter().map(|task| task.tuned.new_trials).sum(),
        curve: tuned.together.curve,
        implementations: rows.into_iter().map(MeasuredNetwork::from).collect(),
        left_out,
    }))
}

impl From<ModelBenchRow> for MeasuredNetwork {
    fn from(row: ModelBenchRow) -> MeasuredNetwork {
        MeasuredNetwork {
            name: row.implementation.to_owned(),
            ms_median: row.ms_median,
            ms_best: row.ms_best,
            spread: row.spread,
            gflops: row.gflops_median,
            rounds: row.rounds,
            max_error: row.max_error,
            version: row.version,
        }
    }
}

/// Runtimes that can be measured on a machine.
fn runtimes(hardware: &Hardware) -> impl Iterator<Item = &'static ModelPeerSpec> {
    MODEL_PEERS.iter().filter(|spec| spec.runs_on(&hardware.target) && spec.is_of_its_own(hardware.threads))
}

/// Names of the dimensions that a model's inputs leave open.
fn onnx_dims(graph: &tilewright_graph::Graph) -> impl Iterator<Item = &str> {
    let declared = graph.inputs.iter().filter_map(|&id| graph.value(id).declared.as_ref()?.dims.as_ref());
    declared.flatten().filter_map(|dim| match dim {
        tilewright_graph::Dim::Named(name) => Some(name.as_str()),
        _ => None,
    })
}

impl NetworkOutcome {
    fn of(&self, name: &str) -> Option<&MeasuredNetwork> {
        self.implementations.iter().find(|measured| measured.name == name)
    }

    /// Speedup of an implementation over another.
    fn speedup(&self, ours: &str, other: &str) -> Option<f64> {
        Some(self.of(other)?.ms_median / self.of(ours)?.ms_median)
    }
}

/// Page of results in the folder.
struct NetworksPage<'a> {
    request: &'a BesideRequest,
    folder: &'a Path,
    outcomes: &'a [NetworkOutcome],
}

impl NetworksPage<'_> {
    /// Writes all files and returns the contents of `data.json`.
    fn write(&self, own: Json) -> Result<Json, Error> {
        let facts = json!({
            "paper": PAPER,
            "figure": FIGURE,
            "differs": self.request.hardware.differences(ON_CPUS, DIFFERS),
            "command": self.request.command(NAME),
            "complete": self.outcomes.len() == NETWORKS.len(),
            "networks": self.outcomes,
            "speedups": self.means().into_iter().map(|(name, mean)| json!({"over": name, "geomean": mean}))
                .collect::<Vec<_>>(),
        });
        let pictures = [("speed", sheet(&[self.speed()], 1)), ("by-time", sheet(&self.curves(), 3))];
        let pictures = pictures.into_iter().filter(|_| !self.outcomes.is_empty());
        let files = pictures.map(|(name, picture)| (format!("{name}.svg"), picture));
        beside::write(self.folder, own, facts, files.chain([(PAGE.to_owned(), self.readme())]))
    }

    /// Implementations measured on any network: ours first, the others in the order of their table.
    fn names(&self) -> Vec<&'static str> {
        let all = [UNTUNED, OURS].into_iter().chain(MODEL_PEERS.iter().map(|spec| spec.name));
        all.filter(|name| self.outcomes.iter().any(|outcome| outcome.of(name).is_some())).collect()
    }

    /// Speedups over each other implementation after tuning: geometric means over the networks that both run.
    fn means(&self) -> Vec<(&'static str, f64)> {
        let others = self.names().into_iter().filter(|name| *name != OURS);
        let mean = |name: &'static str| {
            let ratios: Vec<f64> = self.outcomes.iter().filter_map(|outcome| outcome.speedup(OURS, name)).collect();
            Some((name, geometric_mean(&ratios)?))
        };
        others.filter_map(mean).collect()
    }

    fn readme(&self) -> String {
        let hardware = &self.request.hardware;
        let differs = hardware.differences(ON_CPUS, DIFFERS);
        let mut out = format!("# {NAME}\n\n{PAPER}: {COMPARES} ({FIGURE}).\nDiffers from the paper: {differs}.\n");
        let Some(first) = self.outcomes.first() else { return out + "\nNo network is complete yet.\n" };
        let (dates, n) = (self.outcomes.iter().map(|outcome| outcome.started.as_str()), self.outcomes.len());
        let (from, to) = (dates.clone().min().unwrap_or_default(), dates.max().unwrap_or_default());
        let _ = write!(
            out,
            "\n`{}` on {}, {}, {from} to {to}, version {}.\n{n} of {} complete, {}; each network is tuned for {} s.\n",
            self.request.command(NAME),
            first.cpu,
            self.request.hardware.target.name(),
            first.version,
            count(NETWORKS.len() as u64, "network"),
            self.request.hardware.extent(),
            self.request.time.as_secs_f64(),
        );
        let names = self.names();
        out += "\n## Time of a run\n\nThe median over rounds in which all ran in turns, in brackets by how much rounds \
                spread. `untuned` is what the model of the\nmachine ranks first, `tilewright` the same network tuned.\n\n";
        let mut rows = vec![["network"].iter().chain(&names).map(|&name| name.to_owned()).collect::<Vec<_>>()];
        for outcome in self.outcomes {
            let cell = |name: &&str| {
                outcome.of(name).map_or("–".to_owned(), |measured| {
                    format!("{} ({})", duration(measured.ms_median * 1e6), percent(measured.spread))
                })
            };
            rows.push(std::iter::once(outcome.network.clone()).chain(names.iter().map(cell)).collect());
        }
        out += &markdown(&rows);
        out += "\n## How many times as fast as each other one it is, tuned\n\nThe last row is the geometric mean.\n\n";
        let others: Vec<&str> = names.iter().copied().filter(|name| *name != OURS).collect();
        let mut rows = vec![["network"].iter().chain(&others).map(|&name| name.to_owned()).collect::<Vec<_>>()];
        let text = |ratio: Option<f64>| ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}"));
        for outcome in self.outcomes {
            let cells = others.iter().map(|name| text(outcome.speedup(OURS, name)));
            rows.push(std::iter::once(outcome.network.clone()).chain(cells).collect());
        }
        let means = self.means();
        let mean = |name: &&str| text(means.iter().find(|(of, _)| of == name).map(|(_, mean)| *mean));
        rows.push(std::iter::once("all".to_owned()).chain(others.iter().map(mean)).collect());
        out += &markdown(&rows);
        out += "\n## What was tuned\n\nThe error is the largest difference of any answer of ours from the reference's, \
                over its largest element.\n\n";
        let head = ["network", "GFLOP", "kernels of a run", "different ones", "trials", "error", "repeat"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for outcome in self.outcomes {
            let ours = [OURS, UNTUNED].into_iter().filter_map(|name| outcome.of(name)?.max_error);
            rows.push(vec![
                outcome.network.clone(),
                digits(outcome.gflop),
                outcome.kernels.to_string(),
                outcome.workloads.to_string(),
                outcome.trials.to_string(),
                ours.reduce(f64::max).map_or("–".to_owned(), |error| format!("{error:.1e}")),
                format!("`{}`", outcome.command),
            ]);
        }
        out += &markdown(&rows);
        out += "\n`tilewright network NAME -o NAME.onnx` writes a network. Other runtimes:\n\n";
        for spec in runtimes(hardware) {
            let version = self.outcomes.iter().find_map(|outcome| Some(outcome.of(spec.name)?.version.as_str()));
            let _ = writeln!(out, "- {} {}: {}.", spec.name, version.unwrap_or("was not there"), spec.text);
        }
        out + "\n## Speed\n\n![Speed](speed.svg)\n\n## The sum of the kernels while they are tuned\n\n\
               ![By time](by-time.svg)\n\n"
            + &format!("`{}` holds the numbers and `runs/` the models and records.\n", data::name(self.folder))
    }

    /// Bar chart with a bar for each implementation of each network.
    fn speed(&self) -> Plot {
        let names = self.names();
        let labels: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        let width = 0.8 / names.len().max(1) as f64;
        let layers = names.iter().zip(colours(&labels)).enumerate().map(|(at, (name, colour))| {
            let bars = self.outcomes.iter().enumerate().filter_map(|(place, outcome)| {
                let measured = outcome.of(name)?;
                let left = place as f64 - 0.4 + at as f64 * width;
                let (x, y) = ((left, left + width * 0.92), (0.0, measured.gflops));
                let text =
                    format!("{name}: {}, {} GFLOP/s", duration(measured.ms_median * 1e6), digits(measured.gflops));
                Some(Bar { x, y, text })
            });
            Layer { label: (*name).to_owned(), colour, marks: Marks::Bars(bars.collect()) }
        });
        let networks = self.outcomes.iter().map(|outcome| outcome.network.clone()).collect();
        Plot {
            title: "Speed of whole networks".into(),
            x: PlotAxis { label: String::new(), scale: Scale::Categories(networks) },
            y: PlotAxis { label: "GFLOP/s".into(), scale: Scale::FromZero },
            layers: layers.collect(),
        }
    }

    /// Total time of a network's kernels over tuning time.
    fn curves(&self) -> Vec<Plot> {
        let plot = |outcome: &NetworkOutcome| {
            let band = outcome.curve.iter().map(|&(_, ms)| (ms, ms)).collect();
            Plot {
                title: outcome.network.clone(),
                x: PlotAxis { label: "seconds".into(), scale: Scale::FromZero },
                y: PlotAxis { label: "sum of the kernels, ms".into(), scale: Scale::FromZero },
                layers: vec![Layer {
                    label: String::new(),
                    colour: colours(&[OURS.to_owned()])[0],
                    marks: Marks::Steps(MedianCurve { points: outcome.curve.clone(), band }),
                }],
            }
        };
        self.outcomes.iter().map(plot).collect()
    }
}
