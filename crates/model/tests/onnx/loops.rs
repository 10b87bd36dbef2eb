//! Loops whose steps are not unrolled, compared with the reference: in this process and as libraries.

use tilewright_model::{OpenError, Step, open_both, open_or_repeat};

use super::libraries::{write_case, wrong_outputs};
use super::*;
use crate::common::build::{Attr, declared, field, model, node};

const F: DType = DType::F32;

/// Input of a graph: name, type and dimensions.
type In<'a> = (&'a str, DType, &'a [i64]);

fn graph(nodes: &[Vec<u8>], inputs: &[In], outputs: &[&str]) -> Vec<u8> {
    let inputs: Vec<u8> =
        inputs.iter().flat_map(|(name, dtype, dims)| field(11, declared(name, *dtype, dims))).collect();
    let outputs: Vec<u8> = outputs.iter().flat_map(|name| field(12, field(1, name))).collect();
    [nodes.concat(), inputs, outputs].concat()
}

fn known(name: &str, tensor: Tensor) -> Vec<u8> {
    node("Constant", &[], &[name], &[("value", Attr::Tensor(tensor))])
}

fn number(n: i64) -> Tensor {
    Tensor::from_integers(DType::I64, [], &[n.into()])
}

fn floats(shape: &[usize], of: impl Fn(usize) -> f64) -> Tensor {
    Tensor::from_floats(F, shape.to_vec(), &(0..shape.iter().product()).map(of).collect::<Vec<_>>())
}

/// Makes a case whose expected outputs are the reference's for the original model.
fn case(name: &str, file: bytes::Bytes, sets: Vec<Vec<Tensor>>) -> Case {
    let read = onnx::read(&file, &mut no_files).unwrap().graph;
    let names: Vec<&str> = read.inputs.iter().map(|&id| read.value(id).name.as_str()).collect();
    let set = |inputs: Vec<Tensor>| {
        let given: Vec<(&str, Tensor)> = names.iter().copied().zip(inputs.iter().cloned()).collect();
        let outputs = evaluate(&read, &given).unwrap();
        (inputs, outputs)
    };
    Case { name: name.to_owned(), model: file.clone(), sets: sets.into_iter().map(set).collect() }
}

/// Makes a model of `h = tanh(x + h·W)` over `n` positions of `x`, from the end, with all states as output; a
/// negative `n` makes the dimension `N`.
fn scan_over(n: i64) -> bytes::Bytes {
    let body = graph(
        &[
            node("MatMul", &["h", "w"], &["hw"], &[]),
            node("Add", &["x_t", "hw"], &["sum"], &[]),
            node("Tanh", &["sum"], &["next"], &[]),
            node("Identity", &["next"], &["row"], &[]),
        ],
        &[("h", F, &[2, 4]), ("x_t", F, &[2, 4])],
        &["next", "row"],
    );
    let attributes = [
        ("body", Attr::Graph(body)),
        ("num_scan_inputs", Attr::Int(1)),
        ("scan_input_axes", Attr::Ints(vec![1])),
        ("scan_input_directions", Attr::Ints(vec![1])),
        ("scan_output_axes", Attr::Ints(vec![1])),
        ("scan_output_directions", Attr::Ints(vec![1])),
    ];
    let nodes = [
        known("w", floats(&[4, 4], |i| (i as f64 * 0.7).sin())),
        node("Scan", &["h0", "x"], &["y", "states"], &attributes),
    ];
    model(16, graph(&nodes, &[("h0", F, &[2, 4]), ("x", F, &[2, n, 4])], &["y", "states"]))
}

fn scan() -> Case {
    let set = vec![floats(&[2, 4], |i| i as f64 * 0.1), floats(&[2, 70, 4], |i| (i as f64 * 0.37).cos())];
    case("scan", scan_over(70), vec![set])
}

/// Makes a greedy decoding loop: `token` is looked up and determines the next one, which may end the loop;
/// `steps` counts, and two tensors are swapped in each iteration.
fn greedy() -> Case {
    let body = graph(
        &[
            node("Gather", &["table", "token"], &["row"], &[("axis", Attr::Int(0))]),
            node("Add", &["row", "a"], &["scores"], &[]),
            node("ArgMax", &["scores"], &["best"], &[("axis", Attr::Int(0)), ("keepdims", Attr::Int(0))]),
            node("Equal", &["best", "end"], &["is_end"], &[]),
            node("Not", &["is_end"], &["on"], &[]),
            node("Add", &["steps", "one"], &["counted"], &[]),
            node("Neg", &["b"], &["negative"], &[]),
        ],
        &[
            ("i", DType::I64, &[]),
            ("c", DType::Bool, &[]),
            ("token", DType::I64, &[]),
            ("steps", DType::I64, &[]),
            ("a", F, &[6]),
            ("b", F, &[6]),
        ],
        &["on", "best", "counted", "negative", "a"],
    );
    let nodes = [
        known("table", floats(&[6, 6], |i| ((i * i) as f64 * 0.61).sin())),
        known("end", number(5)),
        known("one", number(1)),
        known("zero", number(0)),
        node("Neg", &["x"], &["y"], &[]),
        node(
            "Loop",
            &["most", "go", "first", "zero", "x", "y"],
            &["last", "n", "p", "q"],
            &[("body", Attr::Graph(body))],
        ),
    ];
    let inputs: [In; 4] =
        [("most", DType::I64, &[]), ("go", DType::Bool, &[]), ("first", DType::I64, &[]), ("x", F, &[6])];
    let file = model(17, graph(&nodes, &inputs, &["last", "n", "p", "q"]));
    let set = |most: i64, go: bool, first: i64, of: &dyn Fn(usize) -> f64| {
        vec![number(most), Tensor::from_integers(DType::Bool, [], &[go.into()]), number(first), floats(&[6], of)]
    };
    let sets = vec![
        set(20, true, 0, &|i| i as f64 * 0.2),
        set(3, true, 1, &|i| -(i as f64)),
        set(0, true, 2, &|i| i as f64),
        set(9, false, 3, &|_| f64::INFINITY),
        set(-4, true, 3, &|i| if i == 1 { f64::NAN } else { 1.0 }),
        set(2, true, 4, &|i| if i == 1 { f64::NAN } else { f64::NEG_INFINITY }),
    ];
    case("greedy", file, sets)
}

/// Makes nested loops, with an `If` of different branches in the inner one, and a sliding window of the last
/// values.
fn nested() -> Case {
    let then = graph(&[node("Mul", &["s", "half"], &["t"], &[])], &[], &["t"]);
    let otherwise = graph(&[node("Add", &["s", "x"], &["m"], &[]), node("Relu", &["m"], &["u"], &[])], &[], &["u"]);
    let inner = graph(
        &[
            node("ReduceSum", &["s"], &["total"], &[("keepdims", Attr::Int(0))]),
            node("Less", &["limit", "total"], &["is_large"], &[]),
            node(
                "If",
                &["is_large"],
                &["v"],
                &[("then_branch", Attr::Graph(then)), ("else_branch", Attr::Graph(otherwise))],
            ),
            node("Identity", &["d"], &["on"], &[]),
        ],
        &[("j", DType::I64, &[]), ("d", DType::Bool, &[]), ("s", F, &[3])],
        &["on", "v"],
    );
    let body = graph(
        &[
            node("Loop", &["i", "", "z"], &["z2"], &[("body", Attr::Graph(inner))]),
            node("Concat", &["window", "z2"], &["longer"], &[("axis", Attr::Int(0))]),
            node("Slice", &["longer", "three", "nine"], &["next"], &[]),
            node("ReduceMax", &["next"], &["row"], &[("keepdims", Attr::Int(0))]),
            node("Less", &["row", "bound"], &["on"], &[]),
        ],
        &[("i", DType::I64, &[]), ("c", DType::Bool, &[]), ("z", F, &[3]), ("window", F, &[6])],
        &["on", "z2", "next"],
    );
    let nodes = [
        known("half", Tensor::from_floats(F, [], &[0.5])),
        known("limit", Tensor::from_floats(F, [], &[4.0])),
        known("three", Tensor::vector(&[3])),
        known("nine", Tensor::vector(&[9])),
        node("Abs", &["x0"], &["x"], &[]),
        node("Loop", &["n", "", "x", "w0"], &["y", "last"], &[("body", Attr::Graph(body))]),
    ];
    let inputs: [In; 4] = [("n", DType::I64, &[]), ("x0", F, &[3]), ("w0", F, &[6]), ("bound", F, &[])];
    let file = model(13, graph(&nodes, &inputs, &["y", "last"]));
    let set = |n: i64, bound: f64| {
        let bound = Tensor::from_floats(F, [], &[bound]);
        vec![number(n), floats(&[3], |i| i as f64 * 0.4 - 0.3), floats(&[6], |i| i as f64), bound]
    };
    case("nested", file, vec![set(12, 100.0), set(1, 100.0), set(9, 1.5), set(0, 0.0)])
}

#[test]
fn loops_repeat_steps_that_are_there_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut expected = Vec::new();
    for (at, case) in [scan(), greedy(), nested()].into_iter().enumerate() {
        let (compiled, _) = compiled_case(&case, &case.sets[0].0, &host::target()).unwrap().unwrap();
        let n_loops = compiled.fused.steps.iter().filter(|step| matches!(step, Step::While(_))).count();
        assert_eq!(n_loops, [1, 1, 2][at], "{}", case.name);
        let n_host = check(&case, &host::target());
        if tilewright_codegen::llvm_version().is_none() {
            n_host.unwrap();
            continue;
        }
        assert_eq!(n_host, Ok(Some(0)), "{}", case.name);
        for (number, set) in case.sets.iter().enumerate() {
            let name = format!("m{at}_{number}");
            let one = Case { name: name.clone(), model: case.model.clone(), sets: vec![set.clone()] };
            expected.push((name.clone(), write_case(&one, &name, folder.path()).unwrap().unwrap()));
        }
    }
    if !expected.is_empty() {
        assert_eq!(wrong_outputs(folder.path(), &expected), Vec::<String>::new());
    }
}

/// Runs loops whose carried values begin with a constant of 16 bits that is also read in f32.
#[test]
fn loops_begin_with_constants_of_16_bits() {
    for dtype in [DType::F16, DType::Bf16] {
        let body = graph(
            &[node("Add", &["sum", "step"], &["more"], &[]), node("Identity", &["c"], &["on"], &[])],
            &[("i", DType::I64, &[]), ("c", DType::Bool, &[]), ("sum", dtype, &[3])],
            &["on", "more"],
        );
        let of = |numbers: [f64; 3]| Tensor::from_floats(dtype, [3], &numbers);
        let nodes = [
            known("start", of([0.5, 1.0, -2.0])),
            node("Mul", &["x", "start"], &["step"], &[]),
            node("Loop", &["n", "", "start"], &["y"], &[("body", Attr::Graph(body))]),
        ];
        let file = model(17, graph(&nodes, &[("n", DType::I64, &[]), ("x", dtype, &[3])], &["y"]));
        let sets = [0, 5].map(|n| vec![number(n), of([1.0, -0.5, 2.0])]).into();
        assert_eq!(check(&case("carried", file, sets), &host::target()), Ok(Some(0)), "{dtype}");
    }
}

#[test]
fn a_loop_without_end_ends_the_run() {
    let body = graph(
        &[node("Less", &["s", "bound"], &["on"], &[]), node("Abs", &["s"], &["next"], &[])],
        &[("i", DType::I64, &[]), ("c", DType::Bool, &[]), ("s", F, &[])],
        &["on", "next"],
    );
    let nodes = [node("Loop", &["", "", "x"], &["y"], &[("body", Attr::Graph(body))])];
    let file = model(16, graph(&nodes, &[("x", F, &[]), ("bound", F, &[])], &["y"]));
    let case = Case { name: "endless".to_owned(), model: file, sets: vec![] };
    let inputs = [0.0, 1.0].map(|x| Tensor::from_floats(F, [], &[x]));
    let (compiled, given) = compiled_case(&case, &inputs, &host::target()).unwrap().unwrap();
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    let error = runner.run().map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("no end after 16777216 iterations (give inputs"), "{error}");
}

#[test]
fn a_loop_with_an_iteration_per_row_is_refused() {
    let graph = onnx::read(&scan_over(-1), &mut no_files).unwrap().graph;
    let error = open::opened(&graph, &open::dim("N", 70, 200, 1)).unwrap_err().to_string();
    assert!(error.contains("N cannot be open") && !error.contains('\n'), "{error}");
}

/// A model whose input `x` has `n` rows, as many as runs say.
fn of_any_rows(nodes: &[Vec<u8>], inputs: &[In], outputs: &[&str]) -> Graph {
    let mut read = onnx::read(&model(16, graph(nodes, inputs, outputs)), &mut no_files).unwrap().graph;
    let x = read.inputs.iter().copied().find(|&id| read.value(id).name == "x").unwrap();
    read.value_mut(x).declared.as_mut().unwrap().dims.as_mut().unwrap()[0] = Dim::Named("n".to_owned());
    read
}

#[test]
fn loops_over_rows_take_any_number_of_them() {
    let step = [
        node("MatMul", &["h", "w"], &["hw"], &[]),
        node("Add", &["x_t", "hw"], &["sum"], &[]),
        node("Tanh", &["sum"], &["next"], &[]),
        node("Identity", &["next"], &["row"], &[]),
    ];
    let weights = known("w", floats(&[4, 4], |i| (i as f64 * 0.7).sin()));
    let inputs: [In; 2] = [("h0", F, &[2, 4]), ("x", F, &[1, 2, 4])];
    let body = graph(&step, &[("h", F, &[2, 4]), ("x_t", F, &[2, 4])], &["next", "row"]);
    let attributes = [("body", Attr::Graph(body)), ("num_scan_inputs", Attr::Int(1))];
    let scan = node("Scan", &["h0", "x"], &["y", "states"], &attributes);
    let dim = crate::open::dim("n", 1, 20, 1);
    crate::open::check_graph(&dim, &of_any_rows(&[weights.clone(), scan], &inputs, &["y", "states"]));
    let own =
        [node("Gather", &["x", "i"], &["x_t"], &[("axis", Attr::Int(0))]), node("Identity", &["go"], &["goes"], &[])];
    let numbers: [In; 3] = [("i", DType::I64, &[]), ("go", DType::Bool, &[]), ("h", F, &[2, 4])];
    let body = graph(&[&own[..], &step[..]].concat(), &numbers, &["goes", "next", "row"]);
    let nodes = [
        weights,
        known("yes", Tensor::from_integers(DType::Bool, [], &[1])),
        node("Shape", &["x"], &["shape"], &[]),
        known("zero", number(0)),
        node("Gather", &["shape", "zero"], &["rows"], &[("axis", Attr::Int(0))]),
        node("Loop", &["rows", "yes", "h0"], &["y", "states"], &[("body", Attr::Graph(body))]),
    ];
    crate::open::check_graph(&dim, &of_any_rows(&nodes, &inputs, &["y", "states"]));
}

/// Checks that a model of a vector of `n` numbers, 1 to 20, is refused: no net is right for all sizes.
fn check_refused(nodes: &[Vec<u8>], why: &str) {
    let read = of_any_rows(&[&[node("Shape", &["x"], &["s"], &[])], nodes].concat(), &[("x", F, &[4])], &["y"]);
    let lower_at = |n: i64| Ok(lower(&open::at(&read, "n", n), false, &host::target(), 1).unwrap());
    let dim = open::dim("n", 1, 20, 1);
    for refused in [tilewright_model::open(&dim, lower_at), open_or_repeat::<OpenError>(&dim, lower_at)] {
        let error = refused.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("and n=20: n cannot be open"), "{error}");
    }
    assert!(tilewright_model::open::<OpenError>(&open::dim("n", 8, 20, 1), lower_at).is_ok());
    // Beside another dimension, on which another output depends.
    let others = [node("Shape", &["x"], &["s"], &[]), node("Neg", &["z"], &["other"], &[])];
    let mut read = of_any_rows(&[&others[..], nodes].concat(), &[("x", F, &[4]), ("z", F, &[4])], &["y", "other"]);
    let z = read.inputs.iter().copied().find(|&id| read.value(id).name == "z").unwrap();
    read.value_mut(z).declared.as_mut().unwrap().dims.as_mut().unwrap()[0] = Dim::Named("m".to_owned());
    let lower_both = |n: i64, m: i64| {
        let dims = [("n", n), ("m", m)].map(|(name, size)| (name.to_owned(), size as usize)).to_vec();
        let [open, second] = ["n", "m"].map(|name| Some(name.to_owned()));
        let special = specialise(&read, &Bindings { dims, open, second, ..Bindings::default() });
        Ok(lower(&special.graph, false, &host::target(), 1).unwrap())
    };
    let second = open::dim("m", 1, 30, 1);
    assert!(open_both::<OpenError>(&dim, Some(&second), lower_both).is_err());
    open_both::<OpenError>(&open::dim("n", 8, 20, 1), Some(&second), lower_both).unwrap();
}

/// A condition on an open length that holds for the longer ones, as that of tables of positions for long
/// texts.
#[test]
fn lengths_that_take_different_branches_are_not_open_together() {
    let branch = |op: &str| Attr::Graph(graph(&[node(op, &["x"], &["p"], &[])], &[], &["p"]));
    let branches = [("then_branch", branch("Abs")), ("else_branch", branch("Neg"))];
    let nodes = [
        known("most", Tensor::from_integers(DType::I64, [1], &[7])),
        node("Greater", &["s", "most"], &["c"], &[]),
        node("If", &["c"], &["y"], &branches),
    ];
    check_refused(&nodes, "takes another branch");
}

/// Bounds and tests of an open length below the lengths that are compared.
#[test]
fn lengths_beyond_a_bound_and_below_it_are_not_open_together() {
    let integers = |name: &str, n: i64| known(name, Tensor::from_integers(DType::I64, [1], &[n.into()]));
    let (seven, zero) = (integers("most", 7), integers("zero", 0));
    let test = node("Greater", &["s", "most"], &["c"], &[]);
    let cast = |from: &str| node("Cast", &[from], &["f"], &[("to", Attr::Int(1))]);
    let scaled = node("Mul", &["x", "f"], &["y"], &[]);
    let slice = |from: &[&str], to: &str| node("Slice", from, &[to], &[]);
    for nodes in [
        vec![
            test.clone(),
            known("a", floats(&[1], |_| 2.0)),
            known("b", floats(&[1], |_| 3.0)),
            node("Where", &["c", "a", "b"], &["f"], &[]),
            scaled.clone(),
        ],
        vec![node("Min", &["s", "most"], &["m"], &[]), cast("m"), scaled.clone()],
        vec![test, cast("c"), scaled.clone()],
        vec![
            zero.clone(),
            known("w", floats(&[7], |i| i as f64)),
            slice(&["w", "zero", "s", "zero"], "p"),
            node("ReduceSum", &["p"], &["f"], &[]),
            scaled,
        ],
        vec![zero, slice(&["x", "zero", "most", "zero"], "y")],
    ] {
        check_refused(&[std::slice::from_ref(&seven), &nodes[..]].concat(), "");
    }
}
