//! Benchmarks: the best recorded kernel and other libraries, measured in interleaved rounds.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::Serialize;
use tilewright_device::device::{Racer, RoundLength};
use tilewright_device::protocol::ProgramSource;
use tilewright_device::{Caches, Device, DeviceOptions, host};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_ir::target::Arch;
pub use tilewright_peers::{Layouts, PEERS, PeerSpec};
use tilewright_peers::{Peer, Setup};
use tilewright_search::{Outcome, Timing};
use tilewright_tune::PassedOver;

use crate::best::{gflops, target_name};
use crate::choice::Choice;
use crate::clock::since_1970;
use crate::error::{Error, one_line};
use crate::format::{digits, duration, percent, table};
use crate::observer::{Note, Observer};
use crate::session::Session;
use crate::subject::workload::{require_one_size, start_device};
use crate::version::BUILD;

/// Name of our kernel among the implementations.
pub const OURS: &str = "tilewright";
/// Minimum time and number of samples of an implementation in a round.
const ROUND: RoundLength = RoundLength { time: Duration::from_millis(25), min_samples: 2 };

/// Request to benchmark implementations of a workload side by side.
#[derive(Debug, Clone)]
pub struct BenchRequest {
    /// The operator and its sizes.
    pub workload: Workload,
    /// Target that our kernel was tuned for; this machine must be able to run its code.
    pub target: Target,
    /// Number of threads that each implementation may use.
    pub threads: usize,
    /// Peers to measure; `None` for those that take their operands as our kernel does: transformed ahead of
    /// time only where the workload allows it.
    pub against: Option<Vec<&'static PeerSpec>>,
    /// Folder searched for peers' libraries before the system's folders.
    pub peer_path: Option<PathBuf>,
    /// Number of rounds; each runs every implementation once, in random order.
    pub rounds: u32,
}

impl BenchRequest {
    /// Benchmark of 15 rounds with one thread on this machine, against the workload's default peers.
    pub fn new(workload: Workload) -> BenchRequest {
        BenchRequest { workload, target: host::target(), threads: 1, against: None, peer_path: None, rounds: 15 }
    }
}

/// Result of a benchmark.
#[derive(Debug)]
pub enum Bench {
    /// Rows, one per implementation and fastest first; ours is among them.
    Measured(Vec<BenchRow>),
    /// No usable record of the workload, with counts of the records that were skipped.
    NothingRecorded(PassedOver),
}

/// Result of an implementation on a workload. Its JSON is a row of what `tilewright bench --json` prints.
#[derive(Debug, Clone, Serialize)]
pub struct BenchRow {
    /// The workload.
    pub workload: String,
    /// The implementation: [`OURS`], or the name of a peer.
    #[serde(rename = "impl")]
    pub implementation: &'static str,
    /// Number of threads.
    pub threads: usize,
    /// Median throughput, in GFLOP/s.
    pub gflops_median: f64,
    /// Throughput of the best round, in GFLOP/s.
    pub gflops_best: f64,
    /// The median over the rounds' medians, in milliseconds.
    pub ms_median: f64,
    /// Throughput divided by ours.
    pub ratio_to_ours: f64,
    /// Relative spread of its rounds.
    pub spread: f64,
    /// Number of rounds.
    pub rounds: u32,
    /// Whether the implementation is comparable with ours: it computes in the same precision, and transforms
    /// ahead of time only operands that ours may transform, too.
    #[serde(rename = "comparable")]
    pub is_comparable: bool,
    /// Relative error of the whole output, ‖out − reference‖ / ‖reference‖.
    pub relative_error: Option<f64>,
    /// Version of the library.
    pub version: String,
    /// Implementation that the library chose for this problem, in words.
    pub details: String,
    /// Tensors that the implementation keeps in its own layouts, converted outside the timing.
    #[serde(skip)]
    pub layouts: Layouts,
    /// Whether the implementation rounds operands to a lower precision that the workload does not allow.
    #[serde(skip)]
    pub rounds_factors: bool,
}

impl BenchRow {
    /// Our speedup over this implementation.
    pub fn ours_over_theirs(&self) -> f64 {
        1.0 / self.ratio_to_ours
    }
}

impl Session {
    /// Benchmarks the best recorded kernel of a workload and its peers. Peers that cannot be measured are
    /// left out, with a note.
    ///
    /// # Errors
    /// Bad input if the request does not fit; failure if workers do not start or our kernel fails.
    pub fn bench(&self, request: &BenchRequest, observer: &dyn Observer) -> Result<Bench, Error> {
        let BenchRequest { workload, target, threads, .. } = request;
        require_one_size(workload, "a comparison with other libraries")?;
        Device::check_memory(workload).map_err(Error::input)?;
        let name = target_name(target, Caches::Warm);
        let (best, passed_over) = self.database().records()?.best(workload, &name, *threads, None)?;
        let Some(best) = best else { return Ok(Bench::NothingRecorded(passed_over)) };
        if passed_over.total() > 0 {
            observer.note(Note::Message(format!("{workload}: {passed_over}")));
        }
        let Choice { task, config, .. } = best.choice(workload, target, *threads)?;
        let options =
            DeviceOptions { n_workers: 1, at_best_pace: false, ..DeviceOptions::new(self.worker().clone(), *threads) };
        let device = start_device(workload.clone(), target, options, &AtomicBool::new(false), observer)?;
        let mut device = device.expect("nobody stops the start");
        observer.note(Note::Rounds(request.rounds));
        let racer = device
            .start_race(&[ProgramSource::Steps(task.steps_text(&config))], &|| false)
            .map_err(|error| Error::failed(&error).because(error))?
            .pop()
            .expect("a race has as many candidates as sources");
        let relative_error = racer.relative_error();
        let error = relative_error.map_or(String::new(), |e| format!(", relative error {e:.1e}"));
        let ours = KernelImplementation::Ours(racer, format!("template {}, verified{error}", task.template.name));
        let mut contestants = vec![BenchEntrant { implementation: OURS, medians_ns: Vec::new(), who: ours }];
        contestants.extend(peers(request, &device, observer));
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(since_1970().as_nanos() as u64);
        for _ in 0..request.rounds {
            contestants.shuffle(&mut rng);
            contestants.retain_mut(|contestant| contestant.round(&mut device, observer));
        }
        let mut rows = Vec::new();
        for contestant in contestants {
            rows.extend(contestant.end(request, &mut device, observer)?);
        }
        let ours = rows.iter().find(|row| row.implementation == OURS).expect("invariant: ours stays to the end");
        let ours_ms = ours.ms_median;
        rows.iter_mut().for_each(|row| row.ratio_to_ours = ours_ms / row.ms_median);
        rows.sort_by(|a, b| a.ms_median.total_cmp(&b.ms_median));
        Ok(Bench::Measured(rows))
    }
}

/// Starts the peers that can be measured. Their processes end with the current thread, which starts them.
fn peers(request: &BenchRequest, device: &Device, observer: &dyn Observer) -> Vec<BenchEntrant> {
    let workload = &request.workload;
    let asked: Vec<&'static PeerSpec> = match &request.against {
        Some(asked) => asked.clone(),
        None => PEERS.iter().filter(|spec| spec.runs_on(&request.target) && spec.is_rival(workload)).collect(),
    };
    let folder = request.peer_path.as_deref();
    let gpu = match request.target.arch {
        Arch::Gpu(api) => request.target.gpu.map(|gpu| (api, gpu.number)),
        Arch::X86_64 | Arch::Aarch64 => None,
    };
    let setup = Setup { workload, data: device.data(), threads: request.threads, folder, gpu };
    let start = |spec: &'static PeerSpec| match Peer::start(spec.name, setup) {
        Ok(peer) => Some(BenchEntrant {
            implementation: spec.name,
            medians_ns: Vec::new(),
            who: KernelImplementation::Peer(peer),
        }),
        Err(reason) => {
            observer.note(Note::LeftOut(format!("{}: {reason}", spec.name)));
            None
        }
    };
    asked.into_iter().filter_map(start).collect()
}

/// Implementation in the race.
struct BenchEntrant {
    implementation: &'static str,
    /// Median of each of a peer's rounds.
    medians_ns: Vec<f64>,
    who: KernelImplementation,
}

enum KernelImplementation {
    /// Our kernel, and its description.
    Ours(Racer, String),
    Peer(Peer),
}

impl BenchEntrant {
    /// Runs one round; returns false if the implementation is out of the race.
    fn round(&mut self, device: &mut Device, observer: &dyn Observer) -> bool {
        let result = match &mut self.who {
            KernelImplementation::Ours(racer, _) => device.race_round(racer, ROUND).map_err(|error| error.to_string()),
            KernelImplementation::Peer(peer) => {
                let samples_ns = peer.round(ROUND).map_err(|error| error.to_string());
                samples_ns.map(|ns| self.medians_ns.push(Timing::of_samples(&ns, false).median_ns))
            }
        };
        if let Err(error) = &result {
            observer.note(Note::Message(format!("{}: {}", self.implementation, one_line(error))));
        }
        // Our kernel stays, so that its failure is reported at the end.
        result.is_ok() || matches!(self.who, KernelImplementation::Ours(..))
    }

    /// Finishes the measurement of an implementation; `None` for a peer whose final result is wrong.
    ///
    /// # Errors
    /// If our kernel failed.
    fn end(
        self,
        request: &BenchRequest,
        device: &mut Device,
        observer: &dyn Observer,
    ) -> Result<Option<BenchRow>, Error> {
        let BenchEntrant { implementation, medians_ns, who } = self;
        let workload = &request.workload;
        let rounds = |spec: &PeerSpec| spec.name == implementation && spec.rounds_factors();
        let rounds_factors = !workload.takes_tf32() && PEERS.iter().any(rounds);
        let row = |timing: Timing, relative_error, version: &str, details: &str, layouts| BenchRow {
            workload: workload.to_string(),
            implementation,
            threads: request.threads,
            gflops_median: gflops(workload, timing.median_ns),
            gflops_best: gflops(workload, timing.min_ns),
            ms_median: timing.median_ns / 1e6,
            // Placeholder until our throughput is known.
            ratio_to_ours: f64::NAN,
            spread: timing.spread,
            rounds: timing.n_samples,
            is_comparable: layouts == Layouts::of(workload) && !rounds_factors,
            relative_error,
            version: version.to_owned(),
            details: details.to_owned(),
            layouts,
            rounds_factors,
        };
        match who {
            KernelImplementation::Ours(racer, details) => {
                let relative_error = racer.relative_error();
                match device.end_race(racer) {
                    Outcome::Measured(timing) => {
                        Ok(Some(row(timing, relative_error, BUILD, &details, Layouts::of(workload))))
                    }
                    Outcome::Failed { class, message } => {
                        Err(Error::failed(format!("the recorded kernel of {workload} failed: {class}: {message}")))
                    }
                }
            }
            KernelImplementation::Peer(mut peer) => Ok(match peer.check() {
                Ok(relative_error) => {
                    let timing = Timing::of_samples(&medians_ns, false);
                    Some(row(timing, Some(relative_error), peer.version(), peer.details(), peer.layouts()))
                }
                Err(error) => {
                    observer.note(Note::Message(format!("{implementation}: {error}")));
                    None
                }
            }),
        }
    }
}

/// Our speedups over each peer, one per workload.
pub fn ours_over_theirs(rows: &[BenchRow]) -> Vec<(&'static str, Vec<f64>)> {
    let mut all: Vec<(&'static str, Vec<f64>)> = Vec::new();
    for row in rows.iter().filter(|row| row.implementation != OURS) {
        match all.iter_mut().find(|(name, _)| *name == row.implementation) {
            Some((_, ratios)) => ratios.push(row.ours_over_theirs()),
            None => all.push((row.implementation, vec![row.ours_over_theirs()])),
        }
    }
    all
}

/// Formats the rows of a workload as a table for people; rows that are not comparable are marked.
pub fn table_of(workload: &Workload, rows: &[BenchRow]) -> String {
    let ours = Layouts::of(workload);
    let mut cells: Vec<Vec<String>> =
        vec![["impl", "GFLOP/s", "best", "spread", "time", "ours/impl"].map(str::to_owned).to_vec()];
    for row in rows {
        let mark = if row.is_comparable { "" } else { " *" };
        cells.push(vec![
            format!("{}{mark}", row.implementation),
            digits(row.gflops_median),
            digits(row.gflops_best),
            percent(row.spread),
            duration(row.ms_median * 1e6),
            format!("{:.3}", row.ours_over_theirs()),
        ]);
    }
    let mut text = table(&cells);
    let mut note = |applies: &dyn Fn(&BenchRow) -> bool, what: &str| {
        let marked: Vec<&str> = rows.iter().filter(|row| applies(row)).map(|row| row.implementation).collect();
        if !marked.is_empty() {
            text += &format!("* {}: {what}\n", marked.join(", "));
        }
    };
    note(&|theirs| theirs.layouts.lacks(ours), "transforms in every run what ours may hold transformed");
    note(&|theirs| ours.lacks(theirs.layouts), "holds transformed, outside the timing, what ours takes plain");
    note(&|theirs| theirs.rounds_factors, "rounds factors to 10 bits behind the first");
    for row in rows {
        text += &format!("  {}: {} {}\n", row.implementation, row.version, row.details);
    }
    text
}
