//! Interrupts of runs, and the display on which they are reported.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tilewright::{Observer, Recording, Tuned, Workload};
use tilewright_lab::{Caller, LabEvent};

use crate::command::on_interrupt;
use crate::error::describe;
use crate::output::message;
use crate::progress::{Concern, Progress, Shown};
use crate::summary;

/// Handler of interrupts: the first ends the run early but in order, the second immediately, with everything
/// recorded.
#[derive(Default)]
pub struct Interrupts {
    /// Flag raised by the first interrupt.
    pub stop: AtomicBool,
    /// Recorder and display of the current run.
    at_hand: Mutex<Option<AtHand>>,
}

/// Recorder of a run, once it has begun, and its display.
struct AtHand {
    recording: Option<Recording>,
    progress: Progress,
}

impl Interrupts {
    /// Installs the handler.
    ///
    /// # Errors
    /// If the system refuses the handler.
    pub fn watch() -> anyhow::Result<Arc<Interrupts>> {
        let interrupts = Arc::new(Interrupts { stop: AtomicBool::new(false), at_hand: Mutex::new(None) });
        let watching = interrupts.clone();
        on_interrupt(move || watching.leave())?;
        Ok(interrupts)
    }

    /// Makes the function that hands over the recorder and display of a run; without a recorder while it
    /// starts.
    pub fn concerned(&self) -> Concern<'_> {
        Box::new(|recording, progress| {
            let at_hand = AtHand { recording: recording.cloned(), progress: progress.clone() };
            *self.at_hand.lock().unwrap_or_else(PoisonError::into_inner) = Some(at_hand);
        })
    }

    /// Runs work of the lab, shows its progress, and lets interrupts end it.
    pub fn listen<T>(&self, work: impl FnOnce(Caller) -> T) -> T {
        let shown: Mutex<Option<Shown>> = Mutex::new(None);
        let lock = || shown.lock().unwrap_or_else(PoisonError::into_inner);
        let tell = |news: LabEvent| match news {
            LabEvent::Begin(workload, search, seed) => {
                *lock() = Some(Shown::new(workload, search, seed, self.concerned()));
            }
            LabEvent::Together(workloads) => {
                let names = workloads.iter().map(Workload::label).collect();
                *lock() = Some(Shown::together(names, self.concerned()));
            }
            LabEvent::Done => {
                if let Some(shown) = lock().take() {
                    shown.finish();
                }
            }
            LabEvent::Note(note) => {
                if let Some(shown) = &*lock() {
                    shown.note(note);
                }
            }
            LabEvent::Tuned(tuned) => remark(tuned),
            LabEvent::Message(line) => match &*lock() {
                Some(shown) => shown.message(&line),
                None => message(&line),
            },
            _ => {}
        };
        work(Caller { stop: &self.stop, tell: &tell })
    }

    fn leave(&self) {
        let at_hand = self.at_hand.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = !self.stop.swap(true, Ordering::Relaxed);
        let Some(AtHand { recording, progress }) = at_hand.as_ref() else { std::process::exit(130) };
        if is_first {
            progress.message("stopping; interrupt again to leave at once");
            return;
        }
        let committed = recording.as_ref().map_or(Ok(()), Recording::commit);
        progress.finish();
        match committed {
            Ok(()) => message("left; all trials are recorded"),
            Err(fault) => {
                message(&format!("error: left, and the last batch could not be recorded: {}", describe(&fault.into())));
            }
        }
        std::process::exit(130);
    }
}

/// Prints remarks on a run.
pub fn remark(tuned: &Tuned) {
    summary::remarks(tuned).iter().for_each(|remark| message(remark));
}
