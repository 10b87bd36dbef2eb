//! Analytical performance model of a CPU core, by which templates rank configurations: multiply-adds, loads,
//! caches.
//!
//! The model is rough, and only has to rank better configurations before worse ones. Instruction throughput
//! is the target's; cache bandwidths are those of current x86-64 cores.

use super::TemplateSetting;
use tilewright_ir::Target;

/// Cycles of a reduction step on a register tile of `vectors` × `broadcast` accumulators: bound by throughput
/// or by the latency of accumulation.
pub fn step_cycles(s: &TemplateSetting, vectors: i64, broadcast: i64) -> f64 {
    let core = s.target.core();
    let (sums, operands) = ((vectors * broadcast) as f64, (vectors + broadcast) as f64);
    let (compute, loads) = (sums / core.fmas, operands / core.loads);
    let both = if core.overlaps { compute.max(loads) } else { compute + loads };
    both.max((sums + operands) / core.issues).max(core.sum_latency)
}

/// Cost of a dot product of four 8-bit integers, in multiply-adds. Without such an instruction, integers are
/// widened and multiplied in pairs; with weights of 7 bits there is no widening.
pub fn cost_of_dot4(s: &TemplateSetting) -> f64 {
    match s.target.widens_bytes() {
        true if s.widens_bytes() => 2.5,
        true => 2.0,
        false => 1.0,
    }
}

/// Tiles that cover an extent: number and size of the full ones, and of the remainder.
pub fn cuts(extent: i64, tile: i64) -> [(f64, i64); 2] {
    [((extent / tile) as f64, tile), (f64::from(u8::from(extent % tile > 0)), extent % tile)]
}

/// Xeons whose cores read their third cache and main memory through a mesh, by their LLVM names.
const MESHED: [&str; 7] = [
    "skylake-avx512",
    "cascadelake",
    "cooperlake",
    "icelake-server",
    "sapphirerapids",
    "emeraldrapids",
    "graniterapids",
];

/// Whether cores read their third cache and main memory through a mesh.
pub fn is_meshed(s: &TemplateSetting) -> bool {
    MESHED.contains(&&*s.target.cpu)
}

/// Bandwidths in bytes per cycle of the third cache and of main memory, for one core: those of a Zen 5, and
/// through a mesh those of an Emerald Rapids.
pub fn far_rates(s: &TemplateSetting) -> [f64; 2] {
    if is_meshed(s) { [8.0, 4.0] } else { [20.0, 8.0] }
}

/// Bytes that the second cache holds beside other things.
pub fn near_bytes(s: &TemplateSetting) -> f64 {
    s.target.l2_bytes as f64 * 0.7
}

/// Bandwidth in bytes per cycle of the smallest cache that holds `bytes` bytes, or of main memory.
pub fn bandwidth(s: &TemplateSetting, bytes: f64) -> f64 {
    let Target { l1d_bytes, l3_bytes, .. } = s.target;
    let [l3, memory] = far_rates(s);
    // Caches hold other things too.
    let levels = [(l1d_bytes as f64 * 0.6, 64.0), (near_bytes(s), 28.0), (l3_bytes as f64 * 0.7, l3)];
    levels.into_iter().find(|(size, _)| bytes <= *size).map_or(memory, |(_, rate)| rate)
}

/// Cycles for writing `bytes` bytes of results. Cache lines that no cache of this core holds are read before
/// they are written, and written back.
pub fn write_back(s: &TemplateSetting, bytes: f64) -> f64 {
    if bytes > 0.5 * s.target.l2_bytes as f64 { 2.0 * bytes / bandwidth(s, bytes) } else { 0.0 }
}
