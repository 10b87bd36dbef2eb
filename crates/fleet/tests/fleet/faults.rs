//! Fault tolerance of a fleet: regardless of what is killed, nothing is lost or duplicated, and a search
//! makes the same proposals as undisturbed.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright::{Database, Workload};
use tilewright_device::host;
use tilewright_fleet::nats::{Client, Servers};
use tilewright_fleet::{LEASE, Remote, RunRecords};
use tilewright_search::{Measure, Next, Outcome, Subject};
use tilewright_tune::{Record, Validator};

use crate::broker::{Broker, version};
use crate::process::{POISON, Process, ROLE, WORKLOAD, tune_alone};
use crate::replay::{
    CLASS, Slow, assignment, describe, fleet_with, hashed, proposals, proposals_counted, recorded, remote, space,
};

/// Trials of a run.
const TRIALS: u64 = 400;
/// Devices of a run, time of a trial on them, and lease of a task.
const DEVICES: usize = 3;
const TRIAL: Duration = Duration::from_micros(800);
const SHORT: Duration = Duration::from_millis(300);
/// Number of concurrent runs, which mostly wait for leases.
const RUNS_AT_A_TIME: usize = 4;
/// Time after which a run counts as hanging.
const MOST_TIME: Duration = Duration::from_secs(60);

/// Ways to cut devices off from the server while they keep running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Partition {
    /// All packets are dropped by the system; this process has its own network namespace.
    Nft,
    /// The processes are stopped.
    Stop,
}

/// Sets up a network of only loopback, in which connections to a server at an address can be cut.
const NETWORK: &str = "ip link set lo up && nft 'add table inet tw; \
    add set inet tw cut { type ipv4_addr . inet_service; }; \
    add chain inet tw in { type filter hook input priority 0; }; \
    add rule inet tw in ip daddr . tcp dport @cut drop; add rule inet tw in ip saddr . tcp sport @cut drop'";

/// Repair of a fault.
enum Mended {
    Device(usize, DeviceFault),
    Server,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeviceFault {
    Killed,
    Stopped,
    CutOff,
}

/// Fleet with injected faults.
struct Disturbed {
    broker: Broker,
    devices: Vec<Process>,
    partition: Partition,
    mode: &'static str,
    rng: Xoshiro256PlusPlus,
    begun: Instant,
    /// Current faults, and the times at which they end.
    open: Vec<(Instant, Mended)>,
    /// Log of the faults.
    done: Vec<String>,
}

impl Disturbed {
    fn new(seed: u64, partition: Partition, mode: &'static str) -> Option<Disturbed> {
        let broker = if partition == Partition::Nft { Broker::open() } else { Broker::start() }?;
        let (rng, begun) = (Xoshiro256PlusPlus::seed_from_u64(seed), Instant::now());
        let mut fleet =
            Disturbed { broker, devices: Vec::new(), partition, mode, rng, begun, open: Vec::new(), done: Vec::new() };
        fleet.devices = (0..DEVICES).map(|at| fleet.device(at)).collect();
        Some(fleet)
    }

    /// Address at which a device reaches the server.
    fn address(&self, at: usize) -> Ipv4Addr {
        match self.partition {
            Partition::Nft => Ipv4Addr::new(127, 0, 0, 10 + at as u8),
            Partition::Stop => Ipv4Addr::LOCALHOST,
        }
    }

    fn device(&self, at: usize) -> Process {
        let url = format!("nats://{}:{}", self.address(at), self.broker.port());
        Process::device(&url, &format!("device-{at}"), self.mode, TRIAL, SHORT)
    }

    /// Adds a device to the set whose packets are dropped, or removes it.
    fn cut(&self, what: &str, at: usize) {
        let element = format!("{{ {} . {} }}", self.address(at), self.broker.port());
        let cut = Command::new("nft").args([what, "element", "inet", "tw", "cut", &element]).status().unwrap();
        assert!(cut.success());
    }

    /// Injects a fault into a healthy part.
    fn disturb(&mut self) {
        let pause = Duration::from_millis(self.rng.random_range(20..700));
        let at = self.rng.random_range(0..DEVICES);
        let is_device_ill = self.open.iter().any(|(_, ill)| matches!(ill, Mended::Device(ill, _) if *ill == at));
        let is_server_ill = self.open.iter().any(|(_, ill)| matches!(ill, Mended::Server));
        let fault = self.rng.random_range(0..8);
        let is_ill = if fault < 6 { is_device_ill } else { is_server_ill };
        if is_ill {
            return;
        }
        let (what, mended) = match fault {
            0 | 1 => {
                self.devices[at].kill();
                (format!("device {at} killed"), Mended::Device(at, DeviceFault::Killed))
            }
            2 | 3 => {
                self.devices[at].signal("-STOP");
                (format!("device {at} stopped"), Mended::Device(at, DeviceFault::Stopped))
            }
            4 | 5 => {
                match self.partition {
                    Partition::Nft => self.cut("add", at),
                    Partition::Stop => self.devices[at].signal("-STOP"),
                }
                (format!("device {at} cut off"), Mended::Device(at, DeviceFault::CutOff))
            }
            6 => {
                self.broker.kill();
                ("server killed".to_owned(), Mended::Server)
            }
            _ => {
                self.broker.kill();
                let _ = std::fs::remove_dir_all(self.broker.store());
                ("server killed, its store deleted".to_owned(), Mended::Server)
            }
        };
        self.done.push(format!("{:.2} s: {what} for {:.2} s", self.seconds(), pause.as_secs_f64()));
        self.open.push((Instant::now() + pause, mended));
    }

    /// Repairs faults whose time is over.
    fn mend(&mut self) {
        let now = Instant::now();
        let (due, open): (Vec<_>, Vec<_>) = std::mem::take(&mut self.open).into_iter().partition(|(at, _)| *at <= now);
        self.open = open;
        for (_, mended) in due {
            match mended {
                Mended::Device(at, DeviceFault::Killed) => self.devices[at] = self.device(at),
                Mended::Device(at, DeviceFault::CutOff) if self.partition == Partition::Nft => self.cut("delete", at),
                Mended::Device(at, _) => self.devices[at].signal("-CONT"),
                Mended::Server => self.broker.begin(),
            }
        }
    }

    fn seconds(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Numbers of trials at which faults are injected.
    fn moments(&mut self) -> Vec<u64> {
        let mut moments: Vec<u64> = (0..6).map(|_| self.rng.random_range(1..TRIALS)).collect();
        moments.sort_unstable_by(|a, b| b.cmp(a));
        moments
    }

    /// Injects faults at these numbers of trials, until the run is over.
    fn go_on(&mut self, count: &AtomicU64, mut also: impl FnMut(&mut Disturbed) -> bool) {
        let mut moments = self.moments();
        while !also(self) {
            assert!(self.begun.elapsed() < MOST_TIME, "it hangs: {}", self.done.join("; "));
            while moments.last().is_some_and(|moment| *moment <= count.load(Ordering::Relaxed)) {
                moments.pop();
                self.disturb();
            }
            self.mend();
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Checks that the server has no tasks left once all faults are repaired.
    fn check_rest(mut self, seed: u64) -> String {
        while !self.open.is_empty() {
            self.mend();
            std::thread::sleep(Duration::from_millis(2));
        }
        self.devices.clear();
        let until = Instant::now() + Duration::from_secs(5);
        while n_left(&self.broker) > 0 {
            assert!(Instant::now() < until, "seed {seed}: tasks are left: {}", self.done.join("; "));
            std::thread::sleep(Duration::from_millis(20));
        }
        format!("{:.1} s: {}", self.seconds(), self.done.join("; "))
    }
}

/// Number of tasks on the server.
fn n_left(broker: &Broker) -> u64 {
    let mut client = Client::connect(&Servers::parse(&broker.url()).unwrap(), None, "look").unwrap();
    let info = client.request("$JS.API.STREAM.INFO.TW_TASKS", b"", Duration::from_secs(5)).unwrap().unwrap();
    let info: serde_json::Value = serde_json::from_slice(&info.payload).unwrap();
    // If the store was deleted at the very end, there is no stream.
    let is_deleted = info["error"]["code"] == 404;
    info["state"]["messages"].as_u64().unwrap_or_else(|| if is_deleted { 0 } else { panic!("{info}") })
}

/// Checks a run whose tuner is not killed: it makes the same proposals, batch by batch, as a local one.
fn check_run(seed: u64, partition: Partition) -> Option<String> {
    let alone = proposals(&mut Slow::new(Duration::ZERO, recorded), "genetic", TRIALS, 2 * DEVICES);
    let mut disturbed = Disturbed::new(seed, partition, "recorded")?;
    let fleet = fleet_with(&disturbed.broker.url(), SHORT);
    let count = AtomicU64::new(0);
    let together = std::thread::scope(|scope| {
        let tuner = scope.spawn(|| {
            let mut remote = remote(&fleet, &format!("seed{seed}"), DEVICES);
            proposals_counted(&mut remote, "genetic", TRIALS, 2 * DEVICES, &count)
        });
        // The end of the run needs the server, whose faults are repaired meanwhile.
        disturbed.go_on(&count, |_| tuner.is_finished());
        tuner.join().unwrap()
    });
    assert_eq!(alone, together, "seed {seed}: {}", disturbed.done.join("; "));
    Some(disturbed.check_rest(seed))
}

/// Reads the records of a run from a database.
fn records(path: &Path) -> Vec<Record> {
    let store = Database::new(Some(path)).unwrap().open_existing().unwrap();
    let target = format!("{}@{CLASS}", host::target().name());
    let operator = Workload::parse(WORKLOAD).unwrap();
    let validators = |template: &str| Validator::new(&operator, &target, 1, template, None);
    store.trials_of(&operator.to_string(), &target, 1, None, &validators).unwrap().0
}

/// Checks a run whose tuner is killed as well: in the end it has the trials of an undisturbed run, each once,
/// and each names the device that measured it.
fn check_run_of_tuners(seed: u64, partition: Partition) -> Option<String> {
    let mut disturbed = Disturbed::new(seed, partition, "hashed")?;
    let (path, url) = (disturbed.broker.folder().join("records.db"), disturbed.broker.url());
    let undisturbed = disturbed.broker.folder().join("undisturbed.db");
    tune_alone(&undisturbed, TRIALS, DEVICES);
    let count = Arc::default();
    let start = |count: &Arc<AtomicU64>| Process::tuner(&url, &path, TRIALS, SHORT, count);
    let mut deaths: Vec<u64> = (0..2).map(|_| disturbed.rng.random_range(1..TRIALS)).collect();
    let (mut tuner, mut n_faults, mut n_starts) = (start(&count), 0, 1);
    disturbed.begun = Instant::now();
    disturbed.go_on(&count, |disturbed| {
        match tuner.ended() {
            Some(true) => return true,
            Some(false) => {
                // A tuner does not start without a server or devices.
                let is_ill = !disturbed.open.is_empty() || disturbed.done.len() > n_faults;
                assert!(is_ill && n_starts < 100, "a tuner ends without a reason: {}", disturbed.done.join("; "));
            }
            None if deaths.iter().any(|death| *death <= count.load(Ordering::Relaxed)) => {
                deaths.retain(|death| *death > count.load(Ordering::Relaxed));
                tuner.kill();
                disturbed.done.push(format!("{:.2} s: tuner killed", disturbed.seconds()));
            }
            None => return false,
        }
        // A tuner that starts during a fault may fail because of it later.
        let is_amiss = usize::from(!disturbed.open.is_empty());
        (n_faults, n_starts) = (disturbed.done.len().saturating_sub(is_amiss), n_starts + 1);
        tuner = start(&count);
        false
    });
    let what = disturbed.done.join("; ");
    let (found, expected) = (records(&path), records(&undisturbed));
    let steps = |records: &[Record]| {
        let mut steps: Vec<String> = records.iter().map(|record| record.steps.clone()).collect();
        steps.sort();
        steps
    };
    assert_eq!(steps(&found), steps(&expected), "seed {seed}: {what}");
    let mut n_struck = 0;
    for record in &found {
        // A candidate is given up when a machine vanishes with it for the second time.
        let is_struck =
            matches!(&record.outcome, Outcome::Failed { message, .. } if message.starts_with("two machines"));
        n_struck += usize::from(is_struck);
        assert!(is_struck || record.outcome == hashed(&record.steps), "seed {seed}: {record:?}: {what}");
        let device = record.conditions.device.as_deref();
        assert_eq!(device.is_some_and(|device| device.starts_with("device-")), !is_struck, "seed {seed}: {record:?}");
    }
    assert!(2 * n_struck <= disturbed.done.len(), "seed {seed}: {n_struck} were given up: {what}");
    Some(disturbed.check_rest(seed))
}

/// Checks runs with faults, every second one with faults of its tuner as well.
fn check_runs(partition: Partition) {
    let n = std::env::var("TILEWRIGHT_CASES").map_or(20, |n| n.parse().expect("a number of runs"));
    let Some(version) = version() else { return };
    let (begun, next) = (Instant::now(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..RUNS_AT_A_TIME {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= n {
                        return;
                    }
                    let check = if seed % 2 == 0 { check_run } else { check_run_of_tuners };
                    let Some(done) = check(seed, partition) else { return };
                    println!("seed {seed}: {done}");
                }
            });
        }
    });
    let how = match partition {
        Partition::Nft => "nft drops their packets",
        Partition::Stop => "their processes are stopped, as there is no network of their own with nft",
    };
    let seconds = begun.elapsed().as_secs_f64();
    println!("{n} runs of {TRIALS} trials with {version} in {seconds:.1} s; devices are cut off: {how}");
}

/// Set `TILEWRIGHT_CASES=200` for a long run.
#[test]
fn what_is_killed_changes_nothing() {
    let in_network = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["-n", "sh", "-c", &format!("{NETWORK} && {script}")]);
        command
    };
    let is_possible = in_network("true").output().is_ok_and(|output| output.status.success());
    if !is_possible {
        return check_runs(Partition::Stop);
    }
    let mut command = in_network("exec \"$0\" --exact faults::in_a_network_of_its_own --nocapture");
    let ended = command.arg(std::env::current_exe().unwrap()).env(ROLE, "runs").status().unwrap();
    assert!(ended.success());
}

#[test]
fn in_a_network_of_its_own() {
    if std::env::var(ROLE).is_ok_and(|role| role == "runs") {
        check_runs(Partition::Nft);
    }
}

/// Starts a device with short trials and leases.
fn device(broker: &Broker, at: usize, mode: &str) -> Process {
    let (trial, lease) = (Duration::from_millis(15), Duration::from_secs(1));
    Process::device(&broker.url(), &format!("device-{at}"), mode, trial, lease)
}

#[test]
fn a_run_that_ends_without_a_server_leaves_nothing() {
    let Some(mut broker) = Broker::start() else { return };
    let mut here = device(&broker, 0, "hashed");
    let fleet = fleet_with(&broker.url(), Duration::from_secs(1));
    let mut remote = remote(&fleet, "end", 1);
    here.kill();
    let space = space();
    let subject = Subject::described(&space, &describe);
    let candidates: Vec<_> = (0..8).map(|at| subject.candidate(space.config_at(at))).collect();
    remote.submit(&candidates);
    let until = Instant::now() + Duration::from_secs(5);
    while n_left(&broker) == 0 {
        assert!(Instant::now() < until, "no task came");
        std::thread::sleep(Duration::from_millis(20));
    }
    broker.kill();
    std::thread::scope(|scope| {
        scope.spawn(|| drop(remote));
        std::thread::sleep(Duration::from_millis(500));
        broker.begin();
    });
    assert_eq!(n_left(&broker), 0);
}

/// A killed server may lose a stream's last sequence number, but not the position of a consumer.
#[test]
fn a_server_that_counts_anew_delivers_all_results() {
    let Some(mut broker) = Broker::start() else { return };
    let _here = device(&broker, 0, "hashed");
    let fleet = fleet_with(&broker.url(), Duration::from_secs(1));
    let mut remote = remote(&fleet, "anew", 1);
    let space = space();
    let subject = Subject::described(&space, &describe);
    let until = Instant::now() + Duration::from_secs(40);
    for (from, to) in [(0, 24), (24, 32)] {
        let candidates: Vec<_> = (from..to).map(|at| subject.candidate(space.config_at(at))).collect();
        let numbers = remote.submit(&candidates);
        for n_done in 0..to - from {
            while !matches!(remote.next(None, Duration::from_millis(50)).unwrap(), Next::Done(..)) {
                assert!(Instant::now() < until, "{n_done} results of {numbers:?} came");
            }
        }
        remote.recorded(numbers.end);
        while n_left(&broker) > 0 {
            assert!(Instant::now() < until, "tasks are left");
            std::thread::sleep(Duration::from_millis(20));
        }
        broker.kill();
        for stream in ["TW_TASKS", "TW_RESULTS"] {
            let messages = broker.store().join("jetstream/$G/streams").join(stream).join("msgs");
            std::fs::remove_dir_all(messages).unwrap();
        }
        broker.begin();
    }
}

#[test]
fn what_takes_machines_along_is_one_failure() {
    let Some(broker) = Broker::start() else { return };
    let mut devices: Vec<Process> = (0..2).map(|at| device(&broker, at, "poison")).collect();
    let fleet = fleet_with(&broker.url(), Duration::from_secs(1));
    let mut strikes: HashMap<String, u64> = HashMap::new();
    let strike = move |config: &str| {
        let n = strikes.entry(config.to_owned()).or_default();
        *n += 1;
        *n
    };
    let books = RunRecords { strike: Box::new(strike), tell: Box::new(|text| eprintln!("{text}")) };
    let mut remote = Remote::start(&fleet, "poison", assignment(), 2, books).unwrap();
    let space = space();
    let subject = Subject::described(&space, &describe);
    let poison = tilewright_search::Config::new(serde_json::from_str::<Vec<u64>>(POISON).unwrap());
    let mut configs: Vec<_> = (0..11).map(|at| space.config_at(at * 311)).collect();
    configs.insert(5, poison.clone());
    let numbers = remote.submit(&configs.iter().map(|config| subject.candidate(config.clone())).collect::<Vec<_>>());
    let mut outcomes = HashMap::new();
    let (mut n_deaths, until) = (0, Instant::now() + Duration::from_secs(30));
    while outcomes.len() < configs.len() {
        assert!(Instant::now() < until, "{} of {} are there", outcomes.len(), configs.len());
        if let Next::Done(number, measured) = remote.next(None, Duration::from_millis(50)).unwrap() {
            assert!(outcomes.insert(number - numbers.start, measured.outcome).is_none());
        }
        for (at, process) in devices.iter_mut().enumerate() {
            if process.ended().is_some() {
                n_deaths += 1;
                *process = device(&broker, at, "poison");
            }
        }
    }
    for (at, config) in configs.iter().enumerate() {
        let outcome = &outcomes[&(at as u64)];
        if *config == poison {
            let Outcome::Failed { message, .. } = outcome else { panic!("it is no success") };
            assert_eq!(message, "two machines went away while it ran");
        } else {
            assert_eq!(*outcome, recorded(&describe(config)), "{config:?}");
        }
    }
    assert_eq!(n_deaths, 2);
}

/// Seconds until everything is measured if one of two devices dies at once.
fn seconds_without_one(lease: Duration) -> Option<f64> {
    let broker = Broker::start()?;
    let mut devices: Vec<Process> = (0..2).map(|at| device(&broker, at, "recorded")).collect();
    let fleet = fleet_with(&broker.url(), lease);
    let mut remote = remote(&fleet, "dead", 2);
    let space = space();
    let subject = Subject::described(&space, &describe);
    let candidates: Vec<_> = (0..40).map(|at| subject.candidate(space.config_at(at))).collect();
    remote.submit(&candidates);
    let mut n = 0;
    let mut killed = None;
    while n < candidates.len() {
        if let Next::Done(_, measured) = remote.next(None, Duration::from_millis(50)).unwrap() {
            n += 1;
            killed.get_or_insert_with(|| {
                // The device is not finished: it has started a task of ten candidates.
                let at = if measured.conditions.device.as_deref() == Some("device-0") { 0 } else { 1 };
                devices[at].kill();
                Instant::now()
            });
        }
    }
    killed.map(|killed| killed.elapsed().as_secs_f64())
}

#[test]
fn work_of_a_dead_device_is_done_elsewhere() {
    let Some(seconds) = seconds_without_one(Duration::from_secs(1)) else { return };
    assert!((0.6..10.0).contains(&seconds), "{seconds} s");
}

#[test]
#[ignore = "waits for a lease of the usual length"]
fn work_of_a_dead_device_is_done_elsewhere_within_15_s() {
    let Some(seconds) = seconds_without_one(LEASE) else { return };
    eprintln!("after {seconds:.1} s");
    assert!((6.0..15.0).contains(&seconds));
}
