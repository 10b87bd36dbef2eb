//! `predict train`: a model from tuned problems.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use tilewright::Database;
use tilewright_lab::predict::architectures;
use tilewright_lab::predict::train::{Learning, OfRecords, scores_json};
use tilewright_learn::sequence::{ARCHITECTURES, Architecture};

use super::{RANDOM, TableArgs, TrainingArgs, listen, models_help};
use crate::command::{check_template, count};
use crate::error::bad_input;
use crate::output::write_result_of;

/// Arguments of `predict train`.
#[derive(Args, Debug)]
#[command(after_help = models_help())]
pub struct TrainArgs {
    /// Table of tuned problems, comma-separated values with a head, which needs --spec; or files of other
    /// tuners, each with the best configuration of its problems
    data: Vec<PathBuf>,
    /// Specification of the kernel, such as kernels/miopen/ConvAsm1x1U.toml [default: what files of other
    /// tuners say]
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Database of records to learn from in the place of a table; needs --template
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data", "spec"])]
    db: Option<PathBuf>,
    /// Template whose records are learnt from
    #[arg(long, value_name = "NAME", requires = "db")]
    template: Option<String>,
    /// File for the model; what is said about it goes beside it, into one whose name ends in .json as well
    #[arg(short, long, value_name = "MODEL")]
    output: PathBuf,
    /// Kind of model
    #[arg(long, value_name = "NAME", default_value = ARCHITECTURES[0].name)]
    model: String,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Go on with a training that was interrupted
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    table: TableArgs,
    #[command(flatten)]
    training: TrainingArgs,
}

/// Trains a model and writes it.
///
/// # Errors
/// Bad input if files do not fit or cannot be written; failure if interrupted.
pub fn run(args: &TrainArgs, as_json: bool) -> anyhow::Result<()> {
    match (&args.data[..], &args.spec, &args.db, &args.template) {
        ([_, ..], _, None, None) => learn_table(args, as_json),
        ([], None, Some(db), Some(template)) => learn_records(args, db, template, as_json),
        _ => {
            let ways = "DATA.csv --spec KERNEL.toml, or --db FILE --template NAME, or files of other tuners";
            Err(bad_input(format!("nothing to learn from (give {ways}; see `tilewright predict train --help`)")))
        }
    }
}

/// Makes the requested training.
fn learning(args: &TrainArgs) -> anyhow::Result<Learning> {
    let architecture = one_architecture(&args.model)?;
    args.training.check(&[architecture])?;
    let training = args.training.training(args.seed)?;
    let learnt_from = [&args.spec, &args.db].into_iter().flatten().chain(&args.data).map(PathBuf::as_path);
    let learnt_from: Vec<&Path> = learnt_from.collect();
    Ok(Learning::new(architecture, training, &args.output, &learnt_from, args.resume)?)
}

fn one_architecture(name: &str) -> anyhow::Result<Architecture> {
    match architectures(name)?[..] {
        [architecture] => Ok(architecture),
        _ => Err(bad_input(format!("--model {name}: one model is trained at a time (`predict evaluate` compares)"))),
    }
}

fn learn_table(args: &TrainArgs, as_json: bool) -> anyhow::Result<()> {
    let learning = learning(args)?;
    let data: Vec<&Path> = args.data.iter().map(PathBuf::as_path).collect();
    let table = args.table.read(&data, args.spec.as_deref())?;
    let learnt = listen(|caller| learning.learn_table(&table, caller))?;
    let json = json!({
        "kernel": table.kernel.name,
        "model": args.model,
        "rows": table.rows.len(),
        "violating": table.n_invalid,
        "seconds": learnt.seconds,
        "validation": scores_json(&learnt.scores),
        "output": args.output.to_string_lossy(),
    });
    let text = format!("{} {}written to {}\n", args.model, learnt.summary(), args.output.display());
    write_result_of(&learning.places.weights, as_json, &json, &text)
}

fn learn_records(args: &TrainArgs, db: &Path, template: &str, as_json: bool) -> anyhow::Result<()> {
    let learning = learning(args)?;
    check_template(template)?;
    if !args.table.filters.is_empty() || args.table.split != RANDOM {
        return Err(bad_input("--where and --split are for tables (leave them out with --db)"));
    }
    let database = Database::new(Some(db))?.called("--db");
    let learnt = listen(|caller| learning.learn_records(&database, template, caller))?;
    let OfRecords { n_workloads, n_examples, seconds } = learnt;
    let json = json!({
        "template": template,
        "model": args.model,
        "workloads": n_workloads,
        "configurations": n_examples,
        "seconds": seconds,
        "output": args.output.to_string_lossy(),
    });
    let text = format!(
        "{} learnt {} of {} in {seconds:.1} s\nwritten to {}\n",
        args.model,
        count(n_examples as u64, "configuration"),
        count(n_workloads as u64, "workload"),
        args.output.display()
    );
    write_result_of(&learning.places.weights, as_json, &json, &text)
}
