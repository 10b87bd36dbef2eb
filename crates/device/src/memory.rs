//! Memory for kernels: page-aligned, fenced, and read-only where they must not write.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// Bytes on each side of a writable buffer that must come back unchanged, besides the inaccessible pages
/// beyond.
pub(crate) const CANARY_BYTES: usize = 4096;
/// Byte of canaries, which are huge when read as numbers, so that a sum that reads them is wrong.
pub(crate) const CANARY: u8 = 0x7F;
const PAGE: usize = 4096;
/// Size and alignment of a huge page in bytes.
const LARGE_PAGE: usize = 2 << 20;

/// Writable buffer between canaries and inaccessible pages: an out-of-bounds write either faults or is found.
pub struct Fenced {
    map: Mapping,
    n_bytes: usize,
}

/// A memory mapping, unmapped when dropped.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; code that writes through its pointer is responsible for races.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this base and length and nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl Mapping {
    /// Splits the mapping at an offset.
    fn split_at(self, at: usize) -> (Mapping, Mapping) {
        let (base, len) = (self.base, self.len);
        assert!(at <= len, "{at} of {len}");
        std::mem::forget(self);
        // SAFETY: the offset lies in the mapping.
        (Mapping { base, len: at }, Mapping { base: unsafe { base.add(at) }, len: len - at })
    }

    /// Moves its pages to another address, replacing the pages there; returns whether the system could.
    ///
    /// # Safety
    /// The destination is a mapped range of the same length, whose contents are not needed.
    unsafe fn move_to(self, to: *mut u8) -> bool {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both ranges are mapped, and nothing refers to the contents.
        let is_moved = unsafe { libc::mremap(self.base.as_ptr().cast(), self.len, self.len, flags, to) } == to.cast();
        if is_moved {
            std::mem::forget(self);
        }
        is_moved
    }
}

fn map(len: usize, protection: i32, flags: i32, fd: i32, offset: i64) -> std::io::Result<Mapping> {
    // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len.max(1), protection, flags, fd, offset) };
    match NonNull::new(base.cast::<u8>()) {
        Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => Ok(Mapping { base, len: len.max(1) }),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Allocates memory, aligned behind a fence and a canary.
fn anonymous(len: usize, align: usize) -> std::io::Result<Mapping> {
    let spare = align - PAGE;
    let reserved = len.checked_add(spare).ok_or(std::io::ErrorKind::OutOfMemory)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let mut map = map(reserved, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)?;
    let contents = map.base.as_ptr() as usize + PAGE + CANARY_BYTES;
    let before = contents.next_multiple_of(align) - contents;
    for (at, n) in [(0, before), (before + len, spare - before)] {
        if n > 0 {
            // SAFETY: whole pages of the mapping made above, which nothing refers to.
            unsafe { libc::munmap(map.base.as_ptr().add(at).cast(), n) };
        }
    }
    // SAFETY: the remaining range lies in the mapping.
    (map.base, map.len) = (unsafe { map.base.add(before) }, len);
    Ok(map)
}

impl Fenced {
    /// Copies a part of a file to a read-only buffer, which unlike the file's own pages has huge pages if
    /// the system supports them.
    ///
    /// # Errors
    /// If memory does not suffice or the file cannot be read.
    pub fn copy(file: BorrowedFd, offset: u64, n_bytes: u64) -> std::io::Result<Fenced> {
        let copy = Fenced::new(n_bytes)?;
        let from = ReadOnly::new(file, offset, n_bytes)?;
        // SAFETY: both have `n_bytes` bytes and do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from.pointer(), copy.pointer(), copy.n_bytes) };
        copy.make_read_only()?;
        Ok(copy)
    }

    /// Allocates `n_bytes` zeroed bytes, aligned to 4096 bytes, or to huge pages if large enough.
    ///
    /// # Errors
    /// If memory is insufficient, or limited.
    pub fn new(n_bytes: u64) -> std::io::Result<Fenced> {
        let out_of_memory = || std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        let n_bytes = usize::try_from(n_bytes).map_err(|_| out_of_memory())?;
        let inner = n_bytes.checked_next_multiple_of(PAGE).and_then(|n| n.checked_add(2 * CANARY_BYTES));
        let len = inner.and_then(|n| n.checked_add(2 * PAGE)).ok_or_else(out_of_memory)?;
        let map = anonymous(len, if n_bytes < LARGE_PAGE { PAGE } else { LARGE_PAGE })?;
        // Huge pages if the system has some: kernels read packed operands page after page. Never an error.
        // SAFETY: only advises on the mapping made above.
        unsafe { libc::madvise(map.base.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        for fence in [0, len - PAGE] {
            // SAFETY: the page lies in the mapping made above.
            unsafe { libc::mprotect(map.base.as_ptr().add(fence).cast(), PAGE, libc::PROT_NONE) };
        }
        let fenced = Fenced { map, n_bytes };
        fenced.set_canaries();
        Ok(fenced)
    }

    /// Resizes the buffer, and moves the canaries. The contents are lost if it must grow. It must be
    /// writable.
    ///
    /// # Errors
    /// If memory is insufficient, or limited.
    pub fn resize(&mut self, n_bytes: u64) -> std::io::Result<()> {
        if n_bytes > self.capacity() {
            let mut pages = Pages::default();
            pages.add(std::mem::replace(self, Fenced::new(0)?));
            *self = pages.buffer(n_bytes)?;
        } else {
            self.n_bytes = n_bytes as usize;
            self.set_canaries();
        }
        Ok(())
    }

    /// Maximum size without reallocation, in bytes.
    pub fn capacity(&self) -> u64 {
        (self.map.len - 2 * PAGE - 2 * CANARY_BYTES) as u64
    }

    /// Address of the first byte.
    pub fn pointer(&self) -> *mut u8 {
        // SAFETY: the offset lies in the mapping.
        unsafe { self.map.base.as_ptr().add(PAGE + CANARY_BYTES) }
    }

    /// Size in bytes, without canaries.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes as u64
    }

    /// Write-protects the contents: a write faults.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn make_read_only(&self) -> std::io::Result<()> {
        self.protect(libc::PROT_READ)
    }

    /// Removes the write protection.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn make_writable(&self) -> std::io::Result<()> {
        self.protect(libc::PROT_READ | libc::PROT_WRITE)
    }

    fn protect(&self, protection: i32) -> std::io::Result<()> {
        let len = self.n_bytes.next_multiple_of(PAGE);
        // SAFETY: the range lies in the mapping and starts at a page.
        match unsafe { libc::mprotect(self.pointer().cast(), len, protection) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Contents as numbers.
    ///
    /// # Panics
    /// If the size is not a multiple of the element's.
    pub fn as_slice<T: Plain>(&self) -> &[T] {
        assert_eq!(self.n_bytes % size_of::<T>(), 0, "whole elements");
        // SAFETY: the memory is initialised, aligned to a page, and any bits are a valid `Plain`.
        unsafe { std::slice::from_raw_parts(self.pointer().cast(), self.n_bytes / size_of::<T>()) }
    }

    /// Fills the buffer with a byte.
    pub fn fill(&mut self, byte: u8) {
        // SAFETY: the range is this buffer's, which is borrowed mutably.
        unsafe { std::ptr::write_bytes(self.pointer(), byte, self.n_bytes) };
    }

    /// Contents, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory is initialised and belongs to this buffer, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.n_bytes) }
    }

    fn canaries(&self) -> [(*mut u8, usize); 2] {
        let after = self.n_bytes.next_multiple_of(PAGE) - self.n_bytes + CANARY_BYTES;
        // SAFETY: both offsets lie in the mapping.
        unsafe { [(self.pointer().sub(CANARY_BYTES), CANARY_BYTES), (self.pointer().add(self.n_bytes), after)] }
    }

    /// Restores the canaries, so that the next kernel is not blamed for earlier writes.
    pub fn set_canaries(&self) {
        for (at, n) in self.canaries() {
            // SAFETY: the range is accessible and outside the buffer's contents.
            unsafe { std::ptr::write_bytes(at, CANARY, n) };
        }
    }

    /// Whether the canaries are intact.
    pub fn is_intact(&self) -> bool {
        self.canaries().into_iter().all(|(at, n)| {
            // SAFETY: the range is accessible and initialised.
            unsafe { std::slice::from_raw_parts(at, n) }.iter().all(|&b| b == CANARY)
        })
    }
}

/// Free list of huge pages that were touched before, so that neither the system nor the host of a virtual
/// machine must provide them again.
#[derive(Default)]
pub struct Pages(Vec<Mapping>);

impl Pages {
    /// Adds the pages of a writable buffer to the free list.
    pub fn add(&mut self, buffer: Fenced) {
        let is_aligned = (buffer.pointer() as usize).is_multiple_of(LARGE_PAGE);
        let n_pages = if is_aligned { buffer.capacity() as usize / LARGE_PAGE } else { 0 };
        let (_, mut rest) = buffer.map.split_at(PAGE + CANARY_BYTES);
        for _ in 0..n_pages {
            let (page, after) = rest.split_at(LARGE_PAGE);
            self.0.push(page);
            rest = after;
        }
    }

    /// Allocates a buffer of `n_bytes` undefined bytes, from the free list as far as it goes. All of it has
    /// been touched, so that no kernel pays for page faults.
    ///
    /// # Errors
    /// If memory is insufficient, or limited.
    pub fn buffer(&mut self, n_bytes: u64) -> std::io::Result<Fenced> {
        let page = LARGE_PAGE as u64;
        let whole = if n_bytes < page { Some(n_bytes) } else { n_bytes.checked_next_multiple_of(page) };
        let mut buffer = Fenced::new(whole.ok_or(std::io::ErrorKind::OutOfMemory)?)?;
        let mut taken = 0;
        while taken + LARGE_PAGE <= buffer.n_bytes
            && let Some(page) = self.0.pop()
        {
            // SAFETY: the range lies in the buffer, which has no contents yet.
            if !unsafe { page.move_to(buffer.pointer().add(taken)) } {
                break;
            }
            taken += LARGE_PAGE;
        }
        // SAFETY: the range lies in the buffer.
        unsafe { std::ptr::write_bytes(buffer.pointer().add(taken), 0, buffer.n_bytes - taken) };
        buffer.resize(n_bytes)?;
        Ok(buffer)
    }
}

/// Number type of which any bit pattern is valid.
pub trait Plain: Copy {}
impl Plain for u8 {}
impl Plain for i32 {}
impl Plain for f32 {}
impl Plain for f64 {}
impl Plain for F16 {}
impl Plain for Bf16 {}

/// Bits of a binary16.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct F16(pub u16);

/// Bits of a bfloat16: the upper half of a binary32.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl From<F16> for f64 {
    fn from(x: F16) -> f64 {
        // A binary32 with the same fraction has an exponent 112 smaller, except for infinity and NaN.
        const UP: f32 = f32::from_bits((127 + 112) << 23);
        let magnitude = u32::from(x.0 & 0x7fff) << 13;
        let size = if x.0 & 0x7c00 == 0x7c00 {
            f32::from_bits(magnitude | 0x7f80_0000)
        } else {
            f32::from_bits(magnitude) * UP
        };
        f64::from(if x.0 >> 15 == 1 { -size } else { size })
    }
}

impl From<Bf16> for f64 {
    fn from(x: Bf16) -> f64 {
        f64::from(f32::from_bits(u32::from(x.0) << 16))
    }
}

/// Part of a file, mapped read-only: a write faults.
pub struct ReadOnly {
    map: Mapping,
    n_bytes: usize,
}

impl ReadOnly {
    /// Maps `n_bytes` from a page-aligned offset.
    ///
    /// # Errors
    /// If the mapping fails.
    pub fn new(file: BorrowedFd, offset: u64, n_bytes: u64) -> std::io::Result<ReadOnly> {
        let n_bytes = usize::try_from(n_bytes).map_err(|_| std::io::ErrorKind::OutOfMemory)?;
        let map = map(n_bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), offset as i64)?;
        Ok(ReadOnly { map, n_bytes })
    }

    /// Address of the first byte; writing through it faults.
    pub fn pointer(&self) -> *mut u8 {
        self.map.base.as_ptr()
    }

    /// Contents as numbers.
    pub fn as_slice<T: Plain>(&self) -> &[T] {
        // SAFETY: the mapping is at least this long, page-aligned, and any bits are a valid `Plain`.
        unsafe { std::slice::from_raw_parts(self.pointer().cast(), self.n_bytes / size_of::<T>()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canaries_notice_a_write_outside() {
        let mut buffer = Fenced::new(100).unwrap();
        buffer.fill(1);
        assert!(buffer.is_intact());
        // SAFETY: the byte after the buffer belongs to the canary, and is accessible.
        unsafe { *buffer.pointer().add(100) = 0 };
        assert!(!buffer.is_intact());
        buffer.set_canaries();
        assert!(buffer.is_intact());
    }

    #[test]
    fn large_buffers_are_aligned_to_large_pages() {
        for n_bytes in [LARGE_PAGE, LARGE_PAGE + 1, 5 * LARGE_PAGE + 12345] {
            let mut buffer = Fenced::new(n_bytes as u64).unwrap();
            assert_eq!(buffer.pointer() as usize % LARGE_PAGE, 0);
            buffer.fill(7);
            assert!(buffer.is_intact() && buffer.as_slice::<u8>().iter().all(|&b| b == 7));
        }
    }

    #[test]
    fn a_buffer_grows_and_keeps_its_memory() {
        let sizes = [100, 5000, LARGE_PAGE, 3 * LARGE_PAGE + 12345, 8 * LARGE_PAGE];
        let mut buffer = Fenced::new(0).unwrap();
        for n_bytes in sizes {
            let n_kept = if buffer.n_bytes < LARGE_PAGE { 0 } else { buffer.n_bytes };
            buffer.resize(n_bytes as u64).unwrap();
            assert_eq!(buffer.as_slice::<u8>().iter().filter(|&&b| b == 7).count(), n_kept);
            buffer.fill(7);
            buffer.make_read_only().unwrap();
            buffer.make_writable().unwrap();
            assert!(buffer.is_intact() && buffer.as_slice::<u8>().iter().all(|&b| b == 7));
        }
        let other = Fenced::new(100).unwrap();
        assert!(other.is_intact() && buffer.is_intact());
    }

    #[test]
    fn pages_serve_buffers_of_other_sizes() {
        let mut pages = Pages::default();
        for (n_bytes, byte) in [(LARGE_PAGE, 1), (3 * LARGE_PAGE - 100, 3)] {
            let mut buffer = pages.buffer(n_bytes as u64).unwrap();
            buffer.fill(byte);
            pages.add(buffer);
        }
        assert_eq!(pages.0.len(), 3);
        let sizes = [2 * LARGE_PAGE - 100, LARGE_PAGE, LARGE_PAGE];
        let mut buffers = sizes.map(|n_bytes| pages.buffer(n_bytes as u64).unwrap());
        assert_eq!(pages.0.len(), 0);
        // Reused pages keep their contents; new ones are zero.
        assert_eq!(buffers.each_ref().map(|b| b.as_slice::<u8>()[b.n_bytes - 1]), [3, 3, 0]);
        for buffer in &mut buffers {
            buffer.fill(9);
            assert!(buffer.is_intact() && buffer.as_slice::<u8>().iter().all(|&b| b == 9));
        }
        pages.add(Fenced::new(100).unwrap());
        assert_eq!(pages.0.len(), 0);
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert!(Fenced::new(1 << 62).is_err());
        assert!(Pages::default().buffer(u64::MAX).is_err());
    }
}
