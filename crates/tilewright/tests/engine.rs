//! Runs of the library on commands: one engine serves every kind of subject.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use tilewright::{Command, Database, Error, Note, Observer, Request, Session, Tuned};
use tilewright_device::device::WorkerCommand;

fn session(folder: &tempfile::TempDir) -> Session {
    let database = Database::new(Some(&folder.path().join("records.db"))).unwrap();
    Session::new(database, WorkerCommand { program: "/nonexistent".into(), arguments: Vec::new() })
}

/// Request to minimise a number that `echo` prints.
fn request(trials: u64) -> Request {
    let command = Command::new("echo {x}").parameter("x", "1..8").metric("[0-9]+");
    Request::new(command).search("random").trials(trials)
}

fn run(session: &Session, request: &Request, observer: &dyn Observer) -> Result<Tuned, Error> {
    session.run(request, &AtomicBool::new(false), observer)
}

/// Messages of a run.
#[derive(Default)]
struct Messages(Mutex<Vec<String>>);

impl Observer for Messages {
    fn message(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

impl Messages {
    fn has(&self, part: &str) -> bool {
        self.0.lock().unwrap().iter().any(|text| text.contains(part))
    }
}

#[test]
fn trials_of_another_process_enter_the_race() {
    let folder = tempfile::tempdir().unwrap();
    let (session, messages, is_first) = (session(&folder), Messages::default(), AtomicBool::new(true));
    let observer = |note: Note| {
        if matches!(note, Note::Search(..)) && is_first.swap(false, Ordering::Relaxed) {
            // As in another process.
            let all = request(8).race(false);
            assert_eq!(run(&session, &all, &()).unwrap().best.unwrap().config["x"], 1);
        }
        messages.note(note);
    };
    // Of eight configurations one is measured: whichever it is, the file has faster ones.
    let tuned = run(&session, &request(1).seed(1), &observer).unwrap();
    assert!(messages.has("another process has recorded"), "{:?}", messages.0);
    let best = tuned.best.unwrap();
    assert!(best.is_confirmed && best.config["x"] == 1, "{best:?}");
}

#[test]
fn a_run_with_nothing_left_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let session = session(&folder);
    let messages = Messages::default();
    let tuned = run(&session, &request(8).race(false), &messages).unwrap();
    assert!(tuned.race.is_none() && tuned.new_trials == 8 && !messages.has("nothing to search"));
    let tuned = run(&session, &request(8), &messages).unwrap();
    assert!(
        messages.has("all trials asked for are recorded already: there is nothing to search; the leaders have yet")
    );
    assert!(tuned.race.is_some() && tuned.new_trials == 0);
    // The race has a recorded winner now.
    let messages = Messages::default();
    let tuned = run(&session, &request(8), &messages).unwrap();
    assert!(messages.has("recorded already") && !messages.has("nothing to search"), "{:?}", messages.0);
    let best = tuned.best.unwrap();
    assert!(
        best.is_confirmed && best.value == Some(1.0) && best.commands.unwrap().contains("echo 1"),
        "{:?}",
        best.config
    );
}

#[test]
fn what_does_not_go_with_a_subject_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let session = session(&folder);
    let check = |request: Request, expected: &str| {
        let error = run(&session, &request, &()).unwrap_err();
        assert!(error.is_input() && error.to_string().contains(expected), "{error}");
    };
    check(request(8).template("blocked"), "a template means nothing for a command");
    check(request(8).device("opencl"), "a device means nothing for a command");
    check(request(8).guesses(false), "a run without guesses means nothing for a command");
    check(request(8).run_timeout(std::time::Duration::ZERO), "the run timeout is 0 s");
    check(
        Request::parse("matmul-256").unwrap().memory_bytes(1 << 30),
        "a limit of memory means nothing for a workload",
    );
    let error =
        session.run_together(&[(request(8), 1.0)], std::time::Duration::from_secs(1), &AtomicBool::new(false), &());
    assert!(error.unwrap_err().to_string().contains("not for a workload"));
}
