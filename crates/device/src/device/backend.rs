//! Hardware that runs candidates, and what a device does differently for each.

use tilewright_ir::Target;
use tilewright_ir::target::{Arch, GpuApi};

use super::{DeviceError, Options};
use crate::{cuda, host, opencl};

/// Most runners of a device.
const MOST_RUNNERS: usize = 4;

/// Hardware that runs candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Cores of this machine.
    Cpu,
    /// Cores of this machine behind an OpenCL driver, which takes all of them for a kernel.
    OpenClCpu,
    /// A GPU of this machine.
    Gpu,
    /// Another device, on which a command starts runners.
    Runner,
}

impl Backend {
    /// Finds the hardware for a target.
    ///
    /// # Errors
    /// If this machine has no such device, or nothing runs kernels for it.
    pub fn of(target: &Target, options: &Options) -> Result<Backend, DeviceError> {
        Ok(match target.arch {
            Arch::X86_64 | Arch::Aarch64 if options.runner.is_some() => Backend::Runner,
            Arch::X86_64 | Arch::Aarch64 => Backend::Cpu,
            Arch::Gpu(GpuApi::OpenCl) if opencl::device_of(target)?.is_cpu => Backend::OpenClCpu,
            Arch::Gpu(GpuApi::OpenCl) => Backend::Gpu,
            Arch::Gpu(GpuApi::Cuda) => {
                cuda::device_of(target)?;
                Backend::Gpu
            }
            Arch::Gpu(GpuApi::AmdGpu) => return Err(DeviceError::NothingRuns { target: target.name() }),
        })
    }

    /// Options without what means nothing for this hardware.
    pub fn adapt(self, options: Options) -> Options {
        let n_workers = match self {
            // Each has a runner of its own, with all that it runs on.
            Backend::Runner => options.n_workers.min(MOST_RUNNERS),
            Backend::Cpu | Backend::OpenClCpu | Backend::Gpu => options.n_workers,
        };
        match self {
            Backend::Cpu => options,
            // Its own clock tells how long a kernel took, wherever the CPU's cores are meanwhile.
            Backend::OpenClCpu | Backend::Gpu | Backend::Runner => {
                Options { cpus: Vec::new(), at_best_pace: false, n_workers, ..options }
            }
        }
    }

    /// Whether a GPU's driver is at work, which may leave files behind.
    pub fn has_driver(self) -> bool {
        match self {
            Backend::OpenClCpu | Backend::Gpu => true,
            Backend::Cpu | Backend::Runner => false,
        }
    }

    /// Whether a kernel that is timed leaves cores of this machine to others; `cpus` are those that it is
    /// pinned to.
    pub fn leaves_cores(self, cpus: &[usize]) -> bool {
        match self {
            Backend::Cpu => !cpus.is_empty() && !host::cpus_beside(&host::allowed_cpus(), cpus).is_empty(),
            Backend::OpenClCpu => false,
            Backend::Gpu | Backend::Runner => true,
        }
    }
}
