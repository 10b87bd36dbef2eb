//! State shared by the threads of a worker: kernels, and results of their `prepare` parts.

use super::Failure;
use crate::prepared::{PreparedBuffers, PreparedCache, Recipe};
use crate::timing::First;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use tilewright_codegen::CompiledKernel;
use tilewright_ir::reference::Tolerance;
use tilewright_search::ErrorClass;

/// Built kernel with its properties.
pub struct Built {
    pub kernel: CompiledKernel,
    /// Tolerance of its results against the reference.
    pub tolerance: Tolerance,
    /// Whether its body has a parallel loop.
    pub is_parallel: bool,
    /// Bytes that its body accesses, except temporaries.
    pub n_bytes: u64,
    /// Names of the kept buffers.
    pub kept: Vec<String>,
    /// Key of its `prepare` part, if the result can be shared.
    pub recipe: Option<Recipe>,
    /// Result of its `prepare` part.
    pub prepared: OnceLock<Arc<PreparedBuffers>>,
    /// First run, which verified it.
    pub first: OnceLock<First>,
}

/// Built kernels by number.
pub struct NumberedKernels<B>(Mutex<HashMap<u64, Arc<B>>>);

impl<B> Default for NumberedKernels<B> {
    fn default() -> NumberedKernels<B> {
        NumberedKernels(Mutex::default())
    }
}

impl<B> NumberedKernels<B> {
    /// Keeps a kernel under a number.
    pub fn insert(&self, id: u64, built: B) {
        lock(&self.0).insert(id, Arc::new(built));
    }

    /// Drops a kernel.
    pub fn remove(&self, id: u64) {
        let built = lock(&self.0).remove(&id);
        // Its memory is freed after the lock is released.
        drop(built);
    }

    /// Finds a kernel by number.
    ///
    /// # Errors
    /// If there is no such kernel.
    pub fn get(&self, id: u64) -> Result<Arc<B>, Failure> {
        let built = lock(&self.0).get(&id).cloned();
        built.ok_or_else(|| (ErrorClass::Unknown, format!("no kernel {id} is kept")).into())
    }
}

pub struct KernelStore {
    /// Built kernels.
    pub kernels: NumberedKernels<Built>,
    prepared: Mutex<PreparedCache>,
}

impl KernelStore {
    /// Makes an empty store.
    pub fn new(prepared: PreparedCache) -> KernelStore {
        KernelStore { kernels: NumberedKernels::default(), prepared: Mutex::new(prepared) }
    }

    /// Cache of `prepare` results.
    pub fn prepared(&self) -> MutexGuard<'_, PreparedCache> {
        lock(&self.prepared)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics while it holds the lock")
}
