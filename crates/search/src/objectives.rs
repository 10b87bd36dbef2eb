//! Multi-objective search: Pareto sets and scalarisation.

use crate::log_costs::LogCosts;
use crate::other_costs::OtherCosts;
use crate::trial::Timing;

impl Timing {
    /// Costs by all objectives, the median time first.
    pub fn costs(&self) -> impl Iterator<Item = f64> + '_ {
        std::iter::once(self.median_ns).chain(self.others.as_slice().iter().copied())
    }

    /// Timing with the geometric mean of all costs as its only cost, for searches of a single objective.
    pub fn joined(&self) -> Timing {
        let logs: Vec<f64> = self.costs().map(f64::ln).collect();
        let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
        Timing { median_ns: mean, min_ns: mean, others: OtherCosts::default(), ..*self }
    }
}

/// Indices of the timings in the Pareto set, by increasing cost of the first objective: no other timing is at
/// least as good in every objective and better in one. Of equal timings, the first is taken. Failures
/// (`None`) and timings with fewer objectives than another are excluded.
///
/// # Cost
/// O(n log n + n × size of the set).
pub fn pareto_set<'a>(timings: impl IntoIterator<Item = Option<&'a Timing>>) -> Vec<usize> {
    let mut all: Vec<(usize, Vec<f64>)> =
        timings.into_iter().enumerate().filter_map(|(at, timing)| Some((at, timing?.costs().collect()))).collect();
    let n_objectives = all.iter().map(|(_, costs)| costs.len()).max().unwrap_or(0);
    all.retain(|(_, costs)| costs.len() == n_objectives);
    all.sort_by(|(_, a), (_, b)| a.partial_cmp(b).expect("invariant: costs are numbers"));
    let mut set: Vec<(usize, Vec<f64>)> = Vec::new();
    for (at, costs) in all {
        // Any timing that dominates this one precedes it in this order.
        let is_beaten = set.iter().any(|(_, other)| other.iter().zip(&costs).all(|(other, own)| other <= own));
        if !is_beaten {
            set.push((at, costs));
        }
    }
    set.into_iter().map(|(at, _)| at).collect()
}

/// Weight of the weighted sum added to the largest weighted distance: without it, points that are equal in
/// one objective and worse in another could have the same cost.
const SUM_SHARE: f64 = 0.05;

/// Augmented Chebyshev scalarisation of several costs: the largest of the weighted distances from the best of
/// each objective, on a logarithmic scale that the Pareto set spans from 0 to 1.
///
/// # Source
/// Knowles, "ParEGO" (2006), equation 2, with its 0.05. We differ in the logarithms, and in the scale, which
/// is that of the Pareto set instead of all costs: one very slow trial would squeeze all others together.
#[derive(Debug, Clone, PartialEq)]
pub struct Chebyshev {
    weights: Vec<f64>,
    /// Scale of the costs of each objective.
    scales: Vec<LogCosts>,
    /// Logarithm of the least cost by objective, and of the ratio of the greatest cost in the Pareto set to
    /// it.
    least: Vec<f64>,
    spans: Vec<f64>,
}

impl Chebyshev {
    /// Scalarisation with a weight per objective; `None` if there are no timings, or they have fewer
    /// objectives.
    pub fn new<'a>(weights: &[f64], timings: impl Iterator<Item = &'a Timing> + Clone) -> Option<Chebyshev> {
        let set = pareto_set(timings.clone().map(Some));
        let all: Vec<&Timing> = timings.collect();
        let n = weights.len();
        if set.first().is_none_or(|&at| all[at].costs().count() != n) {
            return None;
        }
        let of = |objective: usize| all.iter().filter_map(move |timing| timing.costs().nth(objective));
        let scales: Vec<LogCosts> = (0..n).map(|objective| LogCosts::new(of(objective))).collect();
        let log = |at: usize| all[at].costs().zip(&scales).map(|(cost, scale)| scale.log(cost)).collect();
        let logs: Vec<Vec<f64>> = set.into_iter().map(log).collect();
        let end = |of: fn(f64, f64) -> f64, objective: usize| {
            logs.iter().map(|logs| logs[objective]).reduce(of).expect("invariant: the set is not empty")
        };
        let least: Vec<f64> = (0..n).map(|objective| end(f64::min, objective)).collect();
        // If all of the set are equal in an objective, there is no scale: a factor of e is as good as any.
        let span = |objective: usize| end(f64::max, objective) - least[objective];
        let spans = (0..n).map(|objective| Some(span(objective)).filter(|span| *span > 0.0).unwrap_or(1.0)).collect();
        Some(Chebyshev { weights: weights.to_vec(), scales, least, spans })
    }

    /// Scalar cost of a timing, at least 0 and lower is better. Infinite if it has fewer objectives.
    pub fn cost(&self, timing: &Timing) -> f64 {
        let costs: Vec<f64> = timing.costs().collect();
        if costs.len() != self.weights.len() {
            return f64::INFINITY;
        }
        let logs = costs.iter().zip(&self.scales).map(|(cost, scale)| scale.log(*cost));
        let parts = logs.zip(&self.least).zip(&self.spans).zip(&self.weights);
        let parts = parts.map(|(((log, least), span), weight)| weight * (log - least) / span);
        let (most, sum) = parts.fold((0.0, 0.0), |(most, sum), part| (f64::max(most, part), sum + part));
        most + SUM_SHARE * sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::other_costs::CostError;

    fn timing(costs: &[f64]) -> Timing {
        Timing { others: OtherCosts::new(&costs[1..]).unwrap(), ..Timing::of_samples(&costs[..1], false) }
    }

    #[test]
    fn the_pareto_set_is_what_nothing_beats() {
        let check = |all: &[&[f64]], expected: &[usize]| {
            let timings: Vec<Timing> = all.iter().map(|costs| timing(costs)).collect();
            assert_eq!(pareto_set(timings.iter().map(Some)), expected, "{all:?}");
        };
        check(&[], &[]);
        check(&[&[3.0], &[1.0], &[2.0]], &[1]);
        check(&[&[2.0, 2.0], &[1.0, 3.0], &[3.0, 1.0], &[3.0, 3.0], &[2.0, 2.5]], &[1, 0, 2]);
        check(&[&[1.0, 1.0], &[1.0, 1.0], &[1.0, 2.0]], &[0]);
        check(&[&[0.5], &[1.0, 1.0]], &[1]);
        check(&[&[1.0, 2.0, 3.0], &[1.0, 2.0, 2.0], &[2.0, 1.0, 9.0]], &[1, 2]);
        assert_eq!(pareto_set([None, Some(&timing(&[1.0]))]), [1]);
    }

    #[test]
    fn costs_are_few_and_positive() {
        assert_eq!(OtherCosts::new(&[1.0, 2.0]).unwrap().as_slice(), [1.0, 2.0]);
        assert_eq!(OtherCosts::new(&[1.0; 4]), Err(CostError::TooMany(5)));
        for cost in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(OtherCosts::new(&[1.0, cost]), Err(CostError::NotPositive(_))), "{cost}");
        }
        let joined = timing(&[8.0, 2.0]).joined();
        assert!((joined.median_ns - 4.0).abs() < 1e-12 && joined.others.is_empty());
    }

    #[test]
    fn weights_choose_a_part_of_the_set() {
        let all = [timing(&[1.0, 100.0]), timing(&[8.0, 8.0]), timing(&[100.0, 1.0]), timing(&[100.0, 100.0])];
        let best = |weights: &[f64]| {
            let by = Chebyshev::new(weights, all.iter()).unwrap();
            let costs: Vec<f64> = all.iter().map(|timing| by.cost(timing)).collect();
            (0..all.len()).min_by(|&a, &b| costs[a].total_cmp(&costs[b])).unwrap()
        };
        assert_eq!([best(&[0.95, 0.05]), best(&[0.5, 0.5]), best(&[0.05, 0.95])], [0, 1, 2]);
        // Between equals in the weighted objective, the other one decides.
        let pair = [timing(&[1.0, 2.0]), timing(&[1.0, 1.0])];
        let by = Chebyshev::new(&[1.0, 0.0], pair.iter()).unwrap();
        assert!(by.cost(&pair[0]) >= by.cost(&pair[1]));
        assert_eq!(by.cost(&timing(&[1.0])), f64::INFINITY);
        assert_eq!(Chebyshev::new(&[0.5, 0.5], [timing(&[1.0])].iter()), None);
    }

    /// Costs by an error metric, which is 0 for some, beside a time.
    #[test]
    fn a_metric_of_0_leaves_the_others_a_scale() {
        let none = Timing::LEAST_COST;
        let all = [timing(&[none, 9.0]), timing(&[1.0, 4.0]), timing(&[2.0, 3.0]), timing(&[16.0, 1.0])];
        let by = Chebyshev::new(&[1.0, 0.0], all.iter()).unwrap();
        // From 1/2, which stands for 0, to 16 there are five doublings.
        for (timing, expected) in all.iter().zip([0.0, 0.2, 0.4, 1.0]) {
            assert!((by.cost(timing) - (1.0 + SUM_SHARE) * expected).abs() < 1e-12, "{timing:?}");
        }
    }
}
