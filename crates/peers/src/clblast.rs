//! CLBlast through its C interface.
//!
//! # Source
//!
//! Signatures and constants from `clblast_c.h` of CLBlast 1.5.3.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::rc::Rc;

use tilewright_device::opencl::{OpenClContext, OpenClMemory};
use tilewright_ir::DType;

use super::gpu::{DeviceOperands, QueuedCall, pads};
use super::library::{Loaded, Means, version_in_file_name};
use super::operands::{CpuElement, Operands};
use super::problem::{ConvProblem, LibraryProblem, Matmul};
use super::worker::Prepared;
use super::{Unavailable, Variant};

/// OpenCL queue, memory or event.
type OpenClHandle = *mut c_void;

/// `CLBlastStatusCode`.
type ClblastStatus = c_int;

/// `CLBlast?gemmWithTempBuffer`: layout, transpositions, and sizes `m`, `n` and `k`; then alpha, and A and B,
/// each with its offset and its leading dimension; beta, and C; the queue, the event, and the temporary
/// buffer.
type GemmFunction<T> = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    usize,
    usize,
    usize,
    T,
    OpenClHandle,
    usize,
    usize,
    OpenClHandle,
    usize,
    usize,
    T,
    OpenClHandle,
    usize,
    usize,
    *const OpenClHandle,
    *mut OpenClHandle,
    OpenClHandle,
) -> ClblastStatus;

/// `CLBlast?GemmTempBufferSize`, the bytes of that buffer: layout, transpositions, sizes, the offset and the
/// leading dimension of each matrix, and the queue.
type GemmMemory = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    *const OpenClHandle,
    *mut usize,
) -> ClblastStatus;

/// `CLBlast?gemmStridedBatched`, like `gemm` with the stride of the batch after each leading dimension and
/// the batch count, and without a temporary buffer.
type Batched<T> = unsafe extern "C" fn(
    c_int,
    c_int,
    c_int,
    usize,
    usize,
    usize,
    T,
    OpenClHandle,
    usize,
    usize,
    usize,
    OpenClHandle,
    usize,
    usize,
    usize,
    T,
    OpenClHandle,
    usize,
    usize,
    usize,
    usize,
    *const OpenClHandle,
    *mut OpenClHandle,
) -> ClblastStatus;

/// `CLBlast?convgemm`: mode; channels; rows and columns of the image, the filter, padding, strides and
/// dilations; filters and images; X, W and Y, each with its offset; the queue and the event.
type ConvGemmFunction = unsafe extern "C" fn(
    c_int,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    OpenClHandle,
    usize,
    OpenClHandle,
    usize,
    OpenClHandle,
    usize,
    *const OpenClHandle,
    *mut OpenClHandle,
) -> ClblastStatus;

const ROW_MAJOR: c_int = 101;
/// `CLBlastTranspose`, for not transposed and transposed.
const TRANSPOSE: [c_int; 2] = [111, 112];
/// `CLBlastKernelMode`: filters are not flipped.
const CROSS_CORRELATION: c_int = 151;

/// Functions of the library for an element type.
#[derive(Clone, Copy)]
struct Functions<T> {
    gemm: GemmFunction<T>,
    gemm_memory: GemmMemory,
    batched: Batched<T>,
    convolution: ConvGemmFunction,
}

impl<T: CpuElement> Functions<T> {
    fn of(library: Loaded) -> Result<Functions<T>, Unavailable> {
        let letter = if T::DTYPE == DType::F64 { 'D' } else { 'S' };
        let symbol = |name: &str| name.replace('?', &letter.to_string()).into_bytes();
        // SAFETY: the types are those of the library's header.
        unsafe {
            Ok(Functions {
                gemm: library.function(&symbol("CLBlast?gemmWithTempBuffer\0"))?,
                gemm_memory: library.function(&symbol("CLBlast?GemmTempBufferSize\0"))?,
                batched: library.function(&symbol("CLBlast?gemmStridedBatched\0"))?,
                convolution: library.function(&symbol("CLBlast?convgemm\0"))?,
            })
        }
    }
}

/// Version of the installed library.
pub(super) fn version() -> Result<String, Unavailable> {
    load(None)?;
    Ok(version_of_loaded())
}

/// Version, which no function of the library returns.
fn version_of_loaded() -> String {
    version_in_file_name("libclblast.so.").unwrap_or_else(|| "of unknown version".to_owned())
}

fn load(folder: Option<&Path>) -> Result<Loaded, Unavailable> {
    Loaded::open(&["libclblast.so.1"], &super::how_to_get(Variant::ClBlast), folder)
}

/// Loads CLBlast for the operands' problem.
pub(super) fn prepare<T: CpuElement>(operands: &mut Operands<T>, means: &Means) -> Result<Prepared<T>, Unavailable> {
    let kernel = operands.problem.kernel;
    let lacks = |what: &str| Err(Unavailable::Unsupported { reason: format!("CLBlast has no {what}") });
    if !operands.problem.epilogue.is_empty() {
        return lacks("epilogues");
    }
    let f = Functions::<T>::of(load(means.folder.as_deref())?)?;
    let on_device = DeviceOperands::<OpenClContext>::new(operands, means)?;
    let library = Clblast { f, queue: on_device.context.queue(), on_device: on_device.clone() };
    let way = match kernel {
        LibraryProblem::Matmul(matmul) if matmul.b == 1 => library.gemm(matmul)?,
        LibraryProblem::Matmul(matmul) => library.batched(matmul),
        LibraryProblem::Conv(conv) if conv.groups > 1 => return lacks("groups of channels"),
        LibraryProblem::Conv(conv) => {
            pads("CLBlast", &conv)?;
            library.convolution(conv)
        }
    };
    on_device.fastest(vec![way], operands, &version_of_loaded())
}

/// Library on a device.
struct Clblast<T> {
    f: Functions<T>,
    queue: OpenClHandle,
    on_device: Rc<DeviceOperands<OpenClContext>>,
}

impl<T: CpuElement> Clblast<T> {
    fn gemm(self, matmul: Matmul) -> Result<QueuedCall, Unavailable> {
        let Matmul { m, n, k, ta, tb, .. } = matmul;
        let ([lda, ldb], [ta, tb]) = (leading(&matmul), [ta, tb].map(|t| TRANSPOSE[usize::from(t)]));
        let ([a, b, c], (one, zero), no_event) = (self.on_device.pointers(), (T::ONE, T::ZERO), null_mut());
        let (f, mut n_bytes) = (self.f, 0);
        // SAFETY: the queue is the context's, and the number is written to a local variable.
        let status =
            unsafe { (f.gemm_memory)(ROW_MAJOR, ta, tb, m, n, k, 0, lda, 0, ldb, 0, n, &self.queue, &mut n_bytes) };
        succeeded("GemmTempBufferSize", status)?;
        let memory = OpenClMemory::new(&self.on_device.context, n_bytes as u64)?;
        let put = move || {
            let (queue, room) = (&self.queue, memory.handle());
            // SAFETY: the operands on the device have the sizes of the problem, and the memory has the size
            // that the library requested.
            let status = unsafe {
                (f.gemm)(ROW_MAJOR, ta, tb, m, n, k, one, a, 0, lda, b, 0, ldb, zero, c, 0, n, queue, no_event, room)
            };
            succeeded("gemmWithTempBuffer", status)
        };
        Ok(QueuedCall { name: "gemm".to_owned(), put: Rc::new(put) })
    }

    fn batched(self, matmul: Matmul) -> QueuedCall {
        let Matmul { b: count, m, n, k, ta, tb } = matmul;
        let ([lda, ldb], [ta, tb]) = (leading(&matmul), [ta, tb].map(|t| TRANSPOSE[usize::from(t)]));
        let ([a, b, c], (one, zero), no_event) = (self.on_device.pointers(), (T::ONE, T::ZERO), null_mut());
        let put = move || {
            let (each, queue) = ([m * k, k * n, m * n], &self.queue);
            // SAFETY: the operands on the device have the sizes of the problem.
            let status = unsafe {
                (self.f.batched)(
                    ROW_MAJOR, ta, tb, m, n, k, one, a, 0, lda, each[0], b, 0, ldb, each[1], zero, c, 0, n, each[2],
                    count, queue, no_event,
                )
            };
            succeeded("gemmStridedBatched", status)
        };
        QueuedCall { name: "batched gemm".to_owned(), put: Rc::new(put) }
    }

    fn convolution(self, conv: ConvProblem) -> QueuedCall {
        let ConvProblem { n, c, image: [h, w], k, filter: [r, s], .. } = conv;
        let ([pad_h, pad_w], [stride_h, stride_w], [dilation_h, dilation_w]) =
            (conv.pad_begin, conv.stride, conv.dilation);
        let ([x, filters, y], no_event) = (self.on_device.pointers(), null_mut());
        let put = move || {
            // SAFETY: as above.
            let status = unsafe {
                (self.f.convolution)(
                    CROSS_CORRELATION,
                    c,
                    h,
                    w,
                    r,
                    s,
                    pad_h,
                    pad_w,
                    stride_h,
                    stride_w,
                    dilation_h,
                    dilation_w,
                    k,
                    n,
                    x,
                    0,
                    filters,
                    0,
                    y,
                    0,
                    &self.queue,
                    no_event,
                )
            };
            succeeded("convgemm", status)
        };
        QueuedCall { name: "im2col and gemm".to_owned(), put: Rc::new(put) }
    }
}

/// Leading dimensions of A and B.
fn leading(matmul: &Matmul) -> [usize; 2] {
    let Matmul { m, n, k, ta, tb, .. } = *matmul;
    [if ta { m } else { k }, if tb { k } else { n }]
}

fn succeeded(function: &str, status: ClblastStatus) -> Result<(), Unavailable> {
    // CLBlastStatusCode
    let meaning = match status {
        0 => return Ok(()),
        -4 => "no memory",
        -11 => "the device's compiler refuses its code",
        -2044 => "the device has no double precision",
        -2046 => "the device has too little local memory",
        _ => "failed",
    };
    Err(Unavailable::Unsupported { reason: format!("CLBlast's {function}: {meaning} (status {status})") })
}
