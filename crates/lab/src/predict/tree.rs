//! Classification trees and random forests.

use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// Rows of features with their classes, `0..n_classes`.
#[derive(Clone, Copy)]
pub struct ClassExamples<'a> {
    /// Rows of equal length.
    pub rows: &'a [Vec<f64>],
    /// Class of each row.
    pub classes: &'a [usize],
    /// Number of classes.
    pub n_classes: usize,
}

/// Decision tree, grown until its leaves are pure or their rows equal.
///
/// # Source
/// Breiman et al., "Classification and Regression Trees" (1984), with Gini impurity and without pruning.
pub struct DecisionTree {
    nodes: Vec<DecisionNode>,
}

enum DecisionNode {
    Leaf { class: usize },
    Split { column: usize, threshold: f64, below: usize, above: usize },
}

/// Threshold on a column that divides rows.
struct ColumnThreshold {
    column: usize,
    threshold: f64,
    /// Σ over both sides of Σ over classes of n², divided by the side's rows: larger is purer.
    purity: f64,
}

impl DecisionTree {
    /// Grows a tree on these rows of the examples; `columns` returns the columns that a node may use, the
    /// first `n_tried` of which must vary among its rows.
    fn grow(
        examples: ClassExamples,
        rows: &mut [usize],
        n_tried: usize,
        mut columns: impl FnMut() -> Vec<usize>,
    ) -> DecisionTree {
        let mut nodes = vec![DecisionNode::Leaf { class: 0 }];
        let mut open = vec![(0, 0..rows.len())];
        while let Some((at, range)) = open.pop() {
            let here = &mut rows[range.clone()];
            nodes[at] = match examples.best_split(here, &columns(), n_tried) {
                None => DecisionNode::Leaf { class: examples.majority(here) },
                Some(ColumnThreshold { column, threshold, .. }) => {
                    here.sort_unstable_by_key(|&row| examples.rows[row][column] > threshold);
                    let n_below = here.partition_point(|&row| examples.rows[row][column] <= threshold);
                    let (below, above) = (nodes.len(), nodes.len() + 1);
                    open.push((below, range.start..range.start + n_below));
                    open.push((above, range.start + n_below..range.end));
                    nodes.extend([DecisionNode::Leaf { class: 0 }, DecisionNode::Leaf { class: 0 }]);
                    DecisionNode::Split { column, threshold, below, above }
                }
            };
        }
        DecisionTree { nodes }
    }

    /// Grows a tree on all rows, with every column at each node.
    pub fn fit(examples: ClassExamples) -> DecisionTree {
        let n_columns = examples.rows.first().map_or(0, Vec::len);
        let mut rows: Vec<usize> = (0..examples.rows.len()).collect();
        DecisionTree::grow(examples, &mut rows, n_columns, || (0..n_columns).collect())
    }

    /// Class of a row.
    pub fn predict(&self, row: &[f64]) -> usize {
        let mut at = 0;
        loop {
            match self.nodes[at] {
                DecisionNode::Leaf { class } => return class,
                DecisionNode::Split { column, threshold, below, above } => {
                    at = if row[column] <= threshold { below } else { above };
                }
            }
        }
    }
}

impl ClassExamples<'_> {
    fn counts(&self, rows: &[usize]) -> Vec<u64> {
        let mut counts = vec![0; self.n_classes];
        rows.iter().for_each(|&row| counts[self.classes[row]] += 1);
        counts
    }

    fn majority(&self, rows: &[usize]) -> usize {
        most(&self.counts(rows))
    }

    /// Best split of these rows on the first `n_tried` of the columns that vary among them; `None` if the
    /// rows are of one class or equal.
    fn best_split(&self, rows: &mut [usize], columns: &[usize], n_tried: usize) -> Option<ColumnThreshold> {
        if rows.iter().all(|&row| self.classes[row] == self.classes[rows[0]]) {
            return None;
        }
        let splits = columns.iter().filter_map(|&column| self.split(rows, column));
        splits.take(n_tried).reduce(|best, split| if split.purity > best.purity { split } else { best })
    }

    /// Best threshold on a column; `None` if the rows do not differ there.
    ///
    /// # Cost
    /// O(rows · log rows).
    fn split(&self, rows: &mut [usize], column: usize) -> Option<ColumnThreshold> {
        rows.sort_unstable_by(|&a, &b| self.rows[a][column].total_cmp(&self.rows[b][column]));
        let mut above = self.counts(rows);
        let mut below = vec![0u64; self.n_classes];
        let squares = |counts: &[u64]| counts.iter().map(|n| n * n).sum::<u64>();
        let (mut squares_below, mut squares_above) = (0, squares(&above));
        let mut best: Option<ColumnThreshold> = None;
        for (n, pair) in (1..).zip(rows.windows(2)) {
            let class = self.classes[pair[0]];
            squares_below += 2 * below[class] + 1;
            squares_above -= 2 * above[class] - 1;
            below[class] += 1;
            above[class] -= 1;
            let [low, high] = [pair[0], pair[1]].map(|row| self.rows[row][column]);
            let purity = squares_below as f64 / n as f64 + squares_above as f64 / (rows.len() - n) as f64;
            if low < high && best.as_ref().is_none_or(|best| purity > best.purity) {
                let middle = low + (high - low) / 2.0;
                best = Some(ColumnThreshold { column, threshold: if middle < high { middle } else { low }, purity });
            }
        }
        best
    }
}

/// Most frequent class; the smallest if there are several.
pub fn most(counts: &[u64]) -> usize {
    let most = counts.iter().max().expect("invariant: there are classes");
    counts.iter().position(|n| n == most).expect("invariant: it is one of them")
}

/// Random forest: trees on bootstrap samples, with √columns random columns at each node; predicts by majority
/// vote.
///
/// # Source
/// Breiman, "Random Forests" (2001).
pub struct RandomForest {
    trees: Vec<DecisionTree>,
    n_classes: usize,
}

impl RandomForest {
    /// Grows `n_trees` trees.
    pub fn fit(examples: ClassExamples, n_trees: usize, seed: u64) -> RandomForest {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (n_rows, n_columns) = (examples.rows.len(), examples.rows.first().map_or(0, Vec::len));
        let n_tried = n_columns.isqrt().max(1);
        let trees = (0..n_trees).map(|_| {
            let mut rows: Vec<usize> = (0..n_rows).map(|_| rng.random_range(0..n_rows)).collect();
            DecisionTree::grow(examples, &mut rows, n_tried, || {
                let mut columns: Vec<usize> = (0..n_columns).collect();
                columns.shuffle(&mut rng);
                columns
            })
        });
        RandomForest { trees: trees.collect(), n_classes: examples.n_classes }
    }

    /// Class of a row.
    pub fn predict(&self, row: &[f64]) -> usize {
        let mut votes = vec![0; self.n_classes];
        self.trees.iter().for_each(|tree| votes[tree.predict(row)] += 1);
        most(&votes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows on a grid of three columns, the last of which is irrelevant.
    fn grid(class: impl Fn(f64, f64) -> usize) -> (Vec<Vec<f64>>, Vec<usize>) {
        let rows: Vec<Vec<f64>> =
            (0..144).map(|at| vec![f64::from(at % 12), f64::from(at / 12), f64::from(at * 7 % 5)]).collect();
        let classes = rows.iter().map(|row| class(row[0], row[1])).collect();
        (rows, classes)
    }

    #[test]
    fn a_tree_knows_every_row_it_has_seen() {
        let (rows, classes) = grid(|x, y| (x * 5.0 + y * 3.0) as usize % 4);
        let tree = DecisionTree::fit(ClassExamples { rows: &rows, classes: &classes, n_classes: 4 });
        assert!(rows.iter().zip(&classes).all(|(row, class)| tree.predict(row) == *class));
    }

    #[test]
    fn thresholds_lie_between_what_they_part() {
        let (rows, classes) = grid(|x, _| usize::from(x > 4.0));
        let tree = DecisionTree::fit(ClassExamples { rows: &rows, classes: &classes, n_classes: 2 });
        assert_eq!(tree.nodes.len(), 3, "one threshold suffices");
        for (x, class) in [(f64::NEG_INFINITY, 0), (4.49, 0), (4.51, 1), (f64::INFINITY, 1)] {
            assert_eq!(tree.predict(&[x, 0.0, 0.0]), class, "{x}");
        }
        // Neighbouring numbers have no number between them.
        let rows = [1.0, 1.0f64.next_up()].map(|x| vec![x]);
        let tree = DecisionTree::fit(ClassExamples { rows: &rows, classes: &[0, 1], n_classes: 2 });
        assert_eq!(rows.each_ref().map(|row| tree.predict(row)), [0, 1]);
    }

    #[test]
    fn equal_rows_are_of_their_majority() {
        let rows = vec![vec![1.0]; 5];
        let tree = DecisionTree::fit(ClassExamples { rows: &rows, classes: &[2, 1, 1, 2, 0], n_classes: 3 });
        assert_eq!(tree.predict(&[1.0]), 1);
    }

    #[test]
    fn a_forest_follows_from_its_seed_and_sees_through_noise() {
        // A tenth of the labels is wrong.
        let (rows, clean) = grid(|x, y| usize::from(x + y > 11.0));
        let noisy: Vec<usize> =
            clean.iter().enumerate().map(|(at, class)| if at % 10 == 3 { 1 - class } else { *class }).collect();
        let examples = ClassExamples { rows: &rows, classes: &noisy, n_classes: 2 };
        let answers = |seed| {
            let forest = RandomForest::fit(examples, 50, seed);
            rows.iter().map(|row| forest.predict(&[row[0] + 0.25, row[1] + 0.25, 2.0])).collect::<Vec<_>>()
        };
        assert_eq!(answers(1), answers(1));
        assert_ne!(answers(1), answers(2));
        let n_right = answers(1).iter().zip(&clean).filter(|(answer, class)| answer == class).count();
        assert!(n_right >= 125, "{n_right} of 144");
    }
}
