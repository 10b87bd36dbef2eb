//! Code generation for lowered programs: machine code, objects, PTX and OpenCL C.
//!
//! [`compile`] creates a [`CompiledKernel`] that this process can call; [`emit`] returns LLVM IR, assembly or
//! a relocatable object for any target. The libLLVM of the Rust toolchain generates the code, so nothing
//! needs to be installed. [`Compiler::compile_quickly`] avoids LLVM's back end, for searches that run each
//! kernel only a few times.
//!
//! The object of a [`CompiledKernel`] has C functions with one signature: for the program's `body`, for its
//! `prepare` part, and for its `finish` part if there is one:
//!
//! ```c
//! void tilewright_run(void **buffers, void *scratch, const Runtime *runtime);
//! void tilewright_prepare(void **buffers, void *scratch, const Runtime *runtime);
//! void tilewright_finish(void **buffers, void *scratch, const Runtime *runtime);
//! ```
//!
//! A part that uses open sizes takes a fourth parameter, `const int64_t *sizes`: the values of all of the
//! program's open sizes, in order. Other parts ignore it.
//!
//! `buffers` are the program's arguments in order, then its kept buffers. They do not overlap, and are
//! aligned to 64 bytes (arguments to less if [`ArgumentAlign`] says so). `scratch` has
//! [`scratch_layout`]`.bytes(n_threads)` bytes, aligned to 128. [`Runtime`] says how a parallel loop runs.
//! The object calls only `memcpy`, `memmove`, `memset` and functions of the C mathematics library.
//!
//! [`export`] creates an object for C programs: its functions have unique names, check their arguments, and
//! return a status code. An [`Interface`] describes them, also as a C header.

mod align;
#[cfg(all(target_arch = "x86_64", any(test, not(feature = "llvm"))))]
mod cpu_name;
mod elsewhere;
mod export;
mod generate;
mod gpu;
#[cfg(feature = "llvm")]
mod llvm;
#[cfg(not(feature = "llvm"))]
#[path = "no_llvm.rs"]
mod llvm;
mod loader;
mod map;
mod number;
mod opencl;
mod ssa;
mod x86;

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use thiserror::Error;
use tilewright_ir::target::Arch;
use tilewright_ir::{OpenSize, Part, Program, Target};

use generate::GenerateOptions;
use generate::plan::{self, MemoryPlan};
use generate::unit::{ProgramUnits, Units};

pub use align::{ARGUMENT_ALIGN, ArgumentAlign};
pub use elsewhere::{LinkAddresses, LinkedImage, Object};
pub use export::{CallerBuffer, Interface, dlpack};
pub use generate::plan::{SCRATCH_ALIGN, ScratchLayout};
pub use gpu::{GpuModule, compile_gpu, emit_gpu};
pub use llvm::{host_cpu, llvm_version};
pub use opencl::opencl_c;

/// Reason why a program cannot be compiled.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CompileError {
    /// Loop program with a GPU target, which requires kernels; an error of the caller.
    #[error("{target} is a GPU, and this is code for CPUs")]
    NotCpu {
        /// The target.
        target: String,
    },
    /// Function that is not supported on the target.
    #[error("there is no code for the function `{name}` on {target}")]
    NoFunction {
        /// Name of the function in the C library.
        name: String,
        /// The target.
        target: String,
    },
    /// Temporary beyond the address space, an error of the schedule.
    #[error("buffer `{buffer}` is too large")]
    TooLarge {
        /// The buffer.
        buffer: String,
    },
    /// Temporary that no statement allocates, an error of the program.
    #[error("temporary `{buffer}` is never allocated")]
    NeverAllocated {
        /// The buffer.
        buffer: String,
    },
    /// Target that is no GPU supported by LLVM; the caller is at fault.
    #[error("LLVM has no code for the GPU {target}")]
    NotGpu {
        /// The target.
        target: String,
    },
    /// Target that is not the machine of this process, an error of the caller.
    #[error("code for {target} does not run on this machine")]
    NotHost {
        /// The target.
        target: String,
    },
    /// Linked libLLVM of another version than the bindings, an error of the installation.
    #[error("libLLVM is {found}, but LLVM {needed} is needed")]
    LlvmVersion {
        /// Version that was found.
        found: String,
        /// Required major version.
        needed: u32,
    },
    /// Request that requires LLVM, in a build without the feature `llvm`.
    #[error("{what} needs LLVM, which this build is without (build with the feature `llvm`)")]
    NoLlvm {
        /// Description of the request.
        what: &'static str,
    },
    /// Error of LLVM.
    #[error("LLVM: {0}")]
    Llvm(String),
    /// Program or target that the fast back end does not support, an expected outcome.
    #[error("no quick code: {0}")]
    NotQuick(String),
    /// Undefined symbol: a function that this process does not provide.
    #[error("code refers to the unknown function `{name}`")]
    UnknownSymbol {
        /// The function.
        name: String,
    },
    /// Object that cannot be loaded.
    #[error("cannot load object: {0}")]
    Object(String),
    /// Failed allocation of executable memory.
    #[error("no memory for code: {0}")]
    NoMemory(String),
}

/// Output format of [`emit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Emit {
    /// Tilewright's SSA form as text, which does not require LLVM.
    Ssa,
    /// LLVM IR before optimization.
    Llvm,
    /// LLVM IR after optimization.
    LlvmOptimized,
    /// Assembly text.
    Asm,
    /// A relocatable ELF object.
    Object,
}

/// Time of a compilation by stage, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompileTimes {
    /// Generation of SSA form.
    pub generate_ns: u64,
    /// Conversion to LLVM IR, and LLVM's passes; 0 for the fast back end.
    pub passes_ns: u64,
    /// Instruction selection, register allocation and encoding.
    pub machine_code_ns: u64,
    /// Loading into executable memory.
    pub load_ns: u64,
}

/// Parallel loop callback: calls `body(env, iteration, thread)` for each iteration, and returns when all are
/// done.
pub type ParallelFor = unsafe extern "C" fn(
    context: *mut c_void,
    body: unsafe extern "C" fn(env: *mut c_void, iteration: i64, thread: i64),
    env: *mut c_void,
    n_iterations: i64,
);

/// Callback with its context, with which a kernel runs parallel loops. Compiled objects rely on this memory
/// layout.
#[repr(C)]
pub struct Runtime {
    /// Context, passed to `parallel_for`.
    pub context: *mut c_void,
    /// Runs all iterations of a loop. `thread` must be below the number of threads for which the scratch
    /// memory is sized, and iterations with the same `thread` must not run concurrently.
    pub parallel_for: ParallelFor,
}

impl Runtime {
    /// Runtime that executes iterations in order on thread 0.
    pub fn serial() -> Runtime {
        unsafe extern "C" fn in_order(
            _: *mut c_void,
            body: unsafe extern "C" fn(*mut c_void, i64, i64),
            env: *mut c_void,
            n_iterations: i64,
        ) {
            for iteration in 0..n_iterations {
                // SAFETY: the kernel passes a function and the environment that the function expects.
                unsafe { body(env, iteration, 0) };
            }
        }
        Runtime { context: std::ptr::null_mut(), parallel_for: in_order }
    }
}

/// Function of a part; one without open sizes has no fourth parameter and ignores the value passed there.
type PartFunction =
    unsafe extern "C" fn(buffers: *const *mut u8, scratch: *mut u8, runtime: *const Runtime, sizes: *const i64);

/// Program compiled into this process. Dropping it releases its memory, except code shared with others.
pub struct CompiledKernel {
    /// Code of other programs that the kernel calls, then its own.
    _codes: Vec<Arc<loader::LoadedCode>>,
    /// Object file, if it defines units that others may use.
    object: Option<Vec<u8>>,
    run: PartFunction,
    prepare: PartFunction,
    finish: Option<PartFunction>,
    n_arguments: usize,
    kept_bytes: Vec<u64>,
    sizes: Vec<OpenSize>,
    scratch: ScratchLayout,
    arguments: ArgumentAlign,
    times: CompileTimes,
}

/// Compiler of programs for this process. Code shared by several programs is compiled once.
pub struct Compiler {
    target: Target,
    arguments: ArgumentAlign,
    units: Units,
    /// Units compiled by the fast back end.
    quick_units: Units,
}

impl Compiler {
    /// Prefix of function names in the interfaces of this process's kernels.
    pub const PREFIX: &str = "kernel";

    /// Creates a compiler for a target.
    pub fn new(target: Target) -> Compiler {
        Compiler::for_arguments(target, ArgumentAlign::default())
    }

    /// Creates a compiler of kernels with the given alignment of arguments.
    pub fn for_arguments(target: Target, arguments: ArgumentAlign) -> Compiler {
        Compiler { target, arguments, units: Units::default(), quick_units: Units::default() }
    }

    /// Target of the code.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Alignment of the arguments of its kernels.
    pub fn arguments(&self) -> ArgumentAlign {
        self.arguments
    }

    /// Compiles a lowered program; in a build without LLVM, with [`Compiler::compile_without_llvm`].
    ///
    /// # Errors
    /// See [`CompileError`]. A target of another machine family is an error, but a target with more features
    /// than this CPU is accepted.
    ///
    /// # Panics
    /// If the program is malformed: run the verifier first.
    pub fn compile(&mut self, program: &Program) -> Result<CompiledKernel, CompileError> {
        let target = &self.target;
        if host_arch() != Some(target.arch) {
            return Err(CompileError::NotHost { target: target.name() });
        }
        if cfg!(not(feature = "llvm")) {
            return self.compile_without_llvm(program).map_err(|error| match error {
                CompileError::NotQuick(why) => CompileError::NotQuick(format!("{why} (this build has no LLVM for it)")),
                error => error,
            });
        }
        let Generated { module, uses, scratch, ns } = Generated::of(program, target, &self.units, self.options())?;
        let (bytes, times) = llvm::compile(&module, target, Emit::Object)?;
        let start = Instant::now();
        let code = self.load_shared(&bytes, &uses.shared)?;
        let times = CompileTimes { generate_ns: ns, load_ns: start.elapsed().as_nanos() as u64, ..times };
        let object = (!uses.made.is_empty()).then_some(bytes);
        Ok(CompiledKernel::new(
            program,
            NewCode { own: code, shared: uses.shared, object },
            scratch,
            self.arguments,
            times,
        ))
    }

    /// Compiles a lowered program with the fast back end, in a tenth of LLVM's time, to code of about equal
    /// speed.
    ///
    /// # Errors
    /// [`CompileError::NotQuick`] if the fast back end does not support the target or the program; else see
    /// [`Compiler::compile`].
    ///
    /// # Panics
    /// As for [`Compiler::compile`].
    pub fn compile_quickly(&mut self, program: &Program) -> Result<CompiledKernel, CompileError> {
        let target = &self.target;
        if host_arch() != Some(target.arch) {
            return Err(CompileError::NotHost { target: target.name() });
        }
        let made = QuickCode::of(program, target, target, &self.quick_units, self.options())?;
        self.placed(program, made)
    }

    /// Compiles a lowered program with the fast back end alone, lane by lane if it does not support some
    /// vector operation.
    ///
    /// # Errors
    /// [`CompileError::NotQuick`] if the target, or a scalar operation of the program, is not supported; else
    /// see [`Compiler::compile`].
    ///
    /// # Panics
    /// As for [`Compiler::compile`].
    pub fn compile_without_llvm(&mut self, program: &Program) -> Result<CompiledKernel, CompileError> {
        let target = &self.target;
        if host_arch() != Some(target.arch) {
            return Err(CompileError::NotHost { target: target.name() });
        }
        let made = QuickCode::at_all(program, target, &self.quick_units, self.options())?;
        self.placed(program, made)
    }

    /// Whether the fast back end supports the target.
    pub fn is_quick(&self) -> bool {
        x86::serves(&self.target)
    }

    /// Places code of the fast back end in memory as a kernel.
    fn placed(&mut self, program: &Program, made: QuickCode) -> Result<CompiledKernel, CompileError> {
        let QuickCode { image, uses, scratch, mut times } = made;
        let start = Instant::now();
        let code = Arc::new(loader::place(image, &|name| self.quick_units.address(name))?);
        self.quick_units.keep(&code, &uses.shared);
        times.load_ns = start.elapsed().as_nanos() as u64;
        Ok(CompiledKernel::new(
            program,
            NewCode { own: code, shared: uses.shared, object: None },
            scratch,
            self.arguments,
            times,
        ))
    }

    fn options(&self) -> GenerateOptions<'static> {
        GenerateOptions { arguments: self.arguments, ..GenerateOptions::default() }
    }

    /// Compiles a lowered program to a self-contained object, which [`Compiler::load`] loads in any process
    /// of the same build on a compatible machine.
    ///
    /// # Errors
    /// See [`Compiler::compile`]; always an error in a build without LLVM.
    ///
    /// # Panics
    /// As for [`Compiler::compile`].
    pub fn object(&self, program: &Program) -> Result<Vec<u8>, CompileError> {
        let target = &self.target;
        if host_arch() != Some(target.arch) {
            return Err(CompileError::NotHost { target: target.name() });
        }
        let Generated { module, .. } = Generated::of(program, target, &Units::default(), self.options())?;
        Ok(llvm::compile(&module, target, Emit::Object)?.0)
    }

    /// Compiles a lowered program with the fast back end to self-contained code, which
    /// [`Compiler::load_quick`] loads in any process of the same build on a compatible machine. If some
    /// vector operation is not supported, everything is computed lane by lane.
    ///
    /// # Errors
    /// See [`Compiler::compile_quickly`].
    ///
    /// # Panics
    /// As for [`Compiler::compile`].
    pub fn quick_object(&self, program: &Program) -> Result<Vec<u8>, CompileError> {
        let target = &self.target;
        let units = Units::default();
        let QuickCode { image, scratch, .. } = QuickCode::at_all(program, target, &units, self.options())?;
        let interface = Interface::new(program, target, 1, Some(Self::PREFIX))?;
        Ok([interface.uses_to_bytes(scratch), image.to_bytes()].concat())
    }

    /// Loads code that [`Compiler::quick_object`] created for the same program, target and argument
    /// alignment; also returns its interface. The program need not be lowered.
    ///
    /// # Errors
    /// If `code` is invalid or lacks the program's functions.
    pub fn load_quick(&self, program: &Program, code: &[u8]) -> Result<(CompiledKernel, Interface), CompileError> {
        let target = &self.target;
        if host_arch() != Some(target.arch) {
            return Err(CompileError::NotHost { target: target.name() });
        }
        let start = Instant::now();
        let none = || CompileError::Object("it is no code".to_owned());
        let (interface, scratch, code) = Interface::of_uses(program, target, 1, Self::PREFIX, code).ok_or_else(none)?;
        let code = loader::place(x86::Image::from_bytes(code).ok_or_else(none)?, &|_| None)?;
        Ok((self.loaded(program, code, scratch, start)?, interface))
    }

    /// Loads an object that [`Compiler::object`] created for the same program, target and argument alignment.
    ///
    /// # Errors
    /// If `object` is invalid or lacks the program's functions.
    pub fn load(&self, program: &Program, object: &[u8]) -> Result<CompiledKernel, CompileError> {
        let start = Instant::now();
        let code = loader::load(object, self.target.arch, &|_| None)?;
        self.loaded(program, code, plan::plan(program, &self.target)?.scratch, start)
    }

    /// Creates the kernel of loaded code, with the time since the start of loading.
    fn loaded(
        &self,
        program: &Program,
        code: loader::LoadedCode,
        scratch: ScratchLayout,
        start: Instant,
    ) -> Result<CompiledKernel, CompileError> {
        let code = Arc::new(code);
        let needed = [Some(Part::Body), Some(Part::Prepare), (!program.finish.is_empty()).then_some(Part::Finish)];
        if let Some(part) = needed.into_iter().flatten().find(|part| code.symbol(generate::symbol(*part)).is_none()) {
            return Err(CompileError::Object(format!("it has no function `{}`", generate::symbol(part))));
        }
        let times = CompileTimes { load_ns: start.elapsed().as_nanos() as u64, ..CompileTimes::default() };
        Ok(CompiledKernel::new(
            program,
            NewCode { own: code, shared: Vec::new(), object: None },
            scratch,
            self.arguments,
            times,
        ))
    }

    /// Adds shared code from the object of another process's kernel; see [`CompiledKernel::take_object`].
    ///
    /// # Errors
    /// [`CompileError::Object`] and [`CompileError::UnknownSymbol`] if the object is invalid, or refers to
    /// code of an object that was not added.
    pub fn add(&mut self, object: &[u8]) -> Result<(), CompileError> {
        self.load_shared(object, &[]).map(|_| ())
    }

    /// Loads an object that shares units with others.
    fn load_shared(
        &mut self,
        object: &[u8],
        shared: &[Arc<loader::LoadedCode>],
    ) -> Result<Arc<loader::LoadedCode>, CompileError> {
        let code = Arc::new(loader::load(object, self.target.arch, &|symbol| self.units.address(symbol))?);
        self.units.keep(&code, shared);
        Ok(code)
    }
}

/// Compiles one lowered program for this process.
///
/// # Errors
/// As for [`Compiler::compile`].
///
/// # Panics
/// As for [`Compiler::compile`].
pub fn compile(program: &Program, target: &Target) -> Result<CompiledKernel, CompileError> {
    Compiler::new(target.clone()).compile(program)
}

/// Compiles a lowered program to text or an object, for any target.
///
/// # Errors
/// See [`CompileError`].
///
/// # Panics
/// If the program is malformed: run the verifier first.
pub fn emit(program: &Program, target: &Target, what: Emit) -> Result<Vec<u8>, CompileError> {
    written(program, target, GenerateOptions::default(), what)
}

/// Compiles a lowered program to text or an object with a checked C interface; see [`Interface`]. Arguments
/// must be aligned to 64 bytes.
///
/// # Errors
/// See [`CompileError`].
///
/// # Panics
/// If the program is malformed: run the verifier first.
pub fn export(program: &Program, target: &Target, prefix: &str, what: Emit) -> Result<Vec<u8>, CompileError> {
    written(program, target, GenerateOptions { prefix: Some(prefix), ..GenerateOptions::default() }, what)
}

/// Exports an object like [`export`], but with hidden symbols for use within a library, and with arguments
/// aligned to their elements only.
///
/// # Errors
/// See [`CompileError`].
///
/// # Panics
/// See [`export`].
pub fn export_hidden(program: &Program, target: &Target, prefix: &str) -> Result<Vec<u8>, CompileError> {
    let options = GenerateOptions { prefix: Some(prefix), arguments: ArgumentAlign::Elements, is_hidden: true };
    written(program, target, options, Emit::Object)
}

/// Compiles a program with the fast back end to machine code and constants, for any target and reproducible
/// in every process: C library functions have address 0.
///
/// # Errors
/// See [`Compiler::compile_quickly`].
///
/// # Panics
/// See [`emit`].
pub fn quick_code(program: &Program, target: &Target) -> Result<Vec<u8>, CompileError> {
    let code = QuickCode::of(program, target, target, &Units::default(), GenerateOptions::default())?;
    Ok(code.image.bytes)
}

/// Code of the fast back end without an address, which may call units and C library functions.
struct QuickCode {
    image: x86::Image,
    uses: ProgramUnits,
    scratch: ScratchLayout,
    times: CompileTimes,
}

impl QuickCode {
    /// Compiles a lowered program for a target, with instructions generated for another target that has fewer
    /// features.
    fn of(
        program: &Program,
        target: &Target,
        written_for: &Target,
        units: &Units,
        options: GenerateOptions,
    ) -> Result<QuickCode, CompileError> {
        if !x86::serves(target) {
            return Err(CompileError::NotQuick(format!("{} is not served", target.name())));
        }
        let Generated { module, uses, scratch, ns } = Generated::of(program, written_for, units, options)?;
        let start = Instant::now();
        let is_known = |name: &str| units.address(name).is_some() || loader::external(name).is_some();
        let image = x86::compile(module, target, &is_known).map_err(CompileError::NotQuick)?;
        let machine_code_ns = start.elapsed().as_nanos() as u64;
        let times = CompileTimes { generate_ns: ns, machine_code_ns, ..CompileTimes::default() };
        Ok(QuickCode { image, uses, scratch, times })
    }

    /// Compiles a lowered program, lane by lane if some vector operation is not supported.
    fn at_all(
        program: &Program,
        target: &Target,
        units: &Units,
        options: GenerateOptions,
    ) -> Result<QuickCode, CompileError> {
        QuickCode::of(program, target, target, units, options).or_else(|error| match error {
            CompileError::NotQuick(_) => {
                let scalar = Target { vector_bits: 0, ..target.clone() };
                QuickCode::of(program, target, &scalar, units, options)
            }
            error => Err(error),
        })
    }
}

/// Layout of the scratch memory of a program's code.
///
/// # Errors
/// If a buffer is too large.
pub fn scratch_layout(program: &Program, target: &Target) -> Result<ScratchLayout, CompileError> {
    Ok(plan::plan(program, target)?.scratch)
}

/// Instruction set family of this process; `None` if code cannot be generated for it.
pub fn host_arch() -> Option<Arch> {
    match std::env::consts::ARCH {
        "x86_64" => Some(Arch::X86_64),
        "aarch64" => Some(Arch::Aarch64),
        _ => None,
    }
}

/// Program in SSA form.
struct Generated {
    module: ssa::Module,
    uses: ProgramUnits,
    scratch: ScratchLayout,
    /// Time of the generation, in nanoseconds.
    ns: u64,
}

impl Generated {
    /// Generates a module that refers to known units and defines the others. With a prefix, the module is
    /// exported.
    fn of(
        program: &Program,
        target: &Target,
        units: &Units,
        options: GenerateOptions,
    ) -> Result<Generated, CompileError> {
        let start = Instant::now();
        let plan = plan::plan(program, target)?;
        let (module, uses) = generate::generate(program, target, &plan, units, options)?;
        if cfg!(debug_assertions)
            && let Err(why) = module.verify()
        {
            panic!("generated code is well formed: {why}\n{module}");
        }
        let MemoryPlan { scratch, .. } = plan;
        Ok(Generated { module, uses, scratch, ns: start.elapsed().as_nanos() as u64 })
    }
}

fn written(program: &Program, target: &Target, options: GenerateOptions, what: Emit) -> Result<Vec<u8>, CompileError> {
    let Generated { module, .. } = Generated::of(program, target, &Units::default(), options)?;
    match what {
        Emit::Ssa => Ok(module.to_string().into_bytes()),
        Emit::Llvm | Emit::LlvmOptimized | Emit::Asm | Emit::Object => Ok(llvm::compile(&module, target, what)?.0),
    }
}

/// Code of a program in this process.
struct NewCode {
    /// Code with the program's functions.
    own: Arc<loader::LoadedCode>,
    /// Code shared with other programs.
    shared: Vec<Arc<loader::LoadedCode>>,
    /// Object of the code, if other processes may load it.
    object: Option<Vec<u8>>,
}

impl CompiledKernel {
    fn new(
        program: &Program,
        code: NewCode,
        scratch: ScratchLayout,
        arguments: ArgumentAlign,
        times: CompileTimes,
    ) -> CompiledKernel {
        let NewCode { own, mut shared, object } = code;
        let entry = |part| {
            let address = own.symbol(generate::symbol(part))?;
            // SAFETY: the symbol is the function of this name, which the generator defined with this
            // signature.
            Some(unsafe { std::mem::transmute::<*const u8, PartFunction>(address) })
        };
        let [run, prepare] = [Part::Body, Part::Prepare].map(|part| entry(part).expect("every program has both"));
        let finish = entry(Part::Finish);
        shared.push(own);
        CompiledKernel {
            _codes: shared,
            object,
            run,
            prepare,
            finish,
            n_arguments: program.arguments().count(),
            kept_bytes: program.kept().map(|(_, b)| b.size_bytes().unwrap_or(0)).collect(),
            sizes: program.sizes.clone(),
            scratch,
            arguments,
            times,
        }
    }

    /// Size in bytes of the scratch memory for `n_threads` threads, which must be aligned to
    /// [`SCRATCH_ALIGN`].
    pub fn scratch_bytes(&self, n_threads: usize) -> u64 {
        self.scratch.bytes(n_threads)
    }

    /// Size of each kept buffer in bytes, in order.
    pub fn kept_bytes(&self) -> &[u64] {
        &self.kept_bytes
    }

    /// Required alignment of arguments.
    pub fn argument_align(&self) -> ArgumentAlign {
        self.arguments
    }

    /// Takes the object from which the kernel was loaded, if it contains code that programs of other
    /// processes may share.
    pub fn take_object(&mut self) -> Option<Vec<u8>> {
        self.object.take()
    }

    /// Time of the compilation by stage.
    pub fn times(&self) -> CompileTimes {
        self.times
    }

    /// Runs the program's body.
    ///
    /// # Safety
    /// `arguments` and `kept` point to memory of the sizes of the program's buffers, aligned to 64 bytes
    /// (arguments as [`CompiledKernel::argument_align`] says), none overlapping another; kept buffers were
    /// filled by [`CompiledKernel::prepare`]; `scratch` has [`CompiledKernel::scratch_bytes`] for the
    /// runtime's number of threads, aligned to [`SCRATCH_ALIGN`].
    ///
    /// # Panics
    /// If the number of arguments or kept buffers is not the program's.
    pub unsafe fn run(&self, arguments: &[*mut u8], kept: &[*mut u8], scratch: *mut u8, runtime: &Runtime) {
        // SAFETY: as promised by the caller.
        unsafe { self.run_at(&[], arguments, kept, scratch, runtime) }
    }

    /// Runs the program's body with a value for each open (dynamic) size.
    ///
    /// # Safety
    /// As for [`CompiledKernel::run`].
    ///
    /// # Panics
    /// As for [`CompiledKernel::run`], and if a size is not a valid value.
    pub unsafe fn run_at(
        &self,
        sizes: &[i64],
        arguments: &[*mut u8],
        kept: &[*mut u8],
        scratch: *mut u8,
        runtime: &Runtime,
    ) {
        assert_eq!(sizes.len(), self.sizes.len(), "number of open sizes");
        let is_value = |(size, value): (&OpenSize, &i64)| size.steps_to(*value).is_some();
        assert!(self.sizes.iter().zip(sizes).all(is_value), "{sizes:?} are values of {:?}", self.sizes);
        // SAFETY: as promised by the caller.
        unsafe { self.call(self.run, sizes, arguments, kept, scratch, runtime) }
    }

    /// Runs the program's `prepare` part, which fills kept buffers.
    ///
    /// # Safety
    /// As for [`CompiledKernel::run`], but kept buffers may have any contents.
    ///
    /// # Panics
    /// As for [`CompiledKernel::run`].
    pub unsafe fn prepare(&self, arguments: &[*mut u8], kept: &[*mut u8], scratch: *mut u8, runtime: &Runtime) {
        // SAFETY: as promised by the caller.
        unsafe { self.call(self.prepare, &[], arguments, kept, scratch, runtime) }
    }

    /// Runs the program's `finish` part, which computes outputs from kept buffers after
    /// [`CompiledKernel::run`]; does nothing if there is none.
    ///
    /// # Safety
    /// As for [`CompiledKernel::run`], which must have run before.
    ///
    /// # Panics
    /// As for [`CompiledKernel::run`].
    pub unsafe fn finish(&self, arguments: &[*mut u8], kept: &[*mut u8], scratch: *mut u8, runtime: &Runtime) {
        if let Some(finish) = self.finish {
            // SAFETY: as promised by the caller.
            unsafe { self.call(finish, &[], arguments, kept, scratch, runtime) }
        }
    }

    unsafe fn call(
        &self,
        entry: PartFunction,
        sizes: &[i64],
        arguments: &[*mut u8],
        kept: &[*mut u8],
        scratch: *mut u8,
        runtime: &Runtime,
    ) {
        assert_eq!(arguments.len(), self.n_arguments, "number of arguments");
        assert_eq!(kept.len(), self.kept_bytes.len(), "number of kept buffers");
        let mut buffers = [std::ptr::null_mut(); 16];
        let n = arguments.len() + kept.len();
        if n <= buffers.len() {
            buffers[..arguments.len()].copy_from_slice(arguments);
            buffers[arguments.len()..n].copy_from_slice(kept);
            // SAFETY: as promised by the caller; the code lives as long as `self`.
            unsafe { entry(buffers.as_ptr(), scratch, runtime, sizes.as_ptr()) }
        } else {
            let buffers = [arguments, kept].concat();
            // SAFETY: as above.
            unsafe { entry(buffers.as_ptr(), scratch, runtime, sizes.as_ptr()) }
        }
    }

    /// Runs a part of the program on its arguments and kept buffers, in this order in one list, without
    /// allocation.
    ///
    /// # Safety
    /// As for the function of the part's name; arguments that the part does not use may be null.
    ///
    /// # Panics
    /// If the number of buffers is not the program's.
    pub unsafe fn run_part(&self, part: Part, sizes: &[i64], buffers: &[*mut u8], scratch: *mut u8, runtime: &Runtime) {
        assert_eq!(buffers.len(), self.n_arguments + self.kept_bytes.len(), "number of buffers");
        let entry = match part {
            Part::Prepare => self.prepare,
            Part::Body => self.run,
            Part::Finish => match self.finish {
                Some(finish) => finish,
                None => return,
            },
        };
        if part == Part::Body {
            assert_eq!(sizes.len(), self.sizes.len(), "number of open sizes");
            let is_value = |(size, value): (&OpenSize, &i64)| size.steps_to(*value).is_some();
            assert!(self.sizes.iter().zip(sizes).all(is_value), "{sizes:?} are values of {:?}", self.sizes);
        }
        // SAFETY: as promised by the caller; the code lives as long as `self`.
        unsafe { entry(buffers.as_ptr(), scratch, runtime, sizes.as_ptr()) }
    }
}
