//! Tree ensembles, and pairwise coupling of class probabilities.

use std::sync::Arc;

use super::{Inputs, Operation};
use crate::error::invalid;
use crate::{DType, OpError, Tensor, TensorType};

/// Comparison of a feature with a branch's threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ThresholdTest {
    AtMost,
    Less,
    AtLeast,
    Greater,
    Equal,
    NotEqual,
}

impl ThresholdTest {
    /// Whether the test holds. For NaN only [`ThresholdTest::NotEqual`] does.
    pub fn holds(self, x: f64, threshold: f64) -> bool {
        match self {
            ThresholdTest::AtMost => x <= threshold,
            ThresholdTest::Less => x < threshold,
            ThresholdTest::AtLeast => x >= threshold,
            ThresholdTest::Greater => x > threshold,
            ThresholdTest::Equal => x == threshold,
            ThresholdTest::NotEqual => x != threshold,
        }
    }
}

/// Node of a tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TreeNode {
    /// Inner node.
    Branch {
        /// Index of the compared feature.
        feature: usize,
        /// Comparison with the threshold.
        test: ThresholdTest,
        /// Threshold.
        threshold: f64,
        /// Whether the test also holds for NaN, a missing value.
        missing_holds: bool,
        /// Indices of the children: the first is taken if the test holds.
        children: [usize; 2],
    },
    /// Leaf with a range of [`DecisionTrees::weights`], its end exclusive.
    Leaf(usize, usize),
}

/// Aggregation of the trees' weights to a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Aggregate {
    Sum,
    /// Sum divided by the number of trees.
    Average,
    Min,
    Max,
}

/// Ensemble of decision trees. Nodes may be shared between trees; the graph has no cycle.
#[derive(PartialEq)]
pub struct DecisionTrees {
    nodes: Vec<TreeNode>,
    roots: Vec<usize>,
    weights: Vec<(usize, f64)>,
    aggregate: Aggregate,
    n_targets: usize,
    n_features: usize,
    depth: usize,
}

impl std::fmt::Debug for DecisionTrees {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} trees of {} nodes", self.roots.len(), self.nodes.len())
    }
}

impl DecisionTrees {
    /// Makes trees from their roots and nodes, with weights of targets in the leaves.
    ///
    /// # Errors
    /// If an index of a node, weight or target is out of range, or the nodes form a cycle.
    pub fn new(
        nodes: Vec<TreeNode>,
        roots: Vec<usize>,
        weights: Vec<(usize, f64)>,
        aggregate: Aggregate,
        n_targets: usize,
    ) -> Result<DecisionTrees, OpError> {
        if let Some(root) = roots.iter().find(|&&root| root >= nodes.len()) {
            return Err(invalid!("a tree begins at node {root} of {}", nodes.len()));
        }
        if let Some((target, _)) = weights.iter().find(|(target, _)| *target >= n_targets) {
            return Err(invalid!("a weight is for target {target} of {n_targets}"));
        }
        let mut n_features = 0;
        for (at, node) in nodes.iter().enumerate() {
            match node {
                TreeNode::Branch { feature, children, .. } => {
                    n_features = n_features.max(feature.saturating_add(1));
                    if let Some(child) = children.iter().find(|&&child| child >= nodes.len()) {
                        return Err(invalid!("node {at} of its trees leads to node {child} of {}", nodes.len()));
                    }
                }
                TreeNode::Leaf(first, end) if first > end || *end > weights.len() => {
                    return Err(invalid!("leaf {at} of its trees has weights {first} to {end} of {}", weights.len()));
                }
                TreeNode::Leaf(..) => {}
            }
        }
        let depth = depth(&nodes, &roots)?;
        Ok(DecisionTrees { nodes, roots, weights, aggregate, n_targets, n_features, depth })
    }

    /// Nodes of all trees.
    pub fn nodes(&self) -> &[TreeNode] {
        &self.nodes
    }

    /// Index of each tree's root.
    pub fn roots(&self) -> &[usize] {
        &self.roots
    }

    /// Weights of all leaves, as pairs of a target and its weight.
    pub fn weights(&self) -> &[(usize, f64)] {
        &self.weights
    }

    /// Aggregation of the weights.
    pub fn aggregate(&self) -> Aggregate {
        self.aggregate
    }

    /// Number of scores for each row.
    pub fn n_targets(&self) -> usize {
        self.n_targets
    }

    /// Depth: the largest number of branches from a root to a leaf.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Weights of the leaf that a row reaches from a root.
    fn leaf(&self, root: usize, row: &[f64]) -> &[(usize, f64)] {
        let mut at = root;
        loop {
            match self.nodes[at] {
                TreeNode::Leaf(first, end) => return &self.weights[first..end],
                TreeNode::Branch { feature, test, threshold, missing_holds, children } => {
                    let x = row[feature];
                    let holds = test.holds(x, threshold) || missing_holds && x.is_nan();
                    at = children[usize::from(!holds)];
                }
            }
        }
    }

    /// Scores of a row by target; 0 for a target without a weight in any leaf.
    fn scores(&self, row: &[f64]) -> Vec<f64> {
        let mut scores: Vec<Option<f64>> = vec![None; self.n_targets];
        for (target, weight) in self.roots.iter().flat_map(|&root| self.leaf(root, row)) {
            let score = &mut scores[*target];
            *score = Some(match (self.aggregate, *score) {
                (_, None) => *weight,
                (Aggregate::Sum | Aggregate::Average, Some(score)) => score + weight,
                (Aggregate::Min, Some(score)) => score.min(*weight),
                (Aggregate::Max, Some(score)) => score.max(*weight),
            });
        }
        let share = if self.aggregate == Aggregate::Average { self.roots.len().max(1) as f64 } else { 1.0 };
        scores.into_iter().map(|score| score.unwrap_or(0.0) / share).collect()
    }
}

/// Largest number of branches on a path from a root.
fn depth(nodes: &[TreeNode], roots: &[usize]) -> Result<usize, OpError> {
    const NEW: u32 = u32::MAX;
    const OPEN: u32 = u32::MAX - 1;
    let mut heights = vec![NEW; nodes.len()];
    let mut stack: Vec<usize> = Vec::new();
    for &root in roots {
        stack.push(root);
        while let Some(&at) = stack.last() {
            let TreeNode::Branch { children, .. } = nodes[at] else {
                heights[at] = 0;
                stack.pop();
                continue;
            };
            let below = children.map(|child| heights[child]);
            match heights[at] {
                NEW => {
                    heights[at] = OPEN;
                    if children.iter().any(|&child| heights[child] == OPEN) {
                        return Err(invalid!("node {at} of its trees leads back to itself"));
                    }
                    stack.extend(children.iter().copied().filter(|&child| heights[child] == NEW));
                }
                OPEN => {
                    heights[at] = below[0].max(below[1]) + 1;
                    stack.pop();
                }
                _ => {
                    stack.pop();
                }
            }
        }
    }
    Ok(roots.iter().map(|&root| heights[root] as usize).max().unwrap_or(0))
}

/// Scores `[n, n_targets]` of a tree ensemble for rows of features `[n, n_features]`; a vector counts as one
/// row. Integers are compared as f32.
#[derive(Debug, Clone)]
pub struct TreeEnsemble {
    /// Shared ensemble.
    pub forest: Arc<DecisionTrees>,
    /// Element type of the scores; `None` for the input's.
    pub dtype: Option<DType>,
}

impl Operation for TreeEnsemble {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let ty = inputs.ty(0)?;
        let (n, n_features) = match ty.shape[..] {
            [n_features] => (1, n_features),
            [n, n_features] => (n, n_features),
            _ => return Err(invalid!("{ty} is not rows of features")),
        };
        if n_features < self.forest.n_features {
            let last = self.forest.n_features - 1;
            return Err(invalid!("its trees read feature {last}, and its input has {n_features}"));
        }
        Ok(vec![TensorType::new(self.dtype.unwrap_or(ty.dtype), [n, self.forest.n_targets])])
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let x = inputs.tensor(0)?;
        let single = |x: f64| if x.is_nan() { x } else { f64::from(x as f32) };
        let numbers: Vec<f64> =
            if x.dtype().is_float() { x.floats() } else { x.floats().into_iter().map(single).collect() };
        let n_features = *x.shape().last().expect("it has features");
        let scores: Vec<f64> = match n_features {
            0 => (0..ty.shape[0]).flat_map(|_| self.forest.scores(&[])).collect(),
            _ => numbers.chunks(n_features).flat_map(|row| self.forest.scores(row)).collect(),
        };
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &scores)])
    }
}

/// Probabilities of `c` classes, `[n, c]`, from those of the first class of each pair, `[n, c·(c − 1)/2]`, in
/// the pairs' order.
///
/// # Source
/// Wu, Lin, Weng: Probability estimates for multi-class classification by pairwise coupling (2004), second
/// approach, by the iteration of LIBSVM with its limits.
#[derive(Debug, Clone, Copy)]
pub struct PairwiseCoupling {
    /// Number of classes.
    pub n_classes: usize,
}

impl PairwiseCoupling {
    fn coupled(self, pairs: &[f64]) -> Vec<f64> {
        let n = self.n_classes;
        let mut r = vec![vec![0.0; n]; n];
        let places = (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j)));
        for ((i, j), p) in places.zip(pairs) {
            (r[i][j], r[j][i]) = (*p, 1.0 - p);
        }
        let entry = |i: usize, j: usize| match i == j {
            true => (0..n).filter(|&k| k != i).map(|k| r[k][i] * r[k][i]).sum::<f64>(),
            false => -r[j][i] * r[i][j],
        };
        let q: Vec<Vec<f64>> = (0..n).map(|i| (0..n).map(|j| entry(i, j)).collect()).collect();
        let mut p = vec![1.0 / n as f64; n];
        let limit = 0.005 / n as f64;
        for _ in 0..100 {
            let mut qp: Vec<f64> = (0..n).map(|i| (0..n).map(|j| q[i][j] * p[j]).sum()).collect();
            let mut pqp: f64 = p.iter().zip(&qp).map(|(p, qp)| p * qp).sum();
            if qp.iter().all(|qp| (qp - pqp).abs() < limit) {
                break;
            }
            for i in 0..n {
                let step = (pqp - qp[i]) / q[i][i];
                p[i] += step;
                pqp = (pqp + step * (step * q[i][i] + 2.0 * qp[i])) / (1.0 + step) / (1.0 + step);
                for j in 0..n {
                    qp[j] = (qp[j] + step * q[i][j]) / (1.0 + step);
                    p[j] /= 1.0 + step;
                }
            }
        }
        p
    }
}

impl Operation for PairwiseCoupling {
    fn infer(&self, inputs: Inputs<'_>) -> Result<Vec<TensorType>, OpError> {
        let (ty, n_pairs) = (inputs.ty(0)?, self.n_classes * (self.n_classes - 1) / 2);
        match ty.shape[..] {
            [n, found] if found == n_pairs => Ok(vec![TensorType::new(ty.dtype, [n, self.n_classes])]),
            _ => Err(invalid!("{ty} is not rows of {n_pairs} pairs of classes")),
        }
    }

    fn evaluate(&self, inputs: Inputs<'_>) -> Result<Vec<Tensor>, OpError> {
        let ty = self.infer(inputs)?.remove(0);
        let pairs = inputs.tensor(0)?.floats();
        let n_pairs = self.n_classes * (self.n_classes - 1) / 2;
        let numbers: Vec<f64> = pairs.chunks(n_pairs).flat_map(|row| self.coupled(row)).collect();
        Ok(vec![Tensor::from_floats(ty.dtype, ty.shape, &numbers)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn branch(children: [usize; 2]) -> TreeNode {
        TreeNode::Branch { feature: 0, test: ThresholdTest::AtMost, threshold: 0.0, missing_holds: false, children }
    }

    fn made(nodes: Vec<TreeNode>, roots: Vec<usize>, weights: Vec<(usize, f64)>) -> Result<usize, String> {
        let forest = DecisionTrees::new(nodes, roots, weights, Aggregate::Sum, 2);
        forest.map(|forest| forest.depth()).map_err(|e| e.to_string())
    }

    #[test]
    fn trees_that_cannot_be_are_refused() {
        let leaf = TreeNode::Leaf(0, 1);
        assert_eq!(made(vec![branch([1, 2]), leaf, branch([1, 1])], vec![0, 2], vec![(1, 0.5)]), Ok(2));
        let refused = [
            (vec![branch([1, 0]), leaf], vec![0], vec![(0, 1.0)]),
            (vec![branch([1, 2]), leaf, branch([1, 3]), branch([2, 1])], vec![0], vec![(0, 1.0)]),
            (vec![branch([1, 2]), leaf], vec![0], vec![(0, 1.0)]),
            (vec![branch([1, 1]), leaf], vec![2], vec![(0, 1.0)]),
            (vec![branch([1, 1]), leaf], vec![0], vec![(2, 1.0)]),
            (vec![branch([1, 1]), TreeNode::Leaf(0, 2)], vec![0], vec![(0, 1.0)]),
            (vec![branch([1, 1]), TreeNode::Leaf(1, 0)], vec![0], vec![(0, 1.0)]),
        ];
        for (nodes, roots, weights) in refused {
            assert!(made(nodes.clone(), roots, weights).is_err(), "{nodes:?}");
        }
    }
}
