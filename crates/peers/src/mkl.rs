//! Intel's MKL through its C interface, which is like that of [OpenBLAS](super::openblas).
//!
//! # Source
//!
//! Signatures and constants from `mkl_service.h` of oneMKL 2025.

use std::ffi::{c_char, c_int};
use std::path::Path;

use super::library::{Loaded, Means, text};
use super::openblas::{Blas, Info, multiply};
use super::operands::{CpuElement, Operands};
use super::worker::Prepared;
use super::{Unavailable, Variant};

const MKL_THREADING_INTEL: c_int = 0;
const MKL_THREADING_SEQUENTIAL: c_int = 1;
const MKL_THREADING_GNU: c_int = 3;

type MklSetInt = unsafe extern "C" fn(c_int) -> c_int;
type GetVersionString = unsafe extern "C" fn(*mut c_char, c_int);

/// Version of the installed library.
pub(super) fn version() -> Result<String, Unavailable> {
    version_of(load(None)?)
}

/// Loads MKL and chooses the fastest way to call it for the operands' problem.
pub(super) fn prepare<T: CpuElement>(operands: &mut Operands<T>, means: &Means) -> Result<Prepared<T>, Unavailable> {
    let matmul = operands.problem.multiplication_only()?;
    let folder = means.folder.as_deref();
    // Its own OpenMP, if installed: MKL finds a loaded library by its name.
    let is_intel = means.threads > 1 && Loaded::open_for_all("libiomp5.so", folder);
    let library = load(folder)?;
    let (layer, name) = match means.threads {
        1 => (MKL_THREADING_SEQUENTIAL, "without threads"),
        _ if is_intel => (MKL_THREADING_INTEL, "Intel OpenMP"),
        _ => (MKL_THREADING_GNU, "GNU OpenMP"),
    };
    // SAFETY: the signature is that of mkl_service.h; no other function of the library was called before.
    unsafe { library.function::<MklSetInt>(b"MKL_Set_Threading_Layer\0")?(layer) };
    let info = Info { version: version_of(library)?, core_type: None };
    let threads_by = [&b"MKL_Set_Num_Threads\0"[..], b"MKL_Get_Max_Threads\0"];
    let blas = Blas::<T>::of(library, info, threads_by, &[matmul.m, matmul.n, matmul.k])?;
    let prepared = multiply(&blas, matmul, operands, means.threads)?;
    Ok(Prepared { details: format!("{}, {name}", prepared.details), ..prepared })
}

fn load(folder: Option<&Path>) -> Result<Loaded, Unavailable> {
    let get = super::how_to_get(Variant::Mkl);
    Loaded::open(&["libmkl_rt.so.3", "libmkl_rt.so.2", "libmkl_rt.so"], &get, folder)
}

fn version_of(library: Loaded) -> Result<String, Unavailable> {
    let mut buffer: [c_char; 256] = [0; 256];
    // SAFETY: the signature is that of mkl_service.h; the buffer is one zero byte longer than the length
    // passed.
    let version = unsafe {
        library.function::<GetVersionString>(b"MKL_Get_Version_String\0")?(buffer.as_mut_ptr(), 255);
        text(buffer.as_ptr())
    };
    // "Intel(R) oneAPI Math Kernel Library Version 2025.0-Product Build 20241009 for Intel(R) 64 architecture
    // …"
    let number = version.split_once("Version ").map_or(&version[..], |(_, rest)| rest);
    Ok(number.split([' ', '-']).next().unwrap_or("unknown").to_owned())
}
