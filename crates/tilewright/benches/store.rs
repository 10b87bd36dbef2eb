//! Times of looking up a winner in stores of few and of many entries: `cargo bench -p tilewright --bench
//! store`; `TILEWRIGHT_ENTRIES` sets another number than 100,000.

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;
use tilewright::{Caches, Database, Entry, Records, SharedStore, Workload, target_name};
use tilewright_device::host;
use tilewright_tune::record::RecordLine;
use tilewright_tune::{Task, TemplateSetting};

/// Workloads that are looked up.
const WORKLOADS: &[&str] = &["matmul:m=64,n=64,k=64", "matmul-1024", "resnet18.C2", "mobilenet.DW1"];
/// Number of look-ups of each workload.
const ROUNDS: usize = 50;

fn main() {
    let n_entries = std::env::var("TILEWRIGHT_ENTRIES").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    let folder = tempfile::tempdir().expect("a folder for stores");
    let few = with_winners(&folder.path().join("few"));
    let many = with_winners(&folder.path().join("many"));
    fill(&many, n_entries);
    println!("{:30} {:>12} {:>14} {:>12}", "median µs of a look-up", "few entries", n_entries, "its space");
    for text in WORKLOADS {
        let workload = Workload::parse(text).expect("a workload");
        let [few, many] = [&few, &many].map(|place| {
            median_us(|| {
                let records = records(place);
                let begin = Instant::now();
                let name = target_name(&host::target(), Caches::Warm);
                let best = black_box(records.best(&workload, &name, 1, None)).expect("records").0;
                let time = begin.elapsed();
                assert!(best.is_some(), "{text}: {:?}", records.notes());
                time
            })
        });
        let space = median_us(|| {
            let begin = Instant::now();
            black_box(task(&workload));
            begin.elapsed()
        });
        println!("{text:30} {few:>12.0} {many:>14.0} {space:>12.0}");
    }
}

/// Median of the times that `run` returns, in microseconds.
fn median_us(mut run: impl FnMut() -> std::time::Duration) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS).map(|_| run().as_secs_f64() * 1e6).collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

/// Records of a store alone, as in a process that has just started.
fn records(place: &Path) -> Records {
    let database = Database::new(Some(&place.join("none.db"))).expect("a database that is not there");
    let store = SharedStore::of_user(place.to_str()).expect("a store");
    database.before(store).records().expect("no records")
}

fn task(workload: &Workload) -> Task {
    Task::new(TemplateSetting { workload: workload.clone(), target: host::target(), n_threads: 1 }, None)
        .expect("a task")
}

/// Makes a store with a winner of each workload.
fn with_winners(place: &Path) -> PathBuf {
    let winners = WORKLOADS.iter().map(|text| {
        let workload = Workload::parse(text).expect("a workload");
        let task = task(&workload);
        let ns = 1e9;
        let record = json!({
            "workload": workload.to_string(), "target": target_name(&host::target(), Caches::Warm),
            "template": task.template.name, "threads": 1,
            "config": task.space.config_to_json(&task.space.config_at(0)),
            "outcome": {
                "class": "no_error", "median_ns": ns, "min_ns": ns, "spread": 0.1, "n_samples": 3,
                "stopped_early": false,
            },
            "seconds": {"build": 0.1, "run": 0.2, "verify": 0.3},
            "steps": "", "search": "random", "seed": 7, "trial": 0, "version": env!("CARGO_PKG_VERSION"),
            "toolchain": "none", "unix_time": 1_800_000_000,
            "winner": {
                "median_ns": ns, "margin": 0.02, "runner_up": null, "gflops": 10.0, "verified": true,
                "version": env!("CARGO_PKG_VERSION"), "toolchain": "none", "unix_time": 1_800_000_009,
            },
        });
        Entry::new(RecordLine::parse(record.to_string().as_bytes()).expect("a record")).expect("a winner")
    });
    let store = SharedStore::new(place.to_str().expect("a name")).expect("a store");
    store.push(winners.collect()).expect("winners are written");
    place.to_owned()
}

/// Adds files of other entries until there are `n_entries`.
fn fill(place: &Path, n_entries: usize) {
    let mut targets = fs::read_dir(place).expect("a store").map(|entry| entry.expect("an entry").path());
    let target = targets.find(|path| path.is_dir()).expect("a folder of the target");
    let text = fs::read(first_entry(&target)).expect("an entry");
    for at in 0..n_entries.saturating_sub(WORKLOADS.len()) {
        // Spread over the folders like hashes.
        let name = format!("{:016x}", (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let folder = target.join(&name[..2]);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(name + ".jsonl"), &text).expect("an entry");
    }
}

fn first_entry(target: &Path) -> PathBuf {
    let mut folders = fs::read_dir(target).expect("entries").map(|entry| entry.expect("an entry").path());
    let folder = folders.find(|path| path.is_dir()).expect("a folder of entries");
    fs::read_dir(folder).expect("entries").next().expect("an entry").expect("an entry").path()
}
