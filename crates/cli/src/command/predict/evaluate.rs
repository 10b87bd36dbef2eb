//! `predict evaluate`: models on problems that are held out, in the form of the paper's tables.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::Context;
use clap::Args;
use tilewright::Error;
use tilewright_lab::predict::architectures;
use tilewright_lab::predict::evaluate::{BaselineFacts, BeamFacts, Evaluation, MeanStd, ModelFacts, Request, evaluate};
use tilewright_lab::predict::paper::BEAM_MODEL;
use tilewright_learn::sequence::ARCHITECTURES;

use super::{TableArgs, TrainingArgs, listen, models_help};
use crate::command::count;
use crate::error::bad_input;
use crate::output::{table, write_result};

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
/// Bad input where files do not fit or cannot be written; failure where it is interrupted.
pub fn run(args: &EvaluateArgs, as_json: bool) -> anyhow::Result<()> {
    let architectures = architectures(&args.models)?;
    args.training.check(&architectures)?;
    let training = args.training.training(args.seed)?;
    let data = args.table.read(&args.data, &args.spec)?;
    let temporary = match &args.output {
        Some(_) => None,
        None => Some(tempfile::Builder::new().prefix("tilewright-predict-").tempdir().context("no temporary folder")?),
    };
    let folder = args.output.as_deref().or(temporary.as_ref().map(|temporary| temporary.path()));
    let folder = folder.expect("invariant: one of them is there").to_owned();
    std::fs::create_dir_all(&folder).map_err(|error| {
        bad_input(format!("cannot make the folder {}: {error} (give another with -o)", folder.display()))
    })?;
    let request = Request {
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
    write_result(as_json, &json, &text(&evaluation, &args.table.split))
}

fn text(of: &Evaluation, split: &str) -> String {
    let Evaluation { models, baselines, paper, .. } = of;
    let cell = |MeanStd { mean, std }: MeanStd| format!("{:.2} ± {:.2}", 100.0 * mean, 100.0 * std);
    let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    let head = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let mut text = format!(
        "{}: {}{}, a tenth held out by split {}, {}; in per cent, mean ± standard deviation\n",
        of.kernel,
        count(of.rows as u64, "row"),
        paper.map_or(String::new(), |row| format!(" (the paper has {})", row.n_rows)),
        split,
        count(of.seeds, "repetition"),
    );
    if !baselines.is_empty() {
        let mut rows = vec![head(&["classifier", "average", "paper", "perfect"])];
        for BaselineFacts { scores, baseline, .. } in baselines {
            rows.push(vec![
                (*baseline).to_owned(),
                cell(scores.average_accuracy),
                figure(paper.and_then(|row| row.baseline(baseline))),
                cell(scores.perfect),
            ]);
        }
        text += &format!("\nClassifiers (table II)\n{}", table(&rows));
    }
    let yes_or_no = |is: bool| if is { "yes" } else { "no" }.to_owned();
    let is_trained = |name: &str| models.iter().any(|model| model.model == name);
    let titled = [(false, "Models, first answer (table III)"), (true, "Models, best of k answers (table IV)")];
    for (is_wide, title) in titled {
        let names = ["model", "k", "constraints", "average", "paper", "perfect", "paper", "same kernel", "valid", "ms"];
        let mut rows = vec![head(&names)];
        for model in models {
            for BeamFacts { scores, width, is_constrained, query_ms, .. } in beams(model, is_wide) {
                let theirs = paper.and_then(|row| row.model(model.model, *width, *is_constrained));
                rows.push(vec![
                    model.model.to_owned(),
                    width.to_string(),
                    yes_or_no(*is_constrained),
                    cell(scores.average_accuracy),
                    figure(theirs.map(|(average, _)| average)),
                    cell(scores.perfect),
                    figure(theirs.map(|(_, perfect)| perfect)),
                    cell(scores.perfect_equivalent),
                    cell(scores.valid),
                    format!("{:.2}", query_ms.median),
                ]);
            }
        }
        // Whatever was trained here, the paper's best model is what it is measured by.
        if let (Some(row), Some(model)) = (paper, models.first().filter(|_| !is_trained(BEAM_MODEL))) {
            for &BeamFacts { width, is_constrained, .. } in beams(model, is_wide) {
                let Some((average, perfect)) = row.model(BEAM_MODEL, width, is_constrained) else { continue };
                let [average, perfect] = [average, perfect].map(|theirs| figure(Some(theirs)));
                let none = String::new;
                let name = format!("{BEAM_MODEL} of the paper");
                rows.push(vec![name, width.to_string(), yes_or_no(is_constrained), none(), average, none(), perfect]);
            }
        }
        if rows.len() > 1 {
            text += &format!("\n{title}\n{}", table(&rows));
        }
    }
    let mut rows = vec![head(&["model", "seed", "best epoch", "epochs", "ms to load"])];
    for (model, run) in models.iter().flat_map(|model| model.repetitions.iter().map(move |run| (model, run))) {
        let load_ms = format!("{:.1}", run.load_ms);
        let [seed, best, epochs] = [run.seed, run.best_epoch, run.epochs].map(|n| n.to_string());
        rows.push(vec![model.model.to_owned(), seed, best, epochs, load_ms]);
    }
    text + &format!("\nTrainings\n{}", table(&rows))
}

/// The scores of a model by the first answer, or by the best of several.
fn beams(model: &ModelFacts, is_wide: bool) -> impl Iterator<Item = &BeamFacts> {
    model.beams.iter().filter(move |at| (at.width > 1) == is_wide)
}
