//! Factory of providers, and the two functions that ONNX Runtime looks for in the library.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null;

use crate::api::{
    CPU, Ep, EpApi, EpDevice, EpFactory, HardwareDevice, INVALID_ARGUMENT, Logger, OrtApi, OrtApiBase, Pairs,
};
use crate::api::{SessionOptions, Status, VERSION, got, nothing, text};
use crate::boundary::{guarded, guarded_as};
use crate::context::Wish;
use crate::log::Log;
use crate::name::NAME;
use crate::options::ProviderOptions;
use crate::part::SessionState;
use crate::provider::Provider;

/// Prefix of the names that ONNX Runtime gives a provider's options: `ep.`, the provider's name, a dot.
const PREFIX: &str = "ep.tilewrightexecutionprovider.";
/// Version of the provider.
const PROVIDER_VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => panic!("a version is a text without zeros"),
};

/// Factory of providers.
#[repr(C)]
struct Factory {
    factory: EpFactory,
    api: OrtApi,
    functions: EpApi,
}

impl Factory {
    fn new(api: OrtApi) -> Factory {
        let factory = EpFactory {
            version: VERSION,
            get_name,
            get_vendor,
            get_supported_devices,
            create_ep,
            release_ep,
            get_vendor_id,
            get_version,
            validate: null(),
            create_allocator,
            release_allocator,
            create_data_transfer,
            is_stream_aware,
            create_sync_stream,
        };
        Factory { factory, api, functions: EpApi::of(&api) }
    }

    /// Returns all options of a session as pairs of name and value.
    ///
    /// # Safety
    /// The options are ONNX Runtime's.
    unsafe fn entries(&self, session: *const SessionOptions) -> Result<Vec<(String, String)>, String> {
        let api = &self.api;
        // SAFETY: promised by the caller; lists have the returned length, and live until they are released.
        unsafe {
            let pairs = got(api, nothing(), |out| api.session_entries(session, out))?;
            let (mut keys, mut values, mut n) = (null(), null(), 0);
            api.pairs(pairs, &mut keys, &mut values, &mut n);
            let all = (0..n).map(|at| (text(*keys.add(at)), text(*values.add(at)))).collect();
            api.release_pairs(pairs);
            Ok(all)
        }
    }
}

/// Reads the provider's options from those of a session.
fn own_options(entries: &[(String, String)]) -> Result<ProviderOptions, String> {
    ProviderOptions::read(entries.iter().filter_map(|(key, value)| {
        let is_own = key.get(..PREFIX.len()).is_some_and(|start| start.eq_ignore_ascii_case(PREFIX));
        is_own.then(|| (&key[PREFIX.len()..], value.as_str()))
    }))
}

/// Makes the factory of providers.
///
/// # Safety
/// Called by ONNX Runtime: `base` is its own, and there is room for the given number of factories.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "ONNX Runtime looks for this name")]
pub unsafe extern "C" fn CreateEpFactories(
    _name: *const c_char,
    base: *const OrtApiBase,
    _logger: *const Logger,
    factories: *mut *mut EpFactory,
    most: usize,
    n: *mut usize,
) -> *mut Status {
    // SAFETY: the base is ONNX Runtime's, and there is room for a number.
    let api = unsafe {
        *n = 0;
        OrtApi::of(base)
    };
    // Without the function table, an error cannot be returned: if ONNX Runtime is too old, there are no
    // factories.
    let Some(api) = api else { return nothing() };
    guarded(&api, || {
        if most > 0 {
            // SAFETY: there is room for one factory.
            unsafe {
                *factories = Box::into_raw(Box::new(Factory::new(api))).cast();
                *n = 1;
            }
        }
        Ok(())
    })
}

/// Releases a factory.
///
/// # Safety
/// Called by ONNX Runtime, with a factory that [`CreateEpFactories`] made.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "ONNX Runtime looks for this name")]
pub unsafe extern "C" fn ReleaseEpFactory(factory: *mut EpFactory) -> *mut Status {
    // SAFETY: promised by the caller.
    drop(unsafe { Box::from_raw(factory.cast::<Factory>()) });
    nothing()
}

unsafe extern "C" fn get_name(_: *const EpFactory) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn get_vendor(_: *const EpFactory) -> *const c_char {
    c"Tilewright".as_ptr()
}

unsafe extern "C" fn get_vendor_id(_: *const EpFactory) -> u32 {
    0
}

unsafe extern "C" fn get_version(_: *const EpFactory) -> *const c_char {
    PROVIDER_VERSION.as_ptr()
}

unsafe extern "C" fn get_supported_devices(
    factory: *mut EpFactory,
    devices: *const *const HardwareDevice,
    n_devices: usize,
    out: *mut *mut EpDevice,
    most: usize,
    n: *mut usize,
) -> *mut Status {
    // SAFETY: ONNX Runtime passes a factory that was made here.
    let own = unsafe { &*factory.cast::<Factory>() };
    guarded(&own.api, || {
        // SAFETY: the list has the given number of devices, and there is room for the given maximum.
        unsafe {
            *n = 0;
            for at in 0..n_devices {
                let device = *devices.add(at);
                if own.api.device_type(device) == CPU && *n < most {
                    let create = |out| own.functions.create_device(factory, device, null(), null(), out);
                    *out.add(*n) = got(&own.api, nothing(), create)?;
                    *n += 1;
                }
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn create_ep(
    factory: *mut EpFactory,
    _devices: *const *const HardwareDevice,
    _metadata: *const *const Pairs,
    _n_devices: usize,
    options: *const SessionOptions,
    logger: *const Logger,
    out: *mut *mut Ep,
) -> *mut Status {
    // SAFETY: ONNX Runtime passes a factory that was made here.
    let own = unsafe { &*factory.cast::<Factory>() };
    guarded_as(&own.api, INVALID_ARGUMENT, || {
        // SAFETY: the options are those of the session.
        let entries = unsafe { own.entries(options)? };
        let options = own_options(&entries)?;
        let value = |name: &str| entries.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        let wish = Wish::read(value);
        // SAFETY: the log belongs to the session, which outlives its providers.
        let log = unsafe { Log::new(own.api, logger, options.log) };
        let session = SessionState::new(own.api, log, options, wish);
        let session = session.map_err(|why| log.problem(&format!("all is left to ONNX Runtime: {why}"))).ok();
        // SAFETY: there is room for a pointer.
        unsafe { *out = Box::into_raw(Box::new(Provider::new(own.api, session))).cast() };
        Ok(())
    })
}

unsafe extern "C" fn release_ep(factory: *mut EpFactory, ep: *mut Ep) {
    // SAFETY: ONNX Runtime passes a factory that was made here.
    let own = unsafe { &*factory.cast::<Factory>() };
    let status = guarded(&own.api, || {
        // SAFETY: the provider was made by `create_ep`, and is released once.
        drop(unsafe { Box::from_raw(ep.cast::<Provider>()) });
        Ok(())
    });
    let _ = own.api.check(status);
}

unsafe extern "C" fn create_allocator(
    _: *mut EpFactory,
    _: *const c_void,
    _: *const Pairs,
    out: *mut *mut c_void,
) -> *mut Status {
    // SAFETY: there is room for a pointer; null selects the CPU's own allocator.
    unsafe { *out = nothing() };
    nothing()
}

unsafe extern "C" fn release_allocator(_: *mut EpFactory, _: *mut c_void) {}

unsafe extern "C" fn create_data_transfer(_: *mut EpFactory, out: *mut *mut c_void) -> *mut Status {
    // SAFETY: there is room for a pointer; null means that nothing has to be copied.
    unsafe { *out = nothing() };
    nothing()
}

unsafe extern "C" fn is_stream_aware(_: *const EpFactory) -> bool {
    false
}

unsafe extern "C" fn create_sync_stream(
    _: *mut EpFactory,
    _: *const c_void,
    _: *const Pairs,
    out: *mut *mut c_void,
) -> *mut Status {
    // SAFETY: there is room for a pointer; null means that there are no streams.
    unsafe { *out = nothing() };
    nothing()
}
