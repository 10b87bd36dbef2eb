//! Products of quantized matrices by product kernels, bit for bit.

mod convolutions;
mod dynamic;
mod layers;
mod transposed;

use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Float8, Graph, Tensor, evaluate, specialise};
use tilewright_ir::Target;
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::{compiled_file, read_back};

pub use self::convolutions::bottleneck;

const M: usize = 9;
const N: usize = 17;
const K: usize = 40;

/// List of integers that repeats after a number that does not divide any size.
fn integers(n: usize, least: i128) -> Vec<i128> {
    (0..n).map(|at| (at as i128 * 89) % 251 + least).collect()
}

#[test]
fn columns_of_weights_have_zero_points_of_their_own() {
    let (x, w, zeros, zero) = (integers(M * K, 0), integers(K * N, -125), integers(N, -125), 131);
    let port = |name: &str, dtype: DType, columns: usize| GraphPort {
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
    let compiled = compiled_file(&model, &host::target());
    let labels: Vec<String> = compiled.fused.tasks().iter().map(|(workload, _)| workload.label()).collect();
    assert!(labels.iter().any(|label| label.starts_with("matmul") || label.starts_with("dense")), "{labels:?}");
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("x", &Tensor::from_integers(DType::U8, [M, K], &x)).unwrap();
    runner.run().unwrap();
    let sum =
        |at: usize| -> i128 { (0..K).map(|k| (x[at / N * K + k] - zero) * (w[k * N + at % N] - zeros[at % N])).sum() };
    let expected: Vec<f64> = (0..M * N).map(|at| sum(at) as f64).collect();
    assert_eq!(runner.outputs()[0].1.floats(), expected);
}

/// Integers of fewer than 8 bits take a byte each between kernels, with a zero point for each column or a
/// single one.
#[test]
fn integers_of_four_bits_are_kept_between_kernels() {
    let along =
        |axis: i64, of: NodeFile| NodeFile { attributes: vec![("axis".to_owned(), Attribute::Int(axis))], ..of };
    let f32s = |name: &str, shape: [usize; 2]| GraphPort {
        dtype: DType::F32,
        dims: shape.map(Dim::Size).to_vec(),
        ..port(name, 1)
    };
    for (dtype, least) in [(DType::I4, -8), (DType::U4, 0)] {
        let number = |at: i128| at * 7 % 16 + least;
        let numbers = |shape: &[usize]| {
            let n = shape.iter().product::<usize>() as i128;
            Tensor::from_integers(dtype, shape, &(0..n).map(number).collect::<Vec<_>>())
        };
        let scales: Vec<f64> = (0..N).map(|at| 0.125 * (1 + at % 3) as f64).collect();
        let known = [
            ("s", Tensor::from_floats(DType::F32, [N], &scales)),
            ("z", numbers(&[N])),
            ("one", Tensor::scalar(DType::F32, 0.25)),
            ("zero", Tensor::from_integers(dtype, [0; 0], &[number(2)])),
            ("w", numbers(&[5, N])),
        ];
        let model = ModelFile {
            name: "four_bits".to_owned(),
            opset: 21,
            inputs: vec![f32s("x", [M, N]), GraphPort { dtype: DType::I64, ..f32s("at", [3, 1]) }],
            outputs: vec![
                f32s("y", [N, M]),
                f32s("back", [M, N]),
                GraphPort { dims: [3, 1, N].map(Dim::Size).to_vec(), ..f32s("rows", [3, N]) },
            ],
            weights: known.map(|(name, tensor)| (name.to_owned(), tensor)).to_vec(),
            nodes: vec![
                along(1, node("QuantizeLinear", "x s z", "q")),
                node("Transpose", "q", "turned"),
                node("DequantizeLinear", "turned one zero", "y"),
                along(1, node("DequantizeLinear", "q s z", "back")),
                node("Gather", "w at", "chosen"),
                node("DequantizeLinear", "chosen one zero", "rows"),
            ],
            ..ModelFile::default()
        };
        let graph = read_back(&model);
        let compiled = compiled_file(&model, &host::target());
        let x: Vec<f64> = (0..M * N).map(|at| (at * 37 % 101) as f64 / 20.0 - 2.5).collect();
        let given = [
            ("x", Tensor::from_floats(DType::F32, [M, N], &x)),
            ("at", Tensor::from_integers(DType::I64, [3, 1], &[4, 0, -2])),
        ];
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
        runner.run().unwrap();
        let found: Vec<Vec<f64>> = runner.outputs().iter().map(|(_, x)| x.floats()).collect();
        let expected: Vec<Vec<f64>> = evaluate(&graph, &given).unwrap().iter().map(Tensor::floats).collect();
        assert_eq!(found, expected, "{dtype}");
    }
}

/// A piecewise linear activation between bytes is looked up, as a smooth one is: each of its quantizations
/// divides.
#[test]
fn hard_swish_of_bytes_is_looked_up() {
    let model = ModelFile {
        name: "hard_swish".to_owned(),
        opset: 17,
        inputs: vec![port("q", N)],
        outputs: vec![port("y", N)],
        weights: vec![scale("sx", 0.05), zero("zx", 120), scale("sh", 1.0 / 255.0), zero("zh", 0), scale("sy", 0.04)],
        nodes: vec![
            node("DequantizeLinear", "q sx zx", "x"),
            node("HardSigmoid", "x", "h"),
            node("QuantizeLinear", "h sh zh", "hq"),
            node("DequantizeLinear", "hq sh zh", "gate"),
            node("Mul", "x gate", "product"),
            node("QuantizeLinear", "product sy zx", "y"),
        ],
        ..ModelFile::default()
    };
    let graph = read_back(&model);
    let compiled = compiled_file(&model, &host::target());
    let labels: Vec<String> = compiled.fused.tasks().iter().map(|(workload, _)| workload.label()).collect();
    assert!(matches!(&labels[..], [one] if one.starts_with("nest:copy")), "{labels:?}");
    let x = Tensor::from_integers(DType::U8, [M, N], &integers(M * N, 0));
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("q", &x).unwrap();
    runner.run().unwrap();
    assert_eq!(runner.outputs()[0].1.floats(), evaluate(&graph, &[("q", x)]).unwrap()[0].floats());
}

/// Floating-point numbers of 8 bits are rounded, saturated and kept as the reference does, as constants too.
#[test]
fn numbers_of_eight_bits_are_rounded_to_nearest() {
    let single = |name: &str, columns: usize| GraphPort { dtype: DType::F32, ..port(name, columns) };
    let to = |dtype: DType, of: NodeFile| NodeFile {
        attributes: vec![("to".to_owned(), Attribute::Int(dtype.to_onnx().into()))],
        ..of
    };
    for dtype in [DType::F8e4m3fn, DType::F8e4m3fnuz, DType::F8e5m2, DType::F8e5m2fnuz] {
        let weights: Vec<f64> = integers(K * N, -125).iter().map(|&w| w as f64 / 16.0).collect();
        let known = [
            ("s", Tensor::scalar(DType::F32, 0.125)),
            ("zero", Tensor::scalar(dtype, 0.0)),
            ("w", Tensor::from_floats(dtype, [K, N], &weights)),
        ];
        let model = ModelFile {
            name: "eight_bits".to_owned(),
            opset: 19,
            inputs: vec![single("x", K)],
            outputs: vec![single("y", K), single("cast", K), single("product", N)],
            weights: known.map(|(name, tensor)| (name.to_owned(), tensor)).to_vec(),
            nodes: vec![
                node("QuantizeLinear", "x s zero", "q"),
                node("DequantizeLinear", "q s zero", "y"),
                to(dtype, node("Cast", "x", "short")),
                to(DType::F32, node("Cast", "short", "cast")),
                node("DequantizeLinear", "w s zero", "v"),
                node("MatMul", "y v", "product"),
            ],
            ..ModelFile::default()
        };
        let graph = read_back(&model);
        let compiled = compiled_file(&model, &host::target());
        // All numbers of the type, the middle of each two, and the next numbers in f32.
        let format = Float8::of(dtype).unwrap();
        let mut numbers: Vec<f32> =
            (0..=255).map(|code| format.decode(code) as f32).filter(|x| x.is_finite()).collect();
        numbers.sort_by(f32::total_cmp);
        let middles: Vec<f32> = numbers.windows(2).map(|pair| f32::midpoint(pair[0], pair[1])).collect();
        numbers.extend(middles.iter().flat_map(|&x| [x, x.next_up(), x.next_down(), x / 8.0]));
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        for chunk in numbers.chunks(M * K) {
            let x: Vec<f64> = chunk.iter().cycle().take(M * K).map(|&x| x.into()).collect();
            check_numbers(&graph, &mut runner, &x, 1e-5);
        }
        check_numbers(&graph, &mut runner, &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e30].repeat(M * K / 4), 0.0);
    }
}

/// Checks that a model of `x` computes what the reference does: all outputs but the last exactly, that one
/// with an error of so much of the largest element.
fn check_numbers(graph: &Graph, runner: &mut Runner, x: &[f64], tolerance: f64) {
    let x = Tensor::from_floats(DType::F32, [M, K], x);
    runner.set("x", &x).unwrap();
    runner.run().unwrap();
    let outputs: Vec<Vec<f64>> = runner.outputs().iter().map(|(_, y)| y.floats()).collect();
    let expected: Vec<Vec<f64>> = evaluate(graph, &[("x", x)]).unwrap().iter().map(Tensor::floats).collect();
    let last = outputs.len() - 1;
    for (at, (found, wanted)) in outputs.iter().zip(&expected).enumerate() {
        let most = wanted.iter().filter(|y| y.is_finite()).fold(0.0, |most: f64, y| most.max(y.abs()));
        let bound = if at == last { tolerance * most } else { 0.0 };
        let are_near = |(y, z): (&f64, &f64)| y == z || y.is_nan() && z.is_nan() || (y - z).abs() <= bound;
        assert!(found.iter().zip(wanted).all(are_near), "output {at}: {found:?}, not {wanted:?}");
    }
}

/// Invalid scales, and zero points of another type or number, in a model of one node.
#[test]
fn what_nothing_can_be_a_multiple_of_is_refused_with_its_node() {
    let whole = |dtype: DType, shape: &[usize]| Tensor::from_integers(dtype, shape, &vec![3; shape.iter().product()]);
    let scale = |numbers: &[f64]| Tensor::from_floats(DType::F32, vec![numbers.len()], numbers);
    let one = || Tensor::scalar(DType::F32, 0.5);
    let u8s = |shape: &[usize]| whole(DType::U8, shape);
    let i8s = |shape: &[usize]| whole(DType::I8, shape);
    let product = |scale: Tensor, zero: Tensor, of_weights: Tensor| {
        vec![scale, zero, i8s(&[4, 5]), one(), of_weights, one(), u8s(&[])]
    };
    let cases: Vec<(&str, DType, Vec<Tensor>, &str)> = vec![
        ("DequantizeLinear", DType::U8, vec![Tensor::scalar(DType::F32, 0.0), u8s(&[])], "a scale of 0"),
        ("DequantizeLinear", DType::U8, vec![Tensor::scalar(DType::F32, f64::NAN), u8s(&[])], "a scale of NaN"),
        ("QuantizeLinear", DType::F32, vec![Tensor::scalar(DType::F32, -0.5), u8s(&[])], "a scale of -0.5"),
        (
            "QuantizeLinear",
            DType::F32,
            vec![Tensor::scalar(DType::F32, f64::INFINITY), u8s(&[])],
            "quantize products only",
        ),
        ("QuantizeLinear", DType::F32, vec![scale(&[0.5; 3]), u8s(&[3])], "do not fit"),
        ("DequantizeLinear", DType::U8, vec![scale(&[0.5; 4]), u8s(&[2])], "4 scales and 2 zero points"),
        ("DequantizeLinear", DType::U8, vec![one(), i8s(&[])], "is i8 where the integers are u8"),
        ("QLinearMatMul", DType::U8, product(scale(&[f64::INFINITY]), u8s(&[]), i8s(&[])), "a scale of inf"),
        ("QLinearMatMul", DType::U8, product(one(), i8s(&[]), i8s(&[])), "is i8 where the integers are u8"),
        ("QLinearMatMul", DType::U8, product(one(), u8s(&[]), i8s(&[3])), "3 zero points"),
        ("QLinearMatMul", DType::U8, product(scale(&[0.5; 3]), u8s(&[]), i8s(&[])), "3 scales"),
        ("MatMulInteger", DType::U8, vec![i8s(&[4, 5]), i8s(&[])], "is i8 where the integers are u8"),
        ("MatMulInteger", DType::U8, vec![i8s(&[4, 5]), u8s(&[3])], "3 zero points"),
        ("QuantizeLinear", DType::F32, vec![one(), whole(DType::I32, &[])], "quantized as i32"),
    ];
    for (op, dtype, constants, expected) in cases {
        let weights: Vec<(String, Tensor)> =
            constants.into_iter().enumerate().map(|(at, tensor)| (format!("w{at}"), tensor)).collect();
        let port = |name: &str, dtype: DType| GraphPort {
            name: name.to_owned(),
            dtype,
            dims: vec![Dim::Size(2), Dim::Size(4)],
        };
        let inputs = std::iter::once("x".to_owned()).chain(weights.iter().map(|(name, _)| name.clone())).collect();
        let output = if op == "DequantizeLinear" { DType::F32 } else { DType::U8 };
        let model = ModelFile {
            name: "refused".to_owned(),
            opset: 17,
            inputs: vec![port("x", dtype)],
            outputs: vec![port("y", output)],
            weights,
            nodes: vec![NodeFile {
                name: "scaled".to_owned(),
                op: op.to_owned(),
                inputs,
                outputs: vec!["y".to_owned()],
                ..NodeFile::default()
            }],
            ..ModelFile::default()
        };
        let graph = read_back(&model);
        let problems = specialise(&graph, &Bindings::default()).problems;
        let text = problems.first().map(ToString::to_string).unwrap_or_default();
        assert!(text.contains(expected) && text.contains("scaled") && !text.contains('\n'), "{op}, {expected}: {text}");
    }
}

/// This machine and, if it can run its code, an older one without 8-bit dot products.
fn targets() -> Vec<Target> {
    let mut targets = vec![host::target()];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        targets.extend(Target::named("x86-64-v3"));
    }
    targets
}

fn multiplies_bytes(target: &Target) -> bool {
    target.dot4_lanes([false, true]) > 0 || target.widens_bytes()
}

/// Makes a node with one output; the names of inputs are separated by spaces.
fn node(op: &str, inputs: &str, output: &str) -> NodeFile {
    NodeFile {
        op: op.to_owned(),
        inputs: inputs.split(' ').map(str::to_owned).collect(),
        outputs: vec![output.to_owned()],
        ..NodeFile::default()
    }
}

fn scale(name: &str, x: f32) -> (String, Tensor) {
    (name.to_owned(), Tensor::scalar(DType::F32, x.into()))
}

fn zero(name: &str, x: i64) -> (String, Tensor) {
    (name.to_owned(), Tensor::from_integers(DType::U8, [0; 0], &[x.into()]))
}

/// Makes a port for `M` rows of bytes.
fn port(name: &str, columns: usize) -> GraphPort {
    GraphPort { name: name.to_owned(), dtype: DType::U8, dims: vec![Dim::Size(M), Dim::Size(columns)] }
}

/// Signed integers that are concatenated, of which some are quantized here and others are given or known.
#[test]
fn signed_integers_are_concatenated() {
    let (scale_of, point) = (0.05f32, -5i64);
    let signed = |name: &str, n: usize| GraphPort { dtype: DType::I8, ..port(name, n) };
    let real = |name: &str, n: usize| GraphPort { dtype: DType::F32, ..port(name, n) };
    let list = |n: usize, from: i128| Tensor::from_integers(DType::I8, [M, n], &integers(M * n, from));
    let model = ModelFile {
        name: "signed".to_owned(),
        opset: 17,
        inputs: vec![real("x", 4), real("y", 3), signed("z", 2)],
        outputs: vec![real("out", 10)],
        weights: vec![
            scale("s", scale_of),
            ("p".to_owned(), Tensor::from_integers(DType::I8, [0; 0], &[point.into()])),
            ("w".to_owned(), list(1, -128)),
        ],
        nodes: vec![
            node("QuantizeLinear", "x s p", "xq"),
            node("QuantizeLinear", "y s p", "yq"),
            NodeFile { attributes: vec![("axis".to_owned(), Attribute::Int(1))], ..node("Concat", "xq yq z w", "all") },
            node("DequantizeLinear", "all s p", "out"),
        ],
        ..ModelFile::default()
    };
    let compiled = compiled_file(&model, &host::target());
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    let of_scale = |n: usize| -> Vec<f64> {
        integers(M * n, -128).iter().map(|q| f64::from((*q as i64 - point) as f32 * scale_of)).collect()
    };
    runner.set("x", &Tensor::from_floats(DType::F32, [M, 4], &of_scale(4))).unwrap();
    runner.set("y", &Tensor::from_floats(DType::F32, [M, 3], &of_scale(3))).unwrap();
    runner.set("z", &list(2, -128)).unwrap();
    runner.run().unwrap();
    let found = runner.outputs()[0].1.floats();
    let parts = [4, 3, 2, 1].map(of_scale);
    let expected: Vec<f64> = (0..M)
        .flat_map(|row| parts.iter().zip([4, 3, 2, 1]).flat_map(move |(part, n)| part[row * n..][..n].to_vec()))
        .collect();
    assert_eq!(found, expected);
}

/// Residual sums of quantized numbers, with the product quantized before the sum, as quantizers write them:
/// everything becomes the epilogue of one product.
#[test]
fn quantized_residual_sums_are_epilogues() {
    let (x, r) = (integers(M * K, 3), integers(M * N, 1));
    let w: Vec<i128> = integers(K * N, -125);
    let [sx, sw, s1, sr, sy] = [0.02f32, 0.011, 0.21, 0.13, 0.17];
    let [zx, z1, zr, zy] = [131i64, 117, 99, 20];
    let model = ModelFile {
        name: "residual".to_owned(),
        opset: 17,
        inputs: vec![port("x", K), port("r", N)],
        outputs: vec![port("y", N)],
        weights: vec![
            ("w".to_owned(), Tensor::from_integers(DType::I8, [K, N], &w)),
            scale("sx", sx),
            scale("sw", sw),
            scale("s1", s1),
            scale("sr", sr),
            scale("sy", sy),
            zero("zx", zx),
            zero("z1", z1),
            zero("zr", zr),
            zero("zy", zy),
        ],
        nodes: vec![
            node("DequantizeLinear", "x sx zx", "xf"),
            node("DequantizeLinear", "w sw", "wf"),
            node("MatMul", "xf wf", "p"),
            node("QuantizeLinear", "p s1 z1", "pq"),
            node("DequantizeLinear", "pq s1 z1", "pf"),
            node("DequantizeLinear", "r sr zr", "rf"),
            node("Add", "pf rf", "sum"),
            node("Relu", "sum", "above"),
            node("QuantizeLinear", "above sy zy", "y"),
        ],
        ..ModelFile::default()
    };
    let compiled = compiled_file(&model, &host::target());
    let tasks: Vec<String> = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
    if host::target().dot4_lanes([false, true]) > 0 {
        assert!(matches!(&tasks[..], [task] if task.contains("add_u8") && task.contains("quant_u8")), "{tasks:?}");
    }
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("x", &Tensor::from_integers(DType::U8, [M, K], &x)).unwrap();
    runner.set("r", &Tensor::from_integers(DType::U8, [M, N], &r)).unwrap();
    runner.run().unwrap();
    let expected = |at: usize| {
        let term = |k: usize| (x[at / N * K + k] as i64 - zx) * w[k * N + at % N] as i64;
        let sum: i64 = (0..K).map(term).sum();
        let first = ((sum as f32 * (sx * sw / s1)).round_ties_even() as i64 + z1).clamp(0, 255);
        let above = ((first - z1) as f32 * s1 + (r[at] as i64 - zr) as f32 * sr).max(0.0);
        ((above / sy).round_ties_even() as i64 + zy).clamp(0, 255)
    };
    let found = runner.outputs()[0].1.i64s();
    let n_steps: Vec<i64> = found.iter().enumerate().map(|(at, y)| (y - expected(at)).abs()).collect();
    assert!(n_steps.iter().all(|n| *n <= 1) && n_steps.iter().sum::<i64>() <= 2, "{n_steps:?}");
    assert!(found.iter().any(|y| *y > zy + 50) && found.contains(&zy), "{found:?}");
}

/// Activations of 16 bits stay in f32; the product before rounds to their levels.
#[test]
fn activations_of_16_bits_are_rounded_by_the_product() {
    let real = |name: &str, n: usize| GraphPort { dtype: DType::F32, ..port(name, n) };
    let x: Vec<f64> = integers(M * K, 3).iter().map(|x| (*x as i32 - 128).into()).collect();
    let w: Vec<f64> = integers(K * N, -125).iter().map(|w| (*w as i32).into()).collect();
    for (dtype, zero) in [(DType::U16, 500), (DType::I16, -300)] {
        let model = ModelFile {
            name: "levels".to_owned(),
            opset: 21,
            inputs: vec![real("x", K)],
            outputs: vec![real("y", N)],
            weights: vec![
                ("w".to_owned(), Tensor::from_floats(DType::F32, [K, N], &w)),
                scale("s", 9.0),
                ("z".to_owned(), Tensor::from_integers(dtype, [0; 0], &[zero])),
            ],
            nodes: vec![
                node("MatMul", "x w", "p"),
                node("QuantizeLinear", "p s z", "q"),
                node("DequantizeLinear", "q s z", "y"),
            ],
            ..ModelFile::default()
        };
        let compiled = compiled_file(&model, &host::target());
        let tasks: Vec<String> = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
        assert!(matches!(&tasks[..], [task] if task.contains("+round")), "{tasks:?}");
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &Tensor::from_floats(DType::F32, [M, K], &x)).unwrap();
        runner.run().unwrap();
        // Sums are exact, no quotient is near the middle between two levels, and some are below the least.
        let [low, high] = if dtype == DType::U16 { [0, 65_535] } else { [-32_768, 32_767] };
        let expected = |at: usize| {
            let sum: f64 = (0..K).map(|k| x[at / N * K + k] * w[k * N + at % N]).sum();
            let level = ((sum / 9.0).round_ties_even() as i64 + zero as i64).clamp(low, high);
            (level - zero as i64) as f64 * 9.0
        };
        let found = runner.outputs()[0].1.floats();
        assert_eq!(found, (0..M * N).map(expected).collect::<Vec<_>>(), "{dtype:?}");
    }
}

/// Sums of two products, each quantized, scaled by column and quantized again, as in the first blocks of a
/// residual network: everything becomes epilogues of the products.
#[test]
fn sums_of_two_quantized_products_are_epilogues() {
    let x = integers(M * K, 3);
    let weights = [integers(K * N, -125), integers(K * N, -128)];
    let factors = [0usize, 1].map(|of| (0..N).map(|at| 0.5 + ((at + of) % 7) as f32 / 8.0).collect::<Vec<f32>>());
    let terms = [0usize, 1].map(|of| (0..N).map(|at| (at * (of + 2) % 5) as f32 - 2.0).collect::<Vec<f32>>());
    let [sx, sw, s1, s2, sy] = [0.02f32, 0.011, 0.21, 0.19, 0.17];
    let [zx, z1, z2, zy] = [131i64, 117, 140, 20];
    let mut model = ModelFile {
        name: "sum".to_owned(),
        opset: 17,
        inputs: vec![port("x", K)],
        outputs: vec![port("y", N)],
        weights: [("sx", sx), ("sw", sw), ("s1", s1), ("s2", s2), ("sy", sy)].map(|(name, x)| scale(name, x)).into(),
        nodes: vec![node("DequantizeLinear", "x sx zx", "xf")],
        ..ModelFile::default()
    };
    model.weights.extend([("zx", zx), ("z1", z1), ("z2", z2), ("zy", zy)].map(|(name, x)| zero(name, x)));
    for of in 0..2 {
        let row = |numbers: &[f32]| {
            let numbers: Vec<f64> = numbers.iter().map(|x| f64::from(*x)).collect();
            Tensor::from_floats(DType::F32, [N], &numbers)
        };
        model.weights.push((format!("w{of}"), Tensor::from_integers(DType::I8, [K, N], &weights[of])));
        model.weights.push((format!("g{of}"), row(&factors[of])));
        model.weights.push((format!("b{of}"), row(&terms[of])));
        model.nodes.extend([
            node("DequantizeLinear", &format!("w{of} sw"), &format!("wf{of}")),
            node("MatMul", &format!("xf wf{of}"), &format!("p{of}")),
            node("QuantizeLinear", &format!("p{of} s1 z1"), &format!("pq{of}")),
            node("DequantizeLinear", &format!("pq{of} s1 z1"), &format!("pf{of}")),
            node("Mul", &format!("pf{of} g{of}"), &format!("m{of}")),
            node("Add", &format!("m{of} b{of}"), &format!("n{of}")),
            node("QuantizeLinear", &format!("n{of} s2 z2"), &format!("nq{of}")),
            node("DequantizeLinear", &format!("nq{of} s2 z2"), &format!("nf{of}")),
        ]);
    }
    model.nodes.extend([
        node("Add", "nf0 nf1", "sum"),
        node("Relu", "sum", "above"),
        node("QuantizeLinear", "above sy zy", "y"),
    ]);
    let compiled = compiled_file(&model, &host::target());
    let tasks: Vec<String> = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
    if host::target().dot4_lanes([false, true]) > 0 {
        let is_product = |task: &String| task.starts_with("matmul") && task.ends_with("quant_u8");
        assert!(tasks.len() == 2 && tasks.iter().all(is_product), "{tasks:?}");
        assert_eq!(tasks.iter().filter(|task| task.contains("add_u8")).count(), 1, "{tasks:?}");
    }
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("x", &Tensor::from_integers(DType::U8, [M, K], &x)).unwrap();
    runner.run().unwrap();
    let quantized = |x: f32, scale: f32, zero: i64| ((x / scale).round_ties_even() as i64 + zero).clamp(0, 255);
    let side = |of: usize, at: usize| {
        let term = |k: usize| (x[at / N * K + k] as i64 - zx) * weights[of][k * N + at % N] as i64;
        let sum: i64 = (0..K).map(term).sum();
        let first = (quantized(sum as f32 * (sx * sw), s1, z1) - z1) as f32 * s1;
        (quantized(first * factors[of][at % N] + terms[of][at % N], s2, z2) - z2) as f32 * s2
    };
    let found = runner.outputs()[0].1.i64s();
    let expected = |at: usize| quantized((side(0, at) + side(1, at)).max(0.0), sy, zy);
    let n_steps: Vec<i64> = found.iter().enumerate().map(|(at, y)| (y - expected(at)).abs()).collect();
    assert!(n_steps.iter().all(|n| *n <= 1) && n_steps.iter().sum::<i64>() <= 4, "{n_steps:?}");
    assert!(found.iter().any(|y| *y > zy + 50) && found.contains(&zy), "{found:?}");
}
