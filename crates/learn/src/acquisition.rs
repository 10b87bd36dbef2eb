//! Acquisition functions, which score uncertain predictions.

use std::f64::consts::{PI, SQRT_2};

/// Acquisition function: combines a predictive mean and standard deviation into a score. Larger predictions
/// and larger scores are better.
///
/// # Source
/// AutoTVM, section 3.3, which names mean, expected improvement and upper confidence bound, and finds no gain
/// over the mean; Kushner, "A New Method of Locating the Maximum Point" (1964), for the probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Acquisition {
    /// Predictive mean alone.
    Mean,
    /// Expected improvement over the best known value, for a normal distribution.
    ExpectedImprovement,
    /// Probability of improvement over the best known value, for a normal distribution.
    ProbabilityOfImprovement,
    /// Upper confidence bound (UCB): the mean plus a multiple of the standard deviation.
    UpperConfidenceBound {
        /// Number of standard deviations.
        kappa: f64,
    },
}

impl Acquisition {
    /// Returns the score of a prediction; `best` is the largest known value.
    pub fn score(self, mean: f64, standard_deviation: f64, best: f64) -> f64 {
        match self {
            Acquisition::Mean => mean,
            Acquisition::UpperConfidenceBound { kappa } => mean + kappa * standard_deviation,
            Acquisition::ProbabilityOfImprovement => {
                let z = (mean - best) / standard_deviation;
                if z.abs() < 1e8 { normal_cdf(z) } else { f64::from(u8::from(mean > best)) }
            }
            Acquisition::ExpectedImprovement => {
                let gain = mean - best;
                let z = gain / standard_deviation;
                if standard_deviation > 0.0 && z.abs() < 1e8 {
                    (gain * normal_cdf(z) + standard_deviation * normal_density(z)).max(0.0)
                } else {
                    gain.max(0.0)
                }
            }
        }
    }
}

/// Returns the density of the standard normal distribution.
fn normal_density(z: f64) -> f64 {
    (-0.5 * z * z).exp() / (SQRT_2 * PI.sqrt())
}

/// Returns the probability that a standard normal variable is below `z`, to about 14 digits, in the lower
/// tail too.
fn normal_cdf(z: f64) -> f64 {
    let x = z.abs();
    if x < 3.0 {
        // Φ(x) = 1/2 + φ(x) · (x + x³/3 + x⁵/(3·5) + …)
        let mut term = z;
        let mut sum = z;
        let mut n = 3.0;
        while term.abs() > 1e-16 * sum.abs() {
            term *= z * z / n;
            sum += term;
            n += 2.0;
        }
        return 0.5 + normal_density(z) * sum;
    }
    // Mills' ratio as a continued fraction: Φ(−x) = φ(x) / (x + 1/(x + 2/(x + 3/…))). The larger x, the
    // sooner it converges.
    let depth = 5 + (100.0 / x) as u32;
    let fraction = (1..=depth).rev().fold(x, |below, n| x + f64::from(n) / below);
    let tail = normal_density(x) / fraction;
    if z < 0.0 { tail } else { 1.0 - tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_normal_distribution_is_accurate() {
        let known = [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_542_9),
            (-2.0, 0.022_750_131_948_179_21),
            (-3.5, 2.326_290_790_355_250_4e-4),
            (-6.0, 9.865_876_450_376_98e-10),
        ];
        for (z, expected) in known {
            assert!((normal_cdf(z) / expected - 1.0).abs() < 1e-11, "{z}: {} is not {expected}", normal_cdf(z));
        }
    }

    #[test]
    fn expected_improvement_is_the_integral() {
        let ei = |mean, sd, best| Acquisition::ExpectedImprovement.score(mean, sd, best);
        for (mean, sd, best) in [(1.0, 0.5, 1.2), (3.0, 2.0, 1.0), (0.0, 1.0, 2.5)] {
            let step = 1e-3;
            let density = |y: f64| normal_density((y - mean) / sd) / sd;
            let integral: f64 =
                (0..20_000).map(|i| best + (f64::from(i) + 0.5) * step).map(|y| (y - best) * density(y) * step).sum();
            assert!((ei(mean, sd, best) - integral).abs() < 1e-6);
        }
        assert_eq!(ei(2.0, 0.0, 1.5), 0.5);
        assert_eq!(ei(1.0, 0.0, 1.5), 0.0);
        assert!(ei(0.0, 1.0, 8.0) < ei(0.0, 1.0, 7.0) && ei(0.0, 1.0, 8.0) > 0.0);
        assert_eq!(ei(1.0, 1e-300, 1.5), 0.0);
    }

    #[test]
    fn the_probability_of_an_improvement_is_that_of_the_tail() {
        let of = |mean, sd, best| Acquisition::ProbabilityOfImprovement.score(mean, sd, best);
        assert!((of(1.0, 0.5, 2.0) / 0.022_750_131_948_179_21 - 1.0).abs() < 1e-11);
        assert_eq!((of(1.0, 2.0, 1.0), of(1.0, 0.0, 0.5), of(1.0, 0.0, 1.0)), (0.5, 1.0, 0.0));
    }

    #[test]
    fn doubt_counts_in_favour() {
        let ucb = Acquisition::UpperConfidenceBound { kappa: 2.0 };
        assert_eq!(ucb.score(1.0, 0.5, 9.0), 2.0);
        assert_eq!(Acquisition::Mean.score(1.0, 0.5, 9.0), 1.0);
    }
}
