//! Logarithms of costs, among which a metric may be 0.

use crate::trial::Timing;

/// Logarithms of the costs of one objective.
///
/// A cost at an end of the range that [`Timing`] allows stands for a metric of exactly 0, which has no
/// logarithm: it counts as half the least cost of the others, or as twice the greatest, so that the others
/// stay comparable.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LogCosts {
    least: f64,
    greatest: f64,
}

impl LogCosts {
    /// Scale for these costs; infinite ones, of failures, are ignored.
    pub(crate) fn new(costs: impl IntoIterator<Item = f64>) -> LogCosts {
        let inner = costs.into_iter().filter(|&cost| Timing::LEAST_COST < cost && cost < Timing::GREATEST_COST);
        let ends = inner.fold(None, |ends: Option<(f64, f64)>, cost| {
            let (least, greatest) = ends.unwrap_or((cost, cost));
            Some((least.min(cost), greatest.max(cost)))
        });
        // If all metrics are 0, any scale will do.
        let (least, greatest) = ends.unwrap_or((1.0, 1.0));
        LogCosts { least: (least / 2.0).ln(), greatest: (greatest * 2.0).ln() }
    }

    /// Logarithm of a cost; infinite for a failure.
    pub(crate) fn log(&self, cost: f64) -> f64 {
        match cost {
            f64::INFINITY => f64::INFINITY,
            _ if cost <= Timing::LEAST_COST => self.least,
            _ if cost >= Timing::GREATEST_COST => self.greatest,
            _ => cost.ln(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_next_to_the_others() {
        let scale = LogCosts::new([8.0, Timing::LEAST_COST, 2.0, f64::INFINITY, Timing::GREATEST_COST]);
        assert_eq!(scale.log(Timing::LEAST_COST), 0.0);
        assert_eq!(scale.log(Timing::GREATEST_COST), 16f64.ln());
        assert_eq!((scale.log(8.0), scale.log(f64::INFINITY)), (8f64.ln(), f64::INFINITY));
        let zeros = LogCosts::new([Timing::LEAST_COST; 2]);
        assert!(zeros.log(Timing::LEAST_COST) < zeros.log(1.0));
    }
}
