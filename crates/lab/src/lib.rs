//! Laboratory: experiments on searches, records and models, besides tuning.
//!
//! - [`experiment`]: experiments of papers and our own, each a table of runs, with data, plots and tables.
//! - [`record_space`]: measuring a whole space, or a sample of it, to replay searches on.
//! - [`report`]: the content of a database of records, as facts and as one page.
//! - [`predict`]: training and comparing models that predict a kernel's parameters without a search.
//!
//! Callers pass a [`Caller`] and get plain values back; nothing is printed.
#![forbid(unsafe_code)]

mod clock;
pub mod experiment;
pub mod history;
pub mod load;
pub mod plot;
pub mod predict;
pub mod record_space;
pub mod report;
pub mod stats;

use std::sync::atomic::{AtomicBool, Ordering};

use tilewright::{Error, Note, Observer, Tuned};
use tilewright_device::{Device, DeviceOptions};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;

/// Caller's callbacks: a stop flag that ends the work early but orderly, and a receiver of progress.
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    /// Stop flag.
    pub stop: &'a AtomicBool,
    /// Receives events, from any thread.
    pub tell: &'a (dyn Fn(LabEvent) + Sync),
}

/// Event of the lab's work.
#[non_exhaustive]
pub enum LabEvent<'a> {
    /// Message for the user.
    Message(String),
    /// Start of a device for a workload or, with a search, of a run with a seed: notes follow until
    /// [`LabEvent::Done`].
    Begin(&'a Workload, Option<&'a str>, u64),
    /// Start of tuning workloads together: notes follow until [`LabEvent::Done`].
    Together(&'a [Workload]),
    /// Note on the progress.
    Note(Note<'a>),
    /// End of a device's start or of tuning.
    Done,
    /// Result of a run.
    Tuned(&'a Tuned),
}

impl Caller<'_> {
    /// Sends a message.
    fn say(&self, line: impl Into<String>) {
        (self.tell)(LabEvent::Message(line.into()));
    }

    /// Whether to stop.
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Runs work on a workload, and reports its progress.
    fn watch<T>(
        &self,
        workload: &Workload,
        search: Option<&str>,
        seed: u64,
        work: impl FnOnce(&dyn Observer) -> T,
    ) -> T {
        (self.tell)(LabEvent::Begin(workload, search, seed));
        let done = work(self);
        (self.tell)(LabEvent::Done);
        done
    }

    /// Starts a device for a workload; `None` if stopped before it is ready.
    ///
    /// # Errors
    /// If memory does not suffice or workers do not start.
    pub fn start_device(
        &self,
        workload: &Workload,
        target: &Target,
        options: DeviceOptions,
    ) -> Result<Option<Device>, Error> {
        self.watch(workload, None, options.seed, |observer| {
            tilewright::start_device(workload.clone(), target, options, self.stop, observer)
        })
    }
}

/// Notes are forwarded as events.
impl Observer for Caller<'_> {
    fn note(&self, note: Note) {
        (self.tell)(LabEvent::Note(note));
    }
}

/// Extension of results, to describe a failed operation.
trait OrFailed<T> {
    /// Converts an error to a failure with this text and the error as its cause.
    ///
    /// # Errors
    /// If the result is an error.
    fn or_failed(self, text: impl std::fmt::Display) -> Result<T, Error>;
}

impl<T, E: Into<Box<dyn std::error::Error + Send + Sync>>> OrFailed<T> for Result<T, E> {
    fn or_failed(self, text: impl std::fmt::Display) -> Result<T, Error> {
        self.map_err(|error| Error::failed(text).because(error))
    }
}
