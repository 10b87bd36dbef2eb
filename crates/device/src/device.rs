//! Measuring candidates: all workers build them, and one after the other they are checked and timed. While a
//! kernel runs, the other workers build what comes next, on other cores.

mod candidates;
mod race;

use crate::data::{Data, DataError, anonymous_file};
use crate::host;
use crate::limits::{self, Allowed};
use crate::objects;
use crate::protocol::{Assignment, Source};
use crate::workers::Workers;
use candidates::{Candidate, Goal, Trial};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::Duration;
use tilewright_ir::op::Workload;
use tilewright_ir::reference::Watch;
use tilewright_ir::{Step, Target};
use tilewright_tune::{BoxError, Config, Limits, Measure, Measured, Outcome, pause};

pub use crate::workers::WorkerCommand;
pub use race::{Racer, Round};

/// Samples that a trial has at least: a disturbance outlasts a second one, and another candidate tells more.
const SAMPLES_OF_TRIAL: u32 = 1;

/// How candidates are built, run and timed.
#[derive(Debug, Clone)]
pub struct Options {
    /// How to start a worker process.
    pub worker: WorkerCommand,
    /// Worker processes that build side by side.
    pub n_workers: usize,
    /// Threads a kernel may use.
    pub n_threads: usize,
    /// CPUs to pin to while timing, one a thread.
    pub cpus: Vec<usize>,
    /// Seed of the random inputs.
    pub seed: u64,
    /// Longest a build may take.
    pub build_timeout: Duration,
    /// Longest a candidate's runs may take together.
    pub run_timeout: Duration,
    /// Whether candidates that are hopeless against the fastest are run and timed to the end all the same.
    pub to_the_end: bool,
    /// Time to spend in a candidate's runs, once it is known to be right.
    pub min_time: Duration,
    /// Whether caches are emptied before each run.
    pub cold: bool,
    /// Whether times are corrected to those of cores that nobody else slows down. They must not be where
    /// kernels are compared with something timed in another way.
    pub at_best_pace: bool,
    /// Memory a worker may use beyond what it starts with.
    pub memory_bytes: u64,
}

impl Options {
    /// Defaults for this machine: a worker a CPU, 10 s a build, 10 s a run, 10 ms of timing, half the memory.
    pub fn new(worker: WorkerCommand, n_threads: usize) -> Options {
        Options {
            worker,
            n_workers: most_workers(),
            n_threads,
            cpus: host::pin_cpus(n_threads),
            seed: 0,
            build_timeout: Duration::from_secs(10),
            run_timeout: Duration::from_secs(10),
            to_the_end: false,
            min_time: Duration::from_millis(10),
            cold: false,
            at_best_pace: true,
            memory_bytes: (host::memory_bytes().unwrap_or(8 << 30) / 2)
                .min(Allowed::here().address_space_bytes.unwrap_or(u64::MAX)),
        }
    }
}

impl Options {
    /// The limits under which candidates are built and run.
    pub fn limits(&self) -> Limits {
        Limits {
            build_s: self.build_timeout.as_secs_f64(),
            run_s: self.run_timeout.as_secs_f64(),
            memory_bytes: self.memory_bytes,
        }
    }
}

/// Worker processes that are of use.
fn most_workers() -> usize {
    host::most_threads().min(8)
}

/// Why nothing can be measured at all.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is no data to run on.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The worker processes do not start.
    #[error("cannot run worker processes: {0}{advice}", advice = limits::advice(.0))]
    Workers(#[from] io::Error),
    /// The workload's buffers exceed this machine's memory.
    #[error(
        "{workload} needs {needed_mib} MiB of memory, and this process may have {memory_mib}; give smaller sizes, or a larger limit"
    )]
    TooLarge {
        /// The workload.
        workload: String,
        /// What it needs.
        needed_mib: u64,
        /// What there is.
        memory_mib: u64,
    },
    /// The workload's buffers exceed the address space that a process may have.
    #[error(
        "{workload} needs {needed_mib} MiB of address space, and a process may have {limit_mib} (`ulimit -v`); \
         give smaller sizes, or raise the limit"
    )]
    TooMuchSpace {
        /// The workload.
        workload: String,
        /// What it needs.
        needed_mib: u64,
        /// What there may be.
        limit_mib: u64,
    },
}

/// What all processes need, besides buffers: measured as 25 MiB with one worker and two, without what kernels
/// pack.
const MORE_BYTES: u64 = 32 << 20;

/// Turns a configuration into its schedule.
type StepsOf = Rc<dyn Fn(&Config) -> Vec<Step>>;

/// The CPU, as a place to measure one workload.
pub struct Device {
    workers: Workers,
    options: Options,
    steps: StepsOf,
    next_id: u64,
    /// The fastest first run so far, with the comparison of its answer.
    fastest_check: Option<Duration>,
    /// Those of the batch, in its order, and of batches to come.
    candidates: Vec<Candidate>,
    /// CPUs that workers may use, and those of them on which no kernel is timed.
    all_cpus: Vec<usize>,
    other_cpus: Vec<usize>,
    /// Whether this side keeps to the latter.
    is_aside: bool,
    /// The pauses so far, as far as candidates know of them.
    paused: Duration,
    // Workers map the one file and read and write the other; both must outlive them.
    _data: Data,
    _objects: File,
}

impl Device {
    /// Whether this machine has the memory to measure a workload.
    ///
    /// # Errors
    /// [`DeviceError::TooLarge`] where it has not.
    pub fn check_memory(workload: &Workload) -> Result<(), DeviceError> {
        let program = workload.program();
        // Inputs and outputs once, the reference and its inputs in double precision; then all of them in
        // every worker.
        let elements: u64 = program.arguments().filter_map(|(_, b)| b.n_elements()).sum();
        let bytes = workload.dtype.bytes();
        let of_tuner = elements.saturating_mul(bytes + 24);
        let needed =
            of_tuner.max(elements.saturating_mul(bytes * most_workers() as u64 + 8)).saturating_add(MORE_BYTES);
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
    /// [`DeviceError`] where memory does not suffice or workers do not start.
    pub fn new(
        workload: Workload,
        target: &Target,
        options: Options,
        steps: impl Fn(&Config) -> Vec<Step> + 'static,
    ) -> Result<Device, DeviceError> {
        Device::new_watched(workload, target, options, steps, &|_| ControlFlow::Continue(()))
    }

    /// The same, where somebody is told what part of the reference is there, by any thread, and may have the
    /// start end.
    ///
    /// # Errors
    /// As [`Device::new`], and [`DataError::GivenUp`].
    pub fn new_watched(
        workload: Workload,
        target: &Target,
        options: Options,
        steps: impl Fn(&Config) -> Vec<Step> + 'static,
        watch: &Watch,
    ) -> Result<Device, DeviceError> {
        Device::check_memory(&workload)?;
        pause::watch()?;
        let untuned = workload.program();
        let data = Data::new(&untuned, options.seed, host::most_threads(), watch)?;
        let objects = anonymous_file(c"tilewright-objects")?;
        objects::make_appending(&objects)?;
        let assignment = Assignment {
            workload: workload.to_string(),
            target: target.into(),
            n_threads: options.n_threads,
            cpus: options.cpus.clone(),
            data_fd: data.file.as_raw_fd(),
            data_offsets: data.offsets.clone(),
            objects_fd: objects.as_raw_fd(),
            memory_bytes: options.memory_bytes,
        };
        let all_cpus = host::allowed_cpus();
        let other_cpus = host::cpus_beside(&all_cpus, &options.cpus);
        let workers = Workers::start(options.worker.clone(), assignment, options.n_workers)?;
        Ok(Device {
            workers,
            options,
            steps: Rc::new(steps),
            next_id: 0,
            fastest_check: None,
            candidates: Vec::new(),
            all_cpus,
            other_cpus,
            is_aside: false,
            paused: pause::total(),
            _data: data,
            _objects: objects,
        })
    }

    /// From the next candidate on, whatever others take, its runs may take so long together.
    pub fn run_to_the_end(&mut self, run_timeout: Duration) {
        self.options.run_timeout = run_timeout;
        self.options.to_the_end = true;
    }

    /// Builds, verifies and times sources: [`Measure::measure`] for programs that have no configuration.
    ///
    /// # Errors
    /// Where a worker cannot be started anew.
    pub fn measure_sources(
        &mut self,
        sources: &[Source],
        leading_ns: Option<f64>,
        over: &dyn Fn() -> bool,
        next: &mut dyn FnMut() -> Vec<Source>,
        done: &mut dyn FnMut(usize, Measured) -> ControlFlow<()>,
    ) -> io::Result<()> {
        let round = Round { time: self.options.min_time, min_samples: SAMPLES_OF_TRIAL };
        // While none leads, the fastest of the sources does.
        let mut fastest_ns: Option<f64> = None;
        self.begin(sources);
        let to_the_end = self.options.to_the_end;
        let goal = |leading_ns| Goal { quickly: true, to_the_end, trial: Some(Trial { round, leading_ns }) };
        self.look_ahead(goal(leading_ns), next);
        loop {
            let Some((at, measured)) = self.next_trial(goal(leading_ns.or(fastest_ns)), over)? else { return Ok(()) };
            if let Outcome::Measured(timing) = &measured.outcome {
                fastest_ns = Some(fastest_ns.map_or(timing.median_ns, |fastest| fastest.min(timing.median_ns)));
            }
            if done(at, measured).is_break() {
                return self.abandon();
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.step_aside(false);
    }
}

/// The text of a schedule, as it is recorded and sent to workers.
pub fn steps_text(steps: &[Step]) -> String {
    steps.iter().map(|s| format!("{s}\n")).collect()
}

impl Measure for Device {
    fn measure(
        &mut self,
        batch: &[Config],
        leading_ns: Option<f64>,
        over: &dyn Fn() -> bool,
        next: &mut dyn FnMut() -> Vec<Config>,
        done: &mut dyn FnMut(usize, Measured) -> ControlFlow<()>,
    ) -> Result<(), BoxError> {
        let steps = Rc::clone(&self.steps);
        let sources_of = |configs: &[Config]| -> Vec<Source> {
            configs.iter().map(|config| Source::Steps(steps_text(&steps(config)))).collect()
        };
        self.measure_sources(&sources_of(batch), leading_ns, over, &mut || sources_of(&next()), done)
            .map_err(|error| DeviceError::Workers(error).into())
    }
}
