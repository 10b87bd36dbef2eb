//! Kernel calls with memory and threads of their own.

use std::io;

use tilewright_codegen::CompiledKernel;

use crate::memory::Aligned;
use crate::pool::ThreadPool;

/// Kernel with its argument buffers, kept buffers, scratch memory and threads.
pub struct KernelCall {
    kernel: CompiledKernel,
    arguments: Vec<Aligned>,
    kept: Vec<Aligned>,
    scratch: Aligned,
    pool: ThreadPool,
    is_prepared: bool,
}

impl KernelCall {
    /// Allocates the buffers of a kernel with arguments of these sizes in bytes.
    ///
    /// # Errors
    /// If memory or threads do not suffice.
    pub fn new(kernel: CompiledKernel, argument_bytes: &[u64], n_threads: usize) -> io::Result<KernelCall> {
        let buffers =
            |sizes: &[u64]| sizes.iter().map(|&n_bytes| Aligned::new(n_bytes)).collect::<io::Result<Vec<_>>>();
        let (arguments, kept) = (buffers(argument_bytes)?, buffers(kernel.kept_bytes())?);
        let scratch = Aligned::new(kernel.scratch_bytes(n_threads))?;
        Ok(KernelCall { kernel, arguments, kept, scratch, pool: ThreadPool::new(n_threads, &[])?, is_prepared: false })
    }

    /// Bytes of an argument, mutable.
    pub fn argument_mut(&mut self, at: usize) -> &mut [u8] {
        self.arguments[at].bytes_mut()
    }

    /// Whether the kernel's `prepare` part has run on the current constant arguments.
    pub fn is_prepared(&self) -> bool {
        self.is_prepared
    }

    /// Makes the next run prepare the constant arguments again.
    pub fn forget_prepared(&mut self) {
        self.is_prepared = false;
    }

    /// Runs the kernel on its arguments.
    pub fn run(&mut self) {
        let pointers = |buffers: &[Aligned]| buffers.iter().map(Aligned::pointer).collect::<Vec<_>>();
        let (arguments, kept) = (pointers(&self.arguments), pointers(&self.kept));
        let (scratch, runtime) = (self.scratch.pointer(), self.pool.runtime());
        // SAFETY: the buffers have the sizes that the caller gave and that the kernel requires, are aligned,
        // and do not overlap; kept buffers are prepared before the kernel runs; scratch memory suffices for
        // all threads of the pool.
        unsafe {
            if !std::mem::replace(&mut self.is_prepared, true) {
                self.kernel.prepare(&arguments, &kept, scratch, &runtime);
            }
            self.kernel.run(&arguments, &kept, scratch, &runtime);
            self.kernel.finish(&arguments, &kept, scratch, &runtime);
        }
    }
}
