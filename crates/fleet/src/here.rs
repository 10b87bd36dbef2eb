//! This machine as a device of a fleet.

use std::fs::{self, File};
use std::hash::Hasher;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use fnv::FnvHasher;
use rustix::fs::{FlockOperation, flock};
use tilewright::{Database, DeviceSpec, HOST, OnRunner, Request};
use tilewright_device::device::WorkerCommand;
use tilewright_device::runner::Hello;
use tilewright_device::{Device, host, peak};
use tilewright_ir::Target;
use tilewright_search::{BoxError, Conditions, Measure, Next, Subject};

use crate::Fleet;
use crate::devices::DeviceDescription;
use crate::nkey::random_name;
use crate::protocol::Assignment;
use crate::serve::{Here, serve};

/// Kernels that all devices measure at the start and periodically: one bound by computation, one by memory,
/// and one by both.
const ANCHORS: [&str; 3] = [
    "matmul:m=192,n=192,k=192",
    "depthwise_conv2d:c=64,h=28,w=28,r=3,s=3,pad=1",
    "conv2d:c=32,h=14,w=14,k=32,r=3,s=3,pad=1",
];
/// Interval of these measurements while the device is idle, and the time limit for a kernel.
const ANCHORS_EVERY: Duration = Duration::from_secs(600);
const ANCHOR_TIME: Duration = Duration::from_secs(5);
/// Name of the file in the user's data folder that contains this machine's name as a device.
const NAME: &str = "device";

/// Hardware that a device of a fleet measures on.
#[derive(Clone, Copy, Debug)]
pub enum Measures<'a> {
    /// CPUs of this machine.
    Cpus,
    /// GPU of this machine, by its name, such as `cuda` or `opencl:1`.
    Gpu(&'a str),
    /// Remote device whose runner a command starts.
    Runner(&'a str),
}

/// Serves tasks on this machine or a runner's until `stop` is raised. The device's name is that of its key,
/// or a generated one that is kept in the user's data folder.
///
/// # Errors
/// If the server cannot be reached, a name is invalid, this machine serves already, or there is no such GPU
/// or runner.
pub fn serve_here(
    fleet: &Fleet,
    worker: &WorkerCommand,
    measures: Measures,
    stop: &AtomicBool,
    tell: &dyn Fn(String),
) -> Result<(), tilewright::Error> {
    let folder = Database::new(None)?.path;
    let folder = folder.parent().unwrap_or(Path::new("/"));
    let failed = |what: &str, error: std::io::Error| {
        tilewright::Error::failed(format!("{}: {what}", folder.display())).because(error)
    };
    fs::create_dir_all(folder).map_err(|error| failed("the data folder", error))?;
    let lock = File::open(folder).map_err(|error| failed("the data folder", error))?;
    // Kernels timed by two processes at once would slow each other down.
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(tilewright::Error::input("this machine serves already (end the other `tilewright serve` first)"));
    }
    let path = folder.join(NAME);
    let known = fs::read_to_string(&path).ok().map(|text| text.trim().to_owned()).filter(|name| !name.is_empty());
    let name = match known {
        Some(name) => name,
        None => {
            let name = format!("d-{}", &random_name()[..12]);
            tilewright::file::write_whole(&path, |file| writeln!(file, "{name}"))
                .map_err(|error| failed("the name of this machine cannot be kept", error))?;
            name
        }
    };
    let name = fleet.credentials.as_ref().map_or(name, |credentials| credentials.name.clone());
    crate::protocol::check_name("device", &name)?;
    let kernels = KernelPlace { worker, on: found(measures, fleet)? };
    // Errors of the connection are reported before measuring.
    drop(fleet.connect(Some(&name))?);
    let mut description = kernels.describe(&name, &fleet.class);
    description.anchors_ns = kernels.anchors();
    tell(format!("{name} of class {} serves tasks of {}", fleet.class, fleet.servers));
    let mut measured = Instant::now();
    let mut renew = |description: &mut DeviceDescription, is_idle: bool| {
        if matches!(kernels.on, FoundMachine::Cpus) {
            let Conditions { frequency_mhz, temperature_c, .. } = conditions_here();
            (description.frequency_mhz, description.temperature_c) = (frequency_mhz, temperature_c);
        }
        if is_idle && measured.elapsed() > ANCHORS_EVERY {
            measured = Instant::now();
            description.anchors_ns = kernels.anchors();
        }
    };
    let mut start = |assignment: &Assignment| kernels.start(assignment);
    serve(fleet, description, &mut Here { start: &mut start, renew: &mut renew }, stop, tell)?;
    Ok(())
}

/// Machine on which kernels run, and how they are built.
struct KernelPlace<'a> {
    worker: &'a WorkerCommand,
    on: FoundMachine<'a>,
}

/// Machine that was detected.
enum FoundMachine<'a> {
    /// CPUs of this machine.
    Cpus,
    /// GPU of this machine, and the version of its code generator.
    Gpu { target: Target, version: String },
    /// Machine on which the command starts a runner, with the runner's greeting.
    Runner(&'a str, Hello),
}

/// Detects the machine. Unless it is this machine's CPUs, the class must be given.
fn found<'a>(measures: Measures<'a>, fleet: &Fleet) -> Result<FoundMachine<'a>, tilewright::Error> {
    let check_class = |option: &str, what: &str| match fleet.class == class_here() {
        true => Err(tilewright::Error::input(format!("{option}: {what} is of a class of its own (give --class NAME)"))),
        false => Ok(()),
    };
    match measures {
        Measures::Cpus => Ok(FoundMachine::Cpus),
        Measures::Gpu(device) => {
            let place = DeviceSpec { device, target: HOST, threads: 1 };
            let target = place.runnable_target()?;
            check_class("--device", "a GPU")?;
            Ok(FoundMachine::Gpu { target, version: place.code_version()? })
        }
        Measures::Runner(command) => {
            let hello = tilewright_device::runner::look(command);
            let hello = hello.map_err(|why| tilewright::Error::input(format!("--runner: {why}")))?;
            check_class("--runner", "a runner's device")?;
            Ok(FoundMachine::Runner(command, hello))
        }
    }
}

/// Text of a target by which machines are compared; independent of the index of a GPU.
fn text_of(target: &Target) -> String {
    let mut target = target.clone();
    if let Some(gpu) = &mut target.gpu {
        gpu.number = 0;
    }
    target.to_string()
}

impl KernelPlace<'_> {
    fn target(&self) -> Target {
        match &self.on {
            FoundMachine::Cpus => host::target(),
            FoundMachine::Gpu { target, .. } => target.clone(),
            FoundMachine::Runner(_, hello) => hello.target.clone(),
        }
    }

    /// Number of cores of a CPU; 1 for a GPU.
    fn n_cores(&self) -> usize {
        match &self.on {
            FoundMachine::Cpus => host::allowed_cpus().len().max(1),
            FoundMachine::Gpu { .. } => 1,
            FoundMachine::Runner(_, hello) => hello.cores,
        }
    }

    /// Describes this device.
    fn describe(&self, name: &str, class: &str) -> DeviceDescription {
        let (target, of_both) = (self.target(), DeviceDescription::named(name, class));
        let of_both = DeviceDescription {
            toolchain: toolchain(),
            cores: self.n_cores(),
            sandbox: tilewright_device::sandbox::name().to_owned(),
            target: text_of(&target),
            ..of_both
        };
        match &self.on {
            FoundMachine::Gpu { version, .. } => DeviceDescription {
                toolchain: format!("{}, {version}", toolchain()),
                memory_bytes: host::memory_bytes(),
                ..of_both
            },
            FoundMachine::Runner(_, hello) => DeviceDescription {
                memory_bytes: Some(hello.memory_bytes),
                is_emulated: hello.is_emulated,
                sandbox: "a runner".to_owned(),
                ..of_both
            },
            FoundMachine::Cpus => DeviceDescription {
                memory_bytes: host::memory_bytes(),
                peak_gflops: peak::gflops(&target, peak::PeakKind::F32, 1).ok(),
                frequency_mhz: conditions_here().frequency_mhz,
                temperature_c: conditions_here().temperature_c,
                ..of_both
            },
        }
    }

    /// Starts a measuring side for an assignment.
    fn start(&self, assignment: &Assignment) -> Result<Box<dyn Measure>, BoxError> {
        let (target, n_cores) = (self.target(), self.n_cores());
        let own = text_of(&target);
        if own != assignment.target {
            return Err(format!("its schedules are for {}, and this machine is {own}", assignment.target).into());
        }
        if assignment.threads > n_cores {
            return Err(format!("{} threads are asked for, and there are {n_cores} cores", assignment.threads).into());
        }
        let seconds = |s: Option<f64>| s.and_then(|s| Duration::try_from_secs_f64(s).ok());
        let request = self
            .request(Request::parse(&assignment.workload)?)
            .threads(assignment.threads)
            .seed(assignment.seed)
            .caches(assignment.caches)
            .to_the_end(assignment.to_the_end)
            .min_time(seconds(assignment.min_time_s))
            .build_timeout(seconds(assignment.build_timeout_s))
            .run_timeout(seconds(assignment.run_timeout_s));
        let options = request.options(self.worker.clone());
        Ok(Box::new(Device::new(request.workload()?.clone(), &target, options)?))
    }

    /// Adapts a request to be measured on this machine.
    fn request(&self, request: Request) -> Request {
        let runner = match &self.on {
            FoundMachine::Runner(command, hello) => {
                Some(OnRunner { command: (*command).to_owned(), is_emulated: hello.is_emulated })
            }
            FoundMachine::Cpus | FoundMachine::Gpu { .. } => None,
        };
        request.target(self.target()).runner(runner)
    }

    /// Times the anchor kernels; empty if one of them fails, or times are meaningless.
    fn anchors(&self) -> Vec<f64> {
        if matches!(&self.on, FoundMachine::Runner(_, hello) if hello.is_emulated) {
            return Vec::new();
        }
        let measured: Result<Vec<f64>, BoxError> = ANCHORS.iter().map(|workload| self.anchor(workload)).collect();
        measured.unwrap_or_default()
    }

    fn anchor(&self, workload: &str) -> Result<f64, BoxError> {
        let request = self.request(Request::parse(workload)?);
        let task = request.task()?;
        let guess = task.guesses(0).into_iter().next().ok_or("there is nothing to begin with")?;
        let mut device =
            Device::new(request.workload()?.clone(), &task.setting.target, request.options(self.worker.clone()))?;
        device.submit(&[Subject::from(&task).candidate(guess)]);
        let until = Instant::now() + ANCHOR_TIME;
        while Instant::now() < until {
            match device.next(None, Duration::from_millis(50))? {
                Next::Done(_, measured) => {
                    return measured.outcome.timing().map(|timing| timing.min_ns).ok_or_else(|| "it failed".into());
                }
                Next::Pending => {}
                Next::Idle => break,
            }
        }
        Err("it was not measured in time".into())
    }
}

/// Name and version of the compiler.
fn toolchain() -> String {
    tilewright::toolchain()
}

/// Class name for machines like this one.
pub fn class_here() -> String {
    let what = format!("{} {} {}", host::target(), host::allowed_cpus().len(), toolchain());
    // FNV-1a is the same on every machine and in every version.
    let mut hash = FnvHasher::default();
    hash.write(what.as_bytes());
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let cpu: String = host::target().cpu.chars().take(24).map(plain).collect();
    format!("{cpu}-{:08x}", hash.finish() as u32)
}

/// Current conditions of this machine, which affect the times of kernels.
fn conditions_here() -> Conditions {
    host::conditions(host::pin_cpus(1).first().copied().unwrap_or(0))
}
