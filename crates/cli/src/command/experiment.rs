//! `experiment`: experiments of the papers and our own, each a table of runs of `tune`, with data and plots.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tilewright::CPU;
use tilewright_lab::experiment::pictures::{PICTURES, Picture};
use tilewright_lab::experiment::sequence::{self, SequenceRequest};
use tilewright_lab::experiment::{
    self, BesideRequest, EXPERIMENTS, ExperimentPlan, ExperimentRequest, ExperimentResult, Hardware, networks,
    operators,
};

use super::bench_args::check_peer_path;
use super::{count, worker_command};
use crate::error::bad_input;
use crate::interrupts::Interrupts;
use crate::output::write_result;
use tilewright::format::seconds;

/// Arguments of `experiment`.
#[derive(Args, Debug)]
pub struct ExperimentArgs {
    /// Experiment to run [default: list them]
    name: Option<String>,
    /// List the experiments
    #[arg(long)]
    list: bool,
    /// Problem to run, by its name in tables; can be repeated [default: all]
    #[arg(long = "problem", value_name = "NAME")]
    problems: Vec<String>,
    /// Arm to run, by its name in tables; can be repeated [default: all]
    #[arg(long = "arm", value_name = "NAME")]
    arms: Vec<String>,
    /// Multiple of the usual length of each run
    #[arg(long, value_name = "SCALE", default_value_t = 1.0)]
    budget: f64,
    /// Time of each run, instead of a budget
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "budget")]
    time: Option<Duration>,
    /// Runs of each arm on each problem [default: set by the experiment]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    repeats: Option<u64>,
    /// Folder for data and plots [default: experiments/NAME]
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Folder of the same experiment's results on another machine, for comparison; can be repeated
    #[arg(long, value_name = "DIR")]
    beside: Vec<PathBuf>,
    /// Seed of the first of the repeats
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Threads that a kernel may use
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Device that runs kernels: cpu, or a GPU, as cuda, opencl or opencl:1; see `doctor`
    #[arg(long, value_name = "DEVICE", default_value = CPU)]
    device: String,
    /// Folder that is searched recursively for the libraries of other runtimes before the system's folders,
    /// for experiments that measure them
    #[arg(long, value_name = "FOLDER")]
    peer_path: Option<PathBuf>,
    /// Folder with the tables that an experiment learns from [default: kernels/miopen]
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
}

/// Runs an experiment, or lists them.
///
/// # Errors
/// Bad input if there is no such experiment, a search does not exist, or the folder holds something else;
/// failure if workers do not start or files cannot be written.
pub fn run(args: &ExperimentArgs, as_json: bool) -> anyhow::Result<()> {
    let Some(name) = args.name.as_ref().filter(|_| !args.list) else { return list(as_json) };
    if !(args.budget > 0.0 && args.budget <= 1e6) {
        return Err(bad_input(format!("--budget {} is not possible (give a number above 0)", args.budget)));
    }
    let held = match name.as_str() {
        operators::NAME => of_operators(args)?,
        networks::NAME => of_networks(args)?,
        sequence::NAME => of_sequences(args)?,
        name => match Picture::named(name) {
            Some(picture) => of_picture(args, picture)?,
            None => of_runs(args, name)?,
        },
    };
    let text = format!(
        "{} of {} in {}{}",
        held.n_complete,
        count(held.n_runs as u64, "run"),
        held.folder.display(),
        if held.n_complete < held.n_runs { "; run the same again to go on" } else { "" }
    );
    write_result(as_json, &held.data, &text)
}

/// Runs an experiment that is a table of runs of `tune`.
fn of_runs(args: &ExperimentArgs, name: &str) -> anyhow::Result<ExperimentResult> {
    let experiment = EXPERIMENTS.iter().find(|experiment| experiment.name == name).ok_or_else(|| {
        let of_runs = EXPERIMENTS.iter().map(|experiment| experiment.name);
        let others = [operators::NAME, networks::NAME, sequence::NAME]
            .into_iter()
            .chain(PICTURES.iter().map(|picture| picture.name));
        let known: Vec<&str> = of_runs.chain(others).collect();
        bad_input(format!("unknown experiment {name}; there are {}", known.join(", ")))
    })?;
    refuse(name, &[("--peer-path", args.peer_path.is_some()), ("--data", args.data.is_some())])?;
    let plan = ExperimentPlan::new(&ExperimentRequest {
        problems: args.problems.clone(),
        arms: args.arms.clone(),
        budget: args.time.map_or(args.budget, |time| time.as_secs_f64() / experiment.length.seconds),
        repeats: args.repeats,
        folder: args.output.clone(),
        seed: args.seed,
        hardware: Hardware::find(&args.device, args.threads)?,
        ..ExperimentRequest::new(experiment)
    })?;
    let interrupts = Interrupts::watch()?;
    let worker = worker_command()?;
    Ok(interrupts.listen(|caller| plan.carry_out(&args.beside, &worker, caller))?)
}

/// Runs the experiment that compares operators with libraries.
fn of_operators(args: &ExperimentArgs) -> anyhow::Result<ExperimentResult> {
    let (request, worker) = (beside_request(operators::NAME, operators::TIME, args)?, worker_command()?);
    Ok(Interrupts::watch()?.listen(|caller| operators::carry_out(&request, &worker, caller))?)
}

/// Runs the experiment of whole networks.
fn of_networks(args: &ExperimentArgs) -> anyhow::Result<ExperimentResult> {
    let (request, worker) = (beside_request(networks::NAME, networks::TIME, args)?, worker_command()?);
    Ok(Interrupts::watch()?.listen(|caller| networks::carry_out(&request, &worker, caller))?)
}

/// Makes the request of an experiment that tunes each problem and compares it once with others, if the
/// options apply to it.
fn beside_request(name: &str, time: Duration, args: &ExperimentArgs) -> anyhow::Result<BesideRequest> {
    let given = [
        ("--arm", !args.arms.is_empty()),
        ("--beside", !args.beside.is_empty()),
        ("--repeats", args.repeats.is_some()),
        ("--data", args.data.is_some()),
    ];
    refuse(name, &given)?;
    check_peer_path(args.peer_path.as_deref())?;
    Ok(BesideRequest {
        problems: args.problems.clone(),
        time: args.time.unwrap_or_else(|| time.mul_f64(args.budget)),
        folder: args.output.clone(),
        seed: args.seed,
        hardware: Hardware::find(&args.device, args.threads)?,
        peer_path: args.peer_path.clone(),
    })
}

/// Runs the experiment of models that predict parameters.
fn of_sequences(args: &ExperimentArgs) -> anyhow::Result<ExperimentResult> {
    let given = [
        ("--time", args.time.is_some()),
        ("--beside", !args.beside.is_empty()),
        ("--threads", args.threads != 1),
        ("--device", args.device != CPU),
        ("--peer-path", args.peer_path.is_some()),
    ];
    refuse(sequence::NAME, &given)?;
    let request = SequenceRequest {
        tables: args.problems.clone(),
        arms: args.arms.clone(),
        budget: args.budget,
        repeats: args.repeats.unwrap_or(sequence::REPEATS),
        data: args.data.clone().unwrap_or_else(|| sequence::DATA.into()),
        folder: args.output.clone(),
        seed: args.seed,
    };
    let interrupts = Interrupts::watch()?;
    Ok(interrupts.listen(|caller| sequence::carry_out(&request, caller))?)
}

/// Computes an illustration, which measures nothing.
fn of_picture(args: &ExperimentArgs, picture: &Picture) -> anyhow::Result<ExperimentResult> {
    let given = [
        ("--problem", !args.problems.is_empty()),
        ("--arm", !args.arms.is_empty()),
        ("--budget", args.budget != 1.0),
        ("--time", args.time.is_some()),
        ("--repeats", args.repeats.is_some()),
        ("--beside", !args.beside.is_empty()),
        ("--threads", args.threads != 1),
        ("--device", args.device != CPU),
        ("--peer-path", args.peer_path.is_some()),
        ("--data", args.data.is_some()),
    ];
    refuse(picture.name, &given)?;
    Ok(picture.carry_out(args.seed, args.output.clone())?)
}

/// Refuses options that do not apply to an experiment.
fn refuse(name: &str, given: &[(&str, bool)]) -> anyhow::Result<()> {
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((option, _)) => Err(bad_input(format!("{option} is not for {name} (leave it out)"))),
        None => Ok(()),
    }
}

fn list(as_json: bool) -> anyhow::Result<()> {
    let listed = experiment::list()?;
    let text: String = listed.iter().map(ToString::to_string).collect();
    write_result(as_json, &json!({"experiments": listed}), &text)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;

    use clap::Parser;

    use super::*;
    use crate::command::tune_args::TuneArgs;

    /// Arguments of `tune` as words of a command line.
    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct TuneWords {
        #[command(flatten)]
        args: TuneArgs,
    }

    #[test]
    fn the_command_of_a_run_is_what_is_run() {
        for experiment in EXPERIMENTS {
            let plan = ExperimentPlan::new(&ExperimentRequest::new(experiment));
            let plan = plan.unwrap_or_else(|error| panic!("{}: {error}", experiment.name));
            for planned in plan.runs() {
                let TuneWords { args } = TuneWords::try_parse_from(planned.words()).unwrap();
                let [workload] = &args.workloads().unwrap()[..] else { panic!("a run is of one workload") };
                let machine = args.machine().unwrap();
                let asked = args.request_for(&machine, workload, false).unwrap();
                let planned = planned.request(Path::new("")).unwrap().target(machine.0);
                // The name of an option in errors differs between the command and the library.
                let asked = format!("{asked:?}").replace("option: Some(\"--transfer\")", "option: None");
                assert_eq!(asked, format!("{planned:?}"));
            }
            let stems: HashSet<&str> = plan.runs().iter().map(|planned| planned.stem()).collect();
            assert_eq!(stems.len(), plan.runs().len(), "{}: each run has files of its own", experiment.name);
        }
    }
}
