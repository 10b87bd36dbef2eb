//! `bench MODEL.onnx`: a whole model here and in other runtimes, interleaved in one run.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json, json};
use tilewright::NO_CACHE;
use tilewright::bench::OURS;
use tilewright_graph::{Model, problems_text};
use tilewright_ir::Target;
use tilewright_model::bench::{ModelBenchRequest, bench_model};
use tilewright_model::{CompileOptions, PartOptions};
use tilewright_peers::{MODEL_PEERS, ModelPeerSpec};
use tilewright_runtime::SharedPool;

use super::bench_args::{self, BenchArgs};
use super::model::{KnownKernels, ModelArgs, OpenDims};
use super::worker_command;
use crate::error::{bad_input, one_line};
use crate::output::{message, write_result};

/// Measures a model.
///
/// # Errors
/// Bad input if the model or a peer is invalid; failure if no implementation runs it.
pub fn run(args: &BenchArgs, path: &Path, as_json: bool) -> anyhow::Result<()> {
    let threads = args.machine.threads;
    let named = bench_args::chosen(MODEL_PEERS, args.against.as_deref(), "no peer for models", |spec| {
        [spec.name, spec.library]
    })?;
    let file = ModelArgs::new(&path.display().to_string(), &args.bindings);
    let target = args.machine.place().runnable_target()?;
    let peers: Vec<_> = match named {
        Some(named) => named,
        None => MODEL_PEERS.iter().filter(|spec| spec.runs_on(&target)).collect(),
    };
    let peers: Vec<_> = peers.into_iter().filter(|spec| spec.is_of_its_own(threads)).collect();
    let mut model = file.read()?;
    if let Some(dims) = file.open_dims(&model.graph)? {
        let open = OpenModel { path, file: &file, model: &model, target: &target };
        return open.run(args, dims, &peers, as_json);
    }
    let given = args.inputs.given(&model.graph)?;
    file.refuse_defaults(&model.graph, &given)?;
    let (file, given) = file.fed(&mut model, given)?;
    let inputs = file.inputs(&model, &given)?;
    bench_args::prepare(args)?;
    let mut special = file.specialise(&model, usize::MAX)?;
    drop(model);
    let part = special.dynamic.take();
    let graph = part.as_ref().map_or(&special.graph, |part| &part.ahead);
    let pool = SharedPool::new(threads)?;
    let database = args.records.database()?;
    let records = database.records()?;
    let measured = args.cache.with(|cache| {
        let making = CompileOptions { cache, for_runs: true };
        let compiled = if special.problems.is_empty() || part.is_some() {
            let fused = file.fused(graph, args.rounding, (&target, threads))?;
            let known = KnownKernels { database: &database, records: &records };
            let compiled = file.compiled(fused, args.rounding, &args.machine, &target, known, making)?;
            cache.fill(&compiled.model, &worker_command()?);
            Some(compiled)
        } else {
            message(&format!("{OURS}: {}", one_line(&problems_text(&special.problems))));
            None
        };
        let request = ModelBenchRequest {
            path,
            graph,
            ours: compiled.iter().map(|compiled| (OURS, compiled)).collect(),
            cache,
            inputs: &inputs,
            threads,
            peers,
            peer_path: args.peer_path.clone(),
            gpu: target.gpu.map(|gpu| gpu.number),
            rounds: args.rounds,
        };
        let options = PartOptions { target: &target, pool: &pool, threads, records: &records, making };
        Ok(bench_model(&request, part.as_ref().map(|part| (part, options)), &message)?)
    })?;
    let geomean: Map<String, Json> =
        measured.ours_over_theirs().into_iter().map(|(name, ratio)| (name.to_owned(), json!(ratio))).collect();
    let text = measured.text(path, &args.machine.place());
    write_result(as_json, &json!({"rows": measured.rows, "geomean": geomean}), &text)
}

/// Number of sizes of an open dimension at which a model is measured.
const N_SIZES: usize = 8;

/// Number of sizes of a second open dimension, beside a past, at which a model is measured.
const N_SECOND: usize = 3;

/// Model with an open dimension.
struct OpenModel<'a> {
    path: &'a Path,
    file: &'a ModelArgs,
    model: &'a Model,
    target: &'a Target,
}

impl OpenModel<'_> {
    /// Measures the model at several sizes, each compared with runtimes that know the size in advance.
    fn run(
        &self,
        args: &BenchArgs,
        open: OpenDims,
        peers: &[&'static ModelPeerSpec],
        as_json: bool,
    ) -> anyhow::Result<()> {
        let OpenModel { path, file, model, target } = *self;
        if !args.inputs.is_empty() {
            return Err(bad_input("--input is for a model of one size (give --dim a number, or leave it out)"));
        }
        bench_args::prepare(args)?;
        let database = args.records.database()?;
        let records = database.records()?;
        let fused = file.lowered(model, args.rounding, (target, args.machine.threads))?;
        let compiled = args.cache.with(|cache| {
            let making = CompileOptions { cache, for_runs: true };
            file.compiled(
                fused,
                args.rounding,
                &args.machine,
                target,
                KnownKernels { database: &database, records: &records },
                making,
            )
        })?;
        let pieces = file.pieces()?;
        let numbers = pieces.iter().flat_map(|(name, numbers)| numbers.iter().map(move |n| Some((name.as_str(), *n))));
        let numbers: Vec<Option<(&str, i64)>> = if pieces.is_none() { vec![None] } else { numbers.collect() };
        let mut sizes = Vec::new();
        for tokens in numbers {
            let dim = file.dim_behind(open.dim.clone(), tokens)?;
            sizes.extend(dim.spread(N_SIZES).into_iter().map(|size| (tokens, size)));
        }
        // Short and long inputs beside a past.
        let seconds = open.second.as_ref().map_or(vec![None], |second| {
            second.spread(N_SECOND).into_iter().map(|size| Some((second, size))).collect()
        });
        let sizes = seconds.into_iter().flat_map(|second| sizes.iter().map(move |size| (second, *size)));
        let (mut rows, mut text) = (Vec::new(), String::new());
        // For a batch, the maximum number of items, so that each size has inputs for all of them.
        let (dim, items) = (&open.dim, &open.items);
        let whole = items.as_ref().map_or_else(|| file.clone(), |items| file.at(items, items.most));
        let of_items = items.as_ref().map_or(String::new(), |items| format!("{}={}, ", items.name, items.most));
        for (second, (tokens, size)) in sizes {
            let own = second.map_or_else(|| whole.clone(), |(second, size)| whole.at(second, size));
            let own = own.with_tokens(tokens).at(dim, size);
            let (inputs, special) = (own.inputs(model, &[])?, own.supported(model)?);
            let request = ModelBenchRequest {
                path,
                graph: &special.graph,
                ours: vec![(OURS, &compiled)],
                cache: &NO_CACHE,
                inputs: &inputs,
                threads: args.machine.threads,
                peers: peers.to_vec(),
                peer_path: args.peer_path.clone(),
                gpu: None,
                rounds: args.rounds,
            };
            let measured = bench_model(&request, None, &message)?;
            let taken = tokens.map_or(String::new(), |(name, n)| format!("{name}={n} "));
            let beside = second.map_or(String::new(), |(second, size)| format!("{}={size}, ", second.name));
            let head = one_line(&format!("{taken}{of_items}{beside}{}={size}", dim.name));
            text += &format!("{head}\n{}", measured.text(path, &args.machine.place()));
            for row in &measured.rows {
                let mut row = json!(row);
                row["size"] = json!(size);
                if let Some((_, n)) = tokens {
                    row["tokens"] = json!(n);
                }
                if let Some(items) = items {
                    row["items"] = json!(items.most);
                }
                if let Some((_, size)) = second {
                    row["second"] = json!(size);
                }
                rows.push(row);
            }
        }
        write_result(as_json, &json!({"dim": dim.name, "rows": rows}), &text)
    }
}

/// Takes the model in a list of workloads, if it is one; `done` names the action, for the error.
///
/// # Errors
/// Bad input if it is combined with other workloads.
pub fn alone(workloads: &[String], done: &str) -> anyhow::Result<Option<PathBuf>> {
    match (workloads, workloads.iter().find(|text| ModelArgs::is_model(text))) {
        (_, None) => Ok(None),
        ([_], Some(model)) => Ok(Some(model.into())),
        (_, Some(model)) => Err(bad_input(format!("a model is {done} alone (give {model} without workloads)"))),
    }
}
