//! Low-latency thread pool for the parallel loops of kernels.
//!
//! A kernel of 30 µs gains from a second thread only if handing work over costs about a microsecond. Idle
//! workers therefore spin for a while before they sleep. Every thread has its own share of the iterations,
//! the same in each run of a loop, so that its data may still be in its cache; a thread that has finished its
//! share steals from the others, which compensates for threads slowed down by other programs. The pool does
//! not wait for a worker that has no core when a loop is published: the loop closes once all its iterations
//! are taken. If a worker loses its core within an iteration, and the loop takes longer than its caller alone
//! would have, the pool of an application runs without its workers for a while.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, Once};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tilewright_codegen::Runtime;

use crate::shares::{self, LoopBody, Share};

/// Time that an idle worker of a measuring pool spins before it sleeps: long enough to bridge the serial
/// parts of a kernel and the gap between two runs, short enough that an idle process leaves the cores alone.
const SPIN: Duration = Duration::from_micros(200);

/// Time that idle threads spin before they sleep, in a pool of an application with other work.
const SHORT_SPIN: Duration = Duration::from_micros(50);

/// Spins of a waiting caller between two yields of its core to other threads.
const TURNS_TO_YIELD: u32 = 4096;

/// Minimum time that a loop must lose to a worker without a core to count as a loss, rather than noise.
const LEAST_LOSS: Duration = Duration::from_micros(20);
/// Maximum factor between the time lost and the time for which workers are then left out. The factor starts
/// at 1, and doubles if a loss recurs within `AGAIN` times the last duration after its end.
const MOST_OUT_PER_LOSS: u32 = 16;
const AGAIN: u32 = 4;
/// Maximum time for which workers are left out.
const LONGEST_OUT: Duration = Duration::from_millis(200);

/// Number of forks between the process that made the first pool and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Starts counting forks; returns the number so far.
fn watch_forks() -> u32 {
    static WATCHED: Once = Once::new();
    extern "C" fn in_child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the handler in the child of a fork allocates nothing and takes no lock.
    WATCHED.call_once(|| unsafe {
        // If the handler cannot be installed for lack of memory, forks go unnoticed.
        libc::pthread_atfork(None, None, Some(in_child));
    });
    FORKS.load(Ordering::Relaxed)
}

#[derive(Clone, Copy)]
struct LoopJob {
    body: LoopBody,
    env: *mut c_void,
}

/// Gate through which workers enter the current loop: the loop's number, whether it is open, and the number
/// of workers inside.
#[derive(Default)]
struct Gate(AtomicU32);

impl Gate {
    /// Number of bits below the loop's number.
    const BITS: u32 = 12;
    const OPEN: u32 = 1 << (Gate::BITS - 1);

    /// Opens the next loop; no worker may be inside.
    fn open(&self) {
        let next = (self.0.load(Ordering::Relaxed) >> Gate::BITS).wrapping_add(1);
        self.0.store(next << Gate::BITS | Gate::OPEN, Ordering::SeqCst);
    }

    /// Number of the last loop; numbers recur after a million loops.
    fn loop_number(&self) -> u32 {
        self.0.load(Ordering::SeqCst) >> Gate::BITS
    }

    /// Lets a worker in if the loop is open; returns the number of the loop, and whether the worker entered.
    fn enter(&self) -> (u32, bool) {
        let enter = |state: u32| (state & Gate::OPEN != 0).then_some(state + 1);
        match self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter) {
            Ok(state) => (state >> Gate::BITS, true),
            Err(state) => (state >> Gate::BITS, false),
        }
    }

    /// Lets a worker out.
    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Closes the loop to further workers.
    fn close(&self) {
        self.0.fetch_and(!Gate::OPEN, Ordering::Relaxed);
    }

    /// Whether no worker is inside.
    fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) & (Gate::OPEN - 1) == 0
    }
}

/// State of all threads.
struct PoolState {
    gate: Gate,
    job: UnsafeCell<Option<LoopJob>>,
    shares: Box<[Share]>,
    n_asleep: AtomicUsize,
    stop: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
    spin: Duration,
}

// SAFETY: `job` is written only by the thread that calls `ThreadPool::run`, which holds `&mut ThreadPool`,
// while the gate is closed and no worker is inside; workers read it only while they are inside.
unsafe impl Sync for PoolState {}
// SAFETY: the raw pointers in a job are used only until the call of `ThreadPool::run` that received them
// returns.
unsafe impl Send for PoolState {}

impl PoolState {
    /// Executes iterations until all are taken; returns the number executed.
    fn work(&self, job: LoopJob, thread: usize) -> i64 {
        // SAFETY: the caller of `ThreadPool::run` promised that the body may be called in this way for every
        // iteration.
        unsafe { shares::work(&self.shares, job.body, job.env, thread) }
    }

    fn serve(&self, thread: usize) {
        let mut seen = 0;
        loop {
            let start = Instant::now();
            let mut spins = 0u32;
            while self.gate.loop_number() == seen {
                std::hint::spin_loop();
                spins = spins.wrapping_add(1);
                if spins.is_multiple_of(64) && start.elapsed() > self.spin {
                    let mut guard = self.sleep.lock().expect("no thread panics while it holds the lock");
                    self.n_asleep.fetch_add(1, Ordering::SeqCst);
                    while self.gate.loop_number() == seen && !self.stop.load(Ordering::SeqCst) {
                        guard = self.wake.wait(guard).expect("no thread panics while it holds the lock");
                    }
                    self.n_asleep.fetch_sub(1, Ordering::SeqCst);
                }
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
            }
            let is_inside;
            (seen, is_inside) = self.gate.enter();
            if is_inside {
                // SAFETY: the gate was opened after the job was written; the job is not written again until
                // this thread has left, below.
                let job = unsafe { *self.job.get() }.expect("an open gate follows a job");
                self.work(job, thread);
                self.gate.leave();
            }
        }
    }
}

/// Thread pool for parallel loops; the calling thread is one of its threads. In a child of `fork`, only the
/// calling thread remains.
pub struct ThreadPool {
    shared: Arc<PoolState>,
    threads: Vec<JoinHandle<()>>,
    /// Number of forks of the process before the pool was made.
    forks: u32,
    /// Whether workers that cost more time than they save are left out for a while.
    adapts: bool,
    out: Out,
}

/// Period for which workers are left out.
#[derive(Default)]
struct Out {
    /// Time at which workers take part again, if they are left out.
    until: Option<Instant>,
    /// End and duration of the last period.
    last: Option<(Instant, Duration)>,
    /// Factor from the time lost to the duration.
    per_loss: u32,
}

impl Out {
    /// Whether workers are currently left out.
    fn is_now(&mut self) -> bool {
        self.until = self.until.filter(|until| Instant::now() < *until);
        self.until.is_some()
    }

    /// Leaves workers out from now on, since a loop took longer by `lost` with them than without.
    fn lose(&mut self, now: Instant, lost: Duration) {
        let again = self.last.is_some_and(|(until, length)| now < until + AGAIN * length);
        self.per_loss = if again { (2 * self.per_loss).min(MOST_OUT_PER_LOSS) } else { 1 };
        let length = (lost * self.per_loss).min(LONGEST_OUT);
        self.until = Some(now + length);
        self.last = Some((now + length, length));
    }
}

impl ThreadPool {
    /// Makes a pool of `n_threads`, the caller included. Thread `i` is pinned to `cpus[i]`, if given.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn new(n_threads: usize, cpus: &[usize]) -> io::Result<ThreadPool> {
        ThreadPool::with(n_threads, cpus, SPIN, false)
    }

    fn with(n_threads: usize, cpus: &[usize], spin: Duration, adapts: bool) -> io::Result<ThreadPool> {
        let shared = Arc::new(PoolState {
            gate: Gate::default(),
            job: UnsafeCell::new(None),
            shares: (0..n_threads.max(1)).map(|_| Share::default()).collect(),
            n_asleep: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            spin,
        });
        let mut pool = ThreadPool { shared, threads: Vec::new(), forks: watch_forks(), adapts, out: Out::default() };
        for thread in 1..n_threads {
            let shared = pool.shared.clone();
            let cpu = cpus.get(thread).copied();
            let serve = move || {
                if let Some(cpu) = cpu {
                    crate::pin::pin_thread(&[cpu]);
                }
                shared.serve(thread);
            };
            // If this fails, the threads started so far end with the pool.
            pool.threads.push(std::thread::Builder::new().spawn(serve)?);
        }
        Ok(pool)
    }

    /// Number of threads, the caller included.
    pub fn n_threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Whether the pool's threads are in this process, rather than in one from which it was forked.
    fn has_threads(&self) -> bool {
        !self.threads.is_empty() && self.forks == FORKS.load(Ordering::Relaxed)
    }

    /// Calls `body(env, i, thread)` for every `i` in `0..n_iterations`, on all threads, and returns when all
    /// are done.
    ///
    /// # Safety
    /// `body` may be called with `env` from several threads at once, for different iterations.
    pub unsafe fn run(&mut self, body: LoopBody, env: *mut c_void, n_iterations: i64) {
        let job = LoopJob { body, env };
        if !self.has_threads() || n_iterations <= 1 || self.out.is_now() {
            for iteration in 0..n_iterations {
                // SAFETY: promised by the caller.
                unsafe { body(env, iteration, 0) };
            }
            return;
        }
        let start = self.adapts.then(Instant::now);
        let shared = &*self.shared;
        shares::divide(&shared.shares, n_iterations);
        // SAFETY: no worker is inside, and none enters before the gate opens.
        unsafe { *shared.job.get() = Some(job) };
        shared.gate.open();
        if shared.n_asleep.load(Ordering::SeqCst) > 0 {
            let _guard = shared.sleep.lock().expect("no thread panics while it holds the lock");
            shared.wake.notify_all();
        }
        let n_own = shared.work(job, 0);
        shared.gate.close();
        if shared.gate.is_empty() {
            return;
        }
        let own = start.map(|start| start.elapsed());
        let mut turns = 0u32;
        while !shared.gate.is_empty() {
            turns = turns.wrapping_add(1);
            // If there are fewer cores than threads, a worker may need this one.
            match turns.is_multiple_of(TURNS_TO_YIELD) {
                true => std::thread::yield_now(),
                false => std::hint::spin_loop(),
            }
        }
        if let (Some(start), Some(own)) = (start, own) {
            let now = Instant::now();
            if let Some(lost) = lost(now - start, own, n_own, n_iterations) {
                self.out.lose(now, lost);
            }
        }
    }

    /// Pool as the callback that generated code uses.
    pub fn runtime(&mut self) -> Runtime {
        unsafe extern "C" fn parallel_for(context: *mut c_void, body: LoopBody, env: *mut c_void, n_iterations: i64) {
            // SAFETY: the context is the pool that made the runtime, borrowed mutably for as long as kernels
            // run; generated code calls parallel loops one at a time and from the thread that runs the
            // kernel.
            let pool = unsafe { &mut *context.cast::<ThreadPool>() };
            // SAFETY: a parallel loop's iterations are independent, which scheduling has checked.
            unsafe { pool.run(body, env, n_iterations) };
        }
        Runtime { context: std::ptr::from_mut(self).cast(), parallel_for }
    }
}

/// Time that a loop lost to its workers, if it is more than noise.
///
/// `took` is the time of the loop; `own` is the time in which the caller executed `n_own` of the `n`
/// iterations.
fn lost(took: Duration, own: Duration, n_own: i64, n: i64) -> Option<Duration> {
    if n_own == 0 {
        return None;
    }
    let alone = own.mul_f64(n as f64 / n_own as f64);
    took.checked_sub(alone).filter(|lost| *lost > LEAST_LOSS)
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        if !self.has_threads() {
            // Threads that do not exist in this process cannot be joined.
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

/// Pool shared by several contexts. A parallel loop that finds the pool busy runs on its caller alone instead
/// of waiting.
#[derive(Clone)]
pub struct SharedPool {
    pool: Arc<Mutex<ThreadPool>>,
    n_threads: usize,
}

impl SharedPool {
    /// Starts `n_threads − 1` threads, which sleep when idle; the caller is the other one.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn new(n_threads: usize) -> io::Result<SharedPool> {
        let pool = ThreadPool::with(n_threads, &[], SHORT_SPIN, true)?;
        let n_threads = pool.n_threads();
        Ok(SharedPool { pool: Arc::new(Mutex::new(pool)), n_threads })
    }

    /// Number of threads.
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Pool as the callback that generated code uses, valid while the pool is borrowed.
    pub(crate) fn runtime(&self) -> Runtime {
        unsafe extern "C" fn parallel_for(context: *mut c_void, body: LoopBody, env: *mut c_void, n_iterations: i64) {
            // SAFETY: the context is the pool that made the runtime.
            let pool = unsafe { &*context.cast::<Mutex<ThreadPool>>() };
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
    use std::sync::atomic::AtomicU64;

    unsafe extern "C" fn count(env: *mut c_void, iteration: i64, _thread: i64) {
        // SAFETY: the tests below pass a vector of counters with one for each iteration.
        let counters = unsafe { &*env.cast::<Vec<AtomicU64>>() };
        counters[iteration as usize].fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn a_child_of_fork_has_one_thread() {
        let mut pool = ThreadPool::new(3, &[]).unwrap();
        let shared = SharedPool::new(2).unwrap();
        let counters: Vec<AtomicU64> = (0..100).map(|_| AtomicU64::new(0)).collect();
        let env = std::ptr::from_ref(&counters).cast_mut().cast::<c_void>();
        // As if another thread were running a loop.
        let held = shared.pool.lock().unwrap();
        // SAFETY: the child exits without returning from here, and an alarm ends it if a call before that
        // hangs.
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
            // SAFETY: nothing has to be cleaned up at the end of this process.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        drop(held);
        let mut status = 0;
        // SAFETY: the child belongs to this test, and the status is written to a borrowed variable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child hung (signal 14), or missed an iteration");
    }

    /// Counters of iterations, each of which takes a worker, but not the caller, a certain time.
    struct Lagging {
        counters: Vec<AtomicU64>,
        n_of_workers: AtomicU64,
        lag: Duration,
    }

    unsafe extern "C" fn lag(env: *mut c_void, iteration: i64, thread: i64) {
        // SAFETY: the tests below pass this, with a counter for each iteration.
        let lagging = unsafe { &*env.cast::<Lagging>() };
        lagging.counters[iteration as usize].fetch_add(1, Ordering::Relaxed);
        if thread > 0 {
            lagging.n_of_workers.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(lagging.lag);
        }
    }

    #[test]
    fn a_gate_lets_in_only_while_it_is_open() {
        let gate = Gate::default();
        assert_eq!(gate.enter(), (0, false), "nothing was published");
        for number in 1..5 {
            gate.open();
            assert_eq!((gate.enter(), gate.enter()), ((number, true), (number, true)));
            gate.close();
            assert_eq!(gate.enter(), (number, false), "a late one stays outside");
            gate.leave();
            assert!(!gate.is_empty());
            gate.leave();
            assert!(gate.is_empty());
        }
        // Loop numbers wrap around after the last one.
        gate.0.store(u32::MAX << Gate::BITS, Ordering::Relaxed);
        gate.open();
        assert_eq!((gate.enter(), gate.loop_number()), ((0, true), 0));
    }

    #[test]
    fn a_loop_loses_what_it_takes_longer_than_its_caller_alone() {
        let ms = Duration::from_millis;
        // The caller did half of the iterations in 1 ms, so alone it would have taken 2 ms.
        let check = |took: u64, n_own: i64, expected: Option<u64>| {
            assert_eq!(lost(ms(took), ms(1), n_own, 8), expected.map(ms), "{took} ms with {n_own} of 8");
        };
        check(1, 4, None);
        check(2, 4, None);
        check(4, 4, Some(2));
        check(4, 8, Some(3));
        check(1000, 0, None);
    }

    #[test]
    fn workers_are_left_out_the_longer_the_oftener_they_lose() {
        let (mut out, mut now, ms) = (Out::default(), Instant::now(), Duration::from_millis);
        // A loss of 3 ms, `after` the end of the last period.
        let mut check = |after: u64, expected: u64| {
            now = out.until.unwrap_or(now) + ms(after);
            out.lose(now, ms(3));
            assert_eq!(out.until.unwrap() - now, ms(expected), "{after} ms later");
        };
        check(0, 3);
        check(1, 6);
        check(20, 12);
        check(10, 24);
        check(10, 48);
        check(10, 48);
        // No losses for a while.
        check(200, 3);
        out.lose(now, ms(1000));
        assert_eq!(out.until.unwrap() - now, LONGEST_OUT);
    }

    #[test]
    fn a_thread_that_lags_holds_up_no_iterations_but_its_own() {
        for (n_threads, n) in [(2, 2), (2, 7), (2, 64), (3, 5), (4, 100)] {
            let mut pool = ThreadPool::new(n_threads, &[]).unwrap();
            for _ in 0..5 {
                let counters = (0..n).map(|_| AtomicU64::new(0)).collect();
                let lagging = Lagging { counters, n_of_workers: 0.into(), lag: Duration::from_millis(20) };
                // SAFETY: the argument is shared and outlives the call.
                unsafe { pool.run(lag, std::ptr::from_ref(&lagging).cast_mut().cast(), n) };
                let is_right = lagging.counters.iter().all(|c| c.load(Ordering::Relaxed) == 1);
                assert!(is_right, "{n_threads} threads, {n} iterations");
                // While a worker sleeps, the others take the remaining iterations; it gets a second one only
                // if it wakes in time.
                let n_of_workers = lagging.n_of_workers.into_inner();
                assert!(n_of_workers < n_threads as u64, "{n_of_workers} of {n} by {n_threads} threads");
            }
        }
    }

    #[test]
    fn every_iteration_runs_once_in_every_job() {
        let mut pool = ThreadPool::new(4, &[]).unwrap();
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
