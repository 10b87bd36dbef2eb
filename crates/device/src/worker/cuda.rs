//! NVIDIA's GPUs as workers use them.

use super::gpu::{self, Driver, of_compiler};
use super::{Failure, Threads};
use crate::cuda::{self, Assembler, Code, Context, CudaError, Launch, Memory};
use crate::data::Argument;
use std::sync::Arc;
use tilewright_codegen::{CompileError, compile_gpu};
use tilewright_ir::gpu::{GpuProgram, Kernel};
use tilewright_ir::op::Workload;
use tilewright_ir::{Program, Target};
use tilewright_tune::ErrorClass;

/// The threads for an assignment.
///
/// # Errors
/// Where there is no such device, or it has not the memory.
pub fn threads(
    workload: Workload,
    untuned: Program,
    target: Target,
    arguments: Vec<Argument>,
) -> Result<Threads, Box<dyn std::error::Error>> {
    // SAFETY: this process has no other thread yet. The driver is not to find what it has assembled for
    // others.
    unsafe { std::env::set_var("CUDA_CACHE_DISABLE", "1") };
    let context = Context::new(target.gpu.map_or(0, |gpu| gpu.number))?;
    gpu::threads(Cuda { context, assembler: Assembler::find() }, workload, untuned, target, arguments)
}

#[derive(Clone)]
struct Cuda {
    context: Context,
    assembler: Assembler,
}

impl Driver for Cuda {
    type Memory = Memory;
    type Code = Arc<Code>;
    type Launch = Launch;
    type Error = CudaError;

    fn memory(&self, n_bytes: u64) -> Result<Memory, CudaError> {
        Memory::new(&self.context, n_bytes)
    }

    fn fill(memory: &Memory, byte: u8) -> Result<(), CudaError> {
        memory.fill(byte)
    }

    fn write(memory: &Memory, from: &[u8]) -> Result<(), CudaError> {
        memory.write(from)
    }

    fn read(memory: &Memory, to: &mut [u8]) -> Result<(), CudaError> {
        memory.read(to)
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
        arguments: Vec<Arc<Memory>>,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;
    use crate::protocol::Caches;
    use crate::protocol::{Plan, Reply, Request, Source};
    use std::ops::ControlFlow;
    use std::os::fd::AsFd;

    /// A product in tiles of 16 by 16, a thread an element; `ROW` is where a thread writes.
    const PRODUCT: &str = "program \"product\"
buffer A: f32[32, 24] global input
buffer B: f32[24, 48] global input
buffer C: f32[32, 48] global output
buffer S: f32[16, 8] shared temporary
buffer T: f32[1] register temporary
loops by, bx, ty, tx, ko, ki, c
run {
  block.y by in 2 { block.x bx in 3 {
    alloc T
    for ko in 3 {
      alloc S
      thread.y ty in 16 { thread.x tx in 8 { S[ty, tx] = A[16*by + ty, 8*ko + tx] } }
      thread.y ty in 16 { thread.x tx in 16 {
        for ki in 8 { C[ROW, 16*bx + tx] += S[ty, ki] * B[8*ko + ki, 16*bx + tx] first ko + ki == 0 }
      } }
    }
  } }
}";

    /// Builds, checks and times a program in the emulator; what the worker says last.
    fn answer(program: &str) -> Reply {
        let workload = Workload::parse("matmul:m=32,n=48,k=24").unwrap();
        let untuned = workload.program();
        let data = Data::new(&untuned, 1, 1, &|_| ControlFlow::Continue(())).unwrap();
        let arguments = Argument::all(&untuned, data.file.as_fd(), &data.offsets).unwrap();
        let driver = Cuda { context: cuda::emulated(), assembler: Assembler::Driver };
        let target = Target::named("sm_90a").unwrap();
        let (mut builder, mut tester) = gpu::threads(driver, workload, untuned, target, arguments).unwrap();
        let source = Source::Lowered(program.to_owned());
        match builder.answer(Request::Build { id: 1, source, quickly: false }) {
            Some(Reply::Built { .. }) => {}
            other => return other.unwrap(),
        }
        let (caches, at_best_pace) = (Caches::Warm, false);
        let plan = Plan { min_time_ns: 1.0, min_samples: 2, alone_ns: 0.0, leading_ns: None, caches, at_best_pace };
        match tester.answer(Request::Check { id: 1, plan: None }) {
            Some(Reply::Checked { relative_error, .. }) => assert!(relative_error < 1e-6, "{relative_error}"),
            other => return other.unwrap(),
        }
        tester.answer(Request::Run { id: 1, plan }).unwrap()
    }

    #[test]
    fn kernels_are_built_checked_and_timed() {
        match answer(&PRODUCT.replace("ROW", "16*by + ty")) {
            Reply::Timed { samples_ns, .. } => assert!(samples_ns.len() >= 2 && samples_ns.iter().all(|ns| *ns > 0.0)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_wrong_has_its_class() {
        let class = |program: &str| match answer(program) {
            Reply::Failed { class, message, .. } => (class.0, message),
            other => panic!("{other:?}"),
        };
        let (is, why) = class("nonsense");
        assert_eq!(is, ErrorClass::InstantiationError, "{why}");
        let (is, why) = class(&PRODUCT.replace("ROW", "16*by + 15 - ty"));
        assert_eq!(is, ErrorClass::WrongAnswer, "{why}");
        // A block that shares more than there is.
        let (is, why) = class(&PRODUCT.replace("ROW", "16*by + ty").replace("S: f32[16, 8]", "S: f32[16000, 8]"));
        assert_eq!(is, ErrorClass::InstantiationError, "{why}");
    }
}
