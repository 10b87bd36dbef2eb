//! Products of quantized matrices, to the last bit, by kernels of products.

use tilewright_device::host;
use tilewright_graph::onnx::{ModelFile, NodeFile, Port};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Tensor, onnx, specialise};
use tilewright_model::Runner;
use tilewright_runtime::Threads;

use crate::common::no_files;
use crate::compiled_for;

const M: usize = 9;
const N: usize = 17;
const K: usize = 40;

/// A list of integers that repeats after a number that no size divides.
fn integers(n: usize, least: i128) -> Vec<i128> {
    (0..n).map(|at| (at as i128 * 89) % 251 + least).collect()
}

#[test]
fn columns_of_weights_have_zero_points_of_their_own() {
    let (x, w, zeros, zero) = (integers(M * K, 0), integers(K * N, -125), integers(N, -125), 131);
    let port = |name: &str, dtype: DType, columns: usize| Port {
        name: name.to_owned(),
        dtype,
        dims: vec![Dim::Size(M), Dim::Size(columns)],
    };
    let node = |op: &str, inputs: &[&str], output: &str, attributes: Vec<(String, Attribute)>| NodeFile {
        op: op.to_owned(),
        inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
        outputs: vec![output.to_owned()],
        attributes,
        ..NodeFile::default()
    };
    let model = ModelFile {
        name: "quantized".to_owned(),
        opset: 17,
        inputs: vec![port("x", DType::U8, K)],
        outputs: vec![port("y", DType::F32, N)],
        weights: vec![
            ("w".to_owned(), Tensor::from_integers(DType::I8, [K, N], &w)),
            ("zero".to_owned(), Tensor::from_integers(DType::U8, [0; 0], &[zero])),
            ("zeros".to_owned(), Tensor::from_integers(DType::I8, [N], &zeros)),
        ],
        nodes: vec![
            node("MatMulInteger", &["x", "w", "zero", "zeros"], "sums", Vec::new()),
            node("Cast", &["sums"], "y", vec![("to".to_owned(), Attribute::Int(1))]),
        ],
        ..ModelFile::default()
    };
    let graph = onnx::read(&onnx::write(&model).into(), &mut no_files).unwrap().graph;
    let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
    let labels: Vec<String> = compiled.fused.tasks().iter().map(|(workload, _)| workload.label()).collect();
    assert!(labels.iter().any(|label| label.starts_with("matmul") || label.starts_with("dense")), "{labels:?}");
    let mut runner = Runner::new(&compiled, &Threads::new(1).unwrap()).unwrap();
    runner.set("x", &Tensor::from_integers(DType::U8, [M, K], &x)).unwrap();
    runner.run().unwrap();
    let sum =
        |at: usize| -> i128 { (0..K).map(|k| (x[at / N * K + k] - zero) * (w[k * N + at % N] - zeros[at % N])).sum() };
    let expected: Vec<f64> = (0..M * N).map(|at| sum(at) as f64).collect();
    assert_eq!(runner.outputs()[0].1.floats(), expected);
}
