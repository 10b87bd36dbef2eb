//! Functions of NVIDIA's driver, loaded when a device is first opened.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libloading::Library;

/// Result code of a driver function; 0 on success.
pub type ResultCode = c_int;

/// Handle of a context, module, function, stream, event or graph.
pub type DriverHandle = *mut c_void;

/// Ordinal of a device.
pub type DeviceOrdinal = c_int;

/// Address in device memory.
pub type DevicePointer = u64;

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($argument:ty),* $(,)?);)*
     $(? $late:ident = $late_symbol:literal ($($late_argument:ty),* $(,)?);)*) => {
        /// Function pointers of the driver.
        #[derive(Clone, Copy)]
        pub struct DriverFunctions {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($argument),*) -> ResultCode,)*
            // Missing in older drivers.
            $(pub $late: Option<unsafe extern "C" fn($($late_argument),*) -> ResultCode>,)*
        }

        impl DriverFunctions {
            /// Loads the functions from a library, which must stay loaded.
            ///
            /// # Errors
            /// Name of the missing function.
            ///
            /// # Safety
            /// The library is NVIDIA's driver, whose functions have these parameters.
            pub unsafe fn of(library: &Library) -> Result<DriverFunctions, String> {
                Ok(DriverFunctions {
                    // SAFETY: as promised by the caller.
                    $($name: *unsafe { library.get($symbol) }.map_err(|e| e.to_string())?,)*
                    // SAFETY: as above.
                    $($late: unsafe { library.get($late_symbol) }.ok().map(|f| *f),)*
                })
            }
        }
    };
}

pub(super) use functions;

functions! {
    init = c"cuInit" (c_uint);
    version = c"cuDriverGetVersion" (*mut c_int);
    error_name = c"cuGetErrorName" (ResultCode, *mut *const c_char);
    n_devices = c"cuDeviceGetCount" (*mut c_int);
    device = c"cuDeviceGet" (*mut DeviceOrdinal, c_int);
    device_name = c"cuDeviceGetName" (*mut c_char, c_int, DeviceOrdinal);
    device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, DeviceOrdinal);
    retain_context = c"cuDevicePrimaryCtxRetain" (*mut DriverHandle, DeviceOrdinal);
    release_context = c"cuDevicePrimaryCtxRelease_v2" (DeviceOrdinal);
    set_context = c"cuCtxSetCurrent" (DriverHandle);
    allocate = c"cuMemAlloc_v2" (*mut DevicePointer, usize);
    free = c"cuMemFree_v2" (DevicePointer);
    to_device = c"cuMemcpyHtoDAsync_v2" (DevicePointer, *const c_void, usize, DriverHandle);
    from_device = c"cuMemcpyDtoHAsync_v2" (*mut c_void, DevicePointer, usize, DriverHandle);
    fill = c"cuMemsetD8Async" (DevicePointer, u8, usize, DriverHandle);
    load_module = c"cuModuleLoadData" (*mut DriverHandle, *const c_void);
    unload_module = c"cuModuleUnload" (DriverHandle);
    function = c"cuModuleGetFunction" (*mut DriverHandle, DriverHandle, *const c_char);
    variable = c"cuModuleGetGlobal_v2" (*mut DevicePointer, *mut usize, DriverHandle, *const c_char);
    function_attribute = c"cuFuncGetAttribute" (*mut c_int, c_int, DriverHandle);
    set_function_attribute = c"cuFuncSetAttribute" (DriverHandle, c_int, c_int);
    launch = c"cuLaunchKernel" (
        DriverHandle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, DriverHandle, *mut *mut c_void, *mut *mut c_void,
    );
    create_stream = c"cuStreamCreate" (*mut DriverHandle, c_uint);
    destroy_stream = c"cuStreamDestroy_v2" (DriverHandle);
    synchronize = c"cuStreamSynchronize" (DriverHandle);
    begin_capture = c"cuStreamBeginCapture_v2" (DriverHandle, c_int);
    end_capture = c"cuStreamEndCapture" (DriverHandle, *mut DriverHandle);
    create_event = c"cuEventCreate" (*mut DriverHandle, c_uint);
    destroy_event = c"cuEventDestroy_v2" (DriverHandle);
    record_event = c"cuEventRecordWithFlags" (DriverHandle, DriverHandle, c_uint);
    elapsed_ms = c"cuEventElapsedTime" (*mut f32, DriverHandle, DriverHandle);
    instantiate = c"cuGraphInstantiateWithFlags" (*mut DriverHandle, DriverHandle, u64);
    launch_graph = c"cuGraphLaunch" (DriverHandle, DriverHandle);
    destroy_graph = c"cuGraphDestroy" (DriverHandle);
    destroy_executable = c"cuGraphExecDestroy" (DriverHandle);
    ? encode_map = c"cuTensorMapEncodeTiled" (
        *mut c_void, c_int, c_uint, DevicePointer, *const u64, *const u64, *const c_uint, *const c_uint, c_int, c_int, c_int,
        c_int,
    );
}

/// File names of the driver's library.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

impl DriverFunctions {
    /// Loads the functions of this machine's driver, which stays loaded.
    ///
    /// # Errors
    /// Reason why there is none.
    pub fn load() -> Result<DriverFunctions, String> {
        let mut why = String::new();
        for name in LIBRARIES {
            // SAFETY: this name refers to NVIDIA's driver everywhere.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    // SAFETY: it is NVIDIA's driver.
                    let functions = unsafe { DriverFunctions::of(&library) };
                    // The driver has threads of its own, which never end.
                    std::mem::forget(library);
                    return functions;
                }
                // The loader's own message is the source of this error.
                Err(e) => why = e.source().map_or_else(|| e.to_string(), ToString::to_string),
            }
        }
        Err(why)
    }

    /// Name of a result code.
    pub fn name_of(&self, code: ResultCode) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the call writes a pointer to a string that lives as long as the driver.
        if unsafe { (self.error_name)(code, &mut name) } == 0 && !name.is_null() {
            // SAFETY: as above.
            return unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        }
        format!("error {code}")
    }
}
