//! `doctor`: what was found on this machine.

use serde_json::{Map, Value as Json, json};
use tilewright_device::limits::Allowed;
use tilewright_device::{host, peak};
use tilewright_ir::DType;

use super::count;
use crate::output::{digits, grouped, write_result};
use tilewright::version::BUILD;

/// Shows the CPU, its measured peak, LLVM and the peer libraries.
///
/// # Errors
/// Where standard output fails. What cannot be found is reported, not an error.
pub fn run(as_json: bool) -> anyhow::Result<()> {
    let target = host::target();
    let (n_cpus, threads, allowed) = (host::allowed_cpus().len(), host::most_threads(), Allowed::here());
    let peak_of = |n_threads| peak::gflops(&target, DType::F32, n_threads);
    let (peak_one, peak_all) = (peak_of(1), peak_of(threads));
    let memory_bytes = host::memory_bytes();
    let llvm = tilewright_codegen::llvm_version();
    let without_llvm = "none: built without it, so with code for x86-64 with AVX2 or AVX-512 only";
    let peers = tilewright_peers::versions();
    let package = |library: &str| tilewright_peers::PEERS.iter().find(|p| p.library == library).and_then(|p| p.package);

    let size = |bytes: u64| match bytes >> 10 {
        kib @ 0..1024 => format!("{kib} KiB"),
        kib @ 1024..1_048_576 if kib % 1024 == 0 => format!("{} MiB", kib >> 10),
        kib @ 1024..1_048_576 => format!("{:.2} MiB", kib as f64 / 1024.0),
        kib => format!("{:.1} GiB", kib as f64 / 1_048_576.0),
    };
    let shown = |peak: &Result<f64, _>| match peak {
        Ok(gflops) => format!("{} GFLOP/s f32", digits(*gflops)),
        Err(error) => format!("not measured: {error}"),
    };
    let mut text = format!(
        "CPU      {} ({}), {} usable{}\n\
         vectors  {} bits, {} registers{}\n\
         caches   L1d {}, L2 {}, L3 {}\n\
         peak     1 thread: {}{}\n\
         memory   {}\n\
         limits   {}\n\
         LLVM     {}\n",
        host::cpu_name(),
        target.name(),
        count(n_cpus as u64, "CPU"),
        allowed.cpus.map_or(String::new(), |cpus| format!(", for the time of {cpus:.2} together (quota)")),
        target.vector_bits,
        target.n_vector_registers,
        if target.has_fma { ", fused multiply-add" } else { "" },
        size(target.l1d_bytes),
        size(target.l2_bytes),
        size(target.l3_bytes),
        shown(&peak_one),
        if threads > 1 { format!("; {threads} threads: {}", shown(&peak_all)) } else { String::new() },
        memory_bytes.map_or("unknown".to_owned(), size),
        limits_text(&allowed, &size),
        llvm.as_deref().unwrap_or(without_llvm),
    );
    for (library, version) in &peers {
        let found = match (version, package(library)) {
            (Some(version), _) => version.clone(),
            (None, Some(package)) => format!("not found; Debian and Ubuntu: apt install {package}"),
            (None, None) => "not found".to_owned(),
        };
        text += &format!("peer     {library}: {found}\n");
    }
    text += "devices  none besides the CPU\n";

    let peers: Map<String, Json> = peers.into_iter().map(|(library, v)| (library.to_owned(), json!(v))).collect();
    let json = json!({
        "cpu": host::cpu_name(),
        "target": target.name(),
        "vector_bits": target.vector_bits,
        "vector_registers": target.n_vector_registers,
        "fma": target.has_fma,
        "threads": threads,
        "cpus": n_cpus,
        "limits": allowed,
        "cache_bytes": {"l1d": target.l1d_bytes, "l2": target.l2_bytes, "l3": target.l3_bytes},
        "memory_bytes": memory_bytes,
        "llvm": llvm,
        "peak_gflops": {"1": peak_one.ok(), threads.to_string(): peak_all.ok()},
        "peers": peers,
        "devices": [],
        "version": BUILD,
    });
    write_result(as_json, &json, &text)
}

/// What the system allows, where it does not allow everything.
fn limits_text(allowed: &Allowed, size: &dyn Fn(u64) -> String) -> String {
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
