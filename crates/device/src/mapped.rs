//! Memory-mapped files: their pages come from the system's cache, shared by all processes.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Start and length in bytes of each mapping.
static MAPPINGS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

fn mappings() -> MutexGuard<'static, Vec<(usize, usize)>> {
    MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Message of a process that accesses a mapping beyond the end of its file.
const SHRUNK: &[u8] = b"error: a file became shorter while it was read (run this again once it is whole)\n";
/// Exit code of bad input.
const BAD_INPUT: i32 = 2;

/// Mapping of a whole file, unmapped when dropped.
struct Mapped {
    pointer: NonNull<u8>,
    len: usize,
}

// SAFETY: no code writes it, and it is unmapped only on drop.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped there, readable until drop. A process that writes to the file
        // meanwhile changes bytes of weights, of which all values are valid.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.len) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        mappings().retain(|(start, _)| *start != self.pointer.as_ptr() as usize);
        // SAFETY: it was mapped with this length, and nothing borrows from it any more.
        unsafe { libc::munmap(self.pointer.as_ptr().cast(), self.len) };
    }
}

/// Memory-maps a file. A process that touches bytes truncated meanwhile is killed by `SIGBUS`; see
/// [`tell_of_shrinking`].
///
/// # Errors
/// If the file is empty, or its file system does not support mappings.
pub fn map(file: &File) -> io::Result<Bytes> {
    let len = usize::try_from(file.metadata()?.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
    // SAFETY: creates a mapping at an address of the kernel's choice, of an open descriptor.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let pointer = NonNull::new(start.cast::<u8>()).expect("a mapping is not at address zero");
    mappings().push((start as usize, len));
    Ok(Bytes::from_owner(Mapped { pointer, len }))
}

/// Releases the resident memory of all mappings. Later reads come from the file, or the system's cache.
pub fn let_go() {
    for &(start, len) in mappings().iter() {
        // SAFETY: the lock keeps the mapping alive; its pages are backed by the file, so that nothing is
        // lost.
        unsafe { libc::madvise(start as *mut libc::c_void, len, libc::MADV_DONTNEED) };
    }
}

/// Installs a `SIGBUS` handler that reports a truncated mapped file, and exits as on bad input.
pub fn tell_of_shrinking() {
    /// `BUS_ADRERR`: the address has no memory behind it.
    const NO_MEMORY_THERE: i32 = 2;
    extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the system passes the signal's details; the calls are async-signal-safe. A signal of any
        // other cause is raised again when the handler returns, and ends the process.
        unsafe {
            if (*info).si_code == NO_MEMORY_THERE {
                libc::write(libc::STDERR_FILENO, SHRUNK.as_ptr().cast(), SHRUNK.len());
                libc::_exit(BAD_INPUT);
            }
            libc::signal(signal, libc::SIG_DFL);
        }
    }
    // SAFETY: the handler only makes async-signal-safe calls, on the alternate stack of each thread.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_bus_error as *const () as usize;
        action.sa_flags = libc::SA_ONSTACK | libc::SA_SIGINFO;
        libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Seek, Write};

    #[test]
    fn a_file_is_there_as_memory_after_it_is_closed() {
        let mut file = tempfile();
        file.write_all(&[7; 5000]).unwrap();
        file.rewind().unwrap();
        let bytes = map(&file).unwrap();
        drop(file);
        assert_eq!(bytes.slice(4000..), vec![7; 1000]);
        let_go();
        assert_eq!(bytes.slice(..4000), vec![7; 4000]);
        assert!(map(&tempfile()).is_err(), "of an empty file there is no mapping");
    }

    #[test]
    fn a_file_that_shrinks_is_told_of() {
        const IS_CHILD: &str = "TILEWRIGHT_TEST_SHRINKS";
        if std::env::var_os(IS_CHILD).is_some() {
            let mut file = tempfile();
            file.write_all(&[7; 100_000]).unwrap();
            let bytes = map(&file).unwrap();
            tell_of_shrinking();
            file.set_len(10).unwrap();
            assert_eq!(bytes[9], 7);
            unreachable!("there is no byte {}", bytes[99_999]);
        }
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "mapped::tests::a_file_that_shrinks_is_told_of", "--nocapture"]).env(IS_CHILD, "");
        let output = child.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.contains("a file became shorter")), (Some(BAD_INPUT), true), "{said}");
    }

    fn tempfile() -> File {
        crate::data::anonymous_file(c"test").unwrap()
    }
}
