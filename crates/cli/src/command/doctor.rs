//! `doctor`: what was found on this machine.

use serde_json::{Map, Value as Json, json};
use tilewright_device::{host, peak};
use tilewright_ir::DType;

use super::count;
use crate::output::{digits, write_result};
use crate::peer;

/// Shows the CPU, its measured peak, LLVM and the peer libraries.
///
/// # Errors
/// Where standard output fails. What cannot be found is reported, not an error.
pub fn run(as_json: bool) -> anyhow::Result<()> {
    let target = host::target();
    let threads = host::allowed_cpus().len();
    let peak_of = |n_threads| peak::gflops(&target, DType::F32, n_threads);
    let (peak_one, peak_all) = (peak_of(1), peak_of(threads.max(1)));
    let memory_bytes = host::memory_bytes();
    let llvm = tilewright_codegen::llvm_version();
    let peers = peer::versions();
    let package = |library: &str| peer::PEERS.iter().find(|p| p.library == library).and_then(|p| p.package);

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
        "CPU      {} ({target}), {} usable\n\
         vectors  {} bits, {} registers{}\n\
         caches   L1d {}, L2 {}, L3 {}\n\
         peak     1 thread: {}; {}: {}\n\
         memory   {}\n\
         LLVM     {llvm}\n",
        host::cpu_name(),
        count(threads as u64, "CPU"),
        target.vector_bits,
        target.n_vector_registers,
        if target.has_fma { ", fused multiply-add" } else { "" },
        size(target.l1d_bytes),
        size(target.l2_bytes),
        size(target.l3_bytes),
        shown(&peak_one),
        count(threads as u64, "thread"),
        shown(&peak_all),
        memory_bytes.map_or("unknown".to_owned(), size),
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
        "target": target.to_string(),
        "vector_bits": target.vector_bits,
        "vector_registers": target.n_vector_registers,
        "fma": target.has_fma,
        "threads": threads,
        "cache_bytes": {"l1d": target.l1d_bytes, "l2": target.l2_bytes, "l3": target.l3_bytes},
        "memory_bytes": memory_bytes,
        "llvm": llvm,
        "peak_gflops": {"1": peak_one.ok(), threads.to_string(): peak_all.ok()},
        "peers": peers,
        "devices": [],
        "version": env!("CARGO_PKG_VERSION"),
    });
    write_result(as_json, &json, &text)
}
