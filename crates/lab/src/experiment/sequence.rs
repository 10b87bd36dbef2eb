//! Experiment on models that predict a kernel's parameters, trained on MIOpen's tuned problems.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};
use tilewright::Error;
use tilewright::file::write_whole;
use tilewright::format::{count, shell_quoted};
use tilewright::version::{BUILD, RELEASE};
use tilewright_learn::sequence::{ARCHITECTURES, Architecture, Epoch, Training};

use super::folder::{self, PAGE, RUNS};
use super::plan::only;
use super::results::markdown;
use super::{Cost, ExperimentResult, data};
use crate::history::MedianCurve;
use crate::plot::{Layer, Marks, Plot, PlotAxis, Scale, colours, sheet};
use crate::predict::baselines::BASELINES;
use crate::predict::evaluate::{
    BaselineFacts, EvaluatedModel, Evaluation, EvaluationRequest, MeanStd, Scores, evaluate,
};
use crate::predict::paper::{BEAM_MODEL, PAPER as ROWS, WIDTHS};
use crate::predict::{RANDOM, RowSelection, TunedTable};
use crate::{Caller, OrFailed};

/// Name on the command line.
pub const NAME: &str = "sequence-models";
/// Paper that it reproduces.
pub const PAPER: &str = "Sequence models";
/// Figures and tables that it reproduces.
pub const FIGURE: &str = "tables II to IV, figures 8 to 11";
/// Subject of the comparison, in one line.
pub const COMPARES: &str =
    "networks, a chain of forests and five classifiers on eight tables of MIOpen's tuned problems, a tenth held out";
/// Deviations from the paper, in one line.
pub const DIFFERS: &str = "the rows of MIOpen of February 2019 for gfx900, whose numbers come nearest to the paper's and are not the same; \
                           numbers are seen by size and divisors, not as tokens; the paper names no number of filters of the convolutions \
                           (64 of width 3); epochs end ten after the best; beside the networks a chain of forests";
/// Folder of the tables, within the repository.
pub const DATA: &str = "kernels/miopen";
/// Default number of repetitions.
pub const REPEATS: u64 = 5;

/// GPU whose rows are used.
const ARCH: &str = "gfx900";
/// Name of the arm that stands for all classifiers.
const CLASSIFIERS: &str = "classifiers";
/// Maximum seconds of a pass of a network over one row: Hybrid-2 on ConvOclDirectFwd1x1 takes 171 s for 26
/// passes over 2,777 rows (Zen 3, 2026-11-21).
const PASS_SECONDS: f64 = 0.0025;

/// Request to run the experiment, or a part of it.
#[derive(Clone)]
pub struct SequenceRequest {
    /// Tables to run, such as `ConvAsm1x1U.fp32`; empty for all.
    pub tables: Vec<String>,
    /// Models to run, with `classifiers` for all classifiers; empty for all.
    pub arms: Vec<String>,
    /// Factor of the maximum number of epochs.
    pub budget: f64,
    /// Number of repetitions, each with other held-out rows.
    pub repeats: u64,
    /// Folder with tables and specifications.
    pub data: PathBuf,
    /// Folder for data and plots; `None` for `experiments/` and the name.
    pub folder: Option<PathBuf>,
    /// Seed of the first repetition.
    pub seed: u64,
}

/// Table: a kernel's name and its data type.
#[derive(Debug, Clone, Copy)]
struct Set {
    kernel: &'static str,
    data_type: &'static str,
    /// Number of rows in the paper.
    n_rows: usize,
}

/// All tables, in the paper's order.
fn sets() -> impl Iterator<Item = Set> {
    ROWS.iter().map(|row| Set { kernel: row.kernel, data_type: row.data_type, n_rows: row.n_rows })
}

impl Set {
    fn name(&self) -> String {
        format!("{}.{}", self.kernel, self.data_type.to_lowercase())
    }
}

/// Cost of all tables and models.
pub fn cost() -> Cost {
    let n_runs = REPEATS * (sets().count() * ARCHITECTURES.len()) as u64;
    let n_networks = ARCHITECTURES.iter().filter(|row| row.architecture != Architecture::Chain).count();
    // The paper's numbers of rows are larger than the actual ones.
    let n_rows: usize = sets().map(|set| set.n_rows).sum();
    let n_passes = (REPEATS as usize * n_networks * n_rows * Training::default().epochs) as f64;
    Cost { n_runs, n_trials: None, most_seconds: n_passes * PASS_SECONDS }
}

impl SequenceRequest {
    /// Request for the whole experiment with its defaults.
    pub fn new() -> SequenceRequest {
        SequenceRequest {
            tables: Vec::new(),
            arms: Vec::new(),
            budget: 1.0,
            repeats: REPEATS,
            data: DATA.into(),
            folder: None,
            seed: 0,
        }
    }

    /// Requested tables.
    fn sets(&self) -> Result<Vec<Set>, Error> {
        only("problem", &self.tables, sets().collect(), Set::name)
    }

    /// Requested models, and whether the classifiers are requested.
    fn arms(&self) -> Result<(Vec<Architecture>, bool), Error> {
        let models = ARCHITECTURES.iter().map(|row| Some(row.architecture));
        let name = |arm: &Option<Architecture>| arm.map_or(CLASSIFIERS, |model| model.row().name).to_owned();
        let chosen = only("arm", &self.arms, models.chain([None]).collect(), name)?;
        let with_classifiers = chosen.iter().any(Option::is_none);
        Ok((chosen.into_iter().flatten().collect(), with_classifiers))
    }

    fn training(&self) -> Training {
        let all = Training::default();
        let epochs = ((all.epochs as f64 * self.budget).round() as usize).max(1);
        Training { epochs, seed: self.seed, ..all }
    }

    /// Command that repeats the experiment.
    fn command(&self) -> String {
        let SequenceRequest { tables, arms, budget, repeats, seed, .. } = self;
        let words = |kind: &str, names: &[String]| -> String {
            names.iter().map(|name| format!(" --{kind} {}", shell_quoted(name))).collect()
        };
        let only = words("problem", tables) + &words("arm", arms);
        format!("tilewright experiment {NAME} --budget {budget} --repeats {repeats} --seed {seed}{only}")
    }

    /// Reads the table of a set.
    fn table(&self, set: Set) -> Result<TunedTable, Error> {
        let [data, specification] = [format!("{}.csv.gz", set.name()), format!("{}.toml", set.kernel)];
        let [data, specification] = [data, specification].map(|name| self.data.join(name));
        if let Some(missing) = [&data, &specification].into_iter().find(|path| !path.exists()) {
            let mend = format!("give the repository's folder {DATA} with --data, or run it there");
            return Err(Error::input(format!("there is no {} ({mend})", missing.display())));
        }
        let choice = RowSelection { filters: vec![("arch".to_owned(), ARCH.to_owned())], split: RANDOM.to_owned() };
        TunedTable::read(&[&data], Some(&specification), &choice)
    }
}

impl Default for SequenceRequest {
    fn default() -> SequenceRequest {
        SequenceRequest::new()
    }
}

/// Trains and scores what is incomplete, and writes data, plots and tables. When stopped it leaves what is
/// complete; the next call continues from there.
///
/// # Errors
/// Bad input if there is no such table or model, the tables are missing, or the folder holds something else;
/// failure if files cannot be written.
pub fn carry_out(request: &SequenceRequest, caller: Caller) -> Result<ExperimentResult, Error> {
    let (sets, (architectures, baselines)) = (request.sets()?, request.arms()?);
    let tables = sets.iter().map(|&set| request.table(set)).collect::<Result<Vec<_>, Error>>()?;
    let folder = request.folder.clone().unwrap_or_else(|| Path::new("experiments").join(NAME));
    let own = json!({"experiment": NAME, "budget": request.budget, "seed": request.seed, "release": RELEASE});
    let (_claim, _) = folder::claim(&folder, &own)?;
    let mut outcomes = Vec::new();
    for (set, table) in sets.iter().zip(&tables) {
        caller.say(format!("{}: {}", set.name(), count(table.rows.len() as u64, "row")));
        let of_set = folder.join(RUNS).join(set.name());
        std::fs::create_dir_all(&of_set).or_failed(of_set.display())?;
        let request = EvaluationRequest {
            architectures: architectures.clone(),
            n_seeds: request.repeats,
            training: request.training(),
            widths: [1].into_iter().chain(WIDTHS).collect(),
            baselines,
            folder: of_set,
        };
        match evaluate(table, &request, caller) {
            Ok(evaluation) => outcomes.push((*set, evaluation)),
            Err(_) if caller.is_stopped() => break,
            Err(error) => return Err(error),
        }
    }
    let page = Page { request, folder: &folder, outcomes: &outcomes };
    Ok(ExperimentResult { data: page.write(own)?, n_runs: sets.len(), n_complete: outcomes.len(), folder })
}

/// Contents of the folder.
struct Page<'a> {
    request: &'a SequenceRequest,
    folder: &'a Path,
    outcomes: &'a [(Set, Evaluation)],
}

/// Formats a share as a percentage.
fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

/// Formats a mean and, for several repetitions, its standard deviation in per cent, with the paper's figure
/// in brackets.
fn cell(MeanStd { mean, std }: MeanStd, n: usize, paper: Option<f64>) -> String {
    let paper = paper.map_or(String::new(), |figure| format!(" ({figure:.2})"));
    let std = if n > 1 { format!(" ± {}", percent(std)) } else { String::new() };
    format!("{}{std}{paper}", percent(mean))
}

impl Page<'_> {
    /// Writes all files and returns the contents of `data.json`.
    fn write(&self, mut own: Json) -> Result<Json, Error> {
        let evaluations = self.outcomes.iter().map(|(set, evaluation)| json!({"set": set.name(), "found": evaluation}));
        let facts = json!({
            "paper": PAPER,
            "figure": FIGURE,
            "differs": DIFFERS,
            "command": self.request.command(),
            "version": BUILD,
            "complete": self.outcomes.len() == sets().count(),
            "sets": evaluations.collect::<Vec<_>>(),
        });
        let facts = facts.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone()));
        own.as_object_mut().expect("it is one").extend(facts);
        data::write(self.folder, &format!("{own:#}\n")).or_failed(data::path(self.folder).display())?;
        let pictures = self.pictures();
        let page = self.readme(&pictures);
        let files = pictures.into_iter().map(|(name, plots)| (name, sheet(&plots, 2)));
        for (name, text) in files.chain([(PAGE.to_owned(), page)]) {
            let path = self.folder.join(name);
            write_whole(&path, |file| file.write_all(text.as_bytes())).or_failed(path.display())?;
        }
        Ok(own)
    }

    fn readme(&self, pictures: &[(String, Vec<Plot>)]) -> String {
        let n_sets = count(sets().count() as u64, "table");
        let mut out = format!("# {NAME}\n\n{PAPER}: {COMPARES} ({FIGURE}).\nDiffers from the paper: {DIFFERS}.\n");
        let _ = write!(
            out,
            "\n`{}`, version {BUILD}.\n{} of {n_sets}, rows of {ARCH} with a random tenth held out, at most {}. In per \
             cent: mean ± standard\ndeviation over {}, in brackets the paper's figure, which is of other rows.\n",
            self.request.command(),
            self.outcomes.len(),
            count(self.request.training().epochs as u64, "epoch"),
            count(self.request.repeats, "repetition"),
        );
        let tables = [
            ("Classifiers, one a parameter: average accuracy (table II)", self.classifiers()),
            (
                "One answer, without constraints: average accuracy / perfect prediction (table III)",
                self.first_answers(),
            ),
            ("The best of k answers: average accuracy / perfect prediction (table IV)", self.best_answers()),
        ];
        for (title, rows) in tables.iter().filter(|(_, rows)| rows.len() > 1) {
            let _ = write!(out, "\n## {title}\n\n{}", markdown(rows));
        }
        for (file, _) in pictures {
            let kernel = file.trim_end_matches(".svg");
            let _ = write!(out, "\n## {kernel} by epoch\n\n![Loss and accuracy by epoch]({file})\n");
        }
        out + &format!(
            "\nLoss and accuracy are of each value with those before it as they should be, training's with dropout. \
             `{}` holds the numbers, those of\nother models too, and `runs/` the models.\n",
            data::name(self.folder)
        )
    }

    /// Header of a table, and a row for each set.
    fn rows(&self, names: &[&str], cells: impl Fn(&Evaluation) -> Vec<String>) -> Vec<Vec<String>> {
        let head = ["set", "rows (paper's)"].iter().chain(names).map(|name| (*name).to_owned()).collect();
        let row = |(set, evaluation): &(Set, Evaluation)| {
            let first = [set.name(), format!("{} ({})", evaluation.rows, set.n_rows)];
            first.into_iter().chain(cells(evaluation)).collect()
        };
        std::iter::once(head).chain(self.outcomes.iter().map(row)).collect()
    }

    fn classifiers(&self) -> Vec<Vec<String>> {
        if self.outcomes.iter().all(|(_, evaluation)| evaluation.baselines.is_empty()) {
            return Vec::new();
        }
        let names: Vec<&str> = BASELINES.iter().map(|row| row.name).collect();
        self.rows(&names, |Evaluation { baselines, paper, .. }| {
            let of = |facts: &BaselineFacts| {
                let Scores { average_accuracy, repetitions, .. } = &facts.scores;
                cell(*average_accuracy, repetitions.len(), paper.and_then(|row| row.baseline(facts.baseline)))
            };
            baselines.iter().map(of).collect()
        })
    }

    /// Models that were run, in the order of their table.
    fn models(&self) -> Vec<&'static str> {
        let run: BTreeSet<&str> =
            self.outcomes.iter().flat_map(|(_, evaluation)| &evaluation.models).map(|model| model.model).collect();
        ARCHITECTURES.iter().map(|row| row.name).filter(|name| run.contains(name)).collect()
    }

    fn first_answers(&self) -> Vec<Vec<String>> {
        let names = self.models();
        if names.is_empty() {
            return Vec::new();
        }
        self.rows(&names, |evaluation| names.iter().map(|name| beam_cell(evaluation, name, 1, false)).collect())
    }

    fn best_answers(&self) -> Vec<Vec<String>> {
        let names = self.models().into_iter().filter(|name| [BEAM_MODEL, ARCHITECTURES[0].name].contains(name));
        let columns: Vec<(&str, usize, bool)> = names
            .flat_map(|name| [false, true].into_iter().flat_map(move |is| WIDTHS.map(|width| (name, width, is))))
            .collect();
        let heads: Vec<String> = columns
            .iter()
            .map(|(name, width, is)| format!("{name}, k={width}{}", if *is { ", valid" } else { "" }))
            .collect();
        if columns.is_empty() {
            return Vec::new();
        }
        self.rows(&heads.iter().map(String::as_str).collect::<Vec<_>>(), |evaluation| {
            columns.iter().map(|&(name, width, is)| beam_cell(evaluation, name, width, is)).collect()
        })
    }

    /// Plots of each kernel: loss and accuracy by epoch of the paper's best model, or of the first available
    /// network.
    fn pictures(&self) -> Vec<(String, Vec<Plot>)> {
        let mut pictures: Vec<(String, Vec<Plot>)> = Vec::new();
        for (set, Evaluation { models, .. }) in self.outcomes {
            let is_network = |name| Architecture::named(name).is_some_and(|model| model.row().stops_early);
            let networks = || models.iter().filter(|model| is_network(model.model));
            let model = networks().find(|model| model.model == BEAM_MODEL).or_else(|| networks().next());
            let Some(model) = model else { continue };
            let file = format!("{}.svg", set.kernel);
            let plots = learning(set, model);
            match pictures.iter_mut().find(|(name, _)| *name == file) {
                Some((_, there)) => there.extend(plots),
                None => pictures.push((file, plots.into())),
            }
        }
        pictures
    }
}

/// Average accuracy and perfect prediction, each with the paper's figure.
fn beam_cell(evaluation: &Evaluation, name: &str, width: usize, is_constrained: bool) -> String {
    let found =
        evaluation.models.iter().find(|model| model.model == name).and_then(|model| {
            model.beams.iter().find(|beam| beam.width == width && beam.is_constrained == is_constrained)
        });
    let theirs = evaluation.paper.and_then(|row| row.model(name, width, is_constrained));
    found.map_or("–".to_owned(), |beam| {
        let Scores { average_accuracy, perfect, repetitions, .. } = &beam.scores;
        let average = cell(*average_accuracy, repetitions.len(), theirs.map(|figures| figures.0));
        let perfect = cell(*perfect, repetitions.len(), theirs.map(|figures| figures.1));
        format!("{average} / {perfect}")
    })
}

/// Loss and accuracy of a model by epoch, a curve for each repetition.
fn learning(set: &Set, model: &EvaluatedModel) -> [Plot; 2] {
    let kinds = ["training", "validation"];
    let colours = colours(&kinds.map(str::to_owned));
    let of_kind = |epoch: &Epoch, kind: usize| if kind == 0 { epoch.train } else { epoch.validation };
    let plot = |what: &str, label: &str, value: fn(tilewright_learn::sequence::Fit) -> f64| {
        let curves = model.repetitions.iter().flat_map(|run| (0..kinds.len()).map(move |kind| (&run.curve, kind)));
        let layers = curves.map(|(curve, kind)| {
            let values = curve.iter().map(|epoch| value(of_kind(epoch, kind)));
            let points: Vec<(f64, f64)> = values.enumerate().map(|(at, value)| (at as f64 + 1.0, value)).collect();
            let band = points.iter().map(|&(_, value)| (value, value)).collect();
            let marks = Marks::Steps(MedianCurve { points, band });
            Layer { label: kinds[kind].into(), colour: colours[kind], marks }
        });
        Plot {
            title: format!("{}: {what} of {}", set.name(), model.model),
            x: PlotAxis { label: "epoch".into(), scale: Scale::FromZero },
            y: PlotAxis { label: label.into(), scale: Scale::FromZero },
            layers: layers.collect(),
        }
    };
    [plot("loss", "loss", |fit| fit.loss), plot("accuracy", "%", |fit| 100.0 * fit.accuracy)]
}
