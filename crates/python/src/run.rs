//! Runs of `tune` in background threads, whose events Python receives.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use serde_json::{Map, Value as Json, json};
use tilewright::{Command, Database, Error, KernelFile, Note, Request, Session, Tuned};
use tilewright_device::device::WorkerCommand;
use tilewright_search::{Outcome, Space};

use crate::value;

/// Command that starts worker processes: a program and its arguments.
pub struct Worker;

impl Worker {
    /// Worker command of a session that starts no workers.
    pub fn none() -> WorkerCommand {
        WorkerCommand { program: PathBuf::new(), arguments: Vec::new() }
    }

    fn of(words: Vec<String>) -> WorkerCommand {
        let mut words = words.into_iter();
        let program = words.next().unwrap_or_default().into();
        WorkerCommand { program, arguments: words.collect() }
    }
}

/// Serves as a worker process, given the arguments after those that start one; returns whether it succeeded.
#[pyfunction]
pub fn serve(py: Python, arguments: Vec<OsString>) -> bool {
    py.detach(|| tilewright::serve(&arguments))
}

/// Function from a trial's nanoseconds to its value: seconds, or the value of its metric.
type ValueOfTime = Box<dyn Fn(f64) -> f64 + Send + Sync>;

fn value_of(request: &Request) -> Result<ValueOfTime, Error> {
    let metric = request.objectives()?.leading().clone();
    Ok(if metric.is_time() { Box::new(|ns| ns / 1e9) } else { Box::new(move |ns| metric.value(ns)) })
}

/// Run in progress.
#[pyclass(frozen, module = "tilewright")]
pub struct Running {
    events: Mutex<Receiver<Json>>,
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<Result<Tuned, Error>>>>,
}

impl Running {
    fn start(request: Request, db: Option<PathBuf>, worker: Vec<String>) -> PyResult<Running> {
        let (space, value) = (request.space().map_err(value::error)?, value_of(&request).map_err(value::error)?);
        let database = Database::new(db.as_deref()).map_err(value::error)?;
        let session = Session::new(database, Worker::of(worker));
        let (sender, events) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || {
            let note = |note: Note| {
                // If the receiver is gone, the run has been stopped.
                let _ = event(&note, &space, &value).map(|event| sender.send(event));
            };
            session.run(&request, &stopped, &note)
        };
        let thread = std::thread::Builder::new().name("tilewright".to_owned()).spawn(work);
        let thread = thread.map_err(|error| PyRuntimeError::new_err(format!("a thread for the run: {error}")))?;
        Ok(Running { events: Mutex::new(events), stop, thread: Mutex::new(Some(thread)) })
    }

    fn join(&self) -> Option<Result<Tuned, Error>> {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(thread.join().unwrap_or_else(|_| Err(Error::failed("the run ended with a bug of tilewright"))))
    }
}

#[pymethods]
impl Running {
    /// Next event of the run, as a dict with its `kind`; None if there is none within `seconds`, and the kind
    /// `end` after the last one.
    fn next<'py>(&self, py: Python<'py>, seconds: f64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let wait = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let events = || self.events.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(wait);
        match py.detach(events) {
            Ok(event) => value::python(py, &event).map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => value::python(py, &json!({"kind": "end"})).map(Some),
        }
    }

    /// Stops the run early but cleanly: finished measurements are recorded.
    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Stops the run, and waits for its end.
    fn end(&self, py: Python) {
        self.stop();
        py.detach(|| self.join().map(drop)).unwrap_or_default();
    }

    /// Result of the run, in the form of `tilewright tune --json`; waits for the end. None if it was returned
    /// already.
    fn result<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(tuned) = py.detach(|| self.join()) else { return Ok(None) };
        let mut tuned = tuned.map_err(value::error)?;
        if let Some(error) = tuned.lost.take().or_else(|| tuned.failure()) {
            return Err(value::error(error));
        }
        let json = serde_json::to_value(&tuned).expect("invariant: it is numbers and text by name");
        value::python(py, &json).map(Some)
    }
}

/// Converts a note to an event for Python.
fn event(note: &Note, space: &Space, value: &dyn Fn(f64) -> f64) -> Option<Json> {
    let told = |kind: &str, text: String| Some(json!({"kind": kind, "text": text}));
    match note {
        Note::Message(line) | Note::MayBeStale(line) | Note::LeftOut(line) => told("message", line.clone()),
        Note::Start => told("start", "random inputs and the reference answer".to_owned()),
        Note::Begin(begin) => told("begin", begin.key.workload.clone()),
        Note::Plan(plan) => told("plan", plan.to_string()),
        Note::Race(n) => told("race", format!("{n} candidates are measured against each other")),
        Note::LeaderFailed(class, why) => told("leader_failed", format!("{class}: {why}")),
        Note::Trial(report) => {
            let (time, error, text) = match &report.trial.outcome {
                Outcome::Measured(timing) => (Some(value(timing.median_ns)), None, String::new()),
                Outcome::Failed { class, message } => (None, Some(class.name()), message.clone()),
            };
            Some(json!({
                "kind": "trial",
                "text": text,
                "number": report.number,
                "config": space.config_to_json(&report.trial.config),
                "time": time,
                "error": error,
                "best": report.best_ns.map(value),
            }))
        }
        _ => None,
    }
}

/// Names of the settings of a request.
const SETTINGS: [&str; 10] =
    ["search", "trials", "time", "seed", "threads", "race", "to_the_end", "timeout", "build_timeout", "memory_bytes"];

/// Sets one of the [`SETTINGS`].
fn set(request: Request, name: &str, given: Json) -> PyResult<Request> {
    let wrong = |takes: &str| value::refuse(format!("{name} takes {takes}, not {given}"));
    let flag = || given.as_bool().ok_or_else(|| wrong("True or False"));
    let whole = |least: u64| {
        let number = given.as_u64().filter(|number| *number >= least);
        number.ok_or_else(|| wrong(&format!("a whole number of {least} or above")))
    };
    let time = || {
        let time = given.as_f64().and_then(|time| Duration::try_from_secs_f64(time).ok());
        time.filter(|time| !time.is_zero()).ok_or_else(|| wrong("a number of seconds above 0"))
    };
    Ok(match name {
        "search" => request.search(given.as_str().ok_or_else(|| wrong("a text"))?),
        "seed" => request.seed(whole(0)?),
        "threads" => request.threads(usize::try_from(whole(1)?).map_err(value::refuse)?),
        "race" => request.race(flag()?),
        "to_the_end" => request.to_the_end(flag()?),
        // Without a limit, the default holds.
        _ if given.is_null() => request,
        "trials" => request.trials(whole(1)?),
        "time" => request.time(time()?),
        "timeout" => request.run_timeout(time()?),
        "build_timeout" => request.build_timeout(time()?),
        "memory_bytes" => request.memory_bytes(whole(1)?),
        _ => return Err(value::refuse(format!("there is no setting {name}"))),
    })
}

/// Sets all given settings.
fn with_settings(request: Request, given: Map<String, Json>) -> PyResult<Request> {
    given.into_iter().try_fold(request, |request, (name, given)| set(request, &name, given))
}

/// Entries of a dict with strings as keys.
fn entries(dict: &Bound<PyAny>) -> PyResult<Map<String, Json>> {
    let Json::Object(entries) = value::json(dict)? else { return Err(value::refuse("a request is a dict")) };
    Ok(entries)
}

/// Starts a run for a workload, with settings by name.
#[pyfunction]
#[pyo3(signature = (workload, settings, *, template, worker, db))]
pub fn start_workload(
    workload: &str,
    settings: &Bound<PyAny>,
    template: Option<String>,
    worker: Vec<String>,
    db: Option<PathBuf>,
) -> PyResult<Running> {
    let request = Request::parse(workload).map_err(value::error)?;
    let request = template.into_iter().fold(request, Request::template);
    Running::start(with_settings(request, entries(settings)?)?, db, worker)
}

/// Starts a run for a command, given the fields of its request together with settings.
#[pyfunction]
#[pyo3(signature = (request, *, worker, db))]
pub fn start_command(request: &Bound<PyAny>, worker: Vec<String>, db: Option<PathBuf>) -> PyResult<Running> {
    let (settings, command): (Map<String, Json>, Map<String, Json>) =
        entries(request)?.into_iter().partition(|(name, _)| SETTINGS.contains(&name.as_str()));
    // Each field by itself, so that the message names it.
    let wrong = |(name, given): (&String, &Json)| {
        let field = Map::from_iter([(name.clone(), given.clone())]);
        serde_json::from_value::<Command>(Json::Object(field)).err().map(|error| format!("{name}: {error}"))
    };
    if let Some(reason) = command.iter().find_map(wrong) {
        return Err(value::refuse(reason));
    }
    let command: Command = serde_json::from_value(Json::Object(command)).map_err(value::refuse)?;
    Running::start(with_settings(Request::new(command), settings)?, db, worker)
}

/// Starts a run for a user's kernel described by a file, with settings by name.
#[pyfunction]
#[pyo3(signature = (file, settings, *, worker, db))]
pub fn start_kernel(
    file: PathBuf,
    settings: &Bound<PyAny>,
    worker: Vec<String>,
    db: Option<PathBuf>,
) -> PyResult<Running> {
    let request = Request::new(KernelFile::read(&file).map_err(value::error)?);
    Running::start(with_settings(request, entries(settings)?)?, db, worker)
}
