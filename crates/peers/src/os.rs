//! What peers need of the operating system: stopping a process, waiting for a pipe.

use std::fs::File;
use std::os::fd::{FromRawFd, RawFd};
use std::time::Duration;

/// Stop a child of ours until [`resume`].
pub(super) fn stop(pid: u32) {
    signal(pid, libc::SIGSTOP);
}

/// Let a stopped child of ours run.
pub(super) fn resume(pid: u32) {
    signal(pid, libc::SIGCONT);
}

fn signal(pid: u32, signal: libc::c_int) {
    // SAFETY: kill takes plain numbers. The process is a child that was not waited for, so the id is its own.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// Whether `fd` has bytes to read, or has ended, before `limit` is over.
pub(super) fn readable(fd: RawFd, limit: Duration) -> std::io::Result<bool> {
    let deadline = std::time::Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let left_ms = left.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i32;
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd is passed, and its length is one.
        match unsafe { libc::poll(&mut poll, 1, left_ms) } {
            0 => return Ok(false),
            1.. => return Ok(true),
            _ => {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// Take standard output for ourselves and point its number at standard error.
///
/// A library that prints then cannot disturb the protocol.
pub(super) fn take_stdout() -> std::io::Result<File> {
    // SAFETY: both numbers are open; the copy is owned by nobody else.
    unsafe {
        let copy = libc::fcntl(libc::STDOUT_FILENO, libc::F_DUPFD_CLOEXEC, 3);
        if copy < 0 || libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(File::from_raw_fd(copy))
    }
}

/// Have the kernel kill this process when the thread that started it ends.
///
/// Without this a child that was stopped when its parent was killed would stay for ever.
pub(super) fn end_with_parent() {
    #[cfg(target_os = "linux")]
    // SAFETY: prctl with PR_SET_PDEATHSIG takes one plain number.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
    }
}
