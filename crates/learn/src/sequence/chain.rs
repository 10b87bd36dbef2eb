//! Classifier chain of forests of extremely randomized trees.

use std::ops::ControlFlow;

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

use super::beam::{Decoder, LikelyAnswer};
use super::encoding::Columns;
use super::{Epoch, Example, Fit, SequenceError, Training, TrainingData, TrainingProgress, likeliest};

/// Minimum number of examples in a leaf; one that is drawn twice counts twice.
const MIN_LEAF: usize = 3;

/// Share of the columns that a node considers.
const COLUMNS_SHARE: f64 = 0.8;

/// Share of a prediction that comes from the overall frequencies of values, so that no value is impossible.
const SMOOTHING: f32 = 0.01;

/// Mark of a leaf in [`ClassifierTrees::column`].
const LEAF: u32 = u32::MAX;

/// Chain of forests, one for each parameter, which predicts it from the problem and the values of the
/// parameters before it.
///
/// # Source
/// Read et al., "Classifier chains for multi-label classification" (2009); Geurts et al., "Extremely
/// randomized trees" (2006), except that each tree learns from a bootstrap sample as in Breiman's forests.
/// Leaves hold the frequencies of the values in them, and a forest's prediction is their mean.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chain {
    pub(super) columns: Columns,
    pub(super) forests: Vec<ClassifierTrees>,
}

/// Trees that classify rows, with the nodes of all trees in one array.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ClassifierTrees {
    pub(super) n_values: usize,
    /// Indices of the roots.
    pub(super) roots: Vec<u32>,
    /// Column that a node compares, or [`LEAF`].
    pub(super) column: Vec<u32>,
    /// Largest value that goes to the first child.
    pub(super) threshold: Vec<f32>,
    /// Index of the first child, which the second one follows; for a leaf, its index among the leaves.
    pub(super) next: Vec<u32>,
    /// Frequencies of the values in each leaf.
    pub(super) leaves: Vec<f32>,
    /// Prior that is mixed into each prediction.
    pub(super) prior: Vec<f32>,
}

impl Chain {
    /// Learns a forest for each parameter.
    pub(super) fn train(
        TrainingData { vocabulary, train, validation }: TrainingData,
        training: &Training,
        progress: &mut dyn FnMut(&TrainingProgress) -> ControlFlow<()>,
    ) -> Result<Chain, SequenceError> {
        let n_trees = training.n_trees;
        if n_trees == 0 {
            let (option, value) = ("the number of trees", n_trees.to_string());
            return Err(SequenceError::BadOption { option, value, expected: "at least 1" });
        }
        let columns = Columns::new(training.encoding, vocabulary, train.iter().map(|e| e.problem.as_slice()));
        let n_parameters = vocabulary.parameters.len();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(training.seed);
        let rows_of = |examples: &[Example]| -> Vec<Vec<f32>> {
            let row =
                |e: &Example| columns.row(&e.problem).into_iter().chain(e.answer.iter().map(|&v| v as f32)).collect();
            examples.iter().map(row).collect()
        };
        let (train_rows, validation_rows) = (rows_of(train), rows_of(validation));
        let by_column: Vec<Vec<f32>> = (0..columns.len() + n_parameters)
            .map(|column| train_rows.iter().map(|row| row[column]).collect())
            .collect();
        let mut forests = Vec::with_capacity(n_parameters);
        let (mut sums, mut epochs) = (Epoch::default(), Vec::with_capacity(n_parameters));
        for (at, parameter) in vocabulary.parameters.iter().enumerate() {
            let classes: Vec<u32> = train.iter().map(|e| e.answer[at]).collect();
            let seen = &by_column[..columns.len() + at];
            let forest = ClassifierTrees::grow(seen, &classes, parameter.values.len(), n_trees, &mut rng);
            let add = |sum: &mut Fit, rows: &[Vec<f32>], examples: &[Example]| {
                let predicted = forest.predict(rows);
                for (row, example) in predicted.chunks_exact(forest.n_values).zip(examples) {
                    let right = example.answer[at] as usize;
                    sum.loss -= f64::from(row[right].ln()) / examples.len() as f64;
                    sum.accuracy += f64::from(u8::from(likeliest(row) == right)) / examples.len() as f64;
                }
            };
            add(&mut sums.train, &train_rows, train);
            add(&mut sums.validation, &validation_rows, validation);
            forests.push(forest);
            let epoch = at + 1;
            // Losses add up over the parameters learnt so far, and accuracies are averaged.
            let mean = |sum: Fit| Fit { accuracy: sum.accuracy / epoch as f64, ..sum };
            epochs.push(Epoch { train: mean(sums.train), validation: mean(sums.validation) });
            let now = TrainingProgress { epochs: epochs.clone(), n_epochs: n_parameters, best_epoch: epoch };
            if progress(&now).is_break() && epoch < n_parameters {
                return Err(SequenceError::Stopped { epochs: epoch });
            }
        }
        Ok(Chain { columns, forests })
    }

    /// Makes a decoder of the answers for a problem.
    pub(super) fn decoder(&self, problem: &[i64]) -> impl Decoder {
        ChainDecoder { chain: self, row: self.columns.row(problem) }
    }
}

struct ChainDecoder<'a> {
    chain: &'a Chain,
    row: Vec<f32>,
}

impl Decoder for ChainDecoder<'_> {
    fn next(&mut self, prefixes: &[LikelyAnswer], _parents: &[usize]) -> Vec<f32> {
        let row = |prefix: &LikelyAnswer| {
            let values = prefix.values.iter().map(|&value| value as f32);
            self.row.iter().copied().chain(values).collect()
        };
        let rows: Vec<Vec<f32>> = prefixes.iter().map(row).collect();
        let mut predicted = self.chain.forests[prefixes[0].values.len()].predict(&rows);
        predicted.iter_mut().for_each(|p| *p = p.ln());
        predicted
    }
}

impl ClassifierTrees {
    /// Grows trees on these columns.
    fn grow(
        columns: &[Vec<f32>],
        classes: &[u32],
        n_values: usize,
        n_trees: usize,
        rng: &mut Xoshiro256PlusPlus,
    ) -> ClassifierTrees {
        let mut counts = vec![0.0; n_values];
        classes.iter().for_each(|&class| counts[class as usize] += 1.0);
        let n_rows = classes.len() as f32;
        let prior = counts.iter().map(|count| 0.5 * count / n_rows + 0.5 / n_values as f32).collect();
        let mut forest = ClassifierTrees { n_values, prior, ..ClassifierTrees::default() };
        for _ in 0..n_trees {
            let mut rows: Vec<u32> = classes.iter().map(|_| rng.random_range(0..classes.len() as u32)).collect();
            let root = forest.push();
            forest.roots.push(root);
            // Nodes that are still to be split, with their rows.
            let mut open = vec![(root, 0, rows.len())];
            while let Some((node, from, to)) = open.pop() {
                let inside = &mut rows[from..to];
                match best_split(columns, classes, n_values, inside, rng) {
                    Some(split) => {
                        let middle = partition(inside, &columns[split.column], split.threshold);
                        let first = forest.push();
                        let second = forest.push();
                        forest.column[node as usize] = split.column as u32;
                        forest.threshold[node as usize] = split.threshold;
                        forest.next[node as usize] = first;
                        open.push((second, from + middle, to));
                        open.push((first, from, from + middle));
                    }
                    None => {
                        let start = forest.leaves.len();
                        forest.next[node as usize] = (start / n_values) as u32;
                        forest.leaves.resize(start + n_values, 0.0);
                        let share = 1.0 / inside.len() as f32;
                        inside.iter().for_each(|&row| forest.leaves[start + classes[row as usize] as usize] += share);
                    }
                }
            }
        }
        forest
    }

    /// Whether every path through the trees, for rows of `n_columns` columns, ends in a leaf, and leaves hold
    /// frequencies.
    pub(super) fn is_sound(&self, n_columns: usize) -> bool {
        let n_nodes = self.column.len();
        let n_leaves = self.leaves.len() / self.n_values;
        // Children come after their node, so every path is finite.
        let node_is_sound = |(node, (&column, &next)): (usize, (&u32, &u32))| match column {
            LEAF => (next as usize) < n_leaves,
            _ => (column as usize) < n_columns && next as usize > node && next as usize + 1 < n_nodes,
        };
        self.next.len() == n_nodes
            && !self.roots.is_empty()
            && self.roots.iter().all(|&root| (root as usize) < n_nodes)
            && self.column.iter().zip(&self.next).enumerate().all(node_is_sound)
            && self.leaves.iter().chain(&self.prior).all(|&share| share >= 0.0)
    }

    /// Adds a node, initially a leaf.
    fn push(&mut self) -> u32 {
        self.column.push(LEAF);
        self.threshold.push(0.0);
        self.next.push(0);
        (self.column.len() - 1) as u32
    }

    /// Predicts the probability of each value, row by row.
    fn predict(&self, rows: &[Vec<f32>]) -> Vec<f32> {
        let mut sums = vec![0.0; rows.len() * self.n_values];
        // A tree is small enough to stay in the cache while all rows go through it.
        for &root in &self.roots {
            for (row, sums) in rows.iter().zip(sums.chunks_exact_mut(self.n_values)) {
                let mut node = root as usize;
                while self.column[node] != LEAF {
                    let second = row[self.column[node] as usize] > self.threshold[node];
                    node = self.next[node] as usize + usize::from(second);
                }
                let leaf = &self.leaves[self.next[node] as usize * self.n_values..][..self.n_values];
                sums.iter_mut().zip(leaf).for_each(|(sum, share)| *sum += share);
            }
        }
        let scale = (1.0 - SMOOTHING) / self.roots.len() as f32;
        for sums in sums.chunks_exact_mut(self.n_values) {
            sums.iter_mut().zip(&self.prior).for_each(|(sum, prior)| *sum = scale * *sum + SMOOTHING * prior);
        }
        sums
    }
}

/// Split of rows into those up to a threshold of a column and the others.
struct RowSplit {
    column: usize,
    threshold: f32,
}

/// Best of random thresholds, one for each of some columns that vary among the rows; `None` if the rows
/// should not be split.
fn best_split(
    columns: &[Vec<f32>],
    classes: &[u32],
    n_values: usize,
    rows: &[u32],
    rng: &mut Xoshiro256PlusPlus,
) -> Option<RowSplit> {
    let pure = rows.iter().all(|&row| classes[row as usize] == classes[rows[0] as usize]);
    if pure || rows.len() < 2 * MIN_LEAF {
        return None;
    }
    let n_wanted = ((columns.len() as f64 * COLUMNS_SHARE).ceil() as usize).max(1);
    let mut order: Vec<usize> = (0..columns.len()).collect();
    let mut n_found = 0;
    let mut best: Option<(f64, RowSplit)> = None;
    let mut counts = vec![[0u32; 2]; n_values];
    for i in 0..order.len() {
        if n_found == n_wanted {
            break;
        }
        order.swap(i, rng.random_range(i..columns.len()));
        let column = order[i];
        let values = &columns[column];
        let (low, high) = rows.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &row| {
            let value = values[row as usize];
            (low.min(value), high.max(value))
        });
        if low >= high {
            continue;
        }
        n_found += 1;
        let threshold = (low + rng.random::<f32>() * (high - low)).clamp(low, high.next_down());
        counts.fill([0; 2]);
        let mut n_second = 0;
        for &row in rows {
            let second = usize::from(values[row as usize] > threshold);
            counts[classes[row as usize] as usize][second] += 1;
            n_second += second;
        }
        let n_first = rows.len() - n_second;
        if n_first.min(n_second) < MIN_LEAF {
            continue;
        }
        // The larger, the purer: Gini's impurity of the children, without terms that do not depend on the
        // split.
        let squares = |side: usize| counts.iter().map(|c| f64::from(c[side]).powi(2)).sum::<f64>();
        let purity = squares(0) / n_first as f64 + squares(1) / n_second as f64;
        if best.as_ref().is_none_or(|(least, _)| purity > *least) {
            best = Some((purity, RowSplit { column, threshold }));
        }
    }
    best.map(|(_, split)| split)
}

/// Moves the rows up to a threshold to the front; returns their number.
fn partition(rows: &mut [u32], values: &[f32], threshold: f32) -> usize {
    let mut n_first = 0;
    for at in 0..rows.len() {
        if values[rows[at] as usize] <= threshold {
            rows.swap(n_first, at);
            n_first += 1;
        }
    }
    n_first
}
