//! Operators of older opsets; the official tests cover only the newest.

mod common;

use common::build::{Attr, single};
use common::no_files;
use tilewright_graph::{DType, Tensor, evaluate, onnx};

fn f32s(shape: &[usize], numbers: &[f64]) -> Tensor {
    Tensor::from_floats(DType::F32, shape, numbers)
}

fn i64s(numbers: &[i64]) -> Tensor {
    Tensor::vector(numbers)
}

/// Evaluates a node, and returns its first output.
fn run(op: &str, opset: i64, attributes: &[(&str, Attr)], inputs: &[Option<Tensor>]) -> Result<Tensor, String> {
    let file = single(op, opset, attributes, inputs, 1);
    let model = onnx::read(&file, &mut no_files).map_err(|e| e.to_string())?;
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let given: Vec<(&str, Tensor)> =
        names.iter().zip(inputs).filter_map(|(name, x)| Some((*name, x.clone()?))).collect();
    evaluate(&model.graph, &given).map(|mut outputs| outputs.remove(0)).map_err(|e| e.to_string())
}

#[track_caller]
fn check(op: &str, opset: i64, attributes: &[(&str, Attr)], inputs: &[Tensor], shape: &[usize], numbers: &[f64]) {
    let inputs: Vec<Option<Tensor>> = inputs.iter().cloned().map(Some).collect();
    let y = run(op, opset, attributes, &inputs).unwrap_or_else(|e| panic!("{op} {opset}: {e}"));
    assert_eq!(y.shape(), shape, "{op} {opset}");
    let close = y.floats().iter().zip(numbers).all(|(x, y)| (x - y).abs() <= 1e-6 * y.abs().max(1.0));
    assert!(close && y.n_elements() == numbers.len(), "{op} {opset}: {:?}, not {numbers:?}", y.floats());
}

#[test]
fn softmax_once_took_all_dimensions_from_one_on() {
    let x = || f32s(&[1, 2, 2], &[0.0, 0.0, 0.0, 3.0_f64.ln()]);
    check("Softmax", 11, &[], &[x()], &[1, 2, 2], &[1.0 / 6.0, 1.0 / 6.0, 1.0 / 6.0, 0.5]);
    check("Softmax", 13, &[], &[x()], &[1, 2, 2], &[0.5, 0.5, 0.25, 0.75]);
    check("Softmax", 12, &[("axis", Attr::Int(2))], &[x()], &[1, 2, 2], &[0.5, 0.5, 0.25, 0.75]);
    check("Hardmax", 11, &[], &[x()], &[1, 2, 2], &[0.0, 0.0, 0.0, 1.0]);
    // A scalar is its own maximum.
    for (op, wanted) in [("Softmax", 1.0), ("LogSoftmax", 0.0), ("Hardmax", 1.0)] {
        for axis in [0, -1] {
            check(op, 17, &[("axis", Attr::Int(axis))], &[f32s(&[], &[2.5])], &[], &[wanted]);
        }
    }
}

#[test]
fn axes_were_attributes() {
    let axes = |list: &[i64]| [("axes", Attr::Ints(list.to_vec()))];
    let x = || f32s(&[1, 2, 1], &[1.0, 2.0]);
    check("Squeeze", 11, &axes(&[2]), &[x()], &[1, 2], &[1.0, 2.0]);
    check("Squeeze", 13, &[], &[x(), i64s(&[0])], &[2, 1], &[1.0, 2.0]);
    check("Squeeze", 1, &[], &[x()], &[2], &[1.0, 2.0]);
    check("Unsqueeze", 11, &axes(&[0]), &[f32s(&[2], &[1.0, 2.0])], &[1, 2], &[1.0, 2.0]);
    check("Unsqueeze", 13, &[], &[f32s(&[2], &[1.0, 2.0]), i64s(&[-1])], &[2, 1], &[1.0, 2.0]);
    check("ReduceSum", 11, &axes(&[1]), &[x()], &[1, 1, 1], &[3.0]);
    check("ReduceSum", 13, &[], &[x(), i64s(&[1])], &[1, 1, 1], &[3.0]);
    check("ReduceMean", 13, &axes(&[1]), &[x()], &[1, 1, 1], &[1.5]);
    check("ReduceMean", 18, &[], &[x(), i64s(&[1])], &[1, 1, 1], &[1.5]);
    check("ReduceMax", 12, &axes(&[-2]), &[x()], &[1, 1, 1], &[2.0]);
    let error = run("Squeeze", 13, &axes(&[2]), &[Some(x())]).unwrap_err();
    assert!(error.contains("attribute `axes`"), "{error}");
}

#[test]
fn bounds_sizes_and_borders_were_attributes() {
    let x = || f32s(&[4], &[-2.0, 0.5, 3.0, 9.0]);
    check("Clip", 6, &[("min", Attr::Float(0.0)), ("max", Attr::Float(6.0))], &[x()], &[4], &[0.0, 0.5, 3.0, 6.0]);
    check("Clip", 11, &[], &[x(), f32s(&[], &[0.0]), f32s(&[], &[6.0])], &[4], &[0.0, 0.5, 3.0, 6.0]);
    let parts = [("starts", Attr::Ints(vec![1])), ("ends", Attr::Ints(vec![-1])), ("axes", Attr::Ints(vec![0]))];
    check("Slice", 9, &parts, &[x()], &[2], &[0.5, 3.0]);
    check("Slice", 10, &[], &[x(), i64s(&[-1]), i64s(&[-5]), i64s(&[0]), i64s(&[-2])], &[2], &[9.0, 0.5]);
    // A step that would overflow, in either direction, is never taken.
    for (start, end, step) in [(1, i64::MAX, i64::MAX), (1, i64::MIN, i64::MIN), (1, i64::from(i32::MAX), 3)] {
        check("Slice", 13, &[], &[x(), i64s(&[start]), i64s(&[end]), i64s(&[0]), i64s(&[step])], &[1], &[0.5]);
    }
    let pads = [("pads", Attr::Ints(vec![1, 2])), ("value", Attr::Float(7.0))];
    check("Pad", 10, &pads, &[f32s(&[1], &[1.0])], &[4], &[7.0, 1.0, 7.0, 7.0]);
    check("Pad", 11, &[], &[f32s(&[1], &[1.0]), i64s(&[1, 0])], &[2], &[0.0, 1.0]);
    check("Split", 11, &[("split", Attr::Ints(vec![1, 3]))], &[x()], &[1], &[-2.0]);
    check("Split", 13, &[], &[x(), i64s(&[3, 1])], &[3], &[-2.0, 0.5, 3.0]);
    check("Split", 18, &[("num_outputs", Attr::Int(1))], &[x()], &[4], &[-2.0, 0.5, 3.0, 9.0]);
    check("Reshape", 1, &[("shape", Attr::Ints(vec![2, -1]))], &[x()], &[2, 2], &[-2.0, 0.5, 3.0, 9.0]);
    check("Reshape", 13, &[], &[f32s(&[2, 0], &[]), i64s(&[0, 0])], &[2, 0], &[]);
    check("Reshape", 14, &[("allowzero", Attr::Int(1))], &[f32s(&[2, 0], &[]), i64s(&[0, 3])], &[0, 3], &[]);
    check("TopK", 9, &[("k", Attr::Int(2))], &[x()], &[2], &[9.0, 3.0]);
    check(
        "Upsample",
        7,
        &[("scales", Attr::Floats(vec![2.0]))],
        &[f32s(&[2], &[1.0, 2.0])],
        &[4],
        &[1.0, 1.0, 2.0, 2.0],
    );
}

#[test]
fn normalisation_and_dropout_at_inference() {
    let x = || f32s(&[1, 2, 1, 1], &[1.0, 2.0]);
    let inputs =
        || [x(), f32s(&[2], &[1.0, 2.0]), f32s(&[2], &[0.5, 0.0]), f32s(&[2], &[1.0, 0.0]), f32s(&[2], &[1.0, 4.0])];
    let epsilon = || [("epsilon", Attr::Float(0.0))];
    for opset in [7, 9, 14, 15] {
        check("BatchNormalization", opset, &epsilon(), &inputs(), &[1, 2, 1, 1], &[0.5, 2.0]);
    }
    let given: Vec<Option<Tensor>> = inputs().into_iter().map(Some).collect();
    let old = [("spatial", Attr::Int(0))];
    assert!(run("BatchNormalization", 7, &old, &given).unwrap_err().contains("not supported"));
    check("Dropout", 7, &[("ratio", Attr::Float(0.5))], &[x()], &[1, 2, 1, 1], &[1.0, 2.0]);
    check("Dropout", 12, &[], &[x(), f32s(&[], &[0.5])], &[1, 2, 1, 1], &[1.0, 2.0]);
    let training = Tensor::from_integers(DType::Bool, [], &[1]);
    let given = [Some(x()), Some(f32s(&[], &[0.5])), Some(training)];
    assert!(run("Dropout", 13, &[], &given).unwrap_err().contains("training is not supported"));
}

#[test]
fn resize_by_version() {
    let x = || f32s(&[1, 1, 1, 2], &[1.0, 2.0]);
    let scales = || f32s(&[4], &[1.0, 1.0, 1.0, 2.0]);
    let empty = || f32s(&[0], &[]);
    // The first version starts at the corner, later ones at the pixels' centres.
    let linear = || ("mode", Attr::Text("linear"));
    check("Resize", 10, &[linear()], &[x(), scales()], &[1, 1, 1, 4], &[1.0, 1.5, 2.0, 2.0]);
    check("Resize", 11, &[linear()], &[x(), empty(), scales()], &[1, 1, 1, 4], &[1.0, 1.25, 1.75, 2.0]);
    check("Resize", 13, &[linear()], &[x(), empty(), scales()], &[1, 1, 1, 4], &[1.0, 1.25, 1.75, 2.0]);
    let corners = || ("coordinate_transformation_mode", Attr::Text("align_corners"));
    let wanted = [1.0, 4.0 / 3.0, 5.0 / 3.0, 2.0];
    check("Resize", 11, &[linear(), corners()], &[x(), empty(), scales()], &[1, 1, 1, 4], &wanted);
    // Corners stay aligned even if the factor does not give an integer size, such as 5 · 0.7.
    let row = f32s(&[1, 1, 1, 5], &[1.0, 2.0, 3.0, 4.0, 5.0]);
    let scales_of = |factor: f64| f32s(&[4], &[1.0, 1.0, 1.0, factor]);
    check("Resize", 19, &[linear(), corners()], &[row, empty(), scales_of(0.7)], &[1, 1, 1, 3], &[1.0, 3.0, 5.0]);
    // Sizes and places of nearest neighbours are those of f32: 3 · f32(5 / 3) is 5, and 4 / f32(4 / 3) is 3.
    let row = |n: usize| Some(f32s(&[1, 1, 1, n], &(0..n).map(|x| x as f64).collect::<Vec<_>>()));
    let nearest = |n: usize, factor: f32, attributes: &[(&str, Attr)]| {
        let inputs = [row(n), Some(empty()), Some(scales_of(f64::from(factor)))];
        run("Resize", 13, attributes, &inputs).unwrap().floats()
    };
    assert_eq!(nearest(3, 5.0 / 3.0, &[]), [0.0, 0.0, 1.0, 2.0, 2.0]);
    let from_corner =
        [("coordinate_transformation_mode", Attr::Text("asymmetric")), ("nearest_mode", Attr::Text("floor"))];
    assert_eq!(nearest(6, 4.0 / 3.0, &from_corner), [0.0, 0.0, 1.0, 2.0, 3.0, 3.0, 4.0, 5.0]);
    let inputs = [Some(x()), None, None, Some(i64s(&[1, 1, 1, 3]))];
    assert_eq!(run("Resize", 13, &[], &inputs).unwrap().floats(), [1.0, 1.0, 2.0]);
    // 4.5 / f32(6 / 20) - 0.5 is the middle of two pixels, though just below it in f32.
    let inputs = [row(20), None, None, Some(i64s(&[1, 1, 1, 6]))];
    let up = [("nearest_mode", Attr::Text("round_prefer_ceil"))];
    assert_eq!(run("Resize", 13, &up, &inputs).unwrap().floats(), [1.0, 5.0, 8.0, 11.0, 15.0, 18.0]);
}

#[test]
fn integers_are_exact() {
    let big = 9_007_199_254_740_993_i128;
    let x = Tensor::from_integers(DType::I64, [1], &[big]);
    let y = run("Add", 14, &[], &[Some(x.clone()), Some(i64s(&[0]))]).unwrap();
    assert_eq!(y.integers(), [big]);
    let y = run("Div", 14, &[], &[Some(i64s(&[-7])), Some(i64s(&[2]))]).unwrap();
    assert_eq!(y.integers(), [-3]);
    let y = run("Mod", 13, &[], &[Some(i64s(&[-7])), Some(i64s(&[2]))]).unwrap();
    assert_eq!(y.integers(), [1]);
    let of = |op: &str, version: i64, inputs: &[&Tensor]| {
        let inputs: Vec<Option<Tensor>> = inputs.iter().map(|&x| Some(x.clone())).collect();
        run(op, version, &[], &inputs).unwrap().integers()
    };
    let integers = |dtype: DType, shape: &[usize], numbers: &[i128]| Tensor::from_integers(dtype, shape, numbers);
    for op in ["Div", "Mod"] {
        assert_eq!(of(op, 13, &[&x, &i64s(&[0])]), [0], "as kernels have it");
    }
    let least = integers(DType::I64, &[1], &[i64::MIN.into()]);
    assert_eq!(of("Div", 14, &[&least, &i64s(&[-1])]), [i64::MIN.into()]);
    assert_eq!(of("Pow", 15, &[&i64s(&[3]), &i64s(&[70])]), [i128::from(3_i64.wrapping_pow(70))]);
    // Sums of products modulo 2 to the number of bits.
    let a = integers(DType::I64, &[1, 2], &[big, i64::MAX.into()]);
    let b = integers(DType::I64, &[2, 1], &[3, 2]);
    let product = (3 * big + 2 * i128::from(i64::MAX)) as i64;
    assert_eq!(of("MatMul", 13, &[&a, &b]), [product.into()]);
    assert_eq!(of("Gemm", 13, &[&a, &b]), [product.into()]);
    let equation = [("equation", Attr::Text("ij,jk->ik"))];
    let sum = run("Einsum", 12, &equation, &[Some(a), Some(b)]).unwrap();
    assert_eq!(sum.integers(), [product.into()]);
    // Neighbouring integers that are equal as doubles.
    let near = integers(DType::I64, &[3], &[big, big + 1, big - 1]);
    assert_eq!(of("ArgMax", 13, &[&near]), [1]);
    assert_eq!(of("Unique", 11, &[&near]).len(), 3);
    assert_eq!(of("ReduceSum", 13, &[&near]), [3 * big]);
    let bytes = integers(DType::I8, &[2], &[-128, 100]);
    assert_eq!(of("Abs", 13, &[&bytes]), [-128, 100]);
    assert_eq!(of("Add", 14, &[&bytes, &bytes]), [0, -56]);
    let cast = [("to", Attr::Int(DType::U8.to_onnx().into()))];
    let cut = run("Cast", 13, &cast, &[Some(f32s(&[3], &[-1.0, 300.7, 255.9]))]).unwrap();
    assert_eq!(cut.integers(), [255, 44, 255]);
}
