//! Simulated annealing on the predictions of a cost model, shared by several searches.

use std::collections::{HashSet, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::diverse;

use super::options::Options;
use super::seen::Seen;
use super::{Search, SearchError, SearchOption};
use crate::space::{Config, Space};
use crate::trial::Trial;

/// Number of annealing steps without a change among the best candidates after which the annealing ends.
const PATIENCE: usize = 50;
/// Number of candidates per configuration of a batch, from which the batch is chosen.
const CANDIDATES_EACH: usize = 2;
/// Number of known trials for which a batch grows by one, up to the size in the paper: the more trials are
/// known, the less one of them changes the model, and the longer a fit takes.
const KNOWN_PER_CANDIDATE: usize = 16;
const GROWN_BATCH: usize = 64;
/// Number of random configurations of which the first batch is the best, if the model has learnt from other
/// workloads.
const N_FIRST: usize = 1024;
/// Maximum number of chains if features need programs, unless the option is given: scheduling one program
/// takes as long as predicting a thousand.
const PROGRAM_CHAINS: usize = 32;
/// Maximum number of the latest trials, and of the best earlier ones, that are scheduled when a search
/// begins.
const MOST_PROGRAMS: usize = 512;
const PROGRAM_STEPS: usize = 32;

pub(super) const BATCH: SearchOption = SearchOption {
    name: "batch",
    default: "16",
    text: "trials between two fits, at least 1; the paper's 64 are random where a budget is small, so more come with what is known",
};
/// Range of [`BATCH`].
pub(super) const BATCHES: RangeInclusive<usize> = 1..=1_000_000;
pub(super) const EPSILON: SearchOption =
    SearchOption { name: "epsilon", default: "0.05", text: "share of random configurations in a batch, 0 to 1" };
pub(super) const DIVERSITY: SearchOption = SearchOption {
    name: "diversity",
    default: "0",
    text: "weight of diversity: worth of a value that is new to a batch, in standard deviations of the predictions, 0 to 1000",
};
pub(super) const CHAINS: SearchOption = SearchOption {
    name: "chains",
    default: "128",
    text: "annealed configurations, at least 1; unless given, at most 32 where programs are made",
};
pub(super) const STEPS: SearchOption = SearchOption {
    name: "steps",
    default: "500",
    text: "steps of the annealing, at most; unless given, at most 32 where programs are made",
};

/// Cost model whose predictions the annealing maximizes.
pub(super) trait CostModel: Send {
    /// Records a trial.
    fn observe(&mut self, config: &Config, fitness: f64);

    /// Learns from all trials so far.
    fn fit(&mut self, seed: u64);

    /// Predictions for these configurations, larger for better ones, in units of the best fitness so far.
    fn score(&mut self, configs: &[Config]) -> Vec<f64>;

    /// Whether the features of a configuration need its program.
    fn makes_programs(&self) -> bool;

    /// Whether the model can predict before any trial is known.
    fn is_experienced(&self) -> bool {
        false
    }
}

/// Fitness as a share of the best: what cost models predict.
pub(super) fn targets(fitness: &[f64]) -> Vec<f32> {
    let best = fitness.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    fitness.iter().map(|fitness| (fitness / best) as f32).collect()
}

/// Tuner of AutoTVM around a cost model.
///
/// # Source
/// AutoTVM, algorithm 1, with its 128 chains of 500 steps that continue from round to round, its ε of 0.05,
/// its objectives, and its annealing from temperature 1 to 0 that stops early. We differ in the batch, which
/// is 16 by default, to suit budgets of a few hundred trials, and grows to 64 with the number of known
/// trials, and in that batches are not diversified by default: the paper's figure 6 and our runs of it find
/// no effect.
pub(super) struct Annealing<M> {
    model: M,
    batch: usize,
    epsilon: f64,
    diversity: f64,
    n_chains: usize,
    n_steps: usize,
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    n_known: usize,
    chains: Vec<Config>,
    /// Configurations of the batch that are left to measure.
    plan: VecDeque<Config>,
}

impl<M: CostModel> Annealing<M> {
    /// Makes the annealing with the options [`BATCH`], [`EPSILON`], [`DIVERSITY`], [`CHAINS`] and [`STEPS`].
    pub(super) fn new(model: M, space: &Arc<Space>, seed: u64, options: &Options) -> Result<Annealing<M>, SearchError> {
        let (chains, steps) = (options.number(CHAINS.name, 1..=1_000_000)?, options.number(STEPS.name, 0..=1_000_000)?);
        // Only defaults are reduced, not numbers that the user gives.
        let affordable = |name: &str, number: usize, most: usize| match model.makes_programs() {
            true if !options.is_given(name) => number.min(most),
            _ => number,
        };
        Ok(Annealing {
            n_chains: affordable(CHAINS.name, chains, PROGRAM_CHAINS),
            n_steps: affordable(STEPS.name, steps, PROGRAM_STEPS),
            model,
            batch: options.number(BATCH.name, BATCHES)?,
            epsilon: options.number(EPSILON.name, 0.0..=1.0)?,
            diversity: options.number(DIVERSITY.name, 0.0..=1000.0)?,
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            n_known: 0,
            chains: Vec::new(),
            plan: VecDeque::new(),
        })
    }

    /// Returns the best of a few random configurations, with their scores. The maximum of a model that has
    /// seen no trial of this space is more likely an error of the model than the optimum of the space, and
    /// nearby configurations share the error.
    fn first(&mut self, n: usize) -> Vec<(f64, Config)> {
        let configs: Vec<Config> = (0..N_FIRST).map(|_| self.seen.space().sample(&mut self.rng)).collect();
        let mut best = BestUnseen::new(n);
        for (config, score) in configs.iter().zip(self.model.score(&configs)) {
            best.offer(&self.seen, config, score);
        }
        best.ranking
    }

    /// Anneals; returns the best unseen configurations that the chains visited, best first, with their
    /// scores.
    fn anneal(&mut self, n: usize) -> Vec<(f64, Config)> {
        while self.chains.len() < self.n_chains {
            self.chains.push(self.seen.space().sample(&mut self.rng));
        }
        let mut best = BestUnseen::new(n);
        let mut chains = std::mem::take(&mut self.chains);
        let mut scores = self.model.score(&chains);
        for (config, &score) in chains.iter().zip(&scores) {
            best.offer(&self.seen, config, score);
        }
        let mut last_change = 0;
        for step in 0..self.n_steps {
            let temperature = 1.0 - step as f64 / self.n_steps as f64;
            let (places, moved): (Vec<usize>, Vec<Config>) =
                chains.iter().enumerate().filter_map(|(at, config)| Some((at, self.step_from(config)?))).unzip();
            let moved_scores = self.model.score(&moved);
            for ((at, config), other) in places.into_iter().zip(moved).zip(moved_scores) {
                let (chain, score) = (&mut chains[at], &mut scores[at]);
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

    /// Changes one parameter of a configuration to another random value; `None` if the result is illegal or
    /// unchanged.
    fn step_from(&mut self, config: &Config) -> Option<Config> {
        if config.ranks().is_empty() {
            return None;
        }
        let space = self.seen.space();
        let parameter = self.rng.random_range(0..space.n_parameters());
        let moved = config.with(parameter, self.rng.random_range(0..space.n_values(parameter)));
        (moved != *config && space.contains(&moved)).then_some(moved)
    }

    /// Plans the next batch.
    fn plan(&mut self) -> VecDeque<Config> {
        let n = self.batch.max((self.n_known / KNOWN_PER_CANDIDATE).min(GROWN_BATCH));
        let n_random = (0..n).filter(|_| self.rng.random_bool(self.epsilon)).count();
        let n_chosen = n - n_random;
        self.model.fit(self.rng.random());
        let n_candidates = CANDIDATES_EACH * n_chosen;
        let candidates = if self.n_known == 0 { self.first(n_candidates) } else { self.anneal(n_candidates) };
        let (scores, configs): (Vec<f64>, Vec<Config>) = candidates.into_iter().unzip();
        let components: Vec<&[u64]> = configs.iter().map(Config::ranks).collect();
        let alpha = self.diversity * spread(&scores);
        let mut plan: VecDeque<Config> =
            diverse(&scores, &components, n_chosen, alpha).into_iter().map(|at| configs[at].clone()).collect();
        plan.extend((0..n_random).map(|_| self.seen.space().sample(&mut self.rng)));
        plan
    }
}

impl<M: CostModel> Search for Annealing<M> {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        if self.n_known < self.batch && !self.model.is_experienced() {
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
                    return (0..n.min(self.batch)).map_while(|_| self.seen.draw(&mut self.rng)).collect();
                }
                continue;
            };
            // Another run may have measured it since it was planned.
            if self.seen.insert(&config) {
                batch.push(config);
            }
        }
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        let mut fresh = self.seen.note(trials);
        self.n_known += fresh.len();
        let n_skipped = match self.model.makes_programs() {
            true => fresh.len().saturating_sub(MOST_PROGRAMS),
            false => 0,
        };
        // The best of the skipped trials are kept.
        let (earlier, latest) = fresh.split_at_mut(n_skipped);
        earlier.sort_by(|a, b| b.outcome.fitness().total_cmp(&a.outcome.fitness()));
        for trial in earlier.iter().take(MOST_PROGRAMS).chain(latest.iter()) {
            self.model.observe(&trial.config, trial.outcome.fitness());
        }
    }
}

/// Returns the standard deviation.
fn spread(values: &[f64]) -> f64 {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt()
}

/// Best unseen configurations that were offered, best first.
struct BestUnseen {
    n: usize,
    ranking: Vec<(f64, Config)>,
    configs: HashSet<Config>,
}

impl BestUnseen {
    fn new(n: usize) -> BestUnseen {
        BestUnseen { n, ranking: Vec::new(), configs: HashSet::new() }
    }

    /// Offers a configuration; returns whether it newly became one of the best.
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
