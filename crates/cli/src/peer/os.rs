//! What peers need of the operating system: stopping a process, pinning it, waiting for a pipe.
//!
//! Pinning works on Linux only; elsewhere it does nothing.

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

/// The CPUs on which work with `threads` threads is measured: the last of those this process may use.
///
/// No two share a core as long as there are cores left; the first CPU gets most interrupts, so it comes last.
/// Empty where CPUs cannot be chosen.
pub fn pin_cpus(threads: usize) -> Vec<usize> {
    choose_cpus(&allowed_cpus(), threads, siblings)
}

/// Restrict this process, with the threads it starts from now on, to `cpus`.
pub(super) fn pin(cpus: &[usize]) {
    #[cfg(target_os = "linux")]
    if !cpus.is_empty() {
        // SAFETY: a cpu_set_t of zeros is an empty set; CPU_SET checks the index; the size passed is its own.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            for &cpu in cpus {
                libc::CPU_SET(cpu, &mut set);
            }
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = cpus;
}

#[cfg(target_os = "linux")]
fn allowed_cpus() -> Vec<usize> {
    // SAFETY: a cpu_set_t of zeros is an empty set, filled within its own size; CPU_ISSET reads within it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

#[cfg(not(target_os = "linux"))]
fn allowed_cpus() -> Vec<usize> {
    Vec::new()
}

/// The CPUs that share a core with `cpu`, itself among them, as the kernel lists them ("0,64" or "2-3").
fn siblings(cpu: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    parse_cpu_list(&std::fs::read_to_string(path).unwrap_or_default())
}

fn parse_cpu_list(text: &str) -> Vec<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

fn choose_cpus(allowed: &[usize], threads: usize, siblings: impl Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::new();
    for &cpu in allowed.iter().rev() {
        if chosen.len() < threads && !siblings(cpu).iter().any(|sibling| chosen.contains(sibling)) {
            chosen.push(cpu);
        }
    }
    for &cpu in allowed.iter().rev() {
        if chosen.len() < threads && !chosen.contains(&cpu) {
            chosen.push(cpu);
        }
    }
    chosen.sort_unstable();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_the_last_and_on_different_cores() {
        let check = |allowed: &[usize], threads, siblings: fn(usize) -> Vec<usize>, expected: &[usize]| {
            assert_eq!(choose_cpus(allowed, threads, siblings), expected);
        };
        check(&[0, 1, 2, 3], 1, |_| vec![], &[3]);
        check(&[0, 1, 2, 3], 2, |cpu| vec![cpu & !1, cpu | 1], &[1, 3]);
        check(&[0, 1, 2, 3], 2, |cpu| vec![cpu % 2, cpu % 2 + 2], &[2, 3]);
        check(&[0, 1, 2, 3], 3, |cpu| vec![cpu & !1, cpu | 1], &[1, 2, 3]);
        check(&[5], 4, |_| vec![], &[5]);
    }

    #[test]
    fn cpu_lists_parse() {
        assert_eq!(parse_cpu_list("0,64\n"), [0, 64]);
        assert_eq!(parse_cpu_list("2-4,7\n"), [2, 3, 4, 7]);
        assert_eq!(parse_cpu_list(""), [] as [usize; 0]);
    }
}
