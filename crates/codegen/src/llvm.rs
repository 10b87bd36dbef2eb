//! CPU code through LLVM.

mod address;
mod api;
pub(crate) mod cpu;
mod deinterleave;
mod export;
pub(crate) mod generate;
mod interleave;
mod machine;
pub(crate) mod map;
mod math;
mod memory;
pub(crate) mod plan;
mod read;
pub(crate) mod unit;
mod value;

use std::time::Instant;

use tilewright_ir::Program;
use tilewright_ir::target::Target;

pub use machine::{host_arch, host_cpu, llvm_version};

use crate::{CompileError, CompileTimes, Emit, x86};
use api::Module;
use plan::ScratchLayout;
use unit::{Units, Uses};

/// The passes that code goes through before instruction selection.
///
/// The generator hoists, reuses loads and unrolls by itself, so turning stack slots into values is all that is needed:
/// no longer list gave faster code for matrix products (AMD Zen 5, November 2026), and `default<O2>` takes 10 ms more.
const PASSES: &str = "function(mem2reg)";

/// What compiling gives: the bytes asked for, and how the scratch memory is laid out.
pub struct Compiled {
    /// Text or object.
    pub bytes: Vec<u8>,
    /// Sizes of the scratch memory.
    pub scratch: ScratchLayout,
    /// What the code shares with that of other programs.
    pub uses: Uses,
    /// Where the time went.
    pub times: CompileTimes,
}

/// What compiling with our own back end gives.
pub struct Quick {
    /// Code and constants.
    pub image: x86::Image,
    /// Sizes of the scratch memory.
    pub scratch: ScratchLayout,
    /// What the code shares with that of other programs.
    pub uses: Uses,
    /// Where the time went.
    pub times: CompileTimes,
}

/// Compiles a program with our own back end; as for [`compile`], the code refers to the units that there are. `external` has
/// the addresses of the functions that are no units.
pub fn compile_quickly(
    program: &Program,
    target: &Target,
    units: &Units,
    external: fn(&str) -> Option<usize>,
) -> Result<Quick, CompileError> {
    machine::with_machine(target, |machine| {
        let mut times = CompileTimes::default();
        let start = Instant::now();
        let plan = plan::plan(program, target)?;
        let module = Module::new(&program.name, false);
        machine::prepare_module(&module, machine, target);
        let (module, uses) = generate::generate(module, program, target, &plan, units, None)?;
        times.generate_ns = start.elapsed().as_nanos() as u64;
        let start = Instant::now();
        let outside = |name: &str| units.address(name).or_else(|| external(name));
        let functions = read::functions(&module, &outside).map_err(CompileError::NotQuick)?;
        times.passes_ns = start.elapsed().as_nanos() as u64;
        let start = Instant::now();
        let image = x86::compile(functions, target).map_err(CompileError::NotQuick)?;
        times.machine_code_ns = start.elapsed().as_nanos() as u64;
        Ok(Quick { image, scratch: plan.scratch, uses, times })
    })
}

/// Compiles a program; the code refers to the units that there are, and defines those that it lacks. With a prefix
/// it is exported.
pub fn compile(
    program: &Program,
    target: &Target,
    units: &Units,
    prefix: Option<&str>,
    what: Emit,
) -> Result<Compiled, CompileError> {
    machine::with_machine(target, |machine| {
        let mut times = CompileTimes::default();
        let start = Instant::now();
        let plan = plan::plan(program, target)?;
        let keep_names = matches!(what, Emit::Llvm | Emit::LlvmOptimized);
        let module = Module::new(&program.name, keep_names);
        machine::prepare_module(&module, machine, target);
        let (module, uses) = generate::generate(module, program, target, &plan, units, prefix)?;
        times.generate_ns = start.elapsed().as_nanos() as u64;
        if cfg!(debug_assertions)
            && let Err(why) = module.verify()
        {
            panic!("generated code is well formed: {why}\n{}", module.print());
        }
        let mut bytes = Vec::new();
        if what == Emit::Llvm {
            bytes = module.print().into_bytes();
        } else {
            let start = Instant::now();
            machine::run_passes(&module, machine, PASSES)?;
            times.passes_ns = start.elapsed().as_nanos() as u64;
            let start = Instant::now();
            match what {
                Emit::Llvm => {}
                Emit::LlvmOptimized => bytes = module.print().into_bytes(),
                Emit::Asm => bytes = machine::emit_file(&module, machine, machine::FileType::Assembly)?,
                Emit::Object => bytes = machine::emit_file(&module, machine, machine::FileType::Object)?,
            }
            times.machine_code_ns = start.elapsed().as_nanos() as u64;
        }
        Ok(Compiled { bytes, scratch: plan.scratch, uses, times })
    })
}
