//! OpenVINO through its C interface.
//!
//! # Source
//!
//! `openvino/c/openvino.h` of 2026.4.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use tilewright_graph::{DType, Tensor};
use tilewright_runtime::Aligned;

use super::worker::{OpenedSession, RuntimeSession, Wanted};
use crate::Unavailable;
use crate::library::{Loaded, text};

type OpenVinoHandle = *mut c_void;
/// Status; zero on success.
type OpenVinoStatus = c_int;

/// Number of each element type (`ov_element_type_e`).
const TYPES: &[(DType, c_int)] = &[
    (DType::Bool, 1),
    (DType::Bf16, 2),
    (DType::F16, 3),
    (DType::F32, 4),
    (DType::F64, 5),
    (DType::I8, 7),
    (DType::I16, 8),
    (DType::I32, 9),
    (DType::I64, 10),
    (DType::U8, 16),
    (DType::U16, 17),
    (DType::U32, 18),
    (DType::U64, 19),
];

/// `ov_shape_t`.
#[repr(C)]
struct Shape {
    rank: i64,
    dims: *mut i64,
}

/// `ov_dimension_t`: a range.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dimension {
    min: i64,
    max: i64,
}

/// `ov_partial_shape_t`.
#[repr(C)]
struct PartialShape {
    rank: Dimension,
    dims: *mut Dimension,
}

/// `ov_version_t`.
#[repr(C)]
struct Version {
    build_number: *const c_char,
    description: *const c_char,
}

macro_rules! api {
    ($($name:ident: $symbol:literal ($($argument:ty),* $(; $rest:tt)?);)*) => {
        /// Functions that are used.
        #[derive(Clone, Copy)]
        struct OpenVinoFunctions {
            $($name: unsafe extern "C" fn($($argument),* $(, $rest)?) -> OpenVinoStatus,)*
        }

        impl OpenVinoFunctions {
            fn of(library: Loaded) -> Result<OpenVinoFunctions, Unavailable> {
                // SAFETY: the signatures are those of the headers.
                unsafe { Ok(OpenVinoFunctions { $($name: library.function(concat!($symbol, "\0").as_bytes())?,)* }) }
            }
        }
    };
}

api! {
    version: "ov_get_openvino_version"(*mut Version);
    create_core: "ov_core_create"(*mut OpenVinoHandle);
    read_model: "ov_core_read_model"(OpenVinoHandle, *const c_char, *const c_char, *mut OpenVinoHandle);
    reshape: "ov_model_reshape"(OpenVinoHandle, *const *const c_char, *const PartialShape, usize);
    compile: "ov_core_compile_model"(OpenVinoHandle, OpenVinoHandle, *const c_char, usize, *mut OpenVinoHandle; ...);
    create_request: "ov_compiled_model_create_infer_request"(OpenVinoHandle, *mut OpenVinoHandle);
    count_outputs: "ov_compiled_model_outputs_size"(OpenVinoHandle, *mut usize);
    tensor_over: "ov_tensor_create_from_host_ptr"(c_int, Shape, *mut c_void, *mut OpenVinoHandle);
    set_tensor: "ov_infer_request_set_tensor"(OpenVinoHandle, *const c_char, OpenVinoHandle);
    infer: "ov_infer_request_infer"(OpenVinoHandle);
    output: "ov_infer_request_get_output_tensor_by_index"(OpenVinoHandle, usize, *mut OpenVinoHandle);
    element_type: "ov_tensor_get_element_type"(OpenVinoHandle, *mut c_int);
    shape: "ov_tensor_get_shape"(OpenVinoHandle, *mut Shape);
    free_shape: "ov_shape_free"(*mut Shape);
    data: "ov_tensor_data"(OpenVinoHandle, *mut *mut c_void);
}

/// Library with its functions that do not return a status.
#[derive(Clone, Copy)]
struct OpenVino {
    api: OpenVinoFunctions,
    last_error: unsafe extern "C" fn() -> *const c_char,
    free_tensor: unsafe extern "C" fn(OpenVinoHandle),
}

impl OpenVino {
    fn load(folder: Option<&Path>) -> Result<OpenVino, Unavailable> {
        let library = Loaded::open(&["libopenvino_c.so"], &super::get("openvino"), folder)?;
        // SAFETY: the signatures are those of the headers.
        let (last_error, free_tensor) =
            unsafe { (library.function(b"ov_get_last_err_msg\0")?, library.function(b"ov_tensor_free\0")?) };
        Ok(OpenVino { api: OpenVinoFunctions::of(library)?, last_error, free_tensor })
    }

    fn check(&self, status: OpenVinoStatus) -> Result<(), Unavailable> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the text is copied immediately.
        let message = unsafe { text((self.last_error)()) };
        // The first lines name the place in OpenVINO's sources.
        let said = message.lines().map(str::trim).rfind(|line| !line.is_empty());
        let reason = said.map_or_else(|| format!("it answers with status {status}"), str::to_owned);
        Err(Unavailable::Unsupported { reason })
    }

    fn version(&self) -> Result<String, Unavailable> {
        let mut version = Version { build_number: ptr::null(), description: ptr::null() };
        // SAFETY: the call returns permanent texts.
        unsafe {
            self.check((self.api.version)(&raw mut version))?;
            Ok(text(version.build_number))
        }
    }
}

/// Version of the installed library.
pub(super) fn version() -> Result<String, Unavailable> {
    OpenVino::load(None)?.version()
}

fn c_text(bytes: &[u8]) -> Result<CString, Unavailable> {
    CString::new(bytes).map_err(|_| Unavailable::Unsupported { reason: "a name has a zero byte in it".to_owned() })
}

/// Opens a model for inputs of these shapes.
pub(super) fn open(wanted: &Wanted, inputs: &[(String, Tensor)]) -> Result<OpenedSession, Unavailable> {
    let library = OpenVino::load(wanted.means.folder.as_deref())?;
    let api = library.api;
    let path = c_text(wanted.model.as_os_str().as_bytes())?;
    let threads = c_text(wanted.means.threads.to_string().as_bytes())?;
    let names: Vec<CString> = inputs.iter().map(|(name, _)| c_text(name.as_bytes())).collect::<Result<_, _>>()?;
    let names: Vec<*const c_char> = names.iter().map(|name| name.as_ptr()).collect();
    let fixed = |size: usize| Dimension { min: size as i64, max: size as i64 };
    let mut dims: Vec<Vec<Dimension>> =
        inputs.iter().map(|(_, x)| x.shape().iter().map(|&d| fixed(d)).collect()).collect();
    let shapes: Vec<PartialShape> =
        dims.iter_mut().map(|dims| PartialShape { rank: fixed(dims.len()), dims: dims.as_mut_ptr() }).collect();
    let (mut core, mut model, mut compiled, mut request) =
        (ptr::null_mut(), ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let mut n_outputs = 0;
    // SAFETY: the functions have the headers' signatures, handles are those returned by the library, and
    // texts and shapes live as long as each call. Created objects live as long as the process.
    unsafe {
        library.check((api.create_core)(&raw mut core))?;
        library.check((api.read_model)(core, path.as_ptr(), ptr::null(), &raw mut model))?;
        library.check((api.reshape)(model, names.as_ptr(), shapes.as_ptr(), shapes.len()))?;
        library.check((api.compile)(
            core,
            model,
            c"CPU".as_ptr(),
            10,
            &raw mut compiled,
            c"INFERENCE_NUM_THREADS".as_ptr(),
            threads.as_ptr(),
            c"NUM_STREAMS".as_ptr(),
            c"1".as_ptr(),
            c"PERFORMANCE_HINT".as_ptr(),
            c"LATENCY".as_ptr(),
            c"INFERENCE_PRECISION_HINT".as_ptr(),
            c"f32".as_ptr(),
            // By default products with compressed weights round activations to 8 bits.
            c"DYNAMIC_QUANTIZATION_GROUP_SIZE".as_ptr(),
            c"0".as_ptr(),
        ))?;
        library.check((api.create_request)(compiled, &raw mut request))?;
        library.check((api.count_outputs)(compiled, &raw mut n_outputs))?;
    }
    let details = format!("f32, activations not quantized, 1 stream, threads {}", wanted.means.threads);
    let version = library.version()?;
    Ok(OpenedSession {
        version,
        details,
        session: Box::new(InferRequest { library, request, n_outputs, inputs: Vec::new() }),
    })
}

struct InferRequest {
    library: OpenVino,
    request: OpenVinoHandle,
    n_outputs: usize,
    /// Memory of the request's inputs.
    inputs: Vec<Aligned>,
}

impl RuntimeSession for InferRequest {
    fn give(&mut self, inputs: &[(String, Tensor)]) -> Result<(), Unavailable> {
        let (library, api) = (self.library, self.library.api);
        let mut given = Vec::new();
        for (name, tensor) in inputs {
            let elements = super::aligned(tensor)?;
            let mut dims: Vec<i64> = tensor.shape().iter().map(|&d| d as i64).collect();
            let shape = Shape { rank: dims.len() as i64, dims: dims.as_mut_ptr() };
            let (name, mut over) = (c_text(name.as_bytes())?, ptr::null_mut());
            let number = TYPES.iter().find(|row| row.0 == tensor.dtype()).expect("every type has a row").1;
            // SAFETY: the elements have the size of shape and type, and live as long as the request refers to
            // them. The request keeps the tensor, whose handle is not needed any more.
            unsafe {
                library.check((api.tensor_over)(number, shape, elements.pointer().cast(), &raw mut over))?;
                let set = library.check((api.set_tensor)(self.request, name.as_ptr(), over));
                (library.free_tensor)(over);
                set?;
            }
            given.push(elements);
        }
        self.inputs = given;
        Ok(())
    }

    fn run(&mut self) -> Result<(), Unavailable> {
        // SAFETY: the request and the memory of its inputs are alive.
        self.library.check(unsafe { (self.library.api.infer)(self.request) })
    }

    fn outputs(&mut self) -> Result<Vec<Tensor>, Unavailable> {
        (0..self.n_outputs).map(|at| self.output(at)).collect()
    }
}

impl InferRequest {
    fn output(&self, at: usize) -> Result<Tensor, Unavailable> {
        let (library, api) = (self.library, self.library.api);
        let (mut tensor, mut number, mut data) = (ptr::null_mut(), 0, ptr::null_mut());
        let mut shape = Shape { rank: 0, dims: ptr::null_mut() };
        // SAFETY: results are written to variables of the right types; the tensor is freed after its elements
        // are copied.
        unsafe {
            library.check((api.output)(self.request, at, &raw mut tensor))?;
            library.check((api.element_type)(tensor, &raw mut number))?;
            library.check((api.shape)(tensor, &raw mut shape))?;
            let rank = usize::try_from(shape.rank).unwrap_or(0);
            let dims = if rank == 0 { Vec::new() } else { std::slice::from_raw_parts(shape.dims, rank).to_vec() };
            library.check((api.free_shape)(&raw mut shape))?;
            library.check((api.data)(tensor, &raw mut data))?;
            let found = TYPES.iter().find(|row| row.1 == number).ok_or_else(|| Unavailable::Unsupported {
                reason: format!("an output's elements have the type number {number}"),
            });
            let copied = found.and_then(|row| super::tensor_at(row.0, dims, data));
            (library.free_tensor)(tensor);
            copied
        }
    }
}
