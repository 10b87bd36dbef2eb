//! ONNX Runtime's operators on quantized tensors, run by kernels, compared with their formulas.

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

const OPERATORS: [&str; 11] = [
    "QGemm",
    "QLinearAdd",
    "QLinearMul",
    "QLinearSigmoid",
    "QLinearLeakyRelu",
    "QLinearSoftmax",
    "QLinearAveragePool",
    "QLinearGlobalAveragePool",
    "QLinearReduceMean",
    "QLinearConcat",
    "QLinearWhere",
];

/// Quantized tensor of the model: its name, integers, scale and zero point.
struct Quantized {
    name: String,
    numbers: Vec<i64>,
    scale: f32,
    zero: i64,
}

impl Quantized {
    fn floats(&self) -> Vec<f64> {
        self.numbers.iter().map(|q| f64::from((q - self.zero) as f32 * self.scale)).collect()
    }
}

struct Draft {
    random: Xoshiro256PlusPlus,
    file: ModelFile,
    feeds: Vec<(String, Tensor)>,
    dtype: DType,
}

fn range(dtype: DType) -> (i64, i64) {
    if dtype == DType::U8 { (0, 255) } else { (-128, 127) }
}

fn dims(shape: &[usize]) -> Vec<Dim> {
    shape.iter().copied().map(Dim::Size).collect()
}

fn whole(dtype: DType, shape: &[usize], numbers: &[i64]) -> Tensor {
    let numbers: Vec<i128> = numbers.iter().map(|&x| x.into()).collect();
    Tensor::from_integers(dtype, shape, &numbers)
}

impl Draft {
    fn constant(&mut self, tensor: Tensor) -> String {
        let name = format!("w{}", self.file.weights.len());
        self.file.weights.push((name.clone(), tensor));
        name
    }

    /// Makes a quantized tensor of random integers, as an input of the model or a constant.
    fn tensor(&mut self, shape: &[usize], dtype: DType, is_known: bool) -> Quantized {
        let (least, most) = range(dtype);
        let n: usize = shape.iter().product();
        let numbers: Vec<i64> = (0..n).map(|_| self.random.random_range(least..=most)).collect();
        let tensor = whole(dtype, shape, &numbers);
        let name = if is_known {
            self.constant(tensor)
        } else {
            let name = format!("x{}", self.feeds.len());
            self.file.inputs.push(GraphPort { name: name.clone(), dtype, dims: dims(shape) });
            self.feeds.push((name.clone(), tensor));
            name
        };
        let (scale, zero) = (self.random.random_range(0.005..0.05), self.random.random_range(least..=most));
        Quantized { name, numbers, scale, zero }
    }

    /// Makes a scale and a zero point, and returns their names; a zero point of 0 is sometimes omitted.
    fn scaling(&mut self, scale: f32, zero: i64, dtype: DType) -> [String; 2] {
        let scale = self.constant(Tensor::scalar(DType::F32, scale.into()));
        let is_left_out = zero == 0 && self.random.random_bool(0.5);
        let zero = if is_left_out { String::new() } else { self.constant(whole(dtype, &[], &[zero])) };
        [scale, zero]
    }

    fn inputs_of(&mut self, x: &Quantized) -> Vec<String> {
        let [scale, zero] = self.scaling(x.scale, x.zero, self.dtype);
        vec![x.name.clone(), scale, zero]
    }
}

/// Random model: its only node, and the expected results, as multiples of the result's scale.
struct Drawn {
    inputs: Vec<String>,
    attributes: Vec<(&'static str, Attribute)>,
    multiples: Vec<f64>,
    zero: i64,
    shape: Vec<usize>,
    is_exact: bool,
}

/// Draws a `QGemm`: scales per column or a single one, with or without an integer bias, either matrix
/// possibly transposed.
fn gemm(draft: &mut Draft) -> Drawn {
    let [m, n, k] = [20, 40, 90].map(|most| draft.random.random_range(1..most));
    let [turned_a, turned_b, has_bias, by_column] = [0.2, 0.5, 0.7, 0.5].map(|p| draft.random.random_bool(p));
    let mut a = draft.tensor(&if turned_a { [k, m] } else { [m, k] }, draft.dtype, false);
    let mut b = draft.tensor(&if turned_b { [n, k] } else { [k, n] }, DType::I8, true);
    // A zero point with which the weights fit i8.
    b.zero = 0;
    a.zero = if draft.random.random_bool(0.3) { 0 } else { a.zero };
    let scales: Vec<f32> = (0..if by_column { n } else { 1 }).map(|_| draft.random.random_range(0.001..0.02)).collect();
    let alpha = if draft.random.random_bool(0.3) { 0.75f32 } else { 1.0 };
    let scale = draft.random.random_range(0.5..2.0f32);
    let (least, most) = range(draft.dtype);
    let zero = draft.random.random_range(least..=most);
    let bias: Vec<i64> = (0..n).map(|_| if has_bias { draft.random.random_range(-9000..9000) } else { 0 }).collect();
    let known = |draft: &mut Draft, tensor| draft.constant(tensor);
    let of_scales: Vec<f64> = scales.iter().map(|&x| x.into()).collect();
    let along = if by_column { vec![n] } else { vec![] };
    let zeros = vec![0; scales.len()];
    let inputs = vec![
        a.name.clone(),
        known(draft, Tensor::scalar(DType::F32, a.scale.into())),
        known(draft, whole(draft.dtype, &[], &[a.zero])),
        b.name.clone(),
        known(draft, Tensor::from_floats(DType::F32, along.clone(), &of_scales)),
        known(draft, whole(DType::I8, &along, &zeros)),
        if has_bias { known(draft, whole(DType::I32, &[n], &bias)) } else { String::new() },
        known(draft, Tensor::scalar(DType::F32, scale.into())),
        known(draft, whole(draft.dtype, &[], &[zero])),
    ];
    let term = |at: usize, p: usize| {
        let (i, j) = (at / n, at % n);
        let of_a = a.numbers[if turned_a { p * m + i } else { i * k + p }] - a.zero;
        of_a * b.numbers[if turned_b { j * k + p } else { p * n + j }]
    };
    let multiple = |at: usize| {
        let sum = bias[at % n] + (0..k).map(|p| term(at, p)).sum::<i64>();
        let factor = alpha * a.scale * scales[if by_column { at % n } else { 0 }] / scale;
        f64::from(sum as f32 * factor)
    };
    let attributes = vec![
        ("transA", Attribute::Int(turned_a.into())),
        ("transB", Attribute::Int(turned_b.into())),
        ("alpha", Attribute::Float(alpha)),
    ];
    Drawn { inputs, attributes, multiples: (0..m * n).map(multiple).collect(), zero, shape: vec![m, n], is_exact: true }
}

/// Means of windows of 3 by 2, over elements within the image.
fn means(x: &[f64], [c, h, w]: [usize; 3]) -> Vec<f64> {
    let mean = |at: usize| {
        let (c, i, j) = (at / ((h - 1) * (w - 1)), at / (w - 1) % (h - 1), at % (w - 1));
        let rows = i.saturating_sub(1)..(i + 2).min(h);
        let places: Vec<usize> = rows.flat_map(|i| [j, j + 1].map(|j| (c * h + i) * w + j)).collect();
        places.iter().map(|&at| x[at]).sum::<f64>() / places.len() as f64
    };
    (0..c * (h - 1) * (w - 1)).map(mean).collect()
}

/// Draws any operator but `QGemm`, on images `[1, c, h, w]`.
fn pointwise(draft: &mut Draft, op: &str) -> Drawn {
    let [c, h, w] = [9, 7, 7].map(|most| draft.random.random_range(2..most));
    let shape = vec![1, c, h, w];
    let mut x = draft.tensor(&shape, draft.dtype, false);
    x.zero = if draft.random.random_bool(0.3) { 0 } else { x.zero };
    let mut attributes = Vec::new();
    let numbers = x.floats();
    let image = h * w;
    let mut inputs = draft.inputs_of(&x);
    let mut is_exact = false;
    let (out, values): (Vec<usize>, Vec<f64>) = match op {
        "QLinearAdd" | "QLinearMul" => {
            let of_channel = draft.random.random_bool(0.3);
            let is_known = draft.random.random_bool(0.3);
            let y = draft.tensor(&if of_channel { vec![c, 1, 1] } else { shape.clone() }, draft.dtype, is_known);
            inputs.extend(draft.inputs_of(&y));
            let other = y.floats();
            let y = |at: usize| other[if of_channel { at / image } else { at }];
            let of = |(at, x): (usize, &f64)| if op == "QLinearAdd" { x + y(at) } else { x * y(at) };
            (shape, numbers.iter().enumerate().map(of).collect())
        }
        "QLinearSigmoid" => (shape, numbers.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect()),
        "QLinearLeakyRelu" => {
            attributes.push(("alpha", Attribute::Float(0.25)));
            (shape, numbers.iter().map(|&x| if x < 0.0 { 0.25 * x } else { x }).collect())
        }
        "QLinearSoftmax" => {
            // Rows along the last dimension or, before opset 13, over all dimensions after the first.
            let is_flat = draft.random.random_bool(0.5);
            attributes.push(("opset", Attribute::Int(if is_flat { 12 } else { 17 })));
            attributes.push(("axis", Attribute::Int(if is_flat { 1 } else { -1 })));
            let row = if is_flat { c * image } else { w };
            let soft = |row: &[f64]| {
                let sum: f64 = row.iter().map(|x| x.exp()).sum();
                row.iter().map(|x| x.exp() / sum).collect::<Vec<f64>>()
            };
            (shape, numbers.chunks(row).flat_map(soft).collect())
        }
        "QLinearAveragePool" => {
            attributes.push(("kernel_shape", Attribute::Ints(vec![3, 2])));
            attributes.push(("pads", Attribute::Ints(vec![1, 0, 0, 0])));
            (vec![1, c, h - 1, w - 1], means(&numbers, [c, h, w]))
        }
        "QLinearGlobalAveragePool" | "QLinearReduceMean" => {
            if op == "QLinearReduceMean" {
                attributes.push(("axes", Attribute::Ints(vec![-1, 2])));
                attributes.push(("keepdims", Attribute::Int(0)));
            }
            let shape = if op == "QLinearReduceMean" { vec![1, c] } else { vec![1, c, 1, 1] };
            (shape, numbers.chunks(image).map(|image| image.iter().sum::<f64>() / image.len() as f64).collect())
        }
        "QLinearConcat" => {
            let rows = draft.random.random_range(1..5);
            let y = draft.tensor(&[1, rows, h, w], draft.dtype, false);
            inputs.extend(draft.inputs_of(&y));
            attributes.push(("axis", Attribute::Int(1)));
            is_exact = true;
            (vec![1, c + rows, h, w], [numbers, y.floats()].concat())
        }
        _ => {
            let y = draft.tensor(&shape, draft.dtype, false);
            let is: Vec<i64> = (0..c * image).map(|_| draft.random.random_range(0..2)).collect();
            draft.file.inputs.push(GraphPort { name: "is".to_owned(), dtype: DType::Bool, dims: dims(&shape) });
            draft.feeds.push(("is".to_owned(), whole(DType::Bool, &shape, &is)));
            inputs.extend(draft.inputs_of(&y));
            inputs.insert(0, "is".to_owned());
            let values = is.iter().zip(numbers.iter().zip(y.floats()));
            is_exact = true;
            (shape, values.map(|(is, (x, y))| if *is == 1 { *x } else { y }).collect())
        }
    };
    let most = values.iter().fold(0.01f64, |most, x| most.max(x.abs())) as f32;
    let scale = most / draft.random.random_range(60.0..140.0);
    let (least, end) = range(draft.dtype);
    let zero = if draft.random.random_bool(0.2) { 0 } else { draft.random.random_range(least..=end) };
    let of_result = draft.scaling(scale, zero, draft.dtype);
    match op {
        "QLinearConcat" => drop(inputs.splice(0..0, of_result)),
        _ => inputs.extend(of_result),
    }
    let multiples = values.iter().map(|x| f64::from(*x as f32 / scale)).collect();
    Drawn { inputs, attributes, multiples, zero, shape: out, is_exact }
}

#[test]
fn operators_of_quantized_tensors_give_what_their_formulas_say() {
    let n_models = std::env::var("TILEWRIGHT_QUANTIZED").ok().map_or(44, |n| n.parse().expect("a number of models"));
    let target = host::target();
    for seed in 0..n_models {
        let op = OPERATORS[seed as usize % OPERATORS.len()];
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let dtype = if random.random_bool(0.6) { DType::U8 } else { DType::I8 };
        let about = format!("model {seed}, {op} of {dtype}");
        let file = ModelFile {
            name: op.to_owned(),
            opset: 17,
            domains: vec![("com.microsoft".to_owned(), 1)],
            ..ModelFile::default()
        };
        let mut draft = Draft { random, file, feeds: Vec::new(), dtype };
        let drawn = if op == "QGemm" { gemm(&mut draft) } else { pointwise(&mut draft, op) };
        let Draft { mut file, feeds, .. } = draft;
        file.nodes.push(NodeFile {
            op: op.to_owned(),
            domain: "com.microsoft".to_owned(),
            inputs: drawn.inputs,
            outputs: vec!["y".to_owned()],
            attributes: drawn.attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            ..NodeFile::default()
        });
        file.outputs.push(GraphPort { name: "y".to_owned(), dtype, dims: dims(&drawn.shape) });
        let bytes = onnx::write(&file);
        if let Some(folder) = std::env::var_os("TILEWRIGHT_QUANTIZED_FOLDER") {
            std::fs::write(std::path::Path::new(&folder).join(format!("{op}-{seed}.onnx")), &bytes).unwrap();
        }
        let graph = onnx::read(&bytes.into(), &mut no_files).unwrap().graph;
        let special = specialise(&graph, &Bindings { fold_bytes: usize::MAX, ..Bindings::default() });
        assert!(special.problems.is_empty(), "{about}: {:?}", special.problems);
        let compiled = compiled_for(&special.graph, &target).unwrap_or_else(|error| panic!("{about}: {error}"));
        let is_product = compiled.fused.tasks().iter().any(|(workload, _)| workload.has_integer_factors());
        assert_eq!(is_product, op == "QGemm" && target.dot4_lanes([false, true]) > 0, "{about}");
        let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
        feeds.iter().for_each(|(name, tensor)| runner.set(name, tensor).unwrap());
        runner.run().unwrap();
        let found = &runner.outputs()[0].1;
        assert_eq!((found.dtype(), found.shape()), (dtype, &drawn.shape[..]), "{about}");
        let (least, most) = range(dtype);
        let expected = drawn.multiples.iter().map(|x| (x.round_ties_even() as i64 + drawn.zero).clamp(least, most));
        let n_steps = found.i64s().into_iter().zip(expected).map(|(a, b)| (a - b).abs()).collect::<Vec<_>>();
        let n_differ = n_steps.iter().filter(|n| **n > 0).count();
        assert!(n_steps.iter().all(|n| *n <= 1), "{about}: {n_steps:?}");
        assert!(n_differ <= if drawn.is_exact { 0 } else { 1 + n_steps.len() / 50 }, "{about}: {n_differ} differ");
    }
}
