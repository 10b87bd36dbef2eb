//! Tuning on a fleet: requests, choice of devices, and results left by killed runs.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use tilewright::{
    Database, Elsewhere, Note, Observer, Recorder, Recording, Request, Session, Settings, Tuned, key_of_class,
    task_key, trials_of,
};
use tilewright_ir::Target;
use tilewright_search::{Config, Event, Measure, Report, Subject, Trial};
use tilewright_tune::{PassedOver, StoreError, Task, TaskKey, Validator};

use crate::Fleet;
use crate::devices::{DeviceDescription, wait_for};
use crate::jetstream::{forget_run, make_streams, pull, purge_tasks};
use crate::nats::{Client, ConnectionEvent as Heard};
use crate::nkey::random_name;
use crate::protocol::{Ask, Assignment, Cancel, Done, Finding, RESULTS, cancel_subject, rest_subject};
use crate::remote::{Remote, RunRecords, to_json};

/// Timeout of the wait for a device of the class.
const FIRST_DEVICE: Duration = Duration::from_secs(5);
/// Minimum number of candidates that a device should have at a time: one to measure, one to build.
const PER_DEVICE: usize = 2;
/// Number of searches that are prepared at a time: each takes a core.
const MADE_READY: usize = 2;
/// Timeout for the tuner of a run to answer.
const SIGN: Duration = Duration::from_secs(1);
/// Number of results that are taken over at a time, and maximum time between two.
const TAKEN: u64 = 256;
const SILENCE: Duration = Duration::from_millis(500);

/// Tunes a workload on the devices of a class.
///
/// # Errors
/// As [`Session::tune`], or if the server cannot be reached, or no usable device is online.
pub fn tune(
    session: &Session,
    fleet: &Fleet,
    request: &Request,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<Tuned, tilewright::Error> {
    let devices = of_use(fleet, request, observer)?;
    tune_on((session, fleet), &devices, &Turns::new(1, devices.of_use.len()), request, stop, observer)
}

/// Index of a workload among several, with its result.
pub type Each = (usize, Result<Tuned, tilewright::Error>);

/// Tunes several workloads on the devices of a class, as many at a time as there are devices, since each
/// search does better with smaller batches. With a budget in trials, one more runs, so that no device is idle
/// while a search waits for its last results. Returns the results in order, without workloads that were not
/// started.
///
/// # Errors
/// As [`tune`], if no workload could be started.
pub fn tune_many(
    session: &Session,
    fleet: &Fleet,
    requests: &[Request],
    stop: &AtomicBool,
    note: &(dyn Fn(usize, Note) + Sync),
) -> Result<Vec<Each>, tilewright::Error> {
    let Some(first) = requests.first() else { return Ok(Vec::new()) };
    let devices = of_use(fleet, first, &|what: Note| note(0, what))?;
    let n_devices = devices.of_use.len();
    let has_time =
        requests.iter().any(|request| request.settings().time.is_some() || request.settings().trials.is_none());
    let n_at_a_time = (n_devices + usize::from(!has_time)).min(requests.len());
    let turns = Turns::new(n_at_a_time, n_devices.div_ceil(n_at_a_time));
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        // The next searches are prepared meanwhile: their spaces, and their initial candidates.
        for _ in 0..(2 * n_at_a_time).min(requests.len()) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(request) = requests.get(at) else { break };
                    let note = |what: Note| note(at, what);
                    let tuned = tune_on((session, fleet), &devices, &turns, request, stop, &note);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((at, tuned));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    Ok(done)
}

/// Divides `time` equally among requests that the devices of a class process in parallel, such as those of a
/// model.
pub fn in_equal_parts(requests: Vec<Request>, time: Duration) -> Vec<Request> {
    let n_requests = u32::try_from(requests.len()).unwrap_or(u32::MAX).max(1);
    requests.into_iter().map(|request| request.time(time / n_requests)).collect()
}

/// Turns in which several searches share devices.
struct Turns {
    /// Number of devices that each search should keep busy.
    n_devices: usize,
    /// Gate of searches in preparation, which lets the first ones begin early; below, the gate of running
    /// searches.
    ready: ConcurrencyGate,
    under_way: ConcurrencyGate,
}

impl Turns {
    /// Makes turns for `n` searches at a time, with `n_devices` devices each.
    fn new(n: usize, n_devices: usize) -> Turns {
        Turns { n_devices, ready: ConcurrencyGate::new(MADE_READY), under_way: ConcurrencyGate::new(n) }
    }
}

/// Gate with a limited number of places.
struct ConcurrencyGate {
    left: Mutex<usize>,
    one_is_over: Condvar,
}

impl ConcurrencyGate {
    fn new(n: usize) -> ConcurrencyGate {
        ConcurrencyGate { left: Mutex::new(n), one_is_over: Condvar::new() }
    }

    /// Waits for a turn, which ends when the result is dropped.
    fn take(&self) -> Turn<'_> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        *self.one_is_over.wait_while(left, |left| *left == 0).unwrap_or_else(PoisonError::into_inner) -= 1;
        Turn(self)
    }
}

/// Occupied place of a gate.
struct Turn<'a>(&'a ConcurrencyGate);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.left.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.one_is_over.notify_one();
    }
}

/// Devices of a class.
struct Devices {
    of_use: Vec<DeviceDescription>,
    target: Target,
    /// Devices whose records do not apply to each other.
    aside: Vec<String>,
}

/// Selects the usable devices of the class that are of the same kind, and have enough cores.
fn of_use(fleet: &Fleet, request: &Request, observer: &dyn Observer) -> Result<Devices, tilewright::Error> {
    let threads = request.settings().threads;
    let mut client = fleet.connect(None)?;
    make_streams(&mut client)?;
    let all = wait_for(&mut client, &fleet.class, &fleet.servers.to_string(), FIRST_DEVICE)?;
    let kind = |device: &DeviceDescription| (device.target.clone(), device.toolchain.clone());
    // The most frequent kind; if several are, the one of the first device.
    let frequency = |of: &DeviceDescription| all.iter().filter(|device| kind(device) == kind(of)).count();
    let most = all.iter().rev().max_by_key(|device| frequency(device)).expect("invariant: one is there");
    let (mut of_use, mut aside) = (Vec::new(), Vec::new());
    for device in &all {
        let why = if kind(device) != kind(most) {
            format!(
                "it is {} with {}, others are {} with {}",
                device.target, device.toolchain, most.target, most.toolchain
            )
        } else if device.cores < threads {
            format!("it has {} cores, and {threads} threads are asked for", device.cores)
        } else {
            of_use.push(device.clone());
            continue;
        };
        observer.note(Note::Message(format!("device {} is set aside: {why}", device.device)));
        aside.push(device.device.clone());
    }
    if of_use.is_empty() {
        let class = &fleet.class;
        return Err(tilewright::Error::input(format!(
            "no device of class {class} has {threads} cores (give fewer --threads)"
        )));
    }
    let target = most.target.parse().map_err(|error| {
        let why = format!("device {} says a target that is not understood: {error}", most.device);
        tilewright::Error::failed(why)
    })?;
    Ok(Devices { target, of_use, aside })
}

/// Tunes a workload on these devices, once it is its turn.
fn tune_on(
    (session, fleet): (&Session, &Fleet),
    devices: &Devices,
    turns: &Turns,
    request: &Request,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<Tuned, tilewright::Error> {
    let ready = Mutex::new(Some(turns.ready.take()));
    let request = request.clone().target(devices.target.clone());
    let settings = request.settings();
    let task = request.task()?;
    let peak = devices.of_use.iter().filter_map(|device| device.peak_gflops).reduce(f64::max);
    // Devices report the peak of f32, which does not apply to integers.
    let peak = peak.filter(|_| !task.setting.workload.multiplies_bytes());
    let per_element = 4.0 / task.setting.workload.dtype.arithmetic().bytes() as f64;
    let database = session.database();
    let run = random_name();
    let key = key_of_class(&fleet.class, task_key(&task, settings.caches));
    let is_emulated = devices.of_use.iter().any(|device| device.is_emulated);
    if !is_emulated {
        take_over(fleet, database, settings, &task, &key, observer)?;
    }
    let refuse = |error: StoreError| database.refuse(error);
    database.open_to_write()?.store.begin_fleet_run(&key, &run).map_err(refuse)?;
    let start = || -> Result<Box<dyn Measure + '_>, tilewright::Error> {
        let strike = |config: &str| {
            let counted = database.open_to_write().map(|mut opened| opened.store.strike(&key, config));
            // If strikes cannot be counted, the candidate is not tried again.
            counted.ok().and_then(Result::ok).unwrap_or(u64::MAX)
        };
        drop(ready.lock().unwrap_or_else(PoisonError::into_inner).take());
        let turn = turns.under_way.take();
        let tell = move |text: String| {
            // The closure owns the turn, so the turn ends with it.
            let _ = &turn;
            observer.note(Note::Message(text));
        };
        let books = RunRecords { strike: Box::new(strike), tell: Box::new(tell) };
        let remote = Remote::start(fleet, &run, assignment(&task, settings), turns.n_devices, books)?;
        Ok(Box::new(remote.without(devices.aside.iter().cloned())))
    };
    let place = Elsewhere {
        class: &fleet.class,
        least_batch: PER_DEVICE * turns.n_devices,
        peak_gflops: peak.map(|peak| peak * per_element * settings.threads as f64),
        is_emulated,
        start: &start,
    };
    let tuned = session.run_at(place, &request, stop, observer);
    if tuned.as_ref().is_ok_and(|tuned| tuned.recorded) {
        database.open_to_write()?.store.end_fleet_run(&run).map_err(refuse)?;
    }
    tuned
}

/// Makes the assignment of a task.
pub fn assignment(task: &Task, settings: &Settings) -> Assignment {
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    Assignment {
        workload: task.setting.workload.to_string(),
        target: task.setting.target.to_string(),
        threads: settings.threads,
        seed: settings.seed,
        caches: settings.caches,
        to_the_end: settings.to_the_end,
        min_time_s: seconds(settings.min_time),
        build_timeout_s: seconds(settings.build_timeout),
        run_timeout_s: seconds(settings.run_timeout),
    }
}

/// Records results of killed runs that are still on the server.
fn take_over(
    fleet: &Fleet,
    database: &Database,
    settings: &Settings,
    task: &Task,
    key: &TaskKey,
    observer: &dyn Observer,
) -> Result<(), tilewright::Error> {
    let refuse = |error: StoreError| database.refuse(error);
    let runs = database.open_to_write()?.store.fleet_runs(key).map_err(refuse)?;
    for run in runs {
        let mut client = fleet.connect(None)?;
        let ask = Ask { task: None, device: "tuner".to_owned(), n_times: 1 };
        let sign = client.request(&rest_subject(&run), &to_json(&ask), SIGN)?;
        if sign.is_some_and(|sign| sign.status.is_none()) {
            // Another process is already taking these results over.
            continue;
        }
        client.link().publish(&cancel_subject(&run), None, None, &to_json(&Cancel::From(0)));
        purge_tasks(&mut client, &run)?;
        let left = results_of(&mut client, &run);
        let opened = database.open_to_write()?;
        let earlier =
            trials_of(&opened.store, key, &|_| Validator::of(task), &mut PassedOver::default()).map_err(refuse)?;
        let n_earlier = earlier.len() as u64;
        let recorder = Recorder::new(opened, task, key.clone(), settings.search.clone(), settings.seed);
        let recording = Recording::new(recorder);
        let mut n = 0;
        for done in left {
            let Finding::Trial { config, outcome, seconds, limit, conditions } = done.what else { continue };
            let Ok(ranks) = serde_json::from_str::<Vec<u64>>(&config) else { continue };
            let config = Config::new(ranks);
            if !task.space.contains(&config) {
                continue;
            }
            let steps = Subject::from(task).candidate(config.clone()).steps;
            let trial = Trial { config, outcome };
            let report = Report { number: n_earlier + n, trial, steps, seconds, limit, conditions, best_ns: None };
            recording.take_note(&Event::Trial(&report), &|_| ()).map_err(refuse)?;
            n += 1;
        }
        recording.conclude(None).map_err(refuse)?;
        forget_run(&mut client, &run)?;
        database.open_to_write()?.store.end_fleet_run(&run).map_err(refuse)?;
        if n > 0 {
            observer.note(Note::Message(format!("{n} results of a run that was killed are taken over")));
        }
    }
    Ok(())
}

/// Fetches the results of a run from the server.
fn results_of(client: &mut Client, run: &str) -> Vec<Done> {
    let mut found = Vec::new();
    loop {
        let before = found.len();
        let inbox = client.inbox("left");
        pull(client, RESULTS, run, TAKEN, &inbox, None);
        while let Some(heard) = client.next(SILENCE) {
            match heard {
                Heard::Message(message) if message.subject == inbox => break,
                Heard::Message(message) => found.extend(serde_json::from_slice::<Done>(&message.payload).ok()),
                Heard::Refused(_) => {}
                Heard::Lost(_) => return found,
            }
        }
        if found.len() - before < TAKEN as usize {
            return found;
        }
    }
}
