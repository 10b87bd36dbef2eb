//! `bench`: the best recorded kernel and peer libraries, interleaved in one run.

use std::collections::HashSet;
use std::sync::Mutex;

use serde_json::{Map, Value as Json, json};
use tilewright::bench::{Bench, BenchRequest, BenchRow, PEERS, ours_over_theirs, table_of};
use tilewright::{Caches, Note, Observer, Session, target_name};
use tilewright_device::Device;
use tilewright_lab::stats::geometric_mean;

use super::bench_args::{BenchArgs, check_peer_path, chosen, prepare};
use super::bench_model;
use super::{count, nothing_recorded, parse_workloads, worker_command};
use crate::error::{OrBadInput, bad_input};
use crate::interrupts::Interrupts;
use crate::output::{message, table, write_result};
use crate::progress::Shown;

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
    // The reason why a peer is left out is printed once for all workloads.
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
            // Results measured so far are printed.
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
