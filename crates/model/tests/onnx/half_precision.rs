//! Models of f16 and bf16: kernels compute in f32, and round where the model requires it.

use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Graph, SplitMix64, Tensor, evaluate, specialise};
use tilewright_model::{CompileError, Runner, Step, compile_quickly, count_halves, lower};
use tilewright_runtime::SharedPool;

use crate::{compiled_as, guess, read_back, whole};

/// Node: operator, inputs, output, and an attribute, if any.
type Node<'a> = (&'a str, &'a [&'a str], &'a str, Option<(&'a str, Attribute)>);

/// Attribute with the ONNX number of a type.
fn to(dtype: DType) -> Option<(&'static str, Attribute)> {
    let number = match dtype {
        DType::F32 => 1,
        DType::I64 => 7,
        DType::F16 => 10,
        DType::Bf16 => 16,
        other => panic!("{other} is none of the tests'"),
    };
    Some(("to", Attribute::Int(number)))
}

/// Numbers of a type, in a range.
fn numbers(dtype: DType, shape: &[usize], low: f64, high: f64) -> Tensor {
    Tensor::from_floats(dtype, shape, &SplitMix64::new(shape.len() as u64).tensor(shape, low, high).floats())
}

fn graph_of(inputs: &[(&str, &Tensor)], outputs: &[(&str, DType)], known: &[(&str, Tensor)], nodes: &[Node]) -> Graph {
    let input = |(name, x): &(&str, &Tensor)| {
        let dims = x.shape().iter().map(|&n| Dim::Size(n)).collect();
        GraphPort { name: (*name).to_owned(), dtype: x.dtype(), dims }
    };
    // The shapes of outputs are inferred.
    let output =
        |(name, dtype): &(&str, DType)| GraphPort { name: (*name).to_owned(), dtype: *dtype, dims: Vec::new() };
    let node = |(op, inputs, output, attribute): &Node| NodeFile {
        op: (*op).to_owned(),
        inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
        outputs: vec![(*output).to_owned()],
        attributes: attribute.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
        ..NodeFile::default()
    };
    let file = ModelFile {
        name: "halves".to_owned(),
        opset: 17,
        inputs: inputs.iter().map(input).collect(),
        outputs: outputs.iter().map(output).collect(),
        weights: known.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.clone())).collect(),
        nodes: nodes.iter().map(node).collect(),
        ..ModelFile::default()
    };
    read_back(&file)
}

/// Runs a graph with kernels alone.
fn run(graph: &Graph, given: &[(&str, Tensor)], exact: bool) -> Vec<Tensor> {
    let special = specialise(graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{}", special.problems[0]);
    let compiled = match compiled_as(&special.graph, exact) {
        Err(CompileError::Kernel { workload, why }) => panic!("{workload}: {why}"),
        compiled => compiled.unwrap_or_else(|error| panic!("{error}")),
    };
    let is_host = |step: &&Step| matches!(step, Step::Host(_));
    assert_eq!(compiled.fused.steps.iter().filter(is_host).count(), 0, "{:?}", compiled.fused.steps);
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    runner.run().unwrap();
    runner.outputs().into_iter().map(|(_, tensor)| tensor).collect()
}

/// Checks that numbers agree to `units` units in the last place of the largest number, in their type.
#[track_caller]
fn check_near(found: &Tensor, wanted: &Tensor, units: f64) {
    assert_eq!(found.ty(), wanted.ty());
    let unit = if found.dtype() == DType::Bf16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
    let largest = wanted.floats().iter().filter(|x| x.is_finite()).fold(0.0_f64, |most, x| most.max(x.abs()));
    for (at, (x, y)) in found.floats().into_iter().zip(wanted.floats()).enumerate() {
        let is_near = x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= units * unit * largest;
        assert!(is_near, "{x} at {at}, and it should be {y}");
    }
}

/// Makes a network of a convolution, a normalization, parts of attention and a product, in a type.
fn network(dtype: DType) -> (Graph, Tensor) {
    let w = |shape: &[usize]| numbers(dtype, shape, -0.5, 0.5);
    let known = [
        ("w", w(&[8, 3, 3, 3])),
        ("b", w(&[8])),
        ("rows", whole(&[3], &[0, 8, 36])),
        ("scale", w(&[36])),
        ("offset", w(&[36])),
        ("m", w(&[36, 10])),
        ("half", Tensor::scalar(dtype, 0.5)),
    ];
    let nodes: [Node; 9] = [
        ("Conv", &["x", "w", "b"], "c", None),
        ("Relu", &["c"], "r", None),
        ("Reshape", &["r", "rows"], "s", None),
        ("LayerNormalization", &["s", "scale", "offset"], "n", None),
        ("Mul", &["n", "half"], "h", None),
        ("Softmax", &["h"], "p", None),
        ("Transpose", &["p"], "t", Some(("perm", Attribute::Ints(vec![0, 2, 1])))),
        ("MatMul", &["n", "t"], "a", None),
        ("MatMul", &["s", "m"], "y", None),
    ];
    let x = numbers(dtype, &[1, 3, 8, 8], -1.0, 1.0);
    (graph_of(&[("x", &x)], &[("y", dtype), ("a", dtype)], &known, &nodes), x)
}

#[test]
fn a_network_of_16_bits_is_kernels() {
    for dtype in [DType::F16, DType::Bf16] {
        let (graph, x) = network(dtype);
        let given = [("x", x)];
        let wanted = evaluate(&graph, &given).unwrap();
        // Without intermediate rounding the result is more accurate than with the model's own steps.
        for (exact, units) in [(false, 4.0), (true, 1.5)] {
            let found = run(&graph, &given, exact);
            found.iter().zip(&wanted).for_each(|(found, wanted)| check_near(found, wanted, units));
        }
        let special = specialise(&graph, &Bindings::default());
        assert_eq!(count_halves(&special.graph), 9);
        let kernels = lower(&special.graph, false, &crate::host::target(), 1).unwrap().steps;
        let (single, _) = network(DType::F32);
        let of_single =
            lower(&specialise(&single, &Bindings::default()).graph, false, &crate::host::target(), 1).unwrap().steps;
        let count = |steps: &[Step]| steps.iter().filter(|step| matches!(step, Step::Kernel(_))).count();
        assert!(count(&kernels) <= count(&of_single) + 3, "an input and two outputs are converted");
    }
}

/// Sums of f16 beyond its range become infinite only where they are rounded.
#[test]
fn what_exceeds_the_range_is_infinite_where_it_is_rounded() {
    let x = Tensor::from_floats(DType::F16, [1, 3], &[60000.0, -300.0, 2.0]);
    let known = [("big", Tensor::scalar(DType::F16, 60000.0))];
    let nodes: [Node; 3] =
        [("Add", &["x", "big"], "s", None), ("Sub", &["s", "big"], "y", None), ("Mul", &["x", "x"], "q", None)];
    let graph = graph_of(&[("x", &x)], &[("y", DType::F16), ("q", DType::F16)], &known, &nodes);
    let given = [("x", x)];
    let infinity = f64::INFINITY;
    let found = run(&graph, &given, false);
    assert_eq!(found[0].floats(), [60000.0, -300.0, 2.0]);
    assert_eq!(found[1].floats(), [infinity, infinity, 4.0]);
    let found = run(&graph, &given, true);
    assert_eq!(found[0].floats(), [infinity, -288.0, 0.0]);
    assert_eq!(found, evaluate(&graph, &given).unwrap());
}

/// Casts round in a model with f32 around f16, as converters write it, and with f16 around f32.
#[test]
fn casts_round_wherever_they_stand() {
    let x = Tensor::from_floats(DType::F32, [1, 4], &[1e5, 1.0 + 1.0 / 4096.0, -2.5, 1e-8]);
    let known = [("one", Tensor::scalar(DType::F16, 1.0)), ("tiny", Tensor::scalar(DType::F32, 1.0 / 8192.0))];
    let nodes: [Node; 6] = [
        ("Cast", &["x"], "h", to(DType::F16)),
        ("Mul", &["h", "one"], "m", None),
        ("Cast", &["m"], "f", to(DType::F32)),
        ("Add", &["f", "tiny"], "g", None),
        ("Cast", &["g"], "y", to(DType::Bf16)),
        ("Cast", &["m"], "i", to(DType::F32)),
    ];
    let outputs = [("y", DType::Bf16), ("i", DType::F32), ("g", DType::F32)];
    let graph = graph_of(&[("x", &x)], &outputs, &known, &nodes);
    let given = [("x", x)];
    for exact in [false, true] {
        assert_eq!(run(&graph, &given, exact), evaluate(&graph, &given).unwrap());
    }
}

/// Integers become f16 and back, and an input that is an output is passed on.
#[test]
fn whole_numbers_are_cast_and_inputs_passed_on() {
    let x = whole(&[4], &[3, -2049, 70000, 0]);
    let nodes: [Node; 4] = [
        ("Cast", &["x"], "h", to(DType::F16)),
        ("Neg", &["h"], "n", None),
        ("Neg", &["z"], "zn", None),
        ("Identity", &["z"], "same", None),
    ];
    let z = numbers(DType::F16, &[5], -2.0, 2.0);
    let outputs = [("n", DType::F16), ("zn", DType::F16), ("same", DType::F16)];
    let graph = graph_of(&[("x", &x), ("z", &z)], &outputs, &[], &nodes);
    let given = [("x", x), ("z", z.clone())];
    let found = run(&graph, &given, false);
    assert_eq!(found, evaluate(&graph, &given).unwrap());
    assert_eq!(found[0].floats(), [-3.0, 2048.0, f64::NEG_INFINITY, 0.0]);
    assert_eq!(found[2], z);
}

/// With `--bf16`, operands of products, and nothing else, are rounded to bf16 if the CPU multiplies these
/// faster.
#[test]
fn factors_are_rounded_to_bf16_where_asked_for() {
    const M: usize = 9;
    const K: usize = 40;
    const N: usize = 33;
    let (x, w) = (numbers(DType::F32, &[M, K], -1.0, 1.0), numbers(DType::F32, &[K, N], -2.0, 1.0));
    let b = numbers(DType::F32, &[N], -1.0, 1.0);
    let nodes: &[Node] = &[("MatMul", &["x", "w"], "p", None), ("Add", &["p", "b"], "y", None)];
    let known = [("w", w.clone()), ("b", b.clone())];
    let graph = graph_of(&[("x", &x)], &[("y", DType::F32)], &known, nodes);
    let target = host::target();
    for is_asked_for in [false, true] {
        let mut fused = lower(&specialise(&graph, &Bindings::default()).graph, false, &target, 1).unwrap();
        if is_asked_for {
            fused.round_factors(&target);
        }
        let rounds = is_asked_for && target.prefers_dot2();
        let tasks: Vec<String> = fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
        assert!(matches!(&tasks[..], [task] if task.contains("bf16=1") == rounds), "{tasks:?}");
        let compiled = compile_quickly(fused, &target, &|workload| guess(workload, &target)).unwrap();
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &x).unwrap();
        runner.run().unwrap();
        let found = runner.outputs()[0].1.floats();
        // Rounds to nearest, ties to even, with 8 exponent bits and 7 mantissa bits.
        let factor = |x: f64| {
            let bits = (x as f32).to_bits();
            let up = u32::from(rounds) * (0x7fff + (bits >> 16 & 1));
            f64::from(f32::from_bits(if rounds { (bits + up) & 0xffff_0000 } else { bits }))
        };
        let [x, w, b] = [&x, &w, &b].map(Tensor::floats);
        for (at, found) in found.into_iter().enumerate() {
            let terms = (0..K).map(|k| factor(x[at / N * K + k]) * factor(w[k * N + at % N]));
            let wanted = terms.sum::<f64>() + b[at % N];
            assert!((found - wanted).abs() < 2e-5, "{at}: {found} instead of {wanted}, rounded: {rounds}");
        }
    }
}
