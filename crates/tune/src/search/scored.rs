//! Measured configurations by their fitness, and roulette-wheel selection among them.

use rand::RngExt;
use rand::distr::weighted::WeightedIndex;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::space::Config;
use crate::trial::Trial;

/// A configuration and its fitness, 0 where it failed.
#[derive(Debug, Clone)]
pub(super) struct Scored {
    pub(super) fitness: f64,
    pub(super) config: Config,
}

impl Scored {
    pub(super) fn new(trial: &Trial) -> Scored {
        Scored { fitness: trial.outcome.fitness(), config: trial.config.clone() }
    }

    /// Sorts best first, earlier ones before later ones as good, and drops all but the best `n`.
    pub(super) fn keep_best(scored: &mut Vec<Scored>, n: usize) {
        scored.sort_by(|a, b| b.fitness.total_cmp(&a.fitness));
        scored.truncate(n);
    }
}

/// Chooses among parents in proportion to their fitness; each alike where none has any, as where all trials failed.
pub(super) struct Roulette {
    n: usize,
    weights: Option<WeightedIndex<f64>>,
}

impl Roulette {
    pub(super) fn new(parents: &[Scored]) -> Roulette {
        let weights = WeightedIndex::new(parents.iter().map(|parent| parent.fitness)).ok();
        Roulette { n: parents.len(), weights }
    }

    /// The position of a parent, of which there is at least one.
    pub(super) fn spin(&self, rng: &mut Xoshiro256PlusPlus) -> usize {
        match &self.weights {
            Some(weights) => rng.sample(weights),
            None => rng.random_range(0..self.n),
        }
    }
}
