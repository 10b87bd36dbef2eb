//! Boosted trees as the cost model, simulated annealing on their predictions.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{
    Acquisition, Ensemble, Examples, Gbt, GbtOptions, LearnError, Matrix, Objective, Prediction, diverse,
};

use super::seen::Seen;
use super::view::{FeatureKind, Rows, View};
use super::{Search, SearchOption, SearchRow};
use crate::space::{Config, Space};
use crate::trial::Trial;

/// Steps of the annealing without a change among the best candidates after which it ends.
const PATIENCE: usize = 50;
/// Candidates from which each one of a batch is chosen.
const CANDIDATES_EACH: usize = 2;
/// Annealing where programs are made, at most: to schedule one takes as long as to predict a thousand.
const PROGRAM_CHAINS: usize = 32;
const PROGRAM_STEPS: usize = 32;
/// Standard deviations that the upper confidence bound adds.
const KAPPA: f64 = 1.0;

pub(super) const ROW: SearchRow = SearchRow {
    name: "gbt",
    text: "simulated annealing on boosted trees that learn from all trials so far",
    paper: "AutoTVM, algorithm 1",
    transfers: true,
    options: &[
        SearchOption { name: "objective", default: "rank", text: "what the trees minimize: rank or regression" },
        SearchOption {
            name: "batch",
            default: "16",
            text: "trials between two fits, at least 1; the paper's 64 are random where a budget is small",
        },
        SearchOption { name: "epsilon", default: "0.05", text: "share of random configurations in a batch, 0 to 1" },
        SearchOption {
            name: "diversity",
            default: "0",
            text: "worth of each value that is new to a batch, in units of the predictions' spread, 0 to 1000",
        },
        SearchOption {
            name: "features",
            default: "auto",
            text: "what the trees see: knob (parameters), loop (each loop of the program), relation (between loops) or auto",
        },
        SearchOption {
            name: "chains",
            default: "128",
            text: "annealed configurations, at least 1; at most 32 where programs are made",
        },
        SearchOption {
            name: "steps",
            default: "500",
            text: "steps of the annealing, at most; at most 32 where programs are made",
        },
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
    make: |problem, seed, options| {
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
        let kind = match options.choice("features", &["auto", "knob", "loop", "relation"])? {
            // Features of loops predict better, but making a program costs more than that is worth, unless it is made anyway.
            0 if problem.experience.is_some() => FeatureKind::Loop,
            0 | 1 => FeatureKind::Knob,
            2 => FeatureKind::Loop,
            _ => FeatureKind::Relation,
        };
        let trees = GbtOptions { objective, ..GbtOptions::default() };
        Ok(Box::new(GbtSearch {
            n_models,
            acquisition,
            batch: options.number("batch", 1..=1_000_000)?,
            epsilon: options.number("epsilon", 0.0..=1.0)?,
            diversity: options.number("diversity", 0.0..=1000.0)?,
            n_chains: options.number("chains", 1..=1_000_000)?,
            n_steps: options.number("steps", 0..=1_000_000)?,
            seen: Seen::new(&problem.space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            view: View::new(problem, kind, &trees, seed),
            trees,
            space: problem.space.clone(),
            known: Vec::new(),
            chains: Vec::new(),
            plan: VecDeque::new(),
        }))
    },
};

/// The tuner of AutoTVM.
///
/// # Source
/// AutoTVM, algorithm 1, with its 128 chains of 500 steps that go on from round to round, its ε of 0.05, its objectives,
/// and its annealing from temperature 1 to 0 that stops early. We differ in the default batch, 16 instead of 64, which
/// suits budgets of a few hundred trials, and in that features are of the parameters unless those of loops are asked for.
/// What other workloads have taught is a model of its own, on whose predictions the trees build (section 4).
struct GbtSearch {
    trees: GbtOptions,
    n_models: usize,
    acquisition: Acquisition,
    batch: usize,
    epsilon: f64,
    diversity: f64,
    n_chains: usize,
    n_steps: usize,
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    view: View,
    space: Arc<Space>,
    /// All trials.
    known: Vec<Known>,
    chains: Vec<Config>,
    /// What is left to measure of the batch.
    plan: VecDeque<Config>,
}

struct Known {
    features: Vec<f32>,
    /// What the model of other workloads predicts.
    base: f32,
    fitness: f64,
}

/// What the annealing climbs.
enum Model {
    One(Gbt),
    Several(Ensemble, Acquisition),
}

impl Model {
    /// The scores of rows, on top of what the model of other workloads predicts.
    fn score(&self, Rows { features, base }: &Rows) -> Vec<f64> {
        let mut predictions: Vec<Prediction> = match self {
            Model::One(trees) => {
                let certain = |mean| Prediction { mean, standard_deviation: 0.0 };
                trees.predict(features).into_iter().map(certain).collect()
            }
            Model::Several(ensemble, _) => ensemble.predict(features),
        };
        predictions.iter_mut().zip(base).for_each(|(prediction, base)| prediction.mean += base);
        let acquisition = match self {
            Model::One(_) => Acquisition::Mean,
            Model::Several(_, acquisition) => *acquisition,
        };
        // Targets are shares of the best fitness so far.
        predictions.into_iter().map(|prediction| prediction.score(acquisition, 1.0)).collect()
    }
}

impl GbtSearch {
    fn fit(&mut self) -> Model {
        let best = self.known.iter().map(|known| known.fitness).fold(f64::MIN_POSITIVE, f64::max);
        let targets: Vec<f32> = self.known.iter().map(|known| (known.fitness / best) as f32).collect();
        let base: Vec<f32> = self.known.iter().map(|known| known.base).collect();
        let rows = Matrix::from_rows(self.view.n_features(), self.known.iter().map(|known| &known.features));
        let examples = Examples::new(&rows, &targets).on_top_of(&base);
        let seed = self.rng.random();
        let model: Result<Model, LearnError> = if self.n_models == 1 {
            Gbt::fit(&examples, &self.trees, seed).map(Model::One)
        } else {
            let ensemble = Ensemble::fit(&examples, &self.trees, self.n_models, seed);
            ensemble.map(|ensemble| Model::Several(ensemble, self.acquisition))
        };
        model.unwrap_or_else(|error| panic!("invariant: options and targets are sound: {error}"))
    }

    fn score(&mut self, model: &Model, configs: &[Config]) -> Vec<f64> {
        model.score(&self.view.of(configs))
    }

    /// The best unseen configurations that the chains come across, best first, with their scores.
    fn anneal(&mut self, model: &Model, n: usize) -> Vec<(f64, Config)> {
        let (n_chains, n_steps) = match self.view.makes_programs() {
            true => (self.n_chains.min(PROGRAM_CHAINS), self.n_steps.min(PROGRAM_STEPS)),
            false => (self.n_chains, self.n_steps),
        };
        while self.chains.len() < n_chains {
            self.chains.push(self.space.sample(&mut self.rng));
        }
        let mut best = Best::new(n);
        let mut chains = std::mem::take(&mut self.chains);
        let mut scores = self.score(model, &chains);
        for (config, &score) in chains.iter().zip(&scores) {
            best.offer(&self.seen, config, score);
        }
        let mut last_change = 0;
        for step in 0..n_steps {
            let temperature = 1.0 - step as f64 / n_steps as f64;
            let moved: Vec<Config> = chains.iter().map(|config| self.step_from(config)).collect();
            let moved_scores = self.score(model, &moved);
            for ((chain, score), (config, other)) in
                chains.iter_mut().zip(&mut scores).zip(moved.into_iter().zip(moved_scores))
            {
                if best.offer(&self.seen, &config, other) {
                    last_change = step;
                }
                if other >= *score || self.rng.random::<f64>() < ((other - *score) / temperature).exp() {
                    (*chain, *score) = (config, other);
                }
            }
            if step >= last_change + PATIENCE {
                break;
            }
        }
        self.chains = chains;
        best.ranking
    }

    /// The same configuration with a random value for one parameter; itself where that is not legal.
    fn step_from(&mut self, config: &Config) -> Config {
        if config.ranks().is_empty() {
            return config.clone();
        }
        let parameter = self.rng.random_range(0..self.space.n_parameters());
        let moved = config.with(parameter, self.rng.random_range(0..self.space.n_values(parameter)));
        if self.space.contains(&moved) { moved } else { config.clone() }
    }

    /// The next batch.
    fn plan(&mut self) -> VecDeque<Config> {
        let n_random = (0..self.batch).filter(|_| self.rng.random_bool(self.epsilon)).count();
        let n_chosen = self.batch - n_random;
        let model = self.fit();
        let candidates = self.anneal(&model, CANDIDATES_EACH * n_chosen);
        let (scores, configs): (Vec<f64>, Vec<Config>) = candidates.into_iter().unzip();
        let components: Vec<&[u64]> = configs.iter().map(Config::ranks).collect();
        let alpha = self.diversity * spread(&scores);
        let mut plan: VecDeque<Config> =
            diverse(&scores, &components, n_chosen, alpha).into_iter().map(|at| configs[at].clone()).collect();
        plan.extend((0..n_random).map(|_| self.space.sample(&mut self.rng)));
        plan
    }
}

/// The standard deviation.
fn spread(values: &[f64]) -> f64 {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt()
}

/// The best unseen configurations that were offered, best first.
struct Best {
    n: usize,
    ranking: Vec<(f64, Config)>,
    configs: HashSet<Config>,
}

impl Best {
    fn new(n: usize) -> Best {
        Best { n, ranking: Vec::new(), configs: HashSet::new() }
    }

    /// Whether the configuration is one of the best now and was not before.
    fn offer(&mut self, seen: &Seen, config: &Config, score: f64) -> bool {
        let place = self.ranking.partition_point(|(other, _)| *other >= score);
        if place >= self.n || !seen.is_fresh(config) || !self.configs.insert(config.clone()) {
            return false;
        }
        self.ranking.insert(place, (score, config.clone()));
        if self.ranking.len() > self.n
            && let Some((_, last)) = self.ranking.pop()
        {
            self.configs.remove(&last);
        }
        true
    }
}

impl Search for GbtSearch {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        if self.known.len() < self.batch && !self.view.is_experienced() {
            return (0..n.min(self.batch)).map_while(|_| self.seen.draw(&mut self.rng)).collect();
        }
        let mut batch = Vec::new();
        while batch.len() < n {
            let Some(config) = self.plan.pop_front() else {
                if !batch.is_empty() {
                    break;
                }
                self.plan = self.plan();
                self.plan.retain(|config| self.seen.is_fresh(config));
                if self.plan.is_empty() {
                    return self.seen.draw(&mut self.rng).into_iter().collect();
                }
                continue;
            };
            // Others may have measured it since it was planned.
            if self.seen.insert(&config) {
                batch.push(config);
            }
        }
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in trials {
            if self.seen.space().contains(&trial.config) {
                self.seen.insert(&trial.config);
                let Rows { features, base } = self.view.of(std::slice::from_ref(&trial.config));
                let fitness = trial.outcome.fitness();
                self.known.push(Known { features: features.row(0).to_vec(), base: base[0], fitness });
            }
        }
    }
}
