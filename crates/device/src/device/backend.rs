//! Kinds of hardware that run candidates, and what a device does differently for each of them.

use tilewright_ir::Target;
use tilewright_ir::target::{Arch, GpuApi};

use super::{DeviceError, DeviceOptions};
use crate::{cuda, host, opencl};

/// Maximum number of runners of a device.
const MOST_RUNNERS: usize = 4;
/// Maximum number of workers whose kernels run on an OpenCL CPU or a GPU: each has a context there, which
/// takes some hundred megabytes.
pub const MOST_WORKERS: usize = 8;
/// Minimum number of units of a large GPU.
const LARGE_GPU: u32 = 64;

/// Hardware that runs candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Cores of this machine.
    Cpu,
    /// Cores of this machine behind an OpenCL driver, which takes all of them for a kernel.
    OpenClCpu,
    /// GPU of this machine.
    Gpu,
    /// Another device, on which a command starts runners.
    Runner,
}

impl Backend {
    /// Determines the hardware for a target.
    ///
    /// # Errors
    /// If this machine has no such device, or nothing runs kernels for it.
    pub fn of(target: &Target, options: &DeviceOptions) -> Result<Backend, DeviceError> {
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

    /// Adapts options to the hardware: options that do not apply to it are reset.
    pub fn adapt(self, target: &Target, options: DeviceOptions) -> DeviceOptions {
        let most = match self {
            // Each worker has its own runner, with all its data.
            Backend::Runner => MOST_RUNNERS,
            // Kernels of a GPU use no core: all cores build.
            Backend::Gpu if target.gpu.is_some_and(|gpu| gpu.n_units >= LARGE_GPU) => usize::MAX,
            Backend::Cpu | Backend::OpenClCpu | Backend::Gpu => MOST_WORKERS,
        };
        let n_workers = options.n_workers.min(most);
        match self {
            Backend::Cpu => DeviceOptions { n_workers, ..options },
            // The device's clock measures a kernel's time, whatever the CPU's cores do meanwhile.
            Backend::OpenClCpu | Backend::Gpu | Backend::Runner => {
                DeviceOptions { cpus: Vec::new(), at_best_pace: false, n_workers, ..options }
            }
        }
    }

    /// Whether a GPU driver is involved, which may write files.
    pub fn has_driver(self) -> bool {
        match self {
            Backend::OpenClCpu | Backend::Gpu => true,
            Backend::Cpu | Backend::Runner => false,
        }
    }

    /// Whether timing a kernel leaves cores of this machine free; `cpus` are those that it is pinned to.
    pub fn leaves_cores(self, cpus: &[usize]) -> bool {
        match self {
            Backend::Cpu => !cpus.is_empty() && !host::cpus_beside(&host::allowed_cpus(), cpus).is_empty(),
            Backend::OpenClCpu => false,
            Backend::Gpu | Backend::Runner => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::WorkerCommand;

    #[test]
    fn builds_for_a_large_gpu_take_all_cores() {
        let options = |n_workers| {
            let worker = WorkerCommand { program: "true".into(), arguments: Vec::new() };
            DeviceOptions { n_workers, ..DeviceOptions::new(worker, 1) }
        };
        let check = |backend: Backend, target: &str, asked: usize, expected: usize| {
            let adapted = backend.adapt(&Target::named(target).unwrap(), options(asked));
            assert_eq!(adapted.n_workers, expected, "{backend:?} {target}");
        };
        check(Backend::Gpu, "sm_90a", 16, 16);
        check(Backend::Gpu, "sm_90a", 2, 2);
        check(Backend::Gpu, "opencl", 16, 8);
        check(Backend::Cpu, "x86-64-v4", 16, 8);
        check(Backend::Runner, "cortex-a72", 16, 4);
    }
}
