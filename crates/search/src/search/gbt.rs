//! Gradient boosted trees as the cost model, simulated annealing on their predictions.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{
    Acquisition, EarlyStop, Ensemble, Examples, Gbt, GbtOptions, LearnError, Matrix, Objective, Prediction,
};

use super::annealing::{self, Annealing, CostModel, targets};
use super::view::{Described, FeatureKind, Rows, View};
use super::{SearchOption, SearchRow};
use crate::space::Config;

/// Number of standard deviations that the upper confidence bound adds.
const KAPPA: f64 = 1.0;
/// Maximum number of trials that a model is fitted on, so that a proposal in a run of hours takes no longer
/// than in a run of minutes.
const MOST_ROWS: usize = 4096;

/// Features of trees.
pub(super) const FEATURES: SearchOption = SearchOption {
    name: "features",
    default: "knob",
    text: "what the trees see: knob (parameters), aligned (also which powers of two divide them), loop (each loop of the program) or relation (between loops)",
};
/// Values of [`FEATURES`] that need programs.
pub(super) const OF_PROGRAMS: [&str; 2] = ["loop", "relation"];

/// Option: the number of trials of other workloads that a model learns from.
pub(super) const EXPERIENCE: SearchOption = SearchOption {
    name: "experience",
    default: "4096",
    text: "most programs of other workloads to train on; 20,000 and more in the paper",
};
/// Range of [`EXPERIENCE`].
pub(super) const EXPERIENCES: std::ops::RangeInclusive<usize> = 1..=1_000_000;

pub(super) const ROW: SearchRow = SearchRow {
    name: "gbt",
    text: "simulated annealing on boosted trees that learn from all trials so far",
    paper: "AutoTVM, algorithm 1",
    transfers: true,
    options: &[
        SearchOption { name: "objective", default: "rank", text: "what the trees minimize: rank or regression" },
        annealing::BATCH,
        annealing::EPSILON,
        annealing::DIVERSITY,
        FEATURES,
        annealing::CHAINS,
        annealing::STEPS,
        SearchOption { name: "trees", default: "100", text: "most trees of a model" },
        SearchOption { name: "depth", default: "6", text: "depth of a tree, 3 in the paper's implementation" },
        SearchOption {
            name: "learning_rate",
            default: "0.1",
            text: "learning rate, 0.3 in the paper's implementation",
        },
        SearchOption {
            name: "patience",
            default: "20",
            text: "early stopping: trees in a row that do not improve the ranking of the best `batch` trials; 0 grows all",
        },
        SearchOption {
            name: "bootstrap",
            default: "1",
            text: "number of models; above 1 each is fitted by regression on a bootstrap sample, 5 in the paper",
        },
        SearchOption {
            name: "acquisition",
            default: "mean",
            text: "acquisition function of several models: mean, ei (expected improvement) or ucb (upper confidence bound)",
        },
        EXPERIENCE,
        SearchOption {
            name: "global",
            default: "all",
            text: "what a model of other workloads sees: all (relations and loops), loop, relation or knob (parameters)",
        },
    ],
    make: |problem, seed, options| {
        let n_models = options.number("bootstrap", 1..=1000)?;
        let objective = match options.choice("objective", &["rank", "regression"])? {
            0 if n_models == 1 => GbtOptions::default().objective,
            _ => Objective::SquaredError,
        };
        let acquisition = match options.choice("acquisition", &["mean", "ei", "ucb"])? {
            0 => Acquisition::Mean,
            _ if n_models == 1 => return Err(options.bad_value("acquisition", "mean where bootstrap is 1".into())),
            1 => Acquisition::ExpectedImprovement,
            _ => Acquisition::UpperConfidenceBound { kappa: KAPPA },
        };
        let kind = match options.choice(FEATURES.name, &["knob", "aligned", "loop", "relation"])? {
            0 => FeatureKind::Knob,
            1 => FeatureKind::Aligned,
            2 => FeatureKind::Loop,
            _ => FeatureKind::Relation,
        };
        let plan_size = options.number(annealing::BATCH.name, annealing::BATCHES)?;
        let early_stop = match options.number("patience", 0..=1000)? {
            0 => None,
            patience => Some(EarlyStop { patience, plan_size }),
        };
        let trees = GbtOptions {
            objective,
            n_trees: options.number("trees", 1..=10_000)?,
            max_depth: options.number("depth", 1..=12)?,
            learning_rate: options.number("learning_rate", 0.01..=1.0)?,
            early_stop,
            ..GbtOptions::default()
        };
        let described = match options.choice("global", &["all", "loop", "relation", "knob"])? {
            0 => Described::All,
            1 => Described::Loop,
            2 => Described::Relation,
            _ => Described::Knob,
        };
        options.number(EXPERIENCE.name, EXPERIENCES)?;
        let view = View::new(problem, kind, described, &trees, seed);
        let (known, fitness) = (Vec::new(), Vec::new());
        let model =
            BoostedTrees { options: trees, n_models, acquisition, view, known, fitness, weight: 1.0, model: None };
        Ok(Box::new(Annealing::new(model, &problem.space, seed, options)?))
    },
};

/// Boosted trees, on features of the parameters by default, whereas AutoTVM uses features of loops. Trials of
/// other workloads train a separate model, on whose predictions the trees build (AutoTVM, section 4). We
/// differ in that these predictions have a weight, which is fitted to the trials of this workload.
struct BoostedTrees {
    options: GbtOptions,
    n_models: usize,
    acquisition: Acquisition,
    view: View,
    /// Features of all trials, each with the prediction of the model of other workloads.
    known: Vec<(Vec<f32>, f32)>,
    fitness: Vec<f64>,
    /// Weight of the predictions of the model of other workloads.
    weight: f32,
    /// `None` before the first fit.
    model: Option<TreeModel>,
}

enum TreeModel {
    One(Gbt),
    Several(Ensemble),
}

/// Selects the trials that a model is fitted on, by their fitness: if there are more than `most`, half of the
/// selection is the best and the rest random. The order of the trials is kept.
pub(crate) fn chosen(fitness: &[f64], most: usize, seed: u64) -> Vec<usize> {
    let mut places: Vec<usize> = (0..fitness.len()).collect();
    if fitness.len() <= most {
        return places;
    }
    places.sort_by(|&a, &b| fitness[b].total_cmp(&fitness[a]));
    let mut others = places.split_off(most / 2);
    let (drawn, _) = others.partial_shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed), most - most / 2);
    places.extend_from_slice(drawn);
    places.sort_unstable();
    places
}

impl BoostedTrees {
    /// Fits the weight of the predictions of the model of other workloads, and trees on top of them.
    fn fitted(&self, seed: u64) -> Result<(f32, TreeModel), LearnError> {
        let chosen = chosen(&self.fitness, MOST_ROWS, seed);
        let targets = targets(&self.fitness);
        let targets: Vec<f32> = chosen.iter().map(|&at| targets[at]).collect();
        let base: Vec<f32> = chosen.iter().map(|&at| self.known[at].1).collect();
        let rows = Matrix::from_rows(self.view.n_features(), chosen.iter().map(|&at| &self.known[at].0));
        let examples = Examples::new(&rows, &targets);
        let weight = match self.view.is_experienced() {
            true => Gbt::weight_of_base(&examples.on_top_of(&base), &self.options, seed)?,
            false => 0.0,
        };
        let base: Vec<f32> = base.iter().map(|base| weight * base).collect();
        let examples = examples.on_top_of(&base);
        let model = match self.n_models {
            1 => TreeModel::One(Gbt::fit(&examples, &self.options, seed)?),
            n_models => TreeModel::Several(Ensemble::fit(&examples, &self.options, n_models, seed)?),
        };
        Ok((weight, model))
    }
}

impl CostModel for BoostedTrees {
    fn observe(&mut self, config: &Config, fitness: f64) {
        let Rows { features, base } = self.view.of(std::slice::from_ref(config));
        self.known.push((features.row(0).to_vec(), base[0]));
        self.fitness.push(fitness);
    }

    fn fit(&mut self, seed: u64) {
        let sound = |error| panic!("invariant: options and targets are sound: {error}");
        let (weight, model) = self.fitted(seed).unwrap_or_else(sound);
        (self.weight, self.model) = (weight, Some(model));
    }

    fn score(&mut self, configs: &[Config]) -> Vec<f64> {
        let Rows { features, base } = self.view.of(configs);
        let certain = |mean| Prediction { mean, standard_deviation: 0.0 };
        let (mut predictions, acquisition) = match &self.model {
            None => (vec![certain(0.0); configs.len()], Acquisition::Mean),
            Some(TreeModel::One(trees)) => {
                (trees.predict(&features).into_iter().map(certain).collect(), Acquisition::Mean)
            }
            Some(TreeModel::Several(ensemble)) => (ensemble.predict(&features), self.acquisition),
        };
        predictions.iter_mut().zip(base).for_each(|(prediction, base)| prediction.mean += self.weight * base);
        // Targets are shares of the best fitness so far.
        predictions.into_iter().map(|prediction| prediction.score(acquisition, 1.0)).collect()
    }

    fn makes_programs(&self) -> bool {
        self.view.makes_programs()
    }

    fn is_experienced(&self) -> bool {
        self.view.is_experienced()
    }
}
