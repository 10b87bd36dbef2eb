//! NVIDIA's GPUs.

use super::{Driver, Span, of_compiler};
use crate::cuda::{self, Assembler, Code, Context, CudaError, Launch, Memory};
use crate::failure::Failure;
use std::sync::Arc;
use tilewright_codegen::{ARGUMENT_ALIGN, CompileError, compile_gpu};
use tilewright_ir::Target;
use tilewright_ir::gpu::{GpuProgram, Kernel};
use tilewright_tune::ErrorClass;

/// A context of one of NVIDIA's GPUs, and what assembles code for it.
#[derive(Clone)]
pub struct Cuda {
    context: Context,
    assembler: Assembler,
}

impl Cuda {
    /// One of the device that a target is.
    ///
    /// # Errors
    /// Where there is no such device, or its driver refuses.
    pub fn new(target: &Target) -> Result<Cuda, CudaError> {
        let context = Context::new(target.gpu.map_or(0, |gpu| gpu.number))?;
        Ok(Cuda { context, assembler: Assembler::find() })
    }

    /// One of an emulator, which this thread has for itself.
    #[cfg(test)]
    pub(crate) fn emulated() -> Cuda {
        Cuda { context: cuda::emulated(), assembler: Assembler::Driver }
    }
}

impl Driver for Cuda {
    type Memory = Memory;
    type Code = Arc<Code>;
    type Launch = Launch;
    type Error = CudaError;

    fn alignment(&self) -> Result<u64, CudaError> {
        Ok(ARGUMENT_ALIGN)
    }

    fn memory(&self, n_bytes: u64) -> Result<Memory, CudaError> {
        Memory::new(&self.context, n_bytes)
    }

    fn n_bytes(memory: &Memory) -> u64 {
        memory.n_bytes()
    }

    fn fill(memory: &Memory, byte: u8) -> Result<(), CudaError> {
        memory.fill(byte)
    }

    fn write(memory: &Memory, at: usize, from: &[u8]) -> Result<(), CudaError> {
        memory.write(at, from)
    }

    fn read(memory: &Memory, at: usize, to: &mut [u8]) -> Result<(), CudaError> {
        memory.read(at, to)
    }

    fn is_intact(memory: &Memory) -> Result<bool, CudaError> {
        memory.is_intact()
    }

    fn build(&self, program: &GpuProgram, target: &Target) -> Result<Arc<Code>, Failure> {
        let module = compile_gpu(program, target).map_err(|why| Failure {
            class: ErrorClass::CompileErrorHost,
            message: why.to_string(),
            lacks_memory: matches!(why, CompileError::NoMemory(_)),
        })?;
        let code = self.assembler.assemble(&module.code, &target.cpu);
        let code = code.map_err(|why| Failure::from((ErrorClass::CompileErrorDevice, why.to_string())))?;
        Code::load(&self.context, &code).map(Arc::new).map_err(of_compiler::<Cuda>)
    }

    fn launch(
        code: &Arc<Code>,
        kernel: &Kernel,
        program: &GpuProgram,
        target: &Target,
        arguments: Vec<Span<Memory>>,
    ) -> Result<Launch, Failure> {
        // What a block has unasked is in the code.
        let shared_bytes = kernel.shared_bytes(program);
        let is_asked_for = target.gpu.is_some_and(|gpu| shared_bytes > gpu.shared_bytes);
        let shared_bytes = if is_asked_for { shared_bytes } else { 0 };
        Launch::new(code, &kernel.name, kernel.grid(), kernel.block(), shared_bytes, arguments)
            .map_err(of_compiler::<Cuda>)
    }

    fn run(&self, launches: &[Launch], n_times: u32) -> Result<f64, CudaError> {
        cuda::run(&self.context, launches, n_times)
    }

    fn finish(&self) -> Result<(), CudaError> {
        self.context.finish()
    }

    fn lacks_memory(error: &CudaError) -> bool {
        error.lacks_memory()
    }

    fn is_lost(&self, error: &CudaError) -> bool {
        error.is_final()
    }
}
