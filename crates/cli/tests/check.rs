//! `check`: what it says of models, and how it refuses.

mod common;

use common::{check_refused, run, run_json, stderr, text};

/// A field of bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    assert!(bytes.len() < 1 << 14, "two bytes of length suffice");
    let length = [bytes.len() as u8 | 0x80, (bytes.len() >> 7) as u8];
    [&[number << 3 | 2][..], &length, bytes].concat()
}

/// A field of a small number.
fn number(number: u8, n: u8) -> Vec<u8> {
    vec![number << 3, n]
}

/// A declared `f32` tensor; names stand for dimensions without a size.
fn tensor(name: &str, dims: &[&str]) -> Vec<u8> {
    let dim = |dim: &&str| field(1, &dim.parse().map_or_else(|_| field(2, dim.as_bytes()), |n| number(1, n)));
    let shape: Vec<u8> = dims.iter().flat_map(dim).collect();
    let ty = field(1, &[number(1, 1), field(2, &shape)].concat());
    [field(1, name.as_bytes()), field(2, &ty)].concat()
}

fn node(op: &str, inputs: &[&str], output: &str) -> Vec<u8> {
    let inputs = inputs.iter().flat_map(|name| field(1, name.as_bytes())).collect::<Vec<u8>>();
    [inputs, field(2, output.as_bytes()), field(4, op.as_bytes())].concat()
}

/// `y = op(relu(x·w))`, of opset 17.
fn model(op: &str) -> Vec<u8> {
    let weights = [number(1, 3), number(1, 2), number(2, 1), field(8, b"w"), field(9, &[0; 24])].concat();
    let graph = [
        field(1, &node("MatMul", &["x", "w"], "product")),
        field(1, &node("Relu", &["product"], "positive")),
        field(1, &node(op, &["positive"], "y")),
        field(5, &weights),
        field(11, &tensor("x", &["N", "3"])),
        field(12, &tensor("y", &["N", "2"])),
    ];
    [number(1, 8), field(2, b"by hand"), field(7, &graph.concat()), field(8, &number(2, 17))].concat()
}

#[test]
fn a_model_is_described() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.onnx");
    std::fs::write(&path, model("Sigmoid")).unwrap();
    let found = run_json(&["check", text(&path), "--dim", "N=5"]);
    assert_eq!(found["supported"], true);
    assert_eq!(found["unsupported"], serde_json::json!([]));
    assert_eq!(found["inputs"], serde_json::json!([{"name": "x", "dtype": "f32", "shape": [5, 3]}]));
    assert_eq!(found["outputs"], serde_json::json!([{"name": "y", "dtype": "f32", "shape": [5, 2]}]));
    assert_eq!(found["operators"], serde_json::json!({"MatMul": 1, "Relu": 1, "Sigmoid": 1}));
    assert_eq!((&found["parameter_bytes"], &found["nodes"]), (&24.into(), &3.into()));
    assert_eq!(found["gflop"].as_f64(), Some(60e-9));
    let task = serde_json::json!({"kind": "matmul", "sizes": "m=5 n=2 k=3", "gflop": 60e-9, "count": 1});
    assert_eq!(found["tasks"], serde_json::json!([task]));
    assert_eq!(found["tuned_kernels"], serde_json::Value::Null);

    // With a database it says how much of the model is tuned there.
    let db = folder.path().join("records.db");
    let check = ["check", text(&path), "--dim", "N=5", "--db", text(&db)];
    let before = run_json(&check);
    assert_eq!(before["tuned_kernels"], 0);
    for task in before["run"]["tasks"].as_array().unwrap() {
        run_json(&["tune", task["workload"].as_str().unwrap(), "--trials", "1", "--no-race", "--db", text(&db)]);
    }
    let n = before["run"]["tasks"].as_array().unwrap().len();
    assert_eq!(run_json(&check)["tuned_kernels"], n);
    let output = run(&check);
    assert!(String::from_utf8_lossy(&output.stdout).contains(&format!("{n} of {n} kernel")), "{}", stderr(&output));
    let shown = run(&["check", text(&path), "--shape", "x=5,3"]);
    assert!(shown.status.success(), "{}", stderr(&shown));
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("f32[5,3]") && shown.contains("matmul m=5 n=2 k=3"), "{shown}");
}

#[test]
fn what_is_not_supported_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("foreign.onnx");
    std::fs::write(&path, model("Frobnicate")).unwrap();
    let output = run(&["check", text(&path), "--dim", "N=1", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["supported"], false);
    let line = found["unsupported"][0].as_str().unwrap();
    assert!(line.starts_with("node `y` (Frobnicate, opset 17): "), "{line}");
    assert_eq!(found["tasks"][0]["sizes"], "m=1 n=2 k=3");
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
}

#[test]
fn what_is_no_model_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        text(&path).to_owned()
    };
    let whole = model("Sigmoid");
    let good = at("good.onnx", &whole);
    check_refused(&["check", "/no/such/file"], "give an ONNX model");
    check_refused(&["check", &at("empty", &[])], "no graph");
    check_refused(&["check", &at("text", b"this is no model at all")], "no ONNX model");
    check_refused(&["check", &at("half", &whole[..whole.len() / 2])], "cut off");
    check_refused(&["check", &good], "dimension 0 of input `x` has no size (give --dim N=SIZE");
    check_refused(&["check", &good, "--dim", "M=1"], "no input has a dimension `M` (there are N)");
    check_refused(&["check", &good, "--dim", "N"], "--dim N=1");
    check_refused(&["check", &good, "--shape", "x=1,4"], "does not fit the model's [N,3]");
    check_refused(&["check", &good, "--shape", "z=1,4"], "there is no input `z` (there are x)");
    check_refused(&["check", &good, "--dim", "N=2", "--set", "x=1"], "give as many");
}
