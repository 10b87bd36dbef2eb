//! Random and damaged models: read or rejected, without a panic, an endless loop or much memory.

mod common;

use bytes::Bytes;
use common::build::{Attr, declared, field, int, model, node, tensor};
use common::damage::{mutated, read_many};
use common::{cases, no_files};
use rand::RngExt;
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_graph::op::OPERATORS;
use tilewright_graph::{Bindings, DType, Tensor, onnx, specialise};

/// Reads arbitrary bytes, and processes the model if it can be read.
fn survives(bytes: Vec<u8>) {
    if let Ok(model) = onnx::read(&bytes.into(), &mut no_files) {
        let _ = specialise(&model.graph, &Bindings::default());
    }
}

/// Attributes of many operators.
const NAMES: [&str; 36] = [
    "axis",
    "axes",
    "perm",
    "shape",
    "keepdims",
    "kernel_shape",
    "strides",
    "pads",
    "dilations",
    "group",
    "auto_pad",
    "to",
    "value",
    "alpha",
    "beta",
    "gamma",
    "epsilon",
    "mode",
    "num_outputs",
    "split",
    "starts",
    "ends",
    "size",
    "blocksize",
    "k",
    "largest",
    "hidden_size",
    "direction",
    "equation",
    "num_groups",
    "scales",
    "batch_dims",
    "block_size",
    "q_num_heads",
    "kv_num_heads",
    "output_shape",
];

const TEXTS: [&str; 8] = ["SAME_UPPER", "VALID", "linear", "cubic", "bidirectional", "ij,jk->ik", "DCR", "reflect"];

/// Random number for attributes and tensors: mostly small, sometimes extreme.
fn number(random: &mut Xoshiro256PlusPlus) -> i64 {
    match random.random_range(0..12) {
        0 => i64::MIN,
        1 => i64::MAX,
        2 => 1 << random.random_range(8..62),
        _ => random.random_range(-3..6),
    }
}

fn attribute(random: &mut Xoshiro256PlusPlus) -> Attr {
    let n = random.random_range(0..5);
    match random.random_range(0..6) {
        0 => Attr::Ints((0..n).map(|_| number(random)).collect()),
        1 => Attr::Float([0.0, -1.5, f32::NAN, f32::INFINITY, 1e30][random.random_range(0..5)]),
        2 => Attr::Floats(vec![2.0; n]),
        3 => Attr::Text(TEXTS[random.random_range(0..TEXTS.len())]),
        4 => Attr::Tensor(small(random)),
        _ => Attr::Int(number(random)),
    }
}

/// Random tensor of few elements.
fn small(random: &mut Xoshiro256PlusPlus) -> Tensor {
    let types = [DType::F32, DType::I64, DType::I32, DType::Bool, DType::U8, DType::F16];
    let shape: Vec<usize> = (0..random.random_range(0..5)).map(|_| random.random_range(0..4)).collect();
    let n = shape.iter().product();
    match types[random.random_range(0..types.len())] {
        DType::I64 => {
            Tensor::from_integers(DType::I64, shape, &(0..n).map(|_| number(random).into()).collect::<Vec<i128>>())
        }
        dtype => Tensor::from_floats(dtype, shape, &(0..n).map(|at| (at % 3) as f64).collect::<Vec<_>>()),
    }
}

/// Random model of a few nodes with supported operators, whose inputs and attributes rarely fit.
fn random_model(random: &mut Xoshiro256PlusPlus) -> Vec<u8> {
    let rows: Vec<_> = OPERATORS.iter().flat_map(|rows| rows.iter()).collect();
    let mut graph = Vec::new();
    let mut known = vec![String::new()];
    for at in 0..random.random_range(1..5) {
        let name = format!("x{at}");
        let x = small(random);
        if random.random_range(0..3) == 0 {
            let dims: Vec<i64> = x.shape().iter().map(|&d| d as i64).collect();
            graph.extend(field(11, declared(&name, x.dtype(), &dims)));
        } else {
            graph.extend(field(5, tensor(&name, &x)));
        }
        known.push(name);
    }
    for at in 0..random.random_range(1..4) {
        let row = rows[random.random_range(0..rows.len())];
        let n_inputs = (*row.n_inputs.start() + random.random_range(0..3)).min(*row.n_inputs.end()).min(9);
        let inputs: Vec<&str> = (0..n_inputs).map(|_| &*known[random.random_range(0..known.len())]).collect();
        let outputs: Vec<String> = (0..random.random_range(1..4)).map(|out| format!("y{at}{out}")).collect();
        let names: Vec<&str> = outputs.iter().map(String::as_str).collect();
        let attributes: Vec<(&str, Attr)> = (0..random.random_range(0..4))
            .map(|_| (NAMES[random.random_range(0..NAMES.len())], attribute(random)))
            .collect();
        graph.extend(node(row.name, &inputs, &names, &attributes));
        known.extend(outputs);
    }
    graph.extend(field(12, field(1, known.last().expect("there are some"))));
    model(random.random_range(1..29), graph).to_vec()
}

#[test]
fn models_that_may_be_anything_are_refused_without_a_panic() {
    let (node_cases, light, learned) = (cases("node.cases.gz"), cases("light.cases.gz"), cases("ml.cases.gz"));
    let files: Vec<&Bytes> = node_cases.iter().chain(&light).map(|case| &case.model).collect();
    let files: Vec<&&Bytes> = files.iter().filter(|file| file.len() < 3000).collect();
    // A model with weights, which must not raise the limit.
    let weights = Tensor::from_floats(DType::F32, [512, 1024], &vec![0.5; 512 * 1024]);
    let large = [node("MatMul", &["x", "w"], &["y"], &[]), field(11, declared("x", DType::F32, &[4, 512]))].concat();
    let large = model(17, [large, field(5, tensor("w", &weights)), field(12, field(1, "y"))].concat());
    let make = |random: &mut Xoshiro256PlusPlus| match random.random_range(0..1000) {
        0 => mutated(&large, random),
        1..100 => mutated(&learned[random.random_range(0..learned.len())].model, random),
        100..600 => mutated(files[random.random_range(0..files.len())], random),
        600..700 => (0..random.random_range(0..60)).map(|_| random.random()).collect(),
        700..800 => [&int(1, 8)[..], &mutated(&random_model(random), random)].concat(),
        _ => random_model(random),
    };
    read_many(200_000, make, survives);
}
