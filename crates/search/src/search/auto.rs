//! Default search: Bayesian optimization with a Gaussian process over the parameters.

use std::collections::{HashMap, HashSet};

use rand::seq::{SliceRandom, index};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{Acquisition, Candidates, GaussianProcess, Matrix, Solved};

use super::lfbo::neighbour;
use super::seen::Seen;
use super::{Problem, Search, SearchRow};
use crate::features::ProcessFeatures;
use crate::log_costs::LogCosts;
use crate::objectives::Chebyshev;
use crate::space::Config;
use crate::trial::{Timing, Trial};

/// Number of configurations that are spread over the space before the model is used.
const N_START: usize = 6;
/// Number of random draws for each configuration that is spread over the space, of which the one farthest
/// from the known configurations is taken.
const N_DRAWS: usize = 1000;
/// Growth factor of the number of known trials after which the model's parameters are fitted again.
const GROWTH: f64 = 1.07;
/// Maximum number of trials that the parameters are fitted on: the time grows with the cube of it.
const MOST_FITTED: usize = 100;
/// Maximum number of trials in the model after a fit, and before the next one.
const MOST_KNOWN: usize = 400;
const MOST_ROWS: usize = 800;
/// Number of random configurations in the pool.
const N_RANDOM: usize = 200;
/// Number of best configurations whose neighbourhoods join the pool, and number of times that the
/// neighbourhood of the most promising candidate does.
const N_BEST: usize = 3;
const N_CLIMBS: usize = 6;
/// Maximum number of configurations in a neighbourhood.
const MOST_AROUND: usize = 64;
/// Minimum number of configurations in a neighbourhood: if constraints leave fewer that differ in one
/// parameter, it includes others that differ in several, by this many steps.
const LEAST_AROUND: usize = 8;
const RADIUS: usize = 2;
/// Parameters with more values than this are changed to neighbours and random values only.
const MOST_VALUES: u64 = 32;

pub(super) const ROW: SearchRow = SearchRow {
    name: "auto",
    text: "a Gaussian process that learns which parameters matter chooses where the largest improvement is expected",
    paper: "",
    transfers: false,
    options: &[],
    make: |Problem { space, .. }, seed, _| {
        let features = ProcessFeatures::new(space);
        Ok(Box::new(Auto {
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            process: GaussianProcess::new(features.kernel()),
            features,
            known: Vec::new(),
            places: HashMap::new(),
            rows: Vec::new(),
            n_entered: 0,
            n_at_fit: 0,
            n_fits: 0,
            best: None,
            n_objectives: 1,
            pool: CandidatePool::default(),
        }))
    },
};

/// Bayesian optimization over a pool of candidates.
///
/// The target is the logarithm of the time, clipped for slow configurations; failures count as the worst. The
/// features of a configuration are its point in the unit cube and the alignments of its numbers. The pool
/// holds random configurations, the neighbourhoods of the best ones, and those of the most promising
/// candidates, with one step in every proposal: a local search on the model. The configurations of a batch
/// are chosen one by one, each as if the previous ones had turned out as predicted, which lowers the
/// uncertainty around them and keeps the batch diverse.
///
/// Several objectives get new random weights for each proposal: the target is their [`Chebyshev`]
/// scalarisation.
///
/// # Source
/// Jones, Schonlau and Welch, "Efficient Global Optimization of Expensive Black-Box Functions" (1998), for
/// the model and the expected improvement. We differ in the Matérn kernel, the discrete pool and the batches.
/// Knowles, "ParEGO" (2006), for several objectives. We differ in that weights are drawn from the whole
/// simplex.
struct Auto {
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    features: ProcessFeatures,
    /// Configurations that were proposed or observed.
    known: Vec<SeenConfig>,
    places: HashMap<Config, usize>,
    process: GaussianProcess,
    /// Known configuration of each row of the process.
    rows: Vec<usize>,
    /// Number of known configurations that are in the process or were left out of it.
    n_entered: usize,
    /// Number of known configurations when the process's parameters were fitted.
    n_at_fit: usize,
    n_fits: usize,
    /// Best configuration whose neighbourhood is in the pool.
    best: Option<usize>,
    /// Largest number of objectives of a trial.
    n_objectives: usize,
    pool: CandidatePool,
}

struct SeenConfig {
    config: Config,
    features: Vec<f32>,
    /// Cost, infinite for a failure; `None` until it is observed.
    cost: Option<f64>,
    /// Timing, if it has several objectives.
    several: Option<Timing>,
}

/// Configurations to choose from.
#[derive(Default)]
struct CandidatePool {
    offers: Vec<Offers>,
    places: HashMap<Config, OfferPosition>,
    /// Configurations whose neighbourhoods are in the pool.
    expanded: HashSet<Config>,
}

/// Configurations that were added to the pool together.
struct Offers {
    configs: Vec<Config>,
    /// Whether each configuration is yet to be proposed or observed.
    is_fresh: Vec<bool>,
    candidates: Candidates,
    means: Vec<f64>,
}

/// Position of a configuration in the pool: the index of its offers, and its position in them.
type OfferPosition = (usize, usize);

/// Targets that a query to the model refers to.
struct ModelQuestion {
    /// Largest target so far, without its noise, so that no improvement over a lucky measurement is required.
    best: f64,
    /// Targets of the rows of the process.
    solved: Solved,
}

impl Auto {
    fn learn_of(&mut self, config: &Config, cost: Option<f64>) {
        let place = self.places.get(config).copied().unwrap_or_else(|| {
            let features = self.features.of(config);
            self.places.insert(config.clone(), self.known.len());
            self.known.push(SeenConfig { config: config.clone(), features, cost: None, several: None });
            self.known.len() - 1
        });
        self.known[place].cost = cost;
    }

    /// Logarithms of throughput, by known configuration; with several objectives, of their scalarisation with
    /// random weights, so that each call differs.
    fn throughputs(&mut self) -> Vec<Option<f64>> {
        let scale = LogCosts::new(self.known.iter().filter_map(|known| known.cost));
        let plain = |known: &SeenConfig| known.cost.map(|cost| -scale.log(cost));
        if self.n_objectives == 1 {
            return self.known.iter().map(plain).collect();
        }
        let several = self.known.iter().filter_map(|known| known.several.as_ref());
        // Exponential variates, normalized to sum to 1, are uniform on the simplex.
        let draws: Vec<f64> = (0..self.n_objectives).map(|_| -(1.0 - self.rng.random::<f64>()).ln()).collect();
        let sum: f64 = draws.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let weights: Vec<f64> = draws.iter().map(|draw| draw / sum).collect();
        let Some(by) = Chebyshev::new(&weights, several) else { return self.known.iter().map(plain).collect() };
        let scalar = |known: &SeenConfig| match &known.several {
            Some(timing) => Some(-by.cost(timing)),
            // A trial that lacks objectives, such as a failure, counts as the worst.
            None => known.cost.map(|_| f64::NEG_INFINITY),
        };
        self.known.iter().map(scalar).collect()
    }

    /// Standardized logarithms of throughput, by known configuration. A value farther below the median than
    /// the best is above it is clipped to that distance: how bad the bad ones are says little about the good
    /// ones.
    fn targets(&mut self) -> Vec<Option<f64>> {
        let mut targets = self.throughputs();
        let mut successes: Vec<f64> = targets.iter().flatten().copied().filter(|log| log.is_finite()).collect();
        let [worst, best] = [f64::min, f64::max].map(|of| successes.iter().copied().reduce(of).unwrap_or(0.0));
        let middle = successes.len() / 2;
        let median = match successes.is_empty() {
            true => 0.0,
            false => *successes.select_nth_unstable_by(middle, f64::total_cmp).1,
        };
        let least = worst.max(2.0 * median - best);
        targets.iter_mut().flatten().for_each(|target| *target = target.max(least));
        let n = targets.iter().flatten().count().max(1) as f64;
        let mean = targets.iter().flatten().sum::<f64>() / n;
        let variance = targets.iter().flatten().map(|t| (t - mean).powi(2)).sum::<f64>() / n;
        let scale = if variance > 0.0 { variance.sqrt().recip() } else { 0.0 };
        targets.iter_mut().flatten().for_each(|t| *t = (*t - mean) * scale);
        targets
    }

    /// Known configurations that were observed, best first.
    fn ranking(&self, targets: &[Option<f64>]) -> Vec<usize> {
        let mut ranking: Vec<usize> = (0..targets.len()).filter(|&at| targets[at].is_some()).collect();
        ranking.sort_by(|&a, &b| targets[b].partial_cmp(&targets[a]).expect("invariant: targets are finite"));
        ranking
    }

    /// Draws at most `most` of these: half of them from the top, the others at random.
    fn sample(&mut self, ranking: &[usize], most: usize) -> Vec<usize> {
        if ranking.len() <= most {
            return ranking.to_vec();
        }
        let (top, rest) = ranking.split_at(most / 2);
        let others = index::sample(&mut self.rng, rest.len(), most - top.len());
        top.iter().copied().chain(others.into_iter().map(|at| rest[at])).collect()
    }

    /// Fits the kernel and makes a process of the known configurations.
    fn fit(&mut self, targets: &[Option<f64>]) {
        let ranking = self.ranking(targets);
        let fitted = self.sample(&ranking, MOST_FITTED);
        let features = fitted.iter().map(|&at| &self.known[at].features);
        let features = Matrix::from_rows(self.features.n_features(), features);
        let values: Vec<f64> = fitted.iter().filter_map(|&at| targets[at]).collect();
        let mut kernel = self.process.kernel().clone();
        // The first fit takes more steps; afterwards coarse and fine steps alternate.
        for _ in 0..if self.n_fits == 0 { 3 } else { 1 } {
            kernel.fit(&features, &values, if self.n_fits.is_multiple_of(2) { 0.8 } else { 0.4 });
            self.n_fits += 1;
        }
        self.process = GaussianProcess::new(kernel);
        self.rows = self.sample(&ranking, MOST_KNOWN);
        // Configurations that are being measured come last, so that the known ones predict them.
        self.rows.extend((0..self.known.len()).filter(|&at| targets[at].is_none()));
        self.process.extend(self.rows.iter().map(|&at| &self.known[at].features[..]));
        self.n_entered = self.known.len();
        self.n_at_fit = self.known.len();
        self.pool = CandidatePool::default();
    }

    /// Brings the model and the pool up to date.
    fn prepare(&mut self) -> ModelQuestion {
        let targets = self.targets();
        if self.known.len() as f64 >= GROWTH * self.n_at_fit as f64 || self.rows.len() >= MOST_ROWS {
            self.fit(&targets);
        }
        let new = self.n_entered..self.known.len();
        self.process.extend(self.known[new.clone()].iter().map(|known| &known.features[..]));
        self.rows.extend(new);
        self.n_entered = self.known.len();
        let of_rows: Vec<Option<f64>> = self.rows.iter().map(|&place| targets[place]).collect();
        let best_known = largest(&targets, N_BEST);
        let solved = self.process.solve(&of_rows);
        let means = self.process.means_of_rows(&solved).into_iter().zip(&of_rows);
        let best = means.filter_map(|(mean, target)| target.map(|_| mean)).reduce(f64::max).unwrap_or(0.0);
        let question = ModelQuestion { solved, best };
        for offers in &mut self.pool.offers {
            self.process.update(&mut offers.candidates);
            offers.means = self.process.means(&offers.candidates, &question.solved);
        }
        if self.pool.offers.iter().all(|offers| !offers.is_fresh.contains(&true)) {
            self.pool = CandidatePool::default();
            let space = self.seen.space();
            let random = (0..N_RANDOM).map(|_| space.sample(&mut self.rng)).collect();
            self.offer(random, &question);
            for &place in &best_known {
                self.expand(self.known[place].config.clone(), &question);
            }
            self.climb(N_CLIMBS, &question);
        } else if best_known.first().copied() != self.best
            && let Some(&place) = best_known.first()
        {
            self.expand(self.known[place].config.clone(), &question);
            self.climb(2, &question);
        } else {
            self.climb(1, &question);
        }
        self.best = best_known.first().copied();
        question
    }

    /// Adds new configurations to the pool.
    fn offer(&mut self, mut configs: Vec<Config>, question: &ModelQuestion) {
        let mut place = (self.pool.offers.len(), 0);
        configs.retain(|config| {
            let is_new = self.seen.is_fresh(config) && !self.pool.places.contains_key(config);
            if is_new {
                self.pool.places.insert(config.clone(), place);
                place.1 += 1;
            }
            is_new
        });
        let features: Vec<Vec<f32>> = configs.iter().map(|config| self.features.of(config)).collect();
        let candidates = self.process.candidates(features.iter().map(|row| &row[..]));
        let means = self.process.means(&candidates, &question.solved);
        self.pool.offers.push(Offers { is_fresh: vec![true; configs.len()], configs, candidates, means });
    }

    /// Adds the neighbourhood of a configuration to the pool: configurations that differ from it in one
    /// parameter, or in more if too few differ in one.
    fn expand(&mut self, config: Config, question: &ModelQuestion) {
        if !self.pool.expanded.insert(config.clone()) {
            return;
        }
        let space = self.seen.space();
        let mut around = Vec::new();
        for parameter in 0..space.n_parameters() {
            let n_values = space.n_values(parameter);
            if n_values <= MOST_VALUES {
                around.extend((0..n_values).map(|rank| config.with(parameter, rank)));
            } else {
                let near = space.rank_neighbours(parameter, config.ranks()[parameter]);
                around.extend(near.into_iter().map(|rank| config.with(parameter, rank)));
                let far = (0..MOST_VALUES / 2).map(|_| self.rng.random_range(0..n_values));
                around.extend(far.map(|rank| config.with(parameter, rank)));
            }
        }
        around.retain(|other| self.seen.is_fresh(other));
        around.shuffle(&mut self.rng);
        around.truncate(MOST_AROUND);
        let n_missing = LEAST_AROUND.saturating_sub(around.len());
        around.extend((0..n_missing).map(|_| space.nearest(&neighbour(space, &config, RADIUS, &mut self.rng))));
        self.offer(around, question);
    }

    /// Adds the neighbourhoods of the most promising candidates to the pool, one after another.
    fn climb(&mut self, n: usize, question: &ModelQuestion) {
        for _ in 0..n {
            let Some((group, at)) = self.most_promising(question) else { return };
            let config = self.pool.offers[group].configs[at].clone();
            if self.pool.expanded.contains(&config) {
                return;
            }
            self.expand(config, question);
        }
    }

    /// Position in the pool of the candidate with the largest expected improvement; if no improvement is
    /// expected, for example because all trials failed, of the one with the largest mean.
    fn most_promising(&self, question: &ModelQuestion) -> Option<OfferPosition> {
        let mut top = None;
        let [mut promise, mut prediction] = [(f64::NEG_INFINITY, f64::NEG_INFINITY); 2];
        for (group, offers) in self.pool.offers.iter().enumerate() {
            let spreads = self.process.standard_deviations(&offers.candidates, &question.solved);
            let offers = offers.means.iter().zip(spreads).zip(&offers.is_fresh).enumerate();
            for (at, ((&mean, spread), _)) in offers.filter(|(_, (_, is_fresh))| **is_fresh) {
                // A lower mean with a lower spread promises less.
                if mean <= prediction.0 && spread <= prediction.1 {
                    continue;
                }
                let improvement = Acquisition::ExpectedImprovement.score(mean, spread, question.best);
                if (improvement, mean) > promise {
                    (top, promise, prediction) = (Some((group, at)), (improvement, mean), (mean, spread));
                }
            }
        }
        top
    }

    /// Takes a configuration out of the pool and adds it to the model.
    fn take(&mut self, (group, at): OfferPosition) -> Config {
        let offers = &mut self.pool.offers[group];
        offers.is_fresh[at] = false;
        let config = offers.configs[at].clone();
        self.seen.insert(&config);
        self.learn_of(&config, None);
        self.process.learn(&self.pool.offers[group].candidates, at);
        self.rows.push(self.known.len() - 1);
        self.n_entered = self.known.len();
        for offers in &mut self.pool.offers {
            self.process.update(&mut offers.candidates);
        }
        config
    }
}

/// Positions of the `n` largest targets, largest first.
fn largest(targets: &[Option<f64>], n: usize) -> Vec<usize> {
    let mut largest: Vec<(f64, usize)> = Vec::new();
    for (at, target) in targets.iter().enumerate() {
        let Some(target) = *target else { continue };
        let place = largest.partition_point(|(other, _)| *other >= target);
        if place < n {
            largest.truncate(n - 1);
            largest.insert(place, (target, at));
        }
    }
    largest.into_iter().map(|(_, at)| at).collect()
}

impl Search for Auto {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let mut batch = Vec::new();
        if self.known.len() < N_START {
            for _ in 0..n.min(N_START - self.known.len()) {
                let unit = self.features.unit();
                let points = self.known.iter().map(|known| &known.features[..unit.n_features()]);
                let Some(config) = self.seen.draw_remote(N_DRAWS, &mut self.rng, unit, points) else { break };
                self.learn_of(&config, None);
                batch.push(config);
            }
            return batch;
        }
        let mut question = self.prepare();
        while batch.len() < n {
            if self.n_objectives > 1 && !batch.is_empty() {
                question = self.prepare();
            }
            let config = match self.most_promising(&question) {
                Some(top) => self.take(top),
                None => {
                    let Some(config) = self.seen.draw(&mut self.rng) else { break };
                    self.learn_of(&config, None);
                    config
                }
            };
            batch.push(config);
        }
        batch
    }

    fn looks_ahead(&self) -> bool {
        true
    }

    fn weighs_objectives(&self) -> bool {
        true
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in self.seen.note(trials) {
            if let Some(&(group, at)) = self.pool.places.get(&trial.config) {
                self.pool.offers[group].is_fresh[at] = false;
            }
            self.learn_of(&trial.config, Some(trial.outcome.cost()));
            let several = trial.outcome.timing().filter(|timing| !timing.others.is_empty());
            if let Some(timing) = several {
                self.n_objectives = self.n_objectives.max(timing.costs().count());
                let place = self.places[&trial.config];
                self.known[place].several = Some(*timing);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::conformance::measured;
    use crate::search::build;
    use crate::space::{Constraint, Parameter, Space};
    use crate::trial::Trial;

    /// No two configurations differ in one parameter alone.
    #[test]
    fn it_climbs_where_single_changes_are_illegal() {
        let parameters: Vec<Parameter> = ["a", "b", "c", "d", "e"].map(|name| Parameter::ordinal(name, 0..32)).into();
        let even = Constraint::parse("even", "(a + b + c + d + e) % 32 == 0", &parameters).unwrap();
        let space = Arc::new(Space::new("even", parameters, vec![even]).unwrap());
        let time = |config: &Config| {
            let off =
                config.ranks().iter().zip([5, 20, 11, 28, 0]).map(|(&x, aim)| (x as f64 - f64::from(aim)).powi(2));
            1.0 + off.sum::<f64>()
        };
        for seed in 0..3 {
            let mut search = build("auto", &space, seed).unwrap();
            let is_found = (0..100).any(|_| {
                let config = search.propose(1).remove(0);
                let time = time(&config);
                search.observe(&[Trial { outcome: measured(time), config }]);
                time == 1.0
            });
            assert!(is_found, "seed {seed}: not the best of 2^20 by 100 trials");
        }
    }
}
