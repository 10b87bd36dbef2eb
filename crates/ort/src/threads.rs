//! Parallel loops of kernels on ONNX Runtime's threads.
//!
//! A session has a pool of threads, of which its options say how many there are. Kernels use that pool and no
//! threads of their own, so that no two pools spin for the same cores.

use std::ffi::c_void;

use tilewright_codegen::Runtime;
use tilewright_runtime::shares::{self, LoopBody, Share};

use crate::api::{KernelContext, OrtApi};

/// Loops of one run: its calls of ONNX Runtime's threads.
pub struct Loops<'a> {
    /// Functions of ONNX Runtime.
    pub api: &'a OrtApi,
    /// The run.
    pub run: *const KernelContext,
    /// A share of iterations for each number of a thread; of this run alone.
    pub shares: &'a [Share],
}

/// Loop under way.
struct LoopUnderWay<'a> {
    shares: &'a [Share],
    body: LoopBody,
    env: *mut c_void,
}

impl Loops<'_> {
    /// Runtime of kernels whose loops are these, for as long as they are borrowed.
    pub fn runtime(&self) -> Runtime {
        unsafe extern "C" fn parallel_for(context: *mut c_void, body: LoopBody, env: *mut c_void, n_iterations: i64) {
            // SAFETY: the context is the one that made the runtime.
            let loops = unsafe { &*context.cast::<Loops>() };
            loops.run(body, env, n_iterations);
        }
        Runtime { context: std::ptr::from_ref(self).cast_mut().cast(), parallel_for }
    }

    /// Carries out all iterations, each number of a thread its own first, then those of others.
    fn run(&self, body: LoopBody, env: *mut c_void, n_iterations: i64) {
        let n = self.shares.len().min(usize::try_from(n_iterations).unwrap_or(0)).max(1);
        let shares = &self.shares[..n];
        shares::divide(shares, n_iterations);
        let mut all = LoopUnderWay { shares, body, env };
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
    unsafe { &*data.cast::<LoopUnderWay>() }.work(index);
}

impl LoopUnderWay<'_> {
    fn work(&self, thread: usize) {
        // SAFETY: iterations of a loop are independent, which scheduling has checked; under this number
        // nobody else works.
        unsafe { shares::work(self.shares, self.body, self.env, thread) };
    }
}
