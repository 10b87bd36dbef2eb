//! Likelihood-free Bayesian optimization: a random forest ranks the neighbours of a pattern search.

use std::collections::{HashMap, HashSet, VecDeque};

use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{Forest, Matrix};

use super::gbt::chosen;
use super::nose::{FEATURES, features};
use super::population::{N_DRAWS, START};
use super::seen::Seen;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::features::{KnobFeatures, UnitFeatures};
use crate::space::{Config, Space};
use crate::trial::{Trial, quantile};

/// Maximum number of trials that a forest is fitted on.
const MOST_ROWS: usize = 2048;
/// Minimum relative improvement in time for a step to count as one.
const LEAST_STEP: f64 = 1e-3;
/// Minimum weight of a trial that is as fast as the threshold, as a share of the threshold's time.
const LEAST_WEIGHT: f64 = 1e-5;

pub(super) const ROW: SearchRow = SearchRow {
    name: "lfbo",
    text: "walks from the best configurations to neighbours that a random forest takes for good ones",
    paper: "Song et al. (2022), likelihood-free Bayesian optimization, as Helion's pattern search",
    transfers: false,
    options: &[
        SearchOption {
            name: "population",
            default: "20",
            text: "configurations measured before the first walk; 100 in Helion, with start=random",
        },
        START,
        SearchOption { name: "walks", default: "5", text: "walks side by side" },
        SearchOption { name: "neighbours", default: "100", text: "random neighbours to choose from; 300 in Helion" },
        SearchOption {
            name: "children",
            default: "2",
            text: "neighbours of a walk that are measured before the forest is fitted again; 30 in Helion",
        },
        SearchOption {
            name: "radius",
            default: "2",
            text: "steps that one parameter of a neighbour takes, and other parameters that take one, at most",
        },
        SearchOption { name: "quantile", default: "0.1", text: "share of the trials that count as good" },
        SearchOption { name: "patience", default: "1", text: "generations without a step that a walk survives" },
        SearchOption {
            name: "penalty",
            default: "1",
            text: "weight of the similarity to what is chosen already, against the probability of being good",
        },
        SearchOption { name: "trees", default: "100", text: "trees of the forest" },
        FEATURES,
    ],
    make: |Problem { space, .. }, seed, options| {
        Ok(Box::new(Lfbo {
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            unit: UnitFeatures::new(space),
            features: features(space, options)?,
            n_start: options.number("population", 1..=1_000_000)?,
            is_spread: options.choice(START.name, &["spread", "random"])? == 0,
            n_walks: options.number("walks", 1..=1000)?,
            n_neighbours: options.number("neighbours", 1..=10_000)?,
            n_children: options.number("children", 1..=10_000)?,
            radius: options.number("radius", 1..=1000)?,
            quantile: options.number("quantile", 0.001..=0.999)?,
            patience: options.number("patience", 0..=1_000_000)?,
            penalty: options.number("penalty", 0.0..=1e6)?,
            n_trees: options.number("trees", 1..=10_000)?,
            known: Vec::new(),
            places: HashMap::new(),
            walks: Vec::new(),
            ended: HashSet::new(),
            unborn: VecDeque::new(),
        }))
    },
};

/// Walks over the space, side by side, from the best of the first configurations.
///
/// In each generation a walk draws random neighbours of its position. A forest classifies good trials,
/// weighted by how much faster than the rest they are, and chooses the neighbours to measure one by one, by
/// their probability of being good minus their similarity to those already chosen. The walk continues from
/// the fastest child.
///
/// # Source
/// Song et al., "A General Recipe for Likelihood-free Bayesian Optimization" (2022), for the classifier whose
/// weights are improvements, in place of a surrogate and an acquisition function; the documentation of
/// Helion's `LFBOPatternSearch` and its authors' "Accelerating Autotuning in Helion with Bayesian
/// Optimization" (2026) for the search, whose settings are those of
/// `population=100,start=random,neighbours=300,children=30`. We differ in fewer trials a generation, so that
/// the forest matters in runs of a hundred trials. One random parameter moves up to `radius` steps, whereas
/// in Helion the block size and the number of warps do. Failed trials do not take part in a walk. Once all
/// walks have ended, new ones start from the best positions at which none has ended, so that the budget is
/// always used.
struct Lfbo {
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    unit: UnitFeatures,
    features: KnobFeatures,
    n_start: usize,
    is_spread: bool,
    n_walks: usize,
    n_neighbours: usize,
    n_children: usize,
    radius: usize,
    quantile: f64,
    patience: usize,
    penalty: f32,
    n_trees: usize,
    known: Vec<ObservedConfig>,
    /// Index of each known configuration.
    places: HashMap<Config, usize>,
    walks: Vec<NeighbourWalk>,
    /// Configurations at which a walk ended.
    ended: HashSet<usize>,
    /// Children left to propose, marked as seen.
    unborn: VecDeque<Config>,
}

/// Observed configuration.
struct ObservedConfig {
    config: Config,
    features: Vec<f32>,
    /// Time in nanoseconds, infinite for a failure.
    cost: f64,
}

struct NeighbourWalk {
    /// Known configuration at which the walk is.
    at: usize,
    /// Number of generations without a step after which the walk ends.
    patience: usize,
    children: Vec<Config>,
}

impl Lfbo {
    /// Draws at most `n` configurations to begin with.
    fn start(&mut self, n: usize) -> Vec<Config> {
        if !self.is_spread {
            return (0..n).map_while(|_| self.seen.draw(&mut self.rng)).collect();
        }
        let points = self.known.iter().map(|known| self.unit.of(&known.config)).collect();
        self.seen.draw_spread(n, N_DRAWS, &mut self.rng, &self.unit, points)
    }

    /// Moves each walk to its fastest child, and starts new walks if all have ended.
    fn step(&mut self) {
        let Lfbo { known, places, walks, ended, .. } = self;
        walks.retain_mut(|walk| {
            let children = walk.children.drain(..).filter_map(|child| places.get(&child).copied());
            let fastest = children.min_by(|&a, &b| known[a].cost.total_cmp(&known[b].cost));
            match fastest.filter(|&child| known[child].cost < (1.0 - LEAST_STEP) * known[walk.at].cost) {
                Some(child) => walk.at = child,
                None if walk.patience > 0 => walk.patience -= 1,
                None => {
                    ended.insert(walk.at);
                    return false;
                }
            }
            true
        });
        if walks.is_empty() {
            let is_place = |at: &usize| known[*at].cost.is_finite() && !ended.contains(at);
            let mut starts: Vec<usize> = (0..known.len()).filter(is_place).collect();
            starts.sort_by(|&a, &b| known[a].cost.total_cmp(&known[b].cost));
            starts.truncate(self.n_walks);
            let walk = |at| NeighbourWalk { at, patience: self.patience, children: Vec::new() };
            *walks = starts.into_iter().map(walk).collect();
        }
    }

    /// Fits the forest; `None` if all trials are equally good.
    fn fit(&mut self) -> Option<Forest> {
        let fitness: Vec<f64> = self.known.iter().map(|known| known.cost.recip()).collect();
        let trials: Vec<&ObservedConfig> =
            chosen(&fitness, MOST_ROWS, self.rng.random()).into_iter().map(|at| &self.known[at]).collect();
        let mut costs: Vec<f64> = trials.iter().map(|known| known.cost).filter(|cost| cost.is_finite()).collect();
        costs.sort_by(f64::total_cmp);
        if costs.is_empty() {
            return None;
        }
        let threshold = quantile(&costs, self.quantile);
        let is_good: Vec<bool> = trials.iter().map(|known| known.cost <= threshold).collect();
        if is_good.iter().all(|good| *good) {
            return None;
        }
        let gain = |known: &&ObservedConfig| (threshold - known.cost).max(LEAST_WEIGHT * threshold);
        let gains = trials.iter().filter(|known| known.cost <= threshold).map(gain);
        let mean = gains.clone().sum::<f64>() / gains.count() as f64;
        let weight = |known| (gain(known) / mean) as f32;
        let weights: Vec<f32> =
            trials.iter().zip(&is_good).map(|(known, good)| if *good { weight(known) } else { 1.0 }).collect();
        let rows = Matrix::from_rows(self.features.n_features(), trials.iter().map(|known| &known.features));
        let forest = Forest::fit(&rows, &is_good, &weights, self.n_trees, self.rng.random());
        Some(forest.unwrap_or_else(|error| panic!("invariant: options and weights are sound: {error}")))
    }

    /// Random fresh neighbours of a configuration, all different.
    fn neighbours(&mut self, of: &Config) -> Vec<Config> {
        let (mut neighbours, mut siblings) = (Vec::new(), HashSet::new());
        for _ in 0..self.n_neighbours {
            let breed = |space: &Space, rng: &mut Xoshiro256PlusPlus| neighbour(space, of, self.radius, rng);
            let Some(config) = self.seen.bred(&mut self.rng, breed, |config| !siblings.contains(config)) else { break };
            siblings.insert(config.clone());
            neighbours.push(config);
        }
        neighbours
    }

    /// Chooses the children of a walk among neighbours: those that are probably good, and unlike each other.
    fn choose(&self, mut neighbours: Vec<Config>, forest: Option<&Forest>) -> Vec<Config> {
        let Some(forest) = forest else {
            neighbours.truncate(self.n_children);
            return neighbours;
        };
        let rows = neighbours.iter().map(|config| self.features.of(config));
        let leaves = forest.predict(&Matrix::from_rows(self.features.n_features(), rows));
        let mut left: Vec<usize> = (0..neighbours.len()).collect();
        // Sums of the similarities to those chosen.
        let mut similarities = vec![0.0f32; neighbours.len()];
        let mut children = Vec::new();
        while children.len() < self.n_children && !left.is_empty() {
            let share = self.penalty / children.len().max(1) as f32;
            let score = |at: usize| leaves.probabilities()[at] - share * similarities[at];
            let best = (1..left.len()).fold(0, |best, i| if score(left[i]) > score(left[best]) { i } else { best });
            let at = left.swap_remove(best);
            left.iter().for_each(|&other| similarities[other] += leaves.similarity(at, other));
            children.push(neighbours[at].clone());
        }
        children
    }

    /// Fills the queue with the next generation.
    fn breed(&mut self) {
        self.step();
        let forest = self.fit();
        for at in 0..self.walks.len() {
            let place = self.known[self.walks[at].at].config.clone();
            let neighbours = self.neighbours(&place);
            let children = self.choose(neighbours, forest.as_ref());
            children.iter().for_each(|child| assert!(self.seen.insert(child), "invariant: children are new"));
            self.unborn.extend(children.iter().cloned());
            self.walks[at].children = children;
        }
    }
}

/// Draws a random neighbour: one parameter moves up to `radius` steps, and up to `radius` others move one
/// step.
pub(super) fn neighbour(space: &Space, of: &Config, radius: usize, rng: &mut Xoshiro256PlusPlus) -> Config {
    let mut ranks = of.ranks().to_vec();
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    let n_changed = 1 + rng.random_range(0..=radius).min(ranks.len() - 1);
    let (changed, _) = order.partial_shuffle(rng, n_changed);
    for (place, &mut parameter) in changed.iter_mut().enumerate() {
        let n_steps = if place == 0 { rng.random_range(1..=radius) } else { 1 };
        for _ in 0..n_steps {
            let near = space.rank_neighbours(parameter, ranks[parameter]);
            ranks[parameter] = near.choose(rng).copied().unwrap_or(ranks[parameter]);
        }
    }
    Config::new(ranks)
}

impl Search for Lfbo {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let n_missing = self.n_start.saturating_sub(self.known.len());
        if n_missing > 0 {
            return self.start(n.min(n_missing));
        }
        if self.unborn.is_empty() {
            self.breed();
        }
        if self.unborn.is_empty() {
            return (0..n).map_while(|_| self.seen.draw(&mut self.rng)).collect();
        }
        self.unborn.drain(..n.min(self.unborn.len())).collect()
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in self.seen.note(trials) {
            let cost = trial.outcome.cost();
            match self.places.get(&trial.config) {
                Some(&place) => self.known[place].cost = cost,
                None => {
                    self.places.insert(trial.config.clone(), self.known.len());
                    let features = self.features.of(&trial.config);
                    self.known.push(ObservedConfig { config: trial.config.clone(), features, cost });
                }
            }
        }
        // Another run may have measured children that are bred already.
        self.unborn.retain(|child| !self.places.contains_key(child));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{gemm, measured, mixed};

    #[test]
    fn a_neighbour_is_near() {
        let space = gemm();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(2);
        let base = space.sample(&mut rng);
        let n_changed = |config: &Config| config.ranks().iter().zip(base.ranks()).filter(|(a, b)| a != b).count();
        let mut most = 0;
        for _ in 0..500 {
            let one = neighbour(&space, &base, 1, &mut rng);
            assert!(n_changed(&one) <= 2);
            most = most.max(n_changed(&neighbour(&space, &base, 2, &mut rng)));
        }
        assert_eq!(most, 3);
        // A space of one configuration has no other.
        let space = crate::conformance::space(vec![crate::space::Parameter::ordinal("u", [16])], vec![]);
        assert_eq!(neighbour(&space, &Config::new([0]), 2, &mut rng), Config::new([0]));
    }

    /// Children have the value of a parameter that is good, and differ.
    #[test]
    fn the_forest_chooses_children() {
        let space = mixed();
        let mut search = super::super::build("lfbo:population=60,children=5,walks=1,start=random", &space, 1).unwrap();
        let time = |config: &Config| if space.text(config, "unroll") == "true" { 1.0 } else { 50.0 };
        let trials = |configs: Vec<Config>| -> Vec<Trial> {
            configs.into_iter().map(|config| Trial { outcome: measured(time(&config)), config }).collect()
        };
        let first = trials(search.propose(60));
        assert_eq!(first.len(), 60);
        search.observe(&first);
        let children = search.propose(100);
        assert_eq!(children.len(), 5);
        assert!(children.iter().all(|child| space.text(child, "unroll") == "true"), "{children:?}");
    }
}
