//! Devices and tuners as separate processes that can be killed: this test program, started again.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tilewright::{Database, Elsewhere, Note, Request, Session};
use tilewright_device::device::WorkerCommand;
use tilewright_search::Measure;

use crate::replay::{CLASS, Slow, fleet_with, hashed, recorded, serve_replay};

/// Environment variable with the role of a process: the name of the test to run.
pub const ROLE: &str = "TILEWRIGHT_TEST_ROLE";

/// Process that is killed on drop.
pub struct Process(Child);

impl Process {
    fn start(test: &str, words: &[&str]) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--quiet"]).env(ROLE, words.join(" "));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        Process(command.spawn().unwrap())
    }

    /// Starts a device with this name and lease; `mode` selects its outcomes and behaviour.
    pub fn device(url: &str, name: &str, mode: &str, trial: Duration, lease: Duration) -> Process {
        let [trial, lease] = [trial, lease].map(|time| time.as_micros().to_string());
        Process::start("process::as_a_device", &[url, name, mode, &trial, &lease])
    }

    /// Starts a tuner of a workload with this number of trials, database and lease; it counts trials.
    pub fn tuner(url: &str, database: &Path, trials: u64, lease: Duration, count: &Arc<AtomicU64>) -> Process {
        let words = [url, database.to_str().unwrap(), &trials.to_string(), &lease.as_micros().to_string()];
        let mut process = Process::start("process::as_a_tuner", &words);
        let (said, count) = (process.0.stdout.take().unwrap(), Arc::clone(count));
        std::thread::spawn(move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                count.fetch_add(u64::from(line == TRIAL), Ordering::Relaxed);
            }
        });
        process
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    pub fn signal(&self, name: &str) {
        let id = self.0.id().to_string();
        assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
    }

    /// Whether the process has succeeded; `None` while it runs.
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

/// Configuration that crashes the machine in the mode `poison`.
pub const POISON: &str = "[7,7,7]";

#[test]
fn as_a_device() {
    let Some(words) = role() else { return };
    let [url, name, mode, trial, lease] = &words[..] else { panic!("five words") };
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
    serve_replay(&fleet_with(url, time(lease)), name, time(trial), outcome, &AtomicBool::new(false));
}

fn time(micros: &str) -> Duration {
    Duration::from_micros(micros.parse().unwrap())
}

/// Workload of the tuners.
pub const WORKLOAD: &str = "matmul:m=64,n=64,k=64";

#[test]
fn as_a_tuner() {
    let Some(words) = role() else { return };
    let [url, database, trials, lease] = &words[..] else { panic!("four words") };
    let (session, request) = (session(Path::new(database)), request(trials.parse().unwrap()));
    let stop = AtomicBool::new(false);
    let note = |note: Note| match note {
        Note::Trial(_) => println!("{TRIAL}"),
        Note::Message(text) => eprintln!("{text}"),
        _ => {}
    };
    match tilewright_fleet::tune(&session, &fleet_with(url, time(lease)), &request, &stop, &note) {
        Ok(tuned) => assert!(tuned.recorded),
        // The test that waits for this process knows whether to expect the error.
        Err(error) => {
            eprintln!("a tuner has ended: {error}");
            std::process::exit(1);
        }
    }
}

/// Message of a tuner for each trial.
const TRIAL: &str = "a trial";

/// Makes a session with this database, which does not measure on this machine.
pub fn session(database: &Path) -> Session {
    let worker = WorkerCommand { program: "/nonexistent".into(), arguments: Vec::new() };
    Session::new(Database::new(Some(database)).unwrap(), worker)
}

fn request(trials: u64) -> Request {
    Request::parse(WORKLOAD).unwrap().trials(trials).race(false).search("random")
}

/// Tunes without faults, with `n_devices` devices that are never late.
pub fn tune_alone(database: &Path, trials: u64, n_devices: usize) {
    let start = || Ok(Box::new(Slow::new(Duration::ZERO, hashed)) as Box<dyn Measure>);
    let place =
        Elsewhere { class: CLASS, least_batch: 2 * n_devices, peak_gflops: None, is_emulated: false, start: &start };
    session(database).run_at(place, &request(trials), &AtomicBool::new(false), &()).unwrap();
}
