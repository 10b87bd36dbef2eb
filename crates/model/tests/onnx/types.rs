//! Operators on rarely used types: kernels and C functions, compared with the reference.

use tilewright_graph::{DType, Tensor};
use tilewright_model::Outline;

use crate::by_both;
use crate::common::build::{Attr, single};

/// Elements of a type, of either sign if it is signed.
fn elements(dtype: DType, shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>();
    match dtype.is_float() {
        true => {
            Tensor::from_floats(dtype, shape, &(0..n).map(|at| ((at * 37) % 23) as f64 / 9.7 - 1.1).collect::<Vec<_>>())
        }
        false => Tensor::from_integers(dtype, shape, &(0..n as i128).map(|at| at * 37 % 23 - 7).collect::<Vec<_>>()),
    }
}

fn whole(dtype: DType, numbers: &[i128]) -> Tensor {
    Tensor::from_integers(dtype, [numbers.len()], numbers)
}

/// Checks an operator, which must not run on the reference evaluator; floats have a relative tolerance of
/// 1e-12.
fn check(
    op: &str,
    opset: i64,
    attributes: &[(&str, Attr)],
    inputs: &[Option<Tensor>],
    n_outputs: usize,
) -> Vec<Tensor> {
    let about = format!("{op} of {}", inputs.iter().flatten().next().expect("an input").ty());
    let (compiled, results) = by_both(&about, single(op, opset, attributes, inputs, n_outputs), inputs);
    assert!(Outline::of(&compiled.fused).without_code.is_empty(), "{about} has no code");
    for (found, expected) in &results {
        let is_near =
            |(x, y): (&f64, &f64)| x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= 1e-12 * y.abs().max(1.0);
        let are_near = match expected.dtype().is_float() {
            true => found.floats().iter().zip(&expected.floats()).all(is_near),
            false => found == expected,
        };
        let numbers = (found.floats(), expected.floats());
        assert!(found.ty() == expected.ty() && are_near, "{about}: {:?}, and should be {:?}", numbers.0, numbers.1);
    }
    results.into_iter().map(|(_, expected)| expected).collect()
}

#[test]
fn a_number_is_looked_up_at_a_number() {
    let at = |n: i128| Some(Tensor::from_integers(DType::I64, [], &[n]));
    for dtype in [DType::F32, DType::U8, DType::I64] {
        for n in [0, 4, -2] {
            let found = check("Gather", 13, &[], &[Some(elements(dtype, &[5])), at(n)], 1);
            assert_eq!(found[0].shape(), [0; 0]);
        }
        check("Gather", 13, &[("axis", Attr::Int(1))], &[Some(elements(dtype, &[1, 5])), at(3)], 1);
    }
}

#[test]
fn recurrent_networks_of_doubles_have_code() {
    let f64s = |shape: &[usize]| Some(elements(DType::F64, shape));
    let lengths = Some(whole(DType::I32, &[4, 2]));
    let hidden = || ("hidden_size", Attr::Int(3));
    let both = || ("direction", Attr::Text("bidirectional"));
    check("RNN", 22, &[hidden()], &[f64s(&[2, 2, 4]), f64s(&[1, 3, 4]), f64s(&[1, 3, 3])], 2);
    let inputs =
        [f64s(&[4, 2, 4]), f64s(&[1, 9, 4]), f64s(&[1, 9, 3]), f64s(&[1, 18]), lengths.clone(), f64s(&[1, 2, 3])];
    for behind in [0, 1] {
        let attributes = [hidden(), ("direction", Attr::Text("reverse")), ("linear_before_reset", Attr::Int(behind))];
        check("GRU", 22, &attributes, &inputs, 2);
    }
    let (all, weights) = (f64s(&[4, 2, 4]), [f64s(&[2, 12, 4]), f64s(&[2, 12, 3]), f64s(&[2, 24])]);
    let states = [lengths, f64s(&[2, 2, 3]), f64s(&[2, 2, 3]), f64s(&[2, 9])];
    check("LSTM", 22, &[hidden(), both()], &[&[all][..], &weights, &states].concat(), 3);
    check("LSTM", 22, &[hidden(), both(), ("layout", Attr::Int(1))], &[&[f64s(&[2, 4, 4])][..], &weights].concat(), 3);
}

#[test]
fn functions_in_c_take_all_types_of_their_operators() {
    let pool = |columns: i64| {
        let lists = [("kernel_shape", vec![2, 3]), ("pads", vec![0, 1, 1, 1]), ("strides", vec![2, 2])];
        let lists = lists.into_iter().map(|(name, list)| (name, Attr::Ints(list)));
        lists.chain([("storage_order", Attr::Int(columns))]).collect::<Vec<_>>()
    };
    for dtype in [DType::F64, DType::I8, DType::U8] {
        for columns in [0, 1] {
            check("MaxPool", 12, &pool(columns), &[Some(elements(dtype, &[1, 2, 4, 6]))], 2);
        }
    }
    let nan = Tensor::from_floats(DType::F64, [1, 1, 2, 3], &[1.0, f64::NAN, f64::NEG_INFINITY, 1e300, -1.0, 2.0]);
    check("MaxPool", 12, &pool(0), &[Some(nan)], 2);
    let regions = Tensor::from_floats(DType::F64, [2, 4], &[0.1, 0.0, 3.9, 4.0, 1.0, 1.3, 5.0, 3.0]);
    let image = Some(elements(DType::F64, &[2, 1, 5, 6]));
    let inputs = [image, Some(regions), Some(whole(DType::I64, &[0, 1]))];
    check("RoiAlign", 16, &[("output_height", Attr::Int(2)), ("output_width", Attr::Int(3))], &inputs, 1);
}

#[test]
fn images_of_other_types_are_sampled() {
    let grid = |dtype: DType| Some(elements(dtype, &[1, 2, 3, 2]));
    for dtype in [DType::F64, DType::I32, DType::U8] {
        let image = Some(elements(dtype, &[1, 2, 4, 5]));
        for mode in ["nearest", "linear", "cubic"] {
            let attributes = [("mode", Attr::Text(mode)), ("padding_mode", Attr::Text("border"))];
            check("GridSample", 20, &attributes, &[image.clone(), grid(DType::F64)], 1);
            check("GridSample", 20, &attributes, &[image.clone(), grid(DType::F32)], 1);
        }
        let region = Tensor::from_floats(DType::F64, [8], &[0.0, 0.0, 0.2, 0.1, 1.0, 1.0, 0.8, 1.2]);
        let inputs = [image, Some(region), None, Some(whole(DType::I64, &[1, 2, 3, 4]))];
        // Interpolated integers are truncated, so a last digit would matter.
        let mode = if dtype.is_float() { "linear" } else { "nearest" };
        let attributes = [
            ("mode", Attr::Text(mode)),
            ("coordinate_transformation_mode", Attr::Text("tf_crop_and_resize")),
            ("extrapolation_value", Attr::Float(2.0)),
        ];
        check("Resize", 19, &attributes, &inputs, 1);
    }
    let maps = Some(elements(DType::F64, &[2, 2, 3]));
    check("AffineGrid", 20, &[], &[maps, Some(whole(DType::I64, &[2, 1, 3, 4]))], 1);
}

#[test]
fn transforms_and_attention_of_doubles_have_code() {
    let f64s = |shape: &[usize]| Some(elements(DType::F64, shape));
    let along = Tensor::from_integers(DType::I64, Vec::new(), &[1]);
    check("DFT", 20, &[("inverse", Attr::Int(1))], &[f64s(&[2, 5, 2]), None, Some(along)], 1);
    let step = Tensor::from_integers(DType::I64, Vec::new(), &[4]);
    for shape in [&[1, 16, 1][..], &[2, 16]] {
        check("STFT", 17, &[], &[f64s(shape), Some(step.clone()), f64s(&[8])], 1);
    }
    check("Attention", 23, &[], &[f64s(&[1, 2, 3, 4]), f64s(&[1, 2, 5, 4]), f64s(&[1, 2, 5, 4])], 1);
}

#[test]
fn functions_of_integers_have_code() {
    for dtype in [DType::I8, DType::U8, DType::I32, DType::I64] {
        let x = Some(elements(dtype, &[3, 7]));
        for (bias, lambd) in [(1.0, 1.5), (0.5, 2.0), (2.0, 1e9)] {
            check(
                "Shrink",
                9,
                &[("bias", Attr::Float(bias)), ("lambd", Attr::Float(lambd))],
                std::slice::from_ref(&x),
                1,
            );
        }
    }
    let far = whole(DType::I64, &[i64::MAX.into(), i64::MIN.into(), (1 << 53) + 1, -1, 0]);
    check("Shrink", 9, &[("bias", Attr::Float(1.0)), ("lambd", Attr::Float(1.0))], &[Some(far)], 1);
    let x = Tensor::from_integers(DType::I32, [3], &[-7, 300, 12]);
    let scale = Tensor::from_floats(DType::F32, [], &[2.5]);
    let zero = Tensor::from_integers(DType::U8, Vec::new(), &[3]);
    check("QuantizeLinear", 21, &[], &[Some(x), Some(scale), Some(zero)], 1);
}

#[test]
fn means_and_norms_of_integers_have_code() {
    let axes = || Some(whole(DType::I64, &[1]));
    for dtype in [DType::I32, DType::I64, DType::U64] {
        for op in ["ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"] {
            let list: Vec<i128> = (0..3 * 49).map(|at| if at < 49 { 41 } else { at * 37 % 23 + 1 }).collect();
            check(op, 18, &[], &[Some(Tensor::from_integers(dtype, [3, 49], &list)), axes()], 1);
        }
    }
    // The sum overflows the type.
    let large = Tensor::from_integers(DType::I32, [1, 3], &[2_000_000_000, 2_000_000_001, 1_999_999_999]);
    let mean = check("ReduceMean", 18, &[], &[Some(large), axes()], 1);
    assert_eq!(mean[0].integers(), [2_000_000_000]);
}

#[test]
fn reductions_over_no_dimensions_map_each_element() {
    let x = || Tensor::from_floats(DType::F64, [3], &[1.5, -2.0, 3.0]);
    let log = [1.5f64.ln(), f64::NAN, 3f64.ln()];
    let same = [1.5, -2.0, 3.0];
    let table = [
        ("ReduceL1", [1.5, 2.0, 3.0]),
        ("ReduceL2", [1.5, 2.0, 3.0]),
        ("ReduceLogSum", log),
        ("ReduceLogSumExp", same),
        ("ReduceMax", same),
        ("ReduceMean", same),
        ("ReduceMin", same),
        ("ReduceProd", same),
        ("ReduceSum", same),
        ("ReduceSumSquare", [2.25, 4.0, 9.0]),
    ];
    for (op, expected) in table {
        let found = check(op, 18, &[("noop_with_empty_axes", Attr::Int(1))], &[Some(x())], 1);
        assert!(found[0].floats().iter().zip(expected).all(|(x, y)| *x == y || x.is_nan() && y.is_nan()), "{op}");
        let scalar = Tensor::from_floats(DType::F64, Vec::new(), &[-2.0]);
        let found = check(op, 18, &[], &[Some(scalar)], 1);
        assert!(found[0].floats()[0] == expected[1] || expected[1].is_nan(), "{op}");
    }
}

#[test]
fn zeros_of_both_signs_are_equal_to_top_k_and_nan_is_the_largest() {
    let list = [-0.0, 1.0, 0.0, f64::NAN, -0.0, -f64::NAN, -1.0];
    for dtype in [DType::F32, DType::F64] {
        let x = || Some(Tensor::from_floats(dtype, [7], &list));
        for (is_largest, places) in [(1, [3, 5, 1, 0, 2, 4, 6]), (0, [6, 0, 2, 4, 1, 3, 5])] {
            let found =
                check("TopK", 11, &[("largest", Attr::Int(is_largest))], &[x(), Some(whole(DType::I64, &[7]))], 2);
            assert_eq!(found[1].integers(), places);
        }
    }
}

/// Borders of windows are below all integers of a type, of which each here is negative.
#[test]
fn borders_of_pooled_integers_are_the_least_ones() {
    let numbers: Vec<i128> = (0..50).map(|at| at * 37 % 23 - 60).collect();
    let ints = |numbers: &[i64]| Attr::Ints(numbers.to_vec());
    let attributes = [("kernel_shape", ints(&[3, 3])), ("pads", ints(&[1; 4])), ("strides", ints(&[2, 2]))];
    check("MaxPool", 12, &attributes, &[Some(Tensor::from_integers(DType::I8, [1, 2, 5, 5], &numbers))], 1);
}
