//! Import of tree ensembles as gathers, one per level for all trees and rows together.
//!
//! All trees descend by one level at a time. A row goes to the right child if its feature is above the
//! threshold, and the right child follows the left one, so that no branch instruction is needed. If the trees
//! are nearly complete, each level is a separate table, in which a node at `i` has its children at `2i` and
//! `2i + 1`. Otherwise all nodes are in one table with the index of the left child; leaves refer to
//! themselves.

use std::collections::HashMap;

use tilewright_graph::op::{Aggregate, DecisionTrees, ThresholdTest, TreeEnsemble, TreeNode, Unary};
use tilewright_graph::{DType, Tensor};
use tilewright_ir::Expr;
use tilewright_ir::expr::ReduceOp;

use super::job::NodeImport;
use crate::net::{Kind, ValueId};
use crate::no_code::{Lowered, NoCode, need};
use crate::scalar::{self, add, input, mul, number, where_less};

/// Maximum number of branches on a path, each of which is a stage of the nest.
const DEEPEST: usize = 64;
/// Maximum size of a level's own table, as a multiple of the level's nodes.
const MOST_PADDED: usize = 4;
/// Maximum number of targets to compute by separate nests, if each tree contributes to a single one.
const MOST_APART: usize = 32;

/// Form of a feature, which determines how NaN compares: above everything, below everything, or as the only
/// value tested for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum FeatureForm {
    /// NaN goes right.
    Right,
    /// NaN goes left.
    Left,
    /// Only NaN goes right.
    Missing,
}

/// Node after all kinds of tests were reduced to one.
#[derive(Debug, Clone, Copy)]
enum MergedNode {
    /// Goes to the right child, the second one, if the feature's form is above the threshold.
    Branch { form: FeatureForm, feature: usize, threshold: f64, children: [usize; 2] },
    /// Adds weights.
    Leaf(usize, usize),
}

/// Trees of a forest whose tests are all of the form `x > threshold`, with the roots of the forest.
struct Cells {
    all: Vec<MergedNode>,
    roots: Vec<usize>,
    /// Number of branches on the longest path.
    depth: usize,
}

impl Cells {
    fn new(forest: &DecisionTrees, dtype: DType) -> Cells {
        let below = |x: f64| match dtype {
            DType::F64 => x.next_down(),
            _ => f64::from((x as f32).next_down()),
        };
        // The additional nodes of tests that need several branches come after the others.
        let mut all: Vec<MergedNode> = Vec::with_capacity(forest.nodes().len());
        let mut more = Vec::new();
        for node in forest.nodes() {
            let cell = match *node {
                TreeNode::Leaf(first, end) => MergedNode::Leaf(first, end),
                TreeNode::Branch { feature, test, threshold, missing_holds, children: [holds, fails] } => {
                    let missing = if missing_holds || test == ThresholdTest::NotEqual { holds } else { fails };
                    let lower = below(threshold);
                    let never = threshold == f64::NEG_INFINITY;
                    let of = |threshold: f64, left: usize, right: usize| {
                        Cells::branch(feature, threshold, [left, right], missing)
                    };
                    match test {
                        _ if threshold.is_nan() => {
                            let other = if test == ThresholdTest::NotEqual { holds } else { fails };
                            Cells::of_missing(feature, other, missing)
                        }
                        ThresholdTest::AtMost => of(threshold, holds, fails),
                        ThresholdTest::Greater => of(threshold, fails, holds),
                        ThresholdTest::Less if never => Cells::of_missing(feature, fails, missing),
                        ThresholdTest::AtLeast if never => Cells::of_missing(feature, holds, missing),
                        ThresholdTest::Less => of(lower, holds, fails),
                        ThresholdTest::AtLeast => of(lower, fails, holds),
                        ThresholdTest::Equal | ThresholdTest::NotEqual => {
                            let (same, other) =
                                if test == ThresholdTest::Equal { (holds, fails) } else { (fails, holds) };
                            // Nothing is below the value, so anything not above is equal to it.
                            let inner = match never {
                                true => Cells::of_missing(feature, same, missing),
                                false => of(lower, other, same),
                            };
                            more.push(inner);
                            // NaN continues to the inner branch if that must test it.
                            let behind = forest.nodes().len() + more.len() - 1;
                            let missing = if missing == other { other } else { behind };
                            Cells::branch(feature, threshold, [behind, other], missing)
                        }
                    }
                }
            };
            all.push(cell);
        }
        all.extend(more);
        let mut cells = Cells { all, roots: forest.roots().to_vec(), depth: 0 };
        cells.depth = cells.measured();
        cells
    }

    /// Makes a branch; `missing` is the child for NaN.
    fn branch(feature: usize, threshold: f64, children: [usize; 2], missing: usize) -> MergedNode {
        let [left, right] = children;
        match (missing == right && left != right, threshold == f64::INFINITY) {
            // Nothing is above the threshold.
            (true, true) => Cells::of_missing(feature, left, right),
            (true, false) => MergedNode::Branch { form: FeatureForm::Right, feature, threshold, children },
            (false, _) => MergedNode::Branch { form: FeatureForm::Left, feature, threshold, children },
        }
    }

    /// Makes a branch that tests only for NaN.
    fn of_missing(feature: usize, other: usize, missing: usize) -> MergedNode {
        MergedNode::Branch { form: FeatureForm::Missing, feature, threshold: 0.0, children: [other, missing] }
    }

    fn measured(&self) -> usize {
        let mut heights: Vec<Option<usize>> = vec![None; self.all.len()];
        let mut stack = self.roots.clone();
        while let Some(&at) = stack.last() {
            let height = match self.all[at] {
                MergedNode::Leaf(..) => Some(0),
                MergedNode::Branch { children, .. } => match children.map(|child| heights[child]) {
                    [Some(a), Some(b)] => Some(a.max(b) + 1),
                    below => {
                        stack.extend(children.iter().zip(below).filter(|(_, known)| known.is_none()).map(|(c, _)| c));
                        None
                    }
                },
            };
            if height.is_some() {
                heights[at] = height;
                stack.pop();
            }
        }
        self.roots.iter().filter_map(|&root| heights[root]).max().unwrap_or(0)
    }

    /// Forms of features that are read.
    fn forms(&self) -> Vec<FeatureForm> {
        let forms = self.all.iter().filter_map(|cell| match cell {
            MergedNode::Branch { form, .. } => Some(*form),
            MergedNode::Leaf(..) => None,
        });
        let mut forms: Vec<FeatureForm> = forms.collect();
        forms.sort_unstable();
        forms.dedup();
        forms
    }
}

/// Tables of the branches of a level.
#[derive(Default)]
struct BranchTable {
    features: Vec<i64>,
    thresholds: Vec<f64>,
    /// Indices of left children; `None` if each is twice the node's index.
    lefts: Option<Vec<i64>>,
}

/// Tables of trees, with their leaves.
struct TreeTables {
    /// Tables of the levels, one for each or one for all.
    levels: Vec<BranchTable>,
    /// Index of each tree's root in the first table.
    roots: Vec<i64>,
    /// Ranges of weights of each position after the last level.
    leaves: Vec<(usize, usize)>,
}

impl TreeTables {
    fn new(cells: &Cells, roots: &[usize], place_of: &dyn Fn(FeatureForm, usize) -> i64) -> TreeTables {
        let padded = roots.len() << cells.depth.min(24);
        if cells.depth <= 16 && padded <= MOST_PADDED * cells.all.len() {
            TreeTables::by_level(cells, roots, place_of)
        } else {
            TreeTables::linked(cells, roots, place_of)
        }
    }

    fn by_level(cells: &Cells, roots: &[usize], place_of: &dyn Fn(FeatureForm, usize) -> i64) -> TreeTables {
        let mut nodes = roots.to_vec();
        let mut levels = Vec::new();
        for _ in 0..cells.depth {
            let mut table = BranchTable::default();
            let mut below = Vec::with_capacity(2 * nodes.len());
            for &at in &nodes {
                let (feature, threshold, children) = match cells.all[at] {
                    MergedNode::Branch { form, feature, threshold, children } => {
                        (place_of(form, feature), threshold, children)
                    }
                    MergedNode::Leaf(..) => (0, f64::INFINITY, [at; 2]),
                };
                table.features.push(feature);
                table.thresholds.push(threshold);
                below.extend(children);
            }
            levels.push(table);
            nodes = below;
        }
        let leaves = nodes.iter().map(|&at| match cells.all[at] {
            MergedNode::Leaf(first, end) => (first, end),
            MergedNode::Branch { .. } => unreachable!("no way is longer than the longest"),
        });
        TreeTables { levels, roots: (0..roots.len() as i64).collect(), leaves: leaves.collect() }
    }

    fn linked(cells: &Cells, roots: &[usize], place_of: &dyn Fn(FeatureForm, usize) -> i64) -> TreeTables {
        // Nodes at each position; both children of a branch are adjacent.
        let mut nodes = roots.to_vec();
        let mut pairs: HashMap<usize, i64> = HashMap::new();
        let (mut table, mut lefts) = (BranchTable::default(), Vec::new());
        let mut leaves = Vec::new();
        let mut at = 0;
        while at < nodes.len() {
            match cells.all[nodes[at]] {
                MergedNode::Branch { form, feature, threshold, children } => {
                    table.features.push(place_of(form, feature));
                    table.thresholds.push(threshold);
                    lefts.push(*pairs.entry(nodes[at]).or_insert_with(|| {
                        nodes.extend(children);
                        nodes.len() as i64 - 2
                    }));
                    leaves.push((0, 0));
                }
                MergedNode::Leaf(first, end) => {
                    table.features.push(0);
                    table.thresholds.push(f64::INFINITY);
                    lefts.push(at as i64);
                    leaves.push((first, end));
                }
            }
            at += 1;
        }
        table.lefts = Some(lefts);
        TreeTables { levels: vec![table], roots: (0..roots.len() as i64).collect(), leaves }
    }
}

impl NodeImport<'_> {
    /// Lowers trees to lookups: a nest for all targets, or one for each if each tree contributes to a single
    /// target.
    pub(crate) fn trees(&mut self, op: &TreeEnsemble) -> Lowered {
        let (mut x, to) = (self.input(0)?, self.output()?);
        let mut shape = self.shape(0)?;
        if !matches!(self.net.value(x).dtype, DType::F32 | DType::F64) {
            let single = self.value("single", DType::F32, &shape);
            x = self.push(Kind::Map(input(0)), &[x], single);
        }
        if shape.len() == 1 {
            shape.insert(0, 1);
            x = self.step("row", Kind::View, &[x], &shape);
        }
        let [n, n_features] = [shape[0], shape[1]];
        let dtype = self.net.value(x).dtype;
        let is_exact = |node: &TreeNode| match node {
            TreeNode::Branch { threshold, .. } => {
                dtype == DType::F64 || threshold.is_nan() || f64::from(*threshold as f32) == *threshold
            }
            TreeNode::Leaf(..) => true,
        };
        let is_exact = op.forest.nodes().iter().all(is_exact);
        need(is_exact, || NoCode::Form("thresholds that f32 does not have"))?;
        let cells = Cells::new(&op.forest, dtype);
        let depth = cells.depth as i64;
        let too_deep = || NoCode::Size { what: "branches of a tree", size: depth, most: DEEPEST as i64 };
        need(cells.depth <= DEEPEST, too_deep)?;
        need(cells.depth > 0 && n_features > 0, || NoCode::Form("trees without a branch"))?;
        let forms = cells.forms();
        let x = self.forms(x, &forms, [n, n_features]);
        let place_of = |form: FeatureForm, feature: usize| {
            let at = forms.iter().position(|own| *own == form).expect("each form that is read is there");
            at as i64 * n_features + feature as i64
        };
        let targets = Targets::of(&op.forest).ok_or(NoCode::Form("extremes of targets without a weight"))?;
        let parts: Vec<(Vec<usize>, Option<usize>)> = match targets {
            Targets::Each(of_trees) => {
                let trees = |target: usize| {
                    let own = cells.roots.iter().zip(&of_trees).filter(|(_, of)| **of == target);
                    own.map(|(root, _)| *root).collect::<Vec<_>>()
                };
                (0..op.forest.n_targets()).map(|target| (trees(target), Some(target))).collect()
            }
            Targets::All => vec![(cells.roots.clone(), None)],
        };
        let mut columns = Vec::new();
        for (roots, target) in parts {
            let tables = TreeTables::new(&cells, &roots, &place_of);
            columns.push(self.walked(&op.forest, &tables, cells.depth, x, n, target));
        }
        let [column] = columns[..] else {
            self.push(Kind::Concat(1), &columns, to);
            return Ok(());
        };
        self.push(Kind::View, &[column], to);
        Ok(())
    }

    /// Concatenates the forms of features.
    fn forms(&mut self, x: ValueId, forms: &[FeatureForm], [n, n_features]: [i64; 2]) -> ValueId {
        // Without a conversion, NaN is not above anything.
        if let [FeatureForm::Left] = forms {
            return x;
        }
        let is_missing = scalar::unary(Unary::IsNan, input(0)).expect("there is code for it");
        let either = |missing: Expr, other: Expr| where_less(number(0.0), is_missing.clone(), missing, other);
        let mut all = Vec::new();
        for form in forms {
            let value = match form {
                FeatureForm::Right => either(number(f64::INFINITY), input(0)),
                FeatureForm::Left => either(number(f64::NEG_INFINITY), input(0)),
                FeatureForm::Missing => either(number(1.0), number(0.0)),
            };
            all.push(self.step("form", Kind::Map(value), &[x], &[n, n_features]));
        }
        match all[..] {
            [only] => only,
            _ => self.step("forms", Kind::Concat(1), &all, &[n, n_features * forms.len() as i64]),
        }
    }

    /// Computes the scores of trees for a target, `[n, 1]`, or for all targets, `[n, targets]`.
    fn walked(
        &mut self,
        forest: &DecisionTrees,
        tables: &TreeTables,
        depth: usize,
        x: ValueId,
        n: i64,
        target: Option<usize>,
    ) -> ValueId {
        let n_trees = tables.roots.len() as i64;
        let all = [n, n_trees];
        let of = self.net.value(x).dtype;
        let mut at: Option<ValueId> = None;
        let mut constants: Option<[ValueId; 3]> = None;
        let look_up = Kind::Gather { axis: 0, by_element: false };
        for level in 0..depth {
            let table = tables.levels.get(level).unwrap_or(&tables.levels[0]);
            let (found, threshold, left);
            if let Some(at) = at {
                let known = constants.take().filter(|_| table.lefts.is_some());
                let [features, thresholds, lefts] = known.unwrap_or_else(|| self.tables(table, of));
                constants = Some([features, thresholds, lefts]);
                let feature = self.step("feature", look_up.clone(), &[features, at], &all);
                found = self.step("found", Kind::Gather { axis: 1, by_element: true }, &[x, feature], &all);
                threshold = self.step("threshold", look_up.clone(), &[thresholds, at], &all);
                left = match table.lefts {
                    Some(_) => self.step("left", look_up.clone(), &[lefts, at], &all),
                    None => at,
                };
            } else {
                // The first branches are known.
                let roots = tables.roots.iter().map(|&root| root as usize);
                let of_roots = |list: &[i64]| roots.clone().map(|root| list[root]).collect::<Vec<_>>();
                let features = self.whole_constant("feature0", DType::I32, &[n_trees], &of_roots(&table.features));
                found = self.step("found", Kind::Gather { axis: 1, by_element: false }, &[x, features], &all);
                let thresholds: Vec<f64> = roots.clone().map(|root| table.thresholds[root]).collect();
                threshold = self.numbers("threshold0", of, &[n_trees], &thresholds);
                let firsts = table.lefts.as_ref().map_or_else(|| tables.roots.clone(), |lefts| of_roots(lefts));
                left = self.whole_constant("left0", DType::I32, &[n_trees], &firsts);
            }
            let first = if table.lefts.is_some() { input(0) } else { mul(input(0), number(2.0)) };
            let next = add(first, where_less(input(1), input(2), number(1.0), number(0.0)));
            let place = self.value("place", DType::I32, &all);
            at = Some(self.push(Kind::Map(next), &[left, threshold, found], place));
        }
        let at = at.expect("a way has a branch");
        self.weighed(forest, tables, at, all, target)
    }

    /// Adds the tables of a level as constants.
    fn tables(&mut self, table: &BranchTable, of: DType) -> [ValueId; 3] {
        let n = table.features.len() as i64;
        let features = self.whole_constant("features", DType::I32, &[n], &table.features);
        let thresholds = self.numbers("thresholds", of, &[n], &table.thresholds);
        let lefts = table.lefts.as_ref().map(|lefts| self.whole_constant("lefts", DType::I32, &[n], lefts));
        [features, thresholds, lefts.unwrap_or(features)]
    }

    /// Aggregates the weights of the leaves reached to a number for each target.
    fn weighed(
        &mut self,
        forest: &DecisionTrees,
        tables: &TreeTables,
        at: ValueId,
        [n, n_trees]: [i64; 2],
        target: Option<usize>,
    ) -> ValueId {
        let (reduce, none) = match forest.aggregate() {
            Aggregate::Sum | Aggregate::Average => (ReduceOp::Sum, 0.0),
            Aggregate::Min => (ReduceOp::Min, f64::INFINITY),
            Aggregate::Max => (ReduceOp::Max, f64::NEG_INFINITY),
        };
        let n_targets = if target.is_some() { 1 } else { forest.n_targets() };
        let mut weights: Vec<Option<f64>> = vec![None; tables.leaves.len() * n_targets];
        for (leaf, &(first, end)) in tables.leaves.iter().enumerate() {
            for (of, weight) in &forest.weights()[first..end] {
                let to = &mut weights[leaf * n_targets + if target.is_some() { 0 } else { *of }];
                *to = Some(match (forest.aggregate(), *to) {
                    (_, None) => *weight,
                    (Aggregate::Sum | Aggregate::Average, Some(x)) => x + weight,
                    (Aggregate::Min, Some(x)) => x.min(*weight),
                    (Aggregate::Max, Some(x)) => x.max(*weight),
                });
            }
        }
        let weights: Vec<f64> = weights.into_iter().map(|weight| weight.unwrap_or(none)).collect();
        let dtype = self.output().map_or(DType::F32, |to| self.net.value(to).dtype);
        let (n_leaves, k) = (tables.leaves.len() as i64, n_targets as i64);
        let look_up = Kind::Gather { axis: 0, by_element: false };
        let (table, found) = match n_targets {
            1 => (vec![n_leaves], vec![n, n_trees]),
            _ => (vec![n_leaves, k], vec![n, n_trees, k]),
        };
        let table = self.numbers("weights", dtype, &table, &weights);
        let found = self.step("weight", look_up, &[table, at], &found);
        let kept = if n_targets == 1 { vec![n, 1] } else { vec![n, 1, k] };
        let sum = self.step("sum", Kind::Reduce(reduce, vec![1]), &[found], &kept);
        let sum = match forest.aggregate() {
            Aggregate::Average => {
                let share = mul(input(0), number(1.0 / forest.roots().len() as f64));
                self.step("mean", Kind::Map(share), &[sum], &kept)
            }
            _ => sum,
        };
        if n_targets == 1 { sum } else { self.step("targets", Kind::View, &[sum], &[n, k]) }
    }

    /// Adds a constant of numbers.
    fn numbers(&mut self, what: &str, dtype: DType, shape: &[i64], numbers: &[f64]) -> ValueId {
        let id = self.value(what, dtype, shape);
        let shape: Vec<usize> = shape.iter().map(|&d| d as usize).collect();
        self.net.values[id.0].constant = Some(Tensor::from_floats(dtype, shape, numbers));
        id
    }
}

/// Targets for which trees have weights.
enum Targets {
    /// Target of each tree, if each has weights for a single one.
    Each(Vec<usize>),
    /// Any targets.
    All,
}

impl Targets {
    /// Targets of a forest; `None` if a minimum or maximum may be over no weights.
    fn of(forest: &DecisionTrees) -> Option<Targets> {
        let n = forest.n_targets();
        let mut of_trees: Vec<Option<usize>> = Vec::new();
        // Targets for which some tree has a weight at each of its leaves.
        let mut is_certain = vec![false; n];
        let (mut seen, mut is_single) = (vec![usize::MAX; forest.nodes().len()], n <= MOST_APART);
        for (tree, &root) in forest.roots().iter().enumerate() {
            let (mut own, mut is_on_all, mut stack) = (None, vec![true; n], vec![root]);
            while let Some(at) = stack.pop() {
                match forest.nodes()[at] {
                    _ if std::mem::replace(&mut seen[at], tree) == tree => {}
                    TreeNode::Branch { children, .. } => stack.extend(children),
                    TreeNode::Leaf(first, end) => {
                        let mut has = vec![false; n];
                        for (target, _) in &forest.weights()[first..end] {
                            has[*target] = true;
                            is_single &= *own.get_or_insert(*target) == *target;
                        }
                        is_on_all.iter_mut().zip(has).for_each(|(all, has)| *all &= has);
                    }
                }
            }
            of_trees.push(own);
            is_certain.iter_mut().zip(is_on_all).for_each(|(is, on_all)| *is |= on_all);
        }
        let is_sum = matches!(forest.aggregate(), Aggregate::Sum | Aggregate::Average);
        if !is_sum && !is_certain.iter().all(|&is| is) {
            return None;
        }
        let of_trees: Vec<usize> = of_trees.into_iter().map(|own| own.unwrap_or(0)).collect();
        let has_all = (0..n).all(|target| of_trees.contains(&target));
        Some(if is_single && has_all { Targets::Each(of_trees) } else { Targets::All })
    }
}
