//! GPUs by whatever driver: memory, code, launches, and what runs them; plans of whole models.

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
    /// Memory as the driver gives it.
    type Whole: DeviceMemory<Error = Self::Error> + Send + Sync + 'static;
    /// Kernels, as the device takes them.
    type Code: Send + 'static;
    /// A kernel with its arguments and its grid.
    type Launch: Send + Sync + 'static;
    /// Launches that the device carries out as one, where it has such.
    type Recorded: Send + Sync + 'static;
    /// Error of the driver.
    type Error: std::error::Error + 'static;

    /// Alignment, in bytes, of a part of memory that is passed as an argument.
    fn alignment(&self) -> Result<u64, Self::Error>;
    /// Memory of so many bytes, of which nothing is known.
    fn memory(&self, n_bytes: u64) -> Result<GuardedMemory<Self::Whole>, Self::Error>;
    /// Builds the kernels of a program, or loads what is kept of an earlier build.
    fn build(&self, program: &GpuProgram, target: &Target, kept: &dyn KeptCode) -> Result<Self::Code, Failure>;
    /// A kernel on its arguments.
    fn launch(
        code: &Self::Code,
        kernel: &GpuKernel,
        program: &GpuProgram,
        target: &Target,
        arguments: Vec<GuardedSpan<GuardedMemory<Self::Whole>>>,
    ) -> Result<Self::Launch, Failure>;
    /// The kernels that another process built of a source of the user's.
    fn load(&self, code: &[u8]) -> Result<Self::Code, Failure>;
    /// Code of a text in PTX, for a driver that takes such; `None` for others.
    fn load_ptx(&self, _: &str, _: &Target) -> Option<Result<Self::Code, Failure>> {
        None
    }
    /// Writes to a variable of the code, where the driver knows of such.
    fn write_variable(_: &Self::Code, name: &str, _: &[u8]) -> Result<(), Failure> {
        Err((ErrorClass::Unknown, format!("{name} is a variable of the source, and this driver has none")).into())
    }
    /// A kernel of the user's.
    fn launch_own(
        code: &Self::Code,
        shape: &LaunchShape,
        gpu: &Gpu,
        arguments: Vec<KernelArgument<GuardedMemory<Self::Whole>>>,
    ) -> Result<Self::Launch, Failure>;
    /// Has the driver make a kernel's code ready, as some do only when it is launched.
    fn warm_up(_: &Self::Launch) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Runs kernels one after the other, so many times; nanoseconds of the device.
    fn run(&self, launches: &[Self::Launch], n_times: u32) -> Result<f64, Self::Error>;
    /// Makes ready what is run often.
    fn record(&self, launches: &[Self::Launch]) -> Result<Self::Recorded, Self::Error>;
    /// Runs launches that are recorded, once.
    fn run_recorded(&self, launches: &[Self::Launch], recorded: &Self::Recorded) -> Result<(), Self::Error>;
    /// Waits until all that was asked for is done.
    fn finish(&self) -> Result<(), Self::Error>;
    /// Whether it is for want of memory.
    fn lacks_memory(error: &Self::Error) -> bool;
    /// Whether the device may give no right answer any more after a failed run.
    fn is_lost(&self, error: &Self::Error) -> bool;
}

/// Machine code that outlives the process, under texts that determine it.
pub trait KeptCode: Sync {
    /// Finds the code that is kept under these texts.
    fn find(&self, determined_by: &[&dyn Display]) -> Option<Vec<u8>>;
    /// Keeps code under these texts, where that is possible.
    fn keep(&self, determined_by: &[&dyn Display], code: &[u8]);
}

/// Keeps nothing: code of trials is built once.
impl KeptCode for () {
    fn find(&self, _: &[&dyn Display]) -> Option<Vec<u8>> {
        None
    }

    fn keep(&self, _: &[&dyn Display], _: &[u8]) {}
}

/// Memory of a driver's device between canaries.
pub type DriverMemory<D> = GuardedMemory<<D as Driver>::Whole>;

/// Name of a kernel and the size of a launch.
pub struct LaunchShape {
    /// Name in the code.
    pub name: String,
    /// Blocks along each axis.
    pub grid: [i64; 3],
    /// Threads of a block along each axis.
    pub block: [i64; 3],
    /// Bytes that the threads of a block share, as far as they are known before it is built.
    pub shared_bytes: u64,
}

impl LaunchShape {
    /// Makes the shape of a generated kernel on a target.
    pub fn of(kernel: &GpuKernel, program: &GpuProgram, target: &Target) -> LaunchShape {
        let Abi { grid, block, shared_bytes, .. } = Abi::of(program, kernel, target);
        LaunchShape { name: kernel.name.clone(), grid, block, shared_bytes }
    }

    /// Threads of a block.
    pub fn n_threads(&self) -> i64 {
        self.block.iter().fold(1, |n, along| n.saturating_mul(*along))
    }
}

/// Whether a device can run a kernel, as far as its sizes say.
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

/// Has PoCL keep what it has compiled in a folder, where there is one, and others keep nothing: no driver is
/// to find what it has compiled for others. The caller has no other thread yet.
pub(crate) fn keep_compiled_in(folder: Option<&Path>) {
    // SAFETY: there is no other thread, as the caller knows.
    unsafe {
        if let Some(folder) = folder {
            std::env::set_var("POCL_CACHE_DIR", folder);
        }
        std::env::set_var("CUDA_CACHE_DISABLE", "1");
    }
}

/// The fault of code.
pub fn of_compiler<D: Driver>(error: D::Error) -> Failure {
    let lacks_memory = D::lacks_memory(&error);
    Failure { class: ErrorClass::CompileErrorDevice, message: error.to_string(), lacks_memory }
}

/// The fault of a run.
pub fn of_device<D: Driver>(error: D::Error) -> Failure {
    let lacks_memory = D::lacks_memory(&error);
    Failure { class: ErrorClass::RuntimeError, message: error.to_string(), lacks_memory }
}
