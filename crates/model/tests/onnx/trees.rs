//! Random tree ensembles, compared with a separate evaluator: all comparisons, aggregates and functions of
//! scores, features equal to thresholds, and NaN features.
//!
//! Weights are small multiples of 1/64, so that sums are exact in any order.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_device::host;
use tilewright_graph::{DType, Tensor};
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::common::Case;
use crate::common::build::{Attr, declared, field, int, node_of};
use crate::compiled_case;

const FEATURES: usize = 4;
const MODES: [&str; 6] = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"];
const AGGREGATES: [&str; 4] = ["SUM", "AVERAGE", "MIN", "MAX"];
const TRANSFORMS: [&str; 5] = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"];

/// Values of features and of thresholds, which are therefore often equal.
const VALUES: [f32; 7] = [-2.0, -0.5, -0.0, 0.0, 0.5, 1.25, 3.0];

enum Tree {
    Branch {
        feature: usize,
        mode: usize,
        threshold: f32,
        takes_nan: bool,
        then: Box<Tree>,
        other: Box<Tree>,
    },
    /// Weights by target, in 64ths.
    Leaf(Vec<(usize, i64)>),
}

fn tree(random: &mut Xoshiro256PlusPlus, depth: usize, n_targets: usize) -> Tree {
    if depth == 0 || random.random_range(0..5) == 0 {
        let n_weights = random.random_range(0..=n_targets.min(2));
        let weight =
            |random: &mut Xoshiro256PlusPlus| (random.random_range(0..n_targets), random.random_range(-60..=60));
        return Tree::Leaf((0..n_weights).map(|_| weight(random)).collect());
    }
    Tree::Branch {
        feature: random.random_range(0..FEATURES),
        mode: random.random_range(0..MODES.len()),
        threshold: VALUES[random.random_range(0..VALUES.len())],
        takes_nan: random.random(),
        then: Box::new(tree(random, depth - 1, n_targets)),
        other: Box::new(tree(random, depth - 1, n_targets)),
    }
}

impl Tree {
    fn leaf(&self, row: &[f32]) -> &[(usize, i64)] {
        match self {
            Tree::Leaf(weights) => weights,
            Tree::Branch { feature, mode, threshold, takes_nan, then, other } => {
                let (x, t) = (row[*feature], *threshold);
                let holds = [x <= t, x < t, x >= t, x > t, x == t, x != t][*mode] || *takes_nan && x.is_nan();
                if holds { then.leaf(row) } else { other.leaf(row) }
            }
        }
    }
}

/// Scores of a row.
fn scores(trees: &[Tree], aggregate: &str, n_targets: usize, row: &[f32]) -> Vec<f64> {
    let of_target = |target: usize| {
        let all: Vec<i64> = trees
            .iter()
            .flat_map(|tree| tree.leaf(row))
            .filter(|(of, _)| *of == target)
            .map(|(_, weight)| *weight)
            .collect();
        let found = match aggregate {
            "MIN" => all.iter().min().copied().unwrap_or(0),
            "MAX" => all.iter().max().copied().unwrap_or(0),
            _ => all.iter().sum(),
        };
        found as f64 / 64.0 / if aggregate == "AVERAGE" { trees.len() as f64 } else { 1.0 }
    };
    (0..n_targets).map(of_target).collect()
}

/// Normal distribution, by the trapezoidal rule.
fn normal(y: f64) -> f64 {
    const N: usize = 4000;
    let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    let at = |i: usize| density(y * i as f64 / N as f64);
    0.5 + y / N as f64 * ((1..N).map(at).sum::<f64>() + 0.5 * (at(0) + at(N)))
}

/// Checks that the results of a row are the transformed scores.
fn check_row(found: &[f64], scores: &[f64], transform: &str) -> Result<(), String> {
    let exponentials = |counts: &dyn Fn(f64) -> bool| -> Vec<f64> {
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().filter(|s| counts(**s)).map(|s| (s - largest).exp()).sum();
        scores.iter().map(|&s| if counts(s) { (s - largest).exp() / sum } else { 0.0 }).collect()
    };
    let wanted: Vec<f64> = match transform {
        // A single target has no other to be compared with.
        _ if scores.len() == 1 && transform != "PROBIT" => scores.to_vec(),
        "NONE" => scores.to_vec(),
        "LOGISTIC" => scores.iter().map(|s| 1.0 / (1.0 + (-s).exp())).collect(),
        "SOFTMAX" => exponentials(&|_| true),
        "SOFTMAX_ZERO" if scores.iter().all(|s| *s == 0.0) => return Ok(()),
        "SOFTMAX_ZERO" => exponentials(&|s| s != 0.0),
        _ => {
            // The function is an approximation, defined only for probabilities.
            let is_near = |(y, s): (&f64, &f64)| !(0.02..0.98).contains(s) || (normal(*y) - s).abs() < 3e-3;
            return if found.iter().zip(scores).all(is_near) { Ok(()) } else { Err(format!("{found:?}, {scores:?}")) };
        }
    };
    let is_near = |(x, y): (&f64, &f64)| (x - y).abs() <= 1e-6 * y.abs().max(0.1);
    if found.iter().zip(&wanted).all(is_near) { Ok(()) } else { Err(format!("{found:?} is not {wanted:?}")) }
}

/// Lists of a model's nodes, tree by tree.
#[derive(Default)]
struct Lists {
    ints: [Vec<i64>; 6],
    values: Vec<f32>,
    modes: Vec<&'static str>,
    of_weights: [Vec<i64>; 3],
    weights: Vec<f32>,
}

impl Lists {
    /// Adds a tree whose nodes are numbered from `id` on; returns the next number.
    fn add(&mut self, of: i64, tree: &Tree, id: i64) -> i64 {
        let at = self.values.len();
        let (feature, takes_nan, mode, threshold) = match tree {
            Tree::Leaf(weights) => {
                for (target, weight) in weights {
                    [*target as i64, of, id].into_iter().zip(&mut self.of_weights).for_each(|(x, list)| list.push(x));
                    self.weights.push(*weight as f32 / 64.0);
                }
                (0, 0, "LEAF", 0.0)
            }
            Tree::Branch { feature, mode, threshold, takes_nan, .. } => {
                (*feature as i64, i64::from(*takes_nan), MODES[*mode], *threshold)
            }
        };
        let row = [of, id, feature, 0, 0, takes_nan];
        row.into_iter().zip(&mut self.ints).for_each(|(x, list)| list.push(x));
        self.values.push(threshold);
        self.modes.push(mode);
        let Tree::Branch { then, other, .. } = tree else { return id + 1 };
        self.ints[3][at] = id + 1;
        let next = self.add(of, then, id + 1);
        self.ints[4][at] = next;
        self.add(of, other, next)
    }
}

fn model(trees: &[Tree], n_targets: usize, aggregate: &'static str, transform: &'static str, rows: usize) -> Vec<u8> {
    let mut lists = Lists::default();
    trees.iter().zip(0..).for_each(|(tree, of)| _ = lists.add(of, tree, 0));
    let names = ["treeids", "nodeids", "featureids", "truenodeids", "falsenodeids", "missing_value_tracks_true"];
    let names = names.map(|name| format!("nodes_{name}"));
    let mut attributes: Vec<(&str, Attr)> =
        names.iter().map(String::as_str).zip(lists.ints.into_iter().map(Attr::Ints)).collect();
    let [ids, of_trees, of_nodes] = lists.of_weights.map(Attr::Ints);
    attributes.extend([("target_ids", ids), ("target_treeids", of_trees), ("target_nodeids", of_nodes)]);
    attributes.extend([
        ("nodes_values", Attr::Floats(lists.values)),
        ("nodes_modes", Attr::Texts(lists.modes)),
        ("target_weights", Attr::Floats(lists.weights)),
        ("n_targets", Attr::Int(n_targets as i64)),
        ("aggregate_function", Attr::Text(aggregate)),
        ("post_transform", Attr::Text(transform)),
    ]);
    let graph = [
        node_of("ai.onnx.ml", "TreeEnsembleRegressor", &["x"], &["y"], &attributes),
        field(11, declared("x", DType::F32, &[rows as i64, FEATURES as i64])),
        field(12, declared("y", DType::F32, &[rows as i64, n_targets as i64])),
    ];
    let domain = |name: &str, version: i64| field(8, [field(1, name), int(2, version)].concat());
    [int(1, 8), field(7, graph.concat()), domain("", 17), domain("ai.onnx.ml", 3)].concat()
}

#[test]
fn random_ensembles_compute_what_their_trees_say() {
    let n_cases: usize = std::env::var("TILEWRIGHT_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    for seed in 0..n_cases {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed as u64);
        // All combinations of aggregates and functions come first.
        let (aggregate, transform) = (AGGREGATES[seed % 4], TRANSFORMS[seed / 4 % 5]);
        let n_targets = [1, 2, 3][random.random_range(0..3)];
        let depth = random.random_range(0..6);
        let n_trees = random.random_range(1..9);
        let trees: Vec<Tree> = (0..n_trees).map(|_| tree(&mut random, depth, n_targets)).collect();
        let rows = [1, 3, 70][random.random_range(0..3)];
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40];
        let mut value = || match random.random_range(0..6) {
            0 => special[random.random_range(0..4)],
            _ => VALUES[random.random_range(0..VALUES.len())],
        };
        let x: Vec<f32> = (0..rows * FEATURES).map(|_| value()).collect();
        let bytes: Vec<u8> = x.iter().flat_map(|x| x.to_le_bytes()).collect();
        let ty = tilewright_graph::TensorType::new(DType::F32, [rows, FEATURES]);
        let inputs = vec![Tensor::new(ty, bytes.into()).unwrap()];
        let file = model(&trees, n_targets, aggregate, transform, rows);
        let case = Case { name: format!("seed {seed}"), model: file.into(), sets: vec![(inputs.clone(), Vec::new())] };
        let (compiled, given) = compiled_case(&case, &inputs, &host::target()).unwrap().expect("its types run");
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
        runner.run().unwrap();
        let found = runner.outputs()[0].1.floats();
        for (row, found) in x.chunks(FEATURES).zip(found.chunks(n_targets)) {
            let scores = scores(&trees, aggregate, n_targets, row);
            let checked = check_row(found, &scores, transform);
            checked.unwrap_or_else(|what| panic!("seed {seed}, {aggregate}, {transform}: {row:?}: {what}"));
        }
    }
}
