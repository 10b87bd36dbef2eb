//! Evolution whose children pass a nearest-neighbour surrogate before they are measured.

use std::collections::{HashSet, VecDeque};

use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{Knn, Matrix};

use super::genetic::{crossover, mutate};
use super::scored::{Roulette, Scored};
use super::seen::Seen;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::features::KnobFeatures;
use crate::space::Config;
use crate::trial::Trial;

/// Once twice as many trials are known, the surrogate forgets all but this many, so that it stays quick.
const MOST_KNOWN: usize = 2048;

pub(super) const ROW: SearchRow = SearchRow {
    name: "nose",
    text: "evolution in which nearest neighbours choose the children that are measured",
    paper: "NoSE",
    transfers: false,
    options: &[
        SearchOption {
            name: "population",
            default: "20",
            text: "configurations that are bred from, at least 2; the paper's 100 need thousands of trials",
        },
        SearchOption { name: "offspring", default: "1.5", text: "children for each of the population, 0.01 to 100" },
        SearchOption {
            name: "elite",
            default: "0.3",
            text: "measured children for each of the population, 0.01 to 100",
        },
        SearchOption { name: "mutation", default: "0.3", text: "probability that a parameter is replaced, 0 to 1" },
        SearchOption { name: "k", default: "9", text: "neighbours that predict a child, at least 1" },
    ],
    make: |Problem { space, .. }, seed, options| {
        let population = options.number("population", 2..=1_000_000)?;
        let k = options.number("k", 1..=1_000_000)?;
        let features = KnobFeatures::new(space);
        let part = |name| Ok((options.number(name, 0.01..=100.0)? * population as f64).round().max(1.0) as usize);
        Ok(Box::new(NoSe {
            population,
            n_offspring: part("offspring")?,
            n_elite: part("elite")?,
            mutation: options.number("mutation", 0.0..=1.0)?,
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            best: Vec::new(),
            knowledge: Knn::new(k, features.n_features()),
            features,
            elite: VecDeque::new(),
        }))
    },
};

/// A genetic algorithm that measures only the children of which a surrogate without training expects most.
///
/// # Source
/// NoSE, section III, with its M = 1.5 N, E = 0.3 N, mutation 0.3 and k = 9. We differ in that the default of N suits budgets
/// of a few hundred trials, where the paper's 100 would be spent on random ones, that a child that is not
/// new or not legal is bred again from the same parents, and after several illegal ones becomes the nearest legal
/// configuration, and that categories are compared by equality, since their codes have no distance. Of many thousand trials, the
/// earliest are forgotten.
struct NoSe {
    population: usize,
    n_offspring: usize,
    n_elite: usize,
    mutation: f64,
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    /// The population: the best of all trials.
    best: Vec<Scored>,
    features: KnobFeatures,
    /// The latest trials with their fitness.
    knowledge: Knn,
    /// What is left to measure of this generation, the most promising first.
    elite: VecDeque<Config>,
}

impl NoSe {
    /// The most promising children of the population; empty where breeding gives nothing new.
    fn generation(&mut self) -> VecDeque<Config> {
        let roulette = Roulette::new(&self.best);
        let mut children: Vec<Config> = Vec::with_capacity(self.n_offspring);
        let mut siblings = HashSet::new();
        for _ in 0..self.n_offspring {
            let [mother, father] = [0; 2].map(|_| &self.best[roulette.spin(&mut self.rng)].config);
            let breed = |space: &_, rng: &mut _| mutate(space, crossover(mother, father, rng), self.mutation, rng);
            let Some(child) = self.seen.bred(&mut self.rng, breed, |child| !siblings.contains(child)) else { continue };
            siblings.insert(child.clone());
            children.push(child);
        }
        let rows = children.iter().map(|child| self.features.of(child));
        let rows = Matrix::from_rows(self.features.n_features(), rows);
        let mut predicted: Vec<(f32, Config)> = self.knowledge.predict(&rows).into_iter().zip(children).collect();
        predicted.sort_by(|a, b| b.0.total_cmp(&a.0));
        predicted.truncate(self.n_elite);
        predicted.into_iter().map(|(_, child)| child).collect()
    }
}

impl Search for NoSe {
    /// A batch ends with its generation, for the next one is bred from what this one turns out to be.
    fn propose(&mut self, n: usize) -> Vec<Config> {
        if self.best.len() < self.population {
            let missing = self.population - self.best.len();
            return (0..n.min(missing)).map_while(|_| self.seen.draw(&mut self.rng)).collect();
        }
        // Others may have measured some of the elite since it was chosen.
        self.elite.retain(|child| self.seen.is_fresh(child));
        if self.elite.is_empty() {
            self.elite = self.generation();
        }
        if self.elite.is_empty() {
            return self.seen.draw(&mut self.rng).into_iter().collect();
        }
        let batch: Vec<Config> = self.elite.drain(..n.min(self.elite.len())).collect();
        batch.iter().for_each(|config| assert!(self.seen.insert(config), "invariant: the elite is fresh"));
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in trials {
            if self.seen.space().contains(&trial.config) {
                self.seen.insert(&trial.config);
                self.knowledge.push(&self.features.of(&trial.config), trial.outcome.fitness() as f32);
                self.best.push(Scored::new(trial));
            }
        }
        Scored::keep_best(&mut self.best, self.population);
        if self.knowledge.len() >= 2 * MOST_KNOWN {
            self.knowledge.keep_latest(MOST_KNOWN);
        }
    }
}
