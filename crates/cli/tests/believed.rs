//! Plausibility of records: implausible ones are rejected wherever the best is looked up, and on import.

mod common;

use std::path::Path;

use common::{check_refused, owned, run, run_json, stderr, text};
use serde_json::{Value as Json, json};

const WORKLOAD: &str = "matmul:m=64,n=64,k=64";
/// Time beyond that of any clock.
const FUTURE: u64 = 1 << 40;

/// Database of trials of a run, with a winner or without.
fn tuned(folder: &Path, name: &str, seed: &str, is_raced: bool) -> String {
    let db = text(&folder.join(name)).to_owned();
    let arguments =
        ["tune", WORKLOAD, "--search", "random", "--no-guesses", "--seed", seed, "--trials", "8", "--db", &db];
    run_json(&[&arguments[..], if is_raced { &[] } else { &["--no-race"] }].concat());
    db
}

fn records(db: &str) -> Vec<Json> {
    let lines = String::from_utf8(run(&["export", "--db", db]).stdout).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Writes records as lines and imports them.
fn import(folder: &Path, records: &[Json], db: &str) -> std::process::Output {
    run(&["import", &lines(folder, records), "--db", db, "--json"])
}

fn lines(folder: &Path, records: &[Json]) -> String {
    let file = folder.join("lines");
    std::fs::write(&file, records.iter().map(|record| format!("{record}\n")).collect::<String>()).unwrap();
    text(&file).to_owned()
}

fn best(db: &str) -> Json {
    run_json(&["best", WORKLOAD, "--db", db])
}

/// Record of this space with some changes.
fn with(record: &Json, changes: &[(&str, Json)]) -> Json {
    let mut changed = record.clone();
    for (pointer, value) in changes {
        *changed.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer} in {record}")) = value.clone();
    }
    changed
}

fn measured(db: &str) -> Json {
    let found = records(db).into_iter().find(|record| record["outcome"]["class"] == "no_error");
    found.expect("one of some trials is right")
}

#[test]
fn what_cannot_be_true_is_not_let_in() {
    let folder = tempfile::tempdir().unwrap();
    let record = measured(&tuned(folder.path(), "a.db", "1", false));
    let fresh = text(&folder.path().join("fresh.db")).to_owned();
    let is_faster = [("/outcome/median_ns", json!(1.0)), ("/outcome/min_ns", json!(1.0))];
    let no_steps = ("/steps", json!(""));
    for (changes, reason) in [
        (&is_faster[..], "line 1: 1 ns is faster than the machine can be, which needs "),
        (&[("/config", json!({})), no_steps.clone()], "line 1: the configuration is not of the space: "),
        (&[("/config/mr", json!(1_000_000)), no_steps.clone()], "line 1: the configuration is not of the space: "),
        (&[("/template", json!("nosuch")), no_steps.clone()], "line 1: there is no template `nosuch` for "),
        (&[("/workload", json!("fft:n=8"))], "line 1: unknown workload `fft:n=8`"),
        (&[("/workload", json!("matmul:m=8"))], "line 1: matmul needs `n`"),
        (&[("/threads", json!(1_000_000))], "line 1: threads 1000000 is more than "),
        (&[("/threads", json!(0))], "line 1: threads is 0"),
        (&[("/target", json!("a\u{0}b"))], "line 1: target holds a control character"),
        (&[("/target", json!(""))], "line 1: target or template is empty"),
        (&[("/seconds/build", json!(-1.0))], "line 1: build -1 is no number of seconds"),
        (&[("/run/elapsed_s", json!(1e300))], "line 1: elapsed_s 1"),
    ] {
        let file = lines(folder.path(), &[with(&record, changes)]);
        check_refused(&["import", &file, "--db", &fresh], reason);
    }
    assert!(!Path::new(&fresh).exists(), "nothing was imported");
}

#[test]
fn lines_that_fit_come_in_beside_others_in_the_words_of_this_version() {
    let folder = tempfile::tempdir().unwrap();
    let db = tuned(folder.path(), "a.db", "1", true);
    let all = records(&db);
    // The winner's record: the race of another space that it then describes must not hide the winner of this
    // one.
    let record = all.iter().find(|record| record["winner"].is_object()).expect("it was raced");
    let fresh = text(&folder.path().join("fresh.db")).to_owned();
    let texts = ["matmul:k=64,n=64,m=64", "matmul:m=64,n=64,k=64,dtype=f32,exact=0", "matmul-256:m=64,n=64,k=64"];
    let renamed = all.iter().enumerate().map(|(at, r)| with(r, &[("/workload", json!(texts[at % texts.len()]))]));
    let mut lines: Vec<Json> = renamed.collect();
    // Records of another machine, of a later version, and of an earlier version of the space, whose steps
    // still make a program.
    lines.push(with(record, &[("/target", json!("x86_64/another/512")), ("/template", json!("another"))]));
    lines.push(with(record, &[("/workload", json!("fft:n=8")), ("/version", json!("99.0.0"))]));
    lines.push(with(record, &[("/config", json!({"old": 1}))]));
    let n_good = lines.len();
    lines.insert(1, with(record, &[("/workload", json!("fft:n=8"))]));
    lines.push(with(record, &[("/outcome/median_ns", json!(1e-9))]));
    let output = import(folder.path(), &lines, &fresh);
    let imported = common::json_of(&["import"], &output);
    assert_eq!(
        (&imported["read"], &imported["new"], &imported["left_out"]),
        (&lines.len().into(), &n_good.into(), &2.into())
    );
    let told = stderr(&output);
    assert!(told.contains("line 2: unknown workload `fft:n=8`: left out"), "{told}");
    assert!(told.contains(&format!("line {}: 0.000000001 ns is faster than", lines.len())), "{told}");
    // Races held elsewhere are marked as such, and a record of an earlier version of the space is not shown.
    let (found, original) = (best(&fresh), best(&db));
    assert_eq!((&found["best"]["config"], &found["best"]["confirmed"]), (&original["best"]["config"], &true.into()));
    assert_eq!((&found["imported"], &original["imported"]), (&true.into(), &false.into()));
    let exported = records(&fresh);
    assert_eq!(exported.len(), n_good);
    assert_eq!(exported.iter().filter(|record| record["workload"] == WORKLOAD).count(), n_good - 1);
}

/// Fills a database with records that an older version would have imported: trials of a nanosecond, and such
/// a winner.
fn poison(db: &str) {
    let database = rusqlite::Connection::open(db).unwrap();
    let fastest = "(SELECT id FROM trials WHERE median_ns IS NOT NULL ORDER BY median_ns LIMIT 1)";
    database
        .execute_batch(&format!(
            "UPDATE trials SET median_ns = 1, unix_time = {FUTURE} WHERE id = {fastest};
             INSERT INTO trials SELECT NULL, task, '{{}}', class, message, 2, min_ns, spread, n_samples, stopped_early,
                build_s, run_s, verify_s, steps, search, seed, trial, version, toolchain, unix_time, NULL, NULL, NULL,
                NULL, NULL, NULL, NULL, NULL, NULL
                FROM trials WHERE id = {fastest};
             INSERT INTO trials SELECT NULL, task, '{{\"mr\":4}}', class, message, 1e6, min_ns, spread, n_samples,
                stopped_early, build_s, run_s, verify_s, steps, search, seed, trial, version, toolchain, unix_time, NULL,
                NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM trials WHERE id = {fastest};
             INSERT OR REPLACE INTO winners SELECT task, config, 1, 0.5, NULL, 1e12, 1, version, toolchain, {FUTURE}, NULL,
                NULL, NULL FROM trials WHERE id = {fastest};"
        ))
        .unwrap();
}

#[test]
fn what_cannot_be_true_is_passed_over_and_measured_again() {
    let folder = tempfile::tempdir().unwrap();
    let db = tuned(folder.path(), "a.db", "1", false);
    let n_valid = records(&db).iter().filter(|record| record["outcome"]["class"] == "no_error").count();
    let before = best(&db)["best"].clone();
    poison(&db);
    let found = best(&db);
    assert!(found["best"]["gflops"].as_f64().is_none_or(|g| g <= before["gflops"].as_f64().unwrap()), "{found}");
    assert_eq!(found["passed_over"]["too_fast"], 3, "{found}");
    let file = text(&folder.path().join("report.html")).to_owned();
    let output = run(&["report", "--db", &db, "-o", &file, "--json"]);
    let report = common::json_of(&["report"], &output);
    let passed_over = json!({"other_space": 1, "too_fast": 2, "unreadable": 0});
    assert_eq!((&report["workloads"][0]["passed_over"], n_valid > 1), (&passed_over, true));
    assert!(stderr(&output).contains("passed over: 1 not of the space as it is now, 2 faster than the machine can be"));
    let near = |g: &Json| g.as_f64().is_some_and(|g| g < 1000.0);
    assert!(near(&report["workloads"][0]["best"]["gflops"]), "{report}");
    assert!(near(&report["workloads"][0]["searches"][0]["best_gflops"]["median"]), "{report}");

    // Without a race, and with one; false times are replaced by true ones.
    let tune = ["tune", WORKLOAD, "--search", "random", "--no-guesses", "--seed", "1", "--trials", "8", "--db", &db];
    let unraced = run(&[&tune[..], &["--no-race", "--json"]].concat());
    assert!(stderr(&unraced).contains("3 records are passed over: 1 not of the space as it is now, 2 faster"));
    let result = common::json_of(&tune, &unraced);
    assert_eq!((&result["trials"], &result["new_trials"]), (&8.into(), &1.into()), "{result}");
    assert!(near(&result["best"]["gflops"]), "{result}");
    let raced = run_json(&tune);
    assert!(near(&raced["best"]["gflops"]), "{raced}");
    assert_eq!(best(&db)["best"]["config"], raced["best"]["config"], "the winner takes the place of the false one");
    assert_eq!(best(&db)["best"]["confirmed"], true);
    let again = run_json(&tune);
    assert_eq!((&again["new_trials"], &again["best"]), (&0.into(), &raced["best"]));
}

#[test]
fn where_nothing_can_be_true_nothing_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let db = tuned(folder.path(), "a.db", "1", false);
    poison(&db);
    let database = rusqlite::Connection::open(&db).unwrap();
    database.execute_batch("UPDATE trials SET median_ns = 3 WHERE median_ns IS NOT NULL").unwrap();
    let found = best(&db);
    assert_eq!((&found["found"], &found["best"]), (&false.into(), &Json::Null));
    check_refused(&["show", WORKLOAD, "--best", "--db", &db], "that can be shown: ");
    check_refused(&["report", "--db", &db, "--json"].map(str::to_owned), "nothing is recorded");
    let bench = run(&["bench", WORKLOAD, "--against", "none", "--db", &db]);
    assert!(bench.status.code() == Some(1) && stderr(&bench).contains("faster than the machine can be"));
    let transfer =
        owned(&["tune", "matmul:m=32,n=64,k=64", "--transfer", &db, "--trials", "2", "--no-race", "--db", &db]);
    let output = run(&transfer.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(stderr(&output).contains("faster than the machine can be"), "{}", stderr(&output));
}

#[test]
fn a_race_that_was_run_here_counts_for_more_than_what_came_in() {
    let folder = tempfile::tempdir().unwrap();
    let (here, there) = (tuned(folder.path(), "a.db", "1", true), tuned(folder.path(), "b.db", "2", true));
    let before = best(&here)["best"].clone();
    // Two thirds of the time, which is plausible, and years ahead.
    let faster = |record: &Json| {
        let mut record = with(record, &[("/unix_time", json!(FUTURE))]);
        for pointer in ["/outcome/median_ns", "/winner/median_ns"] {
            if let Some(ns) = record.pointer_mut(pointer).filter(|ns| ns.is_number()) {
                *ns = json!(ns.as_f64().unwrap() / 1.5);
            }
        }
        if let Some(time) = record.pointer_mut("/winner/unix_time") {
            *time = json!(FUTURE);
        }
        record
    };
    let theirs: Vec<Json> = records(&there).iter().map(faster).collect();
    assert!(import(folder.path(), &theirs, &here).status.success());
    assert_eq!(best(&here)["best"], before);
    // Without other records it is shown, marked with its time, and raced before it is trusted.
    let fresh = text(&folder.path().join("fresh.db")).to_owned();
    assert!(import(folder.path(), &theirs, &fresh).status.success());
    let imported = best(&fresh);
    assert_eq!((&imported["imported"], &imported["best"]["confirmed"]), (&true.into(), &true.into()));
    let n = theirs.len().to_string();
    let raced = run_json(&["tune", WORKLOAD, "--search", "random", "--trials", &n, "--db", &fresh]);
    assert_eq!((&raced["new_trials"], &best(&fresh)["imported"]), (&0.into(), &false.into()));
    assert_eq!(best(&fresh)["best"], raced["best"]);
    assert!(import(folder.path(), &theirs, &fresh).status.success());
    assert_eq!(best(&fresh)["best"], raced["best"], "what was raced here stays");
}

#[test]
fn rows_that_no_version_writes_cost_themselves() {
    let folder = tempfile::tempdir().unwrap();
    let db = tuned(folder.path(), "a.db", "1", true);
    let n = records(&db).len();
    let database = rusqlite::Connection::open(&db).unwrap();
    let winner = best(&db)["best"].clone();
    for (statement, left_out) in [
        ("UPDATE trials SET class = 'of_a_later_version' WHERE id = 1", 1),
        ("UPDATE trials SET median_ns = -5, class = 'no_error' WHERE id = 2", 2),
        ("UPDATE trials SET median_ns = 9e999, class = 'no_error' WHERE id = 3", 3),
        ("UPDATE trials SET config = 'no JSON' WHERE id = 4", 4),
        ("UPDATE trials SET n_samples = -1, median_ns = 1e5, class = 'no_error' WHERE id = 5", 5),
        ("UPDATE trials SET build_s = 9e999 WHERE id = 6", 6),
        ("UPDATE trials SET run_elapsed_s = 9e999 WHERE id = 7", 7),
        ("UPDATE winners SET margin = 9e999", 7),
        ("UPDATE winners SET margin = 0, gflops = -1", 7),
        ("UPDATE winners SET gflops = 1, median_ns = -1", 7),
    ] {
        database.execute_batch(statement).unwrap();
        let output = run(&["export", "--db", &db]);
        assert_eq!(String::from_utf8(output.stdout.clone()).unwrap().lines().count(), n - left_out, "{statement}");
        let fresh = format!("{db}.{left_out}");
        let imported = import(folder.path(), &records(&db), &fresh);
        assert!(imported.status.success(), "{statement}: {}", stderr(&imported));
        assert!(stderr(&output).contains("that this version does not understand left out"), "{}", stderr(&output));
        let found = best(&db);
        assert!(found["best"]["gflops"].as_f64().is_none_or(|g| g > 0.0 && g < 1000.0), "{statement}: {found}");
    }
    assert_ne!(best(&db)["best"]["confirmed"], winner["confirmed"]);
    let arguments = ["tune", WORKLOAD, "--search", "random", "--seed", "3", "--trials", "8", "--db", &db];
    assert_eq!(run_json(&arguments)["trials"], 8);
    assert!(run(&["report", "--db", &db, "--json"]).status.success());
}
