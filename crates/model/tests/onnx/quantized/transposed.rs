//! Transposed convolutions of quantized tensors, against sums of integers.

use tilewright_graph::onnx::{GraphPort, ModelFile, NodeFile};
use tilewright_graph::op::Attribute;
use tilewright_graph::{DType, Dim, Tensor};
use tilewright_ir::Target;
use tilewright_model::Runner;
use tilewright_runtime::SharedPool;

use super::{integers, multiplies_bytes, node, scale, targets};
use crate::compiled_file;

/// Case of a transposed convolution of integers.
struct TransposedCase {
    /// Channels, rows and columns of the image; without rows the convolution has one dimension.
    image: [usize; 3],
    /// Filters, and their rows and columns.
    filters: [usize; 3],
    stride: [usize; 2],
    /// Rows and columns that are cut off before and behind the result.
    pads: [usize; 4],
    /// Rows and columns added behind it.
    more: [usize; 2],
    groups: usize,
    /// Type of the weights, which is signed with a scale for each channel, else unsigned with a single one.
    has_channels: bool,
}

/// Transposed convolutions between quantizations are sums of integers, and are quantized before they are
/// concatenated with other numbers.
#[test]
fn transposed_convolutions_of_integers_give_what_integers_say() {
    let plain = TransposedCase {
        image: [32, 9, 12],
        filters: [32, 2, 2],
        stride: [2, 2],
        pads: [0; 4],
        more: [0; 2],
        groups: 1,
        has_channels: true,
    };
    let cases = [
        TransposedCase { has_channels: false, ..plain },
        TransposedCase { image: [32, 8, 8], filters: [16, 4, 4], pads: [1; 4], ..plain },
        TransposedCase { image: [64, 15, 18], filters: [64, 3, 3], pads: [1; 4], more: [1; 2], ..plain },
        TransposedCase { image: [16, 6, 9], filters: [5, 3, 5], stride: [3, 2], pads: [0, 2, 1, 1], ..plain },
        TransposedCase { image: [32, 7, 8], filters: [32, 3, 2], groups: 2, more: [1, 0], ..plain },
        TransposedCase { image: [16, 8, 8], filters: [16, 3, 3], stride: [1, 1], pads: [1; 4], ..plain },
        TransposedCase { image: [32, 0, 40], filters: [32, 1, 4], stride: [1, 2], pads: [0, 1, 0, 1], ..plain },
    ];
    for (at, target) in targets().iter().enumerate() {
        for (case, dtype) in cases.iter().zip([DType::U8, DType::I8].into_iter().cycle().skip(at)) {
            check_transposed(target, case, dtype);
        }
    }
}

fn check_transposed(target: &Target, case: &TransposedCase, dtype: DType) {
    let TransposedCase { image: [c, h, w], filters: [m, r, s], stride, pads, more, groups, has_channels } = *case;
    let about = format!("{:?} by {:?}, {dtype:?}, {}", case.image, case.filters, target.name());
    let (rows, per_group) = (h.max(1), m / groups);
    let out_h = (rows - 1) * stride[0] + r + more[0] - pads[0] - pads[2];
    let out_w = (w - 1) * stride[1] + s + more[1] - pads[1] - pads[3];
    let (least, most): (i64, i64) = if dtype == DType::U8 { (0, 255) } else { (-128, 127) };
    let (zero, plus, first) = (least + 100, least + 120, if has_channels { -125 } else { 0 });
    let x: Vec<i64> = integers(c * rows * w, least.into()).into_iter().map(|x| x as i64).collect();
    let (weights, bias) = (integers(c * per_group * r * s, first), integers(m, -900));
    let weight_zero = if has_channels { 0 } else { 117 };
    let n_scales = if has_channels { per_group } else { 1 };
    let scales: Vec<f32> = (0..n_scales).map(|at| 0.001 + 0.0001 * (at % 7) as f32).collect();
    let of_weights = |m: usize| scales[if has_channels { m % per_group } else { 0 }];
    let (scale_x, by) = (0.02f32, 0.0004 * (c / groups * r * s) as f32);

    let mut sums = vec![0i64; m * out_h * out_w];
    for (ch, i, j) in (0..c * rows * w).map(|at| (at / (rows * w), at / w % rows, at % w)) {
        for (k, tap_r, tap_s) in (0..per_group * r * s).map(|at| (at / (r * s), at / s % r, at % s)) {
            let row = (i * stride[0] + tap_r).wrapping_sub(pads[0]);
            let column = (j * stride[1] + tap_s).wrapping_sub(pads[1]);
            if row < out_h && column < out_w {
                let weight = weights[((ch * per_group + k) * r + tap_r) * s + tap_s] as i64 - weight_zero;
                let channel = ch / (c / groups) * per_group + k;
                sums[(channel * out_h + row) * out_w + column] += (x[(ch * rows + i) * w + j] - zero) * weight;
            }
        }
    }
    let area = out_h * out_w;
    let of_sum = |(at, sum): (usize, &i64)| {
        let number = (sum + bias[at / area] as i64) as f32 * (scale_x * of_weights(at / area) / by);
        (number.max(0.0).round_ties_even() as i64 + plus).clamp(least, most)
    };
    let quantized: Vec<i64> = sums.iter().enumerate().map(of_sum).collect();
    // The other part has half the scale of the result, and this one twice that.
    let other: Vec<i64> = integers(3 * area, least.into()).into_iter().map(|x| x as i64).collect();
    let again = |by: f32, zero: i64, x: i64| {
        ((((x - zero) as f32) * by).round_ties_even() as i64 + least + 90).clamp(least, most) as f64
    };
    let expected: Vec<f64> = quantized.iter().map(|x| again(0.5, plus, *x)).collect();
    let expected = [expected, other.iter().map(|x| again(2.0, zero, *x)).collect()].concat();

    let floats = |numbers: Vec<f32>| {
        let numbers: Vec<f64> = numbers.into_iter().map(f64::from).collect();
        Tensor::from_floats(DType::F32, vec![numbers.len()], &numbers)
    };
    let point = |name: &str, x: i64| (name.to_owned(), Tensor::from_integers(dtype, vec![], &[x.into()]));
    let known = |name: &str, tensor: Tensor| (name.to_owned(), tensor);
    let filters = if h == 0 { vec![c, per_group, s] } else { vec![c, per_group, r, s] };
    let (of_filters, n_zeros) = (if has_channels { DType::I8 } else { DType::U8 }, n_scales);
    let with = |node: NodeFile, attributes: Vec<(&str, Attribute)>| NodeFile {
        attributes: attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
        ..node
    };
    let spatial = |list: &[usize]| {
        let skipped = usize::from(h == 0);
        let kept = list.chunks(2).flat_map(|pair| &pair[skipped..]).map(|n| *n as i64).collect();
        Attribute::Ints(kept)
    };
    let windows = vec![
        ("strides", spatial(&stride)),
        ("pads", spatial(&pads)),
        ("output_padding", spatial(&more)),
        ("group", Attribute::Int(groups as i64)),
    ];
    let image = |name: &str, n: usize, [rows, columns]: [usize; 2]| GraphPort {
        name: name.to_owned(),
        dtype,
        dims: if h == 0 { vec![1, n, columns] } else { vec![1, n, rows, columns] }.into_iter().map(Dim::Size).collect(),
    };
    let of_numbers = |name: &str, n: usize, sizes| GraphPort { dtype: DType::F32, ..image(name, n, sizes) };
    let model = ModelFile {
        name: about.clone(),
        opset: 17,
        inputs: vec![of_numbers("x", c, [rows, w]), of_numbers("k", 3, [out_h, out_w])],
        outputs: vec![image("y", m + 3, [out_h, out_w])],
        weights: vec![
            scale("s", scale_x),
            point("z", zero),
            known("w", Tensor::from_integers(of_filters, filters, &weights)),
            known("ws", floats(scales.clone())),
            known("wz", Tensor::from_integers(of_filters, vec![n_zeros], &vec![weight_zero.into(); n_zeros])),
            known("b", Tensor::from_integers(DType::I32, vec![m], &bias)),
            known("bs", floats((0..m).map(|m| scale_x * of_weights(m)).collect())),
            scale("os", by),
            point("oz", plus),
            scale("ks", 4.0 * by),
            scale("ys", 2.0 * by),
            point("yz", least + 90),
        ],
        nodes: vec![
            node("QuantizeLinear", "x s z", "xq"),
            node("QuantizeLinear", "k ks z", "kq"),
            node("DequantizeLinear", "xq s z", "a"),
            with(node("DequantizeLinear", "w ws wz", "f"), vec![("axis", Attribute::Int(1))]),
            with(node("DequantizeLinear", "b bs", "c"), vec![("axis", Attribute::Int(0))]),
            with(node("ConvTranspose", "a f c", "o"), windows),
            node("Relu", "o", "p"),
            node("QuantizeLinear", "p os oz", "q"),
            node("DequantizeLinear", "q os oz", "d"),
            node("DequantizeLinear", "kq ks z", "e"),
            with(node("Concat", "d e", "t"), vec![("axis", Attribute::Int(1))]),
            node("QuantizeLinear", "t ys yz", "y"),
        ],
        ..ModelFile::default()
    };
    let compiled = compiled_file(&model, target);
    let tasks: Vec<String> = compiled.fused.tasks().iter().map(|(task, _)| task.to_string()).collect();
    let is_of_integers = |task: &String| {
        task.contains("conv2d") && (task.contains("i8") || task.contains("u8i7")) && task.contains("quant_")
    };
    assert_eq!(tasks.iter().any(is_of_integers), multiplies_bytes(target), "{about}: {tasks:?}");
    let mut runner = Runner::new(&compiled, &SharedPool::new(1).unwrap()).unwrap();
    let numbers = |port: &GraphPort, x: &[i64], scale: f32| {
        let shape = port.dims.iter().map(|dim| if let Dim::Size(n) = dim { *n } else { 0 }).collect::<Vec<_>>();
        let numbers: Vec<f64> = x.iter().map(|x| f64::from((x - zero) as f32 * scale)).collect();
        Tensor::from_floats(DType::F32, shape, &numbers)
    };
    runner.set("x", &numbers(&model.inputs[0], &x, scale_x)).unwrap();
    runner.set("k", &numbers(&model.inputs[1], &other, 4.0 * by)).unwrap();
    runner.run().unwrap();
    let found = runner.outputs()[0].1.floats();
    let differ = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
    assert_eq!(differ, 0, "{about}: {:?} {:?}", &found[..8], &expected[..8]);
    let mut kinds: Vec<i64> = quantized;
    kinds.sort_unstable();
    kinds.dedup();
    assert!(kinds.len() > 20, "{about}: {kinds:?}");
}
