//! Compilation of CUDA C++ by NVIDIA's compilers, which are searched for in their installations.

use std::env;
use std::ffi::{CString, c_char, c_int};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr;

use libloading::Library;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::driver::{DriverHandle, ResultCode};

/// Name that selects NVIDIA's run-time compilation library.
pub const NVRTC: &str = "nvrtc";

/// Folders that hold an installation of CUDA: by environment variable, and the default one.
const VARIABLES: [&str; 2] = ["CUDA_HOME", "CUDA_PATH"];
const FOLDER: &str = "/usr/local/cuda";

/// Compiler of CUDA C++.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CudaCompiler {
    /// Compiler `nvcc`.
    Nvcc(PathBuf),
    /// Library NVRTC for run-time compilation.
    Nvrtc {
        /// Path of the library.
        library: PathBuf,
        /// Folders of its CUDA headers.
        headers: Vec<PathBuf>,
    },
}

/// Reason why CUDA C++ could not be compiled.
#[derive(Debug, Error)]
pub enum CudaCompileError {
    /// Missing compiler.
    #[error(
        "no compiler of CUDA is installed: install CUDA, so that `nvcc` is found or CUDA_HOME names its folder, or \
         `pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12`"
    )]
    NoCompiler,
    /// Refused by the compiler.
    #[error("{0}")]
    Refused(String),
    /// Failure to run or load the compiler.
    #[error("the compiler of CUDA cannot be run: {0}")]
    Io(#[from] io::Error),
}

/// Function that writes a file atomically.
pub type WriteFile<'a> = &'a dyn Fn(&Path, &[u8]) -> io::Result<()>;

/// Source with its compiler options.
#[derive(Clone, Copy, Debug)]
pub struct CudaSource<'a> {
    /// Text of the source.
    pub text: &'a str,
    /// Path of the source; includes are relative to its folder.
    pub path: &'a Path,
    /// Compiler options.
    pub flags: &'a [String],
    /// GPU architecture, such as `sm_90a`; for a virtual one, such as `compute_90`, the output is PTX.
    pub gpu: &'a str,
}

impl CudaCompiler {
    /// Finds a compiler by name: [`NVRTC`] or a program. Without a name, finds an installed one, preferring
    /// `nvcc`.
    ///
    /// # Errors
    /// If nothing is installed.
    pub fn find(asked: Option<&str>) -> Result<CudaCompiler, CudaCompileError> {
        let found = match asked {
            Some(NVRTC) => nvrtc(),
            Some(program) => Some(CudaCompiler::Nvcc(program.into())),
            None => nvcc().or_else(nvrtc),
        };
        found.ok_or(CudaCompileError::NoCompiler)
    }

    /// Compiles a source; `into` is a path beside which further files may be written, by `write`.
    ///
    /// # Errors
    /// If the compiler refuses it, or cannot be run.
    pub fn compile(&self, unit: &CudaSource, into: &Path, write: WriteFile) -> Result<Vec<u8>, CudaCompileError> {
        match self {
            CudaCompiler::Nvcc(program) => by_program(program, unit, into, write),
            CudaCompiler::Nvrtc { library, headers } => by_library(library, headers, unit),
        }
    }
}

/// Folders in which CUDA may be installed.
fn installations() -> impl Iterator<Item = PathBuf> {
    VARIABLES.iter().filter_map(env::var_os).map(PathBuf::from).chain([PathBuf::from(FOLDER)])
}

fn nvcc() -> Option<CudaCompiler> {
    let programs = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&programs).chain(installations().map(|folder| folder.join("bin")));
    folders.map(|folder| folder.join("nvcc")).find(|path| path.is_file()).map(CudaCompiler::Nvcc)
}

fn nvrtc() -> Option<CudaCompiler> {
    let more = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let installed = installations().flat_map(|folder| ["lib64", "lib"].map(|name| folder.join(name)));
    let system = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"].map(PathBuf::from);
    let of_python = || {
        packages()
            .into_iter()
            .flat_map(|folder| ["cuda_nvrtc", "cu13"].map(|name| folder.join("nvidia").join(name).join("lib")))
    };
    let known: Vec<PathBuf> = env::split_paths(&more).chain(installed).chain(system).collect();
    known.iter().find_map(|folder| nvrtc_in(folder)).or_else(|| of_python().find_map(|folder| nvrtc_in(&folder)))
}

/// Library in a folder, with the headers that are installed with it.
fn nvrtc_in(folder: &Path) -> Option<CudaCompiler> {
    let is_library =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libnvrtc.so"));
    let library = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).find(is_library)?;
    let beside = [
        "../include",
        "../include/cccl",
        "../../cuda_runtime/include",
        "../../cuda_cccl/include",
        "../../cuda_nvcc/include",
    ];
    let headers = beside.iter().filter_map(|name| folder.join(name).canonicalize().ok()).collect();
    Some(CudaCompiler::Nvrtc { library, headers })
}

/// Package folders of the user's Python.
fn packages() -> Vec<PathBuf> {
    let program = "import sys; print('\\n'.join(sys.path))";
    let said = Command::new("python3").args(["-c", program]).stdin(Stdio::null()).output();
    let said = said.map(|said| String::from_utf8_lossy(&said.stdout).into_owned()).unwrap_or_default();
    said.lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect()
}

/// First error that a compiler reports, or else its first output.
fn fault(said: &str) -> String {
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty());
    lines().find(|line| line.contains("error")).or_else(|| lines().next()).unwrap_or("it says nothing").to_owned()
}

/// Folder that quoted names of headers are relative to.
fn beside(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn by_program(program: &Path, unit: &CudaSource, into: &Path, write: WriteFile) -> Result<Vec<u8>, CudaCompileError> {
    let (source, code) = (into.with_extension("cu"), into.with_extension("cubin"));
    write(&source, unit.text.as_bytes())?;
    let kind = if unit.gpu.starts_with("compute") { "-ptx" } else { "-cubin" };
    let mut command = Command::new(program);
    command.args([kind, "-arch", unit.gpu]).args(unit.flags).arg("-I").arg(beside(unit.path));
    let said = command.arg("-o").arg(&code).arg(&source).stdin(Stdio::null()).output()?;
    if said.status.success() {
        return Ok(fs::read(&code)?);
    }
    let text = String::from_utf8_lossy(&said.stderr).into_owned() + &String::from_utf8_lossy(&said.stdout);
    Err(CudaCompileError::Refused(fault(&text)))
}

mod functions {
    use super::super::driver::{DriverHandle, ResultCode, functions};
    use super::{Library, c_char, c_int};

    functions! {
        create = c"nvrtcCreateProgram" (
            *mut DriverHandle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
        );
        compile = c"nvrtcCompileProgram" (DriverHandle, c_int, *const *const c_char);
        log_size = c"nvrtcGetProgramLogSize" (DriverHandle, *mut usize);
        log = c"nvrtcGetProgramLog" (DriverHandle, *mut c_char);
        cubin_size = c"nvrtcGetCUBINSize" (DriverHandle, *mut usize);
        cubin = c"nvrtcGetCUBIN" (DriverHandle, *mut c_char);
        ptx_size = c"nvrtcGetPTXSize" (DriverHandle, *mut usize);
        ptx = c"nvrtcGetPTX" (DriverHandle, *mut c_char);
        destroy = c"nvrtcDestroyProgram" (*mut DriverHandle);
    }
}

/// Header with declarations of the host's C library that GPU sources use: NVRTC has the functions but no
/// headers.
const HOST_HEADER: &str = "
#ifndef TILEWRIGHT_HOST_HEADER
#define TILEWRIGHT_HOST_HEADER
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef long long intptr_t;
typedef unsigned long long uintptr_t;
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define DBL_MAX 1.7976931348623158e+308
#define DBL_MIN 2.2250738585072014e-308
#define DBL_EPSILON 2.2204460492503131e-16
#define M_PI 3.14159265358979323846
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif
";
/// Names by which sources include it.
const HOST_HEADERS: &[&str] = &[
    "assert.h", "cassert", "cfloat", "climits", "cmath", "cstddef", "cstdint", "cstdio", "cstdlib", "cstring",
    "float.h", "iostream", "limits.h", "math.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h",
];
/// Headers whose contents the library has built in; CUDA's own are used if they are installed.
const BUILT_IN_HEADERS: &[&str] = &["cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "device_launch_parameters.h"];

fn by_library(library: &Path, headers: &[PathBuf], unit: &CudaSource) -> Result<Vec<u8>, CudaCompileError> {
    let io = |why: String| CudaCompileError::Io(io::Error::other(why));
    // SAFETY: this name refers to NVRTC everywhere; its functions have these parameters.
    let library = unsafe { Library::new(library) }.map_err(|why| io(why.to_string()))?;
    // SAFETY: as above.
    let f = unsafe { functions::DriverFunctions::of(&library) }.map_err(io)?;
    let words = |all: Vec<String>| -> Result<Vec<CString>, CudaCompileError> {
        all.into_iter().map(|word| CString::new(word).map_err(|why| io(why.to_string()))).collect()
    };
    let has_header = |name: &str| headers.iter().any(|folder| folder.join(name).is_file());
    let built_in = BUILT_IN_HEADERS.iter().filter(|name| !has_header(name)).map(|name| (*name, ""));
    let (names, contents): (Vec<&str>, Vec<&str>) =
        HOST_HEADERS.iter().map(|name| (*name, HOST_HEADER)).chain(built_in).unzip();
    let owned = |all: Vec<&str>| words(all.into_iter().map(str::to_owned).collect());
    let (names, contents) = (owned(names)?, owned(contents)?);
    let mut options = vec![format!("--gpu-architecture={}", unit.gpu)];
    options.extend(unit.flags.iter().cloned());
    let folders = std::iter::once(beside(unit.path)).chain(headers.iter().map(PathBuf::as_path));
    options.extend(folders.map(|folder| format!("-I{}", folder.display())));
    let options = words(options)?;
    let texts = words(vec![unit.text.to_owned(), unit.path.to_string_lossy().into_owned()])?;
    let pointers = |all: &[CString]| all.iter().map(|word| word.as_ptr()).collect::<Vec<*const c_char>>();
    let (names, contents, option_pointers) = (pointers(&names), pointers(&contents), pointers(&options));
    let mut program = ptr::null_mut();
    // SAFETY: all texts and lists outlive the calls; sizes are queried before the buffers are made, and the
    // program is destroyed once.
    unsafe {
        let (n, text, name) = (names.len() as c_int, texts[0].as_ptr(), texts[1].as_ptr());
        let made = (f.create)(&mut program, text, name, n, contents.as_ptr(), names.as_ptr());
        if made != 0 {
            return Err(io(format!("nvrtcCreateProgram says {made}")));
        }
        let compiled = (f.compile)(program, options.len() as c_int, option_pointers.as_ptr());
        let read = |size: OutputFunctions, contents: Contents| {
            let mut n_bytes = 0;
            let mut bytes = Vec::new();
            if size(program, &mut n_bytes) == 0 {
                bytes.resize(n_bytes, 0u8);
                contents(program, bytes.as_mut_ptr().cast::<c_char>());
            }
            bytes
        };
        let result = if compiled != 0 {
            let log = read(f.log_size, f.log);
            Err(CudaCompileError::Refused(fault(&String::from_utf8_lossy(&log).replace('\0', ""))))
        } else if unit.gpu.starts_with("compute") {
            Ok(read(f.ptx_size, f.ptx))
        } else {
            Ok(read(f.cubin_size, f.cubin))
        };
        (f.destroy)(&mut program);
        result
    }
}

/// Functions that return the length of an output, and write it.
type OutputFunctions = unsafe extern "C" fn(DriverHandle, *mut usize) -> ResultCode;
type Contents = unsafe extern "C" fn(DriverHandle, *mut c_char) -> ResultCode;

/// Finds the symbol of a kernel in machine code or PTX: its name, or the mangled form.
///
/// # Errors
/// A message, if there is none, or more than one.
pub fn entry_of(code: &[u8], function: &str) -> Result<String, String> {
    let mut names: Vec<String> = Vec::new();
    for marker in [&b".text."[..], b".entry "] {
        let places = code.windows(marker.len()).enumerate().filter(|(_, window)| *window == marker);
        for (at, _) in places {
            let rest = code[at + marker.len()..].iter();
            let name = rest.take_while(|byte| byte.is_ascii_alphanumeric() || b"_$".contains(byte));
            let name: String = name.map(|byte| char::from(*byte)).collect();
            if !name.is_empty() && !names.contains(&name) {
                names.push(name);
            }
        }
    }
    let mangled = format!("_Z{}{function}", function.len());
    let own = names.iter().find(|name| *name == function);
    match (own, &names.iter().filter(|name| name.starts_with(&mangled)).collect::<Vec<_>>()[..]) {
        (Some(name), _) => Ok(name.clone()),
        (None, [name]) => Ok((*name).clone()),
        (None, []) => Err(format!("the code has no kernel {function}; it has {}", names.join(", "))),
        (None, several) => {
            let names = several.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
            Err(format!("several kernels are called {function} (name one of {names})"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_by_their_names() {
        let code = b"\x7fELF\0.text._Z3addPfi\0.rel.text._Z3addPfi\0.text.plain\0.text._Z3mulILi1EEvPf\0\
                     .text._Z3mulILi2EEvPf\0";
        let found = |name: &str| entry_of(code, name);
        assert_eq!(found("plain").as_deref(), Ok("plain"));
        assert_eq!(found("add").as_deref(), Ok("_Z3addPfi"));
        assert_eq!(found("_Z3mulILi2EEvPf").as_deref(), Ok("_Z3mulILi2EEvPf"));
        assert!(found("mul").unwrap_err().contains("several kernels"));
        assert!(found("ad").unwrap_err().contains("no kernel ad; it has _Z3addPfi"));
        assert_eq!(entry_of(b".visible .entry f(\n.param", "f").as_deref(), Ok("f"));
    }

    #[test]
    fn the_fault_is_told_of() {
        assert_eq!(fault("k.cu(1): warning: so so\nk.cu(2): error: no x\n  x\n  ^\n"), "k.cu(2): error: no x");
        assert_eq!(fault("\n  nothing known\n"), "nothing known");
    }

    /// Library, if one is installed; otherwise prints a message.
    pub fn library() -> Option<CudaCompiler> {
        // Folder into which CI downloads NVIDIA's tools, or the current Python's packages.
        let target = env::current_exe().unwrap().ancestors().nth(3).unwrap().to_owned();
        let found = nvrtc_in(&target.join("cuda-tools/packages/nvidia/cuda_nvrtc/lib")).or_else(nvrtc);
        if found.is_none() {
            println!("skipped: {}", CudaCompileError::NoCompiler);
        }
        found
    }

    #[test]
    fn the_library_compiles() {
        let Some(compiler) = library() else { return };
        let compile = |text: &str, flags: &[&str], gpu: &str| {
            let flags: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
            let unit = CudaSource { text, path: Path::new("k.cu"), flags: &flags, gpu };
            compiler.compile(&unit, Path::new("unused"), &|_, _| unreachable!("it writes nothing"))
        };
        let source = "#include <cuda_runtime.h>\n#include <cstdint>\n#include <math.h>\n#include <stdio.h>\n#define T 3\n\
                      #line 1 \"k.cu\"\n__global__ void k(float *a, int32_t n) { if (threadIdx.x < n) a[threadIdx.x] = T * sqrtf(M_PI); }";
        let code = compile(source, &["-use_fast_math", "-std=c++17"], "sm_80").unwrap();
        assert!(code.starts_with(b"\x7fELF"));
        assert_eq!(entry_of(&code, "k").as_deref(), Ok("_Z1kPfi"));
        let ptx = compile("extern \"C\" __global__ void k(float *a) { a[0] = 1; }", &[], "compute_80").unwrap();
        assert_eq!(entry_of(&ptx, "k").as_deref(), Ok("k"));
        let refused = |text, flags: &[&str]| compile(text, flags, "sm_80").unwrap_err().to_string();
        assert_eq!(
            refused("\n__global__ void k(float *a) { a[0] = x; }", &[]),
            "k.cu(2): error: identifier \"x\" is undefined"
        );
        assert!(refused("", &["--nonsense"]).contains("nonsense"));
    }
}
