//! OpenCL's devices.

use super::{Driver, Span, of_compiler};
use crate::failure::Failure;
use crate::opencl::{self, Code, Context, Launch, Memory, OpenClError};
use std::sync::Arc;
use tilewright_codegen::opencl_c;
use tilewright_ir::Target;
use tilewright_ir::gpu::{GpuProgram, Kernel};
use tilewright_tune::ErrorClass;

/// A context of an OpenCL device.
#[derive(Clone)]
pub struct OpenCl {
    context: Context,
    is_cpu: bool,
}

impl OpenCl {
    /// One of the device that a target is.
    ///
    /// # Errors
    /// Where there is no such device, or its driver refuses.
    pub fn new(target: &Target) -> Result<OpenCl, OpenClError> {
        let device = opencl::device_of(target)?;
        Ok(OpenCl { context: Context::new(&device)?, is_cpu: device.is_cpu })
    }

    /// Whether the device is this machine's CPU.
    pub fn is_cpu(&self) -> bool {
        self.is_cpu
    }
}

impl Driver for OpenCl {
    type Memory = Memory;
    type Code = Arc<Code>;
    type Launch = Launch;
    type Error = OpenClError;

    fn alignment(&self) -> Result<u64, OpenClError> {
        self.context.alignment()
    }

    fn memory(&self, n_bytes: u64) -> Result<Memory, OpenClError> {
        Memory::new(&self.context, n_bytes)
    }

    fn n_bytes(memory: &Memory) -> u64 {
        memory.n_bytes()
    }

    fn fill(memory: &Memory, byte: u8) -> Result<(), OpenClError> {
        memory.fill(byte)
    }

    fn write(memory: &Memory, at: usize, from: &[u8]) -> Result<(), OpenClError> {
        memory.write(at, from)
    }

    fn read(memory: &Memory, at: usize, to: &mut [u8]) -> Result<(), OpenClError> {
        memory.read(at, to)
    }

    fn is_intact(memory: &Memory) -> Result<bool, OpenClError> {
        memory.is_intact()
    }

    fn build(&self, program: &GpuProgram, target: &Target) -> Result<Arc<Code>, Failure> {
        Code::build(&self.context, &opencl_c(program, target)).map(Arc::new).map_err(of_compiler::<OpenCl>)
    }

    fn launch(
        code: &Arc<Code>,
        kernel: &Kernel,
        _: &GpuProgram,
        target: &Target,
        arguments: Vec<Span<Memory>>,
    ) -> Result<Launch, Failure> {
        let sizes = |axes: [i64; 3]| axes.map(|n| usize::try_from(n).unwrap_or(0));
        let launch = Launch::new(code, &kernel.name, sizes(kernel.grid()), sizes(kernel.block()), arguments);
        let launch = launch.map_err(of_compiler::<OpenCl>)?;
        let (most_threads, local_bytes) = launch.limits().map_err(of_compiler::<OpenCl>)?;
        let gpu = target.gpu.as_ref().expect("invariant: an OpenCL target has what a GPU has");
        let refused = |why: String| Err((ErrorClass::CompileErrorDevice, why).into());
        if kernel.n_threads() as u64 > most_threads {
            let n = kernel.n_threads();
            return refused(format!(
                "kernel {} has blocks of {n} threads, its code at most {most_threads}",
                kernel.name
            ));
        }
        if local_bytes > gpu.most_shared_bytes {
            let most = gpu.most_shared_bytes;
            return refused(format!("kernel {} takes {local_bytes} bytes of local memory of {most}", kernel.name));
        }
        Ok(launch)
    }

    fn warm_up(launch: &Launch) -> Result<(), OpenClError> {
        launch.warm_up()
    }

    fn run(&self, launches: &[Launch], n_times: u32) -> Result<f64, OpenClError> {
        opencl::run(&self.context, launches, n_times)
    }

    fn finish(&self) -> Result<(), OpenClError> {
        self.context.finish()
    }

    fn lacks_memory(error: &OpenClError) -> bool {
        error.lacks_memory()
    }

    fn is_lost(&self, _: &OpenClError) -> bool {
        // A GPU's driver does not tell.
        !self.is_cpu
    }
}
