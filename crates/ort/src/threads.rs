//! Parallel loops of kernels on ONNX Runtime's threads.
//!
//! A session has a pool of threads, of which its options say how many there are. Kernels use that pool and no
//! threads of their own, so that no two pools spin for the same cores.

use std::ffi::c_void;
use std::sync::atomic::{AtomicI64, Ordering};

use tilewright_codegen::Runtime;

use crate::api::{Api, KernelContext};

/// Iterations of a number of a thread, on cache lines of their own.
#[repr(align(128))]
#[derive(Default)]
pub struct Share {
    next: AtomicI64,
    end: AtomicI64,
}

/// Loops of one run: its calls of ONNX Runtime's threads.
pub struct Loops<'a> {
    /// Functions of ONNX Runtime.
    pub api: &'a Api,
    /// The run.
    pub run: *const KernelContext,
    /// A share of iterations for each number of a thread; of this run alone.
    pub shares: &'a [Share],
}

type Body = unsafe extern "C" fn(env: *mut c_void, iteration: i64, thread: i64);

/// Loop under way.
struct Loop<'a> {
    shares: &'a [Share],
    body: Body,
    env: *mut c_void,
}

impl Loops<'_> {
    /// Runtime of kernels whose loops are these, for as long as they are borrowed.
    pub fn runtime(&self) -> Runtime {
        unsafe extern "C" fn parallel_for(context: *mut c_void, body: Body, env: *mut c_void, n_iterations: i64) {
            // SAFETY: the context is the one that made the runtime.
            let loops = unsafe { &*context.cast::<Loops>() };
            loops.run(body, env, n_iterations);
        }
        Runtime { context: std::ptr::from_ref(self).cast_mut().cast(), parallel_for }
    }

    /// Carries out all iterations, each number of a thread its own first, then those of others.
    fn run(&self, body: Body, env: *mut c_void, n_iterations: i64) {
        let n = self.shares.len().min(usize::try_from(n_iterations).unwrap_or(0)).max(1);
        let shares = &self.shares[..n];
        for (share, at) in shares.iter().zip(0..) {
            share.next.store(n_iterations * at / n as i64, Ordering::Relaxed);
            share.end.store(n_iterations * (at + 1) / n as i64, Ordering::Relaxed);
        }
        let mut all = Loop { shares, body, env };
        if n > 1 {
            let data = std::ptr::from_mut(&mut all).cast();
            // SAFETY: the run is under way, and the loop lives until the call returns, as all pieces are done
            // by then. ONNX Runtime's own locks order what threads write.
            let status = unsafe { self.api.parallel_for(self.run, piece, n, 0, data) };
            // Threads that it could not have would leave iterations, which are carried out below.
            let _ = self.api.check(status);
        }
        all.work(0);
    }
}

/// Works as one number of a thread.
unsafe extern "C" fn piece(data: *mut c_void, index: usize) {
    // SAFETY: the data is a loop, which nobody changes meanwhile.
    unsafe { &*data.cast::<Loop>() }.work(index);
}

impl Loop<'_> {
    fn work(&self, thread: usize) {
        let (others, own) = self.shares.split_at(thread);
        for share in own.iter().chain(others) {
            let end = share.end.load(Ordering::Relaxed);
            loop {
                let iteration = share.next.fetch_add(1, Ordering::Relaxed);
                if iteration >= end {
                    break;
                }
                // SAFETY: iterations of a loop are independent, which scheduling has checked; each is taken
                // once, and under this number nobody else works.
                unsafe { (self.body)(self.env, iteration, thread as i64) };
            }
        }
    }
}
