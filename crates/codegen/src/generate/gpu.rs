//! GPU kernels, each a function that every thread runs.

pub mod bulk;
mod copy;
mod exchange;
pub mod producer_warp;
pub mod store;
pub mod tensor;
pub mod warpgroup;

use tilewright_ir::gpu::bulk::TensorMap;
use tilewright_ir::gpu::warpgroup::{Groups, Matrices, SWIZZLED_BYTES};
use tilewright_ir::gpu::{self, Abi, BufferUse, GpuKernel, GpuProgram, SHARED_ALIGN, cluster};
use tilewright_ir::target::Target;
use tilewright_ir::{BufferId, Index, Scope};

use super::plan::{self, MemoryPlan};
use super::unit::Units;
use super::{GenerateOptions, Generator, Storage};
use crate::CompileError;
use crate::ssa::{Coordinate, Id, Linkage, Module, Type};
use store::Stores;

/// Generates all kernels of a program.
///
/// # Errors
/// If a kernel uses a construct that code generation does not support.
pub fn generate(gpu: &GpuProgram, target: &Target) -> Result<Module, CompileError> {
    let program = &gpu.program;
    let plans = gpu.kernels().map(|kernel| plan::kernel(program, &kernel.body, target));
    let plans: Vec<MemoryPlan> = plans.collect::<Result<_, _>>()?;
    let (units, nothing) = (Units::default(), MemoryPlan::default());
    let mut g = Generator::new(program, target, &nothing, &units, GenerateOptions::default());
    for (kernel, plan) in gpu.kernels().zip(&plans) {
        g.plan = plan;
        g.kernel(gpu, kernel)?;
    }
    let module = g.m.finish();
    match module.functions.iter().find(|f| f.linkage == Linkage::Library) {
        Some(f) => Err(CompileError::NoFunction { name: f.name.clone(), target: target.name() }),
        None => Ok(module),
    }
}

impl Generator<'_> {
    fn kernel(&mut self, gpu: &GpuProgram, kernel: &GpuKernel) -> Result<(), CompileError> {
        let Abi { buffers, maps, block, n_teams, has_producer_warp, n_converters, shared_rings, shared_bytes, .. } =
            Abi::of(gpu, kernel, self.target);
        let mut types = vec![Type::GLOBAL; buffers.len()];
        let n_buffers = types.len();
        types.resize(n_buffers + maps.len(), Type::POINTER);
        let function = self.m.function(&kernel.name, Linkage::Exported, None, &types);
        self.m.kernel(function, block, if shared_rings.is_empty() { 1 } else { cluster::BLOCKS });
        self.enter_function(function, Linkage::Exported);
        (0..maps.len()).for_each(|at| self.m.map_parameter(n_buffers + at));
        let maps: Vec<(TensorMap, Id)> =
            maps.into_iter().enumerate().map(|(at, map)| (map, self.m.parameter(n_buffers + at))).collect();
        // Kernels contain no units, as calls are not worthwhile.
        self.f.is_unit = true;
        self.filled = plan::written_buffers(&kernel.body);
        for (at, (buffer, access)) in buffers.into_iter().enumerate() {
            // Memory through which threads communicate is not private to a thread.
            if access == BufferUse::ReadWrite {
                self.f.storage.insert(buffer, Storage::Pointer(self.m.parameter(at)));
            } else {
                self.buffer_parameter(at, buffer);
            }
        }
        if self.target.has_wgmma() {
            self.f.matrices = Matrices::of(&gpu.program, kernel);
        }
        let [boxes, barriers] = self.shared_memory(gpu, kernel, shared_bytes)?;
        let blocks = kernel.blocks.into_iter().zip([0, 1, 2].map(Coordinate::Block));
        let threads = kernel.threads.into_iter().zip([0, 1, 2].map(Coordinate::Thread));
        for (axis, coordinate) in blocks.chain(threads) {
            let Some((var, extent)) = axis else { continue };
            if extent == 1 {
                self.f.known.insert(var, 0);
                continue;
            }
            let value = self.hoisted(0, |g| g.m.coordinate(coordinate));
            self.m.name(value, self.program.loop_name(var));
            self.f.vars.insert(var, (value, 0));
            self.f.ranges.push(var, Index::from(extent));
        }
        self.f.warp = gpu::tensor::warp(&kernel.threads);
        self.f.groups = Groups::of(&kernel.threads);
        if n_teams > 1 {
            self.number_in_team(kernel);
        }
        if let (Some(barriers), false) = (barriers, maps.is_empty()) {
            let is_copied = |b: &BufferId| self.program.buffer(*b).scope == Scope::Async;
            self.f.has_copies = kernel.shared.iter().any(is_copied);
            let n_readers = has_producer_warp.then(|| kernel.block()[2]);
            let n_converters = (n_converters > 0).then(|| n_converters * gpu::producer_warp::THREADS);
            let arrivals = [Some(1), n_readers, n_converters].into_iter().flatten().collect();
            self.begin_boxes(kernel, maps, barriers, kernel.n_places(gpu) as i32, arrivals, shared_rings);
        }
        if has_producer_warp {
            self.f.stores = boxes.map(Stores::new);
            self.warp_specialized_kernel(kernel)?
        } else {
            self.block(&kernel.body)?
        }
        self.leave_function();
        Ok(())
    }

    /// Lays out the shared buffers of a block; returns the addresses of the warps' staging boxes and of the
    /// mbarriers after them, if any.
    fn shared_memory(
        &mut self,
        gpu: &GpuProgram,
        kernel: &GpuKernel,
        all_bytes: u64,
    ) -> Result<[Option<Id>; 2], CompileError> {
        let mut end = 0u64;
        let mut offsets = Vec::new();
        for (buffer, bytes) in kernel.shared_sizes(&gpu.program) {
            offsets.push((buffer, end));
            let too_large = || CompileError::TooLarge { buffer: self.program.buffer(buffer).name.clone() };
            end = bytes.and_then(|bytes| bytes.checked_add(end)).ok_or_else(too_large)?;
        }
        let boxes = gpu::store::staged_bytes(kernel);
        let start = if boxes > 0 { gpu::store::place(end) } else { end };
        let starts = [(start, boxes), (start.saturating_add(boxes), kernel.n_places(gpu))];
        let mut rest = [None; 2];
        if all_bytes > 0 {
            let align = if self.f.matrices.all.is_empty() { SHARED_ALIGN as u32 } else { SWIZZLED_BYTES as u32 };
            let base = self.hoisted(0, |g| g.m.shared_memory(all_bytes, align));
            for (buffer, offset) in offsets {
                let pointer = self.hoisted(0, |g| g.bytes_from(base, offset as i64));
                self.f.storage.insert(buffer, Storage::Pointer(pointer));
            }
            for (rest, (start, n)) in rest.iter_mut().zip(starts) {
                *rest = (n > 0).then(|| self.hoisted(0, |g| g.bytes_from(base, start as i64)));
            }
        }
        Ok(rest)
    }
}
