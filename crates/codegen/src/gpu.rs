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
    /// PTX text for NVIDIA GPUs, a relocatable ELF object for AMD GPUs.
    pub code: Vec<u8>,
    /// Time of the compilation by stage.
    pub times: CompileTimes,
}

/// Compiles all kernels of a program for a GPU supported by LLVM.
///
/// A kernel is an entry point with the kernel's name, whose parameters are addresses of buffers in the order
/// of [`GpuKernel::arguments`]. Buffers are aligned to 64 bytes and do not overlap. If a block needs more
/// shared memory than the default limit ([`Gpu::shared_bytes`]), the launch must request all of
/// [`GpuKernel::shared_bytes`].
///
/// [`GpuKernel::arguments`]: tilewright_ir::gpu::GpuKernel::arguments
/// [`GpuKernel::shared_bytes`]: tilewright_ir::gpu::GpuKernel::shared_bytes
/// [`Gpu::shared_bytes`]: tilewright_ir::target::Gpu::shared_bytes
///
/// # Errors
/// See [`CompileError`]; [`CompileError::NotGpu`] if the target is not such a GPU.
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
/// See [`compile_gpu`].
///
/// # Panics
/// See [`compile_gpu`].
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
