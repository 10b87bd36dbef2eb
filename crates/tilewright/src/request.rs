//! Requests to tune: a subject and the settings of the search.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tilewright_device::Caches;
use tilewright_device::command::{Metric, Objectives};
use tilewright_device::device::WorkerCommand;
use tilewright_device::{Device, DeviceOptions, host};
use tilewright_ir::Target;
use tilewright_ir::op::Workload;
use tilewright_search::{Config, Space};
use tilewright_tune::{Task, TemplateSetting};

use crate::device_spec::{CPU, DeviceSpec, HOST};
use crate::error::Error;
use crate::run::transfer::Transfer;
use crate::subject::command::Command;
use crate::subject::kernel::KernelFile;

/// Search by default.
pub const DEFAULT_SEARCH: &str = "auto";
/// Default time of a search, if neither time nor trials are given.
pub const DEFAULT_TIME: Duration = Duration::from_secs(60);

/// Subject of a request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Job {
    /// Operator with its sizes.
    Workload(Workload),
    /// Command with parameters.
    Command(Command),
    /// Kernel in C, C++, OpenCL C or CUDA.
    Kernel(Box<KernelFile>),
}

impl From<Workload> for Job {
    fn from(workload: Workload) -> Job {
        Job::Workload(workload)
    }
}

impl From<Command> for Job {
    fn from(command: Command) -> Job {
        Job::Command(command)
    }
}

impl From<KernelFile> for Job {
    fn from(kernel: KernelFile) -> Job {
        Job::Kernel(Box::new(kernel))
    }
}

/// Machine that code is generated for, as named by a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum TargetRef {
    /// CPUs of this machine; for a GPU kernel, the first device that can run it.
    Host,
    /// Device by its name: `cpu`, `opencl`, `opencl:N`, `cuda` or `cuda:N`.
    Device(String),
    /// Known target, which can run where candidates are measured.
    Target(Box<Target>),
}

/// Remote device whose kernels a runner executes: see [`tilewright_device::runner`].
#[derive(Debug, Clone)]
pub struct OnRunner {
    /// Command that starts the runner.
    pub command: String,
    /// Whether the device is emulated: its times are meaningless, and not recorded.
    pub is_emulated: bool,
}

/// Settings of a [`Request`], set by its methods.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// Search by name, with options after a colon.
    pub search: String,
    /// Number of trials at which the search ends, recorded ones of earlier runs included.
    pub trials: Option<u64>,
    /// Time limit of the search; [`DEFAULT_TIME`] unless `trials` or `stop_below` ends it.
    pub time: Option<Duration>,
    /// Early stopping: the search ends when the improvement expected within the next minute falls below this
    /// share of the best time.
    pub stop_below: Option<f64>,
    /// Seed of the search and of the random inputs.
    pub seed: u64,
    /// Number of threads that a kernel may use, or of CPUs for a command.
    pub threads: usize,
    /// Whether the best candidates race at the end, and the untuned kernel of a workload is measured.
    pub race: bool,
    /// Whether earlier records of the subject are deleted first.
    pub fresh: bool,
    /// Results of other runs for transfer learning or as first candidates.
    pub transfer: Option<Transfer>,
    /// Whether slow candidates are timed completely, rather than pruned.
    pub to_the_end: bool,
    /// Whether the space includes configurations beyond a GPU's limits, which fail when instantiated.
    pub beyond_limits: bool,
    /// Timeout of a candidate's build; by default a minute for commands and kernels.
    pub build_timeout: Option<Duration>,
    /// Timeout of a candidate's runs; by default a minute for a command, 10 s for a kernel.
    pub run_timeout: Option<Duration>,
    /// Minimum time of the timed runs of each candidate.
    pub min_time: Option<Duration>,
    /// Memory limit of each process of a command or kernel, in bytes of data; half the memory by default.
    pub memory_bytes: Option<u64>,
    /// Machine that code is generated for.
    pub(crate) target: TargetRef,
    /// Remote device on which candidates run; `None` for this machine.
    pub runner: Option<OnRunner>,
    /// Template whose space is searched; the operator's default one if `None`.
    pub template: Option<String>,
    /// State of the caches before timed runs.
    pub caches: Caches,
    /// Whether the configurations that the template's analytical model ranks first are tried first.
    pub guesses: bool,
    /// Configurations to try first, before any guess.
    pub first: Vec<Config>,
}

impl Default for Settings {
    /// Returns the settings for one thread of this machine, with everything else left open.
    fn default() -> Settings {
        Settings {
            search: DEFAULT_SEARCH.to_owned(),
            trials: None,
            time: None,
            stop_below: None,
            seed: 0,
            threads: 1,
            race: true,
            fresh: false,
            transfer: None,
            to_the_end: false,
            beyond_limits: false,
            build_timeout: None,
            run_timeout: None,
            min_time: None,
            memory_bytes: None,
            target: TargetRef::Host,
            runner: None,
            template: None,
            caches: Caches::Warm,
            guesses: true,
            first: Vec::new(),
        }
    }
}

/// Request to tune a subject: a workload, a command or a kernel.
#[derive(Debug, Clone)]
pub struct Request {
    job: Job,
    settings: Settings,
}

/// Methods that set a field of the settings.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($type:ty) = $value:expr;)*) => {
        $($(#[$doc])* #[must_use] pub fn $name(mut self, $name: $type) -> Request {
            self.settings.$name = $value;
            self
        })*
    };
}

impl Request {
    /// Makes a request with the default settings: a minute, one thread, this machine.
    pub fn new(job: impl Into<Job>) -> Request {
        Request { job: job.into(), settings: Settings::default() }
    }

    /// Makes a request for the workload that a text names, such as `matmul-512` or
    /// `conv2d:n=1,c=64,h=56,w=56,k=64,r=3,s=3,pad=1`.
    ///
    /// # Errors
    /// If the text names no workload.
    pub fn parse(workload: &str) -> Result<Request, Error> {
        Workload::parse(workload).map(Request::new).map_err(Error::input)
    }

    setters! {
        /// Sets the search, with options after a colon, such as `genetic:population=50`.
        search(impl Into<String>) = search.into();
        /// Sets the number of trials at which the search ends, recorded ones of earlier runs included.
        trials(impl Into<Option<u64>>) = trials.into();
        /// Sets the time limit of the search.
        time(impl Into<Option<Duration>>) = time.into();
        /// Sets early stopping: the search ends when the improvement expected within the next minute falls
        /// below this share of the best time.
        stop_below(impl Into<Option<f64>>) = stop_below.into();
        /// Sets the seed of the search and of the random inputs.
        seed(u64) = seed;
        /// Sets the number of threads that a kernel may use, or of CPUs for a command.
        threads(usize) = threads;
        /// Sets whether the best candidates race at the end.
        race(bool) = race;
        /// Sets whether earlier records of the subject are deleted first.
        fresh(bool) = fresh;
        /// Sets the results for transfer learning: records of other workloads, or, for a command or a kernel,
        /// results of another tuner.
        transfer(impl Into<Option<Transfer>>) = transfer.into();
        /// Sets whether slow candidates are timed completely, rather than pruned.
        to_the_end(bool) = to_the_end;
        /// Sets whether a workload's space includes configurations beyond a GPU's limits, as in publications.
        beyond_limits(bool) = beyond_limits;
        /// Sets the timeout of a candidate's build.
        build_timeout(impl Into<Option<Duration>>) = build_timeout.into();
        /// Sets the timeout of a candidate's runs.
        run_timeout(impl Into<Option<Duration>>) = run_timeout.into();
        /// Sets the minimum time of the timed runs of each candidate.
        min_time(impl Into<Option<Duration>>) = min_time.into();
        /// Sets the memory limit of each process of a command or kernel, in bytes of data.
        memory_bytes(impl Into<Option<u64>>) = memory_bytes.into();
        /// Sets the remote device without a compiler on which candidates of a workload run.
        runner(impl Into<Option<OnRunner>>) = runner.into();
        /// Sets the template whose space is searched for a workload.
        template(impl Into<String>) = Some(template.into());
        /// Sets the state of the caches before timed runs of a workload.
        caches(Caches) = caches;
        /// Sets whether the configurations that a workload's template ranks first are tried first.
        guesses(bool) = guesses;
        /// Sets the configurations to try first, before any guess.
        first(Vec<Config>) = first;
    }

    /// Sets the device by its name: `cpu`, `opencl`, `opencl:N`, `cuda` or `cuda:N`.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), tilewright::Error> {
    /// use tilewright::{Request, Session};
    ///
    /// let session = Session::open("records.db")?;
    /// let tuned = session.tune(&Request::parse("matmul-1024:dtype=f16")?.device("cuda"))?;
    /// println!("{}: {:?}", tuned.target, tuned.best);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> Request {
        self.settings.target = TargetRef::Device(name.into());
        self
    }

    /// Sets the target of code generation; the machine that measures must be able to run its code.
    #[must_use]
    pub fn target(mut self, target: Target) -> Request {
        self.settings.target = TargetRef::Target(Box::new(target));
        self
    }

    /// Subject of the request.
    pub fn job(&self) -> &Job {
        &self.job
    }

    /// Settings of the request.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Workload of the request.
    ///
    /// # Errors
    /// If it is for a command or a kernel.
    pub fn workload(&self) -> Result<&Workload, Error> {
        match &self.job {
            Job::Workload(workload) => Ok(workload),
            Job::Command(_) | Job::Kernel(_) => {
                Err(Error::input("the request is not for a workload (commands and kernels are tuned one at a time)"))
            }
        }
    }

    /// Resolves the target of a workload's kernels.
    ///
    /// # Errors
    /// Bad input if there is no such device, or it does not run code with that many threads.
    pub fn find_target(&self) -> Result<Target, Error> {
        match &self.settings.target {
            TargetRef::Host => Ok(host::target()),
            TargetRef::Device(device) => {
                DeviceSpec { device, target: HOST, threads: self.settings.threads }.runnable_target()
            }
            TargetRef::Target(target) => Ok(Target::clone(target)),
        }
    }

    /// Name of the device, as options write it.
    pub(crate) fn device_name(&self) -> Result<&str, Error> {
        match &self.settings.target {
            TargetRef::Host => Ok(CPU),
            TargetRef::Device(device) => Ok(device),
            TargetRef::Target(_) => Err(Error::input("a target is for workloads (name a device)")),
        }
    }

    /// Instantiates the task of a workload: its template for the target.
    ///
    /// # Errors
    /// If the request is not for a workload, this machine has too little memory, or there is no such template
    /// or space.
    pub fn task(&self) -> Result<Task, Error> {
        let workload = self.workload()?;
        Device::check_memory(workload).map_err(Error::input)?;
        let Settings { threads, template, beyond_limits, .. } = &self.settings;
        let setting = TemplateSetting { workload: workload.clone(), target: self.find_target()?, n_threads: *threads };
        let task = Task::new(setting, template.as_deref()).map_err(Error::input)?;
        if *beyond_limits && task.setting.target.gpu.is_none() {
            return Err(Error::input("a space beyond a GPU's limits means nothing on a CPU (leave it out)"));
        }
        if *beyond_limits { task.beyond_limits().map_err(Error::input) } else { Ok(task) }
    }

    /// Builds the space of configurations.
    ///
    /// # Errors
    /// As [`Request::task`], and if a parameter or a constraint is malformed or no configuration is left.
    pub fn space(&self) -> Result<Arc<Space>, Error> {
        match &self.job {
            Job::Workload(_) => Ok(self.task()?.space),
            Job::Command(command) => command.space().map(Arc::new),
            Job::Kernel(kernel) => kernel.space().map(Arc::new),
        }
    }

    /// Objectives, the leading one first: the run time for workloads and kernels.
    ///
    /// # Errors
    /// If the text of a command's metric is neither a time nor a regular expression, or its metrics cannot be
    /// combined.
    pub fn objectives(&self) -> Result<Objectives, Error> {
        match &self.job {
            Job::Command(command) => command.parsed_objectives(),
            Job::Workload(_) | Job::Kernel(_) => Ok(Metric::Kernel.into()),
        }
    }

    /// Makes the options for building, running and timing candidates of a workload.
    pub fn options(&self, worker: WorkerCommand) -> DeviceOptions {
        let settings = &self.settings;
        let options = DeviceOptions::new(worker, settings.threads);
        DeviceOptions {
            seed: settings.seed,
            caches: settings.caches,
            to_the_end: settings.to_the_end,
            build_timeout: settings.build_timeout.unwrap_or(options.build_timeout),
            run_timeout: settings.run_timeout.unwrap_or(options.run_timeout),
            min_time: settings.min_time.unwrap_or(options.min_time),
            runner: settings.runner.as_ref().map(|runner| runner.command.clone()),
            ..options
        }
    }

    /// Checks that the settings are valid and apply to the subject.
    ///
    /// # Errors
    /// Bad input that names the first setting that is not valid or does not apply.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let settings = &self.settings;
        let times =
            [("time", settings.time), ("build timeout", settings.build_timeout), ("run timeout", settings.run_timeout)];
        if let Some((what, _)) = times.iter().find(|(_, given)| given.is_some_and(|time| time.is_zero())) {
            return Err(Error::input(format!("the {what} is 0 s (give more)")));
        }
        if settings.stop_below.is_some_and(|share| !(share > 0.0 && share < 1.0)) {
            return Err(Error::input("the expected gain that ends a search is above 0% and below 100%"));
        }
        let of_workloads = [
            ("a template", settings.template.is_some()),
            ("a state of the caches", settings.caches != Caches::Warm),
            ("a runner", settings.runner.is_some()),
            ("a target", matches!(settings.target, TargetRef::Target(_))),
            ("a configuration to begin with", !settings.first.is_empty()),
            ("a run without guesses", !settings.guesses),
            ("a space beyond a GPU's limits", settings.beyond_limits),
        ];
        let is_device = matches!(&settings.target, TargetRef::Device(name) if name != CPU);
        let of_kernels = [("a device", is_device), ("a time for runs", settings.min_time.is_some())];
        let memory = ("a limit of memory", settings.memory_bytes.is_some());
        let (subject, alien) = match &self.job {
            Job::Workload(_) => ("workload", vec![memory]),
            Job::Command(_) => ("command", [&of_workloads[..], &of_kernels].concat()),
            Job::Kernel(_) => ("kernel of yours", of_workloads.to_vec()),
        };
        match alien.iter().find(|(_, is_given)| *is_given) {
            Some((what, _)) => Err(Error::input(format!("{what} means nothing for a {subject} (leave it out)"))),
            None => Ok(()),
        }
    }
}

impl KernelFile {
    /// Reads a kernel's description from a file: in our format, or a T1 file of Kernel Tuner.
    ///
    /// # Errors
    /// If the file cannot be read, or describes no kernel that can be tuned here.
    pub fn read(path: &Path) -> Result<KernelFile, Error> {
        let text = crate::file::read(path, "the description of a kernel")?;
        let text = String::from_utf8(text).map_err(|_| Error::input(format!("{} is no text", path.display())))?;
        KernelFile::parse(&text, path)
    }
}
