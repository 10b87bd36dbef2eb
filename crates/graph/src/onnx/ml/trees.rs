//! Tree ensembles: `TreeEnsemble*` attributes, which list the nodes of all trees, as
//! [`DecisionTrees`](crate::DecisionTrees).

use std::collections::HashMap;
use std::sync::Arc;

use super::{Draft, Labels, Port, PostTransform, two_classes, wide};
use crate::error::{invalid, unsupported};
use crate::op::{Aggregate, Binary, DecisionTrees, Import, ThresholdTest, TreeEnsemble, TreeNode, Where};
use crate::{DType, OpError};

/// Numbers of an attribute, which is a list of f32 or a tensor.
fn numbers(node: &Import, name: &str) -> Result<Vec<f64>, OpError> {
    let (list, tensor) = (node.floats(name)?, node.tensor(&format!("{name}_as_tensor"))?);
    match (list.filter(|list| !list.is_empty()), tensor) {
        (Some(_), Some(_)) => Err(invalid!("it has both {name} and {name}_as_tensor")),
        (_, Some(tensor)) => Ok(tensor.floats()),
        (list, None) => Ok(wide(list)),
    }
}

fn ints(node: &Import, name: &str) -> Result<Vec<i64>, OpError> {
    Ok(node.ints(name)?.unwrap_or_default())
}

/// Checks an index into a list.
fn place(number: i64, what: &str, n: usize) -> Result<usize, OpError> {
    let place = usize::try_from(number).ok().filter(|&place| place < n);
    place.ok_or_else(|| invalid!("it names {what} {number} of {n}"))
}

fn test(mode: &str) -> Result<Option<ThresholdTest>, OpError> {
    Ok(Some(match mode {
        "LEAF" => return Ok(None),
        "BRANCH_LEQ" => ThresholdTest::AtMost,
        "BRANCH_LT" => ThresholdTest::Less,
        "BRANCH_GTE" => ThresholdTest::AtLeast,
        "BRANCH_GT" => ThresholdTest::Greater,
        "BRANCH_EQ" => ThresholdTest::Equal,
        "BRANCH_NEQ" => ThresholdTest::NotEqual,
        other => return Err(unsupported!("nodes of mode {other} are not supported")),
    }))
}

/// Checks that lists of an operator have equal lengths.
fn check_lengths(n: usize, lists: &[(&str, usize)]) -> Result<(), OpError> {
    match lists.iter().find(|(_, len)| *len != n) {
        Some((name, len)) => Err(invalid!("{name} has {len} entries, and there are {n} nodes (save the model anew)")),
        None => Ok(()),
    }
}

/// Trees as lists of nodes that refer to each other, with the weights of their leaves.
#[derive(Debug)]
struct NodeLists {
    nodes: Vec<TreeNode>,
    roots: Vec<usize>,
    /// Targets with their weights.
    weights: Vec<(usize, f64)>,
}

impl NodeLists {
    /// Reads the attributes of versions 1 and 3; the names of weights begin with `of_weights`.
    fn read(node: &Import, of_weights: &str, n_targets: usize) -> Result<NodeLists, OpError> {
        let [trees, ids, features, holds, fails] = ["treeids", "nodeids", "featureids", "truenodeids", "falsenodeids"]
            .map(|name| ints(node, &format!("nodes_{name}")));
        let (trees, ids, features, holds, fails) = (trees?, ids?, features?, holds?, fails?);
        let (values, modes) = (numbers(node, "nodes_values")?, node.texts("nodes_modes")?.unwrap_or_default());
        let missing = ints(node, "nodes_missing_value_tracks_true")?;
        // Statistics of training, which do not matter.
        let _ = (node.floats("nodes_hitrates")?, node.tensor("nodes_hitrates_as_tensor")?);
        let n = trees.len();
        let lists = [
            ("nodes_nodeids", ids.len()),
            ("nodes_featureids", features.len()),
            ("nodes_truenodeids", holds.len()),
            ("nodes_falsenodeids", fails.len()),
            ("nodes_values", values.len()),
            ("nodes_modes", modes.len()),
            ("nodes_missing_value_tracks_true", if missing.is_empty() { n } else { missing.len() }),
        ];
        check_lengths(n, &lists)?;
        let mut places: HashMap<(i64, i64), usize> = HashMap::with_capacity(n);
        let (mut roots, mut has_root) = (Vec::new(), std::collections::HashSet::new());
        for at in 0..n {
            if places.insert((trees[at], ids[at]), at).is_some() {
                return Err(invalid!("node {} of tree {} is there twice (save the model anew)", ids[at], trees[at]));
            }
            if has_root.insert(trees[at]) {
                roots.push(at);
            }
        }
        let find = |tree: i64, id: i64| {
            let found = places.get(&(tree, id)).copied();
            found.ok_or_else(|| invalid!("there is no node {id} in tree {tree} (save the model anew)"))
        };
        let (weights, leaves) = leaf_weights(node, of_weights, n, n_targets, find)?;
        let mut is_child = vec![false; n];
        let mut nodes = Vec::with_capacity(n);
        for at in 0..n {
            let Some(test) = test(&modes[at])? else {
                nodes.push(TreeNode::Leaf(leaves[at], leaves[at + 1]));
                continue;
            };
            let children = [find(trees[at], holds[at])?, find(trees[at], fails[at])?];
            children.iter().for_each(|&child| is_child[child] = true);
            nodes.push(TreeNode::Branch {
                feature: place(features[at], "feature", 1 << 31)?,
                test,
                threshold: values[at],
                missing_holds: missing.get(at) == Some(&1),
                children,
            });
        }
        match roots.iter().find(|&&root| is_child[root]) {
            Some(&root) => Err(invalid!("the first node of tree {} is no root (save the model anew)", trees[root])),
            None => Ok(NodeLists { nodes, roots, weights }),
        }
    }

    fn forest(self, aggregate: Aggregate, n_targets: usize) -> Result<DecisionTrees, OpError> {
        DecisionTrees::new(self.nodes, self.roots, self.weights, aggregate, n_targets)
    }
}

/// Pairs of target and weight, and for each node the index of its first pair, followed by the number of
/// pairs.
type LeafWeights = (Vec<(usize, f64)>, Vec<usize>);

/// Sorts weights by node; returns them with the start of each of the `n` nodes' weights, and the end of the
/// last.
fn leaf_weights(
    node: &Import,
    what: &str,
    n: usize,
    n_targets: usize,
    find: impl Fn(i64, i64) -> Result<usize, OpError>,
) -> Result<LeafWeights, OpError> {
    let [targets, trees, ids] = ["ids", "treeids", "nodeids"].map(|name| ints(node, &format!("{what}_{name}")));
    let (targets, trees, ids, weights) = (targets?, trees?, ids?, numbers(node, &format!("{what}_weights"))?);
    if [targets.len(), trees.len(), ids.len()] != [weights.len(); 3] {
        let lists = [targets.len(), trees.len(), ids.len(), weights.len()];
        return Err(invalid!("its lists of {what}_ids, _treeids, _nodeids and _weights have {lists:?} entries"));
    }
    let mut of_nodes = Vec::with_capacity(weights.len());
    for at in 0..weights.len() {
        of_nodes.push((find(trees[at], ids[at])?, place(targets[at], "target", n_targets)?, weights[at]));
    }
    of_nodes.sort_by_key(|(node, ..)| *node);
    let mut starts = vec![0; n + 1];
    of_nodes.iter().for_each(|(node, ..)| starts[node + 1] += 1);
    (0..n).for_each(|at| starts[at + 1] += starts[at]);
    Ok((of_nodes.into_iter().map(|(_, target, weight)| (target, weight)).collect(), starts))
}

fn ensemble_of(forest: DecisionTrees, dtype: Option<DType>, draft: &mut Draft) -> Port {
    draft.op(TreeEnsemble { forest: Arc::new(forest), dtype }, &[Port::Input(0)])
}

/// Adds a number to each column of scores.
fn with_base(scores: Port, base: &[f64], draft: &mut Draft) -> Port {
    if base.iter().all(|&x| x == 0.0) {
        return scores;
    }
    let base = draft.floats(&[base.len()], base);
    draft.op(Binary::Add, &[scores, base])
}

pub(super) fn regressor(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    use Aggregate as A;
    let known = [("SUM", A::Sum), ("AVERAGE", A::Average), ("MIN", A::Min), ("MAX", A::Max)];
    let aggregate = node.one_of("aggregate_function", "SUM", &known)?;
    let (n, transform) = (node.int_or("n_targets", 1)?, PostTransform::read(node)?);
    let n = place(n, "a number of targets", 1 << 20)?;
    let base = numbers(node, "base_values")?;
    let forest = NodeLists::read(node, "target", n)?.forest(aggregate, n)?;
    if n == 0 || !base.is_empty() && base.len() != n {
        return Err(invalid!("{} base values do not fit {n} targets", base.len()));
    }
    let scores = ensemble_of(forest, Some(DType::F32), draft);
    let scores = with_base(scores, &base, draft);
    Ok(vec![transform.of(scores, n, draft)])
}

pub(super) fn classifier(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let (labels, transform) = (Labels::read(node, "classlabels_int64s")?, PostTransform::read(node)?);
    let base = numbers(node, "base_values")?;
    let n = labels.len();
    let listed = NodeLists::read(node, "class", n)?;
    if base.len() > n {
        return Err(invalid!("{} base values do not fit {n} classes", base.len()));
    }
    match n {
        1 => Err(unsupported!("a classifier of one class is not supported")),
        2 => of_two_classes(listed, &labels, transform, &base, draft),
        _ => {
            let ranks = ScoredClasses::of(&listed, n, &base);
            let forest = listed.forest(Aggregate::Sum, n)?;
            let masks = ranks.masks(&forest)?;
            let scores = ensemble_of(forest, Some(DType::F32), draft);
            let base: Vec<f64> = (0..n).map(|class| base.get(class).copied().unwrap_or(0.0)).collect();
            let scores = with_base(scores, &base, draft);
            let ranked = match masks {
                None => scores,
                Some(counts) => {
                    // A class without a weight on a row's paths cannot be chosen as the best.
                    let counts = ensemble_of(counts, Some(DType::F32), draft);
                    let based: Vec<f64> = ranks.is_based.iter().map(|&is| f64::from(u8::from(is))).collect();
                    let counts = with_base(counts, &based, draft);
                    let (zero, least) = (draft.number(0.0), draft.number(f64::NEG_INFINITY));
                    let is_there = draft.op(Binary::Greater, &[counts, zero]);
                    draft.op(Where, &[is_there, scores, least])
                }
            };
            let place = draft.best(ranked);
            Ok(vec![labels.at(place, draft), transform.of_many(scores, draft)])
        }
    }
}

/// Classes that have a score for every row, either from a base value or because all leaves of a tree have a
/// weight for them.
struct ScoredClasses {
    /// Whether each class has a base value.
    is_based: Vec<bool>,
    /// Whether all leaves of some tree have a weight for each class.
    is_certain: Vec<bool>,
}

impl ScoredClasses {
    fn of(listed: &NodeLists, n: usize, base: &[f64]) -> ScoredClasses {
        let is_based: Vec<bool> = (0..n).map(|class| class < base.len()).collect();
        let mut is_certain = is_based.clone();
        let (mut seen, mut stack) = (vec![false; listed.nodes.len()], Vec::new());
        for &root in &listed.roots {
            if is_certain.iter().all(|&is| is) {
                break;
            }
            let mut is_on_all = vec![true; n];
            stack.push(root);
            while let Some(at) = stack.pop() {
                match listed.nodes[at] {
                    _ if std::mem::replace(&mut seen[at], true) => {}
                    TreeNode::Branch { children, .. } => stack.extend(children),
                    TreeNode::Leaf(first, end) => {
                        let mut has = vec![false; n];
                        listed.weights[first..end].iter().for_each(|(class, _)| has[*class] = true);
                        is_on_all.iter_mut().zip(has).for_each(|(all, has)| *all &= has);
                    }
                }
            }
            is_certain.iter_mut().zip(is_on_all).for_each(|(is, on_all)| *is |= on_all);
        }
        ScoredClasses { is_based, is_certain }
    }

    /// Copies the trees with all weights set to 1, so that they count the weights of each class; `None` if
    /// every class always has a weight.
    fn masks(&self, forest: &DecisionTrees) -> Result<Option<DecisionTrees>, OpError> {
        if self.is_certain.iter().all(|&is| is) {
            return Ok(None);
        }
        let ones = forest.weights().iter().map(|(target, _)| (*target, 1.0)).collect();
        let (nodes, roots) = (forest.nodes().to_vec(), forest.roots().to_vec());
        DecisionTrees::new(nodes, roots, ones, Aggregate::Sum, forest.n_targets()).map(Some)
    }
}

/// Adds the result for two classes, often only one of which has weights.
fn of_two_classes(
    mut listed: NodeLists,
    labels: &Labels,
    transform: PostTransform,
    base: &[f64],
    draft: &mut Draft,
) -> Result<Vec<Port>, OpError> {
    let [has_first, has_second] = [0, 1].map(|class| listed.weights.iter().any(|(own, _)| *own == class));
    if has_second && base.len() == 2 {
        return Err(unsupported!("base_values of two classes with weights of the second are not supported"));
    }
    if has_first && has_second {
        let forest = listed.forest(Aggregate::Sum, 2)?;
        let scores = ensemble_of(forest, Some(DType::F32), draft);
        let base = [base.first().copied().unwrap_or(0.0), 0.0];
        let scores = with_base(scores, &base, draft);
        let second = draft.column(scores, 1);
        let zero = draft.number(0.0);
        let is_second = draft.op(Binary::Greater, &[second, zero]);
        let place = draft.cast(is_second, DType::I64);
        return Ok(vec![labels.at(place, draft), transform.of_many(scores, draft)]);
    }
    // A single score decides: it is a probability if no weight is negative; else its sign counts.
    let is_share = listed.weights.iter().all(|(_, weight)| *weight >= 0.0);
    listed.weights.iter_mut().for_each(|(class, _)| *class = 0);
    let forest = listed.forest(Aggregate::Sum, 1)?;
    let score = ensemble_of(forest, Some(DType::F32), draft);
    let score = if has_second { score } else { with_base(score, &base[..base.len().min(1)], draft) };
    let place = draft.is_above(score, if is_share { 0.5 } else { 0.0 });
    let label = labels.at(place, draft);
    let columns = if has_second || base.len() == 2 {
        let zero = draft.number(0.0);
        let other = draft.op(Binary::Mul, &[score, zero]);
        let both = if has_second { [other, score] } else { [score, other] };
        let both = draft.beside(&both);
        transform.of_many(both, draft)
    } else {
        two_classes(score, transform, is_share, draft)?
    };
    Ok(vec![label, columns])
}

/// Draws the general operator of version 5.
pub(super) fn ensemble(node: &Import, draft: &mut Draft) -> Result<Vec<Port>, OpError> {
    let aggregate = match node.int_or("aggregate_function", 1)? {
        0 => Aggregate::Average,
        1 => Aggregate::Sum,
        2 => Aggregate::Min,
        3 => Aggregate::Max,
        other => return Err(unsupported!("aggregate_function={other} is not supported")),
    };
    let transform = match node.int_or("post_transform", 0)? {
        0 => PostTransform::None,
        1 => PostTransform::Softmax,
        2 => PostTransform::Logistic,
        3 => PostTransform::SoftmaxZero,
        4 => PostTransform::Probit,
        other => return Err(unsupported!("post_transform={other} is not supported")),
    };
    let n = place(node.int_or("n_targets", 1)?, "a number of targets", 1 << 20)?;
    let forest = general(node)?.forest(aggregate, n)?;
    let scores = ensemble_of(forest, None, draft);
    Ok(vec![transform.of(scores, n, draft)])
}

fn general(node: &Import) -> Result<NodeLists, OpError> {
    let tensor = |name: &str| Ok::<_, OpError>(node.tensor(name)?.map(|tensor| tensor.floats()).unwrap_or_default());
    let [features, holds, fails, holds_leaf, fails_leaf] =
        ["featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs"]
            .map(|name| ints(node, &format!("nodes_{name}")));
    let (features, holds, fails, holds_leaf, fails_leaf) = (features?, holds?, fails?, holds_leaf?, fails_leaf?);
    let (modes, splits, missing) =
        (tensor("nodes_modes")?, tensor("nodes_splits")?, ints(node, "nodes_missing_value_tracks_true")?);
    let (targets, leaf_weights) = (ints(node, "leaf_targetids")?, tensor("leaf_weights")?);
    let _ = node.tensor("nodes_hitrates")?;
    let n = features.len();
    let lists = [
        ("nodes_truenodeids", holds.len()),
        ("nodes_falsenodeids", fails.len()),
        ("nodes_trueleafs", holds_leaf.len()),
        ("nodes_falseleafs", fails_leaf.len()),
        ("nodes_modes", modes.len()),
        ("nodes_splits", splits.len()),
        ("nodes_missing_value_tracks_true", if missing.is_empty() { n } else { missing.len() }),
    ];
    check_lengths(n, &lists)?;
    if targets.len() != leaf_weights.len() {
        return Err(invalid!("{} leaf_targetids do not fit {} leaf_weights", targets.len(), leaf_weights.len()));
    }
    // Leaves, with one weight each, follow the branches.
    let n_leaves = targets.len();
    let child = |to: i64, is_leaf: i64| match is_leaf {
        0 => place(to, "node", n),
        _ => Ok(n + place(to, "leaf", n_leaves)?),
    };
    let members = tensor("membership_values")?;
    let mut sets = members.split(|x| x.is_nan());
    let mut nodes: Vec<TreeNode> = Vec::with_capacity(n + n_leaves);
    let mut behind: Vec<TreeNode> = Vec::new();
    for at in 0..n {
        let children = [child(holds[at], holds_leaf[at])?, child(fails[at], fails_leaf[at])?];
        let feature = place(features[at], "feature", 1 << 31)?;
        let missing_holds = missing.get(at) == Some(&1);
        let branch = |test, threshold, missing_holds, children| TreeNode::Branch {
            feature,
            test,
            threshold,
            missing_holds,
            children,
        };
        const TESTS: [ThresholdTest; 6] = [
            ThresholdTest::AtMost,
            ThresholdTest::Less,
            ThresholdTest::AtLeast,
            ThresholdTest::Greater,
            ThresholdTest::Equal,
            ThresholdTest::NotEqual,
        ];
        nodes.push(match (TESTS.get(modes[at] as usize), modes[at]) {
            (Some(test), mode) if mode >= 0.0 => branch(*test, splits[at], missing_holds, children),
            (_, 6.0) => {
                let set = sets.next().filter(|set| !set.is_empty());
                let set = set.ok_or_else(|| invalid!("node {at} of its trees has no membership_values"))?;
                // A chain of comparisons: the first one is at the branch's place, the others follow the
                // leaves.
                let next = |k: usize| n + n_leaves + behind.len() + k;
                let fails = |k: usize| if k + 1 < set.len() { next(k) } else { children[1] };
                let of =
                    |k: usize| branch(ThresholdTest::Equal, set[k], missing_holds && k == 0, [children[0], fails(k)]);
                let (first, rest): (TreeNode, Vec<TreeNode>) = (of(0), (1..set.len()).map(of).collect());
                behind.extend(rest);
                first
            }
            (_, mode) => return Err(unsupported!("nodes of mode {mode} are not supported")),
        });
    }
    nodes.extend((0..n_leaves).map(|leaf| TreeNode::Leaf(leaf, leaf + 1)));
    nodes.extend(behind);
    let roots = ints(node, "tree_roots")?.into_iter().map(|root| place(root, "root", n)).collect::<Result<_, _>>()?;
    let weights = targets.iter().zip(leaf_weights);
    let weights = weights
        .map(|(&target, weight)| Ok((place(target, "target", 1 << 20)?, weight)))
        .collect::<Result<_, OpError>>()?;
    Ok(NodeLists { nodes, roots, weights })
}
