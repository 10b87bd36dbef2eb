//! A fleet as a [`Measure`] of the tuner.
//!
//! The server's data may be lost at any time: submitted candidates are kept here until their results arrive,
//! and are sent again if the server has lost them. Results are acknowledged once they are recorded.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tilewright_search::{
    BoxError, Candidate, ErrorClass, Measure, Measured, MeasuringTraits, Next, RaceLimits, Standing,
};

use crate::Fleet;
use crate::devices::{DeviceDescription, listed};
use crate::error::Error;
use crate::jetstream::{
    forget_run, is_kept, keep, make_class, make_device, make_run, make_streams, n_left, n_tasks, pull, purge_tasks,
};
use crate::nats::{Client, ConnectionEvent, ReceivedMessage, Retry};
use crate::protocol::{
    ANY, Ask, Assignment, Cancel, DeviceTask, Done, Finding, RESULTS, RemainingTask, Sent, Started, TASKS,
    cancel_subject, class_consumer, rest_subject, result_subject, started_subject, task_subject,
};

/// Maximum number of candidates of a task.
const MOST_OF_TASK: usize = 16;
/// Maximum number of bytes of a message besides the task, including the growth of its numbers.
const AROUND: usize = 512;
/// Number of tasks of a batch for each device: one to measure, and one to build meanwhile.
const TASKS_PER_DEVICE: usize = 2;
/// Number of results in a request, and its timeout.
const PULLED: u64 = 256;
const PULL_TIME: Duration = Duration::from_secs(20);
/// Divisor of the lease that gives the interval of checks.
const WATCH: u32 = 20;
/// Maximum time of a single wait while there is no connection.
const NO_SERVER: Duration = Duration::from_millis(50);
/// Silence, in leases, after which the server is asked whether it still has the tasks.
const QUIET_LEASES: u32 = 2;
/// Number of machines that may vanish while a candidate runs before it counts as failed.
const MOST_STRIKES: u64 = 2;
/// Interval at which a race checks whether it should end.
const LOOK: Duration = Duration::from_millis(50);
/// Timeout of the wait for a device to race on.
const FIRST_DEVICE: Duration = Duration::from_secs(5);
/// Time beyond its limit after which a race without news is repeated on another device.
const RACE_SLACK: Duration = Duration::from_secs(30);
/// Time for which the end of a run waits for an unreachable server.
const FAREWELL: Duration = Duration::from_secs(3);

/// Task in progress.
struct PendingTask {
    /// Number of the task's first candidate.
    first: u64,
    candidates: Vec<Sent>,
    is_done: Vec<bool>,
    /// Whether the server has confirmed the task; below, the time of the last attempt to send it, and their
    /// number.
    is_kept: bool,
    sent: Instant,
    attempt: u32,
    /// Device that works on the task, and below the current candidate, if known.
    device: Option<String>,
    at: Option<usize>,
}

impl PendingTask {
    fn wanted(&self) -> Vec<usize> {
        (0..self.candidates.len()).filter(|index| !self.is_done[*index]).collect()
    }

    /// Candidate that was probably running when a machine vanished.
    fn suspect(&self) -> Option<usize> {
        self.at.filter(|at| self.is_done.get(*at) == Some(&false)).or_else(|| self.wanted().first().copied())
    }
}

/// Makes the message of a candidate.
fn sent(candidate: &Candidate) -> Sent {
    Sent {
        steps: candidate.steps.to_string(),
        config: serde_json::to_string(candidate.config.ranks()).expect("invariant: numbers have a form in JSON"),
        patience_s: candidate.patience.map(|time| time.as_secs_f64()),
    }
}

/// Divides candidates into parts of at most `most`, each of which fits a message; a candidate that does not
/// fit is a part of its own.
fn parts(candidates: impl Iterator<Item = Sent>, most: usize, room: usize) -> Vec<Vec<Sent>> {
    let (mut parts, mut left): (Vec<Vec<Sent>>, usize) = (Vec::new(), 0);
    for candidate in candidates {
        let n_bytes = to_json(&candidate).len() + 1;
        match parts.last_mut().filter(|part| part.len() < most && n_bytes <= left) {
            Some(part) => {
                part.push(candidate);
                left -= n_bytes;
            }
            None => {
                parts.push(vec![candidate]);
                left = room.saturating_sub(n_bytes);
            }
        }
    }
    parts
}

/// Race in progress on a device.
struct DeviceRace {
    number: u64,
    n_candidates: usize,
    standings: Option<Vec<Standing>>,
}

/// Callbacks for a run's records and messages.
pub struct RunRecords<'a> {
    /// Records that a machine vanished while it measured this configuration, and returns how often that
    /// happened.
    pub strike: Box<dyn FnMut(&str) -> u64 + Send + 'a>,
    /// Receives messages for the user.
    pub tell: Box<dyn Fn(String) + Send + 'a>,
}

/// Measuring side for one assignment on the devices of a class.
pub struct Remote<'a> {
    fleet: Fleet,
    assignment: Assignment,
    run: String,
    books: RunRecords<'a>,
    /// Connection; `None` while disconnected.
    client: Option<Client>,
    /// Maximum message size of the server, as last known.
    max_payload: usize,
    retry: Retry,
    watched: Instant,
    /// Time of the last news of any device.
    heard: Instant,
    pulled: (u64, Instant),
    tasks: BTreeMap<u64, PendingTask>,
    n_tasks: u64,
    n_submitted: u64,
    n_devices: usize,
    leading_ns: Option<f64>,
    ready: VecDeque<(u64, Measured)>,
    /// Acknowledgement subjects of results, by the candidate's number.
    acks: Vec<(u64, String)>,
    /// Excluded devices; below, devices that have measured something, the most recent last.
    aside: HashSet<String>,
    of_use: Vec<String>,
    race: Option<DeviceRace>,
    is_store_gone: bool,
    /// Reason why nothing can be measured any more, if any.
    broken: Option<String>,
    /// Number of duplicate results.
    n_duplicates: u64,
    is_told: BTreeSet<&'static str>,
}

impl<'a> Remote<'a> {
    /// Starts a run with a unique name that uses `n_devices` devices.
    ///
    /// # Errors
    /// If the server cannot be reached or rejects the connection, or no device of the class is online.
    pub fn start(
        fleet: &Fleet,
        run: &str,
        assignment: Assignment,
        n_devices: usize,
        books: RunRecords<'a>,
    ) -> Result<Remote<'a>, Error> {
        let now = Instant::now();
        let mut remote = Remote {
            fleet: fleet.clone(),
            assignment,
            run: run.to_owned(),
            books,
            client: None,
            max_payload: 0,
            retry: Retry::at_once(),
            watched: now,
            heard: now,
            pulled: (0, now),
            tasks: BTreeMap::new(),
            n_tasks: 0,
            n_submitted: 0,
            n_devices: n_devices.max(1),
            leading_ns: None,
            ready: VecDeque::new(),
            acks: Vec::new(),
            aside: HashSet::new(),
            of_use: Vec::new(),
            race: None,
            is_store_gone: false,
            broken: None,
            n_duplicates: 0,
            is_told: BTreeSet::new(),
        };
        remote.use_client(remote.connect()?);
        let devices = remote.devices()?;
        for (device, ratio) in strays(&devices) {
            (remote.books.tell)(format!(
                "device {device} is set aside: what all devices measure takes {ratio:.2} times as long there"
            ));
            remote.aside.insert(device);
        }
        Ok(remote)
    }

    /// Excludes the devices with these names.
    #[must_use]
    pub fn without(mut self, aside: impl IntoIterator<Item = String>) -> Remote<'a> {
        self.aside.extend(aside);
        self
    }

    /// Number of duplicate results that were ignored.
    pub fn n_duplicates(&self) -> u64 {
        self.n_duplicates
    }

    fn connect(&self) -> Result<Client, Error> {
        let mut client = self.fleet.connect(None)?;
        make_streams(&mut client)?;
        make_class(&mut client, &self.fleet.class, self.fleet.lease)?;
        make_run(&mut client, &self.run)?;
        client.subscribe(&started_subject(&self.run));
        client.subscribe(&rest_subject(&self.run));
        Ok(client)
    }

    fn use_client(&mut self, client: Client) {
        self.max_payload = client.link().max_payload();
        self.client = Some(client);
    }

    /// Returns the usable devices of the class.
    fn devices(&mut self) -> Result<Vec<DeviceDescription>, Error> {
        let Some(client) = &mut self.client else { return Ok(Vec::new()) };
        let devices: Vec<_> = listed(client)?.into_iter().filter(|device| device.class == self.fleet.class).collect();
        for device in &devices {
            make_device(client, &self.fleet.class, &device.device, self.fleet.lease)?;
        }
        Ok(devices)
    }

    fn say<T: Serialize>(&self, subject: &str, message: &T) {
        if let Some(client) = &self.client {
            client.link().publish(subject, None, None, &to_json(message));
        }
    }

    /// Tells the user something once.
    fn tell_once(&mut self, key: &'static str, text: impl FnOnce() -> String) {
        if self.is_told.insert(key) {
            (self.books.tell)(text());
        }
    }

    /// Sends a task, or its remaining part.
    fn send(&mut self, number: u64) {
        let Some(pending) = self.tasks.get_mut(&number) else { return };
        pending.sent = Instant::now();
        pending.is_kept = false;
        let (candidates, wanted) = (pending.candidates.clone(), pending.wanted());
        let id = format!("{}.{number}.{}", self.run, pending.attempt);
        let task = to_json(&self.task(number, candidates, None));
        let Some(client) = &self.client else { return };
        let subject = task_subject(&self.fleet.class, ANY, &self.run);
        let reply = client.inbox(&format!("kept.{number}"));
        if !client.link().publish(&subject, Some(&reply), Some(&id), &task) {
            let (n_bytes, most) = (task.len(), client.link().max_payload());
            let why = Error::TooLarge { n_bytes, most }.to_string();
            for index in wanted {
                self.settle(number, index, Measured::failed(ErrorClass::InstantiationError, why.clone()));
            }
        }
    }

    /// Makes a task of these candidates, for a race if limits are given.
    fn task(&self, number: u64, candidates: Vec<Sent>, race: Option<RaceLimits>) -> DeviceTask {
        DeviceTask {
            run: self.run.clone(),
            number,
            assignment: self.assignment.clone(),
            candidates,
            leading_ns: self.leading_ns.filter(|_| race.is_none()),
            race: race.map(RaceLimits::into),
            lease_s: self.fleet.lease.as_secs_f64(),
        }
    }

    /// Removes this run's tasks from the server, and sends all unfinished ones.
    fn send_all(&mut self) -> Result<(), Error> {
        if let Some(client) = &mut self.client {
            make_streams(client)?;
            make_class(client, &self.fleet.class, self.fleet.lease)?;
            make_run(client, &self.run)?;
            purge_tasks(client, &self.run)?;
        }
        self.pulled.0 = 0;
        for number in self.tasks.keys().copied().collect::<Vec<_>>() {
            if let Some(pending) = self.tasks.get_mut(&number) {
                pending.attempt += 1;
            }
            self.send(number);
        }
        self.heard = Instant::now();
        Ok(())
    }

    /// Maintains the connection, and resends tasks that may be lost.
    fn watch(&mut self) {
        let now = Instant::now();
        if self.client.is_none() {
            if !self.retry.left().is_zero() {
                return;
            }
            match self.connect() {
                Ok(client) => {
                    self.use_client(client);
                    self.retry = Retry::at_once();
                    self.pulled.0 = 0;
                    self.is_told.remove("lost");
                    (self.books.tell)("the NATS server is there again".to_owned());
                    // The server's data may be lost.
                    if let Err(error) = self.look_after() {
                        return self.lose(&error.to_string());
                    }
                }
                Err(_) => return self.retry.failed(),
            }
        }
        let every = self.fleet.part(WATCH);
        if self.is_store_gone && now - self.watched > every {
            self.watched = now;
            self.is_store_gone = false;
            if let Err(error) = self.send_all() {
                return self.lose(&error.to_string());
            }
        }
        if self.pulled.0 == 0 || now - self.pulled.1 > PULL_TIME + self.fleet.resend() {
            self.pulled = (PULLED, now);
            if let Some(client) = &self.client {
                pull(client, RESULTS, &self.run, PULLED, &client.inbox("results"), Some(PULL_TIME));
            }
        }
        if now - self.watched < every {
            return;
        }
        self.watched = now;
        let unsure: Vec<u64> = self.tasks.iter().filter(|(_, task)| !task.is_kept).map(|(at, _)| *at).collect();
        let unsure: Vec<u64> =
            unsure.into_iter().filter(|at| now - self.tasks[at].sent > self.fleet.resend()).collect();
        unsure.into_iter().for_each(|number| self.send(number));
        if !self.tasks.is_empty() && now - self.heard > QUIET_LEASES * self.fleet.lease {
            self.heard = now;
            if let Err(error) = self.look_after() {
                self.lose(&error.to_string());
            }
        }
    }

    /// After a long silence, resends tasks that the server has lost, and reports if no device is online.
    fn look_after(&mut self) -> Result<(), Error> {
        let Some(client) = &mut self.client else { return Ok(()) };
        if self.tasks.is_empty() {
            return Ok(());
        }
        let n_there = n_tasks(client, &self.run)?;
        let n_left = n_left(client, TASKS, &class_consumer(&self.fleet.class))?;
        // Stored tasks that are not pending have exceeded the maximum number of deliveries.
        let is_lost = n_there.is_none_or(|n| n < self.tasks.len() as u64) || n_left.is_none_or(|n| n == 0);
        if is_lost {
            return self.send_all();
        }
        if self.devices()?.is_empty() {
            let class = self.fleet.class.clone();
            self.tell_once("nobody", || format!("no device of class {class} is there any more; waiting for one"));
        } else {
            self.is_told.remove("nobody");
        }
        Ok(())
    }

    fn lose(&mut self, why: &str) {
        self.client = None;
        let why = why.to_owned();
        self.tell_once("lost", || format!("the NATS server is not there ({why}); trying again"));
    }

    fn hear(&mut self, event: ConnectionEvent) {
        match event {
            ConnectionEvent::Lost(why) => self.lose(&why),
            ConnectionEvent::Refused(why) => self.tell_once("refused", || format!("the NATS server refuses: {why}")),
            ConnectionEvent::Message(message) => self.hear_message(message),
        }
    }

    fn hear_message(&mut self, message: ReceivedMessage) {
        let name = self.client.as_ref().and_then(|client| client.name_of(&message.subject)).map(str::to_owned);
        if let Some(name) = name {
            if name == "results" {
                // There are no results, or no consumer.
                self.pulled.0 = 0;
                // The consumer does not exist any more: the server has lost its data.
                if message.status == Some(503) {
                    self.is_store_gone = true;
                    self.pulled = (1, Instant::now());
                }
            } else if let Some(number) = name.strip_prefix("kept.").and_then(|number| number.parse::<u64>().ok())
                && let Some(task) = self.tasks.get_mut(&number)
            {
                task.is_kept = is_kept(&message);
            }
        } else if message.subject.starts_with(&result_subject(&self.run, "")) {
            self.pulled.0 = self.pulled.0.saturating_sub(1);
            self.hear_result(&message);
        } else if message.subject == started_subject(&self.run) {
            let Ok(Started { task, index, device }) = serde_json::from_slice(&message.payload) else { return };
            if let Some(pending) = self.tasks.get_mut(&task) {
                self.heard = Instant::now();
                (pending.device, pending.at) = (device, index);
            } else if self.race.as_ref().is_some_and(|race| race.number == task) {
                self.heard = Instant::now();
            }
        } else if message.subject == rest_subject(&self.run)
            && let Ok(ask) = serde_json::from_slice::<Ask>(&message.payload)
            && let Some(reply) = &message.reply
        {
            let rest = self.rest(&ask);
            self.say(reply, &rest);
        }
    }

    fn hear_result(&mut self, message: &ReceivedMessage) {
        let Some(ack) = &message.reply else { return };
        let Ok(done) = serde_json::from_slice::<Done>(&message.payload) else { return self.acknowledge(ack) };
        self.heard = Instant::now();
        match done.what {
            Finding::Trial { outcome, seconds, limit, conditions, .. } => {
                let number = self.settle(done.task, done.index, Measured { outcome, seconds, limit, conditions });
                match number {
                    Some(number) => self.acks.push((number, ack.clone())),
                    None => {
                        self.n_duplicates += 1;
                        self.acknowledge(ack);
                    }
                }
                if self.of_use.last() != Some(&done.device) {
                    self.of_use.retain(|known| *known != done.device);
                    self.of_use.push(done.device);
                }
            }
            Finding::Race(places) => {
                if let Some(race) = self.race.as_mut().filter(|race| race.number == done.task) {
                    race.standings = Some(places.into_iter().map(Standing::from).collect());
                }
                self.acknowledge(ack);
            }
            Finding::Broken(why) => {
                self.acknowledge(ack);
                if self.aside.insert(done.device.clone()) {
                    (self.books.tell)(format!("device {} is set aside: {why}", done.device));
                }
                if let Some(pending) = self.tasks.get_mut(&done.task) {
                    pending.device = None;
                }
                let others = self.devices().unwrap_or_default();
                if others.iter().all(|device| self.aside.contains(&device.device)) {
                    self.broken = Some(why);
                }
            }
        }
    }

    fn acknowledge(&self, ack: &str) {
        if let Some(client) = &self.client {
            client.link().publish(ack, None, None, b"+ACK");
        }
    }

    /// Handles a result; returns the candidate's number if it is still wanted.
    fn settle(&mut self, task: u64, index: usize, measured: Measured) -> Option<u64> {
        let pending = self.tasks.get_mut(&task)?;
        if std::mem::replace(pending.is_done.get_mut(index)?, true) {
            return None;
        }
        let number = pending.first + index as u64;
        if pending.is_done.iter().all(|is_done| *is_done) {
            self.tasks.remove(&task);
        }
        self.ready.push_back((number, measured));
        Some(number)
    }

    /// Answers a device's query for the remaining part of a task.
    fn rest(&mut self, ask: &Ask) -> RemainingTask {
        if self.aside.contains(&ask.device) {
            return RemainingTask { is_aside: true, ..RemainingTask::default() };
        }
        let Some(number) = ask.task else { return RemainingTask::default() };
        if let Some(race) = self.race.as_ref().filter(|race| race.number == number && ask.n_times == 1) {
            self.heard = Instant::now();
            return RemainingTask { wanted: (0..race.n_candidates).collect(), ..RemainingTask::default() };
        }
        let Some(pending) = self.tasks.get_mut(&number) else { return RemainingTask::default() };
        self.heard = Instant::now();
        let mut is_dangerous = false;
        if ask.n_times > 1
            && let Some(before) = pending.device.take()
            && let Some(suspect) = pending.suspect()
        {
            is_dangerous = true;
            let n = (self.books.strike)(&pending.candidates[suspect].config);
            (self.books.tell)(format!("device {before} went away; {} goes on", ask.device));
            if n >= MOST_STRIKES {
                let why = "two machines went away while it ran".to_owned();
                self.settle(number, suspect, Measured::failed(ErrorClass::RuntimeError, why));
            }
        }
        let wanted = self.tasks.get(&number).map(PendingTask::wanted).unwrap_or_default();
        RemainingTask { wanted, is_dangerous, is_aside: false }
    }

    /// Waits for an event, and handles it.
    fn wait(&mut self, at_most: Duration) {
        self.watch();
        match self.client.as_mut().map(|client| client.next(at_most)) {
            None => std::thread::sleep(at_most.min(self.retry.left()).min(NO_SERVER)),
            Some(None) => {}
            Some(Some(event)) => self.hear(event),
        }
    }

    /// Races candidates on a device; `None` if the race does not finish there.
    fn race_on(
        &mut self,
        device: &str,
        candidates: &[Candidate],
        limits: RaceLimits,
        stop: Option<&AtomicBool>,
    ) -> Result<Option<Vec<Standing>>, Error> {
        let number = self.n_tasks;
        self.n_tasks += 1;
        let task = self.task(number, candidates.iter().map(sent).collect(), Some(limits));
        let now = Instant::now();
        self.race = Some(DeviceRace { number, n_candidates: candidates.len(), standings: None });
        let subject = task_subject(&self.fleet.class, device, &self.run);
        if let Some(client) = &mut self.client {
            make_device(client, &self.fleet.class, device, self.fleet.lease)?;
            keep(client, &subject, Some(&format!("{}.{number}", self.run)), &to_json(&task))?;
        }
        self.heard = now;
        let mut is_stopped = false;
        let until = now + limits.total + RACE_SLACK;
        while self.race.as_ref().is_some_and(|race| race.standings.is_none()) {
            let now = Instant::now();
            if now > until || now - self.heard > QUIET_LEASES * self.fleet.lease {
                self.say(&cancel_subject(&self.run), &Cancel::From(number));
                break;
            }
            if !is_stopped && stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                is_stopped = true;
                self.say(&cancel_subject(&self.run), &Cancel::WindDown);
            }
            self.wait(LOOK);
        }
        Ok(self.race.take().and_then(|race| race.standings))
    }
}

impl Measure for Remote<'_> {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        let first = self.n_submitted;
        self.n_submitted += candidates.len() as u64;
        let n_tasks = TASKS_PER_DEVICE * self.n_devices;
        let n_of_task = candidates.len().div_ceil(n_tasks).clamp(1, MOST_OF_TASK);
        if self.tasks.is_empty() {
            self.heard = Instant::now();
        }
        let around = to_json(&self.task(u64::MAX, Vec::new(), None)).len() + AROUND;
        let room = self.max_payload.saturating_sub(around);
        let mut next = first;
        for candidates in parts(candidates.iter().map(sent), n_of_task, room) {
            let number = self.n_tasks;
            self.n_tasks += 1;
            let (n, first) = (candidates.len(), next);
            next += n as u64;
            let pending = PendingTask {
                first,
                candidates,
                is_done: vec![false; n],
                is_kept: false,
                sent: Instant::now(),
                attempt: 0,
                device: None,
                at: None,
            };
            self.tasks.insert(number, pending);
            self.send(number);
        }
        first..self.n_submitted
    }

    fn next(&mut self, leading_ns: Option<f64>, at_most: Duration) -> Result<Next, BoxError> {
        self.leading_ns = leading_ns;
        let until = Instant::now() + at_most;
        loop {
            if let Some((number, measured)) = self.ready.pop_front() {
                return Ok(Next::Done(number, measured));
            }
            if let Some(why) = self.broken.take() {
                return Err(why.into());
            }
            if self.tasks.is_empty() {
                return Ok(Next::Idle);
            }
            let now = Instant::now();
            if now >= until {
                // Received messages are handled even if no time is left.
                self.wait(Duration::ZERO);
                return Ok(self.ready.pop_front().map_or(Next::Pending, |(at, measured)| Next::Done(at, measured)));
            }
            self.wait((until - now).min(self.fleet.part(WATCH)));
        }
    }

    fn wind_down(&mut self) {
        self.say(&cancel_subject(&self.run), &Cancel::WindDown);
        if let Some(client) = &mut self.client {
            let _ = purge_tasks(client, &self.run);
        }
        self.tasks.retain(|_, task| task.device.is_some());
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        let first = self.tasks.iter().find(|(_, task)| task.first >= from).map(|(number, _)| *number);
        if let Some(first) = first {
            self.say(&cancel_subject(&self.run), &Cancel::From(first));
        }
        self.tasks.retain(|_, task| task.first < from);
        self.ready.retain(|(number, _)| *number < from);
        if let Some(client) = &mut self.client
            && first.is_some()
            && self.tasks.is_empty()
        {
            let _ = purge_tasks(client, &self.run);
        }
        Ok(())
    }

    fn recorded(&mut self, before: u64) {
        let (recorded, left) = std::mem::take(&mut self.acks).into_iter().partition(|(number, _)| *number < before);
        self.acks = left;
        let recorded: Vec<(u64, String)> = recorded;
        recorded.iter().for_each(|(_, ack)| self.acknowledge(ack));
    }

    fn race(
        &mut self,
        candidates: &[Candidate],
        limits: RaceLimits,
        stop: Option<&AtomicBool>,
        left: &mut dyn FnMut(usize),
    ) -> Result<Vec<Standing>, BoxError> {
        left(candidates.len());
        let start = Instant::now();
        // A device that has just come online may not have announced itself yet.
        let until = Instant::now() + FIRST_DEVICE;
        let mut devices = Vec::new();
        while devices.is_empty() && Instant::now() < until {
            self.wait(LOOK);
            devices = self.devices()?.into_iter().map(|device| device.device).collect();
            devices.retain(|device| !self.aside.contains(device));
        }
        // Devices that measured most recently come first, as they are known to work.
        devices.sort_by_key(|device| std::cmp::Reverse(self.of_use.iter().position(|known| known == device)));
        for (at, device) in devices.iter().enumerate() {
            let Some(standings) = self.race_on(device, candidates, limits, stop)? else { continue };
            let is_stopped = stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
            if let (Some(other), false) = (devices.get(at + 1), is_stopped) {
                let total = limits.total.saturating_sub(start.elapsed());
                self.confirm(device, other, candidates, &standings, RaceLimits { total, ..limits })?;
            }
            return Ok(standings);
        }
        let class = &self.fleet.class;
        Err(format!("no device of class {class} has raced the leading candidates to an end").into())
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits { works_ahead: true }
    }
}

impl Remote<'_> {
    /// Races winner and runner-up on another device, and reports whether that confirms their order.
    fn confirm(
        &mut self,
        first: &str,
        second: &str,
        candidates: &[Candidate],
        standings: &[Standing],
        limits: RaceLimits,
    ) -> Result<(), Error> {
        let [winner, runner_up, ..] = standings else { return Ok(()) };
        let two = [candidates[winner.at].clone(), candidates[runner_up.at].clone()];
        let half = RaceLimits { rounds: limits.rounds / 2, ..limits };
        let Some(again) = self.race_on(second, &two, half, None)? else { return Ok(()) };
        let quartile = |at: usize| again.iter().find(|standing| standing.at == at).map(|standing| standing.quartile_ns);
        let (Some(winner), Some(runner_up)) = (quartile(0), quartile(1)) else { return Ok(()) };
        let slower = winner / runner_up - 1.0;
        if slower > NOISE {
            (self.books.tell)(format!(
                "the winner on {first} is {:.1} % slower than the runner-up on {second}",
                100.0 * slower
            ));
        } else {
            (self.books.tell)(format!("the winner on {first} is confirmed on {second}"));
        }
        Ok(())
    }
}

impl Drop for Remote<'_> {
    /// Deletes the run's data on the server. Waits briefly for an unreachable server, since devices would
    /// otherwise measure in vain once it is back; if it stays away, the data expires.
    fn drop(&mut self) {
        let until = Instant::now() + if self.n_tasks == 0 { Duration::ZERO } else { FAREWELL };
        self.retry = Retry::at_once();
        loop {
            self.say(&cancel_subject(&self.run), &Cancel::From(0));
            if self.client.as_mut().is_some_and(|client| forget_run(client, &self.run).is_ok()) {
                return;
            }
            std::thread::sleep(self.retry.left());
            if Instant::now() > until {
                return;
            }
            self.client = self.fleet.connect(None).ok();
            self.retry.failed();
        }
    }
}

/// Relative difference of two kernels up to which two devices are taken to agree on their order.
const NOISE: f64 = 0.03;
/// Largest relative difference between devices of a class that is tolerated.
const MOST_STRAY: f64 = 0.05;

/// Finds outliers: devices whose anchors are slower or faster than those of others of the class, with the
/// factor.
pub fn strays(devices: &[DeviceDescription]) -> Vec<(String, f64)> {
    let n_anchors = devices.iter().map(|device| device.anchors_ns.len()).min().unwrap_or(0);
    if n_anchors == 0 || devices.len() < 2 {
        return Vec::new();
    }
    let median = |anchor: usize| {
        let mut ns: Vec<f64> = devices.iter().map(|device| device.anchors_ns[anchor]).collect();
        ns.sort_by(f64::total_cmp);
        // For two devices, the faster one is the reference, as disturbances only slow a machine down.
        ns[(ns.len() - 1) / 2]
    };
    let medians: Vec<f64> = (0..n_anchors).map(median).collect();
    let ratio = |device: &DeviceDescription| {
        let logarithms = device.anchors_ns.iter().zip(&medians).map(|(ns, median)| (ns / median).ln());
        (logarithms.sum::<f64>() / n_anchors as f64).exp()
    };
    let ratios = devices.iter().map(|device| (device.device.clone(), ratio(device)));
    ratios.filter(|(_, ratio)| (ratio - 1.0).abs() > MOST_STRAY).collect()
}

/// Serializes a message as JSON.
pub fn to_json<T: Serialize>(message: &T) -> Vec<u8> {
    serde_json::to_vec(message).expect("invariant: messages have a form in JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_have_room_in_messages() {
        let of = |n_bytes: usize| Sent { steps: "x".repeat(n_bytes), config: "[]".into(), patience_s: None };
        let one = to_json(&of(0)).len() + 1;
        let sizes = |given: &[usize], most: usize, room: usize| -> Vec<Vec<usize>> {
            let found = parts(given.iter().map(|n| of(*n)), most, room);
            found.iter().map(|part| part.iter().map(|sent| sent.steps.len()).collect()).collect()
        };
        assert_eq!(sizes(&[1, 2, 3], 2, 1000), [vec![1, 2], vec![3]]);
        assert_eq!(sizes(&[100, 100, 100, 1], 16, 200 + 2 * one), [vec![100, 100], vec![100, 1]]);
        assert_eq!(sizes(&[10, 1000, 10], 16, 100 + one), [vec![10], vec![1000], vec![10]]);
        assert!(parts([].into_iter(), 16, 0).is_empty());
    }
}
