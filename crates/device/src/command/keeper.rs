//! Keeper: a supervising process between the tuner and a user's program. Descendants of the program that
//! outlive their parents, even daemons, become children of the keeper (a subreaper), and end with the
//! program.

use crate::spawn::fork;
use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// Maximum number of tries to end remaining processes; what the system does not end by then is left to it.
const MOST_TRIES: u32 = 5_000;
static TRY: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Makes this process, between fork and exec, the keeper of a new one, in which the call returns and which
/// has its own process group. When the program ends, the keeper writes the time to `told`, kills its
/// remaining descendants, and exits with the program's status. It ends the program on SIGTERM, and when the
/// thread that started the keeper ends.
///
/// # Errors
/// If the system allows no further process.
///
/// # Safety
/// Makes only async-signal-safe calls, and may be called only where nothing else is allowed: between fork and
/// exec.
pub unsafe fn stand_between(told: RawFd) -> io::Result<()> {
    // SAFETY: the calls take plain numbers and structures of this stack; none of them allocates or locks.
    unsafe {
        // If the system lacks this, programs are ended only by their process group.
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        match fork() {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                libc::setpgid(0, 0);
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::sigprocmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
                Ok(())
            }
            program => keep(program, told),
        }
    }
}

/// Current time in nanoseconds, of the clock by which programs are timed.
pub fn now_ns() -> u64 {
    // SAFETY: the structure is plain data that the call writes.
    let now = unsafe {
        let mut now: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now);
        now
    };
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32).as_nanos() as u64
}

/// Writes the current time to a descriptor, as eight bytes of [`now_ns`].
///
/// # Safety
/// As [`stand_between`].
pub unsafe fn tell_time(told: RawFd) {
    let now = now_ns().to_ne_bytes();
    // SAFETY: the length is that of the bytes.
    unsafe { libc::write(told, now.as_ptr().cast(), now.len()) };
}

/// Waits for a program, ends what it leaves behind, and ends as it did.
unsafe fn keep(program: libc::pid_t, told: RawFd) -> ! {
    // SAFETY: as above; no other code uses the descriptors of this process any more.
    unsafe {
        close_all_but(told);
        let mut awaited: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut awaited);
        libc::sigaddset(&raw mut awaited, libc::SIGCHLD);
        libc::sigaddset(&raw mut awaited, libc::SIGTERM);
        while !has_ended(program) && libc::sigwaitinfo(&raw const awaited, std::ptr::null_mut()) != libc::SIGTERM {}
        tell_time(told);
        // Until the program has been waited for, the id of its group is not reused.
        libc::kill(-program, libc::SIGKILL);
        libc::kill(program, libc::SIGKILL);
        let mut status = 0;
        while libc::waitpid(program, &raw mut status, 0) < 0 && *libc::__errno_location() == libc::EINTR {}
        let mut n_tries = 0;
        loop {
            let mut ignored = 0;
            match libc::waitpid(-1, &raw mut ignored, libc::WNOHANG) {
                1.. => {}
                0 if n_tries < MOST_TRIES && end_children() => {
                    n_tries += 1;
                    libc::sigtimedwait(&raw const awaited, std::ptr::null_mut(), &raw const TRY);
                }
                _ => break,
            }
        }
        if libc::WIFSIGNALED(status) {
            let signal = libc::WTERMSIG(status);
            libc::signal(signal, libc::SIG_DFL);
            // Only this signal: for other pending signals there may be handlers of the process that this one
            // is a copy of.
            libc::sigfillset(&raw mut awaited);
            libc::sigdelset(&raw mut awaited, signal);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const awaited, std::ptr::null_mut());
            // Old C libraries remember the id of the process that this one is a copy of.
            libc::kill(libc::syscall(libc::SYS_getpid) as libc::pid_t, signal);
        }
        libc::_exit(libc::WEXITSTATUS(status))
    }
}

/// Whether a child has ended; it remains to be waited for.
unsafe fn has_ended(id: libc::pid_t) -> bool {
    // SAFETY: the structure is plain data that the call writes.
    unsafe {
        let mut about: libc::siginfo_t = std::mem::zeroed();
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        libc::waitid(libc::P_PID, id as libc::id_t, &raw mut about, flags) == 0 && about.si_pid() == id
    }
}

/// Closes all descriptors of this process but one, because other processes wait for their ends.
unsafe fn close_all_but(kept: RawFd) {
    // SAFETY: the calls take plain numbers.
    unsafe {
        let close = |first: RawFd, last: libc::c_uint| {
            first as libc::c_uint > last || libc::syscall(libc::SYS_close_range, first, last, 0) == 0
        };
        if (kept == 0 || close(0, kept as libc::c_uint - 1)) && close(kept + 1, libc::c_uint::MAX) {
            return;
        }
        let mut most: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut most);
        for fd in (0..most.rlim_cur.min(1 << 20) as RawFd).filter(|&fd| fd != kept) {
            libc::close(fd);
        }
    }
}

/// Kills the existing children, as far as the system lists them; returns whether it does.
unsafe fn end_children() -> bool {
    // SAFETY: the path ends with a zero, and the length is that of the buffer.
    unsafe {
        let file = libc::open(c"/proc/thread-self/children".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return false;
        }
        let mut text = [0u8; 4096];
        let n = libc::read(file, text.as_mut_ptr().cast(), text.len()).max(0) as usize;
        libc::close(file);
        // A truncated number has no blank behind it, and is read the next time.
        let mut id: libc::pid_t = 0;
        for &c in &text[..n] {
            if c.is_ascii_digit() {
                id = id.wrapping_mul(10).wrapping_add(libc::pid_t::from(c - b'0'));
            } else if id > 1 {
                libc::kill(id, libc::SIGKILL);
                id = 0;
            }
        }
        true
    }
}
