//! Threads for our own code around a library.

use std::ffi::c_void;

use tilewright_runtime::ThreadPool;

/// Threads that share loop iterations, including the caller.
pub(super) struct LoopThreads(ThreadPool);

impl LoopThreads {
    /// Makes `n` threads, on the CPUs that this process is pinned to.
    ///
    /// # Panics
    /// If the system refuses a thread: this process is the peer's, and `bench` continues without it.
    pub(super) fn new(n: usize) -> LoopThreads {
        LoopThreads(ThreadPool::new(n, &[]).unwrap_or_else(|refused| panic!("no {n} threads: {refused}")))
    }

    /// Number of threads.
    pub(super) fn n(&self) -> usize {
        self.0.n_threads()
    }

    /// Calls `body(i, thread)` for every `i` below `n` and returns when all calls are done.
    pub(super) fn for_each<F: Fn(usize, usize) + Sync>(&mut self, n: usize, body: F) {
        unsafe extern "C" fn call<F: Fn(usize, usize)>(body: *mut c_void, i: i64, thread: i64) {
            // SAFETY: the pointer is that of `body` below, which outlives the loop.
            unsafe { (*body.cast_const().cast::<F>())(i as usize, thread as usize) };
        }
        // SAFETY: `body` may be called from several threads, since it is `Sync`.
        unsafe { self.0.run(call::<F>, (&raw const body).cast_mut().cast(), n as i64) };
    }
}

/// Pointers for several threads, each of which writes to its own part.
pub(super) struct SharedPointers<P>(pub(super) P);

impl<P: Copy> SharedPointers<P> {
    /// Pointers. A method, so that a closure borrows the whole struct.
    pub(super) fn get(&self) -> P {
        self.0
    }
}

// SAFETY: users of the pointers keep the threads' parts disjoint.
unsafe impl<P> Sync for SharedPointers<P> {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_iteration_runs_once() {
        let mut threads = LoopThreads::new(2);
        for n in [0, 1, 100] {
            let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            threads.for_each(n, |i, thread| {
                assert!(thread < 2);
                counts[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}
