//! Model of one core, by which templates rank configurations: multiply-adds, loads, caches.
//!
//! It is rough, and only has to put better configurations before worse ones. What a core does in a cycle is
//! the target's; caches are as fast as those of current x86-64 cores.

use super::TemplateSetting;
use tilewright_ir::Target;

/// Cycles of a step of a reduction on a register tile of `vectors` × `broadcast` accumulators, each of which
/// is used again once its last result is ready.
pub fn step_cycles(s: &TemplateSetting, vectors: i64, broadcast: i64) -> f64 {
    let core = s.target.core();
    let (sums, operands) = ((vectors * broadcast) as f64, (vectors + broadcast) as f64);
    let (compute, loads) = (sums / core.fmas, operands / core.loads);
    let both = if core.overlaps { compute.max(loads) } else { compute + loads };
    both.max((sums + operands) / core.issues).max(core.sum_latency)
}

/// Multiply-adds that take as long as a dot product of four 8-bit integers: without an instruction for it,
/// pairs of even and of odd ones are multiplied, which are longer integers first.
pub fn cost_of_dot4(s: &TemplateSetting) -> f64 {
    if s.target.widens_bytes() { 2.5 } else { 1.0 }
}

/// Numbers and sizes of the tiles that cover an extent: the full ones, and the remainder.
pub fn cuts(extent: i64, tile: i64) -> [(f64, i64); 2] {
    [((extent / tile) as f64, tile), (f64::from(u8::from(extent % tile > 0)), extent % tile)]
}

/// Bytes a cycle from the smallest cache that holds `bytes` bytes; from main memory where none does.
pub fn bandwidth(s: &TemplateSetting, bytes: f64) -> f64 {
    let Target { l1d_bytes, l2_bytes, l3_bytes, .. } = s.target;
    // Caches hold other things too.
    let levels = [(l1d_bytes as f64 * 0.6, 64.0), (l2_bytes as f64 * 0.7, 28.0), (l3_bytes as f64 * 0.7, 20.0)];
    levels.into_iter().find(|(size, _)| bytes <= *size).map_or(8.0, |(_, rate)| rate)
}

/// Cycles for writing `bytes` bytes of results to memory. Lines that no cache of this core holds are read
/// before they are written, and written back.
pub fn write_back(s: &TemplateSetting, bytes: f64) -> f64 {
    if bytes > 0.5 * s.target.l2_bytes as f64 { 2.0 * bytes / bandwidth(s, bytes) } else { 0.0 }
}
