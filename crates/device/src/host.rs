//! Facts about this machine: its CPU as a target, its caches, and the CPUs that this process may use.

use crate::limits::Allowed;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;
use tilewright_ir::Target;
use tilewright_ir::target::Arch;
pub use tilewright_runtime::{pin, pin_thread};
use tilewright_search::Conditions;

/// Target of this machine's CPU.
///
/// Cache sizes are those of the operating system, read once, or typical ones if it does not report them.
pub fn target() -> Target {
    static TARGET: LazyLock<Target> = LazyLock::new(found);
    TARGET.clone()
}

/// Detects the CPU of this machine.
fn found() -> Target {
    let (generic, arch) = generic();
    let mut target = Target::named(generic).expect("every generic name is known");
    target.arch = arch;
    // A build without LLVM knows only the names of some CPUs.
    if let Some((cpu, features)) = tilewright_codegen::host_cpu() {
        target.cpu = cpu;
        target.features = features;
    }
    for (level, size) in data_caches() {
        match level {
            1 => target.l1d_bytes = size,
            2 => target.l2_bytes = size,
            3 => target.l3_bytes = size,
            _ => {}
        }
    }
    target
}

#[cfg(target_arch = "x86_64")]
fn generic() -> (&'static str, Arch) {
    let name = if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
        "x86-64-v4"
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        "x86-64-v3"
    } else {
        "x86-64"
    };
    (name, Arch::X86_64)
}

#[cfg(target_arch = "aarch64")]
fn generic() -> (&'static str, Arch) {
    ("aarch64", Arch::Aarch64)
}

/// Marketing name of the CPU.
pub fn cpu_name() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = |key: &str| {
        info.lines().find(|l| l.starts_with(key)).and_then(|l| l.split_once(':')).map(|(_, v)| v.trim().to_owned())
    };
    named("model name").or_else(|| named("Model")).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// `(level, bytes)` of the data and unified caches of the first CPU.
fn data_caches() -> Vec<(u32, u64)> {
    let folder = Path::new("/sys/devices/system/cpu/cpu0/cache");
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let read =
        |folder: &Path, name: &str| fs::read_to_string(folder.join(name)).ok().map(|text| text.trim().to_owned());
    let mut caches = Vec::new();
    for entry in entries.flatten() {
        let at = entry.path();
        if read(&at, "type").is_none_or(|t| t == "Instruction") {
            continue;
        }
        let level = read(&at, "level").and_then(|l| l.parse().ok());
        let size = read(&at, "size").and_then(|s| s.strip_suffix('K')?.parse::<u64>().ok());
        if let (Some(level), Some(kib)) = (level, size) {
            caches.push((level, kib << 10));
        }
    }
    caches
}

/// Drops the system's file cache, after flushing it.
///
/// # Errors
/// If the system does not permit it to this process; most processes lack the privilege.
pub fn drop_file_cache() -> std::io::Result<()> {
    let path = c"/proc/sys/vm/drop_caches";
    // SAFETY: the path ends with a zero, the byte exists, and the descriptor belongs to this function.
    unsafe {
        let file = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file < 0 {
            return Err(std::io::Error::last_os_error());
        }
        libc::sync();
        let n_written = libc::write(file, c"1".as_ptr().cast(), 1);
        let result = if n_written == 1 { Ok(()) } else { Err(std::io::Error::last_os_error()) };
        libc::close(file);
        result
    }
}

/// Memory that this process may use, in bytes: the physical memory, or a lower limit of its control groups;
/// `None` if unknown.
pub fn memory_bytes() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|l| l.starts_with("MemTotal:"))?;
    let physical = line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10;
    Allowed::here().memory_bytes.into_iter().chain([physical]).min()
}

/// Conditions of a CPU measurement, as far as the kernel reports them: the CPU's frequency, and the
/// temperature of the warmest thermal zone.
pub fn conditions(cpu: usize) -> Conditions {
    conditions_in(Path::new("/"), cpu)
}

/// Reads the conditions from the files below `root`.
fn conditions_in(root: &Path, cpu: usize) -> Conditions {
    let number = |path: &Path| fs::read_to_string(path).ok()?.trim().parse::<f64>().ok();
    let khz = number(&root.join(format!("sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq")));
    let of_line = |line: &str| line.strip_prefix("cpu MHz")?.split(':').nth(1)?.trim().parse().ok();
    let listed = || {
        let info = fs::read_to_string(root.join("proc/cpuinfo")).ok()?;
        let all: Vec<f64> = info.lines().filter_map(of_line).collect();
        all.get(cpu).or(all.first()).copied()
    };
    let zones = fs::read_dir(root.join("sys/class/thermal")).into_iter().flatten().flatten();
    let zones = zones.filter(|zone| zone.file_name().to_string_lossy().starts_with("thermal_zone"));
    // A zone whose sensor is off reports nonsense: nothing here is colder than space, or as hot as a flame.
    let plausible = |milli: &f64| (-273_000.0..1_000_000.0).contains(milli);
    let warmest = zones.filter_map(|zone| number(&zone.path().join("temp")).filter(plausible)).reduce(f64::max);
    Conditions {
        device: None,
        frequency_mhz: khz.map(|khz| khz / 1e3).or_else(listed),
        temperature_c: warmest.map(|milli| milli / 1e3),
    }
}

/// Number of threads that can run at the same time: the CPUs that this process may use, or fewer by a control
/// group's quota; at least one.
pub fn most_threads() -> usize {
    let cpus = allowed_cpus().len().max(1);
    Allowed::here().cpus.map_or(cpus, |quota| cpus.min(quota as usize)).max(1)
}

/// CPUs that this thread may run on.
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: the set is plain data, and its size is passed with it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) != 0 {
            return Vec::new();
        }
        (0..libc::CPU_SETSIZE as usize).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

/// Runs `work` pinned to a CPU, if one is given, and restores the calling thread's affinity.
pub fn pinned<R>(cpu: Option<usize>, work: impl FnOnce() -> R) -> R {
    let Some(cpu) = cpu else { return work() };
    let before = allowed_cpus();
    pin_thread(&[cpu]);
    let result = work();
    pin_thread(&before);
    result
}

/// CPUs for measuring work of `threads` threads: the last of those that this process may use. No two share a
/// core as long as enough cores are left; the first CPU, which gets most interrupts, is taken last. On hybrid
/// CPUs, slow cores are left out as long as there are enough fast ones. Empty if affinity cannot be set.
pub fn pin_cpus(threads: usize) -> Vec<usize> {
    let allowed = allowed_cpus();
    choose_cpus(&fastest_cpus(&allowed, threads, speed), threads, siblings)
}

/// Ratio of the speeds of cores above which they are of the same kind.
const ONE_KIND: f64 = 0.85;

/// Speed of a CPU relative to others of this machine, if the kernel reports it: its capacity, or its highest
/// frequency.
fn speed(cpu: usize) -> Option<f64> {
    let of = |name: &str| {
        let text = fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/{name}")).ok()?;
        text.trim().parse::<f64>().ok().filter(|speed| *speed > 0.0)
    };
    of("cpu_capacity").or_else(|| of("cpufreq/cpuinfo_max_freq"))
}

/// CPUs of the fastest kind, if they are enough for the threads; otherwise all.
fn fastest_cpus(allowed: &[usize], threads: usize, speed: impl Fn(usize) -> Option<f64>) -> Vec<usize> {
    let speeds: Option<Vec<f64>> = allowed.iter().map(|&cpu| speed(cpu)).collect();
    let speeds = speeds.unwrap_or_default();
    let most = speeds.iter().copied().fold(0.0, f64::max);
    let fast = allowed.iter().zip(&speeds).filter(|(_, speed)| **speed >= ONE_KIND * most).map(|(&cpu, _)| cpu);
    let fast: Vec<usize> = fast.collect();
    if fast.len() >= threads.max(1) { fast } else { allowed.to_vec() }
}

/// CPUs of a list on which work disturbs the `timed` ones least: those on other cores, if any.
pub fn cpus_beside(all: &[usize], timed: &[usize]) -> Vec<usize> {
    apart(all, timed, siblings)
}

fn apart(all: &[usize], timed: &[usize], siblings: impl Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let others: Vec<usize> = all.iter().copied().filter(|cpu| !timed.contains(cpu)).collect();
    let is_on_another_core = |cpu: &usize| !siblings(*cpu).iter().any(|sibling| timed.contains(sibling));
    let on_others: Vec<usize> = others.iter().copied().filter(is_on_another_core).collect();
    if on_others.is_empty() { others } else { on_others }
}

/// CPUs that share a core with `cpu`, itself included, as the kernel lists them ("0,64" or "2-3").
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
    fn a_machine_says_how_warm_it_is_and_how_fast() {
        let root = crate::folder::Folder::new("tilewright-host").unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(conditions_in(root.path(), 0), Conditions::default());
        write("proc/cpuinfo", "cpu MHz\t\t: 2100.5\ncpu MHz\t\t: 3000\n");
        write("sys/class/thermal/thermal_zone0/temp", "48300\n");
        write("sys/class/thermal/thermal_zone1/temp", "61500\n");
        write("sys/class/thermal/thermal_zone2/temp", "-274000\n");
        write("sys/class/thermal/cooling_device0/temp", "99000\n");
        let of = |frequency_mhz| Conditions { device: None, frequency_mhz, temperature_c: Some(61.5) };
        assert_eq!(conditions_in(root.path(), 1), of(Some(3000.0)));
        assert_eq!(conditions_in(root.path(), 7), of(Some(2100.5)));
        write("sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq", "1800000\n");
        assert_eq!(conditions_in(root.path(), 1), of(Some(1800.0)));
    }

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
    fn slow_cores_are_left_out_where_fast_ones_suffice() {
        // Two fast cores with two threads each, slightly different, and four slow ones.
        let speed = |cpu: usize| Some([5.1e6, 5.1e6, 5.2e6, 5.2e6, 4.1e6, 4.1e6, 4.1e6, 4.1e6][cpu]);
        let all: Vec<usize> = (0..8).collect();
        assert_eq!(fastest_cpus(&all, 1, speed), [0, 1, 2, 3]);
        assert_eq!(fastest_cpus(&all, 4, speed), [0, 1, 2, 3]);
        assert_eq!(fastest_cpus(&all, 5, speed), all);
        assert_eq!(fastest_cpus(&all, 1, |_| None), all);
    }

    #[test]
    fn others_work_on_cores_that_are_not_timed() {
        let two_threads_a_core = |cpu: usize| vec![cpu & !1, cpu | 1];
        assert_eq!(apart(&[0, 1, 2, 3], &[3], two_threads_a_core), [0, 1]);
        assert_eq!(apart(&[0, 1, 2, 3], &[1, 3], two_threads_a_core), [0, 2]);
        assert_eq!(apart(&[0, 1], &[1], |_| vec![]), [0]);
    }

    #[test]
    fn cpu_lists_parse() {
        assert_eq!(parse_cpu_list("0,64\n"), [0, 64]);
        assert_eq!(parse_cpu_list("2-4,7\n"), [2, 3, 4, 7]);
        assert_eq!(parse_cpu_list(""), [] as [usize; 0]);
    }
}
