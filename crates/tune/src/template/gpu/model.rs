//! A rough model of a GPU, for templates to rank configurations by: how many blocks run at a time, what each
//! multiplies and reads, and how long it waits.

use tilewright_ir::target::Gpu;

/// Multiply-adds of 32 bits that a compute unit does in a cycle.
const FMAS: f64 = 128.0;
/// Bytes that a compute unit gets from the last-level cache in a cycle.
const BYTES: f64 = 20.0;
/// Cycles from asking for an element in memory to having it for all threads of a block.
const LATENCY: f64 = 700.0;
/// Cycles that a further kernel takes to begin.
pub const START: f64 = 3000.0;
/// Threads that a compute unit holds.
const THREADS: i64 = 2048;

/// What the blocks of a kernel are like.
pub struct Blocks {
    /// Their number.
    pub n: i64,
    /// Threads of each.
    pub threads: i64,
    /// 32-bit registers of a thread.
    pub registers: i64,
    /// Shared memory of each in bytes.
    pub shared_bytes: i64,
    /// Multiply-adds of each.
    pub fmas: f64,
    /// Share of a thread's instructions that are multiply-adds.
    pub efficiency: f64,
    /// Bytes that it reads and writes in the device's memory.
    pub bytes: f64,
    /// How often it waits for what it reads.
    pub waits: f64,
}

impl Blocks {
    /// Cycles until all of them are done.
    pub fn cycles(&self, gpu: &Gpu) -> f64 {
        let units = i64::from(gpu.n_units).max(1);
        let by_registers = i64::from(gpu.registers_per_block) / (self.registers * self.threads).max(1);
        let by_shared = gpu.most_shared_bytes as i64 / self.shared_bytes.max(1);
        let resident = by_registers.min(by_shared).min(THREADS / self.threads).clamp(1, 16);
        let waves = (self.n + units * resident - 1) / (units * resident);
        let at_a_time = resident.min((self.n + units - 1) / units) as f64;
        // Few threads do not fill a unit, whose arithmetic takes some cycles to answer.
        let filled = (at_a_time * self.threads as f64 / 512.0).min(1.0);
        let compute = self.fmas / (FMAS * self.efficiency);
        let memory = self.bytes / BYTES;
        let busy = at_a_time * compute.max(memory) / filled;
        waves as f64 * busy.max(self.waits * LATENCY + compute + memory)
    }
}
