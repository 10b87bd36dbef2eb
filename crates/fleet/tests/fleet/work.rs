//! Sharing of work in a fleet.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tilewright::{Request, Workload};
use tilewright_fleet::tune_many;
use tilewright_search::{Measure, Next, RaceLimits, Subject};

use crate::broker::Broker;
use crate::process::{Process, session};
use crate::replay::{Device, Slow, describe, fleet, proposals, proposals_counted, recorded, remote, space};

/// Number of trials in batches.
fn n_trials(batches: &[Vec<tilewright_search::Trial>]) -> usize {
    batches.iter().map(Vec::len).sum()
}

#[test]
fn proposals_do_not_depend_on_who_measures() {
    let Some(broker) = Broker::start() else { return };
    for n in [1, 3, 5] {
        let _devices = Device::several(&broker.url(), n, Duration::from_millis(2));
        let least = 2 * n;
        for search in ["auto", "genetic"] {
            let alone = proposals(&mut Slow::new(Duration::ZERO, recorded), search, 150, least);
            let run = format!("{search}{n}");
            let together = proposals(&mut remote(&fleet(&broker.url()), &run, n), search, 150, least);
            assert_eq!(n_trials(&alone), 150);
            assert_eq!(alone, together, "{search} with {n} devices");
        }
    }
}

#[test]
fn a_fleet_goes_on_with_another_server() {
    let alone = proposals(&mut Slow::new(Duration::ZERO, recorded), "genetic", 150, 4);
    for is_killed in [true, false] {
        let (Some(mut first), Some(second)) = (Broker::start(), Broker::start()) else { return };
        let url = format!("{},{}", first.url(), second.url());
        let _devices = Device::several(&url, 2, Duration::from_millis(2));
        let count = AtomicU64::new(0);
        let together = std::thread::scope(|scope| {
            let tuner = scope.spawn(|| {
                let mut remote = remote(&fleet(&url), "moves", 2);
                proposals_counted(&mut remote, "genetic", 150, 4, &count)
            });
            while count.load(Ordering::Relaxed) < 50 && !tuner.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
            if is_killed {
                first.kill()
            } else {
                first.shut_down()
            }
            tuner.join().unwrap()
        });
        assert_eq!(alone, together);
    }
}

#[test]
fn a_race_is_on_one_device_and_results_come_once() {
    let Some(broker) = Broker::start() else { return };
    let _devices = Device::several(&broker.url(), 2, Duration::from_millis(1));
    let fleet = fleet(&broker.url());
    let space = space();
    let subject = Subject::described(&space, &describe);
    let candidates: Vec<_> = [0, 1, 2, 500, 2000].map(|at| subject.candidate(space.config_at(at))).into();
    let mut remote = remote(&fleet, "race", 2);
    // Once something has been measured, the devices are online.
    let numbers = remote.submit(&candidates);
    let mut seen = Vec::new();
    while let Next::Done(number, _) = wait(&mut remote) {
        seen.push(number);
    }
    seen.sort_unstable();
    assert_eq!(seen, numbers.collect::<Vec<_>>());
    assert_eq!(remote.next(None, Duration::ZERO).unwrap(), Next::Idle);
    remote.recorded(5);
    let limits = RaceLimits { rounds: Duration::from_secs(1), total: Duration::from_secs(5), best_ns: 1000.0 };
    let standings = remote.race(&candidates, limits, None, &mut |_| ()).unwrap();
    let there = Slow::new(Duration::ZERO, recorded).race(&candidates, limits, None, &mut |_| ()).unwrap();
    assert_eq!(standings, there);
    assert_eq!(remote.n_duplicates(), 0);
    // Cancelled candidates are not measured, and have no results.
    let numbers = remote.submit(&candidates);
    remote.cancel(numbers.start).unwrap();
    assert_eq!(remote.next(None, Duration::from_millis(100)).unwrap(), Next::Idle);
}

/// Waits for the next result, or the end.
fn wait(measure: &mut dyn Measure) -> Next {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match measure.next(None, Duration::from_millis(50)).unwrap() {
            Next::Pending => assert!(Instant::now() < until, "nothing comes"),
            next => return next,
        }
    }
}

#[test]
#[ignore = "times a fleet: for a quiet machine"]
fn four_devices_measure_nearly_four_times_as_much() {
    let Some(broker) = Broker::start() else { return };
    let trial = Duration::from_millis(20);
    let mut seconds = Vec::new();
    for n in [1, 4] {
        let begun = Instant::now();
        let _devices = Device::several(&broker.url(), n, trial);
        let mut remote = remote(&fleet(&broker.url()), &format!("speed{n}"), n);
        // The first device joins a server that has never had a tuner.
        let join = Instant::now();
        let space = space();
        remote.submit(&[Subject::described(&space, &describe).candidate(space.config_at(0))]);
        assert!(matches!(wait(&mut remote), Next::Done(..)));
        let join = join.elapsed().as_secs_f64();
        assert!(join <= 3.0, "{join:.2} s from joining to the first trial");
        eprintln!("{n} devices: {join:.2} s to the first trial");
        let start = Instant::now();
        let batches = proposals(&mut remote, "random", 400, 2 * n);
        seconds.push(start.elapsed().as_secs_f64());
        assert_eq!(n_trials(&batches), 400);
        eprintln!(
            "{n} devices: {:.2} s, begun {:.2} s before",
            seconds[seconds.len() - 1],
            (start - begun).as_secs_f64()
        );
    }
    // A run cannot be faster than its trials; otherwise the test is wrong.
    let least = [400.0 * trial.as_secs_f64(), 100.0 * trial.as_secs_f64()];
    assert!(seconds.iter().zip(least).all(|(seconds, least)| *seconds >= 0.98 * least), "{seconds:?}");
    let times = seconds[0] / seconds[1];
    eprintln!("4 devices of 20 ms measure {times:.2} times as much as one");
    assert!(times >= 3.6);
}

/// Starts a device whose trials take 20 ms.
fn device(broker: &Broker, at: usize) -> Process {
    let (trial, lease) = (Duration::from_millis(20), Duration::from_secs(1));
    Process::device(&broker.url(), &format!("device-{at}"), "hashed", trial, lease)
}

/// Seconds for `trials` trials of each of twelve layers on `n_devices` devices.
fn seconds_of_layers(n_devices: usize, trials: u64) -> Option<f64> {
    let broker = Broker::start()?;
    let devices: Vec<Process> = (0..n_devices).map(|at| device(&broker, at)).collect();
    let session = session(&broker.folder().join("records.db"));
    let request = |workload: Workload| Request::new(workload).trials(trials).race(false).search("random");
    let requests: Vec<Request> = Workload::parse_all("resnet18").unwrap().into_iter().map(request).collect();
    assert_eq!(requests.len(), 12);
    let fleet = fleet(&broker.url());
    while fleet.devices().unwrap().len() < n_devices {
        std::thread::sleep(Duration::from_millis(50));
    }
    let start = Instant::now();
    let tuned = tune_many(&session, &fleet, &requests, &AtomicBool::new(false), &|_, _| ()).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    assert!(tuned.iter().all(|(_, tuned)| tuned.as_ref().is_ok_and(|tuned| tuned.new_trials == trials)));
    drop(devices);
    Some(seconds)
}

#[test]
#[ignore = "times a fleet: for a quiet machine"]
fn twelve_layers_take_nearly_a_fourth_of_the_time_on_four_devices() {
    let trials = 100;
    let (Some(one), Some(four)) = (seconds_of_layers(1, trials), seconds_of_layers(4, trials)) else { return };
    eprintln!("twelve layers: {one:.2} s on one device of 20 ms, {four:.2} s on four: {:.2} times", one / four);
    let least = 12.0 * trials as f64 * 0.02;
    assert!(one >= 0.98 * least && four >= 0.98 * least / 4.0, "nothing is faster than its trials take");
    assert!(one / four >= 3.8);
}
