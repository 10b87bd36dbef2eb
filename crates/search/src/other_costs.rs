//! Costs of a trial by the second and further objectives.

/// Costs of a trial by the second and further objectives, in their order: medians over its samples; lower is
/// better.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OtherCosts {
    costs: [f64; OtherCosts::MOST],
    n: usize,
}

/// Reason why numbers are not valid costs.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CostError {
    /// Number of objectives beyond the supported maximum.
    #[error("{0} objectives are more than {most}, the first included", most = OtherCosts::MOST + 1)]
    TooMany(usize),
    /// Cost that is not positive and finite.
    #[error("the cost {0} is not a positive number")]
    NotPositive(f64),
}

impl OtherCosts {
    /// Maximum number of objectives beyond the first.
    pub const MOST: usize = 3;

    /// Makes costs from numbers in the order of the objectives.
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

    /// Costs as a slice; empty for a single objective.
    pub fn as_slice(&self) -> &[f64] {
        &self.costs[..self.n]
    }

    /// Whether there is a single objective.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }
}
