//! Weighted nearest neighbours.

use crate::matrix::Matrix;

/// Weighted k-nearest-neighbour regression with the Canberra distance.
///
/// The prediction is `Σ w_i y_i / Σ w_i` over the `k` nearest known rows, with `w_i = 1 / d(x, x_i)` and
/// `d(x, z) = Σ |x_l − z_l| / (|x_l| + |z_l|)`, where 0/0 is 0. A known row is predicted as its own target,
/// or as the mean of its targets if it is known more than once.
///
/// # Source
/// NoSE, the surrogate; `k` is 9 there. A value that is missing (NaN) on one side only has the largest
/// possible distance, 1.
#[derive(Debug, Clone)]
pub struct Knn {
    k: usize,
    /// Values of all rows by column, so that distances to many rows are computed in vectors.
    columns: Vec<Vec<f32>>,
    targets: Vec<f32>,
}

impl Knn {
    /// Regressor without known rows, which predicts 0.
    ///
    /// # Panics
    /// If `k` is 0.
    pub fn new(k: usize, n_columns: usize) -> Knn {
        assert!(k > 0, "invariant: at least one neighbour");
        Knn { k, columns: vec![Vec::new(); n_columns], targets: Vec::new() }
    }

    /// Appends a known row.
    ///
    /// # Panics
    /// If the row does not have as many values as there are columns.
    pub fn push(&mut self, row: &[f32], target: f32) {
        assert_eq!(row.len(), self.columns.len(), "invariant: a row has a value for each column");
        self.columns.iter_mut().zip(row).for_each(|(column, &value)| column.push(value));
        self.targets.push(target);
    }

    /// Drops all but the latest `n` rows.
    pub fn keep_latest(&mut self, n: usize) {
        let n_forgotten = self.len().saturating_sub(n);
        self.columns.iter_mut().for_each(|column| drop(column.drain(..n_forgotten)));
        self.targets.drain(..n_forgotten);
    }

    /// Returns the number of known rows.
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Whether no row is known.
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }

    /// Predicts these rows.
    ///
    /// # Panics
    /// If the rows do not have as many values as there are columns.
    ///
    /// # Cost
    /// O(rows · known rows · columns).
    pub fn predict(&self, rows: &Matrix) -> Vec<f32> {
        assert_eq!(rows.n_columns(), self.columns.len(), "invariant: a row has a value for each column");
        let mut distances = vec![0.0; self.len()];
        let mut nearest = Vec::with_capacity(self.k + 1);
        rows.rows().map(|row| self.predict_row(row, &mut distances, &mut nearest)).collect()
    }

    fn predict_row(&self, row: &[f32], distances: &mut [f32], nearest: &mut Vec<(f32, usize)>) -> f32 {
        distances.fill(0.0);
        for (column, &x) in self.columns.iter().zip(row) {
            distances.iter_mut().zip(column).for_each(|(d, &z)| *d += canberra(x, z));
        }
        nearest.clear();
        let mut farthest = f32::INFINITY;
        for (at, &d) in distances.iter().enumerate() {
            if nearest.len() < self.k || d < farthest {
                let place = nearest.partition_point(|&(other, _)| other <= d);
                nearest.insert(place, (d, at));
                nearest.truncate(self.k);
                farthest = nearest[nearest.len() - 1].0;
            }
        }
        match nearest.first() {
            None => 0.0,
            Some((0.0, _)) => {
                self.mean(distances.iter().enumerate().filter(|(_, d)| **d == 0.0).map(|(at, _)| (1.0, at)))
            }
            Some(_) => self.mean(nearest.iter().map(|&(d, at)| (1.0 / f64::from(d), at))),
        }
    }

    fn mean(&self, weighted: impl Iterator<Item = (f64, usize)>) -> f32 {
        let (sum, weights) = weighted.fold((0.0, 0.0), |(sum, weights), (weight, at)| {
            (sum + weight * f64::from(self.targets[at]), weights + weight)
        });
        (sum / weights) as f32
    }
}

/// Summand of the Canberra distance, between 0 and 1.
fn canberra(x: f32, z: f32) -> f32 {
    let d = (x - z).abs() / (x.abs() + z.abs());
    // 0/0, ∞/∞ or a missing value.
    let same = x == z || (x.is_nan() && z.is_nan());
    let odd = if same { 0.0 } else { 1.0 };
    if d.is_nan() { odd } else { d }
}
