//! Users' kernels: a process of ours calls one on fenced buffers, compares its result with the reference, and
//! times it. A compiler has made a shared object of the kernel, or another process of ours has compiled it
//! for a GPU.
//!
//! The process is persistent and takes one kernel after the other. A CPU kernel is called in a child process
//! of its own; GPU kernels share the driver, which is slow to start, until one of them fails.

mod gpu;

use std::ffi::{CStr, CString, c_char, c_void};
use std::fs::File;
use std::io::{self, BufRead, Write as _};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tilewright_ir::DType;
use tilewright_ir::reference::Tolerance;
use tilewright_search::ErrorClass;

use crate::cuda::compile::WriteFile;
use crate::data;
use crate::device::RoundLength;
use crate::failure::Failure;
use crate::memory::{Fenced, ReadOnly};
use crate::protocol::ClassName;
use crate::sandbox::{self, Strictness};
use crate::timing::sample_round;

use gpu::Drivers;
pub use gpu::GpuJob;

/// Name of the shared object's function that calls the kernel; it takes the addresses of all arguments.
pub const ENTRY: &str = "tilewright_call";

/// Multiple of the leading time at which a kernel is not timed further.
const HOPELESS: f64 = 1.5;

/// Job of a process that runs a user's kernel: arguments, data and limits.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelJob {
    /// Arguments of the kernel.
    pub arguments: Vec<ProcessArgument>,
    /// File with the buffers' contents and reference results.
    pub data: PathBuf,
    /// Maximum error of an element, relative to its magnitude and to that of the largest element.
    pub tolerance: f64,
    /// Minimum time of the timed runs, in nanoseconds.
    pub min_time_ns: f64,
    /// Number of threads that the kernel may use.
    pub n_threads: usize,
    /// Whether the result is output instead of compared and timed: at the end of standard output, as `f64`,
    /// one buffer after the other.
    pub is_reference: bool,
    /// Source and launch, for a kernel on a GPU.
    pub gpu: Option<GpuJob>,
}

impl KernelJob {
    /// Reads a job from its file.
    fn read(path: &Path) -> Result<KernelJob, Failure> {
        let text = std::fs::read(path).map_err(unknown("its job"))?;
        serde_json::from_slice(&text).map_err(|error| unknown("its job")(error.into()))
    }
}

/// Argument of a kernel.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ProcessArgument {
    /// Value, as bytes.
    Value(Vec<u8>),
    /// Shared memory of a block: an expression of the parameters, in bytes.
    Shared(String),
    /// Pointer to a buffer.
    Buffer {
        /// Name of the buffer.
        name: String,
        /// Name of the element type.
        dtype: String,
        /// Number of elements.
        n: u64,
        /// Offset in the data of its contents before a run; `None` for a buffer that is only written, which
        /// is filled with garbage.
        contents_at: Option<u64>,
        /// Offset in the data of its reference, as `f64`; `None` for a buffer that is only read.
        answer_at: Option<u64>,
        /// Whether the kernel writes it.
        is_output: bool,
        /// Whether it is a global variable of a CUDA source, rather than an argument.
        is_variable: bool,
    },
}

/// Result of a kernel, printed by its process as the last line of output.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ProcessResult {
    /// Correct result, with its times.
    Timed {
        /// Samples in nanoseconds per run.
        samples_ns: Vec<f64>,
        /// Largest relative error of an output.
        relative_error: f64,
    },
    /// Wrong result, or failure to call the kernel.
    Failed {
        /// Class of the failure.
        class: ClassName,
        /// Description of the failure.
        message: String,
        /// Whether the device itself failed, whatever runs on it.
        is_of_device: bool,
    },
}

impl ProcessResult {
    /// Finds the result in a process's output, to which its kernel may have written, too.
    pub fn last_of(output: &[u8]) -> Option<ProcessResult> {
        let text = String::from_utf8_lossy(output);
        text.lines().rev().find_map(|line| serde_json::from_str(line).ok())
    }
}

/// Result of a job, printed by a persistent process as the last line of its output.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkResult {
    /// Wait status that a process ended with, or would have, if it did only this job.
    pub status: i32,
    /// Whether a failure may be caused by an earlier job.
    pub is_doubtful: bool,
    /// Whether the process takes further jobs.
    pub stays: bool,
}

impl WorkResult {
    /// Finds the result at the end of a process's output, with the offset of its line.
    pub fn at_end_of(output: &[u8]) -> Option<(WorkResult, usize)> {
        let text = output.strip_suffix(b"\n")?;
        let at = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        Some((serde_json::from_slice(&text[at..]).ok()?, at))
    }

    /// Result of work that was done in this process after `n_before` other jobs; prints `result`.
    fn of(result: Result<Option<ProcessResult>, Failure>, n_before: u64) -> WorkResult {
        let class = result.as_ref().err().map(|failure| failure.class);
        let is_lost = result.as_ref().is_err_and(|failure| failure.is_of_device);
        // If something was written where it should not be, other memory may be damaged as well. A lost device
        // is lost for this process.
        let stays = !is_lost && !matches!(class, Some(ErrorClass::RuntimeError | ErrorClass::Unknown));
        let is_doubtful = n_before > 0 && (!stays || class == Some(ErrorClass::WrongAnswer));
        let is_right = say(result);
        // The exit code is in the second byte.
        WorkResult { status: if is_right { 0 } else { 1 << 8 }, is_doubtful, stays }
    }

    fn say(self) {
        let line = format!("\n{}\n", serde_json::to_string(&self).expect("answers are plain data"));
        let mut out = io::stdout().lock();
        // If nothing reads it, this process is ended anyway.
        let _ = out.write_all(line.as_bytes());
        let _ = out.flush();
    }
}

fn unknown(what: &str) -> impl Fn(io::Error) -> Failure {
    move |error| (ErrorClass::Unknown, format!("{what}: {error}")).into()
}

/// Calls the kernel of a shared object, or of a GPU's code, for a job, and prints a [`ProcessResult`];
/// returns whether the kernel was correct. For a GPU, further words are the parameters as `name=value`, and
/// the best candidate's time in nanoseconds, if any.
pub fn serve(job: &Path, library: &Path, more: &[String]) -> bool {
    say(KernelJob::read(job).and_then(|read| call(&read, &mut Drivers::of(job), library, more)))
}

/// Compiles the kernel of a job into a file, by `write`, and prints errors; returns whether it succeeded. The
/// words are the parameters, as `name=value`.
pub fn build(job: &Path, into: &Path, words: &[String], write: WriteFile) -> bool {
    let built = |read: KernelJob| gpu::build(&read, &mut Drivers::of(job), into, words, write);
    say(KernelJob::read(job).and_then(built).map(|()| None))
}

/// Performs jobs until standard input ends: calls kernels as [`serve`] does or, given `write`, compiles them.
/// Each input line has the words of a job, and each reply is a [`WorkResult`]. The process must have no other
/// thread.
pub fn stay(job: &Path, write: Option<WriteFile>) -> bool {
    let read = match KernelJob::read(job) {
        Ok(read) => read,
        Err(failure) => return say(Err(failure)),
    };
    let requests = match own_input() {
        Ok(requests) => io::BufReader::new(requests),
        Err(error) => return say(Err(unknown("its standard input")(error))),
    };
    let mut drivers = Drivers::of(job);
    for (line, n_before) in requests.lines().map_while(Result::ok).zip(0u64..) {
        let Ok(words) = serde_json::from_str::<Vec<String>>(&line) else { return false };
        let Some((file, more)) = words.split_first() else { return false };
        let file = Path::new(file);
        let done = if let Some(write) = write {
            WorkResult::of(gpu::build(&read, &mut drivers, file, more, write).map(|()| None), n_before)
        } else if read.gpu.is_some() {
            WorkResult::of(call(&read, &mut drivers, file, more), n_before)
        } else {
            match in_child(|| say(call(&read, &mut drivers, file, more))) {
                Ok(status) => WorkResult { status, is_doubtful: false, stays: true },
                Err(error) => WorkResult::of(Err(unknown("a process for it")(error)), 0),
            }
        };
        done.say();
        if !done.stays {
            return false;
        }
    }
    true
}

/// Standard input of this process, moved so that the code that it calls finds no input.
fn own_input() -> io::Result<File> {
    let requests = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let nothing = File::open("/dev/null")?;
    // SAFETY: both descriptors are open.
    match unsafe { libc::dup2(nothing.as_raw_fd(), libc::STDIN_FILENO) } {
        0.. => Ok(requests),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Runs `work` in a child of this process, which has no other thread, and returns the wait status.
fn in_child(work: impl FnOnce() -> bool) -> io::Result<i32> {
    // SAFETY: the child is a full copy of this process, as there are no other threads; all other calls take
    // plain numbers.
    unsafe {
        match libc::fork() {
            0 => {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                std::process::exit(i32::from(!work()));
            }
            id if id < 0 => Err(io::Error::last_os_error()),
            id => {
                let mut status = 0;
                while libc::waitpid(id, &raw mut status, 0) < 0 {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
                Ok(status)
            }
        }
    }
}

/// Prints the result of a job; returns whether it is a success.
fn say(answer: Result<Option<ProcessResult>, Failure>) -> bool {
    let is_right = answer.is_ok();
    let failed = |Failure { class, message, is_of_device, .. }| {
        Some(ProcessResult::Failed { class: ClassName(class), message, is_of_device })
    };
    let Some(answer) = answer.unwrap_or_else(failed) else { return is_right };
    let line = serde_json::to_string(&answer).expect("answers are plain data");
    let mut out = io::stdout().lock();
    // If the line is not read, that is reported as a failure.
    let _ = writeln!(out, "\n{line}");
    let _ = out.flush();
    is_right
}

/// Buffer in this process.
struct ProcessBuffer<'a> {
    name: &'a str,
    dtype: DType,
    memory: Fenced,
    answer: Option<ReadOnly>,
    is_output: bool,
    is_variable: bool,
}

fn call(
    job: &KernelJob,
    drivers: &mut Drivers,
    library: &Path,
    more: &[String],
) -> Result<Option<ProcessResult>, Failure> {
    let leading_ns = more.last().and_then(|text| text.parse().ok());
    let data = File::open(&job.data).map_err(unknown("its data"))?;
    let buffers = job.arguments.iter().map(|argument| buffer(argument, &data).transpose());
    let mut buffers: Vec<Option<ProcessBuffer>> = buffers
        .map(Option::transpose)
        .collect::<io::Result<_>>()
        .map_err(|error| (ErrorClass::RuntimeError, format!("allocating its buffers: {error}")))?;
    if let Some(gpu) = &job.gpu {
        let run = gpu::GpuRun { job, gpu, parameters: &gpu::parameters(more), leading_ns };
        return run.carry_out(drivers, library, buffers);
    }
    // From its initialisers on, the loaded code is the user's.
    let _ = sandbox::forbid_files();
    let _ = sandbox::forbid_calls(Strictness::Loading);
    let kernel = load(library)?;
    let _ = sandbox::forbid_calls(Strictness::Loaded);
    // A kernel gets addresses of values; the values of buffers are addresses, too.
    let pointers: Vec<*mut u8> =
        buffers.iter().map(|buffer| buffer.as_ref().map_or(std::ptr::null_mut(), |b| b.memory.pointer())).collect();
    let mut values: Vec<Vec<u8>> = job
        .arguments
        .iter()
        .map(|argument| match argument {
            ProcessArgument::Value(bytes) => bytes.clone(),
            ProcessArgument::Buffer { .. } | ProcessArgument::Shared(_) => Vec::new(),
        })
        .collect();
    let mut arguments: Vec<*mut c_void> = Vec::new();
    for (value, pointer) in values.iter_mut().zip(&pointers) {
        arguments.push(if pointer.is_null() {
            value.as_mut_ptr().cast()
        } else {
            (&raw const *pointer).cast_mut().cast()
        });
    }
    let mut run = || {
        // SAFETY: the function was generated to take the addresses of such arguments; whatever else the
        // kernel does is confined to this process, which exists for that.
        unsafe { kernel(arguments.as_mut_ptr()) };
    };
    let start = Instant::now();
    run();
    let first_ns = start.elapsed().as_nanos() as f64;
    intact(&buffers)?;
    if job.is_reference {
        return write_outputs(&buffers);
    }
    let relative_error = compare(&buffers, job.tolerance)?;
    let samples_ns = if is_hopeless(first_ns, leading_ns) {
        vec![first_ns]
    } else {
        let n_bytes = buffers.iter().flatten().map(|buffer| buffer.memory.n_bytes()).sum();
        let time = Duration::try_from_secs_f64(job.min_time_ns / 1e9).unwrap_or_default();
        sample_round(RoundLength { time, min_samples: 1 }, job.n_threads, n_bytes, run)
    };
    intact(&buffers)?;
    buffers.clear();
    Ok(Some(ProcessResult::Timed { samples_ns, relative_error }))
}

/// Writes the outputs that make up a reference.
fn write_outputs(buffers: &[Option<ProcessBuffer>]) -> Result<Option<ProcessResult>, Failure> {
    let outputs = buffers.iter().flatten().filter(|buffer| buffer.is_output);
    let bytes = outputs.flat_map(|buffer| buffer.dtype.read_held(buffer.memory.as_slice::<u8>()));
    let bytes = bytes.flat_map(f64::to_ne_bytes).collect::<Vec<u8>>();
    io::stdout().write_all(&bytes).map_err(unknown("its answer"))?;
    Ok(None)
}

/// Whether the first run shows that further runs are pointless.
fn is_hopeless(first_ns: f64, leading_ns: Option<f64>) -> bool {
    leading_ns.is_some_and(|leading| first_ns > 2.0 * HOPELESS * leading)
}

fn buffer<'a>(argument: &'a ProcessArgument, data: &File) -> io::Result<Option<ProcessBuffer<'a>>> {
    let ProcessArgument::Buffer { name, dtype, n, contents_at, answer_at, is_output, is_variable } = argument else {
        return Ok(None);
    };
    let known = DType::ALL.iter().find(|(_, known)| known == dtype);
    let dtype = known.ok_or_else(|| io::Error::other(format!("no element type {dtype}")))?.0;
    let n_bytes = n * dtype.bytes();
    let memory = match contents_at {
        Some(at) => {
            let memory = Fenced::copy(data.as_fd(), *at, n_bytes)?;
            if *is_output {
                memory.make_writable()?;
            }
            memory
        }
        // The bytes are a NaN: an element that is not written cannot pass for correct.
        None => {
            let mut memory = Fenced::new(n_bytes)?;
            memory.fill(0xFF);
            memory
        }
    };
    let answer = answer_at.map(|at| ReadOnly::new(data.as_fd(), at, n * DType::F64.bytes())).transpose()?;
    Ok(Some(ProcessBuffer { name, dtype, memory, answer, is_output: *is_output, is_variable: *is_variable }))
}

fn intact(buffers: &[Option<ProcessBuffer>]) -> Result<(), Failure> {
    match buffers.iter().flatten().find(|buffer| !buffer.memory.is_intact()) {
        Some(buffer) => {
            Err((ErrorClass::RuntimeError, format!("it wrote outside its buffers, beside {}", buffer.name)).into())
        }
        None => Ok(()),
    }
}

fn compare(buffers: &[Option<ProcessBuffer>], tolerance: f64) -> Result<f64, Failure> {
    let mut largest: f64 = 0.0;
    for buffer in buffers.iter().flatten() {
        let Some(answer) = &buffer.answer else { continue };
        let size = answer.as_slice::<f64>().iter().fold(0.0, |size: f64, x| size.max(x.abs()));
        let tolerance = match buffer.dtype.is_float() {
            true => Tolerance { abs: tolerance * size, rel: tolerance },
            false => Tolerance { abs: 0.0, rel: 0.0 },
        };
        let error = data::compare(buffer.dtype, &tolerance, &buffer.memory, answer)
            .map_err(|error| (ErrorClass::WrongAnswer, format!("{}: {error}", buffer.name)))?;
        largest = largest.max(error);
    }
    Ok(largest)
}

type CallsKernel = unsafe extern "C" fn(*mut *mut c_void);

/// Function of a shared object that calls its kernel.
fn load(library: &Path) -> Result<CallsKernel, Failure> {
    let refused = |what: &str| {
        // SAFETY: the result is a string of the loader, or null.
        let why = unsafe {
            let why = libc::dlerror();
            if why.is_null() {
                String::new()
            } else {
                CStr::from_ptr::<'_>(why as *const c_char).to_string_lossy().into_owned()
            }
        };
        Failure::from((ErrorClass::CompileErrorDevice, format!("{what}: {why}")))
    };
    let path = CString::new(library.as_os_str().as_bytes()).expect("a path has no zeros");
    let name = CString::new(ENTRY).expect("a name has no zeros");
    // SAFETY: the object's initialisers are the user's code, which this process exists to run; the function
    // is generated with this signature.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if handle.is_null() {
            return Err(refused("the shared object cannot be loaded"));
        }
        let entry = libc::dlsym(handle, name.as_ptr());
        if entry.is_null() {
            return Err(refused("the shared object has no such function"));
        }
        Ok(std::mem::transmute::<*mut c_void, CallsKernel>(entry))
    }
}
