//! Permutation importance of a space's parameters.

use std::sync::Arc;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{Examples, Gbt, GbtOptions, Matrix, Objective, metrics};

use crate::features::UnitFeatures;
use crate::log_costs::LogCosts;
use crate::space::Space;
use crate::trial::Trial;

/// Minimum number of valid trials for [`importance`] and [`belief`](crate::belief()) to fit a model.
pub const LEAST_TRIALS: usize = 40;
/// Maximum number of valid trials that are used.
const MOST_TRIALS: usize = 4000;
/// Ratio of all trials to the held-out ones, on which the model is evaluated.
const HELD_OUT: usize = 4;
/// Number of shuffles of a parameter, whose effects are averaged.
const N_SHUFFLES: usize = 5;

/// Importance of the parameters, by a cost model fitted to the trials.
#[derive(Debug, Clone, PartialEq)]
pub struct Importance {
    /// Coefficient of determination (R²) of log time on held-out trials. Near or below 0 the model has
    /// learned nothing, and the importances are meaningless.
    pub r_squared: f64,
    /// Importance of each parameter: the drop of R² when its values are permuted among the held-out trials.
    pub by_parameter: Vec<f64>,
}

/// Computes the permutation importance of each parameter for the logarithm of the time; `None` if there are
/// too few valid trials, or all times are equal.
///
/// Boosted trees are fitted on three quarters of the trials. A parameter that constraints tie to others
/// shares its importance with them. The trials of a search are not a uniform sample: a parameter that it
/// settled early looks unimportant.
///
/// # Source
/// Breiman, "Random forests" (2001), section 10, on groups of features: all those of a parameter are shuffled
/// together.
///
/// # Cost
/// One fit of 100 trees and five predictions a parameter: some 100 ms for thousands of trials.
pub fn importance(space: &Arc<Space>, trials: &[Trial], seed: u64) -> Option<Importance> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let mut valid: Vec<&Trial> = trials.iter().filter(|trial| trial.outcome.timing().is_some()).collect();
    let is_first = |trial: &&Trial| trial.outcome.cost() == valid[0].outcome.cost();
    if valid.len() < LEAST_TRIALS || valid.iter().all(is_first) {
        return None;
    }
    valid.shuffle(&mut rng);
    valid.truncate(MOST_TRIALS);
    let features = UnitFeatures::new(space);
    let (held_out, fitted) = valid.split_at(valid.len() / HELD_OUT);
    let rows = |trials: &[&Trial]| trials.iter().map(|trial| features.of(&trial.config)).collect::<Vec<_>>();
    let scale = LogCosts::new(valid.iter().map(|trial| trial.outcome.cost()));
    let log_times = |trials: &[&Trial]| trials.iter().map(|t| scale.log(t.outcome.cost()) as f32).collect::<Vec<_>>();
    let matrix = |rows: &[Vec<f32>]| Matrix::from_rows(features.n_features(), rows);

    let options = GbtOptions { objective: Objective::SquaredError, ..GbtOptions::default() };
    let (known, targets) = (matrix(&rows(fitted)), log_times(fitted));
    let model = Gbt::fit(&Examples::new(&known, &targets), &options, seed).expect("invariant: times are finite");
    let (rows, truth) = (rows(held_out), log_times(held_out));
    let explained = |rows: &[Vec<f32>]| metrics::r_squared(&model.predict(&matrix(rows)), &truth);
    let r_squared = explained(&rows);
    let parameters = features.parameters();
    let mut fall = |parameter: usize| {
        let one = |rng: &mut Xoshiro256PlusPlus| {
            let mut order: Vec<usize> = (0..rows.len()).collect();
            order.shuffle(rng);
            let shuffled = |at: usize| -> Vec<f32> {
                let own = rows[at].iter().zip(&rows[order[at]]).zip(&parameters);
                own.map(|((own, other), of)| if *of == parameter { *other } else { *own }).collect()
            };
            r_squared - explained(&(0..rows.len()).map(shuffled).collect::<Vec<_>>())
        };
        (0..N_SHUFFLES).map(|_| one(&mut rng)).sum::<f64>() / N_SHUFFLES as f64
    };
    // If all times are equal, there is nothing to explain.
    r_squared
        .is_finite()
        .then(|| Importance { r_squared, by_parameter: (0..space.n_parameters()).map(&mut fall).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Parameter;
    use crate::trial::{ErrorClass, Outcome, Timing};

    #[test]
    fn what_decides_the_time_is_important() {
        let parameters = vec![
            Parameter::ordinal("much", 0..8),
            Parameter::ordinal("none", 0..8),
            Parameter::factorization("some", 64, 2),
        ];
        let space = Arc::new(Space::new("test", parameters, vec![]).unwrap());
        let trial = |index: u128| {
            let config = space.config_at(index);
            let log_time = config.ranks()[0] as f64 + 0.1 * config.ranks()[2] as f64;
            let median_ns = log_time.exp2();
            let timing = Timing::of_samples(&[median_ns], false);
            Trial { config, outcome: Outcome::Measured(timing) }
        };
        let trials: Vec<Trial> = (0..space.size()).map(trial).collect();
        let found = importance(&space, &trials, 1).unwrap();
        let [much, none, some] = found.by_parameter[..] else { panic!("one for each parameter: {found:?}") };
        assert!(found.r_squared > 0.9 && much > 0.5 && much > 10.0 * some && some > none, "{found:?}");

        let failed = Outcome::Failed { class: ErrorClass::WrongAnswer, message: String::new() };
        let failures = trials.iter().map(|t| Trial { outcome: failed.clone(), ..t.clone() });
        assert_eq!(importance(&space, &failures.chain(trials[..39].to_vec()).collect::<Vec<_>>(), 1), None);
        let equal = trials.iter().map(|t| Trial { outcome: trials[0].outcome.clone(), ..t.clone() });
        assert_eq!(importance(&space, &equal.collect::<Vec<_>>(), 1), None);
    }
}
