//! A cost model that reads trees of loops.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::activation::{log_sigmoid, sigmoid, softmax};
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor};
use rand::SeedableRng;
use rand::seq::index;
use rand_xoshiro::Xoshiro256PlusPlus;

use super::{Trained, column, device, linear, matrix, numbers, positions, tanh};
use crate::Matrix;

/// Trees that are predicted at once.
const BLOCK_TREES: usize = 128;

/// A tree, or several beside each other, with a row of features for each node.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeRows {
    parents: Vec<Option<usize>>,
    rows: Matrix,
}

impl TreeRows {
    /// The tree whose nodes have these parents.
    ///
    /// # Panics
    /// Where a parent does not come before its children, or there is not one row for each node.
    pub fn new(parents: Vec<Option<usize>>, rows: Matrix) -> TreeRows {
        assert_eq!(parents.len(), rows.n_rows(), "invariant: a row for each node");
        let before = |(node, parent): (usize, &Option<usize>)| parent.is_none_or(|parent| parent < node);
        assert!(parents.iter().enumerate().all(before), "invariant: parents come before their children");
        TreeRows { parents, rows }
    }

    /// A tree in which each node is the parent of the next: a sequence.
    pub fn chain(rows: Matrix) -> TreeRows {
        TreeRows::new((0..rows.n_rows()).map(|node: usize| node.checked_sub(1)).collect(), rows)
    }
}

/// What the states of a tree's nodes become before the prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readout {
    /// The sum over the roots.
    Roots,
    /// The sum over all nodes of what each puts into so many memory slots: `outᵢ = softmax(Wᵀh)ᵢ · h`.
    Slots(usize),
}

/// What a [`TreeGru`] minimizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeObjective {
    /// The mean of `log(1 + exp(−sign(yᵢ − yⱼ)(fᵢ − fⱼ)))` over all pairs of a batch.
    Rank,
    /// The mean squared error.
    Regression,
}

/// How a [`TreeGru`] is made and learns.
#[derive(Debug, Clone, PartialEq)]
pub struct TreeGruOptions {
    /// The width of the embedding of a node's features.
    pub n_embedding: usize,
    /// The width of the GRU's state.
    pub n_hidden: usize,
    /// What the prediction is made of.
    pub readout: Readout,
    /// What is minimized.
    pub objective: TreeObjective,
    /// Trees in a step of learning.
    pub batch: usize,
    /// Adam's.
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

/// A recursive network over trees: a GRU takes a node's embedded features as its input and the sum of the children's states as
/// its state, and what the nodes' states add up to is predicted from by a linear layer.
///
/// # Source
/// AutoTVM, sections 3.1 and 4, figures 3c and 3d. Loops are known by their features alone, in both readouts; who wants an
/// embedding for each name, as in figure 3c, gives features that tell them apart. The paper does not say how children are
/// summed up; we add their states, after Tai, Socher and Manning, "Improved semantic representations from tree-structured
/// long short-term memory networks" (2015), section 3.1.
pub struct TreeGru {
    network: Trained<Network>,
    objective: TreeObjective,
    batch: usize,
    n_features: usize,
    rng: Xoshiro256PlusPlus,
}

#[derive(Module, Debug)]
struct Network {
    embedding: Linear,
    /// From a node's embedding to the two gates and the candidate.
    of_input: Linear,
    /// From the children's states to the two gates and the candidate.
    of_state: Linear,
    /// From a state to the logits of the memory slots.
    slots: Option<Linear>,
    last: Linear,
}

impl TreeGru {
    /// A model that knows nothing yet, for nodes with so many features. These should be of order 1.
    pub fn new(n_features: usize, options: &TreeGruOptions, seed: u64) -> TreeGru {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (n_embedding, n_hidden) = (options.n_embedding, options.n_hidden);
        let n_slots = match options.readout {
            Readout::Roots => None,
            Readout::Slots(n) => Some(n),
        };
        let network = Network {
            embedding: linear(n_features, n_embedding, &mut rng),
            of_input: linear(n_embedding, 3 * n_hidden, &mut rng),
            of_state: linear(n_hidden, 3 * n_hidden, &mut rng),
            slots: n_slots.map(|n| linear(n_hidden, n, &mut rng)),
            last: linear(n_slots.unwrap_or(1) * n_hidden, 1, &mut rng),
        };
        TreeGru {
            network: Trained::new(network, options.learning_rate),
            objective: options.objective,
            batch: options.batch,
            n_features,
            rng,
        }
    }

    /// Goes on learning, by so many steps on random batches of these trees and their targets.
    ///
    /// # Panics
    /// Where there is not one target for each tree, or a row has not as many features as there are.
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
            let forest = Forest::new(chosen.iter().map(|&at| &trees[at]), self.n_features, &device());
            let targets: Vec<f32> = chosen.iter().map(|&at| targets[at]).collect();
            let objective = self.objective;
            self.network.descend(|network| loss(network, &forest, &targets, objective));
        }
    }

    /// The predictions for these trees; larger ones for those that larger targets are expected of.
    ///
    /// # Panics
    /// Where a row has not as many features as there are.
    pub fn predict(&self, trees: &[TreeRows]) -> Vec<f32> {
        let (network, device) = (self.network.frozen(), Device::flex());
        let block = |trees: &[TreeRows]| numbers(network.forward(&Forest::new(trees.iter(), self.n_features, &device)));
        trees.chunks(BLOCK_TREES).flat_map(block).collect()
    }
}

/// Trees side by side, in levels that can be computed at once: leaves first, then the nodes all of whose children are below.
struct Forest {
    n_trees: usize,
    /// The features of all nodes, level by level.
    rows: Tensor<2>,
    levels: Vec<Level>,
    /// The tree of each node.
    trees: Vec<usize>,
    /// The places of the roots among the nodes.
    roots: Vec<usize>,
}

/// The nodes of one height.
#[derive(Clone, Default)]
struct Level {
    n_nodes: usize,
    /// The place of each child among all nodes, and that of its parent in this level.
    children: Vec<usize>,
    parents: Vec<usize>,
}

impl Level {
    /// Whether each node has one child, the one at its own place in the level below, which starts at `first` among all nodes: what
    /// most levels of loop nests do, and all of chains of equal length. Nothing need be gathered then.
    fn continues(&self, first: usize) -> bool {
        let is_next = |(at, (&child, &parent)): (usize, (&usize, &usize))| child == first + at && parent == at;
        self.children.len() == self.n_nodes && self.children.iter().zip(&self.parents).enumerate().all(is_next)
    }
}

impl Forest {
    fn new<'a>(trees: impl Iterator<Item = &'a TreeRows>, n_features: usize, device: &Device) -> Forest {
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
        let mut levels = vec![Level::default(); order.last().map_or(0, |&at| nodes[at].height + 1)];
        let mut place_in_level = vec![0; nodes.len()];
        for &at in &order {
            let level = &mut levels[nodes[at].height];
            place_in_level[at] = level.n_nodes;
            level.n_nodes += 1;
        }
        for (place, &at) in order.iter().enumerate() {
            if let Some(parent) = nodes[at].parent {
                let level = &mut levels[nodes[parent].height];
                level.children.push(place);
                level.parents.push(place_in_level[parent]);
            }
        }
        Forest {
            n_trees,
            rows: matrix(order.iter().flat_map(|&at| nodes[at].row).copied().collect(), n_features, device),
            levels,
            trees: order.iter().map(|&at| nodes[at].tree).collect(),
            roots: (0..order.len()).filter(|&place| nodes[order[place]].parent.is_none()).collect(),
        }
    }
}

impl Network {
    /// The prediction for each tree, as a column.
    fn forward(&self, forest: &Forest) -> Tensor<2> {
        let device = forest.rows.device();
        let owners =
            |places: &[usize]| positions(&places.iter().map(|&at| forest.trees[at]).collect::<Vec<_>>(), &device);
        let of_trees = |rows: Tensor<2>, owners: Tensor<1, Int>| add_rows(forest.n_trees, owners, rows);
        if forest.levels.is_empty() {
            let [n_inputs, _] = self.last.weight.val().dims();
            return self.last.forward(Tensor::zeros([forest.n_trees, n_inputs], &device));
        }
        let states = self.states(forest);
        let summed = match &self.slots {
            None => {
                let roots = states.select(0, positions(&forest.roots, &device));
                of_trees(roots, owners(&forest.roots))
            }
            Some(slots) => {
                let shares = softmax(slots.forward(states.clone()), 1);
                let [_, n_slots] = shares.dims();
                let all = positions(&forest.trees, &device);
                let slot = |share| of_trees(states.clone() * share, all.clone());
                Tensor::cat(shares.chunk(n_slots, 1).into_iter().map(slot).collect(), 1)
            }
        };
        self.last.forward(summed)
    }

    /// The state of every node, level by level.
    fn states(&self, forest: &Forest) -> Tensor<2> {
        let device = forest.rows.device();
        let inputs = self.of_input.forward(tanh(self.embedding.forward(forest.rows.clone())));
        let mut states: Vec<Tensor<2>> = Vec::with_capacity(forest.levels.len());
        let mut first = 0;
        for level in &forest.levels {
            let input = inputs.clone().narrow(0, first, level.n_nodes);
            let children = states.last().map(|below| {
                let [n_below, _] = below.dims();
                if n_below == level.n_nodes && level.continues(first - n_below) {
                    return below.clone();
                }
                let children = Tensor::cat(states.clone(), 0).select(0, positions(&level.children, &device));
                add_rows(level.n_nodes, positions(&level.parents, &device), children)
            });
            states.push(self.cell(input, children));
            first += level.n_nodes;
        }
        Tensor::cat(states, 0)
    }

    /// The gated recurrent unit; leaves have no state to go on from.
    fn cell(&self, input: Tensor<2>, state: Option<Tensor<2>>) -> Tensor<2> {
        let Some(state) = state else {
            let [_, update, candidate] = thirds(input);
            return (-sigmoid(update) + 1.0) * tanh(candidate);
        };
        let [reset_in, update_in, candidate_in] = thirds(input);
        let [reset, update, candidate] = thirds(self.of_state.forward(state.clone()));
        let update = sigmoid(update_in + update);
        let candidate = tanh(candidate_in + sigmoid(reset_in + reset) * candidate);
        (-update.clone() + 1.0) * candidate + update * state
    }
}

fn thirds(x: Tensor<2>) -> [Tensor<2>; 3] {
    x.chunk(3, 1).try_into().expect("invariant: two gates and a candidate")
}

/// Rows of zeros to which these rows are added at these places.
fn add_rows(n_rows: usize, places: Tensor<1, Int>, rows: Tensor<2>) -> Tensor<2> {
    let zeros = Tensor::zeros([n_rows, rows.dims()[1]], &rows.device());
    zeros.select_assign(0, places, rows, IndexingUpdateOp::Add)
}

fn loss(network: &Network, forest: &Forest, targets: &[f32], objective: TreeObjective) -> Tensor<1> {
    let predicted = network.forward(forest);
    let device = predicted.device();
    let n = targets.len();
    match objective {
        TreeObjective::Regression => {
            let error = predicted - column(targets, &device);
            (error.clone() * error).mean()
        }
        TreeObjective::Rank => {
            let sign = |&x: &f32| {
                move |&y: &f32| {
                    if x > y {
                        1.0
                    } else if x < y {
                        -1.0
                    } else {
                        0.0
                    }
                }
            };
            let signs: Vec<f32> = targets.iter().flat_map(|x| targets.iter().map(sign(x))).collect();
            let ordered: Vec<f32> = signs.iter().map(|sign| f32::abs(*sign)).collect();
            let n_ordered = ordered.iter().sum::<f32>().max(1.0);
            let differences = predicted.clone() - predicted.transpose();
            let losses = -log_sigmoid(differences * matrix(signs, n, &device)) * matrix(ordered, n, &device);
            losses.sum() / n_ordered
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::super::gradients;
    use super::*;

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
        let forest = Forest::new(trees.iter(), 3, &device());
        for (readout, objective) in VARIANTS {
            let model = TreeGru::new(3, &options(readout, objective), 2);
            let targets = [0.5, 0.2, 0.9, 0.2, -0.3];
            gradients::check(&model.network.network, |n| loss(n, &forest, &targets, objective));
        }
    }

    /// The definition, a node at a time.
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

    /// What counts is the product of a feature of the root and one of its only leaf.
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
