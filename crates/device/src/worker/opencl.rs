//! OpenCL's devices as workers use them.

use super::gpu::{self, Driver, of_compiler};
use super::{Failure, Threads, limit_memory};
use crate::data::Argument;
use crate::opencl::{self, Code, Context, Launch, Memory, OpenClError};
use crate::protocol::Assignment;
use std::sync::Arc;
use tilewright_codegen::opencl_c;
use tilewright_ir::gpu::{GpuProgram, Kernel};
use tilewright_ir::op::Workload;
use tilewright_ir::{Program, Target};
use tilewright_tune::ErrorClass;

/// The threads for an assignment.
///
/// # Errors
/// Where there is no such device, or it has not the memory.
pub fn threads(
    assignment: &Assignment,
    workload: Workload,
    untuned: Program,
    target: Target,
    arguments: Vec<Argument>,
) -> Result<Threads, Box<dyn std::error::Error>> {
    if let Some(folder) = &assignment.drivers_folder {
        // SAFETY: this process has no other thread yet. PoCL keeps there what it has compiled; no driver is
        // to find what it has compiled for others.
        unsafe {
            std::env::set_var("POCL_CACHE_DIR", folder);
            std::env::set_var("CUDA_CACHE_DISABLE", "1");
        }
    }
    let device = opencl::device_of(&target)?;
    let (is_cpu, context) = (device.is_cpu, Context::new(&device)?);
    let threads = gpu::threads(OpenCl { context, is_cpu }, workload, untuned, target, arguments)?;
    if is_cpu {
        // Drivers of GPUs reserve more addresses than any limit.
        limit_memory(assignment.memory_bytes);
    }
    Ok(threads)
}

#[derive(Clone)]
struct OpenCl {
    context: Context,
    is_cpu: bool,
}

impl Driver for OpenCl {
    type Memory = Memory;
    type Code = Arc<Code>;
    type Launch = Launch;
    type Error = OpenClError;

    fn memory(&self, n_bytes: u64) -> Result<Memory, OpenClError> {
        Memory::new(&self.context, n_bytes)
    }

    fn fill(memory: &Memory, byte: u8) -> Result<(), OpenClError> {
        memory.fill(byte)
    }

    fn write(memory: &Memory, from: &[u8]) -> Result<(), OpenClError> {
        memory.write(from)
    }

    fn read(memory: &Memory, to: &mut [u8]) -> Result<(), OpenClError> {
        memory.read(to)
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
        arguments: Vec<Arc<Memory>>,
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
