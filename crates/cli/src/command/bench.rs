//! `bench`: the best recorded kernel and peer libraries, interleaved in one run.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde_json::{Map, Value as Json, json};
use tilewright::{gflops, target_name};
use tilewright_device::device::{Racer, Round};
use tilewright_device::protocol::Source;
use tilewright_device::{Device, Options};
use tilewright_ir::op::Workload;
use tilewright_peers::{Layouts, PEERS, Peer, PeerSpec, Setup};
use tilewright_tune::{Outcome, PassedOver, Timing};

use super::tune::Interrupts;
use super::{
    DatabaseArgs, MachineArgs, count, device_options, known_best, make_task, nothing_recorded, parse_workloads,
    start_device,
};
use crate::error::{OrBadInput, bad_input};
use crate::output::{digits, duration, message, table, write_result};
use tilewright::version::BUILD;

/// The name of our kernels among the implementations.
const OURS: &str = "tilewright";
/// What the runs of one implementation in one round come to.
const ROUND: Round = Round { time: Duration::from_millis(25), min_samples: 2 };

/// Arguments of `bench`.
#[derive(Args, Debug)]
#[command(after_help = peers_help())]
pub struct BenchArgs {
    /// Operators and sizes, such as matmul:m=1024,n=1024,k=1024, aliases, such as matmul-1024, or sets of
    /// them, such as resnet18
    #[arg(required = true, value_name = "WORKLOAD")]
    workloads: Vec<String>,
    /// Peers or libraries to measure beside, separated by commas, or `none` [default: peers in the workload's
    /// layout]
    #[arg(long, value_name = "LIST")]
    against: Option<String>,
    /// Folder, such as one of an unpacked Python wheel, in which and below which peers' libraries are looked
    /// for before the system's
    #[arg(long, value_name = "FOLDER")]
    peer_path: Option<PathBuf>,
    /// Keep out algorithms that round more than the operator as written, such as Winograd's; the same as
    /// exact=1
    #[arg(long)]
    exact: bool,
    #[command(flatten)]
    machine: MachineArgs,
    /// Rounds; each runs every implementation once, in random order
    #[arg(long, value_name = "R", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    #[command(flatten)]
    records: DatabaseArgs,
}

/// The peers, for the help text.
fn peers_help() -> String {
    let lines = PEERS.iter().map(|spec| format!("  {:15} {}\n", spec.name, spec.text));
    format!(
        "Peers:\n{}\nIn the JSON, ratio_to_ours is the throughput of an implementation over ours, \
         and geomean that of ours over the peer's.",
        lines.collect::<String>()
    )
}

/// One implementation's result on one workload.
#[derive(Debug)]
struct Row {
    implementation: &'static str,
    /// Over the medians of the rounds.
    timing: Timing,
    version: String,
    details: String,
    /// What it holds in layouts of its own, outside the timing.
    layouts: Layouts,
    /// ‖out − reference‖ / ‖reference‖ over the whole output.
    relative_error: Option<f64>,
}

/// Measures workloads.
///
/// # Errors
/// Bad input if a workload or a peer does not exist; failure if no workload has a recorded kernel.
pub fn run(args: &BenchArgs, as_json: bool) -> anyhow::Result<()> {
    let mut workloads = Vec::new();
    for text in &args.workloads {
        workloads.extend(parse_workloads(text, args.exact)?);
    }
    for workload in &workloads {
        Device::check_memory(workload).or_bad_input("")?;
    }
    let peers = chosen_peers(args.against.as_deref())?;
    if let Some(folder) = args.peer_path.as_deref().filter(|folder| !folder.is_dir()) {
        return Err(bad_input(format!("--peer-path: {} is no folder; give one with libraries", folder.display())));
    }
    args.machine.runnable_target()?;
    args.machine.warn_of_limits();
    if let Some(warning) = tilewright_lab::load::warning() {
        message(&warning);
    }
    let mut json_rows = Vec::new();
    let mut text = String::new();
    let mut ratios: Vec<(&'static str, Vec<f64>)> = Vec::new();
    let mut said = HashSet::new();
    let mut fault = None;
    for workload in &workloads {
        let rows = match bench(workload, args, peers.as_deref(), &mut said) {
            Ok(Some(rows)) => rows,
            Ok(None) => continue,
            Err(error) if json_rows.is_empty() => return Err(error),
            // What was measured until then is told.
            Err(error) => {
                fault = Some(error);
                break;
            }
        };
        let ours = rows.iter().find(|row| row.implementation == OURS).expect("there are no rows without ours");
        let ours_ns = ours.timing.median_ns;
        for row in &rows {
            json_rows.push(row_json(workload, args.machine.threads, row, ours_ns));
            if row.implementation != OURS {
                // How many times as fast as the peer we are.
                let ratio = row.timing.median_ns / ours_ns;
                match ratios.iter_mut().find(|(name, _)| *name == row.implementation) {
                    Some((_, all)) => all.push(ratio),
                    None => ratios.push((row.implementation, vec![ratio])),
                }
            }
        }
        text += &format!("{workload}, {}\n{}\n", count(args.machine.threads as u64, "thread"), shown(workload, &rows));
    }
    anyhow::ensure!(
        !json_rows.is_empty(),
        "no kernel is recorded for any of the workloads (run `tilewright tune` first)"
    );

    let geomean = |all: &[f64]| (all.iter().map(|r| r.ln()).sum::<f64>() / all.len() as f64).exp();
    let geomeans: Map<String, Json> =
        ratios.iter().map(|(name, all)| ((*name).to_owned(), json!(geomean(all)))).collect();
    if workloads.len() > 1 && !ratios.is_empty() {
        text += "geometric mean of ours / theirs\n";
        let mut rows = vec![];
        for (name, all) in &ratios {
            rows.push(vec![(*name).to_owned(), format!("{:.3}", geomean(all)), count(all.len() as u64, "workload")]);
        }
        text += &table(&rows);
    }
    write_result(as_json, &json!({"rows": json_rows, "geomean": geomeans}), &text)?;
    fault.map_or(Ok(()), Err)
}

/// The peers asked for; `None` for those that fit each workload.
fn chosen_peers(list: Option<&str>) -> anyhow::Result<Option<Vec<&'static PeerSpec>>> {
    match list {
        None => Ok(None),
        Some("none") => Ok(Some(Vec::new())),
        Some(list) => {
            let known = || PEERS.iter().map(|spec| spec.name).collect::<Vec<_>>().join(", ");
            let mut chosen: Vec<&'static PeerSpec> = Vec::new();
            for name in list.split(',').map(str::trim) {
                let found = PEERS.iter().filter(|spec| spec.name == name || spec.library == name);
                let before = chosen.len();
                let fresh: Vec<_> = found.clone().filter(|s| !chosen.iter().any(|c| c.name == s.name)).collect();
                chosen.extend(fresh);
                if chosen.len() == before && found.count() == 0 {
                    return Err(bad_input(format!("no peer is called `{name}`; there are {}", known())));
                }
            }
            Ok(Some(chosen))
        }
    }
}

/// Measures one workload; `None`, with a message, without a kernel of ours. A message says once why a peer is
/// left out, for all workloads.
fn bench(
    workload: &Workload,
    args: &BenchArgs,
    peers: Option<&[&'static PeerSpec]>,
    said: &mut HashSet<String>,
) -> anyhow::Result<Option<Vec<Row>>> {
    let target = args.machine.runnable_target()?;
    let threads = args.machine.threads;
    let database = args.records.database()?;
    let (name, target_name) = (workload.to_string(), target_name(&target, false));
    let (best, passed_over) = match database.open_to_read()? {
        Some(store) => {
            known_best(&store, workload, &target_name, threads as u32, None).map_err(|error| database.refuse(error))?
        }
        None => (None, PassedOver::default()),
    };
    let Some(best) = best else {
        message(&nothing_recorded(&name, &target_name, &args.machine, false, &database, &passed_over));
        return Ok(None);
    };
    let task = make_task(workload.clone(), target, threads, Some(&best.template))?;
    let config = task
        .space
        .config_from_json(&best.config)
        .or_bad_input("the space has changed since it was recorded; run `tilewright tune` again")?;
    let options = Options { n_workers: 1, at_best_pace: false, ..device_options(threads)? };
    let mut device = start_device(workload, &task.setting.target, options, &Interrupts::default())?
        .expect("nobody interrupts the start");
    let racer = device
        .start_race(&[Source::Steps(task.steps_text(&config))], &|| false)?
        .pop()
        .expect("a race has as many candidates as sources");
    let relative_error = racer.relative_error();
    let error = relative_error.map_or(String::new(), |e| format!(", relative error {e:.1e}"));
    let details = format!("template {}, verified{error}", task.template.name);

    // Peers end with the thread that starts them: this one.
    let mut contestants = vec![Contestant { implementation: OURS, medians_ns: Vec::new(), who: Who::Ours(racer) }];
    let peers: Vec<&'static PeerSpec> = match peers {
        Some(asked) => asked.to_vec(),
        None => PEERS.iter().filter(|spec| spec.is_rival(workload)).collect(),
    };
    let setup = Setup { workload, data: device.data(), threads, folder: args.peer_path.as_deref() };
    for spec in peers {
        match Peer::start(spec.name, setup) {
            Ok(peer) => {
                contestants.push(Contestant { implementation: spec.name, medians_ns: Vec::new(), who: Who::Peer(peer) })
            }
            Err(reason) => {
                let line = format!("{}: {reason}", spec.name);
                if said.insert(line.clone()) {
                    message(&line);
                }
            }
        }
    }
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_nanos() as u64);
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    for _ in 0..args.rounds {
        contestants.shuffle(&mut rng);
        contestants.retain_mut(|contestant| contestant.round(&mut device));
    }

    let mut rows = Vec::new();
    for contestant in contestants {
        let Contestant { implementation, medians_ns, who } = contestant;
        match who {
            Who::Ours(racer) => match device.end_race(racer) {
                Outcome::Measured(timing) => rows.push(Row {
                    implementation,
                    timing,
                    version: BUILD.to_owned(),
                    details: details.clone(),
                    layouts: Layouts::of(workload),
                    relative_error,
                }),
                Outcome::Failed { class, message: reason } => {
                    anyhow::bail!("the recorded kernel of {workload} failed: {class}: {reason}")
                }
            },
            Who::Peer(mut peer) => match peer.check() {
                Ok(relative_error) => rows.push(Row {
                    implementation,
                    timing: Timing::of_samples(&medians_ns, false),
                    version: peer.version().to_owned(),
                    details: peer.details().to_owned(),
                    layouts: peer.layouts(),
                    relative_error: Some(relative_error),
                }),
                Err(error) => message(&format!("{implementation}: {error}")),
            },
        }
    }
    rows.sort_by(|a, b| a.timing.median_ns.total_cmp(&b.timing.median_ns));
    Ok(Some(rows))
}

/// One implementation in the race.
struct Contestant {
    implementation: &'static str,
    /// Of the rounds of a peer.
    medians_ns: Vec<f64>,
    who: Who,
}

enum Who {
    Ours(Racer),
    Peer(Peer),
}

impl Contestant {
    /// Runs one round; false where it is out of the race.
    fn round(&mut self, device: &mut Device) -> bool {
        let result = match &mut self.who {
            Who::Ours(racer) => device.race_round(racer, ROUND).map_err(anyhow::Error::from),
            Who::Peer(peer) => {
                let samples_ns = peer.round(ROUND).map_err(anyhow::Error::from);
                samples_ns.map(|ns| self.medians_ns.push(Timing::of_samples(&ns, false).median_ns))
            }
        };
        if let Err(error) = &result {
            message(&format!("{}: {}", self.implementation, crate::error::describe(error)));
        }
        // Ours stays, so that its failure is told at the end.
        result.is_ok() || matches!(self.who, Who::Ours(_))
    }
}

fn row_json(workload: &Workload, threads: usize, row: &Row, ours_ns: f64) -> Json {
    json!({
        "workload": workload.to_string(),
        "impl": row.implementation,
        "threads": threads,
        "gflops_median": gflops(workload, row.timing.median_ns),
        "gflops_best": gflops(workload, row.timing.min_ns),
        "ms_median": row.timing.median_ns / 1e6,
        // Throughput of this implementation over ours.
        "ratio_to_ours": ours_ns / row.timing.median_ns,
        "spread": row.timing.spread,
        "rounds": row.timing.n_samples,
        // Whether it may hold the same operands transformed as ours.
        "comparable": row.layouts == Layouts::of(workload),
        "relative_error": row.relative_error,
        "version": row.version,
        "details": row.details,
    })
}

fn shown(workload: &Workload, rows: &[Row]) -> String {
    let ours_ns = rows.iter().find(|row| row.implementation == OURS).map_or(f64::NAN, |row| row.timing.median_ns);
    let ours = Layouts::of(workload);
    let mut cells: Vec<Vec<String>> =
        vec![["impl", "GFLOP/s", "best", "spread", "time", "ours/impl"].map(str::to_owned).to_vec()];
    for row in rows {
        let mark = if row.layouts == ours { "" } else { " *" };
        cells.push(vec![
            format!("{}{mark}", row.implementation),
            digits(gflops(workload, row.timing.median_ns)),
            digits(gflops(workload, row.timing.min_ns)),
            super::percent(row.timing.spread),
            duration(row.timing.median_ns),
            format!("{:.3}", row.timing.median_ns / ours_ns),
        ]);
    }
    let mut text = table(&cells);
    let mut note = |applies: &dyn Fn(Layouts) -> bool, what: &str| {
        let marked: Vec<&str> = rows.iter().filter(|r| applies(r.layouts)).map(|r| r.implementation).collect();
        if !marked.is_empty() {
            text += &format!("* {}: {what}\n", marked.join(", "));
        }
    };
    note(&|theirs| theirs.lacks(ours), "transforms in every run what ours may hold transformed");
    note(&|theirs| ours.lacks(theirs), "holds transformed, outside the timing, what ours takes plain");
    for row in rows {
        text += &format!("  {}: {} {}\n", row.implementation, row.version, row.details);
    }
    text
}
