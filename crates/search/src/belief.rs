//! Predictions of a surrogate model for configurations that were not measured.

use std::collections::HashSet;
use std::sync::Arc;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_learn::{Acquisition, GaussianProcess, Matrix};

use crate::features::ProcessFeatures;
use crate::importance::LEAST_TRIALS;
use crate::log_costs::LogCosts;
use crate::search::chosen;
use crate::space::{Config, Space};
use crate::trial::{Trial, quantile};

/// Maximum number of valid trials that the model is fitted on.
const MOST_TRIALS: usize = 200;
/// Ratio of all used trials to the held-out ones, on which the intervals are calibrated.
const HELD_OUT: usize = 4;
/// Steps of the fit.
const STEPS: [f64; 5] = [0.8, 0.8, 0.8, 0.4, 0.4];
/// Number of random configurations, and of best ones whose neighbours are considered.
const N_RANDOM: usize = 1000;
const N_BEST: usize = 5;
/// Probability that a time is within its interval, and half the width of that in standard deviations of a
/// normal distribution.
const WITHIN: f64 = 0.8;
const HALF_WIDTH: f64 = 1.281_551_565_544_8;

/// Predictions of a surrogate model for configurations that were not measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Belief {
    /// Calibration of the model's standard deviation: the factor by which it was scaled so that the 80 %
    /// intervals contain four fifths of the held-out trials.
    pub widened: f64,
    /// Unmeasured configurations, by decreasing probability of improvement.
    pub promising: Vec<Promise>,
}

/// Prediction for a configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Promise {
    /// The configuration.
    pub config: Config,
    /// Predicted median of the time, in nanoseconds.
    pub median_ns: f64,
    /// Ends of the 80 % prediction interval of the time, in nanoseconds.
    pub interval_ns: [f64; 2],
    /// Probability of improvement: that the configuration is faster than the best trial.
    pub chance: f64,
}

/// Fits a Gaussian process, as the `auto` search does, to the trials, and returns the `n` unmeasured
/// configurations with the highest probability of improvement; `None` if there are too few valid trials, or
/// all times are equal.
///
/// # Source
/// Split conformal prediction (Papadopoulos et al., 2002), for intervals that hold on held-out trials,
/// regardless of the model; Kushner (1964), for the probability of an improvement.
///
/// # Cost
/// A second or less.
pub fn belief(space: &Arc<Space>, trials: &[Trial], n: usize, seed: u64) -> Option<Belief> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let valid: Vec<&Trial> = trials.iter().filter(|trial| trial.outcome.timing().is_some()).collect();
    if valid.len() < LEAST_TRIALS {
        return None;
    }
    let fitness: Vec<f64> = valid.iter().map(|trial| trial.outcome.fitness()).collect();
    let mut known: Vec<&Trial> = chosen(&fitness, MOST_TRIALS, seed).into_iter().map(|at| valid[at]).collect();
    known.shuffle(&mut rng);
    let model = BeliefModel::new(space, &known)?;
    let (n_held_out, mut kernel) = (known.len() / HELD_OUT, model.features.kernel());
    let rows: Vec<Vec<f32>> = known.iter().map(|trial| model.features.of(&trial.config)).collect();
    let (held_out, fitted) = rows.split_at(n_held_out);
    let (of_held_out, of_fitted) = model.targets.split_at(n_held_out);
    let matrix = Matrix::from_rows(rows[0].len(), fitted);
    STEPS.iter().for_each(|step| kernel.fit(&matrix, of_fitted, *step));
    let mut process = GaussianProcess::new(kernel);
    process.extend(fitted.iter().map(|row| &row[..]));
    let mut misses: Vec<f64> = predict(&process, of_fitted, held_out)
        .into_iter()
        .zip(of_held_out)
        .map(|((mean, spread), target)| (target - mean).abs() / spread.max(f64::MIN_POSITIVE))
        .collect();
    misses.sort_by(f64::total_cmp);
    let widened = quantile(&misses, WITHIN) / HALF_WIDTH;
    process.extend(held_out.iter().map(|row| &row[..]));
    let targets = [of_fitted, of_held_out].concat();
    let pool = pool(space, trials, &known, &mut rng);
    let features: Vec<Vec<f32>> = pool.iter().map(|config| model.features.of(config)).collect();
    let promise = |(config, (mean, spread)): (Config, (f64, f64))| {
        let spread = widened * spread;
        Promise {
            median_ns: model.time_ns(mean),
            interval_ns: [HALF_WIDTH, -HALF_WIDTH].map(|width| model.time_ns(mean + width * spread)),
            chance: Acquisition::ProbabilityOfImprovement.score(mean, spread, model.best),
            config,
        }
    };
    let mut promising: Vec<Promise> =
        pool.into_iter().zip(predict(&process, &targets, &features)).map(promise).collect();
    promising.sort_by(|a, b| b.chance.total_cmp(&a.chance).then(a.median_ns.total_cmp(&b.median_ns)));
    promising.truncate(n);
    Some(Belief { widened, promising })
}

/// Features and targets of the model: standardized logarithms of throughput, clipped where they are farther
/// below the median than the best is above it.
struct BeliefModel {
    features: ProcessFeatures,
    mean: f64,
    scale: f64,
    /// Target of each known trial, and the largest one.
    targets: Vec<f64>,
    best: f64,
}

impl BeliefModel {
    /// Makes the model's targets; `None` if all times are equal, because nothing can be learnt from them.
    fn new(space: &Arc<Space>, known: &[&Trial]) -> Option<BeliefModel> {
        let scale = LogCosts::new(known.iter().map(|trial| trial.outcome.cost()));
        let logs: Vec<f64> = known.iter().map(|trial| -scale.log(trial.outcome.cost())).collect();
        let mut sorted = logs.clone();
        sorted.sort_by(f64::total_cmp);
        let most = sorted[sorted.len() - 1];
        let least = 2.0 * quantile(&sorted, 0.5) - most;
        let logs: Vec<f64> = logs.into_iter().map(|log| log.max(least)).collect();
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        let scale = (logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / logs.len() as f64).sqrt();
        if scale == 0.0 {
            return None;
        }
        let targets = logs.iter().map(|log| (log - mean) / scale).collect();
        let best = (most - mean) / scale;
        Some(BeliefModel { features: ProcessFeatures::new(space), mean, scale, targets, best })
    }

    fn time_ns(&self, target: f64) -> f64 {
        (-(target * self.scale + self.mean)).exp()
    }
}

/// Means and standard deviations of the predictions for rows.
fn predict(process: &GaussianProcess, targets: &[f64], rows: &[Vec<f32>]) -> Vec<(f64, f64)> {
    let solved = process.solve(&targets.iter().copied().map(Some).collect::<Vec<_>>());
    let candidates = process.candidates(rows.iter().map(|row| &row[..]));
    process.means(&candidates, &solved).into_iter().zip(process.standard_deviations(&candidates, &solved)).collect()
}

/// Configurations that were not measured: random ones, and the neighbours of the best.
fn pool(space: &Space, trials: &[Trial], known: &[&Trial], rng: &mut Xoshiro256PlusPlus) -> Vec<Config> {
    let mut seen: HashSet<Config> = trials.iter().map(|trial| trial.config.clone()).collect();
    let mut best = known.to_vec();
    best.sort_by(|a, b| a.outcome.cost().total_cmp(&b.outcome.cost()));
    let near = best.iter().take(N_BEST).flat_map(|trial| space.neighbours(&trial.config));
    let all: Vec<Config> = near.chain((0..N_RANDOM).map(|_| space.sample(rng))).collect();
    all.into_iter().filter(|config| seen.insert(config.clone())).collect()
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::conformance::measured;
    use crate::space::Parameter;

    fn space() -> Arc<Space> {
        let parameters = vec![Parameter::ordinal("x", 0..20), Parameter::ordinal("y", 0..20)];
        Arc::new(Space::new("test", parameters, vec![]).unwrap())
    }

    /// Times around a valley at (12, 7), with noise.
    fn trial(space: &Space, config: Config, rng: &mut Xoshiro256PlusPlus) -> Trial {
        let [x, y] = ["x", "y"].map(|name| space.int(&config, name) as f64);
        let time = 1e6 * (1.0 + ((x - 12.0).powi(2) + (y - 7.0).powi(2)) / 50.0);
        Trial { config, outcome: measured(time * rng.random_range(0.98..1.02)) }
    }

    /// Checks that the middle of the valley, which is not among the trials, is promising, and that intervals
    /// contain the measured times.
    #[test]
    fn what_was_left_out_is_promising() {
        let space = space();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(4);
        let is_valley = |config: &Config| config.ranks()[0].abs_diff(12) + config.ranks()[1].abs_diff(7) <= 2;
        let all = (0..space.size()).map(|at| space.config_at(at));
        let known: Vec<Trial> = all
            .filter(|config| !is_valley(config) && config.ranks().iter().sum::<u64>().is_multiple_of(3))
            .map(|config| trial(&space, config, &mut rng))
            .collect();
        let found = belief(&space, &known, 40, 1).unwrap();
        assert!(is_valley(&found.promising[0].config) && found.promising[0].chance > 0.5, "{:?}", found.promising[0]);
        let n_within = found.promising.iter().filter(|promise| {
            let time = trial(&space, promise.config.clone(), &mut rng).outcome.cost();
            promise.interval_ns[0] <= time && time <= promise.interval_ns[1]
        });
        let n_within = n_within.count();
        assert!(n_within >= 24, "{n_within} of 40");
        let Promise { interval_ns: [low, high], median_ns, .. } = found.promising[0];
        assert!(low < median_ns && median_ns < high);
        assert!(found.promising.iter().all(|promise| known.iter().all(|trial| trial.config != promise.config)));
    }

    #[test]
    fn nothing_is_believed_of_few_or_equal_trials() {
        let space = space();
        let equal: Vec<Trial> =
            (0..100).map(|at| Trial { config: space.config_at(at), outcome: measured(1.0) }).collect();
        assert_eq!(belief(&space, &equal[..39], 3, 0), None);
        assert_eq!(belief(&space, &equal, 3, 0), None);
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(1);
        let all: Vec<Trial> = (0..400).map(|at| trial(&space, space.config_at(at), &mut rng)).collect();
        assert_eq!(belief(&space, &all, 3, 0).unwrap().promising, []);
    }
}
