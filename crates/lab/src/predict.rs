//! Models that predict a kernel's parameters without a search: training, querying and comparing them.

pub mod baselines;
pub mod evaluate;
pub mod paper;
pub mod query;
mod tables;
pub mod train;
mod tree;

use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use flate2::read::MultiGzDecoder;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tilewright::file::{self, Destination, check_apart, writable, write_whole};
use tilewright::format::{count, grouped};
use tilewright::{Caches, Error, target_name, with_suffix};
use tilewright_formats::{FormatError, detect};
use tilewright_learn::sequence::{
    ARCHITECTURES, Architecture, Checkpoint, Completions, Epoch, Example, FileKind, ModelFiles, SequenceError,
    SequenceModel, Training, TrainingData, TrainingProgress, Vocabulary,
};
use tilewright_search::Config;
use tilewright_tune::Task;
use tilewright_tune::predict::{
    HoldOut, InputFields, KernelSpecification, LookAhead, Score, TunedProblem, content_hash, read_rows, records, score,
};

use crate::stats::Quartiles;
use crate::{Caller, OrFailed};

/// Interval of a training's progress messages.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Maximum size in bytes of a decompressed table.
const MOST_BYTES: u64 = 1 << 30;

/// Name of the split that holds out random rows.
pub const RANDOM: &str = "random";

/// Selection of a table's rows, and their split.
#[derive(Debug, Clone)]
pub struct RowSelection {
    /// Values that rows must have in these columns.
    pub filters: Vec<(String, String)>,
    /// Name of the split: [`RANDOM`], or the column whose groups are held out as a whole.
    pub split: String,
}

/// Table of a kernel's tuned problems.
pub struct TunedTable {
    /// The kernel.
    pub kernel: KernelSpecification,
    /// Problems with their best configurations.
    pub rows: Vec<TunedProblem>,
    /// Number of rows that violate the kernel's constraints.
    pub n_invalid: usize,
    split: HoldOut,
    /// Irregularities of the files that it was read from.
    notes: Vec<String>,
    /// Description and origin of the table, for models' files.
    pub about: Json,
}

impl TunedTable {
    /// Reads a table and the specification of its kernel, or results of other tuners, each with its best
    /// configuration: without a specification, these describe their fields and parameters themselves.
    ///
    /// # Errors
    /// Bad input if one of the files is malformed, they do not match, or there is no such split.
    pub fn read(data: &[&Path], specification: Option<&Path>, choice: &RowSelection) -> Result<TunedTable, Error> {
        let names = data.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
        let ProblemsRead { rows: bytes, specification: of_results, notes } = read_tuned(data, choice)?;
        let kernel = match (specification, of_results) {
            (Some(path), _) => read_specification(path)?,
            (None, Some(text)) => {
                KernelSpecification::parse(&text).map_err(|error| Error::input(format!("{names}: {error}")))?
            }
            (None, None) => {
                let mend = "give the specification of its kernel with --spec";
                return Err(Error::input(format!("{names}: a table says nothing of its kernel ({mend})")));
            }
        };
        let split = if choice.split == RANDOM { HoldOut::Random } else { HoldOut::ByGroup };
        if split == HoldOut::ByGroup && !kernel.groups.contains(&choice.split) {
            let known = [RANDOM].into_iter().chain(kernel.groups.iter().map(String::as_str)).collect::<Vec<_>>();
            return Err(Error::input(format!("cannot split by `{}`; there are {}", choice.split, known.join(", "))));
        }
        let group = (split == HoldOut::ByGroup).then_some(choice.split.as_str());
        let rows = read_rows(&kernel, &bytes, &choice.filters, group);
        let rows = rows.map_err(|error| Error::input(format!("{names}: {error}")))?;
        let n_invalid = rows.iter().filter(|row| !kernel.is_valid(&row.problem, &row.answer)).count();
        let filters = choice.filters.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>();
        let about = json!({
            "file": names,
            "fnv1a64": format!("{:016x}", content_hash(&bytes)),
            "rows": rows.len(),
            "where": filters,
            "split": choice.split,
        });
        Ok(TunedTable { kernel, rows, n_invalid, split, notes, about })
    }

    /// Warnings about irregularities of the table.
    pub fn warnings(&self) -> impl Iterator<Item = String> + '_ {
        self.notes.iter().cloned().chain(self.violations())
    }

    fn violations(&self) -> Option<String> {
        let TunedTable { kernel, rows, n_invalid, .. } = self;
        let verb = if *n_invalid == 1 { "violates" } else { "violate" };
        (*n_invalid > 0).then(|| {
            let reason =
                format!("{n_invalid} of {} {verb} constraints of {}", count(rows.len() as u64, "row"), kernel.name);
            format!("{reason}: they are used for training and validation like the others")
        })
    }

    /// Rows at these indices.
    fn at(&self, places: &[usize]) -> Vec<&TunedProblem> {
        places.iter().map(|&at| &self.rows[at]).collect()
    }

    /// Splits rows at some indices once more, into those to keep and those held out.
    fn divide(&self, places: &[usize], seed: u64) -> (Vec<usize>, Vec<usize>) {
        let rows: Vec<TunedProblem> = places.iter().map(|&at| self.rows[at].clone()).collect();
        let (kept, held_out) = tilewright_tune::predict::divide(&rows, self.split, seed);
        let back = |chosen: Vec<usize>| chosen.into_iter().map(|at| places[at]).collect();
        (back(kept), back(held_out))
    }
}

/// Tuned problems as read from files.
struct ProblemsRead {
    /// Comma-separated values.
    rows: Vec<u8>,
    /// Specification of the kernel derived from the files themselves.
    specification: Option<String>,
    /// Irregularities of the files.
    notes: Vec<String>,
}

/// Reads a table, or results of other tuners.
fn read_tuned(data: &[&Path], choice: &RowSelection) -> Result<ProblemsRead, Error> {
    let (mut results, mut notes) = (Vec::new(), Vec::new());
    for path in data {
        let bytes = file::read(path, "a table of tuned problems, or results of a tuner")?;
        let stem = path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy();
        match detect(&bytes) {
            // A table has no distinctive format.
            Err(FormatError::Format { .. }) if data.len() == 1 => {
                let rows = unpacked(bytes).map_err(|error| Error::input(format!("{}: {error}", path.display())))?;
                return Ok(ProblemsRead { rows, specification: None, notes });
            }
            Err(error) => return Err(Error::input(format!("{}: {error}", path.display()))),
            Ok(format) => {
                let read = tilewright_formats::read(&stem, &bytes, None, Some(format));
                let read = read.map_err(|error| Error::input(format!("{}: {error}", path.display())))?;
                let of_results = read.results.iter().flat_map(|results| &results.notes);
                notes.extend(read.notes.iter().chain(of_results).map(|note| format!("{}: {note}", path.display())));
                results.extend(read.results);
            }
        }
    }
    let table = tilewright_formats::table(&results, &choice.filters).map_err(Error::input)?;
    Ok(ProblemsRead { rows: table.rows.into_bytes(), specification: Some(table.specification), notes })
}

/// Contents of a table, decompressed if it is compressed by gzip.
///
/// # Errors
/// If the file is compressed and damaged, or exceeds [`MOST_BYTES`].
fn unpacked(bytes: Vec<u8>) -> std::io::Result<Vec<u8>> {
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return Ok(bytes);
    }
    let mut table = Vec::new();
    MultiGzDecoder::new(&bytes[..]).take(MOST_BYTES + 1).read_to_end(&mut table)?;
    match table.len() as u64 > MOST_BYTES {
        true => Err(std::io::Error::other("it comes to more than 1 GiB unpacked (give a table)")),
        false => Ok(table),
    }
}

fn read_specification(path: &Path) -> Result<KernelSpecification, Error> {
    let name = path.display();
    let text = String::from_utf8(file::read(path, "a kernel specification")?)
        .map_err(|_| Error::input(format!("{name} is not UTF-8 (give a kernel specification)")))?;
    KernelSpecification::parse(&text).map_err(|error| Error::input(format!("{name}: {error}")))
}

/// Path of the file that describes these weights. Its name is longer than theirs, so that neither another
/// model's file nor a foreign one has it.
fn description_of(weights: &Path) -> PathBuf {
    with_suffix(weights, ".json")
}

/// Loads a model with the metadata in its file.
///
/// # Errors
/// Bad input if the file is not a model.
pub fn load_model(path: &Path) -> Result<(SequenceModel, Json), Error> {
    let wanted = "a model that `tilewright predict train` wrote";
    // Earlier versions replaced the ending by this one.
    let earlier = path.with_extension("json");
    let about = Some(description_of(path)).filter(|path| path.exists() || !earlier.exists()).unwrap_or(earlier);
    let files = ModelFiles { weights: file::read(path, wanted)?, description: file::read(&about, wanted)? };
    SequenceModel::load(&files).map_err(|error| {
        let of =
            if matches!(error, SequenceError::Foreign { kept: FileKind::Description, .. }) { &about } else { path };
        Error::input(format!("{}: {error} (give {wanted})", of.display()))
    })
}

/// Destinations of a model's two files.
pub struct ModelPlaces {
    name: String,
    /// Destination of the weights.
    pub weights: Destination,
    /// Destination of the description; `None` if the weights go to something other than a file, such as a
    /// pipe.
    description: Option<Destination>,
}

impl ModelPlaces {
    /// Destinations of a model of this name, after checking that they can be written.
    fn at(path: &Path) -> Result<ModelPlaces, Error> {
        let weights = writable(path, "the name of a file with -o")?;
        let description = match &weights {
            Destination::File(_) => Some(writable(&description_of(path), "the name of another file with -o")?),
            Destination::Stdout(_) | Destination::Special(_) | Destination::Descriptor(_) => None,
        };
        Ok(ModelPlaces { name: path.display().to_string(), weights, description })
    }

    /// Checks that a model does not overwrite the files that it is trained on.
    fn check_apart(&self, path: &Path, files: &[&Path]) -> Result<(), Error> {
        check_apart(path, &self.weights, files, "the name of another file with -o")?;
        self.description.as_ref().map_or(Ok(()), |place| {
            check_apart(&description_of(path), place, files, "the name of another file with -o")
        })
    }

    /// Writes a model, both files or none.
    fn write(&self, model: &SequenceModel, about: &Json, caller: Caller) -> Result<(), Error> {
        let ModelFiles { weights, description } = model.save(about);
        let write = || {
            let place = self.description.as_ref();
            let description = place.map(|place| place.stage(|file| file.write_all(&description))).transpose()?;
            self.weights.write(|file| file.write_all(&weights))?;
            description.map_or(Ok(()), |description| description.settle())
        };
        if self.description.is_none() {
            caller.say(format!("{} is no file: what there is to say about the model is not kept", self.name));
        }
        write().or_failed(format!("cannot write {}", self.name))
    }
}

/// Parses architecture names, separated by commas; `all` stands for all.
///
/// # Errors
/// Bad input if there is no architecture of a name.
pub fn architectures(names: &str) -> Result<Vec<Architecture>, Error> {
    if names == "all" {
        return Ok(ARCHITECTURES.iter().map(|row| row.architecture).collect());
    }
    let one = |name: &str| {
        let known = || ARCHITECTURES.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
        Architecture::named(name).ok_or_else(|| Error::input(format!("unknown model `{name}`; there are {}", known())))
    };
    names.split(',').map(str::trim).map(one).collect()
}

/// Training data of a model.
struct Lesson<'a> {
    vocabulary: &'a Vocabulary,
    train: Vec<Example>,
    validation: Vec<Example>,
}

impl Lesson<'_> {
    /// Adds the validation examples to the training examples, unless the model stops early by them.
    fn in_full(mut self, architecture: Architecture) -> Self {
        if !architecture.row().stops_early {
            self.train.extend_from_slice(&self.validation);
        }
        self
    }
}

/// Trains a model, and reports the progress; also returns the last state of the training.
///
/// # Errors
/// Bad input if something does not fit; failure if it is interrupted, which leaves the checkpoint.
fn teach(
    architecture: Architecture,
    lesson: &Lesson,
    training: &Training,
    checkpoint: Option<&Path>,
    caller: Caller,
) -> Result<(SequenceModel, TrainingProgress), Error> {
    let checkpoint_name = || checkpoint.map_or(String::new(), |path| path.display().to_string());
    let name = architecture.row().name;
    let mut told = Instant::now();
    let mut last = None;
    let mut report = |progress: &TrainingProgress| {
        last = Some(progress.clone());
        let TrainingProgress { epochs, n_epochs, best_epoch } = progress;
        if let Some(Epoch { train, validation }) = epochs.last()
            && (told.elapsed() >= LINE_EVERY || epochs.len() == *n_epochs)
        {
            told = Instant::now();
            caller.say(format!(
                "{name}, epoch {} of at most {n_epochs}: loss {:.3}, validation {:.3}, best epoch {best_epoch}",
                epochs.len(),
                train.loss,
                validation.loss
            ));
        }
        if caller.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let Lesson { vocabulary, train, validation } = lesson;
    let kept = checkpoint.filter(|path| path.exists()).map(|path| file::read(path, "a checkpoint, or remove it"));
    let kept = kept.transpose()?;
    let mut keep = |bytes: &[u8]| checkpoint.map_or(Ok(()), |path| write_whole(path, |file| file.write_all(bytes)));
    let learnt = tilewright_learn::sequence::train(
        architecture,
        TrainingData { vocabulary, train, validation },
        training,
        checkpoint.is_some().then_some(Checkpoint { kept, keep: &mut keep }),
        &mut report,
    );
    let model = match learnt {
        Ok(model) => model,
        Err(SequenceError::Stopped { epochs }) => {
            let is_kept = checkpoint.is_some_and(Path::exists);
            let kept = if is_kept { format!("; {} is kept", checkpoint_name()) } else { String::new() };
            return Err(Error::failed(format!("interrupted after {} of {name}{kept}", count(epochs as u64, "epoch"))));
        }
        Err(SequenceError::Unkept(error)) => {
            return Err(Error::failed(format!("cannot write {}", checkpoint_name())).because(error));
        }
        Err(error @ (SequenceError::Foreign { .. } | SequenceError::OtherTraining)) => {
            return Err(Error::input(format!("{}: {error}", checkpoint_name())));
        }
        Err(error) => return Err(Error::input(error)),
    };
    if let Some(path) = checkpoint.filter(|path| path.exists()) {
        std::fs::remove_file(path).or_failed(format!("cannot remove {}", path.display()))?;
    }
    Ok((model, last.expect("invariant: every training tells its epochs")))
}

/// Score of a model with some beam width.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BeamScore {
    /// Beam width.
    #[serde(rename = "k")]
    pub width: usize,
    /// Whether decoding is constrained to valid answers.
    #[serde(rename = "constrained")]
    pub is_constrained: bool,
    /// Quality of the answers.
    #[serde(flatten)]
    pub score: Score,
    /// Median time of a query in milliseconds, constraints included.
    pub median_ms: f64,
    /// Longest time of a query in milliseconds.
    pub longest_ms: f64,
}

/// Configurations for one problem, by decreasing likelihood, each with a value for each parameter.
type RankedConfigs = Vec<Vec<u32>>;

/// Scores of a model on rows, for each beam width, without constraints and with them.
fn beam_scores(
    model: &SequenceModel,
    kernel: &KernelSpecification,
    inputs: &InputFields,
    rows: &[&TunedProblem],
    widths: &[usize],
    caller: Caller,
) -> Result<Vec<BeamScore>, Error> {
    let runs: Vec<(usize, bool)> = widths.iter().flat_map(|&width| [(width, false), (width, true)]).collect();
    // Answers to each row, and their times, for each run.
    let mut found: Vec<(Vec<RankedConfigs>, Vec<f64>)> = vec![Default::default(); runs.len()];
    let mut n_inexact = 0;
    for row in rows {
        for (&(width, is_constrained), (answers, times_ms)) in runs.iter().zip(&mut found) {
            let start = Instant::now();
            // Each run has its own, because the results of one would make the next one faster.
            let look_ahead = || LookAhead::new(kernel, &row.problem).watched(watch_look_ahead(caller));
            let mut look_ahead = is_constrained.then(look_ahead);
            let completions = look_ahead.as_mut().map(|look_ahead| look_ahead as &mut dyn Completions);
            let of_row = model.answers(&inputs.problem(&row.problem), width, completions);
            times_ms.push(milliseconds(start));
            n_inexact += usize::from(look_ahead.is_some_and(|look_ahead| !look_ahead.is_exact()));
            if caller.is_stopped() {
                return Err(Error::failed("interrupted; what is finished is kept"));
            }
            answers.push(of_row.into_iter().map(|answer| answer.values).collect());
        }
    }
    if n_inexact > 0 {
        caller.say(format!("{NOT_EXACT} ({n_inexact} of {} constrained answers)", rows.len() * widths.len()));
    }
    let score_of = |((width, is_constrained), (answers, times_ms)): ((usize, bool), (Vec<RankedConfigs>, Vec<f64>))| {
        let times_ms = Quartiles::of(&times_ms).expect("invariant: there are rows");
        let score = score(kernel, rows, &answers);
        BeamScore { width, is_constrained, score, median_ms: times_ms.median, longest_ms: times_ms.most }
    };
    Ok(runs.into_iter().zip(found).map(score_of).collect())
}

/// Warning that look-ahead was not exact.
pub const NOT_EXACT: &str = "look-ahead is not exact: constraints tie too many parameters together; answers are valid, but likelier ones may be lost";

/// Observer that reports the progress of a long look-ahead, and stops it when the program should stop.
pub fn watch_look_ahead(caller: Caller<'_>) -> impl FnMut(u64) -> ControlFlow<()> {
    let start = Instant::now();
    let mut told = start;
    move |n_steps| {
        if told.elapsed() >= LINE_EVERY {
            told = Instant::now();
            let seconds = start.elapsed().as_secs();
            caller.say(format!("looking ahead for {seconds} s: {} choices tried", grouped(n_steps)));
        }
        if caller.is_stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Configurations that a model predicts for a task of its template, by decreasing likelihood, with log
/// probabilities.
///
/// # Errors
/// Bad input if the model is for other parameters.
pub fn ask_template(
    model: &SequenceModel,
    task: &Task,
    caches: Caches,
    width: usize,
) -> Result<Vec<(Config, f64)>, Error> {
    let setting = &task.setting;
    let threads = u32::try_from(setting.n_threads).expect("no machine has so many CPUs");
    let target = target_name(&setting.target, caches);
    records::predict(model, &setting.workload, threads, &target, &task.space, width)
        .map_err(|error| Error::input(format!("template {}: {error}", task.template.name)))
}

/// Configurations that a model in a file predicts for a task, by decreasing likelihood.
///
/// # Errors
/// Bad input if the file holds no model of the task's template.
pub fn likely_configs(path: &Path, task: &Task, caches: Caches, width: usize) -> Result<Vec<Config>, Error> {
    let (model, about) = load_model(path)?;
    let (name, wanted) = (path.display(), task.template.name);
    match (about["template"].as_str(), about["kernel"].as_str()) {
        (Some(template), _) if template == wanted => {}
        (Some(template), _) => {
            return Err(Error::input(format!("{name} is a model of template {template}, and {wanted} is tuned")));
        }
        (None, kernel) => {
            let kernel = kernel.unwrap_or("something else");
            return Err(Error::input(format!("{name} is a model of {kernel}, and template {wanted} is tuned")));
        }
    }
    Ok(ask_template(&model, task, caches, width)?.into_iter().map(|(config, _)| config).collect())
}
