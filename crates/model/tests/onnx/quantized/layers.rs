//! Models of one to three layers of quantized products, with expected results in integer arithmetic.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Tensor, onnx, specialise};
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::common::no_files;
use crate::compiled_for;

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
enum Nearness {
    Exact,
    /// Difference by 1 in one element of a thousand, but at least in one.
    Step,
    /// Relative to the largest element.
    Relative(f64),
}

struct Drawn {
    file: ModelFile,
    x: Tensor,
    expected: Vec<f64>,
    nearness: Nearness,
    /// Number of integer products.
    n_products: usize,
    /// Description for messages.
    text: String,
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
        let term = |at: usize, k: usize| (a[at / n * self.k + k] - zero) * (weights[k * n + at % n] - zeros[at % n]);
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
fn draw(seed: u64) -> Drawn {
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
    let mut ending = (DType::F32, Nearness::Relative(1e-6), numbers.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
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

/// Runs random models of quantized products; `TILEWRIGHT_QUANTIZED` sets their number.
#[test]
fn layers_of_integers_give_what_integers_say() {
    let n_models = std::env::var("TILEWRIGHT_QUANTIZED").ok().map_or(24, |n| n.parse().expect("a number of models"));
    let target = host::target();
    for seed in 0..n_models {
        let drawn = draw(seed);
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
            Nearness::Exact => {
                let first = found.iter().zip(&drawn.expected).position(|(a, b)| a != b);
                assert_eq!(None, first, "{about}: {:?} {:?}", found, drawn.expected);
            }
            Nearness::Step => {
                assert!(differ().all(|(a, b)| (a - b).abs() <= 1.0), "{about}");
                assert!(differ().count() <= 1 + found.len() / 1000, "{about}: {}", differ().count());
            }
            Nearness::Relative(part) => {
                let most = drawn.expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                assert!(differ().all(|(a, b)| (a - b).abs() <= part * most), "{about}");
            }
        }
    }
}
