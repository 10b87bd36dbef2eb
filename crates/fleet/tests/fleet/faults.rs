//! What a fleet survives: whatever is killed, nothing is lost, nothing is there twice, and what a search
//! proposes is what it would have proposed undisturbed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright::{Database, Workload};
use tilewright_device::host;
use tilewright_fleet::{Books, LEASE, Remote};
use tilewright_tune::{Judge, Measure, Next, Outcome, Subject};

use crate::broker::Broker;
use crate::process::{POISON, Process, WORKLOAD};
use crate::replay::{CLASS, Slow, assignment, describe, fleet, hashed, proposals, recorded, remote, space};

/// Trials of a run.
const TRIALS: u64 = 400;
/// Devices of a run, and how long a trial takes there.
const DEVICES: usize = 3;
const TRIAL_MS: u64 = 15;

fn device(broker: &Broker, at: usize, mode: &str) -> Process {
    Process::device(&broker.url(), &format!("device-{at}"), mode, TRIAL_MS)
}

/// Does things to a fleet until it is done; what they were.
fn disturb(
    broker: &mut Broker,
    devices: &mut [Process],
    rng: &mut Xoshiro256PlusPlus,
    is_over: &AtomicBool,
) -> Vec<String> {
    let mut done = Vec::new();
    let begun = Instant::now();
    while !is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(rng.random_range(50..700)));
        if is_over.load(Ordering::Relaxed) || done.len() >= 6 {
            continue;
        }
        let pause = Duration::from_millis(rng.random_range(50..1500));
        let at = rng.random_range(0..devices.len());
        let what = match rng.random_range(0..6) {
            0 | 1 => {
                devices[at].kill();
                std::thread::sleep(pause);
                devices[at] = device(broker, at, "recorded");
                format!("device {at} killed for {pause:?}")
            }
            2 | 3 => {
                devices[at].signal("-STOP");
                std::thread::sleep(2 * pause);
                devices[at].signal("-CONT");
                format!("device {at} stopped for {:?}", 2 * pause)
            }
            4 => {
                broker.kill();
                std::thread::sleep(pause);
                broker.begin();
                format!("server killed for {pause:?}")
            }
            _ => {
                broker.kill();
                let _ = std::fs::remove_dir_all(broker.store());
                std::thread::sleep(pause);
                broker.begin();
                format!("server killed for {pause:?}, its store deleted")
            }
        };
        done.push(format!("{:.1} s: {what}", begun.elapsed().as_secs_f64()));
    }
    done
}

/// Runs with faults of these seeds; what they propose is what a local run does.
fn check_runs(seeds: std::ops::Range<u64>) {
    let alone = proposals(&mut Slow::new(Duration::ZERO, recorded), "genetic", TRIALS, 2 * DEVICES);
    for seed in seeds {
        let Some(mut broker) = Broker::start() else { return };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut devices: Vec<Process> = (0..DEVICES).map(|at| device(&broker, at, "recorded")).collect();
        let fleet = fleet(&broker.url());
        let is_over = AtomicBool::new(false);
        let start = Instant::now();
        let (together, done) = std::thread::scope(|scope| {
            let tuner = scope.spawn(|| {
                let mut remote = remote(&fleet, &format!("seed{seed}"), DEVICES);
                let together = proposals(&mut remote, "genetic", TRIALS, 2 * DEVICES);
                is_over.store(true, Ordering::Relaxed);
                together
            });
            let done = disturb(&mut broker, &mut devices, &mut rng, &is_over);
            (tuner.join().unwrap(), done)
        });
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("seed {seed}: {seconds:.1} s; {}", done.join("; "));
        assert_eq!(alone, together, "seed {seed}: {}", done.join("; "));
    }
}

#[test]
fn what_is_killed_changes_nothing() {
    check_runs(0..3);
}

#[test]
#[ignore = "takes minutes"]
fn what_is_killed_changes_nothing_in_many_runs() {
    let n = std::env::var("TILEWRIGHT_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(20);
    check_runs(0..n);
}

#[test]
fn what_takes_machines_along_is_one_failure() {
    let Some(broker) = Broker::start() else { return };
    let mut devices: Vec<Process> = (0..2).map(|at| device(&broker, at, "poison")).collect();
    let fleet = fleet(&broker.url());
    let mut strikes: HashMap<String, u64> = HashMap::new();
    let strike = move |config: &str| {
        let n = strikes.entry(config.to_owned()).or_default();
        *n += 1;
        *n
    };
    let books = Books { strike: Box::new(strike), tell: Box::new(|text| eprintln!("{text}")) };
    let mut remote = Remote::start(&fleet, "poison", assignment(), 2, books).unwrap();
    let space = space();
    let subject = Subject::described(&space, &describe);
    let poison = tilewright_tune::Config::new(serde_json::from_str::<Vec<u64>>(POISON).unwrap());
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

/// Seconds until all is measured where one of two devices dies at once.
fn seconds_without_one(lease: Duration) -> Option<f64> {
    let broker = Broker::start()?;
    let mut devices: Vec<Process> = (0..2).map(|at| device(&broker, at, "recorded")).collect();
    let fleet = tilewright_fleet::Fleet { lease, ..fleet(&broker.url()) };
    let mut remote = remote(&fleet, "dead", 2);
    let space = space();
    let subject = Subject::described(&space, &describe);
    let candidates: Vec<_> = (0..40).map(|at| subject.candidate(space.config_at(at))).collect();
    remote.submit(&candidates);
    let mut n = 0;
    let mut killed = None;
    while n < candidates.len() {
        if let Next::Done(..) = remote.next(None, Duration::from_millis(50)).unwrap() {
            n += 1;
            killed.get_or_insert_with(|| {
                devices[0].kill();
                Instant::now()
            });
        }
    }
    killed.map(|killed| killed.elapsed().as_secs_f64())
}

#[test]
fn work_of_a_dead_device_is_done_elsewhere() {
    let Some(seconds) = seconds_without_one(Duration::from_secs(1)) else { return };
    assert!(seconds < 10.0, "{seconds} s");
}

#[test]
#[ignore = "waits for a lease of the usual length"]
fn work_of_a_dead_device_is_done_elsewhere_within_15_s() {
    let Some(seconds) = seconds_without_one(LEASE) else { return };
    eprintln!("after {seconds:.1} s");
    assert!(seconds < 15.0);
}

#[test]
fn a_tuner_that_is_killed_goes_on() {
    let Some(broker) = Broker::start() else { return };
    let _devices: Vec<Process> = (0..2).map(|at| device(&broker, at, "hashed")).collect();
    let path = broker.folder().join("records.db");
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
    let mut n_kills = 0;
    loop {
        let mut tuner = Process::tuner(&broker.url(), &path, TRIALS);
        let killed_after = Duration::from_millis(if n_kills < 3 { rng.random_range(300..900) } else { 60_000 });
        let start = Instant::now();
        let ended = loop {
            match tuner.ended() {
                Some(is_well) => break Some(is_well),
                None if start.elapsed() > killed_after => break None,
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        match ended {
            Some(is_well) => {
                assert!(is_well);
                break;
            }
            None => n_kills += 1,
        }
        assert!(n_kills < 5, "it does not come to its end");
    }
    let store = Database::named(&path, "--db").unwrap().open_existing().unwrap();
    let target = format!("{}@{CLASS}", host::target().name());
    let operator = Workload::parse(WORKLOAD).unwrap();
    let judges = |template: &str| Judge::new(&operator, &target, 1, template, None);
    let (records, _) = store.trials_of(&operator.to_string(), &target, 1, None, &judges).unwrap();
    assert!(records.len() as u64 >= TRIALS, "{} trials", records.len());
    for record in &records {
        assert_eq!(record.outcome, hashed(&record.steps));
    }
    assert!(n_kills > 0, "it was never killed");
}
