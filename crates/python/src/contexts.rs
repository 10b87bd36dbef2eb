//! Compiled models on NumPy's arrays, in any number of threads at the same time.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use tilewright_runtime::{Context, Model, SharedPool};

use crate::value;

/// Name, element type and shape of an input or output.
pub type Signature = (String, &'static str, Vec<usize>);

/// Model with contexts for its runs. Each run uses a context of its own, which later runs reuse, so that
/// there are as many as runs have been active at the same time; the loops of all share one thread pool.
pub struct ContextPool {
    model: Arc<Model>,
    threads: SharedPool,
    /// Idle contexts; locked only while Python's lock is held, and therefore never during a fork.
    idle: Mutex<Vec<Context>>,
}

impl ContextPool {
    /// Makes a pool for a model on `n_threads` threads, with one context initially.
    ///
    /// # Errors
    /// If memory or threads do not suffice.
    pub fn new(model: &Arc<Model>, n_threads: usize) -> io::Result<ContextPool> {
        let threads = SharedPool::new(n_threads)?;
        let idle = Mutex::new(vec![Context::new(model, &threads)?]);
        Ok(ContextPool { model: Arc::clone(model), threads, idle })
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Context>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Computes outputs from inputs, all of them the bytes of arrays in memory order; other Python threads
    /// can run meanwhile.
    ///
    /// # Errors
    /// If an array does not fit, a step of the model fails, or memory does not suffice for another
    /// context.
    pub fn run(
        &self,
        py: Python,
        inputs: &[PyReadonlyArray1<u8>],
        outputs: &mut [PyReadwriteArray1<u8>],
    ) -> PyResult<()> {
        let contiguous = |_| value::refuse("an array is not contiguous (use numpy.ascontiguousarray)");
        let inputs = inputs.iter().map(|array| array.as_slice()).collect::<Result<Vec<&[u8]>, _>>();
        let outputs = outputs.iter_mut().map(|array| array.as_slice_mut()).collect::<Result<Vec<&mut [u8]>, _>>();
        let (inputs, mut outputs) = (inputs.map_err(contiguous)?, outputs.map_err(contiguous)?);
        let idle = self.idle().pop();
        let run = || {
            let mut context = idle.map_or_else(|| Context::new(&self.model, &self.threads), Ok)?;
            let result = context.run(&inputs, &mut outputs);
            io::Result::Ok((context, result))
        };
        let no_memory = |error| PyMemoryError::new_err(format!("no memory for one more run at the same time: {error}"));
        let (context, result) = py.detach(run).map_err(no_memory)?;
        self.idle().push(context);
        result.map_err(value::refuse)
    }
}
