//! Networks with seeded weights: they are valid models, and their outputs are meaningful.

mod common;

use bytes::Bytes;
use common::{cases, no_files};
use tilewright_graph::networks::NETWORKS;
use tilewright_graph::{Agreement, Bindings, Graph, SplitMix64, Tensor, evaluate, onnx, specialise, summarise};

/// Reads the graph of a file, which must not have problems.
fn graph_of(name: &str, file: Vec<u8>, dims: &[(&str, usize)]) -> Graph {
    let model = onnx::read(&Bytes::from(file), &mut no_files).unwrap_or_else(|error| panic!("{name}: {error}"));
    let dims = dims.iter().map(|(dim, size)| ((*dim).to_owned(), *size)).collect();
    let special = specialise(&model.graph, &Bindings { dims, ..Bindings::default() });
    assert!(special.problems.is_empty(), "{name}: {}", special.problems[0]);
    special.graph
}

/// Evaluates a graph for seeded inputs.
fn answer(graph: &Graph, seed: u64) -> Vec<Tensor> {
    let mut random = SplitMix64::new(seed);
    let input = |&id| (graph.value(id).name.as_str(), random.input(graph.ty(id)));
    let inputs: Vec<(&str, Tensor)> = graph.inputs.iter().map(input).collect();
    evaluate(graph, &inputs).unwrap_or_else(|error| panic!("{}: {error}", graph.name))
}

/// Checks that outputs for two inputs are numbers of reasonable magnitude, and differ.
fn check_answers(name: &str, graph: &Graph) {
    let (one, other) = (answer(graph, 1), answer(graph, 2));
    let agreement = Agreement::of_all(&one, &other).expect("one model gives one shape");
    assert!(agreement.max_error > 0.01, "{name} answers the same to two inputs: {agreement:?}");
    for tensor in one {
        let numbers = tensor.floats();
        let largest = numbers.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
        assert!(numbers.iter().all(|x| x.is_finite()) && (1e-3..1e3).contains(&largest), "{name}: {largest}");
    }
}

#[test]
fn networks_are_models_of_known_size() {
    // GFLOP of convolutions, products and recurrent networks, and millions of parameters, from the
    // literature; for the language model at one step.
    let known = [
        ("resnet18", 3.63, 11.7),
        ("mobilenet", 1.14, 4.2),
        ("lstm", 0.00528, 4.65),
        ("dqn", 0.0187, 1.69),
        ("dcgan", 0.83, 12.7),
    ];
    assert_eq!(NETWORKS.iter().map(|row| row.name).collect::<Vec<_>>(), known.map(|(name, ..)| name));
    for (network, (name, gflop, millions)) in NETWORKS.iter().zip(known) {
        let file = network.build(0);
        let dims: &[_] = if name == "lstm" { &[("steps", 1)] } else { &[] };
        let graph = graph_of(name, onnx::write(&file), dims);
        let found = summarise(&graph).flops() as f64 / 1e9;
        assert!((found / gflop - 1.0).abs() < 0.02, "{name}: {found} GFLOP");
        let parameters = file.weights.iter().map(|(_, tensor)| tensor.n_elements()).sum::<usize>() as f64 / 1e6;
        assert!((parameters / millions - 1.0).abs() < 0.02, "{name}: {parameters} million parameters");
        check_answers(name, &graph);
    }
}

#[test]
fn weights_come_from_the_seed() {
    let dqn = NETWORKS.iter().find(|row| row.name == "dqn").expect("a network");
    assert_eq!(dqn.build(7), dqn.build(7));
    assert_ne!(dqn.build(7).weights, dqn.build(8).weights);
}

#[test]
fn new_weights_make_a_topology_answer() {
    for case in cases("light.cases.gz") {
        if !["shufflenet", "squeezenet"].contains(&case.name.as_str()) {
            continue;
        }
        let new = |seed| onnx::reweight(&case.model, &mut no_files, seed).expect("a model");
        let file = new(1);
        assert!(file == new(1) && file != new(2), "{}: weights come from the seed", case.name);
        let old = onnx::read(&case.model, &mut no_files).expect("a model");
        let graph = graph_of(&case.name, file, &[]);
        check_answers(&case.name, &graph);
        let outputs =
            |graph: &Graph| -> Vec<String> { graph.outputs.iter().map(|&id| graph.value(id).name.clone()).collect() };
        assert_eq!(outputs(&graph), outputs(&old.graph));
        let special = specialise(&old.graph, &Bindings::default());
        assert_eq!(summarise(&graph).tasks, summarise(&special.graph).tasks, "{}", case.name);
    }
}

#[test]
fn what_is_no_model_gets_no_weights() {
    for file in [&b""[..], b"no model", b"\x3a\xff"] {
        let refused = onnx::reweight(&Bytes::from_static(file), &mut no_files, 0);
        assert!(refused.is_err(), "{file:?}");
    }
}
