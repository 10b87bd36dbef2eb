//! Inputs of a Gaussian process: coordinates in the unit cube, and alignments.

use std::sync::Arc;

use tilewright_learn::Matern;

use super::{Alignments, UnitFeatures};
use crate::space::{Config, Domain, Space};

/// Prior standard deviation of the logarithm of an ordinal's rate, or of an alignment's. The listed values of
/// an ordinal differ about equally by design, so ordinals vary less in importance than other parameters.
const LISTED_SPREAD: f64 = 0.6;
/// Prior standard deviation of the logarithm of the rate of a factor, a category or an order.
const OTHER_SPREAD: f64 = 1.3;

/// Encoder of the configurations of one space for a Gaussian process, with groups of features that share a
/// length scale.
#[derive(Debug, Clone)]
pub struct ProcessFeatures {
    unit: UnitFeatures,
    alignments: Alignments,
    /// Group of each feature: the columns of a parameter form one group, except that each factor of a split
    /// (the extent of another loop) and each alignment is a group of its own.
    groups: Vec<usize>,
    /// Prior standard deviation of the logarithm of each group's rate.
    spreads: Vec<f64>,
}

impl ProcessFeatures {
    /// Encoder for a space.
    pub fn new(space: &Arc<Space>) -> ProcessFeatures {
        let (unit, alignments) = (UnitFeatures::new(space), Alignments::new(space));
        let (mut groups, mut spreads) = (Vec::new(), Vec::new());
        for columns in unit.parameters().chunk_by(|a, b| a == b) {
            let (n_groups, spread) = match space.domain(columns[0]) {
                Domain::Factorization { .. } => (columns.len(), OTHER_SPREAD),
                _ if space.is_ordered(columns[0]) => (1, LISTED_SPREAD),
                Domain::Ordinal(_) | Domain::Categorical(_) | Domain::Permutation(_) => (1, OTHER_SPREAD),
            };
            groups.extend((0..columns.len()).map(|at| spreads.len() + at.min(n_groups - 1)));
            spreads.extend(std::iter::repeat_n(spread, n_groups));
        }
        groups.extend(spreads.len()..spreads.len() + alignments.n_features());
        spreads.extend(std::iter::repeat_n(LISTED_SPREAD, alignments.n_features()));
        ProcessFeatures { unit, alignments, groups, spreads }
    }

    /// Coordinates in the unit cube, which are the first features.
    pub fn unit(&self) -> &UnitFeatures {
        &self.unit
    }

    /// Kernel with prior length scales.
    pub fn kernel(&self) -> Matern {
        Matern::new(self.groups.clone()).with_spreads(self.spreads.clone())
    }

    /// Length of a feature vector.
    pub fn n_features(&self) -> usize {
        self.groups.len()
    }

    /// Feature vector of a configuration of the space.
    pub fn of(&self, config: &Config) -> Vec<f32> {
        let mut features = self.unit.of(config);
        self.alignments.write(config, &mut features);
        features
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Parameter;

    #[test]
    fn factors_and_alignments_are_groups_of_their_own() {
        let parameters = vec![
            Parameter::ordinal("tile", [32, 48, 64]),
            Parameter::categorical("pack", &["a", "b", "c"]),
            Parameter::factorization("k", 64, 3),
            Parameter::permutation("order", &["i", "j"]),
            Parameter::factorization("r", 3, 2),
            Parameter::ordinal("unroll", [1, 2, 4]),
        ];
        let space = Arc::new(Space::new("test", parameters, vec![]).unwrap());
        let features = ProcessFeatures::new(&space);
        assert_eq!(features.groups, [0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9]);
        let (listed, other) = (LISTED_SPREAD, OTHER_SPREAD);
        let spreads = [listed, other, other, other, other, other, other, other, listed, listed];
        assert_eq!(features.spreads, spreads);
        let row = features.of(&space.config_at(0));
        assert_eq!((row.len(), features.n_features()), (13, 13));
        assert_eq!(features.unit().n_features(), 12);
    }
}
