//! Classical classifiers as baselines of sequence models: each parameter is predicted independently.
//!
//! # Source
//! The methods of table II in "Optimal Kernel Tuning Parameter Prediction using Deep Sequence Models", with
//! the usual defaults, since it names none.

use super::tree::{ClassExamples, DecisionTree, RandomForest, most};

/// Number of neighbours that vote.
const N_NEIGHBOURS: usize = 5;
/// Number of trees of the forest.
const N_TREES: usize = 100;
/// Share of the largest variance that is added to each variance, so that a constant feature does not cause a
/// division by zero.
const SMOOTHING: f64 = 1e-9;

/// Classifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Baseline {
    /// Decision tree with Gini impurity, grown until leaves are pure.
    DecisionTree,
    /// Gaussian naive Bayes.
    NaiveBayes,
    /// k-nearest neighbours.
    Neighbours,
    /// Support vector machines with a Gaussian kernel, one-vs-one.
    SupportVectors,
    /// Random forest of a hundred trees.
    RandomForest,
}

/// Row of the table of classifiers.
#[derive(Debug)]
pub struct BaselineRow {
    /// The classifier.
    pub baseline: Baseline,
    /// Name for users.
    pub name: &'static str,
}

/// Table of classifiers.
pub const BASELINES: &[BaselineRow] = &[
    BaselineRow { baseline: Baseline::DecisionTree, name: "decision-tree" },
    BaselineRow { baseline: Baseline::NaiveBayes, name: "naive-bayes" },
    BaselineRow { baseline: Baseline::Neighbours, name: "k-nn" },
    BaselineRow { baseline: Baseline::SupportVectors, name: "svc" },
    BaselineRow { baseline: Baseline::RandomForest, name: "random-forest" },
];

/// Trains a classifier, and predicts the classes of other rows.
///
/// # Panics
/// If there are no rows, or the number of classes differs.
pub fn predict_classes(
    baseline: Baseline,
    features: &[Vec<f64>],
    classes: &[u32],
    asked: &[Vec<f64>],
    seed: u64,
) -> Vec<u32> {
    assert!(!features.is_empty() && features.len() == classes.len(), "invariant: each row has a class");
    // Constant features are irrelevant, and distances need not include them.
    let varies = |&at: &usize| features.iter().any(|row| row[at] != features[0][at]);
    let columns: Vec<usize> = (0..features[0].len()).filter(varies).collect();
    let distinct = distinct(classes);
    let place = |class: &u32| distinct.binary_search(class).expect("invariant: it is one of them");
    let places: Vec<usize> = classes.iter().map(place).collect();
    if columns.is_empty() || distinct.len() == 1 {
        return vec![distinct[majority(&places, distinct.len())]; asked.len()];
    }
    let chosen = |rows: &[Vec<f64>]| -> Vec<Vec<f64>> {
        rows.iter().map(|row| columns.iter().map(|&at| row[at]).collect()).collect()
    };
    let (features, asked) = (chosen(features), chosen(asked));
    let examples = ClassExamples { rows: &features, classes: &places, n_classes: distinct.len() };
    let each = |predict: &dyn Fn(&[f64]) -> usize| asked.iter().map(|row| distinct[predict(row)]).collect();
    match baseline {
        Baseline::NaiveBayes => naive_bayes(&features, classes, &asked),
        Baseline::SupportVectors => support_vectors(&features, classes, &asked),
        Baseline::Neighbours => each(&|row| nearest(examples, row)),
        Baseline::DecisionTree => {
            let tree = DecisionTree::fit(examples);
            each(&|row| tree.predict(row))
        }
        Baseline::RandomForest => {
            let forest = RandomForest::fit(examples, N_TREES, seed);
            each(&|row| forest.predict(row))
        }
    }
}

fn distinct(classes: &[u32]) -> Vec<u32> {
    let mut distinct = classes.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    distinct
}

/// Most frequent class; the smallest if there are several.
fn majority(classes: &[usize], n_classes: usize) -> usize {
    let mut counts = vec![0; n_classes];
    classes.iter().for_each(|&class| counts[class] += 1);
    most(&counts)
}

/// Most frequent class of the nearest rows; if rows are equally distant, the first ones vote.
fn nearest(examples: ClassExamples, row: &[f64]) -> usize {
    let distance = |known: &[f64]| known.iter().zip(row).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
    let mut by_distance: Vec<(f64, usize)> =
        examples.rows.iter().zip(examples.classes).map(|(known, class)| (distance(known), *class)).collect();
    by_distance.sort_by(|a, b| a.0.total_cmp(&b.0));
    let nearest: Vec<usize> = by_distance.iter().take(N_NEIGHBOURS).map(|(_, class)| *class).collect();
    majority(&nearest, examples.n_classes)
}

/// Gaussian naive Bayes, with variances smoothed.
fn naive_bayes(features: &[Vec<f64>], classes: &[u32], asked: &[Vec<f64>]) -> Vec<u32> {
    let moments = |rows: &[&Vec<f64>]| -> Vec<(f64, f64)> {
        let n = rows.len() as f64;
        let moment = |at: usize| {
            let mean = rows.iter().map(|row| row[at]).sum::<f64>() / n;
            (mean, rows.iter().map(|row| (row[at] - mean).powi(2)).sum::<f64>() / n)
        };
        (0..features[0].len()).map(moment).collect()
    };
    let all = moments(&features.iter().collect::<Vec<_>>());
    let smoothing = SMOOTHING * all.iter().map(|(_, variance)| *variance).fold(0.0, f64::max);
    let of_class = |class: u32| {
        let rows: Vec<&Vec<f64>> = features.iter().zip(classes).filter(|(_, c)| **c == class).map(|(r, _)| r).collect();
        (class, (rows.len() as f64 / features.len() as f64).ln(), moments(&rows))
    };
    let learnt: Vec<_> = distinct(classes).into_iter().map(of_class).collect();
    let likeliest = |row: &Vec<f64>| {
        let log_likelihood = |moments: &[(f64, f64)]| -> f64 {
            let of = |(value, (mean, variance)): (&f64, &(f64, f64))| {
                let variance = variance + smoothing;
                -0.5 * ((value - mean).powi(2) / variance + variance.ln())
            };
            row.iter().zip(moments).map(of).sum()
        };
        let scores = learnt.iter().map(|(class, prior, moments)| (prior + log_likelihood(moments), *class));
        scores.max_by(|a, b| a.0.total_cmp(&b.0)).expect("invariant: there are classes").1
    };
    asked.iter().map(likeliest).collect()
}

/// Support vector machines for each pair of classes; the class with most votes wins, the smallest if there
/// are several.
fn support_vectors(features: &[Vec<f64>], classes: &[u32], asked: &[Vec<f64>]) -> Vec<u32> {
    let values: Vec<f64> = features.iter().flatten().copied().collect();
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
    let gamma = 1.0 / (features[0].len() as f64 * variance);
    let distinct = distinct(classes);
    let mut votes = vec![vec![0u32; distinct.len()]; asked.len()];
    for (second, high) in distinct.iter().enumerate() {
        for (first, low) in distinct[..second].iter().enumerate() {
            let pair = features.iter().zip(classes).filter(|(_, class)| *class == low || *class == high);
            let (rows, sides): (Vec<&[f64]>, Vec<f64>) =
                pair.map(|(row, class)| (&row[..], if class == low { -1.0 } else { 1.0 })).unzip();
            let machine = SupportVectorMachine::fit(&rows, &sides, gamma);
            for (votes, row) in votes.iter_mut().zip(asked) {
                votes[if machine.decision(row) < 0.0 { first } else { second }] += 1;
            }
        }
    }
    let winner = |votes: &Vec<u32>| {
        let most = votes.iter().max().expect("invariant: there are classes");
        distinct[votes.iter().position(|n| n == most).expect("invariant: it is one of them")]
    };
    votes.iter().map(winner).collect()
}

/// Support vector machine with a Gaussian kernel, for two classes.
struct SupportVectorMachine<'a> {
    rows: &'a [&'a [f64]],
    /// Multiplier of each row, with the sign of its side.
    weights: Vec<f64>,
    offset: f64,
    gamma: f64,
}

impl<'a> SupportVectorMachine<'a> {
    /// Sequential minimal optimization, which always chooses the pair of multipliers that violates the
    /// optimum most.
    ///
    /// # Cost
    /// The kernel for all pairs of rows, and O(rows) for each step.
    ///
    /// # Source
    /// Fan, Chen and Lin, "Working set selection using second order information" (2005), the first-order
    /// selection.
    fn fit(rows: &'a [&'a [f64]], sides: &[f64], gamma: f64) -> SupportVectorMachine<'a> {
        const COST: f64 = 1.0;
        const TOLERANCE: f64 = 1e-3;
        let n = rows.len();
        let kernel: Vec<f32> =
            rows.iter().flat_map(|a| rows.iter().map(move |b| gaussian(a, b, gamma) as f32)).collect();
        let mut multipliers = vec![0.0; n];
        // Difference of each row's side and its decision.
        let mut lacks = sides.to_vec();
        let mut offset = 0.0;
        // It always converges; the bound is for rows that are separated only by rounding.
        for _ in 0..100 * n.max(100) {
            let may_rise = |&at: &usize| if sides[at] > 0.0 { multipliers[at] < COST } else { multipliers[at] > 0.0 };
            let may_fall = |&at: &usize| if sides[at] > 0.0 { multipliers[at] > 0.0 } else { multipliers[at] < COST };
            let by_lack = |a: &usize, b: &usize| lacks[*a].total_cmp(&lacks[*b]);
            let rises = (0..n).filter(may_rise).max_by(by_lack);
            let falls = (0..n).filter(may_fall).min_by(by_lack);
            let (Some(i), Some(j)) = (rises, falls) else { break };
            offset = (lacks[i] + lacks[j]) / 2.0;
            if lacks[i] - lacks[j] < TOLERANCE {
                break;
            }
            let of = |a: usize, b: usize| f64::from(kernel[a * n + b]);
            let curvature = (of(i, i) + of(j, j) - 2.0 * of(i, j)).max(1e-12);
            let room = |at: usize, rises: bool| {
                if rises == (sides[at] > 0.0) { COST - multipliers[at] } else { multipliers[at] }
            };
            let step = ((lacks[i] - lacks[j]) / curvature).min(room(i, true)).min(room(j, false));
            multipliers[i] += sides[i] * step;
            multipliers[j] -= sides[j] * step;
            for (at, lack) in lacks.iter_mut().enumerate() {
                *lack -= step * f64::from(kernel[i * n + at] - kernel[j * n + at]);
            }
        }
        let weights = multipliers.iter().zip(sides).map(|(multiplier, side)| multiplier * side).collect();
        SupportVectorMachine { rows, weights, offset, gamma }
    }

    /// Decision value, positive for one side and negative for the other.
    fn decision(&self, asked: &[f64]) -> f64 {
        let supports = self.rows.iter().zip(&self.weights).filter(|(_, weight)| **weight != 0.0);
        self.offset + supports.map(|(row, weight)| weight * gaussian(row, asked, self.gamma)).sum::<f64>()
    }
}

fn gaussian(a: &[f64], b: &[f64], gamma: f64) -> f64 {
    (-gamma * a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>()).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_classifier_learns_what_is_plain() {
        // Three clouds on a line, a constant feature and a noise feature.
        let row = |at: usize| vec![10.0 * (at % 3) as f64 + (at % 7) as f64 / 7.0, 1.0, (at % 5) as f64];
        let features: Vec<Vec<f64>> = (0..90).map(row).collect();
        let classes: Vec<u32> = (0..90).map(|at| [4, 0, 9][at % 3]).collect();
        let asked = [vec![0.4, 1.0, 2.0], vec![10.4, 1.0, 0.0], vec![20.4, 1.0, 4.0]];
        for BaselineRow { baseline, name } in BASELINES {
            assert_eq!(predict_classes(*baseline, &features, &classes, &asked, 1), [4, 0, 9], "{name}");
            assert_eq!(predict_classes(*baseline, &features, &[3; 90], &asked, 0), [3; 3], "{name}: one class");
            let flat = vec![vec![1.0]; 4];
            assert_eq!(predict_classes(*baseline, &flat, &[1, 2, 2, 1], &flat, 0), [1; 4], "{name}: no feature");
        }
    }
}
