//! Simulated annealing over the neighbourhoods of the space.

use std::collections::HashSet;

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::seen::Seen;
use super::{Problem, Search, SearchOption, SearchRow};
use crate::space::{Config, Space};
use crate::trial::Trial;

pub(super) const ROW: SearchRow = SearchRow {
    name: "simulated_annealing",
    text: "walks to neighbours, and to worse ones the less the longer it has walked",
    paper: "",
    transfers: false,
    options: &[
        SearchOption {
            name: "temperature",
            default: "0.5",
            text: "at the start of a walk: a neighbour that takes e to this power times as long is taken with probability 1/e",
        },
        SearchOption {
            name: "cooling",
            default: "0.97",
            text: "factor on the temperature after each trial, 0.01 to 1",
        },
        SearchOption { name: "coldest", default: "0.005", text: "temperature below which a new walk starts" },
    ],
    make: |Problem { space, .. }, seed, options| {
        let temperature = options.number("temperature", 1e-6..=1e6)?;
        Ok(Box::new(SimulatedAnnealing {
            hottest: temperature,
            cooling: options.number("cooling", 0.01..=1.0)?,
            coldest: options.number("coldest", 0.0..=1e6)?,
            temperature,
            seen: Seen::new(space),
            rng: Xoshiro256PlusPlus::seed_from_u64(seed),
            current: None,
            proposed: HashSet::new(),
        }))
    },
};

/// Metropolis walk whose energy is the logarithm of the time, restarted from a random configuration when it
/// is cold.
///
/// Candidates are unseen neighbours of the current configuration; if there are none, unseen configurations
/// that differ in one parameter; if there are none either, a new walk starts. A batch is drawn around one
/// configuration and decided in the order of its trials. Trials from elsewhere, such as an earlier run, are
/// not steps of the walk: it moves to one of them only if it is faster.
struct SimulatedAnnealing {
    hottest: f64,
    cooling: f64,
    coldest: f64,
    temperature: f64,
    seen: Seen,
    rng: Xoshiro256PlusPlus,
    /// Current configuration of the walk, with its time; `None` before the walk starts.
    current: Option<(Config, f64)>,
    /// Steps of the walk that have yet to be observed.
    proposed: HashSet<Config>,
}

impl SimulatedAnnealing {
    fn next(&mut self) -> Option<Config> {
        if let Some((current, _)) = &self.current {
            let neighbours = self.seen.space().neighbours(current);
            let fresh: Vec<&Config> = neighbours.iter().filter(|config| self.seen.is_fresh(config)).collect();
            let substitute = |space: &Space, rng: &mut Xoshiro256PlusPlus| {
                let parameter = rng.random_range(0..space.n_parameters());
                current.with(parameter, rng.random_range(0..space.n_values(parameter)))
            };
            let next = match fresh.choose(&mut self.rng) {
                Some(config) => Some((*config).clone()),
                None if current.ranks().is_empty() => None,
                None => self.seen.bred(&mut self.rng, substitute, |_| true),
            };
            if let Some(config) = next {
                self.seen.insert(&config);
                return Some(config);
            }
        }
        self.current = None;
        self.temperature = self.hottest;
        self.seen.draw(&mut self.rng)
    }
}

impl Search for SimulatedAnnealing {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        if self.temperature < self.coldest {
            self.current = None;
            self.temperature = self.hottest;
        }
        let batch: Vec<Config> = (0..n).map_while(|_| self.next()).collect();
        self.proposed.extend(batch.iter().cloned());
        batch
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in self.seen.note(trials) {
            let cost = trial.outcome.cost();
            let is_step = self.proposed.remove(&trial.config);
            let is_taken = self.current.as_ref().is_none_or(|(_, here)| {
                cost <= *here || is_step && self.rng.random::<f64>() < ((here / cost).ln() / self.temperature).exp()
            });
            if is_taken {
                self.current = Some((trial.config.clone(), cost));
            }
            if is_step {
                self.temperature *= self.cooling;
            }
        }
    }
}
