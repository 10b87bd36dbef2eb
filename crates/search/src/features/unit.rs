//! Configurations as points of the unit cube.

use std::sync::Arc;

use super::KnobFeatures;
use crate::space::{Config, Domain, Space};

/// Encoder of the configurations of one space as points of the unit cube, where distances along each
/// parameter are comparable.
///
/// Numbers in order are encoded as their rank, because the values that a template lists differ about equally;
/// a factorization as the logarithms of its factors; other categories as a one-hot vector; a permutation as
/// the position of each of its names.
#[derive(Debug, Clone)]
pub struct UnitFeatures {
    knobs: KnobFeatures,
    /// Parameter of each feature, and the scale that brings it into the unit interval.
    columns: Vec<(usize, FeatureScale)>,
}

#[derive(Debug, Clone, Copy)]
enum FeatureScale {
    Rank(f32),
    Log(f32),
    Linear(f32),
}

impl UnitFeatures {
    /// Encoder for a space.
    pub fn new(space: &Arc<Space>) -> UnitFeatures {
        let mut columns = Vec::new();
        for parameter in 0..space.n_parameters() {
            let n_values = space.n_values(parameter);
            let (scale, width) = match space.domain(parameter) {
                _ if space.is_ordered(parameter) => (FeatureScale::Rank(1.0 / (n_values.max(2) - 1) as f32), 1),
                Domain::Factorization { n, parts } => (FeatureScale::Log(1.0 / (*n.max(&2) as f32).log2()), *parts),
                Domain::Ordinal(_) | Domain::Categorical(_) => {
                    (FeatureScale::Linear(std::f32::consts::FRAC_1_SQRT_2), n_values as usize)
                }
                Domain::Permutation(names) => {
                    (FeatureScale::Linear(1.0 / (names.len().max(2) - 1) as f32), names.len())
                }
            };
            columns.extend(std::iter::repeat_n((parameter, scale), width));
        }
        UnitFeatures { knobs: KnobFeatures::new(space), columns }
    }

    /// Number of coordinates.
    pub fn n_features(&self) -> usize {
        self.columns.len()
    }

    /// Parameter that each coordinate belongs to.
    pub fn parameters(&self) -> Vec<usize> {
        self.columns.iter().map(|column| column.0).collect()
    }

    /// Point of a configuration of the space.
    pub fn of(&self, config: &Config) -> Vec<f32> {
        let mut features = self.knobs.of(config);
        for (x, (parameter, scale)) in features.iter_mut().zip(&self.columns) {
            *x = match scale {
                FeatureScale::Rank(unit) => config.ranks()[*parameter] as f32 * unit,
                FeatureScale::Log(unit) => x.log2() * unit,
                FeatureScale::Linear(unit) => *x * unit,
            };
        }
        features
    }
}
