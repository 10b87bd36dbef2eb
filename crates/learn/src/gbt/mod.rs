//! Gradient-boosted regression trees on histograms, and random forests of such trees.

mod bins;
mod forest;
mod grow;
mod objective;
mod tree;

use rand::seq::index;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::LearnError;
use crate::matrix::{Examples, Matrix};
use crate::metrics::average_recall;
use bins::Bins;
pub use forest::{Forest, Leaves};
use grow::Grower;
pub use objective::Objective;
use objective::Pull;
use tree::Tree;

/// Options of boosted trees.
///
/// The defaults are those of AutoTVM's public implementation, except for the number of trees, which is fixed
/// without early stopping, and for trees of depth 6 at a learning rate of 0.1 instead of 3 and 0.3: on
/// recorded spaces these rank better at less than twice the time.
#[derive(Debug, Clone, PartialEq)]
pub struct GbtOptions {
    /// Objective that is minimized.
    pub objective: Objective,
    /// Maximum number of trees.
    pub n_trees: usize,
    /// Maximum depth of a tree, 1 to 12.
    pub max_depth: usize,
    /// Maximum number of leaves of a tree, at least 2; the splits of largest gain come first.
    pub max_leaves: usize,
    /// Learning rate: the factor of a tree's prediction.
    pub learning_rate: f32,
    /// Minimum sum of second derivatives in a leaf; for squared errors, the minimum number of rows.
    pub min_child_weight: f32,
    /// L2 regularization of leaf values.
    pub lambda: f32,
    /// Minimum gain of a split.
    pub gamma: f32,
    /// Fraction of the rows that each tree is fitted on, above 0.
    pub row_fraction: f32,
    /// Fraction of the columns that each tree may split on, above 0.
    pub column_fraction: f32,
    /// Maximum number of bins per column, 2 to 255.
    pub max_bins: usize,
    /// Early stopping, if any.
    pub early_stop: Option<EarlyStop>,
}

/// Early stopping when the average recall on the training examples has not risen for some trees; trees after
/// the best one are dropped.
///
/// # Source
/// AutoTVM's public implementation: 20 trees, and the number of candidates that are measured at a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EarlyStop {
    /// Number of trees to wait for.
    pub patience: usize,
    /// Number of top rows that count; see [`average_recall`].
    pub plan_size: usize,
}

impl Default for GbtOptions {
    fn default() -> GbtOptions {
        GbtOptions {
            objective: Objective::PairwiseRank { n_pairs: 8 },
            n_trees: 100,
            max_depth: 6,
            max_leaves: usize::MAX,
            learning_rate: 0.1,
            min_child_weight: 1.0,
            lambda: 1.0,
            gamma: 1e-4,
            row_fraction: 1.0,
            column_fraction: 1.0,
            max_bins: 64,
            early_stop: None,
        }
    }
}

impl GbtOptions {
    fn check(&self) -> Result<(), LearnError> {
        let shares = "above 0 and at most 1";
        let checks: [(&'static str, f64, bool, &'static str); 9] = [
            ("n_pairs", self.objective.n_pairs() as f64, self.objective.n_pairs() > 0, "at least 1"),
            ("max_depth", self.max_depth as f64, (1..=12).contains(&self.max_depth), "1 to 12"),
            ("max_leaves", self.max_leaves as f64, self.max_leaves >= 2, "at least 2"),
            ("learning_rate", self.learning_rate.into(), is_share(self.learning_rate), shares),
            ("min_child_weight", self.min_child_weight.into(), is_amount(self.min_child_weight), "0 or more"),
            ("lambda", self.lambda.into(), is_amount(self.lambda), "0 or more"),
            ("gamma", self.gamma.into(), is_amount(self.gamma), "0 or more"),
            ("row_fraction", self.row_fraction.into(), is_share(self.row_fraction), shares),
            ("column_fraction", self.column_fraction.into(), is_share(self.column_fraction), shares),
        ];
        let bins = ("max_bins", self.max_bins as f64, (2..=255).contains(&self.max_bins), "2 to 255");
        match checks.into_iter().chain([bins]).find(|(_, _, fits, _)| !fits) {
            None => Ok(()),
            Some((option, value, _, expected)) => {
                Err(LearnError::BadOption { option, value: value.to_string(), expected })
            }
        }
    }
}

fn is_share(x: f32) -> bool {
    x > 0.0 && x <= 1.0
}

fn is_amount(x: f32) -> bool {
    x >= 0.0 && x.is_finite()
}

/// Number of steps of Newton's method for the weight of base predictions, and the maximum weight; the minimum
/// is 0.
const WEIGHT_STEPS: usize = 20;
const MOST_WEIGHT: f32 = 4.0;
/// Number of rows in a block, which all trees predict before the next one.
const BLOCK_ROWS: usize = 64;

/// Gradient-boosted trees: a sum of regression trees, each fitted to the residuals of the earlier ones.
///
/// # Source
/// Second-order boosting as in Chen and Guestrin, "XGBoost" (2016), on histograms of binned columns; a
/// missing value goes to the side of each split that gains more.
#[derive(Debug, Clone)]
pub struct Gbt {
    n_columns: usize,
    bias: f32,
    trees: Vec<Tree>,
}

impl Gbt {
    /// Fits trees to examples. Without any, the model predicts 0.
    ///
    /// # Errors
    /// [`LearnError`] if an option is out of range, a number is not finite, or there is not one target, base
    /// prediction or group for each row.
    ///
    /// # Cost
    /// O(rows · columns · trees · depth).
    pub fn fit(examples: &Examples<'_>, options: &GbtOptions, seed: u64) -> Result<Gbt, LearnError> {
        options.check()?;
        examples.check()?;
        let n_rows = examples.features.n_rows();
        let mut model = Gbt { n_columns: examples.features.n_columns(), bias: 0.0, trees: Vec::new() };
        if n_rows == 0 {
            return Ok(model);
        }
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut scores = if examples.base.is_empty() { vec![0.0; n_rows] } else { examples.base.to_vec() };
        model.bias = options.objective.bias(examples.targets, &scores);
        scores.iter_mut().for_each(|s| *s += model.bias);
        let pull = Pull::new(examples, options.objective);
        let bins = Bins::new(examples.features, options.max_bins);
        let mut grower = Grower::new(&bins, options);
        let mut gradients = vec![[0.0f32; 2]; n_rows];
        let mut best = (f64::NEG_INFINITY, 0);
        for _ in 0..options.n_trees {
            pull.write(&scores, &mut rng, &mut gradients);
            let rows = sample(n_rows, options.row_fraction, &mut rng);
            let columns = sample(bins.columns.len(), options.column_fraction, &mut rng);
            let tree = grower.grow(&gradients, rows, columns);
            tree.add_to(examples.features, 0, &mut scores);
            // A tree that cannot split means that there is nothing left to learn, unless it sees a random
            // part of the data.
            let exhausted = tree.is_constant() && options.is_deterministic();
            model.trees.push(tree);
            if let Some(EarlyStop { patience, plan_size }) = options.early_stop {
                let recall = average_recall(&scores, examples.targets, plan_size);
                if recall > best.0 {
                    best = (recall, model.trees.len());
                } else if model.trees.len() >= best.1 + patience {
                    break;
                }
            }
            if exhausted {
                break;
            }
        }
        if options.early_stop.is_some() {
            model.trees.truncate(best.1);
        }
        Ok(model)
    }

    /// Optimal weight of the base predictions under the objective, regularized towards 1 as leaf values are
    /// towards 0, and never negative.
    ///
    /// # Errors
    /// As [`Gbt::fit`].
    ///
    /// # Panics
    /// If there is not one base prediction for each example.
    pub fn weight_of_base(examples: &Examples<'_>, options: &GbtOptions, seed: u64) -> Result<f32, LearnError> {
        options.check()?;
        examples.check()?;
        assert_eq!(examples.base.len(), examples.targets.len(), "invariant: a base prediction for each example");
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let n = examples.base.len().max(1) as f32;
        let mean = examples.base.iter().sum::<f32>() / n;
        let pull = Pull::new(examples, options.objective);
        let mut gradients = vec![[0.0f32; 2]; examples.base.len()];
        let mut weight = 1.0f32;
        for _ in 0..WEIGHT_STEPS {
            let mut scores: Vec<f32> = examples.base.iter().map(|base| weight * (base - mean)).collect();
            let bias = options.objective.bias(examples.targets, &scores);
            scores.iter_mut().for_each(|score| *score += bias);
            pull.write(&scores, &mut rng, &mut gradients);
            let start = [options.lambda * (weight - 1.0), options.lambda];
            let [slope, curvature] =
                gradients.iter().zip(examples.base).fold(start, |sum, ([slope, curvature], base)| {
                    let x = base - mean;
                    [sum[0] + slope * x, sum[1] + curvature * x * x]
                });
            if curvature <= 0.0 {
                break;
            }
            weight = (weight - slope / curvature).clamp(0.0, MOST_WEIGHT);
        }
        Ok(weight)
    }

    /// Predicts these rows; with base predictions, the correction to be added to them.
    ///
    /// # Panics
    /// If the rows do not have as many columns as the examples.
    pub fn predict(&self, rows: &Matrix) -> Vec<f32> {
        assert_eq!(rows.n_columns(), self.n_columns, "invariant: rows have the columns of the examples");
        let mut scores = vec![self.bias; rows.n_rows()];
        // Few rows at a time, which stay in cache from tree to tree.
        for (block, scores) in scores.chunks_mut(BLOCK_ROWS).enumerate() {
            self.trees.iter().for_each(|tree| tree.add_to(rows, block * BLOCK_ROWS, scores));
        }
        scores
    }

    /// Returns the number of trees.
    pub fn n_trees(&self) -> usize {
        self.trees.len()
    }
}

impl GbtOptions {
    fn is_deterministic(&self) -> bool {
        self.objective == Objective::SquaredError && self.row_fraction == 1.0 && self.column_fraction == 1.0
    }
}

/// Draws a share of `0..n`, at least one of them, in ascending order.
fn sample(n: usize, share: f32, rng: &mut impl Rng) -> Vec<u32> {
    let amount = ((n as f64 * f64::from(share)).round() as usize).clamp(n.min(1), n);
    if amount == n {
        return (0..n as u32).collect();
    }
    let mut drawn: Vec<u32> = index::sample(rng, n, amount).into_iter().map(|i| i as u32).collect();
    drawn.sort_unstable();
    drawn
}
