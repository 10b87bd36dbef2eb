//! Evolutionary search whose children are filtered by a nearest-neighbour surrogate before measurement.

use std::sync::Arc;

use tilewright_learn::{Knn, Matrix};

use super::genetic::{CROSSOVER, Crossover, MUTANT, Mutation, STEPS};
use super::options::Options;
use super::population::{GENERATION, Population, SELECTION, START};
use super::{Problem, Search, SearchError, SearchOption, SearchRow};
use crate::features::KnobFeatures;
use crate::space::{Config, Space};
use crate::trial::Trial;

/// Number of trials that the surrogate keeps once it has twice as many, so that it stays fast.
const MOST_KNOWN: usize = 2048;

/// Option of searches that use no programs: the features of configurations.
pub(super) const FEATURES: SearchOption = SearchOption {
    name: "features",
    default: "knob",
    text: "what the model sees: knob (parameters) or aligned (also which powers of two divide them)",
};

/// Encoder of a space that the option [`FEATURES`] selects.
pub(super) fn features(space: &Arc<Space>, options: &Options) -> Result<KnobFeatures, SearchError> {
    Ok([KnobFeatures::new, KnobFeatures::aligned][options.choice(FEATURES.name, &["knob", "aligned"])?](space))
}

pub(super) const ROW: SearchRow = SearchRow {
    name: "nose",
    text: "evolution in which nearest neighbours choose the children that are measured",
    paper: "NoSE",
    transfers: false,
    options: &[
        SearchOption {
            name: "population",
            default: "20",
            text: "size of the population, at least 2; the paper's 100 need thousands of trials",
        },
        GENERATION,
        SearchOption {
            name: "offspring",
            default: "5",
            text: "children bred for each one that is measured, 1 to 1000",
        },
        SELECTION,
        START,
        CROSSOVER,
        SearchOption {
            name: "mutation",
            default: "0.15",
            text: "probability that a parameter is replaced, 0 to 1; 0.3 in the paper",
        },
        STEPS,
        MUTANT,
        FEATURES,
        SearchOption { name: "k", default: "9", text: "nearest neighbours that predict a child, at least 1" },
    ],
    make: |Problem { space, .. }, seed, options| {
        let features = features(space, options)?;
        Ok(Box::new(NoSe {
            population: Population::new(space, seed, options.number("population", 2..=1_000_000)?, options)?,
            offspring: options.number("offspring", 1.0..=1000.0)?,
            crossover: Crossover::new(options)?,
            mutation: Mutation::new(options)?,
            knowledge: Knn::new(options.number("k", 1..=1_000_000)?, features.n_features()),
            features,
        }))
    },
};

/// Genetic algorithm that measures only the children that a training-free surrogate predicts to be the best.
///
/// # Source
/// NoSE, section III, with its 5 children bred for each that is measured (M = 1.5 N, E = 0.3 N) and k = 9.
/// The other settings of the paper are `population=100,generation=30,selection=fitness,start=random` with
/// `crossover=one_point,mutation=0.3,steps=0,mutant=other`; by default we differ as the genetic search does,
/// for the same reasons. A child that is not new or not legal is mutated again, and after several illegal
/// ones becomes the nearest legal configuration. Categories are compared by equality, since their codes have
/// no distance, and the distance is a sum over features, so that two categories are 2 apart and a
/// factorization counts once for each of its parts. After many thousand trials, the earliest are dropped.
struct NoSe {
    population: Population,
    /// Children bred for each that is measured.
    offspring: f64,
    crossover: Crossover,
    mutation: Mutation,
    features: KnobFeatures,
    /// Latest trials with their fitness.
    knowledge: Knn,
}

impl Search for NoSe {
    fn propose(&mut self, n: usize) -> Vec<Config> {
        let NoSe { population, offspring, crossover, mutation, features, knowledge } = self;
        population.propose(n, |breeding| {
            let children = breeding.children(
                (*offspring * breeding.n_children as f64).round() as usize,
                |parents, rng| crossover.cross(parents, rng),
                |space, heir, rng| mutation.mutate(space, heir, rng),
            );
            let rows = Matrix::from_rows(features.n_features(), children.iter().map(|child| features.of(child)));
            let mut predicted: Vec<(f32, Config)> = knowledge.predict(&rows).into_iter().zip(children).collect();
            predicted.sort_by(|a, b| b.0.total_cmp(&a.0));
            predicted.into_iter().take(breeding.n_children).map(|(_, child)| child).collect()
        })
    }

    fn observe(&mut self, trials: &[Trial]) {
        for trial in self.population.observe(trials) {
            self.knowledge.push(&self.features.of(&trial.config), trial.outcome.fitness() as f32);
        }
        if self.knowledge.len() >= 2 * MOST_KNOWN {
            self.knowledge.keep_latest(MOST_KNOWN);
        }
    }
}
