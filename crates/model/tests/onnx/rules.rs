//! Rewriting rules: each changes something, which the trace records.

use std::collections::BTreeSet;
use std::path::Path;

use tilewright_device::host;
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Graph, Tensor, onnx, specialise};
use tilewright_model::{Trace, lower, rule_names};

use crate::common::{cases, light, no_files};
use crate::quantized::bottleneck;
use crate::{Node, graph_of, weights, whole, with_attention};

fn trace_of(graph: &Graph) -> Trace {
    let special = specialise(graph, &Bindings { fold_bytes: 1 << 8, ..Bindings::default() });
    lower(&light::with_weights(&special.graph), false, &host::target(), 1).unwrap().trace
}

fn shufflenet() -> Trace {
    let case = cases("light.cases.gz").into_iter().find(|case| case.name == "shufflenet").expect("it is there");
    trace_of(&onnx::read(&case.model, &mut no_files).expect("a model").graph)
}

#[test]
fn every_rule_changes_something() {
    let x = weights(&[6, 8]);
    let of = |out: &[usize], known: &[_], nodes: &[Node]| trace_of(&graph_of(("x", &x), ("y", out), known, nodes));
    let ids = |n: usize| whole(&[n, 6], &vec![1; n * 6]);
    let attention =
        with_attention(3, |known, nodes| trace_of(&graph_of(("ids", &ids(3)), ("y", &[3, 6, 8]), known, nodes)));
    let one_hot: &[Node] = &[
        ("numbers", "Reshape", &["ids", "column"], None),
        ("is", "Equal", &["numbers", "places"], None),
        ("rows", "Cast", &["is"], Some(("to", Attribute::Int(1)))),
        ("y", "MatMul", &["rows", "table"], None),
    ];
    let known = [
        ("table", weights(&[5, 8])),
        ("column", whole(&[3], &[1, 6, 1])),
        ("places", whole(&[1, 1, 5], &[0, 1, 2, 3, 4])),
    ];
    let one_hot = trace_of(&graph_of(("ids", &ids(1)), ("y", &[1, 6, 8]), &known, one_hot));
    let square: &[Node] = &[
        ("back", "Transpose", &["x"], None),
        ("product", "MatMul", &["x", "back"], None),
        ("y", "Relu", &["product"], None),
    ];
    let moved: &[Node] = &[
        ("product", "MatMul", &["x", "w"], None),
        ("back", "Transpose", &["product"], None),
        ("y", "Relu", &["back"], None),
    ];
    let same: &[Node] = &[("same", "Expand", &["x", "shape"], None), ("y", "Relu", &["same"], None)];
    let parts: &[Node] = &[
        ("a", "Slice", &["x", "none", "two"], None),
        ("b", "Slice", &["x", "two", "five"], None),
        ("joined", "Concat", &["a", "b"], Some(("axis", Attribute::Int(0)))),
        ("y", "Relu", &["joined"], None),
    ];
    let places = [("none", 0), ("two", 2), ("five", 5)].map(|(name, at)| (name, whole(&[1], &[at])));
    // Pairs of queries share keys, which are scaled.
    let sharing: &[Node] = &[
        ("first", "Slice", &["x", "zero", "four"], None),
        ("q", "Reshape", &["first", "of_q"], None),
        ("k", "Reshape", &["x", "of_k"], None),
        ("twice", "Expand", &["k", "times"], None),
        ("keys", "Reshape", &["twice", "of_keys"], None),
        ("turned", "Transpose", &["keys"], Some(("perm", Attribute::Ints(vec![0, 1, 3, 2])))),
        ("scaled", "Mul", &["turned", "half"], None),
        ("y", "MatMul", &["q", "scaled"], None),
    ];
    let shapes = [
        ("zero", whole(&[1], &[0])),
        ("four", whole(&[1], &[4])),
        ("of_q", whole(&[4], &[1, 4, 1, 8])),
        ("of_k", whole(&[5], &[1, 2, 1, 3, 8])),
        ("times", whole(&[5], &[1, 1, 2, 1, 1])),
        ("of_keys", whole(&[4], &[1, 4, 3, 8])),
        ("half", Tensor::from_floats(DType::F32, Vec::new(), &[0.5])),
    ];
    let pixels: &[Node] = &[
        ("image", "Reshape", &["x", "shape"], None),
        ("bytes", "QuantizeLinear", &["image", "step"], None),
        ("pixels", "DepthToSpace", &["bytes"], Some(("blocksize", Attribute::Int(2)))),
        ("y", "DequantizeLinear", &["pixels", "step"], None),
    ];
    let step = Tensor::from_floats(DType::F32, Vec::new(), &[0.1]);
    let of_pixels = [("shape", whole(&[4], &[1, 8, 2, 3])), ("step", step)];
    let channels = trace_of(&bottleneck(&weights(&[1, 16, 7, 8]), 8));
    let traces = [
        channels,
        of(&[1, 2, 4, 6], &of_pixels, pixels),
        of(&[1, 4, 1, 3], &shapes, sharing),
        attention,
        one_hot,
        shufflenet(),
        of(&[6, 6], &[], square),
        of(&[5, 8], &places, parts),
        of(&[4, 6], &[("w", weights(&[8, 4]))], moved),
        of(&[6, 8], &[("shape", whole(&[2], &[6, 8]))], same),
    ];
    let applied: BTreeSet<&str> = traces.iter().flat_map(|trace| &trace.0).map(|applied| applied.rule).collect();
    let idle: Vec<&str> = rule_names().into_iter().filter(|name| !applied.contains(name)).collect();
    assert!(idle.is_empty(), "{idle:?} changed nothing");
}

#[test]
fn a_trace_tells_what_each_rule_changed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/onnx/shufflenet.trace");
    let found = shufflenet().text();
    if std::env::var_os("BLESS").is_some() {
        return std::fs::write(path, found).unwrap();
    }
    let repro = "repro: cargo test -p tilewright-model --test onnx rules; BLESS=1 rewrites it";
    assert_eq!(found, std::fs::read_to_string(path).unwrap(), "{repro}");
}
