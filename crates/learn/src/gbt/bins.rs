//! Histogram binning of columns, so that splits are searched among few thresholds.

use crate::matrix::Matrix;

/// Maximum number of bins of a column, including that of missing values.
pub(super) const MAX_BINS: usize = 256;

/// Columns of a matrix that are not constant, as bins.
pub(super) struct Bins {
    pub(super) columns: Vec<BinnedColumn>,
    pub(super) n_rows: usize,
}

/// Column as bins.
pub(super) struct BinnedColumn {
    /// Index of the column in the matrix.
    pub(super) feature: u32,
    /// Bin `b` holds values above `cuts[b − 1]` and up to `cuts[b]`.
    pub(super) cuts: Vec<f32>,
    /// Whether values are missing; their bin is the one after the last.
    pub(super) has_missing: bool,
    /// Bin of each row.
    pub(super) of_row: Vec<u8>,
}

impl BinnedColumn {
    /// Returns the number of bins, including that of missing values.
    pub(super) fn n_bins(&self) -> usize {
        self.cuts.len() + 1 + usize::from(self.has_missing)
    }
}

impl Bins {
    /// Sorts each column into at most `max_bins` bins of about the same number of rows.
    pub(super) fn new(features: &Matrix, max_bins: usize) -> Bins {
        let n_rows = features.n_rows();
        let mut values = vec![0.0; n_rows];
        let mut sorted = Vec::with_capacity(n_rows);
        let column = |feature: usize| {
            values.iter_mut().zip(features.rows()).for_each(|(value, row)| *value = row[feature]);
            if values.iter().all(|v| *v == values[0] || (v.is_nan() && values[0].is_nan())) {
                return None;
            }
            sorted.clear();
            let present = values.iter().enumerate().filter(|(_, v)| !v.is_nan());
            sorted.extend(present.map(|(row, &v)| u64::from(ascending(v)) << 32 | row as u64));
            sorted.sort_unstable();
            let by_value = sorted.iter().map(|key| *key as u32 as usize);
            let has_missing = sorted.len() < n_rows;
            let cuts = cuts(by_value.clone().map(|row| values[row]), sorted.len(), max_bins);
            let mut of_row = vec![(cuts.len() + 1) as u8; n_rows];
            let mut bin = 0;
            for row in by_value {
                while bin < cuts.len() && values[row] > cuts[bin] {
                    bin += 1;
                }
                of_row[row] = bin as u8;
            }
            Some(BinnedColumn { feature: feature as u32, cuts, has_missing, of_row })
        };
        Bins { columns: (0..features.n_columns()).filter_map(column).collect(), n_rows }
    }
}

/// Returns an integer that has the same order as the number.
fn ascending(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Thresholds between bins, for values in ascending order.
fn cuts(mut values: impl Iterator<Item = f32> + Clone, n: usize, max_bins: usize) -> Vec<f32> {
    let distinct = 1 + values.clone().zip(values.clone().skip(1)).filter(|(a, b)| a != b).count();
    let mut cuts = Vec::with_capacity(distinct.min(max_bins) - 1);
    let Some(mut last) = values.next() else { return cuts };
    let mut in_bin = 1;
    let mut left = n;
    for value in values {
        if value != last {
            // The remaining rows are shared among the remaining bins, so that one frequent value does not
            // take the bins of others.
            if distinct <= max_bins || (in_bin * (max_bins - cuts.len()) >= left && cuts.len() + 1 < max_bins) {
                cuts.push(between(last, value));
                left -= in_bin;
                in_bin = 0;
            }
            last = value;
        }
        in_bin += 1;
    }
    cuts
}

/// Returns a threshold with `a` on or below it and `b` above it.
fn between(a: f32, b: f32) -> f32 {
    let middle = a + (b - a) / 2.0;
    if middle >= a && middle < b { middle } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bins_of(values: &[f32], max_bins: usize) -> (Vec<f32>, Vec<u8>) {
        let bins = Bins::new(&Matrix::from_rows(1, values.iter().map(|v| [*v])), max_bins);
        let column = &bins.columns[0];
        (column.cuts.clone(), column.of_row.clone())
    }

    #[test]
    fn few_values_have_a_bin_each_and_missing_ones_their_own() {
        assert_eq!(bins_of(&[3.0, 1.0, f32::NAN, 1.0, -0.0, 0.0], 8), (vec![0.5, 2.0], vec![2, 1, 3, 1, 0, 0]));
        assert_eq!(bins_of(&[f32::NEG_INFINITY, 5.0, f32::INFINITY], 8).1, [0, 1, 2]);
        assert_eq!(bins_of(&[f32::NAN, 5.0], 8), (vec![], vec![1, 0]));
        assert_eq!(bins_of(&[f32::MAX, f32::MIN], 8).1, [1, 0]);
    }

    #[test]
    fn many_values_share_bins_evenly() {
        let mut values: Vec<f32> = (0..1000).map(|i| (i * 37 % 1000) as f32).collect();
        values.extend([500.0; 1000]);
        let (cuts, of_row) = bins_of(&values, 11);
        assert!(cuts.len() < 11);
        for bin in 0..=cuts.len() {
            let size = of_row.iter().filter(|b| **b as usize == bin).count();
            assert!((60..=300).contains(&size) || size > 1000, "bin {bin} holds {size}");
        }
    }

    #[test]
    fn constant_columns_are_left_out() {
        let rows = [[1.0, f32::NAN, 2.0], [1.0, f32::NAN, 3.0]];
        let bins = Bins::new(&Matrix::from_rows(3, rows), 16);
        assert_eq!(bins.columns.iter().map(|c| c.feature).collect::<Vec<_>>(), [2]);
    }
}
