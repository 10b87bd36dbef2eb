//! Genetic search: selection, crossover, mutation, elites.

use rand::RngExt;
use rand::seq::IndexedRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::options::Options;
use super::population::{GENERATION, Parents, Population, SELECTION, START};
use super::{Problem, Search, SearchError, SearchOption, SearchRow};
use crate::space::{Config, Space};
use crate::trial::Trial;

pub(super) const ROW: SearchRow = SearchRow {
    name: "genetic",
    text: "selection, crossover, mutation, elites kept",
    paper: "NoSE, the genetic algorithm it is compared with",
    transfers: false,
    options: &[
        SearchOption {
            name: "population",
            default: "8",
            text: "size of the population, at least 2; the paper's 100 need thousands of trials",
        },
        SearchOption {
            text: "children that replace the worst parents; 0: as many as are asked for, and the best of all survive",
            ..GENERATION
        },
        SELECTION,
        START,
        CROSSOVER,
        SearchOption { name: "mutation", default: "0.15", text: "probability that a parameter is replaced, 0 to 1" },
        STEPS,
        MUTANT,
    ],
    make: |Problem { space, .. }, seed, options| {
        let population =
            Population::new(space, seed, options.number("population", 2..=1_000_000)?, options)?.replaced();
        Ok(Box::new(Genetic { population, crossover: Crossover::new(options)?, mutation: Mutation::new(options)? }))
    },
};

/// Option of genetic searches: the crossover of two configurations.
pub(super) const CROSSOVER: SearchOption = SearchOption {
    name: "crossover",
    default: "uniform",
    text: "crossover: uniform (each parameter from either parent) or one_point (up to one parameter from the first)",
};

/// Option of genetic searches: the size of mutations.
pub(super) const STEPS: SearchOption = SearchOption {
    name: "steps",
    default: "0.5",
    text: "share of mutations that move to a neighbouring value instead of any, 0 to 1; 0 in the paper",
};

/// Whether a mutation may change nothing, an option of genetic searches.
pub(super) const MUTANT: SearchOption = SearchOption {
    name: "mutant",
    default: "any",
    text: "other mutations take any value, the old one included, or another value (other), as in NoSE",
};

/// Steady-state genetic algorithm: children are bred from the best of all trials so far.
///
/// # Source
/// The genetic algorithm that the NoSE paper compares itself with has generations, of which an elite of 3 of
/// 100 survives, roulette selection, one-point crossover and a mutation of 0.1 to any value:
/// `population=100,generation=97,selection=fitness,start=random` with
/// `crossover=one_point,mutation=0.1,steps=0`. By default we differ in all of these: no configuration is
/// measured twice, so a good one that leaves the population would be lost; selection by rank does not depend
/// on the scale of the times; uniform crossover does not depend on the order in which a template declares its
/// parameters; and steps to neighbours refine configurations that are good already.
struct Genetic {
    population: Population,
    crossover: Crossover,
    mutation: Mutation,
}

/// Operator that combines two configurations into one.
#[derive(Clone, Copy)]
pub(super) enum Crossover {
    Uniform,
    OnePoint,
}

impl Crossover {
    pub(super) fn new(options: &Options) -> Result<Crossover, SearchError> {
        Ok([Crossover::Uniform, Crossover::OnePoint][options.choice(CROSSOVER.name, &["uniform", "one_point"])?])
    }

    pub(super) fn cross(&self, parents: &Parents, rng: &mut Xoshiro256PlusPlus) -> Config {
        let [mother, father] = [parents.select(rng).ranks(), parents.select(rng).ranks()];
        let mut ranks = mother.to_vec();
        match self {
            Crossover::Uniform => ranks.iter_mut().zip(father).for_each(|(rank, &other)| {
                if rng.random() {
                    *rank = other;
                }
            }),
            Crossover::OnePoint if ranks.len() > 1 => {
                let cut = rng.random_range(1..ranks.len());
                ranks[cut..].copy_from_slice(&father[cut..]);
            }
            Crossover::OnePoint => {}
        }
        Config::new(ranks)
    }
}

/// Operator that replaces each parameter with some probability by a neighbouring or any value.
pub(super) struct Mutation {
    probability: f64,
    steps: f64,
    /// Whether a mutated value always differs from the old one, if the parameter has another value.
    is_other: bool,
}

impl Mutation {
    pub(super) fn new(options: &Options) -> Result<Mutation, SearchError> {
        Ok(Mutation {
            probability: options.number("mutation", 0.0..=1.0)?,
            steps: options.number(STEPS.name, 0.0..=1.0)?,
            is_other: options.choice(MUTANT.name, &["any", "other"])? == 1,
        })
    }

    pub(super) fn mutate(&self, space: &Space, config: &Config, rng: &mut Xoshiro256PlusPlus) -> Config {
        let value = |(parameter, &rank): (usize, &u64)| {
            if !rng.random_bool(self.probability) {
                rank
            } else if rng.random_bool(self.steps) {
                space.rank_neighbours(parameter, rank).choose(rng).copied().unwrap_or(rank)
            } else if self.is_other {
                match space.n_values(parameter) {
                    1 => rank,
                    // Adding 1 to n − 1 to the old rank, modulo n, gives every other value.
                    n => (rank + rng.random_range(1..n)) % n,
                }
            } else {
                rng.random_range(0..space.n_values(parameter))
            }
        };
        Config::new(config.ranks().iter().enumerate().map(value).collect::<Vec<_>>())
    }
}

impl Search for Genetic {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let Genetic { population, crossover, mutation } = self;
        population.propose(n, |breeding| {
            breeding.children(
                breeding.n_children,
                |parents, rng| crossover.cross(parents, rng),
                |space, heir, rng| mutation.mutate(space, heir, rng),
            )
        })
    }

    fn observe(&mut self, trials: &[Trial]) {
        self.population.observe(trials);
    }
}
