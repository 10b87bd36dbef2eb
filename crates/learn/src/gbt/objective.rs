//! Objectives of boosting.

use rand::{Rng, RngExt};

use crate::matrix::Examples;

/// Loss function of boosting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    /// Half the squared errors.
    SquaredError,
    /// Pairwise logistic loss: `log(1 + exp(−(f_i − f_j)))` for each pair of a group in which target `i` is
    /// the larger.
    ///
    /// Predictions have no scale; only their order is meaningful.
    ///
    /// # Source
    /// AutoTVM, equation 2. Instead of all pairs, each row is compared with `n_pairs` random others, drawn
    /// anew for each tree.
    PairwiseRank {
        /// Number of random other rows that each row is compared with.
        n_pairs: usize,
    },
}

impl Objective {
    pub(super) fn n_pairs(self) -> usize {
        match self {
            Objective::SquaredError => 1,
            Objective::PairwiseRank { n_pairs } => n_pairs,
        }
    }

    /// Returns the constant that predictions start from.
    pub(super) fn bias(self, targets: &[f32], base: &[f32]) -> f32 {
        match self {
            Objective::PairwiseRank { .. } => 0.0,
            Objective::SquaredError => {
                let sum: f64 = targets.iter().zip(base).map(|(&t, &b)| f64::from(t) - f64::from(b)).sum();
                (sum / targets.len() as f64) as f32
            }
        }
    }
}

/// Derivatives of an objective on given examples.
pub(super) struct Pull<'a> {
    objective: Objective,
    targets: &'a [f32],
    /// Rows of each group, for ranking.
    groups: Vec<Vec<u32>>,
}

impl<'a> Pull<'a> {
    pub(super) fn new(examples: &Examples<'a>, objective: Objective) -> Pull<'a> {
        let mut rows: Vec<u32> = (0..examples.targets.len() as u32).collect();
        let group = |row: &u32| examples.groups.get(*row as usize).copied();
        rows.sort_by_key(group);
        let groups = rows.chunk_by(|a, b| group(a) == group(b)).map(<[u32]>::to_vec).collect();
        Pull { objective, targets: examples.targets, groups }
    }

    /// Writes the first and second derivative of the loss with respect to each row's score.
    pub(super) fn write(&self, scores: &[f32], rng: &mut impl Rng, out: &mut [[f32; 2]]) {
        match self.objective {
            Objective::SquaredError => {
                for ((out, score), target) in out.iter_mut().zip(scores).zip(self.targets) {
                    *out = [score - target, 1.0];
                }
            }
            Objective::PairwiseRank { n_pairs } => {
                out.fill([0.0; 2]);
                self.groups.iter().for_each(|rows| self.rank(rows, n_pairs, scores, rng, out));
            }
        }
    }

    fn rank(&self, rows: &[u32], n_pairs: usize, scores: &[f32], rng: &mut impl Rng, out: &mut [[f32; 2]]) {
        let n = rows.len();
        // A row draws n_pairs others and is drawn by as many on average.
        let met = (2 * n_pairs).min(n.saturating_sub(1));
        // The second derivative of one pair is at most 1/4. With this weight, a row's is at most about 1, as
        // that of a squared error, and the minimum weight of a leaf means the same for both.
        let weight = 4.0 / met.max(1) as f32;
        let mut compare = |a: u32, b: u32| {
            let (a, b) = (a as usize, b as usize);
            let (better, worse) = match self.targets[a].partial_cmp(&self.targets[b]) {
                Some(std::cmp::Ordering::Greater) => (a, b),
                Some(std::cmp::Ordering::Less) => (b, a),
                _ => return,
            };
            let wrong = 1.0 / (1.0 + (scores[better] - scores[worse]).exp());
            let (slope, curvature) = (weight * wrong, weight * wrong * (1.0 - wrong));
            out[better][0] -= slope;
            out[worse][0] += slope;
            out[better][1] += curvature;
            out[worse][1] += curvature;
        };
        if n <= 2 * n_pairs + 1 {
            for (at, &a) in rows.iter().enumerate() {
                rows[..at].iter().for_each(|&b| compare(a, b));
            }
        } else {
            for &a in rows {
                for _ in 0..n_pairs {
                    compare(a, rows[rng.random_range(0..n)]);
                }
            }
        }
    }
}
