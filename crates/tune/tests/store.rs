//! Tests of the store on real files: sharing, damage, limits and cost.
#![allow(missing_docs)]

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rusqlite::{Connection, OpenFlags};
use serde_json::json;
use tilewright_search::{Conditions, ErrorClass, Limit, OtherCosts, Outcome, Seconds, Timing};
use tilewright_tune::record::{Exported, Imported};
use tilewright_tune::{BestRecord, Record, RunTime, Store, StoreError, TaskKey, Validator, Winner};

const WORKLOAD: &str = "matmul:m=512,n=512,k=512";
const TARGET: &str = "x86-64";

fn record(trial: u64) -> Record {
    let median_ns = 1000.0 + (trial.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64;
    let outcome = match trial % 4 {
        3 => Outcome::Failed { class: ErrorClass::CompileErrorHost, message: "too many\nregisters".into() },
        _ => Outcome::Measured(Timing {
            median_ns,
            min_ns: median_ns - 1.0,
            spread: 0.01,
            n_samples: 9,
            stopped_early: false,
            others: OtherCosts::new(if trial % 4 == 1 { &[2.5, 0.1] } else { &[] }).unwrap(),
        }),
    };
    Record {
        workload: WORKLOAD.into(),
        target: TARGET.into(),
        template: "gemm".into(),
        threads: 1,
        config: json!({"mr": trial, "pack": "a", "order": ["j", "i"]}),
        outcome,
        seconds: Seconds { build: 0.01, run: 0.02, verify: 0.003 },
        steps: "split i 8\nsplit j 48\nvectorize j.1".into(),
        search: "random".into(),
        seed: u64::MAX - 3,
        trial,
        version: "0.1.0".into(),
        toolchain: "LLVM 22".into(),
        unix_time: 1_800_000_000,
        run: Some(RunTime { start_unix_ms: 1_800_000_000_123, elapsed_s: trial as f64 / 8.0 }),
        limit: None,
        conditions: Conditions {
            device: Some(format!("pi{}", trial % 2)),
            frequency_mhz: Some(1500.0),
            temperature_c: trial.is_multiple_of(2).then_some(61.5),
        },
        is_imported: false,
    }
}

fn records(trials: std::ops::Range<u64>) -> Vec<Record> {
    trials.map(record).collect()
}

fn open(path: &Path) -> Store {
    Store::new(Connection::open(path).unwrap()).unwrap()
}

fn in_memory() -> Store {
    Store::new(Connection::open_in_memory().unwrap()).unwrap()
}

/// Trials of a space, without plausibility checks.
fn trials_of(store: &Store, template: &str, threads: u32) -> Vec<Record> {
    store.trials_of(WORKLOAD, TARGET, threads, Some(template), &|_| Validator::default()).unwrap().0
}

fn all(store: &Store) -> Vec<Record> {
    trials_of(store, "gemm", 1)
}

/// Best record on one thread, without plausibility checks.
fn best_of(store: &Store, template: Option<&str>) -> Option<BestRecord> {
    store.best(WORKLOAD, TARGET, 1, template, &|_| Validator::default()).unwrap().0
}

/// Imports lines without checks.
fn import(store: &mut Store, lines: &[u8]) -> Imported {
    store.import(lines, &mut |line| Ok((line, 0.0))).unwrap()
}

fn winner(trial: u64, median_ns: f64) -> Winner {
    let Record { workload, target, template, threads, config, version, toolchain, unix_time, .. } = record(trial);
    let runner_up = Some(record(trial + 1).config);
    Winner {
        workload,
        target,
        template,
        threads,
        config,
        median_ns,
        margin: Some(0.02),
        spread: Some(0.03),
        runner_up,
        gflops: 230.5,
        verified: true,
        version,
        toolchain,
        unix_time,
        is_imported: false,
    }
}

#[test]
fn what_was_inserted_is_read_back_once() {
    let mut store = in_memory();
    assert_eq!(store.insert(&records(0..10), 0.0).unwrap(), 10);
    assert_eq!(store.insert(&records(5..15), 0.0).unwrap(), 5);
    assert_eq!(all(&store), records(0..15));
    let mut reordered = record(2);
    reordered.config = json!({"order": ["j", "i"], "pack": "a", "mr": 2});
    assert_eq!(store.insert(&[reordered], 0.0).unwrap(), 0, "the order of the parameters does not matter");
    assert_eq!(trials_of(&store, "gemm", 2), []);
    assert_eq!(trials_of(&store, "other", 1), []);
}

#[test]
fn the_best_is_the_confirmed_winner_or_else_the_fastest_trial() {
    let mut store = in_memory();
    assert_eq!(best_of(&store, None), None);
    store.insert(&[record(3)], 0.0).unwrap();
    assert_eq!(best_of(&store, None), None, "failures are never the best");
    let mut other = record(1);
    other.template = "gemm-4-2-4".into();
    other.outcome = Outcome::Measured(Timing::of_samples(&[1.5], false));
    store.insert(&records(0..100), 0.0).unwrap();
    let fastest = records(0..100).into_iter().min_by(|a, b| a.outcome.cost().total_cmp(&b.outcome.cost())).unwrap();
    assert_eq!(best_of(&store, None), Some(BestRecord::Trial(fastest)));
    store.insert(std::slice::from_ref(&other), 0.0).unwrap();
    assert_eq!(best_of(&store, None), Some(BestRecord::Trial(other)), "over all templates");
    let elsewhere = |target, threads| store.best(WORKLOAD, target, threads, None, &|_| Validator::default()).unwrap().0;
    assert_eq!((elsewhere(TARGET, 2), elsewhere("aarch64", 1)), (None, None));

    let best_of_gemm = |store: &Store| best_of(store, Some("gemm"));
    store.set_winner(&winner(8, 3000.0)).unwrap();
    assert_eq!(
        best_of_gemm(&store),
        Some(BestRecord::Confirmed(winner(8, 3000.0))),
        "a race counts for more than a trial"
    );
    let single = Winner { margin: None, runner_up: None, ..winner(4, 5000.0) };
    store.set_winner(&single).unwrap();
    assert_eq!(best_of_gemm(&store), Some(BestRecord::Confirmed(single.clone())), "the later run counts");
    assert!(matches!(best_of(&store, None), Some(BestRecord::Trial(_))), "another template is faster");

    let after = |i, median_ns| {
        let mut later = record(i);
        later.unix_time += 1;
        later.outcome = Outcome::Measured(Timing::of_samples(&[median_ns], false));
        later
    };
    store.insert(&[after(1000, 4900.0)], 0.0).unwrap();
    assert_eq!(best_of_gemm(&store), Some(BestRecord::Confirmed(single.clone())), "within the noise of a single trial");
    store.insert(&[after(1001, 4000.0)], 0.0).unwrap();
    assert_eq!(best_of_gemm(&store), Some(BestRecord::Trial(after(1001, 4000.0))), "found since the last race");
}

#[test]
fn records_travel_as_lines() {
    let (mut from, mut to) = (in_memory(), in_memory());
    from.insert(&records(0..50), 0.0).unwrap();
    from.set_winner(&winner(8, 3000.0)).unwrap();
    let mut lines = Vec::new();
    assert_eq!(from.export(&mut lines).unwrap(), Exported { written: 50, left_out: 0 });
    let imported = import(&mut to, &lines);
    assert_eq!((imported.read, imported.new), (50, 50));
    let again = import(&mut to, &lines);
    assert_eq!((again.read, again.new), (50, 0));
    let by_import = |record| Record { is_imported: true, ..record };
    assert_eq!(all(&to), all(&from).into_iter().map(by_import).collect::<Vec<_>>());
    let best = |store: &Store| best_of(store, None);
    assert_eq!(best(&to), Some(BestRecord::Confirmed(Winner { is_imported: true, ..winner(8, 3000.0) })));
    let raced_here = Winner { unix_time: 1, ..winner(4, 5000.0) };
    to.set_winner(&raced_here).unwrap();
    import(&mut to, &lines);
    assert_eq!(best(&to), Some(BestRecord::Confirmed(raced_here)), "whatever the clocks say");
}

/// Trial with this time and this timestamp.
fn timed(trial: u64, median_ns: f64, unix_time: u64) -> Record {
    let timing = Timing::of_samples(&[median_ns], false);
    Record { outcome: Outcome::Measured(timing), unix_time, ..record(trial) }
}

#[test]
fn later_is_what_was_recorded_later() {
    let mut store = in_memory();
    store.insert(&[timed(0, 1000.0, 9_000_000_000), timed(1, 3000.0, 1)], 0.0).unwrap();
    let raced = Winner { unix_time: 9_000_000_000, ..winner(1, 3000.0) };
    store.set_winner(&raced).unwrap();
    assert!(store.is_settled(&raced).unwrap());
    assert_eq!(best_of(&store, None), Some(BestRecord::Confirmed(raced.clone())), "the faster trial was in the race");
    let by_import = [timed(2, 500.0, 9_000_000_001)].map(|record| serde_json::to_string(&record).unwrap());
    import(&mut store, by_import[0].as_bytes());
    assert_eq!(best_of(&store, None), Some(BestRecord::Confirmed(raced.clone())), "it was run elsewhere");
    assert!(!store.is_settled(&raced).unwrap());
    store.insert(&[timed(3, 2000.0, 1)], 0.0).unwrap();
    assert_eq!(best_of(&store, None), Some(BestRecord::Trial(timed(3, 2000.0, 1))), "it was recorded since");
}

#[test]
fn a_race_that_was_run_elsewhere_says_nothing_of_trials_that_were_run_here() {
    let (mut from, mut store) = (in_memory(), in_memory());
    from.insert(&[timed(1, 1500.0, 5), timed(2, 4000.0, 5)], 0.0).unwrap();
    from.set_winner(&winner(2, 3000.0)).unwrap();
    let mut lines = Vec::new();
    from.export(&mut lines).unwrap();
    import(&mut store, &lines);
    let imported = Winner { is_imported: true, ..winner(2, 3000.0) };
    assert_eq!(best_of(&store, None), Some(BestRecord::Confirmed(imported.clone())));
    assert!(!store.is_settled(&imported).unwrap());
    store.insert(&[timed(3, 2900.0, 1)], 0.0).unwrap();
    assert_eq!(best_of(&store, None), Some(BestRecord::Confirmed(imported)), "within the noise of a single trial");
    store.insert(&[timed(4, 2000.0, 1)], 0.0).unwrap();
    import(&mut store, &lines);
    assert_eq!(best_of(&store, None), Some(BestRecord::Trial(timed(4, 2000.0, 1))));
}

#[test]
fn what_cannot_be_true_gives_way_and_what_can_stays() {
    let mut store = in_memory();
    store.insert(&[timed(0, 5.0, 1), timed(1, 500.0, 1), record(3)], 0.0).unwrap();
    let again = [timed(0, 1000.0, 2), timed(1, 1000.0, 2), timed(3, 1000.0, 2)];
    assert_eq!(store.insert(&again, 100.0).unwrap(), 1);
    assert_eq!(all(&store), [timed(1, 500.0, 1), record(3), timed(0, 1000.0, 2)]);
    let line = serde_json::to_string(&timed(1, 1500.0, 3)).unwrap();
    assert_eq!(store.import(line.as_bytes(), &mut |line| Ok((line, 1000.0))).unwrap().new, 1);
    assert_eq!(all(&store)[2], Record { is_imported: true, ..timed(1, 1500.0, 3) });
}

#[test]
fn a_malformed_line_imports_nothing() {
    let mut store = in_memory();
    let line = |trial| serde_json::to_string(&record(trial)).unwrap();
    let text = format!("{}\n\nnonsense\n{}\n", line(0), line(1));
    let error = store.import(text.as_bytes(), &mut |line| Ok((line, 0.0))).unwrap_err();
    assert_eq!(error.to_string(), "line 3: expected ident at column 2");
    assert_eq!(all(&store), []);
}

#[test]
fn old_record_files_load() {
    let mut store = in_memory();
    let file = include_bytes!("data/records-v1.jsonl");
    let imported = import(&mut store, file);
    assert_eq!((imported.read, imported.new), (2, 2));
    let mut lines = Vec::new();
    store.export(&mut lines).unwrap();
    let parse = |bytes: &[u8]| -> Vec<serde_json::Value> {
        serde_json::Deserializer::from_slice(bytes).into_iter().collect::<Result<_, _>>().unwrap()
    };
    assert_eq!(parse(&lines), parse(file));
}

/// Columns of trials that the first form of the schema did not have.
const LATER: [&str; 8] = [
    "run_start_unix_ms",
    "run_elapsed_s",
    "limit_name",
    "limit_number",
    "imported",
    "device",
    "frequency_mhz",
    "temperature_c",
];

#[test]
fn old_databases_open_and_take_new_records() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.db");
    open(&path).insert(&records(0..3), 0.0).unwrap();
    let old = Connection::open(&path).unwrap();
    for column in LATER {
        old.execute_batch(&format!("ALTER TABLE trials DROP COLUMN {column}")).unwrap();
    }
    for column in ["winners DROP imported", "winners DROP last_trial"] {
        old.execute_batch(&format!("ALTER TABLE {column}")).unwrap();
    }
    let read_only = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    let without = |trial| Record { run: None, conditions: Conditions::default(), ..record(trial) };
    let mut expected: Vec<Record> = (0..3).map(without).collect();
    let read_only = Store::new(read_only).unwrap();
    assert_eq!(all(&read_only), expected, "as it is, where it cannot be written");
    assert!(best_of(&read_only, None).is_some());
    open(&path).insert(&[record(3)], 0.0).unwrap();
    expected.push(record(3));
    assert_eq!(all(&open(&path)), expected);
}

#[test]
fn a_failure_of_a_limit_makes_room_for_what_a_later_run_finds() {
    let failed = |limit| Record {
        outcome: Outcome::Failed { class: ErrorClass::RunTimeout, message: "not finished".into() },
        limit,
        ..record(3)
    };
    let measured = || Record { config: record(3).config, ..record(2) };
    let (low, high) = (failed(Some(Limit::RunS(0.5))), failed(Some(Limit::RunS(10.0))));
    let of_memory = failed(Some(Limit::MemoryBytes(1 << 40)));
    let earlier = |record: &Record| Record { unix_time: record.unix_time - 1, ..record.clone() };
    for (there, new, replaces) in [
        (&low, &high, true),
        (&high, &low, false),
        (&low, &low, false),
        (&low, &measured(), true),
        (&low, &earlier(&measured()), true),
        (&low, &of_memory, true),
        (&low, &earlier(&of_memory), false),
        (&low, &failed(None), true),
        (&failed(None), &high, false),
        (&failed(None), &measured(), false),
        (&measured(), &high, false),
    ] {
        let mut store = in_memory();
        store.insert(std::slice::from_ref(there), 0.0).unwrap();
        assert_eq!(store.insert(std::slice::from_ref(new), 0.0).unwrap(), u64::from(replaces), "{there:?} {new:?}");
        assert_eq!(all(&store), [if replaces { new } else { there }.clone()]);
    }
}

#[test]
fn recorded_spaces_are_listed_once_each() {
    let mut store = in_memory();
    assert_eq!(store.tasks().unwrap(), []);
    store.insert(&records(0..3), 0.0).unwrap();
    store.insert(&[Record { threads: 2, ..record(3) }, record(4)], 0.0).unwrap();
    let task = |threads| TaskKey { workload: WORKLOAD.into(), target: TARGET.into(), template: "gemm".into(), threads };
    assert_eq!(store.tasks().unwrap(), [task(1), task(2)]);
}

/// Checks that workloads that are not listed cost no query, and that choices made in one state are made again
/// in another.
#[test]
fn a_store_lists_its_workloads_and_tells_when_it_changes() {
    let mut store = in_memory();
    assert_eq!(store.workloads(1).unwrap(), Some(HashSet::new()));
    let mut states = vec![store.state().unwrap()];
    store.insert(&records(0..3), 0.0).unwrap();
    states.push(store.state().unwrap());
    store.insert(&records(0..3), 0.0).unwrap();
    assert_eq!(store.state().unwrap(), states[1], "nothing is new");
    for median_ns in [9.0, 8.0] {
        store.set_winner(&winner(1, median_ns)).unwrap();
        states.push(store.state().unwrap());
    }
    assert_eq!(states.iter().collect::<HashSet<_>>().len(), states.len(), "{states:?}");
    let workload = record(0).workload;
    assert!(store.workloads(1).unwrap().unwrap().contains(&workload));
    assert_eq!(store.workloads(0).unwrap(), None);
    // A record under the name of an earlier version is found under the current name.
    let earlier = Record { workload: format!("{workload},exact=1"), ..record(7) };
    store.insert(&[earlier], 0.0).unwrap();
    assert!(store.workloads(2).unwrap().unwrap().contains(&workload));
}

#[test]
fn records_of_earlier_names_are_found() {
    let mut store = in_memory();
    let (now, earlier) = ("matmul:m=8,n=8,k=8", "matmul:m=8,n=8,k=8,exact=1");
    let named = |workload: &str, trial| Record { workload: workload.into(), ..record(trial) };
    store.insert(&[named(earlier, 0), named(earlier, 1), named(now, 1), named(now, 2)], 0.0).unwrap();
    let (trials, _) = store.trials_of(now, TARGET, 1, Some("gemm"), &|_| Validator::default()).unwrap();
    assert_eq!(trials.iter().map(|record| record.trial).collect::<Vec<_>>(), [0, 1, 2], "each configuration once");
    let names: Vec<String> = store.tasks().unwrap().into_iter().map(|key| key.workload).collect();
    assert_eq!(names, [now]);
    assert!(store.best(now, TARGET, 1, None, &|_| Validator::default()).unwrap().0.is_some());

    // If the attribute has an effect, these are two workloads.
    let (all, exact) = ("conv2d:c=8,h=8,w=8,k=8,r=3,s=3", "conv2d:c=8,h=8,w=8,k=8,r=3,s=3,exact=1");
    let mut store = in_memory();
    store.insert(&[named(all, 0), named(exact, 1)], 0.0).unwrap();
    for (workload, trial) in [(all, 0), (exact, 1)] {
        let (trials, _) = store.trials_of(workload, TARGET, 1, Some("gemm"), &|_| Validator::default()).unwrap();
        assert_eq!(trials.iter().map(|record| record.trial).collect::<Vec<_>>(), [trial], "{workload}");
    }
    assert_eq!(store.tasks().unwrap().len(), 2);
}

#[test]
fn a_file_shared_by_many_loses_nothing() {
    const N_WRITERS: u64 = 4;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.db");
    std::thread::scope(|scope| {
        for writer in 0..N_WRITERS {
            let path = &path;
            scope.spawn(move || {
                // All threads create the file at once, and adjacent ones overlap by half.
                let mut store = open(path);
                for batch in 0..20 {
                    let first = (writer * 20 + batch) * 16;
                    store.insert(&records(first..first + 32), 0.0).unwrap();
                }
            });
        }
    });
    let mut found: Vec<u64> = all(&open(&path)).iter().map(|record| record.trial).collect();
    found.sort();
    assert!(found.into_iter().eq(0..N_WRITERS * 20 * 16 + 16));
}

#[test]
fn readers_do_not_wait_for_a_writer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.db");
    open(&path).insert(&records(0..10), 0.0).unwrap();
    let writer = Connection::open(&path).unwrap();
    writer.execute_batch("BEGIN IMMEDIATE").unwrap();
    // A process that waited would fail because the database is locked, as the writer does not finish.
    assert_eq!(all(&open(&path)).len(), 10);
}

fn check_refused(connection: Connection, expected: &str) {
    assert_eq!(Store::new(connection).unwrap_err().to_string(), expected);
}

#[test]
fn files_that_are_not_ours_are_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "Dear diary, ".repeat(100)).unwrap();
    check_refused(Connection::open(&text).unwrap(), "not a database");
    assert_eq!(std::fs::read_to_string(&text).unwrap(), "Dear diary, ".repeat(100));

    let foreign = folder.path().join("foreign.db");
    Connection::open(&foreign).unwrap().execute_batch("CREATE TABLE trials (id)").unwrap();
    let bytes = std::fs::read(&foreign).unwrap();
    check_refused(Connection::open(&foreign).unwrap(), "a database of another program (application id 0x0)");
    assert_eq!(std::fs::read(&foreign).unwrap(), bytes);

    let marked = Connection::open_in_memory().unwrap();
    marked.pragma_update(None, "application_id", 7).unwrap();
    check_refused(marked, "a database of another program (application id 0x7)");

    let newer = folder.path().join("newer.db");
    drop(open(&newer));
    Connection::open(&newer).unwrap().pragma_update(None, "user_version", 2).unwrap();
    check_refused(Connection::open(&newer).unwrap(), "schema version 2; this version knows up to 1");
}

#[test]
fn a_file_that_cannot_be_written_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.db");
    open(&path).insert(&records(0..5), 0.0).unwrap();
    let read_only = || Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_ONLY).unwrap();
    let mut store = Store::new(read_only()).unwrap();
    assert_eq!(all(&store).len(), 5);
    assert!(best_of(&store, None).is_some());
    assert!(matches!(store.insert(&records(5..6), 0.0), Err(StoreError::ReadOnly)));

    std::fs::write(folder.path().join("empty.db"), "").unwrap();
    let empty = Connection::open_with_flags(folder.path().join("empty.db"), OpenFlags::SQLITE_OPEN_READ_ONLY);
    check_refused(empty.unwrap(), "not writable");
}

#[test]
fn a_full_disk_keeps_what_was_there() {
    let connection = Connection::open_in_memory().unwrap();
    connection.pragma_update(None, "max_page_count", 30).unwrap();
    let mut store = Store::new(connection).unwrap();
    store.insert(&records(0..10), 0.0).unwrap();
    let error = store.insert(&records(10..10_000), 0.0).unwrap_err();
    assert_eq!(error.to_string(), "disk or database full");
    assert_eq!(all(&store), records(0..10));
}

/// Number of instructions that SQLite executes to open a file with `n` trials of four workloads, most of them
/// ours, and to find the best.
fn instructions_of_best(n: u64) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.db");
    let mut batch = records(0..n);
    for record in batch.iter_mut().filter(|record| record.trial % 8 < 3) {
        record.workload = format!("matmul:m=512,n=512,k={}", record.trial % 8 + 1);
    }
    open(&path).insert(&batch, 0.0).unwrap();
    let mut connection = Connection::open(&path).unwrap();
    let count = Arc::new(AtomicU64::new(0));
    let counter = count.clone();
    let counting = move || {
        counter.fetch_add(1, Ordering::Relaxed);
        false
    };
    connection.progress_handler(1, Some(counting)).unwrap();
    let best = best_of(&Store::new(connection).unwrap(), None);
    assert!(matches!(best, Some(BestRecord::Trial(_))));
    count.load(Ordering::Relaxed)
}

#[test]
fn the_best_of_many_records_takes_no_more_work_than_that_of_few() {
    let [few, many] = [500, 50_000].map(instructions_of_best);
    assert!(few > 100 && many < 2 * few, "{few} instructions for few records, {many} for many");
}
