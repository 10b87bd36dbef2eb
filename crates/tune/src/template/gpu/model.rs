//! Analytical performance model of a GPU, by which templates rank configurations: occupancy, arithmetic,
//! memory traffic and latencies.

use super::super::nest::stages::LoopStage;
use tilewright_ir::target::{Gpu, Target};
use tilewright_ir::{BufferId, Program};

/// Bandwidth of a compute unit from the last-level cache, in bytes per cycle.
const BYTES: f64 = 20.0;
/// Bandwidth of a multiprocessor of an H100 from the L2 cache, in bytes per cycle, as in DeepGEMM's
/// heuristics: 8 MB in 1,300 cycles for all 132.
const HOPPER_BYTES: f64 = 46.0;
/// Latency in cycles of loading an element from memory for all threads of a block.
const LATENCY: f64 = 700.0;
/// Cycles of a barrier per step, an estimate.
pub const BARRIER: f64 = 20.0;
/// Cycles between two steps of a block that loads operands from shared memory into registers: the barrier,
/// and the latency of the first loads after it. Measured with products on CUDA cores of an H100.
pub const BETWEEN_STEPS: f64 = 250.0;
/// Share by which a way that has run on no card is said to be slower than the one that was measured, in whose
/// place it is modelled: the tiles that it has alone are no first guesses either.
pub const UNPROVEN_WAY: f64 = 1.5;
/// Cycles to launch a further kernel.
pub const START: f64 = 3000.0;
/// Cycles for beginning and ending a block.
const EACH: f64 = 300.0;

/// Blocks of a kernel in the performance model. Each goes through reduction steps, and copies operands for
/// later steps while it computes.
pub struct Blocks {
    /// Number of blocks.
    pub n: i64,
    /// Number of threads per block.
    pub threads: i64,
    /// Number of 32-bit registers per thread.
    pub registers: i64,
    /// Shared memory per block in bytes.
    pub shared_bytes: i64,
    /// Multiply-adds per block, in units of a multiprocessor's multiply-adds per thread.
    pub fmas: f64,
    /// Efficiency: share of the multiprocessor's multiply-add rate that other instructions leave.
    pub efficiency: f64,
    /// Bytes per block read from and written to device memory.
    pub bytes: f64,
    /// Number of reduction steps.
    pub steps: f64,
    /// Number of steps whose operands are in flight while one is computed.
    pub stages: i64,
    /// Cycles per step in which the block computes nothing; only other blocks can use them, in part.
    pub exposed: f64,
    /// Cycles for storing results, after the last step of each tile.
    pub stores: f64,
    /// Cycles of latency before a block's first step and after its last one.
    pub begins: f64,
    /// Number of threads that saturate a multiprocessor's arithmetic.
    pub fill: i64,
}

impl Blocks {
    /// Cycles until all blocks are done.
    pub fn cycles(&self, target: &Target, gpu: &Gpu) -> f64 {
        let units = i64::from(gpu.n_units).max(1);
        let by_registers = i64::from(gpu.registers_per_block) / (self.registers * self.threads).max(1);
        let by_shared = gpu.most_shared_bytes as i64 / self.shared_bytes.max(1);
        let resident = by_registers.min(by_shared).min(i64::from(gpu.unit_threads) / self.threads).clamp(1, 16);
        let waves = (self.n + units * resident - 1) / (units * resident);
        let at_a_time = resident.min((self.n + units - 1) / units) as f64;
        let filled = (at_a_time * self.threads as f64 / self.fill as f64).min(1.0);
        let compute = self.fmas / (f64::from(gpu.unit_fmas) * self.efficiency);
        let memory = self.bytes / if target.has_wgmma() { HOPPER_BYTES } else { BYTES };
        let longer = compute.max(memory);
        // Cycles of a step that copies of later steps do not cover.
        let stall = (LATENCY + (memory - self.stages as f64 * longer) / self.steps).max(0.0) + self.exposed;
        let covered = if self.stages > 0 { longer } else { compute };
        let alone = 2.0 * LATENCY + self.begins + covered + self.steps * stall + self.stores;
        // Concurrent blocks stop at the same barriers: the more there are, the more of them continue by
        // chance.
        let shared = at_a_time * (longer + self.stores) / filled + self.steps * self.exposed / at_a_time.sqrt();
        waves as f64 * alone.max(shared)
    }
}

/// Latency in cycles of loading an element from a cache.
const CACHED: f64 = 400.0;
/// Latency in cycles of loading an element from shared memory.
const SHARED: f64 = 30.0;
/// Number of bytes that a unit loads at once.
const LINE: i64 = 128;

/// Work of a kernel that consists of stages, per thread.
#[derive(Clone, Copy, Default)]
pub struct StagesWork {
    /// Memory transactions: cache lines that a warp requests.
    pub lines: f64,
    /// Operations per thread.
    pub operations: f64,
    /// Cycles of latency.
    pub waits: f64,
    /// Bytes read from and written to memory.
    pub bytes: f64,
}

impl StagesWork {
    /// Adds a stage in which each thread executes `n_each` iterations, unrolled by `unroll`. `x` and `y` are
    /// the loops along which neighbouring threads lie, and rows of threads, each with its number of threads.
    /// `is_near` tells whether a buffer is in shared memory or registers.
    pub fn add(
        &mut self,
        gpu: &Gpu,
        program: &Program,
        stage: &LoopStage,
        [x, y]: [(Option<usize>, i64); 2],
        [n_each, unroll]: [i64; 2],
        is_near: impl Fn(BufferId) -> bool,
    ) {
        let lanes = x.1.min(i64::from(gpu.warp_size)).max(1);
        let rows = (i64::from(gpu.warp_size) / lanes).min(y.1).max(1);
        let lines = |strides: &[Option<i64>], bytes: i64| {
            let stride = |at: Option<usize>| at.map_or(Some(0), |at| strides[at]);
            let of_row = stride(x.0).map_or(lanes, |s| (lanes * s.abs() * bytes / LINE).clamp(1, lanes));
            (if stride(y.0) == Some(0) { of_row } else { of_row * rows }) as f64
        };
        let n_each = n_each as f64;
        let mut waits = SHARED;
        let mut seen = Vec::new();
        for read in &stage.reads {
            let buffer = program.buffer(read.buffer);
            if is_near(read.buffer) {
                self.lines += 0.5 * n_each;
                continue;
            }
            waits = CACHED;
            self.lines += n_each * lines(&read.strides, buffer.dtype.bytes() as i64);
            if !seen.contains(&read.buffer) {
                seen.push(read.buffer);
                self.bytes += buffer.size_bytes().unwrap_or(0) as f64;
            }
        }
        self.operations += n_each * (stage.cycles + 1.0 + stage.reads.len() as f64 + 2.0 / unroll as f64);
        self.waits += waits * (n_each / unroll as f64).max(1.0);
        if !is_near(stage.buffer) {
            self.bytes += program.buffer(stage.buffer).size_bytes().unwrap_or(0) as f64;
        }
    }

    /// Adds the barriers of a block, and `n_steps` steps of cooperative work.
    pub fn share(&mut self, n_steps: i64) {
        self.waits += SHARED * (n_steps + 2) as f64;
    }

    /// Cycles until `n_blocks` blocks of `threads` threads are done.
    pub fn cycles(&self, gpu: &Gpu, n_blocks: i64, threads: i64) -> f64 {
        let units = i64::from(gpu.n_units).max(1);
        let resident = (i64::from(gpu.unit_threads) / threads).clamp(1, 16);
        let n_warps = ((threads + i64::from(gpu.warp_size) - 1) / i64::from(gpu.warp_size)) as f64;
        let waves = (n_blocks + units * resident - 1) / (units * resident);
        let at_a_time = resident.min((n_blocks + units - 1) / units) as f64;
        let busy = at_a_time * n_warps * self.lines.max(32.0 * self.operations / f64::from(gpu.unit_fmas));
        let of_blocks = waves as f64 * busy.max(self.waits + EACH);
        START + of_blocks.max(self.bytes / (BYTES * units as f64))
    }
}
