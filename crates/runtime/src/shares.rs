//! Work stealing: iterations of a parallel loop, divided among threads that take over each other's.

use std::ffi::c_void;
use std::sync::atomic::{AtomicI64, Ordering};

/// Body of a parallel loop.
pub type LoopBody = unsafe extern "C" fn(env: *mut c_void, iteration: i64, thread: i64);

/// Iterations of one thread, on cache lines that other threads access only when they are out of work.
#[repr(align(128))]
#[derive(Default)]
pub struct Share {
    next: AtomicI64,
    end: AtomicI64,
}

/// Divides the iterations of a loop among threads; none of them may be working.
pub fn divide(shares: &[Share], n_iterations: i64) {
    let n = shares.len() as i64;
    for (share, at) in shares.iter().zip(0..) {
        share.next.store(n_iterations * at / n, Ordering::Relaxed);
        share.end.store(n_iterations * (at + 1) / n, Ordering::Relaxed);
    }
}

/// Executes iterations until all are taken, those of this thread first; returns the number of them.
///
/// # Safety
/// `body` may be called with `env` for every iteration, from the threads that work at the same time.
pub unsafe fn work(shares: &[Share], body: LoopBody, env: *mut c_void, thread: usize) -> i64 {
    let (others, own) = shares.split_at(thread);
    let mut n_done = 0;
    for share in own.iter().chain(others) {
        let end = share.end.load(Ordering::Relaxed);
        loop {
            let iteration = share.next.fetch_add(1, Ordering::Relaxed);
            if iteration >= end {
                break;
            }
            // SAFETY: promised by the caller; each iteration is taken once.
            unsafe { body(env, iteration, thread as i64) };
            n_done += 1;
        }
    }
    n_done
}
