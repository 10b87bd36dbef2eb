//! Tuning of a part's kernels when a session starts, if its options allow time for that.
//!
//! Candidates run in workers, processes that load this library, so that their failures do not affect the host
//! program. The results are recorded, and later sessions start with them.

use std::ffi::{CStr, OsStr, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tilewright::{Request, Session as Tuning, worker_of_library};
use tilewright_model::{LayoutPurpose, laid_out};

use crate::draft::PartDraft;
use crate::part::SessionState;
use crate::sizes::InputShape;

impl SessionState {
    /// Tunes the kernels of a part for inputs of these shapes that have no records, for as long as the
    /// options allow; a failure is logged as one line.
    pub fn tune(&self, part: &PartDraft, shapes: &[InputShape]) {
        if self.options.tune_seconds == 0.0 {
            return;
        }
        let start = Instant::now();
        match self.try_to_tune(part, shapes) {
            Ok(0) => {}
            Ok(n) => self.log.note(|| format!("{n} kernels tuned in {:.1} s", start.elapsed().as_secs_f64())),
            Err(why) => self.log.problem(&format!("kernels are not tuned: {why}")),
        }
    }

    /// Tunes as [`SessionState::tune`] does; returns the number of kernels that had no records.
    fn try_to_tune(&self, part: &PartDraft, shapes: &[InputShape]) -> Result<usize, String> {
        let in_words = |error: &dyn std::fmt::Display| error.to_string();
        let left = self.time_to_tune();
        if left.is_zero() {
            return Ok(0);
        }
        let database = self.database.as_ref().ok_or("there are no records")?;
        let fused = self.lower(part, shapes)?;
        let records = database.records().map_err(|error| in_words(&error))?;
        let fused = laid_out(fused, &self.target, self.threads, LayoutPurpose::Tune(&records));
        let fused = fused.map_err(|error| in_words(&error))?;
        let caches = fused.caches(&self.target);
        let mut tasks = Vec::new();
        for (workload, n) in fused.tasks() {
            let caches = caches.of(&workload);
            let known = records.known(&workload, &self.target, self.threads, caches, None);
            if known.map_err(|error| in_words(&error))?.0.is_err() {
                let request = Request::new(workload).target(self.target.clone()).threads(self.threads);
                tasks.push((request.caches(caches).time(None), n as f64));
            }
        }
        drop(records);
        if tasks.is_empty() {
            return Ok(0);
        }
        let library = own_file().ok_or("the file of this library is not known")?;
        let worker = worker_of_library(&library, "TilewrightWorker").map_err(|error| in_words(&error))?;
        let tuning = Tuning::new(database.clone(), worker);
        let stop = AtomicBool::new(false);
        let outcome = within(left, &stop, || tuning.run_together(&tasks, left, &stop, &()));
        outcome.map_err(|error| in_words(&error))?;
        Ok(tasks.len())
    }
}

/// Runs work, and sets a flag when the time is over.
fn within<T>(time: Duration, stop: &AtomicBool, work: impl FnOnce() -> T) -> T {
    let (is_done, changed) = (Mutex::new(false), Condvar::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let is_done = is_done.lock().unwrap_or_else(PoisonError::into_inner);
            let waited = changed.wait_timeout_while(is_done, time, |is_done| !*is_done);
            if waited.is_ok_and(|(_, timeout)| timeout.timed_out()) {
                stop.store(true, Ordering::Relaxed);
            }
        });
        let outcome = work();
        *is_done.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
        outcome
    })
}

/// File that this library was loaded from.
fn own_file() -> Option<PathBuf> {
    let address = TilewrightWorker as *const () as *const libc::c_void;
    // SAFETY: all zeros are a valid value of the type.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the address is that of a function, and there is room for the result.
    let is_known = unsafe { libc::dladdr(address, &mut info) } != 0 && !info.dli_fname.is_null();
    // SAFETY: the name is zero-terminated, and lives as long as the library.
    let name = is_known.then(|| unsafe { CStr::from_ptr(info.dli_fname) })?;
    Some(OsStr::from_bytes(name.to_bytes()).into())
}

/// Serves as a worker process until its input ends; returns 0 on success.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "named as the other functions of the library")]
pub extern "C" fn TilewrightWorker() -> c_int {
    let served = std::panic::catch_unwind(|| tilewright::serve(&[]));
    c_int::from(!served.unwrap_or(false))
}
