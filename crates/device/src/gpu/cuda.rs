//! NVIDIA's GPUs.

use super::{Driver, GuardedSpan, KeptCode, KernelArgument, LaunchShape, of_compiler};
use crate::cuda::{
    self, Allocation, AssembleError, CudaContext, CudaError, CudaGraph, CudaLaunch, CudaMemory, CudaModule,
    PtxAssembler,
};
use crate::failure::Failure;
use std::fmt::Display;
use std::sync::Arc;
use tilewright_codegen::{ARGUMENT_ALIGN, compile_gpu};
use tilewright_ir::Target;
use tilewright_ir::gpu::{Abi, GpuKernel, GpuProgram};
use tilewright_ir::target::Gpu;
use tilewright_search::ErrorClass;

/// Context on a GPU of NVIDIA, with the assembler of its code.
#[derive(Clone)]
pub struct Cuda {
    context: CudaContext,
    assembler: PtxAssembler,
}

impl Cuda {
    /// Opens the device of a target.
    ///
    /// # Errors
    /// If there is no such device, or its driver refuses.
    pub fn new(target: &Target) -> Result<Cuda, CudaError> {
        let context = CudaContext::new(target.gpu.map_or(0, |gpu| gpu.number))?;
        Ok(Cuda { context, assembler: PtxAssembler::find(&target.cpu) })
    }

    /// Emulated device that belongs to this thread.
    #[cfg(test)]
    pub(crate) fn emulated() -> Cuda {
        Cuda { context: cuda::emulated(), assembler: PtxAssembler::Driver }
    }
}

impl Driver for Cuda {
    type Whole = Allocation;
    type Code = Arc<CudaModule>;
    type Launch = CudaLaunch;
    type Recorded = CudaGraph;
    type Error = CudaError;

    fn alignment(&self) -> Result<u64, CudaError> {
        Ok(ARGUMENT_ALIGN)
    }

    fn memory(&self, n_bytes: u64) -> Result<CudaMemory, CudaError> {
        CudaMemory::new(&self.context, n_bytes)
    }

    fn build(&self, program: &GpuProgram, target: &Target, kept: &dyn KeptCode) -> Result<Arc<CudaModule>, Failure> {
        // Everything that the code is generated from, as generating it takes longer than assembling it.
        let (program_text, target_text) = (format!("{program:?}"), format!("{target:?}"));
        let assembler = self.assembler.name();
        let determined_by: [&dyn Display; 3] = [&program_text, &target_text, &assembler];
        let known = kept.find(&determined_by).and_then(|code| CudaModule::load(&self.context, &code).ok());
        if let Some(code) = known {
            return Ok(Arc::new(code));
        }
        let module = compile_gpu(program, target)?;
        let class = |why: &AssembleError| match why {
            AssembleError::TooLong => ErrorClass::BuildTimeout,
            AssembleError::Refused(_) | AssembleError::Io(_) => ErrorClass::CompileErrorDevice,
        };
        let code = self.assembler.assemble(&module.code, &target.cpu);
        let code = code.map_err(|why| Failure::from((class(&why), why.to_string())))?;
        let loaded = CudaModule::load(&self.context, &code).map_err(of_compiler::<Cuda>)?;
        kept.keep(&determined_by, &code);
        Ok(Arc::new(loaded))
    }

    fn launch(
        code: &Arc<CudaModule>,
        kernel: &GpuKernel,
        program: &GpuProgram,
        target: &Target,
        arguments: Vec<GuardedSpan<CudaMemory>>,
    ) -> Result<CudaLaunch, Failure> {
        let gpu = target.gpu.as_ref().expect("invariant: the target is a GPU");
        let abi = Abi::of(program, kernel, target);
        let shape = LaunchShape { shared_bytes: abi.dynamic_shared_bytes, ..LaunchShape::of(kernel, program, target) };
        let maps = abi.maps.iter().map(|map| {
            let span = &arguments[abi.array_of(map)];
            let address = span.memory.address() + span.at;
            cuda::encode_map(code.context(), &program.program, map, address).map(KernelArgument::Value)
        });
        let maps: Vec<_> = maps.collect::<Result<_, _>>().map_err(of_compiler::<Cuda>)?;
        let arguments = arguments.into_iter().map(KernelArgument::from).chain(maps).collect();
        Cuda::launch_own(code, &shape, gpu, arguments)
    }

    fn load(&self, code: &[u8]) -> Result<Arc<CudaModule>, Failure> {
        CudaModule::load(&self.context, code).map(Arc::new).map_err(of_compiler::<Cuda>)
    }

    fn load_ptx(&self, text: &str, target: &Target) -> Option<Result<Arc<CudaModule>, Failure>> {
        let assembled = self.assembler.assemble(text.as_bytes(), &target.cpu);
        let code = assembled.map_err(|why| Failure::from((ErrorClass::CompileErrorDevice, why.to_string())));
        Some(code.and_then(|code| self.load(&code)))
    }

    fn write_variable(code: &Arc<CudaModule>, name: &str, bytes: &[u8]) -> Result<(), Failure> {
        code.write(name, bytes).map_err(of_compiler::<Cuda>)
    }

    fn launch_own(
        code: &Arc<CudaModule>,
        shape: &LaunchShape,
        _: &Gpu,
        arguments: Vec<KernelArgument<CudaMemory>>,
    ) -> Result<CudaLaunch, Failure> {
        CudaLaunch::new(code, &shape.name, shape.grid, shape.block, shape.shared_bytes, arguments)
            .map_err(of_compiler::<Cuda>)
    }

    fn run(&self, launches: &[CudaLaunch], n_times: u32) -> Result<f64, CudaError> {
        cuda::run(&self.context, launches, n_times)
    }

    fn record(&self, launches: &[CudaLaunch]) -> Result<CudaGraph, CudaError> {
        CudaGraph::launches(&self.context, launches)
    }

    fn run_recorded(&self, _: &[CudaLaunch], recorded: &CudaGraph) -> Result<(), CudaError> {
        recorded.run().map(drop)
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

    fn is_of_device(error: &CudaError) -> bool {
        error.is_of_device()
    }
}
