//! Tester thread of a worker: runs kernels, compares their results with the reference, and times them.

use super::store::{Built, KernelStore};
use super::{Failure, Test, checked, compare, intact};
use crate::data::BoundArgument;
use crate::host;
use crate::interference::{Interference, Variation};
use crate::limits;
use crate::memory::{Fenced, Pages};
use crate::prepared::PreparedBuffers;
use crate::protocol::{Caches, Reply, TimingPlan, WorkerThread};
use crate::stopwatch::{self, MOST_TRIES};
use crate::timing::{self, First, KernelDemands, TimedKernel};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;
use tilewright_codegen::CompiledKernel;
use tilewright_ir::op::Workload;
use tilewright_ir::{DType, Program, Role};
use tilewright_runtime::ThreadPool;
use tilewright_search::{Conditions, ErrorClass};

pub struct CpuTester {
    untuned: Program,
    arguments: Vec<BoundArgument>,
    /// Members of a family, with their sizes, at which its kernels are verified and timed; for other
    /// workloads, only the workload itself.
    members: Vec<MemberSizes>,
    /// CPUs to pin to while timing, one per thread.
    cpus: Vec<usize>,
    /// Size in bytes of the caches that a core does not share.
    l2_bytes: u64,
    /// All threads: they run `prepare` parts, and bodies with a parallel loop.
    all: Crew,
    /// First thread alone: other threads, waiting for work, would take a part of the core from a body that
    /// has no work for them.
    first: Crew,
    variation: Variation,
    /// Kept buffers that bodies write, by index among a program's; shared by all kernels, as each run fills
    /// them anew.
    kept: Vec<Fenced>,
    /// Scratch memory of all kernels, so that its pages exist when a kernel is first timed.
    scratch: Fenced,
    /// Memory that is filled to flush the caches.
    flush: Vec<u8>,
    /// Pages of evicted prepared buffers.
    pages: Pages,
    store: Arc<KernelStore>,
}

/// Sizes of a family's member at which a kernel is run.
pub struct MemberSizes {
    /// Values of the open sizes.
    sizes: Vec<i64>,
    /// Untuned program, with arguments of these sizes.
    program: Program,
}

impl MemberSizes {
    /// Representative members of a workload.
    pub fn all(workload: &Workload) -> Vec<MemberSizes> {
        let member = |sizes: Vec<i64>| {
            let program = workload.at(&sizes).expect("invariant: anchors are sizes").program();
            MemberSizes { sizes, program }
        };
        workload.anchors().into_iter().map(member).collect()
    }
}

/// Threads, and an interference meter of their cores.
struct Crew {
    pool: ThreadPool,
    pace: Interference,
}

impl Crew {
    fn new(n_threads: usize, cpus: &[usize]) -> std::io::Result<Crew> {
        let mut pool = ThreadPool::new(n_threads, cpus)
            .map_err(|e| std::io::Error::other(format!("no {n_threads} threads: {e}{}", limits::advice(&e))))?;
        let pace = Interference::new(&mut pool);
        Ok(Crew { pool, pace })
    }

    fn pace(&mut self) -> f64 {
        self.pace.now(&mut self.pool)
    }
}

impl BoundArgument {
    fn pointer(&self) -> *mut u8 {
        match self {
            BoundArgument::Input(buffer) | BoundArgument::Output { buffer, .. } => buffer.pointer(),
        }
    }

    /// Address of the contents, and their size in bytes.
    fn contents(&self) -> (*mut u8, u64) {
        match self {
            BoundArgument::Input(buffer) | BoundArgument::Output { buffer, .. } => (buffer.pointer(), buffer.n_bytes()),
        }
    }

    /// Completes an output that a run has made only in part, using the reference, if nothing was written
    /// outside the part. `whole` and `part` are its shapes.
    fn complete(&mut self, dtype: DType, whole: &[i64], part: &[i64]) -> Result<(), &'static str> {
        let BoundArgument::Output { buffer, reference } = self else { return Ok(()) };
        let (Some((row, outer)), true) = (whole.split_last(), whole != part) else { return Ok(()) };
        let (bytes, reference) = (buffer.bytes_mut(), reference.as_slice::<f64>());
        let n_bytes = dtype.bytes() as usize;
        for at in 0..outer.iter().product::<i64>() {
            let mut rest = at;
            let is_inside = outer.iter().zip(part).rev().all(|(whole, part)| {
                let subscript = rest % whole;
                rest /= whole;
                subscript < *part
            });
            let first = if is_inside { part[outer.len()] } else { 0 };
            let [start, end] = [at * row + first, (at + 1) * row].map(|element| element as usize);
            let beyond = &mut bytes[start * n_bytes..end * n_bytes];
            if beyond.iter().any(|byte| *byte != 0xFF) {
                return Err("it wrote beyond the size of the run");
            }
            dtype.write(&reference[start..end], beyond);
        }
        Ok(())
    }

    fn output(&self) -> Option<&Fenced> {
        match self {
            BoundArgument::Input(_) => None,
            BoundArgument::Output { buffer, .. } => Some(buffer),
        }
    }
}

/// Run whose result was correct.
struct CheckedRun {
    ns: f64,
    /// Slowdown of the cores relative to their undisturbed speed.
    pace: f64,
    /// Whether it did not lose its core meanwhile.
    is_whole: bool,
    relative_error: f64,
}

/// Addresses of the buffers of a run.
struct Pointers {
    arguments: Vec<*mut u8>,
    kept: Vec<*mut u8>,
}

impl CpuTester {
    /// Makes a tester that times a workload on these CPUs, at all its representative members, with these
    /// arguments.
    ///
    /// # Errors
    /// If memory is insufficient.
    pub fn new(
        workload: &Workload,
        arguments: Vec<BoundArgument>,
        n_threads: usize,
        cpus: Vec<usize>,
        l2_bytes: u64,
        store: Arc<KernelStore>,
    ) -> std::io::Result<CpuTester> {
        let (all, first) = (Crew::new(n_threads, &cpus)?, Crew::new(1, &cpus)?);
        Ok(CpuTester {
            untuned: workload.program(),
            arguments,
            members: MemberSizes::all(workload),
            cpus,
            l2_bytes,
            all,
            first,
            variation: Variation::default(),
            kept: Vec::new(),
            scratch: Fenced::new(0)?,
            flush: Vec::new(),
            pages: Pages::default(),
            store,
        })
    }

    /// Whether a kernel of [`PROBE`](super::builder::PROBE) works.
    ///
    /// # Errors
    /// If there is not enough memory for its buffer.
    pub fn runs(&mut self, probe: &CompiledKernel) -> std::io::Result<bool> {
        let mut out = Fenced::new(64)?;
        out.fill(0xFF);
        // SAFETY: the buffer has the size and more than the alignment of the kernel's only argument; the
        // kernel has no kept buffers.
        unsafe { probe.run(&[out.pointer()], &[], self.scratch.pointer(), &self.all.pool.runtime()) };
        Ok(out.is_intact() && out.as_slice::<f32>().iter().all(|&x| x == 1.0))
    }

    /// Finds or makes the buffers of a kernel, and runs its `prepare` part if its kept buffers are not
    /// filled. With `wipe`, values left by other kernels are erased.
    fn prepare(&mut self, built: &Built, wipe: bool) -> Result<Pointers, Failure> {
        self.scratch.resize(built.kernel.scratch_bytes(self.all.pool.n_threads())).map_err(no_memory)?;
        if let (None, Some(recipe)) = (built.prepared.get(), &built.recipe) {
            let mut cache = self.store.prepared();
            if let Some(prepared) = cache.get(recipe) {
                // Another kernel has made it since this one was built.
                let _ = built.prepared.set(prepared);
            } else {
                let filled = built.kept.iter().zip(built.kernel.kept_bytes()).filter(|(name, _)| recipe.fills(name));
                let forgotten = cache.forget_for(filled.map(|(_, bytes)| bytes).sum());
                forgotten.into_iter().for_each(|buffer| self.pages.add(buffer));
            }
        }
        let arguments: Vec<*mut u8> = self.arguments.iter().map(BoundArgument::pointer).collect();
        let mut kept = Vec::new();
        let mut fresh = HashMap::new();
        for (at, (name, &bytes)) in built.kept.iter().zip(built.kernel.kept_bytes()).enumerate() {
            if self.kept.len() == at {
                self.kept.push(Fenced::new(0).map_err(no_memory)?);
            }
            kept.push(match (built.prepared.get(), &built.recipe) {
                (Some(prepared), Some(recipe)) if recipe.fills(name) => prepared.pointer(name),
                (None, Some(recipe)) if recipe.fills(name) => {
                    let mut buffer = self.pages.buffer(bytes).map_err(no_memory)?;
                    // As for outputs: elements that are not written must not pass for zeros.
                    buffer.fill(0xFF);
                    let pointer = buffer.pointer();
                    fresh.insert(name.clone(), buffer);
                    pointer
                }
                _ => {
                    self.kept[at].resize(bytes).map_err(no_memory)?;
                    if wipe {
                        self.kept[at].fill(0xFF);
                    }
                    self.kept[at].pointer()
                }
            });
        }
        if built.prepared.get().is_none() && !kept.is_empty() {
            // SAFETY: the arguments are the workload's, which the builder has compared with the program's;
            // kept and scratch buffers have the sizes that the kernel declares; all are page-aligned.
            unsafe { built.kernel.prepare(&arguments, &kept, self.scratch.pointer(), &self.all.pool.runtime()) };
            if let Some(recipe) = &built.recipe {
                intact(fresh.values().chain(&self.kept).chain([&self.scratch]))?;
                let prepared = Arc::new(PreparedBuffers::new(fresh).map_err(no_memory)?);
                self.store.prepared().insert(recipe.clone(), Arc::clone(&prepared));
                let _ = built.prepared.set(prepared);
            }
        }
        Ok(Pointers { arguments, kept })
    }

    /// Verifies a kernel as specified by [`Test::check`], on the current CPU.
    fn check_here(&mut self, id: u64, plan: Option<&TimingPlan>) -> Result<Reply, Failure> {
        let start = Instant::now();
        let built = self.store.kernels.get(id)?;
        if plan.is_none() {
            // Nor may values left by other kernels pass for its own. A search skips this: it takes as long as
            // a run of a small kernel, and leading candidates are verified again.
            self.scratch.resize(built.kernel.scratch_bytes(self.all.pool.n_threads())).map_err(no_memory)?;
            self.scratch.fill(0xFF);
        }
        let pointers = self.prepare(&built, true)?;
        // Prepared buffers serve other candidates too: their time says nothing about this one.
        super::tell(WorkerThread::Test, &Reply::Prepared { id })?;
        let start_of_run = Instant::now();
        let (mut relative_error, mut log_ns, mut pace, mut is_whole) = (0.0, 0.0, 0.0, true);
        for at in 0..self.members.len() {
            let run = self.check_at(at, &built, &pointers)?;
            relative_error = f64::max(relative_error, run.relative_error);
            (log_ns, pace, is_whole) = (log_ns + run.ns.ln(), pace + run.pace, is_whole && run.is_whole);
        }
        let n = self.members.len() as f64;
        let took = start_of_run.elapsed();
        // If it lost its core, something else ran.
        let checked_ns = if is_whole { took.as_nanos() as f64 } else { f64::INFINITY };
        let first = First { ns: (log_ns / n).exp(), pace: pace / n, checked_ns };
        // A kernel is verified only once, and the result stays valid.
        let _ = built.first.set(first);
        let is_enough = |plan: &TimingPlan| {
            first.is_alone(plan) || timing::at_first(plan, &self.variation, first, self.size(&built)).is_some()
        };
        let to_time = plan.filter(|plan| is_enough(plan));
        checked(id, start, took, relative_error, to_time, |plan| self.run_here(id, plan))
    }

    /// Runs a kernel at the sizes of a member and compares its result.
    fn check_at(&mut self, member: usize, built: &Built, pointers: &Pointers) -> Result<CheckedRun, Failure> {
        // All ones are a NaN: an element that is not written cannot pass for correct.
        for argument in &mut self.arguments {
            if let BoundArgument::Output { buffer, .. } = argument {
                buffer.fill(0xFF);
            }
        }
        let MemberSizes { sizes, program } = &self.members[member];
        let scratch = self.scratch.pointer();
        let n_threads = self.all.pool.n_threads();
        let crew = if built.is_parallel { &mut self.all } else { &mut self.first };
        let pace_before = crew.pace();
        // SAFETY: as in `prepare`.
        let (ns, is_whole) = unsafe {
            TimedCall { kernel: &built.kernel, sizes, pointers, scratch }.time(&mut crew.pool, n_threads, 1, 1)
        };
        let pace = (pace_before + crew.pace()) / 2.0;
        let runtime = self.all.pool.runtime();
        // SAFETY: as above, and the body has run.
        unsafe { built.kernel.finish(&pointers.arguments, &pointers.kept, scratch, &runtime) };
        intact(self.arguments.iter().filter_map(BoundArgument::output).chain(&self.kept).chain([&self.scratch]))?;
        let shapes = self.untuned.arguments().zip(program.arguments());
        for (argument, ((_, whole), (_, part))) in self.arguments.iter_mut().zip(shapes) {
            let wrong = |why: &str| (ErrorClass::WrongAnswer, format!("{}, of {sizes:?}: {why}", whole.name));
            argument.complete(whole.dtype, &whole.shape, &part.shape).map_err(wrong)?;
        }
        let relative_error = compare(&self.untuned, &built.tolerance, &self.arguments)?;
        Ok(CheckedRun { ns, pace, is_whole, relative_error })
    }

    fn size(&self, built: &Built) -> KernelDemands {
        let n_threads = self.all.pool.n_threads();
        KernelDemands { n_threads, n_bytes: built.n_bytes + built.kernel.scratch_bytes(n_threads) }
    }

    /// Memory that must not be in the caches at the start of a run, with its size in bytes.
    fn touched(&self, built: &Built, pointers: &Pointers, caches: Caches) -> Vec<(*const u8, u64)> {
        let is_cold = caches == Caches::Cold;
        let is_prepared = |name: &str| built.recipe.as_ref().is_some_and(|recipe| recipe.fills(name));
        let buffers = self.untuned.arguments().map(|(_, buffer)| buffer.role == Role::ConstInput);
        let arguments = self.arguments.iter().zip(buffers);
        let arguments = arguments.filter(|(_, is_constant)| is_cold || *is_constant);
        let kept = pointers.kept.iter().zip(&built.kept).zip(built.kernel.kept_bytes());
        let kept = kept.filter(|((_, name), _)| is_cold || is_prepared(name));
        let scratch = (self.scratch.pointer(), built.kernel.scratch_bytes(self.all.pool.n_threads()));
        let all = arguments.map(|(argument, _)| argument.contents());
        let all = all.chain(kept.map(|((pointer, _), n_bytes)| (*pointer, *n_bytes)));
        let all = all.chain(Some(scratch).filter(|_| is_cold));
        all.filter(|_| caches != Caches::Warm).map(|(pointer, n_bytes)| (pointer.cast_const(), n_bytes)).collect()
    }

    /// Times a kernel as [`Test::run`] does, in this process.
    fn run_here(&mut self, id: u64, plan: &TimingPlan) -> Result<Reply, Failure> {
        let start = Instant::now();
        let built = self.store.kernels.get(id)?;
        let pointers = self.prepare(&built, false)?;
        let is_cold = plan.caches == Caches::Cold;
        if is_cold && self.flush.is_empty() {
            self.flush = vec![1; 2 * self.l2_bytes as usize * self.all.pool.n_threads()];
        }
        let first = *built.first.get().ok_or((ErrorClass::Unknown, format!("kernel {id} was never checked")))?;
        let size = self.size(&built);
        let scratch = self.scratch.pointer();
        let touched = self.touched(&built, &pointers, plan.caches);
        let crew = RefCell::new(if built.is_parallel { &mut self.all } else { &mut self.first });
        let caches = timing::emptied(plan.caches, touched.iter().map(|(_, n_bytes)| n_bytes).sum());
        let plan = &TimingPlan { caches, ..*plan };
        // A second run would not be cold.
        let most_tries = if caches == Caches::Warm { MOST_TRIES } else { 1 };
        let mut flush = || {
            let start = Instant::now();
            if is_cold {
                fill_caches(&mut self.flush, &mut crew.borrow_mut().pool);
            }
            touched.iter().for_each(|&(pointer, n_bytes)| evict(pointer, n_bytes));
            start.elapsed().as_nanos() as f64
        };
        // Flushed caches slow down the following measurement of the pace.
        let looks = plan.at_best_pace && !is_cold;
        let mut pace = || if looks { crew.borrow_mut().pace() } else { 1.0 };
        let mut sample = |plan: &TimingPlan, first: First, MemberSizes { sizes, .. }: &MemberSizes| {
            let call = TimedCall { kernel: &built.kernel, sizes, pointers: &pointers, scratch };
            let mut run = |n_runs: u32| {
                let pool = &mut crew.borrow_mut().pool;
                // SAFETY: as in `prepare`.
                unsafe { call.time(pool, size.n_threads, n_runs, most_tries) }.0
            };
            let subject = TimedKernel { run: &mut run, size, flush: &mut flush, pace: &mut pace };
            timing::sample(plan, &mut self.variation, first, subject)
        };
        let samples = match &self.members[..] {
            [only] => sample(plan, first, only),
            members => match timing::at_first(plan, &Variation::default(), first, size) {
                Some(hopeless) => hopeless,
                None => timing::of_all(plan, members.len(), |plan, at| sample(plan, First::UNKNOWN, &members[at])),
            },
        };
        Ok(Reply::Timed {
            id,
            samples_ns: samples.ns,
            stopped_early: samples.stopped_early,
            seconds: start.elapsed().as_secs_f64(),
            conditions: Conditions::default(),
        })
    }
}

impl Test for CpuTester {
    fn check(&mut self, id: u64, plan: Option<&TimingPlan>) -> Result<Reply, Failure> {
        // Kernels are timed while nothing else of ours runs.
        let is_alone = plan.is_some_and(|plan| plan.alone_ns > 0.0);
        let timed = self.cpus.first().copied().filter(|_| is_alone);
        host::pinned(timed, || self.check_here(id, plan))
    }

    fn run(&mut self, id: u64, plan: &TimingPlan) -> Result<Reply, Failure> {
        host::pinned(self.cpus.first().copied(), || self.run_here(id, plan))
    }
}

/// Flushes memory from all caches, of this core and of others. The cost depends on the memory that a kernel
/// accesses: going through as much memory as a server's last-level cache holds would take a tenth of a
/// second.
fn evict(pointer: *const u8, n_bytes: u64) {
    const LINE: usize = 64;
    for at in (0..n_bytes as usize).step_by(LINE) {
        // SAFETY: the line is in readable memory, and is not changed.
        unsafe { evict_line(pointer.add(at)) };
    }
    wait_for_evictions();
}

#[cfg(target_arch = "x86_64")]
unsafe fn evict_line(at: *const u8) {
    // SAFETY: promised by the caller; every CPU of this architecture has the instruction.
    unsafe { std::arch::x86_64::_mm_clflush(at) };
}

#[cfg(target_arch = "x86_64")]
fn wait_for_evictions() {
    // SAFETY: every CPU of this architecture has the instruction, which accesses no memory.
    unsafe { std::arch::x86_64::_mm_mfence() };
}

#[cfg(target_arch = "aarch64")]
unsafe fn evict_line(at: *const u8) {
    // SAFETY: promised by the caller; Linux permits the instruction in user mode.
    unsafe { std::arch::asm!("dc civac, {}", in(reg) at, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
fn wait_for_evictions() {
    // SAFETY: the instruction accesses no memory.
    unsafe { std::arch::asm!("dsb sy", options(nostack, preserves_flags)) };
}

/// Fills the private caches of each core, on every thread, with data that no kernel needs; code and address
/// translations are evicted as well. Each thread goes through its own part of a buffer that is large enough.
fn fill_caches(buffer: &mut [u8], pool: &mut ThreadPool) {
    unsafe extern "C" fn touch(parts: *mut c_void, part: i64, _thread: i64) {
        // SAFETY: the parts below, each of which belongs to one iteration.
        let part = unsafe { &mut *parts.cast::<&mut [u8]>().add(part as usize) };
        part.iter_mut().step_by(64).for_each(|line| *line = line.wrapping_add(1));
    }
    let bytes_each = buffer.len().div_ceil(pool.n_threads()).max(1);
    let mut parts: Vec<&mut [u8]> = buffer.chunks_mut(bytes_each).collect();
    // SAFETY: iterations access disjoint memory.
    unsafe { pool.run(touch, parts.as_mut_ptr().cast(), parts.len() as i64) };
    std::hint::black_box(&parts);
}

fn no_memory(error: std::io::Error) -> Failure {
    let message = format!("allocating its buffers: {error}");
    Failure { class: ErrorClass::RuntimeError, message, lacks_memory: true, is_of_device: false }
}

/// Kernel at values of its open sizes, with the memory that it uses.
struct TimedCall<'a> {
    kernel: &'a CompiledKernel,
    sizes: &'a [i64],
    pointers: &'a Pointers,
    scratch: *mut u8,
}

impl TimedCall<'_> {
    /// Nanoseconds of `n_runs` runs in a row, by the clock for `n_threads` threads, as returned by
    /// [`stopwatch::time`].
    ///
    /// # Safety
    /// As for [`CompiledKernel::run`].
    unsafe fn time(&self, pool: &mut ThreadPool, n_threads: usize, n_runs: u32, most_tries: u32) -> (f64, bool) {
        let runtime = pool.runtime();
        let Pointers { arguments, kept } = self.pointers;
        stopwatch::time(n_threads, most_tries, || {
            for _ in 0..n_runs {
                // SAFETY: promised by the caller.
                unsafe { self.kernel.run_at(self.sizes, arguments, kept, self.scratch, &runtime) };
            }
        })
    }
}
