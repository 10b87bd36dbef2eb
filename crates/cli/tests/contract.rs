//! Command line interface that scripts rely on: JSON shapes, exit codes, one line for each error.

mod common;
#[path = "contract/shape.rs"]
mod shape;

use common::{check_refused, command, json_of, owned, run, run_json, stderr, text};
use serde_json::Value as Json;
use shape::check_shape;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

/// With `--json`, standard output is one document: contents cannot go there as well.
#[test]
fn json_has_standard_output_for_itself() {
    assert!(run_json(&["runner"])["source"].as_str().unwrap().starts_with("/* tw-run"));
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    for arguments in [
        &["show", "matmul-256", "--emit", "asm", "-o", "-"][..],
        &["report", "-o", "-"],
        &["record-space", "matmul-256", "--max", "1", "-o", "-"],
        &["network", "dqn", "-o", "-"],
        &["race", "true", "true", "--picture", "-"],
    ] {
        let of_records = ["--db", text(&db)];
        let more = if ["report", "record-space"].contains(&arguments[0]) { &of_records[..] } else { &[] };
        check_refused(&[arguments, more, &["--json"]].concat(), "--json and - both take standard output (give another");
    }
}

#[test]
fn spaces_have_the_sizes_of_the_paper() {
    for (workload, size) in [("matmul-512", 484_000), ("matmul-1024", 899_756), ("matmul-2048", 1_589_952)] {
        let space = run_json(&["space", workload, "--template", "gemm-4-2-4"]);
        check_shape("space", &space);
        assert_eq!(space["size"], size, "{workload}");
        assert_eq!(
            space["parameters"][0],
            serde_json::json!({
                "name": "m", "kind": "factorization", "n": space["parameters"][0]["n"], "parts": 4
            })
        );
    }
    let space = run_json(&["space", "matmul-256"]);
    assert_eq!(space["workload"], "matmul:m=256,n=256,k=256");
    check_shape("space", &space);
}

#[test]
fn tune_best_show_and_bench_go_together() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let workload = "matmul:m=64,n=64,k=64";

    let before = run_json(&["best", workload, "--db", text(&db)]);
    assert_eq!((&before["found"], &before["best"]), (&false.into(), &Json::Null));
    check_shape("best", &before);
    let unmeasured = run(&["bench", workload, "--db", text(&db)]);
    assert_eq!(unmeasured.status.code(), Some(1));
    let advice = format!("tilewright tune {workload} --db {}", text(&db));
    assert!(stderr(&unmeasured).contains(&advice), "{}", stderr(&unmeasured));

    let arguments = ["tune", workload, "--db", text(&db), "--trials", "20", "--search", "random", "--seed", "5"];
    let tuned = run_json(&arguments);
    check_shape("tune", &tuned);
    check_wall_seconds(&tuned["wall_seconds"]);
    assert_eq!((&tuned["workload"], &tuned["trials"]), (&workload.into(), &20.into()));
    assert_eq!((&tuned["verified"], &tuned["threads"]), (&true.into(), &1.into()));
    assert!(tuned["best"]["gflops"].as_f64().unwrap() > 0.0);
    assert_eq!(common::recorded(&db).len(), 20);

    // Nothing is left to do: the same winner is reported again.
    let again = run_json(&arguments);
    assert_eq!((&again["trials"], &again["new_trials"]), (&20.into(), &0.into()));
    assert_eq!(again["best"], tuned["best"]);

    let best = run_json(&["best", workload, "--db", text(&db)]);
    check_shape("best", &best);
    assert_eq!(best["found"], true);
    for key in ["config", "ms_median", "margin"] {
        assert_eq!(best["best"][key], tuned["best"][key], "{key}");
    }

    let config = best["best"]["config"].to_string();
    let by_best = run(&["show", workload, "--best", "--db", text(&db)]);
    let by_config = run(&["show", workload, "--config", &config]);
    assert!(by_best.status.success() && !by_best.stdout.is_empty(), "{}", stderr(&by_best));
    assert_eq!(by_best.stdout, by_config.stdout);

    let bench = run_json(&["bench", workload, "--db", text(&db), "--against", "gemm,matrixmultiply", "--rounds", "3"]);
    check_shape("bench", &bench);
    let rows = bench["rows"].as_array().unwrap();
    let mut names: Vec<&str> = rows.iter().map(|row| row["impl"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["gemm", "matrixmultiply", "tilewright"]);
    for row in rows {
        assert!(row["gflops_best"].as_f64() >= row["gflops_median"].as_f64(), "{row}");
        assert_eq!(row["impl"] == "tilewright", row["ratio_to_ours"] == 1.0, "{row}");
        if row["impl"] == "gemm" {
            let product = row["ratio_to_ours"].as_f64().unwrap() * bench["geomean"]["gemm"].as_f64().unwrap();
            assert!((product - 1.0).abs() < 1e-9, "the geometric mean is of ours to theirs");
        }
    }
}

/// Asserts that the parts of a run's time add up to the total.
#[track_caller]
fn check_wall_seconds(wall: &Json) {
    let seconds = |part: &str| wall[part].as_f64().unwrap_or_else(|| panic!("no seconds of {part}: {wall}"));
    let parts = ["start", "search", "race", "untuned", "end"].map(seconds);
    assert!(parts.iter().all(|seconds| *seconds >= 0.0) && parts[0] > 0.0, "{wall}");
    assert!((parts.iter().sum::<f64>() - seconds("total")).abs() < 1e-6, "{wall}");
    assert_eq!(wall.as_object().unwrap().len(), parts.len() + 1, "{wall}");
}

#[test]
fn the_shortest_search_has_a_result_and_says_beforehand_what_takes_longer() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let arguments = ["tune", "matmul:m=64,n=64,k=64", "--db", text(&db), "--time", "0.001", "--json"];
    let output = run(&arguments);
    let (result, told) = (json_of(&arguments, &output), stderr(&output));
    // The template's first guess is measured, or another one if it fails on a busy machine.
    let n_trials = result["new_trials"].as_u64().unwrap();
    assert!((1..=4).contains(&n_trials) && result["trials"] == n_trials, "{told}");
    assert!(result["best"]["gflops"].as_f64().is_some_and(|gflops| gflops > 0.0), "{result}");
    check_wall_seconds(&result["wall_seconds"]);
    // As promised below; work in progress must also finish in time on a busy machine.
    let seconds = |part: &str| result["wall_seconds"][part].as_f64().unwrap();
    assert!(seconds("race") < 1.0 + 5.0 && seconds("untuned") < 0.1 + 2.0, "{result}");
    let at = |words: &str| told.find(words).unwrap_or_else(|| panic!("{words:?} is not among: {told}"));
    assert!(at("start: about ") < at("search: 0.001 s") && at("search: ") < at("race: at most 1 s"), "{told}");
    assert!(at("race: at most ") < at("untuned kernel: at most "), "{told}");
    assert!(at("untuned kernel: at most ") < at("1 trial ("), "{told}");

    // A valid trial is known now: no work begins after the limit, before which a millisecond would be enough
    // to begin.
    let again = run_json(&["tune", "matmul:m=64,n=64,k=64", "--db", text(&db), "--time", "0.000001"]);
    assert_eq!((&again["trials"], &again["new_trials"]), (&n_trials.into(), &0.into()));
    // Without a guess there may be no result, which is a failure with advice.
    let fresh = folder.path().join("fresh.db");
    let output = run(&["tune", "matmul:m=64,n=64,k=64", "--db", text(&fresh), "--time", "0.000001", "--no-guesses"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).ends_with("(give more with --time)\n"), "{}", stderr(&output));
}

#[test]
fn show_has_all_forms() {
    let forms = [
        ("steps", ""),
        ("ir", "program \"matmul:m=8,n=8,k=8\""),
        ("lowered", "program \"matmul:m=8,n=8,k=8\""),
        ("llvm", "define"),
        ("asm", "tilewright_run"),
    ];
    for (emit, expected) in forms {
        let shown = run(&["show", "matmul:m=8,n=8,k=8", "--emit", emit]);
        assert!(shown.status.success(), "{emit}: {}", stderr(&shown));
        assert!(String::from_utf8_lossy(&shown.stdout).contains(expected), "{emit}");
    }
    let folder = tempfile::tempdir().unwrap();
    for target in ["host", "x86-64", "x86-64-v3", "x86-64-v4", "aarch64", "cortex-a53"] {
        let object = folder.path().join(target);
        let arguments = ["show", "matmul:m=64,n=64,k=64", "--emit", "object", "--target", target, "-o", text(&object)];
        let [untuned, guess] = [&[][..], &["--guess"]].map(|more| {
            let shown = run_json(&[&arguments[..], more].concat());
            let bytes = std::fs::read(&object).unwrap();
            assert_eq!((shown["bytes"].as_u64(), &bytes[..4]), (Some(bytes.len() as u64), &b"\x7fELF"[..]), "{target}");
            check_shape("show", &shown);
            (shown["config"].clone(), bytes)
        });
        assert!(untuned.0.is_null() && guess.0.is_object() && guess.1 != untuned.1, "{target}: {}", guess.0);
    }
}

#[test]
fn doctor_and_lists_have_their_shapes() {
    let doctor = run_json(&["doctor"]);
    check_shape("doctor", &doctor);
    assert!(doctor["peers"]["gemm"].is_string() && doctor["devices"].is_array());
    for list in ["searches", "formats", "experiment"] {
        check_shape(list, &run_json(&[list]));
    }
}

#[test]
fn sets_commands_and_models_have_their_shapes() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (db, model) = (path("records.db"), path("dqn.onnx"));
    check_shape("tune-set", &run_json(&["tune", "mobilenet", "--trials", "1", "--no-race", "--db", &db]));
    check_shape("tune-together", &run_json(&["tune", "mobilenet", "--together", "--time", "0.5", "--db", &db]));
    let command = ["tune", "--command", "echo m={x}", "-p", "x=1..3", "--metric", "m=([0-9]+)", "--db", &db];
    check_shape("tune-command", &run_json(&command));
    let several = ["tune", "--command", "echo m={x} n={x} ", "-p", "x=1..3", "--metric", "m=m=([0-9]+)"];
    let several = [&several[..], &["--metric", "n=n=([0-9]+)", "--maximize=n", "--db", &db]].concat();
    let tuned = run_json(&several);
    check_shape("tune-pareto", &tuned);
    check_shape("best-pareto", &run_json(&["best", tuned["workload"].as_str().unwrap(), "--db", &db]));
    check_shape("race", &run_json(&["race", "--shell", "echo 1", "echo 2", "--metric", "(.*)"]));
    check_shape("network", &run_json(&["network", "dqn", "-o", &model]));
    check_shape("check", &run_json(&["check", &model]));
    check_shape("check", &run_json(&["check", &model, "--trace"]));
    check_shape("run", &run_json(&["run", &model, "--runs", "2", "-o", &path("outputs"), "--db", &db]));
    check_shape("compile", &run_json(&["compile", &model, "--as", "c", "-o", &path("library"), "--db", &db]));
}

#[test]
fn replay_says_how_near_to_the_optimum_a_search_comes() {
    let recorded = concat!(env!("CARGO_MANIFEST_DIR"), "/../formats/tests/data/recorded/pnpoly-RTX_2080_Ti.json.gz");
    let arguments = ["replay", recorded, "--search", "genetic:population=10", "--budget", "25,100", "--repeats", "5"];
    let replay = run_json(&arguments);
    check_shape("replay", &replay);
    assert_eq!((&replay["space"], &replay["repeats"]), (&"pnpoly-RTX_2080_Ti".into(), &5.into()));
    for (at, budget) in replay["budgets"].as_array().unwrap().iter().zip([25, 100]) {
        assert_eq!(at["budget"], budget);
        assert!((0.5..=1.0).contains(&at["mean_fraction_of_optimum"].as_f64().unwrap()));
    }
    let threads = [&arguments[..], &["--threads", "2"]].concat();
    assert_eq!(run_json(&threads)["budgets"], replay["budgets"]);

    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.json");
    std::fs::write(&bad, "{\"results\": [}").unwrap();
    for (file, search, reason) in [
        (text(&bad), "random", "bad.json: line 1, column 14: expected a value, found '}'"),
        (text(folder.path()), "random", "it is a folder"),
        ("none.json", "random", "cannot read none.json"),
        (recorded, "luck", "unknown search luck"),
    ] {
        let refused = run(&["replay", file, "--search", search, "--budget", "5"]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains(reason) && stderr(&refused).lines().count() == 1, "{}", stderr(&refused));
    }
}

#[test]
fn what_is_odd_about_a_recorded_space_is_told() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/corpus/foreign/kt-open-half-line.json");
    let arguments = ["replay", file, "--search", "random", "--budget", "5", "--repeats", "2", "--json"];
    let output = run(&arguments);
    let told = stderr(&output);
    assert!(told.lines().count() == 1 && told.contains("kt-open-half-line.json: the file is not closed"), "{told}");
    let replay = json_of(&arguments, &output);
    assert_eq!((&replay["configurations"], replay["notes"].as_array().map(Vec::len)), (&15.into(), Some(1)));
}

#[test]
fn records_go_out_and_in() {
    let folder = tempfile::tempdir().unwrap();
    let (db, copy, file) =
        (folder.path().join("a.db"), folder.path().join("b.db"), folder.path().join("records.jsonl"));
    run_json(&["tune", "matmul:m=8,n=8,k=8", "--db", text(&db), "--trials", "5", "--search", "random"]);
    assert!(!folder.path().join("a.db-wal").exists(), "the file alone holds all records");
    let exported = run_json(&["export", text(&file), "--db", text(&db)]);
    check_shape("export", &exported);
    assert_eq!(exported["records"], 5);
    let imported = run_json(&["import", text(&file), "--db", text(&copy)]);
    check_shape("import", &imported);
    assert_eq!((&imported["read"], &imported["new"]), (&5.into(), &5.into()));
    assert_eq!(run_json(&["import", text(&file), "--db", text(&copy)])["new"], 0);
    for to_stdout in [&["export", "--db", text(&copy)][..], &["export", "-", "--db", text(&copy)]] {
        assert_eq!(run(to_stdout).stdout, std::fs::read(&file).unwrap());
    }
    let best = |db: &Path| run_json(&["best", "matmul:m=8,n=8,k=8", "--db", text(db)])["best"].clone();
    let original = best(&db);
    let is_imported = |best: &Json, is: bool| best["confirmed"] == true && best["imported"] == is;
    assert!(is_imported(&original, false) && is_imported(&best(&copy), true), "{original}");
    assert_eq!((&best(&copy)["config"], &best(&copy)["margin"]), (&original["config"], &original["margin"]));

    // From standard input; with one malformed line, nothing is imported.
    let mut lines = std::fs::read(&file).unwrap();
    lines.extend(b"{\"workload\": 3}\n");
    let fresh = folder.path().join("c.db");
    let mut child = command(&["import", "--db", text(&fresh)]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&lines).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("line 6"), "{}", stderr(&output));
    assert_eq!(common::recorded(&fresh).len(), 0);

    // The database to read is given as the file to write: it is not overwritten.
    let refused = run(&["export", text(&copy), "--db", text(&db)]);
    assert_eq!((refused.status.code(), stderr(&refused).lines().count()), (Some(2), 1), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("would be written over"), "{}", stderr(&refused));
    assert_eq!(common::recorded(&copy).len(), 5);
}

#[cfg(unix)]
#[test]
fn names_of_files_need_not_be_text() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join(std::ffi::OsStr::from_bytes(b"a\xff.db"));
    let arguments = ["tune", "matmul:m=8,n=8,k=8", "--trials", "2", "--no-race", "--json", "--db"];
    let tuned = command(&arguments).arg(&db).output().unwrap();
    assert!(tuned.status.success(), "{}", stderr(&tuned));
    let best = command(&["best", "matmul:m=8,n=8,k=8", "--json", "--db"]).arg(&db).output().unwrap();
    assert_eq!(serde_json::from_slice::<Json>(&best.stdout).unwrap()["found"], true, "{}", stderr(&best));
}

#[test]
fn a_recorded_space_can_be_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let (db, file) = (folder.path().join("records.db"), folder.path().join("space.json.gz"));
    // A prime leaves few ways to tile: 4 of m, 2 of k, 4 of n.
    let task = ["record-space", "matmul:m=7,n=5,k=3", "--template", "gemm-4-2-4", "--db", text(&db)];
    let arguments = [&task[..], &["-o", text(&file)]].concat();
    let recorded = run_json(&arguments);
    check_shape("record-space", &recorded);
    assert_eq!(
        (&recorded["size"], &recorded["configurations"], &recorded["missing"]),
        (&32.into(), &32.into(), &0.into())
    );
    assert_eq!(recorded["new_trials"], 32);
    assert_eq!(common::recorded(&db).len(), 32);
    let replay = run_json(&["replay", text(&file), "--search", "random", "--budget", "1,32", "--repeats", "3"]);
    assert_eq!((&replay["configurations"], &replay["valid"]), (&32.into(), &recorded["valid"]));
    assert_eq!(replay["budgets"][1]["mean_fraction_of_optimum"], 1.0);
    // Everything is recorded: the same file is written without new trials.
    let before = std::fs::read(&file).unwrap();
    assert_eq!(run_json(&arguments)["new_trials"], 0);
    assert_eq!(std::fs::read(&file).unwrap(), before);

    // Slow kernels need not take long.
    let slow = ["record-space", "matmul-512", "--template", "gemm-4-2-4", "--max", "3", "--run-timeout", "0.002"];
    let slow = run_json(&[&slow[..], &["--db", text(&db)]].concat());
    assert_eq!((&slow["configurations"], &slow["errors"]["run_timeout"]), (&3.into(), &3.into()), "{slow}");
    // A sample depends only on the seed, whatever else is recorded.
    let plain = folder.path().join("sample.json");
    let sample = [&task[..], &["--max", "10", "--seed", "3", "-o", text(&plain)]].concat();
    let sampled = run_json(&sample);
    assert_eq!((&sampled["configurations"], &sampled["new_trials"]), (&10.into(), &0.into()));
    let document: Json = serde_json::from_slice(&std::fs::read(&plain).unwrap()).unwrap();
    assert_eq!(document["results"].as_array().unwrap().len(), 10);
}

#[test]
fn listed_configurations_are_measured_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let [db, list] = ["records.db", "configs"].map(|name| folder.path().join(name));
    let task = ["record-space", "matmul:m=7,n=5,k=3", "--template", "gemm-4-2-4", "--db", text(&db)];
    assert_eq!(run_json(&[&task[..], &["--max", "5"]].concat())["results"], Json::Null);
    // A repeated configuration counts once.
    let configs: Vec<Json> = common::recorded(&db).iter().map(|config| config.parse().unwrap()).collect();
    let lines: String = configs.iter().chain(&configs[..1]).map(|config| format!("{config}\n")).collect();
    std::fs::write(&list, &lines).unwrap();
    let other = folder.path().join("other.db");
    let listed = ["--db", text(&other), "--configs", text(&list)];
    let listed = run_json(&[&task[..4], &listed[..]].concat());
    check_shape("record-space", &listed);
    assert_eq!((&listed["configurations"], &listed["new_trials"]), (&5.into(), &5.into()));
    let order = listed["results"].as_array().unwrap().iter().map(|result| result["config"].clone());
    assert_eq!(order.collect::<Vec<Json>>(), configs);
    // As a list it gives the same result, already recorded.
    std::fs::write(&list, Json::Array(configs).to_string()).unwrap();
    assert_eq!(run_json(&[&task[..], &["--configs", text(&list)]].concat())["new_trials"], 0);
    // A configuration outside the space is reported with its position, before anything is measured.
    std::fs::write(&list, lines + "{\"m\": [7, 1, 1, 2]}\n").unwrap();
    let refused = [&task[..], &["--configs", text(&list)]].concat();
    check_refused(&refused, "configs: line 7: parameter ");
    check_refused(&[&refused[..], &["--max", "3"]].concat(), "--max");
    check_refused(&[&task[..], &["--configs", "nosuch"]].concat(), "nosuch");
}

#[test]
fn a_space_that_takes_too_long_is_not_begun() {
    let folder = tempfile::tempdir().unwrap();
    let (db, file) = (folder.path().join("records.db"), folder.path().join("space.json"));
    let output = run(&["record-space", "matmul-512", "--db", text(&db), "-o", text(&file)]);
    let stderr = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let last = stderr.lines().last().unwrap();
    assert!(last.starts_with("error: all ") && last.contains("a second (give --max N"), "{stderr}");
    assert!(!file.exists());
}

#[test]
fn a_run_begins_with_what_others_learnt() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (folder.path().join("old.db"), folder.path().join("new.db"));
    let first = ["tune", "matmul:m=64,n=64,k=64", "--db", text(&old), "--trials", "12", "--search", "random"];
    run_json(&[&first[..], &["--no-race"]].concat());
    for (search, words) in [("genetic", "carried over from"), ("gbt:steps=5", "learning from 12 programs of 1 task")] {
        let workload = if search == "genetic" { "matmul:m=96,n=64,k=64" } else { "matmul:m=64,n=96,k=64" };
        let source = format!("{},matmul:m=64,n=64,k=64", text(&old));
        let arguments = [
            "tune",
            workload,
            "--db",
            text(&new),
            "--trials",
            "6",
            "--search",
            search,
            "--transfer",
            &source,
            "--no-race",
            "--json",
        ];
        let output = run(&arguments);
        let tuned = json_of(&arguments, &output);
        assert_eq!((&tuned["trials"], &tuned["verified"]), (&6.into(), &true.into()));
        assert!(stderr(&output).contains(words), "{}", stderr(&output));
    }
}

#[test]
fn the_default_database_is_in_the_data_folder() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["tune", "matmul:m=8,n=8,k=8", "--trials", "2", "--no-race"];
    let output = command(&arguments).arg("--json").env("XDG_DATA_HOME", folder.path()).output().unwrap();
    json_of(&arguments, &output);
    let db = folder.path().join("tilewright/records.db");
    assert_eq!(common::recorded(&db).len(), 2);
    assert!(stderr(&output).contains(text(&db)), "it says where: {}", stderr(&output));
}

#[test]
fn a_command_that_is_shown_can_be_given_to_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("my records.db");
    let workload = "matmul:m=8,n=8,k=8,epilogue=clip(0;7)";
    let output = run(&["best", workload, "--db", text(&db)]);
    let shown = String::from_utf8(output.stdout).unwrap();
    let command = shown.split('`').nth(1).unwrap_or_else(|| panic!("{shown}"));
    let script = format!("tilewright() {{ printf '%s\\n' \"$@\"; }}; {command}");
    let words = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    let words = String::from_utf8(words.stdout).unwrap();
    assert_eq!(words.lines().collect::<Vec<_>>(), ["tune", workload, "--db", text(&db)], "{command}");
}

#[test]
fn exact_says_nothing_where_no_algorithm_rounds() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let tuned = run_json(&["tune", "matmul:m=8,n=8,k=8", "--exact", "--trials", "2", "--db", text(&db)]);
    assert_eq!(tuned["workload"], "matmul:m=8,n=8,k=8");
    for arguments in [
        &["best", "matmul:m=8,n=8,k=8"][..],
        &["best", "matmul:m=8,n=8,k=8,exact=1"],
        &["best", "matmul:m=8,n=8,k=8", "--exact"],
    ] {
        let best = run_json(&[arguments, &["--db", text(&db)]].concat());
        assert_eq!((&best["found"], &best["best"]), (&true.into(), &tuned["best"]), "{arguments:?}");
    }
    let winograd = ["best", "conv2d:c=8,h=8,w=8,k=8,r=3,s=3", "--exact", "--db", text(&db)];
    assert_eq!(run_json(&winograd)["workload"], "conv2d:c=8,h=8,w=8,k=8,r=3,s=3,exact=1");
}

/// Workloads that differ only by factors and terms are tuned only once.
#[test]
fn records_serve_whatever_has_other_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let db = folder.path().join("records.db");
    let with = |epilogue: &str| format!("matmul:m=8,n=8,k=8,epilogue=relu+{epilogue}");
    let tuned = run_json(&["tune", &with("linear(0.5;0.5)"), "--trials", "1", "--no-race", "--db", text(&db)]);
    let best = |epilogue: &str| run_json(&["best", &with(epilogue), "--db", text(&db)]);
    for same in ["linear(0.5;0.5)", "linear(0.651;-0.25)", "linear(-7;0.1)"] {
        assert_eq!(best(same)["best"], tuned["best"], "{same}");
    }
    for other in ["linear(1;0.5)", "linear(0.651;0)", "leaky_relu"] {
        assert_eq!(best(other)["found"], false, "{other}");
    }
    // It is also found with its own numbers, as earlier versions recorded it.
    let own = with("linear(0.25;3)");
    let tuned = run_json(&["tune", &own, "--trials", "1", "--no-race", "--db", text(&db)]);
    let least = |of: &Json| of["best"]["ms_median"].as_f64().unwrap();
    assert!(least(&best("linear(0.25;3)")) <= least(&tuned));
    assert_eq!(run_json(&["tune", &own, "--trials", "1", "--no-race", "--db", text(&db)])["new_trials"], 0);
}

#[test]
fn what_is_too_large_is_named() {
    let large = ["space", "matmul:m=1073741789,n=100,k=1009"];
    check_refused(&large, "is too large for template matmul: give less than");
    let larger = ["space", "matmul:m=1000003,n=1000003,k=1000003"];
    check_refused(&larger, "no configuration satisfies");
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("text.db"), "this is no database, and never was one; it is only text\n".repeat(100)).unwrap();
    std::fs::write(at("lines"), "{}\n").unwrap();
    let other = rusqlite::Connection::open(at("other.db")).unwrap();
    other.execute_batch("PRAGMA application_id = 7; CREATE TABLE t (x)").unwrap();
    drop(other);
    let (fresh, text_db, other_db, lines) = (at("fresh.db"), at("text.db"), at("other.db"), at("lines"));
    let nowhere = at("no/such/folder/x.db");
    let (missing, empty) = (at("missing.db"), at("empty.db"));
    run_json(&["import", "/dev/null", "--db", &empty]);
    let here = folder.path().to_str().unwrap();
    let with_db = format!("run `tilewright tune matmul:m=256,n=256,k=256 --db {empty}`");
    let tune = |arguments: &[&str]| {
        let mut all = vec!["tune", "matmul:m=8,n=8,k=8"];
        all.extend_from_slice(arguments);
        if !arguments.contains(&"--db") {
            all.extend(["--db", &fresh]);
        }
        owned(&all)
    };
    let cases: Vec<(Vec<String>, &str)> = vec![
        (owned(&[]), "subcommand"),
        (owned(&["frobnicate"]), "frobnicate"),
        (owned(&["tune"]), "WORKLOAD"),
        (owned(&["tune", "nosuch", "--db", &fresh]), "operators: matmul"),
        (owned(&["tune", "matmul:m=0,n=8,k=8", "--db", &fresh]), "m=0"),
        (owned(&["tune", "matmul:m=8,n=8", "--db", &fresh]), "needs `k`"),
        (owned(&["tune", "matmul:m=8,n=8,k=8,q=1", "--db", &fresh]), "no attribute `q`"),
        (owned(&["tune", "matmul:m=8,n=8,k=x\ny", "--db", &fresh]), "not accepted"),
        (owned(&["tune", "matmul:m=1000000000,n=1000000000,k=1000000000", "--db", &fresh]), "smaller sizes"),
        (owned(&["tune", "matmul:m=1000000,n=1000000,k=1000000", "--db", &fresh]), "memory"),
        (owned(&["tune", "matmul:m=99999999999999999999,n=1,k=1", "--db", &fresh]), "not accepted"),
        (owned(&["bench", "matmul:m=1000000,n=1000000,k=8", "--db", &fresh]), "memory"),
        (tune(&["--search", "annealed"]), "unknown search annealed"),
        (tune(&["--search", "genetic:population=none"]), "population"),
        (tune(&["--search", "random:x=1"]), "no option x"),
        (tune(&["--template", "nosuch"]), "no template `nosuch`"),
        (tune(&["--target", "z80"]), "unknown target `z80`"),
        (tune(&["--target", if cfg!(target_arch = "x86_64") { "aarch64" } else { "x86-64" }]), "do not run on"),
        (tune(&["--threads", "0"]), "--threads 0"),
        (tune(&["--threads", "100000"]), "--threads 100000"),
        (tune(&["--threads", "two"]), "'two'"),
        (tune(&["--trials", "0"]), "--trials"),
        (tune(&["--trials", "-3"]), "-3"),
        (tune(&["--time", "0"]), "above 0"),
        (tune(&["--time", "nan"]), "above 0"),
        (tune(&["--tiem", "3"]), "--time"),
        (tune(&["--transfer", &missing]), "there is no database"),
        (tune(&["--transfer", ""]), "the name of a database is missing"),
        (tune(&["--transfer", "a.db,nosuch"]), "unknown workload"),
        (tune(&["--transfer", &text_db]), "give another file with --transfer"),
        (tune(&["--transfer", &format!("{empty},matmul-256")]), "no trials of matmul:m=256,n=256,k=256"),
        (tune(&["--transfer", &empty]), "can be carried over among the 0 tasks"),
        (tune(&["--transfer", &empty, "--search", "gbt"]), "no program to learn from among the 0 tasks"),
        (owned(&["tune", "resnet18", "--transfer", &missing, "--db", &fresh]), "there is no database"),
        (owned(&["record-space", "nosuch", "--db", &fresh]), "operators: matmul"),
        (owned(&["record-space", "matmul-256", "--template", "nosuch", "--db", &fresh]), "no template"),
        (owned(&["record-space", "matmul-256", "--max", "0", "--db", &fresh]), "--max"),
        (owned(&["record-space", "matmul-256", "--max", "5", "-o", here, "--db", &fresh]), "folder"),
        (owned(&["record-space", "matmul-256", "--max", "5", "-o", &nowhere, "--db", &fresh]), "no folder"),
        (owned(&["record-space", "matmul-256", "--max", "5", "--db", &text_db]), "not a database"),
        (tune(&["--db", &text_db]), "not a database"),
        (tune(&["--db", &other_db]), "another program"),
        (tune(&["--db", &nowhere]), "no folder"),
        (tune(&["--db", here]), "folder"),
        (tune(&["--db", "/proc/x.db"]), "/proc/x.db"),
        (owned(&["best", "matmul-256", "--db", &text_db]), "not a database"),
        (owned(&["best", "nosuch", "--db", &fresh]), "unknown workload"),
        (owned(&["space", "matmul-256", "--template", "nosuch"]), "matmul-blocked"),
        (owned(&["show", "matmul-256", "--config", "{"]), "--config"),
        (owned(&["show", "matmul-256", "--config", "[1]"]), "object"),
        (owned(&["show", "matmul-256", "--config", "{\"mr\": 1}"]), "missing"),
        (owned(&["show", "matmul-256", "--config", "{\"mrr\": 1}"]), "unknown parameter mrr"),
        (owned(&["show", "matmul-256", "--emit", "object"]), "-o"),
        (owned(&["show", "matmul-256", "--emit", "poetry"]), "steps, ir"),
        (owned(&["show", "matmul-256", "--db", &empty]), "give --best too"),
        (owned(&["best", "matmul-256", "--template", "matmull", "--db", &empty]), "no template `matmull`"),
        (owned(&["show", "matmul-256", "--best", "--db", &empty]), &with_db),
        (owned(&["show", "matmul-256", "--best", "--db", &fresh]), "nothing is recorded"),
        (owned(&["bench", "matmul-256", "--against", "eigen", "--db", &fresh]), "no peer is called `eigen`"),
        (owned(&["bench", "matmul-256", "--peer-path", &nowhere, "--db", &fresh]), "is no folder"),
        (owned(&["export", "--db", &nowhere]), "there is no database"),
        (owned(&["export", "--json", "--db", &fresh]), "FILE"),
        (owned(&["import", &lines, "--db", &fresh]), "line 1: missing field"),
        (owned(&["import", &nowhere, "--db", &fresh]), "cannot read"),
        // The input is endless, and refused at its first line.
        (owned(&["import", "/dev/zero", "--db", &fresh]), "line 1: longer than"),
        (owned(&["import", here, "--db", &fresh]), "folder"),
    ];
    for (arguments, expected) in cases {
        check_refused(&arguments, expected);
    }
    assert!(!std::fs::exists(&nowhere).unwrap());
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = command(&["show", "matmul:m=64,n=64,k=64", "--guess", "--emit", "asm"]).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
}

#[test]
fn help_goes_to_standard_output() {
    for arguments in [&["--help"][..], &["tune", "--help"], &["--version"]] {
        let output = run(arguments);
        assert!(output.status.success() && !output.stdout.is_empty() && output.stderr.is_empty());
        assert!(!String::from_utf8_lossy(&output.stdout).contains("peer-worker"));
    }
}
