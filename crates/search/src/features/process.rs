//! Features of a Gaussian process: places in the unit cube, and alignments.

use std::sync::Arc;

use super::{Alignments, UnitFeatures};
use crate::space::{Config, Domain, Space};

/// Features of the configurations of one space for a Gaussian process, in groups that matter alike.
#[derive(Debug, Clone)]
pub struct ProcessFeatures {
    unit: UnitFeatures,
    alignments: Alignments,
    /// Group of each feature.
    groups: Vec<usize>,
}

impl ProcessFeatures {
    /// Returns the features of this space.
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

    /// Returns the places in the unit cube, which are the first features.
    pub fn unit(&self) -> &UnitFeatures {
        &self.unit
    }

    /// Returns the group of each feature: the columns of a parameter are one, but for the factors of a split,
    /// each of which is the extent of another loop, and for alignments.
    pub fn groups(&self) -> &[usize] {
        &self.groups
    }

    /// Returns the number of features.
    pub fn n_features(&self) -> usize {
        self.groups.len()
    }

    /// Returns the features of a configuration, which is one of the space's.
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
