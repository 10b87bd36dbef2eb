//! Stand-ins for LLVM in a build without it.

use tilewright_ir::Target;

use crate::ssa::Module;
use crate::{CompileError, CompileTimes, Emit};

/// Refuses.
pub fn compile(_: &Module, _: &Target, what: Emit) -> Result<(Vec<u8>, CompileTimes), CompileError> {
    let what = match what {
        Emit::Ssa => unreachable!("it is none of LLVM's"),
        Emit::Llvm | Emit::LlvmOptimized => "LLVM's text",
        Emit::Asm => "assembly",
        Emit::Object => "an object",
    };
    Err(CompileError::NoLlvm { what })
}

/// Names the host's CPU and features as LLVM does: not in this build.
pub fn host_cpu() -> Option<(String, String)> {
    None
}

/// Version of LLVM: none in this build.
pub fn llvm_version() -> Option<String> {
    None
}
