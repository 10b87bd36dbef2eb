//! Topologies of nine real networks with generated weights, and ONNX Runtime's results for them.

use std::collections::HashMap;

use rand::{Rng, SeedableRng};
use rand_xoshiro::SplitMix64;
use tilewright_graph::{Graph, Node, Op, Tensor, Value};

use super::read;

/// Numbers in a range, determined by a name.
pub fn uniform(name: &str, n: usize, low: f64, high: f64) -> Vec<f64> {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let mut random = SplitMix64::seed_from_u64(seed);
    (0..n).map(|_| low + (random.next_u64() >> 40) as f64 / f64::from(1 << 24) * (high - low)).collect()
}

/// First readers of a value, after changes of its shape: the operator, and the index of the input.
fn users(graph: &Graph, value: &Value) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let mut seen = Vec::new();
    for &user in &value.users {
        let node = graph.node(user);
        if seen.contains(&user) {
            continue;
        }
        seen.push(user);
        match node.op {
            Op::Unsqueeze(_) | Op::Reshape(_) => {
                let outputs = node.outputs.iter().flatten();
                found.extend(outputs.flat_map(|&id| users(graph, graph.value(id))));
            }
            _ => {
                let is_it = |id: &Option<_>| id.is_some_and(|id| graph.value(id).name == value.name);
                let at = node.inputs.iter().position(is_it).unwrap_or(0);
                found.push((node.place.operator.clone(), at));
            }
        }
    }
    found
}

/// Copies the graph, with generated numbers instead of each constant weight.
pub fn with_weights(graph: &Graph) -> Graph {
    let mut new = Graph::default();
    for (_, value) in graph.values() {
        new.add_value(Value { producer: None, users: Vec::new(), ..value.clone() });
    }
    new.inputs.clone_from(&graph.inputs);
    new.outputs.clone_from(&graph.outputs);
    for (_, node) in graph.nodes() {
        // Without the last softmax, after which only the largest number matters.
        if matches!(node.op, Op::Softmax(_)) && node.outputs[0] == Some(graph.outputs[0]) {
            new.outputs = node.inputs.iter().flatten().copied().collect();
            continue;
        }
        let (Op::ConstantOfShape(_), Some(id)) = (&node.op, node.outputs[0]) else {
            new.add_node(Node { ..node.clone() });
            continue;
        };
        let value = graph.value(id);
        let shape = &graph.ty(id).shape;
        let (low, high) = match users(graph, value).first() {
            Some((op, 1)) if op == "Conv" || op == "Gemm" => {
                let bound = (6.0 / shape[1..].iter().product::<usize>() as f64).sqrt();
                (-bound, bound)
            }
            Some((op, 1 | 4)) if op == "BatchNormalization" => (0.5, 1.5),
            Some((op, _)) if op == "Mul" => (0.5, 1.5),
            _ => (-0.1, 0.1),
        };
        let numbers = uniform(&value.name, shape.iter().product(), low, high);
        new.value_mut(id).constant = Some(Tensor::from_floats(value.ty.as_ref().unwrap().dtype, &shape[..], &numbers));
    }
    new
}

/// Makes the input of a network.
pub fn input_of(graph: &Graph) -> (String, Tensor) {
    let &[input] = &graph.inputs[..] else { panic!("{}: one input", graph.name) };
    let ty = graph.ty(input).clone();
    let x = Tensor::from_floats(ty.dtype, &ty.shape[..], &uniform("input", ty.n_elements(), -1.0, 1.0));
    (graph.value(input).name.clone(), x)
}

/// Results of ONNX Runtime for each network: the index of the largest number, the sum of squares, and every
/// 31st number.
pub fn answers() -> HashMap<String, Vec<f64>> {
    let wanted = String::from_utf8(read("light.txt")).expect("text");
    let line = |line: &str| {
        let (name, numbers) = line.split_once(' ').expect("a name and numbers");
        (name.to_owned(), numbers.split(' ').map(|n| n.parse().expect("a number")).collect())
    };
    wanted.lines().map(line).collect()
}

/// Checks the results of a network.
///
/// # Panics
/// If the results differ from ONNX Runtime's.
pub fn check(name: &str, y: &[f64], wanted: &[f64], tolerance: f64) {
    let largest = y.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("an output").0;
    assert_eq!(largest as f64, wanted[0], "{name}: the largest");
    let scale = y.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    for (x, y) in y.iter().step_by(31).zip(&wanted[2..]) {
        assert!((x - y).abs() <= tolerance * scale, "{name}: {x}, and ONNX Runtime has {y}");
    }
    // The results must not be all equal, or the test would be meaningless.
    let least = y.iter().fold(f64::INFINITY, |m, x| m.min(*x));
    assert!(scale - least > 1e-3 * scale, "{name}: all outputs are alike");
}
