//! Device memory between canaries, which reveal out-of-bounds writes.

use std::sync::Arc;

use crate::memory::{CANARY, CANARY_BYTES};

/// Device memory of a driver; offsets are in bytes.
pub trait DeviceMemory {
    /// Error of the driver.
    type Error;

    /// Fills a range with a byte, after previously submitted work is done.
    ///
    /// # Errors
    /// If the driver refuses.
    fn fill(&self, at: usize, n_bytes: usize, byte: u8) -> Result<(), Self::Error>;

    /// Copies a range to the host, after previously submitted work is done.
    ///
    /// # Errors
    /// If the driver refuses, or a kernel before it failed.
    fn read(&self, at: usize, to: &mut [u8]) -> Result<(), Self::Error>;

    /// Copies a range from the host, after previously submitted work is done.
    ///
    /// # Errors
    /// If the driver refuses, or a kernel before it failed.
    fn write(&self, at: usize, from: &[u8]) -> Result<(), Self::Error>;
}

/// Device memory between canaries.
pub struct GuardedMemory<W> {
    whole: W,
    n_bytes: usize,
}

/// Range of device memory, as an argument of a kernel.
pub struct GuardedSpan<M> {
    /// Memory that contains it.
    pub memory: Arc<M>,
    /// Offset in the memory, in bytes.
    pub at: u64,
    /// Number of bytes.
    pub n_bytes: u64,
}

impl<M> Clone for GuardedSpan<M> {
    fn clone(&self) -> GuardedSpan<M> {
        GuardedSpan { memory: Arc::clone(&self.memory), ..*self }
    }
}

impl<M> GuardedSpan<M> {
    /// Range of the first `n_bytes` bytes of memory.
    pub fn whole(memory: Arc<M>, n_bytes: u64) -> GuardedSpan<M> {
        GuardedSpan { memory, at: 0, n_bytes }
    }
}

/// Argument of a kernel on a device.
pub enum KernelArgument<M> {
    /// Pointer to memory.
    Memory(GuardedSpan<M>),
    /// Value of at most eight bytes, or a tensor map of CUDA.
    Value(Vec<u8>),
    /// Shared (local) memory of a block, in bytes; only OpenCL passes it as an argument.
    Shared(usize),
}

impl<M> From<GuardedSpan<M>> for KernelArgument<M> {
    fn from(span: GuardedSpan<M>) -> KernelArgument<M> {
        KernelArgument::Memory(span)
    }
}

/// Size of memory with its canaries for `n_bytes` bytes of contents; `None` on overflow.
pub(crate) fn with_canaries(n_bytes: usize) -> Option<usize> {
    n_bytes.checked_add(2 * CANARY_BYTES)
}

impl<W: DeviceMemory> GuardedMemory<W> {
    /// Wraps memory as [large](with_canaries) as contents and canaries; the contents are in the middle.
    pub(crate) fn inside(whole: W, n_bytes: usize) -> Result<GuardedMemory<W>, W::Error> {
        let memory = GuardedMemory { whole, n_bytes };
        memory.set_canaries()?;
        Ok(memory)
    }

    /// Memory including its canaries.
    pub(crate) fn whole(&self) -> &W {
        &self.whole
    }

    /// Size in bytes, without canaries.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes as u64
    }

    /// Fills the memory with a byte, after previously submitted work is done.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn fill(&self, byte: u8) -> Result<(), W::Error> {
        self.whole.fill(CANARY_BYTES, self.n_bytes, byte)
    }

    fn set_canaries(&self) -> Result<(), W::Error> {
        self.whole.fill(0, CANARY_BYTES, CANARY)?;
        self.whole.fill(CANARY_BYTES + self.n_bytes, CANARY_BYTES, CANARY)
    }

    /// Whether the canaries are intact; restores them.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn is_intact(&self) -> Result<bool, W::Error> {
        let mut around = [0; CANARY_BYTES];
        for at in [0, CANARY_BYTES + self.n_bytes] {
            self.whole.read(at, &mut around)?;
            if around.iter().any(|byte| *byte != CANARY) {
                self.set_canaries()?;
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Copies a range from byte `at` on to the host, after previously submitted work is done.
    ///
    /// # Errors
    /// If the driver refuses, or a kernel before it failed.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<(), W::Error> {
        self.whole.read(self.place(at, to.len()), to)
    }

    /// Copies a range from byte `at` on from the host, after previously submitted work is done.
    ///
    /// # Errors
    /// If the driver refuses, or a kernel before it failed.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub fn write(&self, at: usize, from: &[u8]) -> Result<(), W::Error> {
        self.whole.write(self.place(at, from.len()), from)
    }

    /// Offset of `n_bytes` bytes at `at` in the memory with its canaries.
    fn place(&self, at: usize, n_bytes: usize) -> usize {
        assert!(at.checked_add(n_bytes).is_some_and(|end| end <= self.n_bytes), "{n_bytes} bytes from {at} on");
        CANARY_BYTES + at
    }
}
