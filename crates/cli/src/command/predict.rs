//! `predict`: parameters of untuned problems, from a model of tuned ones.

mod evaluate;
mod query;
mod train;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, Subcommand};
use tilewright_lab::predict::{RANDOM, RowSelection, TunedTable};
use tilewright_lab::{Caller, LabEvent};
use tilewright_learn::sequence::{ARCHITECTURES, Architecture, Training};

use super::on_interrupt;
use crate::error::bad_input;
use crate::output::message;

/// Arguments of `predict`.
#[derive(Args, Debug)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub struct PredictArgs {
    #[command(subcommand)]
    command: PredictCommand,
}

#[derive(Subcommand, Debug)]
enum PredictCommand {
    /// Learn from tuned problems, in a table or in a database of records
    Train(train::TrainArgs),
    /// Compare models on problems that are held out, as the paper's tables do
    Evaluate(evaluate::EvaluateArgs),
    /// Parameters for a problem, the likeliest first
    Query(query::QueryArgs),
}

/// Trains, compares or queries a model.
///
/// # Errors
/// Bad input if a file cannot be read or does not fit; failure if a training is interrupted.
pub fn run(args: &PredictArgs, as_json: bool) -> anyhow::Result<()> {
    match &args.command {
        PredictCommand::Train(args) => train::run(args, as_json),
        PredictCommand::Evaluate(args) => evaluate::run(args, as_json),
        PredictCommand::Query(args) => query::run(args, as_json),
    }
}

/// Choice of rows of a table, and their division.
#[derive(Args, Debug)]
struct TableArgs {
    /// Value that rows must have in a column, such as arch=gfx900; may be given several times
    #[arg(long = "where", value_name = "COLUMN=VALUE", value_parser = pair)]
    filters: Vec<(String, String)>,
    /// Held-out rows: random ones, or all rows of random groups, by a column that the specification names
    #[arg(long, value_name = "random|COLUMN", default_value = RANDOM)]
    split: String,
}

impl TableArgs {
    /// Selection of the rows, and their split.
    fn choice(&self) -> RowSelection {
        RowSelection { filters: self.filters.clone(), split: self.split.clone() }
    }

    /// Reads tables and the specification of their kernel.
    fn read(&self, data: &[&Path], specification: Option<&Path>) -> anyhow::Result<TunedTable> {
        let table = TunedTable::read(data, specification, &self.choice())?;
        table.warnings().for_each(|warning| message(&warning));
        Ok(table)
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected COLUMN=VALUE")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// Training options of models.
#[derive(Args, Debug)]
struct TrainingArgs {
    /// The largest number of passes over the rows [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    epochs: Option<u64>,
    /// Encoding of numbers: by size and divisors, or as the paper has it, one token for each number seen
    #[arg(long, value_name = "numeric|one-hot", default_value = "numeric")]
    encoding: String,
}

impl TrainingArgs {
    /// Checks that the options apply to one of these models.
    fn check(&self, architectures: &[Architecture]) -> anyhow::Result<()> {
        // Models with early stopping make passes; the others see all rows at once.
        if self.epochs.is_some() && !architectures.iter().any(|architecture| architecture.row().stops_early) {
            let names: Vec<&str> = architectures.iter().map(|architecture| architecture.row().name).collect();
            return Err(bad_input(format!("--epochs means nothing to {} (leave it out)", names.join(", "))));
        }
        Ok(())
    }

    /// Options of a training with this seed.
    fn training(&self, seed: u64) -> anyhow::Result<Training> {
        let encoding = serde_json::from_value(self.encoding.as_str().into());
        let known = |_| bad_input(format!("unknown encoding `{}`; there are numeric, one-hot", self.encoding));
        let mut training = Training { seed, encoding: encoding.map_err(known)?, ..Training::default() };
        training.epochs = self.epochs.map_or(training.epochs, |epochs| epochs as usize);
        Ok(training)
    }
}

/// Text that lists the models.
fn models_help() -> String {
    let rows = ARCHITECTURES.iter().map(|row| format!("  {:10} {} ({})", row.name, row.what, row.source));
    format!("Models:\n{}", rows.collect::<Vec<_>>().join("\n"))
}

/// Runs work of the lab, and shows its progress. The first interrupt ends the work in order, the second one
/// ends the program.
fn listen<T>(work: impl FnOnce(Caller) -> Result<T, tilewright::Error>) -> anyhow::Result<T> {
    let stop = Arc::new(AtomicBool::new(false));
    let raised = stop.clone();
    let leave = move || {
        if raised.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        message("stopping after the current epoch; interrupt again to stop at once");
    };
    on_interrupt(leave)?;
    Ok(work(Caller { stop: &stop, tell: &show })?)
}

/// Shows an event of the lab.
fn show(news: LabEvent) {
    if let LabEvent::Message(line) = news {
        message(&line);
    }
}
