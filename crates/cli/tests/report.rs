//! Report: its facts on a synthetic database, and a page that is complete, self-contained and trusts no
//! record.

mod common;

use std::path::Path;

use common::{check_refused, run, run_json, stderr, text};
use serde_json::{Value as Json, json};

const WORKLOAD: &str = "matmul:m=64,n=64,k=64";
const EVIL: &str = "<script>alert('&')</script>";

/// Trial of a space of a template that does not exist, on a machine that does not exist.
fn line(search: &str, seed: u64, trial: u64, elapsed_s: f64, ns: Option<f64>) -> String {
    let outcome = match ns {
        Some(ns) => json!({"class": "no_error", "median_ns": ns}),
        None => json!({"class": "wrong_answer", "message": EVIL}),
    };
    let run = json!({"start_unix_ms": 1_800_000_000_000u64 + seed, "elapsed_s": elapsed_s});
    let record = json!({
        "workload": WORKLOAD, "target": EVIL, "template": "made<up>", "threads": 1,
        "config": {"mr": trial, "of": format!("{search} {seed}"), "algorithm": EVIL},
        "outcome": outcome, "seconds": {"build": 0.5, "run": 0.25, "verify": 0.125},
        "steps": format!("split i {trial}\n{EVIL}"), "search": search, "seed": seed, "trial": trial,
        "version": "0", "toolchain": "none", "unix_time": 1_800_000_000u64 + trial, "run": run,
    });
    format!("{record}\n")
}

/// Database of two searches: one with two seeds, one of whose trials fails, and one with a malicious name.
fn make_database(folder: &Path) -> String {
    let lines = [
        line("random", 1, 0, 1.0, Some(4000.0)),
        line("random", 1, 1, 2.0, Some(2000.0)),
        line("random", 2, 2, 1.5, Some(3000.0)),
        line("random", 2, 3, 2.5, None),
        line(EVIL, 1, 4, 0.5, Some(2048.0)),
    ];
    let (file, db) = (folder.join("lines"), folder.join("records.db"));
    std::fs::write(&file, lines.concat()).unwrap();
    run_json(&["import", text(&file), "--db", text(&db)]);
    text(&db).to_owned()
}

#[test]
fn facts_are_those_of_the_records() {
    let folder = tempfile::tempdir().unwrap();
    let db = make_database(folder.path());
    let report = run_json(&["report", "--db", &db]);
    let [subject] = &report["workloads"].as_array().unwrap()[..] else { panic!("one workload: {report}") };
    assert_eq!((&subject["workload"], &subject["trials"]), (&WORKLOAD.into(), &5.into()));
    // 2 · 64³ operations in 2000 ns.
    let best = &subject["best"];
    assert_eq!(
        (&best["gflops"], &best["search"], &best["confirmed"]),
        (&262.144.into(), &"random".into(), &false.into())
    );
    let searches = subject["searches"].as_array().unwrap();
    assert_eq!(searches.len(), 2);
    let random = &searches[0];
    let facts = ["search", "runs", "trials", "failed", "seconds"].map(|name| random[name].clone());
    assert_eq!(facts, [json!("random"), json!(2), json!(4), json!(1), json!(4.5)]);
    let median = (262.144 + 524288.0 / 3000.0) / 2.0;
    assert!((random["best_gflops"]["median"].as_f64().unwrap() - median).abs() < 1e-9, "{random}");
    // One of the two runs comes within 5 % of the best, with its second trial.
    assert_eq!(random["near_best"], json!({"runs": 1, "trials": 2.0, "seconds": 2.0}));
    // The other search does with its first trial: 2048 ns.
    assert_eq!(searches[1]["near_best"], json!({"runs": 1, "trials": 1.0, "seconds": 0.5}));
    assert_eq!(
        subject["outcomes"],
        json!([
            {"class": "no_error", "trials": 4, "seconds_in": {"build": 2.0, "run": 1.0, "verify": 0.5}, "example": null},
            {"class": "wrong_answer", "trials": 1, "seconds_in": {"build": 0.5, "run": 0.25, "verify": 0.125},
             "example": EVIL},
        ])
    );
    assert_eq!(subject["templates"][0]["r_squared"], Json::Null, "too few trials to learn from");
    assert_eq!(subject["templates"][0]["promising"], json!([]), "too few trials to believe anything");
}

/// Records of a command: 60 of the 64 configurations, all except the fastest ones.
#[test]
fn beliefs_are_of_what_was_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let time_ns = |tile: i64, unroll: i64| 1e6 * (10 + (tile - 5).pow(2) + (unroll - 2).pow(2)) as f64;
    let mut configs: Vec<(i64, i64)> = (0..64).map(|at| (at / 8, at % 8)).collect();
    configs.sort_by(|a, b| time_ns(a.0, a.1).total_cmp(&time_ns(b.0, b.1)));
    // Neither in the order of their times, nor of the space.
    let mut measured = configs.split_off(4);
    measured.sort_by_key(|(tile, unroll)| (tile * 29 + unroll * 13) % 61);
    let record = |(trial, (tile, unroll)): (usize, &(i64, i64))| {
        let record = json!({
            "workload": "command:app#0123", "target": "here", "template": "command", "threads": 1,
            "config": {"tile": tile, "unroll": unroll, "flags": if tile % 2 == 0 { "-O2" } else { "-O3" }},
            "outcome": {"class": "no_error", "median_ns": time_ns(*tile, *unroll)},
            "seconds": {"build": 0.0, "run": 0.1, "verify": 0.0}, "steps": "", "search": "random", "seed": 1,
            "trial": trial, "version": "0", "toolchain": "none", "unix_time": 1_800_000_000u64 + trial as u64,
            "run": {"start_unix_ms": 1_800_000_000_000u64, "elapsed_s": trial as f64},
        });
        format!("{record}\n")
    };
    let (file, db, page) = (folder.path().join("lines"), folder.path().join("r.db"), folder.path().join("r.html"));
    std::fs::write(&file, measured.iter().enumerate().map(record).collect::<String>()).unwrap();
    run_json(&["import", text(&file), "--db", text(&db)]);
    let report = run_json(&["report", "--db", text(&db)]);
    let template = &report["workloads"][0]["templates"][0];
    assert!(template["expected_gain"].as_f64().is_some_and(|gain| (0.0..0.9).contains(&gain)), "{template}");
    let first = &template["promising"][0];
    let is_left_out = configs.iter().any(|(tile, unroll)| {
        (first["config"]["tile"].as_i64(), first["config"]["unroll"].as_i64()) == (Some(*tile), Some(*unroll))
    });
    assert!(is_left_out && first["chance"].as_f64().unwrap() > 0.3, "{template}");
    assert!(run(&["report", "--db", text(&db), "-o", text(&page)]).status.success());
    let html = std::fs::read_to_string(&page).unwrap();
    check_balanced(&html);
    stands_alone(&html);
    assert!(html.contains("What is not known yet of command") && html.contains("left aside"));
}

/// Records of a command by a metric other than time, minimised or maximised.
#[test]
fn a_page_shows_a_metric_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let page_of = |name: &str, steps: &str, cost_of: fn(f64) -> f64| {
        let record = |trial: u64| {
            let value = cost_of(200.0 - trial as f64);
            let record = json!({
                "workload": "command:app#0123", "target": "here", "template": "command", "threads": 1,
                "config": {"tile": trial}, "outcome": {"class": "no_error", "median_ns": value},
                "seconds": {"build": 0.0, "run": 0.1, "verify": 0.0}, "steps": steps, "search": "random",
                "seed": 1, "trial": trial, "version": "0", "toolchain": "none", "unix_time": 1_800_000_000u64 + trial,
                "run": {"start_unix_ms": 1_800_000_000_000u64, "elapsed_s": trial as f64},
            });
            format!("{record}\n")
        };
        let [file, db, page] = ["lines", "db", "html"].map(|end| folder.path().join(format!("{name}.{end}")));
        std::fs::write(&file, (0..64).map(record).collect::<String>()).unwrap();
        run_json(&["import", text(&file), "--db", text(&db)]);
        assert!(run(&["report", "--db", text(&db), "-o", text(&page)]).status.success());
        let html = std::fs::read_to_string(&page).unwrap();
        check_balanced(&html);
        for foreign in ["runs/s", "GFLOP/s", " ns<", " ns,", " ns."] {
            assert!(!html.contains(foreign), "{name}: {foreign}");
        }
        html
    };
    let small = page_of("small", "run app 1\nminimize score=([0-9.]+)\n", |value| value);
    assert!(small.contains("Best: <b>metric 137.0</b>") && small.contains("best metric"), "{small}");
    // A maximised metric is recorded as its reciprocal.
    let great = page_of("great", "run app 1\nmaximize score=([0-9.]+)\n", |value| 1e9 / value);
    assert!(great.contains("Best: <b>metric 200.0</b>"), "{great}");
    let both = "objective latency minimize l=([0-9.]+)\nobjective size minimize s=([0-9.]+)\n";
    assert!(page_of("both", both, |value| value).contains("Best: <b>latency 137.0</b>"));
}

/// Checks that every element is closed in order.
fn check_balanced(html: &str) {
    let mut open: Vec<&str> = Vec::new();
    for piece in html.split('<').skip(1) {
        let (tag, _) = piece.split_once('>').unwrap_or_else(|| panic!("no end: {piece}"));
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        match tag {
            _ if tag.starts_with('!') || tag.ends_with('/') || name == "meta" => {}
            _ if tag.starts_with('/') => assert_eq!(open.pop(), Some(name), "<{tag}> closes another element"),
            _ => open.push(name),
        }
    }
    assert_eq!(open, [""; 0]);
}

#[test]
fn the_page_is_whole_and_trusts_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let db = make_database(folder.path());
    let page = folder.path().join("report.html");
    let output = run(&["report", WORKLOAD, "--db", &db, "-o", text(&page)]);
    assert!(output.status.success(), "{}", stderr(&output));
    let html = std::fs::read_to_string(&page).unwrap();
    check_balanced(&html);
    assert!(html.contains("262.1 GFLOP/s") && html.contains("&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;"));
    stands_alone(&html);
}

/// Checks that a page runs no script and loads nothing.
fn stands_alone(html: &str) {
    for elsewhere in ["<script", "<link", "<img", "http:", "https:", "src=", "url(", "@import"] {
        assert!(!html.contains(elsewhere), "{elsewhere}");
    }
}

#[test]
fn what_is_not_there_is_said_in_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let db = make_database(folder.path());
    let page = folder.path().join("report.html");
    let nowhere = folder.path().join("nowhere.db");
    for (arguments, expected) in [
        (vec!["report", "--db", &db], "-o FILE.html"),
        (vec!["report", "matmul-256", "--db", &db, "-o", text(&page)], "nothing is recorded for matmul-256"),
        (vec!["report", "nosuch", "--db", &db, "-o", text(&page)], "unknown workload"),
        (vec!["report", "--db", text(&nowhere), "-o", text(&page)], "there is no database"),
        (vec!["report", "--db", &db, "-o", text(folder.path())], "cannot write"),
    ] {
        let output = run(&arguments);
        let stderr = stderr(&output);
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(2), 1), "{arguments:?}: {stderr}");
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
    }
    assert!(!page.exists());
}

#[test]
fn a_page_on_a_model_shows_every_step_once() {
    let folder = tempfile::tempdir().unwrap();
    let (model, db, page) =
        (folder.path().join("dqn.onnx"), folder.path().join("r.db"), folder.path().join("dqn.html"));
    let (model, db, page) = (text(&model), text(&db), text(&page));
    run_json(&["network", "dqn", "-o", model]);
    run_json(&["tune", model, "--time", "2", "--db", db]);
    let facts = run_json(&["report", model, "--db", db, "--runs", "3", "-o", page]);
    let list = |name: &str| facts[name].as_array().unwrap().clone();
    let number = |value: &Json| value.as_f64().unwrap();

    // Each step is one node, after those that it reads.
    let (nodes, edges, steps, tasks) = (list("nodes"), list("edges"), list("steps"), list("tasks"));
    let drawn: Vec<u64> = nodes.iter().filter_map(|node| node["step"].as_u64()).collect();
    assert_eq!(drawn, (0..steps.len() as u64).collect::<Vec<_>>());
    assert!(edges.iter().all(|edge| edge["from"].as_u64() < edge["to"].as_u64()), "{edges:?}");
    for (at, node) in nodes.iter().enumerate().filter(|(_, node)| node["kind"] != "input") {
        assert!(edges.iter().any(|edge| edge["to"] == at), "nothing leads to {node}");
    }
    // Times and shares add up, and each kernel runs as often as reported.
    let sum: f64 = steps.iter().map(|step| number(&step["us"]) / 1e3).sum();
    assert!((sum / number(&facts["ms_steps"]) - 1.0).abs() < 1e-9);
    assert!((steps.iter().map(|step| number(&step["share"])).sum::<f64>() - 1.0).abs() < 1e-9);
    for (at, task) in tasks.iter().enumerate() {
        assert_eq!(task["times"], steps.iter().filter(|step| step["task"] == at).count(), "{task}");
        assert!(task["is_recorded"] == true && number(&task["ms_before"]) > 0.0, "{task}");
    }
    // So do the turns of the search.
    let turns = facts["search"]["turns"].as_array().unwrap();
    let seconds: f64 = turns.iter().map(|turn| number(&turn["to"]) - number(&turn["from"])).sum();
    assert!((seconds - number(&facts["search"]["seconds"])).abs() < 1e-6 && seconds > 0.0);
    let count = |list: &[Json], name: &str| list.iter().map(|one| one[name].as_u64().unwrap()).sum::<u64>();
    assert_eq!((count(turns, "trials"), turns.len() as u64), (count(&tasks, "trials"), count(&tasks, "turns")));

    let html = std::fs::read_to_string(page).unwrap();
    check_balanced(&html);
    for at in 0..steps.len() {
        for id in [format!("id=\"n{at}\""), format!("id=\"s{at}\"")] {
            assert_eq!(html.matches(&id).count(), 1, "{id}");
        }
    }
    stands_alone(&html);
    // The profile comes first; a step is shown with its nodes, and with its share of the peak.
    let place = |text: &str| html.find(text).unwrap_or_else(|| panic!("no {text}"));
    assert!(place("<h2 id=\"profile\">") < place("<h2 id=\"graph\">"));
    let peak = number(&facts["peak_gflops"]);
    for step in steps.iter().filter(|step| step["kind"] == "kernel") {
        let name = step["name"].as_str().unwrap();
        assert!(html.contains(&format!("<div class=\"names\">{name}</div>")), "{name}");
        let start: String = name.chars().take(39).collect();
        assert!(html.contains(&format!("opacity=\".8\">{start}")), "{name}");
        if let Some(gflops) = step["gflops"].as_f64() {
            assert!(html.contains(&format!("<td>{:.1} %</td>", 100.0 * gflops / peak)), "{step} of {peak}");
        }
    }

    check_refused(&["report", model, "matmul-64", "--db", db, "-o", page], "told of alone");
    for option in ["--exact", "--runs=3", "--threads=2", "--device=opencl", "--target=x86-64"] {
        check_refused(&["report", "matmul-64", "--db", db, "-o", page, option], "are for a model");
    }
}

#[test]
fn a_page_on_a_model_trusts_no_name() {
    let folder = tempfile::tempdir().unwrap();
    let (model, page) = (folder.path().join("evil.onnx"), folder.path().join("evil.html"));
    // Fields of a model, a graph, a node and a value, by their numbers in ONNX.
    let field = |number: u8, bytes: &[u8]| -> Vec<u8> {
        let n = bytes.len();
        [&[number << 3 | 2, n as u8 & 0x7f | 0x80, (n >> 7) as u8][..], bytes].concat()
    };
    let value = |name: &str| {
        let shape = field(1, &[8, 8]);
        let ty = field(1, &[&[8, 1][..], &field(2, &shape)].concat());
        [field(1, name.as_bytes()), field(2, &ty)].concat()
    };
    let (x, y) = (format!("{EVIL}x"), format!("{EVIL}\"y"));
    let node = [field(1, x.as_bytes()), field(2, y.as_bytes()), field(3, EVIL.as_bytes()), field(4, b"Relu")].concat();
    let graph = [field(1, &node), field(2, EVIL.as_bytes()), field(11, &value(&x)), field(12, &value(&y))].concat();
    let bytes = [&[8, 8][..], &field(8, &[16, 17]), &field(7, &graph)].concat();
    std::fs::write(&model, bytes).unwrap();
    let db = folder.path().join("none.db");
    let facts = run_json(&["report", text(&model), "--db", text(&db), "--runs", "1", "-o", text(&page)]);
    assert_eq!(facts["nodes"][0]["name"], x);
    let html = std::fs::read_to_string(&page).unwrap();
    check_balanced(&html);
    stands_alone(&html);
    assert!(html.contains("&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;"), "{html}");
}
