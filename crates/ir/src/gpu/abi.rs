//! Launch contract of kernels: their parameters and launch dimensions.

use super::bulk::{self, TensorMap};
use super::producer_warp::{self, has_producer_warp};
use super::warpgroup::Matrices;
use super::{BufferUse, GpuKernel, GpuProgram, cluster, store};
use crate::program::BufferId;
use crate::target::Target;

/// Launch contract of a kernel on a target, shared by code generation, drivers and shipped libraries.
#[derive(Clone, Debug, PartialEq)]
pub struct Abi {
    /// Buffers in device memory and how the kernel uses them; pointers to them are the first kernel
    /// parameters.
    pub buffers: Vec<(BufferId, BufferUse)>,
    /// Tensor maps (TMA descriptors): the kernel parameters after the buffers. Empty unless the target has
    /// TMA, all bulk copies are boxes, and a producer warp or the iterations of a single loop distinguish the
    /// pipeline stages. Maps of bulk stores, which only kernels with a producer warp have, come last.
    pub maps: Vec<TensorMap>,
    /// Grid size: number of blocks along x, y and z.
    pub grid: [i64; 3],
    /// Block size: number of threads along x, y and z, including all consumer teams, the producer warp and
    /// converter warps.
    pub block: [i64; 3],
    /// Number of consumer teams, consecutive along z; 1 unless there is a producer warp.
    pub n_teams: i64,
    /// Whether the layer of threads along z after those of all teams is the producer warp, which is not part
    /// of the program.
    pub has_producer_warp: bool,
    /// Number of converter warps, the layers of threads along z after the producer warp.
    pub n_converters: i64,
    /// Buffers that the producer warps of a cluster multicast, each warp half of every box. If there are any,
    /// the kernel's code requires clusters of [`cluster::BLOCKS`] blocks along x; a plain launch creates
    /// them.
    pub shared_rings: Vec<BufferId>,
    /// Size of a block's shared memory in bytes.
    pub shared_bytes: u64,
    /// Dynamic shared memory of the launch in bytes: all shared memory if it exceeds the target's default
    /// limit, else 0.
    pub dynamic_shared_bytes: u64,
}

impl Abi {
    /// Derives the launch contract of a kernel.
    pub fn of(program: &GpuProgram, kernel: &GpuKernel, target: &Target) -> Abi {
        let has_tma = target.has_wgmma();
        let has_producer_warp = has_tma && has_producer_warp(program, kernel);
        let n_teams = if has_producer_warp { producer_warp::n_teams(kernel) } else { 1 };
        let in_parts = !Matrices::of(&program.program, kernel).in_parts.is_empty();
        let n_converters = if has_producer_warp && in_parts { producer_warp::CONVERTERS } else { 0 };
        let shared_rings = if has_producer_warp { cluster::shared_rings(program, kernel) } else { Vec::new() };
        // Without converter warps, the copying threads themselves compute both parts of each number.
        let are_counted = has_tma && (has_producer_warp || !in_parts && bulk::waits_in_one_loop(kernel));
        let [x, y, z] = kernel.block();
        let shared_bytes = kernel.shared_bytes(program);
        let is_unasked = target.gpu.is_some_and(|gpu| shared_bytes <= gpu.shared_bytes);
        let mut maps = if are_counted { bulk::all_maps(program, kernel, &shared_rings) } else { Vec::new() };
        if has_producer_warp {
            maps.extend(store::maps(program, kernel));
        }
        Abi {
            buffers: kernel.arguments(program),
            maps,
            grid: kernel.grid(),
            block: [x, y, n_teams * z + if has_producer_warp { producer_warp::WARPS } else { 0 } + n_converters],
            n_teams,
            has_producer_warp,
            n_converters,
            shared_rings,
            shared_bytes,
            dynamic_shared_bytes: if is_unasked { 0 } else { shared_bytes },
        }
    }

    /// Index in `buffers` of the array of a tensor map.
    ///
    /// # Panics
    /// If the map belongs to another kernel.
    pub fn array_of(&self, map: &TensorMap) -> usize {
        let at = self.buffers.iter().position(|(id, _)| *id == map.array);
        at.expect("invariant: an array that is copied is an argument")
    }
}
