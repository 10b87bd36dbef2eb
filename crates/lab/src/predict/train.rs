//! Training of a model from tuned problems or records.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value as Json, json};
use tilewright::format::{count, percent};
use tilewright::version::BUILD;
use tilewright::{Database, Error, trials_of, validators, with_suffix};
use tilewright_ir::op::Workload;
use tilewright_learn::sequence::{Architecture, Example, SequenceModel, Training};
use tilewright_tune::predict::{InputFields, records};
use tilewright_tune::{EarlierTask, PassedOver};

use super::{BeamScore, Lesson, ModelPlaces, TunedTable, beam_scores, teach};
use crate::Caller;

/// Beam widths by which a new model is judged.
const WIDTHS: [usize; 2] = [1, 10];

/// Training of a model: its options and destination.
pub struct Learning {
    /// Architecture of the model.
    pub architecture: Architecture,
    /// Training options.
    pub training: Training,
    /// Destination of the model.
    pub places: ModelPlaces,
    /// Path of the checkpoint.
    checkpoint: Option<PathBuf>,
}

/// Result of training on a table.
pub struct OfTable {
    /// Number of training rows.
    pub n_learnt: usize,
    /// Number of validation rows.
    pub n_validation: usize,
    /// Scores on the validation rows, with decoding constrained to valid answers.
    pub scores: Vec<BeamScore>,
    /// Duration in seconds.
    pub seconds: f64,
}

impl OfTable {
    /// Formats the training and its scores, in several lines.
    pub fn summary(&self) -> String {
        let mut text = format!("learnt {} in {:.1} s\n", count(self.n_learnt as u64, "row"), self.seconds);
        for at in &self.scores {
            let which = if at.width == 1 { "first answer".to_owned() } else { format!("best of {} answers", at.width) };
            text += &format!(
                "{which} for {} held-out rows: {} of the parameters, {} of the rows as a whole\n",
                self.n_validation,
                percent(at.score.average_accuracy),
                percent(at.score.perfect)
            );
        }
        text
    }
}

/// Result of training on records.
pub struct OfRecords {
    /// Number of workloads with records.
    pub n_workloads: usize,
    /// Number of examples: best configurations of these workloads.
    pub n_examples: usize,
    /// Duration in seconds.
    pub seconds: f64,
}

impl Learning {
    /// Prepares a training whose model is written to `output`, which must not be one of the inputs. With
    /// `resume` it continues an interrupted training from its checkpoint; none is kept if the output is not a
    /// regular file.
    ///
    /// # Errors
    /// Bad input if the model cannot be written, or if a checkpoint exists without `resume` or is missing
    /// with it.
    pub fn new(
        architecture: Architecture,
        training: Training,
        output: &Path,
        learnt_from: &[&Path],
        resume: bool,
    ) -> Result<Learning, Error> {
        let places = ModelPlaces::at(output)?;
        places.check_apart(output, learnt_from)?;
        let checkpoint = places.description.is_some().then(|| checkpoint_of(output));
        let name = || checkpoint_of(output).display().to_string();
        match (resume, checkpoint.as_ref().is_some_and(|path| path.exists())) {
            (false, true) => {
                let ways = "go on with --resume, or remove it";
                Err(Error::input(format!("{} is of a training that was interrupted ({ways})", name())))
            }
            (true, false) => Err(Error::input(format!("there is no {} to go on with", name()))),
            _ => Ok(Learning { architecture, training, places, checkpoint }),
        }
    }

    /// Name of the architecture.
    fn name(&self) -> &'static str {
        self.architecture.row().name
    }

    fn teach(&self, lesson: &Lesson, caller: Caller) -> Result<SequenceModel, Error> {
        Ok(teach(self.architecture, lesson, &self.training, self.checkpoint.as_deref(), caller)?.0)
    }

    /// Adds the options that reproduce the training.
    fn describe(&self, about: &mut Json) {
        about["model"] = self.name().into();
        about["training"] = serde_json::to_value(&self.training).expect("invariant: options are plain data");
        about["version"] = BUILD.into();
    }

    /// Trains on a table, and writes the model.
    ///
    /// # Errors
    /// Bad input if there are too few rows; failure if it is stopped, or the model cannot be written.
    pub fn learn_table(&self, table: &TunedTable, caller: Caller) -> Result<OfTable, Error> {
        let kernel = &table.kernel;
        let all: Vec<usize> = (0..table.rows.len()).collect();
        let (train, validation) = table.divide(&all, self.training.seed);
        if train.is_empty() || validation.is_empty() {
            let n_rows = count(table.rows.len() as u64, "row");
            let name = table.about["file"].as_str().unwrap_or_default();
            return Err(Error::input(format!("{n_rows} of {name} cannot be divided (give more of them)")));
        }
        let inputs = InputFields::of(kernel, &table.at(&all));
        let vocabulary = inputs.vocabulary(kernel);
        let examples = |places: &[usize]| table.at(places).into_iter().map(|row| inputs.example(row)).collect();
        let lesson = Lesson { vocabulary: &vocabulary, train: examples(&train), validation: examples(&validation) };
        caller.say(format!(
            "{}: {} to learn from, {} to validate with, model {}",
            kernel.name,
            count(train.len() as u64, "row"),
            validation.len(),
            self.name()
        ));
        let start = Instant::now();
        let model = self.teach(&lesson, caller)?;
        let save = |model: &SequenceModel, validation: Json| {
            let mut about = inputs.describe(kernel);
            about["data"] = table.about.clone();
            about["validation"] = validation;
            self.describe(&mut about);
            self.places.write(model, &about, caller)
        };
        let scores = beam_scores(&model, kernel, &inputs, &table.at(&validation), &WIDTHS, caller);
        if scores.is_err() && caller.is_stopped() {
            // Saved first, as the training may have taken hours.
            save(&model, Json::Null)?;
            return Err(Error::failed(format!("interrupted; {} is written, without scores", self.places.name)));
        }
        let mut scores = scores?;
        scores.retain(|score| score.is_constrained);
        // The scores are those of a model that has not seen these rows; the saved model may have.
        let lesson = lesson.in_full(self.architecture);
        let model = if lesson.train.len() > train.len() { self.teach(&lesson, caller)? } else { model };
        let seconds = start.elapsed().as_secs_f64();
        save(&model, scores_json(&scores))?;
        Ok(OfTable { n_learnt: lesson.train.len(), n_validation: validation.len(), scores, seconds })
    }

    /// Trains on the records of a template's tasks, and writes the model.
    ///
    /// # Errors
    /// Bad input if there are no records to learn from; failure if it is stopped, or the model cannot
    /// be written.
    pub fn learn_records(&self, database: &Database, template: &str, caller: Caller) -> Result<OfRecords, Error> {
        let name = database.name();
        let no_database = || Error::input(format!("there is no database {name} (give another one with --db)"));
        let store = database.open_to_read()?.ok_or_else(no_database)?;
        let mut tasks = Vec::new();
        let mut passed_over = PassedOver::default();
        let keys = store.tasks().map_err(|error| database.refuse(error))?;
        for key in keys.into_iter().filter(|key| key.template == template) {
            // Another version may have other workloads.
            let Ok(workload) = Workload::parse(&key.workload) else { continue };
            let found = trials_of(&store, &key, &validators(&workload, &key.target, key.threads), &mut passed_over);
            let records = found.map_err(|error| database.refuse(error))?;
            tasks.push(EarlierTask { workload, template: key.template, threads: key.threads, records });
        }
        if passed_over.total() > 0 {
            caller.say(format!("{name}: {passed_over}"));
        }
        let lessons = records::Lessons::of(template, &tasks);
        let lessons = lessons.map_err(|error| Error::input(format!("database {name}: {error}")))?;
        // There are few workloads: every tenth is held out, at least one.
        let n_workloads = lessons.examples.len();
        let is_held_out = |at: usize| at % 10 == n_workloads.min(10) - 1;
        let side = |held_out: bool| -> Vec<Example> {
            let chosen = lessons.examples.iter().enumerate().filter(|(at, _)| is_held_out(*at) == held_out);
            chosen.flat_map(|(_, examples)| examples.iter().cloned()).collect()
        };
        let n_examples: usize = lessons.examples.iter().map(Vec::len).sum();
        let lesson = Lesson { vocabulary: &lessons.vocabulary, train: side(false), validation: side(true) };
        let lesson = lesson.in_full(self.architecture);
        caller.say(format!(
            "{template}: {} of {} in {name}, model {}",
            count(n_examples as u64, "configuration"),
            count(n_workloads as u64, "workload"),
            self.name()
        ));
        let start = Instant::now();
        let model = self.teach(&lesson, caller)?;
        let seconds = start.elapsed().as_secs_f64();
        let mut about = records::describe_template(template);
        about["data"] = json!({"file": name, "workloads": n_workloads, "configurations": n_examples});
        self.describe(&mut about);
        self.places.write(&model, &about, caller)?;
        Ok(OfRecords { n_workloads, n_examples, seconds })
    }
}

/// Scores by beam width as JSON, for models' files and `predict train --json`.
pub fn scores_json(scores: &[BeamScore]) -> Json {
    let of_width = |at: &BeamScore| {
        let mut json = serde_json::to_value(at.score).expect("invariant: a score is numbers by name");
        json["k"] = at.width.into();
        json
    };
    scores.iter().map(of_width).collect::<Vec<_>>().into()
}

/// Path of the checkpoint beside a model.
pub(super) fn checkpoint_of(model: &Path) -> PathBuf {
    with_suffix(model, ".checkpoint")
}
