//! Device of a fleet: takes tasks from the server, measures them, and sends results.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tilewright_search::{BoxError, Measure, Measured, Next, Standing};

use crate::Fleet;
use crate::devices::DeviceDescription;
use crate::error::Error;
use crate::jetstream::{is_kept, n_deliveries, pull};
use crate::nats::{Client, ConnectionEvent, Link, ReceivedMessage, Retry};
use crate::protocol::{
    Ask, Assignment, Cancel, DeviceTask, Done, Finalist, Finding, RemainingTask, Started, TASKS, VERSION,
    cancel_subject, class_consumer, device_consumer, device_subject, rest_subject, result_subject, started_subject,
};
use crate::remote::to_json;

/// Maximum number of tasks held at a time: one is measured, the next one is built meanwhile.
const MOST_HELD: usize = 2;
/// Maximum number of assignments whose workers and data are kept for reuse.
const MOST_ASSIGNMENTS: usize = 6;
/// Divisors of the lease that give the time for which the server holds a request for a task, and the time
/// after that when the request counts as lost. The server does not answer at all while the stream of tasks
/// does not exist, and a device that joins first should start soon all the same.
///
/// The next two give the time for a tuner's answer to the query for the remaining part of a task, without
/// which all of it counts as wanted, and the pause before the next request while there is no consumer of
/// tasks.
const PULL_TIME: u32 = 10;
const PULL_SLACK: u32 = 20;
const ANSWER_TIME: u32 = 5;
const NOBODY: u32 = 40;
/// Minimum time for which the server holds a request.
const LEAST_PULL: Duration = Duration::from_millis(100);
/// Interval of announcements, and pause before an announcement that was not stored is repeated.
const SELF: Duration = Duration::from_secs(5);
pub const SELF_AGAIN: Duration = Duration::from_millis(500);
/// Maximum wait for a result while kernels are measured, and for a message while none are.
const LISTEN: Duration = Duration::from_millis(1);
const REST: Duration = Duration::from_millis(50);
/// Interval at which leases are checked for renewal; each lease is renewed three times in its duration.
const LOOK: Duration = Duration::from_millis(20);
const RENEWALS: u32 = 3;

/// Function that starts a measuring side for an assignment.
pub type StartMeasuring<'a> = dyn FnMut(&Assignment) -> Result<Box<dyn Measure>, BoxError> + 'a;

/// Callbacks for the device's measurements.
pub struct Here<'a> {
    /// Starts a measuring side for an assignment.
    pub start: &'a mut StartMeasuring<'a>,
    /// Updates the description of the device; the flag tells whether it is idle.
    pub renew: &'a mut (dyn FnMut(&mut DeviceDescription, bool) + 'a),
}

/// Task held by the device.
struct TaskAtHand {
    task: DeviceTask,
    ack: String,
    /// Time of the query for the remaining part; `None` once that is known.
    asked: Option<Instant>,
    is_dangerous: bool,
    /// Candidates that have not been submitted yet; below, submitted ones by their number at the measuring
    /// side.
    waiting: VecDeque<usize>,
    numbers: BTreeMap<u64, usize>,
}

impl TaskAtHand {
    fn is(&self, run: &str, number: u64) -> bool {
        self.task.run == run && self.task.number == number
    }

    /// Whether both tasks have the same assignment and run, so that they can be measured together.
    fn goes_with(&self, other: &TaskAtHand) -> bool {
        self.task.run == other.task.run && self.task.assignment == other.task.assignment
    }

    /// Whether all wanted candidates have been measured.
    fn is_done(&self) -> bool {
        self.asked.is_none() && self.waiting.is_empty() && self.numbers.is_empty()
    }
}

/// Result that the server has not confirmed yet.
struct Unsent {
    token: u64,
    run: String,
    number: u64,
    subject: String,
    id: String,
    payload: Vec<u8>,
    sent: Instant,
}

/// Lease of a task, which other devices get if it is not renewed.
struct Lease {
    run: String,
    number: u64,
    ack: String,
    length: Duration,
    renewed: Instant,
    /// Current candidate, once it has begun.
    started: Option<Option<usize>>,
    is_over: bool,
}

/// Leases of all held tasks, renewed by a separate thread.
#[derive(Default)]
struct Leases {
    link: Mutex<Option<Link>>,
    all: Mutex<Vec<Lease>>,
    is_over: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Leases {
    fn renew(&self, device: &str) {
        while !self.is_over.load(Ordering::Relaxed) {
            std::thread::sleep(LOOK);
            let link = lock(&self.link).clone();
            for lease in lock(&self.all).iter_mut() {
                let age = lease.renewed.elapsed();
                // This process was stopped, or had no connection: another device may have the task by now.
                if age > lease.length {
                    lease.is_over = true;
                } else if age > lease.length / RENEWALS
                    && let Some(link) = &link
                {
                    lease.renewed = Instant::now();
                    link.publish(&lease.ack, None, None, b"+WPI");
                    lease.say(link, device);
                }
            }
        }
    }
}

impl Lease {
    fn say(&self, link: &Link, device: &str) {
        if let Some(index) = self.started {
            let started = Started { task: self.number, index, device: Some(device.to_owned()) };
            link.publish(&started_subject(&self.run), None, None, &to_json(&started));
        }
    }
}

/// Serves tasks until `stop` is raised.
///
/// # Errors
/// If the server cannot be reached or rejects the connection at the start; later the device reconnects.
pub fn serve(
    fleet: &Fleet,
    description: DeviceDescription,
    here: &mut Here,
    stop: &AtomicBool,
    tell: &dyn Fn(String),
) -> Result<(), Error> {
    let leases = Arc::new(Leases::default());
    let renewing = {
        let (leases, device) = (leases.clone(), description.device.clone());
        std::thread::Builder::new().spawn(move || leases.renew(&device))
    };
    let renewing = renewing.map_err(|error| Error::Odd(format!("no thread: {error}")))?;
    let now = Instant::now();
    let mut server = Server {
        fleet,
        description,
        here,
        tell,
        leases: leases.clone(),
        client: None,
        retry: Retry::at_once(),
        said: None,
        pulls: [now; 2],
        is_pulling: [false; 2],
        held: VecDeque::new(),
        measures: Vec::new(),
        unsent: Vec::new(),
        n_tokens: 0,
        is_winding_down: false,
    };
    let served = server.connect().map(|()| {
        while !stop.load(Ordering::Relaxed) {
            server.turn();
        }
        server.give_back();
    });
    leases.is_over.store(true, Ordering::Relaxed);
    let _ = renewing.join();
    served
}

/// Names of the two sources of tasks: for any device of the class, and for this one.
const WAYS: [&str; 2] = ["any", "own"];

struct Server<'a, 'h> {
    fleet: &'a Fleet,
    description: DeviceDescription,
    here: &'a mut Here<'h>,
    tell: &'a dyn Fn(String),
    leases: Arc<Leases>,
    client: Option<Client>,
    retry: Retry,
    /// Time of the last announcement.
    said: Option<Instant>,
    /// Time of the next or last request for a task, by consumer.
    pulls: [Instant; 2],
    is_pulling: [bool; 2],
    /// Tasks in the order of arrival.
    held: VecDeque<TaskAtHand>,
    /// Measuring sides, the most recently used first.
    measures: Vec<(Assignment, Box<dyn Measure>)>,
    unsent: Vec<Unsent>,
    n_tokens: u64,
    is_winding_down: bool,
}

impl Server<'_, '_> {
    fn device(&self) -> &str {
        &self.description.device
    }

    fn connect(&mut self) -> Result<(), Error> {
        let mut client = self.fleet.connect(Some(&self.description.device))?;
        client.subscribe(&cancel_subject("*"));
        *lock(&self.leases.link) = Some(client.link().clone());
        self.client = Some(client);
        self.said = None;
        self.is_pulling = [false; 2];
        self.pulls = [Instant::now(); 2];
        for unsent in &mut self.unsent {
            unsent.sent = Instant::now().checked_sub(self.fleet.resend()).unwrap_or(unsent.sent);
        }
        Ok(())
    }

    /// Does the next work, or waits a little if there is none.
    fn turn(&mut self) {
        self.keep_in_touch();
        self.drop_what_is_over();
        self.submit();
        let is_busy = self.held.iter().any(|held| !held.numbers.is_empty());
        let mut wait = if is_busy { Duration::ZERO } else { REST };
        if self.client.is_none() && !is_busy {
            std::thread::sleep(REST);
        }
        while let Some(event) = self.client.as_mut().and_then(|client| client.next(wait)) {
            self.hear(event);
            wait = Duration::ZERO;
        }
        if is_busy {
            self.measure();
        }
        self.finish();
    }

    /// Maintains the connection, and sends announcements, requests and results that are due.
    fn keep_in_touch(&mut self) {
        let now = Instant::now();
        if self.client.is_none() {
            if !self.retry.left().is_zero() {
                return;
            }
            if self.connect().is_err() {
                return self.retry.failed();
            }
            self.retry = Retry::at_once();
            (self.tell)("the NATS server is there again".to_owned());
        }
        let is_due = self.said.is_none_or(|said| now - said > SELF);
        if is_due {
            (self.here.renew)(&mut self.description, self.held.is_empty());
        }
        let (resend, pull_time) = (self.fleet.resend(), self.fleet.part(PULL_TIME).max(LEAST_PULL));
        let pull_slack = self.fleet.part(PULL_SLACK).max(LEAST_PULL);
        let Some(client) = &self.client else { return };
        if is_due {
            self.said = Some(now);
            let reply = client.inbox("self");
            let subject = device_subject(self.device());
            client.link().publish(&subject, Some(&reply), None, &to_json(&self.description));
        }
        for unsent in self.unsent.iter_mut().filter(|unsent| now - unsent.sent >= resend) {
            unsent.sent = now;
            let reply = client.inbox(&format!("kept.{}", unsent.token));
            client.link().publish(&unsent.subject, Some(&reply), Some(&unsent.id), &unsent.payload);
        }
        for (way, name) in WAYS.iter().enumerate() {
            let is_late = self.is_pulling[way] && now - self.pulls[way] > pull_time + pull_slack;
            // A measured task that only waits for the server's confirmation does not keep the device from
            // taking the next one.
            let n_held = self.held.iter().filter(|held| !held.is_done()).count();
            let is_free = n_held + usize::from(self.is_pulling[0] && way == 0) < MOST_HELD + way;
            if (is_late || !self.is_pulling[way]) && is_free && now >= self.pulls[way] {
                let consumer = match way {
                    0 => class_consumer(&self.fleet.class),
                    _ => device_consumer(self.device()),
                };
                (self.is_pulling[way], self.pulls[way]) = (true, now);
                pull(client, TASKS, &consumer, 1, &client.inbox(name), Some(pull_time));
            }
        }
    }

    fn hear(&mut self, event: ConnectionEvent) {
        let message = match event {
            ConnectionEvent::Lost(why) => {
                (self.tell)(format!("the NATS server is not there ({why}); trying again"));
                *lock(&self.leases.link) = None;
                self.client = None;
                return;
            }
            ConnectionEvent::Refused(why) => return (self.tell)(format!("the NATS server refuses: {why}")),
            ConnectionEvent::Message(message) => message,
        };
        let name = self.client.as_ref().and_then(|client| client.name_of(&message.subject)).map(str::to_owned);
        match name.as_deref() {
            None if message.subject.starts_with(&format!("tw.{VERSION}.task.")) => self.take(&message),
            None => self.hear_cancel(&message),
            Some("self") if !is_kept(&message) => {
                // The stream for announcements does not exist yet.
                self.said = Instant::now().checked_sub(SELF - SELF_AGAIN);
            }
            Some("self") => {}
            Some(name) => {
                if let Some(way) = WAYS.iter().position(|way| *way == name) {
                    // There is no task, or no consumer of tasks yet.
                    let is_for_nobody = matches!(message.status, Some(status) if ![404, 408].contains(&status));
                    let wait = if is_for_nobody { self.fleet.part(NOBODY) } else { Duration::ZERO };
                    (self.is_pulling[way], self.pulls[way]) = (false, Instant::now() + wait);
                } else if let Some(token) = name.strip_prefix("kept.").and_then(|token| token.parse::<u64>().ok()) {
                    if is_kept(&message) {
                        self.unsent.retain(|unsent| unsent.token != token);
                    }
                } else if let Some((number, run)) = name.strip_prefix("rest.").and_then(|rest| rest.split_once('.'))
                    && let Ok(number) = number.parse::<u64>()
                {
                    // If no tuner answers, all of the task counts as wanted, for a tuner that comes back
                    // later.
                    let rest =
                        message.status.is_none().then(|| serde_json::from_slice(&message.payload).ok()).flatten();
                    self.hear_rest(run, number, rest);
                }
            }
        }
    }

    /// Accepts a task, and asks the tuner which part of it is still wanted.
    fn take(&mut self, message: &ReceivedMessage) {
        let Some(ack) = &message.reply else { return };
        let way = usize::from(!message.subject.starts_with(&format!("tw.{VERSION}.task.{}.any.", self.fleet.class)));
        self.is_pulling[way] = false;
        let Ok(task) = serde_json::from_slice::<DeviceTask>(&message.payload) else {
            return self.answer(ack, b"+TERM");
        };
        let length = Duration::try_from_secs_f64(task.lease_s).unwrap_or_default();
        let (run, number) = (task.run.clone(), task.number);
        if let Some(held) = self.held.iter_mut().find(|held| held.is(&run, number)) {
            // The server considered the task lost, and delivered it again.
            held.ack.clone_from(ack);
            for lease in lock(&self.leases.all).iter_mut().filter(|lease| lease.run == run && lease.number == number) {
                lease.ack.clone_from(ack);
                (lease.renewed, lease.is_over) = (Instant::now(), false);
            }
            return;
        }
        let lease = Lease {
            run: run.clone(),
            number,
            ack: ack.clone(),
            length,
            renewed: Instant::now(),
            started: None,
            is_over: false,
        };
        lock(&self.leases.all).push(lease);
        if let Some(client) = &self.client {
            let ask = Ask { task: Some(number), device: self.device().to_owned(), n_times: n_deliveries(ack) };
            let reply = client.inbox(&format!("rest.{number}.{run}"));
            client.link().publish(&rest_subject(&run), Some(&reply), None, &to_json(&ask));
        }
        self.held.push_back(TaskAtHand {
            task,
            ack: ack.clone(),
            asked: Some(Instant::now()),
            is_dangerous: false,
            waiting: VecDeque::new(),
            numbers: BTreeMap::new(),
        });
    }

    fn hear_rest(&mut self, run: &str, number: u64, rest: Option<RemainingTask>) {
        let Some(at) = self.held.iter().position(|held| held.is(run, number) && held.asked.is_some()) else { return };
        let held = &mut self.held[at];
        let all = || RemainingTask { wanted: (0..held.task.candidates.len()).collect(), ..RemainingTask::default() };
        let rest = rest.unwrap_or_else(all);
        held.asked = None;
        // Without a tuner's answer, a task that was delivered before may be dangerous.
        held.is_dangerous = rest.is_dangerous;
        held.waiting = rest.wanted.into_iter().filter(|index| *index < held.task.candidates.len()).collect();
        if rest.is_aside {
            let held = self.held.remove(at).expect("invariant: it was found there");
            self.leave(&held, b"-NAK");
            self.pulls = [Instant::now() + self.fleet.lease; 2];
        }
    }

    /// Releases a task with an acknowledgement to the server.
    fn leave(&self, held: &TaskAtHand, word: &[u8]) {
        if let Some(client) = self.client.as_ref().filter(|_| word == b"-NAK") {
            // The report tells the tuner that the task was returned, and not because a candidate crashed the
            // device.
            let given_back = Started { task: held.task.number, index: None, device: None };
            client.link().publish(&started_subject(&held.task.run), None, None, &to_json(&given_back));
        }
        lock(&self.leases.all).retain(|lease| !held.is(&lease.run, lease.number));
        self.answer(&held.ack, word);
    }

    fn answer(&self, ack: &str, word: &[u8]) {
        // An empty payload would be an acknowledgement.
        if let Some(client) = self.client.as_ref().filter(|_| !word.is_empty()) {
            client.link().publish(ack, None, None, word);
        }
    }

    fn hear_cancel(&mut self, message: &ReceivedMessage) {
        let before = cancel_subject("");
        let Some(run) = message.subject.strip_prefix(&before).map(str::to_owned) else { return };
        match serde_json::from_slice(&message.payload) {
            Ok(Cancel::From(from)) => {
                self.unsent.retain(|unsent| unsent.run != run || unsent.number < from);
                self.cancel(|held| held.task.run == run && held.task.number >= from, b"+ACK");
            }
            Ok(Cancel::WindDown) => {
                self.cancel(|held| held.task.run == run && held.numbers.is_empty(), b"+ACK");
                if self.held.front().is_some_and(|held| held.task.run == run)
                    && let Some((_, measure)) = self.measures.first_mut()
                {
                    measure.wind_down();
                    self.is_winding_down = true;
                }
            }
            Err(_) => {}
        }
    }

    /// Abandons tasks.
    fn cancel(&mut self, is_meant: impl Fn(&TaskAtHand) -> bool, word: &[u8]) {
        let (meant, left): (VecDeque<TaskAtHand>, _) = std::mem::take(&mut self.held).into_iter().partition(is_meant);
        self.held = left;
        let from = meant.iter().flat_map(|held| held.numbers.keys()).min().copied();
        if let Some(from) = from
            && let Some((_, measure)) = self.measures.first_mut()
        {
            if let Err(error) = measure.cancel(from) {
                (self.tell)(format!("workers are started anew: {error}"));
                self.measures.remove(0);
            }
            // Candidates submitted later are cancelled with it, and submitted again.
            for held in &mut self.held {
                let numbers: Vec<u64> = held.numbers.range(from..).map(|(number, _)| *number).collect();
                for number in numbers.into_iter().rev() {
                    held.waiting.extend(held.numbers.remove(&number));
                }
                held.waiting.make_contiguous().sort_unstable();
            }
        }
        meant.iter().for_each(|held| self.leave(held, word));
    }

    fn drop_what_is_over(&mut self) {
        let over: Vec<(String, u64)> = lock(&self.leases.all)
            .iter()
            .filter(|lease| lease.is_over)
            .map(|lease| (lease.run.clone(), lease.number))
            .collect();
        if !over.is_empty() {
            // Another device has the task by now; no acknowledgement is sent, since the server would
            // attribute it to that device.
            (self.tell)("a task is given up that others have by now".to_owned());
            self.cancel(|held| over.iter().any(|(run, number)| held.is(run, *number)), b"");
        }
    }

    /// Submits wanted candidates for measurement.
    fn submit(&mut self) {
        let (now, answer_time) = (Instant::now(), self.fleet.part(ANSWER_TIME));
        let late: Vec<(String, u64)> = self
            .held
            .iter()
            .filter(|held| held.asked.is_some_and(|asked| now - asked > answer_time))
            .map(|held| (held.task.run.clone(), held.task.number))
            .collect();
        late.into_iter().for_each(|(run, number)| self.hear_rest(&run, number, None));
        let dangerous = self.held.iter().position(|held| held.is_dangerous && !held.is_done());
        for at in 0..self.held.len() {
            let held = &self.held[at];
            let busy = self.held.iter().find(|held| !held.numbers.is_empty());
            let has_turn = busy.is_none_or(|busy| busy.goes_with(held));
            if held.waiting.is_empty() || !has_turn {
                continue;
            }
            // A candidate that may crash the machine runs alone, so that the culprit is known.
            if dangerous.is_some_and(|dangerous| dangerous != at || busy.is_some()) {
                continue;
            }
            let assignment = held.task.assignment.clone();
            if let Err(error) = self.wake(&assignment) {
                return self.refuse(at, &error.to_string());
            }
            if self.held[at].task.race.is_some() {
                if self.held.iter().all(|held| held.numbers.is_empty()) {
                    self.race(at);
                }
                return;
            }
            let held = &mut self.held[at];
            let n = if held.is_dangerous { 1 } else { held.waiting.len() };
            let indices: Vec<usize> = held.waiting.drain(..n).collect();
            let candidates: Vec<_> = indices.iter().map(|index| held.task.candidates[*index].candidate()).collect();
            let numbers = self.measures[0].1.submit(&candidates);
            held.numbers.extend(numbers.zip(indices.iter().copied()));
            let index = held.is_dangerous.then(|| indices[0]);
            let (run, number) = (held.task.run.clone(), held.task.number);
            self.is_winding_down = false;
            self.begin(&run, number, index);
            self.describe(Some(assignment.workload));
        }
    }

    /// Reports that a task has started.
    fn begin(&self, run: &str, number: u64, index: Option<usize>) {
        let link = lock(&self.leases.link).clone();
        for lease in lock(&self.leases.all).iter_mut().filter(|lease| lease.run == run && lease.number == number) {
            lease.started = Some(index);
            if let Some(link) = &link {
                lease.say(link, &self.description.device);
            }
        }
    }

    fn describe(&mut self, doing: Option<String>) {
        self.description.doing = doing;
    }

    /// Moves the measuring side of an assignment to the front, and starts it if necessary.
    fn wake(&mut self, assignment: &Assignment) -> Result<(), BoxError> {
        if let Some(at) = self.measures.iter().position(|(known, _)| known == assignment) {
            let measure = self.measures.remove(at);
            self.measures.insert(0, measure);
            return Ok(());
        }
        self.measures.truncate(MOST_ASSIGNMENTS - 1);
        let measure = (self.here.start)(assignment)?;
        self.measures.insert(0, (assignment.clone(), measure));
        Ok(())
    }

    /// Reports that a task's assignment cannot be measured here, and leaves the task to other devices.
    fn refuse(&mut self, at: usize, why: &str) {
        let Some(held) = self.held.remove(at) else { return };
        (self.tell)(format!("{}: {why}", held.task.assignment.workload));
        let DeviceTask { run, number, .. } = &held.task;
        let done = Done {
            task: *number,
            index: usize::MAX,
            device: self.device().to_owned(),
            what: Finding::Broken(why.to_owned()),
        };
        // The id contains the device, as each one may report this.
        let id = format!("{run}.{number}.broken.{}", self.description.device);
        self.n_tokens += 1;
        self.send(run, *number, id, to_json(&done));
        self.leave(&held, b"-NAK");
        self.pulls = [Instant::now() + self.fleet.part(NOBODY); 2];
    }

    /// Sends a result, repeatedly until the server confirms it.
    fn report(&mut self, run: &str, done: Done) {
        self.n_tokens += 1;
        let id = done.id(run);
        self.send(run, done.task, id, to_json(&done));
    }

    /// Sends a message to be stored for a task.
    fn send(&mut self, run: &str, number: u64, id: String, payload: Vec<u8>) {
        let subject = result_subject(run, self.device());
        if let Some(client) = &self.client {
            let reply = client.inbox(&format!("kept.{}", self.n_tokens));
            client.link().publish(&subject, Some(&reply), Some(&id), &payload);
        }
        self.unsent.push(Unsent {
            token: self.n_tokens,
            run: run.to_owned(),
            number,
            subject,
            id,
            payload,
            sent: Instant::now(),
        });
    }

    /// Handles finished measurements.
    fn measure(&mut self) {
        let leading_ns = self.held.iter().rev().find(|held| !held.numbers.is_empty()).and_then(|h| h.task.leading_ns);
        let Some((_, measure)) = self.measures.first_mut() else { return };
        match measure.next(leading_ns, LISTEN) {
            Ok(Next::Done(number, measured)) => self.found(number, measured),
            Ok(Next::Pending) => {}
            // The measuring side was told to start nothing more, so there are no further results.
            Ok(Next::Idle) => {
                let meant = |held: &TaskAtHand| !held.numbers.is_empty();
                if self.is_winding_down {
                    self.held.iter_mut().for_each(|held| held.numbers.clear());
                } else {
                    self.cancel(meant, b"-NAK");
                }
            }
            Err(error) => {
                self.measures.remove(0);
                if let Some(at) = self.held.iter().position(|held| !held.numbers.is_empty()) {
                    self.held.iter_mut().for_each(|held| held.numbers.clear());
                    self.refuse(at, &error.to_string());
                }
            }
        }
    }

    fn found(&mut self, number: u64, measured: Measured) {
        for held in &mut self.held {
            if let Some(index) = held.numbers.remove(&number) {
                let device = self.description.device.clone();
                let what = Finding::of(&held.task.candidates[index], &device, measured);
                self.description.heed(&what);
                let done = Done { task: held.task.number, index, device, what };
                let run = held.task.run.clone();
                self.description.n_trials += 1;
                return self.report(&run, done);
            }
        }
    }

    /// Races candidates, and meanwhile listens for a cancellation.
    fn race(&mut self, at: usize) {
        let Some(mut held) = self.held.remove(at) else { return };
        let Some(bounds) = held.task.race else { return };
        let (run, number) = (held.task.run.clone(), held.task.number);
        self.begin(&run, number, None);
        self.describe(Some(format!("{}, a race", held.task.assignment.workload)));
        let candidates: Vec<_> = held.task.candidates.iter().map(|sent| sent.candidate()).collect();
        let (stop, is_over, cancel) = (AtomicBool::new(false), AtomicBool::new(false), cancel_subject(&run));
        let (_, measure) = &mut self.measures[0];
        let mut client = self.client.take();
        // The race runs on this thread, as worker processes end with the thread that starts them.
        let (raced, later) = std::thread::scope(|scope| {
            let listening = scope.spawn(|| {
                let mut later = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    match client.as_mut().map(|client| client.next(REST)) {
                        Some(Some(ConnectionEvent::Message(message))) if message.subject == cancel => {
                            stop.store(true, Ordering::Relaxed);
                        }
                        Some(Some(event)) => {
                            let is_lost = matches!(event, ConnectionEvent::Lost(_));
                            later.push(event);
                            if is_lost {
                                break;
                            }
                        }
                        Some(None) => {}
                        None => break,
                    }
                }
                later
            });
            let raced = measure.race(&candidates, bounds.into(), Some(&stop), &mut |_| ());
            is_over.store(true, Ordering::Relaxed);
            (raced, listening.join().unwrap_or_default())
        });
        self.client = client;
        later.into_iter().for_each(|event| self.hear(event));
        held.waiting.clear();
        match raced {
            Ok(standings) => {
                let places = standings.into_iter().map(|standing: Standing| Finalist::from(standing)).collect();
                let device = self.device().to_owned();
                self.report(&run, Done { task: number, index: 0, device, what: Finding::Race(places) });
                self.held.push_front(held);
            }
            Err(error) => {
                self.measures.remove(0);
                self.held.push_front(held);
                self.refuse(0, &error.to_string());
            }
        }
    }

    /// Releases tasks all of whose results are stored.
    fn finish(&mut self) {
        let unsent = &self.unsent;
        let (done, left): (VecDeque<TaskAtHand>, _) = std::mem::take(&mut self.held)
            .into_iter()
            .partition(|held| held.is_done() && !unsent.iter().any(|unsent| held.is(&unsent.run, unsent.number)));
        self.held = left;
        done.iter().for_each(|held| self.leave(held, b"+ACK"));
        if self.held.is_empty() && !done.is_empty() {
            self.describe(None);
        }
    }

    /// Returns all held tasks.
    fn give_back(&mut self) {
        self.cancel(|_| true, b"-NAK");
        if let Some(client) = &self.client {
            // An empty description means that the device is offline.
            client.link().publish(&device_subject(self.device()), None, None, b"");
        }
    }
}
