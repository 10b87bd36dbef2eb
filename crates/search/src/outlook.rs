//! Expected improvement of a search by further trials.

use crate::log_costs::LogCosts;
use crate::trial::Timing;

/// Minimum number of trials for an estimate.
const LEAST_TRIALS: usize = 60;
/// Minimum size of the random samples whose expected minimum is used.
const LEAST_SAMPLE: f64 = 2.0;

/// Expected gain of `n_more` trials, as a share of the best time so far; `None` if too few trials are known.
///
/// `costs` are the times of all trials in the order in which they were made, infinite for failures. What a
/// search proposes next is taken to be like the later half of what it has proposed, and to gain on the best
/// of that half: more than it does where an earlier trial is ahead, but what it has not learnt yet is not
/// foreseen. Where that half fails altogether, as many trials gain nothing, and of more nothing is known.
///
/// # Source
/// The expected minimum of a random subset of a sample is known exactly. By extreme value theory (Gnedenko,
/// "Sur la distribution limite du terme maximum d'une série aléatoire", 1943) the minimum of n trials
/// approaches its limit as a power of n, or falls with the logarithm of n: the gains for equal factors of n
/// shrink by a constant factor of at most 1, which the last two gains determine (Aitken's Δ² process).
///
/// # Cost
/// O(n · log n) in the number of trials.
pub fn expected_gain(costs: &[f64], n_more: f64) -> Option<f64> {
    if costs.len() < LEAST_TRIALS {
        return None;
    }
    // No metric is below 0.
    if costs.iter().any(|&cost| cost <= Timing::LEAST_COST) {
        return Some(0.0);
    }
    let recent = &costs[costs.len() / 2..];
    let scale = LogCosts::new(recent.iter().copied());
    let Some(slowest) = recent.iter().copied().filter(|cost| cost.is_finite()).reduce(f64::max) else {
        // As many failures again are no surprise; of more, something may succeed.
        return (recent.len() as f64 >= n_more).then_some(0.0);
    };
    let slowest = scale.log(slowest);
    let mut logs: Vec<f64> = recent.iter().map(|cost| scale.log(*cost).min(slowest)).collect();
    logs.sort_by(f64::total_cmp);
    let n = logs.len() as f64;
    let growth = 1.0 + n_more.max(0.0) / n;
    // Factor between the sizes of the samples, and the number of such factors in the growth.
    let factor = growth.min((n / LEAST_SAMPLE).sqrt());
    let n_steps = growth.ln() / factor.ln();
    if factor <= 1.0 {
        return Some(0.0);
    }
    let [few, some, all] = [n / factor / factor, n / factor, n].map(|size| expected_minimum(&logs, size));
    let (before, last) = (few - some, some - all);
    // The gain is a rounding error of equal times.
    if last <= 1e-12 {
        return Some(0.0);
    }
    let shrink = (last / before).min(1.0);
    // Sum of a geometric series, whose terms are equal if nothing shrinks.
    let terms = if shrink > 0.999 { n_steps } else { shrink * (1.0 - shrink.powf(n_steps)) / (1.0 - shrink) };
    // Converts a difference of logarithms to a share of the time.
    Some(-(-last * terms).exp_m1())
}

/// Expected minimum of a random subset of `size` values, out of values in ascending order.
fn expected_minimum(ascending: &[f64], size: f64) -> f64 {
    let n = ascending.len() as f64;
    // Probability that the value at this position is the minimum of the subset.
    let mut probability = size / n;
    let (mut sum, mut total) = (0.0, 0.0);
    for (at, value) in ascending.iter().enumerate() {
        sum += probability * value;
        total += probability;
        let left = n - 1.0 - at as f64;
        probability *= ((left + 1.0 - size) / left).max(0.0);
        if left < 1.0 || probability <= 0.0 {
            break;
        }
    }
    sum / total
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;

    use super::*;

    /// Mean expected gain and mean actual gain over many runs of independent draws.
    fn gains(draw: impl Fn(f64) -> f64, n: usize, n_more: usize) -> (f64, f64) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(3);
        let (mut expected, mut found) = (0.0, 0.0);
        for _ in 0..1000 {
            let costs: Vec<f64> = (0..n + n_more).map(|_| draw(rng.random())).collect();
            let best = |costs: &[f64]| costs.iter().copied().fold(f64::INFINITY, f64::min);
            found += 1.0 - best(&costs) / best(&costs[..n]);
            expected += expected_gain(&costs[..n], n_more as f64).unwrap();
        }
        (expected / 1000.0, found / 1000.0)
    }

    /// Distributions with lower ends of every kind: unbounded, with few or many times near the end, and with
    /// failures. Because only half of the trials are used, the expectation is larger, the more so the nearer
    /// the end.
    #[test]
    fn the_gain_of_random_draws_is_as_expected() {
        let exponential = |scale: f64| move |u: f64| 1e6 * u.max(1e-12).powf(scale);
        let fails = |u: f64| if u > 0.5 { f64::INFINITY } else { 1.0 + u };
        let all = [
            gains(exponential(0.05), 200, 100),
            gains(exponential(0.2), 400, 1000),
            gains(|u| 1.0 + u, 100, 60),
            gains(|u| 1.0 + u.sqrt(), 100, 300),
            gains(|u| 1.0 + u * u, 200, 200),
            gains(fails, 100, 100),
        ];
        for (at, (expected, found)) in all.into_iter().enumerate() {
            assert!(expected > 0.8 * found && expected < 8.0 * found, "{at}: {expected}, found {found}");
        }
    }

    #[test]
    fn little_is_expected_where_all_are_alike() {
        let costs: Vec<f64> = (0..400).map(|at| 1e6 + 1e3 * f64::from(at * 37 % 401)).collect();
        let expected = expected_gain(&costs, 400.0).unwrap();
        assert!(expected > 0.0 && expected < 0.01, "{expected}");
        assert!(expected_gain(&costs, 4e9).unwrap() < 0.02);
        assert!(expected_gain(&costs, 10.0).unwrap() < expected);
        assert_eq!(expected_gain(&costs, 0.0), Some(0.0));
        // The trials after a lucky early one count, not that one.
        let mut lucky = costs.clone();
        lucky[3] = 1e5;
        assert_eq!(expected_gain(&lucky, 400.0), Some(expected));
        assert_eq!(expected_gain(&[7.0; 100], 1e9), Some(0.0));
    }

    #[test]
    fn nothing_is_expected_of_what_is_not_known() {
        assert_eq!(expected_gain(&[], 10.0), None);
        assert_eq!(expected_gain(&[1.0; 59], 10.0), None);
        assert_eq!(expected_gain(&[f64::INFINITY; 500], 251.0), None);
        assert_eq!(expected_gain(&[f64::INFINITY; 500], 250.0), Some(0.0));
        let mut few = vec![f64::INFINITY; 500];
        few[499] = 1.0;
        assert_eq!(expected_gain(&few, 10.0), Some(0.0));
    }

    #[test]
    fn minima_of_parts_are_those_of_all_parts() {
        let values = [1.0, 2.0, 4.0, 8.0];
        // Of six pairs three have 1, two 2 and one 4.
        assert!((expected_minimum(&values, 2.0) - (3.0 + 4.0 + 4.0) / 6.0).abs() < 1e-12);
        assert_eq!((expected_minimum(&values, 1.0), expected_minimum(&values, 4.0)), (3.75, 1.0));
    }
}
