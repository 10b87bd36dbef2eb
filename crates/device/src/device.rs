//! Device for measuring candidates: workers build them in parallel, and they are verified and timed one at a
//! time. While a kernel runs, the other workers build further candidates on other cores.

mod backend;
mod contest;
mod race;
mod scheduler;

use crate::cuda::CudaError;
use crate::data::{DataError, ReferenceData, anonymous_file};
use crate::folder::Folder;
use crate::host;
use crate::limits::{self, Allowed};
use crate::objects;
use crate::opencl::OpenClError;
use crate::protocol::{Caches, ProgramSource, RunnerOf, WorkerAssignment};
use crate::workers::Workers;
use backend::Backend;
pub(crate) use scheduler::MOST_RETRIES;
use scheduler::{Policy, Scheduler, WorkerCommands};
use std::fs::File;
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::Watch;
use tilewright_ir::{Buffer, Role, Target};
use tilewright_search::{
    BoxError, Candidate, Conditions, Limits, Measure, Measured, MeasuringTraits, Next, RaceLimits, Standing, pause,
};

pub use crate::timing::RoundLength;
pub use crate::workers::WorkerCommand;
pub use race::Racer;

/// Minimum number of samples of a trial: a disturbance outlasts a second sample, and another candidate tells
/// more.
const SAMPLES_OF_TRIAL: u32 = 1;

/// Options for building, running and timing candidates.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Command that starts a worker process.
    pub worker: WorkerCommand,
    /// Number of worker processes, which build in parallel.
    pub n_workers: usize,
    /// Number of threads that a kernel may use.
    pub n_threads: usize,
    /// CPUs that threads are pinned to while timing, one each.
    pub cpus: Vec<usize>,
    /// Seed of the random inputs.
    pub seed: u64,
    /// Timeout of a build.
    pub build_timeout: Duration,
    /// Timeout of a candidate's runs in total.
    pub run_timeout: Duration,
    /// Whether slow candidates are timed completely, rather than pruned.
    pub to_the_end: bool,
    /// Minimum time of a candidate's timed runs.
    pub min_time: Duration,
    /// State of the caches before a run.
    pub caches: Caches,
    /// Whether times are corrected for interference to those of undisturbed cores. They must not be if
    /// kernels are compared with times measured in another way.
    pub at_best_pace: bool,
    /// Memory limit of a worker, in bytes above its baseline.
    pub memory_bytes: u64,
    /// Command that starts a [runner](crate::runner) on a remote device; `None` for this machine.
    pub runner: Option<String>,
}

impl DeviceOptions {
    /// Defaults for this machine: a worker per CPU, timeouts of 10 s for build and runs, 10 ms of timing,
    /// half the memory.
    pub fn new(worker: WorkerCommand, n_threads: usize) -> DeviceOptions {
        DeviceOptions {
            worker,
            n_workers: most_workers(),
            n_threads,
            cpus: host::pin_cpus(n_threads),
            seed: 0,
            build_timeout: Duration::from_secs(10),
            run_timeout: Duration::from_secs(10),
            to_the_end: false,
            min_time: Duration::from_millis(10),
            caches: Caches::Warm,
            at_best_pace: true,
            memory_bytes: (host::memory_bytes().unwrap_or(8 << 30) / 2)
                .min(Allowed::here().address_space_bytes.unwrap_or(u64::MAX)),
            runner: None,
        }
    }
}

impl DeviceOptions {
    /// Resource limits of candidates.
    pub fn limits(&self) -> Limits {
        Limits {
            build_s: self.build_timeout.as_secs_f64(),
            run_s: self.run_timeout.as_secs_f64(),
            memory_bytes: self.memory_bytes,
        }
    }
}

/// Maximum number of workers of any device.
const MOST_BUILDERS: usize = 16;

/// Maximum useful number of worker processes; [`Backend::adapt`] reduces it for some devices.
fn most_workers() -> usize {
    host::most_threads().min(MOST_BUILDERS)
}

/// Bytes of a GPU's memory that workers together may use for arguments and references, of which each worker
/// has its own.
const MOST_DEVICE_BYTES: u64 = 8 << 30;

/// Number of workers for which this many bytes suffice, at least one.
fn workers_within(bytes: u64, workload: &Workload) -> usize {
    let program = workload.program();
    let of = |buffer: &Buffer| {
        let reference = if buffer.role == Role::Output { 8 * buffer.n_elements().unwrap_or(0) } else { 0 };
        buffer.size_bytes().unwrap_or(0).saturating_add(reference)
    };
    let each = program.arguments().map(|(_, buffer)| of(buffer)).fold(1, u64::saturating_add);
    usize::try_from(bytes / each).map_or(usize::MAX, |n| n.max(1))
}

/// Reason why a device cannot measure a workload.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Missing test data of the workload.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Failure to start worker processes.
    #[error("cannot run worker processes: {0}{advice}", advice = limits::advice(.0))]
    Workers(#[from] io::Error),
    /// Missing OpenCL device.
    #[error(transparent)]
    OpenCl(#[from] OpenClError),
    /// Missing CUDA device.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Target whose kernels cannot run here.
    #[error("kernels for {target} cannot be run here (`show` prints their code)")]
    NothingRuns {
        /// The target's name.
        target: String,
    },
    /// Workload with open (dynamic) sizes on a runner, which is not supported.
    #[error("{workload} has sizes that are ranges, which a runner does not take; give numbers")]
    Family {
        /// The workload.
        workload: String,
    },
    /// Workload whose buffers exceed this machine's memory.
    #[error(
        "{workload} needs {needed_mib} MiB of memory, and this process may have {memory_mib}; give smaller sizes, or a larger limit"
    )]
    TooLarge {
        /// The workload.
        workload: String,
        /// Memory needed, in MiB.
        needed_mib: u64,
        /// Memory of the machine, in MiB.
        memory_mib: u64,
    },
    /// Workload whose buffers exceed the limit on a process's address space.
    #[error(
        "{workload} needs {needed_mib} MiB of address space, and a process may have {limit_mib} (`ulimit -v`); \
         give smaller sizes, or raise the limit"
    )]
    TooMuchSpace {
        /// The workload.
        workload: String,
        /// Memory needed, in MiB.
        needed_mib: u64,
        /// Limit, in MiB.
        limit_mib: u64,
    },
}

/// Memory of all processes besides buffers: measured as 25 MiB with one worker and with two, without packed
/// buffers.
const MORE_BYTES: u64 = 32 << 20;

/// Interval between measurements of the machine's frequency and temperature.
pub(crate) const BETWEEN_LOOKS: Duration = Duration::from_secs(5);

/// Interval at which the scheduler acts even if no worker replies.
const LOOK: Duration = Duration::from_millis(50);

/// Device prepared for measuring one workload: the CPU, a GPU or a runner's.
pub struct Device {
    workers: Workers,
    options: DeviceOptions,
    scheduler: Scheduler,
    backend: Backend,
    /// CPUs that workers may use, and those of them on which no kernel is timed.
    all_cpus: Vec<usize>,
    other_cpus: Vec<usize>,
    /// Conditions of the machine at the last look, and its time; `None` if kernels run elsewhere.
    conditions: Option<(Conditions, Instant)>,
    /// Total of the pauses that candidates have been informed of.
    paused: Duration,
    // Workers map the first file and read and write the second; both must outlive them.
    data: ReferenceData,
    _objects: File,
    _drivers: Option<Folder>,
}

impl Device {
    /// Checks that this machine has enough memory to measure a workload.
    ///
    /// # Errors
    /// [`DeviceError::TooLarge`] if it does not.
    pub fn check_memory(workload: &Workload) -> Result<(), DeviceError> {
        let program = workload.program();
        // Inputs and outputs once, the reference and its inputs in f64; then all of them in every worker.
        let elements: u64 = program.arguments().filter_map(|(_, b)| b.n_elements()).sum();
        let bytes: u64 = program.arguments().filter_map(|(_, b)| b.size_bytes()).fold(0, u64::saturating_add);
        let of_tuner = bytes.saturating_add(elements.saturating_mul(24));
        let of_workers = bytes
            .saturating_mul(most_workers().min(backend::MOST_WORKERS) as u64)
            .saturating_add(elements.saturating_mul(8));
        let needed = of_tuner.max(of_workers).saturating_add(MORE_BYTES);
        if let Some(memory) = host::memory_bytes().filter(|&memory| needed > memory) {
            let (needed_mib, memory_mib) = (needed >> 20, memory >> 20);
            return Err(DeviceError::TooLarge { workload: workload.to_string(), needed_mib, memory_mib });
        }
        let needed = limits::address_space_bytes().saturating_add(of_tuner).saturating_add(MORE_BYTES);
        if let Some(limit) = Allowed::here().address_space_bytes.filter(|&limit| needed > limit) {
            let (needed_mib, limit_mib) = (needed >> 20, limit >> 20);
            return Err(DeviceError::TooMuchSpace { workload: workload.to_string(), needed_mib, limit_mib });
        }
        Ok(())
    }

    /// Prepares inputs and reference outputs and starts the workers.
    ///
    /// # Errors
    /// [`DeviceError`] if memory does not suffice or workers do not start.
    pub fn new(workload: Workload, target: &Target, options: DeviceOptions) -> Result<Device, DeviceError> {
        Device::new_watched(workload, target, options, &|_| ControlFlow::Continue(()))
    }

    /// Starts a device as [`Device::new`] does. `watch` receives the progress of computing the reference,
    /// from any thread, and may cancel.
    ///
    /// # Errors
    /// As [`Device::new`], and [`DataError::GivenUp`].
    pub fn new_watched(
        workload: Workload,
        target: &Target,
        options: DeviceOptions,
        watch: &Watch,
    ) -> Result<Device, DeviceError> {
        Device::check_memory(&workload)?;
        let backend = Backend::of(target, &options)?;
        let mut options = backend.adapt(target, options);
        if backend == Backend::Gpu {
            options.n_workers = options.n_workers.min(workers_within(MOST_DEVICE_BYTES, &workload));
        }
        let drivers = backend.has_driver().then(|| Folder::new("tilewright-drivers")).transpose()?;
        pause::watch()?;
        if options.runner.is_some() && workload.is_family() {
            return Err(DeviceError::Family { workload: workload.to_string() });
        }
        let data = ReferenceData::new(&workload.largest().program(), options.seed, host::most_threads(), watch)?;
        let objects = anonymous_file(c"tilewright-objects")?;
        objects::make_appending(&objects)?;
        let assignment = WorkerAssignment {
            workload: workload.to_string(),
            target: target.to_string(),
            n_threads: options.n_threads,
            cpus: options.cpus.clone(),
            data_fd: data.file.as_raw_fd(),
            data_offsets: data.offsets.clone(),
            objects_fd: objects.as_raw_fd(),
            memory_bytes: options.memory_bytes,
            drivers_folder: drivers.as_ref().map(|folder| folder.path().to_owned()),
            runner: options
                .runner
                .clone()
                .map(|command| RunnerOf { command, run_timeout_s: options.run_timeout.as_secs_f64() }),
        };
        let is_cpu = backend == Backend::Cpu;
        let conditions = is_cpu.then(|| (host::conditions(cpu_of(&options)), Instant::now()));
        let all_cpus = host::allowed_cpus();
        let other_cpus = host::cpus_beside(&all_cpus, &options.cpus);
        let workers = Workers::start(options.worker.clone(), assignment, options.n_workers)?;
        let has_cores_left = workers.len() > 1 && backend.leaves_cores(&options.cpus);
        let scheduler = Scheduler::new(Policy {
            n_workers: workers.len(),
            has_cores_left,
            round: RoundLength { time: options.min_time, min_samples: SAMPLES_OF_TRIAL },
            build_timeout: options.build_timeout,
            run_timeout: options.run_timeout,
            to_the_end: options.to_the_end,
            caches: options.caches,
            at_best_pace: options.at_best_pace,
            memory_bytes: options.memory_bytes,
        });
        Ok(Device {
            workers,
            options,
            scheduler,
            backend,
            all_cpus,
            other_cpus,
            conditions,
            paused: pause::total(),
            data,
            _objects: objects,
            _drivers: drivers,
        })
    }

    /// Stops the workers until [`Device::wake`]. Data and compiled code are kept; pending measurements are
    /// cancelled.
    pub fn rest(&mut self) {
        self.leave();
        self.workers.clear();
    }

    /// Restarts the workers if they are stopped.
    ///
    /// # Errors
    /// [`DeviceError::Workers`] if they do not start.
    pub fn wake(&mut self) -> Result<(), DeviceError> {
        self.workers.fill(self.options.n_workers)?;
        Ok(())
    }

    /// Restores this process's affinity from before any kernel was timed; work in progress is cancelled.
    fn leave(&mut self) {
        let commands = self.scheduler.cancel(0);
        if commands.iter().any(|command| matches!(command, WorkerCommands::StepAside(false))) {
            host::pin_thread(&self.all_cpus);
        }
    }

    /// Test data of the workload.
    pub fn data(&self) -> &ReferenceData {
        &self.data
    }

    /// Submits sources that need not be configurations of a space, as [`Measure::submit`] does.
    pub fn submit_sources(&mut self, sources: &[ProgramSource]) -> Range<u64> {
        self.submit_all(sources.iter().map(|source| (source.clone(), None)))
    }

    /// Measures sources like trials, and returns their outcomes in order.
    ///
    /// # Errors
    /// If a worker cannot be restarted.
    ///
    /// # Panics
    /// If other candidates are still being measured.
    pub fn measure_sources(&mut self, sources: &[ProgramSource]) -> io::Result<Vec<Measured>> {
        let numbers = self.submit_sources(sources);
        let mut results: Vec<Option<Measured>> = vec![None; sources.len()];
        loop {
            match self.next_trial(LOOK)? {
                Next::Done(number, measured) => {
                    assert!(numbers.contains(&number), "nothing else is measured");
                    results[(number - numbers.start) as usize] = Some(measured);
                }
                Next::Pending => {}
                Next::Idle => return Ok(results.into_iter().map(|r| r.expect("each is told once")).collect()),
            }
        }
    }

    fn submit_all(&mut self, sources: impl IntoIterator<Item = (ProgramSource, Option<Duration>)>) -> Range<u64> {
        let numbers = self.scheduler.submit(sources);
        // Work starts while the caller continues. What fails now is retried, and reported, when the results
        // are requested.
        let _ = self.act();
        numbers
    }

    /// Next trial to finish; waits for at most this time.
    fn next_trial(&mut self, at_most: Duration) -> io::Result<Next> {
        let until = pause::now() + at_most;
        loop {
            // Workers start on the next work while the caller processes the result.
            self.act()?;
            if let Some((number, mut measured)) = self.scheduler.take_done() {
                if let Some((conditions, looked)) = &mut self.conditions {
                    if looked.elapsed() > BETWEEN_LOOKS {
                        (*conditions, *looked) = (host::conditions(cpu_of(&self.options)), Instant::now());
                    }
                    measured.conditions = conditions.clone();
                }
                return Ok(Next::Done(number, measured));
            }
            let now = pause::now();
            if self.scheduler.is_done() {
                return Ok(Next::Idle);
            } else if now >= until {
                return Ok(Next::Pending);
            }
            self.listen(until.min(now + LOOK))?;
        }
    }

    /// Sends the workers their next requests.
    fn act(&mut self) -> io::Result<()> {
        let commands = self.scheduler.act(pause::now(), self.workers.idle());
        self.carry_out(commands)
    }

    /// Waits for the next reply of a worker, at most until this time, and processes it.
    fn listen(&mut self, until: Instant) -> io::Result<()> {
        let until = self.scheduler.wakes(pause::now()).map_or(until, |wakes| wakes.min(until));
        let answered = self.workers.next_answer(Some(until))?;
        let paused = pause::total();
        if std::mem::replace(&mut self.paused, paused) != paused {
            self.scheduler.was_paused();
        }
        let Some((worker, lane, answer)) = answered else { return Ok(()) };
        let commands = self.scheduler.heard(pause::now(), worker, lane, answer)?;
        self.carry_out(commands)
    }

    fn carry_out(&mut self, commands: Vec<WorkerCommands>) -> io::Result<()> {
        for command in commands {
            match command {
                WorkerCommands::Ask { worker, request, timeout } => self.workers.ask(worker, &request, timeout),
                WorkerCommands::Tell { worker, request } => self.workers.tell(worker, &request),
                WorkerCommands::GoOn { worker, lane, timeout } => self.workers.go_on(worker, lane, timeout),
                WorkerCommands::Pin { worker, is_beside } => self.workers.pin(worker, self.cpus(is_beside)),
                WorkerCommands::StepAside(is_aside) => host::pin_thread(self.cpus(is_aside)),
                WorkerCommands::GiveUp { worker } => self.workers.give_up(worker)?,
            }
        }
        Ok(())
    }

    /// All CPUs, or those beside the ones on which kernels are timed.
    fn cpus(&self, is_beside: bool) -> &[usize] {
        if is_beside { &self.other_cpus } else { &self.all_cpus }
    }
}

/// CPU on which a kernel's first thread is timed.
fn cpu_of(options: &DeviceOptions) -> usize {
    options.cpus.first().copied().unwrap_or(0)
}

impl Drop for Device {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Measure for Device {
    fn submit(&mut self, candidates: &[Candidate]) -> Range<u64> {
        self.submit_all(candidates.iter().map(|c| (ProgramSource::Steps(c.steps.to_string()), c.patience)))
    }

    fn next(&mut self, leading_ns: Option<f64>, at_most: Duration) -> Result<Next, BoxError> {
        self.scheduler.lead(leading_ns);
        self.next_trial(at_most).map_err(|error| DeviceError::Workers(error).into())
    }

    fn wind_down(&mut self) {
        let commands = self.scheduler.wind_down();
        self.carry_out(commands).expect("invariant: to tell a worker something cannot fail");
    }

    fn cancel(&mut self, from: u64) -> Result<(), BoxError> {
        let commands = self.scheduler.cancel(from);
        self.carry_out(commands).map_err(|error| DeviceError::Workers(error).into())
    }

    fn race(
        &mut self,
        candidates: &[Candidate],
        limits: RaceLimits,
        stop: Option<&AtomicBool>,
        left: &mut dyn FnMut(usize),
    ) -> Result<Vec<Standing>, BoxError> {
        self.contest(candidates, limits, stop, left).map_err(|error| DeviceError::Workers(error).into())
    }

    fn machine(&self) -> MeasuringTraits {
        MeasuringTraits { works_ahead: self.scheduler.has_cores_left() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_can_be_given_to_another_thread() {
        fn is_send<T: Send>() {}
        is_send::<Device>();
    }

    #[test]
    fn large_arguments_leave_few_workers_room() {
        let check = |workload: &str, expected: usize| {
            assert_eq!(workers_within(MOST_DEVICE_BYTES, &Workload::parse(workload).unwrap()), expected, "{workload}");
        };
        // Two operands and a result of 256 MiB, and 512 MiB of its reference.
        check("matmul:m=8192,n=8192,k=8192", 6);
        check("matmul:m=32768,n=32768,k=32768", 1);
        check("matmul:m=1024,n=1024,k=1024", 409);
    }
}
