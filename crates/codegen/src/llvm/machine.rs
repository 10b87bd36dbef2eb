//! LLVM target machines, which run optimization passes and generate object code.

use std::cell::RefCell;
use std::ffi::CStr;
use std::ptr;
use std::sync::Once;

use llvm_sys::core::*;
use llvm_sys::target_machine::*;
use llvm_sys::transforms::pass_builder::*;
use tilewright_ir::target::{Arch, GpuApi, Target};

use super::module::{LlvmModule, c_string};
use crate::CompileError;

/// Major version of LLVM for which the bindings are written.
const LLVM_MAJOR: u32 = 22;

/// LLVM target triple of a family. Object files are ELF on every host.
fn triple(arch: Arch) -> &'static CStr {
    match arch {
        Arch::X86_64 => c"x86_64-unknown-linux-gnu",
        Arch::Aarch64 => c"aarch64-unknown-linux-gnu",
        Arch::Gpu(GpuApi::AmdGpu) => c"amdgcn-amd-amdhsa",
        Arch::Gpu(GpuApi::Cuda | GpuApi::OpenCl) => c"nvptx64-nvidia-cuda",
    }
}

/// LLVM's name and feature string of this CPU; `None` in a build without LLVM.
pub fn host_cpu() -> Option<(String, String)> {
    let take = |text: *mut libc::c_char| {
        // SAFETY: LLVM returns a zero-terminated string that the caller owns and must dispose of.
        unsafe {
            let out = CStr::from_ptr(text).to_string_lossy().into_owned();
            LLVMDisposeMessage(text);
            out
        }
    };
    // SAFETY: both functions only query the machine.
    Some(unsafe { (take(LLVMGetHostCPUName()), take(LLVMGetHostCPUFeatures())) })
}

/// Version of the linked LLVM, such as `22.1.2`; `None` in a build without LLVM.
pub fn llvm_version() -> Option<String> {
    Some(text(version()))
}

fn text([major, minor, patch]: [u32; 3]) -> String {
    format!("{major}.{minor}.{patch}")
}

fn version() -> [u32; 3] {
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: the call only writes the three numbers.
    unsafe { LLVMGetVersion(&mut major, &mut minor, &mut patch) };
    [major, minor, patch]
}

/// Kind of output.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FileType {
    /// Assembly text.
    Assembly,
    /// A relocatable ELF object.
    Object,
}

/// Target machine, reused across kernels, as its creation costs more than the passes of a small kernel.
struct TargetMachine {
    arch: Arch,
    cpu: String,
    features: String,
    machine: LLVMTargetMachineRef,
}

impl Drop for TargetMachine {
    fn drop(&mut self) {
        // SAFETY: `LLVMCreateTargetMachine` created the machine, and there are no other references to it.
        unsafe { LLVMDisposeTargetMachine(self.machine) };
    }
}

thread_local! {
    static MACHINES: RefCell<Vec<TargetMachine>> = const { RefCell::new(Vec::new()) };
}

/// Maximum number of target machines that a thread keeps; beyond it, the oldest is dropped.
const MAX_MACHINES: usize = 4;

/// Calls `f` with a target machine for the target.
pub fn with_machine<T>(
    target: &Target,
    f: impl FnOnce(LLVMTargetMachineRef) -> Result<T, CompileError>,
) -> Result<T, CompileError> {
    let found = version();
    if found[0] != LLVM_MAJOR {
        return Err(CompileError::LlvmVersion { found: text(found), needed: LLVM_MAJOR });
    }
    MACHINES.with_borrow_mut(|machines| {
        let fits = |m: &TargetMachine| m.arch == target.arch && m.cpu == target.cpu && m.features == target.features;
        let at = match machines.iter().position(fits) {
            Some(at) => at,
            None => {
                if machines.len() == MAX_MACHINES {
                    machines.remove(0);
                }
                machines.push(make(target)?);
                machines.len() - 1
            }
        };
        f(machines[at].machine)
    })
}

fn make(target: &Target) -> Result<TargetMachine, CompileError> {
    static INITIALIZED: Once = Once::new();
    INITIALIZED.call_once(|| {
        use llvm_sys::target::*;
        // SAFETY: this registers the back ends and sets some options, once, before any machine is created.
        unsafe {
            LLVMInitializeX86TargetInfo();
            LLVMInitializeX86Target();
            LLVMInitializeX86TargetMC();
            LLVMInitializeX86AsmPrinter();
            LLVMInitializeX86AsmParser();
            LLVMInitializeAArch64TargetInfo();
            LLVMInitializeAArch64Target();
            LLVMInitializeAArch64TargetMC();
            LLVMInitializeAArch64AsmPrinter();
            // The generator already advances pointers, and out-of-order cores need no second scheduling:
            // without these two passes, code is as fast and is generated in three quarters of the time.
            // Without branch optimization, the blocks that the generator keeps short are not merged.
            let options = [c"tilewright", c"-disable-lsr", c"-disable-post-ra", c"-disable-cgp-branch-opts"];
            let options = options.map(CStr::as_ptr);
            llvm_sys::support::LLVMParseCommandLineOptions(options.len() as i32, options.as_ptr(), c"".as_ptr());
        }
    });
    static GPUS_INITIALIZED: Once = Once::new();
    if let Arch::Gpu(_) = target.arch {
        GPUS_INITIALIZED.call_once(|| {
            use llvm_sys::target::*;
            // SAFETY: this registers the two back ends, once, before any machine for them is created.
            unsafe {
                LLVMInitializeNVPTXTargetInfo();
                LLVMInitializeNVPTXTarget();
                LLVMInitializeNVPTXTargetMC();
                LLVMInitializeNVPTXAsmPrinter();
                LLVMInitializeAMDGPUTargetInfo();
                LLVMInitializeAMDGPUTarget();
                LLVMInitializeAMDGPUTargetMC();
                LLVMInitializeAMDGPUAsmPrinter();
            }
        });
    }
    let (cpu, features) = (c_string(&target.cpu), c_string(&target.features));
    // SAFETY: all strings are zero-terminated and outlive the calls; the caller owns the message and disposes
    // of it.
    unsafe {
        let (mut found, mut message) = (ptr::null_mut(), ptr::null_mut());
        if LLVMGetTargetFromTriple(triple(target.arch).as_ptr(), &mut found, &mut message) != 0 {
            let text = CStr::from_ptr(message).to_string_lossy().into_owned();
            LLVMDisposeMessage(message);
            return Err(CompileError::Llvm(text));
        }
        let machine = LLVMCreateTargetMachine(
            found,
            triple(target.arch).as_ptr(),
            cpu.as_ptr(),
            features.as_ptr(),
            LLVMCodeGenOptLevel::LLVMCodeGenLevelDefault,
            LLVMRelocMode::LLVMRelocPIC,
            LLVMCodeModel::LLVMCodeModelDefault,
        );
        if machine.is_null() {
            return Err(CompileError::Llvm(format!("no target machine for {}", target.name())));
        }
        Ok(TargetMachine { arch: target.arch, cpu: target.cpu.clone(), features: target.features.clone(), machine })
    }
}

/// Sets a module's target triple and data layout.
pub fn prepare_module(module: &LlvmModule, machine: LLVMTargetMachineRef, target: &Target) {
    // SAFETY: module and machine are alive; the layout is copied into the module.
    unsafe {
        let layout = LLVMCreateTargetDataLayout(machine);
        llvm_sys::target::LLVMSetModuleDataLayout(module.raw(), layout);
        llvm_sys::target::LLVMDisposeTargetData(layout);
        LLVMSetTarget(module.raw(), triple(target.arch).as_ptr());
    }
}

/// Runs a list of passes in the syntax of `opt -passes=`.
pub fn run_passes(module: &LlvmModule, machine: LLVMTargetMachineRef, passes: &str) -> Result<(), CompileError> {
    let passes = c_string(passes);
    // SAFETY: module and machine are alive; the caller owns options and error message and disposes of them.
    unsafe {
        let options = LLVMCreatePassBuilderOptions();
        let error = LLVMRunPasses(module.raw(), passes.as_ptr(), machine, options);
        LLVMDisposePassBuilderOptions(options);
        if error.is_null() {
            return Ok(());
        }
        let message = llvm_sys::error::LLVMGetErrorMessage(error);
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        llvm_sys::error::LLVMDisposeErrorMessage(message);
        Err(CompileError::Llvm(text))
    }
}

/// Generates machine code.
pub fn emit_file(module: &LlvmModule, machine: LLVMTargetMachineRef, what: FileType) -> Result<Vec<u8>, CompileError> {
    let what = match what {
        FileType::Assembly => LLVMCodeGenFileType::LLVMAssemblyFile,
        FileType::Object => LLVMCodeGenFileType::LLVMObjectFile,
    };
    // SAFETY: module and machine are alive; the caller owns buffer and message and disposes of them.
    unsafe {
        let (mut message, mut buffer) = (ptr::null_mut(), ptr::null_mut());
        if LLVMTargetMachineEmitToMemoryBuffer(machine, module.raw(), what, &mut message, &mut buffer) != 0 {
            let text = CStr::from_ptr(message).to_string_lossy().into_owned();
            LLVMDisposeMessage(message);
            return Err(CompileError::Llvm(text));
        }
        let (start, len) = (LLVMGetBufferStart(buffer), LLVMGetBufferSize(buffer));
        let bytes = std::slice::from_raw_parts(start.cast::<u8>(), len).to_vec();
        LLVMDisposeMemoryBuffer(buffer);
        Ok(bytes)
    }
}
