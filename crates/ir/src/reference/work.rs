//! Progress of an evaluation, shared by its threads.

use crate::interp::Fault;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Observer of an evaluation: receives the finished share, from 0 to 1, and may cancel.
pub type Watch<'a> = dyn Fn(f64) -> ControlFlow<()> + Sync + 'a;

/// Progress of an evaluation.
pub(super) struct EvaluationProgress<'a> {
    /// Total work, in multiply-adds of a matrix product.
    all: f64,
    done: AtomicU64,
    watch: &'a Watch<'a>,
    is_over: AtomicBool,
}

impl<'a> EvaluationProgress<'a> {
    pub(super) fn new(all: f64, watch: &'a Watch<'a>) -> EvaluationProgress<'a> {
        EvaluationProgress { all, done: AtomicU64::new(0), watch, is_over: AtomicBool::new(false) }
    }

    /// Counter for a thread.
    pub(super) fn counter(&self) -> Counter<'_> {
        Counter { work: self, pending: 0 }
    }

    /// Whether the evaluation is cancelled or has failed.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Runs `n` tasks on several threads, each with its own worker, until one fails or all are done.
    ///
    /// # Errors
    /// The fault of a task.
    pub(super) fn share<W: FnMut(usize) -> Result<(), Box<Fault>>>(
        &self,
        n_tasks: usize,
        n_threads: usize,
        worker: impl Fn() -> W + Sync,
    ) -> Result<(), Fault> {
        let next = AtomicUsize::new(0);
        let fault = Mutex::new(None);
        let work = || {
            let mut worker = worker();
            while !self.is_over() {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= n_tasks {
                    break;
                }
                if let Err(f) = worker(task) {
                    fault.lock().expect("no worker panics").get_or_insert(*f);
                    next.store(n_tasks, Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..n_threads.min(n_tasks) {
                // If the system refuses a thread, the existing threads do all the work.
                if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
        fault.into_inner().expect("no worker panics").map_or(Ok(()), Err)
    }
}

/// Work of a thread that is not yet reported.
pub(super) struct Counter<'a> {
    work: &'a EvaluationProgress<'a>,
    pending: u64,
}

/// Work between two reports, in multiply-adds, which takes about 0.1 ms.
const TOLD_AT_A_TIME: u64 = 1 << 21;

impl Counter<'_> {
    /// Adds finished work; breaks if the observer cancelled the evaluation.
    pub(super) fn add(&mut self, amount: u64) -> ControlFlow<()> {
        self.pending += amount;
        if self.pending < TOLD_AT_A_TIME {
            return ControlFlow::Continue(());
        }
        let EvaluationProgress { all, done, watch, is_over } = self.work;
        let amount = std::mem::take(&mut self.pending);
        let done = done.fetch_add(amount, Ordering::Relaxed) + amount;
        if watch((done as f64 / all).min(1.0)).is_break() {
            is_over.store(true, Ordering::Relaxed);
        }
        if self.work.is_over() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}
