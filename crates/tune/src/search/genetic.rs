//! Genetic search: roulette selection, one-point crossover, mutation, elites.

use rand::distr::weighted::WeightedIndex;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::seen::Seen;
use super::{Search, SearchOption, SearchRow};
use crate::space::Config;
use crate::trial::Trial;

/// Children bred in vain, because they are not new or not legal, before a random configuration stands in for one.
const ATTEMPTS: usize = 200;

pub(super) const ROW: SearchRow = SearchRow {
    name: "genetic",
    text: "roulette selection, one-point crossover, mutation by random values, elites kept",
    paper: "NoSE, the genetic algorithm it is compared with",
    options: &[
        SearchOption { name: "population", default: "100", text: "configurations in a generation, at least 2" },
        SearchOption { name: "elite", default: "3", text: "best ones kept for the next generation, below population" },
        SearchOption { name: "mutation", default: "0.1", text: "probability that a parameter is replaced, 0 to 1" },
    ],
    make: |space, seed, options| {
        let population = options.number("population", 2..=1_000_000)?;
        Ok(Box::new(Genetic {
            population,
            elite: options.number("elite", 0..=population - 1)?,
            mutation: options.number("mutation", 0.0..=1.0)?,
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            parents: Vec::new(),
            roulette: None,
            unborn: 0,
            scored: Vec::new(),
        }))
    },
};

/// A generational genetic algorithm whose generations are bred child by child, as batches are asked for.
///
/// # Source
/// The genetic algorithm that the NoSE paper compares itself with: population 100, elite 3, mutation 0.1. We differ in
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
    /// Chooses among the parents in proportion to their fitness; `None` where no parent has any.
    roulette: Option<WeightedIndex<f64>>,
    /// Children left to breed in this generation.
    unborn: usize,
    /// Members of the next generation: the elite and what was observed since.
    scored: Vec<Scored>,
}

struct Scored {
    fitness: f64,
    config: Config,
}

impl Genetic {
    fn next_generation(&mut self) {
        self.scored.sort_by(|a, b| b.fitness.total_cmp(&a.fitness));
        self.scored.truncate(self.population);
        if self.scored.len() < self.population {
            self.parents.clear();
            self.unborn = self.population - self.scored.len();
        } else {
            self.parents = std::mem::take(&mut self.scored);
            self.unborn = self.population - self.elite;
            let elite = self.parents[..self.elite].iter();
            self.scored.extend(elite.map(|parent| Scored { fitness: parent.fitness, config: parent.config.clone() }));
        }
        self.roulette = WeightedIndex::new(self.parents.iter().map(|parent| parent.fitness)).ok();
    }

    /// A new legal configuration, or `None` where the space is exhausted.
    fn child(&mut self) -> Option<Config> {
        let attempts = if self.parents.is_empty() { 0 } else { ATTEMPTS };
        let bred = (0..attempts).find_map(|_| Some(self.breed()).filter(|child| self.seen.insert(child)));
        bred.or_else(|| self.seen.draw(&mut self.rng))
    }

    fn breed(&mut self) -> Config {
        let (mother, father) = (self.choose(), self.choose());
        let n = self.seen.space().n_parameters();
        let cut = if n < 2 { n } else { self.rng.random_range(1..n) };
        let mut ranks = self.parents[mother].config.ranks().to_vec();
        ranks[cut..].copy_from_slice(&self.parents[father].config.ranks()[cut..]);
        for (parameter, rank) in ranks.iter_mut().enumerate() {
            if self.rng.random_bool(self.mutation) {
                *rank = self.rng.random_range(0..self.seen.space().n_values(parameter));
            }
        }
        Config::new(ranks)
    }

    fn choose(&mut self) -> usize {
        match &self.roulette {
            Some(roulette) => self.rng.sample(roulette),
            None => self.rng.random_range(0..self.parents.len()),
        }
    }
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
                self.scored.push(Scored { fitness: trial.outcome.fitness(), config: trial.config.clone() });
            }
        }
    }
}
