//! Inputs of a Gaussian process: coordinates in the unit cube, and alignments.

use std::sync::Arc;

use super::{Alignments, UnitFeatures};
use crate::space::{Config, Domain, Space};

/// Encoder of the configurations of one space for a Gaussian process, with groups of features that share a
/// length scale.
#[derive(Debug, Clone)]
pub struct ProcessFeatures {
    unit: UnitFeatures,
    alignments: Alignments,
    /// Group of each feature.
    groups: Vec<usize>,
}

impl ProcessFeatures {
    /// Encoder for a space.
    pub fn new(space: &Arc<Space>) -> ProcessFeatures {
        let (unit, alignments) = (UnitFeatures::new(space), Alignments::new(space));
        let (mut groups, mut n_groups) = (Vec::new(), 0);
        for columns in unit.parameters().chunk_by(|a, b| a == b) {
            let is_split = matches!(space.domain(columns[0]), Domain::Factorization { .. });
            groups.extend((0..columns.len()).map(|at| if is_split { n_groups + at } else { n_groups }));
            n_groups += if is_split { columns.len() } else { 1 };
        }
        groups.extend(n_groups..n_groups + alignments.n_features());
        ProcessFeatures { unit, alignments, groups }
    }

    /// Coordinates in the unit cube, which are the first features.
    pub fn unit(&self) -> &UnitFeatures {
        &self.unit
    }

    /// Group of each feature: the columns of a parameter form one group, except that each factor of a split
    /// (the extent of another loop) and each alignment is a group of its own.
    pub fn groups(&self) -> &[usize] {
        &self.groups
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
        assert_eq!(features.groups(), [0, 1, 1, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9]);
        let row = features.of(&space.config_at(0));
        assert_eq!((row.len(), features.n_features()), (13, 13));
        assert_eq!(features.unit().n_features(), 12);
    }
}
