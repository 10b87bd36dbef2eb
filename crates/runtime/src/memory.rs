//! Memory as kernels take it.

use std::alloc::{Layout, alloc, dealloc};
use std::io;
use std::ptr::NonNull;

/// What kernels take is aligned to so many bytes.
pub(crate) const ALIGN: usize = 64;

/// Bytes of a large page; the common size on x86-64 and Arm.
const LARGE_PAGE: usize = 2 << 20;

/// Zeroed memory, aligned to 64 bytes, and to large pages where it fills some: kernels go through more of it
/// than small ones let a core find without a walk through tables.
pub struct Aligned {
    pointer: NonNull<u8>,
    layout: Layout,
    n_bytes: usize,
}

// SAFETY: it owns plain memory.
unsafe impl Send for Aligned {}
// SAFETY: what is shared is not written through it; see [`Aligned::pointer`].
unsafe impl Sync for Aligned {}

impl Aligned {
    /// So many bytes.
    ///
    /// # Errors
    /// Where memory does not suffice.
    pub fn new(n_bytes: u64) -> io::Result<Aligned> {
        let none = || io::Error::from(io::ErrorKind::OutOfMemory);
        let n_bytes = usize::try_from(n_bytes).map_err(|_| none())?;
        let align = if n_bytes < LARGE_PAGE { ALIGN } else { LARGE_PAGE };
        let layout = Layout::from_size_align(n_bytes.max(1), align).map_err(|_| none())?;
        // SAFETY: the layout has at least one byte.
        let pointer = NonNull::new(unsafe { alloc(layout) }).ok_or_else(none)?;
        // Advice, so that an error changes nothing; it has to come before the first touch.
        if align == LARGE_PAGE {
            let whole = n_bytes / LARGE_PAGE * LARGE_PAGE;
            // SAFETY: it only advises on whole pages of what was allocated above.
            unsafe { libc::madvise(pointer.as_ptr().cast(), whole, libc::MADV_HUGEPAGE) };
        }
        // SAFETY: so many bytes were allocated there.
        unsafe { pointer.write_bytes(0, n_bytes) };
        Ok(Aligned { pointer, layout, n_bytes })
    }

    /// Where it begins; whoever writes there sees to it that nobody else uses it meanwhile.
    pub fn pointer(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// It as bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is initialised.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.n_bytes) }
    }

    /// It as bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.n_bytes) }
    }

    /// It as numbers of single precision.
    pub fn as_f32(&mut self) -> &mut [f32] {
        // SAFETY: the memory is initialised, aligned to more than a number is, and borrowed mutably; any bits
        // are a number.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr().cast(), self.n_bytes / size_of::<f32>()) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_and_zero() {
        for n_bytes in [0, 4, 100, 1 << 20] {
            let mut memory = Aligned::new(n_bytes).unwrap();
            assert_eq!(memory.pointer() as usize % ALIGN, 0);
            assert_eq!(memory.as_f32().len() as u64, n_bytes / 4);
            assert!(memory.as_f32().iter().all(|&x| x == 0.0));
        }
        assert!(Aligned::new(u64::MAX).is_err());
    }
}
