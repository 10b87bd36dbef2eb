//! Worker process, which builds and runs candidates in two threads, each serving one request at a time.
//!
//! Candidates run only in this process: a crash ends it and nothing else, and the tuner kills it when it does
//! not reply in time.

mod builder;
mod gpu;
mod runner;
mod store;
mod tester;

use crate::data::{self, BoundArgument};
use crate::failure::Failure;
use crate::limits;
use crate::memory::Fenced;
use crate::objects::Objects;
use crate::prepared::PreparedCache;
use crate::protocol::{ClassName, Reply, TimingPlan, WorkerAssignment, WorkerRequest, WorkerThread};
use crate::sandbox::{self, Strictness};
use builder::CpuBuilder;
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use store::KernelStore;
use tester::CpuTester;
use tilewright_ir::op::Workload;
use tilewright_ir::reference::Tolerance;
use tilewright_ir::target::{Arch, GpuApi};
use tilewright_ir::{Program, Target};
use tilewright_search::ErrorClass;

/// Maximum bytes of unused prepared buffers that are kept. More would raise the hit rate, but fresh memory is
/// expensive on virtual machines: 2.3 ms per megabyte, compared with 0.5 ms for packing one.
const MOST_PREPARED_BYTES: u64 = 64 << 20;

/// Stack size of the tester thread: that of a main thread.
const STACK_BYTES: usize = 8 << 20;

impl Failure {
    fn reply(self, id: u64, start: Instant) -> Reply {
        let Failure { class, message, lacks_memory, is_of_device } = self;
        if is_of_device {
            return Reply::DeviceLost { reason: message };
        }
        Reply::Failed { id, class: ClassName(class), message, lacks_memory, seconds: start.elapsed().as_secs_f64() }
    }
}

/// Builder of kernels, for a kind of device.
trait Build {
    /// Serves a request; returns the last reply, if any.
    fn answer(&mut self, request: WorkerRequest) -> Option<Reply>;
}

/// Tester of kernels, on a kind of device.
trait Test {
    /// Runs a kernel for the first time and compares its result with the reference; also times it, if the
    /// first run suffices for that or timing is to follow at once.
    fn check(&mut self, id: u64, plan: Option<&TimingPlan>) -> Result<Reply, Failure>;

    /// Times a kernel that has been verified.
    fn run(&mut self, id: u64, plan: &TimingPlan) -> Result<Reply, Failure>;

    /// Serves a request; returns the last reply.
    fn answer(&mut self, request: WorkerRequest) -> Reply {
        let start = Instant::now();
        let (id, result) = match request {
            WorkerRequest::Check { id, plan } => (id, self.check(id, plan.as_ref())),
            WorkerRequest::Run { id, plan } => (id, self.run(id, &plan)),
            WorkerRequest::Build { .. } | WorkerRequest::Drop { .. } => unreachable!("another thread builds"),
        };
        result.unwrap_or_else(|failure| failure.reply(id, start))
    }
}

/// The two threads of a worker.
type WorkerThreads = (Box<dyn Build>, Box<dyn Test + Send>);

/// Serves requests from standard input until it ends. The calling thread, which must be the main one, is the
/// builder.
///
/// # Errors
/// If the assignment or a request cannot be understood, or a stream fails: the worker cannot be used then.
pub fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let (mut builder, mut tester) = match assigned(std::io::stdin().lines().next()) {
        Ok(threads) => threads,
        Err(e) => return not_ready(e),
    };
    say_who_crashes();
    let (to_build, builds) = channel();
    let (to_test, tests) = channel();
    let test = move || {
        let _ends = EndsWithThis;
        for request in tests {
            if reply(WorkerThread::Test, &tester.answer(request)).is_err() {
                return;
            }
        }
    };
    let read = move || -> std::io::Result<()> {
        for line in std::io::stdin().lines() {
            let request: WorkerRequest = serde_json::from_str(&line?)?;
            let to = if request.lane() == WorkerThread::Build { &to_build } else { &to_test };
            if to.send(request).is_err() {
                break;
            }
        }
        Ok(())
    };
    let testing = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(test);
    let reader = match testing.and_then(|_| std::thread::Builder::new().spawn(read)) {
        Ok(reader) => reader,
        Err(e) => return not_ready(format!("no thread: {e}{}", limits::advice(&e)).into()),
    };
    reply(WorkerThread::Build, &Reply::Ready)?;
    for request in builds {
        if let Some(answer) = builder.answer(request) {
            reply(WorkerThread::Build, &answer)?;
        }
    }
    reader.join().map_err(|_| "the thread that reads requests panicked")??;
    Ok(())
}

/// Tells the tuner that this worker cannot be used, and why.
fn not_ready(why: Box<dyn std::error::Error>) -> Result<(), Box<dyn std::error::Error>> {
    reply(WorkerThread::Build, &Reply::NotReady { reason: why.to_string() })?;
    Err(why)
}

/// Guard that ends the process if the thread that holds it panics.
struct EndsWithThis;

impl Drop for EndsWithThis {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::exit(101);
        }
    }
}

/// Last reply of a builder that crashes.
const CRASHED: &[u8] = b"[\"Build\",\"Crashed\"]\n";

/// Installs handlers by which a crashing builder tells the tuner that the crash is its own, and not the
/// tested kernel's.
fn say_who_crashes() {
    extern "C" fn on_crash(signal: libc::c_int) {
        // SAFETY: these calls are async-signal-safe. The signal, raised anew, ends the process when the
        // handler returns.
        unsafe {
            if libc::syscall(libc::SYS_gettid) == i64::from(libc::getpid()) {
                libc::write(libc::STDOUT_FILENO, CRASHED.as_ptr().cast(), CRASHED.len());
            }
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
    }
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGABRT] {
        // SAFETY: the handler only makes async-signal-safe calls, on the alternate stack of each thread.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_crash as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_ONSTACK;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

fn reply(lane: WorkerThread, reply: &Reply) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(&(lane, reply))?;
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&line)?;
    out.flush()
}

/// Sends the tuner a reply that is not the last one to its request.
fn tell(lane: WorkerThread, early: &Reply) -> Result<(), Failure> {
    Ok(reply(lane, early).map_err(|e| (ErrorClass::Unknown, format!("telling the tuner: {e}")))?)
}

fn assigned(line: Option<std::io::Result<String>>) -> Result<WorkerThreads, Box<dyn std::error::Error>> {
    let assignment: WorkerAssignment = serde_json::from_str(&line.ok_or("no assignment")??)?;
    let workload = Workload::parse(&assignment.workload)?;
    let untuned = workload.program();
    let target: Target = assignment.target.parse()?;
    // SAFETY: the descriptor was opened by the tuner for this process, which keeps it open until it ends.
    let file = unsafe { BorrowedFd::borrow_raw(assignment.data_fd) };
    let arguments = BoundArgument::all(&untuned, file, &assignment.data_offsets)?;
    offer_to_be_killed();
    if let Some(runner) = assignment.runner.clone() {
        return runner::threads(assignment, runner, workload, untuned, target, arguments);
    }
    match target.arch {
        Arch::X86_64 | Arch::Aarch64 => on_cpu(assignment, workload, target, arguments),
        Arch::Gpu(GpuApi::OpenCl) => gpu::on_opencl(&assignment, workload, untuned, target, arguments),
        Arch::Gpu(GpuApi::Cuda) => gpu::on_cuda(workload, untuned, target, arguments),
        Arch::Gpu(GpuApi::AmdGpu) => Err(format!("nothing runs kernels for {}", target.name()).into()),
    }
}

fn on_cpu(
    assignment: WorkerAssignment,
    workload: Workload,
    target: Target,
    arguments: Vec<BoundArgument>,
) -> Result<WorkerThreads, Box<dyn std::error::Error>> {
    // If the system does not support it, a candidate is confined only by limits and by its process. This
    // comes before other threads are started, because it would not apply to them.
    let _ = sandbox::forbid_files();
    // SAFETY: as in `assigned`.
    let objects = unsafe { BorrowedFd::borrow_raw(assignment.objects_fd) }.try_clone_to_owned()?.into();
    let store = Arc::new(KernelStore::new(PreparedCache::new((assignment.memory_bytes / 4).min(MOST_PREPARED_BYTES))));
    let (n_threads, cpus, l2_bytes) = (assignment.n_threads, assignment.cpus, target.l2_bytes);
    let mut tester = CpuTester::new(&workload, arguments, n_threads, cpus, l2_bytes, Arc::clone(&store))?;
    let mut builder = CpuBuilder::new(workload, target, Objects::new(objects), store);
    limit_memory(assignment.memory_bytes);
    // Anything that this machine forbids must show here, once, and not in every candidate.
    if !tester.runs(&builder.probe()?)? {
        return Err("a kernel that fills a buffer does not fill it: this CPU cannot be relied on".into());
    }
    let _ = sandbox::forbid_calls(Strictness::Own);
    Ok((Box::new(builder), Box::new(tester)))
}

/// Replies that a kernel is correct, with the seconds of its run and the comparison; and with its times, if
/// it is to be timed at once.
fn checked(
    id: u64,
    start: Instant,
    took: Duration,
    relative_error: f64,
    to_time: Option<&TimingPlan>,
    time: impl FnOnce(&TimingPlan) -> Result<Reply, Failure>,
) -> Result<Reply, Failure> {
    let (seconds, run_seconds) = (start.elapsed().as_secs_f64(), took.as_secs_f64());
    let checked = Reply::Checked { id, seconds, run_seconds, relative_error, is_timed: to_time.is_some() };
    match to_time {
        Some(plan) => {
            tell(WorkerThread::Test, &checked)?;
            time(plan)
        }
        None => Ok(checked),
    }
}

/// Compares every output with its reference; returns the largest relative error of an output as a whole.
fn compare(untuned: &Program, tolerance: &Tolerance, arguments: &[BoundArgument]) -> Result<f64, Failure> {
    let mut largest: f64 = 0.0;
    for ((_, buffer), argument) in untuned.arguments().zip(arguments) {
        let BoundArgument::Output { buffer: output, reference } = argument else { continue };
        let error = data::compare(buffer.dtype, tolerance, output, reference)
            .map_err(|e| (ErrorClass::WrongAnswer, format!("{}: {e}", buffer.name)))?;
        largest = largest.max(error);
    }
    Ok(largest)
}

/// Checks that nothing was written around buffers; restores their canaries.
fn intact<'a>(buffers: impl Iterator<Item = &'a Fenced>) -> Result<(), Failure> {
    let broken: Vec<&Fenced> = buffers.filter(|f| !f.is_intact()).collect();
    broken.iter().for_each(|f| f.set_canaries());
    match broken.as_slice() {
        [] => Ok(()),
        _ => Err((ErrorClass::RuntimeError, "it wrote outside its buffers".to_owned()).into()),
    }
}

/// Limits the address space to its current size plus this many bytes, unless a lower limit is set already.
fn limit_memory(more_bytes: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is plain data. If the limit cannot be set, the worker runs without one.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_cur.min(limits::address_space_bytes().saturating_add(more_bytes));
            libc::setrlimit(libc::RLIMIT_AS, &raw const limit);
        }
    }
}

/// Makes the system kill this process rather than the tuner when it runs out of memory.
fn offer_to_be_killed() {
    // If that is refused, the system chooses by itself.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_crash_says_is_understood() {
        let line = std::str::from_utf8(CRASHED).unwrap();
        assert!(matches!(serde_json::from_str(line).unwrap(), (WorkerThread::Build, Reply::Crashed)));
    }
}
