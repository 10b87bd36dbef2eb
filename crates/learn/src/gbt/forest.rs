//! Random forest of classification trees on bootstrap samples.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::bins::Bins;
use super::grow::Grower;
use super::tree::Tree;
use super::{GbtOptions, Objective};
use crate::LearnError;
use crate::matrix::{Examples, Matrix};

/// Maximum number of splits between the root and a leaf.
const MOST_DEPTH: usize = 10;

/// Random forest that classifies rows into two classes.
///
/// # Source
/// Breiman, "Random Forests" (2001): each tree is grown on as many rows as there are, drawn with replacement,
/// until leaves are pure, and each split considers a random √c of c columns. A tree predicts the share of the
/// positive weight in a leaf, the forest the mean of its trees. We differ in that trees are grown on binned
/// columns, with at most ten splits from root to leaf.
#[derive(Debug, Clone)]
pub struct Forest {
    n_columns: usize,
    trees: Vec<Tree>,
}

/// Leaves of a forest for predicted rows.
#[derive(Debug, Clone)]
pub struct Leaves {
    n_trees: usize,
    /// `[n_rows, n_trees]`.
    of_rows: Vec<u16>,
    probabilities: Vec<f32>,
}

impl Leaves {
    /// Predicted probability of the positive class for each row.
    pub fn probabilities(&self) -> &[f32] {
        &self.probabilities
    }

    /// Proximity of two rows: the share of trees in which both fall into the same leaf.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn similarity(&self, a: usize, b: usize) -> f32 {
        let of_row = |row: usize| &self.of_rows[row * self.n_trees..][..self.n_trees];
        let n_same = of_row(a).iter().zip(of_row(b)).filter(|(a, b)| a == b).count();
        n_same as f32 / self.n_trees as f32
    }
}

impl Forest {
    /// Fits `n_trees` trees to rows with binary labels and weights.
    ///
    /// # Errors
    /// [`LearnError`] if there is no row or no tree, a weight is not finite, or there is not one class and
    /// one weight for each row.
    ///
    /// # Cost
    /// O(rows · √columns · trees · depth).
    pub fn fit(
        features: &Matrix,
        is_positive: &[bool],
        weights: &[f32],
        n_trees: usize,
        seed: u64,
    ) -> Result<Forest, LearnError> {
        let n_rows = features.n_rows();
        let targets: Vec<f32> = is_positive.iter().map(|&positive| f32::from(u8::from(positive))).collect();
        Examples::new(features, &targets).check()?;
        Examples::new(features, weights).check()?;
        for (option, value) in [("n_trees", n_trees), ("rows", n_rows)] {
            if value == 0 {
                return Err(LearnError::BadOption { option, value: "0".into(), expected: "at least 1" });
            }
        }
        let options = GbtOptions {
            objective: Objective::SquaredError,
            n_trees,
            max_depth: MOST_DEPTH,
            learning_rate: 1.0,
            min_child_weight: 0.0,
            lambda: 0.0,
            ..GbtOptions::default()
        };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let bins = Bins::new(features, options.max_bins);
        // Derivatives of a weighted squared error at 0: leaves are weighted means, and splits gain as by
        // Gini's impurity.
        let gradients: Vec<[f32; 2]> = targets.iter().zip(weights).map(|(y, weight)| [-y * weight, *weight]).collect();
        let columns: Vec<u32> = (0..bins.columns.len() as u32).collect();
        let n_columns_tried = (columns.len() as f64).sqrt().ceil() as usize;
        let mut grower = Grower::new(&bins, &options).with_columns_per_split(n_columns_tried, seed);
        let trees = (0..n_trees).map(|_| {
            let mut drawn: Vec<u32> = (0..n_rows).map(|_| rng.random_range(0..n_rows as u32)).collect();
            drawn.sort_unstable();
            grower.grow(&gradients, drawn, columns.clone())
        });
        Ok(Forest { n_columns: features.n_columns(), trees: trees.collect() })
    }

    /// Predicts rows.
    ///
    /// # Panics
    /// If the rows do not have as many columns as those that the forest was fitted to.
    pub fn predict(&self, rows: &Matrix) -> Leaves {
        assert_eq!(rows.n_columns(), self.n_columns, "invariant: rows have the columns of the examples");
        let n_trees = self.trees.len();
        let mut leaves =
            Leaves { n_trees, of_rows: vec![0; rows.n_rows() * n_trees], probabilities: vec![0.0; rows.n_rows()] };
        for (at, tree) in self.trees.iter().enumerate() {
            tree.descend(rows, 0, &mut leaves.probabilities, |sum, row, leaf| {
                *sum += leaf.value;
                leaves.of_rows[row * n_trees + at] = leaf.place;
            });
        }
        leaves.probabilities.iter_mut().for_each(|sum| *sum /= n_trees as f32);
        leaves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a grid of two columns that matter and three that do not.
    fn grid() -> (Matrix, Vec<bool>) {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(5);
        let mut rows = Matrix::new(5);
        let mut is_positive = Vec::new();
        for at in 0..400 {
            let (x, y) = ((at % 20) as f32, (at / 20) as f32);
            rows.push(&[x, rng.random(), y, rng.random(), rng.random()]);
            is_positive.push(x > 11.0 && y < 5.0);
        }
        (rows, is_positive)
    }

    #[test]
    fn a_forest_tells_classes_apart_and_follows_from_its_seed() {
        let (rows, is_positive) = grid();
        let fit = |seed| Forest::fit(&rows, &is_positive, &[1.0; 400], 50, seed).unwrap();
        let asked =
            Matrix::from_rows(5, [[15.5, 0.5, 2.5, 0.1, 0.9], [4.5, 0.5, 2.5, 0.1, 0.9], [15.5, 0.5, 9.5, 0.1, 0.9]]);
        let probabilities = fit(1).predict(&asked).probabilities().to_vec();
        assert!(probabilities[0] > 0.8 && probabilities[1] < 0.2 && probabilities[2] < 0.2, "{probabilities:?}");
        assert_eq!(probabilities, fit(1).predict(&asked).probabilities());
        assert_ne!(probabilities, fit(2).predict(&asked).probabilities());
        let known = fit(1).predict(&rows);
        let n_right = known.probabilities().iter().zip(&is_positive).filter(|(p, is)| (**p > 0.5) == **is).count();
        assert!(n_right >= 396, "{n_right} of 400");
    }

    /// The heavier class of equal rows wins, by its share of the weight.
    #[test]
    fn weights_count() {
        let rows = Matrix::from_rows(1, [[1.0]; 200]);
        let is_positive: Vec<bool> = (0..200).map(|at| at % 2 == 0).collect();
        let weights: Vec<f32> = (0..200).map(|at| if at % 2 == 0 { 3.0 } else { 1.0 }).collect();
        let leaves = Forest::fit(&rows, &is_positive, &weights, 100, 0).unwrap().predict(&rows);
        assert!((leaves.probabilities()[0] - 0.75).abs() < 0.02, "{}", leaves.probabilities()[0]);
        assert_eq!(leaves.similarity(0, 199), 1.0);
    }

    #[test]
    fn rows_are_similar_as_far_as_they_share_leaves() {
        let (rows, is_positive) = grid();
        let leaves = Forest::fit(&rows, &is_positive, &[1.0; 400], 100, 3).unwrap().predict(&rows);
        let at = |x: usize, y: usize| 20 * y + x;
        assert_eq!(leaves.similarity(7, 7), 1.0);
        let near = leaves.similarity(at(15, 2), at(16, 2));
        let far = leaves.similarity(at(15, 2), at(2, 18));
        assert!(near > far && far == 0.0, "{near} {far}");
        // Most of the plane is one leaf of negatives or few.
        assert!(leaves.similarity(at(3, 17), at(4, 18)) > 0.5);
    }

    #[test]
    fn missing_values_and_bad_examples() {
        let rows = Matrix::from_rows(2, [[f32::NAN, 1.0], [2.0, f32::INFINITY], [f32::NAN, 0.0], [3.0, 1.0]]);
        let forest = Forest::fit(&rows, &[true, false, true, false], &[1.0; 4], 50, 1).unwrap();
        let leaves = forest.predict(&rows);
        assert!(leaves.probabilities()[0] > leaves.probabilities()[1]);
        assert!(Forest::fit(&rows, &[true; 3], &[1.0; 4], 5, 0).is_err());
        assert!(Forest::fit(&rows, &[true; 4], &[1.0; 3], 5, 0).is_err());
        assert!(Forest::fit(&rows, &[true; 4], &[f32::NAN; 4], 5, 0).is_err());
        assert!(Forest::fit(&rows, &[true; 4], &[1.0; 4], 0, 0).is_err());
        assert!(Forest::fit(&Matrix::new(2), &[], &[], 5, 0).is_err());
    }
}
