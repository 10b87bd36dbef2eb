//! Boosted trees as the cost model, simulated annealing on their predictions.

use tilewright_learn::{Acquisition, Ensemble, Examples, Gbt, GbtOptions, LearnError, Matrix, Objective};

use super::annealing::{self, Annealing, CostModel, targets};
use super::{Problem, SearchOption, SearchRow};
use crate::features::KnobFeatures;
use crate::space::Config;

/// Standard deviations that the upper confidence bound adds.
const KAPPA: f64 = 1.0;

pub(super) const ROW: SearchRow = SearchRow {
    name: "gbt",
    text: "simulated annealing on boosted trees that learn from all trials so far",
    paper: "AutoTVM, algorithm 1",
    options: &[
        SearchOption { name: "objective", default: "rank", text: "what the trees minimize: rank or regression" },
        annealing::BATCH,
        annealing::EPSILON,
        annealing::DIVERSITY,
        annealing::CHAINS,
        annealing::STEPS,
        SearchOption {
            name: "bootstrap",
            default: "1",
            text: "models; above 1 each is fitted by regression on a resample, 5 in the paper",
        },
        SearchOption {
            name: "acquisition",
            default: "mean",
            text: "what several models' predictions become: mean, ei (expected improvement) or ucb (upper confidence bound)",
        },
    ],
    make: |Problem { space, .. }, seed, options| {
        let n_models = options.number("bootstrap", 1..=1000)?;
        let objective = match options.choice("objective", &["rank", "regression"])? {
            0 if n_models == 1 => GbtOptions::default().objective,
            _ => Objective::SquaredError,
        };
        let acquisition = match options.choice("acquisition", &["mean", "ei", "ucb"])? {
            0 => Acquisition::Mean,
            1 => Acquisition::ExpectedImprovement,
            _ => Acquisition::UpperConfidenceBound { kappa: KAPPA },
        };
        let trees = Trees {
            options: GbtOptions { objective, ..GbtOptions::default() },
            n_models,
            acquisition,
            features: KnobFeatures::new(space),
            known: Vec::new(),
            fitness: Vec::new(),
            model: None,
        };
        Ok(Box::new(Annealing::new(trees, space, seed, options)?))
    },
};

/// Boosted trees on features of the parameters, where AutoTVM has features of the loops.
struct Trees {
    options: GbtOptions,
    n_models: usize,
    acquisition: Acquisition,
    features: KnobFeatures,
    /// Features of all trials.
    known: Vec<Vec<f32>>,
    fitness: Vec<f64>,
    /// `None` before the first fit.
    model: Option<Model>,
}

enum Model {
    One(Gbt),
    Several(Ensemble),
}

impl CostModel for Trees {
    fn observe(&mut self, config: &Config, fitness: f64) {
        self.known.push(self.features.of(config));
        self.fitness.push(fitness);
    }

    fn fit(&mut self, seed: u64) {
        let targets = targets(&self.fitness);
        let rows = Matrix::from_rows(self.features.n_features(), &self.known);
        let examples = Examples::new(&rows, &targets);
        let model = if self.n_models == 1 {
            Gbt::fit(&examples, &self.options, seed).map(Model::One)
        } else {
            Ensemble::fit(&examples, &self.options, self.n_models, seed).map(Model::Several)
        };
        let sound = |error: LearnError| panic!("invariant: options and targets are sound: {error}");
        self.model = Some(model.unwrap_or_else(sound));
    }

    fn score(&self, configs: &[Config]) -> Vec<f64> {
        let rows = Matrix::from_rows(self.features.n_features(), configs.iter().map(|c| self.features.of(c)));
        match &self.model {
            None => vec![0.0; configs.len()],
            Some(Model::One(trees)) => trees.predict(&rows).into_iter().map(f64::from).collect(),
            // Targets are shares of the best fitness so far.
            Some(Model::Several(ensemble)) => {
                ensemble.predict(&rows).into_iter().map(|prediction| prediction.score(self.acquisition, 1.0)).collect()
            }
        }
    }
}
