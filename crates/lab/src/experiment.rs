//! Experiments of the papers and our own, each a table of runs of `tune`, with data and plots.
//!
//! An experiment is planned ([`ExperimentPlan::new`]) and executed ([`ExperimentPlan::carry_out`]) in a
//! folder, continuing from the results there.

mod beside;
mod contest;
mod data;
mod elsewhere;
mod finished;
mod folder;
mod hardware;
mod machine;
pub mod networks;
pub mod operators;
pub mod pictures;
mod plan;
mod planned;
mod results;
pub mod sequence;
mod table;

use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use serde_json::Value as Json;
use tilewright::Error;
use tilewright::format::count;
use tilewright_device::device::WorkerCommand;

use crate::Caller;
pub use beside::BesideRequest;
use finished::n_complete;
pub use hardware::Hardware;
use pictures::PICTURES;
pub use plan::ExperimentPlan;
use plan::{beside_search, n_trials};
pub use planned::Planned;
pub use table::{
    Arm, Arms, Centre, ComparedMoment, EXPERIMENTS, Experiment, Length, PlottedQuantity, ResultView, SpaceProblem,
    Transferred, TrialCount,
};

/// Request to run an experiment, or a part of it.
#[derive(Clone)]
pub struct ExperimentRequest {
    /// The experiment.
    pub experiment: &'static Experiment,
    /// Problems to run, by name; empty for all.
    pub problems: Vec<String>,
    /// Arms to run, by name; empty for all.
    pub arms: Vec<String>,
    /// Factor of the experiment's budget of each run.
    pub budget: f64,
    /// Number of repetitions of each arm on each problem; `None` for the experiment's.
    pub repeats: Option<u64>,
    /// Folder for data and plots; `None` for `experiments/` and the experiment's name.
    pub folder: Option<PathBuf>,
    /// Seed of the first repetition.
    pub seed: u64,
    /// Machine that kernels run on.
    pub hardware: Hardware,
}

impl ExperimentRequest {
    /// Request for a whole experiment with its defaults.
    pub fn new(experiment: &'static Experiment) -> ExperimentRequest {
        let (problems, arms) = (Vec::new(), Vec::new());
        let hardware = Hardware::cpus(1);
        ExperimentRequest { experiment, problems, arms, budget: 1.0, repeats: None, folder: None, seed: 0, hardware }
    }
}

/// Result of an experiment.
pub struct ExperimentResult {
    /// Contents of its `data.json`.
    pub data: Json,
    /// Folder of the experiment.
    pub folder: PathBuf,
    /// Number of runs requested.
    pub n_runs: usize,
    /// Number of those that are complete.
    pub n_complete: usize,
}

impl ExperimentPlan {
    /// Executes incomplete runs, races the results, and writes data, plots and tables, with results of other
    /// machines in the folders `beside`. When stopped it leaves what is complete, and the next call continues
    /// from there.
    ///
    /// # Errors
    /// Bad input if the folder holds something else, or one beside it does not belong to it; failure if
    /// workers do not start or files cannot be written.
    pub fn carry_out(
        mut self,
        beside: &[PathBuf],
        worker: &WorkerCommand,
        caller: Caller,
    ) -> Result<ExperimentResult, Error> {
        let _claim = self.claim_folder()?;
        self.elsewhere = elsewhere::read_all(beside, &self)?;
        elsewhere::check_distinct(&self.elsewhere, &self)?;
        caller.say(self.extent());
        let mut pace = TimeRatio::default();
        for (at, planned) in self.runs.iter().enumerate() {
            if caller.is_stopped() {
                break;
            }
            let most = self.most_seconds(planned);
            if let Some(marker) = self.marker_of(planned)? {
                pace.note(marker["seconds"].as_f64().unwrap_or(most), most);
                continue;
            }
            if self.is_complete(planned) {
                continue;
            }
            let left = self.runs[at..].iter().filter(|other| !self.is_complete(other));
            let left = pace.expect(left.map(|other| self.most_seconds(other)).sum());
            caller.say(format!("run {} of {}, {left}: {}", at + 1, self.runs.len(), planned.command()));
            let start = Instant::now();
            self.carry_out_run(planned, worker, caller)?;
            pace.note(start.elapsed().as_secs_f64(), most);
        }
        let mut finished = self.finished(caller)?;
        if self.experiment.is_raced {
            contest::hold_heats(&self, &mut finished, worker, caller)?;
            contest::hold(&self, &mut finished, worker, caller)?;
        }
        let data = results::write(&self, &finished)?;
        let (n_runs, n_complete) = (self.compared().count(), n_complete(&finished));
        Ok(ExperimentResult { data, folder: self.folder.clone(), n_runs, n_complete })
    }
}

/// Description of an experiment for a list.
#[derive(Debug, Serialize)]
pub struct ExperimentListing {
    /// Name on the command line.
    pub name: &'static str,
    /// Paper that it reproduces.
    pub paper: &'static str,
    /// Figure or table that it reproduces; empty if none.
    pub figure: &'static str,
    /// Subject of the comparison.
    pub compares: &'static str,
    /// Deviations from the paper; empty if none.
    pub differs: String,
    /// Cost in words.
    pub cost: String,
}

impl fmt::Display for ExperimentListing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ExperimentListing { name, paper, figure, compares, differs, cost } = self;
        let figure = if figure.is_empty() { String::new() } else { format!(", {figure}") };
        writeln!(f, "{name} ({paper}{figure}): {compares}\n    {cost}")?;
        if differs.is_empty() { Ok(()) } else { writeln!(f, "    differs: {differs}") }
    }
}

/// Lists all experiments: those of [`EXPERIMENTS`], [`operators`] and whole [`networks`] beside libraries,
/// [`sequence`] models, and [`pictures`].
///
/// # Errors
/// If a space does not exist on this machine.
pub fn list() -> Result<Vec<ExperimentListing>, Error> {
    let here = Hardware::cpus(1);
    let of_runs = EXPERIMENTS.iter().map(|experiment| {
        let Experiment { name, paper, figure, compares, .. } = *experiment;
        let differs = here.differences(experiment.on_cpus, experiment.differs);
        Ok(ExperimentListing { name, paper, figure, compares, differs, cost: experiment.cost(&here)?.to_string() })
    });
    let of_networks = ExperimentListing {
        name: networks::NAME,
        paper: networks::PAPER,
        figure: networks::FIGURE,
        compares: networks::COMPARES,
        differs: here.differences(networks::ON_CPUS, networks::DIFFERS),
        cost: networks::cost(networks::TIME).to_string(),
    };
    let of_operators = ExperimentListing {
        name: operators::NAME,
        paper: operators::PAPER,
        figure: operators::FIGURE,
        compares: operators::COMPARES,
        differs: here.differences(operators::ON_CPUS, operators::DIFFERS),
        cost: operators::cost().to_string(),
    };
    let of_sequences = ExperimentListing {
        name: sequence::NAME,
        paper: sequence::PAPER,
        figure: sequence::FIGURE,
        compares: sequence::COMPARES,
        differs: sequence::DIFFERS.to_owned(),
        cost: sequence::cost().to_string(),
    };
    let of_pictures = PICTURES.iter().map(|picture| {
        let pictures::Picture { name, paper, figure, compares, differs, .. } = *picture;
        let differs = differs.to_owned();
        Ok(ExperimentListing { name, paper, figure, compares, differs, cost: "nothing is measured".to_owned() })
    });
    of_runs.chain([Ok(of_operators), Ok(of_networks), Ok(of_sequences)]).chain(of_pictures).collect()
}

/// Cost of an experiment at a budget of 1.
pub struct Cost {
    /// Number of runs.
    pub n_runs: u64,
    /// Total number of trials, for runs limited by trials.
    pub n_trials: Option<u64>,
    /// Maximum duration in seconds.
    pub most_seconds: f64,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trials = self.n_trials.map_or(String::new(), |n| format!(", {}", count(n, "trial")));
        write!(f, "{}{trials}, at most {}", count(self.n_runs, "run"), minutes(self.most_seconds))
    }
}

impl Experiment {
    /// Cost of the experiment on a machine.
    ///
    /// # Errors
    /// If one of its spaces does not exist there.
    pub fn cost(&self, hardware: &Hardware) -> Result<Cost, Error> {
        let n_arms = self.arms().len() as u64;
        let n_of = |problems: u64, sources: u64| self.repeats * (n_arms * problems + sources);
        let n_runs = n_of(self.problems.len() as u64, self.sources.len() as u64);
        let mut trials = None;
        if self.length.trials != TrialCount::Any {
            let of_problem =
                |problem: &SpaceProblem| Ok(n_trials(self.length, &self.task(problem, hardware)?, 1.0).unwrap_or(0));
            let sum = |problems: &[SpaceProblem]| problems.iter().map(of_problem).sum::<Result<u64, Error>>();
            trials = Some(n_of(sum(self.problems)?, sum(self.sources)?));
        }
        let most_seconds = n_runs as f64 * (self.length.seconds + beside_search(self));
        Ok(Cost { n_runs, n_trials: trials, most_seconds })
    }
}

/// Formats seconds as minutes, or as hours if there are many.
fn minutes(seconds: f64) -> String {
    match seconds / 60.0 {
        minutes if minutes < 1.0 => "1 min".to_owned(),
        minutes if minutes < 120.0 => format!("{} min", minutes.ceil()),
        minutes => format!("{} h", (minutes / 60.0).ceil()),
    }
}

/// Ratio of the time that runs took to their maximum time.
#[derive(Default)]
struct TimeRatio {
    /// Seconds that complete runs took, and their maximum.
    took: f64,
    most: f64,
}

impl TimeRatio {
    fn note(&mut self, took: f64, most: f64) {
        self.took += took;
        self.most += most;
    }

    /// Estimates the time left for runs that take at most `most` seconds.
    fn expect(&self, most: f64) -> String {
        match self.most > 0.0 {
            true => format!("about {} left", minutes(most * self.took / self.most)),
            false => format!("at most {} left", minutes(most)),
        }
    }
}
