//! Resource limits of this process: of its control groups, and its own (`ulimit`).

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

use serde::Serialize;

/// Resource limits; `None` for unlimited or unknown.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Allowed {
    /// CPU quota of the control group, in CPUs.
    pub cpus: Option<f64>,
    /// Memory limit of the control group, in bytes.
    pub memory_bytes: Option<u64>,
    /// Limit of the control group on processes and threads.
    pub tasks: Option<u64>,
    /// Address space in bytes (`ulimit -v`).
    pub address_space_bytes: Option<u64>,
    /// Data segment in bytes (`ulimit -d`).
    pub data_bytes: Option<u64>,
    /// Stack in bytes (`ulimit -s`).
    pub stack_bytes: Option<u64>,
    /// File size in bytes (`ulimit -f`).
    pub file_bytes: Option<u64>,
    /// Number of open files (`ulimit -n`).
    pub open_files: Option<u64>,
    /// Number of the user's processes and threads (`ulimit -u`).
    pub user_tasks: Option<u64>,
    /// CPU time in seconds (`ulimit -t`).
    pub cpu_seconds: Option<u64>,
}

impl Allowed {
    /// Warnings about limits that distort the times of `threads` threads, or end runs.
    pub fn warnings(&self, threads: usize) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(cpus) = self.cpus.filter(|&cpus| cpus < threads as f64) {
            let (s, fewer) = if threads > 1 { ("s", "give fewer --threads, or ") } else { ("", "") };
            warnings.push(format!(
                "a quota leaves this process the time of {cpus:.2} CPUs, too little for {threads} thread{s}: times \
                 will be the quota's, not the kernel's ({fewer}raise the quota)"
            ));
        }
        if let Some(seconds) = self.cpu_seconds {
            warnings.push(format!("a process ends after {seconds} s of CPU time (`ulimit -t`)"));
        }
        warnings
    }

    /// Limits of this process.
    pub fn here() -> Allowed {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let folders = folders(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
        let of = |folder: &ControlGroup, name: &str| fs::read_to_string(folder.path.join(name)).ok();
        let groups = Allowed::by_groups(&folders, &of);
        Allowed {
            address_space_bytes: limit(libc::RLIMIT_AS),
            data_bytes: limit(libc::RLIMIT_DATA),
            stack_bytes: limit(libc::RLIMIT_STACK),
            file_bytes: limit(libc::RLIMIT_FSIZE),
            open_files: limit(libc::RLIMIT_NOFILE),
            user_tasks: limit(libc::RLIMIT_NPROC),
            cpu_seconds: limit(libc::RLIMIT_CPU),
            ..groups
        }
    }

    /// Limits of nested control groups, the tightest one of each kind.
    fn by_groups(folders: &[ControlGroup], read: &dyn Fn(&ControlGroup, &str) -> Option<String>) -> Allowed {
        let mut all = Allowed::default();
        for folder in folders {
            let number = |name: &str| read(folder, name)?.trim().parse::<u64>().ok();
            // Without a limit, the file has a word in its place, or in version 1 the value −1 or nearly the
            // maximum.
            let (cpus, memory_bytes) = match folder.version {
                CgroupVersion::Two => {
                    let text = read(folder, "cpu.max").unwrap_or_default();
                    let mut words = text.split_whitespace().map(|word| word.parse::<f64>().ok());
                    (ratio(words.next().flatten(), words.next().flatten()), number("memory.max"))
                }
                CgroupVersion::One => {
                    let [quota, period] =
                        ["cpu.cfs_quota_us", "cpu.cfs_period_us"].map(|name| number(name).map(|us| us as f64));
                    let bytes = number("memory.limit_in_bytes").filter(|&bytes| bytes < UNLIMITED_BYTES);
                    (ratio(quota, period), bytes)
                }
            };
            all.cpus = all.cpus.into_iter().chain(cpus).reduce(f64::min);
            all.memory_bytes = all.memory_bytes.into_iter().chain(memory_bytes).min();
            all.tasks = all.tasks.into_iter().chain(number("pids.max")).min();
        }
        all
    }
}

/// Value above which a limit of version 1 of control groups means "no limit".
const UNLIMITED_BYTES: u64 = 1 << 60;

fn ratio(quota: Option<f64>, period: Option<f64>) -> Option<f64> {
    quota.zip(period).filter(|(quota, period)| *quota > 0.0 && *period > 0.0).map(|(quota, period)| quota / period)
}

/// Limit of this process on a resource, if any.
fn limit(resource: libc::__rlimit_resource_t) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes a structure of plain data.
    let is_known = unsafe { libc::getrlimit(resource, &raw mut limit) } == 0;
    Some(limit.rlim_cur).filter(|&most| is_known && most != libc::RLIM_INFINITY)
}

/// Size of this process's address space, in bytes.
pub fn address_space_bytes() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").ok();
    pages.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Prepares a process for exceeding limits: a write beyond the maximum file size becomes an error, and
/// signals for lack of CPU time or memory print a line and exit with code 1. Workers need only the former,
/// and inherit it.
pub fn meet() {
    extern "C" fn end(signal: libc::c_int) {
        let line: &[u8] = match signal {
            libc::SIGXCPU => b"error: this process had all its CPU time (raise `ulimit -t`)\n",
            _ => b"error: aborted, as memory ran out (raise `ulimit -v` or give smaller sizes; see `tilewright doctor`)\n",
        };
        // SAFETY: both calls are async-signal-safe.
        unsafe {
            libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
            libc::_exit(1);
        }
    }
    // SAFETY: the handler only makes async-signal-safe calls.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        for signal in [libc::SIGXCPU, libc::SIGABRT] {
            libc::signal(signal, end as extern "C" fn(libc::c_int) as libc::sighandler_t);
        }
    }
}

/// Installs handlers of signals, but keeps a hang-up ignored that this process was started to ignore, as by
/// `nohup`.
pub fn keeping_nohup<T>(install: impl FnOnce() -> T) -> T {
    // SAFETY: the structure is plain data, for which zeros are valid, and the call writes it.
    let former = unsafe {
        let mut former: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGHUP, ptr::null(), &raw mut former);
        former
    };
    let installed = install();
    if former.sa_sigaction == libc::SIG_IGN {
        // SAFETY: no handler is set.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    }
    installed
}

/// Version of control groups; a system may have both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CgroupVersion {
    One,
    Two,
}

/// Folder of a control group's files.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ControlGroup {
    version: CgroupVersion,
    path: PathBuf,
}

/// Folders of a process's control groups and of those around them, as far as they are visible from here, by
/// the process's list of groups (`/proc/self/cgroup`) and of mounts (`/proc/self/mountinfo`).
fn folders(groups: &str, mounts: &str) -> Vec<ControlGroup> {
    let mut folders = Vec::new();
    for mount in mounts.lines().filter_map(Mount::of) {
        let group = groups.lines().find_map(|line| {
            // "4:cpu,cpuacct:/user.slice", or "0::/user.slice" in the second version.
            let (_, rest) = line.split_once(':')?;
            let (controllers, group) = rest.split_once(':')?;
            let is_its = match mount.version {
                CgroupVersion::Two => controllers.is_empty(),
                CgroupVersion::One => {
                    !controllers.is_empty() && controllers.split(',').all(|c| mount.options.split(',').any(|o| o == c))
                }
            };
            is_its.then_some(group)
        });
        let Some(group) = group else { continue };
        // A container sees its own group, or a part of the tree around it, as the root; groups beyond it are
        // invisible.
        let below = Path::new(group).strip_prefix(&mount.root).ok();
        let below = below.filter(|below| below.components().all(|c| matches!(c, std::path::Component::Normal(_))));
        let own = below.map_or(mount.point.clone(), |below| mount.point.join(below));
        let around = own.ancestors().take_while(|path| path.starts_with(&mount.point));
        folders.extend(around.map(|path| ControlGroup { version: mount.version, path: path.to_owned() }));
    }
    folders
}

/// Mounted tree of control groups.
struct Mount<'a> {
    version: CgroupVersion,
    /// Part of the tree that is mounted.
    root: PathBuf,
    /// Mount point.
    point: PathBuf,
    /// Mount options, which name its controllers.
    options: &'a str,
}

impl Mount<'_> {
    /// Parses a line of the list of mounts; `None` if it is not one of control groups.
    fn of(line: &str) -> Option<Mount<'_>> {
        // "36 25 0:31 /root /point rw,relatime shared:7 - cgroup cgroup rw,cpu,cpuacct"
        let (place, source) = line.split_once(" - ")?;
        let (mut place, mut source) = (place.split(' ').skip(3), source.split(' '));
        let version = match source.next()? {
            "cgroup" => CgroupVersion::One,
            "cgroup2" => CgroupVersion::Two,
            _ => return None,
        };
        let (root, point) = (unescaped(place.next()?), unescaped(place.next()?));
        Some(Mount { version, root, point, options: source.nth(1)? })
    }
}

/// Decodes a path in which blanks and the like are written in octal: `\040`.
fn unescaped(text: &str) -> PathBuf {
    let (text, mut bytes, mut at) = (text.as_bytes(), Vec::new(), 0);
    while at < text.len() {
        let digits = text.get(at + 1..at + 4).filter(|_| text[at] == b'\\');
        let code = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(text[at]));
        at += if code.is_some() { 4 } else { 1 };
    }
    PathBuf::from(OsStr::from_bytes(&bytes))
}

/// Advice about an error of the system, in parentheses; empty if there is none.
pub fn advice(refusal: &io::Error) -> String {
    let what = match refusal.raw_os_error() {
        Some(libc::EFBIG) => "files may not be larger: raise `ulimit -f`",
        Some(libc::EMFILE | libc::ENFILE) => "too many files are open: raise `ulimit -n`",
        Some(libc::EAGAIN) => {
            "too many processes or threads, or no room for their stacks: raise `ulimit -u`, `ulimit -v` or pids.max of \
             the control group"
        }
        Some(libc::ENOMEM | libc::ENOSPC) => "memory ran out: give smaller sizes, or raise the limit; see `doctor`",
        _ => return String::new(),
    };
    format!(" ({what})")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the limits found with these groups, mounts and files.
    fn check(groups: &str, mounts: &str, files: &[(&str, &str)], expected: [Option<f64>; 3]) {
        let read = |folder: &ControlGroup, name: &str| {
            let path = folder.path.join(name);
            files.iter().find(|(file, _)| path == Path::new(file)).map(|(_, text)| (*text).to_owned())
        };
        let Allowed { cpus, memory_bytes, tasks, .. } = Allowed::by_groups(&folders(groups, mounts), &read);
        let found = [cpus, memory_bytes.map(|bytes| bytes as f64), tasks.map(|tasks| tasks as f64)];
        assert_eq!(found, expected, "{groups} {mounts}");
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
    const V1: &str = "\
        31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:10 - cgroup cgroup rw,memory\n\
        39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n\
        40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd";

    #[test]
    fn the_tightest_of_nested_groups_counts() {
        let groups = "0::/user.slice/job.scope\n";
        let files = [
            ("/sys/fs/cgroup/user.slice/job.scope/cpu.max", "max 100000\n"),
            ("/sys/fs/cgroup/user.slice/job.scope/memory.max", "629145600\n"),
            ("/sys/fs/cgroup/user.slice/job.scope/pids.max", "max\n"),
            ("/sys/fs/cgroup/user.slice/cpu.max", "150000 100000\n"),
            ("/sys/fs/cgroup/user.slice/memory.max", "1073741824\n"),
            ("/sys/fs/cgroup/user.slice/pids.max", "100\n"),
            ("/sys/fs/cgroup/other/cpu.max", "1000 100000\n"),
        ];
        check(groups, V2, &files, [Some(1.5), Some(629145600.0), Some(100.0)]);
        check("0::/\n", V2, &[("/sys/fs/cgroup/cpu.max", "50000 100000")], [Some(0.5), None, None]);
    }

    #[test]
    fn the_first_version_has_a_tree_for_each_controller() {
        let groups = "11:pids:/jobs\n4:memory:/jobs/7\n2:cpu,cpuacct:/jobs\n1:name=systemd:/init\n";
        let files = [
            ("/sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us", "100000\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "1000000\n"),
            ("/sys/fs/cgroup/pids/jobs/pids.max", "max"),
        ];
        check(groups, V1, &files, [Some(1.0), Some(1e6), None]);
        check("4:memory:/elsewhere\n", V1, &files, [None; 3]);
    }

    #[test]
    fn both_versions_may_be_there() {
        let mounts = format!("{V1}\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw");
        let files =
            [("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "3000000"), ("/sys/fs/cgroup/unified/b/pids.max", "7")];
        check("4:memory:/a\n0::/b\n", &mounts, &files, [None, Some(3e6), Some(7.0)]);
    }

    #[test]
    fn a_container_sees_its_group_as_the_root() {
        // Mounted by hand into the container, which sees where its group lies outside …
        let bound = "32 31 0:29 /docker/ab /sys/fs/cgroup rw - cgroup2 cgroup rw";
        let limit = [("/sys/fs/cgroup/memory.max", "5000"), ("/sys/fs/cgroup/sub/memory.max", "4000")];
        check("0::/docker/ab\n", bound, &limit, [None, Some(5e3), None]);
        check("0::/docker/ab/sub\n", bound, &limit, [None, Some(4e3), None]);
        // … with a name space of its own, from which it was moved out …
        check("0::/../other\n", V2, &limit, [None, Some(5e3), None]);
        // … or with a mount of another group.
        check("0::/\n", bound, &limit, [None, Some(5e3), None]);
    }

    #[test]
    fn odd_texts_allow_everything() {
        let odd = ["", "0::/", "nonsense\n\n::\n0:::\n", "4:cpu:/a:b"];
        for groups in odd {
            for mounts in ["", "a - b", "1 2 3 - cgroup2", "1 2 3:4 / /x rw - cgroup2 c", " - cgroup cgroup rw,cpu"] {
                check(groups, mounts, &[("/x/memory.max", "max"), ("/x/cpu.max", "0 0")], [None; 3]);
            }
        }
        let with_blank = "30 23 0:26 / /mnt/a\\040b rw - cgroup2 cgroup2 rw";
        check("0::/c d\n", with_blank, &[("/mnt/a b/c d/pids.max", "9\n")], [None, None, Some(9.0)]);
        let files = [("/sys/fs/cgroup/cpu.max", "100000"), ("/sys/fs/cgroup/memory.max", "many")];
        check("0::/\n", V2, &files, [None; 3]);
    }
}
