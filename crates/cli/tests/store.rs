//! `store`, and commands that query a store.

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{check_refused, command, run, run_json, stderr, text, tool};
use serde_json::Value as Json;

const WORKLOAD: &str = "matmul:m=64,n=64,k=64";

/// Database with a winner, and a store with it.
fn pushed(folder: &Path) -> (String, String) {
    let [db, place] = ["own.db", "store"].map(|name| text(&folder.join(name)).to_owned());
    let tune = ["tune", WORKLOAD, "--search", "random", "--seed", "1", "--trials", "8", "--db", &db];
    run_json(&tune);
    let pushed = run_json(&["store", "push", &place, "--db", &db]);
    assert_eq!((&pushed["read"], &pushed["better"]), (&1.into(), &1.into()));
    (db, place)
}

/// Only entry of a store.
fn entry(place: &str) -> PathBuf {
    let mut folders = vec![PathBuf::from(place)];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some() => return path,
                false => {}
            }
        }
    }
    panic!("no entry in {place}")
}

fn best(db: &str, place: &str) -> Json {
    run_json(&["best", WORKLOAD, "--db", db, "--store", place])
}

#[test]
fn winners_of_another_machine_serve_here() {
    let folder = tempfile::tempdir().unwrap();
    let (own, place) = pushed(folder.path());
    let fresh = text(&folder.path().join("fresh.db")).to_owned();
    let (ours, theirs) = (best(&own, &place), best(&fresh, &place));
    assert_eq!((&theirs["best"]["config"], &theirs["best"]["store"]), (&ours["best"]["config"], &place.clone().into()));
    assert_eq!((&ours["best"]["store"], &theirs["best"]["confirmed"]), (&Json::Null, &true.into()));
    assert!(!Path::new(&fresh).exists(), "a look-up writes nothing");

    // It is verified here before its first use, and recorded.
    let library = text(&folder.path().join("library")).to_owned();
    let compile = ["compile", WORKLOAD, "-o", &library, "--db", &fresh, "--json"];
    let compiled = command(&compile).env("TILEWRIGHT_STORE", &place).output().unwrap();
    let told = common::json_of(&compile, &compiled);
    assert_eq!((&told["config"], &told["recorded"]), (&ours["best"]["config"], &true.into()));
    let now = run_json(&["best", WORKLOAD, "--db", &fresh]);
    assert_eq!((&now["best"]["config"], &now["imported"]), (&ours["best"]["config"], &false.into()));

    let pulled = text(&folder.path().join("pulled.db")).to_owned();
    let imported = run_json(&["store", "pull", &place, "--db", &pulled]);
    assert_eq!((&imported["read"], &imported["new"]), (&1.into(), &1.into()));
    assert_eq!(run_json(&["best", WORKLOAD, "--db", &pulled])["imported"], true);
    let other = text(&folder.path().join("other")).to_owned();
    for better in [1, 0] {
        assert_eq!(run_json(&["store", "merge", &place, &other])["better"], better);
    }
    assert_eq!(run_json(&["store", "verify", &other, "--run"])["run"], 1);
}

#[test]
fn what_is_wrong_with_a_store_is_one_line_and_no_obstacle() {
    let folder = tempfile::tempdir().unwrap();
    let (_, place) = pushed(folder.path());
    let (fresh, library) = (folder.path().join("fresh.db"), folder.path().join("library"));
    let arguments = ["compile", WORKLOAD, "-o", text(&library), "--db", text(&fresh), "--store"];
    let goes_on = |place: &str, why: &str| {
        let output = run(&[&arguments[..], &[place]].concat());
        let told = stderr(&output);
        let lines: Vec<&str> = told.lines().filter(|line| line.starts_with("store ")).collect();
        assert!(output.status.success() && lines.len() == 1 && lines[0].contains(why), "{why}: {told}");
        assert!(told.contains("nothing is recorded for"), "{told}");
    };
    let path = entry(&place);
    let whole: Json = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let mut poisoned = whole.clone();
    *poisoned.pointer_mut("/winner/median_ns").unwrap() = 1.0.into();
    fs::write(&path, format!("{poisoned}\n")).unwrap();
    goes_on(&place, "is refused: 1 ns is faster than the machine can be");
    let verified = run(&["store", "verify", &place]);
    assert_eq!(verified.status.code(), Some(2));
    assert!(stderr(&verified).ends_with("1 winner refused (`--remove` removes them)\n"), "{}", stderr(&verified));
    fs::write(&path, &whole.to_string()[..300]).unwrap();
    goes_on(&place, "is refused: it is cut off");
    goes_on("http://127.0.0.1:1/store", "cannot read");
    goes_on(text(&library), "there is no store");
    let removed = run_json(&["store", "verify", &place, "--remove"]);
    assert_eq!((&removed["removed"], path.exists()), (&true.into(), false));

    let refused = |arguments: &[&str], why: &str| check_refused(&[&["store"][..], arguments].concat(), why);
    refused(&["verify"], "no store is named");
    refused(&["push", &place, "--db", "/nowhere/a.db"], "there is no database");
    refused(&["merge", &place, "https://host/store"], "connections are not encrypted");
    refused(&["merge", &place, "http://127.0.0.1:1/store"], "is read-only");
    let file = text(&fresh).to_owned();
    fs::write(&file, "").unwrap();
    refused(&["merge", &place, &file], "cannot write");
    check_refused(&["best", WORKLOAD, "--store", ""], "the name is empty");
}

#[test]
fn a_web_server_gives_a_store_out() {
    let Some(python) = tool("python3") else { return };
    let folder = tempfile::tempdir().unwrap();
    let (own, place) = pushed(folder.path());
    let serve = ["-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", &place];
    let mut server =
        Command::new(python).args(serve).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.split(' ').skip_while(|word| *word != "port").nth(1).expect("it says its port").to_owned();
    let address = format!("http://127.0.0.1:{port}");
    let fresh = text(&folder.path().join("fresh.db")).to_owned();
    let (ours, theirs) = (best(&own, &address), best(&fresh, &address));
    let pulled = run_json(&["store", "pull", &address, "--db", &fresh]);
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!((&theirs["best"]["config"], &theirs["best"]["store"]), (&ours["best"]["config"], &address.into()));
    assert_eq!(pulled["new"], 1);
}
