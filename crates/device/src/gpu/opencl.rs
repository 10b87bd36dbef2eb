//! OpenCL's devices.

use super::{Driver, GuardedSpan, KeptCode, KernelArgument, LaunchShape, of_compiler};
use crate::failure::Failure;
use crate::opencl::{self, Buffers, OpenClContext, OpenClError, OpenClLaunch, OpenClMemory, OpenClProgram};
use std::ffi::CString;
use std::fmt::Display;
use std::sync::Arc;
use tilewright_codegen::opencl_c;
use tilewright_ir::Target;
use tilewright_ir::gpu::{GpuKernel, GpuProgram};
use tilewright_ir::target::Gpu;
use tilewright_search::ErrorClass;

/// Context on an OpenCL device.
#[derive(Clone)]
pub struct OpenCl {
    context: OpenClContext,
    is_cpu: bool,
    /// Device and driver, with its version, in words.
    maker: String,
}

impl OpenCl {
    /// Opens the device of a target.
    ///
    /// # Errors
    /// If there is no such device, or its driver refuses.
    pub fn new(target: &Target) -> Result<OpenCl, OpenClError> {
        let device = opencl::device_of(target)?;
        let (context, is_cpu) = (OpenClContext::new(&device)?, device.is_cpu);
        Ok(OpenCl { context, is_cpu, maker: device.maker()? })
    }

    /// Compiles a source to the driver's binary form, which another process can [load](Driver::load). For a
    /// CPU this is the source with its options, as its driver compiles when the work-group size is known, and
    /// has an on-disk cache of its own.
    ///
    /// # Errors
    /// If the compiler refuses it.
    pub fn compiled(&self, source: &str, options: &str) -> Result<Vec<u8>, Failure> {
        let whole = format!("{options}\n{source}").into_bytes();
        if self.is_cpu {
            return self.load(&whole).map(|_| whole);
        }
        let code = self.of_source(source, options)?;
        code.binary().map_err(of_compiler::<OpenCl>)
    }

    /// Loads cached code of a source, or compiles and caches it.
    ///
    /// # Errors
    /// If the compiler refuses it.
    pub fn kept(&self, source: &str, kept: &dyn KeptCode) -> Result<OpenClProgram, Failure> {
        let determined_by: [&dyn Display; 2] = [&self.maker, &source];
        // Binaries that the driver no longer accepts are built anew.
        let known = kept.find(&determined_by).and_then(|binary| OpenClProgram::of_binary(&self.context, &binary).ok());
        if let Some(code) = known {
            return Ok(code);
        }
        let code = OpenClProgram::build(&self.context, source, c"").map_err(of_compiler::<OpenCl>)?;
        if let Ok(binary) = code.binary() {
            kept.keep(&determined_by, &binary);
        }
        Ok(code)
    }

    /// Whether code of a source is cached.
    pub(super) fn is_kept(&self, source: &str, kept: &dyn KeptCode) -> bool {
        kept.find(&[&self.maker, &source]).is_some()
    }

    fn of_source(&self, source: &str, options: &str) -> Result<OpenClProgram, Failure> {
        let options = CString::new(options).map_err(|why| (ErrorClass::CompileErrorDevice, why.to_string()))?;
        OpenClProgram::build(&self.context, source, &options).map_err(of_compiler::<OpenCl>)
    }

    /// Whether the device is this machine's CPU.
    pub fn is_cpu(&self) -> bool {
        self.is_cpu
    }
}

impl Driver for OpenCl {
    type Whole = Buffers;
    type Code = Arc<OpenClProgram>;
    type Launch = OpenClLaunch;
    type Recorded = ();
    type Error = OpenClError;

    fn alignment(&self) -> Result<u64, OpenClError> {
        self.context.alignment()
    }

    fn memory(&self, n_bytes: u64) -> Result<OpenClMemory, OpenClError> {
        OpenClMemory::new(&self.context, n_bytes)
    }

    fn build(&self, program: &GpuProgram, target: &Target, kept: &dyn KeptCode) -> Result<Arc<OpenClProgram>, Failure> {
        self.kept(&opencl_c(program, target), kept).map(Arc::new)
    }

    fn launch(
        code: &Arc<OpenClProgram>,
        kernel: &GpuKernel,
        program: &GpuProgram,
        target: &Target,
        arguments: Vec<GuardedSpan<OpenClMemory>>,
    ) -> Result<OpenClLaunch, Failure> {
        let gpu = target.gpu.as_ref().expect("invariant: an OpenCL target has what a GPU has");
        let arguments = arguments.into_iter().map(KernelArgument::from).collect();
        OpenCl::launch_own(code, &LaunchShape::of(kernel, program, target), gpu, arguments)
    }

    fn load(&self, code: &[u8]) -> Result<Arc<OpenClProgram>, Failure> {
        if !self.is_cpu {
            return OpenClProgram::of_binary(&self.context, code).map(Arc::new).map_err(of_compiler::<OpenCl>);
        }
        let text = String::from_utf8_lossy(code);
        let (options, source) = text.split_once('\n').unwrap_or_default();
        self.of_source(source, options).map(Arc::new)
    }

    fn launch_own(
        code: &Arc<OpenClProgram>,
        shape: &LaunchShape,
        gpu: &Gpu,
        arguments: Vec<KernelArgument<OpenClMemory>>,
    ) -> Result<OpenClLaunch, Failure> {
        let sizes = |axes: [i64; 3]| axes.map(|n| usize::try_from(n).unwrap_or(0));
        let launch = OpenClLaunch::new(code, &shape.name, sizes(shape.grid), sizes(shape.block), arguments);
        let launch = launch.map_err(of_compiler::<OpenCl>)?;
        let (most_threads, local_bytes) = launch.limits().map_err(of_compiler::<OpenCl>)?;
        let refused = |why: String| Err((ErrorClass::CompileErrorDevice, why).into());
        let (name, n, most_bytes) = (&shape.name, shape.n_threads(), gpu.most_shared_bytes);
        if n as u64 > most_threads {
            return refused(format!("kernel {name} has blocks of {n} threads, its code at most {most_threads}"));
        }
        if local_bytes > most_bytes {
            return refused(format!("kernel {name} takes {local_bytes} bytes of local memory of {most_bytes}"));
        }
        Ok(launch)
    }

    fn warm_up(launch: &OpenClLaunch) -> Result<(), OpenClError> {
        launch.warm_up()
    }

    fn run(&self, launches: &[OpenClLaunch], n_times: u32) -> Result<f64, OpenClError> {
        opencl::run(&self.context, launches, n_times)
    }

    fn record(&self, _: &[OpenClLaunch]) -> Result<(), OpenClError> {
        Ok(())
    }

    fn run_recorded(&self, launches: &[OpenClLaunch], (): &()) -> Result<(), OpenClError> {
        self.run(launches, 1).map(drop)
    }

    fn finish(&self) -> Result<(), OpenClError> {
        self.context.finish()
    }

    fn lacks_memory(error: &OpenClError) -> bool {
        error.lacks_memory()
    }

    fn is_lost(&self, _: &OpenClError) -> bool {
        // A GPU's driver does not report that.
        !self.is_cpu
    }

    fn is_of_device(error: &OpenClError) -> bool {
        error.is_of_device()
    }
}
