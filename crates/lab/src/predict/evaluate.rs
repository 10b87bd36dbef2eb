//! Evaluation of models on held-out problems, as in the paper's tables.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};
use tilewright::Error;
use tilewright::file::write_whole;
use tilewright::format::count;
use tilewright::version::{BUILD, RELEASE};
use tilewright_learn::sequence::{Architecture, Epoch, Training};
use tilewright_tune::predict::{InputFields, Score, TunedProblem, score};

use super::baselines::{BASELINES, predict_classes};
use super::paper::PaperRow;
use super::train::checkpoint_of;
use super::{BeamScore, Lesson, ModelPlaces, TunedTable, beam_scores, load_model, milliseconds, teach};
pub use crate::stats::MeanStd;
use crate::{Caller, OrFailed};

/// Models to evaluate on a table, and the settings.
#[derive(Debug, Clone)]
pub struct EvaluationRequest {
    /// The models.
    pub architectures: Vec<Architecture>,
    /// Number of repetitions, each with other held-out rows and another seed.
    pub n_seeds: u64,
    /// Training options; the seed is that of the first repetition.
    pub training: Training,
    /// Beam widths.
    pub widths: Vec<usize>,
    /// Whether classical classifiers are evaluated as well.
    pub baselines: bool,
    /// Folder of trained models and scores, which are reused.
    pub folder: PathBuf,
}

/// Result of an evaluation.
#[derive(Debug, Serialize)]
pub struct Evaluation {
    /// The kernel.
    pub kernel: String,
    /// Number of rows in the table.
    pub rows: usize,
    /// Description and origin of the table.
    pub data: Json,
    /// Number of repetitions.
    pub seeds: u64,
    /// Result of each model.
    pub models: Vec<EvaluatedModel>,
    /// Result of each classifier.
    pub baselines: Vec<BaselineFacts>,
    /// Figures of the paper for such data, if there are any.
    #[serde(skip)]
    pub paper: Option<&'static PaperRow>,
}

/// Result of a model over all repetitions.
#[derive(Debug, Serialize)]
pub struct EvaluatedModel {
    /// Name of the model.
    pub model: &'static str,
    /// Training of each repetition.
    pub repetitions: Vec<TrainingResult>,
    /// Scores by beam width, unconstrained and constrained.
    pub beams: Vec<BeamFacts>,
}

/// Training of one repetition.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TrainingResult {
    /// The seed of the repetition.
    pub seed: u64,
    /// Number of epochs.
    pub epochs: u64,
    /// Epoch with the lowest validation loss.
    pub best_epoch: u64,
    /// Fit after each epoch.
    pub curve: Vec<Epoch>,
    /// Time to load the model's file, in milliseconds.
    pub load_ms: f64,
}

/// Scores of a model with some beam width.
#[derive(Debug, Serialize)]
pub struct BeamFacts {
    /// The scores.
    #[serde(flatten)]
    pub scores: Scores,
    /// Beam width.
    #[serde(rename = "k")]
    pub width: usize,
    /// Whether decoding is constrained to valid answers.
    #[serde(rename = "constrained")]
    pub is_constrained: bool,
    /// Time of a query.
    pub query_ms: QueryTime,
    /// Figures of the paper for this case.
    pub paper: Option<PaperFigures>,
}

/// Time of a query, in milliseconds.
#[derive(Debug, Serialize)]
pub struct QueryTime {
    /// Median, as the mean over the repetitions.
    pub median: f64,
    /// Longest time.
    pub longest: f64,
}

/// Result of a classifier over all repetitions.
#[derive(Debug, Serialize)]
pub struct BaselineFacts {
    /// The scores.
    #[serde(flatten)]
    pub scores: Scores,
    /// Name of the classifier.
    pub baseline: &'static str,
    /// Figures of the paper for this case.
    pub paper: Option<PaperFigures>,
}

/// Figures of the paper, as fractions of 1.
#[derive(Debug, Serialize)]
pub struct PaperFigures {
    /// Average accuracy.
    pub average_accuracy: f64,
    /// Share of problems predicted perfectly, if the paper has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub perfect: Option<f64>,
}

/// Scores over all repetitions.
#[derive(Debug, Serialize)]
pub struct Scores {
    /// Share of parameters predicted correctly.
    pub average_accuracy: MeanStd,
    /// Share of problems with an answer that is correct in all parameters.
    pub perfect: MeanStd,
    /// Share like `perfect`, with equivalent kernels counted as correct, too.
    pub perfect_equivalent: MeanStd,
    /// Share of answers that are valid.
    pub valid: MeanStd,
    /// Score of each repetition.
    pub repetitions: Vec<Score>,
}

impl Scores {
    fn of(repetitions: Vec<Score>) -> Scores {
        let figure = |of: fn(&Score) -> f64| {
            let values: Vec<f64> = repetitions.iter().map(of).collect();
            MeanStd::of(&values).expect("invariant: there is a repetition")
        };
        Scores {
            average_accuracy: figure(|score| score.average_accuracy),
            perfect: figure(|score| score.perfect),
            perfect_equivalent: figure(|score| score.perfect_equivalent),
            valid: figure(|score| score.valid),
            repetitions,
        }
    }
}

/// Result with the key of its training and scoring; results of other keys are not valid.
#[derive(Debug, Serialize, Deserialize)]
struct ScoredModel {
    key: Json,
    #[serde(flatten)]
    run: RepetitionResult,
}

/// Result of a model in a repetition.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RepetitionResult {
    #[serde(flatten)]
    trained: TrainingResult,
    #[serde(rename = "beams")]
    scores: Vec<BeamScore>,
}

/// Repetition: its rows for training and those held out.
struct Repetition<'a> {
    table: &'a TunedTable,
    seed: u64,
    train: Vec<usize>,
    validation: Vec<usize>,
    test: Vec<usize>,
}

impl<'a> Repetition<'a> {
    fn new(table: &'a TunedTable, seed: u64) -> Result<Repetition<'a>, Error> {
        let all: Vec<usize> = (0..table.rows.len()).collect();
        let (kept, test) = table.divide(&all, seed);
        // With the same seed, the groups held out here would be those that are already removed.
        let (train, validation) = table.divide(&kept, seed ^ u64::MAX);
        if train.is_empty() || validation.is_empty() || test.is_empty() {
            let n_rows = count(table.rows.len() as u64, "row");
            return Err(Error::input(format!("{n_rows} cannot be divided by seed {seed} (give more of them)")));
        }
        Ok(Repetition { table, seed, train, validation, test })
    }

    /// Trains a model and scores it, or reads the saved result.
    fn run(
        &self,
        architecture: Architecture,
        request: &EvaluationRequest,
        caller: Caller,
    ) -> Result<RepetitionResult, Error> {
        let TunedTable { kernel, about, .. } = self.table;
        let name = architecture.row().name;
        let training = Training { seed: self.seed, ..request.training.clone() };
        let EvaluationRequest { widths, folder, .. } = request;
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
        if let Some(ScoredModel { run, .. }) = finished.filter(|finished: &ScoredModel| finished.key == scored_key) {
            caller.say(format!("{name}, seed {}: scored before", self.seed));
            return Ok(run);
        }
        let inputs = InputFields::of(kernel, &self.table.at(&[&self.train[..], &self.validation].concat()));
        let load = || {
            let start = Instant::now();
            load_model(&path).map(|(model, about)| (model, about, milliseconds(start)))
        };
        let (model, about, load_ms) = match load().ok().filter(|(_, about, _)| about["key"] == key) {
            Some(known) => {
                caller.say(format!("{name}, seed {}: trained before", self.seed));
                known
            }
            None => {
                let examples = |at: &[usize]| self.table.at(at).into_iter().map(|row| inputs.example(row)).collect();
                let vocabulary = inputs.vocabulary(kernel);
                let (train, validation) = (examples(&self.train), examples(&self.validation));
                let lesson = Lesson { vocabulary: &vocabulary, train, validation }.in_full(architecture);
                let n_rows = count(lesson.train.len() as u64, "row");
                caller.say(format!("{name}, seed {}: learning from {n_rows}", self.seed));
                let (model, last) = teach(architecture, &lesson, &training, Some(&checkpoint_of(&path)), caller)?;
                let mut about = inputs.describe(kernel);
                about["key"] = key.clone();
                about["epochs"] = last.epochs.len().into();
                about["curve"] = serde_json::to_value(&last.epochs).expect("invariant: it is numbers by name");
                about["best_epoch"] = last.best_epoch.into();
                ModelPlaces::at(&path)?.write(&model, &about, caller)?;
                load()?
            }
        };
        let epochs = |what: &str| about[what].as_u64().unwrap_or_default();
        let (epochs, best_epoch) = (epochs("epochs"), epochs("best_epoch"));
        let scores = beam_scores(&model, kernel, &inputs, &self.table.at(&self.test), widths, caller)?;
        let curve = Vec::deserialize(&about["curve"]).unwrap_or_default();
        let run = RepetitionResult {
            trained: TrainingResult { seed: self.seed, epochs, best_epoch, curve, load_ms },
            scores,
        };
        let finished = ScoredModel { key: scored_key, run: run.clone() };
        write_whole(&scores_path, |file| Ok(serde_json::to_writer(file, &finished)?))
            .or_failed(format!("cannot write {}", scores_path.display()))?;
        Ok(run)
    }

    /// Average accuracy of each baseline.
    fn baselines(&self, caller: Caller) -> Vec<(&'static str, Score)> {
        let TunedTable { kernel, .. } = self.table;
        let train = self.table.at(&[&self.train[..], &self.validation].concat());
        let test = self.table.at(&self.test);
        let numbers = |rows: &[&TunedProblem]| -> Vec<Vec<f64>> {
            rows.iter().map(|row| row.problem.iter().map(|&value| value as f64).collect()).collect()
        };
        let (features, asked) = (numbers(&train), numbers(&test));
        let mut scores = Vec::new();
        for row in BASELINES {
            caller.say(format!("{}, seed {}", row.name, self.seed));
            let mut answers: Vec<Vec<u32>> = vec![Vec::new(); test.len()];
            for parameter in 0..kernel.parameters.len() {
                let classes: Vec<u32> = train.iter().map(|row| row.answer[parameter]).collect();
                let predicted = predict_classes(row.baseline, &features, &classes, &asked, self.seed);
                answers.iter_mut().zip(predicted).for_each(|(answer, class)| answer.push(class));
            }
            let answers: Vec<Vec<Vec<u32>>> = answers.into_iter().map(|answer| vec![answer]).collect();
            scores.push((row.name, score(kernel, &test, &answers)));
        }
        scores
    }
}

/// Trains and scores models on a table.
///
/// # Errors
/// Bad input if there are too few rows; failure if it is stopped, or a file cannot be written.
pub fn evaluate(table: &TunedTable, request: &EvaluationRequest, caller: Caller) -> Result<Evaluation, Error> {
    let mut runs: Vec<Vec<RepetitionResult>> = vec![Vec::new(); request.architectures.len()];
    let mut baselines: Vec<(&'static str, Vec<Score>)> = Vec::new();
    let first = request.training.seed;
    for seed in first..first.saturating_add(request.n_seeds) {
        let repetition = Repetition::new(table, seed)?;
        for (architecture, runs) in request.architectures.iter().zip(&mut runs) {
            runs.push(repetition.run(*architecture, request, caller)?);
        }
        if request.baselines {
            for (at, (name, score)) in repetition.baselines(caller).into_iter().enumerate() {
                if baselines.len() == at {
                    baselines.push((name, Vec::new()));
                }
                baselines[at].1.push(score);
            }
        }
    }
    let paper = paper_row(table);
    let of_model = |(architecture, runs): (&Architecture, Vec<RepetitionResult>)| {
        EvaluatedModel::of(architecture.row().name, &runs, paper)
    };
    let of_baseline = |(baseline, scores): (&'static str, Vec<Score>)| {
        let average = paper.and_then(|row| row.baseline(baseline));
        let paper = average.map(|average| PaperFigures { average_accuracy: average / 100.0, perfect: None });
        BaselineFacts { scores: Scores::of(scores), baseline, paper }
    };
    Ok(Evaluation {
        kernel: table.kernel.name.clone(),
        rows: table.rows.len(),
        data: table.about.clone(),
        seeds: request.n_seeds,
        models: request.architectures.iter().zip(runs).map(of_model).collect(),
        baselines: baselines.into_iter().map(of_baseline).collect(),
        paper,
    })
}

impl EvaluatedModel {
    /// Summary of a model's repetitions.
    fn of(model: &'static str, runs: &[RepetitionResult], paper: Option<&PaperRow>) -> EvaluatedModel {
        let mut by_beam: BTreeMap<(usize, bool), Vec<&BeamScore>> = BTreeMap::new();
        for at in runs.iter().flat_map(|run| &run.scores) {
            by_beam.entry((at.width, at.is_constrained)).or_default().push(at);
        }
        let beam = |((width, is_constrained), scores): ((usize, bool), Vec<&BeamScore>)| BeamFacts {
            query_ms: QueryTime {
                median: scores.iter().map(|at| at.median_ms).sum::<f64>() / scores.len() as f64,
                longest: scores.iter().map(|at| at.longest_ms).fold(0.0, f64::max),
            },
            scores: Scores::of(scores.into_iter().map(|at| at.score).collect()),
            width,
            is_constrained,
            paper: paper.and_then(|row| row.model(model, width, is_constrained)).map(|(average, perfect)| {
                PaperFigures { average_accuracy: average / 100.0, perfect: Some(perfect / 100.0) }
            }),
        };
        EvaluatedModel {
            model,
            repetitions: runs.iter().map(|run| run.trained.clone()).collect(),
            beams: by_beam.into_iter().map(beam).collect(),
        }
    }
}

/// Figures of the paper for the data, if they are all of one data type that the paper has.
fn paper_row(data: &TunedTable) -> Option<&'static PaperRow> {
    let at = data.kernel.fields.iter().position(|field| field.name == "data_type")?;
    let value = data.rows.first()?.problem[at];
    let is_one = data.rows.iter().all(|row| row.problem[at] == value);
    if is_one { PaperRow::of(&data.kernel.name, &data.kernel.fields[at].text(value)) } else { None }
}
