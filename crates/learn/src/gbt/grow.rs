//! Growing one tree on the derivatives of a loss.

use std::ops::Range;

use super::GbtOptions;
use super::bins::{Bins, Column, MAX_BINS};
use super::tree::{Node, Tree};

/// Sums of first and second derivatives by column and bin. Of each column, only its own bins are ever used.
type Histogram = Vec<[[f32; 2]; MAX_BINS]>;

/// Grows trees; keeps its buffers from one to the next.
pub(super) struct Grower<'a> {
    bins: &'a Bins,
    options: &'a GbtOptions,
    columns: Vec<u32>,
    /// The rows of the tree, those of a leaf side by side.
    rows: Vec<u32>,
    /// The derivatives of the rows of one leaf, in the leaf's order.
    pulls: Vec<[f32; 2]>,
    set_aside: Vec<u32>,
    free: Vec<Histogram>,
}

/// A leaf that may yet be split.
struct Leaf {
    /// In a complete binary tree.
    place: usize,
    depth: usize,
    rows: Range<usize>,
    pull: [f64; 2],
    /// What a split is looked for in; none for a leaf that cannot be split.
    histogram: Option<Histogram>,
    split: Option<Split>,
}

#[derive(Clone, Copy)]
struct Split {
    gain: f32,
    /// Among the columns of the bins.
    column: u32,
    /// The last bin on the left side.
    bin: u8,
    missing_right: bool,
}

impl<'a> Grower<'a> {
    pub(super) fn new(bins: &'a Bins, options: &'a GbtOptions) -> Grower<'a> {
        let (pulls, set_aside) = (Vec::with_capacity(bins.n_rows), Vec::with_capacity(bins.n_rows));
        Grower { bins, options, columns: Vec::new(), rows: Vec::new(), pulls, set_aside, free: Vec::new() }
    }

    /// The tree for these derivatives, on these rows and columns.
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
            let gain = |leaf: &Leaf| leaf.split.map(|split| split.gain);
            let candidates = (0..leaves.len()).filter(|&at| leaves[at].split.is_some());
            // Of equals the earlier one, so that the tree depends on nothing but its input.
            let best = candidates.reduce(|a, b| if gain(&leaves[b]) > gain(&leaves[a]) { b } else { a });
            let Some(at) = best else { break };
            let mut leaf = leaves.swap_remove(at);
            let split = leaf.split.take().expect("invariant: the leaf has a split");
            match self.split(gradients, &mut leaf, split) {
                Some(children) => {
                    let column = &self.bins.columns[split.column as usize];
                    // A cut for every bin but the last; a split after the last parts missing values from all others.
                    let threshold = column.cuts.get(usize::from(split.bin)).copied().unwrap_or(f32::INFINITY);
                    let node = Node { threshold, feature: column.feature, missing_right: split.missing_right };
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

    fn value(&self, leaf: &Leaf) -> f32 {
        let [slope, curvature] = leaf.pull;
        let curvature = curvature + f64::from(self.options.lambda);
        if curvature > 0.0 { (-slope / curvature * f64::from(self.options.learning_rate)) as f32 } else { 0.0 }
    }

    fn leaf(&self, gradients: &[[f32; 2]], place: usize, depth: usize, rows: Range<usize>) -> Leaf {
        let pull = self.rows[rows.clone()].iter().fold([0.0; 2], |sum, &row| {
            let [slope, curvature] = gradients[row as usize];
            [sum[0] + f64::from(slope), sum[1] + f64::from(curvature)]
        });
        Leaf { place, depth, rows, pull, histogram: None, split: None }
    }

    fn may_split(&self, leaf: &Leaf) -> bool {
        let enough = leaf.pull[1] >= 2.0 * f64::from(self.options.min_child_weight);
        leaf.depth < self.options.max_depth && leaf.rows.len() >= 2 && enough
    }

    fn new_histogram(&mut self) -> Histogram {
        let mut histogram = self.free.pop().unwrap_or_default();
        histogram.resize(self.columns.len(), [[0.0; 2]; MAX_BINS]);
        histogram
    }

    /// The sums over these rows.
    fn count(&mut self, gradients: &[[f32; 2]], rows: &Range<usize>) -> Histogram {
        let mut histogram = self.new_histogram();
        let rows = &self.rows[rows.clone()];
        self.pulls.clear();
        self.pulls.extend(rows.iter().map(|&row| gradients[row as usize]));
        let columns = self.columns.iter().map(|&column| &self.bins.columns[column as usize]);
        let columns: Vec<&Column> = columns.collect();
        for (columns, sums) in columns.chunks(4).zip(histogram.chunks_mut(4)) {
            sums.iter_mut().zip(columns).for_each(|(sums, column)| sums[..column.n_bins()].fill([0.0; 2]));
            if let ([a, b, c, d], [sa, sb, sc, sd]) = (columns, &mut *sums) {
                // Four columns at a time: a bin that follows itself waits for its last sum, and others fill the time.
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

    /// Finds the split of a leaf that gains most, from its histogram.
    fn find_split(&self, leaf: &mut Leaf) {
        let Some(histogram) = &leaf.histogram else { return };
        let mut best: Option<Split> = None;
        for (sums, &column) in histogram.iter().zip(&self.columns) {
            let found = self.split_of_column(&self.bins.columns[column as usize], sums, leaf.pull);
            let Some((gain, bin, missing_right)) = found else { continue };
            if best.is_none_or(|best| gain > best.gain) {
                best = Some(Split { gain, column, bin, missing_right });
            }
        }
        leaf.split = best;
    }

    /// The gain of the best split on one column, the last bin on its left side, and where missing values go.
    fn split_of_column(&self, column: &Column, sums: &[[f32; 2]; MAX_BINS], pull: [f64; 2]) -> Option<(f32, u8, bool)> {
        let n_values = column.cuts.len() + 1;
        let missing = if column.has_missing { sums[n_values] } else { [0.0; 2] };
        let all = pull.map(|x| x as f32);
        let worth = |[slope, curvature]: [f32; 2]| slope * slope / (curvature + self.options.lambda).max(1e-12);
        let least = self.options.min_child_weight.max(1e-6);
        // With missing values a split after the last bin is one too.
        let n_splits = if column.has_missing { n_values } else { n_values - 1 };
        let mut below = [[0.0f32; 2]; MAX_BINS];
        let mut sum = [0.0; 2];
        for (below, of_bin) in below.iter_mut().zip(&sums[..n_splits]) {
            sum = [sum[0] + of_bin[0], sum[1] + of_bin[1]];
            *below = sum;
        }
        let mut best: Option<(f32, u8, bool)> = None;
        let mut gains = [0.0f32; MAX_BINS];
        for missing_right in [true, false] {
            let extra = if missing_right { [0.0; 2] } else { missing };
            for (gain, below) in gains.iter_mut().zip(&below[..n_splits]) {
                let left = [below[0] + extra[0], below[1] + extra[1]];
                let right = [all[0] - left[0], all[1] - left[1]];
                let enough = (left[1] >= least) & (right[1] >= least);
                *gain = if enough { worth(left) + worth(right) } else { f32::NEG_INFINITY };
            }
            let largest = gains[..n_splits].iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if best.is_none_or(|best| largest > best.0) && largest > f32::NEG_INFINITY {
                let bin = gains[..n_splits].iter().position(|&gain| gain == largest)?;
                // Where nothing is missing now, later missing values follow the larger side.
                let side = if column.has_missing { missing_right } else { 2.0 * below[bin][1] < all[1] };
                best = Some((largest, bin as u8, side));
            }
            if !column.has_missing {
                break;
            }
        }
        let (worth_split, bin, side) = best?;
        let gain = 0.5 * (worth_split - worth(all)) - self.options.gamma;
        (gain > 0.0).then_some((gain, bin, side))
    }

    /// Carries out a split, or leaves the leaf as it is where all rows are on one side after all, which the rounding of sums
    /// may have hidden.
    fn split(&mut self, gradients: &[[f32; 2]], leaf: &mut Leaf, split: Split) -> Option<[Leaf; 2]> {
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

fn add(sum: &mut [f32; 2], pull: &[f32; 2]) {
    sum[0] += pull[0];
    sum[1] += pull[1];
}
