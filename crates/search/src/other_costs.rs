//! Costs of a trial by the objectives beyond the first.

/// Costs of a trial by the objectives beyond the first, in their order: medians over its samples, less is
/// better.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OtherCosts {
    costs: [f64; OtherCosts::MOST],
    n: usize,
}

/// Reason why numbers are no costs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CostError {
    /// More objectives than are searched at once.
    #[error("{0} objectives are more than {most}, the first included", most = OtherCosts::MOST + 1)]
    TooMany(usize),
    /// A cost without an order, or of which searches take no logarithm.
    #[error("the cost {0} is not a positive number")]
    NotPositive(f64),
}

impl OtherCosts {
    /// Most objectives beyond the first.
    pub const MOST: usize = 3;

    /// Makes them of numbers in the order of the objectives.
    ///
    /// # Errors
    /// If they are more than [`OtherCosts::MOST`], or one is not positive and finite.
    pub fn new(costs: &[f64]) -> Result<OtherCosts, CostError> {
        if costs.len() > OtherCosts::MOST {
            return Err(CostError::TooMany(costs.len() + 1));
        }
        if let Some(cost) = costs.iter().find(|cost| !(**cost > 0.0 && cost.is_finite())) {
            return Err(CostError::NotPositive(*cost));
        }
        let mut all = [0.0; OtherCosts::MOST];
        all[..costs.len()].copy_from_slice(costs);
        Ok(OtherCosts { costs: all, n: costs.len() })
    }

    /// The costs; none of a trial with one objective.
    pub fn as_slice(&self) -> &[f64] {
        &self.costs[..self.n]
    }

    /// Whether there is one objective alone.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }
}
