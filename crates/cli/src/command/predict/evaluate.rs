//! `predict evaluate`: models on problems that are held out, in the form of the paper's tables.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tilewright_learn::baselines::{BASELINES, predict_classes};
use tilewright_learn::sequence::{ARCHITECTURES, Architecture};
use tilewright_tune::predict::{Inputs, Row, Score, score};

use super::paper::{BEAM_MODEL, PaperRow};
use super::{
    BeamScore, Lesson, ModelPlaces, Table, TableArgs, TrainingArgs, architectures, beam_scores, checkpoint_of,
    load_model, milliseconds, models_help, score_json, teach, watch_interrupts,
};
use crate::command::count;
use crate::error::bad_input;
use crate::output::{message, table, write_result, write_whole};
use tilewright::version::{BUILD, RELEASE};

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

/// What was trained, and with what it was scored; scores of anything else are not these.
#[derive(Debug, Serialize, Deserialize)]
struct Finished {
    key: Json,
    #[serde(flatten)]
    run: Run,
}

/// What came of one model of one repetition.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Run {
    seed: u64,
    epochs: u64,
    best_epoch: u64,
    /// How long the model's file takes to read.
    load_ms: f64,
    #[serde(rename = "beams")]
    scores: Vec<BeamScore>,
}

/// The repetitions of a model.
#[derive(Debug)]
struct Evaluated {
    name: &'static str,
    runs: Vec<Run>,
}

impl Evaluated {
    /// The scores of the repetitions, by width of the beam and whether it is constrained.
    fn beams(&self) -> BTreeMap<(usize, bool), Vec<&BeamScore>> {
        let mut beams: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for at in self.runs.iter().flat_map(|run| &run.scores) {
            beams.entry((at.width, at.is_constrained)).or_default().push(at);
        }
        beams
    }
}

/// One repetition: what is learnt from and what is held out.
struct Repetition<'a> {
    table: &'a Table,
    seed: u64,
    train: Vec<usize>,
    validation: Vec<usize>,
    test: Vec<usize>,
}

impl<'a> Repetition<'a> {
    fn new(table: &'a Table, seed: u64) -> anyhow::Result<Repetition<'a>> {
        let all: Vec<usize> = (0..table.rows.len()).collect();
        let (kept, test) = table.divide(&all, seed);
        // Another seed, or the groups that would be held out are those that are gone.
        let (train, validation) = table.divide(&kept, seed ^ u64::MAX);
        if train.is_empty() || validation.is_empty() || test.is_empty() {
            let n_rows = count(table.rows.len() as u64, "row");
            return Err(bad_input(format!("{n_rows} cannot be divided by seed {seed} (give more of them)")));
        }
        Ok(Repetition { table, seed, train, validation, test })
    }

    /// Trains a model and scores it, or reads what came of it where that is done.
    fn run(
        &self,
        architecture: Architecture,
        args: &EvaluateArgs,
        folder: &Path,
        stop: &AtomicBool,
    ) -> anyhow::Result<Run> {
        let Table { kernel, about, .. } = self.table;
        let name = architecture.row().name;
        let training = args.training.training(self.seed)?;
        let widths: Vec<usize> = args.beam.iter().map(|&k| k.into()).collect();
        let key = json!({
            "model": name,
            "data": {"fnv1a64": about["fnv1a64"], "where": about["where"], "split": about["split"]},
            "specification": kernel.text,
            "training": training,
            "release": RELEASE,
        });
        let scored_key = json!({"of": key, "widths": widths, "version": BUILD});
        let path = folder.join(format!("{name}-{}.safetensors", self.seed));
        let scores_path = path.with_extension("scores.json");
        let finished = std::fs::read(&scores_path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let Some(Finished { run, .. }) = finished.filter(|finished: &Finished| finished.key == scored_key) {
            message(&format!("{name}, seed {}: scored before", self.seed));
            return Ok(run);
        }
        let inputs = Inputs::of(kernel, &self.table.at(&[&self.train[..], &self.validation].concat()));
        let load = || {
            let start = Instant::now();
            load_model(&path).map(|(model, about)| (model, about, milliseconds(start)))
        };
        let (model, about, load_ms) = match load().ok().filter(|(_, about, _)| about["key"] == key) {
            Some(known) => {
                message(&format!("{name}, seed {}: trained before", self.seed));
                known
            }
            None => {
                let examples = |at: &[usize]| self.table.at(at).into_iter().map(|row| inputs.example(row)).collect();
                let vocabulary = inputs.vocabulary(kernel);
                let (train, validation) = (examples(&self.train), examples(&self.validation));
                let lesson = Lesson { vocabulary: &vocabulary, train, validation }.in_full(architecture);
                let n_rows = count(lesson.train.len() as u64, "row");
                message(&format!("{name}, seed {}: learning from {n_rows}", self.seed));
                let (model, last) = teach(architecture, &lesson, &training, Some(&checkpoint_of(&path)), stop)?;
                let mut about = inputs.describe(kernel);
                about["key"] = key.clone();
                about["epochs"] = last.epoch.into();
                about["best_epoch"] = last.best_epoch.into();
                ModelPlaces::at(&path)?.write(&model, &about)?;
                load()?
            }
        };
        let epochs = |what: &str| about[what].as_u64().unwrap_or_default();
        let (epochs, best_epoch) = (epochs("epochs"), epochs("best_epoch"));
        let scores = beam_scores(&model, kernel, &inputs, &self.table.at(&self.test), &widths, stop)?;
        let run = Run { seed: self.seed, epochs, best_epoch, load_ms, scores };
        let finished = Finished { key: scored_key, run: run.clone() };
        write_whole(&scores_path, |file| Ok(serde_json::to_writer(file, &finished)?))
            .with_context(|| format!("cannot write {}", scores_path.display()))?;
        Ok(run)
    }

    /// Average accuracy of each baseline.
    fn baselines(&self) -> anyhow::Result<Vec<(&'static str, Score)>> {
        let Table { kernel, .. } = self.table;
        let train = self.table.at(&[&self.train[..], &self.validation].concat());
        let test = self.table.at(&self.test);
        let numbers = |rows: &[&Row]| -> Vec<Vec<f64>> {
            rows.iter().map(|row| row.problem.iter().map(|&value| value as f64).collect()).collect()
        };
        let (features, asked) = (numbers(&train), numbers(&test));
        let mut scores = Vec::new();
        for row in BASELINES {
            message(&format!("{}, seed {}", row.name, self.seed));
            let mut answers: Vec<Vec<u32>> = vec![Vec::new(); test.len()];
            for parameter in 0..kernel.parameters.len() {
                let classes: Vec<u32> = train.iter().map(|row| row.answer[parameter]).collect();
                let predicted = predict_classes(row.baseline, &features, &classes, &asked, self.seed);
                let predicted =
                    predicted.with_context(|| format!("{} of {}", row.name, kernel.parameters[parameter].name))?;
                answers.iter_mut().zip(predicted).for_each(|(answer, class)| answer.push(class));
            }
            let answers: Vec<Vec<Vec<u32>>> = answers.into_iter().map(|answer| vec![answer]).collect();
            scores.push((row.name, score(kernel, &test, &answers)));
        }
        Ok(scores)
    }
}

/// Trains and scores models.
///
/// # Errors
/// Bad input where files do not fit or cannot be written; failure where it is interrupted.
pub fn run(args: &EvaluateArgs, as_json: bool) -> anyhow::Result<()> {
    let architectures = architectures(&args.models)?;
    args.training.check(&architectures)?;
    args.training.training(args.seed)?;
    let data = Table::read(&args.data, &args.spec, &args.table)?;
    let temporary = match &args.output {
        Some(_) => None,
        None => Some(tempfile::Builder::new().prefix("tilewright-predict-").tempdir().context("no temporary folder")?),
    };
    let folder = args.output.as_deref().or(temporary.as_ref().map(|temporary| temporary.path()));
    let folder = folder.expect("invariant: one of them is there");
    std::fs::create_dir_all(folder).map_err(|error| {
        bad_input(format!("cannot make the folder {}: {error} (give another with -o)", folder.display()))
    })?;
    let stop = watch_interrupts()?;
    let result = scores(args, &architectures, &data, folder, &stop);
    if temporary.is_some() {
        anyhow::ensure!(
            result.is_ok() || !stop.load(Ordering::Relaxed),
            "interrupted; nothing is kept (give a folder with -o to go on from)"
        );
    }
    let (models, baselines) = result?;
    let paper = paper_row(&data);
    let json = json!({
        "kernel": data.kernel.name,
        "rows": data.rows.len(),
        "data": data.about,
        "seeds": args.seeds,
        "models": models.iter().map(|model| model_json(model, paper)).collect::<Vec<_>>(),
        "baselines": baselines.iter().map(|(name, scores)| {
            let mut json = summary_json(&scores.iter().collect::<Vec<_>>());
            json["baseline"] = (*name).into();
            json["paper"] = paper.and_then(|row| row.baseline(name)).map_or(Json::Null, |average| {
                json!({"average_accuracy": average / 100.0})
            });
            json
        }).collect::<Vec<_>>(),
    });
    write_result(as_json, &json, &text(args, &data, &models, &baselines, paper))
}

fn model_json(model: &Evaluated, paper: Option<&PaperRow>) -> Json {
    let beam = |((k, constrained), scores): ((usize, bool), Vec<&BeamScore>)| {
        let mut json = summary_json(&scores.iter().map(|at| &at.score).collect::<Vec<_>>());
        json["k"] = k.into();
        json["constrained"] = constrained.into();
        json["query_ms"] = json!({"median": median_ms(&scores), "longest": longest_ms(&scores)});
        let theirs = paper.and_then(|row| row.model(model.name, k, constrained));
        json["paper"] = theirs.map_or(
            Json::Null,
            |(average, perfect)| json!({"average_accuracy": average / 100.0, "perfect": perfect / 100.0}),
        );
        json
    };
    let run = |run: &Run| json!({"seed": run.seed, "epochs": run.epochs, "best_epoch": run.best_epoch, "load_ms": run.load_ms});
    json!({
        "model": model.name,
        "repetitions": model.runs.iter().map(run).collect::<Vec<_>>(),
        "beams": model.beams().into_iter().map(beam).collect::<Vec<_>>(),
    })
}

/// The median time for a problem, as the mean over the repetitions.
fn median_ms(scores: &[&BeamScore]) -> f64 {
    scores.iter().map(|at| at.median_ms).sum::<f64>() / scores.len() as f64
}

/// The longest time for a problem.
fn longest_ms(scores: &[&BeamScore]) -> f64 {
    scores.iter().map(|at| at.longest_ms).fold(0.0, f64::max)
}

/// The paper's figures for the data, where they are of one data type that it has.
fn paper_row(data: &Table) -> Option<&'static PaperRow> {
    let at = data.kernel.fields.iter().position(|field| field.name == "data_type")?;
    let value = data.rows.first()?.problem[at];
    let is_one = data.rows.iter().all(|row| row.problem[at] == value);
    if is_one { PaperRow::of(&data.kernel.name, &data.kernel.fields[at].text(value)) } else { None }
}

type Baselines = Vec<(&'static str, Vec<Score>)>;

fn scores(
    args: &EvaluateArgs,
    architectures: &[Architecture],
    data: &Table,
    folder: &Path,
    stop: &AtomicBool,
) -> anyhow::Result<(Vec<Evaluated>, Baselines)> {
    let evaluated = |architecture: &Architecture| Evaluated { name: architecture.row().name, runs: Vec::new() };
    let mut models: Vec<Evaluated> = architectures.iter().map(evaluated).collect();
    let mut baselines = Baselines::new();
    for seed in args.seed..args.seed.saturating_add(args.seeds) {
        let repetition = Repetition::new(data, seed)?;
        for (architecture, model) in architectures.iter().zip(&mut models) {
            model.runs.push(repetition.run(*architecture, args, folder, stop)?);
        }
        if args.baselines {
            for (at, (name, score)) in repetition.baselines()?.into_iter().enumerate() {
                if baselines.len() == at {
                    baselines.push((name, Vec::new()));
                }
                baselines[at].1.push(score);
            }
        }
    }
    Ok((models, baselines))
}

/// Mean, and standard deviation of one repetition.
fn spread(scores: &[&Score], of: fn(&Score) -> f64) -> (f64, f64) {
    let mean = scores.iter().map(|score| of(score)).sum::<f64>() / scores.len() as f64;
    let squares: f64 = scores.iter().map(|score| (of(score) - mean).powi(2)).sum();
    (mean, (squares / (scores.len().max(2) - 1) as f64).sqrt())
}

fn summary_json(scores: &[&Score]) -> Json {
    let each: Vec<Json> = scores.iter().map(|score| score_json(score)).collect();
    let figure = |of: fn(&Score) -> f64| {
        let (mean, std) = spread(scores, of);
        json!({"mean": mean, "std": std})
    };
    json!({
        "average_accuracy": figure(|score| score.average_accuracy),
        "perfect": figure(|score| score.perfect),
        "perfect_equivalent": figure(|score| score.perfect_equivalent),
        "valid": figure(|score| score.valid),
        "repetitions": each,
    })
}

fn text(
    args: &EvaluateArgs,
    data: &Table,
    models: &[Evaluated],
    baselines: &Baselines,
    paper: Option<&PaperRow>,
) -> String {
    let cell = |scores: &[&Score], of: fn(&Score) -> f64| {
        let (mean, std) = spread(scores, of);
        format!("{:.2} ± {:.2}", 100.0 * mean, 100.0 * std)
    };
    let figure = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    let head = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let mut text = format!(
        "{}: {}{}, a tenth held out by split {}, {}; in per cent, mean ± standard deviation\n",
        data.kernel.name,
        count(data.rows.len() as u64, "row"),
        paper.map_or(String::new(), |row| format!(" (the paper has {})", row.n_rows)),
        args.table.split,
        count(args.seeds, "repetition"),
    );
    if !baselines.is_empty() {
        let mut rows = vec![head(&["classifier", "average", "paper", "perfect"])];
        for (name, scores) in baselines {
            let scores: Vec<&Score> = scores.iter().collect();
            rows.push(vec![
                (*name).to_owned(),
                cell(&scores, |score| score.average_accuracy),
                figure(paper.and_then(|row| row.baseline(name))),
                cell(&scores, |score| score.perfect),
            ]);
        }
        text += &format!("\nClassifiers (table II)\n{}", table(&rows));
    }
    let is_trained = |name: &str| models.iter().any(|model| model.name == name);
    let titled = [(false, "Models, first answer (table III)"), (true, "Models, best of k answers (table IV)")];
    for (is_wide, title) in titled {
        let names = ["model", "k", "constraints", "average", "paper", "perfect", "paper", "same kernel", "valid", "ms"];
        let mut rows = vec![head(&names)];
        for model in models {
            for ((k, is_constrained), beams) in model.beams().into_iter().filter(|((k, _), _)| (*k > 1) == is_wide) {
                let theirs = paper.and_then(|row| row.model(model.name, k, is_constrained));
                let scores: Vec<&Score> = beams.iter().map(|at| &at.score).collect();
                rows.push(vec![
                    model.name.to_owned(),
                    k.to_string(),
                    if is_constrained { "yes" } else { "no" }.to_owned(),
                    cell(&scores, |score| score.average_accuracy),
                    figure(theirs.map(|(average, _)| average)),
                    cell(&scores, |score| score.perfect),
                    figure(theirs.map(|(_, perfect)| perfect)),
                    cell(&scores, |score| score.perfect_equivalent),
                    cell(&scores, |score| score.valid),
                    format!("{:.2}", median_ms(&beams)),
                ]);
            }
        }
        // Whatever was trained here, the paper's best model is what it is measured by.
        if let (Some(row), Some(model)) = (paper, models.first().filter(|_| !is_trained(BEAM_MODEL))) {
            for &(k, is_constrained) in model.beams().keys().filter(|(k, _)| (*k > 1) == is_wide) {
                let Some((average, perfect)) = row.model(BEAM_MODEL, k, is_constrained) else { continue };
                let constraints = if is_constrained { "yes" } else { "no" };
                let [average, perfect] = [average, perfect].map(|theirs| figure(Some(theirs)));
                let none = String::new;
                let name = format!("{BEAM_MODEL} of the paper");
                rows.push(vec![name, k.to_string(), constraints.to_owned(), none(), average, none(), perfect]);
            }
        }
        if rows.len() > 1 {
            text += &format!("\n{title}\n{}", table(&rows));
        }
    }
    let mut rows = vec![head(&["model", "seed", "best epoch", "epochs", "ms to load"])];
    for (model, run) in models.iter().flat_map(|model| model.runs.iter().map(move |run| (model, run))) {
        let load_ms = format!("{:.1}", run.load_ms);
        let [seed, best, epochs] = [run.seed, run.best_epoch, run.epochs].map(|n| n.to_string());
        rows.push(vec![model.name.to_owned(), seed, best, epochs, load_ms]);
    }
    text + &format!("\nTrainings\n{}", table(&rows))
}
