//! Compilation of GPU programs to PTX or an object for the driver.

use std::time::Instant;

use tilewright_ir::Target;
use tilewright_ir::gpu::GpuProgram;
use tilewright_ir::target::{Arch, GpuApi};

use crate::generate::gpu;
use crate::{CompileError, CompileTimes, Emit, llvm};

/// Compiled kernels of a GPU program.
#[derive(Clone, Debug)]
pub struct GpuModule {
    /// PTX text for NVIDIA's GPUs, a relocatable ELF object for AMD's.
    pub code: Vec<u8>,
    /// Time of the compilation by stage.
    pub times: CompileTimes,
}

/// Compiles all kernels of a program for a GPU that LLVM has code for.
///
/// A kernel is an entry of its own name, whose parameters are addresses of buffers in the order of
/// [`GpuKernel::arguments`]. Buffers begin at multiples of 64 bytes and do not overlap. Where a block shares
/// more than it has unasked ([`Gpu::shared_bytes`]), the launch asks for all of [`GpuKernel::shared_bytes`].
///
/// [`GpuKernel::arguments`]: tilewright_ir::gpu::GpuKernel::arguments
/// [`GpuKernel::shared_bytes`]: tilewright_ir::gpu::GpuKernel::shared_bytes
/// [`Gpu::shared_bytes`]: tilewright_ir::target::Gpu::shared_bytes
///
/// # Errors
/// See [`CompileError`]; [`CompileError::NotGpu`] where the target is none of these.
///
/// # Panics
/// If the program is malformed.
pub fn compile_gpu(program: &GpuProgram, target: &Target) -> Result<GpuModule, CompileError> {
    let what = if target.arch == Arch::Gpu(GpuApi::AmdGpu) { Emit::Object } else { Emit::Asm };
    let (code, times) = emit_gpu(program, target, what)?;
    Ok(GpuModule { code, times })
}

/// Compiles all kernels of a program for a GPU to text or an object; also returns the time by stage.
///
/// # Errors
/// As for [`compile_gpu`].
///
/// # Panics
/// As for [`compile_gpu`].
pub fn emit_gpu(program: &GpuProgram, target: &Target, what: Emit) -> Result<(Vec<u8>, CompileTimes), CompileError> {
    if !matches!(target.arch, Arch::Gpu(GpuApi::Cuda | GpuApi::AmdGpu)) {
        return Err(CompileError::NotGpu { target: target.name() });
    }
    let start = Instant::now();
    let module = gpu::generate(program, target)?;
    if cfg!(debug_assertions)
        && let Err(why) = module.verify()
    {
        panic!("generated code is well formed: {why}\n{module}");
    }
    let generate_ns = start.elapsed().as_nanos() as u64;
    if what == Emit::Ssa {
        return Ok((module.to_string().into_bytes(), CompileTimes { generate_ns, ..CompileTimes::default() }));
    }
    let (code, times) = llvm::compile(&module, target, what)?;
    Ok((code, CompileTimes { generate_ns, ..times }))
}
