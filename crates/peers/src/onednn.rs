//! oneDNN's matmul, inner product, convolution and deconvolution through its C interface, versions 2 and 3.
//!
//! The two versions differ in their descriptors: in version 2, a descriptor is a struct that the caller owns
//! and passes by pointer, in version 3 an object behind a handle. Nothing here looks inside a descriptor, so
//! version 2's structs are opaque blocks of memory that are large enough, and beyond that both are pointers.
//!
//! An addend of the epilogue is the content of the destination before a run, as inside a network, where the
//! sum replaces the addend: this saves a pass over memory, and means that runs without a load between them
//! accumulate.
//!
//! Supported types are f32, bf16, and products of 8-bit integers with 32-bit sums: these primitives have no
//! f64 on CPUs.
//!
//! # Source
//!
//! Signatures, constants and sizes from `dnnl.h` and `dnnl_types.h` of oneDNN 2.6 and 3.2.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};

use tilewright_ir::DType;
use tilewright_ir::op::EpilogueFunction;

use super::library::{Loaded, Means, text};
use super::operands::{FencedElements, OperandType, Operands};
use super::problem::{ConvProblem, Layouts, LibraryProblem, Matmul, PeerProblem};
use super::worker::{Prepared, RunFunction, shortest_ns};
use super::{Unavailable, Variant};

/// Algorithm of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConvolutionAlgorithm {
    /// `dnnl_convolution_direct`
    Direct,
    /// `dnnl_convolution_winograd`
    Winograd,
}

const DNNL_CPU: c_int = 1;
const DNNL_BF16: c_int = 2;
const DNNL_F32: c_int = 3;
const DNNL_S32: c_int = 4;
const DNNL_S8: c_int = 5;
const DNNL_U8: c_int = 6;
const DNNL_FORMAT_TAG_ANY: c_int = 1;
const DNNL_STREAM_IN_ORDER: c_uint = 1;
const DNNL_QUERY_IMPL_INFO_STR: c_int = 8;
const DNNL_QUERY_SRC_MD: c_int = 129;
const DNNL_QUERY_WEIGHTS_MD: c_int = 131;
const DNNL_QUERY_DST_MD: c_int = 133;
const DNNL_FORWARD_INFERENCE: c_int = 96;
const DNNL_CONVOLUTION_DIRECT: c_int = 1;
const DNNL_CONVOLUTION_WINOGRAD: c_int = 2;
const DNNL_DECONVOLUTION_DIRECT: c_int = 10;
const DNNL_ARG_SRC: c_int = 1;
const DNNL_ARG_WEIGHTS: c_int = 33;
const DNNL_ARG_BIAS: c_int = 41;
const DNNL_ARG_DST: c_int = 17;
const DNNL_ARG_FROM: c_int = DNNL_ARG_SRC;
const DNNL_ARG_TO: c_int = DNNL_ARG_DST;
const DNNL_RUNTIME_SEQ: c_uint = 1;
const DNNL_RUNTIME_OMP: c_uint = 2;
const DNNL_RUNTIME_TBB: c_uint = 4;
/// A handle that asks the library to allocate.
const DNNL_MEMORY_ALLOCATE: *mut c_void = usize::MAX as *mut c_void;
const DNNL_MAX_NDIMS: usize = 12;

type DnnlStatus = c_int;
/// `dnnl_engine_t`, `dnnl_stream_t`, `dnnl_memory_t`, `dnnl_primitive_desc_t`, `dnnl_primitive_t`.
type DnnlHandle = *mut c_void;
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
    memory: DnnlHandle,
}

/// Memory for a `dnnl_memory_desc_t` of version 2 (696 bytes in 2.6).
#[repr(C, align(64))]
struct MdBlock([u8; 2048]);

/// Memory for the descriptor of any operation of version 2 (in 2.6 a convolution's is the largest, of 6 KB).
#[repr(C, align(64))]
struct OpBlock([u8; 16384]);

/// Memory descriptor that lives as long as the process; there are a handful. Null for a missing tensor.
#[derive(Clone, Copy)]
struct MemoryDesc(MdPtr);

/// Memory object with its layout.
#[derive(Clone, Copy)]
struct MemoryObject {
    md: MemoryDesc,
    handle: DnnlHandle,
}

type GetVersion = unsafe extern "C" fn() -> *const VersionStruct;
type EngineCreate = unsafe extern "C" fn(*mut DnnlHandle, c_int, usize) -> DnnlStatus;
type StreamCreate = unsafe extern "C" fn(*mut DnnlHandle, DnnlHandle, c_uint) -> DnnlStatus;
type StreamWait = unsafe extern "C" fn(DnnlHandle) -> DnnlStatus;
type MemoryCreate = unsafe extern "C" fn(*mut DnnlHandle, MdPtr, DnnlHandle, *mut c_void) -> DnnlStatus;
type MdEqual = unsafe extern "C" fn(MdPtr, MdPtr) -> c_int;
type PdQuery = unsafe extern "C" fn(DnnlHandle, c_int, c_int, *mut c_void) -> DnnlStatus;
type PdQueryMd = unsafe extern "C" fn(DnnlHandle, c_int, c_int) -> MdPtr;
type ReorderPdCreate =
    unsafe extern "C" fn(*mut DnnlHandle, MdPtr, DnnlHandle, MdPtr, DnnlHandle, *const c_void) -> DnnlStatus;
type PrimitiveCreate = unsafe extern "C" fn(*mut DnnlHandle, DnnlHandle) -> DnnlStatus;
type PrimitiveExecute = unsafe extern "C" fn(DnnlHandle, DnnlHandle, c_int, *const ExecArg) -> DnnlStatus;
type OmpSetNumThreads = unsafe extern "C" fn(c_int);
type OmpGetMaxThreads = unsafe extern "C" fn() -> c_int;

// Version 2 writes a descriptor to the pointer's target; version 3 writes a handle there.
type MdByStrides<Out> = unsafe extern "C" fn(*mut Out, c_int, *const Dims, c_int, *const Dims) -> DnnlStatus;
type MdByTag<Out> = unsafe extern "C" fn(*mut Out, c_int, *const Dims, c_int, c_int) -> DnnlStatus;
type MatmulDescInit = unsafe extern "C" fn(*mut OpBlock, MdPtr, MdPtr, MdPtr, MdPtr) -> DnnlStatus;
type InnerProductDescInit = unsafe extern "C" fn(*mut OpBlock, c_int, MdPtr, MdPtr, MdPtr, MdPtr) -> DnnlStatus;
type ConvDescInit = unsafe extern "C" fn(
    *mut OpBlock,
    c_int,
    c_int,
    MdPtr,
    MdPtr,
    MdPtr,
    MdPtr,
    *const Dims,
    *const Dims,
    *const Dims,
    *const Dims,
) -> DnnlStatus;
type PdCreate = unsafe extern "C" fn(*mut DnnlHandle, *const OpBlock, DnnlHandle, DnnlHandle, DnnlHandle) -> DnnlStatus;
type MatmulPdCreate =
    unsafe extern "C" fn(*mut DnnlHandle, DnnlHandle, MdPtr, MdPtr, MdPtr, MdPtr, DnnlHandle) -> DnnlStatus;
type InnerProductPdCreate =
    unsafe extern "C" fn(*mut DnnlHandle, DnnlHandle, c_int, MdPtr, MdPtr, MdPtr, MdPtr, DnnlHandle) -> DnnlStatus;
type ConvPdCreate = unsafe extern "C" fn(
    *mut DnnlHandle,
    DnnlHandle,
    c_int,
    c_int,
    MdPtr,
    MdPtr,
    MdPtr,
    MdPtr,
    *const Dims,
    *const Dims,
    *const Dims,
    *const Dims,
    DnnlHandle,
) -> DnnlStatus;

// Attributes and post-operations; the appending functions changed with version 3.
type Create = unsafe extern "C" fn(*mut DnnlHandle) -> DnnlStatus;
type SetPostOps = unsafe extern "C" fn(DnnlHandle, DnnlHandle) -> DnnlStatus;
type AppendSumV2 = unsafe extern "C" fn(DnnlHandle, f32) -> DnnlStatus;
type AppendSumV3 = unsafe extern "C" fn(DnnlHandle, f32, i32, c_int) -> DnnlStatus;
type AppendEltwiseV2 = unsafe extern "C" fn(DnnlHandle, f32, c_int, f32, f32) -> DnnlStatus;
type AppendEltwiseV3 = unsafe extern "C" fn(DnnlHandle, c_int, f32, f32) -> DnnlStatus;

/// Functions whose signatures differ between the two versions.
#[derive(Clone, Copy)]
enum Versioned {
    V2 {
        md_init_by_strides: MdByStrides<MdBlock>,
        md_init_by_tag: MdByTag<MdBlock>,
        matmul_desc_init: MatmulDescInit,
        inner_product_desc_init: InnerProductDescInit,
        conv_desc_init: ConvDescInit,
        deconv_desc_init: ConvDescInit,
        primitive_desc_create: PdCreate,
        append_sum: AppendSumV2,
        append_eltwise: AppendEltwiseV2,
    },
    V3 {
        md_create_with_strides: MdByStrides<MdPtr>,
        md_create_with_tag: MdByTag<MdPtr>,
        matmul_pd_create: MatmulPdCreate,
        inner_product_pd_create: InnerProductPdCreate,
        conv_pd_create: ConvPdCreate,
        deconv_pd_create: ConvPdCreate,
        append_sum: AppendSumV3,
        append_eltwise: AppendEltwiseV3,
    },
}

/// Elementwise post-operations with their numbers in versions 2 and 3.
#[derive(Clone, Copy)]
struct Eltwise {
    v2: c_int,
    v3: c_int,
}

const RELU: Eltwise = Eltwise { v2: 0x1f, v3: 0x20 };
const TANH: Eltwise = Eltwise { v2: 0x2f, v3: 0x21 };
const LOGISTIC: Eltwise = Eltwise { v2: 0xaf, v3: 0x29 };
const CLIP: Eltwise = Eltwise { v2: 0xff, v3: 0x2e };
const GELU_ERF: Eltwise = Eltwise { v2: 0x30, v3: 0x31 };
const SWISH: Eltwise = Eltwise { v2: 0xdf, v3: 0x2c };
const LINEAR: Eltwise = Eltwise { v2: 0x7f, v3: 0x26 };

/// Primitive, with the parameters of its descriptor besides the tensors.
#[derive(Clone, Copy)]
enum DnnlOperation {
    Matmul,
    InnerProduct,
    Conv(ConvProblem, ConvolutionAlgorithm),
}

/// Number of an element type in the library.
fn data_type(dtype: DType) -> Option<c_int> {
    match dtype {
        DType::F32 => Some(DNNL_F32),
        DType::Bf16 => Some(DNNL_BF16),
        DType::I32 => Some(DNNL_S32),
        DType::I8 | DType::I7 => Some(DNNL_S8),
        DType::U8 => Some(DNNL_U8),
        _ => None,
    }
}

/// Tensor as the library addresses it: extents and strides, in elements.
struct AddressedTensor {
    /// Number of the element type.
    data_type: c_int,
    extents: Vec<usize>,
    strides: Vec<usize>,
}

impl AddressedTensor {
    fn dense(extents: &[usize]) -> AddressedTensor {
        let strides = (0..extents.len()).map(|axis| extents[axis + 1..].iter().product()).collect();
        AddressedTensor { data_type: DNNL_F32, extents: extents.to_vec(), strides }
    }

    /// Matrix of each multiplication, with the strides of its rows and columns.
    fn matrix(matmul: &Matmul, rows: usize, columns: usize, (row, col): (usize, usize)) -> AddressedTensor {
        let (extents, strides) = (vec![matmul.b, rows, columns], vec![rows * columns, row, col]);
        let batched = AddressedTensor { data_type: DNNL_F32, extents, strides };
        if matmul.b > 1 {
            return batched;
        }
        AddressedTensor { extents: batched.extents[1..].to_vec(), strides: batched.strides[1..].to_vec(), ..batched }
    }
}

/// Tensors of a primitive, in plain layouts.
struct Tensors {
    src: AddressedTensor,
    weights: AddressedTensor,
    bias: AddressedTensor,
    dst: AddressedTensor,
}

impl Tensors {
    fn of_matmul(matmul: &Matmul) -> Tensors {
        let &Matmul { b, m, n, k, .. } = matmul;
        Tensors {
            src: AddressedTensor::matrix(matmul, m, k, matmul.a_strides()),
            weights: AddressedTensor::matrix(matmul, k, n, matmul.b_strides()),
            bias: if b > 1 { AddressedTensor::dense(&[1, 1, n]) } else { AddressedTensor::dense(&[1, n]) },
            dst: AddressedTensor::matrix(matmul, m, n, (n, 1)),
        }
    }

    /// Tensors of an inner product; weights are `[n, k]`, whatever their strides.
    fn of_inner_product(matmul: &Matmul) -> Tensors {
        let (row, col) = matmul.b_strides();
        let weights =
            AddressedTensor { extents: vec![matmul.n, matmul.k], strides: vec![col, row], data_type: DNNL_F32 };
        Tensors { weights, bias: AddressedTensor::dense(&[matmul.n]), ..Tensors::of_matmul(matmul) }
    }

    /// Tensors of a convolution; weights are `[k, c, r, s]`, within each group if there are several.
    fn of_conv(conv: &ConvProblem) -> Tensors {
        let (c_group, k_group, [r, s]) = (conv.c / conv.groups, conv.k / conv.groups, conv.filter);
        let filter = r * s;
        let mut weights = AddressedTensor::dense(&[conv.groups, k_group, c_group, r, s]);
        if conv.transposed {
            weights.strides[1..3].copy_from_slice(&[filter, k_group * filter]);
        }
        if conv.groups == 1 {
            weights.extents.remove(0);
            weights.strides.remove(0);
        }
        let ([h, w], [p, q]) = (conv.image, conv.output());
        Tensors {
            src: AddressedTensor::dense(&[conv.n, conv.c, h, w]),
            weights,
            bias: AddressedTensor::dense(&[conv.k]),
            dst: AddressedTensor::dense(&[conv.n, conv.k, p, q]),
        }
    }
}

impl Tensors {
    /// Sets the element types to those of a problem; `None` unless the library has all of them.
    fn of_types(mut self, problem: &PeerProblem) -> Option<Tensors> {
        self.dst.data_type = data_type(problem.dtype)?;
        if problem.dtype.is_half() {
            self.bias.data_type = self.dst.data_type;
        }
        [self.src.data_type, self.weights.data_type] = [data_type(problem.factors[0])?, data_type(problem.factors[1])?];
        Some(self)
    }
}

/// Version of the installed library.
pub(super) fn version() -> Result<String, Unavailable> {
    Ok(OneDnnInfo::of(load(None)?)?.version)
}

/// Loads oneDNN and creates the primitive for the operands' problem.
///
/// A single multiplication can also be an inner product; the faster of the two is used.
pub(super) fn prepare<T: OperandType>(
    operands: &mut Operands<T>,
    means: &Means,
    layouts: Layouts,
    algorithm: ConvolutionAlgorithm,
) -> Result<Prepared<T>, Unavailable> {
    let threads = means.threads;
    let library = load(means.folder.as_deref())?;
    let info = OneDnnInfo::of(library)?;
    let unsupported = |reason: String| Err(Unavailable::Unsupported { reason });
    let problem = operands.problem.clone();
    let lacks =
        || Unavailable::Unsupported { reason: format!("oneDNN {} has no {} here", info.version, T::DTYPE.name()) };
    let typed = |tensors: Tensors| tensors.of_types(&problem).ok_or_else(lacks);
    let runtime = match info.cpu_runtime {
        DNNL_RUNTIME_OMP => {
            // Every OpenMP runtime has these functions; the environment already requests the same.
            // SAFETY: the signatures are those of the OpenMP standard.
            let threads_used = unsafe {
                library.function::<OmpSetNumThreads>(b"omp_set_num_threads\0")?(threads as c_int);
                library.function::<OmpGetMaxThreads>(b"omp_get_max_threads\0")?()
            };
            format!("OpenMP threads {threads_used}")
        }
        // TBB starts as many threads as this process has CPUs, and the process is pinned to the allowed
        // number.
        DNNL_RUNTIME_TBB => "TBB threads".to_owned(),
        DNNL_RUNTIME_SEQ if threads == 1 => "one thread".to_owned(),
        DNNL_RUNTIME_SEQ => return unsupported(format!("this build of oneDNN {} has no threads", info.version)),
        other => {
            let reason = format!("oneDNN {} with CPU runtime {other:#x}; OpenMP or TBB is needed", info.version);
            return unsupported(reason);
        }
    };
    let api = OneDnn::of(library, &info)?;
    let (operation, tensors) = match operands.problem.kernel {
        LibraryProblem::Matmul(matmul) => (DnnlOperation::Matmul, typed(Tensors::of_matmul(&matmul))?),
        LibraryProblem::Conv(conv) => (DnnlOperation::Conv(conv, algorithm), typed(Tensors::of_conv(&conv))?),
    };
    let mut best = api.bind(operands, operation, &tensors, layouts);
    if let (Err(Unavailable::Unsupported { reason }), ConvolutionAlgorithm::Winograd) = (&best, algorithm) {
        return unsupported(format!("oneDNN {} offers no Winograd convolution here: {reason}", info.version));
    }
    if let LibraryProblem::Matmul(matmul) = operands.problem.kernel
        && matmul.b == 1
        && let Ok(mut other) =
            api.bind(operands, DnnlOperation::InnerProduct, &typed(Tensors::of_inner_product(&matmul))?, layouts)
    {
        let is_faster = match &mut best {
            Ok(best) => {
                shortest_ns(&mut other.run, operands, threads)? < shortest_ns(&mut best.run, operands, threads)?
            }
            Err(_) => true,
        };
        if is_faster {
            best = Ok(other);
        }
    }
    let best = best?;
    Ok(Prepared { version: info.version, details: format!("{}, {runtime}", best.details), ..best })
}

fn load(folder: Option<&Path>) -> Result<Loaded, Unavailable> {
    let get = super::how_to_get(Variant::OneDnn);
    Loaded::open(&["libdnnl.so.3", "libdnnl.so.2", "libdnnl.so", "libdnnl.dylib"], &get, folder)
}

/// Pointers to source, weights, bias, addend and destination; null if the epilogue has no such operation.
fn pointers_of<T: OperandType>(operands: &mut Operands<T>) -> [*mut c_void; 5] {
    let pointer = |input: &FencedElements<T>| input.address().cast();
    let steps = || operands.problem.epilogue.iter().zip(&operands.further);
    let further = |function| steps().find(|(step, _)| step.function() == function).map_or(null_mut(), |f| pointer(f.1));
    let [bias, addend] = [EpilogueFunction::Bias, EpilogueFunction::Add].map(further);
    [pointer(&operands.a), pointer(&operands.b), bias, addend, operands.c.as_mut_ptr().cast()]
}

fn padded(extents: &[usize]) -> Dims {
    let mut dims = [0; DNNL_MAX_NDIMS];
    for (dim, &extent) in dims.iter_mut().zip(extents) {
        *dim = extent as i64;
    }
    dims
}

/// Version and CPU runtime of the library.
struct OneDnnInfo {
    version: String,
    major: c_int,
    cpu_runtime: c_uint,
}

impl OneDnnInfo {
    fn of(library: Loaded) -> Result<OneDnnInfo, Unavailable> {
        // SAFETY: the signature is that of dnnl.h; the struct is static in the library.
        let version = unsafe { &*library.function::<GetVersion>(b"dnnl_version\0")?() };
        Ok(OneDnnInfo {
            version: format!("{}.{}.{}", version.major, version.minor, version.patch),
            major: version.major,
            cpu_runtime: version.cpu_runtime,
        })
    }
}

/// Functions of the library with an engine and a stream.
#[derive(Clone, Copy)]
struct OneDnn {
    versioned: Versioned,
    engine: DnnlHandle,
    stream: DnnlHandle,
    memory_create: MemoryCreate,
    md_equal: MdEqual,
    pd_query: PdQuery,
    pd_query_md: PdQueryMd,
    reorder_pd_create: ReorderPdCreate,
    primitive_create: PrimitiveCreate,
    primitive_execute: PrimitiveExecute,
    stream_wait: StreamWait,
    attr_create: Create,
    post_ops_create: Create,
    attr_set_post_ops: SetPostOps,
}

impl OneDnn {
    fn of(library: Loaded, info: &OneDnnInfo) -> Result<OneDnn, Unavailable> {
        // SAFETY: (all of the block) the signatures are those of the headers of the library's reported
        // version; handles are written to local variables.
        unsafe {
            let versioned = match info.major {
                2 => Versioned::V2 {
                    md_init_by_strides: library.function(b"dnnl_memory_desc_init_by_strides\0")?,
                    md_init_by_tag: library.function(b"dnnl_memory_desc_init_by_tag\0")?,
                    matmul_desc_init: library.function(b"dnnl_matmul_desc_init\0")?,
                    inner_product_desc_init: library.function(b"dnnl_inner_product_forward_desc_init\0")?,
                    conv_desc_init: library.function(b"dnnl_dilated_convolution_forward_desc_init\0")?,
                    deconv_desc_init: library.function(b"dnnl_dilated_deconvolution_forward_desc_init\0")?,
                    primitive_desc_create: library.function(b"dnnl_primitive_desc_create\0")?,
                    append_sum: library.function(b"dnnl_post_ops_append_sum\0")?,
                    append_eltwise: library.function(b"dnnl_post_ops_append_eltwise\0")?,
                },
                3 => Versioned::V3 {
                    md_create_with_strides: library.function(b"dnnl_memory_desc_create_with_strides\0")?,
                    md_create_with_tag: library.function(b"dnnl_memory_desc_create_with_tag\0")?,
                    matmul_pd_create: library.function(b"dnnl_matmul_primitive_desc_create\0")?,
                    inner_product_pd_create: library.function(b"dnnl_inner_product_forward_primitive_desc_create\0")?,
                    conv_pd_create: library.function(b"dnnl_convolution_forward_primitive_desc_create\0")?,
                    deconv_pd_create: library.function(b"dnnl_deconvolution_forward_primitive_desc_create\0")?,
                    append_sum: library.function(b"dnnl_post_ops_append_sum\0")?,
                    append_eltwise: library.function(b"dnnl_post_ops_append_eltwise\0")?,
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
            Ok(OneDnn {
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
                attr_create: library.function(b"dnnl_primitive_attr_create\0")?,
                post_ops_create: library.function(b"dnnl_post_ops_create\0")?,
                attr_set_post_ops: library.function(b"dnnl_primitive_attr_set_post_ops\0")?,
            })
        }
    }

    /// Descriptor of a tensor in its given layout.
    fn md_plain(&self, tensor: &AddressedTensor) -> Result<MemoryDesc, Unavailable> {
        let n_dims = tensor.extents.len() as c_int;
        let (extents, strides) = (padded(&tensor.extents), padded(&tensor.strides));
        match self.versioned {
            Versioned::V2 { md_init_by_strides, .. } => {
                let block = Box::leak(Box::new(MdBlock([0; 2048])));
                // SAFETY: the block is larger than the descriptor; the arrays have their full length.
                let status = unsafe { md_init_by_strides(block, n_dims, &extents, tensor.data_type, &strides) };
                succeeded("dnnl_memory_desc_init_by_strides", status)?;
                Ok(MemoryDesc((&raw const *block).cast()))
            }
            Versioned::V3 { md_create_with_strides, .. } => {
                let mut handle = null();
                // SAFETY: the handle is written to a local variable; the arrays have their full length.
                let status =
                    unsafe { md_create_with_strides(&mut handle, n_dims, &extents, tensor.data_type, &strides) };
                succeeded("dnnl_memory_desc_create_with_strides", status)?;
                Ok(MemoryDesc(handle))
            }
        }
    }

    /// Descriptor of a tensor in any layout that the primitive prefers.
    fn md_any(&self, tensor: &AddressedTensor) -> Result<MemoryDesc, Unavailable> {
        let n_dims = tensor.extents.len() as c_int;
        let extents = padded(&tensor.extents);
        match self.versioned {
            Versioned::V2 { md_init_by_tag, .. } => {
                let block = Box::leak(Box::new(MdBlock([0; 2048])));
                // SAFETY: the block is larger than the descriptor; the array has its full length.
                let status = unsafe { md_init_by_tag(block, n_dims, &extents, tensor.data_type, DNNL_FORMAT_TAG_ANY) };
                succeeded("dnnl_memory_desc_init_by_tag", status)?;
                Ok(MemoryDesc((&raw const *block).cast()))
            }
            Versioned::V3 { md_create_with_tag, .. } => {
                let mut handle = null();
                // SAFETY: the handle is written to a local variable; the array has its full length.
                let status =
                    unsafe { md_create_with_tag(&mut handle, n_dims, &extents, tensor.data_type, DNNL_FORMAT_TAG_ANY) };
                succeeded("dnnl_memory_desc_create_with_tag", status)?;
                Ok(MemoryDesc(handle))
            }
        }
    }

    /// Binds the operation to the operands, with the tensors in `layouts` in the layouts that the library
    /// chooses.
    fn bind<T: OperandType>(
        &self,
        operands: &mut Operands<T>,
        operation: DnnlOperation,
        tensors: &Tensors,
        layouts: Layouts,
    ) -> Result<Prepared<T>, Unavailable> {
        let problem = &operands.problem;
        let attributes = self.attributes(problem)?;
        let pointers = pointers_of(operands);
        let [src, weights, bias, addend, dst] = pointers;
        let plain = |tensor: &AddressedTensor, buffer| -> Result<MemoryObject, Unavailable> {
            let md = self.md_plain(tensor)?;
            Ok(MemoryObject { md, handle: self.memory(md, buffer)? })
        };
        let src = plain(&tensors.src, src)?;
        let weights = plain(&tensors.weights, weights)?;
        let dst = plain(&tensors.dst, dst)?;
        let bias = if bias.is_null() { None } else { Some(plain(&tensors.bias, bias)?) };
        let wanted = |memory: MemoryObject, tensor: &AddressedTensor, is_free: bool| {
            if is_free { self.md_any(tensor) } else { Ok(memory.md) }
        };
        let mds = [
            wanted(src, &tensors.src, layouts.activations)?,
            wanted(weights, &tensors.weights, layouts.weights)?,
            bias.map_or(MemoryDesc(null()), |bias| bias.md),
            wanted(dst, &tensors.dst, layouts.activations)?,
        ];
        let descriptor = self.primitive_desc(operation, mds, attributes)?;

        let mut reordered: Vec<&str> = Vec::new();
        let mut chosen = |plain: MemoryObject, query: c_int, name: &'static str| -> Result<MemoryObject, Unavailable> {
            let md = self.chosen_md(descriptor, query)?;
            if self.md_equal(plain.md, md) {
                return Ok(plain);
            }
            reordered.push(name);
            Ok(MemoryObject { md, handle: self.memory(md, DNNL_MEMORY_ALLOCATE)? })
        };
        let src_used = chosen(src, DNNL_QUERY_SRC_MD, "source")?;
        let weights_used = chosen(weights, DNNL_QUERY_WEIGHTS_MD, "weights")?;
        let dst_used = chosen(dst, DNNL_QUERY_DST_MD, "destination")?;
        for (from, to) in [(src, src_used), (weights, weights_used)] {
            if from.handle != to.handle {
                self.copy(from, to)?()?;
            }
        }
        let load: Option<Reorder> =
            if addend.is_null() { None } else { Some(self.copy(plain(&tensors.dst, addend)?, dst_used)?) };
        let store: Option<Reorder> = if dst_used.handle == dst.handle { None } else { Some(self.copy(dst_used, dst)?) };

        let layout = match &reordered[..] {
            [] => "all plain".to_owned(),
            names => format!("{} in its own layout", names.join(", ")),
        };
        let details = format!("{}, {layout}", self.implementation(descriptor));
        let primitive = self.primitive(descriptor)?;
        let args: Vec<ExecArg> = [
            (DNNL_ARG_SRC, Some(src_used)),
            (DNNL_ARG_WEIGHTS, Some(weights_used)),
            (DNNL_ARG_BIAS, bias),
            (DNNL_ARG_DST, Some(dst_used)),
        ]
        .into_iter()
        .filter_map(|(arg, memory)| Some(ExecArg { arg, memory: memory?.handle }))
        .collect();
        let api = *self;
        let run: RunFunction<T> = Box::new(move |operands| {
            assert_eq!(pointers_of(operands), pointers, "the primitive runs on the operands it was made for");
            api.execute(primitive, &args)
        });
        let optional = |copy: Option<Reorder>| -> RunFunction<T> {
            Box::new(move |_| copy.as_ref().map_or(Ok(()), |copy| copy()))
        };
        Ok(Prepared { load: optional(load), store: optional(store), ..Prepared::in_place(String::new(), details, run) })
    }

    /// Attributes for the epilogue without its bias, which is an argument; null if there are no other
    /// operations.
    fn attributes(&self, problem: &PeerProblem) -> Result<DnnlHandle, Unavailable> {
        let mut attributes = null_mut();
        let mut post_ops = null_mut();
        // SAFETY: both handles are written to local variables.
        unsafe {
            succeeded("dnnl_primitive_attr_create", (self.attr_create)(&mut attributes))?;
            succeeded("dnnl_post_ops_create", (self.post_ops_create)(&mut post_ops))?;
        }
        for (at, step) in problem.epilogue.iter().enumerate() {
            let before = &problem.epilogue[..at];
            let is_first = before.iter().all(|before| before.function() != step.function());
            let (algorithm, [alpha, beta]) = match (step.function(), step.numbers()) {
                // The library adds a bias before all other operations.
                (EpilogueFunction::Bias, _)
                    if is_first && before.iter().all(|b| b.function() == EpilogueFunction::Add) =>
                {
                    continue;
                }
                // The destination can hold only one addend.
                (EpilogueFunction::Add, _) if is_first => {
                    self.append_sum(post_ops, data_type(problem.dtype).expect("it is known"))?;
                    continue;
                }
                (EpilogueFunction::Relu, _) => (RELU, [0.0, 0.0]),
                (EpilogueFunction::LeakyRelu, &[slope]) => (RELU, [slope, 0.0]),
                (EpilogueFunction::Clip, &[low, high]) => (CLIP, [low, high]),
                (EpilogueFunction::Sigmoid, _) => (LOGISTIC, [0.0, 0.0]),
                (EpilogueFunction::Tanh, _) => (TANH, [0.0, 0.0]),
                (EpilogueFunction::Gelu, _) => (GELU_ERF, [0.0, 0.0]),
                (EpilogueFunction::Silu, _) => (SWISH, [1.0, 0.0]),
                (EpilogueFunction::Linear, &[factor, term]) => (LINEAR, [factor, term]),
                (EpilogueFunction::Bias, _) => {
                    let reason = "oneDNN adds one bias, before anything else".to_owned();
                    return Err(Unavailable::Unsupported { reason });
                }
                _ => {
                    let reason = format!("oneDNN has no such post-operation as {step} here");
                    return Err(Unavailable::Unsupported { reason });
                }
            };
            self.append_eltwise(post_ops, algorithm, alpha as f32, beta as f32)?;
        }
        // SAFETY: both handles are the library's; the post-operations are copied.
        let status = unsafe { (self.attr_set_post_ops)(attributes, post_ops) };
        succeeded("dnnl_primitive_attr_set_post_ops", status)?;
        Ok(attributes)
    }

    fn append_sum(&self, post_ops: DnnlHandle, of: c_int) -> Result<(), Unavailable> {
        // SAFETY: the handle is the library's.
        let status = unsafe {
            match self.versioned {
                Versioned::V2 { append_sum, .. } => append_sum(post_ops, 1.0),
                Versioned::V3 { append_sum, .. } => append_sum(post_ops, 1.0, 0, of),
            }
        };
        succeeded("dnnl_post_ops_append_sum", status)
    }

    fn append_eltwise(&self, post_ops: DnnlHandle, kind: Eltwise, alpha: f32, beta: f32) -> Result<(), Unavailable> {
        // SAFETY: the handle is the library's.
        let status = unsafe {
            match self.versioned {
                Versioned::V2 { append_eltwise, .. } => append_eltwise(post_ops, 1.0, kind.v2, alpha, beta),
                Versioned::V3 { append_eltwise, .. } => append_eltwise(post_ops, kind.v3, alpha, beta),
            }
        };
        succeeded("dnnl_post_ops_append_eltwise", status)
    }

    /// Primitive descriptor of an operation on source, weights, bias and destination.
    fn primitive_desc(
        &self,
        operation: DnnlOperation,
        [src, weights, bias, dst]: [MemoryDesc; 4],
        attributes: DnnlHandle,
    ) -> Result<DnnlHandle, Unavailable> {
        let ([src, weights], [bias, dst]) = ([src.0, weights.0], [bias.0, dst.0]);
        let engine = self.engine;
        let mut descriptor = null_mut();
        // SAFETY: (all of the match) the blocks are larger than the descriptors, which are copied; the memory
        // descriptors stay alive, that of the bias may be null, and so may the hint; the arrays have their
        // full length.
        let status = unsafe {
            match self.versioned {
                Versioned::V2 {
                    matmul_desc_init,
                    inner_product_desc_init,
                    conv_desc_init,
                    deconv_desc_init,
                    primitive_desc_create,
                    ..
                } => {
                    let mut op = Box::new(OpBlock([0; 16384]));
                    let status = match operation {
                        DnnlOperation::Matmul => matmul_desc_init(&mut *op, src, weights, bias, dst),
                        DnnlOperation::InnerProduct => {
                            inner_product_desc_init(&mut *op, DNNL_FORWARD_INFERENCE, src, weights, bias, dst)
                        }
                        DnnlOperation::Conv(conv, algorithm) => {
                            let init = if conv.transposed { deconv_desc_init } else { conv_desc_init };
                            let (kind, [strides, dilates, begin, end]) = conv_arguments(&conv, algorithm);
                            let forward = DNNL_FORWARD_INFERENCE;
                            init(&mut *op, forward, kind, src, weights, bias, dst, &strides, &dilates, &begin, &end)
                        }
                    };
                    succeeded("a descriptor", status)?;
                    primitive_desc_create(&mut descriptor, &*op, attributes, engine, null_mut())
                }
                Versioned::V3 {
                    matmul_pd_create, inner_product_pd_create, conv_pd_create, deconv_pd_create, ..
                } => match operation {
                    DnnlOperation::Matmul => {
                        matmul_pd_create(&mut descriptor, engine, src, weights, bias, dst, attributes)
                    }
                    DnnlOperation::InnerProduct => {
                        let forward = DNNL_FORWARD_INFERENCE;
                        inner_product_pd_create(&mut descriptor, engine, forward, src, weights, bias, dst, attributes)
                    }
                    DnnlOperation::Conv(conv, algorithm) => {
                        let create = if conv.transposed { deconv_pd_create } else { conv_pd_create };
                        let (kind, [strides, dilates, begin, end]) = conv_arguments(&conv, algorithm);
                        create(
                            &mut descriptor,
                            engine,
                            DNNL_FORWARD_INFERENCE,
                            kind,
                            src,
                            weights,
                            bias,
                            dst,
                            &strides,
                            &dilates,
                            &begin,
                            &end,
                            attributes,
                        )
                    }
                },
            }
        };
        succeeded("a primitive descriptor", status)?;
        Ok(descriptor)
    }

    /// Layout that a primitive descriptor has chosen.
    fn chosen_md(&self, descriptor: DnnlHandle, query: c_int) -> Result<MemoryDesc, Unavailable> {
        // SAFETY: the primitive descriptor is never destroyed, and neither is what it owns.
        let md = unsafe { (self.pd_query_md)(descriptor, query, 0) };
        if md.is_null() {
            return Err(Unavailable::Unsupported { reason: "oneDNN names no layout".to_owned() });
        }
        Ok(MemoryDesc(md))
    }

    fn md_equal(&self, a: MemoryDesc, b: MemoryDesc) -> bool {
        // SAFETY: both descriptors live as long as the process.
        unsafe { (self.md_equal)(a.0, b.0) != 0 }
    }

    /// Name of the implementation, such as `brg:avx512_core`.
    fn implementation(&self, descriptor: DnnlHandle) -> String {
        let mut name: *const c_char = null();
        // SAFETY: this query writes a pointer to a string that the primitive descriptor owns.
        unsafe {
            let status = (self.pd_query)(descriptor, DNNL_QUERY_IMPL_INFO_STR, 0, (&raw mut name).cast());
            if status == 0 { text(name) } else { "implementation unknown".to_owned() }
        }
    }

    /// Memory object on our buffer, or on one that the library allocates.
    fn memory(&self, md: MemoryDesc, buffer: *mut c_void) -> Result<DnnlHandle, Unavailable> {
        let mut memory = null_mut();
        // SAFETY: the descriptor stays alive; our buffer has all elements that it describes.
        let status = unsafe { (self.memory_create)(&mut memory, md.0, self.engine, buffer) };
        succeeded("dnnl_memory_create", status)?;
        Ok(memory)
    }

    /// Makes a reorder that copies `from` to `to`, in the layout of `to`.
    fn copy(&self, from: MemoryObject, to: MemoryObject) -> Result<Reorder, Unavailable> {
        let mut descriptor = null_mut();
        // SAFETY: descriptors and engine stay alive; attributes may be null.
        let status =
            unsafe { (self.reorder_pd_create)(&mut descriptor, from.md.0, self.engine, to.md.0, self.engine, null()) };
        succeeded("dnnl_reorder_primitive_desc_create", status)?;
        let primitive = self.primitive(descriptor)?;
        let args =
            [ExecArg { arg: DNNL_ARG_FROM, memory: from.handle }, ExecArg { arg: DNNL_ARG_TO, memory: to.handle }];
        let api = *self;
        Ok(Box::new(move || api.execute(primitive, &args)))
    }

    fn primitive(&self, descriptor: DnnlHandle) -> Result<DnnlHandle, Unavailable> {
        let mut primitive = null_mut();
        // SAFETY: the descriptor came from this library and is never destroyed.
        succeeded("dnnl_primitive_create", unsafe { (self.primitive_create)(&mut primitive, descriptor) })?;
        Ok(primitive)
    }

    /// Executes a primitive to the end.
    fn execute(&self, primitive: DnnlHandle, args: &[ExecArg]) -> Result<(), Unavailable> {
        // SAFETY: primitive, stream and memory objects are never destroyed; the count is the slice's length.
        unsafe {
            let status = (self.primitive_execute)(primitive, self.stream, args.len() as c_int, args.as_ptr());
            succeeded("dnnl_primitive_execute", status)?;
            succeeded("dnnl_stream_wait", (self.stream_wait)(self.stream))
        }
    }
}

/// Function that copies one tensor into another's layout.
type Reorder = Box<dyn Fn() -> Result<(), Unavailable>>;

/// Algorithm, strides, dilations (0 for neighbours) and padding in the form of descriptors.
fn conv_arguments(conv: &ConvProblem, algorithm: ConvolutionAlgorithm) -> (c_int, [Dims; 4]) {
    let kind = match algorithm {
        _ if conv.transposed => DNNL_DECONVOLUTION_DIRECT,
        ConvolutionAlgorithm::Direct => DNNL_CONVOLUTION_DIRECT,
        ConvolutionAlgorithm::Winograd => DNNL_CONVOLUTION_WINOGRAD,
    };
    let mut end = [0; DNNL_MAX_NDIMS];
    end[..2].copy_from_slice(&conv.pad_end);
    let dilates = conv.dilation.map(|distance| distance - 1);
    (kind, [padded(&conv.stride), padded(&dilates), padded(&conv.pad_begin), end])
}

fn succeeded(function: &str, status: DnnlStatus) -> Result<(), Unavailable> {
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
