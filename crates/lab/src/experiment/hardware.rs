//! Machine that an experiment's kernels run on.

use tilewright::format::count;
use tilewright::{CPU, DeviceSpec, Error, HOST};
use tilewright_device::host;
use tilewright_ir::Target;

/// Machine that an experiment's kernels run on: CPUs here, or a GPU.
#[derive(Clone, Debug)]
pub struct Hardware {
    /// Device as options name it: [`CPU`], or a GPU such as `opencl:1`.
    device: String,
    /// Threads of the CPU that a kernel may use; 1 of a GPU.
    pub threads: usize,
    /// Target of its code.
    pub target: Target,
    /// Name that the maker gives the CPU or the GPU.
    pub name: String,
}

impl Hardware {
    /// This machine's CPUs.
    pub fn cpus(threads: usize) -> Hardware {
        Hardware { device: CPU.to_owned(), threads, target: host::target(), name: host::cpu_name() }
    }

    /// Finds a device by its name, or CPUs with so many threads.
    ///
    /// # Errors
    /// Bad input where there is no such device, or it has no such threads.
    pub fn find(device: &str, threads: usize) -> Result<Hardware, Error> {
        let place = DeviceSpec { device, target: HOST, threads };
        let (target, name) = (place.runnable_target()?, place.hardware_name()?);
        Ok(Hardware { device: device.to_owned(), threads, target, name })
    }

    /// Whether it is a GPU, or another device that is programmed like one.
    pub fn is_gpu(&self) -> bool {
        self.target.gpu.is_some()
    }

    /// Option and value that name it on a command line.
    pub fn option(&self) -> [String; 2] {
        match self.device == CPU {
            true => ["--threads".to_owned(), self.threads.to_string()],
            false => ["--device".to_owned(), self.device.clone()],
        }
    }

    /// Threads of a CPU or the device, in words.
    pub fn extent(&self) -> String {
        if self.is_gpu() { self.device.clone() } else { count(self.threads as u64, "thread") }
    }

    /// Differences from a paper: those that a CPU brings, where it is one, and the others.
    pub fn differences(&self, on_cpus: &str, others: &str) -> String {
        let on_cpus = if self.is_gpu() { "" } else { on_cpus };
        [on_cpus, others].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::super::{EXPERIMENTS, ExperimentPlan, ExperimentRequest};
    use super::*;

    #[test]
    fn every_experiment_can_be_planned_for_gpus() {
        let (device, name) = ("cuda".to_owned(), "a card".to_owned());
        let hardware = Hardware { device, threads: 1, target: Target::named("sm_90a").unwrap(), name };
        for experiment in EXPERIMENTS {
            // A problem of each: spaces for GPUs are large.
            let problems = vec![experiment.problems[0].label.to_owned()];
            let (repeats, hardware) = (Some(1), hardware.clone());
            let plan = ExperimentPlan::new(&ExperimentRequest {
                problems,
                repeats,
                hardware,
                ..ExperimentRequest::new(experiment)
            });
            let plan = plan.unwrap_or_else(|error| panic!("{}: {error}", experiment.name));
            let words = plan.runs()[0].words();
            let is_there = |word: &str| words.iter().any(|other| other == word);
            assert!(is_there("--device") && !is_there("--threads"), "{words:?}");
            assert_eq!(is_there("--beyond-limits"), experiment.beyond_limits, "{words:?}");
        }
        let differs = |hardware: &Hardware| hardware.differences("a CPU", "ours");
        assert_eq!(differs(&Hardware::cpus(1)), "a CPU; ours");
    }
}
