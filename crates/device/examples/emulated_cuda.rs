//! NVIDIA's driver as a library for tests of programs that load it: its one device is an emulator of PTX.
//! Each thread has one of its own.
#![allow(missing_docs, reason = "functions are as the driver's header says")]
#![allow(dead_code, unused_imports, reason = "it needs parts of modules")]
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments, reason = "as that header says")]

#[path = "../src/cuda/driver.rs"]
mod driver;
#[path = "../src/cuda/fake.rs"]
mod fake;

use std::ffi::{c_char, c_int, c_uint, c_void};

use driver::{Address, Answer, DeviceId, Handle};

/// Functions of the fake driver by their names.
macro_rules! exports {
    ($($symbol:ident = $function:ident ($($argument:ident: $ty:ty),*);)*) => {
        $(
            // SAFETY: the name is the driver's, for which this stands.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($argument: $ty),*) -> Answer {
                // SAFETY: the caller promises what the driver wants.
                unsafe { (fake::functions().$function)($($argument),*) }
            }
        )*
    };
}

exports! {
    cuInit = init(flags: c_uint);
    cuDriverGetVersion = version(to: *mut c_int);
    cuGetErrorName = error_name(answer: Answer, to: *mut *const c_char);
    cuDeviceGetCount = n_devices(to: *mut c_int);
    cuDeviceGet = device(to: *mut DeviceId, number: c_int);
    cuDeviceGetName = device_name(to: *mut c_char, length: c_int, device: DeviceId);
    cuDeviceGetAttribute = device_attribute(to: *mut c_int, attribute: c_int, device: DeviceId);
    cuDevicePrimaryCtxRetain = retain_context(to: *mut Handle, device: DeviceId);
    cuDevicePrimaryCtxRelease_v2 = release_context(device: DeviceId);
    cuCtxSetCurrent = set_context(context: Handle);
    cuCtxPushCurrent_v2 = set_context(context: Handle);
    cuModuleLoadData = load_module(to: *mut Handle, code: *const c_void);
    cuModuleUnload = unload_module(module: Handle);
    cuModuleGetFunction = function(to: *mut Handle, module: Handle, name: *const c_char);
    cuModuleGetGlobal_v2 = variable(to: *mut Address, n_bytes: *mut usize, module: Handle, name: *const c_char);
    cuFuncGetAttribute = function_attribute(to: *mut c_int, attribute: c_int, function: Handle);
    cuFuncSetAttribute = set_function_attribute(function: Handle, attribute: c_int, value: c_int);
    cuMemAlloc_v2 = allocate(to: *mut Address, n_bytes: usize);
    cuMemFree_v2 = free(address: Address);
    cuMemcpyHtoDAsync_v2 = to_device(to: Address, from: *const c_void, n_bytes: usize, stream: Handle);
    cuMemcpyDtoHAsync_v2 = from_device(to: *mut c_void, from: Address, n_bytes: usize, stream: Handle);
    cuMemsetD8Async = fill(to: Address, value: u8, n_bytes: usize, stream: Handle);
    cuEventCreate = create_event(to: *mut Handle, flags: c_uint);
    cuEventDestroy_v2 = destroy_event(event: Handle);
    cuEventRecordWithFlags = record_event(event: Handle, stream: Handle, flags: c_uint);
    cuEventElapsedTime = elapsed_ms(to: *mut f32, first: Handle, last: Handle);
    cuStreamCreate = create_stream(to: *mut Handle, flags: c_uint);
    cuStreamDestroy_v2 = destroy_stream(stream: Handle);
    cuStreamSynchronize = synchronize(stream: Handle);
    cuStreamBeginCapture_v2 = begin_capture(stream: Handle, mode: c_int);
    cuStreamEndCapture = end_capture(stream: Handle, to: *mut Handle);
    cuGraphInstantiateWithFlags = instantiate(to: *mut Handle, graph: Handle, flags: u64);
    cuGraphDestroy = destroy_graph(graph: Handle);
    cuGraphLaunch = launch_graph(graph: Handle, stream: Handle);
    cuGraphExecDestroy = destroy_executable(executable: Handle);
    cuLaunchKernel = launch(
        function: Handle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared_bytes: c_uint,
        stream: Handle, arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
}

// SAFETY: the name is the driver's, for which this stands.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(to: *mut Handle) -> Answer {
    // SAFETY: the caller passes a place of its own.
    unsafe { to.write(std::ptr::null_mut()) };
    0
}

// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(to: *mut DeviceId) -> Answer {
    // SAFETY: as above.
    unsafe { to.write(0) };
    0
}

// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    to: *mut c_void,
    kind: c_int,
    rank: c_uint,
    address: Address,
    extents: *const u64,
    strides: *const u64,
    boxes: *const c_uint,
    ones: *const c_uint,
    interleave: c_int,
    swizzle: c_int,
    promotion: c_int,
    fill: c_int,
) -> Answer {
    let encode = fake::functions().encode_map.expect("the fake driver has it");
    // SAFETY: the caller promises what the driver wants.
    unsafe { encode(to, kind, rank, address, extents, strides, boxes, ones, interleave, swizzle, promotion, fill) }
}
