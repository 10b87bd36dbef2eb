//! Sandbox of processes that run candidates: they compute on memory that they have, and reply on their
//! standard output.
//!
//! Landlock prevents writing files, executing programs, connecting and sending signals; system call filters
//! do the same for the whole process and forbid the rest. If the system has only one of them, or none,
//! candidates run with what is available. Both are permanent.
//!
//! # Source
//! <https://docs.kernel.org/userspace-api/landlock.html>, seccomp(2). The calls were found by running all of
//! this program's tests and C kernels with OpenMP, with glibc 2.36.

use std::collections::BTreeMap;
use std::error::Error;

use landlock::{
    ABI, Access, AccessFs, AccessNet, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr, Scope,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads,
};

/// Environment variable that turns the sandbox off when it is `off`.
const VARIABLE: &str = "TILEWRIGHT_SANDBOX";
/// Request by which a library asks whether a descriptor is a terminal.
const IS_TERMINAL: u64 = 0x5401;
/// Latest version of Landlock whose features are used, if available.
const LATEST: ABI = ABI::V6;

/// System calls that a process may make once it has everything that it needs.
const ALLOWED: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_clone3,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_fallocate,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_gettid,
    libc::SYS_gettimeofday,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mincore,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_sysinfo,
    libc::SYS_times,
    libc::SYS_uname,
    libc::SYS_write,
    libc::SYS_writev,
    // Permission to use AMX tiles.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
];

/// Calls by which a shared object is loaded.
const OF_LOADING: &[libc::c_long] = &[
    libc::SYS_faccessat,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_openat,
    libc::SYS_readlinkat,
    libc::SYS_statx,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
];

/// System calls that no legitimate candidate makes: they kill the process.
const HOSTILE: &[libc::c_long] = &[
    libc::SYS_bind,
    libc::SYS_bpf,
    libc::SYS_connect,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_io_uring_setup,
    libc::SYS_kill,
    libc::SYS_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_renameat,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_setns,
    libc::SYS_socket,
    libc::SYS_tkill,
    libc::SYS_unlinkat,
    libc::SYS_unshare,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
];

/// Calls that open files.
const OPENING: &[libc::c_long] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_creat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
];

/// Strictness of the system call filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strictness {
    /// Filter for generated code: forbidden calls fail.
    Own,
    /// Filter for users' code before it is loaded: dangerous calls kill the process.
    Loading,
    /// Filter for users' code once loaded: opening files is forbidden, too.
    Loaded,
}

/// Whether processes are sandboxed, if the system can.
fn is_wanted() -> bool {
    std::env::var_os(VARIABLE).is_none_or(|value| value != "off")
}

/// Names of this machine's sandboxing mechanisms.
pub fn name() -> &'static str {
    let has_landlock = std::fs::read_to_string("/sys/kernel/security/lsm").is_ok_and(|all| all.contains("landlock"));
    match (is_wanted(), has_landlock, std::path::Path::new("/proc/sys/kernel/seccomp").exists()) {
        (true, true, true) => "Landlock and seccomp",
        (true, false, true) => "seccomp",
        (true, true, false) => "Landlock",
        _ => "none",
    }
}

/// Forbids this thread, and those that it starts, to write files, execute programs, connect or send signals,
/// by Landlock.
///
/// # Errors
/// If the system refuses; without Landlock, nothing is done.
pub fn forbid_files() -> Result<(), Box<dyn Error>> {
    if !is_wanted() {
        return Ok(());
    }
    Ruleset::default()
        .handle_access(AccessFs::from_all(LATEST))?
        .handle_access(AccessNet::from_all(LATEST))?
        .scope(Scope::from_all(LATEST))?
        .create()?
        .add_rule(PathBeneath::new(PathFd::new("/")?, AccessFs::ReadFile | AccessFs::ReadDir))?
        .restrict_self()?;
    Ok(())
}

/// Forbids all threads of this process the system calls that they do not need, using seccomp filters.
///
/// # Errors
/// If the system has no such filters.
pub fn forbid_calls(strictness: Strictness) -> Result<(), Box<dyn Error>> {
    if !is_wanted() {
        return Ok(());
    }
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let apply = |rules: BTreeMap<i64, Vec<SeccompRule>>, others: SeccompAction, these: SeccompAction| {
        let program: BpfProgram = SeccompFilter::new(rules, others, these, arch)?.try_into()?;
        apply_filter_all_threads(&program).map_err(Box::<dyn Error>::from)
    };
    let always = |calls: &[libc::c_long]| calls.iter().map(|call| (*call, Vec::new())).collect::<BTreeMap<_, _>>();
    let own_id = u64::from(std::process::id());
    let rule = |at: u8, operator: SeccompCmpOp, value: u64| -> Result<SeccompRule, Box<dyn Error>> {
        Ok(SeccompRule::new(vec![SeccompCondition::new(at, SeccompCmpArgLen::Dword, operator, value)?])?)
    };
    let thread = libc::CLONE_THREAD as u64;
    if strictness != Strictness::Own {
        let mut hostile = always(HOSTILE);
        if strictness == Strictness::Loaded {
            hostile.extend(always(OPENING));
        }
        // Creation of another process, or a signal to one.
        hostile.insert(libc::SYS_clone, vec![rule(0, SeccompCmpOp::MaskedEq(thread), 0)?]);
        hostile.insert(libc::SYS_tgkill, vec![rule(0, SeccompCmpOp::Ne, own_id)?]);
        apply(hostile, SeccompAction::Allow, SeccompAction::KillProcess)?;
    }
    if strictness == Strictness::Loaded {
        return Ok(());
    }
    let mut allowed = always(ALLOWED);
    if strictness == Strictness::Loading {
        allowed.extend(always(OF_LOADING));
    }
    allowed.insert(libc::SYS_clone, vec![rule(0, SeccompCmpOp::MaskedEq(thread), thread)?]);
    allowed.insert(libc::SYS_tgkill, vec![rule(0, SeccompCmpOp::Eq, own_id)?]);
    allowed.insert(libc::SYS_prlimit64, vec![rule(0, SeccompCmpOp::Eq, 0)?]);
    allowed.insert(libc::SYS_ioctl, vec![rule(1, SeccompCmpOp::Eq, IS_TERMINAL)?]);
    // Names of threads and of memory, and further filters.
    let options = [libc::PR_SET_NAME, libc::PR_SET_VMA, libc::PR_SET_NO_NEW_PRIVS];
    let options = options.iter().map(|option| rule(0, SeccompCmpOp::Eq, *option as u64)).collect::<Result<_, _>>()?;
    allowed.insert(libc::SYS_prctl, options);
    allowed.insert(libc::SYS_seccomp, vec![rule(0, SeccompCmpOp::Eq, libc::SECCOMP_SET_MODE_FILTER.into())?]);
    apply(allowed, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)?;
    // The arguments of `clone3` are in memory, where no filter sees them: the C library then uses `clone`.
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    apply(always(&[libc::SYS_clone3]), SeccompAction::Allow, unknown)
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    /// Variable that tells a process to sandbox itself, and to report the result.
    const ROLE: &str = "TILEWRIGHT_TEST_SANDBOX";

    #[test]
    fn as_a_process() {
        if std::env::var_os(ROLE).is_none() {
            return;
        }
        let start = Instant::now();
        forbid_files().unwrap();
        let files = start.elapsed();
        forbid_calls(Strictness::Own).unwrap();
        let both = start.elapsed();
        assert!(std::fs::File::open("/etc/passwd").is_err(), "it is confined");
        println!("took {} {}", files.as_nanos(), both.as_nanos());
    }

    #[test]
    #[ignore = "takes times: for a quiet machine"]
    fn what_it_takes_a_process() {
        let took = || -> Option<[f64; 2]> {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "sandbox::tests::as_a_process", "--nocapture"]).env(ROLE, "1");
            let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
            let line = said.lines().find_map(|line| line.split_once("took ")).expect("it says what it took").1;
            let mut ms = line.split(' ').map(|ns| ns.parse::<f64>().unwrap() / 1e6);
            Some([ms.next()?, ms.next()?])
        };
        let all: Vec<[f64; 2]> = (0..31).filter_map(|_| took()).collect();
        let median = |at: usize| {
            let mut ms: Vec<f64> = all.iter().map(|took| took[at]).collect();
            ms.sort_by(f64::total_cmp);
            ms[ms.len() / 2]
        };
        println!("the sandbox takes {:.2} ms a process, {:.2} of them for Landlock", median(1), median(0));
    }
}
