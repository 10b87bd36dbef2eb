//! oneDNN's matmul primitive through its C interface, versions 2 and 3.
//!
//! The two versions differ in what a descriptor is: in 2 a struct that the caller owns and passes by pointer,
//! in 3 an object behind a handle. Nothing here looks inside a descriptor, so version 2's structs are only
//! blocks of memory that are large enough, and from there on both are a pointer.
//!
//! f32 only: the matmul primitive has no f64 on CPUs.
//!
//! # Source
//!
//! Signatures, constants and sizes from `dnnl.h` and `dnnl_types.h` of oneDNN 2.6; for version 3 from the
//! developer guide of oneDNN 3.0 ("Matrix Multiplication", "Memory").

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use super::library::{Loaded, text};
use super::operands::{Element, Operands};
use super::worker::Prepared;
use super::{Dtype, MatmulProblem, Unavailable, Variant};

/// Layout of B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weights {
    /// As the problem has it.
    Plain,
    /// What the library chooses (`dnnl_format_tag_any`), reordered once while preparing.
    Packed,
}

const DNNL_CPU: c_int = 1;
const DNNL_F32: c_int = 3;
const DNNL_FORMAT_TAG_ANY: c_int = 1;
const DNNL_STREAM_IN_ORDER: c_uint = 1;
const DNNL_QUERY_IMPL_INFO_STR: c_int = 8;
const DNNL_QUERY_WEIGHTS_MD: c_int = 131;
const DNNL_ARG_SRC: c_int = 1;
const DNNL_ARG_WEIGHTS: c_int = 33;
const DNNL_ARG_DST: c_int = 17;
const DNNL_ARG_FROM: c_int = DNNL_ARG_SRC;
const DNNL_ARG_TO: c_int = DNNL_ARG_DST;
const DNNL_RUNTIME_SEQ: c_uint = 1;
const DNNL_RUNTIME_OMP: c_uint = 2;
const DNNL_RUNTIME_TBB: c_uint = 4;
/// A handle that asks the library to allocate.
const DNNL_MEMORY_ALLOCATE: *mut c_void = usize::MAX as *mut c_void;
const DNNL_MAX_NDIMS: usize = 12;

type Status = c_int;
/// `dnnl_engine_t`, `dnnl_stream_t`, `dnnl_memory_t`, `dnnl_primitive_desc_t`, `dnnl_primitive_t`.
type Handle = *mut c_void;
/// `const dnnl_memory_desc_t *` in version 2, `const_dnnl_memory_desc_t` in version 3.
type MdPtr = *const c_void;
/// `dnnl_dims_t`
type Dims = [i64; DNNL_MAX_NDIMS];

/// `dnnl_version_t`
#[repr(C)]
struct VersionStruct {
    major: c_int,
    minor: c_int,
    patch: c_int,
    hash: *const c_char,
    cpu_runtime: c_uint,
    gpu_runtime: c_uint,
}

/// `dnnl_exec_arg_t`
#[repr(C)]
struct ExecArg {
    arg: c_int,
    memory: Handle,
}

/// Memory for a `dnnl_memory_desc_t` of version 2 (696 bytes in 2.6).
#[repr(C, align(64))]
struct MdBlock([u8; 2048]);

/// Memory for a `dnnl_matmul_desc_t` of version 2 (2800 bytes in 2.6).
#[repr(C, align(64))]
struct MatmulBlock([u8; 8192]);

/// A memory descriptor that lives as long as the process; there are a handful.
#[derive(Clone, Copy)]
struct MemoryDesc(MdPtr);

type GetVersion = unsafe extern "C" fn() -> *const VersionStruct;
type EngineCreate = unsafe extern "C" fn(*mut Handle, c_int, usize) -> Status;
type StreamCreate = unsafe extern "C" fn(*mut Handle, Handle, c_uint) -> Status;
type StreamWait = unsafe extern "C" fn(Handle) -> Status;
type MemoryCreate = unsafe extern "C" fn(*mut Handle, MdPtr, Handle, *mut c_void) -> Status;
type MdEqual = unsafe extern "C" fn(MdPtr, MdPtr) -> c_int;
type PdQuery = unsafe extern "C" fn(Handle, c_int, c_int, *mut c_void) -> Status;
type PdQueryMd = unsafe extern "C" fn(Handle, c_int, c_int) -> MdPtr;
type ReorderPdCreate = unsafe extern "C" fn(*mut Handle, MdPtr, Handle, MdPtr, Handle, *const c_void) -> Status;
type PrimitiveCreate = unsafe extern "C" fn(*mut Handle, Handle) -> Status;
type PrimitiveExecute = unsafe extern "C" fn(Handle, Handle, c_int, *const ExecArg) -> Status;
type OmpSetNumThreads = unsafe extern "C" fn(c_int);
type OmpGetMaxThreads = unsafe extern "C" fn() -> c_int;

// Version 2 writes a descriptor where the pointer shows; version 3 writes a handle there.
type MdByStrides<Out> = unsafe extern "C" fn(*mut Out, c_int, *const Dims, c_int, *const Dims) -> Status;
type MdByTag<Out> = unsafe extern "C" fn(*mut Out, c_int, *const Dims, c_int, c_int) -> Status;
type MatmulDescInit = unsafe extern "C" fn(*mut MatmulBlock, MdPtr, MdPtr, MdPtr, MdPtr) -> Status;
type PdCreate = unsafe extern "C" fn(*mut Handle, *const MatmulBlock, *const c_void, Handle, Handle) -> Status;
type MatmulPdCreate = unsafe extern "C" fn(*mut Handle, Handle, MdPtr, MdPtr, MdPtr, MdPtr, *const c_void) -> Status;

/// What the two versions do differently.
#[derive(Clone, Copy)]
enum Versioned {
    V2 {
        md_init_by_strides: MdByStrides<MdBlock>,
        md_init_by_tag: MdByTag<MdBlock>,
        matmul_desc_init: MatmulDescInit,
        primitive_desc_create: PdCreate,
    },
    V3 {
        md_create_with_strides: MdByStrides<MdPtr>,
        md_create_with_tag: MdByTag<MdPtr>,
        matmul_primitive_desc_create: MatmulPdCreate,
    },
}

/// Version of the installed library.
pub(super) fn version() -> Result<String, Unavailable> {
    Ok(Info::of(load()?)?.version)
}

/// Load oneDNN and create the matmul primitive for the operands' problem.
pub(super) fn prepare<T: Element>(
    operands: &mut Operands<T>,
    threads: usize,
    weights: Weights,
) -> Result<Prepared<T>, Unavailable> {
    let library = load()?;
    let info = Info::of(library)?;
    let unsupported = |reason: String| Err(Unavailable::Unsupported { reason });
    match T::DTYPE {
        Dtype::F32 => {}
        Dtype::F64 => return unsupported(format!("oneDNN {} has no f64 matmul on CPUs", info.version)),
    }
    let runtime = match info.cpu_runtime {
        DNNL_RUNTIME_OMP => {
            // Every OpenMP runtime has these functions; the environment has said the same already.
            // SAFETY: the signatures are those of the OpenMP standard.
            let threads_used = unsafe {
                library.function::<OmpSetNumThreads>(b"omp_set_num_threads\0")?(threads as c_int);
                library.function::<OmpGetMaxThreads>(b"omp_get_max_threads\0")?()
            };
            format!("OpenMP threads {threads_used}")
        }
        // TBB starts as many threads as this process has CPUs, and it is pinned to as many as it may have.
        DNNL_RUNTIME_TBB => "TBB threads".to_owned(),
        DNNL_RUNTIME_SEQ if threads == 1 => "one thread".to_owned(),
        DNNL_RUNTIME_SEQ => return unsupported(format!("this build of oneDNN {} has no threads", info.version)),
        other => {
            let reason = format!("oneDNN {} with CPU runtime {other:#x}; OpenMP or TBB is needed", info.version);
            return unsupported(reason);
        }
    };
    let api = Api::of(library, &info)?;
    let problem = operands.problem;
    let pointers = pointers_of(operands);
    let [a, b, c] = pointers;
    let src = api.md_by_strides(&dims(&problem, problem.m, problem.k), problem.a_strides())?;
    let plain_b = api.md_by_strides(&dims(&problem, problem.k, problem.n), problem.b_strides())?;
    let dst = api.md_by_strides(&dims(&problem, problem.m, problem.n), (problem.n, 1))?;
    let wanted_b = match weights {
        Weights::Plain => plain_b,
        Weights::Packed => api.md_any(&dims(&problem, problem.k, problem.n))?,
    };
    let descriptor = api.matmul_pd(src, wanted_b, dst)?;
    let src_memory = api.memory(src, a)?;
    let dst_memory = api.memory(dst, c)?;
    let plain_memory = api.memory(plain_b, b)?;
    let (weights_memory, layout) = match weights {
        Weights::Plain => (plain_memory, "B plain"),
        Weights::Packed => {
            let chosen_b = api.weights_md(descriptor)?;
            if api.md_equal(plain_b, chosen_b) {
                (plain_memory, "B plain, which is what it chooses here")
            } else {
                (api.reordered(plain_b, plain_memory, chosen_b)?, "B packed")
            }
        }
    };
    let details = format!("{}, {layout}, {runtime}", api.implementation(descriptor));
    let primitive = api.primitive(descriptor)?;
    let args = [
        ExecArg { arg: DNNL_ARG_SRC, memory: src_memory },
        ExecArg { arg: DNNL_ARG_WEIGHTS, memory: weights_memory },
        ExecArg { arg: DNNL_ARG_DST, memory: dst_memory },
    ];
    Ok(Prepared {
        version: info.version,
        details,
        core_type: None,
        run: Box::new(move |operands| {
            assert_eq!(pointers_of(operands), pointers, "the primitive runs on the operands it was made for");
            api.execute(primitive, &args).map_err(anyhow::Error::from)
        }),
    })
}

fn load() -> Result<Loaded, Unavailable> {
    let package = super::package_of(Variant::OneDnn);
    Loaded::open(&["libdnnl.so.3", "libdnnl.so.2", "libdnnl.so", "libdnnl.dylib"], package)
}

fn pointers_of<T: Element>(operands: &mut Operands<T>) -> [*mut c_void; 3] {
    [operands.a.as_ptr().cast_mut().cast(), operands.b.as_ptr().cast_mut().cast(), operands.c.as_mut_ptr().cast()]
}

/// Extents of one operand: `[rows, columns]`, or `[b, rows, columns]` for more than one multiplication.
fn dims(problem: &MatmulProblem, rows: usize, columns: usize) -> Vec<usize> {
    if problem.b == 1 { vec![rows, columns] } else { vec![problem.b, rows, columns] }
}

fn padded(extents: &[usize]) -> Dims {
    let mut dims = [0; DNNL_MAX_NDIMS];
    for (dim, &extent) in dims.iter_mut().zip(extents) {
        *dim = extent as i64;
    }
    dims
}

/// What the library says of itself.
struct Info {
    version: String,
    major: c_int,
    cpu_runtime: c_uint,
}

impl Info {
    fn of(library: Loaded) -> Result<Info, Unavailable> {
        // SAFETY: the signature is that of dnnl.h; the struct is static in the library.
        let version = unsafe { &*library.function::<GetVersion>(b"dnnl_version\0")?() };
        Ok(Info {
            version: format!("{}.{}.{}", version.major, version.minor, version.patch),
            major: version.major,
            cpu_runtime: version.cpu_runtime,
        })
    }
}

/// The library's functions with an engine and a stream.
#[derive(Clone, Copy)]
struct Api {
    versioned: Versioned,
    engine: Handle,
    stream: Handle,
    memory_create: MemoryCreate,
    md_equal: MdEqual,
    pd_query: PdQuery,
    pd_query_md: PdQueryMd,
    reorder_pd_create: ReorderPdCreate,
    primitive_create: PrimitiveCreate,
    primitive_execute: PrimitiveExecute,
    stream_wait: StreamWait,
}

impl Api {
    fn of(library: Loaded, info: &Info) -> Result<Api, Unavailable> {
        // SAFETY (all of the block): the signatures are those of the headers of the version that was asked for
        // its number; the places that handles are written to are local variables.
        unsafe {
            let versioned = match info.major {
                2 => Versioned::V2 {
                    md_init_by_strides: library.function(b"dnnl_memory_desc_init_by_strides\0")?,
                    md_init_by_tag: library.function(b"dnnl_memory_desc_init_by_tag\0")?,
                    matmul_desc_init: library.function(b"dnnl_matmul_desc_init\0")?,
                    primitive_desc_create: library.function(b"dnnl_primitive_desc_create\0")?,
                },
                3 => Versioned::V3 {
                    md_create_with_strides: library.function(b"dnnl_memory_desc_create_with_strides\0")?,
                    md_create_with_tag: library.function(b"dnnl_memory_desc_create_with_tag\0")?,
                    matmul_primitive_desc_create: library.function(b"dnnl_matmul_primitive_desc_create\0")?,
                },
                _ => {
                    let reason = format!("oneDNN {}; versions 2 and 3 are known", info.version);
                    return Err(Unavailable::Unsupported { reason });
                }
            };
            let engine_create: EngineCreate = library.function(b"dnnl_engine_create\0")?;
            let stream_create: StreamCreate = library.function(b"dnnl_stream_create\0")?;
            let mut engine = null_mut();
            succeeded("dnnl_engine_create", engine_create(&mut engine, DNNL_CPU, 0))?;
            let mut stream = null_mut();
            succeeded("dnnl_stream_create", stream_create(&mut stream, engine, DNNL_STREAM_IN_ORDER))?;
            Ok(Api {
                versioned,
                engine,
                stream,
                memory_create: library.function(b"dnnl_memory_create\0")?,
                md_equal: library.function(b"dnnl_memory_desc_equal\0")?,
                pd_query: library.function(b"dnnl_primitive_desc_query\0")?,
                pd_query_md: library.function(b"dnnl_primitive_desc_query_md\0")?,
                reorder_pd_create: library.function(b"dnnl_reorder_primitive_desc_create\0")?,
                primitive_create: library.function(b"dnnl_primitive_create\0")?,
                primitive_execute: library.function(b"dnnl_primitive_execute\0")?,
                stream_wait: library.function(b"dnnl_stream_wait\0")?,
            })
        }
    }

    /// f32, `extents` as from [`dims`], with the strides of a matrix's rows and columns.
    fn md_by_strides(&self, extents: &[usize], (row, col): (usize, usize)) -> Result<MemoryDesc, Unavailable> {
        let n_dims = extents.len() as c_int;
        let strides = match *extents {
            [_, rows, columns] => padded(&[rows * columns, row, col]),
            _ => padded(&[row, col]),
        };
        let extents = padded(extents);
        match self.versioned {
            Versioned::V2 { md_init_by_strides, .. } => {
                let block = Box::leak(Box::new(MdBlock([0; 2048])));
                // SAFETY: the block is larger than the descriptor; the arrays have their full length.
                let status = unsafe { md_init_by_strides(block, n_dims, &extents, DNNL_F32, &strides) };
                succeeded("dnnl_memory_desc_init_by_strides", status)?;
                Ok(MemoryDesc((&raw const *block).cast()))
            }
            Versioned::V3 { md_create_with_strides, .. } => {
                let mut handle = null();
                // SAFETY: the handle is written to a local variable; the arrays have their full length.
                let status = unsafe { md_create_with_strides(&mut handle, n_dims, &extents, DNNL_F32, &strides) };
                succeeded("dnnl_memory_desc_create_with_strides", status)?;
                Ok(MemoryDesc(handle))
            }
        }
    }

    /// f32, `extents` as from [`dims`], in whatever layout the primitive likes.
    fn md_any(&self, extents: &[usize]) -> Result<MemoryDesc, Unavailable> {
        let n_dims = extents.len() as c_int;
        let extents = padded(extents);
        match self.versioned {
            Versioned::V2 { md_init_by_tag, .. } => {
                let block = Box::leak(Box::new(MdBlock([0; 2048])));
                // SAFETY: the block is larger than the descriptor; the array has its full length.
                let status = unsafe { md_init_by_tag(block, n_dims, &extents, DNNL_F32, DNNL_FORMAT_TAG_ANY) };
                succeeded("dnnl_memory_desc_init_by_tag", status)?;
                Ok(MemoryDesc((&raw const *block).cast()))
            }
            Versioned::V3 { md_create_with_tag, .. } => {
                let mut handle = null();
                // SAFETY: the handle is written to a local variable; the array has its full length.
                let status =
                    unsafe { md_create_with_tag(&mut handle, n_dims, &extents, DNNL_F32, DNNL_FORMAT_TAG_ANY) };
                succeeded("dnnl_memory_desc_create_with_tag", status)?;
                Ok(MemoryDesc(handle))
            }
        }
    }

    /// Primitive descriptor of dst = src · weights, without bias and attributes.
    fn matmul_pd(&self, src: MemoryDesc, weights: MemoryDesc, dst: MemoryDesc) -> Result<Handle, Unavailable> {
        let mut descriptor = null_mut();
        match self.versioned {
            Versioned::V2 { matmul_desc_init, primitive_desc_create, .. } => {
                let mut matmul = Box::new(MatmulBlock([0; 8192]));
                // SAFETY: the block is larger than the descriptor, which is copied; no bias, no attributes and
                // no hint are allowed to be null.
                unsafe {
                    let status = matmul_desc_init(&mut *matmul, src.0, weights.0, null(), dst.0);
                    succeeded("dnnl_matmul_desc_init", status)?;
                    let status = primitive_desc_create(&mut descriptor, &*matmul, null(), self.engine, null_mut());
                    succeeded("dnnl_primitive_desc_create", status)?;
                }
            }
            Versioned::V3 { matmul_primitive_desc_create, .. } => {
                // SAFETY: the descriptors live on; no bias and no attributes are allowed to be null.
                let status = unsafe {
                    matmul_primitive_desc_create(&mut descriptor, self.engine, src.0, weights.0, null(), dst.0, null())
                };
                succeeded("dnnl_matmul_primitive_desc_create", status)?;
            }
        }
        Ok(descriptor)
    }

    /// The layout of B that a matmul's primitive descriptor settled on.
    fn weights_md(&self, descriptor: Handle) -> Result<MemoryDesc, Unavailable> {
        // SAFETY: the primitive descriptor is never destroyed, so what it owns stays.
        let md = unsafe { (self.pd_query_md)(descriptor, DNNL_QUERY_WEIGHTS_MD, 0) };
        if md.is_null() {
            return Err(Unavailable::Unsupported { reason: "oneDNN names no layout for B".to_owned() });
        }
        Ok(MemoryDesc(md))
    }

    fn md_equal(&self, a: MemoryDesc, b: MemoryDesc) -> bool {
        // SAFETY: both descriptors live as long as the process.
        unsafe { (self.md_equal)(a.0, b.0) != 0 }
    }

    /// The name of the implementation, such as `brg:avx512_core`.
    fn implementation(&self, descriptor: Handle) -> String {
        let mut name: *const c_char = null();
        // SAFETY: this query writes a pointer to a string that the primitive descriptor owns.
        unsafe {
            let status = (self.pd_query)(descriptor, DNNL_QUERY_IMPL_INFO_STR, 0, (&raw mut name).cast());
            if status == 0 { text(name) } else { "implementation unknown".to_owned() }
        }
    }

    /// A memory object on a buffer of ours, or on one the library allocates.
    fn memory(&self, md: MemoryDesc, buffer: *mut c_void) -> Result<Handle, Unavailable> {
        let mut memory = null_mut();
        // SAFETY: the descriptor lives on; a buffer of ours has all elements that it describes.
        let status = unsafe { (self.memory_create)(&mut memory, md.0, self.engine, buffer) };
        succeeded("dnnl_memory_create", status)?;
        Ok(memory)
    }

    /// A copy of `from` in the layout `to`.
    fn reordered(&self, from_md: MemoryDesc, from: Handle, to_md: MemoryDesc) -> Result<Handle, Unavailable> {
        let to = self.memory(to_md, DNNL_MEMORY_ALLOCATE)?;
        let mut descriptor = null_mut();
        // SAFETY: descriptors and engine live on; no attributes are allowed to be null.
        let status =
            unsafe { (self.reorder_pd_create)(&mut descriptor, from_md.0, self.engine, to_md.0, self.engine, null()) };
        succeeded("dnnl_reorder_primitive_desc_create", status)?;
        let args = [ExecArg { arg: DNNL_ARG_FROM, memory: from }, ExecArg { arg: DNNL_ARG_TO, memory: to }];
        self.execute(self.primitive(descriptor)?, &args)?;
        Ok(to)
    }

    fn primitive(&self, descriptor: Handle) -> Result<Handle, Unavailable> {
        let mut primitive = null_mut();
        // SAFETY: the descriptor came from this library and is never destroyed.
        succeeded("dnnl_primitive_create", unsafe { (self.primitive_create)(&mut primitive, descriptor) })?;
        Ok(primitive)
    }

    /// Run to the end.
    fn execute(&self, primitive: Handle, args: &[ExecArg]) -> Result<(), Unavailable> {
        // SAFETY: primitive, stream and memory objects are never destroyed; the count is the slice's own.
        unsafe {
            let status = (self.primitive_execute)(primitive, self.stream, args.len() as c_int, args.as_ptr());
            succeeded("dnnl_primitive_execute", status)?;
            succeeded("dnnl_stream_wait", (self.stream_wait)(self.stream))
        }
    }
}

fn succeeded(function: &str, status: Status) -> Result<(), Unavailable> {
    // dnnl_status_t
    let meaning = match status {
        0 => return Ok(()),
        1 => "out of memory",
        2 => "invalid arguments",
        3 => "not implemented",
        5 => "runtime error",
        _ => "failed",
    };
    Err(Unavailable::Unsupported { reason: format!("{function}: {meaning} (status {status})") })
}
