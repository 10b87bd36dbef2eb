//! Products of quantized matrices by product kernels, bit for bit.

mod transposed;

use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Float8, Graph, Tensor, evaluate, onnx, specialise};
use tilewright_ir::Target;
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::common::no_files;
use crate::{compiled_for, graph_of, read_back};

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
    let graph = read_back(&model);
    let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
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

/// A NaN has no range: all results of dynamic quantization with a NaN are NaN, as in NumPy, and never zero.
#[test]
fn nan_is_not_lost_where_numbers_are_quantized_by_their_range() {
    let several = |op: &str, inputs: &str, outputs: &str| NodeFile {
        outputs: outputs.split(' ').map(str::to_owned).collect(),
        ..node(op, inputs, "")
    };
    let weights = Tensor::from_integers(DType::I8, [K, N], &integers(K * N, -125));
    let model = ModelFile {
        name: "by_range".to_owned(),
        opset: 17,
        inputs: vec![GraphPort { dtype: DType::F32, ..port("x", K) }],
        outputs: vec![GraphPort { dtype: DType::F32, ..port("y", N) }],
        weights: vec![("w".to_owned(), weights)],
        nodes: vec![
            several("DynamicQuantizeLinear", "x", "q s z"),
            node("MatMulInteger", "q w z", "sums"),
            NodeFile { attributes: vec![("to".to_owned(), Attribute::Int(1))], ..node("Cast", "sums", "f") },
            node("Mul", "f s", "y"),
        ],
        ..ModelFile::default()
    };
    let graph = read_back(&model);
    let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    for at in [0, 1, 17, M * K - 1] {
        let mut numbers: Vec<f64> = (0..M * K).map(|at| (at % 23) as f64 / 7.0 - 1.0).collect();
        let finite = Tensor::from_floats(DType::F32, [M, K], &numbers);
        numbers[at] = f64::NAN;
        let x = Tensor::from_floats(DType::F32, [M, K], &numbers);
        let evaluated = evaluate(&graph, &[("x", x.clone())]).unwrap().remove(0).floats();
        runner.set("x", &x).unwrap();
        runner.run().unwrap();
        for outputs in [&evaluated, &runner.outputs()[0].1.floats()] {
            assert!(outputs.iter().all(|y| y.is_nan()), "NaN at {at}: {outputs:?}");
        }
        runner.set("x", &finite).unwrap();
        runner.run().unwrap();
        assert!(runner.outputs()[0].1.floats().iter().all(|y| y.is_finite()), "none of {at} is left");
    }
}

/// Dynamically quantized convolutions over one and two dimensions, also depthwise ones with weights of 9
/// bits, round as often as the operators say. The range of an image that is not negative begins at 0.
/// Images of 72 channels have those that fill blocks: the ones that are read twice, and copies, which change
/// no range.
#[test]
fn dynamically_quantized_convolutions_round_as_their_operators_do() {
    for (spatial, c) in [(&[40][..], 32), (&[6, 7], 32), (&[6, 7], 72)] {
        let known = |name: &str, tensor: Tensor| (name.to_owned(), tensor);
        let taps = vec![3; spatial.len()];
        let weights = |n_results: usize, channels: usize, step: i128| {
            let shape = [&[n_results, channels][..], &taps].concat();
            let n = shape.iter().product::<usize>() as i128;
            // Of 72 channels few have weights of 9 bits.
            let number = |at: i128| if channels == 72 && at % 1295 != 7 { at * step % 227 } else { at * step % 256 };
            Tensor::from_integers(DType::U8, shape, &(0..n).map(number).collect::<Vec<_>>())
        };
        let bias: Vec<f64> = (0..c).map(|at| f64::from((at as f32 - 11.3) / 7.0)).collect();
        let along = [&[1, c][..], &vec![1; spatial.len()]].concat();
        let image = |name: &str, c: usize| GraphPort {
            name: name.to_owned(),
            dtype: DType::F32,
            dims: [&[1, c][..], spatial].concat().into_iter().map(Dim::Size).collect(),
        };
        let ints = |numbers: &[i64]| Attribute::Ints(numbers.to_vec());
        let layer = |x: &str, at: usize, groups: i64| {
            let of = |name: &str| format!("{name}{at}");
            let [q, s, z, sums, whole, scale, scaled, y] = ["q", "s", "z", "i", "f", "m", "t", "y"].map(of);
            let outputs = vec![q.clone(), s.clone(), z.clone()];
            let attributes = vec![
                ("pads".to_owned(), ints(&vec![1; 2 * spatial.len()])),
                ("group".to_owned(), Attribute::Int(groups)),
            ];
            [
                NodeFile { outputs, ..node("DynamicQuantizeLinear", x, "") },
                NodeFile { attributes, ..node("ConvInteger", &format!("{q} w{at} {z} zw"), &sums) },
                NodeFile { attributes: vec![("to".to_owned(), Attribute::Int(1))], ..node("Cast", &sums, &whole) },
                node("Mul", &format!("{s} ws"), &scale),
                node("Mul", &format!("{whole} {scale}"), &scaled),
                node("Add", &format!("{scaled} bias"), &y),
            ]
        };
        let model = ModelFile {
            name: "dynamic".to_owned(),
            opset: 17,
            inputs: vec![image("x", 16)],
            outputs: vec![image("y2", c)],
            weights: vec![
                known("w0", weights(c, 16, 89)),
                known("w1", weights(c, 1, 61)),
                known("w2", weights(c, c, 37)),
                known("bias", Tensor::from_floats(DType::F32, along, &bias)),
                scale("ws", 0.013),
                zero("zw", 100),
            ],
            nodes: [
                &layer("x", 0, 1)[..],
                &[node("Relu", "y0", "r")],
                &layer("r", 1, c as i64),
                &[node("Relu", "y1", "p")],
                &layer("p", 2, 1),
            ]
            .concat(),
            ..ModelFile::default()
        };
        let graph = read_back(&model);
        let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
        let labels: Vec<String> = compiled.fused.tasks().iter().map(|(workload, _)| workload.label()).collect();
        let is_padded = labels.iter().any(|label| label.starts_with("conv2d:c=80,h=6,w=7,k=72"));
        assert!(c != 72 || is_padded, "{labels:?}");
        let shape = [&[1, 16][..], spatial].concat();
        let n = shape.iter().product::<usize>();
        let numbers: Vec<f64> = (0..n).map(|at| f64::from((at * 37 % 101) as f32 / 9.7 - 4.0)).collect();
        let x = Tensor::from_floats(DType::F32, shape, &numbers);
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &x).unwrap();
        runner.run().unwrap();
        let expected = evaluate(&graph, &[("x", x)]).unwrap().remove(0).floats();
        assert_eq!(runner.outputs()[0].1.floats(), expected, "{spatial:?}");
    }
}

/// Convolutions of integers, the second one depthwise, of 72 channels.
pub fn bottleneck(x: &Tensor) -> Graph {
    let bytes = |shape: [usize; 4], step: i128| {
        let n = shape.iter().product::<usize>() as i128;
        Tensor::from_integers(DType::I8, shape, &(0..n).map(|at| at * step % 255 - 127).collect::<Vec<_>>())
    };
    let number = |x: f64| Tensor::from_floats(DType::F32, [0; 0], &[x]);
    let known = [
        ("w0", bytes([72, 16, 1, 1], 89)),
        ("w1", bytes([72, 1, 3, 3], 61)),
        ("w2", bytes([16, 72, 1, 1], 37)),
        ("step", number(0.02)),
        ("less", number(1.374_13e-4)),
        ("zero", Tensor::from_integers(DType::U8, [0; 0], &[120])),
    ];
    let to_f32 = || Some(("to", Attribute::Int(1)));
    let nodes: &[crate::Node] = &[
        ("q0", "QuantizeLinear", &["x", "step", "zero"], None),
        ("i0", "ConvInteger", &["q0", "w0", "zero"], None),
        ("f0", "Cast", &["i0"], to_f32()),
        ("s0", "Mul", &["f0", "less"], None),
        ("q1", "QuantizeLinear", &["s0", "step", "zero"], None),
        ("i1", "ConvInteger", &["q1", "w1", "zero"], Some(("group", Attribute::Int(72)))),
        ("f1", "Cast", &["i1"], to_f32()),
        ("s1", "Mul", &["f1", "less"], None),
        ("q2", "QuantizeLinear", &["s1", "step", "zero"], None),
        ("i2", "ConvInteger", &["q2", "w2", "zero"], None),
        ("y", "Cast", &["i2"], to_f32()),
    ];
    graph_of(("x", x), ("y", &[1, 16, 5, 6]), &known, nodes)
}

/// Channels that are added to whole blocks change no result.
#[test]
fn depthwise_convolutions_of_bytes_have_whole_blocks_of_channels() {
    let numbers: Vec<f64> = (0..16 * 7 * 8).map(|at| f64::from((at * 37 % 101) as f32 / 40.0 - 1.2)).collect();
    let x = Tensor::from_floats(DType::F32, [1, 16, 7, 8], &numbers);
    let graph = bottleneck(&x);
    let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
    let labels: Vec<String> = compiled.fused.tasks().iter().map(|(workload, _)| workload.label()).collect();
    assert!(labels.iter().any(|label| label.starts_with("depthwise_conv2d:c=80,")), "{labels:?}");
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    runner.set("x", &x).unwrap();
    runner.run().unwrap();
    assert_eq!(runner.outputs()[0].1.floats(), evaluate(&graph, &[("x", x)]).unwrap()[0].floats());
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
        let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
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
    let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
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
        let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
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

/// Models of one to three layers of quantized products, with expected results in integer arithmetic.
mod layers {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::Xoshiro256PlusPlus;
    use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
    use tilewright_graph::op::Attribute;
    use tilewright_graph::{DType, Dim, Tensor};

    /// Layer before its result is quantized.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Layer {
        MatMul,
        /// With an integer bias if the first flag is set, and weights as `[n, k]` if the second one is.
        Gemm(bool, bool),
        QLinearMatMul,
    }

    /// Quantized tensor: integers, a scale and a zero point.
    struct Bytes {
        name: String,
        dtype: DType,
        numbers: Vec<i64>,
        scale: f32,
        zero: i64,
    }

    /// Tolerance of a result.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub enum Nearness {
        Exact,
        /// Difference by 1 in one element of a thousand, but at least in one.
        Step,
        /// Relative to the largest element.
        Relative(f64),
    }

    pub struct Drawn {
        pub file: ModelFile,
        pub x: Tensor,
        pub expected: Vec<f64>,
        pub nearness: Nearness,
        /// Number of integer products.
        pub n_products: usize,
        /// Description for messages.
        pub text: String,
    }

    struct Writer {
        random: Xoshiro256PlusPlus,
        file: ModelFile,
        m: usize,
        /// Columns of the last tensor.
        k: usize,
        n_products: usize,
        text: String,
    }

    fn range(dtype: DType) -> (i64, i64) {
        let (least, most) = dtype.integer_range();
        (least as i64, most as i64)
    }

    fn quantized(x: f32, scale: f32, zero: i64, dtype: DType) -> i64 {
        let (least, most) = range(dtype);
        ((x / scale).round_ties_even() as i64 + zero).clamp(least, most)
    }

    impl Writer {
        fn constant(&mut self, tensor: Tensor) -> String {
            let name = format!("w{}", self.file.weights.len());
            self.file.weights.push((name.clone(), tensor));
            name
        }

        fn scale_and_zero(&mut self, scale: f32, zero: i64, dtype: DType) -> [String; 2] {
            let scale = self.constant(Tensor::scalar(DType::F32, f64::from(scale)));
            [scale, self.constant(Tensor::from_integers(dtype, vec![], &[zero.into()]))]
        }

        fn node(&mut self, op: &str, inputs: &[&str], attributes: &[(&str, Attribute)]) -> String {
            let name = format!("v{}", self.file.nodes.len());
            self.several(op, inputs, attributes, std::slice::from_ref(&name));
            name
        }

        fn several(&mut self, op: &str, inputs: &[&str], attributes: &[(&str, Attribute)], outputs: &[String]) {
            self.file.nodes.push(NodeFile {
                op: op.to_owned(),
                inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
                outputs: outputs.to_vec(),
                attributes: attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
                ..NodeFile::default()
            });
        }

        /// Weights `[k, n]`, their scales and zero points by column, and the names of all three.
        fn weights(&mut self, n: usize, turned: bool, bits: u32) -> (Vec<i64>, Vec<f32>, Vec<i64>, [String; 3]) {
            let k = self.k;
            let of_columns = self.random.random_bool(0.5);
            let is_signed = self.random.random_bool(0.7);
            let dtype = match (is_signed, bits) {
                (true, 4) => DType::I4,
                (false, 4) => DType::U4,
                (true, _) => DType::I8,
                (false, _) => DType::U8,
            };
            let (least, most) = range(dtype);
            // Some columns are at the limits of the type, all of one sign.
            let ends = self.random.random_bool(0.2);
            let numbers: Vec<i64> =
                (0..k * n).map(|_| if ends { most } else { self.random.random_range(least..=most) }).collect();
            let n_scales = if of_columns { n } else { 1 };
            let scales: Vec<f32> = (0..n_scales).map(|_| self.random.random_range(0.001..0.02)).collect();
            // Zero points of unsigned weights leave some weights outside i8.
            let zero = if is_signed { 0 } else { [128, 128, 100][self.random.random_range(0..3)] >> (8 - bits) };
            let zeros = vec![zero; n_scales];
            self.n_products += 1;
            let stored: Vec<i128> = match turned {
                true => (0..k * n).map(|at| numbers[at % k * n + at / k].into()).collect(),
                false => numbers.iter().map(|&x| x.into()).collect(),
            };
            let shape = if turned { vec![n, k] } else { vec![k, n] };
            let along = if of_columns { vec![n] } else { vec![] };
            let of_scales: Vec<f64> = scales.iter().map(|&x| x.into()).collect();
            let of_zeros: Vec<i128> = zeros.iter().map(|&x| x.into()).collect();
            let names = [
                self.constant(Tensor::from_integers(dtype, shape, &stored)),
                self.constant(Tensor::from_floats(DType::F32, along.clone(), &of_scales)),
                self.constant(Tensor::from_integers(dtype, along, &of_zeros)),
            ];
            let spread = |at: usize| if of_columns { at } else { 0 };
            let scales = (0..n).map(|at| scales[spread(at)]).collect();
            (numbers, scales, vec![zero; n], names)
        }

        /// Sums of products, with the zero point subtracted from each operand.
        fn sums(&self, a: &[i64], zero: i64, weights: &[i64], zeros: &[i64]) -> Vec<i64> {
            let n = zeros.len();
            let term =
                |at: usize, k: usize| (a[at / n * self.k + k] - zero) * (weights[k * n + at % n] - zeros[at % n]);
            (0..self.m * n).map(|at| (0..self.k).map(|k| term(at, k)).sum()).collect()
        }

        /// Adds a quantization of a value, and quantizes its expected numbers.
        fn quantize(&mut self, name: &str, numbers: &[f32], dtype: DType) -> Bytes {
            let most = numbers.iter().fold(0.01f32, |most, x| most.max(x.abs()));
            let scale = most / self.random.random_range(60.0..140.0);
            let (least, _) = range(dtype);
            let zero = least + self.random.random_range(0..=255);
            let [s, z] = self.scale_and_zero(scale, zero, dtype);
            let name = self.node("QuantizeLinear", &[name, &s, &z], &[]);
            let numbers = numbers.iter().map(|&x| quantized(x, scale, zero, dtype)).collect();
            Bytes { name, dtype, numbers, scale, zero }
        }

        fn dequantize(&mut self, bytes: &Bytes) -> String {
            let [s, z] = self.scale_and_zero(bytes.scale, bytes.zero, bytes.dtype);
            self.node("DequantizeLinear", &[&bytes.name, &s, &z], &[])
        }

        /// Reshapes quantized numbers to another shape and back, each time dequantized.
        fn moved(&mut self, bytes: Bytes) -> Bytes {
            let (m, k) = (self.m as i128, self.k as i128);
            let mut bytes = bytes;
            for shape in [vec![1, k, m], vec![m, k]] {
                let x = self.dequantize(&bytes);
                let shape = self.constant(Tensor::from_integers(DType::I64, vec![shape.len()], &shape));
                let x = self.node("Reshape", &[&x, &shape], &[]);
                let [s, z] = self.scale_and_zero(bytes.scale, bytes.zero, bytes.dtype);
                bytes.name = self.node("QuantizeLinear", &[&x, &s, &z], &[]);
            }
            bytes
        }

        /// Adds a layer on quantized numbers, with its expected sums.
        fn layer(&mut self, layer: Layer, x: Bytes, dtype: DType, relu: bool) -> Bytes {
            let n = self.random.random_range(1..40);
            let turned = matches!(layer, Layer::Gemm(_, true));
            let bits = if layer != Layer::QLinearMatMul && self.random.random_bool(0.3) { 4 } else { 8 };
            let (weights, scales, zeros, names) = self.weights(n, turned, bits);
            let mut sums = self.sums(&x.numbers, x.zero, &weights, &zeros);
            let factors: Vec<f32> = scales.iter().map(|scale| x.scale * scale).collect();
            let axis = [("axis", Attribute::Int(i64::from(!turned)))];
            let [w, ws, wz] = names.each_ref().map(String::as_str);
            let of_sums = |sums: &[i64]| -> Vec<f32> {
                sums.iter().enumerate().map(|(at, &sum)| sum as f32 * factors[at % n]).collect()
            };
            let least = range(dtype).0;
            let most = of_sums(&sums).iter().fold(0.01f32, |most, x| most.max(x.abs()));
            let scale = most / self.random.random_range(40.0..140.0);
            let zero = least + self.random.random_range(0..=255);
            let [s, z] = self.scale_and_zero(scale, zero, dtype);
            let mut name = match layer {
                Layer::QLinearMatMul => {
                    let [xs, xz] = self.scale_and_zero(x.scale, x.zero, x.dtype);
                    let a = match self.random.random_bool(0.5) {
                        true => self.node("Flatten", &[&x.name], &[]),
                        false => x.name,
                    };
                    self.node("QLinearMatMul", &[&a, &xs, &xz, w, ws, wz, &s, &z], &[])
                }
                _ => {
                    let a = self.dequantize(&x);
                    let mut b = self.node("DequantizeLinear", &[w, ws, wz], &axis);
                    if self.random.random_bool(0.3) {
                        b = self.node("Identity", &[&b], &[]);
                    }
                    let turn = [("transB", Attribute::Int(i64::from(turned)))];
                    match layer {
                        Layer::Gemm(true, _) => {
                            let bias: Vec<i64> = (0..n).map(|_| self.random.random_range(-3000..3000)).collect();
                            sums.iter_mut().enumerate().for_each(|(at, sum)| *sum += bias[at % n]);
                            let numbers: Vec<i128> = bias.iter().map(|&x| x.into()).collect();
                            let bias = self.constant(Tensor::from_integers(DType::I32, vec![n], &numbers));
                            if self.random.random_bool(0.3) {
                                // As of a bias that two nodes share, which a quantizer writes for each.
                                let other = Tensor::from_integers(DType::I32, vec![n], &vec![7; n]);
                                self.file.weights.insert(0, (bias.clone(), other));
                            }
                            let of_bias: Vec<f64> = factors.iter().map(|&x| x.into()).collect();
                            let of_bias = self.constant(Tensor::from_floats(DType::F32, vec![n], &of_bias));
                            let axis = [("axis", Attribute::Int(self.random.random_range(0..2)))];
                            let bias = self.node("DequantizeLinear", &[&bias, &of_bias], &axis);
                            self.node("Gemm", &[&a, &b, &bias], &turn)
                        }
                        Layer::Gemm(false, _) => self.node("Gemm", &[&a, &b], &turn),
                        _ => self.node("MatMul", &[&a, &b], &[]),
                    }
                }
            };
            let is_clipped = relu && layer != Layer::QLinearMatMul;
            if layer != Layer::QLinearMatMul {
                name = if relu { self.node("Relu", &[&name], &[]) } else { name };
                name = self.node("QuantizeLinear", &[&name, &s, &z], &[]);
            }
            let (least, most) = range(dtype);
            let whole = |(at, &sum): (usize, &i64)| {
                let multiple = (sum as f32 * (factors[at % n] / scale)).round_ties_even() as i64;
                (if is_clipped { multiple.max(0) } else { multiple } + zero).clamp(least, most)
            };
            let numbers = sums.iter().enumerate().map(whole).collect();
            self.k = n;
            Bytes { name, dtype, numbers, scale, zero }
        }

        /// Adds a dynamically quantized layer with a bias.
        fn dynamic(&mut self, name: &str, x: &[f32]) -> (String, Vec<f32>) {
            let n = self.random.random_range(1..40);
            let (low, high) = x.iter().fold((0.0f32, 0.0f32), |(low, high), &x| (low.min(x), high.max(x)));
            let scale = (high - low) / 255.0;
            let scale = if scale == 0.0 { 1.0 } else { scale };
            let zero = (-low / scale).clamp(0.0, 255.0).round_ties_even() as i64;
            let bytes: Vec<i64> = x.iter().map(|&x| quantized(x, scale, zero, DType::U8)).collect();
            let outputs = ["q", "s", "z"].map(|part| format!("{part}{}", self.file.nodes.len()));
            self.several("DynamicQuantizeLinear", &[name], &[], &outputs);
            let (weights, scales, zeros, [w, ws, wz]) = self.weights(n, false, 8);
            let sums = self.sums(&bytes, zero, &weights, &zeros);
            let [q, s, z] = outputs.each_ref().map(String::as_str);
            let whole = self.node("MatMulInteger", &[q, &w, z, &wz], &[]);
            let cast = self.node("Cast", &[&whole], &[("to", Attribute::Int(1))]);
            let scale_name = self.node("Mul", &[s, &ws], &[]);
            let product = self.node("Mul", &[&cast, &scale_name], &[]);
            let bias: Vec<f32> = (0..n).map(|_| self.random.random_range(-1.0..1.0)).collect();
            let numbers: Vec<f64> = bias.iter().map(|&x| x.into()).collect();
            let bias_name = self.constant(Tensor::from_floats(DType::F32, vec![n], &numbers));
            let name = self.node("Add", &[&product, &bias_name], &[]);
            self.k = n;
            let number = |(at, &sum): (usize, &i64)| sum as f32 * (scale * scales[at % n]) + bias[at % n];
            (name, sums.iter().enumerate().map(number).collect())
        }
    }

    /// Draws a model.
    pub fn draw(seed: u64) -> Drawn {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let (m, k) = (random.random_range(1..20), random.random_range(1..70));
        let port = |name: &str, dtype: DType, dims: &[usize]| GraphPort {
            name: name.to_owned(),
            dtype,
            dims: dims.iter().copied().map(Dim::Size).collect(),
        };
        let x: Vec<f32> = (0..m * k).map(|_| random.random_range(-3.0..3.0)).collect();
        let file = ModelFile {
            name: "layers".to_owned(),
            opset: 17,
            inputs: vec![port("x", DType::F32, &[m, k])],
            ..ModelFile::default()
        };
        let mut writer = Writer { random, file, m, k, n_products: 0, text: String::new() };
        let given: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        let given = Tensor::from_floats(DType::F32, vec![m, k], &given);
        let dtype_of = |writer: &mut Writer| if writer.random.random_bool(0.6) { DType::U8 } else { DType::I8 };
        let is_dynamic = writer.random.random_bool(0.2);
        let (mut name, mut numbers) = ("x".to_owned(), x);
        if is_dynamic {
            (name, numbers) = writer.dynamic(&name, &numbers);
            writer.text += "dynamic ";
        }
        let n_layers = if is_dynamic { 0 } else { writer.random.random_range(1..4) };
        // A bias may be added before the product is rounded.
        let mut ending =
            (DType::F32, Nearness::Relative(1e-6), numbers.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
        if n_layers > 0 {
            let dtype = dtype_of(&mut writer);
            let mut bytes = writer.quantize(&name, &numbers, dtype);
            for _ in 0..n_layers {
                if writer.random.random_bool(0.3) {
                    bytes = writer.moved(bytes);
                    writer.text += "moved ";
                }
                let layer = match writer.random.random_range(0..5) {
                    0 => Layer::MatMul,
                    1 => Layer::QLinearMatMul,
                    _ => Layer::Gemm(writer.random.random_bool(0.7), writer.random.random_bool(0.5)),
                };
                let relu = writer.random.random_bool(0.4);
                let dtype = if layer == Layer::QLinearMatMul { bytes.dtype } else { dtype_of(&mut writer) };
                writer.text += &format!("{layer:?} {:?}→{dtype:?} relu {relu} ", bytes.dtype);
                bytes = writer.layer(layer, bytes, dtype, relu);
            }
            ending = (bytes.dtype, Nearness::Exact, bytes.numbers.iter().map(|&x| x as f64).collect());
            name.clone_from(&bytes.name);
            if writer.random.random_bool(0.4) {
                // A function that becomes one map of integers.
                let x = writer.dequantize(&bytes);
                let sigmoid = writer.node("Sigmoid", &[&x], &[]);
                let silu = writer.node("Mul", &[&x, &sigmoid], &[]);
                let of = |q: i64| {
                    let x = f64::from((q - bytes.zero) as f32 * bytes.scale);
                    (x / (1.0 + (-x).exp())) as f32
                };
                let numbers: Vec<f32> = bytes.numbers.iter().map(|&q| of(q)).collect();
                let dtype = dtype_of(&mut writer);
                let last = writer.quantize(&silu, &numbers, dtype);
                writer.text += "silu ";
                ending = (dtype, Nearness::Step, last.numbers.iter().map(|&x| x as f64).collect());
                name = last.name;
            } else if writer.random.random_bool(0.3) {
                let number = |&q: &i64| f64::from((q - bytes.zero) as f32 * bytes.scale);
                ending = (DType::F32, Nearness::Relative(1e-6), bytes.numbers.iter().map(number).collect());
                name = writer.dequantize(&bytes);
            }
        }
        let (dtype, nearness, expected) = ending;
        let Writer { mut file, m, k, n_products, text, .. } = writer;
        // The last value is the output.
        file.nodes.iter_mut().flat_map(|node| &mut node.outputs).filter(|own| **own == name).for_each(|own| {
            *own = "y".to_owned();
        });
        file.outputs = vec![port("y", dtype, &[m, k])];
        Drawn { file, x: given, expected, nearness, n_products, text }
    }
}

/// Runs random models of quantized products; `TILEWRIGHT_QUANTIZED` sets their number.
#[test]
fn layers_of_integers_give_what_integers_say() {
    let n_models = std::env::var("TILEWRIGHT_QUANTIZED").ok().map_or(24, |n| n.parse().expect("a number of models"));
    let target = host::target();
    for seed in 0..n_models {
        let drawn = layers::draw(seed);
        let about = format!("model {seed} ({})", drawn.text);
        let file = onnx::write(&drawn.file);
        if let Some(folder) = std::env::var_os("TILEWRIGHT_QUANTIZED_FOLDER") {
            let path = std::path::Path::new(&folder).join(format!("{seed}.onnx"));
            std::fs::write(path, &file).unwrap();
        }
        let graph = onnx::read(&file.into(), &mut no_files).unwrap().graph;
        let special = specialise(&graph, &Bindings { fold_bytes: usize::MAX, ..Bindings::default() });
        assert!(special.problems.is_empty(), "{about}: {:?}", special.problems);
        let compiled = compiled_for(&special.graph, &target).unwrap_or_else(|error| panic!("{about}: {error}"));
        let tasks = compiled.fused.tasks();
        let of_integers: usize =
            tasks.iter().filter(|(workload, _)| workload.has_integer_factors()).map(|(_, n)| n).sum();
        if target.dot4_lanes([false, true]) > 0 {
            assert_eq!(drawn.n_products, of_integers, "{about}: {tasks:?}");
            // Kernels multiply u8 by i8 in less time than i8 by i8.
            assert!(tasks.iter().all(|(workload, _)| !workload.to_string().contains("i8i8")), "{about}: {tasks:?}");
        }
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &drawn.x).unwrap();
        runner.run().unwrap();
        let found = runner.outputs()[0].1.floats();
        assert_eq!(found.len(), drawn.expected.len(), "{about}");
        let differ = || found.iter().zip(&drawn.expected).filter(|(a, b)| a != b);
        match drawn.nearness {
            layers::Nearness::Exact => {
                let first = found.iter().zip(&drawn.expected).position(|(a, b)| a != b);
                assert_eq!(None, first, "{about}: {:?} {:?}", found, drawn.expected);
            }
            layers::Nearness::Step => {
                assert!(differ().all(|(a, b)| (a - b).abs() <= 1.0), "{about}");
                assert!(differ().count() <= 1 + found.len() / 1000, "{about}: {}", differ().count());
            }
            layers::Nearness::Relative(part) => {
                let most = drawn.expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                assert!(differ().all(|(a, b)| (a - b).abs() <= part * most), "{about}");
            }
        }
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

/// Convolutions of all kinds between quantizations, padded with zero points, compared with sums of integers.
#[test]
fn convolutions_of_integers_give_what_integers_say() {
    for target in targets() {
        check_convolutions(&target, [i128::MIN, i128::MAX]);
        check_convolutions(&target, [-64, 64]);
    }
}

fn check_convolutions(target: &Target, [least_weight, most_weight]: [i128; 2]) {
    // Input channels, rows and columns, filters, their rows and columns, stride, padding and groups.
    let cases = [
        [16, 8, 9, 32, 3, 3, 1, 1, 1],
        [3, 13, 12, 16, 7, 7, 2, 3, 1],
        [32, 7, 7, 48, 1, 1, 1, 0, 1],
        [32, 9, 9, 32, 3, 3, 1, 1, 32],
        [32, 8, 8, 32, 3, 3, 2, 1, 32],
        [16, 9, 8, 16, 5, 5, 1, 2, 16],
        [16, 9, 10, 16, 7, 7, 2, 3, 16],
        [16, 6, 6, 16, 3, 3, 1, 1, 2],
    ];
    for (at, [c, h, w, k, r, s, stride, pad, groups]) in cases.into_iter().enumerate() {
        for (dtype, is_operator) in [(DType::U8, false), (DType::I8, false), (DType::U8, true)] {
            let about = format!("case {at}, {dtype:?}, as one operator: {is_operator}, {}", target.name());
            let (least, most): (i64, i64) = if dtype == DType::U8 { (0, 255) } else { (-128, 127) };
            let x: Vec<f64> = (0..c * h * w).map(|at| ((at * 89 + 7) % 251) as f64 / 50.0 - 2.0).collect();
            let (scale, zero) = (0.02f32, least + 100);
            let bytes: Vec<i64> =
                x.iter().map(|&x| ((x as f32 / scale).round_ties_even() as i64 + zero).clamp(least, most)).collect();
            let of_group = c / groups;
            let weights = integers(k * of_group * r * s, -125).into_iter();
            let weights: Vec<i128> = weights.map(|w| w.clamp(least_weight, most_weight)).collect();
            // Behind a DequantizeLinear, weights may have negative scales, as NNCF writes them.
            let sign = |k: usize| if is_operator || !k.is_multiple_of(3) { 1.0 } else { -1.0 };
            let scales: Vec<f32> = (0..k).map(|k| sign(k) * (0.001 + 0.0001 * (k % 7) as f32)).collect();
            let bias = integers(k, -900);
            let (out_h, out_w) = ((h + 2 * pad - r) / stride + 1, (w + 2 * pad - s) / stride + 1);
            let (by, plus) = (0.3f32 * (of_group * r * s) as f32 / 30.0, least + 120);
            let mut expected = Vec::new();
            for (k, oh, ow) in (0..k * out_h * out_w).map(|at| (at / (out_h * out_w), at / out_w % out_h, at % out_w)) {
                let first = k / (cases[at][3] / groups) * of_group;
                let mut sum = bias[k] as i64;
                for (ch, i, j) in (0..of_group * r * s).map(|t| (t / (r * s), t / s % r, t % s)) {
                    let (row, column) = ((oh * stride + i).wrapping_sub(pad), (ow * stride + j).wrapping_sub(pad));
                    if row < h && column < w {
                        let weight = weights[((k * of_group + ch) * r + i) * s + j] as i64;
                        sum += (bytes[((first + ch) * h + row) * w + column] - zero) * weight;
                    }
                }
                let factor = scale * scales[k] / by;
                expected.push(((sum as f32 * factor).round_ties_even() as i64 + plus).clamp(least, most) as f64);
            }
            let floats = |numbers: &[f32]| {
                let numbers: Vec<f64> = numbers.iter().map(|&x| x.into()).collect();
                Tensor::from_floats(DType::F32, vec![numbers.len()], &numbers)
            };
            let one = |x: f32| Tensor::scalar(DType::F32, x.into());
            let point = |zero: i64| Tensor::from_integers(dtype, vec![], &[zero.into()]);
            let sums: Vec<f32> = scales.iter().map(|own| scale * own).collect();
            let known = [
                ("s", one(scale)),
                ("z", point(zero)),
                ("w", Tensor::from_integers(DType::I8, vec![k, of_group, r, s], &weights)),
                ("ws", floats(&scales)),
                ("wz", Tensor::from_integers(DType::I8, vec![k], &vec![0; k])),
                ("b", Tensor::from_integers(DType::I32, vec![k], &bias)),
                ("bs", floats(&sums)),
                ("ys", one(by)),
                ("yz", point(plus)),
            ];
            let node = |op: &str, inputs: &str, output: &str, attributes: &[(&str, Attribute)]| NodeFile {
                op: op.to_owned(),
                inputs: inputs.split(' ').map(str::to_owned).collect(),
                outputs: vec![output.to_owned()],
                attributes: attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
                ..NodeFile::default()
            };
            let windows = [
                ("strides", Attribute::Ints(vec![stride as i64; 2])),
                ("pads", Attribute::Ints(vec![pad as i64; 4])),
                ("group", Attribute::Int(groups as i64)),
            ];
            let along = [("axis", Attribute::Int(0))];
            let mut nodes = vec![node("QuantizeLinear", "x s z", "q", &[])];
            if is_operator {
                nodes.push(node("QLinearConv", "q s z w ws wz ys yz b", "y", &windows));
            } else {
                nodes.push(node("DequantizeLinear", "q s z", "a", &[]));
                nodes.push(node("DequantizeLinear", "w ws wz", "f", &along));
                nodes.push(node("DequantizeLinear", "b bs", "c", &along));
                nodes.push(node("Conv", "a f c", "o", &windows));
                nodes.push(node("QuantizeLinear", "o ys yz", "y", &[]));
            }
            let port = |name: &str, dtype: DType, dims: [usize; 4]| GraphPort {
                name: name.to_owned(),
                dtype,
                dims: dims.into_iter().map(Dim::Size).collect(),
            };
            let model = ModelFile {
                name: "convolution".to_owned(),
                opset: 17,
                inputs: vec![port("x", DType::F32, [1, c, h, w])],
                outputs: vec![port("y", dtype, [1, k, out_h, out_w])],
                weights: known.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect(),
                nodes,
                ..ModelFile::default()
            };
            let graph = read_back(&model);
            let special = specialise(&graph, &Bindings::default());
            assert!(special.problems.is_empty(), "{about}: {:?}", special.problems);
            let compiled = compiled_for(&special.graph, target).unwrap_or_else(|e| panic!("{about}: {e}"));
            let tasks: Vec<String> = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
            let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
            runner.set("x", &Tensor::from_floats(DType::F32, vec![1, c, h, w], &x)).unwrap();
            runner.run().unwrap();
            let found = runner.outputs()[0].1.floats();
            // If f32 is used, since it is faster, a sum may be rounded to the neighbouring step.
            let n_steps = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
            let is_near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1.0);
            let is_of = |types: &str| tasks.iter().any(|task| task.contains("conv2d") && task.contains(types));
            let is_exact = is_of("i8") || is_of("u8i7");
            let is_short = (least_weight, most_weight) == (-64, 64) && target.adds_pairs_of_bytes();
            assert_eq!(is_of("u8i7"), is_exact && is_short, "{about}: {tasks:?}");
            assert!(is_exact || !is_operator || !multiplies_bytes(target), "{about}: {tasks:?}");
            let closes = tasks.iter().any(|task| task.contains("conv2d") && task.contains("quant_"));
            assert_eq!(closes, is_exact, "{about}: {tasks:?}");
            assert!(is_near && (n_steps == 0 || !is_exact && n_steps < found.len() / 50), "{about}: {tasks:?}");
        }
    }
}

/// Depthwise convolutions of integers with per-channel scales, as NNCF writes them: both they and the
/// convolution before, which quantizes per channel, use integers.
#[test]
fn channels_of_activations_have_scales_of_their_own() {
    const C: usize = 16;
    const K: usize = 32;
    const H: usize = 6;
    // The first convolution ends with a clip at zero, or at bounds that some scales reach and some do not.
    for (dtype, high) in [(DType::U8, None), (DType::I8, None), (DType::U8, Some(2.5f32)), (DType::U8, Some(1.0))] {
        let (least, most): (i64, i64) = if dtype == DType::U8 { (0, 255) } else { (-128, 127) };
        let x = integers(C * H * H, 0);
        let (w1, w2, bias) = (integers(K * C, -125), integers(K * 9, -125), integers(K, -125));
        let (sx, sy, zx, zy) = (0.02f32, 0.15f32, 120i64, 100i64);
        let of_channel = |first: f32, k: usize| first * (1.0 + (k % 5) as f32);
        let [s1, s2, sm] = [0.0005, 0.003, 0.004].map(|first| move |k: usize| of_channel(first, k));
        let bias = |k: usize| bias[k] as f32 / 100.0;
        let mut middle = Vec::new();
        for (k, at) in (0..K * H * H).map(|at| (at / (H * H), at % (H * H))) {
            let sum: i64 = (0..C).map(|c| (x[c * H * H + at] as i64 - zx) * w1[k * C + c] as i64).sum();
            let number = (sum as f32 * (sx * s1(k)) + bias(k)).max(0.0).min(high.unwrap_or(f32::INFINITY));
            middle.push(((number / sm(k)).round_ties_even() as i64).clamp(least, most));
        }
        let mut expected = Vec::new();
        for (k, row, column) in (0..K * H * H).map(|at| (at / (H * H), at / H % H, at % H)) {
            let tap = |(i, j): (usize, usize)| {
                let (row, column) = ((row + i).wrapping_sub(1), (column + j).wrapping_sub(1));
                let is_inside = row < H && column < H;
                if is_inside { middle[(k * H + row) * H + column] * w2[k * 9 + i * 3 + j] as i64 } else { 0 }
            };
            let sum: i64 = (0..9).map(|at| tap((at / 3, at % 3))).sum();
            expected.push(((sum as f32 * (sm(k) * s2(k) / sy)).round_ties_even() as i64 + zy).clamp(0, 255));
        }
        let channels = |of: &dyn Fn(usize) -> f32| {
            Tensor::from_floats(DType::F32, vec![K], &(0..K).map(|k| of(k).into()).collect::<Vec<f64>>())
        };
        let mut weights = vec![
            ("w1".to_owned(), Tensor::from_integers(DType::I8, [K, C, 1, 1], &w1)),
            ("w2".to_owned(), Tensor::from_integers(DType::I8, [K, 1, 3, 3], &w2)),
            ("b".to_owned(), channels(&bias)),
            ("s1".to_owned(), channels(&s1)),
            ("s2".to_owned(), channels(&s2)),
            ("sm".to_owned(), channels(&sm)),
            ("zm".to_owned(), Tensor::from_integers(dtype, [K], &[0; K])),
            scale("sx", sx),
            scale("sy", sy),
            zero("zx", zx),
            zero("zy", zy),
            scale("low", 0.0),
        ];
        weights.extend(high.map(|high| scale("high", high)));
        let with = |node: NodeFile, attributes: &[(&str, Attribute)]| NodeFile {
            attributes: attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
            ..node
        };
        let along = [("axis", Attribute::Int(0))];
        let windows = [("pads", Attribute::Ints(vec![1; 4])), ("group", Attribute::Int(K as i64))];
        let cut = if high.is_some() { node("Clip", "o low high", "r") } else { node("Relu", "o", "r") };
        let image = |name: &str, n: usize| GraphPort {
            name: name.to_owned(),
            dtype: DType::U8,
            dims: [1, n, H, H].into_iter().map(Dim::Size).collect(),
        };
        let model = ModelFile {
            name: "channels".to_owned(),
            opset: 17,
            inputs: vec![image("x", C)],
            outputs: vec![image("y", K)],
            weights,
            nodes: vec![
                node("DequantizeLinear", "x sx zx", "a"),
                with(node("DequantizeLinear", "w1 s1", "f"), &along),
                node("Conv", "a f b", "o"),
                cut,
                node("QuantizeLinear", "r sm zm", "q"),
                node("DequantizeLinear", "q sm zm", "d"),
                with(node("DequantizeLinear", "w2 s2", "g"), &along),
                with(node("Conv", "d g", "p"), &windows),
                node("QuantizeLinear", "p sy zy", "y"),
            ],
            ..ModelFile::default()
        };
        let graph = read_back(&model);
        let special = specialise(&graph, &Bindings::default());
        assert!(special.problems.is_empty(), "{:?}", special.problems);
        let compiled = compiled_for(&special.graph, &host::target()).unwrap();
        let tasks: Vec<String> = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
        if host::target().dot4_lanes([false, true]) > 0 {
            let of_integers = |task: &&String| task.contains("u8i8") && task.contains("quant_u8");
            assert_eq!(tasks.iter().filter(of_integers).count(), 2, "{tasks:?}");
        }
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        runner.set("x", &Tensor::from_integers(DType::U8, [1, C, H, H], &x)).unwrap();
        runner.run().unwrap();
        let found = runner.outputs()[0].1.i64s();
        // A non-integer bias is added in f32, where a sum may be rounded to the neighbouring step.
        let differ: Vec<(&i64, &i64)> = found.iter().zip(&expected).filter(|(a, b)| a != b).collect();
        let is_near = differ.iter().all(|(a, b)| (*a - *b).abs() <= 2) && differ.len() <= found.len() / 100;
        assert!(is_near, "{dtype:?} {high:?}: {differ:?}");
        assert!(expected.iter().any(|y| *y > zy + 20) && expected.iter().any(|y| *y < zy - 20), "{expected:?}");
    }
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
    let graph = read_back(&model);
    let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
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
    let graph = read_back(&model);
    let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
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
    let graph = read_back(&model);
    let compiled = compiled_for(&specialise(&graph, &Bindings::default()).graph, &host::target()).unwrap();
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
