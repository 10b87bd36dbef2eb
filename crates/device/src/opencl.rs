//! OpenCL devices, through the installed loader, which is opened at the first call.
//!
//! This is a thin, safe layer: objects that are released when dropped, calls with errors in words, memory
//! between canaries.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use cl3::command_queue as queue_api;
use cl3::context::{create_context, release_context};
use cl3::device as device_api;
use cl3::event as event_api;
use cl3::kernel as kernel_api;
use cl3::memory as memory_api;
use cl3::platform as platform_api;
use cl3::program as program_api;
use cl3::types::{
    cl_command_queue, cl_context, cl_device_id, cl_event, cl_int, cl_kernel, cl_mem, cl_program, cl_uint,
};
use tilewright_codegen::ARGUMENT_ALIGN;
use tilewright_ir::Target;
use tilewright_ir::target::{Arch, GpuApi};

use crate::guarded::{DeviceMemory, GuardedMemory, KernelArgument, with_canaries};
use crate::memory::CANARY_BYTES;

/// Debian package of the OpenCL loader.
pub const LOADER_PACKAGE: &str = "ocl-icd-libopencl1";
/// Debian package of an OpenCL driver for CPUs.
pub const CPU_PACKAGE: &str = "pocl-opencl-icd";

/// Queries of the width of a warp, which are vendor extensions.
const WARP_SIZE_NV: u32 = 0x4003;
const WAVEFRONT_WIDTH_AMD: u32 = 0x4043;

/// Reason why there is no OpenCL device, or why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenClError {
    /// Missing loader.
    #[error("no OpenCL loader is installed; Debian and Ubuntu: apt install {LOADER_PACKAGE}")]
    NoLoader,
    /// Missing platforms.
    #[error(
        "no OpenCL device is installed; the driver of a GPU brings one, and for this CPU, on Debian and Ubuntu: \
         apt install {CPU_PACKAGE}"
    )]
    NoDevices,
    /// Index beyond the number of devices.
    #[error("there is no OpenCL device {number}, only {known}")]
    NoSuchDevice {
        /// Index that was given.
        number: usize,
        /// Devices that exist.
        known: String,
    },
    /// Failed call.
    #[error("OpenCL: {what}: {name} ({code})", name = cl3::error_codes::error_text(*.code))]
    Call {
        /// Operation that failed.
        what: &'static str,
        /// Error code.
        code: i32,
    },
    /// Mismatched number of arguments of a kernel.
    #[error("the kernel takes {takes} arguments, of which {given} are given")]
    Arguments {
        /// Number of arguments that it takes.
        takes: u32,
        /// Number of arguments given.
        given: usize,
    },
    /// Failed build of a program.
    #[error("the OpenCL compiler refuses the code: {log}")]
    Build {
        /// Log of the compiler.
        log: String,
    },
}

impl OpenClError {
    /// Whether it is an out of memory error.
    pub fn lacks_memory(&self) -> bool {
        use cl3::error_codes::{CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_OUT_OF_HOST_MEMORY, CL_OUT_OF_RESOURCES};
        let memory = [CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_OUT_OF_HOST_MEMORY, CL_OUT_OF_RESOURCES];
        matches!(self, OpenClError::Call { code, .. } if memory.contains(code))
    }

    /// Whether the device itself failed, whatever runs on it.
    pub fn is_of_device(&self) -> bool {
        use cl3::error_codes::{CL_DEVICE_NOT_AVAILABLE, CL_DEVICE_NOT_FOUND, CL_INVALID_DEVICE};
        let device = [CL_DEVICE_NOT_AVAILABLE, CL_DEVICE_NOT_FOUND, CL_INVALID_DEVICE];
        matches!(self, OpenClError::Call { code, .. } if device.contains(code))
    }
}

fn failed(what: &'static str) -> impl Fn(cl_int) -> OpenClError {
    move |code| OpenClError::Call { what, code }
}

/// OpenCL device of this machine.
#[derive(Debug, Clone)]
pub struct OpenClDevice {
    /// Name reported by the device.
    pub name: String,
    /// Platform with its version.
    pub platform: String,
    /// Target of the device.
    pub target: Target,
    /// Whether it is this machine's CPU, so that its kernels and compilers compete for cores.
    pub is_cpu: bool,
    id: DeviceId,
}

/// Handle of a device, valid as long as the process.
#[derive(Debug, Clone, Copy)]
struct DeviceId(cl_device_id);

// SAFETY: root devices are never released, and any thread may make any call with one.
unsafe impl Send for DeviceId {}
// SAFETY: as above.
unsafe impl Sync for DeviceId {}

/// Devices of all platforms, in index order.
///
/// # Errors
/// If there is no loader, or no device.
pub fn devices() -> Result<Vec<OpenClDevice>, OpenClError> {
    // PoCL returns devices to a second thread that the first one is still initialising.
    static ONE_BY_ONE: Mutex<()> = Mutex::new(());
    let _one = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !cl3::is_opencl_runtime_available() {
        return Err(OpenClError::NoLoader);
    }
    let platforms = platform_api::get_platform_ids().map_err(|_| OpenClError::NoDevices)?;
    let mut found = Vec::new();
    for platform in platforms {
        let text = |what| platform_api::get_platform_info(platform, what).map(String::from).unwrap_or_default();
        let name = format!("{} ({})", text(platform_api::CL_PLATFORM_NAME), text(platform_api::CL_PLATFORM_VERSION));
        // A platform without devices returns an error.
        let ids = device_api::get_device_ids(platform, device_api::CL_DEVICE_TYPE_ALL).unwrap_or_default();
        for id in ids {
            found.push(OpenClDevice::of(id, name.clone(), found.len())?);
        }
    }
    if found.is_empty() { Err(OpenClError::NoDevices) } else { Ok(found) }
}

/// Device of an index.
///
/// # Errors
/// As [`devices`], and if there are fewer.
pub fn device(number: usize) -> Result<OpenClDevice, OpenClError> {
    let all = devices()?;
    let known = || all.iter().enumerate().map(|(at, device)| format!("{at} ({})", device.name));
    all.get(number)
        .cloned()
        .ok_or_else(|| OpenClError::NoSuchDevice { number, known: known().collect::<Vec<_>>().join(", ") })
}

/// Device of a target returned in an [`OpenClDevice`].
///
/// # Errors
/// As [`device`].
pub fn device_of(target: &Target) -> Result<OpenClDevice, OpenClError> {
    device(target.gpu.map_or(0, |gpu| gpu.number as usize))
}

impl OpenClDevice {
    /// Description of device and driver that identifies their machine code.
    ///
    /// # Errors
    /// If the driver does not report it.
    pub fn maker(&self) -> Result<String, OpenClError> {
        let asked = |what| device_api::get_device_info(self.id.0, what).map(String::from);
        let version = |what| asked(what).map_err(failed("asking a device what it is"));
        let versions = [device_api::CL_DRIVER_VERSION, device_api::CL_DEVICE_VERSION].map(version);
        let [driver, device] = versions;
        Ok(format!("{}, {}, {}, {}", self.platform, self.target.name(), driver?, device?))
    }

    fn of(id: cl_device_id, platform: String, number: usize) -> Result<OpenClDevice, OpenClError> {
        use device_api::{
            CL_DEVICE_DOUBLE_FP_CONFIG, CL_DEVICE_EXTENSIONS, CL_DEVICE_GLOBAL_MEM_CACHE_SIZE,
            CL_DEVICE_LOCAL_MEM_SIZE, CL_DEVICE_MAX_COMPUTE_UNITS, CL_DEVICE_MAX_WORK_GROUP_SIZE,
            CL_DEVICE_MAX_WORK_ITEM_SIZES, CL_DEVICE_NAME, CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT,
            CL_DEVICE_SINGLE_FP_CONFIG, CL_DEVICE_TYPE, CL_DEVICE_TYPE_CPU, CL_FP_FMA, get_device_data,
            get_device_info,
        };
        let asked = |what| get_device_info(id, what).map_err(failed("asking a device what it is"));
        let name = String::from(asked(CL_DEVICE_NAME)?).trim_end_matches('\0').trim().to_owned();
        let is_cpu = asked(CL_DEVICE_TYPE)?.to_ulong() & CL_DEVICE_TYPE_CPU != 0;
        let along = asked(CL_DEVICE_MAX_WORK_ITEM_SIZES)?.to_vec_size();
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let extensions = String::from(asked(CL_DEVICE_EXTENSIONS)?);
        // Without a reported width: on a CPU, the lanes of a vector.
        let vendors = [WARP_SIZE_NV, WAVEFRONT_WIDTH_AMD].into_iter().find_map(|what| {
            let data = get_device_data(id, what).ok()?;
            Some(u32::from_ne_bytes(data.get(..4)?.try_into().ok()?)).filter(|n| *n > 0)
        });
        let mut target = Target::named("opencl").expect("every generic name is known");
        target.cpu = target_word(&name);
        target.has_fma = asked(CL_DEVICE_SINGLE_FP_CONFIG)?.to_ulong() & CL_FP_FMA != 0;
        let cache_bytes = asked(CL_DEVICE_GLOBAL_MEM_CACHE_SIZE)?.to_ulong();
        (target.l2_bytes, target.l3_bytes) = (cache_bytes, cache_bytes);
        let gpu = target.gpu.as_mut().expect("invariant: an OpenCL target has what a GPU has");
        gpu.number = small(number);
        if is_cpu {
            let lanes = asked(CL_DEVICE_NATIVE_VECTOR_WIDTH_FLOAT)?.to_uint().max(1);
            target.vector_bits = target.vector_bits.max(32 * lanes);
            // As many as the vector registers of AVX-512 hold; narrower ones keep the rest in the cache.
            gpu.registers_per_thread = gpu.registers_per_thread.max(32 * lanes);
            gpu.warp_size = lanes;
        }
        gpu.warp_size = vendors.unwrap_or(gpu.warp_size);
        gpu.most_threads = small(asked(CL_DEVICE_MAX_WORK_GROUP_SIZE)?.to_size());
        for (limit, axis) in gpu.most_threads_along.iter_mut().zip(&along) {
            *limit = small(*axis);
        }
        gpu.most_blocks_along = [i32::MAX as u32; 3];
        gpu.shared_bytes = asked(CL_DEVICE_LOCAL_MEM_SIZE)?.to_ulong();
        gpu.most_shared_bytes = gpu.shared_bytes;
        gpu.n_units = asked(CL_DEVICE_MAX_COMPUTE_UNITS)?.to_uint();
        gpu.has_f64 = asked(CL_DEVICE_DOUBLE_FP_CONFIG).is_ok_and(|config| config.to_ulong() != 0);
        gpu.has_f16 = extensions.split_whitespace().any(|extension| extension == "cl_khr_fp16");
        Ok(OpenClDevice { name, platform, target, is_cpu, id: DeviceId(id) })
    }
}

/// Converts a name to a part of a target's name.
fn target_word(name: &str) -> String {
    let kept = |c: char| if c.is_ascii_alphanumeric() || "._+-".contains(c) { c } else { ' ' };
    let text: String = name.chars().map(kept).collect();
    let word = text.split_whitespace().collect::<Vec<_>>().join("-");
    if word.is_empty() { "unnamed".to_owned() } else { word }
}

/// Context with a queue, shared by clones across threads.
#[derive(Clone)]
pub struct OpenClContext(Arc<OpenClHandles>);

struct OpenClHandles {
    device: cl_device_id,
    context: cl_context,
    queue: cl_command_queue,
}

// SAFETY: any thread may make any OpenCL call at any time, except setting arguments of a kernel: that
// requires a kernel that is not shared.
unsafe impl Send for OpenClHandles {}
// SAFETY: as above.
unsafe impl Sync for OpenClHandles {}

impl Drop for OpenClHandles {
    fn drop(&mut self) {
        // SAFETY: both were created by this object and are released once. Errors of releasing are ignored.
        unsafe {
            let _ = queue_api::release_command_queue(self.queue);
            let _ = release_context(self.context);
        }
    }
}

impl OpenClContext {
    /// Opens a context on a device.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn new(device: &OpenClDevice) -> Result<OpenClContext, OpenClError> {
        let device = device.id.0;
        let context = create_context(&[device], ptr::null(), None, ptr::null_mut()).map_err(failed("a context"))?;
        let profiling = queue_api::CL_QUEUE_PROFILING_ENABLE;
        // SAFETY: context and device belong together.
        let queue = unsafe { queue_api::create_command_queue(context, device, profiling) };
        let queue = queue.map_err(|code| {
            // SAFETY: it was created above, and nothing refers to it.
            let _ = unsafe { release_context(context) };
            failed("a queue")(code)
        })?;
        Ok(OpenClContext(Arc::new(OpenClHandles { device, context, queue })))
    }

    /// Required alignment of sub-buffers, in bytes.
    ///
    /// # Errors
    /// If the driver does not report it.
    pub fn alignment(&self) -> Result<u64, OpenClError> {
        let bits = device_api::get_device_info(self.0.device, device_api::CL_DEVICE_MEM_BASE_ADDR_ALIGN);
        Ok(u64::from(bits.map_err(failed("asking a device what it is"))?.to_uint() / 8).max(ARGUMENT_ALIGN))
    }

    /// Queue handle, for libraries.
    pub fn queue(&self) -> *mut c_void {
        self.0.queue
    }

    /// Event that completes when all previously submitted work is done.
    fn marker(&self) -> Result<cl_event, OpenClError> {
        // SAFETY: the queue is the context's, and the wait list is empty.
        let event = unsafe { queue_api::enqueue_marker_with_wait_list(self.0.queue, 0, ptr::null()) };
        event.map_err(failed("a marker"))
    }

    /// Waits until all submitted work is done.
    ///
    /// # Errors
    /// If any of it failed.
    pub fn finish(&self) -> Result<(), OpenClError> {
        queue_api::finish(self.0.queue).map_err(failed("waiting"))
    }
}

/// Device memory between canaries.
pub type OpenClMemory = GuardedMemory<Buffers>;

/// Buffer with its canaries, and the sub-buffer between them.
pub struct Buffers {
    context: OpenClContext,
    whole: cl_mem,
    inner: cl_mem,
}

// SAFETY: as for the context; a kernel's writes are visible to threads that have waited for it.
unsafe impl Send for Buffers {}
// SAFETY: as above.
unsafe impl Sync for Buffers {}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: both were created by this object and are released once.
        unsafe {
            let _ = memory_api::release_mem_object(self.inner);
            let _ = memory_api::release_mem_object(self.whole);
        }
    }
}

impl DeviceMemory for Buffers {
    type Error = OpenClError;

    fn fill(&self, at: usize, n_bytes: usize, byte: u8) -> Result<(), OpenClError> {
        let pattern = [byte];
        let pointer = pattern.as_ptr().cast::<c_void>();
        // SAFETY: the range lies inside, and the pattern is copied before the call returns.
        let event = unsafe {
            queue_api::enqueue_fill_buffer(self.context.0.queue, self.whole, pointer, 1, at, n_bytes, 0, ptr::null())
        };
        event.map(release).map_err(failed("filling memory"))
    }

    fn read(&self, at: usize, to: &mut [u8]) -> Result<(), OpenClError> {
        let (queue, pointer) = (self.context.0.queue, to.as_mut_ptr().cast::<c_void>());
        let blocking = cl3::types::CL_TRUE;
        // SAFETY: the range lies inside, and the call returns when everything is copied.
        let event = unsafe {
            queue_api::enqueue_read_buffer(queue, self.whole, blocking, at, to.len(), pointer, 0, ptr::null())
        };
        event.map(release).map_err(failed("reading memory"))
    }

    fn write(&self, at: usize, from: &[u8]) -> Result<(), OpenClError> {
        let (queue, pointer) = (self.context.0.queue, from.as_ptr().cast::<c_void>());
        let blocking = cl3::types::CL_TRUE;
        // SAFETY: the range lies inside, and the call returns when everything is copied.
        let event = unsafe {
            queue_api::enqueue_write_buffer(queue, self.whole, blocking, at, from.len(), pointer, 0, ptr::null())
        };
        event.map(release).map_err(failed("writing memory"))
    }
}

impl OpenClMemory {
    /// Allocates memory of `n_bytes` undefined bytes.
    ///
    /// # Errors
    /// If the device does not have enough memory.
    pub fn new(context: &OpenClContext, n_bytes: u64) -> Result<OpenClMemory, OpenClError> {
        let no_memory = failed("memory");
        let too_large = || no_memory(cl3::error_codes::CL_MEM_OBJECT_ALLOCATION_FAILURE);
        let n_bytes = usize::try_from(n_bytes.max(1)).map_err(|_| too_large())?;
        let all = with_canaries(n_bytes).ok_or_else(too_large)?;
        let flags = memory_api::CL_MEM_READ_WRITE;
        // SAFETY: without a host pointer, the driver allocates the memory.
        let whole = unsafe { memory_api::create_buffer(context.0.context, flags, all, ptr::null_mut()) };
        let whole = whole.map_err(&no_memory)?;
        let inner = part(whole, CANARY_BYTES, n_bytes).inspect_err(|_| {
            // SAFETY: it was created above, and nothing refers to it.
            let _ = unsafe { memory_api::release_mem_object(whole) };
        })?;
        GuardedMemory::inside(Buffers { context: context.clone(), whole, inner }, n_bytes)
    }

    /// Handle of the sub-buffer between the canaries, for libraries.
    pub fn handle(&self) -> *mut c_void {
        self.whole().inner
    }
}

/// Creates a sub-buffer, to be released by the caller.
fn part(whole: cl_mem, origin: usize, size: usize) -> Result<cl_mem, OpenClError> {
    let region = cl3::types::cl_buffer_region { origin, size };
    let (flags, kind) = (memory_api::CL_MEM_READ_WRITE, memory_api::CL_BUFFER_CREATE_TYPE_REGION);
    // SAFETY: the region lies inside, and its description lives as long as the call.
    unsafe { memory_api::create_sub_buffer(whole, flags, kind, (&raw const region).cast::<c_void>()) }
        .map_err(failed("a part of memory"))
}

fn release(event: cl_event) {
    // SAFETY: it was just created, and has no other owner.
    let _ = unsafe { event_api::release_event(event) };
}

/// Compiled program.
pub struct OpenClProgram {
    context: OpenClContext,
    program: cl_program,
}

// SAFETY: as for the context.
unsafe impl Send for OpenClProgram {}
// SAFETY: as above.
unsafe impl Sync for OpenClProgram {}

impl Drop for OpenClProgram {
    fn drop(&mut self) {
        // SAFETY: it was created by this object and is released once.
        let _ = unsafe { program_api::release_program(self.program) };
    }
}

impl OpenClProgram {
    /// Compiles OpenCL C with options.
    ///
    /// # Errors
    /// [`OpenClError::Build`] if the compiler refuses it.
    pub fn build(context: &OpenClContext, source: &str, options: &CStr) -> Result<OpenClProgram, OpenClError> {
        let program = program_api::create_program_with_source(context.0.context, &[source]);
        OpenClProgram { context: context.clone(), program: program.map_err(failed("a program"))? }.built(options)
    }

    /// Loads a binary of [`OpenClProgram::binary`], possibly made by another process, for the same device.
    ///
    /// # Errors
    /// If the driver refuses it.
    pub fn of_binary(context: &OpenClContext, binary: &[u8]) -> Result<OpenClProgram, OpenClError> {
        // SAFETY: the device is the context's.
        let program =
            unsafe { program_api::create_program_with_binary(context.0.context, &[context.0.device], &[binary]) };
        OpenClProgram { context: context.clone(), program: program.map_err(failed("a program"))? }.built(c"")
    }

    fn built(self, options: &CStr) -> Result<OpenClProgram, OpenClError> {
        // Some drivers report invalid options by another code.
        use cl3::error_codes::{CL_BUILD_PROGRAM_FAILURE, CL_INVALID_BUILD_OPTIONS};
        let built = program_api::build_program(self.program, &[self.context.0.device], options, None, ptr::null_mut());
        match built {
            Ok(()) => Ok(self),
            Err(CL_BUILD_PROGRAM_FAILURE | CL_INVALID_BUILD_OPTIONS) => Err(OpenClError::Build { log: self.log() }),
            Err(other) => Err(failed("building a program")(other)),
        }
    }

    /// Binary of the program in the driver's form.
    ///
    /// # Errors
    /// If the driver has none.
    pub fn binary(&self) -> Result<Vec<u8>, OpenClError> {
        let binaries = program_api::get_program_info(self.program, program_api::CL_PROGRAM_BINARIES);
        let binaries = Vec::<Vec<u8>>::from(binaries.map_err(failed("the form of a program"))?);
        binaries.into_iter().next().ok_or(failed("the form of a program")(cl3::error_codes::CL_INVALID_VALUE))
    }

    /// Beginning of the compiler's log.
    fn log(&self) -> String {
        const MOST: usize = 500;
        let log =
            program_api::get_program_build_info(self.program, self.context.0.device, program_api::CL_PROGRAM_BUILD_LOG);
        let log = log.map(String::from).unwrap_or_default();
        let words = log.trim_matches(|c: char| c.is_whitespace() || c == '\0').chars();
        words.take(MOST).map(|c| if c.is_control() { ' ' } else { c }).collect()
    }
}

/// Kernel launch: a kernel with its arguments and launch configuration.
pub struct OpenClLaunch {
    code: Arc<OpenClProgram>,
    kernel: cl_kernel,
    n_work_items: [usize; 3],
    group: [usize; 3],
    /// Arguments, kept alive as long as the launch: buffers.
    arguments: Vec<KernelArgument<OpenClMemory>>,
    /// Sub-buffers among the arguments.
    parts: Vec<cl_mem>,
}

// SAFETY: as for the context; arguments are set only while the launch is created.
unsafe impl Send for OpenClLaunch {}
// SAFETY: as above.
unsafe impl Sync for OpenClLaunch {}

impl Drop for OpenClLaunch {
    fn drop(&mut self) {
        // SAFETY: everything was created by this object and is released once.
        unsafe {
            let _ = kernel_api::release_kernel(self.kernel);
            for part in &self.parts {
                let _ = memory_api::release_mem_object(*part);
            }
        }
    }
}

impl OpenClLaunch {
    /// Prepares the launch of a kernel by name, with work-groups, work-items and arguments.
    ///
    /// # Errors
    /// If there is no such kernel, or its arguments do not match.
    pub fn new(
        code: &Arc<OpenClProgram>,
        name: &str,
        n_groups: [usize; 3],
        group: [usize; 3],
        arguments: Vec<KernelArgument<OpenClMemory>>,
    ) -> Result<OpenClLaunch, OpenClError> {
        let name = CString::new(name).expect("invariant: kernels have names that C accepts");
        let kernel = kernel_of(code, &name)?;
        let n_work_items = [0, 1, 2].map(|axis| n_groups[axis] * group[axis]);
        let mut launch = OpenClLaunch { code: code.clone(), kernel, n_work_items, group, arguments, parts: Vec::new() };
        let (takes, given) = (launch.n_arguments()?, launch.arguments.len());
        if takes as usize != given {
            return Err(OpenClError::Arguments { takes, given });
        }
        for (at, argument) in launch.arguments.iter().enumerate() {
            let mut memory;
            let (n_bytes, value) = match argument {
                KernelArgument::Memory(span) => {
                    memory = span.memory.whole().inner;
                    if (span.at, span.n_bytes) != (0, span.memory.n_bytes()) {
                        // A sub-buffer cannot be made of a sub-buffer.
                        let from = CANARY_BYTES + span.at as usize;
                        memory = part(span.memory.whole().whole, from, span.n_bytes as usize)?;
                        launch.parts.push(memory);
                    }
                    (size_of::<cl_mem>(), (&raw const memory).cast::<c_void>())
                }
                KernelArgument::Value(bytes) => (bytes.len(), bytes.as_ptr().cast()),
                KernelArgument::Shared(n_bytes) => (*n_bytes, ptr::null()),
            };
            // SAFETY: the value is a memory handle or a number, of that size, and is copied; for local memory
            // it is null.
            unsafe { kernel_api::set_kernel_arg(launch.kernel, at as u32, n_bytes, value) }
                .map_err(failed("an argument of a kernel"))?;
        }
        Ok(launch)
    }

    /// Number of arguments that the kernel takes.
    fn n_arguments(&self) -> Result<u32, OpenClError> {
        let n = kernel_api::get_kernel_info(self.kernel, kernel_api::CL_KERNEL_NUM_ARGS);
        n.map(|n| n.to_uint()).map_err(failed("asking about a kernel"))
    }

    /// Limits of this kernel on the device: maximum work-group size, and local memory of a group in bytes.
    ///
    /// # Errors
    /// If the driver does not report them.
    pub fn limits(&self) -> Result<(u64, u64), OpenClError> {
        let asked = |what| {
            let device = self.code.context.0.device;
            kernel_api::get_kernel_work_group_info(self.kernel, device, what).map_err(failed("asking about a kernel"))
        };
        let threads = asked(kernel_api::CL_KERNEL_WORK_GROUP_SIZE)?.to_size() as u64;
        Ok((threads, asked(kernel_api::CL_KERNEL_LOCAL_MEM_SIZE)?.to_ulong()))
    }

    /// Runs one work-group, so that the driver compiles the code, as some do only at the first launch.
    ///
    /// # Errors
    /// If that fails.
    pub fn warm_up(&self) -> Result<(), OpenClError> {
        self.enqueue(self.group).map(release)?;
        self.code.context.finish()
    }

    /// Launches the kernel with this many threads in total.
    fn enqueue(&self, n_work_items: [usize; 3]) -> Result<cl_event, OpenClError> {
        // SAFETY: the queue belongs to the context of the program; sizes have three elements, and all
        // arguments are set.
        let event = unsafe {
            queue_api::enqueue_nd_range_kernel(
                self.code.context.0.queue,
                self.kernel,
                3,
                ptr::null(),
                n_work_items.as_ptr(),
                self.group.as_ptr(),
                0,
                ptr::null(),
            )
        };
        event.map_err(failed("launching a kernel"))
    }
}

/// Creates a kernel by its name.
fn kernel_of(code: &OpenClProgram, name: &CStr) -> Result<cl_kernel, OpenClError> {
    kernel_api::create_kernel(code.program, name).map_err(failed("a kernel"))
}

/// Runs kernels in order, `n_times` over; returns the time in nanoseconds from the start of the first to the
/// end of the last, by the device's clock or, without profiling, the host's.
///
/// # Errors
/// If one of them fails.
pub fn run(context: &OpenClContext, launches: &[OpenClLaunch], n_times: u32) -> Result<f64, OpenClError> {
    let start = std::time::Instant::now();
    let mut events = Events(Vec::new());
    for _ in 0..n_times {
        for launch in launches {
            events.0.push(launch.enqueue(launch.n_work_items)?);
        }
    }
    context.finish()?;
    let took_ns = start.elapsed().as_nanos() as f64;
    Ok(events.span_ns(event_api::CL_PROFILING_COMMAND_START)?.unwrap_or(took_ns))
}

/// Runs `n_times` the commands that `put` submits to the queue; returns the time in nanoseconds, by the
/// device's clock or, without profiling, the host's. The commands run once before, as a warm-up.
///
/// # Errors
/// If `put` or the driver refuses, or any of the work fails.
pub fn timed<E: From<OpenClError>>(
    context: &OpenClContext,
    n_times: u32,
    mut put: impl FnMut() -> Result<(), E>,
) -> Result<f64, E> {
    let start = std::time::Instant::now();
    put()?;
    let mut events = Events(vec![context.marker()?]);
    (0..n_times).try_for_each(|_| put())?;
    events.0.push(context.marker()?);
    context.finish()?;
    let n_times = f64::from(n_times);
    let took_ns = start.elapsed().as_nanos() as f64 * n_times / (n_times + 1.0);
    Ok(events.span_ns(event_api::CL_PROFILING_COMMAND_END)?.unwrap_or(took_ns))
}

/// Events that are released together.
struct Events(Vec<cl_event>);

impl Events {
    /// Nanoseconds from the profiling time `from` of the first to the end of the last, if the device has a
    /// clock. All events must have completed.
    ///
    /// # Errors
    /// If one of them failed.
    fn span_ns(&self, from: cl_uint) -> Result<Option<f64>, OpenClError> {
        let (Some(first), Some(last)) = (self.0.first(), self.0.last()) else { return Ok(None) };
        for event in &self.0 {
            let status = event_api::get_event_info(*event, event_api::CL_EVENT_COMMAND_EXECUTION_STATUS);
            let status = status.map_err(failed("asking whether a kernel has run"))?.to_int();
            if status < 0 {
                return Err(failed("running a kernel")(status));
            }
        }
        let moment = |event: cl_event, what| event_api::get_event_profiling_info(event, what).map(|at| at.to_ulong());
        Ok(match (moment(*first, from), moment(*last, event_api::CL_PROFILING_COMMAND_END)) {
            (Ok(begin), Ok(end)) if end > begin => Some((end - begin) as f64),
            _ => None,
        })
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.0.drain(..).for_each(release);
    }
}

/// Whether a target is an OpenCL device.
pub fn is_opencl(target: &Target) -> bool {
    target.arch == Arch::Gpu(GpuApi::OpenCl)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_words_of_targets() {
        assert_eq!(target_word("pthread-AMD EPYC 9B14 (x2)"), "pthread-AMD-EPYC-9B14-x2");
        assert_eq!(target_word("NVIDIA H100 80GB/HBM3:1"), "NVIDIA-H100-80GB-HBM3-1");
        assert_eq!(target_word("//"), "unnamed");
    }
}
