//! NVIDIA's GPUs through their driver, which is loaded at run time: nothing needs to be installed or linked
//! for it.
//!
//! This is a thin, safe layer: objects that are released when dropped, calls with errors in words, memory
//! between canaries. An error of a kernel that ran poisons its context ([`CudaError::is_final`]): the process
//! must end, and another one take its place.

mod assemble;
pub mod compile;
mod driver;

use std::ffi::{CString, c_int, c_uint, c_void};
use std::sync::Arc;

use thiserror::Error;
use tilewright_ir::gpu::bulk::{TensorMap, TensorMapFields};
use tilewright_ir::target::Gpu;
use tilewright_ir::{Program, Target};

use crate::guarded::{DeviceMemory, GuardedMemory, KernelArgument, with_canaries};
use crate::memory::CANARY_BYTES;
use driver::{DeviceOrdinal, DevicePointer, DriverFunctions, DriverHandle, ResultCode};

pub use assemble::{AssembleError, PtxAssembler};

/// Reason why an operation on a GPU failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CudaError {
    /// Missing driver.
    #[error("NVIDIA's driver is not here: {why} (install the driver, in Debian the package libcuda1)")]
    NoDriver {
        /// Message of the system.
        why: String,
    },
    /// Missing device.
    #[error("there is no CUDA device {number}: this machine has {n}")]
    NoDevice {
        /// Index of the device.
        number: u32,
        /// Number of devices.
        n: u32,
    },
    /// Error of the driver.
    #[error("{what}: {name} ({code})")]
    Driver {
        /// Operation that failed.
        what: &'static str,
        /// Error code.
        code: ResultCode,
        /// Name of the error.
        name: String,
    },
}

/// Result codes of the driver.
const INVALID_VALUE: ResultCode = 1;
const NOT_FOUND: ResultCode = 500;
const OUT_OF_MEMORY: ResultCode = 2;
const OUT_OF_RESOURCES: ResultCode = 701;
const UNKNOWN: ResultCode = 999;
/// Unavailable, no device, invalid device, ECC uncorrectable, NVLink uncorrectable, system not ready.
const OF_DEVICE: [ResultCode; 6] = [46, 100, 101, 214, 220, 802];

impl CudaError {
    /// Whether the context is unusable from now on, as after an error of a kernel.
    pub fn is_final(&self) -> bool {
        // Sizes that cannot be launched harm nothing; what went wrong in a kernel stays wrong, and so does
        // what the driver cannot name.
        matches!(self, CudaError::Driver { code: 700..800 | UNKNOWN, .. }) && !self.is_of(OUT_OF_RESOURCES)
    }

    /// Whether the device itself failed, whatever runs on it: it is not there, another process has it, or its
    /// memory or its links are broken.
    pub fn is_of_device(&self) -> bool {
        matches!(self, CudaError::Driver { code, .. } if OF_DEVICE.contains(code))
    }

    /// Whether it is an out of memory error.
    pub fn lacks_memory(&self) -> bool {
        self.is_of(OUT_OF_MEMORY)
    }

    fn is_of(&self, answer: ResultCode) -> bool {
        matches!(self, CudaError::Driver { code, .. } if *code == answer)
    }
}

fn refusal(f: &DriverFunctions, code: ResultCode, what: &'static str) -> CudaError {
    CudaError::Driver { what, code, name: f.name_of(code) }
}

/// Calls a function of the driver.
macro_rules! call {
    ($functions:expr, $name:ident ( $($argument:expr),* $(,)? ), $what:expr) => {{
        // SAFETY: handles come from the driver and are alive, pointers refer to variables or slices that
        // outlive the call, and lengths are those of the slices.
        let code = unsafe { ($functions.$name)($($argument),*) };
        if code == 0 { Ok(()) } else { Err(refusal(&$functions, code, $what)) }
    }};
}

/// The driver's numbers of device attributes.
mod attribute {
    pub const THREADS: i32 = 1;
    pub const THREADS_ALONG: [i32; 3] = [2, 3, 4];
    pub const BLOCKS_ALONG: [i32; 3] = [5, 6, 7];
    pub const SHARED: i32 = 8;
    pub const WARP: i32 = 10;
    pub const BLOCK_REGISTERS: i32 = 12;
    pub const UNITS: i32 = 16;
    pub const L2: i32 = 38;
    pub const MAJOR: i32 = 75;
    pub const MINOR: i32 = 76;
    pub const MOST_SHARED: i32 = 97;
    /// Attribute of a function.
    pub const FUNCTION_LOCAL: i32 = 3;
    pub const FUNCTION_REGISTERS: i32 = 4;
    pub const FUNCTION_DYNAMIC_SHARED: i32 = 8;
}

/// Device that the driver lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// Index of the device.
    pub number: u32,
    /// Marketing name.
    pub name: String,
    /// Target to generate code for.
    pub target: Target,
}

/// Devices of this machine, with the newest version of CUDA that the driver supports, such as `12.9`.
///
/// # Errors
/// If there is no driver, or a call fails.
pub fn devices() -> Result<(String, Vec<FoundDevice>), CudaError> {
    let f = DriverFunctions::load().map_err(|why| CudaError::NoDriver { why })?;
    let mut version = 0;
    call!(f, version(&mut version), "the driver's version")?;
    let n = n_devices(&f)?;
    let found = (0..n).map(|number| found(&f, number)).collect::<Result<_, _>>()?;
    Ok((format!("{}.{}", version / 1000, version % 1000 / 10), found))
}

fn n_devices(f: &DriverFunctions) -> Result<u32, CudaError> {
    call!(f, init(0), "the driver does not start")?;
    let mut n: c_int = 0;
    call!(f, n_devices(&mut n), "the number of devices")?;
    Ok(n.max(0) as u32)
}

fn found(f: &DriverFunctions, number: u32) -> Result<FoundDevice, CudaError> {
    let mut device: DeviceOrdinal = 0;
    call!(f, device(&mut device, number as c_int), "the device")?;
    let mut name = [0; 256];
    call!(f, device_name(name.as_mut_ptr(), name.len() as c_int, device), "the device's name")?;
    let name = name.iter().take_while(|c| **c != 0).map(|c| char::from(*c as u8)).collect();
    Ok(FoundDevice { number, name, target: target_of(f, device, number)? })
}

fn target_of(f: &DriverFunctions, device: DeviceOrdinal, number: u32) -> Result<Target, CudaError> {
    let generic = Target::named("sm_80").expect("invariant: it is in the table");
    let get = |attribute: i32| -> Result<u64, CudaError> {
        let mut value: c_int = 0;
        call!(f, device_attribute(&mut value, attribute, device), "what the device has")?;
        Ok(value.max(0) as u64)
    };
    let small = |attribute: i32| get(attribute).map(|value| value as u32);
    let each = |attributes: [i32; 3]| -> Result<[u32; 3], CudaError> {
        let [x, y, z] = attributes.map(small);
        Ok([x?, y?, z?])
    };
    let capability = 10 * small(attribute::MAJOR)? + small(attribute::MINOR)?;
    // Instructions that only this generation has require its own architecture name.
    let cpu = if capability == 90 { "sm_90a".to_owned() } else { format!("sm_{capability}") };
    let most_shared_bytes = get(attribute::MOST_SHARED)?;
    let gpu = Gpu {
        warp_size: small(attribute::WARP)?,
        most_threads: small(attribute::THREADS)?,
        most_threads_along: each(attribute::THREADS_ALONG)?,
        most_blocks_along: each(attribute::BLOCKS_ALONG)?,
        shared_bytes: get(attribute::SHARED)?,
        most_shared_bytes,
        registers_per_thread: 255,
        registers_per_block: small(attribute::BLOCK_REGISTERS)?,
        n_units: small(attribute::UNITS)?,
        number,
        ..Gpu::of_capability(capability)
    };
    let l2_bytes = get(attribute::L2)?;
    Ok(Target { cpu, l1d_bytes: most_shared_bytes, l2_bytes, l3_bytes: l2_bytes, gpu: Some(gpu), ..generic })
}

/// Finds the device of a target that [`devices`] returned.
///
/// # Errors
/// If there is no driver, no such device, or the driver refuses.
pub fn device_of(target: &Target) -> Result<FoundDevice, CudaError> {
    device(target.gpu.map_or(0, |gpu| gpu.number))
}

/// Device of an index.
///
/// # Errors
/// As [`device_of`].
pub fn device(number: u32) -> Result<FoundDevice, CudaError> {
    let f = DriverFunctions::load().map_err(|why| CudaError::NoDriver { why })?;
    match n_devices(&f)? {
        n if number < n => found(&f, number),
        n => Err(CudaError::NoDevice { number, n }),
    }
}

/// Context with a stream, shared by clones across threads.
#[derive(Clone)]
pub struct CudaContext(Arc<Handles>);

struct Handles {
    f: DriverFunctions,
    device: DeviceOrdinal,
    context: DriverHandle,
    stream: DriverHandle,
    /// Events recorded before and after the timed work.
    events: [DriverHandle; 2],
}

// SAFETY: the driver accepts calls of all threads at any time; each thread makes the context current first.
unsafe impl Send for Handles {}
// SAFETY: as above.
unsafe impl Sync for Handles {}

impl Drop for Handles {
    fn drop(&mut self) {
        // After a failure these fail too, and the process is about to end.
        for event in self.events {
            let _ = call!(self.f, destroy_event(event), "an event");
        }
        let _ = call!(self.f, destroy_stream(self.stream), "a stream");
        let _ = call!(self.f, release_context(self.device), "a context");
    }
}

impl CudaContext {
    /// Opens a context on the device of an index.
    ///
    /// # Errors
    /// If there is no driver, no such device, or the driver refuses.
    pub fn new(number: u32) -> Result<CudaContext, CudaError> {
        CudaContext::of(DriverFunctions::load().map_err(|why| CudaError::NoDriver { why })?, number)
    }

    fn of(f: DriverFunctions, number: u32) -> Result<CudaContext, CudaError> {
        let n = n_devices(&f)?;
        if number >= n {
            return Err(CudaError::NoDevice { number, n });
        }
        let (mut device, null): (DeviceOrdinal, DriverHandle) = (0, std::ptr::null_mut());
        call!(f, device(&mut device, number as c_int), "the device")?;
        let (mut context, mut stream, mut events) = (null, null, [null; 2]);
        call!(f, retain_context(&mut context, device), "a context")?;
        call!(f, set_context(context), "a context")?;
        // Not synchronized with the default stream.
        call!(f, create_stream(&mut stream, 1), "a stream")?;
        for event in &mut events {
            call!(f, create_event(event, 0), "an event")?;
        }
        Ok(CudaContext(Arc::new(Handles { f, device, context, stream, events })))
    }

    /// Functions of the driver, with the context current for this thread.
    fn enter(&self) -> Result<&DriverFunctions, CudaError> {
        call!(self.0.f, set_context(self.0.context), "the context")?;
        Ok(&self.0.f)
    }

    /// Waits until all submitted work is done.
    ///
    /// # Errors
    /// If any of it failed.
    pub fn finish(&self) -> Result<(), CudaError> {
        let f = self.enter()?;
        call!(f, synchronize(self.0.stream), "running a kernel")
    }

    /// Stream of the context, for libraries that launch their own kernels into it. Also makes the context
    /// current for the calling thread, which they need.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn stream(&self) -> Result<*mut c_void, CudaError> {
        self.enter()?;
        Ok(self.0.stream)
    }
}

/// Device memory between canaries.
pub type CudaMemory = GuardedMemory<Allocation>;

/// Allocation of the driver.
pub struct Allocation {
    context: CudaContext,
    address: DevicePointer,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Ok(f) = self.context.enter() {
            let _ = call!(f, free(self.address), "memory");
        }
    }
}

impl DeviceMemory for Allocation {
    type Error = CudaError;

    fn fill(&self, at: usize, n_bytes: usize, byte: u8) -> Result<(), CudaError> {
        let (f, stream) = (self.context.enter()?, self.context.0.stream);
        call!(f, fill(self.address + at as u64, byte, n_bytes, stream), "filling memory")
    }

    fn read(&self, at: usize, to: &mut [u8]) -> Result<(), CudaError> {
        let (f, stream) = (self.context.enter()?, self.context.0.stream);
        let (from, n_bytes) = (self.address + at as u64, to.len());
        call!(f, from_device(to.as_mut_ptr().cast(), from, n_bytes, stream), "reading memory")?;
        self.context.finish()
    }

    fn write(&self, at: usize, from: &[u8]) -> Result<(), CudaError> {
        // In the stream that kernels run in: a copy outside it may still be in progress when it returns.
        let (f, stream) = (self.context.enter()?, self.context.0.stream);
        let (to, n_bytes) = (self.address + at as u64, from.len());
        call!(f, to_device(to, from.as_ptr().cast(), n_bytes, stream), "writing memory")?;
        self.context.finish()
    }
}

impl CudaMemory {
    /// Allocates memory of `n_bytes` undefined bytes.
    ///
    /// # Errors
    /// If the device does not have enough memory.
    pub fn new(context: &CudaContext, n_bytes: u64) -> Result<CudaMemory, CudaError> {
        let f = context.enter()?;
        let n_bytes = n_bytes.max(1) as usize;
        let all = with_canaries(n_bytes).ok_or_else(|| refusal(f, OUT_OF_MEMORY, "memory"))?;
        let mut address = 0;
        call!(f, allocate(&mut address, all), "memory")?;
        GuardedMemory::inside(Allocation { context: context.clone(), address }, n_bytes)
    }

    /// Device address of the contents.
    pub fn address(&self) -> u64 {
        self.whole().address + CANARY_BYTES as u64
    }
}

/// Loaded module.
pub struct CudaModule {
    context: CudaContext,
    module: DriverHandle,
}

// SAFETY: as for the context.
unsafe impl Send for CudaModule {}
// SAFETY: as above.
unsafe impl Sync for CudaModule {}

impl CudaModule {
    /// Context in which the module is loaded.
    pub fn context(&self) -> &CudaContext {
        &self.context
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        if let Ok(f) = self.context.enter() {
            let _ = call!(f, unload_module(self.module), "code");
        }
    }
}

impl CudaModule {
    /// Loads the output of a [`PtxAssembler`].
    ///
    /// # Errors
    /// If the driver refuses the code.
    pub fn load(context: &CudaContext, code: &[u8]) -> Result<CudaModule, CudaError> {
        let (f, mut module) = (context.enter()?, std::ptr::null_mut());
        // PTX is text that ends with a zero.
        let code = [code, &[0]].concat();
        call!(f, load_module(&mut module, code.as_ptr().cast()), "loading code")?;
        Ok(CudaModule { context: context.clone(), module })
    }

    /// Writes to the beginning of a global variable of the module.
    ///
    /// # Errors
    /// If there is no variable of this name, or it has fewer bytes.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), CudaError> {
        let (f, stream) = (self.context.enter()?, self.context.0.stream);
        let name = CString::new(name).map_err(|_| refusal(f, INVALID_VALUE, "a variable"))?;
        let (mut to, mut n_bytes) = (0, 0);
        call!(f, variable(&mut to, &mut n_bytes, self.module, name.as_ptr()), "a variable")?;
        if bytes.len() > n_bytes {
            return Err(refusal(f, INVALID_VALUE, "a variable of so many bytes"));
        }
        call!(f, to_device(to, bytes.as_ptr().cast(), bytes.len(), stream), "writing a variable")?;
        self.context.finish()
    }
}

/// Bytes of a tensor map, the largest argument of a kernel.
const MAP_BYTES: usize = 128;

/// Buffer into which the driver encodes a tensor map.
#[repr(C, align(64))]
struct Encoded([u8; MAP_BYTES]);

/// Encodes the tensor map (TMA descriptor) of an array at `address` (`cuTensorMapEncodeTiled`).
///
/// # Errors
/// If the driver is older than such instructions, or refuses.
pub fn encode_map(
    context: &CudaContext,
    program: &Program,
    map: &TensorMap,
    address: u64,
) -> Result<Vec<u8>, CudaError> {
    const WHAT: &str = "describing an array";
    let f = context.enter()?;
    let encode = f.encode_map.ok_or_else(|| refusal(f, NOT_FOUND, WHAT))?;
    let TensorMapFields { kind, extents, strides, boxes } = map.described(program);
    let (ones, rank) = (vec![1; extents.len()], extents.len() as c_uint);
    let mut encoded = Encoded([0; MAP_BYTES]);
    let to = (&raw mut encoded).cast();
    // Lines of 128 bytes are swizzled, or nothing is; lines of 256 bytes are promoted to the L2 cache.
    let (swizzle, promotion) = (if map.swizzled { 3 } else { 0 }, 3);
    let [extents, strides] = [&extents, &strides].map(|all| all.as_ptr());
    let (boxes, ones, kind) = (boxes.as_ptr(), ones.as_ptr(), kind as c_int);
    // SAFETY: all lists have one element per dimension of the array, that of strides one less.
    let code = unsafe { encode(to, kind, rank, address, extents, strides, boxes, ones, 0, swizzle, promotion, 0) };
    if code == 0 { Ok(encoded.0.to_vec()) } else { Err(refusal(f, code, WHAT)) }
}

/// Kernel launch: a function with its arguments and launch configuration.
pub struct CudaLaunch {
    code: Arc<CudaModule>,
    function: DriverHandle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    /// Arguments, kept alive as long as the launch.
    arguments: Vec<KernelArgument<CudaMemory>>,
}

// SAFETY: as for the context.
unsafe impl Send for CudaLaunch {}
// SAFETY: as above.
unsafe impl Sync for CudaLaunch {}

/// Resources per thread of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadResources {
    /// Number of 32-bit registers.
    pub registers: u32,
    /// Bytes of local memory, for spilled registers and arrays.
    pub local_bytes: u32,
}

impl CudaLaunch {
    /// Prepares the launch of a kernel by name, with grid, block and arguments, and `shared_bytes` of dynamic
    /// shared memory.
    ///
    /// # Errors
    /// If there is no such kernel, or a block cannot have so much shared memory.
    pub fn new(
        code: &Arc<CudaModule>,
        name: &str,
        n_blocks: [i64; 3],
        block: [i64; 3],
        shared_bytes: u64,
        arguments: Vec<KernelArgument<CudaMemory>>,
    ) -> Result<CudaLaunch, CudaError> {
        let f = code.context.enter()?;
        let name = CString::new(name).expect("invariant: kernels have names that C accepts");
        let mut function = std::ptr::null_mut();
        call!(f, function(&mut function, code.module, name.as_ptr()), "a kernel")?;
        let size = |n: i64| c_uint::try_from(n).map_err(|_| refusal(f, INVALID_VALUE, "launching a kernel"));
        let sizes = |n: [i64; 3]| Ok::<_, CudaError>([size(n[0])?, size(n[1])?, size(n[2])?]);
        let (grid, block) = (sizes(n_blocks)?, sizes(block)?);
        let shared_bytes = size(i64::try_from(shared_bytes).unwrap_or(i64::MAX))?;
        if shared_bytes > 0 {
            let how = attribute::FUNCTION_DYNAMIC_SHARED;
            call!(f, set_function_attribute(function, how, shared_bytes as c_int), "shared memory")?;
        }
        Ok(CudaLaunch { code: code.clone(), function, grid, block, shared_bytes, arguments })
    }

    /// Queries the resources per thread.
    ///
    /// # Errors
    /// If the driver does not report them.
    pub fn taken(&self) -> Result<ThreadResources, CudaError> {
        let f = self.code.context.enter()?;
        let get = |attribute: i32| -> Result<u32, CudaError> {
            let mut value: c_int = 0;
            call!(f, function_attribute(&mut value, attribute, self.function), "asking about a kernel")?;
            Ok(value.max(0) as u32)
        };
        Ok(ThreadResources {
            registers: get(attribute::FUNCTION_REGISTERS)?,
            local_bytes: get(attribute::FUNCTION_LOCAL)?,
        })
    }

    /// Submits the launch to a stream.
    fn enqueue(&self, f: &DriverFunctions, stream: DriverHandle) -> Result<(), CudaError> {
        let value = |argument: &KernelArgument<CudaMemory>| {
            let mut value = [0; MAP_BYTES];
            let address: u64 = match argument {
                KernelArgument::Memory(span) => span.memory.address() + span.at,
                KernelArgument::Value(bytes) => {
                    value[..bytes.len()].copy_from_slice(bytes);
                    return value;
                }
                KernelArgument::Shared(_) => unreachable!("CUDA's kernels have no such arguments"),
            };
            value[..8].copy_from_slice(&address.to_ne_bytes());
            value
        };
        let mut values: Vec<[u8; MAP_BYTES]> = self.arguments.iter().map(value).collect();
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|a| (&raw mut *a).cast()).collect();
        let ([gx, gy, gz], [bx, by, bz]) = (self.grid, self.block);
        let (arguments, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        call!(
            f,
            launch(self.function, gx, gy, gz, bx, by, bz, self.shared_bytes, stream, arguments, none),
            "launching a kernel"
        )
    }
}

/// Runs kernels in order, `n_times` over; returns the device time in nanoseconds from the start of the first
/// to the end of the last.
///
/// # Errors
/// If one of them fails.
pub fn run(context: &CudaContext, launches: &[CudaLaunch], n_times: u32) -> Result<f64, CudaError> {
    let f = context.enter()?;
    record(context, n_times, || launches.iter().try_for_each(|launch| launch.enqueue(f, context.0.stream)))
}

/// Runs `n_times` the launches that `put` submits to the context's stream; returns the device time in
/// nanoseconds from the start of the first to the end of the last.
///
/// # Errors
/// If `put` or the driver refuses, or any of the work fails.
pub fn record<E: From<CudaError>>(
    context: &CudaContext,
    n_times: u32,
    put: impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    Ok(CudaGraph::of(context, n_times, put)?.run()?)
}

/// CUDA graph: launches that are submitted as one, without a round trip to the host for each.
pub struct CudaGraph {
    context: CudaContext,
    graph: DriverHandle,
    executable: DriverHandle,
}

// SAFETY: as for the context.
unsafe impl Send for CudaGraph {}
// SAFETY: as above.
unsafe impl Sync for CudaGraph {}

impl CudaGraph {
    /// Records kernels in order. Their arguments must live as long as the graph is used.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn launches(context: &CudaContext, launches: &[CudaLaunch]) -> Result<CudaGraph, CudaError> {
        let f = context.enter()?;
        CudaGraph::of(context, 1, || launches.iter().try_for_each(|launch| launch.enqueue(f, context.0.stream)))
    }

    /// Records `n_times` repetitions of the launches that `put` submits to the context's stream.
    fn of<E: From<CudaError>>(
        context: &CudaContext,
        n_times: u32,
        mut put: impl FnMut() -> Result<(), E>,
    ) -> Result<CudaGraph, E> {
        let (f, Handles { stream, events: [start, end], .. }) = (context.enter()?, &*context.0);
        let (stream, start, end) = (*stream, *start, *end);
        // Only this thread's work is recorded.
        call!(f, begin_capture(stream, 1), "recording launches")?;
        let mut all = || {
            // As nodes of the graph.
            call!(f, record_event(start, stream, 1), "an event")?;
            (0..n_times).try_for_each(|_| put())?;
            Ok(call!(f, record_event(end, stream, 1), "an event")?)
        };
        let done: Result<(), E> = all();
        let null = std::ptr::null_mut();
        let mut recorded = CudaGraph { context: context.clone(), graph: null, executable: null };
        let ended = call!(f, end_capture(stream, &mut recorded.graph), "recording launches");
        done?;
        ended?;
        call!(f, instantiate(&mut recorded.executable, recorded.graph, 0), "a graph of launches")?;
        Ok(recorded)
    }

    /// Launches the graph and waits; returns its device time in nanoseconds.
    ///
    /// # Errors
    /// If any of its launches fails.
    pub fn run(&self) -> Result<f64, CudaError> {
        let (f, Handles { stream, events: [start, end], .. }) = (self.context.enter()?, &*self.context.0);
        call!(f, launch_graph(self.executable, *stream), "launching kernels")?;
        self.context.finish()?;
        let mut ms = 0.0;
        call!(f, elapsed_ms(&mut ms, *start, *end), "the time between events")?;
        Ok(f64::from(ms) * 1e6)
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let Ok(f) = self.context.enter() else { return };
        if !self.executable.is_null() {
            let _ = call!(f, destroy_executable(self.executable), "a graph of launches");
        }
        if !self.graph.is_null() {
            let _ = call!(f, destroy_graph(self.graph), "a graph of launches");
        }
    }
}

#[cfg(test)]
mod fake;

/// Context on an emulator that belongs to this thread.
#[cfg(test)]
pub(crate) fn emulated() -> CudaContext {
    CudaContext::of(fake::functions(), 0).expect("the emulator has a device")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guarded::GuardedSpan;

    /// Adds one to each of 64 numbers, in two blocks of 32 threads.
    pub const PTX: &[u8] = b"
.version 7.0
.target sm_80
.address_size 64

.visible .entry add_one(
	.param .u64 .ptr .global .align 64 add_one_param_0
)
.reqntid 32, 1, 1
{
	.reg .b32 %r<6>;
	.reg .b64 %rd<5>;
	ld.param.b64 %rd1, [add_one_param_0];
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	shl.b32 %r3, %r2, 5;
	add.s32 %r4, %r3, %r1;
	mul.wide.u32 %rd2, %r4, 4;
	add.s64 %rd3, %rd1, %rd2;
	ld.global.b32 %r5, [%rd3];
	add.s32 %r5, %r5, 1;
	st.global.b32 [%rd3], %r5;
	ret;
}
";

    fn on(memory: &Arc<CudaMemory>) -> Vec<KernelArgument<CudaMemory>> {
        vec![GuardedSpan::whole(memory.clone(), memory.n_bytes()).into()]
    }

    fn read(memory: &CudaMemory) -> Vec<i32> {
        let mut bytes = vec![0; memory.n_bytes() as usize];
        memory.read(0, &mut bytes).unwrap();
        bytes.chunks(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    fn kernels_run_on_memory_of_the_device() {
        let device = found(&fake::functions(), 0).unwrap();
        assert_eq!((device.name.as_str(), device.target.name().as_str()), ("Emulator", "cuda/sm_90a"));
        assert_eq!(device.target.to_string().parse().as_ref(), Ok(&device.target));
        let context = CudaContext::of(fake::functions(), 0).unwrap();
        let code = Arc::new(CudaModule::load(&context, PTX).unwrap());
        let memory = Arc::new(CudaMemory::new(&context, 256).unwrap());
        memory.fill(0).unwrap();
        let launch = CudaLaunch::new(&code, "add_one", [2, 1, 1], [32, 1, 1], 0, on(&memory)).unwrap();
        assert_eq!(launch.taken(), Ok(ThreadResources { registers: 32, local_bytes: 0 }));
        let launches = [launch];
        assert_eq!(run(&context, &launches, 1), Ok(250_000.0));
        assert_eq!(read(&memory), [1; 64]);
        run(&context, &launches, 3).unwrap();
        assert_eq!((fake::n_launches(), read(&memory)), (4, vec![4; 64]));
        memory.write(0, &[0; 256]).unwrap();
        assert_eq!(read(&memory), [0; 64]);
        assert_eq!(memory.is_intact(), Ok(true));
        drop((launches, memory));
        assert_eq!(fake::n_allocated(), 0);
    }

    #[test]
    fn what_goes_wrong_is_told_apart() {
        assert_eq!(CudaContext::of(fake::functions(), 1).err(), Some(CudaError::NoDevice { number: 1, n: 1 }));
        let context = CudaContext::of(fake::functions(), 0).unwrap();
        assert!(CudaModule::load(&context, b".entry f(").is_err());
        let code = Arc::new(CudaModule::load(&context, PTX).unwrap());
        let memory = Arc::new(CudaMemory::new(&context, 128).unwrap());
        let launch = |name, n_blocks, block| {
            let launch = CudaLaunch::new(&code, name, [n_blocks, 1, 1], [block, 1, 1], 0, on(&memory))?;
            run(&context, &[launch], 1)
        };
        assert!(launch("add_two", 1, 32).is_err());
        // Blocks of another size than the code is compiled for.
        let refused = launch("add_one", 1, 64).unwrap_err();
        assert!(refused.to_string().contains("CUDA_ERROR_INVALID_VALUE (1)") && !refused.is_final(), "{refused}");
        assert!(launch("add_one", 1, 32).is_ok());
        // Beyond the end of the memory, but within the canary.
        assert!(launch("add_one", 2, 32).is_ok());
        assert_eq!(memory.is_intact(), Ok(false));
        assert_eq!(memory.is_intact(), Ok(true), "it is mended");
        // And further.
        let failed = launch("add_one", 64, 32).unwrap_err();
        assert!(failed.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)") && failed.is_final(), "{failed}");
        assert!(launch("add_one", 1, 32).unwrap_err().is_final(), "nothing goes on after it");
    }

    /// Waits for a barrier at which no other thread arrives, four seconds at most.
    const STUCK: &[u8] = b"
.version 8.0
.target sm_90a
.address_size 64

.visible .entry stuck(
	.param .u64 .ptr .global .align 64 stuck_param_0
)
.reqntid 32, 1, 1
{
	.reg .pred %p<4>;
	.reg .b32 %r<4>;
	.reg .b64 %rd<6>;
	.shared .align 8 .b8 place[8];
	mov.u32 %r1, place;
	mov.u32 %r2, %tid.x;
	setp.ne.b32 %p1, %r2, 0;
	@%p1 bra $go;
	mbarrier.init.shared::cta.b64 [%r1], 1;
	fence.proxy.async.shared::cta;
$go:
	bar.sync 0;
	mov.u64 %rd1, %globaltimer;
$again:
	mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
	@%p2 bra $done;
	mov.u64 %rd2, %globaltimer;
	sub.s64 %rd3, %rd2, %rd1;
	setp.lt.s64 %p3, %rd3, 4000000000;
	@%p3 bra $again;
	trap;
$done:
	ret;
}
";

    /// A kernel that traps is a final error for its process, and for no other one.
    #[test]
    fn a_kernel_that_is_stuck_costs_a_process() {
        let stuck = || {
            let context = CudaContext::of(fake::functions(), 0).unwrap();
            let code = Arc::new(CudaModule::load(&context, STUCK).unwrap());
            let memory = Arc::new(CudaMemory::new(&context, 256).unwrap());
            let launch = CudaLaunch::new(&code, "stuck", [1, 1, 1], [32, 1, 1], 0, on(&memory)).unwrap();
            let failed = run(&context, &[launch], 1).unwrap_err();
            assert!(failed.to_string().contains("CUDA_ERROR_LAUNCH_FAILED (719)") && failed.is_final(), "{failed}");
        };
        std::thread::spawn(stuck).join().unwrap();
        let context = CudaContext::of(fake::functions(), 0).unwrap();
        let code = Arc::new(CudaModule::load(&context, PTX).unwrap());
        let memory = Arc::new(CudaMemory::new(&context, 256).unwrap());
        let launch = CudaLaunch::new(&code, "add_one", [2, 1, 1], [32, 1, 1], 0, on(&memory)).unwrap();
        assert!(run(&context, &[launch], 1).is_ok());
    }
}
