//! Loops and scans: their values and types, and the reasons why some are rejected.

mod common;

use bytes::Bytes;
use common::build::{Attr, declared, field, model, node};
use common::no_files;
use tilewright_graph::{Bindings, DType, Op, Tensor, TensorType, evaluate, onnx, specialise};

/// Input of a graph: name, type and dimensions.
type In<'a> = (&'a str, DType, &'a [i64]);

fn graph(nodes: &[Vec<u8>], inputs: &[In], outputs: &[&str]) -> Vec<u8> {
    let inputs = inputs.iter().map(|(name, dtype, dims)| field(11, declared(name, *dtype, dims)));
    let outputs = outputs.iter().map(|name| field(12, field(1, name)));
    [nodes.concat(), inputs.collect::<Vec<_>>().concat(), outputs.collect::<Vec<_>>().concat()].concat()
}

fn known(name: &str, tensor: Tensor) -> Vec<u8> {
    node("Constant", &[], &[name], &[("value", Attr::Tensor(tensor))])
}

fn number(n: i64) -> Tensor {
    Tensor::from_integers(DType::I64, [], &[n.into()])
}

fn truth(holds: bool) -> Tensor {
    Tensor::from_integers(DType::Bool, [], &[holds.into()])
}

fn floats(x: &[f64]) -> Tensor {
    Tensor::from_floats(DType::F32, [x.len()], x)
}

const F: DType = DType::F32;

/// Evaluates a model both directly and specialised; returns the values, and the number of loops in the
/// specialised graph.
fn run(file: &Bytes, given: &[(&str, Tensor)]) -> Result<(Vec<Tensor>, usize), String> {
    let read = onnx::read(file, &mut no_files).map_err(|e| e.to_string())?.graph;
    let special = specialise(&read, &Bindings::default());
    if let Some(problem) = special.problems.first() {
        return Err(problem.to_string());
    }
    let plain = evaluate(&read, given).map_err(|e| e.to_string())?;
    let found = evaluate(&special.graph, given).map_err(|e| e.to_string())?;
    let types: Vec<&TensorType> = special.graph.outputs.iter().map(|id| special.graph.ty(*id)).collect();
    assert_eq!(types, found.iter().map(Tensor::ty).collect::<Vec<_>>());
    assert_eq!(plain, found);
    Ok((found, special.graph.nodes().filter(|(_, node)| matches!(node.op, Op::Loop(_))).count()))
}

/// `y` is `x` with `w` added `n` times, as long as its first element is below `bound`; `r` has all sums.
fn sums(collects: bool) -> Vec<u8> {
    let body = graph(
        &[
            node("Add", &["before", "w"], &["after"], &[]),
            node("Gather", &["after", "zero"], &["first"], &[("axis", Attr::Int(0))]),
            node("Less", &["first", "bound"], &["on"], &[]),
            node("Identity", &["after"], &["row"], &[]),
        ],
        &[("i", DType::I64, &[]), ("c", DType::Bool, &[]), ("before", F, &[2])],
        if collects { &["on", "after", "row"] } else { &["on", "after"] },
    );
    let outputs: &[&str] = if collects { &["y", "r"] } else { &["y"] };
    [
        known("zero", number(0)),
        node("Neg", &["v"], &["w"], &[]),
        node("Loop", &["n", "go", "x"], outputs, &[("body", Attr::Graph(body))]),
        graph(&[], &[("x", F, &[2]), ("v", F, &[2]), ("bound", F, &[])], outputs),
    ]
    .concat()
}

#[test]
fn conditions_of_runs_are_kept() {
    let file = |n: Option<i64>, go: bool, collects: bool| {
        let n = match n {
            Some(n) => known("n", number(n)),
            None => field(11, declared("n", DType::I64, &[])),
        };
        model(17, [known("go", truth(go)), n, sums(collects)].concat())
    };
    let given = |bound: f64, n: Option<i64>| {
        let mut all = vec![("x", floats(&[0.0, 5.0])), ("v", floats(&[-1.0, f64::INFINITY]))];
        all.push(("bound", Tensor::from_floats(F, [], &[bound])));
        all.extend(n.map(|n| ("n", number(n))));
        all
    };
    let low = f64::NEG_INFINITY;
    for (n, bound, sum, last) in [(4, 100.0, 4.0, low), (4, 2.0, 2.0, low), (4, f64::NAN, 1.0, low), (0, 9.0, 0.0, 5.0)]
    {
        let (y, n_loops) = run(&file(Some(n), true, false), &given(bound, None)).unwrap();
        assert_eq!((y[0].floats(), n_loops), (vec![sum, last], usize::from(n > 0)));
        let (y, n_loops) = run(&file(None, true, false), &given(bound, Some(n))).unwrap();
        assert_eq!((y[0].floats(), n_loops), (vec![sum, last], 1));
    }
    // A negative number of iterations counts as 0, as in ONNX Runtime.
    assert_eq!(run(&file(None, true, false), &given(9.0, Some(-3))).unwrap().0[0].floats(), [0.0, 5.0]);
    // A loop without iterations gives no rows.
    let (y, n_loops) = run(&file(Some(4), false, true), &given(9.0, None)).unwrap();
    assert_eq!((y[0].floats(), y[1].ty().to_string(), n_loops), (vec![0.0, 5.0], "f32[0,2]".to_owned(), 0));
    let error = run(&file(Some(4), true, true), &given(9.0, None)).unwrap_err();
    assert!(error.starts_with("node `y` (Loop, opset 17): what it collects has as many rows as"), "{error}");
}

/// A loop of `n` iterations whose body multiplies by a number that doubles each time, and collects.
fn doubling(n: i64) -> Bytes {
    let body = graph(
        &[
            node("Mul", &["x", "k"], &["row"], &[]),
            node("Add", &["k", "k"], &["twice"], &[]),
            node("Identity", &["c"], &["on"], &[]),
        ],
        &[("i", DType::I64, &[1]), ("c", DType::Bool, &[1]), ("k", F, &[1])],
        &["on", "twice", "row"],
    );
    let nodes =
        [known("n", number(n)), node("Loop", &["n", "", "k0"], &["k1", "rows"], &[("body", Attr::Graph(body))])];
    model(17, graph(&nodes, &[("x", F, &[2]), ("k0", F, &[1])], &["k1", "rows"]))
}

#[test]
fn short_loops_are_written_out_and_long_ones_kept() {
    let given = [("x", floats(&[1.0, -3.0])), ("k0", floats(&[1.0]))];
    for (n, n_left) in [(1, 0), (3, 0), (8, 0), (100, 0), (200, 1)] {
        let (found, n_loops) = run(&doubling(n), &given).unwrap();
        assert_eq!((found[0].floats(), n_loops), (vec![2_f64.powi(n as i32) as f32 as f64], n_left), "{n}");
        let wanted: Vec<f64> =
            (0..n as i32).flat_map(|i| [1.0, -3.0].map(|x| (x * 2_f64.powi(i)) as f32 as f64)).collect();
        assert_eq!(found[1].floats(), wanted, "{n}");
    }
}

#[test]
fn a_loop_may_carry_nothing() {
    // The third input would be mistaken for an input of the loop itself.
    let body = graph(
        &[node("Cast", &["i"], &["f"], &[("to", Attr::Int(1))]), node("Mul", &["f", "x"], &["row"], &[])],
        &[("i", DType::I64, &[]), ("c", DType::Bool, &[])],
        &["c", "row"],
    );
    let nodes = [known("n", number(300)), node("Loop", &["n"], &["rows"], &[("body", Attr::Graph(body))])];
    let (found, n_loops) =
        run(&model(17, graph(&nodes, &[("x", F, &[1])], &["rows"])), &[("x", floats(&[2.0]))]).unwrap();
    assert_eq!((found[0].floats(), n_loops), ((0..300).map(|i| f64::from(2 * i)).collect(), 1));
}

#[test]
fn what_grows_is_written_out_where_its_end_is_known() {
    let file = |n: Vec<u8>| {
        let body = graph(
            &[
                node("Concat", &["all", "x"], &["more"], &[("axis", Attr::Int(0))]),
                node("Identity", &["c"], &["on"], &[]),
            ],
            &[("i", DType::I64, &[]), ("c", DType::Bool, &[]), ("all", F, &[-1])],
            &["on", "more"],
        );
        let nodes = [n, node("Loop", &["n", "", "x"], &["y"], &[("body", Attr::Graph(body))])];
        model(17, graph(&nodes, &[("x", F, &[1])], &["y"]))
    };
    let (y, n_loops) = run(&file(known("n", number(20))), &[("x", floats(&[2.0]))]).unwrap();
    assert_eq!((y[0].floats(), n_loops), (vec![2.0; 21], 0));
    let error = run(&file(field(11, declared("n", DType::I64, &[]))), &[]).unwrap_err();
    assert!(
        error.starts_with("node `y` (Loop, opset 17): its carried value 1 is f32[1] and becomes f32[2]; "),
        "{error}"
    );
    let error = run(&file(known("n", number(1 << 40))), &[]).unwrap_err();
    assert!(error.contains("16384 nodes at most"), "{error}");
}

#[test]
fn counters_that_are_known_end_loops() {
    // Doubles from 1 on while below 100: the number of iterations is known, even if the loop also carries an
    // unknown value.
    let body = graph(
        &[
            node("Add", &["k", "k"], &["twice"], &[]),
            node("Less", &["twice", "hundred"], &["on"], &[]),
            node("Add", &["s", "x"], &["t"], &[]),
        ],
        &[("i", DType::I64, &[]), ("c", DType::Bool, &[]), ("k", DType::I64, &[]), ("s", F, &[1])],
        &["on", "twice", "t", "t"],
    );
    let nodes = [
        known("hundred", number(100)),
        known("one", number(1)),
        node("Loop", &["", "", "one", "x"], &["k", "y", "rows"], &[("body", Attr::Graph(body))]),
    ];
    let file = model(17, graph(&nodes, &[("x", F, &[1])], &["k", "y", "rows"]));
    let (found, n_loops) = run(&file, &[("x", floats(&[0.5]))]).unwrap();
    assert_eq!((found[0].i64s(), found[1].floats(), n_loops), (vec![128], vec![4.0], 0));
    assert_eq!(found[2].floats(), [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]);
}

/// A scan of `x` and `z` that adds to a state.
fn scan(attributes: &[(&str, Attr)], dims: [&[i64]; 3], opset: i64) -> Bytes {
    let body = graph(
        &[
            node("Mul", &["a", "b"], &["product"], &[]),
            node("Add", &["s", "product"], &["t"], &[]),
            node("Identity", &["t"], &["row"], &[]),
        ],
        &[("s", F, &[2]), ("a", F, &[2]), ("b", F, &[2])],
        &["t", "row"],
    );
    let mut all = vec![("body", Attr::Graph(body)), ("num_scan_inputs", Attr::Int(2))];
    for (name, value) in attributes {
        let Attr::Ints(list) = value else { unreachable!("lists of integers") };
        all.push((name, Attr::Ints(list.clone())));
    }
    let inputs: &[&str] = if opset < 9 { &["", "s0", "x", "z"] } else { &["s0", "x", "z"] };
    let nodes = [node("Scan", inputs, &["y", "rows"], &all)];
    model(opset, graph(&nodes, &[("s0", F, dims[0]), ("x", F, dims[1]), ("z", F, dims[2])], &["y", "rows"]))
}

#[test]
fn scans_go_along_any_dimension_either_way() {
    let n = |shape: &[usize], from: f64| {
        let n = shape.iter().product::<usize>();
        Tensor::from_floats(F, shape.to_vec(), &(0..n).map(|i| from + i as f64).collect::<Vec<_>>())
    };
    let given = |x: &[usize], z: &[usize]| [("s0", floats(&[0.5, -1.0])), ("x", n(x, 1.0)), ("z", n(z, -2.0))];
    let ints = |list: &[i64]| Attr::Ints(list.to_vec());
    let attributes = [
        ("scan_input_axes", ints(&[0, -1])),
        ("scan_input_directions", ints(&[1, 0])),
        ("scan_output_axes", ints(&[1])),
        ("scan_output_directions", ints(&[1])),
    ];
    let file = scan(&attributes, [&[2], &[3, 2], &[2, 3]], 11);
    let (found, _) = run(&file, &given(&[3, 2], &[2, 3])).unwrap();
    // x is [[1, 2], [3, 4], [5, 6]], scanned in reverse; z is [[−2, −1, 0], [1, 2, 3]], scanned by columns.
    let sums = [[-9.5, 5.0], [-12.5, 13.0], [-12.5, 19.0]];
    assert_eq!(found[0].floats(), sums[2]);
    assert_eq!(found[1].floats(), [sums[2][0], sums[1][0], sums[0][0], sums[2][1], sums[1][1], sums[0][1]]);
    let none = scan(&[], [&[2], &[0, 2], &[0, 2]], 9);
    let (found, _) = run(&none, &given(&[0, 2], &[0, 2])).unwrap();
    assert_eq!((found[0].floats(), found[1].shape()), (vec![0.5, -1.0], &[0, 2][..]));
    // Before opset 9, scans have a batch of sequences.
    let file = scan(&[("directions", ints(&[0, 1]))], [&[2, 2], &[2, 2, 2], &[2, 2, 2]], 8);
    let given = [("s0", n(&[2, 2], 0.0)), ("x", n(&[2, 2, 2], 0.0)), ("z", n(&[2, 2, 2], 1.0))];
    let (found, _) = run(&file, &given).unwrap();
    assert_eq!(found[0].floats(), [2.0, 11.0, 60.0, 85.0]);
    assert_eq!(found[1].floats(), [0.0, 5.0, 2.0, 11.0, 30.0, 43.0, 60.0, 85.0]);
}

#[test]
fn bad_loops_say_where() {
    let check = |file: Bytes, wanted: &str| {
        let special = specialise(&onnx::read(&file, &mut no_files).unwrap().graph, &Bindings::default());
        let found: Vec<String> = special.problems.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains(wanted) && !found[0].contains('\n'), "{}", found[0]);
        found[0].clone()
    };
    let of_loop = |nodes: &[Vec<u8>], inputs: &[&str], outputs: &[&str], gives: &[&str]| {
        let body = graph(nodes, &[("i", DType::I64, &[]), ("c", DType::Bool, &[]), ("a", F, &[2])], gives);
        let nodes = [
            known("n", number(3)),
            known("many", Tensor::vector(&[1, 2])),
            node("Loop", inputs, outputs, &[("body", Attr::Graph(body))]),
        ];
        model(17, graph(&nodes, &[("x", F, &[2])], outputs))
    };
    let half = node("Cast", &["a"], &["b"], &[("to", Attr::Int(7))]);
    let wanted = "node `y` (Loop, opset 17): its carried value 1 is f32, and becomes i64 (cast it)";
    check(of_loop(&[half], &["n", "", "x"], &["y"], &["c", "b"]), wanted);
    let wanted = "node `y` (Loop, opset 17): its graph has 1 outputs, and should have 2 or more";
    check(of_loop(&[], &["n", "", "x"], &["y"], &["c"]), wanted);
    check(of_loop(&[], &["n", "", "x"], &["y", "z"], &["c", "a"]), "it has 2 outputs, and its graph gives 1");
    check(of_loop(&[], &["n", "", "x", "x"], &["y"], &["c", "a"]), "its graph has 3 inputs, and should have 4");
    check(of_loop(&[], &["n", "", "", "x"], &["y"], &["c", "a", "a"]), "its graph has 3 inputs, and should have 4");
    check(of_loop(&[], &["n"], &["y"], &["c", "a"]), "its graph has 3 inputs, and should have 2");
    check(of_loop(&[], &["many", "", "x"], &["y"], &["c", "a"]), "its number of iterations i64[2] is not one integer");
    check(of_loop(&[], &["n", "n", "x"], &["y"], &["c", "a"]), "its condition i64[] is not one truth");
    check(of_loop(&[], &["n", "", "x"], &["y"], &["a", "a"]), "its graph gives f32[2] as condition");
    check(of_loop(&[], &["", "", "x"], &["y"], &["c", "a"]), "it never ends");
    let failing = node("Det", &["a"], &["b"], &[]);
    let found = check(of_loop(&[failing], &["n", "", "x"], &["y"], &["c", "b"]), "node `b` (Det, opset 17)");
    assert!(found.starts_with("node `y` (Loop, opset 17): "), "{found}");
    let ints = |list: &[i64]| Attr::Ints(list.to_vec());
    let of_scan = |name: &str, list: &[i64], wanted: &str| {
        let file = scan(&[(name, ints(list))], [&[2], &[3, 2], &[3, 2]], 11);
        let found = check(file, wanted);
        assert!(found.starts_with("node `y` (Scan, opset 11): "), "{found}");
    };
    of_scan("scan_input_axes", &[0, 2], "axis 2 is not one of 2 dimensions");
    of_scan("scan_output_axes", &[3], "axis 3 is not one of 2 dimensions");
    of_scan("scan_input_axes", &[0], "scan_input_axes has 1 numbers, and not 2");
    of_scan("scan_input_directions", &[0, 2], "scan_input_directions has 2");
    check(scan(&[], [&[2], &[3, 2], &[4, 2]], 11), "its scanned inputs are of 3 and 4 places");
    let body = graph(&[], &[("a", F, &[2])], &["a"]);
    for n in [0, 2] {
        let attributes = [("body", Attr::Graph(body.clone())), ("num_scan_inputs", Attr::Int(n))];
        let nodes = [node("Scan", &["x"], &["y"], &attributes)];
        check(
            model(11, graph(&nodes, &[("x", F, &[3, 2])], &["y"])),
            "num_scan_inputs is not in 1 to 1, the number of its inputs",
        );
    }
}
