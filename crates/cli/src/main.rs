//! The tilewright command: finds, records, compares and shows fast kernels.
//!
//! Results go to standard output, everything else to standard error. The exit code is 0 on success, 2 where the input
//! is at fault, 1 where something failed on the way.

mod command;
mod database;
mod error;
mod output;
mod peer;
mod progress;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use command::{bench, best, doctor, records, searches, show, space, tune};
use output::message;

/// Finds the fastest kernel for a tensor operator by measuring on this machine
#[derive(Parser, Debug)]
#[command(name = "tilewright", version, max_term_width = 120, propagate_version = true)]
struct Cli {
    /// Print one JSON document on standard output
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

/// The subcommands.
#[derive(Subcommand, Debug)]
enum Command {
    /// Search for the fastest kernel of a workload; running it again resumes
    Tune(tune::TuneArgs),
    /// Show the best recorded configuration
    Best(best::BestArgs),
    /// Measure the best recorded kernel and other libraries side by side
    Bench(bench::BenchArgs),
    /// Show parameters, constraints and size of a search space
    Space(space::SpaceArgs),
    /// Show what a configuration turns into
    Show(show::ShowArgs),
    /// Write all records as JSON lines
    Export(records::ExportArgs),
    /// Add records from JSON lines
    Import(records::ImportArgs),
    /// Show what was found on this machine
    Doctor,
    /// List the searches with their options
    Searches,
    /// Build and run candidates for a tuner
    #[command(hide = true)]
    Worker,
    /// Run a peer library for `bench`
    #[command(name = peer::WORKER_SUBCOMMAND, hide = true)]
    PeerWorker,
}

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        message(&format!("error: this is a bug in tilewright: {}", error::one_line(&panic.to_string())));
    }));
    // The hook has said what there is to say.
    std::panic::catch_unwind(run).unwrap_or(ExitCode::FAILURE)
}

fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    let json = cli.json;
    let result = match cli.command {
        Command::Tune(args) => tune::run(&args, json),
        Command::Best(args) => best::run(&args, json),
        Command::Bench(args) => bench::run(&args, json),
        Command::Space(args) => space::run(&args, json),
        Command::Show(args) => show::run(&args, json),
        Command::Export(args) => records::export(&args, json),
        Command::Import(args) => records::import(&args, json),
        Command::Doctor => doctor::run(json),
        Command::Searches => searches::run(json),
        Command::Worker => tilewright_device::worker::serve().map_err(|e| anyhow::anyhow!("worker: {e}")),
        Command::PeerWorker => peer::worker_main(),
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

/// Help goes to standard output as it is; a refusal becomes one line.
fn refuse(error: &clap::Error) -> ExitCode {
    use clap::error::ErrorKind;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let shown = output::write_stdout(error.render().to_string().as_bytes());
            ExitCode::from(shown.err().map_or(0, |e| error::exit_code(&e)))
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            message("error: a subcommand is missing (see `tilewright --help`)");
            ExitCode::from(2)
        }
        _ => {
            message(&format!("error: {}", condense(&error.render().to_string())));
            ExitCode::from(2)
        }
    }
}

/// A refusal of the argument parser on one line: the reason, its tips, and where to read on.
fn condense(text: &str) -> String {
    let mut usage = None;
    let mut reason = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("Usage: ") {
            // Up to the first argument: the subcommand that was meant.
            let words = rest.split_whitespace().take_while(|word| word.bytes().all(|b| b.is_ascii_lowercase()));
            usage = Some(words.collect::<Vec<_>>().join(" "));
        } else if !line.starts_with("For more information") {
            reason.push(line.strip_prefix("error: ").unwrap_or(line));
        }
    }
    let subcommand = usage.filter(|words| !words.is_empty()).unwrap_or_else(|| "tilewright".to_owned());
    format!("{} (see `{subcommand} --help`)", error::one_line(&reason.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_arguments_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn refusals_are_one_line() {
        let refused = |arguments: &[&str]| {
            let words = std::iter::once("tilewright").chain(arguments.iter().copied());
            condense(&Cli::try_parse_from(words).unwrap_err().render().to_string())
        };
        assert_eq!(
            refused(&["tune"]),
            "the following required arguments were not provided: <WORKLOAD> (see `tilewright tune --help`)"
        );
        let bad_value = refused(&["tune", "matmul-256", "--trials", "many"]);
        assert!(bad_value.contains("'many'") && bad_value.contains("--trials") && !bad_value.contains('\n'));
        assert!(refused(&["tuna"]).contains("tune"));
    }
}
