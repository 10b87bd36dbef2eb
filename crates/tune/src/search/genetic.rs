//! Genetic search: roulette selection, one-point crossover, mutation, elites.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::scored::{Roulette, Scored};
use super::seen::Seen;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::space::{Config, Space};
use crate::trial::Trial;

pub(super) const ROW: SearchRow = SearchRow {
    name: "genetic",
    text: "roulette selection, one-point crossover, mutation by random values, elites kept",
    paper: "NoSE, the genetic algorithm it is compared with",
    transfers: false,
    options: &[
        SearchOption {
            name: "population",
            default: "16",
            text: "configurations in a generation, at least 2; the paper's 100 need thousands of trials",
        },
        SearchOption { name: "elite", default: "3", text: "best ones kept for the next generation, below population" },
        SearchOption { name: "mutation", default: "0.1", text: "probability that a parameter is replaced, 0 to 1" },
    ],
    make: |Problem { space, .. }, seed, options| {
        let population = options.number("population", 2..=1_000_000)?;
        Ok(Box::new(Genetic {
            population,
            elite: options.number("elite", 0..=population - 1)?,
            mutation: options.number("mutation", 0.0..=1.0)?,
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            parents: Vec::new(),
            roulette: Roulette::new(&[]),
            unborn: 0,
            scored: Vec::new(),
        }))
    },
};

/// A generational genetic algorithm whose generations are bred child by child, as batches are asked for.
///
/// # Source
/// The genetic algorithm that the NoSE paper compares itself with: population 100, elite 3, mutation 0.1. We differ in
/// the default population, which suits budgets of a few hundred trials, in
/// that a child that is not new or not legal is bred again, with other parents, and that trials of earlier runs
/// count as members of the first generation.
struct Genetic {
    population: usize,
    elite: usize,
    mutation: f64,
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    /// Whom children are bred from, by fitness, best first; empty while the population is filled at random.
    parents: Vec<Scored>,
    roulette: Roulette,
    /// Children left to breed in this generation.
    unborn: usize,
    /// Members of the next generation: the elite and what was observed since.
    scored: Vec<Scored>,
}

impl Genetic {
    fn next_generation(&mut self) {
        Scored::keep_best(&mut self.scored, self.population);
        if self.scored.len() < self.population {
            self.parents.clear();
            self.unborn = self.population - self.scored.len();
        } else {
            self.parents = std::mem::take(&mut self.scored);
            self.unborn = self.population - self.elite;
            self.scored.extend_from_slice(&self.parents[..self.elite]);
        }
        self.roulette = Roulette::new(&self.parents);
    }

    /// A new legal configuration, or `None` where the space is exhausted.
    fn child(&mut self) -> Option<Config> {
        if self.parents.is_empty() {
            return self.seen.draw(&mut self.rng);
        }
        self.seen.breed(&mut self.rng, |space, rng| {
            let [mother, father] = [0; 2].map(|_| &self.parents[self.roulette.spin(rng)].config);
            mutate(space, crossover(mother, father, rng), self.mutation, rng)
        })
    }
}

/// Single-point crossover: the ranks of one parent up to a random place, from there on those of the other.
pub(super) fn crossover(mother: &Config, father: &Config, rng: &mut Xoshiro256PlusPlus) -> Config {
    let mut ranks = mother.ranks().to_vec();
    if ranks.len() > 1 {
        let cut = rng.random_range(1..ranks.len());
        ranks[cut..].copy_from_slice(&father.ranks()[cut..]);
    }
    Config::new(ranks)
}

/// Uniform mutation: each parameter with this probability takes a random value.
pub(super) fn mutate(space: &Space, config: Config, probability: f64, rng: &mut Xoshiro256PlusPlus) -> Config {
    let mutated = config.ranks().iter().enumerate().map(|(parameter, &rank)| {
        if rng.random_bool(probability) { rng.random_range(0..space.n_values(parameter)) } else { rank }
    });
    Config::new(mutated.collect::<Vec<_>>())
}

impl Search for Genetic {
    /// A batch ends with its generation, for the next one is bred from what this one turns out to be.
    fn propose(&mut self, n: usize) -> Vec<Config> {
        if self.unborn == 0 {
            self.next_generation();
        }
        let batch: Vec<Config> = (0..n.min(self.unborn)).map_while(|_| self.child()).collect();
        self.unborn -= batch.len();
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in trials {
            if self.seen.space().contains(&trial.config) {
                self.seen.insert(&trial.config);
                self.scored.push(Scored::new(trial));
            }
        }
    }
}
