//! Hardware and system facts of this machine.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Serialize, Serializer};
use tilewright_device::cuda::{self, PtxAssembler};
use tilewright_device::limits::Allowed;
use tilewright_device::opencl::{self, OpenClDevice};
use tilewright_device::{host, peak};
use tilewright_peers::PEERS;

use crate::format::{count, digits, grouped};
use crate::version::BUILD;

/// Hardware and system facts of this machine. Its JSON is the output of `tilewright doctor --json`, its text
/// that of `doctor`.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Marketing name of the CPU.
    pub cpu: String,
    /// Name as a target.
    pub target: String,
    /// Vector width in bits.
    pub vector_bits: u32,
    /// Number of vector registers.
    pub vector_registers: u32,
    /// Whether there is a fused multiply-add instruction.
    pub fma: bool,
    /// Number of threads that kernels may use.
    pub threads: usize,
    /// Number of CPUs that this process may use.
    pub cpus: usize,
    /// Resource limits of the process.
    pub limits: Allowed,
    /// Cache sizes in bytes: `l1d` and `l2` of a core, and `l3`.
    pub cache_bytes: BTreeMap<&'static str, u64>,
    /// Memory in bytes, if known.
    pub memory_bytes: Option<u64>,
    /// Version of LLVM, if this build has it.
    pub llvm: Option<String>,
    /// Measured f32 peak in GFLOP/s by number of threads, or the reason why it could not be measured.
    #[serde(rename = "peak_gflops", serialize_with = "by_threads")]
    pub peaks: Vec<(usize, Result<f64, String>)>,
    /// Measured peak of 8-bit integer dot products, in 10⁹ operations per second, by number of threads.
    #[serde(rename = "peak_gops_dot4", serialize_with = "by_threads")]
    pub dot4_peaks: Vec<(usize, Result<f64, String>)>,
    /// Measured peak of bf16 dot products in GFLOP/s by number of threads; empty without such instructions.
    #[serde(rename = "peak_gflops_dot2", serialize_with = "by_threads")]
    pub dot2_peaks: Vec<(usize, Result<f64, String>)>,
    /// Peer libraries with their versions; `None` for those not installed.
    #[serde(serialize_with = "by_name")]
    pub peers: Vec<(&'static str, Option<String>)>,
    /// Devices besides the CPU: the name for `--device`, and a description.
    pub devices: Vec<String>,
    /// Reasons why other devices are unavailable.
    pub missing_devices: Vec<String>,
    /// Version of this build.
    pub version: &'static str,
}

fn by_threads<S: Serializer>(peaks: &[(usize, Result<f64, String>)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(peaks.iter().map(|(threads, peak)| (threads.to_string(), peak.as_ref().ok())))
}

fn by_name<S: Serializer>(peers: &[(&'static str, Option<String>)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(peers.iter().map(|(name, version)| (name, version)))
}

impl Machine {
    /// Collects the facts of this machine, which includes measuring its peak.
    pub fn here() -> Machine {
        let (target, threads) = (host::target(), host::most_threads());
        let mut n_threads = vec![1, threads];
        n_threads.dedup();
        let (mut devices, mut missing_devices) = (Vec::new(), Vec::new());
        match opencl::devices() {
            Ok(found) => devices.extend(found.iter().enumerate().map(|(at, device)| device_line(at, device))),
            Err(why) => missing_devices.push(why.to_string()),
        }
        match cuda::devices() {
            Ok((version, found)) => devices.extend(found.iter().map(|device| cuda_line(&version, device))),
            Err(why) => missing_devices.push(why.to_string()),
        }
        let peaks_of = |kind: peak::PeakKind| {
            let peak_of = |n: &usize| (*n, peak::gflops(&target, kind, *n).map_err(|error| error.to_string()));
            n_threads.iter().map(peak_of).collect()
        };
        let caches = [("l1d", target.l1d_bytes), ("l2", target.l2_bytes), ("l3", target.l3_bytes)];
        Machine {
            cpu: host::cpu_name(),
            target: target.name(),
            vector_bits: target.vector_bits,
            vector_registers: target.n_vector_registers,
            fma: target.has_fma,
            threads,
            cpus: host::allowed_cpus().len(),
            limits: Allowed::here(),
            cache_bytes: caches.into(),
            memory_bytes: host::memory_bytes(),
            llvm: tilewright_codegen::llvm_version(),
            peaks: peaks_of(peak::PeakKind::F32),
            dot4_peaks: peaks_of(peak::PeakKind::Dot4),
            dot2_peaks: if target.dot2_lanes() > 0 { peaks_of(peak::PeakKind::Dot2) } else { Vec::new() },
            peers: tilewright_peers::versions(),
            devices,
            missing_devices,
            version: BUILD,
        }
    }
}

impl Machine {
    /// Number of threads that together are slower than a single thread, if this was measured.
    fn slow_threads(&self) -> Option<usize> {
        let measured = |(n, peak): &(usize, Result<f64, String>)| Some((*n, *peak.as_ref().ok()?));
        let mut measured = self.peaks.iter().filter_map(measured);
        let (_, alone) = measured.next().filter(|(n, _)| *n == 1)?;
        measured.find(|(_, together)| *together < alone).map(|(n, _)| n)
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cache = |name: &str| self.cache_bytes.get(name).copied().map_or(String::new(), size);
        let peak = |unit: &str, (n, peak): &(usize, Result<f64, String>)| match peak {
            Ok(gflops) => format!("{}: {} {unit}", count(*n as u64, "thread"), digits(*gflops)),
            Err(error) => format!("{}: not measured: {error}", count(*n as u64, "thread")),
        };
        let peaks = self.peaks.iter().map(|of| peak("GFLOP/s f32", of));
        let peaks = peaks.chain(self.dot4_peaks.iter().map(|of| peak("GOP/s int8 (dot4)", of)));
        let peaks = peaks.chain(self.dot2_peaks.iter().map(|of| peak("GFLOP/s bf16 (dot2)", of)));
        let quota = self.limits.cpus.map_or(String::new(), |n| format!(", for the time of {n:.2} together (quota)"));
        let cpus = count(self.cpus as u64, "CPU");
        writeln!(f, "CPU      {} ({}), {cpus} usable{quota}", self.cpu, self.target)?;
        let fma = if self.fma { ", fused multiply-add" } else { "" };
        writeln!(f, "vectors  {} bits, {} registers{fma}", self.vector_bits, self.vector_registers)?;
        writeln!(f, "caches   L1d {}, L2 {}, L3 {}", cache("l1d"), cache("l2"), cache("l3"))?;
        writeln!(f, "peak     {}", peaks.collect::<Vec<_>>().join("; "))?;
        if let Some(n) = self.slow_threads() {
            let threads = count(n as u64, "thread");
            let why = "other programs keep these CPUs busy, or a quota cuts their time";
            writeln!(f, "         {threads} came to less than one: {why}, and so are kernels with {threads} measured")?;
        }
        writeln!(f, "memory   {}", self.memory_bytes.map_or("unknown".to_owned(), size))?;
        writeln!(f, "limits   {}", limits_text(&self.limits))?;
        let without_llvm = "none: built without it, so with code for x86-64 with AVX2 or AVX-512 only";
        writeln!(f, "LLVM     {}", self.llvm.as_deref().unwrap_or(without_llvm))?;
        for (library, version) in &self.peers {
            let package = PEERS.iter().find(|peer| peer.library == *library).and_then(|peer| peer.package);
            let found = match (version, package) {
                (Some(version), _) => version.clone(),
                (None, Some(package)) => format!("not found; {package}"),
                (None, None) => "not found".to_owned(),
            };
            writeln!(f, "peer     {library}: {found}")?;
        }
        if !self.devices.is_empty() {
            let found = self.devices.iter().map(|device| format!("device   {device}"));
            let missing = self.missing_devices.iter().map(|why| format!("missing  {why}"));
            return f.write_str(&found.chain(missing).collect::<Vec<_>>().join("\n"));
        }
        write!(f, "devices  none besides the CPU: {}", self.missing_devices.join("; "))
    }
}

/// Formats a CUDA device and its number.
fn cuda_line(version: &str, device: &cuda::FoundDevice) -> String {
    let cuda::FoundDevice { number, name, target } = device;
    let assembler = match PtxAssembler::find(&target.cpu) {
        PtxAssembler::Driver => {
            format!("the driver (there is no ptxas that knows {}: a CUDA toolkit brings one)", target.cpu)
        }
        ptxas => ptxas.name(),
    };
    format!("cuda:{number}: {name} ({}), driver for CUDA {version}, machine code by {assembler}", target.cpu)
}

/// Formats an OpenCL device and its number.
fn device_line(number: usize, device: &OpenClDevice) -> String {
    let OpenClDevice { name, platform, target, .. } = device;
    let limits = target.gpu.map_or(String::new(), |gpu| {
        let (units, threads) = (count(u64::from(gpu.n_units), "unit"), grouped(gpu.most_threads));
        let f16 = if gpu.has_f16 { ", computes in f16" } else { "" };
        format!("{units}, blocks of {threads} threads with {} of shared memory{f16}", size(gpu.shared_bytes))
    });
    format!("opencl:{number}: {name} of {platform}: {limits}")
}

fn size(bytes: u64) -> String {
    match bytes >> 10 {
        kib @ 0..1024 => format!("{kib} KiB"),
        kib @ 1024..1_048_576 if kib % 1024 == 0 => format!("{} MiB", kib >> 10),
        kib @ 1024..1_048_576 => format!("{:.2} MiB", kib as f64 / 1024.0),
        kib => format!("{:.1} GiB", kib as f64 / 1_048_576.0),
    }
}

/// Describes the limits of the system, if there are any.
fn limits_text(allowed: &Allowed) -> String {
    let bytes = |limit: Option<u64>| limit.map(size);
    let number = |limit: Option<u64>| limit.map(grouped);
    let named = [
        ("memory of the control group", bytes(allowed.memory_bytes)),
        ("its processes and threads", number(allowed.tasks)),
        ("address space (ulimit -v)", bytes(allowed.address_space_bytes)),
        ("data (-d)", bytes(allowed.data_bytes)),
        ("CPU time (-t)", allowed.cpu_seconds.map(|n| format!("{n} s"))),
        ("a file (-f)", bytes(allowed.file_bytes)),
        ("stack (-s)", bytes(allowed.stack_bytes)),
        ("open files (-n)", number(allowed.open_files)),
        ("the user's processes and threads (-u)", number(allowed.user_tasks)),
    ];
    let given = named.into_iter().filter_map(|(name, limit)| Some(format!("{name} {}", limit?)));
    let text = given.collect::<Vec<_>>().join(", ");
    if text.is_empty() { "none".to_owned() } else { text }
}
