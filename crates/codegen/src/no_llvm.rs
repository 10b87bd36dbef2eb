//! Stand-ins for LLVM in a build without it.

use tilewright_ir::Target;

use crate::ssa::Module;
use crate::{CompileError, CompileTimes, Emit};

/// Fails, as this build has no LLVM.
pub fn compile(_: &Module, _: &Target, what: Emit) -> Result<(Vec<u8>, CompileTimes), CompileError> {
    let what = match what {
        Emit::Ssa => unreachable!("it is none of LLVM's"),
        Emit::Llvm | Emit::LlvmOptimized => "LLVM's text",
        Emit::Asm => "assembly",
        Emit::Object => "an object",
    };
    Err(CompileError::NoLlvm { what })
}

/// LLVM's name and feature string of the host's CPU; `None` unless it is a known x86 CPU.
pub fn host_cpu() -> Option<(String, String)> {
    #[cfg(target_arch = "x86_64")]
    return crate::cpu_name::host_cpu();
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Version of LLVM, `None` in this build.
pub fn llvm_version() -> Option<String> {
    None
}
