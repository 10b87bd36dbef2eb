//! Aligned memory for kernels.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::{self, NonNull};

/// Alignment of kernels' arguments, in bytes.
pub(crate) const ALIGN: usize = 64;

/// Bytes of a large page; the common size on x86-64 and Arm.
const LARGE_PAGE: usize = 2 << 20;

/// Zeroed memory, aligned to 64 bytes and, if large, backed by huge pages to save TLB misses.
pub struct Aligned {
    pointer: NonNull<u8>,
    n_bytes: usize,
}

// SAFETY: the value owns plain memory.
unsafe impl Send for Aligned {}
// SAFETY: methods do not write through a shared reference; see [`Aligned::pointer`] for others.
unsafe impl Sync for Aligned {}

impl Aligned {
    /// Allocates `n_bytes` zeroed bytes and touches their pages, so that the first write causes no page
    /// faults.
    ///
    /// # Errors
    /// If memory does not suffice.
    pub fn new(n_bytes: u64) -> io::Result<Aligned> {
        let memory = Aligned::untouched(n_bytes)?;
        // SAFETY: `n_bytes` bytes were allocated there.
        unsafe { memory.pointer.write_bytes(0, memory.n_bytes) };
        Ok(memory)
    }

    /// Allocates `n_bytes` zeroed bytes, whose pages are mapped at the first write.
    ///
    /// # Errors
    /// If memory does not suffice, as far as the system can tell before the pages are mapped.
    pub fn untouched(n_bytes: u64) -> io::Result<Aligned> {
        let none = || io::Error::from(io::ErrorKind::OutOfMemory);
        let n_bytes = usize::try_from(n_bytes).map_err(|_| none())?;
        let pointer = match n_bytes < LARGE_PAGE {
            // SAFETY: the layout has at least one byte.
            true => NonNull::new(unsafe { alloc_zeroed(small(n_bytes)) }).ok_or_else(none)?,
            false => map(n_bytes)?,
        };
        Ok(Aligned { pointer, n_bytes })
    }

    /// Address of the memory; code that writes there must ensure exclusive use.
    pub fn pointer(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// Memory as bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is initialised.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.n_bytes) }
    }

    /// Memory as mutable bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.n_bytes) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        let pointer = self.pointer.as_ptr();
        if self.n_bytes < LARGE_PAGE {
            // SAFETY: the memory was allocated with this layout.
            unsafe { dealloc(pointer, small(self.n_bytes)) };
        } else {
            // SAFETY: the memory was mapped with this length.
            unsafe { libc::munmap(pointer.cast(), self.n_bytes.next_multiple_of(LARGE_PAGE)) };
        }
    }
}

/// Layout of memory that does not fill a large page.
fn small(n_bytes: usize) -> Layout {
    Layout::from_size_align(n_bytes.max(1), ALIGN).expect("a large page is no size that overflows")
}

/// Maps fresh zeroed memory, aligned to large pages and a multiple of them in size.
fn map(n_bytes: usize) -> io::Result<NonNull<u8>> {
    let none = || io::Error::from(io::ErrorKind::OutOfMemory);
    let len = n_bytes.checked_next_multiple_of(LARGE_PAGE).ok_or_else(none)?;
    let more = len.checked_add(LARGE_PAGE).ok_or_else(none)?;
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: requests fresh memory at any address.
    let start = unsafe { libc::mmap(ptr::null_mut(), more, access, kind, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let before = (start as usize).next_multiple_of(LARGE_PAGE) - start as usize;
    // SAFETY: the parts before and after are whole pages of the fresh mapping, and unused. If the advice
    // fails, nothing changes; it must come before the first access.
    unsafe {
        let at = start.add(before);
        if before > 0 {
            libc::munmap(start, before);
        }
        libc::munmap(at.add(len), LARGE_PAGE - before);
        libc::madvise(at, n_bytes / LARGE_PAGE * LARGE_PAGE, libc::MADV_HUGEPAGE);
        Ok(NonNull::new(at.cast::<u8>()).expect("a mapping is not at address zero"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zero() {
        for n_bytes in [0, 4, 100, 1 << 20, LARGE_PAGE as u64, (5 << 20) + 4] {
            let memory = Aligned::new(n_bytes).unwrap();
            assert_eq!(memory.pointer() as usize % ALIGN, 0);
            assert_eq!(memory.bytes().len() as u64, n_bytes);
            assert!(memory.bytes().iter().all(|&x| x == 0));
        }
        assert!(Aligned::new(u64::MAX).is_err());
    }
}
