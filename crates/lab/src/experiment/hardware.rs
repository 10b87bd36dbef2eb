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
    /// Number of CPU threads that a kernel may use; 1 for a GPU.
    pub threads: usize,
    /// Target of code generation.
    pub target: Target,
    /// Marketing name of the CPU or GPU.
    pub name: String,
}

impl Hardware {
    /// CPUs of this machine.
    pub fn cpus(threads: usize) -> Hardware {
        Hardware { device: CPU.to_owned(), threads, target: host::target(), name: host::cpu_name() }
    }

    /// Hardware by the name of a device, and a number of threads for the CPU.
    ///
    /// # Errors
    /// Bad input if there is no such device, or not that many threads.
    pub fn find(device: &str, threads: usize) -> Result<Hardware, Error> {
        let place = DeviceSpec { device, target: HOST, threads };
        let (target, name) = (place.runnable_target()?, place.hardware_name()?);
        Ok(Hardware { device: device.to_owned(), threads, target, name })
    }

    /// Whether it is programmed like a GPU.
    pub fn is_gpu(&self) -> bool {
        self.target.gpu.is_some()
    }

    /// Command line option and value that select it.
    pub fn option(&self) -> [String; 2] {
        match self.device == CPU {
            true => ["--threads".to_owned(), self.threads.to_string()],
            false => ["--device".to_owned(), self.device.clone()],
        }
    }

    /// Number of threads, or the device, in words.
    pub fn extent(&self) -> String {
        if self.is_gpu() { self.device.clone() } else { count(self.threads as u64, "thread") }
    }

    /// Deviations from a paper: `on_cpus`, if it is a CPU, and `others`.
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
            // One problem of each experiment: spaces for GPUs are large.
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
