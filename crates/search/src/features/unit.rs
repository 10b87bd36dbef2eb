//! Configurations as points of the unit cube.

use std::sync::Arc;

use super::KnobFeatures;
use crate::space::{Config, Domain, Space};

/// Turns the configurations of one space into points between 0 and 1, so that the distance of two of them
/// means the same along each parameter.
///
/// An ordinal is its rank, for the values that a template lists are those that it takes to differ alike; a
/// factorization is the logarithms of its factors; a categorical is one-hot; a permutation is the position of
/// each of its names.
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
    /// The features of this space.
    pub fn new(space: &Arc<Space>) -> UnitFeatures {
        let mut columns = Vec::new();
        for parameter in 0..space.n_parameters() {
            let (scale, width) = match space.domain(parameter) {
                Domain::Ordinal(values) => (FeatureScale::Rank(1.0 / (values.len().max(2) - 1) as f32), 1),
                Domain::Factorization { n, parts } => (FeatureScale::Log(1.0 / (*n.max(&2) as f32).log2()), *parts),
                Domain::Categorical(values) => (FeatureScale::Linear(std::f32::consts::FRAC_1_SQRT_2), values.len()),
                Domain::Permutation(names) => {
                    (FeatureScale::Linear(1.0 / (names.len().max(2) - 1) as f32), names.len())
                }
            };
            columns.extend(std::iter::repeat_n((parameter, scale), width));
        }
        UnitFeatures { knobs: KnobFeatures::new(space), columns }
    }

    /// The number of features.
    pub fn n_features(&self) -> usize {
        self.columns.len()
    }

    /// Returns the parameter of each feature.
    pub fn parameters(&self) -> Vec<usize> {
        self.columns.iter().map(|column| column.0).collect()
    }

    /// The features of a configuration, which is one of the space's.
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
