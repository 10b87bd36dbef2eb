//! Files of other tuners: every command that takes them detects their format, and the guides work as written.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{TILEWRIGHT, check_refused, run_json, text};
use serde_json::{Value as Json, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn foreign(name: &str) -> String {
    text(&root().join("tests/corpus/foreign").join(name)).to_owned()
}

/// AutoTVM log of dense products with these numbers of rows, twelve configurations each.
fn log_of(rows: &[u64]) -> String {
    let mut log = String::new();
    for &m in rows {
        for at in 0..12u64 {
            let (y, x) = (1 << (at % 4), 1 << (at / 4 + 3));
            // The best tile of rows grows with their number.
            let cost = 1e-4 * (1.0 + (m as f64 / 8.0 / y as f64).ln().abs() + 1.0 / x as f64);
            let (cost, error) = if y * x > 200 { (1e9, 4) } else { (cost, 0) };
            let line = json!({
                "input": ["llvm -mcpu=znver4", "dense_pack.x86",
                    [["TENSOR", [m, 768], "float32"], ["TENSOR", [3072, 768], "float32"], null, "float32"], {}],
                "config": {"index": at, "code_hash": null, "entity": [
                    ["tile_y", "sp", [-1, y]], ["tile_x", "sp", [-1, x]], ["auto_unroll", "ot", 16]]},
                "result": [[cost, cost * 1.01], error, 1.5, 1764000000.0], "version": 0.2, "tvm_version": "0.19.0",
            });
            log += &format!("{line}\n");
        }
    }
    log
}

#[test]
fn every_file_is_taken_for_what_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let [db, out, again] = ["r.db", "out", "again"].map(|name| text(&folder.path().join(name)).to_owned());
    let listed = run_json(&["formats"]);
    let names: Vec<&str> =
        listed["formats"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"autotvm") && names.contains(&"t4"), "{names:?}");
    for (name, format) in [
        ("ansor.json", "ansor"),
        ("autotvm.log", "autotvm"),
        ("clblast_xgemm_32.json", "clblast"),
        ("database_tuning_record.json", "metaschedule"),
        ("kernel_tuner_cache.json", "kernel-tuner"),
        ("ktt-output.json", "ktt"),
        ("t4-plain.json", "t4"),
        ("triton.autotune.json", "triton"),
    ] {
        let file = foreign(name);
        let replay = run_json(&["replay", &file, "--search", "random", "--budget", "1", "--repeats", "1"]);
        assert_eq!(replay["format"], format, "{name}");
        let imported = run_json(&["import", &file, "--db", &db]);
        assert_eq!((&imported["format"], imported["new"].as_u64() > Some(0)), (&format.into(), true), "{name}");
        assert_eq!(run_json(&["import", &file, "--db", &db])["new"], 0, "{name}");
    }
    let log = text(&folder.path().join("dense.log")).to_owned();
    fs::write(&log, log_of(&[8, 16, 32, 64])).unwrap();
    let replay = ["replay", &log, "--task", "2", "--search", "random", "--budget", "1", "--repeats", "5"];
    let transferred = run_json(&[&replay[..], &["--transfer", &log]].concat());
    assert_eq!(
        (&transferred["task"], transferred["transferred"].as_u64() > Some(0)),
        (&run_json(&replay)["task"], true)
    );
    let fraction = |json: &Json| json["budgets"][0]["mean_fraction_of_optimum"].as_f64().unwrap();
    assert!(fraction(&transferred) >= 0.5, "{transferred}");
    // Nothing is lost on the way through the database.
    let exported = run_json(&["export", &out, "--as", "autotvm", "--db", &db]);
    assert_eq!((&exported["tasks"], &exported["format"]), (&8.into(), &"autotvm".into()));
    let lines = fs::read_to_string(&out).unwrap().lines().count();
    assert_eq!(exported["records"], lines);
    run_json(&["export", &again, "--db", &db]);
    let copy = text(&folder.path().join("copy.db")).to_owned();
    assert_eq!(run_json(&["import", &again, "--db", &copy])["new"], lines);
    let cache = run_json(&["export", &out, "--as", "kernel-tuner", "--db", &copy, "--task", "scale,problem_size"]);
    assert_eq!(cache["records"], 2);
    let cache: Json = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    assert_eq!((&cache["device_name"], &cache["problem_size"]), (&"cpu".into(), &4096.into()));
    assert_eq!(cache["cache"]["32,2"]["__error__"], "RuntimeFailedConfig");
}

#[test]
fn the_space_of_a_description_is_shown() {
    let space = run_json(&["space", &foreign("t1.json")]);
    assert_eq!((&space["size"], &space["constraints"][0]["text"]), (&20.into(), &"block_size_x*tile <= 256".into()));
    check_refused(&["space", &foreign("t4.json")], "no parameters, so this is no T1 file");
}

#[test]
fn what_does_not_fit_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| text(&folder.path().join(name)).to_owned();
    let (db, out, two) = (path("r.db"), path("out"), path("two.log"));
    fs::write(&two, log_of(&[8, 16])).unwrap();
    fs::write(path("odd.json"), "{\"odd\": 1}").unwrap();
    let database = path("records.db");
    run_json(&["import", &foreign("kt-1.4.json"), "--db", &database]);
    let replay = |file: &str| ["replay", file, "--search", "random", "--budget", "5"].map(str::to_owned).to_vec();
    let table = text(&root().join("tests/corpus/miopen/ConvAsm1x1U.fp32.csv")).to_owned();
    for (arguments, expected) in [
        (replay(&two), "results of 2 tasks: dense_pack.x86,args="),
        ([replay(&two), vec!["--task".into(), "conv".into()]].concat(), "no task \"conv\"; there are dense_pack"),
        (replay(&path("odd.json")), "JSON of an unknown kind; there are kernel-tuner, "),
        (replay(&table), "no JSON (tables and specifications of kernels are for `predict`)"),
        (replay(&database), "a database (give the JSON lines that `export` writes of it)"),
        (replay(&foreign("t1.json")), "a T1 description, which has no results (give results"),
        (replay(&foreign("database_workload.json")), "without times (give tuning records)"),
        (replay(&foreign("kt-all-failed.json")), "none of its 24 configurations was measured successfully"),
    ] {
        check_refused(&arguments, expected);
    }
    check_refused(
        &["replay", &two, "--format", "odd", "--search", "random", "--budget", "5"],
        "there are kernel-tuner",
    );
    check_refused(&["import", &database, "--db", &db], "it is a database (give the JSON lines that `export` writes");
    check_refused(&["import", &foreign("t1.json"), "--db", &db], "has no results");
    check_refused(&["import", &foreign("database_workload.json"), "--db", &db], "there are no rows (rows left out: 1");
    let workload = foreign("database_workload.json");
    check_refused(&["export", &out, "--as", "t4", "--from", &workload], "there are no rows (rows left out: 1 of 1");
    check_refused(&["export", &out, "--as", "ktt", "--from", &two], "ktt is not written; there are kernel-tuner, t4");
    check_refused(&["export", &out, "--as", "t4", "--from", &two], "(choose one with --task)");
    check_refused(&["export", &out, "--format", "t4", "--db", &db], "--format says what a file --from is");
    check_refused(&["predict", "train", &table, "-o", &out], "give the specification of its kernel with --spec");
    check_refused(&["predict", "train", &foreign("t1.json"), "-o", &out], "has no results");
    assert!(!Path::new(&out).exists());
}

/// Runs the commands of a page as written, in a folder with these files.
fn run_page(name: &str, files: &[(&str, Vec<u8>)], n_commands: usize) {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    let page = fs::read_to_string(root().join("docs/guide").join(name)).unwrap();
    let commands: Vec<&str> = page.lines().filter(|line| line.starts_with("tilewright ")).collect();
    assert_eq!(commands.len(), n_commands, "{commands:?}");
    let ours = Path::new(TILEWRIGHT).parent().unwrap().display();
    let search = format!("{ours}:{}", std::env::var("PATH").unwrap_or_default());
    for command in commands {
        let run = Command::new("sh").args(["-c", command]).env("PATH", &search).current_dir(folder.path()).output();
        let run = run.unwrap();
        assert!(run.status.success(), "{command}: {}", String::from_utf8_lossy(&run.stderr));
    }
}

#[test]
fn the_guide_from_kernel_tuner_works() {
    let file = |name: &str| fs::read(foreign(name)).unwrap();
    run_page(
        "from-kernel-tuner.md",
        &[("cache.json", file("kt-closed.json")), ("description.json", file("t1-range.json"))],
        9,
    );
}

#[test]
fn the_guide_from_autotvm_works() {
    let many: Vec<u64> = (1..33).map(|at| 4 * at).collect();
    let files = [("autotvm.log", log_of(&[64])), ("autotvm-dense.log", log_of(&many))];
    run_page("from-autotvm.md", &files.map(|(name, log)| (name, log.into_bytes())), 10);
}
