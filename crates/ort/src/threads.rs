//! Parallel loops of kernels on ONNX Runtime's threads.
//!
//! A session has a thread pool, whose size its options set. Kernels use that pool and no threads of their
//! own, so that two pools do not compete for the same cores.

use std::ffi::c_void;

use tilewright_codegen::Runtime;
use tilewright_runtime::shares::{self, LoopBody, Share};

use crate::api::{KernelContext, OrtApi};

/// Parallel loops of one run, on ONNX Runtime's threads.
pub struct Loops<'a> {
    /// Functions of ONNX Runtime.
    pub api: &'a OrtApi,
    /// Active run.
    pub run: *const KernelContext,
    /// Share of iterations for each thread number, used only by this run.
    pub shares: &'a [Share],
}

/// Active loop.
struct LoopUnderWay<'a> {
    shares: &'a [Share],
    body: LoopBody,
    env: *mut c_void,
}

impl Loops<'_> {
    /// Returns a runtime whose kernels run their loops here, valid while `self` is borrowed.
    pub fn runtime(&self) -> Runtime {
        unsafe extern "C" fn parallel_for(context: *mut c_void, body: LoopBody, env: *mut c_void, n_iterations: i64) {
            // SAFETY: the context is the one that made the runtime.
            let loops = unsafe { &*context.cast::<Loops>() };
            loops.run(body, env, n_iterations);
        }
        Runtime { context: std::ptr::from_ref(self).cast_mut().cast(), parallel_for }
    }

    /// Executes all iterations; each thread number first takes its own share, then those of others.
    fn run(&self, body: LoopBody, env: *mut c_void, n_iterations: i64) {
        let n = self.shares.len().min(usize::try_from(n_iterations).unwrap_or(0)).max(1);
        let shares = &self.shares[..n];
        shares::divide(shares, n_iterations);
        let mut all = LoopUnderWay { shares, body, env };
        if n > 1 {
            let data = std::ptr::from_mut(&mut all).cast();
            // SAFETY: the run is active, and the loop lives until the call returns, when all pieces are done.
            // ONNX Runtime's own locks synchronise the threads' writes.
            let status = unsafe { self.api.parallel_for(self.run, piece, n, 0, data) };
            // If threads were not available, iterations may be left, which are executed below.
            let _ = self.api.check(status);
        }
        all.work(0);
    }
}

/// Executes iterations with a thread number.
unsafe extern "C" fn piece(data: *mut c_void, index: usize) {
    // SAFETY: the data is a loop, which does not change meanwhile.
    unsafe { &*data.cast::<LoopUnderWay>() }.work(index);
}

impl LoopUnderWay<'_> {
    fn work(&self, thread: usize) {
        // SAFETY: iterations of a loop are independent, which scheduling has checked; no other thread uses
        // this number.
        unsafe { shares::work(self.shares, self.body, self.env, thread) };
    }
}
