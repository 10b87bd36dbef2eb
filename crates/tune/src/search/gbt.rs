//! Boosted trees as the cost model, simulated annealing on their predictions.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{Acquisition, Ensemble, Examples, Gbt, GbtOptions, LearnError, Matrix, Objective, diverse};

use super::seen::Seen;
use super::{Search, SearchOption, SearchRow};
use crate::features::KnobFeatures;
use crate::space::{Config, Space};
use crate::trial::Trial;

/// Steps of the annealing without a change among the best candidates after which it ends.
const PATIENCE: usize = 50;
/// Candidates from which each one of a batch is chosen.
const CANDIDATES_EACH: usize = 2;
/// Standard deviations that the upper confidence bound adds.
const KAPPA: f64 = 1.0;

pub(super) const ROW: SearchRow = SearchRow {
    name: "gbt",
    text: "simulated annealing on boosted trees that learn from all trials so far",
    paper: "AutoTVM, algorithm 1",
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
        SearchOption { name: "chains", default: "128", text: "annealed configurations, at least 1" },
        SearchOption { name: "steps", default: "500", text: "steps of the annealing, at most" },
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
    make: |space, seed, options| {
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
        Ok(Box::new(GbtSearch {
            trees: GbtOptions { objective, ..GbtOptions::default() },
            n_models,
            acquisition,
            batch: options.number("batch", 1..=1_000_000)?,
            epsilon: options.number("epsilon", 0.0..=1.0)?,
            diversity: options.number("diversity", 0.0..=1000.0)?,
            n_chains: options.number("chains", 1..=1_000_000)?,
            n_steps: options.number("steps", 0..=1_000_000)?,
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            features: KnobFeatures::new(space),
            space: Arc::clone(space),
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
/// suits budgets of a few hundred trials, and in features of the parameters instead of the loops.
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
    features: KnobFeatures,
    space: Arc<Space>,
    /// Features and fitness of all trials.
    known: Vec<(Vec<f32>, f64)>,
    chains: Vec<Config>,
    /// What is left to measure of the batch.
    plan: VecDeque<Config>,
}

/// What the annealing climbs.
enum Model {
    One(Gbt),
    Several(Ensemble, Acquisition),
}

impl Model {
    fn score(&self, rows: &Matrix) -> Vec<f64> {
        match self {
            Model::One(trees) => trees.predict(rows).into_iter().map(f64::from).collect(),
            // Targets are shares of the best fitness so far.
            Model::Several(ensemble, acquisition) => {
                ensemble.predict(rows).into_iter().map(|prediction| prediction.score(*acquisition, 1.0)).collect()
            }
        }
    }
}

impl GbtSearch {
    fn fit(&mut self) -> Model {
        let best = self.known.iter().map(|(_, fitness)| *fitness).fold(f64::MIN_POSITIVE, f64::max);
        let targets: Vec<f32> = self.known.iter().map(|(_, fitness)| (fitness / best) as f32).collect();
        let rows = self.known.iter().map(|(features, _)| features);
        let rows = Matrix::from_rows(self.features.n_features(), rows);
        let examples = Examples::new(&rows, &targets);
        let seed = self.rng.random();
        let model: Result<Model, LearnError> = if self.n_models == 1 {
            Gbt::fit(&examples, &self.trees, seed).map(Model::One)
        } else {
            let ensemble = Ensemble::fit(&examples, &self.trees, self.n_models, seed);
            ensemble.map(|ensemble| Model::Several(ensemble, self.acquisition))
        };
        model.unwrap_or_else(|error| panic!("invariant: options and targets are sound: {error}"))
    }

    fn score(&self, model: &Model, configs: &[Config]) -> Vec<f64> {
        model.score(&Matrix::from_rows(self.features.n_features(), configs.iter().map(|c| self.features.of(c))))
    }

    /// The best unseen configurations that the chains come across, best first, with their scores.
    fn anneal(&mut self, model: &Model, n: usize) -> Vec<(f64, Config)> {
        while self.chains.len() < self.n_chains {
            self.chains.push(self.space.sample(&mut self.rng));
        }
        let mut best = Best::new(n);
        let mut chains = std::mem::take(&mut self.chains);
        let mut scores = self.score(model, &chains);
        for (config, &score) in chains.iter().zip(&scores) {
            best.offer(&self.seen, config, score);
        }
        let mut last_change = 0;
        for step in 0..self.n_steps {
            let temperature = 1.0 - step as f64 / self.n_steps as f64;
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
        if self.known.len() < self.batch {
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
        let noted = self.seen.note(trials).into_iter();
        self.known.extend(noted.map(|trial| (self.features.of(&trial.config), trial.outcome.fitness())));
    }
}
