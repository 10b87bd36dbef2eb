//! `predict train`: a model from tuned problems.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use clap::Args;
use serde_json::{Value as Json, json};
use tilewright_ir::op::Workload;
use tilewright_learn::sequence::{ARCHITECTURES, Architecture, Example, Model, Training};
use tilewright_tune::predict::{Inputs, records};
use tilewright_tune::{EarlierTask, PassedOver};

use super::{
    BeamScore, Lesson, ModelPlaces, RANDOM, Table, TableArgs, TrainingArgs, architectures, beam_scores, checkpoint_of,
    models_help, score_json, teach, watch_interrupts,
};
use crate::command::{check_template, count, percent};
use crate::error::bad_input;
use crate::output::{message, write_result_of};
use tilewright::Database;
use tilewright::version::BUILD;
use tilewright::{judges, trials_of};

/// Widths of the beams by which a new model is judged.
const WIDTHS: [usize; 2] = [1, 10];

/// Arguments of `predict train`.
#[derive(Args, Debug)]
#[command(after_help = models_help())]
pub struct TrainArgs {
    /// Table of tuned problems: comma-separated values with a head; needs --spec
    data: Option<PathBuf>,
    /// Specification of the kernel, such as kernels/miopen/ConvAsm1x1U.toml
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
/// Bad input where files do not fit or cannot be written; failure where it is interrupted.
pub fn run(args: &TrainArgs, as_json: bool) -> anyhow::Result<()> {
    match (&args.data, &args.spec, &args.db, &args.template) {
        (Some(data), Some(spec), None, None) => learn_table(args, data, spec, as_json),
        (None, None, Some(db), Some(template)) => learn_records(args, db, template, as_json),
        _ => {
            let ways = "DATA.csv --spec KERNEL.toml, or --db FILE --template NAME";
            Err(bad_input(format!("nothing to learn from (give {ways}; see `tilewright predict train --help`)")))
        }
    }
}

/// The places of the model, and the checkpoint of a training that begins or goes on, unless the model is no
/// file.
fn places(args: &TrainArgs) -> anyhow::Result<(ModelPlaces, Option<PathBuf>)> {
    let places = ModelPlaces::at(&args.output)?;
    let learnt_from = [&args.data, &args.spec, &args.db].into_iter().flatten().map(PathBuf::as_path);
    places.check_apart(&args.output, &learnt_from.collect::<Vec<_>>())?;
    let checkpoint = places.description.is_some().then(|| checkpoint_of(&args.output));
    let name = || checkpoint_of(&args.output).display().to_string();
    match (args.resume, checkpoint.as_ref().is_some_and(|path| path.exists())) {
        (false, true) => {
            let ways = "go on with --resume, or remove it";
            Err(bad_input(format!("{} is of a training that was interrupted ({ways})", name())))
        }
        (true, false) => Err(bad_input(format!("there is no {} to go on with", name()))),
        _ => Ok((places, checkpoint)),
    }
}

fn learn_table(args: &TrainArgs, data: &Path, spec: &Path, as_json: bool) -> anyhow::Result<()> {
    let architecture = one_architecture(&args.model)?;
    args.training.check(&[architecture])?;
    let training = args.training.training(args.seed)?;
    let (places, checkpoint) = places(args)?;
    let table = Table::read(data, spec, &args.table)?;
    let kernel = &table.kernel;
    let all: Vec<usize> = (0..table.rows.len()).collect();
    let (train, validation) = table.divide(&all, args.seed);
    if train.is_empty() || validation.is_empty() {
        let n_rows = count(table.rows.len() as u64, "row");
        return Err(bad_input(format!("{n_rows} of {} cannot be divided (give more of them)", data.display())));
    }
    let inputs = Inputs::of(kernel, &table.at(&all));
    let vocabulary = inputs.vocabulary(kernel);
    let examples = |places: &[usize]| table.at(places).into_iter().map(|row| inputs.example(row)).collect();
    let lesson = Lesson { vocabulary: &vocabulary, train: examples(&train), validation: examples(&validation) };
    message(&format!(
        "{}: {} to learn from, {} to validate with, model {}",
        kernel.name,
        count(train.len() as u64, "row"),
        validation.len(),
        args.model
    ));
    let stop = watch_interrupts()?;
    let start = Instant::now();
    let (model, _) = teach(architecture, &lesson, &training, checkpoint.as_deref(), &stop)?;
    let save = |model: &Model, validation: Json| {
        let mut about = inputs.describe(kernel);
        about["data"] = table.about.clone();
        about["validation"] = validation;
        describe_training(args, &training, &mut about);
        places.write(model, &about)
    };
    let scores = beam_scores(&model, kernel, &inputs, &table.at(&validation), &WIDTHS, &stop);
    if scores.is_err() && stop.load(Ordering::Relaxed) {
        // The training may have taken hours.
        save(&model, Json::Null)?;
        anyhow::bail!("interrupted; {} is written, without scores", args.output.display());
    }
    let scores = scores?;
    let scores: Vec<_> = scores.iter().filter(|score| score.is_constrained).collect();
    // The scores are those of a model that has not seen these rows; the model that is kept may have.
    let lesson = lesson.in_full(architecture);
    let model = match lesson.train.len() > train.len() {
        true => teach(architecture, &lesson, &training, checkpoint.as_deref(), &stop)?.0,
        false => model,
    };
    let seconds = start.elapsed().as_secs_f64();
    let of_width = |at: &&BeamScore| {
        let mut json = score_json(&at.score);
        json["k"] = at.width.into();
        json
    };
    let of_validation: Json = scores.iter().map(of_width).collect::<Vec<_>>().into();
    save(&model, of_validation.clone())?;
    let json = json!({
        "kernel": kernel.name,
        "model": args.model,
        "rows": table.rows.len(),
        "violating": table.n_invalid,
        "seconds": seconds,
        "validation": of_validation,
        "output": args.output.to_string_lossy(),
    });
    let mut text = format!("{} learnt {} in {seconds:.1} s\n", args.model, count(lesson.train.len() as u64, "row"));
    for at in scores {
        let which = if at.width == 1 { "first answer".to_owned() } else { format!("best of {} answers", at.width) };
        text += &format!(
            "{which} for {} held-out rows: {} of the parameters, {} of the rows as a whole\n",
            validation.len(),
            percent(at.score.average_accuracy),
            percent(at.score.perfect)
        );
    }
    text += &format!("written to {}\n", args.output.display());
    write_result_of(&places.weights, as_json, &json, &text)
}

fn one_architecture(name: &str) -> anyhow::Result<Architecture> {
    match architectures(name)?[..] {
        [architecture] => Ok(architecture),
        _ => Err(bad_input(format!("--model {name}: one model is trained at a time (`predict evaluate` compares)"))),
    }
}

/// Adds what repeats a training.
fn describe_training(args: &TrainArgs, training: &Training, about: &mut Json) {
    about["model"] = args.model.as_str().into();
    about["training"] = serde_json::to_value(training).expect("invariant: options are plain data");
    about["version"] = BUILD.into();
}

fn learn_records(args: &TrainArgs, db: &Path, template: &str, as_json: bool) -> anyhow::Result<()> {
    let architecture = one_architecture(&args.model)?;
    args.training.check(&[architecture])?;
    let training = args.training.training(args.seed)?;
    let (places, checkpoint) = places(args)?;
    check_template(template)?;
    if !args.table.filters.is_empty() || args.table.split != RANDOM {
        return Err(bad_input("--where and --split are for tables (leave them out with --db)"));
    }
    let database = Database::named(db, "--db")?;
    let name = database.name();
    let store = database.open_to_read()?;
    let store = store.ok_or_else(|| bad_input(format!("there is no database {name} (give another one with --db)")))?;
    let mut tasks = Vec::new();
    let mut passed_over = PassedOver::default();
    let keys = store.tasks().map_err(|error| database.refuse(error))?;
    for key in keys.into_iter().filter(|key| key.template == template) {
        // Another version may know other workloads.
        let Ok(workload) = Workload::parse(&key.workload) else { continue };
        let found = trials_of(&store, &key, &judges(&workload, &key.target, key.threads), &mut passed_over);
        let records = found.map_err(|error| database.refuse(error))?;
        tasks.push(EarlierTask { workload, template: key.template, threads: key.threads, records });
    }
    if passed_over.total() > 0 {
        message(&format!("{name}: {passed_over}"));
    }
    let lessons = records::Lessons::of(template, &tasks);
    let lessons = lessons.map_err(|error| bad_input(format!("database {name}: {error}")))?;
    // Workloads are few: every tenth is held out, one at least.
    let n_workloads = lessons.examples.len();
    let is_held_out = |at: usize| at % 10 == n_workloads.min(10) - 1;
    let side = |held_out: bool| -> Vec<Example> {
        let chosen = lessons.examples.iter().enumerate().filter(|(at, _)| is_held_out(*at) == held_out);
        chosen.flat_map(|(_, examples)| examples.iter().cloned()).collect()
    };
    let n_examples: usize = lessons.examples.iter().map(Vec::len).sum();
    let lesson = Lesson { vocabulary: &lessons.vocabulary, train: side(false), validation: side(true) };
    let lesson = lesson.in_full(architecture);
    message(&format!(
        "{template}: {} of {} in {name}, model {}",
        count(n_examples as u64, "configuration"),
        count(n_workloads as u64, "workload"),
        args.model
    ));
    let stop = watch_interrupts()?;
    let start = Instant::now();
    let (model, _) = teach(architecture, &lesson, &training, checkpoint.as_deref(), &stop)?;
    let seconds = start.elapsed().as_secs_f64();
    let mut about = records::describe_template(template);
    about["data"] = json!({"file": name, "workloads": n_workloads, "configurations": n_examples});
    describe_training(args, &training, &mut about);
    places.write(&model, &about)?;
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
    write_result_of(&places.weights, as_json, &json, &text)
}
