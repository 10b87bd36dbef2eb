//! Program that forgets `serve_if_worker`: its worker refuses to open a session, and starts no workers of its
//! own. This is not a `#[test]`, as the process under test is a program with its own arguments: this one.

use std::process::{Command, ExitCode};

use tilewright::Session;

/// Argument by which a program's workers are started.
const WORKER: &str = "--tilewright-worker";

fn main() -> ExitCode {
    let folder = tempfile::tempdir().expect("a folder for the records");
    let session = Session::open(folder.path().join("records.db"));
    if std::env::args().nth(1).as_deref() == Some(WORKER) {
        // Behaviour of a program without the call when it is started as a worker.
        return match session {
            Ok(_) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::from(3)
            }
        };
    }
    session.expect("a program opens a session");
    let this = std::env::current_exe().expect("a test has a path");
    let worker = Command::new(this).arg(WORKER).output().expect("the program starts");
    let told = String::from_utf8_lossy(&worker.stderr);
    assert_eq!(worker.status.code(), Some(3), "a worker opened a session");
    assert!(told.contains("call `tilewright::serve_if_worker()` first in `main`"), "{told}");
    println!("worker guard: 1 passed, 0 failed");
    ExitCode::SUCCESS
}
