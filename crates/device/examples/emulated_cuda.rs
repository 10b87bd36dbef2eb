//! NVIDIA's driver as a library for tests of programs that load it: its single device is a PTX emulator, of
//! which each thread has its own.
#![allow(missing_docs, reason = "functions are as the driver's header says")]
#![allow(dead_code, unused_imports, reason = "it needs parts of modules")]
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments, reason = "as that header says")]

#[path = "../src/cuda/driver.rs"]
mod driver;
#[path = "../src/cuda/fake.rs"]
mod fake;

use std::ffi::{c_char, c_int, c_uint, c_void};

use driver::{DeviceOrdinal, DevicePointer, DriverHandle, ResultCode};

/// Functions of the fake driver by their names.
macro_rules! exports {
    ($($symbol:ident = $function:ident ($($argument:ident: $ty:ty),*);)*) => {
        $(
            // SAFETY: the name is the driver's, which this library replaces.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($argument: $ty),*) -> ResultCode {
                // SAFETY: the caller promises what the driver requires.
                unsafe { (fake::functions().$function)($($argument),*) }
            }
        )*
    };
}

exports! {
    cuInit = init(flags: c_uint);
    cuDriverGetVersion = version(to: *mut c_int);
    cuGetErrorName = error_name(answer: ResultCode, to: *mut *const c_char);
    cuDeviceGetCount = n_devices(to: *mut c_int);
    cuDeviceGet = device(to: *mut DeviceOrdinal, number: c_int);
    cuDeviceGetName = device_name(to: *mut c_char, length: c_int, device: DeviceOrdinal);
    cuDeviceGetAttribute = device_attribute(to: *mut c_int, attribute: c_int, device: DeviceOrdinal);
    cuDevicePrimaryCtxRetain = retain_context(to: *mut DriverHandle, device: DeviceOrdinal);
    cuDevicePrimaryCtxRelease_v2 = release_context(device: DeviceOrdinal);
    cuCtxSetCurrent = set_context(context: DriverHandle);
    cuCtxPushCurrent_v2 = set_context(context: DriverHandle);
    cuModuleLoadData = load_module(to: *mut DriverHandle, code: *const c_void);
    cuModuleUnload = unload_module(module: DriverHandle);
    cuModuleGetFunction = function(to: *mut DriverHandle, module: DriverHandle, name: *const c_char);
    cuModuleGetGlobal_v2 = variable(to: *mut DevicePointer, n_bytes: *mut usize, module: DriverHandle, name: *const c_char);
    cuFuncGetAttribute = function_attribute(to: *mut c_int, attribute: c_int, function: DriverHandle);
    cuFuncSetAttribute = set_function_attribute(function: DriverHandle, attribute: c_int, value: c_int);
    cuMemAlloc_v2 = allocate(to: *mut DevicePointer, n_bytes: usize);
    cuMemFree_v2 = free(address: DevicePointer);
    cuMemcpyHtoDAsync_v2 = to_device(to: DevicePointer, from: *const c_void, n_bytes: usize, stream: DriverHandle);
    cuMemcpyDtoHAsync_v2 = from_device(to: *mut c_void, from: DevicePointer, n_bytes: usize, stream: DriverHandle);
    cuMemsetD8Async = fill(to: DevicePointer, value: u8, n_bytes: usize, stream: DriverHandle);
    cuEventCreate = create_event(to: *mut DriverHandle, flags: c_uint);
    cuEventDestroy_v2 = destroy_event(event: DriverHandle);
    cuEventRecordWithFlags = record_event(event: DriverHandle, stream: DriverHandle, flags: c_uint);
    cuEventElapsedTime = elapsed_ms(to: *mut f32, first: DriverHandle, last: DriverHandle);
    cuStreamCreate = create_stream(to: *mut DriverHandle, flags: c_uint);
    cuStreamDestroy_v2 = destroy_stream(stream: DriverHandle);
    cuStreamSynchronize = synchronize(stream: DriverHandle);
    cuStreamBeginCapture_v2 = begin_capture(stream: DriverHandle, mode: c_int);
    cuStreamEndCapture = end_capture(stream: DriverHandle, to: *mut DriverHandle);
    cuGraphInstantiateWithFlags = instantiate(to: *mut DriverHandle, graph: DriverHandle, flags: u64);
    cuGraphDestroy = destroy_graph(graph: DriverHandle);
    cuGraphLaunch = launch_graph(graph: DriverHandle, stream: DriverHandle);
    cuGraphExecDestroy = destroy_executable(executable: DriverHandle);
    cuLaunchKernel = launch(
        function: DriverHandle, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared_bytes: c_uint,
        stream: DriverHandle, arguments: *mut *mut c_void, extra: *mut *mut c_void
    );
}

// SAFETY: the name is the driver's, which this library replaces.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(to: *mut DriverHandle) -> ResultCode {
    // SAFETY: the caller passes a pointer to its own variable.
    unsafe { to.write(std::ptr::null_mut()) };
    0
}

// SAFETY: as above.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(to: *mut DeviceOrdinal) -> ResultCode {
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
    address: DevicePointer,
    extents: *const u64,
    strides: *const u64,
    boxes: *const c_uint,
    ones: *const c_uint,
    interleave: c_int,
    swizzle: c_int,
    promotion: c_int,
    fill: c_int,
) -> ResultCode {
    let encode = fake::functions().encode_map.expect("the fake driver has it");
    // SAFETY: the caller promises what the driver requires.
    unsafe { encode(to, kind, rank, address, extents, strides, boxes, ones, interleave, swizzle, promotion, fill) }
}
