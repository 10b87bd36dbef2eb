//! The report: its facts on a made database, and a page that is whole, stands alone and trusts no record.

mod common;

use std::path::Path;

use common::{run, run_json, stderr, text};
use serde_json::{Value as Json, json};

const WORKLOAD: &str = "matmul:m=64,n=64,k=64";
const EVIL: &str = "<script>alert('&')</script>";

/// A trial of a space of a template that no version has, on a machine that none is.
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

/// Two searches: one with two seeds, one of whose trials fails, and one with a name that nobody should trust.
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
    // The other search does with its first: 2048 ns.
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
}

/// Whether every element is closed in order.
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
