//! `predict`: parameters of a problem that nobody has tuned, from a model of those that somebody has.

mod evaluate;
mod paper;
mod query;
mod train;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tilewright_learn::sequence::{
    ARCHITECTURES, Architecture, Checkpoint, Completions, Example, Kept, Model, ModelFiles, Progress, SequenceError,
    Training, Vocabulary,
};
use tilewright_tune::predict::{
    Inputs, KernelSpecification, LookAhead, Row, Score, Split, content_hash, read_rows, records, score,
};
use tilewright_tune::{Config, Task};

use super::{count, on_interrupt, read_file};
use crate::error::bad_input;
use crate::output::{Destination, check_apart, grouped, message, writable, write_whole};
use crate::stats::Quartiles;
use tilewright::{target_name, with_suffix};

/// How often a training says how far it is.
const LINE_EVERY: Duration = Duration::from_secs(2);

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

/// Trains, compares or asks a model.
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

/// Which rows of a table, and how they are divided.
#[derive(Args, Debug)]
struct TableArgs {
    /// Only rows with this value in this column, such as arch=gfx900; may be given several times
    #[arg(long = "where", value_name = "COLUMN=VALUE", value_parser = pair)]
    filters: Vec<(String, String)>,
    /// What is held out: random rows, or all rows of random groups, by a column that the specification names
    #[arg(long, value_name = "random|COLUMN", default_value = RANDOM)]
    split: String,
}

/// The split that holds out random rows.
const RANDOM: &str = "random";

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected COLUMN=VALUE")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// How models are trained.
#[derive(Args, Debug)]
struct TrainingArgs {
    /// The largest number of passes over the rows [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    epochs: Option<u64>,
    /// How models see numbers: by size and divisors, or as the paper has it, one token for each number seen
    #[arg(long, value_name = "numeric|one-hot", default_value = "numeric")]
    encoding: String,
}

impl TrainingArgs {
    /// Checks that the options mean something to one of these models.
    fn check(&self, architectures: &[Architecture]) -> anyhow::Result<()> {
        // Models that stop early make passes; the others see all rows at once.
        if self.epochs.is_some() && !architectures.iter().any(|architecture| architecture.row().stops_early) {
            let names: Vec<&str> = architectures.iter().map(|architecture| architecture.row().name).collect();
            return Err(bad_input(format!("--epochs means nothing to {} (leave it out)", names.join(", "))));
        }
        Ok(())
    }

    /// The options of a training with this seed.
    fn training(&self, seed: u64) -> anyhow::Result<Training> {
        let encoding = serde_json::from_value(self.encoding.as_str().into());
        let known = |_| bad_input(format!("unknown encoding `{}`; there are numeric, one-hot", self.encoding));
        let mut training = Training { seed, encoding: encoding.map_err(known)?, ..Training::default() };
        training.epochs = self.epochs.map_or(training.epochs, |epochs| epochs as usize);
        Ok(training)
    }
}

/// A table of a kernel's tuned problems.
struct Table {
    kernel: KernelSpecification,
    rows: Vec<Row>,
    /// How many of them violate constraints of the kernel.
    n_invalid: usize,
    split: Split,
    /// What it is and where it comes from, for files of models.
    about: Json,
}

impl Table {
    /// Reads a table and the specification of its kernel.
    fn read(data: &Path, specification: &Path, args: &TableArgs) -> anyhow::Result<Table> {
        let kernel = read_specification(specification)?;
        let bytes = read_file(data, "a table of tuned problems")?;
        let split = if args.split == RANDOM { Split::Random } else { Split::ByGroup };
        if split == Split::ByGroup && !kernel.groups.contains(&args.split) {
            let known = [RANDOM].into_iter().chain(kernel.groups.iter().map(String::as_str)).collect::<Vec<_>>();
            return Err(bad_input(format!("cannot split by `{}`; there are {}", args.split, known.join(", "))));
        }
        let group = (split == Split::ByGroup).then_some(args.split.as_str());
        let rows = read_rows(&kernel, &bytes, &args.filters, group);
        let rows = rows.map_err(|error| bad_input(format!("{}: {error}", data.display())))?;
        let n_invalid = rows.iter().filter(|row| !kernel.is_valid(&row.problem, &row.answer)).count();
        if n_invalid > 0 {
            let all = count(rows.len() as u64, "row");
            let reason = format!(
                "{n_invalid} of {all} violate{} constraints of {}",
                if n_invalid == 1 { "s" } else { "" },
                kernel.name
            );
            message(&format!("{reason}: they are learnt from and held out like the others"));
        }
        let filters = args.filters.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
        let about = json!({
            "file": data.display().to_string(),
            "fnv1a64": format!("{:016x}", content_hash(&bytes)),
            "rows": rows.len(),
            "where": filters,
            "split": args.split,
        });
        Ok(Table { kernel, rows, n_invalid, split, about })
    }

    /// The rows at these places.
    fn at(&self, places: &[usize]) -> Vec<&Row> {
        places.iter().map(|&at| &self.rows[at]).collect()
    }

    /// Rows at some places, divided once more into those to keep and those held out.
    fn divide(&self, places: &[usize], seed: u64) -> (Vec<usize>, Vec<usize>) {
        let rows: Vec<Row> = places.iter().map(|&at| self.rows[at].clone()).collect();
        let (kept, held_out) = tilewright_tune::predict::divide(&rows, self.split, seed);
        let back = |chosen: Vec<usize>| chosen.into_iter().map(|at| places[at]).collect();
        (back(kept), back(held_out))
    }
}

fn read_specification(path: &Path) -> anyhow::Result<KernelSpecification> {
    let name = path.display();
    let text = String::from_utf8(read_file(path, "a kernel specification")?)
        .map_err(|_| bad_input(format!("{name} is not UTF-8 (give a kernel specification)")))?;
    KernelSpecification::parse(&text).map_err(|error| bad_input(format!("{name}: {error}")))
}

/// The file that describes these weights. Its name is longer than theirs, so that neither another model's
/// file nor a foreign one has it.
fn description_of(weights: &Path) -> PathBuf {
    with_suffix(weights, ".json")
}

/// A model, and what its file says about it.
fn load_model(path: &Path) -> anyhow::Result<(Model, Json)> {
    let wanted = "a model that `tilewright predict train` wrote";
    // Earlier versions put it in the place of the ending.
    let earlier = path.with_extension("json");
    let about = Some(description_of(path)).filter(|path| path.exists() || !earlier.exists()).unwrap_or(earlier);
    let files = ModelFiles { weights: read_file(path, wanted)?, description: read_file(&about, wanted)? };
    Model::load(&files).map_err(|error| {
        let of = if matches!(error, SequenceError::Foreign { kept: Kept::Description, .. }) { &about } else { path };
        bad_input(format!("{}: {error} (give {wanted})", of.display()))
    })
}

/// The places of a model's two files.
struct ModelPlaces {
    name: String,
    weights: Destination,
    /// Beside what is no file, such as a device or a pipe, there is no place.
    description: Option<Destination>,
}

impl ModelPlaces {
    /// The places of a model of this name, once it is known that they can be written to.
    fn at(path: &Path) -> anyhow::Result<ModelPlaces> {
        let weights = writable(path, "the name of a file with -o")?;
        let description = match &weights {
            Destination::File(_) => Some(writable(&description_of(path), "the name of another file with -o")?),
            Destination::Stdout(_) | Destination::Special(_) | Destination::Descriptor(_) => None,
        };
        Ok(ModelPlaces { name: path.display().to_string(), weights, description })
    }

    /// Checks that a model leaves the files alone that it is learnt from.
    fn check_apart(&self, path: &Path, files: &[&Path]) -> anyhow::Result<()> {
        check_apart(path, &self.weights, files, "the name of another file with -o")?;
        self.description.as_ref().map_or(Ok(()), |place| {
            Ok(check_apart(&description_of(path), place, files, "the name of another file with -o")?)
        })
    }

    /// Writes a model there, both files or none.
    fn write(&self, model: &Model, about: &Json) -> anyhow::Result<()> {
        let ModelFiles { weights, description } = model.save(about);
        let write = || {
            let place = self.description.as_ref();
            let description = place.map(|place| place.stage(|file| file.write_all(&description))).transpose()?;
            self.weights.write(|file| file.write_all(&weights))?;
            description.map_or(Ok(()), |description| description.settle())
        };
        if self.description.is_none() {
            message(&format!("{} is no file: what there is to say about the model is not kept", self.name));
        }
        write().with_context(|| format!("cannot write {}", self.name))
    }
}

/// The architectures of these names, all of them for `all`.
fn architectures(names: &str) -> anyhow::Result<Vec<Architecture>> {
    if names == "all" {
        return Ok(ARCHITECTURES.iter().map(|row| row.architecture).collect());
    }
    let one = |name: &str| {
        let known = || ARCHITECTURES.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
        Architecture::named(name).ok_or_else(|| bad_input(format!("unknown model `{name}`; there are {}", known())))
    };
    names.split(',').map(str::trim).map(one).collect()
}

/// A text that lists the models there are.
fn models_help() -> String {
    let rows = ARCHITECTURES.iter().map(|row| format!("  {:10} {} ({})", row.name, row.what, row.source));
    format!("Models:\n{}", rows.collect::<Vec<_>>().join("\n"))
}

/// Raised by the first interrupt; the second one ends the program.
fn watch_interrupts() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let raised = stop.clone();
    let leave = move || {
        if raised.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        message("stopping after the epoch at hand; interrupt again to leave at once");
    };
    on_interrupt(leave)?;
    Ok(stop)
}

/// What a model learns from.
struct Lesson<'a> {
    vocabulary: &'a Vocabulary,
    train: Vec<Example>,
    validation: Vec<Example>,
}

impl Lesson<'_> {
    /// The same, learning from the validation examples too if the model has no other use for them.
    fn in_full(mut self, architecture: Architecture) -> Self {
        if !architecture.row().stops_early {
            self.train.extend_from_slice(&self.validation);
        }
        self
    }
}

/// Trains a model, and says on standard error how far it is; gives the last state of the training with it.
///
/// # Errors
/// Bad input where something does not fit; failure where it is interrupted, which leaves the checkpoint.
fn teach(
    architecture: Architecture,
    lesson: &Lesson,
    training: &Training,
    checkpoint: Option<&Path>,
    stop: &AtomicBool,
) -> anyhow::Result<(Model, Progress)> {
    let checkpoint_name = || checkpoint.map_or(String::new(), |path| path.display().to_string());
    let name = architecture.row().name;
    let mut told = Instant::now();
    let mut last = None;
    let mut report = |progress: &Progress| {
        last = Some(progress.clone());
        if told.elapsed() >= LINE_EVERY || progress.epoch == progress.n_epochs {
            told = Instant::now();
            message(&format!(
                "{name}, epoch {} of at most {}: loss {:.3}, validation {:.3}, best epoch {}",
                progress.epoch, progress.n_epochs, progress.train_loss, progress.validation_loss, progress.best_epoch
            ));
        }
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let Lesson { vocabulary, train, validation } = lesson;
    let kept = checkpoint.filter(|path| path.exists()).map(|path| read_file(path, "a checkpoint, or remove it"));
    let kept = kept.transpose()?;
    let mut keep = |bytes: &[u8]| checkpoint.map_or(Ok(()), |path| write_whole(path, |file| file.write_all(bytes)));
    let learnt = tilewright_learn::sequence::train(
        architecture,
        vocabulary,
        train,
        validation,
        training,
        checkpoint.is_some().then_some(Checkpoint { kept, keep: &mut keep }),
        &mut report,
    );
    let model = match learnt {
        Ok(model) => model,
        Err(SequenceError::Stopped { epochs }) => {
            let is_kept = checkpoint.is_some_and(Path::exists);
            let kept = if is_kept { format!("; {} is kept", checkpoint_name()) } else { String::new() };
            anyhow::bail!("interrupted after {} of {name}{kept}", count(epochs as u64, "epoch"));
        }
        Err(SequenceError::Unkept(error)) => {
            return Err(anyhow::Error::from(error).context(format!("cannot write {}", checkpoint_name())));
        }
        Err(error @ (SequenceError::Foreign { .. } | SequenceError::OtherTraining)) => {
            return Err(bad_input(format!("{}: {error}", checkpoint_name())));
        }
        Err(error) => return Err(bad_input(error)),
    };
    if let Some(path) = checkpoint.filter(|path| path.exists()) {
        std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok((model, last.expect("invariant: every training tells its epochs")))
}

/// Where a training keeps what it needs to go on.
fn checkpoint_of(model: &Path) -> PathBuf {
    with_suffix(model, ".checkpoint")
}

/// The score of a model with one width of the beam.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct BeamScore {
    #[serde(rename = "k")]
    width: usize,
    #[serde(rename = "constrained")]
    is_constrained: bool,
    #[serde(flatten)]
    score: Score,
    /// How long the answers to one problem take, constraints included: the median, and the longest.
    median_ms: f64,
    longest_ms: f64,
}

/// Configurations for one problem, the likeliest first, each a value for each parameter.
type Answers = Vec<Vec<u32>>;

/// Scores of a model on some rows, for each width of the beam, without constraints and with them.
fn beam_scores(
    model: &Model,
    kernel: &KernelSpecification,
    inputs: &Inputs,
    rows: &[&Row],
    widths: &[usize],
    stop: &AtomicBool,
) -> anyhow::Result<Vec<BeamScore>> {
    let runs: Vec<(usize, bool)> = widths.iter().flat_map(|&width| [(width, false), (width, true)]).collect();
    // For each run, the answers to each row, and how long they took.
    let mut found: Vec<(Vec<Answers>, Vec<f64>)> = vec![Default::default(); runs.len()];
    let mut n_inexact = 0;
    for row in rows {
        for (&(width, is_constrained), (answers, times_ms)) in runs.iter().zip(&mut found) {
            let start = Instant::now();
            // Each has its own, or what one has searched would make the next one faster.
            let look_ahead = || LookAhead::new(kernel, &row.problem).watched(watch_look_ahead(stop));
            let mut look_ahead = is_constrained.then(look_ahead);
            let completions = look_ahead.as_mut().map(|look_ahead| look_ahead as &mut dyn Completions);
            let of_row = model.answers(&inputs.problem(&row.problem), width, completions);
            times_ms.push(milliseconds(start));
            n_inexact += usize::from(look_ahead.is_some_and(|look_ahead| !look_ahead.is_exact()));
            anyhow::ensure!(!stop.load(Ordering::Relaxed), "interrupted; what is finished is kept");
            answers.push(of_row.into_iter().map(|answer| answer.values).collect());
        }
    }
    if n_inexact > 0 {
        message(&format!("{NOT_EXACT} ({n_inexact} of {} constrained answers)", rows.len() * widths.len()));
    }
    let score_of = |((width, is_constrained), (answers, times_ms)): ((usize, bool), (Vec<Answers>, Vec<f64>))| {
        let times_ms = Quartiles::of(&times_ms).expect("invariant: there are rows");
        let score = score(kernel, rows, &answers);
        BeamScore { width, is_constrained, score, median_ms: times_ms.median, longest_ms: times_ms.most }
    };
    Ok(runs.into_iter().zip(found).map(score_of).collect())
}

/// What is said where looking ahead was given up.
const NOT_EXACT: &str = "look-ahead is not exact: constraints tie too many parameters together; answers are valid, but likelier ones may be lost";

/// Says how far a look-ahead is that takes long, and ends it where the program is to stop.
fn watch_look_ahead(stop: &AtomicBool) -> impl FnMut(u64) -> ControlFlow<()> {
    let start = Instant::now();
    let mut told = start;
    move |n_steps| {
        if told.elapsed() >= LINE_EVERY {
            told = Instant::now();
            let seconds = start.elapsed().as_secs();
            message(&format!("looking ahead for {seconds} s: {} choices tried", grouped(n_steps)));
        }
        if stop.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn score_json(score: &Score) -> Json {
    serde_json::to_value(score).expect("invariant: a score is numbers by name")
}

/// A model's configurations for a task of its template, the likeliest first, with log probabilities.
///
/// # Errors
/// Bad input where the model is of other parameters.
fn ask_template(model: &Model, task: &Task, cold: bool, width: usize) -> anyhow::Result<Vec<(Config, f64)>> {
    let setting = &task.setting;
    let threads = u32::try_from(setting.n_threads).expect("no machine has so many CPUs");
    let target = target_name(&setting.target, cold);
    records::predict(model, &setting.workload, threads, &target, &task.space, width)
        .map_err(|error| bad_input(format!("template {}: {error}", task.template.name)))
}

/// The likeliest configurations for a task, by a model in a file.
///
/// # Errors
/// Bad input where the file holds no model of the task's template.
pub fn likely_configs(path: &Path, task: &Task, cold: bool, width: usize) -> anyhow::Result<Vec<Config>> {
    let (model, about) = load_model(path)?;
    let (name, wanted) = (path.display(), task.template.name);
    match (about["template"].as_str(), about["kernel"].as_str()) {
        (Some(template), _) if template == wanted => {}
        (Some(template), _) => {
            return Err(bad_input(format!("{name} is a model of template {template}, and {wanted} is tuned")));
        }
        (None, kernel) => {
            let kernel = kernel.unwrap_or("something else");
            return Err(bad_input(format!("{name} is a model of {kernel}, and template {wanted} is tuned")));
        }
    }
    Ok(ask_template(&model, task, cold, width)?.into_iter().map(|(config, _)| config).collect())
}
