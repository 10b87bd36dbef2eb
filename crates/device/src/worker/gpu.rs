//! Worker threads for a GPU, by any driver. They share a context: data stays on the device between kernels,
//! and the driver compiles while a kernel runs.

mod comparison;

use super::builder::{answer, scheduled};
use super::store::NumberedKernels;
use super::{Build, Test, WorkerThreads, checked, compare, limit_memory, tell};
use crate::data::BoundArgument;
use crate::failure::Failure;
use crate::gpu::{Cuda, Driver, DriverMemory, GuardedSpan, LaunchShape, OpenCl, fits, keep_compiled_in, of_device};
use crate::interference::Variation;
use crate::memory::Fenced;
use crate::protocol::{Caches, ProgramSource, Reply, TimingPlan, WorkerAssignment, WorkerRequest, WorkerThread};
use crate::timing::{self, First, KernelDemands, TimedKernel};
use comparison::Comparison;
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tilewright_ir::gpu::{GpuKernel, lower_gpu};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::Tolerance;
use tilewright_ir::{BufferId, Program, Role, Target};
use tilewright_search::{Conditions, ErrorClass};

/// Byte of unwritten outputs: read as numbers they are NaN, so that they cannot pass for correct.
const POISON: u8 = 0xFF;

/// Number of elements of a result that is compared on the device: the host is faster for fewer, and for more
/// the reference takes device memory that kernels may need.
const LARGE: RangeInclusive<usize> = if cfg!(test) { 1..=1 << 27 } else { 1 << 20..=1 << 27 };

/// Exit code of a worker whose device can no longer be relied on.
const DEVICE_LOST: i32 = 70;

/// Makes the threads of a worker on an OpenCL device.
///
/// # Errors
/// If there is no such device, or it has too little memory.
pub fn on_opencl(
    assignment: &WorkerAssignment,
    workload: Workload,
    untuned: Program,
    target: Target,
    arguments: Vec<BoundArgument>,
) -> Result<WorkerThreads, Box<dyn std::error::Error>> {
    if let Some(folder) = &assignment.drivers_folder {
        keep_compiled_in(Some(Path::new(folder)));
    }
    let driver = OpenCl::new(&target)?;
    let is_cpu = driver.is_cpu();
    let threads = threads(driver, workload, untuned, target, arguments)?;
    if is_cpu {
        // Drivers of GPUs reserve more addresses than any limit allows.
        limit_memory(assignment.memory_bytes);
    }
    Ok(threads)
}

/// Makes the threads of a worker on a GPU of NVIDIA.
///
/// # Errors
/// If there is no such device, or it has too little memory.
pub fn on_cuda(
    workload: Workload,
    untuned: Program,
    target: Target,
    arguments: Vec<BoundArgument>,
) -> Result<WorkerThreads, Box<dyn std::error::Error>> {
    keep_compiled_in(None);
    threads(Cuda::new(&target)?, workload, untuned, target, arguments)
}

/// Makes the threads for an assignment, by a driver.
///
/// # Errors
/// If the device has too little memory.
fn threads<D: Driver>(
    driver: D,
    workload: Workload,
    untuned: Program,
    target: Target,
    arguments: Vec<BoundArgument>,
) -> Result<WorkerThreads, Box<dyn std::error::Error>> {
    let (builder, tester) = lanes(driver, workload, untuned, target, arguments)?;
    Ok((Box::new(builder), Box::new(tester)))
}

/// Makes the builder and the tester.
///
/// # Errors
/// As [`threads`].
fn lanes<D: Driver>(
    driver: D,
    workload: Workload,
    untuned: Program,
    target: Target,
    mut arguments: Vec<BoundArgument>,
) -> Result<(GpuBuilder<D>, GpuTester<D>), Box<dyn std::error::Error>> {
    let on_device = |argument: &BoundArgument| {
        let (BoundArgument::Input(buffer) | BoundArgument::Output { buffer, .. }) = argument;
        let memory = driver.memory(buffer.n_bytes())?;
        if let BoundArgument::Input(buffer) = argument {
            memory.write(0, buffer.as_slice())?;
        }
        Ok(Arc::new(memory))
    };
    let memories = arguments.iter().map(on_device).collect::<Result<Vec<_>, D::Error>>()?;
    // The copies of inputs are not needed here.
    for argument in &mut arguments {
        if let BoundArgument::Input(buffer) = argument {
            *buffer = Fenced::new(0)?;
        }
    }
    let kernels = Arc::new(NumberedKernels::default());
    let builder = GpuBuilder {
        workload,
        untuned: untuned.clone(),
        target: target.clone(),
        driver: driver.clone(),
        memories: memories.clone(),
        kernels: kernels.clone(),
    };
    let variation = Variation::default();
    let comparison = None;
    let mut tester =
        GpuTester { untuned, target, driver, arguments, memories, kernels, variation, flush: None, comparison };
    tester.comparison = tester.comparison();
    Ok((builder, tester))
}

/// Kernels of a program, with the memory that they use.
struct GpuKernels<D: Driver> {
    prepare: Vec<D::Launch>,
    body: Vec<D::Launch>,
    finish: Vec<D::Launch>,
    /// Buffers that are not arguments: kept buffers, and intermediate ones between kernels.
    own: Vec<Arc<DriverMemory<D>>>,
    tolerance: Tolerance,
    /// Bytes that the body accesses, except temporaries.
    n_bytes: u64,
    /// Run that verified it.
    first: OnceLock<First>,
}

struct GpuBuilder<D: Driver> {
    workload: Workload,
    untuned: Program,
    target: Target,
    driver: D,
    memories: Vec<Arc<DriverMemory<D>>>,
    kernels: Arc<NumberedKernels<GpuKernels<D>>>,
}

impl<D: Driver> Build for GpuBuilder<D> {
    fn answer(&mut self, request: WorkerRequest) -> Option<Reply> {
        answer(request, &self.kernels, |source, _| self.build(source))
    }
}

impl<D: Driver> GpuBuilder<D> {
    fn build(&self, source: &ProgramSource) -> Result<GpuKernels<D>, Failure> {
        let instantiation = |why: String| Failure::from((ErrorClass::InstantiationError, why));
        let (program, steps) = scheduled(&self.workload, &self.untuned, source)?;
        let program = lower_gpu(&program).map_err(|why| instantiation(why.to_string()))?;
        let gpu = self.target.gpu.as_ref().expect("invariant: the target is a GPU");
        let mut shapes = program.kernels().map(|kernel| LaunchShape::of(kernel, &program, &self.target));
        shapes.try_for_each(|shape| fits(&shape, gpu)).map_err(instantiation)?;
        let code = self.driver.build(&program, &self.target, &())?;
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
                    let memory = self.driver.memory(buffer.size_bytes().ok_or_else(too_large)?);
                    own.push(Arc::new(memory.map_err(of_device::<D>)?));
                    own[own.len() - 1].clone()
                }
            };
            memories.insert(id, memory);
        }
        let launch = |kernel: &GpuKernel| {
            let memories = kernel.arguments(&program).into_iter().map(|(id, _)| &memories[&id]);
            let arguments = memories.map(|memory| GuardedSpan::whole(memory.clone(), memory.n_bytes())).collect();
            D::launch(&code, kernel, &program, &self.target, arguments)
        };
        let launches = |kernels: &[GpuKernel]| kernels.iter().map(launch).collect::<Result<Vec<_>, Failure>>();
        let body_uses = program.body.iter().flat_map(|kernel| kernel.arguments(&program));
        let body_uses: std::collections::BTreeSet<BufferId> = body_uses.map(|(id, _)| id).collect();
        let touched = body_uses.into_iter().map(|id| program.program.buffer(id));
        Ok(GpuKernels {
            prepare: launches(&program.prepare)?,
            body: launches(&program.body)?,
            finish: launches(&program.finish)?,
            own,
            tolerance: Tolerance::for_schedule(&self.untuned, &steps),
            n_bytes: touched.filter(|b| b.role != Role::Temporary).filter_map(|b| b.size_bytes()).sum(),
            first: OnceLock::new(),
        })
    }
}

struct GpuTester<D: Driver> {
    untuned: Program,
    target: Target,
    driver: D,
    /// Inputs, and outputs with their reference results, in host memory.
    arguments: Vec<BoundArgument>,
    /// Arguments in device memory.
    memories: Vec<Arc<DriverMemory<D>>>,
    kernels: Arc<NumberedKernels<GpuKernels<D>>>,
    variation: Variation,
    /// Memory that is filled to flush the caches.
    flush: Option<DriverMemory<D>>,
    /// Comparison on the device, if there is one.
    comparison: Option<Comparison<D>>,
}

impl<D: Driver> Test for GpuTester<D> {
    fn check(&mut self, id: u64, plan: Option<&TimingPlan>) -> Result<Reply, Failure> {
        let start = Instant::now();
        let built = self.kernels.get(id)?;
        let mut launches = built.prepare.iter().chain(&built.body).chain(&built.finish);
        self.relied_on(launches.try_for_each(D::warm_up))?;
        // Values left by other kernels must not pass for this kernel's results.
        built.own.iter().try_for_each(|memory| memory.fill(POISON)).map_err(of_device::<D>)?;
        self.launch(&built.prepare, 1)?;
        tell(WorkerThread::Test, &Reply::Prepared { id })?;
        let start_of_run = Instant::now();
        for (memory, argument) in self.memories.iter().zip(&self.arguments) {
            if let BoundArgument::Output { .. } = argument {
                memory.fill(POISON).map_err(of_device::<D>)?;
            }
        }
        let ns = self.launch(&built.body, 1)?;
        self.launch(&built.finish, 1)?;
        let mut is_intact = true;
        for memory in self.memories.iter().chain(&built.own) {
            is_intact &= memory.is_intact().map_err(of_device::<D>)?;
        }
        if !is_intact {
            return Err((ErrorClass::RuntimeError, "it wrote outside its buffers".to_owned()).into());
        }
        let relative_error = self.relative_error(id, &built.tolerance)?;
        let took = start_of_run.elapsed();
        let first = First { ns, pace: 1.0, checked_ns: took.as_nanos() as f64 };
        // A kernel is verified only once, and the result stays valid.
        let _ = built.first.set(first);
        let is_enough = |plan: &TimingPlan| {
            first.is_alone(plan) || timing::at_first(plan, &self.variation, first, size(&built)).is_some()
        };
        let to_time = plan.filter(|plan| is_enough(plan));
        checked(id, start, took, relative_error, to_time, |plan| self.run(id, plan))
    }

    fn run(&mut self, id: u64, plan: &TimingPlan) -> Result<Reply, Failure> {
        let start = Instant::now();
        let built = self.kernels.get(id)?;
        let first = *built.first.get().ok_or((ErrorClass::Unknown, format!("kernel {id} was never checked")))?;
        let n_bytes = if plan.caches == Caches::Warm { 0 } else { built.n_bytes };
        let plan = &TimingPlan { caches: timing::emptied(plan.caches, n_bytes), at_best_pace: false, ..*plan };
        if plan.caches != Caches::Warm && self.flush.is_none() {
            let n_bytes = 2 * self.target.l2_bytes.max(1 << 20);
            self.flush = Some(self.driver.memory(n_bytes).map_err(of_device::<D>)?);
        }
        let mut variation = std::mem::take(&mut self.variation);
        // The first failure ends sampling: later calls return at once.
        let failure = std::cell::RefCell::new(None);
        let keep = |result: Result<f64, Failure>| {
            result.unwrap_or_else(|why| {
                failure.borrow_mut().get_or_insert(why);
                f64::MAX
            })
        };
        let mut run = |n_runs: u32| {
            // Not a match: its borrow would last until the failure is kept.
            if failure.borrow().is_some() {
                return f64::MAX;
            }
            keep(self.launch(&built.body, n_runs))
        };
        let mut flush = || {
            let start = Instant::now();
            let fill = |memory: &DriverMemory<D>| memory.fill(1).and_then(|()| self.driver.finish());
            let filled = self.flush.as_ref().map_or(Ok(()), fill);
            keep(filled.map(|()| 0.0).map_err(of_device::<D>));
            start.elapsed().as_nanos() as f64
        };
        let subject = TimedKernel { run: &mut run, size: size(&built), flush: &mut flush, pace: &mut || 1.0 };
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
            conditions: Conditions::default(),
        })
    }
}

impl<D: Driver> GpuTester<D> {
    /// Compares the results of a run: on the device if they are large and clearly correct, otherwise here.
    fn relative_error(&mut self, id: u64, tolerance: &Tolerance) -> Result<f64, Failure> {
        if let Some(comparison) = &self.comparison
            && let Some(relative_error) = comparison.relative_error(tolerance)?
        {
            return Ok(relative_error);
        }
        tell(WorkerThread::Test, &Reply::Ran { id })?;
        for (memory, argument) in self.memories.iter().zip(&mut self.arguments) {
            if let BoundArgument::Output { buffer, .. } = argument {
                memory.read(0, buffer.bytes_mut()).map_err(of_device::<D>)?;
            }
        }
        compare(&self.untuned, tolerance, &self.arguments)
    }

    /// Comparison on the device, if there is one output and it is large.
    fn comparison(&self) -> Option<Comparison<D>> {
        let arguments = self.memories.iter().zip(&self.arguments).zip(self.untuned.arguments());
        let mut outputs = arguments.filter_map(|((memory, argument), (_, buffer))| match argument {
            BoundArgument::Output { reference, .. } => Some((memory, buffer.dtype, reference.as_slice::<f64>())),
            BoundArgument::Input(_) => None,
        });
        match (outputs.next(), outputs.next()) {
            (Some((memory, dtype, reference)), None) if LARGE.contains(&reference.len()) => {
                Comparison::new(&self.driver, &self.target, dtype, memory, reference)
            }
            _ => None,
        }
    }

    /// Runs kernels `n_runs` times; returns the device's nanoseconds.
    fn launch(&self, launches: &[D::Launch], n_runs: u32) -> Result<f64, Failure> {
        self.relied_on(self.driver.run(launches, n_runs))
    }

    /// Result of a run. Ends this process if the device can no longer be relied on.
    fn relied_on<T>(&self, result: Result<T, D::Error>) -> Result<T, Failure> {
        result.map_err(|error| {
            if self.driver.is_lost(&error) && !D::is_of_device(&error) {
                // A GPU's driver may give no right answer any more, and nobody can tell: what comes next is
                // for a fresh process.
                eprintln!("{error}");
                std::process::exit(DEVICE_LOST);
            }
            of_device::<D>(error)
        })
    }
}

/// Size of a kernel: threads and memory.
fn size<D: Driver>(built: &GpuKernels<D>) -> KernelDemands {
    KernelDemands { n_threads: 1, n_bytes: built.n_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::ReferenceData;
    use std::ops::ControlFlow;
    use std::os::fd::AsFd;
    use tilewright_tune::{Task, TemplateSetting};

    /// Matrix product in tiles of 16 by 16, a thread per element; `ROW` is the row that a thread writes.
    const PRODUCT: &str = "program \"product\"
buffer A: f32[32, 24] global input
buffer B: f32[24, 48] global input
buffer C: f32[32, 48] global output
buffer S: f32[16, 8] shared temporary
buffer T: f32[1] register temporary
loops by, bx, ty, tx, ko, ki, c
run {
  block.y by in 2 { block.x bx in 3 {
    alloc T
    for ko in 3 {
      alloc S
      thread.y ty in 16 { thread.x tx in 8 { S[ty, tx] = A[16*by + ty, 8*ko + tx] } }
      thread.y ty in 16 { thread.x tx in 16 {
        for ki in 8 { C[ROW, 16*bx + tx] += S[ty, ki] * B[8*ko + ki, 16*bx + tx] first ko + ki == 0 }
      } }
    }
  } }
}";

    /// Builds, verifies and times a program in the emulator; returns the worker's last reply.
    fn answer(program: &str) -> Reply {
        answer_to("matmul:m=32,n=48,k=24", ProgramSource::Lowered(program.to_owned()), 1e-6)
    }

    /// Runs a source of a workload whose result may have a relative error of `most`.
    fn answer_to(workload: &str, source: ProgramSource, most: f64) -> Reply {
        let workload = Workload::parse(workload).unwrap();
        let untuned = workload.program();
        let data = ReferenceData::new(&untuned, 1, 1, &|_| ControlFlow::Continue(())).unwrap();
        let arguments = BoundArgument::all(&untuned, data.file.as_fd(), &data.offsets).unwrap();
        let driver = Cuda::emulated();
        let target = Target::named("sm_90a").unwrap();
        let (mut builder, mut tester) = lanes(driver, workload, untuned, target, arguments).unwrap();
        match builder.answer(WorkerRequest::Build { id: 1, source, quickly: false }) {
            Some(Reply::Built { .. }) => {}
            other => return other.unwrap(),
        }
        let (caches, at_best_pace) = (Caches::Warm, false);
        let plan =
            TimingPlan { min_time_ns: 1e6, min_samples: 2, alone_ns: 0.0, leading_ns: None, caches, at_best_pace };
        // The first result is compared on the device, the next one here.
        let mut errors = Vec::new();
        for comparison in [tester.comparison.take(), None] {
            assert_eq!(comparison.is_some(), errors.is_empty());
            tester.comparison = comparison;
            match tester.answer(WorkerRequest::Check { id: 1, plan: None }) {
                Reply::Checked { relative_error, .. } => errors.push(relative_error),
                other => return other,
            }
        }
        let is_same = (errors[0] - errors[1]).abs() <= 1e-6 * errors[0];
        assert!(is_same && errors[0] < most, "{errors:?}");
        tester.answer(WorkerRequest::Run { id: 1, plan })
    }

    #[test]
    fn kernels_are_built_checked_and_timed() {
        match answer(&PRODUCT.replace("ROW", "16*by + ty")) {
            Reply::Timed { samples_ns, .. } => assert!(samples_ns.len() >= 2 && samples_ns.iter().all(|ns| *ns > 0.0)),
            other => panic!("{other:?}"),
        }
    }

    /// Bulk copies of boxes work, with the tensor map that the driver passes to the kernel.
    #[test]
    fn boxes_are_copied() {
        let threads = "thread.y ty in 16 { thread.x tx in 8 { S[ty, tx] = A[16*by + ty, 8*ko + tx] } }";
        let boxes = "for r in 16 { for e in 8 { S[ko % 2, r, e] = A[16*by + r, 8*ko + e] } } wait 0";
        let program =
            PRODUCT.replace("ROW", "16*by + ty").replace(threads, boxes).replace("S[ty, ki]", "S[ko % 2, ty, ki]");
        let program =
            program.replace("S: f32[16, 8] shared", "S: f32[2, 16, 8] bulk").replace("loops ", "loops r, e, ");
        match answer(&program) {
            Reply::Timed { .. } => {}
            other => panic!("{other:?}\n{program}"),
        }
    }

    /// A launch has an additional warp if one only copies.
    #[test]
    fn a_warp_that_copies_is_launched() {
        let text = "dense:m=64,n=40,k=96,tf32=1";
        let (workload, target) = (Workload::parse(text).unwrap(), Target::named("sm_90a").unwrap());
        let task = Task::new(TemplateSetting { workload, target, n_threads: 1 }, Some("gpu-matmul-wgmma")).unwrap();
        let config = r#"{"block_m":64,"block_n":32,"block_k":32,"groups_m":1,"groups_n":1,"vector_a":1,"vector_b":1,
            "order":"rows","ahead":3,"copies":"bulk","producer":1,"precision":"tf32"}"#;
        let config = task.space.config_from_json(&config.parse().unwrap()).unwrap();
        match answer_to(text, ProgramSource::Steps(task.steps_text(&config)), 2e-3) {
            Reply::Timed { .. } => {}
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_wrong_has_its_class() {
        let class = |program: &str| match answer(program) {
            Reply::Failed { class, message, .. } => (class.0, message),
            other => panic!("{other:?}"),
        };
        let (is, why) = class("nonsense");
        assert_eq!(is, ErrorClass::InstantiationError, "{why}");
        let (is, why) = class(&PRODUCT.replace("ROW", "16*by + 15 - ty"));
        assert_eq!(is, ErrorClass::WrongAnswer, "{why}");
        // Block with more shared memory than there is.
        let (is, why) = class(&PRODUCT.replace("ROW", "16*by + ty").replace("S: f32[16, 8]", "S: f32[16000, 8]"));
        assert_eq!(is, ErrorClass::InstantiationError, "{why}");
    }
}
