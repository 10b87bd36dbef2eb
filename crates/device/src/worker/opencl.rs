//! The threads of a worker whose kernels run on an OpenCL device. They share a context: what is on the device
//! stays there from kernel to kernel, and the driver's compiler works while a kernel runs.

use super::builder::{answer, scheduled};
use super::store::Kernels;
use super::{Failure, Thread, Threads, checked, compare, limit_memory, tell};
use crate::data::Argument;
use crate::opencl::{self, Code, Context, Launch, Memory, OpenClDevice, OpenClError};
use crate::pace::Variation;
use crate::protocol::{Assignment, Caches, Lane, Plan, Reply, Request, Source};
use crate::timing::{self, First, Size, Subject};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tilewright_codegen::opencl_c;
use tilewright_ir::gpu::{GpuProgram, Kernel, lower_gpu};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::Tolerance;
use tilewright_ir::target::Gpu;
use tilewright_ir::{BufferId, Program, Role, Target};
use tilewright_tune::ErrorClass;

/// As a number it is none: an element that is not written cannot pass for right.
const POISON: u8 = 0xFF;

/// The exit code of a worker whose device may no longer be relied on.
const DEVICE_LOST: i32 = 70;

/// The threads for an assignment.
///
/// # Errors
/// Where there is no such device, or it has not the memory.
pub fn threads(
    assignment: &Assignment,
    workload: Workload,
    untuned: Program,
    target: Target,
    arguments: Vec<Argument>,
) -> Result<Threads, Box<dyn std::error::Error>> {
    if let Some(folder) = &assignment.drivers_folder {
        // SAFETY: this process has no other thread yet. PoCL keeps there what it has compiled; no driver is
        // to find what it has compiled for others.
        unsafe {
            std::env::set_var("POCL_CACHE_DIR", folder);
            std::env::set_var("CUDA_CACHE_DISABLE", "1");
        }
    }
    let device = opencl::device_of(&target)?;
    let context = Context::new(&device)?;
    let on_device = |argument: &Argument| {
        let (Argument::Input(buffer) | Argument::Output { buffer, .. }) = argument;
        let memory = Memory::new(&context, buffer.n_bytes())?;
        if let Argument::Input(buffer) = argument {
            memory.write(buffer.as_slice())?;
        }
        Ok(Arc::new(memory))
    };
    let memories = arguments.iter().map(on_device).collect::<Result<Vec<_>, OpenClError>>()?;
    if device.is_cpu {
        // Drivers of GPUs reserve more addresses than any limit.
        limit_memory(assignment.memory_bytes);
    }
    let kernels = Arc::new(Kernels::default());
    let builder = Builder {
        workload,
        untuned: untuned.clone(),
        target,
        context: context.clone(),
        memories: memories.clone(),
        kernels: kernels.clone(),
    };
    let variation = Variation::default();
    let tester = Tester { untuned, device, context, arguments, memories, kernels, variation, flush: None };
    Ok((Box::new(builder), Box::new(tester)))
}

/// The kernels of a program, on the memory that they run on.
struct Built {
    prepare: Vec<Launch>,
    body: Vec<Launch>,
    finish: Vec<Launch>,
    /// What is no argument: kept buffers, and what one kernel hands to another.
    own: Vec<Arc<Memory>>,
    tolerance: Tolerance,
    /// Bytes of what the body touches, but for temporaries.
    n_bytes: u64,
    /// The run in which it was checked.
    first: OnceLock<First>,
}

struct Builder {
    workload: Workload,
    untuned: Program,
    target: Target,
    context: Context,
    memories: Vec<Arc<Memory>>,
    kernels: Arc<Kernels<Built>>,
}

impl Thread for Builder {
    fn answer(&mut self, request: Request) -> Option<Reply> {
        answer(request, &self.kernels, |source, _| self.build(source))
    }
}

impl Builder {
    fn build(&self, source: &Source) -> Result<Built, Failure> {
        let instantiation = |why: String| Failure::from((ErrorClass::InstantiationError, why));
        let (program, steps) = scheduled(&self.workload, &self.untuned, source)?;
        let program = lower_gpu(&program).map_err(|why| instantiation(why.to_string()))?;
        let gpu = self.target.gpu.as_ref().expect("invariant: an OpenCL target has what a GPU has");
        program.kernels().try_for_each(|kernel| fits(kernel, &program, gpu)).map_err(instantiation)?;
        let code = Arc::new(Code::build(&self.context, &opencl_c(&program, &self.target)).map_err(of_compiler)?);
        let (mut memories, mut own) = (HashMap::new(), Vec::new());
        let mut arguments = self.memories.iter();
        for id in program.device_buffers() {
            let buffer = program.program.buffer(id);
            let memory = match buffer.role {
                Role::Input | Role::ConstInput | Role::Output => {
                    arguments.next().expect("invariant: its arguments are the workload's").clone()
                }
                Role::Kept | Role::Temporary => {
                    let too_large = || instantiation(format!("buffer `{}` is too large", buffer.name));
                    let memory = Memory::new(&self.context, buffer.size_bytes().ok_or_else(too_large)?);
                    own.push(Arc::new(memory.map_err(of_device)?));
                    own[own.len() - 1].clone()
                }
            };
            memories.insert(id, memory);
        }
        let launches = |kernels: &[Kernel]| -> Result<Vec<Launch>, Failure> {
            kernels.iter().map(|kernel| self.launch(&code, kernel, &program, &memories)).collect()
        };
        let body_uses = program.body.iter().flat_map(|kernel| kernel.arguments(&program));
        let body_uses: std::collections::BTreeSet<BufferId> = body_uses.map(|(id, _)| id).collect();
        let touched = body_uses.into_iter().map(|id| program.program.buffer(id));
        Ok(Built {
            prepare: launches(&program.prepare)?,
            body: launches(&program.body)?,
            finish: launches(&program.finish)?,
            own,
            tolerance: Tolerance::for_schedule(&self.untuned, &steps),
            n_bytes: touched.filter(|b| b.role != Role::Temporary).filter_map(|b| b.size_bytes()).sum(),
            first: OnceLock::new(),
        })
    }

    fn launch(
        &self,
        code: &Arc<Code>,
        kernel: &Kernel,
        program: &GpuProgram,
        memories: &HashMap<BufferId, Arc<Memory>>,
    ) -> Result<Launch, Failure> {
        let sizes = |axes: [i64; 3]| axes.map(|n| usize::try_from(n).unwrap_or(0));
        let arguments = kernel.arguments(program).into_iter().map(|(id, _)| memories[&id].clone()).collect();
        let launch = Launch::new(code, &kernel.name, sizes(kernel.grid()), sizes(kernel.block()), arguments);
        let launch = launch.map_err(of_compiler)?;
        let (most_threads, local_bytes) = launch.limits().map_err(of_compiler)?;
        let gpu = self.target.gpu.as_ref().expect("invariant: an OpenCL target has what a GPU has");
        let refused = |why: String| Err((ErrorClass::CompileErrorDevice, why).into());
        if kernel.n_threads() as u64 > most_threads {
            let n = kernel.n_threads();
            return refused(format!(
                "kernel {} has blocks of {n} threads, its code at most {most_threads}",
                kernel.name
            ));
        }
        if local_bytes > gpu.most_shared_bytes {
            let most = gpu.most_shared_bytes;
            return refused(format!("kernel {} takes {local_bytes} bytes of local memory of {most}", kernel.name));
        }
        Ok(launch)
    }
}

/// Whether a device can run a kernel, as far as its sizes say.
fn fits(kernel: &Kernel, program: &GpuProgram, gpu: &Gpu) -> Result<(), String> {
    let within = |what: &str, sizes: [i64; 3], most: [u32; 3]| {
        let over = sizes.into_iter().zip(most).zip(["x", "y", "z"]).find(|((n, most), _)| *n > i64::from(*most));
        over.map_or(Ok(()), |((n, most), axis)| {
            Err(format!("kernel {} has {n} {what} along {axis}, of which there may be {most}", kernel.name))
        })
    };
    within("blocks", kernel.grid(), gpu.most_blocks_along)?;
    within("threads", kernel.block(), gpu.most_threads_along)?;
    let (n_threads, shared_bytes) = (kernel.n_threads(), kernel.shared_bytes(program));
    if n_threads > i64::from(gpu.most_threads) {
        let most = gpu.most_threads;
        return Err(format!("kernel {} has blocks of {n_threads} threads, of which there may be {most}", kernel.name));
    }
    if shared_bytes > gpu.most_shared_bytes {
        let most = gpu.most_shared_bytes;
        return Err(format!("kernel {} takes {shared_bytes} bytes of shared memory of {most}", kernel.name));
    }
    Ok(())
}

/// The fault of code.
fn of_compiler(error: OpenClError) -> Failure {
    let lacks_memory = error.lacks_memory();
    Failure { class: ErrorClass::CompileErrorDevice, message: error.to_string(), lacks_memory }
}

/// The fault of a run.
fn of_device(error: OpenClError) -> Failure {
    let lacks_memory = error.lacks_memory();
    Failure { class: ErrorClass::RuntimeError, message: error.to_string(), lacks_memory }
}

struct Tester {
    untuned: Program,
    device: OpenClDevice,
    context: Context,
    /// Inputs, and outputs with what they must be, on this side …
    arguments: Vec<Argument>,
    /// … and all of them on the device.
    memories: Vec<Arc<Memory>>,
    kernels: Arc<Kernels<Built>>,
    variation: Variation,
    /// What caches are filled with where kernels are to find nothing there.
    flush: Option<Memory>,
}

impl Thread for Tester {
    fn answer(&mut self, request: Request) -> Option<Reply> {
        let start = Instant::now();
        let (id, result) = match request {
            Request::Check { id, plan } => (id, self.check(id, plan.as_ref())),
            Request::Run { id, plan } => (id, self.run(id, &plan)),
            Request::Build { .. } | Request::Drop { .. } => unreachable!("another thread builds"),
        };
        Some(result.unwrap_or_else(|failure| failure.reply(id, start)))
    }
}

impl Tester {
    /// Runs a kernel for the first time and compares its answer with the reference; and times it, where that
    /// tells enough or what follows belongs to it.
    fn check(&mut self, id: u64, plan: Option<&Plan>) -> Result<Reply, Failure> {
        let start = Instant::now();
        let built = self.kernels.get(id)?;
        let mut launches = built.prepare.iter().chain(&built.body).chain(&built.finish);
        self.relied_on(launches.try_for_each(Launch::warm_up))?;
        // What others left there must not pass for its own.
        built.own.iter().try_for_each(|memory| memory.fill(POISON)).map_err(of_device)?;
        self.launch(&built.prepare, 1)?;
        tell(Lane::Test, &Reply::Prepared { id })?;
        let start_of_run = Instant::now();
        for (memory, argument) in self.memories.iter().zip(&self.arguments) {
            if let Argument::Output { .. } = argument {
                memory.fill(POISON).map_err(of_device)?;
            }
        }
        let ns = self.launch(&built.body, 1)?;
        self.launch(&built.finish, 1)?;
        let mut is_intact = true;
        for memory in self.memories.iter().chain(&built.own) {
            is_intact &= memory.is_intact().map_err(of_device)?;
        }
        if !is_intact {
            return Err((ErrorClass::RuntimeError, "it wrote outside its buffers".to_owned()).into());
        }
        for (memory, argument) in self.memories.iter().zip(&mut self.arguments) {
            if let Argument::Output { buffer, .. } = argument {
                memory.read(buffer.bytes_mut()).map_err(of_device)?;
            }
        }
        let relative_error = compare(&self.untuned, &built.tolerance, &self.arguments)?;
        let took = start_of_run.elapsed();
        let first = First { ns, pace: 1.0, checked_ns: took.as_nanos() as f64 };
        // It is checked once, and what was true then stays so.
        let _ = built.first.set(first);
        let is_enough = |plan: &Plan| {
            first.is_alone(plan) || timing::at_first(plan, &self.variation, first, size(&built)).is_some()
        };
        let to_time = plan.filter(|plan| is_enough(plan));
        checked(id, start, took, relative_error, to_time, |plan| self.run(id, plan))
    }

    fn run(&mut self, id: u64, plan: &Plan) -> Result<Reply, Failure> {
        let start = Instant::now();
        let built = self.kernels.get(id)?;
        let first = *built.first.get().ok_or((ErrorClass::Unknown, format!("kernel {id} was never checked")))?;
        let n_bytes = if plan.caches == Caches::Warm { 0 } else { built.n_bytes };
        let plan = &Plan { caches: timing::emptied(plan.caches, n_bytes), at_best_pace: false, ..*plan };
        if plan.caches != Caches::Warm && self.flush.is_none() {
            let n_bytes = 2 * self.device.target.l2_bytes.max(1 << 20);
            self.flush = Some(Memory::new(&self.context, n_bytes).map_err(of_device)?);
        }
        let mut variation = std::mem::take(&mut self.variation);
        // The first that fails ends it: what comes after takes no time.
        let failure = std::cell::RefCell::new(None);
        let keep = |result: Result<f64, Failure>| {
            result.unwrap_or_else(|why| {
                failure.borrow_mut().get_or_insert(why);
                f64::MAX
            })
        };
        let mut run = |n_runs: u32| match failure.borrow().is_some() {
            true => f64::MAX,
            false => keep(self.launch(&built.body, n_runs)),
        };
        let mut flush = || {
            let start = Instant::now();
            let filled =
                self.flush.as_ref().map_or(Ok(()), |memory| memory.fill(1).and_then(|()| self.context.finish()));
            keep(filled.map(|()| 0.0).map_err(of_device));
            start.elapsed().as_nanos() as f64
        };
        let subject = Subject { run: &mut run, size: size(&built), flush: &mut flush, pace: &mut || 1.0 };
        let samples = timing::sample(plan, &mut variation, first, subject);
        let failure = failure.into_inner();
        if let Some(failure) = failure {
            return Err(failure);
        }
        self.variation = variation;
        Ok(Reply::Timed {
            id,
            samples_ns: samples.ns,
            stopped_early: samples.stopped_early,
            seconds: start.elapsed().as_secs_f64(),
        })
    }

    /// Runs kernels so many times; nanoseconds of the device.
    fn launch(&self, launches: &[Launch], n_runs: u32) -> Result<f64, Failure> {
        self.relied_on(opencl::run(&self.context, launches, n_runs))
    }

    /// What came of a run; the end of this process where the device may no longer be relied on.
    fn relied_on<T>(&self, result: Result<T, OpenClError>) -> Result<T, Failure> {
        result.map_err(|error| {
            if !self.device.is_cpu {
                // A GPU's driver may give no right answer any more, and nobody can tell: what comes next is
                // for a fresh process.
                eprintln!("{error}");
                std::process::exit(DEVICE_LOST);
            }
            of_device(error)
        })
    }
}

/// What a kernel takes of the machine.
fn size(built: &Built) -> Size {
    Size { n_threads: 1, n_bytes: built.n_bytes }
}
