//! Programs for GPUs: kernels, and how a scheduled program becomes them.
//!
//! A GPU schedule is an ordinary program with block and thread loops. Thread loops stand inside the serial
//! loops of a block, so that the program keeps its sequential meaning:
//!
//! ```text
//! block.x bx in 4 {                          kernel run_0 (
//!   for ko in 8 {                              block.x bx in 4, thread.x thread.x in 16, shared A.s
//!     alloc A.s                              ) {
//!     thread.x c in 16 { A.s[c] = … }          for ko in 8 {
//!     thread.x tx in 16 {                →       A.s[thread.x] = …
//!       C[16*bx + tx] += … A.s[…] …              barrier
//!     }                                          C[16*bx + thread.x] += … A.s[…] …
//!   }                                            barrier
//! }                                            }
//!                                            }
//! ```
//!
//! [`lower_gpu`] converts it to kernels in which every thread runs the whole body; [`simt::run`] interprets
//! kernels and finds races.

mod abi;
pub mod bulk;
pub mod cluster;
mod item;
mod map_error;
mod map_threads;
mod private;
pub mod producer_warp;
pub mod products;
pub mod simt;
pub mod store;
pub mod tensor;
pub mod warpgroup;

pub use abi::Abi;
pub(crate) use item::relocate;
pub use map_error::MapError;
pub use map_threads::lower_gpu;
pub use tensor::TileProduct;
pub use warpgroup::GroupProduct;

use crate::index::{Index, Ranges};
use crate::program::{BufferId, LoopId, LoopKind, Part, Program, Role, Scope, Stmt};
use crate::text::{loop_name, stmt_to_string};
use std::fmt;
use warpgroup::Matrices;

/// Program as a sequence of GPU kernels.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuProgram {
    /// Tables of buffers and loops; its statements are empty.
    ///
    /// Buffers that outlive a kernel are in [`Scope::Global`]; a private buffer has the shape of one thread's
    /// part.
    pub program: Program,
    /// Kernels of [`Part::Prepare`], in order; each begins after the previous one has ended.
    pub prepare: Vec<GpuKernel>,
    /// Kernels of the body.
    pub body: Vec<GpuKernel>,
    /// Kernels of [`Part::Finish`].
    pub finish: Vec<GpuKernel>,
}

/// GPU kernel: its grid, the threads of a block, and the code of a thread.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuKernel {
    /// Name, unique in the program and valid in C.
    pub name: String,
    /// Grid: loop variable and number of blocks along x, y and z; `None` for unused axes.
    pub blocks: [Option<(LoopId, i64)>; 3],
    /// Block: loop variable and number of threads along x, y and z; `None` for unused axes.
    pub threads: [Option<(LoopId, i64)>; 3],
    /// Buffers in shared memory, for the lifetime of a block.
    pub shared: Vec<BufferId>,
    /// Code of a thread.
    ///
    /// The code has no block or thread loops. An allocated buffer is private to the thread. A condition on
    /// thread variables is a guard. A [`Stmt::Barrier`] separates conflicting accesses of different threads
    /// to shared or global memory; it is never under a condition on thread variables or values, nor in a loop
    /// whose extent depends on thread variables.
    pub body: Vec<Stmt>,
}

/// Alignment in bytes of buffers in shared memory, the size of the widest access of a thread.
pub const SHARED_ALIGN: u64 = 16;

/// Kind of accesses of a kernel to a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferUse {
    /// Read only.
    Read,
    /// Written only.
    Write,
    /// Read and written.
    ReadWrite,
}

impl GpuProgram {
    /// Kernels of a part.
    pub fn part(&self, part: Part) -> &[GpuKernel] {
        match part {
            Part::Prepare => &self.prepare,
            Part::Body => &self.body,
            Part::Finish => &self.finish,
        }
    }

    /// Kernels of a part, mutable.
    pub fn part_mut(&mut self, part: Part) -> &mut Vec<GpuKernel> {
        match part {
            Part::Prepare => &mut self.prepare,
            Part::Body => &mut self.body,
            Part::Finish => &mut self.finish,
        }
    }

    /// Kernels of all parts, in execution order.
    pub fn kernels(&self) -> impl Iterator<Item = &GpuKernel> {
        Part::ALL.into_iter().flat_map(|(part, _)| self.part(part))
    }

    /// Buffers in device memory, in the order of the table: arguments, kept buffers, and temporaries passed
    /// between kernels.
    pub fn device_buffers(&self) -> Vec<BufferId> {
        let ids = (0..self.program.buffers.len() as u32).map(BufferId);
        ids.filter(|id| self.is_device_buffer(*id)).collect()
    }

    /// Whether a buffer is in device memory, rather than shared or private.
    pub fn is_device_buffer(&self, id: BufferId) -> bool {
        let buffer = self.program.buffer(id);
        buffer.role != Role::Temporary || buffer.scope == Scope::Global
    }
}

impl GpuKernel {
    /// Buffers in device memory that the kernel uses, in the order of the table: its parameters.
    pub fn arguments(&self, of: &GpuProgram) -> Vec<(BufferId, BufferUse)> {
        let mut uses = vec![[false; 2]; of.program.buffers.len()];
        for stmt in &self.body {
            stmt.walk(&mut |s| {
                // Gathers read their buffer as well.
                s.own_nodes().for_each(|node| node.for_each_buffer(&mut |b| uses[b.0 as usize][0] = true));
                s.for_each_own_read(&mut |b, _| uses[b.0 as usize][0] = true);
                if let Some((b, _)) = s.own_write() {
                    uses[b.0 as usize][1] = true;
                }
            });
        }
        let access = |[reads, writes]: [bool; 2]| match (reads, writes) {
            (true, true) => Some(BufferUse::ReadWrite),
            (true, false) => Some(BufferUse::Read),
            (false, true) => Some(BufferUse::Write),
            (false, false) => None,
        };
        of.device_buffers().into_iter().filter_map(|id| Some((id, access(uses[id.0 as usize])?))).collect()
    }

    /// Grid size: number of blocks along x, y and z.
    pub fn grid(&self) -> [i64; 3] {
        self.blocks.map(|axis| axis.map_or(1, |(_, extent)| extent))
    }

    /// Block size along x, y and z, without a producer warp (see [`Abi::block`]).
    pub fn block(&self) -> [i64; 3] {
        self.threads.map(|axis| axis.map_or(1, |(_, extent)| extent))
    }

    /// Extents of block and thread axes.
    pub(crate) fn ranges(&self) -> Ranges {
        let mut ranges = Ranges::default();
        let axes = self.blocks.iter().chain(&self.threads).flatten();
        axes.for_each(|(var, extent)| ranges.push(*var, Index::from(*extent)));
        ranges
    }

    /// Number of threads of a block, without a producer warp.
    pub fn n_threads(&self) -> i64 {
        self.block().iter().product()
    }

    /// Shared memory of a block in bytes: its buffers in order, the staging [boxes](store) of bulk stores,
    /// then mbarriers of [`bulk::BARRIER_BYTES`] each. Each pipeline stage of bulk copies has one mbarrier,
    /// another for its consumers if a producer warp fills it, and another for converter warps; teams that
    /// take turns have one each.
    pub fn shared_bytes(&self, of: &GpuProgram) -> u64 {
        let is_fed = self.shared.iter().any(|b| of.program.buffer(*b).scope.is_produced());
        let n_teams = producer_warp::n_teams(self) as u64;
        let n_of_stage = match (is_fed, Matrices::of(&of.program, self).in_parts.is_empty()) {
            (false, _) => 1,
            (true, true) => 2,
            (true, false) => 3,
        };
        let n_barriers = self.n_places(of) * n_of_stage + if n_teams > 1 { n_teams } else { 0 };
        let barriers = (n_barriers * bulk::BARRIER_BYTES).next_multiple_of(SHARED_ALIGN);
        let sizes = self.shared_sizes(&of.program).map(|(_, bytes)| bytes.unwrap_or(u64::MAX));
        let all = sizes.fold(0, u64::saturating_add);
        let all = match store::staged_bytes(self) {
            0 => all,
            boxes => store::place(all).saturating_add(boxes),
        };
        all.saturating_add(barriers)
    }

    /// Buffers in shared memory, in order, each with its size in bytes padded to a multiple of
    /// [`SHARED_ALIGN`]; twice the size if each number is stored in [two parts](Matrices::in_parts). The size
    /// is `None` on overflow.
    pub fn shared_sizes<'k>(&'k self, program: &'k Program) -> impl Iterator<Item = (BufferId, Option<u64>)> + 'k {
        let Matrices { in_parts, .. } = Matrices::of(program, self);
        self.shared.iter().map(move |b| {
            let bytes = program.buffer(*b).size_bytes().and_then(|bytes| bytes.checked_next_multiple_of(SHARED_ALIGN));
            (*b, bytes.and_then(|bytes| bytes.checked_mul(if in_parts.contains(b) { 2 } else { 1 })))
        })
    }

    /// Number of pipeline stages filled by bulk copies; 0 without such copies.
    pub fn n_places(&self, of: &GpuProgram) -> u64 {
        let rings = self.shared.iter().map(|b| of.program.buffer(*b)).filter(|b| b.scope.is_tma());
        rings.map(|b| b.shape[0] as u64).max().unwrap_or(0)
    }
}

/// Prints the tables as in a program's text, then each kernel.
impl fmt::Display for GpuProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.program.to_string();
        // Only the tables, as the parts are empty.
        f.write_str(text.strip_suffix("run {\n}\n").unwrap_or(&text))?;
        for kernel in self.kernels() {
            let kinds: [fn(u8) -> LoopKind; 2] = [LoopKind::Block, LoopKind::Thread];
            let mut words = Vec::new();
            for (axes, kind) in [kernel.blocks, kernel.threads].into_iter().zip(kinds) {
                for (at, axis) in axes.iter().enumerate() {
                    if let Some((var, extent)) = axis {
                        words.push(format!("{} {} in {extent}", kind(at as u8).name(), loop_name(&self.program, *var)));
                    }
                }
            }
            words.extend(kernel.shared.iter().map(|b| format!("shared {}", self.program.buffer(*b).name)));
            writeln!(f, "kernel {} ({}) {{", kernel.name, words.join(", "))?;
            for stmt in &kernel.body {
                for line in stmt_to_string(&self.program, stmt).lines() {
                    writeln!(f, "  {line}")?;
                }
            }
            writeln!(f, "}}")?;
        }
        Ok(())
    }
}
