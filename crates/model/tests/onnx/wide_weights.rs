//! Quantized weights that do not fit i8 after subtraction of their zero points, bit for bit.

use tilewright_device::host;
use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{Bindings, DType, Dim, Tensor, onnx, specialise};
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use crate::common::no_files;
use crate::compiled_for;

/// List of bytes that repeats after a number that does not divide any size.
fn bytes(n: usize, step: usize) -> Vec<i64> {
    (0..n).map(|at| (at * step % 257).min(255) as i64).collect()
}

fn tensor(dtype: DType, shape: &[usize], numbers: &[i64]) -> Tensor {
    Tensor::from_integers(dtype, shape, &numbers.iter().map(|&x| x.into()).collect::<Vec<i128>>())
}

fn port(name: &str, dtype: DType, shape: &[usize]) -> GraphPort {
    GraphPort { name: name.to_owned(), dtype, dims: shape.iter().copied().map(Dim::Size).collect() }
}

fn node(op: &str, inputs: &[&str], output: &str) -> NodeFile {
    NodeFile {
        op: op.to_owned(),
        inputs: inputs.iter().map(|&name| name.to_owned()).collect(),
        outputs: vec![output.to_owned()],
        ..NodeFile::default()
    }
}

/// Runs a model; returns its only output, and the workloads of its kernels.
fn run_model(model: &ModelFile, given: &[(&str, &Tensor)]) -> (Tensor, Vec<String>) {
    let graph = onnx::read(&onnx::write(model).into(), &mut no_files).unwrap().graph;
    let special = specialise(&graph, &Bindings::default());
    assert!(special.problems.is_empty(), "{:?}", special.problems);
    let compiled = compiled_for(&special.graph, &host::target()).unwrap();
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    given.iter().for_each(|(name, x)| runner.set(name, x).unwrap());
    runner.run().unwrap();
    let tasks = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
    (runner.outputs().remove(0).1, tasks)
}

/// Runs a node with one output; returns the result, and the workloads of the model's kernels.
fn run(
    op: &str,
    attributes: &[(&str, Vec<i64>)],
    inputs: &[(&str, Tensor, bool)],
    output: (DType, &[usize]),
) -> (Vec<i64>, Vec<String>) {
    let attribute = |(name, numbers): &(&str, Vec<i64>)| {
        let value = if *name == "group" { Attribute::Int(numbers[0]) } else { Attribute::Ints(numbers.clone()) };
        ((*name).to_owned(), value)
    };
    let (known, given): (Vec<_>, Vec<_>) = inputs.iter().partition(|(.., is_known)| *is_known);
    let names: Vec<&str> = inputs.iter().map(|(name, ..)| *name).collect();
    let model = ModelFile {
        name: "wide".to_owned(),
        opset: 17,
        inputs: given.iter().map(|(name, x, _)| port(name, x.dtype(), x.shape())).collect(),
        outputs: vec![port("y", output.0, output.1)],
        weights: known.iter().map(|(name, x, _)| ((*name).to_owned(), x.clone())).collect(),
        nodes: vec![NodeFile { attributes: attributes.iter().map(attribute).collect(), ..node(op, &names, "y") }],
        ..ModelFile::default()
    };
    let given: Vec<(&str, &Tensor)> = given.iter().map(|(name, x, _)| (*name, x)).collect();
    let (found, tasks) = run_model(&model, &given);
    (found.i64s(), tasks)
}

/// Products of u8 by u8, with zero points of operand B at its limits and in between, for all columns or for
/// each, and constant and variable ones of operand A.
#[test]
fn products_by_wide_weights_are_of_integers() {
    let (m, k, n) = (7, 50, 19);
    let (a, b) = (bytes(m * k, 89), bytes(k * n, 61));
    for (zeros, is_known) in [(vec![0], true), (vec![131], false), (vec![255], false), (bytes(n, 40), true)] {
        let at = |at: usize| zeros[at % zeros.len()];
        let expected: Vec<i64> = (0..m * n)
            .map(|y| (0..k).map(|k0| (a[y / n * k + k0] - 117) * (b[k0 * n + y % n] - at(y % n))).sum())
            .collect();
        let shape: &[usize] = if zeros.len() == 1 { &[] } else { &[n] };
        let inputs = [
            ("a", tensor(DType::U8, &[m, k], &a), false),
            ("b", tensor(DType::U8, &[k, n], &b), true),
            ("az", tensor(DType::U8, &[], &[117]), is_known),
            ("bz", tensor(DType::U8, shape, &zeros), true),
        ];
        let (found, tasks) = run("MatMulInteger", &[], &inputs, (DType::I32, &[m, n]));
        assert_eq!(found, expected, "zero points {zeros:?}");
        let has_dots = host::target().dot4_lanes([false, true]) > 0;
        assert!(!has_dots || tasks.iter().any(|task| task.contains("dtype=u8i8")), "{tasks:?}");
    }
}

/// Convolutions over one to three dimensions, grouped and depthwise, with u8 filters, padded with a zero
/// point known only at run time.
#[test]
fn convolutions_by_wide_weights_are_exact() {
    // Input channels, image, filters, their size, padding and groups, and whether kernels use integers.
    type Case = (usize, &'static [usize], usize, &'static [usize], usize, usize, bool);
    let cases: [Case; 6] = [
        (16, &[7, 6], 32, &[3, 3], 1, 1, true),
        (5, &[9, 8], 6, &[3, 3], 1, 1, true),
        (16, &[6, 7], 32, &[3, 3], 1, 2, true),
        (16, &[8, 8], 16, &[3, 3], 1, 16, false),
        (16, &[37], 24, &[5], 2, 1, true),
        (4, &[5, 4, 6], 8, &[3, 3, 3], 1, 1, true),
    ];
    for (c, image, k, kernel, pad, groups, is_of_integers) in cases {
        for zero in [0, 133] {
            let rank = image.len();
            // With sizes of 1 in front, all have three dimensions.
            let in_three = |sizes: &[usize], rest: usize| -> [usize; 3] {
                [&vec![rest; 3 - rank], sizes].concat().try_into().unwrap()
            };
            let (size, window) = (in_three(image, 1), in_three(kernel, 1));
            let pads = in_three(&vec![pad; rank], 0);
            let out: [usize; 3] = std::array::from_fn(|d| size[d] + 2 * pads[d] + 1 - window[d]);
            let (area, taps, places) =
                (size.iter().product::<usize>(), window.iter().product::<usize>(), out.iter().product::<usize>());
            let of_group = c / groups;
            let (x, w) = (bytes(c * area, 89), bytes(k * of_group * taps, 61));
            let place =
                |at: usize, sizes: [usize; 3]| [at / sizes[2] / sizes[1], at / sizes[2] % sizes[1], at % sizes[2]];
            let mut expected = Vec::new();
            for (filter, y) in (0..k * places).map(|at| (at / places, place(at % places, out))) {
                let mut sum = 0;
                for (channel, tap) in (0..of_group * taps).map(|at| (at / taps, at % taps)) {
                    let (at, first) = (place(tap, window), filter / (k / groups) * of_group);
                    let from: [usize; 3] = std::array::from_fn(|d| (y[d] + at[d]).wrapping_sub(pads[d]));
                    if (0..3).all(|d| from[d] < size[d]) {
                        let pixel = (from[0] * size[1] + from[1]) * size[2] + from[2];
                        let weight = w[(filter * of_group + channel) * taps + tap] - zero;
                        sum += (x[(first + channel) * area + pixel] - 117) * weight;
                    }
                }
                expected.push(sum);
            }
            let inputs = [
                ("x", tensor(DType::U8, &[&[1, c], image].concat(), &x), false),
                ("w", tensor(DType::U8, &[&[k, of_group], kernel].concat(), &w), true),
                ("xz", tensor(DType::U8, &[], &[117]), false),
                ("wz", tensor(DType::U8, &[], &[zero]), true),
            ];
            let attributes = [("pads", vec![pad as i64; 2 * rank]), ("group", vec![groups as i64])];
            let shape = [&[1, k], &out[3 - rank..]].concat();
            let (found, tasks) = run("ConvInteger", &attributes, &inputs, (DType::I32, &shape));
            let about = format!("{c} channels of {image:?} by {k} filters of {kernel:?} in {groups} groups: {tasks:?}");
            assert_eq!(found, expected, "{about}");
            let has_dots = host::target().dot4_lanes([false, true]) > 0;
            assert_eq!(tasks.iter().any(|task| task.contains("dtype=u8i8")), has_dots && is_of_integers, "{about}");
        }
    }
}

/// Products with weights of more than a byte, which no 8-bit kernel supports, however often it reads an
/// input.
#[test]
fn weights_of_more_than_a_byte_stay_numbers() {
    let (m, k, n) = (3, 8, 5);
    let x = bytes(m * k, 89);
    for (dtype, step) in [(DType::I16, 257), (DType::I32, 16_777_259)] {
        let w: Vec<i64> = bytes(k * n, 61).into_iter().map(|x| (x - 127) * step).collect();
        let one = |name: &str, x: f64| (name.to_owned(), Tensor::scalar(DType::F32, x));
        let model = ModelFile {
            name: "wide".to_owned(),
            opset: 21,
            inputs: vec![port("x", DType::U8, &[m, k])],
            outputs: vec![port("y", DType::F32, &[m, n])],
            weights: vec![one("xs", 1.0), one("ws", 1.0), ("w".to_owned(), tensor(dtype, &[k, n], &w))],
            nodes: vec![
                node("DequantizeLinear", &["x", "xs"], "a"),
                node("DequantizeLinear", &["w", "ws"], "b"),
                node("MatMul", &["a", "b"], "y"),
            ],
            ..ModelFile::default()
        };
        let (found, _) = run_model(&model, &[("x", &tensor(DType::U8, &[m, k], &x))]);
        for (at, found) in found.floats().into_iter().enumerate() {
            let terms = (0..k).map(|i| x[at / n * k + i] * w[i * n + at % n]);
            let (sum, size) = terms.fold((0, 0), |(sum, size), term| (sum + term, size + term.abs()));
            assert!((found - sum as f64).abs() <= 1e-6 * size as f64, "{dtype}: {found}, and should be {sum}");
        }
    }
}

/// Products of two variable tensors, as in attention, with quantized results.
#[test]
fn products_of_two_quantized_tensors_are_of_matrices() {
    let (batch, m, k, n) = (3, 9, 40, 13);
    let (a, b) = (bytes(batch * m * k, 89), bytes(batch * k * n, 61));
    let (scales, zeros) = ([0.02f32, 0.03, 1.7], [117, 140, 125]);
    let factor = scales[0] * scales[1] / scales[2];
    let expected: Vec<i64> = (0..batch * m * n)
        .map(|at| {
            let (one, row, column) = (at / n / m, at / n % m, at % n);
            let term =
                |k0: usize| (a[(one * m + row) * k + k0] - zeros[0]) * (b[(one * k + k0) * n + column] - zeros[1]);
            let sum: i64 = (0..k).map(term).sum();
            ((sum as f32 * factor).round_ties_even() as i64 + zeros[2]).clamp(0, 255)
        })
        .collect();
    let one = |x: f32| Tensor::scalar(DType::F32, x.into());
    let zero = |x: i64| tensor(DType::U8, &[], &[x]);
    let inputs = [
        ("a", tensor(DType::U8, &[batch, m, k], &a), false),
        ("as", one(scales[0]), true),
        ("az", zero(zeros[0]), true),
        ("b", tensor(DType::U8, &[batch, k, n], &b), false),
        ("bs", one(scales[1]), true),
        ("bz", zero(zeros[1]), true),
        ("ys", one(scales[2]), true),
        ("yz", zero(zeros[2]), true),
    ];
    let (found, tasks) = run("QLinearMatMul", &[], &inputs, (DType::U8, &[batch, m, n]));
    assert_eq!(found, expected, "{tasks:?}");
    let has_dots = host::target().dot4_lanes([false, true]) > 0;
    assert!(!has_dots || tasks.iter().any(|task| task.contains("matmul:")), "{tasks:?}");
}
