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

/// Names the host's CPU and features as LLVM does, if it is an x86 CPU that is known.
pub fn host_cpu() -> Option<(String, String)> {
    #[cfg(target_arch = "x86_64")]
    return crate::cpu_name::host_cpu();
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Version of LLVM: none in this build.
pub fn llvm_version() -> Option<String> {
    None
}
