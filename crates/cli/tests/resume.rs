//! Runs that are killed, interrupted or concurrent lose nothing and repeat nothing.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{TILEWRIGHT, command, json_of, recorded, run, run_json, send, stderr, text};

const WORKLOAD: &str = "matmul:m=64,n=64,k=64";
/// Number of candidates that are measured before records are written.
const BATCH: u64 = 16;
/// Time limit in seconds of a run that is interrupted long before.
const LONG: &str = "600";
/// Timeout, on a busy machine, of actions that usually take a second.
const PATIENCE: Duration = Duration::from_secs(120);
/// Timeout, on a busy machine, of actions that end immediately, or after a short race.
const PROMPT: Duration = Duration::from_secs(20);

/// Observed run.
struct Running {
    child: Child,
    /// Last number of trials that it reported.
    n_told: Arc<Mutex<u64>>,
    watcher: std::thread::JoinHandle<String>,
}

impl Running {
    fn start(arguments: &[&str]) -> Running {
        Running::watch(command(arguments))
    }

    fn watch(mut command: Command) -> Running {
        let mut child = command.spawn().expect("the command starts");
        let stderr = child.stderr.take().expect("standard error is piped");
        let n_told = Arc::new(Mutex::new(0));
        let told = n_told.clone();
        let watcher = std::thread::spawn(move || {
            let mut all = String::new();
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                // "3 s · 17 of 200 trials (…"
                let n = line.split(" · ").nth(1).and_then(|part| part.split(' ').next()?.replace(',', "").parse().ok());
                if let Some(n) = n {
                    *told.lock().unwrap() = n;
                }
                all += &line;
                all.push('\n');
            }
            all
        });
        Running { child, n_told, watcher }
    }

    /// Waits until a number of trials is reported, or the run ends.
    fn wait_for(&mut self, n: u64) {
        let start = Instant::now();
        while *self.n_told.lock().unwrap() < n && self.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < PATIENCE, "no {n} trials in {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end of the run; returns exit code, standard output and standard error.
    fn end(mut self) -> (Option<i32>, String, String) {
        let mut stdout = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        let status = self.child.wait().unwrap();
        (status.code(), stdout, self.watcher.join().unwrap())
    }
}

fn tune<'a>(db: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["tune", WORKLOAD, "--search", "random", "--db", text(db)];
    arguments.extend_from_slice(more);
    arguments
}

#[test]
fn a_space_that_is_recorded_leaves_nothing_to_search() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let arguments = ["tune", "matmul:m=1,n=1,k=1", "--template", "gemm-4-2-4", "--db", text(&db)];
    let json = |more: &[&str]| {
        let arguments = [&arguments[..], more, &["--json"]].concat();
        let output = run(&arguments);
        (json_of(&arguments, &output), stderr(&output))
    };
    let (recorded, _) = json(&["--no-race"]);
    assert!(recorded["new_trials"].as_u64().unwrap() > 0);
    let (raced, told) = json(&[]);
    assert!(told.contains("the whole space is recorded already: there is nothing to search"), "{told}");
    assert!(told.contains("the leaders have yet to be raced") && !told.contains("searching for"), "{told}");
    assert_eq!((&raced["new_trials"], &raced["best"]["confirmed"]), (&0.into(), &true.into()));
    let (again, told) = json(&[]);
    assert!(told.contains("the whole space is recorded already\n"), "{told}");
    assert!(!told.contains("raced") && !told.contains("searching for"), "{told}");
    assert_eq!((&again["new_trials"], &again["best"]), (&0.into(), &raced["best"]));
}

#[test]
fn a_killed_run_loses_at_most_a_batch_and_repeats_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let arguments = tune(&db, &["--trials", "200", "--no-race"]);
    let mut before = recorded(&db);
    // Times that vary between runs of the test, spread over starting, building, measuring and writing.
    let mut seed = std::env::var("TILEWRIGHT_SEED").map_or(u64::from(std::process::id()), |text| text.parse().unwrap());
    println!("repro: TILEWRIGHT_SEED={seed} cargo test -p tilewright-cli --test resume a_killed_run");
    for round in 0..10 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let mut running = Running::start(&arguments);
        if round % 3 > 0 {
            running.wait_for(1);
        }
        std::thread::sleep(Duration::from_millis((seed >> 33) % 400));
        let _ = running.child.kill();
        let n_told = running.n_told.clone();
        running.end();
        let after = recorded(&db);
        let n_told = *n_told.lock().unwrap();
        assert!(after.is_superset(&before), "records are lost");
        assert!(after.len() as u64 + BATCH >= n_told, "{} are recorded, {n_told} were told", after.len());
        println!("killed at {} records", after.len());
        before = after;
    }
    let finished = run_json(&arguments);
    assert_eq!(finished["trials"], 200);
    assert_eq!(finished["new_trials"], 200 - before.len());
    let all = recorded(&db);
    assert_eq!(all.len(), 200);
    assert!(all.is_superset(&before));
    // And once more, with nothing left to do.
    let again = run_json(&arguments);
    assert_eq!((&again["new_trials"], &again["best"]), (&0.into(), &finished["best"]));
    assert_eq!(recorded(&db), all);
}

#[test]
fn a_space_goes_on_being_recorded_after_a_kill_and_an_interrupt() {
    let folder = tempfile::tempdir().unwrap();
    let (db, file) = (folder.path().join("records.db"), folder.path().join("space.json"));
    // Enough trials that each run is still in progress when it is stopped.
    let arguments = ["record-space", WORKLOAD, "--max", "500", "--db", text(&db), "-o", text(&file)];
    let mut running = Running::start(&arguments);
    running.wait_for(40);
    let _ = running.child.kill();
    running.end();
    let killed = recorded(&db);
    assert!((24..500).contains(&killed.len()) && !file.exists(), "{}", killed.len());

    let mut running = Running::start(&[&arguments[..], &["--json"]].concat());
    running.wait_for(killed.len() as u64 + 20);
    send("-INT", &running.child);
    let (code, stdout, stderr) = running.end();
    assert_eq!(code, Some(0), "{stderr}");
    let interrupted: serde_json::Value = serde_json::from_str(&stdout).expect("the result is JSON");
    let n = recorded(&db).len();
    assert!(recorded(&db).is_superset(&killed));
    assert_eq!((&interrupted["configurations"], &interrupted["missing"]), (&n.into(), &(500 - n).into()));

    let finished = run_json(&arguments);
    assert_eq!((&finished["configurations"], &finished["new_trials"]), (&500.into(), &(500 - n).into()));
    assert_eq!(recorded(&db).len(), 500);
    let replay = run_json(&["replay", text(&file), "--search", "random", "--budget", "200", "--repeats", "1"]);
    assert_eq!(replay["configurations"], 500);
}

#[test]
fn two_runs_share_a_database() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let runs = ["1", "2", "2"].map(|seed| {
        let arguments = tune(&db, &["--trials", "60", "--seed", seed, "--json"]);
        (arguments.clone(), command(&arguments).spawn().unwrap())
    });
    for (arguments, child) in runs {
        let result = json_of(&arguments, &child.wait_with_output().unwrap());
        assert_eq!((&result["trials"], &result["verified"]), (&60.into(), &true.into()));
    }
    // Each run counts its own trials and those that it found; `recorded` refuses duplicates.
    let n_records = recorded(&db).len();
    assert!((60..=180).contains(&n_records), "{n_records}");
    assert_eq!(run_json(&["best", WORKLOAD, "--db", text(&db)])["best"]["confirmed"], true);
}

#[test]
fn a_run_races_what_another_one_has_recorded_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let mut running = Running::start(&tune(&db, &["--time", LONG]));
    running.wait_for(1);
    // Few are proposed by both runs: the space has many thousands.
    run_json(&tune(&db, &["--trials", "100000", "--time", "1", "--seed", "1"]));
    send("-INT", &running.child);
    let (code, _, stderr) = running.end();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("another process has recorded "), "{stderr}");
}

#[test]
fn a_database_that_is_locked_for_long_loses_no_trial() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let mut running = Running::start(&tune(&db, &["--trials", "400", "--no-race"]));
    // Batches are small from here on: the next one is written immediately. There are enough of them that some
    // are left on the fastest machine when the database is locked.
    running.wait_for(40);
    let other = rusqlite::Connection::open(&db).unwrap();
    other.busy_timeout(PATIENCE).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    // Longer than a process waits for the lock.
    std::thread::sleep(Duration::from_secs(15));
    other.execute_batch("ROLLBACK").unwrap();
    let (code, _, stderr) = running.end();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("locked by another process for 10 s; going on"), "{stderr}");
    assert_eq!(recorded(&db).len(), 400);
}

/// Action that removes a database during a run.
type Taking = fn(&Path);

#[test]
fn a_database_that_is_taken_away_ends_the_run_with_its_winner_told() {
    let delete: Taking = |db| std::fs::remove_file(db).unwrap();
    let rename: Taking = |db| std::fs::rename(db, db.with_extension("moved")).unwrap();
    let replace: Taking = |db| {
        let other = db.with_extension("other");
        run_json(&["import", "/dev/null", "--db", text(&other)]);
        std::fs::rename(other, db).unwrap();
    };
    for taking in [delete, rename, replace] {
        let folder = tempfile::tempdir().unwrap();
        let db = folder.path().join("records.db");
        let mut running = Running::start(&tune(&db, &["--time", LONG, "--json"]));
        running.wait_for(20);
        taking(&db);
        let (code, stdout, stderr) = running.end();
        assert_eq!(code, Some(1), "{stderr}");
        let expected = format!("error: database {}: deleted, moved or replaced while it was in use: ", text(&db));
        assert!(stderr.lines().last().is_some_and(|line| line.starts_with(&expected)), "{stderr}");
        let result: serde_json::Value = serde_json::from_str(&stdout).expect("the result is JSON");
        assert!(result["best"]["gflops"].as_f64().is_some_and(|g| g > 0.0), "{result}");
        assert_eq!(result["recorded"], false);
        // The other file is intact.
        if db.exists() {
            for log in ["-wal", "-shm"] {
                let _ = std::fs::remove_file(format!("{}{log}", text(&db)));
            }
            assert_eq!(recorded(&db).len(), 0);
        }
    }
}

#[test]
fn a_database_that_is_taken_away_ends_the_recording_of_a_space_and_of_a_set() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    for arguments in [
        ["record-space", WORKLOAD, "--max", "100000", "--db", text(&db)],
        ["tune", "bert:m=64,n=64,k=64", "--time", LONG, "--db", text(&db)],
    ] {
        let mut running = Running::start(&arguments);
        running.wait_for(20);
        std::fs::remove_file(&db).unwrap();
        let (code, _, stderr) = running.end();
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.lines().last().is_some_and(|l| l.contains("deleted, moved or replaced")), "{stderr}");
    }
}

#[test]
fn many_runs_make_one_database_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let runs: Vec<Child> = (0..8)
        .map(|seed: u64| {
            let seed = seed.to_string();
            command(&tune(&db, &["--trials", "6", "--no-race", "--json", "--seed", &seed])).spawn().unwrap()
        })
        .collect();
    for run in runs {
        let result = json_of(&["tune"], &run.wait_with_output().unwrap());
        assert_eq!(result["trials"], 6);
    }
    assert!(recorded(&db).len() >= 6);
}

#[test]
fn an_interrupt_keeps_all_and_names_the_winner() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    for (n, signal) in [(5, "-INT"), (30, "-TERM")] {
        let mut running = Running::start(&tune(&db, &["--time", LONG, "--json"]));
        running.wait_for(n);
        let start = Instant::now();
        send(signal, &running.child);
        let (code, stdout, stderr) = running.end();
        assert_eq!(code, Some(0), "{stderr}");
        assert!(start.elapsed() < PROMPT, "it took {:?} to stop", start.elapsed());
        let result: serde_json::Value = serde_json::from_str(&stdout).expect("the result is JSON");
        assert!(result["best"]["gflops"].as_f64().is_some_and(|g| g > 0.0), "{result}");
        assert_eq!(result["trials"], recorded(&db).len());
    }
    assert_eq!(run_json(&["best", WORKLOAD, "--db", text(&db)])["found"], true);
}

/// Under `nohup`, as overnight on another machine, a run outlives its terminal.
#[test]
fn a_hang_up_under_nohup_ends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let mut nohup = Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$0\" \"$@\"", TILEWRIGHT]);
    nohup.args(tune(&db, &["--trials", "40", "--no-race", "--json"]));
    nohup.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = Running::watch(nohup);
    running.wait_for(2);
    send("-HUP", &running.child);
    let (code, stdout, stderr) = running.end();
    assert_eq!(code, Some(0), "{stderr}");
    let result: serde_json::Value = serde_json::from_str(&stdout).expect("the result is JSON");
    assert_eq!((&result["trials"], recorded(&db).len()), (&40.into(), 40), "{stderr}");
}

#[test]
fn an_interrupt_of_the_start_ends_it_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    // The reference takes seconds: 2 · 10¹¹ multiply-adds.
    let workload = "conv2d:c=512,h=128,w=128,k=512,r=7,s=7,pad=3";
    for command_line in [&["tune", workload, "--time", LONG][..], &["record-space", workload, "--max", "50"]] {
        let mut child = command(&[command_line, &["--db", text(&db), "--json"]].concat()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let told: Vec<String> = lines
            .by_ref()
            .take_while(|line| !line.contains("% of the reference answer") && !line.contains(" trials ("))
            .collect();
        send("-INT", &child);
        let start = Instant::now();
        let rest: Vec<String> = lines.collect();
        let output = child.wait_with_output().unwrap();
        // A run without a result has failed, so that no script goes on with it.
        let (code, n_recorded) = if command_line[0] == "tune" { (1, "trials") } else { (0, "configurations") };
        assert_eq!(output.status.code(), Some(code), "{told:?} {rest:?}");
        let is_told =
            rest.last().is_some_and(|line| line == "error: interrupted before a candidate gave a right answer");
        assert_eq!(is_told, code == 1, "{rest:?}");
        assert!(start.elapsed() < PROMPT, "it took {:?} to stop", start.elapsed());
        let result: serde_json::Value = serde_json::from_slice(&output.stdout).expect("the result is JSON");
        assert_eq!(&result[n_recorded], &recorded(&db).len(), "{result}");
    }
}

#[test]
fn a_second_interrupt_ends_it_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let mut running = Running::start(&tune(&db, &["--time", LONG]));
    running.wait_for(3);
    send("-INT", &running.child);
    std::thread::sleep(Duration::from_millis(100));
    let start = Instant::now();
    // Two signals that arrive while it has no core count as one: another one follows.
    while running.child.try_wait().unwrap().is_none() {
        send("-INT", &running.child);
        std::thread::sleep(Duration::from_millis(100));
    }
    let n_told = running.n_told.clone();
    let (code, _, stderr) = running.end();
    assert_eq!(code, Some(130), "{stderr}");
    assert!(start.elapsed() < PROMPT, "it took {:?} to stop", start.elapsed());
    assert!(recorded(&db).len() as u64 >= *n_told.lock().unwrap(), "what was measured is recorded");
}

/// Number of recorded trials of all workloads.
fn n_recorded(db: &Path) -> u64 {
    let output = run(&["export", "--db", text(db)]);
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    lines.lines().count() as u64
}

#[test]
fn workloads_that_are_tuned_together_share_the_time_and_resume() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let arguments = ["tune", "mobilenet", "--together", "--time", "3", "--db", text(&db)];
    let together = || {
        let result = run_json(&arguments);
        let ms = |name: &str| result[name].as_f64();
        let (mut whole_ms, mut shares, mut n_trials) = (0.0, 0.0, 0);
        for task in result["workloads"].as_array().unwrap() {
            let best = run_json(&["best", task["workload"].as_str().unwrap(), "--db", text(&db)]);
            assert_eq!(best["best"]["config"], task["best"]["config"], "{best}");
            assert!(task["best"]["ms_median"].as_f64().unwrap() >= task["ms_bound"].as_f64().unwrap(), "{task}");
            whole_ms += task["best"]["ms_median"].as_f64().unwrap();
            shares += task["share"].as_f64().unwrap();
            n_trials += task["trials"].as_u64().unwrap();
        }
        assert!((ms("whole_ms").unwrap() / whole_ms - 1.0).abs() < 1e-9 && (shares - 1.0).abs() < 1e-9, "{result}");
        assert_eq!(n_trials, n_recorded(&db), "{result}");
        assert_eq!(result["curve"].as_array().unwrap().last().unwrap()[1].as_f64(), ms("whole_ms"), "{result}");
        (result, n_trials)
    };
    let (first, n_first) = together();
    assert_eq!(first["workloads"].as_array().unwrap().len(), 3);
    assert!(first["whole_ms_before"].is_null() && first["workloads"][2]["turns"].as_u64() > Some(0), "{first}");
    let (second, n_second) = together();
    assert!(second["whole_ms_before"].as_f64() > Some(0.0) && n_second >= n_first, "{second}");
    let n_new: u64 = second["workloads"].as_array().unwrap().iter().map(|w| w["new_trials"].as_u64().unwrap()).sum();
    assert_eq!(n_first + n_new, n_second, "nothing is measured again");
}

#[test]
fn an_interrupt_of_workloads_that_are_tuned_together_keeps_all() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let mut running = Running::start(&["tune", "mobilenet", "--together", "--time", LONG, "--json", "--db", text(&db)]);
    running.wait_for(5);
    send("-INT", &running.child);
    let (code, stdout, stderr) = running.end();
    assert_eq!(code, Some(0), "{stderr}");
    let result: serde_json::Value = serde_json::from_str(&stdout).expect("the result is JSON");
    let n_trials: u64 = result["workloads"].as_array().unwrap().iter().map(|w| w["trials"].as_u64().unwrap()).sum();
    assert_eq!((n_trials, &result["interrupted"]), (n_recorded(&db), &true.into()), "{result}");
}
