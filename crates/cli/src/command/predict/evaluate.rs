//! `predict evaluate`: models on problems that are held out, in the form of the paper's tables.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::Context;
use clap::Args;
use tilewright::Error;
use tilewright_lab::predict::architectures;
use tilewright_lab::predict::evaluate::{EvaluationRequest, evaluate};
use tilewright_learn::sequence::ARCHITECTURES;

use super::{TableArgs, TrainingArgs, listen, models_help};
use crate::error::bad_input;
use crate::output::write_result;

/// Arguments of `predict evaluate`.
#[derive(Args, Debug)]
#[command(after_help = models_help())]
pub struct EvaluateArgs {
    /// Table of tuned problems: comma-separated values with a head
    data: PathBuf,
    /// Specification of the kernel, such as kernels/miopen/ConvAsm1x1U.toml
    #[arg(long, value_name = "FILE")]
    spec: PathBuf,
    /// Kinds of models, separated by commas, or all
    #[arg(long, value_name = "NAMES", default_value = ARCHITECTURES[0].name)]
    models: String,
    /// Repetitions, each with its own rows held out and its own randomness
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Seed of the first repetition
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Widths of the beam
    #[arg(long, value_name = "K,...", value_delimiter = ',', default_value = "1,10,30,50,100",
        value_parser = clap::value_parser!(u16).range(1..=1000))]
    beam: Vec<u16>,
    /// Classical classifiers as well, one for each parameter
    #[arg(long)]
    baselines: bool,
    /// Folder for finished models and scores: what is in it is not done again
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    #[command(flatten)]
    table: TableArgs,
    #[command(flatten)]
    training: TrainingArgs,
}

/// Trains and scores models.
///
/// # Errors
/// Bad input if files do not fit or cannot be written; failure if interrupted.
pub fn run(args: &EvaluateArgs, as_json: bool) -> anyhow::Result<()> {
    let architectures = architectures(&args.models)?;
    args.training.check(&architectures)?;
    let training = args.training.training(args.seed)?;
    let data = args.table.read(&[&args.data], Some(&args.spec))?;
    let temporary = match &args.output {
        Some(_) => None,
        None => Some(tempfile::Builder::new().prefix("tilewright-predict-").tempdir().context("no temporary folder")?),
    };
    let folder = args.output.as_deref().or(temporary.as_ref().map(|temporary| temporary.path()));
    let folder = folder.expect("invariant: one of them is there").to_owned();
    std::fs::create_dir_all(&folder).map_err(|error| {
        bad_input(format!("cannot make the folder {}: {error} (give another with -o)", folder.display()))
    })?;
    let request = EvaluationRequest {
        architectures,
        n_seeds: args.seeds,
        training,
        widths: args.beam.iter().map(|&k| k.into()).collect(),
        baselines: args.baselines,
        folder,
    };
    let evaluation = listen(|caller| {
        let is_stopped = || caller.stop.load(Ordering::Relaxed);
        evaluate(&data, &request, caller).map_err(|error| match temporary.is_some() && is_stopped() {
            true => Error::failed("interrupted; nothing is kept (give a folder with -o to go on from)"),
            false => error,
        })
    })?;
    let json = serde_json::to_value(&evaluation).context("invariant: it is numbers and text by name")?;
    write_result(as_json, &json, &evaluation.text(&args.table.split))
}
