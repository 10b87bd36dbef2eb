//! Thread pool of low latency, for the parallel loops of kernels.
//!
//! A kernel of 30 µs gains from a second thread only if handing work over costs about a microsecond. So idle
//! workers spin for a while before they sleep. Every thread has iterations of its own, the same in each run
//! of a loop, so that it finds in its cache what it left there; a thread that is done takes of the others',
//! which evens out threads that are slowed down by other programs.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tilewright_codegen::Runtime;

/// Time that an idle worker of a measuring pool spins before it sleeps: long enough to bridge the serial
/// parts of a kernel and the gap between two runs, short enough that an idle process leaves the cores alone.
const SPIN: Duration = Duration::from_micros(200);

/// Time that idle threads spin before they sleep, in a pool of a program with other things to do.
const SHORT_SPIN: Duration = Duration::from_micros(50);

/// Forks between the process that made the first pool and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Has forks counted from now on; how many there were.
fn watch_forks() -> u32 {
    static WATCHED: Once = Once::new();
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: what the child of a fork calls allocates nothing and takes no lock.
    WATCHED.call_once(|| unsafe {
        // Where memory for a handler is missing, forks go unnoticed.
        libc::pthread_atfork(None, None, Some(in_child));
    });
    FORKS.load(Ordering::Relaxed)
}

type Body = unsafe extern "C" fn(env: *mut c_void, iteration: i64, thread: i64);

#[derive(Clone, Copy)]
struct Job {
    body: Body,
    env: *mut c_void,
}

/// Iterations of one thread; on cache lines that others touch only once they are out of work.
#[repr(align(128))]
struct Share {
    next: AtomicI64,
    end: AtomicI64,
}

/// State that the threads share.
struct Shared {
    /// Number of jobs published so far; a worker that sees a new number reads `job`.
    epoch: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    shares: Box<[Share]>,
    /// Workers that have not finished the current job.
    n_running: AtomicUsize,
    n_asleep: AtomicUsize,
    stop: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
    spin: Duration,
}

// SAFETY: `job` is written only by the thread that calls `Pool::run`, which holds `&mut Pool`, while no
// worker runs (`n_running` is zero), and is read by workers only after they have seen the `epoch` that was
// raised after the write.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointers in a job are used only while `Pool::run`, which was given them, has not returned.
unsafe impl Send for Shared {}

impl Shared {
    fn work(&self, job: Job, thread: usize) {
        let (others, own) = self.shares.split_at(thread);
        for share in own.iter().chain(others) {
            let end = share.end.load(Ordering::Relaxed);
            loop {
                let iteration = share.next.fetch_add(1, Ordering::Relaxed);
                if iteration >= end {
                    break;
                }
                // SAFETY: whoever called `Pool::run` promised that the body may be called so for every
                // iteration.
                unsafe { (job.body)(job.env, iteration, thread as i64) };
            }
        }
    }

    fn serve(&self, thread: usize) {
        let mut seen = 0;
        loop {
            let start = Instant::now();
            let mut spins = 0u32;
            while self.epoch.load(Ordering::Acquire) == seen {
                std::hint::spin_loop();
                spins = spins.wrapping_add(1);
                if spins.is_multiple_of(64) && start.elapsed() > self.spin {
                    let mut guard = self.sleep.lock().expect("no thread panics while it holds the lock");
                    self.n_asleep.fetch_add(1, Ordering::SeqCst);
                    while self.epoch.load(Ordering::SeqCst) == seen && !self.stop.load(Ordering::SeqCst) {
                        guard = self.wake.wait(guard).expect("no thread panics while it holds the lock");
                    }
                    self.n_asleep.fetch_sub(1, Ordering::SeqCst);
                }
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
            }
            seen = self.epoch.load(Ordering::Acquire);
            // SAFETY: the epoch was raised after the job was written; it is not written again before
            // `n_running`, which this thread lowers below, is zero.
            let job = unsafe { *self.job.get() }.expect("an epoch follows a job");
            self.work(job, thread);
            self.n_running.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Threads for parallel loops; the calling thread is one of them. A child of `fork` has that one alone.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Number of forks of the process before the pool was made.
    forks: u32,
}

impl Pool {
    /// A pool of `n_threads`, the caller included. Thread `i` is pinned to `cpus[i]` where there is one.
    ///
    /// # Errors
    /// Where the system refuses a thread.
    pub fn new(n_threads: usize, cpus: &[usize]) -> io::Result<Pool> {
        Pool::spinning(n_threads, cpus, SPIN)
    }

    fn spinning(n_threads: usize, cpus: &[usize], spin: Duration) -> io::Result<Pool> {
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            shares: (0..n_threads.max(1)).map(|_| Share { next: 0.into(), end: 0.into() }).collect(),
            n_running: AtomicUsize::new(0),
            n_asleep: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            spin,
        });
        let mut pool = Pool { shared, threads: Vec::new(), forks: watch_forks() };
        for thread in 1..n_threads {
            let shared = pool.shared.clone();
            let cpu = cpus.get(thread).copied();
            let serve = move || {
                if let Some(cpu) = cpu {
                    crate::pin::pin_thread(&[cpu]);
                }
                shared.serve(thread);
            };
            // Where this fails, those that there are end with the pool.
            pool.threads.push(std::thread::Builder::new().spawn(serve)?);
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub fn n_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Whether its threads are in this process, and not in one that this was forked from.
    fn has_threads(&self) -> bool {
        !self.threads.is_empty() && self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Calls `body(env, i, thread)` for every `i` in `0..n_iterations`, on all threads, and returns when all
    /// are done.
    ///
    /// # Safety
    /// `body` may be called with `env` from several threads at once, for different iterations.
    pub unsafe fn run(&mut self, body: Body, env: *mut c_void, n_iterations: i64) {
        let job = Job { body, env };
        let shared = &*self.shared;
        if !self.has_threads() || n_iterations <= 1 {
            for iteration in 0..n_iterations {
                // SAFETY: promised by the caller.
                unsafe { body(env, iteration, 0) };
            }
            return;
        }
        let n = shared.shares.len() as i64;
        for (share, at) in shared.shares.iter().zip(0..) {
            share.next.store(n_iterations * at / n, Ordering::Relaxed);
            share.end.store(n_iterations * (at + 1) / n, Ordering::Relaxed);
        }
        shared.n_running.store(self.threads.len(), Ordering::Relaxed);
        // SAFETY: no worker runs, and none reads the job before the epoch is raised.
        unsafe { *shared.job.get() = Some(job) };
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.n_asleep.load(Ordering::SeqCst) > 0 {
            let _guard = shared.sleep.lock().expect("no thread panics while it holds the lock");
            shared.wake.notify_all();
        }
        shared.work(job, 0);
        while shared.n_running.load(Ordering::Acquire) > 0 {
            std::hint::spin_loop();
        }
    }

    /// The pool as generated code calls it.
    pub fn runtime(&mut self) -> Runtime {
        unsafe extern "C" fn parallel_for(context: *mut c_void, body: Body, env: *mut c_void, n_iterations: i64) {
            // SAFETY: the context is the pool that made the runtime, borrowed mutably for as long as kernels
            // run; generated code calls parallel loops one at a time and from the thread that runs the
            // kernel.
            let pool = unsafe { &mut *context.cast::<Pool>() };
            // SAFETY: a parallel loop's iterations are independent, which scheduling has checked.
            unsafe { pool.run(body, env, n_iterations) };
        }
        Runtime { context: std::ptr::from_mut(self).cast(), parallel_for }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.has_threads() {
            // Threads that are not there cannot be waited for.
            return std::mem::forget(std::mem::take(&mut self.threads));
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.sleep.lock().expect("no thread panics while it holds the lock");
            self.shared.wake.notify_all();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A pool that several contexts share. A parallel loop that finds it busy runs on its caller alone, so that
/// nobody waits.
#[derive(Clone)]
pub struct Threads {
    pool: Arc<Mutex<Pool>>,
    n_threads: usize,
}

impl Threads {
    /// Starts threads, the caller included in `n_threads`, which sleep soon after they have nothing to do.
    ///
    /// # Errors
    /// Where the system refuses a thread.
    pub fn new(n_threads: usize) -> io::Result<Threads> {
        let pool = Pool::spinning(n_threads, &[], SHORT_SPIN)?;
        let n_threads = pool.n_threads();
        Ok(Threads { pool: Arc::new(Mutex::new(pool)), n_threads })
    }

    /// Number of threads.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// The threads as generated code calls them, for as long as they are borrowed.
    pub(crate) fn runtime(&self) -> Runtime {
        unsafe extern "C" fn parallel_for(context: *mut c_void, body: Body, env: *mut c_void, n_iterations: i64) {
            // SAFETY: the context is the pool that made the runtime.
            let pool = unsafe { &*context.cast::<Mutex<Pool>>() };
            if let Ok(mut pool) = pool.try_lock() {
                // SAFETY: a parallel loop's iterations are independent, which scheduling has checked.
                return unsafe { pool.run(body, env, n_iterations) };
            }
            for iteration in 0..n_iterations {
                // SAFETY: as above.
                unsafe { body(env, iteration, 0) };
            }
        }
        Runtime { context: Arc::as_ptr(&self.pool).cast_mut().cast(), parallel_for }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn count(env: *mut c_void, iteration: i64, _thread: i64) {
        // SAFETY: the tests below pass a vector of counters with one for each iteration.
        let counters = unsafe { &*env.cast::<Vec<AtomicU64>>() };
        counters[iteration as usize].fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_child_of_fork_has_one_thread() {
        let mut pool = Pool::new(3, &[]).unwrap();
        let shared = Threads::new(2).unwrap();
        let counters: Vec<AtomicU64> = (0..100).map(|_| AtomicU64::new(0)).collect();
        let env = std::ptr::from_ref(&counters).cast_mut().cast::<c_void>();
        // As if another thread ran a loop meanwhile.
        let held = shared.pool.lock().unwrap();
        // SAFETY: the child ends without coming back, and what it calls in between has only to end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the counters are atomic and outlive the calls.
            unsafe {
                libc::alarm(20);
                pool.run(count, env, 100);
                let runtime = shared.runtime();
                (runtime.parallel_for)(runtime.context, count, env, 100);
            }
            drop(pool);
            let is_right = counters.iter().all(|c| c.load(Ordering::Relaxed) == 2);
            // SAFETY: nothing of this process has to be done at its end.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        drop(held);
        let mut status = 0;
        // SAFETY: the child is this test's, and the status is written to what is borrowed.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child hung (signal 14), or missed an iteration");
    }

    #[test]
    fn every_iteration_runs_once_in_every_job() {
        let mut pool = Pool::new(4, &[]).unwrap();
        for (round, n) in [0usize, 1, 3, 1000, 2, 64].into_iter().cycle().take(300).enumerate() {
            let counters: Vec<AtomicU64> = (0..n).map(|_| AtomicU64::new(0)).collect();
            // SAFETY: the counters are atomic and outlive the call.
            unsafe { pool.run(count, std::ptr::from_ref(&counters).cast_mut().cast(), n as i64) };
            assert!(counters.iter().all(|c| c.load(Ordering::Relaxed) == 1), "round {round} with {n} iterations");
            if round % 50 == 0 {
                // Long enough for the workers to fall asleep.
                std::thread::sleep(SPIN * 3);
            }
        }
    }
}
