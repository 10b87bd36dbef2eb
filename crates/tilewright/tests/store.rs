//! Stores of winners that machines share.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value as Json, json};
use tilewright::{Caches, Database, Entry, SharedStore, Workload, target_name};
use tilewright_device::host;
use tilewright_ir::Target;
use tilewright_tune::record::RecordLine;
use tilewright_tune::{Task, TemplateSetting};

const WORKLOAD: &str = "matmul:m=64,n=64,k=64";

/// Record that won its race with a median of `median_ns`.
fn won(target: &str, threads: u32, config: &Json, median_ns: f64) -> Json {
    json!({
        "workload": WORKLOAD, "target": target, "template": "matmul", "threads": threads, "config": config,
        "outcome": {
            "class": "no_error", "median_ns": median_ns, "min_ns": median_ns, "spread": 0.1, "n_samples": 3,
            "stopped_early": false,
        },
        "seconds": {"build": 0.1, "run": 0.2, "verify": 0.3},
        "steps": "", "search": "random", "seed": 7, "trial": 0, "version": env!("CARGO_PKG_VERSION"),
        "toolchain": "LLVM 22", "unix_time": 1_800_000_000,
        "winner": {
            "median_ns": median_ns, "margin": 0.02, "runner_up": null, "gflops": 10.0, "verified": true,
            "version": env!("CARGO_PKG_VERSION"), "toolchain": "LLVM 22", "unix_time": 1_800_000_009,
        },
    })
}

fn entry(record: &Json) -> Entry {
    Entry::new(RecordLine::parse(record.to_string().as_bytes()).unwrap()).unwrap()
}

fn here() -> (Workload, Target, Task) {
    let (workload, target) = (Workload::parse(WORKLOAD).unwrap(), host::target());
    (workload, target, task(1))
}

fn task(n_threads: usize) -> Task {
    let (workload, target) = (Workload::parse(WORKLOAD).unwrap(), host::target());
    Task::new(TemplateSetting { workload, target, n_threads }, Some("matmul")).unwrap()
}

/// Winner of this machine with this many threads.
fn won_here(threads: u32) -> Entry {
    let name = target_name(&host::target(), Caches::Warm);
    entry(&won(&name, threads, &config(&task(threads as usize), 1), 5e4))
}

/// Configurations of this machine's space.
fn config(task: &Task, at: u128) -> Json {
    task.space.config_to_json(&task.space.config_at(at))
}

fn store(place: &Path) -> SharedStore {
    SharedStore::new(place.to_str().unwrap()).unwrap()
}

/// Result of a look-up without any database: the configuration, and the notes.
fn look_up(place: &str) -> (Option<Json>, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::new(Some(&folder.path().join("none.db"))).unwrap();
    let database = database.before(SharedStore::of_user(Some(place)).unwrap());
    let records = database.records().unwrap();
    let (workload, target, _) = here();
    let (choice, _) = records.known(&workload, &target, 1, Caches::Warm, None).unwrap();
    (choice.ok().map(|choice| choice.task.space.config_to_json(&choice.config)), records.notes())
}

fn entries(place: &Path) -> Vec<Entry> {
    store(place).winners(None).unwrap()
}

/// Path of the only entry of a store.
fn only_entry(place: &Path) -> PathBuf {
    let mut folders = vec![place.to_owned()];
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            match path.is_dir() {
                true => folders.push(path),
                false if path.extension().is_some() => return path,
                false => {}
            }
        }
    }
    panic!("there is no entry in {}", place.display())
}

#[test]
fn two_stores_merge_to_the_better_of_each() {
    let folder = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| folder.path().join(name));
    let target = "x86_64/elsewhere/512";
    let of = |threads: u32, m: u32, ns: f64| entry(&won(target, threads, &json!({"m": m}), ns));
    store(&a).push(vec![of(1, 1, 5e3), of(2, 1, 9e3), of(3, 1, 9e3)]).unwrap();
    store(&b).push(vec![of(1, 2, 6e3), of(2, 2, 8e3), of(4, 2, 9e3)]).unwrap();
    for (from, to) in [(&a, &b), (&b, &a)] {
        store(to).push(entries(from)).unwrap();
    }
    let found = |place: &Path| {
        let mut found: Vec<(u32, f64, Json)> = entries(place)
            .into_iter()
            .map(|entry| (entry.line.record.threads, entry.median_ns(), entry.line.record.config["m"].clone()))
            .collect();
        found.sort_by_key(|(threads, ..)| *threads);
        found
    };
    let best = [(1, 5e3, 1), (2, 8e3, 2), (3, 9e3, 1), (4, 9e3, 2)].map(|(threads, ns, m)| (threads, ns, json!(m)));
    assert_eq!((found(&a), found(&b)), (best.to_vec(), best.to_vec()));
    let again = store(&a).push(entries(&b)).unwrap();
    assert_eq!((again.read, again.better), (4, 0));
}

#[test]
fn versions_of_a_space_stay_beside_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, ns: f64| entry(&won("x86_64/elsewhere/512", 1, &json!({name: 1}), ns));
    for winner in [of("new", 5e3), of("old", 4e3), of("old", 4500.0)] {
        store(folder.path()).push(vec![winner]).unwrap();
    }
    let times: Vec<f64> = entries(folder.path()).iter().map(Entry::median_ns).collect();
    assert_eq!(times, [5e3, 4e3]);
}

#[test]
fn a_winner_is_found_and_what_cannot_be_true_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("store");
    let (text, (_, target, task)) = (place.to_str().unwrap(), here());
    let (name, good) = (target_name(&target, Caches::Warm), config(&task, 1));
    assert!(look_up(text).1[0].ends_with("there is no store (`tilewright store push` makes one) (it is not used)"));
    store(&place).push(vec![entry(&won(&name, 1, &good, 5e4))]).unwrap();
    assert_eq!(look_up(text), (Some(good.clone()), vec![]));

    // An entry that `push` would refuse is written by hand.
    let path = only_entry(&place);
    let whole = fs::read_to_string(&path).unwrap();
    let with = |pointer: &str, value: Json| {
        let mut line: Json = serde_json::from_str(&whole).unwrap();
        *line.pointer_mut(pointer).unwrap() = value;
        format!("{line}\n")
    };
    for (text_of_entry, why) in [
        (with("/winner/median_ns", json!(1.0)), "1 ns is faster than the machine can be"),
        (with("/config", json!({"mr": 1})), "its configuration is not of the space that it names"),
        (with("/winner/verified", json!(false)), "another release checked it"),
        (with("/winner/version", json!("0.0.1")), "another release checked it"),
        (with("/workload", json!("matmul:m=65,n=64,k=64")), "line 1 is of another entry"),
        (with("/threads", json!(7)), "line 1 is of another entry"),
        (with("/space", json!("../../etc")), "the version of its space is malformed"),
        (with("/winner", json!(null)), "it has no winner"),
        (whole[..whole.len() / 2].to_owned(), "it is cut off"),
        (whole.trim_end().to_owned(), "it is cut off"),
        (String::new(), "it is cut off"),
        ("\n".to_owned(), "it is empty"),
        (format!("{whole}{{\n"), "line 2: EOF"),
    ] {
        fs::write(&path, &text_of_entry).unwrap();
        let (found, notes) = look_up(text);
        assert!(found.is_none() && notes.len() == 1 && notes[0].contains(why), "{why}: {notes:?}");
        assert!(!notes[0].contains('\n'), "{notes:?}");
    }
    // A good entry replaces it.
    store(&place).push(vec![entry(&won(&name, 1, &good, 5e4))]).unwrap();
    assert_eq!(look_up(text), (Some(good), vec![]));
}

#[test]
fn whole_stores_are_checked_and_mended() {
    let folder = tempfile::tempdir().unwrap();
    let mut too_fast = won_here(9);
    too_fast.line.winner.as_mut().unwrap().median_ns = 1e-3;
    let offered = (1..4).map(won_here).chain([too_fast]).collect();
    let pushed = store(folder.path()).push(offered).unwrap();
    assert_eq!((pushed.read, pushed.better, pushed.refused), (4, 3, 1));
    let path = only_entry(folder.path());
    fs::write(&path, "{}\n").unwrap();
    let found = store(folder.path()).verify(None, false).unwrap();
    assert_eq!((found.read, found.refused.len(), found.is_mended), (2, 1, false));
    assert!(found.refused[0].contains("missing field"), "{:?}", found.refused);
    assert!(store(folder.path()).verify(None, true).unwrap().is_mended && !path.exists());
    let found = store(folder.path()).verify(None, false).unwrap();
    assert_eq!((found.read, found.refused.len()), (2, 0));
}

#[test]
fn folders_of_something_else_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let winner = || vec![entry(&won("x86_64/elsewhere/512", 1, &json!({"m": 1}), 5e3))];
    fs::write(folder.path().join("thesis.tex"), "").unwrap();
    let refused = |place: &str| SharedStore::new(place).and_then(|store| store.push(winner())).unwrap_err().to_string();
    let path = folder.path().to_str().unwrap();
    assert!(refused(path).contains("holds something else"));
    assert_eq!(fs::read_dir(path).unwrap().count(), 1);
    fs::write(folder.path().join("tilewright-store"), "tilewright store 2\n").unwrap();
    assert!(refused(path).contains("a newer version of tilewright wrote it"));
    assert!(refused("http://127.0.0.1:1/x").contains("is read-only (give the folder that is served)"));
    for (place, why) in [
        ("", "the name is empty"),
        ("http://", "this is no address"),
        ("http://a b", "this is no address"),
        ("https://host/x", "connections are not encrypted"),
    ] {
        assert!(refused(place).contains(why), "{place}: {}", refused(place));
    }
    let file = folder.path().join("thesis.tex");
    assert!(refused(file.to_str().unwrap()).contains("thesis.tex"));
}

#[test]
fn who_reads_beside_who_writes_sees_whole_entries() {
    let folder = tempfile::tempdir().unwrap();
    let target = "x86_64/elsewhere/512";
    // Each is better than the previous one, and has another length.
    let push = |at: u32| {
        let long = "x".repeat((at * 7919 % 3000) as usize);
        let record = won(target, 1, &json!({"m": long}), 1e6 - f64::from(at));
        store(folder.path()).push(vec![entry(&record)]).unwrap();
    };
    push(0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let (mut last, mut n) = (f64::INFINITY, 0);
                    while !is_over.load(Ordering::Relaxed) {
                        let store = store(folder.path());
                        store
                            .visit(&|_| true, &mut |path, winners| {
                                let winners = winners.unwrap_or_else(|why| panic!("{path}: {why}"));
                                let ns = winners[0].median_ns();
                                assert!(winners.len() == 1 && ns <= last, "{ns} after {last}");
                                (last, n) = (ns, n + 1);
                                Ok(())
                            })
                            .unwrap();
                    }
                    n
                })
            })
            .collect();
        // Two concurrent writers lose none of each other's entries.
        scope.spawn(|| (1..60).step_by(2).for_each(push));
        (2..60).step_by(2).for_each(push);
        is_over.store(true, Ordering::Relaxed);
        assert!(readers.into_iter().map(|reader| reader.join().unwrap()).sum::<u32>() > 0);
    });
    let times: Vec<f64> = entries(folder.path()).iter().map(Entry::median_ns).collect();
    assert_eq!(times, [1e6 - 59.0]);
}

/// Behaviour of a server, besides serving the files of a folder.
#[derive(Clone, Copy)]
enum Answers {
    Whole,
    /// Half of each entry.
    Cut,
    /// Beginning of a reply, and then nothing.
    Silent,
    /// An error.
    Failing,
    /// Bytes that are no reply.
    Noise,
}

/// Address of a server of a folder, which runs as long as the process.
fn serve(folder: &Path, answers: Answers) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/a/store/", listener.local_addr().unwrap());
    let folder = folder.to_owned();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, folder) = (stream.unwrap(), folder.clone());
            std::thread::spawn(move || {
                let mut request = Vec::new();
                let mut buffer = [0; 1024];
                while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                    match stream.read(&mut buffer) {
                        Ok(0) | Err(_) => return,
                        Ok(n) => request.extend_from_slice(&buffer[..n]),
                    }
                }
                let request = String::from_utf8_lossy(&request).into_owned();
                let path = request.split(' ').nth(1).unwrap().strip_prefix("/a/store/").unwrap().to_owned();
                let (status, body) = match fs::read(folder.join(&path)) {
                    _ if matches!(answers, Answers::Failing) => ("500 Oh", Vec::new()),
                    Ok(body) => ("200 OK", body),
                    Err(_) => ("404 Not Found", b"nothing".to_vec()),
                };
                let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                let answer = [head.as_bytes(), &body].concat();
                let sent = match answers {
                    Answers::Whole | Answers::Failing => &answer[..],
                    Answers::Cut if path.ends_with(".jsonl") => &answer[..answer.len() - body.len() / 2],
                    Answers::Cut => &answer[..],
                    Answers::Silent => &answer[..12],
                    Answers::Noise => &[0xff, 0x00, b'\n', b'\r', 0x80, b'H', b'\n'],
                };
                let _ = stream.write_all(sent);
                if matches!(answers, Answers::Silent) {
                    std::thread::sleep(std::time::Duration::from_secs(60));
                }
            });
        }
    });
    address
}

#[test]
fn a_server_is_read_and_one_that_fails_is_told_of_once() {
    let folder = tempfile::tempdir().unwrap();
    let good = config(&task(1), 1);
    store(folder.path()).push((1..5).map(won_here).collect()).unwrap();
    let address = serve(folder.path(), Answers::Whole);
    assert_eq!(look_up(&address), (Some(good), vec![]));
    let served = SharedStore::new(&address).unwrap();
    assert_eq!(served.winners(None).unwrap().len(), 4);
    assert_eq!(served.verify(None, false).unwrap().read, 4);
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refusing = format!("http://{unused}/");
    let empty = tempfile::tempdir().unwrap();
    for (address, why) in [
        (serve(folder.path(), Answers::Cut), "cannot read"),
        (serve(folder.path(), Answers::Silent), "timeout"),
        (serve(folder.path(), Answers::Failing), "the server answers 500"),
        (serve(folder.path(), Answers::Noise), "cannot read"),
        (serve(empty.path(), Answers::Whole), "there is no store"),
        (refusing, "cannot read"),
    ] {
        let (found, notes) = look_up(&address);
        assert!(found.is_none() && notes.len() == 1, "{why}: {notes:?}");
        assert!(notes[0].contains(why) && notes[0].ends_with("(it is not used)"), "{why}: {notes:?}");
    }
}
