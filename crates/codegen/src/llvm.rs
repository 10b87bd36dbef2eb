//! Compilation through LLVM.

mod machine;
mod module;
mod print;

use std::time::Instant;

use tilewright_ir::target::Target;

pub use machine::{host_cpu, llvm_version};

use crate::ssa;
use crate::{CompileError, CompileTimes, Emit};
use module::LlvmModule;

/// LLVM passes before instruction selection.
///
/// The generator itself hoists, reuses loads and unrolls, so that only the promotion of stack slots to values
/// remains: no longer list gave faster code for matrix products (AMD Zen 5, November 2026), and `default<O2>`
/// takes 10 ms more.
const PASSES: &str = "function(mem2reg)";

/// Compiles a module to text or an object; also returns the time by stage.
pub fn compile(source: &ssa::Module, target: &Target, what: Emit) -> Result<(Vec<u8>, CompileTimes), CompileError> {
    machine::with_machine(target, |machine| {
        let mut times = CompileTimes::default();
        let start = Instant::now();
        let module = LlvmModule::new(&source.name, matches!(what, Emit::Llvm | Emit::LlvmOptimized));
        machine::prepare_module(&module, machine, target);
        print::print(source, target, &module);
        if cfg!(debug_assertions)
            && let Err(why) = module.verify()
        {
            panic!("generated code is well formed: {why}\n{}", module.print());
        }
        if what != Emit::Llvm {
            machine::run_passes(&module, machine, PASSES)?;
        }
        times.passes_ns = start.elapsed().as_nanos() as u64;
        let start = Instant::now();
        let bytes = match what {
            Emit::Ssa => unreachable!("it is none of LLVM's"),
            Emit::Llvm | Emit::LlvmOptimized => module.print().into_bytes(),
            Emit::Asm => machine::emit_file(&module, machine, machine::FileType::Assembly)?,
            Emit::Object => machine::emit_file(&module, machine, machine::FileType::Object)?,
        };
        times.machine_code_ns = start.elapsed().as_nanos() as u64;
        Ok((bytes, times))
    })
}
