//! Population of an evolutionary search: parents and their offspring.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use rand::distr::weighted::WeightedIndex;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::options::Options;
use super::seen::Seen;
use super::{SearchError, SearchOption};
use crate::features::UnitFeatures;
use crate::space::{Config, Space};
use crate::trial::Trial;

/// Number of random draws for each first configuration of a population, of which the one farthest from the
/// others is taken.
pub(super) const N_DRAWS: usize = 20;

/// Option of every evolutionary search: the measure by which parents are selected.
pub(super) const SELECTION: SearchOption = SearchOption {
    name: "selection",
    default: "rank",
    text: "selection of parents, in proportion to rank (from the last) or to fitness, as in the paper",
};

/// Option of every evolutionary search: the number of children of a generation.
pub(super) const GENERATION: SearchOption = SearchOption {
    name: "generation",
    default: "0",
    text: "children of the same parents; 0: as many as are asked for at a time",
};

/// First configurations of a population, an option of every evolutionary search.
pub(super) const START: SearchOption = SearchOption {
    name: "start",
    default: "spread",
    text: "first configurations: spread (far from each other) or random, as in the papers",
};

/// Measured configurations and the generation that is bred from them.
///
/// The first ones are spread over the space or random; the parents of each generation are the best of the
/// survivors of the previous one and of the trials observed since. Trials of earlier runs count as members of
/// the first generation.
pub(super) struct Population {
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    n_parents: usize,
    /// Number of parents that may be parents of the next generation, too.
    n_survivors: usize,
    /// Children of a generation; `None` for as many as are requested.
    n_children: Option<usize>,
    by_rank: bool,
    /// Whether the first configurations are spread over the space.
    is_spread: bool,
    features: UnitFeatures,
    /// Survivors and the trials observed since.
    members: Vec<Individual>,
    /// Children left to propose, marked as seen.
    unborn: VecDeque<Config>,
}

/// Measured configuration and its fitness, 0 for a failure.
struct Individual {
    fitness: f64,
    config: Config,
}

/// Members from which a generation is bred.
pub(super) struct Parents<'a> {
    members: &'a [Individual],
    /// Weights for the selection; `None` if no member is valid, for example because all trials failed: then
    /// all are equally likely.
    weights: Option<WeightedIndex<f64>>,
}

impl Parents<'_> {
    /// Draws one parent.
    pub(super) fn select(&self, rng: &mut Xoshiro256PlusPlus) -> &Config {
        let place = match &self.weights {
            Some(weights) => rng.sample(weights),
            None => rng.random_range(0..self.members.len()),
        };
        &self.members[place].config
    }
}

impl Population {
    /// Makes an empty population, in which all members that are good enough survive.
    ///
    /// # Errors
    /// If an option has an invalid value.
    pub(super) fn new(
        space: &Arc<Space>,
        seed: u64,
        n_parents: usize,
        options: &Options,
    ) -> Result<Population, SearchError> {
        let n_children = options.number(GENERATION.name, 0..=1_000_000)?;
        Ok(Population {
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            n_parents,
            n_survivors: n_parents,
            n_children: Some(n_children).filter(|&n| n > 0),
            by_rank: options.choice(SELECTION.name, &["rank", "fitness"])? == 0,
            is_spread: options.choice(START.name, &["spread", "random"])? == 0,
            features: UnitFeatures::new(space),
            members: Vec::new(),
            unborn: VecDeque::new(),
        })
    }

    /// Changes the population so that a generation of fixed size replaces as many members as it has children.
    pub(super) fn replaced(self) -> Population {
        let n_survivors = self.n_children.map_or(self.n_parents, |n| self.n_parents.saturating_sub(n));
        Population { n_survivors, ..self }
    }

    /// Records trials and returns those of this space.
    pub(super) fn observe<'a>(&mut self, trials: &'a [Trial]) -> Vec<&'a Trial> {
        let noted = self.seen.note(trials);
        let member = |trial: &&Trial| Individual { fitness: trial.outcome.fitness(), config: trial.config.clone() };
        self.members.extend(noted.iter().map(member));
        // Another run may have measured children that are bred already.
        self.unborn.retain(|child| noted.iter().all(|trial| trial.config != *child));
        noted
    }

    /// Proposes at most `n` children. When no child is left, `breed` makes the next generation from the
    /// parents. A batch ends with its generation, because the next one is bred from this one's results.
    pub(super) fn propose(&mut self, n: usize, breed: impl FnOnce(&mut Breeding) -> Vec<Config>) -> Vec<Config> {
        if self.unborn.is_empty() {
            // Among equally good members, the earlier ones stay.
            self.members.sort_by(|a, b| b.fitness.total_cmp(&a.fitness));
            self.members.truncate(self.n_parents);
            let n_missing = self.n_parents - self.members.len();
            if n_missing > 0 {
                return self.start(n.min(n_missing));
            }
            let parents = Parents { members: &self.members, weights: self.weights() };
            let n_children = self.n_children.unwrap_or(n);
            let mut children = breed(&mut Breeding { parents, seen: &self.seen, rng: &mut self.rng, n_children });
            children.iter().for_each(|child| assert!(self.seen.insert(child), "invariant: children are new"));
            // If breeding yields too few children, random configurations complete the generation.
            let n_lacking = n_children.saturating_sub(children.len());
            children.extend((0..n_lacking).map_while(|_| self.seen.draw(&mut self.rng)));
            self.unborn = children.into();
            self.members.truncate(self.n_survivors);
        }
        self.unborn.drain(..n.min(self.unborn.len())).collect()
    }

    /// Draws at most `n` configurations to begin with.
    fn start(&mut self, n: usize) -> Vec<Config> {
        if !self.is_spread {
            return (0..n).map_while(|_| self.seen.draw(&mut self.rng)).collect();
        }
        let points = self.members.iter().map(|member| self.features.of(&member.config)).collect();
        self.seen.draw_spread(n, N_DRAWS, &mut self.rng, &self.features, points)
    }

    fn weights(&self) -> Option<WeightedIndex<f64>> {
        let n = self.members.len();
        let weight = |(place, member): (usize, &Individual)| {
            // A failure is not a parent while there are valid members, whatever its rank.
            if self.by_rank && member.fitness > 0.0 { (n - place) as f64 } else { member.fitness }
        };
        WeightedIndex::new(self.members.iter().enumerate().map(weight)).ok()
    }
}

/// Resources for breeding one generation.
pub(super) struct Breeding<'a> {
    parents: Parents<'a>,
    seen: &'a Seen,
    rng: &'a mut Xoshiro256PlusPlus,
    /// Children of a generation.
    pub(super) n_children: usize,
}

impl Breeding<'_> {
    /// Returns the number of parameters of a configuration.
    pub(super) fn n_parameters(&self) -> usize {
        self.seen.space().n_parameters()
    }

    /// Breeds at most `n` children that are legal, new and all different, each recombined from parents and
    /// mutated. A child that is not new or not legal is mutated again; after several illegal ones the nearest
    /// legal configuration takes its place.
    pub(super) fn children(
        &mut self,
        n: usize,
        mut recombine: impl FnMut(&Parents, &mut Xoshiro256PlusPlus) -> Config,
        mut mutate: impl FnMut(&Space, &Config, &mut Xoshiro256PlusPlus) -> Config,
    ) -> Vec<Config> {
        let mut children = Vec::new();
        let mut siblings = HashSet::new();
        for _ in 0..n {
            let heir = recombine(&self.parents, self.rng);
            let child =
                self.seen.bred(self.rng, |space, rng| mutate(space, &heir, rng), |child| !siblings.contains(child));
            // If one attempt finds no new child, further ones hardly will.
            let Some(child) = child else { break };
            siblings.insert(child.clone());
            children.push(child);
        }
        children
    }
}
