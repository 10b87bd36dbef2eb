//! Workloads as subjects of runs: candidates are kernels that a device compiles and verifies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tilewright_device::data::DataError;
use tilewright_device::device::WorkerCommand;
use tilewright_device::{Caches, Device, DeviceError, DeviceOptions, host, peak};
use tilewright_ir::op::Workload;
use tilewright_ir::reference::work;
use tilewright_ir::{DType, Target};
use tilewright_search::{Candidate, Config, Limits, Measure, Space, Subject};
use tilewright_tune::record::least_ns;
use tilewright_tune::{Store, StoreError, Task, TaskKey, Validator};

use super::{HeadOfSearch, Runnable};
use crate::best::{CACHES, gflops, known_best, target_name};
use crate::error::Error;
use crate::observer::{Note, Observer};
use crate::request::{Request, Settings};
use crate::run::head_start::search_of;

/// Minimum time of a start, time for each element of a buffer, and share of the peak that matrix products
/// reach during a start, as measured on 2 CPUs of Zen 4 (2026-11-25).
const START_S: f64 = 0.1;
const START_NS_AN_ELEMENT: f64 = 8.0;
const PART_OF_PEAK: f64 = 0.6;

/// Remote measuring side, such as a fleet.
#[derive(Clone, Copy)]
pub struct Elsewhere<'a> {
    /// Class of its machines, as named in records.
    pub class: &'a str,
    /// Minimum batch size that keeps it busy.
    pub least_batch: usize,
    /// Measured peak in GFLOP/s, if known.
    pub peak_gflops: Option<f64>,
    /// Whether its machines are emulated.
    pub is_emulated: bool,
    /// Function that starts the measuring side.
    pub start: &'a Start<'a>,
}

/// Function that starts a measuring side.
pub type Start<'a> = dyn Fn() -> Result<Box<dyn Measure + 'a>, Error> + Sync + 'a;

/// Key of a task's trials that are measured on machines of a class.
pub fn key_of_class(class: &str, key: TaskKey) -> TaskKey {
    TaskKey { target: format!("{}@{class}", key.target), ..key }
}

/// Key of a task's trials.
pub fn task_key(task: &Task, caches: Caches) -> TaskKey {
    TaskKey {
        workload: task.setting.workload.to_string(),
        target: target_name(&task.setting.target, caches),
        template: task.template.name.to_owned(),
        threads: threads_in_records(task.setting.n_threads),
    }
}

/// Number of threads as in records, saturated at the maximum of `u32`.
pub(crate) fn threads_in_records(threads: usize) -> u32 {
    u32::try_from(threads).unwrap_or(u32::MAX)
}

/// Workload of a request, with its task and the place where it is measured.
pub(crate) struct WorkloadRun<'a> {
    settings: &'a Settings,
    pub task: Task,
    key: TaskKey,
    options: DeviceOptions,
    place: Option<Elsewhere<'a>>,
}

impl<'a> WorkloadRun<'a> {
    /// Makes the subject of a request, measured elsewhere or, by default, on this machine.
    ///
    /// # Errors
    /// As [`Request::task`].
    pub fn new(
        request: &'a Request,
        place: Option<Elsewhere<'a>>,
        worker: &WorkerCommand,
    ) -> Result<WorkloadRun<'a>, Error> {
        request.check()?;
        let (task, settings) = (request.task()?, request.settings());
        if !task.setting.workload.has_members_of_one_answer() {
            let why = "its smaller members are no parts of the largest, against which kernels are checked";
            return Err(Error::input(format!("{} cannot be tuned: {why} (give k a number)", task.setting.workload)));
        }
        let run = WorkloadRun {
            settings,
            key: task_key(&task, settings.caches),
            task,
            options: request.options(worker.clone()),
            place,
        };
        let key = run.key_under(settings.caches);
        Ok(WorkloadRun { key, ..run })
    }

    /// Key of trials in this cache state.
    fn key_under(&self, caches: Caches) -> TaskKey {
        let key = task_key(&self.task, caches);
        match self.place {
            Some(place) => key_of_class(place.class, key),
            None => key,
        }
    }

    pub fn workload(&self) -> &Workload {
        &self.task.setting.workload
    }

    pub fn settings(&self) -> &Settings {
        self.settings
    }

    /// Whether kernels run on this machine's CPUs.
    pub fn is_of_these_cpus(&self) -> bool {
        self.place.is_none() && self.task.setting.target.gpu.is_none() && self.settings.runner.is_none()
    }

    /// Starts the device with its workers; `None` after an interrupt.
    ///
    /// # Errors
    /// If memory does not suffice or workers do not start.
    pub fn device(&self, stop: &AtomicBool, observer: &dyn Observer) -> Result<Option<Device>, Error> {
        start_device(self.workload().clone(), &self.task.setting.target, self.options.clone(), stop, observer)
    }
}

impl Runnable for WorkloadRun<'_> {
    fn key(&self) -> &TaskKey {
        &self.key
    }

    fn space(&self) -> &Arc<Space> {
        &self.task.space
    }

    fn validator(&self) -> Validator {
        Validator::of(&self.task)
    }

    fn least_ns(&self) -> f64 {
        least_ns(self.workload(), &self.key.target, self.key.threads.into())
    }

    fn limits(&self) -> Limits {
        self.options.limits()
    }

    fn subject(&self) -> Subject<'_> {
        (&self.task).into()
    }

    fn search(&self, observer: &dyn Observer) -> Result<HeadOfSearch, Error> {
        search_of(self.settings, &self.task, &self.key, observer)
    }

    /// Best records of the same task in other cache states.
    fn best_elsewhere(&self, store: &Store) -> Result<Vec<Config>, StoreError> {
        let mut configs = Vec::new();
        for elsewhere in CACHES.into_iter().filter(|elsewhere| *elsewhere != self.settings.caches) {
            let TaskKey { target, template, threads, .. } = &self.key_under(elsewhere);
            let (best, _) = known_best(store, self.workload(), target, *threads, Some(template))?;
            let config = best.and_then(|best| self.task.space.config_from_json(&best.config).ok());
            configs.splice(0..0, config);
        }
        Ok(configs)
    }

    fn start(&self, stop: &AtomicBool, observer: &dyn Observer) -> Result<Option<Box<dyn Measure + '_>>, Error> {
        match self.place {
            Some(place) => {
                observer.note(Note::Start);
                (place.start)().map(Some)
            }
            None => Ok(self.device(stop, observer)?.map(|device| Box::new(device) as Box<dyn Measure>)),
        }
    }

    fn least_batch(&self) -> usize {
        self.place.map_or(1, |place| place.least_batch)
    }

    fn is_emulated(&self) -> bool {
        match self.place {
            Some(place) => place.is_emulated,
            None => self.settings.runner.as_ref().is_some_and(|runner| runner.is_emulated),
        }
    }

    fn peak_gflops(&self) -> Option<f64> {
        match self.place {
            Some(place) => place.peak_gflops,
            // The peak of other devices is not measured.
            None if !self.is_of_these_cpus() => None,
            None => peak::gflops(
                &host::target(),
                peak::PeakKind::of(self.workload(), &host::target()),
                self.settings.threads,
            )
            .ok(),
        }
    }

    fn start_and_run_s(&self, peak_gflops: f64) -> Option<(f64, f64)> {
        let workload = self.workload();
        let program = workload.program();
        let n_elements: u64 = program.buffers.iter().filter_map(|buffer| buffer.n_elements()).sum();
        // The reference uses all CPUs, in f64; dot products of bytes have eight times the throughput.
        let each = if workload.multiplies_bytes() { 0.25 } else { 1.0 };
        let n_cpus = each * host::allowed_cpus().len() as f64 / self.settings.threads as f64;
        let flops = 1e9 * peak_gflops * n_cpus * workload.dtype.arithmetic().bytes() as f64 / DType::F64.bytes() as f64;
        let start_s =
            START_S + 2.0 * work(&program) / (PART_OF_PEAK * flops) + n_elements as f64 * START_NS_AN_ELEMENT / 1e9;
        self.place.is_none().then(|| (start_s, gflops(workload, 1.0) / (1e9 * peak_gflops)))
    }

    /// First guess of the template's model, which runs if nothing is recorded.
    fn baseline(&self) -> Option<Candidate> {
        self.task.first_guess(self.settings.seed).map(|config| self.subject().candidate(config))
    }

    fn is_verified(&self) -> bool {
        true
    }

    fn gflops(&self, ns: f64) -> f64 {
        gflops(self.workload(), ns)
    }
}

/// Refuses a family of workloads where a single size is required.
///
/// # Errors
/// Bad input if the workload is a family.
pub(crate) fn require_one_size(workload: &Workload, what: &str) -> Result<(), Error> {
    match workload.open_sizes().next() {
        None => Ok(()),
        Some((name, range)) => {
            let why = format!("{what} takes workloads of one size, and {name}={range} is a range (give a number)");
            Err(Error::input(why))
        }
    }
}

/// Starts a device for a workload; `None` if `stop` is raised before it is ready.
///
/// # Errors
/// If memory does not suffice or workers do not start.
pub fn start_device(
    workload: Workload,
    target: &Target,
    options: DeviceOptions,
    stop: &AtomicBool,
    observer: &dyn Observer,
) -> Result<Option<Device>, Error> {
    use std::ops::ControlFlow;
    observer.note(Note::Start);
    let watch = |part: f64| {
        observer.note(Note::Reference(part));
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    match Device::new_watched(workload, target, options, &watch) {
        Ok(device) => Ok(Some(device)),
        Err(DeviceError::Data(DataError::GivenUp)) => Ok(None),
        Err(error) => Err(Error::failed(&error).because(error)),
    }
}
