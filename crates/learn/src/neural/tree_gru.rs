//! Tree-structured GRU, a cost model of loop trees.

use rand::SeedableRng;
use rand::seq::index;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Trained, squared_error};
use crate::Matrix;
use crate::simd::sigmoid;
use crate::tape::{Dense, LayerBuilder, NumberRows, Parameters, Tape, Term, Var, forth};

/// Number of trees that are predicted at once.
const BLOCK_TREES: usize = 128;

/// Tree or forest with a row of features for each node.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeRows {
    parents: Vec<Option<usize>>,
    rows: Matrix,
}

impl TreeRows {
    /// Makes a tree from the parent of each node.
    ///
    /// # Panics
    /// If a parent does not come before its children, or there is not one row for each node.
    pub fn new(parents: Vec<Option<usize>>, rows: Matrix) -> TreeRows {
        assert_eq!(parents.len(), rows.n_rows(), "invariant: a row for each node");
        let before = |(node, parent): (usize, &Option<usize>)| parent.is_none_or(|parent| parent < node);
        assert!(parents.iter().enumerate().all(before), "invariant: parents come before their children");
        TreeRows { parents, rows }
    }

    /// Makes a chain, in which each node is the parent of the next.
    pub fn chain(rows: Matrix) -> TreeRows {
        TreeRows::new((0..rows.n_rows()).map(|node: usize| node.checked_sub(1)).collect(), rows)
    }
}

/// Pooling of the nodes' states for the prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readout {
    /// Sum over the roots.
    Roots,
    /// Soft assignment of all nodes' states to this many memory slots: `outᵢ = softmax(Wᵀh)ᵢ · h`.
    Slots(usize),
}

/// Loss function of a [`TreeGru`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeObjective {
    /// Pairwise ranking loss: the mean of `log(1 + exp(−sign(yᵢ − yⱼ)(fᵢ − fⱼ)))` over all pairs of a batch.
    Rank,
    /// Mean squared error.
    Regression,
}

/// Size and training options of a [`TreeGru`].
#[derive(Debug, Clone, PartialEq)]
pub struct TreeGruOptions {
    /// Width of the embedding of a node's features.
    pub n_embedding: usize,
    /// Width of the GRU's state.
    pub n_hidden: usize,
    /// Pooling of the nodes' states.
    pub readout: Readout,
    /// Loss function.
    pub objective: TreeObjective,
    /// Batch size in trees.
    pub batch: usize,
    /// Learning rate of Adam.
    pub learning_rate: f64,
}

impl Default for TreeGruOptions {
    fn default() -> TreeGruOptions {
        TreeGruOptions {
            n_embedding: 128,
            n_hidden: 128,
            readout: Readout::Slots(4),
            objective: TreeObjective::Rank,
            batch: 64,
            learning_rate: 1e-3,
        }
    }
}

/// Tree-structured GRU: a node's input is its embedded features, its state the sum of the children's states;
/// a linear layer predicts from the pooled states.
///
/// # Source
/// AutoTVM, sections 3.1 and 4, figures 3c and 3d. Loops are identified by their features alone, in both
/// readouts; for an embedding of each name, as in figure 3c, the features have to distinguish the names. The
/// paper does not say how children are combined; we add their states, following Tai, Socher and Manning,
/// "Improved semantic representations from tree-structured long short-term memory networks" (2015), section
/// 3.1.
pub struct TreeGru {
    network: Trained<TreeLayers>,
    objective: TreeObjective,
    batch: usize,
    n_features: usize,
    rng: Xoshiro256PlusPlus,
}

struct TreeLayers {
    embedding: Dense,
    /// Layer from a node's embedding to the two gates and the candidate.
    of_input: Dense,
    /// Layer from the children's states to the two gates and the candidate.
    of_state: Dense,
    /// Layer from a state to the logits of the memory slots.
    slots: Option<Dense>,
    last: Dense,
}

impl TreeGru {
    /// Makes an untrained model, for nodes with `n_features` features, which should be of order 1.
    pub fn new(n_features: usize, options: &TreeGruOptions, seed: u64) -> TreeGru {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (n_embedding, n_hidden) = (options.n_embedding, options.n_hidden);
        let n_slots = match options.readout {
            Readout::Roots => None,
            Readout::Slots(n) => Some(n),
        };
        let mut builder = LayerBuilder::new(&mut rng);
        let mut layer = |name, n_inputs, n_outputs| builder.dense(name, n_inputs, n_outputs, forth(n_inputs));
        let layers = TreeLayers {
            embedding: layer("embedding", n_features, n_embedding),
            of_input: layer("of_input", n_embedding, 3 * n_hidden),
            of_state: layer("of_state", n_hidden, 3 * n_hidden),
            slots: n_slots.map(|n| layer("slots", n_hidden, n)),
            last: layer("last", n_slots.unwrap_or(1) * n_hidden, 1),
        };
        TreeGru {
            network: Trained::new(layers, builder.finish(), options.learning_rate),
            objective: options.objective,
            batch: options.batch,
            n_features,
            rng,
        }
    }

    /// Takes `n_steps` further training steps on random batches of these trees.
    ///
    /// # Panics
    /// If there is not one target for each tree, or a row does not have `n_features` features.
    ///
    /// # Cost
    /// A few milliseconds for each level of the trees and step.
    pub fn fit(&mut self, trees: &[TreeRows], targets: &[f32], n_steps: usize) {
        assert_eq!(trees.len(), targets.len(), "invariant: a target for each tree");
        if trees.is_empty() {
            return;
        }
        for _ in 0..n_steps {
            let chosen = index::sample(&mut self.rng, trees.len(), self.batch.min(trees.len())).into_vec();
            let forest = LeveledTrees::new(chosen.iter().map(|&at| &trees[at]), self.n_features);
            let targets: Vec<f32> = chosen.iter().map(|&at| targets[at]).collect();
            let objective = self.objective;
            self.network.descend(|layers, parameters| loss(layers, parameters, &forest, &targets, objective));
        }
    }

    /// Predicts a value for each tree; larger values stand for larger targets.
    ///
    /// # Panics
    /// If a row does not have `n_features` features.
    pub fn predict(&self, trees: &[TreeRows]) -> Vec<f32> {
        let block = |trees: &[TreeRows]| {
            let mut tape = Tape::new(&self.network.parameters);
            let predicted = self.network.layers.forward(&mut tape, &LeveledTrees::new(trees.iter(), self.n_features));
            tape.take(predicted).values
        };
        trees.chunks(BLOCK_TREES).flat_map(block).collect()
    }
}

/// Batch of trees, in levels that can be computed at once: leaves first, then the nodes all of whose children
/// are below.
struct LeveledTrees {
    n_trees: usize,
    /// Features of all nodes, level by level.
    rows: NumberRows,
    levels: Vec<TreeLevel>,
    /// Tree of each node.
    trees: Vec<usize>,
    roots: Vec<NodePosition>,
}

/// Position of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NodePosition {
    level: usize,
    row: usize,
}

/// Nodes of one height.
#[derive(Clone, Default)]
struct TreeLevel {
    n_nodes: usize,
    /// Children, each with the row of its parent in this level.
    children: Vec<(NodePosition, usize)>,
}

impl LeveledTrees {
    fn new<'a>(trees: impl Iterator<Item = &'a TreeRows>, n_features: usize) -> LeveledTrees {
        struct Node<'a> {
            tree: usize,
            parent: Option<usize>,
            row: &'a [f32],
            height: usize,
        }
        let (mut nodes, mut n_trees) = (Vec::new(), 0);
        for (tree, TreeRows { parents, rows }) in trees.enumerate() {
            assert_eq!(rows.n_columns(), n_features, "invariant: a row has a number for each feature");
            let first = nodes.len();
            let with_parents = parents.iter().map(|parent| parent.map(|parent| first + parent));
            nodes.extend(with_parents.zip(rows.rows()).map(|(parent, row)| Node { tree, parent, row, height: 0 }));
            n_trees = tree + 1;
        }
        // Parents come before their children.
        for at in (0..nodes.len()).rev() {
            if let Some(parent) = nodes[at].parent {
                nodes[parent].height = nodes[parent].height.max(nodes[at].height + 1);
            }
        }
        let mut order: Vec<usize> = (0..nodes.len()).collect();
        order.sort_by_key(|&at| nodes[at].height);
        let mut levels = vec![TreeLevel::default(); order.last().map_or(0, |&at| nodes[at].height + 1)];
        let mut places = vec![NodePosition { level: 0, row: 0 }; nodes.len()];
        for &at in &order {
            let level = &mut levels[nodes[at].height];
            places[at] = NodePosition { level: nodes[at].height, row: level.n_nodes };
            level.n_nodes += 1;
        }
        for &at in &order {
            if let Some(parent) = nodes[at].parent {
                levels[nodes[parent].height].children.push((places[at], places[parent].row));
            }
        }
        let values = order.iter().flat_map(|&at| nodes[at].row).copied().collect();
        LeveledTrees {
            n_trees,
            rows: NumberRows { n_columns: n_features, values },
            levels,
            trees: order.iter().map(|&at| nodes[at].tree).collect(),
            roots: order.iter().filter(|&&at| nodes[at].parent.is_none()).map(|&at| places[at]).collect(),
        }
    }

    /// Tree of each root.
    fn trees_of_roots(&self) -> impl Iterator<Item = usize> {
        let firsts = self.levels.iter().scan(0, |first, level| {
            *first += level.n_nodes;
            Some(*first - level.n_nodes)
        });
        let firsts: Vec<usize> = firsts.collect();
        self.roots.iter().map(move |root| self.trees[firsts[root.level] + root.row])
    }

    /// Whether each node of a level has one child, in the same row of the level below, as in most levels of
    /// loop nests and all of chains of equal length. Then no states need to be gathered.
    fn continues(&self, level: usize) -> bool {
        let TreeLevel { n_nodes, children } = &self.levels[level];
        let is_next =
            |(row, child): (usize, &(NodePosition, usize))| *child == (NodePosition { level: level - 1, row }, row);
        children.len() == *n_nodes
            && self.levels[level - 1].n_nodes == *n_nodes
            && children.iter().enumerate().all(is_next)
    }
}

impl TreeLayers {
    /// Computes the prediction for each tree, as a column.
    fn forward(&self, tape: &mut Tape, forest: &LeveledTrees) -> Var {
        let states = self.states(tape, forest);
        let summed = match (&self.slots, &states[..]) {
            (_, []) => {
                let n_inputs = tape.parameters().n_inputs(self.last.weight);
                tape.constant(NumberRows::zeros(forest.n_trees, n_inputs))
            }
            (None, states) => {
                let roots = forest.roots.iter().zip(forest.trees_of_roots());
                let term = |(root, to): (&NodePosition, usize)| Term { from: states[root.level], row: root.row, to };
                let n_hidden = tape.value(states[0]).n_columns;
                tape.sum(forest.n_trees, n_hidden, roots.map(term).collect())
            }
            (Some(slots), states) => {
                let states = tape.stack(states);
                let scores = tape.dense(states, *slots);
                tape.slots(states, scores, forest.trees.clone(), forest.n_trees)
            }
        };
        tape.dense(summed, self.last)
    }

    /// Computes the states of the nodes of each level.
    fn states(&self, tape: &mut Tape, forest: &LeveledTrees) -> Vec<Var> {
        let rows = tape.constant(forest.rows.clone());
        let embedded = tape.dense(rows, self.embedding);
        let embedded = tape.tanh(embedded);
        let inputs = tape.dense(embedded, self.of_input);
        let mut states: Vec<Var> = Vec::with_capacity(forest.levels.len());
        let mut first = 0;
        for (at, level) in forest.levels.iter().enumerate() {
            let before = states.last().map(|&below| {
                let state = if forest.continues(at) {
                    below
                } else {
                    let term =
                        |&(child, to): &(NodePosition, usize)| Term { from: states[child.level], row: child.row, to };
                    let n_hidden = tape.value(below).n_columns;
                    tape.sum(level.n_nodes, n_hidden, level.children.iter().map(term).collect())
                };
                (tape.dense(state, self.of_state), state)
            });
            states.push(tape.gru(inputs, first, level.n_nodes, before));
            first += level.n_nodes;
        }
        states
    }
}

/// Computes the loss of the predictions, with its gradients.
fn loss(
    layers: &TreeLayers,
    parameters: &Parameters,
    forest: &LeveledTrees,
    targets: &[f32],
    objective: TreeObjective,
) -> (f64, Vec<Vec<f32>>) {
    let mut tape = Tape::new(parameters);
    let predicted = layers.forward(&mut tape, forest);
    let values = &tape.value(predicted).values;
    let (loss, of_values) = match objective {
        TreeObjective::Regression => squared_error(values, targets),
        TreeObjective::Rank => rank_loss(values, targets),
    };
    (loss, tape.backward(vec![(predicted, of_values)]))
}

/// Computes the mean over the pairs with different targets, and its gradient with respect to the predictions.
fn rank_loss(predicted: &[f32], targets: &[f32]) -> (f64, Vec<f32>) {
    let mut gradient = vec![0.0; targets.len()];
    let (mut sum, mut n_pairs) = (0.0, 0);
    for (second, &target) in targets.iter().enumerate() {
        for (first, _) in targets[..second].iter().enumerate().filter(|(_, other)| **other != target) {
            let (better, worse) = if targets[first] > target { (first, second) } else { (second, first) };
            let wrong = sigmoid(predicted[worse] - predicted[better]);
            sum -= f64::from((1.0 - wrong).ln());
            gradient[better] -= wrong;
            gradient[worse] += wrong;
            n_pairs += 1;
        }
    }
    let n_pairs = n_pairs.max(1) as f32;
    gradient.iter_mut().for_each(|x| *x /= n_pairs);
    (sum / f64::from(n_pairs), gradient)
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::tape::gradients;

    fn options(readout: Readout, objective: TreeObjective) -> TreeGruOptions {
        TreeGruOptions { n_embedding: 5, n_hidden: 4, readout, objective, ..TreeGruOptions::default() }
    }

    const VARIANTS: [(Readout, TreeObjective); 4] = [
        (Readout::Roots, TreeObjective::Rank),
        (Readout::Roots, TreeObjective::Regression),
        (Readout::Slots(3), TreeObjective::Rank),
        (Readout::Slots(3), TreeObjective::Regression),
    ];

    /// Trees of up to 9 nodes below up to two roots.
    fn random_trees(n: usize, seed: u64) -> Vec<TreeRows> {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let tree = |_| {
            let n_nodes = rng.random_range(1..10);
            let parents = (0..n_nodes).map(|node: usize| match node {
                0 => None,
                _ => Some(rng.random_range(0..=node)).filter(|&parent| parent < node),
            });
            let parents: Vec<_> = parents.collect();
            let rows = (0..n_nodes).map(|_| [0; 3].map(|_| rng.random_range(-1.0..1.0)));
            TreeRows::new(parents, Matrix::from_rows(3, rows.collect::<Vec<[f32; 3]>>()))
        };
        (0..n).map(tree).collect()
    }

    #[test]
    fn gradients_are_those_of_the_losses() {
        let trees = random_trees(5, 1);
        let forest = LeveledTrees::new(trees.iter(), 3);
        for (readout, objective) in VARIANTS {
            let model = TreeGru::new(3, &options(readout, objective), 2);
            let targets = [0.5, 0.2, 0.9, 0.2, -0.3];
            let Trained { layers, parameters, .. } = &model.network;
            gradients::check(parameters, |parameters| loss(layers, parameters, &forest, &targets, objective));
        }
    }

    /// Compares with the definition, one node at a time.
    #[test]
    fn a_forest_is_predicted_as_its_trees_are_one_by_one() {
        for (readout, objective) in VARIANTS {
            let model = TreeGru::new(3, &options(readout, objective), 3);
            let trees = random_trees(40, 4);
            let together = model.predict(&trees);
            for (tree, expected) in trees.iter().zip(&together) {
                let alone = model.predict(std::slice::from_ref(tree))[0];
                assert!((alone - expected).abs() < 1e-5, "{alone} alone, {expected} among others");
            }
        }
    }

    #[test]
    fn the_order_of_siblings_does_not_matter_but_nesting_does() {
        let rows = |rows: &[[f32; 3]]| Matrix::from_rows(3, rows);
        let [a, b, c] = [[0.1, 0.2, 0.3], [0.5, -0.2, 0.1], [-0.9, 0.4, 0.6]];
        let inside = vec![None, Some(0), Some(0)];
        let one = TreeRows::new(inside.clone(), rows(&[a, b, c]));
        let other = TreeRows::new(inside, rows(&[a, c, b]));
        let chain = TreeRows::chain(rows(&[a, b, c]));
        let model = TreeGru::new(3, &TreeGruOptions::default(), 5);
        let predicted = model.predict(&[one, other, chain]);
        assert!((predicted[0] - predicted[1]).abs() < 1e-5, "{predicted:?}");
        assert!((predicted[0] - predicted[2]).abs() > 1e-3, "{predicted:?}");
    }

    /// The target is the product of a feature of the root and one of its only leaf.
    #[test]
    fn a_small_ranking_is_learnt() {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(6);
        let mut examples = |n: usize| -> (Vec<TreeRows>, Vec<f32>) {
            let example = |_| {
                let [x, y]: [f32; 2] = [0; 2].map(|_| rng.random_range(-1.0..1.0));
                (TreeRows::chain(Matrix::from_rows(2, [[x, 1.0], [y, 0.0]])), x * y + 0.5 * x)
            };
            (0..n).map(example).unzip()
        };
        let (trees, targets) = examples(200);
        let (unseen, expected) = examples(100);
        for (readout, objective) in VARIANTS {
            let options =
                TreeGruOptions { n_embedding: 16, n_hidden: 16, learning_rate: 5e-3, ..options(readout, objective) };
            let mut model = TreeGru::new(2, &options, 7);
            model.fit(&trees, &targets, 150);
            let tau = crate::metrics::kendall_tau(&model.predict(&unseen), &expected);
            assert!(tau > 0.8, "{readout:?}, {objective:?}: Kendall's τ {tau}");
        }
    }

    #[test]
    fn trees_without_nodes_are_predicted_alike() {
        let empty = TreeRows::chain(Matrix::new(3));
        for (readout, objective) in VARIANTS {
            let mut model = TreeGru::new(3, &options(readout, objective), 1);
            let predicted = model.predict(&[empty.clone(), empty.clone()]);
            assert!(predicted[0].is_finite() && predicted[0] == predicted[1]);
            model.fit(&[], &[], 3);
            model.fit(std::slice::from_ref(&empty), &[1.0], 3);
        }
    }

    #[test]
    fn the_seed_decides() {
        let trees = random_trees(20, 1);
        let of_seed = |seed| {
            let mut model = TreeGru::new(3, &options(Readout::Slots(2), TreeObjective::Regression), seed);
            model.fit(&trees, &[0.5; 20], 3);
            model.predict(&trees)
        };
        assert_eq!(of_seed(1), of_seed(1));
        assert_ne!(of_seed(1), of_seed(2));
    }
}
