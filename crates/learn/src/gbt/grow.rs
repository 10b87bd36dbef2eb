//! Growing of one tree on the gradients and Hessians of a loss.

use std::ops::Range;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::GbtOptions;
use super::bins::{BinnedColumn, Bins, MAX_BINS};
use super::tree::{SplitNode, Tree};

/// Sums of first and second derivatives by column and bin. Of each column, only its own bins are ever used.
type Histogram = Vec<[[f32; 2]; MAX_BINS]>;

/// Grower of trees, which reuses its buffers from tree to tree.
pub(super) struct Grower<'a> {
    bins: &'a Bins,
    options: &'a GbtOptions,
    columns: Vec<u32>,
    /// Rows of the tree, those of a leaf adjacent.
    rows: Vec<u32>,
    /// Derivatives of the rows of one leaf, in the leaf's order.
    pulls: Vec<[f32; 2]>,
    set_aside: Vec<u32>,
    free: Vec<Histogram>,
    scan: SplitScan,
    /// Number of random columns that each split considers, and the generator that draws them; `None` for all
    /// columns.
    per_split: Option<(usize, Xoshiro256PlusPlus)>,
}

/// Leaf that may still be split.
struct OpenLeaf {
    /// Index in a complete binary tree.
    place: usize,
    depth: usize,
    rows: Range<usize>,
    pull: [f64; 2],
    /// Histogram of the leaf; `None` for a leaf that cannot be split.
    histogram: Option<Histogram>,
    split: Option<LeafSplit>,
}

#[derive(Clone, Copy)]
struct LeafSplit {
    gain: f32,
    /// Index among the columns of the bins.
    column: u32,
    /// Last bin on the left side.
    bin: u8,
    missing_right: bool,
}

impl<'a> Grower<'a> {
    pub(super) fn new(bins: &'a Bins, options: &'a GbtOptions) -> Grower<'a> {
        let (pulls, set_aside) = (Vec::with_capacity(bins.n_rows), Vec::with_capacity(bins.n_rows));
        let scan = SplitScan { slopes: [0.0; MAX_BINS], curvatures: [0.0; MAX_BINS], worths: [0.0; MAX_BINS] };
        let (columns, rows, free) = (Vec::new(), Vec::new(), Vec::new());
        Grower { bins, options, columns, rows, pulls, set_aside, free, scan, per_split: None }
    }

    /// Makes each split consider `n` random columns, or further ones while none of them splits the leaf.
    pub(super) fn with_columns_per_split(self, n: usize, seed: u64) -> Grower<'a> {
        Grower { per_split: Some((n, Xoshiro256PlusPlus::seed_from_u64(seed))), ..self }
    }

    /// Grows the tree for these derivatives, on these rows and columns.
    pub(super) fn grow(&mut self, gradients: &[[f32; 2]], rows: Vec<u32>, columns: Vec<u32>) -> Tree {
        self.rows = rows;
        self.columns = columns;
        let mut root = self.leaf(gradients, 0, 0, 0..self.rows.len());
        if self.may_split(&root) {
            root.histogram = Some(self.count(gradients, &root.rows));
            self.find_split(&mut root);
        }
        let (mut leaves, mut splits) = (vec![root], Vec::new());
        while leaves.len() < self.options.max_leaves {
            let gain = |leaf: &OpenLeaf| leaf.split.map(|split| split.gain);
            let candidates = (0..leaves.len()).filter(|&at| leaves[at].split.is_some());
            // Among equals the earlier one, so that the tree depends only on its input.
            let best = candidates.reduce(|a, b| if gain(&leaves[b]) > gain(&leaves[a]) { b } else { a });
            let Some(at) = best else { break };
            let mut leaf = leaves.swap_remove(at);
            let split = leaf.split.take().expect("invariant: the leaf has a split");
            match self.split(gradients, &mut leaf, split) {
                Some(children) => {
                    let column = &self.bins.columns[split.column as usize];
                    // A cut for every bin but the last; a split after the last bin separates missing values
                    // from all others.
                    let threshold = column.cuts.get(usize::from(split.bin)).copied().unwrap_or(f32::INFINITY);
                    let node = SplitNode { threshold, feature: column.feature, missing_right: split.missing_right };
                    splits.push((leaf.place, node));
                    leaves.extend(children);
                }
                None => leaves.push(leaf),
            }
        }
        let values: Vec<(usize, f32)> = leaves.iter().map(|leaf| (leaf.place, self.value(leaf))).collect();
        self.free.extend(leaves.into_iter().filter_map(|leaf| leaf.histogram));
        Tree::new(&splits, &values)
    }

    fn value(&self, leaf: &OpenLeaf) -> f32 {
        let [slope, curvature] = leaf.pull;
        let curvature = curvature + f64::from(self.options.lambda);
        if curvature > 0.0 { (-slope / curvature * f64::from(self.options.learning_rate)) as f32 } else { 0.0 }
    }

    fn leaf(&self, gradients: &[[f32; 2]], place: usize, depth: usize, rows: Range<usize>) -> OpenLeaf {
        let pull = self.rows[rows.clone()].iter().fold([0.0; 2], |sum, &row| {
            let [slope, curvature] = gradients[row as usize];
            [sum[0] + f64::from(slope), sum[1] + f64::from(curvature)]
        });
        OpenLeaf { place, depth, rows, pull, histogram: None, split: None }
    }

    fn may_split(&self, leaf: &OpenLeaf) -> bool {
        let enough = leaf.pull[1] >= 2.0 * f64::from(self.options.min_child_weight);
        leaf.depth < self.options.max_depth && leaf.rows.len() >= 2 && enough
    }

    fn new_histogram(&mut self) -> Histogram {
        let mut histogram = self.free.pop().unwrap_or_default();
        histogram.resize(self.columns.len(), [[0.0; 2]; MAX_BINS]);
        histogram
    }

    /// Returns the sums over these rows.
    fn count(&mut self, gradients: &[[f32; 2]], rows: &Range<usize>) -> Histogram {
        let mut histogram = self.new_histogram();
        let rows = &self.rows[rows.clone()];
        self.pulls.clear();
        self.pulls.extend(rows.iter().map(|&row| gradients[row as usize]));
        let columns = self.columns.iter().map(|&column| &self.bins.columns[column as usize]);
        let columns: Vec<&BinnedColumn> = columns.collect();
        for (columns, sums) in columns.chunks(4).zip(histogram.chunks_mut(4)) {
            sums.iter_mut().zip(columns).for_each(|(sums, column)| sums[..column.n_bins()].fill([0.0; 2]));
            if let ([a, b, c, d], [sa, sb, sc, sd]) = (columns, &mut *sums) {
                // Four columns at a time: consecutive additions to the same bin wait for each other, and the
                // other columns fill the time.
                for (&row, pull) in rows.iter().zip(&self.pulls) {
                    let row = row as usize;
                    add(&mut sa[usize::from(a.of_row[row])], pull);
                    add(&mut sb[usize::from(b.of_row[row])], pull);
                    add(&mut sc[usize::from(c.of_row[row])], pull);
                    add(&mut sd[usize::from(d.of_row[row])], pull);
                }
            } else {
                for (column, sums) in columns.iter().zip(sums) {
                    for (&row, pull) in rows.iter().zip(&self.pulls) {
                        add(&mut sums[usize::from(column.of_row[row as usize])], pull);
                    }
                }
            }
        }
        histogram
    }

    /// Finds the split of a leaf with the largest gain, from its histogram.
    fn find_split(&mut self, leaf: &mut OpenLeaf) {
        let Some(histogram) = &leaf.histogram else { return };
        let mut order: Vec<usize> = (0..self.columns.len()).collect();
        let n_enough = match &mut self.per_split {
            Some((n, rng)) => {
                order.shuffle(rng);
                *n
            }
            None => order.len(),
        };
        let mut best: Option<LeafSplit> = None;
        for (n_seen, at) in order.into_iter().enumerate() {
            if n_seen >= n_enough && best.is_some() {
                break;
            }
            let column = self.columns[at];
            let sums = &histogram[at];
            let found = self.scan.best_split(self.options, &self.bins.columns[column as usize], sums, leaf.pull);
            let Some((gain, bin, missing_right)) = found else { continue };
            if best.is_none_or(|best| gain > best.gain) {
                best = Some(LeafSplit { gain, column, bin, missing_right });
            }
        }
        leaf.split = best;
    }

    /// Carries out a split, or leaves the leaf unchanged if all rows turn out to be on one side, which the
    /// rounding of sums may have hidden.
    fn split(&mut self, gradients: &[[f32; 2]], leaf: &mut OpenLeaf, split: LeafSplit) -> Option<[OpenLeaf; 2]> {
        let column = &self.bins.columns[split.column as usize];
        let missing_bin = if column.has_missing { column.cuts.len() + 1 } else { MAX_BINS };
        let rows = &mut self.rows[leaf.rows.clone()];
        self.set_aside.clear();
        let mut n_left = 0;
        for at in 0..rows.len() {
            let row = rows[at];
            let bin = column.of_row[row as usize];
            let right = if usize::from(bin) == missing_bin { split.missing_right } else { bin > split.bin };
            if right {
                self.set_aside.push(row);
            } else {
                rows[n_left] = row;
                n_left += 1;
            }
        }
        rows[n_left..].copy_from_slice(&self.set_aside);
        if n_left == 0 || n_left == rows.len() {
            return None;
        }
        let middle = leaf.rows.start + n_left;
        let mut left = self.leaf(gradients, 2 * leaf.place + 1, leaf.depth + 1, leaf.rows.start..middle);
        let mut right = self.leaf(gradients, 2 * leaf.place + 2, leaf.depth + 1, middle..leaf.rows.end);
        let (smaller, larger) =
            if n_left <= leaf.rows.len() / 2 { (&mut left, &mut right) } else { (&mut right, &mut left) };
        let of_leaf = leaf.histogram.take();
        match (self.may_split(smaller), self.may_split(larger), of_leaf) {
            (false, false, of_leaf) => self.free.extend(of_leaf),
            (_, splits_larger, Some(mut rest)) => {
                let counted = self.count(gradients, &smaller.rows);
                if splits_larger {
                    for ((rest, counted), &column) in rest.iter_mut().zip(&counted).zip(&self.columns) {
                        let n_bins = self.bins.columns[column as usize].n_bins();
                        for (rest, counted) in rest[..n_bins].iter_mut().zip(&counted[..n_bins]) {
                            *rest = [rest[0] - counted[0], rest[1] - counted[1]];
                        }
                    }
                    larger.histogram = Some(rest);
                    self.find_split(larger);
                } else {
                    self.free.push(rest);
                }
                if self.may_split(smaller) {
                    smaller.histogram = Some(counted);
                    self.find_split(smaller);
                } else {
                    self.free.push(counted);
                }
            }
            (.., None) => unreachable!("invariant: a leaf with a split has a histogram"),
        }
        Some([left, right])
    }
}

/// Scratch space of the search for a split on a column; first and second derivatives are in separate arrays,
/// so that they are vectorized.
struct SplitScan {
    /// Sums up to each bin.
    slopes: [f32; MAX_BINS],
    curvatures: [f32; MAX_BINS],
    worths: [f32; MAX_BINS],
}

impl SplitScan {
    /// Returns the gain of the best split on one column, the last bin on its left side, and whether missing
    /// values go right.
    fn best_split(
        &mut self,
        options: &GbtOptions,
        column: &BinnedColumn,
        sums: &[[f32; 2]; MAX_BINS],
        pull: [f64; 2],
    ) -> Option<(f32, u8, bool)> {
        let n_values = column.cuts.len() + 1;
        // With missing values a split after the last bin counts, too: it separates them from all others.
        let n_splits = if column.has_missing { n_values } else { n_values - 1 };
        let (slopes, curvatures, worths) =
            (&mut self.slopes[..n_splits], &mut self.curvatures[..n_splits], &mut self.worths[..n_splits]);
        let mut sum = [0.0; 2];
        for ((slope, curvature), of_bin) in slopes.iter_mut().zip(&mut *curvatures).zip(sums) {
            sum = [sum[0] + of_bin[0], sum[1] + of_bin[1]];
            [*slope, *curvature] = sum;
        }
        let all = pull.map(|x| x as f32);
        let worth = |slope: f32, curvature: f32| slope * slope / (curvature + options.lambda).max(1e-12);
        let least = options.min_child_weight.max(1e-6);
        let missing = if column.has_missing { sums[n_values] } else { [0.0; 2] };
        // Missing values on the right, then on the left.
        let sides: &[[f32; 2]] = if column.has_missing { &[[0.0; 2], missing] } else { &[[0.0; 2]] };
        let mut best: Option<(f32, u8, bool)> = None;
        for (side, extra) in sides.iter().enumerate() {
            for ((gain, slope), curvature) in worths.iter_mut().zip(&*slopes).zip(&*curvatures) {
                let (slope, curvature) = (slope + extra[0], curvature + extra[1]);
                let (rest_slope, rest_curvature) = (all[0] - slope, all[1] - curvature);
                let both = worth(slope, curvature) + worth(rest_slope, rest_curvature);
                *gain = if curvature.min(rest_curvature) >= least { both } else { f32::NEG_INFINITY };
            }
            let (mut bin, mut largest) = (0, f32::NEG_INFINITY);
            for (at, &gain) in worths.iter().enumerate() {
                if gain > largest {
                    (bin, largest) = (at, gain);
                }
            }
            if largest > best.map_or(f32::NEG_INFINITY, |best| best.0) {
                // If no values are missing now, later missing values follow the larger side.
                let right = if column.has_missing { side == 0 } else { 2.0 * curvatures[bin] < all[1] };
                best = Some((largest, bin as u8, right));
            }
        }
        let (largest, bin, right) = best?;
        let gain = 0.5 * (largest - worth(all[0], all[1])) - options.gamma;
        (gain > 0.0).then_some((gain, bin, right))
    }
}

fn add(sum: &mut [f32; 2], pull: &[f32; 2]) {
    sum[0] += pull[0];
    sum[1] += pull[1];
}
