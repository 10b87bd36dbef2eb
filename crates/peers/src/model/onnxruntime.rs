//! ONNX Runtime through its C interface.
//!
//! # Source
//!
//! `onnxruntime_c_api.h` of 1.32: `OrtApi` is a table of functions that only grows at its end. The functions
//! used are listed here with their indices; all exist in 1.7.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use tilewright_graph::{DType, Tensor};
use tilewright_runtime::Aligned;

use super::worker::{OpenedSession, RuntimeSession, Wanted};
use crate::Unavailable;
use crate::library::{Loaded, text};

/// Oldest version of the table that has all functions used here.
const API_VERSION: u32 = 7;
/// `ORT_LOGGING_LEVEL_FATAL`.
const FATAL_ONLY: c_int = 4;
/// `ORT_ENABLE_ALL`.
const ALL_OPTIMIZATIONS: c_int = 99;
/// `OrtArenaAllocator`.
const ARENA: c_int = 1;
/// `OrtMemTypeDefault`.
const DEFAULT_MEMORY: c_int = 0;

type OrtHandle = *mut c_void;
/// Status; null on success.
type OrtStatus = OrtHandle;

macro_rules! api {
    ($($name:ident @ $at:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions that are used.
        #[derive(Clone, Copy)]
        struct Api {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            /// # Safety
            ///
            /// `table` has at least [`API_VERSION`].
            unsafe fn of(table: *const *const c_void) -> Api {
                // SAFETY: each index of the table holds a function of this signature.
                unsafe { Api { $($name: *table.add($at).cast::<unsafe extern "C" fn($($argument),*) $(-> $result)?>(),)* } }
            }
        }
    };
}

api! {
    error_message @ 2 (OrtStatus) -> *const c_char;
    create_env @ 3 (c_int, *const c_char, *mut OrtHandle) -> OrtStatus;
    create_session @ 7 (OrtHandle, *const c_char, OrtHandle, *mut OrtHandle) -> OrtStatus;
    run @ 9 (
        OrtHandle, OrtHandle, *const *const c_char, *const OrtHandle, usize, *const *const c_char, usize, *mut OrtHandle
    ) -> OrtStatus;
    create_options @ 10 (*mut OrtHandle) -> OrtStatus;
    set_optimization @ 23 (OrtHandle, c_int) -> OrtStatus;
    set_intra_threads @ 24 (OrtHandle, c_int) -> OrtStatus;
    set_inter_threads @ 25 (OrtHandle, c_int) -> OrtStatus;
    output_count @ 31 (OrtHandle, *mut usize) -> OrtStatus;
    output_name @ 37 (OrtHandle, usize, OrtHandle, *mut *mut c_char) -> OrtStatus;
    create_tensor @ 49 (OrtHandle, *mut c_void, usize, *const i64, usize, c_int, *mut OrtHandle) -> OrtStatus;
    is_tensor @ 50 (OrtHandle, *mut c_int) -> OrtStatus;
    tensor_data @ 51 (OrtHandle, *mut *mut c_void) -> OrtStatus;
    element_type @ 60 (OrtHandle, *mut c_int) -> OrtStatus;
    dimensions_count @ 61 (OrtHandle, *mut usize) -> OrtStatus;
    dimensions @ 62 (OrtHandle, *mut i64, usize) -> OrtStatus;
    type_and_shape @ 65 (OrtHandle, *mut OrtHandle) -> OrtStatus;
    cpu_memory @ 69 (c_int, c_int, *mut OrtHandle) -> OrtStatus;
    default_allocator @ 78 (*mut OrtHandle) -> OrtStatus;
    release_status @ 93 (OrtStatus);
    release_value @ 96 (OrtHandle);
    release_type_and_shape @ 99 (OrtHandle);
    fix_dimension @ 124 (OrtHandle, *const c_char, i64) -> OrtStatus;
    add_entry @ 130 (OrtHandle, *const c_char, *const c_char) -> OrtStatus;
}

/// Hardware that runs a model.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ExecutionProvider {
    /// CPUs, with threads that spin or sleep between operators.
    Cpu { spins: bool },
    /// NVIDIA's GPU, and CPUs for operators that its provider lacks.
    Cuda,
}

impl ExecutionProvider {
    /// Python package that contains the library.
    fn package(self) -> &'static str {
        match self {
            ExecutionProvider::Cpu { .. } => "onnxruntime",
            ExecutionProvider::Cuda => "onnxruntime-gpu",
        }
    }
}

/// Function that adds the provider for CUDA to options, for a device; exported by builds with that provider.
type AppendCuda = unsafe extern "C" fn(OrtHandle, c_int) -> OrtStatus;

/// Libraries that the provider for CUDA finds by name if they are already loaded.
const NEEDED_BY_CUDA: &[&str] = &[
    "libcudart.so",
    "libnvrtc.so",
    "libcublasLt.so",
    "libcublas.so",
    "libnvJitLink.so",
    "libcurand.so",
    "libcufft.so",
    "libcudnn.so",
];

/// Exports of the library: functions that return the table of a version, and the library's version.
#[repr(C)]
struct ApiBase {
    api: unsafe extern "C" fn(u32) -> *const *const c_void,
    version: unsafe extern "C" fn() -> *const c_char,
}

fn load(folder: Option<&Path>, package: &str) -> Result<(Loaded, Api, String), Unavailable> {
    let library = Loaded::open(&["libonnxruntime.so", "libonnxruntime.so.1"], &super::get(package), folder)?;
    // SAFETY: the signatures are those of the header; the table and the text are permanent.
    unsafe {
        let base = library.function::<unsafe extern "C" fn() -> *const ApiBase>(b"OrtGetApiBase\0")?();
        let version = text(((*base).version)());
        let table = ((*base).api)(API_VERSION);
        if table.is_null() {
            return Err(Unavailable::Unsupported {
                reason: format!("ONNX Runtime {version} is too old (take 1.7 or later)"),
            });
        }
        Ok((library, Api::of(table), version))
    }
}

/// Version of the installed library, if it has the provider.
pub(super) fn version(provider: ExecutionProvider) -> Result<String, Unavailable> {
    let (library, _, version) = load(None, provider.package())?;
    if provider == ExecutionProvider::Cuda {
        cuda_provider(library, None)?;
    }
    Ok(version)
}

impl Api {
    /// Turns the status of a call into a result.
    fn check(self, status: OrtStatus) -> Result<(), Unavailable> {
        if status.is_null() {
            return Ok(());
        }
        // SAFETY: the status is valid, and its text is copied before it is released.
        let reason = unsafe {
            let message = text((self.error_message)(status).cast());
            (self.release_status)(status);
            message
        };
        Err(Unavailable::Unsupported { reason: reason.lines().next().unwrap_or_default().to_owned() })
    }
}

/// Converts a text to a C string.
fn c_text(text: &str) -> Result<CString, Unavailable> {
    CString::new(text).map_err(|_| Unavailable::Unsupported { reason: format!("`{text}` has a zero byte in it") })
}

/// Opens a model.
pub(super) fn open(wanted: &Wanted, provider: ExecutionProvider) -> Result<OpenedSession, Unavailable> {
    let Wanted { model, dims, means } = wanted;
    let folder = means.folder.as_deref();
    let (library, api, version) = load(folder, provider.package())?;
    let append_cuda = (provider == ExecutionProvider::Cuda).then(|| cuda_provider(library, folder)).transpose()?;
    let spins = provider == ExecutionProvider::Cpu { spins: true };
    let path = CString::new(model.as_os_str().as_bytes())
        .map_err(|_| Unavailable::Unsupported { reason: "the model's path has a zero byte in it".to_owned() })?;
    let threads = c_int::try_from(means.threads).unwrap_or(c_int::MAX);
    let spinning = if spins { c"1" } else { c"0" };
    let (mut env, mut options, mut session) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let (mut memory, mut allocator) = (ptr::null_mut(), ptr::null_mut());
    let mut output_names = Vec::new();
    // SAFETY: the functions have the header's signatures, handles are those returned by the library, and
    // texts live as long as each call. Created objects live as long as the process.
    unsafe {
        api.check((api.create_env)(FATAL_ONLY, c"tilewright".as_ptr(), &raw mut env))?;
        api.check((api.create_options)(&raw mut options))?;
        api.check((api.set_optimization)(options, ALL_OPTIMIZATIONS))?;
        api.check((api.set_intra_threads)(options, threads))?;
        api.check((api.set_inter_threads)(options, 1))?;
        api.check((api.add_entry)(options, c"session.intra_op.allow_spinning".as_ptr(), spinning.as_ptr()))?;
        for (name, size) in dims {
            api.check((api.fix_dimension)(options, c_text(name)?.as_ptr(), i64::try_from(*size).unwrap_or(i64::MAX)))?;
        }
        if let Some(append_cuda) = append_cuda {
            let device = c_int::try_from(means.gpu.unwrap_or(0)).unwrap_or(c_int::MAX);
            api.check(append_cuda(options, device))?;
        }
        api.check((api.create_session)(env, path.as_ptr(), options, &raw mut session))?;
        api.check((api.cpu_memory)(ARENA, DEFAULT_MEMORY, &raw mut memory))?;
        api.check((api.default_allocator)(&raw mut allocator))?;
        let mut n_outputs = 0;
        api.check((api.output_count)(session, &raw mut n_outputs))?;
        for at in 0..n_outputs {
            let mut name = ptr::null_mut();
            api.check((api.output_name)(session, at, allocator, &raw mut name))?;
            output_names.push(c_text(&text(name))?);
        }
    }
    let details = match (means.threads, spins) {
        _ if append_cuda.is_some() => "all optimizations, tensors copied to the device and back".to_owned(),
        (1, _) => "all optimizations, 1 thread".to_owned(),
        (n, true) => format!("all optimizations, {n} threads that spin"),
        (n, false) => format!("all optimizations, {n} threads that sleep"),
    };
    let outputs = vec![ptr::null_mut(); output_names.len()];
    let session = Box::new(Ort { api, session, memory, inputs: Vec::new(), output_names, outputs });
    Ok(OpenedSession { version, details, session })
}

/// Finds the function that adds the provider for CUDA, and loads what that provider needs from the folder.
fn cuda_provider(library: Loaded, folder: Option<&Path>) -> Result<AppendCuda, Unavailable> {
    // SAFETY: the signature is that of the provider's header.
    let append = unsafe { library.function::<AppendCuda>(b"OrtSessionOptionsAppendExecutionProvider_CUDA\0") };
    let append = append.map_err(|_| Unavailable::NotInstalled {
        library: "libonnxruntime.so with a provider for CUDA".to_owned(),
        get: super::get(ExecutionProvider::Cuda.package()),
    })?;
    // Libraries installed in the system are found, or reported missing, by the provider itself.
    if folder.is_some() {
        NEEDED_BY_CUDA.iter().for_each(|name| {
            Loaded::open_for_all(name, folder);
        });
    }
    Ok(append)
}

struct Ort {
    api: Api,
    session: OrtHandle,
    memory: OrtHandle,
    inputs: Vec<InputTensor>,
    output_names: Vec<CString>,
    /// Null until a run has created them; later runs overwrite the same outputs.
    outputs: Vec<OrtHandle>,
}

/// Name of an input, its elements, and the library's tensor that refers to them.
struct InputTensor {
    name: CString,
    value: OrtHandle,
    /// Elements that the tensor refers to.
    _elements: Aligned,
}

impl RuntimeSession for Ort {
    fn give(&mut self, inputs: &[(String, Tensor)]) -> Result<(), Unavailable> {
        for input in self.inputs.drain(..) {
            // SAFETY: the value is valid, and has no other owner.
            unsafe { (self.api.release_value)(input.value) };
        }
        for (name, tensor) in inputs {
            let elements = super::aligned(tensor)?;
            let dims: Vec<i64> = tensor.shape().iter().map(|&d| d as i64).collect();
            let (dtype, n_bytes) = (tensor.dtype().to_onnx(), tensor.bytes().len());
            let mut value = ptr::null_mut();
            // SAFETY: the elements have the size of shape and type, and live as long as the value.
            self.api.check(unsafe {
                let pointer = elements.pointer().cast();
                (self.api.create_tensor)(
                    self.memory,
                    pointer,
                    n_bytes,
                    dims.as_ptr(),
                    dims.len(),
                    dtype,
                    &raw mut value,
                )
            })?;
            self.inputs.push(InputTensor { name: c_text(name)?, value, _elements: elements });
        }
        Ok(())
    }

    fn run(&mut self) -> Result<(), Unavailable> {
        let names: Vec<*const c_char> = self.inputs.iter().map(|input| input.name.as_ptr()).collect();
        let values: Vec<OrtHandle> = self.inputs.iter().map(|input| input.value).collect();
        let outputs: Vec<*const c_char> = self.output_names.iter().map(|name| name.as_ptr()).collect();
        // SAFETY: there are as many names as values of each kind; all live as long as the call.
        self.api.check(unsafe {
            (self.api.run)(
                self.session,
                ptr::null_mut(),
                names.as_ptr(),
                values.as_ptr(),
                values.len(),
                outputs.as_ptr(),
                outputs.len(),
                self.outputs.as_mut_ptr(),
            )
        })
    }

    fn outputs(&mut self) -> Result<Vec<Tensor>, Unavailable> {
        self.outputs.iter().map(|&value| self.output(value)).collect()
    }
}

impl Ort {
    fn output(&self, value: OrtHandle) -> Result<Tensor, Unavailable> {
        let (api, mut is_tensor, mut info) = (self.api, 0, ptr::null_mut());
        let (mut dtype, mut rank, mut data) = (0, 0, ptr::null_mut());
        // SAFETY: the value is an output of a run; results are written to variables of the right types.
        unsafe {
            api.check((api.is_tensor)(value, &raw mut is_tensor))?;
            if is_tensor == 0 {
                return Err(Unavailable::Unsupported { reason: "an output is no tensor".to_owned() });
            }
            api.check((api.type_and_shape)(value, &raw mut info))?;
            api.check((api.element_type)(info, &raw mut dtype))?;
            api.check((api.dimensions_count)(info, &raw mut rank))?;
            let mut dims = vec![0_i64; rank];
            api.check((api.dimensions)(info, dims.as_mut_ptr(), rank))?;
            (api.release_type_and_shape)(info);
            let dtype = DType::from_onnx(dtype.into())
                .map_err(|name| Unavailable::Unsupported { reason: format!("an output has elements {name}") })?;
            api.check((api.tensor_data)(value, &raw mut data))?;
            super::tensor_at(dtype, dims, data)
        }
    }
}
