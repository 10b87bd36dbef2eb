//! Devices that look up the outcome of a configuration, and return it after a delay, so that a search on a
//! fleet of them does not depend on the machine.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tilewright_device::host;
use tilewright_fleet::devices::DeviceDescription;
use tilewright_fleet::protocol::Assignment;
use tilewright_fleet::{Fleet, Here, Remote, RunRecords, serve};
use tilewright_search::{
    BoxError, Budget, Candidate, Config, ErrorClass, Event, HeadStart, Measure, Measured, MeasuringTraits, Next,
    Outcome, Parameter, RaceLimits, Space, Standing, Subject, Timing, Trial, Tuning, build,
};

/// Space of 4,000 configurations.
pub fn space() -> Arc<Space> {
    let parameters =
        vec![Parameter::ordinal("a", 0..20), Parameter::ordinal("b", 0..20), Parameter::ordinal("c", 0..10)];
    Arc::new(Space::new("replayed", parameters, vec![]).unwrap())
}

/// Outcome of a configuration of the space: every seventh fails.
pub fn recorded(steps: &str) -> Outcome {
    let ranks: Vec<u64> = serde_json::from_str(steps).unwrap();
    let [a, b, c] = [0, 1, 2].map(|at| ranks[at] as f64);
    if (ranks[0] * 200 + ranks[1] * 10 + ranks[2]) % 7 == 3 {
        return Outcome::Failed { class: ErrorClass::WrongAnswer, message: "as recorded".into() };
    }
    let ns = 1000.0 + 40.0 * (a - 13.0).powi(2) + 25.0 * (b - 4.0).powi(2) + 90.0 * (c - 6.0).abs() + a * b;
    Outcome::Measured(Timing::of_samples(&[ns], false))
}

/// Outcome of any schedule, computed from its text.
pub fn hashed(steps: &str) -> Outcome {
    let hash = steps.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    Outcome::Measured(Timing::of_samples(&[1e6 + (hash >> 40) as f64], false))
}

/// Schedule of a configuration: the configuration's own text.
pub fn describe(config: &Config) -> String {
    serde_json::to_string(config.ranks()).unwrap()
}

/// Measuring side that knows the outcome of a schedule, delays its answer, and queues the next batch, as
/// devices do.
pub struct Slow {
    outcome: fn(&str) -> Outcome,
    trial: Duration,
    queue: VecDeque<(u64, Candidate)>,
    n_submitted: u64,
    /// End of the current candidate.
    until: Option<Instant>,
}

impl Slow {
    pub fn new(trial: Duration, outcome: fn(&str) -> Outcome) -> Slow {
        Slow { outcome, trial, queue: VecDeque::new(), n_submitted: 0, until: None }
    }
}

impl Measure for Slow {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        let first = self.n_submitted;
        self.n_submitted += candidates.len() as u64;
        if self.queue.is_empty() {
            // Idle time does not count towards a trial.
            self.until = Some(Instant::now() + self.trial);
        }
        self.queue.extend((first..).zip(candidates.iter().cloned()));
        first..self.n_submitted
    }

    fn next(&mut self, _: Option<f64>, at_most: Duration) -> Result<Next, BoxError> {
        if self.queue.is_empty() {
            return Ok(Next::Idle);
        }
        let now = Instant::now();
        let until = *self.until.get_or_insert(now + self.trial);
        if now + at_most < until {
            std::thread::sleep(at_most);
            return Ok(Next::Pending);
        }
        std::thread::sleep(until.saturating_duration_since(now));
        self.until = Some(until.max(now) + self.trial);
        let (number, candidate) = self.queue.pop_front().unwrap();
        let outcome = (self.outcome)(&candidate.steps);
        Ok(Next::Done(number, Measured::of(outcome)))
    }

    fn wind_down(&mut self) {
        self.queue.truncate(1);
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        self.queue.retain(|(number, _)| *number < from);
        Ok(())
    }

    fn race(
        &mut self,
        candidates: &[Candidate],
        _: RaceLimits,
        _: Option<&AtomicBool>,
        _: &mut dyn FnMut(usize),
    ) -> Result<Vec<Standing>, BoxError> {
        let standing = |(at, candidate): (usize, &Candidate)| {
            let outcome = (self.outcome)(&candidate.steps);
            Standing { at, quartile_ns: outcome.cost(), outcome, relative_error: None }
        };
        let mut standings: Vec<Standing> = candidates.iter().enumerate().map(standing).collect();
        standings.sort_by(|a, b| a.quartile_ns.total_cmp(&b.quartile_ns));
        Ok(standings)
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits { works_ahead: true }
    }
}

/// Class of all devices.
pub const CLASS: &str = "replay";

/// Connects to a fleet with short leases.
pub fn fleet(url: &str) -> Fleet {
    fleet_with(url, Duration::from_secs(1))
}

/// Connects to a fleet with leases of this length.
pub fn fleet_with(url: &str, lease: Duration) -> Fleet {
    Fleet { lease, ..Fleet::open(url, None, Some(CLASS)).unwrap() }
}

/// Serves as a device, in this thread.
pub fn serve_replay(fleet: &Fleet, name: &str, trial: Duration, outcome: fn(&str) -> Outcome, stop: &AtomicBool) {
    let mut start = |_: &Assignment| Ok(Box::new(Slow::new(trial, outcome)) as Box<dyn Measure>);
    let mut here = Here { start: &mut start, renew: &mut |_, _| () };
    let target = host::target().to_string();
    let description = DeviceDescription { target, ..DeviceDescription::named(name, &fleet.class) };
    // A device that starts while the server is down tries again.
    while let Err(error) = serve(fleet, description.clone(), &mut here, stop, &|_| ()) {
        eprintln!("{name}: {error}");
        if stop.load(Ordering::Relaxed) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Device in a thread of this process, which ends on drop.
pub struct Device {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    pub fn start(fleet: Fleet, name: &str, trial: Duration) -> Device {
        let stop = Arc::new(AtomicBool::new(false));
        let (name, stopped) = (name.to_owned(), stop.clone());
        let thread = std::thread::spawn(move || serve_replay(&fleet, &name, trial, recorded, &stopped));
        Device { stop, thread: Some(thread) }
    }

    /// Starts `n` devices.
    pub fn several(url: &str, n: usize, trial: Duration) -> Vec<Device> {
        (1..=n).map(|at| Device::start(fleet(url), &format!("replay-{at}"), trial)).collect()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Makes an assignment, which the devices ignore.
pub fn assignment() -> Assignment {
    let request = tilewright::Request::parse("matmul:m=8,n=8,k=8").unwrap();
    tilewright_fleet::assignment(&request.task().unwrap(), request.settings())
}

/// Makes the measuring side of a fleet, for a run with this name.
pub fn remote(fleet: &Fleet, run: &str, n_devices: usize) -> Remote<'static> {
    // No candidate crashes a machine here, even though tests kill machines.
    let books = RunRecords { strike: Box::new(|_| 1), tell: Box::new(|text| eprintln!("{text}")) };
    Remote::start(fleet, run, assignment(), n_devices, books).unwrap()
}

/// Runs a search for some trials, and returns its proposals batch by batch with their outcomes.
pub fn proposals(measure: &mut dyn Measure, search: &str, trials: u64, least: usize) -> Vec<Vec<Trial>> {
    proposals_counted(measure, search, trials, least, &AtomicU64::new(0))
}

/// Runs a search as [`proposals`] does, while others may watch the number of trials.
pub fn proposals_counted(
    measure: &mut dyn Measure,
    search: &str,
    trials: u64,
    least: usize,
    count: &AtomicU64,
) -> Vec<Vec<Trial>> {
    let space = space();
    let mut search = build(search, &space, 7).unwrap();
    let subject = Subject::described(&space, &describe);
    let mut batches = Vec::new();
    let mut observer = |event: Event| {
        match event {
            Event::Trial(_) => {
                count.fetch_add(1, Ordering::Relaxed);
            }
            Event::Batch(reports) => {
                let mut batch: Vec<Trial> = reports.iter().map(|report| report.trial.clone()).collect();
                batch.sort_by(|a, b| a.config.cmp(&b.config));
                batches.push(batch);
            }
        }
        Ok(())
    };
    let budget = Budget { trials: Some(trials), least, ..Budget::default() };
    let stop = AtomicBool::new(false);
    Tuning::new(search.as_mut(), subject, HeadStart::default()).run(measure, budget, &stop, &mut observer).unwrap();
    batches
}
