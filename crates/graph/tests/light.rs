//! The topologies of nine real networks with weights of our own, against what ONNX Runtime computes of the
//! same.
//!
//! Four of them take some seconds; `TILEWRIGHT_ALL_MODELS=1` has all nine evaluated.

mod common;

use std::collections::HashMap;
use std::time::Instant;

use common::{cases, no_files, read};
use tilewright_graph::{Bindings, Graph, Node, Op, Tensor, Value, evaluate, onnx, specialise, summarise};

/// Numbers of splitmix64 between two others, from a name.
fn uniform(name: &str, n: usize, low: f64, high: f64) -> Vec<f64> {
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let number = |at: u64| {
        let mut z = seed.wrapping_add((at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        low + (z >> 40) as f64 / f64::from(1 << 24) * (high - low)
    };
    (0..n as u64).map(number).collect()
}

/// What first reads a value, behind changes of its shape: the operator, and which input it is.
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

/// The same graph with numbers of their own in the place of each constant weight.
fn with_weights(graph: &Graph) -> Graph {
    let mut new = Graph::default();
    for (_, value) in graph.values() {
        new.add_value(Value { producer: None, users: Vec::new(), ..value.clone() });
    }
    new.inputs.clone_from(&graph.inputs);
    new.outputs.clone_from(&graph.outputs);
    for (_, node) in graph.nodes() {
        // Without the last softmax, which leaves nothing but the largest number.
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

#[test]
fn real_networks_compute_what_onnx_runtime_does() {
    let all = std::env::var_os("TILEWRIGHT_ALL_MODELS").is_some();
    let wanted = String::from_utf8(read("light.txt")).expect("text");
    let wanted: HashMap<&str, Vec<f64>> = wanted
        .lines()
        .map(|line| {
            let (name, numbers) = line.split_once(' ').expect("a name and numbers");
            (name, numbers.split(' ').map(|n| n.parse().expect("a number")).collect())
        })
        .collect();
    let mut n_evaluated = 0;
    // GFLOP of convolutions and products, as they are known.
    let known = HashMap::from([
        ("bvlc_alexnet", 1.31),
        ("densenet121", 5.67),
        ("inception_v1", 2.86),
        ("inception_v2", 4.04),
        ("resnet50", 8.18),
        ("shufflenet", 0.249),
        ("squeezenet", 0.698),
        ("vgg19", 39.3),
        ("zfnet512", 2.96),
    ]);
    for case in cases("light.cases.gz") {
        let model = onnx::read(&case.model, &mut no_files).expect("a model");
        // Weights are not folded: they take hundreds of megabytes.
        let special = specialise(&model.graph, &Bindings { fold_bytes: 1 << 8, ..Bindings::default() });
        assert!(special.problems.is_empty(), "{}: {}", case.name, special.problems[0]);
        let gflop = summarise(&special.graph).flops() as f64 / 1e9;
        assert!((gflop / known[case.name.as_str()] - 1.0).abs() < 0.01, "{}: {gflop} GFLOP", case.name);
        if !all && !["inception_v1", "resnet50", "shufflenet", "squeezenet"].contains(&case.name.as_str()) {
            continue;
        }
        let Some(wanted) = wanted.get(case.name.as_str()) else { panic!("{} is not in light.txt", case.name) };
        let start = Instant::now();
        let graph = with_weights(&special.graph);
        let &[input] = &graph.inputs[..] else { panic!("{}: one input", case.name) };
        let ty = graph.ty(input).clone();
        let x = Tensor::from_floats(ty.dtype, &ty.shape[..], &uniform("input", ty.n_elements(), -1.0, 1.0));
        let given = [(graph.value(input).name.as_str(), x)];
        let y = evaluate(&graph, &given).unwrap_or_else(|e| panic!("{}: {e}", case.name))[0].floats();
        let largest = y.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("an output").0;
        println!("{}: {:.2} GFLOP in {:.1} s", case.name, gflop, start.elapsed().as_secs_f64());
        assert_eq!(largest as f64, wanted[0], "{}: the largest", case.name);
        let scale = y.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        for (x, y) in y.iter().step_by(31).zip(&wanted[2..]) {
            assert!((x - y).abs() <= 1e-4 * scale, "{}: {x}, and ONNX Runtime has {y}", case.name);
        }
        // Not all the same, which would say nothing.
        let least = y.iter().fold(f64::INFINITY, |m, x| m.min(*x));
        assert!(scale - least > 1e-3 * scale, "{}: all outputs are alike", case.name);
        n_evaluated += 1;
    }
    assert_eq!(n_evaluated, if all { 9 } else { 4 });
}
