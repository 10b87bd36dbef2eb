//! Regression tree, as a complete binary tree in two flat arrays.

use crate::matrix::Matrix;

/// Complete binary tree: the children of node `i` are `2i + 1` and `2i + 2`. Below a leaf that is reached
/// early all values are the same, so that every row descends the same number of steps without branches.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    depth: usize,
    nodes: Box<[SplitNode]>,
    leaves: Box<[f32]>,
}

/// Split of a node. The default one sends every row left, so that a leaf that is reached early has a unique
/// position.
#[derive(Debug, Clone, Copy)]
pub(super) struct SplitNode {
    /// Largest value that goes left.
    pub(super) threshold: f32,
    pub(super) feature: u32,
    /// Whether missing values go right.
    pub(super) missing_right: bool,
}

impl Default for SplitNode {
    fn default() -> SplitNode {
        SplitNode { threshold: f32::INFINITY, feature: 0, missing_right: false }
    }
}

/// Leaf that a row falls into.
pub(super) struct Leaf {
    /// Index among the leaves of a complete tree.
    pub(super) place: u16,
    pub(super) value: f32,
}

impl SplitNode {
    fn goes_right(&self, x: f32) -> bool {
        (x > self.threshold) | (x.is_nan() & self.missing_right)
    }
}

/// Number of rows that descend simultaneously, to hide the latency of each step.
const LANES: usize = 16;

impl Tree {
    /// Makes the tree with these splits and leaves, by their indices in a complete tree.
    pub(super) fn new(splits: &[(usize, SplitNode)], leaves: &[(usize, f32)]) -> Tree {
        let level = |place: usize| (place + 1).ilog2() as usize;
        let depth = leaves.iter().map(|(place, _)| level(*place)).max().unwrap_or(0);
        let mut tree = Tree {
            depth,
            nodes: vec![SplitNode::default(); (1 << depth) - 1].into(),
            leaves: vec![0.0; 1 << depth].into(),
        };
        splits.iter().for_each(|&(place, node)| tree.nodes[place] = node);
        for &(place, value) in leaves {
            let below = depth - level(place);
            let first = ((place + 1) << below) - (1 << depth);
            tree.leaves[first..first + (1 << below)].fill(value);
        }
        tree
    }

    pub(super) fn is_constant(&self) -> bool {
        self.depth == 0
    }

    /// Adds the tree's predictions for the rows from `from` on to their scores.
    pub(super) fn add_to(&self, rows: &Matrix, from: usize, scores: &mut [f32]) {
        self.descend(rows, from, scores, |score, _, leaf| *score += leaf.value);
    }

    /// Calls a function with each score and the leaf of its row, which is the one at its position from `from`
    /// on.
    pub(super) fn descend(
        &self,
        rows: &Matrix,
        from: usize,
        scores: &mut [f32],
        mut arrive: impl FnMut(&mut f32, usize, Leaf),
    ) {
        for (group, scores) in scores.chunks_mut(LANES).enumerate() {
            let first = from + group * LANES;
            let row_of: [&[f32]; LANES] = std::array::from_fn(|lane| rows.row(first + lane.min(scores.len() - 1)));
            let mut at = [0usize; LANES];
            for _ in 0..self.depth {
                for (at, row) in at.iter_mut().zip(&row_of) {
                    let node = &self.nodes[*at];
                    *at = 2 * *at + 1 + usize::from(node.goes_right(row[node.feature as usize]));
                }
            }
            for (lane, (score, at)) in scores.iter_mut().zip(at).enumerate() {
                let place = at - self.nodes.len();
                arrive(score, first + lane, Leaf { place: place as u16, value: self.leaves[place] });
            }
        }
    }
}
