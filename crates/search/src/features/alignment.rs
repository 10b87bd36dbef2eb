//! Alignment features: the largest power of two that divides a number.

use crate::space::{Config, Domain, Space};

/// Alignments of a space's ordinal parameters: how many times 2 divides a value.
///
/// Devices work in groups of 16, 32 or 64, so that a tile of 96 may resemble one of 64 more than one of 80.
/// Neither the rank nor the distance of the values expresses that.
#[derive(Debug, Clone)]
pub struct Alignments {
    /// Parameter of each feature and, by rank, the alignment of its values.
    columns: Vec<(usize, Vec<f32>)>,
}

impl Alignments {
    /// Alignments of a space: a feature for each ordinal parameter whose values are all positive, unless
    /// alignment is monotonic in the value, as for powers of two.
    pub fn new(space: &Space) -> Alignments {
        let of = |parameter| Some((parameter, column(space.domain(parameter))?));
        Alignments { columns: (0..space.n_parameters()).filter_map(of).collect() }
    }

    /// Returns the number of features.
    pub fn n_features(&self) -> usize {
        self.columns.len()
    }

    /// Appends the features of a configuration of the space, each from 0 for the least aligned value of the
    /// parameter to 1 for the most aligned one.
    pub fn write(&self, config: &Config, out: &mut Vec<f32>) {
        out.extend(self.columns.iter().map(|(parameter, by_rank)| by_rank[config.ranks()[*parameter] as usize]));
    }
}

/// Alignment of each value, from 0 for the least to 1 for the largest; `None` if it makes no feature.
fn column(domain: &Domain) -> Option<Vec<f32>> {
    let Domain::Ordinal(values) = domain else { return None };
    let n_twos: Vec<u32> = values.iter().map(|value| value.trailing_zeros()).collect();
    if values.iter().any(|&value| value <= 0) || n_twos.is_sorted() || n_twos.iter().rev().is_sorted() {
        return None;
    }
    let (least, most) = (*n_twos.iter().min()?, *n_twos.iter().max()?);
    Some(n_twos.iter().map(|n| (n - least) as f32 / (most - least) as f32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::Parameter;

    #[track_caller]
    fn check(values: &[i64], expected: Option<&[f32]>) {
        let parameter = Parameter::ordinal("x", values.iter().copied());
        let found = column(&parameter.domain);
        assert_eq!(found.as_deref(), expected, "{values:?}");
    }

    #[test]
    fn alignment_is_a_feature_where_order_does_not_say_it() {
        check(&[16, 32, 48, 64, 80, 96], Some(&[0.0, 0.5, 0.0, 1.0, 0.0, 0.5]));
        check(&[1, 2, 3, 4], Some(&[0.0, 0.5, 0.0, 1.0]));
        check(&[96, 80, 64], Some(&[0.5, 0.0, 1.0]));
        // Alignment that rises or falls with the value.
        check(&[1, 2, 4, 8], None);
        check(&[64, 32, 16], None);
        check(&[3, 5, 7], None);
        check(&[5], None);
        check(&[], None);
        // Numbers that are not sizes, such as codes of methods or differences.
        check(&[0, 1, 2, 3], None);
        check(&[-4, 1, 6], None);
        check(&[i64::MIN, 3, 2, 5], None);
        check(&[i64::MAX, 1 << 62, 3], Some(&[0.0, 1.0, 0.0]));
    }

    #[test]
    fn a_space_has_a_column_for_each_such_ordinal() {
        let parameters = vec![
            Parameter::ordinal("power", [1, 2, 4]),
            Parameter::ordinal("tile", [32, 48, 64]),
            Parameter::categorical("pack", &["a", "b"]),
            Parameter::factorization("split", 12, 2),
            Parameter::ordinal("unroll", [1, 2, 3]),
        ];
        let space = Space::new("test", parameters, vec![]).unwrap();
        let alignments = Alignments::new(&space);
        assert_eq!(alignments.n_features(), 2);
        let mut row = vec![7.0];
        alignments.write(&Config::new([0, 2, 0, 0, 1]), &mut row);
        assert_eq!(row, [7.0, 1.0, 1.0]);
        row.clear();
        alignments.write(&Config::new([2, 0, 1, 3, 2]), &mut row);
        assert_eq!(row, [0.5, 0.0]);
    }
}
