//! Tests of invalid models, of weights in all possible forms, and of shape inference.

mod common;

use bytes::Bytes;
use common::build::{Attr, declared, field, int, model, node, node_of, single, tensor, varint};
use common::{agree, no_files};
use tilewright_graph::{
    Bindings, DType, Graph, Tensor, TensorType, evaluate, onnx, problems_text, refused, specialise, summarise,
};

/// Encodes an integer as a scalar tensor.
fn scalar(name: &str, x: i128) -> Vec<u8> {
    tensor(name, &Tensor::from_integers(DType::I64, [], &[x]))
}

fn read(file: &Bytes) -> Result<Graph, String> {
    onnx::read(file, &mut no_files).map(|model| model.graph).map_err(|e| e.to_string())
}

/// Reads an initializer: the only constant of a model that returns it.
fn initializer(message: Vec<u8>, external: &mut onnx::External<'_>) -> Result<Tensor, String> {
    let graph = [field(5, message), field(12, field(1, "w"))].concat();
    let model = onnx::read(&model(17, graph), external).map_err(|e| e.to_string())?;
    let id = model.graph.outputs[0];
    Ok(model.graph.value(id).constant.clone().expect("an initializer is a constant"))
}

#[test]
fn elements_are_read_wherever_they_stand() {
    let shape = |n: i64| int(1, n);
    let check = |dtype: DType, data: Vec<u8>, wanted: &[f64]| {
        let message = [shape(wanted.len() as i64), int(2, dtype.to_onnx().into()), field(8, "w"), data].concat();
        let found = initializer(message, &mut no_files).unwrap();
        assert_eq!((found.dtype(), found.floats()), (dtype, wanted.to_vec()));
    };
    let packed = |numbers: &[i64]| numbers.iter().flat_map(|&n| varint(n as u64)).collect::<Vec<_>>();
    check(DType::F32, field(4, [1.5_f32, -2.0].map(f32::to_le_bytes).concat()), &[1.5, -2.0]);
    check(DType::F32, field(9, [1.5_f32, -2.0].map(f32::to_le_bytes).concat()), &[1.5, -2.0]);
    check(DType::F64, field(10, [1.5_f64, -2.0].map(f64::to_le_bytes).concat()), &[1.5, -2.0]);
    check(DType::F16, field(5, packed(&[0x3e00, 0xc000])), &[1.5, -2.0]);
    check(DType::Bf16, field(5, packed(&[0x3fc0, 0xc000])), &[1.5, -2.0]);
    check(DType::F8e4m3fn, field(9, [0x38, 0xc4, 0x01]), &[1.0, -3.0, 2.0_f64.powi(-9)]);
    check(DType::F8e5m2, field(5, packed(&[0x3c, 0xc2])), &[1.0, -3.0]);
    check(DType::I8, field(5, packed(&[-7, 8])), &[-7.0, 8.0]);
    check(DType::U8, field(5, packed(&[255, 8])), &[255.0, 8.0]);
    check(DType::Bool, field(5, packed(&[1, 0])), &[1.0, 0.0]);
    check(DType::I32, [int(5, -3), int(5, 4)].concat(), &[-3.0, 4.0]);
    check(DType::I64, field(7, packed(&[-1 << 40, 4])), &[-(2.0_f64.powi(40)), 4.0]);
    check(DType::U64, field(11, packed(&[5, 6])), &[5.0, 6.0]);
    check(DType::U32, field(11, packed(&[5, 4_000_000_000])), &[5.0, 4e9]);
    // The first of the numbers that share a byte is in its lowest bits.
    check(DType::I4, field(9, [0x8f, 0x07]), &[-1.0, -8.0, 7.0]);
    check(DType::U4, field(9, [0x8f, 0x07]), &[15.0, 8.0, 7.0]);
    check(DType::I4, field(5, packed(&[0x8f, 0x07])), &[-1.0, -8.0, 7.0]);
    check(DType::I2, field(9, [0b01_10_11_00, 0b10]), &[0.0, -1.0, -2.0, 1.0, -2.0]);
    check(DType::U2, field(9, [0b01_10_11_00, 0b10]), &[0.0, 3.0, 2.0, 1.0, 2.0]);
}

#[test]
fn weights_stay_in_the_file() {
    let x = Tensor::from_floats(DType::F32, [2, 3], &[1.0; 6]);
    let graph = [field(5, tensor("w", &x)), field(12, field(1, "w"))].concat();
    let file = model(17, graph);
    let graph = read(&file).unwrap();
    let constant = graph.value(graph.outputs[0]).constant.clone().unwrap();
    assert!(file.as_ptr_range().contains(&constant.bytes().as_ptr()));
    let special = specialise(&graph, &Bindings::default()).graph;
    let constant = special.value(special.outputs[0]).constant.clone().unwrap();
    assert!(file.as_ptr_range().contains(&constant.bytes().as_ptr()));
}

#[test]
fn weights_beside_the_file_are_bounded() {
    let message = |location: &str, offset: &str, length: &str| {
        let entry = |key: &str, value: &str| field(13, [field(1, key), field(2, value)].concat());
        let mut message = [int(1, 2), int(2, 1), field(8, "w"), int(14, 1), entry("location", location)].concat();
        [("offset", offset), ("length", length)]
            .iter()
            .filter(|(_, value)| !value.is_empty())
            .for_each(|(key, value)| message.extend(entry(key, value)));
        message
    };
    let mut beside = |name: &str| match name {
        "weights/a.bin" => Ok(Bytes::from([0.0_f32, 1.5, -2.0].map(f32::to_le_bytes).concat())),
        other => Err(format!("there is no {other}")),
    };
    let found = initializer(message("weights/a.bin", "4", "8"), &mut beside).unwrap();
    assert_eq!(found.floats(), [1.5, -2.0]);
    assert_eq!(initializer(message("weights/a.bin", "", ""), &mut beside).unwrap().floats(), [0.0, 1.5]);
    for (location, offset, length, why) in [
        ("../a.bin", "0", "8", "not below the model's folder"),
        ("weights/../../a.bin", "0", "8", "not below the model's folder"),
        ("/etc/passwd", "0", "8", "not below the model's folder"),
        ("", "0", "8", "not below the model's folder"),
        ("b.bin", "0", "8", "there is no b.bin"),
        ("weights/a.bin", "8", "8", "beyond its 12 bytes"),
        ("weights/a.bin", "18446744073709551615", "8", "beyond its 12 bytes"),
        ("weights/a.bin", "-1", "8", "no number"),
        ("weights/a.bin", "0", "4", "takes 8 bytes, and 4 are there"),
    ] {
        let error = initializer(message(location, offset, length), &mut beside).unwrap_err();
        assert!(error.starts_with("tensor `w`: ") && error.contains(why), "{location} {offset}: {error}");
    }
}

#[test]
fn broken_rules_are_told_in_one_line() {
    let relu = |input: &str, output: &str| node("Relu", &[input], &[output], &[]);
    let x = field(11, declared("x", DType::F32, &[2]));
    let y = field(12, field(1, "y"));
    let check = |graph: Vec<u8>, why: &str| {
        let error = read(&model(17, graph)).unwrap_err();
        assert!(error.contains(why) && !error.contains('\n'), "{error}");
    };
    check([relu("z", "y"), x.clone(), y.clone()].concat(), "node `y` (Relu, opset 17): its input `z` is neither");
    check([relu("x", "y"), relu("x", "y"), x.clone(), y.clone()].concat(), "its output `y` is computed or given twice");
    check([relu("x", "x"), x.clone(), y.clone()].concat(), "its output `x` is computed or given twice");
    check(
        [relu("y", "z"), relu("z", "y"), x.clone(), y.clone()].concat(),
        "(Relu, opset 17): it reads what is computed",
    );
    check([x.clone(), y.clone()].concat(), "its output `y` is computed by no node");
    let negative = [int(1, -2), int(2, 1), field(8, "w")].concat();
    check([field(5, negative), y.clone()].concat(), "negative dimension");
    let large = [int(1, 1 << 40), int(1, 1 << 40), int(2, 1), field(8, "w")].concat();
    check([field(5, large), y.clone()].concat(), "too large");
    let short = [int(1, 2), int(2, 1), field(8, "w"), field(9, [0; 4])].concat();
    check([field(5, short), y.clone()].concat(), "f32[2] takes 8 bytes, and 4 are there");
    assert!(onnx::read(&Bytes::new(), &mut no_files).is_err());
    // Nodes that are not in topological order are sorted.
    let graph = read(&model(17, [relu("z", "y"), relu("x", "z"), x, y].concat())).unwrap();
    assert_eq!(graph.nodes().map(|(_, node)| node.place.node.as_str()).collect::<Vec<_>>(), ["z", "y"]);
}

#[test]
fn weights_among_the_inputs_are_none() {
    let w = Tensor::from_floats(DType::F32, [2], &[1.0, 2.0]);
    let graph = [
        node("Add", &["x", "w"], &["y"], &[]),
        field(5, tensor("w", &w)),
        field(11, declared("w", DType::F32, &[2])),
        field(11, declared("x", DType::F32, &[2])),
        field(12, field(1, "y")),
    ];
    let graph = read(&model(17, graph.concat())).unwrap();
    assert_eq!(graph.inputs.iter().map(|&id| graph.value(id).name.as_str()).collect::<Vec<_>>(), ["x"]);
    let y = evaluate(&graph, &[("x", Tensor::from_floats(DType::F32, [2], &[3.0, 4.0]))]).unwrap();
    assert_eq!(y[0].floats(), [4.0, 6.0]);
}

#[test]
fn shapes_that_are_computed_are_known() {
    // x → Shape → Gather, Unsqueeze, Concat with -1 → Reshape, as converters write it.
    let constant = |name: &str, x: Tensor| node("Constant", &[], &[name], &[("value", Attr::Tensor(x))]);
    let graph = [
        constant("zero", Tensor::from_integers(DType::I64, [], &[0])),
        constant("axes", Tensor::vector(&[0])),
        constant("rest", Tensor::vector(&[-1])),
        node("Shape", &["x"], &["shape"], &[]),
        node("Gather", &["shape", "zero"], &["n"], &[]),
        node("Unsqueeze", &["n", "axes"], &["n1"], &[]),
        node("Concat", &["n1", "rest"], &["wanted"], &[("axis", Attr::Int(0))]),
        node("Reshape", &["x", "wanted"], &["y"], &[]),
        field(11, declared("x", DType::F32, &[-1, 3, 4])),
        field(12, field(1, "y")),
    ];
    let graph = read(&model(17, graph.concat())).unwrap();
    let special = specialise(&graph, &Bindings::default());
    let text = special.problems[0].to_string();
    assert_eq!(text, "sizes of inputs are missing: N (give all, such as --dim N=1)");
    let mut bindings = Bindings::default();
    bindings.bind_dim("N=5").unwrap();
    let special = specialise(&graph, &bindings);
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    let special = special.graph;
    assert_eq!(*special.ty(special.outputs[0]), TensorType::new(DType::F32, [5, 12]));
    // Only the reshape remains.
    assert_eq!(special.nodes().len(), 1);
    assert_eq!(summarise(&special).operators.keys().collect::<Vec<_>>(), ["Reshape"]);
}

#[test]
fn a_known_condition_takes_one_graph() {
    // y = if rate == 16000 { x + x } else { x − w }, with names of the enclosing graph.
    let branch = |op: &str, other: &str, output: &'static str| {
        [node(op, &["x", other], &[output], &[]), field(12, field(1, output))].concat()
    };
    let graph = [
        node("Constant", &[], &["wanted"], &[("value", Attr::Tensor(Tensor::from_integers(DType::I64, [], &[16000])))]),
        node("Equal", &["rate", "wanted"], &["is"], &[]),
        node("Neg", &["x"], &["w"], &[]),
        node(
            "If",
            &["is"],
            &["y"],
            &[
                ("then_branch", Attr::Graph(branch("Add", "x", "inner_a"))),
                ("else_branch", Attr::Graph(branch("Sub", "w", "inner_b"))),
            ],
        ),
        field(11, declared("x", DType::F32, &[2])),
        field(11, declared("rate", DType::I64, &[])),
        field(12, field(1, "y")),
    ];
    let graph = read(&model(16, graph.concat())).unwrap();
    let x = Tensor::from_floats(DType::F32, [2], &[1.0, -3.0]);
    for (rate, wanted, operators) in [(16000, [2.0, -6.0], vec!["Add"]), (8000, [2.0, -6.0], vec!["Neg", "Sub"])] {
        let given = [("x", x.clone()), ("rate", Tensor::from_integers(DType::I64, [], &[rate]))];
        assert_eq!(evaluate(&graph, &given).unwrap()[0].floats(), wanted);
        let mut bindings = Bindings::default();
        bindings.bind_value(&format!("rate={rate}")).unwrap();
        let special = specialise(&graph, &bindings);
        assert!(special.problems.is_empty());
        let found = summarise(&special.graph);
        assert_eq!(found.operators.keys().collect::<Vec<_>>(), operators);
        assert_eq!((found.inputs.len(), found.outputs[0].0.as_str()), (1, "y"));
        assert_eq!(evaluate(&special.graph, &given[..1]).unwrap()[0].floats(), wanted);
    }
}

#[test]
fn what_is_not_supported_says_where() {
    let check = |file: Bytes, wanted: &str| {
        let special = specialise(&read(&file).unwrap(), &Bindings::default());
        let found: Vec<String> = special.problems.iter().map(ToString::to_string).collect();
        assert_eq!(found, [wanted]);
        assert!(special.problems[0].is_unsupported());
    };
    let x = || Some(Tensor::from_floats(DType::F32, [1, 2], &[1.0, 2.0]));
    check(single("Frob", 17, &[], &[x()], 1), "node `y0` (Frob, opset 17): this operator is not supported");
    let attribute = [("speed", Attr::Int(3))];
    let wanted = "node `y0` (Relu, opset 17): attribute `speed` is not supported at this opset";
    check(single("Relu", 17, &attribute, &[x()], 1), wanted);
    let wanted = "node `y0` (Gelu, opset 17): this operator is supported from opset 20 on (convert the model)";
    check(single("Gelu", 17, &[], &[x()], 1), wanted);
    let wanted = "node `y0` (Relu, opset 99): the newest opset that is supported is 28";
    check(single("Relu", 99, &[], &[x()], 1), wanted);
    let wanted =
        "node `y0` (NonZero, opset 17): the shape of its output depends on the data (end the model ahead of it)";
    check(single("NonZero", 17, &[], &[x()], 1), wanted);
}

/// A model is divided where shapes depend on the data, also in a subgraph.
#[test]
fn shapes_of_the_data_divide_a_model() {
    // More than is folded.
    const N: usize = 40_000;
    let places = [node("NonZero", &["y"], &["p"], &[]), field(12, field(1, "p"))].concat();
    let none = [node("Shape", &["y"], &["s"], &[]), field(12, field(1, "s"))].concat();
    let branches = [("then_branch", Attr::Graph(places)), ("else_branch", Attr::Graph(none))];
    let nodes = |last: &str| {
        [
            node("Neg", &["x"], &["y"], &[]),
            node("NonZero", &["x"], &["n"], &[]),
            node("Size", &["n"], &["size"], &[]),
            node("Cast", &["size"], &["any"], &[("to", Attr::Int(9))]),
            node("If", &["any"], &["q"], &branches),
            node(last, &["q"], &["z"], &[]),
            field(11, declared("x", DType::F32, &[N as i64])),
            ["x", "y", "z"].map(|name| field(12, field(1, name))).concat(),
        ]
    };
    let graph = read(&model(17, nodes("Transpose").concat())).unwrap();
    let numbers: Vec<f64> = (0..N).map(|at| (at % 3) as f64).collect();
    let x = Tensor::from_floats(DType::F32, [N], &numbers);
    let part = specialise(&graph, &Bindings::default()).dynamic.unwrap();
    assert_eq!((part.n_nodes(), part.inputs().collect::<Vec<_>>()), (5, vec!["x", "y"]));
    let ahead = evaluate(&part.ahead, &[("x", x.clone())]).unwrap();
    let (names, found): (Vec<String>, Vec<Tensor>) = part.evaluate(&ahead).unwrap().into_iter().unzip();
    assert_eq!((names, found[2].shape()), (vec!["x".into(), "y".into(), "z".into()], &[N - N.div_ceil(3), 1][..]));
    assert_eq!(found, evaluate(&graph, &[("x", x)]).unwrap());
    // With another problem, the graph is not divided.
    let graph = read(&model(17, nodes("Frob").concat())).unwrap();
    assert!(specialise(&graph, &Bindings::default()).dynamic.is_none());
}

/// Data may determine a length as well as a shape.
#[test]
fn lengths_of_the_data_divide_a_model() {
    let nodes = [
        node("ReduceMax", &["x"], &["most"], &[("keepdims", Attr::Int(0))]),
        node("Cast", &["most"], &["n"], &[("to", Attr::Int(7))]),
        node("Range", &["zero", "n", "one"], &["y"], &[]),
        [("zero", 0), ("one", 1)].map(|(name, x)| field(5, scalar(name, x))).concat(),
        field(11, declared("x", DType::F32, &[3])),
        field(12, field(1, "y")),
    ];
    let graph = read(&model(17, nodes.concat())).unwrap();
    let special = specialise(&graph, &Bindings::default());
    let x = Tensor::from_floats(DType::F32, [3], &[1.0, 4.0, 2.0]);
    let part = special.dynamic.unwrap();
    let found = part.evaluate(&evaluate(&part.ahead, &[("x", x)]).unwrap()).unwrap();
    assert_eq!((part.n_nodes(), &found[0].1), (1, &Tensor::vector(&[0, 1, 2, 3])));
}

/// A specialised graph has no sequences, not even those that iterations of a loop extend.
#[test]
fn loops_that_fill_sequences_are_unrolled() {
    let body = [
        node("SequenceInsert", &["before", "x"], &["after"], &[]),
        node("Identity", &["holds"], &["goes_on"], &[]),
        field(11, declared("at", DType::I64, &[])),
        field(11, declared("holds", DType::Bool, &[])),
        field(11, field(1, "before")),
        ["goes_on", "after"].map(|name| field(12, field(1, name))).concat(),
    ];
    let nodes = |last: &[u8]| {
        [
            node("SequenceEmpty", &[], &["none"], &[]),
            node("Loop", &["n", "", "none"], &["all"], &[("body", Attr::Graph(body.concat()))]),
            field(5, scalar("n", 3)),
            field(5, scalar("second", -2)),
            last.to_vec(),
            field(11, declared("x", DType::F32, &[2])),
            field(12, field(1, "y")),
        ]
        .concat()
    };
    let x = Tensor::from_floats(DType::F32, [2], &[1.0, 4.0]);
    let cases = [
        (node("ConcatFromSequence", &["all"], &["y"], &[("axis", Attr::Int(0))]), vec![1.0, 4.0, 1.0, 4.0, 1.0, 4.0]),
        (node("SequenceAt", &["all", "second"], &["y"], &[]), vec![1.0, 4.0]),
        (node("SequenceLength", &["all"], &["y"], &[]), vec![3.0]),
    ];
    for (last, wanted) in cases {
        let special = specialise(&read(&model(17, nodes(&last))).unwrap(), &Bindings::default());
        assert_eq!(special.problems, []);
        let given = special.graph.inputs.iter().map(|_| ("x", x.clone())).collect::<Vec<_>>();
        assert_eq!(evaluate(&special.graph, &given).unwrap()[0].floats(), wanted);
    }
    let problems = |last: &[u8]| specialise(&read(&model(17, nodes(last))).unwrap(), &Bindings::default()).problems;
    let found = problems(&node("Identity", &["all"], &["y"], &[]));
    assert_eq!(found[0].to_string(), "output `y` is a sequence of tensors (let each be an output)");
    let found = problems(&node("Relu", &["all"], &["y"], &[]));
    assert!(found[0].to_string().ends_with("a sequence of tensors is supported only in operators on sequences"));
}

/// An empty dimension has no last element to start from.
#[test]
fn a_slice_from_the_end_of_nothing_is_empty() {
    let numbers = |name: &str, x: i64| field(5, tensor(name, &Tensor::vector(&[x])));
    let nodes = [
        node("Slice", &["x", "start", "end", "axis", "step"], &["y"], &[]),
        [("start", -1), ("end", -99), ("axis", 0), ("step", -1)].map(|(name, x)| numbers(name, x)).concat(),
        field(11, declared("x", DType::F32, &[0, 4])),
        field(12, field(1, "y")),
    ];
    let graph = read(&model(17, nodes.concat())).unwrap();
    let x = Tensor::from_floats(DType::F32, [0, 4], &[]);
    assert_eq!(evaluate(&graph, &[("x", x.clone())]).unwrap(), [x]);
}

/// Unknown operators are reported before their attributes are read.
#[test]
fn unknown_operators_are_told_before_their_attributes_are_read() {
    // Integers of a byte each, which would exceed the memory budget when decoded.
    let numbers = field(5, [field(1, "a"), field(8, vec![1_u8; 16 << 20]), int(20, 7)].concat());
    let of = |domain: &str, name: &str| {
        let call = [field(2, "y"), numbers.clone(), field(4, name), field(7, domain)].concat();
        let file = model(17, [field(1, call), field(12, field(1, "y"))].concat());
        read(&file).map(|graph| specialise(&graph, &Bindings::default()).problems[0].to_string())
    };
    let wanted = "node `y` (some.where.Forest, opset 0): this operator is not supported";
    assert_eq!(of("some.where", "Forest").as_deref(), Ok(wanted));
    assert!(of("", "Relu").is_err(), "those of known ones are read");
}

/// Operators that ONNX Runtime's tools fuse compute the same as the operators that they replace.
#[test]
fn operators_of_onnx_runtime_are_functions() {
    let numbers = |shape: &[usize], seed: usize| {
        let n: usize = shape.iter().product();
        Tensor::from_floats(
            DType::F32,
            shape,
            &(0..n).map(|at| ((at * 7 + seed) % 11) as f64 / 7.0 - 0.7).collect::<Vec<_>>(),
        )
    };
    let known =
        [("w", numbers(&[8, 24], 1)), ("b", numbers(&[24], 2)), ("g", numbers(&[8], 3)), ("o", numbers(&[8], 4))];
    let mask = Tensor::from_integers(DType::I32, [2, 3], &[1, 1, 1, 1, 0, 0]);
    let graph_of = |nodes: &[Vec<u8>]| {
        let mut graph = nodes.concat();
        known.iter().for_each(|(name, x)| graph.extend(field(5, tensor(name, x))));
        graph.extend(field(11, declared("x", DType::F32, &[2, 3, 8])));
        graph.extend(field(11, declared("mask", DType::I32, &[2, 3])));
        graph.extend(field(12, field(1, "y")));
        read(&model(23, graph)).unwrap()
    };
    let given = [("x", numbers(&[2, 3, 8], 5)), ("mask", mask)];
    let theirs = |op: &str, inputs: &[&str], attributes: &[(&str, Attr)]| {
        node_of("com.microsoft", op, inputs, &["y"], attributes)
    };
    let apart = [
        node("MatMul", &["x", "w"], &["p"], &[]),
        node("Add", &["p", "b"], &["s"], &[]),
        node("Split", &["s"], &["q", "k", "v"], &[("axis", Attr::Int(-1)), ("num_outputs", Attr::Int(3))]),
    ];
    let heads = || [("q_num_heads", Attr::Int(2)), ("kv_num_heads", Attr::Int(2))];
    let plain = node("Attention", &["q", "k", "v"], &["y"], &heads());
    let masked = [
        node("Cast", &["mask"], &["is"], &[("to", Attr::Int(9))]),
        node("Constant", &[], &["axes"], &[("value", Attr::Tensor(Tensor::vector(&[1, 2])))]),
        node("Unsqueeze", &["is", "axes"], &["rows"], &[]),
        node("Attention", &["q", "k", "v", "rows"], &["y"], &heads()),
    ];
    let n_heads = [("num_heads", Attr::Int(2))];
    let causal = [("num_heads", Attr::Int(2)), ("unidirectional", Attr::Int(1))];
    let of_causal = [("q_num_heads", Attr::Int(2)), ("kv_num_heads", Attr::Int(2)), ("is_causal", Attr::Int(1))];
    let plain_causal = node("Attention", &["q", "k", "v"], &["y"], &of_causal);
    let epsilon = || [("epsilon", Attr::Float(1e-5))];
    let sum = node("Add", &["x", "x"], &["t"], &[]);
    for (own, plain) in [
        (theirs("Attention", &["x", "w", "b"], &n_heads), [&apart[..], &[plain]].concat()),
        (theirs("Attention", &["x", "w", "b", "mask"], &n_heads), [&apart[..], &masked].concat()),
        (theirs("Attention", &["x", "w", "b"], &causal), [&apart[..], &[plain_causal]].concat()),
        (
            theirs("SkipLayerNormalization", &["x", "x", "g", "o"], &epsilon()),
            vec![sum, node("LayerNormalization", &["t", "g", "o"], &["y"], &epsilon())],
        ),
        (
            theirs("BiasGelu", &["x", "g"], &[]),
            vec![node("Add", &["x", "g"], &["t"], &[]), node("Gelu", &["t"], &["y"], &[])],
        ),
    ] {
        let [found, wanted] = [vec![own], plain].map(|nodes| evaluate(&graph_of(&nodes), &given).unwrap().remove(0));
        agree(&found, &wanted).unwrap();
    }
    let refused = |own: Vec<u8>| specialise(&graph_of(&[own]), &Bindings::default()).problems[0].to_string();
    let rotary = [("num_heads", Attr::Int(2)), ("do_rotary", Attr::Int(1))];
    let said = refused(theirs("Attention", &["x", "w", "b"], &rotary));
    assert!(said.contains("attribute `do_rotary` is not supported"), "{said}");
    let said = refused(theirs("Attention", &["x", "w"], &n_heads));
    assert!(said.contains("(com.microsoft.Attention") && said.contains("not supported with these inputs"), "{said}");
}

/// OpenVINO's quantization to a range of levels is that by a scale and a zero point, if 0 is a level.
#[test]
fn levels_of_a_range_are_those_of_a_scale() {
    let x: Vec<f64> = (0..400).map(|at| f64::from(at - 200) / 8.0 + 0.03).collect();
    let known = [("low", -12.5), ("high", 19.375), ("s", 0.125)].map(|(name, x)| (name, Tensor::scalar(DType::F32, x)));
    let zero = ("z", Tensor::scalar(DType::U8, 100.0));
    let values = |nodes: &[Vec<u8>]| {
        let mut graph = nodes.concat();
        known.iter().chain([&zero]).for_each(|(name, x)| graph.extend(field(5, tensor(name, x))));
        graph.extend([field(11, declared("x", DType::F32, &[400])), field(12, field(1, "y"))].concat());
        let given = [("x", Tensor::from_floats(DType::F32, [400], &x))];
        evaluate(&read(&model(19, graph)).unwrap(), &given).unwrap().remove(0).floats()
    };
    let range = ["x", "low", "high", "low", "high"];
    let levels = [("levels", Attr::Int(256))];
    assert_eq!(
        values(&[node_of("org.openvinotoolkit", "FakeQuantize", &range, &["y"], &levels)]),
        values(&[
            node("QuantizeLinear", &["x", "s", "z"], &["q"], &[]),
            node("DequantizeLinear", &["q", "s", "z"], &["y"], &[]),
        ])
    );
}

/// An LSTM with 8-bit weights multiplies them by inputs, and at each step by states, that are dynamically
/// quantized.
#[test]
fn a_dynamically_quantized_lstm_rounds_inputs_and_states() {
    let cycle = |n: usize, seed: usize| (0..n).map(move |at| ((at * 7 + seed) % 23) as i128);
    let numbers = |shape: &[usize], seed| {
        let x: Vec<f64> = cycle(shape.iter().product(), seed).map(|x| x as f64 / 9.0 - 1.1).collect();
        Tensor::from_floats(DType::F32, shape, &x)
    };
    let bytes = |dtype, shape: &[usize], seed| {
        Tensor::from_integers(dtype, shape, &cycle(shape.iter().product(), seed).collect::<Vec<_>>())
    };
    let (w, r) = (bytes(DType::U8, &[1, 3, 8], 1), bytes(DType::I8, &[1, 2, 8], 2));
    let by_gate: Vec<f64> = (0..8).map(|at| f64::from(1 << (at % 3)) / 64.0).collect();
    // Dequantized weights, transposed.
    let turned = |x: &Tensor, zero: f64, scale: &dyn Fn(usize) -> f64| {
        let (x, n) = (x.floats(), x.shape()[1]);
        let element = |at: usize| (x[at % n * 8 + at / n] - zero) * scale(at / n);
        Tensor::from_floats(DType::F32, [1, 8, n], &(0..8 * n).map(element).collect::<Vec<_>>())
    };
    let known = [
        ("fw", turned(&w, 11.0, &|_| 0.0625)),
        ("fr", turned(&r, 9.0, &|gate| by_gate[gate])),
        ("w", w),
        ("r", r),
        ("b", numbers(&[1, 16], 3)),
        ("sw", Tensor::from_floats(DType::F32, [1], &[0.0625])),
        ("zw", Tensor::from_integers(DType::U8, [1], &[11])),
        ("sr", Tensor::from_floats(DType::F32, [1, 8], &by_gate)),
        ("zr", Tensor::from_integers(DType::I8, [1, 8], &[9; 8])),
    ];
    let x = numbers(&[2, 2, 3], 4);
    let value = |nodes: &[Vec<u8>]| {
        let mut graph = nodes.concat();
        known.iter().for_each(|(name, x)| graph.extend(field(5, tensor(name, x))));
        graph.extend(field(11, declared("x", DType::F32, &[2, 2, 3])));
        graph.extend(field(12, field(1, "y")));
        evaluate(&read(&model(20, graph)).unwrap(), &[("x", x.clone())]).unwrap().remove(0)
    };
    let hidden = [("hidden_size", Attr::Int(2))];
    let given = ["x", "w", "r", "b", "", "", "", "", "sw", "zw", "sr", "zr"];
    let own = node_of("com.microsoft", "DynamicQuantizeLSTM", &given, &["y"], &hidden);
    let rounded = |x: &str, to: &str| {
        let [q, s, z] = ["q", "s", "z"].map(|part| format!("{to}.{part}"));
        let levels = node("DynamicQuantizeLinear", &[x], &[&q, &s, &z], &[]);
        [levels, node("DequantizeLinear", &[&q, &s, &z], &[to], &[])].concat()
    };
    let plain = [
        rounded("x", "all"),
        node("Split", &["all"], &["x0", "x1"], &[("num_outputs", Attr::Int(2))]),
        node("LSTM", &["x0", "fw", "fr", "b"], &["y0", "h0", "c0"], &hidden),
        rounded("h0", "state"),
        node("LSTM", &["x1", "fw", "fr", "b", "", "state", "c0"], &["y1"], &hidden),
        node("Concat", &["y0", "y1"], &["y"], &[("axis", Attr::Int(0))]),
    ];
    agree(&value(&[own]), &value(&plain)).unwrap();
}

/// ONNX Runtime's optimizer writes an operator of a later opset into models, and operators that only fit the
/// CPU on which it ran.
#[test]
fn optimized_models_of_onnx_runtime_are_read_unless_for_one_cpu() {
    let x = Tensor::from_floats(DType::F32, [2, 3], &[1.0, -2.0, 0.5, 4.0, 0.0, 1.5]);
    let scale = Tensor::from_floats(DType::F32, [3], &[1.0, 2.0, 0.5]);
    let value = |opset: i64| {
        let given = [Some(x.clone()), Some(scale.clone())];
        let graph = read(&single("LayerNormalization", opset, &[], &given, 1)).unwrap();
        evaluate(&graph, &[("a", x.clone()), ("b", scale.clone())]).unwrap().remove(0)
    };
    assert_eq!(value(11).floats(), value(17).floats());
    let graph = [node_of("com.microsoft.nchwc", "Conv", &["x", "x"], &["y"], &[]), field(12, field(1, "y"))];
    let graph = [&graph.concat()[..], &field(11, declared("x", DType::F32, &[1, 16, 4, 4]))].concat();
    let said = specialise(&read(&model(17, graph)).unwrap(), &Bindings::default()).problems[0].to_string();
    assert!(said.contains("for one kind of CPU (save it with ORT_ENABLE_EXTENDED at most)"), "{said}");
}

/// Operators that ONNX Runtime's optimizer and quantizer write compute the same as ONNX's own.
#[test]
fn saved_models_of_onnx_runtime_are_read() {
    let cycle = |shape: &[usize], seed: usize| -> Vec<i128> {
        (0..shape.iter().product()).map(|at| ((at * 7 + seed) % 23) as i128).collect()
    };
    let numbers = |shape: &[usize], seed| {
        let x: Vec<f64> = cycle(shape, seed).iter().map(|&x| x as f64 / 9.0 - 1.1).collect();
        Tensor::from_floats(DType::F32, shape, &x)
    };
    let bytes = |shape: &[usize], seed| Tensor::from_integers(DType::U8, shape, &cycle(shape, seed));
    let scalar = |dtype, x: i128| Tensor::from_integers(dtype, [], &[x]);
    let known = [
        ("wt", numbers(&[4, 8], 1)),
        ("wb", numbers(&[8, 2, 4], 2)),
        ("kernel", numbers(&[2, 3, 3, 3], 3)),
        ("bytes", bytes(&[3, 2, 3, 3], 4)),
        ("b", numbers(&[2], 5)),
        ("z", numbers(&[1, 2, 4, 5], 6)),
        ("s", Tensor::scalar(DType::F32, 0.03)),
        ("zero", scalar(DType::U8, 11)),
        ("zero16", scalar(DType::U16, 30_000)),
        ("least", Tensor::scalar(DType::F32, -0.5)),
        ("most", Tensor::scalar(DType::F32, 0.75)),
    ];
    let given = [
        ("x", numbers(&[2, 3, 8], 7)),
        ("rows", numbers(&[3, 8], 8)),
        ("image", numbers(&[1, 3, 4, 5], 9)),
        ("q", bytes(&[1, 4, 5, 2], 10)),
    ];
    let value = |nodes: &[Vec<u8>]| {
        let mut graph = nodes.concat();
        known.iter().for_each(|(name, x)| graph.extend(field(5, tensor(name, x))));
        for (name, x) in &given {
            let shape: Vec<i64> = x.shape().iter().map(|&n| n as i64).collect();
            graph.extend(field(11, declared(name, x.dtype(), &shape)));
        }
        graph.extend(field(12, field(1, "y")));
        // As by Intel's quantizer, the model does not say that it uses ONNX Runtime's operators.
        evaluate(&read(&model(23, graph)).unwrap(), &given).unwrap().remove(0)
    };
    let theirs = |op: &str, inputs: &[&str], attributes: &[(&str, Attr)]| {
        node_of("com.microsoft", op, inputs, &["y"], attributes)
    };
    let turned =
        |x: &str, order: &[i64], y: &str| node("Transpose", &[x], &[y], &[("perm", Attr::Ints(order.to_vec()))]);
    let on = |name: &'static str| (name, Attr::Int(1));
    let pads = || ("pads", Attr::Ints(vec![1, 1, 1, 1]));
    let kernel = || ("kernel_shape", Attr::Ints(vec![3, 3]));
    let last = || turned("t", &[0, 2, 3, 1], "y");
    let first = || turned("q", &[0, 3, 1, 2], "qt");
    for (own, plain) in [
        (
            theirs("FusedMatMul", &["x", "wt"], &[("alpha", Attr::Float(2.0)), on("transB")]),
            vec![
                turned("wt", &[1, 0], "w"),
                node("Add", &["x", "x"], &["t"], &[]),
                node("MatMul", &["t", "w"], &["y"], &[]),
            ],
        ),
        (
            theirs("FusedMatMul", &["x", "x"], &[on("transA")]),
            vec![turned("x", &[0, 2, 1], "t"), node("MatMul", &["t", "x"], &["y"], &[])],
        ),
        (
            // The batch dimension of operand B is between its other two, which are transposed.
            theirs("FusedMatMul", &["x", "wb"], &[on("transBatchB")]),
            vec![turned("wb", &[1, 0, 2], "t"), node("MatMul", &["x", "t"], &["y"], &[])],
        ),
        (
            theirs(
                "FusedGemm",
                &["rows", "wt"],
                &[on("transB"), ("activation", Attr::Text("LeakyRelu")), ("activation_alpha", Attr::Float(0.25))],
            ),
            vec![
                node("Gemm", &["rows", "wt"], &["t"], &[on("transB")]),
                node("LeakyRelu", &["t"], &["y"], &[("alpha", Attr::Float(0.25))]),
            ],
        ),
        (
            theirs(
                "FusedConv",
                &["image", "kernel", "b", "z"],
                &[pads(), ("activation", Attr::Text("Clip")), ("activation_params", Attr::Floats(vec![-0.5, 0.75]))],
            ),
            vec![
                node("Conv", &["image", "kernel", "b"], &["c"], &[pads()]),
                node("Add", &["c", "z"], &["t"], &[]),
                node("Clip", &["t", "least", "most"], &["y"], &[]),
            ],
        ),
        (
            theirs("QuantizeLinear", &["x", "s", "zero16"], &[]),
            vec![node("QuantizeLinear", &["x", "s", "zero16"], &["y"], &[])],
        ),
        (
            theirs("DequantizeLinear", &["q", "s", "zero"], &[]),
            vec![node("DequantizeLinear", &["q", "s", "zero"], &["y"], &[])],
        ),
        (
            theirs("NhwcMaxPool", &["q"], &[kernel(), pads()]),
            vec![first(), node("MaxPool", &["qt"], &["t"], &[kernel(), pads()]), last()],
        ),
        (
            theirs(
                "QLinearConv",
                &["q", "s", "zero", "bytes", "s", "zero", "s", "zero"],
                &[on("channels_last"), pads()],
            ),
            vec![
                first(),
                node("QLinearConv", &["qt", "s", "zero", "bytes", "s", "zero", "s", "zero"], &["t"], &[pads()]),
                last(),
            ],
        ),
        (
            theirs("QLinearGlobalAveragePool", &["q", "s", "zero", "s", "zero"], &[on("channels_last")]),
            vec![
                first(),
                node_of("com.microsoft", "QLinearGlobalAveragePool", &["qt", "s", "zero", "s", "zero"], &["t"], &[]),
                last(),
            ],
        ),
    ] {
        agree(&value(&[own]), &value(&plain)).unwrap();
    }
}

#[test]
fn small_files_do_not_take_much_memory() {
    // Empty nodes of two bytes each, and lists of small numbers: files that would exceed the budget are
    // rejected.
    let many: Vec<u8> = std::iter::repeat_n([0x0a, 0x00], 1 << 21).flatten().collect();
    let error = read(&model(17, field(1, field(5, [field(1, "x"), many.clone()].concat())))).err();
    assert!(error.is_some());
    let error = read(&model(17, many)).unwrap_err();
    assert!(error.contains("more than"), "{error}");
    // The nesting of graphs is limited.
    let mut graph = field(12, field(1, "x"));
    for _ in 0..1000 {
        graph = node("If", &["x"], &["y"], &[("then_branch", Attr::Graph(graph))]);
    }
    graph.extend(field(11, declared("x", DType::Bool, &[])));
    let error = read(&model(17, graph)).unwrap_err();
    assert!(error.contains("deep"), "{error}");
}

#[test]
fn a_node_in_a_graph_of_another_is_named() {
    let branch = |op: &str| [node(op, &["x"], &["z"], &[]), field(12, field(1, "z"))].concat();
    let said = |then: &str, otherwise: &str| {
        let branches = [("then_branch", Attr::Graph(branch(then))), ("else_branch", Attr::Graph(branch(otherwise)))];
        let inputs = [declared("c", DType::Bool, &[1]), declared("x", DType::F32, &[2])];
        let inputs = inputs.into_iter().flat_map(|input| field(11, input));
        let graph = [node("If", &["c"], &["y"], &branches), inputs.collect(), field(12, field(1, "y"))].concat();
        let special = specialise(&read(&model(17, graph)).unwrap(), &Bindings::default());
        special.problems.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let wanted = "node `y` (If, opset 17): node `z` (Frob, opset 17): this operator is not supported";
    assert_eq!(said("Neg", "Frob"), [wanted]);
    // If neither subgraph supports the sizes, the first one's error is reported; if one does, there is no
    // error.
    assert_eq!(said("Det", "Neg"), [""; 0]);
    assert!(said("Det", "Det")[0].starts_with("node `y` (If, opset 17): node `z` (Det, opset 17): "));
}

#[test]
fn all_sizes_that_are_missing_are_told_at_once() {
    let named = |name: &str, dims: &[&str]| {
        let dim = |dim: &&str| field(1, if dim.is_empty() { vec![] } else { field(2, dim) });
        let shape: Vec<u8> = dims.iter().flat_map(dim).collect();
        let ty = field(1, [int(1, DType::F32.to_onnx().into()), field(2, shape)].concat());
        field(11, [field(1, name), field(2, ty)].concat())
    };
    let without = field(11, [field(1, "q"), field(2, field(1, int(1, 1)))].concat());
    let inputs = [named("x", &["N", "", "a b"]), named("z", &["N", "h"]), named("u:0", &["N", ""]), without];
    let graph = [inputs.concat(), node("Relu", &["x"], &["y"], &[]), field(12, field(1, "y"))].concat();
    let graph = read(&model(17, graph)).unwrap();
    let said = |bindings: &Bindings| specialise(&graph, bindings).problems.iter().map(ToString::to_string).collect();
    let mut bindings = Bindings::default();
    let all: Vec<String> = said(&bindings);
    let missing = "N, dimension 1 of `x`, a b, h, dimension 1 of `u:0`, the shape of `q`";
    let options = "--dim N=1 --dim h=1 --shape x=1,1,1 --shape u:0=1,1 --shape q=1";
    assert_eq!(all, [format!("sizes of inputs are missing: {missing} (give all, such as {options})")]);
    // The suggested options bind all sizes.
    for text in ["N=1", "h=1"] {
        bindings.bind_dim(text).unwrap();
    }
    for text in ["x=1,1,1", "u:0=1,1", "q=1"] {
        bindings.bind_shape(text).unwrap();
    }
    let none: Vec<String> = said(&bindings);
    assert_eq!(none, [""; 0]);
}

#[test]
fn what_is_not_supported_is_counted_by_kind() {
    let foo = |from: &str, to: &str| [field(1, from), field(2, to), field(4, "Foo"), field(7, "my.domain")].concat();
    let nodes = [
        field(1, foo("x", "a")),
        field(1, foo("a", "b")),
        node("Bar", &["b"], &["c"], &[]),
        node("Relu", &["x"], &["d"], &[("speed", Attr::Int(1))]),
    ];
    let ends = [field(11, declared("x", DType::F32, &[2])), field(12, field(1, "c")), field(12, field(1, "d"))];
    let graph = read(&model(17, [nodes.concat(), ends.concat()].concat())).unwrap();
    let problems = specialise(&graph, &Bindings::default()).problems;
    let kinds = "2 × Foo (domain my.domain), 1 × Bar: this operator is not supported";
    let relu = "1 × Relu: attribute `speed` is not supported at this opset";
    assert_eq!(problems_text(&problems), format!("{kinds}; {relu}"));
    assert_eq!(problems_text(&problems[..1]), "node `a` (my.domain.Foo, opset 0): this operator is not supported");
    assert_eq!(refused(&problems)[0].nodes, ["a", "b"]);
}

#[test]
fn weights_that_are_inputs_are_defaults() {
    let w = Tensor::from_floats(DType::F32, vec![2], &[1.0, 2.0]);
    let graph = |version: i64| {
        let graph = [
            field(5, tensor("w", &w)),
            field(11, declared("x", DType::F32, &[2])),
            field(11, declared("w", DType::F32, &[2])),
            node("Add", &["x", "w"], &["y"], &[]),
            field(12, field(1, "y")),
        ];
        read(&[int(1, version), field(7, graph.concat()), field(8, int(2, 17))].concat().into()).unwrap()
    };
    let old = graph(3);
    assert_eq!((old.input_names(), old.defaults.len()), (vec!["x"], 0));
    let new = graph(4);
    assert_eq!((new.input_names(), new.inputs.len()), (vec!["x", "w"], 1));
    let sum = |bindings: &Bindings| {
        let special = specialise(&new, bindings);
        assert!(special.problems.is_empty(), "{}", special.problems[0]);
        let x = Tensor::from_floats(DType::F32, vec![2], &[10.0, 20.0]);
        evaluate(&special.graph, &[("x", x)]).unwrap()[0].floats()
    };
    let mut bindings = Bindings::default();
    assert_eq!(sum(&bindings), [11.0, 22.0]);
    bindings.bind_value("w=3,4").unwrap();
    assert_eq!(sum(&bindings), [13.0, 24.0]);
    bindings.bind_shape("w=2").unwrap();
    let said = specialise(&new, &bindings).problems[0].to_string();
    assert_eq!(said, "input `w` has the shape of its default (leave --shape w out)");
}

/// Constants that take gigabytes are refused before they are made, wherever the small ones come from that
/// they are made of.
#[test]
fn gigabytes_are_not_made_of_nothing() {
    let vector = |name: &str, numbers: &[i64]| field(5, tensor(name, &Tensor::vector(numbers)));
    let floats = |name: &str| field(5, tensor(name, &Tensor::from_floats(DType::F32, [4], &[1.0; 4])));
    let check = |nodes: &[Vec<u8>], is_refused: bool| {
        let all = [vector("n", &[1 << 31]), vector("m", &[1 << 20]), vector("k", &[1 << 11]), floats("v")].concat();
        let x = field(11, declared("x", DType::F32, &[1]));
        let graph = [nodes.concat(), all, x, field(12, field(1, "y"))].concat();
        let special = specialise(&read(&model(18, graph)).unwrap(), &Bindings::default());
        let told = problems_text(&special.problems);
        assert_eq!(told.contains("would be a constant of 8192 MiB made of"), is_refused, "{told}");
        assert_eq!(told.is_empty(), !is_refused, "{told}");
    };
    let made = |op: &str, inputs: &[&str]| node(op, inputs, &["y"], &[]);
    check(&[made("ConstantOfShape", &["n"])], true);
    check(&[node("ReduceSum", &["v"], &["w"], &[]), made("Expand", &["w", "n"])], true);
    check(&[node("ConstantOfShape", &["m"], &["c"], &[]), made("Tile", &["c", "k"])], true);
    check(&[node("ConstantOfShape", &["m"], &["c"], &[]), made("Tile", &["x", "m"])], false);
    check(&[made("Expand", &["x", "n"])], false);
    check(&[made("ConstantOfShape", &["m"])], false);
}
