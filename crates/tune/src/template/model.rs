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

/// Bandwidth of the third cache in bytes per cycle.
pub const L3_RATE: f64 = 20.0;
/// Bandwidth of main memory in bytes per cycle.
pub const MEMORY_RATE: f64 = 8.0;

/// Bandwidth in bytes per cycle of the smallest cache that holds `bytes` bytes, or of main memory.
pub fn bandwidth(s: &TemplateSetting, bytes: f64) -> f64 {
    let Target { l1d_bytes, l2_bytes, l3_bytes, .. } = s.target;
    // Caches hold other things too.
    let levels = [(l1d_bytes as f64 * 0.6, 64.0), (l2_bytes as f64 * 0.7, 28.0), (l3_bytes as f64 * 0.7, L3_RATE)];
    levels.into_iter().find(|(size, _)| bytes <= *size).map_or(MEMORY_RATE, |(_, rate)| rate)
}

/// Cycles for writing `bytes` bytes of results. Cache lines that no cache of this core holds are read before
/// they are written, and written back.
pub fn write_back(s: &TemplateSetting, bytes: f64) -> f64 {
    if bytes > 0.5 * s.target.l2_bytes as f64 { 2.0 * bytes / bandwidth(s, bytes) } else { 0.0 }
}
