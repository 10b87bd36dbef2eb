//! Races of commands: verdicts, exit codes, the JSON document, failing commands and interrupts.

mod common;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{check_refused, command, json_of, owned, run, run_json, send, stderr, text};
use serde_json::{Value as Json, json};

const QUICK: &str = "sleep 0.002";
const SLOW: &str = "sleep 0.02";

#[test]
fn a_race_has_a_winner_and_says_all_of_it() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("race.svg");
    let raced = run_json(&["race", SLOW, QUICK, QUICK, "--seed", "5", "--time", "5", "--picture", text(&picture)]);
    let keys = "contestants winner choice tied allow slower rounds ended seconds confidence seed metric maximize cold";
    assert_eq!(raced.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" "), keys);
    let [slow, quick, again] = [0, 1, 2].map(|at| &raced["contestants"][at]);
    let keys = "name median quartiles ratio interval stands samples";
    assert_eq!(slow.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" "), keys);
    assert_eq!([&slow["name"], &quick["name"], &again["name"]], [SLOW, QUICK, "sleep 0.002 (2)"]);
    assert_eq!((&slow["stands"], &raced["seed"]), (&json!("slower"), &json!(5)), "{raced}");
    assert!(slow["interval"][0].as_f64().unwrap() > 1.5 && slow["median"].as_f64().unwrap() >= 20.0, "{slow}");
    let picture = fs::read_to_string(picture).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("sleep 0.002 (2)"), "{picture}");
    let shown = run(&["race", SLOW, QUICK, "--seed", "5"]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("winner   `sleep 0.002`, the next costs ") && shown.contains("seed 5"), "{shown}");
}

#[test]
fn numbers_that_commands_say_race_as_well() {
    let least = run_json(&["race", "echo m 3", "echo m 5", "--metric", "m (.*)"]);
    assert_eq!(least["winner"], "echo m 3", "{least}");
    let most = run_json(&["race", "echo m 3", "echo m 5", "--metric", "m (.*)", "--maximize"]);
    assert_eq!((&most["winner"], &most["contestants"][1]["median"]), (&json!("echo m 5"), &json!(5.0)), "{most}");
    assert!((most["contestants"][0]["ratio"].as_f64().unwrap() - 5.0 / 3.0).abs() < 1e-9, "{most}");
    let equal = run_json(&["race", "--shell", "echo $((1 + 2))", "echo {3} | tr -d '{}'", "--metric", "(.*)"]);
    assert_eq!((&equal["winner"], &equal["rounds"]), (&Json::Null, &json!(10)), "{equal}");
    assert_eq!((&equal["choice"], equal["tied"].as_array().unwrap().len()), (&json!("echo $((1 + 2))"), 2));
    // Nothing is a number of times 0.
    let free = run(&["race", "echo 0", "echo 1", "--metric", "(.*)"]);
    let shown = String::from_utf8_lossy(&free.stdout);
    assert!(shown.contains("more than 1,000,000 %") && shown.lines().all(|line| line.len() < 160), "{shown}");
}

#[test]
fn only_a_slowdown_beyond_the_allowance_fails() {
    let with = |first: &'static str, second: &'static str, more: &[&'static str]| {
        let arguments = [&["race", "--ci", "--metric", "(.*)", first, second], more].concat();
        let output = command(&arguments).arg("--json").output().unwrap();
        let document: Json = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), document["slower"].clone(), stderr(&output))
    };
    let (code, slower, line) = with("echo 100", "echo 106", &[]);
    assert_eq!((code, slower, line.lines().count()), (Some(1), json!(["echo 106"]), 1));
    assert!(line.contains("`echo 106` is slower by 6.0 %, at least 6.0 %") && line.contains("`echo 100`"), "{line}");
    for (first, second, more) in [
        ("echo 100", "echo 104", &[][..]),
        ("echo 100", "echo 105", &[]),
        ("echo 106", "echo 100", &[]),
        ("echo 100", "echo 119", &["--allow", "20%"]),
    ] {
        assert_eq!(with(first, second, more), (Some(0), json!([]), String::new()), "{first} {second}");
    }
    let timed = run(&["race", "--ci", QUICK, SLOW]);
    assert_eq!((timed.status.code(), timed.stdout.starts_with(b"command")), (Some(1), true), "{}", stderr(&timed));
    let timed = run(&["race", "--ci", SLOW, QUICK]);
    assert_eq!(timed.status.code(), Some(0), "{}", stderr(&timed));
    let few = run(&["race", "--ci", SLOW, SLOW, "--time", "0.01"]);
    let shown = String::from_utf8_lossy(&few.stdout).into_owned();
    assert!(few.status.success() && shown.contains("the rounds are too few to tell"), "{shown}");
}

#[test]
fn a_command_that_fails_is_named_with_the_end_of_what_it_said() {
    let folder = tempfile::tempdir().unwrap();
    let check = |commands: [&str; 2], more: &[&str], expected: &str| {
        let output = run(&[&["race", "--shell", commands[0], commands[1]], more].concat());
        let line = stderr(&output);
        assert_eq!((output.status.code(), output.stdout.len(), line.lines().count()), (Some(1), 0, 1), "{line}");
        assert!(line.starts_with("error: ") && line.contains(expected), "{line}");
    };
    check(["true", "echo a >&2; echo end >&2; exit 3"], &[], "exit 3` ended with exit code 3: end");
    check(["true", "kill -SEGV $$"], &[], "kill -SEGV $$`: ");
    check(["sleep 100", "true"], &["--timeout", "0.1"], "`sleep 100` had not ended after 0.1");
    check(["echo 1", "echo none"], &["--metric", "([0-9]+)"], "`echo none`: no metric");
    let file = folder.path().join("runs");
    let fifth = format!("echo >> {0}; test $(wc -l < {0}) -lt 5", text(&file));
    check(["true", &fifth], &[], "-lt 5` ended with exit code 1");
    let missing = run(&["race", "true", "no-such-program"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr(&missing).contains("there is no program no-such-program"), "{}", stderr(&missing));
}

#[test]
fn an_interrupt_ends_what_runs_and_shows_what_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let (runs, pid) = (folder.path().join("runs"), folder.path().join("pid"));
    let hangs = format!(
        "echo >> {0}; n=$(wc -l < {0}); echo $((1 + n % 2)); test $n -gt 13 || exit 0; (setsid sleep 100 & echo $! > {1}); exec sleep 100",
        text(&runs),
        text(&pid)
    );
    // Both are indistinguishable: no verdict is clear before the maximum number of rounds.
    let arguments = ["race", "--json", "--shell", "echo 1.5", &hangs, "--timeout", "100", "--metric", "(.*)"];
    let racing = command(&arguments).spawn().unwrap();
    let start = Instant::now();
    while fs::read_to_string(&pid).unwrap_or_default().is_empty() && start.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    let sleeper = fs::read_to_string(&pid).unwrap().trim().to_owned();
    send("-INT", &racing);
    let raced = json_of(&arguments, &racing.wait_with_output().unwrap());
    assert!(start.elapsed() < Duration::from_secs(60));
    assert!(!Path::new(&format!("/proc/{sleeper}")).exists(), "what it started goes on");
    // One run more than rounds, which was the warm-up.
    assert_eq!((&raced["ended"], raced["rounds"].as_u64().unwrap()), (&json!("interrupted"), 12), "{raced}");
}

#[test]
fn what_is_no_race_is_refused() {
    let with = |more: &[&str]| owned(&[&["race"], more].concat());
    check_refused(&with(&["true"]), "2 values required");
    check_refused(&with(&["true", "true", "--rounds", "5"]), "give 9 or more");
    check_refused(&with(&["true", "true", "--rounds", "1001"]), "at most 1000");
    check_refused(&with(&["true", "true", "--allow", "5%"]), "--ci");
    check_refused(&with(&["true", "true", "--ci", "--allow", "0.05"]), "such as 5%");
    check_refused(&with(&["true", "true", "--metric", "("]), "--metric");
    check_refused(&with(&["true", "true", "--maximize"]), "--maximize");
    check_refused(&with(&["true", "true", "--threads", "5000"]), "--threads 5000 is not possible on this machine");
    check_refused(&with(&["true", "a | b"]), "add --shell");
    check_refused(&with(&["true", ""]), "the command is empty");
    check_refused(&with(&["true", "true", "--picture", "/no/such/folder/a.svg"]), "/no/such/folder/a.svg");
}

#[test]
fn files_that_stay_in_the_cache_are_told_of() {
    // Where the cache can be dropped, that would slow down everything else on the machine.
    if fs::OpenOptions::new().write(true).open("/proc/sys/vm/drop_caches").is_err() {
        let raced = run(&["race", "--cold", "true", "true", "--rounds", "9"]);
        assert!(raced.status.success() && stderr(&raced).contains("cache of files stays"), "{}", stderr(&raced));
    }
}
