//! Nodes without code, each with the reason.

use tilewright_graph::{Bindings, DType, Tensor, onnx, specialise};
use tilewright_model::{Kind, import};

use crate::common::build::{Attr, single};
use crate::common::no_files;

fn zeros(dtype: DType, shape: &[usize]) -> Option<Tensor> {
    let n = shape.iter().product();
    Some(match dtype.is_float() {
        true => Tensor::from_floats(dtype, shape, &vec![0.0; n]),
        false => Tensor::from_integers(dtype, shape, &vec![0; n]),
    })
}

/// Checks the reason why an operator with non-constant inputs has no code.
#[track_caller]
fn check(op: &str, opset: i64, attributes: &[(&str, Attr)], inputs: &[Option<Tensor>], expected: &str) {
    let graph = onnx::read(&single(op, opset, attributes, inputs, 1), &mut no_files).unwrap().graph;
    let special = specialise(&graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{op}: {}", special.problems[0]);
    let net = import(&special.graph, true);
    let reasons = net.nodes.iter().filter_map(|node| match &node.kind {
        Kind::Host(host) => Some(format!("{}: {}", node.operator(), host.reason)),
        _ => None,
    });
    assert_eq!(reasons.collect::<Vec<_>>(), [expected]);
}

#[test]
fn sizes_beyond_what_has_code_are_named() {
    let window = [zeros(DType::F32, &[1, 1, 5, 5, 5, 5]), zeros(DType::F32, &[1, 1, 5, 5, 5, 5])];
    check("Conv", 22, &[], &window, "Conv: elements of a window are 625, and there is code for up to 512");
    let (steps, weights) = (zeros(DType::F32, &[16385, 1, 1]), zeros(DType::F32, &[1, 1, 1]));
    let why = "Recurrent: steps of all directions are 16385, and there is code for up to 16384";
    check("RNN", 22, &[("hidden_size", Attr::Int(1))], &[steps, weights.clone(), weights], why);
}

#[test]
fn types_without_code_are_named() {
    let why = "Cast: `y0` is u4, and there is code for integers of 8 to 64 bits";
    check("Cast", 22, &[("to", Attr::Int(21))], &[zeros(DType::F32, &[3])], why);
    let why = "MatMul: `a` is f16, and there is code for f32, f64, booleans and integers (put a Cast ahead of it)";
    check("MatMul", 13, &[], &[zeros(DType::F16, &[2, 3]), zeros(DType::F16, &[3, 2])], why);
}

#[test]
fn attributes_without_code_are_named() {
    let whole = || zeros(DType::I32, &[2, 2]);
    let why = "Gemm: there is no code for integers times fractions";
    check("Gemm", 13, &[("alpha", Attr::Float(0.5))], &[whole(), whole()], why);
}
