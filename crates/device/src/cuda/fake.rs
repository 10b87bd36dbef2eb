//! Fake driver for tests, whose single device emulates PTX. Each thread has its own state, unless it enters
//! the context of another thread.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{DeviceOrdinal, DevicePointer, DriverFunctions, DriverHandle, ResultCode};
use emulator::{Entry, Order};
use tilewright_ir::gpu::bulk::TFLOAT32;

#[path = "../../../codegen/tests/emulator/mod.rs"]
mod emulator;

#[derive(Default)]
struct FakeDriver {
    memory: emulator::Memory,
    entries: Vec<Entry>,
    /// Launches that are recorded rather than executed.
    recorded: Option<Vec<FakeLaunch>>,
    graphs: Vec<Vec<FakeLaunch>>,
    n_launches: usize,
    n_allocated: usize,
    /// Result of every function after a failed kernel.
    broken: ResultCode,
}

#[derive(Clone)]
struct FakeLaunch {
    entry: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: usize,
    arguments: Vec<u64>,
}

type SharedState = Arc<Mutex<FakeDriver>>;

thread_local! {
    static CURRENT: RefCell<SharedState> = RefCell::default();
}

/// States of contexts, by their handles.
static CONTEXTS: Mutex<Vec<SharedState>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn current<R>(f: impl FnOnce(&mut FakeDriver) -> R) -> R {
    CURRENT.with_borrow(|state| f(&mut lock(state)))
}

/// Number of live allocations.
pub fn n_allocated() -> usize {
    current(|state| state.n_allocated)
}

/// Number of kernels that have run.
pub fn n_launches() -> usize {
    current(|state| state.n_launches)
}

/// Whether this process has lost the device, which is for good, as of a real card.
static IS_LOST: AtomicBool = AtomicBool::new(false);

fn with(f: impl FnOnce(&mut FakeDriver) -> ResultCode) -> ResultCode {
    if lost().is_some() {
        IS_LOST.store(true, Ordering::Relaxed);
    }
    if IS_LOST.load(Ordering::Relaxed) {
        return 214;
    }
    current(|state| if state.broken != 0 { state.broken } else { f(state) })
}

/// The file that a variable of the environment names, where it exists: the device is lost meanwhile.
fn lost() -> Option<std::path::PathBuf> {
    std::env::var_os("EMULATED_CUDA_LOST").map(std::path::PathBuf::from).filter(|file| file.exists())
}

/// Writes to where a caller wants something.
fn give<T>(to: *mut T, value: T) -> ResultCode {
    // SAFETY: the caller passes a pointer to its own variable.
    unsafe { to.write(value) };
    0
}

fn handle(at: usize) -> DriverHandle {
    std::ptr::without_provenance_mut(at + 1)
}

fn number(handle: DriverHandle) -> usize {
    handle.addr() - 1
}

impl FakeDriver {
    fn run(&mut self, launch: &FakeLaunch) -> ResultCode {
        let entry = &self.entries[launch.entry];
        if launch.block != entry.threads {
            return 1;
        }
        self.n_launches += 1;
        let FakeLaunch { grid, shared_bytes, arguments, .. } = launch;
        match entry.run(&mut self.memory, *grid, *shared_bytes, arguments, Order::Ascending) {
            Ok(()) => 0,
            Err(why) => {
                eprintln!("the emulator: {why}");
                // A trap, or else an illegal address; the context is unusable after either.
                self.broken = if why.contains("stops the kernel") { 719 } else { 700 };
                0
            }
        }
    }
}

unsafe extern "C" fn init(_: c_uint) -> ResultCode {
    if IS_LOST.load(Ordering::Relaxed) {
        return 100;
    }
    match lost() {
        None => 0,
        // A device that is there again once the driver is started anew.
        Some(file) if std::fs::read(&file).is_ok_and(|text| text == b"once") => {
            let _ = std::fs::remove_file(file);
            0
        }
        Some(_) => 100,
    }
}

unsafe extern "C" fn version(to: *mut c_int) -> ResultCode {
    give(to, 12090)
}

unsafe extern "C" fn error_name(code: ResultCode, to: *mut *const c_char) -> ResultCode {
    let name = match code {
        1 => c"CUDA_ERROR_INVALID_VALUE",
        100 => c"CUDA_ERROR_NO_DEVICE",
        214 => c"CUDA_ERROR_ECC_UNCORRECTABLE",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        _ => return 1,
    };
    give(to, name.as_ptr())
}

unsafe extern "C" fn n_devices(to: *mut c_int) -> ResultCode {
    give(to, 1)
}

unsafe extern "C" fn device(to: *mut DeviceOrdinal, number: c_int) -> ResultCode {
    give(to, number)
}

unsafe extern "C" fn device_name(to: *mut c_char, length: c_int, _: DeviceOrdinal) -> ResultCode {
    let name = c"Emulator".to_bytes_with_nul();
    assert!(name.len() <= length as usize);
    // SAFETY: the caller's buffer is large enough.
    unsafe { to.copy_from_nonoverlapping(name.as_ptr().cast(), name.len()) };
    0
}

unsafe extern "C" fn device_attribute(to: *mut c_int, attribute: c_int, _: DeviceOrdinal) -> ResultCode {
    let value = match attribute {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        8 => 48 << 10,
        10 => 32,
        12 => 65536,
        16 => 132,
        38 => 50 << 20,
        75 => 9,
        76 => 0,
        97 => 227 << 10,
        _ => return 1,
    };
    give(to, value)
}

unsafe extern "C" fn retain_context(to: *mut DriverHandle, _: DeviceOrdinal) -> ResultCode {
    let mut contexts = lock(&CONTEXTS);
    contexts.push(CURRENT.with_borrow(Arc::clone));
    give(to, handle(contexts.len() - 1))
}

unsafe extern "C" fn set_context(context: DriverHandle) -> ResultCode {
    let state = Arc::clone(&lock(&CONTEXTS)[number(context)]);
    CURRENT.set(state);
    with(|_| 0)
}

unsafe extern "C" fn release_context(_: DeviceOrdinal) -> ResultCode {
    0
}

unsafe extern "C" fn takes_handle(_: DriverHandle) -> ResultCode {
    with(|_| 0)
}

unsafe extern "C" fn allocate(to: *mut DevicePointer, bytes: usize) -> ResultCode {
    with(|state| {
        state.n_allocated += 1;
        give(to, state.memory.add(vec![0; bytes]))
    })
}

unsafe extern "C" fn free(_: DevicePointer) -> ResultCode {
    with(|state| {
        state.n_allocated -= 1;
        0
    })
}

unsafe extern "C" fn to_device(to: DevicePointer, from: *const c_void, bytes: usize, _: DriverHandle) -> ResultCode {
    with(|state| {
        // SAFETY: the caller passes a pointer to `bytes` bytes.
        let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        state.memory.at(to, bytes).expect("it lies inside").copy_from_slice(from);
        0
    })
}

unsafe extern "C" fn from_device(to: *mut c_void, from: DevicePointer, bytes: usize, _: DriverHandle) -> ResultCode {
    with(|state| {
        // SAFETY: the caller passes a buffer of `bytes` bytes.
        let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
        to.copy_from_slice(state.memory.at(from, bytes).expect("it lies inside"));
        0
    })
}

unsafe extern "C" fn fill(to: DevicePointer, byte: u8, n: usize, _: DriverHandle) -> ResultCode {
    with(|state| {
        state.memory.at(to, n).expect("it lies inside").fill(byte);
        0
    })
}

unsafe extern "C" fn load_module(to: *mut DriverHandle, code: *const c_void) -> ResultCode {
    // SAFETY: text that ends with a zero: the emulator assembles itself.
    let text = unsafe { CStr::from_ptr(code.cast()) }.to_string_lossy().into_owned();
    if text.starts_with("\x7fELF") {
        // The emulator has machine code of no GPU.
        return 209;
    }
    with(|state| match emulator::read(&text) {
        Ok(entries) => {
            // A module is identified by its first kernel: others may have kernels of the same names.
            let first = state.entries.len();
            state.entries.extend(entries);
            give(to, handle(first))
        }
        Err(why) => {
            eprintln!("the emulator: {why}");
            218
        }
    })
}

unsafe extern "C" fn function(to: *mut DriverHandle, module: DriverHandle, name: *const c_char) -> ResultCode {
    // SAFETY: the caller passes a string.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let first = number(module);
    with(|state| match state.entries[first..].iter().position(|entry| entry.name == name) {
        Some(at) => give(to, handle(first + at)),
        None => 500,
    })
}

/// Name of a variable that every module has, of 256 bytes, which its kernels do not see.
const VARIABLE: &CStr = c"table";

unsafe extern "C" fn variable(
    to: *mut DevicePointer,
    n_bytes: *mut usize,
    _: DriverHandle,
    name: *const c_char,
) -> ResultCode {
    // SAFETY: the caller passes a string.
    if unsafe { CStr::from_ptr(name) } != VARIABLE {
        return 500;
    }
    give(n_bytes, 256);
    with(|state| give(to, state.memory.add(vec![0; 256])))
}

unsafe extern "C" fn function_attribute(to: *mut c_int, attribute: c_int, _: DriverHandle) -> ResultCode {
    give(to, if attribute == 4 { 32 } else { 0 })
}

unsafe extern "C" fn set_function_attribute(_: DriverHandle, _: c_int, bytes: c_int) -> ResultCode {
    if bytes <= 227 << 10 { 0 } else { 1 }
}

unsafe extern "C" fn launch(
    function: DriverHandle,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared_bytes: c_uint,
    _: DriverHandle,
    arguments: *mut *mut c_void,
    _: *mut *mut c_void,
) -> ResultCode {
    with(|state| {
        let entry = number(function);
        let mut values = Vec::new();
        for at in 0..state.entries[entry].n_parameters() {
            // SAFETY: the caller passes an address for each parameter of the kernel.
            let value = unsafe { arguments.add(at).read() };
            values.push(if state.entries[entry].is_map(at) {
                // SAFETY: a tensor map has 128 bytes.
                let bytes = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), 128) };
                state.memory.add(bytes.to_vec())
            } else {
                // SAFETY: all other arguments are numbers of 64 bits.
                unsafe { value.cast::<u64>().read() }
            });
        }
        let arguments = values;
        let (grid, block) = ([gx, gy, gz], [bx, by, bz]);
        let launch = FakeLaunch { entry, grid, block, shared_bytes: shared_bytes as usize, arguments };
        match &mut state.recorded {
            Some(all) => {
                all.push(launch);
                0
            }
            None => state.run(&launch),
        }
    })
}

unsafe extern "C" fn create(to: *mut DriverHandle, _: c_uint) -> ResultCode {
    give(to, handle(0))
}

unsafe extern "C" fn begin_capture(_: DriverHandle, _: c_int) -> ResultCode {
    with(|state| {
        state.recorded = Some(Vec::new());
        0
    })
}

unsafe extern "C" fn end_capture(_: DriverHandle, to: *mut DriverHandle) -> ResultCode {
    with(|state| {
        let recorded = state.recorded.take().expect("it is begun first");
        state.graphs.push(recorded);
        give(to, handle(state.graphs.len() - 1))
    })
}

unsafe extern "C" fn record_event(_: DriverHandle, _: DriverHandle, _: c_uint) -> ResultCode {
    with(|_| 0)
}

unsafe extern "C" fn elapsed_ms(to: *mut f32, _: DriverHandle, _: DriverHandle) -> ResultCode {
    with(|_| give(to, 0.25))
}

unsafe extern "C" fn instantiate(to: *mut DriverHandle, graph: DriverHandle, _: u64) -> ResultCode {
    give(to, graph)
}

unsafe extern "C" fn launch_graph(graph: DriverHandle, _: DriverHandle) -> ResultCode {
    with(|state| {
        let launches = state.graphs[number(graph)].clone();
        launches.iter().map(|launch| state.run(launch)).find(|code| *code != 0).unwrap_or(0)
    })
}

unsafe extern "C" fn encode_map(
    to: *mut c_void,
    kind: c_int,
    rank: c_uint,
    address: DevicePointer,
    extents: *const u64,
    strides: *const u64,
    boxes: *const c_uint,
    _: *const c_uint,
    _: c_int,
    swizzle: c_int,
    _: c_int,
    _: c_int,
) -> ResultCode {
    let rank = rank as usize;
    // SAFETY: the caller passes `rank` elements of each, and a buffer of 16 words.
    let (extents, strides, boxes) = unsafe {
        let strides = std::slice::from_raw_parts(strides, rank - 1).to_vec();
        (std::slice::from_raw_parts(extents, rank).to_vec(), strides, std::slice::from_raw_parts(boxes, rank))
    };
    let box_extents = boxes.iter().map(|n| u64::from(*n)).collect();
    let (swizzled, rounds) = (swizzle == 3, kind as u32 == TFLOAT32);
    let element_bytes = if rounds { 4 } else { [1, 2, 4, 4, 8][kind as usize] };
    let map = emulator::bulk::Map { address, element_bytes, swizzled, rounds, extents, strides, box_extents };
    give(to.cast::<[u64; 16]>(), map.words())
}

/// Function pointers of the fake driver.
pub fn functions() -> DriverFunctions {
    DriverFunctions {
        init,
        version,
        error_name,
        n_devices,
        device,
        device_name,
        device_attribute,
        retain_context,
        release_context,
        set_context,
        allocate,
        free,
        to_device,
        from_device,
        fill,
        load_module,
        unload_module: takes_handle,
        function,
        variable,
        function_attribute,
        set_function_attribute,
        launch,
        create_stream: create,
        destroy_stream: takes_handle,
        synchronize: takes_handle,
        begin_capture,
        end_capture,
        create_event: create,
        destroy_event: takes_handle,
        record_event,
        elapsed_ms,
        instantiate,
        launch_graph,
        destroy_graph: takes_handle,
        destroy_executable: takes_handle,
        encode_map: Some(encode_map),
    }
}
