//! `replay`: how close a search comes to the optimum of a recorded space, without measuring anything.

use std::num::NonZero;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use tilewright_device::host;
use tilewright_formats::{TunerTask as TunedTask, carried_over, name_of};
use tilewright_search::{AtBudget, Config, ReplayPlan, Space, blind_option};

use super::count;
use super::formats::{FormatArgs, read_file, refuse};
use crate::error::OrBadInput;
use crate::output::{digits, grouped, message, table, write_result};

/// Arguments of `replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// Recorded space, of a format that `formats` lists, packed by gzip or not
    file: PathBuf,
    #[command(flatten)]
    format: FormatArgs,
    /// Task to replay, of several in the file, by its number or a part of its text [default: the only one]
    #[arg(long, value_name = "N|TEXT")]
    task: Option<String>,
    /// Search with its options, such as genetic:population=50; `tilewright searches` lists them
    #[arg(long, value_name = "NAME[:OPTIONS]")]
    search: String,
    /// Configurations tried, failures included; several budgets are separated by commas
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', required = true)]
    budget: Vec<NonZero<u64>>,
    /// Runs of the search, each with its own seed
    #[arg(long, value_name = "N", default_value = "20")]
    repeats: NonZero<usize>,
    /// Seed of the first run
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Maximum batch size of the search, as in `tune`; batches are smaller while little is known
    #[arg(long, value_name = "N", default_value = "1")]
    batch: NonZero<usize>,
    /// Runs in parallel; results do not depend on it
    #[arg(long, value_name = "N", default_value = "1")]
    threads: NonZero<usize>,
    /// File with results of other tasks, whose best fitting configurations are tried first; may be the same
    /// file; may be given several times
    #[arg(long, value_name = "FILE")]
    transfer: Vec<PathBuf>,
    /// T1 description that lists the parameters of T4 results, literally or as Python's ranges and
    /// comprehensions [default: the values that occur]
    #[arg(long, value_name = "FILE")]
    description: Option<PathBuf>,
}

/// Best configurations of other tasks, mapped to a space.
fn guesses(args: &ReplayArgs, task: &TunedTask, space: &Space) -> anyhow::Result<Vec<Config>> {
    let mut others = Vec::new();
    for path in &args.transfer {
        let read = read_file(path, None, &FormatArgs { given: None })?;
        others.extend(read.others(task).map_err(|error| refuse(path, &error))?);
    }
    let guesses = carried_over(space, &others);
    if !args.transfer.is_empty() {
        let (n, of) = (guesses.len() as u64, count(others.len() as u64, "other task"));
        message(&format!("{} carried over from {of}", count(n, "configuration")));
    }
    Ok(guesses)
}

/// Replays a search and shows the fraction of the optimum that it reaches.
///
/// # Errors
/// Bad input if a file cannot be read or the search does not exist.
pub fn run(args: &ReplayArgs, as_json: bool) -> anyhow::Result<()> {
    let file = args.file.as_path();
    let description = args.description.as_deref().map(|path| super::read_file(path, "a T1 description")).transpose()?;
    let read = read_file(file, description.as_deref(), &args.format)?;
    let name = name_of(file);
    let results = read.task(args.task.as_deref()).map_err(|error| refuse(file, &error))?;
    let recorded = results.space(&name).map_err(|error| refuse(file, &error))?;
    let task = results.task.clone();
    let of_file = read.notes.iter().chain(recorded.notes()).map(|note| format!("{}: {note}", args.file.display()));
    of_file.for_each(|note| message(&note));
    // A search that does not exist is refused below.
    let blind = blind_option(&args.search).ok().flatten();
    let blind = blind.map(|option| format!("{option} has no effect: a recorded space has no programs to look at"));
    blind.iter().for_each(|note| message(&format!("{}: {note}", args.search)));
    let guesses = guesses(args, &task, recorded.space())?;
    let n_guesses = guesses.len();
    let plan = ReplayPlan {
        search: args.search.clone(),
        budgets: args.budget.iter().map(|budget| budget.get()).collect(),
        n_repeats: args.repeats.get(),
        seed: args.seed,
        batch: args.batch.get(),
        // More threads than CPUs would only wait for each other.
        n_threads: args.threads.get().min(host::allowed_cpus().len().max(1)),
        guesses,
    };
    let replay = recorded.replay(&plan).or_bad_input("`tilewright searches` lists them")?;

    let overhead = replay.overhead_ms_per_evaluation;
    let json = json!({
        "space": name,
        "format": read.format.name,
        "search": plan.search,
        "repeats": plan.n_repeats,
        "seed": plan.seed,
        "configurations": recorded.len(),
        "valid": recorded.n_valid(),
        "task": task.to_string(),
        "transferred": n_guesses,
        "notes": read.notes.iter().chain(recorded.notes()).chain(&blind).collect::<Vec<_>>(),
        "budgets": replay.budgets.iter().map(|at| json!({
            "budget": at.budget,
            "mean_fraction_of_optimum": at.mean(),
            "std": at.std(),
        })).collect::<Vec<_>>(),
        "overhead_ms_per_evaluation": overhead,
    });
    let head = ["budget", "of the optimum", "std"].map(str::to_owned).to_vec();
    let row = |at: &AtBudget| vec![grouped(at.budget), format!("{:.4}", at.mean()), format!("{:.4}", at.std())];
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(replay.budgets.iter().map(row)).collect();
    let text = format!(
        "{name} ({}): {}, {} of them valid\n{}, {}\n\n{}\n{} ms of search for each configuration tried\n",
        read.format.name,
        count(recorded.len() as u64, "configuration"),
        grouped(recorded.n_valid()),
        plan.search,
        count(plan.n_repeats as u64, "run"),
        table(&rows),
        digits(overhead),
    );
    write_result(as_json, &json, &text)
}
