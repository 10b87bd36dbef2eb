//! Device specifications: machines by the names that options give them.

use std::fmt;

use tilewright_device::runner::{self, Hello};
use tilewright_device::{cuda, host, opencl};
use tilewright_ir::Target;
use tilewright_ir::target::GENERIC;

use crate::error::{Error, ErrorKind, Setting};
use crate::format::count;
use crate::import::MOST_THREADS;
use crate::request::OnRunner;

/// Device name of this machine's CPU.
pub const CPU: &str = "cpu";
/// Target name of this machine's CPU.
pub const HOST: &str = "host";

/// Machine as options specify it.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSpec<'a> {
    /// Device that runs kernels: [`CPU`], or `opencl`, `opencl:N`, `cuda` or `cuda:N`.
    pub device: &'a str,
    /// Target of a CPU to generate code for: [`HOST`], or the name of a predefined one.
    pub target: &'a str,
    /// Number of CPU threads that a kernel may use.
    pub threads: usize,
}

/// Names of the predefined targets, for messages.
pub fn target_names() -> String {
    std::iter::once(HOST).chain(GENERIC.iter().map(|generic| generic.name)).collect::<Vec<_>>().join(", ")
}

/// Formats the place as threads of the CPU, or as a device.
impl fmt::Display for DeviceSpec<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&if self.device == CPU { count(self.threads as u64, "thread") } else { self.device.to_owned() })
    }
}

/// Target with which code for `target` is tested here: `target` itself if this machine can run it, otherwise
/// this machine, on which the same program computes the same results. Constants of libraries are prepared
/// that way.
pub fn target_here(target: &Target) -> Target {
    let is_here = |host: &Target| target.arch == host.arch && target.vector_bits <= host.vector_bits;
    Some(host::target()).filter(|host| target.gpu.is_none() && !is_here(host)).unwrap_or_else(|| target.clone())
}

/// Error for more threads than a machine has.
fn not_possible(threads: usize, place: &str, most: usize) -> Error {
    Error::setting(Setting::Threads, format!(" {threads} is not possible{place} (give 1 to {most})"))
}

impl DeviceSpec<'_> {
    /// Error for threads given with a device that is not a CPU.
    fn no_threads(&self, device: &str) -> Error {
        Error::setting(Setting::Threads, format!(" is for CPUs (leave it out for {device})"))
    }

    /// Resolves the target.
    ///
    /// # Errors
    /// Bad input if there is no such device, or no target has this name.
    pub fn target(&self) -> Result<Target, Error> {
        if self.device != CPU {
            return Ok(self.of_device()?.0);
        }
        if self.target == HOST {
            return Ok(host::target());
        }
        let names = target_names();
        let unknown = || Error::input(format!("unknown target `{}`; there are {names}", self.target));
        Target::named(self.target).ok_or_else(unknown)
    }

    /// Marketing name of the CPU or device.
    ///
    /// # Errors
    /// Bad input if there is no such device.
    pub fn hardware_name(&self) -> Result<String, Error> {
        if self.device == CPU { Ok(host::cpu_name()) } else { Ok(self.of_device()?.1) }
    }

    /// Version of the GPU's code generator: its driver, or NVIDIA's assembler.
    ///
    /// # Errors
    /// Bad input if there is no such device.
    pub fn code_version(&self) -> Result<String, Error> {
        let (target, _) = self.of_device()?;
        let missing = |why: &dyn fmt::Display| Error::setting(Setting::Device, format!(" {}: {why}", self.device));
        if opencl::is_opencl(&target) {
            let device = opencl::device_of(&target).map_err(|why| missing(&why))?;
            return device.maker().map_err(|why| missing(&why));
        }
        Ok(cuda::PtxAssembler::find(&target.cpu).name())
    }

    /// Target and name of a device that is not the CPU.
    fn of_device(&self) -> Result<(Target, String), Error> {
        let (kind, number) = self.device.split_once(':').unwrap_or((self.device, "0"));
        let number = number.parse::<u32>().ok().filter(|_| matches!(kind, "opencl" | "cuda"));
        let number = number.ok_or_else(|| {
            let known = "cpu, opencl, opencl:N, cuda or cuda:N";
            Error::input(format!("unknown device `{}` (give {known}; see `doctor`)", self.device))
        })?;
        if self.threads != 1 {
            return Err(self.no_threads(self.device));
        }
        let missing = |why: &dyn fmt::Display| Error::setting(Setting::Device, format!(" {}: {why}", self.device));
        if kind == "cuda" {
            let device = cuda::device(number).map_err(|why| missing(&why))?;
            return Ok((device.target, device.name));
        }
        let device = opencl::device(number as usize).map_err(|why| missing(&why))?;
        Ok((device.target, device.name))
    }

    /// Resolves the target of kernels that are to run on this machine.
    ///
    /// # Errors
    /// Bad input if there is no such target, it is another kind of machine, or there are fewer CPUs than
    /// threads.
    pub fn runnable_target(&self) -> Result<Target, Error> {
        let target = self.target()?;
        if self.device == CPU {
            let host = host::target();
            if target.arch != host.arch || target.vector_bits > host.vector_bits {
                let reason = format!(
                    "kernels for target `{}` do not run on this machine, which is {}",
                    self.target,
                    host.name()
                );
                return Err(Error::of(ErrorKind::OtherMachine, reason));
            }
            self.check_cpus()?;
        }
        Ok(target)
    }

    /// Resolves the target of a remote device by the command that starts its runner; without a command, the
    /// target of this machine.
    ///
    /// # Errors
    /// Bad input if the command starts no runner, or code for the target does not run there; and as
    /// [`DeviceSpec::runnable_target`].
    pub fn with_runner(&self, command: Option<&str>) -> Result<(Target, Option<OnRunner>), Error> {
        let Some(command) = command else { return Ok((self.runnable_target()?, None)) };
        let (target, hello) = self.of_runner(command)?;
        let (most, threads) = (hello.cores, self.threads);
        if !(1..=most).contains(&threads) {
            return Err(not_possible(threads, " on that device", most));
        }
        Ok((target, Some(OnRunner { command: command.to_owned(), is_emulated: hello.is_emulated })))
    }

    /// Resolves the target of a runner's device, with the runner's greeting.
    ///
    /// # Errors
    /// As [`DeviceSpec::with_runner`].
    pub fn of_runner(&self, command: &str) -> Result<(Target, Hello), Error> {
        let refuse = |why: &dyn fmt::Display| Error::setting(Setting::Runner, format!(": {why}"));
        if self.device != CPU {
            let device = self.device.to_owned();
            let reason = "a runner is for CPUs, and the device is another";
            return Err(Error::of(ErrorKind::NotOnDevice { device }, reason));
        }
        let hello = runner::look(command).map_err(|why| refuse(&why))?;
        let target = if self.target == HOST { hello.target.clone() } else { self.target()? };
        if let Some(obstacle) = hello.obstacle(&target) {
            let hint = "name no target, and it is what the device is";
            return Err(refuse(&format!("code for {} does not run there: {obstacle} ({hint})", target.cpu)));
        }
        Ok((target, hello))
    }

    /// Resolves the target of code that is to run on this machine's CPU.
    ///
    /// # Errors
    /// As [`DeviceSpec::runnable_target`], and bad input if a device is requested.
    pub fn cpu_target(&self) -> Result<Target, Error> {
        if self.device != CPU {
            let device = self.device.to_owned();
            return Err(Error::of(ErrorKind::NotOnDevice { device }, "commands and kernels of yours are for CPUs"));
        }
        self.runnable_target()
    }

    /// Resolves the target of a library: this machine's or another CPU, or a GPU.
    ///
    /// # Errors
    /// Bad input if there is no such target or device, or no machine has that many threads.
    pub fn code_target(&self) -> Result<Target, Error> {
        if self.device != CPU || self.target == HOST {
            return self.runnable_target();
        }
        self.check_threads()?;
        let target = self.target()?;
        if target.gpu.is_some() && self.threads != 1 {
            return Err(self.no_threads(self.target));
        }
        Ok(target)
    }

    /// Checks the number of threads; against this machine's CPUs only if the target is this machine.
    ///
    /// # Errors
    /// Bad input if no machine, or not this one, has that many.
    pub fn check_threads(&self) -> Result<(), Error> {
        if self.target == HOST {
            self.check_cpus()
        } else if (1..=MOST_THREADS).contains(&self.threads) {
            Ok(())
        } else {
            Err(not_possible(self.threads, "", MOST_THREADS))
        }
    }

    /// Whether this machine has as many CPUs as there are threads.
    fn check_cpus(&self) -> Result<(), Error> {
        let most = host::allowed_cpus().len().max(1);
        if (1..=most).contains(&self.threads) {
            return Ok(());
        }
        Err(not_possible(self.threads, " on this machine", most))
    }
}
