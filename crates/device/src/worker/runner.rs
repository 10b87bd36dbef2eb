//! Worker threads for a remote device without a compiler: kernels are built here, and sent to a runner.

use super::builder::{answer, scheduled};
use super::store::NumberedKernels;
use super::{Build, Failure, Test, WorkerThreads, checked, compare, limit_memory, tell};
use crate::data::BoundArgument;
use crate::device::BETWEEN_LOOKS;
use crate::interference::Variation;
use crate::protocol::{
    Caches, EMULATED_NS, ProgramSource, Reply, RunnerOf, TimingPlan, WorkerAssignment, WorkerRequest, WorkerThread,
};
use crate::runner::{ANSWER, Ask, RunnerError, RunnerProcess, conditions};
use crate::timing::{self, First, KernelDemands, TimedKernel};
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tilewright_codegen::{LinkAddresses, Object};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::Tolerance;
use tilewright_ir::{Buffer, Part, Program, Role, Stmt, Target, lower};
use tilewright_search::{Conditions, ErrorClass};

/// Byte of unwritten outputs: read as numbers they are NaN, so that they cannot pass for correct.
const POISON: u8 = 0xFF;
/// Maximum number of samples taken by one request: this bounds the samples taken in vain.
const MOST_AT_A_TIME: u32 = 16;
/// Flag in the number of a buffer: it is flushed from the caches before each sample.
const EVICTED: u32 = 0x8000_0000;
/// Maximum number of attempts to start a runner.
const MOST_STARTS: u32 = 3;
/// Pause before an attempt to start a runner.
const BEFORE_START: Duration = Duration::from_millis(200);
/// Exit code of a worker that has lost its runner.
const NO_RUNNER: i32 = 71;

/// Makes the threads for an assignment.
///
/// # Errors
/// If the runner does not start, or the device has too little memory.
pub fn threads(
    assignment: WorkerAssignment,
    runner: RunnerOf,
    workload: Workload,
    untuned: Program,
    target: Target,
    arguments: Vec<BoundArgument>,
) -> Result<WorkerThreads, Box<dyn std::error::Error>> {
    let kernels = Arc::new(NumberedKernels::default());
    let (l2_bytes, l3_bytes) = (target.l2_bytes, target.l3_bytes);
    let mut tester = RunnerTester {
        untuned: untuned.clone(),
        arguments,
        runner: None,
        command: runner.command,
        memory_bytes: assignment.memory_bytes,
        run_timeout: Duration::try_from_secs_f64(runner.run_timeout_s).unwrap_or(ANSWER),
        n_threads: assignment.n_threads,
        flush_bytes: 2 * (l2_bytes.max(l3_bytes)),
        own_bytes: Vec::new(),
        loaded: None,
        kernels: Arc::clone(&kernels),
        variation: Variation::default(),
        conditions: Conditions::default(),
        looked: None,
    };
    tester.restart()?;
    limit_memory(assignment.memory_bytes);
    Ok((Box::new(RunnerBuilder { workload, untuned, target, kernels }), Box::new(tester)))
}

/// Kernel, with its properties.
struct RunnerKernel {
    object: Object,
    tolerance: Tolerance,
    is_parallel: bool,
    /// Bytes that its body accesses, except temporaries.
    n_bytes: u64,
    /// Whether kept buffers are filled before the first run.
    is_prepared: bool,
    /// Run that verified it.
    first: OnceLock<First>,
}

struct RunnerBuilder {
    workload: Workload,
    untuned: Program,
    target: Target,
    kernels: Arc<NumberedKernels<RunnerKernel>>,
}

impl Build for RunnerBuilder {
    fn answer(&mut self, request: WorkerRequest) -> Option<Reply> {
        answer(request, &self.kernels, |source, _| self.build(source))
    }
}

impl RunnerBuilder {
    fn build(&self, source: &ProgramSource) -> Result<RunnerKernel, Failure> {
        let (mut program, steps) = scheduled(&self.workload, &self.untuned, source)?;
        if let ProgramSource::Steps(_) = source {
            program = lower::lower(&program);
        }
        let object = Object::new(&program, &self.target)?;
        let touched = crate::prepared::touched(&program.body).into_iter().map(|b| program.buffer(b));
        Ok(RunnerKernel {
            object,
            tolerance: Tolerance::for_schedule(&self.untuned, &steps),
            is_parallel: program.body.iter().any(Stmt::has_parallel_loop),
            n_bytes: touched.filter(|b| b.role != Role::Temporary).filter_map(Buffer::size_bytes).sum(),
            is_prepared: program.kept().next().is_some(),
            first: OnceLock::new(),
        })
    }
}

/// Attributes a runner's failure to the kernel that it ran.
impl From<RunnerError> for Failure {
    fn from(error: RunnerError) -> Failure {
        let class = match &error {
            RunnerError::Late => ErrorClass::RunTimeout,
            _ => ErrorClass::RuntimeError,
        };
        let lacks_memory = matches!(error, RunnerError::NoMemory);
        Failure { class, message: error.to_string(), lacks_memory, is_of_device: false }
    }
}

struct RunnerTester {
    untuned: Program,
    /// Inputs, and outputs with their references, on this machine; on the runner their buffers have the same
    /// numbers, followed by the other buffers of a kernel.
    arguments: Vec<BoundArgument>,
    /// Runner; `None` after it died with a kernel.
    runner: Option<RunnerProcess>,
    command: String,
    memory_bytes: u64,
    run_timeout: Duration,
    n_threads: usize,
    /// Number of bytes that fill the caches.
    flush_bytes: u64,
    /// Sizes of the kept buffers and of the scratch memory on the runner.
    own_bytes: Vec<u64>,
    /// Kernel whose code is loaded, and the offsets of its parts.
    loaded: Option<(u64, [Option<u64>; 3])>,
    kernels: Arc<NumberedKernels<RunnerKernel>>,
    variation: Variation,
    /// Conditions of the device when they were last queried, and the time of that.
    conditions: Conditions,
    looked: Option<Instant>,
}

/// Number of runs and samples of a part.
#[derive(Clone, Copy)]
struct Sampling {
    n_warm: u32,
    n_runs: u32,
    n_samples: u32,
    caches: Caches,
}

const ONCE: Sampling = Sampling { n_warm: 0, n_runs: 1, n_samples: 1, caches: Caches::Warm };

impl RunnerTester {
    /// Starts the runner, with the arguments.
    fn start(&mut self) -> Result<(), RunnerError> {
        (self.loaded, self.own_bytes) = (None, Vec::new());
        let mut runner = RunnerProcess::start(&self.command)?;
        let memory = self.memory_bytes.min(runner.hello().memory_bytes / 2);
        runner.ask(Ask::Limit, 0, &memory.to_le_bytes(), ANSWER)?;
        for (argument, number) in self.arguments.iter().zip(0..) {
            let (BoundArgument::Input(buffer) | BoundArgument::Output { buffer, .. }) = argument;
            runner.ask(Ask::Buffer, number, &buffer.n_bytes().to_le_bytes(), ANSWER)?;
            if let BoundArgument::Input(buffer) = argument {
                runner.ask(Ask::Upload, number, buffer.as_slice(), ANSWER)?;
            }
        }
        self.runner = Some(runner);
        Ok(())
    }

    /// Sends a request to the runner; one that has ended is restarted when it is needed again.
    fn ask(&mut self, what: Ask, number: u32, payload: &[u8], within: Duration) -> Result<Vec<u8>, Failure> {
        let runner = self.runner.as_mut().ok_or_else(|| Failure::from((ErrorClass::Unknown, "no runner".into())))?;
        let result = runner.ask(what, number, payload, within);
        if result.as_ref().is_err_and(RunnerError::is_end) {
            self.runner = None;
        }
        Ok(result?)
    }

    /// Restarts the runner if it has ended, with several attempts if needed.
    fn restart(&mut self) -> Result<(), RunnerError> {
        let mut n_starts = 1;
        while self.runner.is_none() {
            match self.start() {
                Err(why @ RunnerError::Command { .. }) => return Err(why),
                Err(why) if n_starts == MOST_STARTS => return Err(why),
                Err(_) => std::thread::sleep(BEFORE_START),
                Ok(()) => {}
            }
            n_starts += 1;
        }
        Ok(())
    }

    /// Numbers of the buffers of a kernel besides the arguments: kept ones, and scratch memory.
    fn own(&self, built: &RunnerKernel) -> std::ops::Range<u32> {
        let n_arguments = self.arguments.len() as u32;
        n_arguments..n_arguments + built.object.kept_bytes().len() as u32 + 1
    }

    /// Loads the code of a kernel, and its buffers, filled by its `prepare` part.
    fn load(&mut self, id: u64, built: &RunnerKernel) -> Result<(), Failure> {
        if let Err(why) = self.restart() {
            // The tuner notices when this worker is restarted and does not become ready.
            eprintln!("{why}");
            std::process::exit(NO_RUNNER);
        }
        if self.loaded.is_some_and(|(loaded, _)| loaded == id) {
            return Ok(());
        }
        self.loaded = None;
        let hello = self.runner.as_ref().expect("it was started").hello();
        let function = |name: &str| hello.functions.get(name).copied();
        let address = LinkAddresses { at: hello.code_at, page_bytes: hello.page_bytes, function: &function };
        let of_device = |why: String| Failure::from((ErrorClass::CompileErrorDevice, why));
        let image = built.object.link(&address).map_err(|why| of_device(why.to_string()))?;
        if image.bytes.len() as u64 > hello.code_bytes {
            return Err(of_device(format!("its code has {} bytes, too many for the device", image.bytes.len())));
        }
        let payload = [&image.code_bytes.to_le_bytes()[..], &image.bytes].concat();
        self.ask(Ask::Code, 0, &payload, ANSWER)?;
        let sizes = built.object.kept_bytes().iter().copied().chain([built.object.scratch_bytes(self.n_threads)]);
        let sizes: Vec<u64> = sizes.collect();
        for (number, size) in self.own(built).zip(&sizes) {
            let at = number as usize - self.arguments.len();
            if self.own_bytes.get(at) != Some(size) {
                self.own_bytes.resize(self.own_bytes.len().max(at + 1), u64::MAX);
                self.ask(Ask::Buffer, number, &size.to_le_bytes(), ANSWER)?;
                self.own_bytes[at] = *size;
            }
            // Values left by other kernels must not pass for this kernel's results.
            self.ask(Ask::Fill, number, &[POISON], ANSWER)?;
        }
        let entries = [Part::Prepare, Part::Body, Part::Finish].map(|part| image.entry(part));
        self.loaded = Some((id, entries));
        if built.is_prepared
            && let Err(failure) = self.call(built, Part::Prepare, ONCE)
        {
            self.loaded = None;
            return Err(failure);
        }
        Ok(())
    }

    /// Runs a part of the loaded kernel; returns the nanoseconds of each sample.
    fn call(&mut self, built: &RunnerKernel, part: Part, sampling: Sampling) -> Result<Vec<f64>, Failure> {
        let at = match part {
            Part::Prepare => 0,
            Part::Body => 1,
            Part::Finish => 2,
        };
        let Some(entry) = self.loaded.and_then(|(_, entries)| entries[at]) else { return Ok(Vec::new()) };
        let Sampling { n_warm, n_runs, n_samples, caches } = sampling;
        let n_threads = if built.is_parallel || part != Part::Body { self.n_threads as u32 } else { 1 };
        let flush_bytes = if caches == Caches::Cold { self.flush_bytes } else { 0 };
        let constants = self.untuned.arguments().map(|(_, buffer)| buffer.role == Role::ConstInput);
        let mut numbers: Vec<u32> = constants
            .zip(0..)
            .map(|(is_constant, n)| if is_constant && caches == Caches::ColdConstants { n | EVICTED } else { n })
            .collect();
        // Buffers that `prepare` made of constants are as cold as these.
        let own = self.own(built);
        let scratch = own.end - 1;
        numbers.extend(own.map(|n| if caches == Caches::ColdConstants && n < scratch { n | EVICTED } else { n }));
        let mut payload = Vec::new();
        let deadline = u64::try_from(self.run_timeout.as_nanos()).unwrap_or(u64::MAX);
        [entry, deadline, flush_bytes].iter().for_each(|n| payload.extend(n.to_le_bytes()));
        let words = [n_warm, n_runs, n_samples, n_threads, numbers.len() as u32, 0];
        words.iter().chain(&numbers).for_each(|n| payload.extend(n.to_le_bytes()));
        let bytes = self.ask(Ask::Run, 0, &payload, self.run_timeout + ANSWER)?;
        Ok(bytes.as_chunks().0.iter().map(|ns| u64::from_le_bytes(*ns) as f64).collect())
    }

    /// Conditions of the device, queried from time to time.
    fn conditions(&mut self) -> Conditions {
        if self.looked.is_none_or(|looked| looked.elapsed() > BETWEEN_LOOKS) {
            self.looked = Some(Instant::now());
            // A runner of an earlier version does not know this request.
            let said = self.ask(Ask::State, 0, &[], ANSWER);
            self.conditions = said.map_or_else(|_| Conditions::default(), |said| conditions(&said));
        }
        self.conditions.clone()
    }

    fn is_emulated(&self) -> bool {
        self.runner.as_ref().is_some_and(|runner| runner.hello().is_emulated)
    }

    fn size(&self, built: &RunnerKernel) -> KernelDemands {
        let n_threads = if built.is_parallel { self.n_threads } else { 1 };
        KernelDemands { n_threads, n_bytes: built.n_bytes + built.object.scratch_bytes(self.n_threads) }
    }
}

impl Test for RunnerTester {
    fn check(&mut self, id: u64, plan: Option<&TimingPlan>) -> Result<Reply, Failure> {
        let start = Instant::now();
        let kernels = Arc::clone(&self.kernels);
        let built = kernels.get(id)?;
        self.load(id, &built)?;
        tell(WorkerThread::Test, &Reply::Prepared { id })?;
        let start_of_run = Instant::now();
        let outputs: Vec<u32> = (0..)
            .zip(&self.arguments)
            .filter_map(|(number, argument)| matches!(argument, BoundArgument::Output { .. }).then_some(number))
            .collect();
        for &number in &outputs {
            self.ask(Ask::Fill, number, &[POISON], ANSWER)?;
        }
        let ns = self.call(&built, Part::Body, ONCE)?.into_iter().sum();
        self.call(&built, Part::Finish, ONCE)?;
        for number in outputs {
            let bytes = self.ask(Ask::Download, number, &[], ANSWER)?;
            if let BoundArgument::Output { buffer, .. } = &mut self.arguments[number as usize] {
                if bytes.len() as u64 != buffer.n_bytes() {
                    return Err((ErrorClass::Unknown, "the runner sends another number of bytes".to_owned()).into());
                }
                buffer.bytes_mut().copy_from_slice(&bytes);
            }
        }
        let relative_error = compare(&self.untuned, &built.tolerance, &self.arguments)?;
        let took = start_of_run.elapsed();
        let first = First { ns, pace: 1.0, checked_ns: took.as_nanos() as f64 };
        // A kernel is verified only once, and the result stays valid.
        let _ = built.first.set(first);
        let is_enough = |plan: &TimingPlan| {
            first.is_alone(plan) || timing::at_first(plan, &self.variation, first, self.size(&built)).is_some()
        };
        let to_time = plan.filter(|plan| self.is_emulated() || is_enough(plan));
        checked(id, start, took, relative_error, to_time, |plan| self.run(id, plan))
    }

    fn run(&mut self, id: u64, plan: &TimingPlan) -> Result<Reply, Failure> {
        let start = Instant::now();
        let kernels = Arc::clone(&self.kernels);
        let built = kernels.get(id)?;
        let first = *built.first.get().ok_or((ErrorClass::Unknown, format!("kernel {id} was never checked")))?;
        self.load(id, &built)?;
        let timed = |samples_ns: Vec<f64>, stopped_early: bool, conditions: Conditions| {
            Ok(Reply::Timed { id, samples_ns, stopped_early, seconds: start.elapsed().as_secs_f64(), conditions })
        };
        if self.is_emulated() {
            return timed(vec![EMULATED_NS], false, Conditions::default());
        }
        let plan = &TimingPlan { caches: timing::emptied(plan.caches, built.n_bytes), at_best_pace: false, ..*plan };
        let size = self.size(&built);
        let mut variation = std::mem::take(&mut self.variation);
        // Unused samples of `n_runs` runs each, and the number of samples to take the next time.
        let (mut ahead, mut at_a_time) = ((0, VecDeque::new()), 1);
        // The first failure ends sampling: later calls return at once.
        let mut failure = None;
        let mut run = |n_runs: u32| {
            if ahead.0 != n_runs {
                (ahead, at_a_time) = ((n_runs, VecDeque::new()), 1);
            }
            if ahead.1.is_empty() && failure.is_none() {
                let n_warm = u32::from(plan.caches == Caches::Warm && at_a_time == 1 && n_runs > 1);
                let sampling = Sampling { n_warm, n_runs, n_samples: at_a_time, caches: plan.caches };
                at_a_time = (2 * at_a_time).min(MOST_AT_A_TIME);
                match self.call(&built, Part::Body, sampling) {
                    Ok(samples) => ahead.1.extend(samples),
                    Err(why) => failure = Some(why),
                }
            }
            // If no time has passed, the clock counts whole microseconds.
            ahead.1.pop_front().map_or(f64::MAX, |ns: f64| ns.max(1.0))
        };
        let subject = TimedKernel { run: &mut run, size, flush: &mut || 0.0, pace: &mut || 1.0 };
        let samples = timing::sample(plan, &mut variation, first, subject);
        match failure {
            Some(failure) => Err(failure),
            None => {
                self.variation = variation;
                let conditions = self.conditions();
                timed(samples.ns, samples.stopped_early, conditions)
            }
        }
    }
}
