//! The tilewright command: finds, records, compares and shows fast kernels.
//!
//! The command is a library so that the Python wheel, a separate build, contains it too. Results go to
//! standard output, everything else to standard error. The exit code is 0 on success, 2 on bad input, and 1
//! if something failed.

#![forbid(unsafe_code)]

mod command;
mod error;
mod interrupts;
mod output;
mod progress;
mod status;
mod summary;

use std::ffi::OsString;
pub use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

#[cfg(feature = "fleet")]
use command::fleet;
use command::{
    bench, bench_args, best, check, compile, experiment, formats, network, predict, race, record_space, records,
    replay, report, run as run_model, show, space, store, tune, tune_args,
};
use output::message;

/// Finds the fastest kernel for a tensor operator by measuring on this machine
#[derive(Parser, Debug)]
#[command(name = "tilewright", version = tilewright::version::BUILD, max_term_width = 120, propagate_version = true)]
struct Cli {
    /// Print one JSON document on standard output
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Subcommands,
}

/// The subcommands.
#[derive(Subcommand, Debug)]
enum Subcommands {
    /// Search for the fastest kernel of a workload; running it again resumes
    Tune(Box<tune_args::TuneArgs>),
    /// Show the best recorded configuration
    Best(best::BestArgs),
    /// Time the best recorded kernel and other libraries in turns
    Bench(bench_args::BenchArgs),
    /// Race commands in turns: find the fastest, or check whether one became slower
    Race(race::RaceArgs),
    /// Show parameters, constraints and size of a search space
    Space(space::SpaceArgs),
    /// Show the code of a configuration: steps, IR, LLVM, assembly, an object
    Show(show::ShowArgs),
    /// Write the best recorded kernel as a library for C, Rust or Python programs
    Compile(compile::CompileArgs),
    /// Write records as JSON lines, or as files of other tuners
    Export(records::ExportArgs),
    /// Add records from JSON lines, or from files of other tuners
    Import(records::ImportArgs),
    /// Share winners with other machines: push, pull, merge, verify
    Store(store::StoreCommandArgs),
    /// Replay a search on a recorded space and show how close to the optimum it gets
    Replay(replay::ReplayArgs),
    /// Write the records as one page: curves, spaces, errors, comparisons
    Report(report::ReportArgs),
    /// Run an experiment: searches on workloads, repeated, with data and plots
    Experiment(experiment::ExperimentArgs),
    /// Measure a whole search space, or a sample of it, for `replay`; running it again resumes
    RecordSpace(record_space::RecordSpaceArgs),
    /// Predict parameters for new problems with a model trained on tuned ones
    Predict(predict::PredictArgs),
    /// Show the inputs of an ONNX model, its kernels, and what is not supported
    Check(check::CheckArgs),
    /// Run an ONNX model with the recorded kernels
    Run(run_model::RunArgs),
    /// Write a well-known network as an ONNX model with seeded weights
    Network(network::NetworkArgs),
    #[cfg(feature = "fleet")]
    /// Measure on this machine for remote tuners, until interrupted
    Serve(fleet::ServeArgs),
    #[cfg(feature = "fleet")]
    /// Show the devices of a fleet, or make keys for one
    Fleet(fleet::FleetCommandArgs),
    /// Show the devices, libraries and tools found on this machine
    Doctor,
    /// Write the C source of the runner, which runs kernels for `tune --runner` on a device without a
    /// compiler
    Runner,
    /// List the searches with their options
    Searches,
    /// List the formats of files of other tuners
    Formats,
    /// Build and run candidates for a tuner
    #[command(name = command::WORKER, hide = true)]
    Worker {
        /// Job of a worker for a kernel of the user's
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<std::ffi::OsString>,
    },
    /// Run a peer library for `bench`
    #[command(name = tilewright_peers::WORKER_SUBCOMMAND, hide = true)]
    PeerWorker,
}

/// Executes the command given by the arguments of this process.
pub fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        message(&format!("error: this is a bug in tilewright: {}", error::one_line(&panic.to_string())));
    }));
    // The hook has printed the message.
    std::panic::catch_unwind(run).unwrap_or(ExitCode::FAILURE)
}

fn run() -> ExitCode {
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    if !matches!(cli.command, Subcommands::Worker { .. }) {
        tilewright_device::limits::meet();
    }
    let json = cli.json;
    let result = match cli.command {
        Subcommands::Tune(args) => tune::run(&args, json),
        Subcommands::Best(args) => best::run(&args, json),
        Subcommands::Bench(args) => bench::run(&args, json),
        Subcommands::Race(args) => race::run(&args, json),
        Subcommands::Space(args) => space::run(&args, json),
        Subcommands::Show(args) => show::run(&args, json),
        Subcommands::Compile(args) => compile::run(&args, json),
        Subcommands::Export(args) => records::export(&args, json),
        Subcommands::Import(args) => records::import(&args, json),
        Subcommands::Store(args) => store::run(&args, json),
        Subcommands::Replay(args) => replay::run(&args, json),
        Subcommands::Report(args) => report::run(&args, json),
        Subcommands::Experiment(args) => experiment::run(&args, json),
        Subcommands::RecordSpace(args) => record_space::run(&args, json),
        Subcommands::Predict(args) => predict::run(&args, json),
        Subcommands::Check(args) => check::run(&args, json),
        Subcommands::Run(args) => run_model::run(&args, json),
        Subcommands::Network(args) => network::run(&args, json),
        #[cfg(feature = "fleet")]
        Subcommands::Serve(args) => fleet::serve(&args),
        #[cfg(feature = "fleet")]
        Subcommands::Fleet(args) => fleet::run(&args, json),
        Subcommands::Doctor => {
            let machine = tilewright::Machine::here();
            output::write_result(json, &serde_json::json!(machine), &machine.to_string())
        }
        Subcommands::Runner => {
            let source = tilewright_device::runner::SOURCE;
            output::write_result(json, &serde_json::json!({"source": source}), source)
        }
        Subcommands::Searches => {
            let (document, text) = tilewright::searches();
            let how = "Options are given behind the name: --search genetic:population=50,mutation=0.2";
            output::write_result(json, &document, &format!("{text}\n{how}\n"))
        }
        Subcommands::Formats => formats::run(json),
        Subcommands::Worker { arguments } => match tilewright::serve(&arguments) {
            true => Ok(()),
            // The worker has reported the reason to the process that started it.
            false => return ExitCode::FAILURE,
        },
        Subcommands::PeerWorker => tilewright_peers::worker_main().map_err(|e| anyhow::anyhow!("peer: {e}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !error::is_closed_pipe(&error) {
                message(&format!("error: {}", error::describe(&error)));
            }
            ExitCode::from(error::exit_code(&error))
        }
    }
}

/// Names of option values that are numbers, some with a unit.
const QUANTITIES: [&str; 6] = ["MIB", "MS", "N", "N[,N...]", "PERCENT", "SECONDS"];

/// Parses the arguments. `-1` and, for an option with a number, `-5%` are values, which the option may
/// refuse, rather than options.
fn parse(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Cli, clap::Error> {
    fn with_sign(arg: clap::Arg) -> clap::Arg {
        let names = arg.get_value_names().unwrap_or_default();
        let is_quantity = names.iter().any(|name| QUANTITIES.contains(&name.as_str()));
        if is_quantity { arg.allow_hyphen_values(true) } else { arg }
    }
    fn with_negative_numbers(command: clap::Command) -> clap::Command {
        command.allow_negative_numbers(true).mut_args(with_sign).mut_subcommands(with_negative_numbers)
    }
    let mut command = with_negative_numbers(Cli::command());
    let matches = command.try_get_matches_from_mut(words)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Prints help to standard output unchanged, and a refusal as one line.
fn refuse(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let shown = output::write_stdout(error.render().to_string().as_bytes());
            ExitCode::from(shown.err().map_or(0, |e| error::exit_code(&e)))
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            message(&format!("error: a subcommand is missing (see `{} --help`)", asked_subcommand()));
            ExitCode::from(2)
        }
        _ => {
            message(&format!("error: {}", condense(&error.render().to_string(), &asked_subcommand())));
            ExitCode::from(2)
        }
    }
}

/// Subcommand among the arguments, preceded by the program's name.
fn asked_subcommand() -> String {
    let names: Vec<String> = Cli::command().get_subcommands().map(|c| c.get_name().to_owned()).collect();
    let asked = std::env::args_os().skip(1).find_map(|a| names.iter().find(|name| a == ***name));
    asked.map_or("tilewright".to_owned(), |name| format!("tilewright {name}"))
}

/// Messages of the standard library about malformed numbers, with the hint for each.
const NUMBERS: [(&str, &str); 3] = [
    ("invalid digit found in string", "give a whole number, without a sign"),
    ("number too large to fit in target type", "give a smaller number"),
    ("number would be zero for non-zero type", "give 1 or more"),
];

/// Condenses a refusal of the argument parser to one line: the reason, its tips, and where to read on.
fn condense(text: &str, subcommand: &str) -> String {
    let mut reason = String::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if line.starts_with("Usage: ") || line.starts_with("For more information") {
            break;
        }
        let line = line.strip_prefix("error: ").unwrap_or(line);
        let separator = match line {
            _ if reason.is_empty() => "",
            tip if tip.starts_with("tip: ") => "; ",
            _ => " ",
        };
        reason += &format!("{separator}{line}");
    }
    for (ours, plainly) in NUMBERS {
        reason = reason.replace(ours, plainly);
    }
    format!("{} (see `{subcommand} --help`)", error::one_line(&reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn refusals_are_one_line() {
        let refused = |arguments: &[&str]| {
            let words = std::iter::once("tilewright").chain(arguments.iter().copied());
            condense(&parse(words).unwrap_err().render().to_string(), "tilewright tune")
        };
        assert_eq!(
            refused(&["tune"]),
            "the following required arguments were not provided: <WORKLOAD> (see `tilewright tune --help`)"
        );
        for (command, option, value) in [
            (&["race", "a", "b"][..], "--allow", "-5%"),
            (&["tune", "a"], "--stop-below", "-5%"),
            (&["tune", "a"], "--time", "-5s"),
            (&["tune", "a"], "--timeout", "-1s"),
            (&["tune", "a"], "--memory", "-5MB"),
            (&["tune", "a"], "--trials", "-2x"),
            (&["replay", "a"], "--budget", "-5x"),
        ] {
            let reason = refused(&[command, &[option, value]].concat());
            assert!(reason.starts_with(&format!("invalid value '{value}' for '{option} <")), "{reason}");
        }
        let bad_value = refused(&["tune", "matmul-256", "--trials", "many"]);
        assert!(bad_value.contains("'many'") && bad_value.contains("--trials") && !bad_value.contains('\n'));
        assert!(refused(&["tuna"]).contains("tune"));
        let number = "invalid value '-1' for '--seed <N>': give a whole number, without a sign";
        assert_eq!(
            refused(&["tune", "matmul-256", "--seed", "-1"]),
            format!("{number} (see `tilewright tune --help`)")
        );
        for words in [["replay", "x", "--seed", "-1"], ["bench", "matmul-256", "--threads", "-2"]] {
            assert!(refused(&words).contains("give a whole number, without a sign"), "{words:?}: {}", refused(&words));
        }
        assert!(refused(&["predict", "train", "-o", "m", "--seed", "-1"]).contains("'--seed <N>'"));
        assert!(refused(&["replay", "x", "--batch", "0"]).contains("give 1 or more"));
        assert!(refused(&["tune", "x", "--seed", "99999999999999999999"]).contains("give a smaller number"));
    }
}
