//! Convolutions of cuDNN, versions 8 and 9, by each of its algorithms.
//!
//! # Source
//!
//! Signatures and constants from `cudnn_ops.h`, `cudnn_cnn.h` and `cudnn_graph.h` of cuDNN 9.

use std::ffi::{c_char, c_double, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;
use std::rc::Rc;

use tilewright_device::cuda::{CudaContext, CudaMemory};
use tilewright_ir::DType;

use super::gpu::{DeviceOperands, DriverContext as _, FusedEpilogue, QueuedCall, pads, sizes};
use super::library::{Loaded, Means, functions, text};
use super::operands::{CpuElement, Operands};
use super::problem::{ConvProblem, LibraryProblem};
use super::worker::Prepared;
use super::{Precision, Unavailable, Variant};

/// Handle of a library context, a descriptor, or a stream.
type CudnnHandle = *mut c_void;
type CreateDescriptor = unsafe extern "C" fn(*mut CudnnHandle) -> c_int;

/// Function of a convolution, or, with X and W exchanged, of a transposed one.
type Convolve = unsafe extern "C" fn(
    CudnnHandle,
    *const c_void,
    CudnnHandle,
    *const c_void,
    CudnnHandle,
    *const c_void,
    CudnnHandle,
    c_int,
    *mut c_void,
    usize,
    *const c_void,
    CudnnHandle,
    *mut c_void,
) -> c_int;

/// Function that returns the workspace size of an algorithm.
type WorkspaceSize =
    unsafe extern "C" fn(CudnnHandle, CudnnHandle, CudnnHandle, CudnnHandle, CudnnHandle, c_int, *mut usize) -> c_int;

functions! {
    /// Functions of cuDNN.
    Functions {
        version: unsafe extern "C" fn() -> usize = c"cudnnGetVersion";
        error: unsafe extern "C" fn(c_int) -> *const c_char = c"cudnnGetErrorString";
        create: CreateDescriptor = c"cudnnCreate";
        set_stream: unsafe extern "C" fn(CudnnHandle, CudnnHandle) -> c_int = c"cudnnSetStream";
        tensor: CreateDescriptor = c"cudnnCreateTensorDescriptor";
        set_tensor: unsafe extern "C" fn(CudnnHandle, c_int, c_int, c_int, c_int, c_int, c_int) -> c_int
            = c"cudnnSetTensor4dDescriptor";
        filter: CreateDescriptor = c"cudnnCreateFilterDescriptor";
        set_filter: unsafe extern "C" fn(CudnnHandle, c_int, c_int, c_int, c_int, c_int, c_int) -> c_int
            = c"cudnnSetFilter4dDescriptor";
        conv: CreateDescriptor = c"cudnnCreateConvolutionDescriptor";
        set_conv: unsafe extern "C" fn(CudnnHandle, c_int, c_int, c_int, c_int, c_int, c_int, c_int, c_int) -> c_int
            = c"cudnnSetConvolution2dDescriptor";
        set_groups: unsafe extern "C" fn(CudnnHandle, c_int) -> c_int = c"cudnnSetConvolutionGroupCount";
        set_math: unsafe extern "C" fn(CudnnHandle, c_int) -> c_int = c"cudnnSetConvolutionMathType";
        activation: CreateDescriptor = c"cudnnCreateActivationDescriptor";
        set_activation: unsafe extern "C" fn(CudnnHandle, c_int, c_int, c_double) -> c_int
            = c"cudnnSetActivationDescriptor";
        forward_workspace: WorkspaceSize = c"cudnnGetConvolutionForwardWorkspaceSize";
        forward: Convolve = c"cudnnConvolutionForward";
        backward_workspace: WorkspaceSize = c"cudnnGetConvolutionBackwardDataWorkspaceSize";
        backward: Convolve = c"cudnnConvolutionBackwardData";
        fused: unsafe extern "C" fn(
            CudnnHandle, *const c_void, CudnnHandle, *const c_void, CudnnHandle, *const c_void, CudnnHandle, c_int, *mut c_void, usize,
            *const c_void, CudnnHandle, *const c_void, CudnnHandle, *const c_void, CudnnHandle, CudnnHandle, *mut c_void,
        ) -> c_int = c"cudnnConvolutionBiasActivationForward";
    }
}

/// `cudnnTensorFormat_t`.
const NCHW: c_int = 0;
/// `cudnnConvolutionMode_t`: filters are not flipped.
const CROSS_CORRELATION: c_int = 1;
/// `cudnnMathType_t`: tensor cores may round f32 operands, or must not be used.
const DEFAULT_MATH: c_int = 0;
const FMA_MATH: c_int = 3;
/// `cudnnActivationMode_t`.
const ACTIVATION_RELU: c_int = 1;
const ACTIVATION_IDENTITY: c_int = 5;
/// `cudnnNanPropagation_t`.
const NOT_PROPAGATE_NAN: c_int = 0;

/// `cudnnConvolutionFwdAlgo_t`, in the order of its numbers; each with whether it rounds more than direct
/// summation.
const FORWARD: &[(&str, bool)] = &[
    ("implicit gemm", false),
    ("implicit gemm with a table", false),
    ("gemm", false),
    ("direct", false),
    ("FFT", true),
    ("FFT in tiles", true),
    ("Winograd", true),
    ("Winograd in steps", true),
];
/// `cudnnConvolutionBwdDataAlgo_t`, likewise.
const BACKWARD: &[(&str, bool)] = &[
    ("sums in any order", false),
    ("implicit gemm", false),
    ("FFT", true),
    ("FFT in tiles", true),
    ("Winograd", true),
    ("Winograd in steps", true),
];

/// Workspace size in bytes beyond which an algorithm is left out.
const MOST_WORKSPACE_BYTES: usize = 4 << 30;

/// Version of the installed library.
pub(super) fn version() -> Result<String, Unavailable> {
    Ok(Functions::of(load(None)?)?.version_text())
}

fn load(folder: Option<&Path>) -> Result<Loaded, Unavailable> {
    let get = super::how_to_get(Variant::Cudnn(Precision::Full));
    Loaded::open(&["libcudnn.so.9", "libcudnn.so.8"], &get, folder)
}

/// Loads cuDNN and chooses its fastest algorithm for the operands' problem.
pub(super) fn prepare<T: CpuElement>(
    operands: &mut Operands<T>,
    means: &Means,
    precision: Precision,
) -> Result<Prepared<T>, Unavailable> {
    let LibraryProblem::Conv(conv) = operands.problem.kernel else {
        panic!("a library for convolutions is asked for nothing else")
    };
    let pads = pads("cuDNN", &conv)?;
    let fused = FusedEpilogue::of("cuDNN", &operands.problem.epilogue)?;
    if conv.transposed && fused != FusedEpilogue::default() {
        let reason = "cuDNN has no epilogues of transposed convolutions".to_owned();
        return Err(Unavailable::Unsupported { reason });
    }
    let f = Functions::of(load(means.folder.as_deref())?)?;
    let on_device = DeviceOperands::new(operands, means)?;
    let math = match (precision, T::DTYPE) {
        (Precision::Full, DType::F32) => FMA_MATH,
        (Precision::Full | Precision::Tf32, _) => DEFAULT_MATH,
    };
    let library = Cudnn::new::<T>(f, on_device, &conv, pads, math)?;
    let ways = library.ways::<T>(&conv, fused, operands.problem.is_exact)?;
    library.on_device.fastest(ways, operands, &f.version_text())
}

impl Functions {
    fn version_text(&self) -> String {
        // SAFETY: the function has no parameters.
        let version = unsafe { (self.version)() };
        // Version 9 encodes the major version differently.
        let major = if version >= 90_000 { version / 10_000 } else { version / 1000 };
        let rest = if version >= 90_000 { version % 10_000 } else { version % 1000 };
        format!("{major}.{}.{}", rest / 100, rest % 100)
    }

    fn succeeded(&self, function: &str, status: c_int) -> Result<(), Unavailable> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the strings are static in the library.
        let meaning = unsafe { text((self.error)(status)) };
        Err(Unavailable::Unsupported { reason: format!("{function}: {meaning} (status {status})") })
    }
}

/// Library on a device, with the descriptors of a convolution. Nothing of it is released: the process ends
/// with it.
#[derive(Clone)]
struct Cudnn {
    f: Functions,
    on_device: Rc<DeviceOperands<CudaContext>>,
    handle: CudnnHandle,
    x: CudnnHandle,
    w: CudnnHandle,
    y: CudnnHandle,
    conv: CudnnHandle,
}

impl Cudnn {
    fn new<T: CpuElement>(
        f: Functions,
        on_device: Rc<DeviceOperands<CudaContext>>,
        conv: &ConvProblem,
        [pad_h, pad_w]: [usize; 2],
        math: c_int,
    ) -> Result<Cudnn, Unavailable> {
        let stream = on_device.context.stream()?;
        let [h, w] = conv.image;
        let [p, q] = conv.output();
        let [r, s] = conv.filter;
        let groups = sizes([conv.groups])?[0];
        let [pad_h, pad_w] = sizes([pad_h, pad_w])?;
        let [stride_h, stride_w] = sizes(conv.stride)?;
        let [dilation_h, dilation_w] = sizes(conv.dilation)?;
        // W is `[k, c/groups, r, s]`, for a transposed convolution `[c, k/groups, r, s]`: the convolution
        // that it transposes goes from k channels to c.
        let (of, to) = if conv.transposed { (conv.k, conv.c) } else { (conv.c, conv.k) };
        let dtype = data_type::<T>();
        let handle = f.made("cudnnCreate", f.create)?;
        // SAFETY: the handle is the library's, and the stream stays alive.
        f.succeeded("cudnnSetStream", unsafe { (f.set_stream)(handle, stream) })?;
        let described = Cudnn {
            f,
            on_device,
            handle,
            x: f.tensor::<T>([conv.n, conv.c, h, w])?,
            w: f.made("cudnnCreateFilterDescriptor", f.filter)?,
            y: f.tensor::<T>([conv.n, conv.k, p, q])?,
            conv: f.made("cudnnCreateConvolutionDescriptor", f.conv)?,
        };
        let [to, of, r, s] = sizes([to, of / conv.groups, r, s])?;
        // SAFETY: the descriptors are the library's.
        unsafe {
            let status = (f.set_filter)(described.w, dtype, NCHW, to, of, r, s);
            f.succeeded("cudnnSetFilter4dDescriptor", status)?;
            let (d, mode) = (described.conv, CROSS_CORRELATION);
            let status = (f.set_conv)(d, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, mode, dtype);
            f.succeeded("cudnnSetConvolution2dDescriptor", status)?;
            f.succeeded("cudnnSetConvolutionGroupCount", (f.set_groups)(d, groups))?;
            f.succeeded("cudnnSetConvolutionMathType", (f.set_math)(d, math))?;
        }
        Ok(described)
    }

    /// Ways to call the library, one for each algorithm that computes this problem.
    fn ways<T: CpuElement>(
        &self,
        conv: &ConvProblem,
        fused: FusedEpilogue,
        is_exact: bool,
    ) -> Result<Vec<QueuedCall>, Unavailable> {
        let (f, [x, w, y]) = (self.f, self.on_device.pointers());
        let algorithms = if conv.transposed { BACKWARD } else { FORWARD };
        let mut known: Vec<(c_int, &str, usize)> = Vec::new();
        for (number, &(name, rounds_more)) in (0..).zip(algorithms) {
            let mut n_bytes = 0;
            // SAFETY: descriptors are the library's; the size is written to a local variable.
            let status = unsafe {
                match conv.transposed {
                    true => {
                        (f.backward_workspace)(self.handle, self.w, self.x, self.conv, self.y, number, &mut n_bytes)
                    }
                    false => {
                        (f.forward_workspace)(self.handle, self.x, self.w, self.conv, self.y, number, &mut n_bytes)
                    }
                }
            };
            if status == 0 && n_bytes <= MOST_WORKSPACE_BYTES && !(is_exact && rounds_more) {
                known.push((number, name, n_bytes));
            }
        }
        let most = known.iter().map(|(.., n_bytes)| *n_bytes).max().unwrap_or(0);
        let workspace = Rc::new(CudaMemory::new(&self.on_device.context, most as u64)?);
        let epilogue = match fused == FusedEpilogue::default() {
            true => None,
            false => Some(Rc::new(self.epilogue::<T>(conv, fused)?)),
        };
        let way = |(number, name, n_bytes): (c_int, &str, usize)| {
            let (library, workspace, epilogue) = (self.clone(), workspace.clone(), epilogue.clone());
            let is_transposed = conv.transposed;
            let put = Rc::new(move || {
                let Cudnn { f, handle, x: x_desc, w: w_desc, y: y_desc, conv, .. } = &library;
                let (handle, x_desc, w_desc, y_desc, conv) = (*handle, *x_desc, *w_desc, *y_desc, *conv);
                let factors = (T::ONE, T::ZERO);
                let (one, zero) = ((&raw const factors.0).cast(), (&raw const factors.1).cast());
                let (room, n_bytes) = (CudaContext::pointer(&workspace), n_bytes);
                // SAFETY: the operands on the device have the sizes of the descriptors, the workspace has the
                // size that the algorithm requires; scalars are read before the call returns.
                let (function, status) = unsafe {
                    match &epilogue {
                        Some(epilogue) => {
                            let EpilogueDescriptors { bias, bias_desc, addend, activation, .. } = &**epilogue;
                            let (z, factor) = addend.map_or((y, zero), |addend| (addend, one));
                            let status = (f.fused)(
                                handle,
                                one,
                                x_desc,
                                x,
                                w_desc,
                                w,
                                conv,
                                number,
                                room,
                                n_bytes,
                                factor,
                                y_desc,
                                z,
                                *bias_desc,
                                *bias,
                                *activation,
                                y_desc,
                                y,
                            );
                            ("cudnnConvolutionBiasActivationForward", status)
                        }
                        None if is_transposed => {
                            let status = (f.backward)(
                                handle, one, w_desc, w, x_desc, x, conv, number, room, n_bytes, zero, y_desc, y,
                            );
                            ("cudnnConvolutionBackwardData", status)
                        }
                        None => {
                            let status = (f.forward)(
                                handle, one, x_desc, x, w_desc, w, conv, number, room, n_bytes, zero, y_desc, y,
                            );
                            ("cudnnConvolutionForward", status)
                        }
                    }
                };
                f.succeeded(function, status)
            });
            QueuedCall { name: name.to_owned(), put }
        };
        Ok(known.into_iter().map(way).collect())
    }

    fn epilogue<T: CpuElement>(
        &self,
        conv: &ConvProblem,
        fused: FusedEpilogue,
    ) -> Result<EpilogueDescriptors, Unavailable> {
        let f = &self.f;
        // The function requires a bias in any case.
        let zeros = CudaMemory::new(&self.on_device.context, (conv.k * size_of::<T>()) as u64)?;
        zeros.fill(0)?;
        let activation = f.made("cudnnCreateActivationDescriptor", f.activation)?;
        let mode = if fused.relu { ACTIVATION_RELU } else { ACTIVATION_IDENTITY };
        // SAFETY: the descriptor is the library's.
        let status = unsafe { (f.set_activation)(activation, mode, NOT_PROPAGATE_NAN, 0.0) };
        f.succeeded("cudnnSetActivationDescriptor", status)?;
        Ok(EpilogueDescriptors {
            bias: fused.bias.map_or(CudaContext::pointer(&zeros), |at| self.on_device.further(at)),
            _zeros: zeros,
            bias_desc: f.tensor::<T>([1, conv.k, 1, 1])?,
            addend: fused.addend.map(|at| self.on_device.further(at)),
            activation,
        })
    }
}

/// Descriptors of a fused epilogue.
struct EpilogueDescriptors {
    bias: *mut c_void,
    _zeros: CudaMemory,
    bias_desc: CudnnHandle,
    addend: Option<*mut c_void>,
    activation: CudnnHandle,
}

impl Functions {
    fn made(&self, function: &str, create: CreateDescriptor) -> Result<CudnnHandle, Unavailable> {
        let mut made = null_mut();
        // SAFETY: the handle is written to a local variable.
        self.succeeded(function, unsafe { create(&mut made) })?;
        Ok(made)
    }

    fn tensor<T: CpuElement>(&self, shape: [usize; 4]) -> Result<CudnnHandle, Unavailable> {
        let (tensor, [n, c, h, w]) = (self.made("cudnnCreateTensorDescriptor", self.tensor)?, sizes(shape)?);
        // SAFETY: the descriptor is the library's.
        let status = unsafe { (self.set_tensor)(tensor, NCHW, data_type::<T>(), n, c, h, w) };
        self.succeeded("cudnnSetTensor4dDescriptor", status)?;
        Ok(tensor)
    }
}

/// `cudnnDataType_t`.
fn data_type<T: CpuElement>() -> c_int {
    if T::DTYPE == DType::F64 { 1 } else { 0 }
}
