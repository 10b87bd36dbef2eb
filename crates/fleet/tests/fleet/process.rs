//! Devices and tuners as processes of their own, which can be killed: this test program, started anew.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tilewright::{Database, Session, TuneRequest};
use tilewright_device::device::WorkerCommand;

use crate::replay::{fleet, hashed, recorded, serve_replay};

/// Says what a process is, in words; the test of that name is it.
const ROLE: &str = "TILEWRIGHT_TEST_ROLE";

/// A process, killed with this.
pub struct Process(Child);

impl Process {
    fn start(test: &str, words: &[&str]) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--quiet"]).env(ROLE, words.join(" "));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Process(command.spawn().unwrap())
    }

    /// A device of this name; `mode` is what it knows, and what it does.
    pub fn device(url: &str, name: &str, mode: &str, trial_ms: u64) -> Process {
        Process::start("process::as_a_device", &[url, name, mode, &trial_ms.to_string()])
    }

    /// A tuner of a workload up to so many trials, which has its records there.
    pub fn tuner(url: &str, database: &Path, trials: u64) -> Process {
        Process::start("process::as_a_tuner", &[url, database.to_str().unwrap(), &trials.to_string()])
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    pub fn signal(&self, name: &str) {
        let id = self.0.id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
    }

    /// Whether it has ended, and well.
    pub fn ended(&mut self) -> Option<bool> {
        self.0.try_wait().unwrap().map(|status| status.success())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn role() -> Option<Vec<String>> {
    Some(std::env::var(ROLE).ok()?.split(' ').map(str::to_owned).collect())
}

/// What takes the machine along in the mode `poison`.
pub const POISON: &str = "[7,7,7]";

#[test]
fn as_a_device() {
    let Some(words) = role() else { return };
    let [url, name, mode, trial] = &words[..] else { panic!("four words") };
    let outcome = match mode.as_str() {
        "hashed" => hashed,
        "poison" => |steps: &str| {
            if steps == POISON {
                std::process::abort();
            }
            recorded(steps)
        },
        _ => recorded,
    };
    let trial = Duration::from_millis(trial.parse().unwrap());
    serve_replay(&fleet(url), name, trial, outcome, &AtomicBool::new(false));
}

/// What tuners tune.
pub const WORKLOAD: &str = "matmul:m=64,n=64,k=64";

#[test]
fn as_a_tuner() {
    let Some(words) = role() else { return };
    let [url, database, trials] = &words[..] else { panic!("three words") };
    let database = Database::named(Path::new(database), "--db").unwrap();
    // Nothing is measured here.
    let session = Session::new(database, WorkerCommand { program: "/nonexistent".into(), arguments: Vec::new() });
    let request = TuneRequest {
        trials: Some(trials.parse().unwrap()),
        race: false,
        search: "random".to_owned(),
        ..TuneRequest::parse(WORKLOAD).unwrap()
    };
    let stop = AtomicBool::new(false);
    let tuned = tilewright_fleet::tune(&session, &fleet(url), &request, &stop, &|_| ()).unwrap();
    assert!(tuned.recorded);
}
