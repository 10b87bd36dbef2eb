//! `check`: reports on models, and refusals.

mod common;

use common::{check_refused, run, run_json, stderr, text};

/// ONNX field of bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    assert!(bytes.len() < 1 << 14, "two bytes of length suffice");
    let length = [bytes.len() as u8 | 0x80, (bytes.len() >> 7) as u8];
    [&[number << 3 | 2][..], &length, bytes].concat()
}

/// ONNX field of a small number.
fn number(number: u8, n: u8) -> Vec<u8> {
    vec![number << 3, n]
}

/// Declared `f32` tensor; names stand for dimensions without a size.
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

/// Model `y = op(relu(x·w))`, of opset 17.
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
fn a_batch_and_its_texts_are_open_by_any_of_their_names() {
    let graph = [
        field(1, &node("Add", &["x", "mask"], "y")),
        field(11, &tensor("x", &["a", "t", "4"])),
        field(11, &tensor("mask", &["b", "t", "4"])),
        field(12, &tensor("y", &["a", "t", "4"])),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("two.onnx");
    std::fs::write(&path, [number(1, 8), field(7, &graph.concat()), field(8, &number(2, 17))].concat()).unwrap();
    fn with<'a>(path: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        [&["run", path, "--runs", "1"], more].concat()
    }
    // The batches of both inputs broadcast or are the same: with several names one is enough, in any order.
    for more in [["--dim", "a=1..4", "--dim", "t=1..8"], ["--dim", "t=1..8", "--dim", "a,b=1..4"]] {
        let at = ["--at", "a=2,4", "--at", "t=3,8"];
        let output = run(&with(text(&path), &[&more[..], &at].concat()));
        let (lines, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{said}");
        for line in ["y  f32[4,8,4]\n", "\na=2, t=3: ", "\na=2, t=8: ", "\na=4, t=3: ", "\na=4, t=8: "] {
            assert!(lines.contains(line), "{line}: {lines}");
        }
        assert_eq!(said.contains("b is a: "), !more.contains(&"a,b=1..4"), "{said}");
    }
    let sizes = |more: &[&str]| {
        let found = run_json(&with(text(&path), more));
        found["sizes"].as_array().unwrap().iter().map(|own| own["at"].clone()).collect::<Vec<_>>()
    };
    let at = ["--dim", "a=1..4", "--dim", "t=1..8", "--at", "a=4", "--at", "t=3,8"];
    assert_eq!(sizes(&at), [serde_json::json!({"a": 4, "t": 3}), serde_json::json!({"a": 4, "t": 8})]);
    // A number of texts beside any number of their words.
    assert_eq!(sizes(&["--dim", "a,b=3", "--dim", "t=1..8", "--at", "5"]), [serde_json::json!({"t": 5})]);
    let refused = |more: &[&str], expected: &str| check_refused(&with(text(&path), more), expected);
    refused(&["--dim", "a,b=1..4", "--dim", "t=1..8", "--at", "c=3"], "--at c: no such dimension is open");
    refused(&["--dim", "a,b=1..4", "--dim", "t=1..8", "--at", "9"], "--at 9: t is one of 1..8");
    refused(&["--dim", "a,c=1..4", "--dim", "t=1..8"], "no input has a dimension `c`");
    refused(&["--dim", "a=1..4", "--dim", "b=1..4", "--dim", "t=3"], "cannot both be open");
    refused(&["--dim", "a=1..4", "--dim", "b=1..4", "--dim", "t=1..3"], "are open already (give a number)");
}

#[test]
fn a_length_of_inputs_is_open_beside_a_past() {
    let axis = [field(1, b"axis"), number(3, 2), vec![0xA0, 1, 2]].concat();
    let concat = [node("Concat", &["past", "x"], "present"), field(5, &axis)].concat();
    let with_inputs = |more: &[Vec<u8>]| {
        let graph = [
            field(1, &concat),
            field(1, &node("Neg", &["keys"], "z")),
            field(11, &tensor("x", &["batch", "1", "1", "4"])),
            field(11, &tensor("past", &["batch", "1", "p", "4"])),
            field(11, &tensor("keys", &["batch", "1", "n", "4"])),
            field(12, &tensor("present", &["batch", "1", "all", "4"])),
            field(12, &tensor("z", &["batch", "1", "n", "4"])),
        ];
        [number(1, 8), field(7, &[&graph[..], more].concat().concat()), field(8, &number(2, 17))].concat()
    };
    let masked = [field(1, &node("Neg", &["mask"], "seen")), field(11, &tensor("mask", &["batch", "n"]))];
    let masked = [&masked[..], &[field(12, &tensor("seen", &["batch", "n"]))]].concat();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("decoder.onnx");
    let path = text(&path);
    fn run_at<'a>(path: &'a str, more: &[&'a str]) -> serde_json::Value {
        run_json(&[&["run", path, "--runs", "1", "--at", "n=3", "--at", "p=2"], more].concat())
    }
    let check = |found: serde_json::Value, at: serde_json::Value, n_items: usize| {
        assert_eq!(found["sizes"][0]["at"], at);
        assert_eq!(found["outputs"][0]["shape"], serde_json::json!([n_items, 1, 3, 4]));
    };
    std::fs::write(path, with_inputs(&[])).unwrap();
    // The past begins at 0, in any order.
    for dims in [["--dim", "p=0..7", "--dim", "n=1..8"], ["--dim", "n=1..8", "--dim", "p=0..7"]] {
        let at = serde_json::json!({"n": 3, "p": 2});
        check(run_at(path, &[&["--dim", "batch=1"][..], &dims].concat()), at, 1);
    }
    let three = run_at(path, &["--dim", "n=1..8", "--dim", "batch=1..2", "--dim", "p=0..7", "--at", "batch=2"]);
    check(three, serde_json::json!({"batch": 2, "n": 3, "p": 2}), 2);
    // The state is compared with the first output, which it is in the model.
    let bench = ["bench", path, "--dim", "batch=1", "--dim", "n=3", "--dim", "p=0..3", "--against", "onnxruntime"];
    let measured = run_json(&[&bench[..], &["--rounds", "1"]].concat());
    let ours = measured["rows"].as_array().unwrap().iter().filter(|row| row["impl"] == "tilewright");
    assert!(ours.clone().count() > 1 && ours.clone().all(|row| row["max_error"] == 0.0), "{measured}");
    let alike = ["run", path, "--dim", "batch=1", "--dim", "p=1..8", "--dim", "n=1..8"];
    // Or it is the only one of caches alone.
    std::fs::write(path, with_inputs(&masked)).unwrap();
    check(run_at(path, &alike[2..]), serde_json::json!({"n": 3, "p": 2}), 1);
}

#[test]
fn what_depends_on_counts_of_the_data_is_evaluated_behind_the_kernels() {
    let graph = [
        field(1, &node("Neg", &["x"], "opposite")),
        field(1, &node("NonZero", &["opposite"], "places")),
        field(1, &node("Transpose", &["places"], "rows")),
        field(1, &node("GatherND", &["opposite", "rows"], "all")),
        field(1, &node("Tanh", &["all"], "bounded")),
        field(11, &tensor("x", &["100", "90", "10"])),
        field(12, &field(1, b"rows")),
        field(12, &tensor("opposite", &["100", "90", "10"])),
        field(12, &field(1, b"bounded")),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (path, db) = (folder.path().join("places.onnx"), folder.path().join("records.db"));
    std::fs::write(&path, [number(1, 8), field(7, &graph.concat()), field(8, &number(2, 17))].concat()).unwrap();
    let (path, db) = (text(&path), text(&db));
    let folder_of_outputs = folder.path().join("outputs");
    let found = run_json(&["run", path, "--db", db, "--runs", "1", "-o", text(&folder_of_outputs)]);
    let shape = |at: usize| (found["outputs"][at]["name"].clone(), found["outputs"][at]["shape"].clone());
    // Inputs that are not given are random, and never zero.
    assert_eq!(shape(0), ("rows".into(), serde_json::json!([90_000, 3])));
    assert_eq!(shape(1), ("opposite".into(), serde_json::json!([100, 90, 10])));
    let part = &found["dynamic_part"];
    assert_eq!((&found["kernels"], &part["nodes"], &part["kernels"]), (&1.into(), &4.into(), &1.into()));
    let [opposite, bounded] = ["opposite", "bounded"].map(|name| {
        let bytes = std::fs::read(folder_of_outputs.join(format!("{name}.npy"))).unwrap();
        // Elements follow the header.
        bytes[bytes.len() - 4 * 90_000..].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<f32>>()
    });
    let is_close = |(x, y): (&f32, &f32)| (x.tanh() - y).abs() < 1e-5;
    assert!(opposite.iter().zip(&bounded).all(is_close));
    run_json(&["tune", path, "--db", db, "--trials", "2"]);
    let out = folder.path().join("library");
    let refused = ["compile", path, "--as", "c", "-o", text(&out), "--db", db];
    let how = "`run` and `bench` take it at fixed sizes, `compile --ahead` the part ahead of it";
    check_refused(&refused, &format!("what depends on it reads opposite; {how}"));
    let made = run_json(&[&refused[..], &["--ahead"]].concat());
    let outputs = made["library"]["outputs"].as_array().unwrap();
    assert_eq!(outputs.iter().map(|output| output["name"].clone()).collect::<Vec<_>>(), ["opposite"]);
    let whole = folder.path().join("whole.onnx");
    std::fs::write(&whole, model("Neg")).unwrap();
    let refused = ["compile", text(&whole), "--dim", "N=2", "--ahead", "-o", text(&out), "--db", db];
    check_refused(&refused, "--ahead: no shape depends on the data (leave it out)");
}

#[test]
fn attention_to_nothing_is_zero() {
    let graph = [
        field(1, &node("Attention", &["q", "k", "v"], "y")),
        field(11, &tensor("q", &["1", "2", "3", "4"])),
        field(11, &tensor("k", &["1", "2", "0", "4"])),
        field(11, &tensor("v", &["1", "2", "0", "4"])),
        field(12, &tensor("y", &["1", "2", "3", "4"])),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (path, out) = (folder.path().join("nothing.onnx"), folder.path().join("out"));
    std::fs::write(&path, [number(1, 8), field(7, &graph.concat()), field(8, &number(2, 23))].concat()).unwrap();
    run_json(&["run", text(&path), "--runs", "1", "-o", text(&out)]);
    let bytes = std::fs::read(out.join("y.npy")).unwrap();
    assert_eq!(bytes[bytes.len() - 4 * 24..], [0; 4 * 24]);
}

#[test]
fn few_sizes_of_an_image_have_code_of_their_own() {
    let image = |name: &str, height: &str, width: &str| tensor(name, &["1", "1", height, width]);
    let graph = [
        field(1, &node("Conv", &["x", "w"], "y")),
        field(11, &image("x", "height", "width")),
        field(11, &image("w", "3", "3")),
        field(12, &image("y", "h", "w")),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.onnx");
    std::fs::write(&path, [number(1, 8), field(7, &graph.concat()), field(8, &number(2, 17))].concat()).unwrap();
    let (model, sizes) = (text(&path), ["--dim", "height=4..6", "--dim", "width=4..8/2"]);
    let output = run(&[&["run", model, "--runs", "1", "--at", "width=8,6"], &sizes[..]].concat());
    let (lines, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // Code is generated only for sizes that run: two widths at either end of the heights.
    assert!(said.contains("each of 4 sizes of height and width gets code of its own\n"), "{said}");
    assert!(lines.starts_with("y  f32[1,1,4,4]\nheight=4, width=8: "), "{lines}");
    assert!(lines.contains("\nheight=6, width=6: "), "{lines}");
    let library = folder.path().join("library");
    let made = run(&[&["compile", model, "-o", text(&library)], &sizes[..]].concat());
    assert!(made.status.success(), "{}", stderr(&made));
    let build: serde_json::Value = serde_json::from_slice(&std::fs::read(library.join("image.json")).unwrap()).unwrap();
    assert_eq!((build["dims"][1]["name"].as_str(), build["members"].as_array().unwrap().len()), (Some("width"), 9));
    let refused = |more: &[&str], expected: &str| check_refused(&[&["run", model], more].concat(), expected);
    refused(&[&sizes[..], &["--at", "width=5"]].concat(), "--at 5: width is one of 4..8 in steps of 2");
    refused(&["--dim", "height=4..200", "--dim", "width=4..200"], "38809 sizes are more than 128");
    // With more sizes, each width has code for any height.
    let output = run(&["run", model, "--runs", "1", "--dim", "height=4..200", "--dim", "width=4..8/2"]);
    let said = stderr(&output);
    assert!(output.status.success() && said.contains("each of 3 sizes of width gets code of its own\n"), "{said}");
    refused(&["--dim", "height=1..6", "--dim", "width=4"], "height=1");
}

#[test]
fn labels_that_are_texts_are_listed() {
    let texts = [field(6, b"ant"), field(6, b"bee")].concat();
    let names = [number(1, 2), number(2, 8), field(8, b"names"), texts].concat();
    let shape = field(1, &number(1, 5));
    let place = [field(1, b"i"), field(2, &field(1, &[number(1, 7), field(2, &shape)].concat()))].concat();
    let call = node("Gather", &["names", "i"], "label");
    let graph = [field(1, &call), field(5, &names), field(11, &place), field(12, &field(1, b"label"))].concat();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("labels.onnx");
    let model = [number(1, 8), field(7, &graph), field(8, &number(2, 17))].concat();
    std::fs::write(&path, model).unwrap();
    let found = run_json(&["check", text(&path)]);
    assert_eq!(found["labels"], serde_json::json!({"label": ["ant", "bee"]}));
    let said = run(&["check", text(&path)]);
    assert!(String::from_utf8_lossy(&said.stdout).contains("labels of label, by place\n  0  ant\n  1  bee\n"));
}

#[test]
fn nodes_without_code_have_their_reasons() {
    let window = |name: &str| tensor(name, &["1", "1", "5", "5", "5", "5"]);
    let call = node("Conv", &["x", "w"], "y");
    let result = field(12, &tensor("y", &["1", "1", "1", "1", "1", "1"]));
    let graph = [field(1, &call), field(11, &window("x")), field(11, &window("w")), result].concat();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("window.onnx");
    std::fs::write(&path, [number(1, 8), field(7, &graph), field(8, &number(2, 17))].concat()).unwrap();
    let why = "elements of a window are 625, and there is code for up to 512";
    let said = run(&["check", text(&path)]);
    assert!(String::from_utf8_lossy(&said.stdout).contains(&format!("evaluates them\n  y (Conv): {why}\n")));
    let found = run_json(&["check", text(&path)]);
    let node = serde_json::json!({"node": "y", "operator": "Conv", "reason": why});
    assert_eq!(found["run"]["without_code"], serde_json::json!([node]));
    let refused = format!("error: node y (Conv) has no code for a library: {why} (replace it in the model");
    check_refused(&["compile", text(&path), "-o", text(&folder.path().join("library"))], &refused);
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

    // With a database, the report includes the share of the model that is tuned there.
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
    let kind = &found["unsupported_operators"][0];
    assert_eq!((&kind["operator"], &kind["count"]), (&"Frobnicate".into(), &1.into()));
    let said = stderr(&output);
    assert!(said.lines().count() == 1 && said.contains("not supported: 1 × Frobnicate"), "{said}");
    check_refused(&["run", text(&path), "--dim", "N=1"], "node `y` (Frobnicate, opset 17): this operator");
}

#[test]
fn sizes_of_a_range_that_the_model_does_not_take_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pairs.onnx");
    let rows: Vec<u8> = [-1_i64, 6].into_iter().flat_map(i64::to_le_bytes).collect();
    let shape = [number(1, 2), number(2, 7), field(8, b"rows"), field(9, &rows)].concat();
    let graph = [
        field(1, &node("Reshape", &["x", "rows"], "y")),
        field(5, &shape),
        field(11, &tensor("x", &["N", "3"])),
        field(12, &tensor("y", &["M", "6"])),
    ];
    let opset = field(8, &number(2, 17));
    std::fs::write(&path, [number(1, 8), field(7, &graph.concat()), opset].concat()).unwrap();
    let hint = "at N=5 (give a range of sizes that the model takes, such as N=32..512/32)";
    check_refused(&["run", text(&path), "--dim", "N=2..10"], hint);
}

/// Array of `f32` ones in NumPy's format.
fn array(path: &std::path::Path, shape: &[usize]) {
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({sizes}), }}");
    let ones = 1_f32.to_le_bytes().repeat(shape.iter().product());
    std::fs::write(path, [b"\x93NUMPY\x01\0v\0", format!("{header:117}\n").as_bytes(), &ones].concat()).unwrap();
}

#[test]
fn what_is_fed_is_compared_with_what_is_bound() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    std::fs::write(at("m.onnx"), model("Sigmoid")).unwrap();
    let (model, db) = (at("m.onnx"), at("none.db"));
    let input = |name: &str, shape: &[usize]| {
        array(at(name).as_ref(), shape);
        format!("x={}", at(name))
    };
    let (fits, wide, flat) = (input("2x3.npy", &[2, 3]), input("2x4.npy", &[2, 4]), input("3.npy", &[3]));
    let refused = |options: &[&str], expected: &str| {
        let arguments = [&["run", &model, "--db", &db], options].concat();
        check_refused(&arguments, &format!("input x: the file has f32{expected}"));
    };
    let dim = "[2,3], and --dim N=5 is given, which its dimension 0 of 2 is not (leave that out";
    refused(&["--input", &fits, "--dim", "N=5"], dim);
    refused(&["--input", &fits, "--shape", "x=5,3"], "[2,3], and --shape x=5,3 is given (leave that out");
    refused(&["--input", &wide], "[2,4], and the model takes f32[N,3] (its dimension 1 has to be 3, not 4)");
    refused(&["--input", &flat], "[3], and the model takes f32[N,3] (give an array of 2 dimensions)");
    refused(&["--input", &fits, "--set", "x=1"], "[2,3], and --set x gives it as well");
    // The hint binds every unbound dimension once.
    for (options, bound) in
        [(&["--shape", "x=2,3"][..], "--shape x=2,3` or"), (&["--dim", "N=2"], "--dim N=2"), (&[], "--shape x=2,3")]
    {
        let bound = bound.trim_end_matches("` or");
        let output = run(&[&["run", &model, "--db", &db, "--runs", "1", "--input", &fits], options].concat());
        let said = stderr(&output);
        assert!(output.status.success() && said.contains(&format!("m.onnx {bound} --db")), "{said}");
    }
}

#[test]
fn an_initializer_that_is_an_input_may_be_given() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    // y = x · w, where w is 0 unless given.
    let weights = [number(1, 3), number(1, 2), number(2, 1), field(8, b"w"), field(9, &[0; 24])].concat();
    let graph = [
        field(1, &node("MatMul", &["x", "w"], "y")),
        field(5, &weights),
        field(11, &tensor("x", &["2", "3"])),
        field(11, &tensor("w", &["3", "2"])),
        field(12, &tensor("y", &["2", "2"])),
    ];
    let bytes = [number(1, 8), field(7, &graph.concat()), field(8, &number(2, 17))].concat();
    std::fs::write(at("d.onnx"), bytes).unwrap();
    let (model, db) = (at("d.onnx"), at("none.db"));
    let found = run_json(&["check", &model]);
    assert_eq!(found["inputs"].as_array().unwrap().len(), 1);
    let optional = serde_json::json!([{"name": "w", "dtype": "f32", "shape": [3, 2]}]);
    assert_eq!(found["optional_inputs"], optional);
    array(at("x.npy").as_ref(), &[2, 3]);
    array(at("w.npy").as_ref(), &[3, 2]);
    let (x, w) = (format!("x={}", at("x.npy")), format!("w={}", at("w.npy")));
    let y = |options: &[&str]| {
        let run = ["run", &model, "--db", &db, "--runs", "1", "--input", &x, "-o", text(folder.path())];
        run_json(&[&run, options].concat());
        let bytes = std::fs::read(at("y.npy")).unwrap();
        let (elements, _) = bytes[bytes.len() - 16..].as_chunks::<4>();
        elements.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<_>>()
    };
    assert_eq!(y(&[]), [0.0; 4]);
    assert_eq!(y(&["--input", &w]), [3.0; 4]);
    assert_eq!(y(&["--set", "w=1,2,1,2,1,2"]), [3.0, 6.0, 3.0, 6.0]);
    check_refused(&["run", &model, "--input", &format!("w={}", at("x.npy"))], "and the model takes f32[3,2]");
    check_refused(&["run", &model, "--input", &format!("v={}", at("x.npy"))], "no input `v` (there are x, w)");
    check_refused(&["bench", &model, "--input", &w], "input w: peers run with the model's default");
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
    check_refused(&["check", &at("empty", &[])], "it is empty");
    check_refused(&["check", &at("text", b"this is no model at all")], "not an ONNX model");
    check_refused(&["check", &at("half", &whole[..whole.len() / 2])], "it is cut off: its graph ends at byte");
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";
    check_refused(&["check", &at("pointer.onnx", pointer.as_bytes())], "(run `git lfs pull`");
    check_refused(&["check", &at("page.onnx", b"<!DOCTYPE html>\n<html></html>")], "an HTML page");
    let given = format!("x={}", at("pointer.npy", pointer.as_bytes()));
    check_refused(&["run", &good, "--input", &given], "(run `git lfs pull`");
    let digit = at("3d-net.onnx", &whole);
    let output = text(folder.path());
    check_refused(&["compile", &digit, "--dim", "N=2", "-o", output], "`3d-net` makes no C identifier");
    check_refused(&["compile", &digit, "--dim", "N=2", "-o", output], "(give --name NAME: ");
    check_refused(
        &["compile", &digit, "--dim", "N=2", "-o", output, "--name", "3d"],
        "--name `3d` is not a C identifier",
    );
    check_refused(&["check", &good], "sizes of inputs are missing: N (give all, such as --dim N=1)");
    check_refused(&["check", &good, "--dim", "M=1"], "no input has a dimension `M` (there are N)");
    check_refused(&["check", &good, "--dim", "N"], "--dim N=1");
    check_refused(&["check", &good, "--shape", "x=1,4"], "does not fit the model's [N,3]");
    check_refused(&["check", &good, "--shape", "z=1,4"], "there is no input `z` (there are x)");
    check_refused(&["check", &good, "--dim", "N=2", "--set", "x=1,2"], "give as many");
}
