//! cuBLAS, and cuBLASLt, which comes with it.
//!
//! # Source
//!
//! Signatures and constants from `cublas_api.h` and `cublasLt.h` of CUDA 13.

use std::ffi::{c_int, c_longlong, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::rc::Rc;

use tilewright_device::cuda::{CudaContext, CudaMemory};
use tilewright_ir::DType;

use super::gpu::{DeviceOperands, DriverContext as _, FusedEpilogue, QueuedCall, sizes};
use super::library::{Loaded, Means, functions};
use super::operands::{OperandType, Operands};
use super::problem::{LibraryProblem, Matmul};
use super::worker::Prepared;
use super::{Precision, Unavailable, Variant};

/// Handle of a library context, a descriptor, or a stream.
type CublasHandle = *mut c_void;

type GemmStridedBatchedEx = unsafe extern "C" fn(
    CublasHandle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    c_longlong,
    *const c_void,
    c_int,
    c_int,
    c_longlong,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_longlong,
    c_int,
    c_int,
    c_int,
) -> c_int;

functions! {
    /// Functions of cuBLAS and cuBLASLt.
    Functions {
        property: unsafe extern "C" fn(c_int, *mut c_int) -> c_int = c"cublasGetProperty";
        create: unsafe extern "C" fn(*mut CublasHandle) -> c_int = c"cublasCreate_v2";
        set_stream: unsafe extern "C" fn(CublasHandle, CublasHandle) -> c_int = c"cublasSetStream_v2";
        set_workspace: unsafe extern "C" fn(CublasHandle, *mut c_void, usize) -> c_int = c"cublasSetWorkspace_v2";
        gemm: GemmStridedBatchedEx = c"cublasGemmStridedBatchedEx";
        lt_create: unsafe extern "C" fn(*mut CublasHandle) -> c_int = c"cublasLtCreate";
        desc_create: unsafe extern "C" fn(*mut CublasHandle, c_int, c_int) -> c_int = c"cublasLtMatmulDescCreate";
        desc_set: SetAttribute = c"cublasLtMatmulDescSetAttribute";
        layout_create: unsafe extern "C" fn(*mut CublasHandle, c_int, u64, u64, i64) -> c_int
            = c"cublasLtMatrixLayoutCreate";
        layout_set: SetAttribute = c"cublasLtMatrixLayoutSetAttribute";
        preference_create: unsafe extern "C" fn(*mut CublasHandle) -> c_int = c"cublasLtMatmulPreferenceCreate";
        preference_set: SetAttribute = c"cublasLtMatmulPreferenceSetAttribute";
        heuristic: unsafe extern "C" fn(
            CublasHandle, CublasHandle, CublasHandle, CublasHandle, CublasHandle, CublasHandle, CublasHandle, c_int, *mut Proposal, *mut c_int,
        ) -> c_int = c"cublasLtMatmulAlgoGetHeuristic";
        matmul: unsafe extern "C" fn(
            CublasHandle, CublasHandle, *const c_void, *const c_void, CublasHandle, *const c_void, CublasHandle, *const c_void, *const c_void,
            CublasHandle, *mut c_void, CublasHandle, *const [u64; 8], *mut c_void, usize, CublasHandle,
        ) -> c_int = c"cublasLtMatmul";
    }
}

/// Function that sets an attribute of a descriptor to a value of a size in bytes.
type SetAttribute = unsafe extern "C" fn(CublasHandle, c_int, *const c_void, usize) -> c_int;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Proposal {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// `libraryPropertyType`: major, minor, patch.
const VERSION_PROPERTIES: [c_int; 3] = [0, 1, 2];
const OP_N: c_int = 0;
const OP_T: c_int = 1;
const GEMM_DEFAULT: c_int = -1;
/// `cublasComputeType_t`: the type of accumulators, and the precision of operands.
const COMPUTE_32F: c_int = 68;
const COMPUTE_32F_PEDANTIC: c_int = 69;
const COMPUTE_64F: c_int = 70;
const COMPUTE_32F_FAST_TF32: c_int = 77;
/// `cublasLtMatmulDescAttributes_t`.
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
/// `cublasLtMatrixLayoutAttribute_t`.
const LAYOUT_BATCH_COUNT: c_int = 5;
const LAYOUT_STRIDED_BATCH_OFFSET: c_int = 6;
/// `cublasLtMatmulPreferenceAttributes_t`.
const PREFERENCE_MAX_WORKSPACE_BYTES: c_int = 1;
/// `cublasLtEpilogue_t`.
const EPILOGUE_DEFAULT: u32 = 1;
const EPILOGUE_RELU: u32 = 2;
const EPILOGUE_BIAS: u32 = 4;

/// Workspace size that is recommended for the largest GPUs.
const WORKSPACE_BYTES: u64 = 32 << 20;
/// Maximum number of cuBLASLt's algorithms that are tried.
const MOST_PROPOSALS: usize = 8;

/// Version of the installed library.
pub(super) fn version() -> Result<String, Unavailable> {
    Functions::of(load(None)?)?.version()
}

fn load(folder: Option<&Path>) -> Result<Loaded, Unavailable> {
    let get = super::how_to_get(Variant::Cublas(Precision::Full));
    Loaded::open(&["libcublas.so.13", "libcublas.so.12", "libcublas.so.11"], &get, folder)
}

/// Loads cuBLAS and chooses the fastest way to call it for the operands' problem: its function for products,
/// and the first algorithms proposed by cuBLASLt, the only one with epilogues.
pub(super) fn prepare<T: OperandType>(
    operands: &mut Operands<T>,
    means: &Means,
    precision: Precision,
) -> Result<Prepared<T>, Unavailable> {
    let LibraryProblem::Matmul(matmul) = operands.problem.kernel else {
        panic!("a library for multiplications is asked for nothing else")
    };
    let computes: &[(c_int, &str)] = match (precision, T::DTYPE) {
        (Precision::Tf32, _) => &[(COMPUTE_32F_FAST_TF32, "tf32")],
        (Precision::Full, DType::F64) => &[(COMPUTE_64F, "f64")],
        (Precision::Full, dtype) if dtype.is_half() => &[(COMPUTE_32F, "f32")],
        (Precision::Full, _) => &[(COMPUTE_32F, "f32"), (COMPUTE_32F_PEDANTIC, "f32 pedantic")],
    };
    let product = ColumnMajorProduct::of(&matmul)?;
    let fused = FusedEpilogue::of("cuBLAS", &operands.problem.epilogue)?;
    let f = Functions::of(load(means.folder.as_deref())?)?;
    let version = f.version()?;
    let on_device = DeviceOperands::new(operands, means)?;
    let library = Rc::new(Cublas::new(f, on_device)?);
    let mut ways = Vec::new();
    for &(compute, name) in computes {
        if fused == FusedEpilogue::default() {
            ways.push(library.gemm::<T>(product, compute, name));
        }
        ways.extend(library.proposals::<T>(product, compute, name, fused)?);
    }
    library.on_device.fastest(ways, operands, &version)
}

/// Product of row-major matrices as a call of a column-major library. A row-major C is a column-major Cᵀ, and
/// Cᵀ = Bᵀ·Aᵀ: B comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ColumnMajorProduct {
    /// Rows and columns of Cᵀ, and the length of the sum.
    m: c_int,
    n: c_int,
    k: c_int,
    first: GemmOperand,
    second: GemmOperand,
    n_batch: c_int,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GemmOperand {
    op: c_int,
    /// Leading dimension: the matrix is column-major.
    rows: c_int,
    columns: c_int,
}

impl GemmOperand {
    fn stride(self) -> i64 {
        i64::from(self.rows) * i64::from(self.columns)
    }
}

impl ColumnMajorProduct {
    fn of(matmul: &Matmul) -> Result<ColumnMajorProduct, Unavailable> {
        let [m, n, k, n_batch] = sizes([matmul.m, matmul.n, matmul.k, matmul.b])?;
        // A row-major B of shape `[k, n]` has n rows in column-major order, and is Bᵀ without a
        // transposition.
        let first = match matmul.tb {
            false => GemmOperand { op: OP_N, rows: n, columns: k },
            true => GemmOperand { op: OP_T, rows: k, columns: n },
        };
        let second = match matmul.ta {
            false => GemmOperand { op: OP_N, rows: k, columns: m },
            true => GemmOperand { op: OP_T, rows: m, columns: k },
        };
        Ok(ColumnMajorProduct { m: n, n: m, k, first, second, n_batch })
    }

    fn result(&self) -> GemmOperand {
        GemmOperand { op: OP_N, rows: self.m, columns: self.n }
    }

    /// # Safety
    ///
    /// `gemm` may be called with the handle, and the matrices A, B and C have the sizes of the product.
    unsafe fn call<T: OperandType>(
        &self,
        gemm: GemmStridedBatchedEx,
        handle: CublasHandle,
        [a, b, c]: [*mut c_void; 3],
        compute: c_int,
    ) -> c_int {
        let ColumnMajorProduct { m, n, k, first, second, n_batch } = *self;
        let (dtype, [one, zero]) = (data_type(T::DTYPE), [1.0, 0.0].map(factor::<T>));
        // SAFETY: the caller's promise; the scalars are read before the call returns.
        unsafe {
            gemm(
                handle,
                first.op,
                second.op,
                m,
                n,
                k,
                (&raw const one).cast(),
                b,
                dtype,
                first.rows,
                first.stride(),
                a,
                dtype,
                second.rows,
                second.stride(),
                (&raw const zero).cast(),
                c,
                dtype,
                m,
                self.result().stride(),
                n_batch,
                compute,
                GEMM_DEFAULT,
            )
        }
    }
}

/// `cudaDataType`.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F64 => 1,
        DType::F16 => 2,
        DType::Bf16 => 14,
        _ => 0,
    }
}

/// Bytes of alpha or beta, which has the type of the accumulators.
fn factor<T: OperandType>(value: f64) -> u64 {
    let mut bytes = [0; 8];
    let dtype = T::DTYPE.arithmetic();
    dtype.write(&[value], &mut bytes[..dtype.bytes() as usize]);
    u64::from_ne_bytes(bytes)
}

/// Library on a device. Nothing of it is released: the process ends with it.
struct Cublas {
    f: Functions,
    on_device: Rc<DeviceOperands<CudaContext>>,
    stream: CublasHandle,
    handle: CublasHandle,
    lt: CublasHandle,
    workspace: CudaMemory,
}

impl Functions {
    fn version(&self) -> Result<String, Unavailable> {
        let mut numbers = [0; 3];
        for (property, number) in VERSION_PROPERTIES.into_iter().zip(&mut numbers) {
            // SAFETY: the call writes to a local variable.
            succeeded("cublasGetProperty", unsafe { (self.property)(property, number) })?;
        }
        Ok(numbers.map(|number: c_int| number.to_string()).join("."))
    }
}

impl Cublas {
    fn new(f: Functions, on_device: Rc<DeviceOperands<CudaContext>>) -> Result<Cublas, Unavailable> {
        let stream = on_device.context.stream()?;
        let workspace = CudaMemory::new(&on_device.context, WORKSPACE_BYTES)?;
        let (mut handle, mut lt) = (null_mut(), null_mut());
        // SAFETY: handles are written to local variables; stream and workspace live as long as the handles.
        unsafe {
            succeeded("cublasCreate", (f.create)(&mut handle))?;
            succeeded("cublasSetStream", (f.set_stream)(handle, stream))?;
            // After setting the stream, which resets the workspace; this avoids allocations while calls are
            // recorded.
            let set = (f.set_workspace)(handle, CudaContext::pointer(&workspace), WORKSPACE_BYTES as usize);
            succeeded("cublasSetWorkspace", set)?;
            succeeded("cublasLtCreate", (f.lt_create)(&mut lt))?;
        }
        Ok(Cublas { f, on_device, stream, handle, lt, workspace })
    }

    fn gemm<T: OperandType>(self: &Rc<Cublas>, product: ColumnMajorProduct, compute: c_int, name: &str) -> QueuedCall {
        let library = self.clone();
        let put = Rc::new(move || {
            let pointers = library.on_device.pointers();
            // SAFETY: the operands on the device have the sizes of the problem.
            let status = unsafe { product.call::<T>(library.f.gemm, library.handle, pointers, compute) };
            succeeded("cublasGemmStridedBatchedEx", status)
        });
        QueuedCall { name: format!("gemm in {name}"), put }
    }

    /// Algorithms that cuBLASLt proposes, the best first; empty if it has none.
    fn proposals<T: OperandType>(
        self: &Rc<Cublas>,
        product: ColumnMajorProduct,
        compute: c_int,
        name: &str,
        fused: FusedEpilogue,
    ) -> Result<Vec<QueuedCall>, Unavailable> {
        let [a, b, c] = self.on_device.pointers();
        let desc = self.operation::<T>(product, compute, fused)?;
        let [first, second, result] =
            [product.first, product.second, product.result()].map(|operand| self.layout::<T>(operand, product.n_batch));
        let (first, second, result) = (first?, second?, result?);
        let mut preference = null_mut();
        let mut proposals = [Proposal::default(); MOST_PROPOSALS];
        let mut n_proposals = 0;
        // SAFETY: descriptors live as long as the process, and the number of results is limited to the
        // buffer's length.
        unsafe {
            succeeded("cublasLtMatmulPreferenceCreate", (self.f.preference_create)(&mut preference))?;
            set(self.f.preference_set, preference, PREFERENCE_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES)?;
            let (most, proposals) = (MOST_PROPOSALS as c_int, proposals.as_mut_ptr());
            let Functions { heuristic, .. } = self.f;
            let status =
                heuristic(self.lt, desc, first, second, result, result, preference, most, proposals, &mut n_proposals);
            if status != 0 {
                return Ok(Vec::new());
            }
        }
        // The addend is read from another buffer, so that a run does not start with the result of the
        // previous one.
        let (addend, of_addend) = match fused.addend {
            Some(at) => (self.on_device.further(at), factor::<T>(1.0)),
            None => (c, factor::<T>(0.0)),
        };
        let n_proposals = usize::try_from(n_proposals).unwrap_or(0);
        let good = proposals.into_iter().take(n_proposals).enumerate().filter(|(_, proposal)| proposal.status == 0);
        let way = |(at, proposal): (usize, Proposal)| {
            let library = self.clone();
            let put = Rc::new(move || {
                let (one, of_addend) = (factor::<T>(1.0), of_addend);
                let workspace = (CudaContext::pointer(&library.workspace), WORKSPACE_BYTES as usize);
                // SAFETY: the operands on the device have the sizes of the problem; scalars and algorithm are
                // read before the call returns.
                let status = unsafe {
                    (library.f.matmul)(
                        library.lt,
                        desc,
                        (&raw const one).cast(),
                        b,
                        first,
                        a,
                        second,
                        (&raw const of_addend).cast(),
                        addend,
                        result,
                        c,
                        result,
                        &proposal.algorithm,
                        workspace.0,
                        workspace.1,
                        library.stream,
                    )
                };
                succeeded("cublasLtMatmul", status)
            });
            QueuedCall { name: format!("cuBLASLt's proposal {} in {name}", at + 1), put }
        };
        Ok(good.map(way).collect())
    }

    /// Descriptor of a product with its epilogue.
    fn operation<T: OperandType>(
        &self,
        product: ColumnMajorProduct,
        compute: c_int,
        fused: FusedEpilogue,
    ) -> Result<CublasHandle, Unavailable> {
        let f = &self.f;
        let mut desc = null_mut();
        // SAFETY: the handle is written to a local variable, and values have the attributes' sizes.
        unsafe {
            let created = (f.desc_create)(&mut desc, compute, data_type(T::DTYPE.arithmetic()));
            succeeded("cublasLtMatmulDescCreate", created)?;
            set(f.desc_set, desc, DESC_TRANSA, product.first.op)?;
            set(f.desc_set, desc, DESC_TRANSB, product.second.op)?;
            let relu = if fused.relu { EPILOGUE_RELU } else { 0 };
            let bias = if fused.bias.is_some() { EPILOGUE_BIAS } else { 0 };
            if relu | bias != 0 {
                set(f.desc_set, desc, DESC_EPILOGUE, relu | bias)?;
            } else {
                set(f.desc_set, desc, DESC_EPILOGUE, EPILOGUE_DEFAULT)?;
            }
            if let Some(at) = fused.bias {
                // One element for each row of Cᵀ, the same for the whole batch.
                set(f.desc_set, desc, DESC_BIAS_POINTER, self.on_device.further(at))?;
            }
        }
        Ok(desc)
    }

    fn layout<T: OperandType>(&self, operand: GemmOperand, n_batch: c_int) -> Result<CublasHandle, Unavailable> {
        let GemmOperand { rows, columns, .. } = operand;
        let mut layout = null_mut();
        // SAFETY: as above.
        unsafe {
            let rows = (rows as u64, i64::from(rows));
            let created = (self.f.layout_create)(&mut layout, data_type(T::DTYPE), rows.0, columns as u64, rows.1);
            succeeded("cublasLtMatrixLayoutCreate", created)?;
            set(self.f.layout_set, layout, LAYOUT_BATCH_COUNT, n_batch)?;
            set(self.f.layout_set, layout, LAYOUT_STRIDED_BATCH_OFFSET, operand.stride())?;
        }
        Ok(layout)
    }
}

/// # Safety
///
/// The function takes this descriptor, and the attribute has the value's type.
unsafe fn set<V>(function: SetAttribute, of: CublasHandle, attribute: c_int, value: V) -> Result<(), Unavailable> {
    // SAFETY: the caller's promise; the value is copied.
    let status = unsafe { function(of, attribute, (&raw const value).cast(), size_of::<V>()) };
    succeeded("an attribute of cuBLASLt", status)
}

fn succeeded(function: &str, status: c_int) -> Result<(), Unavailable> {
    // cublasStatus_t
    let meaning = match status {
        0 => return Ok(()),
        1 => "not initialised",
        3 => "out of memory",
        7 => "invalid value",
        8 => "not for this GPU",
        13 => "it does not run",
        15 => "not supported",
        _ => "failed",
    };
    Err(Unavailable::Unsupported { reason: format!("{function}: {meaning} (status {status})") })
}

#[cfg(test)]
mod tests {
    use tilewright_device::memory::{Bf16, F16};

    use super::*;
    use crate::operands::tests::operands_of;

    /// `cublasGemmStridedBatchedEx` on this machine's memory.
    unsafe extern "C" fn gemm<T: OperandType + Into<f64>>(
        _: CublasHandle,
        transpose_a: c_int,
        transpose_b: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        alpha: *const c_void,
        a: *const c_void,
        a_type: c_int,
        lda: c_int,
        stride_a: c_longlong,
        b: *const c_void,
        b_type: c_int,
        ldb: c_int,
        stride_b: c_longlong,
        beta: *const c_void,
        c: *mut c_void,
        c_type: c_int,
        ldc: c_int,
        stride_c: c_longlong,
        n_batch: c_int,
        compute: c_int,
        algorithm: c_int,
    ) -> c_int {
        assert_eq!([a_type, b_type, c_type], [data_type(T::DTYPE); 3]);
        assert_eq!((compute, algorithm), (COMPUTE_32F, GEMM_DEFAULT));
        let at = |transpose: c_int, row: c_int, column: c_int, ld: c_int| match transpose {
            OP_N => (column * ld + row) as usize,
            _ => (row * ld + column) as usize,
        };
        for batch in 0..i64::from(n_batch) {
            // SAFETY: the test's operands have the sizes of the product.
            unsafe {
                let [alpha, beta] = [alpha, beta].map(|factor| *factor.cast::<u64>());
                assert_eq!([alpha, beta], [1.0, 0.0].map(factor::<T>));
                let a = a.cast::<T>().add((batch * stride_a) as usize);
                let b = b.cast::<T>().add((batch * stride_b) as usize);
                let c = c.cast::<T>().add((batch * stride_c) as usize);
                for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                    let products = (0..k).map(|i| -> f64 {
                        let (a, b) = (a.add(at(transpose_a, row, i, lda)), b.add(at(transpose_b, i, column, ldb)));
                        (*a).into() * (*b).into()
                    });
                    let n_bytes = size_of::<T>();
                    let place = c.add(at(OP_N, row, column, ldc)).cast::<u8>();
                    T::DTYPE.write(&[products.sum()], std::slice::from_raw_parts_mut(place, n_bytes));
                }
            }
        }
        0
    }

    #[test]
    fn products_by_rows_are_called_by_columns() {
        fn check<T: OperandType + Into<f64>>(text: &str) {
            let mut operands = operands_of::<T>(text);
            operands.clear_c();
            let LibraryProblem::Matmul(matmul) = operands.problem.kernel else { panic!("{text} is a product") };
            let product = ColumnMajorProduct::of(&matmul).expect("it is small");
            let (a, b) = (operands.a.bytes().as_ptr(), operands.b.bytes().as_ptr());
            let pointers = [a.cast_mut().cast(), b.cast_mut().cast(), operands.c.bytes_mut().as_mut_ptr().cast()];
            // SAFETY: the function reads and writes the operands.
            assert_eq!(unsafe { product.call::<T>(gemm::<T>, null_mut(), pointers, COMPUTE_32F) }, 0);
            assert!(operands.check().expect(text) < 4.0 * T::DTYPE.unit().max(1e-7));
        }
        check::<f32>("matmul:m=3,n=5,k=7");
        check::<f64>("matmul:m=3,n=5,k=7,dtype=f64");
        check::<f32>("dense:m=3,n=5,k=7");
        check::<F16>("matmul:m=3,n=5,k=7,dtype=f16");
        check::<Bf16>("batch_matmul:b=2,m=3,n=5,k=7,tb=1,dtype=bf16");
        for transposed in ["", ",ta=1", ",tb=1", ",ta=1,tb=1"] {
            check::<f32>(&format!("batch_matmul:b=2,m=3,n=5,k=7{transposed}"));
        }
    }

    #[test]
    fn proposals_are_as_large_as_the_librarys() {
        assert_eq!(size_of::<Proposal>(), 96);
    }
}
