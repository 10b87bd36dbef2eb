//! Test support: threads to which the system denies a call, as in a strict container.

use std::io;

/// System calls that can be denied.
#[derive(Clone, Copy)]
pub enum SystemCall {
    /// `memfd_create`.
    MemoryFile,
    /// `mprotect` with the right to execute.
    ExecutableMemory,
}

/// Runs `work` on a thread to which a system call is denied; `None` if the system has no such filters.
pub fn without<R: Send>(call: SystemCall, work: impl FnOnce() -> R + Send) -> Option<R> {
    std::thread::scope(|scope| scope.spawn(|| deny(call).ok().map(|()| work())).join().expect("no panic"))
}

fn deny(call: SystemCall) -> io::Result<()> {
    let instruction = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = |offset: usize| instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset as u32);
    let unless = |test: u32, k: u32, n| instruction(libc::BPF_JMP | test | libc::BPF_K, 0, n, k);
    let end = |k: u32| instruction(libc::BPF_RET | libc::BPF_K, 0, 0, k);
    let refuse = end(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
    let number = |number: libc::c_long| unless(libc::BPF_JEQ, number as u32, 0);
    let protection = std::mem::offset_of!(libc::seccomp_data, args) + 2 * size_of::<u64>();
    let mut program = vec![load(std::mem::offset_of!(libc::seccomp_data, nr))];
    program.extend(match call {
        SystemCall::MemoryFile => vec![libc::sock_filter { jf: 1, ..number(libc::SYS_memfd_create) }],
        SystemCall::ExecutableMemory => vec![
            libc::sock_filter { jf: 3, ..number(libc::SYS_mprotect) },
            load(protection),
            unless(libc::BPF_JSET, libc::PROT_EXEC as u32, 1),
        ],
    });
    program.extend([refuse, end(libc::SECCOMP_RET_ALLOW)]);
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the call that reads it; both calls concern this thread alone.
    let is_set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    };
    if is_set { Ok(()) } else { Err(io::Error::last_os_error()) }
}
