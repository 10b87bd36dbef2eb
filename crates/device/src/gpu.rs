//! GPUs by any driver: memory, code, launches, and plans of whole models.

mod cuda;
mod opencl;
mod plan;

use std::fmt::Display;
use std::path::Path;

use tilewright_ir::Target;
use tilewright_ir::gpu::{Abi, GpuKernel, GpuProgram};
use tilewright_ir::target::Gpu;
use tilewright_search::ErrorClass;

use crate::failure::Failure;
use crate::guarded::{DeviceMemory, GuardedMemory};
pub use crate::guarded::{GuardedSpan, KernelArgument};
pub use cuda::Cuda;
pub use opencl::OpenCl;
pub use plan::{GpuContext, GpuError, missing_sources};

/// Driver of a device: a context that runs kernels, shared by threads.
pub trait Driver: Clone + Send + Sync + 'static {
    /// Allocation of device memory.
    type Whole: DeviceMemory<Error = Self::Error> + Send + Sync + 'static;
    /// Loaded kernels.
    type Code: Send + 'static;
    /// Kernel launch: a kernel with its arguments and launch configuration.
    type Launch: Send + Sync + 'static;
    /// Recorded sequence of launches, such as a CUDA graph, where the driver supports that.
    type Recorded: Send + Sync + 'static;
    /// Error of the driver.
    type Error: std::error::Error + 'static;

    /// Required alignment, in bytes, of a part of memory that is passed as an argument.
    fn alignment(&self) -> Result<u64, Self::Error>;
    /// Allocates `n_bytes` undefined bytes.
    fn memory(&self, n_bytes: u64) -> Result<GuardedMemory<Self::Whole>, Self::Error>;
    /// Compiles the kernels of a program, or loads them from cached code.
    fn build(&self, program: &GpuProgram, target: &Target, kept: &dyn KeptCode) -> Result<Self::Code, Failure>;
    /// Prepares the launch of a kernel.
    fn launch(
        code: &Self::Code,
        kernel: &GpuKernel,
        program: &GpuProgram,
        target: &Target,
        arguments: Vec<GuardedSpan<GuardedMemory<Self::Whole>>>,
    ) -> Result<Self::Launch, Failure>;
    /// Loads the kernels that another process compiled from a user's source.
    fn load(&self, code: &[u8]) -> Result<Self::Code, Failure>;
    /// Loads code in PTX; `None` for drivers that do not take it.
    fn load_ptx(&self, _: &str, _: &Target) -> Option<Result<Self::Code, Failure>> {
        None
    }
    /// Writes to a global variable of the code, if the driver supports that.
    fn write_variable(_: &Self::Code, name: &str, _: &[u8]) -> Result<(), Failure> {
        Err((ErrorClass::Unknown, format!("{name} is a variable of the source, and this driver has none")).into())
    }
    /// Prepares the launch of a user's kernel.
    fn launch_own(
        code: &Self::Code,
        shape: &LaunchShape,
        gpu: &Gpu,
        arguments: Vec<KernelArgument<GuardedMemory<Self::Whole>>>,
    ) -> Result<Self::Launch, Failure>;
    /// Makes the driver finish compiling a kernel, as some do only at the first launch.
    fn warm_up(_: &Self::Launch) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Runs kernels in order, `n_times` over; returns the device time in nanoseconds.
    fn run(&self, launches: &[Self::Launch], n_times: u32) -> Result<f64, Self::Error>;
    /// Records a sequence of launches for repeated runs.
    fn record(&self, launches: &[Self::Launch]) -> Result<Self::Recorded, Self::Error>;
    /// Runs a recorded sequence once.
    fn run_recorded(&self, launches: &[Self::Launch], recorded: &Self::Recorded) -> Result<(), Self::Error>;
    /// Waits until all submitted work is done.
    fn finish(&self) -> Result<(), Self::Error>;
    /// Whether an error is due to a lack of memory.
    fn lacks_memory(error: &Self::Error) -> bool;
    /// Whether the device cannot be trusted any more after an error.
    fn is_lost(&self, error: &Self::Error) -> bool;
    /// Whether the device itself failed, whatever runs on it.
    fn is_of_device(error: &Self::Error) -> bool;
}

/// Persistent cache of GPU machine code, keyed by texts that determine it.
pub trait KeptCode: Sync {
    /// Finds cached code.
    fn find(&self, determined_by: &[&dyn Display]) -> Option<Vec<u8>>;
    /// Stores code, if possible.
    fn keep(&self, determined_by: &[&dyn Display], code: &[u8]);
}

/// Cache that keeps nothing, as the code of trials is built only once.
impl KeptCode for () {
    fn find(&self, _: &[&dyn Display]) -> Option<Vec<u8>> {
        None
    }

    fn keep(&self, _: &[&dyn Display], _: &[u8]) {}
}

/// Device memory between canaries.
pub type DriverMemory<D> = GuardedMemory<<D as Driver>::Whole>;

/// Launch configuration of a kernel.
pub struct LaunchShape {
    /// Name of the kernel in the code.
    pub name: String,
    /// Number of blocks along x, y and z.
    pub grid: [i64; 3],
    /// Number of threads per block along x, y and z.
    pub block: [i64; 3],
    /// Shared memory per block in bytes, as far as known before compilation.
    pub shared_bytes: u64,
}

impl LaunchShape {
    /// Launch configuration of a generated kernel on a target.
    pub fn of(kernel: &GpuKernel, program: &GpuProgram, target: &Target) -> LaunchShape {
        let Abi { grid, block, shared_bytes, .. } = Abi::of(program, kernel, target);
        LaunchShape { name: kernel.name.clone(), grid, block, shared_bytes }
    }

    /// Number of threads per block.
    pub fn n_threads(&self) -> i64 {
        self.block.iter().fold(1, |n, along| n.saturating_mul(*along))
    }
}

/// Checks that a device can run a kernel of this launch configuration.
pub fn fits(kernel: &LaunchShape, gpu: &Gpu) -> Result<(), String> {
    let within = |what: &str, sizes: [i64; 3], most: [u32; 3]| {
        let over = sizes.into_iter().zip(most).zip(["x", "y", "z"]).find(|((n, most), _)| *n > i64::from(*most));
        over.map_or(Ok(()), |((n, most), axis)| {
            Err(format!("kernel {} has {n} {what} along {axis}, of which there may be {most}", kernel.name))
        })
    };
    within("blocks", kernel.grid, gpu.most_blocks_along)?;
    within("threads", kernel.block, gpu.most_threads_along)?;
    let (n_threads, shared_bytes) = (kernel.n_threads(), kernel.shared_bytes);
    if n_threads > i64::from(gpu.most_threads) {
        let most = gpu.most_threads;
        return Err(format!("kernel {} has blocks of {n_threads} threads, of which there may be {most}", kernel.name));
    }
    if shared_bytes > gpu.most_shared_bytes {
        let most = gpu.most_shared_bytes;
        return Err(format!("kernel {} takes {shared_bytes} bytes of shared memory of {most}", kernel.name));
    }
    Ok(())
}

/// Sets the environment so that PoCL keeps compiled code in a folder, if one is given, and other drivers keep
/// none: no driver may reuse code compiled for another process. The caller must have no other thread yet.
pub(crate) fn keep_compiled_in(folder: Option<&Path>) {
    // SAFETY: there is no other thread, as the caller promises.
    unsafe {
        if let Some(folder) = folder {
            std::env::set_var("POCL_CACHE_DIR", folder);
        }
        std::env::set_var("CUDA_CACHE_DISABLE", "1");
    }
}

/// Failure of an error that the code causes.
pub fn of_compiler<D: Driver>(error: D::Error) -> Failure {
    failure::<D>(ErrorClass::CompileErrorDevice, &error)
}

/// Failure of an error that a run causes.
pub fn of_device<D: Driver>(error: D::Error) -> Failure {
    failure::<D>(ErrorClass::RuntimeError, &error)
}

fn failure<D: Driver>(class: ErrorClass, error: &D::Error) -> Failure {
    let (lacks_memory, is_of_device) = (D::lacks_memory(error), D::is_of_device(error));
    Failure { class, message: error.to_string(), lacks_memory, is_of_device }
}
